//! The backward pass on a GPU: arguments gathered, memory set aside, kernels launched.
#![allow(unsafe_code)]

use super::call::{self, BackwardCall, DeltaCall, SimtBackwardCall, SimtDeltaCall};
use super::forward::{forward_with, Left, LeftRows, Wanted};
use super::job::{narrow, operand_of, tokens, Job, Kernels, Tables, WideTables};
use super::tiles::BackwardTile;
use crate::attend::launch::{self, window_of_32_bits, Backward, Pass};
use crate::attend::placement::Frame;
use crate::attend::problem::{saturating_product, Dims, Resolved};
use crate::attend::Operand;
use crate::gpu::{launch as launch_kernel, Held, Launch};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DeviceRepr};
use candle_core::cuda_backend::CudaDType;
use candle_core::op::BackpropOp;
use candle_core::{bail, CudaStorage, DType, Device, Result, Storage, Tensor, WithDType};
use half::{bf16, f16};

/// Of q, k and v: those that are tracked.
pub(in crate::attend) type Gradients = (Option<Tensor>, Option<Tensor>, Option<Tensor>);

/// Gradients of the tracked ones among q, k and v. `left` is what the forward pass left; without it the forward pass is
/// run once more.
pub(in crate::attend) fn backward(
    call: &Resolved,
    inputs: [&Tensor; 3],
    out: &Tensor,
    left: Option<&LeftRows>,
    grad: &Tensor,
) -> Result<Gradients> {
    match grad.dtype() {
        DType::BF16 => backward_of::<bf16, f32>(call, inputs, out, left, grad),
        DType::F16 => backward_of::<f16, f32>(call, inputs, out, left, grad),
        DType::F32 => backward_of::<f32, f32>(call, inputs, out, left, grad),
        DType::F64 => backward_of::<f64, f64>(call, inputs, out, left, grad),
        other => bail!("attend: no gradient for dtype {other:?}"),
    }
}

fn backward_of<T, Real>(
    call: &Resolved,
    inputs: [&Tensor; 3],
    out: &Tensor,
    left: Option<&LeftRows>,
    grad: &Tensor,
) -> Result<Gradients>
where
    T: CudaDType + DeviceRepr + WithDType,
    Real: CudaDType + DeviceRepr + WithDType,
{
    let Device::Cuda(device) = grad.device() else {
        bail!("attend: {:?} is no NVIDIA GPU", grad.device().location())
    };
    let tracked = inputs.map(Tensor::track_op);
    let Dims { b, h, t, s, .. } = call.dims;
    if saturating_product([b, h, t, s]) == 0 {
        // Nothing is seen.
        let [q, k, v] = inputs.map(|x| x.track_op().then(|| zeros_of_any_length(x)).transpose());
        return Ok((q?, k?, v?));
    }
    let job = Job {
        call,
        device,
        dtype: T::DTYPE,
    };
    let Kernels {
        backward, frame, ..
    } = job.kernels()?;
    let copied = backward.needs_copy(&operand_of(grad.layout())?, T::DTYPE);
    let grad = if copied {
        &grad.force_contiguous()?
    } else {
        grad
    };

    let guards = [inputs[0], inputs[1], inputs[2], grad, out].map(Tensor::storage_and_layout);
    let mut operands = Vec::with_capacity(guards.len());
    for (storage, layout) in &guards {
        match &**storage {
            Storage::Cuda(storage) => operands.push((storage, *layout)),
            _ => bail!("attend: the operands are not all on a GPU"),
        }
    }
    let [q, k, v, grad, (out, _)] = operands[..] else {
        bail!("attend: expected five operands")
    };
    let again;
    let (out, left) = match left {
        Some(left) => (out, left),
        None => {
            let forward = backward.forward(&job.demand()?);
            let wanted = Wanted {
                lse: false,
                rows: true,
            };
            again = forward_with(job, [q, k, v], forward, frame.clone(), wanted)?;
            match &again {
                (
                    out,
                    Left {
                        rows: Some(left), ..
                    },
                ) => (out, left),
                _ => bail!("attend: the forward pass left nothing for the backward pass"),
            }
        }
    };

    // One kernel makes dk and dv.
    let keys = tracked[1] || tracked[2];
    let gradient = |x: &Tensor, wanted: bool| -> Result<_> {
        // SAFETY: the kernels write every element, also where nothing is seen.
        let memory = || unsafe { device.alloc::<T>(x.elem_count()) };
        wanted.then(memory).transpose()
    };
    let mut dq = gradient(inputs[0], tracked[0])?;
    let mut dk = gradient(inputs[1], keys)?;
    let mut dv = gradient(inputs[2], keys)?;

    let stream = &*device.cuda_stream();
    let mut held = Held::on(stream);
    let mut operands = [(0, Operand::contiguous([0; 4])); 4];
    for (operand, (storage, layout)) in operands.iter_mut().zip([q, k, v, grad]) {
        let address = held.read(storage.as_cuda_slice::<T>()?);
        *operand = (address, operand_of(layout)?);
    }
    let rest = left.rest.as_ref().map(CudaStorage::as_cuda_slice::<T>);
    let pass = BackwardPass {
        job,
        operands,
        out: held.read(out.as_cuda_slice::<T>()?),
        rest: rest.transpose()?.map_or(0, |rest| held.read(rest)),
        statistics: held.read(left.statistics.as_cuda_slice::<Real>()?),
        gradients: [&mut dq, &mut dk, &mut dv]
            .map(|x| x.as_mut().map_or(0, |memory| held.write(memory))),
    };
    pass.launch(backward, frame)?;
    drop(held);

    let tensor = |memory: Option<CudaSlice<T>>, like: &Tensor| {
        let memory = memory.filter(|_| like.track_op())?;
        let storage = CudaStorage::wrap_cuda_slice(memory, device.clone());
        let (storage, untracked) = (Storage::Cuda(storage), BackpropOp::none());
        Some(Tensor::from_storage(
            storage,
            like.shape(),
            untracked,
            false,
        ))
    };
    Ok((
        tensor(dq, inputs[0]),
        tensor(dk, inputs[1]),
        tensor(dv, inputs[2]),
    ))
}

