//! Finds nvcc and runs it, on all cores, for the units that changed.

use super::architecture::{options, Architecture};
use super::resources::warnings;
use super::unit::{sources, Unit};
use std::collections::hash_map::DefaultHasher;
use std::ffi::OsString;
use std::fmt::Write;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;
use std::{env, fs, thread};

/// The oldest that the kernels are meant for.
const OLDEST: (u32, u32) = (12, 0);

const HOW_TO_GET_ONE: &str =
    "Install the CUDA toolkit, or make a small one without root or a GPU (`kernels/toolkit.sh FOLDER`, then \
     `source FOLDER/activate`), or build without the feature `cuda`";

/// Where nvcc may be, with what led there; the first that exists is taken.
pub fn nvcc_candidates(variable: impl Fn(&str) -> Option<OsString>) -> Vec<(String, PathBuf)> {
    let program = format!("nvcc{}", env::consts::EXE_SUFFIX);
    let set = |name| variable(name).filter(|value| !value.is_empty());
    // A name without a folder is one to look for in PATH.
    let given = set("NVCC").map(PathBuf::from);
    let searched = match &given {
        Some(path) if path.components().count() > 1 => return vec![("NVCC".into(), path.clone())],
        Some(name) => name.clone(),
        None => PathBuf::from(&program),
    };
    let mut candidates = Vec::new();
    if given.is_none() {
        for name in ["CUDA_HOME", "CUDA_PATH"] {
            if let Some(folder) = set(name) {
                candidates.push((name.into(), Path::new(&folder).join("bin").join(&program)));
            }
        }
    }
    if let Some(folders) = set("PATH") {
        let folders = env::split_paths(&folders);
        candidates.extend(folders.map(|folder| ("PATH".into(), folder.join(&searched))));
    }
    if given.is_none() {
        let usual = Path::new("/usr/local/cuda/bin").join(&program);
        candidates.push(("the usual place".into(), usual));
    }
    candidates
}

