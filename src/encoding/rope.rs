//! RoPE (Su et al., "RoFormer: enhanced transformer with rotary position embedding", arXiv 2104.09864v5).
//!
//! Query and key at position t have pair j of their coordinates turned by the angle t·ω_j, ω_j = θ^(−2j/R) (eq. 15,
//! where j counts from 1; θ = 10000 there), so that q·k depends on positions only through their difference (eq. 16).
//! [`RopeScaling`] changes ω_j for longer contexts.
//!
//! # Symbols
//! θ base, R coordinates of a head that turn (`partial_rotary_factor` of its width D), t position in tokens, N length of
//! the sequence in tokens.
//!
//! # Deviations
//! The paper pairs neighbouring coordinates ([`Layout::Interleaved`]); the default here is Hugging Face's
//! [`Layout::Half`]. Angles, cosines and sines are made in f64 and rounded once, to f32: at position 100 000 an angle
//! made in f32 is off by 1e-2.

use super::rope_scaling::{agreed, Setting};
use super::{
    Ctx, Encoding, EncodingConfig, ModelDims, PosState, Qkv, RopeFrequencies, RopeScaling,
};
use crate::json::{brief, Fields};
use crate::positions::Positions;
use crate::rotate::{rotate, Layout, Rotation};
use candle_core::{bail, DType, Device, Result, Tensor};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Parameters of [`Rope`].
///
/// ```
/// use candle_posenc::encoding::{RopeConfig, RopeScaling};
/// # fn main() -> candle_core::Result<()> {
/// let config = serde_json::json!({
///     "max_position_embeddings": 131072,
///     "rope_theta": 500000.0,
///     "rope_scaling": {
///         "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
///         "original_max_position_embeddings": 8192
///     }
/// });
/// let rope = RopeConfig::from_hf(&config)?;
/// assert!(matches!(rope.scaling, RopeScaling::Llama3 { .. }));
/// let frequencies = rope.frequencies(64, 131072, None)?;
/// assert_eq!(frequencies.inv_freq.len(), 32);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RopeConfig {
    /// θ, above 1.
    pub theta: f64,
    /// The part of a head that turns: the first ⌊D · this⌋ coordinates.
    pub partial_rotary_factor: f64,
    /// Which coordinates form a pair.
    pub layout: Layout,
    /// The length extension.
    pub scaling: RopeScaling,
}

impl Default for RopeConfig {
    fn default() -> Self {
        Self {
            theta: 10_000.,
            partial_rotary_factor: 1.,
            layout: Layout::default(),
            scaling: RopeScaling::default(),
        }
    }
}

impl RopeConfig {
    /// Reads a Hugging Face `config.json`, of either generation: `rope_theta` and `rope_scaling` (with `type` or
    /// `rope_type`), or `rope_parameters` with θ inside. Without any of them it is plain RoPE with θ = 10000. The layout
    /// is [`Layout::Half`], which the file does not state.
    ///
    /// # Errors
    /// When the rope type is unknown, a field it needs is missing, a field has another kind of value, or two places
    /// contradict each other, or where the parameters have other names (`rotary_pct`, …) or are in a `text_config`, which
    /// is then what to give; the message names the field and its value. Ranges are checked by
    /// [`frequencies`](Self::frequencies), which knows the sizes.
    pub fn from_hf(config: &Value) -> Result<Self> {
        let outside = Fields::of("rope", config, "config")?;
        refuse_other_names(&outside)?;
        let stated = |name| -> Result<Option<(Self, &Value)>> {
            let Some(value) = outside.get(name) else {
                return Ok(None);
            };
            let inside = Fields::of("rope", value, name)?;
            Ok(Some((Self::from_parts(&inside, &outside)?, value)))
        };
        match (stated("rope_parameters")?, stated("rope_scaling")?) {
            (Some((new, a)), Some((old, b))) if new != old => bail!(
                "rope: rope_parameters {} and rope_scaling {} contradict each other",
                brief(a),
                brief(b)
            ),
            (Some((config, _)), _) | (None, Some((config, _))) => Ok(config),
            (None, None) => {
                let none = serde_json::Map::new();
                Self::from_parts(&Fields::in_map("rope", &none), &outside)
            }
        }
    }

    /// Reads one object of parameters and what stands beside it.
    fn from_parts(inside: &Fields, outside: &Fields) -> Result<Self> {
        let number = |name| agreed(name, inside.number(name)?, outside.number(name)?);
        let default = Self::default();
        Ok(Self {
            theta: number("rope_theta")?.unwrap_or(default.theta),
            partial_rotary_factor: number("partial_rotary_factor")?
                .unwrap_or(default.partial_rotary_factor),
            layout: default.layout,
            scaling: RopeScaling::from_hf(inside, outside)?,
        })
    }

