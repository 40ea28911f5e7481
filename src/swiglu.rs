//! The gate of a feed-forward part, SwiGLU (Shazeer, arXiv 2002.05202v1, equation 6, with β = 1), differentiable:
//! [`swiglu`].
//!
//! y = silu(a)·u with a the gate and u what it lets through, silu(a) = a·s and s = 1/(1 + e⁻ᵃ). With dy the gradient of
//! the result,
//!
//! - du = dy·silu(a),
//! - da = dy·u·s·(1 + a·(1 − s)).
//!
//! Nothing but the inputs is kept for it.

mod call;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use crate::attend::cpu::Real;
use crate::gpu::has_kernels;
use crate::host::{contiguous, on_host, Element};
use candle_core::backend::BackendStorage;
use candle_core::{bail, CpuStorage, CustomOp2, DType, Layout, Result, Shape, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;

/// silu(gate)·up, number by number.
///
/// Differentiable in both. Computed in f32 (f64 for f64); the result and each gradient are rounded once.
///
/// # Shapes
/// gate and up of one shape, of any strides → the same shape.
///
/// # Errors
/// When shapes, dtypes or devices do not fit; the message names them.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_posenc::swiglu;
/// # fn main() -> candle_core::Result<()> {
/// let gate = Tensor::new(&[0f32, 1., -1e4], &Device::Cpu)?;
/// let up = Tensor::new(&[3f32, 2., 1.], &Device::Cpu)?;
/// let y = swiglu(&gate, &up)?.to_vec1::<f32>()?;
/// assert_eq!([y[0], y[2]], [0., 0.]);
/// assert!((y[1] - 2. / (1. + (-1f32).exp())).abs() < 1e-6);
/// # Ok(())
/// # }
/// ```
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    check(gate, up)?;
    if !has_kernels(gate.device()) || gate.elem_count() == 0 {
        return gate.silu()? * up;
    }
    let (gate, up) = (gate.contiguous()?, up.contiguous()?);
    match gate.track_op() || up.track_op() {
        true => gate.apply_op2(&up, Gate),
        false => gate.apply_op2_no_bwd(&up, &Gate),
    }
}

fn check(gate: &Tensor, up: &Tensor) -> Result<()> {
    if gate.dims() != up.dims() || gate.dtype() != up.dtype() {
        bail!(
            "swiglu: gate and up must have one shape and dtype, got {:?} {:?} and {:?} {:?}",
            gate.dtype(),
            gate.dims(),
            up.dtype(),
            up.dims()
        )
    }
    if !matches!(
        gate.dtype(),
        DType::F32 | DType::F64 | DType::BF16 | DType::F16
    ) {
        bail!(
            "swiglu: dtype {:?} is not supported (f32, f64, bf16, f16 are)",
            gate.dtype()
        )
    }
    if !gate.device().same_device(up.device()) {
        bail!(
            "swiglu: gate and up must be on one device, got {:?} and {:?}",
            gate.device().location(),
            up.device().location()
        )
    }
    Ok(())
}

/// [`swiglu`] as one candle operation over (gate, up), both contiguous.
struct Gate;

impl Gate {
    fn forward<T: Element>([gate, up]: [(&CpuStorage, &Layout); 2]) -> Result<CpuStorage> {
        let (gate, up) = (contiguous::<T>(gate.0, gate.1)?, contiguous(up.0, up.1)?);
        Ok(T::to_cpu_storage_owned(forward(gate, up)))
    }

    fn backward<T: Element>([gate, up, grad]: [&Tensor; 3]) -> Result<[Option<Tensor>; 2]> {
        let (gate_host, up_host, grad_host) = (on_host(gate), on_host(up), on_host(grad));
        let (dgate, dup) = backward::<T>(gate_host.slice()?, up_host.slice()?, grad_host.slice()?);
        let tensor = |values: Vec<T>, like: &Tensor| {
            let made = || Tensor::from_vec(values, like.shape(), like.device());
            like.track_op().then(made).transpose()
        };
        Ok([tensor(dgate, gate)?, tensor(dup, up)?])
    }
}

