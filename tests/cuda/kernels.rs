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

/// Those of layers and of training, which no plan names.
fn outside_attention() -> Vec<String> {
    let mut names = vec!["optimiser_gather".to_string()];
    for dtype in ["f32", "f64", "bf16", "f16"] {
        for kernel in [
            "rms_norm_forward",
            "rms_norm_backward",
            "rms_norm_weight",
            "sum",
            "swiglu_forward",
            "swiglu_backward",
            "embedding_pieces",
            "embedding_rows",
        ] {
            names.push(format!("{kernel}_{dtype}"));
        }
    }
    for dtype in ["f32", "f64"] {
        for kernel in [
            "cross_entropy_forward",
            "cross_entropy_backward",
            "optimiser_adamw",
            "optimiser_squares",
        ] {
            names.push(format!("{kernel}_{dtype}"));
        }
    }
    names.push("cross_entropy_backward_split".to_string());
    for bytes in [2, 4, 8, 16] {
        names.push(format!("copy_rows_{bytes}"));
    }
    names
}

/// Those of backward passes, as plans name them, and what puts the parts of a split together, which no plan names.
fn behind_plans() -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for dtype in ["bf16", "f16"] {
        all.insert(format!("attend_merge_{dtype}"));
        all.insert(format!("attend_delta_{dtype}"));
        for tile in tiles::BACKWARD {
            for side in ["keys", "queries"] {
                all.insert(format!("{}_{side}_{dtype}", tile.name()));
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

pub fn tests() -> Vec<Test> {
    vec![test("every_kernel_loads_without_local_memory", loads)]
}

#[cfg(not(feature = "cuda"))]
fn loads(_: &Target, report: &mut Report) -> Result<()> {
    report.skip("only on a GPU");
    Ok(())
}

/// Those of rotation, of TAPE's state, of TAPA's phase norm and of heads put side by side.
fn beside_attention() -> Vec<String> {
    let named = |kernels: &[&str], types: &[&str]| -> Vec<String> {
        let pairs = kernels
            .iter()
            .flat_map(|kernel| types.iter().map(move |x| (kernel, x)));
        pairs.map(|(kernel, x)| kernel.replace('*', x)).collect()
    };
    let all = ["bf16", "f16", "f32", "f64"];
    let sums = ["f32", "f64"];
    let bits = ["16", "32", "64"];
    [
        named(&["rotate_turn_*", "rotate_turn_*_runs"], &all),
        named(&["rotate_gradient_*", "rotate_gradient_*_runs"], &all),
        named(&["phase_norm_forward_*", "phase_norm_backward_*"], &all),
        named(
            &["phase_norm_forward_*_runs", "phase_norm_backward_*_runs"],
            &all,
        ),
        named(&["phase_norm_gain_*"], &all),
        named(&["tape_pack_*", "tape_pack_*_runs"], &all),
        named(&["tape_unpack_*", "tape_unpack_*_runs"], &all),
        named(&["tape_update_*", "tape_update_gradient_*"], &all),
        named(&["tape_gate_*", "tape_gate_gradient_*"], &all),
        named(&["tape_sums_*", "tape_normalize_*"], &sums),
        named(
            &["tape_normalize_*_runs", "tape_normalize_gradient_*"],
            &sums,
        ),
        named(&["tape_normalize_gradient_*_runs"], &sums),
        named(&["heads_join_*", "heads_join_*_runs"], &bits),
        named(&["heads_part_*", "heads_part_*_runs"], &bits),
    ]
    .concat()
}

#[cfg(feature = "cuda")]
fn loads(target: &Target, report: &mut Report) -> Result<()> {
    use candle_posenc::attend::kernel_resources;

    if !target.is_gpu() {
        report.skip("only on a GPU");
        return Ok(());
    }
    let others = behind_plans()
        .into_iter()
        .chain(beside_attention())
        .chain(outside_attention());
    let mut most: (usize, String) = Default::default();
    let mut images = BTreeSet::new();
    for kernel in all().into_iter().chain(others) {
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
        for kernel in ran.keys() {
            let known = all().contains(kernel) || behind_plans().contains(kernel);
            report.check(known, || format!("{kernel} is in no list"));
        }
        let launched = launched(target);
        for kernel in behind_plans() {
            let planned = ran.contains_key(&kernel) || kernel.starts_with("attend_merge");
            report.check(planned, || format!("{kernel} was in no plan"));
            if target.is_gpu() {
                report.check(launched.contains(&kernel), || {
                    format!("{kernel} has not run")
                });
            }
        }
        let others: BTreeSet<String> = [outside_attention(), beside_attention()]
            .into_iter()
            .flatten()
            .collect();
        if target.is_gpu() {
            for kernel in &others {
                report.check(launched.contains(kernel), || {
                    format!("{kernel} has not run")
                });
            }
        }
        let known: BTreeSet<String> = [all(), behind_plans(), others]
            .into_iter()
            .flatten()
            .collect();
        for kernel in &launched {
            report.check(known.contains(kernel), || {
                format!("{kernel} was launched and is in no list")
            });
        }
        Ok(())
    })]
}

/// The kernels that were launched, whoever asked for them.
#[cfg(feature = "cuda")]
fn launched(_: &Target) -> BTreeSet<String> {
    candle_posenc::attend::kernel_launches()
        .into_keys()
        .collect()
}

#[cfg(not(feature = "cuda"))]
fn launched(_: &Target) -> BTreeSet<String> {
    BTreeSet::new()
}
