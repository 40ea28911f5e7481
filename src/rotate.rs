//! Rotation of heads by per-token angles, differentiable in the head and in the table: [`rotate`].
//!
//! A pair (a, b) of coordinates is the complex number z = a + ib, an entry of the table is w = cos + i·sin, and
//! the pair becomes z·w. With w = e^{iθ} this is RoPE (Su et al., arXiv 2104.09864v5, eq. 34); nothing here needs
//! |w| = 1, so the same operation serves RoPE's temperatures and TAPE's states.
//!
//! With g the gradient of the result, the gradient of z is g·w̄ (for |w| = 1 the rotation by the opposite angle)
//! and that of w is Σ g·z̄ over the heads and batch rows that shared the entry.

#[cfg(feature = "cuda")]
mod cuda;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod launch;

use crate::gpu::has_kernels;
#[cfg(feature = "cuda")]
use crate::gpu::{dispatch, on_gpu, GpuElement, Placed};
use crate::host::{on_host, Element, View};
use candle_core::backend::BackendStorage;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{bail, CpuStorage, CustomOp3, DType, Result, Shape, Tensor, WithDType, D};
use half::{bf16, f16};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// Cosines and sines of the angles (real and imaginary parts of the state, for TAPE) by which pairs turn.
///
/// # Shapes
/// Both (1 or B, 1 or G, T, R/2), R the number of coordinates that turn; f32, or f64 when what they rotate is f64.
#[derive(Debug, Clone)]
pub struct Rotation {
    /// Cosines, or real parts.
    pub cos: Tensor,
    /// Sines, or imaginary parts.
    pub sin: Tensor,
}

/// Which coordinates form pair j of R rotated ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// j and j + R/2: LLaMA as Hugging Face stores it, GPT-NeoX.
    #[default]
    Half,
    /// 2j and 2j + 1: the original LLaMA, GPT-J, Cohere.
    Interleaved,
}

/// Turns the first R coordinates of every head of `x`; the rest pass through bit for bit.
///
/// Head h of `x` uses head h / (H/G) of the table. Differentiable in `x`, `rotation.cos` and `rotation.sin`.
/// bf16 and f16 are rotated in f32 and rounded once. On the CPU and on NVIDIA GPUs (feature `cuda`) it is one operation,
/// with one more for all gradients; elsewhere it is made of tensor operations.
///
/// # Shapes
/// x (B, H, T, D), the table (1 or B, 1 or G, T, R/2) with R ≤ D and G dividing H → (B, H, T, D), contiguous.
/// Any strides.
///
/// # Errors
/// When shapes or devices do not fit, or the table is not f32 (f64 for an x of f64); the message names them.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_posenc::{rotate, Layout, Rotation};
/// # fn main() -> candle_core::Result<()> {
/// let angles = Tensor::new(&[[0f32, 0.], [1., 0.1]], &Device::Cpu)?.reshape((1, 1, 2, 2))?;
/// let rotation = Rotation { cos: angles.cos()?, sin: angles.sin()? };
/// let x = Tensor::randn(0f32, 1., (3, 8, 2, 6), &Device::Cpu)?;
/// let turned = rotate(&x, &rotation, Layout::Half)?;
/// assert_eq!(turned.dims(), x.dims());
/// # Ok(())
/// # }
/// ```
pub fn rotate(x: &Tensor, rotation: &Rotation, layout: Layout) -> Result<Tensor> {
    check(x, rotation)?;
    let Rotation { cos, sin } = rotation;
    if !has_kernels(x.device()) {
        return rotate_by_tensors(x, rotation, layout);
    }
    let op = Turn { layout };
    if [x, cos, sin].iter().any(|t| t.track_op()) {
        x.apply_op3(cos, sin, op)
    } else {
        x.apply_op3_no_bwd(cos, sin, &op)
    }
}

