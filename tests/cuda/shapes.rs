//! Every score, mask, width, grouping, storage and placing of tokens, over lengths around the tiles' edges.

use crate::reference::{linear_bias, Call, Dims, Fill, Inputs, Rows, STORAGES};
use crate::report::Report;
use crate::target::{Manner, Target};
use crate::{test, Test};
use candle_core::{DType, Result};
use candle_posenc::Score;

pub const HALVES: [DType; 2] = [DType::BF16, DType::F16];

/// TAPA's score with an amplitude part of `amp_dim`.
pub fn phase(amp_dim: usize) -> Score {
    Score::Phase {
        amp_dim,
        alpha: 0.1,
        phase_scale: None,
    }
}

/// The scores, by the names of the kernels' families, and how each is asked for.
pub fn families(h: usize, d: usize, dtype: DType) -> Vec<(&'static str, Score, Manner)> {
    let precise = Manner::of(dtype);
    let mut families = vec![
        ("dot", Score::Dot, precise),
        ("bias", linear_bias(h), precise),
    ];
    if d > 1 {
        // A whole number of 8 columns in each part where there can be one.
        let amp_dim = match d {
            16.. if d.is_multiple_of(8) => d / 16 * 8,
            _ => d / 2,
        };
        families.push(("phase_precise", phase(amp_dim), precise));
        families.push(("phase_fast", phase(amp_dim), precise.fast()));
    }
    families
}

/// A check of one call with fresh normal content.
pub fn check(
    target: &Target,
    call: &Call,
    manner: Manner,
    seed: u64,
    report: &mut Report,
) -> Result<()> {
    let inputs = Inputs::new(call.dims, Fill::Normal, seed, manner.dtype);
    target.check(call, &inputs, manner, report)?;
    Ok(())
}

pub fn consecutive(start: i64, len: usize) -> Rows {
    vec![(start..start + len as i64).collect()]
}

pub fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    tests.extend(lengths());
    tests.extend(unequal_lengths());
    tests.extend(groups());
    tests.extend(widths());
    tests.extend(value_widths());
    tests.extend(amplitude_widths());
    tests.extend(placings());
    tests.extend(storages());
    tests.extend(exact_dtypes());
    tests.extend(decoding());
    tests.extend(hard_scores());
    tests
}

const LENGTHS: [usize; 11] = [1, 2, 63, 64, 65, 127, 128, 129, 191, 257, 1000];

fn lengths() -> Vec<Test> {
    let mut tests = Vec::new();
    for (d, dtype) in [
        (64, DType::BF16),
        (128, DType::BF16),
        (64, DType::F16),
        (128, DType::F16),
    ] {
        for (name, score, manner) in families(2, d, dtype) {
            tests.push(test(
                format!("lengths_around_tiles_{name}_d{d}_{dtype:?}"),
                move |target, report| {
                    for (i, n) in LENGTHS.into_iter().enumerate() {
                        for (causal, window) in [
                            (true, None),
                            (false, None),
                            (true, Some(33)),
                            (false, Some(70)),
                        ] {
                            if n == 1000 && window.is_none() && !causal && dtype == DType::F16 {
                                continue; // bf16 has done it
                            }
                            let call = Call {
                                causal,
                                window,
                                ..Call::new(Dims::square(2, 1, n, d)).with_score(score.clone())
                            };
                            check(target, &call, manner, i as u64, report)?;
                        }
                    }
                    Ok(())
                },
            ));
        }
    }
    tests
}

