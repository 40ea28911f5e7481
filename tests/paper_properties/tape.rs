//! TAPE, arXiv 2501.00712, in a small stack of layers with made-up projections around the encoding.

use super::{assert_gradients_match_differences, max_difference, normal, values};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use candle_posenc::encoding::{
    EncodingConfig, HeadMixing, Rope, RopeConfig, RopeScaling, StateNorm, Tape, TapeConfig,
};
use candle_posenc::{
    attend, AttendSpec, Backend, Ctx, Encoding, Layout, ModelDims, PosState, Positions, Qkv,
    Rotation,
};
use rand::{rngs::StdRng, Rng, SeedableRng};
use std::collections::HashMap;

const DIMS: ModelDims = ModelDims {
    width: 24,
    heads: 4,
    kv_heads: 4,
    head_dim: 8,
    layers: 3,
    max_positions: 64,
};

const GROUPED: ModelDims = ModelDims {
    kv_heads: 2,
    ..DIMS
};

/// What surrounds the encoding: a normalised attention and a feed-forward part in each layer.
struct Stack {
    dims: ModelDims,
    backend: Backend,
    layers: Vec<HashMap<&'static str, Tensor>>,
}

/// What a stack computes from its inputs.
struct Pass {
    /// (B, T, C).
    out: Tensor,
    /// The state that each layer started from, and the last one.
    states: Vec<PosState>,
}

impl Stack {
    fn new(rng: &mut StdRng, dims: ModelDims) -> Result<Self> {
        let (c, d) = (dims.width, dims.head_dim);
        let shapes = [
            ("q", dims.heads * d, c),
            ("k", dims.kv_heads * d, c),
            ("v", dims.kv_heads * d, c),
            ("o", c, dims.heads * d),
            ("up", 2 * c, c),
            ("down", c, 2 * c),
        ];
        let mut layer = || -> Result<HashMap<_, _>> {
            let mut weights = HashMap::new();
            for (name, out, width) in shapes {
                let scale = 1.5 / (width as f64).sqrt();
                weights.insert(name, (normal(rng, &[out, width])? * scale)?);
            }
            Ok(weights)
        };
        let layers = (0..dims.layers).map(|_| layer()).collect::<Result<_>>()?;
        Ok(Self {
            dims,
            backend: Backend::Dense,
            layers,
        })
    }

    fn to_dtype(&self, dtype: DType) -> Result<Self> {
        let convert = |layer: &HashMap<&'static str, Tensor>| {
            let weights = layer
                .iter()
                .map(|(name, w)| Ok((*name, w.to_dtype(dtype)?)));
            weights.collect::<Result<_>>()
        };
        Ok(Self {
            dims: self.dims,
            backend: self.backend,
            layers: self.layers.iter().map(convert).collect::<Result<_>>()?,
        })
    }

    fn run(&self, encoding: &dyn Encoding, x: &Tensor, start: PosState) -> Result<Pass> {
        self.run_cached(encoding, x, start, &mut vec![None; self.dims.layers])
    }

    /// Keys and values of earlier calls come before this call's; both start at position 0.
    fn run_cached(
        &self,
        encoding: &dyn Encoding,
        x: &Tensor,
        start: PosState,
        cache: &mut [Option<(Tensor, Tensor)>],
    ) -> Result<Pass> {
        let (b, t, c) = x.dims3()?;
        let (mut x, mut states) = (x.clone(), vec![start]);
        for (i, weights) in self.layers.iter().enumerate() {
            let linear = |x: &Tensor, name: &str| x.broadcast_matmul(&weights[name].t()?);
            let heads = |x: Tensor| x.reshape((b, t, (), self.dims.head_dim))?.transpose(1, 2);
            let state = states[i].clone();
            let h = normalise(&x)?;
            let qkv = Qkv {
                q: heads(linear(&h, "q")?)?,
                k: heads(linear(&h, "k")?)?,
                v: heads(linear(&h, "v")?)?,
            };
            let Qkv { q, k, v } = encoding.encode(i, qkv, &state)?;
            let (k, v) = match &cache[i] {
                Some((past_k, past_v)) => (
                    Tensor::cat(&[past_k, &k], 2)?,
                    Tensor::cat(&[past_v, &v], 2)?,
                ),
                None => (k, v),
            };
            let mut spec = AttendSpec::causal()
                .with_score(encoding.score(i))
                .with_backend(self.backend);
            if k.dim(2)? == t {
                spec = spec.with_positions(state.positions.clone(), state.positions.clone());
            }
            let attended = attend(&q, &k, &v, &spec)?;
            cache[i] = Some((k, v));
            let d = self.dims.head_dim;
            let out = attended
                .narrow(3, 0, d)?
                .transpose(1, 2)?
                .reshape((b, t, ()))?;
            let carried = match attended.dim(3)? - d {
                0 => None,
                extra => Some(attended.narrow(3, d, extra)?),
            };
            x = (x + linear(&out, "o")?)?;
            let mlp_out = linear(&linear(&normalise(&x)?, "up")?.silu()?, "down")?;
            assert_eq!(mlp_out.dims(), [b, t, c]);
            states.push(encoding.update(i, state, carried.as_ref(), &mlp_out)?);
            x = (x + mlp_out)?;
        }
        Ok(Pass { out: x, states })
    }
}

