//! NVIDIA GPUs: the shape of a launch, and with the feature `cuda` how kernels are loaded and launched on candle's stream.
//!
//! Everything launched is ordered by that stream: memory set aside for one call may be given back as soon as its
//! kernels are launched.

#[cfg(feature = "cuda")]
mod copy;
#[cfg(feature = "cuda")]
mod memory;
#[cfg(feature = "cuda")]
mod module;
#[cfg(feature = "cuda")]
mod product;
mod rows;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod strided;
#[cfg(feature = "cuda")]
mod tensor;

#[cfg(feature = "cuda")]
pub(crate) use copy::{contiguous, in_order};
#[cfg(feature = "cuda")]
pub(crate) use memory::{filled, in_eights, keep_freed, kept, upload, Held};
#[cfg(feature = "cuda")]
pub use module::{choose_kernels_as_on, kernel_launches, kernel_resources, KernelResources};
#[cfg(feature = "cuda")]
pub(crate) use module::{compute_capability, launch, IMAGES};
#[cfg(feature = "cuda")]
pub(crate) use product::product;
#[cfg_attr(not(feature = "cuda"), allow(unused_imports))]
pub(crate) use strided::{Strided, RUN_BYTES};
#[cfg(feature = "cuda")]
pub(crate) use tensor::{dispatch, on_gpu, GpuElement, Output, Placed};

use candle_core::{bail, Device, Result};

/// What the kernels were compiled for; without the feature, what they are by default: machine code or else PTX, ten
/// times the compute capability, its letter or nothing.
#[cfg(not(feature = "cuda"))]
pub(crate) const IMAGES: &[(bool, u32, &str)] = &[(true, 80, ""), (true, 90, ""), (false, 80, "")];

/// Whether this crate's own operations run there: on the CPU, and where it was built for them on NVIDIA GPUs. Candle may
/// have been built for GPUs without it.
pub(crate) fn has_kernels(device: &Device) -> bool {
    device.is_cpu() || cfg!(feature = "cuda") && device.is_cuda()
}

/// As many threads as kernels tell apart by 32 bits, the last block's idle ones included.
///
/// # Errors
/// When there are more.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) fn countable(threads: usize) -> Result<usize> {
    if threads > i32::MAX as usize {
        bail!("{threads} threads are more than a kernel tells apart")
    }
    Ok(threads)
}

/// A grid of blocks.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Launch {
    pub grid: [u32; 3],
    /// Threads in a block.
    pub block: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
}

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
impl Launch {
    /// # Errors
    /// When there are more blocks than a grid can hold.
    pub fn new(blocks: usize, pieces: usize, threads: usize, shared_bytes: usize) -> Result<Self> {
        let fits = |x: usize, limit: u32| u32::try_from(x).ok().filter(|x| *x <= limit);
        match (fits(blocks, i32::MAX as u32), fits(pieces, u16::MAX.into())) {
            (Some(blocks), Some(pieces)) => Ok(Self {
                grid: [blocks, pieces, 1],
                block: threads as u32,
                shared_bytes: shared_bytes as u32,
            }),
            _ => bail!("{blocks} blocks are more than a GPU's grid holds"),
        }
    }
}
