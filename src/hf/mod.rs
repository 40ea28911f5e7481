//! Models in folders, as Hugging Face has them: `config.json`, safetensors in one file or several, a tokenizer.
//!
//! [`ModelFolder`] reads one, [`save`] writes one. A LLaMA with RoPE is written so that transformers 4 and 5 load it; a
//! model with another encoding keeps the encoding's parameters in `config.json` and its weights beside the others, under
//! a `model_type` that other programs do not know. So does a model with an encoding of the caller's own, by the
//! description that [`Encoding::config`] gives, and [`ModelFolder::load_with`] loads it.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_posenc::encoding::{EncodingConfig, TapeConfig};
//! use candle_posenc::hf::{self, ModelFolder, SaveOptions};
//! use candle_posenc::{Ctx, Llama, LlamaConfig, SeededVars};
//! # fn main() -> candle_core::Result<()> {
//! # let folder = tempfile::tempdir()?;
//! let config = LlamaConfig {
//!     encoding: EncodingConfig::Tape(TapeConfig::default()),
//!     ..LlamaConfig::default()
//! };
//! let vars = SeededVars::new(1);
//! let model = Llama::new(&config, vars.builder(DType::F32, &Device::Cpu))?;
//! hf::save(&folder, &config, &vars, &SaveOptions::default())?;
//!
//! let saved = ModelFolder::open(&folder)?;
//! assert_eq!(saved.config(), &config);
//! let loaded = saved.load(DType::F32, &Device::Cpu)?;
//! let tokens = Tensor::new(&[[72u32, 101, 108]], &Device::Cpu)?;
//! let logits = |model: &Llama| -> candle_core::Result<Vec<f32>> {
//!     model.forward(&tokens, &mut Ctx::default())?.flatten_all()?.to_vec1()
//! };
//! assert_eq!(logits(&loaded)?, logits(&model)?);
//! # Ok(())
//! # }
//! ```

mod config;
mod expected;
mod save;
mod weights;

use crate::atomic::{about, is_there, message};
use crate::encoding::{published_name, Encoding};
use crate::init::SeededVars;
use crate::json::{self, Fields};
use crate::model::{Llama, LlamaConfig};
use crate::tensor_file::is_float;
use candle_core::{bail, DType, Device, Error, Result, Tensor};
use candle_nn::VarBuilder;
use expected::{expected, Shapes};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use weights::{Builder, Weights};

pub(crate) use save::save_if_a_model;
pub use save::{save, save_tensors, SaveOptions};

const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
const TOKENIZER: &str = "tokenizer.json";
const HEAD: &str = "lm_head.weight";
const EMBEDDINGS: &str = "model.embed_tokens.weight";

/// A folder with a model: its configuration, and where its weights are.
#[derive(Debug, Clone)]
pub struct ModelFolder {
    path: PathBuf,
    config: LlamaConfig,
    /// `config.json` as it stands.
    raw: Map<String, Value>,
    /// `generation_config.json`, empty where there is none.
    generation: Map<String, Value>,
    weights: Arc<Weights>,
}

impl ModelFolder {
    /// Reads `config.json` and the headers of `model.safetensors`, or else of the files that
    /// `model.safetensors.index.json` names. No weight is read; the files stay open.
    ///
    /// # Errors
    /// When a file is missing, cannot be read or contradicts itself, or the configuration is
    /// [not one of ours](LlamaConfig::from_hf). Whether configuration and weights fit is for the functions that load.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let raw = read_object(&path.join(CONFIG))?;
        let config = LlamaConfig::from_hf(&Value::Object(raw.clone()))
            .map_err(|e| about(&path.join(CONFIG), e))?;
        let generation = path.join(GENERATION);
        let folder = Self {
            path: path.to_path_buf(),
            config,
            raw,
            generation: match is_there(&generation) {
                true => read_object(&generation)?,
                false => Map::new(),
            },
            weights: Arc::new(Weights::open(path)?),
        };
        folder.token_ids("eos_token_id")?;
        folder.token_ids("bos_token_id")?;
        Ok(folder)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model's configuration.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// A builder that reads each weight when it is asked for, and converts it to `dtype`. For models and encodings of
    /// the caller's own: unlike [`load`](Self::load) and [`load_with`](Self::load_with), it does not notice tensors that nobody
    /// asks for.
    pub fn builder(&self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        self.noting_builder(dtype, device).0
    }

