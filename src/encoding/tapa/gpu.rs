//! The phase norm on NVIDIA GPUs, by `kernels/phase_norm.cu`: one operation, in place of a dozen over the tensor.
#![allow(unsafe_code)]

use super::launch::{entry, Sizes};
use super::Gain;
use crate::gpu::{dispatch, launch, on_gpu, GpuElement, Held, Output, Placed};
use candle_core::backend::BackendStorage;
use candle_core::{
    bail, CpuStorage, CudaStorage, CustomOp1, CustomOp2, DType, Layout, Result, Shape, Tensor,
};

/// Whether [`normalise`] takes them.
pub(super) fn takes(x: &Tensor, gain: &Gain) -> bool {
    let dtype = x.dtype();
    let fits = match gain {
        Gain::Fixed(_) => true,
        Gain::Learned(gain) => {
            gain.dtype() == dtype
                && x.dims().get(1..2) == Some(gain.dims())
                && x.device().same_device(gain.device())
        }
    };
    let known = [DType::BF16, DType::F16, DType::F32, DType::F64].contains(&dtype);
    x.device().is_cuda() && known && fits
}

/// The first `amplitude` columns as they are, the others g·x/rms(x). Differentiable in `x` and in a learned gain, each
/// gradient rounded once.
///
/// # Shapes
/// (B, H, T, D) of any strides → the same, contiguous.
pub(super) fn normalise(x: &Tensor, gain: &Gain, amplitude: usize) -> Result<Tensor> {
    match gain {
        Gain::Fixed(gain) => {
            let op = Normalise {
                amplitude,
                fixed: *gain,
            };
            match x.track_op() {
                true => x.apply_op1(op),
                false => x.apply_op1_no_bwd(&op),
            }
        }
        Gain::Learned(gain) => {
            let gain = gain.contiguous()?;
            let op = Normalise {
                amplitude,
                fixed: 0.,
            };
            match x.track_op() || gain.track_op() {
                true => x.apply_op2(&gain, op),
                false => x.apply_op2_no_bwd(&gain, &op),
            }
        }
    }
}

/// One candle operation over x, or over (x, gain).
struct Normalise {
    amplitude: usize,
    /// The gain, where it is no tensor.
    fixed: f64,
}

impl Normalise {
    fn sizes(&self, x: &Layout) -> Result<Sizes> {
        let (b, h, t, d) = x.shape().dims4()?;
        Ok(Sizes {
            x: [b, h, t, d],
            amplitude: self.amplitude,
        })
    }

    fn forward<T: GpuElement>(
        &self,
        x: Placed<'_>,
        gain: Option<Placed<'_>>,
    ) -> Result<(CudaStorage, Shape)> {
        let sizes = self.sizes(x.layout)?;
        // SAFETY: the kernel writes every element.
        let mut out = unsafe { Output::<T>::unwritten(x.device(), x.layout.shape().clone())? };
        if !sizes.is_empty() {
            let stream = x.device().cuda_stream();
            let mut held = Held::on(&stream);
            let mut call = sizes.call()?;
            call.x = x.strided::<T>(&mut held)?;
            call.out = out.write(&mut held);
            call.fixed = self.fixed;
            if let Some(gain) = gain {
                call.gain = held.read_operand::<T>((gain.storage, gain.layout))?;
            }
            let run = sizes.run(&[call.x], T::DTYPE);
            let shape = sizes.rows(&mut call, run, sizes.pieces(run, false))?;
            // SAFETY: candle checked the operands' extents, which are those of the call: the gain's has been compared
            // with the heads. The result is as long as it says.
            unsafe { launch(&stream, &entry("forward", T::DTYPE, run), shape, &call)? };
        }
        Ok(out.into_storage())
    }

