//! LLaMA (Touvron et al., arXiv 2302.13971) with any positional encoding.
//!
//! The stream x (B, T, C) starts as token embeddings; each block adds attention and a gated feed-forward part to it,
//! each behind a norm; a last norm and the head make logits (B, T, V). The encoding acts only through its
//! [hooks](Encoding).

use crate::attend::{Backend, Plan, Precision};
use crate::attention::{Attended, Attention};
use crate::cache::{CacheStep, KvCache};
use crate::embedding::{embed, TokenIds};
use crate::encoding::{Ctx, Encoding, EncodingConfig, ModelDims, PosState, RopeConfig};
use crate::feed_forward::FeedForward;
use crate::norm::RmsNorm;
use crate::positions::Positions;
use crate::projection::Projection;
use crate::sum::sum;
use candle_core::{bail, DType, Error, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The sizes of a LLaMA and its encoding; field names as in Hugging Face's `config.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LlamaConfig {
    /// Number of token ids V.
    pub vocab_size: usize,
    /// Model width C.
    pub hidden_size: usize,
    /// Width of the feed-forward part.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Query heads H.
    pub num_attention_heads: usize,
    /// Key/value heads G, a divisor of H.
    pub num_key_value_heads: usize,
    /// Head width D; `None` is C / H.
    #[serde(default)]
    pub head_dim: Option<usize>,
    /// What the norms add to the mean square.
    #[serde(default = "default_rms_norm_eps")]
    pub rms_norm_eps: f64,
    /// Whether the head uses the token embeddings as its weights.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Longest sequence the model is made for, in tokens.
    pub max_position_embeddings: usize,
    /// Number of positions a query sees, its own included; `None` is all of them.
    #[serde(default, alias = "sliding_window")]
    pub window: Option<usize>,
    /// Standard deviation of new weights.
    #[serde(default = "default_initializer_range")]
    pub initializer_range: f64,
    /// The positional encoding.
    pub encoding: EncodingConfig,
}

fn default_rms_norm_eps() -> f64 {
    1e-6
}

fn default_initializer_range() -> f64 {
    0.02
}

impl Default for LlamaConfig {
    /// A small byte-level model with RoPE: 4 layers of width 128, 4 heads, 0.8 million weights.
    fn default() -> Self {
        Self {
            vocab_size: 256,
            hidden_size: 128,
            intermediate_size: 344,
            num_hidden_layers: 4,
            num_attention_heads: 4,
            num_key_value_heads: 4,
            head_dim: None,
            rms_norm_eps: 1e-5,
            tie_word_embeddings: true,
            max_position_embeddings: 2048,
            window: None,
            initializer_range: default_initializer_range(),
            encoding: EncodingConfig::Rope(RopeConfig::default()),
        }
    }
}

impl LlamaConfig {
    /// The sizes that an encoding is built for.
    pub fn dims(&self) -> ModelDims {
        let share = self.hidden_size.checked_div(self.num_attention_heads);
        ModelDims {
            width: self.hidden_size,
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads,
            head_dim: self.head_dim.or(share).unwrap_or(0),
            layers: self.num_hidden_layers,
            max_positions: self.max_position_embeddings,
        }
    }

    /// Checks that the sizes make a model.
    ///
    /// # Errors
    /// When one is 0, does not divide what it must, or a number is out of range.
    pub fn validate(&self) -> Result<()> {
        for (name, size) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim.unwrap_or(1)),
            ("max_position_embeddings", self.max_position_embeddings),
            ("window", self.window.unwrap_or(1)),
        ] {
            if size == 0 {
                bail!("config: {name} must be at least 1")
            }
        }
        let (width, heads) = (self.hidden_size, self.num_attention_heads);
        if self.head_dim.is_none() && width % heads != 0 {
            bail!("config: hidden_size {width} must be a multiple of num_attention_heads {heads} where head_dim is not given")
        }
        if heads % self.num_key_value_heads != 0 {
            bail!(
                "config: num_attention_heads {heads} must be a multiple of num_key_value_heads {}",
                self.num_key_value_heads
            )
        }
        let head_dim = self.dims().head_dim;
        for (name, (rows, columns)) in [
            ("vocab_size · hidden_size", (self.vocab_size, width)),
            (
                "intermediate_size · hidden_size",
                (self.intermediate_size, width),
            ),
            ("num_attention_heads · head_dim", (heads, head_dim)),
            (
                "num_attention_heads · head_dim · hidden_size",
                (heads.saturating_mul(head_dim), width),
            ),
        ] {
            let bytes = rows
                .checked_mul(columns)
                .and_then(|n| n.checked_mul(size_of::<f64>()));
            if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
                bail!("config: {name} is more than memory can address, with {rows} · {columns}")
            }
        }
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps > 0.) {
            bail!(
                "config: rms_norm_eps {} must be finite and above 0",
                self.rms_norm_eps
            )
        }
        if !(self.initializer_range.is_finite() && self.initializer_range >= 0.) {
            bail!(
                "config: initializer_range {} must be finite and not negative",
                self.initializer_range
            )
        }
        self.encoding.check_description()
    }

    fn init(&self) -> Init {
        Init::Randn {
            mean: 0.,
            stdev: self.initializer_range,
        }
    }
}

