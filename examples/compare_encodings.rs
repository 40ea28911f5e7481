//! Which positional encoding still predicts well at contexts longer than it was trained at?
//!
//! Trains one small byte-level LLaMA for each encoding, with the same budget, weights drawn from the same seed and the
//! same windows in the same order, then reads held-out text at 1, 2, 4, … times the training length. All lengths read the
//! same bytes. Prints a table and, in words, whether the effect is there for which TAPA was made: RoPE's perplexity
//! explodes beyond the training length and the other's does not.
//!
//! ```text
//! cargo run --release --example compare_encodings -- --png lengths.png     # three to four minutes on two idle cores
//! cargo run --release --example compare_encodings -- --encodings rope tape nope --seeds 0 1 2 --csv lengths.csv
//! ```

mod common;

use candle_core::{bail, DType, Device, Result};
use candle_posenc::train::Parameters;
use candle_posenc::{Llama, SeededVars};
use clap::Parser;
use common::device::DeviceName;
use common::evaluation::{common_part, doublings, perplexity, Perplexity};
use common::message;
use common::names::EncodingName;
use common::plot::{self, Lines, Point, Series};
use common::recipe::{tokens, train, Recipe};
use common::table::write_csv;
use common::text::{check_writable, Text};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Windows of the longest length, where the held-out text has as many.
const LONGEST_WINDOWS: usize = 16;
/// RoPE's perplexity must grow at least so many times for there to be something to avoid …
const GROWTH: f64 = 1.5;
/// … and the other's by at most this part of it.
const SMALLER: f64 = 0.5;
const MOST_REACH: usize = 1024;
/// More lengths than these, named below the axis, would overlap.
const MOST_TICKS: usize = 7;

/// Train a small model with each encoding on the same data and compare their perplexity at lengths beyond that of
/// training.
#[derive(Parser)]
#[command(name = "compare_encodings")]
struct Options {
    /// The encodings
    #[arg(long, value_enum, value_name = "NAME", num_args = 1.., default_values = ["rope", "alibi", "tapa"])]
    encodings: Vec<EncodingName>,

    /// Seeds of weights and data order; with several, means and ranges are shown
    #[arg(long, visible_alias = "seed", value_name = "N", num_args = 1.., default_values_t = [0])]
    seeds: Vec<u64>,

    /// Files to train on, joined as bytes; the last tenth is held out. Without any, a text is made in which brackets
    /// close, numbers count on and names return far apart
    #[arg(long, value_name = "FILE", num_args = 1..)]
    text: Vec<PathBuf>,

    /// Longest context that is read, in training lengths
    #[arg(long, value_name = "TIMES", default_value_t = 8)]
    reach: usize,

    /// Layers
    #[arg(
        long,
        value_name = "N",
        default_value_t = 3,
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

    /// Heads; the width must be an even multiple of them
    #[arg(
        long,
        value_name = "N",
        default_value_t = 4,
        default_value_if("toy", "true", "2")
    )]
    heads: usize,

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

    /// Steps of training, for each encoding and seed
    #[arg(
        long,
        value_name = "N",
        default_value_t = 400,
        default_value_if("toy", "true", "20")
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

    /// What to compute on: cpu, cuda, or cuda:N for the GPU of number N; GPUs need a build with --features cuda
    #[arg(long, value_name = "NAME", default_value_t)]
    device: DeviceName,

    /// File to write the table to
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,

    /// File to draw the picture to
    #[arg(long, value_name = "FILE")]
    png: Option<PathBuf>,

    /// Small models and few steps, done in seconds; single sizes can still be given
    #[arg(long)]
    toy: bool,
}

/// One trained model's perplexity by length.
#[derive(Clone)]
struct Run {
    encoding: EncodingName,
    seed: u64,
    /// As many as there are lengths; an encoding may refuse one. None at all where training failed.
    found: Vec<Option<Perplexity>>,
}

impl Run {
    fn trained(&self) -> bool {
        self.found.iter().any(Option::is_some)
    }
}

fn main() -> ExitCode {
    common::conclude("compare_encodings", run(&Options::parse()))
}

