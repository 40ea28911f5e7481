//! How much an encoding prefers near keys to far ones, whatever the tokens say.
//!
//! Appendix I of the TAPA paper (Wang et al., arXiv 2509.12635) takes the score of a query and a key at a near distance
//! (0 to 100 tokens) less their score at a far one (10,000 to 10,100), over 10,000 random pairs, and finds about +4 for
//! RoPE and about 0 for TAPA. Here a pair is one query and one key, placed at both distances, so that the difference is
//! the position's doing alone.
//!
//! # Which queries and keys
//! Coordinates are standard normal, and each coordinate of the key has the correlation ρ with the query's. Independent
//! ones (ρ = 0) give a mean of 0 for every encoding here, since all their scores have the mean 0. With ρ > 0, a key that
//! fits its query, RoPE's mean score at distance d is ρ·(2/√D)·Σ_j cos(d·ω_j): large near, small far, and the mean
//! difference is proportional to ρ. We do not know which distribution the paper drew from; the default ρ = 0.75 is the one
//! at which RoPE with LLaMA 3's head (128 wide, θ = 500,000) shows the paper's +4.
//!
//! TAPA as the paper writes it has no preference at any ρ: its phases are spread over many turns, and their cosines
//! average out. Where [`PhaseNorm`] holds the phases to a part of a turn, they do not, and with ρ the preference returns.
//!
//! With `--model` the queries and keys are those that a trained model makes of a text, in all its layers and heads: an
//! encoding around the model's own, [`Recorder`], keeps them. A pair is then any token and one before it.
//!
//! ```text
//! cargo run --release --example distance_bias -- --png bias.png --csv bias.csv
//! cargo run --release --example distance_bias -- --correlation 0
//! cargo run --release --example distance_bias -- --model rope tapa --text book.txt
//! ```

mod common;

use candle_core::{bail, DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use candle_posenc::encoding::{PhaseNorm, RopeConfig, TapaConfig};
use candle_posenc::hf::ModelFolder;
use candle_posenc::{
    attend_with_lse, AttendSpec, Ctx, Encoding, EncodingConfig, Llama, ModelDims, PosState,
    Positions, Qkv, Score,
};
use clap::Parser;
use common::codec::Codec;
use common::device::DeviceName;
use common::plot::{self, Histograms, Panel};
use common::table::write_csv;
use common::text::{check_writable, Text};
use rand::rngs::ChaCha12Rng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

/// Distances in tokens, those of the paper.
const NEAR: RangeInclusive<i64> = 0..=100;
const FAR: RangeInclusive<i64> = 10_000..=10_100;
/// Pairs scored in one call.
const AT_ONCE: usize = 4096;
const MOST_PAIRS: usize = 10_000_000;
const MOST_WIDTH: usize = 4096;
/// Tokens of the text that a model reads, at most.
const MODEL_TEXT: usize = 1024;
const BINS: usize = 90;
const QUANTILES: [f64; 5] = [0.05, 0.25, 0.5, 0.75, 0.95];

/// Measure how much RoPE and TAPA prefer a near key to a far one: the same query and key, scored at a distance of 0 to
/// 100 tokens and at one of 10,000 to 10,100 (TAPA paper, appendix I).
#[derive(Parser)]
#[command(name = "distance_bias")]
struct Options {
    /// Pairs of a query and a key
    #[arg(
        long,
        value_name = "N",
        default_value_t = 10_000,
        default_value_if("toy", "true", "500")
    )]
    pairs: usize,

    /// Folders of trained models to take queries and keys from, in place of random ones
    #[arg(long, value_name = "DIR", num_args = 1.., conflicts_with_all = ["correlation", "head_dim", "theta"])]
    model: Vec<PathBuf>,

    /// Files that the models read, joined; without any, a made text
    #[arg(long, value_name = "FILE", num_args = 1.., requires = "model")]
    text: Vec<PathBuf>,

    /// Correlation of the query's and the key's coordinates, -1 to 1; all are standard normal. 0: independent, and then
    /// no encoding has a bias. 0.75: RoPE shows the paper's +4
    #[arg(
        long,
        value_name = "R",
        default_value_t = 0.75,
        allow_negative_numbers = true
    )]
    correlation: f64,

    /// Width of a head; LLaMA 3's by default
    #[arg(long, value_name = "N", default_value_t = 128)]
    head_dim: usize,

    /// RoPE's base; LLaMA 3's by default
    #[arg(long, value_name = "X", default_value_t = 500_000.)]
    theta: f64,

    /// Seed of queries, keys and distances
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// What to compute on: cpu, cuda, or cuda:N for the GPU of number N; GPUs need a build with --features cuda
    #[arg(long, value_name = "NAME", default_value_t)]
    device: DeviceName,

    /// File to write every pair's scores to
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,

    /// File to draw the histograms to
    #[arg(long, value_name = "FILE")]
    png: Option<PathBuf>,

    /// 500 pairs
    #[arg(long)]
    toy: bool,
}

