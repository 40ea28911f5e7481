//! Memory on a GPU: what a launch touches, and what is kept from call to call.
#![allow(unsafe_code)]

use crate::recent::Recent;
use candle_core::cuda_backend::cudarc::driver::{
    result, sys, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, SyncOnDrop,
};
use candle_core::cuda_backend::CudaDType;
use candle_core::op::BackpropOp;
use candle_core::{bail, CudaDevice, CudaStorage, Layout, Result, Shape, Storage, Tensor};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// Memory that launches on a stream read and write; what is held is given back when they are on their way.
pub(crate) struct Held<'a> {
    stream: &'a CudaStream,
    guards: Vec<SyncOnDrop<'a>>,
}

impl<'a> Held<'a> {
    pub fn on(stream: &'a CudaStream) -> Self {
        let guards = Vec::new();
        Self { stream, guards }
    }

    /// The address, for reading.
    pub fn read<T>(&mut self, slice: &'a CudaSlice<T>) -> u64 {
        let (address, guard) = slice.device_ptr(self.stream);
        self.guards.push(guard);
        address
    }

    /// The address of a contiguous operand's first element, for reading.
    pub fn read_operand<T: CudaDType + 'a>(
        &mut self,
        (storage, layout): (&'a CudaStorage, &Layout),
    ) -> Result<u64> {
        if !layout.is_contiguous() {
            bail!("a kernel's operand is not contiguous: {layout:?}")
        }
        let start = self.read(storage.as_cuda_slice::<T>()?);
        Ok(start + (layout.start_offset() * size_of::<T>()) as u64)
    }

    /// The address, for writing.
    pub fn write<T>(&mut self, slice: &'a mut CudaSlice<T>) -> u64 {
        let (address, guard) = slice.device_ptr_mut(self.stream);
        self.guards.push(guard);
        address
    }
}

/// The value of this key, made and kept if need be.
///
/// Kernels of other threads, each with a stream of its own, may read what is kept here. So it is complete before they
/// can find it, and what it displaces is freed only when whatever was launched has run.
pub(crate) fn kept<K: PartialEq, V, const N: usize>(
    recent: &Recent<K, V, N>,
    device: &CudaDevice,
    key: K,
    make: impl FnOnce() -> Result<V>,
) -> Result<Arc<V>> {
    if let Some(known) = recent.get(&key) {
        return Ok(known);
    }
    let made = Arc::new(make()?);
    let stream = device.cuda_stream();
    stream.synchronize().map_err(candle_core::Error::wrap)?;
    if let Some(displaced) = recent.add(key, made.clone()) {
        let context = stream.context();
        context.synchronize().map_err(candle_core::Error::wrap)?;
        drop(displaced);
    }
    Ok(made)
}

/// GPUs that [`keep_freed`] has seen, by ordinal.
static SEEN: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

/// Lets this process keep memory of a GPU that it has freed, for its next request. By default the driver gives all of it
/// back to the system whenever the process waits for the GPU, and maps it anew afterwards: in training, at every step.
///
/// The threshold is the whole process's. So it is looked at once for each GPU, and left alone where it is not the
/// driver's default of 0: a choice of the program that this is part of stays, made before or after.
pub(crate) fn keep_freed(device: &CudaDevice) {
    let stream = device.cuda_stream();
    let context = stream.context();
    // The set is whole whenever a thread may have panicked.
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    if !seen.insert(context.ordinal()) {
        return;
    }
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    let (mut chosen, mut all) = (0u64, u64::MAX);
    // SAFETY: the device is the context's own, the pool its default one, and the attribute a `u64`. A GPU without such
    // pools is only slower.
    let _ = unsafe {
        result::device::get_default_mem_pool(context.cu_device()).and_then(|pool| {
            result::mem_pool::get_attribute(pool, attribute, (&raw mut chosen).cast())?;
            match chosen {
                0 => result::mem_pool::set_attribute(pool, attribute, (&raw mut all).cast()),
                _ => Ok(()),
            }
        })
    };
}

/// A copy on the GPU.
pub(crate) fn upload<T: DeviceRepr + 'static>(
    device: &CudaDevice,
    values: &[T],
) -> Result<CudaSlice<T>> {
    let stream = device.cuda_stream();
    stream.clone_htod(values).map_err(candle_core::Error::wrap)
}

/// Whether kernels may read rows of `width` elements at these addresses as `kernels/element.cuh` does: eight elements at
/// a time, in pieces of 16 bytes.
pub(crate) fn in_eights(width: usize, addresses: &[u64]) -> bool {
    width.is_multiple_of(8) && addresses.iter().all(|at| at.is_multiple_of(16))
}

/// Memory that kernels have filled, as a tensor outside any graph.
pub(crate) fn filled<T: CudaDType>(
    slice: CudaSlice<T>,
    device: &CudaDevice,
    shape: impl Into<Shape>,
) -> Tensor {
    let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(slice, device.clone()));
    Tensor::from_storage(storage, shape, BackpropOp::none(), false)
}
