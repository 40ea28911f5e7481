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
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "call.cuh"

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
constexpr int KEYS = 32;                // in a tile: one for each lane
constexpr int LANE_KEYS = KEYS / 8;     // of a row, for one lane
constexpr int PIECE = 128;              // value columns of a block
constexpr unsigned ALL_LANES = 0xffffffffu;

// ---- Numbers: elements are read as what they are accumulated in ----

template <typename Element>
struct Accumulate {
    using Real = float;
};
template <>
struct Accumulate<double> {
    using Real = double;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }

__device__ __forceinline__ void narrow(float *to, float x) { *to = x; }
__device__ __forceinline__ void narrow(double *to, double x) { *to = x; }
__device__ __forceinline__ void narrow(__nv_bfloat16 *to, float x) { *to = __float2bfloat16_rn(x); }
__device__ __forceinline__ void narrow(__half *to, float x) { *to = __float2half_rn(x); }

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }
__device__ __forceinline__ float multiply_add(float x, float y, float z) { return fmaf(x, y, z); }
__device__ __forceinline__ double multiply_add(double x, double y, double z) { return fma(x, y, z); }
__device__ __forceinline__ float greater(float x, float y) { return fmaxf(x, y); }
__device__ __forceinline__ double greater(double x, double y) { return fmax(x, y); }

