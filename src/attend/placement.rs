//! Where queries and keys stand, as the GPU's kernels read it: relative to an origin so that 32 bits hold it, and with
//! bounds for each tile, by which tiles that cannot meet are skipped.
//!
//! A span without padding stays a span. Whatever else there is becomes a list of positions and segments.
// Without the feature only the tests ask.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

use super::cuda::call::TileBounds;
use super::launch::POSITION_LIMIT;
use super::problem::Resolved;
use crate::positions::{PositionTable, TokenSource};

/// How positions and segments become 32 bits wide, the same way for queries and keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frame {
    /// The position that becomes 0.
    pub origin: i64,
    /// All segments in order, where 32 bits do not hold them: each becomes its place here.
    segments: Option<Vec<i64>>,
}

impl Frame {
    /// `None` where 32 bits cannot hold the positions, whatever the origin.
    pub fn of(call: &Resolved) -> Option<Self> {
        let bounds = [&call.q_positions, &call.k_positions].map(PositionTable::bounds);
        let first = bounds.iter().flatten().map(|(first, _)| *first).min();
        let last = bounds.iter().flatten().map(|(_, last)| *last).max();
        let (first, last) = first.zip(last).unwrap_or((0, 0));
        let origin = if last < POSITION_LIMIT { 0 } else { first };
        (last - origin < POSITION_LIMIT).then(|| Self {
            origin,
            segments: wide_segments(call),
        })
    }

    fn position(&self, position: i64) -> i32 {
        match position {
            ..0 => -1,
            _ => (position - self.origin) as i32,
        }
    }

    fn segment(&self, segment: i64) -> i32 {
        match &self.segments {
            None => segment as i32,
            Some(all) => all.partition_point(|x| *x < segment) as i32,
        }
    }

    /// The first position of a span without padding.
    pub fn start(&self, table: &PositionTable) -> Option<i32> {
        table.start().map(|start| self.position(start))
    }

    /// What [`Self::list`] depends on; `None` where the tokens may be others next time.
    pub fn key(&self, table: &PositionTable, tile: usize) -> Option<ListKey> {
        Some(ListKey {
            frame: self.clone(),
            source: table.source()?,
            tile,
        })
    }

    /// The tokens of all rows as a list.
    pub fn list(&self, table: &PositionTable, tile: usize) -> List {
        let mut list = List {
            rows: table.rows,
            len: table.len,
            tokens: Vec::with_capacity(table.rows * table.len),
            tiles: Vec::with_capacity(table.rows * table.len.div_ceil(tile)),
        };
        for row in 0..table.rows {
            let segments = table.segments(row);
            let tokens = table.row(row).iter().enumerate().map(|(i, position)| {
                let segment = segments.map_or(0, |segments| self.segment(segments[i]));
                [self.position(*position), segment]
            });
            let start = list.tokens.len();
            list.tokens.extend(tokens);
            let tiles = list.tokens[start..].chunks(tile);
            list.tiles.extend(tiles.map(|tokens| bounds(tokens, tile)));
        }
        list
    }
}

/// All segments of tokens that are no padding, in order, where one of them is beyond 32 bits.
fn wide_segments(call: &Resolved) -> Option<Vec<i64>> {
    let tables = [&call.q_positions, &call.k_positions];
    let fits = |segment| i32::try_from(segment).is_ok();
    let mut bounds = tables.iter().filter_map(|table| table.segment_bounds());
    if bounds.all(|(first, last)| fits(first) && fits(last)) {
        return None;
    }
    let mut all = Vec::new();
    for table in tables {
        for row in 0..table.rows {
            let segments = table.segments(row).unwrap_or_default();
            let tokens = segments.iter().zip(table.row(row));
            all.extend(tokens.filter(|(_, p)| **p >= 0).map(|(s, _)| *s));
        }
    }
    all.sort_unstable();
    all.dedup();
    Some(all)
}

/// What a list was made from: equal keys have equal lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ListKey {
    frame: Frame,
    source: TokenSource,
    tile: usize,
}

/// Positions and segments of every token, and the bounds of every tile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct List {
    pub rows: usize,
    pub len: usize,
    /// (rows, len); a position of −1 is padding.
    pub tokens: Vec<[i32; 2]>,
    /// (rows, tiles).
    pub tiles: Vec<TileBounds>,
}

impl List {
    /// Tokens from one row to the next, 0 where one serves all.
    pub fn row_stride(&self) -> usize {
        if self.rows == 1 {
            0
        } else {
            self.len
        }
    }

