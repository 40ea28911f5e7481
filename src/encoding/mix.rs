//! Heads mixed by a matrix for each token, as TAPE's updates do.

use crate::host::{Element, View};
use candle_core::backend::BackendStorage;
use candle_core::{bail, CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, WithDType};
use rayon::prelude::*;

/// Σ_j A\[g, j\]·y_j at every token, differentiable in both.
///
/// # Shapes
/// y (B, J, T, P), A (B, T, G, J), of any strides → (B, G, T, P), contiguous and in A's dtype: f32 for a y of f32,
/// bf16 or f16, f64 for one of f64.
pub(super) fn mix_heads(y: &Tensor, a: &Tensor) -> Result<Tensor> {
    let (b, j, t, _) = y.dims4()?;
    let (ab, at, _, aj) = a.dims4()?;
    if (ab, at, aj) != (b, t, j) {
        bail!(
            "tape: a matrix (B, T, G, J) must fit heads (B, J, T, P); matrix {:?}, heads {:?}",
            a.dims(),
            y.dims()
        )
    }
    if !y.device().is_cpu() {
        return mix_by_tensors(y, a);
    }
    let y = with_unit_stride(y)?;
    if [&y, a].iter().any(|x| x.track_op()) {
        y.apply_op2(a, Mix)
    } else {
        y.apply_op2_no_bwd(a, &Mix)
    }
}

fn mix_by_tensors(y: &Tensor, a: &Tensor) -> Result<Tensor> {
    let by_token = y.to_dtype(a.dtype())?.transpose(1, 2)?.contiguous()?; // (B,T,J,P)
    a.contiguous()?
        .matmul(&by_token)?
        .transpose(1, 2)?
        .contiguous()
}

/// The kernels read rows of the last dimension as slices.
fn with_unit_stride(x: &Tensor) -> Result<Tensor> {
    match x.stride().last() {
        Some(1) => Ok(x.clone()),
        _ => x.contiguous(),
    }
}

macro_rules! dispatch {
    ($y:ident, $other:ident, $kernel:expr, $($value:ident, $state:ident;)*) => {
        match ($y, $other) {
            $((CpuStorage::$value(y), CpuStorage::$state(other)) => $kernel(y, other),)*
            _ => bail!(
                "tape: states are f32 (f64 beside values of f64); got {:?} and {:?}",
                $y.dtype(),
                $other.dtype()
            ),
        }
    };
}

struct Mix;

impl CustomOp2 for Mix {
    fn name(&self) -> &'static str {
        "tape-mix-heads"
    }

    fn cpu_fwd(
        &self,
        y: &CpuStorage,
        y_layout: &Layout,
        a: &CpuStorage,
        a_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        fn run<T: Element>(
            (y, y_layout): (&[T], &Layout),
            (a, a_layout): (&[T::Acc], &Layout),
        ) -> Result<(CpuStorage, Shape)> {
            Ok(mix(View::new(y, y_layout)?, View::new(a, a_layout)?))
        }
        dispatch!(y, a, |y, a| run((y, y_layout), (a, a_layout)),
            F32, F32; F64, F64; BF16, F32; F16, F32;)
    }

    fn bwd(
        &self,
        y: &Tensor,
        a: &Tensor,
        _mixed: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (y_tracked, a_tracked) = (y.track_op(), a.track_op());
        let (y, a) = (y.detach(), a.detach());
        let grad = with_unit_stride(&grad.detach())?;
        let dy = || mix_heads(&grad, &a.transpose(2, 3)?)?.to_dtype(y.dtype());
        let da = || y.apply_op2_no_bwd(&grad, &Products);
        Ok((
            y_tracked.then(dy).transpose()?,
            a_tracked.then(da).transpose()?,
        ))
    }
}

/// x_g·y_j at every token: the gradient of the matrix. y (B,J,T,P), x (B,G,T,P) → (B,T,G,J).
struct Products;

impl CustomOp2 for Products {
    fn name(&self) -> &'static str {
        "tape-head-products"
    }

    fn cpu_fwd(
        &self,
        y: &CpuStorage,
        y_layout: &Layout,
        x: &CpuStorage,
        x_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        fn run<T: Element>(
            (y, y_layout): (&[T], &Layout),
            (x, x_layout): (&[T::Acc], &Layout),
        ) -> Result<(CpuStorage, Shape)> {
            Ok(products(View::new(y, y_layout)?, View::new(x, x_layout)?))
        }
        dispatch!(y, x, |y, x| run((y, y_layout), (x, x_layout)),
            F32, F32; F64, F64; BF16, F32; F16, F32;)
    }
}

/// Fewest rows a thread takes at once.
const ROWS: usize = 64;

fn mix<T: Element>(y: View<'_, T>, a: View<'_, T::Acc>) -> (CpuStorage, Shape) {
    let ([b, heads, t, width], g) = (y.dims, a.dims[2]);
    let mut out = vec![T::Acc::from_f64(0.); b * g * t * width];
    if !out.is_empty() {
        let rows = out.par_chunks_mut(width).with_min_len(ROWS).enumerate();
        rows.for_each(|(row, out)| {
            let (b, g, t) = (row / t / g, row / t % g, row % t);
            for j in 0..heads {
                let factor = a.data[offset(&a, [b, t, g, j])];
                for (out, y) in out.iter_mut().zip(row_of(&y, [b, j, t])) {
                    *out += factor * y.to_acc();
                }
            }
        });
    }
    (
        T::Acc::to_cpu_storage_owned(out),
        Shape::from((b, g, t, width)),
    )
}

