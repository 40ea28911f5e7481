//! AdamW: Loshchilov & Hutter, *Decoupled weight decay regularization*, arXiv 1711.05101v3, algorithm 2.
//!
//! With the gradient g at a weight's t-th update, the rate α (the paper's η_t α) and the decay λ:
//!
//! ```text
//! m ← β₁ m + (1 − β₁) g          line 7
//! v ← β₂ v + (1 − β₂) g²         line 8
//! m̂ = m / (1 − β₁ᵗ)              line 9
//! v̂ = v / (1 − β₂ᵗ)              line 10
//! θ ← θ − α (m̂ / (√v̂ + ε) + λ θ) line 12
//! ```
//!
//! In the paper the decay is η_t λ θ, without α; here, as in PyTorch and nearly everywhere, it is multiplied by the
//! rate.

use super::checksum::Checksum;
use super::gradients::Gradients;
use super::parameters::{Parameter, Parameters};
use candle_core::backend::BackendStorage;
use candle_core::{bail, CpuStorage, Error, InplaceOp2, InplaceOp3, Layout, Result, Tensor, Var};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Numbers that one task updates.
const TASK: usize = 1 << 14;

/// The numbers of [`AdamW`]. The defaults are LLaMA's (Touvron et al., arXiv 2302.13971, §2.3).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamWConfig {
    /// Decay of the mean of gradients, β₁.
    pub beta1: f64,
    /// Decay of the mean of their squares, β₂.
    pub beta2: f64,
    /// What is added to the root of the latter, ε.
    pub epsilon: f64,
    /// Decay of the weights, λ, in the groups that have one.
    pub weight_decay: f64,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
        }
    }
}

impl AdamWConfig {
    /// Checks the ranges of the numbers.
    ///
    /// # Errors
    /// When a β is not in 0..1, ε not above 0 or the decay negative.
    pub fn validate(&self) -> Result<()> {
        for (name, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0. ..1.).contains(&beta) {
                bail!("adamw: {name} must be at least 0 and below 1, got {beta}")
            }
        }
        // A smaller one would be 0 in f32.
        if !(self.epsilon.is_finite() && self.epsilon >= f64::from(f32::MIN_POSITIVE)) {
            bail!(
                "adamw: epsilon must be finite and above 0, got {}",
                self.epsilon
            )
        }
        if !(self.weight_decay.is_finite() && self.weight_decay >= 0.) {
            bail!(
                "adamw: weight_decay must be finite and not negative, got {}",
                self.weight_decay
            )
        }
        Ok(())
    }
}

/// How the weights of one group are trained.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Group {
    /// Their decay λ.
    pub weight_decay: f64,
    /// What the learning rate is multiplied by.
    pub rate: f64,
}

/// Mean and spread of a weight's gradients, and how many it had.
#[derive(Debug, Clone)]
pub struct Moments {
    /// Mean of gradients m, of the weight's shape and its master's dtype.
    pub first: Var,
    /// Mean of squared gradients v, likewise.
    pub second: Var,
    /// Number of updates t.
    pub updates: u64,
}

/// What one weight is updated by.
#[derive(Debug)]
struct Slot {
    moments: Moments,
    group: Group,
}

/// The optimiser AdamW over the masters of [`Parameters`], with a state that can be read and set.
///
/// Without groups of one's own the weight decay acts on [matrices only](Self::matrices_decay). Weights without a
/// gradient in a step are left alone, their count of updates too, as in `torch.optim.AdamW`, with whose numbers this
/// agrees.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_posenc::train::{AdamW, AdamWConfig, Gradients, Parameters};
/// use candle_posenc::SeededVars;
/// # fn main() -> candle_core::Result<()> {
/// let parameters = Parameters::new(SeededVars::new(0));
/// let vb = parameters.builder(DType::F32, &Device::Cpu);
/// let weight = vb.get_with_hints(2, "weight", candle_nn::Init::Const(3.))?;
/// let mut optimiser = AdamW::new(AdamWConfig::default(), &parameters)?;
/// let gradients = Gradients::of(&weight.sqr()?.sum_all()?.backward()?, &parameters)?;
/// optimiser.step(&parameters, &gradients, 0.5)?;
/// // The first step has the length of the learning rate.
/// assert!((weight.to_vec1::<f32>()?[0] - 2.5).abs() < 1e-6);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    slots: BTreeMap<String, Slot>,
}

