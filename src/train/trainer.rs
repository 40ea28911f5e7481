//! The training loop's body, and what it takes to stop and go on.

use super::adamw::{AdamW, AdamWConfig};
use super::checkpoint::{self, Checkpoint, Draws, State};
use super::gradients::Gradients;
use super::parameters::Parameters;
use super::recompute::{loss_and_gradients, Recompute};
use super::schedule::Schedule;
use super::windows::{Cursor, Fingerprint, Windows};
use crate::atomic;
use crate::encoding::Ctx;
use crate::init::mix;
use crate::model::Llama;
use crate::positions::Positions;
use candle_core::{bail, DType, Device, Error, Result, Tensor};
use rand::rngs::ChaCha12Rng;
use rand::SeedableRng;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// How many checkpoints are kept unless told otherwise.
const KEPT: usize = 2;

/// The recipe of a run. All that its result depends on beside the model, its weights and the text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainerConfig {
    /// Seed of the order of windows and of what the encoding draws.
    pub seed: u64,
    /// Windows in a batch B.
    pub batch: usize,
    /// Tokens in a window T.
    pub length: usize,
    /// Batches whose gradients are averaged before each step: memory for one, the effect of as many.
    pub accumulation: usize,
    /// Steps of the run.
    pub steps: usize,
    /// The learning rate.
    pub schedule: Schedule,
    /// The optimiser.
    pub adamw: AdamWConfig,
    /// The largest norm of all gradients together; `None` leaves them as they are.
    pub clip: Option<f64>,
    /// What the backward pass computes again instead of keeping it.
    pub recompute: Recompute,
}

impl Default for TrainerConfig {
    /// A short run of a small model: 1000 steps of 4 windows of 256 tokens, the rate a cosine from 0.001 to a tenth,
    /// gradients clipped to 1.
    fn default() -> Self {
        Self {
            seed: 0,
            batch: 4,
            length: 256,
            accumulation: 1,
            steps: 1000,
            schedule: Schedule::Cosine {
                peak: 1e-3,
                warm_up: 100,
                floor: 0.1,
            },
            adamw: AdamWConfig::default(),
            clip: Some(1.),
            recompute: Recompute::Nothing,
        }
    }
}

impl TrainerConfig {
    /// Checks that the numbers make a run.
    ///
    /// # Errors
    /// When a size is 0, or a number is out of its range.
    pub fn validate(&self) -> Result<()> {
        for (name, size) in [
            ("batch", self.batch),
            ("length", self.length),
            ("accumulation", self.accumulation),
            ("steps", self.steps),
        ] {
            if size == 0 {
                bail!("trainer: {name} must be at least 1")
            }
        }
        if self.tokens_a_step().is_none() {
            bail!(
                "trainer: {} batches of {} windows of {} tokens are too many to count",
                self.accumulation,
                self.batch,
                self.length
            )
        }
        // JSON, in which checkpoints hold it, knows no infinity.
        if let Some(clip) = (self.clip).filter(|clip| !(clip.is_finite() && *clip > 0.)) {
            bail!("trainer: clip must be above 0 and finite, got {clip}")
        }
        self.schedule.validate(self.steps)?;
        self.adamw.validate()
    }

    fn tokens_a_step(&self) -> Option<usize> {
        let windows = self.accumulation.checked_mul(self.batch)?;
        windows.checked_mul(self.length)
    }
}

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepReport {
    /// Number of steps done, this one included.
    pub step: usize,
    /// Mean cross-entropy before the step, in nats per token.
    pub loss: f64,
    /// Norm of the gradients before they were clipped.
    pub gradient_norm: f64,
    /// Learning rate.
    pub rate: f64,
    /// Tokens that the step read.
    pub tokens: usize,
    /// Time of the step, in seconds.
    pub seconds: f64,
    /// Time of all steps of the run so far, in seconds, those before it was resumed included.
    pub elapsed: f64,
}

