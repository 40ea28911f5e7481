//! Properties of attention over random shapes, strides, positions, segments, windows, scales and contents, on
//! both paths.

mod reference;

use candle_core::DType;
use candle_posenc::{Backend, Score};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use reference::{
    run, run_stored, unit_roundoff, Call, Dims, Expected, Fill, Inputs, Rows, Run, Storage, Summed,
    BACKENDS, STORAGES,
};

/// A call, its contents and how they lie in memory.
#[derive(Clone, Debug)]
struct Case {
    call: Call,
    fill: Fill,
    seed: u64,
    storages: [Storage; 3],
}

impl Case {
    fn inputs(&self, dtype: DType) -> Inputs {
        Inputs::new(self.call.dims, self.fill, self.seed, dtype)
    }
}

/// Mostly a few tokens, sometimes enough for several tiles.
fn length() -> impl Strategy<Value = usize> {
    prop_oneof![8 => 0usize..10, 1 => 10usize..40, 1 => 60usize..70]
}

fn dims() -> impl Strategy<Value = Dims> {
    (
        1usize..4,
        1usize..4,
        1usize..4,
        length(),
        length(),
        2usize..10,
        1usize..12,
    )
        .prop_map(|(b, g, group, t, s, d, e)| Dims {
            b,
            h: g * group,
            g,
            t,
            s,
            d,
            e,
        })
}

fn score(dims: Dims) -> impl Strategy<Value = Score> {
    prop_oneof![
        Just(Score::Dot),
        vec(-0.5f64..2., dims.h).prop_map(|slopes| Score::LinearBias {
            slopes: slopes.into()
        }),
        (
            1..dims.d,
            prop_oneof![Just(0.1), 0.01f64..1.5],
            option::of(-2f64..2.)
        )
            .prop_map(|(amp_dim, alpha, phase_scale)| Score::Phase {
                amp_dim,
                alpha,
                phase_scale
            }),
    ]
}

/// One row of numbers, or one for each row of the batch.
fn rows(dims: Dims, len: usize, values: std::ops::Range<i64>) -> impl Strategy<Value = Rows> {
    prop_oneof![Just(1), Just(dims.b)]
        .prop_flat_map(move |rows| vec(vec(values.clone(), len), rows))
}

/// Positions unsorted and repeated, some of them padding, far from the start or near it.
fn positions(dims: Dims) -> impl Strategy<Value = (Rows, Rows)> {
    let starts = prop_oneof![Just(0i64), Just(0), Just(1 << 20), Just(1 << 40)];
    (
        rows(dims, dims.t, -4..24),
        rows(dims, dims.s, -4..24),
        starts,
    )
        .prop_map(|(q, k, start)| (shifted(&q, start), shifted(&k, start)))
}

/// The same positions `by` tokens on; padding stays padding.
fn shifted(rows: &Rows, by: i64) -> Rows {
    let shift = |p: &i64| if *p < 0 { *p } else { p + by };
    rows.iter()
        .map(|row| row.iter().map(shift).collect())
        .collect()
}

fn call() -> impl Strategy<Value = Call> {
    dims().prop_flat_map(|dims| {
        let scale =
            prop_oneof![3 => Just(None), 1 => Just(Some(0.)), 2 => (-2f64..2.).prop_map(Some)];
        (
            score(dims),
            scale,
            any::<bool>(),
            option::weighted(0.3, 1usize..14),
            option::weighted(0.6, positions(dims)),
            option::weighted(0.4, (rows(dims, dims.t, 0..3), rows(dims, dims.s, 0..3))),
        )
            .prop_map(move |(score, scale, causal, window, positions, segments)| {
                let mut call = Call {
                    dims,
                    score,
                    scale,
                    causal,
                    window,
                    positions,
                    segments: None,
                };
                // Segments lie beside positions, row for row.
                if let (Some((q, k)), Some((q_segments, k_segments))) = (&call.positions, segments)
                {
                    let fit = |segments: Rows, rows: &Rows| -> Rows {
                        segments.iter().cycle().take(rows.len()).cloned().collect()
                    };
                    call.segments = Some((fit(q_segments, q), fit(k_segments, k)));
                }
                call
            })
    })
}

fn storage() -> impl Strategy<Value = Storage> {
    (0..STORAGES.len()).prop_map(|i| STORAGES[i])
}

fn case() -> impl Strategy<Value = Case> {
    let fill = prop_oneof![
        3 => Just(Fill::Normal),
        1 => Just(Fill::Correlated),
        1 => Just(Fill::Negative),
        1 => Just(Fill::Huge),
    ];
    (
        call(),
        fill,
        any::<u64>(),
        [storage(), storage(), storage()],
    )
        .prop_map(|(call, fill, seed, storages)| Case {
            call,
            fill,
            seed,
            storages,
        })
}

