//! Token-aware phase attention, TAPA (Wang et al., "Positional Encoding via Token-Aware Phase Attention",
//! arXiv 2509.12635v1).
//!
//! | symbol | meaning |
//! |---|---|
//! | D_A = θ·D, D_P = D − D_A | widths of the amplitude and the phase part of a head |
//! | q = (q_A, q_P), k = (k_A, k_P) | the first D_A coordinates and the others |
//! | a(m,n) = q_A·k_A/√D_A | amplitude of a query at position m and a key at n |
//! | φ(m,n) | phase, in turns at distance 1 |
//! | s(m,n) = a·cos(2π·\|m−n\|^α·φ) | score before softmax |
//!
//! Nothing is rotated or added: the score itself depends on the distance, [`Score::Phase`] computes it, and a token's
//! score with itself is a(m,m).
//!
//! Two things here are not in the paper. [`PhaseNorm`] bounds the phase, which makes TAPA train at ordinary learning
//! rates. [`PhaseForm::Linear`] is turned into a dot product of short augmented vectors, so that it needs no
//! kernel of its own.

#[cfg(feature = "cuda")]
mod gpu;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod launch;

use super::{Encoding, EncodingConfig, ModelDims, PosState, Qkv};
use crate::attend::Score;
use candle_core::{bail, DType, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use serde::{Deserialize, Serialize};

/// Parameters of TAPA. The default is the paper's.
///
/// ```
/// use candle_posenc::encoding::{EncodingConfig, PhaseNorm, TapaConfig};
/// let config = EncodingConfig::Tapa(TapaConfig {
///     phase_norm: Some(PhaseNorm { gain: 0.3, learned: false }),
///     ..TapaConfig::default()
/// });
/// # let _ = config;
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TapaConfig {
    /// Share of the head that is amplitude; `theta · head_dim` must be a whole number of coordinates in
    /// 1..head_dim.
    pub theta: f64,
    /// Exponent of the distance, above 0. The greater, the faster the phase turns with distance.
    pub alpha: f64,
    /// What makes the phase of q_P and k_P.
    pub phase: PhaseForm,
    /// Normalisation of q_P and k_P; `None` is the paper's definition.
    pub phase_norm: Option<PhaseNorm>,
}

impl Default for TapaConfig {
    fn default() -> Self {
        Self {
            theta: 0.5,
            alpha: 0.1,
            phase: PhaseForm::Quadratic,
            phase_norm: None,
        }
    }
}

/// What makes the phase φ of q_P and k_P.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PhaseForm {
    /// φ = q_P·k_P/√D_P (eq. 12).
    #[default]
    Quadratic,
    /// φ = (Σ q_P + Σ k_P)/√D_P (eq. 16), an ablation of the paper.
    Linear,
}

/// Brings the phase parts to a common length: q_P ← g·q_P/rms(q_P) and k_P likewise, with
/// rms(x) = √(mean(x²) + 10⁻⁶).
///
/// This is not in the paper. As defined there the phase is unbounded, and so is its gradient; here a quadratic phase
/// stays within g²·√D_P turns (times \|m−n\|^α), a linear one within 2g·√D_P, whatever the projections do.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PhaseNorm {
    /// The gain g, above 0; where it is learned, what it starts from.
    pub gain: f64,
    /// Whether each layer learns a gain for each query head and each key/value head, in place of one constant.
    pub learned: bool,
}

impl Default for PhaseNorm {
    fn default() -> Self {
        Self {
            gain: 0.3,
            learned: false,
        }
    }
}

/// Token-aware phase attention.
///
/// With [`PhaseNorm::learned`] its weights are `layers.{i}.self_attn.phase_gain_q` (H) and
/// `layers.{i}.self_attn.phase_gain_k` (G); else it has none.
#[derive(Debug)]
pub struct Tapa {
    config: TapaConfig,
    head_dim: usize,
    amp_dim: usize,
    /// Of each layer.
    gains: Vec<Option<Gains>>,
}

/// What multiplies the normalised phase parts of one layer.
#[derive(Debug)]
struct Gains {
    q: Gain,
    k: Gain,
}

#[derive(Debug)]
enum Gain {
    Fixed(f64),
    /// One for each head.
    Learned(Tensor),
}

/// Which side of the score a head is on.
#[derive(Clone, Copy)]
enum Side {
    Query,
    Key,
}

/// Under the root of the mean square: a phase part of zeros stays one.
const EPSILON: f64 = 1e-6;

impl Tapa {
    /// TAPA for a model of these sizes.
    ///
    /// # Errors
    /// When `theta · head_dim` is not a whole number in 1..head_dim, `alpha` or the gain is not a finite number
    /// above 0, max_positions^alpha is beyond f32, or a weight is missing or has another shape.
    pub fn new(config: &TapaConfig, dims: &ModelDims, vb: VarBuilder) -> Result<Self> {
        let TapaConfig {
            theta,
            alpha,
            phase_norm,
            ..
        } = *config;
        if !(alpha.is_finite() && alpha > 0.) {
            bail!("tapa: alpha {alpha} must be finite and above 0")
        }
        let farthest = dims.max_positions as f64;
        if farthest.powf(alpha) > f64::from(f32::MAX) {
            bail!("tapa: alpha {alpha} is too large: {farthest} tokens to its power overflow f32")
        }
        let gains = (0..dims.layers)
            .map(|layer| {
                phase_norm
                    .map(|norm| Gains::new(norm, layer, dims, &vb))
                    .transpose()
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            config: config.clone(),
            head_dim: dims.head_dim,
            amp_dim: amplitude_width(theta, dims.head_dim)?,
            gains,
        })
    }

