// What an optimiser does with all weights at once: gradients brought to the masters' dtype, their squares summed, and AdamW
// (Loshchilov & Hutter, arXiv 1711.05101v3, algorithm 2) with the working copies rounded anew.
//
// Tensors stand in a table. Each is cut into chunks, and each chunk has a block, which finds its tensor by halving. Sums
// have a fixed order: a thread's, a block's, and then, on the host, the blocks'.
#include "element.cuh"

// One tensor of the table.
struct Entry {
    const void *gradient;
    void *master, *first, *second; // the weight, the mean of its gradients, that of their squares
    void *working;                 // what the model computes with, or null; gathering: where to
    int64_t len;
    int64_t first_block;           // of those that it has
    double kept, rate, root;       // what decay leaves; rate / (1 - beta1^t); sqrt(1 - beta2^t)
    int type;                      // of `working`; gathering: of `gradient`
    int reserved;
};

struct TableCall {
    const Entry *entries;
    double *sums;                  // one of each block
    int64_t count;                 // of entries
    double beta1, beta2, epsilon;
    double factor;                 // of the gradients
};
static_assert(sizeof(Entry) == 88 && sizeof(TableCall) == 56, "");

namespace {

constexpr int THREADS = 256, EACH = 16, CHUNK = THREADS * EACH;
enum Type { BF16 = 1, F16 = 2 };

DEVICE const Entry &entry_of_block(const TableCall &call) {
    int64_t low = 0, high = call.count; // the last whose first block is not beyond this one
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        (call.entries[middle].first_block <= blockIdx.x ? low : high) = middle;
    }
    return call.entries[low];
}

DEVICE float root(float x) { return sqrtf(x); }
DEVICE double root(double x) { return sqrt(x); }

template <class Real> DEVICE void update(const TableCall &call) {
    const Entry &entry = entry_of_block(call);
    const Real beta1 = Real(call.beta1), rest1 = Real(1. - call.beta1), beta2 = Real(call.beta2), rest2 = Real(1. - call.beta2);
    const Real epsilon = Real(call.epsilon), factor = Real(call.factor);
    const Real kept = Real(entry.kept), rate = Real(entry.rate), unbias = Real(entry.root);
    int64_t start = (blockIdx.x - entry.first_block) * CHUNK + threadIdx.x;
#pragma unroll 4
    for (int i = 0; i < EACH; i++) {
        int64_t at = start + i * THREADS;
        if (at >= entry.len) return;
        Real g = ((const Real *)entry.gradient)[at] * factor;
        Real m = beta1 * ((Real *)entry.first)[at] + rest1 * g;
        Real v = beta2 * ((Real *)entry.second)[at] + rest2 * (g * g);
        Real w = kept * ((Real *)entry.master)[at] - rate * m / (root(v) / unbias + epsilon);
        ((Real *)entry.first)[at] = m;
        ((Real *)entry.second)[at] = v;
        ((Real *)entry.master)[at] = w;
        if (!entry.working) continue;
        if (entry.type == BF16)
            ((__nv_bfloat16 *)entry.working)[at] = narrow<__nv_bfloat16>(float(w));
        else
            ((__half *)entry.working)[at] = narrow<__half>(float(w));
    }
}

template <class Real> DEVICE void sum_squares(const TableCall &call) {
    __shared__ double sums[THREADS / 32];
    const Entry &entry = entry_of_block(call);
    int64_t start = (blockIdx.x - entry.first_block) * CHUNK + threadIdx.x;
    double sum = 0;
#pragma unroll 4
    for (int i = 0; i < EACH; i++) {
        int64_t at = start + i * THREADS;
        double x = at < entry.len ? double(((const Real *)entry.gradient)[at]) : 0.;
        sum += x * x;
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(WARP, sum, mask);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int warp = 1; warp < THREADS / 32; warp++) sum += sums[warp];
    call.sums[blockIdx.x] = sum;
}

DEVICE void gather(const TableCall &call) {
    const Entry &entry = entry_of_block(call);
    int64_t start = (blockIdx.x - entry.first_block) * CHUNK + threadIdx.x;
#pragma unroll 4
    for (int i = 0; i < EACH; i++) {
        int64_t at = start + i * THREADS;
        if (at >= entry.len) return;
        ((float *)entry.working)[at] = entry.type == BF16 ? widen(((const __nv_bfloat16 *)entry.gradient)[at])
                                                          : widen(((const __half *)entry.gradient)[at]);
    }
}

} // namespace

#define KERNEL(name, body)                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) name(const __grid_constant__ TableCall call) { body; }

KERNEL(optimiser_adamw_f32, update<float>(call))
KERNEL(optimiser_adamw_f64, update<double>(call))
KERNEL(optimiser_squares_f32, sum_squares<float>(call))
KERNEL(optimiser_squares_f64, sum_squares<double>(call))
KERNEL(optimiser_gather, gather(call))
