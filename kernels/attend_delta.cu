// What the backward pass needs of each row, for bf16 and f16: delta, the sum of out * grad over its columns, times the scale.
//
// With weights P, dP = grad v^T and out = P v, the gradient of a row's scores is P (dP - delta): delta is their mean
// (FlashAttention, Dao et al., arXiv 2205.14135, appendix B.4). Where dP hardly differs along a row, all of it is in the
// difference; so `rest` makes the rounded output whole again.
#include "call.cuh"
#include "ptx.cuh"

namespace {

constexpr int TILE = 64, THREADS = 256;
constexpr int LANES = 8; // for a row
constexpr float ENORMOUS = 1024.f;

template <class T> DEVICE void attend_delta(const DeltaCall &call) {
    int tiles = (call.len + TILE - 1) / TILE;
    int64_t head_row = blockIdx.x / tiles;
    int tile = blockIdx.x % tiles, lane = threadIdx.x % LANES;
    const T *out = (const T *)call.out + head_row * call.len * call.value_width;
    const T *rest = (const T *)call.rest + head_row * call.len * call.value_width;
    const T *grad = (const T *)call.grad.data + head_row / call.heads * call.grad.batch + head_row % call.heads * call.grad.head;
    bool enormous = false;
    for (int i = threadIdx.x / LANES; i < TILE; i += THREADS / LANES) {
        int row = tile * TILE + i;
        if (row >= call.len) break; // the lanes of a row together
        float delta = 0.f;
        for (int column = 8 * lane; column < call.value_width; column += 8 * LANES) {
            int64_t at = (int64_t)row * call.value_width + column;
            float o[8], r[8], g[8];
            Half<T>::unpack(o, __ldg((const uint4 *)(out + at)));
            Half<T>::unpack(r, __ldg((const uint4 *)(rest + at)));
            Half<T>::unpack(g, __ldg((const uint4 *)(grad + row * call.grad.token + column)));
#pragma unroll
            for (int j = 0; j < 8; j++) delta = __fmaf_rn(o[j] + r[j], g[j], delta);
        }
#pragma unroll
        for (int mask = LANES / 2; mask > 0; mask /= 2)
            delta += __shfl_xor_sync(0xffu << (threadIdx.x % 32 / LANES * LANES), delta, mask);
        float2 statistics = __ldg(call.statistics + head_row * call.len + row);
        enormous |= fabsf(statistics.x) > ENORMOUS && statistics.x != INFINITY;
        if (lane == 0) call.rows[head_row * call.len + row] = {statistics.x, delta * call.scale};
    }
    enormous = __syncthreads_or(enormous);
    if (threadIdx.x == 0) call.enormous[blockIdx.x] = enormous;
}

} // namespace

extern "C" __global__ void __launch_bounds__(THREADS) attend_delta_bf16(const __grid_constant__ DeltaCall call) {
    attend_delta<__nv_bfloat16>(call);
}

extern "C" __global__ void __launch_bounds__(THREADS) attend_delta_f16(const __grid_constant__ DeltaCall call) {
    attend_delta<__half>(call);
}
