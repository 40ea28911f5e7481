//! Writing a model's folder.

use super::config;
use super::expected::{expected, Shapes};
use super::weights::{index_value, read_index, INDEX, SINGLE};
use super::CONFIG;
use crate::atomic::{self, about, stage_file, StagedFile};
use crate::init::SeededVars;
use crate::model::{can_compute, LlamaConfig};
use crate::tensor_file::{stored_bytes, write_tensors};
use candle_core::{bail, DType, Error, Result, Tensor};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// How a model is written.
#[derive(Debug, Clone)]
pub struct SaveOptions {
    /// Most bytes of tensors in one file; a larger tensor has a file of its own. A model of more is written in shards
    /// with an index. 5 GB unless set.
    pub max_shard_bytes: u64,
    /// What weights are converted to; `None` keeps each as it is.
    pub dtype: Option<DType>,
    /// More fields for `config.json`, such as `eos_token_id`. What the model's configuration says is not overridden.
    pub extra: Map<String, Value>,
    /// Files to copy, such as a `tokenizer.json`.
    pub files: Vec<PathBuf>,
}

impl Default for SaveOptions {
    fn default() -> Self {
        Self {
            max_shard_bytes: 5_000_000_000,
            dtype: None,
            extra: Map::new(),
            files: Vec::new(),
        }
    }
}

/// Writes a model with the weights that are its variables, as a folder that [`ModelFolder`](super::ModelFolder) opens.
///
/// Where there is a model in the folder already, it is replaced. Everything is written before the first file takes its
/// name, and `config.json` comes last: whatever moment the program is stopped at, the folder opens as the old model or
/// the new one, or (where their configurations differ) not at all. Other files stay, such as an old model's
/// `tokenizer.json`, unless the options bring new ones. One program at a time may write to a folder.
///
/// Give the model's own [`config`](crate::Llama::config): nothing else knows which encoding the weights were trained with.
/// Where that is the caller's own, all tensors that a LLaMA does not have are taken for its weights.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_posenc::hf::{self, SaveOptions};
/// use candle_posenc::{Llama, LlamaConfig, SeededVars};
/// # fn main() -> candle_core::Result<()> {
/// # let folder = tempfile::tempdir()?;
/// let vars = SeededVars::new(1);
/// let model = Llama::new(&LlamaConfig::default(), vars.builder(DType::F32, &Device::Cpu))?;
/// let options = SaveOptions { dtype: Some(DType::BF16), ..SaveOptions::default() };
/// hf::save(&folder, model.config(), &vars, &options)?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// When the configuration is not [valid](LlamaConfig::validate), would not be the same when read again, or its encoding is
/// the caller's own and [does not say what it is](crate::Encoding::config); when a weight is
/// missing, has another shape, is not made of floats or is not the model's; when a file cannot be written. Then the folder
/// is as it was, unless it was the last step, giving names, that failed.
pub fn save(
    folder: impl AsRef<Path>,
    config: &LlamaConfig,
    vars: &SeededVars,
    options: &SaveOptions,
) -> Result<()> {
    save_tensors(folder, config, &tensors_of(vars), options)
}

fn tensors_of(vars: &SeededVars) -> BTreeMap<String, Tensor> {
    let named = vars.named().into_iter();
    let tensors = named.map(|(name, var)| (name, var.as_detached_tensor()));
    tensors.collect()
}

/// [`save`] if these are a model; whether they are.
///
/// # Errors
/// When a file cannot be written.
pub(crate) fn save_if_a_model(
    folder: &Path,
    config: &LlamaConfig,
    vars: &SeededVars,
) -> Result<bool> {
    let (tensors, options) = (tensors_of(vars), SaveOptions::default());
    let Ok(config) = config_text(config, &tensors, &options) else {
        return Ok(false);
    };
    write(folder, &config, &tensors, &options).map(|()| true)
}

