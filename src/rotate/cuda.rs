//! Rotation on NVIDIA GPUs, by `kernels/rotate.cu`.
#![allow(unsafe_code)]

use super::launch::{entry, Sizes};
use super::Layout;
use crate::gpu::{launch, GpuElement, Held, Output, Placed};
use candle_core::{Result, Tensor};

/// z·w for every pair, or z·w̄.
pub(super) fn turn<T: GpuElement>(
    layout: Layout,
    conjugate: bool,
    [x, cos, sin]: [Placed<'_>; 3],
) -> Result<Output<T>>
where
    T::Acc: GpuElement,
{
    let device = x.device();
    let sizes = sizes(x, cos)?;
    // SAFETY: the kernel writes every element.
    let mut out = unsafe { Output::<T>::unwritten(device, x.layout.shape().clone())? };
    if sizes.is_empty() {
        return Ok(out);
    }
    let stream = device.cuda_stream();
    let mut held = Held::on(&stream);
    let mut call = sizes.call(layout, conjugate)?;
    call.x = x.strided::<T>(&mut held)?;
    call.cos = cos.strided::<T::Acc>(&mut held)?;
    call.sin = sin.strided::<T::Acc>(&mut held)?;
    call.out = out.write(&mut held);
    let run = sizes.run(&call, T::DTYPE);
    let shape = sizes.turn(run)?;
    // SAFETY: candle checked the operands' extents, which are those of the call; the result is as long as it says.
    unsafe { launch(&stream, &entry("turn", T::DTYPE, run), shape, &call)? };
    drop(held);
    Ok(out)
}

/// Which gradients are asked for, of x, cos and sin.
pub(super) type Asked = [bool; 3];

/// Gradients of x, cos and sin, where at least one of the table's is asked for.
pub(super) fn gradients<T: GpuElement>(
    layout: Layout,
    [x, cos, sin, grad]: [Placed<'_>; 4],
    asked: Asked,
) -> Result<[Option<Tensor>; 3]>
where
    T::Acc: GpuElement,
{
    let device = x.device();
    let sizes = sizes(x, cos)?;
    let table = || {
        if sizes.is_empty() {
            return Output::<T::Acc>::zeros(device, cos.layout.shape().clone());
        }
        // SAFETY: the kernel writes every element.
        unsafe { Output::unwritten(device, cos.layout.shape().clone()) }
    };
    // SAFETY: as above.
    let out = || unsafe { Output::<T>::unwritten(device, x.layout.shape().clone()) };
    let mut dx = asked[0].then(out).transpose()?;
    let mut dcos = asked[1].then(table).transpose()?;
    let mut dsin = asked[2].then(table).transpose()?;
    if !sizes.is_empty() {
        let stream = device.cuda_stream();
        let mut held = Held::on(&stream);
        let mut call = sizes.call(layout, true)?;
        call.x = grad.strided::<T>(&mut held)?;
        call.cos = cos.strided::<T::Acc>(&mut held)?;
        call.sin = sin.strided::<T::Acc>(&mut held)?;
        call.source = x.strided::<T>(&mut held)?;
        call.out = dx.as_mut().map_or(0, |dx| dx.write(&mut held));
        call.dcos = dcos.as_mut().map_or(0, |dcos| dcos.write(&mut held));
        call.dsin = dsin.as_mut().map_or(0, |dsin| dsin.write(&mut held));
        let run = sizes.run(&call, T::DTYPE);
        let (slices, shape) = sizes.gradient(run, call.out != 0)?;
        call.slices = slices;
        // SAFETY: as in `turn`; the table's gradients are as long as the table.
        unsafe { launch(&stream, &entry("gradient", T::DTYPE, run), shape, &call)? };
    }
    Ok([
        dx.map(Output::into_tensor),
        dcos.map(Output::into_tensor),
        dsin.map(Output::into_tensor),
    ])
}

fn sizes(x: Placed<'_>, table: Placed<'_>) -> Result<Sizes> {
    let (b, h, t, d) = x.layout.shape().dims4()?;
    let (rows, heads, steps, pairs) = table.layout.shape().dims4()?;
    Ok(Sizes {
        x: [b, h, t, d],
        table: [rows, heads, steps, pairs],
    })
}
