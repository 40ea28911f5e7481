// The gradient of an embedding table: each row the sum of the gradients of the tokens that read it.
//
// The tokens come sorted by id, in pieces of at most 64 with one id. A block adds up one piece in order, a second kernel
// the pieces of an id in order. So a frequent id has many blocks, and no order depends on chance. Rows that no token read
// are zeroed before.
#include "element.cuh"

struct EmbeddingCall {
    const void *grad;         // (tokens, width)
    void *partial;            // (pieces, width) of f32 (f64 for f64)
    void *out;                // (ids, width), zeros
    const uint32_t *order;    // (tokens): which token is next
    const uint2 *pieces;      // first token of each in `order`, and the end
    const uint3 *rows;        // each id, its first piece and the end
    int64_t width;
    int64_t vector;           // whether rows are whole eights, in pieces of 16 bytes
};
static_assert(sizeof(EmbeddingCall) == 64, "");

namespace {

constexpr int THREADS = 64;

template <class T, bool VECTOR> DEVICE void sum_pieces(const EmbeddingCall &call) {
    using Real = RealOf<T>;
    uint2 piece = call.pieces[blockIdx.x];
    Real *partial = (Real *)call.partial + blockIdx.x * call.width;
    for (int64_t column = EIGHT * threadIdx.x; column < call.width; column += EIGHT * THREADS) {
        int left = (int)min((int64_t)EIGHT, call.width - column);
        Real sum[EIGHT] = {};
#pragma unroll 4
        for (uint32_t i = piece.x; i < piece.y; i++) {
            Real in[EIGHT];
            load_eight<VECTOR>(in, (const T *)call.grad + call.order[i] * call.width + column, left);
#pragma unroll
            for (int j = 0; j < EIGHT; j++) sum[j] += in[j];
        }
        store_eight<VECTOR>(partial + column, sum, left);
    }
}

template <class T, bool VECTOR> DEVICE void sum_rows(const EmbeddingCall &call) {
    using Real = RealOf<T>;
    uint3 row = call.rows[blockIdx.x];
    for (int64_t column = EIGHT * threadIdx.x; column < call.width; column += EIGHT * THREADS) {
        int left = (int)min((int64_t)EIGHT, call.width - column);
        Real sum[EIGHT] = {};
#pragma unroll 4
        for (int64_t i = row.y; i < row.z; i++) {
            Real in[EIGHT];
            load_eight<VECTOR>(in, (const Real *)call.partial + i * call.width + column, left);
#pragma unroll
            for (int j = 0; j < EIGHT; j++) sum[j] += in[j];
        }
        store_eight<VECTOR>((T *)call.out + row.x * call.width + column, sum, left);
    }
}

} // namespace

#define KERNELS(type, Element)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS)                                               \
        embedding_pieces_##type(const __grid_constant__ EmbeddingCall call) {                           \
        call.vector ? sum_pieces<Element, true>(call) : sum_pieces<Element, false>(call);               \
    }                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                               \
        embedding_rows_##type(const __grid_constant__ EmbeddingCall call) {                             \
        call.vector ? sum_rows<Element, true>(call) : sum_rows<Element, false>(call);                   \
    }

KERNELS(f32, float)
KERNELS(f64, double)
KERNELS(bf16, __nv_bfloat16)
KERNELS(f16, __half)
