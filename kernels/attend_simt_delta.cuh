// What the general backward kernels need of each row beside what the forward pass left: delta, the sum of out * grad over
// its columns. One warp a row. `rest` makes the rounded output of half precision whole again, as in attend_delta.cu.
#pragma once
#include "call.cuh"
#include "simt_numbers.cuh"

namespace simt {

constexpr int DELTA_WARPS = 4;

template <typename Element>
__device__ __forceinline__ void delta(const SimtDeltaCall &call) {
    using Real = RealOf<Element>;
    const int lane = threadIdx.x % 32;
    const int64_t row = int64_t(blockIdx.x) * DELTA_WARPS + threadIdx.x / 32;
    if (row >= call.rows) return;
    const int64_t token = row % call.len, head_row = row / call.len;
    const Element *const out = static_cast<const Element *>(call.out) + row * call.value_width;
    const Element *const rest = call.rest ? static_cast<const Element *>(call.rest) + row * call.value_width : nullptr;
    const Element *const grad = static_cast<const Element *>(call.grad.data) + head_row / call.heads * call.grad.batch +
                                head_row % call.heads * call.grad.head + token * call.grad.token;
    Real sum = 0;
    for (int column = lane; column < call.value_width; column += 32) {
        const Real exact = widen(out[column]) + (rest ? widen(rest[column]) : Real(0));
        sum = multiply_add(exact, widen(grad[column]), sum);
    }
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    const bool empty = static_cast<const Real *>(call.statistics)[2 * row] == -static_cast<Real>(INFINITY);
    if (lane == 0) static_cast<Real *>(call.delta)[row] = empty ? Real(0) : sum;
}

}  // namespace simt
