//! The forward pass on a GPU: arguments gathered, memory set aside, kernels launched.
#![allow(unsafe_code)]

use super::call::{self, ForwardCall, ScoreCall, SimtCall, SimtTokens};
use super::tables::{log2_slopes, slopes, turns, Turns};
use super::tiles::{DecodeTile, ForwardTile};
use super::tokens::{list, wide_list, DeviceList, WideList};
use crate::attend::launch::{
    self, dtype_name, keys_in_sight, log2_factor, window_of_32_bits, Demand, Kernel, ScoreKind,
    Split,
};
use crate::attend::placement::Frame;
use crate::attend::problem::{saturating_product, Dims, Resolved, ResolvedScore};
use crate::attend::Operand;
use crate::gpu::{launch as launch_kernel, upload, Held, Launch};
use crate::positions::PositionTable;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{sys, CudaSlice, DeviceRepr};
use candle_core::cuda_backend::CudaDType;
use candle_core::{bail, CudaDevice, CudaStorage, DType, Error, Layout, Result, Tensor, WithDType};
use half::{bf16, f16};
use std::sync::Arc;

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
    let kernel = choose(call, q.dtype())?;
    let read = |x: &Tensor| match operand_of(x.layout())? {
        operand if kernel.needs_copy(&operand, x.dtype()) => x.force_contiguous(),
        _ => Ok(x.clone()),
    };
    Ok([read(q)?, read(k)?, read(v)?])
}

fn choose(call: &Resolved, dtype: DType) -> Result<Kernel> {
    match Kernel::choose(&Demand::of(call, dtype)) {
        Ok(kernel) => Ok(kernel),
        Err(reason) => bail!("attend: {reason}"),
    }
}

fn operand_of(layout: &Layout) -> Result<Operand> {
    match (layout.dims().try_into(), layout.stride().try_into()) {
        (Ok(dims), Ok(strides)) => Ok(Operand {
            dims,
            strides,
            offset: layout.start_offset(),
        }),
        _ => bail!("attend: expected rank 4, got {:?}", layout.shape()),
    }
}

/// The output, and the log-sum-exp where `with_lse` asks for it.
pub(in crate::attend) fn forward(
    call: &Resolved,
    operands: [(&CudaStorage, &Layout); 3],
    with_lse: bool,
) -> Result<(CudaStorage, Option<CudaStorage>)> {
    match operands[0].0.dtype() {
        DType::BF16 => forward_of::<bf16, f32>(call, operands, with_lse),
        DType::F16 => forward_of::<f16, f32>(call, operands, with_lse),
        DType::F32 => forward_of::<f32, f32>(call, operands, with_lse),
        DType::F64 => forward_of::<f64, f64>(call, operands, with_lse),
        other => bail!("attend: dtype {other:?} is not supported (f32, f64, bf16, f16 are)"),
    }
}

/// `Lse` is the dtype of the log-sum-exp.
fn forward_of<T, Lse>(
    call: &Resolved,
    operands: [(&CudaStorage, &Layout); 3],
    with_lse: bool,
) -> Result<(CudaStorage, Option<CudaStorage>)>
where
    T: CudaDType + DeviceRepr + WithDType,
    Lse: CudaDType + DeviceRepr + WithDType,
{
    let device = operands[0].0.device();
    let Dims { b, h, t, s, e, .. } = call.dims;
    let wrap = |out: CudaSlice<T>, lse: Option<CudaSlice<Lse>>| {
        let lse = lse.map(|lse| CudaStorage::wrap_cuda_slice(lse, device.clone()));
        (CudaStorage::wrap_cuda_slice(out, device.clone()), lse)
    };
    let (out_len, lse_len) = (
        saturating_product([b, h, t, e]),
        saturating_product([b, h, t]),
    );
    if out_len > isize::MAX as usize / size_of::<T>() {
        bail!("attend: an output of {:?} is too large", (b, h, t, e))
    }
    if out_len == 0 || s == 0 {
        // Nothing is seen. There is no memory of no length.
        let out = upload(device, &vec![T::zero(); out_len.max(1)])?;
        let unseen = vec![Lse::from_f64(f64::NEG_INFINITY); lse_len.max(1)];
        let lse = with_lse.then(|| upload(device, &unseen)).transpose()?;
        return Ok(wrap(out, lse));
    }
    // SAFETY: the kernels write every element, also where nothing is seen.
    let mut out = unsafe { device.alloc::<T>(out_len)? };
    // SAFETY: as above.
    let lse = with_lse.then(|| unsafe { device.alloc::<Lse>(lse_len) });
    let mut lse = lse.transpose()?;

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
    let job = Job {
        call,
        device,
        dtype: T::DTYPE,
        inputs: [q, k, v],
        out: held.write(&mut out),
        lse: lse.as_mut().map_or(0, |lse| held.write(lse)),
    };
    job.launch()?;
    drop(held);
    Ok(wrap(out, lse))
}

