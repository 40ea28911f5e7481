//! Files and folders that appear under their name whole or not at all, whatever moment a process or machine stops at.
//!
//! Each is made under another name beside its place, written through to the disk, and renamed: a rename is atomic.
//! What a killed process leaves behind begins with [`STAGED`].

use candle_core::{Error, Result};
use std::any::Any;
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use tempfile::{Builder, NamedTempFile, TempDir};

/// How the names of unfinished files and folders begin.
pub(crate) const STAGED: &str = ".staged-";

/// Writes a file, in place of one that may be there.
pub(crate) fn write_file(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<()> {
    stage_file(path, write)?.commit()
}

/// A file that is written to the disk, but not yet under its name. Without a commit it vanishes.
pub(crate) struct StagedFile {
    file: NamedTempFile,
    path: PathBuf,
}

/// Writes a file beside its place. To change several files together, stage all before the first commit.
pub(crate) fn stage_file(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<StagedFile> {
    let file = builder(0o666)
        .tempfile_in(parent(path))
        .map_err(|e| about(path, e))?;
    let mut buffered = BufWriter::new(file);
    write(&mut buffered).map_err(|e| about(path, e))?;
    let file = buffered
        .into_inner()
        .map_err(|e| about(path, e.into_error()))?;
    file.as_file().sync_all().map_err(|e| about(path, e))?;
    Ok(StagedFile {
        file,
        path: path.to_path_buf(),
    })
}

impl StagedFile {
    /// Gives the file its name.
    pub(crate) fn commit(self) -> Result<()> {
        let Self { file, path } = self;
        file.persist(&path).map_err(|e| about(&path, e.error))?;
        sync_folder(parent(&path)).map_err(|e| about(&path, e))
    }
}

/// A folder being filled. Without a commit it vanishes.
pub(crate) struct StagedFolder {
    folder: TempDir,
    path: PathBuf,
}

impl StagedFolder {
    /// An empty folder beside the place that it will take, whose parents are made where they are missing.
    pub(crate) fn create(path: &Path) -> Result<Self> {
        fs::create_dir_all(parent(path)).map_err(|e| about(path, e))?;
        let folder = builder(0o777)
            .tempdir_in(parent(path))
            .map_err(|e| about(path, e))?;
        Ok(Self {
            folder,
            path: path.to_path_buf(),
        })
    }

    /// Where it is now.
    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Gives the folder its name, which nothing but an empty folder may have; its files were written by
    /// [`write_file`].
    pub(crate) fn commit(self) -> Result<()> {
        let Self { folder, path } = self;
        fs::rename(folder.path(), &path).map_err(|e| about(&path, e))?;
        // Nothing is left under the old name to remove.
        let _ = folder.keep();
        sync_folder(parent(&path)).map_err(|e| about(&path, e))
    }
}

/// Removes a folder: it vanishes from its name whole.
pub(crate) fn remove_folder(path: &Path) -> Result<()> {
    let place = builder(0o700)
        .tempdir_in(parent(path))
        .map_err(|e| about(path, e))?;
    fs::rename(path, place.path().join("removed")).map_err(|e| about(path, e))?;
    place.close().map_err(|e| about(path, e))
}

/// Removes a file, where there is one.
pub(crate) fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Ok(()) => sync_folder(parent(path)).map_err(|e| about(path, e)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(about(path, error)),
    }
}

/// Removes what killed processes left unfinished in a folder.
pub(crate) fn remove_unfinished(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(|e| about(folder, e))? {
        let entry = entry.map_err(|e| about(folder, e))?;
        if entry.file_name().to_string_lossy().starts_with(STAGED) {
            let path = entry.path();
            let removed = match path.is_dir() {
                true => fs::remove_dir_all(&path),
                false => fs::remove_file(&path),
            };
            removed.map_err(|e| about(&path, e))?;
        }
    }
    Ok(())
}

/// An error that names the file.
pub(crate) fn about(path: &Path, error: impl Display + 'static) -> Error {
    let reason = match (&error as &dyn Any).downcast_ref::<Error>() {
        Some(error) => message(error),
        None => error.to_string(),
    };
    Error::msg(format!("{}: {reason}", path.display()))
}

/// What an error says, without the backtrace that candle puts into its text where `RUST_BACKTRACE` is set.
pub(crate) fn message(error: &Error) -> String {
    match error {
        Error::WithBacktrace { inner, .. } => message(inner),
        other => other.to_string(),
    }
}

/// Whether a folder has something under this name, be it a link that leads nowhere: what reads it then says so.
pub(crate) fn is_there(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

/// Makes names with the rights that any new file or folder would have.
#[cfg_attr(not(unix), allow(unused_variables))]
fn builder(mode: u32) -> Builder<'static, 'static> {
    let mut builder = Builder::new();
    builder.prefix(STAGED);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(mode));
    }
    builder
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Makes the names in a folder survive a loss of power, where the system lets a folder be opened.
fn sync_folder(folder: &Path) -> io::Result<()> {
    #[cfg(unix)]
    File::open(folder)?.sync_all()?;
    #[cfg(not(unix))]
    let _ = folder;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::bail;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    #[test]
    fn write_file_that_fails_leaves_the_old_one_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        write_file(&path, |w| Ok(w.write_all(b"old")?)).unwrap();
        let failed = write_file(&path, |w| {
            w.write_all(b"new")?;
            bail!("stopped")
        });
        let error = message(&failed.unwrap_err());
        assert_eq!(error, format!("{}: stopped", path.display()));
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(folder.path()), ["a"]);
        write_file(&path, |w| Ok(w.write_all(b"new")?)).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
    }

    #[test]
    fn remove_file_of_a_file_that_is_not_there_does_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::write(&path, b"1").unwrap();
        remove_file(&path).unwrap();
        remove_file(&path).unwrap();
        assert!(names(folder.path()).is_empty());
        assert!(remove_file(folder.path()).is_err());
    }

    #[test]
    fn staged_folder_appears_only_when_committed() {
        let outer = tempfile::tempdir().unwrap();
        let path = outer.path().join("x/y");
        let fill = |staged: &StagedFolder| {
            write_file(&staged.path().join("f"), |w| Ok(w.write_all(b"1")?)).unwrap()
        };
        let dropped = StagedFolder::create(&path).unwrap();
        fill(&dropped);
        drop(dropped);
        assert!(names(&outer.path().join("x")).is_empty());
        let kept = StagedFolder::create(&path).unwrap();
        fill(&kept);
        kept.commit().unwrap();
        assert_eq!(fs::read(path.join("f")).unwrap(), b"1");
        // A second one does not replace it.
        let second = StagedFolder::create(&path).unwrap();
        fill(&second);
        assert!(second.commit().is_err());
        assert_eq!(names(&outer.path().join("x")), ["y"]);
    }

    #[test]
    fn remove_folder_takes_what_it_holds_and_nothing_else() {
        let outer = tempfile::tempdir().unwrap();
        fs::create_dir(outer.path().join("a")).unwrap();
        fs::write(outer.path().join("a/f"), b"1").unwrap();
        fs::write(outer.path().join("kept"), b"").unwrap();
        remove_folder(&outer.path().join("a")).unwrap();
        assert_eq!(names(outer.path()), ["kept"]);
        assert!(remove_folder(&outer.path().join("a")).is_err());
        assert_eq!(names(outer.path()), ["kept"]);
    }

    #[test]
    fn remove_unfinished_takes_what_a_killed_process_left() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join(".staged-a")).unwrap();
        fs::write(folder.path().join(".staged-a/f"), b"").unwrap();
        fs::write(folder.path().join(".staged-b"), b"").unwrap();
        fs::write(folder.path().join("kept"), b"").unwrap();
        remove_unfinished(folder.path()).unwrap();
        assert_eq!(names(folder.path()), ["kept"]);
    }
}
