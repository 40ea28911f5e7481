//! The scores, each with its derivative beside it. They act on `q·k`, of which the parts and factors that do not
//! depend on the pair are already in q: q·k here has the scale in it.

use super::lanes::{Lanes, Real};
use candle_core::WithDType;

/// What a score is computed from, for a vector of keys.
#[derive(Clone, Copy)]
pub(super) struct Pairs<V> {
    /// scale · q·k, over the amplitude part for a phase.
    pub dot: V,
    /// q_P·k_P, where [`RowScore::PHASE`].
    pub phase: V,
    /// The factor of the distance, where [`RowScore::FACTORS`].
    pub factor: V,
}

/// A score and its derivatives.
#[derive(Clone, Copy)]
pub(super) struct Derivative<V> {
    pub score: V,
    pub by_dot: V,
    pub by_phase: V,
}

/// The score of one query's row.
pub(super) trait RowScore<L: Lanes>: Copy + Send + Sync + 'static {
    /// Whether the score differs from the dot product.
    const CHANGES: bool;
    /// Whether there is a second product, q_P·k_P.
    const PHASE: bool;
    /// Whether it depends on the distance.
    const FACTORS: bool;

    fn score(self, lanes: L, pairs: Pairs<L::Vector>) -> L::Vector;

    fn derivative(self, lanes: L, pairs: Pairs<L::Vector>) -> Derivative<L::Vector>;
}

/// scale · q·k
#[derive(Debug, Clone, Copy)]
pub(super) struct Dot;

impl<L: Lanes> RowScore<L> for Dot {
    const CHANGES: bool = false;
    const PHASE: bool = false;
    const FACTORS: bool = false;

    #[inline(always)]
    fn score(self, _: L, pairs: Pairs<L::Vector>) -> L::Vector {
        pairs.dot
    }

    #[inline(always)]
    fn derivative(self, lanes: L, pairs: Pairs<L::Vector>) -> Derivative<L::Vector> {
        Derivative {
            score: pairs.dot,
            by_dot: lanes.splat(L::Scalar::ONE),
            by_phase: lanes.splat(L::Scalar::ZERO),
        }
    }
}

/// scale · q·k − slope · distance
#[derive(Debug, Clone, Copy)]
pub(super) struct LinearBias<S> {
    /// −slope, rounded, and what rounding lost: far keys have distances of a million.
    high: S,
    low: S,
}

impl<S: Real> LinearBias<S> {
    pub fn new(slope: f64) -> Self {
        let high = S::from_f64(-slope);
        Self {
            high,
            low: S::from_f64(-slope - high.to_f64()),
        }
    }
}

impl<L: Lanes> RowScore<L> for LinearBias<L::Scalar> {
    const CHANGES: bool = true;
    const PHASE: bool = false;
    const FACTORS: bool = true;

    #[inline(always)]
    fn score(self, lanes: L, pairs: Pairs<L::Vector>) -> L::Vector {
        let low = lanes.mul_add(lanes.splat(self.low), pairs.factor, pairs.dot);
        lanes.mul_add(lanes.splat(self.high), pairs.factor, low)
    }

    #[inline(always)]
    fn derivative(self, lanes: L, pairs: Pairs<L::Vector>) -> Derivative<L::Vector> {
        Derivative {
            score: self.score(lanes, pairs),
            by_dot: lanes.splat(L::Scalar::ONE),
            by_phase: lanes.splat(L::Scalar::ZERO),
        }
    }
}

/// a · cos(2π w φ), with a = scale · q_A·k_A, φ = q_P·k_P and w = |m − n|^alpha · phase_scale
#[derive(Debug, Clone, Copy)]
pub(super) struct Phase;

impl<L: Lanes> RowScore<L> for Phase {
    const CHANGES: bool = true;
    const PHASE: bool = true;
    const FACTORS: bool = true;

    #[inline(always)]
    fn score(self, lanes: L, pairs: Pairs<L::Vector>) -> L::Vector {
        let turn = lanes.fraction(pairs.factor, pairs.phase);
        lanes.mul(pairs.dot, lanes.cos_turns(turn))
    }

    /// By a: cos(2πwφ). By φ: −a · 2πw · sin(2πwφ).
    #[inline(always)]
    fn derivative(self, lanes: L, pairs: Pairs<L::Vector>) -> Derivative<L::Vector> {
        let turn = lanes.fraction(pairs.factor, pairs.phase);
        let (cos, sin) = lanes.cos_sin_turns(turn);
        let tau = lanes.splat(L::Scalar::from_f64(-std::f64::consts::TAU));
        let by_turn = lanes.mul(lanes.mul(pairs.dot, sin), tau);
        Derivative {
            score: lanes.mul(pairs.dot, cos),
            by_dot: cos,
            by_phase: lanes.mul(by_turn, pairs.factor),
        }
    }
}
