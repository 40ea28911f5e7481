// TAPA's phase norm: the first `amplitude` columns of a row pass bit for bit, the n others become
// y = f x with f = gain / rms and rms = sqrt(mean of x^2 + eps) over those n; a head has one gain.
//
// Backward, with m = mean(dy x) / rms^2: dx = f (dy - x m), and the gain's gradient is the sum of n m rms, which is
// sum(dy x) / rms, over the rows of its head.
//
// Bound by memory. A row belongs to a team of `lanes` threads, a part of a warp, each of which takes a run of its columns
// and, where rows are wider than a team, those a whole team further; these it reads again for the results. The rows of a
// block are of one head, and blocks next to each other take the same tokens of all heads, which lie side by side in what
// projections give. A block's sum for the gain goes to `partial`; a second kernel adds those of a head. All in fixed order.
#include "strided.cuh"

struct PhaseCall {
    Strided x;        // (B,H,T,D)
    Strided grad;     // backward: of the result
    void *out;        // (B,H,T,D) without gaps; backward: dx, or null
    const void *gain; // (H), or null: it is `fixed`
    void *partial;    // backward: (H,pieces) of what sums are made in, or null
    void *gain_grad;  // (H)
    double fixed, epsilon;
    int rows;         // of a head: B T
    int heads, len, width;
    int amplitude;
    int lanes;        // a power of two, up to 32
    int pieces;       // blocks of a head
    int reserved;
};
static_assert(sizeof(PhaseCall) == 160, "");