/// Queries and keys of different numbers, by default alignment and at starts of either parity.
fn unequal_lengths() -> Vec<Test> {
    let mut tests = Vec::new();
    for d in [64, 128] {
        for (name, score, manner) in families(2, d, DType::BF16) {
            tests.push(test(
                format!("unequal_lengths_and_starts_{name}_d{d}"),
                move |target, report| {
                    let shapes = [
                        (17, 300),
                        (300, 17),
                        (64, 191),
                        (129, 64),
                        (100, 1),
                        (65, 66),
                    ];
                    for (i, (t, s)) in shapes.into_iter().enumerate() {
                        let dims = Dims {
                            t,
                            s,
                            ..Dims::square(2, 1, 0, d)
                        };
                        for (causal, window) in [(true, None), (false, None), (true, Some(40))] {
                            let call = Call {
                                causal,
                                window,
                                ..Call::new(dims).with_score(score.clone())
                            };
                            check(target, &call, manner, i as u64, report)?;
                            for (q, k) in [(1000, 901), (31, 0), (0, 64), (123_457, 123_456)] {
                                let placed = call
                                    .clone()
                                    .with_positions(consecutive(q, t), consecutive(k, s));
                                check(target, &placed, manner.spans(), i as u64, report)?;
                                if q == 31 {
                                    check(target, &placed, manner, i as u64, report)?;
                                }
                            }
                        }
                    }
                    Ok(())
                },
            ));
        }
    }
    tests
}

fn groups() -> Vec<Test> {
    let mut tests = Vec::new();
    for d in [64, 128] {
        for (name, score_of, manner) in families(24, d, DType::BF16) {
            tests.push(test(
                format!("grouped_heads_{name}_d{d}"),
                move |target, report| {
                    for (i, group) in [1, 2, 3, 4, 8].into_iter().enumerate() {
                        for (t, s) in [(65, 65), (130, 70), (5, 300), (1, 257)] {
                            let dims = Dims {
                                b: 2,
                                t,
                                s,
                                ..Dims::square(3 * group, 3, 0, d)
                            };
                            let score = match &score_of {
                                Score::LinearBias { .. } => linear_bias(dims.h),
                                other => other.clone(),
                            };
                            let call = Call::causal(dims).with_score(score);
                            check(target, &call, manner, 100 + i as u64, report)?;
                        }
                    }
                    Ok(())
                },
            ));
        }
    }
    tests
}

const WIDTHS: [usize; 14] = [8, 16, 24, 40, 64, 72, 80, 96, 104, 128, 136, 160, 192, 256];

fn widths() -> Vec<Test> {
    let mut tests = Vec::new();
    for d in WIDTHS {
        for dtype in HALVES {
            tests.push(test(
                format!("width_{d}_{dtype:?}"),
                move |target, report| {
                    for (name, score, manner) in families(2, d, dtype) {
                        for (t, s) in [(130, 130), (33, 200), (3, 200)] {
                            let dims = Dims {
                                t,
                                s,
                                ..Dims::square(2, 1, 0, d)
                            };
                            let call = Call::causal(dims).with_score(score.clone());
                            check(target, &call, manner, (name.len() + d) as u64, report)?;
                        }
                    }
                    Ok(())
                },
            ));
        }
    }
    // Widths that no tensor core kernel has.
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        tests.push(test(
            format!("width_odd_{dtype:?}"),
            move |target, report| {
                for d in [1, 2, 3, 7, 20, 33, 100, 130, 255] {
                    for (_, score, manner) in families(2, d, dtype) {
                        for (t, s) in [(40, 70), (2, 70)] {
                            let dims = Dims {
                                t,
                                s,
                                ..Dims::square(2, 1, 0, d)
                            };
                            let call = Call::causal(dims).with_score(score.clone());
                            check(target, &call, manner, d as u64, report)?;
                        }
                    }
                }
                Ok(())
            },
        ));
    }
    tests
}

