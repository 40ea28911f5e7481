//! How exactly the phase's cosine is evaluated, to 300 turns and beyond, for both precisions.
//!
//! Each query sees one key, and the amplitude is 1: its log-sum-exp is the cosine itself.

use crate::reference::{round_to, Call, Dims, Inputs, Rows};
use crate::report::Report;
use crate::target::{Manner, Target};
use crate::{test, Test};
use candle_core::{DType, Result};
use candle_posenc::Score;
use rand::{rngs::StdRng, RngExt, SeedableRng};
use std::f64::consts::TAU;

pub fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for (name, fast) in [("precise", false), ("fast", true)] {
            for (kind, queries) in [("forward", PAIRS), ("decode", 16)] {
                tests.push(test(
                    format!("cosine_to_1000_turns_{name}_{kind}_{dtype:?}"),
                    move |target, report| {
                        let manner = match fast {
                            true => Manner::of(dtype).fast(),
                            false => Manner::of(dtype),
                        };
                        cosines(target, manner, queries, report)
                    },
                ));
            }
        }
    }
    tests.push(test("cosine_to_1000_turns_F64", |target, report| {
        cosines(target, Manner::of(DType::F64), PAIRS, report)
    }));
    tests
}

const PAIRS: usize = 4096;
const WIDTH: usize = 64;
/// Bounds of the ranges of |turns| that are told apart.
const RANGES: [f64; 7] = [0., 1., 10., 50., 100., 300., 1000.];

/// Roundings to f32 that a turn's number of turns may have met, each 2π·turns·2⁻²⁴ of the cosine: that of the table's
/// entry, of the product with it and of the sum behind the phase; for the hardware's cosine those of its own
/// conversion to radians too.
fn allowed(turns: f64, manner: Manner) -> f64 {
    match manner.dtype {
        DType::F64 => 1e-14 * (10. + turns),
        _ => {
            let roundings = match manner.precision {
                candle_posenc::Precision::Precise => 2.5,
                candle_posenc::Precision::Fast => 6.,
            };
            TAU * turns * roundings * 2f64.powi(-24) + 2e-6
        }
    }
}

fn cosines(target: &Target, manner: Manner, queries: usize, report: &mut Report) -> Result<()> {
    let mut worst = [(0f64, 0f64); RANGES.len() - 1];
    let alpha = 0.1;
    for (seed, phase_scale) in [0.02, 0.1, 0.5, 2., 5.].into_iter().enumerate() {
        let mut rng = StdRng::seed_from_u64(seed as u64);
        let dims = Dims {
            t: queries,
            s: PAIRS.min(queries),
            ..Dims::square(1, 1, 0, WIDTH)
        };
        for _ in 0..(PAIRS / queries).min(16) {
            // Every pair its own document; all distances up to 65,535, small ones often.
            let apart: Vec<i64> = (0..queries)
                .map(|i| match i % 3 {
                    0 => rng.random_range(0..64),
                    1 => rng.random_range(0..4096),
                    _ => rng.random_range(0..65_536),
                })
                .collect();
            let queries_at: Rows = vec![apart.clone()];
            let keys_at: Rows = vec![vec![0; queries]];
            let documents: Rows = vec![(0..queries as i64).collect()];
            let mut call = Call::causal(dims)
                .with_score(Score::Phase {
                    amp_dim: WIDTH / 2,
                    alpha,
                    phase_scale: Some(phase_scale),
                })
                .with_positions(queries_at, keys_at);
            call.scale = Some(1.);
            call.segments = Some((documents.clone(), documents));
            let mut fill = |of_q: bool| -> Vec<f64> {
                (0..queries * WIDTH)
                    .map(|i| match i % WIDTH {
                        0 => 1.,
                        c if c < WIDTH / 2 => 0.,
                        // Few bits, so that the sum behind the phase is exact and the rest shows.
                        _ if of_q => f64::from(rng.random_range(-8i32..9)) / 8.,
                        _ => f64::from(rng.random_range(-16i32..17)) / 4.,
                    })
                    .map(|x| round_to(manner.dtype, x))
                    .collect()
            };
            let inputs = Inputs {
                q: fill(true),
                k: fill(false),
                v: vec![1.; queries * WIDTH],
                grad: Vec::new(),
            };
            let got = target.forward(&call, &inputs, manner, report)?;
            for (i, lse) in got.lse.iter().enumerate() {
                let half = WIDTH / 2;
                let product: f64 = inputs.q[i * WIDTH + half..][..half]
                    .iter()
                    .zip(&inputs.k[i * WIDTH + half..][..half])
                    .map(|(q, k)| q * k)
                    .sum();
                let distance = apart[i] as f64;
                let factor = if apart[i] == 0 {
                    0.
                } else {
                    distance.powf(alpha)
                };
                let turns = factor * phase_scale * product;
                let want = (TAU * (turns - turns.round())).cos();
                let error = (lse - want).abs();
                let error = if error.is_nan() { f64::INFINITY } else { error };
                let turns = turns.abs();
                report.compare(
                    format!("cosine at {turns:.3} turns"),
                    error,
                    allowed(turns, manner),
                );
                let range = RANGES
                    .windows(2)
                    .position(|r| turns >= r[0] && turns < r[1]);
                if let Some(range) = range {
                    worst[range].0 = worst[range].0.max(error);
                    worst[range].1 += 1.;
                }
            }
        }
    }
    let text: Vec<String> = RANGES
        .windows(2)
        .zip(worst)
        .map(|(range, (error, count))| {
            format!("{}..{} turns: {error:.1e} ({count})", range[0], range[1])
        })
        .collect();
    report.remark(format!("largest error of the cosine: {}", text.join(", ")));
    Ok(())
}
