//! Which kernel of the GPU computes a call, over which grid and with which tables: decided from the call alone, so
//! that it can be asked and tested without a GPU.
// Without the feature only `plan` and the tests ask.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

use super::cuda::tiles::{
    simt_backward_shared_bytes, simt_rows, simt_shared_bytes, simt_stage, simt_width, BackwardSide,
    BackwardTile, DecodeTile, ForwardTile, BACKWARD, DECODE, DELTA_TILE, DELTA_WARPS, FORWARD,
    SIMT_DELTA_WARPS, SIMT_PIECE, SIMT_THREADS,
};
use super::problem::{saturating_product, saturating_sum, Dims, Resolved, ResolvedScore};
use super::{Operand, Precision, Score};
use crate::gpu::Launch;
use candle_core::{DType, Result};
use std::cmp::Reverse;
use std::ops::Range;

/// Widest heads that any kernel takes.
pub(super) const WIDEST_HEAD: usize = 256;
/// Widest values that any kernel takes.
pub(super) const WIDEST_VALUE: usize = 512;
/// Most queries that the kernel for few of them takes.
const MOST_DECODED: usize = 16;
/// Rows, queries times heads of a group, that a block of that kernel takes.
pub(super) const DECODED_ROWS: usize = 16;
/// Fewest keys worth a block of their own.
const FEWEST_KEYS: usize = 256;
/// More multiprocessors than any GPU has, so that a plan without one is on the safe side.
const MOST_MULTIPROCESSORS: usize = 256;
/// Positions relative to their origin are below this, so that no sum of two and a window overflows.
pub(super) const POSITION_LIMIT: i64 = 1 << 30;
/// Oldest compute capability that the kernels are compiled for.
pub(super) const OLDEST: (u32, u32) = (8, 0);

/// An image of the kernels: machine code or else PTX, ten times its compute capability, and its letter or nothing.
pub(super) type Image = (bool, u32, &'static str);

/// Whether a GPU of this compute capability runs one of these images.
pub(super) fn some_image_fits(images: &[Image], (major, minor): (u32, u32)) -> bool {
    images.iter().any(|&(machine, image, letter)| {
        let (image_major, image_minor) = (image / 10, image % 10);
        let (same_major, newer) = (image_major == major, image_minor <= minor);
        match (letter, machine) {
            ("a", _) => same_major && image_minor == minor,
            ("f", _) | (_, true) => same_major && newer,
            _ => image_major < major || (same_major && newer),
        }
    })
}

/// What the choice of a kernel depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Demand {
    pub dims: Dims,
    pub dtype: DType,
    pub score: ScoreKind,
}

/// A score without its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ScoreKind {
    Dot,
    Bias,
    Phase {
        amp_dim: usize,
        precision: Precision,
    },
}

impl ScoreKind {
    pub fn of(score: &Score, precision: Precision) -> Self {
        match *score {
            Score::Dot => Self::Dot,
            Score::LinearBias { .. } => Self::Bias,
            Score::Phase { amp_dim, .. } => Self::Phase { amp_dim, precision },
        }
    }

    pub fn of_resolved(score: &ResolvedScore, precision: Precision) -> Self {
        match *score {
            ResolvedScore::Dot { .. } => Self::Dot,
            ResolvedScore::LinearBias { .. } => Self::Bias,
            ResolvedScore::Phase { amp_dim, .. } => Self::Phase { amp_dim, precision },
        }
    }
}

impl Demand {
    pub fn of(call: &Resolved, dtype: DType) -> Self {
        Self {
            dims: call.dims,
            dtype,
            score: ScoreKind::of_resolved(&call.score, call.precision),
        }
    }
}

/// A kernel that was compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kernel {
    /// Tensor cores; tiles of queries against tiles of keys.
    Forward(ForwardTile),
    /// Tensor cores; few queries, the keys split over blocks and the parts merged.
    Decode(DecodeTile),
    /// No tensor cores; any widths and dtype, positions of 64 bits. `dot`, `bias` or `phase`.
    Simt(&'static str),
}

impl Kernel {
    /// The kernel for a call whose positions fit 32 bits, or why there is none.
    pub fn choose(demand: &Demand) -> std::result::Result<Self, String> {
        let Dims { d, e, .. } = demand.dims;
        if d > WIDEST_HEAD || e > WIDEST_VALUE {
            return Err(format!(
                "the GPU's kernels take heads up to {WIDEST_HEAD} wide and values up to {WIDEST_VALUE}, got {d} and {e}"
            ));
        }
        Ok(on_tensor_cores(demand).unwrap_or(Self::simt(demand.score)))
    }

    /// The kernel that takes every call within the limits.
    pub fn simt(score: ScoreKind) -> Self {
        Self::Simt(simt_name(score))
    }

    /// Its name, which starts with that of the compiled file it is in.
    pub fn entry(&self, dtype: DType) -> String {
        let dtype = dtype_name(dtype);
        let tile = |kind: &str, score: &str, width: usize, values: usize| {
            format!("attend_{kind}_{score}_w{width}_v{values}_{dtype}")
        };
        match self {
            Self::Forward(x) => tile("forward", x.score, x.width, x.values),
            Self::Decode(x) => tile("decode", x.score, x.width, x.values),
            Self::Simt(score) => format!("attend_simt_{score}_{dtype}"),
        }
    }

    /// How exactly it evaluates the phase.
    pub fn precision(&self) -> Precision {
        match self {
            Self::Forward(tile) if tile.score == "phase_fast" => Precision::Fast,
            _ => Precision::Precise,
        }
    }

    /// Whether it cannot read the operand where it lies.
    pub fn needs_copy(&self, operand: &Operand, dtype: DType) -> bool {
        needs_copy(operand, dtype, !matches!(self, Self::Simt(_)))
    }
}

/// Whether kernels cannot read the operand where it lies: neighbours along the width must lie side by side, and for
/// tensor cores each row must start at a multiple of 16 bytes.
fn needs_copy(operand: &Operand, dtype: DType, on_tensor_cores: bool) -> bool {
    const CHUNK: usize = 16;
    if operand.dims.contains(&0) {
        return false;
    }
    let [rows @ .., width] = operand.dims;
    let [row_strides @ .., width_stride] = operand.strides;
    let lies = |elements: usize| {
        !on_tensor_cores
            || elements
                .wrapping_mul(dtype.size_in_bytes())
                .is_multiple_of(CHUNK)
    };
    let mut strides = row_strides.iter().zip(rows);
    (width > 1 && width_stride != 1)
        || !lies(operand.offset)
        || strides.any(|(stride, size)| size > 1 && !lies(*stride))
}

/// The kernels of a backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Backward {
    /// Tensor cores; tiles of queries against tiles of keys.
    Tiles(BackwardTile),
    /// No tensor cores; any widths and dtype, positions of 64 bits. `dot`, `bias` or `phase`.
    Simt(&'static str),
}

/// What a backward kernel computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    /// What the others need of each row.
    Delta,
    /// dk and dv; a block is for some keys.
    Keys,
    /// dq; a block is for some queries.
    Queries,
}