fn value_widths() -> Vec<Test> {
    let mut tests = Vec::new();
    let pairs: [(&str, Vec<(usize, usize)>); 2] = [
        (
            "twice_the_head",
            [8, 16, 24, 40, 64, 80, 96, 104, 128, 160, 256]
                .map(|d| (d, 2 * d))
                .to_vec(),
        ),
        (
            "other",
            vec![
                (64, 8),
                (64, 16),
                (64, 72),
                (64, 120),
                (64, 256),
                (40, 200),
                (128, 64),
                (128, 136),
                (128, 200),
                (96, 160),
                (192, 128),
                (256, 64),
                (256, 512),
                (64, 65),
                (64, 33),
                (128, 1),
                (8, 512),
            ],
        ),
    ];
    for (kind, pairs) in pairs {
        for dtype in HALVES {
            let pairs = pairs.clone();
            tests.push(test(
                format!("value_width_{kind}_{dtype:?}"),
                move |target, report| {
                    for (d, e) in pairs.iter().copied() {
                        for (i, (_, score, manner)) in families(4, d, dtype).into_iter().enumerate()
                        {
                            for (t, s) in [(130, 130), (5, 140), (1, 33)] {
                                if i > 0 && t == 130 && d > 128 {
                                    continue; // one score is enough for the slowest
                                }
                                let dims = Dims {
                                    t,
                                    s,
                                    e,
                                    ..Dims::square(4, 2, 0, d)
                                };
                                let call = Call::causal(dims).with_score(score.clone());
                                check(target, &call, manner, (d + e) as u64, report)?;
                            }
                        }
                    }
                    Ok(())
                },
            ));
        }
    }
    tests
}

fn amplitude_widths() -> Vec<Test> {
    let sixteens = vec![
        (64, 16),
        (64, 48),
        (96, 48),
        (96, 32),
        (128, 32),
        (128, 96),
        (128, 112),
    ];
    let eights = vec![
        (16, 8),
        (24, 8),
        (24, 16),
        (64, 8),
        (64, 24),
        (64, 56),
        (128, 120),
        (40, 24),
    ];
    let odd = vec![
        (64, 1),
        (64, 33),
        (64, 63),
        (128, 77),
        (24, 5),
        (96, 44),
        (256, 100),
        (192, 144),
    ];
    let mut tests = Vec::new();
    for (kind, widths) in [("sixteens", sixteens), ("eights", eights), ("odd", odd)] {
        for dtype in HALVES {
            let widths = widths.clone();
            tests.push(test(
                format!("amplitude_width_{kind}_{dtype:?}"),
                move |target, report| {
                    for (d, amp_dim) in widths.iter().copied() {
                        for manner in [Manner::of(dtype), Manner::of(dtype).fast()] {
                            for (t, s) in [(129, 129), (4, 150)] {
                                let dims = Dims {
                                    t,
                                    s,
                                    ..Dims::square(2, 1, 0, d)
                                };
                                for alpha in [0.1, 0.5] {
                                    let score = Score::Phase {
                                        amp_dim,
                                        alpha,
                                        phase_scale: None,
                                    };
                                    let call = Call::causal(dims).with_score(score);
                                    check(target, &call, manner, (d + amp_dim) as u64, report)?;
                                }
                            }
                        }
                    }
                    Ok(())
                },
            ));
        }
    }
    tests
}

