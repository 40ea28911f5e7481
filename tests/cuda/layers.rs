//! RMSNorm and SwiGLU with their gradients, held to f64 by the rule of the house: at most twice the error of tensor
//! operations of the same dtype on the CPU.

use crate::report::Report;
use crate::target::Target;
use crate::{test, Test};
use candle_core::{DType, Device, Result, Tensor, Var, D};
use candle_posenc::{rms_norm, swiglu};
use rand::rngs::ChaCha12Rng;
use rand::{RngExt, SeedableRng};

const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];
const EPSILON: f64 = 1e-5;
const REPEATS: usize = 50;

/// A function of two tensors.
type Layer = fn(&Tensor, &Tensor) -> Result<Tensor>;

pub fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for dtype in DTYPES {
        tests.push(test(
            format!("rms_norm_{dtype:?}"),
            move |target, report| {
                // Rows and widths: a warp's and a block's, odd ones, more rows than blocks, sums beyond shared memory.
                for (rows, width) in [
                    (1, 1),
                    (3, 7),
                    (37, 8),
                    (5000, 64),
                    (1100, 384),
                    (9, 1000),
                    (33, 1024),
                    (5, 1025),
                    (5, 1032),
                    (600, 2048),
                    (3, 5003),
                    (2, 16_384),
                    (3, 25_000),
                    (2, 25_001),
                ] {
                    let inputs = [random(&[rows, width], 1., 1)?, random(&[width], 1., 2)?];
                    let layers: [Layer; 2] = [norm, norm_by_tensors];
                    hold("rms_norm", target, &inputs, dtype, layers, report)?;
                }
                Ok(())
            },
        ));
        tests.push(test(format!("swiglu_{dtype:?}"), move |target, report| {
            for shape in [
                &[1][..],
                &[3, 7],
                &[2, 5, 8],
                &[41, 1027],
                &[300, 1024],
                &[2, 4, 100],
            ] {
                let inputs = [random(shape, 3., 3)?, random(shape, 1., 4)?];
                let layers: [Layer; 2] = [swiglu, gate_by_tensors];
                hold("swiglu", target, &inputs, dtype, layers, report)?;
            }
            Ok(())
        }));
    }
    tests.push(test("rms_norm_of_zeros_and_huge_rows", |target, report| {
        let mut x = random(&[4, 40], 1., 5)?.to_vec2::<f64>()?;
        x[0].fill(0.);
        x[1].iter_mut().for_each(|x| *x *= 1e17);
        x[2].iter_mut().for_each(|x| *x *= 1e-12);
        let inputs = [Tensor::new(x, &Device::Cpu)?, random(&[40], 1., 6)?];
        let layers: [Layer; 2] = [norm, norm_by_tensors];
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            hold("rms_norm", target, &inputs, dtype, layers, report)?;
        }
        Ok(())
    }));
    tests.push(test("swiglu_of_huge_gates_is_finite", |target, report| {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let gate = [-1e30, -1e4, -100., -1., 0., 1., 100., 1e4, 1e30];
            let gate = Tensor::new(&gate, &Device::Cpu)?.to_dtype(dtype)?;
            let gate = Var::from_tensor(&gate.to_device(target.device())?)?;
            let up = Var::ones(9, dtype, target.device())?;
            let y = swiglu(&gate, &up)?;
            let gradients = y.sum_all()?.backward()?;
            for x in [Some(&y), gradients.get(&gate), gradients.get(&up)] {
                let finite = match x {
                    Some(x) => values(x)?.iter().all(|x| x.is_finite()),
                    None => false,
                };
                report.check(finite, || format!("{dtype:?}"));
            }
        }
        Ok(())
    }));
    tests.push(test("layers_repeat_bit_for_bit", |target, report| {
        for dtype in DTYPES {
            for (layer, shapes) in [
                (norm as Layer, [vec![5000, 64], vec![64]]),
                (norm, [vec![700, 384], vec![384]]),
                (norm, [vec![9, 5003], vec![5003]]),
                (swiglu, [vec![70, 1024], vec![70, 1024]]),
            ] {
                let inputs = [random(&shapes[0], 1., 7)?, random(&shapes[1], 1., 8)?];
                let first = with_gradients(target, &inputs, dtype, layer)?;
                for _ in 0..REPEATS {
                    let again = with_gradients(target, &inputs, dtype, layer)?;
                    report.check(first == again, || format!("{dtype:?} {shapes:?}"));
                }
            }
        }
        Ok(())
    }));
    tests
}

