// SwiGLU, y = silu(gate) up with silu(g) = g s and s = 1 / (1 + exp(-g)), and its gradients (Shazeer, arXiv 2002.05202,
// equation 6).
//
// d up = dy silu(gate) and d gate = dy up s (1 + gate (1 - s)). Nothing but the inputs is kept for it. A thread has eight
// neighbours of a row.
#include "element.cuh"

struct SwigluCall {
    const void *gate, *up;       // (rows, width), rows `stride` apart
    const void *grad;            // backward: dy, (rows, width) without gaps
    void *out;                   // y, likewise; backward: y again, or null
    void *gate_grad, *up_grad;   // backward: rows `stride` apart
    int64_t rows, stride;
    int width;
    int vector;                  // whether rows are whole eights, in pieces of 16 bytes
};
static_assert(sizeof(SwigluCall) == 72, "");

namespace {

constexpr int THREADS = 256;

DEVICE float exponential(float x) { return expf(x); }
DEVICE double exponential(double x) { return exp(x); }

template <class T, bool VECTOR, bool BACKWARD> DEVICE void swiglu(const SwigluCall &call) {
    using Real = RealOf<T>;
    int64_t pieces = (call.width + EIGHT - 1) / EIGHT;
    int64_t piece = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    // Short divisions where they do.
    int64_t row = piece <= UINT32_MAX ? (uint32_t)piece / (uint32_t)pieces : piece / pieces;
    if (row >= call.rows) return;
    int column = EIGHT * (int)(piece - row * pieces), left = call.width - column;
    int64_t wide = row * call.stride + column, close = row * call.width + column;
    Real gate[EIGHT], up[EIGHT];
    load_eight<VECTOR>(gate, (const T *)call.gate + wide, left);
    load_eight<VECTOR>(up, (const T *)call.up + wide, left);
    if constexpr (BACKWARD) {
        Real grad[EIGHT], y[EIGHT];
        load_eight<VECTOR>(grad, (const T *)call.grad + close, left);
#pragma unroll
        for (int i = 0; i < EIGHT; i++) {
            Real sigmoid = Real(1) / (Real(1) + exponential(-gate[i])), silu = gate[i] * sigmoid;
            y[i] = silu * up[i];
            gate[i] = grad[i] * up[i] * (sigmoid * (Real(1) + gate[i] * (Real(1) - sigmoid)));
            up[i] = grad[i] * silu;
        }
        store_eight<VECTOR>((T *)call.gate_grad + wide, gate, left);
        store_eight<VECTOR>((T *)call.up_grad + wide, up, left);
        if (call.out) store_eight<VECTOR>((T *)call.out + close, y, left);
    } else {
#pragma unroll
        for (int i = 0; i < EIGHT; i++) gate[i] = gate[i] * (Real(1) / (Real(1) + exponential(-gate[i]))) * up[i];
        store_eight<VECTOR>((T *)call.out + close, gate, left);
    }
}

} // namespace

#define KERNEL(way, type, Element, BACKWARD)                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                         \
        swiglu_##way##_##type(const __grid_constant__ SwigluCall call) {                                          \
        call.vector ? swiglu<Element, true, BACKWARD>(call) : swiglu<Element, false, BACKWARD>(call);             \
    }
#define KERNELS(type, Element)                \
    KERNEL(forward, type, Element, false)     \
    KERNEL(backward, type, Element, true)

KERNELS(f32, float)
KERNELS(f64, double)
KERNELS(bf16, __nv_bfloat16)
KERNELS(f16, __half)
