//! Training on the GPU, held to the CPU: one step's losses and every gradient, and the course of 200 steps.

use crate::reference::{accumulator, unit_roundoff, values};
use crate::report::Report;
use crate::target::Target;
use crate::toy::{config, encodings, planned, tokens, variables};
use crate::{test, Test};
use candle_core::{bail, DType, Device, Result, Tensor};
use candle_posenc::encoding::{AlibiConfig, PhaseNorm, RopeConfig, TapaConfig, TapeConfig};
use candle_posenc::train::{
    loss_and_gradients, token_losses, Gradients, Parameters, Recompute, Schedule, Trainer,
    TrainerConfig,
};
use candle_posenc::{Backend, EncodingConfig, Llama, LlamaConfig, Positions, SeededVars};
use std::collections::BTreeMap;

pub fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        for (name, encoding) in encodings() {
            tests.push(test(
                format!("training_step_{}_{dtype:?}", name.replace(' ', "_")),
                move |target, report| {
                    let narrow = config(encoding.clone());
                    step(target, &narrow, (2, 24), dtype, Recompute::Nothing, report)
                },
            ));
        }
        for (name, encoding) in papers() {
            tests.push(test(
                format!("training_step_of_64_columns_{name}_{dtype:?}"),
                move |target, report| {
                    // Heads that fill the kernels' tiles, 6 for 2; more tokens than one tile.
                    let wide = LlamaConfig {
                        hidden_size: 96,
                        num_attention_heads: 6,
                        num_key_value_heads: 2,
                        head_dim: Some(64),
                        num_hidden_layers: 2,
                        initializer_range: 0.08,
                        max_position_embeddings: 128,
                        ..config(encoding.clone())
                    };
                    step(target, &wide, (2, 100), dtype, Recompute::Blocks, report)
                },
            ));
        }
    }
    for (name, encoding) in papers() {
        tests.push(test(
            format!("training_of_200_steps_{name}"),
            move |target, report| course(target, &encoding, report),
        ));
    }
    tests
}

/// The encodings that have papers of their own.
fn papers() -> Vec<(&'static str, EncodingConfig)> {
    let tapa = TapaConfig {
        phase_norm: Some(PhaseNorm {
            gain: 0.3,
            learned: false,
        }),
        ..TapaConfig::default()
    };
    vec![
        ("rope", EncodingConfig::Rope(RopeConfig::default())),
        ("alibi", EncodingConfig::Alibi(AlibiConfig::default())),
        ("tapa", EncodingConfig::Tapa(tapa)),
        ("tape", EncodingConfig::Tape(TapeConfig::default())),
    ]
}

/// A model and its weights, whose values are given.
fn model(
    config: &LlamaConfig,
    weights: &BTreeMap<String, Tensor>,
    (dtype, device, backend): (DType, &Device, Backend),
) -> Result<(Llama, Parameters)> {
    let parameters = Parameters::new(SeededVars::new(0));
    let model = Llama::new(config, parameters.builder(dtype, device))?.with_backend(backend);
    for (name, var) in parameters.masters().named() {
        let Some(weight) = weights.get(&name) else {
            bail!("no weight {name}")
        };
        var.set(&weight.to_dtype(var.dtype())?.to_device(device)?)?;
    }
    parameters.refresh()?;
    Ok((model, parameters))
}

/// What a step computes.
struct Step {
    loss: f64,
    /// (B, T).
    losses: Vec<f64>,
    gradients: BTreeMap<String, Vec<f64>>,
}

fn run_step(
    (model, parameters): &(Llama, Parameters),
    text: &Tensor,
    device: &Device,
    recompute: Recompute,
) -> Result<Step> {
    let t = text.dim(1)? - 1;
    let (tokens, targets) = (text.narrow(1, 0, t)?, text.narrow(1, 1, t)?);
    let (tokens, targets) = (tokens.to_device(device)?, targets.to_device(device)?);
    let positions = Positions::first(t);
    let hidden = model.hidden_at(&tokens, &positions, None, &mut planned())?;
    let losses = values(&token_losses(&hidden, model.head(), &targets)?)?;
    let mut ctx = planned();
    let (loss, store) =
        loss_and_gradients(model, &tokens, &targets, &positions, &mut ctx, recompute)?;
    let gradients = Gradients::of(&store, parameters)?;
    Ok(Step {
        loss: loss.to_dtype(DType::F64)?.to_scalar()?,
        losses,
        gradients: gradients
            .named()
            .map(|(name, gradient)| Ok((name.to_string(), values(gradient)?)))
            .collect::<Result<_>>()?,
    })
}

