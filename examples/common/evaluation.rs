//! Perplexity by context length.

use candle_core::{bail, DType, Device, Result, Tensor, D};
use candle_posenc::{Ctx, Llama};

/// Tokens in one forward pass; windows are batched up to it.
const TOKENS_AT_ONCE: usize = 4096;

/// How well a model predicts the next byte in windows of one length.
#[derive(Debug, Clone, Copy)]
pub struct Perplexity {
    /// Number of windows read.
    pub windows: usize,
    /// exp of the mean loss of all their bytes.
    pub whole: f64,
    /// The same of the last quarter of each window: bytes with the longest context.
    pub last_quarter: f64,
}

/// The perplexity of `model` on `text`, cut into as many whole windows of `length` bytes as there are. A model
/// that predicts every byte surely has 1, one that has learnt nothing 256.
///
/// # Errors
/// When no window fits the text, or the model refuses positions so far (a learned table ends).
pub fn perplexity(
    model: &Llama,
    text: &[u8],
    length: usize,
    device: &Device,
) -> Result<Perplexity> {
    let starts: Vec<usize> = (0..text.len().saturating_sub(length))
        .step_by(length.max(1))
        .collect();
    if starts.is_empty() || length == 0 {
        bail!(
            "no window of {length} bytes fits the {} held-out bytes",
            text.len()
        )
    }
    let late = length - length.div_ceil(4);
    let (mut whole, mut last_quarter) = (0., 0.);
    for starts in starts.chunks((TOKENS_AT_ONCE / length).max(1)) {
        let (tokens, next) = windows_at(text, starts, length, device)?;
        let logits = model.forward(&tokens, &mut Ctx::default())?;
        let losses = losses(&logits, &next)?;
        whole += sum(&losses)?;
        last_quarter += sum(&losses.narrow(1, late, length - late)?)?;
    }
    let windows = starts.len();
    Ok(Perplexity {
        windows,
        whole: (whole / (windows * length) as f64).exp(),
        last_quarter: (last_quarter / (windows * (length - late)) as f64).exp(),
    })
}

/// The windows of `text` that start at `starts`; each must leave a byte behind it.
///
/// # Shapes
/// Bytes (B, T) and the byte after each (B, T), `u32`.
fn windows_at(
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

/// The cross-entropy of every next byte, in nats.
///
/// # Shapes
/// logits (B, T, 256), next (B, T) → (B, T), f32.
fn losses(logits: &Tensor, next: &Tensor) -> Result<Tensor> {
    let log_probabilities = candle_nn::ops::log_softmax(&logits.to_dtype(DType::F32)?, D::Minus1)?;
    log_probabilities
        .gather(&next.unsqueeze(D::Minus1)?, D::Minus1)?
        .squeeze(D::Minus1)?
        .neg()
}

fn sum(losses: &Tensor) -> Result<f64> {
    losses.to_dtype(DType::F64)?.sum_all()?.to_scalar()
}
