//! RMSNorm (Zhang & Sennrich, arXiv 1910.07467v1, equation 4), differentiable: [`rms_norm`].
//!
//! A row x of C numbers becomes y = n·w with n = x/rms and rms = √(Σx²/C + ε). With dy the gradient of the result and
//! g = dy·w,
//!
//! - dx = (g − n·Σ(g·n)/C)/rms,
//! - dw = Σ dy·n over all rows.
//!
//! Nothing but the inputs is kept for it: a row's rms is computed again where its gradient is.

mod call;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use crate::gpu::has_kernels;
use crate::host::{contiguous, on_host, Element};
use candle_core::backend::BackendStorage;
use candle_core::{
    bail, CpuStorage, CustomOp2, DType, Layout, Result, Shape, Tensor, WithDType, D,
};
use half::{bf16, f16};
use rayon::prelude::*;

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;

/// Brings each row of the last dimension to a root mean square of 1, and multiplies it by the weights.
///
/// Differentiable in `x` and `weight`. Sums, roots and products are in f32 (f64 for f64); x/rms is rounded to x's dtype
/// before it is multiplied, as `transformers` does. Backward each gradient is rounded once. Sums have a fixed order: on
/// the CPU as on a GPU the bits are the same at every call, whatever the number of threads.
///
/// # Shapes
/// x (…, C) of any strides, weight (C) → (…, C).
///
/// # Errors
/// When shapes, dtypes or devices do not fit; the message names them.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_posenc::rms_norm;
/// # fn main() -> candle_core::Result<()> {
/// let x = Var::new(&[[3f32, -4.]], &Device::Cpu)?;
/// let weight = Tensor::new(&[1f32, 2.], &Device::Cpu)?;
/// let y = rms_norm(&x, &weight, 0.)?; // rms: √(25/2)
/// assert!((y.to_vec2::<f32>()?[0][1] + 8. / 12.5f32.sqrt()).abs() < 1e-6);
/// assert!(y.sum_all()?.backward()?.get(&x).is_some());
/// # Ok(())
/// # }
/// ```
pub fn rms_norm(x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<Tensor> {
    check(x, weight)?;
    if !has_kernels(x.device()) || x.elem_count() == 0 {
        return by_tensors(x, weight, epsilon);
    }
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    let op = Normalize { epsilon };
    match x.track_op() || weight.track_op() {
        true => x.apply_op2(&weight, op),
        false => x.apply_op2_no_bwd(&weight, &op),
    }
}

/// The weights of one norm, and what is added to its mean square.
#[derive(Debug, Clone)]
pub(crate) struct RmsNorm {
    weight: Tensor,
    epsilon: f64,
}

impl RmsNorm {
    pub fn new(weight: Tensor, epsilon: f64) -> Self {
        Self { weight, epsilon }
    }

    /// (C)
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// What is added to the mean square.
    pub fn epsilon(&self) -> f64 {
        self.epsilon
    }

    /// # Errors
    /// When it cannot take x (…, C).
    pub fn check(&self, x: &Tensor) -> Result<()> {
        check(x, &self.weight)
    }

    /// (…, C) → (…, C)
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        rms_norm(x, &self.weight, self.epsilon)
    }
}

fn check(x: &Tensor, weight: &Tensor) -> Result<()> {
    let (shape, factors) = (x.dims(), weight.dims());
    match (shape.last(), factors) {
        (Some(width), [factors]) if width == factors && *width > 0 => (),
        _ => bail!("rms_norm: x must be (…, C) and weight (C) with C above 0, got {shape:?} and {factors:?}"),
    }
    let dtype = x.dtype();
    if dtype != weight.dtype() {
        bail!(
            "rms_norm: x is {dtype:?} and weight {:?}, which must be the same",
            weight.dtype()
        )
    }
    if !matches!(dtype, DType::F32 | DType::F64 | DType::BF16 | DType::F16) {
        bail!("rms_norm: dtype {dtype:?} is not supported (f32, f64, bf16, f16 are)")
    }
    if !x.device().same_device(weight.device()) {
        bail!(
            "rms_norm: x and weight must be on one device, got {:?} and {:?}",
            x.device().location(),
            weight.device().location()
        )
    }
    Ok(())
}

