//! Gradients: against central differences in f64, and through every way in which a graph can be built.

mod reference;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_posenc::{attend, attend_with_lse, AttendSpec, Backend, Score};
use reference::{
    run, scores, tensor, values, var, Call, Dims, Expected, Fill, Inputs, Rows, BACKENDS,
};

const CPU: Device = Device::Cpu;

const DIMS: Dims = Dims {
    b: 2,
    h: 4,
    g: 2,
    t: 3,
    s: 4,
    d: 4,
    e: 3,
};

/// Every option that changes which pairs there are or how they are scored, alone and together.
fn options() -> Vec<(&'static str, Call)> {
    let plain = Call::new(DIMS);
    let causal = Call::causal(DIMS);
    let places = |q: [[i64; 3]; 2], k: [[i64; 4]; 2]| -> (Rows, Rows) {
        (q.map(Vec::from).into(), k.map(Vec::from).into())
    };
    let (q, k) = places([[4, 0, 9], [2, 2, 7]], [[3, 4, 0, 11], [2, 8, 1, 0]]);
    let unsorted = plain.clone().with_positions(q, k);
    let (q, k) = places([[-1, 0, 1], [-1, -1, 5]], [[-1, 0, -1, 1], [3, -1, 5, -2]]);
    let padded = causal.clone().with_positions(q, k);
    let segmented = Call {
        segments: Some(places([[0, 0, 1], [5, 7, 7]], [[0, 1, 0, 1], [5, 5, 6, 7]])),
        ..unsorted.clone()
    };
    let all = Call {
        causal: true,
        window: Some(5),
        scale: Some(-0.7),
        ..segmented.clone()
    };
    vec![
        (
            "window",
            Call {
                window: Some(2),
                ..plain.clone()
            },
        ),
        (
            "causal window",
            Call {
                window: Some(2),
                ..causal.clone()
            },
        ),
        (
            "more queries than keys",
            Call::causal(Dims { t: 5, s: 2, ..DIMS }),
        ),
        (
            "scale",
            Call {
                scale: Some(1.3),
                ..causal.clone()
            },
        ),
        (
            "scale 0",
            Call {
                scale: Some(0.),
                ..causal.clone()
            },
        ),
        ("wide values", Call::causal(Dims { e: 9, ..DIMS })),
        ("no mask", plain),
        ("causal", causal),
        ("unsorted positions", unsorted),
        ("padding", padded),
        ("segments", segmented),
        ("all together", all),
    ]
}

fn gradcheck_scores(h: usize) -> Vec<Score> {
    let phase = |amp_dim, alpha, phase_scale| Score::Phase {
        amp_dim,
        alpha,
        phase_scale,
    };
    vec![
        Score::Dot,
        reference::linear_bias(h),
        phase(2, 0.1, None),
        phase(1, 0.5, Some(0.3)),
        phase(3, 1., Some(-0.2)),
    ]
}

/// Σ out·grad, by the crate's forward pass alone.
fn loss(call: &Call, inputs: &Inputs, backend: Backend) -> Result<f64> {
    let out = attend(
        &tensor(&inputs.q, call.dims.q(), DType::F64)?,
        &tensor(&inputs.k, call.dims.k(), DType::F64)?,
        &tensor(&inputs.v, call.dims.v(), DType::F64)?,
        &call.spec(backend)?,
    )?;
    Ok(values(&out)?
        .iter()
        .zip(&inputs.grad)
        .map(|(out, grad)| out * grad)
        .sum())
}

/// Each gradient of `run` against the central difference of `loss`. With a step of 1e-5 both the truncation
/// (step² · third derivative, at most about 1e2 here) and the rounding (1e-16 / step) stay below 1e-8.
fn gradcheck(name: &str, call: &Call, loss: &dyn Fn(&Inputs) -> Result<f64>) -> Result<()> {
    let inputs = Inputs::normal(call.dims, 50);
    let exact = call.exact(&inputs);
    type Part = fn(&mut Inputs) -> &mut Vec<f64>;
    let parts: [(&str, Part, &[f64]); 3] = [
        ("dq", |x| &mut x.q, &exact.dq.value),
        ("dk", |x| &mut x.k, &exact.dk.value),
        ("dv", |x| &mut x.v, &exact.dv.value),
    ];
    let step = 1e-5;
    for (part, of, gradient) in parts {
        for (i, gradient) in gradient.iter().enumerate() {
            let mut moved = inputs.clone();
            of(&mut moved)[i] += step;
            let above = loss(&moved)?;
            of(&mut moved)[i] -= 2. * step;
            let slope = (above - loss(&moved)?) / (2. * step);
            assert!(
                (slope - gradient).abs() <= 2e-8 * (1. + gradient.abs()),
                "{name} {part}[{i}]: difference {slope}, gradient {gradient}; {call:?}"
            );
        }
    }
    Ok(())
}

