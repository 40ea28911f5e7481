//! Damaged model folders: whatever bytes are there, reading ends with an error and nothing changed, or with exactly
//! what the files say. And a folder whose writer is killed.

use candle_core::{DType, Device, Result, Tensor};
use candle_posenc::encoding::{
    EncodingConfig, PhaseNorm, RopeConfig, RopeScaling, TapaConfig, TapeConfig, Yarn,
};
use candle_posenc::hf::{self, ModelFolder, SaveOptions};
use candle_posenc::{Llama, LlamaConfig, SeededVars};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use serde_json::{json, Value};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

const CPU: Device = Device::Cpu;
const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

fn tiny(encoding: EncodingConfig) -> LlamaConfig {
    LlamaConfig {
        vocab_size: 7,
        hidden_size: 8,
        intermediate_size: 6,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        max_position_embeddings: 16,
        tie_word_embeddings: false,
        encoding,
        ..LlamaConfig::default()
    }
}

fn models() -> Vec<LlamaConfig> {
    let yarn = RopeConfig {
        scaling: RopeScaling::Yarn(Yarn {
            factor: Some(2.),
            original_max_position_embeddings: Some(8),
            ..Yarn::default()
        }),
        ..RopeConfig::default()
    };
    let tapa = TapaConfig {
        phase_norm: Some(PhaseNorm {
            gain: 0.3,
            learned: true,
        }),
        ..TapaConfig::default()
    };
    let tape = TapeConfig {
        position_size: 3,
        ..TapeConfig::default()
    };
    [
        EncodingConfig::Rope(yarn),
        EncodingConfig::Tapa(tapa),
        EncodingConfig::Tape(tape),
    ]
    .map(tiny)
    .to_vec()
}

type Bits = BTreeMap<String, (Vec<usize>, Vec<u32>)>;

fn bits_of(tensor: &Tensor) -> (Vec<usize>, Vec<u32>) {
    let values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let bits = values.into_iter().map(f32::to_bits).collect();
    (tensor.dims().to_vec(), bits)
}

fn all_bits(vars: &SeededVars) -> Bits {
    let named = vars.named().into_iter();
    named.map(|(name, var)| (name, bits_of(&var))).collect()
}

/// Variables of a model, all different.
fn vars_of(config: &LlamaConfig, seed: u64) -> SeededVars {
    let vars = SeededVars::new(seed);
    Llama::new(config, vars.builder(DType::F32, &CPU)).unwrap();
    for (i, (_, var)) in vars.named().iter().enumerate() {
        let shift = seed as f64 + i as f64 / 64.;
        var.set(&(var.as_tensor() + shift).unwrap()).unwrap();
    }
    vars
}

/// Files of a folder.
type Files = BTreeMap<String, Vec<u8>>;

fn files_of(folder: &Path) -> Files {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let file = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().unwrap();
        (name, fs::read(entry.path()).unwrap())
    };
    entries.map(file).collect()
}

/// The models as saved, each in one file and in shards.
static SAVED: LazyLock<Vec<(LlamaConfig, [Files; 2])>> = LazyLock::new(|| {
    let save = |config: &LlamaConfig, max_shard_bytes| {
        let folder = tempfile::tempdir().unwrap();
        let options = SaveOptions {
            max_shard_bytes,
            ..SaveOptions::default()
        };
        hf::save(&folder, config, &vars_of(config, 1), &options).unwrap();
        files_of(folder.path())
    };
    let both = |config: LlamaConfig| {
        let files = [save(&config, u64::MAX), save(&config, 1000)];
        (config, files)
    };
    models().into_iter().map(both).collect()
});

/// Reads a folder in every way: an error and nothing changed, or what the files say.
fn read(config: &LlamaConfig, files: &Files) {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    // Variables of the model as it was, and, where the configuration still makes one of this size, as it is now.
    let mut targets = vec![vars_of(config, 2)];
    let Ok(opened) = ModelFolder::open(&folder) else {
        return;
    };
    let loaded = opened.load(DType::F32, &CPU);
    if loaded.is_ok() && opened.config() != config {
        targets.push(vars_of(opened.config(), 3));
    }
    for vars in targets {
        let before = all_bits(&vars);
        match opened.load_into(&vars) {
            Ok(()) => {
                assert!(loaded.is_ok());
                let stored = stored(files);
                for (name, read) in all_bits(&vars) {
                    assert_eq!(read, stored[&name], "{name}");
                }
            }
            Err(error) => {
                assert!(!error.to_string().is_empty());
                assert!(all_bits(&vars) == before, "{error}");
            }
        }
    }
    // Saved again, it is the same model.
    if loaded.is_ok() {
        let again = tempfile::tempdir().unwrap();
        let vars = vars_of(opened.config(), 4);
        opened.load_into(&vars).unwrap();
        hf::save(&again, opened.config(), &vars, &opened.save_options()).unwrap();
        let again = ModelFolder::open(&again).unwrap();
        assert_eq!(again.config(), opened.config());
    }
}

