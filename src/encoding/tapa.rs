use super::{Encoding, ModelDims};
use candle_core::{bail, Result};
use candle_nn::VarBuilder;
use serde::{Deserialize, Serialize};

/// todo
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TapaConfig {}
/// todo
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PhaseNorm {}
/// todo
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PhaseForm {}
/// todo
pub struct Tapa {}
impl Tapa {
    /// todo
    pub fn new(_config: &TapaConfig, _dims: &ModelDims, _vb: VarBuilder) -> Result<Self> {
        bail!("todo")
    }
}
impl Encoding for Tapa {}
