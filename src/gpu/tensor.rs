//! Tensors on a GPU, as this crate's operations read and make them.
#![allow(unsafe_code)]

use super::{upload, Held, Strided};
use crate::host::Element;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DeviceRepr};
use candle_core::cuda_backend::CudaDType;
use candle_core::op::BackpropOp;
use candle_core::{bail, CudaDevice, CudaStorage, Layout, Result, Shape, Storage, Tensor};
use std::ops::Deref;

/// A dtype that kernels take.
pub(crate) trait GpuElement: Element + CudaDType + DeviceRepr {}
impl<T: Element + CudaDType + DeviceRepr> GpuElement for T {}

/// The body with `$T` as the dtype's Rust type.
macro_rules! dispatch {
    ($dtype:expr, $operation:literal, $T:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            candle_core::DType::F16 => {
                type $T = half::f16;
                $body
            }
            candle_core::DType::F32 => {
                type $T = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $T = f64;
                $body
            }
            other => candle_core::bail!(
                concat!(
                    $operation,
                    ": dtype {:?} is not supported (f32, f64, bf16, f16 are)"
                ),
                other
            ),
        }
    };
}
pub(crate) use dispatch;

/// A tensor in a GPU's memory.
#[derive(Clone, Copy)]
pub(crate) struct Placed<'a> {
    pub storage: &'a CudaStorage,
    pub layout: &'a Layout,
}

impl<'a> Placed<'a> {
    pub fn new((storage, layout): (&'a CudaStorage, &'a Layout)) -> Self {
        Self { storage, layout }
    }

    pub fn device(&self) -> &'a CudaDevice {
        &self.storage.device
    }

    /// As kernels read it.
    ///
    /// # Errors
    /// When it has another dtype, or not four dimensions.
    pub fn strided<T: GpuElement>(&self, held: &mut Held<'a>) -> Result<Strided> {
        let address = held.read(self.storage.as_cuda_slice::<T>()?);
        Strided::new(address, size_of::<T>(), self.layout)
    }
}

/// A tensor's memory, held while kernels that read it are launched.
pub(crate) struct OnGpu<'a, Guard> {
    storage: Guard,
    layout: &'a Layout,
}

pub(crate) fn on_gpu(x: &Tensor) -> OnGpu<'_, impl Deref<Target = Storage> + '_> {
    let (storage, layout) = x.storage_and_layout();
    OnGpu { storage, layout }
}

impl<Guard: Deref<Target = Storage>> OnGpu<'_, Guard> {
    pub fn operand(&self) -> Result<(&CudaStorage, &Layout)> {
        self.placed().map(|x| (x.storage, x.layout))
    }

    pub fn placed(&self) -> Result<Placed<'_>> {
        match &*self.storage {
            Storage::Cuda(storage) => Ok(Placed {
                storage,
                layout: self.layout,
            }),
            _ => bail!("a kernel of the GPU was given a tensor on another device"),
        }
    }
}

/// A tensor that kernels fill, without gaps.
pub(crate) struct Output<T> {
    memory: CudaSlice<T>,
    shape: Shape,
    device: CudaDevice,
}

impl<T: GpuElement> Output<T> {
    /// # Safety
    /// Every element must be written before it is read.
    pub unsafe fn unwritten(device: &CudaDevice, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        let len = shape.elem_count();
        if len > isize::MAX as usize / size_of::<T>() {
            bail!("a tensor of {shape:?} is too large")
        }
        // There is no memory of no length.
        // SAFETY: the caller's.
        let memory = unsafe { device.alloc::<T>(len.max(1))? };
        Ok(Self {
            memory,
            shape,
            device: device.clone(),
        })
    }

    pub fn zeros(device: &CudaDevice, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        Ok(Self {
            memory: upload(device, &vec![T::zero(); shape.elem_count().max(1)])?,
            shape,
            device: device.clone(),
        })
    }

    /// The address, for writing.
    pub fn write<'a>(&'a mut self, held: &mut Held<'a>) -> u64 {
        held.write(&mut self.memory)
    }

    pub fn into_storage(self) -> (CudaStorage, Shape) {
        let storage = CudaStorage::wrap_cuda_slice(self.memory, self.device);
        (storage, self.shape)
    }

    /// A tensor that no gradient passes.
    pub fn into_tensor(self) -> Tensor {
        let (storage, shape) = self.into_storage();
        Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
    }
}
