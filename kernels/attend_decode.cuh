// Attention for few queries over many keys, on the tensor cores of compute capability 8.0 and later. What it costs is
// the reading of keys and values, once.
//
// A row is a query of one head. The rows of the H/G heads that share a key/value head are numbered
// token * (H/G) + head in group; a block has 16 of them and looks at one part of the keys, and grid.y counts the pieces
// of WIDTH value columns where one block does not average them all. The keys that the block's rows can see at all are
// cut into parts as even as tiles of 16 keys allow.
//
// In a block each warp has tiles of its own, every WARPS-th of the part, and a ring of STAGES of them in shared memory:
//
//     wait for the keys | products, for the phase of both parts | copy the keys STAGES tiles ahead into their place
//     scores, greatest score, weights
//     wait for the values | weights times values | copy the values STAGES tiles ahead into their place
//
// Keys and values are copy groups of their own, so 2 STAGES - 1 groups are under way while one is waited for, and
// warps meet only at the end. Rows of keys that no row of the block can see, padding among them, are not read: zeros
// take their place.
//
// The softmax is online: m is a row's greatest score in log2, l the sum of 2^(score - m), o that of 2^(score - m) * v.
// At the end the warps' o and l are added in the order of the warps, and where there are several parts, `attend_merge`
// adds those. Nothing depends on the order in which blocks or warps run.
//
// Registers hold products as mma.m16n8k16 leaves them: element e of block i is at row 8 (e / 2) + lane / 4 and at key
// 8 i + 2 (lane % 4) + e % 2. `a` = e / 2 counts the rows of a thread.
//
// Shared memory holds rows of PITCH = 2 WIDTH + 16 bytes: with an odd number of 16-byte chunks in a row, eight rows of
// one column lie in different banks.
#pragma once
#include "score.cuh"
#include "tokens.cuh"

