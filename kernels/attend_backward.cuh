// Softmax attention, backward, on the tensor cores of compute capability 8.0 and later, in two kernels without atomics.
//
// With scores s, weights P = exp(s - log-sum-exp), dP = grad v^T and delta as `attend_delta` leaves it, the gradient of the
// scores is ds = P (dP - delta) (both there and here times |scale|), and for products x = q.k of which s = scale x:
//
//     dq = scale ds k        dk = scale ds^T q        dv = P^T grad
//
// For the phase s = scale a cos(2 pi w p), with a = q_A.k_A, p = q_P.k_P, w(d) = d^alpha phase_scale (TAPA, Wang et al.,
// arXiv 2509.12635v1, eq. 12), ds makes two gradients, each multiplying its part of k or q:
//
//     of a: scale ds cos(2 pi w p)        of p: -2 pi scale ds a w sin(2 pi w p)
//
// Both kernels are this template. A block holds tokens, 16 in each warp, while tiles of the others pass by:
//
//     KEYS       holds k and v,    q and grad pass by,  for each query head of the group; sums dk and dv
//     otherwise  holds q and grad, k and v pass by;                                      sums dq
//
// Of what passes by, STEP tokens are looked at at once: products (held x passing), weights and gradients of scores in
// registers, which are just so the left operand of the product that is summed. One tile is on its way while another is
// looked at. All sums have a fixed order, so results are the same bits every time.
//
// Registers hold products as mma.m16n8k16 leaves them: element e of block i is at held token 8 (e / 2) + lane / 4 of the
// warp and at passing token 8 i + 2 (lane % 4) + e % 2 of the step.
#pragma once
#include "score.cuh"
#include "tile.cuh"
#include "tokens.cuh"

constexpr int DELTA_TILE = 64;

// What passes by: a tile of one head.
template <class T> struct Passing {
    int head, tile;    // below 0: nothing is left
    int first;         // position of the tile's first token, where positions run on
    bool all;          // every pair of its tokens and those held is visible, positions run on, and no score is enormous
    const T *rows[3];  // where the tile starts in each operand
};

// What all threads of a block know. It lies in shared memory, for registers are full of products and sums.
template <class T> struct BackwardBlock {
    int batch, kv_head;
    int head;  // the last whose queries pass by, or that of the queries that are held
    int piece; // of the results' columns
    int first; // of the tokens that are held
    TileBounds held;
    int2 tiles;             // of a head that passes by, the first and the last
    bool enormous;          // the log-sum-exp of some query needs two numbers
    Passing<T> passing[2];  // what is looked at and what is on its way, in turns
};

template <class T_, class Score_, int WIDTH_, int VALUES_, int WARPS_, int TILE_, int STEP_, int PIECES_, bool KEYS_>
struct BackwardKernel {
    using T = T_;
    using Score = Score_;
    static constexpr int WIDTH = WIDTH_, VALUES = VALUES_, WARPS = WARPS_, TILE = TILE_, STEP = STEP_, PIECES = PIECES_;
    static constexpr bool KEYS = KEYS_, PHASE = Score::PHASE;
    static constexpr int THREADS = 32 * WARPS, HELD = 16 * WARPS;
    using Tile = TileOf<T, WIDTH, THREADS>;
    static constexpr int PITCH = Tile::PITCH, CHUNKS = Tile::CHUNKS;
    static constexpr int MULTIPLICATIONS = WIDTH / 16;
    // Of the sums: dk or dq, and dv.
    static constexpr int FIRST_COLUMNS = WIDTH / PIECES, SECOND_COLUMNS = KEYS ? VALUES * WIDTH / PIECES : 0;
    static constexpr int FIRST_BLOCKS = FIRST_COLUMNS / 8, SECOND_BLOCKS = SECOND_COLUMNS / 8;
    static constexpr int STAGE_BYTES = (1 + VALUES) * TILE * PITCH;
    static_assert(TILE % STEP == 0 && STEP % 16 == 0 && TILE <= THREADS && HELD <= THREADS, "");

    // Of 16 held tokens and `TOKENS` that pass by.
    template <int TOKENS> using Products = float[TOKENS / 8][4];
    template <int TOKENS> using Packed = uint32_t[TOKENS / 16][4];

