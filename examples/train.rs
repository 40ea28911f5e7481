//! Trains a byte-level LLaMA with any encoding on any text, then shows what it learnt and how far it reaches.
//!
//! ```text
//! cargo run --release --example train                                  # a made text, under three minutes
//! cargo run --release --example train -- --encoding rope
//! cargo run --release --example train -- --text book.txt --steps 2000 --out model
//! cargo run --release --example train -- --config encoding.json        # {"type": "rope", "theta": 500000.0}
//! ```

mod common;

use candle_core::{bail, DType, Device, Error, Result};
use candle_posenc::{Backend, EncodingConfig, Llama, LlamaConfig, SeededVars};
use clap::{Parser, ValueEnum};
use common::encodings::EncodingName;
use common::evaluation::perplexity;
use common::message;
use common::sampling::write_on;
use common::tales::tales;
use common::training::{Schedule, Trainer};
use indicatif::{ProgressBar, ProgressStyle};
use rand::{rngs::StdRng, SeedableRng};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Contexts at which the trained model is read, in training lengths.
const REACH: [usize; 4] = [1, 2, 4, 8];
/// Windows that the longest context gets, where the held-out part is long enough. All contexts read the same bytes.
const LONGEST_WINDOWS: usize = 8;
/// Size of the made text and its seed: the same for every run, so that runs can be compared.
const MADE_BYTES: usize = 3 << 20;
const MADE_SEED: u64 = 1;
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

    /// The positional encoding
    #[arg(long, value_enum, value_name = "NAME", default_value = "tapa")]
    encoding: EncodingName,

    /// An EncodingConfig in JSON, for encodings with other parameters
    #[arg(long, value_name = "FILE", conflicts_with = "encoding")]
    config: Option<PathBuf>,

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

    /// Query heads; they must divide the width
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

    /// Training length in bytes
    #[arg(
        long,
        value_name = "BYTES",
        default_value_t = 256,
        default_value_if("toy", "true", "32")
    )]
    length: usize,

    /// Windows in a batch
    #[arg(
        long,
        value_name = "N",
        default_value_t = 8,
        default_value_if("toy", "true", "4")
    )]
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

    /// Folder to write model.safetensors and config.json to
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// A model small enough to train in seconds; single sizes can still be given
    #[arg(long)]
    toy: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum BackendName {
    /// Fused where there is a kernel for the device
    Auto,
    /// Plain tensor operations
    Dense,
    /// Fused kernels, or an error
    Fused,
}

fn main() -> ExitCode {
    common::conclude("train", run(&Options::parse()))
}

fn run(options: &Options) -> Result<()> {
    let config = model_config(options)?;
    let text = Text::open(options)?;
    let prompt = prompt(options, &text)?;
    if let Some(out) = &options.out {
        std::fs::create_dir_all(out).map_err(|e| about(out, e))?;
    }

    let device = Device::Cpu;
    let vars = SeededVars::new(options.seed);
    let model = Llama::new(&config, vars.builder(DType::F32, &device))?.with_backend(match options
        .backend
    {
        BackendName::Auto => Backend::Auto,
        BackendName::Dense => Backend::Dense,
        BackendName::Fused => Backend::Fused,
    });
    let weights: usize = vars.vars().iter().map(|var| var.elem_count()).sum();
    let LlamaConfig {
        num_hidden_layers: layers,
        hidden_size: width,
        num_attention_heads: heads,
        num_key_value_heads: kv_heads,
        ..
    } = config;
    let Options {
        batch,
        length,
        steps,
        lr,
        seed,
        ..
    } = *options;
    let encoding = serde_json::to_string(&config.encoding).map_err(Error::wrap)?;
    let (training, held_out) = (text.training.len(), text.held_out.len());
    let plan = model.plan(0, batch, length)?;
    println!("model      {weights} weights: {layers} layers of width {width}, {heads} query and {kv_heads} key/value heads");
    println!("encoding   {encoding}");
    println!(
        "text       {}: {training} bytes to train on, {held_out} held out",
        text.name
    );
    println!("training   {steps} steps of {batch} windows of {length} bytes, learning rate {lr}, seed {seed}");
    println!("device     {device:?}");
    println!("attention  {plan}");

    train(&model, &vars, &text, options, &device)?;
    print_reach(&model, &text, options.length, &device)?;
    print_sample(&model, &prompt, options, &device)?;
    if let Some(out) = &options.out {
        save(&config, &vars, out)?;
    }
    Ok(())
}