impl Pass {
    /// In the order in which they run.
    pub const ALL: [Self; 3] = [Self::Delta, Self::Keys, Self::Queries];
}

impl Backward {
    /// Those for a call that has a forward kernel and whose positions fit 32 bits. They are as precise as that one.
    pub fn choose(demand: &Demand) -> Self {
        let Dims { d, e, t, .. } = demand.dims;
        let score = score_name(demand.score, t <= MOST_DECODED);
        let fits = |tile: &&BackwardTile| {
            tile.score == score
                && width_needed(demand.score, d) <= tile.width
                && e <= tile.values * tile.width
        };
        BACKWARD
            .iter()
            .filter(|_| suits_tensor_cores(demand))
            .filter(fits)
            .min_by_key(|tile| (tile.width, tile.values, Reverse(tile.keys.tile)))
            .map_or(Self::simt(demand.score), |tile| Self::Tiles(*tile))
    }

    /// Those that take every call within the limits.
    pub fn simt(score: ScoreKind) -> Self {
        Self::Simt(simt_name(score))
    }

    /// The forward kernel that leaves what they need.
    pub fn forward(&self, demand: &Demand) -> Kernel {
        let of_tile = |tile: &BackwardTile| {
            let same = FORWARD.iter().filter(|x| x.score == tile.score);
            let fitting = same.filter_map(|x| Some((cost(x.width, x.values, demand)?, x)));
            let best = fitting.min_by_key(|(cost, _)| *cost)?;
            Some(Kernel::Forward(*best.1))
        };
        match self {
            Self::Tiles(tile) => of_tile(tile),
            Self::Simt(_) => None,
        }
        .unwrap_or(Kernel::simt(demand.score))
    }

    /// A kernel's name, which starts with that of the compiled file it is in.
    pub fn entry(&self, pass: Pass, dtype: DType) -> String {
        let dtype = dtype_name(dtype);
        let side = match pass {
            Pass::Delta => "delta",
            Pass::Keys => "keys",
            Pass::Queries => "queries",
        };
        match (self, pass) {
            (Self::Tiles(_), Pass::Delta) => format!("attend_delta_{dtype}"),
            (Self::Tiles(x), _) => format!("{}_{side}_{dtype}", x.name()),
            (Self::Simt(_), Pass::Delta) => format!("attend_simt_delta_{dtype}"),
            (Self::Simt(score), _) => format!("attend_simt_backward_{score}_{side}_{dtype}"),
        }
    }

    /// Whether they cannot read the operand where it lies.
    pub fn needs_copy(&self, operand: &Operand, dtype: DType) -> bool {
        needs_copy(operand, dtype, matches!(self, Self::Tiles(_)))
    }

    /// Memory beyond the gradients, in bytes: what is known of each row.
    pub fn workspace_bytes(&self, dims: &Dims, dtype: DType) -> usize {
        let rows = saturating_product([dims.b, dims.h, dims.t]);
        match self {
            Self::Tiles(_) => saturating_sum([
                saturating_product([rows, size_of::<[f32; 2]>()]),
                saturating_product([delta_tiles(dims), size_of::<i32>()]),
            ]),
            Self::Simt(_) => saturating_product([rows, accumulator_bytes(dtype)]),
        }
    }

    /// What the forward pass leaves for them beside inputs and output, in bytes: two numbers a row, and what rounding
    /// to half precision lost.
    pub fn saved_bytes(&self, dims: &Dims, dtype: DType) -> usize {
        let rows = saturating_product([dims.b, dims.h, dims.t]);
        let rest = match dtype {
            DType::BF16 | DType::F16 => dims.e.saturating_mul(dtype.size_in_bytes()),
            _ => 0,
        };
        rows.saturating_mul(rest.saturating_add(2 * accumulator_bytes(dtype)))
    }
}

/// The names of all kernels, once each.
#[cfg(test)]
pub(crate) fn kernel_entries(dtype: DType) -> Vec<String> {
    use super::cuda::tiles::SIMT_SCORES;
    let forward = FORWARD.iter().map(|tile| Kernel::Forward(*tile));
    let decode = DECODE.iter().map(|tile| Kernel::Decode(*tile));
    let simt = SIMT_SCORES.iter().map(|score| Kernel::Simt(score));
    let kernels = forward.chain(decode).chain(simt);
    let tiles = BACKWARD.iter().map(|tile| Backward::Tiles(*tile));
    let without = SIMT_SCORES.iter().map(|score| Backward::Simt(score));
    let passes = tiles.chain(without).flat_map(|backward| {
        let entry = move |pass: Pass| backward.entry(pass, dtype);
        [Pass::Keys, Pass::Queries].map(entry)
    });
    let deltas = [Backward::Tiles(BACKWARD[0]), Backward::Simt("dot")];
    let deltas = deltas.map(|backward| backward.entry(Pass::Delta, dtype));
    let merge = format!("attend_merge_{}", dtype_name(dtype));
    let entries = kernels.map(|kernel| kernel.entry(dtype));
    (entries.chain(passes).chain(deltas))
        .chain([merge])
        .collect()
}

/// Blocks of `attend_delta`.
pub(super) fn delta_tiles(dims: &Dims) -> usize {
    saturating_product([dims.t.div_ceil(DELTA_TILE), dims.h, dims.b])
}

/// Tokens that a block of a backward kernel holds.
pub(super) fn held_tokens(side: &BackwardSide) -> usize {
    16 * side.warps
}

/// As kernels without tensor cores name it.
fn simt_name(score: ScoreKind) -> &'static str {
    match score {
        ScoreKind::Dot => "dot",
        ScoreKind::Bias => "bias",
        ScoreKind::Phase { .. } => "phase",
    }
}

/// Of the dtypes that the kernels take, as their names end.
pub(super) fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        DType::F64 => "f64",
        _ => "f32",
    }
}

/// The kernel whose tile the heads and values fill best; that for few queries where there are few.
fn on_tensor_cores(demand: &Demand) -> Option<Kernel> {
    if !suits_tensor_cores(demand) {
        return None;
    }
    let few = demand.dims.t <= MOST_DECODED;
    let decoding = DECODE.iter().filter(|_| few).map(|x| Kernel::Decode(*x));
    let forward = FORWARD.iter().map(|x| Kernel::Forward(*x));
    best(decoding, demand).or_else(|| best(forward, demand))
}

/// Half precision, rows of whole chunks of 8, indices of 32 bits.
fn suits_tensor_cores(demand: &Demand) -> bool {
    let Dims { t, s, d, e, .. } = demand.dims;
    let amplitude = match demand.score {
        ScoreKind::Phase { amp_dim, .. } => amp_dim,
        _ => 0,
    };
    matches!(demand.dtype, DType::BF16 | DType::F16)
        && [d, e, amplitude]
            .iter()
            .all(|width| width.is_multiple_of(8))
        && t.max(s) < POSITION_LIMIT as usize
}

/// The one of least cost that takes the call.
fn best(kernels: impl Iterator<Item = Kernel>, demand: &Demand) -> Option<Kernel> {
    kernels
        .filter_map(|kernel| Some((kernel.cost(demand)?, kernel)))
        .min_by_key(|(cost, _)| *cost)
        .map(|(_, kernel)| kernel)
}

