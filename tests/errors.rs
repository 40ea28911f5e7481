//! Bad input is refused with a text that names it; no input makes attention panic.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_posenc::{attend, attend_with_lse, plan, AttendSpec, Backend, Positions, Score};

const CPU: Device = Device::Cpu;
const BACKENDS: [Backend; 3] = [Backend::Auto, Backend::Dense, Backend::Fused];

fn zeros(shape: &[usize]) -> Result<Tensor> {
    Tensor::zeros(shape, DType::F32, &CPU)
}

/// The call is refused on every path, and each refusal holds every one of `parts`.
fn refused(q: &Tensor, k: &Tensor, v: &Tensor, spec: &AttendSpec, parts: &[&str]) {
    for backend in BACKENDS {
        let spec = spec.clone().with_backend(backend);
        for result in [
            attend(q, k, v, &spec),
            attend_with_lse(q, k, v, &spec).map(|result| result.out),
        ] {
            let error = match result {
                Ok(out) => panic!("{backend:?} accepted {spec:?} and gave {out:?}"),
                Err(error) => error.to_string(),
            };
            for part in parts {
                assert!(error.contains(part), "no {part:?} in: {error}");
            }
        }
    }
}

/// q, k and v of one head, 4 queries, 6 keys, width 8.
fn small() -> Result<[Tensor; 3]> {
    Ok([
        zeros(&[1, 1, 4, 8])?,
        zeros(&[1, 1, 6, 8])?,
        zeros(&[1, 1, 6, 8])?,
    ])
}

fn refused_spec(spec: AttendSpec, parts: &[&str]) -> Result<()> {
    let [q, k, v] = small()?;
    refused(&q, &k, &v, &spec, parts);
    Ok(())
}

fn refused_shapes(q: &[usize], k: &[usize], v: &[usize], parts: &[&str]) -> Result<()> {
    refused(
        &zeros(q)?,
        &zeros(k)?,
        &zeros(v)?,
        &AttendSpec::causal(),
        parts,
    );
    Ok(())
}

// ---- Shapes ------------------------------------------------------------------------------------------------

#[test]
fn other_ranks_are_refused_by_name_and_shape() -> Result<()> {
    let good = [1, 2, 3, 4];
    for bad in [&[][..], &[5], &[2, 3, 4], &[1, 1, 2, 3, 4]] {
        let shape = format!("{bad:?}");
        let shape = shape.trim_matches(['[', ']']);
        refused_shapes(bad, &good, &good, &["q must be", shape])?;
        refused_shapes(&good, bad, &good, &["k must be", shape])?;
        refused_shapes(&good, &good, bad, &["v must be", shape])?;
    }
    Ok(())
}

#[test]
fn other_batches_are_refused_with_all_shapes() -> Result<()> {
    let shapes = ["[2, 1, 3, 4]", "[3, 1, 3, 4]"];
    refused_shapes(&[2, 1, 3, 4], &[3, 1, 3, 4], &[2, 1, 3, 4], &shapes)?;
    refused_shapes(&[2, 1, 3, 4], &[2, 1, 3, 4], &[3, 1, 3, 4], &shapes)?;
    // A batch of 1 does not stand for a batch of 2.
    refused_shapes(
        &[2, 1, 3, 4],
        &[1, 1, 3, 4],
        &[1, 1, 3, 4],
        &["batches differ", "2", "1"],
    )
}

#[test]
fn heads_that_do_not_divide_are_refused() -> Result<()> {
    refused_shapes(
        &[1, 4, 3, 8],
        &[1, 3, 3, 8],
        &[1, 3, 3, 8],
        &["k has 3 heads", "divide q's 4", "[1, 4, 3, 8]"],
    )?;
    refused_shapes(
        &[1, 2, 3, 8],
        &[1, 4, 3, 8],
        &[1, 4, 3, 8],
        &["k has 4 heads", "divide q's 2"],
    )?;
    refused_shapes(
        &[1, 2, 3, 8],
        &[1, 0, 3, 8],
        &[1, 0, 3, 8],
        &["k has 0 heads"],
    )
}

