//! Rotation of heads against candle-nn's, which has no gradient, and against its differentiable slow version.

#![allow(missing_docs)]

mod peers;

use candle_core::{Result, Tensor, Var};
use candle_posenc::{rotate, Layout, Rotation};
use criterion::{criterion_group, criterion_main, Criterion, Throughput};

fn run(criterion: &mut Criterion) -> Result<()> {
    let (h, t, d) = (8, 4096, 64);
    let x = peers::normal((1, h, t, d))?;
    let angles = Tensor::rand(0f32, 6., (t, d / 2), x.device())?;
    let (cos, sin) = (angles.cos()?, angles.sin()?);
    let table = |x: &Tensor| x.reshape((1, 1, t, d / 2));
    let rotation = Rotation {
        cos: table(&cos)?,
        sin: table(&sin)?,
    };
    let shape = format!("cpu/b1_h{h}_t{t}_d{d}_f32");

    let mut group = criterion.benchmark_group("rotate_fwd");
    group.throughput(Throughput::Bytes((2 * h * t * d * 4) as u64));
    for (name, layout) in [("half", Layout::Half), ("interleaved", Layout::Interleaved)] {
        group.bench_function(format!("{name}/{shape}"), |b| {
            b.iter(|| rotate(&x, &rotation, layout).expect("rotate"))
        });
    }
    group.bench_function(format!("candle_rope/{shape}"), |b| {
        b.iter(|| candle_nn::rotary_emb::rope(&x, &cos, &sin).expect("candle's rope"))
    });
    group.finish();

    let mut group = criterion.benchmark_group("rotate_fwd_bwd");
    let x = Var::from_tensor(&x)?;
    let step = |turned: Result<Tensor>| turned?.sum_all()?.backward();
    group.bench_function(format!("half/{shape}"), |b| {
        b.iter(|| step(rotate(&x, &rotation, Layout::Half)).expect("rotate"))
    });
    group.bench_function(format!("candle_rope_slow/{shape}"), |b| {
        b.iter(|| step(candle_nn::rotary_emb::rope_slow(&x, &cos, &sin)).expect("candle's rope"))
    });
    group.finish();
    Ok(())
}

fn all(criterion: &mut Criterion) {
    run(criterion).expect("benches");
}

criterion_group!(benches, all);
criterion_main!(benches);
