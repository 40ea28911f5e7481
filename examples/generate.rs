//! Writes on from a prompt with a model folder: Hugging Face's (`config.json`, safetensors, `tokenizer.json`) or one
//! that the other examples save, with any encoding.
//!
//! The text goes to standard output as it comes, all else to standard error.
//!
//! ```text
//! cargo run --release --example train -- --out model
//! cargo run --release --example generate -- --model model --prompt "Say the password: "
//! cargo run --release --example generate -- --model llama-3.2-1b --prompt "Paris is" --temperature 0 --dtype bf16
//! cargo run --release --features cuda --example generate -- --model llama-3.2-1b --device cuda --dtype bf16
//! ```

mod common;

use candle_core::{bail, DType, Device, Result};
use candle_posenc::hf::{self, ModelFolder, SaveOptions};
use candle_posenc::{Llama, LlamaConfig, SeededVars};
use clap::{Parser, ValueEnum};
use common::codec::{printable, Codec};
use common::device::DeviceName;
use common::sampling::{Sampler, Writer};
use common::tell;
use rand::rngs::ChaCha12Rng;
use rand::SeedableRng;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

const MOST_TOKENS: usize = 1 << 20;

/// Write on from a prompt with a model from a folder.
#[derive(Parser)]
#[command(name = "generate")]
struct Options {
    /// Folder of the model: config.json, safetensors and, if it has one, tokenizer.json
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,

    /// What the text begins with
    #[arg(long, value_name = "TEXT", default_value = "The ")]
    prompt: String,

    /// Tokens to write, at most
    #[arg(
        long,
        value_name = "N",
        default_value_t = 200,
        default_value_if("toy", "true", "20")
    )]
    tokens: usize,

    /// 1 samples the model's own distribution, less sharpens it, 0 takes the likeliest token
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.8,
        allow_negative_numbers = true
    )]
    temperature: f64,

    /// Sample from the likeliest tokens that together have this probability
    #[arg(
        long,
        value_name = "P",
        default_value_t = 1.,
        allow_negative_numbers = true
    )]
    top_p: f64,

    /// Sample from so many of the likeliest tokens
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,

    /// Seed of the sampling
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Number format to compute in
    #[arg(long, value_enum, value_name = "NAME", default_value = "f32")]
    dtype: Format,

    /// What to compute on: cpu, cuda, or cuda:N for the GPU of number N; GPUs need a build with --features cuda
    #[arg(long, value_name = "NAME", default_value_t)]
    device: DeviceName,

    /// In place of --model a small one that has learnt nothing, to see the program run
    #[arg(long, conflicts_with = "model")]
    toy: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    F32,
    Bf16,
    F16,
}

impl From<Format> for DType {
    fn from(format: Format) -> Self {
        match format {
            Format::F32 => Self::F32,
            Format::Bf16 => Self::BF16,
            Format::F16 => Self::F16,
        }
    }
}

fn main() -> ExitCode {
    common::conclude(
        "generate",
        run(&Options::parse(), &mut std::io::stdout().lock()),
    )
}

fn run(options: &Options, output: &mut dyn Write) -> Result<()> {
    let sampler = Sampler {
        temperature: options.temperature,
        top_k: options.top_k,
        top_p: options.top_p,
    };
    sampler.validate()?;
    if !(1..=MOST_TOKENS).contains(&options.tokens) {
        bail!(
            "--tokens must be 1 to {MOST_TOKENS}, got {}",
            options.tokens
        )
    }
    match &options.model {
        Some(folder) => write_on(&ModelFolder::open(folder)?, &sampler, options, output),
        None if options.toy => {
            let folder = tempfile::tempdir()?;
            save_untrained(folder.path(), 256, options.seed)?;
            write_on(&ModelFolder::open(folder.path())?, &sampler, options, output)
        }
        None => bail!("--model is missing; to make a model: cargo run --release --example train -- --out model"),
    }
}

