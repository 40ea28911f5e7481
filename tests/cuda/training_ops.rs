//! What a training step does beside the layers: cross-entropy, embeddings, gradients and AdamW, and whole steps.

use crate::layers::{close, random, values};
use crate::reference::unit_roundoff;
use crate::report::Report;
use crate::target::Target;
use crate::{test, Test};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Init, VarBuilder};
use candle_posenc::train::{
    loss_and_gradients, token_losses, AdamW, AdamWConfig, Gradients, Parameters, Recompute,
    Schedule, Trainer, TrainerConfig,
};
use candle_posenc::{
    Ctx, Encoding, EncodingConfig, Llama, LlamaConfig, PosState, Positions, Qkv, SeededVars,
};
use std::collections::HashMap;
use std::sync::Arc;

const CPU: Device = Device::Cpu;

pub fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        tests.push(test(
            format!("token_losses_{dtype:?}"),
            move |target, report| {
                // Rows of a warp and of a block, odd ones. On a GPU all are one chunk; tests of the unit have more.
                for (b, t, c, vocab) in [
                    (1, 1, 3, 1),
                    (2, 9, 5, 7),
                    (3, 40, 16, 256),
                    (1, 33, 8, 301),
                    (2, 5, 8, 2049),
                    (1, 900, 8, 5000),
                ] {
                    for left_out in [false, true] {
                        losses(target, [b, t, c, vocab], left_out, dtype, report)?;
                    }
                }
                Ok(())
            },
        ));
        tests.push(test(
            format!("step_of_a_model_equals_that_on_the_cpu_{dtype:?}"),
            move |target, report| {
                for tied in [false, true] {
                    for recompute in [Recompute::Nothing, Recompute::Blocks] {
                        step_of_model(target, dtype, &small(tied), [2, 200], recompute, report)?;
                    }
                }
                // No whole eights in a row of the stream nor in all of it, odd heads; then rows wider than a block's thousand.
                // More tokens than columns: so the parts of a layer join the stream by operations of their own. Wide rows not in
                // f32: cuBLAS adds a thousand products up one by one, the CPU in parts, and was two to four times nearer.
                let kept = Recompute::Nothing;
                for ([width, inner, heads, head_dim], tokens) in [
                    ([12, 9, 3, 3], 25),
                    ([1030, 8, 2, 4], 1041),
                    ([1032, 8, 2, 4], 1041),
                ] {
                    if width > 1000 && dtype == DType::F32 {
                        continue;
                    }
                    let config = LlamaConfig {
                        hidden_size: width,
                        intermediate_size: inner,
                        num_hidden_layers: 1,
                        num_attention_heads: heads,
                        num_key_value_heads: heads,
                        head_dim: Some(head_dim),
                        ..small(true)
                    };
                    step_of_model(target, dtype, &config, [1, tokens], kept, report)?;
                }
                // Heads that carry columns beyond their own: an odd one, and whole pieces of 16 bytes.
                for (head_dim, more) in [(6, 1), (8, 8)] {
                    let config = LlamaConfig {
                        hidden_size: 5 * head_dim,
                        encoding: Carrier { more }.config(),
                        ..small(false)
                    };
                    step_of_model(target, dtype, &config, [2, 70], kept, report)?;
                }
                Ok(())
            },
        ));
        tests.push(test(format!("adamw_{dtype:?}"), move |target, report| {
            update(target, dtype, report)
        }));
    }
    tests.push(test("losses_all_left_out_are_zero", |target, report| {
        let hidden = Var::ones((2, 3, 8), DType::F32, target.device())?;
        let head = Var::ones((16, 8), DType::F32, target.device())?;
        let targets = Tensor::full(-1i64, (2, 3), &CPU)?;
        let found = token_losses(&hidden, &head, &targets)?;
        let gradients = found.sum_all()?.backward()?;
        for x in [Some(&found), gradients.get(&hidden), gradients.get(&head)] {
            let zero = match x {
                Some(x) => values(x)?.iter().all(|x| *x == 0.),
                None => false,
            };
            report.check(zero, || "something is not zero".to_string());
        }
        Ok(())
    }));
    tests.push(test("training_repeats_bit_for_bit", |target, report| {
        for dtype in [DType::BF16, DType::F32] {
            let first = trained(target.device(), dtype, EncodingConfig::Nope)?;
            for _ in 0..5 {
                let again = trained(target.device(), dtype, EncodingConfig::Nope)?;
                report.check(first == again, || format!("{dtype:?} differs"));
            }
        }
        Ok(())
    }));
    tests.push(test("training_follows_the_cpu", |target, report| {
        let (here, _) = trained(&CPU, DType::F32, EncodingConfig::Nope)?;
        let (there, _) = trained(target.device(), DType::F32, EncodingConfig::Nope)?;
        for (step, (here, there)) in here.iter().zip(&there).enumerate() {
            report.compare(format!("loss of step {step}"), (here - there).abs(), 1e-3);
        }
        Ok(())
    }));
    tests
}

