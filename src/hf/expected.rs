//! The tensors that a model needs, found by building it without any.

use crate::encoding::EncodingConfig;
use crate::model::{Llama, LlamaConfig};
use candle_core::{bail, DType, Device, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Tensors by name, each with its shape.
pub(super) type Shapes = BTreeMap<String, Vec<usize>>;

/// What a model of this configuration asks for, where the tensors of `given` are there; all of it is in `given`, in the
/// right shape.
///
/// Sizes are compared with `given` before anything of their magnitude is made: a configuration may claim what it likes.
pub(super) fn expected(config: &LlamaConfig, given: &Shapes) -> Result<Shapes> {
    if config.num_hidden_layers > given.len() {
        bail!(
            "num_hidden_layers {} is more than {} tensors can make",
            config.num_hidden_layers,
            given.len()
        )
    }
    let plain = LlamaConfig {
        encoding: EncodingConfig::Nope,
        ..config.clone()
    };
    compare(&plain, &ask(&plain, given)?, given)?;
    let asked = ask(config, given)?;
    compare(config, &asked, given)?;
    Ok(asked)
}

fn compare(config: &LlamaConfig, asked: &Shapes, given: &Shapes) -> Result<()> {
    for (name, shape) in asked {
        match given.get(name) {
            Some(given) if given == shape => {}
            Some(given) => bail!("{name} is {given:?}, but {shape:?} in the model"),
            None if name == "lm_head.weight" && !config.tie_word_embeddings => {
                bail!("there is no {name}; where the head uses the embeddings, tie_word_embeddings must be true")
            }
            None => bail!("there is no {name}, which must be {shape:?}"),
        }
    }
    Ok(())
}

fn ask(config: &LlamaConfig, given: &Shapes) -> Result<Shapes> {
    let asked = Mutex::new(Shapes::new());
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
    asked: &'a Mutex<Shapes>,
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
        let dims = shape.dims().to_vec();
        let count = dims.iter().try_fold(1usize, |n, dim| n.checked_mul(*dim));
        if count.is_none_or(|count| count > isize::MAX as usize / size_of::<f64>()) {
            bail!("{name} would be {dims:?}, more than memory can address")
        }
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.insert(name.to_string(), dims);
        Tensor::zeros((), dtype, device)?.broadcast_as(shape)
    }

    fn get_unchecked(&self, name: &str, _dtype: DType, _device: &Device) -> Result<Tensor> {
        bail!("{name}: its shape is not given")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.given.contains_key(name)
    }
}
