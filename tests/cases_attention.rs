//! Faults that users of other attention libraries met, each turned into a small test on both paths. The
//! suffix of a name is the fault's number in our catalogue; values are held to `reference`.

mod reference;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_posenc::{attend, attend_with_lse, AttendSpec, Backend, Positions, Score};
use reference::{
    check, linear_bias, round_to, run, run_stored, scores, tensor, values, var, Call, Dims,
    Expected, Fill, Inputs, Rows, Run, Storage, BACKENDS, STORAGES,
};

const CPU: Device = Device::Cpu;

fn ids(range: std::ops::Range<i64>) -> Rows {
    vec![range.collect()]
}

/// `run` of the call, held to the reference.
fn checked_run(call: &Call, inputs: &Inputs, dtype: DType, backend: Backend) -> Result<Run> {
    let run = run(call, inputs, dtype, backend)?;
    if let Err(fault) = Expected::of(call, inputs, dtype).agrees(&run) {
        panic!("{backend:?} {dtype:?} {call:?}\n{fault}")
    }
    Ok(run)
}

/// The rows `from..to` of heads of `rows` tokens of `width` values each.
fn tokens(x: &[f64], rows: usize, width: usize, from: usize, to: usize) -> Vec<f64> {
    x.chunks(rows * width)
        .flat_map(|head| head[from * width..to * width].to_vec())
        .collect()
}

/// Values and log-sum-exp of a call, on one path.
fn forward(call: &Call, inputs: &Inputs, dtype: DType, backend: Backend) -> Result<[Vec<f64>; 2]> {
    let result = attend_with_lse(
        &tensor(&inputs.q, call.dims.q(), dtype)?,
        &tensor(&inputs.k, call.dims.k(), dtype)?,
        &tensor(&inputs.v, call.dims.v(), dtype)?,
        &call.spec(backend)?,
    )?;
    Ok([values(&result.out)?, values(&result.lse)?])
}

fn assert_close(name: &str, got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{name}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(
            got == want || (got - want).abs() <= tolerance * (1. + want.abs()),
            "{name}[{i}] = {got}, should be {want}"
        );
    }
}

/// Values that show the weights: key j's value is the j-th unit vector.
fn unit_values(s: usize) -> Vec<f64> {
    (0..s * s).map(|i| f64::from(i % (s + 1) == 0)).collect()
}

/// Weights of queries that score all keys alike: 1/n for each of the n keys they see.
fn uniform_weights(call: Call, dtype: DType, backend: Backend) -> Result<Vec<Vec<f64>>> {
    let s = call.dims.s;
    let dims = Dims {
        b: 1,
        h: 1,
        g: 1,
        e: s,
        ..call.dims
    };
    let call = Call { dims, ..call };
    let inputs = Inputs {
        q: vec![0.; dims.t * dims.d],
        v: unit_values(s),
        ..Inputs::normal(dims, 1)
    };
    let [out, _] = forward(&call, &inputs, dtype, backend)?;
    Ok(out.chunks(s).map(<[f64]>::to_vec).collect())
}

/// Which keys each query sees, read off its weights.
fn seen(call: Call, backend: Backend) -> Result<Vec<String>> {
    let weights = uniform_weights(call, DType::F64, backend)?;
    Ok(weights
        .iter()
        .map(|row| {
            let n = row.iter().filter(|w| **w != 0.).count() as f64;
            assert!(row.iter().all(|w| *w == 0. || (w * n - 1.).abs() < 1e-14));
            row.iter()
                .map(|w| if *w == 0. { '0' } else { '1' })
                .collect()
        })
        .collect())
}

// ---- Which keys a query sees -------------------------------------------------------------------------------

#[test]
fn causal_alignment_when_q_shorter_than_k_is_bottom_right_k1() -> Result<()> {
    let dims = Dims {
        t: 2,
        s: 5,
        ..Dims::square(1, 1, 0, 4)
    };
    for backend in BACKENDS {
        assert_eq!(seen(Call::causal(dims), backend)?, ["11110", "11111"]);
    }
    Ok(())
}

#[test]
fn causal_alignment_when_q_longer_than_k_is_bottom_right_k1() -> Result<()> {
    let dims = Dims {
        t: 5,
        s: 2,
        ..Dims::square(1, 1, 0, 4)
    };
    for backend in BACKENDS {
        assert_eq!(
            seen(Call::causal(dims), backend)?,
            ["00", "00", "00", "10", "11"]
        );
    }
    Ok(())
}

#[test]
fn causal_alignment_for_any_batch_score_and_path_equals_reference_k1() -> Result<()> {
    for (t, s) in [(2, 5), (5, 2), (1, 7), (7, 1), (64, 67), (67, 64), (70, 3)] {
        for b in [1, 2] {
            for score in scores(4, 6) {
                let dims = Dims {
                    b,
                    t,
                    s,
                    e: 5,
                    ..Dims::square(4, 2, 0, 6)
                };
                let call = Call::causal(dims).with_score(score);
                check(&call, &Inputs::normal(dims, 2), DType::F64)?;
                check(
                    &call,
                    &Inputs::new(dims, Fill::Normal, 2, DType::F32),
                    DType::F32,
                )?;
            }
        }
    }
    Ok(())
}

#[test]
fn rows_before_the_first_key_give_zero_and_minus_infinity_k2_k6() -> Result<()> {
    let dims = Dims {
        b: 2,
        t: 5,
        s: 2,
        ..Dims::square(2, 1, 0, 4)
    };
    for score in scores(2, 4) {
        let call = Call::causal(dims).with_score(score);
        for (dtype, backend) in [DType::F64, DType::F32, DType::BF16, DType::F16]
            .into_iter()
            .flat_map(|dtype| BACKENDS.map(|backend| (dtype, backend)))
        {
            let inputs = Inputs::new(dims, Fill::Normal, 3, dtype);
            let run = checked_run(&call, &inputs, dtype, backend)?;
            assert!(tokens(&run.out, 5, 4, 0, 3).iter().all(|x| *x == 0.));
            assert!(tokens(&run.dq, 5, 4, 0, 3).iter().all(|x| *x == 0.));
            assert!(tokens(&run.lse, 5, 1, 0, 3)
                .iter()
                .all(|x| *x == f64::NEG_INFINITY));
            assert!(tokens(&run.lse, 5, 1, 3, 5).iter().all(|x| x.is_finite()));
        }
    }
    Ok(())
}

#[test]
fn rows_without_a_key_add_nothing_to_key_gradients_k2() -> Result<()> {
    let dims = Dims {
        t: 5,
        s: 2,
        ..Dims::square(2, 1, 0, 4)
    };
    let call = Call::causal(dims);
    let inputs = Inputs::normal(dims, 4);
    let mut changed = inputs.clone();
    for head in 0..2 {
        for i in 0..3 * 4 {
            changed.q[head * 20 + i] = 1e9;
            changed.grad[head * 20 + i] = -1e9;
        }
    }
    for backend in BACKENDS {
        let (one, other) = (
            run(&call, &inputs, DType::F64, backend)?,
            run(&call, &changed, DType::F64, backend)?,
        );
        assert_eq!((one.dk, one.dv), (other.dk, other.dv));
    }
    Ok(())
}

