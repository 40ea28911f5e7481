//! Attention with positional encodings that **train**, for candle.
//!
//! In candle today rotary embeddings, the fused softmax and `RmsNorm::forward` drop gradients without an error, and
//! flash attention has no backward pass. Here every operation on the way has one:
//!
//! - [`attend()`]: softmax attention over any score, fused, forward and backward, memory linear in the length;
//!   [`plan`] tells which code will run, and why.
//! - [`rotate()`]: rotation of heads, differentiable in the head and in the table.
//! - [`encoding`]: RoPE with every length extension, ALiBi, TAPA, TAPE, absolute, none, or [your own](Encoding).
//! - [`Llama`]: a model that takes any of them, with a [`KvCache`]; [`hf`] reads and writes it as Hugging Face does.
//! - [`train`]: masters in f32, AdamW, checkpoints that resume bit for bit, long contexts in little memory.
//!
//! On NVIDIA GPUs, with the feature `cuda`, attention, rotation, TAPE's state, norms, SwiGLU, the loss and AdamW have
//! kernels of their own, forward and backward.
//!
//! # Quick start
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_posenc::encoding::RopeConfig;
//! use candle_posenc::{Ctx, EncodingConfig, Llama, LlamaConfig, SeededVars};
//!
//! # fn main() -> candle_core::Result<()> {
//! let encoding = EncodingConfig::Rope(RopeConfig { theta: 500_000., ..RopeConfig::default() });
//! let config = LlamaConfig { encoding, ..LlamaConfig::default() };
//! let vars = SeededVars::new(42);
//! let model = Llama::new(&config, vars.builder(DType::F32, &Device::Cpu))?;
//! let tokens = Tensor::new(&[[1u32, 2, 3, 4]], &Device::Cpu)?;
//! let logits = model.forward(&tokens, &mut Ctx::default())?; // (B, T, V)
//! let gradients = logits.sum_all()?.backward()?;
//! assert!(vars.vars().iter().all(|var| gradients.get(var).is_some()));
//! # Ok(())
//! # }
//! ```
//!
//! The [guide] goes on from here: [attention alone, models, generation](guide::quick_start),
//! [which encoding for what](guide::choosing_an_encoding), [training](guide::training),
//! [lengths beyond training](guide::beyond_the_training_length), [coming from candle-nn and
//! candle-flash-attn](guide::migrating).
//!
//! # Where tokens stand
//!
//! [`Positions`] is the only source of positions: a span with an offset for decoding and shards, or explicit ones for
//! left-padded batches and packed documents. Nothing is inferred from a tensor's length but the default of
//! [`attend()`], whose last query meets the last key.
//!
//! # Letters
//!
//! Everywhere B batch, H query heads, G key/value heads, T queries, S keys, D head width, E value width, C model
//! width, V vocabulary. Positions are in tokens, angles in radians, phases in turns.

mod atomic;
pub mod attend;
pub mod attention;
pub mod cache;
#[cfg(test)]
mod drawn;
mod embedding;
pub mod encoding;
mod feed_forward;
mod gpu;
pub mod guide;
mod heads;
pub mod hf;
mod host;
pub mod init;
mod json;
pub mod model;
pub mod norm;
pub mod positions;
mod projection;
mod recent;
pub mod rotate;
mod sum;
pub mod swiglu;
mod tensor_file;
pub mod train;

pub use attend::{
    attend, attend_with_lse, plan, plan_problem, AttendOutput, AttendSpec, Backend, BackwardPlan,
    DeviceKind, Operand, Path, Plan, Precision, Problem, Score,
};
pub use attention::{Attended, Attention};
pub use cache::{CacheStep, KvCache};
pub use encoding::{Ctx, Encoding, EncodingConfig, ModelDims, PosState, Qkv};
pub use init::SeededVars;
pub use model::{Llama, LlamaConfig, Stream};
pub use norm::rms_norm;
pub use positions::Positions;
pub use rotate::{convert_layout, rotate, Layout, Rotation};
pub use swiglu::swiglu;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
