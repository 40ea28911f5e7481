//! The argument of the kernels, field by field as in `kernels/embedding.cu`, and how their work is dealt out. An address
//! is a `u64`.
// Without the feature only the tests look at these.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

use super::Readers;

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct EmbeddingCall {
    pub grad: u64,
    pub partial: u64,
    pub out: u64,
    pub order: u64,
    pub pieces: u64,
    pub rows: u64,
    pub width: i64,
    pub vector: i64,
}

/// Threads of a block.
pub(super) const THREADS: usize = 64;
/// Most tokens of a piece.
const PIECE: usize = 64;

/// Tokens of one row cut into pieces.
pub(super) struct Pieces {
    /// The first token of each in [`Readers::order`], and the end.
    pub pieces: Vec<[u32; 2]>,
    /// Each row that a token reads, its first piece and the end.
    pub rows: Vec<[u32; 3]>,
}

impl Pieces {
    pub fn of(readers: &Readers) -> Self {
        let (mut pieces, mut rows) = (Vec::new(), Vec::new());
        for (row, bounds) in readers.starts.windows(2).enumerate() {
            let &[start, end] = bounds else {
                continue;
            };
            if start == end {
                continue;
            }
            let first = pieces.len() as u32;
            for piece in (start..end).step_by(PIECE) {
                pieces.push([piece as u32, end.min(piece + PIECE) as u32]);
            }
            rows.push([row as u32, first, pieces.len() as u32]);
        }
        Self { pieces, rows }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn argument_lies_in_memory_as_the_kernels_read_it() {
        assert_eq!(size_of::<EmbeddingCall>(), 64);
        assert_eq!(offset_of!(EmbeddingCall, order), 24);
        assert_eq!(offset_of!(EmbeddingCall, vector), 56);
    }
}
