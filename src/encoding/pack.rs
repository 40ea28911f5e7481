//! TAPE's state written behind the values, so that attention averages both with the same weights.

use crate::host::{Element, View};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{bail, CpuStorage, CustomOp3, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

/// \[v | re | im\] in v's dtype, differentiable in all three.
///
/// # Shapes
/// v (B, G, T, D), re and im (B, G, T, P) of any strides → (B, G, T, D + 2P), contiguous.
pub(super) fn pack_value(v: &Tensor, re: &Tensor, im: &Tensor) -> Result<Tensor> {
    let (b, g, t, _) = v.dims4()?;
    let pairs = re.dim(3)?;
    if re.dims() != [b, g, t, pairs] || im.dims() != re.dims() {
        bail!(
            "tape: the state must have v's batch, heads and tokens; v {:?}, real parts {:?}, imaginary parts {:?}",
            v.dims(),
            re.dims(),
            im.dims()
        )
    }
    if !has_kernel(v, re)? {
        let part = |x: &Tensor| x.to_dtype(v.dtype())?.contiguous();
        return Tensor::cat(&[v.contiguous()?, part(re)?, part(im)?], 3);
    }
    if [v, re, im].iter().any(|x| x.track_op()) {
        v.apply_op3(re, im, PackValue)
    } else {
        v.apply_op3_no_bwd(re, im, &PackValue)
    }
}

/// Whether one operation packs: on the CPU, and on NVIDIA GPUs unless a batch has more heads than their grids.
fn has_kernel(v: &Tensor, state: &Tensor) -> Result<bool> {
    #[cfg(feature = "cuda")]
    if super::tape::gpu::packs(v, state)? {
        return Ok(true);
    }
    Ok(v.device().is_cpu() && state.device().is_cpu())
}

struct PackValue;

impl CustomOp3 for PackValue {
    fn name(&self) -> &'static str {
        "tape-pack-value"
    }

    fn cpu_fwd(
        &self,
        v: &CpuStorage,
        v_layout: &Layout,
        re: &CpuStorage,
        re_layout: &Layout,
        im: &CpuStorage,
        im_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        macro_rules! pack {
            ($($value:ident, $state:ident;)*) => {
                match (v, re, im) {
                    $((CpuStorage::$value(v), CpuStorage::$state(re), CpuStorage::$state(im)) => pack(
                        View::new(v, v_layout)?,
                        View::new(re, re_layout)?,
                        View::new(im, im_layout)?,
                    ),)*
                    _ => bail!(
                        "tape: the state must be f32 (f64 for v of f64); v {:?}, real parts {:?}, imaginary parts {:?}",
                        candle_core::backend::BackendStorage::dtype(v),
                        candle_core::backend::BackendStorage::dtype(re),
                        candle_core::backend::BackendStorage::dtype(im)
                    ),
                }
            };
        }
        Ok(pack! { F32, F32; F64, F64; BF16, F32; F16, F32; })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        v: &CudaStorage,
        v_layout: &Layout,
        re: &CudaStorage,
        re_layout: &Layout,
        im: &CudaStorage,
        im_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        super::tape::gpu::pack([(v, v_layout), (re, re_layout), (im, im_layout)])
    }

    fn bwd(
        &self,
        v: &Tensor,
        re: &Tensor,
        im: &Tensor,
        _packed: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        #[cfg(feature = "cuda")]
        if v.device().is_cuda() {
            return super::tape::gpu::unpack([v, re, im, grad]);
        }
        let (width, pairs) = (v.dim(3)?, re.dim(3)?);
        let part = |x: &Tensor, start: usize, len: usize| -> Result<Option<Tensor>> {
            if !x.track_op() {
                return Ok(None);
            }
            grad.narrow(3, start, len)?.to_dtype(x.dtype()).map(Some)
        };
        Ok((
            part(v, 0, width)?,
            part(re, width, pairs)?,
            part(im, width + pairs, pairs)?,
        ))
    }
}

