// TAPE's state on its way through a layer (Zhu et al., arXiv 2501.00712; src/encoding/tape.rs has the symbols): packed
// behind the values, and updated after the layer. The two axes of a complex number go through the update alike, so one
// launch serves the real or the imaginary parts.
//
// Update of a token, its heads' states the rows of p (G x P): y = p + W c, with c the mean over each group's heads of the
// averages that attention returned, then out = y + A y, with a matrix A of the token's own. Backward, with the gradient g
// of out: dA = g y^T, dy = g + A^T g, which is dp, dc = W^T dy and dW = sum over tokens of dy c^T. That sum is made in two
// stages, each in a fixed order.
//
// A block has a tile of tokens in shared memory, and each thread 4 x 4 elements of a product of their matrices in
// registers. Rows and columns are padded to fours with zeros.
#include "strided.cuh"

struct PackCall {
    Strided v, re, im;  // (B,G,T,D), (B,G,T,P) twice
    Strided packed;     // gradient: (B,G,T,D + 2 P)
    void *out;          // (B,G,T,D + 2 P) without gaps; gradient: that of v, or null
    void *dre, *dim;    // gradient: or null
    int batch, heads, len, width, pairs;
    int reserved;
};

struct UpdateCall {
    Strided part;            // (B,G,T,P)
    Strided carried;         // (B,H,T,2 P), real parts and imaginary parts; data is null where nothing is taken over
    Strided grad;            // gradient: that of out
    const void *matrices;    // (B T,G,G) if tokens have matrices, then W (G,G) if there is `carried`
    void *out;               // (B,G,T,P); gradient: dp, or null
    void *dcarried;          // gradient: (B,H,T,2 P), zeros in the other part; or null
    void *dmatrices;         // gradient: as `matrices`; or null
    void *sums;              // gradient: (blocks, G or G G), each block's part of dW
    double mean;             // 1 / group
    int batch, heads, len, pairs; // heads: G
    int group;               // H/G
    int imaginary;           // which part of `carried`
    int has_matrices;
    int diagonal;            // W is
    int runs;                // whether fours of all operands can be loaded at once
    int tile;                // tokens
    int tiles;               // of a block, the last may have fewer
    int columns;             // of a row that are in shared memory at once, a multiple of 4
    int splits, weight_splits; // lanes among which the columns are divided in dA and dW, powers of 2
    int blocks;              // second stage: parts of each sum
    int reserved;
};

struct NormCall {
    const void *re, *im, *grad;
    void *out;        // gradient: that of re, or null
    void *dim;        // gradient: or null
    int64_t len;
    double modulus;
    int imaginary;    // which part is stretched
    int reserved;
};

struct GateCall {
    const void *x, *grad; // (rows, size), (rows + extended, padded)
    void *out;            // (rows + extended, padded); gradient: (rows, size)
    int rows, size, padded;
    int extended;         // one more row and column, which meet in a 1
};
static_assert(sizeof(PackCall) == 208 && sizeof(UpdateCall) == 232 && sizeof(NormCall) == 64 && sizeof(GateCall) == 40, "");

