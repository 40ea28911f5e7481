//! Encodings and backends by the names that the command lines of the examples use.

use candle_posenc::encoding::{
    AbsoluteConfig, AlibiConfig, PhaseNorm, RopeConfig, TapaConfig, TapeConfig,
};
use candle_posenc::{Backend, EncodingConfig};
use clap::ValueEnum;

/// The encodings a user can ask for by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EncodingName {
    /// Rotary, base 10,000.
    Rope,
    /// Linear biases.
    Alibi,
    /// Token-aware phase attention, phase parts normalised to 0.3 so that it trains at ordinary rates.
    Tapa,
    /// Contextualized equivariant encoding: a rotation that layers change.
    Tape,
    /// Sinusoids added to the embeddings.
    Absolute,
    /// A learned table added to the embeddings; it ends at the training length.
    Learned,
    /// None.
    Nope,
}

impl EncodingName {
    /// As papers write it.
    pub fn label(self) -> &'static str {
        match self {
            Self::Rope => "RoPE",
            Self::Alibi => "ALiBi",
            Self::Tapa => "TAPA",
            Self::Tape => "TAPE",
            Self::Absolute => "sinusoids",
            Self::Learned => "learned",
            Self::Nope => "NoPE",
        }
    }

    /// The encoding with the parameters that the examples use, trained at `length` tokens.
    pub fn config(self, length: usize) -> EncodingConfig {
        match self {
            Self::Rope => EncodingConfig::Rope(RopeConfig::default()),
            Self::Alibi => EncodingConfig::Alibi(AlibiConfig::default()),
            Self::Tapa => EncodingConfig::Tapa(TapaConfig {
                phase_norm: Some(PhaseNorm {
                    gain: 0.3,
                    learned: false,
                }),
                ..TapaConfig::default()
            }),
            Self::Tape => EncodingConfig::Tape(TapeConfig::default()),
            Self::Absolute => EncodingConfig::Absolute(AbsoluteConfig::default()),
            Self::Learned => EncodingConfig::Absolute(AbsoluteConfig::Learned {
                max_positions: length,
            }),
            Self::Nope => EncodingConfig::Nope,
        }
    }
}

/// Implementations of attention a user can ask for by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackendName {
    /// Fused where there is a kernel for the device.
    Auto,
    /// Plain tensor operations.
    Dense,
    /// Fused kernels, or an error.
    Fused,
}

impl From<BackendName> for Backend {
    fn from(name: BackendName) -> Self {
        match name {
            BackendName::Auto => Self::Auto,
            BackendName::Dense => Self::Dense,
            BackendName::Fused => Self::Fused,
        }
    }
}
