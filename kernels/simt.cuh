// What the kernels without tensor cores have in common: numbers, the layout of columns, who sees whom, scores, and the
// two products, of rows with tokens of a stage and of weights with a stage.
//
// A block has rows of its own, and tiles of 32 other tokens pass by. A warp has 4 groups of 8 lanes. Lane `column` of
// group `group` has the rows group, group + 4, ... of its warp, and of those the scores of the tokens column,
// column + 8, column + 16, column + 24 of a tile; of a stage that is averaged, it has the vectors column and column + 8.
// So a row's scores are in the 8 lanes of one group, weights never leave their warp, and every read of shared memory is
// one of 16 bytes without a bank conflict. All sums have a fixed order.
#pragma once
#include "call.cuh"
#include "simt_numbers.cuh"

#if SCORE_DOT + SCORE_BIAS + SCORE_PHASE != 1
#error "define one of SCORE_DOT, SCORE_BIAS and SCORE_PHASE as 1"
#endif
#ifndef SCORE_DOT
#define SCORE_DOT 0
#endif
#ifndef SCORE_BIAS
#define SCORE_BIAS 0
#endif
#ifndef SCORE_PHASE
#define SCORE_PHASE 0
#endif

namespace simt {

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int KEYS = 32;                // tokens that pass by in a tile: one for each lane
constexpr int LANE_KEYS = KEYS / 8;     // of a row, for one lane
constexpr int PIECE = 128;              // columns that a block averages
constexpr unsigned ALL_LANES = 0xffffffffu;

// 16 bytes of shared memory.
template <typename Real>
struct alignas(16) Vector {
    Real at[16 / sizeof(Real)];
};

template <typename Real>
__device__ __forceinline__ Vector<Real> read_vector(const Real *from) {
    return *reinterpret_cast<const Vector<Real> *>(from);
}

// ---- Sizes ----

template <typename Real>
struct Sizes {
    static constexpr int VECTOR = 16 / sizeof(Real);
    static constexpr int ROWS = sizeof(Real) == 4 ? 4 : 2;      // of a lane
    static constexpr int WARP_ROWS = 4 * ROWS;
    static constexpr int BLOCK_ROWS = WARPS * WARP_ROWS;        // 64, or 32 for f64
    static constexpr int COLUMNS = 256 / sizeof(Real);          // of k or v in a stage: 64, or 32
    static constexpr int PITCH = COLUMNS + VECTOR;              // from one key of a stage to the next
    static constexpr int STAGE = KEYS * PITCH;
    static constexpr int LOADS = KEYS * COLUMNS / THREADS;      // of a thread, for a stage
    static constexpr int VALUE_STAGES = PIECE / COLUMNS;        // at most
    static constexpr int LANE_VECTORS = COLUMNS / VECTOR / 8;   // of a stage of v, for one lane
    static constexpr int LANE_COLUMNS = LANE_VECTORS * VECTOR;
    static constexpr int WEIGHT_PITCH = KEYS + VECTOR;
};

__host__ __device__ constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }

// Where the columns of q and k lie in shared memory.
struct Layout {
    int head_width, amplitude_width;
    int split;  // where the phase part starts, in shared memory
    int width;  // in shared memory
    int pitch;  // from one row of q to the next: an odd number of vectors

    __device__ Layout(const SimtProblem &problem, int vector) {
        head_width = problem.head_width;
        amplitude_width = SCORE_PHASE ? problem.amplitude_width : problem.head_width;
        split = round_up(amplitude_width, vector);
        width = split + round_up(head_width - amplitude_width, vector);
        pitch = width / vector % 2 == 0 ? width + vector : width;
    }

    // The column of q or k that belongs into this one, -1 for a zero.
    __device__ int source(int column) const {
        if (column < split) return column < amplitude_width ? column : -1;
        const int source = amplitude_width + column - split;
        return source < head_width ? source : -1;
    }
};

// ---- Which keys are seen ----

// What some tokens have in common, padding aside.
struct Bounds {
    int64_t first, last;  // positions; first > last where all is padding
    int64_t segment_first, segment_last;
    bool real;            // none of them is padding
};