#[test]
fn keys_and_values_of_other_heads_or_lengths_are_refused() -> Result<()> {
    refused_shapes(
        &[1, 4, 3, 8],
        &[1, 4, 3, 8],
        &[1, 2, 3, 8],
        &["k and v", "[1, 4, 3, 8]", "[1, 2, 3, 8]"],
    )?;
    refused_shapes(
        &[1, 4, 3, 8],
        &[1, 4, 3, 8],
        &[1, 4, 5, 8],
        &["k and v", "[1, 4, 5, 8]"],
    )
}

#[test]
fn widths_that_differ_or_vanish_are_refused() -> Result<()> {
    refused_shapes(
        &[1, 1, 3, 8],
        &[1, 1, 3, 7],
        &[1, 1, 3, 8],
        &["width", "8 and 7", "[1, 1, 3, 7]"],
    )?;
    refused_shapes(
        &[1, 1, 3, 0],
        &[1, 1, 3, 0],
        &[1, 1, 3, 8],
        &["at least 1", "[1, 1, 3, 0]"],
    )?;
    refused_shapes(
        &[1, 1, 3, 8],
        &[1, 1, 3, 8],
        &[1, 1, 3, 0],
        &["at least 1", "[1, 1, 3, 0]"],
    )
}

// ---- Dtypes ------------------------------------------------------------------------------------------------

#[test]
fn mixed_dtypes_are_refused_by_name() -> Result<()> {
    let [q, k, v] = small()?;
    let spec = AttendSpec::causal();
    for (dtype, name) in [
        (DType::F64, "F64"),
        (DType::BF16, "BF16"),
        (DType::F16, "F16"),
        (DType::U32, "U32"),
    ] {
        refused(&q.to_dtype(dtype)?, &k, &v, &spec, &["F32", name]);
        refused(&q, &k.to_dtype(dtype)?, &v, &spec, &["F32", name]);
        refused(&q, &k, &v.to_dtype(dtype)?, &spec, &["F32", name]);
    }
    Ok(())
}

#[test]
fn integer_dtypes_are_refused_by_name() -> Result<()> {
    let [q, k, v] = small()?;
    for (dtype, name) in [(DType::U8, "U8"), (DType::U32, "U32"), (DType::I64, "I64")] {
        let cast = |x: &Tensor| x.to_dtype(dtype);
        refused(
            &cast(&q)?,
            &cast(&k)?,
            &cast(&v)?,
            &AttendSpec::causal(),
            &[name, "not supported"],
        );
    }
    Ok(())
}

// ---- Parameters --------------------------------------------------------------------------------------------

fn phase(amp_dim: usize, alpha: f64, phase_scale: Option<f64>) -> AttendSpec {
    AttendSpec::causal().with_score(Score::Phase {
        amp_dim,
        alpha,
        phase_scale,
    })
}

fn slopes(slopes: &[f64]) -> AttendSpec {
    AttendSpec::causal().with_score(Score::LinearBias {
        slopes: slopes.into(),
    })
}

#[test]
fn amplitude_parts_of_nothing_or_everything_are_refused() -> Result<()> {
    for amp_dim in [0, 8, 9, usize::MAX] {
        let value = format!("amp_dim {amp_dim}");
        refused_spec(phase(amp_dim, 0.1, None), &[&value, "8", "[1, 1, 4, 8]"])?;
    }
    Ok(())
}

#[test]
fn exponents_not_above_zero_or_not_finite_are_refused() -> Result<()> {
    for (alpha, value) in [
        (0., "alpha 0"),
        (-0.1, "alpha -0.1"),
        (f64::NAN, "alpha NaN"),
        (f64::INFINITY, "alpha inf"),
        (f64::NEG_INFINITY, "alpha -inf"),
    ] {
        refused_spec(phase(4, alpha, None), &[value])?;
    }
    Ok(())
}

