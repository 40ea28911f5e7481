//! Gradients that arrive from a graph are contiguous in candle 0.11, which adds each to zeros; the operation does not rely
//! on it. Here it is called with gradients stored in every other way, on the CPU and on a GPU where there is one.

use super::*;
use crate::attend::{AttendSpec, Backend, Problem, Score};
use candle_core::{Device, Var, D};

/// q (B,H,T,D), k (B,G,S,D), v (B,G,S,E): B, H, G, T, S, D, E.
const SHAPES: [[usize; 7]; 4] = [
    [2, 4, 2, 70, 70, 64, 64],
    [1, 3, 1, 33, 90, 128, 128],
    [2, 2, 2, 40, 40, 64, 128],
    [1, 4, 2, 21, 30, 20, 12],
];

fn normal(dims: [usize; 4], dtype: DType, device: &Device) -> Result<Tensor> {
    Tensor::randn(0f32, 1., dims.to_vec(), device)?.to_dtype(dtype)
}

fn scores(h: usize, d: usize) -> [Score; 3] {
    [
        Score::Dot,
        Score::LinearBias {
            slopes: (0..h).map(|h| 0.3 / (1. + h as f64)).collect(),
        },
        Score::Phase {
            amp_dim: d / 2,
            alpha: 0.1,
            phase_scale: None,
        },
    ]
}

/// The same values in other places of memory.
fn stored(grad: &Tensor) -> Result<Vec<(&'static str, Tensor)>> {
    let (b, h, t, e) = grad.dims4()?;
    let nan = |dims: &[usize]| Tensor::full(f32::NAN, dims, grad.device())?.to_dtype(grad.dtype());
    let turned = |one: usize, other: usize| -> Result<Tensor> {
        let turned = grad.transpose(one, other)?.contiguous()?;
        turned.transpose(one, other)
    };
    Ok(vec![
        ("tokens first", turned(1, 2)?),
        ("width first", turned(2, 3)?),
        ("batch last", turned(0, 3)?),
        (
            "amid wider rows",
            Tensor::cat(
                &[&nan(&[b, h, t, 3])?, grad, &nan(&[b, h, t, 2])?],
                D::Minus1,
            )?
            .narrow(3, 3, e)?,
        ),
        (
            "every other token",
            Tensor::stack(&[&nan(grad.dims())?, grad], 3)?
                .narrow(3, 1, 1)?
                .squeeze(3)?,
        ),
        (
            "behind an odd offset",
            Tensor::cat(&[&nan(&[1])?, &grad.flatten_all()?], 0)?
                .narrow(0, 1, grad.elem_count())?
                .reshape(grad.shape())?,
        ),
    ])
}

/// Gradients that are the same along some dimension, which have no stride there.
fn expanded(grad: &Tensor) -> Result<Vec<(&'static str, Tensor)>> {
    let part = |dim: usize| grad.narrow(dim, 0, 1)?.broadcast_as(grad.shape());
    let one = grad.flatten_all()?.narrow(0, 0, 1)?;
    Ok(vec![
        ("one row", part(0)?),
        ("one head", part(1)?),
        ("one token", part(2)?),
        ("one column", part(3)?),
        (
            "one number",
            one.reshape((1, 1, 1, 1))?.broadcast_as(grad.shape())?,
        ),
    ])
}

#[test]
fn arriving_gradients_stored_in_any_way_give_equal_bits() -> Result<()> {
    for device in crate::drawn::devices("attention's arriving gradients") {
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            for [b, h, g, t, s, d, e] in SHAPES {
                for score in scores(h, d) {
                    let (q, k, v) = (
                        normal([b, h, t, d], dtype, &device)?,
                        normal([b, g, s, d], dtype, &device)?,
                        normal([b, g, s, e], dtype, &device)?,
                    );
                    let spec = AttendSpec::causal()
                        .with_score(score.clone())
                        .with_backend(Backend::Fused);
                    // Operands that are tracked make it leave what its backward pass needs.
                    let [q, k, v] = [
                        Var::from_tensor(&q)?,
                        Var::from_tensor(&k)?,
                        Var::from_tensor(&v)?,
                    ];
                    let call = Problem::of(&q, &k, &v)?.resolve(&spec)?;
                    let op = FusedAttention::new(call, [&q, &k, &v], false);
                    let out = q.apply_op3_no_bwd(&k, &v, &op)?;
                    let gradients = |grad: &Tensor| -> Result<Vec<Vec<f64>>> {
                        let (dq, dk, dv) = op.bwd(&q, &k, &v, &out, grad)?;
                        let values = |x: Option<Tensor>| match x {
                            Some(x) => x.to_dtype(DType::F64)?.flatten_all()?.to_vec1(),
                            None => Ok(Vec::new()),
                        };
                        Ok(vec![values(dq)?, values(dk)?, values(dv)?])
                    };
                    let grad = normal([b, h, t, e], dtype, &device)?;
                    let want = gradients(&grad)?;
                    assert!(want.iter().all(|x| x.iter().any(|x| *x != 0.)));
                    let what = |how: &str| format!("{how} {dtype:?} {score:?} {:?}", q.shape());
                    for (how, grad) in stored(&grad)? {
                        assert!(gradients(&grad)? == want, "{}", what(how));
                    }
                    for (how, grad) in expanded(&grad)? {
                        assert!(
                            gradients(&grad)? == gradients(&grad.contiguous()?)?,
                            "{}",
                            what(how)
                        );
                    }
                }
            }
        }
    }
    Ok(())
}