/// Positions and segments of `b` rows of `t` tokens, by name.
pub type Placing = (&'static str, Rows, Option<Rows>);

pub fn placing(t: usize) -> Vec<Placing> {
    let n = t as i64;
    let left = |pad: i64| (0..n).map(|i| i - pad).collect::<Vec<_>>();
    let right = |pad: i64| {
        (0..n)
            .map(|i| if i < n - pad { i } else { -1 })
            .collect::<Vec<_>>()
    };
    let document = |len: i64| (0..n).map(|i| i / len).collect::<Vec<_>>();
    let within = |len: i64| (0..n).map(|i| i % len).collect::<Vec<_>>();
    // 73 is prime and above every length that it is used with by no divisor: all tokens come up once.
    let permuted: Vec<i64> = (0..n).map(|i| (i * 73 + 5) % n).collect();
    vec![
        ("padded left", vec![left(0), left(70), left(n - 1)], None),
        ("padded right", vec![right(3), right(n - 2), right(n)], None),
        (
            "padding within",
            vec![(0..n).map(|i| if i % 5 == 2 { -7 } else { i }).collect()],
            None,
        ),
        ("documents", vec![within(50)], Some(vec![document(50)])),
        (
            "documents of each row",
            vec![within(7), within(64), within(n)],
            Some(vec![document(7), document(64), document(n)]),
        ),
        (
            "segments that return, far apart",
            vec![(0..n).collect()],
            Some(vec![(0..n)
                .map(|i| (i / 20 % 3) * 1_000_000_007 - 4)
                .collect()]),
        ),
        (
            "gaps of a million",
            vec![(0..n).map(|i| i / 3 * 1_000_003 + i % 3).collect()],
            None,
        ),
        ("permuted", vec![permuted.clone()], None),
        (
            "permuted with padding and segments",
            vec![permuted
                .iter()
                .map(|p| if p % 9 == 4 { -1 } else { *p })
                .collect()],
            Some(vec![permuted.iter().map(|p| p / 60).collect()]),
        ),
        ("all at one place", vec![vec![7; t]], None),
        (
            "far from the origin",
            vec![(0..n).map(|i| i + 5_000_000_001).collect()],
            None,
        ),
        (
            "spread beyond i32",
            vec![(0..n).map(|i| i * 40_000_000_000).collect()],
            None,
        ),
    ]
}

/// Calls whose queries and keys stand at the same places: causal and not, with a window and without.
pub fn placed(dims: Dims, score: &Score, positions: &Rows, segments: &Option<Rows>) -> Vec<Call> {
    let masks = [
        (true, None),
        (false, None),
        (true, Some(30)),
        (false, Some(30)),
    ];
    let call = |(causal, window)| Call {
        causal,
        window,
        segments: segments.clone().map(|rows| (rows.clone(), rows)),
        ..Call::new(dims)
            .with_score(score.clone())
            .with_positions(positions.clone(), positions.clone())
    };
    masks.map(call).into()
}

fn placings() -> Vec<Test> {
    let mut tests = Vec::new();
    for (which, (name, _, _)) in placing(130).into_iter().enumerate() {
        for dtype in [DType::BF16, DType::F32] {
            tests.push(test(
                format!("positions_{}_{dtype:?}", name.replace([' ', ','], "_")),
                move |target, report| {
                    for (d, t) in [(64, 130), (128, 200), (20, 75)] {
                        if dtype == DType::F32 && d == 128 {
                            continue;
                        }
                        let (_, positions, segments) = placing(t).swap_remove(which);
                        let dims = Dims {
                            b: 3,
                            ..Dims::square(4, 2, t, d)
                        };
                        for (_, score, manner) in families(4, d, dtype) {
                            for call in placed(dims, &score, &positions, &segments) {
                                check(target, &call, manner, which as u64, report)?;
                                // Only the last queries: decoding.
                                let last = |rows: &Rows| -> Rows {
                                    rows.iter().map(|row| row[t - 3..].to_vec()).collect()
                                };
                                let mut few = call.clone();
                                few.dims.t = 3;
                                few.positions = Some((last(&positions), positions.clone()));
                                few.segments = segments.clone().map(|rows| (last(&rows), rows));
                                check(target, &few, manner, which as u64, report)?;
                            }
                        }
                    }
                    Ok(())
                },
            ));
        }
    }
    tests
}

fn storages() -> Vec<Test> {
    let mut tests = Vec::new();
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        tests.push(test(
            format!("strided_and_misaligned_operands_{dtype:?}"),
            move |target, report| {
                for (t, s, d, e) in [
                    (70, 70, 64, 64),
                    (3, 70, 64, 64),
                    (70, 70, 128, 256),
                    (2, 70, 20, 24),
                ] {
                    let dims = Dims {
                        b: 2,
                        t,
                        s,
                        e,
                        ..Dims::square(4, 2, 0, d)
                    };
                    for (_, score, manner) in families(4, d, dtype) {
                        let call = Call::causal(dims).with_score(score);
                        let inputs = Inputs::new(dims, Fill::Normal, 21, dtype);
                        let plain = target.check(&call, &inputs, manner, report)?;
                        for i in 0..STORAGES.len() {
                            let storages =
                                [0, 1, 3].map(|shift| STORAGES[(i + shift) % STORAGES.len()]);
                            let stored =
                                target.forward(&call, &inputs, manner.stored(storages), report)?;
                            report.check(stored == plain, || {
                                format!("{storages:?} differs from contiguous, {call:?}")
                            });
                        }
                    }
                }
                Ok(())
            },
        ));
    }
    tests
}

