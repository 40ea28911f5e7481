//! XXH64 (Yann Collet, *xxHash fast digest algorithm*, version 0.1.1), seed 0: tells damaged files from whole ones.

use std::fmt;

const PRIME_1: u64 = 0x9E37_79B1_85EB_CA87;
const PRIME_2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const PRIME_3: u64 = 0x1656_67B1_9E37_79F9;
const PRIME_4: u64 = 0x85EB_CA77_C2B2_AE63;
const PRIME_5: u64 = 0x27D4_EB2F_1656_67C5;
const STRIPE: usize = 32;

/// The checksum of bytes that come in pieces.
#[derive(Debug, Clone)]
pub(crate) struct Checksum {
    lanes: [u64; 4],
    /// Bytes that do not fill a stripe yet.
    rest: [u8; STRIPE],
    len: u64,
}

impl Default for Checksum {
    fn default() -> Self {
        Self {
            lanes: [
                PRIME_1.wrapping_add(PRIME_2),
                PRIME_2,
                0,
                PRIME_1.wrapping_neg(),
            ],
            rest: [0; STRIPE],
            len: 0,
        }
    }
}

impl Checksum {
    /// The checksum of one piece.
    pub fn of(bytes: &[u8]) -> Self {
        let mut checksum = Self::default();
        checksum.update(bytes);
        checksum
    }

    /// Takes the next piece.
    pub fn update(&mut self, mut bytes: &[u8]) {
        let held = self.len as usize % STRIPE;
        self.len = self.len.wrapping_add(bytes.len() as u64);
        if held > 0 {
            let taken = bytes.len().min(STRIPE - held);
            self.rest[held..held + taken].copy_from_slice(&bytes[..taken]);
            if held + taken < STRIPE {
                return;
            }
            let stripe = self.rest;
            self.stripe(&stripe);
            bytes = &bytes[taken..];
        }
        let mut stripes = bytes.chunks_exact(STRIPE);
        for stripe in &mut stripes {
            self.stripe(stripe);
        }
        let rest = stripes.remainder();
        self.rest[..rest.len()].copy_from_slice(rest);
    }

    fn stripe(&mut self, stripe: &[u8]) {
        for (lane, bytes) in self.lanes.iter_mut().zip(stripe.chunks_exact(8)) {
            *lane = round(*lane, little_endian(bytes));
        }
    }

    /// The checksum of all pieces so far.
    pub fn value(&self) -> u64 {
        let mut hash = if self.len >= STRIPE as u64 {
            let [a, b, c, d] = self.lanes;
            let sum = [(a, 1), (b, 7), (c, 12), (d, 18)]
                .iter()
                .fold(0u64, |sum, (lane, by)| {
                    sum.wrapping_add(lane.rotate_left(*by))
                });
            self.lanes.iter().fold(sum, |hash, lane| {
                (hash ^ round(0, *lane))
                    .wrapping_mul(PRIME_1)
                    .wrapping_add(PRIME_4)
            })
        } else {
            PRIME_5
        };
        hash = hash.wrapping_add(self.len);
        let rest = &self.rest[..self.len as usize % STRIPE];
        let mut eights = rest.chunks_exact(8);
        for bytes in &mut eights {
            hash = (hash ^ round(0, little_endian(bytes)))
                .rotate_left(27)
                .wrapping_mul(PRIME_1)
                .wrapping_add(PRIME_4);
        }
        let mut fours = eights.remainder().chunks_exact(4);
        for bytes in &mut fours {
            hash = (hash ^ little_endian(bytes).wrapping_mul(PRIME_1))
                .rotate_left(23)
                .wrapping_mul(PRIME_2)
                .wrapping_add(PRIME_3);
        }
        for byte in fours.remainder() {
            hash = (hash ^ u64::from(*byte).wrapping_mul(PRIME_5))
                .rotate_left(11)
                .wrapping_mul(PRIME_1);
        }
        hash = (hash ^ (hash >> 33)).wrapping_mul(PRIME_2);
        hash = (hash ^ (hash >> 29)).wrapping_mul(PRIME_3);
        hash ^ (hash >> 32)
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.value())
    }
}

fn round(lane: u64, input: u64) -> u64 {
    lane.wrapping_add(input.wrapping_mul(PRIME_2))
        .rotate_left(31)
        .wrapping_mul(PRIME_1)
}

/// The number of at most eight bytes, the lowest first.
fn little_endian(bytes: &[u8]) -> u64 {
    let bytes = bytes.iter().rev();
    bytes.fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_of_known_texts_is_as_published() {
        for (text, expected) in [
            ("", 0xef46_db37_51d8_e999),
            ("a", 0xd24e_c4f1_a98c_6e5b),
            ("abc", 0x44bc_2cf5_ad77_0999),
            (
                "Nobody inspects the spammish repetition",
                0xfbce_a83c_8a37_8bf1,
            ),
        ] {
            assert_eq!(Checksum::of(text.as_bytes()).value(), expected, "{text:?}");
        }
    }

    #[test]
    fn checksum_of_pieces_is_that_of_the_whole() {
        let bytes: Vec<u8> = (0..200u32).map(|i| (i * 37 % 251) as u8).collect();
        for len in 0..bytes.len() {
            let whole = Checksum::of(&bytes[..len]).value();
            for size in [1, 3, 8, 31, 32, 33, 64] {
                let mut checksum = Checksum::default();
                for piece in bytes[..len].chunks(size) {
                    checksum.update(piece);
                }
                assert_eq!(checksum.value(), whole, "{len} in pieces of {size}");
            }
        }
    }
}
