//! Perplexity by context length.

use candle_core::{bail, DType, Device, Result, Tensor};
use candle_posenc::train::token_losses;
use candle_posenc::{Ctx, Llama, Positions};

/// Tokens in one forward pass; windows are batched up to it.
const TOKENS_AT_ONCE: usize = 4096;

/// How well a model predicts the next token in windows of one length.
#[derive(Debug, Clone, Copy)]
pub struct Perplexity {
    /// Number of windows read.
    pub windows: usize,
    /// exp of the mean loss of all their tokens.
    pub whole: f64,
    /// The same of the last quarter of each window: tokens with the longest context.
    pub last_quarter: f64,
}

/// The perplexity of `model` on `text`, bytes or token ids, cut into as many whole windows of `length` as there are. A
/// model that predicts every token surely has 1, one that has learnt nothing the size of the vocabulary.
///
/// # Errors
/// When no window fits the text, or the model refuses positions so far (a learned table ends).
pub fn perplexity<T: Copy + Into<u32>>(
    model: &Llama,
    text: &[T],
    length: usize,
    device: &Device,
) -> Result<Perplexity> {
    let starts = (0..text.len().saturating_sub(length)).step_by(length.max(1));
    perplexity_from(model, text, length, starts.collect(), device)
}

/// The same of `windows` windows that begin at equal distances, from the text's first token on.
///
/// # Errors
/// As [`perplexity`].
pub fn spread_perplexity<T: Copy + Into<u32>>(
    model: &Llama,
    text: &[T],
    length: usize,
    windows: usize,
    device: &Device,
) -> Result<Perplexity> {
    let room = text.len().saturating_sub(length.saturating_add(1));
    let starts = match text.len() > length {
        true => (0..windows).map(|i| i * room / windows).collect(),
        false => Vec::new(),
    };
    perplexity_from(model, text, length, starts, device)
}

fn perplexity_from<T: Copy + Into<u32>>(
    model: &Llama,
    text: &[T],
    length: usize,
    starts: Vec<usize>,
    device: &Device,
) -> Result<Perplexity> {
    if starts.is_empty() || length == 0 {
        bail!(
            "no window of {length} fits the {} held out, and one behind it",
            text.len()
        )
    }
    let late = length - length.div_ceil(4);
    let (mut whole, mut last_quarter) = (0., 0.);
    for starts in starts.chunks((TOKENS_AT_ONCE / length).max(1)) {
        let cut = |shift: usize| {
            let windows = starts
                .iter()
                .flat_map(|start| &text[start + shift..start + shift + length]);
            let tokens: Vec<u32> = windows.map(|token| (*token).into()).collect();
            Tensor::from_vec(tokens, (starts.len(), length), device)
        };
        let positions = Positions::first(length);
        let hidden = model.hidden_at(&cut(0)?, &positions, None, &mut Ctx::default())?;
        let losses = token_losses(&hidden.detach(), &model.head().detach(), &cut(1)?)?;
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

fn sum(losses: &Tensor) -> Result<f64> {
    losses.to_dtype(DType::F64)?.sum_all()?.to_scalar()
}

/// The front part of a held-out text that is whole windows of the longest length that fits, at most `most` of them,
/// and the token behind: where each length divides the next, all lengths then read the same tokens.
pub fn common_part<'a, T>(held_out: &'a [T], lengths: &[usize], most: usize) -> &'a [T] {
    let windows = |length: usize| held_out.len().saturating_sub(1) / length.max(1);
    let fitting = lengths.iter().filter(|length| windows(**length) > 0).max();
    match fitting {
        Some(longest) => &held_out[..windows(*longest).min(most) * longest + 1],
        None => held_out,
    }
}

/// 1, 2, 4, … times `length`, to `reach` times.
pub fn doublings(length: usize, reach: usize) -> Vec<usize> {
    let times = std::iter::successors(Some(1usize), |times| times.checked_mul(2));
    times
        .take_while(|times| *times <= reach)
        .map(|times| times.saturating_mul(length))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_posenc::{LlamaConfig, SeededVars};

    #[test]
    fn perplexity_of_a_model_that_has_learnt_nothing_is_near_the_vocabulary() -> Result<()> {
        let (device, vars) = (Device::Cpu, SeededVars::new(0));
        let config = LlamaConfig {
            vocab_size: 300,
            initializer_range: 1e-4,
            ..LlamaConfig::default()
        };
        let model = Llama::new(&config, vars.builder(DType::F32, &device))?;
        let text: Vec<u32> = (0..300).rev().collect();
        let found = perplexity(&model, &text, 37, &device)?;
        assert_eq!(found.windows, 8);
        for value in [found.whole, found.last_quarter] {
            assert!((value - 300.).abs() < 0.1, "{value}");
        }
        let bytes: Vec<u8> = (0..=255).collect();
        assert_eq!(perplexity(&model, &bytes, 255, &device)?.windows, 1);
        assert!(perplexity(&model, &bytes, 256, &device).is_err());
        assert!(perplexity(&model, &bytes, 0, &device).is_err());
        let spread = |windows| spread_perplexity(&model, &bytes, 100, windows, &device);
        assert_eq!(spread(7)?.windows, 7);
        assert!((spread(7)?.whole - 300.).abs() < 0.1);
        assert!(spread(0).is_err());
        assert!(spread_perplexity(&model, &bytes, 256, 2, &device).is_err());
        Ok(())
    }

    #[test]
    fn common_part_of_any_text_is_whole_windows_of_every_length_that_fits() {
        let lengths = doublings(32, 8);
        assert_eq!(lengths, [32, 64, 128, 256]);
        for (held_out, part) in [
            (20, 20),
            (33, 33),
            (70, 65),
            (200, 129),
            (257, 257),
            (9999, 2049),
        ] {
            assert_eq!(common_part(&vec![0; held_out], &lengths, 8).len(), part);
        }
    }
}
