//! What the kernels of `kernels/tape.cu` are given, decided without a GPU.

use crate::gpu::{countable, Launch, Strided, RUN_BYTES};
use candle_core::{bail, DType, Result};

/// Threads in a block.
const THREADS: usize = 256;
/// Shared memory of a block, in bytes: three of them on a multiprocessor of compute capability 9.0.
const WANTED_SHARED_BYTES: usize = 75 << 10;
/// What a block can have on every GPU from compute capability 8.0 on.
const MOST_SHARED_BYTES: usize = 96 << 10;
/// Blocks among which all tokens are divided, and so parts of which sums over all tokens are made.
const MOST_BLOCKS: usize = 2048;

/// The argument of `tape_pack` and `tape_unpack`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct PackCall {
    /// (B,G,T,D).
    pub v: Strided,
    /// (B,G,T,P).
    pub re: Strided,
    pub im: Strided,
    /// For a gradient: that of the result, (B,G,T,D + 2P).
    pub packed: Strided,
    /// (B,G,T,D + 2P) without gaps; for a gradient that of v, or 0.
    pub out: u64,
    pub dre: u64,
    pub dim: u64,
    pub batch: i32,
    pub heads: i32,
    pub len: i32,
    pub width: i32,
    pub pairs: i32,
    pub reserved: i32,
}

/// The argument of `tape_update`, `tape_update_gradient` and `tape_sums`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct UpdateCall {
    /// (B,G,T,P).
    pub part: Strided,
    /// (B,H,T,2P); data is 0 where nothing is taken over.
    pub carried: Strided,
    /// For a gradient: that of the result.
    pub grad: Strided,
    /// (BT,G,G) where tokens have matrices, then (G,G) where there is `carried`.
    pub matrices: u64,
    /// (B,G,T,P) without gaps; for a gradient that of `part`, or 0.
    pub out: u64,
    pub dcarried: u64,
    pub dmatrices: u64,
    /// (blocks, G or G·G).
    pub sums: u64,
    /// 1 / group.
    pub mean: f64,
    pub batch: i32,
    /// G.
    pub heads: i32,
    pub len: i32,
    pub pairs: i32,
    /// H/G.
    pub group: i32,
    pub imaginary: i32,
    pub has_matrices: i32,
    pub diagonal: i32,
    pub runs: i32,
    pub tile: i32,
    pub tiles: i32,
    pub columns: i32,
    pub splits: i32,
    pub weight_splits: i32,
    pub blocks: i32,
    pub reserved: i32,
}

/// The argument of `tape_normalize` and its gradient.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct NormCall {
    pub re: u64,
    pub im: u64,
    pub grad: u64,
    /// For a gradient: that of re, or 0.
    pub out: u64,
    pub dim: u64,
    pub len: i64,
    pub modulus: f64,
    pub imaginary: i32,
    pub reserved: i32,
}

/// The argument of `tape_gate` and its gradient.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct GateCall {
    /// (rows, size).
    pub x: u64,
    /// (rows + extended, padded).
    pub grad: u64,
    pub out: u64,
    pub rows: i32,
    pub size: i32,
    pub padded: i32,
    pub extended: i32,
}

#[cfg(feature = "cuda")]
mod launched {
    #![allow(unsafe_code)]
    use super::*;
    use candle_core::cuda_backend::cudarc::driver::DeviceRepr;

    // SAFETY: `#[repr(C)]` structures of numbers, laid out as the kernels' (see the tests below).
    unsafe impl DeviceRepr for PackCall {}
    // SAFETY: as above.
    unsafe impl DeviceRepr for UpdateCall {}
    // SAFETY: as above.
    unsafe impl DeviceRepr for NormCall {}
    // SAFETY: as above.
    unsafe impl DeviceRepr for GateCall {}
}

/// A size as the kernels count.
pub(super) fn count(size: usize) -> Result<i32> {
    match i32::try_from(size) {
        Ok(size) => Ok(size),
        Err(_) => bail!("tape: {size} is more than the GPU's kernels count to"),
    }
}

/// The product of sizes, at most what can be counted.
fn product(sizes: &[usize]) -> usize {
    (sizes.iter()).fold(1, |product, size| product.saturating_mul(*size))
}

/// The kernel's name. `kind` is what follows `tape_`.
pub(super) fn entry(kind: &str, dtype: DType, run: usize) -> String {
    let runs = if run > 1 { "_runs" } else { "" };
    format!("tape_{kind}_{}{runs}", dtype.as_str())
}

/// The sizes of a packed row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PackSizes {
    /// B, G, T.
    pub tokens: [usize; 3],
    /// D.
    pub width: usize,
    /// P.
    pub pairs: usize,
}

impl PackSizes {
    pub fn is_empty(&self) -> bool {
        self.tokens.contains(&0) || self.row() == 0
    }

    /// Whether a grid holds as many heads.
    pub fn fit(&self) -> bool {
        product(&self.tokens[..2]) <= u16::MAX.into()
    }

    pub fn row(&self) -> usize {
        self.width + 2 * self.pairs
    }

