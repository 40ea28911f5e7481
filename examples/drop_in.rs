//! `attend` and `rotate` in the attention of a candle model that exists: six lines become four.
//!
//! [`Attention::forward_before`] is attention as candle's models write it, with `rotary_emb::rope`, repeated key/value
//! heads, a mask and `softmax_last_dim`. [`Attention::forward_after`] is the same with this crate. Compare the two: the
//! projections, the tables of cosines and sines and the shapes stay.
//!
//! This program checks that both give the same output, shows which weights get a gradient from each, and how long each
//! takes. Gradients are compared with those of `rope_slow` and `softmax`, candle's slow operations that have them.
//!
//! ```text
//! cargo run --release --example drop_in
//! ```

mod common;

use candle_core::backprop::GradStore;
use candle_core::{bail, DType, Device, Result, Tensor, D};
use candle_nn::{Init, Linear, Module, VarBuilder};
use candle_posenc::{attend, rotate, AttendSpec, Layout, Rotation, SeededVars};
use clap::Parser;
use common::device::DeviceName;
use std::process::ExitCode;
use std::time::Instant;

/// Attention with grouped heads and rotary embeddings.
struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// (T, D/2)
    cos: Tensor,
    sin: Tensor,
}

impl Attention {
    /// As candle's models do it today.
    fn forward_before(&self, x: &Tensor) -> Result<Tensor> {
        let (b, t, _) = x.dims3()?;
        let (q, k, v) = self.project(x)?;
        let q = candle_nn::rotary_emb::rope(&q.contiguous()?, &self.cos, &self.sin)?;
        let k = candle_nn::rotary_emb::rope(&k.contiguous()?, &self.cos, &self.sin)?;
        let (k, v) = (self.repeat(k)?, self.repeat(v)?);
        let scores = (q.matmul(&k.t()?)? / (self.head_dim as f64).sqrt())?;
        let weights = candle_nn::ops::softmax_last_dim(&masked(&scores)?)?;
        let y = weights.matmul(&v)?;
        self.o_proj
            .forward(&y.transpose(1, 2)?.reshape((b, t, ()))?)
    }

    /// With this crate.
    fn forward_after(&self, x: &Tensor) -> Result<Tensor> {
        let (b, t, _) = x.dims3()?;
        let (q, k, v) = self.project(x)?;
        let rotation = self.rotation()?;
        let q = rotate(&q, &rotation, Layout::Half)?;
        let k = rotate(&k, &rotation, Layout::Half)?;
        let y = attend(&q, &k, &v, &AttendSpec::causal())?;
        self.o_proj
            .forward(&y.transpose(1, 2)?.reshape((b, t, ()))?)
    }

    /// candle's tables (T, D/2) as ours, (1, 1, T, D/2).
    fn rotation(&self) -> Result<Rotation> {
        let table = |t: &Tensor| t.unsqueeze(0)?.unsqueeze(0);
        Ok(Rotation {
            cos: table(&self.cos)?,
            sin: table(&self.sin)?,
        })
    }

    /// As before, in candle's operations that have a gradient.
    fn forward_slow(&self, x: &Tensor) -> Result<Tensor> {
        let (b, t, _) = x.dims3()?;
        let (q, k, v) = self.project(x)?;
        let q = candle_nn::rotary_emb::rope_slow(&q.contiguous()?, &self.cos, &self.sin)?;
        let k = candle_nn::rotary_emb::rope_slow(&k.contiguous()?, &self.cos, &self.sin)?;
        let (k, v) = (self.repeat(k)?, self.repeat(v)?);
        let scores = (q.matmul(&k.t()?)? / (self.head_dim as f64).sqrt())?;
        let weights = candle_nn::ops::softmax(&masked(&scores)?, D::Minus1)?;
        let y = weights.matmul(&v)?;
        self.o_proj
            .forward(&y.transpose(1, 2)?.reshape((b, t, ()))?)
    }

    /// x (B,T,C) → q (B,H,T,D), k and v (B,G,T,D).
    fn project(&self, x: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
        let (b, t, _) = x.dims3()?;
        let heads = |proj: &Linear, count: usize| {
            proj.forward(x)?
                .reshape((b, t, count, self.head_dim))?
                .transpose(1, 2)
        };
        Ok((
            heads(&self.q_proj, self.heads)?,
            heads(&self.k_proj, self.kv_heads)?,
            heads(&self.v_proj, self.kv_heads)?,
        ))
    }

    /// (B,G,T,D) → (B,H,T,D): every key/value head once for each of its query heads.
    fn repeat(&self, x: Tensor) -> Result<Tensor> {
        let (b, g, t, d) = x.dims4()?;
        let times = self.heads / g;
        x.unsqueeze(2)?
            .broadcast_as((b, g, times, t, d))?
            .reshape((b, g * times, t, d))
    }

