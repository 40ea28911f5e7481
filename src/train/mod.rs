//! Training: the parts of a loop, and a loop that can be stopped at any moment.
//!
//! # A loop of your own
//!
//! Each part stands alone; take those that you want.
//!
//! ```
//! use candle_core::{DType, Device};
//! use candle_posenc::train::{
//!     loss_and_gradients, AdamW, AdamWConfig, Gradients, Parameters, Recompute, Schedule, Windows,
//! };
//! use candle_posenc::{Ctx, Llama, LlamaConfig, Positions, SeededVars};
//!
//! # fn main() -> candle_core::Result<()> {
//! # let sizes = LlamaConfig { hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, ..LlamaConfig::default() };
//! # let text = "to be or not to be, that is the question; ".repeat(9);
//! // Weights: masters in f32, and what the model computes with (here the same; in BF16, copies).
//! let parameters = Parameters::new(SeededVars::new(0));
//! let model = Llama::new(&sizes, parameters.builder(DType::F32, &Device::Cpu))?;
//!
//! let mut optimiser = AdamW::new(AdamWConfig::default(), &parameters)?;
//! let schedule = Schedule::Cosine { peak: 1e-2, warm_up: 2, floor: 0.1 };
//! let (steps, batch, length, accumulation) = (10, 2, 32, 2);
//!
//! // Token ids cut into windows, each read once in an epoch. Bytes are ids below 256.
//! let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
//! let mut windows = Windows::new(tokens, length, 0)?;
//!
//! for step in 0..steps {
//!     let mut gradients = Gradients::default();
//!     for _ in 0..accumulation {
//!         let (tokens, targets) = windows.next_batch(batch, &Device::Cpu)?;
//!         let mut ctx = Ctx { train: true, ..Ctx::default() };
//!         let positions = Positions::first(length);
//!         // Cross-entropy in chunks: logits (B, T, V) never exist at once.
//!         let (loss, store) =
//!             loss_and_gradients(&model, &tokens, &targets, &positions, &mut ctx, Recompute::Nothing)?;
//!         # let _ = loss;
//!         gradients.accumulate(Gradients::of(&store, &parameters)?)?;
//!     }
//!     gradients.scale(1. / accumulation as f64)?;
//!     gradients.clip(1.)?;
//!     optimiser.step(&parameters, &gradients, schedule.rate(step, steps))?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # A run that can be stopped
//!
//! [`Trainer`] is that loop with an end, refusals (a loss that is not finite changes nothing) and checkpoints:
//!
//! ```
//! # use candle_core::{DType, Device};
//! # use candle_posenc::{Llama, LlamaConfig, SeededVars};
//! use candle_posenc::train::{Log, Parameters, Schedule, Trainer, TrainerConfig};
//!
//! # fn main() -> candle_core::Result<()> {
//! # let sizes = LlamaConfig { hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, ..LlamaConfig::default() };
//! # let text: Vec<u32> = "to be or not to be, that is the question; ".repeat(9).bytes().map(u32::from).collect();
//! # let folder = tempfile::tempdir()?;
//! # let run = folder.path();
//! let parameters = Parameters::new(SeededVars::new(0));
//! let model = Llama::new(&sizes, parameters.builder(DType::F32, &Device::Cpu))?;
//! let recipe = TrainerConfig {
//!     length: 32,
//!     steps: 10,
//!     schedule: Schedule::Cosine { peak: 1e-2, warm_up: 2, floor: 0.1 },
//!     ..TrainerConfig::default()
//! };
//! let mut trainer = Trainer::new(model, parameters, text, recipe)?;
//! if let Some(resumed) = trainer.resume(run.join("checkpoints"))? {
//!     println!("{} steps are done; {:?}", resumed.step, resumed.notes);
//! }
//! let mut log = Log::resume(run.join("log.csv"), 1, trainer.steps_done())?;
//! while !trainer.is_finished() {
//!     let report = trainer.step()?;
//!     log.record(&report)?;
//!     if report.step % 5 == 0 {
//!         trainer.save(run.join("checkpoints"))?;
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Started anew after a kill, this program ends with the weights, bit for bit, that it would have had without: on the
//! CPU, with the same number of threads. The example `train` is this with options.
//!
//! # What a checkpoint promises
//!
//! - It appears under its name whole, or not at all, and older ones are removed only then.
//! - It holds all that the next step depends on: weights, moments, the step, the place in the text, the random state.
//! - It is read whole or not at all. A changed byte anywhere is noticed by checksums; [`Trainer::resume`] then takes the
//!   one before, and says so. Another model, recipe or text is refused by the name of what differs.
//!
//! # Fine-tuning
//!
//! [`Parameters::only`] chooses what trains; the rest has no moments, and no gradients that are kept. Weights of a model from
//! elsewhere come through [`hf::ModelFolder::load_into`](crate::hf::ModelFolder::load_into), or `load_present` where the
//! new model has more weights than the old; then call [`Parameters::refresh`].

mod adamw;
mod checkpoint;
mod checksum;
#[cfg(feature = "cuda")]
mod cuda;
mod gradients;
mod log;
mod loss;
mod parameters;
mod recompute;
mod schedule;
mod table;
mod trainer;
mod windows;

pub use adamw::{AdamW, AdamWConfig, Group, Moments};
pub use checkpoint::{latest, Checkpoint, Latest};
pub use gradients::Gradients;
pub use log::Log;
pub use loss::{mean_loss, token_losses};
pub use parameters::{Parameter, Parameters};
pub use recompute::{loss_and_gradients, Recompute};
pub use schedule::Schedule;
pub use trainer::{Resumed, StepReport, Trainer, TrainerConfig};
pub use windows::{Cursor, Fingerprint, Windows};
