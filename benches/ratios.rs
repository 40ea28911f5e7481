//! The speeds that this crate promises, as ratios taken in one run: the candidates take turns, so that a machine
//! that slows down slows all of them. Prints CSV.
//!
//! `cargo bench --bench ratios`; with `--test` every shape shrinks and nothing is a measurement.

#![allow(missing_docs)]

mod peers;

use candle_core::{Result, Tensor, Var};
use candle_posenc::{attend, plan, AttendSpec, Score};
use std::time::Instant;

const HEADS: usize = 8;
const HEAD_DIM: usize = 64;

fn main() -> Result<()> {
    let toy = std::env::args().any(|arg| arg == "--test");
    let rounds = if toy { 1 } else { 7 };
    let lengths = if toy { [64, 128] } else { [512, 4096] };
    println!("what,shape,median_ms,min_ms,peer,ratio_of_medians,ratio_of_minima");
    for t in lengths {
        let [q, k, v] = [(); 3]
            .map(|()| peers::normal((1, HEADS, t, HEAD_DIM)).and_then(|x| Var::from_tensor(&x)));
        let (q, k, v) = (q?, k?, v?);
        let plain = AttendSpec::causal();
        let tapa = AttendSpec::causal().with_score(Score::Phase {
            amp_dim: HEAD_DIM / 2,
            alpha: 0.1,
            phase_scale: None,
        });
        if t == lengths[1] {
            eprintln!("plain: {}", plan(&q, &k, &v, &plain)?);
            eprintln!("tapa: {}", plan(&q, &k, &v, &tapa)?);
        }
        let [dq, dk, dv] = [&q, &k, &v].map(|x| x.as_detached_tensor());
        let [fq, fk, fv] = [&dq, &dk, &dv].map(peers::tokens_first);
        let (fq, fk, fv) = (fq?, fk?, fv?);
        let upstream = peers::normal((1, HEADS, t, HEAD_DIM))?;
        let forward = |spec: &AttendSpec| attend(&dq, &dk, &dv, spec);
        let loss = |spec: &AttendSpec| (attend(&q, &k, &v, spec)? * &upstream)?.sum_all();
        let (plain_loss, tapa_loss) = (loss(&plain)?, loss(&tapa)?);

        let mut timings = Timings::default();
        for _ in 0..rounds {
            timings.time("plain_fwd", || forward(&plain))?;
            timings.time("tapa_fwd", || forward(&tapa))?;
            timings.time("plain_bwd", || backward(&plain_loss))?;
            timings.time("tapa_bwd", || backward(&tapa_loss))?;
            timings.time("candle_flash_fwd", || peers::candle_flash(&fq, &fk, &fv))?;
            if t <= 1024 {
                timings.time("candle_dense_fwd", || peers::dense_causal(&dq, &dk, &dv))?;
            }
        }
        let shape = format!("b1_h{HEADS}_t{t}_d{HEAD_DIM}_f32_causal");
        for (what, peer) in [
            ("plain_fwd", "candle_flash_fwd"),
            ("plain_fwd", "candle_dense_fwd"),
            ("tapa_fwd", "candle_flash_fwd"),
            ("tapa_fwd", "plain_fwd"),
            ("plain_bwd", "plain_fwd"),
            ("tapa_bwd", "tapa_fwd"),
        ] {
            timings.print(what, &shape, peer);
        }
    }
    Ok(())
}

/// The backward pass with candle's own work around it: one product with the upstream gradient.
fn backward(loss: &Tensor) -> Result<Tensor> {
    loss.backward()?;
    Ok(loss.clone())
}

/// Milliseconds of each candidate, round by round.
#[derive(Default)]
struct Timings(Vec<(&'static str, Vec<f64>)>);

impl Timings {
    fn time(&mut self, what: &'static str, run: impl FnOnce() -> Result<Tensor>) -> Result<()> {
        let start = Instant::now();
        let result = run()?;
        let elapsed = start.elapsed().as_secs_f64() * 1e3;
        std::hint::black_box(result);
        match self.0.iter_mut().find(|(name, _)| *name == what) {
            Some((_, all)) => all.push(elapsed),
            None => self.0.push((what, vec![elapsed])),
        }
        Ok(())
    }

    /// (median, minimum)
    fn summary(&self, what: &str) -> Option<(f64, f64)> {
        let mut all = self.0.iter().find(|(name, _)| *name == what)?.1.clone();
        all.sort_by(f64::total_cmp);
        Some((all[all.len() / 2], all[0]))
    }

    fn print(&self, what: &str, shape: &str, peer: &str) {
        let (Some((median, min)), Some((peer_median, peer_min))) =
            (self.summary(what), self.summary(peer))
        else {
            return;
        };
        println!(
            "{what},{shape},{median:.2},{min:.2},{peer},{:.3},{:.3}",
            median / peer_median,
            min / peer_min
        );
    }
}