/// One layer.
#[derive(Debug, Clone)]
struct Block {
    layer: usize,
    attention_norm: RmsNorm,
    attention: Attention,
    mlp_norm: RmsNorm,
    mlp: FeedForward,
}

impl Block {
    fn new(layer: usize, config: &LlamaConfig, vb: VarBuilder) -> Result<Self> {
        let (dims, window, init) = (config.dims(), config.window, config.init());
        let inner = config.intermediate_size;
        Ok(Self {
            layer,
            attention_norm: norm(config, vb.pp("input_layernorm"))?,
            attention: Attention::new(layer, &dims, window, init, vb.pp("self_attn"))?,
            mlp_norm: norm(config, vb.pp("post_attention_layernorm"))?,
            mlp: FeedForward::new(dims.width, inner, init, vb.pp("mlp"))?,
        })
    }

    /// x (B,T,C) → (B,T,C) and the next layer's state.
    fn forward(
        &self,
        x: &Tensor,
        encoding: &dyn Encoding,
        state: PosState,
        cache: Option<&mut CacheStep>,
    ) -> Result<(Tensor, PosState)> {
        let normed = self.attention_norm.forward(x)?;
        let Attended { out: x, carried } =
            (self.attention).forward_onto(Some(x), &normed, encoding, &state, cache)?;
        if !encoding.updates(self.layer) {
            return Ok((self.mlp.forward_onto(&x, &self.mlp_norm)?, state));
        }
        let mlp_out = self.mlp.forward(&self.mlp_norm.forward(&x)?)?;
        let state = encoding.update(self.layer, state, carried.as_ref(), &mlp_out)?;
        Ok((sum(&x, &mlp_out)?, state))
    }
}

/// What flows from block to block of a [`Llama`].
#[derive(Debug, Clone)]
pub struct Stream {
    /// (B, T, C).
    pub x: Tensor,
    /// Where the tokens stand, and how the next layer turns their heads.
    pub state: PosState,
}

/// A LLaMA: token ids to logits.
///
/// Weights have Hugging Face's names (`model.embed_tokens.weight`, `model.layers.0.self_attn.q_proj.weight`, …,
/// `lm_head.weight`). Threads may share one model: it holds no state between calls; that is in the [`KvCache`].
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_posenc::{Ctx, EncodingConfig, Llama, LlamaConfig, SeededVars};
/// # fn main() -> candle_core::Result<()> {
/// let config = LlamaConfig { encoding: EncodingConfig::Nope, ..LlamaConfig::default() };
/// let vars = SeededVars::new(0);
/// let model = Llama::new(&config, vars.builder(DType::F32, &Device::Cpu))?;
/// let tokens = Tensor::new(&[[3u32, 1, 4, 1, 5], [9, 2, 6, 5, 3]], &Device::Cpu)?;
/// let logits = model.forward(&tokens, &mut Ctx::default())?;
/// assert_eq!(logits.dims(), &[2, 5, 256]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Llama {
    config: LlamaConfig,
    /// (V, C).
    embeddings: Tensor,
    encoding: Arc<dyn Encoding>,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: Projection,
}

