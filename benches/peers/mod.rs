//! What people use in candle today, timed beside ours: attention from tensor operations as the model files write
//! it, and candle-nn's CPU flash attention (which has no backward pass).

// Each bench compiles this module for itself and uses a part of it.
#![allow(dead_code)]

use candle_core::{DType, Result, Tensor, D};
use candle_nn::attention::{flash_attn, AttnMask};

/// Causal attention from candle's tensor operations over a (B, H, T, T) matrix: q, k, v (B, H, T, D). Differentiable,
/// since it avoids candle-nn's `softmax_last_dim`, which has no gradient.
pub fn dense_causal(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let (_, _, t, d) = q.dims4()?;
    let mask: Vec<f32> = (0..t)
        .flat_map(|i| (0..t).map(move |j| if j > i { f32::NEG_INFINITY } else { 0. }))
        .collect();
    let mask = Tensor::from_vec(mask, (t, t), q.device())?.to_dtype(q.dtype())?;
    let scores = (q.matmul(&k.t()?)? / (d as f64).sqrt())?.broadcast_add(&mask)?;
    candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(v)
}

/// candle-nn's causal CPU flash attention: q, k, v (B, T, H, D), contiguous, f32.
pub fn candle_flash(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let scale = 1. / (q.dim(D::Minus1)? as f32).sqrt();
    flash_attn::<f32>(q, k, v, scale, AttnMask::causal(), None, None)
}

/// Standard normal (b, h, t, d) of f32.
pub fn normal(dims: (usize, usize, usize, usize)) -> Result<Tensor> {
    Tensor::randn(0f32, 1., dims, &candle_core::Device::Cpu)
}

/// (B, H, T, D) → (B, T, H, D), contiguous.
pub fn tokens_first(x: &Tensor) -> Result<Tensor> {
    x.to_dtype(DType::F32)?.transpose(1, 2)?.contiguous()
}
