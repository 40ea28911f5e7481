//! ALiBi (Press et al., "Train short, test long: attention with linear biases enables input length extrapolation",
//! arXiv 2108.12409v2, §3; its formulas are not numbered).
//!
//! The score of a query at m and a key at n is q·k/√D − slope_h·|m − n|. For H heads, H a power of two, the slopes are the
//! geometric sequence 2^(−8/H), 2^(−16/H), …, 2^(−8).
//!
//! # Symbols
//! H query heads, h = 0..H a head, P the largest power of two not above H, m and n positions in tokens.
//!
//! # Deviations
//! For other head counts the paper gives no rule; this is that of the authors' code: the slopes of P heads, then every
//! other slope of 2P heads, from its first. Without a causal mask the bias is symmetric, the variant the authors
//! recommend for encoders; the paper treats only m ≥ n.

use super::{Encoding, EncodingConfig, ModelDims};
use crate::attend::Score;
use candle_core::{bail, Result};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Parameters of [`Alibi`].
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AlibiConfig {
    /// One slope for each query head, per token of distance; `None` takes [`alibi_slopes`]. A model that holds only
    /// some of the heads states theirs here.
    pub slopes: Option<Vec<f64>>,
}

/// ALiBi: biases scores by the distance.
#[derive(Debug, Clone)]
pub struct Alibi {
    config: AlibiConfig,
    slopes: Arc<[f64]>,
}

impl Alibi {
    /// ALiBi for a model of these sizes.
    ///
    /// # Errors
    /// When there is not one finite slope for each query head.
    pub fn new(config: &AlibiConfig, dims: &ModelDims) -> Result<Self> {
        let slopes = match &config.slopes {
            Some(slopes) => slopes.clone(),
            None => alibi_slopes(dims.heads),
        };
        if slopes.len() != dims.heads {
            bail!(
                "alibi: {} slopes for {} query heads",
                slopes.len(),
                dims.heads
            )
        }
        if let Some((h, slope)) = slopes.iter().enumerate().find(|(_, s)| !s.is_finite()) {
            bail!("alibi: slope {slope} of head {h} is not finite")
        }
        Ok(Self {
            config: config.clone(),
            slopes: slopes.into(),
        })
    }
}

/// The authors' slopes for any number of heads, per token of distance.
///
/// ```
/// use candle_posenc::encoding::alibi_slopes;
/// assert_eq!(alibi_slopes(4), [0.25, 0.0625, 0.015625, 0.00390625]);
/// assert_eq!(alibi_slopes(3), [0.0625, 0.00390625, 0.25]);
/// ```
pub fn alibi_slopes(heads: usize) -> Vec<f64> {
    let Some(log) = heads.checked_ilog2() else {
        return Vec::new();
    };
    let power = 1usize << log;
    let slope = |h: usize, of: f64| (-8. * (h + 1) as f64 / of).exp2();
    let first = (0..power).map(|h| slope(h, power as f64));
    let between = (0..heads - power).map(|i| slope(2 * i, 2. * power as f64));
    first.chain(between).collect()
}

impl Encoding for Alibi {
    fn config(&self) -> EncodingConfig {
        EncodingConfig::Alibi(self.config.clone())
    }

    fn updates(&self, _layer: usize) -> bool {
        false
    }

    fn score(&self, _layer: usize) -> Score {
        Score::LinearBias {
            slopes: self.slopes.clone(),
        }
    }
}
