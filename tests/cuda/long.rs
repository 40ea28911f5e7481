//! Long sequences: rows picked from them against the reference, memory that grows with their length and no faster,
//! and tensors of more than 2³¹ elements.

use crate::reference::{linear_bias, Call, Dims, Fill, Inputs};
use crate::report::Report;
use crate::shapes::{consecutive, phase};
use crate::target::{Expected, Forward, Manner, Target};
use crate::{test, Test};
use candle_core::{DType, Result, Tensor, Var};
use candle_posenc::{attend, attend_with_lse, AttendSpec, Backend, Score};

pub fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for (name, dtype, n, d, e) in [
        ("16384_tokens_d64_BF16", DType::BF16, 16_384, 64, 64),
        ("16384_tokens_d128_F16", DType::F16, 16_384, 128, 128),
        ("16384_tokens_tape_d128_BF16", DType::BF16, 16_384, 128, 256),
        ("8192_tokens_d64_F32", DType::F32, 8192, 64, 64),
        ("131072_tokens_d64_BF16", DType::BF16, 131_072, 64, 64),
    ] {
        tests.push(test(
            format!("rows_of_{name}_equal_reference"),
            move |target, report| {
                // The CPU has no time for more.
                let n = if target.is_gpu() { n } else { 1024 };
                picked_rows(target, (dtype, n, d, e), report)
            },
        ));
    }
    tests.push(test(
        "decoding_over_131072_keys_equals_reference",
        |target, report| {
            let s = if target.is_gpu() { 131_072 } else { 4096 };
            for (dtype, d) in [(DType::BF16, 128), (DType::F16, 64), (DType::F32, 64)] {
                let dims = Dims {
                    t: 1,
                    s,
                    ..Dims::square(16, 4, 0, d)
                };
                let inputs = Inputs::new(dims, Fill::Normal, 61, dtype);
                for (score, window) in scores(16, d) {
                    let call = Call {
                        window,
                        ..Call::causal(dims).with_score(score)
                    };
                    target.check(&call, &inputs, Manner::of(dtype), report)?;
                }
            }
            Ok(())
        },
    ));
    tests.push(test("memory_is_linear_to_131072_tokens", memory));
    tests.push(test(
        "tensors_beyond_2_31_elements_equal_their_parts",
        offsets_beyond_32_bits,
    ));
    tests.push(test(
        "memory_of_gradients_is_linear_to_131072_tokens",
        memory_of_gradients,
    ));
    tests.push(test(
        "gradients_of_tensors_beyond_2_31_elements_equal_their_parts",
        gradients_beyond_32_bits,
    ));
    tests
}

fn scores(h: usize, d: usize) -> Vec<(Score, Option<usize>)> {
    vec![
        (Score::Dot, None),
        (Score::Dot, Some(5000)),
        (linear_bias(h), None),
        (phase(d / 2), None),
    ]
}

/// Queries beside edges of tiles, at both ends and in the middle.
fn picked(n: usize) -> Vec<usize> {
    let middle = n / 2;
    let mut rows = vec![0, 1, 2, 15, 63, 64, 127, 128, 129, 500];
    rows.extend([middle - 129, middle - 1, middle, middle + 77]);
    rows.extend([n - 300, n - 129, n - 128, n - 65, n - 2, n - 1]);
    rows
}

