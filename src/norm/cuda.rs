//! RMSNorm on a GPU: one launch forward, two backward.
#![allow(unsafe_code)]

use super::call::{self, NormCall};
use crate::gpu::{filled, in_eights, launch, on_gpu, Held};
use crate::host::Element;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::cuda_backend::CudaDType;
use candle_core::{bail, CudaStorage, DType, Error, Layout, Result, Tensor};
use half::{bf16, f16};

// SAFETY: plain numbers in the order and with the sizes that the kernels declare; the tests of `call` hold them to it.
unsafe impl DeviceRepr for NormCall {}

type Operand<'a> = (&'a CudaStorage, &'a Layout);

pub(crate) fn forward(x: Operand, weight: Operand, epsilon: f64) -> Result<CudaStorage> {
    match x.0.dtype() {
        DType::F32 => forward_of::<f32>(x, weight, epsilon),
        DType::F64 => forward_of::<f64>(x, weight, epsilon),
        DType::BF16 => forward_of::<bf16>(x, weight, epsilon),
        DType::F16 => forward_of::<f16>(x, weight, epsilon),
        other => bail!("rms_norm: dtype {other:?} is not supported (f32, f64, bf16, f16 are)"),
    }
}

/// See [`super::gradients`].
pub(super) fn backward(
    tensors: [&Tensor; 3],
    addend: Option<&Tensor>,
    asked: [bool; 2],
    epsilon: f64,
) -> Result<[Option<Tensor>; 2]> {
    match tensors[0].dtype() {
        DType::F32 => backward_of::<f32>(tensors, addend, asked, epsilon),
        DType::F64 => backward_of::<f64>(tensors, addend, asked, epsilon),
        DType::BF16 => backward_of::<bf16>(tensors, addend, asked, epsilon),
        DType::F16 => backward_of::<f16>(tensors, addend, asked, epsilon),
        other => bail!("rms_norm: no gradient for dtype {other:?}"),
    }
}

/// The number of rows and their width.
fn sizes(x: &Layout, weight: &Layout) -> (usize, usize) {
    let (elements, width) = (x.shape().elem_count(), weight.shape().elem_count());
    (elements / width, width)
}

fn call_of(rows: usize, width: usize, epsilon: f64) -> Result<NormCall> {
    Ok(NormCall {
        rows: rows as i64,
        width: i32::try_from(width).map_err(Error::wrap)?,
        team: call::team(width) as i32,
        epsilon,
        ..NormCall::default()
    })
}

fn forward_of<T>(x: Operand, weight: Operand, epsilon: f64) -> Result<CudaStorage>
where
    T: Element + CudaDType + DeviceRepr,
{
    let (rows, width) = sizes(x.1, weight.1);
    let device = x.0.device();
    let stream = device.cuda_stream();
    // SAFETY: the kernel writes every element.
    let mut out = unsafe { device.alloc::<T>(rows * width)? };
    let mut held = Held::on(&stream);
    let mut call = NormCall {
        x: held.read_operand::<T>(x)?,
        weight: held.read_operand::<T>(weight)?,
        out: held.write(&mut out),
        ..call_of(rows, width, epsilon)?
    };
    call.vector = in_eights(width, &[call.x, call.weight, call.out]).into();
    let entry = format!("rms_norm_forward_{}", T::DTYPE.as_str());
    // SAFETY: the operands have rows · width and width elements, and so has the result; all stay alive until it is
    // launched, and memory given back later is not given out on this stream before the launch has run.
    unsafe { launch(&stream, &entry, call::forward_shape(rows, width)?, &call)? };
    drop(held);
    Ok(CudaStorage::wrap_cuda_slice(out, device.clone()))
}

fn backward_of<T>(
    [x, weight, grad]: [&Tensor; 3],
    addend: Option<&Tensor>,
    asked: [bool; 2],
    epsilon: f64,
) -> Result<[Option<Tensor>; 2]>
where
    T: Element + CudaDType + DeviceRepr,
    T::Acc: DeviceRepr,
{
    let (x_held, weight_held, grad_held) = (on_gpu(x), on_gpu(weight), on_gpu(grad));
    let addend_held = addend.map(on_gpu);
    let operand = x_held.operand()?;
    let device = operand.0.device();
    let stream = device.cuda_stream();
    let (rows, width) = sizes(x.layout(), weight.layout());
    let blocks = call::backward_blocks(rows, width);
    // SAFETY: the kernels write every element, of `partial` before they read it.
    let mut dx = asked[0]
        .then(|| unsafe { device.alloc::<T>(rows * width) })
        .transpose()?;
    // SAFETY: as above.
    let memory = || unsafe {
        Ok::<_, Error>((
            device.alloc::<T::Acc>(blocks * width)?,
            device.alloc::<T>(width)?,
        ))
    };
    let mut dw = asked[1].then(memory).transpose()?;

    let mut held = Held::on(&stream);
    let mut call = NormCall {
        x: held.read_operand::<T>(operand)?,
        weight: held.read_operand::<T>(weight_held.operand()?)?,
        grad: held.read_operand::<T>(grad_held.operand()?)?,
        out: dx.as_mut().map_or(0, |dx| held.write(dx)),
        blocks: blocks as i32,
        ..call_of(rows, width, epsilon)?
    };
    let mut shared_bytes = 0;
    if let Some((partial, dw)) = &mut dw {
        call.partial = held.write(partial);
        call.weight_grad = held.write(dw);
        if let Some(bytes) = call::shared_bytes(width, size_of::<T::Acc>()) {
            (call.shared, shared_bytes) = (1, bytes);
        }
    }
    if let Some(addend) = &addend_held {
        call.addend = held.read_operand::<T>(addend.operand()?)?;
    }
    let pieces = [call.x, call.weight, call.grad, call.out, call.addend];
    call.vector = in_eights(width, &pieces).into();
    let name = T::DTYPE.as_str();
    let shape = call::backward_shape(rows, width, shared_bytes)?;
    // SAFETY: as in `forward_of`; `partial` has a row for each block, the shared memory is what `call` says.
    unsafe { launch(&stream, &format!("rms_norm_backward_{name}"), shape, &call)? };
    if call.partial != 0 {
        let shape = call::weight_shape(width)?;
        // SAFETY: as above.
        unsafe { launch(&stream, &format!("rms_norm_weight_{name}"), shape, &call)? };
    }
    drop(held);
    Ok([
        dx.map(|dx| filled(dx, device, x.shape())),
        dw.map(|(_, dw)| filled(dw, device, weight.shape())),
    ])
}
