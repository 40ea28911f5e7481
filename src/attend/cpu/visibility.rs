//! Which keys a block of queries sees: tiles that none, all or some of whose pairs are visible.

use crate::attend::problem::Resolved;
use std::ops::Range;

/// Neighbouring tokens of one batch row, summed up.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TokenBlock {
    pub tokens: Range<usize>,
    /// Least and greatest position, padding aside; `None` where all is padding.
    bounds: Option<(i64, i64)>,
    /// Whether no token is padding.
    real: bool,
    /// Whether there are as many tokens as asked for: the last block of a row may be short.
    full: bool,
    /// Whether each token stands one position behind the token before it.
    pub consecutive: bool,
    /// Least and greatest segment, padding aside.
    segments: (i64, i64),
}

/// How many of a tile's pairs are visible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sight {
    None,
    Some,
    All,
}

/// The blocks of `size` tokens of one batch row.
pub(super) fn token_blocks(
    positions: &[i64],
    segments: Option<&[i64]>,
    size: usize,
) -> Vec<TokenBlock> {
    (0..positions.len())
        .step_by(size)
        .map(|start| {
            let tokens = start..(start + size).min(positions.len());
            let positions = &positions[tokens.clone()];
            let real = || positions.iter().copied().filter(|p| *p >= 0);
            let segment = |t: usize| segments.map_or(0, |s| s[t]);
            let in_segments = || {
                tokens
                    .clone()
                    .zip(positions)
                    .filter(|(_, p)| **p >= 0)
                    .map(|(t, _)| segment(t))
            };
            TokenBlock {
                bounds: real().min().zip(real().max()),
                real: real().count() == tokens.len(),
                full: tokens.len() == size,
                consecutive: positions.windows(2).all(|p| p[1] == p[0] + 1),
                segments: in_segments()
                    .min()
                    .zip(in_segments().max())
                    .unwrap_or((0, 0)),
                tokens,
            }
        })
        .collect()
}

impl TokenBlock {
    /// How many of the pairs of this block's queries and the keys of block `k` are visible. `All` only where the
    /// key block is full, so that every column of its tile is a key.
    pub fn sight(&self, k: &TokenBlock, call: &Resolved) -> Sight {
        let (Some((first, last)), Some((k_first, k_last))) = (self.bounds, k.bounds) else {
            return Sight::None;
        };
        let window = call.window.unwrap_or(i64::MAX);
        let apart = self.segments.0 > k.segments.1 || k.segments.0 > self.segments.1;
        if apart
            || call.causal && k_first > last
            || first - k_last >= window
            || k_first - last >= window
        {
            return Sight::None;
        }
        let one_segment = self.segments.0 == self.segments.1 && self.segments == k.segments;
        if (self.real && k.real && k.full)
            && one_segment
            && (!call.causal || k_last <= first)
            && last - k_first < window
            && k_last - first < window
        {
            Sight::All
        } else {
            Sight::Some
        }
    }
}

/// The keys of one block, as a partly visible tile tests them.
#[derive(Clone, Copy)]
pub(super) struct KeyMask<'a> {
    pub block: &'a TokenBlock,
    /// Positions of the block's keys.
    pub positions: &'a [i64],
    /// Their segments.
    pub segments: Option<&'a [i64]>,
}

/// Of rows with these columns: those that see anything, and the number of columns up to the last visible one.
pub(super) fn extent<'a>(
    columns: impl ExactSizeIterator<Item = &'a Range<usize>> + DoubleEndedIterator + Clone,
) -> Option<(Range<usize>, usize)> {
    let seeing = |columns: &Range<usize>| !columns.is_empty();
    let first = columns.clone().position(seeing)?;
    let last = columns.clone().rposition(seeing)?;
    Some((first..last + 1, columns.map(|c| c.end).max()?))
}

