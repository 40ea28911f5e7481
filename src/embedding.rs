//! The table of token embeddings, differentiable: a token's row, and for a row the sum of its tokens' gradients.
//!
//! Gradients are added up in f32 (f64 for f64) in an order that depends on the ids alone, and rounded once.

mod call;
#[cfg(feature = "cuda")]
mod cuda;

use crate::attend::cpu::Real;
use crate::host::{on_host, Element};
use candle_core::backend::BackendStorage;
use candle_core::{
    bail, CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, MetalStorage, Result, Shape,
    Storage, Tensor,
};
use half::{bf16, f16};
use rayon::prelude::*;

/// Token ids (B, T) that are in a vocabulary, on the host and where a model is.
#[derive(Debug, Clone)]
pub(crate) struct TokenIds {
    on_host: Vec<u32>,
    /// (B·T,) of `u32`.
    on_device: Tensor,
    /// B and T.
    shape: (usize, usize),
}

impl TokenIds {
    /// Reads tokens (B, T), `u32` or `i64`, for a model on a device with a vocabulary. Where they are on the host
    /// already, nothing waits for that device.
    ///
    /// # Errors
    /// When there is no token or an id is not below `vocab`.
    pub fn read(tokens: &Tensor, vocab: usize, device: &Device) -> Result<Self> {
        let &[b, t] = tokens.dims() else {
            bail!("llama: tokens must be (B, T), got {tokens:?}")
        };
        if b * t == 0 {
            bail!("llama: there is no token in {tokens:?}")
        }
        let known = |id: i64| match usize::try_from(id) {
            Ok(place) if place < vocab => Ok(id as u32),
            _ => bail!("llama: token id {id} is not in the vocabulary of {vocab}"),
        };
        let flat = tokens.flatten_all()?;
        let on_host: Vec<u32> = match tokens.dtype() {
            DType::U32 => {
                let ids = flat.to_vec1::<u32>()?;
                ids.iter()
                    .try_for_each(|id| known((*id).into()).map(drop))?;
                ids
            }
            DType::I64 => {
                let ids = flat.to_vec1::<i64>()?;
                ids.into_iter().map(known).collect::<Result<_>>()?
            }
            other => bail!("llama: tokens must be u32 or i64, got {other:?}"),
        };
        let on_device = match tokens.dtype() == DType::U32 && tokens.device().same_device(device) {
            true => flat.contiguous()?,
            false => Tensor::from_slice(&on_host, on_host.len(), device)?,
        };
        Ok(Self {
            on_host,
            on_device,
            shape: (b, t),
        })
    }

    /// B and T.
    pub fn shape(&self) -> (usize, usize) {
        self.shape
    }
}

/// table (V, C) → (B, T, C).
pub(crate) fn embed(table: &Tensor, tokens: TokenIds) -> Result<Tensor> {
    let table = table.contiguous()?;
    match table.track_op() {
        true => table.apply_op1(Lookup { tokens }),
        false => table.apply_op1_no_bwd(&Lookup { tokens }),
    }
}

/// The tokens that read each row of a table: those of row i are `order[starts[i]..starts[i + 1]]`, ascending.
struct Readers {
    order: Vec<u32>,
    starts: Vec<usize>,
}

impl Readers {
    fn new(ids: &[u32], rows: usize) -> Self {
        let mut starts = vec![0; rows + 1];
        for id in ids {
            starts[*id as usize + 1] += 1;
        }
        for row in 0..rows {
            starts[row + 1] += starts[row];
        }
        let mut next = starts.clone();
        let mut order = vec![0; ids.len()];
        for (token, id) in ids.iter().enumerate() {
            let place = &mut next[*id as usize];
            order[*place] = token as u32;
            *place += 1;
        }
        Self { order, starts }
    }

    fn of(&self, row: usize) -> &[u32] {
        &self.order[self.starts[row]..self.starts[row + 1]]
    }
}

