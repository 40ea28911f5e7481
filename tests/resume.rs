//! Training that is killed, at any moment, and goes on: the result is that of training without interruption, bit for
//! bit. The example `train` is run as a process of its own, and killed as the system kills.
#![cfg(unix)]

use rand::rngs::ChaCha12Rng;
use rand::{RngExt, SeedableRng};
use serde_json::Value;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use std::{fs, thread};

const STEPS: usize = 240;
const CHECKPOINT_EVERY: usize = 3;
const KILLS: usize = 10;
/// What a process must have done by then, or the test fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// The example's program, built as this test is.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--example", "train", "--message-format=json"]);
        if !cfg!(debug_assertions) {
            cargo.arg("--release");
        }
        cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
        let built = cargo.stderr(Stdio::inherit()).output().unwrap();
        assert!(built.status.success(), "the example train does not build");
        let messages = String::from_utf8(built.stdout).unwrap();
        let mut programs = messages.lines().filter_map(|line| {
            let message: Value = serde_json::from_str(line).ok()?;
            let example = message["target"]["name"] == "train";
            let program = message["executable"].as_str().filter(|_| example)?;
            Some(PathBuf::from(program))
        });
        programs
            .next_back()
            .expect("cargo names the program it built")
    })
}

/// A run of the example in its folder.
struct Run {
    folder: PathBuf,
    options: Vec<String>,
}

impl Run {
    fn new(folder: PathBuf, text: &Path, more: &[&str]) -> Self {
        let options = [
            "--toy",
            "--text",
            text.to_str().unwrap(),
            "--steps",
            &STEPS.to_string(),
            "--checkpoint-every",
            &CHECKPOINT_EVERY.to_string(),
            "--out",
            folder.to_str().unwrap(),
        ];
        let options = options.iter().chain(more).map(|o| o.to_string()).collect();
        Self { folder, options }
    }

    fn start(&self, resume: bool) -> Child {
        let mut command = Command::new(program());
        command
            .args(&self.options)
            .args(resume.then_some("--resume"));
        // As many threads in every process: rounding depends on it.
        command.env("RAYON_NUM_THREADS", "2");
        command
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// Runs to the end.
    fn finish(&self, resume: bool) {
        let ended = self.start(resume).wait_with_output().unwrap();
        let told = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.success(), "{told}");
    }

    fn checkpoints(&self) -> PathBuf {
        self.folder.join("checkpoints")
    }

    /// Names in the folder of checkpoints.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.checkpoints()).into_iter().flatten();
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.collect()
    }

    /// Whether a checkpoint is being written or removed.
    fn is_writing(&self) -> bool {
        self.names().iter().any(|name| name.starts_with('.'))
    }

    fn lines_logged(&self) -> usize {
        let log = fs::read(self.folder.join("log.csv")).unwrap_or_default();
        log.iter().filter(|byte| **byte == b'\n').count()
    }

    /// The log without the columns of times.
    fn log(&self) -> Vec<String> {
        let log = fs::read_to_string(self.folder.join("log.csv")).unwrap();
        log.lines()
            .map(|line| line.split(',').take(5).collect::<Vec<_>>().join(","))
            .collect()
    }

    /// The last checkpoint's file.
    fn last(&self, file: &str) -> Vec<u8> {
        let folder = self.checkpoints().join(format!("step-{STEPS:08}"));
        fs::read(folder.join(file)).unwrap()
    }

    /// The last checkpoint's state, without times.
    fn state(&self) -> Value {
        let mut state: Value = serde_json::from_slice(&self.last("state.json")).unwrap();
        state["checksum"] = Value::Null;
        state["contents"]["state"]["seconds"] = Value::Null;
        state
    }
}

fn wait_until(what: &str, child: &mut Child, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        let ended = child.try_wait().unwrap();
        assert!(ended.is_none(), "ended by itself before {what}: {ended:?}");
        assert!(begin.elapsed() < PATIENCE, "no {what} in {PATIENCE:?}");
        thread::sleep(Duration::from_micros(50));
    }
}

/// Kills a run ten times on its way, every second time while a checkpoint is being written, and compares its end with
/// that of a run that was let alone.
fn killed_run_ends_as_one_let_alone(seed: u64, more: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    let words = [
        "the cat ",
        "sat on ",
        "a mat; ",
        "who saw it?\n",
        "nobody. ",
    ];
    let mut rng = ChaCha12Rng::seed_from_u64(seed);
    let written: String = (0..2000)
        .map(|_| words[rng.random_range(0..words.len() as u64) as usize])
        .collect();
    fs::write(&text, written).unwrap();

    let alone = Run::new(folder.path().join("alone"), &text, more);
    alone.finish(false);
    let killed = Run::new(folder.path().join("killed"), &text, more);
    let (mut steps_lost, mut unfinished) = (0, 0);
    for kill in 0..KILLS {
        let mut child = killed.start(kill > 0);
        // A process that goes on first drops what was logged behind the checkpoint.
        let before = killed.lines_logged();
        let lines = before + rng.random_range(2..9u32) as usize;
        let pause = Duration::from_micros(rng.random_range(0..3000));
        wait_until("its steps", &mut child, || killed.lines_logged() >= lines);
        match kill % 2 {
            0 => thread::sleep(pause),
            _ => wait_until("a checkpoint", &mut child, || killed.is_writing()),
        }
        child.kill().unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), Some(9), "kill {kill} came late: {status}");
        let newest = killed.names().into_iter().filter_map(|name| {
            let step = name.strip_prefix("step-")?;
            step.parse::<usize>().ok()
        });
        let newest = newest.max().unwrap_or(0);
        assert!(newest < STEPS, "kill {kill} came after the last step");
        steps_lost += killed.lines_logged().saturating_sub(1 + newest);
        unfinished += usize::from(killed.is_writing());
    }
    assert!(steps_lost > 0, "every kill came right behind a checkpoint");
    assert!(
        unfinished > 0,
        "no kill came while a checkpoint was written"
    );
    killed.finish(true);

    for file in ["config.json", "model.safetensors"] {
        let (one, other) = (alone.folder.join(file), killed.folder.join(file));
        assert!(fs::read(one).unwrap() == fs::read(other).unwrap(), "{file}");
    }
    for file in ["model.safetensors", "optimiser.safetensors"] {
        assert!(alone.last(file) == killed.last(file), "{file}");
    }
    assert_eq!(alone.state(), killed.state());
    assert_eq!(alone.log(), killed.log());
    assert_eq!(alone.log().len(), 1 + STEPS);
    assert!(!killed.is_writing(), "{:?}", killed.names());
}

#[test]
fn run_killed_ten_times_ends_as_one_let_alone() {
    killed_run_ends_as_one_let_alone(1, &["--encoding", "rope"]);
}

#[test]
fn run_with_random_draws_and_accumulation_killed_ten_times_ends_as_one_let_alone() {
    let more = [
        "--encoding",
        "tape",
        "--accumulate",
        "2",
        "--weight-decay",
        "0.1",
    ];
    killed_run_ends_as_one_let_alone(2, &more);
}
