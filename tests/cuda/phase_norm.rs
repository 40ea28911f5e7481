//! TAPA's phase norm, values and every gradient, held to the CPU's path in f64 by the rule of the house: at most twice
//! the error of the CPU's path in the same dtype.

use crate::layers::{close, random, values};
use crate::reference::{accumulator, store, unit_roundoff, Storage, FLOOR, STORAGES};
use crate::report::Report;
use crate::target::Target;
use crate::{test, Test};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::VarBuilder;
use candle_posenc::encoding::{PhaseNorm, Tapa, TapaConfig};
use candle_posenc::{Encoding, ModelDims, PosState, Positions, Qkv};
use std::collections::HashMap;

const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];
const REPEATS: usize = 20;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Gains {
    Fixed,
    /// Weights that are not trained.
    Frozen,
    Trained,
}

/// One call.
#[derive(Debug, Clone, Copy)]
struct Case {
    /// (B,H,T,D) of the queries.
    q: [usize; 4],
    kv_heads: usize,
    /// Columns that pass.
    amplitude: usize,
    gains: Gains,
    /// Whether gradients of q and k are asked for.
    tracked: bool,
    /// Of q; k's is the next one.
    storage: Storage,
    /// Tokens of zeros, small and large ones among the others.
    uneven: bool,
}

const fn case(q: [usize; 4], kv_heads: usize, amplitude: usize) -> Case {
    Case {
        q,
        kv_heads,
        amplitude,
        gains: Gains::Trained,
        tracked: true,
        storage: Storage::Contiguous,
        uneven: false,
    }
}

/// As models have them; one column each way; odd widths; rows wider than a warp reads at once; one token; more rows than
/// blocks that leave sums.
const CASES: [Case; 11] = [
    case([2, 6, 70, 64], 6, 32),
    case([3, 4, 33, 128], 2, 64),
    case([1, 2, 5, 2], 1, 1),
    case([2, 3, 7, 22], 3, 11),
    case([2, 5, 31, 80], 5, 20),
    case([1, 9, 17, 16], 3, 8),
    case([2, 2, 9, 272], 1, 16),
    case([1, 2, 6, 300], 2, 299),
    case([4, 8, 1, 64], 2, 16),
    case([1, 1, 1, 3], 1, 2),
    case([24, 64, 64, 64], 32, 32),
];

pub fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for dtype in DTYPES {
        tests.push(test(
            format!("phase_norm_{dtype:?}_equals_reference_in_value_and_gradients"),
            move |target, report| {
                for case in CASES {
                    for gains in [Gains::Trained, Gains::Fixed] {
                        hold(target, Case { gains, ..case }, dtype, report)?;
                    }
                }
                all_have_run(target, dtype, report);
                Ok(())
            },
        ));
        tests.push(test(
            format!("phase_norm_{dtype:?}_of_any_strides_equals_reference"),
            move |target, report| {
                for case in [CASES[1], CASES[3], CASES[4], CASES[6]] {
                    for storage in STORAGES {
                        hold(target, Case { storage, ..case }, dtype, report)?;
                    }
                }
                Ok(())
            },
        ));
        tests.push(test(
            format!("phase_norm_{dtype:?}_gives_gradients_to_tracked_inputs_alone"),
            move |target, report| {
                for case in [CASES[0], CASES[3]] {
                    for (tracked, gains) in [(true, Gains::Frozen), (false, Gains::Trained)] {
                        let case = Case {
                            tracked,
                            gains,
                            ..case
                        };
                        hold(target, case, dtype, report)?;
                    }
                }
                Ok(())
            },
        ));
        tests.push(test(
            format!("phase_norm_{dtype:?}_of_zeros_and_of_uneven_tokens_equals_reference"),
            move |target, report| {
                for case in [CASES[0], CASES[4]] {
                    let uneven = true;
                    hold(target, Case { uneven, ..case }, dtype, report)?;
                }
                Ok(())
            },
        ));
    }
    tests.push(test("phase_norm_repeats_bit_for_bit", repeats));
    tests.push(test("phase_norm_of_nothing_is_nothing", nothing));
    tests
}