#[test]
fn fully_masked_rows_give_zero_and_finite_gradients_k5() -> Result<()> {
    let dims = Dims {
        b: 2,
        e: 3,
        ..Dims::square(2, 1, 6, 4)
    };
    // Padding; a window that no key is inside of; a segment of its own; all of them.
    let far = Call {
        window: Some(2),
        ..Call::causal(dims).with_positions(
            vec![vec![0, 50, 1, 51, 2, 52]],
            vec![vec![0, 1, 2, 10, 11, 12]],
        )
    };
    let padded = Call::new(dims).with_positions(
        vec![vec![-1, -1, 0, 1, 2, 3], vec![-7; 6]],
        vec![vec![-1, -1, 0, 1, 2, 3], vec![0, 1, 2, 3, 4, 5]],
    );
    let alone = Call {
        segments: Some((vec![vec![0, 9, 0, 8, 1, 1]], vec![vec![0, 0, 0, 1, 2, 2]])),
        ..Call::new(dims).with_positions(ids(0..6), ids(0..6))
    };
    let nothing = Call::new(dims).with_positions(ids(0..6), vec![vec![-1; 6]]);
    for call in [far, padded, alone, nothing] {
        for score in scores(2, 4) {
            let call = call.clone().with_score(score);
            for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
                check(&call, &Inputs::new(dims, Fill::Normal, 5, dtype), dtype)?;
            }
        }
    }
    Ok(())
}

#[test]
fn keys_all_padding_give_zero_everywhere_k5() -> Result<()> {
    let dims = Dims::square(2, 1, 3, 4);
    let call = Call::new(dims).with_positions(ids(0..3), vec![vec![-1; 3]]);
    for backend in BACKENDS {
        let run = run(&call, &Inputs::normal(dims, 6), DType::F32, backend)?;
        for x in [run.out, run.dq, run.dk, run.dv] {
            assert!(x.iter().all(|x| *x == 0.), "{backend:?} {x:?}");
        }
        assert_eq!(run.lse, [f64::NEG_INFINITY; 6]);
    }
    Ok(())
}

#[test]
fn window_counts_the_query_itself_k12() -> Result<()> {
    let call = Call {
        window: Some(4),
        ..Call::causal(Dims::square(1, 1, 8, 4))
    };
    for backend in BACKENDS {
        let seen = seen(call.clone(), backend)?;
        assert_eq!(seen[0], "10000000");
        assert_eq!(seen[3], "11110000");
        assert_eq!(seen[4], "01111000");
        assert_eq!(seen[7], "00001111");
    }
    Ok(())
}

#[test]
fn window_of_one_sees_only_the_query_itself_k12() -> Result<()> {
    for causal in [true, false] {
        let call = Call {
            window: Some(1),
            causal,
            ..Call::new(Dims::square(1, 1, 3, 4))
        };
        for backend in BACKENDS {
            assert_eq!(seen(call.clone(), backend)?, ["100", "010", "001"]);
        }
    }
    Ok(())
}

#[test]
fn window_without_causal_is_symmetric_k12() -> Result<()> {
    let call = Call {
        window: Some(2),
        ..Call::new(Dims::square(1, 1, 5, 4))
    };
    for backend in BACKENDS {
        assert_eq!(
            seen(call.clone(), backend)?,
            ["11000", "11100", "01110", "00111", "00011"]
        );
    }
    Ok(())
}

#[test]
fn window_as_long_as_the_sequence_equals_none_k12() -> Result<()> {
    let dims = Dims::square(2, 1, 70, 6);
    let inputs = Inputs::new(dims, Fill::Normal, 7, DType::F32);
    for causal in [true, false] {
        for window in [70, 71, 1 << 40, usize::MAX] {
            let open = Call {
                causal,
                ..Call::new(dims)
            };
            let windowed = Call {
                window: Some(window),
                ..open.clone()
            };
            for backend in BACKENDS {
                assert_eq!(
                    run(&open, &inputs, DType::F32, backend)?,
                    run(&windowed, &inputs, DType::F32, backend)?
                );
            }
        }
    }
    Ok(())
}

#[test]
fn window_of_any_width_equals_reference_k12() -> Result<()> {
    let dims = Dims::square(2, 1, 131, 5);
    for window in [1, 2, 31, 32, 33, 63, 64, 65, 130, 131] {
        for causal in [true, false] {
            let call = Call {
                window: Some(window),
                causal,
                ..Call::new(dims).with_score(linear_bias(2))
            };
            check(
                &call,
                &Inputs::new(dims, Fill::Normal, 8, DType::F32),
                DType::F32,
            )?;
        }
    }
    Ok(())
}

/// The last `q` rows of a causal call over `n` tokens, against the same rows with only those queries.
fn decode_equals_full(call: impl Fn(Dims) -> Call, n: usize, q: usize) -> Result<()> {
    let full = call(Dims::square(4, 2, n, 8));
    let inputs = Inputs::normal(full.dims, 9);
    let dims = Dims { t: q, ..full.dims };
    let by_default = call(dims);
    let told = call(dims).with_positions(ids((n - q) as i64..n as i64), ids(0..n as i64));
    let last = Inputs {
        q: tokens(&inputs.q, n, 8, n - q, n),
        grad: tokens(&inputs.grad, n, 8, n - q, n),
        ..inputs.clone()
    };
    for backend in BACKENDS {
        let [out, lse] = forward(&full, &inputs, DType::F64, backend)?;
        for decode in [&by_default, &told] {
            let run = checked_run(decode, &last, DType::F64, backend)?;
            assert_close("out", &run.out, &tokens(&out, n, 8, n - q, n), 1e-14);
            assert_close("lse", &run.lse, &tokens(&lse, n, 1, n - q, n), 1e-14);
        }
    }
    Ok(())
}

#[test]
fn alibi_decoding_uses_absolute_positions_a3() -> Result<()> {
    for q in [1, 3] {
        decode_equals_full(|dims| Call::causal(dims).with_score(linear_bias(4)), 17, q)?;
    }
    Ok(())
}

#[test]
fn tapa_decoding_uses_absolute_positions_a3() -> Result<()> {
    for q in [1, 3] {
        decode_equals_full(
            |dims| Call::causal(dims).with_score(scores(4, 8)[2].clone()),
            17,
            q,
        )?;
    }
    Ok(())
}

#[test]
fn window_decoding_uses_absolute_positions_k13() -> Result<()> {
    for (n, q) in [(7, 1), (9, 3), (70, 2)] {
        for score in scores(4, 8) {
            decode_equals_full(
                |dims| Call {
                    window: Some(4),
                    ..Call::causal(dims).with_score(score.clone())
                },
                n,
                q,
            )?;
        }
    }
    Ok(())
}

// ---- ALiBi -------------------------------------------------------------------------------------------------

#[test]
fn alibi_slopes_of_a_head_shard_are_taken_as_given_a4() -> Result<()> {
    let slopes: Vec<f64> = (1..=8).map(|h| 0.5f64.powi(h)).collect();
    let score = |range: std::ops::Range<usize>| Score::LinearBias {
        slopes: slopes[range].into(),
    };
    let dims = Dims::square(8, 8, 11, 4);
    let whole = Call::causal(dims).with_score(score(0..8));
    let inputs = Inputs::normal(dims, 10);
    let half = |x: &[f64]| x[x.len() / 2..].to_vec();
    let shard = Call::causal(Dims { h: 4, g: 4, ..dims }).with_score(score(4..8));
    let shard_inputs = Inputs {
        q: half(&inputs.q),
        k: half(&inputs.k),
        v: half(&inputs.v),
        grad: half(&inputs.grad),
    };
    for backend in BACKENDS {
        let whole = run(&whole, &inputs, DType::F64, backend)?;
        let shard = checked_run(&shard, &shard_inputs, DType::F64, backend)?;
        for (name, shard, whole) in [
            ("out", &shard.out, &whole.out),
            ("dq", &shard.dq, &whole.dq),
            ("dk", &shard.dk, &whole.dk),
            ("dv", &shard.dv, &whole.dv),
        ] {
            assert_close(name, shard, &half(whole), 1e-14);
        }
    }
    Ok(())
}