#[test]
fn scales_that_are_not_finite_are_refused() -> Result<()> {
    for (scale, value) in [
        (f64::NAN, "NaN"),
        (f64::INFINITY, "inf"),
        (f64::NEG_INFINITY, "-inf"),
    ] {
        refused_spec(phase(4, 0.1, Some(scale)), &["phase_scale", value])?;
        let spec = AttendSpec {
            scale: Some(scale),
            ..AttendSpec::causal()
        };
        refused_spec(spec.clone(), &["scale", value])?;
        refused_spec(
            AttendSpec {
                scale: Some(scale),
                ..phase(4, 0.1, None)
            },
            &["scale", value],
        )?;
    }
    Ok(())
}

#[test]
fn slopes_for_another_number_of_heads_are_refused() -> Result<()> {
    for wrong in [&[][..], &[0.5, 0.25]] {
        let count = format!("{} slopes for 1 query heads", wrong.len());
        refused_spec(slopes(wrong), &[&count, "[1, 1, 4, 8]"])?;
    }
    // As many slopes as key heads, not as query heads.
    refused(
        &zeros(&[1, 4, 3, 8])?,
        &zeros(&[1, 2, 3, 8])?,
        &zeros(&[1, 2, 3, 8])?,
        &slopes(&[0.5, 0.25]),
        &["2 slopes for 4 query heads"],
    );
    Ok(())
}

#[test]
fn slopes_that_are_not_finite_are_refused() -> Result<()> {
    for (slope, value) in [
        (f64::NAN, "slope NaN"),
        (f64::INFINITY, "slope inf"),
        (f64::NEG_INFINITY, "slope -inf"),
    ] {
        refused_spec(slopes(&[slope]), &[value])?;
    }
    Ok(())
}

#[test]
fn parameters_that_overflow_the_accumulator_are_refused_where_they_do() -> Result<()> {
    // refused_spec asks with f32; in f64 the same numbers are fine.
    refused_spec(slopes(&[1e300]), &["slope", "f32"])?;
    refused_spec(phase(4, 0.1, Some(-1e39)), &["phase_scale", "f32"])?;
    let scaled = AttendSpec {
        scale: Some(1e39),
        ..AttendSpec::causal()
    };
    refused_spec(scaled.clone(), &["scale", "f32"])?;
    let x = zeros(&[1, 1, 4, 8])?.to_dtype(DType::F64)?;
    attend(&x, &x, &x, &scaled)?;
    Ok(())
}

#[test]
fn phase_whose_distances_overflow_is_refused() -> Result<()> {
    // 5^100 is beyond f32, and 6 keys stand up to 5 tokens apart from a query.
    refused_spec(phase(4, 100., None), &["distance 5", "100"])?;
    let x = zeros(&[1, 1, 4, 8])?.to_dtype(DType::F64)?;
    attend(&x, &x, &x, &phase(4, 100., None))?;
    Ok(())
}

#[test]
fn window_of_nothing_is_refused() -> Result<()> {
    for causal in [true, false] {
        refused_spec(
            AttendSpec {
                window: Some(0),
                causal,
                ..AttendSpec::causal()
            },
            &["window 0"],
        )?;
    }
    Ok(())
}

// ---- Positions ---------------------------------------------------------------------------------------------

fn span(start: i64, len: usize) -> Option<Positions> {
    Some(Positions::Span { start, len })
}

fn ids(rows: usize, len: usize) -> Result<Tensor> {
    Tensor::arange(0i64, (rows * len) as i64, &CPU)?.reshape((rows, len))
}

fn at(q: Option<Positions>, k: Option<Positions>) -> AttendSpec {
    AttendSpec {
        q_positions: q,
        k_positions: k,
        ..AttendSpec::causal()
    }
}

fn explicit(pos: Tensor) -> Option<Positions> {
    Some(Positions::Explicit { pos, segment: None })
}

#[test]
fn positions_of_another_length_are_refused_with_both_lengths() -> Result<()> {
    let lengths = ["T = 4", "S = 6"];
    refused_spec(at(span(0, 5), span(0, 6)), &lengths)?;
    refused_spec(at(span(0, 4), span(0, 5)), &lengths)?;
    refused_spec(at(span(0, 6), span(0, 4)), &lengths)?;
    refused_spec(at(span(0, 0), span(0, 6)), &lengths)?;
    refused_spec(at(explicit(ids(1, 3)?), span(0, 6)), &lengths)?;
    refused_spec(at(span(0, 4), explicit(ids(1, 7)?)), &lengths)
}

