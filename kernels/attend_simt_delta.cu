// The general backward pass's first kernel, in every dtype.
#include "attend_simt_delta.cuh"

#define KERNEL(dtype, Element)                                                        \
    extern "C" __global__ void __launch_bounds__(32 * simt::DELTA_WARPS)              \
        attend_simt_delta_##dtype(const __grid_constant__ SimtDeltaCall call) {       \
        simt::delta<Element>(call);                                                   \
    }

KERNEL(f32, float)
KERNEL(f64, double)
KERNEL(bf16, __nv_bfloat16)
KERNEL(f16, __half)