fn normalise(x: &Tensor) -> Result<Tensor> {
    x.broadcast_div(&(x.sqr()?.mean_keepdim(2)? + 1e-5)?.sqrt()?)
}

/// TAPE with its weights as they start.
fn initial(config: &TapeConfig, dims: &ModelDims, dtype: DType) -> Result<(Tape, VarMap)> {
    let weights = VarMap::new();
    let vb = VarBuilder::from_varmap(&weights, dtype, &Device::Cpu);
    Ok((Tape::new(config, dims, vb)?, weights))
}

/// TAPE with normal weights, of such a size that all states change by about their own.
fn trained(rng: &mut StdRng, config: &TapeConfig, dims: &ModelDims) -> Result<(Tape, VarMap)> {
    let (tape, weights) = initial(config, dims, DType::F64)?;
    for (_, variable) in named(&weights) {
        variable.set(&(normal(rng, variable.dims())? * 0.4)?)?;
    }
    Ok((tape, weights))
}

/// In the order of the names: a seed then gives the same weights each time.
fn named(weights: &VarMap) -> Vec<(String, Var)> {
    let Ok(data) = weights.data().lock() else {
        panic!("poisoned")
    };
    let mut variables: Vec<_> = data
        .iter()
        .map(|(name, x)| (name.clone(), x.clone()))
        .collect();
    variables.sort_by(|a, b| a.0.cmp(&b.0));
    variables
}

fn begin(encoding: &dyn Encoding, x: &Tensor, positions: Positions) -> Result<PosState> {
    encoding.begin(x, &positions, &mut Ctx::default())
}

fn first(encoding: &dyn Encoding, x: &Tensor) -> Result<PosState> {
    begin(encoding, x, Positions::first(x.dim(1)?))
}

fn rotation(state: &PosState) -> &Rotation {
    match &state.rotation {
        Some(rotation) => rotation,
        None => panic!("no rotation"),
    }
}

/// Every state turned by the angle of its head; one angle stands for all heads.
fn turned(state: &PosState, angles: &[f64]) -> Result<PosState> {
    let Rotation { cos, sin } = rotation(state);
    let angles = Tensor::new(angles, &Device::Cpu)?.reshape((1, (), 1, 1))?;
    let (c, s) = (angles.cos()?, angles.sin()?);
    Ok(PosState {
        positions: state.positions.clone(),
        rotation: Some(Rotation {
            cos: (cos.broadcast_mul(&c)? - sin.broadcast_mul(&s)?)?,
            sin: (cos.broadcast_mul(&s)? + sin.broadcast_mul(&c)?)?,
        }),
    })
}

fn moduli(state: &PosState) -> Result<Vec<f64>> {
    let Rotation { cos, sin } = rotation(state);
    values(&(cos.sqr()? + sin.sqr()?)?.sqrt()?)
}

fn config() -> TapeConfig {
    TapeConfig {
        position_size: 10,
        ..TapeConfig::default()
    }
}

