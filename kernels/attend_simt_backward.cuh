// The backward pass of attention without tensor cores: f32, f64, bf16 and f16, any width, any alignment, any positions.
//
// With weights P, dP = grad v^T and delta = the sum of out * grad along a row, the gradient of the scores is
// dS = P (dP - delta) (FlashAttention, Dao et al., arXiv 2205.14135, appendix B.4), and
//     dq = scale dS k,    dk = scale dS^T q,    dv = P^T grad.
// Of a phase's score a cos(2 pi w p), a = scale q_A.k_A and p = q_P.k_P (TAPA, Wang et al., arXiv 2509.12635v1, eq. 12),
// the amplitude parts get dS scale cos in place of dS scale, the phase parts -dS a 2 pi w sin.
//
// Two kernels, and no number that two blocks write: one whose rows are queries, which makes dq while keys pass by, and
// one whose rows are keys, which makes dk and dv while the queries of every head in the group pass by. Rows of queries
// are numbered as in the forward pass. Both make the scores anew, bit for bit the forward pass's, and take the row's
// greatest score and the logarithm of its sum from them, one after the other.
//
// Columns of rows and of what passes by come into shared memory in stages of 256 bytes a token: q and k for the scores,
// grad and v for dP, and what is averaged once more. grid.y counts pieces of 128 columns of the results, those of dk
// before those of dv, each with scores of its own, and dP where it is needed.
//
// Tokens that are padding, and queries that see nothing, are not read where they pass by: zeros take their place. Where
// they are rows, zeros are written.
#pragma once
#include "simt.cuh"

namespace simt {

// ---- Sizes ----

template <typename Real>
struct BackwardSizes : Sizes<Real> {
    using Base = Sizes<Real>;
    static constexpr int ROW_STAGE = Base::BLOCK_ROWS * Base::PITCH;
    static constexpr int WEIGHTS = Base::BLOCK_ROWS * Base::WEIGHT_PITCH;
    static constexpr int KINDS = SCORE_PHASE ? 3 : 2;  // of weights: for dv, for dk or dq, and for the phase's part of those
    // In Real and then in bytes: both stages, weights, what is known of rows and of what passes by.
    static constexpr int SHARED =
        sizeof(Real) * (ROW_STAGE + Base::STAGE + KINDS * WEIGHTS) + (4 * 8 + 3 * sizeof(Real)) * (Base::BLOCK_ROWS + KEYS);
};

// What is known of tokens, in shared memory.
template <typename Real>
struct Known {
    int64_t *position, *segment;
    int64_t *first, *second;  // where its columns start: of q or k, and of grad or v
    Real *greatest, *log_sum, *delta;

