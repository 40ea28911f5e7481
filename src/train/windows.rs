//! The order in which a text is read.

use super::checksum::Checksum;
use crate::init::mix;
use candle_core::{bail, Device, Error, Result, Tensor};
use rand::rngs::ChaCha12Rng;
use rand::{RngExt, SeedableRng};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Token ids cut into windows and dealt out in batches, each window once in an epoch.
///
/// A window is `length` + 1 tokens long, the last of which is only a target; the next window begins with it. Every
/// epoch cuts from another offset, so that the cuts move, and shuffles its windows anew, both from (seed, epoch):
/// where reading stands is told by a [`Cursor`] alone. A batch that an epoch's rest does not fill goes on in the next.
///
/// ```
/// use candle_core::Device;
/// use candle_posenc::train::Windows;
/// # fn main() -> candle_core::Result<()> {
/// let tokens: Vec<u32> = (0..100).collect();
/// let mut windows = Windows::new(tokens, 8, 0)?;
/// let (tokens, targets) = windows.next_batch(4, &Device::Cpu)?;
/// assert_eq!(tokens.dims(), &[4, 8]);
/// assert_eq!((tokens + 1.)?.to_vec2::<u32>()?, targets.to_vec2::<u32>()?);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Windows {
    tokens: Arc<[u32]>,
    length: usize,
    seed: u64,
    cursor: Cursor,
    /// Where the windows of the cursor's epoch start, in the order of reading.
    starts: Arc<[usize]>,
}

/// Where reading stands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cursor {
    /// How often the text has been read.
    pub epoch: u64,
    /// How many windows of this epoch have been read.
    pub next: usize,
}

/// What tells one text from another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fingerprint {
    /// Number of tokens.
    pub tokens: usize,
    /// XXH64 of the tokens as little-endian numbers of four bytes, in hexadecimal.
    pub hash: String,
}

impl Windows {
    /// Windows of `length` tokens and their targets, from the beginning. Bytes are token ids below 256.
    ///
    /// # Errors
    /// When the length is 0 or no window fits.
    pub fn new(tokens: impl Into<Arc<[u32]>>, length: usize, seed: u64) -> Result<Self> {
        let tokens = tokens.into();
        if length == 0 {
            bail!("windows: the length must be at least 1")
        }
        if tokens.len() <= length {
            bail!(
                "windows: a window of {length} tokens and the target behind it do not fit {} tokens",
                tokens.len()
            )
        }
        let starts = starts(tokens.len(), length, seed, 0);
        Ok(Self {
            tokens,
            length,
            seed,
            cursor: Cursor::default(),
            starts,
        })
    }

    /// The next windows and for each token the one behind it.
    ///
    /// # Shapes
    /// Tokens (B, T) and targets (B, T), `u32`.
    ///
    /// # Errors
    /// When the batch is empty or memory runs out; then nothing is read.
    pub fn next_batch(&mut self, batch: usize, device: &Device) -> Result<(Tensor, Tensor)> {
        let numbers = batch.checked_mul(self.length);
        if batch == 0 || numbers.is_none_or(|n| n > isize::MAX as usize / size_of::<u32>()) {
            bail!(
                "windows: a batch of {batch} windows of {} tokens",
                self.length
            )
        }
        let mut ahead = self.clone();
        let (mut tokens, mut targets) = (Vec::new(), Vec::new());
        for ids in [&mut tokens, &mut targets] {
            ids.try_reserve_exact(batch * self.length).map_err(|e| {
                Error::msg(format!(
                    "windows: a batch of {batch} windows of {} tokens: {e}",
                    self.length
                ))
            })?;
        }
        for _ in 0..batch {
            let start = ahead.next_start();
            // Every start leaves room for a window and the target behind it.
            tokens.extend_from_slice(&ahead.tokens[start..start + ahead.length]);
            targets.extend_from_slice(&ahead.tokens[start + 1..=start + ahead.length]);
        }
        let shape = (batch, self.length);
        let tokens = Tensor::from_vec(tokens, shape, device)?;
        let targets = Tensor::from_vec(targets, shape, device)?;
        *self = ahead;
        Ok((tokens, targets))
    }

    /// Where reading stands.
    pub fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// Goes on from where a cursor stands.
    ///
    /// # Errors
    /// When its epoch has fewer windows; then nothing is changed.
    pub fn seek(&mut self, cursor: Cursor) -> Result<()> {
        let starts = starts(self.tokens.len(), self.length, self.seed, cursor.epoch);
        if cursor.next > starts.len() {
            bail!(
                "windows: epoch {} has {} windows, of which {} cannot have been read",
                cursor.epoch,
                starts.len(),
                cursor.next
            )
        }
        (self.cursor, self.starts) = (cursor, starts);
        Ok(())
    }

    /// What tells this text from another. It reads all of it.
    pub fn fingerprint(&self) -> Fingerprint {
        let mut checksum = Checksum::default();
        for token in &*self.tokens {
            checksum.update(&token.to_le_bytes());
        }
        Fingerprint {
            tokens: self.tokens.len(),
            hash: checksum.to_string(),
        }
    }

