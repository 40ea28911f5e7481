//! Length extensions of RoPE: how fast each pair turns, and by how much cosines and sines are multiplied.
//!
//! | name | source |
//! |---|---|
//! | linear | Chen et al., "Extending context window of large language models via positional interpolation", arXiv 2306.15595v2, §2.3 |
//! | ntk, dynamic, yarn | Peng et al., "YaRN: efficient context window extension of large language models", arXiv 2309.00071v2: Definition 1 (NTK-aware), §3.3 (dynamic), Definitions 2 and 3 (NTK-by-parts, YaRN) |
//! | longrope | Ding et al., "LongRoPE: extending LLM context window beyond 2 million tokens", arXiv 2402.13753v1, §3; the factor on cosines and sines is that of Phi-3, as Hugging Face has it |
//! | llama3 | Llama 3.1, no paper: the rule of Meta's reference code, as Hugging Face has it |
//! | proportional | Gemma, no paper: as Hugging Face has it |
//!
//! # Symbols
//! θ base, R coordinates that turn, j = 0..R/2 a pair, ω_j = θ^(−2j/R) radians per token, s factor, L the length in
//! tokens that the model was first trained for, N the length of the sequence.
//!
//! # Deviations
//! Frequencies are f64. Details that the papers leave open are Hugging Face's (transformers 5), with one exception:
//! where YaRN's ramp would end before it begins (L or θ so small that every pair turns slowly, or every pair fast),
//! Hugging Face's formula runs backwards; here it is a step.

use crate::json::{brief, Fields};
use candle_core::{bail, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::f64::consts::PI;

/// A length extension, named and parametrised as Hugging Face does in `rope_scaling` and `rope_parameters`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename_all = "lowercase", deny_unknown_fields)]
pub enum RopeScaling {
    /// ω_j as it is.
    #[default]
    Default,
    /// Position interpolation: ω_j / s.
    Linear {
        /// s, at least 1.
        factor: f64,
    },
    /// NTK-aware with the factor of the current length: beyond L, θ becomes
    /// θ·(s·N/L − (s − 1))^(R/(R − 2)). L is the model's `max_position_embeddings`, also where a configuration
    /// states another `original_max_position_embeddings` (Hugging Face ignores it here).
    Dynamic {
        /// s, at least 1.
        factor: f64,
    },
    /// NTK-aware with a fixed factor: θ becomes θ·s^(R/(R − 2)).
    Ntk {
        /// s, at least 1.
        factor: f64,
    },
    /// YaRN.
    Yarn(Yarn),
    /// LongRoPE.
    LongRope(LongRope),
    /// Llama 3.1: slow pairs (wavelength above L/low) turn s times slower, fast ones (below L/high) as before, those
    /// between in a blend.
    Llama3 {
        /// s, at least 1.
        factor: f64,
        /// Turns over L below which a pair is slow.
        low_freq_factor: f64,
        /// Turns over L above which a pair is fast.
        high_freq_factor: f64,
        /// L.
        original_max_position_embeddings: usize,
    },
    /// Gemma: pairs reach across the whole head and ω_j = θ^(−2j/D) / s, but only the first `partial_rotary_factor`
    /// of them turn; the others have frequency 0. Not the same as rotating a part of the head.
    Proportional {
        /// s, at least 1.
        #[serde(default = "one")]
        factor: f64,
    },
}

/// YaRN: pairs that turn fewer than `beta_slow` times over L turn s times slower, those that turn more than
/// `beta_fast` times as before, a linear ramp over the pairs between; cosines and sines are multiplied by a
/// temperature.
///
/// The temperature is `attention_factor`; else m(`mscale`)/m(`mscale_all_dim`) if both are given and not 0; else m(1),
/// where m(a) = 0.1·a·ln s + 1. One of the two alone has no effect. With both equal it is 1: DeepSeek models then
/// multiply the softmax scale by m² instead, which is `AttendSpec::scale`'s to do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Yarn {
    /// s, at least 1; by default the model's longest length divided by L.
    pub factor: Option<f64>,
    /// L; by default the model's longest length.
    pub original_max_position_embeddings: Option<usize>,
    /// Turns over L above which a pair keeps its frequency.
    pub beta_fast: f64,
    /// Turns over L below which a pair turns s times slower.
    pub beta_slow: f64,
    /// Whether the ramp begins and ends at whole pairs.
    pub truncate: bool,
    /// What cosines and sines are multiplied by.
    pub attention_factor: Option<f64>,
    /// a of the numerator.
    pub mscale: Option<f64>,
    /// a of the denominator.
    pub mscale_all_dim: Option<f64>,
}