#[test]
fn reference_gradients_equal_differences_of_its_own_values() -> Result<()> {
    for (name, call) in options() {
        for score in gradcheck_scores(4) {
            let call = call.clone().with_score(score);
            gradcheck(name, &call, &|inputs| {
                let out = call.exact(inputs).out.value;
                Ok(out.iter().zip(&inputs.grad).map(|(o, g)| o * g).sum())
            })?;
        }
    }
    Ok(())
}

#[test]
fn gradients_of_every_score_and_option_equal_differences() -> Result<()> {
    for (name, call) in options() {
        for score in gradcheck_scores(4) {
            let call = call.clone().with_score(score);
            for backend in BACKENDS {
                // The differences of the crate's values are held to the reference's gradients, and so are the
                // crate's gradients, more closely.
                gradcheck(name, &call, &|inputs| loss(&call, inputs, backend))?;
                let inputs = Inputs::normal(call.dims, 50);
                let run = run(&call, &inputs, DType::F64, backend)?;
                if let Err(fault) = Expected::of(&call, &inputs, DType::F64).agrees(&run) {
                    panic!("{name} {backend:?} {call:?}\n{fault}")
                }
            }
        }
    }
    Ok(())
}

/// q, k and v of `DIMS` and a gradient for the output.
fn variables(dtype: DType) -> Result<([Var; 3], Tensor)> {
    let inputs = Inputs::new(DIMS, Fill::Normal, 51, dtype);
    Ok((
        [
            var(&inputs.q, DIMS.q(), dtype)?,
            var(&inputs.k, DIMS.k(), dtype)?,
            var(&inputs.v, DIMS.v(), dtype)?,
        ],
        tensor(&inputs.grad, DIMS.out(), dtype)?,
    ))
}

/// Every score, causal, on both paths.
fn specs() -> Vec<AttendSpec> {
    BACKENDS
        .into_iter()
        .flat_map(|backend| {
            scores(DIMS.h, DIMS.d)
                .map(|score| AttendSpec::causal().with_score(score).with_backend(backend))
        })
        .collect()
}

fn weighted(out: &Tensor, grad: &Tensor) -> Result<Tensor> {
    (out * grad)?.sum_all()
}

fn gradients_of(loss: &Tensor, of: &[Var]) -> Result<Vec<Vec<f64>>> {
    let gradients = loss.backward()?;
    of.iter()
        .map(|x| match gradients.get(x) {
            Some(gradient) => {
                assert_eq!(gradient.dims(), x.dims());
                assert_eq!(gradient.dtype(), x.dtype());
                values(gradient)
            }
            None => panic!("no gradient for {x:?}"),
        })
        .collect()
}

fn sum(parts: &[&Vec<f64>]) -> Vec<f64> {
    (0..parts[0].len())
        .map(|i| parts.iter().map(|part| part[i]).sum())
        .collect()
}

fn assert_close(got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(
            (got - want).abs() <= tolerance * (1. + want.abs()),
            "[{i}] {got}, should be {want}"
        );
    }
}

#[test]
fn gradients_when_only_some_inputs_are_tracked_equal_the_full_ones() -> Result<()> {
    for spec in specs() {
        let (vars, grad) = variables(DType::F64)?;
        let full = gradients_of(
            &weighted(&attend(&vars[0], &vars[1], &vars[2], &spec)?, &grad)?,
            &vars,
        )?;
        for tracked in 1..8usize {
            let inputs: Vec<Tensor> = vars
                .iter()
                .enumerate()
                .map(|(i, x)| match tracked >> i & 1 {
                    1 => x.as_tensor().clone(),
                    _ => x.as_detached_tensor(),
                })
                .collect();
            let out = attend(&inputs[0], &inputs[1], &inputs[2], &spec)?;
            assert!(out.track_op());
            let gradients = weighted(&out, &grad)?.backward()?;
            for (i, x) in vars.iter().enumerate() {
                match (tracked >> i & 1, gradients.get(x)) {
                    (1, Some(gradient)) => assert_eq!(values(gradient)?, full[i]),
                    (0, None) => (),
                    (_, gradient) => panic!("{spec:?} {tracked:b} {i}: {gradient:?}"),
                }
            }
        }
    }
    Ok(())
}

