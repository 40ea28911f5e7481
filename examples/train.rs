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
use candle_posenc::{EncodingConfig, Llama, LlamaConfig, SeededVars};
use clap::Parser;
use common::evaluation::perplexity;
use common::message;
use common::names::{BackendName, EncodingName};
use common::progress::Progress;
use common::sampling::write_on;
use common::text::{about, read, Text};
use common::training::{Schedule, Trainer};
use rand::{rngs::StdRng, SeedableRng};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Contexts at which the trained model is read, in training lengths.
const REACH: [usize; 4] = [1, 2, 4, 8];
/// Windows that the longest context gets, where the held-out part is long enough. All contexts read the same bytes.
const LONGEST_WINDOWS: usize = 8;
const TEMPERATURE: f64 = 0.8;
/// Sizes beyond these would end in a failed allocation.
const MOST_WEIGHTS: usize = 1 << 30;
const MOST_TOKENS: usize = 1 << 20;

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

    /// Folder to write model.safetensors and config.json to
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// A small model and few steps, done in seconds; single sizes can still be given
    #[arg(long)]
    toy: bool,
}

fn main() -> ExitCode {
    common::conclude("train", run(&Options::parse()))
}

fn run(options: &Options) -> Result<()> {
    let config = model_config(options)?;
    let text = Text::open(&options.text, options.length)?;
    let prompt = prompt(options, &text)?;
    if let Some(out) = &options.out {
        // Before training: a folder that cannot be written to should not cost a model.
        save_config(&config, out)?;
    }

    let device = Device::Cpu;
    let vars = SeededVars::new(options.seed);
    let model = Llama::new(&config, vars.builder(DType::F32, &device))?
        .with_backend(options.backend.into());
    print_facts(&model, &vars, &text, options)?;
    train(&model, &vars, &text, options, &device)?;
    if let Some(out) = &options.out {
        vars.save(out.join("model.safetensors"))?;
        println!("saved      {}", out.display());
    }
    print_reach(&model, &text, options.length, &device)?;
    print_sample(&model, &prompt, options, &device)
}

