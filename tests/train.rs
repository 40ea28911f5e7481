//! Training: the optimiser against the paper, gradients in parts, precision, interruption, and what is refused.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Init, Optimizer, ParamsAdamW, VarBuilder};
use candle_posenc::encoding::{PhaseNorm, RopeConfig, TapaConfig, TapeConfig};
use candle_posenc::hf::{self, ModelFolder, SaveOptions};
use candle_posenc::train::{
    latest, loss_and_gradients, AdamW, AdamWConfig, Checkpoint, Gradients, Group, Parameter,
    Parameters, Recompute, Schedule, Trainer, TrainerConfig, Windows,
};
use candle_posenc::{Ctx, Encoding, EncodingConfig, Llama, LlamaConfig, Positions, SeededVars};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use serde_json::{json, Value};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const DEVICE: Device = Device::Cpu;

fn values(tensor: &Tensor) -> Vec<f64> {
    let flat = tensor.flatten_all().unwrap();
    flat.to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

// ---- AdamW ----

/// Algorithm 2 of Loshchilov & Hutter (arXiv 1711.05101v3) for one weight, in f64; with the decay multiplied by the
/// rate, as everybody does.
struct PaperAdamW {
    config: AdamWConfig,
    theta: f64,
    m: f64,
    v: f64,
    t: i32,
}

impl PaperAdamW {
    fn step(&mut self, g: f64, alpha: f64, lambda: f64) {
        let AdamWConfig {
            beta1,
            beta2,
            epsilon,
            ..
        } = self.config;
        self.t += 1;
        self.m = beta1 * self.m + (1. - beta1) * g;
        self.v = beta2 * self.v + (1. - beta2) * g * g;
        let m_hat = self.m / (1. - beta1.powi(self.t));
        let v_hat = self.v / (1. - beta2.powi(self.t));
        self.theta -= alpha * (m_hat / (v_hat.sqrt() + epsilon) + lambda * self.theta);
    }
}

/// Gradients of two weights, a matrix (2, 3) and a vector (2), in a loop: loss = Σ w·c(step), so that c is the gradient.
fn coefficient(step: usize, i: usize) -> f64 {
    ((step * 7 + i * 3) as f64 * 0.73).sin() * 10f64.powi(i as i32 - 4)
}

fn linear_loss(weights: &[Tensor], step: usize) -> Result<Tensor> {
    let mut loss = Tensor::zeros((), weights[0].dtype(), &DEVICE)?;
    let mut next = 0;
    for weight in weights {
        let c: Vec<f64> = (0..weight.elem_count())
            .map(|i| coefficient(step, next + i))
            .collect();
        next += c.len();
        let c = Tensor::from_vec(c, weight.shape(), &DEVICE)?.to_dtype(weight.dtype())?;
        loss = (loss + (weight * c)?.sum_all()?)?;
    }
    Ok(loss)
}

fn two_weights(dtype: DType) -> Result<(Parameters, Vec<Tensor>)> {
    let parameters = Parameters::new(SeededVars::new(3));
    let vb = parameters.builder(dtype, &DEVICE);
    let init = Init::Randn {
        mean: 0.,
        stdev: 1.,
    };
    let weights = vec![
        vb.get_with_hints((2, 3), "matrix", init)?,
        vb.get_with_hints(2, "vector", init)?,
    ];
    Ok((parameters, weights))
}

#[test]
fn adamw_equals_the_papers_equations_and_skips_weights_without_gradient() -> Result<()> {
    let config = AdamWConfig {
        weight_decay: 0.2,
        ..AdamWConfig::default()
    };
    for (dtype, tolerance) in [(DType::F32, 2e-6), (DType::F64, 1e-13)] {
        let (parameters, weights) = two_weights(dtype)?;
        let groups = |name: &str, dims: &[usize]| match name {
            "vector" => Group {
                rate: 3.,
                ..AdamW::matrices_decay(0.2, dims)
            },
            _ => AdamW::matrices_decay(0.2, dims),
        };
        let mut optimiser = AdamW::with_groups(config, &parameters, groups)?;
        let all = |weights: &[Tensor]| -> Vec<f64> { weights.iter().flat_map(values).collect() };
        let mut paper: Vec<PaperAdamW> = all(&weights)
            .into_iter()
            .map(|theta| PaperAdamW {
                config,
                theta,
                m: 0.,
                v: 0.,
                t: 0,
            })
            .collect();
        for step in 0..40 {
            let rate = 0.05 / (step + 1) as f64;
            // Every third step the vector has no gradient.
            let used = if step % 3 == 2 { 1 } else { 2 };
            let loss = linear_loss(&weights[..used], step)?;
            let gradients = Gradients::of(&loss.backward()?, &parameters)?;
            assert_eq!(gradients.named().count(), used);
            optimiser.step(&parameters, &gradients, rate)?;
            for (i, paper) in paper.iter_mut().enumerate() {
                match i < 6 {
                    true => paper.step(coefficient(step, i), rate, 0.2),
                    false if used == 2 => paper.step(coefficient(step, i), 3. * rate, 0.),
                    false => {}
                }
            }
            for (got, paper) in all(&weights).iter().zip(&paper) {
                let error = (got - paper.theta).abs();
                assert!(error <= tolerance, "{dtype:?} step {step}: {error}");
            }
        }
        let counts: Vec<u64> = optimiser.state().map(|(_, m)| m.updates).collect();
        assert_eq!(counts, [40, 27]);
    }
    Ok(())
}

#[test]
fn adamw_equals_candles_where_all_weights_decay() -> Result<()> {
    let (parameters, weights) = two_weights(DType::F64)?;
    let config = AdamWConfig {
        weight_decay: 0.1,
        ..AdamWConfig::default()
    };
    let mut ours = AdamW::with_groups(config, &parameters, |_, _| Group {
        weight_decay: 0.1,
        rate: 1.,
    })?;
    let copies: Vec<Var> = (weights.iter())
        .map(|w| Var::from_tensor(&w.detach().copy()?))
        .collect::<Result<_>>()?;
    let params = ParamsAdamW {
        lr: 0.03,
        beta1: config.beta1,
        beta2: config.beta2,
        eps: config.epsilon,
        weight_decay: 0.1,
    };
    let mut theirs = candle_nn::AdamW::new(copies.clone(), params)?;
    let tensors: Vec<Tensor> = copies.iter().map(|v| v.as_tensor().clone()).collect();
    for step in 0..20 {
        let store = linear_loss(&weights, step)?.backward()?;
        ours.step(&parameters, &Gradients::of(&store, &parameters)?, 0.03)?;
        theirs.step(&linear_loss(&tensors, step)?.backward()?)?;
    }
    for (ours, theirs) in weights.iter().zip(&tensors) {
        for (a, b) in values(ours).iter().zip(values(theirs)) {
            assert!((a - b).abs() < 1e-13, "{a} {b}");
        }
    }
    Ok(())
}

#[test]
fn adamw_what_does_not_fit_is_refused_and_changes_nothing() -> Result<()> {
    let (parameters, weights) = two_weights(DType::F32)?;
    for bad in [
        AdamWConfig {
            beta1: 1.,
            ..AdamWConfig::default()
        },
        AdamWConfig {
            beta2: f64::NAN,
            ..AdamWConfig::default()
        },
        AdamWConfig {
            epsilon: 0.,
            ..AdamWConfig::default()
        },
        AdamWConfig {
            weight_decay: -0.1,
            ..AdamWConfig::default()
        },
    ] {
        assert!(AdamW::new(bad, &parameters).is_err(), "{bad:?}");
    }
    let mut optimiser = AdamW::new(AdamWConfig::default(), &parameters)?;
    let before: Vec<_> = weights.iter().map(values).collect();
    let gradients = Gradients::of(&linear_loss(&weights, 0)?.backward()?, &parameters)?;
    for rate in [-1., f64::NAN, f64::INFINITY] {
        assert!(optimiser.step(&parameters, &gradients, rate).is_err());
    }
    // Gradients of weights that this optimiser does not train: "vector" is frozen for it.
    let frozen = parameters.clone().freeze(|name| name == "vector");
    let mut of_matrix = AdamW::new(AdamWConfig::default(), &frozen)?;
    let told = of_matrix.step(&parameters, &gradients, 0.1).unwrap_err();
    assert!(told.to_string().contains("vector"), "{told}");
    let after: Vec<_> = weights.iter().map(values).collect();
    assert_eq!(before, after);
    let one = Tensor::ones(3, DType::F32, &DEVICE)?;
    assert!(optimiser.set_state("vector", &one, &one, 1).is_err());
    assert!(optimiser.set_state("other", &one, &one, 1).is_err());
    Ok(())
}

#[test]
fn adamw_state_set_from_its_own_moments_is_taken() -> Result<()> {
    let (parameters, _) = two_weights(DType::F32)?;
    let mut optimiser = AdamW::new(AdamWConfig::default(), &parameters)?;
    let [first, second] = [[1f32, 2.], [3., 4.]].map(|x| Tensor::new(&x, &DEVICE));
    optimiser.set_state("vector", &first?, &second?, 1)?;
    let moments = |optimiser: &AdamW| -> [Tensor; 2] {
        let (_, moments) = optimiser.state().find(|(n, _)| *n == "vector").unwrap();
        [&moments.first, &moments.second].map(|var| var.as_detached_tensor())
    };
    let [first, second] = moments(&optimiser);
    optimiser.set_state("vector", &second, &first, 2)?;
    let [first, second] = moments(&optimiser);
    assert_eq!(
        (values(&first), values(&second)),
        (vec![3., 4.], vec![1., 2.])
    );
    Ok(())
}

#[test]
fn adamw_at_the_last_countable_update_stays_finite() -> Result<()> {
    let (parameters, weights) = two_weights(DType::F32)?;
    let mut optimiser = AdamW::new(AdamWConfig::default(), &parameters)?;
    let one = Tensor::ones(2, DType::F32, &DEVICE)?;
    optimiser.set_state("vector", &one, &one, u64::MAX)?;
    let gradients = Gradients::of(&linear_loss(&weights, 0)?.backward()?, &parameters)?;
    optimiser.step(&parameters, &gradients, 0.1)?;
    assert!(values(&weights[1]).iter().all(|w| w.is_finite()));
    Ok(())
}

// ---- A model to train ----

fn sizes(encoding: EncodingConfig) -> LlamaConfig {
    LlamaConfig {
        vocab_size: 128,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        encoding,
        ..LlamaConfig::default()
    }
}

fn rope() -> EncodingConfig {
    EncodingConfig::Rope(RopeConfig::default())
}

fn tape() -> EncodingConfig {
    EncodingConfig::Tape(TapeConfig::default())
}

fn text() -> Vec<u32> {
    let text = "The quick brown fox jumps over the lazy dog; the dog sleeps on. ".repeat(12);
    text.bytes().map(u32::from).collect()
}

fn recipe() -> TrainerConfig {
    TrainerConfig {
        seed: 5,
        batch: 3,
        length: 12,
        accumulation: 1,
        steps: 30,
        schedule: Schedule::Cosine {
            peak: 1e-2,
            warm_up: 3,
            floor: 0.1,
        },
        clip: Some(0.5),
        ..TrainerConfig::default()
    }
}

fn trainer(encoding: EncodingConfig, dtype: DType, recipe: TrainerConfig) -> Trainer {
    let parameters = Parameters::new(SeededVars::new(1));
    let model = Llama::new(&sizes(encoding), parameters.builder(dtype, &DEVICE)).unwrap();
    Trainer::new(model, parameters, text(), recipe).unwrap()
}

/// All that a trainer's next steps depend on, in bits.
#[derive(Debug, Clone, PartialEq)]
struct Snapshot {
    step: usize,
    weights: BTreeMap<String, Vec<u64>>,
    moments: BTreeMap<String, (Vec<u64>, Vec<u64>, u64)>,
    cursor: candle_posenc::train::Cursor,
}

fn snapshot(trainer: &Trainer) -> Snapshot {
    let bits = |t: &Tensor| values(t).into_iter().map(f64::to_bits).collect::<Vec<_>>();
    let masters = trainer.parameters().masters().named();
    let moments = trainer.optimiser().state();
    Snapshot {
        step: trainer.steps_done(),
        weights: masters.iter().map(|(n, v)| (n.clone(), bits(v))).collect(),
        moments: moments
            .map(|(n, m)| (n.to_string(), (bits(&m.first), bits(&m.second), m.updates)))
            .collect(),
        cursor: trainer.cursor(),
    }
}

fn steps(trainer: &mut Trainer, count: usize) -> Vec<f64> {
    (0..count).map(|_| trainer.step().unwrap().loss).collect()
}

// ---- Parts ----

#[test]
fn accumulation_gives_the_mean_of_one_large_batch() {
    for encoding in [rope(), tape()] {
        // TAPE's random shift would be drawn once for the large batch and twice for its halves.
        let encoding = match encoding {
            EncodingConfig::Tape(tape) => EncodingConfig::Tape(TapeConfig {
                random_shift: false,
                ..tape
            }),
            other => other,
        };
        let large = TrainerConfig {
            batch: 6,
            ..recipe()
        };
        let halves = TrainerConfig {
            batch: 3,
            accumulation: 2,
            ..recipe()
        };
        let mut large = trainer(encoding.clone(), DType::F64, large);
        let mut halves = trainer(encoding, DType::F64, halves);
        for _ in 0..4 {
            let (one, two) = (large.step().unwrap(), halves.step().unwrap());
            assert_eq!(one.tokens, two.tokens);
            assert!((one.loss - two.loss).abs() < 1e-12, "{one:?} {two:?}");
            let norms = (one.gradient_norm, two.gradient_norm);
            assert!((norms.0 - norms.1).abs() < 1e-11, "{norms:?}");
        }
        let weights = |t: &Trainer| -> Vec<f64> {
            let vars = t.parameters().masters().vars();
            vars.iter().flat_map(|v| values(v)).collect()
        };
        for (a, b) in weights(&large).iter().zip(weights(&halves)) {
            assert!((a - b).abs() < 1e-10, "{a} {b}");
        }
        assert_eq!(large.cursor(), halves.cursor());
    }
}

#[test]
fn loop_of_ones_own_with_the_parts_gives_the_trainers_bits() -> Result<()> {
    let recipe = recipe();
    let mut trainer = trainer(rope(), DType::F32, recipe.clone());
    let parameters = Parameters::new(SeededVars::new(1));
    let model = Llama::new(&sizes(rope()), parameters.builder(DType::F32, &DEVICE))?;
    let mut optimiser = AdamW::new(recipe.adamw, &parameters)?;
    let mut windows = Windows::new(text(), recipe.length, recipe.seed)?;
    for step in 0..5 {
        let report = trainer.step()?;
        let (tokens, targets) = windows.next_batch(recipe.batch, &DEVICE)?;
        let mut ctx = Ctx {
            train: true,
            ..Ctx::default()
        };
        let positions = Positions::first(recipe.length);
        let (loss, store) = loss_and_gradients(
            &model,
            &tokens,
            &targets,
            &positions,
            &mut ctx,
            Recompute::Nothing,
        )?;
        let mut gradients = Gradients::of(&store, &parameters)?;
        let norm = gradients.clip(0.5)?;
        optimiser.step(
            &parameters,
            &gradients,
            recipe.schedule.rate(step, recipe.steps),
        )?;
        assert_eq!(report.loss, f64::from(loss.to_scalar::<f32>()?));
        assert_eq!(report.gradient_norm, norm);
    }
    for (ours, theirs) in
        (parameters.masters().vars().iter()).zip(trainer.parameters().masters().vars())
    {
        assert_eq!(values(ours), values(&theirs));
    }
    Ok(())
}

#[test]
fn only_chosen_weights_change() -> Result<()> {
    let chosen = |name: &str| name.contains("pe.") || name.contains("post_attention_gain");
    let parameters = Parameters::new(SeededVars::new(1)).only(chosen);
    let model = Llama::new(&sizes(tape()), parameters.builder(DType::F32, &DEVICE))?;
    let before: Vec<_> = parameters.all().iter().map(|p| values(&p.master)).collect();
    // A text of one window: every step reads the same.
    let text = text()[..13].to_vec();
    let mut trainer = Trainer::new(model, parameters.clone(), text.clone(), recipe())?;
    let losses = steps(&mut trainer, 30);
    assert!(losses[29] < losses[0], "{losses:?}");
    for (parameter, before) in parameters.all().iter().zip(before) {
        let changed = values(&parameter.master) != before;
        assert_eq!(changed, chosen(&parameter.name), "{}", parameter.name);
    }
    // None at all.
    let parameters = Parameters::new(SeededVars::new(1)).only(|_| false);
    let model = Llama::new(&sizes(rope()), parameters.builder(DType::F32, &DEVICE))?;
    let told = Trainer::new(model, parameters, text, recipe()).err();
    assert!(told.is_some_and(|e| e.to_string().contains("no weight trains")));
    Ok(())
}

// ---- Precision ----

#[test]
fn updates_too_small_for_bf16_add_up_in_the_masters() -> Result<()> {
    let parameters = Parameters::new(SeededVars::new(0));
    let vb = parameters.builder(DType::BF16, &DEVICE);
    let weight = vb.get_with_hints(1, "weight", Init::Const(1.))?;
    let no_decay = AdamWConfig {
        weight_decay: 0.,
        ..AdamWConfig::default()
    };
    let mut optimiser = AdamW::new(no_decay, &parameters)?;
    // bf16 has no number between 0.9961 and 1: steps of 1e-4 from 1 would be rounded away for ever.
    assert_eq!(half::bf16::from_f32(1. - 1e-4), half::bf16::ONE);
    for _ in 0..1000 {
        let loss = weight.to_dtype(DType::F32)?.sum_all()?;
        let gradients = Gradients::of(&loss.backward()?, &parameters)?;
        assert_eq!(gradients.get("weight").map(Tensor::dtype), Some(DType::F32));
        optimiser.step(&parameters, &gradients, 1e-4)?;
    }
    let master = values(&parameters.all()[0].master)[0];
    assert!((master - 0.9).abs() < 1e-4, "{master}");
    assert_eq!(values(&weight)[0], f64::from(half::bf16::from_f64(master)));
    Ok(())
}

#[test]
fn training_in_bf16_reaches_about_the_loss_of_f32() {
    let recipe = TrainerConfig {
        steps: 150,
        ..recipe()
    };
    let mut ends = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        let mut trainer = trainer(rope(), dtype, recipe.clone());
        let losses = steps(&mut trainer, 150);
        assert!(losses[0] > 4.5, "{losses:?}");
        ends.push(losses[140..].iter().sum::<f64>() / 10.);
    }
    let [full, half] = ends[..] else { panic!() };
    assert!(full < 1.5, "{full}");
    assert!((half - full).abs() < 0.1 * full, "{full} {half}");
}