fn main() -> ExitCode {
    common::conclude("distance_bias", run(&Options::parse()))
}

fn run(options: &Options) -> Result<()> {
    check(options)?;
    let device = options.device.open()?;
    println!(
        "pairs      {}, each placed {} to {} and {} to {} tokens apart",
        options.pairs,
        NEAR.start(),
        NEAR.end(),
        FAR.start(),
        FAR.end()
    );
    println!("q and k    {}", source(options));
    println!("difference near score less far score: above 0, the encoding prefers what is near\n");

    let mut found = Vec::new();
    if options.model.is_empty() {
        for (name, config) in encodings(options.theta) {
            found.push((name.to_string(), measure(&config, options, &device)?));
        }
    }
    for folder in &options.model {
        let name = folder.display().to_string();
        found.push((name, measure_model(folder, options, &device)?));
    }
    print_table(&found);
    println!();
    for (name, differences) in &found {
        println!("{}", in_words(name, differences));
    }
    if let Some(path) = &options.csv {
        save_csv(&found, path)?;
        println!("\nscores     {}", path.display());
    }
    if let Some(path) = &options.png {
        histograms(&found, options).draw(path)?;
        println!("picture    {}", path.display());
    }
    Ok(())
}

/// Where queries and keys are from.
fn source(options: &Options) -> String {
    let Options {
        correlation,
        head_dim,
        ..
    } = options;
    match options.model.is_empty() {
        true => format!("standard normal, {head_dim} wide, correlation {correlation} of a query's coordinates with its key's"),
        false => "a trained model's, of a token and one before it, all layers and heads".into(),
    }
}

fn check(options: &Options) -> Result<()> {
    let &Options {
        pairs,
        correlation,
        head_dim,
        theta,
        ..
    } = options;
    if !(theta > 1. && theta.is_finite()) {
        bail!("--theta must be above 1, got {theta}")
    }
    if !(2..=MOST_PAIRS).contains(&pairs) {
        bail!("--pairs must be 2 to {MOST_PAIRS}, got {pairs}")
    }
    if !(-1. ..=1.).contains(&correlation) {
        bail!("--correlation must be -1 to 1, got {correlation}")
    }
    if !(4..=MOST_WIDTH).contains(&head_dim) || head_dim % 2 != 0 {
        bail!("--head-dim must be an even number of 4 to {MOST_WIDTH}, got {head_dim}")
    }
    // Before measuring: a file that cannot be written should not cost the results.
    options.csv.as_deref().map_or(Ok(()), check_writable)?;
    options.png.as_deref().map_or(Ok(()), plot::check_path)
}