impl CustomOp2 for Gate {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        gate_layout: &Layout,
        up: &CpuStorage,
        up_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let operands = [(gate, gate_layout), (up, up_layout)];
        let out = match gate.dtype() {
            DType::F32 => Self::forward::<f32>(operands)?,
            DType::F64 => Self::forward::<f64>(operands)?,
            DType::BF16 => Self::forward::<bf16>(operands)?,
            DType::F16 => Self::forward::<f16>(operands)?,
            other => bail!("swiglu: dtype {other:?} is not supported (f32, f64, bf16, f16 are)"),
        };
        Ok((out, gate_layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        gate: &CudaStorage,
        gate_layout: &Layout,
        up: &CudaStorage,
        up_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let out = cuda::forward((gate, gate_layout), (up, up_layout))?;
        Ok((out, gate_layout.shape().clone()))
    }

    fn bwd(
        &self,
        gate: &Tensor,
        up: &Tensor,
        _out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        let tensors = [gate, up, &grad];
        #[cfg(feature = "cuda")]
        if gate.device().is_cuda() {
            let [dgate, dup] = cuda::backward(tensors)?;
            return Ok((
                gate.track_op().then_some(dgate),
                up.track_op().then_some(dup),
            ));
        }
        let [dgate, dup] = match gate.dtype() {
            DType::F32 => Self::backward::<f32>(tensors)?,
            DType::F64 => Self::backward::<f64>(tensors)?,
            DType::BF16 => Self::backward::<bf16>(tensors)?,
            DType::F16 => Self::backward::<f16>(tensors)?,
            other => bail!("swiglu: no gradient for dtype {other:?}"),
        };
        Ok((dgate, dup))
    }
}

/// Elements that one task of the thread pool handles; smaller tensors stay on the calling thread.
const TASK: usize = 1 << 14;

#[inline(always)]
fn sigmoid<A: Real>(x: A) -> A {
    A::ONE / (A::ONE + (A::ZERO - x).exp())
}

fn forward_row<T: Element>(out: &mut [T], gate: &[T], up: &[T]) {
    for ((out, a), u) in out.iter_mut().zip(gate).zip(up) {
        let a = a.to_acc();
        *out = T::from_acc(a * sigmoid(a) * u.to_acc());
    }
}

/// Two results.
type Pair<'a, T> = (&'a mut [T], &'a mut [T]);
/// Gate, up and the result's gradient.
type Operands<'a, T> = (&'a [T], &'a [T], &'a [T]);

fn backward_row<T: Element>((dgate, dup): Pair<T>, (gate, up, grad): Operands<T>) {
    for (i, (dgate, dup)) in dgate.iter_mut().zip(dup).enumerate() {
        let (a, u, dy) = (gate[i].to_acc(), up[i].to_acc(), grad[i].to_acc());
        let s = sigmoid(a);
        let one = <T::Acc as Real>::ONE;
        *dgate = T::from_acc(dy * u * (s * (one + a * (one - s))));
        *dup = T::from_acc(dy * (a * s));
    }
}

/// (rows, 2I), a row's gates before what they let through → (rows, I).
pub(crate) fn forward_joined<T: Element>(joined: &[T], width: usize) -> Vec<T> {
    let mut out = vec![T::zero(); joined.len() / 2];
    let stretch = (TASK / width).max(1) * width;
    let task = |(out, joined): (&mut [T], &[T])| {
        let rows = joined.chunks_exact(2 * width);
        for (out, row) in out.chunks_exact_mut(width).zip(rows) {
            let (gate, up) = row.split_at(width);
            forward_row(out, gate, up);
        }
    };
    if out.len() <= 2 * TASK {
        task((&mut out, joined));
    } else {
        let joined = joined.par_chunks(2 * stretch);
        out.par_chunks_mut(stretch).zip(joined).for_each(task);
    }
    out
}