    fn new(options: &Options, vb: VarBuilder) -> Result<Self> {
        let &Options {
            width,
            heads,
            kv_heads,
            length,
            ..
        } = options;
        let head_dim = width / heads;
        let init = Init::Randn {
            mean: 0.,
            // Outputs with a deviation near 1, so that scores matter.
            stdev: (width as f64).powf(-0.5),
        };
        let linear = |from: usize, to: usize, name: &str| {
            let weight = vb.pp(name).get_with_hints((to, from), "weight", init)?;
            Ok::<_, candle_core::Error>(Linear::new(weight, None))
        };
        let table = |of: fn(f64) -> f64| {
            let angles = (0..length * (head_dim / 2)).map(|n| {
                let (position, pair) = (n / (head_dim / 2), n % (head_dim / 2));
                position as f64 * 10_000f64.powf(-2. * pair as f64 / head_dim as f64)
            });
            let values: Vec<f32> = angles.map(|angle| of(angle) as f32).collect();
            Tensor::from_vec(values, (length, head_dim / 2), vb.device())
        };
        Ok(Self {
            q_proj: linear(width, heads * head_dim, "q_proj")?,
            k_proj: linear(width, kv_heads * head_dim, "k_proj")?,
            v_proj: linear(width, kv_heads * head_dim, "v_proj")?,
            o_proj: linear(heads * head_dim, width, "o_proj")?,
            heads,
            kv_heads,
            head_dim,
            cos: table(f64::cos)?,
            sin: table(f64::sin)?,
        })
    }
}

/// Scores (B,H,T,T) with −∞ where a key is behind its query.
fn masked(scores: &Tensor) -> Result<Tensor> {
    let t = scores.dim(D::Minus1)?;
    let seen = Tensor::tril2(t, DType::U8, scores.device())?.broadcast_as(scores.shape())?;
    let never = Tensor::full(f32::NEG_INFINITY, scores.shape(), scores.device())?;
    seen.where_cond(scores, &never)
}

/// Put attend and rotate of this crate into the attention of a candle model, and see that the output stays and the
/// gradients arrive.
#[derive(Parser)]
#[command(name = "drop_in")]
struct Options {
    /// Windows in the batch
    #[arg(long, value_name = "N", default_value_t = 1)]
    batch: usize,

    /// Tokens in a window
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1024,
        default_value_if("toy", "true", "64")
    )]
    length: usize,

    /// Width of the model
    #[arg(
        long,
        value_name = "N",
        default_value_t = 512,
        default_value_if("toy", "true", "64")
    )]
    width: usize,

    /// Query heads; they must divide the width
    #[arg(long, value_name = "N", default_value_t = 8)]
    heads: usize,

    /// Key/value heads; they must divide the query heads
    #[arg(long, value_name = "N", default_value_t = 2)]
    kv_heads: usize,

    /// Times that each is run; the median counts
    #[arg(
        long,
        value_name = "N",
        default_value_t = 9,
        default_value_if("toy", "true", "3")
    )]
    runs: usize,

    /// Seed of weights and inputs
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// What to compute on: cpu, cuda, or cuda:N for the GPU of number N; GPUs need a build with --features cuda
    #[arg(long, value_name = "NAME", default_value_t)]
    device: DeviceName,

    /// Small sizes, done in a moment
    #[arg(long)]
    toy: bool,
}

/// Outputs are of size 1, formed in f32 in another order.
const LARGEST_DIFFERENCE: f64 = 2e-5;
const MOST_SCORES: usize = 1 << 28;

fn main() -> ExitCode {
    common::conclude("drop_in", run(&Options::parse()))
}

