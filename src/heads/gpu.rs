//! Heads side by side on NVIDIA GPUs, by `kernels/heads.cu`.
#![allow(unsafe_code)]

use super::launch::{entry, Sizes};
use crate::gpu::{dispatch, launch, on_gpu, GpuElement, Held, Output, Placed, Strided};
use candle_core::backend::BackendStorage;
use candle_core::{bail, CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Tensor};

/// As [`join_heads`](super::join_heads).
pub(super) fn join(x: &Tensor, width: usize) -> Result<Tensor> {
    let op = Join { width };
    match x.track_op() {
        true => x.apply_op1(op),
        false => x.apply_op1_no_bwd(&op),
    }
}

struct Join {
    width: usize,
}

impl Join {
    fn sizes(&self, x: &Layout) -> Result<Sizes> {
        let (b, h, t, all) = x.shape().dims4()?;
        Ok(Sizes {
            x: [b, h, t, all],
            width: self.width,
        })
    }

    fn forward<T: GpuElement>(&self, x: Placed<'_>) -> Result<(CudaStorage, Shape)> {
        let sizes = self.sizes(x.layout)?;
        let [b, h, t, _] = sizes.x;
        // SAFETY: the kernel writes every element.
        let mut out = unsafe { Output::<T>::unwritten(x.device(), (b, t, h * self.width))? };
        if !sizes.is_empty() {
            let stream = x.device().cuda_stream();
            let mut held = Held::on(&stream);
            let mut call = sizes.call()?;
            call.x = x.strided::<T>(&mut held)?;
            call.out = out.write(&mut held);
            let run = sizes.run(&call.x, size_of::<T>());
            let name = entry("join", size_of::<T>(), run);
            // SAFETY: candle checked the operand's extent, which is that of the call; the result is as long as it says.
            unsafe { launch(&stream, &name, sizes.join(run)?, &call)? };
        }
        Ok(out.into_storage())
    }

    fn backward<T: GpuElement>(&self, x: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let sizes = self.sizes(x.layout())?;
        // (B,1,T,H·D)
        let grad = grad.unsqueeze(1)?;
        let grad = on_gpu(&grad);
        let grad = grad.placed()?;
        let device = grad.device();
        if sizes.is_empty() {
            return Ok(Some(
                Output::<T>::zeros(device, x.shape().clone())?.into_tensor(),
            ));
        }
        // SAFETY: the kernel writes every element.
        let mut dx = unsafe { Output::<T>::unwritten(device, x.shape().clone())? };
        let stream = device.cuda_stream();
        let mut held = Held::on(&stream);
        let mut call = sizes.call()?;
        call.x = Strided {
            head: 0,
            ..grad.strided::<T>(&mut held)?
        };
        call.out = dx.write(&mut held);
        let run = sizes.run(&call.x, size_of::<T>());
        let name = entry("part", size_of::<T>(), run);
        // SAFETY: as in `forward`.
        unsafe { launch(&stream, &name, sizes.part(run)?, &call)? };
        drop(held);
        Ok(Some(dx.into_tensor()))
    }
}

impl CustomOp1 for Join {
    fn name(&self) -> &'static str {
        "join-heads"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("join-heads: only for NVIDIA GPUs")
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let dtype = x.dtype();
        dispatch!(dtype, "attention", T => self.forward::<T>(Placed::new((x, layout))))
    }

    fn bwd(&self, x: &Tensor, _out: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        dispatch!(x.dtype(), "attention", T => self.backward::<T>(x, grad))
    }
}