/// [`save`] for weights that are no variables.
///
/// # Errors
/// As [`save`].
pub fn save_tensors(
    folder: impl AsRef<Path>,
    config: &LlamaConfig,
    tensors: &BTreeMap<String, Tensor>,
    options: &SaveOptions,
) -> Result<()> {
    let folder = folder.as_ref();
    let config = config_text(config, tensors, options).map_err(|e| about(folder, e))?;
    write(folder, &config, tensors, options)
}

/// Writes all, `config` being the text of `config.json`.
fn write(
    folder: &Path,
    config: &[u8],
    tensors: &BTreeMap<String, Tensor>,
    options: &SaveOptions,
) -> Result<()> {
    fs::create_dir_all(folder).map_err(|e| about(folder, e))?;
    atomic::remove_unfinished(folder)?;

    let old = old_shards(folder);
    let shards = shards(tensors, options);
    let sharded = shards.len() > 1;
    let names = match sharded {
        true => shard_names(folder, shards.len()),
        false => vec![SINGLE.to_string()],
    };
    let mut weights = Vec::new();
    for (shard, name) in shards.iter().zip(&names) {
        let tensors = shard.iter().map(|(name, tensor)| (*name, *tensor));
        weights.push(stage_file(&folder.join(name), |out| {
            write_tensors(out, tensors, options.dtype)
        })?);
    }
    if sharded {
        let index = index_of(&shards, &names, options);
        weights.push(stage_json(&folder.join(INDEX), &index)?);
    }
    let files = stage_copies(folder, &options.files)?;
    let config_path = folder.join(CONFIG);
    let staged_config = stage_file(&config_path, |out| Ok(out.write_all(config)?))?;

    if fs::read(&config_path).is_ok_and(|old| old != config) {
        // Neither the old weights with the new configuration nor the reverse.
        atomic::remove_file(&config_path)?;
    }
    weights.into_iter().try_for_each(StagedFile::commit)?;
    // While both are there, the single file counts.
    atomic::remove_file(&folder.join(if sharded { SINGLE } else { INDEX }))?;
    files.into_iter().try_for_each(StagedFile::commit)?;
    staged_config.commit()?;
    for name in old.iter().filter(|name| !names.contains(name)) {
        atomic::remove_file(&folder.join(name))?;
    }
    Ok(())
}

fn check(
    config: &LlamaConfig,
    tensors: &BTreeMap<String, Tensor>,
    options: &SaveOptions,
) -> Result<()> {
    config.validate()?;
    config.encoding.check_named()?;
    if let Some(dtype) = options.dtype.filter(|dtype| !can_compute(*dtype)) {
        bail!("weights cannot be converted to {dtype:?}, only to F64, F32, F16 or BF16")
    }
    let shapes: Shapes = tensors
        .iter()
        .map(|(name, tensor)| (name.clone(), tensor.dims().to_vec()))
        .collect();
    let used = expected(config, &shapes)?;
    for (name, tensor) in tensors {
        if !used.contains(name) {
            bail!("{name} is not used by this model")
        }
        if !can_compute(tensor.dtype()) {
            bail!("{name} is {:?}, not F64, F32, F16 or BF16", tensor.dtype())
        }
    }
    Ok(())
}

/// `config.json`, which says what `config` says and the extra fields, of a model that has these tensors.
fn config_text(
    config: &LlamaConfig,
    tensors: &BTreeMap<String, Tensor>,
    options: &SaveOptions,
) -> Result<Vec<u8>> {
    check(config, tensors, options)?;
    let mut map = match config.to_hf() {
        Value::Object(map) => map,
        other => bail!("config: {other} is no object"),
    };
    for (name, value) in &options.extra {
        if !config::is_extra(name) {
            bail!("config: {name} is not an extra field")
        }
        if map.get(name).is_none_or(Value::is_null) {
            map.insert(name.clone(), value.clone());
        }
    }
    let dtypes: BTreeSet<&str> = tensors
        .values()
        .map(|tensor| dtype_name(options.dtype.unwrap_or(tensor.dtype())))
        .collect();
    if let (Some(name), 1) = (dtypes.first(), dtypes.len()) {
        map.insert("dtype".into(), (*name).into());
        map.insert("torch_dtype".into(), (*name).into());
    }
    let map = Value::Object(map);
    let mut text = serde_json::to_vec_pretty(&map).map_err(Error::wrap)?;
    text.push(b'\n');
    let again = crate::json::parse(&text).and_then(|value| LlamaConfig::from_hf(&value))?;
    if &again != config {
        bail!("config: {config:?} would be read again as {again:?}")
    }
    Ok(text)
}

