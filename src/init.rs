//! Weights drawn from a seed: the same numbers for the same seed and name, whatever the order of creation.

use crate::atomic::write_file;
use crate::tensor_file::{write_tensors, TensorFile};
use candle_core::{bail, DType, Device, Result, Shape, Tensor, Var};
use candle_nn::init::NormalOrUniform;
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder, VarMap};
use rand::rngs::ChaCha12Rng;
use rand::SeedableRng;
use rand_distr::{Distribution, Normal, Uniform};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::{MutexGuard, PoisonError};

/// Trainable variables, each drawn on first use from a generator of its own, seeded by (seed, name).
///
/// Adding, removing or reordering layers changes no other weight, and all dtypes hold the same numbers up to
/// rounding: they are drawn in f64. Clones share the variables.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::Init;
/// use candle_posenc::SeededVars;
/// # fn main() -> candle_core::Result<()> {
/// let vars = SeededVars::new(7);
/// let vb = vars.builder(DType::F32, &Device::Cpu);
/// let init = Init::Randn { mean: 0., stdev: 0.02 };
/// let weight = vb.pp("layer").get_with_hints((4, 8), "weight", init)?;
/// assert_eq!(weight.dims(), &[4, 8]);
/// assert_eq!(vars.named()[0].0, "layer.weight");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct SeededVars {
    seed: u64,
    map: VarMap,
}

