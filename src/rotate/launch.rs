//! What the kernels of `kernels/rotate.cu` are given, decided without a GPU.

use super::Layout;
use crate::gpu::{countable, Launch, Strided, RUN_BYTES};
use candle_core::{bail, DType, Result};

/// Threads in a block.
const THREADS: usize = 256;
/// Heads that a thread turns.
const HEADS: usize = 4;
/// Threads that all multiprocessors of a large GPU run at once: as many as that are looked for.
const WANTED_THREADS: usize = 132 * 2048;

/// The one argument of all, field by field as there.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct TurnCall {
    /// (B,H,T,D); for a gradient that of the result.
    pub x: Strided,
    /// (B,H/group,T,pairs).
    pub cos: Strided,
    pub sin: Strided,
    /// For the table's gradient what was turned.
    pub source: Strided,
    /// (B,H,T,D) without gaps; for the table's gradient it may be 0.
    pub out: u64,
    /// (1|B,H/group,T,pairs) without gaps, or 0.
    pub dcos: u64,
    pub dsin: u64,
    pub batch: i32,
    pub heads: i32,
    pub len: i32,
    pub width: i32,
    pub pairs: i32,
    /// Heads that share a head of the table.
    pub group: i32,
    /// Rows of the table.
    pub rows: i32,
    pub interleaved: i32,
    pub conjugate: i32,
    /// Threads among which the terms of one sum are divided.
    pub slices: i32,
}

/// The sizes of a rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizes {
    /// B, H, T, D.
    pub x: [usize; 4],
    /// 1 or B, 1 or G, T, R/2.
    pub table: [usize; 4],
}

impl Sizes {
    /// Whether nothing turns.
    pub fn is_empty(&self) -> bool {
        self.x.contains(&0)
    }

    fn group(&self) -> usize {
        self.x[1] / self.table[1].max(1)
    }

    /// Terms of the gradient of one entry of the table.
    fn terms(&self) -> usize {
        self.group() * (self.x[0] / self.table[0].max(1))
    }

    /// Pieces of a row in runs of `run` elements: those that turn, and all.
    fn chunks(&self, run: usize) -> [usize; 2] {
        let (width, pairs) = (self.x[3], self.table[3]);
        let turning = pairs / run;
        [turning, turning + (width - 2 * pairs).div_ceil(2 * run)]
    }

    /// Threads among which the terms of one sum are divided: more while there are few sums. A power of two.
    fn slices(&self, chunks: usize) -> usize {
        let [rows, heads, len, _] = self.table;
        let threads = [rows, heads, len, chunks]
            .iter()
            .fold(1, |product: usize, size| product.saturating_mul(*size));
        let mut slices = 1;
        while slices < 32
            && 2 * slices <= self.terms()
            && threads.saturating_mul(slices) < WANTED_THREADS
        {
            slices *= 2;
        }
        slices
    }

    /// Sizes in the kernels' argument.
    pub fn call(&self, layout: Layout, conjugate: bool) -> Result<TurnCall> {
        let [batch, heads, len, width] = self.x;
        let size = |size: usize| match i32::try_from(size) {
            Ok(size) => Ok(size),
            Err(_) => bail!(
                "rotate: {size} is more than the GPU's kernels count to; x {:?}",
                self.x
            ),
        };
        size(self.terms())?;
        Ok(TurnCall {
            batch: size(batch)?,
            heads: size(heads)?,
            len: size(len)?,
            width: size(width)?,
            pairs: size(self.table[3])?,
            group: size(self.group())?,
            rows: size(self.table[0])?,
            interleaved: (layout == Layout::Interleaved).into(),
            conjugate: conjugate.into(),
            slices: 1,
            ..TurnCall::default()
        })
    }

    /// Elements in a run: 16 bytes where all of `call` allows that, else 1.
    pub fn run(&self, call: &TurnCall, dtype: DType) -> usize {
        let bytes = dtype.size_in_bytes();
        let table_bytes = if dtype == DType::F64 { 8 } else { 4 };
        let run = RUN_BYTES / bytes;
        let unused = Strided::default();
        let fit = |x: &Strided, bytes: usize| *x == unused || x.has_runs(run, bytes);
        let fits = self.x[3].is_multiple_of(run)
            && self.table[3].is_multiple_of(run)
            && [&call.x, &call.source].iter().all(|x| fit(x, bytes))
            && [&call.cos, &call.sin].iter().all(|x| fit(x, table_bytes));
        if fits {
            run
        } else {
            1
        }
    }

