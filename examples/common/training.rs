//! The recipe: random windows, next-byte cross-entropy, AdamW with clipped gradients, warm-up and cosine.

use candle_core::backprop::GradStore;
use candle_core::{bail, DType, Device, Result, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use candle_posenc::{Ctx, Llama};
use rand::{Rng, RngExt};
use std::f64::consts::PI;

/// Gradients are scaled down to this norm, taken over all weights together.
const LARGEST_NORM: f64 = 1.0;

/// The learning rate over a run: a linear rise over `warm_up` steps to `peak`, times a half cosine that falls
/// from 1 to 0.1.
#[derive(Debug, Clone, Copy)]
pub struct Schedule {
    pub peak: f64,
    pub warm_up: usize,
    pub steps: usize,
}

impl Schedule {
    /// A run of `steps` steps, a tenth of them (at most 100) warming up.
    pub fn new(peak: f64, steps: usize) -> Self {
        Self {
            peak,
            warm_up: (steps / 10).clamp(1, 100),
            steps,
        }
    }

    /// The rate at a step, counted from 0.
    pub fn rate(&self, step: usize) -> f64 {
        let rise = ((step + 1) as f64 / self.warm_up as f64).min(1.);
        let fall = 0.5 * (1. + (PI * step as f64 / self.steps as f64).cos());
        self.peak * rise * (0.1 + 0.9 * fall)
    }
}

/// AdamW (β 0.9 and 0.95, no decay) on a schedule, over clipped gradients.
pub struct Trainer {
    optimiser: AdamW,
    vars: Vec<Var>,
    schedule: Schedule,
    step: usize,
}

impl Trainer {
    /// A trainer of these weights.
    pub fn new(vars: Vec<Var>, schedule: Schedule) -> Result<Self> {
        let params = ParamsAdamW {
            lr: schedule.rate(0),
            beta1: 0.9,
            beta2: 0.95,
            weight_decay: 0.,
            ..ParamsAdamW::default()
        };
        Ok(Self {
            optimiser: AdamW::new(vars.clone(), params)?,
            vars,
            schedule,
            step: 0,
        })
    }

    /// One step on random windows of `text`; returns the loss before it, in nats per byte.
    pub fn step(
        &mut self,
        model: &Llama,
        text: &[u8],
        (batch, length): (usize, usize),
        rng: &mut dyn Rng,
        device: &Device,
    ) -> Result<f64> {
        let (tokens, next) = random_windows(text, batch, length, rng, device)?;
        let mut ctx = Ctx {
            train: true,
            rng: Some(rng),
            planned_len: None,
        };
        let loss = next_byte_loss(&model.forward(&tokens, &mut ctx)?, &next)?;
        let value = f64::from(loss.to_scalar::<f32>()?);
        if !value.is_finite() {
            bail!(
                "the loss is {value} at step {}: try a smaller --lr",
                self.step + 1
            )
        }
        let mut grads = loss.backward()?;
        let norm = clip_gradients(&mut grads, &self.vars, LARGEST_NORM)?;
        if !norm.is_finite() {
            bail!(
                "the gradient's norm is {norm} at step {}, its loss {value:.3}: try a smaller --lr",
                self.step + 1
            )
        }
        self.optimiser
            .set_learning_rate(self.schedule.rate(self.step));
        self.optimiser.step(&grads)?;
        self.step += 1;
        Ok(value)
    }
}

/// Scales the gradients of `vars` so that their common norm is at most `largest`; returns the norm before.
pub fn clip_gradients(grads: &mut GradStore, vars: &[Var], largest: f64) -> Result<f64> {
    let mut squares = 0.;
    for grad in vars.iter().filter_map(|var| grads.get(var)) {
        let sum = grad.sqr()?.sum_all()?.to_dtype(DType::F64)?;
        squares += sum.to_scalar::<f64>()?;
    }
    let norm = squares.sqrt();
    if norm > largest {
        for var in vars {
            if let Some(grad) = grads.remove(var) {
                grads.insert(var, (grad * (largest / norm))?);
            }
        }
    }
    Ok(norm)
}

/// `batch` windows from anywhere in `text`.
///
/// # Shapes
/// Bytes (B, T) and the byte after each (B, T), `u32`.
pub fn random_windows(
    text: &[u8],
    batch: usize,
    length: usize,
    rng: &mut dyn Rng,
    device: &Device,
) -> Result<(Tensor, Tensor)> {
    if text.len() <= length {
        bail!(
            "a window of {length} bytes and the byte after it do not fit a text of {} bytes",
            text.len()
        )
    }
    let starts: Vec<usize> = (0..batch)
        .map(|_| rng.random_range(0..text.len() - length))
        .collect();
    windows_at(text, &starts, length, device)
}

/// The windows of `text` that start at `starts`; each must leave a byte behind it.
///
/// # Shapes
/// Bytes (B, T) and the byte after each (B, T), `u32`.
pub fn windows_at(
    text: &[u8],
    starts: &[usize],
    length: usize,
    device: &Device,
) -> Result<(Tensor, Tensor)> {
    let cut = |shift: usize| {
        let bytes: Vec<u32> = starts
            .iter()
            .flat_map(|start| &text[start + shift..start + shift + length])
            .map(|byte| u32::from(*byte))
            .collect();
        Tensor::from_vec(bytes, (starts.len(), length), device)
    };
    Ok((cut(0)?, cut(1)?))
}

/// Mean cross-entropy of the next bytes, in nats, formed in f32.
///
/// # Shapes
/// logits (B, T, 256), next (B, T) → scalar.
fn next_byte_loss(logits: &Tensor, next: &Tensor) -> Result<Tensor> {
    let logits = logits.flatten_to(1)?.to_dtype(DType::F32)?;
    candle_nn::loss::cross_entropy(&logits, &next.flatten_all()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{rngs::StdRng, SeedableRng};

    #[test]
    fn schedule_rises_to_the_peak_and_falls_to_a_tenth() {
        let schedule = Schedule::new(1e-3, 1000);
        assert_eq!(schedule.warm_up, 100);
        assert!((schedule.rate(0) - 1e-5).abs() < 1e-9);
        // At step 99 the rise is complete and the cosine has fallen by 2.4 %.
        assert!((schedule.rate(99) - 0.9785e-3).abs() < 1e-6);
        assert!((schedule.rate(500) - 0.55e-3).abs() < 1e-9);
        assert!((schedule.rate(1000) - 1e-4).abs() < 1e-9);
        assert_eq!(Schedule::new(1., 3).warm_up, 1);
    }

    #[test]
    fn clip_gradients_common_norm_above_largest_becomes_largest() -> Result<()> {
        let a = Var::new(&[3f32, 0.], &Device::Cpu)?;
        let b = Var::new(&[[4f32]], &Device::Cpu)?;
        let vars = [a.clone(), b.clone()];
        // The gradient of half the sum of squares is the weights themselves: norm 5.
        let loss = ((a.sqr()?.sum_all()? + b.sqr()?.sum_all()?)? * 0.5)?;
        let mut grads = loss.backward()?;
        assert!((clip_gradients(&mut grads, &vars, 10.)? - 5.).abs() < 1e-6);
        assert_eq!(grads.get(&a).unwrap().to_vec1::<f32>()?, [3., 0.]);
        clip_gradients(&mut grads, &vars, 1.)?;
        let (ga, gb) = (
            grads.get(&a).unwrap().to_vec1::<f32>()?,
            grads.get(&b).unwrap().to_vec2::<f32>()?,
        );
        assert!((ga[0] - 0.6).abs() < 1e-6 && (gb[0][0] - 0.8).abs() < 1e-6);
        Ok(())
    }

    #[test]
    fn random_windows_targets_are_the_following_bytes() -> Result<()> {
        let text: Vec<u8> = (0..100).collect();
        let mut rng = StdRng::seed_from_u64(0);
        let (tokens, next) = random_windows(&text, 50, 7, &mut rng, &Device::Cpu)?;
        for (t, n) in tokens.to_vec2::<u32>()?.iter().zip(next.to_vec2::<u32>()?) {
            assert!(t.iter().zip(n).all(|(t, n)| t + 1 == n));
        }
        assert!(random_windows(&text, 1, 100, &mut rng, &Device::Cpu).is_err());
        assert!(random_windows(&text, 1, 99, &mut rng, &Device::Cpu).is_ok());
        Ok(())
    }
}