/// Reorders the output rows of a query or key projection from one layout to the other, so that rotating in `to`
/// gives the scores that the original weights gave when rotating in `from`.
///
/// # Shapes
/// `weight` (heads·head_dim, C) or a bias (heads·head_dim,) → the same. Of each head the first `rotary_dim` rows
/// move.
///
/// # Errors
/// When the sizes do not fit.
pub fn convert_layout(
    weight: &Tensor,
    heads: usize,
    head_dim: usize,
    rotary_dim: usize,
    from: Layout,
    to: Layout,
) -> Result<Tensor> {
    let shape = weight.dims();
    let rows = heads.checked_mul(head_dim);
    if !matches!(shape.len(), 1 | 2) || shape.first().copied() != rows {
        bail!("convert_layout: weight must be ({heads}·{head_dim}, C) or ({heads}·{head_dim}), got {shape:?}")
    }
    if rotary_dim > head_dim || !rotary_dim.is_multiple_of(2) {
        bail!(
            "convert_layout: rotary_dim {rotary_dim} must be even and at most head_dim {head_dim}"
        )
    }
    let pairs = rotary_dim / 2;
    let source = |row: usize| match (from, to) {
        _ if row >= rotary_dim => row,
        (Layout::Interleaved, Layout::Half) => 2 * (row % pairs) + row / pairs,
        (Layout::Half, Layout::Interleaved) => row / 2 + pairs * (row % 2),
        _ => row,
    };
    let rows: Vec<u32> = (0..heads)
        .flat_map(|h| (0..head_dim).map(move |row| (h * head_dim + source(row)) as u32))
        .collect();
    weight.index_select(&Tensor::new(rows, weight.device())?, 0)
}

fn check(x: &Tensor, rotation: &Rotation) -> Result<()> {
    let Rotation { cos, sin } = rotation;
    let shapes = format!(
        "x {:?}, cos {:?}, sin {:?}",
        x.dims(),
        cos.dims(),
        sin.dims()
    );
    let (&[b, h, t, d], &[rows, g, steps, pairs]) = (x.dims(), cos.dims()) else {
        bail!("rotate: x must be (B, H, T, D) and the table (1 or B, 1 or G, T, R/2); {shapes}")
    };
    if sin.dims() != cos.dims() {
        bail!("rotate: cos and sin must have one shape; {shapes}")
    }
    if rows != 1 && rows != b {
        bail!("rotate: the table has {rows} rows for a batch of {b}; {shapes}")
    }
    if g == 0 || !h.is_multiple_of(g) {
        bail!("rotate: the table has {g} heads, which must divide x's {h}; {shapes}")
    }
    if steps != t {
        bail!("rotate: the table has {steps} tokens, x has {t}; {shapes}")
    }
    if pairs == 0 || 2 * pairs > d {
        bail!("rotate: the table turns {pairs} pairs of {d} coordinates; {shapes}")
    }
    let table = match x.dtype() {
        DType::F64 => DType::F64,
        DType::F32 | DType::BF16 | DType::F16 => DType::F32,
        other => bail!("rotate: dtype {other:?} is not supported (f32, f64, bf16, f16 are)"),
    };
    if cos.dtype() != table || sin.dtype() != table {
        bail!(
            "rotate: x of {:?} needs a table of {table:?}, got cos of {:?} and sin of {:?}",
            x.dtype(),
            cos.dtype(),
            sin.dtype()
        )
    }
    if !x.device().same_device(cos.device()) || !x.device().same_device(sin.device()) {
        bail!(
            "rotate: x, cos and sin must be on one device, got {:?}, {:?} and {:?}",
            x.device().location(),
            cos.device().location(),
            sin.device().location()
        )
    }
    Ok(())
}

/// [`rotate`] in tensor operations, on any device; the reference for values and gradients.
fn rotate_by_tensors(x: &Tensor, rotation: &Rotation, layout: Layout) -> Result<Tensor> {
    let (b, h, t, d) = x.dims4()?;
    let (rows, g, _, pairs) = rotation.cos.dims4()?;
    let turning = x
        .narrow(D::Minus1, 0, 2 * pairs)?
        .to_dtype(rotation.cos.dtype())?;
    let (re, im) = match layout {
        Layout::Half => (
            turning.narrow(D::Minus1, 0, pairs)?,
            turning.narrow(D::Minus1, pairs, pairs)?,
        ),
        Layout::Interleaved => {
            let split = turning.reshape((b, h, t, pairs, 2))?;
            (
                split.narrow(D::Minus1, 0, 1)?,
                split.narrow(D::Minus1, 1, 1)?,
            )
        }
    };
    // (B, G, H/G, T, R/2) against (1 or B, G, 1, T, R/2)
    let grouped = |z: &Tensor| z.reshape((b, g, h / g, t, pairs));
    let (re, im) = (grouped(&re)?, grouped(&im)?);
    let cos = rotation.cos.reshape((rows, g, 1, t, pairs))?;
    let sin = rotation.sin.reshape((rows, g, 1, t, pairs))?;
    let turned_re = (re.broadcast_mul(&cos)? - im.broadcast_mul(&sin)?)?;
    let turned_im = (re.broadcast_mul(&sin)? + im.broadcast_mul(&cos)?)?;
    let turned = match layout {
        Layout::Half => Tensor::cat(&[turned_re, turned_im], D::Minus1)?,
        Layout::Interleaved => Tensor::stack(&[turned_re, turned_im], D::Minus1)?,
    };
    let turned = turned.reshape((b, h, t, 2 * pairs))?.to_dtype(x.dtype())?;
    if 2 * pairs == d {
        return Ok(turned);
    }
    Tensor::cat(
        &[turned, x.narrow(D::Minus1, 2 * pairs, d - 2 * pairs)?],
        D::Minus1,
    )
}

