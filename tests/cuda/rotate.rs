//! Rotation of heads, values and every gradient, held to its definition in f64.

use crate::reference::{
    accumulator, round_to, store, tensor, unit_roundoff, values, Storage, STORAGES,
};
use crate::report::Report;
use crate::target::Target;
use crate::{test, Test};
use candle_core::{DType, Result, Tensor, Var};
use candle_posenc::{rotate, Layout, Rotation};

const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];
const LAYOUTS: [Layout; 2] = [Layout::Half, Layout::Interleaved];

/// Sizes of one call: x (B,H,T,D), the table (rows,G,T,pairs).
#[derive(Debug, Clone, Copy)]
struct Sizes {
    x: [usize; 4],
    rows: usize,
    g: usize,
    pairs: usize,
}

impl Sizes {
    fn table(&self) -> [usize; 4] {
        [self.rows, self.g, self.x[2], self.pairs]
    }
}

const fn sizes(x: [usize; 4], rows: usize, g: usize, pairs: usize) -> Sizes {
    Sizes { x, rows, g, pairs }
}

/// RoPE and TAPE as models use them; partial; grouped; one token; odd widths; long sums of few entries.
const SHAPES: [Sizes; 11] = [
    sizes([2, 8, 70, 128], 1, 1, 64),
    sizes([1, 16, 33, 64], 1, 16, 32),
    sizes([2, 6, 19, 64], 2, 3, 16),
    sizes([2, 7, 1, 80], 1, 1, 20),
    sizes([3, 4, 5, 6], 1, 2, 1),
    sizes([2, 5, 31, 40], 2, 5, 16),
    sizes([1, 3, 67, 22], 1, 1, 11),
    sizes([5, 9, 3, 16], 1, 3, 8),
    sizes([16, 32, 2, 64], 1, 1, 32),
    sizes([1, 1, 300, 256], 1, 1, 128),
    sizes([1, 2, 2, 2], 1, 1, 1),
];

pub fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for dtype in DTYPES {
        tests.push(test(
            format!("rotate_{dtype:?}_equals_reference_in_value_and_gradients"),
            move |target, report| {
                for sizes in SHAPES {
                    for layout in LAYOUTS {
                        for stored in [[Storage::Contiguous; 2], [Storage::TokensFirst; 2]] {
                            check(target, sizes, layout, dtype, stored, [true; 3], report)?;
                        }
                    }
                }
                Ok(())
            },
        ));
        tests.push(test(
            format!("rotate_{dtype:?}_of_any_strides_equals_reference"),
            move |target, report| {
                let count = STORAGES.len();
                for (i, x) in STORAGES.into_iter().enumerate() {
                    for shift in 0..count {
                        let table = STORAGES[(i + shift) % count];
                        let sizes = [SHAPES[2], SHAPES[5], SHAPES[0]][shift % 3];
                        let layout = LAYOUTS[i % 2];
                        check(target, sizes, layout, dtype, [x, table], [true; 3], report)?;
                    }
                }
                Ok(())
            },
        ));
        tests.push(test(
            format!("rotate_{dtype:?}_gives_gradients_to_tracked_inputs_alone"),
            move |target, report| {
                for mask in 1..7usize {
                    let tracked = [0, 1, 2].map(|i| mask >> i & 1 == 1);
                    let stored = [Storage::Contiguous; 2];
                    for sizes in [SHAPES[1], SHAPES[2]] {
                        check(target, sizes, Layout::Half, dtype, stored, tracked, report)?;
                    }
                }
                Ok(())
            },
        ));
        tests.push(test(
            format!("rotate_{dtype:?}_by_a_broadcast_table_equals_its_copy"),
            move |target, report| broadcast(target, dtype, report),
        ));
    }
    tests.push(test("rotate_repeats_bit_for_bit", repeats));
    tests.push(test("rotate_of_nothing_is_nothing", nothing));
    tests
}

/// Numbers of unit scale, rounded to `dtype`.
fn normal(shape: [usize; 4], seed: u64, dtype: DType) -> Vec<f64> {
    use rand::{rngs::StdRng, SeedableRng};
    use rand_distr::{Distribution, StandardNormal};
    let mut rng = StdRng::seed_from_u64(seed);
    (0..shape.iter().product())
        .map(|_| {
            let x: f64 = StandardNormal.sample(&mut rng);
            round_to(dtype, x)
        })
        .collect()
}

/// A result in f64 and the sum of its terms' moduli, element by element.
struct Exact {
    value: Vec<f64>,
    mass: Vec<f64>,
    /// Terms of the longest sum.
    terms: usize,
}

