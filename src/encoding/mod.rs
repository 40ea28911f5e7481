//! Positional encodings: each one a file, each one an [`Encoding`].
//!
//! Attention never asks which encoding it has. An encoding acts through five hooks, and each does nothing unless
//! the encoding says otherwise:
//!
//! | | embed | begin | encode | score | update |
//! |---|---|---|---|---|---|
//! | [`Nope`] | | | | dot | |
//! | [`Absolute`] | x + table | | | dot | |
//! | [`Rope`] | | angles | rotate q, k | dot | |
//! | [`Alibi`] | | | | linear bias | |
//! | [`Tapa`] | | | phase norm, linear phase | phase | |
//! | [`Tape`] | | angles | rotate q, k; v := \[v, re p, im p\] | dot | new state |
//!
//! A model calls them in this order: [`embed`](Encoding::embed) and [`begin`](Encoding::begin) once, then in each
//! layer [`encode`](Encoding::encode), attention with [`score`](Encoding::score), the feed-forward part, and
//! [`update`](Encoding::update), unless [`updates`](Encoding::updates) says that it does nothing.

mod absolute;
mod alibi;
mod mix;
mod nope;
mod pack;
mod rope;
mod rope_scaling;
mod tapa;
mod tape;

use crate::attend::Score;
use crate::json::{self, Difference};
use crate::positions::Positions;
use crate::rotate::Rotation;
use candle_core::{bail, Error, Result, Tensor};
use candle_nn::VarBuilder;
use rand::Rng;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};
use std::sync::Arc;

pub use absolute::{Absolute, AbsoluteConfig};
pub use alibi::{alibi_slopes, Alibi, AlibiConfig};
pub use nope::Nope;
pub use rope::{Rope, RopeConfig};
pub use rope_scaling::{LongRope, RopeFrequencies, RopeScaling, Yarn};
pub use tapa::{PhaseForm, PhaseNorm, Tapa, TapaConfig};
use tape::is_last_update;
pub(crate) use tape::published_name;
pub use tape::{HeadMixing, StateNorm, Tape, TapeConfig};

/// Projected queries, keys and values of one layer.
#[derive(Debug, Clone)]
pub struct Qkv {
    /// (B, H, T, D).
    pub q: Tensor,
    /// (B, G, T, D).
    pub k: Tensor,
    /// (B, G, T, E).
    pub v: Tensor,
}

/// What travels from layer to layer: where the tokens stand, and how their heads are turned.
#[derive(Debug, Clone)]
pub struct PosState {
    /// Where this call's tokens stand.
    pub positions: Positions,
    /// The rotation of q and k, for encodings that rotate.
    pub rotation: Option<Rotation>,
}

/// Circumstances of one forward pass.
#[derive(Default)]
pub struct Ctx<'a> {
    /// Whether the model is being trained.
    pub train: bool,
    /// Source of what training draws at random (TAPE's shift of all positions). Without one nothing is drawn,
    /// nor by a [`Llama`](crate::Llama) with a cache, whose calls must agree.
    pub rng: Option<&'a mut dyn Rng>,
    /// Number of tokens that the whole generation will reach, its prompt included. RoPE scalings whose
    /// frequencies depend on the length (dynamic, longrope) fix them by it, so that keys in a cache and later
    /// queries agree. Nothing remembers it: give the same in every call of a generation.
    pub planned_len: Option<usize>,
}

/// The sizes an encoding is built for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelDims {
    /// Model width C.
    pub width: usize,
    /// Query heads H.
    pub heads: usize,
    /// Key/value heads G.
    pub kv_heads: usize,
    /// Head width D.
    pub head_dim: usize,
    /// Number of layers.
    pub layers: usize,
    /// Longest sequence the model is configured for, in tokens.
    pub max_positions: usize,
}

/// A positional encoding: hooks that a transformer calls, each a no-op by default.
///
/// Implement this for an encoding of your own and give it to `Llama::with_encoding`.
pub trait Encoding: Send + Sync {
    /// What this encoding is: what a model's `config.json` says of it, and what a checkpoint compares when a run goes on.
    /// One of the caller's own is an [`EncodingConfig::Custom`] with its name and its parameters in the description, all
    /// by which it may differ from another. As long as it does not say, a model with it computes and trains, but neither the
    /// model nor a checkpoint can be saved, only its weights. An encoding that wraps another passes this on where it does
    /// not change what is computed; else its description can hold the other's:
    /// `json!({"name": "mine", "inner": self.inner.config()})`.
    fn config(&self) -> EncodingConfig {
        EncodingConfig::Custom {
            description: Value::Null,
        }
    }

