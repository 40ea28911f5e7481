// The general backward kernels' entries for one score, in every dtype:
// attend_simt_backward_{dot|bias|phase}_{keys|queries}_{f32|f64|bf16|f16}.
// Built with one of SCORE_DOT, SCORE_BIAS and SCORE_PHASE defined as 1.
#include "attend_simt_backward.cuh"

#if SCORE_DOT
#define ENTRY(side, dtype) attend_simt_backward_dot_##side##_##dtype
#elif SCORE_BIAS
#define ENTRY(side, dtype) attend_simt_backward_bias_##side##_##dtype
#else
#define ENTRY(side, dtype) attend_simt_backward_phase_##side##_##dtype
#endif

#define KERNELS(dtype, Element)                                           \
    extern "C" __global__ void __launch_bounds__(simt::THREADS, 2)        \
        ENTRY(keys, dtype)(const __grid_constant__ SimtBackwardCall call) {    \
        simt::gradients<Element, true>(call);                             \
    }                                                                     \
    extern "C" __global__ void __launch_bounds__(simt::THREADS, 2)        \
        ENTRY(queries, dtype)(const __grid_constant__ SimtBackwardCall call) { \
        simt::gradients<Element, false>(call);                            \
    }

KERNELS(f32, float)
KERNELS(f64, double)
KERNELS(bf16, __nv_bfloat16)
KERNELS(f16, __half)
