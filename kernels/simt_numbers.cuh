// Elements, and the numbers that the kernels without tensor cores hold them in.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace simt {

template <typename Element>
struct Accumulate {
    using Real = float;
};
template <>
struct Accumulate<double> {
    using Real = double;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }

__device__ __forceinline__ void narrow(float *to, float x) { *to = x; }
__device__ __forceinline__ void narrow(double *to, double x) { *to = x; }
__device__ __forceinline__ void narrow(__nv_bfloat16 *to, float x) { *to = __float2bfloat16_rn(x); }
__device__ __forceinline__ void narrow(__half *to, float x) { *to = __float2half_rn(x); }

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }
__device__ __forceinline__ float multiply_add(float x, float y, float z) { return fmaf(x, y, z); }
__device__ __forceinline__ double multiply_add(double x, double y, double z) { return fma(x, y, z); }
// Rounded, whatever is done with it next.
__device__ __forceinline__ float multiply(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ double multiply(double x, double y) { return __dmul_rn(x, y); }
__device__ __forceinline__ float greater(float x, float y) { return fmaxf(x, y); }
__device__ __forceinline__ double greater(double x, double y) { return fmax(x, y); }

}  // namespace simt
