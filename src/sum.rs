//! The stream and what a part of a layer adds to it: x + y, each element rounded once.
//!
//! A part whose last step is a product adds it to the stream itself, so that its own result is no tensor of the graph:
//! candle's backward pass would copy the gradient of one more, and add it to zeros.

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod call;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use crate::host::{contiguous, Element};
use candle_core::backend::BackendStorage;
use candle_core::{bail, CpuStorage, DType, Layout, Result, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

#[cfg(feature = "cuda")]
use candle_core::{CudaStorage, CustomOp2, Shape};

/// x + y of the same shape and dtype. On an NVIDIA GPU in pieces of 16 bytes, where candle goes by elements.
pub(crate) fn sum(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() && x.dims() == y.dims() && x.elem_count() > 0 {
        let (x, y) = (x.contiguous()?, y.contiguous()?);
        return match x.track_op() || y.track_op() {
            true => x.apply_op2(&y, Sum),
            false => x.apply_op2_no_bwd(&y, &Sum),
        };
    }
    x + y
}

type Operand<'a> = (&'a CpuStorage, &'a Layout);

/// Contiguous elements and as many others, on the CPU.
pub(crate) fn on_host(x: Operand, y: Operand) -> Result<CpuStorage> {
    fn of<T: Element>(x: Operand, y: Operand) -> Result<CpuStorage> {
        let (x, y) = (contiguous::<T>(x.0, x.1)?, contiguous::<T>(y.0, y.1)?);
        if x.len() != y.len() {
            bail!("sum: {} and {} elements", x.len(), y.len())
        }
        let add = |x: &T, y: &T| T::from_acc(x.to_acc() + y.to_acc());
        let sums: Vec<T> = match x.len() <= TASK {
            true => x.iter().zip(y).map(|(x, y)| add(x, y)).collect(),
            false => (x.par_iter().with_min_len(TASK).zip(y))
                .map(|(x, y)| add(x, y))
                .collect(),
        };
        Ok(T::to_cpu_storage_owned(sums))
    }
    match x.0.dtype() {
        DType::F32 => of::<f32>(x, y),
        DType::F64 => of::<f64>(x, y),
        DType::BF16 => of::<bf16>(x, y),
        DType::F16 => of::<f16>(x, y),
        other => bail!("sum: dtype {other:?} is not supported (f32, f64, bf16, f16 are)"),
    }
}

/// Elements that one task of the thread pool handles.
const TASK: usize = 1 << 14;

/// [`sum`] as one candle operation over contiguous operands.
#[cfg(feature = "cuda")]
struct Sum;

#[cfg(feature = "cuda")]
impl CustomOp2 for Sum {
    fn name(&self) -> &'static str {
        "sum"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        y: &CpuStorage,
        y_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let out = on_host((x, x_layout), (y, y_layout))?;
        Ok((out, x_layout.shape().clone()))
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        y: &CudaStorage,
        y_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let out = cuda::forward((x, x_layout), (y, y_layout))?;
        Ok((out, x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        y: &Tensor,
        _out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let of = |operand: &Tensor| operand.track_op().then(|| grad.clone());
        Ok((of(x), of(y)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drawn::{difference, normal};

    #[test]
    fn sum_on_the_host_equals_candles() -> Result<()> {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            for rows in [1, 7, 9000] {
                let x = normal(1., (rows, 5))?.to_dtype(dtype)?;
                let y = normal(1., (rows + 1, 5))?
                    .to_dtype(dtype)?
                    .narrow(0, 1, rows)?;
                let (x_host, y_host) = (x.storage_and_layout(), y.storage_and_layout());
                let (candle_core::Storage::Cpu(a), candle_core::Storage::Cpu(b)) =
                    (&*x_host.0, &*y_host.0)
                else {
                    bail!("not on the CPU")
                };
                let found = on_host((a, x_host.1), (b, y_host.1))?;
                let found = Tensor::from_storage(
                    candle_core::Storage::Cpu(found),
                    x.shape(),
                    candle_core::op::BackpropOp::none(),
                    false,
                );
                assert_eq!(difference(&found, &(&x + &y)?)?, 0., "{dtype:?} {rows}");
            }
        }
        Ok(())
    }

    #[test]
    fn sum_of_what_does_not_fit_is_an_error() -> Result<()> {
        assert!(sum(&normal(1., (2, 3))?, &normal(1., (3, 2))?).is_err());
        let x = normal(1., (2, 3))?;
        assert!(sum(&x, &x.to_dtype(DType::F32)?).is_err());
        Ok(())
    }
}
