//! Choosing the next token, and writing on from a prompt with a cache of keys and values.

use candle_core::{bail, DType, Device, Result, Tensor};
use candle_posenc::{Ctx, KvCache, Llama, Positions};
use rand::distr::{weighted::WeightedIndex, Distribution};
use rand::Rng;

/// How a token is chosen by its logits. The filters apply in this order: temperature, `top_k`, `top_p`.
#[derive(Debug, Clone, Copy)]
pub struct Sampler {
    /// Divides the logits. Below 1 it sharpens the distribution; at 0 the likeliest token is taken, always.
    pub temperature: f64,
    /// Only so many of the likeliest tokens.
    pub top_k: Option<usize>,
    /// Only the likeliest tokens that together have this probability; at least one.
    pub top_p: f64,
}

impl Sampler {
    /// The whole distribution at a temperature.
    pub fn new(temperature: f64) -> Self {
        Self {
            temperature,
            top_k: None,
            top_p: 1.,
        }
    }

    /// Checks that the numbers make sense.
    ///
    /// # Errors
    /// When the temperature is below 0 or not finite, `top_k` is 0 or `top_p` is not in (0, 1].
    pub fn validate(&self) -> Result<()> {
        let Self {
            temperature,
            top_k,
            top_p,
        } = *self;
        if !(temperature.is_finite() && temperature >= 0.) {
            bail!("the temperature must be 0 or more, got {temperature}")
        }
        if top_k == Some(0) {
            bail!("top-k must be at least 1")
        }
        if !(top_p > 0. && top_p <= 1.) {
            bail!("top-p must be above 0 and at most 1, got {top_p}")
        }
        Ok(())
    }

    /// One token.
    ///
    /// # Shapes
    /// logits (V), any floating dtype.
    ///
    /// # Errors
    /// When there is no logit, or one is not a number, or they leave nothing to choose.
    pub fn draw(&self, logits: &Tensor, rng: &mut dyn Rng) -> Result<u32> {
        let logits: Vec<f32> = logits.to_dtype(DType::F32)?.to_vec1()?;
        self.draw_from(&logits, rng)
    }

    fn draw_from(&self, logits: &[f32], mut rng: &mut dyn Rng) -> Result<u32> {
        if logits.iter().any(|logit| logit.is_nan()) {
            bail!("sampling: the model's logits are not numbers")
        }
        let best_first = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
        let Some(best) = (0..logits.len()).min_by(best_first) else {
            bail!("sampling: there are no logits")
        };
        if self.temperature == 0. {
            return Ok(best as u32);
        }
        let weight = |token: usize| {
            let below = f64::from(logits[token]) - f64::from(logits[best]);
            (below / self.temperature).exp()
        };
        let mut tokens: Vec<usize> = (0..logits.len()).collect();
        if self.top_k.is_some() || self.top_p < 1. {
            tokens.sort_unstable_by(best_first);
            tokens.truncate(self.top_k.unwrap_or(usize::MAX).max(1));
            let wanted = self.top_p * tokens.iter().copied().map(weight).sum::<f64>();
            let mut sum = 0.;
            let kept = tokens.iter().position(|token| {
                sum += weight(*token);
                sum >= wanted
            });
            tokens.truncate(kept.map_or(usize::MAX, |last| last + 1));
        }
        match WeightedIndex::new(tokens.iter().copied().map(weight)) {
            Ok(distribution) => Ok(tokens[distribution.sample(&mut rng)] as u32),
            Err(error) => bail!("sampling: from the model's logits: {error}"),
        }
    }
}

/// Writes on from a prompt, token by token.
pub struct Writer<'a> {
    model: &'a Llama,
    device: &'a Device,
    cache: KvCache,
    /// Tokens that the whole text will have.
    planned_len: usize,
    /// Tokens that the model has not read yet.
    fresh: Vec<u32>,
}