fn run(options: &Options) -> Result<()> {
    check(options)?;
    let &Options {
        batch,
        length,
        width,
        heads,
        kv_heads,
        runs,
        ..
    } = options;
    let device = options.device.open()?;
    let vars = SeededVars::new(options.seed);
    let vb = vars.builder(DType::F32, &device);
    let attention = Attention::new(options, vb.clone())?;
    let normal = Init::Randn {
        mean: 0.,
        stdev: 1.,
    };
    let inputs = SeededVars::new(options.seed.wrapping_add(1)).builder(DType::F32, &device);
    let x = inputs
        .get_with_hints((batch, length, width), "x", normal)?
        .detach();
    let direction = inputs
        .get_with_hints((batch, length, width), "direction", normal)?
        .detach();
    println!("attention  {batch} × {length} tokens, width {width}, {heads} query and {kv_heads} key/value heads, f32\n");

    let forward = [
        Attention::forward_before,
        Attention::forward_after,
        Attention::forward_slow,
    ];
    let outputs = forward
        .iter()
        .map(|forward| Ok(forward(&attention, &x)?.detach()))
        .collect::<Result<Vec<_>>>()?;
    let apart = difference(&outputs[0], &outputs[1])?;
    println!(
        "output     largest difference {apart:.1e}, of outputs up to {:.2}",
        largest(&outputs[0])?
    );
    if apart.is_nan() || apart > LARGEST_DIFFERENCE {
        bail!("the outputs differ by {apart:e}, more than {LARGEST_DIFFERENCE:e}")
    }

    // Any loss will do: here the output along a fixed direction.
    let gradients = |forward: Forward| -> Result<GradStore> {
        (forward(&attention, &x)? * &direction)?
            .sum_all()?
            .backward()
    };
    let [before, after, slow] = [
        gradients(forward[0])?,
        gradients(forward[1])?,
        gradients(forward[2])?,
    ];
    println!(
        "\n{:<10} {:>12} {:>12}   differs from that of candle's slow operations by",
        "gradient", "before", "after"
    );
    for (name, var) in vars.named() {
        let arrives = |grads: &GradStore| match grads.get(&var) {
            Some(_) => "arrives",
            None => "missing",
        };
        let (Some(ours), Some(expected)) = (after.get(&var), slow.get(&var)) else {
            bail!("{name} got no gradient")
        };
        let relative = difference(ours, expected)? / largest(expected)?;
        println!(
            "{:<10} {:>12} {:>12}   {relative:.1e} of its largest entry",
            name.trim_end_matches(".weight"),
            arrives(&before),
            arrives(&after)
        );
        if relative.is_nan() || relative > LARGEST_DIFFERENCE {
            bail!("the gradient of {name} differs by {relative:e} of its largest entry, more than {LARGEST_DIFFERENCE:e}")
        }
    }

    println!(
        "\nmedian of {runs} runs, ms {:>12} {:>12} {:>24}",
        "before", "after", "slow, with gradients"
    );
    let time_forward =
        |forward: Forward| median_ms(runs, &device, || forward(&attention, &x).map(drop));
    let time_both = |forward: Forward| median_ms(runs, &device, || gradients(forward).map(drop));
    let [before, after, slow] = [
        time_forward(forward[0])?,
        time_forward(forward[1])?,
        time_forward(forward[2])?,
    ];
    println!(
        "{:<21} {before:>12.1} {after:>12.1} {slow:>24.1}",
        "forward"
    );
    let [after, slow] = [time_both(forward[1])?, time_both(forward[2])?];
    println!(
        "{:<21} {:>12} {after:>12.1} {slow:>24.1}",
        "forward and backward", "–"
    );
    Ok(())
}

type Forward = fn(&Attention, &Tensor) -> Result<Tensor>;

fn check(options: &Options) -> Result<()> {
    let &Options {
        batch,
        length,
        width,
        heads,
        kv_heads,
        runs,
        ..
    } = options;
    for (name, value) in [
        ("batch", batch),
        ("length", length),
        ("width", width),
        ("heads", heads),
        ("kv-heads", kv_heads),
        ("runs", runs),
    ] {
        if value == 0 {
            bail!("--{name} must be at least 1")
        }
    }
    if width % heads != 0 || (width / heads) % 2 != 0 {
        bail!("--width must be an even multiple of --heads; got {width} and {heads}")
    }
    if heads % kv_heads != 0 {
        bail!("--kv-heads must divide --heads; {kv_heads} does not divide {heads}")
    }
    let scores = [batch, heads, length, length]
        .into_iter()
        .try_fold(1usize, usize::checked_mul);
    let weights = width.saturating_mul(width.max(batch.saturating_mul(length)));
    if scores.is_none_or(|scores| scores > MOST_SCORES) || weights > MOST_SCORES {
        bail!("--batch {batch}, --heads {heads}, --length {length} and --width {width} are too much for attention that holds all its scores")
    }
    Ok(())
}

fn largest(x: &Tensor) -> Result<f64> {
    x.abs()?.max_all()?.to_dtype(DType::F64)?.to_scalar()
}

fn difference(a: &Tensor, b: &Tensor) -> Result<f64> {
    largest(&(a - b)?)
}

/// What is started on a GPU is waited for.
fn median_ms(runs: usize, device: &Device, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut times = (0..runs)
        .map(|_| {
            let started = Instant::now();
            run()?;
            device.synchronize()?;
            Ok(started.elapsed().as_secs_f64() * 1e3)
        })
        .collect::<Result<Vec<_>>>()?;
    times.sort_by(f64::total_cmp);
    Ok(times[runs / 2])
}

#[cfg(test)]
mod tests {
    use super::*;
    use common::message;

    fn options(words: &[&str]) -> Options {
        Options::parse_from([&["drop_in"], words].concat())
    }

    #[test]
    fn options_that_do_not_fit_are_refused_in_one_line() {
        for (words, told) in [
            (["--width", "100"], "--width"),
            (["--width", "24"], "--width"),
            (["--kv-heads", "3"], "3 does not divide 8"),
            (["--length", "0"], "--length"),
            (["--runs", "0"], "--runs"),
            (["--length", "1000000"], "--length 1000000"),
            (["--width", "80000"], "--width 80000"),
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
    fn run_of_odd_sizes_passes_its_own_checks() -> Result<()> {
        run(&options(&[
            "--toy", "--length", "37", "--batch", "3", "--runs", "1",
        ]))
    }
}