#[test]
fn output_of_untracked_inputs_is_untracked() -> Result<()> {
    for spec in specs() {
        let (vars, _) = variables(DType::F64)?;
        let [q, k, v] = vars.each_ref().map(|x| x.as_detached_tensor());
        assert!(!attend(&q, &k, &v, &spec)?.track_op());
        let result = attend_with_lse(&q, &k, &v, &spec)?;
        assert!(!result.out.track_op() && !result.lse.track_op());
    }
    Ok(())
}

#[test]
fn values_do_not_depend_on_tracking_or_on_asking_for_the_lse() -> Result<()> {
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        for spec in specs() {
            let ([q, k, v], _) = variables(dtype)?;
            let tracked = values(&attend(&q, &k, &v, &spec)?)?;
            let with_lse = attend_with_lse(&q, &k, &v, &spec)?;
            let [q, k, v] = [q, k, v].map(|x| x.as_detached_tensor());
            let detached_with_lse = attend_with_lse(&q, &k, &v, &spec)?;
            assert_eq!(tracked, values(&attend(&q, &k, &v, &spec)?)?);
            assert_eq!(tracked, values(&with_lse.out)?);
            assert_eq!(tracked, values(&detached_with_lse.out)?);
            assert_eq!(values(&with_lse.lse)?, values(&detached_with_lse.lse)?);
        }
    }
    Ok(())
}

#[test]
fn one_variable_as_query_key_and_value_gets_the_sum_of_its_gradients() -> Result<()> {
    let dims = Dims {
        b: 2,
        ..Dims::square(3, 3, 5, 4)
    };
    let inputs = Inputs::normal(dims, 52);
    let same = Inputs {
        k: inputs.q.clone(),
        v: inputs.q.clone(),
        ..inputs.clone()
    };
    for score in scores(3, 4) {
        let call = Call::causal(dims).with_score(score);
        let exact = call.exact(&same);
        let want = sum(&[&exact.dq.value, &exact.dk.value, &exact.dv.value]);
        for backend in BACKENDS {
            let x = var(&inputs.q, dims.q(), DType::F64)?;
            let out = attend(&x, &x, &x, &call.spec(backend)?)?;
            let loss = weighted(&out, &tensor(&inputs.grad, dims.out(), DType::F64)?)?;
            assert_close(&gradients_of(&loss, &[x])?[0], &want, 1e-12);
        }
    }
    Ok(())
}

#[test]
fn keys_that_are_also_values_get_the_sum_of_both_gradients() -> Result<()> {
    let dims = Dims { e: DIMS.d, ..DIMS };
    let inputs = Inputs::normal(dims, 53);
    let same = Inputs {
        v: inputs.k.clone(),
        ..inputs.clone()
    };
    let call = Call::causal(dims);
    let exact = call.exact(&same);
    let want = sum(&[&exact.dk.value, &exact.dv.value]);
    for backend in BACKENDS {
        let q = tensor(&inputs.q, dims.q(), DType::F64)?;
        let kv = var(&inputs.k, dims.k(), DType::F64)?;
        let out = attend(&q, &kv, &kv, &call.spec(backend)?)?;
        let loss = weighted(&out, &tensor(&inputs.grad, dims.out(), DType::F64)?)?;
        assert_close(&gradients_of(&loss, &[kv])?[0], &want, 1e-12);
    }
    Ok(())
}

#[test]
fn output_used_twice_gets_both_gradients() -> Result<()> {
    for spec in specs() {
        let (vars, grad) = variables(DType::F64)?;
        let out = attend(&vars[0], &vars[1], &vars[2], &spec)?;
        let once = gradients_of(&weighted(&out, &grad)?, &vars)?;
        let square = gradients_of(&out.sqr()?.sum_all()?, &vars)?;
        let both = (weighted(&out, &grad)? + out.sqr()?.sum_all()?)?;
        for (got, (a, b)) in gradients_of(&both, &vars)?
            .iter()
            .zip(once.iter().zip(&square))
        {
            assert_close(got, &sum(&[a, b]), 1e-13);
        }
    }
    Ok(())
}

#[test]
fn backward_called_twice_gives_equal_gradients() -> Result<()> {
    for spec in specs() {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let (vars, grad) = variables(dtype)?;
            let loss = weighted(&attend(&vars[0], &vars[1], &vars[2], &spec)?, &grad)?;
            let first = gradients_of(&loss, &vars)?;
            assert!(first.iter().all(|x| x.iter().any(|x| *x != 0.)));
            assert_eq!(first, gradients_of(&loss, &vars)?);
        }
    }
    Ok(())
}

