//! Strided operands of any dtype, copied into tiles of the dtype that the kernels compute in. Padding is written
//! as zeros without being read, so that a NaN there cannot leak.

use super::lanes::Real;
use super::{Element, View};
use candle_core::WithDType;
use std::ops::Range;

/// Memory that starts on a cache line, so that no vector straddles two.
pub(super) struct Aligned<S> {
    data: Vec<S>,
    range: Range<usize>,
}

impl<S: Real> Aligned<S> {
    /// `len` zeros.
    pub fn zeros(len: usize) -> Self {
        const LINE: usize = 64;
        let slack = LINE / size_of::<S>();
        let data = vec![S::ZERO; len + slack];
        let offset = data.as_ptr().align_offset(LINE).min(slack);
        Self {
            data,
            range: offset..offset + len,
        }
    }
}

impl<S> std::ops::Deref for Aligned<S> {
    type Target = [S];

    fn deref(&self) -> &[S] {
        &self.data[self.range.clone()]
    }
}

impl<S> std::ops::DerefMut for Aligned<S> {
    fn deref_mut(&mut self) -> &mut [S] {
        &mut self.data[self.range.clone()]
    }
}

/// The tokens of one head of an operand.
#[derive(Clone, Copy)]
pub(super) struct Head<'a, T> {
    data: &'a [T],
    width: usize,
    token_stride: usize,
    column_stride: usize,
}

impl<T> View<'_, T> {
    pub(super) fn head(&self, b: usize, h: usize) -> Head<'_, T> {
        let offset = b * self.strides[0] + h * self.strides[1];
        Head {
            data: self.data.get(offset..).unwrap_or_default(),
            width: self.dims[3],
            token_stride: self.strides[2],
            column_stride: self.strides[3],
        }
    }
}

impl<T: Element> Head<'_, T> {
    #[inline(always)]
    pub fn at(&self, token: usize, column: usize) -> T::Acc {
        self.data[token * self.token_stride + column * self.column_stride].to_acc()
    }

    /// One token's elements, where they are neighbours.
    #[inline(always)]
    fn row(&self, token: usize) -> Option<&[T]> {
        let start = token * self.token_stride;
        (self.column_stride == 1).then(|| &self.data[start..start + self.width])
    }

    /// The given columns of the tokens at `start..start + positions.len()`, times `scale`, a row of `to` for each,
    /// `stride` apart.
    pub fn copy_rows(
        &self,
        start: usize,
        positions: &[i64],
        columns: Range<usize>,
        scale: T::Acc,
        to: &mut [T::Acc],
        stride: usize,
    ) {
        let width = columns.len();
        let rows = positions.iter().zip(to.chunks_mut(stride.max(1)));
        for (i, (position, to)) in rows.enumerate() {
            let to = &mut to[..width];
            if *position < 0 {
                to.fill(T::Acc::ZERO);
                continue;
            }
            match self.row(start + i) {
                Some(row) => {
                    for (to, x) in to.iter_mut().zip(&row[columns.clone()]) {
                        *to = x.to_acc() * scale;
                    }
                }
                None => {
                    for (to, column) in to.iter_mut().zip(columns.clone()) {
                        *to = self.at(start + i, column) * scale;
                    }
                }
            }
        }
    }

    /// All columns of the tokens at `start..start + positions.len()`, a row of `to` for each column, `stride`
    /// apart; zeros where a row is longer than there are tokens.
    pub fn copy_transposed(
        &self,
        start: usize,
        positions: &[i64],
        to: &mut [T::Acc],
        stride: usize,
    ) {
        let zero = T::Acc::ZERO;
        if positions.len() < stride {
            to[..self.width * stride].fill(zero);
        }
        let mut j = 0;
        while let Some(position) = positions.get(j) {
            // Four tokens at a time: four neighbours in each row of `to`.
            let four = positions.get(j..j + 4);
            if let (Some(rows), true) = (
                self.four_rows(start + j),
                four.is_some_and(|four| four.iter().all(|p| *p >= 0)),
            ) {
                let [a, b, c, d] = rows.map(|row| row.iter());
                let columns = to.chunks_mut(stride).zip(a).zip(b).zip(c).zip(d);
                for ((((to, a), b), c), d) in columns {
                    to[j..j + 4].copy_from_slice(&[a, b, c, d].map(|x| x.to_acc()));
                }
                j += 4;
                continue;
            }
            let columns = to[j..].iter_mut().step_by(stride).take(self.width);
            for (column, to) in columns.enumerate() {
                *to = match *position < 0 {
                    true => zero,
                    false => self.at(start + j, column),
                };
            }
            j += 1;
        }
    }

    /// The elements of four tokens, where a token's elements are neighbours and there are so many.
    #[inline(always)]
    fn four_rows(&self, token: usize) -> Option<[&[T]; 4]> {
        let row = |i: usize| {
            let start = (token + i) * self.token_stride;
            self.data.get(start..start + self.width)
        };
        match (self.column_stride, row(0), row(1), row(2), row(3)) {
            (1, Some(a), Some(b), Some(c), Some(d)) => Some([a, b, c, d]),
            _ => None,
        }
    }

    /// Σ of the products of one token's elements with `with`, in f64.
    pub fn dot(&self, token: usize, with: &[T::Acc]) -> T::Acc {
        // Several sums at a time, since each must wait for its last addition.
        const SUMS: usize = 8;
        let mut sums = [0f64; SUMS];
        let mut add = |column: usize, x: T::Acc, y: T::Acc| {
            sums[column % SUMS] += x.to_f64() * y.to_f64();
        };
        match self.row(token) {
            Some(row) => {
                for (column, (x, y)) in row.iter().zip(with).enumerate() {
                    add(column, x.to_acc(), *y);
                }
            }
            None => {
                for (column, y) in with[..self.width].iter().enumerate() {
                    add(column, self.at(token, column), *y);
                }
            }
        }
        T::Acc::from_f64(sums.iter().sum())
    }
}
