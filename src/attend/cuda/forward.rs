//! The forward pass on a GPU: arguments gathered, memory set aside, kernels launched.
#![allow(unsafe_code)]

use super::call::{ForwardCall, SimtCall};
use super::job::{choose, narrow, operand_of, tokens, Job, Kernels, Tables, WideTables};
use super::tiles::{DecodeTile, ForwardTile};
use crate::attend::launch::{
    self, dtype_name, keys_in_sight, window_of_32_bits, Demand, Kernel, Split,
};
use crate::attend::placement::Frame;
use crate::attend::problem::{saturating_product, Dims, Resolved};
use crate::attend::Operand;
use crate::gpu::{launch as launch_kernel, upload, Held, Launch};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{sys, CudaSlice, DeviceRepr};
use candle_core::cuda_backend::CudaDType;
use candle_core::{bail, CudaDevice, CudaStorage, DType, Error, Layout, Result, Tensor, WithDType};
use half::{bf16, f16};

/// (9, 0) for an H200.
pub(in crate::attend) fn compute_capability(device: &CudaDevice) -> Result<(u32, u32)> {
    let stream = device.cuda_stream();
    let (major, minor) = stream.context().compute_capability().map_err(Error::wrap)?;
    Ok((major as u32, minor as u32))
}

/// The inputs, copied where the kernel cannot read them where they lie. Copies pass gradients on.
pub(in crate::attend) fn readable(inputs: [&Tensor; 3], call: &Resolved) -> Result<[Tensor; 3]> {
    let [q, k, v] = inputs;
    if !q.device().is_cuda() {
        return Ok([q.clone(), k.clone(), v.clone()]);
    }
    let kernel = choose(&Demand::of(call, q.dtype()))?;
    let read = |x: &Tensor| match operand_of(x.layout())? {
        operand if kernel.needs_copy(&operand, x.dtype()) => x.force_contiguous(),
        _ => Ok(x.clone()),
    };
    Ok([read(q)?, read(k)?, read(v)?])
}

/// What a forward pass is to leave beside the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::attend) struct Wanted {
    pub lse: bool,
    /// [`Left::rows`], as the kernels of the backward pass read it.
    pub rows: bool,
}

/// What a forward pass leaves beside the output.
pub(in crate::attend) struct Left {
    /// (B,H,T), where it was wanted.
    pub lse: Option<CudaStorage>,
    /// None also where the kernel that made the output leaves nothing that those of the backward pass can read.
    pub rows: Option<LeftRows>,
}

/// What the backward pass needs beside inputs and output.
pub(in crate::attend) struct LeftRows {
    /// (B,H,T) pairs of numbers, f32 or f64: of the kernels on tensor cores as in
    /// [`ForwardCall`](super::call::ForwardCall), of those without as in [`SimtCall`](super::call::SimtCall).
    pub statistics: CudaStorage,
    /// (B,H,T,E): what rounding the output to half precision lost.
    pub rest: Option<CudaStorage>,
}

/// The output, and what `wanted` asks for beside it.
pub(in crate::attend) fn forward(
    call: &Resolved,
    operands: [(&CudaStorage, &Layout); 3],
    wanted: Wanted,
) -> Result<(CudaStorage, Left)> {
    let (device, dtype) = (operands[0].0.device(), operands[0].0.dtype());
    let job = Job {
        call,
        device,
        dtype,
    };
    let Kernels {
        forward,
        backward,
        frame,
    } = job.kernels()?;
    let rows = wanted.rows && backward.forward(&job.demand()) == forward;
    forward_with(job, operands, forward, frame, Wanted { rows, ..wanted })
}

/// The same by a given kernel, which leaves all that is wanted.
pub(super) fn forward_with(
    job: Job<'_>,
    operands: [(&CudaStorage, &Layout); 3],
    kernel: Kernel,
    frame: Option<Frame>,
    wanted: Wanted,
) -> Result<(CudaStorage, Left)> {
    match job.dtype {
        DType::BF16 => forward_of::<bf16, f32>(job, operands, kernel, frame, wanted),
        DType::F16 => forward_of::<f16, f32>(job, operands, kernel, frame, wanted),
        DType::F32 => forward_of::<f32, f32>(job, operands, kernel, frame, wanted),
        DType::F64 => forward_of::<f64, f64>(job, operands, kernel, frame, wanted),
        other => bail!("attend: dtype {other:?} is not supported (f32, f64, bf16, f16 are)"),
    }
}