/// [`rms_norm`] in tensor operations, on any device.
fn by_tensors(x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<Tensor> {
    let width = x.dim(D::Minus1)?;
    let wide = match x.dtype() {
        DType::F64 => x.clone(),
        _ => x.to_dtype(DType::F32)?,
    };
    let mean = (wide.sqr()?.sum_keepdim(D::Minus1)? / width as f64)?;
    let normed = wide.broadcast_div(&(mean + epsilon)?.sqrt()?)?;
    normed.to_dtype(x.dtype())?.broadcast_mul(weight)
}

/// [`rms_norm`] as one candle operation over (x, weight), both contiguous.
struct Normalize {
    epsilon: f64,
}

/// A tensor in the host's memory.
type Operand<'a> = (&'a CpuStorage, &'a Layout);

/// The norm of contiguous rows on the CPU.
pub(crate) fn forward_on_host(x: Operand, weight: Operand, epsilon: f64) -> Result<CpuStorage> {
    fn of<T: Element>(x: Operand, weight: Operand, epsilon: f64) -> Result<CpuStorage> {
        let (x, weight) = (contiguous::<T>(x.0, x.1)?, contiguous(weight.0, weight.1)?);
        Ok(T::to_cpu_storage_owned(forward(x, weight, epsilon)))
    }
    match x.0.dtype() {
        DType::F32 => of::<f32>(x, weight, epsilon),
        DType::F64 => of::<f64>(x, weight, epsilon),
        DType::BF16 => of::<bf16>(x, weight, epsilon),
        DType::F16 => of::<f16>(x, weight, epsilon),
        other => bail!("rms_norm: dtype {other:?} is not supported (f32, f64, bf16, f16 are)"),
    }
}

/// Gradients of x and weight where they are asked for, from x, the weight and the result's gradient, all contiguous.
/// `addend`, like x, is added to that of x before it is rounded: what else flows back to x.
pub(crate) fn gradients(
    tensors: [&Tensor; 3],
    addend: Option<&Tensor>,
    asked: [bool; 2],
    epsilon: f64,
) -> Result<[Option<Tensor>; 2]> {
    fn of<T: Element>(
        [x, weight, grad]: [&Tensor; 3],
        addend: Option<&Tensor>,
        asked: [bool; 2],
        epsilon: f64,
    ) -> Result<[Option<Tensor>; 2]> {
        let (x_host, weight_host, grad_host) = (on_host(x), on_host(weight), on_host(grad));
        let addend = addend.map(on_host);
        let (dx, dw) = backward::<T>(
            x_host.slice()?,
            weight_host.slice()?,
            grad_host.slice()?,
            addend.as_ref().map(|x| x.slice()).transpose()?,
            epsilon,
        );
        let tensor = |values: Vec<T>, like: &Tensor, asked: bool| {
            let made = || Tensor::from_vec(values, like.shape(), like.device());
            asked.then(made).transpose()
        };
        Ok([tensor(dx, x, asked[0])?, tensor(dw, weight, asked[1])?])
    }
    #[cfg(feature = "cuda")]
    if tensors[0].device().is_cuda() {
        return cuda::backward(tensors, addend, asked, epsilon);
    }
    match tensors[0].dtype() {
        DType::F32 => of::<f32>(tensors, addend, asked, epsilon),
        DType::F64 => of::<f64>(tensors, addend, asked, epsilon),
        DType::BF16 => of::<bf16>(tensors, addend, asked, epsilon),
        DType::F16 => of::<f16>(tensors, addend, asked, epsilon),
        other => bail!("rms_norm: no gradient for dtype {other:?}"),
    }
}

impl CustomOp2 for Normalize {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let out = forward_on_host((x, x_layout), (weight, weight_layout), self.epsilon)?;
        Ok((out, x_layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        weight: &CudaStorage,
        weight_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let out = cuda::forward((x, x_layout), (weight, weight_layout), self.epsilon)?;
        Ok((out, x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        let asked = [x.track_op(), weight.track_op()];
        let [dx, dw] = gradients([x, weight, &grad], None, asked, self.epsilon)?;
        Ok((dx, dw))
    }
}

/// Elements that one task of the thread pool handles; smaller tensors stay on the calling thread.
const TASK: usize = 1 << 14;

/// Rows of a task, at least: each has sums of its own for the weights' gradient.
const FEWEST_ROWS: usize = 32;

fn rows_per_task(width: usize) -> usize {
    (TASK / width).max(FEWEST_ROWS)
}

fn forward<T: Element>(x: &[T], weight: &[T], epsilon: f64) -> Vec<T> {
    let width = weight.len();
    let mut out = vec![T::zero(); x.len()];
    let stretch = rows_per_task(width) * width;
    let task = |(out, x): (&mut [T], &[T])| {
        for (out, x) in out.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
            let rms = root_mean_square(x, epsilon);
            for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
                let n = T::from_acc(x.to_acc() / rms);
                *out = T::from_acc(n.to_acc() * w.to_acc());
            }
        }
    };
    if out.len() <= 2 * TASK {
        task((&mut out, x));
    } else {
        (out.par_chunks_mut(stretch).zip(x.par_chunks(stretch))).for_each(task);
    }
    out
}

/// Rows of dx, and their sums for dw.
type Results<'a, T> = (&'a mut [T], &'a mut [<T as Element>::Acc]);
/// The task's number, and its rows of x and of the result's gradient.
type Operands<'a, T> = (usize, (&'a [T], &'a [T]));

/// dx, with `addend` where there is one, and dw.
fn backward<T: Element>(
    x: &[T],
    weight: &[T],
    grad: &[T],
    addend: Option<&[T]>,
    epsilon: f64,
) -> (Vec<T>, Vec<T>) {
    let width = weight.len();
    let zero = T::Acc::from_f64(0.);
    let mut dx = vec![T::zero(); x.len()];
    let stretch = rows_per_task(width) * width;
    // A row of sums for each task.
    let mut partial = vec![zero; x.len().div_ceil(stretch) * width];
    let columns = T::Acc::from_f64(width as f64);
    let task = |((dx, sums), (task, (x, grad))): (Results<T>, Operands<T>)| {
        let rows = x.chunks_exact(width).zip(grad.chunks_exact(width));
        for (row, (dx, (x, grad))) in dx.chunks_exact_mut(width).zip(rows).enumerate() {
            let rms = root_mean_square(x, epsilon);
            let products = sum(x.len(), |i| {
                grad[i].to_acc() * weight[i].to_acc() * x[i].to_acc()
            });
            let mean = products / rms / columns; // of g·n
            let first = task * stretch + row * width;
            let addend = addend.map(|all| &all[first..first + width]);
            for (i, dx) in dx.iter_mut().enumerate() {
                let (n, dy) = (x[i].to_acc() / rms, grad[i].to_acc());
                let own = (dy * weight[i].to_acc() - n * mean) / rms;
                *dx = T::from_acc(addend.map_or(own, |addend| own + addend[i].to_acc()));
                sums[i] += dy * T::from_acc(n).to_acc();
            }
        }
    };
    if x.len() <= 2 * TASK {
        let results = dx.chunks_mut(stretch).zip(partial.chunks_exact_mut(width));
        let inputs = x.chunks(stretch).zip(grad.chunks(stretch)).enumerate();
        results.zip(inputs).for_each(task);
    } else {
        let results = dx
            .par_chunks_mut(stretch)
            .zip(partial.par_chunks_exact_mut(width));
        let inputs = (x.par_chunks(stretch).zip(grad.par_chunks(stretch))).enumerate();
        results.zip(inputs).for_each(task);
    }
    let mut dw = vec![zero; width];
    for sums in partial.chunks_exact(width) {
        for (dw, sum) in dw.iter_mut().zip(sums) {
            *dw += *sum;
        }
    }
    (dx, dw.into_iter().map(T::from_acc).collect())
}

fn root_mean_square<T: Element>(x: &[T], epsilon: f64) -> T::Acc {
    let squares = sum(x.len(), |i| x[i].to_acc() * x[i].to_acc());
    let mean = squares / T::Acc::from_f64(x.len() as f64) + T::Acc::from_f64(epsilon);
    T::Acc::from_f64(mean.to_f64().sqrt())
}

/// Σ term(i) for i below `len`, in as many sums as a vector may have elements.
#[inline(always)]
fn sum<A: WithDType>(len: usize, term: impl Fn(usize) -> A) -> A {
    const LANES: usize = 16;
    let mut sums = [A::zero(); LANES];
    let whole = len / LANES * LANES;
    for start in (0..whole).step_by(LANES) {
        for (lane, sum) in sums.iter_mut().enumerate() {
            *sum += term(start + lane);
        }
    }
    let mut total = (whole..len).map(term).fold(A::zero(), |sum, x| sum + x);
    for sum in sums {
        total += sum;
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drawn::{difference, with_gradients};
    use candle_core::{Device, Var};

    const CPU: Device = Device::Cpu;
    const EPSILON: f64 = 1e-5;

    fn random(shape: impl Into<Shape>) -> Result<Tensor> {
        crate::drawn::normal(1., shape)
    }

    fn greatest(x: &Tensor) -> Result<f64> {
        let all = x.abs()?.flatten_all()?.to_dtype(DType::F64)?;
        // NaN is greatest.
        let all = all.to_vec1::<f64>()?;
        Ok(all
            .into_iter()
            .fold(0., |a, b| if b > a || b.is_nan() { b } else { a }))
    }

    #[test]
    fn norm_and_its_gradients_equal_those_by_tensors() -> Result<()> {
        // Odd widths, one row, more than one task.
        for shape in [
            vec![1],
            vec![5],
            vec![1, 1, 7],
            vec![2, 3, 16],
            vec![3, 1027],
            vec![170, 384],
            vec![40_000, 1],
        ] {
            let width = shape[shape.len() - 1];
            let (x, weight) = (random(shape.clone())?, random(width)?);
            let found = with_gradients(&x, &weight, |x, w| rms_norm(x, w, EPSILON))?;
            let expected = with_gradients(&x, &weight, |x, w| by_tensors(x, w, EPSILON))?;
            for (found, expected) in found.iter().zip(&expected) {
                let bar = 1e-12 * (1. + greatest(expected)?);
                let off = difference(found, expected)?;
                assert!(off < bar, "{shape:?}: {off:e}");
            }
        }
        Ok(())
    }

    /// What flows back to x beside is added before the one rounding, on the CPU and on a GPU where there is one.
    #[test]
    fn gradients_with_an_addend_are_exact_ones_rounded_once() -> Result<()> {
        for device in crate::drawn::devices("RMSNorm's gradients with an addend") {
            for (dtype, unit) in [
                (DType::F64, f64::EPSILON / 2.),
                (DType::F32, f64::from(f32::EPSILON) / 2.),
                (DType::BF16, 1. / 256.),
                (DType::F16, 1. / 2048.),
            ] {
                for width in [7, 12, 64, 1030, 1032] {
                    let all = [
                        random((37, width))?,
                        random(width)?,
                        random((37, width))?,
                        random((37, width))?,
                    ];
                    let mut given = Vec::new();
                    let mut exact = Vec::new();
                    for x in &all {
                        let x = x.to_dtype(dtype)?;
                        exact.push(x.to_dtype(DType::F64)?);
                        given.push(x.to_device(&device)?);
                    }
                    let x = Var::from_tensor(&exact[0])?;
                    let y = (by_tensors(&x, &exact[1], EPSILON)? * &exact[2])?;
                    let store = y.sum_all()?.backward()?;
                    let tensors = [&given[0], &given[1], &given[2]];
                    let got = gradients(tensors, Some(&given[3]), [true, false], EPSILON)?;
                    let (Some(want), [Some(got), _]) = (store.get(&x), got) else {
                        bail!("no gradient")
                    };
                    let want = (want + &exact[3])?;
                    let got = got.to_device(&CPU)?.to_dtype(DType::F64)?;
                    let inner = if dtype == DType::F64 { 1e-13 } else { 1e-6 };
                    let floor = inner * greatest(&want)?;
                    let beyond = ((got - &want)?.abs()? - (want.abs()? * unit)?)?;
                    let worst = greatest(&beyond.maximum(0.)?)?;
                    assert!(
                        worst <= floor,
                        "{device:?} {dtype:?} {width}: {worst:e} beyond a rounding, {floor:e} allowed"
                    );
                }
            }
        }
        Ok(())
    }

    #[test]
    fn norm_gradients_equal_finite_differences() -> Result<()> {
        let (x, weight) = (random((2, 3, 5))?, random(5)?);
        let [_, dx, dw] = with_gradients(&x, &weight, |x, w| rms_norm(x, w, EPSILON))?;
        let loss = |x: &Tensor, w: &Tensor| -> Result<f64> {
            let y = rms_norm(x, w, EPSILON)?.flatten_all()?.to_vec1::<f64>()?;
            let upstream = |i: usize| (0.7 * i as f64).sin() + 0.3;
            Ok(y.iter().enumerate().map(|(i, y)| upstream(i) * y).sum())
        };
        let moved = |x: &Tensor, i: usize, step: f64| -> Result<Tensor> {
            let mut values = x.flatten_all()?.to_vec1::<f64>()?;
            values[i] += step;
            Tensor::from_vec(values, x.shape(), &CPU)
        };
        let step = 1e-5;
        for (i, found) in dx.flatten_all()?.to_vec1::<f64>()?.into_iter().enumerate() {
            let at = |step| loss(&moved(&x, i, step)?, &weight);
            let expected = (at(step)? - at(-step)?) / (2. * step);
            assert!(
                (found - expected).abs() < 1e-8,
                "dx {i}: {found} {expected}"
            );
        }
        for (i, found) in dw.to_vec1::<f64>()?.into_iter().enumerate() {
            let at = |step| loss(&x, &moved(&weight, i, step)?);
            let expected = (at(step)? - at(-step)?) / (2. * step);
            assert!(
                (found - expected).abs() < 1e-8,
                "dw {i}: {found} {expected}"
            );
        }
        Ok(())
    }

    #[test]
    fn norm_in_lower_precision_errs_at_most_twice_as_much_as_by_tensors() -> Result<()> {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let x = random((70, 100))?.to_dtype(dtype)?;
            let weight = random(100)?.to_dtype(dtype)?;
            let wide = |x: &Tensor| x.to_dtype(DType::F64);
            let exact = |x: &Tensor, w: &Tensor| by_tensors(x, w, EPSILON);
            let exact = with_gradients(&wide(&x)?, &wide(&weight)?, exact)?;
            let plain = with_gradients(&x, &weight, |x, w| by_tensors(x, w, EPSILON))?;
            let found = with_gradients(&x, &weight, |x, w| rms_norm(x, w, EPSILON))?;
            for (i, name) in ["y", "dx", "dw"].into_iter().enumerate() {
                let error = difference(&found[i], &exact[i])?;
                let allowed = 2. * difference(&plain[i], &exact[i])?;
                assert!(
                    error <= allowed,
                    "{dtype:?} {name}: {error:e} of {allowed:e}"
                );
                assert_eq!(found[i].dtype(), dtype);
            }
        }
        Ok(())
    }

    #[test]
    fn norm_in_half_precision_rounds_before_it_multiplies() -> Result<()> {
        for dtype in [DType::BF16, DType::F16] {
            let x = random((9, 33))?.to_dtype(dtype)?;
            let weight = random(33)?.to_dtype(dtype)?;
            let wide = x.to_dtype(DType::F64)?;
            let mean = (wide.sqr()?.sum_keepdim(1)? / 33.)?;
            let normed = wide.broadcast_div(&(mean + EPSILON)?.sqrt()?)?;
            let rounded = normed.to_dtype(dtype)?.to_dtype(DType::F64)?;
            let expected = rounded.broadcast_mul(&weight.to_dtype(DType::F64)?)?;
            let found = rms_norm(&x, &weight, EPSILON)?;
            // Sums in f32 may turn a tie.
            let same = found
                .to_dtype(DType::F64)?
                .eq(&expected.to_dtype(dtype)?.to_dtype(DType::F64)?)?;
            let same = same.to_dtype(DType::F32)?.mean_all()?.to_scalar::<f32>()?;
            assert!(same > 0.98, "{dtype:?}: {same}");
        }
        Ok(())
    }

    #[test]
    fn norm_of_strided_rows_equals_that_of_contiguous_ones() -> Result<()> {
        let (wide, weights) = (random((6, 4, 5))?, random((7, 2))?);
        let (x, weight) = (
            wide.transpose(0, 2)?,
            weights.narrow(0, 1, 6)?.narrow(1, 1, 1)?.squeeze(1)?,
        );
        assert!(!x.is_contiguous() && !weight.is_contiguous());
        let found = rms_norm(&x, &weight, EPSILON)?;
        let expected = rms_norm(&x.contiguous()?, &weight.contiguous()?, EPSILON)?;
        assert_eq!(difference(&found, &expected)?, 0.);
        // As a view in the graph: the gradient comes back through it.
        let var = Var::from_tensor(&wide)?;
        let gradient = |x: &Tensor| rms_norm(x, &weight, EPSILON)?.sqr()?.sum_all();
        let found = gradient(&var.transpose(0, 2)?)?.backward()?;
        let expected = by_tensors(&var.transpose(0, 2)?, &weight, EPSILON)?;
        let expected = expected.sqr()?.sum_all()?.backward()?;
        match (found.get(&var), expected.get(&var)) {
            (Some(found), Some(expected)) => assert!(difference(found, expected)? < 1e-12),
            _ => bail!("no gradient"),
        }
        Ok(())
    }

    #[test]
    fn norm_of_zeros_and_of_huge_values_is_finite() -> Result<()> {
        let x = Tensor::new(&[[0f32, 0., 0.], [1e18, -1e18, 0.], [1e-30, 0., 0.]], &CPU)?;
        let weight = Tensor::new(&[1f32, 2., 3.], &CPU)?;
        let [y, dx, dw] = with_gradients(&x, &weight, |x, w| rms_norm(x, w, EPSILON))?;
        let y = y.to_vec2::<f32>()?;
        assert_eq!(y[0], [0.; 3]);
        assert!((y[1][0] - 1.5f32.sqrt()).abs() < 1e-6);
        assert!(greatest(&dx)?.is_finite() && greatest(&dw)?.is_finite());
        Ok(())
    }

    #[test]
    fn norm_gradients_are_the_same_bits_on_any_number_of_threads() -> Result<()> {
        let (x, weight) = (random((500, 384))?, random(384)?);
        let [x, weight] = [x.to_dtype(DType::F32)?, weight.to_dtype(DType::F32)?];
        let found: Vec<Vec<f32>> = [1, 2, 5]
            .into_iter()
            .map(|threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
                let all = pool
                    .unwrap()
                    .install(|| with_gradients(&x, &weight, |x, w| rms_norm(x, w, EPSILON)));
                let all = all.unwrap().map(|x| x.flatten_all().unwrap());
                all.iter()
                    .flat_map(|x| x.to_vec1::<f32>().unwrap())
                    .collect()
            })
            .collect();
        assert!(found[0] == found[1] && found[0] == found[2]);
        Ok(())
    }

    #[test]
    fn norm_of_one_tracked_side_gives_its_gradient_alone() -> Result<()> {
        let (x, weight) = (random((4, 6))?, random(6)?);
        let expected = with_gradients(&x, &weight, |x, w| by_tensors(x, w, EPSILON))?;
        for side in [0, 1] {
            // Not leaves themselves, so that candle asks for their gradients on the way.
            let var = Var::from_tensor([&x, &weight][side])?;
            let on_the_way = (var.as_tensor() * 1.)?;
            let y = match side {
                0 => rms_norm(&on_the_way, &weight, EPSILON)?,
                _ => rms_norm(&x, &on_the_way, EPSILON)?,
            };
            let upstream = Tensor::arange(0u32, 24, &CPU)?.to_dtype(DType::F64)?;
            let upstream = ((upstream * 0.7)?.sin()? + 0.3)?.reshape((4, 6))?;
            let gradients = (y * upstream)?.sum_all()?.backward()?;
            match gradients.get(&var) {
                Some(found) => assert!(difference(found, &expected[side + 1])? < 1e-12),
                None => bail!("no gradient"),
            }
        }
        assert!(!rms_norm(&x, &weight, EPSILON)?.track_op());
        Ok(())
    }

    #[test]
    fn norm_of_no_rows_has_none() -> Result<()> {
        let x = random((3, 4))?.narrow(0, 0, 0)?;
        assert_eq!(rms_norm(&x, &random(4)?, EPSILON)?.dims(), [0, 4]);
        Ok(())
    }

    #[test]
    fn norm_of_what_does_not_fit_is_an_error_that_names_it() -> Result<()> {
        let (x, weight) = (random((2, 3))?, random(3)?);
        let refused = |x: &Tensor, weight: &Tensor, part: &str| {
            let message = match rms_norm(x, weight, EPSILON) {
                Ok(y) => bail!("{y:?} for {part}"),
                Err(error) => error.to_string(),
            };
            assert!(message.contains(part), "{message} does not tell {part}");
            Ok(())
        };
        refused(&x, &random(2)?, "[2, 3] and [2]")?;
        refused(&x, &random((1, 3))?, "[1, 3]")?;
        refused(&Tensor::new(1f64, &CPU)?, &weight, "[]")?;
        refused(&x, &weight.to_dtype(DType::F32)?, "F32")?;
        refused(
            &x.to_dtype(DType::U32)?,
            &weight.to_dtype(DType::U32)?,
            "U32",
        )?;
        Ok(())
    }
}