    /// Adds to the token embeddings.
    ///
    /// # Shapes
    /// x (B, T, C) → (B, T, C).
    ///
    /// # Errors
    /// When shapes do not fit or a position is beyond a table.
    fn embed(&self, x: &Tensor, _positions: &Positions) -> Result<Tensor> {
        Ok(x.clone())
    }

    /// Makes the state that the first layer starts from, once per forward pass.
    ///
    /// # Shapes
    /// x (B, T, C), the embedded tokens: it tells the batch, dtype and device.
    ///
    /// # Errors
    /// When the positions do not fit.
    fn begin(&self, _x: &Tensor, positions: &Positions, _ctx: &mut Ctx) -> Result<PosState> {
        Ok(PosState {
            positions: positions.clone(),
            rotation: None,
        })
    }

    /// Changes a layer's queries, keys and values before they are cached and attended to. The value may become
    /// wider; what attention returns beyond the model's own value width comes back in [`update`](Self::update).
    ///
    /// # Errors
    /// When shapes do not fit.
    fn encode(&self, _layer: usize, qkv: Qkv, _state: &PosState) -> Result<Qkv> {
        Ok(qkv)
    }

    /// The score of a layer.
    fn score(&self, _layer: usize) -> Score {
        Score::Dot
    }

    /// Whether [`update`](Self::update) does anything behind this layer. An encoding without one may say that it does not:
    /// then a model need not hold the feed-forward part's output apart from the stream, and trains faster. Where this is
    /// false `update` is not called, even if there is one. An encoding that wraps another passes this on.
    fn updates(&self, _layer: usize) -> bool {
        true
    }

    /// Makes the next layer's state. It is called behind the last layer too, where nobody reads what it returns, and again
    /// where a block is recomputed: it must give the same then.
    ///
    /// # Shapes
    /// `carried` (B, H, T, E − D): what attention averaged beyond the model's own values, where
    /// [`encode`](Self::encode) widened them. `mlp_out` (B, T, C): the feed-forward part's output before it is
    /// added to the stream.
    ///
    /// # Errors
    /// When shapes do not fit.
    fn update(
        &self,
        _layer: usize,
        state: PosState,
        _carried: Option<&Tensor>,
        _mlp_out: &Tensor,
    ) -> Result<PosState> {
        Ok(state)
    }
}

/// An encoding with its parameters, as it is saved in a model's `config.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum EncodingConfig {
    /// None at all.
    Nope,
    /// A table added to the embeddings.
    Absolute(AbsoluteConfig),
    /// Rotary, with every length extension.
    Rope(RopeConfig),
    /// Linear biases.
    Alibi(AlibiConfig),
    /// Token-aware phase attention.
    Tapa(TapaConfig),
    /// Contextualized equivariant encoding.
    Tape(TapeConfig),
    /// One of the caller's own, which [`Encoding::config`] describes and [`Llama::with_encoding`](crate::Llama::with_encoding)
    /// takes.
    Custom {
        /// What tells it from any other, such as `json!({"name": "interleaved", "every": 2})` (of the crate serde_json);
        /// null, or empty, where it does not say. At most 64 levels deep and 1 MB as text. JSON has no NaN or infinity:
        /// `json!` makes null of them.
        #[serde(serialize_with = "sorted")]
        description: Value,
    },
}

/// Deepest and longest description of an encoding.
pub(crate) const DEEPEST: usize = 64;
const LONGEST: usize = 1_000_000;

fn sorted<S: Serializer>(value: &Value, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    json::sorted(value).serialize(serializer)
}

fn not_ours(description: &Value) -> Error {
    Error::msg(format!(
        "the encoding {} is not of this crate: its own program builds it, for Llama::with_encoding or \
         ModelFolder::load_with",
        json::brief(description)
    ))
}