    __device__ Known(unsigned char *memory, int tokens) {
        position = reinterpret_cast<int64_t *>(memory);
        segment = position + tokens;
        first = segment + tokens;
        second = first + tokens;
        greatest = reinterpret_cast<Real *>(second + tokens);
        log_sum = greatest + tokens;
        delta = log_sum + tokens;
    }
};

// ---- Stages ----

// Columns of some tokens, laid out anew: column `from` + i of the layout into column i of the stage. Tokens whose start is
// negative, and columns without a source, become zeros.
template <typename Real, int TOKENS, typename Element, typename Column>
__device__ __forceinline__ void load(Real *stage, const Element *data, const int64_t *starts, const Column &source) {
    using Size = Sizes<Real>;
    constexpr int STEP = THREADS / Size::COLUMNS;
    const int column = threadIdx.x % Size::COLUMNS, first = threadIdx.x / Size::COLUMNS;
    const int from = source(column);
#pragma unroll 8
    for (int token = first; token < TOKENS; token += STEP) {
        const int64_t start = starts[token];
        stage[token * Size::PITCH + column] = from >= 0 && start >= 0 ? widen(__ldg(data + start + from)) : Real(0);
    }
}

// sums[i] += weights[4 i] * values over the tokens of the tile; vector j of the lane has weights of its own.
template <typename Real>
__device__ __forceinline__ void average(Real (&sums)[Sizes<Real>::ROWS][Sizes<Real>::LANE_COLUMNS],
                                        const Real *const (&weights)[Sizes<Real>::LANE_VECTORS], const Real *values) {
    using Size = Sizes<Real>;
#pragma unroll 1
    for (int key = 0; key < KEYS; key += Size::VECTOR) {
#pragma unroll
        for (int j = 0; j < Size::LANE_VECTORS; ++j) {
            Vector<Real> weight[Size::ROWS];
#pragma unroll
            for (int i = 0; i < Size::ROWS; ++i) weight[i] = read_vector(weights[j] + 4 * i * Size::WEIGHT_PITCH + key);
#pragma unroll
            for (int x = 0; x < Size::VECTOR; ++x) {
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
}

// ---- The kernels ----

// Grid: x = tiles * G * B, the tile fastest; y = pieces of VALUE_STAGES stages: those of q's and k's columns as they are
// laid out, for keys those of v's behind them. Block: THREADS. Shared memory: BackwardSizes<Real>::SHARED.
template <typename Element, bool OF_KEYS>
__device__ __forceinline__ void gradients(const SimtBackwardCall &call) {
    using Real = RealOf<Element>;
    using Size = BackwardSizes<Real>;
    constexpr Real HIDDEN = -static_cast<Real>(INFINITY);
    const SimtProblem &problem = call.problem;

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int group = lane / 8, column = lane % 8;
    const int key_heads = problem.heads / problem.group;
    // What has the most to do goes first: the first keys of a causal call, and the last queries.
    const int block_tile = static_cast<int>(blockIdx.x % problem.tiles);
    const int tile_index = OF_KEYS ? block_tile : problem.tiles - 1 - block_tile;
    const int key_head = static_cast<int>(blockIdx.x / problem.tiles) % key_heads;
    const int64_t batch = blockIdx.x / problem.tiles / key_heads;
    const int row_group = OF_KEYS ? 1 : problem.group;  // rows of a token
    const SimtTokens &row_tokens = OF_KEYS ? problem.keys : problem.queries;
    const int64_t first_row = int64_t(tile_index) * Size::BLOCK_ROWS;
    const int rows = static_cast<int>(least(row_tokens.len * row_group - first_row, Size::BLOCK_ROWS));  // here
    const int64_t first_token = first_row / row_group;
    const int first_member = static_cast<int>(first_row % row_group);
    const auto token_of = [&](int row) { return first_token + (first_member + row) / row_group; };
    // Of the rows' own heads.
    const auto head_of = [&](int row) { return OF_KEYS ? key_head : key_head * row_group + (first_member + row) % row_group; };
    const auto number_of = [&](int head, int64_t token) { return (batch * problem.heads + head) * problem.queries.len + token; };
    const Layout layout(problem, Size::VECTOR);

    extern __shared__ __align__(16) unsigned char shared_memory[];
    Real *const row_stage = reinterpret_cast<Real *>(shared_memory);  // [BLOCK_ROWS][PITCH]
    Real *const stage = row_stage + Size::ROW_STAGE;                  // [KEYS][PITCH]
    Real *const weights = stage + Size::STAGE;                        // [KINDS][BLOCK_ROWS][WEIGHT_PITCH]
    unsigned char *const known = reinterpret_cast<unsigned char *>(weights + Size::KINDS * Size::WEIGHTS);
    const Known<Real> own(known, Size::BLOCK_ROWS);
    const Known<Real> other(known + Size::BLOCK_ROWS * (4 * 8 + 3 * sizeof(Real)), KEYS);

    const Operand &row_first = OF_KEYS ? call.k : call.q, &row_second = OF_KEYS ? call.v : call.grad;
    const Operand &passing_first = OF_KEYS ? call.q : call.k, &passing_second = OF_KEYS ? call.grad : call.v;
    const Element *const row_first_data = static_cast<const Element *>(row_first.data);
    const Element *const row_second_data = static_cast<const Element *>(row_second.data);
    const Element *const passing_first_data = static_cast<const Element *>(passing_first.data);
    const Element *const passing_second_data = static_cast<const Element *>(passing_second.data);
    const Real *const statistics = static_cast<const Real *>(call.statistics);
    const Real *const deltas = static_cast<const Real *>(call.delta);
    // Of a query, into what is known of it.
    const auto know_query = [&](const Known<Real> &of, int at, int64_t number) {
        of.greatest[at] = statistics[2 * number];
        of.log_sum[at] = statistics[2 * number + 1];
        of.delta[at] = deltas[number];
    };

    for (int row = threadIdx.x; row < Size::BLOCK_ROWS; row += THREADS) {
        const bool exists = row < rows;
        const int64_t token = exists ? token_of(row) : 0;
        const int head = head_of(exists ? row : 0);
        int64_t position = exists ? position_of(row_tokens, batch, token) : -1;
        if (!OF_KEYS) {
            know_query(own, row, number_of(head, token));
            if (own.greatest[row] == HIDDEN) position = -1;
        }
        own.position[row] = position;
        own.segment[row] = exists ? segment_of(row_tokens, batch, token) : 0;
        own.first[row] = position < 0 ? -1 : batch * row_first.batch + head * row_first.head + token * row_first.token;
        own.second[row] = position < 0 ? -1 : batch * row_second.batch + head * row_second.head + token * row_second.token;
    }
    __syncthreads();

    // This lane's rows.
    const int own_row = warp * Size::WARP_ROWS + group;  // and every fourth after it
    const Sight<OF_KEYS> sight(problem, batch, bounds_of(row_tokens, batch, first_token, token_of(rows - 1)));

    // Stages of the results: q's or k's columns, then for keys grad's.
    const int score_stages = (layout.width + Size::COLUMNS - 1) / Size::COLUMNS;
    const int value_stages = (problem.value_width + Size::COLUMNS - 1) / Size::COLUMNS;
    const int result_stages = score_stages + (OF_KEYS ? value_stages : 0);
    const int first_stage = blockIdx.y * Size::VALUE_STAGES;
    const bool wants_scores = first_stage < score_stages;  // gradients of them
    const auto score_column = [&](int of_stage) {
        return [&layout, of_stage](int c) { return layout.source(of_stage * Size::COLUMNS + c); };
    };
    const int value_width = problem.value_width;
    const auto value_column = [&](int of_stage) {
        return [value_width, of_stage](int c) {
            c += of_stage * Size::COLUMNS;
            return c < value_width ? c : -1;
        };
    };

    Real sums[Size::VALUE_STAGES][Size::ROWS][Size::LANE_COLUMNS];
#pragma unroll
    for (int i = 0; i < Size::VALUE_STAGES; ++i)
#pragma unroll
        for (int j = 0; j < Size::ROWS; ++j)
#pragma unroll
            for (int c = 0; c < Size::LANE_COLUMNS; ++c) sums[i][j][c] = 0;

    // Heads that pass by: of queries, all in the group.
    const int heads = OF_KEYS ? problem.group : 1;
    for (int member = 0; member < heads; ++member) {
        const int passing_head = OF_KEYS ? key_head * problem.group + member : key_head;
        const auto sees_something = [&](int64_t token) {
            return !OF_KEYS || statistics[2 * number_of(passing_head, token)] != HIDDEN;
        };
        PassingTile tile;
        for (bool more = sight.find(tile, sight.begin, sees_something); more;
             more = sight.find(tile, tile.first + KEYS, sees_something)) {
            __syncthreads();  // nobody reads what is known of the last tile
            if (warp == 0) {
                const int64_t token = tile.first + lane;
                const bool real = tile.position >= 0;
                other.position[lane] = tile.position;
                other.segment[lane] = tile.segment;
                other.first[lane] = real ? batch * passing_first.batch + passing_head * passing_first.head + token * passing_first.token : -1;
                other.second[lane] = real ? batch * passing_second.batch + passing_head * passing_second.head + token * passing_second.token : -1;
                if (OF_KEYS && real) know_query(other, lane, number_of(passing_head, token));
            }

            Real products[Size::ROWS][LANE_KEYS], amplitudes[Size::ROWS][LANE_KEYS];
            const auto clear = [&]() {
#pragma unroll
                for (int i = 0; i < Size::ROWS; ++i)
#pragma unroll
                    for (int j = 0; j < LANE_KEYS; ++j) products[i][j] = 0;
            };
            const Real *const stage_keys = stage + column * Size::PITCH;
            const Real *const stage_rows = row_stage + own_row * Size::PITCH;
            clear();
            for (int s = 0; s < score_stages; ++s) {
                __syncthreads();
                load<Real, Size::BLOCK_ROWS>(row_stage, row_first_data, own.first, score_column(s));
                load<Real, KEYS>(stage, passing_first_data, other.first, score_column(s));
                __syncthreads();
                const int from = s * Size::COLUMNS;
                const int to = layout.width - from < Size::COLUMNS ? layout.width : from + Size::COLUMNS;
                int c = from;
                while (c < to) {
                    if (SCORE_PHASE && c == layout.split) {
                        // The product of the amplitude parts is complete.
#pragma unroll
                        for (int i = 0; i < Size::ROWS; ++i)
#pragma unroll
                            for (int j = 0; j < LANE_KEYS; ++j) amplitudes[i][j] = products[i][j];
                        clear();
                    }
                    const int until = SCORE_PHASE && c < layout.split && layout.split < to ? layout.split : to;
                    add_products(products, stage_rows + c - from, Size::PITCH, stage_keys + c - from, until - c);
                    c = until;
                }
            }

            // Weights, and by what a score's gradient is multiplied. Each lane reads only its own back.
#pragma unroll
            for (int i = 0; i < Size::ROWS; ++i) {
                const int row = own_row + 4 * i;
                const int64_t row_position = own.position[row], row_segment = own.segment[row];
#pragma unroll
                for (int j = 0; j < LANE_KEYS; ++j) {
                    const int passing = column + 8 * j;
                    const int64_t passing_position = other.position[passing];
                    const int64_t m = OF_KEYS ? passing_position : row_position, n = OF_KEYS ? row_position : passing_position;
                    // `whole` says nothing about rows that see nothing.
                    const bool seen = m >= 0 && n >= 0 && (tile.whole || (sight.sees(m, n) && row_segment == other.segment[passing]));
                    const RowScore<Real> score(problem, OF_KEYS ? passing_head : head_of(row));
                    const Real dot = SCORE_PHASE ? amplitudes[i][j] : products[i][j];
                    Real weight = 0, by_dot = 0, by_phase = 0;
                    if (seen) {
                        const Known<Real> &query = OF_KEYS ? other : own;
                        const int at = OF_KEYS ? passing : row;
                        const Real s = score(dot, products[i][j], m, n, by_dot, by_phase);
                        weight = exponential(s - query.greatest[at] - query.log_sum[at]);
                    }
                    Real *const to = weights + row * Size::WEIGHT_PITCH + passing;
                    to[0] = weight;
                    to[Size::WEIGHTS] = by_dot;
                    if (SCORE_PHASE) to[(Size::KINDS - 1) * Size::WEIGHTS] = by_phase;
                }
            }

            if (wants_scores) {
                clear();
                for (int s = 0; s < value_stages; ++s) {
                    __syncthreads();
                    load<Real, Size::BLOCK_ROWS>(row_stage, row_second_data, own.second, value_column(s));
                    load<Real, KEYS>(stage, passing_second_data, other.second, value_column(s));
                    __syncthreads();
                    add_products(products, stage_rows, Size::PITCH, stage_keys, Size::COLUMNS);
                }
#pragma unroll
                for (int i = 0; i < Size::ROWS; ++i)
#pragma unroll
                    for (int j = 0; j < LANE_KEYS; ++j) {
                        const int row = own_row + 4 * i, passing = column + 8 * j;
                        Real *const to = weights + row * Size::WEIGHT_PITCH + passing;
                        const Real by_dot = to[Size::WEIGHTS];
                        const Real delta = OF_KEYS ? other.delta[passing] : own.delta[row];
                        const bool seen = OF_KEYS ? other.position[passing] >= 0 : own.position[row] >= 0;
                        const Real of_score = seen ? to[0] * (products[i][j] - delta) : Real(0);
                        to[Size::WEIGHTS] = of_score * by_dot;
                        if (SCORE_PHASE) to[(Size::KINDS - 1) * Size::WEIGHTS] *= of_score;
                    }
            }

#pragma unroll
            for (int i = 0; i < Size::VALUE_STAGES; ++i) {
                const int s = first_stage + i;
                if (s >= result_stages) break;
                const bool of_scores = s < score_stages;
                __syncthreads();
                if (of_scores) load<Real, KEYS>(stage, passing_first_data, other.first, score_column(s));
                else load<Real, KEYS>(stage, passing_second_data, other.second, value_column(s - score_stages));
                __syncthreads();
                const Real *of_vector[Size::LANE_VECTORS];
#pragma unroll
                for (int j = 0; j < Size::LANE_VECTORS; ++j) {
                    const bool phase = SCORE_PHASE && s * Size::COLUMNS + (column + 8 * j) * Size::VECTOR >= layout.split;
                    const int kind = !of_scores ? 0 : phase ? Size::KINDS - 1 : 1;
                    of_vector[j] = weights + kind * Size::WEIGHTS + own_row * Size::WEIGHT_PITCH;
                }
                average(sums[i], of_vector, stage + column * Size::VECTOR);
            }
        }
    }

#pragma unroll
    for (int i = 0; i < Size::ROWS; ++i) {
        const int row = own_row + 4 * i;
        if (row >= rows) continue;
        const bool real = own.position[row] >= 0;
        const auto row_of = [&](const Operand &of) {
            return static_cast<Element *>(const_cast<void *>(of.data)) + batch * of.batch + head_of(row) * of.head + token_of(row) * of.token;
        };
#pragma unroll
        for (int k = 0; k < Size::VALUE_STAGES; ++k) {
            const int s = first_stage + k;
            if (s >= result_stages) break;
            const bool of_scores = s < score_stages;
            Element *const to = row_of(!of_scores ? call.dv : OF_KEYS ? call.dk : call.dq);
#pragma unroll
            for (int c = 0; c < Size::LANE_COLUMNS; ++c) {
                const int at = (c / Size::VECTOR * 8 + column) * Size::VECTOR + c % Size::VECTOR;
                const int to_column = of_scores ? score_column(s)(at) : value_column(s - score_stages)(at);
                if (to_column >= 0) to[to_column] = narrow<Element>(real ? sums[k][i][c] : Real(0));
            }
        }
    }
}

}  // namespace simt
