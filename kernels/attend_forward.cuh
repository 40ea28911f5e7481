// Softmax attention, forward, on the tensor cores of compute capability 8.0 and later.
//
// A block averages the values for ROWS queries of one head; each of its warps holds ROW_TILES tiles of 16 of them. It
// walks over tiles of KEYS keys, from the last that its queries can see down to the first:
//
//     wait for the keys | start copying this tile's values
//     products of queries and keys (for the phase: the phase part, its cosine, then the amplitude part)
//     wait for the values | start copying the next tile's keys
//     scores, greatest score, weights, weights times values
//
// so that each copy runs behind arithmetic, and with one buffer for keys and one for values two blocks fit a
// multiprocessor. Tiles that no query of the block can see are not read. Where every query sees every key and positions
// run on, distances come from the place in the tile and nothing is masked; other tiles look up both tokens of a pair.
//
// The softmax is online (Milakov and Gimelshein, arXiv 1805.02867): weights are 2^(score - reference), and the
// reference of a row follows its greatest score only when that is 8 above, 256-fold in weight: sums and averages are
// then rescaled. f32 holds the sums and bf16 and f16 the weights just as exactly, whatever the reference.
//
// Registers hold products as mma.m16n8k16 leaves them: element e of block i of row tile r is at row
// 16 r + 8 (e / 2) + lane / 4 of the warp and at key 8 i + 2 (lane % 4) + e % 2. The weights are just so the left operand
// of the second product. Below, `a` = 2 r + e / 2 counts the rows of a thread.
//
// The result does not depend on the order in which blocks run.
#pragma once
#include "score.cuh"
#include "tile.cuh"
#include "tokens.cuh"

constexpr float RESCALE_FROM = 8.f; // in log2
constexpr float ENORMOUS = 1024.f;  // in log2

// What all threads of a block know. It lies in shared memory, for registers are full of products and averages.
template <class T> struct Block {
    int batch, head, piece, first_row;
    const T *k, *v[2];
    int64_t v_stride[2];
    TileBounds rows;
    int2 tiles; // of keys, the first and the last
};

