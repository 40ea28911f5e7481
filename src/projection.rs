//! Projections without bias, y = x·Wᵀ, as one operation each, heads taken apart and put together on the way, and the
//! result added to the stream where it is meant for it.
//!
//! With dy the gradient of the result, dx = dy·W and dW = dyᵀ·x. In candle's own operations a projection is a product
//! between views, and each of them, backward, adds its gradient to a tensor of zeros.

use crate::gpu::has_kernels;
use crate::sum;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    bail, CpuStorage, CudaStorage, CustomOp2, CustomOp3, Layout, MetalStorage, Result, Shape,
    Tensor, D,
};
use candle_nn::{Init, VarBuilder};

/// A projection from C numbers to N.
#[derive(Debug, Clone)]
pub(crate) struct Projection {
    /// (N, C)
    weight: Tensor,
}

/// How the numbers of an operand lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// (…, C)
    Tokens,
    /// (B, H, T, D), C being H·D.
    Heads(usize),
}

impl Projection {
    /// Its weight from `vb`, which draws it from `init` where it creates it.
    pub fn new(from: usize, to: usize, init: Init, vb: VarBuilder) -> Result<Self> {
        let weight = vb.get_with_hints((to, from), "weight", init)?;
        Ok(Self { weight })
    }

    /// With the weight (N, C) of another part.
    pub fn of(weight: Tensor) -> Self {
        Self { weight }
    }

    /// (N, C)
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// (…, C) → (…, N)
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.apply(x, Order::Tokens, Order::Tokens, None)
    }

    /// The same, added to the stream (…, N) if there is one.
    pub fn forward_onto(&self, stream: Option<&Tensor>, x: &Tensor) -> Result<Tensor> {
        self.apply(x, Order::Tokens, Order::Tokens, stream)
    }

    /// (B, T, C) → (B, H, T, D), N being H·D.
    pub fn split_into_heads(&self, x: &Tensor, heads: usize) -> Result<Tensor> {
        if self.is_copied(x) {
            return self.apply(x, Order::Tokens, Order::Heads(heads), None);
        }
        let y = self.forward(x)?;
        let (b, t, n) = y.dims3()?;
        y.reshape((b, t, heads, n / heads.max(1)))?.transpose(1, 2)
    }

    /// (B, H, T, D) → (B, T, N), C being H·D, added to the stream (B, T, N) if there is one.
    pub fn merge_heads_onto(&self, stream: Option<&Tensor>, x: &Tensor) -> Result<Tensor> {
        let (b, h, t, d) = x.dims4()?;
        if self.is_copied(x) {
            return self.apply(x, Order::Heads(h), Order::Tokens, stream);
        }
        self.forward_onto(stream, &x.transpose(1, 2)?.reshape((b, t, h * d))?)
    }

    /// Whether heads are copied on the way, so that gradients pass no views: on a GPU copies are cheap, and candle's sums
    /// over views are not.
    fn is_copied(&self, x: &Tensor) -> bool {
        x.device().is_cuda() && (x.track_op() || self.weight.track_op())
    }

    fn apply(&self, x: &Tensor, from: Order, to: Order, stream: Option<&Tensor>) -> Result<Tensor> {
        let c = match from {
            Order::Tokens => x.dims().last().copied(),
            Order::Heads(h) => x.dims().last().map(|d| d * h),
        };
        let (n, width) = self.weight.dims2()?;
        if c != Some(width) {
            bail!(
                "projection: {:?} cannot be taken by a weight {:?}",
                x.dims(),
                (n, width)
            )
        }
        if let Order::Heads(h) = to {
            if h == 0 || n % h != 0 || x.rank() != 3 {
                bail!(
                    "projection: {:?} to {n} numbers cannot be cut into {h} heads",
                    x.dims()
                )
            }
        }
        let weight = self.weight.contiguous()?;
        let x = match from {
            Order::Tokens => x.contiguous()?,
            Order::Heads(_) => x.clone(),
        };
        let op = Project { from, to };
        let tracked = x.track_op() || weight.track_op();
        let Some(stream) = stream else {
            return match tracked {
                true => x.apply_op2(&weight, op),
                false => x.apply_op2_no_bwd(&weight, &op),
            };
        };
        // Without gradients nothing is gained; and a stream that does not fit is the sum's to refuse.
        let fits = || {
            let shape = op.shape(x.shape(), n)?;
            Ok::<_, candle_core::Error>(&shape == stream.shape() && x.dtype() == stream.dtype())
        };
        if !tracked || !has_kernels(x.device()) || stream.elem_count() == 0 || !fits()? {
            return sum::sum(stream, &self.apply(&x, from, to, None)?);
        }
        x.apply_op3(&weight, &stream.contiguous()?, Onto(op))
    }
}