impl EncodingConfig {
    /// Builds the encoding, with its weights from `vb`: the place where a model's own tensors are named
    /// (`layers.0.…`, `embed_tokens.…`).
    ///
    /// # Errors
    /// When a parameter is out of range for `dims`, a weight is missing or has another shape, or this is
    /// [`Custom`](Self::Custom): nobody here knows how to build that.
    pub fn build(&self, dims: &ModelDims, vb: VarBuilder) -> Result<Arc<dyn Encoding>> {
        let ModelDims {
            width,
            heads,
            kv_heads,
            head_dim,
            layers,
            ..
        } = *dims;
        if [width, heads, kv_heads, head_dim, layers].contains(&0) || heads % kv_heads != 0 {
            bail!("encoding: sizes must be above 0 and kv_heads divide heads; got {dims:?}")
        }
        Ok(match self {
            Self::Nope => Arc::new(Nope),
            Self::Absolute(config) => Arc::new(Absolute::new(config, dims, vb)?),
            Self::Rope(config) => Arc::new(Rope::new(config, dims)?),
            Self::Alibi(config) => Arc::new(Alibi::new(config, dims)?),
            Self::Tapa(config) => Arc::new(Tapa::new(config, dims, vb)?),
            Self::Tape(config) => Arc::new(Tape::new(config, dims, vb)?),
            Self::Custom { description } => return Err(not_ours(description)),
        })
    }

    /// The fields by which transformers' LLaMA states this encoding; `None` where it has no such encoding.
    pub(crate) fn to_hf(&self, dims: &ModelDims) -> Option<Map<String, Value>> {
        match self {
            Self::Rope(config) => config.to_hf(dims),
            _ => None,
        }
    }

    /// # Errors
    /// When this is an encoding of the caller's own.
    pub(crate) fn check_ours(&self) -> Result<()> {
        match self {
            Self::Custom { description } => Err(not_ours(description)),
            _ => Ok(()),
        }
    }

    /// # Errors
    /// When an encoding that says this of itself is another: names the first difference.
    pub(crate) fn check_same(&self, said: &Self) -> Result<()> {
        let value = |config| serde_json::to_value(config).map_err(Error::wrap);
        let difference = json::difference("encoding", &value(self)?, &value(said)?);
        if let Some(Difference { place, one, other }) = difference {
            bail!(
                "the encoding given is not the configuration's: {place} is {one} in the configuration, {other} in what \
                 Encoding::config says of the one given"
            )
        }
        match self {
            // Its numbers were compared by what they are.
            Self::Custom { .. } => Ok(()),
            _ if self == said => Ok(()),
            // JSON has one word for NaN and infinities.
            _ => bail!("the encoding given, {said:?}, is not the configuration's, {self:?}"),
        }
    }

    /// # Errors
    /// When the description of an encoding of the caller's own is beyond what files hold.
    pub(crate) fn check_description(&self) -> Result<()> {
        let Self::Custom { description } = self else {
            return Ok(());
        };
        let depth = json::depth(description);
        if depth > DEEPEST {
            bail!("encoding: its description is {depth} levels deep, at most {DEEPEST} are kept")
        }
        let bytes = description.to_string().len();
        if bytes > LONGEST {
            bail!("encoding: its description has {bytes} bytes, at most {LONGEST} are kept")
        }
        Ok(())
    }

    /// # Errors
    /// When this is an encoding of the caller's own that does not say what it is.
    pub(crate) fn check_named(&self) -> Result<()> {
        let anonymous = match self {
            Self::Custom { description } => match description {
                Value::Null => true,
                Value::String(text) => text.is_empty(),
                Value::Array(values) => values.is_empty(),
                Value::Object(map) => map.is_empty(),
                Value::Bool(_) | Value::Number(_) => false,
            },
            _ => false,
        };
        if anonymous {
            bail!(
                "the model's encoding is the caller's own and does not say what it is, so what is saved could be taken for \
                 another model; implement Encoding::config (the weights alone can be saved by SeededVars::save)"
            )
        }
        Ok(())
    }

    /// Whether published checkpoints of a model of so many layers hold a tensor of this name that no layer reads.
    pub(crate) fn is_unread(&self, name: &str, layers: usize) -> bool {
        match self {
            Self::Tape(_) => is_last_update(name, layers),
            _ => false,
        }
    }
}
