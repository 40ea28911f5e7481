//! What the kernels of `kernels/phase_norm.cu` are given, decided without a GPU.

use super::EPSILON;
use crate::gpu::{Launch, Strided, RUN_BYTES};
use candle_core::{bail, DType, Result};

/// Threads in a block.
const THREADS: usize = 256;
/// Most threads that share a row: a warp.
const WARP: usize = 32;
/// Blocks that are looked for where each leaves a sum: eight for each multiprocessor of a large GPU.
const WANTED_BLOCKS: usize = 8 * 132;

/// The one argument of all, field by field as there. An address is 0 for none.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct PhaseCall {
    /// (B,H,T,D).
    pub x: Strided,
    /// Backward: of the result.
    pub grad: Strided,
    /// (B,H,T,D) without gaps; backward: the gradient of x, or 0.
    pub out: u64,
    /// (H), or 0: it is `fixed`.
    pub gain: u64,
    /// Backward: (H,pieces), or 0.
    pub partial: u64,
    /// (H).
    pub gain_grad: u64,
    pub fixed: f64,
    pub epsilon: f64,
    /// Of a head: B·T.
    pub rows: i32,
    pub heads: i32,
    pub len: i32,
    pub width: i32,
    /// Columns that pass.
    pub amplitude: i32,
    /// Threads that share a row.
    pub lanes: i32,
    /// Blocks of a head.
    pub pieces: i32,
    pub reserved: i32,
}

#[cfg(feature = "cuda")]
mod launched {
    #![allow(unsafe_code)]
    // SAFETY: a `#[repr(C)]` structure of numbers, laid out as the kernels' (see the tests below).
    unsafe impl candle_core::cuda_backend::cudarc::driver::DeviceRepr for super::PhaseCall {}
}

/// B, H, T, D, and how many columns pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizes {
    pub x: [usize; 4],
    pub amplitude: usize,
}

impl Sizes {
    pub fn is_empty(&self) -> bool {
        self.x.contains(&0)
    }

    pub fn call(&self) -> Result<PhaseCall> {
        let [batch, heads, len, width] = self.x;
        let count = |size: usize| match i32::try_from(size) {
            Ok(size) => Ok(size),
            Err(_) => bail!(
                "tapa: {:?} is more than the GPU's kernels count to; q or k {:?}",
                size,
                self.x
            ),
        };
        Ok(PhaseCall {
            epsilon: EPSILON,
            rows: count(batch.saturating_mul(len))?,
            heads: count(heads)?,
            len: count(len)?,
            width: count(width)?,
            amplitude: count(self.amplitude)?,
            ..PhaseCall::default()
        })
    }

    /// Elements in a run: 16 bytes where widths and the strides of `operands` allow that, else 1.
    pub fn run(&self, operands: &[Strided], dtype: DType) -> usize {
        let bytes = dtype.size_in_bytes();
        let run = RUN_BYTES / bytes;
        let widths = [self.x[3], self.amplitude];
        if widths.iter().all(|width| width.is_multiple_of(run))
            && operands.iter().all(|x| x.has_runs(run, bytes))
        {
            run
        } else {
            1
        }
    }

    /// Threads that share a row: a power of two.
    fn lanes(&self, run: usize) -> usize {
        (self.x[3] / run).clamp(1, WARP).next_power_of_two()
    }

    /// Blocks of a head. Where they leave sums, few enough that these are soon added.
    pub fn pieces(&self, run: usize, sums: bool) -> usize {
        let [batch, heads, len, _] = self.x;
        let teams = THREADS / self.lanes(run);
        let all = batch.saturating_mul(len).div_ceil(teams);
        match sums {
            true => all.min(WANTED_BLOCKS.div_ceil(heads.max(1))),
            false => all,
        }
    }

    /// The grid for the rows, and `call` told of it.
    pub fn rows(&self, call: &mut PhaseCall, run: usize, pieces: usize) -> Result<Launch> {
        // Neither is more than the number of rows, which has been counted, or a warp.
        (call.lanes, call.pieces) = (self.lanes(run) as i32, pieces as i32);
        Launch::new(self.x[1].saturating_mul(pieces), 1, THREADS, 0)
    }

    /// A warp for each head's gain.
    pub fn gains(&self) -> Result<Launch> {
        Launch::new(self.x[1].div_ceil(THREADS / WARP), 1, THREADS, 0)
    }
}

/// The kernel's name. `way` is `forward` or `backward`.
pub(super) fn entry(way: &str, dtype: DType, run: usize) -> String {
    let runs = if run > 1 { "_runs" } else { "" };
    format!("phase_norm_{way}_{}{runs}", dtype.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn call_lies_as_the_kernels_read_it() {
        assert_eq!(size_of::<PhaseCall>(), 160);
        assert_eq!(offset_of!(PhaseCall, grad), 40);
        assert_eq!(offset_of!(PhaseCall, out), 80);
        assert_eq!(offset_of!(PhaseCall, gain_grad), 104);
        assert_eq!(offset_of!(PhaseCall, fixed), 112);
        assert_eq!(offset_of!(PhaseCall, rows), 128);
        assert_eq!(offset_of!(PhaseCall, amplitude), 144);
        assert_eq!(offset_of!(PhaseCall, pieces), 152);
    }

    const TRAINING: Sizes = Sizes {
        x: [64, 6, 512, 64],
        amplitude: 32,
    };

    #[test]
    fn rows_are_shared_by_as_many_threads_as_they_have_runs() -> Result<()> {
        // 8 threads a row, 32 rows a block.
        let mut call = TRAINING.call()?;
        let pieces = TRAINING.pieces(8, false);
        assert_eq!(pieces, 64 * 512 / 32);
        let launch = TRAINING.rows(&mut call, 8, pieces)?;
        assert_eq!((launch.grid, launch.block), ([6 * 1024, 1, 1], 256));
        assert_eq!((call.lanes, call.pieces, call.rows), (8, 1024, 64 * 512));
        // Sums: 176 blocks for each head.
        assert_eq!(TRAINING.pieces(8, true), 176);
        assert_eq!(TRAINING.gains()?.grid, [1, 1, 1]);
        let odd = |width| Sizes {
            x: [1, 3, 5, width],
            amplitude: 1,
        };
        let lanes = [2, 3, 22, 33, 1000].map(|width| odd(width).lanes(1));
        assert_eq!(lanes, [2, 4, 32, 32, 32]);
        assert_eq!(odd(22).pieces(1, true), 1);
        Ok(())
    }

    #[test]
    fn runs_are_taken_where_both_widths_and_strides_allow() {
        let rows = Strided {
            data: 256,
            batch: 0,
            head: 64,
            token: 384,
            column: 1,
        };
        assert_eq!(TRAINING.run(&[rows, rows], DType::BF16), 8);
        assert_eq!(TRAINING.run(&[rows], DType::F64), 2);
        let narrow = Sizes {
            amplitude: 20,
            ..TRAINING
        };
        assert_eq!(narrow.run(&[rows], DType::BF16), 1);
        assert_eq!(narrow.run(&[rows], DType::F32), 4);
        let apart = Strided { column: 2, ..rows };
        assert_eq!(TRAINING.run(&[rows, apart], DType::BF16), 1);
        assert_eq!(
            entry("forward", DType::BF16, 8),
            "phase_norm_forward_bf16_runs"
        );
        assert_eq!(entry("backward", DType::F64, 1), "phase_norm_backward_f64");
    }
}
