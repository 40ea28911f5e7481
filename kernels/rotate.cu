// Pairs of coordinates turned and stretched by a table: a pair is the complex number z, its entry of the table w.
//
// `rotate_turn` gives z w, or z conj(w): the gradient of z, when z is the gradient of z w. `rotate_gradient` gives that
// and the gradient of the table besides, the sum of g conj(z) over the heads and rows of the batch that share an entry,
// always in the same order. All other coordinates pass through bit for bit.
//
// Both are bound by memory. A thread takes a run of pairs of one token and goes through heads that share its entries of
// the table, which stay in registers meanwhile; blocks that read the same part of the table follow each other.
#include "strided.cuh"

struct TurnCall {
    Strided x;           // (B,H,T,D); for a gradient that of the result
    Strided cos, sin;    // (B,H/group,T,pairs)
    Strided source;      // gradient of the table: what was turned, (B,H,T,D)
    void *out;           // (B,H,T,D) without gaps; gradient of the table: or null
    void *dcos, *dsin;   // gradient of the table: (1|B,H/group,T,pairs) without gaps
    int batch, heads, len, width;
    int pairs;
    int group;           // heads that share a head of the table
    int rows;            // of the table: 1 or B
    int interleaved;     // a pair is 2j and 2j + 1; else j and j + pairs
    int conjugate;
    int slices;          // gradient of the table: threads among which the terms of one sum are divided
};
static_assert(sizeof(TurnCall) == 224, "");

