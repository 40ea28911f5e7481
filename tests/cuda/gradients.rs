//! Gradients of tracked tensors on the GPU, held to the reference: every score, mask, width, grouping, storage and
//! placing of tokens, over lengths around the tiles' edges, and what must hold of them whatever the numbers are.

use crate::reference::{
    accumulator, linear_bias, unit_roundoff, values, Call, Dims, Fill, Inputs, Rows, STORAGES,
};
use crate::report::Report;
use crate::shapes::{consecutive, families, phase, placed, placing, Course, COURSES, HALVES};
use crate::target::{describe, spec, Expected, Gradients, Manner, Target, ALL};
use crate::{test, Test};
use candle_core::{DType, Result, Tensor, Var};
use candle_posenc::{attend, attend_with_lse, AttendSpec, Score};

pub fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    tests.extend(lengths());
    tests.extend(unequal_lengths());
    tests.extend(widths());
    tests.extend(groups());
    tests.extend(placings());
    tests.extend(storages());
    tests.extend(exact_dtypes());
    tests.extend(hard_content());
    tests.extend(padding());
    tests.extend(invariants());
    tests.extend(tracking());
    tests.push(test("gradients_by_tiles_of_smaller_gpus", smaller_gpus));
    tests
}

/// Kernels with less shared memory than this GPU has.
fn smaller_gpus(target: &Target, report: &mut Report) -> Result<()> {
    target.as_on((8, 6), || {
        for dtype in HALVES {
            for (t, s, d, e) in [(150, 200, 128, 128), (90, 70, 128, 256), (70, 70, 256, 256)] {
                for (_, score, manners) in scores(4, d, dtype) {
                    let dims = Dims {
                        t,
                        s,
                        e,
                        ..Dims::square(4, 2, 0, d)
                    };
                    let call = Call::causal(dims).with_score(score);
                    check(target, &call, &manners, 92, report)?;
                }
            }
        }
        Ok(())
    })
}

const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