/// Where a run was taken up again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resumed {
    /// The checkpoint.
    pub folder: PathBuf,
    /// Number of steps done.
    pub step: usize,
    /// What one should know: newer checkpoints that are damaged, or why the run may differ in rounding.
    pub notes: Vec<String>,
}

/// A run of training: a model, its weights, a text and the recipe.
///
/// A step that fails leaves everything as it was. The same calls give the same bits on the CPU, given the same number
/// of threads, also when the run is interrupted, [resumed](Self::resume) and goes on.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_posenc::train::{Parameters, Schedule, Trainer, TrainerConfig};
/// use candle_posenc::{Llama, LlamaConfig, SeededVars};
/// # fn main() -> candle_core::Result<()> {
/// let parameters = Parameters::new(SeededVars::new(0));
/// let sizes = LlamaConfig { hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, ..LlamaConfig::default() };
/// let model = Llama::new(&sizes, parameters.builder(DType::F32, &Device::Cpu))?;
/// let text: Vec<u32> = "the cat sat on the mat ".repeat(20).bytes().map(u32::from).collect();
/// let schedule = Schedule::Cosine { peak: 1e-2, warm_up: 2, floor: 0.1 };
/// let config = TrainerConfig { length: 16, steps: 20, schedule, ..TrainerConfig::default() };
/// let mut trainer = Trainer::new(model, parameters, text, config)?;
/// let first = trainer.step()?.loss;
/// let mut last = first;
/// while !trainer.is_finished() {
///     last = trainer.step()?.loss;
/// }
/// assert!(last < first);
/// let run = tempfile::tempdir()?;
/// trainer.save(run.path())?; // run/step-00000020
/// # Ok(())
/// # }
/// ```
pub struct Trainer {
    model: Llama,
    parameters: Parameters,
    optimiser: AdamW,
    config: TrainerConfig,
    windows: Windows,
    fingerprint: Fingerprint,
    /// What the encoding draws from.
    rng: ChaCha12Rng,
    step: usize,
    elapsed: f64,
    kept: usize,
}

impl Trainer {
    /// A run at its beginning. The model was built from `parameters`; the text is token ids, bytes being those below
    /// 256.
    ///
    /// # Errors
    /// When the recipe is [not valid](TrainerConfig::validate), no weight trains, a token is not in the vocabulary, or
    /// the text is shorter than a window and its last target.
    pub fn new(
        model: Llama,
        parameters: Parameters,
        text: impl Into<Arc<[u32]>>,
        config: TrainerConfig,
    ) -> Result<Self> {
        let optimiser = AdamW::new(config.adamw, &parameters)?;
        Self::with_optimiser(model, parameters, text, config, optimiser)
    }

    /// The same with an optimiser made before, with groups of one's own.
    ///
    /// # Errors
    /// As [`new`](Self::new), and when the optimiser's numbers are not the recipe's or its weights not those that train.
    pub fn with_optimiser(
        model: Llama,
        parameters: Parameters,
        text: impl Into<Arc<[u32]>>,
        config: TrainerConfig,
        optimiser: AdamW,
    ) -> Result<Self> {
        config.validate()?;
        let trained = parameters.trained();
        if trained.is_empty() {
            bail!("trainer: no weight trains: build the model from the parameters first, and choose some")
        }
        let names = trained.iter().map(|p| p.name.as_str());
        if optimiser.config() != &config.adamw || !names.eq(optimiser.state().map(|(name, _)| name))
        {
            bail!("trainer: the optimiser was not made from this recipe and these weights")
        }
        let text = text.into();
        let vocab = model.config().vocab_size;
        if let Some(token) = text.iter().find(|token| **token as usize >= vocab) {
            bail!("trainer: token id {token} of the text is not in the vocabulary of {vocab}")
        }
        let windows = Windows::new(text, config.length, config.seed)?;
        Ok(Self {
            fingerprint: windows.fingerprint(),
            rng: ChaCha12Rng::seed_from_u64(mix(config.seed, "draws of training")),
            model,
            parameters,
            optimiser,
            config,
            windows,
            step: 0,
            elapsed: 0.,
            kept: KEPT,
        })
    }

