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
        let weights = vars.builder(DType::F32, &CPU).pp("model");
        let built = config.encoding.build(&config.dims(), weights).unwrap();
        assert_eq!(built.config(), config.encoding, "{name}");
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

/// A saved model with RoPE.
fn saved(options: &SaveOptions) -> (tempfile::TempDir, LlamaConfig, SeededVars) {
    let folder = tempfile::tempdir().unwrap();
    let config = small(EncodingConfig::Rope(rope(RopeScaling::Default)));
    let (_, vars) = trained(&config, DType::F32).unwrap();
    hf::save(&folder, &config, &vars, options).unwrap();
    (folder, config, vars)
}

fn shards_of(bytes: u64) -> SaveOptions {
    SaveOptions {
        max_shard_bytes: bytes,
        ..SaveOptions::default()
    }
}

fn files(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Changes a JSON file of a folder.
fn edit(folder: &Path, file: &str, change: impl FnOnce(&mut Value)) {
    let path = folder.join(file);
    let mut value: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut value);
    fs::write(&path, value.to_string()).unwrap();
}

fn load(folder: &Path) -> Result<Llama> {
    ModelFolder::open(folder)?.load(DType::F32, &CPU)
}

/// Adds, replaces or removes tensors of the single file.
fn change_tensors(
    folder: &Path,
    change: impl FnOnce(&mut std::collections::HashMap<String, Tensor>),
) {
    let path = folder.join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&path, &CPU).unwrap();
    change(&mut tensors);
    candle_core::safetensors::save(&tensors, &path).unwrap();
}

fn zeros(shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, DType::F32, &CPU).unwrap()
}

#[test]
fn shards_hold_no_more_than_they_may_and_load_as_one_file_does() {
    let (whole, config, vars) = saved(&SaveOptions::default());
    let expected = logits(&load(whole.path()).unwrap()).unwrap();
    for limit in [9_000, 6_000, 1] {
        let folder = tempfile::tempdir().unwrap();
        hf::save(&folder, &config, &vars, &shards_of(limit)).unwrap();
        let names = files(folder.path());
        let shards = names.len() - 2;
        assert!(shards > 1, "{names:?}");
        assert_eq!(names[1], format!("model-00001-of-{shards:05}.safetensors"));
        assert_eq!(names[names.len() - 1], "model.safetensors.index.json");
        let mut total = 0;
        for name in &names[1..=shards] {
            let tensors = candle_core::safetensors::load(folder.path().join(name), &CPU).unwrap();
            let bytes: usize = tensors.values().map(|t| t.elem_count() * 4).sum();
            assert!(
                bytes as u64 <= limit || tensors.len() == 1,
                "{name}: {bytes}"
            );
            total += bytes;
        }
        let index = fs::read(folder.path().join("model.safetensors.index.json")).unwrap();
        let index: Value = serde_json::from_slice(&index).unwrap();
        assert_eq!(index["metadata"]["total_size"], total);
        assert_eq!(
            index["weight_map"].as_object().unwrap().len(),
            vars.named().len()
        );
        assert_eq!(logits(&load(folder.path()).unwrap()).unwrap(), expected);
    }
}

#[test]
fn saving_over_a_model_leaves_no_file_of_it() {
    let (folder, config, vars) = saved(&SaveOptions::default());
    let expected = logits(&load(folder.path()).unwrap()).unwrap();
    fs::write(folder.path().join("notes.txt"), "kept").unwrap();
    fs::write(folder.path().join(".staged-left"), "by a killed process").unwrap();
    let shard = |stem: &str, n: usize, of: usize| format!("{stem}-{n:05}-of-{of:05}.safetensors");
    let mut last = Vec::new();
    // To shards, to other shards, to as many, and back.
    for limit in [20_000, 10_000, 10_000, u64::MAX, u64::MAX] {
        hf::save(&folder, &config, &vars, &shards_of(limit)).unwrap();
        let names = files(folder.path());
        assert!(names.contains(&"notes.txt".to_string()));
        assert!(!names.iter().any(|name| name.starts_with('.')), "{names:?}");
        let weights = names.iter().filter(|name| name.ends_with(".safetensors"));
        let weights: Vec<String> = weights.cloned().collect();
        let count = weights.len();
        match limit {
            u64::MAX => {
                assert_eq!(weights, ["model.safetensors"]);
                assert!(!names.contains(&"model.safetensors.index.json".to_string()));
            }
            _ if last.len() == count => {
                // Their names were taken.
                assert!(weights.contains(&shard("model-2", 1, count)), "{weights:?}");
            }
            _ => assert!(weights.contains(&shard("model", 1, count)), "{weights:?}"),
        }
        assert_eq!(logits(&load(folder.path()).unwrap()).unwrap(), expected);
        last = weights;
    }
}