impl Default for Yarn {
    fn default() -> Self {
        Self {
            factor: None,
            original_max_position_embeddings: None,
            beta_fast: 32.,
            beta_slow: 1.,
            truncate: true,
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
        }
    }
}

/// LongRoPE: ω_j divided by a factor of its own, from one list up to L tokens and from another beyond; cosines and
/// sines multiplied by `attention_factor`, by default √(1 + ln s / ln L), 1 for s ≤ 1.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LongRope {
    /// R/2 divisors for N ≤ L.
    pub short_factor: Vec<f64>,
    /// R/2 divisors for N > L.
    pub long_factor: Vec<f64>,
    /// s, by default the model's longest length divided by L.
    #[serde(default)]
    pub factor: Option<f64>,
    /// L; by default the model's longest length.
    #[serde(default)]
    pub original_max_position_embeddings: Option<usize>,
    /// What cosines and sines are multiplied by.
    #[serde(default)]
    pub attention_factor: Option<f64>,
}

/// How fast pairs turn.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeFrequencies {
    /// Radians per token, one entry for each rotated pair.
    pub inv_freq: Vec<f64>,
    /// What cosines and sines are multiplied by.
    pub attention_scaling: f64,
}

/// What a scaling is evaluated for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Setting {
    /// θ.
    pub theta: f64,
    /// D.
    pub head_dim: usize,
    /// The part of the head that turns.
    pub partial_rotary_factor: f64,
    /// The model's longest length in tokens.
    pub max_positions: usize,
    /// N; without it the length at which nothing needs extending.
    pub seq_len: Option<usize>,
}

fn one() -> f64 {
    1.
}

/// m(a) of [`Yarn`].
fn temperature(factor: f64, a: f64) -> f64 {
    if factor <= 1. {
        1.
    } else {
        0.1 * a * factor.ln() + 1.
    }
}

