//! Attention in plain tensor operations, over the whole (B, H, T, S) score matrix: slow, differentiable by
//! candle itself, and the reference for the fused path's values and gradients.

use super::problem::{Dims, Resolved, ResolvedScore};
use super::AttendOutput;
use crate::positions::PositionTable;
use candle_core::{DType, Device, Result, Tensor, D};
use std::f64::consts::TAU;

pub(super) fn attend(q: &Tensor, k: &Tensor, v: &Tensor, call: &Resolved) -> Result<AttendOutput> {
    let (dtype, device) = (q.dtype(), q.device());
    let accumulate = match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let Dims {
        b, h, g, t, s, e, ..
    } = call.dims;
    if b * h * t * s == 0 {
        return Ok(AttendOutput {
            out: Tensor::zeros((b, h, t, e), dtype, device)?,
            lse: Tensor::full(f32::NEG_INFINITY, (b, h, t), device)?.to_dtype(accumulate)?,
        });
    }
    // Padding is cut off before any arithmetic: 0 · NaN is NaN, in values and in gradients.
    let read = |x: &Tensor, positions: &PositionTable, repeat: usize| -> Result<Tensor> {
        let x = x.to_dtype(accumulate)?;
        let x = if positions.has_padding() {
            let real = per_token(positions, b, device, |p| u8::from(p >= 0))?;
            let real = real.unsqueeze(1)?.unsqueeze(3)?.broadcast_as(x.shape())?;
            real.where_cond(&x, &x.zeros_like()?)?
        } else {
            x
        };
        repeat_heads(&x, repeat)?.contiguous()
    };
    let q = read(q, &call.q_positions, 1)?; // (B,H,T,D)
    let k = read(k, &call.k_positions, h / g)?; // (B,H,S,D)
    let v = read(v, &call.k_positions, h / g)?; // (B,H,S,E)

    let pairs = Pairs::new(call, device)?;
    let visible = pairs.visible()?.broadcast_as((b, h, t, s))?;
    let scores = scores(&q, &k, call, &pairs, accumulate)?; // (B,H,T,S)
    let hidden = Tensor::full(f32::NEG_INFINITY, (b, h, t, s), device)?.to_dtype(accumulate)?;
    let scores = visible.where_cond(&scores, &hidden)?;

    // A row that sees nothing has maximum −∞ and sum 0: shift it by 0 and divide it by 1.
    let max = scores.detach().max_keepdim(D::Minus1)?; // (B,H,T,1)
    let zeros = max.zeros_like()?;
    let shift = max.eq(f64::NEG_INFINITY)?.where_cond(&zeros, &max)?;
    let weights = scores.broadcast_sub(&shift)?.exp()?;
    let sum = weights.sum_keepdim(D::Minus1)?;
    let empty = sum.detach().eq(0.)?;
    let safe_sum = empty.where_cond(&sum.ones_like()?, &sum)?;
    let out = weights.broadcast_div(&safe_sum)?.matmul(&v)?;
    // Where nothing is seen the output is a constant: a NaN in its gradient must not reach the values.
    let out = empty
        .broadcast_as(out.shape())?
        .where_cond(&out.zeros_like()?, &out)?;
    let lse = (sum.detach().log()? + shift)?.squeeze(D::Minus1)?;
    Ok(AttendOutput {
        out: out.to_dtype(dtype)?,
        lse,
    })
}