/// What a call gives: a tensor's values, empty where there is no gradient.
#[derive(Debug, Clone, PartialEq)]
struct Results {
    /// Of q and k.
    out: [Vec<f64>; 2],
    inputs: [Vec<f64>; 2],
    gains: [Vec<f64>; 2],
}

/// What goes into a call, in f64 on the CPU with `dtype`'s values: q and k, their upstream gradients and gains.
struct Inputs {
    x: [Tensor; 2],
    upstream: [Tensor; 2],
    gains: [Tensor; 2],
}

impl Inputs {
    fn new(case: &Case, dtype: DType) -> Result<Self> {
        let [b, heads, t, d] = case.q;
        let shapes = [case.q, [b, case.kv_heads, t, d]];
        let given = |x: Tensor| x.to_dtype(dtype)?.to_dtype(DType::F64);
        let sizes = Tensor::from_iter((0..t).map(|i| [1., 1e-3, 0., 30.][i % 4]), &Device::Cpu)?
            .reshape((t, 1))?;
        let x = |which: usize| -> Result<Tensor> {
            let x = random(&shapes[which], 1., 1 + which as u64)?;
            given(match case.uneven {
                true => x.broadcast_mul(&sizes)?,
                false => x,
            })
        };
        let upstream = |which: usize| given(random(&shapes[which], 1., 3 + which as u64)?);
        let gains = |heads: usize| given((random(&[heads], 0.2, 5)? + 0.4)?);
        Ok(Self {
            x: [x(0)?, x(1)?],
            upstream: [upstream(0)?, upstream(1)?],
            gains: [gains(heads)?, gains(case.kv_heads)?],
        })
    }

    /// Moduli of the terms of each element of x's gradient, and of each gain's, summed.
    fn masses(&self, which: usize, case: &Case) -> Result<[Vec<f64>; 2]> {
        let amplitude = case.amplitude;
        let phase = |x: &Tensor| x.narrow(3, amplitude, case.q[3] - amplitude)?.abs();
        let (x, upstream) = (phase(&self.x[which])?, phase(&self.upstream[which])?);
        let rms = (x.sqr()?.mean_keepdim(3)? + 1e-6)?.sqrt()?;
        let terms = (&x * &upstream)?.broadcast_div(&rms)?;
        let mean = terms.mean_keepdim(3)?.div(&rms)?;
        let greatest = values(&self.gains[which])?.into_iter().fold(0.3, f64::max);
        let inputs = (upstream + x.broadcast_mul(&mean)?)?.broadcast_div(&rms)?;
        let inputs = (inputs * greatest)?.pad_with_zeros(3, amplitude, 0)?;
        Ok([values(&inputs)?, values(&terms.sum((0, 2, 3))?)?])
    }
}

