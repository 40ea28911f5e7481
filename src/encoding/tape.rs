//! Contextualized equivariant positional encoding, TAPE (Zhu et al., "Rethinking Addressing in Language Models via
//! Contextualized Equivariant Positional Encoding", ICML 2025, arXiv 2501.00712), as its published code computes it.
//!
//! | symbol | meaning |
//! |---|---|
//! | p (B, G, T, D/2) | the state: one complex number for each token, key/value head and channel pair |
//! | p̃ | its average over the tokens seen, with attention's own weights |
//! | m (B, T, C) | output of the layer's feed-forward part |
//! | γ (G) | how much of p̃ each head takes over |
//! | S | position size, the width in which heads are mixed |
//!
//! Each token's state starts as RoPE's e^{i·t·ω_j} and changes from layer to layer:
//!
//! 1. q and k are turned (and stretched, p need not have modulus 1) by p.
//! 2. p̃ = softmax(q·k/√D)·p. The state rides behind the values through one call of attention, \[v | re p | im p\],
//!    and with them into a KV cache: a token's state depends on earlier tokens only.
//! 3. p ← p + η·γ_g·p̃, the attention update.
//! 4. p ← p + η·W_down\[SiLU(W_x m) ⊙ (W_up p)\] over the heads, the token-wise update.
//!
//! Both updates act on the two axes of a complex number alike, so turning every p by a common angle, or moving
//! all tokens by the same distance, changes no output. With γ and W_up zero, as they start, the model is RoPE's.
//!
//! Deviations from the published code:
//! - It stores cosines and sines twice, once for each half of the head, and updates both alike; here once.
//! - Its H × H matrix of the attention update acts by its row sums alone: here a vector γ, and such a matrix is read as its
//!   row sums. [`HeadMixing::Full`] mixes heads as the paper writes it.
//! - The last layer's update is not computed and has no weights, since no layer reads its state.
//! - Grouped heads: a key/value head has one state, which its query heads share; p̃ is the mean of theirs.
//! - η and [`StateNorm::Unit`], switches for the two updates, every scaling of RoPE and caching are new.

#[cfg(feature = "cuda")]
pub(super) mod gpu;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod launch;

use super::mix::mix_heads;
use super::pack::pack_value;
use super::{Ctx, Encoding, EncodingConfig, ModelDims, PosState, Qkv, RopeConfig};
use crate::positions::Positions;
use crate::rotate::{rotate, Layout, Rotation};
use candle_core::{bail, DType, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use rand::RngExt;
use serde::{Deserialize, Serialize};

/// Name of the published weights of the attention update, in a layer.
const MATRIX: &str = "post_attention_linear.weight";
/// Name of the gains in their place.
const GAIN: &str = "post_attention_gain";

/// Parameters of TAPE. The default is that of the published code.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TapeConfig {
    /// The state that tokens start from: any scaling, the whole head, half-split layout.
    pub rope: RopeConfig,
    /// Width S in which the token-wise update mixes heads. The default 48 is the paper's, for 12 heads.
    pub position_size: usize,
    /// How the attention update mixes heads.
    pub mixing: HeadMixing,
    /// Whether states take over the average of the states attended to.
    pub attention_update: bool,
    /// Whether a token's features change its state.
    pub token_update: bool,
    /// What keeps the modulus of states in bounds.
    pub norm: StateNorm,
    /// Factor η of both updates.
    pub step: f64,
    /// Whether training moves all tokens of a call by a distance drawn from 0..=2·max_positions, by [`Ctx::rng`].
    /// Outputs do not depend on it but for rounding. It is not drawn for sequences longer than max_positions, with
    /// frequencies that depend on the length (dynamic, longrope), nor by a [`Llama`](crate::Llama) with a cache.
    pub random_shift: bool,
}

impl Default for TapeConfig {
    fn default() -> Self {
        Self {
            rope: RopeConfig::default(),
            position_size: 48,
            mixing: HeadMixing::PerHead,
            attention_update: true,
            token_update: true,
            norm: StateNorm::None,
            step: 1.,
            random_shift: true,
        }
    }
}