fn norm(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    rms_norm(x, weight, EPSILON)
}

fn norm_by_tensors(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let wide = match x.dtype() {
        DType::F64 => x.clone(),
        _ => x.to_dtype(DType::F32)?,
    };
    let mean = (wide.sqr()?.sum_keepdim(D::Minus1)? / x.dim(D::Minus1)? as f64)?;
    let normed = wide.broadcast_div(&(mean + EPSILON)?.sqrt()?)?;
    normed.to_dtype(x.dtype())?.broadcast_mul(weight)
}

fn gate_by_tensors(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    gate.silu()? * up
}

/// Numbers of about this size that are the same at every run.
pub fn random(shape: &[usize], size: f64, seed: u64) -> Result<Tensor> {
    let mut rng = ChaCha12Rng::seed_from_u64(seed);
    // Four of a kind make nearly a normal distribution.
    let mut number = || (0..4).map(|_| rng.random::<f64>() - 0.5).sum::<f64>() * 1.7 * size;
    let numbers: Vec<f64> = (0..shape.iter().product()).map(|_| number()).collect();
    Tensor::from_vec(numbers, shape, &Device::Cpu)
}

pub fn values(x: &Tensor) -> Result<Vec<f64>> {
    let x = x.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
    x.flatten_all()?.to_vec1()
}

/// The result and both gradients, with every freed byte NaN before each pass.
fn with_gradients(
    target: &Target,
    inputs: &[Tensor; 2],
    dtype: DType,
    layer: Layer,
) -> Result<Vec<Vec<f64>>> {
    let placed = |x: &Tensor| x.to_dtype(dtype)?.to_device(target.device());
    let vars = [
        Var::from_tensor(&placed(&inputs[0])?)?,
        Var::from_tensor(&placed(&inputs[1])?)?,
    ];
    results(target, [&vars[0], &vars[1]], &vars, dtype, layer)
}

/// The same with inputs that are derived from the variables.
fn results(
    target: &Target,
    [a, b]: [&Tensor; 2],
    vars: &[Var; 2],
    dtype: DType,
    layer: Layer,
) -> Result<Vec<Vec<f64>>> {
    target.poison()?;
    let y = layer(a, b)?;
    let upstream = random(y.dims(), 1., 9)?.to_dtype(dtype)?;
    let loss = (&y * upstream.to_device(target.device())?)?.sum_all()?;
    target.poison()?;
    let gradients = loss.backward()?;
    let mut all = vec![values(&y)?];
    for var in vars {
        match gradients.get(var) {
            Some(gradient) => all.push(values(gradient)?),
            None => all.push(Vec::new()),
        }
    }
    Ok(all)
}

/// On the CPU, by tensor operations.
fn plainly(inputs: &[Tensor; 2], dtype: DType, layer: Layer) -> Result<Vec<Vec<f64>>> {
    let vars = [
        Var::from_tensor(&inputs[0].to_dtype(dtype)?)?,
        Var::from_tensor(&inputs[1].to_dtype(dtype)?)?,
    ];
    let cpu = Target::new(Device::Cpu, false)?;
    results(&cpu, [&vars[0], &vars[1]], &vars, dtype, layer)
}

