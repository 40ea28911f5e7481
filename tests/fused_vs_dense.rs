//! The fused path against the dense one: values, log-sum-exps and gradients, over odd shapes.
//!
//! The rule for f32, bf16 and f16 is flash-attention's: the fused error against f64 is at most twice the dense
//! error in the same dtype, plus [`FLOOR`] of the result's size. In f64 both agree to 1e-12 of it. The size is the
//! greatest reference value; for dq and dk it is at least that of the parts they are sums of, since the parts
//! P (grad·v) and P δ may cancel: a query that sees one key has dq = 0.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_posenc::{attend_with_lse, AttendSpec, Backend, Positions, Score};
use rand::{rngs::StdRng, SeedableRng};
use rand_distr::{Distribution, StandardNormal};

/// Eight roundings of f32, for cases in which the dense error happens to be next to nothing.
const FLOOR: f64 = 8. * 6e-8;
const CPU: Device = Device::Cpu;

/// (batch, query heads, key/value heads, queries, keys, head width, value width)
#[derive(Debug, Clone, Copy)]
struct Shape {
    b: usize,
    h: usize,
    g: usize,
    t: usize,
    s: usize,
    d: usize,
    e: usize,
}

fn shape([b, h, g, t, s, d, e]: [usize; 7]) -> Shape {
    Shape {
        b,
        h,
        g,
        t,
        s,
        d,
        e,
    }
}

/// Tensors that are made once, in f64, and used in any dtype.
struct Inputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    /// The upstream gradient.
    grad: Tensor,
}

fn normal(rng: &mut StdRng, dims: (usize, usize, usize, usize)) -> Result<Tensor> {
    let (a, b, c, d) = dims;
    let values: Vec<f64> = (0..a * b * c * d)
        .map(|_| StandardNormal.sample(&mut *rng))
        .collect();
    Tensor::from_vec(values, dims, &CPU)
}

impl Inputs {
    fn new(shape: Shape, seed: u64) -> Result<Self> {
        let Shape {
            b,
            h,
            g,
            t,
            s,
            d,
            e,
        } = shape;
        let rng = &mut StdRng::seed_from_u64(seed);
        Ok(Self {
            q: normal(rng, (b, h, t, d))?,
            k: normal(rng, (b, g, s, d))?,
            v: normal(rng, (b, g, s, e))?,
            grad: normal(rng, (b, h, t, e))?,
        })
    }
}

