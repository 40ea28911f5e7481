//! For unit tests of operations: numbers that are the same in every run of a test, devices, gradients, and how far results
//! are apart.

use candle_core::{bail, DType, Device, Result, Shape, Tensor, Var};
use rand::rngs::StdRng;
use rand::SeedableRng;
use rand_distr::{Distribution, StandardNormal};
use std::cell::RefCell;
use std::io::{stderr, Write};

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

/// The GPU. Where there is none it is said that a test, `what`, or its part is skipped, past what captures output of tests
/// that pass.
pub(crate) fn gpu(what: &str) -> Option<Device> {
    let found = match cfg!(feature = "cuda") {
        true => Device::new_cuda(0).ok(),
        false => None,
    };
    if found.is_none() {
        // Where nobody listens there is nobody to tell.
        let _ = writeln!(stderr(), "skipped on a GPU, for there is none: {what}");
    }
    found
}

/// The CPU, and the GPU where there is one.
pub(crate) fn devices(what: &str) -> Vec<Device> {
    [Device::Cpu].into_iter().chain(gpu(what)).collect()
}

/// The greatest difference; NaN is greatest.
pub(crate) fn difference(a: &Tensor, b: &Tensor) -> Result<f64> {
    assert_eq!(a.dims(), b.dims());
    let off = (a.to_dtype(DType::F64)? - b.to_dtype(DType::F64)?)?;
    let off = off.abs()?.flatten_all()?.to_vec1::<f64>()?;
    let greater = |a: f64, b: f64| if b > a || b.is_nan() { b } else { a };
    Ok(off.into_iter().fold(0., greater))
}

/// The result, and both operands' gradients for an upstream gradient that differs from place to place.
pub(crate) fn with_gradients(
    a: &Tensor,
    b: &Tensor,
    operation: impl Fn(&Tensor, &Tensor) -> Result<Tensor>,
) -> Result<[Tensor; 3]> {
    let (a, b) = (Var::from_tensor(a)?, Var::from_tensor(b)?);
    let y = operation(&a, &b)?;
    let upstream = (0..y.elem_count()).map(upstream).collect();
    let upstream = Tensor::from_vec(upstream, y.shape(), &Device::Cpu)?.to_dtype(y.dtype())?;
    let gradients = (&y * upstream)?.sum_all()?.backward()?;
    let gradient = |x: &Tensor| match gradients.get(x) {
        Some(gradient) => Ok(gradient.detach()),
        None => bail!("no gradient"),
    };
    Ok([y.detach(), gradient(&a)?, gradient(&b)?])
}

/// The upstream gradient at a place.
pub(crate) fn upstream(i: usize) -> f64 {
    (0.7 * i as f64).sin() + 0.3
}