impl AdamW {
    /// An optimiser of the weights that train, all of which exist: build the model first.
    ///
    /// # Errors
    /// When a number is [not valid](AdamWConfig::validate).
    pub fn new(config: AdamWConfig, parameters: &Parameters) -> Result<Self> {
        let decay = config.weight_decay;
        Self::with_groups(config, parameters, |_, dims| {
            Self::matrices_decay(decay, dims)
        })
    }

    /// The default groups: weights with at least two dimensions longer than 1 decay. These are the projections, and
    /// the embeddings too, as in GPT-2 and its descendants; norms, gains, biases and other vectors do not decay.
    pub fn matrices_decay(weight_decay: f64, dims: &[usize]) -> Group {
        let long = dims.iter().filter(|dim| **dim > 1).count();
        Group {
            weight_decay: if long >= 2 { weight_decay } else { 0. },
            rate: 1.,
        }
    }

    /// An optimiser with groups: `group` tells a weight's by its name and shape.
    ///
    /// # Errors
    /// When a number is [not valid](AdamWConfig::validate), or a group's is negative or not finite.
    pub fn with_groups(
        config: AdamWConfig,
        parameters: &Parameters,
        group: impl Fn(&str, &[usize]) -> Group,
    ) -> Result<Self> {
        config.validate()?;
        let mut slots = BTreeMap::new();
        for Parameter { name, master, .. } in parameters.trained() {
            let group = group(&name, master.dims());
            let valid = |x: f64| x.is_finite() && x >= 0.;
            if !(valid(group.weight_decay) && valid(group.rate)) {
                bail!(
                    "adamw: {name} is in {group:?}, whose numbers must be finite and not negative"
                )
            }
            let zeros = || Var::zeros(master.shape(), master.dtype(), master.device());
            let moments = Moments {
                first: zeros()?,
                second: zeros()?,
                updates: 0,
            };
            slots.insert(name, Slot { moments, group });
        }
        Ok(Self { config, slots })
    }

    /// The numbers that it works with.
    pub fn config(&self) -> &AdamWConfig {
        &self.config
    }

    /// A checksum of all names and their groups.
    pub(super) fn groups_checksum(&self) -> Result<String> {
        let groups: BTreeMap<_, _> = (self.slots.iter())
            .map(|(name, slot)| (name, (slot.group.weight_decay, slot.group.rate)))
            .collect();
        let json = serde_json::to_vec(&groups).map_err(Error::wrap)?;
        Ok(Checksum::of(&json).to_string())
    }

    /// The state of every weight with its name, ordered by name.
    pub fn state(&self) -> impl Iterator<Item = (&str, &Moments)> {
        let slots = self.slots.iter();
        slots.map(|(name, slot)| (name.as_str(), &slot.moments))
    }

    /// Sets a weight's state.
    ///
    /// # Shapes
    /// `first` and `second` as the weight.
    ///
    /// # Errors
    /// When there is no such weight, or a moment has another shape or dtype; then nothing is changed.
    pub fn set_state(
        &mut self,
        name: &str,
        first: &Tensor,
        second: &Tensor,
        updates: u64,
    ) -> Result<()> {
        let Some(slot) = self.slots.get_mut(name) else {
            bail!("adamw: no weight {name} is trained")
        };
        let moments = &mut slot.moments;
        for moment in [first, second] {
            if moment.dims() != moments.first.dims() || moment.dtype() != moments.first.dtype() {
                bail!(
                    "adamw: the moments of {name} are {:?} {:?}, got {:?} {:?}",
                    moments.first.dtype(),
                    moments.first.dims(),
                    moment.dtype(),
                    moment.dims()
                )
            }
        }
        // Copies, which may be of these moments themselves.
        let device = moments.first.device();
        let first = first.to_device(device)?.copy()?;
        let second = second.to_device(device)?.copy()?;
        moments.first.set(&first)?;
        moments.second.set(&second)?;
        moments.updates = updates;
        Ok(())
    }

    /// Updates every weight that has a gradient at a learning rate, and its working copy.
    ///
    /// # Errors
    /// When the rate is negative or not finite, or a gradient belongs to no weight that is trained or has another
    /// shape or dtype than the weight's master; then nothing is changed. When the device fails, its memory running out for
    /// instance: weights reached before that are changed and have counted the update; the one reached then has not, but
    /// may be changed in part; those behind it are as they were.
    pub fn step(
        &mut self,
        parameters: &Parameters,
        gradients: &Gradients,
        rate: f64,
    ) -> Result<()> {
        self.step_by_scaled(parameters, gradients, 1., rate)
    }

