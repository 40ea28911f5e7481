//! Trains a byte-level LLaMA with any encoding on any text, then shows what it learnt and how far it reaches.
//!
//! ```text
//! cargo run --release --example train                                  # a made text, under three minutes
//! cargo run --release --example train -- --encoding rope
//! cargo run --release --features cuda --example train -- --device cuda --dtype bf16
//! cargo run --release --example train -- --text book.txt --steps 2000 --out run
//! cargo run --release --example train -- --text book.txt --steps 2000 --out run --resume    # after an interruption
//! cargo run --release --example train -- --config encoding.json        # {"type": "rope", "theta": 500000.0}
//! cargo run --release --example train -- --text a.txt b.txt --held-out 1000000 --contexts 512 4096 --read 16384
//! ```
//!
//! The folder of a run holds
//! ```text
//! config.json model.safetensors    the model, once trained
//! log.csv                          loss, gradient norm, learning rate and speed of every step
//! checkpoints/step-00000123/       what it takes to go on after step 123, the newest two
//! ```
//! The same command with `--resume` goes on from the newest checkpoint. On the CPU, with the same number of threads, the
//! weights are then bit for bit those of a run without interruption.

mod common;

use candle_core::{bail, DType, Device, Error, Result};
use candle_posenc::hf::{self, ModelFolder, SaveOptions};
use candle_posenc::train::{
    AdamWConfig, Log, Parameters, Recompute, Schedule, Trainer, TrainerConfig,
};
use candle_posenc::{EncodingConfig, Llama, LlamaConfig, SeededVars};
use clap::{Parser, ValueEnum};
use common::codec::printable;
use common::device::DeviceName;
use common::evaluation::{common_part, perplexity, spread_perplexity};
use common::message;
use common::names::{BackendName, EncodingName};
use common::progress::Progress;
use common::recipe::Recipe;
use common::sampling::write_on;
use common::text::{about, read, Text};
use rand::{rngs::ChaCha12Rng, SeedableRng};
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Contexts at which the trained model is read unless told otherwise, in training lengths.
const REACH: [usize; 4] = [1, 2, 4, 8];
/// Windows that the longest context gets, where the held-out part is long enough. All contexts read the same bytes.
const LONGEST_WINDOWS: usize = 8;
const TEMPERATURE: f64 = 0.8;

/// Train a byte-level LLaMA with any positional encoding on any text, then print a sample and the perplexity at
/// 1, 2, 4 and 8 times the training length.
#[derive(Parser)]
#[command(name = "train")]
struct Options {
    /// Files to train on, joined as bytes; the last tenth is held out. Without any, a text is made in which brackets
    /// close, numbers count on and names return far apart
    #[arg(long, value_name = "FILE", num_args = 1..)]
    text: Vec<PathBuf>,

    /// Bytes to hold out at the end of the text [default: a tenth]
    #[arg(long, value_name = "BYTES")]
    held_out: Option<usize>,

    /// Contexts at which the trained model is read, in bytes [default: 1, 2, 4 and 8 times the training length]
    #[arg(long, value_name = "BYTES", num_args = 1..)]
    contexts: Vec<usize>,

    /// Read about so many bytes at each context, but at least two windows, spread evenly over the held-out part
    /// [default: at all contexts the same bytes, at its beginning]
    #[arg(long, value_name = "BYTES")]
    read: Option<usize>,

    /// The positional encoding
    #[arg(long, value_enum, value_name = "NAME", default_value = "tapa")]
    encoding: EncodingName,

    /// An EncodingConfig in JSON, for encodings with other parameters
    #[arg(long, value_name = "FILE", conflicts_with = "encoding")]
    config: Option<PathBuf>,

