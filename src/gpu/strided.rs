//! Tensors of any strides as kernels read them, field by field as in `kernels/strided.cuh`. An address is a `u64`, 0
//! for none.

use candle_core::{bail, Layout, Result};

/// Bytes that a thread loads and stores at once where it can.
pub(crate) const RUN_BYTES: usize = 16;

/// (batch, heads, tokens, width): strides in elements.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Strided {
    pub data: u64,
    pub batch: i64,
    pub head: i64,
    pub token: i64,
    pub column: i64,
}

impl Strided {
    /// A tensor in memory that starts at `address`. Dimensions of length 1 get stride 0: it serves any index there.
    pub fn new(address: u64, element_bytes: usize, layout: &Layout) -> Result<Self> {
        let (&[b, h, t, d], &[batch, head, token, column]) = (layout.dims(), layout.stride())
        else {
            bail!(
                "a kernel's operand must be (batch, heads, tokens, width), got {:?}",
                layout.shape()
            )
        };
        let stride = |len: usize, stride: usize| if len == 1 { 0 } else { stride as i64 };
        Ok(Self {
            data: address + (layout.start_offset() * element_bytes) as u64,
            batch: stride(b, batch),
            head: stride(h, head),
            token: stride(t, token),
            column: if d == 1 { 1 } else { column as i64 },
        })
    }

    /// Whether runs of `run` elements that begin at multiples of `run` can be loaded as such.
    pub fn has_runs(&self, run: usize, element_bytes: usize) -> bool {
        let aligned = (run * element_bytes).min(RUN_BYTES) as u64;
        let rows = [self.batch, self.head, self.token];
        self.column == 1
            && self.data.is_multiple_of(aligned)
            && rows.iter().all(|stride| stride % run as i64 == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Shape;
    use std::mem::offset_of;

    #[test]
    fn fields_lie_where_the_kernels_read_them() {
        assert_eq!(size_of::<Strided>(), 40);
        assert_eq!(offset_of!(Strided, batch), 8);
        assert_eq!(offset_of!(Strided, column), 32);
    }

    #[test]
    fn strided_of_a_view_starts_at_its_offset() -> Result<()> {
        let layout = Layout::contiguous((2, 3, 5, 8)).narrow(3, 4, 4)?;
        let x = Strided::new(1024, 2, &layout)?;
        let expected = Strided {
            data: 1032,
            batch: 120,
            head: 40,
            token: 8,
            column: 1,
        };
        assert_eq!(x, expected);
        Ok(())
    }

    #[test]
    fn runs_need_aligned_rows_of_neighbours() -> Result<()> {
        let of = |layout: &Layout| Strided::new(4096, 2, layout);
        let whole = Layout::contiguous((2, 3, 5, 24));
        assert!(of(&whole)?.has_runs(8, 2));
        assert!(of(&whole.narrow(3, 8, 16)?)?.has_runs(8, 2));
        assert!(of(&whole.transpose(1, 2)?)?.has_runs(8, 2));
        assert!(of(&Layout::contiguous((1, 1, 1, 20)))?.has_runs(8, 2));
        // Begins in the middle of a run; rows of 20; neighbours apart; one element for all.
        assert!(!of(&whole.narrow(3, 4, 16)?)?.has_runs(8, 2));
        assert!(!of(&Layout::contiguous((1, 1, 5, 20)))?.has_runs(8, 2));
        assert!(!of(&whole.transpose(2, 3)?)?.has_runs(8, 2));
        let one = Layout::contiguous((2, 3, 5, 1));
        assert!(!of(&one.broadcast_as(Shape::from((2, 3, 5, 8)))?)?.has_runs(8, 2));
        // Runs of 32 bytes are loaded in two.
        assert!(Strided {
            data: 16,
            ..of(&whole)?
        }
        .has_runs(8, 4));
        Ok(())
    }
}
