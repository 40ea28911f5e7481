//! A training step and a decoding step of a small LLaMA with each encoding.

#![allow(missing_docs)]

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use candle_posenc::encoding::{AlibiConfig, PhaseNorm, RopeConfig, TapaConfig, TapeConfig};
use candle_posenc::{
    Backend, Ctx, EncodingConfig, KvCache, Llama, LlamaConfig, Positions, SeededVars,
};
use criterion::{criterion_group, criterion_main, Criterion, Throughput};

fn encodings() -> [(&'static str, EncodingConfig); 5] {
    let tapa = TapaConfig {
        phase_norm: Some(PhaseNorm {
            gain: 0.3,
            learned: false,
        }),
        ..TapaConfig::default()
    };
    [
        ("nope", EncodingConfig::Nope),
        ("rope", EncodingConfig::Rope(RopeConfig::default())),
        ("alibi", EncodingConfig::Alibi(AlibiConfig { slopes: None })),
        ("tapa", EncodingConfig::Tapa(tapa)),
        ("tape", EncodingConfig::Tape(TapeConfig::default())),
    ]
}

fn config(encoding: EncodingConfig) -> LlamaConfig {
    LlamaConfig {
        hidden_size: 256,
        intermediate_size: 688,
        encoding,
        ..LlamaConfig::default()
    }
}

fn run(criterion: &mut Criterion) -> Result<()> {
    let (b, t) = (2, 512);
    let device = Device::Cpu;
    let tokens: Vec<u32> = (0..b * t).map(|i| (i * 7919 % 256) as u32).collect();
    let tokens = Tensor::from_vec(tokens, (b, t), &device)?;
    let model = |encoding: &EncodingConfig| -> Result<Llama> {
        let vb: VarBuilder = SeededVars::new(1).builder(DType::F32, &device);
        Llama::new(&config(encoding.clone()), vb)
    };

    let mut group = criterion.benchmark_group("model_train_step");
    group
        .sample_size(10)
        .throughput(Throughput::Elements((b * t) as u64));
    let shape = format!("cpu/l4_c256_h4_b{b}_t{t}_f32");
    for (name, encoding) in encodings() {
        for (path, backend) in [("fused", Backend::Fused), ("dense", Backend::Dense)] {
            let model = model(&encoding)?.with_backend(backend);
            group.bench_function(format!("{name}_{path}/{shape}"), |bench| {
                bench.iter(|| {
                    model
                        .forward(
                            &tokens,
                            &mut Ctx {
                                train: true,
                                ..Ctx::default()
                            },
                        )
                        .and_then(|logits| {
                            let targets = tokens.flatten_all()?;
                            candle_nn::loss::cross_entropy(&logits.flatten_to(1)?, &targets)
                        })
                        .and_then(|loss| loss.backward())
                        .expect("a training step")
                })
            });
        }
    }
    group.finish();

    let mut group = criterion.benchmark_group("model_decode_step");
    group.sample_size(20).throughput(Throughput::Elements(1));
    let prompt = tokens.narrow(0, 0, 1)?;
    let next = prompt.narrow(1, 0, 1)?;
    let positions = Positions::Span {
        start: t as i64,
        len: 1,
    };
    for (name, encoding) in encodings() {
        let model = model(&encoding)?;
        let mut cache = KvCache::new(4);
        model.forward_at(
            &prompt,
            &Positions::first(t),
            Some(&mut cache),
            &mut Ctx::default(),
        )?;
        group.bench_function(format!("{name}/cpu/l4_c256_h4_b1_s{t}_f32"), |bench| {
            bench.iter(|| {
                cache.truncate(t).expect("truncate");
                model
                    .forward_at(&next, &positions, Some(&mut cache), &mut Ctx::default())
                    .expect("a decoding step")
            })
        });
    }
    group.finish();
    Ok(())
}

fn all(criterion: &mut Criterion) {
    run(criterion).expect("benches");
}

criterion_group!(benches, all);
criterion_main!(benches);
