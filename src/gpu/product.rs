//! Products of bf16 matrices whose results stay in f32, by cuBLAS on tensor cores. candle's product rounds its results to
//! its operands' dtype.
#![allow(unsafe_code)]

use super::{on_gpu, Held, Output};
use candle_core::cuda_backend::cudarc::cublas::{result::gemm_ex, sys};
use candle_core::{bail, Error, Layout, Result, Tensor};
use half::bf16;

/// How a matrix lies in memory.
struct Matrix {
    /// Whether columns, not rows, are without gaps.
    transposed: bool,
    /// Elements from one row (column) to the next.
    leading: i32,
}

impl Matrix {
    fn of(layout: &Layout) -> Result<Self> {
        let (rows, columns) = layout.shape().dims2()?;
        let &[row, column] = layout.stride() else {
            bail!("a product's operand is no matrix: {layout:?}")
        };
        // Where there is one row or column, its stride says nothing.
        let in_rows = (column == 1 || columns == 1) && (row >= columns || rows == 1);
        let in_columns = (row == 1 || rows == 1) && (column >= rows || columns == 1);
        let (transposed, leading) = match (in_rows, in_columns) {
            (true, _) => (false, row.max(columns)),
            (false, true) => (true, column.max(rows)),
            _ => bail!("a product's operand lies neither in rows nor in columns: {layout:?}"),
        };
        let leading = count(leading)?;
        Ok(Self {
            transposed,
            leading,
        })
    }

    /// What cuBLAS, to which a matrix in rows is one in columns with its sides exchanged, does with it.
    fn operation(&self) -> sys::cublasOperation_t {
        match self.transposed {
            false => sys::cublasOperation_t::CUBLAS_OP_N,
            true => sys::cublasOperation_t::CUBLAS_OP_T,
        }
    }
}

fn count(x: usize) -> Result<i32> {
    i32::try_from(x).map_err(|_| Error::msg(format!("a product's side of {x} is too long")))
}