fn write_on(
    folder: &ModelFolder,
    sampler: &Sampler,
    options: &Options,
    output: &mut dyn Write,
) -> Result<()> {
    let device = options.device.open()?;
    let config = folder.config();
    let codec = Codec::open(folder.tokenizer().as_deref(), config.vocab_size)?;
    let prompt = codec.encode(&options.prompt)?;
    if prompt.is_empty() {
        bail!("--prompt must have at least one token")
    }
    let model = folder.load(options.dtype.into(), &device)?;
    print_facts(folder, &codec, prompt.len(), options)?;

    let ends = folder.eos_token_ids();
    let mut rng = ChaCha12Rng::seed_from_u64(options.seed);
    let mut writer = Writer::new(&model, &prompt, options.tokens, &device)?;
    let mut decoder = codec.decoder(&prompt);
    let mut show = |text: &str| -> Result<()> {
        write!(output, "{}", printable(text))?;
        Ok(output.flush()?)
    };
    show(&options.prompt)?;

    let started = Instant::now();
    let mut token = writer.next(sampler, &mut rng)?;
    let reading = started.elapsed().as_secs_f64();
    let started = Instant::now();
    let mut written = 1;
    let reason = loop {
        if ends.contains(&token) {
            break "the model ended its text";
        }
        show(&decoder.push(token)?)?;
        if written == options.tokens {
            break "as many as asked for";
        }
        token = writer.next(sampler, &mut rng)?;
        written += 1;
    };
    show(&decoder.finish()?)?;
    show("\n")?;
    let writing = started.elapsed().as_secs_f64();

    tell(format_args!(
        "\nread       {} tokens, {:.0} tokens/s",
        prompt.len(),
        prompt.len() as f64 / reading
    ));
    tell(format_args!(
        "wrote      {written} tokens: {reason}{}",
        match written {
            1 => String::new(),
            _ => format!("; {:.1} tokens/s", (written - 1) as f64 / writing),
        }
    ));
    Ok(())
}

fn print_facts(
    folder: &ModelFolder,
    codec: &Codec,
    prompt: usize,
    options: &Options,
) -> Result<()> {
    let config = folder.config();
    let encoding = serde_json::to_string(&config.encoding).map_err(candle_core::Error::wrap)?;
    tell(format_args!(
        "model      {} layers of width {}, vocabulary {}: {}",
        config.num_hidden_layers,
        config.hidden_size,
        config.vocab_size,
        folder.path().display()
    ));
    tell(format_args!("encoding   {encoding}"));
    match codec {
        Codec::Bytes => tell(format_args!(
            "text       byte by byte: there is no tokenizer.json"
        )),
        Codec::Tokenizer(_) => tell(format_args!("text       by the model's tokenizer.json")),
    }
    let end = prompt.saturating_add(options.tokens);
    let made_for = config.max_position_embeddings;
    if end > made_for {
        tell(format_args!(
            "note       the text may reach {end} tokens; the model is made for {made_for}"
        ));
    }
    tell(format_args!(""));
    Ok(())
}