    /// [`step`](Self::step) by the gradients times a factor.
    pub(super) fn step_by_scaled(
        &mut self,
        parameters: &Parameters,
        gradients: &Gradients,
        factor: f64,
        rate: f64,
    ) -> Result<()> {
        if !(rate.is_finite() && rate >= 0.) {
            bail!("adamw: the learning rate must be finite and not negative, got {rate}")
        }
        let trained: BTreeMap<_, _> = parameters
            .trained()
            .into_iter()
            .map(|parameter| (parameter.name.clone(), parameter))
            .collect();
        for (name, gradient) in gradients.named() {
            let (Some(parameter), Some(slot)) = (trained.get(name), self.slots.get(name)) else {
                bail!("adamw: no weight {name} is trained")
            };
            let (master, first) = (&parameter.master, &slot.moments.first);
            for tensor in [master.as_tensor(), gradient] {
                if tensor.dims() != first.dims() || tensor.dtype() != first.dtype() {
                    bail!(
                        "adamw: {name} is {:?} {:?} and its gradient {:?} {:?}; its moments are {:?} {:?}",
                        master.dtype(),
                        master.dims(),
                        gradient.dtype(),
                        gradient.dims(),
                        first.dtype(),
                        first.dims()
                    )
                }
            }
        }
        let mut reached = 0;
        let result = self.update(&trained, gradients, factor, rate, &mut reached);
        for (name, _) in gradients.named().take(reached) {
            if let Some(slot) = self.slots.get_mut(name) {
                slot.moments.updates = slot.moments.updates.saturating_add(1);
            }
        }
        result
    }

    /// Changes weights and moments in the order of the gradients, all of which belong to weights here, but not the counts
    /// of updates: `reached` is how many of the weights were changed, also after an error.
    fn update(
        &self,
        trained: &BTreeMap<String, Parameter>,
        gradients: &Gradients,
        factor: f64,
        rate: f64,
        reached: &mut usize,
    ) -> Result<()> {
        let config = &self.config;
        let job = |(name, gradient)| {
            let (parameter, slot) = (trained.get(name)?, self.slots.get(name)?);
            let t = slot.moments.updates.saturating_add(1);
            let update = Update::new(config, slot.group, t, rate);
            Some((parameter, slot, gradient, update))
        };
        let jobs: Vec<_> = gradients.named().filter_map(job).collect();
        #[cfg(feature = "cuda")]
        {
            let jobs: Vec<_> = (jobs.iter())
                .map(|(parameter, slot, gradient, update)| super::cuda::Job {
                    master: &parameter.master,
                    first: &slot.moments.first,
                    second: &slot.moments.second,
                    gradient,
                    working: parameter.copy(),
                    kept: update.kept,
                    rate: update.rate,
                    root: update.root,
                })
                .collect();
            if super::cuda::update(config, &jobs, factor)? {
                *reached = jobs.len();
                return Ok(());
            }
        }
        for (parameter, slot, gradient, update) in jobs {
            let scaled = match factor == 1. {
                true => None,
                false => Some((gradient * factor)?),
            };
            let gradient = scaled.as_ref().unwrap_or(gradient);
            let moments = &slot.moments;
            match gradient.device().is_cpu() {
                true => update.in_place(&parameter.master, moments, gradient)?,
                false => update.by_tensors(&parameter.master, moments, gradient)?,
            }
            *reached += 1;
            parameter.refresh()?;
        }
        Ok(())
    }
}

/// The numbers of one weight's update.
struct Update {
    beta1: f64,
    beta2: f64,
    epsilon: f64,
    /// What is left of the weight after its decay: 1 − α λ.
    kept: f64,
    /// α / (1 − β₁ᵗ).
    rate: f64,
    /// √(1 − β₂ᵗ).
    root: f64,
}

impl Update {
    /// A weight's t-th.
    fn new(config: &AdamWConfig, group: Group, t: u64, rate: f64) -> Self {
        let rate = rate * group.rate;
        let t = t as f64;
        Self {
            beta1: config.beta1,
            beta2: config.beta2,
            epsilon: config.epsilon,
            kept: 1. - rate * group.weight_decay,
            rate: rate / (1. - config.beta1.powf(t)),
            root: (1. - config.beta2.powf(t)).sqrt(),
        }
    }