/// How the attention update mixes heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeadMixing {
    /// p_g ← p_g + η·γ_g·p̃_g: the published code.
    #[default]
    PerHead,
    /// p_g ← p_g + η·Σ_g' W\[g, g'\]·p̃_g': the paper's text.
    Full,
}

/// What keeps the modulus of states in bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateNorm {
    /// Nothing: the published code. With random weights of unit scale the modulus grew to hundreds in 12 layers.
    #[default]
    None,
    /// After each layer's update p ← μ·p/max(|p|, 10⁻⁶), where μ is the modulus states start with: 1, or the attention
    /// scaling of YaRN and LongRoPE. Zero updates then keep RoPE's outputs up to rounding, not bit for bit.
    Unit,
}

/// Contextualized equivariant positional encoding.
///
/// Its weights, for every layer but the last, under `layers.{i}`: `pe.up_proj.weight` (S, G),
/// `pe.x_proj.weight` (S, C), `pe.down_proj.weight` (G, S) of the token-wise update, and of the attention update
/// `post_attention_gain` (G), or in its place the published `post_attention_linear.weight` (G, G), whose row sums are the
/// gains. With [`HeadMixing::Full`] it is `post_attention_linear.weight` (G, G) as it stands.
#[derive(Debug)]
pub struct Tape {
    config: TapeConfig,
    dims: ModelDims,
    /// The modulus that states start with.
    modulus: f64,
    /// Of every layer but the last.
    updates: Vec<Update>,
}

/// The weights that make the next layer's state.
#[derive(Debug)]
struct Update {
    attention: Option<AttentionUpdate>,
    token: Option<TokenUpdate>,
}

#[derive(Debug)]
enum AttentionUpdate {
    /// γ, (G).
    Gain(Tensor),
    /// A matrix (G, G) of the published code, which acts by its row sums.
    RowSums(Tensor),
    /// W, (G, G).
    Mix(Tensor),
}

#[derive(Debug)]
struct TokenUpdate {
    /// W_up, (S, G).
    up: Tensor,
    /// W_x, (S, C).
    features: Tensor,
    /// W_down, (G, S).
    down: Tensor,
}

impl Tape {
    /// TAPE for a model of these sizes.
    ///
    /// # Errors
    /// When the head is not turned as a whole in half-split layout, its width is odd, a parameter is out of range,
    /// or a weight is missing or has another shape.
    pub fn new(config: &TapeConfig, dims: &ModelDims, vb: VarBuilder) -> Result<Self> {
        let TapeConfig {
            rope,
            position_size,
            step,
            ..
        } = config;
        if !dims.head_dim.is_multiple_of(2) {
            bail!(
                "tape: head_dim {} must be even: a state turns pairs of coordinates",
                dims.head_dim
            )
        }
        if rope.partial_rotary_factor != 1. || rope.layout != Layout::Half {
            bail!(
                "tape: states turn the whole head in half-split layout; rope has partial_rotary_factor {} and layout {:?}",
                rope.partial_rotary_factor,
                rope.layout
            )
        }
        if *position_size == 0 {
            bail!("tape: position_size must be at least 1")
        }
        if !step.is_finite() {
            bail!("tape: step {step} is not finite")
        }
        let frequencies = rope.frequencies(dims.head_dim, dims.max_positions, None)?;
        let updates = (1..dims.layers)
            .map(|next| Update::new(config, dims, vb.pp(format!("layers.{}", next - 1))))
            .collect::<Result<_>>()?;
        Ok(Self {
            config: config.clone(),
            dims: *dims,
            modulus: frequencies.attention_scaling,
            updates,
        })
    }

    /// The weights that make the state after `layer`; none after the last.
    fn update_after(&self, layer: usize) -> Result<Option<&Update>> {
        if layer >= self.dims.layers {
            bail!("tape: layer {layer} of {}", self.dims.layers)
        }
        Ok(self.updates.get(layer))
    }