/// torch's name.
fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float32",
        DType::F64 => "float64",
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        other => other.as_str(),
    }
}

type Shard<'a> = Vec<(&'a str, &'a Tensor)>;

/// Tensors by file, in the order of their names.
fn shards<'a>(tensors: &'a BTreeMap<String, Tensor>, options: &SaveOptions) -> Vec<Shard<'a>> {
    let mut shards: Vec<Shard> = vec![Vec::new()];
    let mut filled = 0u64;
    for (name, tensor) in tensors {
        let bytes = stored_bytes(tensor, options.dtype);
        let full = filled.saturating_add(bytes) > options.max_shard_bytes;
        match shards.last_mut() {
            Some(shard) if !full || shard.is_empty() => {
                shard.push((name, tensor));
                filled += bytes;
            }
            _ => {
                shards.push(vec![(name, tensor)]);
                filled = bytes;
            }
        }
    }
    shards
}

fn index_of(shards: &[Shard], names: &[String], options: &SaveOptions) -> Value {
    let mut places = BTreeMap::new();
    let mut total = 0;
    for (shard, file) in shards.iter().zip(names) {
        for (name, tensor) in shard {
            total += stored_bytes(tensor, options.dtype);
            places.insert(name.to_string(), file.clone());
        }
    }
    index_value(&places, total)
}

/// Names of shards that are not in the folder: an index may be using those that are, until another takes its place.
fn shard_names(folder: &Path, count: usize) -> Vec<String> {
    let mut attempt = 1;
    loop {
        let stem = match attempt {
            1 => "model".to_string(),
            n => format!("model-{n}"),
        };
        let names: Vec<String> = (1..=count)
            .map(|shard| format!("{stem}-{shard:05}-of-{count:05}.safetensors"))
            .collect();
        if !names.iter().any(|name| folder.join(name).exists()) {
            return names;
        }
        attempt += 1;
    }
}

/// The shards of an index in the folder, if it can be read.
fn old_shards(folder: &Path) -> BTreeSet<String> {
    let index = read_index(&folder.join(INDEX)).unwrap_or_default();
    let shards = index.into_values();
    shards
        .filter(|name| name.ends_with(".safetensors") && name != SINGLE)
        .collect()
}

fn stage_json(path: &Path, value: &Value) -> Result<StagedFile> {
    stage_file(path, |out| {
        serde_json::to_writer_pretty(out, value).map_err(Error::wrap)
    })
}

/// Copies of files from elsewhere.
fn stage_copies(folder: &Path, files: &[PathBuf]) -> Result<Vec<StagedFile>> {
    let mut staged = Vec::new();
    for from in files {
        let Some(name) = from.file_name() else {
            bail!("{}: is no file to copy", from.display())
        };
        let ours = [CONFIG, SINGLE, INDEX].into_iter().any(|ours| name == ours);
        if ours || name.to_string_lossy().ends_with(".safetensors") {
            bail!("{}: is written by the model itself", from.display())
        }
        let to = folder.join(name);
        let mut source = fs::File::open(from).map_err(|e| about(from, e))?;
        staged.push(stage_file(&to, |out| {
            std::io::copy(&mut source, out).map_err(|e| about(from, e))?;
            Ok(())
        })?);
    }
    Ok(staged)
}
