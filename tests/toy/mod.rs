//! Toy LLaMAs with every encoding, for the tests of whole models.
#![allow(dead_code)] // Each test file uses its own part of this.

use candle_core::{DType, Device, Result, Tensor, D};
use candle_nn::{Init, VarBuilder};

use candle_posenc::encoding::{
    AbsoluteConfig, AlibiConfig, HeadMixing, PhaseForm, PhaseNorm, RopeConfig, StateNorm,
    TapaConfig, TapeConfig,
};
use candle_posenc::{
    Backend, Ctx, EncodingConfig, KvCache, Layout, Llama, LlamaConfig, Positions, SeededVars,
};
use serde_json::json;

/// The paths that every test of values runs on.
pub const BACKENDS: [Backend; 2] = [Backend::Dense, Backend::Fused];

/// Token ids of the toys; the last one is free for a test to poison.
pub const VOCAB: usize = 23;
pub const POISON: u32 = VOCAB as u32 - 1;

/// Length that generations are planned for where an encoding needs it: beyond `max_position_embeddings`.
pub const PLANNED: usize = 96;

/// Every encoding, with a name for messages.
pub fn encodings() -> Vec<(&'static str, EncodingConfig)> {
    let rope = |settings: serde_json::Value| RopeConfig::from_hf(&settings).expect("a RoPE");
    let scaled = |scaling| rope(json!({ "rope_scaling": scaling }));
    let yarn = || {
        scaled(json!({
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 4.0
        }))
    };
    let partial = RopeConfig {
        partial_rotary_factor: 0.5,
        layout: Layout::Interleaved,
        ..RopeConfig::default()
    };
    let llama3 = scaled(json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16
    }));
    let dynamic = scaled(json!({ "rope_type": "dynamic", "factor": 2.0 }));
    let longrope = scaled(json!({
        "rope_type": "longrope", "original_max_position_embeddings": 8,
        "short_factor": [1.0, 1.0, 1.1, 1.2], "long_factor": [1.0, 2.0, 3.0, 4.0]
    }));
    let tapa = TapaConfig::default;
    let tape = || TapeConfig {
        position_size: 5,
        ..TapeConfig::default()
    };
    use AbsoluteConfig::Learned;
    use EncodingConfig::{Absolute, Alibi, Nope, Rope, Tapa, Tape};
    vec![
        ("nope", Nope),
        ("sinusoidal", Absolute(AbsoluteConfig::default())),
        ("learned", Absolute(Learned { max_positions: 150 })),
        ("rope", Rope(RopeConfig::default())),
        ("partial rope", Rope(partial)),
        ("yarn", Rope(yarn())),
        ("llama3", Rope(llama3)),
        ("dynamic", Rope(dynamic)),
        ("longrope", Rope(longrope)),
        ("alibi", Alibi(AlibiConfig::default())),
        ("tapa", Tapa(tapa())),
        (
            "tapa linear",
            Tapa(TapaConfig {
                phase: PhaseForm::Linear,
                ..tapa()
            }),
        ),
        (
            "tapa phase norm",
            Tapa(TapaConfig {
                phase_norm: Some(PhaseNorm {
                    gain: 0.4,
                    learned: true,
                }),
                ..tapa()
            }),
        ),
        ("tape", Tape(tape())),
        (
            "tape full yarn",
            Tape(TapeConfig {
                mixing: HeadMixing::Full,
                rope: yarn(),
                step: 0.7,
                ..tape()
            }),
        ),
        (
            "tape unit",
            Tape(TapeConfig {
                norm: StateNorm::Unit,
                ..tape()
            }),
        ),
        (
            "tape attention only",
            Tape(TapeConfig {
                token_update: false,
                ..tape()
            }),
        ),
        (
            "tape tokens only",
            Tape(TapeConfig {
                attention_update: false,
                ..tape()
            }),
        ),
        (
            "tape without updates",
            Tape(TapeConfig {
                attention_update: false,
                token_update: false,
                ..tape()
            }),
        ),
    ]
}

/// Grouped heads, a head width of its own, weights large enough for attention to matter.
pub fn config(encoding: EncodingConfig) -> LlamaConfig {
    LlamaConfig {
        vocab_size: VOCAB,
        hidden_size: 24,
        intermediate_size: 36,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: Some(8),
        rms_norm_eps: 1e-5,
        tie_word_embeddings: false,
        max_position_embeddings: 32,
        window: None,
        initializer_range: 0.2,
        encoding,
    }
}

/// Variables of a configuration in `dtype`, none of them constant: what starts at 0 or 1 is moved at random, so
/// that TAPE's updates and every norm take part.
pub fn variables(config: &LlamaConfig, dtype: DType) -> Result<SeededVars> {
    let vars = SeededVars::new(11);
    Llama::new(config, vars.builder(dtype, &Device::Cpu))?;
    let noise = SeededVars::new(12);
    let noise = noise.builder(DType::F64, &Device::Cpu);
    for (name, var) in vars.named() {
        let flat = var.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
        if flat.iter().all(|value| *value == flat[0]) {
            let init = Init::Randn {
                mean: flat[0],
                stdev: 0.3,
            };
            let moved = noise.get_with_hints(var.shape(), &name, init)?;
            var.set(&moved.to_dtype(dtype)?)?;
        }
    }
    Ok(vars)
}

/// A model that trains: its weights are variables.
pub fn trained(
    config: &LlamaConfig,
    dtype: DType,
    backend: Backend,
) -> Result<(Llama, SeededVars)> {
    let vars = variables(config, dtype)?;
    let model = Llama::new(config, vars.builder(dtype, &Device::Cpu))?;
    Ok((model.with_backend(backend), vars))
}