namespace decode {

constexpr int ROWS = 16, KEYS = 16;

// Where the rows of one block stand, padding aside.
struct RowBounds {
    int first, last;  // positions; first > last where all is padding
    int segment_first, segment_last;
};

// Keys first .. end, counted in tiles.
struct TileRange {
    int first, end;
};

template <class T_, class Score_, int WIDTH_, int VALUES_, int WARPS_, int STAGES_> struct DecodeKernel {
    using T = T_;
    using Score = Score_;
    static constexpr int WIDTH = WIDTH_, VALUES = VALUES_, WARPS = WARPS_, STAGES = STAGES_;
    static constexpr int THREADS = 32 * WARPS;
    static constexpr int PITCH = 2 * WIDTH + 16;
    static constexpr int CHUNKS = WIDTH / 8;           // of 16 bytes
    static constexpr int PASS_ROWS = 32 / CHUNKS;      // that a warp copies at once, a lane one chunk
    static constexpr int STEPS = WIDTH / 16;
    static constexpr int COLUMN_BLOCKS = WIDTH / 8;
    static constexpr int TILE_BYTES = KEYS * PITCH;
    static constexpr int RING_BYTES = STAGES * (1 + VALUES) * TILE_BYTES;
    static constexpr int COLUMNS = VALUES * WIDTH;     // that a block averages
    static constexpr int SUM_PITCH = COLUMNS + 8;      // floats, in the exchange at the end
    // Whether registers hold the queries; else they are read from shared memory for each tile.
    static constexpr bool HOLDS_QUERIES = VALUES == 1 && (WIDTH <= 64 || (WIDTH == 128 && !Score::PHASE));
    static_assert(32 % CHUNKS == 0, "a pass copies whole rows");
    static_assert(ROWS * SUM_PITCH * 4 <= RING_BYTES, "a warp's ring holds its averages at the end");
    static_assert(WARPS * ROWS * 8 <= ROWS * PITCH, "the queries' place holds the warps' m and l at the end");

    // What is known of a tile in the ring.
    struct __align__(16) Slot {
        int2 tokens[KEYS];  // position and segment
        unsigned wanted;    // bit i: key i is copied
        int reserved[3];
    };

    static constexpr int SHARED_BYTES = ROWS * PITCH + WARPS * RING_BYTES + WARPS * STAGES * (int)sizeof(Slot);

    const ForwardCall &call;
    uint8_t *const shared;  // queries (ROWS, PITCH); rings (WARPS): keys (STAGES, KEYS, PITCH), values (STAGES, VALUES, KEYS, PITCH); slots (WARPS, STAGES)
    const int lane, warp;
    int batch, kv_head, piece, part;
    int64_t row_block;      // among all of the call
    int first_row;          // of the key/value head
    RowBounds rows;
    Token queries[2];
    Score scores[2];

    uint32_t held[HOLDS_QUERIES ? STEPS : 1][4];  // queries
    float references[2], sums[2];  // m and l; of l this thread's share
    float averages[VALUES][COLUMN_BLOCKS][4];

    const T *keys, *values[VALUES];  // of the lane's row and chunk in tile 0
    bool read_keys, read_values[VALUES];
    Token upcoming;                  // of key lane % 16 in the tile to be copied next

    DEVICE int row_count() const { return call.queries.len * call.group; }
    DEVICE int head_of(int row) const { return kv_head * call.group + min(row, row_count() - 1) % call.group; }

    DEVICE DecodeKernel(const ForwardCall &call, uint8_t *shared)
        : call(call), shared(shared), lane(threadIdx.x % 32), warp(threadIdx.x / 32), batch(batch_of(call)),
          kv_head(kv_head_of(call)), piece(blockIdx.y), part(blockIdx.x % call.tiles),
          row_block(blockIdx.x / call.tiles), first_row((int)(row_block % row_blocks(call)) * ROWS),
          scores{Score(call, head_of(first_row + lane / 4)), Score(call, head_of(first_row + lane / 4 + 8))} {}

    // Blocks of rows in a key/value head.
    static DEVICE int row_blocks(const ForwardCall &call) { return (call.queries.len * call.group + ROWS - 1) / ROWS; }
    static DEVICE int kv_head_of(const ForwardCall &call) {
        return blockIdx.x / call.tiles / row_blocks(call) % (call.heads / call.group);
    }
    static DEVICE int batch_of(const ForwardCall &call) {
        return blockIdx.x / call.tiles / row_blocks(call) / (call.heads / call.group);
    }

    DEVICE uint8_t *ring() const { return shared + ROWS * PITCH + warp * RING_BYTES; }
    DEVICE uint32_t key_tile(int stage) const { return shared_address(ring()) + stage * TILE_BYTES; }
    DEVICE uint32_t value_tile(int stage) const {
        return shared_address(ring()) + (STAGES + stage * VALUES) * TILE_BYTES;
    }
    DEVICE Slot &slot(int stage) const {
        return ((Slot *)(shared + ROWS * PITCH + WARPS * RING_BYTES))[warp * STAGES + stage];
    }
    // Of a warp, at the end: o (ROWS, SUM_PITCH), and m and l (2, ROWS).
    DEVICE float *warp_averages(int warp) const { return (float *)(shared + ROWS * PITCH + warp * RING_BYTES); }
    DEVICE float *warp_statistics(int warp) const { return (float *)shared + warp * 2 * ROWS; }

    DEVICE int value_columns(int i) const { return min(WIDTH, call.value_width - WIDTH * (piece + i)); }

    // ---- Queries ----

    DEVICE Token query_at(int row) const {
        return row < row_count() ? token_at(call.queries, batch, row / call.group) : Token{-1, 0};
    }

    // Each warp finds the bounds for itself.
    DEVICE void look_at_rows() {
        Token row = query_at(first_row + lane % ROWS);
        bool real = row.position >= 0;
        rows.first = __reduce_min_sync(WARP, real ? row.position : INT_MAX);
        rows.last = __reduce_max_sync(WARP, row.position);
        rows.segment_first = __reduce_min_sync(WARP, real ? row.segment : INT_MAX);
        rows.segment_last = __reduce_max_sync(WARP, real ? row.segment : INT_MIN);
#pragma unroll
        for (int a = 0; a < 2; a++) queries[a] = query_at(first_row + lane / 4 + 8 * a);
    }

    // Into shared memory, with the scale's sign.
    DEVICE void load_queries() {
        for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
            int row = i / CHUNKS, chunk = i % CHUNKS, column = source_column<Score, CHUNKS>(call, chunk), number = first_row + row;
            uint4 numbers = make_uint4(0, 0, 0, 0);
            if (number < row_count() && column >= 0) {
                const T *from = (const T *)call.q.data + batch * call.q.batch + head_of(number) * call.q.head +
                                number / call.group * call.q.token + column;
                numbers = __ldg((const uint4 *)from);
            }
            if (call.score.negate && (!Score::PHASE || chunk < CHUNKS / 2)) {
                constexpr unsigned SIGNS = 0x80008000;
                numbers = make_uint4(numbers.x ^ SIGNS, numbers.y ^ SIGNS, numbers.z ^ SIGNS, numbers.w ^ SIGNS);
            }
            *(uint4 *)(shared + row * PITCH + chunk * 16) = numbers;
        }
        __syncthreads();
        if constexpr (HOLDS_QUERIES) {
#pragma unroll
            for (int step = 0; step < STEPS; step++) read_queries(held[step], step);
        }
    }

