//! The attention part of a transformer block: projections, grouped heads, and the hooks of an [`Encoding`].

use crate::attend::{attend, plan, AttendSpec, Backend, Plan, Precision};
use crate::cache::CacheStep;
use crate::encoding::{Encoding, ModelDims, PosState, Qkv};
use crate::heads::join_heads;
use crate::positions::Positions;
use crate::projection::Projection;
use candle_core::{bail, Result, Tensor};
use candle_nn::{Init, VarBuilder};

/// Causal self-attention with grouped heads, of one layer.
#[derive(Debug, Clone)]
pub struct Attention {
    q_proj: Projection,
    k_proj: Projection,
    v_proj: Projection,
    o_proj: Projection,
    layer: usize,
    dims: ModelDims,
    window: Option<usize>,
    backend: Backend,
    precision: Precision,
}

/// What [`Attention::forward`] returns.
#[derive(Debug, Clone)]
pub struct Attended {
    /// (B, T, C), to be added to the stream.
    pub out: Tensor,
    /// (B, H, T, E − D): what attention averaged beyond the model's own values, where the encoding widened them.
    pub carried: Option<Tensor>,
}

impl Attention {
    /// The attention of layer `layer`, its weights `q_proj`, `k_proj`, `v_proj` and `o_proj` from `vb`. Where `vb`
    /// creates weights they are drawn from `init`.
    ///
    /// # Errors
    /// When a weight is missing or has another shape.
    pub fn new(
        layer: usize,
        dims: &ModelDims,
        window: Option<usize>,
        init: Init,
        vb: VarBuilder,
    ) -> Result<Self> {
        let (q_width, kv_width) = (dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim);
        let projection = |from, to, name| Projection::new(from, to, init, vb.pp(name));
        Ok(Self {
            q_proj: projection(dims.width, q_width, "q_proj")?,
            k_proj: projection(dims.width, kv_width, "k_proj")?,
            v_proj: projection(dims.width, kv_width, "v_proj")?,
            o_proj: projection(q_width, dims.width, "o_proj")?,
            layer,
            dims: *dims,
            window,
            backend: Backend::Auto,
            precision: Precision::default(),
        })
    }

    /// The same with the phase evaluated so on a GPU.
    pub fn with_precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    /// The same on another backend.
    pub fn with_backend(self, backend: Backend) -> Self {
        Self { backend, ..self }
    }

    /// Projects, encodes, caches and attends.
    ///
    /// # Shapes
    /// x (B, T, C) → (B, T, C).
    ///
    /// # Errors
    /// When shapes do not fit, or the encoding makes the values narrower than D.
    pub fn forward(
        &self,
        x: &Tensor,
        encoding: &dyn Encoding,
        state: &PosState,
        cache: Option<&mut CacheStep>,
    ) -> Result<Attended> {
        self.forward_onto(None, x, encoding, state, cache)
    }

    /// The same, `out` being the sum with the stream (B, T, C) if there is one.
    pub(crate) fn forward_onto(
        &self,
        stream: Option<&Tensor>,
        x: &Tensor,
        encoding: &dyn Encoding,
        state: &PosState,
        cache: Option<&mut CacheStep>,
    ) -> Result<Attended> {
        let head_dim = self.dims.head_dim;
        let Qkv { q, k, v } = self.project(x, encoding, state)?; // v: (B,G,T,E)
        let (k, v, key_positions) = match cache {
            Some(step) => {
                let (k, v) = step.append(self.layer, &k, &v, q.track_op())?; // (B,G,S,D), (B,G,S,E)
                (k, v, step.key_positions())
            }
            None => (k, v, &state.positions),
        };
        let spec = self.spec(encoding, state, key_positions);
        let mixed = attend(&q, &k, &v, &spec)?; // (B,H,T,E)

        let width = mixed.dim(3)?;
        let carried = match width.checked_sub(head_dim) {
            Some(0) => None,
            Some(more) => Some(mixed.narrow(3, head_dim, more)?),
            None => bail!(
                "attention: the encoding made the values of layer {} {width} wide, but a head has {head_dim}",
                self.layer
            ),
        };
        let out = match carried {
            None => self.o_proj.merge_heads_onto(stream, &mixed)?,
            Some(_) => {
                let own = join_heads(&mixed, head_dim)?;
                self.o_proj.forward_onto(stream, &own)?
            }
        }; // (B,T,C)
        Ok(Attended { out, carried })
    }

    /// What [`forward`](Self::forward) without a cache will do in [`attend`](crate::attend()), and why.
    ///
    /// # Shapes
    /// x (B, T, C), as for [`forward`](Self::forward); its values do not matter.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn plan(&self, x: &Tensor, encoding: &dyn Encoding, state: &PosState) -> Result<Plan> {
        let Qkv { q, k, v } = self.project(x, encoding, state)?;
        plan(&q, &k, &v, &self.spec(encoding, state, &state.positions))
    }

    /// x (B,T,C) → encoded q (B,H,T,D), k (B,G,T,D), v (B,G,T,E).
    fn project(&self, x: &Tensor, encoding: &dyn Encoding, state: &PosState) -> Result<Qkv> {
        let ModelDims {
            heads, kv_heads, ..
        } = self.dims;
        let qkv = Qkv {
            q: self.q_proj.split_into_heads(x, heads)?,    // (B,H,T,D)
            k: self.k_proj.split_into_heads(x, kv_heads)?, // (B,G,T,D)
            v: self.v_proj.split_into_heads(x, kv_heads)?, // (B,G,T,D)
        };
        encoding.encode(self.layer, qkv, state)
    }

    fn spec(&self, encoding: &dyn Encoding, state: &PosState, keys: &Positions) -> AttendSpec {
        AttendSpec {
            window: self.window,
            precision: self.precision,
            ..AttendSpec::causal()
        }
        .with_score(encoding.score(self.layer))
        .with_backend(self.backend)
        .with_positions(state.positions.clone(), keys.clone())
    }
}
