//! The fused path as one candle operation: forward and backward side by side. The backward pass computes scores anew
//! and turns them into weights by what the forward pass saved of each row.

use super::cpu::{self, RowStatistics, Rows};
use super::problem::{Dims, Resolved};
use super::AttendOutput;
use crate::host::{on_host, Element, View};
use candle_core::backend::BackendStorage;
use candle_core::{bail, CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor};
use half::{bf16, f16};
use std::sync::{Arc, OnceLock};

#[cfg(feature = "cuda")]
use super::cuda::{LeftRows, Wanted};
#[cfg(feature = "cuda")]
use candle_core::{op::BackpropOp, CudaStorage, Storage};

pub(super) fn attend(q: &Tensor, k: &Tensor, v: &Tensor, call: Resolved) -> Result<Tensor> {
    apply([q, k, v], FusedAttention::new(call, [q, k, v], false))
}

pub(super) fn attend_with_lse(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    call: Resolved,
) -> Result<AttendOutput> {
    let op = FusedAttention::new(call, [q, k, v], true);
    let saved = op.saved.clone();
    let out = apply([q, k, v], op)?;
    let lse = match saved.get() {
        // Where no key is visible this is −∞ + 0.
        Some(Saved::OnHost {
            greatest, log_sum, ..
        }) => (greatest + log_sum)?,
        #[cfg(feature = "cuda")]
        Some(Saved::OnGpu { lse: Some(lse), .. }) => lse.clone(),
        _ => bail!("attend: the forward pass left no log-sum-exp"),
    };
    Ok(AttendOutput { out, lse })
}

fn apply(inputs: [&Tensor; 3], op: FusedAttention) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    let readable = super::cuda::readable(inputs, &op.call)?;
    #[cfg(feature = "cuda")]
    let inputs = readable.each_ref();
    let [q, k, v] = inputs;
    if inputs.iter().any(|x| x.track_op()) {
        q.apply_op3(k, v, op)
    } else {
        q.apply_op3_no_bwd(k, v, &op)
    }
}

/// One call of the fused path. Each call needs an object of its own: the saved values belong to it.
struct FusedAttention {
    call: Resolved,
    /// Whether there may be a backward pass, for which the forward pass leaves something.
    tracked: bool,
    /// Whether the caller asked for the log-sum-exp.
    with_lse: bool,
    saved: Arc<OnceLock<Saved>>,
}

/// What the backward pass needs beside the inputs and the output.
enum Saved {
    OnHost {
        /// (B,H,T), f32 or f64: each row's greatest score and the logarithm of its sum, [`RowStatistics`].
        greatest: Tensor,
        log_sum: Tensor,
        /// (B,H,T,E) in f32 where the output was rounded to half precision: Σ out·grad from rounded values would
        /// lose the small differences that make the score's gradient.
        exact_out: Option<Tensor>,
    },
    #[cfg(feature = "cuda")]
    OnGpu {
        /// (B,H,T), f32 or f64, where the caller asked for it.
        lse: Option<Tensor>,
        /// None where the forward pass has to be run again for the backward pass.
        rows: Option<LeftRows>,
    },
}

impl FusedAttention {
    fn new(call: Resolved, inputs: [&Tensor; 3], with_lse: bool) -> Self {
        Self {
            call,
            tracked: inputs.iter().any(|x| x.track_op()),
            with_lse,
            saved: Arc::default(),
        }
    }

    fn leave(&self, saved: Saved) -> Result<()> {
        if self.saved.set(saved).is_err() {
            bail!(
                "attend: one operation object was applied twice; its log-sum-exp would be mixed up"
            )
        }
        Ok(())
    }