impl RopeScaling {
    /// Hugging Face's name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Linear { .. } => "linear",
            Self::Dynamic { .. } => "dynamic",
            Self::Ntk { .. } => "ntk",
            Self::Yarn(_) => "yarn",
            Self::LongRope(_) => "longrope",
            Self::Llama3 { .. } => "llama3",
            Self::Proportional { .. } => "proportional",
        }
    }

    /// Whether frequencies change with the length of the sequence.
    pub fn depends_on_length(&self) -> bool {
        matches!(self, Self::Dynamic { .. } | Self::LongRope(_))
    }

    pub(super) fn frequencies(&self, setting: Setting) -> Result<RopeFrequencies> {
        let name = self.name();
        let Setting {
            theta,
            head_dim,
            max_positions,
            seq_len,
            ..
        } = setting;
        let rotated = self.rotated(&setting)?;
        let powers = |base: f64| -> Vec<f64> {
            let power = |j| base.powf(-2. * j as f64 / rotated as f64);
            (0..rotated / 2).map(power).collect()
        };
        let plain = powers(theta);
        let unscaled = |inv_freq: Vec<f64>| RopeFrequencies {
            inv_freq,
            attention_scaling: 1.,
        };
        let divided = |by: f64| plain.iter().map(|w| w / by).collect::<Vec<f64>>();
        Ok(match self {
            Self::Default => unscaled(plain),
            Self::Linear { factor } => unscaled(divided(at_least_one(name, "factor", *factor)?)),
            Self::Ntk { factor } => {
                let factor = at_least_one(name, "factor", *factor)?;
                unscaled(powers(theta * factor.powf(ntk_exponent(name, rotated)?)))
            }
            Self::Dynamic { factor } => {
                let factor = at_least_one(name, "factor", *factor)?;
                let original = length(name, "max_position_embeddings", max_positions)?;
                let excess = (seq_len.unwrap_or(0) as f64).max(original) / original;
                let growth = factor * excess - (factor - 1.);
                unscaled(powers(theta * growth.powf(ntk_exponent(name, rotated)?)))
            }
            Self::Yarn(yarn) => yarn.frequencies(&plain, rotated, setting)?,
            Self::LongRope(longrope) => longrope.frequencies(&plain, setting)?,
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            } => {
                let factor = at_least_one(name, "factor", *factor)?;
                let original = length(name, "original_max_position_embeddings", *original)?;
                let low = positive(name, "low_freq_factor", *low)?;
                let high = positive(name, "high_freq_factor", *high)?;
                if high <= low {
                    bail!(
                        "rope: {name}: high_freq_factor {high} must be above low_freq_factor {low}"
                    )
                }
                let blend = |w: &f64| {
                    let turns = original * w / (2. * PI);
                    let kept = ((turns - low) / (high - low)).clamp(0., 1.);
                    (1. - kept) * (w / factor) + kept * w
                };
                unscaled(plain.iter().map(blend).collect())
            }
            Self::Proportional { factor } => {
                let mut inv_freq = divided(at_least_one(name, "factor", *factor)?);
                let turning = (setting.partial_rotary_factor * head_dim as f64 / 2.) as usize;
                inv_freq.iter_mut().skip(turning).for_each(|w| *w = 0.);
                unscaled(inv_freq)
            }
        })
    }

    /// R, checked together with θ.
    fn rotated(&self, setting: &Setting) -> Result<usize> {
        let Setting {
            theta,
            head_dim,
            partial_rotary_factor: partial,
            ..
        } = *setting;
        if !(theta.is_finite() && theta > 1.) {
            bail!("rope: rope_theta {theta} must be finite and above 1")
        }
        if !(partial > 0. && partial <= 1.) {
            bail!("rope: partial_rotary_factor {partial} must be above 0 and at most 1")
        }
        let rotated = match self {
            Self::Proportional { .. } => head_dim,
            _ => (partial * head_dim as f64) as usize,
        };
        if rotated == 0 || !rotated.is_multiple_of(2) {
            bail!("rope: partial_rotary_factor {partial} of head_dim {head_dim} makes {rotated} rotated coordinates, which must be even and above 0")
        }
        Ok(rotated)
    }

    /// Reads `rope_scaling` or `rope_parameters`. `outside` is the configuration around it, where Phi-3 keeps L.
    pub(super) fn from_hf(dict: &Fields, outside: &Fields) -> Result<Self> {
        for name in ["short_mscale", "long_mscale"] {
            if let Some(value) = dict.get(name) {
                bail!("rope: {name} {} is not supported", brief(value))
            }
        }
        let kind = match (dict.text("rope_type")?, dict.text("type")?) {
            (Some(new), Some(old)) if new != old => {
                bail!("rope: rope_type {new:?} and type {old:?} contradict each other")
            }
            (Some(kind), _) | (None, Some(kind)) => kind,
            (None, None) => {
                if let Some((name, value)) = dict.all().find(|(name, value)| {
                    let plain = matches!(name.as_str(), "rope_theta" | "partial_rotary_factor");
                    !plain && !value.is_null()
                }) {
                    bail!("rope: no rope_type beside {name} = {} (settings by layer type are not supported)", brief(value))
                }
                "default"
            }
        };
        let factor = || dict.required("factor", dict.number("factor")?);
        let original = || {
            const NAME: &str = "original_max_position_embeddings";
            agreed(NAME, dict.count(NAME)?, outside.count(NAME)?)
        };
        Ok(match kind {
            "default" => Self::Default,
            "linear" => Self::Linear { factor: factor()? },
            "dynamic" => Self::Dynamic { factor: factor()? },
            "ntk" => Self::Ntk { factor: factor()? },
            "yarn" => {
                let default = Yarn::default();
                Self::Yarn(Yarn {
                    factor: match original()? {
                        Some(_) => dict.number("factor")?,
                        None => Some(factor()?),
                    },
                    original_max_position_embeddings: original()?,
                    beta_fast: dict.number("beta_fast")?.unwrap_or(default.beta_fast),
                    beta_slow: dict.number("beta_slow")?.unwrap_or(default.beta_slow),
                    truncate: dict.flag("truncate")?.unwrap_or(default.truncate),
                    attention_factor: dict.number("attention_factor")?,
                    mscale: dict.number("mscale")?,
                    mscale_all_dim: dict.number("mscale_all_dim")?,
                })
            }
            // Phi-3's first name for it
            "longrope" | "su" => Self::LongRope(LongRope {
                short_factor: dict.required("short_factor", dict.numbers("short_factor")?)?,
                long_factor: dict.required("long_factor", dict.numbers("long_factor")?)?,
                factor: dict.number("factor")?,
                original_max_position_embeddings: original()?,
                attention_factor: dict.number("attention_factor")?,
            }),
            "llama3" => {
                let number = |name| dict.required(name, dict.number(name)?);
                Self::Llama3 {
                    factor: factor()?,
                    low_freq_factor: number("low_freq_factor")?,
                    high_freq_factor: number("high_freq_factor")?,
                    original_max_position_embeddings: dict
                        .required("original_max_position_embeddings", original()?)?,
                }
            }
            "proportional" => Self::Proportional {
                factor: dict.number("factor")?.unwrap_or_else(one),
            },
            other => bail!("rope: unknown rope type {other:?}"),
        })
    }

    /// The parameters as `rope_scaling` and `rope_parameters` have them, `None` where transformers 4 and 5 do not both
    /// compute what is computed here (or refuse): they have no ntk, read `factor` in one generation and take
    /// max/original in the other, and differ where YaRN's ramp has no room.
    pub(super) fn to_hf(&self, setting: Setting) -> Option<Map<String, Value>> {
        let stated = |original: Option<usize>, factor: Option<f64>| match (original, factor) {
            (Some(original), Some(factor)) => {
                factor == setting.max_positions as f64 / original as f64
            }
            (original, factor) => original.is_some() || factor.is_some(),
        };
        let same = match self {
            Self::Ntk { .. } => false,
            Self::Yarn(yarn) => {
                let original = yarn.original_max_position_embeddings;
                yarn.factor.is_some()
                    && stated(original, yarn.factor)
                    && yarn.has_room(original.unwrap_or(setting.max_positions), &setting)
            }
            Self::LongRope(longrope) => {
                stated(longrope.original_max_position_embeddings, longrope.factor)
            }
            _ => true,
        };
        let Ok(Value::Object(mut map)) = serde_json::to_value(self) else {
            return None;
        };
        map.retain(|_, value| !value.is_null());
        same.then_some(map)
    }
}