impl Kernel {
    fn cost(&self, demand: &Demand) -> Option<[usize; 3]> {
        let (score, width, values) = match self {
            Self::Forward(x) => (x.score, x.width, x.values),
            Self::Decode(x) => (x.score, x.width, x.values),
            Self::Simt(_) => return None,
        };
        let precise = matches!(self, Self::Decode(_));
        let same = score == score_name(demand.score, precise);
        same.then(|| cost(width, values, demand)).flatten()
    }
}

/// What is padded and what is done twice, in order of weight; `None` where the call does not fit the tile.
fn cost(width: usize, values: usize, demand: &Demand) -> Option<[usize; 3]> {
    let Dims { d, e, .. } = demand.dims;
    let fits = width_needed(demand.score, d) <= width && e <= 2 * width;
    fits.then_some([width, pieces(e, width, values), values])
}

/// As tiles name it; `precise` where there is nothing but that.
fn score_name(score: ScoreKind, precise: bool) -> &'static str {
    match score {
        ScoreKind::Dot => "dot",
        ScoreKind::Bias => "bias",
        ScoreKind::Phase {
            precision: Precision::Fast,
            ..
        } if !precise => "phase_fast",
        ScoreKind::Phase { .. } => "phase_precise",
    }
}

/// The phase's two parts get half of a tile's width each.
fn width_needed(score: ScoreKind, d: usize) -> usize {
    match score {
        ScoreKind::Phase { amp_dim, .. } => 2 * amp_dim.max(d.saturating_sub(amp_dim)),
        _ => d,
    }
}

/// Blocks that share the columns of the values, `width` · `values` each.
fn pieces(e: usize, width: usize, values: usize) -> usize {
    e.div_ceil(width * values)
}

/// The queries, a tile of keys and one of values.
fn forward_shared_bytes(tile: &ForwardTile) -> usize {
    // Rows have 16 bytes more, so that those of one column lie in different banks.
    let pitch = 2 * tile.width + 16;
    (query_tile(tile) + tile.keys * (1 + tile.values)) * pitch
}

/// Queries in a tile of the forward kernel.
pub(super) fn query_tile(tile: &ForwardTile) -> usize {
    16 * tile.warps * tile.row_tiles
}

impl Launch {
    /// One block for each tile of queries of each head, tiles fastest.
    pub(super) fn forward(tile: &ForwardTile, dims: &Dims) -> Result<Self> {
        let tiles = dims.t.div_ceil(query_tile(tile));
        Self::new(
            saturating_product([tiles, dims.h, dims.b]),
            pieces(dims.e, tile.width, tile.values),
            32 * tile.warps,
            forward_shared_bytes(tile),
        )
    }

    /// One block for each part of the keys of each block of rows of each key/value head, parts fastest.
    pub(super) fn decode(tile: &DecodeTile, dims: &Dims, split: &Split) -> Result<Self> {
        Self::new(
            saturating_product([split.parts, split.row_blocks, dims.g, dims.b]),
            pieces(dims.e, tile.width, tile.values),
            32 * tile.warps,
            tile.shared_bytes(),
        )
    }

    /// One block for each query of each head merges its parts, queries fastest.
    pub(super) fn merge(dims: &Dims) -> Result<Self> {
        const THREADS: usize = 256;
        Self::new(saturating_product([dims.t, dims.h, dims.b]), 1, THREADS, 0)
    }

    /// One block for each tile of queries of each head, tiles fastest.
    pub(super) fn delta(dims: &Dims) -> Result<Self> {
        Self::new(delta_tiles(dims), 1, 32 * DELTA_WARPS, 0)
    }

    /// One block for each tile of keys of each key/value head, tiles fastest, and each piece of the results.
    pub(super) fn backward_keys(tile: &BackwardTile, dims: &Dims) -> Result<Self> {
        let tiles = dims.s.div_ceil(held_tokens(&tile.keys));
        let blocks = saturating_product([tiles, dims.g, dims.b]);
        Self::backward(tile, &tile.keys, blocks)
    }

    /// One block for each tile of queries of each head, tiles fastest, and each piece of the results.
    pub(super) fn backward_queries(tile: &BackwardTile, dims: &Dims) -> Result<Self> {
        let tiles = dims.t.div_ceil(held_tokens(&tile.queries));
        let blocks = saturating_product([tiles, dims.h, dims.b]);
        Self::backward(tile, &tile.queries, blocks)
    }

    fn backward(tile: &BackwardTile, side: &BackwardSide, blocks: usize) -> Result<Self> {
        let shared = tile.shared_bytes(side);
        Self::new(blocks, side.pieces, 32 * side.warps, shared)
    }

    /// One block for each tile of rows of each key/value head, tiles fastest.
    pub(super) fn simt(dims: &Dims, dtype: DType, amp_dim: Option<usize>) -> Result<Self> {
        Self::new(
            saturating_product([simt_tiles(dims, dtype), dims.g, dims.b]),
            dims.e.div_ceil(SIMT_PIECE),
            SIMT_THREADS,
            simt_shared_bytes(dims.d, amp_dim.unwrap_or(dims.d), accumulator_bytes(dtype)),
        )
    }

    /// One block for each few rows of the output.
    pub(super) fn simt_delta(dims: &Dims) -> Result<Self> {
        let rows = saturating_product([dims.b, dims.h, dims.t]);
        let blocks = rows.div_ceil(SIMT_DELTA_WARPS);
        Self::new(blocks, 1, 32 * SIMT_DELTA_WARPS, 0)
    }

    /// One block for each tile of keys of each key/value head, tiles fastest, and each piece of dk and dv.
    pub(super) fn simt_keys(dims: &Dims, dtype: DType, amp_dim: Option<usize>) -> Result<Self> {
        let values = dims.e.div_ceil(simt_stage(accumulator_bytes(dtype)));
        let tiles = simt_key_tiles(dims, dtype);
        Self::simt_backward(dims, dtype, amp_dim, tiles, values)
    }

    /// One block for each tile of rows of each key/value head, tiles fastest, and each piece of dq.
    pub(super) fn simt_queries(dims: &Dims, dtype: DType, amp_dim: Option<usize>) -> Result<Self> {
        Self::simt_backward(dims, dtype, amp_dim, simt_tiles(dims, dtype), 0)
    }

    /// The results are as many stages of columns as q and k have, and `more`.
    fn simt_backward(
        dims: &Dims,
        dtype: DType,
        amp_dim: Option<usize>,
        tiles: usize,
        more: usize,
    ) -> Result<Self> {
        let bytes = accumulator_bytes(dtype);
        let width = simt_width(dims.d, amp_dim.unwrap_or(dims.d), bytes);
        let stages = width.div_ceil(simt_stage(bytes)).saturating_add(more);
        Self::new(
            saturating_product([tiles, dims.g, dims.b]),
            stages.div_ceil(SIMT_PIECE / simt_stage(bytes)),
            SIMT_THREADS,
            simt_backward_shared_bytes(amp_dim.is_some(), bytes),
        )
    }
}

