//! Training.

mod adamw;
mod checksum;
mod gradients;
mod parameters;
mod schedule;
mod windows;

pub use adamw::{AdamW, AdamWConfig, Group, Moments};
pub use gradients::Gradients;
pub use parameters::{Parameter, Parameters};
pub use schedule::Schedule;
pub use windows::{Cursor, Fingerprint, Windows};
