//! A chunk's losses and the gradient of its logits on a GPU, in one launch each.
#![allow(unsafe_code)]

use super::call::{shape, team, EntropyCall};
use crate::gpu::{filled, in_eights, launch, on_gpu, Held};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::cuda_backend::CudaDType;
use candle_core::{bail, DType, Error, Result, Tensor, WithDType};
use half::bf16;

// SAFETY: plain numbers in the order and with the sizes that the kernels declare; the tests of `call` hold them to it.
unsafe impl DeviceRepr for EntropyCall {}

/// Of logits (n, V) and targets (n) below V, of `i64`: each row's greatest logit, the sum of exp(l − greatest), and the
/// loss, (n) each.
pub(super) fn losses(logits: &Tensor, targets: &Tensor) -> Result<[Tensor; 3]> {
    match logits.dtype() {
        DType::F32 => losses_of::<f32>(logits, targets),
        DType::F64 => losses_of::<f64>(logits, targets),
        other => bail!("loss: {other:?} is neither f32 nor f64"),
    }
}

/// The gradient (n, V) of logits, with what [`losses`] left of them, for an upstream gradient (n): summands of `dtype`, one
/// like the logits or, of logits in f32, two in bf16.
pub(super) fn gradient(
    logits: &Tensor,
    targets: &Tensor,
    [greatest, sum]: [&Tensor; 2],
    upstream: &Tensor,
    dtype: DType,
) -> Result<Vec<Tensor>> {
    let operands = [logits, greatest, sum, upstream];
    match (logits.dtype(), dtype) {
        (DType::F32, DType::F32) => gradient_of::<f32, f32>(operands, targets, "f32"),
        (DType::F32, DType::BF16) => gradient_of::<f32, bf16>(operands, targets, "split"),
        (DType::F64, DType::F64) => gradient_of::<f64, f64>(operands, targets, "f64"),
        (given, asked) => bail!("loss: logits in {given:?} have no gradient in {asked:?}"),
    }
}

fn call_of(logits: &Tensor, targets: &Tensor) -> Result<EntropyCall> {
    let (rows, width) = logits.dims2()?;
    if targets.dims() != [rows] || targets.dtype() != DType::I64 {
        bail!("loss: {rows} rows of logits cannot have the targets {targets:?}")
    }
    Ok(EntropyCall {
        rows: rows as i64,
        width: i32::try_from(width).map_err(Error::wrap)?,
        team: team(width) as i32,
        ..EntropyCall::default()
    })
}

fn losses_of<T>(logits: &Tensor, targets: &Tensor) -> Result<[Tensor; 3]>
where
    T: WithDType + CudaDType + DeviceRepr,
{
    let (rows, width) = logits.dims2()?;
    let (logits_held, targets_held) = (on_gpu(logits), on_gpu(targets));
    let operand = logits_held.operand()?;
    let device = operand.0.device();
    let stream = device.cuda_stream();
    // SAFETY: the kernel writes every element.
    let memory = || unsafe { device.alloc::<T>(rows) };
    let (mut greatest, mut sum, mut losses) = (memory()?, memory()?, memory()?);
    let mut held = Held::on(&stream);
    let mut call = EntropyCall {
        logits: held.read_operand::<T>(operand)?,
        targets: held.read_operand::<i64>(targets_held.operand()?)?,
        greatest: held.write(&mut greatest),
        sum: held.write(&mut sum),
        out: held.write(&mut losses),
        ..call_of(logits, targets)?
    };
    call.vector = in_eights(width, &[call.logits]).into();
    let entry = format!("cross_entropy_forward_{}", T::DTYPE.as_str());
    // SAFETY: the operands have rows · width and rows elements, the targets are below the width, as `Targets` checked, and
    // the results have rows elements; all stay alive until it is launched, and memory given back later is not given out
    // on this stream before the launch has run.
    unsafe { launch(&stream, &entry, shape(rows, width)?, &call)? };
    drop(held);
    Ok([greatest, sum, losses].map(|x| filled(x, device, rows)))
}

/// The kernel makes one summand, or where they are of another dtype than the logits two.
fn gradient_of<T, Out>(
    [logits, greatest, sum, upstream]: [&Tensor; 4],
    targets: &Tensor,
    kernel: &str,
) -> Result<Vec<Tensor>>
where
    T: WithDType + CudaDType + DeviceRepr,
    Out: WithDType + CudaDType + DeviceRepr,
{
    let (rows, width) = logits.dims2()?;
    if [greatest, sum, upstream].iter().any(|x| x.dims() != [rows]) {
        bail!("loss: {rows} rows of logits cannot have {greatest:?}, {sum:?} and {upstream:?}")
    }
    let memories = [logits, greatest, sum, upstream].map(on_gpu);
    let targets_held = on_gpu(targets);
    let [logits_held, greatest, sum, upstream] = &memories;
    let operand = logits_held.operand()?;
    let device = operand.0.device();
    let stream = device.cuda_stream();
    // SAFETY: the kernel writes every element.
    let memory = || unsafe { device.alloc::<Out>(rows * width) };
    let mut out = memory()?;
    let mut rest = (T::DTYPE != Out::DTYPE).then(memory).transpose()?;
    let mut held = Held::on(&stream);
    let mut call = EntropyCall {
        logits: held.read_operand::<T>(operand)?,
        targets: held.read_operand::<i64>(targets_held.operand()?)?,
        rest: rest.as_mut().map_or(0, |rest| held.write(rest)),
        greatest: held.read_operand::<T>(greatest.operand()?)?,
        sum: held.read_operand::<T>(sum.operand()?)?,
        grad: held.read_operand::<T>(upstream.operand()?)?,
        out: held.write(&mut out),
        ..call_of(logits, targets)?
    };
    call.vector = in_eights(width, &[call.logits, call.out, call.rest]).into();
    let entry = format!("cross_entropy_backward_{kernel}");
    // SAFETY: as in `losses_of`.
    unsafe { launch(&stream, &entry, shape(rows, width)?, &call)? };
    drop(held);
    let summands = [Some(out), rest].into_iter().flatten();
    Ok(summands.map(|x| filled(x, device, (rows, width))).collect())
}
