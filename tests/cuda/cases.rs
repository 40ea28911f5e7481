//! Faults that users of other attention libraries met, as in `cases_attention.rs`, on widths that the tensor core
//! kernels take. The suffix of a name is the fault's number in our catalogue.

use crate::reference::{
    linear_bias, round_to, tensor, unit_roundoff, values, Call, Dims, Fill, Inputs, Rows,
};
use crate::report::Report;
use crate::shapes::{check, consecutive, families, phase, HALVES};
use crate::target::{Expected, Forward, Manner, Target};
use crate::{test, Test};
use candle_core::{DType, Result, Tensor};
use candle_posenc::encoding::alibi_slopes;
use candle_posenc::{attend, plan, AttendSpec, Backend, Positions, Score};

const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

pub fn tests() -> Vec<Test> {
    vec![
        test("causal_alignment_is_bottom_right_k1", causal_alignment),
        test(
            "rows_before_the_first_key_give_zero_and_minus_infinity_k2_k6",
            rows_without_keys,
        ),
        test(
            "scores_far_below_any_sentinel_give_uniform_weights_k4",
            low_scores,
        ),
        test(
            "scores_beyond_the_precision_of_f32_stay_finite_k4",
            enormous_scores,
        ),
        test("fully_masked_rows_give_zero_k5_k7", masked_rows),
        test(
            "unused_cache_slots_of_nan_are_never_read_k9",
            nan_in_unused_slots,
        ),
        test(
            "padding_queries_of_nan_do_not_leak_k9",
            nan_in_padding_queries,
        ),
        test("ragged_long_sequences_equal_reference_k10", ragged_lengths),
        test(
            "grouped_heads_read_their_own_value_head_k11",
            grouped_values,
        ),
        test("window_counts_the_query_itself_k12", window_edge),
        test(
            "window_as_long_as_the_sequence_equals_none_k12",
            long_window,
        ),
        test(
            "decoding_uses_absolute_positions_k13_a3",
            decoding_positions,
        ),
        test(
            "expanded_keys_and_values_equal_their_copies_k14",
            expanded_operands,
        ),
        test(
            "parts_of_one_projection_equal_contiguous_k14",
            parts_of_a_projection,
        ),
        test(
            "widths_beyond_the_limits_go_dense_or_give_an_error_k19",
            beyond_limits,
        ),
        test("scale_zero_negative_and_large_k20", scales),
        test("rows_of_a_batch_equal_their_own_calls_k22", own_calls),
        test("equal_rows_of_a_batch_give_equal_bits_k23", equal_rows),
        test("lse_is_contiguous_and_equals_reference_k24", lse_shape),
        test(
            "softmax_of_half_precision_is_held_in_single_k25",
            half_precision_sums,
        ),
        test(
            "merged_splits_of_the_keys_equal_one_call_k21",
            merged_splits,
        ),
        test("alibi_slopes_of_any_number_of_heads_a1", alibi_slope_counts),
        test(
            "alibi_without_causal_is_symmetric_for_every_batch_a5",
            symmetric_alibi,
        ),
        test("alibi_of_packed_documents_a6", packed_alibi),
        test("alibi_in_the_last_partial_tile_a8", alibi_last_tile),
        test("tapa_score_never_exceeds_the_amplitude_t1", bounded_phase),
        test(
            "tapa_at_distance_zero_is_the_amplitude_t1",
            phase_at_distance_zero,
        ),
        test("tapa_far_from_the_start_equals_reference_t1", far_phase),
        test(
            "positions_that_differ_by_one_beyond_f32_t1",
            positions_beyond_f32,
        ),
        test(
            "tape_values_of_twice_the_width_equal_two_calls_t2",
            tape_halves,
        ),
        test("visible_nan_shows", visible_nan),
        test("infinitely_low_scores_weigh_nothing_k4", lowest_scores),
        test(
            "infinite_values_stay_with_rows_that_see_them_k5",
            unseen_infinity,
        ),
        test("empty_calls_give_zeros_k7", empty_calls),
    ]
}

/// The rows `from..to` of heads of `rows` tokens of `width` values each.
fn tokens(x: &[f64], rows: usize, width: usize, from: usize, to: usize) -> Vec<f64> {
    x.chunks(rows * width)
        .flat_map(|head| head[from * width..to * width].to_vec())
        .collect()
}

fn close(report: &mut Report, what: &str, got: &[f64], want: &[f64], tolerance: f64) {
    report.check(got.len() == want.len(), || {
        format!("{what}: {} values", got.len())
    });
    let mut worst = (0f64, 1f64, 0);
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = if got == want { 0. } else { (got - want).abs() };
        let allowed = tolerance * (1. + want.abs());
        let error = if error.is_nan() { f64::INFINITY } else { error };
        if error / allowed > worst.0 / worst.1 {
            worst = (error, allowed, i);
        }
    }
    report.compare(format!("{what}[{}]", worst.2), worst.0, worst.1);
}

/// Which keys each query sees, read off the weights of queries that score all keys alike.
fn seen(target: &Target, call: &Call, dtype: DType, report: &mut Report) -> Result<Vec<String>> {
    let dims = Dims {
        b: 1,
        h: 1,
        g: 1,
        d: 16,
        e: call.dims.s.next_multiple_of(8),
        ..call.dims
    };
    let call = Call {
        dims,
        ..call.clone()
    };
    let mut inputs = Inputs::new(dims, Fill::Normal, 1, dtype);
    inputs.q.fill(0.);
    for (i, v) in inputs.v.iter_mut().enumerate() {
        *v = f64::from(i / dims.e == i % dims.e);
    }
    let got = target.forward(&call, &inputs, Manner::of(dtype), report)?;
    Ok(got
        .out
        .chunks(dims.e)
        .map(|row| {
            row[..dims.s]
                .iter()
                .map(|w| if *w == 0. { '0' } else { '1' })
                .collect()
        })
        .collect())
}

