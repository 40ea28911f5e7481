//! What a plan says of memory, held against what the allocator is asked for.

mod peak;

use candle_core::{DType, Device, Result, Tensor};
use candle_posenc::{attend, plan, AttendSpec, Backend, Positions, Score};
use peak::MEMORY;

const CPU: Device = Device::Cpu;
/// Layouts of tensors, lists of tasks, and what candle's matrix products set aside, which the plan leaves out.
const SLACK: usize = 16 << 10;

fn scores(h: usize, d: usize) -> [Score; 3] {
    [
        Score::Dot,
        Score::LinearBias {
            slopes: vec![0.1; h].into(),
        },
        Score::Phase {
            amp_dim: d / 2,
            alpha: 0.3,
            phase_scale: None,
        },
    ]
}

/// Each row on its own, some tokens padding, all in one segment.
fn explicit(b: usize, len: usize) -> Result<Positions> {
    let tokens = (0..b * len).map(|i| (i % len) as i64 - (i / len % 3) as i64);
    let pos = Tensor::from_vec(tokens.collect::<Vec<_>>(), (b, len), &CPU)?;
    let segment = pos.zeros_like()?;
    Positions::explicit(pos, Some(segment))
}

/// One test, so that nothing else allocates meanwhile.
#[test]
fn planned_workspace_is_not_exceeded() -> Result<()> {
    for [b, h, g, t, s, d, e] in [
        [1, 1, 1, 1, 64, 8, 8],
        [1, 8, 2, 1, 8192, 64, 64],
        [1, 4, 4, 500, 400, 32, 32],
        [3, 1, 1, 300, 300, 4, 2],
        [1, 2, 1, 96, 3000, 16, 300],
        [1, 1, 1, 1, 100_000, 4, 4],
        [1, 1, 1, 10_000, 10, 2, 1],
        [8, 12, 3, 5, 100, 64, 64],
        [1, 4, 4, 200, 200, 8, 1024],
        [64, 8, 8, 1, 20, 16, 16],
    ] {
        let normal = |dims: (usize, usize, usize, usize)| Tensor::randn(0f32, 1., dims, &CPU);
        let (q, k, v) = (
            normal((b, h, t, d))?,
            normal((b, g, s, d))?,
            normal((b, g, s, e))?,
        );
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let (q, k, v) = (q.to_dtype(dtype)?, k.to_dtype(dtype)?, v.to_dtype(dtype)?);
            for score in scores(h, d) {
                let spans = AttendSpec::causal().with_score(score);
                let padded = spans
                    .clone()
                    .with_positions(explicit(b, t)?, explicit(b, s)?);
                for spec in [spans, padded] {
                    for backend in [Backend::Fused, Backend::Dense] {
                        let spec = spec.clone().with_backend(backend);
                        let plan = plan(&q, &k, &v, &spec)?;
                        // What threads keep for themselves is there after the first call.
                        attend(&q, &k, &v, &spec)?;
                        let before = MEMORY.current_usage();
                        MEMORY.reset_peak_usage();
                        let out = attend(&q, &k, &v, &spec)?;
                        let peak = MEMORY.peak_usage().saturating_sub(before);
                        let own = out.elem_count() * dtype.size_in_bytes();
                        let asked = peak.saturating_sub(own);
                        let case =
                            format!("{:?} {dtype:?} {spec:?}: {plan}", [b, h, g, t, s, d, e]);
                        assert!(asked <= plan.workspace_bytes + SLACK, "{asked}, {case}");
                    }
                }
            }
        }
    }
    Ok(())
}