    const BackwardCall &call;
    BackwardBlock<T> &block;
    uint8_t *const shared; // held (1 + VALUES, HELD, PITCH), passing (2, 1 + VALUES, TILE, PITCH)
    int2 *const records;   // (2, 2, TILE): of each token that passes by its row (KEYS), and its position and segment
    const int thread, lane, warp;

    float first_sums[FIRST_BLOCKS][4], second_sums[SECOND_BLOCKS ? SECOND_BLOCKS : 1][4];
    float2 rows[2]; // of the queries that are held

    DEVICE BackwardKernel(const BackwardCall &call, BackwardBlock<T> &block, uint8_t *shared)
        : call(call), block(block), shared(shared),
          records((int2 *)(shared + (1 + VALUES) * HELD * PITCH + 2 * STAGE_BYTES)), thread(threadIdx.x),
          lane(threadIdx.x % 32), warp(threadIdx.x / 32) {}

    DEVICE const Tokens &held_tokens() const { return KEYS ? call.keys : call.queries; }
    DEVICE const Tokens &passing_tokens() const { return KEYS ? call.queries : call.keys; }
    DEVICE uint32_t held_tile(int operand) const { return shared_address(shared) + operand * HELD * PITCH; }
    DEVICE uint32_t passing_tile(int stage, int operand) const {
        return shared_address(shared) + (1 + VALUES) * HELD * PITCH + stage * STAGE_BYTES + operand * TILE * PITCH;
    }
    // What rounding the log-sum-exp of queries that pass by in a stage (KEYS), or that are held, lost.
    DEVICE float *lost_of(int stage) const { return (float *)(records + 4 * TILE) + stage * TILE; }
    DEVICE int value_columns(int i) const { return min(WIDTH, call.value_width - WIDTH * i); }
    DEVICE int first_held() const { return block.first + 16 * warp + lane / 4; }
    DEVICE int64_t head_row(int head) const { return ((int64_t)block.batch * call.heads + head) * call.queries.len; }

    // ---- What passes by ----

    DEVICE TileBounds bounds_of(int tile) const { return tile_bounds(passing_tokens(), block.batch, tile * TILE, TILE); }

    DEVICE Sight sight_of(const TileBounds &passing, bool full) const {
        return KEYS ? sight(call, passing, block.held, true) : sight(call, block.held, passing, full);
    }

    // The first and the last tile that may be seen, by the positions of spans.
    static DEVICE int2 visible_tiles(const BackwardCall &call, const TileBounds &held) {
        const Tokens &passing = KEYS ? call.queries : call.keys;
        int2 tiles = {0, (passing.len - 1) / TILE};
        if (passing.list) return tiles;
        // How far before and behind the tokens that are held the others may be.
        int before = call.causal && KEYS ? 0 : call.window - 1, behind = call.causal && !KEYS ? 0 : call.window - 1;
        int64_t first = (int64_t)held.first - passing.start - before;
        int64_t last = (int64_t)held.last - passing.start + behind;
        if (first > 0) tiles.x = (int)min(first / TILE, (int64_t)tiles.y + 1);
        tiles.y = last < 0 ? -1 : (int)min(last / TILE, (int64_t)tiles.y);
        return tiles;
    }

    // The next tile that is seen, of the head's tiles from `tile` on down; a lane looks at a tile.
    DEVICE int seen_from(int tile) const {
        if (!passing_tokens().list) return tile < block.tiles.x ? -1 : tile;
        for (; tile >= 0; tile -= 32) {
            bool seen = tile >= lane && sight_of(bounds_of(tile - lane), false) != NONE;
            unsigned found = __ballot_sync(WARP, seen);
            if (found) return tile - (__ffs(found) - 1);
        }
        return -1;
    }