/// Turned x, and the gradients of x, cos and sin, for an upstream gradient.
fn exact(sizes: Sizes, layout: Layout, [x, cos, sin, grad]: [&[f64]; 4]) -> [Exact; 4] {
    let Sizes {
        x: [b, h, t, d],
        rows,
        g,
        pairs,
    } = sizes;
    let exact = |len: usize, terms: usize| Exact {
        value: vec![0.; len],
        mass: vec![0.; len],
        terms,
    };
    let group = h / g;
    let summed = 2 * group * (b / rows);
    let (mut out, mut dx) = (exact(x.len(), 2), exact(x.len(), 2));
    let (mut dcos, mut dsin) = (exact(cos.len(), summed), exact(sin.len(), summed));
    let add = |to: &mut Exact, at: usize, a: f64, b: f64| {
        to.value[at] += a + b;
        to.mass[at] += a.abs() + b.abs();
    };
    for row in 0..b * h * t {
        let (b, h, t_) = (row / t / h, row / t % h, row % t);
        let entry = (((if rows == 1 { 0 } else { b }) * g + h / group) * t + t_) * pairs;
        let first = row * d;
        for i in 2 * pairs..d {
            (out.value[first + i], dx.value[first + i]) = (x[first + i], grad[first + i]);
        }
        for j in 0..pairs {
            let (re, im) = match layout {
                Layout::Half => (first + j, first + j + pairs),
                Layout::Interleaved => (first + 2 * j, first + 2 * j + 1),
            };
            let (c, s) = (cos[entry + j], sin[entry + j]);
            add(&mut out, re, x[re] * c, -x[im] * s);
            add(&mut out, im, x[re] * s, x[im] * c);
            add(&mut dx, re, grad[re] * c, grad[im] * s);
            add(&mut dx, im, grad[im] * c, -grad[re] * s);
            add(&mut dcos, entry + j, grad[re] * x[re], grad[im] * x[im]);
            add(&mut dsin, entry + j, grad[im] * x[re], -grad[re] * x[im]);
        }
    }
    [out, dx, dcos, dsin]
}

/// Twice the roundings that plain evaluation makes: of each product, of each sum, and of the result to its dtype. What
/// passes through has no terms and must come back bit for bit.
fn hold(what: &str, got: &[f64], exact: &Exact, dtype: DType, report: &mut Report) {
    let unit = unit_roundoff(accumulator(dtype));
    let roundings = 1. + exact.terms as f64;
    if got.len() != exact.value.len() {
        return report.fault(format!("{what}: {} elements", got.len()));
    }
    let mut worst = (0., 1., 0);
    for (at, (got, want)) in got.iter().zip(&exact.value).enumerate() {
        let mass = exact.mass[at];
        let error = match (got - want).abs() {
            error if error.is_nan() => f64::INFINITY,
            error => error,
        };
        let allowed = match mass {
            0. => 0.,
            _ => {
                2. * (unit * roundings * mass + unit_roundoff(dtype) * want.abs())
                    + if dtype == DType::F16 {
                        2f64.powi(-24)
                    } else {
                        0.
                    }
            }
        };
        if allowed == 0. {
            report.check(error == 0., || format!("{what}[{at}] is {got}, not {want}"));
        } else if error * worst.1 > worst.0 * allowed {
            worst = (error, allowed, at);
        }
    }
    report.compare(format!("{what}[{}]", worst.2), worst.0, worst.1);
}

fn check(
    target: &Target,
    sizes: Sizes,
    layout: Layout,
    dtype: DType,
    [x_stored, table_stored]: [Storage; 2],
    tracked: [bool; 3],
    report: &mut Report,
) -> Result<()> {
    let table_dtype = accumulator(dtype);
    let x = normal(sizes.x, 1, dtype);
    let cos = normal(sizes.table(), 2, table_dtype);
    let sin = normal(sizes.table(), 3, table_dtype);
    let grad = normal(sizes.x, 4, dtype);
    let expected = exact(sizes, layout, [&x, &cos, &sin, &grad]);
    let var = |x: &[f64], shape, dtype| {
        Var::from_tensor(&tensor(x, shape, dtype)?.to_device(target.device())?)
    };
    let vars = [
        var(&x, sizes.x, dtype)?,
        var(&cos, sizes.table(), table_dtype)?,
        var(&sin, sizes.table(), table_dtype)?,
    ];
    let input = |i: usize, storage| {
        let x = match tracked[i] {
            true => vars[i].as_tensor().clone(),
            false => vars[i].as_detached_tensor(),
        };
        store(&x, storage)
    };
    let x = input(0, x_stored)?;
    let rotation = Rotation {
        cos: input(1, table_stored)?,
        sin: input(2, table_stored)?,
    };
    target.poison()?;
    let out = rotate(&x, &rotation, layout)?;
    report.check(out.dims() == sizes.x && out.is_contiguous(), || {
        format!("{sizes:?}: the result is {:?}", out.layout())
    });
    let what = format!("{sizes:?} {layout:?} {x_stored:?} {table_stored:?}");
    hold(
        &format!("out of {what}"),
        &values(&out)?,
        &expected[0],
        dtype,
        report,
    );
    let grad = tensor(&grad, sizes.x, dtype)?.to_device(target.device())?;
    let gradients = (out * grad)?.sum_all()?.backward()?;
    for (i, name) in ["dx", "dcos", "dsin"].into_iter().enumerate() {
        let dtype = if i == 0 { dtype } else { table_dtype };
        match (gradients.get(&vars[i]), tracked[i]) {
            (Some(got), true) => {
                report.check(got.dtype() == dtype, || {
                    format!("{name} is {:?}", got.dtype())
                });
                let what = format!("{name} of {what}");
                hold(&what, &values(got)?, &expected[i + 1], dtype, report);
            }
            (None, false) => (),
            (got, _) => report.fault(format!("{name} of {what}: {:?}", got.map(Tensor::dims))),
        }
    }
    Ok(())
}