impl Yarn {
    /// Whether the ramp ends behind its beginning by itself, so that Hugging Face's formula gives the same.
    fn has_room(&self, original: usize, setting: &Setting) -> bool {
        let Setting {
            theta, head_dim, ..
        } = *setting;
        let ends = self.ends(original as f64, head_dim, theta);
        let bounded = (ends.0.max(0.), ends.1.min(head_dim as f64 - 1.));
        bounded.0 <= bounded.1
    }

    /// The pairs, as real numbers, that turn `beta_fast` and `beta_slow` times.
    fn ends(&self, original: f64, rotated: usize, theta: f64) -> (f64, f64) {
        let pair =
            |turns: f64| rotated as f64 * (original / (turns * 2. * PI)).ln() / (2. * theta.ln());
        let (low, high) = (pair(self.beta_fast), pair(self.beta_slow));
        match self.truncate {
            true => (low.floor(), high.ceil()),
            false => (low, high),
        }
    }

    /// The pairs, as real numbers, between which frequencies go over from kept to slowed; the second is above the
    /// first.
    fn ramp(&self, original: f64, rotated: usize, theta: f64) -> (f64, f64) {
        let (low, high) = self.ends(original, rotated, theta);
        let low = low.max(0.);
        let high = high.min(rotated as f64 - 1.).max(low);
        (low, if high == low { low + 0.001 } else { high })
    }

    fn frequencies(
        &self,
        plain: &[f64],
        rotated: usize,
        setting: Setting,
    ) -> Result<RopeFrequencies> {
        const NAME: &str = "yarn";
        let (original, factor) = lengths(
            NAME,
            self.original_max_position_embeddings,
            self.factor,
            &setting,
        )?;
        let factor = at_least_one(NAME, "factor", factor)?;
        let fast = positive(NAME, "beta_fast", self.beta_fast)?;
        let slow = positive(NAME, "beta_slow", self.beta_slow)?;
        if fast < slow {
            bail!("rope: {NAME}: beta_fast {fast} must not be below beta_slow {slow}")
        }
        let (low, high) = self.ramp(original, rotated, setting.theta);
        let inv_freq = plain.iter().enumerate().map(|(j, w)| {
            let slowed = ((j as f64 - low) / (high - low)).clamp(0., 1.);
            w / factor * slowed + w * (1. - slowed)
        });
        let given = |a: Option<f64>| a.filter(|a| *a != 0.);
        let attention_scaling = match self.attention_factor {
            Some(given) => given,
            None => match (given(self.mscale), given(self.mscale_all_dim)) {
                (Some(above), Some(below)) => {
                    temperature(factor, above) / temperature(factor, below)
                }
                _ => temperature(factor, 1.),
            },
        };
        Ok(RopeFrequencies {
            inv_freq: inv_freq.collect(),
            attention_scaling: positive(NAME, "attention_factor", attention_scaling)?,
        })
    }
}

