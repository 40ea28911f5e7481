//! Rows of any placing copied behind each other, field by field as in `kernels/copy_rows.cu`.
// Without the feature only the tests look at these.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

use super::Launch;
use candle_core::{Layout, Result};

#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct RowsCall {
    pub from: u64,
    pub to: u64,
    /// In units.
    pub strides: [i64; 3],
    /// Of the second and third dimension.
    pub sizes: [i64; 2],
    /// Units of a row.
    pub row: i64,
    /// Units in all.
    pub units: i64,
}

/// Threads of a block, each with one unit.
const THREADS: usize = 256;

impl RowsCall {
    /// The copy of a view of rank 4 whose rows lie side by side, and the size of its units in bytes: the greatest that
    /// divides rows, strides and addresses. `None` for other views. `from` is where the view's memory starts, not its
    /// first element.
    pub fn new(layout: &Layout, from: u64, to: u64, element: usize) -> Option<(Self, usize)> {
        let (dims, strides): ([usize; 4], [usize; 4]) = (
            layout.dims().try_into().ok()?,
            layout.stride().try_into().ok()?,
        );
        if strides[3] != 1 || dims.contains(&0) {
            return None;
        }
        let start = from as usize + layout.start_offset() * element;
        let bytes = |elements: usize| elements * element;
        // A stride that is not used may be anything.
        let used = (0..3).filter(|i| dims[*i] > 1).map(|i| bytes(strides[i]));
        let all: Vec<usize> = used.chain([bytes(dims[3]), start, to as usize]).collect();
        let unit = [16, 8, 4, 2]
            .into_iter()
            .find(|unit| *unit >= element && all.iter().all(|x| x.is_multiple_of(*unit)))?;
        let units = |elements: usize| (bytes(elements) / unit) as i64;
        let call = Self {
            from: start as u64,
            to,
            strides: [units(strides[0]), units(strides[1]), units(strides[2])],
            sizes: [dims[1] as i64, dims[2] as i64],
            row: units(dims[3]),
            units: units(dims.iter().product()),
        };
        Some((call, unit))
    }

    pub fn shape(&self) -> Result<Launch> {
        Launch::new((self.units as usize).div_ceil(THREADS), 1, THREADS, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Shape;
    use std::mem::offset_of;

    #[test]
    fn argument_lies_in_memory_as_the_kernel_reads_it() {
        assert_eq!(size_of::<RowsCall>(), 72);
        assert_eq!(offset_of!(RowsCall, sizes), 40);
        assert_eq!(offset_of!(RowsCall, units), 64);
    }

    #[test]
    fn unit_is_the_greatest_that_divides_rows_strides_and_addresses() {
        let heads = |d: usize, offset: usize| {
            // (B,T,H,D) seen as (B,H,T,D).
            let layout = Layout::contiguous_with_offset(Shape::from((2, 5, 3, d)), offset);
            layout.transpose(1, 2).unwrap()
        };
        let unit = |d, offset, element| {
            RowsCall::new(&heads(d, offset), 4096, 8192, element).map(|(_, unit)| unit)
        };
        assert_eq!(unit(64, 0, 2), Some(16));
        assert_eq!(unit(12, 0, 2), Some(8));
        assert_eq!(unit(10, 0, 2), Some(4));
        assert_eq!(unit(7, 0, 2), Some(2));
        assert_eq!(unit(64, 1, 2), Some(2));
        assert_eq!(unit(64, 1, 4), Some(4));
        assert_eq!(unit(7, 0, 8), Some(8));
        let (call, _) = RowsCall::new(&heads(64, 16), 4096, 8192, 2).unwrap();
        let expected = RowsCall {
            from: 4096 + 32,
            to: 8192,
            strides: [5 * 3 * 8, 8, 3 * 8],
            sizes: [3, 5],
            row: 8,
            units: 2 * 5 * 3 * 8,
        };
        assert_eq!(call, expected);
        // Rows with gaps, and other ranks.
        let gaps = heads(4, 0).transpose(2, 3).unwrap();
        assert_eq!(RowsCall::new(&gaps, 4096, 8192, 2), None);
        let flat = Layout::contiguous(Shape::from((3, 4)));
        assert_eq!(RowsCall::new(&flat, 4096, 8192, 2), None);
    }
}
