//! The argument of the kernels, field by field as in `kernels/sum.cu`. An address is a `u64`.

use crate::gpu::Launch;
use candle_core::Result;

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SumCall {
    pub x: u64,
    pub y: u64,
    pub out: u64,
    pub len: i64,
    pub vector: i32,
    pub reserved: i32,
}

/// Threads of a block, each with eight elements.
const THREADS: usize = 256;
const EIGHT: usize = 8;

pub(super) fn shape(len: usize) -> Result<Launch> {
    Launch::new(len.div_ceil(EIGHT * THREADS), 1, THREADS, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn argument_lies_in_memory_as_the_kernels_read_it() -> Result<()> {
        assert_eq!(size_of::<SumCall>(), 40);
        assert_eq!(offset_of!(SumCall, len), 24);
        assert_eq!(shape(1)?.grid[0], 1);
        assert_eq!(shape(2049)?.grid[0], 2);
        Ok(())
    }
}
