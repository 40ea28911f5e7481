//! Writing on from a prompt, byte by byte, with a cache of keys and values.

use candle_core::{bail, DType, Device, Result, Tensor};
use candle_posenc::{Ctx, KvCache, Llama, Positions};
use rand::distr::{weighted::WeightedIndex, Distribution};
use rand::Rng;

/// `count` bytes that follow `prompt`, each drawn from the model's distribution sharpened by a temperature
/// below 1.
pub fn write_on(
    model: &Llama,
    prompt: &[u8],
    count: usize,
    temperature: f64,
    mut rng: &mut dyn Rng,
    device: &Device,
) -> Result<Vec<u8>> {
    if prompt.is_empty() {
        bail!("writing on needs a prompt of at least one byte")
    }
    let mut cache = KvCache::new(model.config().num_hidden_layers).without_gradients();
    let mut written = Vec::with_capacity(count);
    let mut fresh = prompt.to_vec();
    while written.len() < count {
        let positions = Positions::Span {
            start: cache.len() as i64,
            len: fresh.len(),
        };
        let tokens: Vec<u32> = fresh.iter().map(|byte| u32::from(*byte)).collect();
        let tokens = Tensor::from_vec(tokens, (1, fresh.len()), device)?;
        let mut ctx = Ctx {
            planned_len: Some(prompt.len() + count),
            ..Ctx::default()
        };
        let logits = model.forward_at(&tokens, &positions, Some(&mut cache), &mut ctx)?;
        let last: Vec<f32> = logits
            .get(0)?
            .get(fresh.len() - 1)?
            .to_dtype(DType::F32)?
            .to_vec1()?;
        let byte = draw(&last, temperature, &mut rng)?;
        written.push(byte);
        fresh = vec![byte];
    }
    Ok(written)
}

fn draw(logits: &[f32], temperature: f64, rng: &mut dyn Rng) -> Result<u8> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights = logits
        .iter()
        .map(|logit| (f64::from(logit - largest) / temperature).exp());
    match WeightedIndex::new(weights) {
        Ok(distribution) => Ok(distribution.sample(rng) as u8),
        Err(error) => bail!("sampling from the model's logits: {error}"),
    }
}
