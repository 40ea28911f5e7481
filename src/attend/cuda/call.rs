//! The kernels' arguments, field by field as in `kernels/call.cuh`. An address is a `u64`, 0 for none.

/// q, k or v: strides in elements; neighbours along the width lie side by side.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Operand {
    pub data: u64,
    pub batch: i64,
    pub head: i64,
    pub token: i64,
}

/// What tokens of one tile have in common.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct TileBounds {
    /// Least and greatest position, padding aside; first > last where all is padding.
    pub first: i32,
    pub last: i32,
    /// Least and greatest segment, padding aside.
    pub segment_first: i32,
    pub segment_last: i32,
    /// [`Self::CONSECUTIVE`] and [`Self::PADDED`].
    pub flags: i32,
    pub reserved: [i32; 3],
}

impl TileBounds {
    /// Positions are first, first + 1, … without padding.
    pub const CONSECUTIVE: i32 = 1;
    /// Some token is padding.
    pub const PADDED: i32 = 2;
}

/// Where queries or keys stand: a span, or a list of positions and segments.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Tokens {
    /// (1|B, len) pairs of position and segment, 0 for a span.
    pub list: u64,
    /// (1|B, tiles) of [`TileBounds`].
    pub tiles: u64,
    /// Tokens from one row of `list` to the next.
    pub batch: i64,
    /// Tiles from one row of `tiles` to the next.
    pub tiles_batch: i64,
    pub start: i32,
    pub len: i32,
}

/// How scores are made, in units of log2.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct ScoreCall {
    pub factor: f32,
    pub negate: i32,
    /// (H) of f32.
    pub slopes: u64,
    /// Pairs of f32, see [`turns`](super::super::launch::turns).
    pub turns: u64,
    pub reach: i32,
    pub alpha: f32,
    pub phase_scale: f32,
}

/// The one argument of a kernel on tensor cores.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct ForwardCall {
    pub q: Operand,
    pub k: Operand,
    /// The second from column `width` of the values on.
    pub v: [Operand; 2],
    pub out: u64,
    pub lse: u64,
    pub queries: Tokens,
    pub keys: Tokens,
    pub score: ScoreCall,
    pub heads: i32,
    pub group: i32,
    pub head_width: i32,
    pub amplitude_width: i32,
    pub value_width: i32,
    pub causal: i32,
    pub window: i32,
    /// Forward: tiles of queries in a head. Decode: parts that the keys are split into.
    pub tiles: i32,
    pub part_out: u64,
    pub part_lse: u64,
    /// (B,H,T) pairs of f32, or 0: log2 of the sum of a row's weights, and what rounding it lost; infinity where nothing
    /// is seen.
    pub statistics: u64,
    /// (B,H,T,E) in out's dtype, or 0: what rounding the output lost.
    pub rest: u64,
}

/// What the backward pass needs of each row: the argument of `attend_delta`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct DeltaCall {
    /// (B,H,T,E) without gaps, as the forward pass left it.
    pub out: u64,
    pub rest: u64,
    pub grad: Operand,
    /// As in [`ForwardCall`].
    pub statistics: u64,
    /// (B,H,T) pairs of f32: the first of a row's statistics, and delta times the scale.
    pub rows: u64,
    /// (B,H,ceil(T/64)) of i32: whether a tile of 64 queries has a score so large that its statistics' second part counts.
    pub enormous: u64,
    pub heads: i32,
    /// T.
    pub len: i32,
    pub value_width: i32,
    /// Without its sign.
    pub scale: f32,
}

/// The one argument of the backward kernels on tensor cores.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct BackwardCall {
    pub q: Operand,
    pub k: Operand,
    /// The second from column `width` of the values on.
    pub v: [Operand; 2],
    /// The output's gradient, in pieces as `v`.
    pub grad: [Operand; 2],
    /// The results; a kernel for keys writes dk and dv, one for queries dq.
    pub dq: Operand,
    pub dk: Operand,
    pub dv: Operand,
    /// As in [`DeltaCall`].
    pub rows: u64,
    pub statistics: u64,
    pub enormous: u64,
    pub queries: Tokens,
    pub keys: Tokens,
    pub score: ScoreCall,
    /// In natural units, of any sign.
    pub scale: f32,
    pub heads: i32,
    pub group: i32,
    pub head_width: i32,
    pub amplitude_width: i32,
    pub value_width: i32,
    pub causal: i32,
    pub window: i32,
    /// Of keys, or of queries, in a head: those that the kernel's blocks are for.
    pub tiles: i32,
    pub reserved: i32,
}

