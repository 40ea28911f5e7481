//! Weights in training: a master of full precision for the optimiser, and the copy that the model computes with.

use crate::init::SeededVars;
use candle_core::{bail, DType, Device, Result, Shape, Tensor, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Tells by its name whether a weight is meant.
type Choice = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// The weights of a model in training.
///
/// An optimiser's step is often smaller than half the distance between two neighbouring bf16 numbers, and would be
/// rounded away for ever. So the optimiser changes a *master* in f32, and the model computes with a *working* copy
/// rounded from it (Micikevicius et al., arXiv 1710.03740, §3.1). Where the model computes in f32 both are the same
/// variable and nothing is copied. A model that computes in f64, as tests do, has its masters in f64.
///
/// Masters are drawn by [`SeededVars`], saved and loaded through it. Clones share everything.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_posenc::train::Parameters;
/// use candle_posenc::{Ctx, Llama, LlamaConfig, SeededVars};
/// # fn main() -> candle_core::Result<()> {
/// let parameters = Parameters::new(SeededVars::new(7));
/// let model = Llama::new(&LlamaConfig::default(), parameters.builder(DType::BF16, &Device::Cpu))?;
/// for parameter in parameters.trained() {
///     assert_eq!(parameter.master.dtype(), DType::F32);
///     assert_eq!(parameter.working.dtype(), DType::BF16);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Parameters {
    masters: SeededVars,
    working: Arc<Mutex<BTreeMap<String, Var>>>,
    trains: Choice,
}

/// One weight in training.
#[derive(Debug, Clone)]
pub struct Parameter {
    /// Its name, as the model asked for it.
    pub name: String,
    /// What the optimiser changes: f32, or f64 for a model that computes in f64.
    pub master: Var,
    /// What the model computes with and gradients belong to; the master itself where the dtypes are equal.
    pub working: Var,
    /// Whether it is trained.
    pub trains: bool,
}

impl Parameters {
    /// Weights whose masters are these variables: those that exist, and those that a model creates.
    pub fn new(masters: SeededVars) -> Self {
        Self {
            masters,
            working: Arc::default(),
            trains: Arc::new(|_| true),
        }
    }

    /// Trains, of those trained so far, only the weights whose names are chosen. Choose before a model is built: it
    /// gets the others as constants, whose gradients are not kept.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_posenc::encoding::TapeConfig;
    /// use candle_posenc::train::Parameters;
    /// use candle_posenc::{EncodingConfig, Llama, LlamaConfig, SeededVars};
    /// # fn main() -> candle_core::Result<()> {
    /// let encoding = EncodingConfig::Tape(TapeConfig::default());
    /// let config = LlamaConfig { encoding, ..LlamaConfig::default() };
    /// let parameters = Parameters::new(SeededVars::new(0)).only(|name| name.contains("norm"));
    /// Llama::new(&config, parameters.builder(DType::F32, &Device::Cpu))?;
    /// assert!(parameters.trained().iter().all(|p| p.name.contains("norm")));
    /// assert!(parameters.trained().len() < parameters.all().len());
    /// # Ok(())
    /// # }
    /// ```
    pub fn only(self, chosen: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        let before = self.trains.clone();
        let trains = Arc::new(move |name: &str| before(name) && chosen(name));
        Self { trains, ..self }
    }

    /// Leaves the weights whose names are chosen as they are; the reverse of [`only`](Self::only).
    pub fn freeze(self, chosen: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        self.only(move |name| !chosen(name))
    }

