//! Gradients of tracked tensors on the GPU, held to the reference.

use crate::reference::{compare, store, tensor, values, Call, Dims, Fill, Inputs, Storage};
use crate::report::Report;
use crate::shapes::families;
use crate::target::{describe, spec, Manner, Target};
use crate::{test, Test};
use candle_core::{DType, Result, Tensor, Var};
use candle_posenc::{attend, attend_with_lse, AttendSpec};

pub fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        tests.push(test(
            format!("gradients_equal_reference_{dtype:?}"),
            move |target, report| {
                for (t, s, d, e) in [
                    (33, 33, 64, 64),
                    (1, 20, 16, 16),
                    (5, 2, 8, 16),
                    (40, 35, 20, 12),
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
                        for storage in [
                            Storage::Contiguous,
                            Storage::TokensFirst,
                            Storage::EveryOther,
                        ] {
                            check(target, &call, manner.stored([storage; 3]), report)?;
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
        "gradients_of_padded_documents_equal_reference",
        |target, report| {
            let dims = Dims {
                b: 2,
                ..Dims::square(2, 1, 40, 16)
            };
            let places = vec![
                (0..40).map(|i| if i < 5 { -1 } else { i % 17 }).collect(),
                (0..40)
                    .map(|i| if i % 7 == 3 { -1 } else { i })
                    .collect::<Vec<i64>>(),
            ];
            let documents = vec![vec![0; 40], (0..40).map(|i| i / 17).collect::<Vec<i64>>()];
            for dtype in [DType::F32, DType::BF16] {
                for (_, score, manner) in families(2, 16, dtype) {
                    let mut call = Call::causal(dims)
                        .with_score(score)
                        .with_positions(places.clone(), places.clone());
                    call.segments = Some((documents.clone(), documents.clone()));
                    check(target, &call, manner, report)?;
                }
            }
            Ok(())
        },
    ));
    tests.push(test(
        "tracked_output_equals_untracked_bit_for_bit",
        |target, report| {
            let dims = Dims::square(2, 1, 70, 64);
            for (name, score, manner) in families(2, 64, DType::BF16) {
                let call = Call::causal(dims).with_score(score);
                let inputs = Inputs::new(dims, Fill::Normal, 81, DType::BF16);
                let [q, k, v] = target.operands(&call, &inputs, manner)?;
                let spec = spec(&call, manner)?;
                let plain = attend_with_lse(&q, &k, &v, &spec)?;
                let tracked = attend_with_lse(Var::from_tensor(&q)?.as_tensor(), &k, &v, &spec)?;
                let equal = values(&plain.out)? == values(&tracked.out)?
                    && values(&plain.lse)? == values(&tracked.lse)?;
                report.check(equal, || format!("{name}: tracking changes the output"));
                report.check(tracked.out.track_op() && !tracked.lse.track_op(), || {
                    format!("{name}: the output must be tracked, its log-sum-exp not")
                });
            }
            Ok(())
        },
    ));
    tests
}

fn check(target: &Target, call: &Call, manner: Manner, report: &mut Report) -> Result<()> {
    let dims = call.dims;
    let dtype = manner.dtype;
    let inputs = Inputs::new(dims, Fill::Normal, 80, dtype);
    let var =
        |x: &[f64], shape| Var::from_tensor(&tensor(x, shape, dtype)?.to_device(target.device())?);
    let (q, k, v) = (
        var(&inputs.q, dims.q())?,
        var(&inputs.k, dims.k())?,
        var(&inputs.v, dims.v())?,
    );
    let stored: Vec<Tensor> = [&q, &k, &v]
        .into_iter()
        .zip(manner.storages)
        .map(|(x, storage)| store(x, storage))
        .collect::<Result<_>>()?;
    let spec = spec(call, manner)?;
    target.counted_plan([&stored[0], &stored[1], &stored[2]], &spec, report)?;
    target.poison()?;
    let result = attend_with_lse(&stored[0], &stored[1], &stored[2], &spec)?;
    let grad = tensor(&inputs.grad, dims.out(), dtype)?.to_device(target.device())?;
    let gradients = (&result.out * &grad)?.sum_all()?.backward()?;
    let (exact, plain) = (call.exact(&inputs), call.plain(&inputs, dtype));
    let gradient = |x: &Var| match gradients.get(x) {
        Some(gradient) => values(gradient),
        None => Ok(Vec::new()),
    };
    for (name, got, exact, plain) in [
        ("out", values(&result.out)?, &exact.out, &plain.out),
        ("dq", gradient(&q)?, &exact.dq, &plain.dq),
        ("dk", gradient(&k)?, &exact.dk, &plain.dk),
        ("dv", gradient(&v)?, &exact.dv, &plain.dv),
    ] {
        let verdict = compare(name, &got, exact, plain, dtype);
        report.check(verdict.is_ok(), || {
            format!(
                "{} of {}",
                verdict.err().unwrap_or_default(),
                describe(call, manner)
            )
        });
    }
    Ok(())
}