namespace {

constexpr int THREADS = 256;

template <class T> DEVICE T *place(const Strided &x, int64_t b, int64_t head, int64_t token) {
    return (T *)x.data + b * x.batch + head * x.head + token * x.token;
}

// ---- pack: [v | re | im] ----

// A row in runs of N: which tensor has a run, and which of its columns.
struct Piece {
    int tensor, column;
    DEVICE Piece(int run, int n, const PackCall &call) {
        int values = call.width / n, states = call.pairs / n;
        tensor = run < values ? 0 : run < values + states ? 1 : 2;
        column = n * (run - (tensor == 0 ? 0 : tensor == 1 ? values : values + states));
    }
};

template <class T, int N, bool BACKWARD> DEVICE void pack(const PackCall &call) {
    using Sum = RealOf<T>;
    int width = call.width + 2 * call.pairs, runs = width / N;
    unsigned at = blockIdx.x * THREADS + threadIdx.x;
    int token = at / (unsigned)runs, run = at % (unsigned)runs, head = blockIdx.y % call.heads, b = blockIdx.y / call.heads;
    if (token >= call.len) return;
    int64_t row = (int64_t)blockIdx.y * call.len + token;
    Piece piece(run, N, call);
    if (BACKWARD) {
        void *to = piece.tensor == 0 ? call.out : piece.tensor == 1 ? call.dre : call.dim;
        if (!to) return;
        Run<T, N> x = load_run<N>(place<const T>(call.packed, b, head, token) + N * run * call.packed.column);
        if (piece.tensor == 0) {
            store_run((T *)to + row * call.width + piece.column, x);
        } else {
            Run<Sum, N> wide;
            widen_run(wide.at, x);
            store_run((Sum *)to + row * call.pairs + piece.column, wide);
        }
    } else {
        Run<T, N> x;
        if (piece.tensor == 0) {
            x = load_run<N>(place<const T>(call.v, b, head, token) + piece.column * call.v.column);
        } else {
            const Strided &state = piece.tensor == 1 ? call.re : call.im;
            x = rounded_run<T>(load_run<N>(place<const Sum>(state, b, head, token) + piece.column * state.column).at);
        }
        store_run((T *)call.out + row * width + N * run, x);
    }
}

// ---- update ----

// Four neighbours, those from `count` on zero.
template <class T> DEVICE Run<T, 4> load_four(const T *from, int count, bool runs) {
    if (runs) return load_run<4>(from);
    Run<T, 4> x;
#pragma unroll
    for (int i = 0; i < 4; i++) x.at[i] = i < count ? from[i] : narrow<T>(0);
    return x;
}
template <class T, class Sum> DEVICE void store_four(T *to, const Sum (&x)[4], int count, bool runs) {
    Run<T, 4> run = rounded_run<T>(x);
    if (runs) {
        store_run(to, run);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (i < count) to[i] = run.at[i];
    }
}

// Shared memory of a block: rows of `stride` columns for each head of each token of the tile, and matrices.
template <class Sum> struct Tile {
    int fours;    // of heads
    int columns;  // fours of columns
    int stride, matrix_stride;
    Sum *y, *g, *c, *a, *w, *dw;
    DEVICE Tile(const UpdateCall &call, Sum *memory, bool backward) {
        fours = (call.heads + 3) / 4;
        columns = call.columns / 4;
        stride = call.columns + 4;
        matrix_stride = 4 * fours + 4;
        int states = call.tile * 4 * fours * stride, square = 4 * fours * matrix_stride;
        int weights = call.diagonal ? 4 * fours : square;
        bool takes_over = call.carried.data;
        y = memory;
        memory += states;
        g = memory;
        if (backward) memory += states;
        c = memory;
        if (takes_over && (backward || !call.diagonal)) memory += states;
        a = memory;
        if (call.has_matrices) memory += call.tile * square;
        w = memory;
        if (takes_over) memory += weights;
        dw = memory;
    }
    DEVICE Sum *row(Sum *states, int token, int head) const { return states + (token * 4 * fours + head) * stride; }
    DEVICE Sum *matrix(int token) const { return a + token * 4 * fours * matrix_stride; }
};

// to += M x for rows `first` .. + 3, columns `at` .. + 3.
template <class Sum> DEVICE void multiply(Sum (&to)[4][4], const Sum *matrix, const Sum *x, int first, int at, const Tile<Sum> &tile) {
    for (int j = 0; j < 4 * tile.fours; j += 4) {
        Run<Sum, 4> m[4], v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            m[i] = load_run<4>(matrix + (first + i) * tile.matrix_stride + j);
            v[i] = load_run<4>(x + (j + i) * tile.stride + at);
        }
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int l = 0; l < 4; l++) to[i][l] += m[i].at[k] * v[k].at[l];
    }
}

// The same with M transposed.
template <class Sum> DEVICE void multiply_transposed(Sum (&to)[4][4], const Sum *matrix, const Sum *x, int first, int at, const Tile<Sum> &tile) {
    for (int j = 0; j < 4 * tile.fours; j++) {
        Run<Sum, 4> m = load_run<4>(matrix + j * tile.matrix_stride + first), v = load_run<4>(x + j * tile.stride + at);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int l = 0; l < 4; l++) to[i][l] += m.at[i] * v.at[l];
    }
}

