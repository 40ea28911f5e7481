// x + y, element by element, rounded once: the stream and what a part of a layer adds to it. A thread has eight neighbours.
#include "element.cuh"

struct SumCall {
    const void *x, *y;
    void *out;
    int64_t len;
    int vector; // whether there are whole eights, in pieces of 16 bytes
    int reserved;
};
static_assert(sizeof(SumCall) == 40, "");

namespace {

constexpr int THREADS = 256;

template <class T, bool VECTOR> DEVICE void sum(const SumCall &call) {
    int64_t at = EIGHT * ((int64_t)blockIdx.x * THREADS + threadIdx.x);
    if (at >= call.len) return;
    int left = (int)min((int64_t)EIGHT, call.len - at);
    RealOf<T> x[EIGHT], y[EIGHT];
    load_eight<VECTOR>(x, (const T *)call.x + at, left);
    load_eight<VECTOR>(y, (const T *)call.y + at, left);
#pragma unroll
    for (int i = 0; i < EIGHT; i++) x[i] += y[i];
    store_eight<VECTOR>((T *)call.out + at, x, left);
}

} // namespace

#define KERNEL(type, Element)                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) sum_##type(const __grid_constant__ SumCall call) {   \
        call.vector ? sum<Element, true>(call) : sum<Element, false>(call);                                    \
    }

KERNEL(f32, float)
KERNEL(f64, double)
KERNEL(bf16, __nv_bfloat16)
KERNEL(f16, __half)
