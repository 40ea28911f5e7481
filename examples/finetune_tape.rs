//! Puts TAPE on a trained RoPE model and trains only TAPE's weights, on longer windows than the model knows.
//!
//! TAPE starts as RoPE: before the first step its logits are those of the RoPE model, which this program checks before it
//! goes on. Then all of the model's own weights stay as they are, bit for bit, which it checks at the end, and TAPE's few
//! learn how positions should change with content and distance.
//!
//! ```text
//! cargo run --release --example finetune_tape -- --out tape              # makes a small RoPE model first
//! cargo run --release --example finetune_tape -- --model rope --text book.txt --length 1024 --out tape
//! cargo run --release --example generate -- --model tape
//! ```

mod common;

use candle_core::{bail, DType, Device, Result, Tensor};
use candle_posenc::encoding::{EncodingConfig, StateNorm, TapeConfig};
use candle_posenc::hf::{self, ModelFolder, SaveOptions};
use candle_posenc::train::{Parameter, Parameters, Recompute};
use candle_posenc::{Ctx, Llama, LlamaConfig, SeededVars};
use clap::Parser;
use common::codec::Codec;
use common::device::DeviceName;
use common::evaluation::{common_part, perplexity, Perplexity};
use common::names::EncodingName;
use common::recipe::{tokens, train, Recipe};
use common::text::{about, Text};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Windows of the longest length, where the held-out text has as many.
const LONGEST_WINDOWS: usize = 8;
/// By how much of the largest logit one may change when TAPE is switched on: rounding in f32.
const LARGEST_CHANGE: f64 = 1e-5;
const MOST_POSITION_SIZE: usize = 4096;

/// Put TAPE on a trained RoPE model and train only TAPE's weights, on longer windows than the model knows.
#[derive(Parser)]
#[command(name = "finetune_tape")]
struct Options {
    /// Folder of a trained RoPE model, Hugging Face's or ours. Without it a small one is trained first
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,

    /// Files to train on, joined; the last tenth is held out. Without any, a text is made in which brackets close,
    /// numbers count on and names return far apart
    #[arg(long, value_name = "FILE", num_args = 1..)]
    text: Vec<PathBuf>,

    /// Tokens in a window; perplexity is read at a quarter, a half, once and twice this length
    #[arg(
        long,
        value_name = "TOKENS",
        default_value_t = 512,
        default_value_if("toy", "true", "64")
    )]
    length: usize,

    /// Windows in a batch
    #[arg(long, value_name = "N", default_value_t = 2)]
    batch: usize,

    /// Steps of training TAPE
    #[arg(
        long,
        value_name = "N",
        default_value_t = 150,
        default_value_if("toy", "true", "5")
    )]
    steps: usize,

    /// Highest learning rate of TAPE
    #[arg(
        long,
        value_name = "RATE",
        default_value_t = 1e-2,
        allow_negative_numbers = true
    )]
    lr: f64,

    /// Width in which TAPE mixes heads
    #[arg(long, value_name = "N", default_value_t = 16)]
    position_size: usize,

    /// Keep every position state a pure rotation
    #[arg(long)]
    unit: bool,

    /// Compute each block again in the backward pass: less memory, more time
    #[arg(long)]
    recompute: bool,

    /// Steps of training the small RoPE model, on windows of a quarter of --length
    #[arg(
        long,
        value_name = "N",
        default_value_t = 400,
        default_value_if("toy", "true", "10"),
        conflicts_with = "model"
    )]
    base_steps: usize,

    /// Seed of weights and data order
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// What to compute on: cpu, cuda, or cuda:N for the GPU of number N; GPUs need a build with --features cuda
    #[arg(long, value_name = "NAME", default_value_t)]
    device: DeviceName,

    /// New folder to write the model with TAPE to
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// A small model and few steps, done in seconds; single sizes can still be given
    #[arg(long)]
    toy: bool,
}

fn main() -> ExitCode {
    common::conclude("finetune_tape", run(&Options::parse()))
}

