//! The device under test, and one forward call on it held to the reference.

use crate::reference::{
    accumulator, deviation, store, tensor, unit_roundoff, values, Attention, Call, Inputs, Rows,
    Storage, Summed,
};
use crate::report::Report;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_posenc::{
    attend_with_lse, plan_problem, AttendSpec, Backend, DeviceKind, Path, Plan, Positions,
    Precision, Problem,
};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

/// A device, and the kernels that have run on it.
pub struct Target {
    device: Device,
    /// Whether freed memory is filled with NaN before each call. Not where uninitialised reads are looked for.
    poisons: bool,
    kernels: RefCell<BTreeMap<String, usize>>,
    /// On the CPU, of the GPU that is asked about.
    capability: Cell<(u32, u32)>,
}

/// Goes back to a capability when it is dropped, also by a panic.
struct Before<'a> {
    cell: &'a Cell<(u32, u32)>,
    capability: (u32, u32),
}

impl Drop for Before<'_> {
    fn drop(&mut self) {
        #[cfg(feature = "cuda")]
        candle_posenc::attend::choose_kernels_as_on(None);
        self.cell.set(self.capability);
    }
}

/// Forward results, in the reference's order.
#[derive(Debug, Clone, PartialEq)]
pub struct Forward {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
}

/// The output and its gradients, in the reference's order; an operand that is not tracked has none.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients {
    pub out: Vec<f64>,
    /// Of q, k and v.
    pub of: [Option<Vec<f64>>; 3],
}

/// Names of the gradients, for messages.
const GRADIENTS: [&str; 3] = ["dq", "dk", "dv"];

/// q, k and v all tracked.
pub const ALL: [bool; 3] = [true; 3];

/// How a call is made.
#[derive(Debug, Clone, Copy)]
pub struct Manner {
    pub dtype: DType,
    pub precision: Precision,
    pub storages: [Storage; 3],
    /// Positions that follow each other are given as a span, not token by token.
    pub spans: bool,
}

impl Manner {
    pub fn of(dtype: DType) -> Self {
        Self {
            dtype,
            precision: Precision::Precise,
            storages: [Storage::Contiguous; 3],
            spans: false,
        }
    }

    pub fn fast(self) -> Self {
        Self {
            precision: Precision::Fast,
            ..self
        }
    }

    pub fn spans(self) -> Self {
        Self {
            spans: true,
            ..self
        }
    }

    pub fn stored(self, storages: [Storage; 3]) -> Self {
        Self { storages, ..self }
    }
}

/// The call as the crate takes it, on the fused path.
pub fn spec(call: &Call, manner: Manner) -> Result<AttendSpec> {
    let mut spec = AttendSpec {
        precision: manner.precision,
        ..call.spec(Backend::Fused)?
    };
    if manner.spans && call.segments.is_none() {
        let (q, k) = call
            .positions
            .as_ref()
            .map_or((None, None), |(q, k)| (span(q), span(k)));
        spec.q_positions = q.or(spec.q_positions);
        spec.k_positions = k.or(spec.k_positions);
    }
    Ok(spec)
}

fn span(rows: &Rows) -> Option<Positions> {
    let [row] = &rows[..] else {
        return None;
    };
    let start = *row.first()?;
    let follow = row.iter().zip(start..).all(|(at, want)| *at == want);
    (follow && start >= 0).then_some(Positions::Span {
        start,
        len: row.len(),
    })
}

/// NaNs that fill freed memory before every call: more than the outputs and workspaces of small calls.
const POISON_BYTES: usize = 8 << 20;

impl Target {
    pub fn new(device: Device, poisons: bool) -> Result<Self> {
        let target = Self {
            device,
            poisons,
            kernels: RefCell::default(),
            capability: Cell::new((9, 0)),
        };
        // A driver without a device may fail only at the first allocation.
        Tensor::zeros(1, DType::F32, target.device())?;
        Ok(target)
    }