/// The release in what `nvcc --version` says.
pub fn parse_version(banner: &str) -> Option<(u32, u32)> {
    let (_, rest) = banner.split_once("release ")?;
    let (major, rest) = rest.split_once('.')?;
    let minor = rest.split(|c: char| !c.is_ascii_digit()).next()?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// A compiler, and the options of every unit.
pub struct Nvcc {
    program: PathBuf,
    /// What it says of itself.
    banner: String,
    options: Vec<String>,
}

impl Nvcc {
    /// Takes the first candidate that exists.
    ///
    /// # Errors
    /// When none does, or it does not run, is too old, or does not know an architecture.
    pub fn find(
        candidates: &[(String, PathBuf)],
        architectures: &[Architecture],
    ) -> Result<Self, String> {
        let Some((_, program)) = candidates.iter().find(|(_, path)| path.is_file()) else {
            let mut looked = String::new();
            for (reason, path) in candidates {
                let _ = write!(looked, "\n  {} ({reason})", path.display());
            }
            return Err(format!(
                "the feature `cuda` needs nvcc, and there is none. Looked for:{looked}\n{HOW_TO_GET_ONE}."
            ));
        };
        let ask = |argument: &str| -> Result<String, String> {
            let failed = |reason: &dyn std::fmt::Display| {
                format!("{} {argument}: {reason}", program.display())
            };
            let output = Command::new(program)
                .arg(argument)
                .stdin(Stdio::null())
                .output();
            let output = output.map_err(|error| failed(&error))?;
            if !output.status.success() {
                return Err(failed(&String::from_utf8_lossy(&output.stderr)));
            }
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        };

        let banner = ask("--version")?;
        let version = parse_version(&banner);
        if version.is_none_or(|version| version < OLDEST) {
            let found = match version {
                Some((major, minor)) => format!("of release {major}.{minor}"),
                None => format!("of an unknown release:\n{banner}"),
            };
            let (major, minor) = OLDEST;
            return Err(format!(
                "{} is {found}; the kernels need {major}.{minor} or newer. {HOW_TO_GET_ONE}.",
                program.display()
            ));
        }
        // `compute_80` and so on. Letters are left out of the list, though it takes them.
        let known = ask("--list-gpu-arch")?;
        for architecture in architectures {
            let name = format!("compute_{}", architecture.capability);
            if !known.lines().any(|line| line.trim() == name) {
                let known = known.split_whitespace().collect::<Vec<_>>().join(", ");
                return Err(format!(
                    "{} does not know {architecture}; it knows {known}",
                    program.display()
                ));
            }
        }

        let mut options = options(architectures);
        options.extend(["-fatbin", "-O3", "-std=c++17", "-Xptxas=-v"].map(String::from));
        if ask("--help")?.contains("--compress-mode") {
            options.push("--compress-mode=size".into());
        }
        Ok(Self {
            program: program.clone(),
            banner,
            options,
        })
    }

    /// Compiles a unit, unless what an earlier run left is of the same inputs.
    fn compile(&self, unit: &Unit, kernels: &Path, made: &Path) -> Result<Compiled, String> {
        let mut hasher = DefaultHasher::new();
        (&self.banner, &self.options, unit.source, &unit.macros).hash(&mut hasher);
        for name in ["NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"] {
            env::var_os(name).hash(&mut hasher);
        }
        for path in sources(kernels, unit.source)? {
            let text = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            text.hash(&mut hasher);
        }
        let inputs = format!("{:016x}", hasher.finish());

        let fatbin = made.join(format!("{}.fatbin", unit.name));
        let record = made.join(format!("{}.log", unit.name));
        let earlier = fs::read_to_string(&record)
            .ok()
            .filter(|_| fatbin.is_file());
        if let Some(compiled) = earlier.and_then(|text| Compiled::read(&text, &inputs)) {
            return Ok(compiled);
        }

        // Until it is made anew, what lies there belongs to no inputs.
        if record.exists() {
            fs::remove_file(&record).map_err(|error| format!("{}: {error}", record.display()))?;
        }
        let started = Instant::now();
        let mut command = Command::new(&self.program);
        command.args(&self.options);
        command.args(unit.macros.iter().map(|pair| format!("-D{pair}")));
        command
            .arg("-o")
            .arg(&fatbin)
            .arg(kernels.join(unit.source));
        let output = command.stdin(Stdio::null()).output();
        let output = output.map_err(|error| format!("{}: {error}", self.program.display()))?;
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() {
            let said = warnings(&log).concat();
            return Err(format!(
                "{} does not compile ({}):\n{said}",
                unit.name, output.status
            ));
        }
        let compiled = Compiled {
            seconds: started.elapsed().as_secs_f64(),
            log,
        };
        fs::write(&record, compiled.text(&inputs))
            .map_err(|error| format!("{}: {error}", record.display()))?;
        Ok(compiled)
    }
}

/// What compiling a unit told.
#[derive(Debug, Clone, PartialEq)]
pub struct Compiled {
    /// How long it took, when it was last compiled.
    pub seconds: f64,
    /// What the compiler and the assembler said.
    pub log: String,
}

impl Compiled {
    /// As kept beside the fatbin.
    pub fn text(&self, inputs: &str) -> String {
        format!("{inputs} {:.1}\n{}", self.seconds, self.log)
    }

    /// What was kept, if it is of these inputs.
    pub fn read(text: &str, inputs: &str) -> Option<Self> {
        let (head, log) = text.split_once('\n')?;
        let (kept, seconds) = head.split_once(' ')?;
        let seconds = seconds.parse().ok()?;
        (kept == inputs).then(|| Self {
            seconds,
            log: log.into(),
        })
    }
}

/// Compiles the units with `jobs` at a time, as many as there are cores when not given; the results are in their order.
///
/// # Errors
/// When one does not compile; those under way are waited for, and all failures told.
pub fn compile_all(
    nvcc: &Nvcc,
    units: &[Unit],
    kernels: &Path,
    made: &Path,
    jobs: Option<usize>,
) -> Result<Vec<Compiled>, String> {
    let cores = || thread::available_parallelism().map_or(1, usize::from);
    let workers = jobs.unwrap_or_else(cores).clamp(1, units.len().max(1));
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let work = || {
        let mut results = Vec::new();
        while !failed.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(unit) = units.get(index) else { break };
            let result = nvcc.compile(unit, kernels, made);
            failed.fetch_or(result.is_err(), Ordering::Relaxed);
            results.push((index, result));
        }
        results
    };
    let mut results = thread::scope(|scope| -> Result<Vec<_>, String> {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        let mut results = Vec::new();
        for thread in threads {
            results.extend(thread.join().map_err(|_| "a thread of the build stopped")?);
        }
        Ok(results)
    })?;
    results.sort_by_key(|(index, _)| *index);

    let mut compiled = Vec::new();
    let mut errors = Vec::new();
    for (_, result) in results {
        match result {
            Ok(unit) => compiled.push(unit),
            Err(error) => errors.push(error),
        }
    }
    if errors.is_empty() {
        Ok(compiled)
    } else {
        Err(errors.join("\n"))
    }
}

/// How long each unit took, the slowest first.
pub fn times(units: &[Unit], compiled: &[Compiled]) -> String {
    let mut times: Vec<_> = units
        .iter()
        .zip(compiled)
        .map(|(unit, made)| (made.seconds, &unit.name))
        .collect();
    times.sort_by(|a, b| b.0.total_cmp(&a.0));
    let total: f64 = times.iter().map(|(seconds, _)| seconds).sum();
    let mut text = format!(
        "{:<44} {:>7}\n{:<44} {total:>7.1}\n",
        "unit", "seconds", "all"
    );
    for (seconds, name) in times {
        let _ = writeln!(text, "{name:<44} {seconds:>7.1}");
    }
    text
}
