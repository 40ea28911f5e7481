//! Where tokens stand: the one source of positions for attention, encodings and the KV cache.

use crate::recent::Recent;
use candle_core::{bail, DType, Device, Result, Tensor, TensorId};
use std::sync::{Arc, OnceLock};

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
    ///
    /// What these tensors hold is read to the host; from a GPU only once for each tensor, since reading waits for the
    /// GPU, and attention on a GPU keeps its copy of any. So do not write into their memory once they have been used
    /// (`slice_set`, or a detached view of a `Var` that changes); a `Var` itself is read anew each time.
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
        match self {
            Self::Span { start, len } => {
                let Some(end) = start.checked_add_unsigned(*len as u64) else {
                    bail!("positions: start {start} + len {len} overflows i64")
                };
                if *len > 0 {
                    check_exact((*start, end - 1))?;
                }
                Ok(PositionTable::span(*start, *len))
            }
            Self::Explicit { pos, segment } => {
                let (rows, len) = pos.dims2()?;
                if rows != 1 && rows != batch {
                    bail!("positions: {rows} rows of positions for a batch of {batch}; pos {pos:?}")
                }
                Ok(PositionTable {
                    rows,
                    len,
                    tokens: Tokens::List(TokenList::read(pos, segment.as_ref())?),
                })
            }
        }
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

/// Distances are computed in f64, too.
fn check_exact((first, last): (i64, i64)) -> Result<()> {
    const LIMIT: i64 = 1 << 53;
    let beyond = [first, last]
        .into_iter()
        .find(|p| !(-LIMIT..=LIMIT).contains(p));
    match beyond {
        Some(p) => {
            bail!("positions: {p} is beyond ±2^53, where distances are no longer exact")
        }
        None => Ok(()),
    }
}

/// [`Positions`] on the host. One row may stand for the whole batch.
#[derive(Debug, Clone)]
pub(crate) struct PositionTable {
    /// 1, or the batch size.
    pub rows: usize,
    /// Tokens in a row.
    pub len: usize,
    tokens: Tokens,
}

#[derive(Debug, Clone)]
enum Tokens {
    /// `list` is filled when it is first asked for.
    Span {
        start: i64,
        list: OnceLock<Arc<[i64]>>,
    },
    List(Arc<TokenList>),
}

/// Where the tokens of a [`PositionTable`] come from: what is equal has equal positions and segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenSource {
    /// From this start on.
    Span { start: i64, len: usize },
    /// Tensors of positions and of segments.
    Tensors(TensorId, Option<TensorId>),
}

impl PositionTable {
    fn span(start: i64, len: usize) -> Self {
        let list = OnceLock::new();
        Self {
            rows: 1,
            len,
            tokens: Tokens::Span { start, list },
        }
    }

    /// The positions of batch row `b`.
    pub fn row(&self, b: usize) -> &[i64] {
        match &self.tokens {
            Tokens::Span { start, list } => {
                list.get_or_init(|| (*start..*start + self.len as i64).collect())
            }
            Tokens::List(tokens) => slice_row(&tokens.pos, self.rows, self.len, b),
        }
    }

    /// The segments of batch row `b`, where there are any.
    pub fn segments(&self, b: usize) -> Option<&[i64]> {
        match &self.tokens {
            Tokens::Span { .. } => None,
            Tokens::List(tokens) => {
                let segments = tokens.segment.as_deref()?;
                Some(slice_row(segments, self.rows, self.len, b))
            }
        }
    }

    /// Whether tokens have segments; there may be no row to ask.
    pub fn has_segments(&self) -> bool {
        match &self.tokens {
            Tokens::Span { .. } => false,
            Tokens::List(tokens) => tokens.segment.is_some(),
        }
    }

    /// The start of a span: token i stands at start + i, and is padding where that is negative.
    pub fn span_start(&self) -> Option<i64> {
        match self.tokens {
            Tokens::Span { start, .. } => Some(start),
            Tokens::List(_) => None,
        }
    }

    /// The start of a span without padding.
    pub fn start(&self) -> Option<i64> {
        self.span_start().filter(|start| *start >= 0)
    }

    /// Where the tokens come from; `None` where that may hold other ones next time.
    pub fn source(&self) -> Option<TokenSource> {
        match &self.tokens {
            Tokens::Span { start, .. } => Some(TokenSource::Span {
                start: *start,
                len: self.len,
            }),
            Tokens::List(tokens) => tokens
                .source
                .map(|(pos, segment)| TokenSource::Tensors(pos, segment)),
        }
    }

    /// The least and the greatest position, padding aside; `None` where all is padding.
    pub fn bounds(&self) -> Option<(i64, i64)> {
        match &self.tokens {
            Tokens::Span { .. } if self.len == 0 => None,
            Tokens::Span { start, .. } => {
                let last = *start + (self.len - 1) as i64;
                (last >= 0).then_some((0.max(*start), last))
            }
            Tokens::List(tokens) => tokens.bounds,
        }
    }

