//! SwiGLU on a GPU: one launch in each direction.
#![allow(unsafe_code)]

use super::call::{as_rows, shape, SwigluCall};
use crate::gpu::{filled, in_eights, launch, on_gpu, Held};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::cuda_backend::CudaDType;
use candle_core::{bail, CudaStorage, DType, Error, Layout, Result, Tensor, WithDType};
use half::{bf16, f16};

// SAFETY: plain numbers in the order and with the sizes that the kernels declare; the tests of `call` hold them to it.
unsafe impl DeviceRepr for SwigluCall {}

type Operand<'a> = (&'a CudaStorage, &'a Layout);

pub(super) fn forward(gate: Operand, up: Operand) -> Result<CudaStorage> {
    match gate.0.dtype() {
        DType::F32 => forward_of::<f32>(gate, up),
        DType::F64 => forward_of::<f64>(gate, up),
        DType::BF16 => forward_of::<bf16>(gate, up),
        DType::F16 => forward_of::<f16>(gate, up),
        other => bail!("swiglu: dtype {other:?} is not supported (f32, f64, bf16, f16 are)"),
    }
}

/// Gradients of gate and up.
pub(super) fn backward(tensors: [&Tensor; 3]) -> Result<[Tensor; 2]> {
    match tensors[0].dtype() {
        DType::F32 => backward_of::<f32>(tensors),
        DType::F64 => backward_of::<f64>(tensors),
        DType::BF16 => backward_of::<bf16>(tensors),
        DType::F16 => backward_of::<f16>(tensors),
        other => bail!("swiglu: no gradient for dtype {other:?}"),
    }
}

/// The sizes of operands without gaps.
fn call_of(layout: &Layout) -> Result<(usize, SwigluCall)> {
    let last = layout.dims().last().copied().unwrap_or(1);
    let (rows, width) = as_rows(layout.shape().elem_count(), last);
    let call = SwigluCall {
        rows: rows as i64,
        stride: width as i64,
        width: i32::try_from(width).map_err(Error::wrap)?,
        ..SwigluCall::default()
    };
    Ok((rows, call))
}

fn forward_of<T>(gate: Operand, up: Operand) -> Result<CudaStorage>
where
    T: WithDType + CudaDType + DeviceRepr,
{
    let device = gate.0.device();
    let stream = device.cuda_stream();
    let (rows, sizes) = call_of(gate.1)?;
    let width = sizes.width as usize;
    // SAFETY: the kernel writes every element.
    let mut out = unsafe { device.alloc::<T>(rows * width)? };
    let mut held = Held::on(&stream);
    let mut call = SwigluCall {
        gate: held.read_operand::<T>(gate)?,
        up: held.read_operand::<T>(up)?,
        out: held.write(&mut out),
        ..sizes
    };
    call.vector = in_eights(width, &[call.gate, call.up, call.out]).into();
    let entry = format!("swiglu_forward_{}", T::DTYPE.as_str());
    // SAFETY: operands and result have rows · width elements; all stay alive until it is launched, and memory given back
    // later is not given out on this stream before the launch has run.
    unsafe { launch(&stream, &entry, shape(rows, width)?, &call)? };
    drop(held);
    Ok(CudaStorage::wrap_cuda_slice(out, device.clone()))
}

fn backward_of<T>([gate, up, grad]: [&Tensor; 3]) -> Result<[Tensor; 2]>
where
    T: WithDType + CudaDType + DeviceRepr,
{
    let (gate_held, up_held, grad_held) = (on_gpu(gate), on_gpu(up), on_gpu(grad));
    let operand = gate_held.operand()?;
    let device = operand.0.device();
    let stream = device.cuda_stream();
    let (rows, sizes) = call_of(gate.layout())?;
    let width = sizes.width as usize;
    // SAFETY: the kernel writes every element.
    let memory = || unsafe { device.alloc::<T>(rows * width) };
    let (mut dgate, mut dup) = (memory()?, memory()?);
    let mut held = Held::on(&stream);
    let mut call = SwigluCall {
        gate: held.read_operand::<T>(operand)?,
        up: held.read_operand::<T>(up_held.operand()?)?,
        grad: held.read_operand::<T>(grad_held.operand()?)?,
        gate_grad: held.write(&mut dgate),
        up_grad: held.write(&mut dup),
        ..sizes
    };
    let pieces = [call.gate, call.up, call.grad, call.gate_grad, call.up_grad];
    call.vector = in_eights(width, &pieces).into();
    let entry = format!("swiglu_backward_{}", T::DTYPE.as_str());
    // SAFETY: as in `forward_of`.
    unsafe { launch(&stream, &entry, shape(rows, width)?, &call)? };
    drop(held);
    Ok([
        filled(dgate, device, gate.shape()),
        filled(dup, device, up.shape()),
    ])
}

