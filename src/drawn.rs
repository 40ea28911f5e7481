//! Normal numbers for unit tests, the same in every run of a test.

use candle_core::{Device, Result, Shape, Tensor};
use rand::rngs::StdRng;
use rand::SeedableRng;
use rand_distr::{Distribution, StandardNormal};
use std::cell::RefCell;

thread_local! {
    /// A test has a thread of its own.
    static DRAWS: RefCell<StdRng> = RefCell::new(StdRng::seed_from_u64(1));
}

/// Of mean 0, in f64 on the CPU.
pub(crate) fn normal(deviation: f64, shape: impl Into<Shape>) -> Result<Tensor> {
    let shape = shape.into();
    let values: Vec<f64> = DRAWS.with_borrow_mut(|rng| {
        let mut draw = || -> f64 { StandardNormal.sample(&mut *rng) };
        (0..shape.elem_count())
            .map(|_| deviation * draw())
            .collect()
    });
    Tensor::from_vec(values, shape, &Device::Cpu)
}
