// Attention without tensor cores, for what they cannot take: f32 and f64, any width, any alignment, any positions.
//
// Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head width, E value width.
//
// A row is a query of one head. The rows of the H/G heads that share a key/value head are numbered
// token * (H/G) + head in group, so that one block reads keys and values once for all of them. A block has BLOCK_ROWS
// rows and looks at the keys it can see in tiles of 32; grid.y counts pieces of 128 value columns, each with scores of
// its own.
//
// For each row: m is the greatest score so far, l the sum of exp(score - m), o the sum of exp(score - m) * v. A tile
// whose scores are above m shrinks l and o first. Scores keep their natural unit and the maximum is subtracted before
// the exponential, so that scores of any size lose nothing but their own rounding.
//
// k and v pass through shared memory in stages of 32 keys and 256 bytes a key. While a stage is multiplied, the next
// one is on its way into registers; it is stored into the other of two buffers, and one barrier a stage suffices.
// The columns of k and q are laid out anew on the way: a phase's two parts each start at a multiple of 16 bytes and end
// in zeros. Keys that are padding are not read: zeros take their place, in k and v.
//
// A warp has 4 groups of 8 lanes. Lane `column` of group `group` has the rows group, group + 4, ... of its warp and of
// those the scores of keys column, column + 8, column + 16, column + 24, and in a stage of v the vectors column and
// column + 8. So the statistics of a row are in the 8 lanes of one group, weights never leave their warp, and every
// read of shared memory is one of 16 bytes without a bank conflict. All sums have a fixed order.
#pragma once
#include "simt.cuh"

namespace simt {

// ---- Stages ----

// Where a thread's share of a stage comes from: one column of every few keys.
template <typename Element>
struct Source {
    const Element *column;  // in the first key of the tile
    int64_t token;
    unsigned real;          // bit i: key i is read, else zero
};

// That share, under way from global memory.
template <typename Element, typename Real>
struct Fetch {
    using Size = Sizes<Real>;
    static constexpr int STEP = THREADS / Size::COLUMNS;  // in keys
    Real numbers[Size::LOADS];

    __device__ __forceinline__ void read(const Source<Element> &source) {
        const int first = threadIdx.x / Size::COLUMNS;
        const Element *from = source.column + first * source.token;
        const unsigned real = source.real >> first;
#pragma unroll
        for (int i = 0; i < Size::LOADS; ++i) {
            numbers[i] = real >> i * STEP & 1 ? widen(__ldg(from)) : Real(0);
            from += STEP * source.token;
        }
    }

