//! The table's gradient on a GPU, in two launches.
#![allow(unsafe_code)]

use super::call::{EmbeddingCall, Pieces, THREADS};
use super::Readers;
use crate::gpu::{filled, in_eights, launch, on_gpu, upload, Held, Launch};
use crate::host::Element;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{DeviceRepr, ValidAsZeroBits};
use candle_core::cuda_backend::CudaDType;
use candle_core::{bail, DType, Result, Tensor};
use half::{bf16, f16};

// SAFETY: plain numbers in the order and with the sizes that the kernels declare; the tests of `call` hold them to it.
unsafe impl DeviceRepr for EmbeddingCall {}

pub(super) fn backward(table: &Tensor, grad: &Tensor, readers: &Readers) -> Result<Tensor> {
    match table.dtype() {
        DType::F32 => backward_of::<f32>(table, grad, readers),
        DType::F64 => backward_of::<f64>(table, grad, readers),
        DType::BF16 => backward_of::<bf16>(table, grad, readers),
        DType::F16 => backward_of::<f16>(table, grad, readers),
        other => bail!("llama: no gradient for embeddings of {other:?}"),
    }
}

fn backward_of<T>(table: &Tensor, grad: &Tensor, readers: &Readers) -> Result<Tensor>
where
    T: Element + CudaDType + DeviceRepr + ValidAsZeroBits,
    T::Acc: DeviceRepr,
{
    let (rows, width) = table.dims2()?;
    let grad_held = on_gpu(grad);
    let operand = grad_held.operand()?;
    let device = operand.0.device();
    let stream = device.cuda_stream();
    let list = Pieces::of(readers);
    let order = upload(device, &readers.order)?;
    let pieces = upload(device, &list.pieces)?;
    let read_rows = upload(device, &list.rows)?;
    let mut out = device.alloc_zeros::<T>(rows * width)?;
    // SAFETY: the first kernel writes every element.
    let mut partial = unsafe { device.alloc::<T::Acc>(list.pieces.len() * width)? };
    let mut held = Held::on(&stream);
    let mut call = EmbeddingCall {
        grad: held.read_operand::<T>(operand)?,
        partial: held.write(&mut partial),
        out: held.write(&mut out),
        order: held.read(&order),
        pieces: held.read(&pieces),
        rows: held.read(&read_rows),
        width: width as i64,
        vector: 0,
    };
    call.vector = in_eights(width, &[call.grad, call.partial, call.out]).into();
    let name = T::DTYPE.as_str();
    let shape = |blocks: usize| Launch::new(blocks, 1, THREADS, 0);
    let (sums, totals) = (shape(list.pieces.len())?, shape(list.rows.len())?);
    // SAFETY: every token of `order` is a row of the gradient and every row a row of the table, as the ids were checked
    // to be; pieces and rows are inside what they index. All stays alive until it is launched, and memory given back
    // later is not given out on this stream before the launches have run.
    unsafe {
        launch(&stream, &format!("embedding_pieces_{name}"), sums, &call)?;
        launch(&stream, &format!("embedding_rows_{name}"), totals, &call)?;
    }
    drop(held);
    Ok(filled(out, device, table.shape()))
}
