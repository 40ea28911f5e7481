//! The kernels themselves: every one loads, none spills, and the tests above have run every one.

#[allow(dead_code)] // the tests read only what names a kernel
#[path = "../../src/attend/cuda/tiles.rs"]
mod tiles;

use crate::report::Report;
use crate::target::Target;
use crate::{test, Test};
use candle_core::Result;
use std::collections::BTreeSet;

/// The kernels that calls may choose, by the names that plans give them.
fn all() -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for dtype in ["bf16", "f16"] {
        for tile in tiles::FORWARD {
            all.insert(format!(
                "attend_forward_{}_w{}_v{}_{dtype}",
                tile.score, tile.width, tile.values
            ));
        }
        for tile in tiles::DECODE {
            all.insert(format!(
                "attend_decode_{}_w{}_v{}_{dtype}",
                tile.score, tile.width, tile.values
            ));
        }
    }
    for dtype in ["f32", "f64", "bf16", "f16"] {
        for score in ["dot", "bias", "phase"] {
            all.insert(format!("attend_simt_{score}_{dtype}"));
        }
    }
    all
}

/// Those of backward passes, by the names that plans give them.
fn gradients() -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for dtype in ["bf16", "f16"] {
        all.insert(format!("attend_delta_{dtype}"));
        for tile in tiles::BACKWARD {
            for side in ["keys", "queries"] {
                all.insert(format!(
                    "attend_backward_{}_w{}_v{}_{side}_{dtype}",
                    tile.score, tile.width, tile.values
                ));
            }
        }
    }
    for dtype in tiles::SIMT_DTYPES {
        all.insert(format!("attend_simt_delta_{dtype}"));
        for score in tiles::SIMT_SCORES {
            for side in ["keys", "queries"] {
                all.insert(format!("attend_simt_backward_{score}_{side}_{dtype}"));
            }
        }
    }
    all
}

/// All of them, and those that put the parts of a split together, which no plan names.
fn every() -> BTreeSet<String> {
    let merges = ["attend_merge_bf16", "attend_merge_f16"].map(str::to_string);
    let all = all().into_iter().chain(gradients());
    all.chain(merges).collect()
}

pub fn tests() -> Vec<Test> {
    vec![test("every_kernel_loads_without_local_memory", loads)]
}

#[cfg(not(feature = "cuda"))]
fn loads(_: &Target, report: &mut Report) -> Result<()> {
    report.skip("only on a GPU");
    Ok(())
}

#[cfg(feature = "cuda")]
fn loads(target: &Target, report: &mut Report) -> Result<()> {
    use candle_posenc::attend::kernel_resources;

    if !target.is_gpu() {
        report.skip("only on a GPU");
        return Ok(());
    }
    let mut most: (usize, String) = Default::default();
    let mut images = BTreeSet::new();
    for kernel in every() {
        match kernel_resources(target.device(), &kernel) {
            Ok(resources) => {
                report.check(resources.local_bytes == 0, || {
                    format!("{kernel} uses local memory: {resources:?}")
                });
                images.insert(resources.image);
                most = most.max((resources.registers, kernel));
            }
            Err(error) => report.fault(format!("{kernel} does not load: {error}")),
        }
    }
    report.check(
        kernel_resources(target.device(), "attend_nothing").is_err(),
        || "a kernel that does not exist loads".to_string(),
    );
    report.remark(format!(
        "{} registers in {}, images {images:?}",
        most.0, most.1
    ));
    Ok(())
}

/// Which kernels have run. Only for a run of all tests.
pub fn coverage() -> Vec<Test> {
    vec![test("every_kernel_has_run", |target, report| {
        let ran = target.kernels();
        for kernel in all() {
            report.check(ran.contains_key(&kernel), || {
                format!("{kernel} has not run")
            });
        }
        let backward = gradients();
        for kernel in &backward {
            report.check(ran.contains_key(kernel), || {
                format!("{kernel} was in no plan")
            });
        }
        for kernel in ran.keys() {
            let known = all().contains(kernel) || backward.contains(kernel);
            report.check(known, || format!("{kernel} is in no list"));
        }
        if !target.is_gpu() {
            return Ok(());
        }
        let launched = launched();
        let every = every();
        for kernel in &every {
            report.check(launched.contains(kernel), || {
                format!("{kernel} was not launched")
            });
        }
        for kernel in launched.iter().filter(|name| name.starts_with("attend_")) {
            report.check(every.contains(kernel), || {
                format!("{kernel} was launched and is in no list")
            });
        }
        Ok(())
    })]
}

/// The kernels that were launched, whoever asked for them.
#[cfg(feature = "cuda")]
fn launched() -> BTreeSet<String> {
    candle_posenc::attend::kernel_launches()
        .into_keys()
        .collect()
}

#[cfg(not(feature = "cuda"))]
fn launched() -> BTreeSet<String> {
    BTreeSet::new()
}