    fn next_start(&mut self) -> usize {
        loop {
            if let Some(start) = self.starts.get(self.cursor.next) {
                self.cursor.next += 1;
                return *start;
            }
            self.cursor = Cursor {
                epoch: self.cursor.epoch.wrapping_add(1),
                next: 0,
            };
            let (tokens, epoch) = (self.tokens.len(), self.cursor.epoch);
            // Never empty: every offset leaves room for a window.
            self.starts = starts(tokens, self.length, self.seed, epoch);
        }
    }
}

/// Where the windows of an epoch start, shuffled (Durstenfeld's variant of Fisher and Yates).
fn starts(tokens: usize, length: usize, seed: u64, epoch: u64) -> Arc<[usize]> {
    let mut rng = ChaCha12Rng::seed_from_u64(mix(seed, &format!("windows of epoch {epoch}")));
    // Drawn as u64: the same on every platform.
    let mut draw = |most: usize| rng.random_range(0..=most as u64) as usize;
    let room = tokens.saturating_sub(length + 1);
    let offset = draw(room.min(length - 1));
    let mut starts: Vec<usize> = (offset..=room).step_by(length).collect();
    for i in (1..starts.len()).rev() {
        starts.swap(i, draw(i));
    }
    starts.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn firsts(windows: &mut Windows, batches: usize, batch: usize) -> Vec<u32> {
        let first = |_| {
            let (tokens, _) = windows.next_batch(batch, &Device::Cpu).unwrap();
            let rows: Vec<Vec<u32>> = tokens.to_vec2().unwrap();
            rows.into_iter().map(|row| row[0]).collect::<Vec<_>>()
        };
        (0..batches).flat_map(first).collect()
    }

    fn counted(len: u32) -> Vec<u32> {
        (0..len).collect()
    }

    #[test]
    fn epoch_reads_every_window_once_and_the_next_cuts_and_shuffles_anew() {
        let mut windows = Windows::new(counted(1000), 7, 3).unwrap();
        let count = windows.starts.len();
        let (one, two) = (
            firsts(&mut windows, count, 1),
            firsts(&mut windows, count, 1),
        );
        let mut sorted = one.clone();
        sorted.sort_unstable();
        assert_ne!(one, sorted);
        let expected: Vec<u32> = (0..count as u32).map(|i| sorted[0] + 7 * i).collect();
        assert_eq!(sorted, expected);
        // What the cuts leave over at both ends is less than a window.
        assert!(sorted[0] < 7 && sorted[count - 1] + 7 + 7 >= 999);
        assert_ne!(one, two);
        let offsets: std::collections::BTreeSet<u32> = (0..40)
            .map(|epoch| *starts(1000, 7, 3, epoch).iter().min().unwrap() as u32)
            .collect();
        assert_eq!(offsets, (0..7).collect());
    }

    #[test]
    fn batches_do_not_depend_on_how_they_are_cut_and_go_on_from_a_cursor() {
        let fresh = || Windows::new(counted(100), 9, 5).unwrap();
        let all = firsts(&mut fresh(), 60, 1);
        let mut windows = fresh();
        assert_eq!(firsts(&mut windows, 6, 5), all[..30]);
        let cursor = windows.cursor();
        assert!(cursor.epoch >= 2);
        let mut resumed = fresh();
        resumed.seek(cursor).unwrap();
        assert_eq!(firsts(&mut resumed, 10, 3), all[30..]);
    }

    #[test]
    fn text_that_fits_one_window_is_read_again_and_again() {
        let mut windows = Windows::new(counted(5), 4, 0).unwrap();
        assert_eq!(firsts(&mut windows, 2, 3), [0; 6]);
        let refused = Windows::new(counted(4), 4, 0).unwrap_err().to_string();
        assert!(refused.contains("4 tokens"), "{refused}");
        assert!(Windows::new(counted(4), 0, 0).is_err());
        assert!(windows.next_batch(0, &Device::Cpu).is_err());
        for batch in [usize::MAX, 1 << 58] {
            let refused = windows.next_batch(batch, &Device::Cpu).unwrap_err();
            assert!(refused.to_string().contains(&batch.to_string()));
        }
    }

    #[test]
    fn seek_beyond_an_epoch_is_refused_and_changes_nothing() {
        let mut windows = Windows::new(counted(100), 9, 5).unwrap();
        let before = windows.cursor();
        let cursor = Cursor { epoch: 3, next: 12 };
        assert!(windows.seek(cursor).is_err());
        assert_eq!(windows.cursor(), before);
    }

    #[test]
    fn fingerprint_tells_texts_apart() {
        let of = |tokens: Vec<u32>| Windows::new(tokens, 9, 5).unwrap().fingerprint();
        assert_eq!(of(counted(100)), of(counted(100)));
        assert_ne!(of(counted(100)).hash, of(counted(101)).hash);
        let mut other = counted(100);
        other[50] += 1;
        assert_ne!(of(counted(100)).hash, of(other).hash);
    }

    #[test]
    fn starts_of_a_known_seed_are_as_recorded() {
        // A change would end bit-exact resuming of runs that exist.
        assert_eq!(*starts(30, 5, 1, 0), [17, 7, 22, 2, 12]);
    }
}
