//! What the kernels of `kernels/heads.cu` are given, decided without a GPU.

use crate::gpu::{countable, Launch, Strided, RUN_BYTES};
use candle_core::{bail, Result};

/// Threads in a block.
const THREADS: usize = 256;

/// The one argument of all, field by field as there.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct JoinCall {
    /// (B,H,T,E); for a gradient (B,1,T,H·D).
    pub x: Strided,
    /// (B,T,H·D) without gaps; for a gradient (B,H,T,E).
    pub out: u64,
    pub heads: i32,
    pub len: i32,
    /// D.
    pub width: i32,
    /// E.
    pub all: i32,
}

#[cfg(feature = "cuda")]
mod launched {
    #![allow(unsafe_code)]
    // SAFETY: a `#[repr(C)]` structure of numbers, laid out as the kernels' (see the tests below).
    unsafe impl candle_core::cuda_backend::cudarc::driver::DeviceRepr for super::JoinCall {}
}

/// Whether a grid holds as many heads.
pub(super) fn fit(batch: usize, heads: usize) -> bool {
    batch.saturating_mul(heads) <= u16::MAX.into()
}

/// B, H, T, E, and how many columns are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizes {
    pub x: [usize; 4],
    pub width: usize,
}

impl Sizes {
    pub fn is_empty(&self) -> bool {
        self.x.contains(&0) || self.width == 0
    }

    pub fn call(&self) -> Result<JoinCall> {
        let [_, heads, len, all] = self.x;
        let count = |size: usize| match i32::try_from(size) {
            Ok(size) => Ok(size),
            Err(_) => bail!(
                "attention: {:?} is more than the GPU's kernels count to",
                self.x
            ),
        };
        Ok(JoinCall {
            heads: count(heads)?,
            len: count(len)?,
            width: count(self.width)?,
            all: count(all)?,
            ..JoinCall::default()
        })
    }

    /// Elements in a run: 16 bytes where widths and strides allow that, else 1.
    pub fn run(&self, x: &Strided, bytes: usize) -> usize {
        let run = RUN_BYTES / bytes;
        let widths = [self.width, self.x[3]];
        if widths.iter().all(|width| width.is_multiple_of(run)) && x.has_runs(run, bytes) {
            run
        } else {
            1
        }
    }

    /// One thread for each run, one row of the grid for each row of the batch.
    pub fn join(&self, run: usize) -> Result<Launch> {
        let [batch, heads, len, _] = self.x;
        let runs = countable(len.saturating_mul(heads * (self.width / run)))?;
        Launch::new(runs.div_ceil(THREADS), batch, THREADS, 0)
    }

    /// One thread for each run, one row of the grid for each head of each row of the batch.
    pub fn part(&self, run: usize) -> Result<Launch> {
        let [batch, heads, len, all] = self.x;
        let runs = countable(len.saturating_mul(all / run))?;
        Launch::new(runs.div_ceil(THREADS), batch * heads, THREADS, 0)
    }
}

/// The kernel's name. `kind` is `join` or `part`.
pub(super) fn entry(kind: &str, bytes: usize, run: usize) -> String {
    let runs = if run > 1 { "_runs" } else { "" };
    format!("heads_{kind}_{}{runs}", 8 * bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn call_lies_as_the_kernels_read_it() {
        assert_eq!(size_of::<JoinCall>(), 64);
        assert_eq!(offset_of!(JoinCall, out), 40);
        assert_eq!(offset_of!(JoinCall, all), 60);
    }

    #[test]
    fn heads_are_joined_by_sixteen_bytes_where_they_can_be() -> Result<()> {
        let sizes = Sizes {
            x: [2, 16, 100, 256],
            width: 128,
        };
        let row = Strided {
            data: 1024,
            head: 25600,
            token: 256,
            column: 1,
            ..Strided::default()
        };
        assert_eq!(sizes.run(&row, 2), 8);
        assert_eq!(sizes.run(&Strided { data: 1026, ..row }, 2), 1);
        assert_eq!(Sizes { width: 12, ..sizes }.run(&row, 2), 1);
        assert_eq!(sizes.join(8)?.grid, [100, 2, 1]);
        assert_eq!(sizes.part(8)?.grid, [(100u32 * 32).div_ceil(256), 32, 1]);
        assert_eq!(entry("part", 2, 8), "heads_part_16_runs");
        Ok(())
    }
}
