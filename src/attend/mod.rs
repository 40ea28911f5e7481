//! Softmax attention over any score, forward and backward: [`attend`].
//!
//! # Letters
//! B batch, H query heads, G key/value heads (G divides H; query head h reads key/value head h / (H/G)),
//! T queries, S keys, D head width, E value width.
//!
//! # Which keys a query sees
//! By position, never by index: query at m sees key at n when n ≥ 0 and m ≥ 0 (negative is padding), when
//! n ≤ m if `causal`, when m − n < w (|m − n| < w if not causal) if there is a window w, and when both are in
//! the same segment if there are segments. A query that sees no key gets output 0, log-sum-exp −∞ and zero
//! gradients, on every path.
//!
//! # Which code runs
//! [`plan`] tells. The fused path computes scores tile by tile, and anew in the backward pass, where what the forward
//! pass saved of each query turns them into weights, so its memory is linear in T and S; the dense path is plain tensor
//! operations over a (B, H, T, S) matrix, the reference for values and gradients.

pub(crate) mod cpu;
mod cuda;
mod dense;
mod fused;
mod launch;
mod placement;
mod plan;
mod problem;

use crate::positions::Positions;
use candle_core::{Result, Tensor};
use std::sync::Arc;

// For tests.
#[cfg(feature = "cuda")]
#[doc(hidden)]
pub use crate::gpu::{choose_kernels_as_on, kernel_launches, kernel_resources, KernelResources};
#[cfg(all(test, feature = "cuda"))]
pub(crate) use launch::kernel_entries;
pub use plan::{plan, plan_problem, BackwardPlan, Path, Plan};
pub use problem::{DeviceKind, Operand, Problem};

/// How a query q at position m and a key k at position n make a score, before softmax.
#[derive(Debug, Clone, PartialEq)]
pub enum Score {
    /// `scale · q·k`. Plain attention, and every encoding that works on q, k and v alone.
    Dot,
    /// `scale · q·k − slope_h · |m − n|`: ALiBi (Press et al., arXiv 2108.12409).
    LinearBias {
        /// One slope for each of the H query heads, per token of distance: `alibi_slopes(heads).into()` for
        /// [the authors'](crate::encoding::alibi_slopes).
        slopes: Arc<[f64]>,
    },
    /// `scale · q_A·k_A · cos(2π |m − n|^alpha · phase_scale · q_P·k_P)`: TAPA (Wang et al., arXiv 2509.12635v1,
    /// eq. 12), A the first `amp_dim` coordinates and P the others. |0|^alpha is 0.
    Phase {
        /// Width of the amplitude part, `0 < amp_dim < D`.
        amp_dim: usize,
        /// Exponent of the distance, above 0.
        alpha: f64,
        /// Turns for each unit of q_P·k_P; `None` is 1/√(D − amp_dim).
        phase_scale: Option<f64>,
    },
}

/// Which implementation [`attend`] may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Backend {
    /// The fused path where there is one for the device, else the dense one.
    #[default]
    Auto,
    /// Tensor operations over the whole (B, H, T, S) score matrix.
    Dense,
    /// The fused kernels, or an error that says why they cannot run.
    Fused,
}

/// How exactly the phase's cosine is evaluated on a GPU. On the CPU both are precise.
///
/// Either way whole turns are dropped exactly before the cosine is taken, by two fused multiply-adds. What is left to
/// both is the rounding of the distance's power to f32, which grows with the number of turns; on tensor cores at distances
/// from 2^21 on, the power itself comes from the hardware's logarithm and exponential, relative error about 1e-6. The
/// largest error of the cosine against f64, bf16 and f16 inputs, distances below that, on an H200
/// (`tests/cuda/phase.rs`):
///
/// | turns | up to 1 | 10 | 50 | 100 | 300 |
/// |---|---|---|---|---|---|
/// | `Fast` | 5.5e-7 | 3.1e-6 | 1.7e-5 | 2.6e-5 | 6.7e-5 |
/// | `Precise` | 3.4e-7 | 3.1e-6 | 1.7e-5 | 2.6e-5 | 6.7e-5 |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// The hardware's cosine.
    #[default]
    Fast,
    /// A polynomial. On tensor cores 4 % (D = 128) to 14 % (D = 64, T = 2048) slower. Decoding and the kernels without
    /// tensor cores always use it, and so does the backward pass of what they computed.
    Precise,
}