// to += x y^T for rows first + i fours, columns at + l fours: this lane's part of the columns that are summed over.
template <class Sum>
DEVICE void add_products(Sum (&to)[4][4], const Sum *x, const Sum *y, int first, int at, int split, int splits, const Tile<Sum> &tile) {
    for (int column = 4 * split; column < 4 * tile.columns; column += 4 * splits) {
        Run<Sum, 4> m[4], v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            m[i] = load_run<4>(x + (first + i * tile.fours) * tile.stride + column);
            v[i] = load_run<4>(y + (at + i * tile.fours) * tile.stride + column);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int l = 0; l < 4; l++)
#pragma unroll
                for (int k = 0; k < 4; k++) to[i][l] += m[i].at[k] * v[l].at[k];
    }
}

// Sums over the lanes that share a product; all lanes of the warp take part.
template <class Sum> DEVICE void add_lanes(Sum (&to)[4][4], int splits) {
    for (int mask = splits / 2; mask > 0; mask /= 2)
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int l = 0; l < 4; l++) to[i][l] += __shfl_xor_sync(WARP, to[i][l], mask);
}

// Rows `first` .. + 3 of a state.
template <class Sum> DEVICE void load_rows(Sum (&to)[4][4], const Sum *states, int first, int at, const Tile<Sum> &tile) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        Run<Sum, 4> row = load_run<4>(states + (first + i) * tile.stride + at);
#pragma unroll
        for (int l = 0; l < 4; l++) to[i][l] = row.at[l];
    }
}

// W into shared memory, the sums of its gradient to zero. Ends without a barrier.
template <class Sum> DEVICE void load_weights(const UpdateCall &call, const Tile<Sum> &tile, bool backward) {
    if (!call.carried.data) return;
    int heads = call.heads, padded = 4 * tile.fours;
    const Sum *from = (const Sum *)call.matrices + (call.has_matrices ? (int64_t)call.batch * call.len * heads * heads : 0);
    int rows = call.diagonal ? 1 : padded, width = call.diagonal ? padded : tile.matrix_stride;
    for (int i = threadIdx.x; i < rows * width; i += THREADS) {
        int row = i / width, column = i % width;
        bool in = column < heads && row < heads;
        if (call.diagonal) tile.w[i] = in ? from[column * heads + column] : Sum(0);
        else tile.w[i] = in ? from[row * heads + column] : Sum(0);
        if (backward) tile.dw[i] = 0;
    }
}

// What a block works on at a time.
struct Span {
    int first;  // token, of all rows of the batch
    int tokens;
    int column; // the first
};

template <class Sum> DEVICE void load_matrices_of(const UpdateCall &call, const Tile<Sum> &tile, const Span &span) {
    if (!call.has_matrices) return;
    int heads = call.heads, fours = tile.fours;
    bool runs = heads % 4 == 0;
    for (int i = threadIdx.x; i < call.tile * 4 * fours * fours; i += THREADS) {
        int column = 4 * (i % fours), row = i / fours % (4 * fours), token = i / fours / (4 * fours);
        Run<Sum, 4> m;
#pragma unroll
        for (int l = 0; l < 4; l++) m.at[l] = 0;
        if (token < span.tokens && row < heads)
            m = load_four((const Sum *)call.matrices + (((int64_t)span.first + token) * heads + row) * heads + column, heads - column, runs);
        store_run(tile.matrix(token) + row * tile.matrix_stride + column, m);
    }
}

