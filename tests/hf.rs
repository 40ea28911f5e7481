//! Models into folders and out of them.

use candle_core::{DType, Device, Result, Tensor};
use candle_posenc::encoding::*;
use candle_posenc::hf::{self, ModelFolder, SaveOptions};
use candle_posenc::{Ctx, Layout, Llama, LlamaConfig, SeededVars};
use serde_json::{json, Map, Value};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const CPU: Device = Device::Cpu;

fn small(encoding: EncodingConfig) -> LlamaConfig {
    LlamaConfig {
        vocab_size: 31,
        hidden_size: 32,
        intermediate_size: 40,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: None,
        rms_norm_eps: 0.1 + 0.2 - 0.29999,
        tie_word_embeddings: false,
        max_position_embeddings: 64,
        window: None,
        initializer_range: 0.2,
        encoding,
    }
}

fn rope(scaling: RopeScaling) -> RopeConfig {
    RopeConfig {
        theta: 12_345.678_9,
        scaling,
        ..RopeConfig::default()
    }
}

fn yarn() -> Yarn {
    Yarn {
        factor: Some(4.),
        original_max_position_embeddings: Some(16),
        beta_fast: 4.,
        ..Yarn::default()
    }
}

fn longrope() -> LongRope {
    LongRope {
        short_factor: vec![1., 1.1, 1.2, 1.3],
        long_factor: vec![1., 2., 3., 4.7],
        factor: None,
        original_max_position_embeddings: Some(16),
        attention_factor: None,
    }
}

fn llama3() -> RopeScaling {
    RopeScaling::Llama3 {
        factor: 8.,
        low_freq_factor: 1.,
        high_freq_factor: 4.,
        original_max_position_embeddings: 16,
    }
}

/// Models that transformers computes in the same way.
fn hugging_face() -> Vec<(&'static str, LlamaConfig)> {
    let scalings = [
        ("default", RopeScaling::Default),
        ("linear", RopeScaling::Linear { factor: 1.1 }),
        ("dynamic", RopeScaling::Dynamic { factor: 2.5 }),
        ("yarn", RopeScaling::Yarn(yarn())),
        (
            "yarn of the longest length",
            RopeScaling::Yarn(Yarn {
                original_max_position_embeddings: None,
                factor: Some(3.),
                beta_fast: 4.,
                truncate: false,
                attention_factor: Some(1.05),
                ..Yarn::default()
            }),
        ),
        ("longrope", RopeScaling::LongRope(longrope())),
        ("llama3", llama3()),
        ("proportional", RopeScaling::Proportional { factor: 2. }),
    ];
    let mut models: Vec<_> = scalings
        .into_iter()
        .map(|(name, scaling)| (name, small(EncodingConfig::Rope(rope(scaling)))))
        .collect();
    let partial = RopeConfig {
        partial_rotary_factor: 0.5,
        ..rope(RopeScaling::Proportional { factor: 1. })
    };
    models.push(("proportional, half", small(EncodingConfig::Rope(partial))));
    let wide = LlamaConfig {
        head_dim: Some(12),
        tie_word_embeddings: true,
        ..small(EncodingConfig::Rope(RopeConfig::default()))
    };
    models.push(("tied, wide heads", wide));
    models
}

/// Models that transformers would run as something that they are not.
fn own() -> Vec<(&'static str, LlamaConfig)> {
    let mut models: Vec<_> = [
        ("nope", EncodingConfig::Nope),
        (
            "sinusoidal",
            EncodingConfig::Absolute(AbsoluteConfig::default()),
        ),
        (
            "learned positions",
            EncodingConfig::Absolute(AbsoluteConfig::Learned { max_positions: 50 }),
        ),
        ("alibi", EncodingConfig::Alibi(AlibiConfig::default())),
        (
            "alibi with slopes",
            EncodingConfig::Alibi(AlibiConfig {
                slopes: Some(vec![0.1, 1. / 3., 0.7, 0.]),
            }),
        ),
        ("tapa", EncodingConfig::Tapa(TapaConfig::default())),
        (
            "tapa, linear",
            EncodingConfig::Tapa(TapaConfig {
                theta: 0.25,
                alpha: 0.3,
                phase: PhaseForm::Linear,
                phase_norm: Some(PhaseNorm {
                    gain: 0.2,
                    learned: false,
                }),
            }),
        ),
        (
            "tapa, learned gains",
            EncodingConfig::Tapa(TapaConfig {
                phase_norm: Some(PhaseNorm {
                    gain: 0.7,
                    learned: true,
                }),
                ..TapaConfig::default()
            }),
        ),
        ("tape", EncodingConfig::Tape(TapeConfig::default())),
        (
            "tape, full mixing",
            EncodingConfig::Tape(TapeConfig {
                rope: rope(RopeScaling::Yarn(yarn())),
                position_size: 6,
                mixing: HeadMixing::Full,
                norm: StateNorm::Unit,
                step: 0.3,
                random_shift: false,
                ..TapeConfig::default()
            }),
        ),
        (
            "tape without attention update",
            EncodingConfig::Tape(TapeConfig {
                attention_update: false,
                ..TapeConfig::default()
            }),
        ),
        (
            "rope, interleaved",
            EncodingConfig::Rope(RopeConfig {
                layout: Layout::Interleaved,
                ..RopeConfig::default()
            }),
        ),
        (
            "rope, half of the head",
            EncodingConfig::Rope(RopeConfig {
                partial_rotary_factor: 0.5,
                ..RopeConfig::default()
            }),
        ),
        (
            "ntk",
            EncodingConfig::Rope(rope(RopeScaling::Ntk { factor: 3. })),
        ),
        (
            "yarn whose factor is not the ratio of its lengths",
            EncodingConfig::Rope(rope(RopeScaling::Yarn(Yarn {
                factor: Some(5.),
                ..yarn()
            }))),
        ),
        (
            "yarn without room for its ramp",
            EncodingConfig::Rope(RopeConfig {
                theta: 2.,
                ..rope(RopeScaling::Yarn(Yarn {
                    original_max_position_embeddings: Some(2),
                    factor: Some(32.),
                    ..Yarn::default()
                }))
            }),
        ),
        (
            "longrope whose factor is not the ratio of its lengths",
            EncodingConfig::Rope(rope(RopeScaling::LongRope(LongRope {
                factor: Some(2.),
                ..longrope()
            }))),
        ),
    ]
    .into_iter()
    .map(|(name, encoding)| (name, small(encoding)))
    .collect();
    let window = LlamaConfig {
        window: Some(5),
        ..small(EncodingConfig::Rope(RopeConfig::default()))
    };
    models.push(("rope with a window", window));
    models
}

