//! Keys and values of earlier tokens, kept so that they need not be computed again.
//!
//! The cache takes keys and values of any width, so encodings that widen the values need nothing special. Positions
//! and segments are kept with the keys, once for all layers: attention goes by them, never by an index.
//!
//! A forward pass works on a [`CacheStep`]: it appends to each layer and commits at the end. Until then the cache
//! counts the tokens it had, so a pass that fails leaves it as it was.

use crate::positions::Positions;
use candle_core::{bail, DType, Device, Result, Tensor};

/// Keys, values and positions of the tokens seen so far, for every layer of a model.
///
/// Where nothing is tracked by autograd, tokens are written into buffers that double when they are full. Where a
/// query, key or value is tracked, they are concatenated instead, and gradients flow back into the cached tokens.
/// A model whose weights are variables tracks everything: generate from it with
/// [`without_gradients`](Self::without_gradients).
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_posenc::{Ctx, KvCache, Llama, LlamaConfig, Positions, SeededVars};
/// # fn main() -> candle_core::Result<()> {
/// # let config = LlamaConfig::default();
/// # let vb = SeededVars::new(0).builder(DType::F32, &Device::Cpu);
/// let model = Llama::new(&config, vb)?;
/// let mut cache = KvCache::new(config.num_hidden_layers).without_gradients();
/// let prompt = Tensor::new(&[[3u32, 1, 4, 1, 5]], &Device::Cpu)?;
/// model.forward_at(&prompt, &Positions::first(5), Some(&mut cache), &mut Ctx::default())?;
/// let next = Tensor::new(&[[9u32]], &Device::Cpu)?;
/// let positions = cache.next_positions(1)?;
/// let logits = model.forward_at(&next, &positions, Some(&mut cache), &mut Ctx::default())?;
/// assert_eq!((cache.len(), logits.dims()), (6, &[1, 1, 256][..]));
/// # Ok(())
/// # }
/// ```
pub struct KvCache {
    /// `None` until the layer's first token.
    layers: Vec<Option<Stored>>,
    /// Where the committed tokens stand.
    positions: Positions,
    /// Slots that a layer's first buffer has at least.
    reserve: usize,
    detach: bool,
}

/// One layer's keys and values; slots from the committed length on hold nothing.
struct Stored {
    /// (B, G, ≥ S, D)
    k: Tensor,
    /// (B, G, ≥ S, E)
    v: Tensor,
    /// Whether these are buffers of the cache's own, which may be written in place.
    buffers: bool,
}

impl KvCache {
    /// An empty cache for a model of this many layers.
    pub fn new(layers: usize) -> Self {
        Self::with_capacity(layers, 0)
    }

    /// An empty cache whose first buffers have room for this many tokens.
    pub fn with_capacity(layers: usize, tokens: usize) -> Self {
        Self {
            layers: (0..layers).map(|_| None).collect(),
            positions: Positions::first(0),
            reserve: tokens,
            detach: false,
        }
    }

    /// The same cache, cutting what it stores off autograd, so that generating from a model in training writes in
    /// place and keeps no graph.
    ///
    /// Do not run a backward pass through a call made with it: after a [`truncate`](Self::truncate) the slots that
    /// the call read are written anew.
    pub fn without_gradients(self) -> Self {
        Self {
            detach: true,
            ..self
        }
    }

    /// Number of tokens in a row, padding included.
    pub fn len(&self) -> usize {
        self.positions.len()
    }

    /// Whether there is no token yet.
    pub fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    /// Where the cached tokens stand.
    pub fn positions(&self) -> &Positions {
        &self.positions
    }

    /// The positions of the next `len` tokens: each row goes on one behind its own last token that is no padding,
    /// and in that token's segment. A row of padding only starts at 0.
    ///
    /// # Errors
    /// When the cache is empty: a first call starts at [`Positions::first`].
    pub fn next_positions(&self, len: usize) -> Result<Positions> {
        let Some((batch, _)) = self.batch() else {
            bail!("cache: no token is cached yet, so none is next; the first call starts at Positions::first")
        };
        let (pos, segment) = match &self.positions {
            Positions::Span { start, len: cached } => {
                let start = start.saturating_add_unsigned(*cached as u64);
                return Ok(Positions::Span {
                    start: start.max(0),
                    len,
                });
            }
            Positions::Explicit { pos, segment } => (pos, segment),
        };
        let table = self.positions.table(batch)?;
        let (mut next, mut segments) = (Vec::new(), Vec::new());
        for b in 0..table.rows {
            let last = table.row(b).iter().rposition(|p| *p >= 0);
            let start = last.map_or(0, |i| table.row(b)[i] + 1);
            next.extend((0..len as i64).map(|t| start + t));
            if let Some(row) = table.segments(b) {
                segments.extend(std::iter::repeat_n(last.map_or(0, |i| row[i]), len));
            }
        }
        let tensor = |values| Tensor::from_vec(values, (table.rows, len), pos.device());
        let segment = segment.as_ref().map(|_| tensor(segments)).transpose()?;
        Positions::explicit(tensor(next)?, segment)
    }