// What a thread loads of a state at once.
template <class Sum> struct Loaded {
    Run<Sum, 4> y, c, g;
    Sum *row_y; // null beyond the tile
    int head;

    template <class T> DEVICE void load(const UpdateCall &call, const Tile<Sum> &tile, const Span &span, int i, bool backward) {
        int four = i % tile.columns, token = i / tile.columns % call.tile;
        head = i / tile.columns / call.tile;
#pragma unroll
        for (int l = 0; l < 4; l++) y.at[l] = c.at[l] = g.at[l] = 0;
        row_y = head < 4 * tile.fours ? tile.row(tile.y, token, head) + 4 * four : nullptr;
        int column = span.column + 4 * four, count = call.pairs - column;
        if (head >= call.heads || token >= span.tokens || count <= 0) return;
        int n = span.first + token, b = n / call.len, t = n % call.len;
        y = load_four(place<const Sum>(call.part, b, head, t) + column, count, call.runs);
        if (backward) g = load_four(place<const Sum>(call.grad, b, head, t) + column, count, call.runs);
        if (!call.carried.data) return;
        int from = column + (call.imaginary ? call.pairs : 0);
        for (int k = 0; k < call.group; k++) {
            Run<T, 4> x = load_four(place<const T>(call.carried, b, (int64_t)head * call.group + k, t) + from, count, call.runs);
#pragma unroll
            for (int l = 0; l < 4; l++) c.at[l] += widen(x.at[l]);
        }
    }

    DEVICE void store(const UpdateCall &call, const Tile<Sum> &tile, bool backward) {
        if (!row_y) return;
        if (call.carried.data) {
#pragma unroll
            for (int l = 0; l < 4; l++) c.at[l] *= (Sum)call.mean;
            if (call.diagonal) {
                Sum w = tile.w[head];
#pragma unroll
                for (int l = 0; l < 4; l++) y.at[l] += w * c.at[l];
            }
            if (backward || !call.diagonal) store_run(tile.c + (row_y - tile.y), c);
        }
        store_run(row_y, y);
        if (backward) store_run(tile.g + (row_y - tile.y), g);
    }
};

// y, c where it is kept, and backward g, into shared memory; ends with a barrier.
template <class T, class Sum> DEVICE void load_states(const UpdateCall &call, const Tile<Sum> &tile, const Span &span, bool backward) {
    bool takes_over = call.carried.data;
    for (int i = threadIdx.x; i < 4 * tile.fours * call.tile * tile.columns; i += 2 * THREADS) {
        Loaded<Sum> first, second; // both on their way before either is waited for
        first.template load<T>(call, tile, span, i, backward);
        second.template load<T>(call, tile, span, i + THREADS, backward);
        first.store(call, tile, backward);
        second.store(call, tile, backward);
    }
    __syncthreads();
    if (!takes_over || call.diagonal) return;
    // Each thread writes only what it alone reads of y.
    for (int i = threadIdx.x; i < call.tile * tile.fours * tile.columns; i += THREADS) {
        int at = 4 * (i % tile.columns), first = 4 * (i / tile.columns % tile.fours), token = i / tile.columns / tile.fours;
        Sum y[4][4];
        load_rows(y, tile.row(tile.y, token, 0), first, at, tile);
        multiply(y, tile.w, tile.row(tile.c, token, 0), first, at, tile);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            Run<Sum, 4> row;
#pragma unroll
            for (int l = 0; l < 4; l++) row.at[l] = y[k][l];
            store_run(tile.row(tile.y, token, first + k) + at, row);
        }
    }
    __syncthreads();
}

// Rows `first` .. + 3 of a state to a tensor (B,G,T,P) without gaps.
template <class Sum>
DEVICE void store_rows(void *to, const Sum (&rows)[4][4], int n, int first, int column, const UpdateCall &call) {
    int64_t b = n / call.len, t = n % call.len;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (first + i >= call.heads || column >= call.pairs) continue;
        store_four((Sum *)to + ((b * call.heads + first + i) * call.len + t) * call.pairs + column, rows[i], call.pairs - column, call.runs);
    }
}

template <class T> DEVICE void update(const UpdateCall &call) {
    using Sum = RealOf<T>;
    extern __shared__ __align__(16) double memory[];
    Tile<Sum> tile(call, (Sum *)memory, false);
    load_weights(call, tile, false);
    int all = call.batch * call.len;
    for (int k = 0; k < call.tiles; k++) {
        int64_t first = ((int64_t)blockIdx.x * call.tiles + k) * call.tile;
        if (first >= all) break;
        Span span{(int)first, min(call.tile, all - (int)first), 0};
        load_matrices_of(call, tile, span);
        for (; span.column < call.pairs; span.column += call.columns) {
            __syncthreads(); // W is there; and all have read the states before
            load_states<T>(call, tile, span, false);
            for (int i = threadIdx.x; i < span.tokens * tile.fours * tile.columns; i += THREADS) {
                int at = 4 * (i % tile.columns), first = 4 * (i / tile.columns % tile.fours), token = i / tile.columns / tile.fours;
                Sum out[4][4];
                load_rows(out, tile.row(tile.y, token, 0), first, at, tile);
                if (call.has_matrices) multiply(out, tile.matrix(token), tile.row(tile.y, token, 0), first, at, tile);
                store_rows(call.out, out, span.first + token, first, span.column + at, call);
            }
        }
        __syncthreads();
    }
}

