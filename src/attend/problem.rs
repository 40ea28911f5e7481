//! What is asked of attention, checked once: shapes, dtypes, parameters, positions.

use super::{AttendSpec, Precision, Score};
use crate::positions::{PositionTable, Positions};
use candle_core::{bail, DType, Device, Result, Tensor};
use std::sync::Arc;

/// Shape and strides of q, k or v, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operand {
    /// (batch, heads, tokens, width).
    pub dims: [usize; 4],
    /// Distance between neighbours along each dimension.
    pub strides: [usize; 4],
    /// Elements of its memory before the first one; kernels for GPUs ask how it is aligned.
    pub offset: usize,
}

impl Operand {
    /// A contiguous operand.
    pub fn contiguous(dims: [usize; 4]) -> Self {
        let [_, h, t, d] = dims;
        Self {
            dims,
            strides: [h * t * d, t * d, d, 1],
            offset: 0,
        }
    }

    /// Whether its elements lie one behind another: how far apart the elements of a dimension of one would be
    /// matters to nobody.
    pub(super) fn is_contiguous(&self) -> bool {
        let contiguous = Self::contiguous(self.dims);
        let strides = self.strides.iter().zip(contiguous.strides);
        (strides.zip(self.dims))
            .all(|((stride, contiguous), size)| size <= 1 || *stride == contiguous)
    }

    fn of(t: &Tensor, name: &str) -> Result<Self> {
        match (t.dims().try_into(), t.stride().try_into()) {
            (Ok(dims), Ok(strides)) => Ok(Self {
                dims,
                strides,
                offset: t.layout().start_offset(),
            }),
            _ => bail!("attend: {name} must be (batch, heads, tokens, width), got {t:?}"),
        }
    }
}

/// The kind of device, as far as choosing a path needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// The host.
    Cpu,
    /// An NVIDIA GPU of this compute capability, (9, 0) for an H200. `None` where it is unknown: the plan is then that
    /// of a GPU for which there is no kernel.
    Cuda {
        /// Major and minor version.
        cc: Option<(u32, u32)>,
    },
    /// An Apple GPU.
    Metal,
}

/// The shapes, dtype and device of one call: all that [`plan_problem`](super::plan_problem) needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// (B, H, T, D).
    pub q: Operand,
    /// (B, G, S, D).
    pub k: Operand,
    /// (B, G, S, E).
    pub v: Operand,
    /// The dtype of all three.
    pub dtype: DType,
    /// Where they are.
    pub device: DeviceKind,
}