#[test]
fn tape_with_initial_weights_equals_rope_bit_for_bit() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(1);
    let yarn = RopeConfig::from_hf(&serde_json::json!({
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    }))?;
    assert!(matches!(yarn.scaling, RopeScaling::Yarn { .. }));
    for dims in [DIMS, GROUPED] {
        let stack = Stack::new(&mut rng, dims)?;
        let x = normal(&mut rng, &[2, 13, 24])?;
        for rope in [RopeConfig::default(), yarn.clone()] {
            for (dtype, mixing) in [
                (DType::F64, HeadMixing::PerHead),
                (DType::F32, HeadMixing::PerHead),
                (DType::F32, HeadMixing::Full),
                (DType::BF16, HeadMixing::PerHead),
            ] {
                let config = TapeConfig {
                    rope: rope.clone(),
                    mixing,
                    ..config()
                };
                let (tape, weights) = initial(&config, &dims, dtype)?;
                assert!(!weights.all_vars().is_empty());
                let (mut stack, x) = (stack.to_dtype(dtype)?, x.to_dtype(dtype)?);
                let plain = Rope::new(&rope, &dims)?;
                for backend in [Backend::Dense, Backend::Fused] {
                    stack.backend = backend;
                    let expected = stack.run(&plain, &x, first(&plain, &x)?)?.out;
                    let found = stack.run(&tape, &x, first(&tape, &x)?)?.out;
                    let difference = max_difference(&found, &expected)?;
                    assert_eq!(difference, 0., "{dtype:?} {mixing:?} {backend:?}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn tape_with_step_zero_equals_rope_whatever_its_weights() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(2);
    let stack = Stack::new(&mut rng, DIMS)?;
    let x = normal(&mut rng, &[1, 9, 24])?;
    let plain = Rope::new(&RopeConfig::default(), &DIMS)?;
    let expected = stack.run(&plain, &x, first(&plain, &x)?)?.out;
    let out = |rng: &mut StdRng, step: f64| -> Result<Tensor> {
        let (tape, _) = trained(rng, &TapeConfig { step, ..config() }, &DIMS)?;
        Ok(stack.run(&tape, &x, first(&tape, &x)?)?.out)
    };
    assert_eq!(max_difference(&out(&mut rng, 0.)?, &expected)?, 0.);
    assert!(max_difference(&out(&mut rng, 0.5)?, &expected)? > 0.1);
    Ok(())
}

#[test]
fn tape_with_all_positions_shifted_gives_the_same_outputs() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(3);
    for (dims, mixing) in [(DIMS, HeadMixing::PerHead), (GROUPED, HeadMixing::Full)] {
        let stack = Stack::new(&mut rng, dims)?;
        let (tape, _) = trained(&mut rng, &TapeConfig { mixing, ..config() }, &dims)?;
        let x = normal(&mut rng, &[2, 11, 24])?;
        let out = |start: i64| -> Result<Tensor> {
            let state = begin(&tape, &x, Positions::Span { start, len: 11 })?;
            Ok(stack.run(&tape, &x, state)?.out)
        };
        let error = max_difference(&out(0)?, &out(17)?)?;
        assert!(error < 1e-12, "{error}");
    }
    Ok(())
}

#[test]
fn tape_with_all_states_turned_alike_gives_the_same_outputs_and_turned_states() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(4);
    for norm in [StateNorm::None, StateNorm::Unit] {
        for dims in [DIMS, GROUPED] {
            let stack = Stack::new(&mut rng, dims)?;
            let (tape, _) = trained(&mut rng, &TapeConfig { norm, ..config() }, &dims)?;
            let x = normal(&mut rng, &[2, 11, 24])?;
            let plain = stack.run(&tape, &x, first(&tape, &x)?)?;
            let other = stack.run(&tape, &x, turned(&first(&tape, &x)?, &[1.234])?)?;
            let error = max_difference(&plain.out, &other.out)?;
            assert!(error < 1e-12, "{error}");
            for (state, other) in plain.states.iter().zip(&other.states) {
                let expected = turned(state, &[1.234])?;
                let error = max_difference(&rotation(&expected).sin, &rotation(other).sin)?;
                assert!(error < 1e-11, "{error}");
            }
        }
    }
    Ok(())
}

#[test]
fn tape_with_heads_turned_differently_changes_once_heads_mix() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(5);
    let stack = Stack::new(&mut rng, DIMS)?;
    let x = normal(&mut rng, &[1, 11, 24])?;
    for (mixing, token_update, mixes) in [
        (HeadMixing::PerHead, false, false),
        (HeadMixing::PerHead, true, true),
        (HeadMixing::Full, false, true),
    ] {
        let config = TapeConfig {
            mixing,
            token_update,
            ..config()
        };
        let (tape, _) = trained(&mut rng, &config, &DIMS)?;
        let plain = stack.run(&tape, &x, first(&tape, &x)?)?.out;
        let start = turned(&first(&tape, &x)?, &[0.3, 2., -1.1, 0.7])?;
        let change = max_difference(&plain, &stack.run(&tape, &x, start)?.out)?;
        if mixes {
            assert!(change > 1e-2, "{mixing:?}: {change}");
        } else {
            assert!(change < 1e-12, "{mixing:?}: {change}");
        }
    }
    Ok(())
}

#[test]
fn tape_with_conjugate_states_changes() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(6);
    let stack = Stack::new(&mut rng, DIMS)?;
    let (tape, _) = trained(&mut rng, &config(), &DIMS)?;
    let x = normal(&mut rng, &[1, 11, 24])?;
    let start = first(&tape, &x)?;
    let plain = stack.run(&tape, &x, start.clone())?.out;
    let Rotation { cos, sin } = rotation(&start).clone();
    let sin = sin.neg()?;
    let conjugate = PosState {
        rotation: Some(Rotation { cos, sin }),
        ..start
    };
    assert!(max_difference(&plain, &stack.run(&tape, &x, conjugate)?.out)? > 1e-2);
    Ok(())
}

#[test]
fn tape_unit_norm_keeps_the_modulus_that_states_start_with() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(7);
    let yarn = RopeConfig::from_hf(&serde_json::json!({
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    }))?;
    let stack = Stack::new(&mut rng, GROUPED)?;
    let x = normal(&mut rng, &[2, 12, 24])?;
    for (rope, modulus) in [(RopeConfig::default(), 1.), (yarn, 0.1 * 4f64.ln() + 1.)] {
        let moduli_with = |rng: &mut StdRng, norm| -> Result<Vec<f64>> {
            let config = TapeConfig {
                rope: rope.clone(),
                norm,
                ..config()
            };
            let (tape, _) = trained(rng, &config, &GROUPED)?;
            let states = stack.run(&tape, &x, first(&tape, &x)?)?.states;
            let all: Vec<_> = states.iter().map(moduli).collect::<Result<_>>()?;
            Ok(all.concat())
        };
        for found in moduli_with(&mut rng, StateNorm::Unit)? {
            assert!((found - modulus).abs() < 1e-14, "{found} {modulus}");
        }
        let free = moduli_with(&mut rng, StateNorm::None)?;
        assert!(free.iter().any(|found| (found - modulus).abs() > 0.1));
    }
    Ok(())
}