/// The sum of x·y over the summands x, added up in f32: x (M, K), y (K, N), in rows or in columns → (M, N), f32.
pub(crate) fn product(summands: &[Tensor], y: &Tensor) -> Result<Tensor> {
    let (k, n) = y.dims2()?;
    let m = summands.first().map_or(Ok(0), |x| x.dim(0))?;
    if [m, n, k].contains(&0) || summands.iter().any(|x| x.dims() != [m, k]) {
        bail!("a product of {summands:?} and {y:?} has no sense")
    }
    let y_held = on_gpu(y);
    let (y_storage, y_layout) = y_held.operand()?;
    let device = y_storage.device.clone();
    let (stream, blas) = (device.cuda_stream(), device.cublas_handle());
    // SAFETY: the first product writes every element.
    let mut out = unsafe { Output::<f32>::unwritten(&device, (m, n))? };
    for (nth, x) in summands.iter().enumerate() {
        let x_held = on_gpu(x);
        let (x_storage, x_layout) = x_held.operand()?;
        let (of_x, of_y) = (Matrix::of(x_layout)?, Matrix::of(y_layout)?);
        let mut held = Held::on(&stream);
        let start = |layout: &Layout| (layout.start_offset() * size_of::<bf16>()) as u64;
        let x_address = held.read(x_storage.as_cuda_slice::<bf16>()?) + start(x_layout);
        let y_address = held.read(y_storage.as_cuda_slice::<bf16>()?) + start(y_layout);
        let out_address = out.write(&mut held);
        let (one, so_far) = (1f32, if nth == 0 { 0f32 } else { 1. });
        // SAFETY: the views are inside their memory, as candle's are, and `out` has M · N elements; all stay alive until it is
        // launched, on the stream of candle's handle. The factors are read before it returns.
        unsafe {
            gemm_ex(
                *blas.handle(),
                of_y.operation(),
                of_x.operation(),
                count(n)?,
                count(m)?,
                count(k)?,
                (&raw const one).cast(),
                y_address as *const _,
                sys::cudaDataType_t::CUDA_R_16BF,
                of_y.leading,
                x_address as *const _,
                sys::cudaDataType_t::CUDA_R_16BF,
                of_x.leading,
                (&raw const so_far).cast(),
                out_address as *mut _,
                sys::cudaDataType_t::CUDA_R_32F,
                count(n)?,
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
            )
        }
        .map_err(Error::wrap)?;
        drop(held);
    }
    Ok(out.into_tensor())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drawn::{gpu, normal};
    use candle_core::{DType, Device};

    /// The same in rows and in columns, alone and amid NaNs above, below and on both sides.
    fn stored(x: &Tensor) -> Result<Vec<Tensor>> {
        let amid = |x: &Tensor| -> Result<Tensor> {
            let (rows, columns) = x.dims2()?;
            let nan = |shape| Tensor::full(f32::NAN, shape, x.device())?.to_dtype(x.dtype());
            let wide = Tensor::cat(&[&nan((rows, 3))?, x, &nan((rows, 2))?], 1)?;
            let nan = nan((1, columns + 5))?;
            let all = Tensor::cat(&[&nan, &wide, &nan], 0)?;
            all.narrow(0, 1, rows)?.narrow(1, 3, columns)
        };
        let turned = x.t()?.contiguous()?;
        Ok(vec![x.clone(), turned.t()?, amid(x)?, amid(&turned)?.t()?])
    }

    #[test]
    fn products_of_bf16_are_those_of_f64_rounded_to_f32() -> Result<()> {
        let Some(gpu) = gpu("products of bf16") else {
            return Ok(());
        };
        let cpu = Device::Cpu;
        for (m, n, k) in [
            (1, 1, 1),
            (1, 300, 7),
            (33, 1, 64),
            (5, 9, 1),
            (64, 256, 384),
            (70, 301, 129),
        ] {
            let random = |rows, columns| normal(1., (rows, columns))?.to_dtype(DType::BF16);
            let (x, more, y) = (random(m, k)?, (random(m, k)? / 256.)?, random(k, n)?);
            let wide = |x: &Tensor| x.to_dtype(DType::F64);
            for summands in [vec![x.clone()], vec![x, more]] {
                let mut want = Tensor::zeros((m, n), DType::F64, &cpu)?;
                for x in &summands {
                    want = (want + wide(x)?.matmul(&wide(&y)?)?)?;
                }
                let there = |x: &Tensor| stored(&x.to_device(&gpu)?);
                let all = summands.iter().map(there).collect::<Result<Vec<_>>>()?;
                for (i, y) in there(&y)?.iter().enumerate() {
                    for j in 0..4 {
                        let summands: Vec<_> = all.iter().map(|x| x[j].clone()).collect();
                        let got = product(&summands, y)?;
                        assert_eq!((got.dims(), got.dtype()), (&[m, n][..], DType::F32));
                        let off = (wide(&got.to_device(&cpu)?)? - &want)?.abs()?;
                        let off = off.flatten_all()?.max(0)?.to_scalar::<f64>()?;
                        let bar = 1e-6 * (k as f64).sqrt() * 6.;
                        assert!(off < bar, "{m} {n} {k}, stored {i} {j}: {off:e}");
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn operands_that_do_not_fit_are_errors() -> Result<()> {
        let Some(gpu) = gpu("products of what does not fit") else {
            return Ok(());
        };
        let zeros = |rows, columns| Tensor::zeros((rows, columns), DType::BF16, &gpu);
        let y = zeros(4, 5)?;
        assert!(product(&[], &y).is_err());
        assert!(product(&[zeros(3, 5)?], &y).is_err());
        assert!(product(&[zeros(3, 4)?, zeros(2, 4)?], &y).is_err());
        assert!(product(&[zeros(3, 4)?.to_dtype(DType::F32)?], &y).is_err());
        let holes = zeros(4, 10)?
            .reshape((4, 5, 2))?
            .narrow(2, 0, 1)?
            .squeeze(2)?;
        assert!(product(&[zeros(3, 4)?], &holes).is_err());
        Ok(())
    }
}