    /// The least and the greatest segment, padding aside; `None` where there is none.
    pub fn segment_bounds(&self) -> Option<(i64, i64)> {
        match &self.tokens {
            Tokens::Span { .. } => None,
            Tokens::List(tokens) => tokens.segment_bounds,
        }
    }

    /// Whether any token is padding.
    pub fn has_padding(&self) -> bool {
        match &self.tokens {
            Tokens::Span { start, .. } => self.len > 0 && *start < 0,
            Tokens::List(tokens) => tokens.padding,
        }
    }
}

fn slice_row(values: &[i64], rows: usize, len: usize, b: usize) -> &[i64] {
    let b = if rows == 1 { 0 } else { b };
    &values[b * len..(b + 1) * len]
}

/// What the tensors of [`Positions::Explicit`] hold.
#[derive(Debug)]
struct TokenList {
    /// Row by row.
    pos: Vec<i64>,
    segment: Option<Vec<i64>>,
    bounds: Option<(i64, i64)>,
    segment_bounds: Option<(i64, i64)>,
    padding: bool,
    /// Unless a variable is among them.
    source: Option<(TensorId, Option<TensorId>)>,
}

impl TokenList {
    fn read(pos: &Tensor, segment: Option<&Tensor>) -> Result<Arc<Self>> {
        let variable = pos.is_variable() || segment.is_some_and(Tensor::is_variable);
        let source = (!variable).then(|| (pos.id(), segment.map(Tensor::id)));
        match source {
            Some(source) if !pos.device().is_cpu() => READ.get(&source).map_or_else(
                || {
                    let tokens = Arc::new(Self::copy(pos, segment, Some(source))?);
                    READ.add(source, tokens.clone());
                    Ok(tokens)
                },
                Ok,
            ),
            _ => Ok(Arc::new(Self::copy(pos, segment, source)?)),
        }
    }

    fn copy(
        pos: &Tensor,
        segment: Option<&Tensor>,
        source: Option<(TensorId, Option<TensorId>)>,
    ) -> Result<Self> {
        let read = |t: &Tensor| t.flatten_all()?.to_vec1::<i64>();
        let pos = read(pos)?;
        if let Some(all) = pos.iter().min().zip(pos.iter().max()) {
            check_exact((*all.0, *all.1))?;
        }
        let segment = segment.map(read).transpose()?;
        let real = || pos.iter().copied().filter(|p| *p >= 0);
        let segments = || {
            let tokens = segment.iter().flatten().copied().zip(&pos);
            tokens.filter(|(_, p)| **p >= 0).map(|(segment, _)| segment)
        };
        Ok(Self {
            bounds: real().min().zip(real().max()),
            segment_bounds: segments().min().zip(segments().max()),
            padding: pos.iter().any(|p| *p < 0),
            segment,
            source,
            pos,
        })
    }
}

/// What was read from GPUs last: every layer of a model asks for the same positions.
static READ: Recent<(TensorId, Option<TensorId>), TokenList, 16> = Recent::new();

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(values: &[i64]) -> Result<Tensor> {
        Tensor::from_vec(values.to_vec(), (1, values.len()), &Device::Cpu)
    }

    #[test]
    fn span_says_all_without_a_list() -> Result<()> {
        for (start, len) in [
            (0, 5),
            (7, 3),
            (-2, 5),
            (-5, 3),
            (-3, 3),
            (4, 0),
            (i64::MIN, 0),
        ] {
            let span = Positions::Span { start, len }.table(1)?;
            let pos: Vec<i64> = (start..start + len as i64).collect();
            let list = Positions::explicit(tensor(&pos)?, None)?.table(1)?;
            assert_eq!(span.bounds(), list.bounds(), "{start} {len}");
            assert_eq!(span.has_padding(), list.has_padding(), "{start} {len}");
            assert_eq!(span.start(), (start >= 0).then_some(start));
            let Tokens::Span { list, .. } = &span.tokens else {
                bail!("a span became a list")
            };
            assert!(list.get().is_none());
            assert_eq!(span.row(0), pos);
        }
        Ok(())
    }

    #[test]
    fn span_too_long_for_memory_has_bounds() -> Result<()> {
        let table = Positions::Span {
            start: 5,
            len: 1 << 50,
        }
        .table(1)?;
        assert_eq!(table.bounds(), Some((5, (1 << 50) + 4)));
        Ok(())
    }

    #[test]
    fn source_is_that_of_the_same_tensors_and_none_for_variables() -> Result<()> {
        let (pos, segment) = (tensor(&[0, 1])?, tensor(&[3, 3])?);
        let source = |pos: &Tensor, segment: Option<&Tensor>| -> Result<_> {
            let positions = Positions::explicit(pos.clone(), segment.cloned())?;
            Ok(positions.table(1)?.source())
        };
        let both = source(&pos, Some(&segment))?;
        assert!(both.is_some());
        assert_eq!(both, source(&pos, Some(&segment))?);
        assert_ne!(both, source(&pos, None)?);
        assert_ne!(both, source(&pos.copy()?, Some(&segment))?);
        let variable = candle_core::Var::from_tensor(&pos)?;
        assert_eq!(source(variable.as_tensor(), None)?, None);
        Ok(())
    }
}
