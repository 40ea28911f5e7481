//! Tells damaged files from whole ones, and one text from another.

use crc32fast::Hasher;
use std::fmt;

/// The CRC-32 of bytes that come in pieces.
#[derive(Debug, Clone, Default)]
pub(crate) struct Checksum(Hasher);

impl Checksum {
    /// The checksum of one piece.
    pub fn of(bytes: &[u8]) -> Self {
        let mut checksum = Self::default();
        checksum.update(bytes);
        checksum
    }

    /// Takes the next piece.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{:08x}", self.0.clone().finalize())
    }
}
