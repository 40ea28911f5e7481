//! Gradients with blocks recomputed against those with every activation kept.

use candle_core::backprop::GradStore;
use candle_core::{bail, DType, Device, Result, Tensor, Var};
use candle_nn::{Init, VarBuilder};
use candle_posenc::encoding::{
    AbsoluteConfig, AlibiConfig, HeadMixing, PhaseForm, PhaseNorm, RopeConfig, StateNorm,
    TapaConfig, TapeConfig,
};
use candle_posenc::train::{loss_and_gradients, Recompute};
use candle_posenc::{
    rotate, Backend, Ctx, Encoding, EncodingConfig, KvCache, Layout, Llama, LlamaConfig, PosState,
    Positions, Qkv, Rotation, SeededVars,
};
use rand::rngs::ChaCha12Rng;
use rand::{Rng, SeedableRng};
use std::collections::HashMap;
use std::sync::Arc;

const CPU: Device = Device::Cpu;
const B: usize = 2;
const T: usize = 13;
const VOCAB: usize = 37;

fn config(encoding: EncodingConfig, tied: bool) -> LlamaConfig {
    LlamaConfig {
        vocab_size: VOCAB,
        hidden_size: 24,
        intermediate_size: 20,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: Some(8),
        tie_word_embeddings: tied,
        max_position_embeddings: 64,
        encoding,
        ..LlamaConfig::default()
    }
}

fn encodings() -> Vec<(&'static str, EncodingConfig)> {
    let tapa = |phase, learned| {
        EncodingConfig::Tapa(TapaConfig {
            phase,
            phase_norm: Some(PhaseNorm { gain: 0.3, learned }),
            ..TapaConfig::default()
        })
    };
    vec![
        ("nope", EncodingConfig::Nope),
        (
            "sinusoidal",
            EncodingConfig::Absolute(AbsoluteConfig::default()),
        ),
        (
            "learned absolute",
            EncodingConfig::Absolute(AbsoluteConfig::Learned { max_positions: 64 }),
        ),
        ("rope", EncodingConfig::Rope(RopeConfig::default())),
        ("alibi", EncodingConfig::Alibi(AlibiConfig { slopes: None })),
        ("tapa", tapa(PhaseForm::Quadratic, false)),
        ("tapa, learned gains", tapa(PhaseForm::Quadratic, true)),
        ("tapa, linear phase", tapa(PhaseForm::Linear, true)),
        (
            "tape",
            EncodingConfig::Tape(TapeConfig {
                position_size: 5,
                ..TapeConfig::default()
            }),
        ),
        (
            "tape, mixed heads, unit states",
            EncodingConfig::Tape(TapeConfig {
                position_size: 5,
                mixing: HeadMixing::Full,
                norm: StateNorm::Unit,
                step: 0.5,
                ..TapeConfig::default()
            }),
        ),
    ]
}

/// A tensor of normal numbers that are the same for the same name.
fn numbers(name: &str, shape: &[usize], stdev: f64, dtype: DType) -> Result<Tensor> {
    let init = Init::Randn { mean: 0., stdev };
    let vb = SeededVars::new(11).builder(DType::F64, &CPU);
    vb.get_with_hints(shape, name, init)?
        .detach()
        .to_dtype(dtype)
}

/// Moves every weight, so that none is zero as some of TAPE's start.
fn stir(vars: &SeededVars) -> Result<()> {
    for (name, var) in vars.named() {
        let noise = numbers(&name, var.dims(), 0.2, var.dtype())?;
        var.set(&(var.as_tensor() + noise)?)?;
    }
    Ok(())
}

fn tokens() -> Result<Tensor> {
    let ids: Vec<i64> = (0..B * T).map(|i| (i * i * 7 + 3) as i64 % 37).collect();
    Tensor::from_vec(ids, (B, T), &CPU)
}

