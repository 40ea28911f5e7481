// Two backward kernels for bf16 and f16. The build script defines which, from src/attend/cuda/tiles.rs.
#include "entry.cuh"

extern "C" __global__ void ENTRY(backward, keys_bf16)(const __grid_constant__ BackwardCall call) {}
extern "C" __global__ void ENTRY(backward, keys_f16)(const __grid_constant__ BackwardCall call) {}
extern "C" __global__ void ENTRY(backward, queries_bf16)(const __grid_constant__ BackwardCall call) {}
extern "C" __global__ void ENTRY(backward, queries_f16)(const __grid_constant__ BackwardCall call) {}
