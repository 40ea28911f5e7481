//! Cross-entropy from hidden states, a chunk of logits at a time.
//!
//! With h (N, C) the hidden states, W (V, C) the head and y the targets, the logits are l = h·Wᵀ and a token's loss is
//! log Σ_v exp(l_v) − l_y. The (N, V) logits of a long text are by far the largest tensor of a training step, and
//! automatic differentiation holds several of their kind. Here a chunk of tokens at a time is brought to its loss and
//! dropped; the backward pass makes the chunk's logits again and with p = softmax(l) and g a token's upstream gradient
//! forms
//!
//! - ds = g·(p − onehot(y)), (n, V),
//! - dh = ds·W and dW = Σ over chunks dsᵀ·h.
//!
//! That is one product of matrices more than to keep the logits: four where there were three. Where all tokens fit one
//! chunk, exp(l − max l) is kept and there are three.

use candle_core::backend::BackendStorage;
use candle_core::{
    bail, CpuStorage, CudaStorage, CustomOp2, DType, Layout, MetalStorage, Result, Shape, Storage,
    Tensor,
};

/// Logits in a chunk: 16 MiB of f32.
const CHUNK: usize = 1 << 22;

/// The cross-entropy of each token's next one, from hidden states: never more than one chunk of logits is alive,
/// forward or backward.
///
/// Differentiable in `hidden` and `head`. Products, softmax and the sum of the head's gradient are in f32 whatever the
/// inputs' dtypes (f64 where one of them is f64), and each gradient is rounded once. A token whose target is negative
/// is left out: its loss is 0, it passes no gradient, and its hidden state is not read. Logits may be of any size, −∞
/// included; nothing is clamped, so a logit that is NaN makes the token's loss NaN.
///
/// # Shapes
/// hidden (B, T, C) of any strides, head (V, C), targets (B, T), `u32` or `i64` → (B, T), f32 (f64 where an input is).
///
/// # Errors
/// When shapes, dtypes or devices do not fit, or a target is not below V.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_posenc::train::token_losses;
/// # fn main() -> candle_core::Result<()> {
/// let hidden = Tensor::zeros((1, 3, 8), candle_core::DType::F32, &Device::Cpu)?;
/// let head = Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?;
/// let targets = Tensor::new(&[[7i64, -1, 99]], &Device::Cpu)?;
/// let losses = token_losses(&hidden, &head, &targets)?.to_vec2::<f32>()?;
/// assert!((losses[0][0] - 100f32.ln()).abs() < 1e-5); // all logits are equal
/// assert_eq!(losses[0][1], 0.); // left out
/// # Ok(())
/// # }
/// ```
pub fn token_losses(hidden: &Tensor, head: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let (_, vocab) = check(hidden, head)?;
    let targets = Targets::read(targets, vocab)?;
    losses_of(hidden, head, &targets, CHUNK)
}

/// The mean of [`token_losses`] over the tokens that are not left out.
///
/// # Shapes
/// As [`token_losses`] → a scalar.
///
/// # Errors
/// As [`token_losses`], and when every token is left out.
pub fn mean_loss(hidden: &Tensor, head: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let (_, vocab) = check(hidden, head)?;
    mean_of(hidden, head, &Targets::read(targets, vocab)?)
}

/// [`mean_loss`] with targets that have been read.
pub(super) fn mean_of(hidden: &Tensor, head: &Tensor, targets: &Targets) -> Result<Tensor> {
    targets.check_some_count()?;
    losses_of(hidden, head, targets, CHUNK)?.sum_all()? / targets.count() as f64
}

/// Next tokens on the host, checked.
pub(super) struct Targets {
    /// B and T.
    shape: (usize, usize),
    /// The ids of those that count.
    ids: Vec<i64>,
    /// Their places among the B·T tokens; `None` where all count.
    places: Option<Vec<i64>>,
}

impl Targets {
    /// # Errors
    /// When `targets` are not (B, T) of `u32` or `i64`, or one is not below `vocab`.
    pub fn read(targets: &Tensor, vocab: usize) -> Result<Self> {
        let [b, t] = targets.dims() else {
            bail!("loss: targets must be (B, T), got {targets:?}")
        };
        if !matches!(targets.dtype(), DType::U32 | DType::I64) {
            bail!(
                "loss: targets must be u32 or i64, got {:?}",
                targets.dtype()
            )
        }
        let all = targets
            .flatten_all()?
            .to_dtype(DType::I64)?
            .to_vec1::<i64>()?;
        let out_of_range = |id: &&i64| usize::try_from(**id).is_ok_and(|id| id >= vocab);
        if let Some(id) = all.iter().find(out_of_range) {
            bail!("loss: target {id} is not in the vocabulary of {vocab}")
        }
        let counted = |id: &i64| *id >= 0;
        let (ids, places) = if all.iter().all(counted) {
            (all, None)
        } else {
            let pairs = all.iter().copied().zip(0..).filter(|(id, _)| counted(id));
            let (ids, places) = pairs.unzip();
            (ids, Some(places))
        };
        Ok(Self {
            shape: (*b, *t),
            ids,
            places,
        })
    }