namespace {

constexpr int THREADS = 256;
constexpr int HEADS = 4; // that a thread turns

// A row is cut into chunks: those that turn, N pairs each, then those that pass through, up to 2 N columns each. Either
// way a chunk is two runs.
template <int N> struct Chunks {
    int turning;
    unsigned all;
    DEVICE explicit Chunks(const TurnCall &call) {
        turning = call.pairs / N;
        all = turning + (call.width - 2 * call.pairs + 2 * N - 1) / (2 * N);
    }
};

// Where a chunk's two runs begin.
template <int N, bool INTERLEAVED> DEVICE void columns_of(int (&at)[2], int chunk, int turning, int pairs) {
    if (chunk >= turning) {
        at[0] = 2 * pairs + 2 * N * (chunk - turning);
        at[1] = at[0] + N;
    } else if (INTERLEAVED) {
        at[0] = 2 * N * chunk;
        at[1] = at[0] + N;
    } else {
        at[0] = N * chunk;
        at[1] = at[0] + pairs;
    }
}

// Pair j of two runs of N.
template <int N, bool INTERLEAVED> constexpr DEVICE int first_of(int j) { return INTERLEAVED ? 2 * j : j; }
template <int N, bool INTERLEAVED> constexpr DEVICE int second_of(int j) { return INTERLEAVED ? 2 * j + 1 : N + j; }

template <class T> DEVICE const T *row_of(const Strided &x, int64_t b, int64_t head, int64_t token) {
    return (const T *)x.data + b * x.batch + head * x.head + token * x.token;
}

// Both runs in what sums are made in.
template <int N, class T, class Sum> DEVICE void widen_runs(Sum (&to)[2 * N], const Run<T, N> (&runs)[2]) {
    widen_run((Sum(&)[N])to[0], runs[0]);
    widen_run((Sum(&)[N])to[N], runs[1]);
}

// Both runs turned by the entries.
template <int N, bool INTERLEAVED, class T, class Sum>
DEVICE void turn_pairs(Run<T, N> (&runs)[2], const Run<Sum, N> &cos, const Run<Sum, N> &sin) {
    Sum z[2 * N];
    widen_runs(z, runs);
#pragma unroll
    for (int j = 0; j < N; j++) {
        Sum &first = z[first_of<N, INTERLEAVED>(j)], &second = z[second_of<N, INTERLEAVED>(j)];
        Sum re = first, im = second;
        // Rounded alike by whichever kernel.
        first = fma(re, cos.at[j], -(im * sin.at[j]));
        second = fma(re, sin.at[j], im * cos.at[j]);
    }
    runs[0] = rounded_run<T>((Sum(&)[N])z[0]);
    runs[1] = rounded_run<T>((Sum(&)[N])z[N]);
}

// N entries of the table, conjugated if need be.
template <int N, class Sum>
DEVICE void load_entries(Run<Sum, N> &cos, Run<Sum, N> &sin, const TurnCall &call, int64_t b, int64_t head, int64_t token, int chunk) {
    cos = load_run<N>(row_of<Sum>(call.cos, b, head, token) + N * chunk * call.cos.column);
    sin = load_run<N>(row_of<Sum>(call.sin, b, head, token) + N * chunk * call.sin.column);
    if (call.conjugate) {
#pragma unroll
        for (int j = 0; j < N; j++) sin.at[j] = -sin.at[j];
    }
}

template <class T, int N, bool INTERLEAVED> DEVICE void turn(const TurnCall &call) {
    using Sum = RealOf<T>;
    const Chunks<N> chunks(call);
    unsigned table_heads = call.heads / call.group, pieces = (call.group + HEADS - 1) / HEADS, block = blockIdx.x;
    int piece = block % pieces;
    block /= pieces;
    int table_head = block % table_heads;
    block /= table_heads;
    int b = block % call.batch;
    unsigned place = block / call.batch * THREADS + threadIdx.x;
    int token = place / chunks.all, chunk = place % chunks.all;
    if (token >= call.len) return;
    bool turns = chunk < chunks.turning;
    Run<Sum, N> cos, sin;
    if (turns) load_entries(cos, sin, call, b, table_head, token, chunk);
    int at[2];
    columns_of<N, INTERLEAVED>(at, chunk, chunks.turning, call.pairs);
    bool both = at[1] < call.width;
    int first = table_head * call.group + piece * HEADS, heads = min(HEADS, call.group - piece * HEADS);
    Run<T, N> z[HEADS][2];
#pragma unroll
    for (int k = 0; k < HEADS; k++) {
        if (k >= heads) continue;
        const T *row = row_of<T>(call.x, b, first + k, token);
        z[k][0] = load_run<N>(row + at[0] * call.x.column);
        if (both) z[k][1] = load_run<N>(row + at[1] * call.x.column);
    }
#pragma unroll
    for (int k = 0; k < HEADS; k++) {
        if (k >= heads) continue;
        if (turns) turn_pairs<N, INTERLEAVED>(z[k], cos, sin);
        T *out = (T *)call.out + (((int64_t)b * call.heads + first + k) * call.len + token) * call.width;
        store_run(out + at[0], z[k][0]);
        if (both) store_run(out + at[1], z[k][1]);
    }
}

// The terms of a sum are rows of the batch times heads of a group. Thread `slice` of `slices` takes every slices-th.
template <class T, int N, bool INTERLEAVED> DEVICE void gradient(const TurnCall &call) {
    using Sum = RealOf<T>;
    __shared__ Sum parts[2 * N][THREADS];
    const Chunks<N> chunks(call);
    int entries = THREADS / call.slices, slice = threadIdx.x / entries, lane = threadIdx.x % entries;
    unsigned table_heads = call.heads / call.group, width = call.out ? chunks.all : chunks.turning, block = blockIdx.x;
    int table_head = block % table_heads;
    block /= table_heads;
    int row = block % call.rows;
    unsigned place = block / call.rows * entries + lane;
    int token = place / width, chunk = place % width;
    bool here = token < call.len, turns = chunk < chunks.turning;
    Run<Sum, N> dcos, dsin;
#pragma unroll
    for (int j = 0; j < N; j++) dcos.at[j] = dsin.at[j] = 0;
    if (here) {
        int at[2];
        columns_of<N, INTERLEAVED>(at, chunk, chunks.turning, call.pairs);
        bool both = at[1] < call.width;
        int terms = call.group * (call.batch / call.rows);
#pragma unroll 2
        for (int term = slice; term < terms; term += call.slices) {
            int64_t b = row + term / call.group * call.rows;
            int64_t head = table_head * call.group + term % call.group;
            const T *from = row_of<T>(call.x, b, head, token);
            Run<T, N> g[2];
            g[0] = load_run<N>(from + at[0] * call.x.column);
            if (both) g[1] = load_run<N>(from + at[1] * call.x.column);
            if (turns) {
                const T *source = row_of<T>(call.source, b, head, token);
                Run<T, N> z[2];
                z[0] = load_run<N>(source + at[0] * call.source.column);
                z[1] = load_run<N>(source + at[1] * call.source.column);
                Sum source_values[2 * N], g_values[2 * N];
                widen_runs(source_values, z);
                widen_runs(g_values, g);
#pragma unroll
                for (int j = 0; j < N; j++) {
                    int first = first_of<N, INTERLEAVED>(j), second = second_of<N, INTERLEAVED>(j);
                    dcos.at[j] += g_values[first] * source_values[first] + g_values[second] * source_values[second];
                    dsin.at[j] += g_values[second] * source_values[first] - g_values[first] * source_values[second];
                }
            }
            if (!call.out) continue;
            if (turns) {
                // One row of the batch after another, each with entries of its own unless they are shared.
                Run<Sum, N> cos, sin;
                load_entries(cos, sin, call, b, table_head, token, chunk);
                turn_pairs<N, INTERLEAVED>(g, cos, sin);
            }
            T *out = (T *)call.out + ((b * call.heads + head) * call.len + token) * call.width;
            store_run(out + at[0], g[0]);
            if (both) store_run(out + at[1], g[1]);
        }
    }
    if (call.slices > 1) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            parts[j][threadIdx.x] = dcos.at[j];
            parts[N + j][threadIdx.x] = dsin.at[j];
        }
        __syncthreads();
        if (slice > 0) return;
        for (int other = 1; other < call.slices; other++) {
#pragma unroll
            for (int j = 0; j < N; j++) {
                dcos.at[j] += parts[j][other * entries + lane];
                dsin.at[j] += parts[N + j][other * entries + lane];
            }
        }
    }
    if (!here || !turns) return;
    int64_t to = (((int64_t)row * table_heads + table_head) * call.len + token) * call.pairs + N * chunk;
    if (call.dcos) store_run((Sum *)call.dcos + to, dcos);
    if (call.dsin) store_run((Sum *)call.dsin + to, dsin);
}

template <class T, int N> DEVICE void turn(const TurnCall &call) {
    if (call.interleaved) turn<T, N, true>(call);
    else turn<T, N, false>(call);
}

template <class T, int N> DEVICE void gradient(const TurnCall &call) {
    if (call.interleaved) gradient<T, N, true>(call);
    else gradient<T, N, false>(call);
}

} // namespace

// The `_runs` kernels take runs of 16 bytes: strides and widths must be multiples of them, and columns lie side by side.
#define ROTATE(kind, name, type)                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, 3) rotate_##kind##_##name##_runs(const __grid_constant__ TurnCall call) { \
        kind<type, RUN<type>>(call);                                                                                     \
    }                                                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS) rotate_##kind##_##name(const __grid_constant__ TurnCall call) {  \
        kind<type, 1>(call);                                                                                             \
    }
#define ROTATE_BOTH(name, type) ROTATE(turn, name, type) ROTATE(gradient, name, type)
ROTATE_BOTH(bf16, __nv_bfloat16)
ROTATE_BOTH(f16, __half)
ROTATE_BOTH(f32, float)
ROTATE_BOTH(f64, double)