/// One forward pass over memory that is there already.
struct Job<'a> {
    call: &'a Resolved,
    device: &'a CudaDevice,
    dtype: DType,
    /// q, k and v: where their memory starts, and how they lie in it.
    inputs: [(u64, Operand); 3],
    out: u64,
    /// 0 where it is not asked for.
    lse: u64,
}

impl Job<'_> {
    fn launch(&self) -> Result<()> {
        let kernel = choose(self.call, self.dtype)?;
        // Positions beyond 32 bits are left to the kernel that knows 64.
        let (kernel, frame) = match (kernel, Frame::of(self.call)) {
            (Kernel::Simt(_), _) | (_, None) => (self.simt(), None),
            (kernel, frame) => (kernel, frame),
        };
        if (self.inputs.iter()).any(|(_, operand)| kernel.needs_copy(operand, self.dtype)) {
            bail!(
                "attend: {} cannot read its operands where they lie: {:?}",
                kernel.entry(self.dtype),
                self.inputs.map(|(_, operand)| operand)
            )
        }
        match (kernel, frame) {
            (Kernel::Forward(tile), Some(frame)) => self.forward(&tile, &frame),
            (Kernel::Decode(tile), Some(frame)) => self.decode(&tile, &frame),
            _ => self.without_tensor_cores(),
        }
    }

    fn simt(&self) -> Kernel {
        Kernel::simt(ScoreKind::of_resolved(
            &self.call.score,
            self.call.precision,
        ))
    }

    fn forward(&self, tile: &ForwardTile, frame: &Frame) -> Result<()> {
        let kernel = Kernel::Forward(*tile);
        let rows = launch::query_tile(tile);
        let stream = self.device.cuda_stream();
        let tables = Tables::new(self, frame, [rows, tile.keys])?;
        let mut held = Held::on(&stream);
        let mut call = self.forward_call(frame, tile.width, &tables, &mut held)?;
        call.tiles = narrow(self.call.dims.t.div_ceil(rows))?;
        let shape = Launch::forward(tile, &self.call.dims)?;
        // SAFETY: the operands' extents were checked by candle, the results are as long as the kernel's dims say, lists
        // and tables hold what this call asks for; rows are aligned, or `launch` would have refused them. All stays alive
        // until it is launched, and memory given back later is not given out on this stream before the launch has run.
        unsafe { launch_kernel(&stream, &kernel.entry(self.dtype), shape, &call) }
    }

    fn decode(&self, tile: &DecodeTile, frame: &Frame) -> Result<()> {
        let kernel = Kernel::Decode(*tile);
        let dims = &self.call.dims;
        let stream = self.device.cuda_stream();
        let keys = keys_in_sight(self.call).len();
        let split = Split::new(tile, dims, keys, multiprocessors(self.device)?);
        let part = |len: usize| -> Result<_> {
            // SAFETY: the merging kernel reads only what the decoding kernel wrote.
            let memory = || unsafe { self.device.alloc::<f32>(len) };
            split.is_split().then(memory).transpose()
        };
        let mut part_out = part(split.out_elements(dims))?;
        let mut part_lse = part(split.lse_elements(dims))?;
        // This kernel does not look at tiles: one a row is enough.
        let tables = Tables::new(self, frame, [dims.t, dims.s])?;
        let mut held = Held::on(&stream);
        let mut call = self.forward_call(frame, tile.width, &tables, &mut held)?;
        call.tiles = narrow(split.parts)?;
        call.part_out = part_out.as_mut().map_or(0, |part| held.write(part));
        call.part_lse = part_lse.as_mut().map_or(0, |part| held.write(part));
        let shape = Launch::decode(tile, dims, &split)?;
        // SAFETY: as in `forward`; the parts are as long as the split says.
        unsafe { launch_kernel(&stream, &kernel.entry(self.dtype), shape, &call)? };
        if split.is_split() {
            let merge = format!("attend_merge_{}", dtype_name(self.dtype));
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
        let Dims {
            h, g, d, e, t, s, ..
        } = self.call.dims;
        let [q, k, v] = self.inputs.map(|input| self.operand(input, 0));
        let second = if e > width { width } else { 0 };
        let (factor, negate) = log2_factor(&self.call.score);
        let mut score = ScoreCall {
            factor,
            negate: negate.into(),
            slopes: tables.slopes.as_ref().map_or(0, |x| held.read(x)),
            ..ScoreCall::default()
        };
        let mut amplitude_width = 0;
        if let ResolvedScore::Phase {
            amp_dim,
            alpha,
            phase_scale,
            ..
        } = self.call.score
        {
            amplitude_width = narrow(amp_dim)?;
            score.alpha = alpha as f32;
            score.phase_scale = phase_scale as f32;
        }
        if let Some(turns) = &tables.turns {
            score.turns = held.read(&turns.entries);
            score.reach = narrow(turns.reach)?;
        }
        Ok(ForwardCall {
            q,
            k,
            v: [v, self.operand(self.inputs[2], second)],
            out: self.out,
            lse: self.lse,
            queries: tokens(
                frame,
                &self.call.q_positions,
                &tables.queries,
                narrow(t)?,
                held,
            ),
            keys: tokens(
                frame,
                &self.call.k_positions,
                &tables.keys,
                narrow(s)?,
                held,
            ),
            score,
            heads: narrow(h)?,
            group: narrow(h / g)?,
            head_width: narrow(d)?,
            amplitude_width,
            value_width: narrow(e)?,
            causal: self.call.causal.into(),
            window: window_of_32_bits(self.call.window),
            ..ForwardCall::default()
        })
    }

    /// From column `column` on.
    fn operand(&self, (address, operand): (u64, Operand), column: usize) -> call::Operand {
        let first = (operand.offset + column) * self.dtype.size_in_bytes();
        let [batch, head, token, _] = operand.strides.map(|stride| stride as i64);
        call::Operand {
            data: address + first as u64,
            batch,
            head,
            token,
        }
    }

    fn without_tensor_cores(&self) -> Result<()> {
        let Dims {
            h, g, d, e, t, s, ..
        } = self.call.dims;
        let stream = self.device.cuda_stream();
        let wide_slopes = match &self.call.score {
            ResolvedScore::LinearBias { slopes: x, .. } => Some(slopes(self.device, x)?),
            _ => None,
        };
        let turns = match self.dtype {
            DType::F64 => None,
            _ => self.turns()?,
        };
        let queries = wide_list(self.device, &self.call.q_positions)?;
        let keys = wide_list(self.device, &self.call.k_positions)?;
        let mut held = Held::on(&stream);
        let (alpha, phase_scale, amp_dim) = match self.call.score {
            ResolvedScore::Phase {
                alpha,
                phase_scale,
                amp_dim,
                ..
            } => (alpha, phase_scale, Some(amp_dim)),
            _ => (0., 0., None),
        };
        let (ResolvedScore::Dot { scale }
        | ResolvedScore::LinearBias { scale, .. }
        | ResolvedScore::Phase { scale, .. }) = self.call.score;
        let [q, k, v] = self.inputs.map(|input| self.operand(input, 0));
        let call = SimtCall {
            q,
            k,
            v,
            out: self.out,
            lse: self.lse,
            queries: wide_tokens(&self.call.q_positions, &queries, t, &mut held),
            keys: wide_tokens(&self.call.k_positions, &keys, s, &mut held),
            scale,
            slopes: wide_slopes.as_ref().map_or(0, |x| held.read(x)),
            turns: turns.as_ref().map_or(0, |x| held.read(&x.entries)),
            alpha,
            phase_scale,
            window: self.call.window.unwrap_or(i64::MAX),
            reach: narrow(turns.as_ref().map_or(0, |x| x.reach))?,
            heads: narrow(h)?,
            group: narrow(h / g)?,
            head_width: narrow(d)?,
            amplitude_width: narrow(amp_dim.unwrap_or(0))?,
            value_width: narrow(e)?,
            causal: self.call.causal.into(),
            tiles: narrow(launch::simt_tiles(&self.call.dims, self.dtype))?,
        };
        let shape = Launch::simt(&self.call.dims, self.dtype, amp_dim)?;
        // SAFETY: as in `forward`.
        unsafe { launch_kernel(&stream, &self.simt().entry(self.dtype), shape, &call) }
    }

    /// For the phase.
    fn turns(&self) -> Result<Option<Arc<Turns>>> {
        let ResolvedScore::Phase {
            alpha, phase_scale, ..
        } = self.call.score
        else {
            return Ok(None);
        };
        let (q, k) = (&self.call.q_positions, &self.call.k_positions);
        let greatest = match (q.bounds(), k.bounds()) {
            (Some(q), Some(k)) => {
                launch::greatest_distance(q, k, self.call.causal, self.call.window)
            }
            _ => 0,
        };
        turns(self.device, alpha, phase_scale, greatest).map(Some)
    }
}