/// Dtypes that no tensor core kernel takes.
fn exact_dtypes() -> Vec<Test> {
    let mut tests = Vec::new();
    for dtype in [DType::F32, DType::F64] {
        for (i, name) in ["dot", "bias", "phase_precise", "phase_fast"]
            .into_iter()
            .enumerate()
        {
            tests.push(test(
                format!("dtype_{dtype:?}_{name}"),
                move |target, report| {
                    for (n, d, e) in [
                        (1, 8, 8),
                        (65, 64, 64),
                        (129, 128, 256),
                        (257, 40, 24),
                        (1000, 16, 16),
                    ] {
                        let (_, score, manner) = families(2, d, dtype).swap_remove(i);
                        for (causal, window) in [(true, None), (false, Some(50))] {
                            let dims = Dims {
                                e,
                                ..Dims::square(2, 1, n, d)
                            };
                            let call = Call {
                                causal,
                                window,
                                ..Call::new(dims).with_score(score.clone())
                            };
                            check(target, &call, manner, n as u64, report)?;
                        }
                    }
                    Ok(())
                },
            ));
        }
    }
    tests
}

/// 1 to 16 queries: keys are split over blocks, and the parts merged.
fn decoding() -> Vec<Test> {
    let mut tests = Vec::new();
    for d in [64, 128] {
        for (name, score, manner) in families(8, d, DType::BF16) {
            let (of_queries, of_keys) = (score.clone(), score.clone());
            tests.push(test(
                format!("decoding_of_1_to_17_queries_{name}_d{d}"),
                move |target, report| {
                    for t in 1..=17 {
                        for (h, g) in [(8, 2), (8, 8), (8, 1)] {
                            let dims = Dims {
                                t,
                                s: 300,
                                ..Dims::square(h, g, 0, d)
                            };
                            let call = Call::causal(dims).with_score(of_queries.clone());
                            check(target, &call, manner, t as u64, report)?;
                        }
                    }
                    Ok(())
                },
            ));
            tests.push(test(
                format!("decoding_over_1_to_9000_keys_{name}_d{d}"),
                move |target, report| {
                    for s in [
                        1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1025, 4097, 9000,
                    ] {
                        for (t, window) in [(1, None), (4, None), (1, Some(100)), (16, Some(1500))]
                        {
                            if t == 16 && s > 1025 {
                                continue;
                            }
                            let dims = Dims {
                                t,
                                s,
                                ..Dims::square(8, 2, 0, d)
                            };
                            let call = Call {
                                window,
                                ..Call::causal(dims).with_score(of_keys.clone())
                            };
                            check(target, &call, manner, s as u64, report)?;
                        }
                    }
                    Ok(())
                },
            ));
        }
    }
    tests.push(test(
        "decoding_in_f16_equals_reference",
        |target, report| {
            for d in [40, 64, 128, 256] {
                for (_, score, manner) in families(8, d, DType::F16) {
                    for (t, s) in [(1, 1025), (7, 300)] {
                        let dims = Dims {
                            b: 2,
                            t,
                            s,
                            ..Dims::square(8, 2, 0, d)
                        };
                        check(
                            target,
                            &Call::causal(dims).with_score(score.clone()),
                            manner,
                            3,
                            report,
                        )?;
                    }
                }
            }
            Ok(())
        },
    ));
    tests
}