#[test]
fn positions_for_one_side_only_are_refused_unless_lengths_agree() -> Result<()> {
    refused_spec(at(span(0, 4), None), &["T = 4", "S = 6", "both"])?;
    refused_spec(at(None, span(0, 6)), &["T = 4", "S = 6", "both"])?;
    let [q, _, _] = small()?;
    for spec in [at(span(3, 4), None), at(None, span(3, 4))] {
        for backend in [Backend::Dense, Backend::Auto] {
            attend(&q, &q, &q, &spec.clone().with_backend(backend))?;
        }
        // One side given for both is checked as such.
        let [_, k, _] = small()?;
        refused(&k, &k, &k, &spec, &["T = 6", "S = 6", "4"]);
    }
    Ok(())
}

#[test]
fn positions_of_another_shape_or_dtype_are_refused() -> Result<()> {
    let shapes = [
        ids(1, 4)?.flatten_all()?,
        ids(1, 4)?.unsqueeze(0)?,
        Tensor::new(0i64, &CPU)?,
    ];
    for pos in shapes {
        assert!(Positions::explicit(pos.clone(), None).is_err());
        refused_spec(at(explicit(pos), span(0, 6)), &[])?;
    }
    for (dtype, name) in [
        (DType::U32, "u32"),
        (DType::F32, "f32"),
        (DType::F64, "f64"),
        (DType::U8, "u8"),
    ] {
        let pos = ids(1, 4)?.to_dtype(dtype)?;
        assert!(Positions::explicit(pos.clone(), None).is_err());
        refused_spec(at(explicit(pos), span(0, 6)), &["i64", name, "1, 4"])?;
    }
    Ok(())
}

#[test]
fn position_rows_other_than_one_or_the_batch_are_refused() -> Result<()> {
    let q = zeros(&[3, 1, 4, 8])?;
    for rows in [0, 2, 4] {
        let pos = ids(rows, 4)?;
        let parts = [format!("{rows} rows"), "batch of 3".to_string()];
        let parts = parts.each_ref().map(String::as_str);
        refused(&q, &q, &q, &at(explicit(pos.clone()), None), &parts);
        refused(&q, &q, &q, &at(span(0, 4), explicit(pos)), &parts);
    }
    for rows in [1, 3] {
        for backend in BACKENDS {
            let spec = at(explicit(ids(rows, 4)?), None).with_backend(backend);
            assert_eq!(attend(&q, &q, &q, &spec)?.dims(), [3, 1, 4, 8]);
        }
    }
    Ok(())
}

#[test]
fn positions_beyond_exact_distances_are_refused() -> Result<()> {
    let limit = 1i64 << 53;
    for (start, value) in [
        (limit - 2, limit + 1),
        (limit + 5, limit + 5),
        (-limit - 9, -limit - 9),
        (i64::MIN, i64::MIN),
    ] {
        let value = value.to_string();
        refused_spec(at(span(start, 4), span(0, 6)), &[&value, "2^53"])?;
        let pos = (ids(1, 6)? + start as f64)?;
        let first = pos.flatten_all()?.to_vec1::<i64>()?;
        if first.iter().any(|p| *p > limit || *p < -limit) {
            refused_spec(at(span(0, 4), explicit(pos)), &["2^53"])?;
        }
    }
    refused_spec(at(span(i64::MAX - 1, 4), span(0, 6)), &["overflows"])?;
    let [q, k, v] = small()?;
    for backend in BACKENDS {
        let spec = at(span(limit - 3, 4), span(limit - 5, 6)).with_backend(backend);
        attend(&q, &k, &v, &spec)?;
    }
    Ok(())
}