    /// What a `config.json` of both generations says to make transformers' LLaMA rotate as this does, read back by
    /// [`from_hf`](Self::from_hf); `None` where one of the generations would do something else, or nothing.
    pub(crate) fn to_hf(&self, dims: &ModelDims) -> Option<serde_json::Map<String, Value>> {
        let whole = self.partial_rotary_factor == 1.
            || matches!(self.scaling, RopeScaling::Proportional { .. });
        if self.layout != Layout::Half || !whole {
            return None;
        }
        let scaling = self.scaling.to_hf(Setting {
            theta: self.theta,
            head_dim: dims.head_dim,
            partial_rotary_factor: self.partial_rotary_factor,
            max_positions: dims.max_positions,
            seq_len: None,
        })?;
        let mut map = serde_json::Map::new();
        let mut inside = scaling.clone();
        inside.insert("rope_theta".into(), self.theta.into());
        if self.partial_rotary_factor != 1. {
            let partial = self.partial_rotary_factor;
            map.insert("partial_rotary_factor".into(), partial.into());
            inside.insert("partial_rotary_factor".into(), partial.into());
        }
        if let (RopeScaling::LongRope(_), Some(original)) = (
            &self.scaling,
            scaling.get("original_max_position_embeddings"),
        ) {
            // transformers 4 looks for it here alone.
            map.insert("original_max_position_embeddings".into(), original.clone());
        }
        map.insert("rope_theta".into(), self.theta.into());
        map.insert(
            "rope_scaling".into(),
            match self.scaling {
                RopeScaling::Default => Value::Null,
                _ => scaling.into(),
            },
        );
        map.insert("rope_parameters".into(), inside.into());
        Some(map)
    }

    /// How fast each rotated pair turns in a head of width `head_dim`, in a model for up to `max_positions` tokens, for
    /// a sequence of `seq_len` tokens (only the length-dependent scalings ask; without it, their frequencies within
    /// the original length).
    ///
    /// # Errors
    /// When a parameter is out of range or does not fit the head; the message names it.
    pub fn frequencies(
        &self,
        head_dim: usize,
        max_positions: usize,
        seq_len: Option<usize>,
    ) -> Result<RopeFrequencies> {
        self.scaling.frequencies(Setting {
            theta: self.theta,
            head_dim,
            partial_rotary_factor: self.partial_rotary_factor,
            max_positions,
            seq_len,
        })
    }

    /// The rotation of tokens at `positions`. Padding (a negative position) has the angle 0.
    ///
    /// # Shapes
    /// (1, 1, T, R/2), or (B, 1, T, R/2) where rows have positions of their own; f64 for `dtype` f64, else f32.
    ///
    /// # Errors
    /// When a parameter or the positions do not fit, or the frequencies for the length reached (at least
    /// `planned_len`) differ from those of the tokens before this call (see [`Rope`]).
    pub fn rotation(
        &self,
        dims: &ModelDims,
        positions: &Positions,
        batch: usize,
        dtype: DType,
        device: &Device,
        planned_len: Option<usize>,
    ) -> Result<Rotation> {
        let table = positions.table(batch)?;
        let mut angles_of_rows = Vec::with_capacity(table.rows);
        for b in 0..table.rows {
            let row = table.row(b);
            angles_of_rows.push((row, self.row_frequencies(dims, row, planned_len)?));
        }
        // every row has the same number of pairs; without rows the shape still needs it
        let pairs = match angles_of_rows.first() {
            Some((_, frequencies)) => frequencies.inv_freq.len(),
            None => self
                .frequencies(dims.head_dim, dims.max_positions, None)?
                .inv_freq
                .len(),
        };
        let mut cos = vec![0f64; table.rows * table.len * pairs];
        let mut sin = cos.clone();
        let tokens = cos
            .par_chunks_mut(pairs)
            .zip(sin.par_chunks_mut(pairs))
            .with_min_len(64);
        tokens.enumerate().for_each(|(token, (cos, sin))| {
            let (row, frequencies) = &angles_of_rows[token / table.len];
            let position = row[token % table.len].max(0) as f64;
            let scaling = frequencies.attention_scaling;
            for ((cos, sin), w) in cos.iter_mut().zip(sin).zip(&frequencies.inv_freq) {
                let (s, c) = (position * w).sin_cos();
                (*cos, *sin) = (c * scaling, s * scaling);
            }
        });
        let dtype = match dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let tensor = |values: Vec<f64>| {
            Tensor::from_vec(values, (table.rows, 1, table.len, pairs), &Device::Cpu)?
                .to_dtype(dtype)?
                .to_device(device)
        };
        Ok(Rotation {
            cos: tensor(cos)?,
            sin: tensor(sin)?,
        })
    }