fn picked_rows(
    target: &Target,
    (dtype, n, d, e): (DType, usize, usize, usize),
    report: &mut Report,
) -> Result<()> {
    let dims = Dims {
        e,
        ..Dims::square(4, 2, n, d)
    };
    let inputs = Inputs::new(dims, Fill::Normal, 62, dtype);
    let rows = picked(n);
    let pick = |x: &[f64], width: usize| -> Vec<f64> {
        let heads = x.chunks(n * width);
        heads
            .flat_map(|head| rows.iter().flat_map(|i| &head[i * width..][..width]))
            .copied()
            .collect()
    };
    let few = Inputs {
        q: pick(&inputs.q, d),
        grad: Vec::new(),
        ..inputs.clone()
    };
    let few_dims = Dims {
        t: rows.len(),
        ..dims
    };
    let places = vec![rows.iter().map(|i| *i as i64).collect()];
    for (score, window) in scores(4, d) {
        let manner = match score {
            Score::Phase { .. } => vec![Manner::of(dtype), Manner::of(dtype).fast()],
            _ => vec![Manner::of(dtype)],
        };
        let reference = Call {
            window,
            ..Call::causal(few_dims).with_score(score.clone())
        }
        .with_positions(places.clone(), consecutive(0, n));
        let expected = Expected::of(&reference, &few, dtype);
        for manner in manner {
            let call = Call {
                window,
                ..Call::causal(dims).with_score(score.clone())
            };
            let all = target.forward(&call, &inputs, manner, report)?;
            let got = Forward {
                out: pick(&all.out, e),
                lse: pick(&all.lse, 1),
            };
            expected.hold(&crate::target::describe(&call, manner), &got, report);
            let finite = all.out.iter().chain(&all.lse).all(|x| x.is_finite());
            report.check(finite, || "a result that is not finite".to_string());
        }
    }
    Ok(())
}

/// Bytes that the device has left, as the driver says.
#[cfg(feature = "cuda")]
fn free_bytes(target: &Target) -> Result<Option<usize>> {
    use candle_core::cuda_backend::WrapErr;
    match target.device() {
        candle_core::Device::Cuda(device) => {
            Ok(Some(device.cuda_stream().context().mem_get_info().w()?.0))
        }
        _ => Ok(None),
    }
}

#[cfg(not(feature = "cuda"))]
fn free_bytes(_: &Target) -> Result<Option<usize>> {
    Ok(None)
}

fn memory(target: &Target, report: &mut Report) -> Result<()> {
    if !target.is_gpu() {
        report.skip("only on a GPU");
        return Ok(());
    }
    let dtype = DType::BF16;
    let (h, d) = (4, 64);
    let row = |n: usize| -> Result<Tensor> {
        Tensor::randn(0f32, 1., (1, h, n, d), target.device())?.to_dtype(dtype)
    };
    for (name, score, decode) in [
        ("dot", Score::Dot, false),
        ("bias", linear_bias(h), false),
        ("phase", phase(d / 2), false),
        ("dot decode", Score::Dot, true),
        ("phase decode", phase(d / 2), true),
    ] {
        let mut planned = Vec::new();
        for n in [16_384usize, 32_768, 65_536, 131_072] {
            let (k, v) = (row(n)?, row(n)?);
            let q = row(if decode { 1 } else { n })?;
            let spec = AttendSpec::causal()
                .with_score(score.clone())
                .with_backend(Backend::Fused);
            let plan = target.counted_plan([&q, &k, &v], &spec, report)?;
            planned.push(plan.workspace_bytes);
            // The allocator gives memory back to the driver when the device has nothing left to do, and takes more at
            // once when it needs it: what is missing after the call is what the call took.
            target.device().synchronize()?;
            let before = free_bytes(target)?;
            let result = attend_with_lse(&q, &k, &v, &spec)?;
            let after = free_bytes(target)?;
            target.device().synchronize()?;
            let outputs = result.out.elem_count() * 2 + result.lse.elem_count() * 4;
            let Some((before, after)) = before.zip(after) else {
                candle_core::bail!("the driver does not say how much memory is left")
            };
            let taken = before.saturating_sub(after);
            // The driver takes memory in pieces of up to 32 MiB.
            let allowed = outputs + plan.workspace_bytes + (64 << 20);
            report.compare(
                format!("{name}: bytes taken for {n} tokens"),
                taken as f64,
                allowed as f64,
            );
            if n == 131_072 {
                report.remark(format!(
                    "{name}: {n} tokens take {:.0} MiB, outputs {:.0} MiB, planned workspace {:.1} MiB",
                    taken as f64 / 1048576.,
                    outputs as f64 / 1048576.,
                    plan.workspace_bytes as f64 / 1048576.
                ));
            }
        }
        for pair in planned.windows(2) {
            let allowed = (2 * pair[0] + (1 << 20)) as f64;
            report.compare(
                format!("{name}: planned workspaces {planned:?}"),
                pair[1] as f64,
                allowed,
            );
        }
    }
    Ok(())
}

