// The four dtypes of elements, and what kernels compute in: f32, or f64 for f64.
#pragma once
#include "ptx.cuh"

template <class T> struct Compute {
    using Real = float;
};
template <> struct Compute<double> {
    using Real = double;
};
template <class T> using RealOf = typename Compute<T>::Real;

DEVICE float widen(float x) { return x; }
DEVICE double widen(double x) { return x; }
DEVICE float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
DEVICE float widen(__half x) { return __half2float(x); }

template <class T> DEVICE T narrow(RealOf<T> x) { return x; }
template <> DEVICE __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <> DEVICE __half narrow<__half>(float x) { return __float2half_rn(x); }
