//! What is compiled: a unit is one source file with its macros, and becomes one fatbin.

use super::architecture::Architecture;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::{cmp::Reverse, fs};

// Launches need the rest.
#[allow(dead_code)]
mod tiles {
    include!("../../src/attend/cuda/tiles.rs");
}
use tiles::{BackwardTile, DecodeTile, ForwardTile, BACKWARD, DECODE, FORWARD, SIMT_SCORES};

/// One source file with its macros.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// The kernels' common name: those of a tile end in their data type besides.
    pub name: String,
    /// In the folder of the kernels.
    pub source: &'static str,
    /// `NAME=VALUE`.
    pub macros: Vec<String>,
}

impl Unit {
    /// `kind` is how the kernels' names start.
    fn simt(kind: &str, source: &'static str, score: &str) -> Self {
        Self {
            name: format!("{kind}_{score}"),
            source,
            macros: vec![format!("SCORE_{}=1", score.to_uppercase())],
        }
    }

    fn forward(tile: &ForwardTile) -> Self {
        let ForwardTile {
            score,
            width,
            values,
            warps,
            row_tiles,
            keys,
            blocks,
        } = tile;
        Self {
            name: format!("attend_forward_{score}_w{width}_v{values}"),
            source: "attend_forward.cu",
            macros: vec![
                format!("SCORE_{}=1", score.to_uppercase()),
                format!("KERNEL_WIDTH={width}"),
                format!("KERNEL_VALUES={values}"),
                format!("KERNEL_WARPS={warps}"),
                format!("KERNEL_ROW_TILES={row_tiles}"),
                format!("KERNEL_KEYS={keys}"),
                format!("KERNEL_BLOCKS={blocks}"),
            ],
        }
    }

    fn backward(tile: &BackwardTile) -> Self {
        let mut macros = vec![
            format!("SCORE_{}=1", tile.score.to_uppercase()),
            format!("KERNEL_WIDTH={}", tile.width),
            format!("KERNEL_VALUES={}", tile.values),
        ];
        for (name, side) in [("KEYS", &tile.keys), ("QUERIES", &tile.queries)] {
            for (property, value) in [
                ("WARPS", side.warps),
                ("TILE", side.tile),
                ("STEP", side.step),
                ("PIECES", side.pieces),
                ("BLOCKS", side.blocks),
            ] {
                macros.push(format!("{name}_{property}={value}"));
            }
        }
        Self {
            name: tile.name(),
            source: "attend_backward.cu",
            macros,
        }
    }

    /// A source that has one unit, named like it.
    fn plain(name: &str, source: &'static str) -> Self {
        Self {
            name: name.into(),
            source,
            macros: Vec::new(),
        }
    }

    fn decode(tile: &DecodeTile) -> Self {
        let DecodeTile {
            score,
            width,
            values,
            warps,
            stages,
            blocks,
        } = tile;
        Self {
            name: format!("attend_decode_{score}_w{width}_v{values}"),
            source: "attend_decode.cu",
            macros: vec![
                format!("SCORE_{}=1", score.to_uppercase()),
                format!("KERNEL_WIDTH={width}"),
                format!("KERNEL_VALUES={values}"),
                format!("KERNEL_WARPS={warps}"),
                format!("KERNEL_STAGES={stages}"),
                format!("KERNEL_BLOCKS={blocks}"),
            ],
        }
    }
}

/// Units without macros: the name and the source.
const PLAIN: &[(&str, &str)] = &[
    ("attend_delta", "attend_delta.cu"),
    ("attend_merge", "attend_merge.cu"),
    ("attend_simt_delta", "attend_simt_delta.cu"),
    ("copy_rows", "copy_rows.cu"),
    ("cross_entropy", "cross_entropy.cu"),
    ("embedding", "embedding.cu"),
    ("heads", "heads.cu"),
    ("optimiser", "optimiser.cu"),
    ("phase_norm", "phase_norm.cu"),
    ("rms_norm", "rms_norm.cu"),
    ("rotate", "rotate.cu"),
    ("sum", "sum.cu"),
    ("swiglu", "swiglu.cu"),
    ("tape", "tape.cu"),
];

/// Units for each score of the general kernels: how their names start, and the source.
const SIMT: [(&str, &str); 2] = [
    ("attend_simt_backward", "attend_simt_backward.cu"),
    ("attend_simt", "attend_simt.cu"),
];

/// All units, the slowest to compile first, so that none is left running alone.
pub fn units() -> Vec<Unit> {
    let of_scores = |(kind, source)| {
        let scores = SIMT_SCORES.iter();
        scores.map(move |score| Unit::simt(kind, source, score))
    };
    let mut units: Vec<_> = SIMT.into_iter().flat_map(of_scores).collect();
    let mut forward = FORWARD.to_vec();
    forward.sort_by_key(|tile| Reverse(tile.width * tile.values));
    units.extend(forward.iter().map(Unit::forward));
    let mut backward = BACKWARD.to_vec();
    backward.sort_by_key(|tile| Reverse(tile.width * tile.values));
    units.extend(backward.iter().map(Unit::backward));
    let mut decode = DECODE.to_vec();
    decode.sort_by_key(|tile| Reverse(tile.width * tile.values));
    units.extend(decode.iter().map(Unit::decode));
    units.extend(PLAIN.iter().map(|(name, source)| Unit::plain(name, source)));
    units
}

/// The source file and all files of its folder that it includes, directly or not.
///
/// # Errors
/// When one cannot be read.
pub fn sources(folder: &Path, source: &str) -> Result<BTreeSet<PathBuf>, String> {
    let mut found = BTreeSet::new();
    let mut waiting = vec![folder.join(source)];
    while let Some(path) = waiting.pop() {
        if found.contains(&path) {
            continue;
        }
        let text = fs::read_to_string(&path)
            .map_err(|error| format!("kernels/{source}: {}: {error}", path.display()))?;
        waiting.extend(includes(&text).map(|name| folder.join(name)));
        found.insert(path);
    }
    Ok(found)
}

/// The names in `#include "…"`.
fn includes(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let rest = line.trim_start().strip_prefix('#')?;
        let rest = rest.trim_start().strip_prefix("include")?;
        rest.trim_start().strip_prefix('"')?.split('"').next()
    })
}

/// The Rust source that holds the fatbins.
pub fn list(units: &[Unit], architectures: &[Architecture]) -> String {
    let mut names: Vec<_> = units.iter().map(|unit| unit.name.as_str()).collect();
    names.sort_unstable();
    let mut text = String::from(
        "/// Every compiled unit's name and fatbin, by name.\npub const KERNELS: &[(&str, &[u8])] = &[\n",
    );
    for name in names {
        text += &format!(
            "    ({name:?}, include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}.fatbin\"))),\n"
        );
    }
    text += "];\n/// What each has an image for: machine code or else PTX, ten times the compute capability, and its letter.\n";
    text += "pub const IMAGES: &[(bool, u32, &str)] = &[\n";
    for Architecture {
        machine,
        capability,
        suffix,
    } in architectures
    {
        text += &format!("    ({machine}, {capability}, {suffix:?}),\n");
    }
    text + "];\n"
}
