//! Small models and their training from the beginning.

use super::progress::Progress;
use candle_core::{bail, Result};
use candle_posenc::train::{AdamWConfig, Parameters, Schedule, Trainer, TrainerConfig};
use candle_posenc::{EncodingConfig, Llama, LlamaConfig};

/// Sizes beyond these would end in a failed allocation.
const MOST_WEIGHTS: usize = 1 << 30;
const MOST_TOKENS: usize = 1 << 20;

/// What a small byte-level model is like, and how it is trained.
#[derive(Debug, Clone, Copy)]
pub struct Recipe {
    pub layers: usize,
    pub width: usize,
    pub heads: usize,
    /// Of a window, in bytes.
    pub length: usize,
    /// Windows in a batch.
    pub batch: usize,
    pub steps: usize,
    /// The highest learning rate.
    pub lr: f64,
}

impl Recipe {
    /// Checks what command lines gave; the message names the option.
    ///
    /// # Errors
    /// When a size is 0 or too large, or one does not divide another that it must.
    pub fn validate(&self) -> Result<()> {
        let Self {
            layers,
            width,
            heads,
            length,
            batch,
            steps,
            lr,
        } = *self;
        for (name, value) in [
            ("layers", layers),
            ("width", width),
            ("heads", heads),
            ("batch", batch),
            ("steps", steps),
        ] {
            if value == 0 {
                bail!("--{name} must be at least 1")
            }
        }
        if length < 4 {
            bail!("--length must be at least 4 bytes, got {length}")
        }
        if !(lr > 0. && lr.is_finite()) {
            bail!("--lr must be above 0, got {lr}")
        }
        if width % heads != 0 || (width / heads) % 2 != 0 {
            bail!("--width must be an even multiple of --heads; got {width} and {heads}")
        }
        // Projections and the feed-forward part; the embeddings.
        let weights = layers
            .saturating_mul(12)
            .saturating_mul(width.saturating_mul(width))
            .saturating_add(width.saturating_mul(256));
        if weights > MOST_WEIGHTS {
            bail!("--layers {layers} of --width {width} make more than {MOST_WEIGHTS} weights")
        }
        if batch.saturating_mul(length) > MOST_TOKENS {
            bail!(
                "--batch {batch} of --length {length} make more than {MOST_TOKENS} bytes in a step"
            )
        }
        Ok(())
    }

    /// The model's sizes, with an encoding.
    pub fn model(&self, encoding: EncodingConfig) -> LlamaConfig {
        LlamaConfig {
            hidden_size: self.width,
            // Three matrices of 8/3 the width have as many weights as the usual two of four times the width.
            intermediate_size: (8 * self.width / 3).next_multiple_of(8),
            num_hidden_layers: self.layers,
            num_attention_heads: self.heads,
            num_key_value_heads: self.heads,
            max_position_embeddings: self.length,
            encoding,
            ..LlamaConfig::default()
        }
    }

    /// AdamW without decay, a tenth of the steps warming up, then half a cosine down to a tenth of the rate.
    pub fn trainer(&self, seed: u64) -> TrainerConfig {
        TrainerConfig {
            seed,
            batch: self.batch,
            length: self.length,
            steps: self.steps,
            schedule: Schedule::Cosine {
                peak: self.lr,
                warm_up: (self.steps / 10).min(100),
                floor: 0.1,
            },
            adamw: AdamWConfig {
                weight_decay: 0.,
                ..AdamWConfig::default()
            },
            ..TrainerConfig::default()
        }
    }
}

/// Trains a model, with its progress on standard error.
///
/// # Errors
/// When the recipe does not fit the model or the text, or the loss leaves the finite numbers.
pub fn train(
    model: Llama,
    parameters: Parameters,
    text: &[u32],
    config: TrainerConfig,
) -> Result<()> {
    let mut progress = Progress::new(config.steps, 0)?;
    let mut trainer = Trainer::new(model, parameters, text, config)?;
    while !trainer.is_finished() {
        progress.report(&trainer.step()?);
    }
    progress.finish();
    Ok(())
}

/// Bytes as token ids.
pub fn tokens(bytes: &[u8]) -> Vec<u32> {
    bytes.iter().map(|byte| u32::from(*byte)).collect()
}
