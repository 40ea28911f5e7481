//! The gated feed-forward part, SwiGLU: down(silu(gate(x)) ⊙ up(x)) (Shazeer, arXiv 2002.05202v1, equation 6).
//!
//! Where gradients flow through many rows it is one operation over x (…, C), the weights of gate and up behind each
//! other (2I, C), and that of down (C, I). So gate and up are one product, forward and backward, and between the
//! products no gradient is added to anything. With z = x·[G U]ᵀ, h = swiglu(z), y = h·Dᵀ and dy the gradient of y:
//!
//! - dD = dyᵀ·h and dh = dy·D, then dz as in [`swiglu`](crate::swiglu),
//! - d[G U] = dzᵀ·x and dx = dz·[G U].
//!
//! Of all this z alone is kept; h is made again.
//!
//! A block's second half, x + y(norm(x)), is one operation too. The norm's weight is then a row behind those of up, and the
//! gradient of x the norm's with dy added to it; norm(x) is kept beside z.

use crate::gpu::has_kernels;
use crate::host::{on_host, Element};
use crate::norm::{self, RmsNorm};
use crate::projection::{detached, Projection};
use crate::sum::{self, sum};
use crate::swiglu::{self, swiglu};
use candle_core::backend::BackendStorage;
use candle_core::{
    bail, CpuStorage, CustomOp3, DType, Device, Layout, Result, Shape, Storage, Tensor,
};
use candle_nn::{Init, VarBuilder};
use half::{bf16, f16};
use std::sync::{Arc, OnceLock};

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;

/// Gate, up and down.
#[derive(Debug, Clone)]
pub(crate) struct FeedForward {
    gate_proj: Projection,
    up_proj: Projection,
    down_proj: Projection,
}

impl FeedForward {
    /// From C numbers over I to C.
    pub fn new(c: usize, inner: usize, init: Init, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            gate_proj: Projection::new(c, inner, init, vb.pp("gate_proj"))?,
            up_proj: Projection::new(c, inner, init, vb.pp("up_proj"))?,
            down_proj: Projection::new(inner, c, init, vb.pp("down_proj"))?,
        })
    }

    /// (…, C) → (…, C)
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if self.is_joined(x) {
            return self.joined(x, None);
        }
        self.down_proj.forward(&self.gated(x)?)
    }

    /// The stream (…, C) with what this makes of its norm added.
    pub fn forward_onto(&self, stream: &Tensor, norm: &RmsNorm) -> Result<Tensor> {
        norm.check(stream)?;
        if !self.is_joined(stream) {
            let gated = self.gated(&norm.forward(stream)?)?;
            return self.down_proj.forward_onto(Some(stream), &gated);
        }
        // A norm trained alone would drag the gradients of gate and up, whose weights its own lies behind, with it.
        let gate_up = [self.gate_proj.weight(), self.up_proj.weight()];
        if norm.weight().track_op() && !gate_up.iter().any(|w| w.track_op()) {
            return sum(stream, &self.joined(&norm.forward(stream)?, None)?);
        }
        self.joined(stream, Some(norm))
    }

    /// h, by operations of their own.
    fn gated(&self, x: &Tensor) -> Result<Tensor> {
        swiglu(&self.gate_proj.forward(x)?, &self.up_proj.forward(x)?)
    }

    /// Whether it is one operation.
    fn is_joined(&self, x: &Tensor) -> bool {
        let weights = [&self.gate_proj, &self.up_proj, &self.down_proj].map(Projection::weight);
        let tracked = x.track_op() || weights.iter().any(|w| w.track_op());
        tracked && is_worth_joining(x, weights[0]) && has_kernels(x.device())
    }

    /// All of it as one operation, with a norm before it and the sum behind it where there is one.
    fn joined(&self, x: &Tensor, norm: Option<&RmsNorm>) -> Result<Tensor> {
        let [gate, up, down] =
            [&self.gate_proj, &self.up_proj, &self.down_proj].map(Projection::weight);
        let (inner, c) = gate.dims2()?;
        let (to, _) = down.dims2()?;
        let fits = x.dims().last() == Some(&c)
            && up.dims() == gate.dims()
            && down.dims() == [to, inner]
            && (norm.is_none() || to == c);
        if !fits || inner == 0 || c == 0 {
            bail!(
                "feed-forward: {:?} cannot be taken by weights {:?}, {:?} and {:?}",
                x.dims(),
                gate.dims(),
                up.dims(),
                down.dims()
            )
        }
        let weights = match norm {
            Some(norm) => Tensor::cat(&[gate, up, &norm.weight().unsqueeze(0)?], 0)?,
            None => Tensor::cat(&[gate, up], 0)?,
        };
        let op = Joined {
            norm: norm.map(RmsNorm::epsilon),
            kept: Arc::default(),
        };
        x.contiguous()?.apply_op3(&weights, &down.contiguous()?, op)
    }
}

