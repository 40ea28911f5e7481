// Heads side by side: the first columns of every head of a (B,H,T,E) as a (B,T,H D), and the gradient of that, which is
// zero in all other columns. Nothing is computed, so there is a kernel for each width of an element in bits.
#include "strided.cuh"

struct JoinCall {
    Strided x;   // (B,H,T,E); gradient: (B,1,T,H D)
    void *out;   // (B,T,H D) without gaps; gradient: (B,H,T,E)
    int heads, len;
    int width;   // D
    int all;     // E
};
static_assert(sizeof(JoinCall) == 64, "");

namespace {

constexpr int THREADS = 256;

// A row of the grid for each row of the batch, a thread for each run of N.
template <class T, int N> DEVICE void join(const JoinCall &call) {
    unsigned runs = call.width / N, at = blockIdx.x * THREADS + threadIdx.x, token = at / (call.heads * runs);
    if (token >= call.len) return;
    unsigned head = at / runs % call.heads, column = at % runs * N;
    const T *from = (const T *)call.x.data + blockIdx.y * call.x.batch + head * call.x.head + token * call.x.token;
    T *to = (T *)call.out + (((int64_t)blockIdx.y * call.len + token) * call.heads + head) * call.width + column;
    store_run(to, load_run<N>(from + column * call.x.column));
}

// A row of the grid for each head of each row of the batch.
template <class T, int N> DEVICE void part(const JoinCall &call) {
    unsigned runs = call.all / N, at = blockIdx.x * THREADS + threadIdx.x, token = at / runs;
    if (token >= call.len) return;
    unsigned head = blockIdx.y % call.heads, column = at % runs * N;
    Run<T, N> x{};
    if (column < call.width) {
        const T *from = (const T *)call.x.data + blockIdx.y / call.heads * call.x.batch + token * call.x.token;
        x = load_run<N>(from + ((int64_t)head * call.width + column) * call.x.column);
    }
    store_run((T *)call.out + ((int64_t)blockIdx.y * call.len + token) * call.all + column, x);
}

} // namespace

#define HEADS(kind, bits)                                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS) heads_##kind##_##bits##_runs(const __grid_constant__ JoinCall call) { \
        kind<uint##bits##_t, 128 / bits>(call);                                                                          \
    }                                                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS) heads_##kind##_##bits(const __grid_constant__ JoinCall call) {  \
        kind<uint##bits##_t, 1>(call);                                                                                   \
    }
HEADS(join, 16)
HEADS(join, 32)
HEADS(join, 64)
HEADS(part, 16)
HEADS(part, 32)
HEADS(part, 64)