#[test]
fn tape_unit_norm_of_a_vanishing_state_is_finite_with_a_finite_gradient() -> Result<()> {
    let config = TapeConfig {
        norm: StateNorm::Unit,
        attention_update: false,
        ..config()
    };
    let (tape, _) = initial(&config, &DIMS, DType::F64)?;
    let zeros = Var::zeros((1, 4, 2, 4), DType::F64, &Device::Cpu)?;
    let state = PosState {
        positions: Positions::first(2),
        rotation: Some(Rotation {
            cos: zeros.as_tensor().clone(),
            sin: zeros.as_tensor().clone(),
        }),
    };
    let m = Tensor::zeros((1, 2, 24), DType::F64, &Device::Cpu)?;
    let state = tape.update(0, state, None, &m)?;
    let cos = &rotation(&state).cos;
    assert!(values(cos)?.iter().all(|x| *x == 0.));
    let gradients = cos.sum_all()?.backward()?;
    let Some(gradient) = gradients.get(&zeros) else {
        panic!("no gradient")
    };
    assert!(values(gradient)?.iter().all(|g| g.is_finite()));
    Ok(())
}

/// The same model with each key/value head written out for every one of its query heads.
fn ungrouped(stack: &Stack, weights: &VarMap) -> Result<(Stack, Tape)> {
    let (d, group) = (GROUPED.head_dim, GROUPED.heads / GROUPED.kv_heads);
    let repeat = |w: &Tensor, axis: usize, rows: usize| -> Result<Tensor> {
        let heads: Vec<_> = (0..GROUPED.heads)
            .map(|h| w.narrow(axis, h / group * rows, rows))
            .collect::<Result<_>>()?;
        Tensor::cat(&heads, axis)
    };
    let mut layers = stack.layers.clone();
    for layer in &mut layers {
        for name in ["k", "v"] {
            let repeated = repeat(&layer[name], 0, d)?;
            layer.insert(name, repeated);
        }
    }
    // A mean over the group on the way in, the same for each head on the way out.
    let mut tensors = HashMap::new();
    for (name, w) in named(weights) {
        let w = w.as_tensor();
        let share = 1. / group as f64;
        let (name, w) = match name.rsplit('.').nth(1) {
            Some("up_proj") => (name, (repeat(w, 1, 1)? * share)?),
            Some("down_proj") => (name, repeat(w, 0, 1)?),
            Some("post_attention_linear") => (name, (repeat(&repeat(w, 0, 1)?, 1, 1)? * share)?),
            Some("x_proj") => (name, w.clone()),
            _ => {
                let diagonal = Tensor::eye(GROUPED.kv_heads, DType::F64, &Device::Cpu)?;
                let w = diagonal.broadcast_mul(w)?;
                let name = name.replace("post_attention_gain", "post_attention_linear.weight");
                (name, (repeat(&repeat(&w, 0, 1)?, 1, 1)? * share)?)
            }
        };
        tensors.insert(name, w);
    }
    let config = TapeConfig {
        mixing: HeadMixing::Full,
        ..config()
    };
    let vb = VarBuilder::from_tensors(tensors, DType::F64, &Device::Cpu);
    let stack = Stack {
        dims: DIMS,
        backend: stack.backend,
        layers,
    };
    Ok((stack, Tape::new(&config, &DIMS, vb)?))
}

#[test]
fn tape_with_grouped_heads_equals_their_copies_ungrouped() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(8);
    for mixing in [HeadMixing::PerHead, HeadMixing::Full] {
        let stack = Stack::new(&mut rng, GROUPED)?;
        let (tape, weights) = trained(&mut rng, &TapeConfig { mixing, ..config() }, &GROUPED)?;
        let (other_stack, other) = ungrouped(&stack, &weights)?;
        let x = normal(&mut rng, &[2, 10, 24])?;
        let grouped = stack.run(&tape, &x, first(&tape, &x)?)?.out;
        let copies = other_stack.run(&other, &x, first(&other, &x)?)?.out;
        let error = max_difference(&grouped, &copies)?;
        assert!(error < 1e-12, "{mixing:?} {error}");
    }
    Ok(())
}

