//! Whole models: gradients, optimisation, hooks, configuration, errors.

mod toy;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, IndexOp, Result, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use candle_posenc::encoding::{HeadMixing, TapeConfig};
use candle_posenc::{
    Ctx, Encoding, EncodingConfig, KvCache, Llama, LlamaConfig, PosState, Positions, Qkv, Score,
    SeededVars,
};
use std::sync::{Arc, Mutex};
use toy::*;

const LEN: usize = 10;

fn loss_of(model: &Llama) -> Result<Tensor> {
    let tokens = tokens(2, LEN, 31)?;
    loss(&whole(model, &tokens, &Positions::first(LEN))?, &tokens)
}

fn fresh(config: &LlamaConfig, dtype: DType) -> Result<(Llama, SeededVars)> {
    let vars = SeededVars::new(5);
    let model = Llama::new(config, vars.builder(dtype, &Device::Cpu))?;
    Ok((model.with_backend(BACKENDS[0]), vars))
}

fn largest(x: &Tensor) -> Result<f64> {
    x.to_dtype(DType::F64)?.abs()?.max_all()?.to_scalar()
}

/// The largest gradient of a variable; 0 where there is none.
fn gradient_size(gradients: &GradStore, var: &Var) -> Result<f64> {
    gradients.get(var).map_or(Ok(0.), largest)
}