/// Content in the last tokens of the last head of tensors that are 0 elsewhere, against the same content alone.
fn offsets_beyond_32_bits(target: &Target, report: &mut Report) -> Result<()> {
    if !target.is_gpu() {
        report.skip("only on a GPU");
        return Ok(());
    }
    let (h, n, d, part) = (33, 1 << 19, 128, 4096);
    let window = 300;
    let dtype = DType::BF16;
    let content = |seed: u64| -> Result<Tensor> {
        let dims = Dims::square(1, 1, part, d);
        let inputs = Inputs::new(dims, Fill::Normal, seed, dtype);
        crate::reference::tensor(&inputs.q, dims.q(), dtype)?.to_device(target.device())
    };
    let pieces = [content(1)?, content(2)?, content(3)?];
    // One head's worth of zeros before the content, and all heads behind one another.
    let large = |piece: &Tensor| -> Result<Tensor> {
        let large = Tensor::zeros((h * n, d), dtype, target.device())?;
        large.slice_set(&piece.reshape((part, d))?, 0, h * n - part)?;
        large.reshape((1, h, n, d))
    };
    let [q, k, v] = [large(&pieces[0])?, large(&pieces[1])?, large(&pieces[2])?];
    for score in [Score::Dot, phase(64)] {
        let spec = AttendSpec {
            window: Some(window),
            ..AttendSpec::causal()
                .with_score(score.clone())
                .with_backend(Backend::Fused)
        };
        target.counted_plan([&q, &k, &v], &spec, report)?;
        let whole = attend(&q, &k, &v, &spec)?;
        let alone = attend(&pieces[0], &pieces[1], &pieces[2], &spec)?;
        // The first of the content's queries see zeros before it.
        let kept = part - window;
        let got = whole.narrow(1, h - 1, 1)?.narrow(2, n - kept, kept)?;
        let want = alone.narrow(2, window, kept)?;
        let difference = (got.to_dtype(DType::F32)? - want.to_dtype(DType::F32)?)?.abs()?;
        let worst = f64::from(difference.flatten_all()?.max(0)?.to_scalar::<f32>()?);
        report.compare(format!("{score:?} at the end"), worst, 0.02);
        let before = whole
            .narrow(1, h - 1, 1)?
            .narrow(2, n - part - 1000, 1000)?;
        let other = f64::from(
            before
                .to_dtype(DType::F32)?
                .abs()?
                .flatten_all()?
                .max(0)?
                .to_scalar::<f32>()?,
        );
        report.check(other == 0., || format!("{other} where all values are 0"));
        // The last query alone over all keys: decoding.
        let last = |x: &Tensor, from: &Tensor| -> Result<Tensor> {
            x.narrow(2, from.dim(2)? - 1, 1)?.contiguous()
        };
        let few = attend(&last(&q, &q)?, &k, &v, &spec)?.narrow(1, h - 1, 1)?;
        let want = last(&alone, &alone)?;
        let difference = (few.to_dtype(DType::F32)? - want.to_dtype(DType::F32)?)?.abs()?;
        let worst = f64::from(difference.flatten_all()?.max(0)?.to_scalar::<f32>()?);
        report.compare(format!("{score:?} decoded at the end"), worst, 0.02);
    }
    Ok(())
}

/// Tensors of an output's size that candle and we may hold at once in a backward pass.
const HELD: usize = 24;

