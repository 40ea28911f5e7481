//! Toy LLaMAs with every encoding, for the tests of whole models.
#![allow(dead_code)] // Each test file uses its own part of this.

use candle_core::{DType, Device, Result, Tensor, D};
use candle_nn::{Init, VarBuilder};

use candle_posenc::{
    Backend, Ctx, EncodingConfig, KvCache, Llama, LlamaConfig, Positions, SeededVars,
};

/// The paths that every test of values runs on.
pub const BACKENDS: [Backend; 1] = [Backend::Dense];

/// Token ids of the toys; the last one is free for a test to poison.
pub const VOCAB: usize = 23;
pub const POISON: u32 = VOCAB as u32 - 1;

/// Length that generations are planned for where an encoding needs it: beyond `max_position_embeddings`.
pub const PLANNED: usize = 96;

/// Every encoding, with a name for messages.
pub fn encodings() -> Vec<(&'static str, EncodingConfig)> {
    vec![("nope", EncodingConfig::Nope)]
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
        initializer_range: 0.3,
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

/// Asserts that two tensors agree as far as their dtype lets them.
#[track_caller]
pub fn assert_close(actual: &Tensor, reference: &Tensor, what: &str) {
    let tolerance = match reference.dtype() {
        DType::F64 => 1e-10,
        _ => 1e-5,
    };
    let found = difference(actual, reference);
    assert!(found <= tolerance, "{what}: {found:e} above {tolerance:e}");
}

/// Cross-entropy of each token's logits with the token that follows it.
pub fn loss(logits: &Tensor, tokens: &Tensor) -> Result<Tensor> {
    let (b, t, v) = logits.dims3()?;
    let logits = logits.narrow(1, 0, t - 1)?.reshape((b * (t - 1), v))?;
    let targets = tokens.narrow(1, 1, t - 1)?.flatten_all()?;
    let log_weights = candle_nn::ops::log_softmax(&logits, D::Minus1)?;
    candle_nn::loss::nll(&log_weights, &targets)
}
