// Elements loaded as what kernels compute in, and rounded back: eight neighbours at a time, in pieces of 16 bytes where
// rows are whole and aligned, else one by one.
#pragma once
#include "numbers.cuh"

// As it is after a store and a load.
template <class T> DEVICE RealOf<T> rounded(RealOf<T> x) { return widen(narrow<T>(x)); }

constexpr int EIGHT = 8;

template <class T> DEVICE void load_aligned(float (&to)[EIGHT], const T *from) { Half<T>::unpack(to, *(const uint4 *)from); }
template <> DEVICE void load_aligned<float>(float (&to)[EIGHT], const float *from) {
#pragma unroll
    for (int i = 0; i < EIGHT / 4; i++) {
        float4 piece = ((const float4 *)from)[i];
        to[4 * i] = piece.x, to[4 * i + 1] = piece.y, to[4 * i + 2] = piece.z, to[4 * i + 3] = piece.w;
    }
}
DEVICE void load_aligned(double (&to)[EIGHT], const double *from) {
#pragma unroll
    for (int i = 0; i < EIGHT / 2; i++) {
        double2 piece = ((const double2 *)from)[i];
        to[2 * i] = piece.x, to[2 * i + 1] = piece.y;
    }
}

template <class T> DEVICE void store_aligned(T *to, const float (&from)[EIGHT]) {
    *(uint4 *)to = {Half<T>::pack(from[0], from[1]), Half<T>::pack(from[2], from[3]), Half<T>::pack(from[4], from[5]),
                    Half<T>::pack(from[6], from[7])};
}
template <> DEVICE void store_aligned<float>(float *to, const float (&from)[EIGHT]) {
#pragma unroll
    for (int i = 0; i < EIGHT / 4; i++)
        ((float4 *)to)[i] = {from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]};
}
DEVICE void store_aligned(double *to, const double (&from)[EIGHT]) {
#pragma unroll
    for (int i = 0; i < EIGHT / 2; i++) ((double2 *)to)[i] = {from[2 * i], from[2 * i + 1]};
}

// `left` is how many there are; what is beyond is loaded as 0 and not stored.
template <bool VECTOR, class T> DEVICE void load_eight(RealOf<T> (&to)[EIGHT], const T *from, int left) {
    if constexpr (VECTOR) {
        load_aligned(to, from);
    } else {
#pragma unroll
        for (int i = 0; i < EIGHT; i++) to[i] = i < left ? widen(from[i]) : RealOf<T>(0);
    }
}

template <bool VECTOR, class T> DEVICE void store_eight(T *to, const RealOf<T> (&from)[EIGHT], int left) {
    if constexpr (VECTOR) {
        store_aligned(to, from);
    } else {
#pragma unroll
        for (int i = 0; i < EIGHT; i++)
            if (i < left) to[i] = narrow<T>(from[i]);
    }
}