/// The gradient (rows, 2I) of [`forward_joined`]'s operand, and its result again.
pub(crate) fn backward_joined<T: Element>(
    joined: &[T],
    grad: &[T],
    width: usize,
) -> (Vec<T>, Vec<T>) {
    let mut out = vec![T::zero(); grad.len()];
    let mut djoined = vec![T::zero(); joined.len()];
    let stretch = (TASK / width).max(1) * width;
    let task = |((out, djoined), (joined, grad)): (Pair<T>, (&[T], &[T]))| {
        let results = out
            .chunks_exact_mut(width)
            .zip(djoined.chunks_exact_mut(2 * width));
        let inputs = joined.chunks_exact(2 * width).zip(grad.chunks_exact(width));
        for ((out, djoined), (joined, grad)) in results.zip(inputs) {
            let (gate, up) = joined.split_at(width);
            forward_row(out, gate, up);
            backward_row(djoined.split_at_mut(width), (gate, up, grad));
        }
    };
    if grad.len() <= 2 * TASK {
        task(((&mut out, &mut djoined), (joined, grad)));
    } else {
        let results = out
            .par_chunks_mut(stretch)
            .zip(djoined.par_chunks_mut(2 * stretch));
        let inputs = joined.par_chunks(2 * stretch).zip(grad.par_chunks(stretch));
        results.zip(inputs).for_each(task);
    }
    (djoined, out)
}

fn forward<T: Element>(gate: &[T], up: &[T]) -> Vec<T> {
    let mut out = vec![T::zero(); gate.len()];
    let task = |(out, (gate, up)): (&mut [T], (&[T], &[T]))| forward_row(out, gate, up);
    if out.len() <= 2 * TASK {
        task((&mut out, (gate, up)));
    } else {
        let inputs = gate.par_chunks(TASK).zip(up.par_chunks(TASK));
        out.par_chunks_mut(TASK).zip(inputs).for_each(task);
    }
    out
}