/// Whether x (…, C) has at least C rows. The weights of gate and up, 2I·C numbers, are then copied behind each other for
/// z, which is no smaller. With fewer rows, one above all, the copy would cost more than the products gain.
fn is_worth_joining(x: &Tensor, gate: &Tensor) -> bool {
    let width = gate.dims().last().copied().unwrap_or(0);
    x.elem_count() / width.max(1) >= width
}

/// One call, over x, the weights of gate and up, with a norm's behind them, and that of down, all contiguous. Each call
/// needs an object of its own: what it keeps belongs to it.
struct Joined {
    /// What the norm adds to the mean square, where there is one.
    norm: Option<f64>,
    kept: Arc<OnceLock<Kept>>,
}

struct Kept {
    /// (rows, 2I)
    z: Tensor,
    /// norm(x) (rows, C)
    normed: Option<Tensor>,
}

/// Contiguous memory of a device.
type Operand<'a, S> = (&'a S, &'a Layout);

/// What a call needs of a device.
struct Steps<S> {
    /// Of rows, with their weights and what is added to the mean square.
    norm: fn(Operand<S>, Operand<S>, f64) -> Result<S>,
    /// Makes h (rows, I) of z (rows, 2I), from I and the number of rows.
    gated: fn(&S, usize, usize) -> Result<S>,
    sum: fn(Operand<S>, Operand<S>) -> Result<S>,
    keep: fn(S) -> Storage,
}

impl Joined {
    fn forward<S: BackendStorage>(
        &self,
        [(x, x_layout), (weights, weights_layout), (down, down_layout)]: [Operand<S>; 3],
        steps: Steps<S>,
    ) -> Result<(S, Shape)> {
        let (to, inner) = down_layout.shape().dims2()?;
        let (_, c) = weights_layout.shape().dims2()?;
        let rows = x_layout.shape().elem_count() / c;
        let flat = Layout::contiguous_with_offset((rows, c), x_layout.start_offset());
        let gate_up = weights_layout.narrow(0, 0, 2 * inner)?;
        let normed = match self.norm {
            Some(epsilon) => {
                let first = weights_layout.start_offset() + 2 * inner * c;
                let factors = Layout::contiguous_with_offset(c, first);
                Some((steps.norm)((x, &flat), (weights, &factors), epsilon)?)
            }
            None => None,
        };
        let own = Layout::contiguous((rows, c));
        let (from, from_layout) = match &normed {
            Some(normed) => (normed, &own),
            None => (x, &flat),
        };
        let sizes = (1, rows, 2 * inner, c);
        let z = from.matmul(weights, sizes, from_layout, &gate_up.transpose(0, 1)?)?;
        let h = (steps.gated)(&z, inner, rows)?;
        let h_layout = Layout::contiguous((rows, inner));
        let sizes = (1, rows, to, inner);
        let mut y = h.matmul(down, sizes, &h_layout, &down_layout.transpose(0, 1)?)?;
        if normed.is_some() {
            y = (steps.sum)((&y, &own), (x, &flat))?;
        }
        let tensor = |storage, width: usize| {
            let untracked = candle_core::op::BackpropOp::none();
            Tensor::from_storage((steps.keep)(storage), (rows, width), untracked, false)
        };
        let kept = Kept {
            z: tensor(z, 2 * inner),
            normed: normed.map(|normed| tensor(normed, c)),
        };
        if self.kept.set(kept).is_err() {
            bail!("feed-forward: one operation object was applied twice")
        }
        let mut shape = x_layout.dims().to_vec();
        if let Some(last) = shape.last_mut() {
            *last = to;
        }
        Ok((y, Shape::from(shape)))
    }
}

