//! The images in a fatbin, and the list that names them.

use std::fmt;

/// Machine code for the GPUs most trained on, and PTX, which drivers translate for all newer ones.
pub const DEFAULT_ARCHITECTURES: &str = "sm_80,sm_90,compute_80";

/// bf16 on tensor cores and asynchronous copies into shared memory begin here.
const LEAST: u32 = 80;

/// One image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Architecture {
    /// Machine code (`sm_…`), or else PTX (`compute_…`).
    pub machine: bool,
    /// Ten times the compute capability.
    pub capability: u32,
    /// Its letter, `a` or `f`, or nothing.
    pub suffix: String,
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.machine { "sm" } else { "compute" };
        write!(f, "{kind}_{}{}", self.capability, self.suffix)
    }
}

/// Reads a list such as `sm_80,sm_90a,compute_80`.
///
/// # Errors
/// When an entry is no architecture, or one that the kernels cannot run on, or there is none.
pub fn parse_architectures(list: &str) -> Result<Vec<Architecture>, String> {
    let mut architectures = Vec::new();
    for name in list
        .split(',')
        .map(str::trim)
        .filter(|name| !name.is_empty())
    {
        let architecture = parse_architecture(name).ok_or_else(|| {
            format!(
                "{name:?} is no architecture. Give a list like {DEFAULT_ARCHITECTURES}: sm_90 is machine code for \
                 GPUs of compute capability 9.0, compute_80 is PTX, which drivers translate for 8.0 and newer"
            )
        })?;
        if architecture.capability < LEAST {
            return Err(format!("{name}: the kernels need at least {LEAST}"));
        }
        if !architectures.contains(&architecture) {
            architectures.push(architecture);
        }
    }
    if architectures.is_empty() {
        return Err(format!(
            "no architecture. Give a list like {DEFAULT_ARCHITECTURES}, or leave it unset"
        ));
    }
    Ok(architectures)
}

fn parse_architecture(name: &str) -> Option<Architecture> {
    let (machine, number) = match (name.strip_prefix("sm_"), name.strip_prefix("compute_")) {
        (Some(number), _) => (true, number),
        (_, Some(number)) => (false, number),
        _ => return None,
    };
    let digits = number.trim_end_matches(['a', 'f']);
    let suffix = &number[digits.len()..];
    if suffix.len() > 1 || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    Some(Architecture {
        machine,
        capability: digits.parse().ok()?,
        suffix: suffix.into(),
    })
}

/// nvcc's options for these images: one for each PTX that has to be made.
///
/// Machine code without a letter is made from the PTX of the least architecture listed, once for all: the kernels do the
/// same on each. With a letter it has PTX of its own, where instructions of that architecture alone are known.
pub fn options(architectures: &[Architecture]) -> Vec<String> {
    let plain = architectures
        .iter()
        .filter(|architecture| architecture.suffix.is_empty());
    let least = plain.map(|architecture| architecture.capability).min();
    let mut groups: Vec<(String, Vec<String>)> = Vec::new();
    for architecture in architectures {
        let shared = architecture.machine && architecture.suffix.is_empty();
        let capability = least.filter(|_| shared).unwrap_or(architecture.capability);
        let source = format!("compute_{capability}{}", architecture.suffix);
        let image = architecture.to_string();
        match groups.iter_mut().find(|(name, _)| *name == source) {
            Some((_, images)) => images.push(image),
            None => groups.push((source, vec![image])),
        }
    }
    groups
        .iter()
        .map(|(name, images)| format!("-gencode=arch={name},code=[{}]", images.join(",")))
        .collect()
}