impl<'a> Writer<'a> {
    /// At the end of `prompt`, to write at most `count` tokens.
    ///
    /// # Errors
    /// When the prompt is empty.
    pub fn new(model: &'a Llama, prompt: &[u32], count: usize, device: &'a Device) -> Result<Self> {
        if prompt.is_empty() {
            bail!("writing on needs a prompt of at least one token")
        }
        let planned_len = prompt.len().saturating_add(count);
        let layers = model.config().num_hidden_layers;
        Ok(Self {
            model,
            device,
            cache: KvCache::new(layers).without_gradients(),
            planned_len,
            fresh: prompt.to_vec(),
        })
    }

    /// The next token. The first call reads the whole prompt.
    ///
    /// # Errors
    /// When the model cannot read on (a learned table ends) or its logits leave nothing to choose.
    pub fn next(&mut self, sampler: &Sampler, rng: &mut dyn Rng) -> Result<u32> {
        let count = self.fresh.len();
        let positions = Positions::Span {
            start: self.cache.len() as i64,
            len: count,
        };
        let tokens = Tensor::new(&self.fresh[..], self.device)?.unsqueeze(0)?;
        let mut ctx = Ctx {
            planned_len: Some(self.planned_len),
            ..Ctx::default()
        };
        let cache = Some(&mut self.cache);
        let hidden = self
            .model
            .hidden_at(&tokens, &positions, cache, &mut ctx)?
            .detach();
        let logits = self.model.logits(&hidden.narrow(1, count - 1, 1)?)?; // (1, 1, V)
        let token = sampler.draw(&logits.flatten_all()?, rng)?;
        self.fresh = vec![token];
        Ok(token)
    }
}

