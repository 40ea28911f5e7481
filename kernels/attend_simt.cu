// The general kernel's entries for one score, in every dtype: attend_simt_{dot|bias|phase}_{f32|f64|bf16|f16}.
// Built with one of SCORE_DOT, SCORE_BIAS and SCORE_PHASE defined as 1.
#include "attend_simt.cuh"

#if SCORE_DOT
#define ENTRY(dtype) attend_simt_dot_##dtype
#elif SCORE_BIAS
#define ENTRY(dtype) attend_simt_bias_##dtype
#else
#define ENTRY(dtype) attend_simt_phase_##dtype
#endif

#define KERNEL(dtype, Element)                                            \
    extern "C" __global__ void __launch_bounds__(simt::THREADS, 2)        \
        ENTRY(dtype)(const __grid_constant__ SimtCall call) {             \
        simt::attend<Element>(call);                                      \
    }

KERNEL(f32, float)
KERNEL(f64, double)
KERNEL(bf16, __nv_bfloat16)
KERNEL(f16, __half)