/// Where queries or keys stand, for the kernel without tensor cores: absolute positions of 64 bits.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct SimtTokens {
    /// (1|B, len) of i64, 0 for a span.
    pub positions: u64,
    /// (1|B, len) of i64, 0 for one segment.
    pub segments: u64,
    /// Tokens from one row of both to the next.
    pub batch: i64,
    pub start: i64,
    pub len: i64,
}

/// What the kernels without tensor cores are told of a call, beside its operands; scores are in natural units.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct SimtProblem {
    pub queries: SimtTokens,
    pub keys: SimtTokens,
    pub scale: f64,
    /// (H) of f64.
    pub slopes: u64,
    /// As in [`ScoreCall`], unless q is f64.
    pub turns: u64,
    pub alpha: f64,
    pub phase_scale: f64,
    pub window: i64,
    pub reach: i32,
    pub heads: i32,
    pub group: i32,
    pub head_width: i32,
    pub amplitude_width: i32,
    pub value_width: i32,
    pub causal: i32,
    /// Of rows in a key/value head, those that the kernel's blocks are for.
    pub tiles: i32,
}

/// The one argument of the kernel without tensor cores. Here and in what follows Real is f64 where q is, else f32.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct SimtCall {
    pub q: Operand,
    pub k: Operand,
    pub v: Operand,
    pub out: u64,
    /// (B,H,T) of Real, or 0.
    pub lse: u64,
    /// (B,H,T) pairs of Real, or 0: a row's greatest score, −∞ where nothing is seen, and the logarithm of the sum of its
    /// weights.
    pub statistics: u64,
    /// (B,H,T,E) in out's dtype, or 0: what rounding the output to half precision lost.
    pub rest: u64,
    pub problem: SimtProblem,
}

/// What the backward pass needs of each row: the argument of `attend_simt_delta`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct SimtDeltaCall {
    pub out: u64,
    /// May be 0.
    pub rest: u64,
    pub grad: Operand,
    /// As in [`SimtCall`].
    pub statistics: u64,
    /// (B,H,T) of Real.
    pub delta: u64,
    /// B · H · T.
    pub rows: i64,
    /// T.
    pub len: i64,
    pub heads: i32,
    pub value_width: i32,
}

/// The one argument of the backward kernels without tensor cores.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct SimtBackwardCall {
    pub q: Operand,
    pub k: Operand,
    pub v: Operand,
    pub grad: Operand,
    /// The results; a kernel for keys writes dk and dv, one for queries dq.
    pub dq: Operand,
    pub dk: Operand,
    pub dv: Operand,
    /// Both as in [`SimtDeltaCall`].
    pub statistics: u64,
    pub delta: u64,
    pub problem: SimtProblem,
}

#[cfg(feature = "cuda")]
mod launched {
    #![allow(unsafe_code)]
    use super::*;
    use candle_core::cuda_backend::cudarc::driver::DeviceRepr;

    // SAFETY: `#[repr(C)]` structures of numbers, laid out as the kernels' (see the tests below).
    unsafe impl DeviceRepr for ForwardCall {}
    // SAFETY: as above.
    unsafe impl DeviceRepr for DeltaCall {}
    // SAFETY: as above.
    unsafe impl DeviceRepr for BackwardCall {}
    // SAFETY: as above.
    unsafe impl DeviceRepr for SimtCall {}
    // SAFETY: as above.
    unsafe impl DeviceRepr for SimtDeltaCall {}
    // SAFETY: as above.
    unsafe impl DeviceRepr for SimtBackwardCall {}
    // SAFETY: as above.
    unsafe impl DeviceRepr for TileBounds {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn structures_have_the_sizes_that_the_kernels_assert() {
        assert_eq!(size_of::<Operand>(), 32);
        assert_eq!(size_of::<TileBounds>(), 32);
        assert_eq!(size_of::<Tokens>(), 40);
        assert_eq!(size_of::<ScoreCall>(), 40);
        assert_eq!(size_of::<ForwardCall>(), 328);
        assert_eq!(size_of::<DeltaCall>(), 88);
        assert_eq!(size_of::<BackwardCall>(), 472);
        assert_eq!(size_of::<SimtTokens>(), 40);
        assert_eq!(size_of::<SimtProblem>(), 160);
        assert_eq!(size_of::<SimtCall>(), 288);
        assert_eq!(size_of::<SimtDeltaCall>(), 88);
        assert_eq!(size_of::<SimtBackwardCall>(), 400);
    }

