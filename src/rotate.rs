//! Rotation of heads by per-token angles, differentiable in the head and in the table.

use candle_core::{bail, Result, Tensor};
use serde::{Deserialize, Serialize};

/// Cosines and sines of the angles (real and imaginary parts of the state, for TAPE) by which pairs turn.
///
/// # Shapes
/// Both (1 or B, 1 or G, T, R/2), R the number of coordinates that turn; f32, or f64 when what they rotate is f64.
#[derive(Debug, Clone)]
pub struct Rotation {
    /// Cosines, or real parts.
    pub cos: Tensor,
    /// Sines, or imaginary parts.
    pub sin: Tensor,
}

/// Which coordinates form pair j of R rotated ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// j and j + R/2: LLaMA as Hugging Face stores it, GPT-NeoX.
    #[default]
    Half,
    /// 2j and 2j + 1: the original LLaMA, GPT-J, Cohere.
    Interleaved,
}

/// Turns the first R coordinates of every head of `x`; the rest pass through.
pub fn rotate(_x: &Tensor, _rotation: &Rotation, _layout: Layout) -> Result<Tensor> {
    bail!("todo")
}
