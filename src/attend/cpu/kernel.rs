//! The arithmetic of tiles behind one interface. What surrounds it (cutting, packing, sharing out, merging) is
//! compiled once for f32 and once for f64, not for each instruction set and score.

use super::lanes::{Job, Lanes, Real, Work};
use super::score::{Dot, LinearBias, Phase, RowScore};
use super::{backward, forward};
use crate::attend::problem::{Resolved, ResolvedScore};

/// The arithmetic of one score on one instruction set.
pub(super) trait Kernel<S>: Sync {
    /// [`Lanes::WIDTH`]
    fn width(&self) -> usize;

    /// [`RowScore::PHASE`]
    fn has_phase(&self) -> bool;

    /// Σ of one vector's elements.
    fn sum(&self, vector: &[S]) -> S;

    fn forward(&self, step: forward::TileStep<'_, S>);

    fn backward(&self, step: backward::TileStep<'_, S>);
}

/// A pass's work on one tile, and the score of each query head.
pub(super) struct Scored<'a, Step, R> {
    pub step: Step,
    pub scores: &'a [R],
}

struct OnLanes<L, R> {
    lanes: L,
    /// One for each query head.
    scores: Vec<R>,
}

impl<L, R> OnLanes<L, R> {
    fn run<Step>(&self, step: Step)
    where
        L: Lanes,
        for<'a> Scored<'a, Step, R>: Work<L, Output = ()>,
    {
        self.lanes.run(Scored {
            step,
            scores: &self.scores,
        })
    }
}

impl<L: Lanes, R: RowScore<L>> Kernel<L::Scalar> for OnLanes<L, R> {
    fn width(&self) -> usize {
        L::WIDTH
    }

    fn has_phase(&self) -> bool {
        R::PHASE
    }

    fn sum(&self, vector: &[L::Scalar]) -> L::Scalar {
        self.lanes.sum(self.lanes.load(vector))
    }

    fn forward(&self, step: forward::TileStep<'_, L::Scalar>) {
        self.run(step)
    }

    fn backward(&self, step: backward::TileStep<'_, L::Scalar>) {
        self.run(step)
    }
}

/// The kernel of a call.
#[derive(Clone, Copy)]
pub(super) struct KernelOf<'a>(pub &'a Resolved);

impl<S: Real> Job<S> for KernelOf<'_> {
    type Output = Box<dyn Kernel<S>>;

    fn run<L: Lanes<Scalar = S>>(self, lanes: L) -> Self::Output {
        let Resolved { dims, score, .. } = self.0;
        match score {
            ResolvedScore::Dot { .. } => Box::new(OnLanes {
                lanes,
                scores: vec![Dot; dims.h],
            }),
            ResolvedScore::LinearBias { slopes, .. } => Box::new(OnLanes {
                lanes,
                scores: slopes.iter().copied().map(LinearBias::new).collect(),
            }),
            ResolvedScore::Phase { .. } => Box::new(OnLanes {
                lanes,
                scores: vec![Phase; dims.h],
            }),
        }
    }
}