    /// Lets kernels be chosen as on GPUs of another compute capability while `run` runs.
    pub fn as_on<T>(&self, capability: (u32, u32), run: impl FnOnce() -> Result<T>) -> Result<T> {
        let _before = Before {
            cell: &self.capability,
            capability: self.capability.replace(capability),
        };
        #[cfg(feature = "cuda")]
        candle_posenc::attend::choose_kernels_as_on(Some(capability));
        run()
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    pub fn is_gpu(&self) -> bool {
        self.device.is_cuda()
    }

    #[cfg(feature = "cuda")]
    pub fn name(&self) -> String {
        let Device::Cuda(device) = &self.device else {
            return "the CPU: the tests are under test".to_string();
        };
        let stream = device.cuda_stream();
        let context = stream.context();
        match (context.name(), context.compute_capability()) {
            (Ok(name), Ok((major, minor))) => {
                format!("{name}, compute capability {major}.{minor}")
            }
            _ => "a GPU".to_string(),
        }
    }

    #[cfg(not(feature = "cuda"))]
    pub fn name(&self) -> String {
        "the CPU: the tests are under test".to_string()
    }

    /// The kernels that plans named, and how often.
    pub fn kernels(&self) -> BTreeMap<String, usize> {
        self.kernels.borrow().clone()
    }

    /// The plan of a call, which must be fused; counts its kernel. On the CPU it is the plan that an H200 would have,
    /// or whatever [`as_on`](Self::as_on) names.
    pub fn counted_plan(
        &self,
        [q, k, v]: [&Tensor; 3],
        spec: &AttendSpec,
        report: &mut Report,
    ) -> Result<Plan> {
        let mut problem = Problem::of(q, k, v)?;
        if !self.is_gpu() {
            let cc = Some(self.capability.get());
            problem.device = DeviceKind::Cuda { cc };
        }
        let plan = plan_problem(&problem, spec)?;
        self.count(&plan.kernel);
        report.check(plan.path == Path::FusedCuda, || {
            format!("{q:?} {k:?} {v:?} takes another path: {plan}")
        });
        Ok(plan)
    }

    fn count(&self, kernel: &str) {
        let mut kernels = self.kernels.borrow_mut();
        *kernels.entry(kernel.to_string()).or_default() += 1;
    }

    /// Leaves NaN behind in memory that the next allocations are given.
    pub fn poison(&self) -> Result<()> {
        if self.is_gpu() && self.poisons {
            let sizes = [POISON_BYTES, POISON_BYTES / 4, 1 << 16, 1 << 12];
            let held: Vec<Tensor> = sizes
                .iter()
                .map(|bytes| Tensor::full(f32::NAN, bytes / 4, &self.device))
                .collect::<Result<_>>()?;
            drop(held);
        }
        Ok(())
    }

    /// A tensor without elements: a GPU has no memory of no length, so it is a part of another.
    fn empty(&self, shape: [usize; 4], dtype: DType) -> Result<Tensor> {
        let some = shape.map(|size| size.max(1)).to_vec();
        let mut x = Tensor::zeros(some, dtype, &self.device)?;
        for (dim, size) in shape.into_iter().enumerate() {
            x = x.narrow(dim, 0, size)?;
        }
        Ok(x)
    }

    /// q, k and v of a call on the device, stored as told.
    pub fn operands(&self, call: &Call, inputs: &Inputs, manner: Manner) -> Result<[Tensor; 3]> {
        let dims = call.dims;
        let load = |x: &[f64], shape: [usize; 4], storage| {
            if x.is_empty() {
                return self.empty(shape, manner.dtype);
            }
            store(
                &tensor(x, shape, manner.dtype)?.to_device(&self.device)?,
                storage,
            )
        };
        Ok([
            load(&inputs.q, dims.q(), manner.storages[0])?,
            load(&inputs.k, dims.k(), manner.storages[1])?,
            load(&inputs.v, dims.v(), manner.storages[2])?,
        ])
    }

    /// The fused path's results, with every freed byte NaN before.
    pub fn forward(
        &self,
        call: &Call,
        inputs: &Inputs,
        manner: Manner,
        report: &mut Report,
    ) -> Result<Forward> {
        let [q, k, v] = self.operands(call, inputs, manner)?;
        let spec = spec(call, manner)?;
        self.counted_plan([&q, &k, &v], &spec, report)?;
        self.poison()?;
        let result = attend_with_lse(&q, &k, &v, &spec)?;
        let dims = call.dims;
        report.check(result.out.dims() == dims.out(), || {
            format!(
                "the output's shape is {:?}, not {:?}",
                result.out.dims(),
                dims.out()
            )
        });
        report.check(result.lse.dims() == [dims.b, dims.h, dims.t], || {
            format!("the log-sum-exp's shape is {:?}", result.lse.dims())
        });
        report.check(result.lse.dtype() == accumulator(manner.dtype), || {
            format!("the log-sum-exp's dtype is {:?}", result.lse.dtype())
        });
        report.check(result.out.dtype() == manner.dtype, || {
            format!("the output's dtype is {:?}", result.out.dtype())
        });
        Ok(Forward {
            out: values(&result.out)?,
            lse: values(&result.lse)?,
        })
    }

    /// The fused path's output and gradients of those of q, k and v that are tracked, with every freed byte NaN before
    /// each pass.
    pub fn gradients(
        &self,
        call: &Call,
        inputs: &Inputs,
        manner: Manner,
        tracked: [bool; 3],
        report: &mut Report,
    ) -> Result<Gradients> {
        let contiguous = manner.stored([Storage::Contiguous; 3]);
        let operands = self.operands(call, inputs, contiguous)?;
        let vars: Vec<Option<Var>> = operands
            .iter()
            .zip(tracked)
            .map(|(x, tracked)| tracked.then(|| Var::from_tensor(x)).transpose())
            .collect::<Result<_>>()?;
        let stored: Vec<Tensor> = (operands.iter().zip(&vars))
            .zip(manner.storages)
            .map(|((x, var), storage)| store(var.as_ref().map_or(x, |var| var), storage))
            .collect::<Result<_>>()?;
        let spec = spec(call, manner)?;
        let plan = self.counted_plan([&stored[0], &stored[1], &stored[2]], &spec, report)?;
        let backward = plan.backward.map(|backward| backward.kernels);
        report.check(backward.is_some(), || format!("no backward pass: {call:?}"));
        backward
            .iter()
            .flatten()
            .for_each(|kernel| self.count(kernel));
        let grad = tensor(&inputs.grad, call.dims.out(), manner.dtype)?.to_device(&self.device)?;
        self.poison()?;
        let out = attend_with_lse(&stored[0], &stored[1], &stored[2], &spec)?.out;
        let loss = (&out * &grad)?.sum_all()?;
        self.poison()?;
        let store = loss.backward()?;
        let mut of = [None, None, None];
        for (which, (var, of)) in vars.iter().zip(&mut of).enumerate() {
            let Some(var) = var else { continue };
            let Some(gradient) = store.get(var) else {
                report.fault(format!("no {}", GRADIENTS[which]));
                continue;
            };
            let same = gradient.dims() == var.dims() && gradient.dtype() == var.dtype();
            report.check(same, || format!("{} is {gradient:?}", GRADIENTS[which]));
            *of = Some(values(gradient)?);
        }
        Ok(Gradients {
            out: values(&out)?,
            of,
        })
    }

    /// Output and gradients of one call held to the reference.
    pub fn check_gradients(
        &self,
        call: &Call,
        inputs: &Inputs,
        manner: Manner,
        report: &mut Report,
    ) -> Result<Gradients> {
        let expected = Expected::with_gradients(call, inputs, manner.dtype);
        let got = self.gradients(call, inputs, manner, ALL, report)?;
        expected.hold_gradients(&describe(call, manner), &got, report);
        Ok(got)
    }

    /// One call held to the reference.
    pub fn check(
        &self,
        call: &Call,
        inputs: &Inputs,
        manner: Manner,
        report: &mut Report,
    ) -> Result<Forward> {
        let expected = Expected::of(call, inputs, manner.dtype);
        let got = self.forward(call, inputs, manner, report)?;
        expected.hold(&describe(call, manner), &got, report);
        Ok(got)
    }
}

/// What a call has to give, and what a plain implementation would.
pub struct Expected {
    dtype: DType,
    /// D and E.
    widths: [usize; 2],
    exact: Attention,
    plain: Attention,
}

impl Expected {
    pub fn of(call: &Call, inputs: &Inputs, dtype: DType) -> Self {
        Self {
            dtype,
            widths: [call.dims.d, call.dims.e],
            exact: call.exact_forward(inputs),
            plain: call.plain_forward(inputs, dtype),
        }
    }