#[test]
fn alibi_without_causal_is_symmetric_for_every_batch_a5() -> Result<()> {
    for b in [1, 2, 3] {
        let dims = Dims {
            b,
            e: 7,
            ..Dims::square(1, 1, 7, 4)
        };
        let call = Call::new(dims).with_score(Score::LinearBias {
            slopes: [0.7].into(),
        });
        // With q = 0 only the bias is left: weights are exp(−0.7 |i − j|), normalised.
        let inputs = Inputs {
            q: vec![0.; b * 28],
            v: unit_values(7).repeat(b),
            ..Inputs::normal(dims, 11)
        };
        let mut want = Vec::new();
        for i in 0..7 {
            let row: Vec<f64> = (0..7)
                .map(|j: i32| (-0.7 * f64::from((i - j).abs())).exp())
                .collect();
            let sum: f64 = row.iter().sum();
            want.extend(row.iter().map(|w| w / sum));
        }
        for backend in BACKENDS {
            let [out, _] = forward(&call, &inputs, DType::F64, backend)?;
            assert_close("out", &out, &want.repeat(b), 1e-14);
        }
        check(&call, &Inputs::normal(dims, 11), DType::F64)?;
    }
    Ok(())
}

#[test]
fn alibi_bias_of_packed_documents_uses_their_own_positions_a6() -> Result<()> {
    let dims = Dims::square(4, 2, 12, 6);
    let positions = Positions::packed(&[vec![5, 7]], &CPU)?;
    let packed: Vec<i64> = (0..5).chain(0..7).collect();
    let documents: Vec<i64> = [vec![0; 5], vec![1; 7]].concat();
    for score in scores(4, 6) {
        let mut call = Call::causal(dims)
            .with_score(score)
            .with_positions(vec![packed.clone()], vec![packed.clone()]);
        call.segments = Some((vec![documents.clone()], vec![documents.clone()]));
        let inputs = Inputs::normal(dims, 12);
        check(&call, &inputs, DType::F64)?;
        for backend in BACKENDS {
            let [want, _] = forward(&call, &inputs, DType::F64, backend)?;
            let spec = AttendSpec {
                q_positions: Some(positions.clone()),
                k_positions: None,
                ..call.spec(backend)?
            };
            let out = attend(
                &tensor(&inputs.q, dims.q(), DType::F64)?,
                &tensor(&inputs.k, dims.k(), DType::F64)?,
                &tensor(&inputs.v, dims.v(), DType::F64)?,
                &spec,
            )?;
            assert_eq!(values(&out)?, want);
        }
        // Without segments the bias still follows the positions, across documents too.
        call.segments = None;
        check(&call, &inputs, DType::F64)?;
    }
    Ok(())
}

#[test]
fn alibi_in_the_last_partial_tile_equals_reference_a8() -> Result<()> {
    for s in [63, 64, 65, 127, 128, 129] {
        for causal in [true, false] {
            let dims = Dims::square(3, 1, s, 8);
            let call = Call {
                causal,
                ..Call::new(dims).with_score(linear_bias(3))
            };
            check(
                &call,
                &Inputs::new(dims, Fill::Normal, 13, DType::F32),
                DType::F32,
            )?;
        }
    }
    Ok(())
}

// ---- Values ------------------------------------------------------------------------------------------------

