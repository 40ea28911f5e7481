//! Every kind of kernel on tiny shapes, once or twice: for compute-sanitizer, which slows kernels a hundredfold.

use crate::reference::{Call, Dims, Fill, Inputs, Rows};
use crate::shapes::{check, consecutive, families};
use crate::{test, Test};
use candle_core::DType;

pub fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for dtype in [DType::BF16, DType::F16, DType::F32, DType::F64] {
        for (i, name) in SCORES.into_iter().enumerate() {
            tests.push(test(
                format!("small_{name}_{dtype:?}"),
                move |target, report| {
                    let half = matches!(dtype, DType::BF16 | DType::F16);
                    // Each width that kernels are made for, filled and padded; wide values; then no tensor cores.
                    let shapes: &[(usize, usize)] = match half {
                        true => &[
                            (64, 64),
                            (40, 40),
                            (64, 128),
                            (96, 96),
                            (96, 192),
                            (128, 128),
                            (128, 256),
                            (104, 72),
                            (256, 256),
                            (20, 12),
                        ],
                        false => &[(64, 64), (20, 33)],
                    };
                    for &(d, e) in shapes {
                        for (t, s) in [(67, 67), (18, 83), (1, 70), (5, 300)] {
                            let (_, score, manner) = families(4, d, dtype).swap_remove(i);
                            let dims = Dims {
                                t,
                                s,
                                e,
                                ..Dims::square(4, 2, 0, d)
                            };
                            let call = Call::causal(dims).with_score(score);
                            check(target, &call, manner, 1, report)?;
                        }
                    }
                    // Positions from a list, with padding and segments; a window; no causality.
                    for t in [70, 3] {
                        let (_, score, manner) = families(2, 64, dtype).swap_remove(i);
                        let dims = Dims {
                            b: 2,
                            t,
                            s: 70,
                            ..Dims::square(2, 1, 0, 64)
                        };
                        let keys: Rows = vec![
                            (0..70).map(|i| i - 9).collect(),
                            (0..70)
                                .map(|i| if i % 6 == 1 { -1 } else { i % 31 })
                                .collect(),
                        ];
                        let documents: Rows = vec![vec![5; 70], (0..70).map(|i| i / 31).collect()];
                        let last = |rows: &Rows| -> Rows {
                            rows.iter().map(|row| row[70 - t..].to_vec()).collect()
                        };
                        let mut call = Call::causal(dims)
                            .with_score(score.clone())
                            .with_positions(last(&keys), keys.clone());
                        call.segments = Some((last(&documents), documents.clone()));
                        check(target, &call, manner, 2, report)?;
                        let call = Call {
                            window: Some(20),
                            ..Call::new(dims).with_score(score)
                        }
                        .with_positions(consecutive(1001 - t as i64, t), consecutive(930, 70));
                        check(target, &call, manner.spans(), 3, report)?;
                    }
                    Ok(())
                },
            ));
        }
    }
    tests.extend(gradients());
    tests.push(test(
        "small_gradients_by_tiles_of_smaller_gpus",
        |target, report| {
            target.as_on((8, 6), || {
                for dtype in [DType::BF16, DType::F16] {
                    for (i, _) in SCORES.into_iter().enumerate() {
                        for e in [128, 256] {
                            let (_, score, manner) = families(4, 128, dtype).swap_remove(i);
                            let dims = Dims {
                                e,
                                ..Dims::square(4, 2, 67, 128)
                            };
                            let call = Call::causal(dims).with_score(score);
                            let inputs = Inputs::new(dims, Fill::Normal, 6, dtype);
                            target.check_gradients(&call, &inputs, manner, report)?;
                        }
                    }
                }
                Ok(())
            })
        },
    ));
    tests
}

/// The scores, as [`families`] has them.
const SCORES: [&str; 4] = ["dot", "bias", "phase_precise", "phase_fast"];

/// Each backward kernel: filled and padded widths, wide values, grouped heads, partial tiles, positions from lists.
fn gradients() -> Vec<Test> {
    let mut tests = Vec::new();
    for dtype in [DType::BF16, DType::F16, DType::F32, DType::F64] {
        for (i, name) in SCORES.into_iter().enumerate() {
            tests.push(test(
                format!("small_gradients_{name}_{dtype:?}"),
                move |target, report| {
                    let half = matches!(dtype, DType::BF16 | DType::F16);
                    let shapes: &[(usize, usize)] = match half {
                        true => &[
                            (64, 64),
                            (40, 40),
                            (64, 128),
                            (128, 128),
                            (128, 256),
                            (104, 72),
                            (256, 256),
                            (20, 12),
                        ],
                        false => &[(64, 64), (20, 33)],
                    };
                    for &(d, e) in shapes {
                        for (t, s) in [(67, 67), (18, 83), (1, 70)] {
                            let (_, score, manner) = families(4, d, dtype).swap_remove(i);
                            let dims = Dims {
                                t,
                                s,
                                e,
                                ..Dims::square(4, 2, 0, d)
                            };
                            let call = Call::causal(dims).with_score(score);
                            let inputs = Inputs::new(dims, Fill::Normal, 4, dtype);
                            target.check_gradients(&call, &inputs, manner, report)?;
                        }
                    }
                    let (_, score, manner) = families(2, 64, dtype).swap_remove(i);
                    let dims = Dims {
                        b: 2,
                        ..Dims::square(2, 1, 70, 64)
                    };
                    let places: Rows = vec![
                        (0..70).map(|i| i - 9).collect(),
                        (0..70)
                            .map(|i| if i % 6 == 1 { -1 } else { i % 31 })
                            .collect(),
                    ];
                    let documents: Rows = vec![vec![5; 70], (0..70).map(|i| i / 31).collect()];
                    let mut call = Call::causal(dims)
                        .with_score(score.clone())
                        .with_positions(places.clone(), places);
                    call.segments = Some((documents.clone(), documents));
                    let inputs = Inputs::new(dims, Fill::Normal, 5, dtype);
                    target.check_gradients(&call, &inputs, manner, report)?;
                    let call = Call {
                        window: Some(20),
                        ..Call::new(dims).with_score(score)
                    }
                    .with_positions(consecutive(931, 70), consecutive(930, 70));
                    target.check_gradients(&call, &inputs, manner.spans(), report)?;
                    Ok(())
                },
            ));
        }
    }
    tests
}