impl Llama {
    /// The model of a configuration, its weights and its encoding's from `vb`.
    ///
    /// # Errors
    /// When the configuration is [not valid](LlamaConfig::validate), a weight is missing or has another shape, or weights
    /// would not be F64, F32, F16 or BF16.
    pub fn new(config: &LlamaConfig, vb: VarBuilder) -> Result<Self> {
        config.validate()?;
        let encoding = config.encoding.build(&config.dims(), vb.pp("model"))?;
        Self::assemble(config, encoding, vb)
    }

    /// The model with an encoding that was built already, for the configuration's [`dims`](LlamaConfig::dims), such as one of
    /// the caller's own. The configuration must say so. A saved model is loaded by
    /// [`ModelFolder::load_with`](crate::hf::ModelFolder::load_with).
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_posenc::{Encoding, EncodingConfig, Llama, LlamaConfig, SeededVars};
    /// use serde_json::json;
    /// use std::sync::Arc;
    ///
    /// struct Own { gain: f64 }
    ///
    /// impl Encoding for Own {
    ///     fn config(&self) -> EncodingConfig {
    ///         EncodingConfig::Custom { description: json!({"name": "own", "gain": self.gain}) }
    ///     }
    ///     // … and the hooks by which it acts.
    /// }
    ///
    /// # fn main() -> candle_core::Result<()> {
    /// let own = Own { gain: 2. };
    /// let config = LlamaConfig { encoding: own.config(), ..LlamaConfig::default() };
    /// let vars = SeededVars::new(0);
    /// let model = Llama::with_encoding(&config, Arc::new(own), vars.builder(DType::F32, &Device::Cpu))?;
    /// # assert_eq!(model.config(), &config);
    /// # let other = Arc::new(Own { gain: 3. });
    /// # let refused = Llama::with_encoding(&config, other, vars.builder(DType::F32, &Device::Cpu));
    /// # assert!(refused.is_err_and(|e| e.to_string().contains("gain is 2.0 in the configuration, 3.0")));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`new`](Self::new), and when the configuration's encoding is not what [`Encoding::config`] says of this one:
    /// what is saved of the model would be another.
    pub fn with_encoding(
        config: &LlamaConfig,
        encoding: Arc<dyn Encoding>,
        vb: VarBuilder,
    ) -> Result<Self> {
        config.validate()?;
        let given = encoding.config();
        given.check_description()?;
        (config.encoding.check_same(&given)).map_err(|e| Error::msg(format!("llama: {e}")))?;
        Self::assemble(config, encoding, vb)
    }

    fn assemble(config: &LlamaConfig, encoding: Arc<dyn Encoding>, vb: VarBuilder) -> Result<Self> {
        if !can_compute(vb.dtype()) {
            bail!(
                "llama: weights cannot be {:?}, only F64, F32, F16 or BF16",
                vb.dtype()
            )
        }
        let (v, c) = (config.vocab_size, config.hidden_size);
        let model = vb.pp("model");
        let embeddings = model.get_with_hints((v, c), "embed_tokens.weight", config.init())?;
        let blocks = (0..config.num_hidden_layers)
            .map(|layer| Block::new(layer, config, model.pp("layers").pp(layer)))
            .collect::<Result<_>>()?;
        let head = match config.tie_word_embeddings {
            true => Projection::of(embeddings.clone()),
            false => Projection::new(c, v, config.init(), vb.pp("lm_head"))?,
        };
        Ok(Self {
            config: config.clone(),
            embeddings,
            encoding,
            blocks,
            norm: norm(config, model.pp("norm"))?,
            head,
        })
    }

    /// The same with TAPA's phase evaluated so on a GPU.
    pub fn with_precision(mut self, precision: Precision) -> Self {
        for block in &mut self.blocks {
            block.attention = block.attention.clone().with_precision(precision);
        }
        self
    }

    /// The same with attention on another backend.
    pub fn with_backend(mut self, backend: Backend) -> Self {
        for block in &mut self.blocks {
            block.attention = block.attention.clone().with_backend(backend);
        }
        self
    }