// ---- Interruption ----

#[test]
fn run_resumed_gives_the_bits_of_one_without_interruption() {
    let tapa = EncodingConfig::Tapa(TapaConfig {
        phase_norm: Some(PhaseNorm {
            gain: 0.3,
            learned: true,
        }),
        ..TapaConfig::default()
    });
    for (encoding, dtype, recompute) in [
        (rope(), DType::F32, Recompute::Nothing),
        (tape(), DType::F32, Recompute::Blocks),
        (tape(), DType::BF16, Recompute::Nothing),
        (tapa, DType::F64, Recompute::Nothing),
    ] {
        let recipe = TrainerConfig {
            accumulation: 2,
            recompute,
            ..recipe()
        };
        let start = || trainer(encoding.clone(), dtype, recipe.clone());
        let mut whole = start();
        let losses = steps(&mut whole, 9);
        let run = tempfile::tempdir().unwrap();
        let mut first = start();
        steps(&mut first, 4);
        first.save(run.path()).unwrap();
        let mut second = start();
        assert!(second.resume(run.path().join("none")).unwrap().is_none());
        let resumed = second.resume(run.path()).unwrap().unwrap();
        assert_eq!((resumed.step, resumed.notes.len()), (4, 0));
        assert_eq!(snapshot(&first), snapshot(&second));
        assert_eq!(steps(&mut second, 5), losses[4..]);
        assert_eq!(snapshot(&whole), snapshot(&second));
        // What it holds is a model's folder.
        let model = ModelFolder::open(&resumed.folder).unwrap();
        assert_eq!(model.config(), whole.model().config());
    }
}