fn by_full_logits(hidden: &Tensor, head: &Tensor, targets: &Tensor) -> Result<Tensor> {
    // Products and all else in f32, as the promise is.
    let wide = match hidden.dtype() {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let logits = hidden
        .to_dtype(wide)?
        .broadcast_matmul(&head.to_dtype(wide)?.t()?)?;
    let counts = targets.ge(0i64)?;
    let chosen = counts.where_cond(targets, &targets.zeros_like()?)?;
    let picked = candle_nn::ops::log_softmax(&logits, candle_core::D::Minus1)?;
    let losses = picked.gather(&chosen.unsqueeze(2)?, 2)?.squeeze(2)?.neg()?;
    counts.where_cond(&losses, &losses.zeros_like()?)
}

fn losses(
    target: &Target,
    [b, t, c, vocab]: [usize; 4],
    left_out: bool,
    dtype: DType,
    report: &mut Report,
) -> Result<()> {
    let id = |i: usize| match left_out && i % 3 == 1 {
        true => -100,
        false => ((i * 31 + 5) % vocab) as i64,
    };
    let ids: Vec<i64> = (0..b * t).map(id).collect();
    let targets = Tensor::from_vec(ids, (b, t), &CPU)?;
    let hidden = random(&[b, t, c], 2., 1)?.to_dtype(dtype)?;
    let head = random(&[vocab, c], 2., 2)?.to_dtype(dtype)?;
    let upstream = random(&[b, t], 1., 3)?.to_dtype(DType::F32)?;
    let all = |device: &Device,
               dtype: DType,
               losses: &dyn Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>|
     -> Result<Vec<Vec<f64>>> {
        let placed = |x: &Tensor| Var::from_tensor(&x.to_dtype(dtype)?.to_device(device)?);
        let (hidden, head) = (placed(&hidden)?, placed(&head)?);
        let found = losses(&hidden, &head, &targets.to_device(device)?)?;
        let weights = upstream.to_dtype(found.dtype())?.to_device(device)?;
        let gradients = (&found * weights)?.sum_all()?.backward()?;
        let mut all = vec![values(&found)?];
        for var in [&hidden, &head] {
            all.push(gradients.get(var).map_or(Ok(Vec::new()), values)?);
        }
        Ok(all)
    };
    let exact = all(&CPU, DType::F64, &by_full_logits)?;
    let plain = all(&CPU, dtype, &by_full_logits)?;
    target.poison()?;
    let got = all(target.device(), dtype, &token_losses)?;
    for (i, part) in ["loss", "dh", "dW"].into_iter().enumerate() {
        let what = format!("{part} b{b} t{t} c{c} v{vocab}, left out: {left_out}");
        close(&what, &got[i], &exact[i], &plain[i], dtype, report);
    }
    Ok(())
}

fn small(tied: bool) -> LlamaConfig {
    LlamaConfig {
        vocab_size: 50,
        hidden_size: 40,
        intermediate_size: 72,
        num_hidden_layers: 2,
        num_attention_heads: 5,
        num_key_value_heads: 5,
        tie_word_embeddings: tied,
        encoding: EncodingConfig::Nope,
        ..LlamaConfig::default()
    }
}

/// An encoding whose heads average columns beyond their own, of which a layer's update does not make anything.
struct Carrier {
    more: usize,
}

impl Encoding for Carrier {
    fn config(&self) -> EncodingConfig {
        EncodingConfig::Custom {
            description: self.more.into(),
        }
    }

    fn encode(&self, _: usize, qkv: Qkv, _: &PosState) -> Result<Qkv> {
        let v = Tensor::cat(&[&qkv.v, &qkv.v.narrow(3, 0, self.more)?], 3)?;
        Ok(Qkv { v, ..qkv })
    }
}

fn model(config: &LlamaConfig, vb: VarBuilder) -> Result<Llama> {
    match &config.encoding {
        EncodingConfig::Custom { description } => {
            let more = description.as_u64().unwrap_or(0) as usize;
            Llama::with_encoding(config, Arc::new(Carrier { more }), vb)
        }
        _ => Llama::new(config, vb),
    }
}

/// Weights that make numbers of about size 1, norms' about 1, so that nothing is near 0.
fn weights(config: &LlamaConfig) -> Result<Vec<(String, Tensor)>> {
    let vars = SeededVars::new(5);
    let size = 0.2 * (40. / config.hidden_size as f64).sqrt();
    let config = LlamaConfig {
        initializer_range: size,
        ..config.clone()
    };
    model(&config, vars.builder(DType::F64, &CPU))?;
    let named = vars.named().into_iter().enumerate();
    named
        .map(|(i, (name, var))| {
            let noise = random(var.dims(), size / 2., 100 + i as u64)?;
            Ok((name, (var.as_detached_tensor() + noise)?))
        })
        .collect()
}

/// Loss and the gradient of every weight, by name.
fn loss_and_all(
    device: &Device,
    dtype: DType,
    config: &LlamaConfig,
    [b, t]: [usize; 2],
    recompute: Recompute,
    weights: &[(String, Tensor)],
) -> Result<(f64, HashMap<String, Vec<f64>>)> {
    // One id has more tokens than a block adds up.
    let ids: Vec<i64> = (0..b * t)
        .map(|i| if i % 3 > 0 { 7 } else { i * i % 50 } as i64)
        .collect();
    let tokens = Tensor::from_vec(ids, (b, t), &CPU)?;
    let next: Vec<i64> = (0..b * t)
        .map(|i| if i % 11 == 4 { -1 } else { (i * 7 % 50) as i64 })
        .collect();
    let targets = Tensor::from_vec(next, (b, t), &CPU)?;
    let mut vars = HashMap::new();
    for (name, weight) in weights {
        let weight = weight.to_dtype(DType::BF16)?.to_dtype(dtype)?;
        vars.insert(name.clone(), Var::from_tensor(&weight.to_device(device)?)?);
    }
    let tensors = vars
        .iter()
        .map(|(name, var)| (name.clone(), var.as_tensor().clone()));
    let vb = VarBuilder::from_tensors(tensors.collect(), dtype, device);
    let model = model(config, vb)?;
    let mut ctx = Ctx {
        train: true,
        ..Ctx::default()
    };
    let positions = Positions::first(t);
    let (loss, gradients) =
        loss_and_gradients(&model, &tokens, &targets, &positions, &mut ctx, recompute)?;
    let mut all = HashMap::new();
    for (name, var) in &vars {
        all.insert(
            name.clone(),
            gradients.get(var).map_or(Ok(Vec::new()), values)?,
        );
    }
    Ok((loss.to_dtype(DType::F64)?.to_scalar()?, all))
}

fn step_of_model(
    target: &Target,
    dtype: DType,
    config: &LlamaConfig,
    tokens: [usize; 2],
    recompute: Recompute,
    report: &mut Report,
) -> Result<()> {
    let weights = weights(config)?;
    let of = |device: &Device, dtype: DType| {
        loss_and_all(device, dtype, config, tokens, recompute, &weights)
    };
    let ((want, exact), (near, plain)) = (of(&CPU, DType::F64)?, of(&CPU, dtype)?);
    target.poison()?;
    let (loss, got) = of(target.device(), dtype)?;
    // One number of plain operations may be near by chance. In half precision a loss is made of states that were rounded at
    // least once; in others it is a sum of hundreds of losses.
    let rounding = match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 1e-6,
        _ => unit_roundoff(dtype),
    };
    let allowed = 2. * (near - want).abs() + rounding * want.abs();
    let (width, tied) = (config.hidden_size, config.tie_word_embeddings);
    let what = format!("C {width}, tied: {tied}, {recompute:?}");
    report.compare(format!("loss, {what}"), (loss - want).abs(), allowed);
    for (name, exact) in &exact {
        let none = Vec::new();
        let (got, plain) = (
            got.get(name).unwrap_or(&none),
            plain.get(name).unwrap_or(&none),
        );
        close(&format!("{name}, {what}"), got, exact, plain, dtype, report);
    }
    Ok(())
}