/// The model that the options describe.
fn model_config(options: &Options) -> Result<LlamaConfig> {
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
    let kv_heads = options.kv_heads.unwrap_or(heads);
    for (name, value) in [
        ("layers", layers),
        ("width", width),
        ("heads", heads),
        ("kv-heads", kv_heads),
        ("batch", batch),
        ("steps", steps),
    ] {
        if value == 0 {
            bail!("--{name} must be at least 1")
        }
    }
    if length < 4 {
        bail!("--length must be at least 4 bytes, got {length}")
    }
    if !(lr > 0. && lr.is_finite()) {
        bail!("--lr must be above 0, got {lr}")
    }
    if width % heads != 0 {
        bail!("--heads must divide --width; {heads} does not divide {width}")
    }
    if heads % kv_heads != 0 {
        bail!("--kv-heads must divide --heads; {kv_heads} does not divide {heads}")
    }
    let encoding = match &options.config {
        None => options.encoding.config(length),
        Some(path) => {
            serde_json::from_slice::<EncodingConfig>(&read(path)?).map_err(|e| about(path, e))?
        }
    };
    Ok(LlamaConfig {
        hidden_size: width,
        // Three matrices of 8/3 the width have as many weights as the usual two of four times the width.
        intermediate_size: (8 * width / 3).next_multiple_of(8),
        num_hidden_layers: layers,
        num_attention_heads: heads,
        num_key_value_heads: kv_heads,
        max_position_embeddings: length,
        encoding,
        ..LlamaConfig::default()
    })
}

/// The bytes to train on and those to be judged by.
struct Text {
    name: String,
    training: Vec<u8>,
    held_out: Vec<u8>,
}