/// What [`attend`] computes.
///
/// ```
/// use candle_posenc::{AttendSpec, Positions, Score};
/// let sliding = AttendSpec { window: Some(256), ..AttendSpec::causal() };
/// let shard = AttendSpec {
///     score: Score::Phase { amp_dim: 32, alpha: 0.1, phase_scale: None },
///     q_positions: Some(Positions::Span { start: 4096, len: 1024 }),
///     k_positions: Some(Positions::Span { start: 0, len: 5120 }),
///     ..AttendSpec::causal()
/// };
/// # let _ = (sliding, shard);
/// ```
#[derive(Debug, Clone)]
pub struct AttendSpec {
    /// The score.
    pub score: Score,
    /// Factor of q·k (of q_A·k_A for [`Score::Phase`]); `None` is 1/√D (1/√amp_dim).
    pub scale: Option<f64>,
    /// Whether a query sees only keys at its own position and before.
    pub causal: bool,
    /// Number of positions a query sees, its own included: m − n < window.
    pub window: Option<usize>,
    /// Where the queries stand. Without any positions the last query stands at the last key: queries start at
    /// max(S − T, 0) and keys at max(T − S, 0). With T = S the positions of one side serve both.
    pub q_positions: Option<Positions>,
    /// Where the keys stand.
    pub k_positions: Option<Positions>,
    /// Which implementation may run.
    pub backend: Backend,
    /// Accuracy of the phase on a GPU.
    pub precision: Precision,
}

impl AttendSpec {
    /// Plain causal attention; change its fields for more.
    pub fn causal() -> Self {
        Self {
            score: Score::Dot,
            scale: None,
            causal: true,
            window: None,
            q_positions: None,
            k_positions: None,
            backend: Backend::Auto,
            precision: Precision::Fast,
        }
    }

    /// Plain attention in which every query sees every key.
    pub fn bidirectional() -> Self {
        Self {
            causal: false,
            ..Self::causal()
        }
    }

    /// The window as positions are: an endless one where it is wider than all of them.
    fn window_of_64_bits(&self) -> Option<i64> {
        self.window.map(|w| i64::try_from(w).unwrap_or(i64::MAX))
    }

    /// The same with another score.
    pub fn with_score(self, score: Score) -> Self {
        Self { score, ..self }
    }

    /// The same on another backend.
    pub fn with_backend(self, backend: Backend) -> Self {
        Self { backend, ..self }
    }

    /// The same with queries and keys at these positions.
    pub fn with_positions(self, queries: Positions, keys: Positions) -> Self {
        Self {
            q_positions: Some(queries),
            k_positions: Some(keys),
            ..self
        }
    }
}

/// What [`attend_with_lse`] returns.
#[derive(Debug, Clone)]
pub struct AttendOutput {
    /// (B, H, T, E), in v's dtype.
    pub out: Tensor,
    /// (B, H, T), natural logarithm of the sum of exp(score) over the visible keys, −∞ where there is none; f32,
    /// or f64 when q is f64. It is detached: no gradient flows through it, on any path.
    pub lse: Tensor,
}

/// Softmax attention: each query's average of the values, weighted by softmax of its scores.
///
/// Differentiable in q, k and v on every path; the score's parameters are constants. bf16 and f16 inputs are
/// accumulated in f32.
///
/// On the fused CPU path the output does not depend on the number of threads, and the gradients are the same bit
/// for bit on every run with the same number of threads. On a GPU output and gradients are the same bit for bit on every
/// run.
///
/// # Shapes
/// q (B, H, T, D), k (B, G, S, D), v (B, G, S, E) → (B, H, T, E). Any strides.
///
/// # Errors
/// When shapes, dtypes, devices, positions or parameters do not fit, or `Backend::Fused` cannot run; the message
/// names the values.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_posenc::{attend, AttendSpec};
/// # fn main() -> candle_core::Result<()> {
/// let q = Tensor::randn(0f32, 1., (1, 8, 100, 64), &Device::Cpu)?;
/// let kv = Tensor::randn(0f32, 1., (1, 2, 100, 64), &Device::Cpu)?;
/// let out = attend(&q, &kv, &kv, &AttendSpec::causal())?;
/// assert_eq!(out.dims(), &[1, 8, 100, 64]);
/// # Ok(())
/// # }
/// ```
pub fn attend(q: &Tensor, k: &Tensor, v: &Tensor, spec: &AttendSpec) -> Result<Tensor> {
    let problem = Problem::of(q, k, v)?;
    match plan_problem(&problem, spec)?.path {
        Path::Dense => Ok(dense::attend(q, k, v, &problem.resolve(spec)?)?.out),
        Path::FusedCpu | Path::FusedCuda => fused::attend(q, k, v, problem.resolve(spec)?),
    }
}

/// [`attend`], with the log-sum-exp of each query's scores: what merging shards of the keys needs.
///
/// # Shapes
/// As [`attend`]; the log-sum-exp is (B, H, T).
///
/// # Errors
/// As [`attend`].
pub fn attend_with_lse(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: &AttendSpec,
) -> Result<AttendOutput> {
    let problem = Problem::of(q, k, v)?;
    match plan_problem(&problem, spec)?.path {
        Path::Dense => dense::attend(q, k, v, &problem.resolve(spec)?),
        Path::FusedCpu | Path::FusedCuda => fused::attend_with_lse(q, k, v, problem.resolve(spec)?),
    }
}
