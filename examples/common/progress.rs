//! How training is going: a bar on a terminal, a line now and then elsewhere, both on standard error.

use candle_core::{Error, Result};
use candle_posenc::train::StepReport;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::Instant;

/// The state of training, as a bar on a terminal and as a line now and then elsewhere.
pub struct Progress {
    bar: Option<ProgressBar>,
    started: Instant,
    steps: usize,
    /// Of these, those done before this process.
    before: usize,
    done: usize,
    bytes: usize,
    first_loss: f64,
    /// A mean of about the last 20 steps.
    loss: f64,
}

impl Progress {
    /// At the start of `steps` steps, of which some were done `before`.
    pub fn new(steps: usize, before: usize) -> Result<Self> {
        let bar = if std::io::stderr().is_terminal() {
            let style =
                ProgressStyle::with_template("{bar:32} step {pos} of {len}  {msg}  {eta} left")
                    .map_err(Error::wrap)?;
            let bar = ProgressBar::new(steps as u64).with_style(style);
            Some(bar.with_position(before as u64))
        } else {
            None
        };
        Ok(Self {
            bar,
            started: Instant::now(),
            steps,
            before,
            done: 0,
            bytes: 0,
            first_loss: 0.,
            loss: 0.,
        })
    }

    /// One more step is done.
    pub fn report(&mut self, report: &StepReport) {
        let loss = report.loss;
        if self.done == 0 {
            self.first_loss = loss;
        }
        self.done += 1;
        self.bytes += report.tokens;
        self.loss += (loss - self.loss) * (1. / self.done as f64).max(0.05);
        let state = format!("loss {:.3}  {:.0} tokens/s", self.loss, self.speed());
        let (often, step) = (self.steps.div_ceil(10), self.before + self.done);
        match &self.bar {
            Some(bar) => {
                bar.set_message(state);
                bar.inc(1);
            }
            None if step.is_multiple_of(often) || step == self.steps => {
                let steps_left = self.steps.saturating_sub(step) as f64;
                let left = self.started.elapsed().as_secs_f64() * steps_left / self.done as f64;
                eprintln!(
                    "step {step:>5} of {}  {state}  {left:.0} s left",
                    self.steps
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
        if self.done == 0 {
            println!("trained    all {} steps were done before", self.steps);
            return;
        }
        println!(
            "trained    loss {:.3} → {:.3} nats per token in {:.0} s, {:.0} tokens/s",
            self.first_loss,
            self.loss,
            self.started.elapsed().as_secs_f64(),
            self.speed()
        );
    }

    fn speed(&self) -> f64 {
        self.bytes as f64 / self.started.elapsed().as_secs_f64()
    }
}