// dA of the tile's tokens; over several spans of columns each thread adds to what it wrote itself.
template <class Sum> DEVICE void store_products(const UpdateCall &call, const Tile<Sum> &tile, const Span &span) {
    int fours = tile.fours, splits = call.splits, all = span.tokens * fours * fours * splits;
    for (int base = 0; base < all; base += THREADS) {
        int i = base + threadIdx.x, split = i % splits;
        int at = i / splits % fours, first = i / splits / fours % fours, token = i / splits / fours / fours;
        Sum sum[4][4] = {};
        if (i < all) add_products(sum, tile.row(tile.g, token, 0), tile.row(tile.y, token, 0), first, at, split, splits, tile);
        add_lanes(sum, splits);
        if (i >= all || split > 0) continue;
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int l = 0; l < 4; l++) {
                int row = first + k * fours, column = at + l * fours;
                if (row >= call.heads || column >= call.heads) continue;
                Sum *to = (Sum *)call.dmatrices + (((int64_t)span.first + token) * call.heads + row) * call.heads + column;
                *to = span.column > 0 ? *to + sum[k][l] : sum[k][l];
            }
    }
}

// Adds the tile's part of dW, dy being in the place of y.
template <class Sum> DEVICE void add_weights(const UpdateCall &call, const Tile<Sum> &tile, const Span &span) {
    if (call.diagonal) {
        int width = 4 * tile.columns;
        for (int head = threadIdx.x / 32; head < call.heads; head += THREADS / 32) {
            Sum sum = 0;
            for (int i = threadIdx.x % 32; i < span.tokens * width; i += 32)
                sum += tile.row(tile.y, i / width, head)[i % width] * tile.row(tile.c, i / width, head)[i % width];
            for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(WARP, sum, mask);
            if (threadIdx.x % 32 == 0) tile.dw[head] += sum;
        }
        return;
    }
    int fours = tile.fours, splits = call.weight_splits, all = fours * fours * splits;
    for (int base = 0; base < all; base += THREADS) {
        int i = base + threadIdx.x, split = i % splits, at = i / splits % fours, first = i / splits / fours;
        Sum sum[4][4] = {};
        if (i < all)
            for (int token = 0; token < span.tokens; token++)
                add_products(sum, tile.row(tile.y, token, 0), tile.row(tile.c, token, 0), first, at, split, splits, tile);
        add_lanes(sum, splits);
        if (i >= all || split > 0) continue;
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int l = 0; l < 4; l++) tile.dw[(first + k * fours) * tile.matrix_stride + at + l * fours] += sum[k][l];
    }
}

// The gradient of what was carried, for all heads of the groups, dy being in the place of y.
template <class T, class Sum> DEVICE void store_carried(const UpdateCall &call, const Tile<Sum> &tile, const Span &span) {
    for (int i = threadIdx.x; i < span.tokens * tile.fours * tile.columns; i += THREADS) {
        int at = 4 * (i % tile.columns), first = 4 * (i / tile.columns % tile.fours), token = i / tile.columns / tile.fours;
        int column = span.column + at, count = call.pairs - column;
        if (count <= 0) continue;
        Sum dc[4][4] = {};
        if (call.diagonal) {
            load_rows(dc, tile.row(tile.y, token, 0), first, at, tile);
#pragma unroll
            for (int k = 0; k < 4; k++)
#pragma unroll
                for (int l = 0; l < 4; l++) dc[k][l] *= tile.w[first + k];
        } else {
            multiply_transposed(dc, tile.w, tile.row(tile.y, token, 0), first, at, tile);
        }
        int n = span.first + token, b = n / call.len, t = n % call.len;
        const Sum zeros[4] = {};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (first + k >= call.heads) continue;
#pragma unroll
            for (int l = 0; l < 4; l++) dc[k][l] *= (Sum)call.mean;
            for (int h = 0; h < call.group; h++) {
                int64_t head = ((int64_t)b * call.heads + first + k) * call.group + h;
                T *to = (T *)call.dcarried + (head * call.len + t) * 2 * call.pairs + column;
                store_four(to + (call.imaginary ? call.pairs : 0), dc[k], count, call.runs);
                store_four(to + (call.imaginary ? 0 : call.pairs), zeros, count, call.runs);
            }
        }
    }
}