/// A table with stride 0 over the batch, the heads, or the pairs.
fn broadcast(target: &Target, dtype: DType, report: &mut Report) -> Result<()> {
    let on_device = |shape: [usize; 4], seed, dtype| {
        tensor(&normal(shape, seed, dtype), shape, dtype)?.to_device(target.device())
    };
    let x = on_device([3, 4, 9, 32], 1, dtype)?
        .transpose(1, 2)?
        .contiguous()?
        .transpose(1, 2)?;
    for narrow in [
        [1, 1, 9, 16],
        [3, 1, 9, 16],
        [1, 4, 9, 16],
        [3, 4, 9, 1],
        [1, 1, 1, 16],
    ] {
        for layout in LAYOUTS {
            let table = |seed| -> Result<[Tensor; 2]> {
                let view =
                    on_device(narrow, seed, accumulator(dtype))?.broadcast_as((3, 4, 9, 16))?;
                Ok([view.contiguous()?, view])
            };
            let ([cos, cos_view], [sin, sin_view]) = (table(2)?, table(3)?);
            let run = |cos: &Tensor, sin: &Tensor| -> Result<Vec<Vec<f64>>> {
                let vars = [Var::from_tensor(&x)?, Var::from_tensor(cos)?];
                // One of the table is tracked, the other is the view itself.
                let rotation = Rotation {
                    cos: cos.clone(),
                    sin: sin.clone(),
                };
                let out = rotate(&vars[0], &rotation, layout)?;
                let gradients = out.sqr()?.sum_all()?.backward()?;
                let dx = gradients.get(&vars[0]).map(values).transpose()?;
                Ok(vec![values(&out)?, dx.unwrap_or_default()])
            };
            target.poison()?;
            let (copied, viewed) = (run(&cos, &sin)?, run(&cos_view, &sin_view)?);
            report.check(copied == viewed && !copied[1].is_empty(), || {
                format!("a table broadcast from {narrow:?}, {layout:?}")
            });
        }
    }
    Ok(())
}

fn repeats(target: &Target, report: &mut Report) -> Result<()> {
    for dtype in [DType::BF16, DType::F32] {
        for sizes in [SHAPES[1], SHAPES[8], sizes([2, 8, 500, 128], 1, 1, 64)] {
            let load = |shape, seed, dtype| {
                Var::from_tensor(
                    &tensor(&normal(shape, seed, dtype), shape, dtype)?
                        .to_device(target.device())?,
                )
            };
            let x = load(sizes.x, 1, dtype)?;
            let cos = load(sizes.table(), 2, accumulator(dtype))?;
            let sin = load(sizes.table(), 3, accumulator(dtype))?;
            let mut first = None;
            for round in 0..20 {
                target.poison()?;
                let rotation = Rotation {
                    cos: cos.as_tensor().clone(),
                    sin: sin.as_tensor().clone(),
                };
                let out = rotate(&x, &rotation, Layout::Half)?;
                let gradients = out.sqr()?.sum_all()?.backward()?;
                let mut all = vec![values(&out)?];
                for var in [&x, &cos, &sin] {
                    all.push(
                        gradients
                            .get(var)
                            .map(values)
                            .transpose()?
                            .unwrap_or_default(),
                    );
                }
                let known = first.get_or_insert_with(|| all.clone());
                report.check(*known == all, || {
                    format!("{sizes:?} {dtype:?} in round {round}")
                });
            }
        }
    }
    Ok(())
}

fn nothing(target: &Target, report: &mut Report) -> Result<()> {
    let x = Tensor::ones((2, 4, 3, 8), DType::BF16, target.device())?;
    let table = Tensor::ones((1, 1, 3, 4), DType::F32, target.device())?;
    for dim in [0, 2] {
        let x = x.narrow(dim, 0, 0)?;
        let table = if dim == 2 {
            table.narrow(2, 0, 0)?
        } else {
            table.clone()
        };
        let rotation = Rotation {
            cos: table.clone(),
            sin: table,
        };
        let out = rotate(&x, &rotation, Layout::Half)?;
        report.check(out.dims() == x.dims(), || format!("{:?}", out.dims()));
    }
    Ok(())
}