#[test]
fn single_file_beside_an_index_counts() {
    let (folder, config, vars) = saved(&SaveOptions::default());
    let (other, _, _) = saved(&shards_of(9_000));
    for name in files(other.path()) {
        fs::copy(other.path().join(&name), folder.path().join(&name)).unwrap();
    }
    change_tensors(folder.path(), |tensors| {
        tensors.insert("model.norm.weight".into(), zeros(&[32]));
    });
    let read = SeededVars::new(0);
    Llama::new(&config, read.builder(DType::F32, &CPU)).unwrap();
    ModelFolder::open(&folder)
        .unwrap()
        .load_into(&read)
        .unwrap();
    let (mut read, written) = (all_bits(&read), all_bits(&vars));
    assert_eq!(read.remove("model.norm.weight"), Some(vec![0; 32]));
    assert!(read.iter().all(|(name, values)| written[name] == *values));
}

#[test]
fn head_of_its_own_beside_tied_embeddings_must_equal_them() {
    let folder = tempfile::tempdir().unwrap();
    let config = LlamaConfig {
        tie_word_embeddings: true,
        ..small(EncodingConfig::Rope(RopeConfig::default()))
    };
    let (model, vars) = trained(&config, DType::F32).unwrap();
    hf::save(&folder, &config, &vars, &SaveOptions::default()).unwrap();
    change_tensors(folder.path(), |tensors| {
        assert!(!tensors.contains_key("lm_head.weight"));
        let embeddings = tensors["model.embed_tokens.weight"].clone();
        tensors.insert("lm_head.weight".into(), embeddings);
    });
    let loaded = load(folder.path()).unwrap();
    assert_eq!(logits(&loaded).unwrap(), logits(&model).unwrap());
    ModelFolder::open(&folder)
        .unwrap()
        .load_into(&vars)
        .unwrap();
    change_tensors(folder.path(), |tensors| {
        let other = (&tensors["lm_head.weight"] * 1.0001).unwrap();
        tensors.insert("lm_head.weight".into(), other);
    });
    let parts = [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "tie_word_embeddings",
    ];
    assert_says(load(folder.path()), &parts);
    edit(folder.path(), "config.json", |config| {
        config["tie_word_embeddings"] = false.into();
    });
    assert_ne!(
        logits(&load(folder.path()).unwrap()).unwrap(),
        logits(&model).unwrap()
    );
    // And the reverse: a head that is not there.
    let (folder, _, _) = saved(&SaveOptions::default());
    change_tensors(folder.path(), |tensors| {
        tensors.remove("lm_head.weight");
    });
    assert_says(
        load(folder.path()),
        &["lm_head.weight", "tie_word_embeddings"],
    );
}

#[test]
fn stored_dtypes_are_converted_to_what_is_asked_for() {
    for stored in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        let options = SaveOptions {
            dtype: Some(stored),
            ..SaveOptions::default()
        };
        let (folder, config, vars) = saved(&options);
        let file = folder.path().join("model.safetensors");
        let tensors = candle_core::safetensors::load(&file, &CPU).unwrap();
        let named = vars.named();
        for asked in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let read = SeededVars::new(0);
            Llama::new(&config, read.builder(asked, &CPU)).unwrap();
            let saved = ModelFolder::open(&folder).unwrap();
            saved.load_into(&read).unwrap();
            for ((name, var), (_, written)) in read.named().iter().zip(&named) {
                assert_eq!(tensors[name].dtype(), stored);
                let expected = written.to_dtype(stored).unwrap().to_dtype(asked).unwrap();
                assert_eq!(bits(var), bits(&expected), "{name} {stored:?} {asked:?}");
            }
            if asked.is_float() && stored == DType::F32 {
                let logits = logits(&saved.load(asked, &CPU).unwrap()).unwrap();
                assert!(logits.iter().all(|x| x.is_finite()));
            }
        }
        let name = match stored {
            DType::F64 => "float64",
            DType::F32 => "float32",
            DType::F16 => "float16",
            _ => "bfloat16",
        };
        assert_eq!(config_of(folder.path())["torch_dtype"], name);
        assert_eq!(config_of(folder.path())["dtype"], name);
    }
}

