// One decode kernel for bf16 and f16. The build script defines which, from src/attend/cuda/tiles.rs.
#include "attend_decode.cuh"
#include "entry.cuh"

template <class T> using Kernel = decode::DecodeKernel<T, Score, KERNEL_WIDTH, KERNEL_VALUES, KERNEL_WARPS, KERNEL_STAGES>;

extern "C" __global__ void __launch_bounds__(32 * KERNEL_WARPS, KERNEL_BLOCKS)
    ENTRY(decode, bf16)(const __grid_constant__ ForwardCall call) {
    decode::attend_decode<Kernel<__nv_bfloat16>>(call);
}

extern "C" __global__ void __launch_bounds__(32 * KERNEL_WARPS, KERNEL_BLOCKS)
    ENTRY(decode, f16)(const __grid_constant__ ForwardCall call) {
    decode::attend_decode<Kernel<__half>>(call);
}
