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
    ForwardTile {
        score,
        width,
        values,
        warps,
        row_tiles,
        keys,
        blocks,
    }
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
    tile("bias", [64, 1, 4, 2, 64, 2]),
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
    /// Blocks that must fit one multiprocessor together: bounds the registers. Compute capability 9.0 has the shared
    /// memory for them.
    pub blocks: usize,
}

const fn decode(
    score: &'static str,
    [width, values, warps, stages, blocks]: [usize; 5],
) -> DecodeTile {
    DecodeTile {
        score,
        width,
        values,
        warps,
        stages,
        blocks,
    }
}

impl DecodeTile {
    /// Shared memory that a block needs: the queries, and for each warp and stage keys, values and what is known of
    /// them. At most 83,552 bytes.
    pub const fn shared_bytes(&self) -> usize {
        let tile = 16 * (2 * self.width + 16);
        tile + self.warps * self.stages * ((1 + self.values) * tile + 144)
    }
}

/// Narrow before wide, for each score.
pub const DECODE: &[DecodeTile] = &[
    decode("dot", [64, 1, 4, 3, 3]),
    decode("dot", [64, 2, 4, 2, 3]),
    decode("dot", [128, 1, 4, 2, 3]),
    decode("dot", [128, 2, 3, 2, 2]),
    decode("dot", [256, 1, 2, 2, 3]),
    decode("bias", [64, 1, 4, 3, 3]),
    decode("bias", [128, 1, 4, 2, 3]),
    decode("bias", [256, 1, 2, 2, 3]),
    decode("phase_precise", [64, 1, 4, 3, 3]),
    decode("phase_precise", [128, 1, 4, 2, 3]),
    decode("phase_precise", [256, 1, 2, 2, 3]),
];

/// Two backward kernels for tensor cores, one whose blocks are for keys and one whose blocks are for queries, compiled for
/// bf16 and f16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackwardTile {
    /// As in [`ForwardTile`].
    pub score: &'static str,
    /// As in [`ForwardTile`].
    pub width: usize,
    /// Pieces of the values, `width` columns each: all that there are, for every block needs whole rows.
    pub values: usize,
    /// The kernel that makes dk and dv.
    pub keys: BackwardSide,
    /// The kernel that makes dq.
    pub queries: BackwardSide,
}

/// One of the two: a block holds some tokens, and the others pass by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackwardSide {
    /// Warps in a block, each holding 16 tokens.
    pub warps: usize,
    /// Tokens in a tile of those that pass by.
    pub tile: usize,
    /// Of these, how many are looked at at once.
    pub step: usize,
    /// Blocks that share the columns of the results.
    pub pieces: usize,
    /// Blocks that must fit one multiprocessor together: bounds the registers.
    pub blocks: usize,
}

impl BackwardTile {
    /// What its kernels' names start with. Both sides' tiles are of one size.
    pub fn name(&self) -> String {
        let Self {
            score,
            width,
            values,
            keys,
            ..
        } = self;
        format!("attend_backward_{score}_w{width}_v{values}_t{}", keys.tile)
    }

    /// Shared memory that a block of one side needs: what it holds, two tiles of what passes by, and what is known of each
    /// token.
    pub const fn shared_bytes(&self, side: &BackwardSide) -> usize {
        let (held, passing) = (16 * side.warps, 2 * side.tile);
        (held + passing) * (1 + self.values) * (2 * self.width + 16) + 20 * passing + 4 * held
    }
}

const fn backward(
    score: &'static str,
    [width, values]: [usize; 2],
    keys: [usize; 5],
    queries: [usize; 5],
) -> BackwardTile {
    const fn side([warps, tile, step, pieces, blocks]: [usize; 5]) -> BackwardSide {
        BackwardSide {
            warps,
            tile,
            step,
            pieces,
            blocks,
        }
    }
    BackwardTile {
        score,
        width,
        values,
        keys: side(keys),
        queries: side(queries),
    }
}