#[test]
fn tensors_that_do_not_fit_the_configuration_are_refused_by_name() {
    const Q: &str = "model.layers.1.self_attn.q_proj.weight";
    type Change = fn(&mut std::collections::HashMap<String, Tensor>);
    let cases: [(Change, &[&str]); 7] = [
        (|t| drop(t.remove(Q)), &[Q, "[32, 32]", "model.safetensors"]),
        (
            |t| drop(t.insert(Q.into(), zeros(&[32, 31]))),
            &[Q, "[32, 31]", "[32, 32]"],
        ),
        (
            |t| drop(t.insert("model.layers.1.self_attn.q_proj.bias".into(), zeros(&[32]))),
            &["model.layers.1.self_attn.q_proj.bias", "not used"],
        ),
        (
            |t| drop(t.insert("model.layers.3.input_layernorm.weight".into(), zeros(&[32]))),
            &["model.layers.3.input_layernorm.weight", "not used"],
        ),
        (
            |t| drop(t.insert("model.layers.0.pe.up_proj.weight".into(), zeros(&[48, 2]))),
            &["model.layers.0.pe.up_proj.weight", "not used"],
        ),
        (
            |t| drop(t.insert("empty".into(), zeros(&[0]))),
            &["empty", "not used"],
        ),
        (
            |t| drop(t.insert(Q.into(), zeros(&[32, 32]).to_dtype(DType::U8).unwrap())),
            &[Q, "U8"],
        ),
    ];
    for (change, parts) in cases {
        let (folder, config, _) = saved(&SaveOptions::default());
        change_tensors(folder.path(), change);
        assert_says(load(folder.path()), parts);
        let (_, vars) = trained(&config, DType::F32).unwrap();
        let before = all_bits(&vars);
        let folder = ModelFolder::open(&folder).unwrap();
        assert_says(folder.load_into(&vars), parts);
        assert_eq!(all_bits(&vars), before);
    }
    // Stored frequencies say nothing new.
    let (folder, _, _) = saved(&SaveOptions::default());
    change_tensors(folder.path(), |tensors| {
        let name = "model.layers.0.self_attn.rotary_emb.inv_freq";
        tensors.insert(name.into(), zeros(&[4]));
    });
    load(folder.path()).unwrap();
}

