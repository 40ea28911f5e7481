//! Strided operands of any dtype, copied into tiles of the dtype that the kernels compute in. Padding is written
//! as zeros without being read, so that a NaN there cannot leak.

use super::lanes::Real;
use crate::host::{Element, View};
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

/// Neighbouring tokens of one head.
#[derive(Clone, Copy)]
pub(crate) struct Tokens<'a> {
    pub batch: usize,
    pub head: usize,
    /// The first one.
    pub start: usize,
    /// Of each; negative is padding.
    pub positions: &'a [i64],
}

/// An operand of any dtype and strides, read as `S`.
pub(crate) trait Rows<S>: Sync {
    /// The given columns, times `scale`, a row of `to` for each token, `stride` apart.
    fn copy_rows(
        &self,
        tokens: Tokens<'_>,
        columns: Range<usize>,
        scale: S,
        to: &mut [S],
        stride: usize,
    );

    /// All columns, a row of `to` for each, `stride` apart; zeros where a row is longer than there are tokens.
    fn copy_transposed(&self, tokens: Tokens<'_>, to: &mut [S], stride: usize);

    /// Σ of the products of the elements at (batch, head, token) with `with`, in f64.
    fn dot(&self, at: [usize; 3], with: &[S]) -> S;
}

/// One head of an operand.
#[derive(Clone, Copy)]
struct Head<'a, T> {
    data: &'a [T],
    width: usize,
    token_stride: usize,
    column_stride: usize,
}

impl<T> View<'_, T> {
    fn head(&self, b: usize, h: usize) -> Head<'_, T> {
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
    fn at(&self, token: usize, column: usize) -> T::Acc {
        self.data[token * self.token_stride + column * self.column_stride].to_acc()
    }

    /// One token's elements, where they are neighbours.
    #[inline(always)]
    fn row(&self, token: usize) -> Option<&[T]> {
        let start = token * self.token_stride;
        (self.column_stride == 1).then(|| &self.data[start..start + self.width])
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
}

impl<T: Element> Rows<T::Acc> for View<'_, T> {
    fn copy_rows(
        &self,
        tokens: Tokens<'_>,
        columns: Range<usize>,
        scale: T::Acc,
        to: &mut [T::Acc],
        stride: usize,
    ) {
        let head = self.head(tokens.batch, tokens.head);
        let width = columns.len();
        let rows = tokens.positions.iter().zip(to.chunks_mut(stride.max(1)));
        for (token, (position, to)) in (tokens.start..).zip(rows) {
            let to = &mut to[..width];
            if *position < 0 {
                to.fill(T::Acc::ZERO);
                continue;
            }
            match head.row(token) {
                Some(row) => {
                    for (to, x) in to.iter_mut().zip(&row[columns.clone()]) {
                        *to = x.to_acc() * scale;
                    }
                }
                None => {
                    for (to, column) in to.iter_mut().zip(columns.clone()) {
                        *to = head.at(token, column) * scale;
                    }
                }
            }
        }
    }

    fn copy_transposed(&self, tokens: Tokens<'_>, to: &mut [T::Acc], stride: usize) {
        let head = self.head(tokens.batch, tokens.head);
        let Tokens {
            start, positions, ..
        } = tokens;
        let zero = T::Acc::ZERO;
        if positions.len() < stride {
            to[..head.width * stride].fill(zero);
        }
        let mut j = 0;
        while let Some(position) = positions.get(j) {
            // Four tokens at a time: four neighbours in each row of `to`.
            let four = positions.get(j..j + 4);
            if let (Some(rows), true) = (
                head.four_rows(start + j),
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
            let columns = to[j..].iter_mut().step_by(stride).take(head.width);
            for (column, to) in columns.enumerate() {
                *to = match *position < 0 {
                    true => zero,
                    false => head.at(start + j, column),
                };
            }
            j += 1;
        }
    }

    fn dot(&self, [b, h, token]: [usize; 3], with: &[T::Acc]) -> T::Acc {
        // Several sums at a time, since each must wait for its last addition.
        const SUMS: usize = 8;
        let head = self.head(b, h);
        let mut sums = [0f64; SUMS];
        let mut add = |column: usize, x: T::Acc, y: T::Acc| {
            sums[column % SUMS] += x.to_f64() * y.to_f64();
        };
        match head.row(token) {
            Some(row) => {
                for (column, (x, y)) in row.iter().zip(with).enumerate() {
                    add(column, x.to_acc(), *y);
                }
            }
            None => {
                for (column, y) in with[..head.width].iter().enumerate() {
                    add(column, head.at(token, column), *y);
                }
            }
        }
        T::Acc::from_f64(sums.iter().sum())
    }
}
