//! Our kernels on an NVIDIA GPU, held to `reference` in f64.
//!
//! One line a test: its worst comparison, as error, allowed error and their ratio. Without the feature `cuda`, or
//! without a GPU, every test says that it was skipped and why; none passes silently.
//!
//! ```text
//! cargo test --release --features cuda --test cuda [-- [--small] [--cpu] [--list] [NAME…]]
//! ```
//! A NAME selects the tests whose names contain it. `--small` runs each kind of kernel on a few tiny shapes, for
//! compute-sanitizer. `--cpu` runs the tests themselves on the CPU's paths, which shows that they can pass.

#[path = "../reference/mod.rs"]
mod reference;
#[path = "../toy/mod.rs"]
mod toy;

mod canaries;
mod cases;
mod gradients;
mod kernels;
mod layers;
mod long;
mod models;
mod phase;
mod phase_norm;
mod repeats;
mod report;
mod rotate;
mod shapes;
mod small;
mod tape;
mod target;
mod training;
mod training_ops;

use candle_core::{Device, Result};
use report::Report;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::process::ExitCode;
use std::time::Instant;
use target::Target;

/// One test: its name and what it does.
pub struct Test {
    /// By which it is selected.
    pub name: String,
    /// Runs it on a device.
    pub run: Body,
}

type Body = Box<dyn Fn(&Target, &mut Report) -> Result<()>>;

/// A test by its name.
pub fn test(
    name: impl Into<String>,
    run: impl Fn(&Target, &mut Report) -> Result<()> + 'static,
) -> Test {
    Test {
        name: name.into(),
        run: Box::new(run),
    }
}

fn tests(small: bool) -> Vec<Test> {
    if small {
        return [
            of_few_tokens(),
            small::tests(),
            // After all others: which kernels have run.
            kernels::coverage(),
        ]
        .into_iter()
        .flatten()
        .collect();
    }
    [
        kernels::tests(),
        cases::tests(),
        shapes::tests(),
        phase::tests(),
        canaries::tests(),
        gradients::tests(),
        rotate::tests(),
        phase_norm::tests(),
        tape::tests(),
        layers::tests(),
        training_ops::tests(),
        models::tests(),
        training::tests(),
        repeats::tests(),
        long::tests(),
        // After all others: which kernels have run.
        kernels::coverage(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// What is short as it is, of all kernels beside attention: first, as tools that slow kernels take minutes for the rest.
fn of_few_tokens() -> Vec<Test> {
    let longer = ["repeat", "many_tokens", "200_steps", "training_step_"];
    let all = [
        rotate::tests(),
        phase_norm::tests(),
        tape::tests(),
        layers::tests(),
        training_ops::tests(),
        training::tests(),
    ];
    let of_all_kinds = |test: &Test| {
        test.name.starts_with("training_step_of_64_columns")
            || !longer.iter().any(|part| test.name.contains(part))
    };
    all.into_iter().flatten().filter(of_all_kinds).collect()
}

/// The GPU, or why there is none.
fn device(on_cpu: bool) -> std::result::Result<Device, String> {
    if on_cpu {
        return Ok(Device::Cpu);
    }
    if !cfg!(feature = "cuda") {
        return Err("built without the feature cuda".to_string());
    }
    Device::new_cuda(0).map_err(|error| format!("no CUDA device ({})", first_line(&error)))
}

fn first_line(error: &impl std::fmt::Display) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().trim().to_string()
}

fn main() -> ExitCode {
    let (options, names): (Vec<String>, Vec<String>) = std::env::args()
        .skip(1)
        .partition(|arg| arg.starts_with("--"));
    let has = |option: &str| options.iter().any(|arg| arg == option);
    let selected: Vec<Test> = tests(has("--small"))
        .into_iter()
        .filter(|test| names.is_empty() || names.iter().any(|name| test.name.contains(name)))
        .collect();
    if has("--list") {
        for test in &selected {
            println!("{}: test", test.name);
        }
        return ExitCode::SUCCESS;
    }
    let target = device(has("--cpu")).and_then(|device| {
        Target::new(device, !has("--small"))
            .map_err(|error| format!("no CUDA device ({})", first_line(&error)))
    });
    let target = match target {
        Ok(target) => target,
        Err(why) => {
            for test in &selected {
                println!("skipped {}: {why}", test.name);
            }
            println!(
                "cuda: 0 passed, 0 failed, {} skipped: {why}",
                selected.len()
            );
            return ExitCode::SUCCESS;
        }
    };
    println!("on {}", target.name());
    println!(
        "{:7} {:78} {:>10} {:>10} {:>7}",
        "", "test", "error", "allowed", "ratio"
    );
    let start = Instant::now();
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for test in &selected {
        let began = Instant::now();
        let mut report = Report::default();
        let run = catch_unwind(AssertUnwindSafe(|| (test.run)(&target, &mut report)));
        match run {
            Ok(Ok(())) => (),
            Ok(Err(error)) => report.fault(error.to_string()),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                let text = text.or(panic.downcast_ref::<&str>().copied());
                report.fault(text.unwrap_or("panicked").to_string())
            }
        }
        let verdict = match (report.skipped(), report.passed()) {
            (Some(_), _) => {
                skipped += 1;
                "skipped"
            }
            (None, true) => {
                passed += 1;
                "ok"
            }
            (None, false) => {
                failed += 1;
                "FAILED"
            }
        };
        println!(
            "{verdict:7} {:78} {report} {:6.1} s",
            test.name,
            began.elapsed().as_secs_f64()
        );
        report.print_faults();
    }
    for (kernel, calls) in target.kernels() {
        println!("kernel  {kernel}: {calls} calls");
    }
    println!(
        "cuda: {passed} passed, {failed} failed, {skipped} skipped in {:.0} s",
        start.elapsed().as_secs_f64()
    );
    if failed == 0 && passed > 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