    /// The same with gradients.
    pub fn with_gradients(call: &Call, inputs: &Inputs, dtype: DType) -> Self {
        Self {
            dtype,
            widths: [call.dims.d, call.dims.e],
            exact: call.exact(inputs),
            plain: call.plain(inputs, dtype),
        }
    }

    /// Holds the output and the gradients that there are to the reference, and each [`BAND`] rows by root mean squares.
    pub fn hold_gradients(&self, what: &str, got: &Gradients, report: &mut Report) {
        let (exact, plain) = (&self.exact, &self.plain);
        let [q, k, v] = &got.of;
        for (name, got, exact, plain) in [
            ("out", Some(&got.out), &exact.out, &plain.out),
            ("dq", q.as_ref(), &exact.dq, &plain.dq),
            ("dk", k.as_ref(), &exact.dk, &plain.dk),
            ("dv", v.as_ref(), &exact.dv, &plain.dv),
        ] {
            let Some(got) = got else { continue };
            match deviation(name, got, exact, plain, self.dtype) {
                Ok(worst) => report.compare(
                    format!("{name}[{}] of {what}", worst.at),
                    worst.error,
                    worst.allowed,
                ),
                Err(fault) => report.fault(format!("{fault} of {what}")),
            }
            let width = match name {
                "dq" | "dk" => self.widths[0],
                _ => self.widths[1],
            };
            let what = format!("{name} of {what}");
            match name {
                "out" => self.hold_bands("row", 1, width, &what, got, exact, plain, report),
                _ => self.hold_bands("band", BAND, width, &what, got, exact, plain, report),
            }
        }
    }

