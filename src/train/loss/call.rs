//! The argument of the kernels, field by field as in `kernels/cross_entropy.cu`. An address is a `u64`.
// Without the feature only the tests look at these.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

use crate::gpu::Launch;
use candle_core::Result;

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct EntropyCall {
    pub logits: u64,
    pub targets: u64,
    pub greatest: u64,
    pub sum: u64,
    pub grad: u64,
    pub out: u64,
    pub rest: u64,
    pub rows: i64,
    pub width: i32,
    pub team: i32,
    pub vector: i32,
    pub reserved: i32,
}

/// Threads of a block.
const THREADS: usize = 256;
/// Widest rows that a warp takes; a block takes others.
const WARP_WIDTH: usize = 2048;

/// Threads that share a row.
pub(super) fn team(width: usize) -> usize {
    match width {
        ..=WARP_WIDTH => 32,
        _ => THREADS,
    }
}

pub(super) fn shape(rows: usize, width: usize) -> Result<Launch> {
    // Blocks take more rows in turn where there are more than a grid holds.
    let blocks = rows.div_ceil(THREADS / team(width)).min(i32::MAX as usize);
    Launch::new(blocks, 1, THREADS, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn argument_lies_in_memory_as_the_kernels_read_it() {
        assert_eq!(size_of::<EntropyCall>(), 80);
        assert_eq!(offset_of!(EntropyCall, rows), 56);
        assert_eq!(offset_of!(EntropyCall, vector), 72);
    }

    #[test]
    fn grid_has_a_team_for_each_row() -> Result<()> {
        assert_eq!(shape(16_384, 256)?.grid[0], 2048);
        assert_eq!(shape(32, 128_000)?.grid[0], 32);
        assert_eq!(shape(usize::MAX, 4096)?.grid[0], i32::MAX as u32);
        Ok(())
    }
}