fn scores(
    q: &Tensor,
    k: &Tensor,
    call: &Resolved,
    pairs: &Pairs,
    accumulate: DType,
) -> Result<Tensor> {
    let dot = |q: &Tensor, k: &Tensor| q.matmul(&k.transpose(2, 3)?.contiguous()?);
    match &call.score {
        ResolvedScore::Dot { scale } => dot(q, k)? * *scale,
        ResolvedScore::LinearBias { scale, slopes } => {
            let slopes = Tensor::new(&slopes[..], q.device())?.reshape((1, (), 1, 1))?;
            let bias = pairs
                .distance(|d| d)?
                .broadcast_mul(&slopes)?
                .to_dtype(accumulate)?;
            (dot(q, k)? * *scale)?.broadcast_sub(&bias)
        }
        ResolvedScore::Phase {
            amp_dim,
            alpha,
            scale,
            phase_scale,
        } => {
            let split = |x: &Tensor| -> Result<(Tensor, Tensor)> {
                let phase_dim = x.dim(3)? - amp_dim;
                Ok((
                    x.narrow(3, 0, *amp_dim)?.contiguous()?,
                    x.narrow(3, *amp_dim, phase_dim)?.contiguous()?,
                ))
            };
            let ((q_amp, q_phase), (k_amp, k_phase)) = (split(q)?, split(k)?);
            let amplitude = (dot(&q_amp, &k_amp)? * *scale)?;
            let turns_per_unit = pairs
                .distance(|d| d.powf(*alpha) * phase_scale)?
                .to_dtype(accumulate)?;
            let turns = dot(&q_phase, &k_phase)?.broadcast_mul(&turns_per_unit)?;
            // Whole turns are dropped exactly, so that the cosine's argument stays small.
            let turns = (&turns - turns.detach().round()?)?;
            amplitude * (turns * TAU)?.cos()?
        }
    }
}

/// Per-token values of the positions, (B, T).
fn per_token<V: candle_core::WithDType>(
    positions: &PositionTable,
    batch: usize,
    device: &Device,
    value: impl Fn(i64) -> V,
) -> Result<Tensor> {
    let values: Vec<V> = (0..batch)
        .flat_map(|b| positions.row(b).iter().map(|p| value(*p)))
        .collect();
    Tensor::from_vec(values, (batch, positions.len), device)
}

/// (B, G, S, D) → (B, G·repeat, S, D), each head `repeat` times in a row.
fn repeat_heads(x: &Tensor, repeat: usize) -> Result<Tensor> {
    if repeat == 1 {
        return Ok(x.clone());
    }
    let (b, g, s, d) = x.dims4()?;
    x.unsqueeze(2)?
        .broadcast_as((b, g, repeat, s, d))?
        .reshape((b, g * repeat, s, d))
}

/// Facts about each pair of a query and a key, (1 or B, 1, T, S).
struct Pairs<'a> {
    call: &'a Resolved,
    rows: usize,
    device: &'a Device,
}

impl<'a> Pairs<'a> {
    fn new(call: &'a Resolved, device: &'a Device) -> Result<Self> {
        let rows = call.q_positions.rows.max(call.k_positions.rows);
        Ok(Self { call, rows, device })
    }

    fn tensor<V: candle_core::WithDType>(
        &self,
        value: impl Fn(usize, usize, usize) -> V,
    ) -> Result<Tensor> {
        let Dims { t, s, .. } = self.call.dims;
        let value = &value;
        let values: Vec<V> = (0..self.rows)
            .flat_map(|b| (0..t).flat_map(move |i| (0..s).map(move |j| value(b, i, j))))
            .collect();
        Tensor::from_vec(values, (self.rows, 1, t, s), self.device)
    }

    /// 1 where the query sees the key, `u8`.
    fn visible(&self) -> Result<Tensor> {
        let (q, k) = (&self.call.q_positions, &self.call.k_positions);
        self.tensor(|b, i, j| {
            let same_segment = match (q.segments(b), k.segments(b)) {
                (Some(q), Some(k)) => q[i] == k[j],
                _ => true,
            };
            u8::from(same_segment && self.call.sees(q.row(b)[i], k.row(b)[j]))
        })
    }

    /// `value(|m − n|)` in f64; 0 for pairs with padding.
    fn distance(&self, value: impl Fn(f64) -> f64) -> Result<Tensor> {
        let (q, k) = (&self.call.q_positions, &self.call.k_positions);
        self.tensor(|b, i, j| {
            let (m, n) = (q.row(b)[i], k.row(b)[j]);
            if m < 0 || n < 0 {
                0.
            } else {
                value(m.abs_diff(n) as f64)
            }
        })
    }
}