template <class T_, class Score_, int WIDTH_, int VALUES_, int WARPS_, int ROW_TILES_, int KEYS_> struct ForwardKernel {
    using T = T_;
    using Score = Score_;
    static constexpr int WIDTH = WIDTH_, VALUES = VALUES_, WARPS = WARPS_, ROW_TILES = ROW_TILES_, KEYS = KEYS_;
    static constexpr int THREADS = 32 * WARPS;
    static constexpr int WARP_ROWS = 16 * ROW_TILES;
    static constexpr int ROWS = WARPS * WARP_ROWS;
    using Tile = TileOf<T, WIDTH, THREADS>;
    static constexpr int PITCH = Tile::PITCH, CHUNKS = Tile::CHUNKS;
    static constexpr int KEY_BLOCKS = KEYS / 8;
    static constexpr int COLUMN_BLOCKS = WIDTH / 8;
    static constexpr int STEPS = WIDTH / 16;
    static constexpr int HALVES = 2 * ROW_TILES; // rows of a thread

    using Products = float[ROW_TILES][KEY_BLOCKS][4];

    const ForwardCall &call;
    const Block<T> &block;
    uint8_t *const shared;  // (ROWS + KEYS + VALUES * KEYS, PITCH): queries, keys, values
    int2 *const key_tokens; // (KEYS): position and segment
    const int thread, lane, warp;
    Score score;

    float sums[HALVES], references[HALVES];
    // Of weights as they were rounded to weigh the values, so that values that are all the same average to themselves; the
    // log-sum-exp is of the others.
    float rounded_sums[ROW_TILES][4];
    float averages[VALUES][ROW_TILES][COLUMN_BLOCKS][4];

    DEVICE ForwardKernel(const ForwardCall &call, const Block<T> &block, uint8_t *shared, int2 *key_tokens)
        : call(call), block(block), shared(shared), key_tokens(key_tokens), thread(threadIdx.x),
          lane(threadIdx.x % 32), warp(threadIdx.x / 32), score(call, block.head) {}

    DEVICE uint32_t q_tile() const { return shared_address(shared); }
    DEVICE uint32_t k_tile() const { return q_tile() + ROWS * PITCH; }
    DEVICE uint32_t v_tile() const { return k_tile() + KEYS * PITCH; }
    DEVICE int warp_row() const { return warp * WARP_ROWS; }
    // The first of the thread's queries.
    DEVICE int first_query() const { return block.first_row + warp_row() + lane / 4; }
    DEVICE int value_columns(int i) const { return min(WIDTH, call.value_width - WIDTH * (block.piece + i)); }

    static DEVICE void describe(Block<T> &block, const ForwardCall &call) {
        int row = blockIdx.x / call.tiles;
        block.batch = row / call.heads;
        block.head = row % call.heads;
        block.piece = blockIdx.y;
        // Queries near the end see the most keys: they go first.
        block.first_row = (call.tiles - 1 - (int)(blockIdx.x % call.tiles)) * ROWS;
        int kv_head = block.head / call.group;
        block.k = head_of<T>(call.k, block.batch, kv_head);
        for (int i = 0; i < VALUES; i++) {
            const Operand &values = call.v[block.piece + i];
            block.v[i] = head_of<T>(values, block.batch, kv_head);
            block.v_stride[i] = values.token;
        }
        block.rows = tile_bounds(call.queries, block.batch, block.first_row, ROWS);
        block.tiles = visible_tiles(call, block.rows);
    }

    // Starts copying a tile of q or k.
    template <int COUNT> DEVICE void copy_operand(uint32_t to, const T *from, int64_t stride, int first, int count) const {
        Tile::template copy<COUNT>(
            to, from + first * stride, stride, first, count, [&](int chunk) { return source_column<Score, CHUNKS>(call, chunk); },
            [](int) { return true; });
    }

    // Starts copying a tile of values. Padding is not read: 0 times NaN would be NaN.
    DEVICE void copy_values(int first, bool padding) const {
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            int columns = value_columns(i);
            Tile::template copy<KEYS>(
                v_tile() + i * KEYS * PITCH, block.v[i] + first * block.v_stride[i], block.v_stride[i], first, call.keys.len,
                [&](int chunk) { return 8 * chunk < columns ? 8 * chunk : -1; },
                [&](int row) { return !padding || token_at(call.keys, block.batch, row).position >= 0; });
        }
    }

    DEVICE TileBounds keys_of(int tile) const { return tile_bounds(call.keys, block.batch, tile * KEYS, KEYS); }
    DEVICE bool is_full(int tile) const { return (tile + 1) * KEYS <= call.keys.len; }

    DEVICE Sight sight_of(int tile, const TileBounds &keys) const {
        Sight seen = sight(call, block.rows, keys, is_full(tile));
        if (Score::PHASE && seen == ALL) {
            int greatest = max(block.rows.last - keys.first, keys.last - block.rows.first);
            if (greatest >= call.score.reach) return PART;
        }
        return seen;
    }

    // The tiles of keys that the block may see, first and last, by the positions of spans.
    static DEVICE int2 visible_tiles(const ForwardCall &call, const TileBounds &rows) {
        int2 tiles = {0, (call.keys.len - 1) / KEYS};
        if (call.keys.list) return tiles;
        int64_t first = (int64_t)rows.first - call.keys.start - (call.window - 1);
        int64_t last = (int64_t)rows.last - call.keys.start + (call.causal ? 0 : call.window - 1);
        if (first > 0) tiles.x = (int)min(first / KEYS, (int64_t)tiles.y + 1);
        tiles.y = last < 0 ? -1 : (int)min(last / KEYS, (int64_t)tiles.y);
        return tiles;
    }

    // The next tile that is seen, from `tile` downwards; -1 if there is none. A lane looks at a tile.
    DEVICE int seen_from(int tile) const {
        if (!call.keys.list) return tile < block.tiles.x ? -1 : tile;
        for (; tile >= 0; tile -= 32) {
            bool seen = tile >= lane && sight(call, block.rows, keys_of(tile - lane), false) != NONE;
            unsigned found = __ballot_sync(WARP, seen);
            if (found) return tile - (__ffs(found) - 1);
        }
        return -1;
    }

    // products += queries of the warp times keys, over the steps of 16 columns from `FIRST` to `LAST`.
    template <int FIRST, int LAST> DEVICE void multiply(Products &products) const {
        uint32_t q_address = q_tile() + (warp_row() + lane % 16) * PITCH + lane / 16 * 16;
        uint32_t k_address = k_tile() + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16;
#pragma unroll
        for (int step = FIRST; step < LAST; step++) {
            uint32_t queries[ROW_TILES][4];
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++)
                load_matrices(queries[r], q_address + r * 16 * PITCH + step * 32);
#pragma unroll
            for (int i = 0; i < KEY_BLOCKS; i += 2) {
                uint32_t keys[4];
                load_matrices(keys, k_address + i * 8 * PITCH + step * 32);
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) {
                    Half<T>::multiply_add(products[r][i], queries[r], keys[0], keys[1]);
                    Half<T>::multiply_add(products[r][i + 1], queries[r], keys[2], keys[3]);
                }
            }
        }
    }

    static DEVICE void clear(Products &products) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int i = 0; i < KEY_BLOCKS; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) products[r][i][e] = 0.f;
    }

    // Cosines of the phases, in place, of a tile in which positions run on.
    DEVICE void near_cosines(Products &phases, int ahead) const {
        // Rows 8 apart at keys 8 apart are as far from each other: one entry serves both.
        const float2 *turns = call.score.turns + call.score.reach + ahead;
        float2 entries[HALVES];
#pragma unroll
        for (int a = 0; a < HALVES; a++) entries[a] = __ldg(turns + 8 * a);
#pragma unroll
        for (int i = 0; i < KEY_BLOCKS; i++) {
#pragma unroll
            for (int a = 0; a < HALVES; a++) {
                float *pair = &phases[a / 2][i][a % 2 * 2];
                pair[0] = Score::cos_turns(entries[a].x, pair[0]);
                pair[1] = Score::cos_turns(entries[a].y, pair[1]);
            }
#pragma unroll
            for (int a = HALVES - 1; a > 0; a--) entries[a] = entries[a - 1];
            if (i + 1 < KEY_BLOCKS) entries[0] = __ldg(turns - 8 * (i + 1));
        }
    }

    // Writes the tokens of a tile to shared memory, for `look_up`.
    DEVICE void write_tokens(int first_key) const {
        if (thread < KEYS) {
            Token token = token_at(call.keys, block.batch, first_key + thread);
            key_tokens[thread] = make_int2(token.position, token.segment);
        }
    }

    // Scores of a tile pair by pair, from the tokens of both; -infinity where the key is not visible.
    DEVICE void look_up(Products &x, const Products &phases) const {
#pragma unroll
        for (int a = 0; a < HALVES; a++) {
            __syncwarp(); // keeps the compiler from fetching the tokens of all rows at once
            Token query = token_at(call.queries, block.batch, first_query() + 8 * a);
#pragma unroll
            for (int i = 0; i < KEY_BLOCKS; i++) {
                int4 keys = load_shared(shared_address(key_tokens + 8 * i + lane % 4 * 2));
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    Token key = e == 0 ? Token{keys.x, keys.y} : Token{keys.z, keys.w};
                    float &product = x[a / 2][i][a % 2 * 2 + e];
                    int ahead = query.position - key.position;
                    if constexpr (Score::PHASE) product *= score.far(phases[a / 2][i][a % 2 * 2 + e], ahead);
                    else product = score.far(product, ahead);
                    if (!is_visible(call, query, key)) product = -INFINITY;
                }
            }
        }
    }

    // One tile of keys. `MASKED`: pairs have to be looked at one by one.
    template <bool MASKED> DEVICE void visit(int tile, bool padding, int next) {
        wait_for_copies<0>();
        __syncthreads(); // the keys are there, and nobody needs the values and tokens of the tile before
        copy_values(tile * KEYS, padding);
        commit_copies();
        if (MASKED) write_tokens(tile * KEYS);

        // How far the thread's first query is ahead of its first key.
        int ahead = block.rows.first + warp_row() + lane / 4 - (keys_of(tile).first + lane % 4 * 2);
        Products x, phases;
        if constexpr (Score::PHASE) {
            clear(phases);
            multiply<STEPS / 2, STEPS>(phases);
            if (!MASKED) near_cosines(phases, ahead);
        }
        clear(x);
        multiply<0, Score::PHASE ? STEPS / 2 : STEPS>(x);

        wait_for_copies<0>();
        __syncthreads(); // the values are there, and nobody needs the keys any more
        if (next >= 0) copy_operand<KEYS>(k_tile(), block.k, call.k.token, next * KEYS, call.keys.len);
        commit_copies();

        if constexpr (MASKED) look_up(x, phases);
        else near_scores(x, phases, ahead);
        follow_greatest(x);
        add_values(x);
    }

    // Scores of a tile in which positions run on and every key is visible; `cosines` are those of the phases.
    DEVICE void near_scores(Products &x, const Products &cosines, int ahead) const {
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int i = 0; i < KEY_BLOCKS; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if constexpr (Score::PHASE) x[r][i][e] *= cosines[r][i][e];
                    if constexpr (Score::BIAS)
                        x[r][i][e] = score.near(x[r][i][e], (float)ahead + (float)(16 * r + e / 2 * 8 - 8 * i - e % 2));
                }
    }

    // Not so where nothing has been seen, and both are -infinity.
    DEVICE bool has_grown(float greatest, float reference) const {
        return (greatest - reference) * score.factor() > RESCALE_FROM;
    }

    // Moves the references up to the greatest scores of rows that have grown well beyond them.
    DEVICE void follow_greatest(const Products &x) {
        float greatest[HALVES];
        bool grown = false;
#pragma unroll
        for (int a = 0; a < HALVES; a++) {
            float row = -INFINITY;
#pragma unroll
            for (int i = 0; i < KEY_BLOCKS; i++)
                row = fmaxf(row, fmaxf(x[a / 2][i][a % 2 * 2], x[a / 2][i][a % 2 * 2 + 1]));
            greatest[a] = greatest_of_row(row);
            grown |= has_grown(greatest[a], references[a]);
        }
        if (!__any_sync(WARP, grown)) return;
#pragma unroll
        for (int a = 0; a < HALVES; a++) {
            if (!has_grown(greatest[a], references[a])) continue;
            float shrink = exp2_approx((references[a] - greatest[a]) * score.factor()); // 0 for the row's first key
            references[a] = greatest[a];
            sums[a] *= shrink;
            rounded_sums[a / 2][a % 2 * 2] *= shrink;
            rounded_sums[a / 2][a % 2 * 2 + 1] *= shrink;
#pragma unroll
            for (int piece = 0; piece < VALUES; piece++)
#pragma unroll
                for (int c = 0; c < COLUMN_BLOCKS; c++) {
                    averages[piece][a / 2][c][a % 2 * 2] *= shrink;
                    averages[piece][a / 2][c][a % 2 * 2 + 1] *= shrink;
                }
        }
    }

    // Score times factor is not rounded before the shift is subtracted, but the shift is: so where it is enormous, scores
    // are made relative to their reference first.
    DEVICE void subtract_references(Products &x, float (&shifts)[HALVES]) const {
#pragma unroll
        for (int a = 0; a < HALVES; a++) {
            if (references[a] == -INFINITY) continue;
            shifts[a] = 0.f;
#pragma unroll
            for (int i = 0; i < KEY_BLOCKS; i++)
#pragma unroll
                for (int e = 0; e < 2; e++) x[a / 2][i][a % 2 * 2 + e] -= references[a];
        }
    }

    // Turns scores into weights, and adds them and the values they weigh.
    DEVICE void add_values(Products &x) {
        uint32_t v_address = v_tile() + lane % 16 * PITCH + lane / 16 * 16;
        float shifts[HALVES];
        bool enormous = false;
#pragma unroll
        for (int a = 0; a < HALVES; a++) {
            shifts[a] = references[a] == -INFINITY ? 0.f : -references[a] * score.factor();
            enormous |= fabsf(shifts[a]) > ENORMOUS;
        }
        if (__any_sync(WARP, enormous)) subtract_references(x, shifts);
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
            uint32_t weights[ROW_TILES][4];
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float(&block)[4] = x[r][2 * step + j / 2];
                    int a = 2 * r + j % 2;
                    float low = exp2_approx(__fmaf_rn(block[j % 2 * 2], score.factor(), shifts[a]));
                    float high = exp2_approx(__fmaf_rn(block[j % 2 * 2 + 1], score.factor(), shifts[a]));
                    sums[a] += low + high;
                    weights[r][j] = Half<T>::pack(low, high);
                }
            if constexpr (Score::PHASE) __syncwarp(); // so it takes fewer registers
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++)
                Half<T>::multiply_add(rounded_sums[r], weights[r], Half<T>::ONES, Half<T>::ONES);
