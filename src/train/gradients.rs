//! Gradients of a model's weights, apart from the graph that they came from.

use super::parameters::Parameters;
use candle_core::backend::BackendStorage;
use candle_core::backprop::GradStore;
use candle_core::{bail, CpuStorage, DType, Result, Storage, Tensor};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Numbers that one task sums. It is fixed, so that sums do not depend on the number of threads.
const TASK: usize = 1 << 14;

/// Gradients of the weights that train, by name, in the dtype of their masters (f32, or f64 with f64 masters).
///
/// A weight that the loss does not depend on has none.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_posenc::train::{Gradients, Parameters};
/// use candle_posenc::SeededVars;
/// # fn main() -> candle_core::Result<()> {
/// let parameters = Parameters::new(SeededVars::new(0));
/// let vb = parameters.builder(DType::F32, &Device::Cpu);
/// let weight = vb.get_with_hints(2, "weight", candle_nn::Init::Const(3.))?;
/// let mut sum = Gradients::default();
/// for factor in [1., 3.] {
///     let loss = (weight.sqr()?.sum_all()? * factor)?; // gradient: factor · 2 · 3
///     sum.accumulate(Gradients::of(&loss.backward()?, &parameters)?)?;
/// }
/// sum.scale(0.5)?; // the mean of two
/// assert_eq!(sum.get("weight").unwrap().to_vec1::<f32>()?, [12., 12.]);
/// assert!((sum.clip(1.)? - 288f64.sqrt()).abs() < 1e-6);
/// assert!((sum.norm()? - 1.).abs() < 1e-6);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default)]
pub struct Gradients {
    by_name: BTreeMap<String, Tensor>,
}

impl Gradients {
    /// The gradients of the weights that train, out of a backward pass.
    ///
    /// # Errors
    /// When a gradient cannot be converted.
    pub fn of(store: &GradStore, parameters: &Parameters) -> Result<Self> {
        let trained = parameters.trained();
        let found: Vec<_> = (trained.iter())
            .filter_map(|parameter| Some((parameter, store.get(&parameter.working)?)))
            .collect();
        #[cfg(feature = "cuda")]
        if found.iter().all(|(p, _)| p.master.dtype() == DType::F32) {
            let gradients: Vec<_> = found.iter().map(|(_, gradient)| *gradient).collect();
            if let Some(gradients) = super::cuda::in_single_precision(&gradients)? {
                let names = found.iter().map(|(parameter, _)| parameter.name.clone());
                return Ok(Self {
                    by_name: names.zip(gradients).collect(),
                });
            }
        }
        let mut by_name = BTreeMap::new();
        for (parameter, gradient) in found {
            let gradient = gradient.to_dtype(parameter.master.dtype())?.contiguous()?;
            by_name.insert(parameter.name.clone(), gradient.detach());
        }
        Ok(Self { by_name })
    }

    /// The gradient of one weight, of the weight's shape.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.by_name.get(name)
    }

    /// All of them with their names, ordered by name.
    pub fn named(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.by_name.iter().map(|(name, g)| (name.as_str(), g))
    }

    /// Adds others; a weight that has none on one side takes the other's.
    ///
    /// # Errors
    /// When a weight has another shape, dtype or device there; then nothing is changed.
    pub fn accumulate(&mut self, others: Self) -> Result<()> {
        for (name, other) in &others.by_name {
            if let Some(gradient) = self.by_name.get(name) {
                let same = gradient.dims() == other.dims() && gradient.dtype() == other.dtype();
                if !same || !gradient.device().same_device(other.device()) {
                    bail!("gradients: {name} is {gradient:?} and {other:?}")
                }
            }
        }
        for (name, other) in others.by_name {
            // One at a time: the sums of large models are large.
            let sum = match self.by_name.get(&name) {
                Some(gradient) => (gradient + other)?,
                None => other,
            };
            self.by_name.insert(name, sum);
        }
        Ok(())
    }

    /// Multiplies all by a factor.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn scale(&mut self, factor: f64) -> Result<()> {
        for gradient in self.by_name.values_mut() {
            *gradient = (&*gradient * factor)?;
        }
        Ok(())
    }

    /// The Euclidean norm of all gradients together, summed in f64 in a fixed order: on the CPU its bits do not depend on
    /// the number of threads.
    ///
    /// # Errors
    /// When a gradient cannot be read.
    pub fn norm(&self) -> Result<f64> {
        #[cfg(feature = "cuda")]
        {
            let gradients: Vec<_> = self.by_name.values().collect();
            if let Some(sum) = super::cuda::sum_of_squares(&gradients)? {
                return Ok(sum.sqrt());
            }
        }
        let squares = self.by_name.values().map(sum_of_squares);
        Ok(squares.sum::<Result<f64>>()?.sqrt())
    }

    /// Scales all down together so that their [`norm`](Self::norm) is at most `largest` (Pascanu et al., arXiv
    /// 1211.5063, §3.2); returns the norm before. Gradients whose norm is not finite stay as they are.
    ///
    /// # Errors
    /// When `largest` is not above 0.
    pub fn clip(&mut self, largest: f64) -> Result<f64> {
        let (norm, factor) = self.clipping(largest)?;
        if factor != 1. {
            self.scale(factor)?;
        }
        Ok(norm)
    }

    /// The norm, and the factor that brings it to at most `largest`: what [`clip`](Self::clip) does, still to be done.
    pub(super) fn clipping(&self, largest: f64) -> Result<(f64, f64)> {
        if largest.is_nan() || largest <= 0. {
            bail!("gradients: the largest norm must be above 0, got {largest}")
        }
        let norm = self.norm()?;
        let factor = match norm > largest && norm.is_finite() {
            true => largest / norm,
            false => 1.,
        };
        Ok((norm, factor))
    }
}

