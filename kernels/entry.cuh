// What the build script asks for, as it stands in src/attend/cuda/tiles.rs: the score, and the name of the kernel.
#pragma once
#include "score.cuh"

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

// attend_KIND_SCORE_wWIDTH_vVALUES_TYPE
#define ENTRY(kind, type) ENTRY_1(kind, SCORE, KERNEL_WIDTH, KERNEL_VALUES, type)
#define ENTRY_1(kind, score, width, values, type) ENTRY_2(kind, score, width, values, type)
#define ENTRY_2(kind, score, width, values, type) attend_##kind##_##score##_w##width##_v##values##_##type