    /// Normalises the phase part, and for a linear phase sums it into the augmented vector of this side.
    fn encode_side(&self, x: Tensor, gain: Option<&Gain>, side: Side) -> Result<Tensor> {
        let (b, heads, t, width) = x.dims4()?;
        if width != self.head_dim {
            bail!(
                "tapa: heads are {width} wide, the encoding was built for {}; q or k {:?}",
                self.head_dim,
                x.dims()
            )
        }
        #[cfg(feature = "cuda")]
        if let (PhaseForm::Quadratic, Some(gain)) = (self.config.phase, gain) {
            if gpu::takes(&x, gain) {
                return gpu::normalise(&x, gain, self.amp_dim);
            }
        }
        let dtype = x.dtype();
        let accumulate = match dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        // Contiguous parts, because joining strided ones would leave the head as the outermost dimension.
        let amplitude = x.narrow(3, 0, self.amp_dim)?.contiguous()?;
        let phase = x
            .narrow(3, self.amp_dim, width - self.amp_dim)?
            .to_dtype(accumulate)?;
        let phase = match gain {
            Some(gain) => gain.normalise(&phase)?,
            None => phase,
        };
        let parts = match self.config.phase {
            PhaseForm::Quadratic => vec![amplitude, phase.to_dtype(dtype)?.contiguous()?],
            PhaseForm::Linear => {
                let sums = split(&phase.sum_keepdim(3)?, dtype)?;
                let ones = Tensor::ones((b, heads, t, sums.len()), dtype, x.device())?;
                let mut parts = vec![amplitude];
                match side {
                    Side::Query => parts.extend(sums.into_iter().chain([ones])),
                    Side::Key => parts.extend([ones].into_iter().chain(sums)),
                }
                parts
            }
        };
        Tensor::cat(&parts, 3)
    }
}

impl Encoding for Tapa {
    fn config(&self) -> EncodingConfig {
        EncodingConfig::Tapa(self.config.clone())
    }

    fn updates(&self, _layer: usize) -> bool {
        false
    }

    fn encode(&self, layer: usize, qkv: Qkv, _state: &PosState) -> Result<Qkv> {
        let Some(gains) = self.gains.get(layer) else {
            bail!("tapa: layer {layer} of {}", self.gains.len())
        };
        if gains.is_none() && self.config.phase == PhaseForm::Quadratic {
            return Ok(qkv);
        }
        let Qkv { q, k, v } = qkv;
        let (q_gain, k_gain) = (
            gains.as_ref().map(|gains| &gains.q),
            gains.as_ref().map(|gains| &gains.k),
        );
        Ok(Qkv {
            q: self.encode_side(q, q_gain, Side::Query)?,
            k: self.encode_side(k, k_gain, Side::Key)?,
            v,
        })
    }

    fn score(&self, _layer: usize) -> Score {
        let phase_dim = self.head_dim - self.amp_dim;
        Score::Phase {
            amp_dim: self.amp_dim,
            alpha: self.config.alpha,
            phase_scale: Some(1. / (phase_dim as f64).sqrt()),
        }
    }
}

impl Gains {
    fn new(norm: PhaseNorm, layer: usize, dims: &ModelDims, vb: &VarBuilder) -> Result<Self> {
        let PhaseNorm { gain, learned } = norm;
        if !(gain.is_finite() && gain > 0.) {
            bail!("tapa: the gain of the phase norm, {gain}, must be finite and above 0")
        }
        if !learned {
            return Ok(Self {
                q: Gain::Fixed(gain),
                k: Gain::Fixed(gain),
            });
        }
        let vb = vb.pp(format!("layers.{layer}.self_attn"));
        let weight = |name: &str, heads: usize| {
            vb.get_with_hints(heads, name, Init::Const(gain))
                .map(Gain::Learned)
        };
        Ok(Self {
            q: weight("phase_gain_q", dims.heads)?,
            k: weight("phase_gain_k", dims.kv_heads)?,
        })
    }
}

impl Gain {
    /// g·x/rms(x) of each head. x (B, heads, T, D_P), f32 or f64.
    fn normalise(&self, x: &Tensor) -> Result<Tensor> {
        let rms = (x.sqr()?.mean_keepdim(3)? + EPSILON)?.sqrt()?;
        let factor = match self {
            Self::Fixed(gain) => (rms.recip()? * *gain)?,
            Self::Learned(gain) => gain
                .to_dtype(x.dtype())?
                .reshape((1, (), 1, 1))?
                .broadcast_div(&rms)?,
        };
        x.broadcast_mul(&factor)
    }
}

/// D_A, where θ·D is a whole number up to the rounding of θ's decimals.
fn amplitude_width(theta: f64, head_dim: usize) -> Result<usize> {
    let exact = theta * head_dim as f64;
    let width = exact.round();
    let possible = width >= 1. && width < head_dim as f64 && (exact - width).abs() < 1e-3;
    if !possible {
        bail!(
            "tapa: theta {theta} of head_dim {head_dim} makes {exact} amplitude coordinates; it must be a whole number in 1..{head_dim}"
        )
    }
    Ok(width as usize)
}

/// Tensors of `dtype` that add up to `sum`: in half precision the rounded sum and what rounding it lost.
fn split(sum: &Tensor, dtype: DType) -> Result<Vec<Tensor>> {
    // The whole gradient goes through `high`. The score depends on high + low alone, so it arrives once, and in full.
    let high = sum.to_dtype(dtype)?;
    if dtype == sum.dtype() {
        return Ok(vec![high]);
    }
    let low = (sum.detach() - high.detach().to_dtype(sum.dtype())?)?.to_dtype(dtype)?;
    Ok(vec![high, low])
}
