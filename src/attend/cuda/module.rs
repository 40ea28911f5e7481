//! The compiled kernels, loaded once for each GPU, and one launch function for each.
#![allow(unsafe_code)]

use super::call::{ForwardCall, SimtCall, TileBounds};
use crate::attend::launch::Launch;
use candle_core::cuda_backend::cudarc::driver::{
    sys, CudaContext, CudaFunction, CudaModule, CudaStream, DeviceRepr, DriverError, LaunchConfig,
    PushKernelArg,
};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::{bail, Device, Result};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

mod compiled {
    include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
}
pub(in crate::attend) use compiled::IMAGES;
use compiled::KERNELS;

// SAFETY: `#[repr(C)]` structures of numbers, laid out as the kernels' (see their tests in `call.rs`).
unsafe impl DeviceRepr for ForwardCall {}
// SAFETY: as above.
unsafe impl DeviceRepr for SimtCall {}
// SAFETY: as above.
unsafe impl DeviceRepr for TileBounds {}

/// Dynamic shared memory that a kernel may have without asking for it.
const UNASKED_SHARED_BYTES: u32 = 48 << 10;

/// What is loaded, by GPU and name. A module belongs to a GPU's primary context, which all of candle's devices on that
/// GPU share, and keeps it alive.
#[derive(Default)]
struct Loaded {
    modules: HashMap<(usize, &'static str), Arc<CudaModule>>,
    functions: HashMap<(usize, String), Function>,
}

/// A kernel, and the dynamic shared memory that it may have.
struct Function {
    function: CudaFunction,
    shared_bytes: u32,
}

static LOADED: LazyLock<Mutex<Loaded>> = LazyLock::new(Mutex::default);

/// The kernel of this name, ready for blocks with so much dynamic shared memory.
fn function(context: &Arc<CudaContext>, entry: &str, shared_bytes: u32) -> Result<CudaFunction> {
    // Either map is valid whenever a thread may have panicked.
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (context.ordinal(), entry.to_string());
    let Loaded { modules, functions } = &mut *loaded;
    let known = match functions.entry(key) {
        std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
        std::collections::hash_map::Entry::Vacant(vacant) => vacant.insert(Function {
            function: load(modules, context, entry)?,
            shared_bytes: UNASKED_SHARED_BYTES,
        }),
    };
    if shared_bytes > known.shared_bytes {
        let attribute =
            sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let asked = context
            .bind_to_thread()
            .and_then(|()| known.function.set_attribute(attribute, shared_bytes as i32));
        done(asked, entry, "may not have so much shared memory")?;
        known.shared_bytes = shared_bytes;
    }
    Ok(known.function.clone())
}

fn load(
    modules: &mut HashMap<(usize, &'static str), Arc<CudaModule>>,
    context: &Arc<CudaContext>,
    entry: &str,
) -> Result<CudaFunction> {
    let Some((unit, image)) = unit_of(entry) else {
        bail!("attend: kernel {entry} was not compiled")
    };
    let module = match modules.entry((context.ordinal(), unit)) {
        std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
        std::collections::hash_map::Entry::Vacant(vacant) => {
            // The copy is aligned as the driver wants it.
            let module = context.load_module(Ptx::from_binary(image.to_vec()));
            vacant.insert(done(
                module,
                entry,
                "has no image that this GPU or its driver takes",
            )?)
        }
    };
    done(module.load_function(entry), entry, "is not in its file")
}

/// The compiled file that a kernel is in: its name starts with the file's, and the longest such is the right one.
fn unit_of(entry: &str) -> Option<&'static (&'static str, &'static [u8])> {
    let units = KERNELS.iter().filter(|(unit, _)| entry.starts_with(unit));
    units.max_by_key(|(unit, _)| unit.len())
}

fn done<T>(result: std::result::Result<T, DriverError>, entry: &str, failure: &str) -> Result<T> {
    result.map_err(|error| {
        candle_core::Error::Msg(format!("attend: kernel {entry} {failure}: {error}")).bt()
    })
}

/// What the driver says of a loaded kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelResources {
    /// Registers of a thread.
    pub registers: usize,
    /// Local memory of a thread, in bytes: what did not fit its registers.
    pub local_bytes: usize,
    /// Shared memory of a block beyond what a launch asks for, in bytes.
    pub shared_bytes: usize,
    /// Compute capability of the machine code that was chosen, times 10.
    pub image: usize,
}

