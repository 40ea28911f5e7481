//! The argument of the kernels, field by field as in `kernels/swiglu.cu`. An address is a `u64`, 0 for none.
// Without the feature only the tests look at these.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

use crate::gpu::Launch;
use candle_core::Result;

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SwigluCall {
    pub gate: u64,
    pub up: u64,
    pub grad: u64,
    pub out: u64,
    pub gate_grad: u64,
    pub up_grad: u64,
    pub rows: i64,
    pub stride: i64,
    pub width: i32,
    pub vector: i32,
}

/// Threads of a block, each with eight elements of a row.
const THREADS: usize = 256;
const EIGHT: usize = 8;

pub(crate) fn shape(rows: usize, width: usize) -> Result<Launch> {
    let pieces = rows.saturating_mul(width.div_ceil(EIGHT));
    Launch::new(pieces.div_ceil(THREADS), 1, THREADS, 0)
}

/// Rows and width of elements without gaps, whose rows do not matter: the width divides their number.
pub(crate) fn as_rows(elements: usize, last: usize) -> (usize, usize) {
    (elements / last.max(1), last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn argument_lies_in_memory_as_the_kernels_read_it() {
        assert_eq!(size_of::<SwigluCall>(), 72);
        assert_eq!(offset_of!(SwigluCall, rows), 48);
        assert_eq!(offset_of!(SwigluCall, width), 64);
    }

    #[test]
    fn grid_has_a_thread_for_each_piece() -> Result<()> {
        assert_eq!(shape(32_768, 1024)?.grid[0], 16_384);
        assert_eq!(shape(3, 9)?.grid[0], 1);
        assert!(shape(usize::MAX, 1).is_err());
        Ok(())
    }
}