fn causal_alignment(target: &Target, report: &mut Report) -> Result<()> {
    let shape = |t, s| Dims {
        t,
        s,
        ..Dims::square(1, 1, 0, 16)
    };
    for dtype in DTYPES {
        let short = seen(target, &Call::causal(shape(2, 5)), dtype, report)?;
        report.check(short == ["11110", "11111"], || {
            format!("{dtype:?}: {short:?}")
        });
        let long = seen(target, &Call::causal(shape(5, 2)), dtype, report)?;
        report.check(long == ["00", "00", "00", "10", "11"], || {
            format!("{dtype:?}: {long:?}")
        });
        // More queries than decoding takes.
        let long = seen(target, &Call::causal(shape(20, 2)), dtype, report)?;
        let want: Vec<&str> = [vec!["00"; 18], vec!["10", "11"]].concat();
        report.check(long == want, || format!("{dtype:?}: {long:?}"));
    }
    for (t, s) in [(2, 5), (5, 2), (1, 7), (7, 1), (64, 67), (67, 64), (70, 3)] {
        for b in [1, 2] {
            for dtype in DTYPES {
                for (_, score, manner) in families(4, 64, dtype) {
                    let dims = Dims {
                        b,
                        t,
                        s,
                        ..Dims::square(4, 2, 0, 64)
                    };
                    check(
                        target,
                        &Call::causal(dims).with_score(score),
                        manner,
                        2,
                        report,
                    )?;
                }
            }
        }
    }
    Ok(())
}

fn rows_without_keys(target: &Target, report: &mut Report) -> Result<()> {
    for (t, s) in [(5, 2), (150, 20), (16, 1)] {
        let dims = Dims {
            b: 2,
            t,
            s,
            ..Dims::square(2, 1, 0, 64)
        };
        for dtype in DTYPES {
            for (name, score, manner) in families(2, 64, dtype) {
                let call = Call::causal(dims).with_score(score);
                let inputs = Inputs::new(dims, Fill::Normal, 3, dtype);
                let got = target.check(&call, &inputs, manner, report)?;
                let blind = t - s;
                let zero = tokens(&got.out, t, 64, 0, blind).iter().all(|x| *x == 0.);
                report.check(zero, || {
                    format!("{name} {dtype:?}: rows without keys are not 0")
                });
                let lse = tokens(&got.lse, t, 1, 0, blind);
                report.check(lse.iter().all(|x| *x == f64::NEG_INFINITY), || {
                    format!("{name} {dtype:?}: log-sum-exps {lse:?}")
                });
            }
        }
    }
    Ok(())
}

fn low_scores(target: &Target, report: &mut Report) -> Result<()> {
    for score in [-1e5, -4e4, 1e5, -1e7] {
        equal_scores(target, score, report)?;
    }
    Ok(())
}

/// Where neighbouring numbers of f32 are further apart than any weight can tell.
fn enormous_scores(target: &Target, report: &mut Report) -> Result<()> {
    for score in [-1e10, 1e10, -1e30, 1e30] {
        equal_scores(target, score, report)?;
    }
    Ok(())
}

fn equal_scores(target: &Target, score: f64, report: &mut Report) -> Result<()> {
    for (t, s) in [(3, 70), (40, 70)] {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let dims = Dims {
                t,
                s,
                ..Dims::square(1, 1, 0, 16)
            };
            let call = Call {
                scale: Some(1.),
                ..Call::new(dims)
            };
            let normal = Inputs::new(dims, Fill::Normal, 14, dtype);
            let first = |x: f64| move |i| if i % 16 == 0 { x } else { 0. };
            let inputs = Inputs {
                q: (0..t * 16).map(first(1.)).collect(),
                k: (0..s * 16).map(first(round_to(dtype, score))).collect(),
                ..normal
            };
            let got = target.check(&call, &inputs, Manner::of(dtype), report)?;
            let mean: f64 = inputs.v.iter().step_by(16).sum::<f64>() / s as f64;
            let allowed = 2. * unit_roundoff(dtype) + 1e-6;
            let error = (got.out[0] - mean).abs();
            report.compare(format!("mean at score {score} {dtype:?}"), error, allowed);
        }
    }
    Ok(())
}

fn masked_rows(target: &Target, report: &mut Report) -> Result<()> {
    let dims = Dims {
        b: 2,
        e: 24,
        ..Dims::square(2, 1, 6, 16)
    };
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
        ..Call::new(dims).with_positions(consecutive(0, 6), consecutive(0, 6))
    };
    let nothing = Call::new(dims).with_positions(consecutive(0, 6), vec![vec![-1; 6]]);
    // The same over many queries, which are not decoded.
    let many = Dims {
        t: 150,
        s: 150,
        ..dims
    };
    let far_apart = Call {
        window: Some(3),
        ..Call::causal(many).with_positions(
            vec![(0..150).map(|i| i * 10).collect()],
            vec![(0..150).map(|i| i * 10 + 5).collect()],
        )
    };
    let strangers = Call {
        segments: Some((
            vec![(0..150).map(|i| i / 10).collect()],
            vec![(0..150).map(|i| 14 - i / 10).collect()],
        )),
        ..Call::new(many).with_positions(consecutive(0, 150), consecutive(0, 150))
    };
    let blank = Call::new(many).with_positions(consecutive(0, 150), vec![vec![-1; 150]]);
    for call in [far, padded, alone, nothing, far_apart, strangers, blank] {
        for dtype in DTYPES {
            for (_, score, manner) in families(2, 16, dtype) {
                check(target, &call.clone().with_score(score), manner, 5, report)?;
            }
        }
    }
    Ok(())
}

