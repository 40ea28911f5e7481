// The instructions of compute capability 8.0 that CUDA C++ has no words for. Shared memory is addressed by bytes.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#define DEVICE __device__ __forceinline__

DEVICE uint32_t shared_address(const void *pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

// Starts a copy of 16 bytes into shared memory. Unless `read`, zeros arrive instead, and nothing is read: `from` may then
// point anywhere.
DEVICE void copy_async(uint32_t to, const void *from, bool read) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(read ? 16 : 0) : "memory");
}

// The same for 8 bytes, always read.
DEVICE void copy_async_8(uint32_t to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

// Closes a group of copies.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `PENDING` groups of this thread's copies are under way.
template <int PENDING> DEVICE void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void load_matrices(uint32_t (&to)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

// The same, each transposed.
DEVICE void load_matrices_transposed(uint32_t (&to)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

// 16 bytes of shared memory, loaded where this stands: the compiler keeps no copy over loops to save the load.
DEVICE int4 load_shared(uint32_t address) {
    int4 to;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w) : "r"(address));
    return to;
}

// Two numbers, likewise.
DEVICE float2 load_shared_pair(uint32_t address) {
    float2 to;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(to.x), "=f"(to.y) : "r"(address));
    return to;
}

DEVICE void store_shared(uint32_t address, int x, int y) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}

// 2^x.
DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log2 x.
DEVICE float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// cos x, x in radians: multiplies by 1/2pi, rounding towards zero, and looks up.
DEVICE float cos_approx(float x) {
    float y;
    asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// sin x, likewise.
DEVICE float sin_approx(float x) {
    float y;
    asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Minimum and maximum in which NaN wins.
DEVICE float min_nan(float x, float y) {
    float z;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
DEVICE float max_nan(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

constexpr unsigned WARP = 0xffffffff; // all its lanes

// The greatest of, and the sum over, the four lanes that share a row of mma.m16n8k16's products.
DEVICE float greatest_of_row(float x) {
    x = fmaxf(x, __shfl_xor_sync(WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(WARP, x, 2));
}

DEVICE float sum_of_row(float x) {
    x += __shfl_xor_sync(WARP, x, 1);
    return x + __shfl_xor_sync(WARP, x, 2);
}

// The two 16-bit types: unpacking of eight, packing of two f32, and c += a b on a 16x8 tile, a 16x16 by rows, b 16x8 by columns.
template <class T> struct Half;

template <> struct Half<__nv_bfloat16> {
    static DEVICE void unpack(float (&to)[8], uint4 from) {
        uint32_t pairs[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            to[2 * i] = __uint_as_float(pairs[i] << 16);
            to[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
        }
    }
    // What packing of the two lost.
    static DEVICE uint32_t pack_rest(float low, float high, uint32_t both) {
        return pack(low - __uint_as_float(both << 16), high - __uint_as_float(both & 0xffff0000u));
    }
    static DEVICE uint32_t pack(float low, float high) {
        uint32_t both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
    }
    static DEVICE void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

template <> struct Half<__half> {
    static DEVICE void unpack(float (&to)[8], uint4 from) {
        const __half2 *pairs = (const __half2 *)&from;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 pair = __half22float2(pairs[i]);
            to[2 * i] = pair.x;
            to[2 * i + 1] = pair.y;
        }
    }
    static DEVICE uint32_t pack_rest(float low, float high, uint32_t both) {
        float2 rounded = __half22float2(*(const __half2 *)&both);
        return pack(low - rounded.x, high - rounded.y);
    }
    static DEVICE uint32_t pack(float low, float high) {
        uint32_t both;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
    }
    static DEVICE void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};