#[test]
fn configuration_that_claims_other_sizes_is_refused_without_making_them() {
    let huge = json!(1u64 << 40);
    for (name, value) in [
        ("num_hidden_layers", json!(4)),
        ("num_hidden_layers", huge.clone()),
        ("head_dim", huge.clone()),
        ("head_dim", json!(16)),
        ("vocab_size", huge.clone()),
        ("vocab_size", json!(30)),
        ("intermediate_size", huge.clone()),
        ("num_attention_heads", huge.clone()),
        ("num_key_value_heads", json!(4)),
        ("num_key_value_heads", json!(3)),
        ("hidden_size", json!(u64::MAX)),
    ] {
        let (folder, _, _) = saved(&SaveOptions::default());
        edit(folder.path(), "config.json", |config| {
            config[name] = value.clone()
        });
        assert!(load(folder.path()).is_err(), "{name} {value}");
    }
    for (encoding, value) in [
        (EncodingConfig::Tape(TapeConfig::default()), "position_size"),
        (
            EncodingConfig::Absolute(AbsoluteConfig::Learned { max_positions: 9 }),
            "max_positions",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let config = small(encoding);
        let (_, vars) = trained(&config, DType::F32).unwrap();
        hf::save(&folder, &config, &vars, &SaveOptions::default()).unwrap();
        for claimed in [json!(10), huge.clone(), json!(u64::MAX)] {
            edit(folder.path(), "config.json", |config| {
                config["encoding"][value] = claimed
            });
            assert!(load(folder.path()).is_err(), "{value}");
        }
    }
}

#[test]
fn variables_of_another_model_are_left_unchanged() {
    let (folder, config, _) = saved(&SaveOptions::default());
    let folder = ModelFolder::open(&folder).unwrap();
    let tape = LlamaConfig {
        encoding: EncodingConfig::Tape(TapeConfig::default()),
        ..config.clone()
    };
    let tied = LlamaConfig {
        tie_word_embeddings: true,
        ..config.clone()
    };
    let narrow = LlamaConfig {
        intermediate_size: 39,
        ..config
    };
    for (config, parts) in [
        (&tape, ["model.layers.0.pe.down_proj.weight", "variables"]),
        (&tied, ["lm_head.weight", "variables"]),
        (&narrow, ["[32, 40]", "[32, 39]"]),
    ] {
        let (_, vars) = trained(config, DType::F32).unwrap();
        let before = all_bits(&vars);
        assert_says(folder.load_into(&vars), &parts);
        assert_eq!(all_bits(&vars), before);
    }
    assert_says(folder.load_into(&SeededVars::new(0)), &["lm_head.weight"]);
}

#[test]
fn tape_put_on_a_rope_model_starts_as_that_model() {
    let (folder, config, rope_vars) = saved(&SaveOptions::default());
    let folder = ModelFolder::open(&folder).unwrap();
    let config = LlamaConfig {
        encoding: EncodingConfig::Tape(TapeConfig {
            rope: rope(RopeScaling::Default),
            ..TapeConfig::default()
        }),
        ..config
    };
    let vars = SeededVars::new(7);
    let model = Llama::new(&config, vars.builder(DType::F32, &CPU)).unwrap();
    let new = |name: &str| name.contains(".pe.") || name.ends_with("post_attention_gain");
    let left = folder.load_present(&vars, new).unwrap();
    assert_eq!(left.len(), 2 * 4, "{left:?}");
    assert!(left.iter().all(|name| new(name)));
    let written = all_bits(&rope_vars);
    let mut read = all_bits(&vars);
    left.iter().for_each(|name| drop(read.remove(name)));
    assert_eq!(read, written);
    // Where what is new is in the folder, it is read.
    let (_, other) = trained(&config, DType::F32).unwrap();
    let again = tempfile::tempdir().unwrap();
    hf::save(&again, &config, &other, &SaveOptions::default()).unwrap();
    let saved = ModelFolder::open(&again).unwrap();
    assert!(saved.load_present(&vars, new).unwrap().is_empty());
    assert_eq!(all_bits(&vars), all_bits(&other));
    let expected = logits(&saved.load(DType::F32, &CPU).unwrap()).unwrap();
    assert_eq!(logits(&model).unwrap(), expected);
}

#[test]
fn published_tape_weights_load_as_row_sums() {
    let config = small(EncodingConfig::Tape(TapeConfig {
        position_size: 5,
        ..TapeConfig::default()
    }));
    let (_, vars) = trained(&config, DType::F64).unwrap();
    let folder = tempfile::tempdir().unwrap();
    hf::save(&folder, &config, &vars, &SaveOptions::default()).unwrap();
    let matrix = Tensor::new(&[[0.25f64, -1.5], [3., 0.125]], &CPU).unwrap();
    change_tensors(folder.path(), |tensors| {
        for layer in 0..3 {
            tensors.remove(&format!("model.layers.{layer}.post_attention_gain"));
            let name = format!("model.layers.{layer}.post_attention_linear.weight");
            tensors.insert(name, matrix.clone());
        }
        // The published code gives the last layer an update too.
        let up = Tensor::zeros((5, 2), DType::F64, &CPU).unwrap();
        tensors.insert("model.layers.2.pe.up_proj.weight".into(), up);
    });
    let saved = ModelFolder::open(&folder).unwrap();
    let expected = logits(&saved.load(DType::F64, &CPU).unwrap()).unwrap();
    let read = SeededVars::new(0);
    let model = Llama::new(&config, read.builder(DType::F64, &CPU)).unwrap();
    saved.load_into(&read).unwrap();
    assert_eq!(logits(&model).unwrap(), expected);
    let gains: BTreeMap<_, _> = read.named().into_iter().collect();
    let gains = &gains["model.layers.1.post_attention_gain"];
    assert_eq!(gains.to_vec1::<f64>().unwrap(), [-1.25, 3.125]);
}

#[test]
fn fields_of_other_models_are_refused_by_name_and_value() {
    let base = small(EncodingConfig::Rope(RopeConfig::default())).to_hf();
    let with = |name: &str, value: Value| {
        let mut config = base.clone();
        config[name] = value;
        LlamaConfig::from_hf(&config)
    };
    for (name, value) in [
        ("model_type", json!("mistral")),
        ("model_type", json!(["llama"])),
        ("attention_bias", json!(true)),
        ("attention_bias", json!("false")),
        ("mlp_bias", json!(true)),
        ("hidden_act", json!("gelu")),
        ("architectures", json!(["LlamaForSequenceClassification"])),
        ("sliding_window", json!(4096)),
        ("use_sliding_window", json!(true)),
        (
            "layer_types",
            json!(["full_attention", "sliding_attention"]),
        ),
        ("partial_rotary_factor", json!(0.5)),
        (
            "quantization_config",
            json!({"quant_method": "gptq", "bits": 4}),
        ),
        ("logits_scaling", json!(8.0)),
        ("embedding_multiplier", json!(12.0)),
        ("residual_multiplier", json!(0.22)),
        ("attention_multiplier", json!(0.0078125)),
        ("final_logit_softcapping", json!(30.0)),
        ("attn_logit_softcapping", json!(50.0)),
        ("query_pre_attn_scalar", json!(256)),
        ("qk_norm", json!(true)),
        ("use_qk_norm", json!(true)),
        ("no_rope_layers", json!([1, 1, 1, 0])),
        ("num_experts", json!(8)),
        ("num_local_experts", json!(8)),
        ("clip_qkv", json!(8.0)),
        ("auto_map", json!({"AutoModel": "modeling.Model"})),
        ("encoding", json!({"type": "nope"})),
        ("window", json!(7)),
        (
            "rope_scaling",
            json!({"rope_type": "linear", "factor": 2.0}),
        ), // beside other rope_parameters
        ("vocab_size", json!(-5)),
        ("vocab_size", json!("31")),
        ("vocab_size", json!(31.5)),
        ("hidden_size", json!([32])),
        ("num_attention_heads", json!(1e30)),
        ("rms_norm_eps", json!("1e-5")),
        ("rms_norm_eps", json!(-0.5)),
        ("tie_word_embeddings", json!(0)),
        ("initializer_range", json!(-0.5)),
        ("head_dim", json!(-1)),
    ] {
        let shown = value.to_string();
        assert_says(with(name, value), &[name, &shown]);
    }
    assert_says(
        with("rope_scaling", json!({"rope_type": "mystery"})),
        &["mystery"],
    );
    for name in [
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    ] {
        assert_says(with(name, Value::Null), &[name, "missing"]);
    }
    // What changes nothing is accepted.
    for (name, value) in [
        ("attention_bias", Value::Null),
        ("hidden_act", json!("swish")),
        ("hidden_act", Value::Null),
        ("architectures", Value::Null),
        ("sliding_window", Value::Null),
        ("layer_types", json!(["full_attention"])),
        ("partial_rotary_factor", json!(1.0)),
        ("quantization_config", Value::Null),
        ("logits_scaling", json!(1.0)),
        ("num_experts", json!(0)),
        ("pruned_heads", json!({})),
        ("pretraining_tp", json!(2)),
        ("attention_dropout", json!(0.1)),
        ("use_cache", json!(true)),
        ("something_new", json!({"a": [1]})),
        ("vocab_size", json!(31.0)),
    ] {
        let config = with(name, value.clone()).unwrap();
        assert_eq!(
            config,
            LlamaConfig::from_hf(&base).unwrap(),
            "{name} {value}"
        );
    }
    for not_an_object in [json!([]), json!(null), json!("llama"), json!(3)] {
        assert_says(LlamaConfig::from_hf(&not_an_object), &["config.json"]);
    }
}

#[test]
fn absent_fields_have_the_defaults_of_transformers() {
    let config = json!({
        "model_type": "llama", "vocab_size": 10, "hidden_size": 12, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 3
    });
    let config = LlamaConfig::from_hf(&config).unwrap();
    let expected = LlamaConfig {
        vocab_size: 10,
        hidden_size: 12,
        intermediate_size: 16,
        num_hidden_layers: 1,
        num_attention_heads: 3,
        num_key_value_heads: 3,
        head_dim: None,
        rms_norm_eps: 1e-6,
        tie_word_embeddings: false,
        max_position_embeddings: 2048,
        window: None,
        initializer_range: 0.02,
        encoding: EncodingConfig::Rope(RopeConfig::default()),
    };
    assert_eq!(config, expected);
}

#[test]
fn both_generations_of_rope_fields_are_written_and_agree() {
    for (name, config) in hugging_face() {
        let whole = config.to_hf();
        let without = |names: &[&str]| {
            let mut value = whole.clone();
            let map = value.as_object_mut().unwrap();
            names.iter().for_each(|name| drop(map.remove(*name)));
            LlamaConfig::from_hf(&value).unwrap()
        };
        assert_eq!(LlamaConfig::from_hf(&whole).unwrap(), config, "{name}");
        assert_eq!(without(&["rope_parameters"]), config, "{name}");
        let old = [
            "rope_theta",
            "rope_scaling",
            "partial_rotary_factor",
            "original_max_position_embeddings",
        ];
        assert_eq!(without(&old), config, "{name}");
    }
}

#[test]
fn contradiction_between_generations_is_refused() {
    let config = small(EncodingConfig::Rope(rope(llama3()))).to_hf();
    let mut theta = config.clone();
    theta["rope_theta"] = json!(10000.0);
    assert_says(
        LlamaConfig::from_hf(&theta),
        &["rope_theta", "10000", "12345.6789"],
    );
    let mut factor = config;
    factor["rope_scaling"]["factor"] = json!(7.5);
    assert_says(
        LlamaConfig::from_hf(&factor),
        &["rope_scaling", "rope_parameters", "7.5"],
    );
}

#[test]
fn own_model_type_with_misplaced_or_bad_fields_is_refused() {
    let base = small(EncodingConfig::Tape(TapeConfig::default())).to_hf();
    for (name, value, part) in [
        ("rope_theta", json!(5e5), "rope_theta"),
        (
            "rope_parameters",
            json!({"rope_theta": 5e5}),
            "rope_parameters",
        ),
        ("encoding", Value::Null, "encoding"),
        ("encoding", json!("tape"), "tape"),
        ("encoding", json!({"type": "tapestry"}), "tapestry"),
        ("encoding", json!({"type": "tape", "steps": 2}), "steps"),
        ("encoding", json!({"type": "tape", "step": "2"}), "step"),
        (
            "encoding",
            json!({"type": "tape", "position_size": -2}),
            "-2",
        ),
        ("encoding", json!(["rope", 1, 2]), "object"),
        ("encoding", json!({"type": "nope", "slope": 2}), "slope 2"),
        (
            "encoding",
            json!({"type": "tape", "rope": {"scaling": {"rope_type": "default", "factor": 8}}}),
            "factor 8",
        ),
        (
            "encoding",
            json!({"type": "tape", "rope": [5e5]}),
            "rope must be an object",
        ),
        ("window", json!(-3), "window"),
        ("window", json!(0), "window"),
    ] {
        let mut config = base.clone();
        config[name] = value;
        assert_says(LlamaConfig::from_hf(&config), &[part]);
    }
    // What is out of range there is found when the encoding is built.
    let folder = tempfile::tempdir().unwrap();
    let config = small(EncodingConfig::Tapa(TapaConfig::default()));
    let (_, vars) = trained(&config, DType::F32).unwrap();
    hf::save(&folder, &config, &vars, &SaveOptions::default()).unwrap();
    edit(folder.path(), "config.json", |config| {
        config["encoding"]["alpha"] = json!(-1.0)
    });
    assert_says(load(folder.path()), &["alpha", "-1"]);
}

#[test]
fn index_that_does_not_fit_the_shards_is_refused() {
    const INDEX: &str = "model.safetensors.index.json";
    const NORM: &str = "model.norm.weight";
    let place =
        |name: &'static str, file: Value| move |index: &mut Value| index["weight_map"][name] = file;
    type Change = Box<dyn FnOnce(&mut Value)>;
    let cases: Vec<(Change, &[&str])> = vec![
        (
            Box::new(place(NORM, json!("../other.safetensors"))),
            &[NORM, "../other"],
        ),
        (
            Box::new(place(NORM, json!("/etc/passwd"))),
            &[NORM, "/etc/passwd"],
        ),
        (Box::new(place(NORM, json!(".."))), &[NORM, "\"..\""]),
        (Box::new(place(NORM, json!("."))), &[NORM, "\".\""]),
        (Box::new(place(NORM, json!(""))), &[NORM, "\"\""]),
        (
            Box::new(place(NORM, json!("a/b.safetensors"))),
            &[NORM, "a/b"],
        ),
        (Box::new(place(NORM, json!(7))), &[NORM, "7"]),
        (
            Box::new(place(NORM, json!("none.safetensors"))),
            &["none.safetensors"],
        ),
        (
            Box::new(place("more", json!("model-00001-of-00004.safetensors"))),
            &["more", "model-00001"],
        ),
        (
            Box::new(place(NORM, json!("model-00001-of-00004.safetensors"))),
            &[NORM, "model-00001"],
        ),
        (
            Box::new(|index| *index = json!({})),
            &["weight_map", "missing"],
        ),
        (Box::new(|index| *index = json!([])), &["object"]),
        (
            Box::new(|index| index["weight_map"] = json!([])),
            &["weight_map", "[]"],
        ),
        (
            Box::new(|index| index["weight_map"] = json!({})),
            &[INDEX, "places no tensor"],
        ),
    ];
    for (change, parts) in cases {
        let (folder, _, _) = saved(&shards_of(24_000));
        let first = folder.path().join("model-00001-of-00004.safetensors");
        assert!(first.exists(), "{:?}", files(folder.path()));
        edit(folder.path(), INDEX, change);
        assert_says(load(folder.path()), parts);
    }
    // Two shards with one tensor.
    let (folder, _, _) = saved(&shards_of(24_000));
    let shard = |n: usize| {
        folder
            .path()
            .join(format!("model-{n:05}-of-00004.safetensors"))
    };
    fs::copy(shard(1), shard(2)).unwrap();
    assert_says(load(folder.path()), &["model-0000"]);
    // A shard cut short, and one that is missing.
    let (folder, _, _) = saved(&shards_of(24_000));
    let shard = folder.path().join("model-00003-of-00004.safetensors");
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes[..bytes.len() - 1]).unwrap();
    assert_says(load(folder.path()), &["model-00003-of-00004"]);
    fs::remove_file(&shard).unwrap();
    assert_says(load(folder.path()), &["model-00003-of-00004"]);
}