    /// The real and imaginary parts of a layer's state.
    fn parts<'a>(&self, state: &'a PosState) -> Result<&'a Rotation> {
        let Some(rotation) = &state.rotation else {
            bail!("tape: the state has no rotation; it must come from Tape::begin")
        };
        let Rotation { cos, sin } = rotation;
        let (heads, pairs) = (self.dims.kv_heads, self.dims.head_dim / 2);
        let fits = matches!(cos.dims(), [_, g, _, p] if (*g, *p) == (heads, pairs));
        if !fits || sin.dims() != cos.dims() {
            bail!(
                "tape: a state must be (B, {heads}, T, {pairs}), got real parts {:?} and imaginary parts {:?}",
                cos.dims(),
                sin.dims()
            )
        }
        Ok(rotation)
    }

    /// The next layer's state where kernels make it: a launch for each part, and one more for each with
    /// [`StateNorm::Unit`].
    #[cfg(feature = "cuda")]
    fn update_on_gpu(
        &self,
        layer: usize,
        state: &Rotation,
        carried: Option<&Tensor>,
        mlp_out: &Tensor,
    ) -> Result<Option<Rotation>> {
        let Rotation { cos, sin } = state;
        let (true, Some(Update { attention, token })) =
            (cos.device().is_cuda(), self.update_after(layer)?)
        else {
            return Ok(None);
        };
        let part = |imaginary: bool| gpu::UpdatePart {
            imaginary,
            diagonal: attention.as_ref().is_none_or(AttentionUpdate::is_diagonal),
            has_matrices: token.is_some(),
        };
        if !part(false).takes(cos, attention.is_some())? {
            return Ok(None);
        }
        let carried = match attention {
            Some(_) => Some(check_carried(carried, cos, layer)?),
            None => None,
        };
        let matrices = self.matrices(attention.as_ref(), token.as_ref(), cos, mlp_out)?;
        let re = part(false).apply(cos, carried, &matrices)?;
        let im = part(true).apply(sin, carried, &matrices)?;
        Ok(Some(match self.config.norm {
            StateNorm::None => Rotation { cos: re, sin: im },
            StateNorm::Unit => Rotation {
                cos: gpu::with_modulus(self.modulus, false, &re, &im)?,
                sin: gpu::with_modulus(self.modulus, true, &re, &im)?,
            },
        }))
    }

    /// What both updates multiply with, η included: each token's own matrix, then that between states and averages;
    /// (B·T, G·G) and one more row, or either alone. m (B,T,C), the state (B,G,T,D/2).
    ///
    /// One product makes all: the gates have one more row and column, which meet in a 1, and the factors one more row.
    #[cfg(feature = "cuda")]
    fn matrices(
        &self,
        attention: Option<&AttentionUpdate>,
        token: Option<&TokenUpdate>,
        state: &Tensor,
        m: &Tensor,
    ) -> Result<Tensor> {
        let (dtype, g) = (state.dtype(), state.dim(1)?);
        let between_states = match attention {
            Some(attention) => Some(
                (attention.between_states(dtype, g)? * self.config.step)?.reshape((1, g * g))?,
            ),
            None => None,
        };
        let Some(token) = token else {
            return match between_states {
                Some(matrix) => Ok(matrix),
                None => bail!("tape: a layer without an update has no matrices"),
            };
        };
        let gates = token.gates(m, state)?; // (B·T,S)
        let size = gates.dim(1)?;
        // Rows of fours, which products read at once.
        let padded = (size + usize::from(between_states.is_some())).next_multiple_of(4);
        let mut factors = vec![(token.factors(dtype)? * self.config.step)?];
        factors.extend(between_states.clone());
        let missing = padded - size - usize::from(between_states.is_some());
        if missing > 0 {
            factors.push(Tensor::zeros((missing, g * g), dtype, state.device())?);
        }
        gpu::gate(&gates, padded, between_states.is_some())?.matmul(&Tensor::cat(&factors, 0)?)
    }

    /// Draws how far training moves all tokens of a call.
    fn draw_shift(&self, len: usize, ctx: &mut Ctx) -> Option<i64> {
        let max = self.dims.max_positions;
        let rng = ctx.rng.as_mut()?;
        let wanted = self.config.random_shift
            && ctx.train
            && len <= max
            && !self.config.rope.scaling.depends_on_length();
        let limit = i64::try_from(max).ok()?.checked_mul(2)?;
        wanted.then(|| rng.random_range(0..=limit))
    }
}