    /// A model's folder to start from, in place of a new model; it must work on bytes
    #[arg(
        long,
        value_name = "DIR",
        conflicts_with_all = ["encoding", "config", "layers", "width", "heads", "kv_heads"]
    )]
    from: Option<PathBuf>,

    /// Layers
    #[arg(
        long,
        value_name = "N",
        default_value_t = 4,
        default_value_if("toy", "true", "2")
    )]
    layers: usize,

    /// Width of the model
    #[arg(
        long,
        value_name = "N",
        default_value_t = 128,
        default_value_if("toy", "true", "32")
    )]
    width: usize,

    /// Query heads; the width must be an even multiple of them
    #[arg(
        long,
        value_name = "N",
        default_value_t = 4,
        default_value_if("toy", "true", "2")
    )]
    heads: usize,

    /// Key/value heads; they must divide the query heads [default: as many as query heads]
    #[arg(long, value_name = "N")]
    kv_heads: Option<usize>,

    /// What norms add to the mean square [default: 0.00001]
    #[arg(long, value_name = "EPSILON", conflicts_with = "from")]
    norm_epsilon: Option<f64>,

    /// Training length in bytes
    #[arg(
        long,
        value_name = "BYTES",
        default_value_t = 256,
        default_value_if("toy", "true", "32")
    )]
    length: usize,

    /// Windows in a batch
    #[arg(long, value_name = "N", default_value_t = 4)]
    batch: usize,

    /// Steps of training
    #[arg(
        long,
        value_name = "N",
        default_value_t = 600,
        default_value_if("toy", "true", "40")
    )]
    steps: usize,

    /// Highest learning rate
    #[arg(
        long,
        value_name = "RATE",
        default_value_t = 3e-3,
        allow_negative_numbers = true
    )]
    lr: f64,

    /// Seed of weights, batches and the sample
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Which implementation of attention may run
    #[arg(long, value_enum, value_name = "NAME", default_value = "auto")]
    backend: BackendName,

    /// What the sample starts with [default: the beginning of the held-out text]
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,

    /// Batches whose gradients are averaged before each step
    #[arg(long, value_name = "N", default_value_t = 1)]
    accumulate: usize,

    /// How the learning rate goes after a warm-up of a tenth of the steps, at most 100
    #[arg(long, value_enum, value_name = "NAME", default_value = "cosine")]
    schedule: ScheduleName,

    /// Decay of matrices, in learning rates
    #[arg(
        long,
        value_name = "DECAY",
        default_value_t = 0.,
        allow_negative_numbers = true
    )]
    weight_decay: f64,

    /// Largest norm of all gradients together
    #[arg(
        long,
        value_name = "NORM",
        default_value_t = 1.,
        allow_negative_numbers = true
    )]
    clip: f64,

    /// What the model computes in; weights are kept in f32
    #[arg(long, value_enum, value_name = "NAME", default_value = "f32")]
    dtype: DTypeName,

    /// What to compute on: cpu, cuda, or cuda:N for the GPU of number N; GPUs need a build with --features cuda
    #[arg(long, value_name = "NAME", default_value_t)]
    device: DeviceName,

    /// Compute each layer's activations again in the backward pass: much less memory, up to a third more time
    #[arg(long)]
    recompute: bool,

    /// Folder of the run, for the model, a log and checkpoints; it must be new or empty
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Steps between checkpoints [default: a tenth of the steps]
    #[arg(long, value_name = "N", requires = "out")]
    checkpoint_every: Option<usize>,

    /// Go on with the run in --out from its newest checkpoint; the other options must be those of the run
    #[arg(long, requires = "out")]
    resume: bool,

    /// A small model and few steps, done in seconds; single sizes can still be given
    #[arg(long)]
    toy: bool,
}

/// How the learning rate goes after its warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ScheduleName {
    /// It stays, without a warm-up.
    Constant,
    /// A straight line down to 0.
    Linear,
    /// Half a cosine down to a tenth.
    Cosine,
    /// The same over all steps, those of the warm-up included.
    WholeCosine,
    /// It stays, then a straight line to 0 over the last fifth.
    Stable,
}

/// What a model computes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DTypeName {
    F32,
    Bf16,
}

impl From<DTypeName> for DType {
    fn from(name: DTypeName) -> Self {
        match name {
            DTypeName::F32 => Self::F32,
            DTypeName::Bf16 => Self::BF16,
        }
    }
}

fn main() -> ExitCode {
    common::conclude("train", run(&Options::parse()))
}