/// What a kernel on tensor cores reads beside q, k and v.
struct Tables {
    slopes: Option<Arc<CudaSlice<f32>>>,
    turns: Option<Arc<Turns>>,
    queries: Option<Arc<DeviceList>>,
    keys: Option<Arc<DeviceList>>,
}

impl Tables {
    /// `tiles` are the tokens in a tile of queries and of keys.
    fn new(job: &Job<'_>, frame: &Frame, tiles: [usize; 2]) -> Result<Self> {
        let slopes = match &job.call.score {
            ResolvedScore::LinearBias { slopes, .. } => Some(log2_slopes(job.device, slopes)?),
            _ => None,
        };
        Ok(Self {
            slopes,
            turns: job.turns()?,
            queries: list(job.device, frame, &job.call.q_positions, tiles[0])?,
            keys: list(job.device, frame, &job.call.k_positions, tiles[1])?,
        })
    }
}

/// A list, or the span that `table` is where there is none.
fn tokens<'a>(
    frame: &Frame,
    table: &PositionTable,
    list: &'a Option<Arc<DeviceList>>,
    len: i32,
    held: &mut Held<'a>,
) -> call::Tokens {
    match list {
        Some(list) => call::Tokens {
            list: held.read(&list.tokens),
            tiles: held.read(&list.tiles),
            batch: list.row_stride as i64,
            tiles_batch: list.tile_stride as i64,
            start: 0,
            len,
        },
        None => call::Tokens {
            start: frame.start(table).unwrap_or_default(),
            len,
            ..call::Tokens::default()
        },
    }
}

/// A list, or the span that `table` is where there is none.
fn wide_tokens<'a>(
    table: &PositionTable,
    list: &'a Option<Arc<WideList>>,
    len: usize,
    held: &mut Held<'a>,
) -> SimtTokens {
    let len = len as i64;
    match list {
        Some(list) => SimtTokens {
            positions: held.read(&list.positions),
            segments: list.segments.as_ref().map_or(0, |x| held.read(x)),
            batch: list.row_stride as i64,
            start: 0,
            len,
        },
        None => SimtTokens {
            start: table.span_start().unwrap_or_default(),
            len,
            ..SimtTokens::default()
        },
    }
}

fn narrow(size: usize) -> Result<i32> {
    match i32::try_from(size) {
        Ok(size) => Ok(size),
        Err(_) => bail!("attend: {size} is more than the GPU's kernels count to"),
    }
}

fn multiprocessors(device: &CudaDevice) -> Result<usize> {
    let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let stream = device.cuda_stream();
    let count = stream.context().attribute(attribute).map_err(Error::wrap)?;
    Ok(usize::try_from(count).unwrap_or(1))
}
