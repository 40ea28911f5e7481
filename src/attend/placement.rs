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