fn run(options: &Options) -> Result<()> {
    let recipe = recipe(options)?;
    let device = options.device.open()?;
    let from = match &options.from {
        Some(path) => Some(open_model(path)?),
        None => None,
    };
    let config = match &from {
        Some(from) => from.config().clone(),
        None => model_config(options)?,
    };
    let text = Text::holding_out(&options.text, options.length, options.held_out)?;
    let prompt = prompt(options, &text)?;
    // Before training: a folder that cannot be written to should not cost a model.
    let out = options.out.as_deref();
    let _lock = match out {
        Some(out) => check_folder(out, options.resume)?,
        None => None,
    };

    let parameters = Parameters::new(SeededVars::new(options.seed));
    let model = Llama::new(&config, parameters.builder(options.dtype.into(), &device))?
        .with_backend(options.backend.into());
    if let Some(from) = &from {
        from.load_into(parameters.masters())?;
        parameters.refresh()?;
    }
    print_facts(&model, &parameters, &text, options)?;
    let tokens: Vec<u32> = text.training.iter().map(|byte| u32::from(*byte)).collect();
    let mut trainer = Trainer::new(model, parameters, tokens, recipe)?;
    train(&mut trainer, options)?;
    if let Some(out) = out {
        let vars = trainer.parameters().masters();
        let beside = from.map_or_else(SaveOptions::default, |from| from.save_options());
        hf::save(out, &config, vars, &beside)?;
        println!("saved      {}", out.display());
    }
    print_reach(trainer.model(), &text, options, &device)?;
    print_sample(trainer.model(), &prompt, options, &device)
}

/// What this run is about, before it starts.
fn print_facts(
    model: &Llama,
    parameters: &Parameters,
    text: &Text,
    options: &Options,
) -> Result<()> {
    let &Options {
        length,
        batch,
        steps,
        accumulate,
        lr,
        seed,
        device,
        ..
    } = options;
    let batches = match accumulate {
        1 => String::new(),
        n => format!("{n} batches of "),
    };
    let config = model.config();
    let (layers, width) = (config.num_hidden_layers, config.hidden_size);
    let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
    let weights = parameters.all();
    let weights: usize = weights.iter().map(|p| p.master.elem_count()).sum();
    let encoding = serde_json::to_string(&config.encoding).map_err(Error::wrap)?;
    let (training, held_out) = (text.training.len(), text.held_out.len());
    let plan = model.plan(0, batch, length)?;
    println!("model      {weights} weights: {layers} layers of width {width}, {heads} query and {kv_heads} key/value heads");
    println!("encoding   {encoding}");
    println!(
        "text       {training} bytes to train on, {held_out} held out: {}",
        text.name
    );
    println!("training   {steps} steps of {batches}{batch} windows of {length} bytes, learning rate {lr}, seed {seed}");
    let dtype = DType::from(options.dtype).as_str();
    println!("device     {device}, computing in {dtype}");
    println!("attention  {plan}");
    Ok(())
}

/// A model to go on training: one of bytes, as this program's are.
fn open_model(path: &Path) -> Result<ModelFolder> {
    let folder = ModelFolder::open(path)?;
    let vocab = folder.config().vocab_size;
    if vocab != 256 || folder.tokenizer().is_some() {
        bail!(
            "--from {}: its {vocab} tokens are not bytes, on which this program trains",
            path.display()
        )
    }
    Ok(folder)
}

/// The model that the options describe.
fn model_config(options: &Options) -> Result<LlamaConfig> {
    let sizes = sizes(options);
    sizes.validate()?;
    let &Options { heads, length, .. } = options;
    let kv_heads = options.kv_heads.unwrap_or(heads);
    check_sizes(&[("kv-heads", kv_heads)])?;
    if heads % kv_heads != 0 {
        bail!("--kv-heads must divide --heads; {kv_heads} does not divide {heads}")
    }
    let encoding = match &options.config {
        None => options.encoding.config(length),
        Some(path) => {
            serde_json::from_slice::<EncodingConfig>(&read(path)?).map_err(|e| about(path, e))?
        }
    };
    let mut config = LlamaConfig {
        num_key_value_heads: kv_heads,
        ..sizes.model(encoding)
    };
    if let Some(epsilon) = options.norm_epsilon {
        if !(epsilon >= 0. && epsilon.is_finite()) {
            bail!("--norm-epsilon must be at least 0 and finite, got {epsilon}")
        }
        config.rms_norm_eps = epsilon;
    }
    Ok(config)
}

