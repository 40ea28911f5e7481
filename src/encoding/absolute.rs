use super::{Encoding, ModelDims};
use candle_core::{bail, Result};
use candle_nn::VarBuilder;
use serde::{Deserialize, Serialize};

/// todo
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AbsoluteConfig {}
/// todo
pub struct Absolute {}
impl Absolute {
    /// todo
    pub fn new(_config: &AbsoluteConfig, _dims: &ModelDims, _vb: VarBuilder) -> Result<Self> {
        bail!("todo")
    }
}
impl Encoding for Absolute {}
