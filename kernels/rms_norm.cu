// RMSNorm, y = n w with n = x / rms and rms = sqrt(mean of x^2 + eps) over a row, and its gradients (Zhang & Sennrich, arXiv
// 1910.07467, equation 4).
//
// With g = dy w: dx = (g - n mean(g n)) / rms, and dw = the sum of dy n over all rows. Forward, n is rounded to its dtype
// before it is multiplied, as the model's other implementations do; so it is in dw.
//
// A row belongs to a team of threads: a warp, or for wide rows a block. Thread `lane` has columns 8 lane .. 8 lane + 7,
// those a whole team further, and so on, in every row of its team; it reads them once for the row's sums and again, from
// a cache, for the results. So it can sum its columns of dw in memory of its own: shared memory where that is enough (in
// fours, so that no two lanes meet in a bank), else the block's row of `partial`. The sums of a block's teams are added in
// order, then a second kernel adds those of the blocks in order; rows are dealt out by the number of blocks only. No
// atomics.
#include "element.cuh"

struct NormCall {
    const void *x, *weight; // (rows, width) and (width)
    const void *grad;       // backward: dy, like x
    void *out;              // y; backward: dx, or null
    void *partial;          // backward: (blocks, width) of f32 (f64 for f64), or null
    void *weight_grad;      // dw
    const void *addend;     // backward: added to dx, like x; or null
    int64_t rows;
    double epsilon;
    int width;
    int team;               // 32 or 256
    int vector;             // whether rows are whole eights, in pieces of 16 bytes
    int blocks;             // rows of `partial`
    int shared;             // whether dw is summed in shared memory
    int reserved;
};
static_assert(sizeof(NormCall) == 96, "");

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int PARTS = 32; // threads that share a column of `partial`

extern __shared__ __align__(16) double shared_memory[];

DEVICE float root(float x) { return sqrtf(x); }
DEVICE double root(double x) { return sqrt(x); }

// The sum over a team, for all its threads; a block calls it together, with memory for two sums of each warp.
template <int TEAM, class Real> DEVICE void team_sums(Real (&sums)[2], Real *exchange) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
        sums[0] += __shfl_xor_sync(WARP, sums[0], mask);
        sums[1] += __shfl_xor_sync(WARP, sums[1], mask);
    }
    if constexpr (TEAM > 32) {
        __syncthreads(); // the sums of the row before have been read
        if (threadIdx.x % 32 == 0) {
            exchange[2 * (threadIdx.x / 32)] = sums[0];
            exchange[2 * (threadIdx.x / 32) + 1] = sums[1];
        }
        __syncthreads();
        sums[0] = sums[1] = 0;
#pragma unroll
        for (int warp = 0; warp < TEAM / 32; warp++) {
            sums[0] += exchange[2 * warp];
            sums[1] += exchange[2 * warp + 1];
        }
    }
}

template <class T, bool VECTOR, int TEAM> DEVICE void forward(const NormCall &call) {
    using Real = RealOf<T>;
    __shared__ Real exchange[2 * WARPS];
    constexpr int TEAMS = THREADS / TEAM;
    const T *weight = (const T *)call.weight;
    for (int64_t row = (int64_t)blockIdx.x * TEAMS + threadIdx.x / TEAM; row < call.rows; row += (int64_t)gridDim.x * TEAMS) {
        const T *x = (const T *)call.x + row * call.width;
        T *y = (T *)call.out + row * call.width;
        Real sums[2] = {0, 0}, in[EIGHT], factor[EIGHT];
        for (int column = EIGHT * (threadIdx.x % TEAM); column < call.width; column += EIGHT * TEAM) {
            load_eight<VECTOR>(in, x + column, call.width - column);
#pragma unroll
            for (int i = 0; i < EIGHT; i++) sums[0] += in[i] * in[i];
        }
        team_sums<TEAM>(sums, exchange);
        Real rms = root(sums[0] / Real(call.width) + Real(call.epsilon));
        for (int column = EIGHT * (threadIdx.x % TEAM); column < call.width; column += EIGHT * TEAM) {
            load_eight<VECTOR>(in, x + column, call.width - column);
            load_eight<VECTOR>(factor, weight + column, call.width - column);
#pragma unroll
            for (int i = 0; i < EIGHT; i++) in[i] = rounded<T>(in[i] / rms) * factor[i];
            store_eight<VECTOR>(y + column, in, call.width - column);
        }
    }
}

// Where a team's sum of a column is in its shared memory, whose size is a multiple of 8 TEAM.
template <int TEAM> DEVICE int place(int column) {
    constexpr int STRETCH = EIGHT * TEAM;
    return column / STRETCH * STRETCH + column % EIGHT / 4 * (4 * TEAM) + column % STRETCH / EIGHT * 4 + column % 4;
}

template <class Real> struct alignas(16) Four {
    Real of[4];
};