fn check_sizes(sizes: &[(&str, usize)]) -> Result<()> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        Some((name, _)) => bail!("--{name} must be at least 1"),
        None => Ok(()),
    }
}

/// What the sample starts with; it leaves room for at least as much again within the training length.
fn prompt(options: &Options, text: &Text) -> Result<Vec<u8>> {
    let longest = options.length / 2;
    match &options.prompt {
        None => Ok(text.held_out.iter().copied().take(longest).collect()),
        Some(prompt) if (1..=longest).contains(&prompt.len()) => Ok(prompt.clone().into_bytes()),
        Some(prompt) => bail!(
            "--prompt must have 1 to {longest} bytes, half of --length, got {}",
            prompt.len()
        ),
    }
}

/// How the options say that it is trained.
fn recipe(options: &Options) -> Result<TrainerConfig> {
    let sizes = sizes(options);
    sizes.validate()?;
    let &Options {
        seed,
        accumulate,
        steps,
        lr,
        weight_decay,
        clip,
        ..
    } = options;
    check_sizes(&[
        ("accumulate", accumulate),
        ("checkpoint-every", options.checkpoint_every.unwrap_or(1)),
    ])?;
    if options.contexts.contains(&0) {
        bail!("--contexts: no window of 0 bytes can be read; name contexts of at least 1")
    }
    for (name, value, least) in [
        ("clip", clip, f64::MIN_POSITIVE),
        ("weight-decay", weight_decay, 0.),
    ] {
        if !(value >= least && value.is_finite()) {
            let bound = if least > 0. { "above" } else { "at least" };
            bail!("--{name} must be {bound} 0 and finite, got {value}")
        }
    }
    let (peak, warm_up) = (lr, (steps / 10).clamp(1, 100));
    let schedule = match options.schedule {
        ScheduleName::Constant => Schedule::Constant { peak },
        ScheduleName::Linear => Schedule::Linear {
            peak,
            warm_up,
            floor: 0.,
        },
        ScheduleName::Cosine => Schedule::Cosine {
            peak,
            warm_up,
            floor: 0.1,
        },
        ScheduleName::WholeCosine => Schedule::WholeCosine {
            peak,
            warm_up,
            floor: 0.1,
        },
        ScheduleName::Stable => Schedule::Stable {
            peak,
            warm_up,
            decay: steps / 5,
            floor: 0.,
        },
    };
    Ok(TrainerConfig {
        accumulation: accumulate,
        schedule,
        adamw: AdamWConfig {
            weight_decay,
            ..AdamWConfig::default()
        },
        clip: Some(clip),
        recompute: match options.recompute {
            true => Recompute::Blocks,
            false => Recompute::Nothing,
        },
        ..sizes.trainer(seed)
    })
}

/// What the examples with small models have in common.
fn sizes(options: &Options) -> Recipe {
    let &Options {
        layers,
        width,
        heads,
        length,
        batch,
        steps,
        lr,
        ..
    } = options;
    Recipe {
        layers,
        width,
        heads,
        length,
        batch,
        steps,
        lr,
    }
}

/// The record of a run in its folder.
const LOG: &str = "log.csv";

/// Checkpoints of a run in its folder.
const CHECKPOINTS: &str = "checkpoints";

/// A run begins in a new or an empty folder, and goes on in its own. Returns what keeps other processes out of it.
fn check_folder(out: &Path, resume: bool) -> Result<Option<File>> {
    std::fs::create_dir_all(out).map_err(|e| about(out, e))?;
    let lock = lock(out)?;
    let mut empty = true;
    for entry in std::fs::read_dir(out).map_err(|e| about(out, e))? {
        let name = entry.map_err(|e| about(out, e))?.file_name();
        // A process killed as it began may have left an unfinished file, whose name begins with a dot.
        empty &= name.to_string_lossy().starts_with('.');
    }
    if !empty && !resume {
        bail!(
            "--out {} is not empty: add --resume to go on with the run in it, or name another folder",
            out.display()
        )
    }
    if !empty
        && ![LOG, CHECKPOINTS]
            .iter()
            .any(|name| out.join(name).exists())
    {
        bail!("--out {} holds no run to go on with", out.display())
    }
    Ok(lock)
}