/// Zeros like x, which may be of no length: a GPU has no such memory, but a view of some can be.
fn zeros_of_any_length(x: &Tensor) -> Result<Tensor> {
    let dims: Vec<usize> = x.dims().iter().map(|size| (*size).max(1)).collect();
    let zeros = Tensor::zeros(dims, x.dtype(), x.device())?;
    let cut = |zeros: Tensor, (dim, size): (usize, &usize)| zeros.narrow(dim, 0, *size);
    x.dims().iter().enumerate().try_fold(zeros, cut)
}

/// One backward pass over memory that is there already.
struct BackwardPass<'a> {
    job: Job<'a>,
    /// q, k, v and the output's gradient: where their memory starts, and how they lie in it.
    operands: [(u64, Operand); 4],
    out: u64,
    /// 0 but for half precision.
    rest: u64,
    statistics: u64,
    /// Of q, k and v, each without gaps; 0 where it is not wanted.
    gradients: [u64; 3],
}

impl BackwardPass<'_> {
    fn launch(&self, kernels: Backward, frame: Option<Frame>) -> Result<()> {
        let dtype = self.job.dtype;
        if (self.operands.iter()).any(|(_, operand)| kernels.needs_copy(operand, dtype)) {
            bail!(
                "attend: {} cannot read its operands where they lie: {:?}",
                kernels.entry(Pass::Keys, dtype),
                self.operands.map(|(_, operand)| operand)
            )
        }
        match (kernels, frame) {
            (Backward::Tiles(tile), Some(frame)) => self.on_tensor_cores(&tile, &frame),
            _ => self.without_tensor_cores(),
        }
    }

    fn on_tensor_cores(&self, tile: &BackwardTile, frame: &Frame) -> Result<()> {
        let Job {
            call: Resolved { dims, .. },
            device,
            dtype,
        } = self.job;
        let kernels = Backward::Tiles(*tile);
        let stream = device.cuda_stream();
        let rows_len = saturating_product([dims.b, dims.h, dims.t]);
        // SAFETY: `attend_delta` writes every element before the other kernels read it.
        let mut rows = unsafe { device.alloc::<[f32; 2]>(rows_len)? };
        // SAFETY: as above.
        let mut enormous = unsafe { device.alloc::<i32>(launch::delta_tiles(dims))? };
        let mut held = Held::on(&stream);
        let rows = Rows {
            rows: held.write(&mut rows),
            enormous: held.write(&mut enormous),
        };

        let delta = DeltaCall {
            out: self.out,
            rest: self.rest,
            grad: self.job.operand(self.operands[3], 0),
            statistics: self.statistics,
            rows: rows.rows,
            enormous: rows.enormous,
            heads: narrow(dims.h)?,
            len: narrow(dims.t)?,
            value_width: narrow(dims.e)?,
            scale: self.job.call.score.scale().abs() as f32,
        };
        let entry = kernels.entry(Pass::Delta, dtype);
        // SAFETY: the operands' extents were checked by candle, what the forward pass left and the results are as long as
        // the kernel's dims say; rows are aligned, or `launch` would have refused them. All stays alive until it is
        // launched, and memory given back later is not given out on this stream before the launch has run.
        unsafe { launch_kernel(&stream, &entry, Launch::delta(dims)?, &delta)? };

        let [dq, dk, _] = self.gradients;
        if dk != 0 {
            let held_tokens = launch::held_tokens(&tile.keys);
            let tables = Tables::new(&self.job, frame, [tile.keys.tile, held_tokens])?;
            let mut held = Held::on(&stream);
            let mut call = self.backward_call(tile, frame, &rows, &tables, &mut held)?;
            call.tiles = narrow(dims.s.div_ceil(held_tokens))?;
            let shape = Launch::backward_keys(tile, dims)?;
            let entry = kernels.entry(Pass::Keys, dtype);
            // SAFETY: as above; lists and tables hold what this call asks for, with tiles as this kernel has them.
            unsafe { launch_kernel(&stream, &entry, shape, &call)? };
        }
        if dq != 0 {
            let held_tokens = launch::held_tokens(&tile.queries);
            let tables = Tables::new(&self.job, frame, [held_tokens, tile.queries.tile])?;
            let mut held = Held::on(&stream);
            let mut call = self.backward_call(tile, frame, &rows, &tables, &mut held)?;
            call.tiles = narrow(dims.t.div_ceil(held_tokens))?;
            let shape = Launch::backward_queries(tile, dims)?;
            let entry = kernels.entry(Pass::Queries, dtype);
            // SAFETY: as above.
            unsafe { launch_kernel(&stream, &entry, shape, &call)? };
        }
        Ok(())
    }

    fn backward_call<'a>(
        &self,
        tile: &BackwardTile,
        frame: &Frame,
        rows: &Rows,
        tables: &'a Tables,
        held: &mut Held<'a>,
    ) -> Result<BackwardCall> {
        let resolved = self.job.call;
        let Dims { h, g, d, e, .. } = resolved.dims;
        let [q, k, v, grad] = self.operands;
        let [dq, dk, dv] = self.results();
        let (score, amplitude_width) = self.job.score(tables, held)?;
        Ok(BackwardCall {
            q: self.job.operand(q, 0),
            k: self.job.operand(k, 0),
            v: self.job.pieces(v, tile.width),
            grad: self.job.pieces(grad, tile.width),
            dq,
            dk,
            dv,
            rows: rows.rows,
            statistics: self.statistics,
            enormous: rows.enormous,
            queries: tokens(frame, &resolved.q_positions, &tables.queries, held)?,
            keys: tokens(frame, &resolved.k_positions, &tables.keys, held)?,
            score,
            scale: resolved.score.scale() as f32,
            heads: narrow(h)?,
            group: narrow(h / g)?,
            head_width: narrow(d)?,
            amplitude_width,
            value_width: narrow(e)?,
            causal: resolved.causal.into(),
            window: window_of_32_bits(resolved.window),
            tiles: 0,
            reserved: 0,
        })
    }

    fn without_tensor_cores(&self) -> Result<()> {
        let Job {
            call: Resolved { dims, .. },
            device,
            dtype,
        } = self.job;
        let kernels = Backward::simt(self.job.demand()?.score);
        let stream = device.cuda_stream();
        let rows_len = saturating_product([dims.b, dims.h, dims.t]);
        // SAFETY: `attend_simt_delta` writes every element before the other kernels read it.
        let delta = |len: usize| unsafe { device.alloc::<u8>(len) };
        let mut delta = delta(kernels.workspace_bytes(dims, dtype))?;
        let tables = WideTables::new(&self.job)?;
        let mut held = Held::on(&stream);
        let delta = held.write(&mut delta);
        let [q, k, v, grad] = self.operands.map(|operand| self.job.operand(operand, 0));

        let call = SimtDeltaCall {
            out: self.out,
            rest: self.rest,
            grad,
            statistics: self.statistics,
            delta,
            rows: rows_len as i64,
            len: dims.t as i64,
            heads: narrow(dims.h)?,
            value_width: narrow(dims.e)?,
        };
        let entry = kernels.entry(Pass::Delta, dtype);
        // SAFETY: as in `on_tensor_cores`.
        unsafe { launch_kernel(&stream, &entry, Launch::simt_delta(dims)?, &call)? };

        let [dq, dk, dv] = self.results();
        let mut call = SimtBackwardCall {
            q,
            k,
            v,
            grad,
            dq,
            dk,
            dv,
            statistics: self.statistics,
            delta,
            problem: self.job.simt_problem(&tables, 0, &mut held)?,
        };
        let amp_dim = self.job.amp_dim();
        if dk.data != 0 {
            call.problem.tiles = narrow(launch::simt_key_tiles(dims, dtype))?;
            let shape = Launch::simt_keys(dims, dtype, amp_dim)?;
            let entry = kernels.entry(Pass::Keys, dtype);
            // SAFETY: as above.
            unsafe { launch_kernel(&stream, &entry, shape, &call)? };
        }
        if dq.data != 0 {
            call.problem.tiles = narrow(launch::simt_tiles(dims, dtype))?;
            let shape = Launch::simt_queries(dims, dtype, amp_dim)?;
            let entry = kernels.entry(Pass::Queries, dtype);
            // SAFETY: as above.
            unsafe { launch_kernel(&stream, &entry, shape, &call)? };
        }
        Ok(())
    }

    /// dq, dk and dv.
    fn results(&self) -> [call::Operand; 3] {
        let [q, k, v, _] = self
            .operands
            .map(|(_, like)| Operand::contiguous(like.dims));
        let [dq, dk, dv] = self.gradients;
        [(dq, q), (dk, k), (dv, v)].map(|gradient| self.job.operand(gradient, 0))
    }
}

/// What `attend_delta` leaves.
struct Rows {
    rows: u64,
    enormous: u64,
}
