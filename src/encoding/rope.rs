use super::{Encoding, ModelDims};
use candle_core::{bail, Device, Result};
use serde::{Deserialize, Serialize};

/// todo
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RopeConfig {}
/// todo
pub struct Rope {}
impl Rope {
    /// todo
    pub fn new(_config: &RopeConfig, _dims: &ModelDims, _device: &Device) -> Result<Self> {
        bail!("todo")
    }
}
impl Encoding for Rope {}
