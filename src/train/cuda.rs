//! Work on all weights at once on a GPU, in one launch each: gradients brought to the masters' dtype, their squares
//! summed, AdamW.
#![allow(unsafe_code)]

use super::adamw::AdamWConfig;
use super::table::{deal_out, type_of, Entry, TableCall, THREADS};
use crate::gpu::{filled, launch, on_gpu, upload, Held, Launch};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{DevicePtrMut, DeviceRepr};
use candle_core::{
    bail, CpuStorage, CudaDevice, CudaStorage, DType, Device, InplaceOp1, Layout, Result, Tensor,
    Var,
};
use half::{bf16, f16};
use std::cell::Cell;

// SAFETY: plain numbers in the order and with the sizes that the kernels declare; the tests of `table` hold them to it.
unsafe impl DeviceRepr for Entry {}
// SAFETY: as above.
unsafe impl DeviceRepr for TableCall {}

/// The GPU that all of these are on, and their dtype; `None` where they have none in common.
fn in_common<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Option<(&'a CudaDevice, DType)> {
    let mut common = None;
    for tensor in tensors {
        let Device::Cuda(device) = tensor.device() else {
            return None;
        };
        match common {
            None => common = Some((device, tensor.dtype())),
            Some((first, dtype)) => {
                if first.id() != device.id() || dtype != tensor.dtype() {
                    return None;
                }
            }
        }
    }
    common
}

/// Where the elements of a contiguous tensor of any of the four dtypes start.
fn address<'a>(held: &mut Held<'a>, (storage, layout): (&'a CudaStorage, &Layout)) -> Result<u64> {
    match storage.dtype() {
        DType::F32 => held.read_operand::<f32>((storage, layout)),
        DType::F64 => held.read_operand::<f64>((storage, layout)),
        DType::BF16 => held.read_operand::<bf16>((storage, layout)),
        DType::F16 => held.read_operand::<f16>((storage, layout)),
        other => bail!("train: {other:?} is not a dtype of weights"),
    }
}

/// Launches a kernel over a table.
///
/// # Safety
/// Every address in the table and the call is valid for what the kernel does there, until it has run.
unsafe fn over_table(
    device: &CudaDevice,
    entry: &str,
    mut entries: Vec<Entry>,
    sums: impl FnOnce(usize) -> Result<u64>,
    call: TableCall,
) -> Result<()> {
    let blocks = deal_out(&mut entries);
    if blocks == 0 {
        return Ok(());
    }
    let stream = device.cuda_stream();
    let table = upload(device, &entries)?;
    let mut held = Held::on(&stream);
    let call = TableCall {
        entries: held.read(&table),
        count: entries.len() as i64,
        sums: sums(blocks)?,
        ..call
    };
    // SAFETY: the table is as long as `count` says, its blocks are as many as are launched; the rest the caller vouches
    // for.
    unsafe { launch(&stream, entry, Launch::new(blocks, 1, THREADS, 0)?, &call) }
}

/// Σx² of all elements; `None` where the tensors are not f32 or f64 on one GPU.
pub(super) fn sum_of_squares(tensors: &[&Tensor]) -> Result<Option<f64>> {
    let Some((device, dtype)) = in_common(tensors.iter().copied()) else {
        return Ok(None);
    };
    if !matches!(dtype, DType::F32 | DType::F64) {
        return Ok(None);
    }
    let tensors: Vec<Tensor> = tensors
        .iter()
        .map(|tensor| tensor.contiguous())
        .collect::<Result<_>>()?;
    let memories: Vec<_> = tensors.iter().map(on_gpu).collect();
    let stream = device.cuda_stream();
    let mut held = Held::on(&stream);
    let mut entries = Vec::with_capacity(tensors.len());
    for (tensor, memory) in tensors.iter().zip(&memories) {
        entries.push(Entry {
            gradient: address(&mut held, memory.operand()?)?,
            len: tensor.elem_count() as i64,
            ..Entry::default()
        });
    }
    let mut sums = None;
    let make_sums = |blocks: usize| {
        // SAFETY: each block writes its own.
        let made = sums.insert(unsafe { device.alloc::<f64>(blocks)? });
        let (address, _) = made.device_ptr_mut(&stream);
        Ok(address)
    };
    let entry = format!("optimiser_squares_{}", dtype.as_str());
    // SAFETY: the tensors are as long as the entries say, and alive until the launch; `sums` has one for each block.
    unsafe { over_table(device, &entry, entries, make_sums, TableCall::default())? };
    drop(held);
    let sums = match &sums {
        Some(sums) => device.clone_dtoh(sums)?,
        None => Vec::new(),
    };
    Ok(Some(sums.iter().sum()))
}