impl Encoding for Tape {
    fn config(&self) -> EncodingConfig {
        EncodingConfig::Tape(self.config.clone())
    }

    fn begin(&self, x: &Tensor, positions: &Positions, ctx: &mut Ctx) -> Result<PosState> {
        let (batch, tokens, _) = x.dims3()?;
        if tokens != positions.len() {
            bail!("tape: {} positions for x {:?}", positions.len(), x.dims())
        }
        let shifted = match self.draw_shift(tokens, ctx) {
            Some(shift) => shift_tokens(positions, shift)?,
            None => positions.clone(),
        };
        let Rotation { cos, sin } = self.config.rope.rotation(
            &self.dims,
            &shifted,
            batch,
            x.dtype(),
            x.device(),
            ctx.planned_len,
        )?;
        let shape = (batch, self.dims.kv_heads, tokens, self.dims.head_dim / 2);
        Ok(PosState {
            positions: positions.clone(),
            rotation: Some(Rotation {
                cos: cos.broadcast_as(shape)?,
                sin: sin.broadcast_as(shape)?,
            }),
        })
    }

    fn encode(&self, layer: usize, qkv: Qkv, state: &PosState) -> Result<Qkv> {
        let rotation = self.parts(state)?;
        let Qkv { q, k, v } = qkv;
        let averaged = self
            .update_after(layer)?
            .is_some_and(|update| update.attention.is_some());
        Ok(Qkv {
            q: rotate(&q, rotation, Layout::Half)?,
            k: rotate(&k, rotation, Layout::Half)?,
            v: match averaged {
                true => pack_value(&v, &rotation.cos, &rotation.sin)?,
                false => v,
            },
        })
    }

    fn updates(&self, layer: usize) -> bool {
        // An error is for `update` to tell.
        !matches!(
            self.update_after(layer),
            Ok(None)
                | Ok(Some(Update {
                    attention: None,
                    token: None
                }))
        )
    }

    fn update(
        &self,
        layer: usize,
        state: PosState,
        carried: Option<&Tensor>,
        mlp_out: &Tensor,
    ) -> Result<PosState> {
        let Some(Update { attention, token }) = self.update_after(layer)? else {
            return Ok(state);
        };
        if attention.is_none() && token.is_none() {
            return Ok(state);
        }
        let rotation = self.parts(&state)?;
        #[cfg(feature = "cuda")]
        if let Some(rotation) = self.update_on_gpu(layer, rotation, carried, mlp_out)? {
            return Ok(PosState {
                positions: state.positions,
                rotation: Some(rotation),
            });
        }
        let Rotation { cos, sin } = rotation;
        let (b, g, t, pairs) = cos.dims4()?;
        let (mut re, mut im) = (cos.clone(), sin.clone());
        if let Some(attention) = attention {
            let carried = check_carried(carried, cos, layer)?;
            let matrix = attention.matrix(cos.dtype(), g, carried.dim(1)?)?;
            let matrix = (matrix * self.config.step)?.broadcast_left((b, t))?;
            re = (re + mix_heads(&carried.narrow(3, 0, pairs)?, &matrix)?)?;
            im = (im + mix_heads(&carried.narrow(3, pairs, pairs)?, &matrix)?)?;
        }
        if let Some(token) = token {
            let matrix = (token.matrix(mlp_out, cos)? * self.config.step)?;
            re = (&re + mix_heads(&re, &matrix)?)?;
            im = (&im + mix_heads(&im, &matrix)?)?;
        }
        let rotation = match self.config.norm {
            StateNorm::None => Rotation { cos: re, sin: im },
            StateNorm::Unit => with_modulus(self.modulus, &re, &im)?,
        };
        Ok(PosState {
            positions: state.positions,
            rotation: Some(rotation),
        })
    }
}