__device__ __forceinline__ int64_t position_of(const SimtTokens &tokens, int64_t batch, int64_t token) {
    return tokens.positions ? tokens.positions[batch * tokens.batch + token] : tokens.start + token;
}

__device__ __forceinline__ int64_t segment_of(const SimtTokens &tokens, int64_t batch, int64_t token) {
    return tokens.segments ? tokens.segments[batch * tokens.batch + token] : 0;
}

__device__ __forceinline__ int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }
__device__ __forceinline__ int64_t greatest(int64_t x, int64_t y) { return x > y ? x : y; }

__device__ __forceinline__ int64_t least_of_warp(int64_t x) {
    for (int mask = 16; mask > 0; mask /= 2) {
        x = least(x, static_cast<int64_t>(__shfl_xor_sync(ALL_LANES, static_cast<long long>(x), mask)));
    }
    return x;
}

__device__ __forceinline__ Bounds no_bounds() { return {INT64_MAX, -1, INT64_MAX, INT64_MIN + 1, true}; }

__device__ __forceinline__ void include(Bounds &bounds, int64_t position, int64_t segment) {
    if (position < 0) {
        bounds.real = false;
        return;
    }
    bounds.first = least(bounds.first, position);
    bounds.last = greatest(bounds.last, position);
    bounds.segment_first = least(bounds.segment_first, segment);
    bounds.segment_last = greatest(bounds.segment_last, segment);
}

// From the bounds of each lane.
__device__ __forceinline__ Bounds bounds_of_warp(Bounds lane) {
    return {least_of_warp(lane.first), -least_of_warp(-lane.last), least_of_warp(lane.segment_first),
            -least_of_warp(-lane.segment_last), __all_sync(ALL_LANES, lane.real) != 0};
}

// Of the tokens `from` to `to`, `to` included.
__device__ inline Bounds bounds_of(const SimtTokens &tokens, int64_t batch, int64_t from, int64_t to) {
    if (!tokens.positions) {
        return {greatest(tokens.start + from, 0), tokens.start + to, 0, 0, tokens.start + from >= 0};
    }
    Bounds lane = no_bounds();
    for (int64_t token = from + threadIdx.x % 32; token <= to; token += 32) {
        include(lane, position_of(tokens, batch, token), segment_of(tokens, batch, token));
    }
    return bounds_of_warp(lane);
}

// 32 tokens that pass by, some of which see or are seen.
struct PassingTile {
    int64_t first;              // number of the first one
    int64_t position, segment;  // of this lane's token; the position is -1 beyond the last one
    unsigned real;              // bit i: token i is one, and not padding
    bool whole;                 // every row and every token see each other
};

// Who of a block's rows and of the tokens that pass by see each other. The rows are queries and keys pass by, or, where
// QUERIES_PASS, the other way round.
template <bool QUERIES_PASS>
struct Sight {
    const SimtTokens &passing;
    int64_t batch;
    Bounds rows;
    bool causal;
    int64_t window;
    int64_t begin, end;  // tokens outside are not seen, nor see anything

    __device__ Sight(const SimtProblem &problem, int64_t batch, const Bounds &rows)
        : passing(QUERIES_PASS ? problem.queries : problem.keys), batch(batch), rows(rows), causal(problem.causal != 0) {
        // Positions are below 2^53: this window is as good as none, and cannot overflow.
        window = least(problem.window, int64_t(1) << 60);
        begin = 0;
        end = rows.first > rows.last ? 0 : passing.len;
        if (!passing.positions) {
            const bool none_before = causal && QUERIES_PASS, none_behind = causal && !QUERIES_PASS;
            const int64_t from = greatest(none_before ? rows.first : rows.first - window + 1, 0) - passing.start;
            const int64_t to = (none_behind ? rows.last : rows.last + window - 1) - passing.start + 1;
            begin = greatest(from, 0) / KEYS * KEYS;
            end = least(end, to);
        }
    }