#pragma unroll
            for (int piece = 0; piece < VALUES; piece++)
#pragma unroll
                for (int c = 0; c < COLUMN_BLOCKS; c += 2) {
                    uint32_t values[4];
                    load_matrices_transposed(values, v_address + (piece * KEYS + step * 16) * PITCH + c * 16);
#pragma unroll
                    for (int r = 0; r < ROW_TILES; r++) {
                        Half<T>::multiply_add(averages[piece][r][c], weights[r], values[0], values[1]);
                        Half<T>::multiply_add(averages[piece][r][c + 1], weights[r], values[2], values[3]);
                    }
                }
        }
    }

    // Divides by the sums and writes what is asked for. Rows that saw nothing give 0 and -infinity.
    DEVICE void write() {
        int64_t head_row = ((int64_t)block.batch * call.heads + block.head) * call.queries.len;
        float inverses[HALVES];
#pragma unroll
        for (int a = 0; a < HALVES; a++) {
            float sum = sum_of_row(sums[a]);
            inverses[a] = sum == 0.f ? 0.f : 1.f / rounded_sums[a / 2][a % 2 * 2];
            int row = first_query() + 8 * a;
            if (block.piece == 0 && lane % 4 == 0 && row < call.queries.len)
                write_statistics(head_row + row, references[a], sum);
        }
        write_averages((T *)call.out, head_row, inverses, false);
        if (call.rest) write_averages((T *)call.rest, head_row, inverses, true);
    }

    // log2 of the row's sum of weights, in two numbers where one would lose too much of it; see `subtract_references`.
    DEVICE void write_statistics(int64_t row, float reference, float sum) {
        float shift = __fmul_rn(reference, score.factor()), lost = 0.f;
        if (fabsf(shift) > ENORMOUS) lost = __fmaf_rn(reference, score.factor(), -shift);
        float logarithm = log2f(sum), total = shift + logarithm;
        if (call.lse) call.lse[row] = sum == 0.f ? -INFINITY : total * 0.6931471806f;
        if (!call.statistics) return;
        // What the sum of two numbers lost, whichever is greater (Knuth's 2Sum).
        float second = total - shift;
        lost += (shift - (total - second)) + (logarithm - second);
        call.statistics[row] = sum == 0.f ? float2{INFINITY, 0.f} : float2{total, lost};
    }

    // Writes the averages, or what rounding them loses.
    DEVICE void write_averages(T *out, int64_t head_row, const float (&inverses)[HALVES], bool rest) {
        // Each warp passes its rows through the shared memory of its own queries, to write whole chunks.
        uint8_t *rows = shared + warp_row() * PITCH;
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
#pragma unroll
            for (int a = 0; a < HALVES; a++)
#pragma unroll
                for (int c = 0; c < COLUMN_BLOCKS; c++) {
                    float *pair = &averages[i][a / 2][c][a % 2 * 2];
                    float low = pair[0] * inverses[a], high = pair[1] * inverses[a];
                    uint32_t both = Half<T>::pack(low, high);
                    if (rest) both = Half<T>::pack_rest(low, high, both);
                    *(uint32_t *)(rows + (8 * a + lane / 4) * PITCH + c * 16 + lane % 4 * 4) =
                        inverses[a] == 0.f ? 0 : both; // what nobody sees may be infinite
                }
            __syncwarp();
#pragma unroll
            for (int j = lane; j < WARP_ROWS * CHUNKS; j += 32) {
                int row = j / CHUNKS, chunk = j % CHUNKS, token = block.first_row + warp_row() + row;
                if (token < call.queries.len && chunk * 8 < value_columns(i)) {
                    T *to = out + (head_row + token) * call.value_width + (block.piece + i) * WIDTH + chunk * 8;
                    *(uint4 *)to = *(uint4 *)(rows + row * PITCH + chunk * 16);
                }
            }
            __syncwarp();
        }
    }

    // Changes the sign of the queries' part that is scaled.
    DEVICE void negate_queries() const {
        for (int i = thread; i < ROWS * WIDTH / 2; i += THREADS) {
            int row = i / (WIDTH / 2), column = i % (WIDTH / 2) * 2;
            if (!Score::PHASE || column < WIDTH / 2) *(uint32_t *)(shared + row * PITCH + column * 2) ^= 0x80008000;
        }
        __syncthreads();
    }

    DEVICE void run() {
#pragma unroll
        for (int a = 0; a < HALVES; a++) {
            sums[a] = rounded_sums[a / 2][a % 2 * 2] = rounded_sums[a / 2][a % 2 * 2 + 1] = 0.f;
            references[a] = -INFINITY;
        }
#pragma unroll
        for (int piece = 0; piece < VALUES; piece++)
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
                for (int c = 0; c < COLUMN_BLOCKS; c++)
#pragma unroll
                    for (int e = 0; e < 4; e++) averages[piece][r][c][e] = 0.f;

        int tile = seen_from(block.tiles.y);
        if (tile >= 0) {
            copy_operand<ROWS>(q_tile(), head_of<T>(call.q, block.batch, block.head), call.q.token, block.first_row, call.queries.len);
            copy_operand<KEYS>(k_tile(), block.k, call.k.token, tile * KEYS, call.keys.len);
            commit_copies();
        }
        if (call.score.negate) {
            wait_for_copies<0>();
            __syncthreads();
            negate_queries();
        }
        while (tile >= 0) {
            TileBounds keys = keys_of(tile);
            int next = seen_from(tile - 1);
            if (sight_of(tile, keys) == ALL) visit<false>(tile, false, next);
            else visit<true>(tile, keys.flags & HAS_PADDING, next);
            tile = next;
        }
        write();
    }
};

template <class Kernel> DEVICE void attend_forward(const ForwardCall &call) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ Block<typename Kernel::T> block;
    __shared__ __align__(16) int2 key_tokens[Kernel::KEYS];
    if (threadIdx.x == 0) Kernel::describe(block, call);
    __syncthreads();
    Kernel(call, block, shared, key_tokens).run();
}