#[test]
fn git_lfs_pointer_in_place_of_weights_is_named() {
    let (folder, _, _) = saved(&SaveOptions::default());
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n";
    fs::write(folder.path().join("model.safetensors"), pointer).unwrap();
    assert_says(load(folder.path()), &["model.safetensors", "git lfs pull"]);
}

#[test]
fn folder_without_a_model_says_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let open = || ModelFolder::open(&folder);
    assert_says(
        ModelFolder::open(folder.path().join("absent")),
        &["absent", "config.json"],
    );
    assert_says(open(), &["config.json"]);
    fs::write(folder.path().join("config.json"), "{\"model_type\": ").unwrap();
    assert_says(open(), &["config.json", "JSON"]);
    let config = small(EncodingConfig::Rope(RopeConfig::default())).to_hf();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    assert_says(
        open(),
        &["model.safetensors", "model.safetensors.index.json"],
    );
    fs::write(folder.path().join("pytorch_model.bin"), "").unwrap();
    assert_says(open(), &["pytorch_model.bin", "only safetensors"]);
}

#[test]
fn what_the_model_does_not_know_is_kept_when_saved_again() {
    let (folder, config, vars) = saved(&SaveOptions::default());
    edit(folder.path(), "config.json", |config| {
        config["eos_token_id"] = json!([2, 5]);
        config["bos_token_id"] = json!(1);
        config["pad_token_id"] = json!(-1);
        config["use_cache"] = json!(true);
        config["a_number"] = json!(0.1);
        config["attention_bias"] = json!(null);
        config["transformers_version"] = json!("5.24.0");
    });
    fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    let first = ModelFolder::open(&folder).unwrap();
    assert_eq!(first.eos_token_ids(), [2, 5]);
    assert_eq!(first.bos_token_id(), Some(1));
    assert_eq!(
        first.tokenizer(),
        Some(folder.path().join("tokenizer.json"))
    );
    let again = tempfile::tempdir().unwrap();
    let again = again.path().join("deep/er");
    hf::save(&again, &config, &vars, &first.save_options()).unwrap();
    let second = ModelFolder::open(&again).unwrap();
    assert_eq!(second.eos_token_ids(), [2, 5]);
    assert_eq!(second.tokenizer(), Some(again.join("tokenizer.json")));
    let value = config_of(&again);
    assert_eq!(value["pad_token_id"], -1);
    assert_eq!(value["a_number"], 0.1);
    assert_eq!(value["attention_bias"], false);
    assert_eq!(value["transformers_version"], Value::Null);
    // Over itself.
    hf::save(&again, &config, &vars, &second.save_options()).unwrap();
    assert_eq!(config_of(&again), value);
    // What generation says comes first.
    let generation = folder.path().join("generation_config.json");
    fs::write(&generation, r#"{"eos_token_id": 9, "do_sample": true}"#).unwrap();
    let third = ModelFolder::open(&folder).unwrap();
    assert_eq!(third.eos_token_ids(), [9]);
    assert_eq!(third.bos_token_id(), Some(1));
    for bad in [
        r#"{"eos_token_id": "</s>"}"#,
        r#"{"eos_token_id": -1}"#,
        "{",
        "[]",
    ] {
        fs::write(&generation, bad).unwrap();
        assert_says(ModelFolder::open(&folder), &["generation_config.json"]);
    }
}

#[test]
fn every_file_of_the_tokenizer_is_kept_when_saved_again() {
    let (folder, config, vars) = saved(&SaveOptions::default());
    let names = [
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    ];
    for name in names {
        fs::write(folder.path().join(name), "{}").unwrap();
    }
    let options = ModelFolder::open(&folder).unwrap().save_options();
    let again = tempfile::tempdir().unwrap();
    hf::save(&again, &config, &vars, &options).unwrap();
    assert_eq!(files(again.path()), files(folder.path()));
}

/// The cache of Hugging Face holds links, and loses what they lead to.
#[cfg(unix)]
#[test]
fn links_are_followed_and_those_that_lead_nowhere_are_named() {
    use std::os::unix::fs::symlink;
    let (blobs, config, vars) = saved(&SaveOptions::default());
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name);
    for name in ["config.json", "model.safetensors"] {
        symlink(blobs.path().join(name), place(name)).unwrap();
    }
    let opened = ModelFolder::open(&folder).unwrap();
    // Saving replaces the links, not what they lead to.
    let before = fs::read(blobs.path().join("model.safetensors")).unwrap();
    let others = SeededVars::new(77);
    Llama::new(&config, others.builder(DType::F32, &CPU)).unwrap();
    hf::save(&folder, &config, &others, &opened.save_options()).unwrap();
    assert!(fs::read(blobs.path().join("model.safetensors")).unwrap() == before);
    // The folder that is open reads the weights that it was opened with.
    let read = SeededVars::new(0);
    Llama::new(&config, read.builder(DType::F32, &CPU)).unwrap();
    opened.load_into(&read).unwrap();
    assert_eq!(all_bits(&read), all_bits(&vars));

    symlink("nowhere", place("tokenizer.json")).unwrap();
    let opened = ModelFolder::open(&folder).unwrap();
    assert_eq!(opened.tokenizer(), Some(place("tokenizer.json")));
    let again = tempfile::tempdir().unwrap();
    let saving = hf::save(&again, &config, &vars, &opened.save_options());
    assert_says(saving, &["tokenizer.json", "No such file"]);
    symlink("nowhere", place("generation_config.json")).unwrap();
    assert_says(
        ModelFolder::open(&folder),
        &["generation_config.json", "No such file"],
    );
    fs::remove_file(place("generation_config.json")).unwrap();
    fs::remove_file(place("model.safetensors")).unwrap();
    symlink("nowhere", place("model.safetensors")).unwrap();
    assert_says(
        ModelFolder::open(&folder),
        &["model.safetensors", "No such file"],
    );
}

