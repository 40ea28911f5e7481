//! No positional encoding: the order of tokens comes from the causal mask alone (Kazemnejad et al., "The impact of
//! positional encoding on length generalization in transformers", arXiv 2305.19466).

use super::{Encoding, EncodingConfig};

/// No positional encoding.
#[derive(Debug, Clone, Copy, Default)]
pub struct Nope;

impl Encoding for Nope {
    fn config(&self) -> EncodingConfig {
        EncodingConfig::Nope
    }

    fn updates(&self, _layer: usize) -> bool {
        false
    }
}
