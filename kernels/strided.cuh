// Tensors of any strides, and runs of their neighbouring elements, for kernels that are bound by memory: a run is as
// wide as one or two loads of 16 bytes, or a single element where strides or addresses allow no more. The strides stand
// in src/gpu/strided.rs as well.
#pragma once
#include "numbers.cuh"

// (batch, heads, tokens, width): strides in elements, 0 where a dimension is broadcast.
struct Strided {
    const void *data;
    int64_t batch, head, token, column;
};
static_assert(sizeof(Strided) == 40, "");

// N neighbours.
template <class T, int N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Run {
    T at[N];
};

template <int N, class T> DEVICE Run<T, N> load_run(const T *from) { return *(const Run<T, N> *)from; }
template <class T, int N> DEVICE void store_run(T *to, const Run<T, N> &run) { *(Run<T, N> *)to = run; }

// A run in what sums are made in, and back: two of 16 bits at a time.
template <class T, class Sum, int N> DEVICE void widen_run(Sum (&to)[N], const Run<T, N> &run) {
    if constexpr (sizeof(T) == 2 && N == 8) {
        Half<T>::unpack(to, *(const uint4 *)&run);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = widen(run.at[i]);
    }
}
template <class T, class Sum, int N> DEVICE Run<T, N> rounded_run(const Sum (&from)[N]) {
    Run<T, N> run;
    if constexpr (sizeof(T) == 2 && N == 8) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) pairs[i] = Half<T>::pack(from[2 * i], from[2 * i + 1]);
        *(uint4 *)&run = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) run.at[i] = narrow<T>(from[i]);
    }
    return run;
}

// Elements of a run of 16 bytes.
template <class T> constexpr int RUN = 16 / (int)sizeof(T);