#[test]
fn weights_that_cannot_be_computed_with_are_refused() {
    let (folder, config, vars) = saved(&SaveOptions::default());
    let opened = ModelFolder::open(&folder).unwrap();
    for dtype in [DType::U8, DType::U32, DType::I64, DType::F8E4M3] {
        let part = format!("{dtype:?}");
        assert_says(opened.load(dtype, &CPU), &["llama", &part]);
        let new = SeededVars::new(0);
        let model = Llama::new(&config, new.builder(dtype, &CPU));
        assert_says(model, &["llama", &part]);
    }
    // Numbers beyond f16.
    let named = vars.named().into_iter();
    let mut tensors: BTreeMap<_, _> = named
        .map(|(name, var)| (name, var.as_tensor().clone()))
        .collect();
    const NORM: &str = "model.norm.weight";
    tensors.insert(NORM.into(), (zeros(&[32]) + 1e5).unwrap());
    hf::save_tensors(&folder, &config, &tensors, &SaveOptions::default()).unwrap();
    let opened = ModelFolder::open(&folder).unwrap();
    assert!(opened.load(DType::BF16, &CPU).is_ok());
    assert_says(opened.load(DType::F16, &CPU), &[NORM, "100000", "F16"]);
}

#[test]
fn weights_of_tape_in_a_model_without_it_are_refused() {
    let (folder, _, _) = saved(&SaveOptions::default());
    let extra = "model.layers.2.pe.adapt.weight";
    change_tensors(folder.path(), |tensors| {
        tensors.insert(extra.into(), zeros(&[2, 2]));
    });
    assert_says(load(folder.path()), &[extra, "not used"]);
}

