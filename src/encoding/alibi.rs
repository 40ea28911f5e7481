use super::{Encoding, ModelDims};
use candle_core::{bail, Result};
use serde::{Deserialize, Serialize};

/// todo
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AlibiConfig {}
/// todo
pub struct Alibi {}
impl Alibi {
    /// todo
    pub fn new(_config: &AlibiConfig, _dims: &ModelDims) -> Result<Self> {
        bail!("todo")
    }
}
/// todo
pub fn alibi_slopes(_heads: usize) -> Vec<f64> {
    vec![]
}
impl Encoding for Alibi {}