/// [`rotate`] as one candle operation over (x, cos, sin).
struct Turn {
    layout: Layout,
}

impl Turn {
    fn forward<T: Element>(
        &self,
        [x, cos, sin]: [(&CpuStorage, &candle_core::Layout); 3],
    ) -> Result<CpuStorage> {
        Ok(T::to_cpu_storage_owned(turn::<T, false>(
            self.layout,
            View::new(x.0.as_slice()?, x.1)?,
            View::new(cos.0.as_slice()?, cos.1)?,
            View::new(sin.0.as_slice()?, sin.1)?,
        )))
    }

    fn backward<T: Element>(
        &self,
        [x, cos, sin, grad]: [&Tensor; 4],
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let grad_host = on_host(grad);
        let grad = grad_host.view::<T>()?;
        let dx = if x.track_op() {
            let (cos_host, sin_host) = (on_host(cos), on_host(sin));
            let (cos, sin) = (cos_host.view()?, sin_host.view()?);
            let dx = turn::<T, true>(self.layout, grad, cos, sin);
            Some(Tensor::from_vec(dx, x.shape(), x.device())?)
        } else {
            None
        };
        if !cos.track_op() && !sin.track_op() {
            return Ok((dx, None, None));
        }
        let (dcos, dsin) = table_gradient::<T>(
            self.layout,
            on_host(x).view()?,
            grad,
            cos.shape().dims4()?.into(),
        );
        let gradient = |values: Vec<T::Acc>, table: &Tensor| -> Result<Option<Tensor>> {
            if table.track_op() {
                Tensor::from_vec(values, table.shape(), table.device()).map(Some)
            } else {
                Ok(None)
            }
        };
        Ok((dx, gradient(dcos, cos)?, gradient(dsin, sin)?))
    }

    #[cfg(feature = "cuda")]
    fn backward_on_gpu<T: GpuElement>(
        &self,
        [x, cos, sin, grad]: [&Tensor; 4],
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)>
    where
        T::Acc: GpuElement,
    {
        let asked = [x, cos, sin].map(|x| x.track_op());
        let [x, cos, sin, grad] = [x, cos, sin, grad].map(on_gpu);
        let (cos, sin, grad) = (cos.placed()?, sin.placed()?, grad.placed()?);
        let [dx, dcos, dsin] = match asked {
            [false, false, false] => [None, None, None],
            [true, false, false] => {
                let dx = cuda::turn::<T>(self.layout, true, [grad, cos, sin])?;
                [Some(dx.into_tensor()), None, None]
            }
            _ => cuda::gradients::<T>(self.layout, [x.placed()?, cos, sin, grad], asked)?,
        };
        Ok((dx, dcos, dsin))
    }
}