/// `count` bytes that follow `prompt`, each drawn from a byte-level model's distribution at a temperature.
pub fn write_on(
    model: &Llama,
    prompt: &[u8],
    count: usize,
    temperature: f64,
    rng: &mut dyn Rng,
    device: &Device,
) -> Result<Vec<u8>> {
    let prompt: Vec<u32> = prompt.iter().map(|byte| u32::from(*byte)).collect();
    let mut writer = Writer::new(model, &prompt, count, device)?;
    let sampler = Sampler::new(temperature);
    (0..count)
        .map(|_| Ok(writer.next(&sampler, rng)? as u8))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_posenc::encoding::{RopeConfig, RopeScaling};
    use candle_posenc::{EncodingConfig, LlamaConfig, SeededVars};
    use rand::rngs::ChaCha12Rng;
    use rand::SeedableRng;

    const DRAWS: usize = 20_000;

    /// How often each token was drawn, as a share.
    fn shares(sampler: Sampler, logits: &[f32]) -> Vec<f64> {
        let mut rng = ChaCha12Rng::seed_from_u64(5);
        let mut counts = vec![0; logits.len()];
        for _ in 0..DRAWS {
            let token = sampler.draw_from(logits, &mut rng).unwrap();
            counts[token as usize] += 1;
        }
        let share = |count: u32| f64::from(count) / DRAWS as f64;
        counts.into_iter().map(share).collect()
    }

    /// Logits of tokens with these probabilities.
    fn logits(probabilities: &[f64]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln() as f32 + 3.).collect()
    }

    #[test]
    fn shares_of_many_draws_are_the_distribution_that_is_left() {
        let whole = Sampler::new(1.);
        let top_k = |k| Sampler {
            top_k: Some(k),
            ..whole
        };
        let top_p = |p| Sampler { top_p: p, ..whole };
        // Squares of the probabilities, then their sum made 1.
        let sharpened = [0.16, 0.04, 0.01, 0.09].map(|p| p / 0.3);
        for (sampler, expected) in [
            (whole, [0.4, 0.2, 0.1, 0.3]),
            (Sampler::new(0.5), sharpened),
            (Sampler::new(0.), [1., 0., 0., 0.]),
            (top_k(1), [1., 0., 0., 0.]),
            (top_k(2), [4. / 7., 0., 0., 3. / 7.]),
            (top_k(9), [0.4, 0.2, 0.1, 0.3]),
            // The token that crosses the bound stays.
            (top_p(0.1), [1., 0., 0., 0.]),
            (top_p(0.65), [4. / 7., 0., 0., 3. / 7.]),
            (top_p(0.75), [4. / 9., 2. / 9., 0., 3. / 9.]),
            (
                Sampler {
                    top_p: 0.6,
                    ..top_k(3)
                },
                [4. / 7., 0., 0., 3. / 7.],
            ),
        ] {
            let found = shares(sampler, &logits(&[0.4, 0.2, 0.1, 0.3]));
            for (found, expected) in found.iter().zip(expected) {
                // Five deviations of a share of that many draws.
                let bound = 5. * (expected * (1. - expected) / DRAWS as f64).sqrt();
                assert!(
                    (found - expected).abs() <= bound,
                    "{sampler:?}: {found} for {expected}"
                );
            }
        }
    }

    #[test]
    fn likeliest_tokens_that_tie_give_the_first_at_temperature_0() {
        let mut rng = ChaCha12Rng::seed_from_u64(0);
        let found = Sampler::new(0.).draw_from(&[1., 7., 7., -3.], &mut rng);
        assert_eq!(found.unwrap(), 1);
    }

    #[test]
    fn impossible_tokens_are_never_drawn_and_logits_that_are_no_numbers_are_refused() {
        let forbidden = [f32::NEG_INFINITY, 0., f32::NEG_INFINITY];
        assert_eq!(
            shares(Sampler::new(1.), &forbidden)[1],
            shares(Sampler::new(0.), &forbidden)[1]
        );
        let mut rng = ChaCha12Rng::seed_from_u64(0);
        for bad in [
            &[][..],
            &[0., f32::NAN],
            &[f32::NEG_INFINITY; 2],
            &[f32::INFINITY; 2],
        ] {
            assert!(
                Sampler::new(1.).draw_from(bad, &mut rng).is_err(),
                "{bad:?}"
            );
        }
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        let good = Sampler::new(1.);
        assert!(good.validate().is_ok());
        for bad in [
            Sampler::new(-0.1),
            Sampler::new(f64::NAN),
            Sampler {
                top_k: Some(0),
                ..good
            },
            Sampler { top_p: 0., ..good },
            Sampler { top_p: 1.1, ..good },
        ] {
            assert!(bad.validate().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn writer_at_temperature_0_writes_what_whole_passes_say() -> Result<()> {
        // Frequencies that depend on the length: the cache is right only with the planned length in every call.
        let scaling = RopeScaling::Dynamic { factor: 4. };
        let config = LlamaConfig {
            hidden_size: 32,
            intermediate_size: 40,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            num_key_value_heads: 1,
            max_position_embeddings: 8,
            initializer_range: 0.3,
            encoding: EncodingConfig::Rope(RopeConfig {
                scaling,
                ..RopeConfig::default()
            }),
            ..LlamaConfig::default()
        };
        let (device, vars) = (Device::Cpu, SeededVars::new(3));
        let model = Llama::new(&config, vars.builder(DType::F64, &device))?;
        let mut rng = ChaCha12Rng::seed_from_u64(0);
        let mut text = b"a prompt".to_vec();
        let written = write_on(&model, &text, 12, 0., &mut rng, &device)?;
        for byte in written {
            let tokens: Vec<u32> = text.iter().map(|byte| u32::from(*byte)).collect();
            let tokens = Tensor::new(tokens, &device)?.unsqueeze(0)?;
            let mut ctx = Ctx {
                planned_len: Some(20),
                ..Ctx::default()
            };
            let logits = model.forward(&tokens, &mut ctx)?.get(0)?;
            let best = logits.get(text.len() - 1)?.argmax(0)?;
            assert_eq!(u32::from(byte), best.to_scalar::<u32>()?);
            text.push(byte);
        }
        assert!(write_on(&model, b"", 1, 0., &mut rng, &device).is_err());
        Ok(())
    }
}
