//! TAPA, arXiv 2509.12635v1.

use super::{assert_gradients_match_differences, max_difference, normal, values};
use candle_core::{DType, Device, Result, Tensor, Var, D};
use candle_nn::{VarBuilder, VarMap};
use candle_posenc::encoding::{EncodingConfig, PhaseForm, PhaseNorm, Tapa, TapaConfig};
use candle_posenc::{
    attend, attend_with_lse, AttendSpec, Backend, Encoding, ModelDims, PosState, Positions, Qkv,
    Score,
};
use rand::{rngs::StdRng, SeedableRng};
use std::f64::consts::TAU;

fn dims(heads: usize, kv_heads: usize, head_dim: usize) -> ModelDims {
    ModelDims {
        width: heads * head_dim,
        heads,
        kv_heads,
        head_dim,
        layers: 1,
        max_positions: 512,
    }
}

fn build(config: &TapaConfig, dims: &ModelDims) -> Result<Tapa> {
    Tapa::new(config, dims, VarBuilder::zeros(DType::F64, &Device::Cpu))
}

fn encode(tapa: &Tapa, q: &Tensor, k: &Tensor) -> Result<(Tensor, Tensor)> {
    let state = PosState {
        positions: Positions::first(q.dim(2)?),
        rotation: None,
    };
    let (q, k, v) = (q.clone(), k.clone(), k.clone());
    let encoded = tapa.encode(0, Qkv { q, k, v }, &state)?;
    Ok((encoded.q, encoded.k))
}

fn dense(tapa: &Tapa) -> AttendSpec {
    AttendSpec::causal()
        .with_score(tapa.score(0))
        .with_backend(Backend::Dense)
}

/// The scores of N pairs, each at all of these distances: the log-sum-exp over a single key is its score.
/// q and k (N, 1, 1, D) → (N, distances).
fn scores(
    tapa: &Tapa,
    q: &Tensor,
    k: &Tensor,
    k_position: i64,
    distances: &[i64],
) -> Result<Tensor> {
    let (q, k) = encode(tapa, q, k)?;
    let (pairs, _, _, width) = q.dims4()?;
    let q = q.broadcast_as((pairs, 1, distances.len(), width))?;
    let v = k.zeros_like()?.narrow(3, 0, 1)?;
    let positions: Vec<i64> = distances.iter().map(|d| k_position + d).collect();
    let positions = Tensor::from_vec(positions, (1, distances.len()), &Device::Cpu)?;
    let spec = dense(tapa).with_positions(
        Positions::explicit(positions, None)?,
        Positions::Span {
            start: k_position,
            len: 1,
        },
    );
    attend_with_lse(&q, &k, &v, &spec)?.lse.squeeze(1)
}

/// Equations 12 and 16 for one pair, and |a|.
fn direct_score(
    q: &[f64],
    k: &[f64],
    amp_dim: usize,
    config: &TapaConfig,
    distance: i64,
) -> (f64, f64) {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let root = |width: usize| (width as f64).sqrt();
    let ((q_amp, q_phase), (k_amp, k_phase)) = (q.split_at(amp_dim), k.split_at(amp_dim));
    let amplitude = dot(q_amp, k_amp) / root(amp_dim);
    let phase = match config.phase {
        PhaseForm::Quadratic => dot(q_phase, k_phase),
        PhaseForm::Linear => q_phase.iter().chain(k_phase).sum(),
    } / root(q_phase.len());
    let turns = match distance {
        0 => 0.,
        _ => (distance as f64).powf(config.alpha) * phase,
    };
    (amplitude * (TAU * turns).cos(), amplitude.abs())
}

