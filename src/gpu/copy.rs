//! Views brought into the order that they show: what candle does number by number, here in units of up to 16 bytes.
#![allow(unsafe_code)]

use super::rows::RowsCall;
use super::{filled, launch, on_gpu, Held};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::cuda_backend::CudaDType;
use candle_core::{CudaStorage, DType, Layout, Result, Tensor, WithDType};
use half::{bf16, f16};

// SAFETY: plain numbers in the order and with the sizes that the kernels declare; the tests of `rows` hold them to it.
unsafe impl DeviceRepr for RowsCall {}

/// The elements of a view of rank 4 in its order; `None` where its rows are not side by side.
pub(crate) fn in_order(storage: &CudaStorage, layout: &Layout) -> Result<Option<CudaStorage>> {
    let device = storage.device();
    macro_rules! copied {
        ($t:ty) => {
            copied::<$t>(storage, layout)?
                .map(|copy| CudaStorage::wrap_cuda_slice(copy, device.clone()))
        };
    }
    Ok(match storage.dtype() {
        DType::F32 => copied!(f32),
        DType::F64 => copied!(f64),
        DType::BF16 => copied!(bf16),
        DType::F16 => copied!(f16),
        _ => None,
    })
}

/// A contiguous tensor of these values, outside any graph.
pub(crate) fn contiguous(x: &Tensor) -> Result<Tensor> {
    let x = x.detach();
    if x.is_contiguous() {
        return Ok(x);
    }
    let held = on_gpu(&x);
    let (storage, layout) = held.operand()?;
    let device = storage.device();
    macro_rules! copied {
        ($t:ty) => {
            copied::<$t>(storage, layout)?.map(|copy| filled(copy, device, x.shape()))
        };
    }
    let copy = match x.dtype() {
        DType::F32 => copied!(f32),
        DType::F64 => copied!(f64),
        DType::BF16 => copied!(bf16),
        DType::F16 => copied!(f16),
        _ => None,
    };
    match copy {
        Some(copy) => Ok(copy),
        None => x.contiguous(),
    }
}

fn copied<T>(
    storage: &CudaStorage,
    layout: &Layout,
) -> Result<Option<candle_core::cuda_backend::cudarc::driver::CudaSlice<T>>>
where
    T: WithDType + CudaDType + DeviceRepr,
{
    if layout.shape().elem_count() == 0 {
        return Ok(None);
    }
    let device = storage.device();
    let stream = device.cuda_stream();
    // SAFETY: the kernel writes every element.
    let mut copy = unsafe { device.alloc::<T>(layout.shape().elem_count())? };
    let mut held = Held::on(&stream);
    let from = held.read(storage.as_cuda_slice::<T>()?);
    let to = held.write(&mut copy);
    let Some((call, unit)) = RowsCall::new(layout, from, to, size_of::<T>()) else {
        return Ok(None);
    };
    // SAFETY: the view is inside its memory, as candle's views are, and the copy has all its elements. Both stay alive until
    // it is launched, and memory given back later is not given out on this stream before the launch has run.
    unsafe { launch(&stream, &format!("copy_rows_{unit}"), call.shape()?, &call)? };
    drop(held);
    Ok(Some(copy))
}
