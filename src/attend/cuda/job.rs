//! What forward and backward calls have in common: operands, positions and scores as the kernels take them.

use super::call::{self, ScoreCall, SimtProblem, SimtTokens};
use super::tables::{log2_slopes, slopes, turns, Turns};
use super::tokens::{list, wide_list, DeviceList, WideList};
use crate::attend::launch::{self, log2_factor, Backward, Demand, Kernel};
use crate::attend::placement::Frame;
use crate::attend::problem::{Dims, Resolved, ResolvedScore};
use crate::attend::Operand;
use crate::gpu::Held;
use crate::positions::PositionTable;
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::{bail, CudaDevice, DType, Layout, Result};
use std::sync::Arc;

/// A call, and where it runs.
#[derive(Clone, Copy)]
pub(super) struct Job<'a> {
    pub call: &'a Resolved,
    pub device: &'a CudaDevice,
    pub dtype: DType,
}

impl Job<'_> {
    pub fn demand(&self) -> Result<Demand> {
        let compute_capability = compute_capability(self.device)?;
        Ok(Demand::of(self.call, self.dtype, compute_capability))
    }

    /// The kernel of the forward pass and those of the backward pass, and 32 bits for the positions where those on
    /// tensor cores can have them; positions beyond are left to the kernels that know 64.
    pub fn kernels(&self) -> Result<Kernels> {
        let demand = self.demand()?;
        let forward = choose(&demand)?;
        Ok(match Frame::of(self.call) {
            None => Kernels {
                forward: Kernel::simt(demand.score),
                backward: Backward::simt(demand.score),
                frame: None,
            },
            frame => Kernels {
                forward,
                backward: Backward::choose(&demand),
                frame,
            },
        })
    }

    /// From column `column` on.
    pub fn operand(&self, (address, operand): (u64, Operand), column: usize) -> call::Operand {
        let first = (operand.offset + column) * self.dtype.size_in_bytes();
        let [batch, head, token, _] = operand.strides.map(|stride| stride as i64);
        call::Operand {
            data: address + first as u64,
            batch,
            head,
            token,
        }
    }

    /// In two pieces of `width` columns; the second is the first where there is but one.
    pub fn pieces(&self, input: (u64, Operand), width: usize) -> [call::Operand; 2] {
        let [.., columns] = input.1.dims;
        let second = if columns > width { width } else { 0 };
        [self.operand(input, 0), self.operand(input, second)]
    }

    /// The score as the kernels on tensor cores take it, and the width of a phase's amplitude part.
    pub fn score<'a>(&self, tables: &'a Tables, held: &mut Held<'a>) -> Result<(ScoreCall, i32)> {
        let (factor, negate) = log2_factor(&self.call.score);
        let mut score = ScoreCall {
            factor,
            negate: negate.into(),
            slopes: tables.slopes.as_ref().map_or(0, |x| held.read(x)),
            ..ScoreCall::default()
        };
        let amplitude_width = narrow(self.amp_dim().unwrap_or(0))?;
        if let ResolvedScore::Phase {
            alpha, phase_scale, ..
        } = self.call.score
        {
            score.alpha = alpha as f32;
            score.phase_scale = phase_scale as f32;
        }
        if let Some(turns) = &tables.turns {
            score.turns = held.read(&turns.entries);
            score.reach = narrow(turns.reach)?;
        }
        Ok((score, amplitude_width))
    }

    /// What kernels without tensor cores are told; `tiles` are of the rows that their blocks are for.
    pub fn simt_problem<'a>(
        &self,
        tables: &'a WideTables,
        tiles: usize,
        held: &mut Held<'a>,
    ) -> Result<SimtProblem> {
        let resolved = self.call;
        let Dims { h, g, d, e, .. } = resolved.dims;
        let (alpha, phase_scale) = match resolved.score {
            ResolvedScore::Phase {
                alpha, phase_scale, ..
            } => (alpha, phase_scale),
            _ => (0., 0.),
        };
        Ok(SimtProblem {
            queries: wide_tokens(&resolved.q_positions, &tables.queries, held),
            keys: wide_tokens(&resolved.k_positions, &tables.keys, held),
            scale: resolved.score.scale(),
            slopes: tables.slopes.as_ref().map_or(0, |x| held.read(x)),
            turns: tables.turns.as_ref().map_or(0, |x| held.read(&x.entries)),
            alpha,
            phase_scale,
            window: resolved.window.unwrap_or(i64::MAX),
            reach: narrow(tables.turns.as_ref().map_or(0, |x| x.reach))?,
            heads: narrow(h)?,
            group: narrow(h / g)?,
            head_width: narrow(d)?,
            amplitude_width: narrow(self.amp_dim().unwrap_or(0))?,
            value_width: narrow(e)?,
            causal: resolved.causal.into(),
            tiles: narrow(tiles)?,
        })
    }

    /// Width of a phase's amplitude part.
    pub fn amp_dim(&self) -> Option<usize> {
        match self.call.score {
            ResolvedScore::Phase { amp_dim, .. } => Some(amp_dim),
            _ => None,
        }
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

/// (9, 0) for an H200.
pub(in crate::attend) fn compute_capability(device: &CudaDevice) -> Result<(u32, u32)> {
    crate::gpu::compute_capability(device.cuda_stream().context())
}

/// What a call runs.
pub(super) struct Kernels {
    pub forward: Kernel,
    pub backward: Backward,
    /// None where no kernel on tensor cores may run.
    pub frame: Option<Frame>,
}

/// The forward kernel of a call whose positions fit 32 bits.
pub(super) fn choose(demand: &Demand) -> Result<Kernel> {
    match Kernel::choose(demand) {
        Ok(kernel) => Ok(kernel),
        Err(reason) => bail!("attend: {reason}"),
    }
}

pub(super) fn operand_of(layout: &Layout) -> Result<Operand> {
    match (layout.dims().try_into(), layout.stride().try_into()) {
        (Ok(dims), Ok(strides)) => Ok(Operand {
            dims,
            strides,
            offset: layout.start_offset(),
        }),
        _ => bail!("attend: expected rank 4, got {:?}", layout.shape()),
    }
}

/// What a kernel on tensor cores reads beside its operands.
pub(super) struct Tables {
    slopes: Option<Arc<CudaSlice<f32>>>,
    turns: Option<Arc<Turns>>,
    pub queries: Option<Arc<DeviceList>>,
    pub keys: Option<Arc<DeviceList>>,
}

impl Tables {
    /// `tiles` are the tokens in a tile of queries and of keys.
    pub fn new(job: &Job<'_>, frame: &Frame, tiles: [usize; 2]) -> Result<Self> {
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

/// A list, or the span that `table` is where there is none; in units of the frame.
pub(super) fn tokens<'a>(
    frame: &Frame,
    table: &PositionTable,
    list: &'a Option<Arc<DeviceList>>,
    held: &mut Held<'a>,
) -> Result<call::Tokens> {
    let len = narrow(table.len)?;
    Ok(match list {
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
    })
}

/// What a kernel without tensor cores reads beside its operands.
pub(super) struct WideTables {
    slopes: Option<Arc<CudaSlice<f64>>>,
    turns: Option<Arc<Turns>>,
    queries: Option<Arc<WideList>>,
    keys: Option<Arc<WideList>>,
}

impl WideTables {
    pub fn new(job: &Job<'_>) -> Result<Self> {
        Ok(Self {
            slopes: match &job.call.score {
                ResolvedScore::LinearBias { slopes: x, .. } => Some(slopes(job.device, x)?),
                _ => None,
            },
            // Those of f64 are evaluated.
            turns: match job.dtype {
                DType::F64 => None,
                _ => job.turns()?,
            },
            queries: wide_list(job.device, &job.call.q_positions)?,
            keys: wide_list(job.device, &job.call.k_positions)?,
        })
    }
}

/// A list, or the span that `table` is where there is none.
fn wide_tokens<'a>(
    table: &PositionTable,
    list: &'a Option<Arc<WideList>>,
    held: &mut Held<'a>,
) -> SimtTokens {
    let len = table.len as i64;
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

pub(super) fn narrow(size: usize) -> Result<i32> {
    match i32::try_from(size) {
        Ok(size) => Ok(size),
        Err(_) => bail!("attend: {size} is more than the GPU's kernels count to"),
    }
}