    /// B and T.
    pub fn shape(&self) -> (usize, usize) {
        self.shape
    }

    fn count(&self) -> usize {
        self.ids.len()
    }

    /// # Errors
    /// When every token is left out.
    pub fn check_some_count(&self) -> Result<()> {
        if self.ids.is_empty() {
            let (b, t) = self.shape;
            bail!("loss: none of the {b}·{t} targets counts, so there is no mean")
        }
        Ok(())
    }
}

/// The dtype to compute in, and V.
fn check(hidden: &Tensor, head: &Tensor) -> Result<(DType, usize)> {
    let (&[_, _, width], &[vocab, head_width]) = (hidden.dims(), head.dims()) else {
        bail!("loss: hidden must be (B, T, C) and head (V, C), got {hidden:?} and {head:?}")
    };
    if width != head_width || width * vocab == 0 {
        bail!("loss: hidden (B, T, C) and head (V, C) must have one width above 0, got {hidden:?} and {head:?}")
    }
    for (name, x) in [("hidden", hidden), ("head", head)] {
        if !matches!(
            x.dtype(),
            DType::F32 | DType::F64 | DType::BF16 | DType::F16
        ) {
            bail!(
                "loss: {name} of dtype {:?} is not supported (f32, f64, bf16, f16 are)",
                x.dtype()
            )
        }
    }
    if !hidden.device().same_device(head.device()) {
        bail!(
            "loss: hidden and head must be on one device, got {:?} and {:?}",
            hidden.device().location(),
            head.device().location()
        )
    }
    let dtype = match [hidden.dtype(), head.dtype()].contains(&DType::F64) {
        true => DType::F64,
        false => DType::F32,
    };
    Ok((dtype, vocab))
}

/// [`token_losses`] with `chunk` logits at a time.
fn losses_of(hidden: &Tensor, head: &Tensor, targets: &Targets, chunk: usize) -> Result<Tensor> {
    let (dtype, vocab) = check(hidden, head)?;
    let (b, t, _) = hidden.dims3()?;
    if targets.shape != (b, t) {
        bail!(
            "loss: hidden has (B, T) {:?}, but the targets {:?}",
            (b, t),
            targets.shape
        )
    }
    let device = hidden.device();
    let tensor = |values: &[i64]| Tensor::from_slice(values, values.len(), device);
    let op = CrossEntropy {
        dtype,
        chunk: (chunk / vocab).max(1),
        ids: tensor(&targets.ids)?,
        places: targets.places.as_deref().map(tensor).transpose()?,
        results: Vec::new(),
        losses: Tensor::zeros((b, t), dtype, device)?,
    };
    let tracked = hidden.track_op() || head.track_op();
    let op = op.forward(&hidden.detach(), &head.detach(), tracked)?;
    match tracked {
        true => hidden.apply_op2(head, op),
        false => Ok(op.losses),
    }
}

/// One call. The losses are computed by [`CrossEntropy::forward`] before this becomes a candle operation, which then
/// only ties them to the graph.
struct CrossEntropy {
    /// What everything is computed in.
    dtype: DType,
    /// Tokens in a chunk.
    chunk: usize,
    /// (N,) of the tokens that count.
    ids: Tensor,
    /// (N,), their places among the B·T tokens; `None` where all count.
    places: Option<Tensor>,
    /// What the forward pass left of each chunk.
    results: Vec<Softmax>,
    /// (B, T).
    losses: Tensor,
}

/// The softmax of a chunk of n tokens, as exp(l − greatest)/sum.
struct Softmax {
    /// (n, 1).
    greatest: Tensor,
    /// (n, 1).
    sum: Tensor,
    /// (n, V), exp(l − greatest), where it is kept.
    exponentials: Option<Tensor>,
}

impl CrossEntropy {
    /// The first token and the number of tokens of each chunk.
    fn chunks(&self) -> Result<impl Iterator<Item = (usize, usize)>> {
        let (count, chunk) = (self.ids.dim(0)?, self.chunk);
        let starts = (0..count).step_by(chunk);
        Ok(starts.map(move |start| (start, chunk.min(count - start))))
    }

    /// (B, T, C) → (n, C) of a chunk's tokens.
    fn rows(&self, hidden: &Tensor, (start, len): (usize, usize)) -> Result<Tensor> {
        let hidden = hidden.flatten(0, 1)?;
        let rows = match &self.places {
            Some(places) => hidden.index_select(&places.narrow(0, start, len)?, 0)?,
            None => hidden.narrow(0, start, len)?,
        };
        rows.to_dtype(self.dtype)
    }

    /// (n, 1) target ids of a chunk.
    fn chosen(&self, (start, len): (usize, usize)) -> Result<Tensor> {
        self.ids.narrow(0, start, len)?.unsqueeze(1)?.contiguous()
    }