/// (rows, 2I), a row's gates before what they let through → (rows, I).
pub(crate) fn forward_joined(
    joined: &CudaStorage,
    width: usize,
    rows: usize,
) -> Result<CudaStorage> {
    match joined.dtype() {
        DType::F32 => forward_joined_of::<f32>(joined, width, rows),
        DType::F64 => forward_joined_of::<f64>(joined, width, rows),
        DType::BF16 => forward_joined_of::<bf16>(joined, width, rows),
        DType::F16 => forward_joined_of::<f16>(joined, width, rows),
        other => bail!("swiglu: dtype {other:?} is not supported (f32, f64, bf16, f16 are)"),
    }
}

/// The gradient (rows, 2I) of [`forward_joined`]'s operand (rows, 2I), and its result again; both operands contiguous.
pub(crate) fn backward_joined(joined: &Tensor, grad: &Tensor) -> Result<[Tensor; 2]> {
    match joined.dtype() {
        DType::F32 => backward_joined_of::<f32>(joined, grad),
        DType::F64 => backward_joined_of::<f64>(joined, grad),
        DType::BF16 => backward_joined_of::<bf16>(joined, grad),
        DType::F16 => backward_joined_of::<f16>(joined, grad),
        other => bail!("swiglu: no gradient for dtype {other:?}"),
    }
}

/// Rows of gates and what they let through, which start at these two addresses.
fn joined_call<T>(gate: u64, width: usize, rows: usize) -> Result<SwigluCall> {
    Ok(SwigluCall {
        gate,
        up: gate + (width * size_of::<T>()) as u64,
        rows: rows as i64,
        stride: 2 * width as i64,
        width: i32::try_from(width).map_err(Error::wrap)?,
        ..SwigluCall::default()
    })
}

fn forward_joined_of<T>(joined: &CudaStorage, width: usize, rows: usize) -> Result<CudaStorage>
where
    T: WithDType + CudaDType + DeviceRepr,
{
    let device = joined.device();
    let stream = device.cuda_stream();
    let slice = joined.as_cuda_slice::<T>()?;
    if slice.len() != 2 * rows * width {
        bail!(
            "swiglu: {} numbers are not {rows} rows of 2·{width}",
            slice.len()
        )
    }
    // SAFETY: the kernel writes every element.
    let mut out = unsafe { device.alloc::<T>(rows * width)? };
    let mut held = Held::on(&stream);
    let mut call = SwigluCall {
        out: held.write(&mut out),
        ..joined_call::<T>(held.read(slice), width, rows)?
    };
    call.vector = in_eights(width, &[call.gate, call.up, call.out]).into();
    let entry = format!("swiglu_forward_{}", T::DTYPE.as_str());
    // SAFETY: as in `forward_of`; the operand has rows of 2 · width elements.
    unsafe { launch(&stream, &entry, shape(rows, width)?, &call)? };
    drop(held);
    Ok(CudaStorage::wrap_cuda_slice(out, device.clone()))
}

fn backward_joined_of<T>(joined: &Tensor, grad: &Tensor) -> Result<[Tensor; 2]>
where
    T: WithDType + CudaDType + DeviceRepr,
{
    let (rows, width) = grad.dims2()?;
    if joined.dims2()? != (rows, 2 * width) {
        bail!(
            "swiglu: {:?} cannot have a gradient {:?}",
            joined.dims(),
            grad.dims()
        )
    }
    let (joined_held, grad_held) = (on_gpu(joined), on_gpu(grad));
    let operand = joined_held.operand()?;
    let device = operand.0.device();
    let stream = device.cuda_stream();
    // SAFETY: the kernel writes every element.
    let memory = |len: usize| unsafe { device.alloc::<T>(len) };
    let (mut djoined, mut out) = (memory(2 * rows * width)?, memory(rows * width)?);
    let mut held = Held::on(&stream);
    let mut call = joined_call::<T>(held.read_operand::<T>(operand)?, width, rows)?;
    call.grad = held.read_operand::<T>(grad_held.operand()?)?;
    call.out = held.write(&mut out);
    call.gate_grad = held.write(&mut djoined);
    call.up_grad = call.gate_grad + (width * size_of::<T>()) as u64;
    let pieces = [
        call.gate,
        call.up,
        call.grad,
        call.out,
        call.gate_grad,
        call.up_grad,
    ];
    call.vector = in_eights(width, &pieces).into();
    let entry = format!("swiglu_backward_{}", T::DTYPE.as_str());
    // SAFETY: as in `forward_of`; operand and gradient have rows of 2 · width elements.
    unsafe { launch(&stream, &entry, shape(rows, width)?, &call)? };
    drop(held);
    Ok([
        filled(djoined, device, joined.shape()),
        filled(out, device, (rows, width)),
    ])
}