#[test]
fn tapa_score_of_a_token_with_itself_is_the_amplitude() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(1);
    let (q, k) = (
        normal(&mut rng, &[50, 1, 1, 12])?,
        normal(&mut rng, &[50, 1, 1, 12])?,
    );
    for (theta, alpha, phase) in [
        (0.5, 0.1, PhaseForm::Quadratic),
        (0.25, 1., PhaseForm::Quadratic),
        (0.75, 2., PhaseForm::Linear),
    ] {
        let config = TapaConfig {
            theta,
            alpha,
            phase,
            phase_norm: None,
        };
        let amp_dim = (theta * 12.) as usize;
        let tapa = build(&config, &dims(1, 1, 12))?;
        let scores = values(&scores(&tapa, &q, &k, 7, &[0])?)?;
        let (q, k) = (q.narrow(3, 0, amp_dim)?, k.narrow(3, 0, amp_dim)?);
        let amplitudes = values(&((q * k)?.sum(3)? / (amp_dim as f64).sqrt())?)?;
        for (score, amplitude) in scores.iter().zip(amplitudes) {
            assert!(
                (score - amplitude).abs() < 1e-14 * 12.,
                "{score} {amplitude}"
            );
        }
    }
    Ok(())
}

#[test]
fn tapa_scores_equal_equations_12_and_16() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(2);
    let (q, k) = (
        normal(&mut rng, &[40, 1, 1, 16])?,
        normal(&mut rng, &[40, 1, 1, 16])?,
    );
    let distances = [0, 1, 2, 5, 511, 65_536];
    for phase in [PhaseForm::Quadratic, PhaseForm::Linear] {
        for (theta, alpha) in [(0.5, 0.1), (0.25, 0.5), (0.75, 1.)] {
            let config = TapaConfig {
                theta,
                alpha,
                phase,
                phase_norm: None,
            };
            let tapa = build(&config, &dims(1, 1, 16))?;
            let found = scores(&tapa, &q, &k, 3, &distances)?.to_vec2::<f64>()?;
            let (q, k) = (values(&q)?, values(&k)?);
            for (i, row) in found.iter().enumerate() {
                let (q, k) = (&q[16 * i..][..16], &k[16 * i..][..16]);
                for (score, distance) in row.iter().zip(distances) {
                    let amp_dim = (theta * 16.) as usize;
                    let (expected, amplitude) = direct_score(q, k, amp_dim, &config, distance);
                    // Turns t are rounded to 2⁻⁵³·t, at 65,536 tokens and α = 1 about 10⁶ of them.
                    let turns = 20. * (distance as f64).powf(alpha);
                    let bound = 1e-14 + amplitude * TAU * 16. * turns * f64::EPSILON;
                    assert!(
                        (score - expected).abs() < bound,
                        "{score} {expected} {distance}"
                    );
                }
            }
        }
    }
    Ok(())
}

#[test]
fn tapa_with_all_positions_shifted_gives_the_same_bits() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(3);
    let q = normal(&mut rng, &[1, 4, 5, 8])?;
    let (k, v) = (
        normal(&mut rng, &[1, 2, 9, 8])?,
        normal(&mut rng, &[1, 2, 9, 8])?,
    );
    for phase in [PhaseForm::Quadratic, PhaseForm::Linear] {
        let config = TapaConfig {
            phase,
            ..TapaConfig::default()
        };
        let tapa = build(&config, &dims(4, 2, 8))?;
        let (q, k) = (encode(&tapa, &q, &q)?.0, encode(&tapa, &k, &k)?.1);
        let outputs = |shift: i64| {
            let queries = Positions::Span {
                start: shift + 4,
                len: 5,
            };
            let keys = Positions::Span {
                start: shift,
                len: 9,
            };
            attend(&q, &k, &v, &dense(&tapa).with_positions(queries, keys))
        };
        for shift in [1, 1000, 1 << 40] {
            assert_eq!(max_difference(&outputs(0)?, &outputs(shift)?)?, 0.);
        }
    }
    Ok(())
}