    /// Tiles from one row to the next, 0 where one serves all.
    pub fn tile_stride(&self) -> usize {
        if self.rows == 1 {
            0
        } else {
            self.tiles.len() / self.rows.max(1)
        }
    }
}

/// Of a tile of `size` tokens; those missing at the end of a row count as padding.
fn bounds(tokens: &[[i32; 2]], size: usize) -> TileBounds {
    let real = || tokens.iter().filter(|[position, _]| *position >= 0);
    let positions = || real().map(|[position, _]| *position);
    let segments = || real().map(|[_, segment]| *segment);
    let (first, last) = positions().min().zip(positions().max()).unwrap_or((0, -1));
    let (segment_first, segment_last) = segments().min().zip(segments().max()).unwrap_or((0, -1));
    let padded = real().count() < size;
    let runs_on = || tokens.windows(2).all(|pair| pair[1][0] == pair[0][0] + 1);
    let flags = match padded {
        true => TileBounds::PADDED,
        false if runs_on() => TileBounds::CONSECUTIVE,
        false => 0,
    };
    TileBounds {
        first,
        last,
        segment_first,
        segment_last,
        flags,
        reserved: [0; 3],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attend::{AttendSpec, DeviceKind, Operand, Problem};
    use crate::positions::Positions;
    use candle_core::{DType, Device, Result, Tensor};

    fn resolved(q: Positions, k: Positions) -> Result<Resolved> {
        let operand = |len| Operand::contiguous([2, 1, len, 8]);
        let problem = Problem {
            q: operand(q.len()),
            k: operand(k.len()),
            v: operand(k.len()),
            dtype: DType::F32,
            device: DeviceKind::Cpu,
        };
        problem.resolve(&AttendSpec::causal().with_positions(q, k))
    }

    fn explicit(rows: &[&[i64]], segments: Option<&[&[i64]]>) -> Result<Positions> {
        let tensor = |rows: &[&[i64]]| {
            let shape = (rows.len(), rows[0].len());
            Tensor::from_vec(rows.concat(), shape, &Device::Cpu)
        };
        Positions::explicit(tensor(rows)?, segments.map(tensor).transpose()?)
    }

    fn span(start: i64, len: usize) -> Positions {
        Positions::Span { start, len }
    }

    fn tile(bounds: [i32; 4], flags: i32) -> TileBounds {
        let [first, last, segment_first, segment_last] = bounds;
        TileBounds {
            first,
            last,
            segment_first,
            segment_last,
            flags,
            reserved: [0; 3],
        }
    }

    const CONSECUTIVE: i32 = TileBounds::CONSECUTIVE;
    const PADDED: i32 = TileBounds::PADDED;

    #[test]
    fn spans_stay_spans_at_their_positions() -> Result<()> {
        let call = resolved(span(100, 4), span(0, 104))?;
        let frame = Frame::of(&call).unwrap();
        assert_eq!(frame.origin, 0);
        assert_eq!(frame.start(&call.q_positions), Some(100));
        assert_eq!(frame.start(&call.k_positions), Some(0));
        Ok(())
    }

    #[test]
    fn far_positions_get_a_common_origin() -> Result<()> {
        let far = 1 << 40;
        let call = resolved(span(far + 5, 3), span(far, 8))?;
        let frame = Frame::of(&call).unwrap();
        assert_eq!(frame.origin, far);
        assert_eq!(frame.start(&call.q_positions), Some(5));
        assert_eq!(frame.start(&call.k_positions), Some(0));
        let mixed = resolved(explicit(&[&[far + 7, -3, far + 2]], None)?, span(far, 8))?;
        let frame = Frame::of(&mixed).unwrap();
        let list = frame.list(&mixed.q_positions, 4);
        assert_eq!(list.tokens, [[7, 0], [-1, 0], [2, 0]]);
        assert_eq!(frame.start(&mixed.k_positions), Some(0));
        Ok(())
    }

    #[test]
    fn positions_too_far_apart_have_no_frame() -> Result<()> {
        let limit = POSITION_LIMIT;
        assert!(Frame::of(&resolved(span(limit, 3), span(0, 8))?).is_none());
        assert!(Frame::of(&resolved(span(limit - 1, 1), span(0, 8))?).is_some());
        let two = explicit(&[&[0, limit]], None)?;
        assert!(Frame::of(&resolved(two.clone(), two)?).is_none());
        // Padding is no position.
        let padded = explicit(&[&[-1 << 50, 1 << 50]], None)?;
        let call = resolved(padded.clone(), padded)?;
        assert_eq!(Frame::of(&call).map(|frame| frame.origin), Some(1 << 50));
        let nothing = explicit(&[&[-1, -2]], None)?;
        let call = resolved(nothing.clone(), nothing)?;
        assert_eq!(Frame::of(&call).map(|frame| frame.origin), Some(0));
        Ok(())
    }

    #[test]
    fn span_that_starts_in_padding_becomes_a_list() -> Result<()> {
        let call = resolved(span(-2, 5), span(0, 5))?;
        let frame = Frame::of(&call).unwrap();
        assert_eq!(frame.start(&call.q_positions), None);
        let list = frame.list(&call.q_positions, 3);
        assert_eq!(list.tokens, [[-1, 0], [-1, 0], [0, 0], [1, 0], [2, 0]]);
        assert_eq!(
            (list.rows, list.row_stride(), list.tile_stride()),
            (1, 0, 0)
        );
        Ok(())
    }

    #[test]
    fn bounds_of_tiles_leave_padding_aside_and_flag_what_runs_on() -> Result<()> {
        let positions = explicit(
            &[
                &[4, 5, 6, 7, 9, 8, 7, 6, -1, -1, -1, -1, 3, 4],
                &[0, 1, 2, -1, 5, 6, 7, 8, 2, 4, 6, 8, 1, 2],
            ],
            Some(&[
                &[0, 0, 0, 0, 1, 2, 1, 1, 9, 9, 9, 9, 3, 3],
                &[5, 5, 5, 0, 7, 7, 7, 7, 1, 1, 1, 1, 2, 2],
            ]),
        )?;
        let call = resolved(positions.clone(), positions)?;
        let list = Frame::of(&call).unwrap().list(&call.k_positions, 4);
        let expected = [
            tile([4, 7, 0, 0], CONSECUTIVE),
            tile([6, 9, 1, 2], 0),
            tile([0, -1, 0, -1], PADDED),
            // Two tokens are missing.
            tile([3, 4, 3, 3], PADDED),
            tile([0, 2, 5, 5], PADDED),
            tile([5, 8, 7, 7], CONSECUTIVE),
            tile([2, 8, 1, 1], 0),
            tile([1, 2, 2, 2], PADDED),
        ];
        assert_eq!(list.tiles, expected);
        assert_eq!((list.row_stride(), list.tile_stride()), (14, 4));
        Ok(())
    }

    #[test]
    fn wide_segments_are_numbered_alike_for_queries_and_keys() -> Result<()> {
        let wide = 1 << 40;
        let q = explicit(&[&[0, 1]], Some(&[&[wide, -7]]))?;
        let k = explicit(&[&[0, 1, 2, -1]], Some(&[&[-7, 3, wide, i64::MIN]]))?;
        let call = resolved(q, k)?;
        let frame = Frame::of(&call).unwrap();
        let segments = |list: List| list.tokens.iter().map(|x| x[1]).collect::<Vec<_>>();
        assert_eq!(segments(frame.list(&call.q_positions, 4)), [2, 0]);
        assert_eq!(segments(frame.list(&call.k_positions, 4))[..3], [0, 1, 2]);
        Ok(())
    }

    #[test]
    fn narrow_segments_are_as_they_are_and_padding_does_not_widen_them() -> Result<()> {
        let q = explicit(&[&[0, -1]], Some(&[&[-7, 1 << 40]]))?;
        let call = resolved(q.clone(), q)?;
        let frame = Frame::of(&call).unwrap();
        assert_eq!(frame.segments, None);
        assert_eq!(frame.list(&call.q_positions, 2).tokens[0], [0, -7]);
        Ok(())
    }

    #[test]
    fn keys_of_lists_tell_origins_tiles_and_tensors_apart() -> Result<()> {
        let (q, other) = (explicit(&[&[3, 4]], None)?, explicit(&[&[3, 4]], None)?);
        let key = |q: &Positions, k: Positions, tile: usize| -> Result<_> {
            let call = resolved(q.clone(), k)?;
            Ok(Frame::of(&call).unwrap().key(&call.q_positions, tile))
        };
        let plain = key(&q, span(0, 8), 64)?;
        assert!(plain.is_some());
        assert_eq!(plain, key(&q, span(2, 9), 64)?);
        assert_ne!(plain, key(&q, span(0, 8), 128)?);
        assert_ne!(plain, key(&other, span(0, 8), 64)?);
        let far = explicit(&[&[POSITION_LIMIT, POSITION_LIMIT + 1]], None)?;
        assert_ne!(
            key(&far, span(POSITION_LIMIT - 5, 8), 64)?,
            key(&far, span(9, 8), 64)?
        );
        Ok(())
    }
}
