//! How training is going: a bar on a terminal, a line now and then elsewhere, both on standard error.

use candle_core::{Error, Result};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::Instant;

/// The state of training, as a bar on a terminal and as a line now and then elsewhere.
pub struct Progress {
    bar: Option<ProgressBar>,
    started: Instant,
    steps: usize,
    bytes_per_step: usize,
    done: usize,
    first_loss: f64,
    /// A mean of about the last 20 steps.
    loss: f64,
}

impl Progress {
    /// At the start of `steps` steps of so many bytes each.
    pub fn new(steps: usize, bytes_per_step: usize) -> Result<Self> {
        let bar = if std::io::stderr().is_terminal() {
            let style =
                ProgressStyle::with_template("{bar:32} step {pos} of {len}  {msg}  {eta} left")
                    .map_err(Error::wrap)?;
            Some(ProgressBar::new(steps as u64).with_style(style))
        } else {
            None
        };
        Ok(Self {
            bar,
            started: Instant::now(),
            steps,
            bytes_per_step,
            done: 0,
            first_loss: 0.,
            loss: 0.,
        })
    }

    /// One more step is done; `loss` in nats per byte.
    pub fn report(&mut self, loss: f64) {
        if self.done == 0 {
            self.first_loss = loss;
        }
        self.done += 1;
        self.loss += (loss - self.loss) * (1. / self.done as f64).max(0.05);
        let state = format!("loss {:.3}  {:.0} tokens/s", self.loss, self.speed());
        let often = self.steps.div_ceil(10);
        match &self.bar {
            Some(bar) => {
                bar.set_message(state);
                bar.inc(1);
            }
            None if self.done.is_multiple_of(often) || self.done == self.steps => {
                let left = self.started.elapsed().as_secs_f64() * (self.steps - self.done) as f64
                    / self.done as f64;
                eprintln!(
                    "step {:>5} of {}  {state}  {left:.0} s left",
                    self.done, self.steps
                );
            }
            None => {}
        }
    }

    /// The last step is done: sums up on standard output.
    pub fn finish(self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        println!(
            "trained    loss {:.3} → {:.3} nats per byte in {:.0} s, {:.0} tokens/s",
            self.first_loss,
            self.loss,
            self.started.elapsed().as_secs_f64(),
            self.speed()
        );
    }

    fn speed(&self) -> f64 {
        (self.done * self.bytes_per_step) as f64 / self.started.elapsed().as_secs_f64()
    }
}