fn results(target: &Target, case: &Case, inputs: &Inputs, dtype: DType) -> Result<Results> {
    let [_, heads, t, head_dim] = case.q;
    let placed = |x: &Tensor| x.to_dtype(dtype)?.to_device(target.device());
    let var = |x: &Tensor| Var::from_tensor(&placed(x)?);
    let gains = [var(&inputs.gains[0])?, var(&inputs.gains[1])?];
    let named = ["q", "k"].into_iter().zip(&gains).map(|(side, gain)| {
        let gain = match case.gains {
            Gains::Trained => gain.as_tensor().clone(),
            _ => gain.as_detached_tensor(),
        };
        (format!("layers.0.self_attn.phase_gain_{side}"), gain)
    });
    let named: HashMap<String, Tensor> = named.collect();
    let config = TapaConfig {
        theta: case.amplitude as f64 / head_dim as f64,
        phase_norm: Some(PhaseNorm {
            gain: 0.3,
            learned: case.gains != Gains::Fixed,
        }),
        ..TapaConfig::default()
    };
    let dims = ModelDims {
        width: heads * head_dim,
        heads,
        kv_heads: case.kv_heads,
        head_dim,
        layers: 1,
        max_positions: t,
    };
    let tapa = Tapa::new(
        &config,
        &dims,
        VarBuilder::from_tensors(named, dtype, target.device()),
    )?;
    let x = [var(&inputs.x[0])?, var(&inputs.x[1])?];
    let next = STORAGES.iter().cycle().skip_while(|x| **x != case.storage);
    let next = next.copied().nth(1).unwrap_or(case.storage);
    let stored = |x: &Var, storage| match case.tracked {
        true => store(x, storage),
        false => store(&x.as_detached_tensor(), storage),
    };
    let (q, k) = (stored(&x[0], case.storage)?, stored(&x[1], next)?);
    let state = PosState {
        positions: Positions::first(t),
        rotation: None,
    };
    target.poison()?;
    let v = k.clone();
    let encoded = tapa.encode(0, Qkv { q, k, v }, &state)?;
    let upstream = [placed(&inputs.upstream[0])?, placed(&inputs.upstream[1])?];
    let loss = ((&encoded.q * &upstream[0])?.sum_all()? + (&encoded.k * &upstream[1])?.sum_all())?;
    target.poison()?;
    let gradients = loss.backward()?;
    let gradient = |x: &Var| gradients.get(x).map_or(Ok(Vec::new()), values);
    Ok(Results {
        out: [values(&encoded.q)?, values(&encoded.k)?],
        inputs: [gradient(&x[0])?, gradient(&x[1])?],
        gains: [gradient(&gains[0])?, gradient(&gains[1])?],
    })
}

/// Holds one call to the CPU's path in f64.
fn hold(target: &Target, case: Case, dtype: DType, report: &mut Report) -> Result<()> {
    let inputs = Inputs::new(&case, dtype)?;
    let cpu = Target::new(Device::Cpu, false)?;
    let plain_case = Case {
        storage: Storage::Contiguous,
        ..case
    };
    let exact = results(&cpu, &plain_case, &inputs, DType::F64)?;
    let plain = results(&cpu, &plain_case, &inputs, dtype)?;
    let got = results(target, &case, &inputs, dtype)?;
    for (which, side) in ["q", "k"].into_iter().enumerate() {
        let what = format!("{side} of {case:?} in {dtype:?}");
        let [of_inputs, of_gains] = inputs.masses(which, &case)?;
        let parts: [(&str, Part, Option<&[f64]>); 3] = [
            ("", |x| &x.out, None),
            ("gradient of ", |x| &x.inputs, Some(&of_inputs)),
            ("gradient of the gain, ", |x| &x.gains, Some(&of_gains)),
        ];
        for (part, of, mass) in parts {
            let what = format!("{part}{what}");
            let [got, exact, plain] = [&got, &exact, &plain].map(|x| &of(x)[which]);
            match mass {
                None => close(&what, got, exact, plain, dtype, report),
                Some(mass) => close_by_mass(&what, [got, exact, plain, mass], dtype, report),
            }
        }
        let asked = |values: &[f64], asked: bool| values.is_empty() != asked;
        report.check(
            asked(&got.inputs[which], case.tracked)
                && asked(&got.gains[which], case.gains == Gains::Trained),
            || format!("gradients that are not asked for, or none, of {what}"),
        );
        // What passes does so bit for bit, either way.
        let passes = |got: &[f64], given: &Tensor| -> Result<bool> {
            let width = case.q[3];
            let given = values(given)?;
            let mut rows = got.chunks(width).zip(given.chunks(width));
            Ok(rows.all(|(got, given)| got[..case.amplitude] == given[..case.amplitude]))
        };
        report.check(
            passes(&got.out[which], &inputs.x[which])?
                && passes(&got.inputs[which], &inputs.upstream[which])?,
            || format!("the amplitude has changed: {what}"),
        );
    }
    Ok(())
}