/// Copies of bf16 or f16 tensors on one GPU in f32, which lie behind each other; `None` where they are not such.
pub(super) fn in_single_precision(tensors: &[&Tensor]) -> Result<Option<Vec<Tensor>>> {
    let Some((device, dtype)) = in_common(tensors.iter().copied()) else {
        return Ok(None);
    };
    if type_of(dtype) == 0 {
        return Ok(None);
    }
    let tensors: Vec<Tensor> = tensors
        .iter()
        .map(|tensor| tensor.contiguous())
        .collect::<Result<_>>()?;
    let len: usize = tensors.iter().map(|x| x.elem_count()).sum();
    if len == 0 {
        return Ok(None);
    }
    let memories: Vec<_> = tensors.iter().map(on_gpu).collect();
    // SAFETY: the kernel writes every element.
    let mut all = unsafe { device.alloc::<f32>(len)? };
    let stream = device.cuda_stream();
    let mut held = Held::on(&stream);
    let to = held.write(&mut all);
    let mut entries = Vec::with_capacity(tensors.len());
    let mut start = 0;
    for (tensor, memory) in tensors.iter().zip(&memories) {
        entries.push(Entry {
            gradient: address(&mut held, memory.operand()?)?,
            working: to + (start * size_of::<f32>()) as u64,
            len: tensor.elem_count() as i64,
            kind: type_of(dtype),
            ..Entry::default()
        });
        start += tensor.elem_count();
    }
    // SAFETY: the tensors are as long as the entries say, and alive until the launch, their copies disjoint.
    unsafe {
        over_table(
            device,
            "optimiser_gather",
            entries,
            |_| Ok(0),
            TableCall::default(),
        )?
    };
    drop(held);
    let all = filled(all, device, len);
    let mut start = 0;
    let mut copies = Vec::with_capacity(tensors.len());
    for tensor in &tensors {
        let copy = all.narrow(0, start, tensor.elem_count())?;
        copies.push(copy.reshape(tensor.shape())?);
        start += tensor.elem_count();
    }
    Ok(Some(copies))
}

/// One weight's update.
pub(super) struct Job<'a> {
    pub master: &'a Var,
    pub first: &'a Var,
    pub second: &'a Var,
    pub gradient: &'a Tensor,
    /// Where the model computes with another dtype.
    pub working: Option<&'a Var>,
    pub kept: f64,
    pub rate: f64,
    pub root: f64,
}

/// Updates all weights by their gradients times a factor; false, and nothing is done, where they are not on one GPU, or
/// of dtypes that the kernel does not take.
pub(super) fn update(config: &AdamWConfig, jobs: &[Job], factor: f64) -> Result<bool> {
    let ours = jobs.iter().flat_map(|job| {
        [
            job.master.as_tensor(),
            job.first.as_tensor(),
            job.second.as_tensor(),
            job.gradient,
        ]
    });
    let Some((device, dtype)) = in_common(ours) else {
        return Ok(false);
    };
    let working = jobs.iter().filter_map(|job| job.working);
    let taken = |var: &Var| {
        type_of(var.dtype()) != 0 && var.device().same_device(&Device::Cuda(device.clone()))
    };
    if !matches!(dtype, DType::F32 | DType::F64) || !working.clone().all(taken) {
        return Ok(false);
    }
    let gradients: Vec<Tensor> = jobs
        .iter()
        .map(|job| job.gradient.contiguous())
        .collect::<Result<_>>()?;
    let memories: Vec<_> = gradients.iter().map(on_gpu).collect();
    let stream = device.cuda_stream();
    let mut held = Held::on(&stream);
    let mut entries = Vec::with_capacity(jobs.len());
    for (job, memory) in jobs.iter().zip(&memories) {
        entries.push(Entry {
            gradient: address(&mut held, memory.operand()?)?,
            master: written(job.master)?,
            first: written(job.first)?,
            second: written(job.second)?,
            working: job.working.map_or(Ok(0), written)?,
            len: job.master.elem_count() as i64,
            kept: job.kept,
            rate: job.rate,
            root: job.root,
            kind: job.working.map_or(0, |var| type_of(var.dtype())),
            ..Entry::default()
        });
    }
    let call = TableCall {
        beta1: config.beta1,
        beta2: config.beta2,
        epsilon: config.epsilon,
        factor,
        ..TableCall::default()
    };
    let entry = format!("optimiser_adamw_{}", dtype.as_str());
    // SAFETY: weight, moments, gradient and working copy are of one length, as `step` checked, contiguous, and alive until
    // the launch. No two of them share memory: each variable was made for its purpose.
    unsafe { over_table(device, &entry, entries, |_| Ok(0), call)? };
    drop(held);
    // Other streams wait for what was last written: the launch, not what came before it.
    for job in jobs {
        for var in [job.master, job.first, job.second] {
            written(var)?;
        }
        job.working.map_or(Ok(0), written)?;
    }
    Ok(true)
}

/// The address of a contiguous variable, which is written now.
fn written(var: &Var) -> Result<u64> {
    let address = Cell::new(0);
    var.inplace_op1(&Written { address: &address })?;
    Ok(address.get())
}

/// Tells where a variable's memory is, in the one way that candle gives it out for writing.
struct Written<'a> {
    address: &'a Cell<u64>,
}

impl InplaceOp1 for Written<'_> {
    fn name(&self) -> &'static str {
        "written"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        bail!("train: a kernel of a GPU was given a variable on the CPU")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        if !layout.is_contiguous() {
            bail!("train: a variable is not contiguous: {layout:?}")
        }
        let stream = storage.device().cuda_stream();
        macro_rules! start {
            ($t:ty) => {{
                let slice = storage.as_cuda_slice_mut::<$t>()?;
                let (start, _written) = slice.device_ptr_mut(&stream);
                start + (layout.start_offset() * size_of::<$t>()) as u64
            }};
        }
        self.address.set(match storage.dtype() {
            DType::F32 => start!(f32),
            DType::F64 => start!(f64),
            DType::BF16 => start!(bf16),
            DType::F16 => start!(f16),
            other => bail!("train: {other:?} is not a dtype of weights"),
        });
        Ok(())
    }
}