template <class T, bool VECTOR, int TEAM> DEVICE void backward(const NormCall &call) {
    using Real = RealOf<T>;
    __shared__ Real exchange[2 * WARPS];
    constexpr int TEAMS = THREADS / TEAM;
    const T *weight = (const T *)call.weight;
    const int team = threadIdx.x / TEAM, first = EIGHT * (threadIdx.x % TEAM);
    Real *partial = (Real *)call.partial + (int64_t)blockIdx.x * call.width;
    const int padded = (call.width + EIGHT * TEAM - 1) / (EIGHT * TEAM) * (EIGHT * TEAM);
    Real *sum = (Real *)shared_memory + team * padded;
    if (call.partial) {
        for (int column = first; column < call.width; column += EIGHT * TEAM)
            for (int i = 0; i < EIGHT; i++) {
                if (call.shared)
                    sum[place<TEAM>(column + i)] = 0;
                else if (column + i < call.width)
                    partial[column + i] = 0; // a block is one team
            }
    }
    for (int64_t row = (int64_t)blockIdx.x * TEAMS + team; row < call.rows; row += (int64_t)gridDim.x * TEAMS) {
        const T *x = (const T *)call.x + row * call.width, *grad = (const T *)call.grad + row * call.width;
        Real sums[2] = {0, 0}, in[EIGHT], factor[EIGHT], dy[EIGHT];
        for (int column = first; column < call.width; column += EIGHT * TEAM) {
            int left = call.width - column;
            load_eight<VECTOR>(in, x + column, left);
            load_eight<VECTOR>(factor, weight + column, left);
            load_eight<VECTOR>(dy, grad + column, left);
#pragma unroll
            for (int i = 0; i < EIGHT; i++) {
                sums[0] += in[i] * in[i];
                sums[1] += dy[i] * factor[i] * in[i];
            }
        }
        team_sums<TEAM>(sums, exchange);
        Real rms = root(sums[0] / Real(call.width) + Real(call.epsilon));
        Real mean = sums[1] / rms / Real(call.width); // of g n
        for (int column = first; column < call.width; column += EIGHT * TEAM) {
            int left = call.width - column;
            load_eight<VECTOR>(in, x + column, left);
            load_eight<VECTOR>(factor, weight + column, left);
            load_eight<VECTOR>(dy, grad + column, left);
            Real dx[EIGHT];
#pragma unroll
            for (int i = 0; i < EIGHT; i++) {
                Real n = in[i] / rms;
                dx[i] = (dy[i] * factor[i] - n * mean) / rms;
                in[i] = dy[i] * rounded<T>(n);
            }
            if (call.out) {
                if (call.addend) {
                    load_eight<VECTOR>(factor, (const T *)call.addend + row * call.width + column, left);
#pragma unroll
                    for (int i = 0; i < EIGHT; i++) dx[i] += factor[i];
                }
                store_eight<VECTOR>((T *)call.out + row * call.width + column, dx, left);
            }
            if (!call.partial) continue;
            if (call.shared) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    Four<Real> *four = (Four<Real> *)(sum + place<TEAM>(column + 4 * half)), so_far = *four;
#pragma unroll
                    for (int i = 0; i < 4; i++) so_far.of[i] += in[4 * half + i];
                    *four = so_far;
                }
            } else {
#pragma unroll
                for (int i = 0; i < EIGHT; i++)
                    if (i < left) partial[column + i] += in[i];
            }
        }
    }
    if (!call.partial || !call.shared) return;
    __syncthreads();
    for (int column = threadIdx.x; column < call.width; column += THREADS) {
        Real total = 0;
        for (int i = 0; i < TEAMS; i++) total += ((Real *)shared_memory)[i * padded + place<TEAM>(column)];
        partial[column] = total;
    }
}

// A block has 32 columns; PARTS threads share one, the first of which adds up what the others found.
template <class T> DEVICE void weight_gradient(const NormCall &call) {
    using Real = RealOf<T>;
    __shared__ Real sums[PARTS][32];
    int part = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * 32 + lane;
    Real sum = 0;
    if (column < call.width) {
#pragma unroll 4
        for (int block = part; block < call.blocks; block += PARTS)
            sum += ((const Real *)call.partial)[(int64_t)block * call.width + column];
    }
    sums[part][lane] = sum;
    __syncthreads();
    if (part > 0 || column >= call.width) return;
    sum = 0;
#pragma unroll
    for (int i = 0; i < PARTS; i++) sum += sums[i][lane];
    ((T *)call.weight_grad)[column] = narrow<T>(sum);
}

} // namespace

#define KERNEL(way, type, Element)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                   \
        rms_norm_##way##_##type(const __grid_constant__ NormCall call) {                                    \
        if (call.team == 32)                                                                                \
            call.vector ? way<Element, true, 32>(call) : way<Element, false, 32>(call);                     \
        else                                                                                                \
            call.vector ? way<Element, true, THREADS>(call) : way<Element, false, THREADS>(call);           \
    }
#define KERNELS(type, Element)                                                                              \
    KERNEL(forward, type, Element)                                                                          \
    KERNEL(backward, type, Element)                                                                         \
    extern "C" __global__ void __launch_bounds__(32 * PARTS)                                                \
        rms_norm_weight_##type(const __grid_constant__ NormCall call) {                                     \
        weight_gradient<Element>(call);                                                                     \
    }

KERNELS(f32, float)
KERNELS(f64, double)
KERNELS(bf16, __nv_bfloat16)
KERNELS(f16, __half)