/// A projection as one candle operation over (x, weight), both contiguous unless x is heads.
struct Project {
    from: Order,
    to: Order,
}

/// The same over (x, weight, stream): their sum, the stream contiguous and like the result.
struct Onto(Project);

impl Project {
    /// `reorder` gives the elements of a view in its order.
    fn forward<S: BackendStorage>(
        &self,
        (x, x_layout): (&S, &Layout),
        (weight, weight_layout): (&S, &Layout),
        reorder: impl Fn(&S, &Layout) -> Result<S>,
    ) -> Result<(S, Shape)> {
        let (n, c) = weight_layout.shape().dims2()?;
        let rows = x_layout.shape().elem_count() / c.max(1);
        let transposed = weight_layout.transpose(0, 1)?;
        let sizes = (1, rows, n, c);
        let product = match self.from {
            Order::Tokens => {
                let flat = Layout::contiguous_with_offset((rows, c), x_layout.start_offset());
                x.matmul(weight, sizes, &flat, &transposed)?
            }
            Order::Heads(_) => {
                let tokens = reorder(x, &x_layout.transpose(1, 2)?)?;
                tokens.matmul(weight, sizes, &Layout::contiguous((rows, c)), &transposed)?
            }
        };
        let shape = self.shape(x_layout.shape(), n)?;
        match (self.to, shape.dims()) {
            (Order::Heads(_), &[b, h, t, d]) => {
                let heads = Layout::contiguous((b, t, h, d)).transpose(1, 2)?;
                Ok((reorder(&product, &heads)?, shape))
            }
            _ => Ok((product, shape)),
        }
    }

    /// Of the result, to `n` numbers a token.
    fn shape(&self, x: &Shape, n: usize) -> Result<Shape> {
        let mut shape = x.dims().to_vec();
        if let (Order::Heads(_), &[b, h, t, d]) = (self.from, &shape[..]) {
            shape = vec![b, t, h * d];
        }
        if let Some(last) = shape.last_mut() {
            *last = n;
        }
        Ok(match (self.to, &shape[..]) {
            (Order::Heads(h), &[b, t, _]) => Shape::from((b, h, t, n / h)),
            _ => Shape::from(shape),
        })
    }

    fn gradients(
        &self,
        x: &Tensor,
        weight: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let grad = rows(grad, self.to)?; // (rows,N)
        let dx = || -> Result<Tensor> {
            let dx = grad.matmul(&weight.detach())?; // (rows,C)
            match (self.from, x.dims()) {
                (Order::Heads(h), &[b, _, t, d]) => {
                    detached(&dx.reshape((b, t, h, d))?.transpose(1, 2)?)
                }
                _ => dx.reshape(x.shape()),
            }
        };
        let dw = || grad.t()?.matmul(&rows(x, self.from)?);
        Ok((
            x.track_op().then(dx).transpose()?,
            weight.track_op().then(dw).transpose()?,
        ))
    }
}

/// The elements of a view in its order, on whatever device.
fn in_order<S>(storage: &S, layout: &Layout) -> Result<S>
where
    S: BackendStorage,
    S::Device: BackendDevice<Storage = S>,
{
    let mut copy = storage
        .device()
        .zeros_impl(layout.shape(), storage.dtype())?;
    storage.copy_strided_src(&mut copy, 0, layout)?;
    Ok(copy)
}

#[cfg(feature = "cuda")]
fn in_order_on_gpu(storage: &CudaStorage, layout: &Layout) -> Result<CudaStorage> {
    match crate::gpu::in_order(storage, layout)? {
        Some(copy) => Ok(copy),
        None => in_order(storage, layout),
    }
}

#[cfg(not(feature = "cuda"))]
use in_order as in_order_on_gpu;

/// A contiguous tensor of these values, outside any graph.
pub(crate) fn detached(x: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return crate::gpu::contiguous(x);
    }
    x.detach().contiguous()
}