fn norm(x: impl Iterator<Item = f64>) -> f64 {
    x.map(|x| x * x).sum::<f64>().sqrt()
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    match a.len() == b.len() {
        true => norm(a.iter().zip(b).map(|(a, b)| a - b)),
        false => f64::INFINITY,
    }
}

/// Weights as another order of roundings might have left them.
fn off_by_a_rounding(
    weights: &BTreeMap<String, Tensor>,
    dtype: DType,
    seed: u64,
) -> Result<BTreeMap<String, Tensor>> {
    let mut state = seed;
    let mut off = |x: &f64| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        let way = if state >> 63 == 0 { 1. } else { -1. };
        x * (1. + way * unit_roundoff(dtype))
    };
    let moved = weights.iter().map(|(name, weight)| {
        let values: Vec<f64> = values(weight)?.iter().map(&mut off).collect();
        let moved = Tensor::from_vec(values, weight.shape(), &Device::Cpu)?;
        Ok((name.clone(), moved))
    });
    moved.collect()
}

/// Roundings of a tensor's norm that are forgiven.
const FORGIVEN: f64 = 4.;

/// Tensors of fewer elements may be nearly exact by luck.
const FEW: usize = 64;

/// Losses and gradients against an f64 model of the same weights: each tensor's error, as a norm, is at most twice that
/// of the CPU's in the same dtype, by its dense or its fused path or
/// with weights off by a rounding, four times where it has but a [`FEW`] elements.
fn step(
    target: &Target,
    config: &LlamaConfig,
    (batch, length): (usize, usize),
    dtype: DType,
    recompute: Recompute,
    report: &mut Report,
) -> Result<()> {
    let weights: BTreeMap<String, Tensor> = variables(config, DType::F32)?
        .named()
        .into_iter()
        .map(|(name, var)| {
            // What all three models can hold.
            let value = var.as_detached_tensor().to_dtype(dtype)?;
            Ok((name, value.to_dtype(DType::F64)?))
        })
        .collect::<Result<_>>()?;
    let text = tokens(batch, length + 1, 2)?;
    let run = |place: (DType, &Device, Backend)| {
        run_step(&model(config, &weights, place)?, &text, place.1, recompute)
    };
    let exact = run((DType::F64, &Device::Cpu, Backend::Dense))?;
    // Roundings at the beginning of a step decide much of its end, above all where phases are large. How much tell the CPU's
    // two ways, and weights that are off by a rounding each.
    let mut plain = vec![
        run((dtype, &Device::Cpu, Backend::Dense))?,
        run((dtype, &Device::Cpu, Backend::Fused))?,
    ];
    for seed in 0..2 {
        let off = off_by_a_rounding(&weights, dtype, seed)?;
        let model = model(config, &off, (dtype, &Device::Cpu, Backend::Dense))?;
        plain.push(run_step(&model, &text, &Device::Cpu, recompute)?);
    }
    let got = run((dtype, target.device(), Backend::Fused))?;
    let unit = FORGIVEN * unit_roundoff(dtype);
    let mut compare = |what: String, got: &[f64], plain: Vec<Vec<f64>>, exact: &[f64]| {
        let times = if exact.len() < FEW { 4. } else { 2. };
        let worst = plain.iter().map(|x| distance(x, exact)).fold(0., f64::max);
        let allowed = times * worst + unit * norm(exact.iter().copied());
        report.compare(what, distance(got, exact), allowed);
        allowed
    };
    let allowed = compare(
        "losses of tokens".to_string(),
        &got.losses,
        plain.iter().map(|step| step.losses.clone()).collect(),
        &exact.losses,
    );
    for (name, want) in &exact.gradients {
        let of = |step: &Step| step.gradients.get(name).cloned().unwrap_or_default();
        compare(
            name.clone(),
            &of(&got),
            plain.iter().map(of).collect(),
            want,
        );
    }
    // A mean is off by at most the root mean square of what its terms are off by.
    let allowed = allowed / (exact.losses.len() as f64).sqrt();
    report.compare("loss", (got.loss - exact.loss).abs(), allowed);
    report.check(got.gradients.len() == exact.gradients.len(), || {
        format!(
            "{} gradients, not {}",
            got.gradients.len(),
            exact.gradients.len()
        )
    });
    Ok(())
}

