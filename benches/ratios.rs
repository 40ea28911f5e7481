//! The speeds that this crate promises, as ratios taken in one run: the candidates take turns, so that a machine
//! that slows down slows all of them. Prints CSV.
//!
//! `…_backward` is a whole `backward()` from a scalar loss. Around our own work candle multiplies, adds and zeroes
//! tensors there, which takes as long for an operation whose gradients cost nothing: `candle_backward`. `…_bwd` is
//! the difference of the two, round by round.
//!
//! `cargo bench --bench ratios`; with `--test` every shape shrinks and nothing is a measurement.

#![allow(missing_docs)]

mod peers;

use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, Var, WithDType};
use candle_posenc::{attend, plan, AttendSpec, Score};
use std::time::Instant;

const HEADS: usize = 8;
const HEAD_DIM: usize = 64;

fn main() -> Result<()> {
    let toy = std::env::args().any(|arg| arg == "--test");
    let runs = if toy {
        [(64, 1), (128, 1)]
    } else {
        [(512, 41), (4096, 9)]
    };
    println!("what,shape,median_ms,min_ms,peer,ratio_of_medians,ratio_of_minima");
    for (t, rounds) in runs {
        let [q, k, v] = [(); 3]
            .map(|()| peers::normal((1, HEADS, t, HEAD_DIM)).and_then(|x| Var::from_tensor(&x)));
        let (q, k, v) = (q?, k?, v?);
        let plain = AttendSpec::causal();
        let tapa = AttendSpec::causal().with_score(Score::Phase {
            amp_dim: HEAD_DIM / 2,
            alpha: 0.1,
            phase_scale: None,
        });
        if t == runs[1].0 {
            eprintln!("plain: {}", plan(&q, &k, &v, &plain)?);
            eprintln!("tapa: {}", plan(&q, &k, &v, &tapa)?);
        }
        let [dq, dk, dv] = [&q, &k, &v].map(|x| x.as_detached_tensor());
        let [fq, fk, fv] = [&dq, &dk, &dv].map(peers::tokens_first);
        let (fq, fk, fv) = (fq?, fk?, fv?);
        let upstream = peers::normal((1, HEADS, t, HEAD_DIM))?;
        let forward = |spec: &AttendSpec| attend(&dq, &dk, &dv, spec);
        let loss = |out: Result<Tensor>| (out? * &upstream)?.sum_all();
        let plain_loss = loss(attend(&q, &k, &v, &plain))?;
        let tapa_loss = loss(attend(&q, &k, &v, &tapa))?;
        let free_loss = loss(q.apply_op3(&k, &v, Free([dq.clone(), dk.clone(), dv.clone()])))?;

        let mut timings = Timings::default();
        let mut candidates: Vec<Candidate> = vec![
            ("plain_fwd", Box::new(|| forward(&plain))),
            ("tapa_fwd", Box::new(|| forward(&tapa))),
            ("candle_backward", Box::new(|| backward(&free_loss))),
            ("plain_backward", Box::new(|| backward(&plain_loss))),
            ("tapa_backward", Box::new(|| backward(&tapa_loss))),
            (
                "candle_flash_fwd",
                Box::new(|| peers::candle_flash(&fq, &fk, &fv)),
            ),
        ];
        if t <= 1024 {
            let dense = || peers::dense_causal(&dq, &dk, &dv);
            candidates.push(("candle_dense_fwd", Box::new(dense)));
        }
        for _ in 0..rounds {
            for (what, run) in &candidates {
                timings.time(what, run)?;
            }
            // Whoever comes first finds the memory that others have just given back, and pays for it.
            candidates.reverse();
        }
        timings.subtract("plain_bwd", "plain_backward", "candle_backward");
        timings.subtract("tapa_bwd", "tapa_backward", "candle_backward");
        let shape = format!("b1_h{HEADS}_t{t}_d{HEAD_DIM}_f32_causal");
        for (what, peer) in [
            ("plain_fwd", "candle_flash_fwd"),
            ("plain_fwd", "candle_dense_fwd"),
            ("tapa_fwd", "candle_flash_fwd"),
            ("tapa_fwd", "plain_fwd"),
            ("plain_bwd", "plain_fwd"),
            ("tapa_bwd", "tapa_fwd"),
            ("plain_backward", "plain_fwd"),
            ("tapa_backward", "tapa_fwd"),
        ] {
            timings.print(what, &shape, peer);
        }
    }
    Ok(())
}

type Candidate<'a> = (&'static str, Box<dyn Fn() -> Result<Tensor> + 'a>);

/// An operation of attention's shape that does nothing, whose gradients are there already.
struct Free([Tensor; 3]);

impl CustomOp3 for Free {
    fn name(&self) -> &'static str {
        "free"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        q: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let zeros = vec![0f32; q.shape().elem_count()];
        Ok((f32::to_cpu_storage_owned(zeros), q.shape().clone()))
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dq, dk, dv] = self.0.clone().map(Some);
        Ok((dq, dk, dv))
    }
}

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

    /// A new candidate: the difference of two, round by round.
    fn subtract(&mut self, what: &'static str, whole: &str, part: &str) {
        let of = |what: &str| self.0.iter().find(|(name, _)| *name == what);
        if let (Some((_, whole)), Some((_, part))) = (of(whole), of(part)) {
            let rest = whole.iter().zip(part).map(|(a, b)| a - b).collect();
            self.0.push((what, rest));
        }
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