/// What candle reads of the files that count.
fn stored(files: &Files) -> Bits {
    let counts = |name: &str| match files.contains_key(SINGLE) {
        true => name == SINGLE,
        false => name.ends_with(".safetensors"),
    };
    let mut stored = Bits::new();
    for (_, bytes) in files.iter().filter(|(name, _)| counts(name)) {
        let tensors = candle_core::safetensors::load_buffer(bytes, &CPU).unwrap();
        for (name, tensor) in tensors {
            let tensor = tensor.to_dtype(DType::F32).unwrap();
            stored.insert(name, bits_of(&tensor));
        }
    }
    stored
}

/// One change of a document's structure.
#[derive(Clone, Debug)]
enum Edit {
    Drop,
    Replace(Value),
    Rename(String),
    Add(String, Value),
    Wrap,
}

fn anything() -> impl Strategy<Value = Value> {
    let sizes = prop_oneof![
        Just(json!(0)),
        Just(json!(1)),
        Just(json!(2)),
        Just(json!(8)),
        Just(json!(16)),
        Just(json!(-1)),
        Just(json!(8.0)),
        Just(json!(1u64 << 31)),
        Just(json!(1u64 << 40)),
        Just(json!(u64::MAX)),
        Just(json!(i64::MIN)),
        any::<u64>().prop_map(Value::from),
    ];
    let numbers = prop_oneof![
        Just(json!(1e300)),
        Just(json!(-1e300)),
        Just(json!(5e-324)),
        Just(json!(0.5)),
        Just(json!(-0.0)),
        any::<f64>().prop_map(Value::from),
    ];
    let names = prop_oneof![
        Just("llama"),
        Just("candle_posenc"),
        Just("default"),
        Just("yarn"),
        Just("llama3"),
        Just("dynamic"),
        Just("rope"),
        Just("alibi"),
        Just("nope"),
        Just("../x"),
        Just(""),
    ]
    .prop_map(Value::from);
    let others = prop_oneof![
        Just(Value::Null),
        Just(json!(true)),
        Just(json!(false)),
        Just(json!([])),
        Just(json!({})),
        Just(json!([1, "a", null])),
        Just(json!({"rope_type": "linear", "factor": 2.0})),
    ];
    prop_oneof![3 => sizes, 2 => numbers, 2 => names, 2 => others]
}

fn field() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("rope_scaling"),
        Just("rope_parameters"),
        Just("rope_theta"),
        Just("partial_rotary_factor"),
        Just("head_dim"),
        Just("num_key_value_heads"),
        Just("sliding_window"),
        Just("attention_bias"),
        Just("eos_token_id"),
        Just("window"),
        Just("encoding"),
        Just("slopes"),
        Just("type"),
        Just("unknown"),
    ]
    .prop_map(str::to_string)
}

fn edit() -> impl Strategy<Value = (prop::sample::Index, Edit)> {
    let kind = prop_oneof![
        1 => Just(Edit::Drop),
        5 => anything().prop_map(Edit::Replace),
        1 => field().prop_map(Edit::Rename),
        2 => (field(), anything()).prop_map(|(name, value)| Edit::Add(name, value)),
        1 => Just(Edit::Wrap),
    ];
    (any::<prop::sample::Index>(), kind)
}

/// The places of all values within a document, as JSON pointers.
fn places(value: &Value, at: String, all: &mut Vec<String>) {
    if let Value::Object(map) = value {
        for (name, value) in map {
            let name = name.replace('~', "~0").replace('/', "~1");
            places(value, format!("{at}/{name}"), all);
        }
    }
    if let Value::Array(list) = value {
        for (i, value) in list.iter().enumerate() {
            places(value, format!("{at}/{i}"), all);
        }
    }
    all.push(at);
}