/// A score by its kernels' name, and the manners in which it is asked for.
type Family = (&'static str, Score, Vec<Manner>);

/// As [`families`], the phase once with both precisions: their reference is the same.
fn scores(h: usize, d: usize, dtype: DType) -> Vec<Family> {
    let mut scores: Vec<Family> = Vec::new();
    for (name, score, manner) in families(h, d, dtype) {
        match scores.last_mut() {
            Some((last, _, manners)) if *last == "phase" => manners.push(manner),
            _ => {
                let name = name.split('_').next().unwrap_or(name);
                scores.push((name, score, vec![manner]));
            }
        }
    }
    scores
}

/// Holds a call with fresh content to the reference in every manner.
fn check_in(
    target: &Target,
    call: &Call,
    manners: &[Manner],
    inputs: &Inputs,
    report: &mut Report,
) -> Result<()> {
    let Some(first) = manners.first() else {
        return Ok(());
    };
    let expected = Expected::with_gradients(call, inputs, first.dtype);
    for manner in manners {
        let got = target.gradients(call, inputs, *manner, ALL, report)?;
        expected.hold_gradients(&describe(call, *manner), &got, report);
    }
    Ok(())
}

fn check(
    target: &Target,
    call: &Call,
    manners: &[Manner],
    seed: u64,
    report: &mut Report,
) -> Result<()> {
    let Some(first) = manners.first() else {
        return Ok(());
    };
    let inputs = Inputs::new(call.dims, Fill::Normal, seed, first.dtype);
    check_in(target, call, manners, &inputs, report)
}

const LENGTHS: [usize; 12] = [1, 2, 17, 31, 33, 63, 64, 65, 127, 129, 257, 1000];

fn lengths() -> Vec<Test> {
    let mut tests = Vec::new();
    for (d, dtype) in [
        (64, DType::BF16),
        (128, DType::BF16),
        (64, DType::F16),
        (128, DType::F16),
    ] {
        for (name, score, manners) in scores(2, d, dtype) {
            tests.push(test(
                format!("gradients_of_lengths_around_tiles_{name}_d{d}_{dtype:?}"),
                move |target, report| {
                    for (i, n) in LENGTHS.into_iter().enumerate() {
                        for (causal, window) in [
                            (true, None),
                            (false, None),
                            (true, Some(33)),
                            (false, Some(70)),
                        ] {
                            if n == 1000 && window.is_none() && (!causal || dtype == DType::F16) {
                                continue; // the reference takes long
                            }
                            let call = Call {
                                causal,
                                window,
                                ..Call::new(Dims::square(2, 1, n, d)).with_score(score.clone())
                            };
                            check(target, &call, &manners, i as u64, report)?;
                        }
                    }
                    Ok(())
                },
            ));
        }
    }
    // Many tiles of queries and of keys.
    for (name, score, manners) in scores(1, 64, DType::BF16) {
        tests.push(test(
            format!("gradients_of_4096_tokens_{name}"),
            move |target, report| {
                let n = if target.is_gpu() { 4096 } else { 300 };
                let call = Call::causal(Dims::square(1, 1, n, 64)).with_score(score.clone());
                check(target, &call, &manners, 1, report)
            },
        ));
    }
    tests
}

/// Queries and keys of different numbers, by default alignment and at starts of either parity.
fn unequal_lengths() -> Vec<Test> {
    let mut tests = Vec::new();
    for d in [64, 128] {
        for (name, score, manners) in scores(2, d, DType::BF16) {
            tests.push(test(
                format!("gradients_of_unequal_lengths_and_starts_{name}_d{d}"),
                move |target, report| {
                    for (i, (t, s)) in [
                        (1, 64),
                        (64, 1),
                        (2, 257),
                        (17, 300),
                        (300, 17),
                        (31, 1000),
                        (1000, 33),
                        (63, 191),
                        (129, 64),
                        (65, 66),
                        (127, 129),
                    ]
                    .into_iter()
                    .enumerate()
                    {
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
                            check(target, &call, &manners, i as u64, report)?;
                            if window.is_some() && t * s > 20_000 {
                                continue;
                            }
                            for (q, k) in [(1000, 901), (31, 0), (0, 64), (123_457, 123_456)] {
                                let placed = call
                                    .clone()
                                    .with_positions(consecutive(q, t), consecutive(k, s));
                                let mut ways: Vec<Manner> =
                                    manners.iter().map(|manner| manner.spans()).collect();
                                if q == 31 {
                                    ways.extend(&manners);
                                }
                                check(target, &placed, &ways, i as u64, report)?;
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

/// Widths of heads, of values and of the phase's parts.
fn widths() -> Vec<Test> {
    let mut tests = Vec::new();
    let of_widths = |name: &str, widths: Vec<(usize, usize)>, dtypes: &[DType]| {
        let mut tests = Vec::new();
        for dtype in dtypes.iter().copied() {
            let widths = widths.clone();
            tests.push(test(
                format!("gradients_of_{name}_{dtype:?}"),
                move |target, report| {
                    for (d, e) in widths.iter().copied() {
                        for (_, score, manners) in scores(2, d, dtype) {
                            for (t, s) in [(70, 70), (33, 100), (3, 90)] {
                                let dims = Dims {
                                    t,
                                    s,
                                    e,
                                    ..Dims::square(2, 1, 0, d)
                                };
                                let call = Call::causal(dims).with_score(score.clone());
                                check(target, &call, &manners, (d + e) as u64, report)?;
                            }
                        }
                    }
                    Ok(())
                },
            ));
        }
        tests
    };
    for d in [8, 16, 24, 40, 64, 72, 80, 96, 104, 128, 136, 160, 192, 256] {
        tests.extend(of_widths(&format!("width_{d}"), vec![(d, d)], &HALVES));
    }
    let odd = [1, 2, 3, 7, 20, 33, 100, 130, 255].map(|d| (d, d)).to_vec();
    tests.extend(of_widths(
        "odd_widths",
        odd,
        &[DType::BF16, DType::F16, DType::F32],
    ));
    let twice = [8, 16, 24, 40, 64, 80, 96, 104, 128, 160, 256].map(|d| (d, 2 * d));
    tests.extend(of_widths("values_twice_the_head", twice.to_vec(), &HALVES));
    let other = vec![
        (64, 8),
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
    ];
    tests.extend(of_widths("values_of_other_widths", other, &HALVES));
    for dtype in HALVES {
        tests.push(test(
            format!("gradients_of_amplitude_widths_{dtype:?}"),
            move |target, report| {
                for (d, amp_dim) in [
                    (64, 16),
                    (64, 48),
                    (96, 48),
                    (96, 32),
                    (128, 32),
                    (128, 112),
                    (16, 8),
                    (24, 16),
                    (64, 8),
                    (64, 56),
                    (128, 120),
                    (40, 24),
                    (64, 1),
                    (64, 33),
                    (128, 77),
                    (96, 44),
                    (256, 100),
                    (192, 144),
                ] {
                    for alpha in [0.1, 0.5] {
                        let score = Score::Phase {
                            amp_dim,
                            alpha,
                            phase_scale: None,
                        };
                        let dims = Dims::square(2, 1, 100, d);
                        let call = Call::causal(dims).with_score(score);
                        let manners = [Manner::of(dtype), Manner::of(dtype).fast()];
                        check(target, &call, &manners, (d + amp_dim) as u64, report)?;
                    }
                }
                Ok(())
            },
        ));
    }
    tests
}

fn groups() -> Vec<Test> {
    let mut tests = Vec::new();
    for d in [64, 128] {
        for (name, score_of, manners) in scores(24, d, DType::BF16) {
            tests.push(test(
                format!("gradients_of_grouped_heads_{name}_d{d}"),
                move |target, report| {
                    for (i, (h, g)) in [(6, 2), (7, 1), (8, 1), (3, 3), (16, 2)]
                        .into_iter()
                        .enumerate()
                    {
                        for (t, s) in [(65, 65), (130, 70), (5, 300), (1, 257)] {
                            let dims = Dims {
                                b: 2,
                                t,
                                s,
                                ..Dims::square(h, g, 0, d)
                            };
                            let score = match &score_of {
                                Score::LinearBias { .. } => linear_bias(h),
                                other => other.clone(),
                            };
                            let call = Call::causal(dims).with_score(score);
                            check(target, &call, &manners, 100 + i as u64, report)?;
                        }
                    }
                    Ok(())
                },
            ));
        }
    }
    tests
}

fn placings() -> Vec<Test> {
    let mut tests = Vec::new();
    for (which, (name, _, _)) in placing(130).into_iter().enumerate() {
        for dtype in [DType::BF16, DType::F32] {
            tests.push(test(
                format!(
                    "gradients_of_positions_{}_{dtype:?}",
                    name.replace([' ', ','], "_")
                ),
                move |target, report| {
                    for (d, t) in [(64, 130), (128, 100), (20, 75)] {
                        if dtype == DType::F32 && d == 128 {
                            continue;
                        }
                        let (_, positions, segments) = placing(t).swap_remove(which);
                        let dims = Dims {
                            b: 3,
                            ..Dims::square(4, 2, t, d)
                        };
                        for (_, score, manners) in scores(4, d, dtype) {
                            for call in placed(dims, &score, &positions, &segments) {
                                check(target, &call, &manners, which as u64, report)?;
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
            format!("gradients_of_strided_and_misaligned_operands_{dtype:?}"),
            move |target, report| {
                for (t, s, d, e) in [
                    (70, 70, 64, 64),
                    (3, 70, 64, 64),
                    (70, 70, 64, 128),
                    (40, 70, 128, 128),
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
                        let plain = target.check_gradients(&call, &inputs, manner, report)?;
                        for i in 0..STORAGES.len() {
                            let storages =
                                [0, 1, 3].map(|shift| STORAGES[(i + shift) % STORAGES.len()]);
                            let manner = manner.stored(storages);
                            let stored = target.gradients(&call, &inputs, manner, ALL, report)?;
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
        for (i, name) in ["dot", "bias", "phase"].into_iter().enumerate() {
            tests.push(test(
                format!("gradients_of_dtype_{dtype:?}_{name}"),
                move |target, report| {
                    for (h, g, t, s, d, e) in [
                        (2, 1, 1, 1, 8, 8),
                        (2, 1, 65, 65, 64, 64),
                        (6, 2, 129, 129, 128, 256),
                        (7, 1, 31, 257, 40, 24),
                        (1, 1, 300, 33, 16, 16),
                        (2, 2, 77, 77, 256, 256),
                    ] {
                        let (_, score, manners) = scores(h, d, dtype).swap_remove(i);
                        for (causal, window) in [(true, None), (false, Some(50))] {
                            let dims = Dims {
                                b: 1,
                                h,
                                g,
                                t,
                                s,
                                d,
                                e,
                            };
                            let call = Call {
                                causal,
                                window,
                                ..Call::new(dims).with_score(score.clone())
                            };
                            check(target, &call, &manners, t as u64, report)?;
                        }
                    }
                    Ok(())
                },
            ));
        }
    }
    tests
}

/// Content that is hard on softmax and on what the backward pass subtracts.
fn hard_content() -> Vec<Test> {
    let mut tests = Vec::new();
    for (index, name) in ["dot", "bias", "phase"].into_iter().enumerate() {
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            tests.push(test(
                format!("gradients_of_hard_scores_{name}_{dtype:?}"),
                move |target, report| {
                    for fill in [Fill::Correlated, Fill::Negative, Fill::Huge] {
                        if (fill, dtype, name) == (Fill::Huge, DType::F16, "phase") {
                            continue; // beyond 65,504 in any implementation
                        }
                        for scale in [None, Some(-0.3), Some(0.), Some(2.)] {
                            for (t, s) in [(130, 130), (33, 200), (3, 200)] {
                                let dims = Dims {
                                    t,
                                    s,
                                    ..Dims::square(2, 1, 0, 64)
                                };
                                let (_, score, manners) = scores(2, 64, dtype).swap_remove(index);
                                let call = Call {
                                    scale,
                                    ..Call::causal(dims).with_score(score)
                                };
                                let inputs = Inputs::new(dims, fill, 50, dtype);
                                check_in(target, &call, &manners, &inputs, report)?;
                            }
                        }
                    }
                    // Where dP hardly differs along a row, all of the gradient is in the difference.
                    for (d, n) in [(256, 70), (128, 70), (64, 150)] {
                        let dims = Dims {
                            b: 2,
                            ..Dims::square(2, 2, n, d)
                        };
                        let (_, score, manners) = scores(2, d, dtype).swap_remove(index);
                        let call = Call::causal(dims).with_score(score);
                        let mut inputs = Inputs::new(dims, Fill::Correlated, 51, dtype);
                        check_in(target, &call, &manners, &inputs, report)?;
                        inputs.v = alike(&inputs.v, d, dtype);
                        check_in(target, &call, &manners, &inputs, report)?;
                    }
                    Ok(())
                },
            ));
            tests.push(test(
                format!("gradients_of_moving_maxima_{name}_{dtype:?}"),
                move |target, report| {
                    for course in COURSES {
                        for (t, s) in [(150, 150), (17, 300)] {
                            let dims = Dims {
                                t,
                                s,
                                ..Dims::square(2, 1, 0, 64)
                            };
                            let (_, score, manners) = scores(2, 64, dtype).swap_remove(index);
                            for causal in [true, false] {
                                let call = Call {
                                    causal,
                                    scale: Some(1.),
                                    ..Call::new(dims).with_score(score.clone())
                                };
                                let inputs = Course::inputs(course, dims, dtype);
                                check_in(target, &call, &manners, &inputs, report)?;
                            }
                        }
                    }
                    Ok(())
                },
            ));
        }
    }
    tests.push(test(
        "gradients_of_infinitely_low_scores_equal_reference",
        |target, report| {
            for dtype in [DType::BF16, DType::F32] {
                let dims = Dims::square(1, 1, 200, 64);
                let steep = Call::causal(dims).with_score(Score::LinearBias {
                    slopes: vec![1e37].into(),
                });
                check(target, &steep, &[Manner::of(dtype)], 61, report)?;
            }
            Ok(())
        },
    ));
    tests
}

/// Values that are nearly the same in every token, far from 0.
fn alike(values: &[f64], width: usize, dtype: DType) -> Vec<f64> {
    let round = |x| crate::reference::round_to(dtype, x);
    let value = |(i, x): (usize, &f64)| round(8. + (i % width % 5) as f64 + x / 32.);
    values.iter().enumerate().map(value).collect()
}

/// NaN where nothing is seen: in padding, in queries without keys, in the gradients that arrive there.
fn padding() -> Vec<Test> {
    let mut tests = Vec::new();
    for dtype in DTYPES {
        tests.push(test(
            format!("gradients_beside_padding_of_nan_{dtype:?}"),
            move |target, report| {
                for (n, d, e) in [(9, 64, 64), (100, 64, 64), (90, 128, 256), (40, 20, 12)] {
                    let dims = Dims {
                        b: 2,
                        e,
                        ..Dims::square(4, 2, n, d)
                    };
                    let count = n as i64;
                    // Padding before the first row's tokens and amid the second's.
                    let places: Rows = vec![
                        (0..count).map(|i| i - 4).collect(),
                        (0..count)
                            .map(|i| if i % 7 == 3 { -1 } else { i })
                            .collect(),
                    ];
                    // And queries before any key of their document.
                    let documents: Rows =
                        vec![vec![0; n], (0..count).map(|i| i64::from(i >= 5)).collect()];
                    let of_queries: Rows = vec![
                        (0..count).map(|i| if i == 6 { 77 } else { 0 }).collect(),
                        documents[1].clone(),
                    ];
                    for (name, score, manner) in families(4, d, dtype) {
                        let mut call = Call::causal(dims)
                            .with_score(score)
                            .with_positions(places.clone(), places.clone());
                        call.segments = Some((of_queries.clone(), documents.clone()));
                        let clean = Inputs::new(dims, Fill::Normal, 17, dtype);
                        let want = target.check_gradients(&call, &clean, manner, report)?;
                        for poison in [f64::NAN, f64::INFINITY] {
                            let poisoned = poisoned(&call, &clean, poison);
                            let got = target.gradients(&call, &poisoned, manner, ALL, report)?;
                            report.check(got == want, || {
                                format!("{name} {dtype:?} of {n}: {poison} in padding shows")
                            });
                        }
                    }
                }
                Ok(())
            },
        ));
    }
    tests.push(test(
        "gradients_where_there_are_no_keys_are_zero",
        |target, report| {
            for dtype in [DType::F32, DType::BF16] {
                let q = Tensor::ones((1, 2, 5, 64), dtype, target.device())?;
                let k = Tensor::ones((1, 1, 3, 64), dtype, target.device())?.narrow(2, 0, 0)?;
                let q = Var::from_tensor(&q)?;
                let out = attend(&q, &k, &k, &AttendSpec::causal())?;
                let gradients = out.sum_all()?.backward()?;
                let zero = match gradients.get(&q) {
                    Some(gradient) => values(gradient)?.iter().all(|x| *x == 0.),
                    None => false,
                };
                report.check(zero, || format!("{dtype:?}: the gradient of q"));
            }
            Ok(())
        },
    ));
    tests.push(test(
        "gradients_where_nothing_is_seen_are_zero",
        |target, report| {
            for dtype in DTYPES {
                for n in [6, 150] {
                    let dims = Dims::square(2, 1, n, 64);
                    for (name, score, manner) in families(2, 64, dtype) {
                        let call = Call::new(dims)
                            .with_score(score)
                            .with_positions(consecutive(0, n), vec![vec![-1; n]]);
                        let inputs = Inputs::new(dims, Fill::Normal, 18, dtype);
                        let got = target.check_gradients(&call, &inputs, manner, report)?;
                        let zero = got.of.iter().flatten().flatten().all(|x| *x == 0.);
                        report.check(zero, || format!("{name} {dtype:?} of {n}"));
                    }
                }
            }
            Ok(())
        },
    ));
    tests
}

/// The same content but `poison` in every key that is padding, every query that sees nothing and the gradient there.
fn poisoned(call: &Call, clean: &Inputs, poison: f64) -> Inputs {
    let Dims {
        b,
        h,
        g,
        t,
        s,
        d,
        e,
    } = call.dims;
    let mut inputs = clean.clone();
    for row in 0..b {
        for i in (0..t).filter(|i| !(0..s).any(|j| call.sees(row, *i, j))) {
            for head in 0..h {
                let query = (row * h + head) * t + i;
                inputs.q[query * d..][..d].fill(poison);
                inputs.grad[query * e..][..e].fill(poison);
            }
        }
        for j in (0..s).filter(|j| call.places(row, 0, *j).1 < 0) {
            for group in 0..g {
                let key = (row * g + group) * s + j;
                inputs.k[key * d..][..d].fill(poison);
                inputs.v[key * e..][..e].fill(poison);
            }
        }
    }
    inputs
}

/// What holds of gradients whatever the numbers are.
fn invariants() -> Vec<Test> {
    vec![
        test("gradients_do_not_depend_on_where_positions_begin", shifted),
        test(
            "gradients_of_reordered_tokens_are_reordered",
            reordered_tokens,
        ),
        test("gradients_of_all_keys_together_vanish", common_shift),
        test(
            "gradients_through_the_phase_at_distance_zero_vanish",
            phase_at_distance_zero,
        ),
        test("gradients_are_linear_in_the_one_that_arrives", linear),
        test("gradients_of_equal_values_vanish", equal_values),
        test("gradients_of_each_row_equal_its_own_call", own_calls),
    ]
}

fn shifted(target: &Target, report: &mut Report) -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        for (n, d) in [(5, 64), (150, 64), (90, 128)] {
            let dims = Dims::square(2, 1, n, d);
            for (name, score, manner) in families(2, d, dtype) {
                let near = Call::causal(dims).with_score(score);
                let inputs = Inputs::new(dims, Fill::Normal, 45, dtype);
                let want = target.gradients(&near, &inputs, manner, ALL, report)?;
                for start in [1, 77, 1 << 24, 1 << 31, (1 << 52) - 300] {
                    let far = near
                        .clone()
                        .with_positions(consecutive(start, n), consecutive(start, n));
                    for manner in [manner, manner.spans()] {
                        let got = target.gradients(&far, &inputs, manner, ALL, report)?;
                        report.check(got == want, || {
                            format!("{name} {dtype:?} at {start} differs from the start")
                        });
                    }
                }
            }
        }
    }
    Ok(())
}

/// Rows `order` of heads of as many rows of `width` values.
fn reorder(x: &[f64], order: &[usize], width: usize) -> Vec<f64> {
    x.chunks(order.len() * width)
        .flat_map(|head| order.iter().flat_map(|i| &head[i * width..][..width]))
        .copied()
        .collect()
}

fn reordered_tokens(target: &Target, report: &mut Report) -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        for (t, s, d) in [(100, 130, 64), (65, 65, 128), (20, 30, 20)] {
            let dims = Dims {
                t,
                s,
                ..Dims::square(4, 2, 0, d)
            };
            let queries: Vec<usize> = (0..t).map(|i| (i * 37 + 3) % t).collect();
            let keys: Vec<usize> = (0..s).map(|j| (j * 41 + 7) % s).collect();
            let places = |order: &[usize], start: i64| -> Rows {
                vec![order.iter().map(|i| *i as i64 + start).collect()]
            };
            let back = |order: &[usize]| -> Vec<usize> {
                let mut back = vec![0; order.len()];
                for (at, i) in order.iter().enumerate() {
                    back[*i] = at;
                }
                back
            };
            for (_, score, manner) in families(4, d, dtype) {
                let call = Call {
                    window: Some(60),
                    ..Call::causal(dims).with_score(score)
                };
                let inputs = Inputs::new(dims, Fill::Normal, 46, dtype);
                let expected = Expected::with_gradients(&call, &inputs, dtype);
                let mixed = Inputs {
                    q: reorder(&inputs.q, &queries, d),
                    k: reorder(&inputs.k, &keys, d),
                    v: reorder(&inputs.v, &keys, d),
                    grad: reorder(&inputs.grad, &queries, d),
                };
                // As the default has it: the last query stands at the last key.
                let placed =
                    call.with_positions(places(&queries, (s - t) as i64), places(&keys, 0));
                let got = target.gradients(&placed, &mixed, manner, ALL, report)?;
                let orders = [back(&queries), back(&keys), back(&keys)];
                let mut of = got
                    .of
                    .iter()
                    .zip(orders)
                    .map(|(gradient, order)| gradient.as_ref().map(|x| reorder(x, &order, d)));
                let ordered = Gradients {
                    out: reorder(&got.out, &back(&queries), d),
                    of: [(); 3].map(|()| of.next().flatten()),
                };
                let what = format!("reordered {}", describe(&placed, manner));
                expected.hold_gradients(&what, &ordered, report);
            }
        }
    }
    Ok(())
}

/// The same added to every key moves all of a row's scores alike, where the score is a product: of the gradients of
/// scores, each row's sum is 0.
fn common_shift(target: &Target, report: &mut Report) -> Result<()> {
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        for (n, d) in [(64, 64), (150, 128), (33, 20)] {
            for causal in [true, false] {
                for score in [Score::Dot, linear_bias(2)] {
                    let dims = Dims {
                        b: 2,
                        ..Dims::square(2, 1, n, d)
                    };
                    let call = Call {
                        causal,
                        ..Call::new(dims).with_score(score)
                    };
                    let manner = Manner::of(dtype);
                    let inputs = Inputs::new(dims, Fill::Normal, 47, dtype);
                    let got = target.gradients(&call, &inputs, manner, ALL, report)?;
                    let Some(dk) = &got.of[1] else { continue };
                    // Roundings of numbers that are stored, as many as keys and independent; and those within the sums.
                    let mass = call.exact(&inputs).dk.mass;
                    let (stored, summed) =
                        (unit_roundoff(dtype), unit_roundoff(accumulator(dtype)));
                    let size = |x: &[f64], c: usize| {
                        let squares = x.iter().skip(c).step_by(d).map(|x| x * x);
                        squares.sum::<f64>().sqrt()
                    };
                    for (group, (dk, mass)) in dk.chunks(n * d).zip(mass.chunks(n * d)).enumerate()
                    {
                        for column in 0..d {
                            let sum: f64 = dk.iter().skip(column).step_by(d).sum();
                            let allowed =
                                16. * (stored * size(dk, column) + summed * size(mass, column));
                            report.compare(
                                format!("group {group} of {}", describe(&call, manner)),
                                sum.abs(),
                                allowed,
                            );
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

/// At distance 0 there is no phase, whatever its columns are.
fn phase_at_distance_zero(target: &Target, report: &mut Report) -> Result<()> {
    for dtype in DTYPES {
        for (t, s, d) in [(2, 50, 64), (70, 70, 64), (70, 90, 128), (30, 30, 20)] {
            let dims = Dims {
                t,
                s,
                ..Dims::square(2, 1, 0, d)
            };
            let call = Call::new(dims)
                .with_score(phase(d / 2))
                .with_positions(vec![vec![7; t]], vec![vec![7; s]]);
            let inputs = Inputs::new(dims, Fill::Normal, 42, dtype);
            for manner in [Manner::of(dtype), Manner::of(dtype).fast()] {
                let got = target.check_gradients(&call, &inputs, manner, report)?;
                for (which, name) in ["dq", "dk"].into_iter().enumerate() {
                    let Some(gradient) = &got.of[which] else {
                        continue;
                    };
                    let zero = gradient
                        .chunks(d)
                        .all(|row| row[d / 2..].iter().all(|x| *x == 0.));
                    report.check(zero, || {
                        format!("{name} of the phase's columns, {}", describe(&call, manner))
                    });
                }
            }
        }
    }
    Ok(())
}

/// Twice the gradient that arrives gives twice the gradients, bit for bit, and none gives none.
fn linear(target: &Target, report: &mut Report) -> Result<()> {
    // f16 has too few exponents for it.
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        for (t, s, d, e) in [
            (70, 90, 64, 64),
            (130, 130, 128, 128),
            (33, 33, 64, 128),
            (9, 30, 20, 12),
        ] {
            let dims = Dims {
                t,
                s,
                e,
                ..Dims::square(4, 2, 0, d)
            };
            for (name, score, manner) in families(4, d, dtype) {
                let call = Call::causal(dims).with_score(score);
                let inputs = Inputs::new(dims, Fill::Normal, 48, dtype);
                let once = target.gradients(&call, &inputs, manner, ALL, report)?;
                for factor in [0., 2., -0.25] {
                    let other = Inputs {
                        grad: inputs.grad.iter().map(|x| factor * x).collect(),
                        ..inputs.clone()
                    };
                    let got = target.gradients(&call, &other, manner, ALL, report)?;
                    for (got, once) in got.of.iter().zip(&once.of) {
                        let (Some(got), Some(once)) = (got, once) else {
                            continue;
                        };
                        let equal = got
                            .iter()
                            .zip(once)
                            .all(|(got, once)| *got == factor * once);
                        report.check(equal, || format!("{name} {dtype:?} times {factor}"));
                    }
                }
            }
        }
    }
    Ok(())
}

/// Where all values are the same no weight matters.
fn equal_values(target: &Target, report: &mut Report) -> Result<()> {
    for dtype in DTYPES {
        for (n, d) in [(70, 64), (150, 128), (20, 20)] {
            let dims = Dims::square(2, 1, n, d);
            for (_, score, manner) in families(2, d, dtype) {
                let call = Call::causal(dims).with_score(score);
                let mut inputs = Inputs::new(dims, Fill::Normal, 49, dtype);
                for (i, v) in inputs.v.iter_mut().enumerate() {
                    *v = [1., -2., 0.5][i % d % 3];
                }
                target.check_gradients(&call, &inputs, manner, report)?;
            }
        }
    }
    Ok(())
}

/// Rows of a batch do not see each other.
fn own_calls(target: &Target, report: &mut Report) -> Result<()> {
    for dtype in [DType::BF16, DType::F32] {
        for (t, s, d) in [(70, 90, 64), (65, 65, 128), (30, 30, 20)] {
            let dims = Dims {
                b: 3,
                t,
                s,
                ..Dims::square(4, 2, 0, d)
            };
            for (name, score, manner) in families(4, d, dtype) {
                let call = Call::causal(dims).with_score(score);
                let inputs = Inputs::new(dims, Fill::Normal, 52, dtype);
                let all = target.gradients(&call, &inputs, manner, ALL, report)?;
                for row in 0..dims.b {
                    let part = |x: &[f64]| -> Vec<f64> {
                        let len = x.len() / dims.b;
                        x[row * len..][..len].to_vec()
                    };
                    let own = Inputs {
                        q: part(&inputs.q),
                        k: part(&inputs.k),
                        v: part(&inputs.v),
                        grad: part(&inputs.grad),
                    };
                    let mut call = call.clone();
                    call.dims.b = 1;
                    let alone = target.gradients(&call, &own, manner, ALL, report)?;
                    let equal = (all.of.iter().zip(&alone.of))
                        .all(|(all, alone)| all.as_ref().map(|x| part(x)) == *alone);
                    report.check(equal, || {
                        format!("{name} {dtype:?}: row {row} differs from its own call")
                    });
                }
            }
        }
    }
    Ok(())
}

fn tracking() -> Vec<Test> {
    vec![
        test(
            "gradients_of_some_operands_equal_those_of_all",
            |target, report| {
                for dtype in DTYPES {
                    for (t, s, d) in [(70, 70, 64), (5, 40, 64), (33, 50, 128), (9, 9, 20)] {
                        let dims = Dims {
                            t,
                            s,
                            ..Dims::square(4, 2, 0, d)
                        };
                        for (name, score, manner) in families(4, d, dtype) {
                            let call = Call::causal(dims).with_score(score);
                            let inputs = Inputs::new(dims, Fill::Normal, 82, dtype);
                            let all = target.gradients(&call, &inputs, manner, ALL, report)?;
                            for some in 1..7 {
                                let tracked = [0, 1, 2].map(|which| some >> which & 1 == 1);
                                let got =
                                    target.gradients(&call, &inputs, manner, tracked, report)?;
                                for which in 0..3 {
                                    let want = all.of[which].as_ref().filter(|_| tracked[which]);
                                    report.check(got.of[which].as_ref() == want, || {
                                        format!("{name} {dtype:?}: {tracked:?} differs at {which}")
                                    });
                                }
                            }
                        }
                    }
                }
                Ok(())
            },
        ),
        test(
            "gradients_of_one_tensor_in_three_roles_add_up",
            |target, report| {
                for dtype in [DType::F32, DType::BF16] {
                    let dims = Dims::square(2, 2, 70, 64);
                    for (name, score, manner) in families(2, 64, dtype) {
                        let call = Call::causal(dims).with_score(score);
                        let mut inputs = Inputs::new(dims, Fill::Normal, 83, dtype);
                        (inputs.k, inputs.v) = (inputs.q.clone(), inputs.q.clone());
                        let parts = target.gradients(&call, &inputs, manner, ALL, report)?;
                        let [x, _, _] = target.operands(&call, &inputs, manner)?;
                        let x = Var::from_tensor(&x)?;
                        let grad = crate::reference::tensor(&inputs.grad, dims.out(), dtype)?
                            .to_device(target.device())?;
                        let out = attend(&x, &x, &x, &spec(&call, manner)?)?;
                        let gradients = (out * grad)?.sum_all()?.backward()?;
                        let Some(sum) = gradients.get(&x) else {
                            report.fault(format!("{name} {dtype:?}: no gradient"));
                            continue;
                        };
                        let sum = values(sum)?;
                        let [Some(q), Some(k), Some(v)] = &parts.of else {
                            continue;
                        };
                        for (i, sum) in sum.into_iter().enumerate() {
                            // Two sums in this dtype, in one order or another.
                            let size = q[i].abs() + k[i].abs() + v[i].abs();
                            report.compare(
                                format!("{name} {dtype:?}[{i}]"),
                                (sum - (q[i] + k[i] + v[i])).abs(),
                                4. * unit_roundoff(dtype) * size,
                            );
                        }
                    }
                }
                Ok(())
            },
        ),
        test(
            "tracked_output_equals_untracked_bit_for_bit",
            |target, report| {
                for (t, s, d, e) in [(70, 70, 64, 64), (3, 200, 64, 64), (40, 40, 128, 256)] {
                    let dims = Dims {
                        t,
                        s,
                        e,
                        ..Dims::square(2, 1, 0, d)
                    };
                    for (name, score, manner) in families(2, d, DType::BF16) {
                        let call = Call::causal(dims).with_score(score);
                        let inputs = Inputs::new(dims, Fill::Normal, 81, DType::BF16);
                        let [q, k, v] = target.operands(&call, &inputs, manner)?;
                        let spec = spec(&call, manner)?;
                        let plain = attend_with_lse(&q, &k, &v, &spec)?;
                        let tracked =
                            attend_with_lse(Var::from_tensor(&q)?.as_tensor(), &k, &v, &spec)?;
                        let equal = values(&plain.out)? == values(&tracked.out)?
                            && values(&plain.lse)? == values(&tracked.lse)?;
                        report.check(equal, || format!("{name}: tracking changes the output"));
                        report.check(tracked.out.track_op() && !tracked.lse.track_op(), || {
                            format!("{name}: the output must be tracked, its log-sum-exp not")
                        });
                    }
                }
                Ok(())
            },
        ),
    ]
}
