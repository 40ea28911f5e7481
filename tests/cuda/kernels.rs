//! The kernels themselves: every one loads, none spills, and the tests above have run every one.

#[allow(dead_code)] // the tests read only what names a kernel
#[path = "../../src/attend/cuda/tiles.rs"]
mod tiles;

use crate::{test, Test};
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

pub fn tests() -> Vec<Test> {
    Vec::new()
}

/// Which kernels have run. Only for a run of all tests.
pub fn coverage() -> Vec<Test> {
    vec![test("every_kernel_has_run", |target, report| {
        if !target.is_gpu() {
            report.skip("only on a GPU");
            return Ok(());
        }
        let ran = target.kernels();
        for kernel in all() {
            report.check(ran.contains_key(&kernel), || {
                format!("{kernel} has not run")
            });
        }
        for kernel in ran.keys() {
            report.check(all().contains(kernel), || format!("{kernel} is in no list"));
        }
        Ok(())
    })]
}
