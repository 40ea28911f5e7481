//! Attention, forward and backward, against candle's own: `attend_fwd/tapa/cpu/b1_h8_t4096_d64_f32`.

#![allow(missing_docs)]

mod peers;

use candle_core::{DType, Result, Tensor, Var};
use candle_posenc::encoding::alibi_slopes;
use candle_posenc::{attend, AttendSpec, Score};
use criterion::{criterion_group, criterion_main, Criterion, Throughput};

const HEADS: usize = 8;
const HEAD_DIM: usize = 64;

fn scores() -> [(&'static str, Score); 3] {
    [
        ("plain", Score::Dot),
        (
            "alibi",
            Score::LinearBias {
                slopes: alibi_slopes(HEADS).into(),
            },
        ),
        (
            "tapa",
            Score::Phase {
                amp_dim: HEAD_DIM / 2,
                alpha: 0.1,
                phase_scale: None,
            },
        ),
    ]
}

/// Floating-point operations of the two products of a causal forward pass, the triangle counted.
fn causal_flops(t: usize) -> u64 {
    (4 * HEADS * HEAD_DIM * (t * (t + 1) / 2)) as u64
}

fn shape(t: usize) -> String {
    format!("cpu/b1_h{HEADS}_t{t}_d{HEAD_DIM}_f32")
}

fn forward(criterion: &mut Criterion) -> Result<()> {
    for t in [512, 4096] {
        let mut group = criterion.benchmark_group("attend_fwd");
        group
            .sample_size(10)
            .throughput(Throughput::Elements(causal_flops(t)));
        let [q, k, v] = [(); 3].map(|()| peers::normal((1, HEADS, t, HEAD_DIM)));
        let (q, k, v) = (q?, k?, v?);
        for (name, score) in scores() {
            let spec = AttendSpec::causal().with_score(score);
            group.bench_function(format!("{name}/{}", shape(t)), |b| {
                b.iter(|| attend(&q, &k, &v, &spec).expect("attend"))
            });
        }
        let half = [&q, &k, &v].map(|x| x.to_dtype(DType::BF16));
        let [hq, hk, hv] = half;
        let (hq, hk, hv) = (hq?, hk?, hv?);
        group.bench_function(format!("plain/{}", shape(t).replace("f32", "bf16")), |b| {
            b.iter(|| attend(&hq, &hk, &hv, &AttendSpec::causal()).expect("attend"))
        });
        let [fq, fk, fv] = [&q, &k, &v].map(peers::tokens_first);
        let (fq, fk, fv) = (fq?, fk?, fv?);
        group.bench_function(format!("candle_flash/{}", shape(t)), |b| {
            b.iter(|| peers::candle_flash(&fq, &fk, &fv).expect("candle's flash attention"))
        });
        if t <= 1024 {
            group.bench_function(format!("candle_dense/{}", shape(t)), |b| {
                b.iter(|| peers::dense_causal(&q, &k, &v).expect("candle's operations"))
            });
        }
        group.finish();
    }
    Ok(())
}

/// Forward and backward through candle's autograd, as a training step runs them.
fn forward_backward(criterion: &mut Criterion) -> Result<()> {
    let t = 512;
    let mut group = criterion.benchmark_group("attend_fwd_bwd");
    group
        .sample_size(10)
        .throughput(Throughput::Elements(causal_flops(t) * 7 / 2));
    let [q, k, v] =
        [(); 3].map(|()| peers::normal((1, HEADS, t, HEAD_DIM)).and_then(|x| Var::from_tensor(&x)));
    let (q, k, v) = (q?, k?, v?);
    let step = |out: Result<Tensor>| out?.sum_all()?.backward();
    for (name, score) in scores() {
        let spec = AttendSpec::causal().with_score(score);
        group.bench_function(format!("{name}/{}", shape(t)), |b| {
            b.iter(|| step(attend(&q, &k, &v, &spec)).expect("attend"))
        });
    }
    group.bench_function(format!("candle_dense/{}", shape(t)), |b| {
        b.iter(|| step(peers::dense_causal(&q, &k, &v)).expect("candle's operations"))
    });
    group.finish();
    Ok(())
}

/// One new token against a long cache.
fn decode(criterion: &mut Criterion) -> Result<()> {
    let s = 8192;
    let mut group = criterion.benchmark_group("attend_decode");
    group.sample_size(20);
    let q = peers::normal((1, HEADS, 1, HEAD_DIM))?;
    let (k, v) = (
        peers::normal((1, 2, s, HEAD_DIM))?,
        peers::normal((1, 2, s, HEAD_DIM))?,
    );
    for (name, score) in scores() {
        let spec = AttendSpec::causal().with_score(score);
        group.bench_function(
            format!("{name}/cpu/b1_h{HEADS}_g2_s{s}_d{HEAD_DIM}_f32"),
            |b| b.iter(|| attend(&q, &k, &v, &spec).expect("attend")),
        );
    }
    group.finish();
    Ok(())
}

fn all(criterion: &mut Criterion) {
    forward(criterion)
        .and_then(|()| forward_backward(criterion))
        .and_then(|()| decode(criterion))
        .expect("benches");
}

criterion_group!(benches, all);
criterion_main!(benches);