impl LongRope {
    fn frequencies(&self, plain: &[f64], setting: Setting) -> Result<RopeFrequencies> {
        const NAME: &str = "longrope";
        let (original, factor) = lengths(
            NAME,
            self.original_max_position_embeddings,
            self.factor,
            &setting,
        )?;
        let factor = positive(NAME, "factor", factor)?;
        for (list, name) in [
            (&self.short_factor, "short_factor"),
            (&self.long_factor, "long_factor"),
        ] {
            if list.len() != plain.len() {
                bail!(
                    "rope: {NAME}: {name} has {} entries for {} rotated pairs",
                    list.len(),
                    plain.len()
                )
            }
            for divisor in list {
                positive(NAME, name, *divisor)?;
            }
        }
        let divisors = if setting.seq_len.unwrap_or(0) as f64 > original {
            &self.long_factor
        } else {
            &self.short_factor
        };
        let attention_scaling = match self.attention_factor {
            Some(given) => given,
            None if factor <= 1. => 1.,
            None => (1. + factor.ln() / original.ln()).sqrt(),
        };
        Ok(RopeFrequencies {
            inv_freq: plain.iter().zip(divisors).map(|(w, by)| w / by).collect(),
            attention_scaling: positive(NAME, "attention_factor", attention_scaling)?,
        })
    }
}

/// L and s, with their defaults.
fn lengths(
    name: &str,
    original: Option<usize>,
    factor: Option<f64>,
    setting: &Setting,
) -> Result<(f64, f64)> {
    let longest = || length(name, "max_position_embeddings", setting.max_positions);
    let original = match original {
        Some(original) => length(name, "original_max_position_embeddings", original)?,
        None => longest()?,
    };
    let factor = match factor {
        Some(factor) => factor,
        None => longest()? / original,
    };
    Ok((original, factor))
}

/// R/(R − 2).
fn ntk_exponent(name: &str, rotated: usize) -> Result<f64> {
    if rotated < 4 {
        bail!("rope: {name} needs at least 4 rotated coordinates, got {rotated}")
    }
    Ok(rotated as f64 / (rotated - 2) as f64)
}

fn at_least_one(name: &str, field: &str, value: f64) -> Result<f64> {
    if !(value.is_finite() && value >= 1.) {
        bail!("rope: {name}: {field} {value} must be finite and at least 1")
    }
    Ok(value)
}

fn positive(name: &str, field: &str, value: f64) -> Result<f64> {
    if !(value.is_finite() && value > 0.) {
        bail!("rope: {name}: {field} {value} must be finite and above 0")
    }
    Ok(value)
}

/// A length in tokens whose logarithm can be divided by.
fn length(name: &str, field: &str, value: usize) -> Result<f64> {
    if value < 2 {
        bail!("rope: {name}: {field} {value} must be at least 2")
    }
    Ok(value as f64)
}

/// One value from two places that may state it.
pub(super) fn agreed<T: PartialEq + std::fmt::Display>(
    name: &str,
    inside: Option<T>,
    outside: Option<T>,
) -> Result<Option<T>> {
    match (inside, outside) {
        (Some(inside), Some(outside)) if inside != outside => {
            bail!("rope: {name} is {inside} among the rope parameters and {outside} beside them")
        }
        (inside, outside) => Ok(inside.or(outside)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // R8
    #[test]
    fn yarn_ramp_ends_are_whole_pairs_only_when_truncated() {
        let exact = Yarn {
            truncate: false,
            ..Yarn::default()
        };
        for (original, rotated, theta, ends, whole) in [
            (4096., 128, 1e4, (20.944, 45.027), (20., 46.)),
            (4096., 64, 1.5e5, (8.093, 17.398), (8., 18.)),
        ] {
            let (low, high) = exact.ramp(original, rotated, theta);
            assert!((low - ends.0).abs() < 1e-3, "{low}");
            assert!((high - ends.1).abs() < 1e-3, "{high}");
            assert_eq!(Yarn::default().ramp(original, rotated, theta), whole);
        }
    }

    // R9
    #[test]
    fn yarn_ramp_of_any_size_rises() {
        for beta in [(1., 1.), (32., 1.), (32., 32.), (1e6, 1e-6)] {
            for truncate in [true, false] {
                for original in [2., 64., 4096., 1e6] {
                    for (rotated, theta) in [(2, 1e4), (8, 1e4), (8, 10.), (128, 5e5)] {
                        let yarn = Yarn {
                            beta_fast: beta.0,
                            beta_slow: beta.1,
                            truncate,
                            ..Yarn::default()
                        };
                        let (low, high) = yarn.ramp(original, rotated, theta);
                        assert!(low >= 0. && high > low && high.is_finite());
                    }
                }
            }
        }
    }
}