/// `Real` is what sums are held in.
fn forward_of<T, Real>(
    job: Job<'_>,
    operands: [(&CudaStorage, &Layout); 3],
    kernel: Kernel,
    frame: Option<Frame>,
    wanted: Wanted,
) -> Result<(CudaStorage, Left)>
where
    T: CudaDType + DeviceRepr + WithDType,
    Real: CudaDType + DeviceRepr + WithDType,
{
    let device = job.device;
    let Dims { b, h, t, s, e, .. } = job.call.dims;
    let (out_len, rows_len) = (
        saturating_product([b, h, t, e]),
        saturating_product([b, h, t]),
    );
    if out_len > isize::MAX as usize / size_of::<T>() {
        bail!("attend: an output of {:?} is too large", (b, h, t, e))
    }
    let wrap = |slice: CudaSlice<T>| CudaStorage::wrap_cuda_slice(slice, device.clone());
    let wrap_real = |slice: CudaSlice<Real>| CudaStorage::wrap_cuda_slice(slice, device.clone());
    if out_len == 0 || s == 0 {
        // Nothing is seen. There is no memory of no length.
        let out = upload(device, &vec![T::zero(); out_len.max(1)])?;
        let unseen = vec![Real::from_f64(f64::NEG_INFINITY); rows_len.max(1)];
        let lse = wanted.lse.then(|| upload(device, &unseen)).transpose()?;
        let left = Left {
            lse: lse.map(wrap_real),
            rows: None,
        };
        return Ok((wrap(out), left));
    }
    let is_half = size_of::<T>() < size_of::<Real>();
    // SAFETY: the kernels write every element, also where nothing is seen.
    let results = |len: usize| unsafe { device.alloc::<T>(len) };
    // SAFETY: as above.
    let numbers = |len: usize| unsafe { device.alloc::<Real>(len) };
    let mut out = results(out_len)?;
    let mut lse = wanted.lse.then(|| numbers(rows_len)).transpose()?;
    let mut statistics = wanted.rows.then(|| numbers(2 * rows_len)).transpose()?;
    let mut rest = (wanted.rows && is_half)
        .then(|| results(out_len))
        .transpose()?;

    let stream = &*device.cuda_stream();
    let mut held = Held::on(stream);
    let mut inputs = Vec::with_capacity(operands.len());
    for (storage, layout) in operands {
        inputs.push((
            held.read(storage.as_cuda_slice::<T>()?),
            operand_of(layout)?,
        ));
    }
    let [q, k, v] = inputs[..] else {
        bail!("attend: expected three operands")
    };
    let forward = Forward {
        job,
        inputs: [q, k, v],
        out: held.write(&mut out),
        lse: lse.as_mut().map_or(0, |lse| held.write(lse)),
        statistics: statistics.as_mut().map_or(0, |x| held.write(x)),
        rest: rest.as_mut().map_or(0, |rest| held.write(rest)),
    };
    forward.launch(kernel, frame)?;
    drop(held);
    let rows = statistics.map(|statistics| LeftRows {
        statistics: wrap_real(statistics),
        rest: rest.map(wrap),
    });
    let left = Left {
        lse: lse.map(wrap_real),
        rows,
    };
    Ok((wrap(out), left))
}

/// One forward pass over memory that is there already.
struct Forward<'a> {
    job: Job<'a>,
    /// q, k and v: where their memory starts, and how they lie in it.
    inputs: [(u64, Operand); 3],
    out: u64,
    /// This and what follows: 0 where it is not wanted.
    lse: u64,
    statistics: u64,
    rest: u64,
}