/// Runs of consecutive positions, as padded rows and packed documents have them, with the run of each token.
fn runs(len: usize) -> impl Strategy<Value = (Vec<i64>, Vec<i64>)> {
    let starts = prop_oneof![
        3 => Just(Some(0i64)),
        2 => (0i64..300).prop_map(Some),
        1 => Just(None),
    ];
    vec((1usize..200, starts), 1..6).prop_map(move |runs| {
        let tokens = runs.iter().enumerate().flat_map(|(run, (len, start))| {
            (0..*len as i64).map(move |i| (start.map_or(-1, |start| start + i), run as i64))
        });
        // What is left over belongs to one more document, from position 0 on.
        let rest = (0..len as i64).map(|i| (i, runs.len() as i64));
        tokens.chain(rest).take(len).unzip()
    })
}

/// Calls of several tiles, or of few queries and thousands of keys.
fn long_case() -> impl Strategy<Value = Case> {
    let lengths = prop_oneof![
        2 => (1usize..220, 60usize..300),
        1 => (1usize..4, 2000usize..4200),
    ];
    (
        1usize..3,
        1usize..3,
        1usize..4,
        lengths,
        2usize..7,
        1usize..5,
    )
        .prop_flat_map(|(b, g, group, (t, s), d, e)| {
            let dims = Dims {
                b,
                h: g * group,
                g,
                t,
                s,
                d,
                e,
            };
            let rows = move |len| vec(runs(len), b);
            (
                score(dims),
                any::<bool>(),
                option::weighted(0.5, 1usize..150),
                option::weighted(0.7, (rows(t), rows(s), any::<bool>())),
                [storage(), storage(), storage()],
                any::<u64>(),
            )
                .prop_map(move |(score, causal, window, places, storages, seed)| {
                    let mut call = Call {
                        causal,
                        window,
                        ..Call::new(dims).with_score(score)
                    };
                    if let Some((q, k, segmented)) = places {
                        let ((q, q_runs), (k, k_runs)): ((Rows, Rows), (Rows, Rows)) =
                            (q.into_iter().unzip(), k.into_iter().unzip());
                        call = call.with_positions(q, k);
                        call.segments = segmented.then_some((q_runs, k_runs));
                    }
                    Case {
                        call,
                        fill: Fill::Normal,
                        seed,
                        storages,
                    }
                })
        })
}

/// The same cases on every run; `PROPTEST_RNG_SEED=7` draws others. The bounds are a judgement of how roundings add
/// up, not a proof, so among many thousands of other cases one may miss them by a little.
fn config(cases: u32) -> ProptestConfig {
    let default = ProptestConfig::default();
    ProptestConfig {
        cases,
        failure_persistence: None,
        rng_seed: match default.rng_seed {
            RngSeed::Random => RngSeed::Fixed(20_261_130),
            given => given,
        },
        ..default
    }
}

fn fault(error: candle_core::Error) -> TestCaseError {
    TestCaseError::fail(error.to_string())
}

fn run_f64(call: &Call, inputs: &Inputs, backend: Backend) -> Result<Run, TestCaseError> {
    run(call, inputs, DType::F64, backend).map_err(fault)
}

/// Two computations of one thing, each with its own roundings.
fn same(name: &str, one: &[f64], other: &[f64], exact: &Summed) -> Result<(), TestCaseError> {
    prop_assert_eq!(one.len(), other.len());
    for (i, (one, other)) in one.iter().zip(other).enumerate() {
        let bound = 2. * (exact.floor() + 2.) * unit_roundoff(DType::F64) * exact.mass[i];
        prop_assert!(
            one == other || (one - other).abs() <= bound,
            "{name}[{i}]: {one:e} and {other:e} differ by more than {bound:e}"
        );
    }
    Ok(())
}

fn same_run(one: &Run, other: &Run, call: &Call, inputs: &Inputs) -> Result<(), TestCaseError> {
    let exact = call.exact(inputs);
    same("out", &one.out, &other.out, &exact.out)?;
    same("lse", &one.lse, &other.lse, &exact.lse)?;
    same("dq", &one.dq, &other.dq, &exact.dq)?;
    same("dk", &one.dk, &other.dk, &exact.dk)?;
    same("dv", &one.dv, &other.dv, &exact.dv)
}