fn apply(document: &mut Value, place: &prop::sample::Index, edit: &Edit) {
    let mut all = Vec::new();
    places(document, String::new(), &mut all);
    let place = place.get(&all).clone();
    let (parent, last) = place.rsplit_once('/').unwrap_or(("", ""));
    let name = last.replace("~1", "/").replace("~0", "~");
    match edit {
        Edit::Replace(value) => {
            if let Some(old) = document.pointer_mut(&place) {
                *old = value.clone();
            }
        }
        Edit::Wrap => {
            if let Some(old) = document.pointer_mut(&place) {
                *old = json!([old.take()]);
            }
        }
        Edit::Add(name, value) => {
            if let Some(Value::Object(map)) = document.pointer_mut(&place) {
                map.insert(name.clone(), value.clone());
            } else if let Some(Value::Object(map)) = document.pointer_mut(parent) {
                map.insert(name.clone(), value.clone());
            }
        }
        Edit::Drop | Edit::Rename(_) => {
            if let Some(Value::Object(map)) = document.pointer_mut(parent) {
                if let (Some(value), Edit::Rename(new)) = (map.remove(&name), edit) {
                    map.insert(new.clone(), value);
                }
            }
        }
    }
}

/// One change of a file's bytes.
#[derive(Clone, Debug)]
enum Damage {
    Flip(prop::sample::Index, u8),
    Set(prop::sample::Index, u8),
    Insert(prop::sample::Index, Vec<u8>),
    Remove(prop::sample::Index, usize),
    Cut(prop::sample::Index),
    Extend(Vec<u8>),
}

fn damage() -> impl Strategy<Value = Damage> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        (index(), 0u8..8).prop_map(|(at, bit)| Damage::Flip(at, 1 << bit)),
        (
            index(),
            prop::sample::select(b"0123456789.,:-\"{}[]ae \x00\xff".to_vec())
        )
            .prop_map(|(at, byte)| Damage::Set(at, byte)),
        (index(), vec(any::<u8>(), 1..9)).prop_map(|(at, bytes)| Damage::Insert(at, bytes)),
        (index(), 1usize..9).prop_map(|(at, count)| Damage::Remove(at, count)),
        index().prop_map(Damage::Cut),
        vec(any::<u8>(), 1..9).prop_map(Damage::Extend),
    ]
}

fn harm(bytes: &mut Vec<u8>, limit: usize, damage: &Damage) {
    let end = limit.min(bytes.len());
    if end == 0 {
        return;
    }
    match damage {
        Damage::Flip(at, mask) => bytes[at.index(end)] ^= mask,
        Damage::Set(at, byte) => bytes[at.index(end)] = *byte,
        Damage::Insert(at, new) => {
            let at = at.index(end);
            bytes.splice(at..at, new.iter().copied());
        }
        Damage::Remove(at, count) => {
            let at = at.index(end);
            bytes.drain(at..(at + count).min(end));
        }
        Damage::Cut(at) => bytes.truncate(at.index(end)),
        Damage::Extend(new) => bytes.extend(new),
    }
}