/// Holds one layer on the device, of contiguous, strided and unaligned inputs, to tensor operations.
fn hold(
    name: &str,
    target: &Target,
    inputs: &[Tensor; 2],
    dtype: DType,
    [layer, by_tensors]: [Layer; 2],
    report: &mut Report,
) -> Result<()> {
    // As the dtype has them, for all.
    let rounded = |x: &Tensor| x.to_dtype(dtype)?.to_dtype(DType::F64);
    let inputs = &[rounded(&inputs[0])?, rounded(&inputs[1])?];
    let upstream_is_rounded = dtype; // of the exact result, too
    let exact = exactly(inputs, upstream_is_rounded, by_tensors)?;
    let plain = plainly(inputs, dtype, by_tensors)?;
    let mut compare = |how: &str, got: Vec<Vec<f64>>| {
        for (i, part) in ["y", "first gradient", "second gradient"]
            .into_iter()
            .enumerate()
        {
            let what = format!("{part} of {name} {dtype:?} {:?} {how}", inputs[0].dims());
            close(&what, &got[i], &exact[i], &plain[i], dtype, report);
        }
    };
    compare("", with_gradients(target, inputs, dtype, layer)?);
    // Behind one element, so that nothing is aligned.
    let behind = |x: &Tensor| -> Result<Var> {
        let flat = Tensor::cat(
            &[
                &Tensor::ones(1, DType::F64, &Device::Cpu)?,
                &x.flatten_all()?,
            ],
            0,
        )?;
        Var::from_tensor(&flat.to_dtype(dtype)?.to_device(target.device())?)
    };
    let vars = [behind(&inputs[0])?, behind(&inputs[1])?];
    let view = |i: usize| -> Result<Tensor> {
        let flat = vars[i].narrow(0, 1, inputs[i].elem_count())?;
        flat.reshape(inputs[i].shape())
    };
    let mut got = results(target, [&view(0)?, &view(1)?], &vars, dtype, layer)?;
    for gradient in &mut got[1..] {
        gradient.remove(0);
    }
    compare("behind one element", got);
    // Transposed in memory.
    if let &[rows, _] = inputs[0].dims() {
        if rows > 1 {
            let turned = inputs[0].t()?.contiguous()?.to_dtype(dtype)?;
            let first = Var::from_tensor(&turned.to_device(target.device())?)?;
            let second = inputs[1].to_dtype(dtype)?.to_device(target.device())?;
            let vars = [first, Var::from_tensor(&second)?];
            let mut got = results(target, [&vars[0].t()?, &vars[1]], &vars, dtype, layer)?;
            let columns = inputs[0].dim(1)?;
            let back = Tensor::from_vec(got[1].clone(), (columns, rows), &Device::Cpu)?;
            got[1] = values(&back.t()?)?;
            compare("transposed", got);
        }
    }
    Ok(())
}

/// In f64, for an upstream gradient as the dtype has it.
fn exactly(inputs: &[Tensor; 2], dtype: DType, layer: Layer) -> Result<Vec<Vec<f64>>> {
    let vars = [Var::from_tensor(&inputs[0])?, Var::from_tensor(&inputs[1])?];
    let y = layer(&vars[0], &vars[1])?;
    let upstream = random(y.dims(), 1., 9)?
        .to_dtype(dtype)?
        .to_dtype(DType::F64)?;
    let gradients = (&y * upstream)?.sum_all()?.backward()?;
    let mut all = vec![values(&y)?];
    for var in &vars {
        all.push(gradients.get(var).map_or(Ok(Vec::new()), values)?);
    }
    Ok(all)
}

/// Twice the greatest error of plain operations, and the rounding of the value and of its sum.
pub fn close(
    what: &str,
    got: &[f64],
    exact: &[f64],
    plain: &[f64],
    dtype: DType,
    report: &mut Report,
) {
    use crate::reference::{accumulator, unit_roundoff};
    if got.len() != exact.len() || plain.len() != exact.len() {
        report.fault(format!(
            "{what}: {} numbers, {} are expected",
            got.len(),
            exact.len()
        ));
        return;
    }
    let plain_error = (plain.iter().zip(exact)).fold(0., |a, (x, y)| f64::max(a, (x - y).abs()));
    let scale = exact.iter().fold(0., |a, x| f64::max(a, x.abs()));
    let floor = 2. * plain_error + 4. * unit_roundoff(accumulator(dtype)) * scale;
    let mut worst = (0., f64::MIN_POSITIVE, 0);
    for (i, (got, exact)) in got.iter().zip(exact).enumerate() {
        let error = match (got - exact).abs() {
            error if error.is_nan() => f64::INFINITY,
            error => error,
        };
        let allowed = floor + 2. * unit_roundoff(dtype) * exact.abs() + f64::MIN_POSITIVE;
        if error * worst.1 > worst.0 * allowed {
            worst = (error, allowed, i);
        }
    }
    report.compare(format!("{what} [{}]", worst.2), worst.0, worst.1);
}
