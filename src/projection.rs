//! Projections without bias, y = x·Wᵀ, as one operation each, heads taken apart and put together on the way.
//!
//! With dy the gradient of the result, dx = dy·W and dW = dyᵀ·x. In candle's own operations a projection is a product
//! between views, and each of them, backward, adds its gradient to a tensor of zeros.

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    bail, CpuStorage, CudaStorage, CustomOp2, Layout, MetalStorage, Result, Shape, Tensor, D,
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
        self.apply(x, Order::Tokens, Order::Tokens)
    }

    /// (B, T, C) → (B, H, T, D), N being H·D.
    pub fn split_into_heads(&self, x: &Tensor, heads: usize) -> Result<Tensor> {
        if self.is_copied(x) {
            return self.apply(x, Order::Tokens, Order::Heads(heads));
        }
        let y = self.forward(x)?;
        let (b, t, n) = y.dims3()?;
        y.reshape((b, t, heads, n / heads.max(1)))?.transpose(1, 2)
    }

    /// (B, H, T, D) → (B, T, N), C being H·D.
    pub fn merge_heads(&self, x: &Tensor) -> Result<Tensor> {
        let (b, h, t, d) = x.dims4()?;
        if self.is_copied(x) {
            return self.apply(x, Order::Heads(h), Order::Tokens);
        }
        self.forward(&x.transpose(1, 2)?.reshape((b, t, h * d))?)
    }

    /// Whether heads are copied on the way, so that gradients pass no views: on a GPU copies are cheap, and candle's sums
    /// over views are not.
    fn is_copied(&self, x: &Tensor) -> bool {
        x.device().is_cuda() && (x.track_op() || self.weight.track_op())
    }

    fn apply(&self, x: &Tensor, from: Order, to: Order) -> Result<Tensor> {
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
        match x.track_op() || weight.track_op() {
            true => x.apply_op2(&weight, op),
            false => x.apply_op2_no_bwd(&weight, &op),
        }
    }
}

/// A projection as one candle operation over (x, weight), both contiguous unless x is heads.
struct Project {
    from: Order,
    to: Order,
}

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
        let mut shape = x_layout.dims().to_vec();
        if let (Order::Heads(_), &[b, _, t, _]) = (self.from, &shape[..]) {
            shape = vec![b, t, c];
        }
        if let Some(last) = shape.last_mut() {
            *last = n;
        }
        match (self.to, &shape[..]) {
            (Order::Heads(h), &[b, t, _]) => {
                let heads = Layout::contiguous((b, t, h, n / h)).transpose(1, 2)?;
                let out = reorder(&product, &heads)?;
                Ok((out, Shape::from((b, h, t, n / h))))
            }
            _ => Ok((product, Shape::from(shape))),
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drawn::{difference, with_gradients};

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
            let copied = |p: &Projection, x: &Tensor| p.apply(x, Order::Tokens, Order::Heads(h));
            check(&x, &weight, |p, x| p.split_into_heads(x, h), plain)?;
            check(&x, &weight, copied, plain)?;

            let (x, weight) = (random((b, h, t, d))?, random((c, h * d))?);
            let plain = |x: &Tensor, w: &Tensor| {
                let tokens = x.transpose(1, 2)?.reshape((b, t, h * d))?;
                tokens.broadcast_matmul(&w.t()?)
            };
            let copied = |p: &Projection, x: &Tensor| p.apply(x, Order::Heads(h), Order::Tokens);
            check(&x, &weight, |p, x| p.merge_heads(x), plain)?;
            check(&x, &weight, copied, plain)?;
            // Heads that are a part of wider ones.
            let part = |x: &Tensor| x.narrow(3, d - 1, 1);
            let (narrow, plain_narrow) = (
                |p: &Projection, x: &Tensor| p.apply(&part(x)?, Order::Heads(h), Order::Tokens),
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
    fn projection_of_what_does_not_fit_is_refused() -> Result<()> {
        let projection = Projection::of(random((6, 4))?);
        assert!(projection.forward(&random((2, 3))?).is_err());
        assert!(projection.merge_heads(&random((1, 2, 3, 3))?).is_err());
        let heads = projection.apply(&random((1, 2, 4))?, Order::Tokens, Order::Heads(4));
        assert!(heads.is_err());
        assert!(!projection.forward(&random((2, 4))?)?.track_op());
        Ok(())
    }
}