/// Tiles of rows, queries times heads of a group, in a key/value head, for the kernels without tensor cores.
pub(super) fn simt_tiles(dims: &Dims, dtype: DType) -> usize {
    rows(dims).div_ceil(simt_rows(accumulator_bytes(dtype)))
}

/// Tiles of keys in a key/value head, for the kernels without tensor cores.
pub(super) fn simt_key_tiles(dims: &Dims, dtype: DType) -> usize {
    dims.s.div_ceil(simt_rows(accumulator_bytes(dtype)))
}

fn accumulator_bytes(dtype: DType) -> usize {
    match dtype {
        DType::F64 => size_of::<f64>(),
        _ => size_of::<f32>(),
    }
}

/// How the kernel for few queries shares a call out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Split {
    /// Blocks of [`DECODED_ROWS`] rows, queries times heads of a group.
    pub row_blocks: usize,
    /// Parts of the keys; of one part the kernel writes the output itself.
    pub parts: usize,
}

impl Split {
    /// About two blocks for each multiprocessor, but none for fewer than [`FEWEST_KEYS`] of the keys in sight.
    pub fn new(tile: &DecodeTile, dims: &Dims, keys: usize, multiprocessors: usize) -> Self {
        let row_blocks = rows(dims).div_ceil(DECODED_ROWS);
        let pieces = pieces(dims.e, tile.width, tile.values);
        let blocks = saturating_product([row_blocks, dims.g, dims.b, pieces]);
        let wanted = (2 * multiprocessors.min(MOST_MULTIPROCESSORS)).div_ceil(blocks.max(1));
        Self {
            row_blocks,
            parts: wanted.min(keys.div_ceil(FEWEST_KEYS)).max(1),
        }
    }

    /// Whether there is something to merge.
    pub fn is_split(&self) -> bool {
        self.parts > 1
    }

    /// f32 values of the parts' averages: (B, G, row blocks, parts, 16, E).
    pub fn out_elements(&self, dims: &Dims) -> usize {
        self.lse_elements(dims).saturating_mul(dims.e)
    }

    /// f32 values of the parts' log-sum-exp: (B, G, row blocks, parts, 16).
    pub fn lse_elements(&self, dims: &Dims) -> usize {
        match self.is_split() {
            true => saturating_product([dims.b, dims.g, self.row_blocks, self.parts, DECODED_ROWS]),
            false => 0,
        }
    }
}

/// Queries times heads of a group.
fn rows(dims: &Dims) -> usize {
    dims.t.saturating_mul(dims.h / dims.g.max(1))
}

/// The keys that some query may see, by index: less than all where both sides are spans.
pub(super) fn keys_in_sight(call: &Resolved) -> Range<usize> {
    let Dims { t, s, .. } = call.dims;
    let all = 0..s;
    let (Some(q), Some(k)) = (call.q_positions.start(), call.k_positions.start()) else {
        return all;
    };
    if t == 0 {
        return 0..0;
    }
    // Positions are below 2^53, so this window is as good as none and cannot overflow.
    let window = call.window.unwrap_or(i64::MAX).min(1 << 60);
    let (first, last) = (q, q + (t - 1) as i64);
    let from = first - window + 1;
    let to = if call.causal { last } else { last + window - 1 };
    let index = |position: i64| (position - k).clamp(0, s as i64) as usize;
    let (from, to) = (index(from), index(to + 1));
    from..to.max(from)
}

/// Memory on the GPU beyond inputs and output, tables of positions and turns aside, in bytes.
pub(super) fn workspace_bytes(kernel: &Kernel, dims: &Dims) -> usize {
    match kernel {
        Kernel::Decode(tile) => {
            let split = Split::new(tile, dims, dims.s, MOST_MULTIPROCESSORS);
            let elements = split
                .out_elements(dims)
                .saturating_add(split.lse_elements(dims));
            elements.saturating_mul(size_of::<f32>())
        }
        _ => 0,
    }
}

/// Positions and segments on the GPU, and what is said about tiles of them, in bytes.
pub(super) fn position_bytes(dims: &Dims) -> usize {
    /// Of 64 bits each, or of 32 with [`TileBounds`](super::cuda::call::TileBounds) for each 32 tokens or more.
    const OF_TOKEN: usize = 2 * size_of::<i64>();
    saturating_product([dims.b, dims.t.saturating_add(dims.s), OF_TOKEN])
}

/// The factor of q·k as the kernels on tensor cores take it, in units of log2, and whether q is negated first.
///
/// They want it above 0, but for the bias, so that the greatest product makes the greatest score.
pub(super) fn log2_factor(score: &ResolvedScore) -> (f32, bool) {
    match *score {
        ResolvedScore::LinearBias { scale, .. } => (in_log2(scale), false),
        ResolvedScore::Dot { scale } | ResolvedScore::Phase { scale, .. } => {
            (in_log2(scale.abs()).max(f32::MIN_POSITIVE), scale < 0.)
        }
    }
}

/// A slope as the kernels on tensor cores take it.
pub(super) fn log2_slope(slope: f64) -> f32 {
    in_log2(slope)
}

/// In units of log2, within f32.
fn in_log2(x: f64) -> f32 {
    const GREATEST: f64 = f32::MAX as f64;
    (x * std::f64::consts::LOG2_E).clamp(-GREATEST, GREATEST) as f32
}

/// The window as the kernels on tensor cores take it: the greatest one is none.
pub(super) fn window_of_32_bits(window: Option<i64>) -> i32 {
    match window {
        Some(window) if window < POSITION_LIMIT => window as i32,
        _ => i32::MAX,
    }
}

/// Longest table of turns, in distances: beyond it the kernels evaluate the power.
const LONGEST_REACH: u64 = 1 << 21;
/// Shortest, so that a growing cache does not make many.
const SHORTEST_REACH: u64 = 1 << 12;
/// Entries behind the greatest distance: rows of a tile beyond the last query read them.
const ENTRIES_BEYOND: usize = 256;

/// Distances that the table of turns should hold where none is greater than `greatest`.
pub(super) fn reach(greatest: u64) -> usize {
    let distances = greatest.saturating_add(1).min(LONGEST_REACH);
    distances.next_power_of_two().max(SHORTEST_REACH) as usize
}

/// Entries of the table of turns.
pub(super) fn turns_len(reach: usize) -> usize {
    2 * reach + ENTRIES_BEYOND
}

/// The table of turns: entry reach + d is {w(d), w(d − 1)}, w(d) = |d|^alpha · phase_scale in turns for each unit of
/// q_P·k_P. Evaluated in f64 and rounded once.
pub(super) fn turns(alpha: f64, phase_scale: f64, reach: usize) -> Vec<[f32; 2]> {
    let entries = turns_len(reach);
    let by_distance: Vec<f32> = (0..=entries - reach)
        .map(|d| ((d as f64).powf(alpha) * phase_scale) as f32)
        .collect();
    let at = |d: i64| by_distance[d.unsigned_abs() as usize];
    let first = -(reach as i64);
    (0..entries as i64)
        // Entry 0 is never read.
        .map(|entry| [at(first + entry), at((first + entry - 1).max(first))])
        .collect()
}

