// Rows of any placing copied behind each other: heads of tokens to tokens of heads, and back. A thread copies one unit, of
// the greatest size that divides rows, strides and addresses.
#include "ptx.cuh"

struct RowsCall {
    const void *from;
    void *to;           // without gaps
    int64_t strides[3]; // of `from`, in units; those of a row lie side by side
    int64_t sizes[2];   // of the second and third dimension
    int64_t row;        // units
    int64_t units;      // in all
};
static_assert(sizeof(RowsCall) == 72, "");

namespace {

constexpr int THREADS = 256;

template <class Unit, class Index> DEVICE void copy_rows(const RowsCall &call) {
    Index unit = (Index)blockIdx.x * THREADS + threadIdx.x;
    if (unit >= (Index)call.units) return;
    Index rest = unit / (Index)call.row, column = unit % (Index)call.row;
    Index third = rest % (Index)call.sizes[1];
    rest /= (Index)call.sizes[1];
    Index second = rest % (Index)call.sizes[0], first = rest / (Index)call.sizes[0];
    int64_t at = (int64_t)first * call.strides[0] + (int64_t)second * call.strides[1] + (int64_t)third * call.strides[2] + column;
    ((Unit *)call.to)[unit] = ((const Unit *)call.from)[at];
}

} // namespace

#define KERNEL(bytes, Unit)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS) copy_rows_##bytes(const __grid_constant__ RowsCall call) { \
        call.units < INT32_MAX ? copy_rows<Unit, uint32_t>(call) : copy_rows<Unit, int64_t>(call);              \
    }

KERNEL(2, uint16_t)
KERNEL(4, uint32_t)
KERNEL(8, uint2)
KERNEL(16, uint4)