    pub fn call(&self) -> Result<PackCall> {
        let [batch, heads, len] = self.tokens;
        Ok(PackCall {
            batch: count(batch)?,
            heads: count(heads)?,
            len: count(len)?,
            width: count(self.width)?,
            pairs: count(self.pairs)?,
            ..PackCall::default()
        })
    }

    /// Elements in a run: 16 bytes where the widths and all of `values` and `states` allow that, else 1.
    pub fn run(&self, values: &[Strided], states: &[Strided], dtype: DType) -> usize {
        let bytes = dtype.size_in_bytes();
        let state_bytes = if dtype == DType::F64 { 8 } else { 4 };
        let run = RUN_BYTES / bytes;
        let fits = self.width.is_multiple_of(run)
            && self.pairs.is_multiple_of(run)
            && values.iter().all(|x| x.has_runs(run, bytes))
            && states.iter().all(|x| x.has_runs(run, state_bytes));
        if fits {
            run
        } else {
            1
        }
    }

    /// One thread for each run, one row of the grid for each head of each row of the batch.
    pub fn launch(&self, run: usize) -> Result<Launch> {
        let [batch, heads, len] = self.tokens;
        let runs = countable(len.saturating_mul(self.row() / run))?;
        Launch::new(runs.div_ceil(THREADS), product(&[batch, heads]), THREADS, 0)
    }
}

/// The sizes of an update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct UpdateSizes {
    pub batch: usize,
    /// G.
    pub heads: usize,
    /// H/G.
    pub group: usize,
    pub len: usize,
    pub pairs: usize,
    /// Whether states take over averages, by a matrix W.
    pub takes_over: bool,
    /// Whether only the diagonal of W counts.
    pub diagonal: bool,
    /// Whether tokens have matrices.
    pub has_matrices: bool,
    /// Of an element of the state.
    pub bytes: usize,
}

/// How an update is divided among blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Division {
    /// Tokens that a block has in shared memory at once.
    tile: usize,
    /// Columns of theirs.
    columns: usize,
    /// Tiles of a block.
    tiles: usize,
    pub blocks: usize,
    shared_bytes: usize,
}

impl UpdateSizes {
    pub fn is_empty(&self) -> bool {
        product(&[self.batch, self.heads, self.len, self.pairs]) == 0
    }

    fn fours(&self) -> usize {
        self.heads.div_ceil(4)
    }

    fn shared_bytes(&self, tile: usize, columns: usize, backward: bool) -> usize {
        let rows = 4 * self.fours();
        let square = rows * (rows + 4);
        let kept = usize::from(self.takes_over && (backward || !self.diagonal));
        let states = (1 + usize::from(backward) + kept) * tile * rows * (columns + 4);
        let matrices = usize::from(self.has_matrices) * tile * square;
        let weights = if self.diagonal { rows } else { square };
        let weights = usize::from(self.takes_over) * (1 + usize::from(backward)) * weights;
        (states + matrices + weights) * self.bytes
    }

    /// None where the heads are too many for shared memory.
    pub fn divide(&self, backward: bool) -> Option<Division> {
        let mut columns = 4 * self.pairs.div_ceil(4);
        let mut tile = (THREADS / (self.fours() * columns / 4).max(1)).clamp(1, 32);
        while tile > 1 && self.shared_bytes(tile, columns, backward) > WANTED_SHARED_BYTES {
            tile /= 2;
        }
        while columns > 4 && self.shared_bytes(tile, columns, backward) > MOST_SHARED_BYTES {
            columns = 4 * (columns / 4).div_ceil(2);
        }
        let shared_bytes = self.shared_bytes(tile, columns, backward);
        if shared_bytes > MOST_SHARED_BYTES {
            return None;
        }
        let all = product(&[self.batch, self.len]).div_ceil(tile);
        let tiles = all.div_ceil(MOST_BLOCKS).max(1);
        Some(Division {
            tile,
            columns,
            tiles,
            blocks: all.div_ceil(tiles),
            shared_bytes,
        })
    }

    /// Entries of W that count.
    pub fn weights(&self) -> usize {
        match self.diagonal {
            true => self.heads,
            false => self.heads * self.heads,
        }
    }

    pub fn call(&self, division: &Division, imaginary: bool) -> Result<UpdateCall> {
        count(product(&[self.batch, self.len]))?;
        count(product(&[self.heads, self.heads]))?;
        let Division {
            tile,
            columns,
            tiles,
            blocks,
            ..
        } = *division;
        let squares = self.fours() * self.fours();
        Ok(UpdateCall {
            mean: 1. / self.group as f64,
            batch: count(self.batch)?,
            heads: count(self.heads)?,
            len: count(self.len)?,
            pairs: count(self.pairs)?,
            group: count(self.group)?,
            imaginary: imaginary.into(),
            has_matrices: self.has_matrices.into(),
            diagonal: self.diagonal.into(),
            tile: count(tile)?,
            tiles: count(tiles)?,
            columns: count(columns)?,
            splits: count(lanes(tile * squares, columns, 8))?,
            weight_splits: count(lanes(squares, columns, 32))?,
            blocks: count(blocks)?,
            ..UpdateCall::default()
        })
    }