impl CustomOp3 for Turn {
    fn name(&self) -> &'static str {
        "rotate"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &candle_core::Layout,
        cos: &CpuStorage,
        cos_layout: &candle_core::Layout,
        sin: &CpuStorage,
        sin_layout: &candle_core::Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let operands = [(x, x_layout), (cos, cos_layout), (sin, sin_layout)];
        let out = match x.dtype() {
            DType::F32 => self.forward::<f32>(operands)?,
            DType::F64 => self.forward::<f64>(operands)?,
            DType::BF16 => self.forward::<bf16>(operands)?,
            DType::F16 => self.forward::<f16>(operands)?,
            other => bail!("rotate: dtype {other:?} is not supported (f32, f64, bf16, f16 are)"),
        };
        Ok((out, x_layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &candle_core::Layout,
        cos: &CudaStorage,
        cos_layout: &candle_core::Layout,
        sin: &CudaStorage,
        sin_layout: &candle_core::Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let operands = [(x, x_layout), (cos, cos_layout), (sin, sin_layout)].map(Placed::new);
        dispatch!(x.dtype(), "rotate", T => Ok(cuda::turn::<T>(self.layout, false, operands)?.into_storage()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        cos: &Tensor,
        sin: &Tensor,
        _out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let tensors = [x, cos, sin, grad];
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            return dispatch!(x.dtype(), "rotate", T => self.backward_on_gpu::<T>(tensors));
        }
        match x.dtype() {
            DType::F32 => self.backward::<f32>(tensors),
            DType::F64 => self.backward::<f64>(tensors),
            DType::BF16 => self.backward::<bf16>(tensors),
            DType::F16 => self.backward::<f16>(tensors),
            other => bail!("rotate: no gradient for dtype {other:?}"),
        }
    }
}

/// Elements that one task of the thread pool handles; smaller tensors stay on the calling thread.
const TASK: usize = 1 << 14;

/// The rows of a view, along its last dimension.
#[derive(Clone, Copy)]
struct Rows<'a, T>(View<'a, T>);

impl<'a, T: Copy> Rows<'a, T> {
    /// A row as a slice, through `scratch` where its elements are not neighbours.
    #[inline(always)]
    fn get<'r>(&self, [b, h, t]: [usize; 3], scratch: &'r mut Vec<T>) -> &'r [T]
    where
        'a: 'r,
    {
        let View {
            data,
            dims,
            strides,
        } = self.0;
        let start = b * strides[0] + h * strides[1] + t * strides[2];
        let (width, step) = (dims[3], strides[3]);
        if step == 1 {
            return &data[start..start + width];
        }
        scratch.clear();
        scratch.extend((0..width).map(|i| data[start + i * step]));
        scratch
    }
}

/// z·w for every pair, or z·w̄.
fn turn<T: Element, const CONJUGATE: bool>(
    layout: Layout,
    x: View<'_, T>,
    cos: View<'_, T::Acc>,
    sin: View<'_, T::Acc>,
) -> Vec<T> {
    let [b, h, t, d] = x.dims;
    let [table_rows, table_heads, _, pairs] = cos.dims;
    let group = h / table_heads;
    let (x, cos, sin) = (Rows(x), Rows(cos), Rows(sin));
    let mut out = vec![T::zero(); b * h * t * d];
    let rows_per_task = (TASK / d).max(1);
    let task = |(task, out): (usize, &mut [T])| {
        let (mut x_scratch, mut cos_scratch, mut sin_scratch) = (vec![], vec![], vec![]);
        for (row, out) in out.chunks_exact_mut(d).enumerate() {
            let row = task * rows_per_task + row;
            let at = [row / (h * t), row / t % h, row % t];
            let in_table = [at[0] % table_rows, at[1] / group, at[2]];
            let x = x.get(at, &mut x_scratch);
            let cos = cos.get(in_table, &mut cos_scratch);
            let sin = sin.get(in_table, &mut sin_scratch);
            let (turning, rest) = x.split_at(2 * pairs);
            let (out_turning, out_rest) = out.split_at_mut(2 * pairs);
            out_rest.copy_from_slice(rest);
            match layout {
                Layout::Half => {
                    let (re, im) = turning.split_at(pairs);
                    let (out_re, out_im) = out_turning.split_at_mut(pairs);
                    let out = out_re.iter_mut().zip(out_im);
                    let table = cos.iter().zip(sin);
                    for ((out, z), w) in out.zip(re.iter().zip(im)).zip(table) {
                        (*out.0, *out.1) = turn_pair::<T, CONJUGATE>((*z.0, *z.1), (*w.0, *w.1));
                    }
                }
                Layout::Interleaved => {
                    let out = out_turning.chunks_exact_mut(2);
                    let table = cos.iter().zip(sin);
                    for ((out, z), w) in out.zip(turning.chunks_exact(2)).zip(table) {
                        (out[0], out[1]) = turn_pair::<T, CONJUGATE>((z[0], z[1]), (*w.0, *w.1));
                    }
                }
            }
        }
    };
    if out.len() <= 2 * TASK {
        out.chunks_mut(rows_per_task * d).enumerate().for_each(task);
    } else {
        out.par_chunks_mut(rows_per_task * d)
            .enumerate()
            .for_each(task);
    }
    out
}

#[inline(always)]
fn turn_pair<T: Element, const CONJUGATE: bool>(
    (re, im): (T, T),
    (cos, sin): (T::Acc, T::Acc),
) -> (T, T) {
    let (re, im) = (re.to_acc(), im.to_acc());
    let (re, im) = if CONJUGATE {
        (re * cos + im * sin, im * cos - re * sin)
    } else {
        (re * cos - im * sin, re * sin + im * cos)
    };
    (T::from_acc(re), T::from_acc(im))
}