    /// A builder that gives a model its working copies of this dtype, and creates the masters they are made from.
    ///
    /// Asking for an existing weight with another shape or dtype is an error.
    pub fn builder(&self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self.clone()), dtype, device.clone())
    }

    /// The variables that hold the masters. After changing them call [`refresh`](Self::refresh).
    pub fn masters(&self) -> &SeededVars {
        &self.masters
    }

    /// The weights that a model has asked for, ordered by name.
    pub fn all(&self) -> Vec<Parameter> {
        let working = self.lock().clone();
        let masters = self.masters.named().into_iter();
        masters
            .filter_map(|(name, master)| {
                let working = working.get(&name)?.clone();
                let trains = (self.trains)(&name);
                Some(Parameter {
                    name,
                    master,
                    working,
                    trains,
                })
            })
            .collect()
    }

    /// Those of [`all`](Self::all) that are trained.
    pub fn trained(&self) -> Vec<Parameter> {
        let mut all = self.all();
        all.retain(|parameter| parameter.trains);
        all
    }

    /// Rounds every working copy from its master anew; to be called after masters were changed from outside.
    ///
    /// # Errors
    /// When memory on the device runs out.
    pub fn refresh(&self) -> Result<()> {
        self.all().iter().try_for_each(Parameter::refresh)
    }

    /// Writes the masters to a safetensors file, by name.
    ///
    /// # Errors
    /// As [`SeededVars::save`].
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        self.masters.save(path)
    }

    /// Sets every master that exists by now from a safetensors file, and its working copy.
    ///
    /// # Errors
    /// As [`SeededVars::load`]; then nothing is changed.
    pub fn load(&self, path: impl AsRef<Path>) -> Result<()> {
        self.masters.load(path)?;
        self.refresh()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Var>> {
        // A panic elsewhere leaves the map whole: variables enter it in one step.
        self.working.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The variable as a model may have it: a constant where it is not trained, in the same memory.
    fn given_out(&self, name: &str, var: &Var) -> Tensor {
        match (self.trains)(name) {
            true => var.as_tensor().clone(),
            false => var.as_detached_tensor(),
        }
    }
}

impl Parameter {
    /// Rounds the working copy from the master anew.
    pub(crate) fn refresh(&self) -> Result<()> {
        match self.copy() {
            Some(copy) => copy.set(&self.master.to_dtype(copy.dtype())?),
            None => Ok(()),
        }
    }

    /// The working copy where it is not the master itself.
    pub(crate) fn copy(&self) -> Option<&Var> {
        (self.working.dtype() != self.master.dtype()).then_some(&self.working)
    }
}

impl SimpleBackend for Parameters {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let full = match dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let mut working = self.lock();
        if let Some(var) = working.get(name) {
            if var.dtype() != dtype || var.shape() != &shape {
                bail!(
                    "parameters: {name} is wanted as {dtype:?} {shape:?}, but exists as {:?} {:?}",
                    var.dtype(),
                    var.shape()
                )
            }
            return Ok(self.given_out(name, var));
        }
        let master = self.masters.get(shape, name, init, full, device)?;
        let var = match dtype == full {
            true => Var::from_tensor(&master)?,
            false => Var::from_tensor(&master.to_dtype(dtype)?.detach())?,
        };
        let given = self.given_out(name, &var);
        working.insert(name.to_string(), var);
        Ok(given)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, _device: &Device) -> Result<Tensor> {
        match self.lock().get(name) {
            Some(var) if var.dtype() == dtype => Ok(self.given_out(name, var)),
            Some(var) => bail!(
                "parameters: {name} is wanted as {dtype:?}, but exists as {:?}",
                var.dtype()
            ),
            None => bail!("parameters: {name} does not exist, and its shape is not given"),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.masters.contains_tensor(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: Device = Device::Cpu;
    const NORMAL: Init = Init::Randn {
        mean: 0.,
        stdev: 1.,
    };

    #[test]
    fn working_copies_follow_masters_and_are_drawn_as_without_masters() -> Result<()> {
        for dtype in [DType::BF16, DType::F16, DType::F32, DType::F64] {
            let parameters = Parameters::new(SeededVars::new(4));
            let vb = parameters.builder(dtype, &DEVICE);
            let given = vb.get_with_hints((3, 2), "w", NORMAL)?;
            let drawn = SeededVars::new(4).builder(DType::F32, &DEVICE);
            let drawn = drawn.get_with_hints((3, 2), "w", NORMAL)?;
            let wide = |t: &Tensor| t.to_dtype(DType::F64)?.to_vec2::<f64>();
            if dtype != DType::F64 {
                assert_eq!(wide(&given)?, wide(&drawn.to_dtype(dtype)?)?);
            }
            let all = parameters.all();
            let [parameter] = &all[..] else { panic!() };
            let same = parameter.master.id() == parameter.working.id();
            assert_eq!(same, matches!(dtype, DType::F32 | DType::F64), "{dtype:?}");
            assert_eq!(parameter.working.id(), given.id());
            parameter
                .master
                .set(&Tensor::full(0.1f32, (3, 2), &DEVICE)?.to_dtype(parameter.master.dtype())?)?;
            parameters.refresh()?;
            let expected = parameter.master.to_dtype(dtype)?;
            assert_eq!(wide(&given)?, wide(&expected)?, "{dtype:?}");
        }
        Ok(())
    }

    #[test]
    fn frozen_weights_are_constants_that_follow_their_masters() -> Result<()> {
        for dtype in [DType::F32, DType::BF16] {
            let parameters = Parameters::new(SeededVars::new(4)).freeze(|name| name == "a");
            let vb = parameters.builder(dtype, &DEVICE);
            let a = vb.get_with_hints(2, "a", NORMAL)?;
            let b = vb.get_with_hints(2, "b", NORMAL)?;
            assert!(!a.is_variable() && b.is_variable());
            let store = (&a * &b)?.sum_all()?.backward()?;
            let names: Vec<String> = parameters.trained().into_iter().map(|p| p.name).collect();
            assert_eq!(names, ["b"]);
            let gradients = crate::train::Gradients::of(&store, &parameters)?;
            let with_gradients: Vec<&str> = gradients.named().map(|(name, _)| name).collect();
            assert_eq!(with_gradients, ["b"]);
            let one = Tensor::ones(2, DType::F32, &DEVICE)?;
            parameters.all()[0].master.set(&one)?;
            parameters.refresh()?;
            assert_eq!(a.to_dtype(DType::F32)?.to_vec1::<f32>()?, [1., 1.]);
        }
        Ok(())
    }

    #[test]
    fn builder_existing_weight_of_another_shape_or_dtype_is_refused() -> Result<()> {
        let parameters = Parameters::new(SeededVars::new(4));
        let vb = parameters.builder(DType::BF16, &DEVICE);
        let first = vb.get(3, "w")?;
        assert_eq!(vb.get(3, "w")?.id(), first.id());
        let told = vb.get(4, "w").unwrap_err().to_string();
        assert!(told.contains("[3]") && told.contains("[4]"), "{told}");
        let told = vb.to_dtype(DType::F32).get(3, "w").unwrap_err().to_string();
        assert!(told.contains("BF16"), "{told}");
        Ok(())
    }
}