#[test]
fn interleaved_graphs_keep_their_own_state() -> Result<()> {
    for spec in specs() {
        let (one, grad) = variables(DType::F64)?;
        let other = Inputs::new(DIMS, Fill::Huge, 54, DType::F64);
        let other = [
            var(&other.q, DIMS.q(), DType::F64)?,
            var(&other.k, DIMS.k(), DType::F64)?,
            var(&other.v, DIMS.v(), DType::F64)?,
        ];
        let loss_of = |x: &[Var; 3]| weighted(&attend(&x[0], &x[1], &x[2], &spec)?, &grad);
        let (alone_one, alone_other) = (
            gradients_of(&loss_of(&one)?, &one)?,
            gradients_of(&loss_of(&other)?, &other)?,
        );
        // Both forward passes before either backward pass, and in the other order.
        let (first, second) = (loss_of(&one)?, loss_of(&other)?);
        assert_eq!(gradients_of(&first, &one)?, alone_one);
        assert_eq!(gradients_of(&second, &other)?, alone_other);
        let (first, second) = (loss_of(&one)?, loss_of(&other)?);
        assert_eq!(gradients_of(&second, &other)?, alone_other);
        assert_eq!(gradients_of(&first, &one)?, alone_one);
        // One graph that holds both.
        let together = (loss_of(&one)? + loss_of(&other)?)?;
        assert_eq!(gradients_of(&together, &one)?, alone_one);
        assert_eq!(gradients_of(&together, &other)?, alone_other);
    }
    Ok(())
}