    /// Keeps the newest `kept` checkpoints, at least one, in place of two.
    pub fn keeping(mut self, kept: usize) -> Self {
        self.kept = kept.max(1);
        self
    }

    /// The model, as trained so far.
    pub fn model(&self) -> &Llama {
        &self.model
    }

    /// The weights, as trained so far.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// The optimiser and its state.
    pub fn optimiser(&self) -> &AdamW {
        &self.optimiser
    }

    /// The recipe.
    pub fn config(&self) -> &TrainerConfig {
        &self.config
    }

    /// Number of steps done.
    pub fn steps_done(&self) -> usize {
        self.step
    }

    /// Where in the text the next step begins.
    pub fn cursor(&self) -> Cursor {
        self.windows.cursor()
    }

    /// Whether all steps of the run are done.
    pub fn is_finished(&self) -> bool {
        self.step >= self.config.steps
    }

    /// The next step.
    ///
    /// # Errors
    /// When the run is finished, the loss or the gradients are not finite, the loss depends on no weight that trains
    /// (the model was built from other parameters), or the model refuses. Then weights, optimiser, the place in the text and the random state are as they were.
    pub fn step(&mut self) -> Result<StepReport> {
        let (windows, word) = (self.windows.clone(), self.rng.get_word_pos());
        let report = self.try_step();
        if report.is_err() {
            self.windows = windows;
            self.rng.set_word_pos(word);
        }
        report
    }

    fn try_step(&mut self) -> Result<StepReport> {
        let started = Instant::now();
        if self.is_finished() {
            bail!(
                "trainer: all {} steps of the run are done",
                self.config.steps
            )
        }
        let step = self.step + 1;
        let (losses, gradients) = self.losses_and_gradients()?;
        // Read last: a GPU is then still busy while all of this is launched.
        let (norm, factor) = match self.config.clip {
            Some(largest) => gradients.clipping(largest)?,
            None => (gradients.norm()?, 1.),
        };
        let loss = mean(&losses)?;
        if !loss.is_finite() {
            bail!("trainer: the loss is {loss} at step {step}, which is not done; a lower learning rate may help")
        }
        if gradients.named().next().is_none() {
            bail!("trainer: the loss depends on no weight that trains: was the model built from other parameters?")
        }
        if !norm.is_finite() {
            bail!(
                "trainer: the gradients' norm is {norm} at step {step} with a loss of {loss:.3}; the step is not done, \
                 a lower learning rate may help"
            )
        }
        let rate = self.config.schedule.rate(self.step, self.config.steps);
        self.optimiser
            .step_by_scaled(&self.parameters, &gradients, factor, rate)?;
        self.step = step;
        let seconds = started.elapsed().as_secs_f64();
        self.elapsed += seconds;
        Ok(StepReport {
            step,
            loss,
            gradient_norm: norm,
            rate,
            tokens: self.config.tokens_a_step().unwrap_or(usize::MAX),
            seconds,
            elapsed: self.elapsed,
        })
    }

    /// The loss of each of the step's batches, all of one size, and the mean of their gradients.
    fn losses_and_gradients(&mut self) -> Result<(Vec<Tensor>, Gradients)> {
        let TrainerConfig {
            batch,
            length,
            accumulation,
            recompute,
            ..
        } = self.config;
        let positions = Positions::first(length);
        let (mut losses, mut sum) = (Vec::new(), Gradients::default());
        for _ in 0..accumulation {
            let (tokens, targets) = self.windows.next_batch(batch, &Device::Cpu)?;
            let mut ctx = Ctx {
                train: true,
                rng: Some(&mut self.rng),
                planned_len: None,
            };
            let (loss, store) = loss_and_gradients(
                &self.model,
                &tokens,
                &targets,
                &positions,
                &mut ctx,
                recompute,
            )?;
            losses.push(loss);
            sum.accumulate(Gradients::of(&store, &self.parameters)?)?;
        }
        if accumulation > 1 {
            sum.scale(1. / accumulation as f64)?;
        }
        Ok((losses, sum))
    }