fn fixed(cases: u32, seed: u64) -> ProptestConfig {
    ProptestConfig {
        cases,
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

/// The header of a safetensors file, and the bytes behind it.
fn split(bytes: &[u8]) -> (Value, &[u8]) {
    let size = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (
        serde_json::from_slice(&bytes[8..8 + size]).unwrap(),
        &bytes[8 + size..],
    )
}

fn join(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

proptest! {
    #![proptest_config(fixed(1000, 1))]

    #[test]
    fn configuration_with_edited_structure_is_refused_or_read_as_it_says(
        model in 0usize..3,
        edits in vec(edit(), 1..3),
    ) {
        let (config, [files, _]) = &SAVED[model];
        let mut files = files.clone();
        let mut document: Value = serde_json::from_slice(&files[CONFIG]).unwrap();
        for (place, edit) in &edits {
            apply(&mut document, place, edit);
        }
        if let Ok(parsed) = LlamaConfig::from_hf(&document) {
            // What is accepted is said again without loss.
            prop_assert_eq!(&LlamaConfig::from_hf(&parsed.to_hf()).unwrap(), &parsed);
        }
        files.insert(CONFIG.into(), document.to_string().into_bytes());
        read(config, &files);
    }

    #[test]
    fn configuration_with_damaged_text_is_refused_or_read_as_it_says(
        model in 0usize..3,
        damages in vec(damage(), 1..3),
    ) {
        let (config, [files, _]) = &SAVED[model];
        let mut files = files.clone();
        let text = files.get_mut(CONFIG).unwrap();
        damages.iter().for_each(|damage| harm(text, usize::MAX, damage));
        read(config, &files);
    }

    #[test]
    fn index_that_is_damaged_is_refused_or_read_as_it_says(
        model in 0usize..3,
        edits in vec(edit(), 0..3),
        damages in vec(damage(), 0..2),
    ) {
        let (config, [_, files]) = &SAVED[model];
        let mut files = files.clone();
        let mut document: Value = serde_json::from_slice(&files[INDEX]).unwrap();
        for (place, edit) in &edits {
            apply(&mut document, place, edit);
        }
        let mut text = document.to_string().into_bytes();
        damages.iter().for_each(|damage| harm(&mut text, usize::MAX, damage));
        files.insert(INDEX.into(), text);
        read(config, &files);
    }

    #[test]
    fn weights_with_damaged_bytes_are_refused_or_read_as_they_are(
        model in 0usize..3,
        sharded in any::<bool>(),
        damages in vec(damage(), 1..3),
        file in any::<prop::sample::Index>(),
        anywhere in any::<bool>(),
    ) {
        let (config, saved) = &SAVED[model];
        let mut files = saved[usize::from(sharded)].clone();
        let names: Vec<String> = files.keys().filter(|n| n.ends_with(".safetensors")).cloned().collect();
        let bytes = files.get_mut(file.get(&names)).unwrap();
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let limit = if anywhere { usize::MAX } else { header };
        damages.iter().for_each(|damage| harm(bytes, limit, damage));
        read(config, &files);
    }

    #[test]
    fn weights_with_an_edited_header_are_refused_or_read_as_they_are(
        model in 0usize..3,
        edits in vec(edit(), 1..3),
    ) {
        let (config, [files, _]) = &SAVED[model];
        let mut files = files.clone();
        let bytes = &files[SINGLE];
        let (mut header, data) = split(bytes);
        for (place, edit) in &edits {
            apply(&mut header, place, edit);
        }
        let bytes = join(&header.to_string(), data);
        files.insert(SINGLE.into(), bytes);
        read(config, &files);
    }
}

#[test]
fn folder_that_is_whole_is_read() {
    for (config, saved) in SAVED.iter() {
        for files in saved {
            let folder = tempfile::tempdir().unwrap();
            for (name, bytes) in files {
                fs::write(folder.path().join(name), bytes).unwrap();
            }
            let vars = vars_of(config, 2);
            ModelFolder::open(&folder)
                .unwrap()
                .load_into(&vars)
                .unwrap();
            assert!(all_bits(&vars) == all_bits(&vars_of(config, 1)));
            read(config, files);
        }
    }
}

#[test]
fn files_made_to_mislead_are_refused() {
    let (config, [files, _]) = &SAVED[0];
    let (header, data) = split(&files[SINGLE]);
    let norm = "model.norm.weight";
    let refused = |bytes: Vec<u8>, part: &str| {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(CONFIG), &files[CONFIG]).unwrap();
        fs::write(folder.path().join(SINGLE), bytes).unwrap();
        let result = ModelFolder::open(&folder).and_then(|folder| folder.load(DType::F32, &CPU));
        let error = result.err().expect(part).to_string();
        assert!(error.contains(part), "{error} does not tell of {part}");
        assert!(error.contains(SINGLE), "{error}");
    };
    let edited = |change: &dyn Fn(&mut Value)| {
        let mut header = header.clone();
        change(&mut header);
        join(&header.to_string(), data)
    };
    let mut endless = files[SINGLE].clone();
    endless[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    refused(endless, "header");
    let offsets = |from: u64, to: u64| {
        move |header: &mut Value| header[norm]["data_offsets"] = json!([from, to])
    };
    refused(edited(&offsets(0, 32)), "offset");
    refused(edited(&offsets(32, 0)), "offset");
    refused(edited(&offsets(u64::MAX - 31, u64::MAX)), "offset");
    let shape = |shape: Value| move |header: &mut Value| header[norm]["shape"] = shape.clone();
    refused(edited(&shape(json!([u64::MAX, u64::MAX]))), "overflow");
    refused(edited(&shape(json!([1u64 << 62, 0]))), "invalid");
    refused(edited(&shape(json!([2, 4]))), norm);
    refused(edited(&|header| header[norm]["dtype"] = json!("I32")), norm);
    refused(edited(&|header| header[norm]["dtype"] = json!("F7")), "F7");
    let text = header.to_string();
    let twice = text.replacen('{', &format!("{{\"{norm}\":{},", header[norm]), 1);
    refused(join(&twice, data), "given twice");
    refused(join(&format!("{}{text}", "[".repeat(1000)), data), "JSON");
    refused(join(&text, &data[..data.len() - 1]), "follow");
    // The configuration.
    let text = String::from_utf8(files[CONFIG].clone()).unwrap();
    for (from, to, part) in [
        ("\"vocab_size\": 7", "\"vocab_size\": NaN", "JSON"),
        ("\"vocab_size\": 7", "\"vocab_size\": 1e999", "JSON"),
        (
            "\"vocab_size\": 7",
            "\"vocab_size\": 7, \"vocab_size\": 8",
            "given twice",
        ),
        (
            "\"rms_norm_eps\": 0.00001",
            "\"rms_norm_eps\": Infinity",
            "JSON",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        assert!(text.contains(from), "{text}");
        fs::write(folder.path().join(CONFIG), text.replace(from, to)).unwrap();
        fs::write(folder.path().join(SINGLE), &files[SINGLE]).unwrap();
        let error = ModelFolder::open(&folder).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains(CONFIG), "{error}");
    }
    read(config, files);
}

/// What the saver below writes in its `n`th turn.
fn turn(n: u64, change_config: bool) -> (LlamaConfig, SeededVars, SaveOptions) {
    let mut config = models().remove(0);
    config.hidden_size = 64;
    if change_config && n % 2 == 1 {
        config.rms_norm_eps = 0.25;
    }
    let options = SaveOptions {
        // One file, three shards, three other shards, one file, …
        max_shard_bytes: [u64::MAX, 32_000, 32_000][n as usize % 3],
        ..SaveOptions::default()
    };
    (config.clone(), vars_of(&config, n % 2), options)
}

/// Saves one model over the other until it is killed. Not a test: it runs in a process of its own.
#[test]
#[ignore = "run by folder_of_a_killed_saver_holds_one_model_or_says_that_it_holds_none"]
fn saver() {
    let Some(folder) = std::env::var_os("SAVER_FOLDER") else {
        return;
    };
    let change_config = std::env::var_os("SAVER_CHANGES_CONFIG").is_some();
    let turns: Vec<_> = (0..6).map(|n| turn(n, change_config)).collect();
    for (config, vars, options) in turns.iter().cycle() {
        hf::save(&folder, config, vars, options).unwrap();
    }
}

#[test]
fn folder_of_a_killed_saver_holds_one_model_or_says_that_it_holds_none() {
    for change_config in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let mut found = [0; 3];
        let (config, vars, options) = turn(0, change_config);
        hf::save(&folder, &config, &vars, &options).unwrap();
        for kill in 0..15u64 {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command
                .args(["--exact", "saver", "--ignored"])
                .env("SAVER_FOLDER", folder.path())
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            if change_config {
                command.env("SAVER_CHANGES_CONFIG", "1");
            }
            let mut saver = command.spawn().unwrap();
            std::thread::sleep(Duration::from_millis(30 + kill * 7919 % 97));
            assert!(
                saver.try_wait().unwrap().is_none(),
                "the saver ended by itself"
            );
            saver.kill().unwrap();
            saver.wait().unwrap();
            found[holds(folder.path(), change_config)] += 1;
        }
        println!("first model, second, none: {found:?}");
        assert!(found[0] + found[1] > 0);
        assert!(change_config || found[2] == 0, "{found:?}");
    }
}

/// Which of the two models a folder holds, or 2 where it says that it holds none.
fn holds(folder: &Path, change_config: bool) -> usize {
    let opened = match ModelFolder::open(folder) {
        Ok(opened) => opened,
        Err(error) => {
            let error = error.to_string();
            assert!(
                error.contains("config.json: ") && error.contains("No such file"),
                "{error}"
            );
            return 2;
        }
    };
    let read = || -> Result<Bits> {
        let vars = vars_of(opened.config(), 9);
        opened.load_into(&vars)?;
        Ok(all_bits(&vars))
    };
    let read = read().unwrap();
    let which = (0..2).find(|n| {
        let (config, vars, _) = turn(*n, change_config);
        opened.config() == &config && read == all_bits(&vars)
    });
    which.expect("a mixture of the two models") as usize
}
