// What merges the decode kernels' parts, for bf16 and f16.
#include "attend_decode.cuh"

extern "C" __global__ void __launch_bounds__(32 * decode::MERGE_WARPS)
    attend_merge_bf16(const __grid_constant__ ForwardCall call) {
    decode::attend_merge<__nv_bfloat16>(call);
}

extern "C" __global__ void __launch_bounds__(32 * decode::MERGE_WARPS)
    attend_merge_f16(const __grid_constant__ ForwardCall call) {
    decode::attend_merge<__half>(call);
}