impl Forward<'_> {
    fn launch(&self, kernel: Kernel, frame: Option<Frame>) -> Result<()> {
        let dtype = self.job.dtype;
        if (self.inputs.iter()).any(|(_, operand)| kernel.needs_copy(operand, dtype)) {
            bail!(
                "attend: {} cannot read its operands where they lie: {:?}",
                kernel.entry(dtype),
                self.inputs.map(|(_, operand)| operand)
            )
        }
        match (kernel, frame) {
            (Kernel::Forward(tile), Some(frame)) => self.forward(&tile, &frame),
            (Kernel::Decode(tile), Some(frame)) => self.decode(&tile, &frame),
            _ => self.without_tensor_cores(),
        }
    }

    fn forward(&self, tile: &ForwardTile, frame: &Frame) -> Result<()> {
        let Job {
            call: Resolved { dims, .. },
            device,
            dtype,
        } = self.job;
        let rows = launch::query_tile(tile);
        let stream = device.cuda_stream();
        let tables = Tables::new(&self.job, frame, [rows, tile.keys])?;
        let mut held = Held::on(&stream);
        let mut call = self.forward_call(frame, tile.width, &tables, &mut held)?;
        call.tiles = narrow(dims.t.div_ceil(rows))?;
        let shape = Launch::forward(tile, dims)?;
        let entry = Kernel::Forward(*tile).entry(dtype);
        // SAFETY: the operands' extents were checked by candle, the results are as long as the kernel's dims say, lists
        // and tables hold what this call asks for; rows are aligned, or `launch` would have refused them. All stays alive
        // until it is launched, and memory given back later is not given out on this stream before the launch has run.
        unsafe { launch_kernel(&stream, &entry, shape, &call) }
    }

    fn decode(&self, tile: &DecodeTile, frame: &Frame) -> Result<()> {
        let Job {
            call: resolved,
            device,
            dtype,
        } = self.job;
        if self.statistics != 0 {
            bail!("attend: the kernel for few queries leaves nothing for a backward pass")
        }
        let dims = &resolved.dims;
        let stream = device.cuda_stream();
        let keys = keys_in_sight(resolved).len();
        let split = Split::new(tile, dims, keys, multiprocessors(device)?);
        let part = |len: usize| -> Result<_> {
            // SAFETY: the merging kernel reads only what the decoding kernel wrote.
            let memory = || unsafe { device.alloc::<f32>(len) };
            split.is_split().then(memory).transpose()
        };
        let mut part_out = part(split.out_elements(dims))?;
        let mut part_lse = part(split.lse_elements(dims))?;
        // This kernel does not look at tiles: one a row is enough.
        let tables = Tables::new(&self.job, frame, [dims.t, dims.s])?;
        let mut held = Held::on(&stream);
        let mut call = self.forward_call(frame, tile.width, &tables, &mut held)?;
        call.tiles = narrow(split.parts)?;
        call.part_out = part_out.as_mut().map_or(0, |part| held.write(part));
        call.part_lse = part_lse.as_mut().map_or(0, |part| held.write(part));
        let shape = Launch::decode(tile, dims, &split)?;
        let entry = Kernel::Decode(*tile).entry(dtype);
        // SAFETY: as in `forward`; the parts are as long as the split says.
        unsafe { launch_kernel(&stream, &entry, shape, &call)? };
        if split.is_split() {
            let merge = format!("attend_merge_{}", dtype_name(dtype));
            // SAFETY: as above.
            unsafe { launch_kernel(&stream, &merge, Launch::merge(dims)?, &call)? };
        }
        Ok(())
    }

    fn forward_call<'a>(
        &self,
        frame: &Frame,
        width: usize,
        tables: &'a Tables,
        held: &mut Held<'a>,
    ) -> Result<ForwardCall> {
        let resolved = self.job.call;
        let Dims { h, g, d, e, .. } = resolved.dims;
        let [q, k, v] = self.inputs;
        let (score, amplitude_width) = self.job.score(tables, held)?;
        Ok(ForwardCall {
            q: self.job.operand(q, 0),
            k: self.job.operand(k, 0),
            v: self.job.pieces(v, width),
            out: self.out,
            lse: self.lse,
            queries: tokens(frame, &resolved.q_positions, &tables.queries, held)?,
            keys: tokens(frame, &resolved.k_positions, &tables.keys, held)?,
            score,
            heads: narrow(h)?,
            group: narrow(h / g)?,
            head_width: narrow(d)?,
            amplitude_width,
            value_width: narrow(e)?,
            causal: resolved.causal.into(),
            window: window_of_32_bits(resolved.window),
            statistics: self.statistics,
            rest: self.rest,
            ..ForwardCall::default()
        })
    }

    fn without_tensor_cores(&self) -> Result<()> {
        let Job {
            call: Resolved { dims, .. },
            device,
            dtype,
        } = self.job;
        let stream = device.cuda_stream();
        let tables = WideTables::new(&self.job)?;
        let mut held = Held::on(&stream);
        let [q, k, v] = self.inputs.map(|input| self.job.operand(input, 0));
        let tiles = launch::simt_tiles(dims, dtype);
        let call = SimtCall {
            q,
            k,
            v,
            out: self.out,
            lse: self.lse,
            statistics: self.statistics,
            rest: self.rest,
            problem: self.job.simt_problem(&tables, tiles, &mut held)?,
        };
        let shape = Launch::simt(dims, dtype, self.job.amp_dim())?;
        let entry = Kernel::simt(self.job.demand().score).entry(dtype);
        // SAFETY: as in `forward`.
        unsafe { launch_kernel(&stream, &entry, shape, &call) }
    }
}

fn multiprocessors(device: &CudaDevice) -> Result<usize> {
    let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let stream = device.cuda_stream();
    let count = stream.context().attribute(attribute).map_err(Error::wrap)?;
    Ok(usize::try_from(count).unwrap_or(1))
}