    /// Writes a checkpoint, `step-00000123` in the folder of a run, which is made where it is missing; then removes
    /// older ones beyond those [kept](Self::keeping). A stop at any moment leaves the checkpoints before or with the
    /// new one, whole. Returns the checkpoint's folder.
    ///
    /// # Errors
    /// When files cannot be written, or the run has another whole checkpoint of this step, with another state.
    pub fn save(&self, run: impl AsRef<Path>) -> Result<PathBuf> {
        checkpoint::write(
            run.as_ref(),
            self.state()?,
            self.parameters.masters(),
            &self.optimiser,
            self.kept,
        )
    }

    /// Goes on from the newest checkpoint of a run that is whole; `None` where there is no checkpoint yet. What a
    /// killed process left unfinished in the folder is removed, so one process at a time may work in it.
    ///
    /// # Errors
    /// When there are checkpoints but none is whole, or as [`restore`](Self::restore). Then nothing is changed.
    pub fn resume(&mut self, run: impl AsRef<Path>) -> Result<Option<Resumed>> {
        let run = run.as_ref();
        if !run.exists() {
            return Ok(None);
        }
        atomic::remove_unfinished(run)?;
        let Some(latest) = checkpoint::latest(run)? else {
            return Ok(None);
        };
        let mut resumed = self.restore(&latest.checkpoint)?;
        resumed.notes.splice(0..0, latest.passed_over);
        Ok(Some(resumed))
    }

    /// Goes on from a checkpoint.
    ///
    /// # Errors
    /// When the checkpoint is of another model, recipe, text or choice of weights. Then nothing is changed.
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<Resumed> {
        let here = self.state()?;
        let there = checkpoint.state();
        let told = |error: Error| atomic::about(checkpoint.folder(), error);
        here.check_same_run(there).map_err(told)?;
        if there.step > self.config.steps {
            return Err(told(Error::msg(format!(
                "{} steps are done of {}",
                there.step, self.config.steps
            ))));
        }
        let mut windows = self.windows.clone();
        windows.seek(there.cursor).map_err(told)?;
        let rng = there.draws.generator().map_err(told)?;
        let masters = self.parameters.masters().named();
        let weights = masters
            .iter()
            .map(|(name, var)| (name.as_str(), var.as_tensor()));
        let weights = checkpoint.weights(weights).map_err(told)?;
        let moments = checkpoint.moments(&self.optimiser).map_err(told)?;

        for ((_, var), weight) in masters.iter().zip(&weights) {
            var.set(weight)?;
        }
        self.parameters.refresh()?;
        for (name, first, second, updates) in &moments {
            self.optimiser.set_state(name, first, second, *updates)?;
        }
        (self.windows, self.rng) = (windows, rng);
        (self.step, self.elapsed) = (there.step, there.seconds);
        Ok(Resumed {
            folder: checkpoint.folder().to_path_buf(),
            step: there.step,
            notes: checkpoint.notes(&here),
        })
    }

    fn state(&self) -> Result<State> {
        let compute: BTreeSet<_> = (self.parameters.all().iter())
            .map(|parameter| parameter.working.dtype().as_str().to_string())
            .collect();
        Ok(State {
            step: self.step,
            seconds: self.elapsed,
            threads: rayon::current_num_threads(),
            config: self.config.clone(),
            model: self.model.config().clone(),
            compute: compute.into_iter().collect(),
            groups: self.optimiser.groups_checksum()?,
            text: self.fingerprint.clone(),
            cursor: self.windows.cursor(),
            draws: Draws::of(&self.rng),
        })
    }
}

/// The mean of scalars.
fn mean(scalars: &[Tensor]) -> Result<f64> {
    let mut sum = 0.;
    for scalar in scalars {
        sum += scalar.to_dtype(DType::F64)?.to_scalar::<f64>()?;
    }
    Ok(sum / scalars.len() as f64)
}
