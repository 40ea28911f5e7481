//! The tensors that a model needs, found by building it without any.

use super::HEAD;
use crate::encoding::EncodingConfig;
use crate::model::{Llama, LlamaConfig};
use candle_core::{bail, DType, Device, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

/// Tensors by name, each with its shape.
pub(super) type Shapes = BTreeMap<String, Vec<usize>>;

/// The names of what a model of this configuration asks for, where the tensors of `given` are there; all of it is in
/// `given`, in the right shape. All other tensors are taken for the encoding's where that is the caller's own.
///
/// A configuration may claim any size. The model is built without an encoding first, and no further than `given`
/// reaches, so that when an encoding makes its tables, all sizes are those of tensors that exist.
pub(super) fn expected(config: &LlamaConfig, given: &Shapes) -> Result<BTreeSet<String>> {
    let plain = LlamaConfig {
        encoding: EncodingConfig::Nope,
        ..config.clone()
    };
    let mut asked = ask(&plain, given)?;
    if config.encoding.check_ours().is_err() {
        // Nobody here knows what an encoding of the caller's own asks for.
        let of_the_encoding = |name: &&String| {
            let layer = name
                .strip_prefix("model.layers.")
                .and_then(|rest| rest.split('.').next());
            let layer = layer.and_then(|layer| layer.parse::<usize>().ok());
            *name != HEAD && layer.is_none_or(|layer| layer < config.num_hidden_layers)
        };
        asked.extend(given.keys().filter(of_the_encoding).cloned());
        return Ok(asked);
    }
    ask(config, given)
}

fn ask(config: &LlamaConfig, given: &Shapes) -> Result<BTreeSet<String>> {
    let asked = Mutex::new(BTreeSet::new());
    let backend: Box<dyn SimpleBackend + '_> = Box::new(Questions {
        given,
        asked: &asked,
    });
    Llama::new(
        config,
        VarBuilder::from_backend(backend, DType::F32, Device::Cpu),
    )?;
    Ok(asked.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Answers with zeros that take no memory, and remembers what it was asked for.
struct Questions<'a> {
    given: &'a Shapes,
    asked: &'a Mutex<BTreeSet<String>>,
}

impl SimpleBackend for Questions<'_> {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _init: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        match self.given.get(name) {
            Some(given) if given == shape.dims() => {}
            Some(given) => bail!("{name} is {given:?}, but {shape:?} in the model"),
            None if name == HEAD => bail!(
                "there is no {name}; where the head uses the embeddings, tie_word_embeddings must be true"
            ),
            None => bail!("there is no {name}, which must be {shape:?}"),
        }
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.insert(name.to_string());
        Tensor::zeros((), dtype, device)?.broadcast_as(shape)
    }

    fn get_unchecked(&self, name: &str, _dtype: DType, _device: &Device) -> Result<Tensor> {
        bail!("{name}: its shape is not given")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.given.contains_key(name)
    }
}
