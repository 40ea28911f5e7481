// The cross-entropy of a chunk of tokens from their logits l (rows, V), and the gradient of the logits.
//
// A row's loss is log(sum of exp(l - greatest)) - (l_y - greatest) with y its target; with g its upstream gradient and
// p = exp(l - greatest) / sum, the logits' gradient is g (p - onehot(y)): as it is, or for tensor cores as the sum of two
// bf16 numbers, the second of which is what rounding took from the first (16 bits together; beyond bf16's greatest number,
// 3.39e38, it is infinite). A row belongs to a team of threads, a warp, or
// for wide rows a block, which reads it twice: for its greatest, then, from a cache, for its sum. All sums have a fixed
// order.
#include "element.cuh"

struct EntropyCall {
    const void *logits;      // (rows, width), f32 or f64
    const int64_t *targets;  // (rows)
    void *greatest, *sum;    // (rows): results, backward operands
    const void *grad;        // backward: (rows)
    void *out;               // (rows) losses; backward: (rows, width), may be `logits` unless split
    void *rest;              // backward, split: (rows, width), what rounding took
    int64_t rows;
    int width;
    int team;                // 32 or 256
    int vector;              // whether rows are whole eights, in pieces of 16 bytes
    int reserved;
};
static_assert(sizeof(EntropyCall) == 80, "");

namespace {

constexpr int THREADS = 256;

DEVICE float exponential(float x) { return expf(x); }
DEVICE double exponential(double x) { return exp(x); }
DEVICE float logarithm(float x) { return logf(x); }
DEVICE double logarithm(double x) { return log(x); }

struct Greatest {
    template <class Real> DEVICE static Real of(Real a, Real b) { return a > b ? a : b; }
};
struct Sum {
    template <class Real> DEVICE static Real of(Real a, Real b) { return a + b; }
};

// What a team has together, for all its threads; a block calls it together.
template <class Both, int TEAM, class Real> DEVICE Real together(Real x, Real *exchange) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x = Both::of(x, __shfl_xor_sync(WARP, x, mask));
    if constexpr (TEAM > 32) {
        __syncthreads(); // what was exchanged before has been read
        if (threadIdx.x % 32 == 0) exchange[threadIdx.x / 32] = x;
        __syncthreads();
        x = exchange[0];
#pragma unroll
        for (int warp = 1; warp < TEAM / 32; warp++) x = Both::of(x, exchange[warp]);
    }
    return x;
}

template <class Real, bool VECTOR, int TEAM> DEVICE void forward(const EntropyCall &call) {
    __shared__ Real exchange[THREADS / 32];
    constexpr int TEAMS = THREADS / TEAM;
    const int first = EIGHT * (threadIdx.x % TEAM);
    for (int64_t row = (int64_t)blockIdx.x * TEAMS + threadIdx.x / TEAM; row < call.rows; row += (int64_t)gridDim.x * TEAMS) {
        const Real *logits = (const Real *)call.logits + row * call.width;
        Real in[EIGHT], greatest = -INFINITY, sum = 0;
        for (int column = first; column < call.width; column += EIGHT * TEAM) {
            int left = call.width - column;
            load_eight<VECTOR>(in, logits + column, left);
#pragma unroll
            for (int i = 0; i < EIGHT; i++)
                if (VECTOR || i < left) greatest = Greatest::of(in[i], greatest);
        }
        greatest = together<Greatest, TEAM>(greatest, exchange);
        for (int column = first; column < call.width; column += EIGHT * TEAM) {
            int left = call.width - column;
            load_eight<VECTOR>(in, logits + column, left);
#pragma unroll
            for (int i = 0; i < EIGHT; i++)
                if (VECTOR || i < left) sum += exponential(in[i] - greatest);
        }
        sum = together<Sum, TEAM>(sum, exchange);
        if (threadIdx.x % TEAM > 0) continue;
        ((Real *)call.greatest)[row] = greatest;
        ((Real *)call.sum)[row] = sum;
        ((Real *)call.out)[row] = logarithm(sum) - (logits[call.targets[row]] - greatest);
    }
}

template <class Real, bool VECTOR, int TEAM, bool SPLIT = false> DEVICE void backward(const EntropyCall &call) {
    constexpr int TEAMS = THREADS / TEAM;
    for (int64_t row = (int64_t)blockIdx.x * TEAMS + threadIdx.x / TEAM; row < call.rows; row += (int64_t)gridDim.x * TEAMS) {
        const Real *logits = (const Real *)call.logits + row * call.width;
        Real grad = ((const Real *)call.grad)[row], greatest = ((const Real *)call.greatest)[row];
        Real factor = grad / ((const Real *)call.sum)[row];
        int target = (int)call.targets[row];
        for (int column = EIGHT * (threadIdx.x % TEAM); column < call.width; column += EIGHT * TEAM) {
            int left = call.width - column;
            Real in[EIGHT];
            load_eight<VECTOR>(in, logits + column, left);
#pragma unroll
            for (int i = 0; i < EIGHT; i++) {
                in[i] = exponential(in[i] - greatest) * factor;
                if (column + i == target) in[i] -= grad;
            }
            int64_t at = row * call.width + column;
            if constexpr (SPLIT) {
                Real rest[EIGHT];
#pragma unroll
                for (int i = 0; i < EIGHT; i++) {
                    Real high = rounded<__nv_bfloat16>(in[i]);
                    rest[i] = isinf(high) ? Real(0) : in[i] - high;
                }
                store_eight<VECTOR>((__nv_bfloat16 *)call.out + at, in, left);
                store_eight<VECTOR>((__nv_bfloat16 *)call.rest + at, rest, left);
            } else {
                store_eight<VECTOR>((Real *)call.out + at, in, left);
            }
        }
    }
}

template <class Real, bool VECTOR, int TEAM> DEVICE void split(const EntropyCall &call) {
    backward<Real, VECTOR, TEAM, true>(call);
}

} // namespace

#define KERNEL(name, way, Real)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                \
        cross_entropy_##name(const __grid_constant__ EntropyCall call) {                         \
        if (call.team == 32)                                                                             \
            call.vector ? way<Real, true, 32>(call) : way<Real, false, 32>(call);                        \
        else                                                                                             \
            call.vector ? way<Real, true, THREADS>(call) : way<Real, false, THREADS>(call);              \
    }

KERNEL(forward_f32, forward, float)
KERNEL(backward_f32, backward, float)
KERNEL(backward_split, split, float)
KERNEL(forward_f64, forward, double)
KERNEL(backward_f64, backward, double)