/// An encoding of the caller's own: embeddings times a learned gain and a factor.
struct Scaled {
    gain: Tensor,
    factor: f64,
    description: Value,
}

impl Scaled {
    fn new(factor: f64, vb: &VarBuilder) -> Self {
        Self {
            gain: vb.get_with_hints(1, "gain", Init::Const(1.)).unwrap(),
            factor,
            description: json!({"name": "scaled", "factor": factor}),
        }
    }
}

impl Encoding for Scaled {
    fn config(&self) -> EncodingConfig {
        EncodingConfig::Custom {
            description: self.description.clone(),
        }
    }

    fn embed(&self, x: &Tensor, _: &Positions) -> Result<Tensor> {
        x.broadcast_mul(&self.gain)? * self.factor
    }
}

/// A run of a model with such an encoding.
fn scaled_run(change: impl FnOnce(Scaled) -> Scaled) -> Trainer {
    let parameters = Parameters::new(SeededVars::new(1));
    let vb = parameters.builder(DType::F32, &DEVICE);
    let encoding = change(Scaled::new(0.5, &vb));
    let sizes = sizes(encoding.config());
    let model = Llama::with_encoding(&sizes, Arc::new(encoding), vb).unwrap();
    Trainer::new(model, parameters, text(), recipe()).unwrap()
}

