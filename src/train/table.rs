//! What kernels for all weights at once are given, field by field as in `kernels/optimiser.cu`. An address is a `u64`, 0
//! for none.
// Without the feature only the tests look at these.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

use candle_core::DType;

/// One tensor.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Entry {
    pub gradient: u64,
    pub master: u64,
    pub first: u64,
    pub second: u64,
    /// What the model computes with, or 0; gathering: where to.
    pub working: u64,
    pub len: i64,
    /// Of the blocks that it has.
    pub first_block: i64,
    pub kept: f64,
    pub rate: f64,
    pub root: f64,
    /// [Of](type_of) `working`; gathering: of `gradient`.
    pub kind: i32,
    pub reserved: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct TableCall {
    pub entries: u64,
    /// (blocks) of f64.
    pub sums: u64,
    pub count: i64,
    pub beta1: f64,
    pub beta2: f64,
    pub epsilon: f64,
    /// Of the gradients.
    pub factor: f64,
}

/// Threads of a block.
pub(super) const THREADS: usize = 256;
/// Elements of a block.
const CHUNK: usize = 4096;

/// How the kernels know bf16 and f16; 0 is neither.
pub(super) fn type_of(dtype: DType) -> i32 {
    match dtype {
        DType::BF16 => 1,
        DType::F16 => 2,
        _ => 0,
    }
}

/// Gives each tensor its blocks; returns their number.
pub(super) fn deal_out(entries: &mut [Entry]) -> usize {
    let mut blocks = 0;
    for entry in entries {
        entry.first_block = blocks as i64;
        blocks += (entry.len as usize).div_ceil(CHUNK);
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn entries_and_argument_lie_in_memory_as_the_kernels_read_them() {
        assert_eq!((size_of::<Entry>(), size_of::<TableCall>()), (88, 56));
        assert_eq!(offset_of!(Entry, len), 40);
        assert_eq!(offset_of!(Entry, kind), 80);
        assert_eq!(offset_of!(TableCall, factor), 48);
    }

    #[test]
    fn blocks_cover_each_tensor_and_none_an_empty_one() {
        let lens = [1, 0, CHUNK as i64, CHUNK as i64 + 1, 0];
        let mut entries = lens.map(|len| Entry {
            len,
            ..Entry::default()
        });
        assert_eq!(deal_out(&mut entries), 4);
        assert_eq!(entries.map(|entry| entry.first_block), [0, 1, 1, 2, 4]);
    }
}
