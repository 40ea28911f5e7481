//! Training: the loss in chunks, and gradients with activations recomputed.

mod loss;
mod recompute;

pub use loss::{mean_loss, token_losses};
pub use recompute::{loss_and_gradients, Recompute};