#[test]
fn error_is_one_line_with_backtraces_too() {
    let (folder, _, _) = saved(&SaveOptions::default());
    let said = |error: candle_core::Error| match error {
        candle_core::Error::WithBacktrace { inner, .. } => inner.to_string(),
        other => other.to_string(),
    };
    change_tensors(folder.path(), |tensors| {
        tensors.remove("model.norm.weight");
    });
    let missing = said(load(folder.path()).err().unwrap());
    assert!(missing.contains("model.norm.weight"), "{missing}");
    assert_eq!(missing.lines().count(), 1, "{missing}");
    let mut bytes = 2u64.to_le_bytes().to_vec();
    bytes.extend(b"{x");
    fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    let header = said(load(folder.path()).err().unwrap());
    assert!(header.contains("header: not valid JSON"), "{header}");
    assert_eq!(header.lines().count(), 1, "{header}");
}

#[test]
fn folder_without_special_tokens_has_none() {
    let (folder, _, _) = saved(&SaveOptions::default());
    let config = config_of(folder.path());
    assert!(config.as_object().unwrap()["eos_token_id"].is_null());
    let folder = ModelFolder::open(&folder).unwrap();
    assert!(folder.eos_token_ids().is_empty());
    assert_eq!(folder.bos_token_id(), None);
    assert_eq!(folder.tokenizer(), None);
}