    /// Holds results to the reference by the rule of [`crate::reference`], and each row of the output by the same rule
    /// on root mean squares, which shows what is lost beside the largest values.
    pub fn hold(&self, what: &str, got: &Forward, report: &mut Report) {
        for (name, got, exact, plain) in [
            ("out", &got.out, &self.exact.out, &self.plain.out),
            ("lse", &got.lse, &self.exact.lse, &self.plain.lse),
        ] {
            match deviation(name, got, exact, plain, self.dtype) {
                Ok(worst) => report.compare(
                    format!("{name}[{}] of {what}", worst.at),
                    worst.error,
                    worst.allowed,
                ),
                Err(fault) => report.fault(format!("{fault} of {what}")),
            }
        }
        let (exact, plain) = (&self.exact.out, &self.plain.out);
        self.hold_bands(
            "row",
            1,
            self.widths[1],
            what,
            &got.out,
            exact,
            plain,
            report,
        );
    }

    /// Holds each so many rows by the rule of [`crate::reference`] on root mean squares, which shows what is lost beside
    /// the largest values.
    #[allow(clippy::too_many_arguments)] // two words, two numbers, three tensors
    fn hold_bands(
        &self,
        kind: &str,
        rows: usize,
        width: usize,
        what: &str,
        got: &[f64],
        exact: &Summed,
        plain: &Summed,
        report: &mut Report,
    ) {
        if width < FEWEST_COLUMNS || got.is_empty() || got.len() != exact.value.len() {
            return;
        }
        let unit = unit_roundoff(accumulator(self.dtype));
        let stored = unit_roundoff(self.dtype);
        let mut worst = (0., 1., 0);
        let band = (rows * width).min(got.len());
        for start in (0..got.len()).step_by(band) {
            // The last band is as high as the others: it may overlap the one before.
            let end = (start + band).min(got.len());
            let elements = end - band..end;
            let rms = |value: &dyn Fn(usize) -> f64| {
                let squares: f64 = elements.clone().map(|i| value(i).powi(2)).sum();
                (squares / elements.len() as f64).sqrt()
            };
            let error = rms(&|i| got[i] - exact.value[i]);
            let allowed = 2. * rms(&|i| plain.value[i] - exact.value[i])
                + 2. * stored * rms(&|i| exact.value[i])
                + exact.floor() * unit * rms(&|i| exact.mass[i])
                + f64::from(f32::MIN_POSITIVE) * (1. + rms(&|i| exact.reach[i]))
                + if self.dtype == DType::F16 {
                    2f64.powi(-24)
                } else {
                    0.
                };
            let error = if error.is_nan() { f64::INFINITY } else { error };
            // What overflows its dtype as the plain evaluation does is no measure.
            if allowed < f64::INFINITY && error * worst.1 > worst.0 * allowed {
                worst = (error, allowed, start / (rows * width));
            }
        }
        report.compare(format!("{kind} {} of {what}", worst.2), worst.0, worst.1);
    }
}

/// Rows of a gradient that are one measure: a row of few terms may be exact by luck.
const BAND: usize = 16;

/// Columns from which on a row's root mean square is a measure.
const FEWEST_COLUMNS: usize = 32;

/// A call in one line.
pub fn describe(call: &Call, manner: Manner) -> String {
    let d = call.dims;
    let score = match &call.score {
        candle_posenc::Score::Dot => "dot".to_string(),
        candle_posenc::Score::LinearBias { .. } => "bias".to_string(),
        candle_posenc::Score::Phase { amp_dim, alpha, .. } => {
            format!("phase(A{amp_dim}, alpha {alpha}, {:?})", manner.precision)
        }
    };
    let mut text = format!(
        "{score} {:?} b{} h{} g{} t{} s{} d{} e{}",
        manner.dtype, d.b, d.h, d.g, d.t, d.s, d.d, d.e
    );
    if !call.causal {
        text += " bidirectional";
    }
    if let Some(window) = call.window {
        text += &format!(" window {window}");
    }
    if let Some(scale) = call.scale {
        text += &format!(" scale {scale}");
    }
    if call.positions.is_some() {
        text += " positions";
    }
    if call.segments.is_some() {
        text += " segments";
    }
    if manner.storages != [Storage::Contiguous; 3] {
        text += &format!(" {:?}", manner.storages);
    }
    text
}