fn pack<T: Element>(
    v: View<'_, T>,
    re: View<'_, T::Acc>,
    im: View<'_, T::Acc>,
) -> (CpuStorage, Shape) {
    let [b, g, t, d] = v.dims;
    let pairs = re.dims[3];
    let width = d + 2 * pairs;
    let mut out = vec![T::from_f64(0.); b * g * t * width];
    let shape = Shape::from((b, g, t, width));
    if out.is_empty() {
        return (T::to_cpu_storage_owned(out), shape);
    }
    out.par_chunks_mut(width)
        .with_min_len(64)
        .enumerate()
        .for_each(|(row, out)| {
            let token = [row / t / g, row / t % g, row % t];
            let (value, state) = out.split_at_mut(d);
            let (real, imaginary) = state.split_at_mut(pairs);
            copy_row(&v, token, value, |x| x);
            copy_row(&re, token, real, T::from_acc);
            copy_row(&im, token, imaginary, T::from_acc);
        });
    (T::to_cpu_storage_owned(out), shape)
}

/// Copies the last dimension at (batch, head, token).
fn copy_row<X: Copy, Y>(
    from: &View<'_, X>,
    token: [usize; 3],
    to: &mut [Y],
    convert: impl Fn(X) -> Y,
) {
    let start: usize = (0..3).map(|axis| token[axis] * from.strides[axis]).sum();
    if from.strides[3] == 1 {
        let row = &from.data[start..start + to.len()];
        to.iter_mut().zip(row).for_each(|(to, x)| *to = convert(*x));
    } else {
        for (j, to) in to.iter_mut().enumerate() {
            *to = convert(from.data[start + j * from.strides[3]]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device, Var};

    fn random(shape: (usize, usize, usize, usize)) -> Result<Tensor> {
        Tensor::randn(0f64, 1., shape, &Device::Cpu)
    }

    #[test]
    fn pack_value_of_strided_views_equals_concatenation() -> Result<()> {
        let v = random((2, 5, 3, 4))?.transpose(1, 2)?; // (2,3,5,4)
        let re = random((1, 1, 5, 2))?.broadcast_as((2, 3, 5, 2))?;
        let im = random((2, 3, 2, 5))?.transpose(2, 3)?;
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            let state = if dtype == DType::F64 {
                dtype
            } else {
                DType::F32
            };
            let (v, re, im) = (v.to_dtype(dtype)?, re.to_dtype(state)?, im.to_dtype(state)?);
            let rounded = |x: &Tensor| x.to_dtype(dtype)?.contiguous();
            let expected = Tensor::cat(&[v.contiguous()?, rounded(&re)?, rounded(&im)?], 3)?;
            let packed = pack_value(&v, &re, &im)?;
            assert_eq!(packed.dims(), [2, 3, 5, 8]);
            assert!(packed.is_contiguous());
            let exact = |x: Tensor| x.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
            assert_eq!(exact(packed)?, exact(expected)?, "{dtype:?}");
        }
        Ok(())
    }

    #[test]
    fn pack_value_gradient_returns_each_part_in_its_own_dtype() -> Result<()> {
        let v = Var::from_tensor(&random((1, 2, 3, 4))?.to_dtype(DType::BF16)?)?;
        let re = Var::from_tensor(&random((1, 2, 3, 1))?.to_dtype(DType::F32)?)?;
        let im = Var::from_tensor(&random((1, 2, 3, 1))?.to_dtype(DType::F32)?)?;
        // Upstream gradients that bf16 holds exactly, so that each part must come back bit for bit.
        let upstream = Tensor::arange(0f32, 36., &Device::Cpu)?.reshape((1, 2, 3, 6))?;
        let packed = pack_value(&v, &re, &im)?.to_dtype(DType::F32)?;
        let grads = (packed * &upstream)?.sum_all()?.backward()?;
        for (x, start) in [(&v, 0), (&re, 4), (&im, 5)] {
            let Some(grad) = grads.get(x) else {
                bail!("no gradient for the part at {start}")
            };
            assert_eq!(grad.dtype(), x.dtype());
            let expected = upstream.narrow(3, start, x.dim(3)?)?;
            let difference = (grad.to_dtype(DType::F32)? - expected)?.abs()?;
            assert_eq!(difference.max_all()?.to_scalar::<f32>()?, 0.);
        }
        Ok(())
    }

    #[test]
    fn pack_value_of_another_number_of_heads_is_an_error() -> Result<()> {
        let (v, state) = (random((1, 2, 3, 4))?, random((1, 4, 3, 2))?);
        let message = pack_value(&v, &state, &state).unwrap_err().to_string();
        assert!(message.contains("[1, 4, 3, 2]"), "{message}");
        Ok(())
    }
}