#[test]
fn stacked_layers_equal_differences() -> Result<()> {
    // The first call's gradient arrives through the second's: non-leaf inputs on all three sides.
    let dims = Dims {
        b: 2,
        ..Dims::square(2, 2, 4, 4)
    };
    let inputs = Inputs::normal(dims, 55);
    for backend in BACKENDS {
        for score in scores(2, 4) {
            let spec = AttendSpec::causal().with_score(score).with_backend(backend);
            let loss_of = |x: &Tensor| -> Result<Tensor> {
                let one = attend(&(x * 2.)?, x, &(x * 0.5)?, &spec)?;
                let two = attend(x, &one, &(&one + x)?, &spec)?;
                weighted(&two, &tensor(&inputs.grad, dims.out(), DType::F64)?)
            };
            let x = var(&inputs.q, dims.q(), DType::F64)?;
            let gradient = gradients_of(&loss_of(&x)?, std::slice::from_ref(&x))?.remove(0);
            let step = 1e-5;
            for (i, gradient) in gradient.iter().enumerate() {
                let moved = |by: f64| -> Result<f64> {
                    let mut moved = inputs.q.clone();
                    moved[i] += by;
                    loss_of(&tensor(&moved, dims.q(), DType::F64)?)?.to_scalar()
                };
                let slope = (moved(step)? - moved(-step)?) / (2. * step);
                assert!(
                    (slope - gradient).abs() <= 1e-7 * (1. + gradient.abs()),
                    "{backend:?} [{i}]: difference {slope}, gradient {gradient}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn expanded_and_transposed_upstream_gradients_equal_dense_contiguous_ones() -> Result<()> {
    for spec in specs() {
        let (vars, _) = variables(DType::F64)?;
        let out = || attend(&vars[0], &vars[1], &vars[2], &spec);
        let ones = Tensor::ones(DIMS.out().to_vec(), DType::F64, &CPU)?;
        assert_eq!(
            gradients_of(&out()?.sum_all()?, &vars)?,
            gradients_of(&weighted(&out()?, &ones)?, &vars)?
        );
        // A mean over tokens, broadcast back over them.
        let per_width = Tensor::new(&[1f64, -2., 3.], &CPU)?;
        let expanded = out()?
            .sum(2)?
            .sum(1)?
            .broadcast_mul(&per_width)?
            .sum_all()?;
        let spread = per_width.broadcast_as(DIMS.out().to_vec())?.contiguous()?;
        assert_eq!(
            gradients_of(&expanded, &vars)?,
            gradients_of(&weighted(&out()?, &spread)?, &vars)?
        );
        for (a, b) in [(1, 2), (2, 3), (0, 3)] {
            let mut turned = DIMS.out();
            turned.swap(a, b);
            let count = turned.iter().product::<usize>() as f64;
            let weights = Tensor::arange(0., count, &CPU)?.reshape(turned.to_vec())?;
            assert_eq!(
                gradients_of(&weighted(&out()?.transpose(a, b)?, &weights)?, &vars)?,
                gradients_of(
                    &weighted(&out()?, &weights.transpose(a, b)?.contiguous()?)?,
                    &vars
                )?
            );
        }
    }
    Ok(())
}

#[test]
fn lse_is_detached() -> Result<()> {
    for spec in specs() {
        let (vars, _) = variables(DType::F64)?;
        let result = attend_with_lse(&vars[0], &vars[1], &vars[2], &spec)?;
        assert!(result.out.track_op());
        assert!(!result.lse.track_op());
        let gradients = result.lse.sqr()?.sum_all()?.backward()?;
        for x in &vars {
            assert!(gradients.get(x).is_none());
        }
    }
    Ok(())
}

#[test]
fn half_precision_gradients_have_its_dtype_and_are_close_to_single() -> Result<()> {
    let dims = Dims {
        b: 1,
        t: 37,
        s: 37,
        d: 16,
        e: 16,
        ..DIMS
    };
    for dtype in [DType::BF16, DType::F16] {
        let rounding = reference::unit_roundoff(dtype);
        for fill in [Fill::Normal, Fill::Correlated] {
            let inputs = Inputs::new(dims, fill, 56, dtype);
            for score in scores(dims.h, dims.d) {
                let call = Call::causal(dims).with_score(score);
                for backend in BACKENDS {
                    let half = run(&call, &inputs, dtype, backend)?;
                    let single = run(&call, &inputs, DType::F32, backend)?;
                    for (half, single) in [
                        (&half.dq, &single.dq),
                        (&half.dk, &single.dk),
                        (&half.dv, &single.dv),
                    ] {
                        // Inputs are the same numbers, sums are held in f32: only the last rounding of each
                        // element differs (two for grouped heads summed after rounding).
                        let largest = single.iter().fold(0f64, |max, x| max.max(x.abs()));
                        assert!(largest > 0.);
                        for (half, single) in half.iter().zip(single) {
                            assert!(
                                (half - single).abs()
                                    <= 2. * rounding * (single.abs() + 0.01 * largest),
                                "{backend:?} {dtype:?} {fill:?} {half} {single} {:?}",
                                call.score
                            );
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn threads_give_the_same_gradients() -> Result<()> {
    for spec in specs() {
        let compute = || -> Result<Vec<Vec<f64>>> {
            let (vars, grad) = variables(DType::F32)?;
            let out = attend(&vars[0], &vars[1], &vars[2], &spec)?;
            gradients_of(&weighted(&out, &grad)?, &vars)
        };
        let alone = compute()?;
        std::thread::scope(|scope| -> Result<()> {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(compute)).collect();
            for thread in threads {
                match thread.join() {
                    Ok(gradients) => assert_eq!(gradients?, alone),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn graph_built_on_one_thread_runs_backward_on_another() -> Result<()> {
    for spec in specs() {
        let (vars, grad) = variables(DType::F64)?;
        let loss = weighted(&attend(&vars[0], &vars[1], &vars[2], &spec)?, &grad)?;
        let here = gradients_of(&loss, &vars)?;
        let there = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| gradients_of(&loss, &vars)))
                .collect();
            threads
                .into_iter()
                .map(|thread| match thread.join() {
                    Ok(gradients) => gradients,
                    Err(panic) => std::panic::resume_unwind(panic),
                })
                .collect::<Result<Vec<_>>>()
        })?;
        for there in there {
            assert_eq!(here, there);
        }
    }
    Ok(())
}

#[test]
fn variable_changed_between_calls_is_read_anew() -> Result<()> {
    for spec in specs() {
        let (vars, grad) = variables(DType::F64)?;
        let loss = || weighted(&attend(&vars[0], &vars[1], &vars[2], &spec)?, &grad);
        let before = gradients_of(&loss()?, &vars)?;
        let old = vars[0].as_detached_tensor().copy()?;
        vars[0].set(&(&old * 3.)?)?;
        assert_ne!(gradients_of(&loss()?, &vars)?, before);
        vars[0].set(&old)?;
        assert_eq!(gradients_of(&loss()?, &vars)?, before);
    }
    Ok(())
}

#[test]
fn gradient_step_lowers_the_loss() -> Result<()> {
    for spec in specs() {
        let (vars, grad) = variables(DType::F32)?;
        let loss = || weighted(&attend(&vars[0], &vars[1], &vars[2], &spec)?, &grad);
        let before = loss()?;
        let gradients = before.backward()?;
        for x in &vars {
            match gradients.get(x) {
                Some(gradient) => x.set(&(x.as_tensor() - (gradient * 1e-2)?)?.detach())?,
                None => panic!("no gradient"),
            }
        }
        assert!(loss()?.to_scalar::<f32>()? < before.to_scalar::<f32>()?);
    }
    Ok(())
}
