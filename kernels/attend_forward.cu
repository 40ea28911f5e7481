// One forward kernel for bf16 and f16. The build script defines which, from src/attend/cuda/tiles.rs.
#include "attend_forward.cuh"
#include "entry.cuh"

template <class T> using Kernel = ForwardKernel<T, Score, KERNEL_WIDTH, KERNEL_VALUES, KERNEL_WARPS, KERNEL_ROW_TILES, KERNEL_KEYS>;

extern "C" __global__ void __launch_bounds__(32 * KERNEL_WARPS, KERNEL_BLOCKS)
    ENTRY(forward, bf16)(const __grid_constant__ ForwardCall call) {
    attend_forward<Kernel<__nv_bfloat16>>(call);
}

extern "C" __global__ void __launch_bounds__(32 * KERNEL_WARPS, KERNEL_BLOCKS)
    ENTRY(forward, f16)(const __grid_constant__ ForwardCall call) {
    attend_forward<Kernel<__half>>(call);
}
