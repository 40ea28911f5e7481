//! The safetensors files of a folder.

use crate::atomic::{about, is_there};
use crate::json::{self, Fields};
use crate::tensor_file::TensorFile;
use candle_core::{bail, DType, Device, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::Init;
use safetensors::tensor::TensorInfo;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};
use std::sync::{Arc, Mutex, PoisonError};

pub(super) const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// The tensors of a folder, in one file or several, none of them read.
#[derive(Debug)]
pub(super) struct Weights {
    files: Vec<TensorFile>,
    /// Which file each tensor is in.
    places: BTreeMap<String, usize>,
}

impl Weights {
    /// Reads the headers. Where there is both a `model.safetensors` and an index, the former counts, as for
    /// transformers.
    pub fn open(folder: &Path) -> Result<Self> {
        let (single, index) = (folder.join(SINGLE), folder.join(INDEX));
        if is_there(&single) {
            let file = TensorFile::open(&single)?;
            let places = file.tensors().keys().map(|name| (name.clone(), 0));
            return Ok(Self {
                places: places.collect(),
                files: vec![file],
            });
        }
        if is_there(&index) {
            return Self::open_shards(folder, &index);
        }
        let other = ["pytorch_model.bin", "pytorch_model.bin.index.json"]
            .into_iter()
            .find(|name| folder.join(name).exists());
        match other {
            Some(other) => bail!(
                "{}: has {other}, but neither {SINGLE} nor {INDEX}; only safetensors are read",
                folder.display()
            ),
            None => bail!("{}: has neither {SINGLE} nor {INDEX}", folder.display()),
        }
    }

    fn open_shards(folder: &Path, index: &Path) -> Result<Self> {
        let shards = read_index(index)?;
        if shards.is_empty() {
            return Err(about(index, "places no tensor"));
        }
        let mut named = BTreeMap::new();
        let mut files = Vec::new();
        for (name, file) in &shards {
            named
                .entry(file.as_str())
                .or_insert_with(Vec::new)
                .push(name);
        }
        let mut places = BTreeMap::new();
        for (file, names) in named {
            let shard = TensorFile::open(&folder.join(file))?;
            for name in names {
                if !shard.tensors().contains_key(name) {
                    return Err(about(
                        index,
                        format!("places {name} in {file}, which has none"),
                    ));
                }
            }
            for name in shard.tensors().keys() {
                if let Some(other) = shards.get(name).filter(|other| *other != file) {
                    let two = format!("places {name} in {other}, but {file} has one too");
                    return Err(about(index, two));
                }
                if places.insert(name.clone(), files.len()).is_some() {
                    let two = format!("does not place {name}, of which {file} has a second one");
                    return Err(about(index, two));
                }
            }
            files.push(shard);
        }
        Ok(Self { files, places })
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    pub fn contains(&self, name: &str) -> bool {
        self.places.contains_key(name)
    }

    /// The file that holds a tensor, and how.
    pub fn find(&self, name: &str) -> Option<(&TensorFile, &TensorInfo)> {
        let file = self.files.get(*self.places.get(name)?)?;
        Some((file, file.tensors().get(name)?))
    }

    /// Where tensors are, for error messages.
    pub fn place(&self) -> String {
        match self.files.as_slice() {
            [file] => file.path().display().to_string(),
            files => match files.first().and_then(|file| file.path().parent()) {
                Some(folder) => format!("{} shards in {}", files.len(), folder.display()),
                None => "no shard".to_string(),
            },
        }
    }

    /// Whether two tensors are stored alike, bit for bit.
    pub fn alike(&self, one: &str, other: &str) -> Result<bool> {
        const PIECE: u64 = 1 << 20;
        let (Some((file, info)), Some((other_file, other_info))) =
            (self.find(one), self.find(other))
        else {
            return Ok(false);
        };
        if info.shape != other_info.shape || info.dtype != other_info.dtype {
            return Ok(false);
        }
        let mut from = 0;
        loop {
            let bytes = file.bytes(info, from, PIECE)?;
            if bytes != other_file.bytes(other_info, from, PIECE)? {
                return Ok(false);
            }
            if bytes.is_empty() {
                return Ok(true);
            }
            from += PIECE;
        }
    }

    /// Reads one tensor, which must have this shape.
    pub fn read(
        &self,
        name: &str,
        shape: &[usize],
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let Some((file, info)) = self.find(name) else {
            bail!("{}: there is no {name}", self.place())
        };
        if info.shape != shape {
            bail!(
                "{}: {name} is {:?}, but {shape:?} in the model",
                file.path().display(),
                info.shape
            )
        }
        file.read(name, dtype, device)
    }
}

/// The names of the tensors, each with the file it is in.
pub(super) fn read_index(path: &Path) -> Result<BTreeMap<String, String>> {
    let read = || -> Result<BTreeMap<String, String>> {
        let index = json::read(path)?;
        let fields = Fields::of("index", &index, "the document")?;
        let map = fields.required("weight_map", fields.get("weight_map"))?;
        let mut places = BTreeMap::new();
        for (name, file) in Fields::of("index", map, "weight_map")?.all() {
            let Some(file) = file.as_str().filter(|file| is_file_name(file)) else {
                bail!(
                    "weight_map: {name} is in {}, which must be the name of a file in this folder",
                    json::brief(file)
                )
            };
            places.insert(name.clone(), file.to_string());
        }
        Ok(places)
    };
    read().map_err(|e| about(path, e))
}

/// Whether this names something in a folder, and not outside of it.
fn is_file_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    let first = parts.next();
    parts.next().is_none()
        && matches!(first, Some(Component::Normal(part)) if part == name)
        && !name.contains(['\\', '\0'])
}

/// Gives weights to a `VarBuilder`, and notes the names of what was read.
pub(super) struct Builder {
    pub weights: Arc<Weights>,
    pub read: Arc<Mutex<BTreeSet<String>>>,
}

impl Builder {
    fn note(&self, name: &str) {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        read.insert(name.to_string());
    }
}

impl SimpleBackend for Builder {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _init: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let tensor = self.weights.read(name, shape.dims(), dtype, device)?;
        self.note(name);
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let Some((file, _)) = self.weights.find(name) else {
            bail!("{}: there is no {name}", self.weights.place())
        };
        let tensor = file.read(name, dtype, device)?;
        self.note(name);
        Ok(tensor)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.weights.contains(name)
    }
}

/// An index of tensors, each with its file, as `model.safetensors.index.json` states it.
pub(super) fn index_value(places: &BTreeMap<String, String>, total_bytes: u64) -> Value {
    serde_json::json!({ "metadata": { "total_size": total_bytes }, "weight_map": places })
}