    DEVICE void read_queries(uint32_t (&to)[4], int step) const {
        load_matrices(to, shared_address(shared) + lane % 16 * PITCH + lane / 16 * 16 + step * 32);
    }

    // ---- Keys and values ----

    // The tiles of this block's part.
    DEVICE TileRange tiles() const {
        int first = 0, end = (call.keys.len + KEYS - 1) / KEYS;
        if (rows.first > rows.last) end = 0;
        if (!call.keys.list) {
            int64_t window = call.window;
            int64_t from = max((int64_t)rows.first - window + 1, (int64_t)0) - call.keys.start;
            int64_t to = (call.causal ? (int64_t)rows.last : rows.last + window - 1) - call.keys.start;
            first = (int)min(max(from, (int64_t)0) / KEYS, (int64_t)end);
            end = to < 0 ? first : (int)min(to / KEYS + 1, (int64_t)end);
        }
        int64_t count = max(end - first, 0);
        return {first + (int)(count * part / call.tiles), first + (int)(count * (part + 1) / call.tiles)};
    }

    // Whether any row of the block may see this key.
    DEVICE bool is_wanted(Token key) const {
        return key.position >= 0 && key.segment >= rows.segment_first && key.segment <= rows.segment_last &&
               rows.first - key.position < call.window &&
               (call.causal ? key.position <= rows.last : key.position - rows.last < call.window);
    }