/// Next tokens, some of them left out.
fn targets() -> Result<Tensor> {
    let id = |i: usize| match i % 5 {
        3 => -100,
        _ => (i * 11 + 1) as i64 % 37,
    };
    Tensor::from_vec((0..B * T).map(id).collect::<Vec<_>>(), (B, T), &CPU)
}

/// Loss and gradients in training, with draws from a generator whose next number is returned too.
fn step(
    model: &Llama,
    positions: &Positions,
    recompute: Recompute,
) -> Result<(Tensor, GradStore, u64)> {
    let mut rng = ChaCha12Rng::seed_from_u64(5);
    let mut ctx = Ctx {
        train: true,
        rng: Some(&mut rng),
        ..Ctx::default()
    };
    let (tokens, targets) = (tokens()?, targets()?);
    let (loss, gradients) =
        loss_and_gradients(model, &tokens, &targets, positions, &mut ctx, recompute)?;
    Ok((loss, gradients, rng.next_u64()))
}

fn values(x: &Tensor) -> Result<Vec<f64>> {
    x.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

/// Compares the two ways over all variables. `bar` is relative to a gradient's greatest element.
fn assert_same(
    name: &str,
    model: &Llama,
    positions: &Positions,
    vars: &[(String, Var)],
    bar: f64,
) -> Result<f64> {
    let (loss, expected, next) = step(model, positions, Recompute::Nothing)?;
    let (recomputed_loss, found, recomputed_next) = step(model, positions, Recompute::Blocks)?;
    assert_eq!(values(&loss)?, values(&recomputed_loss)?, "{name}");
    assert_eq!(next, recomputed_next, "{name}: draws");
    assert_eq!(
        found.get_ids().count(),
        expected.get_ids().count(),
        "{name}: gradients"
    );
    let mut greatest = 0f64;
    for (weight, var) in vars {
        let (Some(expected), Some(found)) = (expected.get(var), found.get(var)) else {
            bail!("{name}: no gradient for {weight}")
        };
        assert_eq!(found.dtype(), var.dtype(), "{name}: {weight}");
        assert!(!found.track_op(), "{name}: {weight} holds a graph");
        assert!(!expected.track_op(), "{name}: {weight} holds a graph");
        let (found, expected) = (values(found)?, values(expected)?);
        let scale = expected.iter().fold(0., |max, x| f64::max(max, x.abs()));
        assert!(scale > 0., "{name}: the gradient of {weight} is zero");
        for (found, expected) in found.iter().zip(&expected) {
            let difference = (found - expected).abs() / scale;
            assert!(
                difference <= bar,
                "{name}, {weight}: {found} in place of {expected}"
            );
            greatest = greatest.max(difference);
        }
    }
    Ok(greatest)
}

fn several_positions() -> Result<Vec<(&'static str, Positions)>> {
    Ok(vec![
        ("span", Positions::Span { start: 3, len: T }),
        ("left-padded", Positions::left_padded(&[T, T - 4], &CPU)?),
        (
            "packed",
            Positions::packed(&[vec![5, 8], vec![3, 4, 4]], &CPU)?,
        ),
    ])
}

#[test]
fn gradients_recomputed_equal_kept_ones_in_f64_for_every_encoding() -> Result<()> {
    for (name, encoding) in encodings() {
        for tied in [false, true] {
            let vars = SeededVars::new(3);
            let config = config(encoding.clone(), tied);
            let model = Llama::new(&config, vars.builder(DType::F64, &CPU))?;
            stir(&vars)?;
            for (place, positions) in several_positions()? {
                let name = format!("{name}, tied {tied}, {place}");
                assert_same(&name, &model, &positions, &vars.named(), 1e-12)?;
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_recomputed_in_lower_precision_are_those_kept_bit_for_bit() -> Result<()> {
    let positions = Positions::left_padded(&[T - 2, T], &CPU)?;
    for dtype in [DType::F32, DType::BF16] {
        for (name, encoding) in encodings() {
            let vars = SeededVars::new(3);
            let config = config(encoding.clone(), false);
            let model = Llama::new(&config, vars.builder(dtype, &CPU))?;
            stir(&vars)?;
            assert_same(name, &model, &positions, &vars.named(), 0.)?;
        }
    }
    Ok(())
}

#[test]
fn gradients_recomputed_of_tied_embeddings_in_f32_differ_by_rounding() -> Result<()> {
    let vars = SeededVars::new(3);
    let config = config(EncodingConfig::Rope(RopeConfig::default()), true);
    let model = Llama::new(&config, vars.builder(DType::F32, &CPU))?;
    stir(&vars)?;
    let difference = assert_same("tied", &model, &Positions::first(T), &vars.named(), 1e-6)?;
    println!("greatest difference, relative to the greatest element: {difference:e}");
    Ok(())
}

#[test]
fn gradients_recomputed_on_each_backend_and_in_a_window_equal_kept_ones() -> Result<()> {
    for backend in [Backend::Dense, Backend::Fused] {
        let vars = SeededVars::new(3);
        let config = LlamaConfig {
            window: Some(4),
            ..config(EncodingConfig::Tape(TapeConfig::default()), false)
        };
        let model = Llama::new(&config, vars.builder(DType::F64, &CPU))?.with_backend(backend);
        stir(&vars)?;
        let name = format!("{backend:?}");
        assert_same(&name, &model, &Positions::first(T), &vars.named(), 1e-12)?;
    }
    Ok(())
}

/// Learned cosines, sines from learned angles, and one gain for the queries of all layers.
struct Shared {
    cos: Tensor,
    angles: Tensor,
    gain: Tensor,
}

impl Encoding for Shared {
    fn begin(&self, _x: &Tensor, positions: &Positions, _ctx: &mut Ctx) -> Result<PosState> {
        Ok(PosState {
            positions: positions.clone(),
            rotation: Some(Rotation {
                cos: self.cos.clone(), // the weight itself
                sin: self.angles.sin()?,
            }),
        })
    }

    fn encode(&self, _layer: usize, qkv: Qkv, state: &PosState) -> Result<Qkv> {
        let Some(rotation) = &state.rotation else {
            bail!("no rotation")
        };
        Ok(Qkv {
            q: rotate(&qkv.q, rotation, Layout::Half)?.broadcast_mul(&self.gain)?,
            k: rotate(&qkv.k, rotation, Layout::Half)?,
            v: qkv.v.broadcast_add(&self.cos.mean_all()?)?,
        })
    }

    /// Passes the state on as it is behind the first layer, and turned further behind the second.
    fn update(
        &self,
        layer: usize,
        state: PosState,
        _carried: Option<&Tensor>,
        mlp_out: &Tensor,
    ) -> Result<PosState> {
        let (PosState { positions, .. }, Some(Rotation { cos, sin })) = (&state, &state.rotation)
        else {
            bail!("no rotation")
        };
        if layer == 0 {
            return Ok(state);
        }
        let change = mlp_out.mean_all()?;
        Ok(PosState {
            positions: positions.clone(),
            rotation: Some(Rotation {
                cos: cos.broadcast_add(&(&change * &self.gain.squeeze(0)?)?)?,
                sin: (sin * 0.9)?,
            }),
        })
    }
}

#[test]
fn gradients_recomputed_of_weights_that_all_layers_share_equal_kept_ones() -> Result<()> {
    let vars = SeededVars::new(3);
    let vb = vars.builder(DType::F64, &CPU);
    let encoding = Shared {
        cos: vb.get((1, 1, T, 4), "cos")?,
        angles: vb.get((1, 1, T, 4), "angles")?,
        gain: vb.get(1, "gain")?,
    };
    let config = config(encoding.config(), true);
    let model = Llama::with_encoding(&config, Arc::new(encoding), vb)?;
    stir(&vars)?;
    assert_same("shared", &model, &Positions::first(T), &vars.named(), 1e-12)?;
    Ok(())
}

/// A model of plain tensors, but for the variables whose names `trained` picks.
fn partly_trained(
    config: &LlamaConfig,
    trained: impl Fn(&str) -> bool,
) -> Result<(Llama, Vec<(String, Var)>)> {
    let vars = SeededVars::new(3);
    Llama::new(config, vars.builder(DType::F64, &CPU))?;
    stir(&vars)?;
    let (trained, frozen): (Vec<_>, Vec<_>) = vars
        .named()
        .into_iter()
        .partition(|(name, _)| trained(name));
    let weights = trained
        .iter()
        .map(|(name, var)| (name.clone(), var.as_tensor().clone()))
        .chain(
            frozen
                .into_iter()
                .map(|(name, var)| (name, var.as_detached_tensor())),
        )
        .collect::<HashMap<_, _>>();
    let vb = VarBuilder::from_tensors(weights, DType::F64, &CPU);
    Ok((Llama::new(config, vb)?, trained))
}

#[test]
fn gradients_recomputed_of_partly_frozen_models_equal_kept_ones() -> Result<()> {
    let tape = || {
        EncodingConfig::Tape(TapeConfig {
            position_size: 5,
            ..TapeConfig::default()
        })
    };
    for (name, encoding) in encodings().into_iter().chain([("tape again", tape())]) {
        for trained in [
            "model.norm.weight",
            "lm_head.weight",
            "model.embed_tokens.weight",
            "model.layers.0.mlp.up_proj.weight",
            "model.layers.1.self_attn.k_proj.weight",
            "model.layers.2.self_attn.q_proj.weight",
            "model.layers.2.input_layernorm.weight",
        ] {
            let config = config(encoding.clone(), false);
            let (model, vars) = partly_trained(&config, |name| name == trained)?;
            assert_eq!(vars.len(), 1);
            let name = format!("{name}, {trained} alone");
            assert_same(&name, &model, &Positions::first(T), &vars, 1e-12)?;
        }
    }
    let (model, vars) = partly_trained(&config(tape(), false), |name| {
        name.contains("pe.") || name.contains("post_attention_gain")
    })?;
    assert_eq!(vars.len(), 8);
    assert_same("tape alone", &model, &Positions::first(T), &vars, 1e-12)?;
    Ok(())
}

#[test]
fn gradients_of_a_model_without_variables_are_an_error() -> Result<()> {
    let config = config(EncodingConfig::Rope(RopeConfig::default()), true);
    let (model, _) = partly_trained(&config, |_| false)?;
    for recompute in [Recompute::Nothing, Recompute::Blocks] {
        let message = match step(&model, &Positions::first(T), recompute) {
            Ok(_) => bail!("{recompute:?} went on"),
            Err(error) => error.to_string(),
        };
        assert!(
            message.contains("no weight of the model is a variable"),
            "{message}"
        );
    }
    Ok(())
}

#[test]
fn gradients_recomputed_of_converted_weights_arrive_at_their_masters() -> Result<()> {
    // Tied embeddings get two gradients, each rounded to the masters' f32.
    for (working, tied, bar) in [(DType::BF16, false, 0.), (DType::F64, true, 1e-6)] {
        for (name, encoding) in encodings() {
            let masters = SeededVars::new(3);
            let config = config(encoding, tied);
            Llama::new(&config, masters.builder(DType::F32, &CPU))?;
            stir(&masters)?;
            let converted: HashMap<_, _> = masters
                .named()
                .into_iter()
                .map(|(name, var)| Ok((name, var.to_dtype(working)?)))
                .collect::<Result<_>>()?;
            let vb = VarBuilder::from_tensors(converted, working, &CPU);
            let model = Llama::new(&config, vb)?;
            let name = format!("{name} in {working:?}");
            assert_same(&name, &model, &Positions::first(T), &masters.named(), bar)?;
        }
    }
    Ok(())
}

#[test]
fn loss_and_gradients_of_what_does_not_fit_are_errors_that_name_it() -> Result<()> {
    let vars = SeededVars::new(3);
    let config = config(EncodingConfig::Nope, true);
    let model = Llama::new(&config, vars.builder(DType::F32, &CPU))?;
    let (tokens, targets) = (tokens()?, targets()?);
    let first = Positions::first(T);
    for recompute in [Recompute::Nothing, Recompute::Blocks] {
        let refused = |tokens: &Tensor, targets: &Tensor, positions: &Positions, part: &str| {
            let mut ctx = Ctx::default();
            let result =
                loss_and_gradients(&model, tokens, targets, positions, &mut ctx, recompute);
            let message = match result {
                Ok(_) => bail!("went on in spite of {part}"),
                Err(error) => error.to_string(),
            };
            assert!(message.contains(part), "{message} does not tell {part}");
            Ok(())
        };
        refused(&tokens, &targets.narrow(1, 0, 5)?, &first, "[2, 5]")?;
        refused(&tokens, &(&targets + 37.)?, &first, "vocabulary of 37")?;
        refused(&(&tokens + 37.)?, &targets, &first, "vocabulary of 37")?;
        refused(
            &tokens,
            &targets,
            &Positions::first(4),
            "4 positions for 13",
        )?;
        let none = Tensor::full(-1i64, (B, T), &CPU)?;
        refused(&tokens, &none, &first, "none of the 2·13 targets counts")?;
    }
    Ok(())
}

#[test]
fn blocks_run_one_by_one_with_a_cache_equal_the_whole_pass() -> Result<()> {
    for (name, encoding) in encodings() {
        let vars = SeededVars::new(3);
        let config = config(encoding, false);
        let model = Llama::new(&config, vars.builder(DType::F64, &CPU))?;
        let tokens = tokens()?;
        let whole = model.forward(&tokens, &mut Ctx::default())?;
        let mut cache = KvCache::new(3).without_gradients();
        let mut parts = Vec::new();
        for (start, len) in [(0, 9), (9, 4)] {
            let positions = Positions::Span {
                start: start as i64,
                len,
            };
            let tokens = tokens.narrow(1, start, len)?;
            let mut stream = model.begin(&tokens, &positions, &mut Ctx::default())?;
            let mut step = cache.step(&positions, B)?;
            for layer in 0..3 {
                stream = model.block(layer, stream, Some(&mut step))?;
            }
            step.commit()?;
            parts.push(model.logits(&model.finish(&stream)?)?);
        }
        let difference = (whole - Tensor::cat(&parts, 1)?)?.abs()?.max_all()?;
        assert!(difference.to_scalar::<f64>()? < 1e-12, "{name}");
        assert_eq!(model.head().dims(), [VOCAB, 24]);
    }
    Ok(())
}

#[test]
fn block_and_finish_of_a_stream_of_integers_are_errors() -> Result<()> {
    let vars = SeededVars::new(1);
    let model = Llama::new(
        &LlamaConfig::default(),
        vars.builder(DType::F32, &Device::Cpu),
    )?;
    let tokens = Tensor::zeros((1, 5), DType::U32, &Device::Cpu)?;
    let mut stream = model.begin(&tokens, &Positions::first(5), &mut Ctx::default())?;
    stream.x = stream.x.to_dtype(DType::U32)?;
    for error in [
        model.block(0, stream.clone(), None).err(),
        model.finish(&stream).err(),
    ] {
        let told = error.map(|e| e.to_string()).unwrap_or_default();
        assert!(told.contains("u32") && told.contains("128"), "{told}");
    }
    Ok(())
}

#[test]
fn block_beyond_the_last_layer_is_an_error() -> Result<()> {
    let vars = SeededVars::new(3);
    let config = config(EncodingConfig::Nope, true);
    let model = Llama::new(&config, vars.builder(DType::F32, &CPU))?;
    let stream = model.begin(&tokens()?, &Positions::first(T), &mut Ctx::default())?;
    let message = match model.block(3, stream, None) {
        Ok(_) => bail!("there is no layer 3"),
        Err(error) => error.to_string(),
    };
    assert!(message.contains("layer 3 of 3"), "{message}");
    Ok(())
}