/// The greatest distance of a query and a key that it may see.
pub(super) fn greatest_distance(
    (q_first, q_last): (i64, i64),
    (k_first, k_last): (i64, i64),
    causal: bool,
    window: Option<i64>,
) -> u64 {
    let back = q_last.saturating_sub(k_first).max(0);
    let ahead = k_last.saturating_sub(q_first).max(0);
    let greatest = if causal { back } else { back.max(ahead) };
    greatest.min(window.map_or(i64::MAX, |w| w - 1)) as u64
}

#[cfg(test)]
mod tests {
    use super::super::{AttendSpec, DeviceKind, Problem};
    use super::*;
    use crate::positions::Positions;

    const HALVES: [DType; 2] = [DType::BF16, DType::F16];

    fn dims([b, h, g, t, s, d, e]: [usize; 7]) -> Dims {
        Dims {
            b,
            h,
            g,
            t,
            s,
            d,
            e,
        }
    }

    fn demand(widths: [usize; 2], t: usize, score: ScoreKind) -> Demand {
        let [d, e] = widths;
        Demand {
            dims: dims([2, 8, 2, t, 1000, d, e]),
            dtype: DType::BF16,
            score,
        }
    }

    fn phase(amp_dim: usize, precision: Precision) -> ScoreKind {
        ScoreKind::Phase { amp_dim, precision }
    }

    fn entry(demand: Demand) -> String {
        Kernel::choose(&demand).unwrap().entry(demand.dtype)
    }