/// Loads a kernel by its name, as a launch would.
///
/// # Errors
/// When there is none of this name, none for this GPU, or the device is none.
pub fn kernel_resources(device: &Device, entry: &str) -> Result<KernelResources> {
    let Device::Cuda(device) = device else {
        bail!("attend: {:?} is no NVIDIA GPU", device.location())
    };
    let stream = device.cuda_stream();
    let context = stream.context();
    let function = function(context, entry, 0)?;
    let said = context.bind_to_thread().and_then(|()| {
        Ok([
            function.num_regs()?,
            function.local_size_bytes()?,
            function.shared_size_bytes()?,
            function.binary_version()?,
        ])
    });
    let said = done(said, entry, "does not tell what it takes")?;
    let [registers, local_bytes, shared_bytes, image] = said.map(|x| x as usize);
    Ok(KernelResources {
        registers,
        local_bytes,
        shared_bytes,
        image,
    })
}

/// # Safety
/// The kernel's arguments must be as [`attend_forward`] and [`attend_simt`] say.
unsafe fn launch<Call: DeviceRepr>(
    stream: &Arc<CudaStream>,
    entry: &str,
    launch: Launch,
    call: &Call,
) -> Result<()> {
    let function = function(stream.context(), entry, launch.shared_bytes)?;
    let [x, y, z] = launch.grid;
    let mut arguments = stream.launch_builder(&function);
    arguments.arg(call);
    // SAFETY: the kernel takes this one structure; what is in it the caller vouches for.
    let launched = unsafe {
        arguments.launch(LaunchConfig {
            grid_dim: (x, y, z),
            block_dim: (launch.block, 1, 1),
            shared_mem_bytes: launch.shared_bytes,
        })
    };
    done(launched, entry, "could not be launched").map(drop)
}

/// Launches a kernel on tensor cores: `attend_forward_*`, `attend_decode_*` or `attend_merge_*`.
///
/// # Safety
/// - `entry` is one of these kernels, for the dtype of the operands, and `shape` is the [`Launch`] made for it.
/// - Every address in `call` is 0 where the kernel allows that, or is valid on the stream's GPU for what the strides,
///   sizes and positions in `call` let the kernel touch, until the launch has run: operands, lists, tables for reading,
///   results and parts for writing.
/// - Rows of q, k and v start at multiples of 16 bytes.
pub(super) unsafe fn attend_forward(
    stream: &Arc<CudaStream>,
    entry: &str,
    shape: Launch,
    call: &ForwardCall,
) -> Result<()> {
    // SAFETY: the caller's.
    unsafe { launch(stream, entry, shape, call) }
}

/// Launches the kernel without tensor cores, `attend_simt_*`.
///
/// # Safety
/// As [`attend_forward`], but for the alignment of rows.
pub(super) unsafe fn attend_simt(
    stream: &Arc<CudaStream>,
    entry: &str,
    shape: Launch,
    call: &SimtCall,
) -> Result<()> {
    // SAFETY: the caller's.
    unsafe { launch(stream, entry, shape, call) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attend::cuda::tiles::{DECODE, FORWARD, SIMT_SCORES};
    use crate::attend::launch::Kernel;
    use candle_core::DType;

    #[test]
    fn every_kernel_that_can_be_launched_has_a_file_of_its_own() {
        let forward = FORWARD.iter().map(|tile| Kernel::Forward(*tile));
        let decode = DECODE.iter().map(|tile| Kernel::Decode(*tile));
        let simt = SIMT_SCORES.iter().map(|score| Kernel::Simt(score));
        let entries = forward
            .chain(decode)
            .chain(simt)
            .map(|x| x.entry(DType::F16));
        for entry in entries.chain(["attend_merge_f16".to_string()]) {
            let unit = unit_of(&entry).map(|(unit, image)| (*unit, image.is_empty()));
            assert_eq!(unit, entry.strip_suffix("_f16").map(|unit| (unit, false)));
        }
    }
}