impl Problem {
    /// The problem that these tensors pose.
    ///
    /// # Errors
    /// When a rank is not 4, or dtypes or devices differ.
    pub fn of(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Self> {
        if k.dtype() != q.dtype() || v.dtype() != q.dtype() {
            bail!(
                "attend: q, k and v must share a dtype, got {:?}, {:?} and {:?}",
                q.dtype(),
                k.dtype(),
                v.dtype()
            )
        }
        if !q.device().same_device(k.device()) || !q.device().same_device(v.device()) {
            bail!(
                "attend: q, k and v must be on one device, got {:?}, {:?} and {:?}",
                q.device().location(),
                k.device().location(),
                v.device().location()
            )
        }
        Ok(Self {
            q: Operand::of(q, "q")?,
            k: Operand::of(k, "k")?,
            v: Operand::of(v, "v")?,
            dtype: q.dtype(),
            device: match q.device() {
                Device::Cpu => DeviceKind::Cpu,
                Device::Cuda(device) => DeviceKind::Cuda {
                    cc: compute_capability(device)?,
                },
                Device::Metal(_) => DeviceKind::Metal,
            },
        })
    }

    /// Checks shapes and parameters; says nothing about positions.
    pub(super) fn check(&self, spec: &AttendSpec) -> Result<Dims> {
        let ([b, h, t, d], [kb, g, s, kd], [vb, vg, vs, e]) =
            (self.q.dims, self.k.dims, self.v.dims);
        let shapes = format!(
            "q {:?}, k {:?}, v {:?}",
            self.q.dims, self.k.dims, self.v.dims
        );
        if kb != b || vb != b {
            bail!("attend: batches differ: {b}, {kb} and {vb}; {shapes}")
        }
        if vg != g || vs != s {
            bail!("attend: k and v must share heads and tokens; {shapes}")
        }
        if kd != d {
            bail!("attend: q and k must share their width, got {d} and {kd}; {shapes}")
        }
        if g == 0 || h % g != 0 {
            bail!("attend: k has {g} heads, which must divide q's {h}; {shapes}")
        }
        if d == 0 || e == 0 {
            bail!("attend: widths must be at least 1; {shapes}")
        }
        match self.dtype {
            DType::F32 | DType::F64 | DType::BF16 | DType::F16 => (),
            other => bail!("attend: dtype {other:?} is not supported (f32, f64, bf16, f16 are)"),
        }
        let finite = |name: &str, x: f64| match self.dtype {
            DType::F64 if x.is_finite() => Ok(()),
            DType::F64 => bail!("attend: {name} {x:?} is not finite"),
            _ if (x as f32).is_finite() => Ok(()),
            other => {
                bail!("attend: {name} {x:?} is not finite in f32, in which {other:?} is computed")
            }
        };
        spec.scale.map_or(Ok(()), |x| finite("scale", x))?;
        if spec.window == Some(0) {
            bail!("attend: window 0 lets no query see any key; a window counts the query's own position")
        }
        match &spec.score {
            Score::Dot => (),
            Score::LinearBias { slopes } => {
                if slopes.len() != h {
                    bail!(
                        "attend: {} slopes for {h} query heads; {shapes}",
                        slopes.len()
                    )
                }
                slopes.iter().try_for_each(|x| finite("slope", *x))?;
            }
            Score::Phase {
                amp_dim,
                alpha,
                phase_scale,
            } => {
                if *amp_dim == 0 || *amp_dim >= d {
                    bail!("attend: amp_dim {amp_dim} must be in 1..{d}, the head width; {shapes}")
                }
                if !(alpha.is_finite() && *alpha > 0.) {
                    bail!("attend: alpha {alpha} must be finite and above 0")
                }
                phase_scale.map_or(Ok(()), |x| finite("phase_scale", x))?;
            }
        }
        Ok(Dims {
            b,
            h,
            g,
            t,
            s,
            d,
            e,
        })
    }

    /// The problem with every default filled in.
    pub(super) fn resolve(&self, spec: &AttendSpec) -> Result<Resolved> {
        let dims = self.check(spec)?;
        let Dims { b, t, s, d, .. } = dims;
        let default_span = |len: usize, other: usize| Positions::Span {
            start: other.saturating_sub(len) as i64,
            len,
        };
        let (q, k) = match (&spec.q_positions, &spec.k_positions) {
            (Some(q), Some(k)) => (q.clone(), k.clone()),
            (Some(one), None) | (None, Some(one)) if t == s => (one.clone(), one.clone()),
            (None, None) => (default_span(t, s), default_span(s, t)),
            _ => bail!(
                "attend: with T = {t} queries and S = {s} keys, positions are needed for both or for neither"
            ),
        };
        if q.len() != t || k.len() != s {
            bail!(
                "attend: {} query and {} key positions for T = {t} queries and S = {s} keys",
                q.len(),
                k.len()
            )
        }
        let (q, k) = (q.table(b)?, k.table(b)?);
        if q.has_segments() != k.has_segments() {
            bail!("attend: segments are needed for queries and keys, or for neither")
        }
        let inverse_sqrt = |width: usize| 1. / (width as f64).sqrt();
        let score = match &spec.score {
            Score::Dot => ResolvedScore::Dot {
                scale: spec.scale.unwrap_or(inverse_sqrt(d)),
            },
            Score::LinearBias { slopes } => ResolvedScore::LinearBias {
                scale: spec.scale.unwrap_or(inverse_sqrt(d)),
                slopes: slopes.clone(),
            },
            Score::Phase {
                amp_dim,
                alpha,
                phase_scale,
            } => {
                let phase_scale = phase_scale.unwrap_or(inverse_sqrt(d - amp_dim));
                self.check_turns(*alpha, phase_scale, &q, &k)?;
                ResolvedScore::Phase {
                    amp_dim: *amp_dim,
                    alpha: *alpha,
                    scale: spec.scale.unwrap_or(inverse_sqrt(*amp_dim)),
                    phase_scale,
                }
            }
        };
        Ok(Resolved {
            dims,
            score,
            causal: spec.causal,
            window: spec.window_of_64_bits(),
            q_positions: q,
            k_positions: k,
            precision: spec.precision,
        })
    }

    /// Checks that the factor of the phase, |m − n|^alpha · phase_scale, is finite at the greatest distance there is.
    fn check_turns(
        &self,
        alpha: f64,
        phase_scale: f64,
        q: &PositionTable,
        k: &PositionTable,
    ) -> Result<()> {
        let (Some((q_first, q_last)), Some((k_first, k_last))) = (q.bounds(), k.bounds()) else {
            return Ok(());
        };
        let distance = q_last.abs_diff(k_first).max(k_last.abs_diff(q_first));
        let factor = (distance as f64).powf(alpha) * phase_scale;
        let finite = match self.dtype {
            DType::F64 => factor.is_finite(),
            _ => (factor as f32).is_finite(),
        };
        if !finite {
            bail!(
                "attend: at distance {distance}, |m − n|^{alpha:?} · {phase_scale:?} is not finite in the dtype that {:?} is computed in",
                self.dtype
            )
        }
        Ok(())
    }
}

#[cfg(feature = "cuda")]
fn compute_capability(device: &candle_core::CudaDevice) -> Result<Option<(u32, u32)>> {
    super::cuda::compute_capability(device).map(Some)
}

/// Without the feature there are no kernels to choose; candle may have it all the same.
#[cfg(not(feature = "cuda"))]
fn compute_capability(_: &candle_core::CudaDevice) -> Result<Option<(u32, u32)>> {
    Ok(None)
}

/// The sizes of one call, by the letters of [the module](super).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Dims {
    pub b: usize,
    pub h: usize,
    pub g: usize,
    pub t: usize,
    pub s: usize,
    pub d: usize,
    pub e: usize,
}

