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