/// Weights of odd shapes, with and without decay, brought a few steps on here and on the CPU.
fn update(target: &Target, dtype: DType, report: &mut Report) -> Result<()> {
    let shapes = [
        ("a", vec![1]),
        ("b", vec![4096]),
        ("c", vec![17, 241]),
        ("d", vec![3, 5, 7]),
        ("e", vec![100, 130]),
    ];
    let run = |device: &Device| -> Result<(Vec<Vec<f64>>, Vec<f64>)> {
        let parameters = Parameters::new(SeededVars::new(9));
        let vb = parameters.builder(dtype, device);
        let init = Init::Randn {
            mean: 0.,
            stdev: 1.,
        };
        let mut weights = Vec::new();
        for (name, shape) in &shapes {
            weights.push(vb.get_with_hints(&shape[..], name, init)?);
        }
        let mut optimiser = AdamW::new(AdamWConfig::default(), &parameters)?;
        let mut norms = Vec::new();
        for step in 0..4 {
            let mut loss: Option<Tensor> = None;
            for (i, weight) in weights.iter().enumerate() {
                if (i + step) % 4 == 3 {
                    continue; // without a gradient this time
                }
                let factor = random(weight.dims(), 1., (10 * step + i) as u64)?;
                let factor = factor.to_dtype(dtype)?.to_device(device)?;
                let part = (weight * factor)?.sum_all()?;
                loss = Some(match loss {
                    Some(loss) => (loss + part)?,
                    None => part,
                });
            }
            let Some(loss) = loss else { continue };
            let mut gradients = Gradients::of(&loss.backward()?, &parameters)?;
            norms.push(gradients.clip(1.)?);
            norms.push(gradients.norm()?);
            optimiser.step(&parameters, &gradients, 0.01)?;
        }
        let mut all = Vec::new();
        for parameter in parameters.trained() {
            all.push(values(&parameter.master)?);
            let rounded = parameter.master.to_dtype(parameter.working.dtype())?;
            all.push(values(&rounded)?);
            all.push(values(&parameter.working)?);
        }
        for (_, moments) in optimiser.state() {
            all.push(values(&moments.first)?);
            all.push(values(&moments.second)?);
        }
        Ok((all, norms))
    };
    let ((want, norms), (got, found)) = (run(&CPU)?, run(target.device())?);
    let bar = match dtype {
        DType::F64 => 1e-12,
        _ => 3e-6,
    };
    for (want, got) in norms.iter().zip(&found) {
        report.compare("norm", (want - got).abs(), bar * want);
    }
    let weights = 3 * shapes.len();
    for (i, (want, here)) in want.iter().zip(&got).enumerate() {
        if i < weights && i % 3 > 0 {
            // A working copy is its own master, rounded.
            report.check(got[i / 3 * 3 + 1] == got[i / 3 * 3 + 2], || {
                format!("working copy {}", i / 3)
            });
            continue;
        }
        let off = want.iter().zip(here).map(|(a, b)| match (a - b).abs() {
            off if off.is_nan() => f64::INFINITY,
            off => off,
        });
        report.compare(format!("state {i}"), off.fold(0., f64::max), bar);
    }
    Ok(())
}

/// The losses of a short run, and the weights behind it.
fn trained(
    device: &Device,
    dtype: DType,
    encoding: EncodingConfig,
) -> Result<(Vec<f64>, Vec<Vec<f64>>)> {
    let parameters = Parameters::new(SeededVars::new(3));
    let config = LlamaConfig {
        encoding,
        ..small(true)
    };
    let model = Llama::new(&config, parameters.builder(dtype, device))?;
    let text: Vec<u32> = (0..4000u32).map(|i| i * i % 47 % 13 + i % 5).collect();
    let recipe = TrainerConfig {
        batch: 3,
        length: 70,
        accumulation: 2,
        steps: 6,
        schedule: Schedule::Cosine {
            peak: 1e-2,
            warm_up: 2,
            floor: 0.1,
        },
        ..TrainerConfig::default()
    };
    let mut trainer = Trainer::new(model, parameters, text, recipe)?;
    let mut losses = Vec::new();
    while !trainer.is_finished() {
        losses.push(trainer.step()?.loss);
    }
    let mut weights = Vec::new();
    for parameter in trainer.parameters().trained() {
        weights.push(values(&parameter.master)?);
    }
    Ok((losses, weights))
}