/// Both paths, stored as the case tells, against the reference.
fn holds(case: &Case, dtype: DType) -> Result<(), TestCaseError> {
    let inputs = case.inputs(dtype);
    let expected = Expected::of(&case.call, &inputs, dtype);
    for backend in BACKENDS {
        let run = run_stored(&case.call, &inputs, dtype, backend, case.storages).map_err(fault)?;
        if let Err(fault) = expected.agrees(&run) {
            return Err(TestCaseError::fail(format!("{backend:?}: {fault}")));
        }
    }
    Ok(())
}

/// The call with explicit positions for every row of the batch.
fn explicit(call: &Call) -> Call {
    let Dims { b, t, s, .. } = call.dims;
    let each = |rows: &Rows| -> Rows { rows.iter().cycle().take(b).cloned().collect() };
    let (q, k) = match &call.positions {
        Some((q, k)) => (each(q), each(k)),
        None => {
            let span = |len: usize, other: usize| {
                let start = other.saturating_sub(len) as i64;
                vec![(start..start + len as i64).collect(); b]
            };
            (span(t, s), span(s, t))
        }
    };
    Call {
        positions: Some((q, k)),
        segments: call.segments.as_ref().map(|(q, k)| (each(q), each(k))),
        ..call.clone()
    }
}

/// Tokens of (…, tokens, width) in another order, or fewer of them.
fn pick(x: &[f64], tokens: usize, width: usize, order: &[usize]) -> Vec<f64> {
    if tokens * width == 0 {
        return Vec::new();
    }
    x.chunks(tokens * width)
        .flat_map(|head| {
            order
                .iter()
                .flat_map(move |&j| head[j * width..(j + 1) * width].iter().copied())
        })
        .collect()
}

fn pick_rows(rows: &Rows, order: &[usize]) -> Rows {
    rows.iter()
        .map(|row| order.iter().map(|&j| row[j]).collect())
        .collect()
}

/// The call over the keys `order` alone, in that order.
fn with_keys(call: &Call, inputs: &Inputs, order: &[usize]) -> (Call, Inputs) {
    let Dims { s, d, e, .. } = call.dims;
    let mut call = explicit(call);
    call.dims.s = order.len();
    if let Some((_, k)) = &mut call.positions {
        *k = pick_rows(k, order);
    }
    if let Some((_, k)) = &mut call.segments {
        *k = pick_rows(k, order);
    }
    let inputs = Inputs {
        k: pick(&inputs.k, s, d, order),
        v: pick(&inputs.v, s, e, order),
        ..inputs.clone()
    };
    (call, inputs)
}

/// The call over the queries `order` alone, in that order.
fn with_queries(call: &Call, inputs: &Inputs, order: &[usize]) -> (Call, Inputs) {
    let Dims { t, d, e, .. } = call.dims;
    let mut call = explicit(call);
    call.dims.t = order.len();
    if let Some((q, _)) = &mut call.positions {
        *q = pick_rows(q, order);
    }
    if let Some((q, _)) = &mut call.segments {
        *q = pick_rows(q, order);
    }
    let inputs = Inputs {
        q: pick(&inputs.q, t, d, order),
        grad: pick(&inputs.grad, t, e, order),
        ..inputs.clone()
    };
    (call, inputs)
}