    /// Three passes over numbers in the host's memory.
    fn in_place(&self, master: &Var, moments: &Moments, gradient: &Tensor) -> Result<()> {
        let &Self { beta1, beta2, .. } = self;
        let mean = |beta, squared| RunningMean { beta, squared };
        (moments.first).inplace_op2(gradient, &mean(beta1, false))?;
        (moments.second).inplace_op2(gradient, &mean(beta2, true))?;
        master.inplace_op3(&moments.first, &moments.second, self)
    }

    /// The same in tensor operations, for any device.
    fn by_tensors(&self, master: &Var, moments: &Moments, gradient: &Tensor) -> Result<()> {
        let &Self { beta1, beta2, .. } = self;
        let first = ((moments.first.as_tensor() * beta1)? + (gradient * (1. - beta1))?)?;
        let second = ((moments.second.as_tensor() * beta2)? + (gradient.sqr()? * (1. - beta2))?)?;
        let spread = ((second.sqrt()? / self.root)? + self.epsilon)?;
        let kept = (master.as_detached_tensor() * self.kept)?;
        let next = (kept - ((&first / spread)? * self.rate)?)?;
        moments.first.set(&first)?;
        moments.second.set(&second)?;
        master.set(&next)
    }
}

/// A running mean of gradients, m ← β m + (1 − β) g, or of their squares.
struct RunningMean {
    beta: f64,
    squared: bool,
}

impl InplaceOp2 for RunningMean {
    fn name(&self) -> &'static str {
        "adamw-mean"
    }

    fn cpu_fwd(
        &self,
        mean: &mut CpuStorage,
        layout: &Layout,
        gradient: &CpuStorage,
        gradient_layout: &Layout,
    ) -> Result<()> {
        let &Self { beta, squared } = self;
        let (beta32, rest32) = (beta as f32, (1. - beta) as f32);
        for_each(
            (mean, layout),
            [(gradient, gradient_layout)],
            |m, [g]: [f32; 1]| beta32 * m + rest32 * if squared { g * g } else { g },
            |m, [g]: [f64; 1]| beta * m + (1. - beta) * if squared { g * g } else { g },
        )
    }
}

/// The weight's own change, from both means.
impl InplaceOp3 for Update {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn cpu_fwd(
        &self,
        weight: &mut CpuStorage,
        layout: &Layout,
        first: &CpuStorage,
        first_layout: &Layout,
        second: &CpuStorage,
        second_layout: &Layout,
    ) -> Result<()> {
        let &Self {
            epsilon,
            kept,
            rate,
            root,
            ..
        } = self;
        let (epsilon32, kept32, rate32) = (epsilon as f32, kept as f32, rate as f32);
        let root32 = root as f32;
        for_each(
            (weight, layout),
            [(first, first_layout), (second, second_layout)],
            |w, [m, v]: [f32; 2]| kept32 * w - rate32 * m / (v.sqrt() / root32 + epsilon32),
            |w, [m, v]: [f64; 2]| kept * w - rate * m / (v.sqrt() / root + epsilon),
        )
    }
}

/// Replaces every number of the first operand by a function of it and those at the same place of the others.
fn for_each<const N: usize>(
    (changed, layout): (&mut CpuStorage, &Layout),
    others: [(&CpuStorage, &Layout); N],
    single: impl Fn(f32, [f32; N]) -> f32 + Sync,
    double: impl Fn(f64, [f64; N]) -> f64 + Sync,
) -> Result<()> {
    match changed {
        CpuStorage::F32(values) => {
            let mut read: [&[f32]; N] = [&[]; N];
            for (read, (storage, layout)) in read.iter_mut().zip(others) {
                *read = contiguous(storage.as_slice()?, layout)?;
            }
            in_tasks(contiguous_mut(values, layout)?, read, single);
        }
        CpuStorage::F64(values) => {
            let mut read: [&[f64]; N] = [&[]; N];
            for (read, (storage, layout)) in read.iter_mut().zip(others) {
                *read = contiguous(storage.as_slice()?, layout)?;
            }
            in_tasks(contiguous_mut(values, layout)?, read, double);
        }
        other => bail!("adamw: {:?} is neither f32 nor f64", other.dtype()),
    }
    Ok(())
}