#[test]
fn tape_gradients_match_finite_differences_through_three_layers() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(9);
    for (dims, mixing, norm) in [
        (DIMS, HeadMixing::PerHead, StateNorm::None),
        (GROUPED, HeadMixing::PerHead, StateNorm::Unit),
        (GROUPED, HeadMixing::Full, StateNorm::None),
    ] {
        let config = TapeConfig {
            mixing,
            norm,
            position_size: 5,
            step: 0.7,
            ..config()
        };
        let stack = Stack::new(&mut rng, dims)?;
        let (tape, weights) = trained(&mut rng, &config, &dims)?;
        let x = Var::from_tensor(&normal(&mut rng, &[1, 5, 24])?)?;
        let start = first(&tape, &x)?;
        let re = Var::from_tensor(&rotation(&start).cos.contiguous()?)?;
        let im = Var::from_tensor(&rotation(&start).sin.contiguous()?)?;
        let wanted = normal(&mut rng, &[1, 5, 24])?;
        let loss = || {
            let rotation = Rotation {
                cos: re.as_tensor().clone(),
                sin: im.as_tensor().clone(),
            };
            let start = PosState {
                rotation: Some(rotation),
                ..start.clone()
            };
            (stack.run(&tape, &x, start)?.out * &wanted)?.sum_all()
        };
        let weights = named(&weights);
        assert_eq!(weights.len(), 8);
        let mut variables = vec![("x", &x), ("re", &re), ("im", &im)];
        variables.extend(weights.iter().map(|(name, weight)| (name.as_str(), weight)));
        assert_gradients_match_differences(&variables, loss)?;
    }
    Ok(())
}

#[test]
fn tape_with_initial_weights_has_gradients_for_the_gain_and_w_up_alone() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(10);
    let stack = Stack::new(&mut rng, DIMS)?;
    let (tape, weights) = initial(&config(), &DIMS, DType::F64)?;
    let x = normal(&mut rng, &[2, 9, 24])?;
    let largest_gradients = || -> Result<Vec<(String, f64)>> {
        let out = stack.run(&tape, &x, first(&tape, &x)?)?.out;
        let gradients = out.sqr()?.sum_all()?.backward()?;
        let largest = |(name, weight): (String, Var)| match gradients.get(&weight) {
            Some(gradient) => Ok((name, max_difference(gradient, &gradient.zeros_like()?)?)),
            None => panic!("{name} has no gradient"),
        };
        named(&weights).into_iter().map(largest).collect()
    };
    for (name, largest) in largest_gradients()? {
        let starts_zero = name.ends_with("gain") || name.ends_with("up_proj.weight");
        assert_eq!(largest > 0., starts_zero, "{name}: {largest}");
    }
    // One step away from zero all of them move.
    for (name, weight) in named(&weights) {
        if name.ends_with("up_proj.weight") {
            weight.set(&(weight.as_tensor() + 0.01)?)?;
        }
    }
    for (name, largest) in largest_gradients()? {
        assert!(largest > 0., "{name}");
    }
    Ok(())
}

#[test]
fn tape_has_the_published_weights_for_every_layer_but_the_last() -> Result<()> {
    let weights_of = |config: &TapeConfig| -> Result<Vec<(String, Vec<usize>)>> {
        let weights = initial(config, &GROUPED, DType::F32)?.1;
        let shapes = named(&weights)
            .into_iter()
            .map(|(name, x)| (name, x.dims().to_vec()));
        Ok(shapes.collect())
    };
    let of_layers = |names: &[(&str, &[usize])]| -> Vec<(String, Vec<usize>)> {
        let layer = |i: usize| {
            let name = move |name: &str| format!("layers.{i}.{name}");
            names
                .iter()
                .map(move |(n, shape)| (name(n), shape.to_vec()))
        };
        (0..2).flat_map(layer).collect()
    };
    let token: [(&str, &[usize]); 3] = [
        ("pe.down_proj.weight", &[2, 10]),
        ("pe.up_proj.weight", &[10, 2]),
        ("pe.x_proj.weight", &[10, 24]),
    ];
    let gain: (&str, &[usize]) = ("post_attention_gain", &[2]);
    let matrix: (&str, &[usize]) = ("post_attention_linear.weight", &[2, 2]);
    let with = |attention_update, token_update, mixing| TapeConfig {
        attention_update,
        token_update,
        mixing,
        ..config()
    };
    for (config, expected) in [
        (
            with(true, true, HeadMixing::PerHead),
            [&token[..], &[gain]].concat(),
        ),
        (
            with(true, true, HeadMixing::Full),
            [&token[..], &[matrix]].concat(),
        ),
        (with(true, false, HeadMixing::PerHead), vec![gain]),
        (with(false, true, HeadMixing::PerHead), token.to_vec()),
        (with(false, false, HeadMixing::PerHead), vec![]),
    ] {
        assert_eq!(weights_of(&config)?, of_layers(&expected));
    }
    Ok(())
}

