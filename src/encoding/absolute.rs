//! Absolute encodings: a vector for each position, added to the token embeddings once.
//!
//! Sinusoidal: Vaswani et al., "Attention is all you need", arXiv 1706.03762v7, §3.5 (its formulas are not numbered).
//! Coordinates 2i and 2i + 1 of position t are the sine and the cosine of t·θ^(−2i/C), θ = 10000 there. Learned: a table
//! of free parameters, as in Gehring et al., "Convolutional sequence to sequence learning", arXiv 1705.03122v3, §3.1.
//!
//! # Symbols
//! t position in tokens, C model width, θ base.
//!
//! # Deviations
//! An odd C is allowed: its last coordinate is a sine without its cosine. Padding (a negative position) gets zero added.

use super::{Encoding, EncodingConfig, ModelDims};
use crate::positions::{PositionTable, Positions};
use candle_core::{bail, Device, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// Parameters of [`Absolute`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "table", rename_all = "snake_case", deny_unknown_fields)]
pub enum AbsoluteConfig {
    /// Sines and cosines, for any position.
    Sinusoidal {
        /// θ, above 1.
        #[serde(default = "theta")]
        theta: f64,
        /// Whether embeddings are multiplied by √C first, as the paper does (§3.4). Small embeddings would drown in
        /// waves of amplitude 1, and the model would hardly train.
        #[serde(default = "scale_embeddings")]
        scale_embeddings: bool,
    },
    /// A trained vector for each of the first positions, the weight `embed_positions.weight` (max_positions, C).
    Learned {
        /// Number of positions, in tokens.
        max_positions: usize,
    },
}

fn theta() -> f64 {
    10_000.
}

fn scale_embeddings() -> bool {
    true
}

impl Default for AbsoluteConfig {
    fn default() -> Self {
        Self::Sinusoidal {
            theta: theta(),
            scale_embeddings: scale_embeddings(),
        }
    }
}

/// An absolute encoding: adds a table to the embeddings.
#[derive(Debug, Clone)]
pub struct Absolute {
    config: AbsoluteConfig,
    table: Table,
    width: usize,
    /// What embeddings are multiplied by.
    scale: f64,
}

#[derive(Debug, Clone)]
enum Table {
    Sinusoidal { theta: f64 },
    // (max_positions, C)
    Learned(Tensor),
}

impl Absolute {
    /// The encoding for a model of these sizes. A learned table that does not exist yet starts normal with standard
    /// deviation 0.02.
    ///
    /// # Errors
    /// When the width is 0, θ or the number of positions is out of range, or the weight is missing or has another shape.
    pub fn new(config: &AbsoluteConfig, dims: &ModelDims, vb: VarBuilder) -> Result<Self> {
        if dims.width == 0 {
            bail!("absolute: a model of width 0 has nothing to add to")
        }
        let mut scale = 1.;
        let table = match *config {
            AbsoluteConfig::Sinusoidal {
                theta,
                scale_embeddings,
            } => {
                if !(theta.is_finite() && theta > 1.) {
                    bail!("absolute: theta {theta} must be finite and above 1")
                }
                if scale_embeddings {
                    scale = (dims.width as f64).sqrt();
                }
                Table::Sinusoidal { theta }
            }
            AbsoluteConfig::Learned { max_positions } => {
                if max_positions == 0 {
                    bail!("absolute: max_positions 0 leaves no position to stand at")
                }
                let init = Init::Randn {
                    mean: 0.,
                    stdev: 0.02,
                };
                let vb = vb.pp("embed_positions");
                Table::Learned(vb.get_with_hints((max_positions, dims.width), "weight", init)?)
            }
        };
        Ok(Self {
            config: config.clone(),
            table,
            width: dims.width,
            scale,
        })
    }

    /// (rows, T, C): what is added at each position.
    fn vectors(&self, positions: &PositionTable, x: &Tensor) -> Result<Tensor> {
        let shape = (positions.rows, positions.len, self.width);
        let all = (0..positions.rows).flat_map(|b| positions.row(b).iter().copied());
        match &self.table {
            Table::Sinusoidal { theta } => {
                let all: Vec<i64> = all.collect();
                let frequencies: Vec<f64> = (0..self.width.div_ceil(2))
                    .map(|i| theta.powf(-2. * i as f64 / self.width as f64))
                    .collect();
                let mut values = vec![0f64; all.len() * self.width];
                let vectors = values.par_chunks_mut(self.width).zip(&all);
                vectors
                    .with_min_len(16)
                    .filter(|(_, position)| **position >= 0)
                    .for_each(|(vector, position)| {
                        for (pair, frequency) in vector.chunks_mut(2).zip(&frequencies) {
                            let (sin, cos) = (*position as f64 * frequency).sin_cos();
                            for (value, wave) in pair.iter_mut().zip([sin, cos]) {
                                *value = wave;
                            }
                        }
                    });
                Tensor::from_vec(values, shape, &Device::Cpu)?
                    .to_dtype(x.dtype())?
                    .to_device(x.device())
            }
            Table::Learned(weight) => {
                let (max_positions, _) = weight.dims2()?;
                let mut rows = Vec::with_capacity(positions.rows * positions.len);
                for position in all {
                    if position >= max_positions as i64 {
                        bail!("absolute: position {position} is beyond the learned table's {max_positions} positions")
                    }
                    rows.push(position);
                }
                let real: Vec<u8> = rows.iter().map(|p| u8::from(*p >= 0)).collect();
                let rows: Vec<i64> = rows.into_iter().map(|p| p.max(0)).collect();
                let rows = Tensor::new(rows, weight.device())?;
                let vectors = weight.index_select(&rows, 0)?.reshape(shape)?;
                let vectors = if positions.has_padding() {
                    Tensor::from_vec(real, (shape.0, shape.1, 1), weight.device())?
                        .broadcast_as(shape)?
                        .where_cond(&vectors, &vectors.zeros_like()?)?
                } else {
                    vectors
                };
                vectors.to_dtype(x.dtype())
            }
        }
    }
}

impl Encoding for Absolute {
    fn config(&self) -> EncodingConfig {
        EncodingConfig::Absolute(self.config.clone())
    }

    fn updates(&self, _layer: usize) -> bool {
        false
    }

    fn embed(&self, x: &Tensor, positions: &Positions) -> Result<Tensor> {
        let (batch, tokens, width) = x.dims3()?;
        if tokens != positions.len() || width != self.width {
            bail!(
                "absolute: x {:?} does not fit {} positions and width {}",
                x.dims(),
                positions.len(),
                self.width
            )
        }
        let vectors = self.vectors(&positions.table(batch)?, x)?;
        if self.scale == 1. {
            return x.broadcast_add(&vectors);
        }
        (x * self.scale)?.broadcast_add(&vectors)
    }
}