// cos(2 pi x y). Whole turns are dropped from the exact product.
__device__ __forceinline__ float cosine_of_turns(float x, float y) {
    return cospif(2.f * fmaf(x, y, -rintf(x * y)));
}
__device__ __forceinline__ double cosine_of_turns(double x, double y) {
    return cospi(2. * fma(x, y, -rint(x * y)));
}

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

    __device__ Layout(const SimtCall &call, int vector) {
        head_width = call.head_width;
        amplitude_width = SCORE_PHASE ? call.amplitude_width : call.head_width;
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

// 32 keys, some of which are seen.
struct KeyTile {
    int64_t first;              // number of the first one
    int64_t position, segment;  // of this lane's key; the position is -1 beyond the last key
    unsigned real;              // bit i: key i is one, and not padding
    bool whole;                 // every row sees every key
};

// A block's sight.
struct Sight {
    const SimtTokens &keys;
    int64_t batch;
    Bounds rows;
    bool causal;
    int64_t window;
    int64_t begin, end;  // keys outside are not seen

    __device__ Sight(const SimtCall &call, int64_t batch, const Bounds &rows)
        : keys(call.keys), batch(batch), rows(rows), causal(call.causal != 0) {
        // Positions are below 2^53: this window is as good as none, and cannot overflow.
        window = least(call.window, int64_t(1) << 60);
        begin = 0;
        end = rows.first > rows.last ? 0 : keys.len;
        if (!keys.positions) {
            const int64_t from = greatest(rows.first - window + 1, 0) - keys.start;
            const int64_t to = (causal ? rows.last : rows.last + window - 1) - keys.start + 1;
            begin = greatest(from, 0) / KEYS * KEYS;
            end = least(end, to);
        }
    }

    // The next tile at `first` or behind it of which anything may be seen.
    __device__ bool find(KeyTile &tile, int64_t first) const {
        const int lane = threadIdx.x % 32;
        for (; first < end; first += KEYS) {
            const bool exists = first + lane < keys.len;
            tile.first = first;
            tile.position = exists ? position_of(keys, batch, first + lane) : -1;
            tile.segment = exists ? segment_of(keys, batch, first + lane) : 0;
            tile.real = __ballot_sync(ALL_LANES, tile.position >= 0);
            Bounds columns;
            if (keys.positions) {
                Bounds own = no_bounds();
                include(own, tile.position, tile.segment);
                columns = bounds_of_warp(own);
            } else {
                columns = {greatest(keys.start + first, 0), keys.start + least(first + KEYS, keys.len) - 1, 0, 0,
                           tile.real == ALL_LANES};
            }
            const bool apart = columns.first > columns.last || columns.segment_first > rows.segment_last ||
                               rows.segment_first > columns.segment_last || (causal && columns.first > rows.last) ||
                               rows.first - columns.last >= window || columns.first - rows.last >= window;
            if (apart) continue;
            tile.whole = rows.real && columns.real && columns.segment_first == columns.segment_last &&
                         rows.segment_first == rows.segment_last && rows.segment_first == columns.segment_first &&
                         (!causal || columns.last <= rows.first) && rows.last - columns.first < window &&
                         columns.last - rows.first < window;
            return true;
        }
        return false;
    }

    // Whether a row at m sees a key at n, segments aside.
    __device__ bool sees(int64_t m, int64_t n) const {
        const int64_t behind = m - n;
        return m >= 0 && n >= 0 && (!causal || behind >= 0) && behind < window && -behind < window;
    }
};

// ---- Scores ----

// |m - n|^alpha * phase_scale where no table has it. A call, for it is long and inlined many times otherwise.
__device__ __noinline__ double far_turns(double distance, double alpha, double phase_scale) {
    return pow(distance, alpha) * phase_scale;
}

// What a row's scores depend on, beside the products.
template <typename Real>
struct RowScore {
    Real scale;
    Real slope, slope_rest;  // bias: rounded, and what rounding lost
    const SimtCall &call;

    __device__ RowScore(const SimtCall &call, int head) : scale(static_cast<Real>(call.scale)), call(call) {
        if (SCORE_BIAS) {
            slope = static_cast<Real>(call.slopes[head]);
            slope_rest = static_cast<Real>(call.slopes[head] - static_cast<double>(slope));
        }
    }

    // Turns for each unit of the phase, |m - n|^alpha * phase_scale.
    __device__ Real turns(int64_t distance) const {
        if (sizeof(Real) == 4 && distance < call.reach) {
            return static_cast<Real>(__ldg(&call.turns[call.reach + distance].x));
        }
        return static_cast<Real>(far_turns(static_cast<double>(distance), call.alpha, call.phase_scale));
    }

    // `dot` is q * k, of the amplitude parts for a phase; `phase` of the phase parts.
    __device__ Real operator()(Real dot, Real phase, int64_t m, int64_t n) const {
        dot *= scale;
        if (SCORE_DOT) return dot;
        const int64_t distance = m < n ? n - m : m - n;
        if (SCORE_BIAS) {
            const Real far = static_cast<Real>(distance);
            return multiply_add(-slope, far, multiply_add(-slope_rest, far, dot));
        }
        return dot * cosine_of_turns(turns(distance), phase);
    }
};

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

// products[i][j] += rows[4 i] * keys[8 j] over `columns` columns, a multiple of a vector.
template <typename Real>
__device__ __forceinline__ void multiply(Real (&products)[Sizes<Real>::ROWS][LANE_KEYS], const Real *rows,
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

// ---- The kernel ----

// Grid: x = tiles * G * B, the tile fastest; y = ceil(E / PIECE). Block: THREADS.
// Shared memory, Real: BLOCK_ROWS * pitch + 2 * STAGE + BLOCK_ROWS * WEIGHT_PITCH.
template <typename Element>
__device__ __forceinline__ void attend(const SimtCall &call) {
    using Real = typename Accumulate<Element>::Real;
    using Size = Sizes<Real>;
    constexpr Real HIDDEN = -static_cast<Real>(INFINITY);

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int group = lane / 8, column = lane % 8;
    const int key_heads = call.heads / call.group;
    // The last queries of a causal call have the most to do: they go first.
    const int tile_index = call.tiles - 1 - static_cast<int>(blockIdx.x % call.tiles);
    const int key_head = static_cast<int>(blockIdx.x / call.tiles) % key_heads;
    const int64_t batch = blockIdx.x / call.tiles / key_heads;
    const int64_t first_row = int64_t(tile_index) * Size::BLOCK_ROWS;
    const int rows = static_cast<int>(least(call.queries.len * call.group - first_row, Size::BLOCK_ROWS));  // here
    const int64_t first_token = first_row / call.group;
    const int first_member = static_cast<int>(first_row % call.group);  // of the group
    const auto token_of = [&](int row) { return first_token + (first_member + row) / call.group; };
    const auto head_of = [&](int row) { return key_head * call.group + (first_member + row) % call.group; };
    const int value_first = blockIdx.y * PIECE;
    const Layout layout(call, Size::VECTOR);

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
        position[i] = row < rows ? position_of(call.queries, batch, token_of(row)) : -1;
        segment[i] = row < rows ? segment_of(call.queries, batch, token_of(row)) : 0;
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

    const Sight sight(call, batch, bounds_of(call.queries, batch, first_token, token_of(rows - 1)));

    const int key_stages = (layout.width + Size::COLUMNS - 1) / Size::COLUMNS;
    const int value_columns = call.value_width - value_first < PIECE ? call.value_width - value_first : PIECE;
    const int value_stages = (value_columns + Size::COLUMNS - 1) / Size::COLUMNS;
    const Element *const keys =
        static_cast<const Element *>(call.k.data) + batch * call.k.batch + key_head * call.k.head;
    const Element *const values =
        static_cast<const Element *>(call.v.data) + batch * call.v.batch + key_head * call.v.head + value_first;
    Fetch<Element, Real> fetch;
    const auto stage_of_keys = [&](const KeyTile &tile, int stage) {
        const int c = layout.source(stage * Size::COLUMNS + threadIdx.x % Size::COLUMNS);
        return Source<Element>{keys + tile.first * call.k.token + c, call.k.token, c >= 0 ? tile.real : 0};
    };
    const auto stage_of_values = [&](const KeyTile &tile, int stage) {
        const int c = stage * Size::COLUMNS + threadIdx.x % Size::COLUMNS;
        return Source<Element>{values + tile.first * call.v.token + c, call.v.token, c < value_columns ? tile.real : 0};
    };

    KeyTile tile;
    bool more = sight.find(tile, sight.begin);
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
                    multiply(products, stage_rows + c - from, layout.pitch, stage_keys + c - from, until - c);
                    c = until;
                }
            } else {
                multiply(products, stage_rows, layout.pitch, stage_keys, to - from);
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
            const RowScore<Real> score(call, head_of(own_row + 4 * i));
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

        KeyTile next;
        more = sight.find(next, tile.first + KEYS);
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
        const int64_t to = (batch * call.heads + head_of(row)) * call.queries.len + token_of(row);
        Element *const out_row = static_cast<Element *>(call.out) + to * call.value_width + value_first;
#pragma unroll
        for (int stage = 0; stage < Size::VALUE_STAGES; ++stage)
#pragma unroll
            for (int c = 0; c < Size::LANE_COLUMNS; ++c) {
                const int vector = c / Size::VECTOR * 8 + column;
                const int to_column = stage * Size::COLUMNS + vector * Size::VECTOR + c % Size::VECTOR;
                if (to_column < value_columns) narrow(out_row + to_column, empty ? Real(0) : out[stage][i][c] * inverse);
            }
        if (call.lse && blockIdx.y == 0 && column == 0) {
            static_cast<Real *>(call.lse)[to] = empty ? HIDDEN : greatest_score[i] + logarithm(sum[i]);
        }
    }
}

}  // namespace simt