#[test]
fn every_weight_has_a_gradient_and_a_step_changes_it() -> Result<()> {
    for (name, encoding) in encodings() {
        for backend in BACKENDS {
            for tie_word_embeddings in [false, true] {
                let config = LlamaConfig {
                    tie_word_embeddings,
                    ..config(encoding.clone())
                };
                let (model, vars) = trained(&config, DType::F64, backend)?;
                let named = vars.named();
                let tied = !named.iter().any(|(name, _)| name == "lm_head.weight");
                assert_eq!(tied, tie_word_embeddings);
                let gradients = loss_of(&model)?.backward()?;
                for (var_name, var) in &named {
                    let size = gradient_size(&gradients, var)?;
                    let what = format!("{name}, {backend:?}: {var_name}");
                    assert!(size.is_finite() && size > 1e-7, "{what}: gradient {size:e}");
                }
                let before: Vec<Tensor> = named
                    .iter()
                    .map(|(_, var)| var.as_detached_tensor().copy())
                    .collect::<Result<_>>()?;
                let mut optimiser = AdamW::new(vars.vars(), ParamsAdamW::default())?;
                optimiser.step(&gradients)?;
                for ((var_name, var), before) in named.iter().zip(before) {
                    let change = largest(&(var.as_tensor() - before)?)?;
                    assert!(change > 1e-4, "{name}: {var_name} changes by {change:e}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn tape_weights_behind_zeros_have_gradients_after_one_step() -> Result<()> {
    for mixing in [HeadMixing::PerHead, HeadMixing::Full] {
        let tape = EncodingConfig::Tape(TapeConfig {
            mixing,
            ..TapeConfig::default()
        });
        let (model, vars) = fresh(&config(tape), DType::F64)?;
        let of_tape = |name: &str| name.contains(".pe.") || name.contains("post_attention_");
        let first = loss_of(&model)?.backward()?;
        let mut seen = 0;
        for (name, var) in vars.named() {
            let size = gradient_size(&first, &var)?;
            let behind_zeros = name.contains("pe.x_proj") || name.contains("pe.down_proj");
            assert_eq!(size == 0., behind_zeros, "{name}: gradient {size:e}");
            if of_tape(&name) && !name.contains("layernorm") {
                seen += 1;
                assert!(!name.contains("layers.2."), "{name} in the last layer");
            }
        }
        assert_eq!(seen, 2 * 4, "weights of TAPE in two of three layers");
        let mut optimiser = AdamW::new(vars.vars(), ParamsAdamW::default())?;
        optimiser.step(&first)?;
        let second = loss_of(&model)?.backward()?;
        for (name, var) in vars.named() {
            let size = gradient_size(&second, &var)?;
            assert!(size.is_finite() && size > 0., "{name}: gradient {size:e}");
        }
    }
    Ok(())
}

#[test]
fn tape_as_it_starts_is_rope() -> Result<()> {
    let rope = EncodingConfig::Rope(Default::default());
    let tape = EncodingConfig::Tape(TapeConfig::default());
    let (rope, _) = fresh(&config(rope), DType::F64)?;
    let (tape, _) = fresh(&config(tape), DType::F64)?;
    let tokens = tokens(2, LEN, 32)?;
    let logits = |model| whole(model, &tokens, &Positions::first(LEN));
    assert_close(&logits(&tape)?, &logits(&rope)?, "TAPE against RoPE");
    Ok(())
}

#[test]
fn gradients_equal_finite_differences() -> Result<()> {
    const STEP: f64 = 3e-5;
    for (name, encoding) in encodings() {
        for backend in BACKENDS {
            let (model, vars) = trained(&config(encoding.clone()), DType::F64, backend)?;
            let gradients = loss_of(&model)?.backward()?;
            for (index, (var_name, var)) in vars.named().into_iter().enumerate() {
                let Some(gradient) = gradients.get(&var) else {
                    panic!("{name}: {var_name} has no gradient")
                };
                let gradient = gradient.flatten_all()?.to_vec1::<f64>()?;
                let (shape, values) = (var.shape().clone(), var.flatten_all()?.to_vec1::<f64>()?);
                // The steepest weight and an arbitrary one.
                let steepest = (0..gradient.len())
                    .max_by(|a, b| gradient[*a].abs().total_cmp(&gradient[*b].abs()));
                for at in [steepest.unwrap_or(0), (7919 * index) % gradient.len()] {
                    let loss_with = |change: f64| -> Result<f64> {
                        let mut moved = values.clone();
                        moved[at] += change;
                        var.set(&Tensor::from_vec(moved, &shape, &Device::Cpu)?)?;
                        loss_of(&model)?.to_scalar()
                    };
                    // Of fourth order: random TAPA bends too much for the simple quotient.
                    let central = |step: f64| -> Result<f64> {
                        Ok((loss_with(step)? - loss_with(-step)?) / step)
                    };
                    let slope = (4. * central(STEP)? - central(2. * STEP)?) / 6.;
                    loss_with(0.)?;
                    let (exact, what) = (gradient[at], format!("{name}, {backend:?}: {var_name}"));
                    let error = (slope - exact).abs();
                    assert!(
                        error <= 1e-8 + 1e-6 * exact.abs(),
                        "{what}[{at}]: {exact} and {slope}"
                    );
                }
            }
        }
    }
    Ok(())
}

#[test]
fn backends_agree_on_logits_and_gradients() -> Result<()> {
    for (name, encoding) in encodings() {
        let config = LlamaConfig {
            window: Some(7),
            ..config(encoding)
        };
        let run = |backend| -> Result<(Tensor, Vec<(String, Tensor)>)> {
            let (model, vars) = trained(&config, DType::F64, backend)?;
            // Padding and more than one document.
            let positions = Positions::packed(&[vec![4, 6], vec![9]], &Device::Cpu)?;
            let tokens = tokens(2, LEN, 33)?;
            let logits = whole(&model, &tokens, &positions)?;
            let gradients = loss(&logits, &tokens)?.backward()?;
            let mut found = Vec::new();
            for (name, var) in vars.named() {
                match gradients.get(&var) {
                    Some(gradient) => found.push((name, gradient.clone())),
                    None => panic!("{name} has no gradient"),
                }
            }
            Ok((logits, found))
        };
        let (reference, gradients) = run(BACKENDS[0])?;
        for backend in &BACKENDS[1..] {
            let (logits, others) = run(*backend)?;
            assert_close(&logits, &reference, name);
            for ((var_name, gradient), (_, other)) in gradients.iter().zip(&others) {
                assert_close(other, gradient, &format!("{name}, {backend:?}: {var_name}"));
            }
        }
    }
    Ok(())
}

#[test]
fn later_tokens_change_no_earlier_logit() -> Result<()> {
    for (name, encoding) in encodings() {
        for backend in BACKENDS {
            let model = frozen(&config(encoding.clone()), DType::F64, backend)?;
            let (one, other) = (tokens(1, LEN, 34)?, tokens(1, LEN, 35)?);
            let mixed = Tensor::cat(&[&one.narrow(1, 0, 6)?, &other.narrow(1, 6, 4)?], 1)?;
            let logits = |tokens| whole(&model, tokens, &Positions::first(LEN));
            let (one, mixed) = (logits(&one)?, logits(&mixed)?);
            assert_close(&mixed.narrow(1, 0, 6)?, &one.narrow(1, 0, 6)?, name);
            assert!(
                difference(&mixed.i((0, 9))?, &one.i((0, 9))?) > 1e-3,
                "{name}"
            );
        }
    }
    Ok(())
}

#[test]
fn order_of_tokens_matters_to_every_encoding_but_none() -> Result<()> {
    // Swapping two tokens in one layer with no encoding leaves the last token's logits as they are.
    for (name, encoding) in encodings() {
        for backend in BACKENDS {
            let config = LlamaConfig {
                num_hidden_layers: 1,
                ..config(encoding.clone())
            };
            let model = frozen(&config, DType::F64, backend)?;
            let logits = |ids: [u32; 6]| -> Result<Tensor> {
                let tokens = Tensor::new(&[ids], &Device::Cpu)?;
                whole(&model, &tokens, &Positions::first(6))?.i((0, 5))
            };
            let swapped = difference(&logits([1, 9, 3, 4, 5, 6])?, &logits([1, 4, 3, 9, 5, 6])?);
            assert_eq!(swapped > 1e-6, name != "nope", "{name}: {swapped:e}");
        }
    }
    Ok(())
}

#[test]
fn half_precision_follows_the_same_weights_in_f32() -> Result<()> {
    for (name, encoding) in encodings() {
        for dtype in [DType::BF16, DType::F16] {
            for backend in BACKENDS {
                let config = LlamaConfig {
                    initializer_range: 0.1,
                    ..config(encoding.clone())
                };
                let (model, vars) = trained(&config, dtype, backend)?;
                let vb = plain(&vars, DType::F32)?;
                let exact = Llama::new(model.config(), vb)?.with_backend(backend);
                let tokens = tokens(2, LEN, 36)?;
                let logits = whole(&model, &tokens, &Positions::first(LEN))?;
                assert_eq!(logits.dtype(), dtype);
                let reference = whole(&exact, &tokens, &Positions::first(LEN))?;
                // Eight roundings' worth: half of that was measured.
                let tolerance = 8.
                    * match dtype {
                        DType::BF16 => 2f64.powi(-8),
                        _ => 2f64.powi(-11),
                    };
                let found = difference(&logits, &reference);
                assert!(found < tolerance, "{name}, {dtype:?}, {backend:?}: {found}");
                // Scaled, as training in f16 does it: else the smallest gradients vanish.
                let loss = (loss(&logits.to_dtype(DType::F32)?, &tokens)? * 1024.)?;
                let gradients = loss.backward()?;
                for (var_name, var) in vars.named() {
                    let size = gradient_size(&gradients, &var)?;
                    assert!(
                        size.is_finite() && size > 0.,
                        "{name}, {dtype:?}: {var_name} {size}"
                    );
                }
            }
        }
    }
    Ok(())
}

#[test]
fn model_shared_by_threads_gives_each_its_own_results() -> Result<()> {
    fn assert_shareable<T: Send + Sync>(_: &T) {}
    for (name, encoding) in encodings() {
        let model = frozen(&config(encoding), DType::F64, BACKENDS[BACKENDS.len() - 1])?;
        assert_shareable(&model);
        let run = |seed| -> Result<Tensor> {
            let tokens = tokens(2, LEN, seed)?;
            in_chunks(&model, &tokens, [4, 1, 5], &mut KvCache::new(3))
        };
        let expected = [run(37)?, run(38)?];
        let found = std::thread::scope(|scope| {
            let threads = [37, 38].map(|seed| scope.spawn(move || run(seed)));
            threads.map(|thread| thread.join().expect("no panic"))
        });
        for (found, expected) in found.into_iter().zip(&expected) {
            assert_eq!(difference(&found?, expected), 0., "{name}");
        }
    }
    Ok(())
}

#[test]
fn weights_have_hugging_face_names() -> Result<()> {
    let (_, vars) = fresh(&config(EncodingConfig::Nope), DType::F32)?;
    let mut expected = vec![
        ("lm_head.weight".to_string(), vec![VOCAB, 24]),
        ("model.embed_tokens.weight".to_string(), vec![VOCAB, 24]),
        ("model.norm.weight".to_string(), vec![24]),
    ];
    for layer in 0..3 {
        for (name, shape) in [
            ("input_layernorm", vec![24]),
            ("mlp.down_proj", vec![24, 36]),
            ("mlp.gate_proj", vec![36, 24]),
            ("mlp.up_proj", vec![36, 24]),
            ("post_attention_layernorm", vec![24]),
            ("self_attn.k_proj", vec![16, 24]),
            ("self_attn.o_proj", vec![24, 32]),
            ("self_attn.q_proj", vec![32, 24]),
            ("self_attn.v_proj", vec![16, 24]),
        ] {
            expected.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    expected.sort();
    let found: Vec<_> = vars
        .named()
        .into_iter()
        .map(|(name, var)| (name, var.dims().to_vec()))
        .collect();
    assert_eq!(found, expected);
    Ok(())
}

#[test]
fn fresh_weights_are_as_configured() -> Result<()> {
    let config = LlamaConfig {
        initializer_range: 0.07,
        ..config(EncodingConfig::Nope)
    };
    let (_, vars) = fresh(&config, DType::F64)?;
    for (name, var) in vars.named() {
        let values = var.flatten_all()?.to_vec1::<f64>()?;
        if name.contains("norm") {
            assert!(values.iter().all(|value| *value == 1.), "{name}");
        } else {
            let square = values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64;
            assert!(
                (square.sqrt() - 0.07).abs() < 0.01,
                "{name}: {}",
                square.sqrt()
            );
        }
    }
    Ok(())
}

#[test]
fn model_saved_and_loaded_gives_the_same_logits() -> Result<()> {
    let path = std::env::temp_dir().join(format!("toy_llama_{}.safetensors", std::process::id()));
    let tape = EncodingConfig::Tape(TapeConfig::default());
    let (one, vars) = trained(&config(tape.clone()), DType::F32, BACKENDS[0])?;
    vars.save(&path)?;
    let (other, vars) = fresh(&config(tape), DType::F32)?;
    let tokens = tokens(1, LEN, 39)?;
    let logits = |model| whole(model, &tokens, &Positions::first(LEN));
    assert!(difference(&logits(&other)?, &logits(&one)?) > 1e-2);
    vars.load(&path)?;
    assert_eq!(difference(&logits(&other)?, &logits(&one)?), 0.);
    std::fs::remove_file(path)?;
    Ok(())
}

#[test]
fn config_through_json_is_the_same() -> Result<()> {
    for (name, encoding) in encodings() {
        let config = LlamaConfig {
            window: Some(5),
            ..config(encoding)
        };
        let text = serde_json::to_string(&config).expect("a configuration that can be written");
        let read: LlamaConfig = serde_json::from_str(&text).expect("what was written");
        assert_eq!(read, config, "{name}: {text}");
    }
    let minimal = serde_json::json!({
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "sliding_window": 16, "encoding": { "type": "nope" }
    });
    let config: LlamaConfig = serde_json::from_value(minimal).expect("a configuration");
    assert_eq!(config.dims().head_dim, 16);
    assert_eq!((config.window, config.rms_norm_eps), (Some(16), 1e-6));
    assert_eq!(
        (config.tie_word_embeddings, config.initializer_range),
        (false, 0.02)
    );
    config.validate()
}

#[test]
fn config_of_sizes_whose_product_overflows_is_refused_by_name() {
    let huge = usize::MAX / 2 + 1;
    let refuses = |change: &dyn Fn(&mut LlamaConfig), name: &str| {
        let mut config = config(EncodingConfig::Nope);
        change(&mut config);
        let vb = SeededVars::new(0).builder(DType::F32, &Device::Cpu);
        let error = Llama::new(&config, vb).err().expect(name).to_string();
        assert!(error.contains(name), "{error}");
    };
    refuses(
        &|c| c.head_dim = Some(huge),
        "num_attention_heads · head_dim",
    );
    refuses(&|c| c.vocab_size = huge, "vocab_size · hidden_size");
    refuses(
        &|c| c.intermediate_size = huge,
        "intermediate_size · hidden_size",
    );
    refuses(&|c| c.hidden_size = huge, "vocab_size · hidden_size");
}

#[test]
fn plan_for_no_token_or_more_than_memory_addresses_is_refused_with_both_sizes() -> Result<()> {
    let model = frozen(&config(EncodingConfig::Nope), DType::F32, BACKENDS[0])?;
    for (batch, len) in [(0, 4), (4, 0), (usize::MAX, 2), (1 << 40, 1 << 40)] {
        let error = model.plan(0, batch, len).expect_err("an error").to_string();
        let told = format!("{batch} rows of {len} tokens");
        assert!(error.contains(&told), "{error}");
    }
    Ok(())
}

#[test]
fn config_that_makes_no_model_is_refused_by_name() {
    let base = || config(EncodingConfig::Nope);
    for (config, expected) in [
        (
            LlamaConfig {
                vocab_size: 0,
                ..base()
            },
            "vocab_size",
        ),
        (
            LlamaConfig {
                hidden_size: 0,
                ..base()
            },
            "hidden_size",
        ),
        (
            LlamaConfig {
                intermediate_size: 0,
                ..base()
            },
            "intermediate_size",
        ),
        (
            LlamaConfig {
                num_hidden_layers: 0,
                ..base()
            },
            "num_hidden_layers",
        ),
        (
            LlamaConfig {
                num_attention_heads: 0,
                ..base()
            },
            "num_attention_heads",
        ),
        (
            LlamaConfig {
                num_attention_heads: 0,
                head_dim: None,
                ..base()
            },
            "num_attention_heads",
        ),
        (
            LlamaConfig {
                num_key_value_heads: 0,
                ..base()
            },
            "num_key_value_heads",
        ),
        (
            LlamaConfig {
                num_key_value_heads: 3,
                ..base()
            },
            "num_key_value_heads 3",
        ),
        (
            LlamaConfig {
                head_dim: Some(0),
                ..base()
            },
            "head_dim",
        ),
        (
            LlamaConfig {
                head_dim: None,
                hidden_size: 26,
                ..base()
            },
            "hidden_size 26",
        ),
        (
            LlamaConfig {
                max_position_embeddings: 0,
                ..base()
            },
            "max_position_embeddings",
        ),
        (
            LlamaConfig {
                window: Some(0),
                ..base()
            },
            "window",
        ),
        (
            LlamaConfig {
                rms_norm_eps: 0.,
                ..base()
            },
            "rms_norm_eps 0",
        ),
        (
            LlamaConfig {
                rms_norm_eps: f64::NAN,
                ..base()
            },
            "rms_norm_eps NaN",
        ),
        (
            LlamaConfig {
                initializer_range: -1.,
                ..base()
            },
            "initializer_range -1",
        ),
    ] {
        let vars = SeededVars::new(0);
        let error = Llama::new(&config, vars.builder(DType::F32, &Device::Cpu)).map(|_| ());
        let error = error.unwrap_err().to_string();
        assert!(error.contains(expected), "{error} should name {expected}");
        assert!(vars.vars().is_empty(), "{expected}");
    }
}

#[test]
fn tokens_and_positions_that_do_not_fit_are_refused() -> Result<()> {
    let model = frozen(&config(EncodingConfig::Nope), DType::F32, BACKENDS[0])?;
    let cpu = &Device::Cpu;
    let two_by_three = tokens(2, 3, 40)?;
    for (tokens, expected) in [
        (Tensor::new(&[1u32, 2], cpu)?, "(B, T)"),
        (Tensor::new(&[[[1u32]]], cpu)?, "(B, T)"),
        (Tensor::zeros((2, 0), DType::U32, cpu)?, "no token"),
        (Tensor::zeros((0, 2), DType::U32, cpu)?, "no token"),
        (Tensor::new(&[[1f32]], cpu)?, "F32"),
        (Tensor::new(&[[1u32, VOCAB as u32, 2]], cpu)?, "23"),
        (Tensor::new(&[[1u32, u32::MAX]], cpu)?, "4294967295"),
        (Tensor::new(&[[1i64, -2]], cpu)?, "-2"),
        (Tensor::new(&[[1i64, 1 << 40]], cpu)?, "1099511627776"),
    ] {
        let error = model
            .forward(&tokens, &mut Ctx::default())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(expected),
            "{error} should contain {expected}"
        );
    }
    for (positions, expected) in [
        (Positions::first(4), "4 positions for 3 tokens"),
        (Positions::left_padded(&[3, 2, 1], cpu)?, "batch of 2"),
    ] {
        let error = whole(&model, &two_by_three, &positions)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(expected),
            "{error} should contain {expected}"
        );
    }
    let signed = whole(
        &model,
        &two_by_three.to_dtype(DType::I64)?,
        &Positions::first(3),
    )?;
    let unsigned = whole(&model, &two_by_three, &Positions::first(3))?;
    assert_eq!(difference(&signed, &unsigned), 0.);
    Ok(())
}

#[test]
fn logits_of_a_part_of_the_stream_equal_that_part_of_the_logits() -> Result<()> {
    let model = frozen(&config(EncodingConfig::Nope), DType::F64, BACKENDS[0])?;
    let tokens = tokens(2, LEN, 41)?;
    let positions = Positions::first(LEN);
    let hidden = model.hidden_at(&tokens, &positions, None, &mut planned())?;
    assert_eq!(hidden.dims(), &[2, LEN, 24]);
    let last = model.logits(&hidden.narrow(1, LEN - 1, 1)?)?;
    let all = whole(&model, &tokens, &positions)?;
    assert_close(&last, &all.narrow(1, LEN - 1, 1)?, "last logits");
    Ok(())
}

/// Notes each hook that is called, and carries a value column for every layer but the first.
#[derive(Default)]
struct Recorder {
    calls: Mutex<Vec<String>>,
}

impl Recorder {
    fn note(&self, call: String) {
        self.calls.lock().expect("no panic").push(call);
    }
}

impl Encoding for Recorder {
    fn embed(&self, x: &Tensor, _: &Positions) -> Result<Tensor> {
        self.note(format!("embed {:?}", x.dims()));
        Ok(x.clone())
    }

    fn begin(&self, x: &Tensor, positions: &Positions, _: &mut Ctx) -> Result<PosState> {
        self.note(format!("begin {:?}", x.dims()));
        Ok(PosState {
            positions: positions.clone(),
            rotation: None,
        })
    }

    fn encode(&self, layer: usize, qkv: Qkv, _: &PosState) -> Result<Qkv> {
        let Qkv { q, k, v } = qkv;
        // A view, as the projection made it.
        let views = [&q, &k, &v].map(|x| !x.is_contiguous());
        self.note(format!(
            "encode {layer} {:?} {:?} {:?} {views:?}",
            q.dims(),
            k.dims(),
            v.dims()
        ));
        let v = match layer {
            0 => v,
            _ => Tensor::cat(&[&v, &v.narrow(3, 0, 1)?.ones_like()?], 3)?,
        };
        Ok(Qkv { q, k, v })
    }

    fn score(&self, layer: usize) -> Score {
        self.note(format!("score {layer}"));
        Score::Dot
    }

    fn update(
        &self,
        layer: usize,
        state: PosState,
        carried: Option<&Tensor>,
        mlp_out: &Tensor,
    ) -> Result<PosState> {
        let dims = carried.map(|c| c.dims().to_vec());
        self.note(format!("update {layer} {dims:?} {:?}", mlp_out.dims()));
        if let Some(carried) = carried {
            // The average of ones.
            assert!(difference(carried, &carried.ones_like()?) < 1e-12);
        }
        Ok(state)
    }
}

#[test]
fn hooks_are_called_in_order_with_the_shapes_they_state() -> Result<()> {
    let config = LlamaConfig {
        num_hidden_layers: 2,
        ..config(EncodingConfig::Nope)
    };
    let recorder = Arc::new(Recorder::default());
    let vars = SeededVars::new(6);
    let vb = vars.builder(DType::F64, &Device::Cpu);
    let with_recorder = LlamaConfig {
        encoding: recorder.config(),
        ..config.clone()
    };
    let model = Llama::with_encoding(&with_recorder, recorder.clone(), vb.clone())?;
    let model = model.with_backend(BACKENDS[0]);
    let tokens = tokens(2, 5, 42)?;
    let logits = whole(&model, &tokens, &Positions::first(5))?;
    let expected = [
        "embed [2, 5, 24]",
        "begin [2, 5, 24]",
        "encode 0 [2, 4, 5, 8] [2, 2, 5, 8] [2, 2, 5, 8] [true, true, true]",
        "score 0",
        "update 0 None [2, 5, 24]",
        "encode 1 [2, 4, 5, 8] [2, 2, 5, 8] [2, 2, 5, 8] [true, true, true]",
        "score 1",
        "update 1 Some([2, 4, 5, 1]) [2, 5, 24]",
    ];
    assert_eq!(*recorder.calls.lock().expect("no panic"), expected);
    // The column it carries changes no output.
    let plain = Llama::new(&config, vb)?.with_backend(BACKENDS[0]);
    assert_close(
        &logits,
        &whole(&plain, &tokens, &Positions::first(5))?,
        "logits",
    );
    // And the cache takes the wider values.
    let mut cache = KvCache::new(2);
    assert_close(
        &in_chunks(&model, &tokens, [3, 1, 1], &mut cache)?,
        &logits,
        "decoded",
    );
    Ok(())
}
