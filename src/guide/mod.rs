//! A guide in five pages: from the first model to lengths beyond training.
//!
//! 1. [Quick start](quick_start): attention alone, a model, a model from Hugging Face, a step of training.
//! 2. [Choosing an encoding](choosing_an_encoding): what is known about each, and what is not.
//! 3. [Training](training): the loop, precision, memory, checkpoints.
//! 4. [Beyond the training length](beyond_the_training_length): what fails, what helps, how to measure it.
//! 5. [Migrating](migrating) from `candle_nn::rotary_emb` and from `candle-flash-attn`.

#[doc = include_str!("quick_start.md")]
pub mod quick_start {}

#[doc = include_str!("choosing_an_encoding.md")]
pub mod choosing_an_encoding {}

#[doc = include_str!("training.md")]
pub mod training {}

#[doc = include_str!("beyond_the_training_length.md")]
pub mod beyond_the_training_length {}

#[doc = include_str!("migrating.md")]
pub mod migrating {}