#[test]
fn tapa_gradients_match_finite_differences() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(4);
    let norms = [
        None,
        Some(PhaseNorm {
            gain: 0.4,
            learned: false,
        }),
        Some(PhaseNorm {
            gain: 0.3,
            learned: true,
        }),
    ];
    // Two tokens: nothing but distances 0 and 1. Six: more of them.
    for tokens in [2, 6] {
        for phase in [PhaseForm::Quadratic, PhaseForm::Linear] {
            for phase_norm in norms {
                let config = TapaConfig {
                    phase,
                    phase_norm,
                    ..TapaConfig::default()
                };
                let weights = VarMap::new();
                let vb = VarBuilder::from_varmap(&weights, DType::F64, &Device::Cpu);
                let tapa = Tapa::new(&config, &dims(4, 2, 8), vb)?;
                let mut variable =
                    |heads: usize| Var::from_tensor(&normal(&mut rng, &[2, heads, tokens, 8])?);
                let (q, k, v) = (variable(4)?, variable(2)?, variable(2)?);
                let wanted = variable(4)?.as_tensor().detach();
                let loss = || {
                    let (q, k) = encode(&tapa, &q, &k)?;
                    (attend(&q, &k, &v, &dense(&tapa))? * &wanted)?.sum_all()
                };
                let gains = weights.all_vars();
                let expected = if phase_norm.is_some_and(|norm| norm.learned) {
                    2
                } else {
                    0
                };
                assert_eq!(gains.len(), expected);
                let mut variables = vec![("q", &q), ("k", &k), ("v", &v)];
                variables.extend(gains.iter().map(|gain| ("gain", gain)));
                assert_gradients_match_differences(&variables, loss)?;
            }
        }
    }
    Ok(())
}

#[test]
fn tapa_gradient_of_the_phase_at_distance_zero_is_zero() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(5);
    let mut variable = |tokens: usize| Var::from_tensor(&normal(&mut rng, &[1, 1, tokens, 8])?);
    let (q, k, v) = (variable(1)?, variable(3)?, variable(3)?);
    let tapa = build(&TapaConfig::default(), &dims(1, 1, 8))?;
    let at =
        |tokens: usize| Positions::explicit(Tensor::full(5i64, (1, tokens), &Device::Cpu)?, None);
    let spec = dense(&tapa).with_positions(at(1)?, at(3)?);
    let gradients = attend(&q, &k, &v, &spec)?.sqr()?.sum_all()?.backward()?;
    for variable in [&q, &k] {
        let Some(gradient) = gradients.get(variable) else {
            panic!("no gradient")
        };
        let part = |start: usize| -> Result<Vec<f64>> { values(&gradient.narrow(3, start, 4)?) };
        assert!(part(0)?.iter().all(|g| g.is_finite() && *g != 0.));
        assert!(part(4)?.iter().all(|g| *g == 0.));
    }
    Ok(())
}

#[test]
fn tapa_phase_of_ten_thousand_turns_is_reduced_before_the_cosine() -> Result<()> {
    // Exact in f32: a = 2·1/√4·… = 1, φ = turns·1/√4·2. An unreduced angle of 62,832 would be off by 10⁻³.
    let tapa = build(&TapaConfig::default(), &dims(1, 1, 8))?;
    for (turns, expected) in [
        (1000f32, 1f32),
        (1234.25, 0.),
        (4321.5, -1.),
        (9999.75, 0.),
        (10_000.125, std::f32::consts::FRAC_1_SQRT_2),
    ] {
        let q = [2f32, 0., 0., 0., 2. * turns, 0., 0., 0.];
        let k = [1f32, 0., 0., 0., 1., 0., 0., 0.];
        for sign in [1f64, -1.] {
            let q = (Tensor::new(&q, &Device::Cpu)?.reshape((1, 1, 1, 8))? * sign)?;
            let k = Tensor::new(&k, &Device::Cpu)?.reshape((1, 1, 1, 8))?;
            let score = scores(&tapa, &q, &k, 0, &[1])?.to_vec2::<f32>()?[0][0];
            let error = (score - sign as f32 * expected).abs();
            assert!(error < 1e-6, "{turns} turns: {score}, off by {error}");
        }
    }
    Ok(())
}