    #[test]
    fn fields_lie_where_the_kernels_read_them() {
        assert_eq!(offset_of!(Operand, token), 24);
        assert_eq!(offset_of!(TileBounds, segment_first), 8);
        assert_eq!(offset_of!(TileBounds, flags), 16);
        assert_eq!(offset_of!(Tokens, batch), 16);
        assert_eq!(offset_of!(Tokens, start), 32);
        assert_eq!(offset_of!(Tokens, len), 36);
        assert_eq!(offset_of!(ScoreCall, slopes), 8);
        assert_eq!(offset_of!(ScoreCall, turns), 16);
        assert_eq!(offset_of!(ScoreCall, reach), 24);
        assert_eq!(offset_of!(ScoreCall, phase_scale), 32);
        assert_eq!(offset_of!(ForwardCall, v), 64);
        assert_eq!(offset_of!(ForwardCall, out), 128);
        assert_eq!(offset_of!(ForwardCall, queries), 144);
        assert_eq!(offset_of!(ForwardCall, score), 224);
        assert_eq!(offset_of!(ForwardCall, heads), 264);
        assert_eq!(offset_of!(ForwardCall, tiles), 292);
        assert_eq!(offset_of!(ForwardCall, part_out), 296);
        assert_eq!(offset_of!(ForwardCall, part_lse), 304);
        assert_eq!(offset_of!(ForwardCall, statistics), 312);
        assert_eq!(offset_of!(ForwardCall, rest), 320);
        assert_eq!(offset_of!(DeltaCall, grad), 16);
        assert_eq!(offset_of!(DeltaCall, enormous), 64);
        assert_eq!(offset_of!(DeltaCall, value_width), 80);
        assert_eq!(offset_of!(BackwardCall, grad), 128);
        assert_eq!(offset_of!(BackwardCall, dv), 256);
        assert_eq!(offset_of!(BackwardCall, rows), 288);
        assert_eq!(offset_of!(BackwardCall, queries), 312);
        assert_eq!(offset_of!(BackwardCall, score), 392);
        assert_eq!(offset_of!(BackwardCall, scale), 432);
        assert_eq!(offset_of!(BackwardCall, tiles), 464);
        assert_eq!(offset_of!(SimtTokens, start), 24);
        assert_eq!(offset_of!(SimtProblem, scale), 80);
        assert_eq!(offset_of!(SimtProblem, turns), 96);
        assert_eq!(offset_of!(SimtProblem, window), 120);
        assert_eq!(offset_of!(SimtProblem, reach), 128);
        assert_eq!(offset_of!(SimtProblem, tiles), 156);
        assert_eq!(offset_of!(SimtCall, out), 96);
        assert_eq!(offset_of!(SimtCall, rest), 120);
        assert_eq!(offset_of!(SimtCall, problem), 128);
        assert_eq!(offset_of!(SimtDeltaCall, grad), 16);
        assert_eq!(offset_of!(SimtDeltaCall, delta), 56);
        assert_eq!(offset_of!(SimtDeltaCall, len), 72);
        assert_eq!(offset_of!(SimtDeltaCall, value_width), 84);
        assert_eq!(offset_of!(SimtBackwardCall, grad), 96);
        assert_eq!(offset_of!(SimtBackwardCall, dq), 128);
        assert_eq!(offset_of!(SimtBackwardCall, statistics), 224);
        assert_eq!(offset_of!(SimtBackwardCall, problem), 240);
    }
}
