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

use crate::host::{on_host, Element};
use crate::projection::{detached, Projection};
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
        let [gate, up, down] =
            [&self.gate_proj, &self.up_proj, &self.down_proj].map(Projection::weight);
        let tracked = [x, gate, up, down].iter().any(|x| x.track_op());
        if tracked && is_worth_joining(x, gate) && (x.device().is_cpu() || x.device().is_cuda()) {
            let joined = Tensor::cat(&[gate, up], 0)?;
            return joined_forward(x, &joined, down);
        }
        let gated = swiglu(&self.gate_proj.forward(x)?, &self.up_proj.forward(x)?)?;
        self.down_proj.forward(&gated)
    }
}

/// Whether x (…, C) has at least C rows. The weights of gate and up, 2I·C numbers, are then copied behind each other for
/// z, which is no smaller. With fewer rows, one above all, the copy would cost more than the products gain.
fn is_worth_joining(x: &Tensor, gate: &Tensor) -> bool {
    let width = gate.dims().last().copied().unwrap_or(0);
    x.elem_count() / width.max(1) >= width
}

fn joined_forward(x: &Tensor, gate_up: &Tensor, down: &Tensor) -> Result<Tensor> {
    let (twice, c) = gate_up.dims2()?;
    let (to, inner) = down.dims2()?;
    if x.dims().last() != Some(&c) || twice != 2 * inner || inner == 0 || c == 0 {
        bail!(
            "feed-forward: {:?} cannot be taken by weights {:?} and {:?}",
            x.dims(),
            (twice, c),
            (to, inner)
        )
    }
    let (x, gate_up, down) = (x.contiguous()?, gate_up.contiguous()?, down.contiguous()?);
    x.apply_op3(&gate_up, &down, Joined::default())
}

/// One call, over x, the weights of gate and up, and that of down, all contiguous. Each call needs an object of its own:
/// what it keeps belongs to it.
#[derive(Default)]
struct Joined {
    /// z (rows, 2I).
    kept: Arc<OnceLock<Tensor>>,
}

impl Joined {
    /// `gated` makes h (rows, I) of z; `keep` takes z.
    fn forward<S: BackendStorage>(
        &self,
        [(x, x_layout), (gate_up, gate_up_layout), (down, down_layout)]: [(&S, &Layout); 3],
        gated: impl Fn(&S, usize, usize) -> Result<S>,
        keep: impl Fn(S) -> Storage,
    ) -> Result<(S, Shape)> {
        let (to, inner) = down_layout.shape().dims2()?;
        let (twice, c) = gate_up_layout.shape().dims2()?;
        let rows = x_layout.shape().elem_count() / c;
        let flat = Layout::contiguous_with_offset((rows, c), x_layout.start_offset());
        let sizes = (1, rows, twice, c);
        let z = x.matmul(gate_up, sizes, &flat, &gate_up_layout.transpose(0, 1)?)?;
        let h = gated(&z, inner, rows)?;
        let h_layout = Layout::contiguous((rows, inner));
        let sizes = (1, rows, to, inner);
        let y = h.matmul(down, sizes, &h_layout, &down_layout.transpose(0, 1)?)?;
        let untracked = candle_core::op::BackpropOp::none();
        let z = Tensor::from_storage(keep(z), (rows, twice), untracked, false);
        if self.kept.set(z).is_err() {
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
        gate_up: &CpuStorage,
        gate_up_layout: &Layout,
        down: &CpuStorage,
        down_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let operands = [
            (x, x_layout),
            (gate_up, gate_up_layout),
            (down, down_layout),
        ];
        self.forward(operands, gated_on_host, Storage::Cpu)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        gate_up: &CudaStorage,
        gate_up_layout: &Layout,
        down: &CudaStorage,
        down_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let operands = [
            (x, x_layout),
            (gate_up, gate_up_layout),
            (down, down_layout),
        ];
        self.forward(operands, swiglu::cuda::forward_joined, Storage::Cuda)
    }

    fn bwd(
        &self,
        x: &Tensor,
        gate_up: &Tensor,
        down: &Tensor,
        _out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let Some(z) = self.kept.get() else {
            bail!("feed-forward: backward before forward")
        };
        let (to, _) = down.dims2()?;
        let (_, c) = gate_up.dims2()?;
        let dy = detached(grad)?.reshape(((), to))?; // (rows,C)
        let dh = dy.matmul(&down.detach())?; // (rows,I)
        let [dz, h] = gate_gradient(z, &dh)?;
        drop(dh);
        let ddown = || dy.t()?.matmul(&h); // (C,I)
        let ddown = down.track_op().then(ddown).transpose()?;
        drop(h);
        let dgate_up = || dz.t()?.matmul(&x.detach().reshape(((), c))?); // (2I,C)
        let dgate_up = gate_up.track_op().then(dgate_up).transpose()?;
        let dx = || dz.matmul(&gate_up.detach())?.reshape(x.shape());
        Ok((x.track_op().then(dx).transpose()?, dgate_up, ddown))
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
        part: impl Fn([&Tensor; 4]) -> Result<Tensor>,
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