fn nan_in_unused_slots(target: &Target, report: &mut Report) -> Result<()> {
    let used = [32usize, 64, 96, 48];
    for t in [2usize, 20] {
        let dims = Dims {
            b: 4,
            h: 2,
            g: 1,
            t,
            s: 128,
            d: 64,
            e: 72,
        };
        for poison in [f64::NAN, f64::INFINITY] {
            for dtype in DTYPES {
                for (name, score, manner) in families(2, 64, dtype) {
                    let clean = Inputs::new(dims, Fill::Normal, 16, dtype);
                    let mut inputs = clean.clone();
                    let (mut queries, mut keys): (Rows, Rows) = (Vec::new(), Vec::new());
                    for (b, &used) in used.iter().enumerate() {
                        queries.push((used as i64 - t as i64..used as i64).collect());
                        keys.push(
                            (0..128)
                                .map(|j| if j < used { j as i64 } else { -1 })
                                .collect(),
                        );
                        inputs.k[(b * 128 + used) * 64..(b + 1) * 128 * 64].fill(poison);
                        inputs.v[(b * 128 + used) * 72..(b + 1) * 128 * 72].fill(poison);
                    }
                    let call = Call::causal(dims)
                        .with_score(score)
                        .with_positions(queries, keys);
                    let expected = Expected::of(&call, &clean, dtype);
                    let got = target.forward(&call, &inputs, manner, report)?;
                    expected.hold(name, &got, report);
                    let other = target.forward(&call, &clean, manner, report)?;
                    report.check(got == other, || {
                        format!("{name} {dtype:?}: {poison} in unused slots shows")
                    });
                }
            }
        }
    }
    Ok(())
}

fn nan_in_padding_queries(target: &Target, report: &mut Report) -> Result<()> {
    for n in [9usize, 100] {
        let dims = Dims {
            b: 2,
            ..Dims::square(2, 1, n, 64)
        };
        let last = n as i64;
        let places: Rows = vec![(-4..last - 4).collect(), (0..last).collect()];
        for dtype in DTYPES {
            for (name, score, manner) in families(2, 64, dtype) {
                let call = Call::causal(dims)
                    .with_score(score)
                    .with_positions(places.clone(), places.clone());
                let clean = Inputs::new(dims, Fill::Normal, 17, dtype);
                let mut inputs = clean.clone();
                for head in 0..2 {
                    inputs.q[head * n * 64..][..4 * 64].fill(f64::NAN);
                }
                inputs.k[..4 * 64].fill(f64::NAN);
                inputs.v[..4 * 64].fill(f64::NAN);
                let expected = Expected::of(&call, &clean, dtype);
                expected.hold(
                    name,
                    &target.forward(&call, &inputs, manner, report)?,
                    report,
                );
            }
        }
    }
    Ok(())
}

fn ragged_lengths(target: &Target, report: &mut Report) -> Result<()> {
    for n in [15, 31, 1025] {
        for dtype in [DType::F32, DType::BF16] {
            for (_, score, manner) in families(2, 64, dtype) {
                for causal in [true, false] {
                    let call = Call {
                        causal,
                        ..Call::new(Dims::square(2, 1, n, 64)).with_score(score.clone())
                    };
                    check(target, &call, manner, 18, report)?;
                }
            }
        }
    }
    Ok(())
}

fn grouped_values(target: &Target, report: &mut Report) -> Result<()> {
    for (t, s) in [(65, 65), (1, 65), (3, 500)] {
        let dims = Dims {
            t,
            s,
            e: 24,
            ..Dims::square(4, 2, 0, 64)
        };
        for dtype in DTYPES {
            let inputs = Inputs {
                v: (0..2 * s * 24).map(|i| (i / (s * 24)) as f64).collect(),
                ..Inputs::new(dims, Fill::Normal, 20, dtype)
            };
            let got = target.forward(&Call::causal(dims), &inputs, Manner::of(dtype), report)?;
            for (h, head) in got.out.chunks(t * 24).enumerate() {
                let worst = head
                    .iter()
                    .map(|x| (x - (h / 2) as f64).abs())
                    .fold(0., f64::max);
                report.compare(
                    format!("head {h} {dtype:?}"),
                    worst,
                    2. * unit_roundoff(dtype) + 1e-6,
                );
            }
        }
    }
    Ok(())
}

fn window_edge(target: &Target, report: &mut Report) -> Result<()> {
    let dims = Dims::square(1, 1, 8, 16);
    for dtype in DTYPES {
        let causal = Call {
            window: Some(4),
            ..Call::causal(dims)
        };
        let rows = seen(target, &causal, dtype, report)?;
        let want = ["10000000", "11110000", "01111000", "00001111"];
        report.check([0, 3, 4, 7].map(|i| rows[i].as_str()) == want, || {
            format!("{rows:?}")
        });
        for causal in [true, false] {
            let one = Call {
                window: Some(1),
                causal,
                ..Call::new(Dims::square(1, 1, 3, 16))
            };
            let rows = seen(target, &one, dtype, report)?;
            report.check(rows == ["100", "010", "001"], || format!("{rows:?}"));
        }
        let two = Call {
            window: Some(2),
            ..Call::new(Dims::square(1, 1, 5, 16))
        };
        let rows = seen(target, &two, dtype, report)?;
        let want = ["11000", "11100", "01110", "00111", "00011"];
        report.check(rows == want, || format!("{rows:?}"));
        for window in [1, 2, 31, 32, 33, 63, 64, 65, 130, 131] {
            for causal in [true, false] {
                let call = Call {
                    window: Some(window),
                    causal,
                    ..Call::new(Dims::square(2, 1, 131, 16)).with_score(linear_bias(2))
                };
                check(target, &call, Manner::of(dtype), 8, report)?;
            }
        }
    }
    Ok(())
}

fn long_window(target: &Target, report: &mut Report) -> Result<()> {
    let dims = Dims::square(2, 1, 150, 64);
    for dtype in [DType::BF16, DType::F32] {
        let inputs = Inputs::new(dims, Fill::Normal, 7, dtype);
        for causal in [true, false] {
            let open = Call {
                causal,
                ..Call::new(dims)
            };
            let want = target.check(&open, &inputs, Manner::of(dtype), report)?;
            for window in [150, 151, 1 << 40, usize::MAX] {
                let windowed = Call {
                    window: Some(window),
                    ..open.clone()
                };
                let got = target.forward(&windowed, &inputs, Manner::of(dtype), report)?;
                report.check(got == want, || {
                    format!("window {window} {dtype:?} differs from none")
                });
            }
        }
    }
    Ok(())
}

