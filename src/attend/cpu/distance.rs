//! The factor by which a score depends on the distance |m − n| of query and key: a table, or the function itself
//! where distances are too wide for one.

use super::lanes::Real;
use super::visibility::KeyMask;
use super::{KEY_BLOCK, QUERY_BLOCK};
use crate::attend::problem::{saturating_product, Dims, Resolved, ResolvedScore};
use rayon::prelude::*;

/// Longest table, in entries.
pub(super) const LONGEST_TABLE: usize = 1 << 20;

/// A function of the distance, evaluated in f64 and rounded once.
#[derive(Debug, Clone, Copy)]
enum Factor {
    /// None is read.
    One,
    /// |m − n|
    Distance,
    /// |m − n|^alpha · scale
    Power { alpha: f64, scale: f64 },
}

impl Factor {
    fn at(self, distance: u64) -> f64 {
        match self {
            Self::One => 1.,
            Self::Distance => distance as f64,
            Self::Power { alpha, scale } => (distance as f64).powf(alpha) * scale,
        }
    }
}

/// The factors of one call.
pub(super) struct Distances<S> {
    factor: Factor,
    /// Factors at n − m = `first`, `first` + 1, …
    table: Vec<S>,
    first: i64,
}

impl<S: Real> Distances<S> {
    pub fn new(call: &Resolved) -> Self {
        let factor = match call.score {
            ResolvedScore::Dot { .. } => Factor::One,
            ResolvedScore::LinearBias { .. } => Factor::Distance,
            ResolvedScore::Phase {
                alpha, phase_scale, ..
            } => Factor::Power {
                alpha,
                scale: phase_scale,
            },
        };
        let untabled = Self {
            factor,
            table: Vec::new(),
            first: 0,
        };
        let (Some((q_first, q_last)), Some((k_first, k_last))) =
            (call.q_positions.bounds(), call.k_positions.bounds())
        else {
            return untabled;
        };
        // The visible differences n − m, and those that share a tile with one.
        let window = call.window.unwrap_or(i64::MAX);
        let from = (k_first - q_last).max(1 - window);
        let to = (k_last - q_first).min(if call.causal { 0 } else { window - 1 });
        let margin = (QUERY_BLOCK + KEY_BLOCK) as i64;
        let (from, to) = (from - margin, to + margin);
        let Dims { b, h, t, s, .. } = call.dims;
        let longest = LONGEST_TABLE.min(saturating_product([b, h, t, s])) as i64;
        if matches!(factor, Factor::One) || to < from || to - from >= longest {
            return untabled;
        }
        let table = (0..(to - from + 1) as usize)
            .into_par_iter()
            .with_min_len(1024)
            .map(|entry| S::from_f64(factor.at((from + entry as i64).unsigned_abs())))
            .collect();
        Self {
            factor,
            table,
            first: from,
        }
    }

    /// The factors of a query at `m` with the keys of one block, [`KEY_BLOCK`] of them; `scratch` is as long. Those
    /// of invisible pairs mean nothing.
    #[inline(always)]
    pub fn row<'a>(
        &'a self,
        m: i64,
        keys: &KeyMask<'_>,
        call: &Resolved,
        scratch: &'a mut [S],
    ) -> &'a [S] {
        let entry = |n: i64| usize::try_from(n - m - self.first).ok();
        if let (true, Some(first)) = (keys.block.consecutive, keys.positions.first()) {
            let start = entry(*first);
            if let Some(row) = start.and_then(|start| self.table.get(start..start + KEY_BLOCK)) {
                return row;
            }
        }
        for (factor, n) in scratch.iter_mut().zip(keys.positions) {
            *factor = match entry(*n).and_then(|entry| self.table.get(entry)) {
                _ if !call.sees(m, *n) => S::ZERO,
                Some(factor) => *factor,
                None => S::from_f64(self.factor.at(m.abs_diff(*n))),
            };
        }
        scratch
    }
}