#[test]
fn tapa_with_phases_of_thousands_of_turns_stays_within_the_rounding_of_the_turns() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(6);
    const SCALE: f64 = 40.;
    let config = TapaConfig::default();
    let tapa = build(&config, &dims(1, 1, 16))?;
    let single = |x: Tensor| x.to_dtype(DType::F32);
    let q = single((normal(&mut rng, &[200, 1, 1, 16])? * SCALE)?)?;
    let k = single((normal(&mut rng, &[200, 1, 1, 16])? * SCALE)?)?;
    let distances = [1, 3, 1000];
    let found = scores(&tapa, &q, &k, 0, &distances)?.to_vec2::<f32>()?;
    let (q, k) = (values(&q)?, values(&k)?);
    let mut most_turns = 0f64;
    for (i, row) in found.iter().enumerate() {
        let (q, k) = (&q[16 * i..][..16], &k[16 * i..][..16]);
        for (score, distance) in row.iter().zip(distances) {
            let (expected, amplitude) = direct_score(q, k, 8, &config, distance);
            let terms = |range: std::ops::Range<usize>| -> f64 {
                range.map(|j| (q[j] * k[j]).abs()).sum::<f64>() / 8f64.sqrt()
            };
            // Sums of eight products, each operation rounded to 2⁻²⁴ of what it sums.
            let unit = 2f64.powi(-24);
            let turns = terms(8..16) * (distance as f64).powf(config.alpha);
            let bound = unit * (12. * terms(0..8) + TAU * amplitude * 12. * turns);
            assert!(
                (*score as f64 - expected).abs() <= bound,
                "{score} {expected} {bound}"
            );
            most_turns = most_turns.max(turns);
        }
    }
    assert!(most_turns > 5000., "{most_turns}");
    Ok(())
}

/// Equation 16 by tensors of (T, T), with nothing augmented.
fn direct_linear_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    amp_dim: usize,
    alpha: f64,
) -> Result<Tensor> {
    let (_, _, t, width) = q.dims4()?;
    let phase_dim = width - amp_dim;
    let amplitude = q
        .narrow(3, 0, amp_dim)?
        .contiguous()?
        .matmul(&k.narrow(3, 0, amp_dim)?.transpose(2, 3)?.contiguous()?)?;
    let q_sum = q.narrow(3, amp_dim, phase_dim)?.sum_keepdim(3)?;
    let k_sum = k.narrow(3, amp_dim, phase_dim)?.sum_keepdim(3)?;
    let phase = (q_sum.broadcast_add(&k_sum.transpose(2, 3)?)? / (phase_dim as f64).sqrt())?;
    let pairs = |value: &dyn Fn(usize, usize) -> f64| {
        let values: Vec<f64> = (0..t)
            .flat_map(|m| (0..t).map(move |n| value(m, n)))
            .collect();
        Tensor::from_vec(values, (t, t), &Device::Cpu)
    };
    let distance = pairs(&|m, n| {
        if m == n {
            0.
        } else {
            (m.abs_diff(n) as f64).powf(alpha)
        }
    })?;
    let hidden = pairs(&|m, n| if n > m { f64::NEG_INFINITY } else { 0. })?;
    let turns = phase.broadcast_mul(&distance)?;
    let scores = ((amplitude / (amp_dim as f64).sqrt())? * (turns * TAU)?.cos()?)?;
    candle_nn::ops::softmax(&scores.broadcast_add(&hidden)?, D::Minus1)?.matmul(v)
}