    // The next tile at `first` or behind it where anything may be seen. Tokens for which `wanted` is false are passed over
    // as if they were padding.
    template <typename Wanted>
    __device__ bool find(PassingTile &tile, int64_t first, const Wanted &wanted) const {
        const int lane = threadIdx.x % 32;
        for (; first < end; first += KEYS) {
            const int64_t token = first + lane;
            const bool exists = token < passing.len;
            tile.first = first;
            tile.position = exists ? position_of(passing, batch, token) : -1;
            tile.segment = exists ? segment_of(passing, batch, token) : 0;
            if (tile.position >= 0 && !wanted(token)) tile.position = -1;
            tile.real = __ballot_sync(ALL_LANES, tile.position >= 0);
            Bounds others;
            if (passing.positions) {
                Bounds own = no_bounds();
                include(own, tile.position, tile.segment);
                others = bounds_of_warp(own);
            } else {
                others = {greatest(passing.start + first, 0), passing.start + least(first + KEYS, passing.len) - 1, 0, 0,
                          tile.real == ALL_LANES};
            }
            const Bounds &queries = QUERIES_PASS ? others : rows, &keys = QUERIES_PASS ? rows : others;
            const bool apart = tile.real == 0 || keys.segment_first > queries.segment_last ||
                               queries.segment_first > keys.segment_last || (causal && keys.first > queries.last) ||
                               queries.first - keys.last >= window || keys.first - queries.last >= window;
            if (apart) continue;
            tile.whole = queries.real && keys.real && keys.segment_first == keys.segment_last &&
                         queries.segment_first == queries.segment_last && queries.segment_first == keys.segment_first &&
                         (!causal || keys.last <= queries.first) && queries.last - keys.first < window &&
                         keys.last - queries.first < window;
            return true;
        }
        return false;
    }

    // Whether a query at m sees a key at n, segments aside.
    __device__ bool sees(int64_t m, int64_t n) const {
        const int64_t behind = m - n;
        return m >= 0 && n >= 0 && (!causal || behind >= 0) && behind < window && -behind < window;
    }
};

// ---- Scores ----

// Whole turns are dropped from the exact product, and what is left is doubled: of pi instead of 2 pi.
__device__ __forceinline__ float half_turns(float x, float y) { return 2.f * fmaf(x, y, -rintf(x * y)); }
__device__ __forceinline__ double half_turns(double x, double y) { return 2. * fma(x, y, -rint(x * y)); }
__device__ __forceinline__ float cosine_of_half_turns(float x) { return cospif(x); }
__device__ __forceinline__ double cosine_of_half_turns(double x) { return cospi(x); }
__device__ __forceinline__ float sine_of_half_turns(float x) { return sinpif(x); }
__device__ __forceinline__ double sine_of_half_turns(double x) { return sinpi(x); }

// |m - n|^alpha * phase_scale where no table has it. A call, for it is long and inlined many times otherwise.
__device__ __noinline__ double far_turns(double distance, double alpha, double phase_scale) {
    return pow(distance, alpha) * phase_scale;
}

// What a row's scores depend on, beside the products. Every step is rounded by itself, so that the backward pass makes
// the same scores again: a score of a million is known to a sixteenth, and a weight is the exponential of a difference.
template <typename Real>
struct RowScore {
    Real scale;
    Real slope, slope_rest;  // bias: rounded, and what rounding lost
    const SimtProblem &problem;

    __device__ RowScore(const SimtProblem &problem, int head) : scale(static_cast<Real>(problem.scale)), problem(problem) {
        if (SCORE_BIAS) {
            slope = static_cast<Real>(problem.slopes[head]);
            slope_rest = static_cast<Real>(problem.slopes[head] - static_cast<double>(slope));
        }
    }

    // Turns for each unit of the phase, |m - n|^alpha * phase_scale.
    __device__ Real turns(int64_t distance) const {
        if (sizeof(Real) == 4 && distance < problem.reach) {
            return static_cast<Real>(__ldg(&problem.turns[problem.reach + distance].x));
        }
        return static_cast<Real>(far_turns(static_cast<double>(distance), problem.alpha, problem.phase_scale));
    }