    /// Forgets every token and gives the memory back.
    pub fn reset(&mut self) {
        self.layers.iter_mut().for_each(|layer| *layer = None);
        self.positions = Positions::first(0);
    }

    /// Forgets the tokens from the `len`-th on, to go on from there in another way. Copies nothing.
    ///
    /// # Errors
    /// When there are fewer tokens.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        if len > self.len() {
            bail!("cache: cannot truncate {} tokens to {len}", self.len())
        }
        self.positions = match &self.positions {
            _ if len == 0 => Positions::first(0),
            Positions::Span { start, .. } => Positions::Span { start: *start, len },
            Positions::Explicit { pos, segment } => Positions::Explicit {
                pos: pos.narrow(1, 0, len)?,
                segment: segment.as_ref().map(|s| s.narrow(1, 0, len)).transpose()?,
            },
        };
        Ok(())
    }

    /// Makes row `rows[b]` the new row `b`, for beam search: rows may repeat, and be more or fewer than before.
    ///
    /// # Errors
    /// When the cache is empty, or `rows` is, or a row is beyond the batch. Then nothing is changed.
    pub fn reorder(&mut self, rows: &[usize]) -> Result<()> {
        let Some((batch, _)) = self.batch() else {
            bail!("cache: no token is cached yet, so there are no rows to reorder")
        };
        if rows.is_empty() || rows.iter().any(|row| *row >= batch) {
            bail!("cache: cannot take rows {rows:?} of a batch of {batch}")
        }
        if rows.iter().copied().eq(0..batch) {
            return Ok(());
        }
        let indices: Vec<u32> = rows.iter().map(|row| *row as u32).collect();
        let select = |x: &Tensor| {
            let indices = Tensor::new(&indices[..], x.device())?;
            x.contiguous()?.index_select(&indices, 0)
        };
        let positions = match &self.positions {
            Positions::Explicit { pos, segment } if pos.dim(0)? > 1 => {
                Positions::explicit(select(pos)?, segment.as_ref().map(select).transpose()?)?
            }
            same_in_all_rows => same_in_all_rows.clone(),
        };
        let layers = self
            .layers
            .iter()
            .map(|layer| {
                let select_layer = |stored: &Stored| {
                    Ok(Stored {
                        k: select(&stored.k)?,
                        v: select(&stored.v)?,
                        buffers: stored.buffers,
                    })
                };
                layer.as_ref().map(select_layer).transpose()
            })
            .collect::<Result<_>>()?;
        (self.layers, self.positions) = (layers, positions);
        Ok(())
    }

    /// Starts a forward pass over `batch` rows of tokens that stand at `positions`.
    ///
    /// # Errors
    /// When the positions do not fit the batch, the cache holds another batch, or only one of the cached and the
    /// new tokens have segments.
    pub fn step(&mut self, positions: &Positions, batch: usize) -> Result<CacheStep<'_>> {
        positions.table(batch)?;
        if let Some((cached, _)) = self.batch() {
            if cached != batch {
                bail!("cache: {cached} rows are cached, but the new tokens have {batch}")
            }
        }
        let key_positions = join(&self.positions, positions, batch)?;
        Ok(CacheStep {
            appended: vec![false; self.layers.len()],
            cache: self,
            batch,
            new: positions.len(),
            key_positions,
        })
    }

    /// The rows and device of what is cached.
    fn batch(&self) -> Option<(usize, &Device)> {
        let stored = self.layers.first()?.as_ref().filter(|_| !self.is_empty())?;
        Some((stored.k.dims().first().copied()?, stored.k.device()))
    }
}