const STEPS: usize = 200;
/// Steps whose losses are averaged: single ones jump with their batch.
const AVERAGED: usize = 10;

/// The losses of a run, averaged.
fn losses(
    encoding: &EncodingConfig,
    (dtype, device, backend): (DType, &Device, Backend),
) -> Result<Vec<f64>> {
    let config = LlamaConfig {
        vocab_size: VOCAB,
        hidden_size: 64,
        intermediate_size: 96,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        max_position_embeddings: 64,
        encoding: encoding.clone(),
        ..LlamaConfig::default()
    };
    let parameters = Parameters::new(SeededVars::new(3));
    let model = Llama::new(&config, parameters.builder(dtype, device))?.with_backend(backend);
    let recipe = TrainerConfig {
        seed: 4,
        batch: 2,
        length: 64,
        steps: STEPS,
        schedule: Schedule::Cosine {
            peak: 3e-3,
            warm_up: 20,
            floor: 0.1,
        },
        ..TrainerConfig::default()
    };
    let mut trainer = Trainer::new(model, parameters, text(), recipe)?;
    let mut losses = Vec::new();
    while !trainer.is_finished() {
        losses.push(trainer.step()?.loss);
    }
    Ok(losses
        .chunks(AVERAGED)
        .map(|part| part.iter().sum::<f64>() / part.len() as f64)
        .collect())
}

const VOCAB: usize = 32;

/// Words of a small language, each chosen by the two before it.
fn text() -> Vec<u32> {
    let mut text = Vec::new();
    let (mut one, mut two) = (1u64, 2u64);
    for i in 0..4000u64 {
        let next = (one * 7 + two * 3 + i % 3).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        (one, two) = (two, next % 23);
        let length = 2 + two % 4;
        text.extend((0..length).map(|letter| (1 + (two * 5 + letter * 3) % 31) as u32));
        text.push(0);
    }
    text
}

/// A run on the GPU, the same on the CPU in the same dtype, and that in f64. Whichever way roundings fall, training
/// makes their differences larger; how far the CPU's own roundings carry it from f64 shows how much. Averaged losses on
/// the GPU are at most twice as far from f64's as the CPU's at their worst.
fn course(target: &Target, encoding: &EncodingConfig, report: &mut Report) -> Result<()> {
    let on_the_cpu = |dtype, backend| losses(encoding, (dtype, &Device::Cpu, backend));
    let [exact, single, half] = std::thread::scope(|scope| {
        let others = [DType::F32, DType::BF16]
            .map(|dtype| scope.spawn(move || on_the_cpu(dtype, Backend::Dense)));
        let exact = on_the_cpu(DType::F64, Backend::Auto);
        let [single, half] =
            others.map(|run| run.join().unwrap_or_else(|_| bail!("a run panicked")));
        [exact, single, half]
    });
    let exact = exact?;
    let farthest = |losses: &[f64]| {
        let apart = losses.iter().zip(&exact).map(|(a, b)| (a - b).abs());
        apart.fold(0f64, f64::max)
    };
    for (dtype, plain) in [(DType::F32, single), (DType::BF16, half)] {
        let plain = plain?;
        let got = losses(encoding, (dtype, target.device(), Backend::Fused))?;
        let unit = unit_roundoff(dtype).max(unit_roundoff(accumulator(dtype)) * 100.);
        let allowed = 2. * farthest(&plain) + unit * exact[0];
        for (i, (got, want)) in got.iter().zip(&exact).enumerate() {
            report.compare(
                format!("{dtype:?}: losses from step {} on", i * AVERAGED),
                (got - want).abs(),
                allowed,
            );
        }
        let (first, last) = (got[0], got[got.len() - 1]);
        report.check(last < 0.6 * first, || {
            format!("the loss went from {first:.3} to {last:.3} only")
        });
        report.remark(format!(
            "{dtype:?}: losses from {first:.3} to {last:.3}, f64's {:.3}; off by at most {:.1e}, the CPU's own by {:.1e}",
            exact[exact.len() - 1],
            farthest(&got),
            farthest(&plain)
        ));
    }
    Ok(())
}