/// Locks a folder until the file is closed or the process ends, where the system can lock folders.
fn lock(out: &Path) -> Result<Option<File>> {
    let Ok(folder) = File::open(out) else {
        return Ok(None);
    };
    match folder.try_lock() {
        Err(TryLockError::WouldBlock) => {
            bail!("--out {}: another process works in it", out.display())
        }
        _ => Ok(Some(folder)),
    }
}

/// All steps that are left, with a log and checkpoints where the run has a folder.
fn train(trainer: &mut Trainer, options: &Options) -> Result<()> {
    let (steps, out) = (options.steps, options.out.as_deref());
    let every = options.checkpoint_every.unwrap_or(steps.div_ceil(10));
    let checkpoints = out.map(|out| out.join(CHECKPOINTS));
    if let Some(folder) = checkpoints.as_ref().filter(|_| options.resume) {
        match trainer.resume(folder)? {
            Some(resumed) => {
                for note in resumed.notes {
                    println!("note       {note}");
                }
                println!(
                    "resumed    {} of {steps} steps are done: {}",
                    resumed.step,
                    resumed.folder.display()
                );
            }
            None => println!("resumed    no checkpoint yet: from the start"),
        }
    }
    let done = trainer.steps_done();
    let mut log = match out {
        Some(out) => Some(Log::resume(out.join(LOG), 1, done)?),
        None => None,
    };
    let mut progress = Progress::new(steps, done)?;
    while !trainer.is_finished() {
        let report = trainer.step()?;
        progress.report(&report);
        if let Some(log) = &mut log {
            log.record(&report)?;
        }
        if report.step.is_multiple_of(every) || trainer.is_finished() {
            if let Some(folder) = &checkpoints {
                trainer.save(folder)?;
            }
        }
    }
    progress.finish();
    Ok(())
}

/// The table of perplexities by context.
fn print_reach(model: &Llama, text: &Text, options: &Options, device: &Device) -> Result<()> {
    let length = options.length;
    let contexts = match &options.contexts[..] {
        [] => REACH.map(|reach| reach * length).to_vec(),
        contexts => contexts.to_vec(),
    };
    let held_out = common_part(&text.held_out, &contexts, LONGEST_WINDOWS);
    println!("\nPerplexity per byte of held-out text: 1 is certainty, 256 a blind guess. Last quarter: of the bytes with the most context.");
    println!(
        "{:>14}  {:>8}  {:>8}  {:>12}",
        "context", "windows", "whole", "last quarter"
    );
    let mut whole = Vec::new();
    for context in contexts {
        let found = match options.read {
            Some(bytes) => {
                let windows = (bytes / context.max(1)).max(2);
                spread_perplexity(model, &text.held_out, context, windows, device)
            }
            None => {
                let part = match held_out.len() > context {
                    true => held_out,
                    false => &text.held_out[..],
                };
                perplexity(model, part, context, device)
            }
        };
        let reach = context as f64 / length as f64;
        let context = format!("{context} ({reach}×)");
        match found {
            Ok(found) => {
                println!(
                    "{context:>14}  {:>8}  {:>8.3}  {:>12.3}",
                    found.windows, found.whole, found.last_quarter
                );
                whole.push((reach, found.whole));
            }
            // A learned table ends, or the held-out text is too short: the others still tell something.
            Err(error) if reach > 1. => println!("{context:>14}  {}", message(&error)),
            Err(error) => return Err(error),
        }
    }
    if let [(first, short), .., (reach, long)] = whole[..] {
        let ratio = long / short;
        let verdict = match ratio {
            r if r < 0.99 => "longer contexts helped",
            r if r <= 1.01 => "longer contexts neither helped nor got worse",
            _ => "longer contexts got worse",
        };
        println!(
            "Perplexity at {reach}× the training length is {ratio:.3} times that at {first}×: {verdict}."
        );
    }
    Ok(())
}