/// Shapes need not exist in memory to be asked about, so their products may be too large for a `usize`.
pub(super) fn saturating_product<const N: usize>(factors: [usize; N]) -> usize {
    factors.into_iter().fold(1, usize::saturating_mul)
}

pub(super) fn saturating_sum<const N: usize>(terms: [usize; N]) -> usize {
    terms.into_iter().fold(0, usize::saturating_add)
}

/// [`Score`] with its defaults filled in.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ResolvedScore {
    /// scale · q·k
    Dot { scale: f64 },
    /// scale · q·k − slopes[h] · |m − n|
    LinearBias { scale: f64, slopes: Arc<[f64]> },
    /// scale · q_A·k_A · cos(2π |m − n|^alpha · phase_scale · q_P·k_P)
    Phase {
        amp_dim: usize,
        alpha: f64,
        scale: f64,
        phase_scale: f64,
    },
}

impl ResolvedScore {
    /// The factor of q·k, or of a phase's q_A·k_A.
    pub fn scale(&self) -> f64 {
        match *self {
            Self::Dot { scale } | Self::LinearBias { scale, .. } | Self::Phase { scale, .. } => {
                scale
            }
        }
    }
}

/// One call, checked, with every default filled in: what the dense path and the kernels compute from.
#[derive(Debug, Clone)]
pub(crate) struct Resolved {
    pub dims: Dims,
    pub score: ResolvedScore,
    pub causal: bool,
    /// Positions a query sees, its own included; at least 1.
    pub window: Option<i64>,
    /// T positions a row.
    pub q_positions: PositionTable,
    /// S positions a row.
    pub k_positions: PositionTable,
    /// Of the phase, where a kernel offers a choice.
    pub precision: Precision,
}

impl Resolved {
    /// Whether a query at `m` sees a key at `n`, segments aside.
    #[inline(always)]
    pub fn sees(&self, m: i64, n: i64) -> bool {
        m >= 0
            && n >= 0
            && (!self.causal || n <= m)
            && self.window.is_none_or(|w| (m - n).abs() < w)
    }
}
