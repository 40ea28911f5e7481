//! Matrix products of small tiles, on which the kernels spend their time.

use super::lanes::{Lanes, Real, Work};

/// A row-major or transposed tile: element (i, k) is at `i · row_stride + k · column_stride`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tile<'a, S> {
    pub data: &'a [S],
    pub row_stride: usize,
    pub column_stride: usize,
}

/// C (rows × columns) = A (rows × depth) · B (depth × columns), or C + A · B.
///
/// `columns` is a multiple of the lanes' width; the rows of B and C are contiguous.
pub(super) struct Product<'a, S> {
    pub rows: usize,
    pub columns: usize,
    pub depth: usize,
    pub a: Tile<'a, S>,
    pub b: &'a [S],
    pub b_stride: usize,
    pub c: &'a mut [S],
    pub c_stride: usize,
    pub accumulate: bool,
}

/// Rows of C held in registers at a time, [`Lanes::PANEL`] vectors of each.
const ROWS: usize = 6;

impl<L: Lanes> Work<L> for Product<'_, L::Scalar> {
    type Output = ();

    #[inline(always)]
    fn run(self, lanes: L) {
        if self.rows == 0 || self.columns == 0 {
            return;
        }
        let last = self.depth.saturating_sub(1);
        assert_eq!(self.columns % L::WIDTH, 0, "columns are whole vectors");
        assert!(
            self.c.len() >= (self.rows - 1) * self.c_stride + self.columns
                && (self.depth == 0
                    || self.b.len() >= last * self.b_stride + self.columns
                        && self.a.data.len()
                            > (self.rows - 1) * self.a.row_stride + last * self.a.column_stride),
            "the tiles hold their elements"
        );
        let c = self.c.as_mut_ptr();
        let mut done = 0;
        let vectors = self.columns / L::WIDTH;
        let panels = vectors.div_ceil(L::PANEL);
        for panel in 0..panels {
            // The panels are as equal as can be: 5 vectors are 3 and 2, not 4 and 1.
            let width = (vectors - done).div_ceil(panels - panel);
            let column = done * L::WIDTH;
            // SAFETY: the assertion above bounds A, B and C, and the columns from `column` on hold `width`
            // vectors.
            unsafe {
                match width {
                    1 => self.panel::<L, 1>(lanes, c, column),
                    2 => self.panel::<L, 2>(lanes, c, column),
                    3 => self.panel::<L, 3>(lanes, c, column),
                    _ => self.panel::<L, 4>(lanes, c, column),
                }
            }
            done += width;
        }
    }
}