    /// A builder, and where it notes the names of what was read.
    fn noting_builder(
        &self,
        dtype: DType,
        device: &Device,
    ) -> (VarBuilder<'static>, Arc<Mutex<BTreeSet<String>>>) {
        let read = Arc::default();
        let backend = Box::new(Builder {
            weights: self.weights.clone(),
            read: Arc::clone(&read),
        });
        let vb = VarBuilder::from_backend(backend, dtype, device.clone());
        (vb, read)
    }

    /// The model with its weights converted to `dtype`. They do not train: for that, see
    /// [`load_into`](Self::load_into).
    ///
    /// # Errors
    /// When a weight is missing, has another shape, is not made of floats or holds a number beyond `dtype`; when there is
    /// a tensor that the model does not use (but stored inverse frequencies, or, with tied embeddings, a head equal to
    /// them); when the encoding is the caller's own or a parameter of it is out of range, `dtype` is not F64, F32, F16 or
    /// BF16, or a file cannot be read.
    pub fn load(&self, dtype: DType, device: &Device) -> Result<Llama> {
        self.check()?;
        let config = &self.config;
        config
            .encoding
            .check_ours()
            .map_err(|e| about(&self.path, e))?;
        Llama::new(config, self.builder(dtype, device))
    }

    /// [`load`](Self::load) for a model whose encoding is the caller's own. `encoding` builds it, from what the configuration
    /// says of it and with its weights from the builder, which stands where the model's own tensors are named
    /// (`layers.0.…`).
    ///
    /// ```
    /// use candle_core::{bail, DType, Device};
    /// use candle_posenc::hf::{self, ModelFolder, SaveOptions};
    /// use candle_posenc::{Encoding, EncodingConfig, Llama, LlamaConfig, SeededVars};
    /// use serde_json::json;
    /// use std::sync::Arc;
    ///
    /// struct Own { gain: f64 }
    ///
    /// impl Encoding for Own {
    ///     fn config(&self) -> EncodingConfig {
    ///         EncodingConfig::Custom { description: json!({"name": "own", "gain": self.gain}) }
    ///     }
    ///     // … and the hooks by which it acts.
    /// }
    ///
    /// # fn main() -> candle_core::Result<()> {
    /// # let path = tempfile::tempdir()?;
    /// let own = Own { gain: 2. };
    /// let config = LlamaConfig { encoding: own.config(), ..LlamaConfig::default() };
    /// let vars = SeededVars::new(0);
    /// let model = Llama::with_encoding(&config, Arc::new(own), vars.builder(DType::F32, &Device::Cpu))?;
    /// hf::save(&path, model.config(), &vars, &SaveOptions::default())?;
    ///
    /// let loaded = ModelFolder::open(&path)?.load_with(DType::F32, &Device::Cpu, |config, _| {
    ///     match &config.encoding {
    ///         EncodingConfig::Custom { description } if description["name"] == "own" => {
    ///             let Some(gain) = description["gain"].as_f64() else { bail!("no gain: {description}") };
    ///             Ok(Arc::new(Own { gain }))
    ///         }
    ///         other => bail!("another encoding: {other:?}"),
    ///     }
    /// })?;
    /// # assert_eq!(loaded.config(), model.config());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`load`](Self::load) and [`Llama::with_encoding`]: when the encoding is not what the configuration says, or neither
    /// it nor the model reads a tensor (to ask whether there is one is not enough).
    pub fn load_with(
        &self,
        dtype: DType,
        device: &Device,
        encoding: impl FnOnce(&LlamaConfig, VarBuilder) -> Result<Arc<dyn Encoding>>,
    ) -> Result<Llama> {
        let told = |error: Error| about(&self.path, error);
        self.check()?;
        let (vb, read) = self.noting_builder(dtype, device);
        let encoding = encoding(&self.config, vb.pp("model")).map_err(told)?;
        let model = Llama::with_encoding(&self.config, encoding, vb).map_err(told)?;
        let read = read.lock().unwrap_or_else(PoisonError::into_inner);
        let unread =
            |name: &&str| !read.contains(*name) && *name != HEAD && !self.is_harmless(name);
        match self.weights.names().find(unread) {
            Some(name) => Err(told(Error::msg(format!(
                "{name} is read neither by the model nor by the encoding given"
            )))),
            None => Ok(model),
        }
    }