/// [`embed`] as one candle operation over a contiguous table. The ids are below its number of rows.
struct Lookup {
    tokens: TokenIds,
}

impl Lookup {
    fn forward<S: BackendStorage>(
        &self,
        table: &S,
        layout: &Layout,
        ids: &S,
    ) -> Result<(S, Shape)> {
        let (b, t) = self.tokens.shape;
        let (_, c) = layout.shape().dims2()?;
        let ids_layout = self.tokens.on_device.layout();
        let out = table.index_select(ids, layout, ids_layout, 0)?;
        Ok((out, Shape::from((b, t, c))))
    }

    fn backward<T: Element>(&self, table: &Tensor, grad: &Tensor) -> Result<Tensor> {
        let (v, c) = table.dims2()?;
        let readers = Readers::new(&self.tokens.on_host, v);
        let grad_host = on_host(grad);
        let grad: &[T] = grad_host.slice()?;
        let mut out = vec![T::zero(); v * c];
        let add = |(row, out): (usize, &mut [T])| {
            let tokens = readers.of(row);
            if tokens.is_empty() {
                return;
            }
            let mut sums = vec![<T::Acc as Real>::ZERO; c];
            for token in tokens {
                let start = *token as usize * c;
                for (sum, x) in sums.iter_mut().zip(&grad[start..start + c]) {
                    *sum += x.to_acc();
                }
            }
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = T::from_acc(sum);
            }
        };
        if grad.len() <= TASK {
            out.chunks_exact_mut(c).enumerate().for_each(add);
        } else {
            out.par_chunks_exact_mut(c).enumerate().for_each(add);
        }
        Tensor::from_vec(out, (v, c), table.device())
    }
}

/// Elements from which on gradients are summed by all threads.
const TASK: usize = 1 << 15;

/// The ids' memory, which is where the table's is.
macro_rules! forward_on {
    ($lookup:ident, $table:ident, $layout:ident, $device:ident) => {{
        let (ids, _) = $lookup.tokens.on_device.storage_and_layout();
        match &*ids {
            Storage::$device(ids) => $lookup.forward($table, $layout, ids),
            _ => bail!("llama: token ids and embeddings are on two devices"),
        }
    }};
}