    fn forward<T: Element>(&self, [q, k, v]: [(&CpuStorage, &Layout); 3]) -> Result<CpuStorage> {
        let Dims { b, h, t, e, .. } = self.call.dims;
        let save = self.tracked || self.with_lse;
        let result = cpu::forward(
            &self.call,
            View::<T>::new(q.0.as_slice()?, q.1)?,
            View::new(k.0.as_slice()?, k.1)?,
            View::new(v.0.as_slice()?, v.1)?,
            save,
        );
        if save {
            let device = candle_core::Device::Cpu;
            self.leave(Saved::OnHost {
                greatest: Tensor::from_vec(result.rows.greatest, (b, h, t), &device)?,
                log_sum: Tensor::from_vec(result.rows.log_sum, (b, h, t), &device)?,
                exact_out: result
                    .exact_out
                    .map(|out| Tensor::from_vec(out, (b, h, t, e), &device))
                    .transpose()?,
            })?;
        }
        Ok(T::to_cpu_storage_owned(result.out))
    }

    fn backward<T: Element>(
        &self,
        [q, k, v, out, grad]: [&Tensor; 5],
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let Some(Saved::OnHost {
            greatest,
            log_sum,
            exact_out,
        }) = self.saved.get()
        else {
            bail!("attend: backward before forward: no log-sum-exp was saved")
        };
        let rows = RowStatistics {
            greatest: greatest.flatten_all()?.to_vec1::<T::Acc>()?,
            log_sum: log_sum.flatten_all()?.to_vec1()?,
        };
        let [q_host, k_host, v_host, grad_host] = [q, k, v, grad].map(on_host);
        let out_host = on_host(exact_out.as_ref().unwrap_or(out));
        let out: &dyn Rows<T::Acc> = match exact_out {
            Some(_) => &out_host.view::<T::Acc>()?,
            None => &out_host.view::<T>()?,
        };
        let gradients = cpu::backward(
            &self.call,
            [
                q_host.view::<T>()?,
                k_host.view()?,
                v_host.view()?,
                grad_host.view()?,
            ],
            out,
            &rows,
        );
        let tensor = |values: Vec<T>, like: &Tensor| {
            Tensor::from_vec(values, like.shape(), like.device()).map(Some)
        };
        Ok((
            tensor(gradients.dq, q)?,
            tensor(gradients.dk, k)?,
            tensor(gradients.dv, v)?,
        ))
    }
}

impl CustomOp3 for FusedAttention {
    fn name(&self) -> &'static str {
        "attend"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let Dims { b, h, t, e, .. } = self.call.dims;
        let operands = [(q, q_layout), (k, k_layout), (v, v_layout)];
        let out = match q.dtype() {
            DType::F32 => self.forward::<f32>(operands)?,
            DType::F64 => self.forward::<f64>(operands)?,
            DType::BF16 => self.forward::<bf16>(operands)?,
            DType::F16 => self.forward::<f16>(operands)?,
            other => bail!("attend: dtype {other:?} is not supported (f32, f64, bf16, f16 are)"),
        };
        Ok((out, Shape::from((b, h, t, e))))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let Dims { b, h, t, e, .. } = self.call.dims;
        let operands = [(q, q_layout), (k, k_layout), (v, v_layout)];
        let wanted = Wanted {
            lse: self.with_lse,
            rows: self.tracked,
        };
        let (out, left) = super::cuda::forward(&self.call, operands, wanted)?;
        if self.tracked || self.with_lse {
            let tensor = |storage| {
                let (storage, untracked) = (Storage::Cuda(storage), BackpropOp::none());
                Tensor::from_storage(storage, (b, h, t), untracked, false)
            };
            self.leave(Saved::OnGpu {
                lse: left.lse.map(tensor),
                rows: left.rows,
            })?;
        }
        Ok((out, Shape::from((b, h, t, e))))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let tensors = [q, k, v, out, grad];
        #[cfg(feature = "cuda")]
        if let Some(Saved::OnGpu { rows, .. }) = self.saved.get() {
            return super::cuda::backward(&self.call, [q, k, v], out, rows.as_ref(), grad);
        }
        match q.dtype() {
            DType::F32 => self.backward::<f32>(tensors),
            DType::F64 => self.backward::<f64>(tensors),
            DType::BF16 => self.backward::<bf16>(tensors),
            DType::F16 => self.backward::<f16>(tensors),
            other => bail!("attend: no gradient for dtype {other:?}"),
        }
    }
}

#[cfg(test)]
mod arriving;