/// One forward pass over a [`KvCache`]. Dropping it without [`commit`](Self::commit) leaves the cache as it was.
pub struct CacheStep<'a> {
    cache: &'a mut KvCache,
    batch: usize,
    /// Number of new tokens.
    new: usize,
    /// Cached and new.
    key_positions: Positions,
    appended: Vec<bool>,
}

impl CacheStep<'_> {
    /// Where all keys stand, the cached ones and this pass's.
    pub fn key_positions(&self) -> &Positions {
        &self.key_positions
    }

    /// Appends this pass's keys and values of a layer and returns all of them. `tracked` tells whether autograd will
    /// keep what is returned although neither k nor v is tracked, as it does for the sake of a tracked query.
    ///
    /// What is returned may be a view of the cache's own buffers: use it in this pass only.
    ///
    /// # Shapes
    /// k (B, G, T, D) → (B, G, S, D), v (B, G, T, E) → (B, G, S, E), S the cached and new tokens together.
    ///
    /// # Errors
    /// When shapes, dtypes or devices are not those of the cached tokens, or the layer has already been appended.
    pub fn append(
        &mut self,
        layer: usize,
        k: &Tensor,
        v: &Tensor,
        tracked: bool,
    ) -> Result<(Tensor, Tensor)> {
        let (len, layers) = (self.cache.len(), self.cache.layers.len());
        let (Some(slot), Some(appended)) = (
            self.cache.layers.get_mut(layer),
            self.appended.get_mut(layer),
        ) else {
            bail!("cache: layer {layer} of a cache of {layers} layers")
        };
        if *appended {
            bail!("cache: layer {layer} has already been appended in this pass")
        }
        for (name, x) in [("k", k), ("v", v)] {
            match x.dims() {
                [b, _, t, _] if (*b, *t) == (self.batch, self.new) => (),
                other => bail!(
                    "cache: {name} must be (batch {}, heads, tokens {}, width), got {other:?}",
                    self.batch,
                    self.new
                ),
            }
        }
        let earlier = slot.as_ref().filter(|_| len > 0);
        if let Some(stored) = earlier {
            check_same("k", &stored.k, k)?;
            check_same("v", &stored.v, v)?;
        }
        let (k, v) = match self.cache.detach {
            true => (k.detach(), v.detach()),
            false => (k.clone(), v.clone()),
        };
        let tracked = !self.cache.detach
            && (tracked
                || k.track_op()
                || v.track_op()
                || earlier.is_some_and(|s| s.k.track_op() || s.v.track_op()));
        let stored = if tracked {
            let join = |stored: Option<&Tensor>, new: &Tensor| match stored {
                Some(stored) => Tensor::cat(&[&stored.narrow(2, 0, len)?, new], 2),
                None => Ok(new.clone()),
            };
            Stored {
                k: join(earlier.map(|s| &s.k), &k)?,
                v: join(earlier.map(|s| &s.v), &v)?,
                buffers: false,
            }
        } else {
            let (old_k, old_v) = match slot.as_ref() {
                Some(s) => (Some(&s.k), Some(&s.v)),
                None => (None, None),
            };
            let writable = slot.as_ref().is_some_and(|s| s.buffers);
            Stored {
                k: write(old_k, len, &k, writable, self.cache.reserve)?,
                v: write(old_v, len, &v, writable, self.cache.reserve)?,
                buffers: true,
            }
        };
        let all = len + self.new;
        let result = (stored.k.narrow(2, 0, all)?, stored.v.narrow(2, 0, all)?);
        *slot = Some(stored);
        *appended = true;
        Ok(result)
    }

    /// Makes the new tokens part of the cache.
    ///
    /// # Errors
    /// When a layer has not been appended.
    pub fn commit(self) -> Result<()> {
        if let Some(layer) = self.appended.iter().position(|appended| !appended) {
            bail!("cache: layer {layer} has not been appended in this pass")
        }
        self.cache.positions = self.key_positions;
        Ok(())
    }
}