impl CustomOp1 for Lookup {
    fn name(&self) -> &'static str {
        "embed"
    }

    fn cpu_fwd(&self, table: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        forward_on!(self, table, layout, Cpu)
    }

    fn cuda_fwd(&self, table: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        forward_on!(self, table, layout, Cuda)
    }

    fn metal_fwd(&self, table: &MetalStorage, layout: &Layout) -> Result<(MetalStorage, Shape)> {
        forward_on!(self, table, layout, Metal)
    }

    fn bwd(&self, table: &Tensor, _out: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        #[cfg(feature = "cuda")]
        if table.device().is_cuda() {
            let (rows, _) = table.dims2()?;
            let readers = Readers::new(&self.tokens.on_host, rows);
            return cuda::backward(table, &grad, &readers).map(Some);
        }
        if !table.device().is_cpu() {
            let grad = grad.flatten(0, 1)?;
            let zeros = table.zeros_like()?;
            return zeros.index_add(&self.tokens.on_device, &grad, 0).map(Some);
        }
        match table.dtype() {
            DType::F32 => self.backward::<f32>(table, &grad),
            DType::F64 => self.backward::<f64>(table, &grad),
            DType::BF16 => self.backward::<bf16>(table, &grad),
            DType::F16 => self.backward::<f16>(table, &grad),
            other => bail!("llama: no gradient for embeddings of {other:?}"),
        }
        .map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Var;

    const CPU: Device = Device::Cpu;

    fn wide(x: &Tensor) -> Result<Vec<f64>> {
        x.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
    }

    #[test]
    fn embeddings_and_gradient_of_the_table_equal_sums_by_hand() -> Result<()> {
        // Few and many of one id, ids that nobody reads, more than one task.
        for (b, t, v, c) in [
            (1, 1, 1, 1),
            (2, 7, 5, 3),
            (3, 40, 300, 17),
            (2, 400, 3, 64),
        ] {
            for (dtype, bar) in [(DType::F64, 1e-13), (DType::F32, 1e-5), (DType::BF16, 2e-2)] {
                let table = crate::drawn::normal(1., (v, c))?.to_dtype(dtype)?;
                let table = Var::from_tensor(&table)?;
                let ids: Vec<u32> = (0..b * t).map(|i| (i * i % 7 * 13 % v) as u32).collect();
                let tokens = Tensor::from_slice(&ids, (b, t), &CPU)?;
                let out = embed(&table, TokenIds::read(&tokens, v, &CPU)?)?;
                assert_eq!(out.dims(), [b, t, c]);
                let (values, rows) = (wide(&out)?, wide(&table)?);
                for (i, id) in ids.iter().enumerate() {
                    let row = *id as usize * c;
                    assert_eq!(values[i * c..(i + 1) * c], rows[row..row + c]);
                }
                let upstream = crate::drawn::normal(1., (b, t, c))?.to_dtype(dtype)?;
                let gradients = (out * &upstream)?.sum_all()?.backward()?;
                let Some(found) = gradients.get(&table) else {
                    bail!("no gradient")
                };
                assert_eq!(found.dtype(), dtype);
                let (found, upstream) = (wide(found)?, wide(&upstream)?);
                let mut expected = vec![0.; v * c];
                for (i, id) in ids.iter().enumerate() {
                    for j in 0..c {
                        expected[*id as usize * c + j] += upstream[i * c + j];
                    }
                }
                for (found, expected) in found.iter().zip(&expected) {
                    let off = (found - expected).abs();
                    assert!(off <= bar * (1. + expected.abs()), "{dtype:?}: {off:e}");
                }
            }
        }
        Ok(())
    }

    #[test]
    fn tokens_that_are_not_in_the_vocabulary_are_refused_by_id() -> Result<()> {
        let refused = |tokens: &Tensor, part: &str| {
            let message = match TokenIds::read(tokens, 4, &CPU) {
                Ok(ids) => bail!("{ids:?} for {part}"),
                Err(error) => error.to_string(),
            };
            assert!(message.contains(part), "{message} does not tell {part}");
            Ok(())
        };
        refused(&Tensor::new(&[[3u32, 4]], &CPU)?, "token id 4")?;
        refused(&Tensor::new(&[[3i64, -1]], &CPU)?, "token id -1")?;
        refused(&Tensor::new(&[[1i64 << 40]], &CPU)?, "1099511627776")?;
        refused(&Tensor::new(&[[1u8]], &CPU)?, "U8")?;
        refused(&Tensor::new(&[1u32], &CPU)?, "(B, T)")?;
        refused(&Tensor::zeros((2, 0), DType::U32, &CPU)?, "no token")
    }

    #[test]
    fn pieces_hold_every_token_once_and_no_more_than_fit() {
        let ids: Vec<u32> = (0..1000)
            .map(|i| if i % 3 > 0 { 2 } else { i % 11 })
            .collect();
        let readers = Readers::new(&ids, 20);
        let list = call::Pieces::of(&readers);
        let mut seen = vec![false; ids.len()];
        let mut next_piece = 0;
        for [id, first, end] in &list.rows {
            assert_eq!(*first, next_piece);
            next_piece = *end;
            for [start, end] in &list.pieces[*first as usize..*end as usize] {
                assert!(start < end && end - start <= 64);
                for token in &readers.order[*start as usize..*end as usize] {
                    assert_eq!(ids[*token as usize], *id);
                    assert!(!std::mem::replace(&mut seen[*token as usize], true));
                }
            }
        }
        assert_eq!(next_piece as usize, list.pieces.len());
        assert!(seen.into_iter().all(|seen| seen));
    }
}