fn gated_on_host(z: &CpuStorage, inner: usize, _rows: usize) -> Result<CpuStorage> {
    fn gated<T: Element>(z: &CpuStorage, inner: usize) -> Result<CpuStorage> {
        let out = swiglu::forward_joined::<T>(z.as_slice()?, inner);
        Ok(T::to_cpu_storage_owned(out))
    }
    match z.dtype() {
        DType::F32 => gated::<f32>(z, inner),
        DType::F64 => gated::<f64>(z, inner),
        DType::BF16 => gated::<bf16>(z, inner),
        DType::F16 => gated::<f16>(z, inner),
        other => bail!("feed-forward: dtype {other:?} is not supported (f32, f64, bf16, f16 are)"),
    }
}

/// dz and h, from z (rows, 2I) and dh (rows, I), both contiguous.
fn gate_gradient(z: &Tensor, dh: &Tensor) -> Result<[Tensor; 2]> {
    fn on_cpu<T: Element>(z: &Tensor, dh: &Tensor) -> Result<[Tensor; 2]> {
        let (z_host, dh_host) = (on_host(z), on_host(dh));
        let inner = dh.dim(1)?;
        let (dz, h) = swiglu::backward_joined::<T>(z_host.slice()?, dh_host.slice()?, inner);
        let tensor = |values, like: &Tensor| Tensor::from_vec(values, like.shape(), &Device::Cpu);
        Ok([tensor(dz, z)?, tensor(h, dh)?])
    }
    #[cfg(feature = "cuda")]
    if z.device().is_cuda() {
        return swiglu::cuda::backward_joined(z, dh);
    }
    match z.dtype() {
        DType::F32 => on_cpu::<f32>(z, dh),
        DType::F64 => on_cpu::<f64>(z, dh),
        DType::BF16 => on_cpu::<bf16>(z, dh),
        DType::F16 => on_cpu::<f16>(z, dh),
        other => bail!("feed-forward: no gradient for dtype {other:?}"),
    }
}