/// Name and value of everything that is compared.
type Results = Vec<(&'static str, Tensor)>;

/// How the operands are made from contiguous ones; gradients are those of the contiguous ones.
type Operands = fn(&Tensor) -> Result<Tensor>;

/// Typical size of the parts that dq and dk are sums of; a key's are as many as the queries that look at it.
fn size_of_parts(inputs: &Inputs, spec: &AttendSpec) -> Result<f64> {
    let rms = |x: &Tensor| -> Result<f64> {
        let values = values(x)?;
        let real: Vec<f64> = values.into_iter().filter(|x| x.is_finite()).collect();
        Ok((real.iter().map(|x| x * x).sum::<f64>() / real.len() as f64).sqrt())
    };
    let (_, h, t, d) = inputs.q.dims4()?;
    let (_, g, s, e) = inputs.v.dims4()?;
    // The score's derivative by q·k.
    let slope = match spec.score {
        Score::Phase {
            amp_dim,
            alpha,
            phase_scale,
        } => {
            let (a, p) = (amp_dim as f64, (d - amp_dim) as f64);
            let amplitude =
                spec.scale.map_or(1., |scale| scale * a.sqrt()) * rms(&inputs.q)? * rms(&inputs.k)?;
            let turns = (s as f64).powf(alpha) * phase_scale.unwrap_or(1. / p.sqrt());
            std::f64::consts::TAU * turns * amplitude
        }
        _ => spec.scale.unwrap_or(1. / (d as f64).sqrt()),
    };
    let ds = rms(&inputs.grad)? * rms(&inputs.v)? * (e as f64).sqrt();
    let queries_per_key = (h * t) as f64 / (g * s) as f64;
    let greatest = greatest(&inputs.q)?.max(greatest(&inputs.k)?);
    Ok(ds * slope.abs() * greatest * queries_per_key.max(1.).sqrt())
}

fn run(
    inputs: &Inputs,
    dtype: DType,
    spec: &AttendSpec,
    backend: Backend,
    operands: Operands,
) -> Result<Results> {
    let spec = spec.clone().with_backend(backend);
    let var = |x: &Tensor| Var::from_tensor(&x.to_dtype(dtype)?);
    let (q, k, v) = (var(&inputs.q)?, var(&inputs.k)?, var(&inputs.v)?);
    let result = attend_with_lse(&operands(&q)?, &operands(&k)?, &operands(&v)?, &spec)?;
    let grad = inputs.grad.to_dtype(dtype)?;
    let grads = (&result.out * &grad)?.sum_all()?.backward()?;
    let mut results = vec![("out", result.out), ("lse", result.lse)];
    for (name, x) in [("dq", &q), ("dk", &k), ("dv", &v)] {
        // candle gives none at all through a factor of 0.
        let zero = x.zeros_like()?;
        results.push((name, grads.get(x).unwrap_or(&zero).clone()));
    }
    Ok(results)
}

fn values(x: &Tensor) -> Result<Vec<f64>> {
    x.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

/// The greatest difference; equal infinities differ by 0, NaN by ∞.
fn error(x: &Tensor, reference: &Tensor) -> Result<f64> {
    assert_eq!(x.dims(), reference.dims());
    let differences = values(x)?
        .into_iter()
        .zip(values(reference)?)
        .map(|(x, r)| {
            let difference = if x == r { 0. } else { (x - r).abs() };
            if difference.is_nan() {
                f64::INFINITY
            } else {
                difference
            }
        });
    Ok(differences.fold(0., f64::max))
}

fn greatest(x: &Tensor) -> Result<f64> {
    let finite = values(x)?.into_iter().filter(|x| x.is_finite());
    Ok(finite.map(f64::abs).fold(0., f64::max))
}

fn check_operands(
    inputs: &Inputs,
    dtype: DType,
    spec: &AttendSpec,
    (operands, uses): (Operands, usize),
    case: &str,
) -> Result<()> {
    // The reference sees the inputs as the dtype has them.
    let rounded = |x: &Tensor| x.to_dtype(dtype)?.to_dtype(DType::F64);
    let inputs = Inputs {
        q: rounded(&inputs.q)?,
        k: rounded(&inputs.k)?,
        v: rounded(&inputs.v)?,
        grad: rounded(&inputs.grad)?,
    };
    let fused = run(&inputs, dtype, spec, Backend::Fused, operands)?;
    let dense = run(&inputs, dtype, spec, Backend::Dense, operands)?;
    let reference = run(&inputs, DType::F64, spec, Backend::Dense, operands)?;
    let parts = size_of_parts(&inputs, spec)? * uses as f64;
    for ((fused, dense), (name, reference)) in fused.iter().zip(&dense).zip(&reference) {
        let size = match *name {
            "dq" | "dk" => greatest(reference)?.max(parts),
            _ => greatest(reference)?,
        };
        let bound = match dtype {
            DType::F64 => 1e-12 * size,
            _ => 2. * error(&dense.1, reference)? + FLOOR * size,
        };
        let error = error(&fused.1, reference)?;
        assert!(
            error <= bound,
            "{name} of {case}, {dtype:?}: error {error:e}, bound {bound:e}, greatest {size:e}; {spec:?}"
        );
    }
    Ok(())
}

fn check(inputs: &Inputs, dtype: DType, spec: &AttendSpec, case: &str) -> Result<()> {
    check_operands(inputs, dtype, spec, (|x| Ok(x.clone()), 1), case)
}

fn phase(amp_dim: usize) -> Score {
    Score::Phase {
        amp_dim,
        alpha: 0.1,
        phase_scale: None,
    }
}

/// Each score that fits a shape.
fn scores(shape: Shape) -> Vec<Score> {
    let mut scores = vec![
        Score::Dot,
        Score::LinearBias {
            slopes: (0..shape.h).map(|h| 0.4 / (h + 1) as f64).collect(),
        },
    ];
    if shape.d > 1 {
        scores.push(phase((shape.d / 2).max(1)));
    }
    scores
}

const ALL_DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

#[test]
fn attend_odd_lengths_causal_equals_dense() -> Result<()> {
    for (i, length) in [1, 2, 15, 31, 63, 65, 96, 97, 127, 129, 257]
        .into_iter()
        .enumerate()
    {
        let shape = shape([1, 2, 1, length, length, 8, 8]);
        let inputs = Inputs::new(shape, i as u64)?;
        for score in scores(shape) {
            let spec = AttendSpec::causal().with_score(score);
            check(&inputs, DType::F32, &spec, &format!("{shape:?}"))?;
        }
    }
    Ok(())
}

#[test]
fn attend_different_lengths_with_windows_equals_dense() -> Result<()> {
    let lengths = [1, 2, 31, 65, 129];
    let pairs = lengths
        .iter()
        .flat_map(|t| lengths.iter().map(move |s| (*t, *s)));
    for (i, (t, s)) in pairs.filter(|(t, s)| t != s).enumerate() {
        let shape = shape([2, 2, 2, t, s, 6, 5]);
        let inputs = Inputs::new(shape, 100 + i as u64)?;
        for score in scores(shape) {
            for (causal, window) in [
                (true, None),
                (false, None),
                (true, Some(7)),
                (false, Some(40)),
            ] {
                let spec = AttendSpec {
                    causal,
                    window,
                    ..AttendSpec::causal().with_score(score.clone())
                };
                check(&inputs, DType::F32, &spec, &format!("{shape:?}"))?;
            }
        }
    }
    Ok(())
}

#[test]
fn attend_odd_widths_and_groups_equals_dense() -> Result<()> {
    let shapes = [
        [1, 1, 1, 33, 33, 1, 3],
        [1, 3, 1, 40, 70, 3, 1],
        [2, 4, 2, 65, 65, 20, 24],
        [1, 6, 2, 31, 130, 40, 17],
        [1, 4, 1, 129, 129, 64, 80],
        [1, 7, 1, 20, 20, 33, 96],
        [1, 2, 2, 66, 66, 264, 40],
        [3, 4, 4, 17, 17, 72, 112],
        [1, 8, 2, 1, 300, 16, 16],
        [1, 40, 1, 3, 100, 8, 8],
        [1, 3, 3, 65, 65, 128, 192],
    ];
    for (i, shape) in shapes.map(shape).into_iter().enumerate() {
        let inputs = Inputs::new(shape, 200 + i as u64)?;
        for score in scores(shape) {
            let spec = AttendSpec::causal().with_score(score);
            check(&inputs, DType::F32, &spec, &format!("{shape:?}"))?;
            check(&inputs, DType::F64, &spec, &format!("{shape:?}"))?;
        }
    }
    Ok(())
}

#[test]
fn attend_every_dtype_equals_dense() -> Result<()> {
    for (i, dims) in [[1, 4, 2, 100, 100, 20, 24], [2, 2, 1, 5, 150, 7, 9]]
        .into_iter()
        .enumerate()
    {
        let shape = shape(dims);
        let inputs = Inputs::new(shape, 300 + i as u64)?;
        for dtype in ALL_DTYPES {
            for score in scores(shape) {
                for causal in [true, false] {
                    let spec = AttendSpec {
                        causal,
                        ..AttendSpec::causal().with_score(score.clone())
                    };
                    check(&inputs, dtype, &spec, &format!("{shape:?}"))?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn attend_shifted_spans_equals_dense() -> Result<()> {
    let shape = shape([1, 2, 1, 70, 130, 12, 12]);
    let inputs = Inputs::new(shape, 400)?;
    let span = |start, len| Positions::Span { start, len };
    for (q_start, k_start) in [(1000, 900), (0, 64), (30, 0), (5_000_000, 100), (-20, -60)] {
        for score in scores(shape) {
            for (causal, window) in [(true, None), (false, Some(50)), (false, None)] {
                let positions = (span(q_start, shape.t), span(k_start, shape.s));
                let spec = AttendSpec {
                    causal,
                    window,
                    ..AttendSpec::causal()
                        .with_score(score.clone())
                        .with_positions(positions.0, positions.1)
                };
                check(
                    &inputs,
                    DType::F32,
                    &spec,
                    &format!("q {q_start}, k {k_start}"),
                )?;
            }
        }
    }
    Ok(())
}

/// `x` with NaN in each token whose position is negative; positions are (B, T).
fn spoil_padding(x: &Tensor, positions: &[i64]) -> Result<Tensor> {
    let (b, h, t, d) = x.dims4()?;
    let mut values = values(x)?;
    for (i, value) in values.iter_mut().enumerate() {
        let (batch, token) = (i / (h * t * d), i / d % t);
        if positions[batch * t + token] < 0 {
            *value = f64::NAN;
        }
    }
    Tensor::from_vec(values, (b, h, t, d), &CPU)
}

#[test]
fn attend_padded_packed_positions_ignores_nan_and_equals_dense() -> Result<()> {
    let shape = shape([2, 4, 2, 131, 131, 10, 6]);
    let Shape { b, t, .. } = shape;
    let clean = Inputs::new(shape, 500)?;
    // Left padding, then documents; the second row is scrambled, with gaps.
    let mut pos: Vec<i64> = (0..t as i64).map(|i| i - 9).collect();
    pos.extend((0..t as i64).map(|i| if i % 11 == 3 { -1 } else { (i * 37) % 131 * 3 }));
    let segment: Vec<i64> = (0..(b * t) as i64).map(|i| i / 40).collect();
    let table = |x: &[i64]| Tensor::from_vec(x.to_vec(), (b, t), &CPU);
    let inputs = Inputs {
        q: spoil_padding(&clean.q, &pos)?,
        k: spoil_padding(&clean.k, &pos)?,
        v: spoil_padding(&clean.v, &pos)?,
        grad: clean.grad.clone(),
    };
    for segment in [None, Some(table(&segment)?)] {
        let positions = Positions::explicit(table(&pos)?, segment)?;
        for score in scores(shape) {
            for (causal, window) in [
                (true, None),
                (true, Some(30)),
                (false, None),
                (false, Some(30)),
            ] {
                let spec = AttendSpec {
                    causal,
                    window,
                    ..AttendSpec::causal()
                        .with_score(score.clone())
                        .with_positions(positions.clone(), positions.clone())
                };
                for dtype in [DType::F32, DType::BF16] {
                    check(&inputs, dtype, &spec, "padding")?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn attend_nan_gradient_of_padded_query_does_not_leak() -> Result<()> {
    let shape = shape([1, 2, 1, 40, 40, 8, 8]);
    let clean = Inputs::new(shape, 550)?;
    let pos: Vec<i64> = (0..40).map(|i| if i % 7 == 2 { -5 } else { i }).collect();
    let positions = Positions::explicit(Tensor::from_vec(pos.clone(), (1, 40), &CPU)?, None)?;
    let spec = AttendSpec::causal().with_positions(positions.clone(), positions);
    let spoiled = Inputs {
        grad: spoil_padding(&clean.grad, &pos)?,
        q: clean.q.clone(),
        k: clean.k.clone(),
        v: clean.v.clone(),
    };
    let operands: Operands = |x| Ok(x.clone());
    let clean = run(&clean, DType::F32, &spec, Backend::Fused, operands)?;
    let spoiled = run(&spoiled, DType::F32, &spec, Backend::Fused, operands)?;
    for ((name, clean), (_, spoiled)) in clean.iter().zip(&spoiled) {
        assert_eq!(values(clean)?, values(spoiled)?, "{name}");
    }
    Ok(())
}

/// Queries 5 and 17 stand before every key; they are not padding.
#[test]
fn attend_nan_of_query_without_keys_does_not_leak_into_gradients() -> Result<()> {
    let shape = shape([1, 2, 1, 40, 40, 8, 8]);
    let clean = Inputs::new(shape, 551)?;
    let sees = |i: i64| !matches!(i, 5 | 17);
    let at = |pos: Vec<i64>| Positions::explicit(Tensor::from_vec(pos, (1, 40), &CPU)?, None);
    let queries = at((0..40).map(|i| if sees(i) { i + 100 } else { 0 }).collect())?;
    let keys = at((100..140).collect())?;
    let blind: Vec<i64> = (0..40).map(|i| if sees(i) { 0 } else { -1 }).collect();
    let operands: Operands = |x| Ok(x.clone());
    for score in scores(shape) {
        let spec = AttendSpec::causal()
            .with_score(score)
            .with_positions(queries.clone(), keys.clone());
        let expected = run(&clean, DType::F32, &spec, Backend::Fused, operands)?;
        let spoiled = Inputs {
            q: spoil_padding(&clean.q, &blind)?,
            k: clean.k.clone(),
            v: clean.v.clone(),
            grad: spoil_padding(&clean.grad, &blind)?,
        };
        let spoiled = run(&spoiled, DType::F32, &spec, Backend::Fused, operands)?;
        for ((name, expected), (_, spoiled)) in expected.iter().zip(&spoiled) {
            assert_eq!(values(expected)?, values(spoiled)?, "{name}; {spec:?}");
        }
    }
    Ok(())
}

/// A single NaN score leaves the greatest score at −∞, as if nothing had been seen.
#[test]
fn attend_nan_of_the_only_key_shows_in_gradients() -> Result<()> {
    let mut inputs = Inputs::new(shape([1, 1, 1, 1, 1, 4, 4]), 552)?;
    inputs.k = (&inputs.k * f64::NAN)?;
    let spec = AttendSpec::causal();
    for backend in [Backend::Dense, Backend::Fused] {
        for (name, x) in run(&inputs, DType::F32, &spec, backend, |x| Ok(x.clone()))? {
            assert!(
                values(&x)?.iter().all(|x| x.is_nan()),
                "{name}, {backend:?}"
            );
        }
    }
    Ok(())
}

#[test]
fn attend_strided_operands_equals_dense() -> Result<()> {
    let shape = shape([2, 2, 2, 70, 70, 18, 18]);
    let inputs = Inputs::new(shape, 600)?;
    // With the number of times that an element is used.
    let layouts: [(&str, Operands, usize); 5] = [
        (
            "(B,T,H,D) in memory",
            |x| x.transpose(1, 2)?.contiguous()?.transpose(1, 2),
            1,
        ),
        (
            "width not innermost",
            |x| x.transpose(2, 3)?.contiguous()?.transpose(2, 3),
            1,
        ),
        (
            "part of a wider tensor",
            |x| Tensor::cat(&[x, x, x], 3)?.narrow(3, 18, 18),
            1,
        ),
        ("some of the tokens", |x| x.narrow(2, 3, 61), 1),
        (
            "one token for all",
            |x| x.narrow(2, 4, 1)?.broadcast_as(x.shape()),
            70,
        ),
    ];
    for (name, operands, uses) in layouts {
        for score in scores(shape) {
            let spec = AttendSpec::causal().with_score(score);
            let mut inputs = Inputs {
                q: inputs.q.clone(),
                k: inputs.k.clone(),
                v: inputs.v.clone(),
                grad: inputs.grad.clone(),
            };
            inputs.grad = operands(&inputs.grad)?;
            for dtype in [DType::F32, DType::BF16] {
                check_operands(&inputs, dtype, &spec, (operands, uses), name)?;
            }
        }
    }
    Ok(())
}

#[test]
fn attend_hard_scores_equals_dense() -> Result<()> {
    let shape = shape([1, 2, 1, 150, 150, 16, 16]);
    let inputs = Inputs::new(shape, 700)?;
    let one = inputs.q.narrow(2, 0, 1)?;
    let correlated =
        |x: &Tensor| ((x * 0.01)? + one.narrow(1, 0, 1)?.broadcast_as(x.shape())?)? * 3.;
    let times = |x: &Tensor, by: f64| x * by;
    let cases = [
        ("huge", times(&inputs.q, 30.)?, times(&inputs.k, 30.)?),
        ("correlated", correlated(&inputs.q)?, correlated(&inputs.k)?),
        (
            "all negative",
            correlated(&inputs.q)?,
            times(&correlated(&inputs.k)?, -3.)?,
        ),
        ("zero", times(&inputs.q, 0.)?, inputs.k.clone()),
    ];
    for (name, q, k) in cases {
        let inputs = Inputs {
            q,
            k,
            v: inputs.v.clone(),
            grad: inputs.grad.clone(),
        };
        for score in scores(shape) {
            for scale in [None, Some(-0.3), Some(0.)] {
                let spec = AttendSpec {
                    scale,
                    ..AttendSpec::causal().with_score(score.clone())
                };
                for dtype in [DType::F32, DType::F16] {
                    check(&inputs, dtype, &spec, name)?;
                }
            }
        }
    }
    Ok(())
}

/// K4: finite scores however low are scores, not a mask.
#[test]
fn attend_very_low_equal_scores_averages() -> Result<()> {
    for low in [-1e5f32, -1e30, -3e38] {
        let q = Tensor::ones((1, 1, 3, 1), DType::F32, &CPU)?;
        let k = Tensor::full(low, (1, 1, 70, 1), &CPU)?;
        let v = Tensor::arange(0f32, 70., &CPU)?.reshape((1, 1, 70, 1))?;
        let (q, k, v) = (
            Var::from_tensor(&q)?,
            Var::from_tensor(&k)?,
            Var::from_tensor(&v)?,
        );
        let spec = AttendSpec::bidirectional().with_backend(Backend::Fused);
        let out = attend_with_lse(&q, &k, &v, &spec)?;
        for x in values(&out.out)? {
            assert!((x - 34.5).abs() < 1e-5, "{low}: {x}");
        }
        for x in values(&out.lse)? {
            let expected = f64::from(low) + 70f64.ln();
            assert!((x - expected).abs() <= 1e-7 * expected.abs(), "{low}: {x}");
        }
        let grads = out.out.backward()?;
        let dv = grads.get(&v).map(values).transpose()?.unwrap_or_default();
        assert_eq!(dv.len(), 70);
        for x in dv {
            assert!((x - 3. / 70.).abs() < 1e-7, "{low}: dv {x}");
        }
    }
    Ok(())
}

#[test]
fn attend_phase_of_many_turns_equals_dense() -> Result<()> {
    let shape = shape([1, 2, 2, 140, 140, 16, 8]);
    let inputs = Inputs::new(shape, 800)?;
    for (alpha, phase_scale) in [
        (0.1, Some(40.)),
        (0.5, Some(3.)),
        (1., None),
        (0.1, Some(-2.)),
    ] {
        let spec = AttendSpec::causal().with_score(Score::Phase {
            amp_dim: 6,
            alpha,
            phase_scale,
        });
        check(&inputs, DType::F32, &spec, "turns")?;
    }
    Ok(())
}

#[test]
fn attend_positions_far_apart_equals_dense() -> Result<()> {
    let shape = shape([1, 2, 2, 30, 50, 8, 8]);
    let inputs = Inputs::new(shape, 900)?;
    let table = |x: Vec<i64>| {
        let len = x.len();
        Positions::explicit(Tensor::from_vec(x, (1, len), &CPU)?, None)
    };
    // Gaps of a million: no table is that long for so few pairs.
    let q = table((0..30).map(|i| i * 1_000_003).collect())?;
    let k = table((0..50).map(|i| i / 2 * 1_000_003 + i % 2).collect())?;
    for score in scores(shape) {
        for causal in [true, false] {
            let spec = AttendSpec {
                causal,
                ..AttendSpec::causal()
                    .with_score(score.clone())
                    .with_positions(q.clone(), k.clone())
            };
            check(&inputs, DType::F32, &spec, "gaps")?;
            check(&inputs, DType::F64, &spec, "gaps")?;
        }
    }
    Ok(())
}

/// One query and many keys: the keys are cut into parts, whose results are merged.
#[test]
fn attend_decoding_over_many_keys_equals_dense() -> Result<()> {
    for (i, s) in [1023, 1024, 4097, 9000].into_iter().enumerate() {
        let shape = shape([1, 4, 2, 1, s, 16, 16]);
        let inputs = Inputs::new(shape, 1000 + i as u64)?;
        for score in scores(shape) {
            for window in [None, Some(1500)] {
                let spec = AttendSpec {
                    window,
                    ..AttendSpec::causal().with_score(score.clone())
                };
                check(&inputs, DType::F32, &spec, &format!("{s} keys"))?;
            }
        }
    }
    Ok(())
}

#[test]
fn attend_without_queries_or_keys_gives_zeros() -> Result<()> {
    for dims in [
        [1, 2, 1, 0, 5, 4, 4],
        [1, 2, 1, 5, 0, 4, 4],
        [0, 2, 1, 3, 3, 4, 4],
    ] {
        let inputs = Inputs::new(shape(dims), 1100)?;
        let results = run(
            &inputs,
            DType::F32,
            &AttendSpec::causal(),
            Backend::Fused,
            |x| Ok(x.clone()),
        );
        for (name, x) in results? {
            let expected = if name == "lse" { f64::NEG_INFINITY } else { 0. };
            assert!(
                values(&x)?.iter().all(|x| *x == expected),
                "{name} of {dims:?}"
            );
        }
    }
    Ok(())
}

/// A visible NaN is the caller's and must show, as on the dense path.
#[test]
fn attend_visible_nan_shows() -> Result<()> {
    let inputs = Inputs::new(shape([1, 1, 1, 3, 3, 4, 4]), 1200)?;
    let q = inputs.q.to_dtype(DType::F32)?;
    let spec = AttendSpec::causal().with_backend(Backend::Fused);
    let nan = Tensor::full(f32::NAN, (1, 1, 1, 4), &CPU)?;
    let k = inputs
        .k
        .to_dtype(DType::F32)?
        .slice_assign(&[0..1, 0..1, 0..1, 0..4], &nan)?;
    let v = inputs.v.to_dtype(DType::F32)?;
    let out = attend_with_lse(&q, &k, &v, &spec)?;
    assert!(values(&out.out)?.iter().all(|x| x.is_nan()));
    assert!(values(&out.lse)?.iter().all(|x| x.is_nan()));
    Ok(())
}

#[test]
fn attend_gradients_repeated_are_bit_equal() -> Result<()> {
    let shape = shape([1, 1, 1, 1000, 1000, 16, 16]);
    let inputs = Inputs::new(shape, 1300)?;
    for score in scores(shape) {
        let spec = AttendSpec::causal().with_score(score);
        let once = || {
            run(
                &inputs,
                DType::F32,
                &spec,
                Backend::Fused,
                |x| Ok(x.clone()),
            )
        };
        let first = once()?;
        for _ in 0..5 {
            for ((name, first), (_, again)) in first.iter().zip(&once()?) {
                let (first, again) = (values(first)?, values(again)?);
                assert!(first == again, "{name} differs");
            }
        }
    }
    Ok(())
}

/// K23: a batch row does not depend on its neighbours.
#[test]
fn attend_equal_batch_rows_are_bit_equal() -> Result<()> {
    let shape = shape([1, 2, 1, 200, 200, 16, 16]);
    let one = Inputs::new(shape, 1400)?;
    let three = |x: &Tensor| Tensor::cat(&[x, x, x], 0);
    let inputs = Inputs {
        q: three(&one.q)?,
        k: three(&one.k)?,
        v: three(&one.v)?,
        grad: three(&one.grad)?,
    };
    for (name, x) in run(
        &inputs,
        DType::F32,
        &AttendSpec::causal(),
        Backend::Fused,
        |x| Ok(x.clone()),
    )? {
        let first = values(&x.narrow(0, 0, 1)?)?;
        for row in 1..3 {
            assert!(
                values(&x.narrow(0, row, 1)?)? == first,
                "{name} of row {row}"
            );
        }
    }
    Ok(())
}