/// Narrow before wide, for each score; of one width, first what needs little shared memory. Some GPUs (compute capability
/// 8.6, 8.9, 12.0) give a block no more than 101,376 bytes.
pub const BACKWARD: &[BackwardTile] = &[
    backward("dot", [64, 1], [4, 64, 32, 1, 3], [4, 64, 32, 1, 3]),
    backward("dot", [64, 2], [4, 32, 32, 1, 2], [4, 32, 32, 1, 2]),
    backward("dot", [128, 1], [4, 32, 32, 1, 2], [4, 32, 32, 1, 2]),
    backward("dot", [128, 1], [4, 64, 32, 1, 2], [4, 64, 64, 1, 2]),
    backward("dot", [128, 2], [4, 16, 16, 2, 2], [4, 16, 16, 1, 2]),
    backward("dot", [128, 2], [4, 32, 32, 2, 2], [4, 32, 32, 1, 2]),
    backward("dot", [256, 1], [2, 16, 16, 2, 3], [2, 16, 16, 1, 3]),
    backward("bias", [64, 1], [4, 64, 32, 1, 3], [4, 64, 32, 1, 3]),
    backward("bias", [128, 1], [4, 32, 32, 1, 2], [4, 32, 32, 1, 2]),
    backward("bias", [256, 1], [2, 16, 16, 2, 3], [2, 16, 16, 1, 3]),
    backward("phase_fast", [64, 1], [4, 64, 32, 1, 3], [4, 64, 32, 1, 3]),
    backward("phase_fast", [128, 1], [4, 32, 32, 1, 2], [4, 32, 32, 1, 2]),
    backward("phase_fast", [128, 1], [4, 64, 32, 1, 2], [4, 64, 64, 1, 2]),
    backward("phase_fast", [256, 1], [2, 16, 16, 2, 3], [2, 16, 16, 1, 3]),
    backward(
        "phase_precise",
        [64, 1],
        [4, 64, 32, 1, 3],
        [4, 64, 32, 1, 3],
    ),
    backward(
        "phase_precise",
        [128, 1],
        [4, 32, 32, 1, 2],
        [4, 32, 32, 1, 2],
    ),
    backward(
        "phase_precise",
        [256, 1],
        [2, 16, 16, 2, 3],
        [2, 16, 16, 1, 3],
    ),
];

/// Queries for each of the marks that `attend_delta` leaves.
pub const DELTA_TILE: usize = 64;

/// Warps in a block of `attend_delta`.
pub const DELTA_WARPS: usize = 8;

/// Scores of the general kernels, forward and backward, each compiled for the dtypes of [`SIMT_DTYPES`]. The forward
/// grid: x = row blocks × G × B with [`simt_rows`] rows (queries × heads of a group) in a block, y = pieces of
/// [`SIMT_PIECE`] value columns.
pub const SIMT_SCORES: &[&str] = &["dot", "bias", "phase"];

/// As in the general kernels' names.
pub const SIMT_DTYPES: &[&str] = &["f32", "f64", "bf16", "f16"];

/// Threads in a block of the general kernels.
pub const SIMT_THREADS: usize = 128;

/// Columns that one block of the general kernels averages.
pub const SIMT_PIECE: usize = 128;

/// Tokens in a tile of those that pass by a block of the general kernels.
pub const SIMT_KEYS: usize = 32;

/// Rows in a block of the general kernels, which accumulate in numbers of `bytes` (4, or 8 for f64).
pub const fn simt_rows(bytes: usize) -> usize {
    256 / bytes
}

/// Columns of q and k as the general kernels lay them out: a phase's two parts start at multiples of 16 bytes.
/// `amplitude_width` is D where there is no phase.
pub const fn simt_width(head_width: usize, amplitude_width: usize, bytes: usize) -> usize {
    let vector = 16 / bytes;
    amplitude_width.next_multiple_of(vector)
        + (head_width - amplitude_width).next_multiple_of(vector)
}

/// Shared memory that a block of the general forward kernel needs, at most 93,184 bytes; widths as in [`simt_width`].
pub const fn simt_shared_bytes(head_width: usize, amplitude_width: usize, bytes: usize) -> usize {
    let vector = 16 / bytes;
    let width = simt_width(head_width, amplitude_width, bytes);
    let pitch = if (width / vector).is_multiple_of(2) {
        width + vector
    } else {
        width
    };
    let stages = 2 * SIMT_KEYS * (256 + 16);
    simt_rows(bytes) * (pitch * bytes + SIMT_KEYS * bytes + 16) + stages
}

/// Columns of a stage of the general kernels.
pub const fn simt_stage(bytes: usize) -> usize {
    256 / bytes
}

/// Shared memory that a block of the general backward kernels needs, at most 57,984 bytes: a stage of its rows and of
/// what passes by, weights of two kinds or of three for a phase, and what is known of tokens.
pub const fn simt_backward_shared_bytes(is_phase: bool, bytes: usize) -> usize {
    let kinds = if is_phase { 3 } else { 2 };
    let rows = simt_rows(bytes);
    let tokens = rows + SIMT_KEYS;
    tokens * (256 + 16) + kinds * rows * (SIMT_KEYS * bytes + 16) + tokens * (4 * 8 + 3 * bytes)
}

/// Warps in a block of `attend_simt_delta`, each with one row.
pub const SIMT_DELTA_WARPS: usize = 4;