/// A builder of plain tensors with the values of some variables.
pub fn plain(vars: &SeededVars, dtype: DType) -> Result<VarBuilder<'static>> {
    let tensors = vars
        .named()
        .into_iter()
        .map(|(name, var)| Ok((name, var.as_detached_tensor().copy()?)))
        .collect::<Result<_>>()?;
    Ok(VarBuilder::from_tensors(tensors, dtype, &Device::Cpu))
}

/// A model for inference: its weights are plain tensors, which autograd does not track.
pub fn frozen(config: &LlamaConfig, dtype: DType, backend: Backend) -> Result<Llama> {
    let vb = plain(&variables(config, dtype)?, dtype)?;
    Ok(Llama::new(config, vb)?.with_backend(backend))
}

/// Reproducible token ids, (B, T), none of them the one kept for poison.
pub fn tokens(batch: usize, len: usize, seed: u64) -> Result<Tensor> {
    let ids: Vec<u32> = (0..(batch * len) as u64)
        .map(|i| {
            let z = (i + 1 + 1000 * seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            ((z ^ (z >> 29)) % u64::from(POISON)) as u32
        })
        .collect();
    Tensor::from_vec(ids, (batch, len), &Device::Cpu)
}

/// The circumstances of every call here.
pub fn planned() -> Ctx<'static> {
    Ctx {
        planned_len: Some(PLANNED),
        ..Ctx::default()
    }
}

/// Logits of a call without a cache.
pub fn whole(model: &Llama, tokens: &Tensor, positions: &Positions) -> Result<Tensor> {
    model.forward_at(tokens, positions, None, &mut planned())
}

/// Logits of a call that goes on where the cache ends.
pub fn next(model: &Llama, tokens: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
    let t = tokens.dim(1)?;
    let positions = match cache.is_empty() {
        true => Positions::first(t),
        false => cache.next_positions(t)?,
    };
    model.forward_at(tokens, &positions, Some(cache), &mut planned())
}

/// Logits of calls that each go on where the last one ended, of these lengths, side by side.
pub fn in_chunks(
    model: &Llama,
    tokens: &Tensor,
    lengths: impl IntoIterator<Item = usize>,
    cache: &mut KvCache,
) -> Result<Tensor> {
    let (mut parts, mut start) = (Vec::new(), 0);
    for len in lengths {
        parts.push(next(model, &tokens.narrow(1, start, len)?, cache)?);
        start += len;
    }
    Tensor::cat(&parts, 1)
}

/// The greatest difference, relative to the reference's greatest value where that is above 1.
#[track_caller]
pub fn difference(actual: &Tensor, reference: &Tensor) -> f64 {
    assert_eq!(actual.dims(), reference.dims());
    let values = |x: &Tensor| -> Vec<f64> {
        let flat = x.flatten_all().and_then(|x| x.to_dtype(DType::F64));
        flat.and_then(|x| x.to_vec1()).expect("a tensor of numbers")
    };
    let (actual, reference) = (values(actual), values(reference));
    let finite = actual.iter().chain(&reference).all(|x| x.is_finite());
    assert!(finite, "not finite: {actual:?} against {reference:?}");
    let largest = reference.iter().fold(1f64, |m, x| m.max(x.abs()));
    let pairs = actual.iter().zip(&reference);
    pairs.fold(0f64, |m, (a, b)| m.max((a - b).abs())) / largest
}

/// A model under test: its name for messages, and how far its results may be apart.
pub struct Case {
    pub name: String,
    pub tolerance: f64,
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

impl Case {
    #[track_caller]
    pub fn assert_close(&self, actual: &Tensor, reference: &Tensor, what: &str) {
        let (found, tolerance) = (difference(actual, reference), self.tolerance);
        assert!(
            found <= tolerance,
            "{self}: {what}: {found:e} above {tolerance:e}"
        );
    }
}

/// How far two ways to the same logits may be apart: 1e-10 in f64. In f32 it is 1e-5 and twice what one whole pass
/// differs from that of an f64 model with the same weights: random TAPA multiplies rounding a thousandfold.
pub fn tolerance(config: &LlamaConfig, dtype: DType, backend: Backend) -> Result<f64> {
    if dtype == DType::F64 {
        return Ok(1e-10);
    }
    let vars = variables(config, dtype)?;
    let logits = |computed_in| {
        let model = Llama::new(config, plain(&vars, computed_in)?)?.with_backend(backend);
        whole(&model, &tokens(2, 40, 1)?, &Positions::first(40))
    };
    Ok(1e-5 + 2. * difference(&logits(dtype)?, &logits(DType::F64)?))
}

/// Asserts that two f64 tensors agree to 1e-10.
#[track_caller]
pub fn assert_close(actual: &Tensor, reference: &Tensor, what: &str) {
    assert_eq!(reference.dtype(), DType::F64);
    let found = difference(actual, reference);
    assert!(found <= 1e-10, "{what}: {found:e}");
}

/// Cross-entropy of each token's logits with the token that follows it.
pub fn loss(logits: &Tensor, tokens: &Tensor) -> Result<Tensor> {
    let (b, t, v) = logits.dims3()?;
    let logits = logits.narrow(1, 0, t - 1)?.reshape((b * (t - 1), v))?;
    let targets = tokens.narrow(1, 1, t - 1)?.flatten_all()?;
    let log_weights = candle_nn::ops::log_softmax(&logits, D::Minus1)?;
    candle_nn::loss::nll(&log_weights, &targets)
}