#[test]
fn segments_on_one_side_are_refused() -> Result<()> {
    let with = |len: usize| -> Result<Option<Positions>> {
        Ok(Some(Positions::explicit(ids(1, len)?, Some(ids(1, len)?))?))
    };
    refused_spec(at(with(4)?, span(0, 6)), &["segments"])?;
    refused_spec(at(span(0, 4), with(6)?), &["segments"])?;
    refused_spec(at(with(4)?, explicit(ids(1, 6)?)), &["segments"])
}

#[test]
fn segments_of_another_shape_or_dtype_are_refused() -> Result<()> {
    for segment in [
        ids(1, 5)?,
        ids(2, 2)?,
        ids(1, 4)?.flatten_all()?,
        ids(1, 4)?.to_dtype(DType::U32)?,
    ] {
        let error = match Positions::explicit(ids(1, 4)?, Some(segment.clone())) {
            Ok(positions) => panic!("accepted {positions:?}"),
            Err(error) => error.to_string(),
        };
        assert!(
            error.contains("[1, 4]") && error.contains("segment"),
            "{error}"
        );
        let positions = Positions::Explicit {
            pos: ids(1, 4)?,
            segment: Some(segment),
        };
        refused_spec(at(Some(positions), span(0, 6)), &["segment", "[1, 4]"])?;
    }
    Ok(())
}

#[test]
fn packing_and_padding_of_no_rows_are_refused() {
    assert!(Positions::packed(&[], &CPU).is_err());
    assert!(Positions::left_padded(&[], &CPU).is_err());
}

#[test]
fn plan_refuses_bad_parameters_too() -> Result<()> {
    let [q, k, v] = small()?;
    for spec in [
        phase(0, 0.1, None),
        phase(4, -1., None),
        slopes(&[]),
        AttendSpec {
            window: Some(0),
            ..AttendSpec::causal()
        },
    ] {
        assert!(plan(&q, &k, &v, &spec).is_err());
    }
    Ok(())
}

// ---- Nothing at all ----------------------------------------------------------------------------------------

/// The three scores for `h` heads of width 4.
fn scores(h: usize) -> [Score; 3] {
    [
        Score::Dot,
        Score::LinearBias {
            slopes: vec![0.5; h].into(),
        },
        Score::Phase {
            amp_dim: 2,
            alpha: 0.1,
            phase_scale: None,
        },
    ]
}

/// Runs forward and backward over shapes of which some are 0, and gives values and log-sum-exp.
fn run_empty([b, h, g, t, s]: [usize; 5], spec: &AttendSpec, dtype: DType) -> Result<[Tensor; 2]> {
    let ones = |shape| Var::ones(shape, dtype, &CPU);
    let (q, k, v) = (
        ones((b, h, t, 4))?,
        ones((b, g, s, 4))?,
        ones((b, g, s, 3))?,
    );
    let result = attend_with_lse(&q, &k, &v, spec)?;
    assert_eq!(result.out.dims(), [b, h, t, 3]);
    assert_eq!(result.out.dtype(), dtype);
    assert_eq!(result.lse.dims(), [b, h, t]);
    assert_eq!(attend(&q, &k, &v, spec)?.dims(), [b, h, t, 3]);
    let detached = attend(&q.detach(), &k.detach(), &v.detach(), spec)?;
    assert_eq!(detached.dims(), [b, h, t, 3]);
    // Through a non-leaf, so that a gradient which is never populated would show.
    let doubled = attend(&(&*q * 2.)?, &(&*k * 2.)?, &(&*v * 2.)?, spec)?;
    let loss = if doubled.elem_count() == 0 {
        doubled.flatten_all()?.sum(0)?
    } else {
        doubled.sum_all()?
    };
    let gradients = loss.backward()?;
    for x in [&q, &k, &v] {
        if let Some(gradient) = gradients.get(x) {
            assert_eq!(gradient.dims(), x.dims());
            assert!(gradient
                .to_dtype(DType::F64)?
                .flatten_all()?
                .to_vec1::<f64>()?
                .iter()
                .all(|x| x.is_finite()));
        }
    }
    Ok([result.out, result.lse.to_dtype(DType::F64)?])
}