    /// One block for each piece of the heads that share a head of the table, of each head of the table, of each row of
    /// the batch, of each part of the tokens; the first fastest, so that what they share of the table stays near.
    pub fn turn(&self, run: usize) -> Result<Launch> {
        let [batch, _, len, _] = self.x;
        let [_, all] = self.chunks(run);
        let parts = countable(len.saturating_mul(all))?.div_ceil(THREADS);
        let pieces = self.group().div_ceil(HEADS);
        let blocks = [pieces, self.table[1], batch]
            .iter()
            .fold(parts, |blocks, size| blocks.saturating_mul(*size));
        Launch::new(blocks, 1, THREADS, 0)
    }

    /// The table's gradient: slices, and one block for each head of the table, of each of its rows, of each part of the
    /// tokens.
    pub fn gradient(&self, run: usize, with_out: bool) -> Result<(i32, Launch)> {
        let [turning, all] = self.chunks(run);
        let chunks = if with_out { all } else { turning };
        let slices = self.slices(chunks);
        let [rows, heads, len, _] = self.table;
        let parts = countable(len.saturating_mul(chunks))?.div_ceil(THREADS / slices);
        let blocks = parts.saturating_mul(rows).saturating_mul(heads);
        Ok((slices as i32, Launch::new(blocks, 1, THREADS, 0)?))
    }
}

/// The kernel's name. `kind` is `turn` or `gradient`.
pub(super) fn entry(kind: &str, dtype: DType, run: usize) -> String {
    let runs = if run > 1 { "_runs" } else { "" };
    format!("rotate_{kind}_{}{runs}", dtype.as_str())
}

#[cfg(feature = "cuda")]
mod launched {
    #![allow(unsafe_code)]
    // SAFETY: a `#[repr(C)]` structure of numbers, laid out as the kernels' (see the tests below).
    unsafe impl candle_core::cuda_backend::cudarc::driver::DeviceRepr for super::TurnCall {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn call_lies_as_the_kernels_read_it() {
        assert_eq!(size_of::<TurnCall>(), 224);
        assert_eq!(offset_of!(TurnCall, source), 120);
        assert_eq!(offset_of!(TurnCall, out), 160);
        assert_eq!(offset_of!(TurnCall, batch), 184);
        assert_eq!(offset_of!(TurnCall, pairs), 200);
        assert_eq!(offset_of!(TurnCall, slices), 220);
    }

    const ROPE: Sizes = Sizes {
        x: [2, 32, 1000, 128],
        table: [1, 1, 1000, 64],
    };

    #[test]
    fn turning_takes_four_heads_a_thread() -> Result<()> {
        // 8 runs of 8 pairs in a row; 8 pieces of 4 heads, 2 rows of the batch.
        assert_eq!(
            ROPE.turn(8)?.grid,
            [(1000usize * 8).div_ceil(256) as u32 * 16, 1, 1]
        );
        let grouped = Sizes {
            x: [1, 6, 7, 80],
            table: [1, 3, 7, 20],
        };
        // 20 pairs and 20 more pieces of two columns that pass through.
        assert_eq!(grouped.turn(1)?.grid, [2 * 3, 1, 1]);
        Ok(())
    }

    #[test]
    fn few_long_sums_are_divided_and_many_short_ones_are_not() -> Result<()> {
        // 8,000 sums of 64 terms.
        let (slices, shape) = ROPE.gradient(8, false)?;
        assert_eq!((slices, shape.grid), (32, [1000, 1, 1]));
        let tape = Sizes {
            x: [1, 16, 8192, 128],
            table: [1, 16, 8192, 64],
        };
        let (slices, shape) = tape.gradient(8, true)?;
        assert_eq!((slices, shape.grid), (1, [16 * 256, 1, 1]));
        Ok(())
    }

    #[test]
    fn runs_are_taken_where_widths_and_strides_allow() -> Result<()> {
        let row = Strided {
            data: 256,
            batch: 0,
            head: 128,
            token: 4096,
            column: 1,
        };
        let table = Strided {
            head: 0,
            token: 64,
            ..row
        };
        let call = TurnCall {
            x: row,
            cos: table,
            sin: table,
            ..ROPE.call(Layout::Half, false)?
        };
        assert_eq!(ROPE.run(&call, DType::BF16), 8);
        assert_eq!(ROPE.run(&call, DType::F32), 4);
        assert_eq!(ROPE.run(&call, DType::F64), 2);
        let broadcast = TurnCall {
            sin: Strided { column: 0, ..table },
            ..call
        };
        assert_eq!(ROPE.run(&broadcast, DType::BF16), 1);
        let odd = Sizes {
            table: [1, 1, 1000, 20],
            ..ROPE
        };
        assert_eq!(odd.run(&call, DType::BF16), 1);
        assert_eq!(odd.run(&call, DType::F32), 4);
        assert_eq!(entry("turn", DType::BF16, 8), "rotate_turn_bf16_runs");
        assert_eq!(entry("gradient", DType::F64, 1), "rotate_gradient_f64");
        Ok(())
    }
}
