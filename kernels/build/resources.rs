//! What the assembler says about each kernel (`ptxas -v`), and the promise that none uses local memory.

use std::fmt::Write;

/// Kernels that may use local memory: slow ones for what the others do not take.
const MAY_USE_LOCAL_MEMORY: [&str; 1] = ["attend_simt"];
/// Where the others promise to use none; their tiles were chosen for these.
const PROMISED_ON: [&str; 3] = ["sm_80", "sm_90", "sm_90a"];

/// What one kernel takes on one architecture.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    /// The entry's name.
    pub kernel: String,
    /// `sm_80` and the like.
    pub architecture: String,
    /// Of each thread.
    pub registers: usize,
    /// Bytes of local memory for each thread, spilled registers among them.
    pub stack: usize,
    /// Bytes of code's stores of spilled registers.
    pub spill_stores: usize,
    /// The same, loads.
    pub spill_loads: usize,
    /// Bytes for each block, besides what is given at the launch.
    pub shared: usize,
}

/// Reads the assembler's report. What a kernel's functions take, where they are not part of it, counts as the kernel's.
pub fn usages(log: &str) -> Vec<Usage> {
    let mut usages: Vec<Usage> = Vec::new();
    for line in log.lines() {
        if let Some(rest) = after(line, "Compiling entry function '") {
            let mut quoted = rest.split('\'');
            usages.push(Usage {
                kernel: quoted.next().unwrap_or_default().into(),
                architecture: quoted.nth(1).unwrap_or_default().into(),
                ..Usage::default()
            });
        }
        let Some(usage) = usages.last_mut() else {
            continue;
        };
        usage.stack += amount(line, " bytes stack frame");
        usage.spill_stores += amount(line, " bytes spill stores");
        usage.spill_loads += amount(line, " bytes spill loads");
        if line.starts_with("ptxas info") {
            usage.registers = usage.registers.max(amount(line, " registers"));
            usage.shared = usage.shared.max(amount(line, " bytes smem"));
        }
    }
    usages
}

fn after<'a>(line: &'a str, mark: &str) -> Option<&'a str> {
    line.find(mark).map(|start| &line[start + mark.len()..])
}

/// The number before `unit`, or 0.
fn amount(line: &str, unit: &str) -> usize {
    let Some(end) = line.find(unit) else { return 0 };
    let digits = line[..end].rsplit(|c: char| !c.is_ascii_digit()).next();
    digits.and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

/// What else the compiler said, in paragraphs.
pub fn warnings(log: &str) -> Vec<String> {
    let mut paragraphs = vec![String::new()];
    for line in log.lines() {
        let report = line.starts_with("ptxas info") && !line.contains("Potential Performance Loss")
            || line.starts_with("Remark:")
            || line.contains(" bytes stack frame, ");
        if report {
            continue;
        }
        let first_of_one = line.trim().is_empty() || line.starts_with("ptxas ");
        if first_of_one {
            paragraphs.push(String::new());
        }
        if let (Some(paragraph), false) = (paragraphs.last_mut(), line.trim().is_empty()) {
            paragraph.push_str(line.trim_end());
            paragraph.push('\n');
        }
    }
    paragraphs.retain(|paragraph| !paragraph.is_empty());
    paragraphs
}

/// Holds kernels to their promise. Returns a line for each that uses local memory where it promised nothing.
///
/// # Errors
/// When one breaks it; the text names each, the architecture and the bytes.
pub fn check_local_memory(usages: &[Usage]) -> Result<Vec<String>, String> {
    let (mut broken, mut others) = (Vec::new(), Vec::new());
    for usage in usages {
        let may = |name: &&str| usage.kernel.starts_with(*name);
        if MAY_USE_LOCAL_MEMORY.iter().any(may)
            || usage.stack + usage.spill_stores + usage.spill_loads == 0
        {
            continue;
        }
        let line = format!(
            "{} on {}: {} bytes of stack, {} of spill stores, {} of spill loads, with {} registers",
            usage.kernel,
            usage.architecture,
            usage.stack,
            usage.spill_stores,
            usage.spill_loads,
            usage.registers
        );
        match PROMISED_ON.contains(&usage.architecture.as_str()) {
            true => broken.push(line),
            false => others.push(line),
        }
    }
    match broken.is_empty() {
        true => Ok(others),
        false => Err(format!(
            "these kernels use local memory, and promise not to:\n  {}",
            broken.join("\n  ")
        )),
    }
}

/// All of it as text, by kernel.
pub fn table(usages: &[Usage]) -> String {
    let mut usages: Vec<_> = usages.iter().collect();
    usages.sort_by_key(|usage| (&usage.kernel, &usage.architecture));
    let mut text = format!(
        "{:<44} {:>6} {:>9} {:>6} {:>12} {:>11} {:>6}\n",
        "kernel", "arch", "registers", "stack", "spill_stores", "spill_loads", "shared"
    );
    for usage in usages {
        let _ = writeln!(
            text,
            "{:<44} {:>6} {:>9} {:>6} {:>12} {:>11} {:>6}",
            usage.kernel,
            usage.architecture,
            usage.registers,
            usage.stack,
            usage.spill_stores,
            usage.spill_loads,
            usage.shared
        );
    }
    text
}
