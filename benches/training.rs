//! The cross-entropy in chunks against full logits, and a training step with and without recomputed blocks.

#![allow(missing_docs)]

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_posenc::encoding::{PhaseNorm, RopeConfig, TapaConfig, TapeConfig};
use candle_posenc::train::{loss_and_gradients, mean_loss, Recompute};
use candle_posenc::{Ctx, EncodingConfig, Llama, LlamaConfig, Positions, SeededVars};
use criterion::{criterion_group, criterion_main, Criterion, Throughput};

fn ids(len: usize, vocab: usize) -> Vec<i64> {
    (0..len).map(|i| (i * 7919 % vocab) as i64).collect()
}

fn losses(criterion: &mut Criterion) -> Result<()> {
    let device = Device::Cpu;
    let mut group = criterion.benchmark_group("loss_forward_backward");
    group.sample_size(10);
    for (t, c, vocab) in [(1024, 256, 256), (1024, 256, 32_000), (1024, 64, 32_000)] {
        group.throughput(Throughput::Elements(t as u64));
        let shape = format!("cpu/t{t}_c{c}_v{vocab}_f32");
        let hidden = Var::from_tensor(&Tensor::randn(0f32, 1., (1, t, c), &device)?)?;
        let head = Var::from_tensor(&Tensor::randn(0f32, 0.1, (vocab, c), &device)?)?;
        let targets = Tensor::from_vec(ids(t, vocab), (1, t), &device)?;
        group.bench_function(format!("chunks/{shape}"), |bench| {
            bench.iter(|| mean_loss(&hidden, &head, &targets)?.backward());
        });
        group.bench_function(format!("full_logits/{shape}"), |bench| {
            bench.iter(|| {
                let logits = hidden.squeeze(0)?.matmul(&head.t()?)?;
                candle_nn::loss::cross_entropy(&logits, &targets.squeeze(0)?)?.backward()
            });
        });
    }
    group.finish();
    Ok(())
}

fn steps(criterion: &mut Criterion) -> Result<()> {
    let (b, t) = (2, 512);
    let tapa = TapaConfig {
        phase_norm: Some(PhaseNorm::default()),
        ..TapaConfig::default()
    };
    let mut group = criterion.benchmark_group("loss_and_gradients");
    group
        .sample_size(10)
        .throughput(Throughput::Elements((b * t) as u64));
    for (name, encoding) in [
        ("rope", EncodingConfig::Rope(RopeConfig::default())),
        ("tapa", EncodingConfig::Tapa(tapa)),
        ("tape", EncodingConfig::Tape(TapeConfig::default())),
    ] {
        let config = LlamaConfig {
            hidden_size: 256,
            intermediate_size: 688,
            encoding,
            ..LlamaConfig::default()
        };
        let vars = SeededVars::new(1);
        let model = Llama::new(&config, vars.builder(DType::F32, &Device::Cpu))?;
        let text = Tensor::from_vec(ids(b * (t + 1), 256), (b, t + 1), &Device::Cpu)?;
        let (tokens, targets) = (text.narrow(1, 0, t)?, text.narrow(1, 1, t)?);
        for (what, recompute) in [
            ("kept", Recompute::Nothing),
            ("recomputed", Recompute::Blocks),
        ] {
            let shape = format!("cpu/l4_c256_h4_b{b}_t{t}_f32");
            group.bench_function(format!("{name}_{what}/{shape}"), |bench| {
                bench.iter(|| {
                    let (positions, mut ctx) = (Positions::first(t), Ctx::default());
                    loss_and_gradients(&model, &tokens, &targets, &positions, &mut ctx, recompute)
                });
            });
        }
    }
    group.finish();
    Ok(())
}

fn benches(criterion: &mut Criterion) {
    let results = losses(criterion).and_then(|()| steps(criterion));
    results.expect("a bench failed to set up");
}

criterion_group!(training, benches);
criterion_main!(training);
