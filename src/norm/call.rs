//! The argument of the kernels, field by field as in `kernels/rms_norm.cu`, and how their work is dealt out. An address
//! is a `u64`, 0 for none.
// Without the feature only the tests look at these.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

use crate::gpu::Launch;
use candle_core::Result;

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct NormCall {
    pub x: u64,
    pub weight: u64,
    pub grad: u64,
    pub out: u64,
    pub partial: u64,
    pub weight_grad: u64,
    pub addend: u64,
    pub rows: i64,
    pub epsilon: f64,
    pub width: i32,
    pub team: i32,
    pub vector: i32,
    pub blocks: i32,
    pub shared: i32,
    pub reserved: i32,
}

/// Threads of a block.
const THREADS: usize = 256;
/// Widest rows that a warp takes; a block takes others.
const WARP_WIDTH: usize = 1024;
/// Elements that a thread takes at a time.
const EIGHT: usize = 8;
/// Shared memory that every GPU has for a block, in bytes.
const SHARED_BYTES: usize = 96 << 10;
/// Most blocks of the backward pass, each of which leaves a row of sums: four for each of an H200's multiprocessors.
const BLOCKS: usize = 512;

/// Threads that share a row.
pub(super) fn team(width: usize) -> usize {
    match width {
        ..=WARP_WIDTH => 32,
        _ => THREADS,
    }
}

fn teams(width: usize) -> usize {
    THREADS / team(width)
}

pub(super) fn forward_shape(rows: usize, width: usize) -> Result<Launch> {
    // Blocks take more rows in turn where there are more than a grid holds.
    let blocks = rows.div_ceil(teams(width)).min(i32::MAX as usize);
    Launch::new(blocks, 1, THREADS, 0)
}

pub(super) fn backward_blocks(rows: usize, width: usize) -> usize {
    rows.div_ceil(teams(width)).min(BLOCKS)
}

/// Shared memory for a team's sums each, in bytes, `real` being the size of one; `None` where there is too little.
pub(super) fn shared_bytes(width: usize, real: usize) -> Option<usize> {
    let padded = width.checked_next_multiple_of(EIGHT * team(width))?;
    let bytes = padded.checked_mul(teams(width) * real)?;
    (bytes <= SHARED_BYTES).then_some(bytes)
}

pub(super) fn backward_shape(rows: usize, width: usize, shared_bytes: usize) -> Result<Launch> {
    Launch::new(backward_blocks(rows, width), 1, THREADS, shared_bytes)
}

/// Of the kernel that adds up what the blocks left.
pub(super) fn weight_shape(width: usize) -> Result<Launch> {
    Launch::new(width.div_ceil(32), 1, 1024, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn argument_lies_in_memory_as_the_kernels_read_it() {
        assert_eq!(size_of::<NormCall>(), 96);
        assert_eq!(offset_of!(NormCall, addend), 48);
        assert_eq!(offset_of!(NormCall, rows), 56);
        assert_eq!(offset_of!(NormCall, width), 72);
        assert_eq!(offset_of!(NormCall, shared), 88);
    }

    #[test]
    fn sums_of_one_team_a_block_fit_shared_memory_or_need_none() {
        for real in [4, 8] {
            for width in [1, 7, 384, 1024, 1025, 4096, 12_288, 24_576, 24_577, 1 << 20] {
                match shared_bytes(width, real) {
                    Some(bytes) => assert!(bytes >= width * teams(width) * real),
                    // Sums in a block's own row of the results: only one team may have it.
                    None => assert!(teams(width) == 1 && width > 8192, "{width}"),
                }
            }
        }
        assert_eq!(shared_bytes(384, 4), Some(8 * 512 * 4));
        assert_eq!(backward_blocks(32_768, 384), 512);
        assert_eq!(backward_blocks(9, 384), 2);
        assert_eq!(backward_blocks(9, 4096), 9);
    }
}