    /// Computes the losses. `keep` is whether a backward pass may follow.
    fn forward(mut self, hidden: &Tensor, head: &Tensor, keep: bool) -> Result<Self> {
        let hidden = hidden.contiguous()?;
        let head = head.to_dtype(self.dtype)?; // (V,C)
        let chunks: Vec<_> = self.chunks()?.collect();
        let mut losses = Vec::with_capacity(chunks.len());
        for &chunk in &chunks {
            let logits = self.rows(&hidden, chunk)?.matmul(&head.t()?)?; // (n,V)
            let greatest = logits.max_keepdim(1)?;
            let shifted = logits.broadcast_sub(&greatest)?;
            drop(logits);
            let chosen = shifted.gather(&self.chosen(chunk)?, 1)?;
            let exponentials = shifted.exp()?;
            let sum = exponentials.sum_keepdim(1)?;
            losses.push((sum.log()? - chosen)?.squeeze(1)?);
            if keep {
                self.results.push(Softmax {
                    greatest,
                    sum,
                    exponentials: (chunks.len() == 1).then_some(exponentials),
                });
            }
        }
        if !losses.is_empty() {
            let losses = Tensor::cat(&losses, 0)?;
            self.losses = self.spread(losses)?.reshape(self.losses.shape())?;
        }
        Ok(self)
    }

    /// (N, …) of the tokens that count → (B·T, …), 0 for the others.
    fn spread(&self, counted: Tensor) -> Result<Tensor> {
        let Some(places) = &self.places else {
            return Ok(counted);
        };
        let mut shape = counted.dims().to_vec();
        if let Some(rows) = shape.first_mut() {
            *rows = self.losses.elem_count();
        }
        let zeros = Tensor::zeros(shape, counted.dtype(), counted.device())?;
        zeros.index_add(places, &counted, 0)
    }

    /// dh (B, T, C) and dW (V, C), where they are wanted.
    fn backward(
        &self,
        hidden: &Tensor,
        head: &Tensor,
        upstream: &Tensor,
        [dh_wanted, dw_wanted]: [bool; 2],
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (hidden, weights) = (hidden.contiguous()?, head.to_dtype(self.dtype)?);
        let upstream = upstream.flatten_all()?.to_dtype(self.dtype)?;
        let upstream = match &self.places {
            Some(places) => upstream.index_select(places, 0)?,
            None => upstream,
        };
        let mut dh = Vec::with_capacity(self.results.len());
        let mut dw: Option<Tensor> = None;
        for (chunk, softmax) in self.chunks()?.zip(&self.results) {
            let rows = self.rows(&hidden, chunk)?;
            let exponentials = match &softmax.exponentials {
                Some(exponentials) => exponentials.clone(),
                None => {
                    let logits = rows.matmul(&weights.t()?)?;
                    logits.broadcast_sub(&softmax.greatest)?.exp()?
                }
            };
            let g = upstream.narrow(0, chunk.0, chunk.1)?.unsqueeze(1)?; // (n,1)
            let ds = exponentials.broadcast_mul(&(&g / &softmax.sum)?)?; // (n,V)
            drop(exponentials);
            ds.scatter_add_set(&self.chosen(chunk)?, &g.neg()?, 1)?;
            if dh_wanted {
                dh.push(ds.matmul(&weights)?.to_dtype(hidden.dtype())?);
            }
            if dw_wanted {
                let part = ds.t()?.matmul(&rows)?; // (V,C)
                dw = Some(match dw {
                    Some(sum) => (sum + part)?,
                    None => part,
                });
            }
        }
        let dh = match (dh_wanted, dh.is_empty()) {
            (false, _) => None,
            (true, true) => Some(hidden.zeros_like()?),
            (true, false) => {
                let dh = self.spread(Tensor::cat(&dh, 0)?)?;
                Some(dh.reshape(hidden.shape())?)
            }
        };
        let dw = match (dw_wanted, dw) {
            (false, _) => None,
            (true, Some(dw)) => Some(dw.to_dtype(head.dtype())?),
            (true, None) => Some(head.zeros_like()?),
        };
        Ok((dh, dw))
    }
}

/// A copy of the losses' memory, as an operation returns it.
macro_rules! copy_losses {
    ($losses:expr, $device:ident) => {{
        let (storage, layout) = $losses.storage_and_layout();
        match &*storage {
            Storage::$device(storage) => Ok((storage.try_clone(layout)?, $losses.shape().clone())),
            _ => bail!("loss: the losses are not on the inputs' device"),
        }
    }};
}

impl CustomOp2 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross-entropy"
    }

    fn cpu_fwd(
        &self,
        _hidden: &CpuStorage,
        _hidden_layout: &Layout,
        _head: &CpuStorage,
        _head_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        copy_losses!(self.losses, Cpu)
    }

    fn cuda_fwd(
        &self,
        _hidden: &CudaStorage,
        _hidden_layout: &Layout,
        _head: &CudaStorage,
        _head_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        copy_losses!(self.losses, Cuda)
    }

    fn metal_fwd(
        &self,
        _hidden: &MetalStorage,
        _hidden_layout: &Layout,
        _head: &MetalStorage,
        _head_layout: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        copy_losses!(self.losses, Metal)
    }

    fn bwd(
        &self,
        hidden: &Tensor,
        head: &Tensor,
        _losses: &Tensor,
        upstream: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let wanted = [hidden.track_op(), head.track_op()];
        self.backward(&hidden.detach(), &head.detach(), upstream, wanted)
    }
}