/// Writes `new` (B, G, T, W) behind the first `len` slots of `old`, in place where that is allowed and there is room,
/// and returns the buffer.
fn write(
    old: Option<&Tensor>,
    len: usize,
    new: &Tensor,
    writable: bool,
    reserve: usize,
) -> Result<Tensor> {
    let (b, g, t, width) = new.dims4()?;
    let needed = len + t;
    let fits = |old: &Tensor| {
        writable
            && old
                .dims4()
                .is_ok_and(|d| (d.0, d.1, d.3) == (b, g, width) && d.2 >= needed)
            && old.dtype() == new.dtype()
            && old.device().same_device(new.device())
    };
    let buffer = match old {
        Some(old) if fits(old) => old.clone(),
        _ => {
            let old = old.filter(|_| len > 0);
            let capacity = old.map_or(reserve, |old| 2 * old.dims()[2]);
            let slots = needed.max(capacity).checked_next_multiple_of(64);
            let bytes = [b, g, width, size_of::<f64>()]
                .into_iter()
                .try_fold(slots.unwrap_or(usize::MAX), usize::checked_mul);
            let slots = match (slots, bytes) {
                (Some(slots), Some(bytes)) if bytes <= isize::MAX as usize => slots,
                _ => bail!("cache: {capacity} tokens of {b} rows are more than memory can address"),
            };
            let buffer = Tensor::zeros((b, g, slots, width), new.dtype(), new.device())?;
            if let Some(old) = old {
                buffer.slice_set(&old.narrow(2, 0, len)?.contiguous()?, 2, 0)?;
            }
            buffer
        }
    };
    buffer.slice_set(&new.contiguous()?, 2, len)?;
    Ok(buffer)
}

/// Refuses new keys or values that cannot follow the cached ones.
fn check_same(name: &str, cached: &Tensor, new: &Tensor) -> Result<()> {
    let facts = |x: &Tensor| -> Result<(DType, usize, usize)> {
        let (_, heads, _, width) = x.dims4()?;
        Ok((x.dtype(), heads, width))
    };
    let (old, fresh) = (facts(cached)?, facts(new)?);
    if old != fresh {
        bail!(
            "cache: {name} is cached as {:?} with {} heads of width {}, but the new one is {:?} with {} heads of width {}",
            old.0,
            old.1,
            old.2,
            fresh.0,
            fresh.1,
            fresh.2
        )
    }
    if !cached.device().same_device(new.device()) {
        bail!(
            "cache: {name} is cached on {:?}, but the new one is on {:?}",
            cached.device().location(),
            new.device().location()
        )
    }
    Ok(())
}

/// The positions of the cached tokens and then of the new ones.
fn join(cached: &Positions, new: &Positions, batch: usize) -> Result<Positions> {
    use Positions::{Explicit, Span};
    if cached.is_empty() {
        return Ok(new.clone());
    }
    match (cached, new) {
        (
            Span { start, len },
            Span {
                start: next,
                len: t,
            },
        ) if start.checked_add_unsigned(*len as u64) == Some(*next) => {
            return Ok(Span {
                start: *start,
                len: len + t,
            })
        }
        _ => (),
    }
    let device = match (cached, new) {
        (Explicit { pos, .. }, _) | (_, Explicit { pos, .. }) => pos.device().clone(),
        _ => Device::Cpu,
    };
    let rows = |positions: &Positions| match positions {
        Explicit { pos, .. } => pos.dim(0),
        Span { .. } => Ok(1),
    };
    let one_row = rows(cached)? == 1 && rows(new)? == 1;
    let rows = if one_row { 1 } else { batch };
    let full = |x: &Tensor| {
        let shape = (rows, x.dim(1)?);
        x.to_device(&device)?.broadcast_as(shape)?.contiguous()
    };
    let spread = |positions: &Positions| -> Result<(Tensor, Option<Tensor>)> {
        match positions {
            Span { start, len } => {
                let pos: Vec<i64> = (0..*len as i64).map(|t| start + t).collect();
                Ok((full(&Tensor::from_vec(pos, (1, *len), &device)?)?, None))
            }
            Explicit { pos, segment } => Ok((full(pos)?, segment.as_ref().map(full).transpose()?)),
        }
    };
    let ((old_pos, old_segment), (new_pos, new_segment)) = (spread(cached)?, spread(new)?);
    let segment = match (old_segment, new_segment) {
        (Some(old), Some(new)) => Some(Tensor::cat(&[old, new], 1)?),
        (None, None) => None,
        (Some(_), None) => {
            bail!("cache: the cached tokens have segments, but the new ones have none")
        }
        (None, Some(_)) => {
            bail!("cache: the new tokens have segments, but the cached ones have none")
        }
    };
    Positions::explicit(Tensor::cat(&[old_pos, new_pos], 1)?, segment)
}