impl<S: Real> Product<'_, S> {
    /// All rows of `VECTORS` vectors of columns.
    ///
    /// # Safety
    /// A, B and C hold `rows`, `depth` and `column + VECTORS · WIDTH` columns; `c` is C.
    #[inline(always)]
    unsafe fn panel<L: Lanes<Scalar = S>, const VECTORS: usize>(
        &self,
        lanes: L,
        c: *mut S,
        column: usize,
    ) {
        let mut row = 0;
        while row + ROWS <= self.rows {
            // SAFETY: as promised, and these rows exist.
            unsafe { self.block::<L, ROWS, VECTORS>(lanes, c, row, column) };
            row += ROWS;
        }
        // SAFETY: as promised; as many rows as are left.
        unsafe {
            match self.rows - row {
                0 => (),
                1 => self.block::<L, 1, VECTORS>(lanes, c, row, column),
                2 => self.block::<L, 2, VECTORS>(lanes, c, row, column),
                3 => self.block::<L, 3, VECTORS>(lanes, c, row, column),
                4 => self.block::<L, 4, VECTORS>(lanes, c, row, column),
                _ => self.block::<L, 5, VECTORS>(lanes, c, row, column),
            }
        }
    }

    /// `N` rows of `VECTORS` vectors of columns, in registers.
    ///
    /// # Safety
    /// As [`Self::panel`]; C has `row + N` rows.
    #[inline(always)]
    unsafe fn block<L: Lanes<Scalar = S>, const N: usize, const VECTORS: usize>(
        &self,
        lanes: L,
        c: *mut S,
        row: usize,
        column: usize,
    ) {
        // SAFETY: by the caller's promise every element addressed here lies within its tile: rows
        // row..row + N, columns column..column + VECTORS · WIDTH, steps 0..depth.
        unsafe {
            let vector = |at: *const S| lanes.load(std::slice::from_raw_parts(at, L::WIDTH));
            let c = c.add(row * self.c_stride + column);
            let at = |i: usize, j: usize| c.add(i * self.c_stride + j * L::WIDTH);
            let mut sums = [[lanes.splat(L::Scalar::ZERO); VECTORS]; N];
            let mut a = self.a.data.as_ptr().wrapping_add(row * self.a.row_stride);
            let mut b = self.b.as_ptr().wrapping_add(column);
            for _ in 0..self.depth {
                let b_row: [L::Vector; VECTORS] =
                    std::array::from_fn(|j| vector(b.add(j * L::WIDTH)));
                for (i, sums) in sums.iter_mut().enumerate() {
                    let a = lanes.splat(*a.add(i * self.a.row_stride));
                    for (sum, b) in sums.iter_mut().zip(&b_row) {
                        *sum = lanes.mul_add(a, *b, *sum);
                    }
                }
                a = a.wrapping_add(self.a.column_stride);
                b = b.wrapping_add(self.b_stride);
            }
            // Added last: a long sum in short pieces rounds less.
            for (i, sums) in sums.iter().enumerate() {
                for (j, sum) in sums.iter().enumerate() {
                    let sum = match self.accumulate {
                        true => lanes.add(vector(at(i, j)), *sum),
                        false => *sum,
                    };
                    lanes.store(sum, std::slice::from_raw_parts_mut(at(i, j), L::WIDTH));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::lanes::{on_all_lanes, Job};
    use super::*;

    #[derive(Clone, Copy)]
    struct Compare;

    impl Job<f32> for Compare {
        type Output = ();
        fn run<L: Lanes<Scalar = f32>>(self, lanes: L) {
            for rows in [0, 1, 2, 5, 6, 7, 13] {
                for vectors in [1, 2, 3, 4, 5, 9] {
                    for depth in [0, 1, 7, 33] {
                        for transposed in [false, true] {
                            for accumulate in [false, true] {
                                compare(lanes, [rows, vectors, depth], transposed, accumulate);
                            }
                        }
                    }
                }
            }
        }
    }

    fn compare<L: Lanes<Scalar = f32>>(
        lanes: L,
        [rows, vectors, depth]: [usize; 3],
        transposed: bool,
        accumulate: bool,
    ) {
        let columns = vectors * L::WIDTH;
        // Small whole numbers, so that sums are exact.
        let number = |i: usize| (i * 7919 % 13) as f32 - 6.;
        let numbers = |len: usize| (0..len).map(number).collect::<Vec<f32>>();
        let (a_stride, b_stride, c_stride) = (rows.max(depth) + 2, columns + 3, columns + 1);
        let a_data = numbers(rows.max(depth) * a_stride + 1);
        let b = numbers(depth * b_stride + columns);
        let before = numbers(rows * c_stride + columns);
        let (row_stride, column_stride) = if transposed {
            (1, a_stride)
        } else {
            (a_stride, 1)
        };
        let mut c = before.clone();
        if !accumulate {
            // What is overwritten must not be read, what lies between the rows must stay.
            for row in 0..rows {
                c[row * c_stride..][..columns].fill(f32::NAN);
            }
        }
        lanes.run(Product {
            rows,
            columns,
            depth,
            a: Tile {
                data: &a_data,
                row_stride,
                column_stride,
            },
            b: &b,
            b_stride,
            c: &mut c,
            c_stride,
            accumulate,
        });
        let mut expected = before;
        for row in 0..rows {
            for column in 0..columns {
                let products = (0..depth).map(|k| {
                    a_data[row * row_stride + k * column_stride] * b[k * b_stride + column]
                });
                let sum: f32 = products.sum();
                let c = &mut expected[row * c_stride + column];
                *c = if accumulate { *c + sum } else { sum };
            }
        }
        assert_eq!(
            c,
            expected,
            "{} {rows}x{columns}x{depth} {transposed} {accumulate}",
            L::NAME
        );
    }

    #[test]
    fn product_of_odd_sizes_equals_sums() {
        on_all_lanes(Compare);
    }
}