/// What this run is about, before it starts.
fn print_facts(model: &Llama, vars: &SeededVars, text: &Text, options: &Options) -> Result<()> {
    let &Options {
        layers,
        width,
        heads,
        length,
        batch,
        steps,
        lr,
        seed,
        ..
    } = options;
    let kv_heads = model.config().num_key_value_heads;
    let weights: usize = vars.vars().iter().map(|var| var.elem_count()).sum();
    let encoding = serde_json::to_string(&model.config().encoding).map_err(Error::wrap)?;
    let (training, held_out) = (text.training.len(), text.held_out.len());
    let plan = model.plan(0, batch, length)?;
    println!("model      {weights} weights: {layers} layers of width {width}, {heads} query and {kv_heads} key/value heads");
    println!("encoding   {encoding}");
    println!(
        "text       {training} bytes to train on, {held_out} held out: {}",
        text.name
    );
    println!("training   {steps} steps of {batch} windows of {length} bytes, learning rate {lr}, seed {seed}");
    println!("device     CPU");
    println!("attention  {plan}");
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
    let width_squared = width.saturating_mul(width);
    // Projections and the feed-forward part; the embeddings.
    let weights = layers
        .saturating_mul(12)
        .saturating_mul(width_squared)
        .saturating_add(width.saturating_mul(256));
    if weights > MOST_WEIGHTS {
        bail!("--layers {layers} of --width {width} make more than {MOST_WEIGHTS} weights")
    }
    if batch.saturating_mul(length) > MOST_TOKENS {
        bail!("--batch {batch} of --length {length} make more than {MOST_TOKENS} bytes in a step")
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

/// The table of perplexities by context.
fn print_reach(model: &Llama, text: &Text, length: usize, device: &Device) -> Result<()> {
    let held_out = common_part(&text.held_out, length);
    println!("\nPerplexity per byte of held-out text: 1 is certainty, 256 a blind guess. Last quarter: of the bytes with the most context.");
    println!(
        "{:>14}  {:>8}  {:>8}  {:>12}",
        "context", "windows", "whole", "last quarter"
    );
    let mut whole = Vec::new();
    for reach in REACH {
        let context = format!("{} ({reach}×)", reach * length);
        let part = match held_out.len() > reach * length {
            true => held_out,
            false => &text.held_out[..],
        };
        match perplexity(model, part, reach * length, device) {
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
    if let [(_, short), .., (reach, long)] = whole[..] {
        let ratio = long / short;
        let verdict = match ratio {
            r if r < 0.99 => "longer contexts helped",
            r if r <= 1.01 => "longer contexts neither helped nor got worse",
            _ => "longer contexts got worse",
        };
        println!(
            "Perplexity at {reach}× the training length is {ratio:.3} times that at 1×: {verdict}."
        );
    }
    Ok(())
}

/// Whole windows of the longest context that fits and the byte after them, so that every context that fits reads the
/// same bytes.
fn common_part(held_out: &[u8], length: usize) -> &[u8] {
    let windows = |reach: &usize| held_out.len().saturating_sub(1) / (reach * length);
    match REACH.iter().rev().find(|reach| windows(reach) > 0) {
        Some(reach) => &held_out[..windows(reach).min(LONGEST_WINDOWS) * reach * length + 1],
        None => held_out,
    }
}

/// The prompt and what the model writes on, up to the training length.
fn print_sample(model: &Llama, prompt: &[u8], options: &Options, device: &Device) -> Result<()> {
    let mut rng = StdRng::seed_from_u64(options.seed);
    let count = options.length - prompt.len();
    let written = write_on(model, prompt, count, TEMPERATURE, &mut rng, device)?;
    println!("\nSample of {count} bytes at temperature {TEMPERATURE}, with a key/value cache, after the prompt in ⟨⟩:");
    println!("⟨{}⟩{}", printable(prompt), printable(&written));
    Ok(())
}

/// Bytes as text that leaves a terminal as it was.
fn printable(bytes: &[u8]) -> String {
    let shown = |c: char| matches!(c, '\n' | '\t') || !c.is_control();
    String::from_utf8_lossy(bytes).replace(|c| !shown(c), "\u{fffd}")
}

fn save_config(config: &LlamaConfig, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|e| about(folder, e))?;
    let path = folder.join("config.json");
    let json = serde_json::to_string_pretty(config).map_err(Error::wrap)?;
    std::fs::write(&path, json + "\n").map_err(|e| about(&path, e))
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
            (["--heads", "3"], "3 does not divide 128"),
            (["--kv-heads", "3"], "3 does not divide 4"),
            (["--kv-heads", "0"], "--kv-heads"),
            (["--steps", "0"], "--steps"),
            (["--length", "1"], "--length"),
            (["--lr", "-1"], "--lr"),
            (["--lr", "inf"], "--lr"),
            (["--width", "10000000000000000000"], "--width"),
            (["--layers", "10000000000"], "--layers"),
            (["--batch", "1000000000000"], "--batch"),
            (["--config", "no such file"], "no such file"),
        ] {
            let told_of = message(&model_config(&options(&words)).unwrap_err());
            assert!(told_of.contains(told), "{words:?}: {told_of}");
            assert_eq!(told_of.lines().count(), 1, "{told_of}");
        }
    }

    #[test]
    fn options_single_size_given_overrides_toy() -> Result<()> {
        let config = model_config(&options(&["--toy", "--layers", "3"]))?;
        assert_eq!((config.num_hidden_layers, config.hidden_size), (3, 32));
        Ok(())
    }

    #[test]
    fn common_part_of_any_text_is_whole_windows_of_every_context_that_fits() {
        for (held_out, bytes) in [(33, 33), (70, 65), (200, 129), (257, 257), (9999, 2049)] {
            assert_eq!(common_part(&vec![0; held_out], 32).len(), bytes);
        }
    }

    #[test]
    fn run_learning_rate_too_high_stops_and_names_the_step() {
        let error = run(&options(&["--toy", "--lr", "1e30"])).unwrap_err();
        let told = message(&error);
        assert!(
            told.contains(" at step 2") && told.contains("--lr"),
            "{told}"
        );
    }

    #[test]
    fn run_folder_that_cannot_be_written_to_refused_before_training() -> Result<()> {
        let folder = std::env::temp_dir().join(format!("train-blocked-{}", std::process::id()));
        // A folder in the place of the file.
        let blocked = folder.join("config.json");
        std::fs::create_dir_all(&blocked).map_err(|e| about(&blocked, e))?;
        let out = folder.display().to_string();
        // Training would fail at this rate, and tell so.
        let words = ["--toy", "--lr", "1e30", "--out", &out];
        let told = message(&run(&options(&words)).unwrap_err());
        assert!(told.contains("config.json"), "{told}");
        std::fs::remove_dir_all(&folder).map_err(|e| about(&folder, e))
    }

    #[test]
    fn printable_control_characters_and_broken_text_replaced() {
        assert_eq!(printable(b"a\x1b[\xffb\tc\n"), "a\u{fffd}[\u{fffd}b\tc\n");
    }

    #[test]
    fn run_toy_saves_a_model_that_loads_back_trained() -> Result<()> {
        let folder = std::env::temp_dir().join(format!("train-toy-{}", std::process::id()));
        let out = folder.display().to_string();
        run(&options(&["--toy", "--steps", "30", "--out", &out]))?;

        let config: LlamaConfig =
            serde_json::from_slice(&read(&folder.join("config.json"))?).map_err(Error::wrap)?;
        let vars = SeededVars::new(1);
        let model = Llama::new(&config, vars.builder(DType::F32, &Device::Cpu))?;
        let text = tales(2000, 5);
        let untrained = perplexity(&model, &text, 32, &Device::Cpu)?.whole;
        vars.load(folder.join("model.safetensors"))?;
        let trained = perplexity(&model, &text, 32, &Device::Cpu)?.whole;
        assert!(untrained > 200. && trained < 100., "{untrained} {trained}");
        std::fs::remove_dir_all(&folder).map_err(|e| about(&folder, e))
    }
}