fn products<T: Element>(y: View<'_, T>, x: View<'_, T::Acc>) -> (CpuStorage, Shape) {
    let ([b, heads, t, _], g) = (y.dims, x.dims[1]);
    let mut out = vec![T::Acc::from_f64(0.); b * t * g * heads];
    if !out.is_empty() {
        let tokens = out.par_chunks_mut(g * heads).with_min_len(ROWS).enumerate();
        tokens.for_each(|(token, out)| {
            let (b, t) = (token / t, token % t);
            for (i, out) in out.iter_mut().enumerate() {
                let (x, y) = (row_of(&x, [b, i / heads, t]), row_of(&y, [b, i % heads, t]));
                *out = dot(x, y);
            }
        });
    }
    (
        T::Acc::to_cpu_storage_owned(out),
        Shape::from((b, t, g, heads)),
    )
}

/// In eight sums side by side, which a vector unit can add at once.
fn dot<T: Element>(x: &[T::Acc], y: &[T]) -> T::Acc {
    const LANES: usize = 8;
    let zero = T::Acc::from_f64(0.);
    let mut sums = [zero; LANES];
    let (x_blocks, y_blocks) = (x.chunks_exact(LANES), y.chunks_exact(LANES));
    let rest = x_blocks.remainder().iter().zip(y_blocks.remainder());
    let mut total = rest.fold(zero, |sum, (x, y)| sum + *x * y.to_acc());
    for (x, y) in x_blocks.zip(y_blocks) {
        for (sum, (x, y)) in sums.iter_mut().zip(x.iter().zip(y)) {
            *sum += *x * y.to_acc();
        }
    }
    for sum in sums {
        total += sum;
    }
    total
}

fn offset<T>(view: &View<'_, T>, index: [usize; 4]) -> usize {
    index
        .iter()
        .zip(view.strides)
        .map(|(i, stride)| i * stride)
        .sum()
}

/// The last dimension at (batch, head, token), which has stride 1.
fn row_of<'a, T>(view: &View<'a, T>, [b, head, t]: [usize; 3]) -> &'a [T] {
    let start = offset(view, [b, head, t, 0]);
    &view.data[start..start + view.dims[3]]
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device, Var};

    fn random(shape: (usize, usize, usize, usize), dtype: DType) -> Result<Tensor> {
        Tensor::randn(0f64, 1., shape, &Device::Cpu)?.to_dtype(dtype)
    }

    fn max_difference(a: &Tensor, b: &Tensor) -> Result<f64> {
        let difference = (a.to_dtype(DType::F64)? - b.to_dtype(DType::F64)?)?;
        difference.abs()?.max_all()?.to_scalar::<f64>()
    }

    #[test]
    fn mix_heads_of_strided_views_equals_tensor_operations() -> Result<()> {
        // Width 11 has a remainder, the heads are inside out, and one matrix serves all tokens of a row.
        for (dtype, state, bound) in [
            (DType::F64, DType::F64, 1e-14),
            (DType::F32, DType::F32, 1e-5),
            (DType::BF16, DType::F32, 1e-5),
            (DType::F16, DType::F32, 1e-5),
        ] {
            let y = random((2, 7, 4, 13), dtype)?
                .transpose(1, 2)?
                .narrow(3, 1, 11)?;
            let transposed = random((2, 4, 7, 11), dtype)?
                .transpose(2, 3)?
                .contiguous()?;
            let wide = random((2, 1, 4, 3), state)?
                .transpose(2, 3)?
                .broadcast_as((2, 7, 3, 4))?;
            let full = random((2, 7, 3, 4), state)?;
            for y in [y, transposed.transpose(2, 3)?] {
                for a in [&wide, &full] {
                    let (found, expected) = (mix_heads(&y, a)?, mix_by_tensors(&y, a)?);
                    assert_eq!((found.dims(), found.dtype()), (&[2, 3, 7, 11][..], state));
                    let error = max_difference(&found, &expected)?;
                    assert!(error < bound, "{dtype:?} {error}");
                }
            }
        }
        Ok(())
    }

    #[test]
    fn mix_heads_gradients_equal_those_of_tensor_operations() -> Result<()> {
        for (dtype, bound) in [(DType::F64, 1e-13), (DType::BF16, 0.1)] {
            let state = if dtype == DType::F64 {
                dtype
            } else {
                DType::F32
            };
            let y = Var::from_tensor(&random((2, 4, 7, 11), dtype)?)?;
            let a = Var::from_tensor(&random((1, 1, 3, 4), state)?)?;
            let upstream = random((2, 3, 11, 7), state)?.transpose(2, 3)?;
            let gradients = |mix: fn(&Tensor, &Tensor) -> Result<Tensor>| {
                let mixed = mix(&y, &a.broadcast_as((2, 7, 3, 4))?)?;
                (mixed * &upstream)?.sum_all()?.backward()
            };
            let (found, expected) = (gradients(mix_heads)?, gradients(mix_by_tensors)?);
            for x in [&y, &a] {
                let (Some(found), Some(expected)) = (found.get(x), expected.get(x)) else {
                    bail!("no gradient")
                };
                assert_eq!((found.dims(), found.dtype()), (x.dims(), x.dtype()));
                let error = max_difference(found, expected)?;
                assert!(error < bound, "{dtype:?} {error}");
            }
        }
        Ok(())
    }

    #[test]
    fn mix_heads_with_a_misfitting_matrix_is_an_error() -> Result<()> {
        let (y, a) = (
            random((1, 2, 3, 4), DType::F32)?,
            random((1, 3, 2, 3), DType::F32)?,
        );
        let message = mix_heads(&y, &a).unwrap_err().to_string();
        assert!(message.contains("[1, 3, 2, 3]"), "{message}");
        Ok(())
    }
}
