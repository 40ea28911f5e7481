//! Peak memory of the fused CPU path at 32,768 tokens, where one (T, S) matrix would be 4 GiB.

mod peak;

use candle_core::{Device, Result, Tensor, Var};
use candle_posenc::{attend, AttendSpec, Backend, Score};
use peak::peak_mb;

/// One test, so that nothing else allocates meanwhile.
#[test]
fn fused_attention_at_32768_tokens_stays_linear_in_memory() -> Result<()> {
    let (t, d) = (32_768, 64);
    let var = || Var::from_tensor(&Tensor::randn(0f32, 1., (1, 1, t, d), &Device::Cpu)?);
    let (q, k, v) = (var()?, var()?, var()?);
    for (name, score) in [
        ("plain", Score::Dot),
        (
            "linear bias",
            Score::LinearBias {
                slopes: [0.5].into(),
            },
        ),
        (
            "phase",
            Score::Phase {
                amp_dim: 32,
                alpha: 0.1,
                phase_scale: None,
            },
        ),
    ] {
        let spec = AttendSpec::causal()
            .with_score(score)
            .with_backend(Backend::Fused);
        let [dq, dk, dv] = [&q, &k, &v].map(|x| x.as_detached_tensor());
        let (out, forward) = peak_mb(|| attend(&dq, &dk, &dv, &spec))?;
        drop(out);
        let out = attend(&q, &k, &v, &spec)?;
        let (gradients, backward) = peak_mb(|| out.sum_all()?.backward())?;
        drop(gradients);
        // From the output itself, candle adds only the upstream gradient, as large as the output.
        let out = attend(&q, &k, &v, &spec)?;
        let (gradients, own_backward) = peak_mb(|| out.backward())?;
        let own_backward = own_backward - (t * d * 4) as f64 / 1e6;
        println!(
            "{name}: forward {forward:.1} MB, bwd {own_backward:.1} MB, through backward() {backward:.1} MB"
        );
        assert!(gradients.get(&q).is_some());
        assert!(forward < 32., "{name}: forward took {forward} MB");
        assert!(own_backward < 64., "{name}: bwd took {own_backward} MB");
        assert!(backward < 96., "{name}: backward() took {backward} MB");
    }
    Ok(())
}