#[test]
fn tape_without_its_updates_equals_rope_and_keeps_values_narrow() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(11);
    let config = TapeConfig {
        attention_update: false,
        token_update: false,
        ..config()
    };
    let stack = Stack::new(&mut rng, DIMS)?;
    let x = normal(&mut rng, &[1, 9, 24])?;
    let (tape, _) = initial(&config, &DIMS, DType::F64)?;
    let plain = Rope::new(&RopeConfig::default(), &DIMS)?;
    let found = stack.run(&tape, &x, first(&tape, &x)?)?.out;
    let expected = stack.run(&plain, &x, first(&plain, &x)?)?.out;
    assert_eq!(max_difference(&found, &expected)?, 0.);

    let q = normal(&mut rng, &[1, 4, 9, 8])?;
    let value_width = |tape: &Tape, layer: usize| -> Result<usize> {
        let (q, k, v) = (q.clone(), q.clone(), q.clone());
        tape.encode(layer, Qkv { q, k, v }, &first(tape, &x)?)?
            .v
            .dim(3)
    };
    assert_eq!(value_width(&tape, 0)?, 8);
    let (tape, _) = initial(&TapeConfig::default(), &DIMS, DType::F64)?;
    assert_eq!(value_width(&tape, 0)?, 16);
    assert_eq!(
        value_width(&tape, 2)?,
        8,
        "nothing reads the last layer's average"
    );
    assert!(value_width(&tape, 3).is_err());
    Ok(())
}

#[test]
fn tape_reads_a_published_matrix_as_its_row_sums_and_trains_it() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(12);
    let dims = ModelDims { layers: 2, ..DIMS };
    let stack = Stack::new(&mut rng, dims)?;
    let x = normal(&mut rng, &[2, 9, 24])?;
    let config = TapeConfig {
        token_update: false,
        ..config()
    };
    let matrix = Var::from_tensor(&normal(&mut rng, &[4, 4])?)?;
    let build = |name: &str, w: Tensor| {
        let tensors = HashMap::from([(format!("layers.0.{name}"), w)]);
        Tape::new(
            &config,
            &dims,
            VarBuilder::from_tensors(tensors, DType::F64, &Device::Cpu),
        )
    };
    let published = build("post_attention_linear.weight", matrix.as_tensor().clone())?;
    let gain = build("post_attention_gain", matrix.sum(1)?)?;
    let run = |tape: &Tape| -> Result<Tensor> { Ok(stack.run(tape, &x, first(tape, &x)?)?.out) };
    assert_eq!(max_difference(&run(&published)?, &run(&gain)?)?, 0.);

    let gradients = run(&published)?.sqr()?.sum_all()?.backward()?;
    let Some(gradient) = gradients.get(&matrix) else {
        panic!("no gradient")
    };
    for row in gradient.to_vec2::<f64>()? {
        assert!(row[0] != 0. && row.iter().all(|g| *g == row[0]), "{row:?}");
    }
    // What an optimiser writes into the matrix takes effect.
    let before = run(&published)?;
    matrix.set(&(matrix.as_tensor() * 2.)?)?;
    assert!(max_difference(&before, &run(&published)?)? > 1e-3);
    Ok(())
}

#[test]
fn tape_states_of_padding_never_reach_real_tokens() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(13);
    let mut stack = Stack::new(&mut rng, GROUPED)?;
    stack.backend = Backend::Fused;
    let (tape, weights) = trained(&mut rng, &config(), &GROUPED)?;
    let short = normal(&mut rng, &[1, 5, 24])?;
    let full = normal(&mut rng, &[1, 8, 24])?;
    let filled = |junk: f64| -> Result<(Tensor, Var)> {
        let padding = Tensor::full(junk, (1, 3, 24), &Device::Cpu)?;
        let real = Var::from_tensor(&short)?;
        let row = Tensor::cat(&[&padding, real.as_tensor()], 1)?;
        Ok((Tensor::cat(&[&row, &full], 0)?, real))
    };
    let positions = Positions::left_padded(&[5, 8], &Device::Cpu)?;
    let run = |junk: f64| -> Result<(Tensor, Tensor, Vec<Tensor>)> {
        let (x, real) = filled(junk)?;
        let out = stack
            .run(&tape, &x, begin(&tape, &x, positions.clone())?)?
            .out;
        let real_out = out.narrow(0, 0, 1)?.narrow(1, 3, 5)?.contiguous()?;
        let gradients =
            (real_out.sqr()?.sum_all()? + out.narrow(0, 1, 1)?.sqr()?.sum_all()?)?.backward()?;
        let of = |x: &Var| match gradients.get(x) {
            Some(gradient) => gradient.clone(),
            None => panic!("no gradient"),
        };
        let weights = named(&weights).iter().map(|(_, w)| of(w)).collect();
        Ok((real_out, of(&real), weights))
    };
    let (out, gradient, weight_gradients) = run(0.)?;
    let alone = stack.run(&tape, &short, first(&tape, &short)?)?.out;
    assert!(max_difference(&out, &alone)? < 1e-12);
    for junk in [3., f64::NAN] {
        let (other, other_gradient, other_weight_gradients) = run(junk)?;
        assert_eq!(max_difference(&out, &other)?, 0.);
        // A gradient needs finite numbers everywhere: in a model the projections' would be NaN with any encoding.
        if junk.is_finite() {
            assert_eq!(max_difference(&gradient, &other_gradient)?, 0.);
            for (a, b) in weight_gradients.iter().zip(&other_weight_gradients) {
                assert_eq!(max_difference(a, b)?, 0.);
            }
        }
    }
    Ok(())
}