#[test]
fn tapa_linear_phase_equals_its_direct_formula_in_every_dtype() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(7);
    let config = TapaConfig {
        phase: PhaseForm::Linear,
        alpha: 0.5,
        ..TapaConfig::default()
    };
    let shape = [1, 2, 24, 32];
    let (q, k) = (normal(&mut rng, &shape)?, normal(&mut rng, &shape)?);
    let (v, wanted) = (normal(&mut rng, &shape)?, normal(&mut rng, &shape)?);
    let tapa = build(&config, &dims(2, 2, 32))?;
    // Of the greatest output, gradient of q and gradient of k. In bf16 outputs and gradients are rounded to 2⁻⁹, and the
    // weights of up to 24 keys have scores built from rounded gradients; what the split must prevent, a phase in bf16
    // or a gradient counted twice, would be off by 10⁻¹ or more.
    for (dtype, out_bound, grad_bound) in [
        (DType::F64, 1e-13, 1e-13),
        (DType::F32, 3e-6, 1e-5),
        (DType::F16, 1e-3, 2e-3),
        (DType::BF16, 5e-3, 1e-2),
    ] {
        let round = |x: &Tensor| Var::from_tensor(&x.to_dtype(dtype)?);
        let (q, k, v) = (round(&q)?, round(&k)?, round(&v)?);
        let exact = |x: &Var| Var::from_tensor(&x.to_dtype(DType::F64)?);
        let (q64, k64, v64) = (exact(&q)?, exact(&k)?, exact(&v)?);
        let expected = direct_linear_attention(&q64, &k64, &v64, 16, config.alpha)?;
        let expected_grads = (&expected * &wanted)?.sum_all()?.backward()?;

        let (q_augmented, k_augmented) = encode(&tapa, &q, &k)?;
        let out = attend(&q_augmented, &k_augmented, &v, &dense(&tapa))?;
        let grads = (&out.to_dtype(DType::F64)? * &wanted)?
            .sum_all()?
            .backward()?;
        let relative = |found: &Tensor, expected: &Tensor| -> Result<f64> {
            let greatest = expected.abs()?.max_all()?.to_scalar::<f64>()?;
            Ok(max_difference(found, expected)? / greatest)
        };
        let out_error = relative(&out, &expected)?;
        assert!(out_error < out_bound, "{dtype:?} output {out_error}");
        for (name, found, expected) in [("q", &q, &q64), ("k", &k, &k64), ("v", &v, &v64)] {
            let (Some(found), Some(expected)) = (grads.get(found), expected_grads.get(expected))
            else {
                panic!("{name} has no gradient")
            };
            let error = relative(found, expected)?;
            assert!(error < grad_bound, "{dtype:?} gradient of {name}: {error}");
        }
    }
    Ok(())
}

#[test]
fn tapa_linear_phase_in_half_precision_keeps_the_sums_to_twice_its_digits() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(8);
    let config = TapaConfig {
        phase: PhaseForm::Linear,
        ..TapaConfig::default()
    };
    let tapa = build(&config, &dims(1, 1, 64))?;
    for (dtype, digits) in [(DType::BF16, 8), (DType::F16, 11)] {
        let half = |x: Tensor| x.to_dtype(dtype);
        let q = half(normal(&mut rng, &[500, 1, 1, 64])?)?;
        let k = half(normal(&mut rng, &[500, 1, 1, 64])?)?;
        let distances = [1, 100, 10_000];
        let found = scores(&tapa, &q, &k, 0, &distances)?.to_vec2::<f32>()?;
        let (q, k) = (values(&q)?, values(&k)?);
        for (i, row) in found.iter().enumerate() {
            let (q, k) = (&q[64 * i..][..64], &k[64 * i..][..64]);
            for (score, distance) in row.iter().zip(distances) {
                let (expected, amplitude) = direct_score(q, k, 32, &config, distance);
                let sum = |x: &[f64]| x[32..].iter().sum::<f64>().abs();
                let size = |x: &[f64]| x.iter().map(|x| x.abs()).sum::<f64>();
                // high and low together leave 2^(−2·digits) of a sum; the sums themselves are made in f32.
                let lost = (sum(q) + sum(k)) * 2f64.powi(-2 * digits)
                    + (size(&q[32..]) + size(&k[32..])) * 34. * 2f64.powi(-24);
                let turns = lost / 32f64.sqrt() * (distance as f64).powf(config.alpha);
                let terms: f64 = (0..32).map(|j| (q[j] * k[j]).abs()).sum();
                let bound = TAU * amplitude * turns + terms * 40. * 2f64.powi(-24);
                assert!(
                    (*score as f64 - expected).abs() <= bound,
                    "{dtype:?} {score} {expected} {bound}"
                );
            }
        }
    }
    Ok(())
}

