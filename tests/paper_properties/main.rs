//! What the papers of TAPA and TAPE say about their encodings, and what follows from their definitions.

mod tapa;
mod tape;

use candle_core::{DType, Device, Result, Tensor, Var};
use rand::{rngs::StdRng, RngExt};
use rand_distr::StandardNormal;

/// Standard normal numbers, f64.
fn normal(rng: &mut StdRng, shape: &[usize]) -> Result<Tensor> {
    let count = shape.iter().product();
    let values: Vec<f64> = (0..count).map(|_| rng.sample(StandardNormal)).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
}

/// All entries in f64, row by row.
fn values(x: &Tensor) -> Result<Vec<f64>> {
    x.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

/// The greatest |a − b|; a NaN in either is the greatest.
fn max_difference(a: &Tensor, b: &Tensor) -> Result<f64> {
    assert_eq!(a.dims(), b.dims());
    let differences = values(a)?
        .into_iter()
        .zip(values(b)?)
        .map(|(a, b)| (a - b).abs());
    Ok(differences.fold(0., |most, x| if x <= most { most } else { x }))
}

/// Compares the gradient of `loss` with differences of its values, at up to 24 coordinates of every variable, which
/// must be f64. With differences of fourth order the two agree to 1e-8 of a variable's greatest gradient.
fn assert_gradients_match_differences(
    variables: &[(&str, &Var)],
    loss: impl Fn() -> Result<Tensor>,
) -> Result<()> {
    const STEP: f64 = 3e-5;
    let gradients = loss()?.backward()?;
    for (name, variable) in variables {
        let original = variable.as_tensor().copy()?;
        let numbers = values(&original)?;
        let gradient = match gradients.get(variable) {
            Some(gradient) => values(gradient)?,
            None => panic!("{name} has no gradient"),
        };
        let greatest = gradient.iter().fold(0f64, |most, g| most.max(g.abs()));
        let stride = numbers.len().div_ceil(24);
        for i in (0..numbers.len()).step_by(stride) {
            let loss_at = |steps: f64| -> Result<f64> {
                let mut moved = numbers.clone();
                moved[i] += steps * STEP;
                variable.set(&Tensor::from_vec(moved, original.shape(), &Device::Cpu)?)?;
                loss()?.to_scalar::<f64>()
            };
            let near = loss_at(1.)? - loss_at(-1.)?;
            let far = loss_at(2.)? - loss_at(-2.)?;
            let difference = (8. * near - far) / (12. * STEP);
            assert!(
                (difference - gradient[i]).abs() <= 1e-8 * greatest + 1e-9,
                "{name}[{i}]: gradient {}, differences {difference}",
                gradient[i]
            );
        }
        variable.set(&original)?;
    }
    Ok(())
}