/// The last queries of a sequence, on their own, against the same rows of the whole.
fn decoding_positions(target: &Target, report: &mut Report) -> Result<()> {
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for (n, q, window) in [
            (17, 1, None),
            (17, 3, None),
            (7, 1, Some(4)),
            (9, 3, Some(4)),
            (300, 5, Some(90)),
        ] {
            for (name, score, manner) in families(4, 64, dtype) {
                let whole = Dims::square(4, 2, n, 64);
                let dims = Dims { t: q, ..whole };
                let call = |dims| Call {
                    window,
                    ..Call::causal(dims).with_score(score.clone())
                };
                let inputs = Inputs::new(whole, Fill::Normal, 9, dtype);
                let last = Inputs {
                    q: tokens(&inputs.q, n, 64, n - q, n),
                    grad: Vec::new(),
                    ..inputs.clone()
                };
                let whole = target.check(&call(whole), &inputs, manner, report)?;
                let told =
                    call(dims).with_positions(consecutive((n - q) as i64, q), consecutive(0, n));
                let tolerance = 4. * unit_roundoff(dtype) + 1e-6;
                for (call, manner) in [
                    (call(dims), manner),
                    (told.clone(), manner),
                    (told, manner.spans()),
                ] {
                    let got = target.check(&call, &last, manner, report)?;
                    let want = tokens(&whole.out, n, 64, n - q, n);
                    close(
                        report,
                        &format!("{name} {dtype:?} out"),
                        &got.out,
                        &want,
                        tolerance,
                    );
                    let want = tokens(&whole.lse, n, 1, n - q, n);
                    close(
                        report,
                        &format!("{name} {dtype:?} lse"),
                        &got.lse,
                        &want,
                        1e-5,
                    );
                }
            }
        }
    }
    Ok(())
}

fn fused(score: Score) -> AttendSpec {
    AttendSpec::causal()
        .with_score(score)
        .with_backend(Backend::Fused)
}

fn expanded_operands(target: &Target, report: &mut Report) -> Result<()> {
    for dtype in [DType::BF16, DType::F32] {
        for t in [70, 2] {
            let dims = Dims {
                b: 3,
                t,
                s: 70,
                ..Dims::square(4, 2, 0, 64)
            };
            let inputs = Inputs::new(dims, Fill::Normal, 22, dtype);
            let load = |x: &[f64], shape| tensor(x, shape, dtype)?.to_device(target.device());
            let q = load(&inputs.q, dims.q())?;
            // One head of one batch row stands for all; then one token for all.
            let one = load(&inputs.k[..70 * 64], [1, 1, 70, 64])?;
            let token = one.narrow(2, 3, 1)?;
            let shape = dims.k().to_vec();
            for expanded in [
                one.broadcast_as(&shape[..])?,
                token.broadcast_as(&shape[..])?,
            ] {
                for (name, score, _) in families(4, 64, dtype) {
                    let spec = fused(score);
                    let copied = expanded.contiguous()?;
                    target.counted_plan([&q, &expanded, &expanded], &spec, report)?;
                    let got = values(&attend(&q, &expanded, &expanded, &spec)?)?;
                    let want = values(&attend(&q, &copied, &copied, &spec)?)?;
                    report.check(got == want, || {
                        format!("{name} {dtype:?}: an expanded operand")
                    });
                }
            }
        }
    }
    Ok(())
}

fn parts_of_a_projection(target: &Target, report: &mut Report) -> Result<()> {
    let (b, t, h, d) = (2, 75, 3, 64);
    for dtype in [DType::BF16, DType::F32] {
        let content = Inputs::new(
            Dims {
                b,
                ..Dims::square(h * 3, 1, t, d)
            },
            Fill::Normal,
            46,
            dtype,
        );
        let qkv = Tensor::from_slice(&content.q, (b, t, 3 * h * d), &candle_core::Device::Cpu)?
            .to_dtype(dtype)?
            .to_device(target.device())?;
        let part = |i: usize| {
            qkv.narrow(2, i * h * d, h * d)?
                .reshape((b, t, h, d))?
                .transpose(1, 2)
        };
        let [q, k, v] = [part(0)?, part(1)?, part(2)?];
        for (name, score, _) in families(h, d, dtype) {
            let spec = fused(score);
            let plan = target.counted_plan([&q, &k, &v], &spec, report)?;
            report.check(plan.copies.is_empty(), || {
                format!("aligned strided operands are copied: {plan}")
            });
            let got = values(&attend(&q, &k, &v, &spec)?)?;
            let copies = [q.contiguous()?, k.contiguous()?, v.contiguous()?];
            let want = values(&attend(&copies[0], &copies[1], &copies[2], &spec)?)?;
            report.check(got == want, || {
                format!("{name} {dtype:?}: strided parts differ")
            });
        }
    }
    Ok(())
}

fn beyond_limits(target: &Target, report: &mut Report) -> Result<()> {
    for (d, e) in [(264, 64), (264, 264), (64, 520), (300, 600)] {
        for dtype in [DType::BF16, DType::F32] {
            let dims = Dims {
                e,
                ..Dims::square(2, 1, 20, d)
            };
            let call = Call::causal(dims);
            let inputs = Inputs::new(dims, Fill::Normal, 23, dtype);
            let [q, k, v] = target.operands(&call, &inputs, Manner::of(dtype))?;
            if target.is_gpu() {
                let error = match attend(&q, &k, &v, &call.spec(Backend::Fused)?) {
                    Ok(_) => String::new(),
                    Err(error) => error.to_string(),
                };
                let names = error.contains(&d.to_string()) || error.contains(&e.to_string());
                report.check(names, || {
                    format!("D = {d}, E = {e}: {error:?} names no width")
                });
                let plan = plan(&q, &k, &v, &call.spec(Backend::Auto)?)?;
                let dense = plan.path == candle_posenc::Path::Dense;
                report.check(dense, || format!("D = {d}, E = {e}: {plan}"));
            }
            let out = attend(&q, &k, &v, &call.spec(Backend::Auto)?)?;
            let want = call.exact_forward(&inputs).out.value;
            close(
                report,
                "out",
                &values(&out)?,
                &want,
                4. * unit_roundoff(dtype) + 1e-5,
            );
        }
    }
    Ok(())
}