    DEVICE void aim_at_keys() {
        int chunk = lane % CHUNKS, row = lane / CHUNKS, column = source_column<Score, CHUNKS>(call, chunk);
        read_keys = column >= 0;
        keys = (const T *)call.k.data + batch * call.k.batch + kv_head * call.k.head + row * call.k.token +
               max(column, 0);
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            const Operand &v = call.v[piece + i];
            read_values[i] = 8 * chunk < value_columns(i);
            values[i] = (const T *)v.data + batch * v.batch + kv_head * v.head + row * v.token +
                        (read_values[i] ? 8 * chunk : 0);
        }
    }

    DEVICE void look_ahead(int tile) { upcoming = token_at(call.keys, batch, tile * KEYS + lane % KEYS); }

    // Starts copying the lane's chunks of 16 rows; bit i of `wanted` says whether row i is read.
    DEVICE void copy_tile(uint32_t to, const T *from, int64_t stride, bool read, unsigned wanted) const {
        to += lane / CHUNKS * PITCH + lane % CHUNKS * 16;
#pragma unroll
        for (int pass = 0; pass < KEYS / PASS_ROWS; pass++) {
            bool read_row = read && (wanted >> (pass * PASS_ROWS + lane / CHUNKS) & 1);
            copy_async(to + pass * PASS_ROWS * PITCH, read_row ? from : (const T *)call.k.data, read_row);
            from += PASS_ROWS * stride;
        }
    }

    // Starts copying the keys of a tile, which is the one that was looked ahead at, and notes what is known of it.
    DEVICE void copy_keys(int stage, int tile, int end) {
        if (tile < end) {
            unsigned wanted = __ballot_sync(WARP, lane < KEYS && is_wanted(upcoming));
            if (lane < KEYS) slot(stage).tokens[lane] = make_int2(upcoming.position, upcoming.segment);
            if (lane == 0) slot(stage).wanted = wanted;
            if (wanted) copy_tile(key_tile(stage), keys + (int64_t)tile * KEYS * call.k.token, call.k.token, read_keys, wanted);
            look_ahead(tile + WARPS);
        }
        commit_copies();
    }

    // Starts copying the values of a tile whose keys are being copied already.
    DEVICE void copy_values(int stage, int tile, int end) {
        if (tile < end) {
            unsigned wanted = slot(stage).wanted;
#pragma unroll
            for (int i = 0; i < VALUES; i++) {
                int64_t stride = call.v[piece + i].token;
                if (wanted)
                    copy_tile(value_tile(stage) + i * TILE_BYTES, values[i] + (int64_t)tile * KEYS * stride, stride,
                              read_values[i], wanted);
            }
        }
        commit_copies();
    }

    // ---- Products ----

    using Products = float[2][4];

    static DEVICE void multiply_keys(Products &products, const uint32_t (&queries)[4], const uint32_t (&keys)[4]) {
        Half<T>::multiply_add(products[0], queries, keys[0], keys[1]);
        Half<T>::multiply_add(products[1], queries, keys[2], keys[3]);
    }

    // products = queries times keys over the steps of 16 columns from FIRST to LAST.
    template <int FIRST, int LAST> DEVICE void multiply(Products &products, int stage) const {
        uint32_t address = key_tile(stage) + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16;
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) products[i][e] = 0.f;
#pragma unroll
        for (int step = FIRST; step < LAST; step++) {
            uint32_t keys[4];
            load_matrices(keys, address + step * 32);
            if constexpr (HOLDS_QUERIES) {
                multiply_keys(products, held[step], keys);
            } else {
                uint32_t queries[4];
                read_queries(queries, step);
                multiply_keys(products, queries, keys);
            }
        }
    }

    // Turns products into scores in log2; -infinity where the key is not visible. `tokens` are those of the thread's
    // keys: of two neighbours in each block.
    DEVICE void score(Products &x, const Products &phases, const int4 (&tokens)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int a = e / 2;
                Token key = e % 2 == 0 ? Token{tokens[i].x, tokens[i].y} : Token{tokens[i].z, tokens[i].w};
                int ahead = queries[a].position - key.position;
                bool visible = is_visible(call, queries[a], key);
                if constexpr (Score::PHASE) x[i][e] *= scores[a].far(phases[i][e], visible ? ahead : 0);
                else x[i][e] = scores[a].far(x[i][e], ahead);
                x[i][e] = visible ? x[i][e] * scores[a].factor() : -INFINITY;
            }
    }

    // Moves m up to the greatest score, and turns scores into weights.
    DEVICE void weigh(Products &x) {
        float greatest[2];
#pragma unroll
        for (int a = 0; a < 2; a++)
            greatest[a] = greatest_of_row(fmaxf(fmaxf(x[0][2 * a], x[0][2 * a + 1]), fmaxf(x[1][2 * a], x[1][2 * a + 1])));
        if (__any_sync(WARP, greatest[0] > references[0] || greatest[1] > references[1])) {
#pragma unroll
            for (int a = 0; a < 2; a++) {
                if (!(greatest[a] > references[a])) continue;
                float shrink = exp2_approx(references[a] - greatest[a]); // 0 for the row's first key
                references[a] = greatest[a];
                sums[a] *= shrink;
#pragma unroll
                for (int i = 0; i < VALUES; i++)
#pragma unroll
                    for (int c = 0; c < COLUMN_BLOCKS; c++) {
                        averages[i][c][2 * a] *= shrink;
                        averages[i][c][2 * a + 1] *= shrink;
                    }
            }
        }
#pragma unroll
        for (int a = 0; a < 2; a++) {
            float shift = references[a] == -INFINITY ? 0.f : references[a];
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float weight = exp2_approx(x[i][2 * a + e] - shift);
                    x[i][2 * a + e] = weight;
                    sums[a] += weight;
                }
        }
    }

    DEVICE void add_values(const Products &x, int stage) {
        const uint32_t weights[4] = {Half<T>::pack(x[0][0], x[0][1]), Half<T>::pack(x[0][2], x[0][3]),
                                     Half<T>::pack(x[1][0], x[1][1]), Half<T>::pack(x[1][2], x[1][3])};
        uint32_t address = value_tile(stage) + lane % 16 * PITCH + lane / 16 * 16;
#pragma unroll
        for (int i = 0; i < VALUES; i++)
#pragma unroll
            for (int c = 0; c < COLUMN_BLOCKS; c += 2) {
                uint32_t values[4];
                load_matrices_transposed(values, address + i * TILE_BYTES + c * 16);
                Half<T>::multiply_add(averages[i][c], weights, values[0], values[1]);
                Half<T>::multiply_add(averages[i][c + 1], weights, values[2], values[3]);
            }
    }

    // ---- The part ----

    // The warp's tiles.
    DEVICE void visit(TileRange range) {
        // Copies under way when one group of STAGES tiles' is waited for.
        constexpr int PENDING = 2 * STAGES - 1;
        int tile = range.first + warp;
        if (tile < range.end) look_ahead(tile);
        for (int stage = 0; stage < STAGES; stage++) {
            copy_keys(stage, tile + stage * WARPS, range.end);
            __syncwarp(); // the slot is noted
            copy_values(stage, tile + stage * WARPS, range.end);
        }
        int stage = 0;
        for (; tile < range.end; tile += WARPS) {
            wait_for_copies<PENDING>();
            __syncwarp(); // the keys of all lanes are there
            bool wanted = slot(stage).wanted != 0;
            Products x, phases;
            int4 tokens[2];
            if (wanted) {
                if constexpr (Score::PHASE) multiply<STEPS / 2, STEPS>(phases, stage);
                multiply<0, Score::PHASE ? STEPS / 2 : STEPS>(x, stage);
#pragma unroll
                for (int i = 0; i < 2; i++) tokens[i] = *(const int4 *)&slot(stage).tokens[8 * i + lane % 4 * 2];
            }
            __syncwarp(); // nobody needs the keys and the slot any more
            copy_keys(stage, tile + STAGES * WARPS, range.end);
            if (wanted) {
                score(x, phases, tokens);
                weigh(x);
            }
            wait_for_copies<PENDING>();
            __syncwarp(); // the values of all lanes are there, and the slot is noted
            if (wanted) add_values(x, stage);
            __syncwarp(); // nobody needs the values any more
            copy_values(stage, tile + STAGES * WARPS, range.end);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        wait_for_copies<0>();
    }

    // Leaves the warp's m, l and o in shared memory.
    DEVICE void leave() const {
        __syncthreads(); // nobody needs the queries and rings any more
        float *statistics = warp_statistics(warp), *to = warp_averages(warp);
#pragma unroll
        for (int a = 0; a < 2; a++) {
            int row = lane / 4 + 8 * a;
            float sum = sum_of_row(sums[a]);
            if (lane % 4 == 0) {
                statistics[row] = references[a];
                statistics[ROWS + row] = sum;
            }
#pragma unroll
            for (int i = 0; i < VALUES; i++)
#pragma unroll
                for (int c = 0; c < COLUMN_BLOCKS; c++)
                    *(float2 *)(to + row * SUM_PITCH + i * WIDTH + 8 * c + lane % 4 * 2) =
                        make_float2(averages[i][c][2 * a], averages[i][c][2 * a + 1]);
        }
        __syncthreads();
    }

    // The part's averages and log2-sum-exp, or the call's where there are no other parts.
    DEVICE void write() const {
        const bool last = call.tiles == 1;
        int columns = min(COLUMNS, call.value_width - WIDTH * piece);
        for (int row = warp; row < ROWS && first_row + row < row_count(); row += WARPS) {
            float greatest = -INFINITY;
#pragma unroll
            for (int w = 0; w < WARPS; w++) greatest = fmaxf(greatest, warp_statistics(w)[row]);
            float shares[WARPS], sum = 0.f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                float reference = warp_statistics(w)[row];
                // A warp that saw nothing has l and o of 0.
                shares[w] = reference == -INFINITY ? 0.f : exp2_approx(reference - greatest);
                sum += shares[w] * warp_statistics(w)[ROWS + row];
            }
            bool empty = sum == 0.f;
            float inverse = empty ? 0.f : 1.f / sum;
            int number = first_row + row;
            int64_t part_row = (row_block * call.tiles + part) * ROWS + row;
            int64_t call_row = ((int64_t)batch * call.heads + head_of(number)) * call.queries.len + number / call.group;
            if (lane == 0 && piece == 0) {
                float lse = empty ? -INFINITY : greatest + log2f(sum);
                if (!last) call.part_lse[part_row] = lse;
                else if (call.lse) call.lse[call_row] = lse * 0.6931471806f;
            }
            int64_t to = (last ? call_row : part_row) * call.value_width + WIDTH * piece;
            for (int c = lane * 2; c < columns; c += 64) {
                float2 average = make_float2(0.f, 0.f);
#pragma unroll
                for (int w = 0; w < WARPS; w++) {
                    float2 more = *(const float2 *)(warp_averages(w) + row * SUM_PITCH + c);
                    average.x += shares[w] * more.x;
                    average.y += shares[w] * more.y;
                }
                // What nobody sees may be infinite.
                average = empty ? make_float2(0.f, 0.f) : make_float2(average.x * inverse, average.y * inverse);
                if (last) *(uint32_t *)((T *)call.out + to + c) = Half<T>::pack(average.x, average.y);
                else *(float2 *)(call.part_out + to + c) = average;
            }
        }
    }

    DEVICE void run() {
#pragma unroll
        for (int a = 0; a < 2; a++) {
            references[a] = -INFINITY;
            sums[a] = 0.f;
        }
#pragma unroll
        for (int i = 0; i < VALUES; i++)
#pragma unroll
            for (int c = 0; c < COLUMN_BLOCKS; c++)
#pragma unroll
                for (int e = 0; e < 4; e++) averages[i][c][e] = 0.f;
        look_at_rows();
        load_queries();
        aim_at_keys();
        visit(tiles());
        leave();
        write();
    }
};