impl Update {
    fn new(config: &TapeConfig, dims: &ModelDims, vb: VarBuilder) -> Result<Self> {
        let (heads, size) = (dims.kv_heads, config.position_size);
        let normal = Init::Randn {
            mean: 0.,
            stdev: 0.02,
        };
        let zeros = Init::Const(0.);
        let token = || -> Result<TokenUpdate> {
            let vb = vb.pp("pe");
            Ok(TokenUpdate {
                up: vb.get_with_hints((size, heads), "up_proj.weight", zeros)?,
                features: vb.get_with_hints((size, dims.width), "x_proj.weight", normal)?,
                down: vb.get_with_hints((heads, size), "down_proj.weight", normal)?,
            })
        };
        let attention = || -> Result<AttentionUpdate> {
            let matrix = || vb.get_with_hints((heads, heads), MATRIX, zeros);
            // The builder of a new model knows neither name yet, and makes a gain.
            let published = vb.contains_tensor(MATRIX) && !vb.contains_tensor(GAIN);
            Ok(match config.mixing {
                HeadMixing::Full => AttentionUpdate::Mix(matrix()?),
                HeadMixing::PerHead if published => AttentionUpdate::RowSums(matrix()?),
                HeadMixing::PerHead => {
                    AttentionUpdate::Gain(vb.get_with_hints(heads, GAIN, zeros)?)
                }
            })
        };
        Ok(Self {
            attention: config.attention_update.then(attention).transpose()?,
            token: config.token_update.then(token).transpose()?,
        })
    }
}

/// The published name of what stands in for a `post_attention_gain`: a matrix, whose row sums are the gains.
pub(crate) fn published_name(name: &str) -> Option<String> {
    let layer = name.strip_suffix(GAIN)?;
    Some(format!("{layer}{MATRIX}"))
}

/// Whether this is a weight of the last layer's update, which the published code has and no layer reads.
pub(super) fn is_last_update(name: &str, layers: usize) -> bool {
    let last = format!("model.layers.{}.", layers.saturating_sub(1));
    let rest = name.strip_prefix(&last);
    rest.is_some_and(|rest| rest.starts_with("pe.") || rest == MATRIX)
}

impl AttentionUpdate {
    /// Whether states take over only their own averages.
    #[cfg(feature = "cuda")]
    fn is_diagonal(&self) -> bool {
        !matches!(self, Self::Mix(_))
    }

    /// How much of each group's mean average each state takes over, (G,G).
    fn between_states(&self, dtype: DType, g: usize) -> Result<Tensor> {
        let diagonal = |gain: &Tensor| -> Result<Tensor> {
            Tensor::eye(g, dtype, gain.device())?.broadcast_mul(&gain.reshape((g, 1))?)
        };
        match self {
            Self::Gain(gain) => diagonal(&gain.to_dtype(dtype)?),
            Self::RowSums(matrix) => diagonal(&matrix.to_dtype(dtype)?.sum(1)?),
            Self::Mix(matrix) => matrix.to_dtype(dtype),
        }
    }

    /// How much of each query head's average each state takes over, (G,H). A state sees the mean of its group.
    fn matrix(&self, dtype: DType, g: usize, h: usize) -> Result<Tensor> {
        let between_states = self.between_states(dtype, g)?;
        if h == g {
            return Ok(between_states);
        }
        let group = h / g;
        (between_states / group as f64)?
            .unsqueeze(2)?
            .broadcast_as((g, g, group))?
            .reshape((g, h))
    }
}