    /// The configuration that the model was built from.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// What attention in a layer will do in [`forward`](Self::forward), and why. It runs the layer's projections,
    /// but no attention.
    ///
    /// # Shapes
    /// For tokens (B, T): `batch` and `len`.
    ///
    /// # Errors
    /// When there is no such layer or attention cannot run.
    pub fn plan(&self, layer: usize, batch: usize, len: usize) -> Result<Plan> {
        let Some(block) = self.blocks.get(layer) else {
            bail!("llama: layer {layer} of {}", self.blocks.len())
        };
        let weights = &self.embeddings;
        let shape = (batch, len, self.config.hidden_size);
        let bytes = [batch, len, self.config.hidden_size, size_of::<f64>()]
            .into_iter()
            .try_fold(1usize, usize::checked_mul);
        if batch == 0 || len == 0 || bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
            bail!("llama: {batch} rows of {len} tokens cannot be planned for")
        }
        let x = Tensor::zeros(shape, weights.dtype(), weights.device())?;
        let state = (self.encoding).begin(&x, &Positions::first(len), &mut Ctx::default())?;
        block.attention.plan(&x, &*self.encoding, &state)
    }

    /// Logits of the next token behind each of the tokens, which stand at 0, 1, ….
    ///
    /// # Shapes
    /// tokens (B, T), `u32` or `i64` → (B, T, V).
    ///
    /// # Errors
    /// As [`forward_at`](Self::forward_at).
    pub fn forward(&self, tokens: &Tensor, ctx: &mut Ctx) -> Result<Tensor> {
        let t = tokens.dims().get(1).copied().unwrap_or(0);
        self.forward_at(tokens, &Positions::first(t), None, ctx)
    }

    /// Logits of tokens that stand at `positions`, seeing also the tokens in a cache, to which they are added.
    /// Tokens at negative positions are padding: their logits are 0 and their embeddings are not read. Positions are
    /// taken at their word: to go on behind what is cached, pass [`KvCache::next_positions`].
    ///
    /// # Shapes
    /// tokens (B, T), `u32` or `i64` → (B, T, V).
    ///
    /// # Errors
    /// When there is no token, an id is not below V, or the positions or the cache do not fit. Then the cache is as
    /// it was.
    pub fn forward_at(
        &self,
        tokens: &Tensor,
        positions: &Positions,
        cache: Option<&mut KvCache>,
        ctx: &mut Ctx,
    ) -> Result<Tensor> {
        self.logits(&self.hidden_at(tokens, positions, cache, ctx)?)
    }

    /// The first part of [`forward_at`](Self::forward_at): the stream behind the last norm. Where only a prompt's
    /// last logits are wanted, narrow this before [`logits`](Self::logits).
    ///
    /// # Shapes
    /// tokens (B, T), `u32` or `i64` → (B, T, C).
    ///
    /// # Errors
    /// As [`forward_at`](Self::forward_at).
    pub fn hidden_at(
        &self,
        tokens: &Tensor,
        positions: &Positions,
        cache: Option<&mut KvCache>,
        ctx: &mut Ctx,
    ) -> Result<Tensor> {
        // What one call draws would not fit what others left in the cache.
        let mut without_draws = Ctx {
            train: ctx.train,
            rng: None,
            planned_len: ctx.planned_len,
        };
        let ctx = match cache {
            Some(_) => &mut without_draws,
            None => ctx,
        };
        let mut stream = self.begin(tokens, positions, ctx)?;
        let batch = stream.x.dim(0)?;
        let mut step = cache
            .map(|cache| cache.step(&stream.state.positions, batch))
            .transpose()?;
        for layer in 0..self.blocks.len() {
            stream = self.block(layer, stream, step.as_mut())?;
        }
        let hidden = self.finish(&stream)?;
        step.map_or(Ok(()), CacheStep::commit)?;
        Ok(hidden)
    }

    /// Starts the stream: embeds tokens that stand at `positions` and makes the encoding's first state. This is all
    /// that draws from [`Ctx::rng`]. Tokens may also be on the CPU where the model is not.
    ///
    /// [`hidden_at`](Self::hidden_at) is this, each [`block`](Self::block) in turn, and [`finish`](Self::finish);
    /// on their own they let a caller stop, look or recompute between blocks.
    ///
    /// # Shapes
    /// tokens (B, T), `u32` or `i64`.
    ///
    /// # Errors
    /// When there is no token, an id is not below V, or the positions do not fit.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_posenc::{Ctx, Llama, LlamaConfig, Positions, SeededVars};
    /// # fn main() -> candle_core::Result<()> {
    /// let vars = SeededVars::new(0);
    /// let model = Llama::new(&LlamaConfig::default(), vars.builder(DType::F32, &Device::Cpu))?;
    /// let tokens = Tensor::new(&[[3u32, 1, 4, 1, 5]], &Device::Cpu)?;
    /// let mut stream = model.begin(&tokens, &Positions::first(5), &mut Ctx::default())?;
    /// for layer in 0..model.config().num_hidden_layers {
    ///     stream = model.block(layer, stream, None)?;
    ///     println!("after layer {layer}: {}", stream.x.sqr()?.mean_all()?);
    /// }
    /// let logits = model.logits(&model.finish(&stream)?)?;
    /// assert_eq!(logits.dims(), &[1, 5, 256]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn begin(&self, tokens: &Tensor, positions: &Positions, ctx: &mut Ctx) -> Result<Stream> {
        let device = self.embeddings.device();
        let tokens = TokenIds::read(tokens, self.config.vocab_size, device)?;
        let (_, t) = tokens.shape();
        if positions.len() != t {
            bail!("llama: {} positions for {t} tokens", positions.len())
        }
        let x = embed(&self.embeddings, tokens)?; // (B,T,C)
        let x = self.encoding.embed(&x, positions)?;
        let x = zero_padding(&x, positions)?;
        let state = self.encoding.begin(&x, positions, ctx)?;
        Ok(Stream { x, state })
    }

    /// Runs one layer. With a cache, `cache` is this pass's [step](KvCache::step) over it, which the caller
    /// [commits](CacheStep::commit) behind the last layer.
    ///
    /// # Errors
    /// When there is no such layer, or the stream or the cache does not fit.
    pub fn block(
        &self,
        layer: usize,
        stream: Stream,
        cache: Option<&mut CacheStep>,
    ) -> Result<Stream> {
        let Some(block) = self.blocks.get(layer) else {
            bail!("llama: layer {layer} of {}", self.blocks.len())
        };
        check_floats(&stream)?;
        let Stream { x, state } = stream;
        let (x, state) = block.forward(&x, &*self.encoding, state, cache)?;
        Ok(Stream { x, state })
    }

    /// Puts the stream behind the last block through the last norm.
    ///
    /// # Shapes
    /// (B, T, C) → (B, T, C), what [`logits`](Self::logits) takes.
    ///
    /// # Errors
    /// When the width is not C, or the stream is not floats.
    pub fn finish(&self, stream: &Stream) -> Result<Tensor> {
        check_floats(stream)?;
        self.norm.forward(&stream.x)
    }

    /// The weight (V, C) of the head: the token embeddings where they are tied.
    pub fn head(&self) -> &Tensor {
        self.head.weight()
    }

    /// The second part of [`forward_at`](Self::forward_at): the head.
    ///
    /// # Shapes
    /// (B, T, C) → (B, T, V).
    ///
    /// # Errors
    /// When the width is not C.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        self.head.forward(hidden)
    }
}

