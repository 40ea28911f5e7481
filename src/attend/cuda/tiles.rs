// Which kernels are compiled, and their tiles: read by the build script, which compiles them, and by `launch.rs`,
// which chooses among them.

/// One forward kernel for tensor cores, compiled for bf16 and f16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForwardTile {
    /// `dot`, `bias`, `phase_fast` or `phase_precise`.
    pub score: &'static str,
    /// Head width in shared memory; narrower heads are padded. The phase's two parts get half of it each.
    pub width: usize,
    /// Pieces of the values, `width` columns each, that one block averages.
    pub values: usize,
    /// Warps in a block.
    pub warps: usize,
    /// Tiles of 16 queries that a warp holds.
    pub row_tiles: usize,
    /// Keys in a tile.
    pub keys: usize,
    /// Blocks that must fit one multiprocessor together: bounds the registers.
    pub blocks: usize,
}

const fn tile(
    score: &'static str,
    [width, values, warps, row_tiles, keys, blocks]: [usize; 6],
) -> ForwardTile {
    ForwardTile { score, width, values, warps, row_tiles, keys, blocks }
}

/// Narrow before wide, for each score.
pub const FORWARD: &[ForwardTile] = &[
    tile("dot", [64, 1, 4, 2, 48, 3]),
    tile("dot", [64, 2, 4, 2, 64, 2]),
    tile("dot", [96, 1, 4, 2, 64, 2]),
    tile("dot", [96, 2, 4, 1, 64, 2]),
    tile("dot", [128, 1, 4, 2, 64, 2]),
    tile("dot", [128, 2, 4, 1, 64, 2]),
    tile("dot", [256, 1, 4, 1, 32, 2]),
    tile("bias", [64, 1, 4, 2, 48, 3]),
    tile("bias", [96, 1, 4, 2, 64, 2]),
    tile("bias", [128, 1, 4, 2, 64, 2]),
    tile("bias", [256, 1, 4, 1, 32, 2]),
    tile("phase_fast", [64, 1, 4, 2, 64, 2]),
    tile("phase_fast", [96, 1, 4, 2, 32, 2]),
    tile("phase_fast", [128, 1, 4, 2, 32, 2]),
    tile("phase_fast", [256, 1, 4, 1, 32, 2]),
    tile("phase_precise", [64, 1, 4, 2, 64, 2]),
    tile("phase_precise", [96, 1, 4, 2, 32, 2]),
    tile("phase_precise", [128, 1, 4, 2, 32, 2]),
    tile("phase_precise", [256, 1, 4, 1, 32, 2]),
];

/// One decode kernel: up to 16 rows (queries × heads of a group) a block, keys split over blocks and warps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeTile {
    /// As in [`ForwardTile`].
    pub score: &'static str,
    /// As in [`ForwardTile`].
    pub width: usize,
    /// As in [`ForwardTile`].
    pub values: usize,
    /// Warps in a block, each with keys of its own.
    pub warps: usize,
    /// Tiles of 16 keys that each warp has under way.
    pub stages: usize,
}

const fn decode(score: &'static str, [width, values, warps, stages]: [usize; 4]) -> DecodeTile {
    DecodeTile { score, width, values, warps, stages }
}

/// Narrow before wide, for each score.
pub const DECODE: &[DecodeTile] = &[
    decode("dot", [64, 1, 4, 4]),
    decode("dot", [64, 2, 4, 4]),
    decode("dot", [128, 1, 4, 3]),
    decode("dot", [128, 2, 4, 2]),
    decode("dot", [256, 1, 4, 2]),
    decode("bias", [64, 1, 4, 4]),
    decode("bias", [128, 1, 4, 3]),
    decode("bias", [256, 1, 4, 2]),
    decode("phase_precise", [64, 1, 4, 4]),
    decode("phase_precise", [128, 1, 4, 3]),
    decode("phase_precise", [256, 1, 4, 2]),
];