    // `dot` is q * k, of the amplitude parts for a phase; `phase` of the phase parts.
    __device__ Real operator()(Real dot, Real phase, int64_t m, int64_t n) const {
        dot = multiply(dot, scale);
        if (SCORE_DOT) return dot;
        const int64_t distance = m < n ? n - m : m - n;
        if (SCORE_BIAS) {
            const Real far = static_cast<Real>(distance);
            return multiply_add(-slope, far, multiply_add(-slope_rest, far, dot));
        }
        return multiply(dot, cosine_of_half_turns(half_turns(turns(distance), phase)));
    }

    // The same, and what the score gains with `dot` and with `phase`.
    __device__ Real operator()(Real dot, Real phase, int64_t m, int64_t n, Real &by_dot, Real &by_phase) const {
        if (!SCORE_PHASE) {
            by_dot = scale;
            by_phase = 0;
            return (*this)(dot, phase, m, n);
        }
        constexpr Real TURN = static_cast<Real>(6.283185307179586);
        dot = multiply(dot, scale);
        const Real per_unit = turns(m < n ? n - m : m - n);
        const Real angle = half_turns(per_unit, phase);
        const Real cosine = cosine_of_half_turns(angle);
        by_dot = scale * cosine;
        by_phase = -dot * sine_of_half_turns(angle) * (TURN * per_unit);
        return multiply(dot, cosine);
    }
};

// ---- Products ----

// products[i][j] += rows[4 i] * keys[8 j] over `columns` columns, a multiple of a vector.
template <typename Real>
__device__ __forceinline__ void add_products(Real (&products)[Sizes<Real>::ROWS][LANE_KEYS], const Real *rows,
                                         int row_pitch, const Real *keys, int columns) {
    using Size = Sizes<Real>;
#pragma unroll 2
    for (int c = 0; c < columns; c += Size::VECTOR) {
        Vector<Real> row[Size::ROWS], key[LANE_KEYS];
#pragma unroll
        for (int i = 0; i < Size::ROWS; ++i) row[i] = read_vector(rows + 4 * i * row_pitch + c);
#pragma unroll
        for (int j = 0; j < LANE_KEYS; ++j) key[j] = read_vector(keys + 8 * j * Size::PITCH + c);
#pragma unroll
        for (int x = 0; x < Size::VECTOR; ++x)
#pragma unroll
            for (int i = 0; i < Size::ROWS; ++i)
#pragma unroll
                for (int j = 0; j < LANE_KEYS; ++j)
                    products[i][j] = multiply_add(row[i].at[x], key[j].at[x], products[i][j]);
    }
}

// sums[i] += weights[4 i] * values, over the keys of the tile.
template <typename Real>
__device__ __forceinline__ void average(Real (&sums)[Sizes<Real>::ROWS][Sizes<Real>::LANE_COLUMNS],
                                        const Real *weights, const Real *values) {
    using Size = Sizes<Real>;
#pragma unroll 2
    for (int key = 0; key < KEYS; key += Size::VECTOR) {
        Vector<Real> weight[Size::ROWS];
#pragma unroll
        for (int i = 0; i < Size::ROWS; ++i) weight[i] = read_vector(weights + 4 * i * Size::WEIGHT_PITCH + key);
#pragma unroll
        for (int x = 0; x < Size::VECTOR; ++x)
#pragma unroll
            for (int j = 0; j < Size::LANE_VECTORS; ++j) {
                const Vector<Real> value = read_vector(values + (key + x) * Size::PITCH + 8 * j * Size::VECTOR);
#pragma unroll
                for (int i = 0; i < Size::ROWS; ++i)
#pragma unroll
                    for (int y = 0; y < Size::VECTOR; ++y)
                        sums[i][j * Size::VECTOR + y] =
                            multiply_add(weight[i].at[x], value.at[y], sums[i][j * Size::VECTOR + y]);
            }
    }
}

}  // namespace simt