    /// Sets the variables of a model to the weights, each converted to the variable's dtype. All are read before the
    /// first is set, so there is room for them twice.
    ///
    /// Build the model first, so that its variables exist:
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_posenc::hf::{self, ModelFolder, SaveOptions};
    /// use candle_posenc::{Llama, LlamaConfig, SeededVars};
    /// # fn main() -> candle_core::Result<()> {
    /// # let path = tempfile::tempdir()?;
    /// # let (config, vars) = (LlamaConfig::default(), SeededVars::new(1));
    /// # Llama::new(&config, vars.builder(DType::F32, &Device::Cpu))?;
    /// # hf::save(&path, &config, &vars, &SaveOptions::default())?;
    /// let folder = ModelFolder::open(&path)?;
    /// let vars = SeededVars::new(0);
    /// let model = Llama::new(folder.config(), vars.builder(DType::F32, &Device::Cpu))?;
    /// folder.load_into(&vars)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// A published TAPE checkpoint, which has `post_attention_linear.weight` where a new model has
    /// `post_attention_gain`, gives its row sums.
    ///
    /// # Errors
    /// As [`load`](Self::load), and when weights and variables do not have the same names and shapes. Then no variable
    /// is changed.
    pub fn load_into(&self, vars: &SeededVars) -> Result<()> {
        self.load_present(vars, |_| false).map(|_| ())
    }

