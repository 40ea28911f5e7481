// One forward kernel for bf16 and f16. The build script defines which, from src/attend/cuda/tiles.rs.
#include "attend_forward.cuh"

#if defined(SCORE_DOT)
using Score = Dot;
#define SCORE dot
#elif defined(SCORE_BIAS)
using Score = Bias;
#define SCORE bias
#elif defined(SCORE_PHASE_FAST)
using Score = Phase<false>;
#define SCORE phase_fast
#elif defined(SCORE_PHASE_PRECISE)
using Score = Phase<true>;
#define SCORE phase_precise
#endif

#define JOIN_(score, width, values, type) attend_forward_##score##_w##width##_v##values##_##type
#define JOIN(score, width, values, type) JOIN_(score, width, values, type)

template <class T> using Kernel = ForwardKernel<T, Score, KERNEL_WIDTH, KERNEL_VALUES, KERNEL_WARPS, KERNEL_ROW_TILES, KERNEL_KEYS>;

extern "C" __global__ void __launch_bounds__(32 * KERNEL_WARPS, KERNEL_BLOCKS)
    JOIN(SCORE, KERNEL_WIDTH, KERNEL_VALUES, bf16)(const __grid_constant__ ForwardCall call) {
    attend_forward<Kernel<__nv_bfloat16>>(call);
}

extern "C" __global__ void __launch_bounds__(32 * KERNEL_WARPS, KERNEL_BLOCKS)
    JOIN(SCORE, KERNEL_WIDTH, KERNEL_VALUES, f16)(const __grid_constant__ ForwardCall call) {
    attend_forward<Kernel<__half>>(call);
}