fn memory_of_gradients(target: &Target, report: &mut Report) -> Result<()> {
    if !target.is_gpu() {
        report.skip("only on a GPU");
        return Ok(());
    }
    let (h, d) = (4, 64);
    for (name, dtype, longest, score) in [
        ("dot", DType::BF16, 131_072, Score::Dot),
        ("bias", DType::BF16, 131_072, linear_bias(h)),
        ("phase", DType::BF16, 131_072, phase(d / 2)),
        ("phase in f32", DType::F32, 32_768, phase(d / 2)),
    ] {
        for n in [longest / 4, longest] {
            let var = || -> Result<Var> {
                let x = Tensor::randn(0f32, 1., (1, h, n, d), target.device())?;
                Var::from_tensor(&x.to_dtype(dtype)?)
            };
            let (q, k, v, grad) = (var()?, var()?, var()?, var()?);
            let spec = AttendSpec::causal()
                .with_score(score.clone())
                .with_backend(Backend::Fused);
            target.counted_plan([&q, &k, &v], &spec, report)?;
            target.device().synchronize()?;
            let before = free_bytes(target)?;
            // Not of a sum: candle sums all of a tensor with one block.
            let gradients = (attend(&q, &k, &v, &spec)? * grad.as_detached_tensor())?.backward()?;
            let after = free_bytes(target)?;
            target.device().synchronize()?;
            let Some((before, after)) = before.zip(after) else {
                candle_core::bail!("the driver does not say how much memory is left")
            };
            let all = [&q, &k, &v].iter().all(|x| gradients.get(x).is_some());
            report.check(all, || format!("{name}: a gradient is missing"));
            let taken = before.saturating_sub(after);
            let allowed = HELD * q.elem_count() * dtype.size_in_bytes() + (64 << 20);
            report.compare(
                format!("{name}: bytes taken for {n} tokens"),
                taken as f64,
                allowed as f64,
            );
        }
    }
    Ok(())
}

/// Content in the last tokens of the last head of tensors that are 0 elsewhere, against the same content alone.
fn gradients_beyond_32_bits(target: &Target, report: &mut Report) -> Result<()> {
    if !target.is_gpu() {
        report.skip("only on a GPU");
        return Ok(());
    }
    let (h, n, d, part, window) = (33, 1 << 19, 128, 4096, 300);
    let dtype = DType::BF16;
    let content = |seed: u64| -> Result<Tensor> {
        let dims = Dims::square(1, 1, part, d);
        let inputs = Inputs::new(dims, Fill::Normal, seed, dtype);
        crate::reference::tensor(&inputs.q, dims.q(), dtype)?.to_device(target.device())
    };
    let large = |piece: &Tensor| -> Result<Tensor> {
        let large = Tensor::zeros((h * n, d), dtype, target.device())?;
        large.slice_set(&piece.reshape((part, d))?, 0, h * n - part)?;
        large.reshape((1, h, n, d))
    };
    let gradients = |pieces: &[Tensor], spec: &AttendSpec| -> Result<Vec<Tensor>> {
        let vars: Vec<Var> = pieces[..3]
            .iter()
            .map(Var::from_tensor)
            .collect::<Result<_>>()?;
        let out = attend(&vars[0], &vars[1], &vars[2], spec)?;
        let store = (out * &pieces[3])?.backward()?;
        // The end of the last head is all that is looked at.
        let of = |var: &Var| match store.get(var) {
            Some(x) => {
                let (_, heads, tokens, _) = x.dims4()?;
                let kept = part - 2 * window;
                let end = x.narrow(1, heads - 1, 1)?.narrow(2, tokens - kept, kept)?;
                end.to_dtype(DType::F32)?.contiguous()
            }
            None => candle_core::bail!("a gradient is missing"),
        };
        vars.iter().map(of).collect()
    };
    let pieces = [content(1)?, content(2)?, content(3)?, content(4)?];
    for score in [Score::Dot, phase(64)] {
        let spec = AttendSpec {
            window: Some(window),
            ..AttendSpec::causal()
                .with_score(score.clone())
                .with_backend(Backend::Fused)
        };
        let want = gradients(&pieces, &spec)?;
        let wide: Vec<Tensor> = pieces.iter().map(large).collect::<Result<_>>()?;
        let got = gradients(&wide, &spec)?;
        for (name, (got, want)) in ["dq", "dk", "dv"].into_iter().zip(got.iter().zip(&want)) {
            let most = |x: &Tensor| -> Result<f64> {
                Ok(f64::from(
                    x.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?,
                ))
            };
            let off = most(&(got - want)?)?;
            report.compare(
                format!("{name}, {score:?} at the end"),
                off,
                0.02 * most(want)?,
            );
        }
    }
    Ok(())
}