impl CustomOp3 for Joined {
    fn name(&self) -> &'static str {
        "feed-forward"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weights: &CpuStorage,
        weights_layout: &Layout,
        down: &CpuStorage,
        down_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let operands = [
            (x, x_layout),
            (weights, weights_layout),
            (down, down_layout),
        ];
        let steps = Steps {
            norm: norm::forward_on_host,
            gated: gated_on_host,
            sum: sum::on_host,
            keep: Storage::Cpu,
        };
        self.forward(operands, steps)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        weights: &CudaStorage,
        weights_layout: &Layout,
        down: &CudaStorage,
        down_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let operands = [
            (x, x_layout),
            (weights, weights_layout),
            (down, down_layout),
        ];
        let steps = Steps {
            norm: norm::cuda::forward,
            gated: swiglu::cuda::forward_joined,
            sum: sum::cuda::forward,
            keep: Storage::Cuda,
        };
        self.forward(operands, steps)
    }

    fn bwd(
        &self,
        x: &Tensor,
        weights: &Tensor,
        down: &Tensor,
        _out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let Some(Kept { z, normed }) = self.kept.get() else {
            bail!("feed-forward: backward before forward")
        };
        let (to, inner) = down.dims2()?;
        let (_, c) = weights.dims2()?;
        let (flat, all) = (x.detach().reshape(((), c))?, weights.detach());
        let gate_up = all.narrow(0, 0, 2 * inner)?;
        let dy = detached(grad)?.reshape(((), to))?; // (rows,C)
        let dh = dy.matmul(&down.detach())?; // (rows,I)
        let [dz, h] = gate_gradient(z, &dh)?;
        drop(dh);
        let ddown = || dy.t()?.matmul(&h); // (C,I)
        let ddown = down.track_op().then(ddown).transpose()?;
        drop(h);
        let dgate_up = || dz.t()?.matmul(normed.as_ref().unwrap_or(&flat)); // (2I,C)
        let dgate_up = weights.track_op().then(dgate_up).transpose()?;
        let (dx, dweights) = match self.norm {
            Some(epsilon) => {
                let asked = [x.track_op(), weights.track_op()];
                let [dx, dfactors] = match asked.contains(&true) {
                    true => {
                        let tensors = [&flat, &all.get(2 * inner)?, &dz.matmul(&gate_up)?];
                        norm::gradients(tensors, Some(&dy), asked, epsilon)?
                    }
                    false => [None, None],
                };
                let dweights = match (dgate_up, dfactors) {
                    (Some(one), Some(other)) => Some(Tensor::cat(&[one, other.unsqueeze(0)?], 0)?),
                    _ => None,
                };
                (dx, dweights)
            }
            None => {
                let dx = || dz.matmul(&gate_up);
                (x.track_op().then(dx).transpose()?, dgate_up)
            }
        };
        let dx = dx.map(|dx| dx.reshape(x.shape())).transpose()?;
        Ok((dx, dweights, ddown))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drawn::difference;
    use candle_core::Var;

    const CPU: Device = Device::Cpu;

    fn random(shape: impl Into<Shape>) -> Result<Tensor> {
        crate::drawn::normal(1., shape)
    }

    fn part_of(weights: [&Tensor; 3]) -> FeedForward {
        let [gate_proj, up_proj, down_proj] = weights.map(|w| Projection::of(w.clone()));
        FeedForward {
            gate_proj,
            up_proj,
            down_proj,
        }
    }

    fn by_tensors([x, gate, up, down]: [&Tensor; 4]) -> Result<Tensor> {
        let gated = x.broadcast_matmul(&gate.t()?)?.silu()?;
        (gated * x.broadcast_matmul(&up.t()?)?)?.broadcast_matmul(&down.t()?)
    }

    /// Result and gradients for an upstream gradient that differs from place to place.
    fn with_gradients(
        operands: [&Tensor; 4],
        mut part: impl FnMut([&Tensor; 4]) -> Result<Tensor>,
    ) -> Result<Vec<Tensor>> {
        let vars: Vec<Var> = operands
            .into_iter()
            .map(Var::from_tensor)
            .collect::<Result<_>>()?;
        let y = part([&vars[0], &vars[1], &vars[2], &vars[3]])?;
        let upstream = Tensor::arange(0u32, y.elem_count() as u32, &CPU)?.to_dtype(DType::F64)?;
        let upstream = ((upstream * 0.7)?.sin()? + 0.3)?.reshape(y.shape())?;
        let gradients = (&y * upstream.to_dtype(y.dtype())?)?
            .sum_all()?
            .backward()?;
        let mut found = vec![y.detach()];
        for var in &vars {
            match gradients.get(var) {
                Some(gradient) => found.push(gradient.detach()),
                None => bail!("no gradient"),
            }
        }
        Ok(found)
    }

    fn operands(shape: &[usize], inner: usize) -> Result<[Tensor; 4]> {
        let c = shape[shape.len() - 1];
        let scaled = |x: Tensor| x * 0.3;
        Ok([
            random(shape.to_vec())?,
            random((inner, c))?,
            random((inner, c))?,
            scaled(random((c, inner))?)?,
        ])
    }

    #[test]
    fn part_and_its_gradients_equal_those_by_tensors() -> Result<()> {
        // One of everything, odd sizes, fewer rows than columns, more than one task.
        for (shape, inner) in [
            (vec![1, 1, 1], 1),
            (vec![1, 1, 8], 5),
            (vec![2, 3, 7], 9),
            (vec![2, 3, 5], 7),
            (vec![9, 4], 6),
            (vec![2, 90, 8], 301),
        ] {
            let operands = operands(&shape, inner)?;
            let found = with_gradients(operands.each_ref(), |[x, gate, up, down]| {
                part_of([gate, up, down]).forward(x)
            })?;
            let expected = with_gradients(operands.each_ref(), by_tensors)?;
            for (found, expected) in found.iter().zip(&expected) {
                let scale = expected.abs()?.max_all()?.to_scalar::<f64>()?;
                let off = difference(found, expected)?;
                assert!(
                    off < 1e-13 * (1. + scale),
                    "{shape:?}: {off:e} of {scale:e}"
                );
            }
        }
        Ok(())
    }

    const EPSILON: f64 = 1e-3;

    /// Result and gradients of x + y(norm(x)), of x, the norm's weight, gate, up and down.
    fn onto_with_gradients(
        [x, factors, gate, up, down]: &[Tensor; 5],
        part: impl Fn([&Tensor; 5]) -> Result<Tensor>,
    ) -> Result<Vec<Tensor>> {
        let factors = Var::from_tensor(factors)?;
        let mut result = None;
        let mut found = with_gradients([x, gate, up, down], |[x, gate, up, down]| {
            let y = part([x, &factors, gate, up, down])?;
            result = Some(y.clone());
            Ok(y)
        })?;
        let Some(y) = result else { bail!("no result") };
        let places: Vec<f64> = (0..y.elem_count()).map(crate::drawn::upstream).collect();
        let places = Tensor::from_vec(places, y.shape(), &CPU)?.to_dtype(y.dtype())?;
        match (y * places)?.sum_all()?.backward()?.get(&factors) {
            Some(gradient) => found.push(gradient.detach()),
            None => bail!("no gradient"),
        }
        Ok(found)
    }

    fn onto_by_tensors([x, factors, gate, up, down]: [&Tensor; 5]) -> Result<Tensor> {
        let c = x.dims()[x.rank() - 1] as f64;
        let wide = match x.dtype() {
            DType::F64 => x.clone(),
            _ => x.to_dtype(DType::F32)?,
        };
        let rank = x.rank() - 1;
        let rms = ((wide.sqr()?.sum_keepdim(rank)? / c)? + EPSILON)?.sqrt()?;
        let normed = wide.broadcast_div(&rms)?.to_dtype(x.dtype())?;
        x + by_tensors([&normed.broadcast_mul(factors)?, gate, up, down])?
    }

    fn onto([x, factors, gate, up, down]: [&Tensor; 5]) -> Result<Tensor> {
        let norm = RmsNorm::new(factors.clone(), EPSILON);
        part_of([gate, up, down]).forward_onto(x, &norm)
    }

    #[test]
    fn part_added_to_the_stream_and_its_gradients_equal_those_by_tensors() -> Result<()> {
        for (shape, inner) in [
            (vec![1, 1, 1], 1),
            (vec![1, 1, 8], 5),
            (vec![2, 4, 7], 9),
            (vec![2, 3, 5], 7),
            (vec![9, 4], 6),
            (vec![2, 90, 8], 301),
            (vec![3, 2000, 6], 4),
        ] {
            let [x, gate, up, down] = operands(&shape, inner)?;
            let operands = [x, random(shape[shape.len() - 1])?, gate, up, down];
            let found = onto_with_gradients(&operands, onto)?;
            let expected = onto_with_gradients(&operands, onto_by_tensors)?;
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let scale = expected.abs()?.flatten_all()?.max(0)?.to_scalar::<f64>()?;
                let off = difference(found, expected)?;
                assert!(
                    off < 1e-12 * (1. + scale),
                    "{shape:?} {i}: {off:e} of {scale:e}"
                );
            }
        }
        Ok(())
    }

    #[test]
    fn part_added_in_lower_precision_errs_at_most_twice_as_much_as_by_tensors() -> Result<()> {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let [x, gate, up, down] = operands(&[3, 20, 24], 40)?;
            let mut cast = [x, random(24)?, gate, up, down];
            for x in &mut cast {
                *x = x.to_dtype(dtype)?;
            }
            let mut wide = cast.clone();
            for x in &mut wide {
                *x = x.to_dtype(DType::F64)?;
            }
            let exact = onto_with_gradients(&wide, onto_by_tensors)?;
            let plain = onto_with_gradients(&cast, onto_by_tensors)?;
            let found = onto_with_gradients(&cast, onto)?;
            for (i, exact) in exact.iter().enumerate() {
                let error = difference(&found[i], exact)?;
                let allowed = 2. * difference(&plain[i], exact)?;
                assert!(error <= allowed, "{dtype:?} {i}: {error:e} of {allowed:e}");
            }
        }
        Ok(())
    }

    #[test]
    fn part_of_frozen_weights_passes_the_streams_gradient_on() -> Result<()> {
        let [x, gate, up, down] = operands(&[2, 9, 8], 5)?;
        let factors = random(8)?;
        let gradient = |part: fn([&Tensor; 5]) -> Result<Tensor>| -> Result<Tensor> {
            let x = Var::from_tensor(&x)?;
            let y = part([&x, &factors, &gate, &up, &down])?;
            match y.sqr()?.sum_all()?.backward()?.get(&x) {
                Some(gradient) => Ok(gradient.clone()),
                None => bail!("no gradient"),
            }
        };
        let off = difference(&gradient(onto)?, &gradient(onto_by_tensors)?)?;
        assert!(off < 1e-11, "{off:e}");
        // And without any gradient.
        let plain = onto([&x, &factors, &gate, &up, &down])?;
        assert!(!plain.track_op());
        let expected = onto_by_tensors([&x, &factors, &gate, &up, &down])?;
        assert!(difference(&plain, &expected)? < 1e-12);
        Ok(())
    }

    #[test]
    fn part_of_what_does_not_fit_the_stream_is_refused() -> Result<()> {
        let [x, gate, up, down] = operands(&[2, 9, 8], 5)?;
        let refused = |x: &Tensor, factors: &Tensor, down: &Tensor, part: &str| {
            let x = Var::from_tensor(x)?;
            match onto([&x, factors, &gate, &up, down]) {
                Ok(y) => bail!("{y:?} for {part}"),
                Err(error) => assert!(error.to_string().contains(part), "{error}"),
            }
            Ok(())
        };
        onto([&x, &random(8)?, &gate, &up, &down])?;
        refused(&x, &random(7)?, &down, "[2, 9, 8] and [7]")?;
        refused(&x, &random(8)?.to_dtype(DType::F32)?, &down, "F32")?;
        refused(&x, &random(8)?, &random((7, 5))?, "[7, 5]")?;
        let narrow = random((2, 9, 7))?;
        refused(&narrow, &random(7)?, &down, "[2, 9, 7]")
    }

    #[test]
    fn norm_trained_alone_leaves_no_gradients_of_frozen_weights() -> Result<()> {
        let [x, gate, up, down] = operands(&[2, 9, 8], 5)?;
        let (x, factors) = (Var::from_tensor(&x)?, Var::from_tensor(&random(8)?)?);
        let gradients = |part: fn([&Tensor; 5]) -> Result<Tensor>| {
            part([&x, &factors, &gate, &up, &down])?
                .sqr()?
                .sum_all()?
                .backward()
        };
        let (found, expected) = (gradients(onto)?, gradients(onto_by_tensors)?);
        for var in [&x, &factors] {
            match (found.get(var), expected.get(var)) {
                (Some(found), Some(expected)) => assert!(difference(found, expected)? < 1e-11),
                _ => bail!("no gradient"),
            }
        }
        for weight in [&gate, &up, &down] {
            assert!(found.get(weight).is_none(), "{:?}", weight.dims());
        }
        Ok(())
    }

    #[test]
    fn part_gives_the_same_with_and_without_gradients() -> Result<()> {
        let dtypes = [DType::F64, DType::F32, DType::BF16];
        for (dtype, rows) in dtypes
            .into_iter()
            .flat_map(|dtype| [(dtype, 1), (dtype, 5)])
        {
            let all = operands(&[2, rows, 8], 16)?;
            let mut cast = Vec::new();
            for x in &all {
                cast.push(x.to_dtype(dtype)?);
            }
            let plain = part_of([&cast[1], &cast[2], &cast[3]]).forward(&cast[0])?;
            let tracked = Var::from_tensor(&cast[0])?;
            let tracked = part_of([&cast[1], &cast[2], &cast[3]]).forward(&tracked)?;
            assert!(!plain.track_op() && tracked.track_op());
            let bar = match dtype {
                DType::F64 => 1e-14,
                DType::F32 => 1e-5,
                _ => 1e-1,
            };
            // In parts of the largest number: products of sixteen terms may be of any size.
            let scale = plain.abs()?.max_all()?.to_dtype(DType::F64)?;
            let off = difference(&plain, &tracked)? / scale.to_scalar::<f64>()?;
            assert!(off < bar, "{dtype:?} {rows}: {off:e}");
        }
        Ok(())
    }

    #[test]
    fn weights_are_joined_from_as_many_rows_on_as_there_are_columns() -> Result<()> {
        let gate = random((3, 6))?;
        for (shape, expected) in [
            (vec![1, 1, 6], false),
            (vec![1, 5, 6], false),
            (vec![2, 3, 6], true),
            (vec![7, 6], true),
        ] {
            assert_eq!(
                is_worth_joining(&random(shape.clone())?, &gate),
                expected,
                "{shape:?}"
            );
        }
        Ok(())
    }

    #[test]
    fn part_in_lower_precision_errs_at_most_twice_as_much_as_by_tensors() -> Result<()> {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let all = operands(&[3, 20, 24], 40)?;
            let mut cast = Vec::new();
            for x in &all {
                cast.push(x.to_dtype(dtype)?);
            }
            let wide: Vec<Tensor> = cast
                .iter()
                .map(|x| x.to_dtype(DType::F64))
                .collect::<Result<_>>()?;
            let each = |x: &[Tensor]| [x[0].clone(), x[1].clone(), x[2].clone(), x[3].clone()];
            let (cast, wide) = (each(&cast), each(&wide));
            let exact = with_gradients(wide.each_ref(), by_tensors)?;
            let plain = with_gradients(cast.each_ref(), by_tensors)?;
            let found = with_gradients(cast.each_ref(), |[x, gate, up, down]| {
                part_of([gate, up, down]).forward(x)
            })?;
            for (i, name) in ["y", "dx", "gate", "up", "down"].into_iter().enumerate() {
                let error = difference(&found[i], &exact[i])?;
                let allowed = 2. * difference(&plain[i], &exact[i])?;
                assert!(
                    error <= allowed,
                    "{dtype:?} {name}: {error:e} of {allowed:e}"
                );
            }
        }
        Ok(())
    }

    #[test]
    fn part_with_constant_weights_gives_the_gradient_of_its_input_alone() -> Result<()> {
        let all = operands(&[2, 3, 5], 7)?;
        let expected = with_gradients(all.each_ref(), by_tensors)?;
        let var = Var::from_tensor(&all[0])?;
        let y = part_of([&all[1], &all[2], &all[3]]).forward(&(var.as_tensor() * 1.)?)?;
        let upstream = Tensor::arange(0u32, 30, &CPU)?.to_dtype(DType::F64)?;
        let upstream = ((upstream * 0.7)?.sin()? + 0.3)?.reshape((2, 3, 5))?;
        let gradients = (y * upstream)?.sum_all()?.backward()?;
        match gradients.get(&var) {
            Some(found) => assert!(difference(found, &expected[1])? < 1e-12),
            None => bail!("no gradient"),
        }
        Ok(())
    }
}