impl SeededVars {
    /// No variables yet.
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            map: VarMap::new(),
        }
    }

    /// A builder whose `get` creates variables of this dtype and afterwards returns the same ones.
    ///
    /// It honours every [`Init`]; without one a variable is zero. Asking for an existing variable with another
    /// shape or dtype is an error.
    pub fn builder(&self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self.clone()), dtype, device.clone())
    }

    /// The variables so far, ordered by name.
    pub fn vars(&self) -> Vec<Var> {
        self.named().into_iter().map(|(_, var)| var).collect()
    }

    /// The variables so far with their names, ordered by name.
    pub fn named(&self) -> Vec<(String, Var)> {
        let sorted: BTreeMap<_, _> = self.lock().clone().into_iter().collect();
        sorted.into_iter().collect()
    }

    /// The same variables as candle's own map.
    pub fn var_map(&self) -> VarMap {
        self.map.clone()
    }

    /// Writes all variables to a safetensors file, by name. The file is there whole or as it was.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let named = self.named();
        let tensors = named
            .iter()
            .map(|(name, var)| (name.as_str(), var.as_tensor()));
        write_file(path.as_ref(), |out| write_tensors(out, tensors, None))
    }

    /// Sets every variable that exists by now from a safetensors file, converted to the variable's dtype. Tensors
    /// of other names in the file are ignored.
    ///
    /// # Errors
    /// When the file cannot be read, lacks a variable or holds it in another shape; then nothing is changed.
    pub fn load(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let file = TensorFile::open(path)?;
        let mut changes = Vec::new();
        for (name, var) in self.named() {
            match file.tensors().get(&name) {
                Some(info) if info.shape == var.dims() => {
                    changes.push((file.read(&name, var.dtype(), var.device())?, var));
                }
                Some(info) => bail!(
                    "init: {name} is {:?} in {path:?}, but {:?} in the model",
                    info.shape,
                    var.dims()
                ),
                None => bail!("init: {path:?} holds no {name}"),
            }
        }
        changes.iter().try_for_each(|(value, var)| var.set(value))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Var>> {
        // A panic elsewhere leaves the map whole: variables enter it in one step.
        self.map
            .data()
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl SimpleBackend for SeededVars {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let mut vars = self.lock();
        if let Some(var) = vars.get(name) {
            if var.shape() != &shape || var.dtype() != dtype {
                bail!(
                    "init: {name} is wanted as {dtype:?} {shape:?}, but exists as {:?} {:?}",
                    var.dtype(),
                    var.shape()
                )
            }
            return Ok(var.as_tensor().clone());
        }
        let mut rng = ChaCha12Rng::seed_from_u64(mix(self.seed, name));
        let Some(room) = room(&shape) else {
            bail!("init: {name} of shape {shape:?} is more than memory can hold")
        };
        let values = draw(&shape, room, init, &mut rng)?;
        let value = Tensor::from_vec(values, shape, device)?.to_dtype(dtype)?;
        let var = Var::from_tensor(&value)?;
        let tensor = var.as_tensor().clone();
        vars.insert(name.to_string(), var);
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, _device: &Device) -> Result<Tensor> {
        match self.lock().get(name) {
            Some(var) if var.dtype() == dtype => Ok(var.as_tensor().clone()),
            Some(var) => bail!(
                "init: {name} is wanted as {dtype:?}, but exists as {:?}",
                var.dtype()
            ),
            None => bail!("init: {name} does not exist, and its shape is not given"),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }
}

/// Memory for a value of each element; `None` where there is not as much.
fn room(shape: &Shape) -> Option<Vec<f64>> {
    let mut dims = shape.dims().iter();
    let count = dims.try_fold(1usize, |count, size| count.checked_mul(*size))?;
    let mut values = Vec::new();
    values.try_reserve_exact(count).ok()?;
    Some(values)
}

/// Values of a new variable, in f64, in the room made for them.
fn draw(
    shape: &Shape,
    mut values: Vec<f64>,
    init: Init,
    rng: &mut ChaCha12Rng,
) -> Result<Vec<f64>> {
    let count = shape.elem_count();
    let spread = match init {
        Init::Const(value) => {
            values.resize(count, value);
            return Ok(values);
        }
        Init::Randn { mean, stdev } => (NormalOrUniform::Normal, mean, stdev),
        Init::Uniform { lo, up } => (NormalOrUniform::Uniform, lo, up),
        Init::Kaiming {
            dist,
            fan,
            non_linearity,
        } => {
            let stdev = non_linearity.gain() / (fan.for_shape(shape) as f64).sqrt();
            match dist {
                NormalOrUniform::Normal => (dist, 0., stdev),
                NormalOrUniform::Uniform => (dist, -3f64.sqrt() * stdev, 3f64.sqrt() * stdev),
            }
        }
    };
    match spread {
        (NormalOrUniform::Normal, mean, stdev) => match Normal::new(mean, stdev) {
            Ok(normal) => values.extend(normal.sample_iter(rng).take(count)),
            Err(error) => bail!("init: normal({mean}, {stdev}): {error}"),
        },
        (NormalOrUniform::Uniform, low, high) => match Uniform::new_inclusive(low, high) {
            Ok(uniform) => values.extend(uniform.sample_iter(rng).take(count)),
            Err(error) => bail!("init: uniform in {low}..={high}: {error}"),
        },
    }
    Ok(values)
}

/// A seed for one name: FNV-1a of the name, then the finaliser of SplitMix64 (Steele et al. 2014). Written out, so
/// that it is the same on every platform and in every version of Rust.
pub(crate) fn mix(seed: u64, name: &str) -> u64 {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let finalise = |z: u64| {
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    finalise(finalise(seed.wrapping_add(0x9e37_79b9_7f4a_7c15)) ^ hash)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_nn::init::{FanInOut, NonLinearity};

    const NORMAL: Init = Init::Randn {
        mean: 0.5,
        stdev: 2.,
    };

    fn values(vars: &SeededVars, name: &str, count: usize, init: Init) -> Vec<f64> {
        vars.builder(DType::F64, &Device::Cpu)
            .get_with_hints(count, name, init)
            .and_then(|t| t.to_vec1())
            .unwrap()
    }

    fn mean_and_deviation(values: &[f64]) -> (f64, f64) {
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let square = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
        (mean, square.sqrt())
    }

    #[test]
    fn hash_of_known_names_is_as_recorded() {
        // From an independent evaluation in Python, whose FNV-1a gives the published 0xaf63dc4c8601ec8c for "a".
        for (seed, name, expected) in [
            (0, "", 0xaebe53f85cdc3c4c),
            (0, "a", 0x223510de0dd4615f),
            (1, "a", 0x8484c83a54da2d8b),
        ] {
            assert_eq!(mix(seed, name), expected, "seed {seed}, name {name:?}");
        }
    }

    #[test]
    fn values_with_other_creation_order_are_the_same() {
        let (one, two) = (SeededVars::new(3), SeededVars::new(3));
        let (a, b) = (values(&one, "a", 9, NORMAL), values(&one, "b", 9, NORMAL));
        assert_eq!(b, values(&two, "b", 9, NORMAL));
        assert_eq!(a, values(&two, "a", 9, NORMAL));
        assert_ne!(a, b);
        assert_ne!(a, values(&SeededVars::new(4), "a", 9, NORMAL));
    }

    #[test]
    fn shape_beyond_memory_is_an_error_that_names_it() {
        let vars = SeededVars::new(0);
        let vb = vars.builder(DType::F32, &Device::Cpu);
        for shape in [(usize::MAX, 1), (usize::MAX, 2), (1 << 50, 1)] {
            for init in [NORMAL, Init::Const(0.)] {
                let error = vb.get_with_hints(shape, "big", init).unwrap_err();
                assert!(error.to_string().contains("init: big of shape"), "{error}");
            }
        }
        assert!(vars.named().is_empty());
    }

    #[test]
    fn distributions_have_their_moments() {
        let vars = SeededVars::new(0);
        let kaiming = |dist| Init::Kaiming {
            dist,
            fan: FanInOut::FanIn,
            non_linearity: NonLinearity::Linear,
        };
        // A vector has fan-in 1, so Kaiming's deviation is 1.
        for (name, init, mean, deviation) in [
            ("normal", NORMAL, 0.5, 2.),
            (
                "uniform",
                Init::Uniform { lo: -1., up: 5. },
                2.,
                6. / 12f64.sqrt(),
            ),
            ("kaiming_normal", kaiming(NormalOrUniform::Normal), 0., 1.),
            ("kaiming_uniform", kaiming(NormalOrUniform::Uniform), 0., 1.),
            ("constant", Init::Const(0.25), 0.25, 0.),
        ] {
            let (m, d) = mean_and_deviation(&values(&vars, name, 40_000, init));
            assert!((m - mean).abs() < 0.05, "{name}: mean {m}");
            assert!((d - deviation).abs() < 0.05, "{name}: deviation {d}");
        }
    }

    #[test]
    fn bad_parameters_give_errors() {
        let vb = SeededVars::new(0).builder(DType::F32, &Device::Cpu);
        for init in [
            Init::Uniform { lo: 1., up: 0. },
            Init::Randn {
                mean: 0.,
                stdev: f64::NAN,
            },
        ] {
            assert!(vb.get_with_hints(3, "w", init).is_err(), "{init:?}");
        }
        assert!(vb.get(3, "w").is_ok());
        let error = vb.get(4, "w").unwrap_err().to_string();
        assert!(error.contains("[3]") && error.contains("[4]"), "{error}");
        let error = vb.to_dtype(DType::BF16).get(3, "w").unwrap_err();
        assert!(error.to_string().contains("BF16"), "{error}");
    }

    #[test]
    fn load_after_save_restores_values_and_refuses_other_shapes() {
        let path =
            std::env::temp_dir().join(format!("seeded_vars_{}.safetensors", std::process::id()));
        let (one, two, other) = (SeededVars::new(1), SeededVars::new(2), SeededVars::new(3));
        let expected = values(&one, "w", 7, NORMAL);
        one.save(&path).unwrap();
        assert_ne!(values(&two, "w", 7, NORMAL), expected);
        two.load(&path).unwrap();
        assert_eq!(values(&two, "w", 7, NORMAL), expected);
        let before = values(&other, "w", 6, NORMAL);
        let error = other.load(&path).unwrap_err().to_string();
        assert!(error.contains("[7]") && error.contains("[6]"), "{error}");
        assert_eq!(values(&other, "w", 6, NORMAL), before);
        std::fs::remove_file(&path).unwrap();
        let error = other.load(&path).unwrap_err().to_string();
        assert!(error.contains("seeded_vars_"), "{error}");
    }
}