/// Mean and variance of the columns, and the standard errors of both.
fn moments(samples: &Tensor) -> Result<Vec<[f64; 4]>> {
    let columns = samples.t()?.contiguous()?.to_vec2::<f64>()?;
    Ok(columns
        .iter()
        .map(|column| {
            let count = column.len() as f64;
            let mean = column.iter().sum::<f64>() / count;
            let central =
                |power: i32| column.iter().map(|x| (x - mean).powi(power)).sum::<f64>() / count;
            let (variance, fourth) = (central(2), central(4));
            let variance_error = ((fourth - variance * variance) / count).sqrt();
            [mean, variance, (variance / count).sqrt(), variance_error]
        })
        .collect())
}

#[test]
fn tapa_mean_score_decays_with_distance_as_theorem_3_2_says() -> Result<()> {
    // Amplitude 1 for every pair, phases from normal q and k of variance σ² = 1/2 in D_P = 2 dimensions. Then the mean
    // of cos(2πdφ), d = |m−n|^α, is (1 + (2πdσ²)²/D_P)^(−D_P/2), which falls like d^(−D_P) = |m−n|^(−α(1−θ)D).
    const PAIRS: usize = 400_000;
    let mut rng = StdRng::seed_from_u64(9);
    let config = TapaConfig {
        alpha: 0.5,
        ..TapaConfig::default()
    };
    let tapa = build(&config, &dims(1, 1, 4))?;
    let mut side = || -> Result<Tensor> {
        let amplitude = Tensor::full(0.5f64.sqrt().sqrt(), (PAIRS, 1, 1, 2), &Device::Cpu)?;
        let phase = (normal(&mut rng, &[PAIRS, 1, 1, 2])? * 0.5f64.sqrt())?;
        Tensor::cat(&[amplitude, phase], 3)
    };
    let (q, k) = (side()?, side()?);
    let distances = [1i64, 4, 16];
    let moments = moments(&scores(&tapa, &q, &k, 0, &distances)?)?;
    for ([mean, _, error, _], distance) in moments.iter().zip(distances) {
        let d = (distance as f64).powf(config.alpha);
        let expected = 1. / (1. + (TAU * d * 0.5).powi(2) / 2.);
        assert!(
            (mean - expected).abs() < 5. * error,
            "{distance}: {mean} {expected} ± {error}"
        );
    }
    // From 1 to 4 and on to 16 tokens the exponent α·D_P = 1 asks for a quarter each, from far enough on.
    let ratios = [moments[1][0] / moments[0][0], moments[2][0] / moments[1][0]];
    assert!((0.2..0.36).contains(&ratios[0]), "{ratios:?}");
    assert!((0.14..0.38).contains(&ratios[1]), "{ratios:?}");
    Ok(())
}

#[test]
fn tapa_variance_of_the_score_stays_above_half_the_amplitudes_as_theorem_3_3_says() -> Result<()> {
    const PAIRS: usize = 200_000;
    let mut rng = StdRng::seed_from_u64(10);
    let tapa = build(&TapaConfig::default(), &dims(1, 1, 8))?;
    let (q, k) = (
        normal(&mut rng, &[PAIRS, 1, 1, 8])?,
        normal(&mut rng, &[PAIRS, 1, 1, 8])?,
    );
    let distances = [0i64, 1, 64, 4096, 1_000_000];
    let moments = moments(&scores(&tapa, &q, &k, 0, &distances)?)?;
    // a = q_A·k_A/√D_A of standard normals has variance 1.
    let [_, amplitude, _, amplitude_error] = moments[0];
    assert!((amplitude - 1.).abs() < 5. * amplitude_error, "{amplitude}");
    for ([_, variance, _, error], distance) in moments.iter().zip(distances).skip(1) {
        assert!(
            variance + 5. * error > 0.5,
            "{distance}: {variance} ± {error}"
        );
        let d = (distance as f64).powf(0.1);
        let expected = (1. + (1. + (2. * TAU * d).powi(2) / 4.).powi(-2)) / 2.;
        assert!(
            (variance - expected).abs() < 5. * error,
            "{distance}: {variance} {expected}"
        );
    }
    Ok(())
}