fn run(options: &Options) -> Result<()> {
    let started = Instant::now();
    let base = base(options)?;
    let device = options.device.open()?;
    // The longest context that is read, so that a text too short for it does not cost a model.
    let text = Text::open(&options.text, 2 * options.length)?;
    if let Some(out) = &options.out {
        // Before training: a folder that cannot be written to should not cost a model.
        std::fs::create_dir_all(out).map_err(|error| about(out, error))?;
        let mut entries = std::fs::read_dir(out).map_err(|error| about(out, error))?;
        if entries.next().is_some() {
            bail!("{}: is not empty; --out takes a new folder", out.display())
        }
    }
    match &options.model {
        Some(folder) => finetune(&ModelFolder::open(folder)?, &base, &text, options, &device)?,
        None => {
            println!("no --model, so a small RoPE model is trained first, in about a minute\n");
            let folder = tempfile::tempdir()?;
            make_base(folder.path(), &base, &text, options, &device)?;
            finetune(
                &ModelFolder::open(folder.path())?,
                &base,
                &text,
                options,
                &device,
            )?;
        }
    }
    println!("time       {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}

/// The small RoPE model and its training; the options of TAPE's training checked.
fn base(options: &Options) -> Result<Recipe> {
    let &Options {
        length,
        batch,
        steps,
        lr,
        ..
    } = options;
    if !(1..=MOST_POSITION_SIZE).contains(&options.position_size) {
        bail!(
            "--position-size must be 1 to {MOST_POSITION_SIZE}, got {}",
            options.position_size
        )
    }
    if length < 16 || length % 4 != 0 {
        bail!("--length must be a multiple of 4, at least 16, got {length}")
    }
    let (layers, width) = if options.toy { (2, 32) } else { (3, 128) };
    let base = Recipe {
        layers,
        width,
        heads: width / 32,
        length,
        batch,
        steps,
        lr,
    };
    base.validate()?;
    if options.base_steps == 0 {
        bail!("--base-steps must be at least 1")
    }
    Ok(Recipe {
        length: length / 4,
        batch: 4,
        steps: options.base_steps,
        lr: 3e-3,
        ..base
    })
}

/// Trains a small RoPE model and saves it.
fn make_base(
    folder: &Path,
    base: &Recipe,
    text: &Text,
    options: &Options,
    device: &Device,
) -> Result<()> {
    let config = base.model(EncodingName::Rope.config(base.length));
    let parameters = Parameters::new(SeededVars::new(options.seed));
    let model = Llama::new(&config, parameters.builder(DType::F32, device))?;
    println!(
        "RoPE       {} layers of width {}, {} steps of {} windows of {} bytes",
        base.layers, base.width, base.steps, base.batch, base.length
    );
    let recipe = base.trainer(options.seed);
    train(model, parameters.clone(), &tokens(&text.training), recipe)?;
    println!();
    hf::save(
        folder,
        &config,
        parameters.masters(),
        &SaveOptions::default(),
    )
}

fn finetune(
    folder: &ModelFolder,
    base: &Recipe,
    text: &Text,
    options: &Options,
    device: &Device,
) -> Result<()> {
    let config = with_tape(folder.config(), options)?;
    let codec = Codec::open(folder.tokenizer().as_deref(), config.vocab_size)?;
    let encode = |bytes: &[u8]| codec.encode(&String::from_utf8_lossy(bytes));
    let (training, held_out) = match codec {
        Codec::Bytes => (tokens(&text.training), tokens(&text.held_out)),
        Codec::Tokenizer(_) => (encode(&text.training)?, encode(&text.held_out)?),
    };
    let lengths = [1, 2, 4, 8].map(|times| times * (options.length / 4));
    let held_out = common_part(&held_out, &lengths, LONGEST_WINDOWS);

    // The RoPE model, whose weights are all that exists so far.
    let vars = SeededVars::new(options.seed);
    let constants = Parameters::new(vars.clone()).only(|_| false);
    let rope = Llama::new(folder.config(), constants.builder(DType::F32, device))?;
    folder.load_into(&vars)?;
    let known: BTreeSet<String> = vars.named().into_iter().map(|(name, _)| name).collect();

    // The same weights with TAPE, whose own are all that trains.
    let parameters = Parameters::new(vars).only(move |name| !known.contains(name));
    let tape = Llama::new(&config, parameters.builder(DType::F32, device))?;
    let (trained, frozen): (Vec<_>, Vec<_>) = parameters.all().into_iter().partition(|p| p.trains);
    println!(
        "TAPE       {}",
        serde_json::to_string(&config.encoding).map_err(candle_core::Error::wrap)?
    );
    println!(
        "weights    {} of TAPE train, {} of the model stay as they are",
        count(&trained),
        count(&frozen)
    );
    println!(
        "text       {} tokens to train on, {} held out to read: {}",
        training.len(),
        held_out.len(),
        text.name
    );
    let before = copies(&frozen)?;
    let start = copies(&trained)?;
    check_unchanged_logits(&rope, &tape, held_out, options.length)?;

    let read = |model: &Llama| read(model, held_out, &lengths, device);
    let of_rope = read(&rope)?;
    println!(
        "training   {} steps of {} windows of {} tokens, learning rate {}",
        options.steps, options.batch, options.length, options.lr
    );
    let mut recipe = Recipe {
        length: options.length,
        batch: options.batch,
        steps: options.steps,
        lr: options.lr,
        ..*base
    }
    .trainer(options.seed);
    if options.recompute {
        recipe.recompute = Recompute::Blocks;
    }
    train(tape, parameters.clone(), &training, recipe)?;

    let changed = changed(&frozen, &before)?;
    if let Some(name) = changed.first() {
        bail!("{name} changed, though only TAPE's weights train")
    }
    let moved = self::changed(&trained, &start)?.len();
    println!("checked    {} tensors of the model are bit for bit as they were; {moved} of TAPE's {} changed", frozen.len(), trained.len());

    let tape = Llama::new(&config, constants.builder(DType::F32, device))?;
    print_table(&lengths, &of_rope, &read(&tape)?);
    if let Some(out) = &options.out {
        hf::save(out, &config, parameters.masters(), &folder.save_options())?;
        println!("saved      {}", out.display());
    }
    Ok(())
}

/// The configuration with TAPE, its states starting as the model's RoPE.
fn with_tape(config: &LlamaConfig, options: &Options) -> Result<LlamaConfig> {
    let EncodingConfig::Rope(rope) = &config.encoding else {
        let encoding = serde_json::to_string(&config.encoding).map_err(candle_core::Error::wrap)?;
        bail!("--model must have RoPE, for TAPE to start from; it has {encoding}")
    };
    if config.num_hidden_layers < 2 {
        bail!("--model has one layer; TAPE changes positions between layers, and has no weights there")
    }
    Ok(LlamaConfig {
        encoding: EncodingConfig::Tape(TapeConfig {
            rope: rope.clone(),
            position_size: options.position_size,
            norm: match options.unit {
                true => StateNorm::Unit,
                false => StateNorm::None,
            },
            ..TapeConfig::default()
        }),
        ..config.clone()
    })
}

/// Refuses to go on where TAPE does not start as the model that it was put on.
fn check_unchanged_logits(rope: &Llama, tape: &Llama, text: &[u32], length: usize) -> Result<()> {
    let length = length.min(text.len());
    let tokens = Tensor::new(&text[..length], rope.head().device())?.unsqueeze(0)?;
    let logits = |model: &Llama| {
        Ok::<_, candle_core::Error>(model.forward(&tokens, &mut Ctx::default())?.detach())
    };
    let (rope, tape) = (logits(rope)?, logits(tape)?);
    let largest = |x: &Tensor| x.abs()?.max_all()?.to_dtype(DType::F64)?.to_scalar::<f64>();
    let (change, size) = (largest(&(&tape - &rope)?)?, largest(&rope)?);
    let told = match change {
        0. => "do not change by a bit".to_string(),
        _ => format!("change by at most {change:.1e}, of up to {size:.1}"),
    };
    println!("step 0     with TAPE switched on, the logits of {length} tokens {told}");
    if change.is_nan() || change > LARGEST_CHANGE * size {
        bail!("TAPE does not start as the model's RoPE: a logit changed by {change:e}, more than {LARGEST_CHANGE:e} of the largest, {size:e}")
    }
    Ok(())
}

fn read(
    model: &Llama,
    text: &[u32],
    lengths: &[usize],
    device: &Device,
) -> Result<Vec<Perplexity>> {
    let read = |length: &usize| perplexity(model, text, *length, device);
    lengths.iter().map(read).collect()
}

fn print_table(lengths: &[usize], before: &[Perplexity], after: &[Perplexity]) {
    println!("\nPerplexity per token of the same held-out tokens:");
    println!(
        "{:>10}  {:>12}  {:>12}  {:>8}",
        "context", "RoPE, before", "TAPE, after", "change"
    );
    for ((length, before), after) in lengths.iter().zip(before).zip(after) {
        let change = 100. * (after.whole / before.whole - 1.);
        println!(
            "{length:>10}  {:>12.3}  {:>12.3}  {change:>+6.1} %",
            before.whole, after.whole
        );
    }
    println!();
}

fn count(parameters: &[Parameter]) -> usize {
    parameters.iter().map(|p| p.master.elem_count()).sum()
}

fn copies(parameters: &[Parameter]) -> Result<Vec<Tensor>> {
    parameters
        .iter()
        .map(|p| p.master.as_detached_tensor().copy())
        .collect()
}

/// The names of those that are not bit for bit as they were.
fn changed(parameters: &[Parameter], before: &[Tensor]) -> Result<Vec<String>> {
    let bits = |tensor: &Tensor| -> Result<Vec<u32>> {
        let values = tensor.flatten_all()?.to_vec1::<f32>()?;
        Ok(values.into_iter().map(f32::to_bits).collect())
    };
    let mut changed = Vec::new();
    for (parameter, before) in parameters.iter().zip(before) {
        if bits(parameter.master.as_tensor())? != bits(before)? {
            changed.push(parameter.name.clone());
        }
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use common::message;

    fn options(words: &[&str]) -> Options {
        Options::parse_from([&["finetune_tape"], words].concat())
    }

    /// A folder with a model that has learnt nothing.
    fn untrained(layers: usize, encoding: EncodingName) -> Result<tempfile::TempDir> {
        let folder = tempfile::tempdir()?;
        let mut recipe = base(&options(&["--toy"]))?;
        recipe.layers = layers;
        let config = recipe.model(encoding.config(recipe.length));
        let vars = SeededVars::new(0);
        Llama::new(&config, vars.builder(DType::F32, &Device::Cpu))?;
        hf::save(folder.path(), &config, &vars, &SaveOptions::default())?;
        Ok(folder)
    }

    #[test]
    fn options_that_do_not_fit_are_refused_in_one_line() -> Result<()> {
        let (alibi, single) = (
            untrained(2, EncodingName::Alibi)?,
            untrained(1, EncodingName::Rope)?,
        );
        let place = |folder: &tempfile::TempDir| folder.path().display().to_string();
        // Enough to train on, and too few to read twice the length from.
        let short = alibi.path().join("short.txt");
        std::fs::write(&short, [b'a'; 1000])?;
        let short = short.display().to_string();
        for (words, told) in [
            (["--length", "18"], "--length"),
            (["--length", "8"], "--length"),
            (["--steps", "0"], "--steps"),
            (["--batch", "0"], "--batch"),
            (["--base-steps", "0"], "--base-steps"),
            (["--position-size", "0"], "--position-size"),
            (
                ["--position-size", "18446744073709551615"],
                "--position-size",
            ),
            (["--text", &short], "1000 bytes are too few"),
            (["--device", "cuda:99999"], "--device cuda:99999"),
            (["--lr", "-1"], "--lr"),
            (["--text", "no such file"], "no such file"),
            (["--model", "no such folder"], "no such folder"),
            (["--model", &place(&alibi)], "alibi"),
            (["--model", &place(&single)], "one layer"),
        ] {
            let words = [&["--toy"], &words[..]].concat();
            let error = message(&run(&options(&words)).unwrap_err());
            assert!(
                error.contains(told) && error.lines().count() == 1,
                "{words:?}: {error}"
            );
        }
        Ok(())
    }

    #[test]
    fn logits_that_change_at_step_0_are_refused() -> Result<()> {
        let recipe = base(&options(&["--toy"]))?;
        let model = |encoding: EncodingName, scale: f64| {
            let config = LlamaConfig {
                initializer_range: 0.1 * scale,
                ..recipe.model(encoding.config(recipe.length))
            };
            Llama::new(
                &config,
                SeededVars::new(0).builder(DType::F32, &Device::Cpu),
            )
        };
        let rope = model(EncodingName::Rope, 1.)?;
        let text: Vec<u32> = (0..40).collect();
        check_unchanged_logits(&rope, &model(EncodingName::Tape, 1.)?, &text, 32)?;
        assert!(
            check_unchanged_logits(&rope, &model(EncodingName::Tape, 1.001)?, &text, 32).is_err()
        );
        assert!(check_unchanged_logits(&rope, &model(EncodingName::Nope, 1.)?, &text, 32).is_err());
        Ok(())
    }

    #[test]
    fn run_toy_saves_a_model_whose_own_weights_are_those_of_the_folder() -> Result<()> {
        let (rope, out) = (untrained(2, EncodingName::Rope)?, tempfile::tempdir()?);
        let place = |folder: &tempfile::TempDir| folder.path().display().to_string();
        let (from, to) = (place(&rope), place(&out));
        run(&options(&[
            "--toy",
            "--unit",
            "--recompute",
            "--model",
            &from,
            "--out",
            &to,
        ]))?;
        let refused = run(&options(&["--toy", "--model", &from, "--out", &from])).unwrap_err();
        assert!(message(&refused).contains("is not empty"), "{refused}");
        let (rope, tape) = (
            ModelFolder::open(rope.path())?,
            ModelFolder::open(out.path())?,
        );
        let EncodingConfig::Tape(config) = &tape.config().encoding else {
            bail!("no TAPE in {:?}", tape.config())
        };
        assert_eq!((config.position_size, config.norm), (16, StateNorm::Unit));
        let values = |folder: &ModelFolder| {
            let vars = SeededVars::new(1);
            Llama::new(folder.config(), vars.builder(DType::F32, &Device::Cpu))?;
            folder.load_into(&vars)?;
            Ok::<_, candle_core::Error>(vars.named())
        };
        let tape = values(&tape)?;
        for (name, var) in values(&rope)? {
            let (_, other) = tape.iter().find(|(other, _)| *other == name).unwrap();
            let values =
                [&var, other].map(|v| v.flatten_all().and_then(|v| v.to_vec1::<f32>()).unwrap());
            assert_eq!(values[0], values[1], "{name}");
        }
        Ok(())
    }

    #[test]
    fn changed_names_the_tensor_with_another_bit() -> Result<()> {
        let vars = SeededVars::new(0);
        let parameters = Parameters::new(vars.clone());
        parameters
            .builder(DType::F32, &Device::Cpu)
            .get(3, "zeros")?;
        let all = parameters.all();
        let before = copies(&all)?;
        assert!(changed(&all, &before)?.is_empty());
        all[0]
            .master
            .set(&Tensor::new(&[0f32, -0., 0.], &Device::Cpu)?)?;
        assert_eq!(changed(&all, &before)?, ["zeros"]);
        Ok(())
    }
}
