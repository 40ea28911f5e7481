//! Where tokens stand: the one source of positions for attention, encodings and the KV cache.

use candle_core::{bail, DType, Device, Result, Tensor};
use std::sync::Arc;

/// Where the tokens of one call stand, in tokens from the start of their document.
///
/// A negative position marks padding: such a key is never read (a NaN in it cannot leak), and such a
/// query gives output 0, log-sum-exp −∞ and zero gradients.
#[derive(Debug, Clone)]
pub enum Positions {
    /// Tokens `start, start + 1, …, start + len − 1`, the same in every batch row.
    Span {
        /// Position of the first token.
        start: i64,
        /// Number of tokens.
        len: usize,
    },
    /// Positions given token by token, each batch row on its own: padding, packed documents, shards.
    Explicit {
        /// (B, T) or (1, T), `i64`. The single row stands for every row of the batch.
        pos: Tensor,
        /// The document of each token, of the same shape as `pos`, `i64`. Tokens of different segments
        /// never see each other. `None` puts every token into one document.
        segment: Option<Tensor>,
    },
}

impl Positions {
    /// The tokens `0..len`, in every batch row.
    pub fn first(len: usize) -> Self {
        Self::Span { start: 0, len }
    }

    /// Explicit positions, checked.
    ///
    /// # Shapes
    /// `pos` and `segment` are (B, T) or (1, T), `i64`.
    ///
    /// # Errors
    /// When the shapes or dtypes are others.
    pub fn explicit(pos: Tensor, segment: Option<Tensor>) -> Result<Self> {
        let positions = Self::Explicit { pos, segment };
        positions.check()?;
        Ok(positions)
    }

    /// Rows of the given lengths, padded on the left to the longest: each row's own tokens are at `0..length`.
    ///
    /// # Errors
    /// When `lengths` is empty.
    pub fn left_padded(lengths: &[usize], device: &Device) -> Result<Self> {
        let Some(&longest) = lengths.iter().max() else {
            bail!("positions: left_padded needs at least one row")
        };
        let pos: Vec<i64> = lengths
            .iter()
            .flat_map(|&n| (0..longest as i64).map(move |t| t - (longest - n) as i64))
            .collect();
        Self::explicit(
            Tensor::from_vec(pos, (lengths.len(), longest), device)?,
            None,
        )
    }

    /// Documents packed one behind another: row `b` holds documents of lengths `rows[b]`, each starting at
    /// position 0 in a segment of its own. Shorter rows are padded on the right.
    ///
    /// Documents do not see each other, but a next-token loss over the row has targets that cross from one document
    /// into the next: leave those out.
    ///
    /// # Errors
    /// When `rows` is empty.
    pub fn packed(rows: &[Vec<usize>], device: &Device) -> Result<Self> {
        if rows.is_empty() {
            bail!("positions: packed needs at least one row")
        }
        let width = rows.iter().map(|r| r.iter().sum()).max().unwrap_or(0);
        let (mut pos, mut segment) = (Vec::new(), Vec::new());
        for row in rows {
            for (document, &len) in row.iter().enumerate() {
                pos.extend(0..len as i64);
                segment.extend(std::iter::repeat_n(document as i64, len));
            }
            let padding = width - row.iter().sum::<usize>();
            pos.extend(std::iter::repeat_n(-1, padding));
            segment.extend(std::iter::repeat_n(-1, padding));
        }
        let shape = (rows.len(), width);
        Self::explicit(
            Tensor::from_vec(pos, shape, device)?,
            Some(Tensor::from_vec(segment, shape, device)?),
        )
    }

    /// Number of tokens in a row, padding included.
    pub fn len(&self) -> usize {
        match self {
            Self::Span { len, .. } => *len,
            Self::Explicit { pos, .. } => pos.dims().last().copied().unwrap_or(0),
        }
    }

    /// Whether there is no token at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The positions read to the host, for `batch` rows.
    ///
    /// # Errors
    /// When shapes, dtypes or the batch do not fit, or a position is beyond ±2^53 (f64 would round it).
    pub(crate) fn table(&self, batch: usize) -> Result<PositionTable> {
        self.check()?;
        let table = match self {
            Self::Span { start, len } => {
                let Some(end) = start.checked_add_unsigned(*len as u64) else {
                    bail!("positions: start {start} + len {len} overflows i64")
                };
                PositionTable {
                    rows: 1,
                    len: *len,
                    pos: (*start..end).collect(),
                    segment: None,
                }
            }
            Self::Explicit { pos, segment } => {
                let (rows, len) = pos.dims2()?;
                if rows != 1 && rows != batch {
                    bail!("positions: {rows} rows of positions for a batch of {batch}; pos {pos:?}")
                }
                let read = |t: &Tensor| t.flatten_all()?.to_vec1::<i64>();
                PositionTable {
                    rows,
                    len,
                    pos: read(pos)?.into(),
                    segment: segment.as_ref().map(read).transpose()?.map(Into::into),
                }
            }
        };
        const LIMIT: i64 = 1 << 53;
        if let Some(p) = table.pos.iter().find(|p| **p > LIMIT || **p < -LIMIT) {
            bail!("positions: {p} is beyond ±2^53, where distances are no longer exact")
        }
        Ok(table)
    }

    fn check(&self) -> Result<()> {
        let Self::Explicit { pos, segment } = self else {
            return Ok(());
        };
        if pos.rank() != 2 || pos.dtype() != DType::I64 {
            bail!("positions: pos must be (B, T) of i64, got {pos:?}")
        }
        if let Some(segment) = segment {
            if segment.dims() != pos.dims() || segment.dtype() != DType::I64 {
                bail!(
                    "positions: segment must have pos's shape {:?} and be i64, got {segment:?}",
                    pos.dims()
                )
            }
        }
        Ok(())
    }
}

/// [`Positions`] on the host. One row may stand for the whole batch.
#[derive(Debug, Clone)]
pub(crate) struct PositionTable {
    /// 1, or the batch size.
    pub rows: usize,
    /// Tokens in a row.
    pub len: usize,
    /// rows × len, row by row.
    pos: Arc<[i64]>,
    segment: Option<Arc<[i64]>>,
}

impl PositionTable {
    /// The positions of batch row `b`.
    pub fn row(&self, b: usize) -> &[i64] {
        slice_row(&self.pos, self.rows, self.len, b)
    }

    /// The segments of batch row `b`, where there are any.
    pub fn segments(&self, b: usize) -> Option<&[i64]> {
        self.segment
            .as_ref()
            .map(|s| slice_row(s, self.rows, self.len, b))
    }

    /// Whether tokens have segments; there may be no row to ask.
    pub fn has_segments(&self) -> bool {
        self.segment.is_some()
    }

    /// The least and the greatest position, padding aside; `None` where all is padding.
    pub fn bounds(&self) -> Option<(i64, i64)> {
        let real = || self.pos.iter().copied().filter(|p| *p >= 0);
        real().min().zip(real().max())
    }

    /// Whether any token is padding.
    pub fn has_padding(&self) -> bool {
        self.pos.iter().any(|p| *p < 0)
    }
}

fn slice_row(values: &[i64], rows: usize, len: usize, b: usize) -> &[i64] {
    let b = if rows == 1 { 0 } else { b };
    &values[b * len..(b + 1) * len]
}