/// Gradients of neighbouring rows of cos and sin.
type CosSin<'a, A> = (&'a mut [A], &'a mut [A]);

/// Σ g·z̄ over the heads and batch rows that share a table entry, in one fixed order.
fn table_gradient<T: Element>(
    layout: Layout,
    x: View<'_, T>,
    grad: View<'_, T>,
    [table_rows, table_heads, t, pairs]: [usize; 4],
) -> (Vec<T::Acc>, Vec<T::Acc>) {
    let [b, h, _, d] = x.dims;
    let group = h / table_heads;
    let (x, grad) = (Rows(x), Rows(grad));
    let len = table_rows * table_heads * t * pairs;
    let zero = <T::Acc as WithDType>::from_f64(0.);
    let (mut dcos, mut dsin) = (vec![zero; len], vec![zero; len]);
    let summed = group * (b / table_rows.max(1));
    let rows_per_task = (TASK / (d * summed.max(1))).max(1);
    let task = |(task, (dcos, dsin)): (usize, CosSin<'_, T::Acc>)| {
        let (mut x_scratch, mut grad_scratch) = (vec![], vec![]);
        let rows = dcos
            .chunks_exact_mut(pairs)
            .zip(dsin.chunks_exact_mut(pairs));
        for (row, (dcos, dsin)) in rows.enumerate() {
            let row = task * rows_per_task + row;
            let (table_row, table_head) = (row / (table_heads * t), row / t % table_heads);
            let t = row % t;
            for b in (table_row..b).step_by(table_rows) {
                for h in table_head * group..(table_head + 1) * group {
                    let x = x.get([b, h, t], &mut x_scratch);
                    let grad = grad.get([b, h, t], &mut grad_scratch);
                    add_products(layout, &x[..2 * pairs], &grad[..2 * pairs], dcos, dsin);
                }
            }
        }
    };
    let chunk = rows_per_task * pairs;
    if b * h * t * d <= 2 * TASK {
        let chunks = dcos.chunks_mut(chunk).zip(dsin.chunks_mut(chunk));
        chunks.enumerate().for_each(task);
    } else {
        dcos.par_chunks_mut(chunk)
            .zip(dsin.par_chunks_mut(chunk))
            .enumerate()
            .for_each(task);
    }
    (dcos, dsin)
}