#[test]
fn run_with_an_encoding_of_ones_own_is_resumed() {
    let run = tempfile::tempdir().unwrap();
    let mut first = scaled_run(|encoding| encoding);
    steps(&mut first, 3);
    let saved = first.save(run.path()).unwrap();
    let mut second = scaled_run(|encoding| encoding);
    second.resume(run.path()).unwrap().unwrap();
    assert_eq!(snapshot(&first), snapshot(&second));

    // What it holds is a model's folder, which loads with that encoding and no other.
    let saved = ModelFolder::open(saved).unwrap();
    assert_eq!(saved.config(), first.model().config());
    let place = saved.path().display().to_string();
    let error = saved.load(DType::F32, &DEVICE).err().unwrap().to_string();
    for part in [&place, "\"name\":\"scaled\"", "load_with"] {
        assert!(error.contains(part), "{error}");
    }
    let load = |factor: f64| {
        saved.load_with(DType::F32, &DEVICE, |_, vb| {
            Ok(Arc::new(Scaled::new(factor, &vb.root())))
        })
    };
    let error = load(0.25).err().unwrap().to_string();
    let told = "encoding.description.factor is 0.5 in the configuration, 0.25";
    assert!(error.contains(told) && error.contains(&place), "{error}");
    // An encoding that does not ask for its weight is not the one that was trained.
    let forgets = |_: &LlamaConfig, vb: VarBuilder| -> Result<Arc<dyn Encoding>> {
        let gain = Tensor::ones(1, vb.dtype(), vb.device())?;
        let description = json!({"name": "scaled", "factor": 0.5});
        Ok(Arc::new(Scaled {
            gain,
            factor: 0.5,
            description,
        }))
    };
    let error = saved.load_with(DType::F32, &DEVICE, forgets);
    let error = error.err().unwrap().to_string();
    assert!(error.contains("gain is read neither"), "{error}");
    let tokens = Tensor::new(&[[3u32, 1, 4, 1, 5]], &DEVICE).unwrap();
    let logits = |model: &Llama| {
        let logits = model.forward(&tokens, &mut Ctx::default()).unwrap();
        logits.flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    assert_eq!(logits(&load(0.5).unwrap()), logits(first.model()));
}

#[test]
fn run_with_another_encoding_of_ones_own_is_not_resumed() {
    let run = tempfile::tempdir().unwrap();
    let mut first = scaled_run(|encoding| encoding);
    steps(&mut first, 1);
    first.save(run.path()).unwrap();
    let mut other = scaled_run(|encoding| Scaled {
        factor: 0.25,
        description: json!({"name": "scaled", "factor": 0.25}),
        ..encoding
    });
    let before = snapshot(&other);
    let error = other.resume(run.path()).unwrap_err().to_string();
    let told = "model.encoding.description.factor is 0.5 there, 0.25 here";
    assert!(error.contains(told), "{error}");
    assert_eq!(snapshot(&other), before);
    // Nor one of the crate's.
    let mut plain = trainer(EncodingConfig::Nope, DType::F32, recipe());
    let error = plain.resume(run.path()).unwrap_err().to_string();
    let told = "model.encoding.type is \"custom\" there, \"nope\" here";
    assert!(error.contains(told), "{error}");
    // What is null is not what is absent.
    let mut null = scaled_run(|encoding| Scaled {
        description: json!({"name": "scaled", "factor": 0.5, "more": null}),
        ..encoding
    });
    let error = null.resume(run.path()).unwrap_err().to_string();
    let told = "model.encoding.description.more is absent there, null here";
    assert!(error.contains(told), "{error}");
}

#[test]
fn run_with_an_encoding_that_does_not_say_what_it_is_is_not_saved() {
    let run = tempfile::tempdir().unwrap();
    for description in [Value::Null, json!({}), json!([]), json!("")] {
        let mut trainer = scaled_run(|encoding| Scaled {
            description,
            ..encoding
        });
        steps(&mut trainer, 1);
        let error = trainer.save(run.path()).unwrap_err().to_string();
        for part in ["step-00000001", "implement Encoding::config"] {
            assert!(error.contains(part), "{error}");
        }
        assert_eq!(fs::read_dir(run.path()).unwrap().count(), 0);
        steps(&mut trainer, 1);
    }
}

#[test]
fn run_with_weights_beside_the_models_is_resumed() {
    let start = || {
        let parameters = Parameters::new(SeededVars::new(1));
        let vb = parameters.builder(DType::F32, &DEVICE);
        vb.get_with_hints(3, "probe.weight", Init::Const(1.))
            .unwrap();
        let model = Llama::new(&sizes(rope()), vb).unwrap();
        Trainer::new(model, parameters, text(), recipe()).unwrap()
    };
    let run = tempfile::tempdir().unwrap();
    let mut first = start();
    steps(&mut first, 2);
    let folder = first.save(run.path()).unwrap();
    assert!(!folder.join("config.json").exists()); // it is not a model's alone
    let mut second = start();
    second.resume(run.path()).unwrap().unwrap();
    assert_eq!(snapshot(&first), snapshot(&second));
}

#[test]
fn weight_that_an_encoding_tried_to_read_in_another_shape_is_not_left_out() {
    let mut run = scaled_run(|encoding| encoding);
    steps(&mut run, 1);
    let folder = tempfile::tempdir().unwrap();
    let masters = run.parameters().masters();
    hf::save(
        &folder,
        run.model().config(),
        masters,
        &SaveOptions::default(),
    )
    .unwrap();
    let saved = ModelFolder::open(&folder).unwrap();
    let error = saved.load_with(DType::F32, &DEVICE, |_, vb| {
        let gain = vb.root().get(2, "gain");
        let gain = gain.or_else(|_| Tensor::ones(1, vb.dtype(), vb.device()))?;
        let description = json!({"name": "scaled", "factor": 0.5});
        Ok(Arc::new(Scaled {
            gain,
            factor: 0.5,
            description,
        }))
    });
    let error = error.err().unwrap().to_string();
    assert!(error.contains("gain is read neither"), "{error}");
}

#[test]
fn description_beyond_what_files_hold_is_refused_before_training() {
    let nested = |levels: usize| (0..levels).fold(json!(1), |inner, _| json!([inner]));
    let build = |description: Value| {
        let parameters = Parameters::new(SeededVars::new(1));
        let vb = parameters.builder(DType::F32, &DEVICE);
        let encoding = Scaled {
            description,
            ..Scaled::new(0.5, &vb)
        };
        let sizes = sizes(encoding.config());
        let model = Llama::with_encoding(&sizes, Arc::new(encoding), vb)?;
        Trainer::new(model, parameters, text(), recipe())
    };
    let refused = |description| build(description).err().unwrap().to_string();
    let deep = refused(nested(65));
    assert!(deep.contains("65 levels deep, at most 64"), "{deep}");
    let long = refused(json!("x".repeat(1_000_000)));
    assert!(long.contains("1000002 bytes"), "{long}");
    // The deepest that is kept comes back from a checkpoint.
    let run = tempfile::tempdir().unwrap();
    let mut first = build(nested(64)).unwrap();
    steps(&mut first, 1);
    first.save(run.path()).unwrap();
    let mut second = build(nested(64)).unwrap();
    second.resume(run.path()).unwrap().unwrap();
    assert_eq!(snapshot(&first), snapshot(&second));
}

#[test]
fn weights_of_layers_that_a_model_does_not_have_are_not_taken_for_its_encodings() {
    let vars = SeededVars::new(1);
    let vb = vars.builder(DType::F32, &DEVICE);
    let encoding = Scaled::new(0.5, &vb);
    let sizes = sizes(encoding.config());
    Llama::with_encoding(&sizes, Arc::new(encoding), vb.clone()).unwrap();
    let more = format!("model.layers.{}.mlp.up_proj.bias", sizes.num_hidden_layers);
    vb.get_with_hints(3, &more, Init::Const(0.)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let error = hf::save(&folder, &sizes, &vars, &SaveOptions::default());
    let error = error.unwrap_err().to_string();
    assert!(error.contains(&format!("{more} is not used")), "{error}");
}

#[test]
fn model_whose_configuration_names_another_encoding_is_refused() {
    let vars = SeededVars::new(1);
    let vb = vars.builder(DType::F32, &DEVICE);
    let encoding = Arc::new(Scaled::new(0.5, &vb));
    let error = Llama::with_encoding(&sizes(rope()), encoding, vb);
    let error = error.err().unwrap().to_string();
    let told = "encoding.type is \"rope\" in the configuration, \"custom\"";
    assert!(error.contains(told), "{error}");
}

#[test]
fn run_with_an_optimiser_that_had_more_updates_than_the_run_has_steps_is_resumed() {
    let start = |updates: u64| {
        let parameters = Parameters::new(SeededVars::new(1));
        let vb = parameters.builder(DType::F32, &DEVICE);
        let model = Llama::new(&sizes(rope()), vb).unwrap();
        let mut optimiser = AdamW::new(recipe().adamw, &parameters).unwrap();
        for Parameter { name, master, .. } in parameters.trained() {
            let ones = master.ones_like().unwrap();
            optimiser.set_state(&name, &ones, &ones, updates).unwrap();
        }
        Trainer::with_optimiser(model, parameters, text(), recipe(), optimiser).unwrap()
    };
    let run = tempfile::tempdir().unwrap();
    let mut first = start(1000);
    steps(&mut first, 2);
    first.save(run.path()).unwrap();
    let mut second = start(0);
    second.resume(run.path()).unwrap().unwrap();
    assert_eq!(snapshot(&first), snapshot(&second));
}

#[test]
fn step_of_a_model_built_from_other_parameters_is_refused() {
    let [one, other] = [1, 2].map(|seed| {
        let parameters = Parameters::new(SeededVars::new(seed));
        let vb = parameters.builder(DType::F32, &DEVICE);
        (Llama::new(&sizes(rope()), vb).unwrap(), parameters)
    });
    let mut trainer = Trainer::new(one.0, other.1, text(), recipe()).unwrap();
    let before = snapshot(&trainer);
    let error = trainer.step().unwrap_err().to_string();
    assert!(error.contains("built from other parameters"), "{error}");
    assert_eq!(snapshot(&trainer), before);
}

#[test]
fn run_resumed_on_another_number_of_threads_is_told_so() {
    let run = tempfile::tempdir().unwrap();
    let on = |threads: usize, work: &(dyn Fn() -> Vec<String> + Sync)| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        pool.build().unwrap().install(work)
    };
    let begin = || {
        let mut trainer = trainer(rope(), DType::F32, recipe());
        steps(&mut trainer, 2);
        trainer.save(run.path()).unwrap();
        Vec::new()
    };
    let go_on = || {
        let mut trainer = trainer(rope(), DType::F32, recipe());
        let resumed = trainer.resume(run.path()).unwrap().unwrap();
        assert_eq!((resumed.step, trainer.steps_done()), (2, 2));
        resumed.notes
    };
    on(3, &begin);
    assert!(on(3, &go_on).is_empty());
    let [note] = &on(1, &go_on)[..] else { panic!() };
    assert!(
        note.contains("3 threads") && note.contains("on 1"),
        "{note}"
    );
}

#[test]
fn newest_checkpoints_are_kept_and_saving_again_changes_nothing() {
    let run = tempfile::tempdir().unwrap();
    let names = || {
        let entries = fs::read_dir(run.path()).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let mut trainer = trainer(rope(), DType::F32, recipe()).keeping(3);
    for _ in 0..5 {
        trainer.step().unwrap();
        trainer.save(run.path()).unwrap();
    }
    let kept = ["step-00000003", "step-00000004", "step-00000005"];
    assert_eq!(names(), kept);
    let state = || fs::read(run.path().join("step-00000005/state.json")).unwrap();
    let before = state();
    trainer.save(run.path()).unwrap();
    assert_eq!((names().len(), state()), (3, before));
    // Another run's checkpoint is not replaced.
    let mut other = self::trainer(tape(), DType::F32, recipe());
    steps(&mut other, 5);
    let told = other.save(run.path()).unwrap_err().to_string();
    assert!(told.contains("another run"), "{told}");
    assert_eq!(latest(run.path()).unwrap().unwrap().checkpoint.step(), 5);
    assert_eq!(names(), kept);
}

#[test]
fn damaged_newest_checkpoint_is_passed_over_and_said_so_then_replaced() {
    let run = tempfile::tempdir().unwrap();
    let mut first = trainer(rope(), DType::F32, recipe());
    for _ in 0..2 {
        steps(&mut first, 2);
        first.save(run.path()).unwrap();
    }
    let end = snapshot(&first);
    let weights = run.path().join("step-00000004/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&weights, &bytes).unwrap();
    // What a killed process may leave.
    fs::create_dir(run.path().join(".staged-x")).unwrap();
    let mut second = trainer(rope(), DType::F32, recipe());
    let resumed = second.resume(run.path()).unwrap().unwrap();
    assert_eq!(resumed.step, 2);
    let [note] = &resumed.notes[..] else {
        panic!("{resumed:?}")
    };
    assert!(
        note.contains("step-00000004") && note.contains("damaged"),
        "{note}"
    );
    assert!(!run.path().join(".staged-x").exists());
    steps(&mut second, 2);
    assert_eq!(snapshot(&second), end);
    second.save(run.path()).unwrap();
    let newest = latest(run.path()).unwrap().unwrap();
    assert_eq!((newest.checkpoint.step(), newest.passed_over.len()), (4, 0));
    // None is whole.
    for step in [2, 4] {
        fs::write(
            run.path().join(format!("step-0000000{step}/state.json")),
            "{",
        )
        .unwrap();
    }
    let told = second.resume(run.path()).unwrap_err().to_string();
    assert!(told.contains("no checkpoint is whole, of 2"), "{told}");
    assert_eq!(snapshot(&second), end);
}

// ---- Refusals ----

#[test]
fn restore_of_another_run_is_refused_by_name_and_changes_nothing() {
    let run = tempfile::tempdir().unwrap();
    let mut saved = trainer(rope(), DType::F32, recipe());
    steps(&mut saved, 2);
    saved.save(run.path()).unwrap();
    let checkpoint = Checkpoint::open(run.path().join("step-00000002")).unwrap();
    let with = |recipe: TrainerConfig| trainer(rope(), DType::F32, recipe);
    let other_text = {
        let parameters = Parameters::new(SeededVars::new(1));
        let vb = parameters.builder(DType::F32, &DEVICE);
        let model = Llama::new(&sizes(rope()), vb).unwrap();
        let mut text = text();
        text[3] += 1;
        Trainer::new(model, parameters, text, recipe()).unwrap()
    };
    let frozen = {
        let parameters = Parameters::new(SeededVars::new(1)).freeze(|n| n.contains("norm"));
        let vb = parameters.builder(DType::F32, &DEVICE);
        let model = Llama::new(&sizes(rope()), vb).unwrap();
        Trainer::new(model, parameters, text(), recipe()).unwrap()
    };
    for (mut other, told) in [
        (trainer(tape(), DType::F32, recipe()), "model.encoding"),
        (trainer(rope(), DType::BF16, recipe()), "compute"),
        (
            with(TrainerConfig {
                batch: 4,
                ..recipe()
            }),
            "recipe.batch is 3 there, 4 here",
        ),
        (
            with(TrainerConfig {
                steps: 60,
                schedule: Schedule::Linear {
                    peak: 1e-2,
                    warm_up: 6,
                    floor: 0.1,
                },
                ..recipe()
            }),
            "recipe.steps is",
        ),
        (
            with(TrainerConfig {
                clip: None,
                ..recipe()
            }),
            "recipe.clip",
        ),
        (other_text, "text.hash"),
        (frozen, "other weights train"),
    ] {
        let before = snapshot(&other);
        let error = other.restore(&checkpoint).unwrap_err().to_string();
        assert!(error.contains(told), "{told}: {error}");
        assert!(error.contains("step-00000002"), "{error}");
        // One line, also where backtraces are asked for: candle adds one to the end.
        assert!(
            error.lines().next().is_some_and(|line| line.contains(told)),
            "{error}"
        );
        assert!(other.resume(run.path()).is_err());
        assert_eq!(before, snapshot(&other));
    }
}

#[test]
fn step_with_a_loss_that_is_not_finite_is_refused_and_changes_nothing() -> Result<()> {
    for (name, value) in [
        ("model.norm.weight", f32::NAN),
        ("model.layers.0.mlp.down_proj.weight", f32::INFINITY),
    ] {
        let mut trainer = trainer(tape(), DType::F32, recipe());
        steps(&mut trainer, 2);
        let whole = snapshot(&trainer);
        let weights = trainer.parameters().all();
        let weight = &weights.iter().find(|p| p.name == name).unwrap().master;
        let good = weight.as_tensor().copy()?;
        weight.set(&Tensor::full(value, weight.shape(), &DEVICE)?)?;
        let spoilt = snapshot(&trainer);
        let told = trainer.step().unwrap_err().to_string();
        assert!(
            told.contains("at step 3") && told.contains("learning rate"),
            "{told}"
        );
        assert_eq!(snapshot(&trainer), spoilt);
        // With the weight as it was the run goes on as if nothing had happened, its random state included.
        weight.set(&good)?;
        assert_eq!(snapshot(&trainer), whole);
        let mut undisturbed = self::trainer(tape(), DType::F32, recipe());
        steps(&mut undisturbed, 2);
        assert_eq!(trainer.step()?.loss, undisturbed.step()?.loss);
        assert_eq!(snapshot(&trainer), snapshot(&undisturbed));
    }
    Ok(())
}

#[test]
fn recipe_that_makes_no_run_is_refused_by_name() {
    let refused = |config: TrainerConfig, text: Vec<u32>| {
        let parameters = Parameters::new(SeededVars::new(1));
        let vb = parameters.builder(DType::F32, &DEVICE);
        let model = Llama::new(&sizes(rope()), vb).unwrap();
        let trainer = Trainer::new(model, parameters, text, config);
        trainer.err().map(|e| e.to_string()).unwrap_or_default()
    };
    let base = recipe;
    for (config, told) in [
        (TrainerConfig { batch: 0, ..base() }, "batch"),
        (
            TrainerConfig {
                length: 0,
                ..base()
            },
            "length",
        ),
        (
            TrainerConfig {
                accumulation: 0,
                ..base()
            },
            "accumulation",
        ),
        (TrainerConfig { steps: 0, ..base() }, "steps"),
        (TrainerConfig { steps: 2, ..base() }, "warm-up"),
        (
            TrainerConfig {
                clip: Some(0.),
                ..base()
            },
            "clip",
        ),
        (
            TrainerConfig {
                clip: Some(f64::NAN),
                ..base()
            },
            "clip",
        ),
        (
            TrainerConfig {
                clip: Some(f64::INFINITY),
                ..base()
            },
            "clip",
        ),
        (
            TrainerConfig {
                batch: usize::MAX,
                ..base()
            },
            "too many",
        ),
        (
            TrainerConfig {
                length: 5000,
                ..base()
            },
            "do not fit",
        ),
    ] {
        let error = refused(config, text());
        assert!(error.contains(told), "{told}: {error}");
    }
    let error = refused(recipe(), vec![128; 50]);
    assert!(error.contains("token id 128"), "{error}");
    // The end of the run.
    let mut done = trainer(rope(), DType::F32, TrainerConfig { steps: 3, ..base() });
    steps(&mut done, 3);
    assert!(done.is_finished() && done.step().is_err());
}

// ---- Checkpoints that are damaged in any way ----

fn config(cases: u32) -> ProptestConfig {
    let default = ProptestConfig::default();
    ProptestConfig {
        cases,
        failure_persistence: None,
        rng_seed: match default.rng_seed {
            RngSeed::Random => RngSeed::Fixed(20_261_130),
            given => given,
        },
        ..default
    }
}

/// A file's damage; places are parts of its length.
#[derive(Debug, Clone)]
enum Damage {
    Flip { place: f64, bits: u8 },
    Cut { place: f64 },
    Insert { place: f64, bytes: Vec<u8> },
    Overwrite { place: f64, bytes: Vec<u8> },
    Remove,
    Replace { bytes: Vec<u8> },
}

fn damage() -> impl Strategy<Value = Damage> {
    let bytes = || {
        let json = "[-0-9eE.{}\\[\\]\",: a-z]{1,12}".prop_map(String::into_bytes);
        prop_oneof![json, proptest::collection::vec(any::<u8>(), 1..12)]
    };
    prop_oneof![
        4 => (0.0..1.0, 1u8..).prop_map(|(place, bits)| Damage::Flip { place, bits }),
        1 => (0.0..1.0).prop_map(|place| Damage::Cut { place }),
        2 => (0.0..1.0, bytes()).prop_map(|(place, bytes)| Damage::Insert { place, bytes }),
        2 => (0.0..1.0, bytes()).prop_map(|(place, bytes)| Damage::Overwrite { place, bytes }),
        1 => Just(Damage::Remove),
        1 => bytes().prop_map(|bytes| Damage::Replace { bytes }),
    ]
}

fn apply(damage: &Damage, path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let at = |place: &f64| (place * bytes.len() as f64) as usize;
    match damage {
        Damage::Flip { place, bits } => {
            let at = at(place);
            bytes[at] ^= bits;
        }
        Damage::Cut { place } => bytes.truncate(at(place)),
        Damage::Insert { place, bytes: more } => {
            let at = at(place);
            bytes.splice(at..at, more.iter().copied());
        }
        Damage::Overwrite { place, bytes: new } => {
            let (at, end) = (at(place), bytes.len());
            bytes.splice(at..(at + new.len()).min(end), new.iter().copied());
        }
        Damage::Remove => return fs::remove_file(path).unwrap(),
        Damage::Replace { bytes: new } => bytes.clone_from(new),
    }
    fs::write(path, bytes).unwrap();
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

/// A checkpoint and what it holds, made once.
fn saved() -> &'static (tempfile::TempDir, PathBuf, Snapshot) {
    static SAVED: std::sync::OnceLock<(tempfile::TempDir, PathBuf, Snapshot)> =
        std::sync::OnceLock::new();
    SAVED.get_or_init(|| {
        let run = tempfile::tempdir().unwrap();
        let mut trainer = trainer(tape(), DType::F32, recipe());
        steps(&mut trainer, 3);
        let folder = trainer.save(run.path()).unwrap();
        (run, folder, snapshot(&trainer))
    })
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn checkpoint_damaged_in_any_way_is_refused_or_read_as_it_was(
        file in prop_oneof![
            3 => Just("state.json"),
            1 => Just("config.json"),
            2 => Just("model.safetensors"),
            2 => Just("optimiser.safetensors"),
        ],
        damage in damage(),
    ) {
        let (_, folder, whole) = saved();
        let run = tempfile::tempdir().unwrap();
        let copy = run.path().join(folder.file_name().unwrap());
        copy_folder(folder, &copy);
        apply(&damage, &copy.join(file));
        let mut trainer = trainer(tape(), DType::F32, recipe());
        let before = snapshot(&trainer);
        match trainer.resume(run.path()) {
            Err(_) => prop_assert_eq!(snapshot(&trainer), before),
            Ok(_) => prop_assert_eq!(&snapshot(&trainer), whole),
        }
    }
}