#[test]
fn save_of_what_is_not_the_model_is_refused_and_changes_nothing() {
    let (folder, config, vars) = saved(&SaveOptions::default());
    let before: Vec<_> = files(folder.path());
    let bytes = |name: &str| fs::read(folder.path().join(name)).unwrap();
    let (weights, text) = (bytes("model.safetensors"), bytes("config.json"));
    let named = vars.named().into_iter();
    let tensors: BTreeMap<_, _> = named
        .map(|(name, var)| (name, var.as_tensor().clone()))
        .collect();
    type Tensors = BTreeMap<String, Tensor>;
    let save = |change: &dyn Fn(&mut Tensors, &mut LlamaConfig, &mut SaveOptions)| {
        let (mut tensors, mut config) = (tensors.clone(), config.clone());
        let mut options = SaveOptions::default();
        change(&mut tensors, &mut config, &mut options);
        hf::save_tensors(&folder, &config, &tensors, &options)
    };
    const UP: &str = "model.layers.2.mlp.up_proj.weight";
    assert_says(save(&|t, _, _| drop(t.remove(UP))), &[UP]);
    assert_says(
        save(&|t, _, _| drop(t.insert(UP.into(), zeros(&[4, 4])))),
        &[UP, "[4, 4]", "[40, 32]"],
    );
    assert_says(
        save(&|t, _, _| drop(t.insert("score.weight".into(), zeros(&[2, 32])))),
        &["score.weight"],
    );
    assert_says(
        save(&|t, _, _| drop(t.insert(UP.into(), zeros(&[40, 32]).to_dtype(DType::U8).unwrap()))),
        &[UP, "U8"],
    );
    assert_says(
        save(&|_, c, _| c.rms_norm_eps = f64::NAN),
        &["rms_norm_eps", "NaN"],
    );
    assert_says(
        save(&|_, c, _| c.vocab_size = 32),
        &["model.embed_tokens.weight", "[32, 32]"],
    );
    assert_says(
        save(&|_, c, _| {
            c.encoding = EncodingConfig::Rope(RopeConfig {
                theta: f64::NAN,
                ..RopeConfig::default()
            })
        }),
        &["NaN"],
    );
    assert_says(
        save(&|t, _, o| {
            t.insert(UP.into(), (zeros(&[40, 32]) + 1e6).unwrap());
            o.dtype = Some(DType::F16);
        }),
        &[UP, "1000000"],
    );
    for dtype in [DType::U8, DType::F8E4M3] {
        let part = format!("{dtype:?}");
        assert_says(save(&|_, _, o| o.dtype = Some(dtype)), &[&part]);
    }
    for name in [
        "hidden_size",
        "attention_bias",
        "rope_scaling",
        "encoding",
        "dtype",
    ] {
        assert_says(
            save(&|_, _, o| o.extra = Map::from_iter([(name.to_string(), json!(1))])),
            &[name],
        );
    }
    assert_says(
        save(&|_, _, o| o.files = vec!["absent.json".into()]),
        &["absent.json"],
    );
    assert_says(
        save(&|_, _, o| o.files = vec!["elsewhere/config.json".into()]),
        &["config.json"],
    );
    assert_eq!(files(folder.path()), before);
    assert!(bytes("model.safetensors") == weights && bytes("config.json") == text);
}