#[test]
fn tape_token_by_token_with_cached_values_equals_the_whole_sequence() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(14);
    let stack = Stack::new(&mut rng, GROUPED)?;
    let (tape, _) = trained(&mut rng, &config(), &GROUPED)?;
    let x = normal(&mut rng, &[2, 9, 24])?;
    let whole = stack.run(&tape, &x, first(&tape, &x)?)?.out;
    let mut cache = vec![None; 3];
    let mut outputs = Vec::new();
    for (start, len) in [(0i64, 4usize), (4, 1), (5, 3), (8, 1)] {
        let x = x.narrow(1, start as usize, len)?;
        let state = begin(&tape, &x, Positions::Span { start, len })?;
        outputs.push(stack.run_cached(&tape, &x, state, &mut cache)?.out);
    }
    let error = max_difference(&Tensor::cat(&outputs, 1)?, &whole)?;
    assert!(error < 1e-12, "{error}");
    Ok(())
}

#[test]
fn tape_in_training_moves_all_tokens_by_one_random_distance() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(15);
    let stack = Stack::new(&mut rng, DIMS)?;
    let (tape, _) = trained(&mut rng, &config(), &DIMS)?;
    let x = normal(&mut rng, &[2, 10, 24])?;
    let start = |tape: &Tape, x: &Tensor, positions: &Positions, train, seed| {
        let mut generator = StdRng::seed_from_u64(seed);
        let rng: &mut dyn Rng = &mut generator;
        let mut ctx = Ctx {
            train,
            rng: Some(rng),
            planned_len: None,
        };
        tape.begin(x, positions, &mut ctx)
    };
    let positions = Positions::first(10);
    let plain = begin(&tape, &x, positions.clone())?;
    let expected = stack.run(&tape, &x, plain.clone())?.out;
    // Channel pair 0 turns by one radian a token.
    let distance_of = |state: &PosState, pair: usize, frequency: f64| -> Result<f64> {
        let Rotation { cos, sin } = rotation(state);
        let at = |x: &Tensor| -> Result<f64> { Ok(values(&x.narrow(2, 0, 1)?)?[pair]) };
        Ok(at(sin)?.atan2(at(cos)?) / frequency)
    };
    let mut distances = Vec::new();
    for seed in 0..40 {
        let shifted = start(&tape, &x, &positions, true, seed)?;
        // The slowest pair's 10⁻³ radians a token tell the distance without ambiguity.
        let distance = distance_of(&shifted, 3, 1e-3)?;
        assert!((distance - distance.round()).abs() < 1e-9 && (-0.5..128.5).contains(&distance));
        distances.push(distance.round() as i64);
        let error = max_difference(&stack.run(&tape, &x, shifted.clone())?.out, &expected)?;
        assert!(error < 1e-11, "{error}");
        let again = start(&tape, &x, &positions, true, seed)?;
        assert_eq!(
            max_difference(&rotation(&again).cos, &rotation(&shifted).cos)?,
            0.
        );
    }
    distances.sort();
    distances.dedup();
    assert!(distances.len() > 20 && distances[0] < 30 && distances[distances.len() - 1] > 98);

    let unchanged = |state: PosState, expected: &PosState| -> Result<()> {
        assert_eq!(
            max_difference(&rotation(&state).cos, &rotation(expected).cos)?,
            0.
        );
        assert_eq!(
            max_difference(&rotation(&state).sin, &rotation(expected).sin)?,
            0.
        );
        Ok(())
    };
    unchanged(start(&tape, &x, &positions, false, 1)?, &plain)?;
    let config = TapeConfig {
        random_shift: false,
        ..config()
    };
    let (still, _) = initial(&config, &DIMS, DType::F64)?;
    unchanged(start(&still, &x, &positions, true, 1)?, &plain)?;
    let long = Positions::first(65);
    let x = Tensor::zeros((1, 65, 24), DType::F64, &Device::Cpu)?;
    unchanged(
        start(&tape, &x, &long, true, 1)?,
        &begin(&tape, &x, long.clone())?,
    )?;
    // Padding stays padding.
    let padded = Positions::left_padded(&[3, 5], &Device::Cpu)?;
    let x = Tensor::zeros((2, 5, 24), DType::F64, &Device::Cpu)?;
    let shifted = start(&tape, &x, &padded, true, 1)?;
    let sines = values(&rotation(&shifted).sin.narrow(1, 0, 1)?.narrow(3, 3, 1)?)?;
    assert!(sines[..2].iter().all(|s| *s == 0.), "{sines:?}");
    assert!(sines[2..].iter().all(|s| *s != 0.), "{sines:?}");
    match &shifted.positions {
        Positions::Explicit { pos, .. } => {
            assert_eq!(pos.to_vec2::<i64>()?, [[-2, -1, 0, 1, 2], [0, 1, 2, 3, 4]]);
        }
        other => panic!("{other:?}"),
    }
    Ok(())
}

