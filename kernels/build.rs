//! The crate's build script: with feature `cuda` it compiles the kernels; without, it does nothing.
//!
//! Every kernel becomes a fatbin with an image for each of several architectures, so that one build serves many GPUs.
//! It needs nvcc, and no GPU. Environment:
//! - `CANDLE_POSENC_CUDA_ARCHS`: the images to build, `sm_80,sm_90,compute_80` when unset;
//! - `NVCC`, `CUDA_HOME`, `CUDA_PATH`: where nvcc is, when it is not in `PATH` or `/usr/local/cuda/bin`.
//!
//! Made in `OUT_DIR`: `kernels.rs` with the fatbins by name, and `resources.txt` with each kernel's registers, local
//! and shared memory. A unit whose sources, options and compiler are unchanged is not compiled again.

#[path = "build/architecture.rs"]
mod architecture;
#[path = "build/compiler.rs"]
mod compiler;
#[path = "build/resources.rs"]
mod resources;
#[path = "build/unit.rs"]
mod unit;

use architecture::{parse_architectures, DEFAULT_ARCHITECTURES};
use compiler::{compile_all, nvcc_candidates, Nvcc};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::{env, fs, process};

/// What says which images to build.
const ARCHITECTURES: &str = "CANDLE_POSENC_CUDA_ARCHS";
/// All else that a build depends on.
const VARIABLES: [&str; 6] = [
    "NVCC",
    "CUDA_HOME",
    "CUDA_PATH",
    "NVCC_CCBIN",
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
];

fn main() {
    println!("cargo::rerun-if-changed=kernels/build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    if let Err(message) = build() {
        eprintln!("error: {message}");
        process::exit(1);
    }
}

fn build() -> Result<(), String> {
    println!("cargo::rerun-if-changed=kernels");
    println!("cargo::rerun-if-changed=src/attend/cuda/tiles.rs");
    println!("cargo::rerun-if-env-changed={ARCHITECTURES}");
    for name in VARIABLES {
        println!("cargo::rerun-if-env-changed={name}");
    }

    let folder = |name| {
        env::var_os(name)
            .map(PathBuf::from)
            .ok_or(format!("cargo sets no {name}"))
    };
    let kernels = folder("CARGO_MANIFEST_DIR")?.join("kernels");
    let made = folder("OUT_DIR")?;
    let list = match env::var(ARCHITECTURES) {
        Ok(list) => list,
        Err(env::VarError::NotPresent) => DEFAULT_ARCHITECTURES.into(),
        Err(error) => return Err(format!("{ARCHITECTURES}: {error}")),
    };
    let architectures =
        parse_architectures(&list).map_err(|error| format!("{ARCHITECTURES}: {error}"))?;
    let nvcc = Nvcc::find(&nvcc_candidates(|name| env::var_os(name)), &architectures)?;

    let units = unit::units();
    // Cargo's `-j`.
    let jobs = env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok());
    let compiled = compile_all(&nvcc, &units, &kernels, &made, jobs)?;

    let mut warnings = BTreeSet::new();
    let mut usages = Vec::new();
    for log in compiled.iter().map(|unit| &unit.log) {
        warnings.extend(resources::warnings(log));
        usages.extend(resources::usages(log));
    }
    for line in warnings.iter().flat_map(|warning| warning.lines()) {
        println!("cargo::warning={line}");
    }
    let table = resources::table(&usages) + "\n" + &compiler::times(&units, &compiled);
    write(&made.join("resources.txt"), &table)?;
    write(
        &made.join("kernels.rs"),
        &unit::list(&units, &architectures),
    )?;
    for line in resources::check_local_memory(&usages)? {
        println!("cargo::warning={line}");
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}
