//! Training.

mod adamw;
mod checkpoint;
mod checksum;
mod gradients;
mod log;
mod loss;
mod parameters;
mod recompute;
mod schedule;
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