    // What passes by behind `passing`.
    DEVICE Passing<T> next(Passing<T> passing) const {
        passing.tile = seen_from(passing.tile - 1);
        if (KEYS && passing.tile < 0) {
            passing.tile = seen_from(block.tiles.y);
            passing.head--;
        }
        if (passing.tile < 0 || passing.head < block.kv_head * call.group) return {-1, -1};
        TileBounds bounds = bounds_of(passing.tile);
        bool full = (passing.tile + 1) * TILE <= passing_tokens().len;
        passing.first = bounds.first;
        passing.all = sight_of(bounds, full) == ALL && !block.enormous;
        if (PHASE && passing.all) {
            // Distances of what lies beyond the end are looked up too.
            int greatest = max(block.held.first + HELD - bounds.first, bounds.first + TILE - block.held.first);
            passing.all = greatest < call.score.reach;
        }
        const Operand &first = KEYS ? call.q : call.k;
        int head = KEYS ? passing.head : block.kv_head;
        passing.rows[0] = head_of<T>(first, block.batch, head) + passing.tile * TILE * first.token;
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            const Operand &second = KEYS ? call.grad[i] : call.v[i];
            passing.rows[1 + i] = head_of<T>(second, block.batch, head) + passing.tile * TILE * second.token;
        }
        return passing;
    }

    // Whether the log-sum-exp of some query is so great that one number is too coarse for it.
    DEVICE bool is_enormous() const {
        int tiles = (call.queries.len + DELTA_TILE - 1) / DELTA_TILE;
        const int *marks = call.enormous + ((int64_t)block.batch * call.heads + (KEYS ? block.kv_head * call.group : block.head)) * tiles;
        int first = KEYS ? 0 : block.first / DELTA_TILE;
        int last = KEYS ? call.group * tiles : min((block.first + HELD - 1) / DELTA_TILE + 1, tiles);
        bool marked = false;
        for (int i = first + thread; i < last; i += THREADS) marked |= __ldg(marks + i) != 0;
        return __syncthreads_or(marked);
    }

    // ---- Copies ----

    // Starts copying rows of q or k.
    template <int COUNT, class MayRead>
    DEVICE void copy_first(uint32_t to, const T *from, int64_t stride, int first, int count, MayRead may_read) const {
        Tile::template copy<COUNT>(
            to, from, stride, first, count, [&](int chunk) { return source_column<Score, CHUNKS>(call, chunk); }, may_read);
    }

    // The same of piece `i` of v or grad.
    template <int COUNT, class MayRead>
    DEVICE void copy_second(uint32_t to, const T *from, int64_t stride, int first, int count, int i, MayRead may_read) const {
        int columns = value_columns(i);
        Tile::template copy<COUNT>(
            to, from, stride, first, count, [&](int chunk) { return 8 * chunk < columns ? 8 * chunk : -1; }, may_read);
    }

    DEVICE void copy_held() const {
        const Operand &first = KEYS ? call.k : call.q;
        int head = KEYS ? block.kv_head : block.head, count = held_tokens().len;
        auto all = [](int) { return true; };
        copy_first<HELD>(held_tile(0), head_of<T>(first, block.batch, head) + block.first * first.token, first.token,
                         block.first, count, all);
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            const Operand &second = KEYS ? call.v[i] : call.grad[i];
            copy_second<HELD>(held_tile(1 + i), head_of<T>(second, block.batch, head) + block.first * second.token,
                              second.token, block.first, count, i, all);
        }
    }

    // Starts copying a tile. Padding is not read, nor are queries that see nothing: 0 times NaN would be NaN.
    DEVICE void copy_passing(const Passing<T> &passing, int stage) const {
        int row = passing.tile * TILE, count = passing_tokens().len;
        const float2 *rows = KEYS ? call.rows + head_row(passing.head) : nullptr;
        auto may_read = [&](int row) {
            if (passing.all) return true;
            return KEYS ? __ldg(&rows[row].x) != INFINITY : token_at(call.keys, block.batch, row).position >= 0;
        };
        copy_first<TILE>(passing_tile(stage, 0), passing.rows[0], KEYS ? call.q.token : call.k.token, row, count, may_read);
#pragma unroll
        for (int i = 0; i < VALUES; i++)
            copy_second<TILE>(passing_tile(stage, 1 + i), passing.rows[1 + i], KEYS ? call.grad[i].token : call.v[i].token, row,
                              count, i, may_read);
        if (thread < TILE) {
            uint32_t record = shared_address(records + 2 * stage * TILE) + thread * 8;
            if constexpr (KEYS) {
                bool exists = row + thread < call.queries.len;
                if (exists) copy_async_8(record, rows + row + thread);
                else store_shared(record, __float_as_int(INFINITY), 0);
            }
            if (!passing.all) {
                Token token = token_at(passing_tokens(), block.batch, row + thread);
                store_shared(record + TILE * 8, token.position, token.segment);
                if constexpr (KEYS) lost_of(stage)[thread] = lost_at(passing.head, row + thread);
            }
        }
    }

    DEVICE float lost_at(int head, int row) const {
        return row < call.queries.len ? __ldg(&call.statistics[head_row(head) + row].y) : 0.f;
    }

    // Changes the sign of the held operand's part that is scaled.
    DEVICE void negate_held() const {
        for (int i = thread; i < HELD * WIDTH / 2; i += THREADS) {
            int row = i / (WIDTH / 2), column = i % (WIDTH / 2) * 2;
            if (!PHASE || column < WIDTH / 2) *(uint32_t *)(shared + row * PITCH + column * 2) ^= 0x80008000;
        }
        __syncthreads();
    }

    // ---- Products ----

    // products = held x passing, over the steps of 16 columns from `FIRST` to `LAST` of an operand; added if `ADD`.
    template <int FIRST, int LAST, bool ADD = false, int BLOCKS>
    DEVICE void multiply(float (&products)[BLOCKS][4], uint32_t held, uint32_t passing) const {
        if (!ADD) clear(products);
        held += (16 * warp + lane % 16) * PITCH + lane / 16 * 16;
        passing += (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16;
#pragma unroll
        for (int step = FIRST; step < LAST; step++) {
            uint32_t left[4];
            load_matrices(left, held + step * 32);
#pragma unroll
            for (int i = 0; i < BLOCKS; i += 2) {
                uint32_t right[4];
                load_matrices(right, passing + i * 8 * PITCH + step * 32);
                Half<T>::multiply_add(products[i], left, right[0], right[1]);
                Half<T>::multiply_add(products[i + 1], left, right[2], right[3]);
            }
        }
    }

    template <int BLOCKS> static DEVICE void clear(float (&products)[BLOCKS][4]) {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) products[i][e] = 0.f;
    }

    // sums += factors x passing, over the step's tokens and the columns from `column` on.
    template <int BLOCKS, int STEPS>
    DEVICE void add(float (*sums)[4], const uint32_t (&factors)[STEPS][4], uint32_t passing) const {
        passing += lane % 16 * PITCH + lane / 16 * 16;
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int c = 0; c < BLOCKS; c += 2) {
                uint32_t right[4];
                load_matrices_transposed(right, passing + step * 16 * PITCH + c * 16);
                Half<T>::multiply_add(sums[c], factors[step], right[0], right[1]);
                Half<T>::multiply_add(sums[c + 1], factors[step], right[2], right[3]);
            }
    }

    // ---- One step ----

    // Makes weights of products, and of these in place what the gradients are multiplied with: P, or P cos(2 pi w p) in x
    // and P a w sin(2 pi w p) in y. `turns` is w. `lost` is what the log-sum-exp lost.
    DEVICE float weigh(float &x, float &y, const Score &score, float turns, float ahead, float log_sum, float lost) const {
        float weight;
        if constexpr (PHASE) {
            float2 turned = Score::cos_sin_turns(turns, y);
            weight = exp2_approx(__fmaf_rn(x * turned.x, score.factor(), -log_sum) - lost);
            y = weight * x * (turns * turned.y);
            x = weight * turned.x;
        } else {
            if constexpr (Score::BIAS) x = score.near(x, ahead);
            weight = x = exp2_approx(__fmaf_rn(x, score.factor(), -log_sum) - lost);
        }
        return weight;
    }

    // {log-sum-exp, delta times the scale} of the queries at the columns of a block, or of the one that is held.
    DEVICE float4 rows_at(uint32_t record, int i, int half) const {
        if constexpr (!KEYS) return {rows[half].x, rows[half].y, rows[half].x, rows[half].y};
        int4 both = load_shared(record + i * 64);
        return *(float4 *)&both;
    }

    // What that lost.
    DEVICE float2 lost_at_columns(int stage, int index, int half) const {
        if constexpr (KEYS) return load_shared_pair(shared_address(lost_of(stage) + index));
        float lost = lost_of(0)[16 * warp + lane / 4 + 8 * half];
        return {lost, lost};
    }

    // All pairs of a step in which positions run on and every pair is visible; `ahead` is how far the query of the thread's
    // first pair is ahead of the key.
    DEVICE void weigh_all(Products<STEP> &x, Products<STEP> &y, Packed<STEP> &weights, const Score &score, uint32_t record, int ahead) const {
        // From a token that is held to the next, and from one that passes by to the next.
        constexpr int HELD_STEP = KEYS ? -1 : 1, PASSING_STEP = KEYS ? 1 : -1;
        // Tokens 8 apart on both sides are as far from each other: one entry serves both.
        const float2 *turns = PHASE ? call.score.turns + call.score.reach + ahead + (KEYS ? 1 : 0) : nullptr;
        float2 entries[2];
        if constexpr (PHASE) {
            entries[0] = __ldg(turns);
            entries[1] = __ldg(turns + 8 * HELD_STEP);
        }
#pragma unroll
        for (int i = 0; i < STEP / 8; i++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float4 row = rows_at(record, i, half);
                float pair[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float w = (e == 0) == KEYS ? entries[half].y : entries[half].x;
                    float far = (float)ahead + (float)(8 * half * HELD_STEP + (8 * i + e) * PASSING_STEP);
                    pair[e] = weigh(x[i][2 * half + e], y[i][2 * half + e], score, w, far, e == 0 ? row.x : row.z, 0.f);
                }
                if constexpr (KEYS) weights[i / 2][i % 2 * 2 + half] = Half<T>::pack(pair[0], pair[1]);
            }
            if constexpr (PHASE) {
                entries[1] = entries[0];
                if (i + 1 < STEP / 8) entries[0] = __ldg(turns + 8 * (i + 1) * PASSING_STEP);
            }
        }
    }

    // All pairs of a step one by one, from the tokens of both; returns a bit for each that is visible, the first lowest.
    DEVICE unsigned weigh_each(Products<16> &x, Products<16> &y, Packed<16> &weights, const Score &score, int stage, uint32_t record,
                               int from) const {
        unsigned seen = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Token held = token_at(held_tokens(), block.batch, first_held() + 8 * half);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int4 tokens = load_shared(record + TILE * 8 + i * 64);
                float4 row = rows_at(record, i, half);
                float2 lost = lost_at_columns(stage, from + 8 * i + lane % 4 * 2, half);
                float pair[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    Token other = e == 0 ? Token{tokens.x, tokens.y} : Token{tokens.z, tokens.w};
                    Token query = KEYS ? other : held, key = KEYS ? held : other;
                    int ahead = query.position - key.position, index = 4 * i + 2 * half + e;
                    bool sees = is_visible(call, query, key);
                    float w = 0.f;
                    if constexpr (PHASE) w = score.turns_per_unit(ahead);
                    float weight = weigh(x[i][2 * half + e], y[i][2 * half + e], score, w, (float)ahead,
                                         e == 0 ? row.x : row.z, e == 0 ? lost.x : lost.y);
                    pair[e] = sees ? weight : 0.f;
                    seen |= (unsigned)sees << index;
                }
                if constexpr (KEYS) weights[i / 2][i % 2 * 2 + half] = Half<T>::pack(pair[0], pair[1]);
            }
        }
        return seen;
    }

    // Multiplies with dP - delta and the scale: f16 would not hold all that a small scale makes small.
    template <bool MASKED, int BLOCKS>
    DEVICE void pack_gradients(uint32_t (&gradients)[BLOCKS / 2][4], const float (&x)[BLOCKS][4], const float (&z)[BLOCKS][4],
                               uint32_t record, unsigned seen) const {
        float scale = fabsf(call.scale);
#pragma unroll
        for (int i = 0; i < BLOCKS; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float4 row = rows_at(record, i, half);
                float pair[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    pair[e] = x[i][2 * half + e] * __fmaf_rn(z[i][2 * half + e], scale, -(e == 0 ? row.y : row.w));
                    if (MASKED && !(seen >> (4 * i + 2 * half + e) & 1)) pair[e] = 0.f;
                }
                gradients[i / 2][i % 2 * 2 + half] = Half<T>::pack(pair[0], pair[1]);
            }
    }

    // TOKENS of a tile, from `from` on. `MASKED`: pairs have to be looked at one by one.
    template <bool MASKED, int TOKENS> DEVICE void look(const Score &score, const Passing<T> &passing, int stage, int from) {
        uint32_t first = passing_tile(stage, 0) + from * PITCH;
        uint32_t record = shared_address(records + 2 * stage * TILE) + (from + lane % 4 * 2) * 8;
        Products<TOKENS> x, y, z;
        Packed<TOKENS> weights, gradients;
        unsigned seen = 0;
        if constexpr (PHASE) multiply<MULTIPLICATIONS / 2, MULTIPLICATIONS>(y, held_tile(0), first);
        multiply<0, PHASE ? MULTIPLICATIONS / 2 : MULTIPLICATIONS>(x, held_tile(0), first);
        if constexpr (MASKED) seen = weigh_each(x, y, weights, score, stage, record, from);
        else {
            int passing_first = passing.first + from + lane % 4 * 2;
            int held_first = block.held.first + 16 * warp + lane / 4;
            weigh_all(x, y, weights, score, record, KEYS ? passing_first - held_first : held_first - passing_first);
        }
        multiply<0, MULTIPLICATIONS>(z, held_tile(1), first + TILE * PITCH);
#pragma unroll
        for (int i = 1; i < VALUES; i++)
            multiply<0, MULTIPLICATIONS, true>(z, held_tile(1 + i), first + (1 + i) * TILE * PITCH);

        if constexpr (KEYS) {
            constexpr int BLOCKS = SECOND_BLOCKS < WIDTH / 8 ? SECOND_BLOCKS : WIDTH / 8;
#pragma unroll
            for (int i = 0; i < SECOND_BLOCKS / BLOCKS; i++) {
                int column = block.piece * SECOND_COLUMNS + i * WIDTH;
                add<BLOCKS>(second_sums + i * BLOCKS, weights,
                            first + (1 + column / WIDTH) * TILE * PITCH + column % WIDTH * 2);
            }
        }
        if constexpr (!PHASE) {
            pack_gradients<MASKED>(gradients, x, z, record, seen);
            add<FIRST_BLOCKS>(first_sums, gradients, first + block.piece * FIRST_COLUMNS * 2);
        } else if constexpr (PIECES == 1) {
            pack_gradients<MASKED>(gradients, x, z, record, seen);
            add<FIRST_BLOCKS / 2>(first_sums, gradients, first);
            pack_gradients<MASKED>(gradients, y, z, record, seen);
            add<FIRST_BLOCKS / 2>(first_sums + FIRST_BLOCKS / 2, gradients, first + WIDTH);
        } else { // each piece is one of the parts
            if (block.piece == 0) pack_gradients<MASKED>(gradients, x, z, record, seen);
            else pack_gradients<MASKED>(gradients, y, z, record, seen);
            add<FIRST_BLOCKS>(first_sums, gradients, first + block.piece * WIDTH);
        }
    }

    // Whether the warp's tokens may see, or be seen by, the 16 from `from` on: known of spans.
    DEVICE bool may_see(int tile, int from) const {
        if (call.queries.list || call.keys.list) return true;
        int held = held_tokens().start + block.first + 16 * warp;
        int passing = passing_tokens().start + tile * TILE + from;
        int ahead = KEYS ? passing - held : held - passing; // of the first query and the first key
        return (!call.causal || ahead > -16) && ahead - 15 < call.window;
    }

    // ---- Results ----

    // Writes sums of the warp's tokens, `BLOCKS` of 8 columns from `column` on, through the shared memory of what the warp
    // held. `to_column(chunk)` is where a chunk of a row belongs, below 0 for nowhere. What nothing saw may be NaN.
    template <int BLOCKS, class Factor, class ToColumn>
    DEVICE void write(const Operand &to, int head, int count, const float (*sums)[4], const bool (&unseen)[2], Factor factor,
                      ToColumn to_column) const {
        uint8_t *tile = shared + 16 * warp * PITCH;
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int c = 0; c < BLOCKS; c++) {
                const float *pair = &sums[c][2 * half];
                *(uint32_t *)(tile + (8 * half + lane / 4) * PITCH + c * 16 + lane % 4 * 4) =
                    unseen[half] ? 0 : Half<T>::pack(pair[0] * factor(c), pair[1] * factor(c));
            }
        __syncwarp();
        T *out = (T *)head_of<T>(to, block.batch, head);
        for (int j = lane; j < 16 * BLOCKS; j += 32) {
            int row = j / BLOCKS, chunk = j % BLOCKS, token = block.first + 16 * warp + row, column = to_column(chunk);
            if (token < count && column >= 0)
                *(uint4 *)(out + token * to.token + column) = *(uint4 *)(tile + row * PITCH + chunk * 16);
        }
    }

    DEVICE void write() const {
        bool unseen[2];
#pragma unroll
        for (int half = 0; half < 2; half++)
            unseen[half] = KEYS ? token_at(call.keys, block.batch, first_held() + 8 * half).position < 0
                                : rows[half].x == INFINITY;
        auto factor = [&](int c) {
            bool of_phase = PHASE && block.piece * FIRST_BLOCKS + c >= CHUNKS / 2;
            return of_phase ? -6.2831853f : copysignf(1.f, call.scale);
        };
        auto column = [&](int chunk) { return source_column<Score, CHUNKS>(call, block.piece * FIRST_BLOCKS + chunk); };
        write<FIRST_BLOCKS>(KEYS ? call.dk : call.dq, KEYS ? block.kv_head : block.head, held_tokens().len, first_sums, unseen,
                            factor, column);
        if constexpr (KEYS) {
            constexpr int BLOCKS = SECOND_BLOCKS < WIDTH / 8 ? SECOND_BLOCKS : WIDTH / 8;
#pragma unroll
            for (int i = 0; i < SECOND_BLOCKS / BLOCKS; i++) {
                auto column = [&](int chunk) {
                    int column = block.piece * SECOND_COLUMNS + i * WIDTH + 8 * chunk;
                    return column < call.value_width ? column : -1;
                };
                write<BLOCKS>(call.dv, block.kv_head, call.keys.len, second_sums + i * BLOCKS, unseen,
                              [](int) { return 1.f; }, column);
            }
        }
    }

    static DEVICE void describe(BackwardBlock<T> &block, const BackwardCall &call) {
        int row = blockIdx.x / call.tiles, tile = blockIdx.x % call.tiles, heads = KEYS ? call.heads / call.group : call.heads;
        block.batch = row / heads;
        block.kv_head = KEYS ? row % heads : row % heads / call.group;
        block.head = KEYS ? (block.kv_head + 1) * call.group - 1 : row % heads;
        block.piece = blockIdx.y;
        // The first keys are seen by the most queries, and the last queries see the most keys: they go first.
        block.first = (KEYS ? tile : call.tiles - 1 - tile) * HELD;
        block.held = tile_bounds(KEYS ? call.keys : call.queries, block.batch, block.first, HELD);
        block.tiles = visible_tiles(call, block.held);
    }

    // Starts copying the tile behind the i-th.
    DEVICE void start_next(int i) {
        Passing<T> following = next(block.passing[i % 2]);
        if (following.tile >= 0) copy_passing(following, (i + 1) % 2);
        commit_copies();
        if (thread == 0) block.passing[(i + 1) % 2] = following;
    }

    DEVICE void run() {
        Score score(call, block.head);
        clear(first_sums);
        clear(second_sums);
        if constexpr (!KEYS) {
            int64_t first = head_row(block.head);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = first_held() + 8 * half;
                rows[half] = row < call.queries.len ? __ldg(call.rows + first + row) : float2{INFINITY, 0.f};
            }
            if (thread < HELD) lost_of(0)[thread] = lost_at(block.head, block.first + thread);
        }
        bool enormous = is_enormous();
        if (thread == 0) block.enormous = enormous;
        __syncthreads();
        Passing<T> first = next({block.head, block.tiles.y + 1});
        if (first.tile >= 0) {
            copy_held();
            copy_passing(first, 0);
            commit_copies();
        }
        if (thread == 0) block.passing[0] = first;
        if (call.score.negate) {
            wait_for_copies<0>();
            __syncthreads();
            negate_held();
        }
        for (int i = 0;; i++) {
            wait_for_copies<0>();
            __syncthreads(); // the tile is there, and nobody needs the one before
            const Passing<T> &passing = block.passing[i % 2];
            if (passing.tile < 0) break;
            start_next(i);
            if constexpr (KEYS && Score::BIAS) score = Score(call, passing.head);
            if (passing.all) {
#pragma unroll 1
                for (int from = 0; from < TILE; from += STEP) look<false, STEP>(score, passing, i % 2, from);
            } else {
#pragma unroll 1
                for (int from = 0; from < TILE; from += 16)
                    if (may_see(passing.tile, from)) look<true, 16>(score, passing, i % 2, from);
            }
        }
        write();
    }
};

template <class Kernel> DEVICE void attend_backward(const BackwardCall &call) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ BackwardBlock<typename Kernel::T> block;
    if (threadIdx.x == 0) Kernel::describe(block, call);
    __syncthreads();
    Kernel(call, block, shared).run();
}