#[test]
fn tapa_phase_norm_bounds_the_phase_by_gain_squared_times_root_of_width() -> Result<()> {
    const GAIN: f64 = 0.3;
    let mut rng = StdRng::seed_from_u64(11);
    let config = TapaConfig {
        phase_norm: Some(PhaseNorm {
            gain: GAIN,
            learned: false,
        }),
        ..TapaConfig::default()
    };
    let tapa = build(&config, &dims(1, 1, 16))?;
    let bound = GAIN * GAIN * 8f64.sqrt();
    let mut greatest = 0f64;
    for size in [1e-8, 1e-3, 1., 1e6] {
        let q = (normal(&mut rng, &[1, 1, 64, 16])? * size)?;
        let k = (normal(&mut rng, &[1, 1, 64, 16])? * size)?;
        // Keys along the queries have the greatest phases.
        for k in [&k, &q] {
            let (q, k) = encode(&tapa, &q, k)?;
            assert_eq!(q.dims(), [1, 1, 64, 16]);
            let phase = |x: &Tensor| x.narrow(3, 8, 8)?.contiguous();
            let phases = (phase(&q)?.matmul(&phase(&k)?.transpose(2, 3)?)? / 8f64.sqrt())?;
            let most = phases.abs()?.max_all()?.to_scalar::<f64>()?;
            assert!(most <= bound * (1. + 1e-12), "{size}: {most} above {bound}");
            greatest = greatest.max(most);
        }
    }
    assert!(greatest > bound * (1. - 1e-9), "{greatest}");
    Ok(())
}

#[test]
fn tapa_phase_norm_keeps_amplitudes_and_takes_zeros_and_half_precision() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(12);
    let config = TapaConfig {
        phase_norm: Some(PhaseNorm::default()),
        ..TapaConfig::default()
    };
    let tapa = build(&config, &dims(2, 1, 8))?;
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let q = normal(&mut rng, &[1, 2, 3, 8])?.to_dtype(dtype)?;
        let zeros = Var::from_tensor(&Tensor::zeros((1, 1, 3, 8), dtype, &Device::Cpu)?)?;
        // As projections leave it: the head dimension is not the outermost in memory.
        let strided = q.transpose(1, 2)?.contiguous()?.transpose(1, 2)?;
        let (encoded, encoded_zeros) = encode(&tapa, &strided, &zeros)?;
        assert_eq!(encoded.dtype(), dtype);
        assert!(encoded.is_contiguous());
        assert_eq!(
            max_difference(&encoded.narrow(3, 0, 4)?, &q.narrow(3, 0, 4)?)?,
            0.
        );
        let exact = q.to_dtype(DType::F64)?.narrow(3, 4, 4)?;
        let rms = (exact.sqr()?.mean_keepdim(3)? + 1e-6)?.sqrt()?;
        let expected = (exact.broadcast_div(&rms)? * 0.3)?;
        let digits = match dtype {
            DType::F32 => 20,
            DType::F16 => 11,
            _ => 8,
        };
        let error = max_difference(&encoded.narrow(3, 4, 4)?, &expected)?;
        assert!(error < 2f64.powi(-digits), "{dtype:?} {error}");
        let loss = encoded_zeros.to_dtype(DType::F32)?.sum_all()?;
        assert_eq!(loss.to_scalar::<f32>()?, 0.);
        let gradients = loss.backward()?;
        let Some(gradient) = gradients.get(&zeros) else {
            panic!("no gradient")
        };
        assert!(values(gradient)?.iter().all(|g| g.is_finite()));
    }
    Ok(())
}

