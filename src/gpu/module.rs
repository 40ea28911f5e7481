//! The compiled kernels, loaded once for each GPU, and how they are launched.
#![allow(unsafe_code)]

use super::Launch;
use candle_core::cuda_backend::cudarc::driver::{
    sys, CudaContext, CudaFunction, CudaModule, CudaStream, DeviceRepr, DriverError, LaunchConfig,
    PushKernelArg,
};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::{bail, Device, Result};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

mod compiled {
    include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
}
pub(crate) use compiled::IMAGES;
use compiled::KERNELS;

/// Dynamic shared memory that a kernel may have without asking for it.
const UNASKED_SHARED_BYTES: u32 = 48 << 10;

/// What is loaded, by GPU and name; functions in two steps, so that a known one is found by a borrowed name. A module
/// belongs to a GPU's primary context, which all of candle's devices on that GPU share, and keeps it alive.
#[derive(Default)]
struct Loaded {
    modules: HashMap<(usize, &'static str), Arc<CudaModule>>,
    functions: HashMap<usize, HashMap<String, Function>>,
}

/// A kernel, the dynamic shared memory that it may have, and how often it was launched.
struct Function {
    function: CudaFunction,
    shared_bytes: u32,
    launches: usize,
}

static LOADED: LazyLock<Mutex<Loaded>> = LazyLock::new(Mutex::default);

/// The kernel of this name, ready for blocks with so much dynamic shared memory and so many launches.
fn function(
    context: &Arc<CudaContext>,
    entry: &str,
    shared_bytes: u32,
    launches: usize,
) -> Result<CudaFunction> {
    // Either map is valid whenever a thread may have panicked.
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let Loaded { modules, functions } = &mut *loaded;
    let functions = functions.entry(context.ordinal()).or_default();
    if !functions.contains_key(entry) {
        let function = Function {
            function: load(modules, context, entry)?,
            shared_bytes: UNASKED_SHARED_BYTES,
            launches: 0,
        };
        functions.insert(entry.to_string(), function);
    }
    let Some(known) = functions.get_mut(entry) else {
        bail!("kernel {entry} was not loaded")
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
    known.launches += launches;
    Ok(known.function.clone())
}

/// Ten times the compute capability for which kernels are chosen; 0 for the GPU's own.
static CHOSEN_FOR: AtomicU32 = AtomicU32::new(0);

/// Chooses kernels as on GPUs of another compute capability, so that tests on one GPU run what others would; `None` for
/// its own again. Not for programs: the choice holds for the whole process.
#[doc(hidden)]
pub fn choose_kernels_as_on(capability: Option<(u32, u32)>) {
    let ten_times = capability.map_or(0, |(major, minor)| 10 * major + minor);
    CHOSEN_FOR.store(ten_times, Ordering::Relaxed);
}

/// (9, 0) for an H200: what kernels are chosen for.
pub(crate) fn compute_capability(context: &Arc<CudaContext>) -> Result<(u32, u32)> {
    match CHOSEN_FOR.load(Ordering::Relaxed) {
        0 => {
            let (major, minor) = context
                .compute_capability()
                .map_err(candle_core::Error::wrap)?;
            Ok((major as u32, minor as u32))
        }
        other => Ok((other / 10, other % 10)),
    }
}

/// How often each kernel was launched by this process, by its name.
pub fn kernel_launches() -> BTreeMap<String, usize> {
    let loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let mut launches = BTreeMap::new();
    for (entry, function) in loaded.functions.values().flatten() {
        *launches.entry(entry.clone()).or_default() += function.launches;
    }
    launches.retain(|_, count| *count > 0);
    launches
}

fn load(
    modules: &mut HashMap<(usize, &'static str), Arc<CudaModule>>,
    context: &Arc<CudaContext>,
    entry: &str,
) -> Result<CudaFunction> {
    let Some((unit, image)) = unit_of(entry) else {
        bail!("kernel {entry} was not compiled")
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
    result
        .map_err(|error| candle_core::Error::Msg(format!("kernel {entry} {failure}: {error}")).bt())
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
        bail!("{:?} is no NVIDIA GPU", device.location())
    };
    let stream = device.cuda_stream();
    let context = stream.context();
    let function = function(context, entry, 0, 0)?;
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

/// Launches a kernel, which takes one structure.
///
/// # Safety
/// - `Call` is the structure that `entry` takes, field by field, and `shape` has the blocks, threads and shared memory
///   that the kernel counts on.
/// - Every address in `call` is 0 where the kernel allows that, or is valid on the stream's GPU for all that the kernel
///   touches there, until the launch has run.
pub(crate) unsafe fn launch<Call: DeviceRepr>(
    stream: &Arc<CudaStream>,
    entry: &str,
    shape: Launch,
    call: &Call,
) -> Result<()> {
    let function = function(stream.context(), entry, shape.shared_bytes, 1)?;
    let [x, y, z] = shape.grid;
    let mut arguments = stream.launch_builder(&function);
    arguments.arg(call);
    // SAFETY: the kernel takes this one structure; what is in it the caller vouches for.
    let launched = unsafe {
        arguments.launch(LaunchConfig {
            grid_dim: (x, y, z),
            block_dim: (shape.block, 1, 1),
            shared_mem_bytes: shape.shared_bytes,
        })
    };
    done(launched, entry, "could not be launched").map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attend::kernel_entries;
    use candle_core::DType;
    use std::collections::HashSet;

    #[test]
    fn every_kernel_of_attention_has_a_compiled_file_with_its_name() {
        let entries = kernel_entries(DType::F16);
        assert!(entries.len() > 70);
        for entry in &entries {
            let unit = unit_of(entry).map(|(unit, image)| (*unit, image.is_empty()));
            // What follows the file's name: the side of a backward kernel, and the dtype.
            let name = entry.strip_suffix("_f16").unwrap();
            let name = match entry.contains("_backward_") {
                true => name.trim_end_matches("_keys").trim_end_matches("_queries"),
                false => name,
            };
            assert_eq!(unit, Some((name, false)), "{entry}");
        }
        let different: HashSet<_> = entries.iter().collect();
        assert_eq!(different.len(), entries.len());
    }
}