    /// [`load_into`](Self::load_into) for a model that has more weights than the folder: those for whose names `new` is
    /// true may be absent, stay as they are, and are returned. So an encoding with weights is put on a model that was
    /// trained without.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_posenc::encoding::{EncodingConfig, TapeConfig};
    /// use candle_posenc::hf::{self, ModelFolder, SaveOptions};
    /// use candle_posenc::{Llama, LlamaConfig, SeededVars};
    /// # fn main() -> candle_core::Result<()> {
    /// # let path = tempfile::tempdir()?;
    /// # let (config, vars) = (LlamaConfig::default(), SeededVars::new(1));
    /// # Llama::new(&config, vars.builder(DType::F32, &Device::Cpu))?;
    /// # hf::save(&path, &config, &vars, &SaveOptions::default())?;
    /// let folder = ModelFolder::open(&path)?; // a model with RoPE
    /// let EncodingConfig::Rope(rope) = &folder.config().encoding else { panic!() };
    /// let config = LlamaConfig {
    ///     encoding: EncodingConfig::Tape(TapeConfig { rope: rope.clone(), ..TapeConfig::default() }),
    ///     ..folder.config().clone()
    /// };
    /// let vars = SeededVars::new(0);
    /// let model = Llama::new(&config, vars.builder(DType::F32, &Device::Cpu))?;
    /// let of_tape = |name: &str| name.contains(".pe.") || name.ends_with("post_attention_gain");
    /// let new = folder.load_present(&vars, of_tape)?;
    /// assert_eq!(new.len(), 3 * 4); // four tensors in every layer but the last
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`load_into`](Self::load_into).
    pub fn load_present(
        &self,
        vars: &SeededVars,
        new: impl Fn(&str) -> bool,
    ) -> Result<Vec<String>> {
        let stored = self.check()?;
        let named = vars.named();
        let place = || self.weights.place();
        let mut unset: BTreeSet<&String> = stored.iter().collect();
        let (mut changes, mut left) = (Vec::new(), Vec::new());
        for (name, var) in named {
            let (dtype, device, dims) = (var.dtype(), var.device(), var.dims());
            let published = published_name(&name).filter(|matrix| stored.contains(matrix));
            if unset.remove(&name) {
                let value = self.weights.read(&name, dims, dtype, device)?;
                changes.push((var, value));
            } else if let (Some(matrix), [gains]) = (published, dims) {
                let value = self
                    .weights
                    .read(&matrix, &[*gains, *gains], dtype, device)?;
                changes.push((var, value.sum(1)?));
                unset.remove(&matrix);
            } else if new(&name) {
                left.push(name);
            } else {
                bail!("{}: there is no {name}, which the variables have", place())
            }
        }
        if let Some(name) = unset.first() {
            bail!(
                "{}: has {name}, which is not among the variables; build the model with them first",
                place()
            )
        }
        set_all(&changes)?;
        Ok(left)
    }

    /// The tokenizer's file, `tokenizer.json`, where there is one.
    pub fn tokenizer(&self) -> Option<PathBuf> {
        let path = self.path.join(TOKENIZER);
        is_there(&path).then_some(path)
    }

    /// The tokens that end a text, none where nothing is said about them. `generation_config.json` is asked first, then
    /// `config.json`.
    pub fn eos_token_ids(&self) -> Vec<u32> {
        self.token_ids("eos_token_id").unwrap_or_default()
    }

    /// The token that begins a text, if any.
    pub fn bos_token_id(&self) -> Option<u32> {
        let ids = self.token_ids("bos_token_id").unwrap_or_default();
        ids.first().copied()
    }

    /// What [`save`] needs to keep what this folder has beside the model: fields of `config.json` that
    /// [`LlamaConfig`] does not have (special tokens, …), and the files of the tokenizer and of generation.
    pub fn save_options(&self) -> SaveOptions {
        let extra = self.raw.iter().filter(|(name, _)| config::is_extra(name));
        let files = [
            TOKENIZER,
            "tokenizer_config.json",
            "special_tokens_map.json",
            "tokenizer.model",
            "added_tokens.json",
            "vocab.json",
            "merges.txt",
            "chat_template.jinja",
            "chat_template.json",
            GENERATION,
        ];
        let files = files.iter().map(|name| self.path.join(name));
        SaveOptions {
            extra: extra
                .map(|(name, value)| (name.clone(), value.clone()))
                .collect(),
            files: files.filter(|path| is_there(path)).collect(),
            ..SaveOptions::default()
        }
    }

    /// One id or a list of them.
    fn token_ids(&self, name: &str) -> Result<Vec<u32>> {
        let id = |value: &Value| u32::try_from(value.as_u64()?).ok();
        for (map, file) in [(&self.generation, GENERATION), (&self.raw, CONFIG)] {
            let ids = Fields::in_map("config", map).read(name, "a token id or several", |value| {
                match value {
                    Value::Array(ids) => ids.iter().map(id).collect(),
                    value => Some(vec![id(value)?]),
                }
            });
            if let Some(ids) = ids.map_err(|e| about(&self.path.join(file), e))? {
                return Ok(ids);
            }
        }
        Ok(Vec::new())
    }

    /// Compares the configuration with the weights; the tensors that the model uses.
    fn check(&self) -> Result<BTreeSet<String>> {
        let weights = &self.weights;
        let place = |what: String| Error::msg(format!("{}: {what}", weights.place()));
        let mut given = Shapes::new();
        for name in weights.names() {
            if let Some((_, info)) = weights.find(name) {
                given.insert(name.to_string(), info.shape.clone());
            }
        }
        let used = expected(&self.config, &given).map_err(|e| place(message(&e)))?;
        for name in weights.names() {
            let Some((file, info)) = weights.find(name) else {
                continue;
            };
            if used.contains(name) {
                if !is_float(info.dtype) {
                    let what = format!("{name} is stored as {}, not as floats", info.dtype);
                    return Err(about(file.path(), what));
                }
            } else if name == HEAD {
                if !weights.alike(HEAD, EMBEDDINGS)? {
                    return Err(place(format!(
                        "{HEAD} is not {EMBEDDINGS}; tie_word_embeddings must be false"
                    )));
                }
            } else if !self.is_harmless(name) {
                return Err(about(
                    file.path(),
                    format!("{name} is not used by this model"),
                ));
            }
        }
        Ok(used)
    }

    /// Whether a tensor that the model does not use says nothing that it should have.
    fn is_harmless(&self, name: &str) -> bool {
        let config = &self.config;
        name.ends_with("rotary_emb.inv_freq")
            || config.encoding.is_unread(name, config.num_hidden_layers)
    }
}

/// Sets variables that are known to fit.
fn set_all(changes: &[(candle_core::Var, Tensor)]) -> Result<()> {
    changes.iter().try_for_each(|(var, value)| var.set(value))
}

fn read_object(path: &Path) -> Result<Map<String, Value>> {
    let read = || -> Result<Map<String, Value>> {
        match json::read(path)? {
            Value::Object(map) => Ok(map),
            other => bail!("must be an object, got {}", json::brief(&other)),
        }
    };
    read().map_err(|e| about(path, e))
}