// Grid: x = parts * row blocks * G * B, the part fastest; y = pieces of VALUES * WIDTH columns.
template <class Kernel> DEVICE void attend_decode(const ForwardCall &call) {
    extern __shared__ __align__(128) uint8_t shared[];
    Kernel(call, shared).run();
}

// ---- Merging the parts ----

constexpr int MERGE_WARPS = 8, MERGE_COLUMNS = 512;

// Grid: T * H * B, the query fastest: one row a block. The parts' averages count by 2^(log2-sum-exp); warp w adds parts
// w, w + 8, ..., and the warps are added in their order. Parts that saw nothing are not read.
template <class T> DEVICE void attend_merge(const ForwardCall &call) {
    __shared__ __align__(16) float shared_averages[MERGE_WARPS][MERGE_COLUMNS];
    __shared__ float shared_sums[MERGE_WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int token = blockIdx.x % call.queries.len, head = blockIdx.x / call.queries.len % call.heads;
    const int64_t batch = blockIdx.x / call.queries.len / call.heads;
    const int row = token * call.group + head % call.group;
    const int row_blocks = (call.queries.len * call.group + ROWS - 1) / ROWS;
    const int64_t row_block = (batch * (call.heads / call.group) + head / call.group) * row_blocks + row / ROWS;
    const int64_t first = row_block * call.tiles * ROWS + row % ROWS; // the row in part 0; parts are ROWS apart
    const int parts = call.tiles, width = call.value_width;

    float greatest = -INFINITY;
    for (int part = lane; part < parts; part += 32) greatest = fmaxf(greatest, call.part_lse[first + (int64_t)part * ROWS]);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) greatest = fmaxf(greatest, __shfl_xor_sync(WARP, greatest, mask));

    constexpr int LANE_VECTORS = MERGE_COLUMNS / 128; // of four columns
    float4 averages[LANE_VECTORS];
#pragma unroll
    for (int i = 0; i < LANE_VECTORS; i++) averages[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    float sum = 0.f;
#pragma unroll 4
    for (int part = warp; part < parts; part += MERGE_WARPS) {
        const int64_t at = first + (int64_t)part * ROWS;
        const float lse = call.part_lse[at];
        if (lse == -INFINITY) continue;
        const float share = exp2_approx(lse - greatest);
        sum += share;
#pragma unroll
        for (int i = 0; i < LANE_VECTORS; i++) {
            const int column = i * 128 + lane * 4;
            if (column >= width) continue;
            const float4 more = *(const float4 *)(call.part_out + at * width + column);
            averages[i].x += share * more.x;
            averages[i].y += share * more.y;
            averages[i].z += share * more.z;
            averages[i].w += share * more.w;
        }
    }
#pragma unroll
    for (int i = 0; i < LANE_VECTORS; i++) *(float4 *)&shared_averages[warp][i * 128 + lane * 4] = averages[i];
    if (lane == 0) shared_sums[warp] = sum;
    __syncthreads();

    float total = 0.f;
    for (int w = 0; w < MERGE_WARPS; w++) total += shared_sums[w];
    const bool empty = total == 0.f;
    const float inverse = empty ? 0.f : 1.f / total;
    const int64_t to = (batch * call.heads + head) * call.queries.len + token;
    if (threadIdx.x == 0 && call.lse) call.lse[to] = empty ? -INFINITY : (greatest + log2f(total)) * 0.6931471806f;
    for (int column = threadIdx.x * 2; column < width; column += MERGE_WARPS * 64) {
        float low = 0.f, high = 0.f;
        for (int w = 0; w < MERGE_WARPS; w++) {
            low += shared_averages[w][column];
            high += shared_averages[w][column + 1];
        }
        *(uint32_t *)((T *)call.out + to * width + column) = Half<T>::pack(low * inverse, high * inverse);
    }
}

}  // namespace decode