#[test]
fn tapa_learned_gains_start_at_the_fixed_gain_with_one_weight_for_each_head() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(13);
    let norm = |learned| TapaConfig {
        phase_norm: Some(PhaseNorm {
            gain: 0.25,
            learned,
        }),
        ..TapaConfig::default()
    };
    let dims = ModelDims {
        layers: 2,
        ..dims(4, 2, 8)
    };
    let weights = VarMap::new();
    let vb = VarBuilder::from_varmap(&weights, DType::F32, &Device::Cpu);
    let learned = Tapa::new(&norm(true), &dims, vb.pp("model"))?;
    let fixed = build(&norm(false), &dims)?;
    let (q, k) = (
        normal(&mut rng, &[1, 4, 3, 8])?,
        normal(&mut rng, &[1, 2, 3, 8])?,
    );
    let (a, b) = (encode(&learned, &q, &k)?, encode(&fixed, &q, &k)?);
    assert!(max_difference(&a.0, &b.0)? < 1e-15 && max_difference(&a.1, &b.1)? < 1e-15);
    let mut shapes: Vec<(String, Vec<usize>)> = match weights.data().lock() {
        Ok(data) => data
            .iter()
            .map(|(name, var)| (name.clone(), var.dims().to_vec()))
            .collect(),
        Err(error) => panic!("{error}"),
    };
    shapes.sort();
    let expected: Vec<(String, Vec<usize>)> = (0..2)
        .flat_map(|layer| {
            [("k", 2), ("q", 4)].map(|(side, heads)| {
                (
                    format!("model.layers.{layer}.self_attn.phase_gain_{side}"),
                    vec![heads],
                )
            })
        })
        .collect();
    assert_eq!(shapes, expected);
    Ok(())
}

#[test]
fn tapa_with_parameters_out_of_range_is_an_error_that_names_them() {
    let message = |config: TapaConfig| match build(&config, &dims(2, 2, 16)) {
        Ok(_) => panic!("{config:?} was accepted"),
        Err(error) => error.to_string(),
    };
    let default = TapaConfig::default;
    for theta in [0., 1., -0.5, 0.3, 0.01, 2., f64::NAN] {
        let message = message(TapaConfig { theta, ..default() });
        assert!(message.contains(&format!("theta {theta}")), "{message}");
    }
    // Distances to the power of 300 are NaN in the score.
    for alpha in [0., -1., f64::INFINITY, f64::NAN, 300.] {
        let message = message(TapaConfig { alpha, ..default() });
        assert!(message.contains(&format!("alpha {alpha}")), "{message}");
    }
    for gain in [0., -1., f64::NAN] {
        let phase_norm = Some(PhaseNorm {
            gain,
            learned: true,
        });
        let message = message(TapaConfig {
            phase_norm,
            ..default()
        });
        assert!(message.contains("gain"), "{message}");
    }
}

#[test]
fn tapa_scores_by_the_split_of_the_head_in_both_forms() -> Result<()> {
    for phase in [PhaseForm::Quadratic, PhaseForm::Linear] {
        let config = TapaConfig {
            theta: 0.25,
            phase,
            ..TapaConfig::default()
        };
        let expected = Score::Phase {
            amp_dim: 4,
            alpha: 0.1,
            phase_scale: Some(1. / 12f64.sqrt()),
        };
        assert_eq!(build(&config, &dims(1, 1, 16))?.score(0), expected);
    }
    Ok(())
}

#[test]
fn tapa_config_reads_defaults_and_rejects_unknown_fields() {
    let read = |text: &str| serde_json::from_str::<EncodingConfig>(text);
    match read(r#"{"type": "tapa", "phase": "linear", "phase_norm": {"learned": true}}"#) {
        Ok(config) => assert_eq!(
            config,
            EncodingConfig::Tapa(TapaConfig {
                theta: 0.5,
                alpha: 0.1,
                phase: PhaseForm::Linear,
                phase_norm: Some(PhaseNorm {
                    gain: 0.3,
                    learned: true
                }),
            })
        ),
        Err(error) => panic!("{error}"),
    }
    assert!(read(r#"{"type": "tapa", "phase_nrom": {}}"#).is_err());
}