#[test]
fn scores_far_below_any_sentinel_give_uniform_weights_k4() -> Result<()> {
    let dims = Dims {
        t: 3,
        s: 70,
        e: 2,
        ..Dims::square(1, 1, 0, 1)
    };
    for score in [-1e5, -4e4, 1e5, -1e30] {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let call = Call {
                scale: Some(1.),
                ..Call::new(dims)
            };
            let inputs = Inputs {
                q: vec![1.; 3],
                k: vec![round_to(dtype, score); 70],
                ..Inputs::new(dims, Fill::Normal, 14, dtype)
            };
            check(&call, &inputs, dtype)?;
            for backend in BACKENDS {
                let run = run(&call, &inputs, dtype, backend)?;
                let mean: f64 = inputs.v.chunks(2).map(|v| v[0]).sum::<f64>() / 70.;
                let rounding = reference::unit_roundoff(dtype);
                assert!(
                    (run.out[0] - mean).abs() < 2. * rounding + 1e-6,
                    "{backend:?}"
                );
                assert!((run.lse[0] / score - 1.).abs() < 1e-2, "{backend:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn one_score_far_below_the_others_is_not_mistaken_for_a_mask_k4() -> Result<()> {
    let dims = Dims {
        t: 1,
        s: 66,
        ..Dims::square(1, 1, 0, 2)
    };
    for (dtype, backend) in [DType::F64, DType::F32]
        .into_iter()
        .flat_map(|dtype| BACKENDS.map(|backend| (dtype, backend)))
    {
        // The first key scores −1e5 and is the only one to be seen, or is not seen.
        for first in [5, -1] {
            let mut inputs = Inputs::new(dims, Fill::Normal, 15, dtype);
            inputs.q = vec![1., 0.];
            inputs.k[0] = -1e5;
            let mut keys = vec![-1; 66];
            keys[0] = first;
            let call = Call::causal(dims).with_positions(vec![vec![9]], vec![keys]);
            let run = checked_run(&call, &inputs, dtype, backend)?;
            let want = if first < 0 {
                [0.; 2]
            } else {
                [inputs.v[0], inputs.v[1]]
            };
            assert_eq!(run.out, want);
        }
    }
    Ok(())
}

#[test]
fn unused_cache_slots_of_nan_are_never_read_k9() -> Result<()> {
    let used = [32usize, 64, 96, 48];
    let dims = Dims {
        b: 4,
        h: 2,
        g: 1,
        t: 2,
        s: 128,
        d: 6,
        e: 5,
    };
    for poison in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        for score in scores(2, 6) {
            for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
                let clean = Inputs::new(dims, Fill::Normal, 16, dtype);
                let mut inputs = clean.clone();
                let (mut q_places, mut k_places) = (Vec::new(), Vec::new());
                for (b, &used) in used.iter().enumerate() {
                    q_places.push(vec![used as i64 - 2, used as i64 - 1]);
                    k_places.push(
                        (0..128)
                            .map(|j| if j < used { j as i64 } else { -1 })
                            .collect(),
                    );
                    inputs.k[(b * 128 + used) * 6..(b + 1) * 128 * 6].fill(poison);
                    inputs.v[(b * 128 + used) * 5..(b + 1) * 128 * 5].fill(poison);
                }
                let call = Call::causal(dims)
                    .with_score(score.clone())
                    .with_positions(q_places, k_places);
                for backend in BACKENDS {
                    let poisoned = checked_run(&call, &inputs, dtype, backend)?;
                    // Bit for bit what other contents of the unused slots give.
                    assert_eq!(poisoned, run(&call, &clean, dtype, backend)?);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn padding_queries_of_nan_do_not_leak_k9() -> Result<()> {
    let dims = Dims {
        b: 2,
        ..Dims::square(2, 1, 9, 4)
    };
    let places: Rows = vec![(-4..5).collect(), (0..9).collect()];
    for score in scores(2, 4) {
        let call = Call::causal(dims)
            .with_score(score)
            .with_positions(places.clone(), places.clone());
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            let mut inputs = Inputs::new(dims, Fill::Normal, 17, dtype);
            for head in 0..2 {
                inputs.q[head * 36..head * 36 + 16].fill(f64::NAN);
                inputs.grad[head * 36..head * 36 + 16].fill(f64::NAN);
            }
            inputs.k[..16].fill(f64::NAN);
            inputs.v[..16].fill(f64::NAN);
            for backend in BACKENDS {
                checked_run(&call, &inputs, dtype, backend)?;
            }
        }
    }
    Ok(())
}

#[test]
fn lengths_around_every_tile_edge_equal_reference_k10() -> Result<()> {
    for s in [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65, 127, 129] {
        for causal in [true, false] {
            for score in scores(2, 6) {
                let dims = Dims {
                    e: 7,
                    ..Dims::square(2, 1, s, 6)
                };
                let call = Call {
                    causal,
                    ..Call::new(dims).with_score(score)
                };
                for dtype in [DType::F64, DType::F32, DType::BF16] {
                    check(&call, &Inputs::new(dims, Fill::Normal, 18, dtype), dtype)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn ragged_long_causal_alibi_equals_reference_k10_b4() -> Result<()> {
    for score in scores(2, 8) {
        let dims = Dims::square(2, 1, 1025, 8);
        let call = Call::causal(dims).with_score(score);
        check(
            &call,
            &Inputs::new(dims, Fill::Normal, 19, DType::F32),
            DType::F32,
        )?;
    }
    Ok(())
}

#[test]
fn grouped_heads_read_their_own_value_head_k11() -> Result<()> {
    let dims = Dims {
        e: 3,
        ..Dims::square(4, 2, 65, 4)
    };
    let inputs = Inputs {
        v: (0..2 * 65 * 3).map(|i| (i / (65 * 3)) as f64).collect(),
        ..Inputs::normal(dims, 20)
    };
    for backend in BACKENDS {
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            let [out, _] = forward(&Call::causal(dims), &inputs, dtype, backend)?;
            for (h, head) in out.chunks(65 * 3).enumerate() {
                assert!(head.iter().all(|x| (x - (h / 2) as f64).abs() < 1e-6));
            }
        }
    }
    Ok(())
}

#[test]
fn any_strides_equal_contiguous_bit_for_bit_k14() -> Result<()> {
    let dims = Dims {
        b: 2,
        h: 4,
        g: 2,
        t: 9,
        s: 11,
        d: 8,
        e: 6,
    };
    for score in scores(4, 8) {
        let call = Call::causal(dims).with_score(score);
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            let inputs = Inputs::new(dims, Fill::Normal, 21, dtype);
            for backend in BACKENDS {
                let plain = checked_run(&call, &inputs, dtype, backend)?;
                for (i, _) in STORAGES.iter().enumerate() {
                    // q, k and v each in another order.
                    let storages = [0, 1, 3].map(|shift| STORAGES[(i + shift) % STORAGES.len()]);
                    assert_eq!(
                        plain,
                        run_stored(&call, &inputs, dtype, backend, storages)?,
                        "{backend:?} {dtype:?} {storages:?}"
                    );
                }
            }
        }
    }
    Ok(())
}

#[test]
fn expanded_keys_and_values_equal_their_copies_k14() -> Result<()> {
    let dims = Dims {
        b: 3,
        ..Dims::square(4, 2, 10, 4)
    };
    for backend in BACKENDS {
        let spec = AttendSpec::causal().with_backend(backend);
        let inputs = Inputs::normal(dims, 22);
        let q = var(&inputs.q, dims.q(), DType::F64)?;
        // One head of one batch row stands for all.
        let one = var(&inputs.k[..40], [1, 1, 10, 4], DType::F64)?;
        let expanded = one.broadcast_as((3, 2, 10, 4))?;
        let copied = expanded.contiguous()?;
        let grad = tensor(&inputs.grad, dims.out(), DType::F64)?;
        let mut results = Vec::new();
        for kv in [expanded, copied] {
            let out = attend(&q, &kv, &kv, &spec)?;
            let gradients = (&out * &grad)?.sum_all()?.backward()?;
            let dkv = gradients.get(&one).map(values).transpose()?;
            results.push((values(&out)?, dkv.unwrap_or_default()));
        }
        assert_eq!(results[0].1.len(), 40, "{backend:?}");
        assert_eq!(results[0].0, results[1].0);
        assert_close("dkv", &results[0].1, &results[1].1, 1e-14);
        // No token has a row of its own: one query, one key, read by all.
        let same = q.narrow(2, 0, 1)?.broadcast_as((3, 4, 10, 4))?;
        let expanded_q = attend(
            &same,
            &one.broadcast_as((3, 2, 10, 4))?,
            &one.broadcast_as((3, 2, 10, 4))?,
            &spec,
        )?;
        let copied_q = attend(
            &same.contiguous()?,
            &one.broadcast_as((3, 2, 10, 4))?,
            &one.broadcast_as((3, 2, 10, 4))?,
            &spec,
        )?;
        assert_eq!(values(&expanded_q)?, values(&copied_q)?);
    }
    Ok(())
}

#[test]
fn mixed_dtypes_give_an_error_that_names_them_k18() -> Result<()> {
    let x = Tensor::zeros((1, 1, 3, 4), DType::F32, &CPU)?;
    let half = x.to_dtype(DType::BF16)?;
    for backend in BACKENDS {
        let spec = AttendSpec::causal().with_backend(backend);
        for (q, k, v) in [(&half, &x, &x), (&x, &half, &half), (&x, &x, &half)] {
            let error = attend(q, k, v, &spec).map(|_| ()).unwrap_err().to_string();
            assert!(error.contains("F32") && error.contains("BF16"), "{error}");
        }
    }
    Ok(())
}

#[test]
fn head_widths_of_every_kind_equal_reference_k19() -> Result<()> {
    for d in [
        1, 2, 3, 5, 7, 8, 20, 24, 40, 72, 80, 96, 112, 160, 192, 256, 264,
    ] {
        for score in scores(2, d.max(2)) {
            let dims = Dims {
                t: 5,
                s: 35,
                ..Dims::square(2, 1, 0, d)
            };
            if d == 1 && matches!(score, Score::Phase { .. }) {
                continue;
            }
            let call = Call::causal(dims).with_score(score);
            for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
                check(&call, &Inputs::new(dims, Fill::Normal, 23, dtype), dtype)?;
            }
        }
    }
    Ok(())
}

#[test]
fn value_widths_other_than_key_widths_equal_reference_b10() -> Result<()> {
    for (d, e) in [
        (192, 128),
        (128, 192),
        (8, 1),
        (1, 8),
        (64, 192),
        (33, 31),
        (256, 3),
    ] {
        let dims = Dims {
            t: 34,
            s: 34,
            e,
            ..Dims::square(2, 1, 0, d)
        };
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            check(
                &Call::causal(dims),
                &Inputs::new(dims, Fill::Normal, 24, dtype),
                dtype,
            )?;
        }
    }
    Ok(())
}

#[test]
fn scale_zero_gives_uniform_weights_k20() -> Result<()> {
    let dims = Dims::square(2, 1, 67, 4);
    let call = Call {
        scale: Some(0.),
        ..Call::causal(dims)
    };
    let inputs = Inputs::new(dims, Fill::Huge, 25, DType::F32);
    check(&call, &inputs, DType::F32)?;
    for backend in BACKENDS {
        let run = run(&call, &inputs, DType::F32, backend)?;
        for (i, lse) in run.lse.iter().enumerate() {
            assert!((lse - ((i % 67 + 1) as f64).ln()).abs() < 1e-6);
        }
        assert!(run.dq.iter().chain(&run.dk).all(|x| *x == 0.));
    }
    Ok(())
}

#[test]
fn negative_and_large_scales_equal_reference_k20() -> Result<()> {
    let dims = Dims::square(2, 1, 67, 4);
    for scale in [1., -0.3, -5., 100.] {
        for score in scores(2, 4) {
            for fill in [Fill::Normal, Fill::Huge, Fill::Negative, Fill::Correlated] {
                let call = Call {
                    scale: Some(scale),
                    ..Call::causal(dims).with_score(score.clone())
                };
                for dtype in [DType::F64, DType::F32] {
                    check(&call, &Inputs::new(dims, fill, 26, dtype), dtype)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn rows_of_a_batch_equal_their_own_calls_k22() -> Result<()> {
    let lengths = [3usize, 9, 1, 6];
    let dims = Dims {
        b: 4,
        e: 5,
        ..Dims::square(4, 2, 9, 6)
    };
    let Positions::Explicit { pos, .. } = Positions::left_padded(&lengths, &CPU)? else {
        panic!("left_padded gives explicit positions")
    };
    let places: Rows = pos.to_vec2()?;
    for score in scores(4, 6) {
        let batch = Call::causal(dims)
            .with_score(score.clone())
            .with_positions(places.clone(), places.clone());
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let inputs = Inputs::new(dims, Fill::Normal, 27, dtype);
            for backend in BACKENDS {
                let together = checked_run(&batch, &inputs, dtype, backend)?;
                for (b, &length) in lengths.iter().enumerate() {
                    let cut = |x: &[f64], heads: usize, width: usize| {
                        let n = heads * 9 * width;
                        tokens(&x[b * n..(b + 1) * n], 9, width, 9 - length, 9)
                    };
                    let own = Inputs {
                        q: cut(&inputs.q, 4, 6),
                        k: cut(&inputs.k, 2, 6),
                        v: cut(&inputs.v, 2, 5),
                        grad: cut(&inputs.grad, 4, 5),
                    };
                    let own_dims = Dims {
                        b: 1,
                        t: length,
                        s: length,
                        ..dims
                    };
                    let call = Call::causal(own_dims).with_score(score.clone());
                    let alone = run(&call, &own, dtype, backend)?;
                    let tolerance = 4. * reference::unit_roundoff(dtype);
                    for (name, together, alone) in [
                        ("out", cut(&together.out, 4, 5), alone.out),
                        ("lse", cut(&together.lse, 4, 1), alone.lse),
                        ("dq", cut(&together.dq, 4, 6), alone.dq),
                        ("dk", cut(&together.dk, 2, 6), alone.dk),
                        ("dv", cut(&together.dv, 2, 5), alone.dv),
                    ] {
                        assert_close(name, &together, &alone, 8. * tolerance);
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn equal_rows_of_a_batch_give_equal_bits_k23() -> Result<()> {
    for (t, s) in [(1, 33), (17, 17), (65, 65)] {
        let one = Dims {
            t,
            s,
            ..Dims::square(4, 2, 0, 8)
        };
        let dims = Dims { b: 3, ..one };
        for score in scores(4, 8) {
            let inputs = Inputs::new(one, Fill::Normal, 28, DType::F32);
            let thrice = Inputs {
                q: inputs.q.repeat(3),
                k: inputs.k.repeat(3),
                v: inputs.v.repeat(3),
                grad: inputs.grad.repeat(3),
            };
            let call = Call::causal(dims).with_score(score);
            for backend in BACKENDS {
                let run = run(&call, &thrice, DType::F32, backend)?;
                for x in [&run.out, &run.lse, &run.dq, &run.dk, &run.dv] {
                    let rows: Vec<&[f64]> = x.chunks(x.len() / 3).collect();
                    assert!(rows[0] == rows[1] && rows[0] == rows[2], "{backend:?}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn lse_is_contiguous_and_of_the_documented_shape_k24() -> Result<()> {
    let dims = Dims {
        b: 2,
        ..Dims::square(3, 1, 5, 4)
    };
    for backend in BACKENDS {
        for (dtype, of_lse) in [
            (DType::F64, DType::F64),
            (DType::F32, DType::F32),
            (DType::BF16, DType::F32),
            (DType::F16, DType::F32),
        ] {
            let inputs = Inputs::new(dims, Fill::Normal, 29, dtype);
            let result = attend_with_lse(
                &tensor(&inputs.q, dims.q(), dtype)?,
                &tensor(&inputs.k, dims.k(), dtype)?,
                &tensor(&inputs.v, dims.v(), dtype)?,
                &AttendSpec::causal().with_backend(backend),
            )?;
            assert_eq!(result.lse.dims(), [2, 3, 5]);
            assert_eq!(result.lse.dtype(), of_lse);
            assert!(result.lse.is_contiguous());
        }
        checked_run(
            &Call::causal(dims),
            &Inputs::normal(dims, 29),
            DType::F64,
            backend,
        )?;
    }
    Ok(())
}

#[test]
fn softmax_of_half_precision_is_held_in_single_k25() -> Result<()> {
    // Scores up to ±30, hundreds of keys: a half-precision sum of exponentials would stop growing.
    for dtype in [DType::F16, DType::BF16] {
        for (dims, scale) in [
            (Dims::square(2, 1, 300, 16), 2.),
            (
                Dims {
                    t: 2,
                    s: 4099,
                    ..Dims::square(1, 1, 0, 4)
                },
                0.01,
            ),
        ] {
            for score in scores(dims.h, dims.d) {
                let call = Call {
                    scale: Some(scale),
                    ..Call::new(dims).with_score(score)
                };
                check(&call, &Inputs::new(dims, Fill::Normal, 30, dtype), dtype)?;
            }
        }
        // All values 1 and all weights equal: any loss in the sums would show.
        let dims = Dims {
            t: 1,
            s: 4099,
            ..Dims::square(1, 1, 0, 1)
        };
        let inputs = Inputs {
            q: vec![0.],
            v: vec![1.; 4099],
            ..Inputs::new(dims, Fill::Normal, 31, dtype)
        };
        for backend in BACKENDS {
            let [out, lse] = forward(&Call::new(dims), &inputs, dtype, backend)?;
            assert_eq!(out, [1.]);
            assert!((lse[0] - 4099f64.ln()).abs() < 1e-6);
        }
    }
    Ok(())
}

/// Documents of given lengths in queries and keys, packed one behind another.
fn packed(queries: &[usize], keys: &[usize]) -> Result<(AttendSpec, Call)> {
    let place = |lengths: &[usize]| -> (Rows, Rows) {
        (
            vec![lengths.iter().flat_map(|n| 0..*n as i64).collect()],
            vec![lengths
                .iter()
                .enumerate()
                .flat_map(|(document, n)| vec![document as i64; *n])
                .collect()],
        )
    };
    let ((q, q_segments), (k, k_segments)) = (place(queries), place(keys));
    let dims = Dims {
        t: q[0].len(),
        s: k[0].len(),
        e: 3,
        ..Dims::square(2, 1, 0, 4)
    };
    let mut call = Call::causal(dims).with_positions(q, k);
    call.segments = Some((q_segments, k_segments));
    let spec = AttendSpec::causal().with_positions(
        Positions::packed(&[queries.to_vec()], &CPU)?,
        Positions::packed(&[keys.to_vec()], &CPU)?,
    );
    Ok((spec, call))
}

#[test]
fn packed_documents_without_queries_or_keys_give_zeros_k7() -> Result<()> {
    for (queries, keys) in [
        (vec![0, 3, 0, 5], vec![3, 0, 4, 0]),
        (vec![0, 3, 2, 5], vec![3, 0, 4, 6]),
        (vec![0, 0, 70, 1, 0], vec![5, 0, 66, 0, 3]),
        (vec![1, 2], vec![0, 0]),
        (vec![0, 0], vec![1, 2]),
        (vec![0], vec![0]),
    ] {
        let (spec, call) = packed(&queries, &keys)?;
        for score in scores(2, 4) {
            let call = call.clone().with_score(score.clone());
            let inputs = Inputs::normal(call.dims, 32);
            for backend in BACKENDS {
                let run = checked_run(&call, &inputs, DType::F64, backend)?;
                let spec = spec.clone().with_score(score.clone()).with_backend(backend);
                let out = attend(
                    &tensor(&inputs.q, call.dims.q(), DType::F64)?,
                    &tensor(&inputs.k, call.dims.k(), DType::F64)?,
                    &tensor(&inputs.v, call.dims.v(), DType::F64)?,
                    &spec,
                )?;
                assert_eq!(values(&out)?, run.out);
            }
        }
    }
    Ok(())
}

#[test]
fn packed_document_equals_its_own_call_k7() -> Result<()> {
    let lengths = [5usize, 0, 9, 1];
    let (_, call) = packed(&lengths, &lengths)?;
    let inputs = Inputs::normal(call.dims, 33);
    for score in scores(2, 4) {
        let call = call.clone().with_score(score.clone());
        for backend in BACKENDS {
            let whole = run(&call, &inputs, DType::F64, backend)?;
            let mut start = 0;
            for n in lengths {
                let cut = |x: &[f64], width: usize| tokens(x, 15, width, start, start + n);
                let dims = Dims {
                    t: n,
                    s: n,
                    ..call.dims
                };
                let own = Inputs {
                    q: cut(&inputs.q, 4),
                    k: cut(&inputs.k, 4),
                    v: cut(&inputs.v, 3),
                    grad: cut(&inputs.grad, 3),
                };
                let alone = run(
                    &Call::causal(dims).with_score(score.clone()),
                    &own,
                    DType::F64,
                    backend,
                )?;
                assert_close("out", &cut(&whole.out, 3), &alone.out, 1e-14);
                assert_close("dq", &cut(&whole.dq, 4), &alone.dq, 1e-13);
                assert_close("dk", &cut(&whole.dk, 4), &alone.dk, 1e-13);
                assert_close("dv", &cut(&whole.dv, 3), &alone.dv, 1e-13);
                start += n;
            }
        }
    }
    Ok(())
}

#[test]
fn merged_splits_of_the_keys_equal_one_call_k21() -> Result<()> {
    for s in [0usize, 1, 5, 4097] {
        let dims = Dims {
            t: 1,
            s,
            ..Dims::square(2, 1, 0, 4)
        };
        for score in scores(2, 4) {
            let call = Call::causal(dims)
                .with_score(score)
                .with_positions(ids(s as i64..s as i64 + 1), ids(0..s as i64));
            let inputs = Inputs::normal(dims, 34);
            for backend in BACKENDS {
                let [out, lse] = forward(&call, &inputs, DType::F64, backend)?;
                // Eight splits; of few keys, most are empty.
                let (mut total, mut merged) = (vec![0.; 2], vec![0.; 8]);
                let bounds: Vec<usize> = (0..=8).map(|i| (i * s.div_ceil(8)).min(s)).collect();
                for ends in bounds.windows(2) {
                    let (from, to) = (ends[0], ends[1]);
                    let part = Call {
                        dims: Dims {
                            s: to - from,
                            ..dims
                        },
                        positions: Some((ids(s as i64..s as i64 + 1), ids(from as i64..to as i64))),
                        ..call.clone()
                    };
                    let part_inputs = Inputs {
                        k: tokens(&inputs.k, s.max(1), 4, from, to),
                        v: tokens(&inputs.v, s.max(1), 4, from, to),
                        ..inputs.clone()
                    };
                    let [o, l] = forward(&part, &part_inputs, DType::F64, backend)?;
                    for h in 0..2 {
                        assert_eq!(l[h] == f64::NEG_INFINITY, to == from, "{backend:?}");
                        let weight = if s == 0 { 0. } else { (l[h] - lse[h]).exp() };
                        total[h] += weight;
                        for c in 0..4 {
                            merged[h * 4 + c] += weight * o[h * 4 + c];
                        }
                    }
                }
                assert_close("out", &merged, &out, 1e-13);
                assert_close("sum", &total, &[f64::from(s > 0); 2], 1e-13);
            }
        }
    }
    Ok(())
}

// ---- Backward ----------------------------------------------------------------------------------------------

#[test]
fn key_gradients_of_grouped_heads_are_summed_over_the_group_b1() -> Result<()> {
    for (h, g) in [(4, 1), (4, 2), (6, 2), (6, 3), (7, 1), (3, 3)] {
        for score in scores(h, 6) {
            let dims = Dims {
                b: 2,
                h,
                g,
                t: 5,
                s: 67,
                d: 6,
                e: 3,
            };
            let call = Call::causal(dims).with_score(score);
            for dtype in [DType::F64, DType::F32, DType::BF16] {
                check(&call, &Inputs::new(dims, Fill::Normal, 35, dtype), dtype)?;
            }
        }
    }
    Ok(())
}

#[test]
fn ten_backward_passes_give_equal_bits_b3() -> Result<()> {
    let dims = Dims {
        b: 2,
        ..Dims::square(4, 2, 200, 16)
    };
    let call = Call::causal(dims).with_score(linear_bias(4));
    let inputs = Inputs::new(dims, Fill::Normal, 36, DType::F32);
    for backend in BACKENDS {
        let first = run(&call, &inputs, DType::F32, backend)?;
        for _ in 0..9 {
            assert_eq!(
                first,
                run(&call, &inputs, DType::F32, backend)?,
                "{backend:?}"
            );
        }
    }
    Ok(())
}

#[test]
fn fused_gradients_of_a_long_sequence_are_reproducible_b3() -> Result<()> {
    let dims = Dims::square(4, 2, 1024, 16);
    let call = Call::causal(dims).with_score(scores(4, 16)[2].clone());
    let inputs = Inputs::new(dims, Fill::Normal, 37, DType::F32);
    let first = run(&call, &inputs, DType::F32, Backend::Fused)?;
    for _ in 0..9 {
        assert_eq!(first, run(&call, &inputs, DType::F32, Backend::Fused)?);
    }
    Ok(())
}

#[test]
fn loss_of_output_and_lse_has_the_gradient_of_the_output_alone_b5() -> Result<()> {
    let dims = Dims::square(2, 1, 6, 4);
    let inputs = Inputs::normal(dims, 38);
    for backend in BACKENDS {
        for score in scores(2, 4) {
            let call = Call::causal(dims).with_score(score);
            let gradients = |with_lse: bool| -> Result<Vec<f64>> {
                let q = var(&inputs.q, dims.q(), DType::F64)?;
                let k = tensor(&inputs.k, dims.k(), DType::F64)?;
                let v = tensor(&inputs.v, dims.v(), DType::F64)?;
                let result = attend_with_lse(&q, &k, &v, &call.spec(backend)?)?;
                let mut loss = result.out.sqr()?.sum_all()?;
                if with_lse {
                    loss = (loss + (result.lse.sum_all()? * 100.)?)?;
                }
                match loss.backward()?.get(&q) {
                    Some(dq) => values(dq),
                    None => Ok(Vec::new()),
                }
            };
            let (with, without) = (gradients(true)?, gradients(false)?);
            assert!(without.iter().any(|x| *x != 0.));
            assert_eq!(with, without, "{backend:?}");
        }
    }
    Ok(())
}

#[test]
fn gradients_that_arrive_with_other_strides_equal_contiguous_ones_b6() -> Result<()> {
    let dims = Dims {
        e: 6,
        ..Dims::square(4, 2, 6, 4)
    };
    let inputs = Inputs::normal(dims, 39);
    type Loss = fn(&Tensor) -> Result<Tensor>;
    let losses: [(&str, Loss, Loss); 4] = [
        ("sum", |x| x.sum_all(), |x| (x * x.ones_like()?)?.sum_all()),
        (
            "transposed",
            |x| {
                let weights = Tensor::arange(0f64, 144., &CPU)?.reshape((1, 4, 6, 6))?;
                (x.transpose(2, 3)? * weights)?.sum_all()
            },
            |x| {
                let weights = Tensor::arange(0f64, 144., &CPU)?.reshape((1, 4, 6, 6))?;
                (x * weights.transpose(2, 3)?.contiguous()?)?.sum_all()
            },
        ),
        (
            "tokens first",
            |x| {
                let weights = Tensor::arange(0f64, 144., &CPU)?.reshape((1, 6, 24))?;
                (x.transpose(1, 2)?.reshape((1, 6, 24))? * weights)?.sum_all()
            },
            |x| {
                let weights = Tensor::arange(0f64, 144., &CPU)?.reshape((1, 6, 4, 6))?;
                (x * weights.transpose(1, 2)?.contiguous()?)?.sum_all()
            },
        ),
        (
            "one token",
            |x| x.narrow(2, 3, 1)?.sum_all(),
            |x| {
                let weights = Tensor::new(&[0f64, 0., 0., 1., 0., 0.], &CPU)?.reshape((6, 1))?;
                x.broadcast_mul(&weights)?.sum_all()
            },
        ),
    ];
    for backend in BACKENDS {
        for score in scores(4, 4) {
            let spec = Call::causal(dims).with_score(score).spec(backend)?;
            for (name, strided, contiguous) in losses {
                let mut results = Vec::new();
                for loss in [strided, contiguous] {
                    let q = var(&inputs.q, dims.q(), DType::F64)?;
                    let k = var(&inputs.k, dims.k(), DType::F64)?;
                    let v = var(&inputs.v, dims.v(), DType::F64)?;
                    let gradients = loss(&attend(&q, &k, &v, &spec)?)?.backward()?;
                    let mut all = Vec::new();
                    for x in [&q, &k, &v] {
                        match gradients.get(x) {
                            Some(gradient) => all.extend(values(gradient)?),
                            None => panic!("{backend:?} {name}: no gradient"),
                        }
                    }
                    results.push(all);
                }
                assert!(results[0].iter().any(|x| *x != 0.));
                assert_eq!(results[0], results[1], "{backend:?} {name}");
            }
        }
    }
    Ok(())
}

// ---- TAPA --------------------------------------------------------------------------------------------------

#[test]
fn tapa_with_large_phases_equals_reference_t1() -> Result<()> {
    let dims = Dims {
        e: 3,
        ..Dims::square(2, 1, 66, 6)
    };
    for phase_scale in [1e2, 1e3, 1e4, -1e3] {
        for alpha in [0.1, 0.5, 1., 2.] {
            let call = Call::causal(dims).with_score(Score::Phase {
                amp_dim: 2,
                alpha,
                phase_scale: Some(phase_scale),
            });
            check(&call, &Inputs::normal(dims, 40), DType::F64)?;
            check(
                &call,
                &Inputs::new(dims, Fill::Normal, 40, DType::F32),
                DType::F32,
            )?;
        }
    }
    Ok(())
}

#[test]
fn tapa_score_never_exceeds_the_amplitude_at_any_phase_t1() -> Result<()> {
    // Beyond 2^24 turns f32 holds no fraction of a turn: the phase is anything, but a cosine it stays.
    let dims = Dims {
        t: 9,
        s: 131,
        ..Dims::square(2, 1, 0, 6)
    };
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        let inputs = Inputs::new(dims, Fill::Normal, 48, dtype);
        let amplitude = Inputs {
            q: inputs.q.iter().map(|x| x.abs()).collect(),
            k: inputs.k.iter().map(|x| x.abs()).collect(),
            ..inputs.clone()
        };
        let largest = amplitude
            .q
            .chunks(6)
            .flat_map(|q| amplitude.k.chunks(6).map(|k| q[0] * k[0] + q[1] * k[1]))
            .fold(0., f64::max)
            / 2f64.sqrt();
        for phase_scale in [1e5, 1e8, 1e12, 1e20, -1e30] {
            for alpha in [0.1, 1., 3.] {
                let call = Call::new(dims).with_score(Score::Phase {
                    amp_dim: 2,
                    alpha,
                    phase_scale: Some(phase_scale),
                });
                for backend in BACKENDS {
                    let run = run(&call, &inputs, dtype, backend)?;
                    let context = format!("{backend:?} {dtype:?} {phase_scale} {alpha}");
                    for lse in &run.lse {
                        let bound = largest * (1. + 1e-5) + 131f64.ln();
                        assert!(lse.abs() <= bound, "{context}: lse {lse}, bound {bound}");
                    }
                    let values = inputs.v.iter().fold(0f64, |max, x| max.max(x.abs()));
                    assert!(run.out.iter().all(|x| x.abs() <= values), "{context}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn tapa_whole_turns_leave_the_score_alone_t1() -> Result<()> {
    // Every product q_P·k_P is a whole number, and so is the phase at distance 0 or 1: cos = 1 exactly.
    let dims = Dims {
        t: 2,
        s: 2,
        e: 2,
        ..Dims::square(1, 1, 0, 4)
    };
    let inputs = |dtype| Inputs {
        q: vec![0.5, 1., 1000., 24., -1., 0.25, 3., 999.],
        k: vec![1., 2., 1., 16., -0.5, 1., 8., 1.],
        ..Inputs::new(dims, Fill::Normal, 41, dtype)
    };
    for dtype in [DType::F64, DType::F32, DType::F16] {
        let phase = Call::new(dims).with_score(Score::Phase {
            amp_dim: 2,
            alpha: 0.1,
            phase_scale: Some(1.),
        });
        let amplitude = Inputs {
            q: inputs(dtype)
                .q
                .chunks(4)
                .flat_map(|x| [x[0], x[1], 0., 0.])
                .collect(),
            ..inputs(dtype)
        };
        let dot = Call {
            scale: Some(0.5f64.sqrt()),
            ..Call::new(dims)
        };
        for backend in BACKENDS {
            let [turned, _] = forward(&phase, &inputs(dtype), dtype, backend)?;
            let [plain, _] = forward(&dot, &amplitude, dtype, backend)?;
            assert_close("out", &turned, &plain, 4. * reference::unit_roundoff(dtype));
        }
    }
    Ok(())
}

#[test]
fn tapa_at_distance_zero_is_the_amplitude_and_has_no_phase_gradient_t1() -> Result<()> {
    // Every key stands where the query stands: no phase at all, for any exponent.
    let dims = Dims {
        t: 2,
        s: 5,
        ..Dims::square(1, 1, 0, 4)
    };
    for alpha in [1e-3, 0.1, 1.] {
        let call = Call::new(dims)
            .with_score(Score::Phase {
                amp_dim: 1,
                alpha,
                phase_scale: None,
            })
            .with_positions(vec![vec![7; 2]], vec![vec![7; 5]]);
        let inputs = Inputs::normal(dims, 42);
        for backend in BACKENDS {
            let run = checked_run(&call, &inputs, DType::F64, backend)?;
            let phase_parts = run.dq.chunks(4).chain(run.dk.chunks(4));
            for gradient in phase_parts {
                assert!(gradient[0] != 0.);
                assert_eq!(gradient[1..], [0.; 3], "{backend:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn tapa_gradients_at_distance_zero_and_one_match_differences_t1() -> Result<()> {
    let dims = Dims {
        t: 2,
        s: 2,
        e: 3,
        ..Dims::square(1, 1, 0, 4)
    };
    let call = Call::new(dims).with_score(Score::Phase {
        amp_dim: 2,
        alpha: 0.1,
        phase_scale: None,
    });
    let inputs = Inputs::normal(dims, 43);
    let loss = |inputs: &Inputs, backend| -> Result<f64> {
        let [out, _] = forward(&call, inputs, DType::F64, backend)?;
        Ok(out.iter().zip(&inputs.grad).map(|(o, g)| o * g).sum())
    };
    for backend in BACKENDS {
        let run = run(&call, &inputs, DType::F64, backend)?;
        let step = 1e-5;
        for i in 0..8 {
            for (gradient, of_q) in [(run.dq[i], true), (run.dk[i], false)] {
                let moved = |by: f64| {
                    let mut moved = inputs.clone();
                    if of_q {
                        moved.q[i] += by
                    } else {
                        moved.k[i] += by
                    }
                    loss(&moved, backend)
                };
                let slope = (moved(step)? - moved(-step)?) / (2. * step);
                assert!(
                    (slope - gradient).abs() < 1e-8,
                    "{backend:?} {slope} {gradient}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn tapa_far_from_the_start_equals_reference_t1() -> Result<()> {
    // Distances of millions, positions of billions: only differences may matter.
    let dims = Dims {
        t: 4,
        s: 6,
        ..Dims::square(2, 1, 0, 6)
    };
    let q: Rows = vec![vec![
        4_000_000_000,
        4_000_000_001,
        4_003_000_000,
        4_000_000_005,
    ]];
    let k: Rows = vec![vec![
        4_000_000_000,
        0,
        4_000_000_001,
        3_999_000_000,
        5,
        4_000_000_004,
    ]];
    for score in scores(2, 6) {
        let call = Call::causal(dims)
            .with_score(score)
            .with_positions(q.clone(), k.clone());
        for dtype in [DType::F64, DType::F32] {
            check(&call, &Inputs::new(dims, Fill::Normal, 44, dtype), dtype)?;
        }
    }
    Ok(())
}

#[test]
fn positions_that_differ_by_one_beyond_f32_are_told_apart_t1() -> Result<()> {
    // 2^24 + 1 and 2^52 + 1 are not f32 numbers.
    for start in [1i64 << 24, 1 << 31, (1 << 52) - 8] {
        let dims = Dims::square(1, 1, 5, 4);
        for score in scores(1, 4) {
            let near = Call::causal(dims).with_score(score);
            let far = near
                .clone()
                .with_positions(ids(start..start + 5), ids(start..start + 5));
            let inputs = Inputs::new(dims, Fill::Normal, 45, DType::F32);
            for backend in BACKENDS {
                assert_eq!(
                    run(&near, &inputs, DType::F32, backend)?,
                    run(&far, &inputs, DType::F32, backend)?
                );
            }
        }
    }
    Ok(())
}

#[test]
fn storage_of_a_fused_projection_equals_contiguous_k14() -> Result<()> {
    // One (B, T, 3·H·D) buffer holds q, k and v; gradients meet in it.
    let (b, t, h, d) = (2, 9, 3, 4);
    let values_of: Vec<f64> = Inputs::normal(
        Dims {
            b,
            ..Dims::square(h * 3, 1, t, d)
        },
        46,
    )
    .q;
    for backend in BACKENDS {
        let spec = AttendSpec::causal().with_backend(backend);
        let mut results = Vec::new();
        for copy in [false, true] {
            let qkv = Var::from_tensor(&Tensor::from_slice(&values_of, (b, t, 3 * h * d), &CPU)?)?;
            let part = |i: usize| -> Result<Tensor> {
                let x = qkv
                    .narrow(2, i * h * d, h * d)?
                    .reshape((b, t, h, d))?
                    .transpose(1, 2)?;
                if copy {
                    x.contiguous()
                } else {
                    Ok(x)
                }
            };
            let out = attend(&part(0)?, &part(1)?, &part(2)?, &spec)?;
            let gradients = out.sqr()?.sum_all()?.backward()?;
            let Some(gradient) = gradients.get(&qkv) else {
                panic!("{backend:?}: no gradient")
            };
            results.push((values(&out)?, values(gradient)?));
        }
        assert!(results[0].1.iter().any(|x| *x != 0.));
        assert_eq!(results[0], results[1]);
    }
    Ok(())
}

#[test]
fn untracked_storage_of_every_kind_equals_contiguous_k14() -> Result<()> {
    // The path without gradients is another code path.
    let dims = Dims::square(4, 2, 33, 5);
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        let inputs = Inputs::new(dims, Fill::Normal, 47, dtype);
        for backend in BACKENDS {
            let spec = AttendSpec::causal().with_backend(backend);
            let plain = attend(
                &tensor(&inputs.q, dims.q(), dtype)?,
                &tensor(&inputs.k, dims.k(), dtype)?,
                &tensor(&inputs.v, dims.v(), dtype)?,
                &spec,
            )?;
            assert!(!plain.track_op());
            for storage in [Storage::WidthFirst, Storage::EveryOther, Storage::Offset] {
                let stored =
                    |x: &[f64], shape| reference::store(&tensor(x, shape, dtype)?, storage);
                let out = attend(
                    &stored(&inputs.q, dims.q())?,
                    &stored(&inputs.k, dims.k())?,
                    &stored(&inputs.v, dims.v())?,
                    &spec,
                )?;
                assert_eq!(values(&out)?, values(&plain)?, "{backend:?} {storage:?}");
            }
        }
    }
    Ok(())
}