    /// Gradients of x and of the gain, where they are tracked.
    fn backward<T: GpuElement>(
        &self,
        x: &Tensor,
        gain: Option<&Tensor>,
        grad: &Tensor,
    ) -> Result<[Option<Tensor>; 2]>
    where
        T::Acc: GpuElement,
    {
        let sizes = self.sizes(x.layout())?;
        let [_, heads, _, _] = sizes.x;
        let asked = [x.track_op(), gain.is_some_and(|gain| gain.track_op())];
        let (x, grad, gain) = (on_gpu(x), on_gpu(grad), gain.map(on_gpu));
        let (x, grad) = (x.placed()?, grad.placed()?);
        let gain = gain.as_ref().map(|gain| gain.operand()).transpose()?;
        let device = x.device();
        // SAFETY: the kernels write every element.
        let dx = || unsafe { Output::<T>::unwritten(device, x.layout.shape().clone()) };
        let mut dx = asked[0].then(dx).transpose()?;
        let mut dgain = match (asked[1], sizes.is_empty()) {
            (false, _) => None,
            (true, true) => Some(Output::<T>::zeros(device, heads)?),
            // SAFETY: as above.
            (true, false) => Some(unsafe { Output::<T>::unwritten(device, heads)? }),
        };
        if !sizes.is_empty() {
            let stream = device.cuda_stream();
            let mut partial = None;
            let mut held = Held::on(&stream);
            let mut call = sizes.call()?;
            call.x = x.strided::<T>(&mut held)?;
            call.grad = grad.strided::<T>(&mut held)?;
            call.fixed = self.fixed;
            if let Some(gain) = gain {
                call.gain = held.read_operand::<T>(gain)?;
            }
            let run = sizes.run(&[call.x, call.grad], T::DTYPE);
            let pieces = sizes.pieces(run, asked[1]);
            if asked[1] {
                // SAFETY: the first kernel writes every element, the second reads them.
                partial = Some(unsafe { Output::<T::Acc>::unwritten(device, (heads, pieces))? });
            }
            call.out = dx.as_mut().map_or(0, |dx| dx.write(&mut held));
            call.gain_grad = dgain.as_mut().map_or(0, |dgain| dgain.write(&mut held));
            call.partial = partial
                .as_mut()
                .map_or(0, |partial| partial.write(&mut held));
            let shape = sizes.rows(&mut call, run, pieces)?;
            // SAFETY: as in `forward`; the sums have a place for each block.
            unsafe { launch(&stream, &entry("backward", T::DTYPE, run), shape, &call)? };
            if asked[1] {
                let shape = sizes.gains()?;
                // SAFETY: as above.
                unsafe { launch(&stream, &entry("gain", T::DTYPE, 1), shape, &call)? };
            }
        }
        Ok([dx.map(Output::into_tensor), dgain.map(Output::into_tensor)])
    }
}

impl CustomOp1 for Normalise {
    fn name(&self) -> &'static str {
        "phase-norm"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("phase-norm: only for NVIDIA GPUs")
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let dtype = x.dtype();
        dispatch!(dtype, "tapa", T => self.forward::<T>(Placed::new((x, layout)), None))
    }

    fn bwd(&self, x: &Tensor, _out: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let [dx, _] = dispatch!(x.dtype(), "tapa", T => self.backward::<T>(x, None, grad))?;
        Ok(dx)
    }
}

impl CustomOp2 for Normalise {
    fn name(&self) -> &'static str {
        "phase-norm"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        bail!("phase-norm: only for NVIDIA GPUs")
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        gain: &CudaStorage,
        gain_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let (x, gain) = (Placed::new((x, x_layout)), Placed::new((gain, gain_layout)));
        dispatch!(x.storage.dtype(), "tapa", T => self.forward::<T>(x, Some(gain)))
    }

    fn bwd(
        &self,
        x: &Tensor,
        gain: &Tensor,
        _out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [dx, dgain] =
            dispatch!(x.dtype(), "tapa", T => self.backward::<T>(x, Some(gain), grad))?;
        Ok((dx, dgain))
    }
}