#[test]
fn tape_states_stay_single_precision_under_half_precision_values() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(16);
    let stack = Stack::new(&mut rng, GROUPED)?.to_dtype(DType::BF16)?;
    let (tape, weights) = initial(&config(), &GROUPED, DType::BF16)?;
    for (_, variable) in named(&weights) {
        let numbers = normal(&mut rng, variable.dims())?;
        variable.set(&(numbers * 0.4)?.to_dtype(DType::BF16)?)?;
    }
    let x = normal(&mut rng, &[2, 9, 24])?.to_dtype(DType::BF16)?;
    let pass = stack.run(&tape, &x, first(&tape, &x)?)?;
    assert_eq!(pass.out.dtype(), DType::BF16);
    for state in &pass.states {
        assert_eq!(rotation(state).cos.dtype(), DType::F32);
        assert_eq!(rotation(state).cos.dims(), [2, 2, 9, 4]);
    }
    let gradients = pass
        .out
        .to_dtype(DType::F32)?
        .sqr()?
        .sum_all()?
        .backward()?;
    for (name, weight) in named(&weights) {
        let Some(gradient) = gradients.get(&weight) else {
            panic!("{name} has no gradient")
        };
        assert_eq!(gradient.dtype(), DType::BF16);
        assert!(
            values(gradient)?.iter().all(|g| g.is_finite())
                && values(gradient)?.iter().any(|g| *g != 0.)
        );
    }
    Ok(())
}

#[test]
fn tape_with_parameters_out_of_range_is_an_error_that_names_them() {
    let message = |config: TapeConfig, dims: ModelDims| match initial(&config, &dims, DType::F32) {
        Ok(_) => panic!("{config:?} was accepted"),
        Err(error) => error.to_string(),
    };
    let odd = ModelDims {
        head_dim: 7,
        ..DIMS
    };
    assert!(message(config(), odd).contains("head_dim 7"));
    let partial = RopeConfig {
        partial_rotary_factor: 0.5,
        ..RopeConfig::default()
    };
    let interleaved = RopeConfig {
        layout: Layout::Interleaved,
        ..RopeConfig::default()
    };
    for (rope, part) in [
        (partial, "partial_rotary_factor 0.5"),
        (interleaved, "Interleaved"),
    ] {
        let message = message(TapeConfig { rope, ..config() }, DIMS);
        assert!(message.contains(part), "{message}");
    }
    let none = TapeConfig {
        position_size: 0,
        ..config()
    };
    assert!(message(none, DIMS).contains("position_size"));
    let step = f64::NAN;
    assert!(message(TapeConfig { step, ..config() }, DIMS).contains("step NaN"));
}

#[test]
fn tape_with_misfitting_tensors_is_an_error_that_names_their_shapes() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(17);
    let (tape, _) = initial(&config(), &GROUPED, DType::F64)?;
    let x = normal(&mut rng, &[1, 5, 24])?;
    let state = first(&tape, &x)?;
    let m = normal(&mut rng, &[1, 5, 24])?;
    let message =
        |carried: Option<&Tensor>, m: &Tensor| match tape.update(0, state.clone(), carried, m) {
            Ok(_) => panic!("accepted"),
            Err(error) => error.to_string(),
        };
    assert!(message(None, &m).contains("layer 0"));
    let carried = normal(&mut rng, &[1, 4, 5, 6])?;
    assert!(message(Some(&carried), &m).contains("[1, 4, 5, 6]"));
    let carried = normal(&mut rng, &[1, 4, 5, 8])?;
    assert!(message(Some(&carried), &normal(&mut rng, &[1, 5, 23])?).contains("[1, 5, 23]"));
    let plain = Rope::new(&RopeConfig::default(), &GROUPED)?;
    let of_rope = first(&plain, &x)?;
    match tape.update(0, of_rope, Some(&carried), &m) {
        Ok(_) => panic!("accepted"),
        Err(error) => assert!(error.to_string().contains("[1, 1, 5, 4]"), "{error}"),
    }
    assert!(tape.update(3, state.clone(), Some(&carried), &m).is_err());
    assert!(tape
        .begin(&x, &Positions::first(4), &mut Ctx::default())
        .is_err());
    Ok(())
}

#[test]
fn tape_config_reads_defaults_and_rejects_unknown_fields() {
    let read = |text: &str| serde_json::from_str::<EncodingConfig>(text);
    match read(r#"{"type": "tape", "mixing": "full", "norm": "unit", "rope": {"theta": 500000.0}}"#)
    {
        Ok(config) => assert_eq!(
            config,
            EncodingConfig::Tape(TapeConfig {
                rope: RopeConfig {
                    theta: 500_000.,
                    ..RopeConfig::default()
                },
                mixing: HeadMixing::Full,
                norm: StateNorm::Unit,
                ..TapeConfig::default()
            })
        ),
        Err(error) => panic!("{error}"),
    }
    assert!(read(r#"{"type": "tape", "position_sise": 3}"#).is_err());
}