namespace {

constexpr int THREADS = 256;

DEVICE float root(float x) { return sqrtf(x); }
DEVICE double root(double x) { return sqrt(x); }

// The sum over teams of so many lanes, for all of their threads; a warp calls it together.
template <class Sum> DEVICE Sum team_sum(Sum sum, int lanes) {
    for (int mask = lanes / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(WARP, sum, mask);
    return sum;
}

// What a block has to do with its head.
template <class T> struct Head {
    using Sum = RealOf<T>;
    int head, piece, team, teams, first; // `first` is the thread's first column
    Sum gain, columns;
    DEVICE Head(const PhaseCall &call, int run) {
        head = blockIdx.x % (unsigned)call.heads;
        piece = blockIdx.x / (unsigned)call.heads;
        teams = THREADS / call.lanes;
        team = threadIdx.x / call.lanes;
        first = threadIdx.x % call.lanes * run;
        gain = call.gain ? widen(((const T *)call.gain)[head]) : Sum(call.fixed);
        columns = Sum(call.width - call.amplitude);
    }
    // What multiplies a row, rounded as in tensor operations.
    DEVICE Sum factor(const PhaseCall &call, Sum rms) const { return call.gain ? gain / rms : Sum(1) / rms * gain; }
};

// Where a row is.
struct Row {
    int b, token;
    DEVICE Row(const PhaseCall &call, int row) : b((unsigned)row / (unsigned)call.len), token((unsigned)row % (unsigned)call.len) {}
    template <class T> DEVICE const T *in(const Strided &x, int head) const {
        return (const T *)x.data + b * x.batch + head * x.head + token * x.token;
    }
    template <class T> DEVICE T *out(const PhaseCall &call, int head) const {
        return (T *)call.out + (((int64_t)b * call.heads + head) * call.len + token) * call.width;
    }
};

template <class T, int N> DEVICE void forward(const PhaseCall &call) {
    using Sum = RealOf<T>;
    const Head<T> head(call, N);
    const int step = call.lanes * N;
    for (int64_t start = (int64_t)head.piece * head.teams; start < call.rows; start += (int64_t)call.pieces * head.teams) {
        const bool here = start + head.team < call.rows;
        const Row row(call, here ? start + head.team : 0);
        const T *x = row.in<T>(call.x, head.head);
        const int width = here ? call.width : 0;
        Run<T, N> kept;
        Sum values[N], squares = 0;
        if (head.first < width) kept = load_run<N>(x + head.first * call.x.column);
        for (int column = head.first; column < width; column += step) {
            if (column < call.amplitude) continue;
            widen_run(values, column == head.first ? kept : load_run<N>(x + column * call.x.column));
#pragma unroll
            for (int i = 0; i < N; i++) squares += values[i] * values[i];
        }
        Sum rms = root(team_sum(squares, call.lanes) / head.columns + Sum(call.epsilon));
        Sum factor = head.factor(call, rms);
        for (int column = head.first; column < width; column += step) {
            Run<T, N> run = column == head.first ? kept : load_run<N>(x + column * call.x.column);
            if (column >= call.amplitude) {
                widen_run(values, run);
#pragma unroll
                for (int i = 0; i < N; i++) values[i] *= factor;
                run = rounded_run<T>(values);
            }
            store_run(row.out<T>(call, head.head) + column, run);
        }
    }
}

template <class T, int N> DEVICE void backward(const PhaseCall &call) {
    using Sum = RealOf<T>;
    __shared__ Sum totals[THREADS];
    const Head<T> head(call, N);
    const int step = call.lanes * N;
    Sum total = 0;
    for (int64_t start = (int64_t)head.piece * head.teams; start < call.rows; start += (int64_t)call.pieces * head.teams) {
        const bool here = start + head.team < call.rows;
        const Row row(call, here ? start + head.team : 0);
        const T *x = row.in<T>(call.x, head.head), *grad = row.in<T>(call.grad, head.head);
        const int width = here ? call.width : 0;
        Run<T, N> kept, kept_grad;
        Sum values[N], grads[N], squares = 0, products = 0;
        if (head.first < width) {
            kept_grad = load_run<N>(grad + head.first * call.grad.column);
            if (head.first >= call.amplitude) kept = load_run<N>(x + head.first * call.x.column);
        }
        for (int column = head.first; column < width; column += step) {
            if (column < call.amplitude) continue;
            const bool first = column == head.first;
            widen_run(values, first ? kept : load_run<N>(x + column * call.x.column));
            widen_run(grads, first ? kept_grad : load_run<N>(grad + column * call.grad.column));
#pragma unroll
            for (int i = 0; i < N; i++) {
                squares += values[i] * values[i];
                products += grads[i] * values[i];
            }
        }
        Sum rms = root(team_sum(squares, call.lanes) / head.columns + Sum(call.epsilon));
        Sum gain_term = team_sum(products, call.lanes) / rms;
        total += gain_term; // of a row that is not there 0
        if (!call.out) continue;
        Sum factor = head.factor(call, rms), mean = gain_term / head.columns / rms;
        for (int column = head.first; column < width; column += step) {
            const bool first = column == head.first;
            Run<T, N> run = first ? kept_grad : load_run<N>(grad + column * call.grad.column);
            if (column >= call.amplitude) {
                widen_run(grads, run);
                widen_run(values, first ? kept : load_run<N>(x + column * call.x.column));
#pragma unroll
                for (int i = 0; i < N; i++) values[i] = factor * (grads[i] - values[i] * mean);
                run = rounded_run<T>(values);
            }
            store_run(row.out<T>(call, head.head) + column, run);
        }
    }
    if (!call.partial) return;
    totals[threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    total = 0;
    for (int team = threadIdx.x; team < head.teams; team += 32) total += totals[team * call.lanes];
    total = team_sum(total, 32);
    if (threadIdx.x == 0) ((Sum *)call.partial)[(int64_t)head.head * call.pieces + head.piece] = total;
}

// A warp has a head.
template <class T> DEVICE void gain_gradient(const PhaseCall &call) {
    using Sum = RealOf<T>;
    const int head = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (head >= call.heads) return;
    const Sum *partial = (const Sum *)call.partial + (int64_t)head * call.pieces;
    Sum sum = 0;
#pragma unroll 4
    for (int piece = threadIdx.x % 32; piece < call.pieces; piece += 32) sum += partial[piece];
    sum = team_sum(sum, 32);
    if (threadIdx.x % 32 == 0) ((T *)call.gain_grad)[head] = narrow<T>(sum);
}

} // namespace

// The `_runs` kernels take runs of 16 bytes: strides and both widths must be multiples of them, and columns lie side by
// side.
#define WAY(way, name, type)                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) phase_norm_##way##_##name##_runs(const __grid_constant__ PhaseCall call) { \
        way<type, RUN<type>>(call);                                                                                    \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) phase_norm_##way##_##name(const __grid_constant__ PhaseCall call) { \
        way<type, 1>(call);                                                                                            \
    }
#define KERNELS(name, type)                                                                                            \
    WAY(forward, name, type)                                                                                           \
    WAY(backward, name, type)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) phase_norm_gain_##name(const __grid_constant__ PhaseCall call) { \
        gain_gradient<type>(call);                                                                                     \
    }
KERNELS(bf16, __nv_bfloat16)
KERNELS(f16, __half)
KERNELS(f32, float)
KERNELS(f64, double)