impl KeyMask<'_> {
    /// The columns among which a query at `m` finds all keys that it sees.
    pub fn columns(&self, m: i64, call: &Resolved) -> Range<usize> {
        let len = self.positions.len();
        if m < 0 {
            return 0..0;
        }
        let (Some(&first), true) = (self.positions.first(), self.block.consecutive) else {
            return 0..len;
        };
        // Positions are below 2^53, so this window is as good as none and cannot overflow.
        let window = call.window.unwrap_or(i64::MAX).min(1 << 60);
        // The first and last visible positions, inclusive.
        let from = (m - window + 1).max(0);
        let to = if call.causal { m } else { m + window - 1 };
        let column = |position: i64| (position - first).clamp(0, len as i64) as usize;
        let (from, to) = (column(from), column(to + 1));
        from..to.max(from)
    }

    /// Writes `value` into the columns of `row` that a query at `m` in `segment` does not see; `columns` is what
    /// [`Self::columns`] gave.
    pub fn hide<S: Copy>(
        &self,
        row: &mut [S],
        value: S,
        columns: &Range<usize>,
        (m, segment): (i64, Option<i64>),
        call: &Resolved,
    ) {
        row[..columns.start].fill(value);
        row[columns.end..].fill(value);
        if self.block.consecutive && segment.is_none() {
            return;
        }
        for j in columns.clone() {
            let same_segment = match (segment, self.segments) {
                (Some(segment), Some(segments)) => segments[j] == segment,
                _ => true,
            };
            if !(same_segment && call.sees(m, self.positions[j])) {
                row[j] = value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attend::{AttendSpec, DeviceKind, Operand, Problem};
    use crate::positions::Positions;
    use candle_core::{DType, Device, Result, Tensor};

    const SIZE: usize = 8;

    /// A call over these tokens, as queries and as keys.
    fn call(
        positions: &[i64],
        segments: Option<&[i64]>,
        causal: bool,
        window: Option<usize>,
    ) -> Result<Resolved> {
        let len = positions.len();
        let tensor = |x: &[i64]| Tensor::from_vec(x.to_vec(), (1, len), &Device::Cpu);
        let tokens = Positions::explicit(tensor(positions)?, segments.map(tensor).transpose()?)?;
        let operand = Operand::contiguous([1, 1, len, 4]);
        let problem = Problem {
            q: operand,
            k: operand,
            v: operand,
            dtype: DType::F32,
            device: DeviceKind::Cpu,
        };
        problem.resolve(&AttendSpec {
            causal,
            window,
            ..AttendSpec::causal().with_positions(tokens.clone(), tokens)
        })
    }

    /// Holds blocks, columns and hidden keys against the definition, pair by pair. Returns how many tiles had
    /// no, some and all pairs visible.
    fn check(positions: &[i64], segments: Option<&[i64]>, call: &Resolved) -> [usize; 3] {
        let blocks = token_blocks(positions, segments, SIZE);
        let segment = |t: usize| segments.map(|s| s[t]);
        let sees =
            |q: usize, k: usize| call.sees(positions[q], positions[k]) && segment(q) == segment(k);
        let mut seen = [0; 3];
        for q in &blocks {
            for k in &blocks {
                let pairs = || {
                    q.tokens
                        .clone()
                        .flat_map(|i| k.tokens.clone().map(move |j| (i, j)))
                };
                let visible = pairs().filter(|(i, j)| sees(*i, *j)).count();
                match q.sight(k, call) {
                    Sight::None => {
                        assert_eq!(visible, 0, "{q:?} {k:?}");
                        seen[0] += 1;
                    }
                    Sight::Some => seen[1] += 1,
                    Sight::All => {
                        assert_eq!(visible, q.tokens.len() * SIZE, "{q:?} {k:?}");
                        seen[2] += 1;
                    }
                }
                let mask = KeyMask {
                    block: k,
                    positions: &positions[k.tokens.clone()],
                    segments: segments.map(|s| &s[k.tokens.clone()]),
                };
                for i in q.tokens.clone() {
                    let columns = mask.columns(positions[i], call);
                    let mut row = [1; SIZE];
                    mask.hide(&mut row, 0, &columns, (positions[i], segment(i)), call);
                    let expected: [i32; SIZE] = std::array::from_fn(|j| {
                        let key = k.tokens.start + j;
                        i32::from(key < k.tokens.end && sees(i, key))
                    });
                    assert_eq!(row, expected, "query {i}, {k:?}");
                }
            }
        }
        seen
    }

    #[test]
    fn sight_and_mask_agree_with_the_definition() -> Result<()> {
        let len = 45;
        let span: Vec<i64> = (0..len).collect();
        let padded: Vec<i64> = (0..len).map(|i| i - 11).collect();
        let scrambled: Vec<i64> = (0..len)
            .map(|i| if i % 9 == 4 { -1 } else { i * 17 % 45 })
            .collect();
        let documents: Vec<i64> = (0..len).map(|i| i / 13).collect();
        let mixed: Vec<i64> = (0..len).map(|i| i % 2).collect();
        for positions in [span, padded, scrambled] {
            for segments in [None, Some(&documents[..]), Some(&mixed[..])] {
                for causal in [true, false] {
                    for window in [None, Some(1), Some(7), Some(20), Some(usize::MAX)] {
                        let call = call(&positions, segments, causal, window)?;
                        check(&positions, segments, &call);
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn sight_of_causal_span_skips_and_fills_tiles() -> Result<()> {
        let positions: Vec<i64> = (0..32).collect();
        let call = call(&positions, None, true, None)?;
        assert_eq!(check(&positions, None, &call), [6, 4, 6]);
        Ok(())
    }
}
