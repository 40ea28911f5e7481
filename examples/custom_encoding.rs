//! An encoding of your own, written outside the crate.
//!
//! "Interleaved" turns queries and keys as RoPE does in most layers and leaves every n-th layer without any
//! position, as Llama 4 does. In those layers the order of tokens comes from the causal mask alone, and attention
//! may look any distance away. Its softmax flattens as the keys become more, so there each head learns how much to
//! sharpen it with the logarithm of the position (the idea of Scalable-Softmax, Nakanishi, arXiv 2501.19399):
//!
//! ```text
//! q ← q · (1 + s_h ln(1 + m))      m the query's position, s_h learned, 0 at first
//! ```
//!
//! This program trains it for some steps, checks that reading token by token with a cache gives the logits of the whole
//! forward pass, and that the model is the same after it was saved and loaded.
//!
//! ```text
//! cargo run --release --example custom_encoding
//! ```

mod common;

use candle_core::{bail, DType, Device, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use candle_posenc::encoding::{Rope, RopeConfig};
use candle_posenc::hf::{self, ModelFolder, SaveOptions};
use candle_posenc::train::{Parameters, Schedule, StepReport, Trainer, TrainerConfig};
use candle_posenc::{
    Ctx, Encoding, EncodingConfig, KvCache, Llama, LlamaConfig, ModelDims, PosState, Positions,
    Qkv, SeededVars,
};
use clap::Parser;
use common::device::DeviceName;
use common::tales::tales;
use serde_json::json;
use std::process::ExitCode;
use std::sync::Arc;

/// RoPE, with no position in every n-th layer but a learned sharpening.
struct Interleaved {
    n: usize,
    rope: Rope,
    /// (1, H, 1, 1) for a layer without rotation.
    sharpening: Vec<Option<Tensor>>,
}

impl Interleaved {
    /// Leaves layers n − 1, 2n − 1, … without rotation. `vb` is where the model's own weights are.
    fn new(n: usize, dims: &ModelDims, vb: VarBuilder) -> Result<Self> {
        if n == 0 {
            bail!("interleaved: n must be at least 1")
        }
        let sharpening = |layer: usize| {
            let vb = vb.pp(format!("layers.{layer}.self_attn"));
            vb.get_with_hints((1, dims.heads, 1, 1), "sharpening", Init::Const(0.))
        };
        Ok(Self {
            n,
            rope: Rope::new(&RopeConfig::default(), dims)?,
            sharpening: (0..dims.layers)
                .map(|layer| {
                    ((layer + 1) % n == 0)
                        .then(|| sharpening(layer))
                        .transpose()
                })
                .collect::<Result<_>>()?,
        })
    }
}

impl Encoding for Interleaved {
    // Its name and all by which it may differ: `config.json` says so, and a checkpoint of another is refused.
    fn config(&self) -> EncodingConfig {
        EncodingConfig::Custom {
            description: json!({"name": "interleaved", "every": self.n}),
        }
    }

    // The table of rotations, made once per forward pass; layers find it in `state`.
    fn begin(&self, x: &Tensor, positions: &Positions, ctx: &mut Ctx) -> Result<PosState> {
        self.rope.begin(x, positions, ctx)
    }

    // There is no `update`: each layer finds the same state.
    fn updates(&self, _layer: usize) -> bool {
        false
    }

    fn encode(&self, layer: usize, qkv: Qkv, state: &PosState) -> Result<Qkv> {
        let Some(Some(sharpening)) = self.sharpening.get(layer) else {
            return self.rope.encode(layer, qkv, state);
        };
        let reach = reach(&state.positions, qkv.q.device())?.to_dtype(qkv.q.dtype())?;
        let factor = (sharpening.broadcast_mul(&reach)? + 1.)?;
        Ok(Qkv {
            q: qkv.q.broadcast_mul(&factor)?,
            ..qkv
        })
    }
}

/// ln(1 + m) of every position m, by which a cached call and a whole one agree: it comes from the positions, never
/// from the length of this call.
///
/// # Shapes
/// (1 or B, 1, T, 1).
fn reach(positions: &Positions, device: &Device) -> Result<Tensor> {
    let pos = match positions {
        Positions::Span { start, len } => {
            Tensor::arange(*start, start + *len as i64, device)?.unsqueeze(0)?
        }
        Positions::Explicit { pos, .. } => pos.to_device(device)?,
    };
    // Padding has negative positions; what it computes is never read.
    (pos.to_dtype(DType::F64)?.relu()? + 1.)?
        .log()?
        .unsqueeze(1)?
        .unsqueeze(3)
}

const LENGTH: usize = 128;
const BATCH: usize = 8;
const STEPS: usize = 60;

/// Train an encoding written outside the crate, then compare reading token by token with reading at once.
#[derive(Parser)]
#[command(name = "custom_encoding")]
struct Options {
    /// What to compute on: cpu, cuda, or cuda:N for the GPU of number N; GPUs need a build with --features cuda
    #[arg(long, value_name = "NAME", default_value_t)]
    device: DeviceName,
}

fn main() -> ExitCode {
    common::conclude("custom_encoding", run(&Options::parse()))
}

fn run(options: &Options) -> Result<()> {
    let device = options.device.open()?;
    let mut config = LlamaConfig {
        hidden_size: 64,
        intermediate_size: 176,
        num_key_value_heads: 2,
        max_position_embeddings: LENGTH,
        ..LlamaConfig::default()
    };

    let parameters = Parameters::new(SeededVars::new(0));
    let vb = parameters.builder(DType::F32, &device);
    let encoding = Interleaved::new(2, &config.dims(), vb.pp("model"))?;
    let sharpening: Vec<Tensor> = encoding.sharpening.iter().flatten().cloned().collect();
    config.encoding = encoding.config();
    let model = Llama::with_encoding(&config, Arc::new(encoding), vb)?;

    // Train.
    let text = tales(1 << 18, 0);
    let tokens: Vec<u32> = text.into_iter().map(u32::from).collect();
    let schedule = Schedule::Cosine {
        peak: 5e-3,
        warm_up: 6,
        floor: 0.1,
    };
    let recipe = TrainerConfig {
        batch: BATCH,
        length: LENGTH,
        steps: STEPS,
        schedule,
        ..TrainerConfig::default()
    };
    let mut trainer = Trainer::new(model.clone(), parameters.clone(), tokens.clone(), recipe)?;
    while !trainer.is_finished() {
        let StepReport { step, loss, .. } = trainer.step()?;
        if step == 1 || step % 10 == 0 {
            println!("step {step:>3}  loss {loss:.3}");
        }
    }
    for (nth, s) in sharpening.iter().enumerate() {
        let heads = s.flatten_all()?.to_vec1::<f32>()?;
        println!("sharpening learned in layer {}: {heads:+.3?}", 2 * nth + 1);
    }

    // Read a text at once, then in parts with a cache: a prompt first, then token by token.
    let tokens = Tensor::from_slice(&tokens[..LENGTH], (1, LENGTH), &device)?;
    let whole = model.forward(&tokens, &mut Ctx::default())?;
    let mut cache = KvCache::new(config.num_hidden_layers);
    let mut parts = Vec::new();
    while cache.len() < LENGTH {
        let start = cache.len();
        let len = if start == 0 { LENGTH / 2 } else { 1 };
        let positions = Positions::Span {
            start: start as i64,
            len,
        };
        let part = tokens.narrow(1, start, len)?;
        parts.push(model.forward_at(&part, &positions, Some(&mut cache), &mut Ctx::default())?);
    }
    let difference = (Tensor::cat(&parts, 1)? - &whole)?.abs()?.max_all()?;
    let difference: f32 = difference.to_scalar()?;
    let largest: f32 = whole.abs()?.max_all()?.to_scalar()?;
    println!("cached decoding differs from the whole pass by {difference:.1e}; logits reach {largest:.1}");
    if difference.is_nan() || difference > 1e-4 * largest {
        bail!("cached decoding and the whole forward pass disagree")
    }

    // Save it, and load it again: the folder says which encoding it is, and we build it.
    let folder = tempfile::tempdir()?;
    hf::save(
        &folder,
        model.config(),
        parameters.masters(),
        &SaveOptions::default(),
    )?;
    let loaded = ModelFolder::open(&folder)?.load_with(DType::F32, &device, |config, vb| {
        let every = match &config.encoding {
            EncodingConfig::Custom { description } if description["name"] == "interleaved" => {
                description["every"].as_u64()
            }
            _ => None,
        };
        let Some(every) = every else {
            bail!("not ours: {:?}", config.encoding)
        };
        Ok(Arc::new(Interleaved::new(
            every as usize,
            &config.dims(),
            vb,
        )?))
    })?;
    let again = loaded.forward(&tokens, &mut Ctx::default())?;
    let difference: f32 = (again - &whole)?.abs()?.max_all()?.to_scalar()?;
    println!("saved and loaded, its logits differ by {difference:.1e}");
    if difference != 0. {
        bail!("the loaded model is another")
    }
    Ok(())
}