template <class T> DEVICE void update_gradient(const UpdateCall &call) {
    using Sum = RealOf<T>;
    extern __shared__ __align__(16) double memory[];
    Tile<Sum> tile(call, (Sum *)memory, true);
    load_weights(call, tile, true);
    int all = call.batch * call.len;
    for (int k = 0; k < call.tiles; k++) {
        int64_t first = ((int64_t)blockIdx.x * call.tiles + k) * call.tile;
        if (first >= all) break;
        Span span{(int)first, min(call.tile, all - (int)first), 0};
        load_matrices_of(call, tile, span);
        for (; span.column < call.pairs; span.column += call.columns) {
            __syncthreads();
            load_states<T>(call, tile, span, true);
            if (call.has_matrices && call.dmatrices) store_products(call, tile, span);
            __syncthreads(); // y has been read
            for (int i = threadIdx.x; i < span.tokens * tile.fours * tile.columns; i += THREADS) {
                int at = 4 * (i % tile.columns), first = 4 * (i / tile.columns % tile.fours), token = i / tile.columns / tile.fours;
                Sum dy[4][4];
                load_rows(dy, tile.row(tile.g, token, 0), first, at, tile);
                if (call.has_matrices) multiply_transposed(dy, tile.matrix(token), tile.row(tile.g, token, 0), first, at, tile);
                if (call.out) store_rows(call.out, dy, span.first + token, first, span.column + at, call);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    Run<Sum, 4> row;
#pragma unroll
                    for (int l = 0; l < 4; l++) row.at[l] = dy[j][l];
                    store_run(tile.row(tile.y, token, first + j) + at, row);
                }
            }
            if (!call.carried.data) continue;
            __syncthreads();
            if (call.dcarried) store_carried<T>(call, tile, span);
            if (call.dmatrices) add_weights(call, tile, span);
        }
        __syncthreads();
    }
    if (!call.carried.data || !call.dmatrices) return;
    int heads = call.heads, entries = call.diagonal ? heads : heads * heads;
    for (int i = threadIdx.x; i < entries; i += THREADS) {
        int at = call.diagonal ? i : i / heads * tile.matrix_stride + i % heads;
        ((Sum *)call.sums)[(int64_t)blockIdx.x * entries + i] = tile.dw[at];
    }
}

// Second stage of dW: a block for each of its entries, of the diagonal alone if W has no others.
template <class Sum> DEVICE void add_sums(const UpdateCall &call) {
    __shared__ Sum parts[THREADS];
    int heads = call.heads, entries = call.diagonal ? heads : heads * heads;
    Sum sum = 0;
    for (int block = threadIdx.x; block < call.blocks; block += THREADS)
        sum += ((const Sum *)call.sums)[(int64_t)block * entries + blockIdx.x];
    parts[threadIdx.x] = sum;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    }
    __syncthreads();
    Sum *to = (Sum *)call.dmatrices + (call.has_matrices ? (int64_t)call.batch * call.len * heads * heads : 0);
    if (!call.diagonal) {
        if (threadIdx.x == 0) to[blockIdx.x] = parts[0];
        return;
    }
    for (int column = threadIdx.x; column < heads; column += THREADS)
        to[(int64_t)blockIdx.x * heads + column] = column == blockIdx.x ? parts[0] : Sum(0);
}

// ---- modulus: mu re / max(|re + i im|, 1e-6), or the same of im ----

