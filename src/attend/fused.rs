//! The fused path as one candle operation: forward and backward side by side. On the CPU the backward pass computes
//! scores anew from the saved log-sum-exp; on a GPU it goes through the dense path, until it has kernels of its own.

use super::cpu::{self, RowStatistics, Rows};
use super::problem::{Dims, Resolved};
use super::{dense, AttendOutput};
use crate::host::{on_host, Element, View};
use candle_core::backend::BackendStorage;
use candle_core::{bail, CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor, Var};
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

/// Zeros like x, which may be of no length: a GPU has no such memory, but a view of some can be.
fn zeros_of_any_length(x: &Tensor) -> Result<Tensor> {
    let dims: Vec<usize> = x.dims().iter().map(|size| (*size).max(1)).collect();
    let zeros = Tensor::zeros(dims, x.dtype(), x.device())?;
    let cut = |zeros: Tensor, (dim, size): (usize, &usize)| zeros.narrow(dim, 0, *size);
    x.dims().iter().enumerate().try_fold(zeros, cut)
}

/// Gradients through the dense path, whose inputs are copies so that nothing is tracked beyond them.
fn dense_backward(
    call: &Resolved,
    inputs: [&Tensor; 3],
    grad: &Tensor,
) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
    let [q, k, v] = inputs;
    let Dims { b, h, t, s, .. } = call.dims;
    if b * h * t * s == 0 {
        return Ok((
            Some(zeros_of_any_length(q)?),
            Some(zeros_of_any_length(k)?),
            Some(zeros_of_any_length(v)?),
        ));
    }
    let copy = |x: &Tensor| Var::from_tensor(&x.detach());
    let (q, k, v) = (copy(q)?, copy(k)?, copy(v)?);
    let out = dense::attend(&q, &k, &v, call)?.out;
    let gradients = (out * grad.detach())?.sum_all()?.backward()?;
    let gradient = |x: &Var| match gradients.get(x) {
        Some(gradient) => Ok(Some(gradient.clone())),
        // Nothing is seen, or there is nothing to see.
        None => x.zeros_like().map(Some),
    };
    Ok((gradient(&q)?, gradient(&k)?, gradient(&v)?))
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
            let rows = rows.as_ref();
            return match super::cuda::backward(&self.call, [q, k, v], out, rows, grad)? {
                Some(gradients) => Ok(gradients),
                None => dense_backward(&self.call, [q, k, v], grad),
            };
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attend::{AttendSpec, Backend, Problem};
    use candle_core::Device;

    fn normal(dims: (usize, usize, usize, usize)) -> Result<Tensor> {
        Tensor::randn(0f64, 1., dims, &Device::Cpu)
    }

    #[test]
    fn gradients_by_way_of_the_dense_path_equal_its_own() -> Result<()> {
        let [q, k, v, grad] = [
            normal((2, 4, 5, 6))?,
            normal((2, 2, 7, 6))?,
            normal((2, 2, 7, 3))?,
            normal((2, 4, 5, 3))?,
        ];
        let spec = AttendSpec::causal().with_backend(Backend::Dense);
        let call = Problem::of(&q, &k, &v)?.resolve(&spec)?;
        let (dq, dk, dv) = dense_backward(&call, [&q, &k, &v], &grad)?;
        let vars = [&q, &k, &v].map(Var::from_tensor);
        let [Ok(q), Ok(k), Ok(v)] = &vars else {
            bail!("no variables")
        };
        let out = crate::attend::attend(q, k, v, &spec)?;
        let gradients = (out * grad)?.sum_all()?.backward()?;
        for (var, gradient) in [(q, dq), (k, dk), (v, dv)] {
            let expected = gradients.get(var).unwrap().flatten_all()?;
            let gradient = gradient.unwrap();
            assert_eq!(gradient.dims(), var.dims());
            assert_eq!(
                gradient.flatten_all()?.to_vec1::<f64>()?,
                expected.to_vec1::<f64>()?
            );
        }
        Ok(())
    }

    #[test]
    fn gradients_by_way_of_the_dense_path_are_zero_where_there_is_no_key() -> Result<()> {
        let (q, kv) = (normal((1, 2, 3, 4))?, normal((1, 2, 0, 4))?);
        let call = Problem::of(&q, &kv, &kv)?.resolve(&AttendSpec::causal())?;
        let (dq, dk, _) = dense_backward(&call, [&q, &kv, &kv], &q)?;
        assert_eq!(dq.unwrap().flatten_all()?.to_vec1::<f64>()?, [0.; 24]);
        assert_eq!(dk.unwrap().dims(), kv.dims());
        Ok(())
    }
}
