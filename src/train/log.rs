//! The record of a run: one line of CSV a step.

use super::trainer::StepReport;
use crate::atomic::{about, write_file};
use candle_core::{bail, Result};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

const HEADER: &str =
    "step,loss,gradient_norm,learning_rate,tokens,tokens_per_second,elapsed_seconds";

/// A CSV file of steps: loss in nats per token, the gradients' norm before clipping, the learning rate, tokens read in
/// the step and per second, and seconds since the run began.
///
/// Numbers are written with all their digits: what is read back is what was computed.
#[derive(Debug)]
pub struct Log {
    file: File,
    path: PathBuf,
    every: usize,
}

impl Log {
    /// Starts a file; each `every`-th step becomes a line, 0 meaning 1.
    ///
    /// # Errors
    /// When there is such a file already or it cannot be written.
    pub fn create(path: impl AsRef<Path>, every: usize) -> Result<Self> {
        let path = path.as_ref();
        if path.exists() {
            return Err(about(path, "there is such a file already"));
        }
        write_file(path, |file| Ok(writeln!(file, "{HEADER}")?))?;
        Self::append(path, every)
    }

    /// Goes on in a file behind the line of a step. Lines of later steps, and a last line that a killed process did not
    /// finish, are dropped: after a run is resumed from `step` the file becomes that of a run without interruption.
    /// Where there is no file one is started.
    ///
    /// # Errors
    /// When the file is no log or cannot be written.
    pub fn resume(path: impl AsRef<Path>, every: usize, step: usize) -> Result<Self> {
        let path = path.as_ref();
        if !path.exists() {
            return Self::create(path, every);
        }
        let text = std::fs::read_to_string(path).map_err(|e| about(path, e))?;
        let kept = lines_up_to(&text, step).map_err(|e| about(path, e))?;
        if kept != text {
            write_file(path, |file| Ok(file.write_all(kept.as_bytes())?))?;
        }
        Self::append(path, every)
    }

    fn append(path: &Path, every: usize) -> Result<Self> {
        let file = OpenOptions::new().append(true).open(path);
        Ok(Self {
            file: file.map_err(|e| about(path, e))?,
            path: path.to_path_buf(),
            every: every.max(1),
        })
    }

    /// Writes a step's line, at once: it is in the file when this returns.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn record(&mut self, report: &StepReport) -> Result<()> {
        if !report.step.is_multiple_of(self.every) {
            return Ok(());
        }
        let &StepReport {
            step,
            loss,
            gradient_norm,
            rate,
            tokens,
            seconds,
            elapsed,
        } = report;
        let speed = tokens as f64 / seconds.max(f64::MIN_POSITIVE);
        let line =
            format!("{step},{loss},{gradient_norm},{rate},{tokens},{speed:.1},{elapsed:.3}\n");
        let written = self.file.write_all(line.as_bytes());
        written.map_err(|e| about(&self.path, e))
    }
}

/// The beginning of a log that holds steps up to this one.
fn lines_up_to(text: &str, last: usize) -> Result<&str> {
    let mut kept = 0;
    for (number, line) in text.split_inclusive('\n').enumerate() {
        let Some(content) = line.strip_suffix('\n') else {
            break; // not finished
        };
        match (number, content.split_once(',')) {
            (0, _) if content == HEADER => {}
            (0, _) => bail!("not the log of a training run: its first line is not {HEADER}"),
            (_, Some((step, _))) => match step.parse::<usize>() {
                Ok(step) if step > last => break,
                Ok(_) => {}
                Err(_) => bail!("line {} does not begin with a step: {content}", number + 1),
            },
            (_, None) => bail!("line {} does not begin with a step: {content}", number + 1),
        }
        kept += line.len();
    }
    if kept == 0 {
        bail!("not the log of a training run: it has no first line")
    }
    Ok(&text[..kept])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(step: usize) -> StepReport {
        StepReport {
            step,
            loss: 1. / step as f64,
            gradient_norm: 0.1,
            rate: 1e-3,
            tokens: 8,
            seconds: 0.5,
            elapsed: 0.5 * step as f64,
        }
    }

    #[test]
    fn resume_after_a_kill_drops_later_and_unfinished_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.csv");
        let read = || std::fs::read_to_string(&path).unwrap();
        let mut log = Log::create(&path, 1).unwrap();
        (1..=3).for_each(|step| log.record(&report(step)).unwrap());
        let whole = read();
        assert_eq!(whole.lines().count(), 4);
        assert_eq!(
            whole.lines().last().unwrap(),
            "3,0.3333333333333333,0.1,0.001,8,16.0,1.500"
        );
        (4..=5).for_each(|step| log.record(&report(step)).unwrap());
        log.file.write_all(b"6,0.1").unwrap();
        drop(log);
        let mut log = Log::resume(&path, 1, 3).unwrap();
        assert_eq!(read(), whole);
        log.record(&report(4)).unwrap();
        assert_eq!(read().lines().count(), 5);
        // Only an unfinished line.
        std::fs::write(&path, format!("{whole}4,0.")).unwrap();
        Log::resume(&path, 1, 9).unwrap();
        assert_eq!(read(), whole);
    }

    #[test]
    fn record_every_third_step_writes_those_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.csv");
        let mut log = Log::create(&path, 3).unwrap();
        (1..=7).for_each(|step| log.record(&report(step)).unwrap());
        let text = std::fs::read_to_string(&path).unwrap();
        let steps: Vec<&str> = text.lines().map(|l| l.split(',').next().unwrap()).collect();
        assert_eq!(steps, ["step", "3", "6"]);
        assert!(Log::create(&path, 1).is_err());
    }

    #[test]
    fn resume_file_that_is_no_log_is_refused_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.csv");
        let damaged = format!("{HEADER}\n1,2\nnonsense\n3,4\n");
        for text in ["", "something else\n", "no end", damaged.as_str()] {
            std::fs::write(&path, text).unwrap();
            assert!(Log::resume(&path, 1, 5).is_err(), "{text:?}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
    }
}