fn run(options: &Options) -> Result<()> {
    let started = Instant::now();
    let recipe = recipe(options)?;
    let device = options.device.open()?;
    let text = Text::open(&options.text, options.length)?;
    let lengths = doublings(options.length, options.reach);
    let held_out = common_part(&text.held_out, &lengths, LONGEST_WINDOWS);
    if held_out.len() <= lengths.last().copied().unwrap_or(0) {
        bail!(
            "{}: the {} bytes held out are too few for --reach {} of --length {}",
            text.name,
            text.held_out.len(),
            options.reach,
            options.length
        )
    }
    print_facts(options, &text, held_out.len())?;

    let training = tokens(&text.training);
    let (mut runs, mut failed) = (Vec::new(), None);
    for seed in &options.seeds {
        for encoding in &options.encodings {
            println!("\n{}, seed {seed}", encoding.label());
            let config = recipe.model(encoding.config(options.length));
            let parameters = Parameters::new(SeededVars::new(*seed));
            let model = Llama::new(&config, parameters.builder(DType::F32, &device))?;
            let trained = train(model.clone(), parameters, &training, recipe.trainer(*seed));
            let found = match trained {
                Ok(()) => read(&model, held_out, &lengths, &device)?,
                // One that diverges should not cost the others' results.
                Err(error) => {
                    println!("not trained: {}", message(&error));
                    failed = Some(error);
                    vec![None; lengths.len()]
                }
            };
            let told = lengths.iter().zip(&found).filter_map(|(length, found)| {
                let perplexity = short(found.as_ref()?.whole);
                Some(format!("{perplexity} ({}×)", length / options.length))
            });
            let told: Vec<_> = told.collect();
            if !told.is_empty() {
                println!("perplexity {}", told.join(", "));
            }
            runs.push(Run {
                encoding: *encoding,
                seed: *seed,
                found,
            });
        }
    }

    if let Some(error) = failed.filter(|_| runs.iter().all(|run| !run.trained())) {
        return Err(error);
    }
    print_table(&runs, options, &lengths);
    for line in verdicts(&runs, options) {
        println!("{line}");
    }
    if let Some(path) = &options.csv {
        save_csv(&runs, options, &lengths, path)?;
        println!("table      {}", path.display());
    }
    if let Some(path) = &options.png {
        picture(&runs, options, &lengths, &text.name).draw(path)?;
        println!("picture    {}", path.display());
    }
    println!("time       {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}

fn recipe(options: &Options) -> Result<Recipe> {
    let &Options {
        layers,
        width,
        heads,
        length,
        batch,
        steps,
        lr,
        reach,
        ..
    } = options;
    let recipe = Recipe {
        layers,
        width,
        heads,
        length,
        batch,
        steps,
        lr,
    };
    recipe.validate()?;
    if !(2..=MOST_REACH).contains(&reach) {
        bail!("--reach must be 2 to {MOST_REACH}, got {reach}")
    }
    if let Some(twice) = first_repeated(&options.encodings) {
        bail!("--encodings has {} twice", twice.label())
    }
    if let Some(twice) = first_repeated(&options.seeds) {
        bail!("--seeds has {twice} twice")
    }
    // Before training: a file that cannot be written should not cost the results.
    options.csv.as_deref().map_or(Ok(()), check_writable)?;
    options.png.as_deref().map_or(Ok(()), plot::check_path)?;
    Ok(recipe)
}

fn first_repeated<T: PartialEq>(list: &[T]) -> Option<&T> {
    (1..list.len()).find_map(|n| list[..n].contains(&list[n]).then_some(&list[n]))
}

fn print_facts(options: &Options, text: &Text, read: usize) -> Result<()> {
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
    let (training, name) = (text.training.len(), &text.name);
    println!("model      {layers} layers of width {width}, {heads} heads, byte level");
    println!("text       {training} bytes to train on, {read} held out to read: {name}");
    println!("training   {steps} steps of {batch} windows of {length} bytes, learning rate {lr}, the same for all");
    Ok(())
}

fn read(
    model: &Llama,
    held_out: &[u8],
    lengths: &[usize],
    device: &Device,
) -> Result<Vec<Option<Perplexity>>> {
    let mut found = Vec::new();
    for length in lengths {
        found.push(match perplexity(model, held_out, *length, device) {
            Ok(perplexity) => Some(perplexity),
            // A learned table ends: the other lengths still tell something.
            Err(error) if !found.is_empty() => {
                println!("{length} bytes: {}", message(&error));
                None
            }
            Err(error) => return Err(error),
        });
    }
    Ok(found)
}

/// The perplexities of all seeds at the `n`-th length. `None` where a seed has none: a mean over those that are left would
/// tell of the luckier ones.
fn of_seeds(runs: &[Run], encoding: EncodingName, n: usize) -> Option<Vec<f64>> {
    let runs = runs.iter().filter(|run| run.encoding == encoding);
    runs.map(|run| Some(run.found.get(n)?.as_ref()?.whole))
        .collect()
}

/// Mean, least and greatest.
fn spread(values: &[f64]) -> Option<(f64, f64, f64)> {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let low = values.iter().copied().reduce(f64::min)?;
    Some((mean, low, values.iter().copied().reduce(f64::max)?))
}

fn print_table(runs: &[Run], options: &Options, lengths: &[usize]) {
    let many = options.seeds.len() > 1;
    let width = if many { 22 } else { 12 };
    println!(
        "\nPerplexity per byte of the same held-out bytes: 1 is certainty, 256 a blind guess."
    );
    if many {
        println!(
            "Mean over {} seeds, and from the least to the greatest.",
            options.seeds.len()
        );
    }
    let head: String = lengths
        .iter()
        .map(|length| {
            format!(
                "{:>width$}",
                format!("{length} ({}×)", length / options.length)
            )
        })
        .collect();
    println!("{:<12}{head}", "context");
    for encoding in &options.encodings {
        let cells: String = (0..lengths.len())
            .map(
                |n| match of_seeds(runs, *encoding, n).and_then(|found| spread(&found)) {
                    None => format!("{:>width$}", "–"),
                    Some((mean, ..)) if !many => format!("{:>width$}", short(mean)),
                    Some((mean, low, high)) => {
                        let cell = format!("{} ({}–{})", short(mean), short(low), short(high));
                        format!("{cell:>width$}")
                    }
                },
            )
            .collect();
        println!("{:<12}{cells}", encoding.label());
    }
    println!();
}

/// Three digits, or all before the point, up to six.
fn short(value: f64) -> String {
    match value {
        v if v < 9.995 => format!("{v:.2}"),
        v if v < 99.95 => format!("{v:.1}"),
        v if v < 999_999.5 => format!("{v:.0}"),
        v => format!("{v:.1e}"),
    }
}

/// For each seed, how many times its perplexity at the first length the one at the last is; `None` where an encoding
/// refused the last.
fn growths(runs: &[Run], encoding: EncodingName) -> Option<Vec<f64>> {
    let runs = runs.iter().filter(|run| run.encoding == encoding);
    runs.map(|run| match run.found[..] {
        [Some(first), .., Some(last)] => Some(last.whole / first.whole),
        _ => None,
    })
    .collect()
}

/// In words, for each encoding, whether the effect is there.
fn verdicts(runs: &[Run], options: &Options) -> Vec<String> {
    let reach = options.reach.checked_ilog2().map_or(1, |log| 1usize << log);
    let growth = |encoding| {
        let growths = growths(runs, encoding)?;
        spread(&growths).map(|(mean, ..)| (growths, short(mean)))
    };
    let rope = growth(EncodingName::Rope);
    let mut lines = Vec::new();
    for encoding in &options.encodings {
        let label = encoding.label();
        let Some((growths, mean)) = growth(*encoding) else {
            let mut runs = runs.iter().filter(|run| run.encoding == *encoding);
            lines.push(match runs.all(Run::trained) {
                true => format!("{label} cannot read {reach}× its training length."),
                false => format!("{label} could not be trained in every seed."),
            });
            continue;
        };
        match &rope {
            _ if *encoding == EncodingName::Rope => {}
            None => lines.push(format!(
                "{label}'s perplexity at {reach}× is {mean} times that at 1×."
            )),
            Some((rope, rope_mean)) => {
                let verdict = match effect_is_there(rope, &growths) {
                    true => "the effect is there",
                    false => "the effect is absent in this run",
                };
                lines.push(format!("RoPE's perplexity at {reach}× is {rope_mean} times that at 1×, {label}'s {mean} times: {verdict}."));
            }
        }
    }
    if rope.is_some() && options.encodings.len() > 1 {
        lines.push(format!("(Criterion: in every seed RoPE's grows at least {GROWTH} times, and the other's at most {SMALLER} times as much.)"));
    }
    lines
}

/// Growths by seed of RoPE and of another encoding.
fn effect_is_there(rope: &[f64], other: &[f64]) -> bool {
    let seed = |(rope, other): (&f64, &f64)| *rope >= GROWTH && *other <= SMALLER * rope;
    rope.len() == other.len() && rope.iter().zip(other).all(seed)
}

fn save_csv(runs: &[Run], options: &Options, lengths: &[usize], path: &Path) -> Result<()> {
    let header = [
        "encoding",
        "seed",
        "context",
        "training_lengths",
        "windows",
        "perplexity",
        "perplexity_last_quarter",
    ];
    let rows = runs.iter().flat_map(|run| {
        let found = lengths.iter().zip(&run.found);
        found.filter_map(move |(length, found)| {
            let found = found.as_ref()?;
            Some(vec![
                run.encoding.label().to_string(),
                run.seed.to_string(),
                length.to_string(),
                (length / options.length).to_string(),
                found.windows.to_string(),
                found.whole.to_string(),
                found.last_quarter.to_string(),
            ])
        })
    });
    write_csv(path, &header, rows)
}

fn picture(runs: &[Run], options: &Options, lengths: &[usize], text: &str) -> Lines {
    let &Options {
        layers,
        width,
        length,
        batch,
        steps,
        ..
    } = options;
    let series = |encoding: &EncodingName| {
        let points: Vec<Point> = lengths
            .iter()
            .enumerate()
            .filter_map(|(n, length)| {
                let (y, low, high) = spread(&of_seeds(runs, *encoding, n)?)?;
                let x = *length as f64;
                y.is_finite().then_some(Point { x, y, low, high })
            })
            .collect();
        let last = points.last().map_or(f64::NAN, |point| point.y);
        Series {
            name: format!("{} {}", encoding.label(), short(last)),
            points,
        }
    };
    let seeds = match options.seeds[..] {
        [seed] => format!("seed {seed}"),
        _ => format!("{} seeds: mean and range", options.seeds.len()),
    };
    Lines {
        title: format!("Perplexity beyond the training length of {length} bytes"),
        notes: vec![
            format!("Byte-level LLaMA, {layers} layers, width {width}; {steps} steps of {batch} × {length} bytes for each encoding; {seeds}."),
            format!("Held-out text, the same bytes at every length; text {text}."),
        ],
        x_label: "context, bytes (in training lengths)".into(),
        y_label: "perplexity per byte, lower is better".into(),
        x_ticks: lengths
            .iter()
            .step_by(lengths.len().div_ceil(MOST_TICKS))
            .map(|l| (*l as f64, format!("{l} ({}×)", l / length)))
            .collect(),
        series: options.encodings.iter().map(series).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(words: &[&str]) -> Options {
        Options::parse_from([&["compare_encodings"], words].concat())
    }

    fn made(encoding: EncodingName, seed: u64, values: &[f64]) -> Run {
        let perplexity = |whole: &f64| Perplexity {
            windows: 1,
            whole: *whole,
            last_quarter: *whole,
        };
        Run {
            encoding,
            seed,
            found: values.iter().map(|value| Some(perplexity(value))).collect(),
        }
    }

    #[test]
    fn effect_is_told_only_where_every_seed_shows_it() {
        assert!(effect_is_there(&[6., 4.], &[1.5, 2.]));
        assert!(!effect_is_there(&[6., 4.], &[1.5, 2.1]));
        assert!(!effect_is_there(&[1.4], &[0.5]));
        assert!(!effect_is_there(&[6.], &[]));
        assert!(!effect_is_there(&[f64::NAN], &[1.]));
        assert!(!effect_is_there(&[6.], &[f64::NAN]));
    }

    #[test]
    fn verdicts_say_both_growths_and_whether_the_effect_is_there() {
        use EncodingName::{Alibi, Learned, Rope, Tapa};
        let options = options(&["--encodings", "rope", "tapa", "alibi", "learned"]);
        let mut learned = made(Learned, 0, &[2., 3.]);
        learned.found[1] = None;
        let runs = [
            made(Rope, 0, &[2., 3., 12.]),
            made(Tapa, 0, &[3., 3., 12.]),
            made(Alibi, 0, &[2., 2., 1.9]),
            learned,
        ];
        let lines = verdicts(&runs, &options);
        assert_eq!(
            lines[..3],
            [
                "RoPE's perplexity at 8× is 6.00 times that at 1×, TAPA's 4.00 times: the effect is absent in this run.",
                "RoPE's perplexity at 8× is 6.00 times that at 1×, ALiBi's 0.95 times: the effect is there.",
                "learned cannot read 8× its training length.",
            ]
        );
        assert!(lines[3].contains("1.5") && lines[3].contains("0.5"));
    }

    #[test]
    fn encoding_that_failed_in_one_seed_has_no_mean_and_leaves_the_others_theirs() {
        use EncodingName::{Alibi, Rope};
        let options = options(&["--encodings", "rope", "alibi", "--seeds", "0", "1"]);
        let mut diverged = made(Rope, 1, &[0., 0.]);
        diverged.found = vec![None; 2];
        let alibi = [0, 1].map(|seed| made(Alibi, seed, &[2., 3.]));
        let runs = [&[made(Rope, 0, &[2., 9.]), diverged][..], &alibi].concat();
        assert_eq!(of_seeds(&runs, Rope, 1), None);
        assert_eq!(of_seeds(&runs, Alibi, 1), Some(vec![3., 3.]));
        assert_eq!(
            verdicts(&runs, &options),
            [
                "RoPE could not be trained in every seed.",
                "ALiBi's perplexity at 8× is 1.50 times that at 1×."
            ]
        );
    }

    #[test]
    fn run_in_which_nothing_trains_is_an_error_and_leaves_no_file() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let png = folder.path().join("lengths.png").display().to_string();
        let words = [
            "--toy",
            "--lr",
            "1e30",
            "--encodings",
            "rope",
            "nope",
            "--png",
            &png,
        ];
        let error = message(&run(&options(&words)).unwrap_err());
        assert!(error.contains("learning rate"), "{error}");
        assert!(!Path::new(&png).exists());
        Ok(())
    }

    #[test]
    fn options_that_do_not_fit_are_refused_in_one_line() {
        for (words, told) in [
            (&["--reach", "1"][..], "--reach"),
            (&["--reach", "100000"], "--reach"),
            (&["--heads", "3"], "--heads"),
            (&["--width", "12", "--heads", "4"], "--width"),
            (&["--steps", "0"], "--steps"),
            (&["--length", "3"], "--length"),
            (&["--lr", "nan"], "--lr"),
            (&["--width", "1000000"], "--width"),
            (&["--batch", "100000000"], "--batch"),
            (&["--encodings", "rope", "rope"], "RoPE twice"),
            (&["--seeds", "1", "2", "1"], "1 twice"),
            (&["--png", "no such folder/x.png"], "no such folder"),
            (&["--png", "x.txt"], ".png"),
            (&["--csv", "."], "."),
            (&["--device", "cuda:99999"], "--device cuda:99999"),
            (&["--text", "no such file"], "no such file"),
            (&["--length", "32768", "--reach", "64"], "--reach 64"),
        ] {
            let error = message(&run(&options(words)).unwrap_err());
            assert!(
                error.contains(told) && error.lines().count() == 1,
                "{words:?}: {error}"
            );
        }
    }

    #[test]
    fn run_toy_writes_a_line_for_each_encoding_seed_and_length() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let path = |name: &str| folder.path().join(name).display().to_string();
        let (csv, png) = (path("lengths.csv"), path("lengths.png"));
        let words = [
            "--toy",
            "--steps",
            "3",
            "--encodings",
            "rope",
            "learned",
            "--seeds",
            "4",
            "7",
        ];
        run(&options(
            &[&words[..], &["--csv", &csv, "--png", &png]].concat(),
        ))?;
        let table = std::fs::read_to_string(csv)?;
        // The learned table ends at the training length.
        assert_eq!(table.lines().count(), 1 + 2 * (4 + 1), "{table}");
        assert!(std::fs::metadata(png)?.len() > 10_000);
        Ok(())
    }
}