#[test]
fn empty_dimensions_give_empty_results_or_zeros() -> Result<()> {
    for dims in [
        [0, 2, 1, 3, 3],
        [1, 2, 1, 0, 3],
        [1, 2, 1, 3, 0],
        [1, 2, 1, 0, 0],
        [0, 2, 1, 0, 0],
        [2, 0, 1, 3, 3],
        [2, 0, 1, 0, 3],
        [2, 0, 1, 3, 0],
        [0, 0, 1, 0, 0],
    ] {
        for score in scores(dims[1]) {
            for backend in BACKENDS {
                for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
                    for causal in [true, false] {
                        let spec = AttendSpec {
                            causal,
                            window: Some(2),
                            ..AttendSpec::causal()
                        };
                        let spec = spec.with_score(score.clone()).with_backend(backend);
                        let [out, lse] = run_empty(dims, &spec, dtype)?;
                        let out = out.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
                        assert!(out.iter().all(|x| *x == 0.));
                        let lse = lse.flatten_all()?.to_vec1::<f64>()?;
                        assert!(lse.iter().all(|x| *x == f64::NEG_INFINITY));
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn empty_explicit_positions_do_not_panic() -> Result<()> {
    let positions = |rows: usize, len: usize, segments: bool| -> Result<Positions> {
        Positions::explicit(
            ids(rows, len)?,
            segments.then(|| ids(rows, len)).transpose()?,
        )
    };
    for segments in [false, true] {
        for backend in BACKENDS {
            for (rows, b, t, s) in [
                (0, 0, 3, 5),
                (1, 0, 3, 5),
                (1, 2, 0, 5),
                (1, 2, 3, 0),
                (2, 2, 0, 0),
                (0, 0, 0, 0),
            ] {
                let spec = AttendSpec::causal()
                    .with_positions(positions(rows, t, segments)?, positions(rows, s, segments)?)
                    .with_backend(backend);
                let [out, _] = run_empty([b, 2, 1, t, s], &spec, DType::F32)?;
                assert_eq!(out.dims(), [b, 2, t, 3]);
            }
        }
    }
    Ok(())
}

#[test]
fn empty_views_of_a_buffer_do_not_panic() -> Result<()> {
    let q = Tensor::ones((2, 2, 4, 6), DType::F32, &CPU)?;
    // The view starts at the very end of the buffer.
    let none = q.narrow(2, 4, 0)?;
    for backend in BACKENDS {
        let spec = AttendSpec::bidirectional().with_backend(backend);
        let out = attend(&q, &none, &none, &spec)?;
        assert_eq!(out.dims(), q.dims());
        assert_eq!(out.abs()?.sum_all()?.to_scalar::<f32>()?, 0.);
        let result = attend_with_lse(&q, &none, &none, &spec)?;
        assert!(result
            .lse
            .flatten_all()?
            .to_vec1::<f32>()?
            .iter()
            .all(|x| *x == f32::NEG_INFINITY));
        assert_eq!(attend(&none, &q, &q, &spec)?.dims(), [2, 2, 0, 6]);
        assert_eq!(attend(&none, &none, &none, &spec)?.dims(), [2, 2, 0, 6]);
        let no_rows = q.narrow(0, 2, 0)?;
        assert_eq!(
            attend(&no_rows, &no_rows, &no_rows, &spec)?.dims(),
            [0, 2, 4, 6]
        );
        // One value each, stretched: strides of 0 everywhere.
        let stretched = q
            .narrow(3, 0, 1)?
            .narrow(2, 3, 1)?
            .broadcast_as((2, 2, 5, 7))?;
        assert_eq!(
            attend(&stretched, &stretched, &stretched, &spec)?
                .flatten_all()?
                .to_vec1::<f32>()?,
            [1f32; 140]
        );
    }
    Ok(())
}

#[test]
fn one_token_of_one_head_of_width_one_is_its_value() -> Result<()> {
    for backend in BACKENDS {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            let x = Tensor::new(&[[[[-3f32]]]], &CPU)?.to_dtype(dtype)?;
            let out = attend(&x, &x, &x, &AttendSpec::causal().with_backend(backend))?;
            assert_eq!(
                out.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?,
                [-3.]
            );
        }
    }
    Ok(())
}