/// A random order of `0..n`.
fn order(n: usize, seed: u64) -> Vec<usize> {
    let mut keyed: Vec<(u64, usize)> = (0..n)
        .map(|i| {
            let mixed = (seed ^ (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15))
                .wrapping_mul(0xBF58_476D_1CE4_E5B9);
            (mixed ^ (mixed >> 29), i)
        })
        .collect();
    keyed.sort_unstable();
    keyed.into_iter().map(|(_, i)| i).collect()
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn any_call_in_f64_equals_reference(case in case()) {
        holds(&case, DType::F64)?;
    }

    #[test]
    fn any_call_in_f32_equals_reference(case in case()) {
        holds(&case, DType::F32)?;
    }
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn any_call_in_bf16_is_within_twice_an_unfused_error(case in case()) {
        holds(&case, DType::BF16)?;
    }

    #[test]
    fn any_call_in_f16_is_within_twice_an_unfused_error(case in case()) {
        // Gradients of huge scores leave f16's range.
        prop_assume!(case.fill != Fill::Huge);
        holds(&case, DType::F16)?;
    }

    #[test]
    fn any_storage_equals_contiguous_bit_for_bit(case in case()) {
        let inputs = case.inputs(DType::F32);
        for backend in BACKENDS {
            let plain = run(&case.call, &inputs, DType::F32, backend).map_err(fault)?;
            let stored = run_stored(&case.call, &inputs, DType::F32, backend, case.storages)
                .map_err(fault)?;
            prop_assert_eq!(plain, stored);
        }
    }

    #[test]
    fn merged_shards_of_the_keys_equal_one_call(case in case(), share in 0f64..=1., seed: u64) {
        let inputs = case.inputs(DType::F64);
        let Dims { s, e, .. } = case.call.dims;
        let all = order(s, seed);
        let cut = (share * s as f64) as usize;
        let exact = case.call.exact(&inputs);
        for backend in BACKENDS {
            let whole = run_f64(&case.call, &inputs, backend)?;
            let mut parts = Vec::new();
            for keys in [&all[..cut], &all[cut..]] {
                let (call, inputs) = with_keys(&case.call, &inputs, keys);
                parts.push(run_f64(&call, &inputs, backend)?);
            }
            let (one, other) = (&parts[0], &parts[1]);
            let (mut out, mut lse) = (Vec::new(), Vec::new());
            for (i, (a, b)) in one.lse.iter().zip(&other.lse).enumerate() {
                let max = a.max(*b);
                let shift = if max == f64::NEG_INFINITY { 0. } else { max };
                let (a, b) = ((a - shift).exp(), (b - shift).exp());
                lse.push(shift + (a + b).ln());
                for c in i * e..(i + 1) * e {
                    let sum = if a + b == 0. { 1. } else { a + b };
                    out.push((a * one.out[c] + b * other.out[c]) / sum);
                }
            }
            same("lse", &lse, &whole.lse, &exact.lse)?;
            same("out", &out, &whole.out, &exact.out)?;
        }
    }

    #[test]
    fn keys_in_another_order_with_their_positions_give_the_same(case in case(), seed: u64) {
        let inputs = case.inputs(DType::F64);
        let Dims { s, d, e, .. } = case.call.dims;
        let keys = order(s, seed);
        let (call, permuted) = with_keys(&case.call, &inputs, &keys);
        for backend in BACKENDS {
            let plain = run_f64(&case.call, &inputs, backend)?;
            let mut run = run_f64(&call, &permuted, backend)?;
            // Key gradients come in the new order: bring them back.
            let mut back = vec![0; s];
            for (at, key) in keys.iter().enumerate() {
                back[*key] = at;
            }
            run.dk = pick(&run.dk, s, d, &back);
            run.dv = pick(&run.dv, s, e, &back);
            same_run(&run, &plain, &case.call, &inputs)?;
        }
    }

    #[test]
    fn queries_of_separate_calls_give_the_same(case in case(), seed: u64, share in 0f64..=1.) {
        let inputs = case.inputs(DType::F64);
        let Dims { t, d, e, .. } = case.call.dims;
        let all = order(t, seed);
        let cut = (share * t as f64) as usize;
        let exact = case.call.exact(&inputs);
        for backend in BACKENDS {
            let whole = run_f64(&case.call, &inputs, backend)?;
            let (mut dk, mut dv) = (vec![0.; whole.dk.len()], vec![0.; whole.dv.len()]);
            for queries in [&all[..cut], &all[cut..]] {
                let (call, part) = with_queries(&case.call, &inputs, queries);
                let run = run_f64(&call, &part, backend)?;
                let own = |x: &Summed, width: usize| Summed {
                    mass: pick(&x.mass, t, width, queries),
                    ..Summed::default()
                };
                same("out", &run.out, &pick(&whole.out, t, e, queries), &own(&exact.out, e))?;
                same("lse", &run.lse, &pick(&whole.lse, t, 1, queries), &own(&exact.lse, 1))?;
                same("dq", &run.dq, &pick(&whole.dq, t, d, queries), &own(&exact.dq, d))?;
                dk.iter_mut().zip(&run.dk).for_each(|(sum, x)| *sum += x);
                dv.iter_mut().zip(&run.dv).for_each(|(sum, x)| *sum += x);
            }
            same("dk", &dk, &whole.dk, &exact.dk)?;
            same("dv", &dv, &whole.dv, &exact.dv)?;
        }
    }

    #[test]
    fn positions_shifted_by_a_constant_leave_every_bit(case in case(), by in 0i64..1 << 45) {
        let inputs = case.inputs(DType::F32);
        let near = explicit(&case.call);
        let mut far = near.clone();
        if let Some((q, k)) = &mut far.positions {
            (*q, *k) = (shifted(q, by), shifted(k, by));
        }
        for backend in BACKENDS {
            let near = run(&near, &inputs, DType::F32, backend).map_err(fault)?;
            let far = run(&far, &inputs, DType::F32, backend).map_err(fault)?;
            prop_assert_eq!(near, far);
        }
    }

    #[test]
    fn rows_of_a_batch_do_not_know_each_other(case in case(), row in 0usize..3) {
        let dims = case.call.dims;
        let b = row % dims.b;
        let inputs = case.inputs(DType::F64);
        let cut = |x: &[f64]| x[b * x.len() / dims.b..(b + 1) * x.len() / dims.b].to_vec();
        let call = explicit(&case.call);
        let one = |rows: &(Rows, Rows)| (vec![rows.0[b].clone()], vec![rows.1[b].clone()]);
        let alone = Call {
            dims: Dims { b: 1, ..dims },
            positions: call.positions.as_ref().map(one),
            segments: call.segments.as_ref().map(one),
            ..call
        };
        let own = Inputs {
            q: cut(&inputs.q),
            k: cut(&inputs.k),
            v: cut(&inputs.v),
            grad: cut(&inputs.grad),
        };
        for backend in BACKENDS {
            let whole = run_f64(&case.call, &inputs, backend)?;
            let part = Run {
                out: cut(&whole.out),
                lse: cut(&whole.lse),
                dq: cut(&whole.dq),
                dk: cut(&whole.dk),
                dv: cut(&whole.dv),
            };
            same_run(&part, &run_f64(&alone, &own, backend)?, &alone, &own)?;
        }
    }

    #[test]
    fn padding_of_nan_anywhere_among_the_keys_changes_nothing(case in case(), seed: u64, count in 1usize..9) {
        let inputs = case.inputs(DType::F64);
        let Dims { b, g, s, d, e, .. } = case.call.dims;
        // The new keys stand behind the others, then all are shuffled.
        let keys = order(s + count, seed);
        let mut longer = explicit(&case.call);
        longer.dims.s = s + count;
        for row in longer.positions.iter_mut().flat_map(|(_, k)| k) {
            row.extend((0..count as i64).map(|i| -1 - i));
        }
        for row in longer.segments.iter_mut().flat_map(|(_, k)| k) {
            row.extend(vec![0; count]);
        }
        let append = |x: &[f64], width: usize| -> Vec<f64> {
            (0..b * g)
                .flat_map(|head| {
                    let mut tokens = x[head * s * width..(head + 1) * s * width].to_vec();
                    tokens.extend(vec![f64::NAN; count * width]);
                    tokens
                })
                .collect()
        };
        let padded = Inputs {
            k: append(&inputs.k, d),
            v: append(&inputs.v, e),
            ..inputs.clone()
        };
        let (call, padded) = with_keys(&longer, &padded, &keys);
        let real: Vec<usize> = (0..s)
            .filter_map(|key| keys.iter().position(|k| *k == key))
            .collect();
        let padding: Vec<usize> = (0..s + count).filter(|at| keys[*at] >= s).collect();
        for backend in BACKENDS {
            let plain = run_f64(&case.call, &inputs, backend)?;
            let mut run = run_f64(&call, &padded, backend)?;
            prop_assert!(pick(&run.dk, s + count, d, &padding).iter().all(|x| *x == 0.));
            prop_assert!(pick(&run.dv, s + count, e, &padding).iter().all(|x| *x == 0.));
            run.dk = pick(&run.dk, s + count, d, &real);
            run.dv = pick(&run.dv, s + count, e, &real);
            same_run(&run, &plain, &case.call, &inputs)?;
        }
    }

    #[test]
    fn weights_are_positive_and_sum_to_one(case in case()) {
        // Output lies between the values, and values of one give one; a row's weights hand its gradient on whole.
        let mut inputs = case.inputs(DType::F64);
        inputs.v.fill(1.);
        let dims = case.call.dims;
        for backend in BACKENDS {
            let run = run_f64(&case.call, &inputs, backend)?;
            let mut handed_on = 0.;
            for (i, out) in run.out.iter().enumerate() {
                if run.lse[i / dims.e] == f64::NEG_INFINITY {
                    prop_assert_eq!(*out, 0.);
                } else {
                    prop_assert!((out - 1.).abs() < 1e-14, "{backend:?} {out}");
                    handed_on += inputs.grad[i];
                }
            }
            let received: f64 = run.dv.iter().sum();
            let all: f64 = 1. + inputs.grad.iter().map(|x| x.abs()).sum::<f64>();
            prop_assert!((received - handed_on).abs() < 1e-13 * all, "{received} {handed_on}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 64, ..config(40) })]

    #[test]
    fn any_call_of_several_tiles_equals_reference(case in long_case()) {
        holds(&case, DType::F32)?;
        holds(&case, DType::F64)?;
    }
}