/// Scores that rise, fall or jump from key to key, and rows that are hard in other ways.
fn hard_scores() -> Vec<Test> {
    let mut tests = Vec::new();
    for (name, index) in [
        ("dot", 0),
        ("bias", 1),
        ("phase_precise", 2),
        ("phase_fast", 3),
    ] {
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            tests.push(test(
                format!("hard_scores_{name}_{dtype:?}"),
                move |target, report| {
                    for fill in [Fill::Correlated, Fill::Negative, Fill::Huge] {
                        for scale in [None, Some(-0.3), Some(0.), Some(2.)] {
                            for (t, s) in [(130, 130), (3, 200)] {
                                let dims = Dims {
                                    t,
                                    s,
                                    ..Dims::square(2, 1, 0, 64)
                                };
                                let (_, score, manner) = families(2, 64, dtype).swap_remove(index);
                                let call = Call {
                                    scale,
                                    ..Call::causal(dims).with_score(score)
                                };
                                let inputs = Inputs::new(dims, fill, 50, dtype);
                                target.check(&call, &inputs, manner, report)?;
                            }
                        }
                    }
                    Ok(())
                },
            ));
            tests.push(test(
                format!("moving_maxima_{name}_{dtype:?}"),
                move |target, report| {
                    for course in COURSES {
                        for (t, s) in [(300, 300), (17, 1000), (2, 1000)] {
                            for d in [64, 128] {
                                let dims = Dims {
                                    t,
                                    s,
                                    ..Dims::square(2, 1, 0, d)
                                };
                                let (_, score, manner) = families(2, d, dtype).swap_remove(index);
                                for causal in [true, false] {
                                    let call = Call {
                                        causal,
                                        scale: Some(1.),
                                        ..Call::new(dims).with_score(score.clone())
                                    };
                                    let inputs = course.inputs(dims, dtype);
                                    target.check(&call, &inputs, manner, report)?;
                                }
                            }
                        }
                    }
                    Ok(())
                },
            ));
        }
    }
    tests
}

/// How the score moves with the key's index, in natural units.
#[derive(Debug, Clone, Copy)]
pub enum Course {
    /// By so much a key.
    Slope(f64),
    /// Up by so much at every so many keys.
    Steps(f64, usize),
    /// 0, but at every so many keys this.
    Spikes(f64, usize),
}

/// Kernels that rescale only beyond a threshold of 8 binary orders are led along it, above and below.
pub const COURSES: [Course; 9] = [
    Course::Slope(0.25),
    Course::Slope(-0.25),
    Course::Slope(0.02),
    Course::Steps(5.5, 16),
    Course::Steps(5.6, 32),
    Course::Steps(2., 64),
    Course::Steps(60., 128),
    Course::Spikes(60., 90),
    Course::Spikes(-60., 3),
];

impl Course {
    fn score(self, j: usize) -> f64 {
        match self {
            Self::Slope(by) => by * j as f64,
            Self::Steps(by, keys) => by * (j / keys) as f64,
            Self::Spikes(height, keys) => match j % keys {
                0 => height,
                _ => 0.,
            },
        }
    }

    /// Small normal content beside a first column whose product is the course; the phase's columns are so small that
    /// its cosine stays near 1.
    pub fn inputs(self, dims: Dims, dtype: DType) -> Inputs {
        let normal = Inputs::new(dims, Fill::Normal, 60, dtype);
        let round = |x: f64| crate::reference::round_to(dtype, x);
        let small = |(i, x): (usize, &f64)| match i % dims.d {
            c if c < dims.d / 2 => round(x * 0.2),
            _ => round(x * 0.02),
        };
        let mut q: Vec<f64> = normal.q.iter().enumerate().map(small).collect();
        let mut k: Vec<f64> = normal.k.iter().enumerate().map(small).collect();
        q.iter_mut().step_by(dims.d).for_each(|x| *x = 1.);
        for (key, x) in k.iter_mut().step_by(dims.d).enumerate() {
            *x = round(self.score(key % dims.s.max(1)));
        }
        Inputs { q, k, ..normal }
    }
}
