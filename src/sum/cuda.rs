//! The sum on a GPU, one launch.
#![allow(unsafe_code)]

use super::call::{shape, SumCall};
use crate::gpu::{dispatch, in_eights, launch, GpuElement, Held};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{bail, CudaStorage, Layout, Result};

// SAFETY: plain numbers in the order and with the sizes that the kernels declare; the tests of `call` hold them to it.
unsafe impl DeviceRepr for SumCall {}

type Operand<'a> = (&'a CudaStorage, &'a Layout);

/// x + y, both contiguous, of as many elements.
pub(crate) fn forward(x: Operand, y: Operand) -> Result<CudaStorage> {
    dispatch!(x.0.dtype(), "sum", T => forward_of::<T>(x, y))
}

fn forward_of<T: GpuElement>(x: Operand, y: Operand) -> Result<CudaStorage> {
    let len = x.1.shape().elem_count();
    if len != y.1.shape().elem_count() {
        bail!("sum: {:?} and {:?} do not fit", x.1.shape(), y.1.shape())
    }
    let device = x.0.device();
    let stream = device.cuda_stream();
    // SAFETY: the kernel writes every element.
    let mut out = unsafe { device.alloc::<T>(len)? };
    let mut held = Held::on(&stream);
    let mut call = SumCall {
        x: held.read_operand::<T>(x)?,
        y: held.read_operand::<T>(y)?,
        out: held.write(&mut out),
        len: len as i64,
        ..SumCall::default()
    };
    call.vector = in_eights(len, &[call.x, call.y, call.out]).into();
    let entry = format!("sum_{}", T::DTYPE.as_str());
    // SAFETY: operands and result have `len` elements; all stay alive until it is launched, and memory given back later is
    // not given out on this stream before the launch has run.
    unsafe { launch(&stream, &entry, shape(len)?, &call)? };
    drop(held);
    Ok(CudaStorage::wrap_cuda_slice(out, device.clone()))
}