fn in_tasks<T: Copy + Send + Sync, const N: usize>(
    changed: &mut [T],
    others: [&[T]; N],
    next: impl Fn(T, [T; N]) -> T + Sync,
) {
    let tasks = changed.par_chunks_mut(TASK).enumerate();
    tasks.for_each(|(task, changed)| {
        let (start, len) = (task * TASK, changed.len());
        let others = others.map(|other| &other[start..start + len]);
        for (i, x) in changed.iter_mut().enumerate() {
            *x = next(*x, others.map(|other| other[i]));
        }
    });
}

fn contiguous<'a, T>(values: &'a [T], layout: &Layout) -> Result<&'a [T]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&values[start..end]),
        None => bail!("adamw: an operand is not contiguous: {layout:?}"),
    }
}

fn contiguous_mut<'a, T>(values: &'a mut [T], layout: &Layout) -> Result<&'a mut [T]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&mut values[start..end]),
        None => bail!("adamw: an operand is not contiguous: {layout:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::init::SeededVars;
    use candle_core::{DType, Device};

    #[test]
    fn updates_are_counted_of_the_weights_that_were_reached_before_a_failure() -> Result<()> {
        let parameters = Parameters::new(SeededVars::new(0));
        let vb = parameters.builder(DType::F32, &Device::Cpu);
        let weight = |name| vb.get_with_hints(2, name, candle_nn::Init::Const(3.));
        let [a, b, c] = [weight("a")?, weight("b")?, weight("c")?];
        let loss = (a.sqr()? + b.sqr()? + c.sqr()?)?.sum_all()?;
        let gradients = Gradients::of(&loss.backward()?, &parameters)?;
        let mut optimiser = AdamW::new(AdamWConfig::default(), &parameters)?;
        let updates = |optimiser: &AdamW| {
            optimiser
                .state()
                .map(|(_, x)| x.updates)
                .collect::<Vec<_>>()
        };
        optimiser.step(&parameters, &gradients, 0.5)?;
        assert_eq!(updates(&optimiser), [1, 1, 1]);
        // Not what the gradient is, which the update of b finds out by itself.
        let wrong = Var::zeros(2, DType::F64, &Device::Cpu)?;
        optimiser.slots.get_mut("b").unwrap().moments.second = wrong;
        assert!(optimiser.step(&parameters, &gradients, 0.5).is_err());
        assert_eq!(updates(&optimiser), [2, 1, 1]);
        let values = |x: &Tensor| x.to_vec1::<f32>();
        assert!(values(&a)? < values(&b)?);
        assert_eq!(values(&b)?, values(&c)?);
        Ok(())
    }

    #[test]
    fn in_place_update_equals_that_by_tensors() -> Result<()> {
        let device = Device::Cpu;
        // More than one task, and a rest.
        let len = 2 * TASK + 5;
        for (dtype, tolerance) in [(DType::F32, 3e-7), (DType::F64, 1e-15)] {
            let wave = |step: f64| {
                let values: Vec<f64> = (0..len).map(|i| (i as f64 * step).sin()).collect();
                Tensor::from_vec(values, len, &device)?.to_dtype(dtype)
            };
            let copies = || -> Result<(Var, Moments)> {
                let moments = Moments {
                    first: Var::from_tensor(&wave(0.3)?)?,
                    second: Var::from_tensor(&wave(0.7)?.sqr()?)?,
                    updates: 3,
                };
                Ok((Var::from_tensor(&wave(0.1)?)?, moments))
            };
            let ((fused, fused_moments), (plain, plain_moments)) = (copies()?, copies()?);
            let group = Group {
                weight_decay: 0.3,
                rate: 2.,
            };
            let update = Update::new(&AdamWConfig::default(), group, 3, 0.01);
            let gradient = wave(0.9)?;
            update.in_place(&fused, &fused_moments, &gradient)?;
            update.by_tensors(&plain, &plain_moments, &gradient)?;
            for (a, b) in [
                (&fused, &plain),
                (&fused_moments.first, &plain_moments.first),
                (&fused_moments.second, &plain_moments.second),
            ] {
                let difference = (a.as_tensor() - b.as_tensor())?.abs()?.max_all()?;
                let difference: f64 = difference.to_dtype(DType::F64)?.to_scalar()?;
                assert!(difference <= tolerance, "{dtype:?}: {difference}");
            }
        }
        Ok(())
    }
}