    /// The frequencies of one row's tokens.
    fn row_frequencies(
        &self,
        dims: &ModelDims,
        row: &[i64],
        planned_len: Option<usize>,
    ) -> Result<RopeFrequencies> {
        let at = |len: usize| self.frequencies(dims.head_dim, dims.max_positions, Some(len));
        let planned = planned_len.unwrap_or(0);
        let mut real = row.iter().filter(|p| **p >= 0).map(|p| *p as usize);
        let Some(first) = real.next() else {
            return at(planned);
        };
        let last = real.max().unwrap_or(first).max(first);
        let len = planned.max(last + 1);
        let chosen = at(len)?;
        let earlier = planned.max(first);
        if first > 0 && self.scaling.depends_on_length() && chosen != at(earlier)? {
            bail!(
                "rope: {} frequencies for a length of {len} tokens differ from those for {earlier}, by which keys before position {first} were rotated; set Ctx::planned_len, in every call, to the length that the whole generation will reach",
                self.scaling.name()
            )
        }
        Ok(chosen)
    }
}

/// Refuses a configuration that states its RoPE where it would be overlooked.
fn refuse_other_names(config: &Fields) -> Result<()> {
    if config.get("rope_parameters").is_some() {
        return Ok(());
    }
    for name in [
        "rotary_pct",
        "rotary_emb_base",
        "rotary_dim",
        "rope_local_base_freq",
        "global_rope_theta",
        "local_rope_theta",
    ] {
        if let Some(value) = config.get(name) {
            bail!("rope: {name} {value} is not supported; state rope_theta and partial_rotary_factor, for all layers")
        }
    }
    let named = |name| config.get(name).is_some();
    if named("text_config") && !named("rope_theta") && !named("rope_scaling") {
        bail!(
            "rope: the config has a text_config and no rope_theta beside it; give the text_config"
        )
    }
    Ok(())
}

/// RoPE, with every length extension: turns queries and keys (Su et al., arXiv 2104.09864v5).
///
/// # Frequencies that depend on the length
/// With dynamic and longrope scaling a row's frequencies are those for N = max([`Ctx::planned_len`], last position + 1)
/// tokens, the same for every token of the row, and nothing is remembered between calls. Keys in a cache keep the
/// frequencies that they were rotated with. A generation that crosses a length at which frequencies change must therefore
/// state in every call the length that it will reach, in [`Ctx::planned_len`]. A call whose row begins at a
/// position above 0 and whose frequencies differ from those for the tokens before it is an error that names both
/// lengths: the cached keys and the new queries would disagree.
#[derive(Debug, Clone)]
pub struct Rope {
    config: RopeConfig,
    dims: ModelDims,
}

impl Rope {
    /// RoPE for a model of these sizes.
    ///
    /// # Errors
    /// When a parameter is out of range or does not fit the head width.
    pub fn new(config: &RopeConfig, dims: &ModelDims) -> Result<Self> {
        config.frequencies(dims.head_dim, dims.max_positions, None)?;
        Ok(Self {
            config: config.clone(),
            dims: *dims,
        })
    }
}

impl Encoding for Rope {
    fn config(&self) -> EncodingConfig {
        EncodingConfig::Rope(self.config.clone())
    }

    fn updates(&self, _layer: usize) -> bool {
        false
    }

    fn begin(&self, x: &Tensor, positions: &Positions, ctx: &mut Ctx) -> Result<PosState> {
        let (batch, tokens, _) = x.dims3()?;
        if tokens != positions.len() {
            bail!("rope: {} positions for x {:?}", positions.len(), x.dims())
        }
        let rotation = self.config.rotation(
            &self.dims,
            positions,
            batch,
            x.dtype(),
            x.device(),
            ctx.planned_len,
        )?;
        Ok(PosState {
            positions: positions.clone(),
            rotation: Some(rotation),
        })
    }

    fn encode(&self, _layer: usize, qkv: Qkv, state: &PosState) -> Result<Qkv> {
        let Some(rotation) = &state.rotation else {
            bail!("rope: the state has no rotation; it must come from Rope::begin")
        };
        Ok(Qkv {
            q: rotate(&qkv.q, rotation, self.config.layout)?,
            k: rotate(&qkv.k, rotation, self.config.layout)?,
            v: qkv.v,
        })
    }
}