/// A small model as its weights are drawn.
fn save_untrained(folder: &Path, vocab_size: usize, seed: u64) -> Result<()> {
    let config = LlamaConfig {
        vocab_size,
        hidden_size: 32,
        intermediate_size: 64,
        num_hidden_layers: 2,
        ..LlamaConfig::default()
    };
    let vars = SeededVars::new(seed);
    Llama::new(&config, vars.builder(DType::F32, &Device::Cpu))?;
    hf::save(folder, &config, &vars, &SaveOptions::default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use common::codec::byte_pairs;
    use common::message;

    fn options(words: &[&str]) -> Options {
        Options::parse_from([&["generate"], words].concat())
    }

    fn written(words: &[&str]) -> Result<String> {
        let mut output = Vec::new();
        run(&options(words), &mut output)?;
        Ok(String::from_utf8_lossy(&output).into_owned())
    }

    #[test]
    fn options_that_do_not_fit_are_refused_in_one_line() {
        for (words, told) in [
            (&[][..], "example train -- --out"),
            (&["--model", "no such folder"], "no such folder"),
            (&["--toy", "--temperature", "-1"], "temperature"),
            (&["--toy", "--temperature", "nan"], "temperature"),
            (&["--toy", "--top-p", "0"], "top-p"),
            (&["--toy", "--top-k", "0"], "top-k"),
            (&["--toy", "--tokens", "0"], "--tokens"),
            (&["--toy", "--prompt", ""], "--prompt"),
            (&["--toy", "--device", "cuda:99999"], "--device cuda:99999"),
        ] {
            let error = message(&written(words).unwrap_err());
            assert!(
                error.contains(told) && error.lines().count() == 1,
                "{words:?}: {error}"
            );
        }
    }

    #[test]
    fn text_of_the_same_seed_is_the_same_and_begins_with_the_prompt() -> Result<()> {
        let text = |seed| {
            written(&[
                "--toy", "--prompt", "Grüße ", "--dtype", "bf16", "--seed", seed,
            ])
        };
        let one = text("1")?;
        assert!(one.starts_with("Grüße ") && one.ends_with('\n'), "{one}");
        assert_eq!(one, text("1")?);
        assert_ne!(one, text("2")?);
        Ok(())
    }

    #[test]
    fn token_that_ends_a_text_ends_it_unseen() -> Result<()> {
        let folder = tempfile::tempdir()?;
        save_untrained(folder.path(), 256, 0)?;
        let place = folder.path().display().to_string();
        let words = ["--model", &place, "--prompt", "abc", "--temperature", "0"];
        let whole = written(&words)?;
        // The first token that the model writes, from now on the end.
        let model = ModelFolder::open(folder.path())?.load(DType::F32, &Device::Cpu)?;
        let prompt = Codec::Bytes.encode("abc")?;
        let (device, mut rng) = (Device::Cpu, ChaCha12Rng::seed_from_u64(0));
        let first =
            Writer::new(&model, &prompt, 200, &device)?.next(&Sampler::new(0.), &mut rng)?;
        let generation = folder.path().join("generation_config.json");
        std::fs::write(generation, format!("{{\"eos_token_id\": [999, {first}]}}"))?;
        assert_eq!(written(&words)?, "abc\n");
        assert!(whole.len() > 100, "{whole}");
        Ok(())
    }

    #[test]
    fn text_by_a_tokenizer_is_what_its_tokens_say() -> Result<()> {
        let folder = tempfile::tempdir()?;
        save_untrained(folder.path(), 258, 0)?;
        let place = folder.path().display().to_string();
        let words = ["--model", &place, "--prompt", "ab ab", "--tokens", "40"];
        let error = message(&written(&words).unwrap_err());
        assert!(error.contains("258 is not that of bytes"), "{error}");

        let tokenizer = byte_pairs();
        let file = folder.path().join("tokenizer.json");
        tokenizer
            .save(file, false)
            .map_err(candle_core::Error::wrap)?;
        let text = written(&words)?;
        let model = ModelFolder::open(folder.path())?.load(DType::F32, &Device::Cpu)?;
        let prompt = Codec::Tokenizer(Box::new(byte_pairs())).encode("ab ab")?;
        assert_eq!(prompt.len(), 2);
        let (device, mut rng) = (Device::Cpu, ChaCha12Rng::seed_from_u64(0));
        let mut writer = Writer::new(&model, &prompt, 40, &device)?;
        let mut tokens = prompt.clone();
        for _ in 0..40 {
            tokens.push(writer.next(&Sampler::new(0.8), &mut rng)?);
        }
        let whole = tokenizer
            .decode(&tokens, true)
            .map_err(candle_core::Error::wrap)?;
        assert_eq!(text, printable(&whole) + "\n");
        Ok(())
    }
}
