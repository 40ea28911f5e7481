use super::{Encoding, ModelDims};
use candle_core::{bail, Result};
use candle_nn::VarBuilder;
use serde::{Deserialize, Serialize};

/// todo
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TapeConfig {}
/// todo
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StateNorm {}
/// todo
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HeadMixing {}
/// todo
pub struct Tape {}
impl Tape {
    /// todo
    pub fn new(_config: &TapeConfig, _dims: &ModelDims, _vb: VarBuilder) -> Result<Self> {
        bail!("todo")
    }
}
impl Encoding for Tape {}