template <class Sum, int N, bool BACKWARD> DEVICE void normalize(const NormCall &call) {
    int64_t at = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * N;
    if (at >= call.len) return;
    Run<Sum, N> own = load_run<N>((const Sum *)(call.imaginary ? call.im : call.re) + at);
    Run<Sum, N> other = load_run<N>((const Sum *)(call.imaginary ? call.re : call.im) + at);
    Run<Sum, N> grad;
    if (BACKWARD) grad = load_run<N>((const Sum *)call.grad + at);
    Sum modulus = (Sum)call.modulus, least = (Sum)1e-12;
#pragma unroll
    for (int i = 0; i < N; i++) {
        Sum x = own.at[i], y = other.at[i], square = x * x + y * y;
        Sum norm = sqrt(square > least || square != square ? square : least);
        if (!BACKWARD) {
            own.at[i] = x * (modulus / norm);
        } else {
            Sum slope = grad.at[i] * (modulus / norm);
            // On the circle only what is across it counts: y^2 / |p|^2 and -x y / |p|^2.
            x /= norm;
            y /= norm;
            bool free = square > least || square != square;
            own.at[i] = free ? slope * y * y : slope;
            other.at[i] = free ? -slope * x * y : Sum(0);
        }
    }
    if (!BACKWARD) {
        store_run((Sum *)call.out + at, own);
        return;
    }
    void *to_own = call.imaginary ? call.dim : call.out, *to_other = call.imaginary ? call.out : call.dim;
    if (to_own) store_run((Sum *)to_own + at, own);
    if (to_other) store_run((Sum *)to_other + at, other);
}

// ---- gate: SiLU(x), padded with zeros ----

template <class T, bool BACKWARD> DEVICE void gate(const GateCall &call) {
    using Sum = RealOf<T>;
    unsigned i = blockIdx.x * THREADS + threadIdx.x, width = BACKWARD ? call.size : call.padded;
    int row = i / width, column = i % width;
    if (row >= call.rows + (BACKWARD ? 0 : call.extended)) return;
    Sum result = 0;
    if (row < call.rows && column < call.size) {
        Sum x = widen(((const T *)call.x)[(int64_t)row * call.size + column]);
        Sum sigmoid = 1 / (1 + exp(-x));
        result = x * sigmoid;
        if (BACKWARD) {
            Sum grad = ((const Sum *)call.grad)[(int64_t)row * call.padded + column];
            ((T *)call.out)[i] = narrow<T>(grad * (sigmoid + result * (1 - sigmoid)));
            return;
        }
    } else if (call.extended && row == call.rows && column == call.size) {
        result = 1;
    }
    ((Sum *)call.out)[i] = result;
}

} // namespace

#define ENTRY(name, call, body) \
    extern "C" __global__ void __launch_bounds__(THREADS) tape_##name(const __grid_constant__ call x) { body(x); }
#define PACK(name, T)                                          \
    ENTRY(pack_##name##_runs, PackCall, (pack<T, RUN<T>, false>)) \
    ENTRY(pack_##name, PackCall, (pack<T, 1, false>))          \
    ENTRY(unpack_##name##_runs, PackCall, (pack<T, RUN<T>, true>)) \
    ENTRY(unpack_##name, PackCall, (pack<T, 1, true>))
#define UPDATE(name, T)                           \
    ENTRY(update_##name, UpdateCall, update<T>)   \
    ENTRY(update_gradient_##name, UpdateCall, update_gradient<T>)
#define GATE(name, T)                               \
    ENTRY(gate_##name, GateCall, (gate<T, false>))  \
    ENTRY(gate_gradient_##name, GateCall, (gate<T, true>))
#define STATE(name, Sum)                                                 \
    ENTRY(sums_##name, UpdateCall, add_sums<Sum>)                        \
    ENTRY(normalize_##name##_runs, NormCall, (normalize<Sum, RUN<Sum>, false>)) \
    ENTRY(normalize_##name, NormCall, (normalize<Sum, 1, false>))        \
    ENTRY(normalize_gradient_##name##_runs, NormCall, (normalize<Sum, RUN<Sum>, true>)) \
    ENTRY(normalize_gradient_##name, NormCall, (normalize<Sum, 1, true>))
#define ALL(name, T) PACK(name, T) UPDATE(name, T) GATE(name, T)
ALL(bf16, __nv_bfloat16)
ALL(f16, __half)
ALL(f32, float)
ALL(f64, double)
STATE(f32, float)
STATE(f64, double)