/// One of the results.
type Part = fn(&Results) -> &[Vec<f64>; 2];

/// Twice the greatest error of the CPU's path, and what roundings of terms that cancel may make.
fn close_by_mass(
    what: &str,
    [got, exact, plain, mass]: [&[f64]; 4],
    dtype: DType,
    report: &mut Report,
) {
    if got.len() != exact.len() {
        return report.fault(format!("{what}: {} numbers", got.len()));
    }
    let errors = plain.iter().zip(exact).map(|(x, y)| (x - y).abs());
    let floor = 2. * errors.fold(0., f64::max)
        + match dtype {
            DType::F16 => 2f64.powi(-24),
            _ => f64::MIN_POSITIVE,
        };
    for (i, (got, exact)) in got.iter().zip(exact).enumerate() {
        let allowed = floor
            + 2. * unit_roundoff(dtype) * exact.abs()
            + FLOOR * unit_roundoff(accumulator(dtype)) * mass[i];
        let error = (got - exact).abs();
        // Only the worst have to be told apart.
        if i == 0 || error.is_nan() || 8. * error > allowed {
            report.compare(format!("{what} [{i}]"), error, allowed);
        }
    }
}

fn repeats(target: &Target, report: &mut Report) -> Result<()> {
    for dtype in DTYPES {
        for case in [CASES[0], CASES[3], case([8, 6, 128, 64], 3, 32)] {
            let inputs = Inputs::new(&case, dtype)?;
            let first = results(target, &case, &inputs, dtype)?;
            for round in 0..REPEATS {
                let again = results(target, &case, &inputs, dtype)?;
                report.check(first == again, || {
                    format!("{case:?} {dtype:?} in round {round}")
                });
            }
        }
    }
    Ok(())
}

fn nothing(target: &Target, report: &mut Report) -> Result<()> {
    let [_, heads, _, head_dim] = CASES[0].q;
    let dims = ModelDims {
        width: heads * head_dim,
        heads,
        kv_heads: heads,
        head_dim,
        layers: 1,
        max_positions: 8,
    };
    let config = TapaConfig {
        phase_norm: Some(PhaseNorm::default()),
        ..TapaConfig::default()
    };
    let device = target.device();
    let vb = VarBuilder::zeros(DType::BF16, device);
    let tapa = Tapa::new(&config, &dims, vb)?;
    let x = Tensor::ones((2, heads, 3, head_dim), DType::BF16, device)?;
    let x = x.narrow(0, 0, 0)?;
    let state = PosState {
        positions: Positions::first(3),
        rotation: None,
    };
    let qkv = Qkv {
        q: x.clone(),
        k: x.clone(),
        v: x.clone(),
    };
    let encoded = tapa.encode(0, qkv, &state)?;
    report.check(encoded.q.dims() == x.dims(), || {
        format!("{:?}", encoded.q.dims())
    });
    Ok(())
}

/// Both kinds of kernel, and what adds up their sums.
#[cfg(feature = "cuda")]
fn all_have_run(target: &Target, dtype: DType, report: &mut Report) {
    if !target.is_gpu() {
        return;
    }
    let launched = candle_posenc::attend::kernel_launches();
    let name = dtype.as_str();
    for kernel in [
        format!("phase_norm_forward_{name}"),
        format!("phase_norm_forward_{name}_runs"),
        format!("phase_norm_backward_{name}"),
        format!("phase_norm_backward_{name}_runs"),
        format!("phase_norm_gain_{name}"),
    ] {
        report.check(launched.contains_key(&kernel), || {
            format!("{kernel} has not run")
        });
    }
}

#[cfg(not(feature = "cuda"))]
fn all_have_run(_: &Target, _: DType, _: &mut Report) {}