impl Text {
    fn open(options: &Options) -> Result<Self> {
        let (name, mut training) = if options.text.is_empty() {
            (
                "made (examples/common/tales.rs)".to_string(),
                tales(MADE_BYTES, MADE_SEED),
            )
        } else {
            let mut bytes = Vec::new();
            for path in &options.text {
                bytes.extend(read(path)?);
            }
            let names: Vec<String> = options
                .text
                .iter()
                .map(|path| path.display().to_string())
                .collect();
            (names.join(", "), bytes)
        };
        let shortest = options.length.saturating_add(1).saturating_mul(10);
        if training.len() < shortest {
            bail!(
                "{name}: {} bytes are too few; --length {} needs at least {shortest}",
                training.len(),
                options.length
            )
        }
        let held_out = training.split_off(training.len() - training.len() / 10);
        Ok(Self {
            name,
            training,
            held_out,
        })
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

fn train(
    model: &Llama,
    vars: &SeededVars,
    text: &Text,
    options: &Options,
    device: &Device,
) -> Result<()> {
    let mut rng = StdRng::seed_from_u64(options.seed);
    let mut trainer = Trainer::new(vars.vars(), Schedule::new(options.lr, options.steps))?;
    let mut progress = Progress::new(options.steps, options.batch * options.length)?;
    for _ in 0..options.steps {
        let loss = trainer.step(
            model,
            &text.training,
            (options.batch, options.length),
            &mut rng,
            device,
        )?;
        progress.report(loss);
    }
    progress.finish();
    Ok(())
}

/// The state of training, as a bar on a terminal and as a line now and then elsewhere.
struct Progress {
    bar: Option<ProgressBar>,
    started: Instant,
    steps: usize,
    bytes_per_step: usize,
    done: usize,
    first_loss: f64,
    /// A mean of about the last 20 steps.
    loss: f64,
}

impl Progress {
    fn new(steps: usize, bytes_per_step: usize) -> Result<Self> {
        let bar = if std::io::stderr().is_terminal() {
            let style =
                ProgressStyle::with_template("{bar:32} step {pos} of {len}  {msg}  {eta} left")
                    .map_err(Error::wrap)?;
            Some(ProgressBar::new(steps as u64).with_style(style))
        } else {
            None
        };
        Ok(Self {
            bar,
            started: Instant::now(),
            steps,
            bytes_per_step,
            done: 0,
            first_loss: 0.,
            loss: 0.,
        })
    }

    fn report(&mut self, loss: f64) {
        if self.done == 0 {
            self.first_loss = loss;
        }
        self.done += 1;
        self.loss += (loss - self.loss) * (1. / self.done as f64).max(0.05);
        let state = format!("loss {:.3}  {:.0} tokens/s", self.loss, self.speed());
        let often = self.steps.div_ceil(10);
        match &self.bar {
            Some(bar) => {
                bar.set_message(state);
                bar.inc(1);
            }
            None if self.done.is_multiple_of(often) || self.done == self.steps => {
                let left = self.started.elapsed().as_secs_f64() * (self.steps - self.done) as f64
                    / self.done as f64;
                eprintln!(
                    "step {:>5} of {}  {state}  {left:.0} s left",
                    self.done, self.steps
                );
            }
            None => {}
        }
    }

    fn finish(self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        println!(
            "trained    loss {:.3} → {:.3} nats per byte in {:.0} s, {:.0} tokens/s",
            self.first_loss,
            self.loss,
            self.started.elapsed().as_secs_f64(),
            self.speed()
        );
    }

    fn speed(&self) -> f64 {
        (self.done * self.bytes_per_step) as f64 / self.started.elapsed().as_secs_f64()
    }
}

/// The table of perplexities by context.
fn print_reach(model: &Llama, text: &Text, length: usize, device: &Device) -> Result<()> {
    let longest = length * REACH[REACH.len() - 1];
    // Whole windows of the longest context and the byte after them, so that every context reads the same bytes.
    let windows = (text.held_out.len().saturating_sub(1) / longest).min(LONGEST_WINDOWS);
    let held_out = match windows {
        0 => &text.held_out[..],
        n => &text.held_out[..n * longest + 1],
    };
    println!("\nPerplexity per byte of held-out text: 1 is certainty, 256 a blind guess. Last quarter: of the bytes with the most context.");
    println!(
        "{:>14}  {:>8}  {:>8}  {:>12}",
        "context", "windows", "whole", "last quarter"
    );
    let mut whole = Vec::new();
    for reach in REACH {
        let context = format!("{} ({reach}×)", reach * length);
        match perplexity(model, held_out, reach * length, device) {
            Ok(found) => {
                println!(
                    "{context:>14}  {:>8}  {:>8.3}  {:>12.3}",
                    found.windows, found.whole, found.last_quarter
                );
                whole.push((reach, found.whole));
            }
            // A learned table ends, or the held-out text is too short: the others still tell something.
            Err(error) if reach > 1 => println!("{context:>14}  {}", message(&error)),
            Err(error) => return Err(error),
        }
    }
    if let (Some((_, short)), Some((reach, long))) =
        (whole.first(), whole.get(1..).and_then(<[_]>::last))
    {
        println!("At {reach}× the training length the perplexity is {:.3} times that at 1×: longer contexts {}.",
            long / short, if long <= short { "helped" } else { "made it worse" });
    }
    Ok(())
}

/// The prompt and what the model writes on, up to the training length.
fn print_sample(model: &Llama, prompt: &[u8], options: &Options, device: &Device) -> Result<()> {
    let mut rng = StdRng::seed_from_u64(options.seed);
    let count = options.length - prompt.len();
    let written = write_on(model, prompt, count, TEMPERATURE, &mut rng, device)?;
    println!("\nSample of {count} bytes at temperature {TEMPERATURE}, with a key/value cache, after the prompt in ⟨⟩:");
    println!(
        "⟨{}⟩{}",
        String::from_utf8_lossy(prompt),
        String::from_utf8_lossy(&written)
    );
    Ok(())
}

fn save(config: &LlamaConfig, vars: &SeededVars, folder: &Path) -> Result<()> {
    let path = folder.join("config.json");
    let json = serde_json::to_string_pretty(config).map_err(Error::wrap)?;
    std::fs::write(&path, json + "\n").map_err(|e| about(&path, e))?;
    let path = folder.join("model.safetensors");
    vars.save(&path)?;
    println!("\nSaved to {}", folder.display());
    Ok(())
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|e| about(path, e))
}

fn about(path: &Path, error: impl std::fmt::Display) -> Error {
    Error::msg(format!("{}: {error}", path.display()))
}