impl TokenUpdate {
    /// W_down·diag(SiLU(W_x m))·W_up of each token, (B,T,G,G) in the state's dtype. m (B,T,C), the state (B,G,T,D/2).
    ///
    /// Its product with the state is the update. Taken the other way round, W_up p first, each token would need S
    /// complex numbers for each pair, and S is a multiple of G.
    fn matrix(&self, m: &Tensor, state: &Tensor) -> Result<Tensor> {
        let (b, g, t, _) = state.dims4()?;
        let gate = self.gates(m, state)?.to_dtype(state.dtype())?.silu()?; // (B·T,S)
        gate.matmul(&self.factors(state.dtype())?)?
            .reshape((b, t, g, g))
    }

    /// W_x m of each token, (B·T,S) in m's dtype.
    fn gates(&self, m: &Tensor, state: &Tensor) -> Result<Tensor> {
        let (b, _, t, _) = state.dims4()?;
        let width = self.features.dim(1)?;
        if m.dims() != [b, t, width] {
            bail!(
                "tape: the feed-forward output must be ({b}, {t}, {width}), got {:?}",
                m.dims()
            )
        }
        let features = self.features.to_dtype(m.dtype())?;
        m.reshape((b * t, width))?.matmul(&features.t()?)
    }

    /// What each gate multiplies: column s of W_down times row s of W_up, (S,G·G).
    fn factors(&self, dtype: DType) -> Result<Tensor> {
        let (size, g) = self.up.dims2()?;
        let down = self.down.to_dtype(dtype)?.t()?.unsqueeze(2)?; // (S,G,1)
        let up = self.up.to_dtype(dtype)?.unsqueeze(1)?; // (S,1,G)
        down.broadcast_mul(&up)?.reshape((size, g * g))
    }
}

/// The averages that attention returned behind its output. state (B,G,T,D/2) → (B,H,T,D).
fn check_carried<'a>(
    carried: Option<&'a Tensor>,
    state: &Tensor,
    layer: usize,
) -> Result<&'a Tensor> {
    let (b, g, t, pairs) = state.dims4()?;
    let Some(carried) = carried else {
        bail!("tape: the update of layer {layer} needs the averaged state that attention returned behind its output")
    };
    let (cb, h, ct, width) = carried.dims4()?;
    if (cb, ct, width) != (b, t, 2 * pairs) || !h.is_multiple_of(g) {
        bail!(
            "tape: the averaged state must be ({b}, H, {t}, {}) with H a multiple of the state's {g} heads, got {:?}",
            2 * pairs,
            carried.dims()
        )
    }
    Ok(carried)
}

/// Stretches every state to the same modulus.
fn with_modulus(modulus: f64, re: &Tensor, im: &Tensor) -> Result<Rotation> {
    // The bound is set before the root, whose slope at 0 is infinite.
    let norm = (re.sqr()? + im.sqr()?)?.maximum(1e-12)?.sqrt()?;
    let factor = (norm.recip()? * modulus)?;
    Ok(Rotation {
        cos: (re * &factor)?,
        sin: (im * &factor)?,
    })
}

/// All tokens but padding, `shift` further on.
fn shift_tokens(positions: &Positions, shift: i64) -> Result<Positions> {
    match positions {
        Positions::Span { start, len } if *start >= 0 => {
            let Some(start) = start.checked_add(shift) else {
                bail!("tape: start {start} + shift {shift} overflows i64")
            };
            Ok(Positions::Span { start, len: *len })
        }
        // A span that begins with padding, whose tokens stay where they are.
        Positions::Span { start, len } => {
            let shifted: Vec<i64> = (0..*len as i64)
                .map(|t| start + t)
                .map(|pos| if pos < 0 { pos } else { pos + shift })
                .collect();
            let pos = Tensor::from_vec(shifted, (1, *len), &candle_core::Device::Cpu)?;
            Positions::explicit(pos, None)
        }
        Positions::Explicit { pos, segment } => {
            let padding = pos.lt(0i64)?;
            let moved = pos.broadcast_add(&Tensor::new(&[shift], pos.device())?)?;
            Positions::explicit(padding.where_cond(pos, &moved)?, segment.clone())
        }
    }
}
