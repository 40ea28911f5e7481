//! TAPE's state between two layers, values and every gradient, held to the CPU's path in f64.

use crate::reference::{accumulator, round_to, store, values, Storage, STORAGES};
use crate::report::Report;
use crate::target::Target;
use crate::{test, Test};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::VarBuilder;
use candle_posenc::encoding::{HeadMixing, StateNorm, TapeConfig};
use candle_posenc::{EncodingConfig, ModelDims, PosState, Positions, Qkv, Rotation};
use rand::{rngs::StdRng, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use std::collections::HashMap;

const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

/// One update.
#[derive(Debug, Clone)]
struct Case {
    b: usize,
    /// Key/value heads.
    g: usize,
    /// Query heads to each.
    group: usize,
    t: usize,
    pairs: usize,
    /// C.
    width: usize,
    config: TapeConfig,
    /// The gains stand in a matrix, as published.
    published: bool,
    /// Of v, of the state, and of the averages.
    stored: [Storage; 3],
}

fn case(b: usize, g: usize, group: usize, t: usize, pairs: usize) -> Case {
    Case {
        b,
        g,
        group,
        t,
        pairs,
        width: 12,
        config: TapeConfig {
            position_size: 5,
            step: 0.75,
            ..TapeConfig::default()
        },
        published: false,
        stored: [Storage::TokensFirst, Storage::Contiguous, Storage::Narrowed],
    }
}

impl Case {
    fn with(self, change: impl FnOnce(&mut TapeConfig)) -> Self {
        let mut config = self.config.clone();
        change(&mut config);
        Self { config, ..self }
    }

    /// The variables of a call by name, and their shapes. Those of the state are in its dtype.
    fn variables(&self) -> Vec<(String, Vec<usize>)> {
        let Self {
            b,
            g,
            group,
            t,
            pairs,
            width,
            config,
            published,
            ..
        } = self;
        let (b, g, t, pairs, width) = (*b, *g, *t, *pairs, *width);
        let s = config.position_size;
        let mut variables = vec![
            ("v", vec![b, g, t, 2 * pairs]),
            ("re", vec![b, g, t, pairs]),
            ("im", vec![b, g, t, pairs]),
            ("m", vec![b, t, width]),
        ];
        if config.attention_update {
            variables.push(("carried", vec![b, g * group, t, 2 * pairs]));
            variables.push(match (config.mixing, published) {
                (HeadMixing::PerHead, false) => ("layers.0.post_attention_gain", vec![g]),
                _ => ("layers.0.post_attention_linear.weight", vec![g, g]),
            });
        }
        if config.token_update {
            variables.push(("layers.0.pe.up_proj.weight", vec![s, g]));
            variables.push(("layers.0.pe.x_proj.weight", vec![s, width]));
            variables.push(("layers.0.pe.down_proj.weight", vec![g, s]));
        }
        let named = |(name, shape): (&str, _)| (name.to_string(), shape);
        variables.into_iter().map(named).collect()
    }

    /// What the variables hold and the upstream gradients, rounded to what `dtype` can hold.
    fn draw(&self, dtype: DType) -> HashMap<String, Vec<f64>> {
        let mut rng = StdRng::seed_from_u64(17);
        let upstream = [
            ("of packed", vec![self.b, self.g, self.t, 4 * self.pairs]),
            ("of re", vec![self.b, self.g, self.t, self.pairs]),
            ("of im", vec![self.b, self.g, self.t, self.pairs]),
        ];
        let upstream = upstream.map(|(name, shape)| (name.to_string(), shape));
        (self.variables().into_iter().chain(upstream))
            .map(|(name, shape)| {
                let scale = match name.starts_with("layers") {
                    true => 0.5 / (self.g as f64).sqrt(),
                    false => 1.,
                };
                // States that updates leave far from 0, where no modulus can be given to them.
                let shift = match (name.as_str(), self.config.norm) {
                    ("re", StateNorm::Unit) => 8.,
                    _ => 0.,
                };
                let dtype = dtype_of(&name, dtype);
                let draw = |_| {
                    let x: f64 = StandardNormal.sample(&mut rng);
                    round_to(dtype, scale * x + shift)
                };
                let len: usize = shape.iter().product();
                (name, (0..len).map(draw).collect())
            })
            .collect()
    }
}

/// Models hold everything but states in their own dtype.
fn dtype_of(name: &str, dtype: DType) -> DType {
    match name {
        "re" | "im" | "of re" | "of im" => accumulator(dtype),
        _ => dtype,
    }
}

/// Packed values, the next state, and the gradient of every variable, by name.
fn run(
    case: &Case,
    drawn: &HashMap<String, Vec<f64>>,
    dtype: DType,
    device: &Device,
) -> Result<Vec<(String, Vec<f64>)>> {
    let Case {
        b,
        g,
        group,
        t,
        pairs,
        width,
        ..
    } = *case;
    let load = |name: &str, shape: Vec<usize>| {
        let values = drawn.get(name).cloned().unwrap_or_default();
        Tensor::from_vec(values, shape, &Device::Cpu)?
            .to_dtype(dtype_of(name, dtype))?
            .to_device(device)
    };
    let vars = (case.variables().into_iter())
        .map(|(name, shape)| Ok((name.clone(), Var::from_tensor(&load(&name, shape)?)?)))
        .collect::<Result<HashMap<String, Var>>>()?;
    let tensors = vars
        .iter()
        .filter(|(name, _)| name.starts_with("layers"))
        .map(|(name, var)| (name.clone(), var.as_tensor().clone()))
        .collect();
    let dims = ModelDims {
        width,
        heads: g * group,
        kv_heads: g,
        head_dim: 2 * pairs,
        layers: 2,
        max_positions: t,
    };
    let vb = VarBuilder::from_tensors(tensors, dtype, device);
    let encoding = EncodingConfig::Tape(case.config.clone()).build(&dims, vb)?;
    let stored = |name: &str, storage| match vars.get(name) {
        Some(var) => store(var, storage).map(Some),
        None => Ok(None),
    };
    let given = |name: &str, storage| match stored(name, storage)? {
        Some(x) => Ok(x),
        None => candle_core::bail!("no variable {name}"),
    };
    let [v_stored, state_stored, carried_stored] = case.stored;
    let state = PosState {
        positions: Positions::first(t),
        rotation: Some(Rotation {
            cos: given("re", state_stored)?,
            sin: given("im", state_stored)?,
        }),
    };
    let head = |heads: usize| Tensor::zeros((b, heads, t, 2 * pairs), dtype, device);
    let qkv = Qkv {
        q: head(g * group)?,
        k: head(g)?,
        v: given("v", v_stored)?,
    };
    let packed = encoding.encode(0, qkv, &state)?.v;
    let carried = stored("carried", carried_stored)?;
    let m = given("m", Storage::Contiguous)?;
    let next = encoding.update(0, state, carried.as_ref(), &m)?;
    let Some(Rotation { cos, sin }) = next.rotation else {
        candle_core::bail!("no state")
    };
    // Without the attention update nothing is packed.
    let upstream = match packed.dim(3)? == 4 * pairs {
        true => load("of packed", vec![b, g, t, 4 * pairs])?,
        false => packed.ones_like()?,
    };
    let shape = vec![b, g, t, pairs];
    let loss = [
        (packed.clone() * upstream)?
            .to_dtype(accumulator(dtype))?
            .sum_all()?,
        (&cos * load("of re", shape.clone())?)?.sum_all()?,
        (&sin * load("of im", shape)?)?.sum_all()?,
    ];
    let gradients = ((&loss[0] + &loss[1])? + &loss[2])?.backward()?;
    let mut results = vec![
        ("packed".to_string(), values(&packed)?),
        ("next re".to_string(), values(&cos)?),
        ("next im".to_string(), values(&sin)?),
    ];
    for (name, shape) in case.variables() {
        let gradient = match gradients.get(&vars[&name]) {
            Some(gradient) if gradient.dims() == shape => values(gradient)?,
            // m without the token-wise update.
            None if name == "m" => Vec::new(),
            other => candle_core::bail!("the gradient of {name} is {:?}", other.map(Tensor::dims)),
        };
        results.push((format!("gradient of {name}"), gradient));
    }
    Ok(results)
}

fn greatest_difference(x: &[f64], y: &[f64]) -> f64 {
    let differences = x.iter().zip(y).map(|(x, y)| (x - y).abs());
    differences.fold(0., |most, d| if d > most || d.is_nan() { d } else { most })
}

/// Twice what the CPU's path in this dtype is off by, and a few roundings of the greatest value.
fn check(target: &Target, case: &Case, dtype: DType, report: &mut Report) -> Result<()> {
    let drawn = case.draw(dtype);
    let exact = run(case, &drawn, DType::F64, &Device::Cpu)?;
    let plain = run(case, &drawn, dtype, &Device::Cpu)?;
    target.poison()?;
    let got = run(case, &drawn, dtype, target.device())?;
    for (((name, got), (_, exact)), (_, plain)) in got.iter().zip(&exact).zip(&plain) {
        report.check(got.len() == exact.len(), || format!("{name} of {case:?}"));
        let greatest = exact.iter().fold(0f64, |most, x| most.max(x.abs()));
        let unit = match accumulator(dtype) {
            DType::F64 => 1e-14,
            _ => 2e-6,
        };
        let allowed = 2. * greatest_difference(plain, exact) + unit * (1. + greatest);
        let error = match greatest_difference(got, exact) {
            error if error.is_nan() => f64::INFINITY,
            error => error,
        };
        report.compare(format!("{name} of {case:?}"), error, allowed);
    }
    Ok(())
}

/// Models as they are, and heads, pairs and tokens of odd numbers.
fn shapes() -> Vec<Case> {
    vec![
        case(1, 16, 1, 37, 64),
        case(2, 8, 2, 19, 32),
        case(2, 3, 3, 5, 10),
        case(1, 1, 4, 1, 8),
        case(3, 5, 1, 7, 3),
        case(1, 32, 1, 9, 32),
        case(1, 2, 1, 70, 1),
        case(2, 4, 1, 33, 128),
    ]
}

type Change = fn(&mut TapeConfig);

/// Every switch of the configuration.
const CHANGES: [(&str, Change); 5] = [
    ("per_head", |_| ()),
    ("full", |config| config.mixing = HeadMixing::Full),
    ("of_tokens_alone", |config| config.attention_update = false),
    ("of_attention_alone", |config| config.token_update = false),
    ("of_unit_modulus", |config| config.norm = StateNorm::Unit),
];

pub fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for dtype in DTYPES {
        for (name, change) in CHANGES {
            tests.push(test(
                format!("tape_update_{name}_{dtype:?}_equals_the_cpu"),
                move |target, report| {
                    for case in shapes() {
                        check(target, &case.with(change), dtype, report)?;
                    }
                    Ok(())
                },
            ));
        }
        tests.push(test(
            format!("tape_update_of_any_strides_{dtype:?}_equals_the_cpu"),
            move |target, report| {
                let count = STORAGES.len();
                for i in 0..count * count {
                    let stored = [0, i / count, 2 * i].map(|shift| STORAGES[(i + shift) % count]);
                    let shape = if i % 2 == 0 {
                        case(2, 4, 2, 9, 16)
                    } else {
                        case(2, 3, 1, 6, 5)
                    };
                    let (_, change) = CHANGES[i % 2];
                    let case = Case { stored, ..shape }.with(change);
                    check(target, &case, dtype, report)?;
                }
                Ok(())
            },
        ));
    }
    tests.push(test(
        "tape_update_by_a_published_matrix_equals_the_cpu",
        |target, report| {
            for mixing in [HeadMixing::PerHead, HeadMixing::Full] {
                let case = Case {
                    published: true,
                    ..case(2, 4, 2, 11, 16)
                };
                let case = case.with(|config| {
                    config.mixing = mixing;
                    config.token_update = false;
                });
                check(target, &case, DType::F32, report)?;
            }
            Ok(())
        },
    ));
    tests.push(test(
        "tape_update_of_many_tokens_equals_the_cpu",
        |target, report| {
            // More tokens than the kernel has blocks for.
            let case = case(1, 16, 1, 9000, 8);
            check(target, &case, DType::F32, report)?;
            check(target, &case.with(CHANGES[1].1), DType::BF16, report)
        },
    ));
    tests.push(test(
        "tape_update_of_many_heads_equals_the_cpu",
        |target, report| {
            // 72 heads leave room for a part of the pairs only; 200 are for tensor operations.
            for (g, pairs) in [(72, 20), (200, 4)] {
                for (_, change) in &CHANGES[..2] {
                    check(
                        target,
                        &case(1, g, 1, 3, pairs).with(change),
                        DType::F32,
                        report,
                    )?;
                }
            }
            Ok(())
        },
    ));
    tests.push(test("tape_update_repeats_bit_for_bit", |target, report| {
        for (_, change) in CHANGES {
            let case = case(2, 8, 2, 100, 32).with(change);
            let drawn = case.draw(DType::BF16);
            let mut first = None;
            for round in 0..20 {
                target.poison()?;
                let results = run(&case, &drawn, DType::BF16, target.device())?;
                let known = first.get_or_insert_with(|| results.clone());
                report.check(*known == results, || format!("{case:?} in round {round}"));
            }
        }
        Ok(())
    }));
    tests
}