/// Adds g·z̄ of one row.
#[inline(always)]
fn add_products<T: Element>(
    layout: Layout,
    x: &[T],
    grad: &[T],
    dcos: &mut [T::Acc],
    dsin: &mut [T::Acc],
) {
    let add = |w: (&mut T::Acc, &mut T::Acc), z: (T, T), g: (T, T)| {
        let (z, g) = ((z.0.to_acc(), z.1.to_acc()), (g.0.to_acc(), g.1.to_acc()));
        *w.0 += g.0 * z.0 + g.1 * z.1;
        *w.1 += g.1 * z.0 - g.0 * z.1;
    };
    let table = dcos.iter_mut().zip(dsin);
    match layout {
        Layout::Half => {
            let (x_re, x_im) = x.split_at(x.len() / 2);
            let (g_re, g_im) = grad.split_at(grad.len() / 2);
            let (x, g) = (x_re.iter().zip(x_im), g_re.iter().zip(g_im));
            for ((w, z), g) in table.zip(x).zip(g) {
                add(w, (*z.0, *z.1), (*g.0, *g.1));
            }
        }
        Layout::Interleaved => {
            let (x, g) = (x.chunks_exact(2), grad.chunks_exact(2));
            for ((w, z), g) in table.zip(x).zip(g) {
                add(w, (z[0], z[1]), (g[0], g[1]));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};

    const LAYOUTS: [Layout; 2] = [Layout::Half, Layout::Interleaved];
    /// Table rows, table heads and pairs for an x of (2, 6, 5, 8).
    const TABLES: [(usize, usize, usize); 5] =
        [(1, 1, 4), (2, 1, 3), (1, 3, 4), (2, 6, 1), (2, 2, 2)];

    fn normal(shape: &[usize], dtype: DType) -> Tensor {
        Tensor::randn(0f64, 1., shape, &Device::Cpu)
            .and_then(|x| x.to_dtype(dtype))
            .unwrap()
    }

    fn bits(x: &Tensor) -> Vec<u64> {
        let x = x.to_dtype(DType::F64).and_then(|x| x.flatten_all());
        let values = x.unwrap().to_vec1::<f64>().unwrap();
        values.into_iter().map(f64::to_bits).collect()
    }

    fn max_difference(a: &Tensor, b: &Tensor) -> f64 {
        assert_eq!((a.dims(), a.dtype()), (b.dims(), b.dtype()));
        let read = |t: &Tensor| {
            let t = t.to_dtype(DType::F64).and_then(|t| t.flatten_all());
            t.unwrap().to_vec1::<f64>().unwrap()
        };
        let differences = read(a).into_iter().zip(read(b)).map(|(a, b)| (a - b).abs());
        differences.fold(0., |most, d| if d > most || d.is_nan() { d } else { most })
    }

    #[test]
    fn rotate_any_table_equals_tensor_operations_in_value_and_gradient() {
        for (dtype, table_dtype, tolerance) in [
            (DType::F64, DType::F64, 1e-13),
            (DType::F32, DType::F32, 1e-5),
            (DType::BF16, DType::F32, 0.06),
            (DType::F16, DType::F32, 8e-3),
        ] {
            for layout in LAYOUTS {
                for (rows, g, pairs) in TABLES {
                    let x = Var::from_tensor(&normal(&[2, 6, 5, 8], dtype)).unwrap();
                    let table = || Var::from_tensor(&normal(&[rows, g, 5, pairs], table_dtype));
                    let (cos, sin) = (table().unwrap(), table().unwrap());
                    let rotation = Rotation {
                        cos: cos.as_tensor().clone(),
                        sin: sin.as_tensor().clone(),
                    };
                    let weight = normal(&[2, 6, 5, 8], dtype);
                    let run = |f: fn(&Tensor, &Rotation, Layout) -> Result<Tensor>| {
                        let out = f(&x, &rotation, layout).unwrap();
                        let grads = (&out * &weight).unwrap().sum_all().unwrap().backward();
                        (out, grads.unwrap())
                    };
                    let (out, grads) = run(rotate);
                    let (reference, reference_grads) = run(rotate_by_tensors);
                    assert_eq!(bits(&out), bits(&reference));
                    for var in [&x, &cos, &sin] {
                        let (a, b) = (grads.get(var), reference_grads.get(var));
                        let difference = max_difference(a.unwrap(), b.unwrap());
                        assert!(difference <= tolerance, "{dtype:?}: {difference}");
                    }
                }
            }
        }
    }

    #[test]
    fn rotate_strided_operands_equal_contiguous_bit_for_bit() {
        let tracked = |shape: &[usize]| {
            let var = Var::from_tensor(&normal(shape, DType::F32)).unwrap();
            var.as_tensor().clone()
        };
        // out of a fused projection; with swapped axes
        let fused = tracked(&[2, 5, 3 * 48]).narrow(2, 48, 48).unwrap();
        let fused = fused.reshape((2, 5, 6, 8)).unwrap().transpose(1, 2);
        let swapped = tracked(&[2, 6, 8, 5]).t();
        let cos = tracked(&[2, 3, 3, 5]).t().unwrap();
        let sin = tracked(&[1, 3, 5, 3]).broadcast_as((2, 3, 5, 3)).unwrap();
        let grads = [
            normal(&[], DType::F32).broadcast_as((2, 6, 5, 8)),
            normal(&[2, 5, 6, 8], DType::F32).transpose(1, 2),
            normal(&[2, 6, 8, 5], DType::F32).t(),
            normal(&[2, 6, 5, 9], DType::F32).narrow(3, 1, 8),
        ];
        for (x, layout) in [fused.unwrap(), swapped.unwrap()]
            .iter()
            .flat_map(|x| LAYOUTS.map(|layout| (x, layout)))
        {
            for grad in &grads {
                let grad = grad.as_ref().unwrap();
                let run = |[x, cos, sin, grad]: [&Tensor; 4]| {
                    let op = Turn { layout };
                    let out = x.apply_op3_no_bwd(cos, sin, &op).unwrap();
                    let (dx, dcos, dsin) = op.bwd(x, cos, sin, &out, grad).unwrap();
                    [Some(out), dx, dcos, dsin].map(|t| bits(&t.unwrap()))
                };
                let strided = [x, &cos, &sin, grad];
                let packed = strided.map(|t| t.contiguous().unwrap());
                assert_eq!(run(strided), run(packed.each_ref()));
            }
        }
    }
}
