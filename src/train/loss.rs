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
//! chunk, what it was made from is kept and there are three.
//!
//! On a GPU a chunk's losses are one kernel, and so is its ds. Products of f32 are made by its ordinary cores. Where h and
//! W are bf16 its tensor cores make them, which add up exact products in f32 and leave them there: the logits are not
//! rounded. Of ds they take two bf16 numbers that add up to it in 16 bits.

mod call;
#[cfg(feature = "cuda")]
mod cuda;

use candle_core::backend::BackendStorage;
use candle_core::{
    bail, CpuStorage, CudaStorage, CustomOp2, DType, Device, Layout, MetalStorage, Result, Shape,
    Storage, Tensor,
};

/// Logits in a chunk on the CPU and other devices without a kernel: 16 MiB of f32, so that much of it stays in caches.
const CHUNK: usize = 1 << 22;

/// On an NVIDIA GPU: 256 MiB of f32, which is 512 tokens of a vocabulary of 2^17. Products of fewer would not fill it.
const CUDA_CHUNK: usize = 1 << 26;

/// Logits in a chunk on a device.
fn chunk_on(device: &Device) -> usize {
    match device.is_cuda() {
        true => CUDA_CHUNK,
        false => CHUNK,
    }
}

/// The cross-entropy of each token's next one, from hidden states: never more than one chunk of logits is alive,
/// forward or backward, and backward its gradient beside it. A chunk is 2^22 logits, on an NVIDIA GPU 2^26 (256 MiB of
/// f32), at least a token.
///
/// Differentiable in `hidden` and `head`. Products, softmax and the sum of the head's gradient are in f32 whatever the
/// inputs' dtypes (f64 where one of them is f64), and each gradient is rounded once. On an NVIDIA GPU, where both inputs are
/// bf16, tensor cores multiply; then the logits' gradient goes into its products with 16 bits. A token whose target is negative
/// is left out: its loss is 0, it passes no gradient, and its hidden state is not read. Logits may be of any size; nothing
/// is clamped, so an infinity or a NaN in an input goes where arithmetic takes it.
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
    losses_of(hidden, head, &targets, chunk_on(hidden.device()))
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
    let losses = losses_of(hidden, head, targets, chunk_on(hidden.device()))?;
    losses.sum_all()? / targets.count() as f64
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
            bail!("loss: targets must be (B, T), got {:?}", targets.dims())
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
        bail!(
            "loss: hidden must be (B, T, C) and head (V, C), got {:?} and {:?}",
            hidden.dims(),
            head.dims()
        )
    };
    if width != head_width || width * vocab == 0 {
        bail!(
            "loss: hidden (B, T, C) and head (V, C) must have one width and V and C be above 0, got {:?} and {:?}",
            hidden.dims(),
            head.dims()
        )
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
    // A GPU has no memory of no length, but a view of some can be.
    let tensor = |values: &[i64]| match values {
        [] => Tensor::zeros(1, DType::I64, device)?.narrow(0, 0, 0),
        _ => Tensor::from_slice(values, values.len(), device),
    };
    // On a GPU index_add takes a step for each index, one after the other; index_select does not.
    let spread = match (&targets.places, device.is_cuda()) {
        (Some(places), true) => Some(tensor(&inverse(places, b * t))?),
        _ => None,
    };
    let halves = [hidden, head].iter().all(|x| x.dtype() == DType::BF16);
    let op = CrossEntropy {
        spread,
        dtype,
        operands: match cfg!(feature = "cuda") && device.is_cuda() && halves {
            true => DType::BF16,
            false => dtype,
        },
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

/// For each of so many tokens its place among those that count; `i64::MAX` for one that does not, which candle's
/// index_select makes zeros of.
fn inverse(places: &[i64], tokens: usize) -> Vec<i64> {
    let mut inverse = vec![i64::MAX; tokens];
    for (i, place) in places.iter().enumerate() {
        if let Some(here) = inverse.get_mut(*place as usize) {
            *here = i as i64;
        }
    }
    inverse
}

/// One call. The losses are computed by [`CrossEntropy::forward`] before this becomes a candle operation, which then
/// only ties them to the graph.
struct CrossEntropy {
    /// What everything is computed in.
    dtype: DType,
    /// What products are made of; if another, by tensor cores.
    operands: DType,
    /// Tokens in a chunk.
    chunk: usize,
    /// (N,) of the tokens that count.
    ids: Tensor,
    /// (N,), their places among the B·T tokens; `None` where all count.
    places: Option<Tensor>,
    /// (B·T,), where there are `places` on a GPU: their [inverse].
    spread: Option<Tensor>,
    /// What the forward pass left of each chunk.
    results: Vec<Softmax>,
    /// (B, T).
    losses: Tensor,
}

/// The softmax of a chunk of n tokens, as exp(l − greatest)/sum. On a GPU greatest and sum are (n).
struct Softmax {
    /// (n, 1).
    greatest: Tensor,
    /// (n, 1).
    sum: Tensor,
    /// (n, V), exp(l − greatest), where it is kept; on a GPU l.
    kept: Option<Tensor>,
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
        rows.to_dtype(self.operands)
    }

    /// The sum of x·y over the summands x.
    fn product(&self, summands: &[Tensor], y: &Tensor) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if self.operands != self.dtype {
            return crate::gpu::product(summands, y);
        }
        match summands {
            [x] => x.matmul(y),
            _ => bail!("loss: a product of {} summands", summands.len()),
        }
    }

    /// (n, 1) target ids of a chunk.
    fn chosen(&self, (start, len): (usize, usize)) -> Result<Tensor> {
        self.ids.narrow(0, start, len)?.unsqueeze(1)?.contiguous()
    }

    /// Computes the losses. `keep` is whether a backward pass may follow.
    fn forward(mut self, hidden: &Tensor, head: &Tensor, keep: bool) -> Result<Self> {
        let hidden = hidden.contiguous()?;
        let head = head.to_dtype(self.operands)?.contiguous()?; // (V,C)
        let chunks: Vec<_> = self.chunks()?.collect();
        let mut losses = Vec::with_capacity(chunks.len());
        for &chunk in &chunks {
            let logits = self.product(&[self.rows(&hidden, chunk)?], &head.t()?)?; // (n,V)
            #[cfg(feature = "cuda")]
            if logits.device().is_cuda() {
                let targets = self.ids.narrow(0, chunk.0, chunk.1)?;
                let [greatest, sum, found] = cuda::losses(&logits, &targets)?;
                losses.push(found);
                if keep {
                    self.results.push(Softmax {
                        greatest,
                        sum,
                        kept: (chunks.len() == 1).then_some(logits),
                    });
                }
                continue;
            }
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
                    kept: (chunks.len() == 1).then_some(exponentials),
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
        if let Some(spread) = &self.spread {
            return counted.index_select(spread, 0);
        }
        let mut shape = counted.dims().to_vec();
        if let Some(rows) = shape.first_mut() {
            *rows = self.losses.elem_count();
        }
        let zeros = Tensor::zeros(shape, counted.dtype(), counted.device())?;
        zeros.index_add(places, &counted, 0)
    }

    /// Summands of ds (n, V) of a chunk, whose hidden states are `rows`.
    fn logits_gradient(
        &self,
        rows: &Tensor,
        weights: &Tensor,
        upstream: &Tensor,
        chunk: (usize, usize),
        Softmax {
            greatest,
            sum,
            kept,
        }: &Softmax,
    ) -> Result<Vec<Tensor>> {
        let logits = || self.product(std::slice::from_ref(rows), &weights.t()?);
        let g = upstream.narrow(0, chunk.0, chunk.1)?; // (n,)
        #[cfg(feature = "cuda")]
        if rows.device().is_cuda() {
            let logits = kept.clone().map_or_else(logits, Ok)?;
            let targets = self.ids.narrow(0, chunk.0, chunk.1)?;
            return cuda::gradient(&logits, &targets, [greatest, sum], &g, self.operands);
        }
        let exponentials = match kept {
            Some(exponentials) => exponentials.clone(),
            None => logits()?.broadcast_sub(greatest)?.exp()?,
        };
        let g = g.unsqueeze(1)?; // (n,1)
        let ds = exponentials.broadcast_mul(&(&g / sum)?)?; // (n,V)
        drop(exponentials);
        ds.scatter_add_set(&self.chosen(chunk)?, &g.neg()?, 1)?;
        Ok(vec![ds])
    }

    /// dh (B, T, C) and dW (V, C), where they are wanted.
    fn backward(
        &self,
        hidden: &Tensor,
        head: &Tensor,
        upstream: &Tensor,
        [dh_wanted, dw_wanted]: [bool; 2],
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        if self.ids.elem_count() == 0 {
            let zeros = |x: &Tensor, wanted: bool| wanted.then(|| x.zeros_like()).transpose();
            return Ok((zeros(hidden, dh_wanted)?, zeros(head, dw_wanted)?));
        }
        let hidden = hidden.contiguous()?;
        let weights = head.to_dtype(self.operands)?.contiguous()?;
        let upstream = upstream.flatten_all()?.to_dtype(self.dtype)?;
        let upstream = match &self.places {
            Some(places) => upstream.index_select(places, 0)?,
            None => upstream,
        };
        let mut dh = Vec::with_capacity(self.results.len());
        let mut dw: Option<Tensor> = None;
        for (chunk, softmax) in self.chunks()?.zip(&self.results) {
            let rows = self.rows(&hidden, chunk)?;
            let ds = self.logits_gradient(&rows, &weights, &upstream, chunk, softmax)?; // (n,V)
            if dh_wanted {
                dh.push(self.product(&ds, &weights)?.to_dtype(hidden.dtype())?);
            }
            if dw_wanted {
                let turned = ds.iter().map(Tensor::t).collect::<Result<Vec<_>>>()?;
                let part = self.product(&turned, &rows)?; // (V,C)
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

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Var, D};
    use candle_nn::ops::log_softmax;

    const CPU: Device = Device::Cpu;

    fn random(shape: impl Into<Shape>) -> Result<Tensor> {
        crate::drawn::normal(1., shape)
    }

    fn difference(a: &Tensor, b: &Tensor) -> Result<f64> {
        let [a, b] = [a.to_dtype(DType::F64)?, b.to_dtype(DType::F64)?];
        let difference = (a - b)?.abs()?.flatten_all()?.to_vec1::<f64>()?;
        Ok(difference.into_iter().fold(0., |max, x| match x.is_nan() {
            true => f64::INFINITY,
            false => f64::max(max, x),
        }))
    }

    /// Losses (B, T) by all logits at once, 0 where a target is negative.
    fn by_full_logits(hidden: &Tensor, head: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let logits = hidden.contiguous()?.broadcast_matmul(&head.t()?)?;
        let targets = targets.to_dtype(DType::I64)?;
        let counts = targets.ge(0i64)?;
        let chosen = counts.where_cond(&targets, &targets.zeros_like()?)?;
        let picked = log_softmax(&logits, D::Minus1)?.gather(&chosen.unsqueeze(2)?, 2)?;
        let losses = picked.squeeze(2)?.neg()?;
        counts.where_cond(&losses, &losses.zeros_like()?)
    }

    /// Losses, and the gradients of hidden and head for an upstream gradient that differs from token to token.
    fn with_gradients(
        hidden: &Tensor,
        head: &Tensor,
        losses: impl Fn(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<[Tensor; 3]> {
        let (hidden, head) = (Var::from_tensor(hidden)?, Var::from_tensor(head)?);
        let losses = losses(&hidden, &head)?;
        let (b, t) = losses.dims2()?;
        let upstream = Tensor::arange(0u32, (b * t) as u32, &CPU)?.to_dtype(losses.dtype())?;
        let upstream = ((upstream * 0.7)?.sin()? + 1.2)?.reshape((b, t))?;
        let upstream = upstream.to_device(losses.device())?;
        let gradients = (&losses * upstream)?.sum_all()?.backward()?;
        let gradient = |x: &Tensor| match gradients.get(x) {
            Some(gradient) => Ok(gradient.detach()),
            None => bail!("no gradient"),
        };
        Ok([losses.detach(), gradient(&hidden)?, gradient(&head)?])
    }

    fn some_targets(b: usize, t: usize, vocab: usize, left_out: bool) -> Result<Tensor> {
        let id = |i: usize| match left_out && i % 3 == 1 {
            true => -100,
            false => ((i * 31 + 5) % vocab) as i64,
        };
        Tensor::from_vec((0..b * t).map(id).collect::<Vec<_>>(), (b, t), &CPU)
    }

    #[test]
    fn losses_in_any_chunks_equal_those_of_full_logits() -> Result<()> {
        for (b, t, c, vocab) in [(1, 1, 1, 1), (2, 7, 5, 11), (3, 5, 8, 257), (1, 13, 3, 2)] {
            let (hidden, head) = (random((b, t, c))?, random((vocab, c))?);
            for left_out in [false, true] {
                let targets = some_targets(b, t, vocab, left_out)?;
                let expected =
                    with_gradients(&hidden, &head, |h, w| by_full_logits(h, w, &targets))?;
                let counted = Targets::read(&targets, vocab)?;
                // Less than a token, one, some that leave a shorter last chunk, exactly all, and more.
                for chunk in [1, vocab, 4 * vocab, 5 * vocab, b * t * vocab, CHUNK] {
                    let found =
                        with_gradients(&hidden, &head, |h, w| losses_of(h, w, &counted, chunk))?;
                    for (found, expected) in found.iter().zip(&expected) {
                        assert_eq!(found.dims(), expected.dims());
                        let difference = difference(found, expected)?;
                        assert!(
                            difference < 1e-12,
                            "B {b} T {t} C {c} V {vocab}, chunk {chunk}: {difference:e}"
                        );
                    }
                }
            }
        }
        Ok(())
    }

    /// Tensor cores take bf16: their logits are those of f32, their gradients are rounded once.
    #[test]
    #[cfg(feature = "cuda")]
    fn losses_on_a_gpu_in_any_chunks_equal_those_on_the_cpu() -> Result<()> {
        let Some(gpu) = crate::drawn::gpu("losses in chunks") else {
            return Ok(());
        };
        for (b, t, c, vocab) in [
            (1, 1, 1, 1),
            (2, 7, 5, 11),
            (3, 50, 64, 257),
            (1, 130, 24, 3000),
        ] {
            for (dtype, bar) in [(DType::F64, 1e-12), (DType::F32, 1e-5), (DType::BF16, 1e-5)] {
                let (hidden, head) = (random((b, t, c))?, random((vocab, c))?);
                let [hidden, head] = [hidden.to_dtype(dtype)?, head.to_dtype(dtype)?];
                let targets = some_targets(b, t, vocab, true)?;
                let counted = Targets::read(&targets, vocab)?;
                let wide = |x: &Tensor| x.to_dtype(DType::F64);
                let expected = with_gradients(&wide(&hidden)?, &wide(&head)?, |h, w| {
                    by_full_logits(h, w, &targets)
                })?;
                let [hidden, head] = [hidden.to_device(&gpu)?, head.to_device(&gpu)?];
                for chunk in [1, 5 * vocab, CUDA_CHUNK] {
                    let found =
                        with_gradients(&hidden, &head, |h, w| losses_of(h, w, &counted, chunk))?;
                    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                        let largest = expected.abs()?.flatten_all()?.max(0)?.to_scalar::<f64>()?;
                        // A gradient may be half a unit of bf16 off; losses are f32.
                        let rounded = if i > 0 && dtype == DType::BF16 {
                            1. / 256.
                        } else {
                            0.
                        };
                        let off = difference(&found.to_device(&CPU)?, expected)?;
                        assert!(
                            off <= (bar + rounded) * largest,
                            "{dtype:?} C {c} V {vocab}, chunk {chunk}, {i}: {off:e} of {largest:e}"
                        );
                    }
                }
            }
        }
        Ok(())
    }

    /// Without the second summand they would be off by up to 2^-9.
    #[test]
    #[cfg(feature = "cuda")]
    fn gradient_of_logits_in_two_summands_has_sixteen_bits() -> Result<()> {
        let Some(gpu) = crate::drawn::gpu("the gradient of logits in two summands") else {
            return Ok(());
        };
        for (rows, vocab) in [(1, 1), (9, 8), (7, 301), (5, 2049), (3, 4096)] {
            let logits = (random((rows, vocab))?.to_dtype(DType::F32)? * 5.)?.to_device(&gpu)?;
            let ids: Vec<i64> = (0..rows).map(|i| (i * 31 % vocab) as i64).collect();
            let targets = Tensor::from_slice(&ids, rows, &gpu)?;
            let [greatest, sum, _] = cuda::losses(&logits, &targets)?;
            for size in [1f32, 1e-6, 1e-25, 1e30, f32::INFINITY, f32::NAN] {
                let upstream = Tensor::full(size, rows, &gpu)?;
                let of = |dtype| -> Result<Vec<Vec<f32>>> {
                    let softmax = [&greatest, &sum];
                    let summands = cuda::gradient(&logits, &targets, softmax, &upstream, dtype)?;
                    let values = |x: &Tensor| x.to_dtype(DType::F32)?.flatten_all()?.to_vec1();
                    summands.iter().map(values).collect()
                };
                let (whole, parts) = (of(DType::F32)?, of(DType::BF16)?);
                let ([whole], [high, low]) = (&whole[..], &parts[..]) else {
                    bail!("{} and {} summands", whole.len(), parts.len())
                };
                for ((whole, high), low) in whole.iter().zip(high).zip(low) {
                    let both = high + low;
                    let same = match whole.is_finite() {
                        // Where numbers are so small that they lose bits themselves, so do these.
                        true => (both - whole).abs() <= whole.abs() / 65_536. + 1e-40,
                        false => both == *whole || both.is_nan() && whole.is_nan(),
                    };
                    assert!(same, "{size:e}: {whole:e} is not {high:e} + {low:e}");
                }
            }
        }
        Ok(())
    }

    #[test]
    fn mean_loss_equals_cross_entropy_of_candle() -> Result<()> {
        let (hidden, head) = (random((2, 9, 6))?, random((37, 6))?);
        let targets = some_targets(2, 9, 37, false)?;
        for (dtype, bar) in [(DType::F64, 1e-12), (DType::F32, 2e-6)] {
            let [hidden, head] = [hidden.to_dtype(dtype)?, head.to_dtype(dtype)?];
            let (hidden, head) = (Var::from_tensor(&hidden)?, Var::from_tensor(&head)?);
            let logits = hidden.reshape((18, 6))?.matmul(&head.t()?)?;
            let expected = candle_nn::loss::cross_entropy(&logits, &targets.flatten_all()?)?;
            for targets in [targets.clone(), targets.to_dtype(DType::U32)?] {
                let found = mean_loss(&hidden, &head, &targets)?;
                assert_eq!(found.dtype(), dtype);
                assert!(difference(&found, &expected)? < bar);
                let (found, expected) = (found.backward()?, expected.backward()?);
                for x in [&hidden, &head] {
                    let (Some(found), Some(expected)) = (found.get(x), expected.get(x)) else {
                        bail!("no gradient")
                    };
                    assert!(difference(found, expected)? < bar);
                }
            }
        }
        Ok(())
    }

    #[test]
    fn mean_loss_with_targets_left_out_is_the_mean_of_the_others() -> Result<()> {
        let (hidden, head) = (random((1, 4, 3))?, random((5, 3))?);
        let targets = Tensor::new(&[[2i64, -1, 4, -7]], &CPU)?;
        let losses = token_losses(&hidden, &head, &targets)?.to_vec2::<f64>()?;
        assert_eq!([losses[0][1], losses[0][3]], [0., 0.]);
        let mean = mean_loss(&hidden, &head, &targets)?.to_scalar::<f64>()?;
        assert!((mean - (losses[0][0] + losses[0][2]) / 2.).abs() < 1e-15);
        Ok(())
    }

    #[test]
    fn losses_of_strided_inputs_equal_those_of_contiguous_ones() -> Result<()> {
        let (wide, tall) = (random((7, 4, 6))?, random((5, 13))?);
        let hidden = wide.transpose(0, 1)?.narrow(2, 1, 5)?; // (4,7,5)
        let head = tall.t()?; // (13,5)
        let targets = some_targets(7, 4, 13, true)?.t()?;
        assert!(!hidden.is_contiguous() && !head.is_contiguous() && !targets.is_contiguous());
        let expected = by_full_logits(&hidden, &head, &targets.contiguous()?)?;
        let found = token_losses(&hidden, &head, &targets)?;
        assert!(difference(&found, &expected)? < 1e-12);
        // As a view in the graph: gradients come back through it.
        let (wide, tall) = (Var::from_tensor(&wide)?, Var::from_tensor(&tall)?);
        let hidden = wide.transpose(0, 1)?.narrow(2, 1, 5)?;
        let found = token_losses(&hidden, &tall.t()?, &targets)?;
        let expected = by_full_logits(&hidden, &tall.t()?, &targets.contiguous()?)?;
        let (found, expected) = (
            found.sum_all()?.backward()?,
            expected.sum_all()?.backward()?,
        );
        for x in [&wide, &tall] {
            let (Some(found), Some(expected)) = (found.get(x), expected.get(x)) else {
                bail!("no gradient")
            };
            assert!(difference(found, expected)? < 1e-12);
        }
        Ok(())
    }

    #[test]
    fn losses_in_lower_precision_err_at_most_twice_as_much_as_full_logits_do() -> Result<()> {
        let (b, t, c, vocab) = (2, 33, 48, 301);
        let targets = some_targets(b, t, vocab, true)?;
        let counted = Targets::read(&targets, vocab)?;
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let hidden = random((b, t, c))?.to_dtype(dtype)?;
            let head = random((vocab, c))?.to_dtype(dtype)?;
            let [exact_hidden, exact_head] =
                [hidden.to_dtype(DType::F64)?, head.to_dtype(DType::F64)?];
            let full = |h: &Tensor, w: &Tensor| by_full_logits(h, w, &targets);
            let exact = with_gradients(&exact_hidden, &exact_head, full)?;
            let plain = with_gradients(&hidden, &head, full)?;
            for chunk in [CHUNK, 7 * vocab] {
                let found =
                    with_gradients(&hidden, &head, |h, w| losses_of(h, w, &counted, chunk))?;
                assert_eq!(found[0].dtype(), DType::F32);
                for (i, name) in ["loss", "dh", "dW"].into_iter().enumerate() {
                    let (error, allowed) = (
                        difference(&found[i], &exact[i])?,
                        2. * difference(&plain[i], &exact[i])?,
                    );
                    println!("{dtype:?} {name}, chunk {chunk}: {error:.2e}, allowed {allowed:.2e}");
                    assert!(
                        error <= allowed,
                        "{dtype:?} {name}: {error:e} of {allowed:e}"
                    );
                }
                assert_eq!([found[1].dtype(), found[2].dtype()], [dtype; 2]);
            }
        }
        Ok(())
    }

    #[test]
    fn loss_gradients_equal_finite_differences() -> Result<()> {
        let (hidden, head) = (random((2, 3, 4))?, random((7, 4))?);
        let targets = Tensor::new(&[[6i64, 0, -1], [3, 3, 1]], &CPU)?;
        let counted = Targets::read(&targets, 7)?;
        let losses = |h: &Tensor, w: &Tensor| losses_of(h, w, &counted, 14);
        let [_, dh, dw] = with_gradients(&hidden, &head, losses)?;
        let upstream = |i: usize| (0.7 * i as f64).sin() + 1.2;
        let weighted = |h: &Tensor, w: &Tensor| -> Result<f64> {
            let losses = losses(h, w)?.flatten_all()?.to_vec1::<f64>()?;
            Ok(losses
                .iter()
                .enumerate()
                .map(|(i, x)| upstream(i) * x)
                .sum())
        };
        let moved = |x: &Tensor, i: usize, step: f64| -> Result<Tensor> {
            let mut values = x.flatten_all()?.to_vec1::<f64>()?;
            values[i] += step;
            Tensor::from_vec(values, x.shape(), &CPU)
        };
        let step = 1e-5;
        for (i, found) in dh.flatten_all()?.to_vec1::<f64>()?.into_iter().enumerate() {
            let at = |step| weighted(&moved(&hidden, i, step)?, &head);
            let expected = (at(step)? - at(-step)?) / (2. * step);
            assert!(
                (found - expected).abs() < 1e-8,
                "dh {i}: {found} {expected}"
            );
        }
        for (i, found) in dw.flatten_all()?.to_vec1::<f64>()?.into_iter().enumerate() {
            let at = |step| weighted(&hidden, &moved(&head, i, step)?);
            let expected = (at(step)? - at(-step)?) / (2. * step);
            assert!(
                (found - expected).abs() < 1e-8,
                "dW {i}: {found} {expected}"
            );
        }
        Ok(())
    }

    #[test]
    fn losses_of_huge_logits_stay_exact() -> Result<()> {
        // Logits ±3·10⁴, then all equal and far from 0.
        let hidden = Tensor::new(&[[[1e4f32, 0.], [-1e4, 0.], [0., 1e4]]], &CPU)?;
        let head = Tensor::new(&[[3f32, -7.], [-3., -7.], [1., -7.]], &CPU)?;
        let targets = Tensor::new(&[[0u32, 0, 2]], &CPU)?;
        let counted = Targets::read(&targets, 3)?;
        for chunk in [1, CHUNK] {
            let [losses, dh, dw] =
                with_gradients(&hidden, &head, |h, w| losses_of(h, w, &counted, chunk))?;
            let losses = losses.to_vec2::<f32>()?;
            assert_eq!(losses[0][..2], [0., 6e4]);
            assert!((losses[0][2] - 3f32.ln()).abs() < 1e-6);
            for gradient in [dh, dw] {
                let all = gradient.flatten_all()?.to_vec1::<f32>()?;
                assert!(all.iter().all(|x| x.is_finite()));
            }
        }
        Ok(())
    }

    #[test]
    fn losses_left_out_neither_read_nor_pass_on_a_nan() -> Result<()> {
        let hidden = Tensor::new(&[[[f32::NAN, 1.], [0.5, 2.], [f32::INFINITY, 0.]]], &CPU)?;
        let head = random((6, 2))?.to_dtype(DType::F32)?;
        let targets = Targets::read(&Tensor::new(&[[-1i64, 5, -1]], &CPU)?, 6)?;
        for chunk in [1, CHUNK] {
            let found = with_gradients(&hidden, &head, |h, w| losses_of(h, w, &targets, chunk))?;
            for x in &found {
                let all = x.flatten_all()?.to_vec1::<f32>()?;
                assert!(all.iter().all(|x| x.is_finite()));
            }
            let dh = found[1].to_vec3::<f32>()?;
            assert_eq!((&dh[0][0], &dh[0][2]), (&vec![0., 0.], &vec![0., 0.]));
        }
        Ok(())
    }

    #[test]
    fn losses_all_left_out_are_zero_with_zero_gradients_and_no_mean() -> Result<()> {
        let (hidden, head) = (random((2, 3, 4))?, random((5, 4))?);
        let targets = Tensor::full(-1i64, (2, 3), &CPU)?;
        let counted = Targets::read(&targets, 5)?;
        let found = with_gradients(&hidden, &head, |h, w| losses_of(h, w, &counted, CHUNK))?;
        for x in &found {
            assert!(x.flatten_all()?.to_vec1::<f64>()?.iter().all(|x| *x == 0.));
        }
        let message = mean_loss(&hidden, &head, &targets).unwrap_err().to_string();
        assert!(message.contains("none of the 2·3 targets"), "{message}");
        Ok(())
    }

    #[test]
    fn losses_of_one_tracked_side_give_its_gradient_alone() -> Result<()> {
        let (hidden, head) = (random((1, 5, 4))?, random((9, 4))?);
        let targets = some_targets(1, 5, 9, false)?;
        let expected = with_gradients(&hidden, &head, |h, w| by_full_logits(h, w, &targets))?;
        let check = |found: Option<&Tensor>, expected: &Tensor| match found {
            Some(found) => difference(found, expected),
            None => bail!("no gradient"),
        };
        // Not leaves themselves, so that candle asks for their gradients on the way.
        let weights = Tensor::ones((1, 5), DType::F64, &CPU)?;
        let upstream = Tensor::arange(0u32, 5, &CPU)?.to_dtype(DType::F64)?;
        let upstream = (((upstream * 0.7)?.sin()? + 1.2)?.reshape((1, 5))? * weights)?;
        let var = Var::from_tensor(&hidden)?;
        let losses = token_losses(&(var.as_tensor() * 1.)?, &head, &targets)?;
        let gradients = (losses * &upstream)?.sum_all()?.backward()?;
        assert!(check(gradients.get(&var), &expected[1])? < 1e-12);
        let var = Var::from_tensor(&head)?;
        let losses = token_losses(&hidden, &(var.as_tensor() * 1.)?, &targets)?;
        let gradients = (losses * &upstream)?.sum_all()?.backward()?;
        assert!(check(gradients.get(&var), &expected[2])? < 1e-12);
        assert!(!token_losses(&hidden, &head, &targets)?.track_op());
        Ok(())
    }

    #[test]
    fn losses_of_what_does_not_fit_are_errors_that_name_it() -> Result<()> {
        let (hidden, head) = (random((2, 3, 4))?, random((5, 4))?);
        let targets = Tensor::zeros((2, 3), DType::U32, &CPU)?;
        let refused = |hidden: &Tensor, head: &Tensor, targets: &Tensor, part: &str| {
            let message = match token_losses(hidden, head, targets) {
                Ok(losses) => bail!("{losses:?} for {part}"),
                Err(error) => error.to_string(),
            };
            assert!(message.contains(part), "{message} does not tell {part}");
            Ok(())
        };
        refused(&hidden, &random((5, 3))?, &targets, "[5, 3]")?;
        refused(
            &hidden.narrow(0, 0, 1)?.squeeze(0)?,
            &head,
            &targets,
            "[3, 4]",
        )?;
        refused(&hidden, &head.unsqueeze(0)?, &targets, "[1, 5, 4]")?;
        refused(&hidden, &head, &targets.narrow(1, 0, 2)?, "(2, 2)")?;
        refused(&hidden, &head, &targets.flatten_all()?, "[6]")?;
        refused(&hidden, &head, &targets.to_dtype(DType::U8)?, "U8")?;
        refused(&hidden.to_dtype(DType::U32)?, &head, &targets, "U32")?;
        let beyond = Tensor::new(&[[0i64, 4, 1], [5, -1, 0]], &CPU)?;
        refused(&hidden, &head, &beyond, "target 5")?;
        refused(
            &hidden,
            &head,
            &beyond.abs()?.to_dtype(DType::U32)?,
            "target 5",
        )?;
        Ok(())
    }
}
