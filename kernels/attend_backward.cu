// Two backward kernels for bf16 and f16. The build script defines which, from src/attend/cuda/tiles.rs.
#include "attend_backward.cuh"
#include "entry.cuh"

// attend_backward_SCORE_wWIDTH_vVALUES_tTILE_SIDE_TYPE
#define BACKWARD(side) BACKWARD_1(KEYS_TILE, side)
#define BACKWARD_1(tile, side) BACKWARD_2(tile, side)
#define BACKWARD_2(tile, side) ENTRY(backward, t##tile##_##side)

template <class T>
using ForKeys = BackwardKernel<T, Score, KERNEL_WIDTH, KERNEL_VALUES, KEYS_WARPS, KEYS_TILE, KEYS_STEP, KEYS_PIECES, true>;
template <class T>
using ForQueries =
    BackwardKernel<T, Score, KERNEL_WIDTH, KERNEL_VALUES, QUERIES_WARPS, QUERIES_TILE, QUERIES_STEP, QUERIES_PIECES, false>;

extern "C" __global__ void __launch_bounds__(32 * KEYS_WARPS, KEYS_BLOCKS)
    BACKWARD(keys_bf16)(const __grid_constant__ BackwardCall call) {
    attend_backward<ForKeys<__nv_bfloat16>>(call);
}

extern "C" __global__ void __launch_bounds__(32 * KEYS_WARPS, KEYS_BLOCKS)
    BACKWARD(keys_f16)(const __grid_constant__ BackwardCall call) {
    attend_backward<ForKeys<__half>>(call);
}

extern "C" __global__ void __launch_bounds__(32 * QUERIES_WARPS, QUERIES_BLOCKS)
    BACKWARD(queries_bf16)(const __grid_constant__ BackwardCall call) {
    attend_backward<ForQueries<__nv_bfloat16>>(call);
}

extern "C" __global__ void __launch_bounds__(32 * QUERIES_WARPS, QUERIES_BLOCKS)
    BACKWARD(queries_f16)(const __grid_constant__ BackwardCall call) {
    attend_backward<ForQueries<__half>>(call);
}