/// An operand as rows (…, C), outside any graph.
fn rows(x: &Tensor, order: Order) -> Result<Tensor> {
    match order {
        Order::Tokens => {
            let c = x.dim(D::Minus1)?;
            detached(x)?.reshape(((), c))
        }
        Order::Heads(_) => {
            let (b, h, t, d) = x.dims4()?;
            detached(&x.detach().transpose(1, 2)?)?.reshape((b * t, h * d))
        }
    }
}

impl CustomOp2 for Project {
    fn name(&self) -> &'static str {
        "project"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward((x, x_layout), (weight, weight_layout), in_order)
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        weight: &CudaStorage,
        weight_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.forward((x, x_layout), (weight, weight_layout), in_order_on_gpu)
    }

    fn metal_fwd(
        &self,
        x: &MetalStorage,
        x_layout: &Layout,
        weight: &MetalStorage,
        weight_layout: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        self.forward((x, x_layout), (weight, weight_layout), in_order)
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        self.gradients(x, weight, grad)
    }
}

impl CustomOp3 for Onto {
    fn name(&self) -> &'static str {
        "project-onto"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        stream: &CpuStorage,
        stream_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let operands = ((x, x_layout), (weight, weight_layout));
        let (product, shape) = self.0.forward(operands.0, operands.1, in_order)?;
        let product = (&product, &Layout::contiguous(shape.clone()));
        Ok((sum::on_host(product, (stream, stream_layout))?, shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        weight: &CudaStorage,
        weight_layout: &Layout,
        stream: &CudaStorage,
        stream_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let operands = ((x, x_layout), (weight, weight_layout));
        let (product, shape) = self.0.forward(operands.0, operands.1, in_order_on_gpu)?;
        let product = (&product, &Layout::contiguous(shape.clone()));
        Ok((sum::cuda::forward(product, (stream, stream_layout))?, shape))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        stream: &Tensor,
        _out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (dx, dw) = self.0.gradients(x, weight, grad)?;
        Ok((dx, dw, stream.track_op().then(|| grad.clone())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drawn::{difference, with_gradients};
    use candle_core::Var;

    fn random(shape: impl Into<Shape>) -> Result<Tensor> {
        crate::drawn::normal(1., shape)
    }

    fn check(
        x: &Tensor,
        weight: &Tensor,
        found: impl Fn(&Projection, &Tensor) -> Result<Tensor>,
        expected: impl Fn(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<()> {
        let found = with_gradients(x, weight, |x, w| found(&Projection::of(w.clone()), x))?;
        let expected = with_gradients(x, weight, expected)?;
        for (found, expected) in found.iter().zip(&expected) {
            let off = difference(found, expected)?;
            assert!(off < 1e-12, "{:?} {:?}: {off:e}", x.dims(), weight.dims());
        }
        Ok(())
    }

    #[test]
    fn projection_and_its_gradients_equal_those_of_broadcast_products() -> Result<()> {
        for (shape, n) in [
            (vec![1, 1], 1),
            (vec![3, 5], 4),
            (vec![2, 3, 7], 5),
            (vec![2, 1, 3, 4], 6),
            (vec![7], 3),
        ] {
            let c = shape[shape.len() - 1];
            let (x, weight) = (random(shape.clone())?, random((n, c))?);
            let plain = |x: &Tensor, w: &Tensor| match x.rank() {
                1 => x.unsqueeze(0)?.matmul(&w.t()?)?.squeeze(0),
                _ => x.broadcast_matmul(&w.t()?),
            };
            check(&x, &weight, |p, x| p.forward(x), plain)?;
        }
        Ok(())
    }

    #[test]
    fn heads_of_a_projection_equal_views_of_its_tokens() -> Result<()> {
        for (b, t, c, h, d) in [(1, 1, 1, 1, 1), (2, 3, 5, 4, 6), (3, 7, 8, 2, 3)] {
            let (x, weight) = (random((b, t, c))?, random((h * d, c))?);
            let plain = |x: &Tensor, w: &Tensor| {
                let y = x.broadcast_matmul(&w.t()?)?;
                y.reshape((b, t, h, d))?.transpose(1, 2)
            };
            let copied =
                |p: &Projection, x: &Tensor| p.apply(x, Order::Tokens, Order::Heads(h), None);
            check(&x, &weight, |p, x| p.split_into_heads(x, h), plain)?;
            check(&x, &weight, copied, plain)?;

            let (x, weight) = (random((b, h, t, d))?, random((c, h * d))?);
            let plain = |x: &Tensor, w: &Tensor| {
                let tokens = x.transpose(1, 2)?.reshape((b, t, h * d))?;
                tokens.broadcast_matmul(&w.t()?)
            };
            let copied =
                |p: &Projection, x: &Tensor| p.apply(x, Order::Heads(h), Order::Tokens, None);
            check(&x, &weight, |p, x| p.merge_heads_onto(None, x), plain)?;
            check(&x, &weight, copied, plain)?;
            // Heads that are a part of wider ones.
            let part = |x: &Tensor| x.narrow(3, d - 1, 1);
            let (narrow, plain_narrow) = (
                |p: &Projection, x: &Tensor| {
                    p.apply(&part(x)?, Order::Heads(h), Order::Tokens, None)
                },
                |x: &Tensor, w: &Tensor| {
                    let tokens = part(x)?.transpose(1, 2)?.reshape((b, t, h))?;
                    tokens.broadcast_matmul(&w.t()?)
                },
            );
            check(&x, &random((c, h))?, narrow, plain_narrow)?;
        }
        Ok(())
    }

    #[test]
    fn projection_onto_the_stream_and_its_gradients_equal_those_of_a_sum() -> Result<()> {
        // Both the operands' gradients, then the stream's.
        fn all(
            [x, weight, stream]: [&Tensor; 3],
            part: impl Fn(&Tensor, &Projection, &Tensor) -> Result<Tensor>,
        ) -> Result<[Tensor; 4]> {
            let frozen = Projection::of(weight.clone());
            let tracked = |x: &Tensor, w: &Tensor| part(x, &Projection::of(w.clone()), stream);
            let [y, dx, dw] = with_gradients(x, weight, tracked)?;
            let [_, _, ds] = with_gradients(x, stream, |x, s| part(x, &frozen, s))?;
            Ok([y, dx, dw, ds])
        }
        let compare = |found: [Tensor; 4], expected: [Tensor; 4]| -> Result<()> {
            for (found, expected) in found.iter().zip(&expected) {
                let off = difference(found, expected)?;
                assert!(off < 1e-12, "{off:e}");
            }
            Ok(())
        };
        for (b, t, c, h, d) in [(1, 1, 1, 1, 1), (2, 3, 5, 4, 6), (3, 7, 8, 2, 3)] {
            let (x, weight) = (random((b, t, c))?, random((h * d, c))?);
            // A stream that is a part of another.
            let stream = random((b, t, 1 + h * d))?.narrow(2, 1, h * d)?;
            let operands = [&x, &weight, &stream];
            let found = all(operands, |x, p, s| p.forward_onto(Some(s), x))?;
            compare(found, all(operands, |x, p, s| s + p.forward(x)?)?)?;

            let (x, weight) = (random((b, h, t, d))?, random((c, h * d))?);
            let stream = random((b, t, c))?;
            let operands = [&x, &weight, &stream];
            let expected = all(operands, |x, p, s| s + p.merge_heads_onto(None, x)?)?;
            let found = all(operands, |x, p, s| p.merge_heads_onto(Some(s), x))?;
            compare(found, expected.clone())?;
            let copied = |x: &Tensor, p: &Projection, s: &Tensor| {
                p.apply(x, Order::Heads(h), Order::Tokens, Some(s))
            };
            compare(all(operands, copied)?, expected)?;
        }
        Ok(())
    }

    #[test]
    fn projection_onto_another_shape_is_refused() -> Result<()> {
        let (x, weight) = (Var::from_tensor(&random((2, 3, 4))?)?, random((6, 4))?);
        let projection = Projection::of(weight);
        for shape in [vec![2, 3, 5], vec![3, 2, 6], vec![6]] {
            let refused = projection.forward_onto(Some(&random(shape)?), &x);
            assert!(refused.is_err());
        }
        assert!(projection
            .forward_onto(Some(&random((2, 3, 6))?), &x)
            .is_ok());
        Ok(())
    }

    #[test]
    fn projection_of_what_does_not_fit_is_refused() -> Result<()> {
        let projection = Projection::of(random((6, 4))?);
        assert!(projection.forward(&random((2, 3))?).is_err());
        assert!(projection
            .merge_heads_onto(None, &random((1, 2, 3, 3))?)
            .is_err());
        let heads = projection.apply(&random((1, 2, 4))?, Order::Tokens, Order::Heads(4), None);
        assert!(heads.is_err());
        assert!(!projection.forward(&random((2, 4))?)?.track_op());
        Ok(())
    }
}