/// Norms have no function for integers.
fn check_floats(stream: &Stream) -> Result<()> {
    match stream.x.dtype().is_float() {
        true => Ok(()),
        false => bail!("llama: the stream must be floats, got {:?}", stream.x),
    }
}

/// Whether a model's weights can be of this dtype.
pub(crate) fn can_compute(dtype: DType) -> bool {
    matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16)
}

fn norm(config: &LlamaConfig, vb: VarBuilder) -> Result<RmsNorm> {
    let weight = vb.get_with_hints(config.hidden_size, "weight", Init::Const(1.))?;
    Ok(RmsNorm::new(weight, config.rms_norm_eps))
}

/// x (B, T, C) with 0 where a token is padding, so that whatever its embedding holds reaches neither values nor
/// gradients.
fn zero_padding(x: &Tensor, positions: &Positions) -> Result<Tensor> {
    let (b, t, _) = x.dims3()?;
    let table = positions.table(b)?;
    if !table.has_padding() {
        return Ok(x.clone());
    }
    let real: Vec<u8> = (0..b)
        .flat_map(|row| table.row(row).iter().map(|p| u8::from(*p >= 0)))
        .collect();
    let real = Tensor::from_vec(real, (b, t, 1), x.device())?.broadcast_as(x.shape())?;
    real.where_cond(x, &x.zeros_like()?)
}