/// What is measured, by name.
fn encodings(theta: f64) -> [(&'static str, EncodingConfig); 3] {
    let rope = RopeConfig {
        theta,
        ..RopeConfig::default()
    };
    let normalised = TapaConfig {
        phase_norm: Some(PhaseNorm::default()),
        ..TapaConfig::default()
    };
    [
        ("RoPE", EncodingConfig::Rope(rope)),
        ("TAPA", EncodingConfig::Tapa(TapaConfig::default())),
        ("TAPA, phase norm 0.3", EncodingConfig::Tapa(normalised)),
    ]
}

/// One pair at both distances.
#[derive(Debug, Clone, Copy)]
struct Scores {
    /// Which tokens and distances were drawn: a model's heads share them.
    draw: usize,
    near_distance: i64,
    far_distance: i64,
    near: f64,
    far: f64,
}

impl Scores {
    fn difference(&self) -> f64 {
        self.near - self.far
    }
}

/// The scores of `options.pairs` pairs, the same pairs and distances for every encoding.
fn measure(config: &EncodingConfig, options: &Options, device: &Device) -> Result<Vec<Scores>> {
    let dims = ModelDims {
        width: options.head_dim,
        heads: 1,
        kv_heads: 1,
        head_dim: options.head_dim,
        layers: 1,
        max_positions: *FAR.end() as usize + 1,
    };
    let encoding = config.build(&dims, VarBuilder::zeros(DType::F32, device))?;
    let mut rng = ChaCha12Rng::seed_from_u64(options.seed);
    let mut found = Vec::with_capacity(options.pairs);
    while found.len() < options.pairs {
        let count = AT_ONCE.min(options.pairs - found.len());
        let (q, k) = draw_pairs(count, options, &mut rng, device)?;
        let mut draw = |distances: &RangeInclusive<i64>| -> Vec<i64> {
            (0..count)
                .map(|_| rng.random_range(distances.clone()))
                .collect()
        };
        let (near, far) = (draw(&NEAR), draw(&FAR));
        let near_scores = scores(&*encoding, 0, &q, &k, &near)?;
        let far_scores = scores(&*encoding, 0, &q, &k, &far)?;
        for n in 0..count {
            found.push(Scores {
                draw: found.len(),
                near_distance: near[n],
                far_distance: far[n],
                near: near_scores[n],
                far: far_scores[n],
            });
        }
    }
    Ok(found)
}

/// Queries and keys.
///
/// # Shapes
/// Both (N, 1, 1, D).
fn draw_pairs(
    count: usize,
    options: &Options,
    rng: &mut ChaCha12Rng,
    device: &Device,
) -> Result<(Tensor, Tensor)> {
    let rho = options.correlation;
    let own = (1. - rho * rho).sqrt();
    let mut normal = || -> f64 { StandardNormal.sample(rng) };
    let (mut q, mut k) = (Vec::new(), Vec::new());
    for _ in 0..count * options.head_dim {
        let shared = normal();
        q.push(shared as f32);
        k.push((rho * shared + own * normal()) as f32);
    }
    let shape = (count, 1, 1, options.head_dim);
    Ok((
        Tensor::from_vec(q, shape, device)?,
        Tensor::from_vec(k, shape, device)?,
    ))
}

/// The score of each query with its key, so many tokens before it: the log-sum-exp of attention to that key alone.
///
/// # Shapes
/// q (N, H, 1, D), k (N, G, 1, D), distances (N) → N·H, a query's heads one behind another.
fn scores(
    encoding: &dyn Encoding,
    layer: usize,
    q: &Tensor,
    k: &Tensor,
    distances: &[i64],
) -> Result<Vec<f64>> {
    let (n, device) = (distances.len(), q.device());
    // Two tokens in a row: the key at 0, and the query behind it.
    let places: Vec<i64> = distances
        .iter()
        .flat_map(|distance| [0, *distance])
        .collect();
    let places = Tensor::from_vec(places, (n, 2), device)?;
    let positions = Positions::explicit(places.clone(), None)?;
    let x = Tensor::zeros((n, 2, 1), q.dtype(), device)?;
    // Near and far in one long text, where scalings go by the length.
    let mut ctx = Ctx {
        planned_len: Some(*FAR.end() as usize + 1),
        ..Ctx::default()
    };
    let state = encoding.begin(&x, &positions, &mut ctx)?;
    let both = |head: &Tensor| Tensor::cat(&[head, head], 2);
    let qkv = Qkv {
        q: both(q)?,
        k: both(k)?,
        v: both(k)?,
    };
    let Qkv { q, k, v } = encoding.encode(layer, qkv, &state)?;
    let at = |token| Positions::explicit(places.narrow(1, token, 1)?, None);
    let spec = AttendSpec::causal()
        .with_score(encoding.score(layer))
        .with_positions(at(1)?, at(0)?);
    let key = |head: &Tensor| head.narrow(2, 0, 1);
    let output = attend_with_lse(&q.narrow(2, 1, 1)?, &key(&k)?, &key(&v)?, &spec)?;
    output.lse.flatten_all()?.to_dtype(DType::F64)?.to_vec1()
}

/// The scores of queries and keys that a model makes of the text.
fn measure_model(folder: &Path, options: &Options, device: &Device) -> Result<Vec<Scores>> {
    let folder = ModelFolder::open(folder)?;
    let config = folder.config();
    if let EncodingConfig::Tape(_) = config.encoding {
        bail!(
            "{}: TAPE's states change with the tokens between a query and a key, so a pair cannot be placed elsewhere",
            folder.path().display()
        )
    }
    let codec = Codec::open(folder.tokenizer().as_deref(), config.vocab_size)?;
    let text = Text::open(&options.text, MODEL_TEXT)?;
    let text = codec.encode(&String::from_utf8_lossy(&text.held_out))?;
    let length = text
        .len()
        .min(MODEL_TEXT)
        .min(config.max_position_embeddings);
    if length == 0 {
        bail!(
            "{}: its tokenizer makes no token of the text",
            folder.path().display()
        )
    }
    let tokens = Tensor::new(&text[..length], device)?.unsqueeze(0)?;

    let vb = folder.builder(DType::F32, device);
    let recorder = Arc::new(Recorder {
        own: config.encoding.build(&config.dims(), vb.pp("model"))?,
        seen: Mutex::default(),
    });
    let model = Llama::with_encoding(config, recorder.clone(), vb)?;
    model.hidden_at(
        &tokens,
        &Positions::first(length),
        None,
        &mut Ctx::default(),
    )?;

    let seen = recorder.take();
    let heads = config.num_attention_heads;
    // Two at least, to know how much draws differ.
    let of_a_layer = options.pairs.div_ceil(heads * seen.len().max(1)).max(2);
    let mut rng = ChaCha12Rng::seed_from_u64(options.seed);
    let mut found = Vec::new();
    for (layer, q, k) in seen {
        let queries: Vec<u32> = (0..of_a_layer)
            .map(|_| rng.random_range(0..length as u32))
            .collect();
        let keys: Vec<u32> = queries
            .iter()
            .map(|query| rng.random_range(0..=*query))
            .collect();
        // (1, heads, T, D) → (N, heads, 1, D)
        let choose = |head: &Tensor, tokens: Vec<u32>| -> Result<Tensor> {
            head.contiguous()?
                .index_select(&Tensor::new(tokens, device)?, 2)?
                .transpose(0, 2)
        };
        let (q, k) = (choose(&q, queries)?, choose(&k, keys)?);
        let mut draw = |distances: &RangeInclusive<i64>| -> Vec<i64> {
            (0..of_a_layer)
                .map(|_| rng.random_range(distances.clone()))
                .collect()
        };
        let (near, far) = (draw(&NEAR), draw(&FAR));
        let near_scores = scores(&*recorder.own, layer, &q, &k, &near)?;
        let far_scores = scores(&*recorder.own, layer, &q, &k, &far)?;
        for (n, (score, far_score)) in near_scores.into_iter().zip(far_scores).enumerate() {
            found.push(Scores {
                draw: layer * of_a_layer + n / heads,
                near_distance: near[n / heads],
                far_distance: far[n / heads],
                near: score,
                far: far_score,
            });
        }
    }
    Ok(evenly(&found, options.pairs))
}

/// As many as are wanted of those found, at even distances, so that no layer is left out.
fn evenly<T: Copy>(found: &[T], wanted: usize) -> Vec<T> {
    let wanted = wanted.min(found.len());
    (0..wanted)
        .map(|n| found[n * found.len() / wanted])
        .collect()
}

/// A model's own encoding, keeping the queries and keys that it is given.
struct Recorder {
    own: Arc<dyn Encoding>,
    seen: Mutex<Vec<(usize, Tensor, Tensor)>>,
}

impl Recorder {
    fn take(&self) -> Vec<(usize, Tensor, Tensor)> {
        std::mem::take(&mut *self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Encoding for Recorder {
    fn config(&self) -> EncodingConfig {
        self.own.config()
    }

    fn embed(&self, x: &Tensor, positions: &Positions) -> Result<Tensor> {
        self.own.embed(x, positions)
    }

    fn begin(&self, x: &Tensor, positions: &Positions, ctx: &mut Ctx) -> Result<PosState> {
        self.own.begin(x, positions, ctx)
    }

    fn encode(&self, layer: usize, qkv: Qkv, state: &PosState) -> Result<Qkv> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.push((layer, qkv.q.clone(), qkv.k.clone()));
        self.own.encode(layer, qkv, state)
    }

    fn score(&self, layer: usize) -> Score {
        self.own.score(layer)
    }

    fn updates(&self, layer: usize) -> bool {
        self.own.updates(layer)
    }

    fn update(
        &self,
        layer: usize,
        state: PosState,
        carried: Option<&Tensor>,
        mlp_out: &Tensor,
    ) -> Result<PosState> {
        self.own.update(layer, state, carried, mlp_out)
    }
}

/// What is told of a sample of differences.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Summary {
    mean: f64,
    deviation: f64,
    /// Deviation of the mean, over draws: what heads make of the same tokens is not independent.
    error: f64,
}

impl Summary {
    fn of(found: &[Scores]) -> Self {
        let n = found.len() as f64;
        let mean = found.iter().map(Scores::difference).sum::<f64>() / n;
        let squares = found.iter().map(|s| (s.difference() - mean).powi(2));
        let deviation = (squares.sum::<f64>() / (n - 1.).max(1.)).sqrt();
        let mut of_draws = BTreeMap::<usize, f64>::new();
        for s in found {
            *of_draws.entry(s.draw).or_default() += s.difference() - mean;
        }
        let draws = of_draws.len() as f64;
        let squares: f64 = of_draws.values().map(|sum| sum.powi(2)).sum();
        Self {
            mean,
            deviation,
            error: (squares * draws / (draws - 1.).max(1.)).sqrt() / n,
        }
    }
}

fn sorted(found: &[Scores]) -> Vec<f64> {
    let mut differences: Vec<f64> = found.iter().map(Scores::difference).collect();
    differences.sort_by(f64::total_cmp);
    differences
}

/// The value below which this share of the sorted values lies, between its neighbours in proportion.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let place = share * sorted.len().saturating_sub(1) as f64;
    let at = |n: usize| sorted.get(n).copied().unwrap_or(f64::NAN);
    let (below, above) = (at(place.floor() as usize), at(place.ceil() as usize));
    below + (above - below) * place.fract()
}

fn print_table(found: &[(String, Vec<Scores>)]) {
    let shares: String = QUANTILES
        .iter()
        .map(|share| format!("{:>8}", format!("{:.0} %", share * 100.)))
        .collect();
    println!(
        "{:<22}{:>8}  {:>8}{shares}",
        "difference", "mean", "deviation"
    );
    for (name, differences) in found {
        let Summary {
            mean, deviation, ..
        } = Summary::of(differences);
        let differences = sorted(differences);
        let values: String = QUANTILES
            .iter()
            .map(|share| format!("{:>+8.2}", quantile(&differences, *share)))
            .collect();
        println!("{name:<22}{mean:>+8.2}  {deviation:>9.2}{values}");
    }
}

/// Whether there is a bias: a mean beyond three of its own deviations.
fn in_words(name: &str, found: &[Scores]) -> String {
    let Summary { mean, error, .. } = Summary::of(found);
    let verdict = match mean / error {
        z if z > 3. => "it prefers what is near",
        z if z < -3. => "it prefers what is far",
        _ => "no preference to be seen",
    };
    format!("{name}: mean {mean:+.2}, known to ±{error:.2}: {verdict}.")
}

fn save_csv(found: &[(String, Vec<Scores>)], path: &Path) -> Result<()> {
    let header = [
        "encoding",
        "near_distance",
        "far_distance",
        "near_score",
        "far_score",
    ];
    let rows = found.iter().flat_map(|(name, pairs)| {
        pairs.iter().map(move |s| {
            vec![
                name.to_string(),
                s.near_distance.to_string(),
                s.far_distance.to_string(),
                s.near.to_string(),
                s.far.to_string(),
            ]
        })
    });
    write_csv(path, &header, rows)
}

fn histograms(found: &[(String, Vec<Scores>)], options: &Options) -> Histograms {
    let all: Vec<Vec<f64>> = found.iter().map(|(_, pairs)| sorted(pairs)).collect();
    // The outermost thousandth would make the middle too narrow to see.
    let shown = |share: f64| all.iter().map(move |values| quantile(values, share));
    let low = shown(0.001).fold(0., f64::min);
    let high = shown(0.999).fold(0., f64::max);
    let width = (high - low).max(1e-6) / BINS as f64;
    let edges: Vec<f64> = (0..=BINS).map(|n| low + width * n as f64).collect();
    let panel = |(name, pairs): &(String, Vec<Scores>)| {
        let mut counts = vec![0; BINS];
        for pair in pairs {
            let bin = ((pair.difference() - low) / width).floor();
            if (0. ..BINS as f64).contains(&bin) {
                counts[bin as usize] += 1;
            }
        }
        let Summary {
            mean, deviation, ..
        } = Summary::of(pairs);
        let signed = format!("{mean:+.2}").replace('-', "−");
        Panel {
            name: format!("{name}\nmean {signed}, deviation {deviation:.2}"),
            counts,
            mean,
        }
    };
    Histograms {
        title: "Does the score prefer a near key to a far one, whatever the tokens say?".into(),
        notes: vec![
            format!(
                "Score at {} to {} tokens less score at {} to {} of the same query and key; {} pairs; black: the mean.",
                NEAR.start(),
                NEAR.end(),
                FAR.start(),
                FAR.end(),
                options.pairs
            ),
            match options.model.is_empty() {
                true => format!("q and k {}; RoPE's base {}; TAPA's α 0.1, θ 0.5.", source(options), options.theta),
                false => format!("q and k {}.", source(options)),
            },
        ],
        x_label: "near score − far score (before softmax; right of 0 the near key wins)".into(),
        edges,
        panels: found.iter().map(panel).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_posenc::encoding::RopeScaling;
    use candle_posenc::hf::{self, SaveOptions};
    use candle_posenc::{LlamaConfig, SeededVars};
    use common::message;
    use std::f64::consts::PI;

    fn options(words: &[&str]) -> Options {
        Options::parse_from([&["distance_bias"], words].concat())
    }

    #[test]
    fn scores_of_pairs_are_the_formulas_of_the_papers() -> Result<()> {
        let (q, k) = ([1., -2., 0.5, 3.], [0.5, 1., -1., 2.]);
        let distance = 7.;
        let device = Device::Cpu;
        let tensor = |head: [f64; 4]| Tensor::new(&head, &device)?.reshape((1, 1, 1, 4));
        let dims = ModelDims {
            width: 4,
            heads: 1,
            kv_heads: 1,
            head_dim: 4,
            layers: 1,
            max_positions: 100,
        };
        // Pairs (0, 2) and (1, 3) turn by 1 and 1/√100 radians a token.
        let turned = |a: usize, b: usize, angle: f64| {
            (q[a] * k[a] + q[b] * k[b]) * angle.cos() + (q[a] * k[b] - q[b] * k[a]) * angle.sin()
        };
        let rope = (turned(0, 2, distance) + turned(1, 3, distance / 10.)) / 2.;
        let (amplitude, phase) = (
            (q[0] * k[0] + q[1] * k[1]) / 2f64.sqrt(),
            (q[2] * k[2] + q[3] * k[3]) / 2f64.sqrt(),
        );
        let tapa = amplitude * (2. * PI * distance.powf(0.1) * phase).cos();
        for ((name, config), expected) in encodings(100.).into_iter().zip([rope, tapa]) {
            let encoding = config.build(&dims, VarBuilder::zeros(DType::F64, &device))?;
            let found = scores(&*encoding, 0, &tensor(q)?, &tensor(k)?, &[distance as i64])?;
            assert!(
                (found[0] - expected).abs() < 1e-12,
                "{name}: {} for {expected}",
                found[0]
            );
        }
        Ok(())
    }

    #[test]
    fn mean_of_rope_is_proportional_to_the_correlation_and_of_tapa_near_0() -> Result<()> {
        for (rho, expected) in [("0", 0.), ("0.5", 2.75), ("-0.5", -2.75)] {
            let options = options(&["--correlation", rho, "--pairs", "4000"]);
            for (name, config) in encodings(options.theta).into_iter().take(2) {
                let found = Summary::of(&measure(&config, &options, &Device::Cpu)?);
                let expected = if name == "RoPE" { expected } else { 0. };
                let bound = 4. * found.error;
                assert!(
                    (found.mean - expected).abs() < bound,
                    "{name} at {rho}: {found:?}"
                );
            }
        }
        Ok(())
    }

    #[test]
    fn scores_with_a_scaling_by_length_have_the_frequencies_of_one_text() -> Result<()> {
        let dims = ModelDims {
            width: 8,
            heads: 1,
            kv_heads: 1,
            head_dim: 8,
            layers: 1,
            max_positions: 1000,
        };
        let rope = RopeConfig {
            scaling: RopeScaling::Dynamic { factor: 2. },
            ..RopeConfig::default()
        };
        let head = Tensor::new(&[1f64, -2., 0.5, 3., 1., 1., -1., 2.], &Device::Cpu)?;
        let head = head.reshape((1, 1, 1, 8))?;
        let encoding = EncodingConfig::Rope(rope.clone())
            .build(&dims, VarBuilder::zeros(DType::F64, &Device::Cpu))?;
        let found = scores(&*encoding, 0, &head, &head, &[50])?[0];
        let turns = rope.frequencies(8, 1000, Some(10_101))?.inv_freq;
        let squares = [2., 5., 1.25, 13.];
        let sum: f64 = (squares.iter().zip(turns))
            .map(|(square, w)| square * (50. * w).cos())
            .sum();
        let expected = sum / 8f64.sqrt();
        assert!((found - expected).abs() < 1e-5, "{found} for {expected}");
        Ok(())
    }

    #[test]
    fn error_of_the_mean_counts_draws_and_not_heads() {
        let pair = |draw: usize, near: f64| Scores {
            draw,
            near_distance: 0,
            far_distance: 10_000,
            near,
            far: 0.,
        };
        let alone: Vec<Scores> = (0..4).map(|n| pair(n, n as f64)).collect();
        let found = Summary::of(&alone);
        assert!((found.error - found.deviation / 2.).abs() < 1e-12);
        // Eight heads that say the same know no more than one.
        let heads: Vec<Scores> = alone.iter().flat_map(|s| [*s; 8]).collect();
        assert!((Summary::of(&heads).error - found.error).abs() < 1e-12);
    }

    #[test]
    fn evenly_leaves_no_part_out() {
        assert_eq!(evenly(&[0, 1, 2, 3, 4, 5, 6, 7], 3), [0, 2, 5]);
        assert_eq!(evenly(&[0, 1], 5), [0, 1]);
        assert!(evenly::<usize>(&[], 5).is_empty());
    }

    #[test]
    fn quantiles_lie_between_neighbours_in_proportion() {
        let values = [0., 10., 20., 40.];
        assert_eq!(
            [0., 0.5, 0.9, 1.].map(|share| quantile(&values, share)),
            [0., 15., 34., 40.]
        );
    }

    #[test]
    fn options_out_of_range_are_refused_in_one_line() {
        for (words, told) in [
            (["--pairs", "1"], "--pairs"),
            (["--pairs", "99999999999"], "--pairs"),
            (["--correlation", "1.1"], "--correlation"),
            (["--correlation", "nan"], "--correlation"),
            (["--head-dim", "7"], "--head-dim"),
            (["--head-dim", "2"], "--head-dim"),
            (["--theta", "1"], "--theta"),
            (["--png", "x.txt"], ".png"),
            (["--csv", "."], "."),
            (["--device", "cuda:99999"], "--device cuda:99999"),
        ] {
            let error = message(&run(&options(&words)).unwrap_err());
            assert!(
                error.contains(told) && error.lines().count() == 1,
                "{words:?}: {error}"
            );
        }
    }

    #[test]
    fn measure_model_of_two_encodings_tells_them_apart() -> Result<()> {
        let rope = EncodingConfig::Rope(RopeConfig::default());
        for (encoding, biased) in [(rope, true), (EncodingConfig::Nope, false)] {
            let folder = tempfile::tempdir()?;
            let config = LlamaConfig {
                hidden_size: 32,
                intermediate_size: 32,
                num_hidden_layers: 2,
                num_attention_heads: 2,
                num_key_value_heads: 1,
                encoding,
                ..LlamaConfig::default()
            };
            let vars = SeededVars::new(0);
            Llama::new(&config, vars.builder(DType::F32, &Device::Cpu))?;
            hf::save(folder.path(), &config, &vars, &SaveOptions::default())?;
            let options = options(&["--pairs", "101"]);
            let found = measure_model(folder.path(), &options, &Device::Cpu)?;
            assert_eq!(found.len(), 101);
            assert_eq!(found.iter().any(|s| s.difference() != 0.), biased);
        }
        Ok(())
    }

    #[test]
    fn run_toy_writes_a_line_for_each_pair_and_a_picture() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let path = |name: &str| folder.path().join(name).display().to_string();
        let (csv, png) = (path("bias.csv"), path("bias.png"));
        run(&options(&["--toy", "--csv", &csv, "--png", &png]))?;
        assert_eq!(std::fs::read_to_string(csv)?.lines().count(), 1 + 3 * 500);
        assert!(std::fs::metadata(png)?.len() > 10_000);
        Ok(())
    }
}
