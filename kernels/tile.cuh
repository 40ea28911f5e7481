// Tiles of tokens in shared memory, for the kernels on tensor cores.
//
// A row of a tile is a token's WIDTH columns in PITCH = 2 WIDTH + 16 bytes: with an odd number of 16-byte chunks in a row,
// eight rows of one column lie in different banks.
#pragma once
#include "call.cuh"
#include "ptx.cuh"

// What one head of one batch row reads of an operand.
template <class T> DEVICE const T *head_of(const Operand &operand, int batch, int head) {
    return (const T *)operand.data + batch * operand.batch + head * operand.head;
}

template <class T, int WIDTH, int THREADS> struct TileOf {
    static constexpr int PITCH = 2 * WIDTH + 16;
    static constexpr int CHUNKS = WIDTH / 8; // of 16 bytes

    // Starts copying rows `first` .. `first + COUNT`, the first of which is at `from`, with zeros for those from `count` on.
    // A row is copied by `ROW_THREADS` threads; `column(chunk)` is where a chunk comes from, below 0 for zeros, and
    // `may_read(row)` the rest that has to hold.
    template <int COUNT, class Column, class MayRead>
    static DEVICE void copy(uint32_t to, const T *from, int64_t stride, int first, int count, Column column,
                            MayRead may_read) {
        constexpr int ROW_THREADS = CHUNKS % 8 == 0 ? 8 : 4, PASS_ROWS = THREADS / ROW_THREADS;
        static_assert(CHUNKS % ROW_THREADS == 0 && COUNT % PASS_ROWS == 0, "threads share the copy evenly");
        int thread = threadIdx.x;
        int row = first + thread / ROW_THREADS, first_chunk = thread % ROW_THREADS;
        const T *source = from + thread / ROW_THREADS * stride;
        to += thread / ROW_THREADS * PITCH + first_chunk * 16;
#pragma unroll
        for (int pass = 0; pass < COUNT / PASS_ROWS; pass++) {
            bool read_row = row < count && may_read(row);
#pragma unroll
            for (int i = 0; i < CHUNKS; i += ROW_THREADS) {
                int offset = column(first_chunk + i);
                copy_async(to + i * 16, source + offset, read_row && offset >= 0);
            }
            row += PASS_ROWS;
            source += PASS_ROWS * stride;
            to += PASS_ROWS * PITCH;
        }
    }
};