fn sum_of_squares(gradient: &Tensor) -> Result<f64> {
    let gradient = gradient.contiguous()?;
    let (storage, layout) = gradient.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        return gradient.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar();
    };
    let part = layout.start_offset()..layout.start_offset() + layout.shape().elem_count();
    match storage {
        CpuStorage::F32(values) => Ok(sum_in_tasks(&values[part], |x| f64::from(x).powi(2))),
        CpuStorage::F64(values) => Ok(sum_in_tasks(&values[part], |x| x * x)),
        other => bail!("gradients: {:?} is neither f32 nor f64", other.dtype()),
    }
}

/// The sum of tasks of a fixed size, added in their order.
fn sum_in_tasks<T: Copy + Sync>(values: &[T], term: impl Fn(T) -> f64 + Sync) -> f64 {
    let sums: Vec<f64> = values
        .par_chunks(TASK)
        .map(|values| values.iter().map(|x| term(*x)).sum())
        .collect();
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn gradients(named: &[(&str, Tensor)]) -> Gradients {
        let named = named.iter().map(|(name, g)| (name.to_string(), g.clone()));
        Gradients {
            by_name: named.collect(),
        }
    }

    #[test]
    fn norm_of_many_numbers_is_that_of_a_plain_sum_on_any_number_of_threads() -> Result<()> {
        let device = Device::Cpu;
        let values: Vec<f32> = (0..100_003).map(|i| (i as f32 * 0.37).sin()).collect();
        let plain: f64 = values.iter().map(|x| f64::from(*x).powi(2)).sum();
        let whole = Tensor::from_vec(values, 100_003, &device)?;
        // A view behind an offset counts only what it shows.
        let part = whole.narrow(0, 3, 100_000)?;
        let first: f64 = whole
            .narrow(0, 0, 3)?
            .to_vec1::<f32>()?
            .iter()
            .map(|x| f64::from(*x).powi(2))
            .sum();
        let both = gradients(&[("a", whole), ("b", part)]);
        let expected = (2. * plain - first).sqrt();
        let norms: Vec<f64> = [1, 3]
            .into_iter()
            .map(|threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
                pool.unwrap().install(|| both.norm()).unwrap()
            })
            .collect();
        assert!(
            (norms[0] - expected).abs() < 1e-9 * expected,
            "{norms:?} {expected}"
        );
        assert_eq!(norms[0].to_bits(), norms[1].to_bits());
        Ok(())
    }

    #[test]
    fn accumulate_other_shape_is_refused_and_changes_nothing() -> Result<()> {
        let device = Device::Cpu;
        let one = Tensor::ones(2, DType::F32, &device)?;
        let mut sum = gradients(&[("a", one.clone()), ("z", one.clone())]);
        let other = gradients(&[("a", one), ("z", Tensor::ones(3, DType::F32, &device)?)]);
        assert!(sum.accumulate(other).is_err());
        assert_eq!(sum.get("a").unwrap().to_vec1::<f32>()?, [1., 1.]);
        Ok(())
    }

    #[test]
    fn clip_common_norm_above_largest_becomes_largest_and_others_stay() -> Result<()> {
        let device = Device::Cpu;
        let mut both = gradients(&[
            ("a", Tensor::new(&[3f32, 0.], &device)?),
            ("b", Tensor::new(&[[4f32]], &device)?),
        ]);
        assert_eq!(both.clip(10.)?, 5.);
        assert_eq!(both.get("a").unwrap().to_vec1::<f32>()?, [3., 0.]);
        assert_eq!(both.clip(1.)?, 5.);
        assert!((both.get("a").unwrap().to_vec1::<f32>()?[0] - 0.6).abs() < 1e-6);
        assert!((both.get("b").unwrap().to_vec2::<f32>()?[0][0] - 0.8).abs() < 1e-6);
        for bad in [0., -1., f64::NAN] {
            assert!(both.clip(bad).is_err(), "{bad}");
        }
        let mut infinite = gradients(&[("a", Tensor::new(&[f32::INFINITY, 1.], &device)?)]);
        assert_eq!(infinite.clip(1.)?, f64::INFINITY);
        assert_eq!(infinite.get("a").unwrap().to_vec1::<f32>()?[1], 1.);
        Ok(())
    }
}