/// The variables of a model, all of them random, those that begin as zeros too.
fn trained(config: &LlamaConfig, dtype: DType) -> Result<(Llama, SeededVars)> {
    let vars = SeededVars::new(5);
    let model = Llama::new(config, vars.builder(dtype, &CPU))?;
    let noise = SeededVars::new(6);
    for (name, var) in vars.named() {
        let init = candle_nn::Init::Randn {
            mean: 0.,
            stdev: 0.1,
        };
        let noise = noise
            .builder(dtype, &CPU)
            .get_with_hints(var.dims(), &name, init)?;
        var.set(&(var.as_tensor() + noise)?)?;
    }
    Ok((model, vars))
}

fn logits(model: &Llama) -> Result<Vec<f64>> {
    let tokens: Vec<u32> = (0..2 * 23).map(|i| i * 7 % 31).collect();
    let tokens = Tensor::from_vec(tokens, (2, 23), &CPU)?;
    let logits = model.forward(&tokens, &mut Ctx::default())?;
    logits.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

fn bits(tensor: &Tensor) -> Vec<u64> {
    let values = tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
    let values = values.to_vec1::<f64>().unwrap();
    values.into_iter().map(f64::to_bits).collect()
}

fn all_bits(vars: &SeededVars) -> BTreeMap<String, Vec<u64>> {
    let named = vars.named().into_iter();
    named.map(|(name, var)| (name, bits(&var))).collect()
}

fn config_of(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap()
}

fn assert_says(result: Result<impl Sized>, parts: &[&str]) {
    let error = result.err().expect("this should fail").to_string();
    let line = error.lines().next().unwrap_or_default();
    for part in parts {
        assert!(line.contains(part), "{error:?} does not tell of {part:?}");
    }
}

#[test]
fn model_saved_and_loaded_gives_the_same_bits_with_every_encoding() {
    let models = hugging_face().into_iter().map(|model| (model, "llama"));
    let models = models.chain(own().into_iter().map(|model| (model, "candle_posenc")));
    for ((name, config), kind) in models {
        let folder = tempfile::tempdir().unwrap();
        let (model, vars) = trained(&config, DType::F32).unwrap();
        hf::save(&folder, &config, &vars, &SaveOptions::default()).unwrap();
        assert_eq!(config_of(folder.path())["model_type"], kind, "{name}");
        let saved = ModelFolder::open(&folder).unwrap();
        assert_eq!(saved.config(), &config, "{name}");
        let expected = logits(&model).unwrap();
        assert!(expected.iter().all(|x| x.is_finite()), "{name}");
        let loaded = saved.load(DType::F32, &CPU).unwrap();
        assert_eq!(logits(&loaded).unwrap(), expected, "{name}");
        // Into variables that were other ones.
        let others = SeededVars::new(99);
        let other = Llama::new(&config, others.builder(DType::F32, &CPU)).unwrap();
        assert_ne!(logits(&other).unwrap(), expected, "{name}");
        saved.load_into(&others).unwrap();
        assert_eq!(all_bits(&others), all_bits(&vars), "{name}");
        assert_eq!(logits(&other).unwrap(), expected, "{name}");
        // And once more: the same files.
        let again = tempfile::tempdir().unwrap();
        hf::save(&again, saved.config(), &others, &saved.save_options()).unwrap();
        for file in ["config.json", "model.safetensors"] {
            let read = |folder: &Path| fs::read(folder.join(file)).unwrap();
            assert!(read(folder.path()) == read(again.path()), "{name}: {file}");
        }
    }
}