fn scales(target: &Target, report: &mut Report) -> Result<()> {
    for dtype in [DType::BF16, DType::F16, DType::F32, DType::F64] {
        for (t, s) in [(67, 67), (3, 67)] {
            let dims = Dims {
                t,
                s,
                ..Dims::square(2, 1, 0, 16)
            };
            for (name, score, manner) in families(2, 16, dtype) {
                for scale in [0., -0., 1., -0.3, -5., 100.] {
                    for fill in [Fill::Normal, Fill::Huge, Fill::Negative, Fill::Correlated] {
                        let call = Call {
                            scale: Some(scale),
                            ..Call::causal(dims).with_score(score.clone())
                        };
                        let inputs = Inputs::new(dims, fill, 26, dtype);
                        let got = target.check(&call, &inputs, manner, report)?;
                        if scale == 0. && name != "bias" {
                            for (i, lse) in got.lse.iter().enumerate() {
                                let want = ((s - t + i % t + 1) as f64).ln();
                                report.compare(
                                    format!("lse {i} of scale 0"),
                                    (lse - want).abs(),
                                    2e-6,
                                );
                            }
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

fn own_calls(target: &Target, report: &mut Report) -> Result<()> {
    let lengths = [30usize, 90, 10, 61];
    let dims = Dims {
        b: 4,
        e: 72,
        ..Dims::square(4, 2, 90, 64)
    };
    let Positions::Explicit { pos, .. } =
        Positions::left_padded(&lengths, &candle_core::Device::Cpu)?
    else {
        candle_core::bail!("left_padded gives explicit positions")
    };
    let places: Rows = pos.to_vec2()?;
    for dtype in [DType::BF16, DType::F32] {
        for (name, score, manner) in families(4, 64, dtype) {
            let batch = Call::causal(dims)
                .with_score(score.clone())
                .with_positions(places.clone(), places.clone());
            let inputs = Inputs::new(dims, Fill::Normal, 27, dtype);
            let together = target.check(&batch, &inputs, manner, report)?;
            for (b, &length) in lengths.iter().enumerate() {
                let cut = |x: &[f64], heads: usize, width: usize| {
                    let n = heads * 90 * width;
                    tokens(&x[b * n..(b + 1) * n], 90, width, 90 - length, 90)
                };
                let own = Inputs {
                    q: cut(&inputs.q, 4, 64),
                    k: cut(&inputs.k, 2, 64),
                    v: cut(&inputs.v, 2, 72),
                    grad: Vec::new(),
                };
                let own_dims = Dims {
                    b: 1,
                    t: length,
                    s: length,
                    ..dims
                };
                let call = Call::causal(own_dims).with_score(score.clone());
                let alone = target.forward(&call, &own, manner, report)?;
                let tolerance = 8. * unit_roundoff(dtype) + 1e-6;
                let what = format!("{name} {dtype:?} row {b}");
                close(
                    report,
                    &what,
                    &cut(&together.out, 4, 72),
                    &alone.out,
                    tolerance,
                );
                close(report, &what, &cut(&together.lse, 4, 1), &alone.lse, 1e-5);
            }
        }
    }
    Ok(())
}

fn equal_rows(target: &Target, report: &mut Report) -> Result<()> {
    for (t, s) in [
        (1, 33),
        (17, 17),
        (1, 5000),
        (16, 300),
        (65, 65),
        (300, 300),
    ] {
        let one = Dims {
            t,
            s,
            ..Dims::square(4, 2, 0, 64)
        };
        let dims = Dims { b: 3, ..one };
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            for (name, score, manner) in families(4, 64, dtype) {
                let inputs = Inputs::new(one, Fill::Normal, 28, dtype);
                let thrice = Inputs {
                    q: inputs.q.repeat(3),
                    k: inputs.k.repeat(3),
                    v: inputs.v.repeat(3),
                    grad: Vec::new(),
                };
                let call = Call::causal(dims).with_score(score);
                let got = target.forward(&call, &thrice, manner, report)?;
                for x in [&got.out, &got.lse] {
                    let rows: Vec<&[f64]> = x.chunks(x.len() / 3).collect();
                    report.check(rows[0] == rows[1] && rows[0] == rows[2], || {
                        format!("{name} {dtype:?} t{t} s{s}: rows differ")
                    });
                }
            }
        }
    }
    Ok(())
}

fn lse_shape(target: &Target, report: &mut Report) -> Result<()> {
    let dims = Dims {
        b: 2,
        ..Dims::square(3, 1, 5, 16)
    };
    for dtype in DTYPES {
        let call = Call::causal(dims);
        let inputs = Inputs::new(dims, Fill::Normal, 29, dtype);
        target.check(&call, &inputs, Manner::of(dtype), report)?;
        let [q, k, v] = target.operands(&call, &inputs, Manner::of(dtype))?;
        let lse = candle_posenc::attend_with_lse(&q, &k, &v, &fused(Score::Dot))?.lse;
        report.check(lse.is_contiguous() && lse.dims() == [2, 3, 5], || {
            format!("{lse:?}")
        });
    }
    Ok(())
}

fn half_precision_sums(target: &Target, report: &mut Report) -> Result<()> {
    for dtype in HALVES {
        for (dims, scale) in [
            (Dims::square(2, 1, 300, 16), 2.),
            (
                Dims {
                    t: 2,
                    s: 4099,
                    ..Dims::square(1, 1, 0, 8)
                },
                0.01,
            ),
            (
                Dims {
                    t: 20,
                    s: 4099,
                    ..Dims::square(1, 1, 0, 8)
                },
                0.01,
            ),
        ] {
            for (_, score, manner) in families(dims.h, dims.d, dtype) {
                let call = Call {
                    scale: Some(scale),
                    ..Call::new(dims).with_score(score)
                };
                check(target, &call, manner, 30, report)?;
            }
        }
        // All values 1 and all weights equal: any loss in the sums would show.
        for t in [1, 40] {
            let dims = Dims {
                t,
                s: 4099,
                ..Dims::square(1, 1, 0, 8)
            };
            let mut inputs = Inputs::new(dims, Fill::Normal, 31, dtype);
            inputs.q.fill(0.);
            inputs.v.fill(1.);
            let got = target.forward(&Call::new(dims), &inputs, Manner::of(dtype), report)?;
            report.check(got.out.iter().all(|x| *x == 1.), || {
                "a mean of ones is not 1".into()
            });
            let worst = got
                .lse
                .iter()
                .map(|x| (x - 4099f64.ln()).abs())
                .fold(0., f64::max);
            report.compare("lse of 4099 equal scores", worst, 2e-6);
        }
    }
    Ok(())
}

/// Shards of the keys, merged by their log-sum-exps.
fn merged_splits(target: &Target, report: &mut Report) -> Result<()> {
    for (t, s) in [(1, 1), (1, 5), (1, 4097), (30, 333)] {
        for dtype in [DType::BF16, DType::F32] {
            for (name, score, manner) in families(2, 64, dtype) {
                let dims = Dims {
                    t,
                    s,
                    ..Dims::square(2, 1, 0, 64)
                };
                let queries = consecutive((s - 1) as i64, t);
                let call = |from: usize, to: usize| {
                    Call::causal(Dims {
                        s: to - from,
                        ..dims
                    })
                    .with_score(score.clone())
                    .with_positions(queries.clone(), consecutive(from as i64, to - from))
                };
                let inputs = Inputs::new(dims, Fill::Normal, 34, dtype);
                let whole = target.check(&call(0, s), &inputs, manner, report)?;
                let part = s.div_ceil(8);
                let mut parts: Vec<Forward> = Vec::new();
                for from in (0..s).step_by(part) {
                    let to = (from + part).min(s);
                    let own = Inputs {
                        k: tokens(&inputs.k, s, 64, from, to),
                        v: tokens(&inputs.v, s, 64, from, to),
                        ..inputs.clone()
                    };
                    parts.push(target.forward(&call(from, to), &own, manner, report)?);
                }
                for (row, lse) in whole.lse.iter().enumerate() {
                    let merged = parts.iter().map(|p| (p.lse[row] - lse).exp()).sum::<f64>();
                    report.compare(format!("{name} {dtype:?} lse"), merged.ln().abs(), 1e-4);
                    for c in [0, 63] {
                        let at = row * 64 + c;
                        let mean: f64 = parts
                            .iter()
                            .map(|p| (p.lse[row] - lse).exp() * p.out[at])
                            .sum();
                        let allowed = 8. * unit_roundoff(dtype) + 1e-5;
                        report.compare(
                            format!("{name} {dtype:?} out"),
                            (mean - whole.out[at]).abs(),
                            allowed,
                        );
                    }
                }
            }
        }
    }
    Ok(())
}

fn alibi_slope_counts(target: &Target, report: &mut Report) -> Result<()> {
    for h in [1, 3, 5, 6, 7, 12, 40] {
        for (t, s) in [(70, 70), (1, 300)] {
            for dtype in [DType::BF16, DType::F32] {
                let dims = Dims {
                    t,
                    s,
                    ..Dims::square(h, 1, 0, 64)
                };
                let call = Call::causal(dims).with_score(Score::LinearBias {
                    slopes: alibi_slopes(h).into(),
                });
                check(target, &call, Manner::of(dtype), h as u64, report)?;
            }
        }
    }
    // Any slopes: none, upwards, steep.
    for slopes in [[0., 0.], [-0.1, 0.1], [30., 1e-6]] {
        let dims = Dims::square(2, 1, 100, 64);
        let call = Call::new(dims).with_score(Score::LinearBias {
            slopes: slopes.into(),
        });
        check(target, &call, Manner::of(DType::BF16), 4, report)?;
        check(target, &call, Manner::of(DType::F32), 4, report)?;
    }
    Ok(())
}

fn symmetric_alibi(target: &Target, report: &mut Report) -> Result<()> {
    for (b, n) in [(1, 7), (2, 7), (3, 40), (2, 150)] {
        for dtype in [DType::BF16, DType::F32] {
            let dims = Dims {
                b,
                ..Dims::square(2, 1, n, 16)
            };
            let call = Call::new(dims).with_score(linear_bias(2));
            check(target, &call, Manner::of(dtype), 11, report)?;
            // With q = 0 a row's log-sum-exp depends on its distance from either end alone.
            let mut inputs = Inputs::new(dims, Fill::Normal, 11, dtype);
            inputs.q.fill(0.);
            let got = target.check(&call, &inputs, Manner::of(dtype), report)?;
            for row in got.lse.chunks(n) {
                let turned: Vec<f64> = row.iter().rev().copied().collect();
                close(report, "lse from the other end", row, &turned, 2e-6);
            }
        }
    }
    Ok(())
}

fn packed_alibi(target: &Target, report: &mut Report) -> Result<()> {
    for lengths in [vec![5usize, 7], vec![60, 1, 70, 64], vec![0, 33, 0, 97]] {
        let places: Rows = vec![lengths.iter().flat_map(|n| 0..*n as i64).collect()];
        let documents: Rows = vec![lengths
            .iter()
            .enumerate()
            .flat_map(|(document, n)| vec![document as i64; *n])
            .collect()];
        let dims = Dims::square(4, 2, places[0].len(), 64);
        for dtype in [DType::BF16, DType::F32] {
            for (name, score, manner) in families(4, 64, dtype) {
                let mut call = Call::causal(dims)
                    .with_score(score)
                    .with_positions(places.clone(), places.clone());
                call.segments = Some((documents.clone(), documents.clone()));
                let inputs = Inputs::new(dims, Fill::Normal, 12, dtype);
                let want = target.check(&call, &inputs, manner, report)?;
                let packed = Positions::packed(std::slice::from_ref(&lengths), target.device())?;
                let spec = AttendSpec {
                    q_positions: Some(packed),
                    k_positions: None,
                    ..crate::target::spec(&call, manner)?
                };
                let [q, k, v] = target.operands(&call, &inputs, manner)?;
                let out = values(&attend(&q, &k, &v, &spec)?)?;
                report.check(out == want.out, || {
                    format!("{name} {dtype:?}: positions on the device differ")
                });
                // Without segments documents see each other, by their own positions.
                call.segments = None;
                target.check(&call, &inputs, manner, report)?;
            }
        }
    }
    Ok(())
}

fn alibi_last_tile(target: &Target, report: &mut Report) -> Result<()> {
    for s in [63, 64, 65, 127, 128, 129] {
        for causal in [true, false] {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                for d in [16, 64, 128] {
                    let call = Call {
                        causal,
                        ..Call::new(Dims::square(3, 1, s, d)).with_score(linear_bias(3))
                    };
                    check(target, &call, Manner::of(dtype), 13, report)?;
                }
            }
        }
    }
    Ok(())
}

/// Beyond 2^24 turns f32 holds no fraction of a turn: the phase is anything, but a cosine it stays.
fn bounded_phase(target: &Target, report: &mut Report) -> Result<()> {
    for t in [9, 40] {
        let dims = Dims {
            t,
            s: 131,
            ..Dims::square(2, 1, 0, 16)
        };
        for dtype in DTYPES {
            let inputs = Inputs::new(dims, Fill::Normal, 48, dtype);
            let largest = inputs
                .q
                .chunks(16)
                .flat_map(|q| {
                    inputs.k.chunks(16).map(|k| {
                        q[..8]
                            .iter()
                            .zip(&k[..8])
                            .map(|(q, k)| (q * k).abs())
                            .sum::<f64>()
                    })
                })
                .fold(0., f64::max)
                / 8f64.sqrt();
            let values = inputs.v.iter().fold(0f64, |max, x| max.max(x.abs()));
            for phase_scale in [1e5, 1e8, 1e12, 1e20, -1e30] {
                for alpha in [0.1, 1., 3.] {
                    let call = Call::new(dims).with_score(Score::Phase {
                        amp_dim: 8,
                        alpha,
                        phase_scale: Some(phase_scale),
                    });
                    for manner in [Manner::of(dtype), Manner::of(dtype).fast()] {
                        let got = target.forward(&call, &inputs, manner, report)?;
                        let what = format!("{manner:?} {phase_scale} {alpha}");
                        let bound = largest * (1. + 1e-4) + 131f64.ln() + 1e-4;
                        let lse = got.lse.iter().fold(0f64, |max, x| match x.is_nan() {
                            true => f64::INFINITY,
                            false => max.max(x.abs()),
                        });
                        report.compare(format!("lse, {what}"), lse, bound);
                        let out = got.out.iter().all(|x| x.abs() <= values * 1.01);
                        report.check(out, || format!("an average beyond its values, {what}"));
                    }
                }
            }
        }
    }
    Ok(())
}

fn phase_at_distance_zero(target: &Target, report: &mut Report) -> Result<()> {
    for (t, s) in [(2, 50), (70, 70)] {
        for dtype in DTYPES {
            let dims = Dims {
                t,
                s,
                ..Dims::square(2, 1, 0, 64)
            };
            let inputs = Inputs::new(dims, Fill::Normal, 42, dtype);
            let amplitude = Inputs {
                q: inputs
                    .q
                    .iter()
                    .enumerate()
                    .map(|(i, x)| if i % 64 < 32 { *x } else { 0. })
                    .collect(),
                ..inputs.clone()
            };
            let dot = Call {
                scale: Some(1. / 32f64.sqrt()),
                ..Call::new(dims)
            };
            let want = target.check(&dot, &amplitude, Manner::of(dtype), report)?;
            for alpha in [1e-3, 0.1, 1.] {
                let score = Score::Phase {
                    amp_dim: 32,
                    alpha,
                    phase_scale: None,
                };
                let call = Call::new(dims)
                    .with_score(score)
                    .with_positions(vec![vec![7; t]], vec![vec![7; s]]);
                for manner in [Manner::of(dtype), Manner::of(dtype).fast()] {
                    let got = target.check(&call, &inputs, manner, report)?;
                    let tolerance = 4. * unit_roundoff(dtype) + 2e-6;
                    close(report, "out", &got.out, &want.out, tolerance);
                }
            }
        }
    }
    Ok(())
}

fn far_phase(target: &Target, report: &mut Report) -> Result<()> {
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        for (t, s, d) in [(4, 60, 16), (40, 60, 16), (40, 60, 64)] {
            let queries: Rows = vec![(0..t as i64)
                .map(|i| 4_000_000_000 + i * i * 1000)
                .collect()];
            let keys: Rows = vec![(0..s as i64)
                .map(|j| {
                    if j % 3 == 0 {
                        j
                    } else {
                        4_000_000_000 - j * 777
                    }
                })
                .collect()];
            let dims = Dims {
                t,
                s,
                ..Dims::square(2, 1, 0, d)
            };
            for (_, score, manner) in families(2, d, dtype) {
                let call = Call::causal(dims)
                    .with_score(score)
                    .with_positions(queries.clone(), keys.clone());
                check(target, &call, manner, 44, report)?;
            }
        }
    }
    // Distances beyond any table.
    for dtype in [DType::F32, DType::BF16] {
        for (q, k) in [
            (3_000_000i64, 0i64),
            (2_097_100, 0),
            (40_000_000, 39_000_000),
        ] {
            for t in [3, 70] {
                let dims = Dims {
                    t,
                    s: 140,
                    ..Dims::square(2, 1, 0, 64)
                };
                for manner in [Manner::of(dtype), Manner::of(dtype).fast()] {
                    let call = Call::causal(dims)
                        .with_score(phase(32))
                        .with_positions(consecutive(q, t), consecutive(k, 140));
                    check(target, &call, manner.spans(), 45, report)?;
                }
            }
        }
    }
    Ok(())
}

fn positions_beyond_f32(target: &Target, report: &mut Report) -> Result<()> {
    for start in [1i64 << 24, 1 << 31, (1 << 52) - 300] {
        for n in [5, 150] {
            let dims = Dims::square(2, 1, n, 64);
            for dtype in [DType::F32, DType::BF16] {
                for (name, score, manner) in families(2, 64, dtype) {
                    let near = Call::causal(dims).with_score(score);
                    let far = near
                        .clone()
                        .with_positions(consecutive(start, n), consecutive(start, n));
                    let inputs = Inputs::new(dims, Fill::Normal, 45, dtype);
                    let want = target.check(&near, &inputs, manner, report)?;
                    for manner in [manner, manner.spans()] {
                        let got = target.forward(&far, &inputs, manner, report)?;
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

/// TAPE's values are [v | state]: both halves come out as they would on their own.
fn tape_halves(target: &Target, report: &mut Report) -> Result<()> {
    for d in [16, 64, 96, 128] {
        for (t, s) in [(130, 130), (3, 130)] {
            for dtype in [DType::BF16, DType::F16, DType::F32] {
                let dims = Dims {
                    t,
                    s,
                    e: 2 * d,
                    ..Dims::square(4, 2, 0, d)
                };
                let inputs = Inputs::new(dims, Fill::Normal, 51, dtype);
                let both = target.check(&Call::causal(dims), &inputs, Manner::of(dtype), report)?;
                for half in 0..2 {
                    let part = |x: &[f64]| -> Vec<f64> {
                        x.chunks(2 * d)
                            .flat_map(|row| row[half * d..][..d].to_vec())
                            .collect()
                    };
                    let own = Inputs {
                        v: part(&inputs.v),
                        ..inputs.clone()
                    };
                    let call = Call::causal(Dims { e: d, ..dims });
                    let alone = target.check(&call, &own, Manner::of(dtype), report)?;
                    let tolerance = 4. * unit_roundoff(dtype) + 1e-6;
                    close(report, "half", &part(&both.out), &alone.out, tolerance);
                }
            }
        }
    }
    Ok(())
}

/// A visible NaN is the caller's and must show; in a value it stays in its column, and with its batch row and head.
fn visible_nan(target: &Target, report: &mut Report) -> Result<()> {
    for t in [3, 40] {
        for dtype in [DType::BF16, DType::F32] {
            let dims = Dims {
                b: 2,
                ..Dims::square(2, 2, t, 64)
            };
            for (name, score, manner) in families(2, 64, dtype) {
                let call = Call::causal(dims).with_score(score);
                let clean = Inputs::new(dims, Fill::Normal, 52, dtype);
                let want = target.forward(&call, &clean, manner, report)?;
                let mut inputs = clean.clone();
                inputs.k[..64].fill(f64::NAN);
                let got = target.forward(&call, &inputs, manner, report)?;
                let (hit, spared) = got.out.split_at(t * 64);
                report.check(hit.iter().all(|x| x.is_nan()), || {
                    format!("{name}: NaN of a key")
                });
                report.check(got.lse[..t].iter().all(|x| x.is_nan()), || {
                    format!("{name}: NaN of a key in the log-sum-exp")
                });
                report.check(spared == &want.out[t * 64..], || {
                    format!("{name} {dtype:?}: NaN leaks into other heads")
                });
            }
        }
    }
    Ok(())
}

/// Scores of −∞ fill whole tiles, in which every key is visible.
fn lowest_scores(target: &Target, report: &mut Report) -> Result<()> {
    for dtype in [DType::BF16, DType::F32] {
        for t in [4, 200] {
            let dims = Dims {
                t,
                ..Dims::square(1, 1, 200, 64)
            };
            let inputs = Inputs::new(dims, Fill::Normal, 61, dtype);
            let steep = Call::new(dims).with_score(Score::LinearBias {
                slopes: vec![1e37].into(),
            });
            target.check(&steep, &inputs, Manner::of(dtype), report)?;
            let mut low = inputs;
            low.q.iter_mut().step_by(64).for_each(|x| *x = 1.);
            for key in 96..200 {
                low.k[key * 64] = f64::NEG_INFINITY;
            }
            target.check(&Call::new(dims), &low, Manner::of(dtype), report)?;
        }
    }
    Ok(())
}

/// A query that sees nothing gives 0 whatever the values of its tile are.
fn unseen_infinity(target: &Target, report: &mut Report) -> Result<()> {
    for dtype in DTYPES {
        for t in [5, 20] {
            for far in [f64::INFINITY, f64::NAN] {
                let dims = Dims::square(1, 1, t, 64);
                let places = vec![(0..t as i64).map(|i| i - 1).collect::<Vec<_>>()];
                let keys = vec![(0..t as i64).collect::<Vec<_>>()];
                for (name, score, manner) in families(1, 64, dtype) {
                    let call = Call::causal(dims)
                        .with_score(score)
                        .with_positions(places.clone(), keys.clone());
                    let mut inputs = Inputs::new(dims, Fill::Normal, 62, dtype);
                    inputs.v[2 * 64 + 3] = far;
                    let got = target.forward(&call, &inputs, manner, report)?;
                    report.check(got.out[..64].iter().all(|x| *x == 0.), || {
                        format!("{name} {dtype:?} of {t}: {far} in a row that sees nothing")
                    });
                    report.check(got.lse[0] == f64::NEG_INFINITY, || {
                        format!("{name} {dtype:?} of {t}: the log-sum-exp of nothing")
                    });
                }
            }
        }
    }
    Ok(())
}

fn empty_calls(target: &Target, report: &mut Report) -> Result<()> {
    for dims in [
        Dims {
            t: 0,
            s: 5,
            ..Dims::square(2, 1, 0, 64)
        },
        Dims {
            t: 5,
            s: 0,
            ..Dims::square(2, 1, 0, 64)
        },
        Dims {
            t: 50,
            s: 0,
            ..Dims::square(2, 1, 0, 64)
        },
        Dims {
            b: 0,
            ..Dims::square(2, 1, 3, 64)
        },
    ] {
        for dtype in DTYPES {
            for (_, score, manner) in families(2, 64, dtype) {
                check(
                    target,
                    &Call::causal(dims).with_score(score),
                    manner,
                    53,
                    report,
                )?;
            }
        }
    }
    Ok(())
}