    #[test]
    fn images_fit_the_gpus_that_run_them() {
        let default = [(true, 80, ""), (true, 90, ""), (false, 80, "")];
        for gpu in [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 1)] {
            assert!(some_image_fits(&default, gpu), "{gpu:?}");
        }
        assert!(!some_image_fits(&default, (7, 5)));
        assert!(!some_image_fits(&[(true, 90, "")], (8, 0)));
        assert!(!some_image_fits(&[(true, 90, "")], (10, 0)));
        assert!(!some_image_fits(&[(true, 86, "")], (8, 0)));
        assert!(some_image_fits(&[(true, 80, "")], (8, 9)));
        assert!(some_image_fits(&[(true, 90, "a")], (9, 0)));
        assert!(!some_image_fits(&[(false, 90, "a")], (10, 0)));
        assert!(some_image_fits(&[(false, 100, "f")], (10, 3)));
        assert!(!some_image_fits(&[(false, 100, "f")], (12, 0)));
        assert!(!some_image_fits(&[], (9, 0)));
    }

    #[test]
    fn kernel_is_the_narrowest_that_heads_and_values_fit() {
        use ScoreKind::{Bias, Dot};
        for (widths, score, expected) in [
            ([8, 8], Dot, "dot_w64_v1"),
            ([64, 64], Dot, "dot_w64_v1"),
            ([64, 128], Dot, "dot_w64_v2"),
            ([64, 136], Dot, "dot_w96_v2"),
            ([72, 72], Dot, "dot_w96_v1"),
            ([128, 128], Dot, "dot_w128_v1"),
            ([128, 256], Dot, "dot_w128_v2"),
            ([136, 8], Dot, "dot_w256_v1"),
            ([256, 512], Dot, "dot_w256_v1"),
            ([64, 64], Bias, "bias_w64_v1"),
            ([64, 128], Bias, "bias_w64_v1"),
            ([256, 256], Bias, "bias_w256_v1"),
            ([64, 64], phase(32, Precision::Fast), "phase_fast_w64_v1"),
            (
                [64, 64],
                phase(32, Precision::Precise),
                "phase_precise_w64_v1",
            ),
            // 40 of 64 columns are more than half.
            ([64, 64], phase(40, Precision::Fast), "phase_fast_w96_v1"),
            (
                [256, 256],
                phase(128, Precision::Fast),
                "phase_fast_w256_v1",
            ),
        ] {
            let expected = format!("attend_forward_{expected}_bf16");
            assert_eq!(entry(demand(widths, 17, score)), expected, "{widths:?}");
        }
    }

    #[test]
    fn few_queries_take_the_kernel_that_splits_keys_and_is_precise() {
        for t in [1, 16] {
            let kernel = Kernel::choose(&demand([128, 128], t, phase(64, Precision::Fast)));
            let kernel = kernel.unwrap();
            assert_eq!(
                kernel.entry(DType::F16),
                "attend_decode_phase_precise_w128_v1_f16"
            );
            assert_eq!(kernel.precision(), Precision::Precise);
            let dot = entry(demand([96, 192], t, ScoreKind::Dot));
            assert_eq!(dot, "attend_decode_dot_w128_v2_bf16");
        }
    }

    #[test]
    fn what_tensor_cores_cannot_take_runs_without_them() {
        let dot = demand([64, 64], 100, ScoreKind::Dot);
        for dtype in [DType::F32, DType::F64] {
            let name = format!("attend_simt_dot_{}", dtype_name(dtype));
            assert_eq!(entry(Demand { dtype, ..dot }), name);
        }
        for (widths, score, expected) in [
            ([63, 64], ScoreKind::Dot, "dot"),
            ([64, 63], ScoreKind::Bias, "bias"),
            ([64, 520 - 8], ScoreKind::Dot, "dot_w256"),
            ([64, 64], phase(20, Precision::Fast), "phase"),
            // The wider part has more than half of the widest tile.
            ([256, 64], phase(136, Precision::Fast), "phase"),
        ] {
            let name = entry(demand(widths, 100, score));
            if expected.ends_with("256") {
                assert!(name.contains(expected), "{name}");
            } else {
                assert_eq!(name, format!("attend_simt_{expected}_bf16"), "{widths:?}");
            }
        }
        let long = Demand {
            dims: Dims {
                s: 1 << 30,
                ..dot.dims
            },
            ..dot
        };
        assert_eq!(entry(long), "attend_simt_dot_bf16");
    }

    #[test]
    fn widths_beyond_every_kernel_are_refused_with_the_limit() {
        for widths in [[264, 8], [8, 520], [257, 257]] {
            let [d, e] = widths;
            let reason = Kernel::choose(&demand(widths, 100, ScoreKind::Dot)).unwrap_err();
            for part in ["256", "512", &format!("got {d} and {e}")] {
                assert!(reason.contains(part), "{reason}");
            }
        }
    }

    /// Every tile with a call that it was made for.
    fn tiles_with_calls() -> Vec<(Kernel, Dims)> {
        let calls = |width: usize| {
            [1, 7, 16, 17, 1000]
                .into_iter()
                .flat_map(move |t| [width, 2 * width].map(|e| dims([3, 6, 2, t, 777, width, e])))
        };
        let forward = FORWARD
            .iter()
            .flat_map(move |tile| calls(tile.width).map(|dims| (Kernel::Forward(*tile), dims)));
        let decode = DECODE
            .iter()
            .flat_map(move |tile| calls(tile.width).map(|dims| (Kernel::Decode(*tile), dims)));
        forward.chain(decode).collect()
    }

    #[test]
    fn grids_cover_every_query_head_and_value_once() -> Result<()> {
        for (kernel, dims) in tiles_with_calls() {
            let Dims {
                b, h, g, t, s, e, ..
            } = dims;
            match kernel {
                Kernel::Forward(tile) => {
                    let launch = Launch::forward(&tile, &dims)?;
                    let [x, y, z] = launch.grid.map(|n| n as usize);
                    assert_eq!((x % (h * b), z), (0, 1));
                    let queries = x / (h * b) * query_tile(&tile);
                    assert!(queries >= t && queries - t < query_tile(&tile));
                    let columns = y * tile.width * tile.values;
                    assert!(columns >= e && columns - e < tile.width * tile.values);
                }
                Kernel::Decode(tile) => {
                    let split = Split::new(&tile, &dims, s, 132);
                    let [x, y, z] = Launch::decode(&tile, &dims, &split)?.grid;
                    let rows = split.row_blocks * DECODED_ROWS;
                    assert!(rows >= t * h / g && rows - t * h / g < DECODED_ROWS);
                    assert_eq!((x as usize, z), (split.parts * split.row_blocks * g * b, 1));
                    assert!(y as usize * tile.width * tile.values >= e);
                    assert_eq!(Launch::merge(&dims)?.grid, [(t * h * b) as u32, 1, 1]);
                }
                Kernel::Simt(_) => (),
            }
        }
        Ok(())
    }

    /// Of compute capabilities 8.6, 8.9 and 12.0, which have the least (CUDA programming guide).
    const LEAST_SHARED_BYTES: usize = 99 << 10;

    /// Demands of every kind, also such as no kernel on tensor cores takes.
    fn demands() -> Vec<Demand> {
        let mut demands = Vec::new();
        for dtype in [DType::BF16, DType::F16, DType::F32, DType::F64] {
            for [d, e] in [
                [8, 8],
                [64, 64],
                [64, 128],
                [96, 96],
                [96, 192],
                [128, 256],
                [256, 256],
                [256, 264],
                [64, 512],
                [63, 64],
                [64, 63],
            ] {
                let amp_dim = d / 16 * 8;
                let mut scores = vec![ScoreKind::Dot, ScoreKind::Bias];
                for precision in [Precision::Fast, Precision::Precise] {
                    scores.push(phase(amp_dim.max(4), precision));
                    scores.push(phase(d - 8.min(d - 1), precision));
                }
                for t in [1, 16, 17, 1000] {
                    let of_score = |score: &ScoreKind| Demand {
                        dtype,
                        ..demand([d, e], t, *score)
                    };
                    demands.extend(scores.iter().map(of_score));
                }
            }
        }
        demands
    }

    #[test]
    fn backward_kernels_are_the_narrowest_that_hold_whole_heads_and_values() {
        use ScoreKind::{Bias, Dot};
        let entry = |demand: Demand| Backward::choose(&demand).entry(Pass::Keys, demand.dtype);
        for (widths, score, expected) in [
            ([8, 8], Dot, "dot_w64_v1"),
            ([64, 64], Dot, "dot_w64_v1"),
            ([64, 128], Dot, "dot_w64_v2"),
            ([72, 72], Dot, "dot_w128_v1"),
            ([64, 136], Dot, "dot_w128_v2"),
            ([128, 256], Dot, "dot_w128_v2"),
            ([136, 8], Dot, "dot_w256_v1"),
            ([64, 128], Bias, "bias_w128_v1"),
            ([256, 256], Bias, "bias_w256_v1"),
            ([64, 64], phase(32, Precision::Fast), "phase_fast_w64_v1"),
            (
                [64, 64],
                phase(40, Precision::Precise),
                "phase_precise_w128_v1",
            ),
            (
                [256, 256],
                phase(128, Precision::Fast),
                "phase_fast_w256_v1",
            ),
        ] {
            let expected = format!("attend_backward_{expected}_keys_bf16");
            assert_eq!(entry(demand(widths, 17, score)), expected, "{widths:?}");
        }
        for (widths, score, expected) in [
            ([63, 64], Dot, "dot"),
            ([256, 264], Dot, "dot"),
            ([256, 64], phase(136, Precision::Fast), "phase"),
        ] {
            let expected = format!("attend_simt_backward_{expected}_keys_bf16");
            assert_eq!(entry(demand(widths, 17, score)), expected, "{widths:?}");
        }
        let single = Demand {
            dtype: DType::F32,
            ..demand([64, 64], 17, Bias)
        };
        let names = Pass::ALL.map(|pass| Backward::choose(&single).entry(pass, single.dtype));
        assert_eq!(
            names,
            [
                "attend_simt_delta_f32",
                "attend_simt_backward_bias_keys_f32",
                "attend_simt_backward_bias_queries_f32"
            ]
        );
    }

    #[test]
    fn backward_pass_is_as_precise_as_the_forward_pass() {
        for demand in demands() {
            let precision = match Backward::choose(&demand) {
                Backward::Tiles(tile) if tile.score == "phase_fast" => Precision::Fast,
                _ => Precision::Precise,
            };
            let forward = Kernel::choose(&demand).unwrap();
            let is_phase = matches!(demand.score, ScoreKind::Phase { .. });
            assert!(
                !is_phase
                    || precision == forward.precision()
                    || Backward::choose(&demand) == Backward::Simt("phase"),
                "{demand:?}"
            );
        }
    }

    #[test]
    fn backward_pass_on_tensor_cores_has_a_forward_kernel_there_of_the_same_score() {
        let mut seen = 0;
        for demand in demands() {
            let backward = Backward::choose(&demand);
            match (backward, backward.forward(&demand)) {
                (Backward::Tiles(tile), Kernel::Forward(forward)) => {
                    assert_eq!(tile.score, forward.score, "{demand:?}");
                    seen += 1;
                }
                (Backward::Simt(score), Kernel::Simt(forward)) => assert_eq!(score, forward),
                (backward, forward) => panic!("{demand:?}: {backward:?} {forward:?}"),
            }
        }
        assert!(seen > 100);
    }

    #[test]
    fn output_of_many_queries_leaves_what_the_backward_pass_on_tensor_cores_reads() {
        for demand in demands() {
            let (backward, forward) = (Backward::choose(&demand), Kernel::choose(&demand));
            if let (Backward::Tiles(_), true) = (backward, demand.dims.t > MOST_DECODED) {
                assert_eq!(Ok(backward.forward(&demand)), forward, "{demand:?}");
            }
        }
    }

    #[test]
    fn backward_grids_cover_every_key_query_and_row_once() -> Result<()> {
        for tile in BACKWARD {
            for (t, s) in [(1, 777), (64, 64), (65, 1), (1000, 63)] {
                let dims = dims([3, 6, 2, t, s, tile.width, tile.values * tile.width]);
                let covers = |blocks: u32, heads: usize, held: usize, len: usize| {
                    let blocks = blocks as usize;
                    assert_eq!(blocks % (heads * 3), 0);
                    let tokens = blocks / (heads * 3) * held;
                    assert!(tokens >= len && tokens - len < held);
                };
                let keys = Launch::backward_keys(tile, &dims)?;
                covers(keys.grid[0], 2, held_tokens(&tile.keys), s);
                let queries = Launch::backward_queries(tile, &dims)?;
                covers(queries.grid[0], 6, held_tokens(&tile.queries), t);
                covers(Launch::delta(&dims)?.grid[0], 6, DELTA_TILE, t);
                for (launch, side) in [(keys, tile.keys), (queries, tile.queries)] {
                    assert_eq!(launch.grid[1..], [side.pieces as u32, 1]);
                    assert_eq!(launch.block, 32 * side.warps as u32);
                }
            }
        }
        Ok(())
    }

    #[test]
    fn marks_of_rows_are_of_whole_tiles_of_queries() {
        for tile in BACKWARD {
            assert!(DELTA_TILE.is_multiple_of(tile.keys.tile), "{tile:?}");
        }
    }

    #[test]
    fn simt_backward_grids_cover_rows_and_columns() -> Result<()> {
        for (dtype, rows) in [(DType::F32, 64), (DType::BF16, 64), (DType::F64, 32)] {
            for (t, s, d, e, keys, queries) in [
                (1, 1, 40, 50, 1, 1),
                (33, 65, 64, 64, 1, 1),
                (70, 31, 100, 300, 4, 1),
                (129, 64, 256, 512, 6, 2),
            ] {
                let dims = dims([2, 6, 2, t, s, d, e]);
                let [x, y, z] = Launch::simt_keys(&dims, dtype, None)?.grid;
                assert_eq!((x as usize, z), (4 * s.div_ceil(rows), 1));
                assert_eq!(y, keys, "{dtype:?} {d} {e}");
                let [x, y, z] = Launch::simt_queries(&dims, dtype, Some(d / 2))?.grid;
                assert_eq!((x as usize, z), (4 * (3 * t).div_ceil(rows), 1));
                assert_eq!(y, queries, "{dtype:?} {d} {e}");
                let delta = Launch::simt_delta(&dims)?;
                assert!(delta.grid[0] as usize * SIMT_DELTA_WARPS >= 2 * 6 * t);
                assert_eq!(delta.block as usize, 32 * SIMT_DELTA_WARPS);
            }
        }
        Ok(())
    }

    #[test]
    fn shared_memory_of_every_kernel_fits_every_gpu() {
        for (kernel, _) in tiles_with_calls() {
            let bytes = match kernel {
                Kernel::Forward(tile) => forward_shared_bytes(&tile),
                Kernel::Decode(tile) => tile.shared_bytes(),
                Kernel::Simt(_) => continue,
            };
            assert!(bytes <= LEAST_SHARED_BYTES, "{kernel:?}: {bytes}");
        }
        for tile in BACKWARD {
            for side in [tile.keys, tile.queries] {
                let bytes = tile.shared_bytes(&side);
                assert!(bytes <= LEAST_SHARED_BYTES, "{tile:?}: {bytes}");
            }
        }
        for bytes in [4, 8] {
            // As the kernels' own sizes add up to.
            let sizes = [false, true].map(|is_phase| simt_backward_shared_bytes(is_phase, bytes));
            assert_eq!(sizes, [[48_768, 57_984], [38_400, 47_104]][bytes / 8]);
            for d in 1..=WIDEST_HEAD {
                for amp_dim in [1, d / 2, d - 1, d] {
                    let shared = simt_shared_bytes(d, amp_dim, bytes);
                    assert!(
                        shared <= LEAST_SHARED_BYTES,
                        "{bytes} {d} {amp_dim}: {shared}"
                    );
                }
            }
        }
    }

    #[test]
    fn simt_grid_covers_rows_and_columns() -> Result<()> {
        for dtype in [DType::F32, DType::F64] {
            for t in [1, 31, 32, 33, 129] {
                let dims = dims([2, 6, 2, t, 50, 40, 300]);
                let [x, y, z] = Launch::simt(&dims, dtype, None)?.grid;
                let block_rows = simt_rows(accumulator_bytes(dtype));
                let rows = x as usize / 4 * block_rows;
                assert!(rows >= 3 * t && rows - 3 * t < block_rows);
                assert_eq!((y, z), (3, 1));
            }
        }
        Ok(())
    }

    #[test]
    fn grid_too_large_is_an_error_and_sizes_do_not_overflow() {
        let absurd = dims([usize::MAX, 8, 2, usize::MAX, usize::MAX, 64, 64]);
        let forward = FORWARD.first().unwrap();
        let decode = DECODE.first().unwrap();
        let split = Split::new(decode, &absurd, usize::MAX, 132);
        let launches = [
            Launch::forward(forward, &absurd),
            Launch::decode(decode, &absurd, &split),
            Launch::merge(&absurd),
            Launch::simt(&absurd, DType::F32, None),
            Launch::delta(&absurd),
            Launch::backward_keys(&BACKWARD[0], &absurd),
            Launch::backward_queries(&BACKWARD[0], &absurd),
            Launch::simt_delta(&absurd),
            Launch::simt_keys(&absurd, DType::F32, None),
            Launch::simt_queries(&absurd, DType::F64, None),
        ];
        for launch in launches {
            let error = launch.unwrap_err().to_string();
            assert!(error.contains("blocks"), "{error}");
        }
        for backward in [Backward::Tiles(BACKWARD[0]), Backward::Simt("dot")] {
            let bytes = backward.workspace_bytes(&absurd, DType::BF16);
            assert_eq!(bytes, usize::MAX);
            assert_eq!(backward.saved_bytes(&absurd, DType::BF16), usize::MAX);
        }
        // So many blocks need no parts.
        assert_eq!(workspace_bytes(&Kernel::Decode(*decode), &absurd), 0);
        assert_eq!(position_bytes(&absurd), usize::MAX);
    }

    #[test]
    fn split_fills_the_gpu_with_parts_worth_a_block() {
        let tile = DECODE.iter().find(|tile| tile.width == 128).unwrap();
        let split = |b: usize, t: usize, s: usize| {
            Split::new(tile, &dims([b, 32, 8, t, s, 128, 128]), s, 132)
        };
        // 8 heads: 33 parts make 264 blocks for 132 multiprocessors.
        assert_eq!(split(1, 1, 131_072).parts, 33);
        // Few keys: none but whole parts of 256 at least.
        assert_eq!(split(1, 1, 1000).parts, 4);
        assert_eq!(split(1, 1, 256).parts, 1);
        assert_eq!(split(1, 1, 1).parts, 1);
        // Enough heads without splitting.
        assert_eq!(split(64, 1, 131_072).parts, 1);
        // 16 queries of 4 heads a group are 4 blocks of rows.
        assert_eq!(split(1, 16, 131_072).row_blocks, 4);
        assert_eq!(split(1, 5, 100).row_blocks, 2);
    }

    #[test]
    fn split_has_a_part_at_least_and_none_without_many_keys() {
        let tile = DECODE.first().unwrap();
        for s in [0, 1, 255, 256, 257, 5000, 65_537] {
            for multiprocessors in [0, 1, 7, 132, 10_000] {
                let dims = dims([1, 2, 1, 1, s, 64, 64]);
                let split = Split::new(tile, &dims, s, multiprocessors);
                assert!(split.parts >= 1);
                assert!(split.parts == 1 || s > (split.parts - 1) * FEWEST_KEYS);
                // Of one part nothing is merged.
                assert_eq!(split.is_split(), split.out_elements(&dims) > 0);
            }
        }
    }

    #[test]
    fn workspace_of_a_plan_is_no_less_than_any_split_takes() {
        let tile = DECODE.first().unwrap();
        for (b, t, s) in [(1, 1, 100), (1, 16, 4096), (3, 5, 70_000)] {
            let dims = dims([b, 8, 2, t, s, 64, 64]);
            for multiprocessors in [1, 108, 132, 148, 256] {
                let split = Split::new(tile, &dims, s, multiprocessors);
                let bytes = 4 * (split.out_elements(&dims) + split.lse_elements(&dims));
                assert!(bytes <= workspace_bytes(&Kernel::Decode(*tile), &dims));
            }
        }
    }

    fn resolved(t: usize, s: usize, spec: &AttendSpec) -> Result<Resolved> {
        let problem = Problem {
            q: Operand::contiguous([1, 1, t, 8]),
            k: Operand::contiguous([1, 1, s, 8]),
            v: Operand::contiguous([1, 1, s, 8]),
            dtype: DType::F32,
            device: DeviceKind::Cpu,
        };
        problem.resolve(spec)
    }

    #[test]
    fn keys_in_sight_are_the_least_range_that_holds_all_visible_ones() -> Result<()> {
        for (q, t, k, s) in [
            (90, 10, 0, 100),
            (0, 5, 3, 9),
            (50, 4, 0, 20),
            (0, 4, 50, 7),
        ] {
            for causal in [true, false] {
                for window in [None, Some(1), Some(7), Some(60), Some(usize::MAX)] {
                    let span = |start, len| Positions::Span { start, len };
                    let spec = AttendSpec {
                        causal,
                        window,
                        ..AttendSpec::causal().with_positions(span(q, t), span(k, s))
                    };
                    let call = resolved(t, s, &spec)?;
                    let seen: Vec<usize> = (0..s)
                        .filter(|j| (0..t).any(|i| call.sees(q + i as i64, k + *j as i64)))
                        .collect();
                    let expected = match (seen.first(), seen.last()) {
                        (Some(first), Some(last)) => *first..last + 1,
                        _ => 0..0,
                    };
                    let keys = keys_in_sight(&call);
                    assert_eq!(
                        keys.len(),
                        expected.len(),
                        "{q} {t} {k} {s} {causal} {window:?}"
                    );
                    if !keys.is_empty() {
                        assert_eq!(keys, expected);
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn operand_is_copied_only_where_rows_are_not_aligned() {
        let forward = Kernel::Forward(FORWARD[0]);
        let simt = Kernel::Simt("dot");
        let plain = Operand::contiguous([2, 4, 10, 64]);
        let interleaved = Operand {
            strides: [2560, 64, 256, 1],
            ..plain
        };
        let odd_rows = Operand {
            strides: [2600, 650, 65, 1],
            ..plain
        };
        let odd_offset = Operand { offset: 4, ..plain };
        let repeated = Operand {
            strides: [640, 0, 64, 1],
            ..plain
        };
        let across = Operand {
            strides: [2560, 640, 1, 10],
            ..plain
        };
        // What a dimension of one strides over matters to nobody.
        let one_row = Operand {
            dims: [1, 1, 1, 64],
            strides: [3, 5, 7, 1],
            offset: 8,
        };
        for dtype in HALVES {
            for (operand, on_tensor_cores, without) in [
                (plain, false, false),
                (interleaved, false, false),
                (repeated, false, false),
                (one_row, false, false),
                (odd_rows, true, false),
                (odd_offset, true, false),
                (across, true, true),
            ] {
                assert_eq!(
                    forward.needs_copy(&operand, dtype),
                    on_tensor_cores,
                    "{operand:?}"
                );
                assert_eq!(simt.needs_copy(&operand, dtype), without, "{operand:?}");
            }
        }
    }

    #[test]
    fn factor_is_positive_but_for_the_bias() {
        let log2e = std::f32::consts::LOG2_E;
        let dot = |scale| log2_factor(&ResolvedScore::Dot { scale });
        assert_eq!(dot(0.125), (0.125 * log2e, false));
        assert_eq!(dot(-2.), (2. * log2e, true));
        assert_eq!(dot(0.), (f32::MIN_POSITIVE, false));
        assert_eq!(dot(1e-60), (f32::MIN_POSITIVE, false));
        assert_eq!(dot(f64::from(f32::MAX)), (f32::MAX, false));
        let bias = ResolvedScore::LinearBias {
            scale: -2.,
            slopes: [0.5].into(),
        };
        assert_eq!(log2_factor(&bias), (-2. * log2e, false));
        assert_eq!(log2_slope(0.5), 0.5 * log2e);
    }

    #[test]
    fn window_beyond_all_positions_is_none() {
        assert_eq!(window_of_32_bits(None), i32::MAX);
        assert_eq!(window_of_32_bits(Some(i64::MAX)), i32::MAX);
        assert_eq!(window_of_32_bits(Some(POSITION_LIMIT)), i32::MAX);
        assert_eq!(window_of_32_bits(Some(POSITION_LIMIT - 1)), (1 << 30) - 1);
        assert_eq!(window_of_32_bits(Some(1)), 1);
    }

    #[test]
    fn turns_hold_each_distance_and_the_one_before() {
        let (alpha, phase_scale, reach) = (0.3, 0.25, 300);
        let table = turns(alpha, phase_scale, reach);
        assert_eq!(table.len(), turns_len(reach));
        let w = |d: i64| ((d.abs() as f64).powf(alpha) * phase_scale) as f32;
        for d in 1 - reach as i64..=(reach + ENTRIES_BEYOND - 1) as i64 {
            let entry = table[(reach as i64 + d) as usize];
            assert_eq!(entry, [w(d), w(d - 1)], "{d}");
        }
        assert_eq!(table[reach], [0., w(1)]);
    }

    #[test]
    fn reach_holds_the_greatest_distance_up_to_its_limit() {
        assert_eq!(reach(0), 4096);
        assert_eq!(reach(4095), 4096);
        assert_eq!(reach(4096), 8192);
        assert_eq!(reach(131_071), 131_072);
        assert_eq!(reach(u64::MAX), 1 << 21);
    }

    #[test]
    fn greatest_distance_is_of_what_is_seen() {
        let (q, k) = ((100, 199), (0, 399));
        assert_eq!(greatest_distance(q, k, true, None), 199);
        assert_eq!(greatest_distance(q, k, false, None), 299);
        assert_eq!(greatest_distance(q, k, false, Some(64)), 63);
        assert_eq!(greatest_distance((0, 9), (50, 60), true, None), 0);
        assert_eq!(greatest_distance(q, k, true, Some(i64::MAX)), 199);
    }
}
