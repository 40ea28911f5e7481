//! The text to train on: files, or made.

use super::tales::tales;
use candle_core::{bail, Error, Result};
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

/// Size of the made text and its seed: the same for every run, so that runs can be compared.
const MADE_BYTES: usize = 3 << 20;
const MADE_SEED: u64 = 1;

/// The bytes to train on and those to be judged by.
pub struct Text {
    pub name: String,
    pub training: Vec<u8>,
    /// The last tenth, or as many bytes as were asked for.
    pub held_out: Vec<u8>,
}

impl Text {
    /// The files joined, or the made text where there are none. Both parts hold at least a window of `length`
    /// bytes and the byte after it.
    pub fn open(files: &[PathBuf], length: usize) -> Result<Self> {
        Self::holding_out(files, length, None)
    }

    /// The same with the last `held_out` bytes held out.
    pub fn holding_out(files: &[PathBuf], length: usize, held_out: Option<usize>) -> Result<Self> {
        let (name, mut training) = match files {
            [] => (
                "made, see examples/common/tales.rs".to_string(),
                tales(MADE_BYTES, MADE_SEED),
            ),
            files => {
                let names: Vec<_> = files
                    .iter()
                    .map(|path| path.display().to_string())
                    .collect();
                let bytes: Vec<_> = files.iter().map(|path| read(path)).collect::<Result<_>>()?;
                (names.join(", "), bytes.concat())
            }
        };
        let shortest = length.saturating_add(1).saturating_mul(10);
        if training.len() < shortest {
            bail!(
                "{name}: {} bytes are too few; a length of {length} needs at least {shortest}",
                training.len()
            )
        }
        let all = training.len();
        let held_out = match held_out {
            None => all / 10,
            Some(held_out) if held_out > length && all.saturating_sub(held_out) > length => held_out,
            Some(held_out) => bail!(
                "{name}: of {all} bytes {held_out} cannot be held out: both parts need at least {} for a length of {length}",
                length.saturating_add(1)
            ),
        };
        let held_out = training.split_off(all - held_out);
        Ok(Self {
            name,
            training,
            held_out,
        })
    }
}

/// A file's bytes; the error names the file.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|e| about(path, e))
}

/// Checks that a file which is written at the end of a long run will be: opens it, and leaves it as it was.
///
/// # Errors
/// When it cannot be written; the message names it.
pub fn check_writable(path: &Path) -> Result<()> {
    let there = path.symlink_metadata().is_ok();
    let opened = OpenOptions::new().append(true).create(true).open(path);
    opened.map_err(|e| about(path, e))?;
    match there {
        true => Ok(()),
        false => std::fs::remove_file(path).map_err(|e| about(path, e)),
    }
}

/// An error that names the file.
pub fn about(path: &Path, error: impl std::fmt::Display) -> Error {
    Error::msg(format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_of_a_file_leaves_it_as_it_was_and_names_what_cannot_be_written() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let (old, new) = (folder.path().join("old"), folder.path().join("new"));
        std::fs::write(&old, "kept")?;
        check_writable(&old)?;
        check_writable(&new)?;
        assert_eq!(std::fs::read_to_string(&old)?, "kept");
        assert!(!new.exists());
        for path in [folder.path(), &new.join("file")] {
            let error = check_writable(path).unwrap_err().to_string();
            assert!(error.contains(&path.display().to_string()), "{error}");
        }
        Ok(())
    }

    #[test]
    fn text_too_short_for_the_length_refused() -> Result<()> {
        let path = std::env::temp_dir().join(format!("text-short-{}", std::process::id()));
        std::fs::write(&path, [b'a'; 329]).map_err(|e| about(&path, e))?;
        let files = [path];
        let refused = Text::open(&files, 32).err().map(|e| e.to_string());
        assert!(refused.is_some_and(|e| e.contains("329 bytes are too few")));
        let opened = Text::open(&files, 31)?;
        assert_eq!((opened.training.len(), opened.held_out.len()), (297, 32));
        let opened = Text::holding_out(&files, 31, Some(100))?;
        assert_eq!((opened.training.len(), opened.held_out.len()), (229, 100));
        for most in [31, 298, 329, 1000] {
            let refused = Text::holding_out(&files, 31, Some(most))
                .err()
                .map(|e| e.to_string());
            assert!(refused.is_some_and(|e| e.contains("cannot be held out")));
        }
        std::fs::remove_file(&files[0]).map_err(|e| about(&files[0], e))
    }
}