    /// Whether fours of all operands of a call can be loaded at once.
    pub fn has_runs(&self, call: &UpdateCall, carried_bytes: usize) -> bool {
        let state = |x: &Strided| x.data == 0 || x.has_runs(4, self.bytes);
        self.pairs.is_multiple_of(4)
            && state(&call.part)
            && state(&call.grad)
            && (call.carried.data == 0 || call.carried.has_runs(4, carried_bytes))
    }

    pub fn launch(&self, division: &Division) -> Result<Launch> {
        Launch::new(division.blocks, 1, THREADS, division.shared_bytes)
    }

    /// One block for each entry of W that counts.
    pub fn launch_sums(&self) -> Result<Launch> {
        Launch::new(self.weights(), 1, THREADS, 0)
    }
}

/// Lanes among which the columns of a product are divided, while threads are left over for `products` of them; a power
/// of two.
fn lanes(products: usize, columns: usize, most: usize) -> usize {
    let mut lanes = 1;
    while 2 * lanes <= most && 8 * lanes <= columns && 2 * lanes * products <= THREADS {
        lanes *= 2;
    }
    lanes
}

/// One thread for each run of so many elements.
pub(super) fn launch_elements(len: usize, run: usize) -> Result<Launch> {
    Launch::new(len.div_ceil(run).div_ceil(THREADS), 1, THREADS, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn calls_lie_as_the_kernels_read_them() {
        assert_eq!(size_of::<PackCall>(), 208);
        assert_eq!(offset_of!(PackCall, packed), 120);
        assert_eq!(offset_of!(PackCall, batch), 184);
        assert_eq!(size_of::<UpdateCall>(), 232);
        assert_eq!(offset_of!(UpdateCall, matrices), 120);
        assert_eq!(offset_of!(UpdateCall, mean), 160);
        assert_eq!(offset_of!(UpdateCall, imaginary), 188);
        assert_eq!(offset_of!(UpdateCall, blocks), 224);
        assert_eq!(size_of::<NormCall>(), 64);
        assert_eq!(offset_of!(NormCall, imaginary), 56);
        assert_eq!(size_of::<GateCall>(), 40);
        assert_eq!(offset_of!(GateCall, extended), 36);
    }

    fn update(heads: usize, pairs: usize) -> UpdateSizes {
        UpdateSizes {
            batch: 1,
            heads,
            group: 1,
            len: 8192,
            pairs,
            takes_over: true,
            diagonal: true,
            has_matrices: true,
            bytes: 4,
        }
    }

    #[test]
    fn update_of_usual_models_keeps_four_tokens_in_a_third_of_shared_memory() {
        for (heads, pairs) in [(16, 64), (32, 32)] {
            for backward in [false, true] {
                let division = update(heads, pairs).divide(backward).unwrap();
                assert_eq!((division.tile, division.columns), (4, pairs));
                assert_eq!((division.blocks, division.tiles), (2048, 1));
                assert!(division.shared_bytes <= WANTED_SHARED_BYTES);
            }
        }
    }

    #[test]
    fn update_of_any_sizes_covers_all_tokens_within_shared_memory() {
        for heads in 1..=40 {
            for pairs in [1, 3, 16, 32, 64, 100, 128, 256] {
                for (diagonal, backward) in [(true, true), (false, true), (false, false)] {
                    for (len, bytes) in [(1, 4), (77, 8), (100_000, 4)] {
                        let sizes = UpdateSizes {
                            len,
                            diagonal,
                            bytes,
                            batch: 3,
                            ..update(heads, pairs)
                        };
                        let division = sizes.divide(backward).unwrap();
                        let Division {
                            tile,
                            columns,
                            tiles,
                            blocks,
                            shared_bytes,
                        } = division;
                        assert!(blocks * tiles * tile >= 3 * len);
                        assert!((blocks - 1) * tiles * tile < 3 * len, "an idle block");
                        assert!(blocks <= MOST_BLOCKS && shared_bytes <= MOST_SHARED_BYTES);
                        assert!(columns.is_multiple_of(4) && columns > 0);
                        let call = sizes.call(&division, false).unwrap();
                        for lanes in [call.splits, call.weight_splits] {
                            assert!(lanes == 1 || 4 * lanes as usize <= columns);
                        }
                    }
                }
            }
        }
        assert_eq!(update(512, 64).divide(true), None);
    }

    #[test]
    fn pack_of_sixteen_bytes_takes_a_warp_a_row() -> Result<()> {
        let sizes = PackSizes {
            tokens: [2, 16, 100],
            width: 128,
            pairs: 64,
        };
        assert_eq!(sizes.launch(8)?.grid, [(100 * 32u32).div_ceil(256), 32, 1]);
        let row = Strided {
            data: 512,
            token: 128,
            column: 1,
            ..Strided::default()
        };
        assert_eq!(sizes.run(&[row], &[row], DType::BF16), 8);
        let odd = Strided { token: 130, ..row };
        assert_eq!(sizes.run(&[row], &[odd], DType::BF16), 1);
        assert_eq!(entry("pack", DType::F16, 8), "tape_pack_f16_runs");
        Ok(())
    }
}