/// The prompt and what the model writes on, up to the training length.
fn print_sample(model: &Llama, prompt: &[u8], options: &Options, device: &Device) -> Result<()> {
    let mut rng = ChaCha12Rng::seed_from_u64(options.seed);
    let count = options.length - prompt.len();
    let written = write_on(model, prompt, count, TEMPERATURE, &mut rng, device)?;
    println!("\nSample of {count} bytes at temperature {TEMPERATURE}, with a key/value cache, after the prompt in ⟨⟩:");
    let shown = |bytes| printable(&String::from_utf8_lossy(bytes));
    println!("⟨{}⟩{}", shown(prompt), shown(&written));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::tales::tales;

    fn options(words: &[&str]) -> Options {
        Options::parse_from([&["train"], words].concat())
    }

    #[test]
    fn model_config_sizes_that_do_not_fit_refused_in_one_line() {
        for (words, told) in [
            (["--heads", "3"], "got 128 and 3"),
            (["--kv-heads", "3"], "3 does not divide 4"),
            (["--kv-heads", "0"], "--kv-heads"),
            (["--width", "10000000000000000000"], "--width"),
            (["--layers", "10000000000"], "--layers"),
            (["--config", "no such file"], "no such file"),
            (["--norm-epsilon", "nan"], "--norm-epsilon"),
        ] {
            let told_of = message(&model_config(&options(&words)).unwrap_err());
            assert!(told_of.contains(told), "{words:?}: {told_of}");
            assert_eq!(told_of.lines().count(), 1, "{told_of}");
        }
    }

    #[test]
    fn recipe_numbers_out_of_range_refused_in_one_line() {
        for (words, told) in [
            (["--steps", "0"], "--steps"),
            (["--length", "1"], "--length"),
            (["--batch", "1000000000000"], "--batch"),
            (["--accumulate", "0"], "--accumulate"),
            (["--lr", "-1"], "--lr"),
            (["--lr", "inf"], "--lr"),
            (["--clip", "0"], "--clip"),
            (["--weight-decay", "-1"], "--weight-decay"),
            (["--weight-decay", "nan"], "--weight-decay"),
        ] {
            let told_of = message(&recipe(&options(&words)).unwrap_err());
            assert!(told_of.contains(told), "{words:?}: {told_of}");
            assert_eq!(told_of.lines().count(), 1, "{told_of}");
        }
        for name in ["constant", "linear", "cosine", "whole-cosine", "stable"] {
            for steps in ["1", "2", "7", "5000"] {
                let words = ["--schedule", name, "--steps", steps];
                recipe(&options(&words)).unwrap().validate().unwrap();
            }
        }
    }

    #[test]
    fn options_single_size_given_overrides_toy() -> Result<()> {
        let config = model_config(&options(&["--toy", "--layers", "3"]))?;
        assert_eq!((config.num_hidden_layers, config.hidden_size), (3, 32));
        Ok(())
    }

    #[test]
    fn run_device_that_is_not_there_is_refused() {
        let error = run(&options(&["--toy", "--device", "cuda:99999"])).unwrap_err();
        assert!(
            message(&error).starts_with("--device cuda:99999"),
            "{error}"
        );
    }

    #[test]
    fn run_learning_rate_too_high_stops_and_names_the_step() {
        let error = run(&options(&["--toy", "--device", "cuda:99999"])).unwrap_err();
        assert!(
            message(&error).starts_with("--device cuda:99999"),
            "{error}"
        );
        let error = run(&options(&["--toy", "--lr", "1e30"])).unwrap_err();
        let told = message(&error);
        assert!(
            told.contains(" at step 2") && told.contains("learning rate"),
            "{told}"
        );
    }

    #[test]
    fn run_folder_that_cannot_be_a_run_refused_before_training() {
        let folder = tempfile::tempdir().unwrap();
        let taken = folder.path().join("taken");
        std::fs::write(&taken, b"a file").unwrap();
        for (out, told) in [
            (folder.path(), "is not empty: add --resume"),
            (&taken, "taken"),
        ] {
            let out = out.display().to_string();
            // Training would fail at this rate, and tell so.
            let words = ["--toy", "--lr", "1e30", "--out", &out];
            let error = message(&run(&options(&words)).unwrap_err());
            assert!(error.contains(told), "{error}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
        assert_eq!(std::fs::read(&taken).unwrap(), b"a file");
    }

    #[test]
    fn run_from_a_saved_model_starts_where_that_ended() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let path = |name: &str| folder.path().join(name).display().to_string();
        let (first, second) = (path("first"), path("second"));
        run(&options(&["--toy", "--encoding", "tape", "--out", &first]))?;
        run(&options(&["--toy", "--from", &first, "--out", &second]))?;
        let losses = |run: &str| -> Vec<f64> {
            let text = std::fs::read_to_string(Path::new(run).join(LOG)).unwrap();
            let rows = text.lines().skip(1);
            rows.map(|row| row.split(',').nth(1).unwrap().parse().unwrap())
                .collect()
        };
        let (first, second) = (losses(&first), losses(&second));
        assert!(first[0] > 5.4 && second[0] < 4., "{first:?} {second:?}");
        Ok(())
    }

    #[test]
    fn run_reads_the_contexts_that_are_asked_for() -> Result<()> {
        let few = [
            "--toy",
            "--steps",
            "2",
            "--held-out",
            "5000",
            "--read",
            "512",
        ];
        run(&options(
            &[&few[..], &["--contexts", "32", "48", "700"]].concat(),
        ))?;
        // A window that does not fit says so, unless it is of the training length.
        run(&options(
            &[&few[..], &["--contexts", "32", "5000"]].concat(),
        ))?;
        let error = run(&options(&[&few[..], &["--contexts", "0"]].concat())).unwrap_err();
        assert!(message(&error).contains("no window of 0"), "{error}");
        let error = run(&options(&["--toy", "--held-out", "9"])).unwrap_err();
        assert!(message(&error).contains("cannot be held out"), "{error}");
        Ok(())
    }

    #[test]
    fn run_resumed_with_another_option_refused_by_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().display().to_string();
        let words = ["--toy", "--steps", "4", "--out", &out];
        run(&options(&words)).unwrap();
        let other = [&words[..], &["--resume", "--batch", "5"]].concat();
        let error = message(&run(&options(&other)).unwrap_err());
        assert!(error.contains("recipe.batch is 4 there, 5 here"), "{error}");
        // All steps are done: it only reports again.
        run(&options(&[&words[..], &["--resume"]].concat())).unwrap();
    }

    #[test]
    fn run_folder_left_by_a_process_killed_as_it_began_is_taken() -> Result<()> {
        let folder = tempfile::tempdir()?;
        std::fs::write(folder.path().join(".staged-a"), b"")?;
        check_folder(folder.path(), false)?;
        check_folder(folder.path(), true)?;
        Ok(())
    }

    #[test]
    fn run_whose_log_was_deleted_goes_on() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let out = folder.path().display().to_string();
        let words = ["--toy", "--steps", "4", "--out", &out];
        run(&options(&words))?;
        std::fs::remove_file(folder.path().join(LOG))?;
        run(&options(&[&words[..], &["--resume"]].concat()))
    }

    #[test]
    #[cfg(unix)]
    fn run_folder_in_which_another_process_works_refused() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let held = check_folder(folder.path(), false)?;
        for resume in [false, true] {
            let error = message(&check_folder(folder.path(), resume).unwrap_err());
            assert!(error.contains("another process works in it"), "{error}");
        }
        drop(held);
        check_folder(folder.path(), false)?;
        Ok(())
    }

    #[test]
    fn run_toy_saves_a_model_that_loads_back_trained() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let folder = folder.path();
        let out = folder.display().to_string();
        run(&options(&["--toy", "--steps", "30", "--out", &out]))?;

        let saved = ModelFolder::open(folder)?;
        let vars = SeededVars::new(1);
        let model = Llama::new(saved.config(), vars.builder(DType::F32, &Device::Cpu))?;
        let text = tales(2000, 5);
        let untrained = perplexity(&model, &text, 32, &Device::Cpu)?.whole;
        saved.load_into(&vars)?;
        let trained = perplexity(&model, &text, 32, &Device::Cpu)?.whole;
        assert!(untrained > 200. && trained < 100., "{untrained} {trained}");
        Ok(())
    }
}