    __device__ __forceinline__ void store(Real *stage) const {
        const int first = threadIdx.x / Size::COLUMNS;
#pragma unroll
        for (int i = 0; i < Size::LOADS; ++i) {
            stage[(first + i * STEP) * Size::PITCH + threadIdx.x % Size::COLUMNS] = numbers[i];
        }
    }
};

// ---- The kernel ----

// Grid: x = tiles * G * B, the tile fastest; y = ceil(E / PIECE). Block: THREADS.
// Shared memory, Real: BLOCK_ROWS * pitch + 2 * STAGE + BLOCK_ROWS * WEIGHT_PITCH.
template <typename Element>
__device__ __forceinline__ void attend(const SimtCall &call) {
    const SimtProblem &problem = call.problem;
    using Real = RealOf<Element>;
    using Size = Sizes<Real>;
    constexpr Real HIDDEN = -static_cast<Real>(INFINITY);

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int group = lane / 8, column = lane % 8;
    const int key_heads = problem.heads / problem.group;
    // The last queries of a causal call have the most to do: they go first.
    const int tile_index = problem.tiles - 1 - static_cast<int>(blockIdx.x % problem.tiles);
    const int key_head = static_cast<int>(blockIdx.x / problem.tiles) % key_heads;
    const int64_t batch = blockIdx.x / problem.tiles / key_heads;
    const int64_t first_row = int64_t(tile_index) * Size::BLOCK_ROWS;
    const int rows = static_cast<int>(least(problem.queries.len * problem.group - first_row, Size::BLOCK_ROWS));  // here
    const int64_t first_token = first_row / problem.group;
    const int first_member = static_cast<int>(first_row % problem.group);  // of the group
    const auto token_of = [&](int row) { return first_token + (first_member + row) / problem.group; };
    const auto head_of = [&](int row) { return key_head * problem.group + (first_member + row) % problem.group; };
    const int value_first = blockIdx.y * PIECE;
    const Layout layout(problem, Size::VECTOR);

    extern __shared__ __align__(16) unsigned char shared_memory[];
    Real *const queries = reinterpret_cast<Real *>(shared_memory);            // [BLOCK_ROWS][layout.pitch]
    Real *const stages = queries + Size::BLOCK_ROWS * layout.pitch;           // [2][KEYS][PITCH]
    Real *const weights = stages + 2 * Size::STAGE;                           // [BLOCK_ROWS][WEIGHT_PITCH]

    for (int row = warp; row < Size::BLOCK_ROWS; row += WARPS) {
        const Element *const from = static_cast<const Element *>(call.q.data) + batch * call.q.batch +
                                    head_of(row) * call.q.head + token_of(row) * call.q.token;
        for (int c = lane; c < layout.width; c += 32) {
            const int source = layout.source(c);
            queries[row * layout.pitch + c] = source >= 0 && row < rows ? widen(from[source]) : Real(0);
        }
    }

    // This lane's rows.
    const int own_row = warp * Size::WARP_ROWS + group;  // and every fourth after it
    int64_t position[Size::ROWS], segment[Size::ROWS];
#pragma unroll
    for (int i = 0; i < Size::ROWS; ++i) {
        const int row = own_row + 4 * i;
        position[i] = row < rows ? position_of(problem.queries, batch, token_of(row)) : -1;
        segment[i] = row < rows ? segment_of(problem.queries, batch, token_of(row)) : 0;
    }
    Real greatest_score[Size::ROWS], sum[Size::ROWS];
    Real out[Size::VALUE_STAGES][Size::ROWS][Size::LANE_COLUMNS];
#pragma unroll
    for (int i = 0; i < Size::ROWS; ++i) {
        greatest_score[i] = HIDDEN;
        sum[i] = 0;
#pragma unroll
        for (int stage = 0; stage < Size::VALUE_STAGES; ++stage)
#pragma unroll
            for (int c = 0; c < Size::LANE_COLUMNS; ++c) out[stage][i][c] = 0;
    }

    const Sight<false> sight(problem, batch, bounds_of(problem.queries, batch, first_token, token_of(rows - 1)));

    const int key_stages = (layout.width + Size::COLUMNS - 1) / Size::COLUMNS;
    const int value_columns = problem.value_width - value_first < PIECE ? problem.value_width - value_first : PIECE;
    const int value_stages = (value_columns + Size::COLUMNS - 1) / Size::COLUMNS;
    const Element *const keys =
        static_cast<const Element *>(call.k.data) + batch * call.k.batch + key_head * call.k.head;
    const Element *const values =
        static_cast<const Element *>(call.v.data) + batch * call.v.batch + key_head * call.v.head + value_first;
    Fetch<Element, Real> fetch;
    const auto stage_of_keys = [&](const PassingTile &tile, int stage) {
        const int c = layout.source(stage * Size::COLUMNS + threadIdx.x % Size::COLUMNS);
        return Source<Element>{keys + tile.first * call.k.token + c, call.k.token, c >= 0 ? tile.real : 0};
    };
    const auto stage_of_values = [&](const PassingTile &tile, int stage) {
        const int c = stage * Size::COLUMNS + threadIdx.x % Size::COLUMNS;
        return Source<Element>{values + tile.first * call.v.token + c, call.v.token, c < value_columns ? tile.real : 0};
    };

    const auto all = [](int64_t) { return true; };
    PassingTile tile;
    bool more = sight.find(tile, sight.begin, all);
    int buffer = 0;  // of `stages`, the one to multiply
    const auto store_and_turn = [&]() {
        buffer ^= 1;
        fetch.store(stages + buffer * Size::STAGE);
        __syncthreads();
    };
    if (more) {
        fetch.read(stage_of_keys(tile, 0));
        store_and_turn();  // the queries are there, too
    }
    while (more) {
        Real products[Size::ROWS][LANE_KEYS], amplitudes[Size::ROWS][LANE_KEYS];
#pragma unroll
        for (int i = 0; i < Size::ROWS; ++i)
#pragma unroll
            for (int j = 0; j < LANE_KEYS; ++j) products[i][j] = amplitudes[i][j] = 0;
        for (int stage = 0; stage < key_stages; ++stage) {
            fetch.read(stage + 1 < key_stages ? stage_of_keys(tile, stage + 1) : stage_of_values(tile, 0));
            const int from = stage * Size::COLUMNS;
            const int to = layout.width - from < Size::COLUMNS ? layout.width : from + Size::COLUMNS;
            const Real *const stage_keys = stages + buffer * Size::STAGE + column * Size::PITCH;
            const Real *const stage_rows = queries + own_row * layout.pitch + from;
            if (SCORE_PHASE) {
                // Where the phase part starts, the product of the amplitude parts is complete.
                int c = from;
                while (c < to) {
                    if (c == layout.split) {
#pragma unroll
                        for (int i = 0; i < Size::ROWS; ++i)
#pragma unroll
                            for (int j = 0; j < LANE_KEYS; ++j) {
                                amplitudes[i][j] = products[i][j];
                                products[i][j] = 0;
                            }
                    }
                    const int until = c < layout.split && layout.split < to ? layout.split : to;
                    add_products(products, stage_rows + c - from, layout.pitch, stage_keys + c - from, until - c);
                    c = until;
                }
            } else {
                add_products(products, stage_rows, layout.pitch, stage_keys, to - from);
            }
            store_and_turn();
        }

        int64_t key_position[LANE_KEYS], key_segment[LANE_KEYS];
#pragma unroll
        for (int j = 0; j < LANE_KEYS; ++j) {
            key_position[j] = __shfl_sync(ALL_LANES, static_cast<long long>(tile.position), column + 8 * j);
            key_segment[j] = __shfl_sync(ALL_LANES, static_cast<long long>(tile.segment), column + 8 * j);
        }
#pragma unroll
        for (int i = 0; i < Size::ROWS; ++i) {
            const RowScore<Real> score(problem, head_of(own_row + 4 * i));
            Real greatest_here = HIDDEN;
#pragma unroll
            for (int j = 0; j < LANE_KEYS; ++j) {
                const bool seen = tile.whole || (sight.sees(position[i], key_position[j]) && segment[i] == key_segment[j]);
                Real &s = products[i][j];
                s = SCORE_PHASE ? score(amplitudes[i][j], s, position[i], key_position[j])
                                : score(s, Real(0), position[i], key_position[j]);
                if (!seen) s = HIDDEN;
                greatest_here = greater(greatest_here, s);
            }
#pragma unroll
            for (int mask = 4; mask > 0; mask /= 2) {
                greatest_here = greater(greatest_here, __shfl_xor_sync(ALL_LANES, greatest_here, mask));
            }
            const Real before = greatest_score[i];
            greatest_score[i] = greater(before, greatest_here);
            // Nothing seen yet: all differences are -inf, and not NaN.
            const Real shift = greatest_score[i] == HIDDEN ? Real(0) : greatest_score[i];
            const Real shrink = exponential(before - shift);
            sum[i] *= shrink;
#pragma unroll
            for (int j = 0; j < LANE_KEYS; ++j) {
                const Real weight = exponential(products[i][j] - shift);
                sum[i] += weight;
                weights[(own_row + 4 * i) * Size::WEIGHT_PITCH + column + 8 * j] = weight;
            }
#pragma unroll
            for (int stage = 0; stage < Size::VALUE_STAGES; ++stage)
#pragma unroll
                for (int c = 0; c < Size::LANE_COLUMNS; ++c) out[stage][i][c] *= shrink;
        }
        __syncwarp();

        PassingTile next;
        more = sight.find(next, tile.first + KEYS, all);
#pragma unroll
        for (int stage = 0; stage < Size::VALUE_STAGES; ++stage) {
            if (stage >= value_stages) break;
            const bool last = stage + 1 == value_stages;
            if (!last || more) fetch.read(last ? stage_of_keys(next, 0) : stage_of_values(tile, stage + 1));
            average(out[stage], weights + own_row * Size::WEIGHT_PITCH,
                    stages + buffer * Size::STAGE + column * Size::VECTOR);
            if (!last || more) store_and_turn();
        }
        tile = next;
    }

#pragma unroll
    for (int i = 0; i < Size::ROWS; ++i) {
#pragma unroll
        for (int mask = 4; mask > 0; mask /= 2) sum[i] += __shfl_xor_sync(ALL_LANES, sum[i], mask);
        const int row = own_row + 4 * i;
        if (row >= rows) continue;
        const bool empty = sum[i] == 0;
        const Real inverse = empty ? Real(0) : 1 / sum[i];
        const int64_t to = (batch * problem.heads + head_of(row)) * problem.queries.len + token_of(row);
        const int64_t to_row = to * problem.value_width + value_first;
        Element *const out_row = static_cast<Element *>(call.out) + to_row;
        Element *const rest_row = call.rest ? static_cast<Element *>(call.rest) + to_row : nullptr;
#pragma unroll
        for (int stage = 0; stage < Size::VALUE_STAGES; ++stage)
#pragma unroll
            for (int c = 0; c < Size::LANE_COLUMNS; ++c) {
                const int vector = c / Size::VECTOR * 8 + column;
                const int to_column = stage * Size::COLUMNS + vector * Size::VECTOR + c % Size::VECTOR;
                if (to_column >= value_columns) continue;
                const Real exact = empty ? Real(0) : multiply(out[stage][i][c], inverse);
                const Element rounded = narrow<Element>(exact);
                out_row[to_column] = rounded;
                if (rest_row) rest_row[to_column] = narrow<Element>(exact - widen(rounded));
            }
        if (blockIdx.y > 0 || column > 0) continue;
        const Real log_sum = empty ? Real(0) : logarithm(sum[i]);
        const Real greatest_here = empty ? HIDDEN : greatest_score[i];
        if (call.lse) static_cast<Real *>(call.lse)[to] = greatest_here + log_sum;
        if (call.statistics) {
            static_cast<Real *>(call.statistics)[2 * to] = greatest_here;
            static_cast<Real *>(call.statistics)[2 * to + 1] = log_sum;
        }
    }
}

}  // namespace simt