/// Gradients of the gate and of what it lets through.
fn backward<T: Element>(gate: &[T], up: &[T], grad: &[T]) -> (Vec<T>, Vec<T>) {
    let mut dgate = vec![T::zero(); gate.len()];
    let mut dup = dgate.clone();
    let task = |(results, inputs): (Pair<T>, Operands<T>)| backward_row(results, inputs);
    if gate.len() <= 2 * TASK {
        task(((&mut dgate, &mut dup), (gate, up, grad)));
    } else {
        let results = dgate.par_chunks_mut(TASK).zip(dup.par_chunks_mut(TASK));
        let inputs = gate.par_chunks(TASK).zip(up.par_chunks(TASK));
        let inputs = inputs.zip(grad.par_chunks(TASK));
        let inputs = inputs.map(|((gate, up), grad)| (gate, up, grad));
        results.zip(inputs).for_each(task);
    }
    (dgate, dup)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drawn::{difference, upstream, with_gradients};
    use candle_core::Device;

    const CPU: Device = Device::Cpu;

    fn random(shape: impl Into<Shape>) -> Result<Tensor> {
        crate::drawn::normal(2., shape)
    }

    fn by_tensors(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        gate.silu()? * up
    }

    #[test]
    fn gated_and_its_gradients_equal_those_by_tensors() -> Result<()> {
        // One number, odd sizes, more than one task.
        for shape in [vec![1], vec![3, 5], vec![2, 3, 7], vec![41, 1027]] {
            let (gate, up) = (random(shape.clone())?, random(shape.clone())?);
            let found = with_gradients(&gate, &up, swiglu)?;
            let expected = with_gradients(&gate, &up, by_tensors)?;
            for (found, expected) in found.iter().zip(&expected) {
                let off = difference(found, expected)?;
                assert!(off < 1e-13, "{shape:?}: {off:e}");
            }
        }
        Ok(())
    }

    #[test]
    fn gate_gradients_equal_finite_differences() -> Result<()> {
        let (gate, up) = (random((2, 6))?, random((2, 6))?);
        let found = with_gradients(&gate, &up, swiglu)?;
        let loss = |gate: &Tensor, up: &Tensor| -> Result<f64> {
            let y = swiglu(gate, up)?.flatten_all()?.to_vec1::<f64>()?;
            Ok(y.iter().enumerate().map(|(i, y)| upstream(i) * y).sum())
        };
        let moved = |x: &Tensor, i: usize, step: f64| -> Result<Tensor> {
            let mut values = x.flatten_all()?.to_vec1::<f64>()?;
            values[i] += step;
            Tensor::from_vec(values, x.shape(), &CPU)
        };
        let step = 1e-5;
        let found = |side: usize| found[side].flatten_all()?.to_vec1::<f64>();
        for i in 0..12 {
            let at = |step| loss(&moved(&gate, i, step)?, &up);
            let expected = (at(step)? - at(-step)?) / (2. * step);
            assert!((found(1)?[i] - expected).abs() < 1e-8, "gate {i}");
            let at = |step| loss(&gate, &moved(&up, i, step)?);
            let expected = (at(step)? - at(-step)?) / (2. * step);
            assert!((found(2)?[i] - expected).abs() < 1e-8, "up {i}");
        }
        Ok(())
    }

    #[test]
    fn gated_in_lower_precision_errs_at_most_twice_as_much_as_by_tensors() -> Result<()> {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let (gate, up) = (
                random((60, 90))?.to_dtype(dtype)?,
                random((60, 90))?.to_dtype(dtype)?,
            );
            let wide = |x: &Tensor| x.to_dtype(DType::F64);
            let exact = with_gradients(&wide(&gate)?, &wide(&up)?, by_tensors)?;
            let plain = with_gradients(&gate, &up, by_tensors)?;
            let found = with_gradients(&gate, &up, swiglu)?;
            for (i, name) in ["y", "gate", "up"].into_iter().enumerate() {
                let error = difference(&found[i], &exact[i])?;
                let allowed = 2. * difference(&plain[i], &exact[i])?;
                assert!(
                    error <= allowed,
                    "{dtype:?} {name}: {error:e} of {allowed:e}"
                );
                assert_eq!(found[i].dtype(), dtype);
            }
        }
        Ok(())
    }

    #[test]
    fn gates_of_any_size_leave_gradients_finite() -> Result<()> {
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let gate = Tensor::new(&[-1e30f64, -1e3, -90., 0., 90., 1e3, 1e30], &CPU)?;
            let gate = gate.to_dtype(dtype)?;
            let up = Tensor::ones(7, dtype, &CPU)?;
            let [y, dgate, dup] = with_gradients(&gate, &up, swiglu)?;
            for x in [&y, &dgate, &dup] {
                let all = x.to_dtype(DType::F64)?.to_vec1::<f64>()?;
                assert!(all.iter().all(|x| x.is_finite()), "{dtype:?}: {all:?}");
            }
            assert_eq!(y.to_dtype(DType::F64)?.to_vec1::<f64>()?[..2], [0., 0.]);
        }
        Ok(())
    }

    #[test]
    fn gated_strided_inputs_equal_contiguous_ones() -> Result<()> {
        let (gate, up) = (random((5, 4))?.t()?, random((4, 11))?.narrow(1, 3, 5)?);
        assert!(!gate.is_contiguous() && !up.is_contiguous());
        let expected = swiglu(&gate.contiguous()?, &up.contiguous()?)?;
        assert_eq!(difference(&swiglu(&gate, &up)?, &expected)?, 0.);
        assert!(!expected.track_op());
        Ok(())
    }

    #[test]
    fn gate_that_does_not_fit_is_refused_by_name() -> Result<()> {
        let (gate, up) = (random((2, 3))?, random((2, 3))?);
        let refused = |gate: &Tensor, up: &Tensor, part: &str| {
            let message = match swiglu(gate, up) {
                Ok(y) => bail!("{y:?} for {part}"),
                Err(error) => error.to_string(),
            };
            assert!(message.contains(part), "{message} does not tell {part}");
            Ok(())
        };
        refused(&gate, &random((3, 2))?, "[3, 2]")?;
        refused(&gate, &up.to_dtype(DType::F32)?, "F32")?;
        refused(&gate.to_dtype(DType::U8)?, &up.to_dtype(DType::U8)?, "U8")?;
        Ok(())
    }
}
