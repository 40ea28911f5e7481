//! Our kernels on an NVIDIA GPU, timed by CUDA events: the median of at least 20 calls, each with what it reads out of
//! the L2 cache. Prints CSV, or writes it to FILE.
//!
//! ```text
//! cargo bench --features cuda --bench cuda [-- [--test] [--samples N] [--only TEXT] [FILE]]
//! ```
//! With `--serve` it takes one line of `BENCH DTYPE SHAPE` after another from its standard input, and answers each with
//! its row: how `benches/peers/cuda_peers.py` lets us and the peers take turns. `--test` shrinks every shape, and
//! nothing is a measurement.
//!
//! Counted are 2·B·H·T·S·(D + E) operations, half of them where causal, 2.5 times as many for a backward pass, and for
//! decoding the bytes of k and v. A backward pass is timed as candle's graph runs it, with a random gradient.
//!
//! - `attend_fwd`, `attend_bwd`, `attend_fwd_bwd`, `attend_decode`: attention; `…/tapa_dense` by tensor operations.
//! - `rotate_fwd`, `rotate_bwd`, `copy_x`: x (B,H,T,D) turned, or only copied; `tape` turns by a state for each token and
//!   head, whose gradient is made too. Counted are the bytes of all that is read and written. Off the backward pass is
//!   taken what the same graph takes around a copy in its place.
//! - `tape_update_fwd`, `tape_update_fwd_bwd`: a layer's update of TAPE's state; off the latter is taken what the sum of the
//!   state's parts takes, from which its gradient comes.
//! - `train_step`: a training step of 6 layers of width H·D over B windows of T bytes, by the host's clock; and its parts
//!   `train_forward`, `train_backward`, `train_optimizer`.

#![allow(missing_docs)]

use std::process::ExitCode;

#[cfg(not(feature = "cuda"))]
fn main() -> ExitCode {
    println!("skipped: built without the feature cuda");
    ExitCode::SUCCESS
}

#[cfg(feature = "cuda")]
fn main() -> ExitCode {
    match gpu::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(feature = "cuda")]
mod gpu {
    use candle_core::cuda_backend::cudarc::driver::sys::{CUevent_flags, CUmemPool_attribute};
    use candle_core::cuda_backend::cudarc::driver::{result, CudaSlice, CudaStream};
    use candle_core::cuda_backend::WrapErr;
    use candle_core::{bail, DType, Device, Error, Result, Tensor, Var};
    use candle_posenc::encoding::{
        alibi_slopes, AlibiConfig, PhaseNorm, RopeConfig, TapaConfig, TapeConfig,
    };
    use candle_posenc::train::{
        mean_loss, AdamW, AdamWConfig, Gradients, Parameters, Schedule, Trainer, TrainerConfig,
    };
    use candle_posenc::{
        attend, plan, rotate, AttendSpec, Backend, Ctx, EncodingConfig, Layout, Llama, LlamaConfig,
        ModelDims, Path, PosState, Positions, Precision, Rotation, Score, SeededVars,
    };
    use std::collections::HashMap;
    use std::io::{BufRead, Write};
    use std::sync::Arc;
    use std::time::Instant;

    /// Who is timed, in the column `peer`.
    const US: &str = "candle-posenc";
    const HEADER: &str = "bench,peer,gpu,dtype,shape,milliseconds,rate,unit,ratio";

    pub fn run() -> Result<()> {
        let mut options = Options::parse(std::env::args().skip(1))?;
        let gpu = match Gpu::new() {
            Ok(gpu) => gpu,
            Err(error) => {
                let text = error.to_string();
                let why = text.lines().next().unwrap_or_default().to_string();
                println!("skipped: no CUDA device ({why})");
                return Ok(());
            }
        };
        if options.serve {
            for line in std::io::stdin().lock().lines() {
                let line = line?;
                match line
                    .parse::<Case>()
                    .and_then(|case| gpu.time(&case, options.samples))
                {
                    Ok(row) => println!("{row}"),
                    Err(error) => println!("error: {}", error.to_string().replace('\n', " ")),
                }
                std::io::stdout().flush()?;
            }
            return Ok(());
        }
        let mut sink: Box<dyn Write> = match &options.file {
            Some(path) => Box::new(std::fs::File::create(path)?),
            None => Box::new(std::io::stdout()),
        };
        writeln!(sink, "{HEADER}")?;
        if options.test {
            options.samples = 2;
        }
        for mut case in all() {
            if options.test {
                case.shape.t = case.shape.t.min(100);
                case.shape.s = case.shape.s.min(100);
                case.shape.b = case.shape.b.min(2);
            }
            if !case.to_string().contains(&options.only) {
                continue;
            }
            match gpu.time(&case, options.samples) {
                Ok(row) => writeln!(sink, "{row}")?,
                // The dense path may need more memory than there is.
                Err(error) if case.bench.ends_with("dense") => eprintln!("{case}: {error}"),
                Err(error) => return Err(error),
            }
            sink.flush()?;
        }
        Ok(())
    }

    struct Options {
        serve: bool,
        test: bool,
        samples: usize,
        only: String,
        file: Option<String>,
    }

    impl Options {
        fn parse(mut args: impl Iterator<Item = String>) -> Result<Self> {
            let mut options = Self {
                serve: false,
                test: false,
                samples: 20,
                only: String::new(),
                file: None,
            };
            while let Some(arg) = args.next() {
                let mut value = |name: &str| match args.next() {
                    Some(value) => Ok(value),
                    None => bail!("{name} needs a value"),
                };
                match arg.as_str() {
                    "--serve" => options.serve = true,
                    "--test" => options.test = true,
                    "--bench" => (), // cargo says so
                    "--samples" => {
                        options.samples = value("--samples")?.parse().map_err(Error::wrap)?
                    }
                    "--only" => options.only = value("--only")?,
                    other if other.starts_with("--") => bail!("unknown option {other}"),
                    file => options.file = Some(file.to_string()),
                }
            }
            Ok(options)
        }
    }

    /// B, H, G, T, S, D, E and whether it is causal: `b1_h16_g16_t2048_s2048_d128_e128_causal`.
    #[derive(Clone, Copy, PartialEq)]
    struct Shape {
        b: usize,
        h: usize,
        g: usize,
        t: usize,
        s: usize,
        d: usize,
        e: usize,
        causal: bool,
    }

    impl Shape {
        fn q(&self) -> [usize; 4] {
            [self.b, self.h, self.t, self.d]
        }
    }

    impl std::fmt::Display for Shape {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            let Self {
                b,
                h,
                g,
                t,
                s,
                d,
                e,
                causal,
            } = self;
            let mask = if *causal { "causal" } else { "full" };
            write!(f, "b{b}_h{h}_g{g}_t{t}_s{s}_d{d}_e{e}_{mask}")
        }
    }

    impl std::str::FromStr for Shape {
        type Err = Error;

        fn from_str(text: &str) -> Result<Self> {
            let mut sizes = HashMap::new();
            let mut causal = None;
            for part in text.split('_') {
                match part {
                    "causal" => causal = Some(true),
                    "full" => causal = Some(false),
                    _ => {
                        let (name, size) = part.split_at(part.len().min(1));
                        sizes.insert(name, size.parse().map_err(Error::wrap)?);
                    }
                }
            }
            let size = |name: &str| match sizes.get(name) {
                Some(size) => Ok(*size),
                None => bail!("shape {text} has no {name}"),
            };
            let Some(causal) = causal else {
                bail!("shape {text} says neither causal nor full")
            };
            Ok(Self {
                b: size("b")?,
                h: size("h")?,
                g: size("g")?,
                t: size("t")?,
                s: size("s")?,
                d: size("d")?,
                e: size("e")?,
                causal,
            })
        }
    }

    /// What is timed: `attend_fwd/tapa_fast bf16 b1_…`.
    #[derive(Clone)]
    struct Case {
        bench: String,
        dtype: DType,
        shape: Shape,
    }

    impl std::fmt::Display for Case {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "{} {} {}", self.bench, self.dtype.as_str(), self.shape)
        }
    }

    impl std::str::FromStr for Case {
        type Err = Error;

        fn from_str(line: &str) -> Result<Self> {
            let [bench, dtype, shape] = line.split_whitespace().collect::<Vec<_>>()[..] else {
                bail!("{line:?} is not BENCH DTYPE SHAPE")
            };
            let Ok(dtype) = dtype.parse() else {
                bail!("no dtype {dtype}")
            };
            Ok(Self {
                bench: bench.to_string(),
                dtype,
                shape: shape.parse()?,
            })
        }
    }

    /// `[H, G, D, E]` over n tokens of a batch of b.
    fn square(b: usize, [h, g, d, e]: [usize; 4], n: usize) -> Shape {
        Shape {
            b,
            h,
            g,
            t: n,
            s: n,
            d,
            e,
            causal: true,
        }
    }

    fn decoding(s: usize) -> Shape {
        Shape {
            t: 1,
            ..square(1, [32, 8, 128, 128], s)
        }
    }

    const WIDTHS: [[usize; 4]; 2] = [[16, 16, 128, 128], [32, 32, 64, 64]];
    const SCORES: [&str; 4] = ["plain", "alibi", "tapa_fast", "tapa_precise"];

    /// The same list, in `cuda_peers.py`, says who else does what.
    fn all() -> Vec<Case> {
        let mut all = Vec::new();
        let mut add = |bench: String, dtype, shape| {
            all.push(Case {
                bench,
                dtype,
                shape,
            })
        };
        let fwd = |score: &str| format!("attend_fwd/{score}");
        for widths in WIDTHS {
            for n in [2048, 8192, 16_384, 32_768] {
                let b = (16_384 / n).max(1);
                for score in SCORES {
                    add(fwd(score), DType::BF16, square(b, widths, n));
                }
                let [h, g, d, _] = widths;
                add(fwd("tape"), DType::BF16, square(b, [h, g, d, 2 * d], n));
            }
            let long = square(1, widths, 16_384);
            for score in ["plain", "alibi", "tapa_fast"] {
                let full = Shape {
                    causal: false,
                    ..long
                };
                add(fwd(score), DType::BF16, full);
                add(fwd(score), DType::F16, long);
            }
        }
        let grouped = square(1, [32, 8, 128, 128], 16_384);
        for score in SCORES {
            add(fwd(score), DType::BF16, grouped);
        }
        for score in ["plain", "tapa_fast"] {
            add(
                fwd(score),
                DType::BF16,
                square(1, [8, 8, 128, 128], 131_072),
            );
        }
        for widths in WIDTHS {
            let [h, g, d, _] = widths;
            for pass in ["attend_bwd", "attend_fwd_bwd"] {
                for n in [2048, 8192, 16_384] {
                    let b = (16_384 / n).max(1);
                    for score in SCORES {
                        add(format!("{pass}/{score}"), DType::BF16, square(b, widths, n));
                    }
                    let wide = square(b, [h, g, d, 2 * d], n);
                    add(format!("{pass}/tape"), DType::BF16, wide);
                }
                add(
                    format!("{pass}/plain"),
                    DType::BF16,
                    square(1, widths, 8192),
                );
                add(
                    format!("{pass}/tapa_fast"),
                    DType::BF16,
                    square(1, widths, 8192),
                );
            }
        }
        let both = |score: &str| format!("attend_fwd_bwd/{score}");
        for h in [16, 4] {
            let shape = square(1, [h, h, 128, 128], 8192);
            for score in ["tapa_fast", "tapa_dense"] {
                if (h, score) != (16, "tapa_fast") {
                    add(both(score), DType::BF16, shape);
                }
            }
        }
        let large = square(1, [16, 16, 128, 128], 65_536);
        for bench in [
            "copy_x",
            "rotate_fwd/rope",
            "rotate_bwd/rope",
            "rotate_fwd/tape",
            "rotate_bwd/tape",
        ] {
            add(bench.to_string(), DType::BF16, large);
        }
        let wide = square(1, [16, 16, 128, 256], 8192);
        for bench in [
            "attend_fwd/tape",
            "attend_fwd_bwd/tape",
            "tape_update_fwd",
            "tape_update_fwd_bwd",
        ] {
            add(bench.to_string(), DType::BF16, wide);
        }
        for encoding in ["rope", "alibi", "tapa", "tape"] {
            for part in [
                "train_step",
                "train_forward",
                "train_backward",
                "train_optimizer",
            ] {
                let shape = square(64, [6, 6, 64, 64], 512);
                add(format!("{part}/{encoding}"), DType::BF16, shape);
            }
        }
        add("copy".to_string(), DType::BF16, decoding(131_072));
        for s in [4096, 32_768, 131_072] {
            for score in ["plain", "alibi", "tapa_precise"] {
                add(format!("attend_decode/{score}"), DType::BF16, decoding(s));
            }
        }
        all
    }

    /// Copied before every sample: more than any GPU's L2 cache holds, and long enough for the host to be done with
    /// what is timed before the GPU begins with it.
    const FILLER_BYTES: usize = 1 << 30;
    /// What a copy takes at least, on the fastest GPUs.
    const FILLER_MILLISECONDS: f64 = 0.3;
    /// Where the host takes longer than these, its time is measured.
    const MOST_FILLERS: usize = 16;
    const WARM_UPS: usize = 3;

    struct Gpu {
        device: Device,
        stream: Arc<CudaStream>,
        name: String,
        filler: std::cell::RefCell<[CudaSlice<u8>; 2]>,
    }

    /// Lets the memory pool keep what is freed, as training does: mapping it anew at every sample takes longer than some
    /// kernels.
    #[allow(unsafe_code)]
    fn keep_freed(stream: &CudaStream) -> Result<()> {
        let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        let mut all = u64::MAX;
        // SAFETY: the device is the context's own, the pool its default one, and the attribute a `u64`.
        unsafe {
            let pool = result::device::get_default_mem_pool(stream.context().cu_device()).w()?;
            result::mem_pool::set_attribute(pool, attribute, (&raw mut all).cast()).w()
        }
    }

    impl Gpu {
        fn new() -> Result<Self> {
            let device = Device::new_cuda(0)?;
            let Device::Cuda(cuda) = &device else {
                bail!("no GPU")
            };
            let stream = cuda.cuda_stream();
            keep_freed(&stream)?;
            let name = stream.context().name().w()?;
            let filler = [(); 2].map(|()| stream.alloc_zeros::<u8>(FILLER_BYTES).w());
            let [from, to] = filler;
            Ok(Self {
                stream,
                name,
                filler: std::cell::RefCell::new([from?, to?]),
                device,
            })
        }

        fn fill(&self) -> Result<()> {
            let [from, to] = &mut *self.filler.borrow_mut();
            self.stream.memcpy_dtod(from, to).w()
        }

        /// The median of the device's milliseconds.
        fn median(&self, samples: usize, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
            let mut host: f64 = 0.;
            for warm_up in 0..WARM_UPS {
                self.stream.synchronize().w()?;
                let started = Instant::now();
                run()?;
                if warm_up > 0 {
                    host = host.max(started.elapsed().as_secs_f64() * 1e3);
                }
            }
            // As many as keep the GPU busy while the host asks for what is timed.
            let fillers = (2. * host / FILLER_MILLISECONDS) as usize;
            if fillers > MOST_FILLERS {
                eprintln!("the host takes {host:.1} ms for a call: its time may be part of what is measured");
            }
            let fillers = fillers.clamp(1, MOST_FILLERS);
            let mut all = Vec::new();
            for _ in 0..samples.max(1) {
                (0..fillers).try_for_each(|_| self.fill())?;
                let event = || {
                    self.stream
                        .record_event(Some(CUevent_flags::CU_EVENT_DEFAULT))
                        .w()
                };
                let start = event()?;
                run()?;
                let end = event()?;
                all.push(f64::from(start.elapsed_ms(&end).w()?));
            }
            all.sort_by(f64::total_cmp);
            Ok(all[all.len() / 2])
        }

        /// A row of the table.
        fn time(&self, case: &Case, samples: usize) -> Result<String> {
            let (milliseconds, rate, unit) = match case.bench.split_once('/') {
                None if case.bench == "copy" => {
                    let milliseconds = self.median(samples, || self.fill())?;
                    (
                        milliseconds,
                        2. * FILLER_BYTES as f64 / milliseconds / 1e9,
                        "TB/s",
                    )
                }
                Some((pass @ ("attend_fwd" | "attend_bwd" | "attend_fwd_bwd"), score)) => {
                    let (milliseconds, times) = match pass {
                        "attend_fwd" => (self.attend(case, score, Pass::Forward, samples)?, 1.),
                        "attend_bwd" => (self.attend(case, score, Pass::Backward, samples)?, 2.5),
                        _ => (self.attend(case, score, Pass::Both, samples)?, 3.5),
                    };
                    let s = &case.shape;
                    let pairs = (s.b * s.h * s.t * s.s) as f64 / if s.causal { 2. } else { 1. };
                    let operations = times * 2. * pairs * (s.d + s.e) as f64;
                    (milliseconds, operations / milliseconds / 1e9, "TFLOP/s")
                }
                None if case.bench == "copy_x" => {
                    let x = self.normal(case.shape.q(), case.dtype)?;
                    let milliseconds = self.median(samples, || x.copy().map(drop))?;
                    let bytes = 2 * x.elem_count() * case.dtype.size_in_bytes();
                    (milliseconds, bytes as f64 / milliseconds / 1e9, "TB/s")
                }
                Some((pass @ ("rotate_fwd" | "rotate_bwd"), by)) => {
                    let (milliseconds, bytes) =
                        self.rotate(case, by == "tape", pass == "rotate_bwd", samples)?;
                    (milliseconds, bytes as f64 / milliseconds / 1e9, "TB/s")
                }
                None if case.bench.starts_with("tape_update") => {
                    let milliseconds =
                        self.tape_update(case, case.bench.ends_with("bwd"), samples)?;
                    let tokens = (case.shape.b * case.shape.t) as f64;
                    (milliseconds, tokens / milliseconds / 1e3, "Mtoken/s")
                }
                Some((
                    part @ ("train_step" | "train_forward" | "train_backward" | "train_optimizer"),
                    encoding,
                )) => {
                    let milliseconds = match part {
                        "train_step" => self.train_step(case, encoding, samples)?,
                        _ => self.train_part(case, encoding, part, samples)?,
                    };
                    let tokens = (case.shape.b * case.shape.t) as f64;
                    (milliseconds, tokens / milliseconds / 1e3, "Mtoken/s")
                }
                Some(("attend_decode", score)) => {
                    let milliseconds = self.attend(case, score, Pass::Forward, samples)?;
                    let s = &case.shape;
                    let bytes = s.b * s.g * s.s * (s.d + s.e) * case.dtype.size_in_bytes();
                    (milliseconds, bytes as f64 / milliseconds / 1e9, "TB/s")
                }
                _ => bail!("no bench {}", case.bench),
            };
            let Case {
                bench,
                dtype,
                shape,
            } = case;
            Ok(format!(
                "{bench},{US},{},{},{shape},{milliseconds:.4},{rate:.4},{unit},",
                self.name.replace(',', " "),
                dtype.as_str()
            ))
        }

        fn normal(&self, dims: [usize; 4], dtype: DType) -> Result<Tensor> {
            Tensor::randn(0f32, 1., dims.to_vec(), &self.device)?.to_dtype(dtype)
        }

        fn attend(&self, case: &Case, score: &str, pass: Pass, samples: usize) -> Result<f64> {
            let Shape {
                b,
                h,
                g,
                t,
                s,
                d,
                e,
                causal,
            } = case.shape;
            let normal = |dims| self.normal(dims, case.dtype);
            let (q, k, v) = (
                normal([b, h, t, d])?,
                normal([b, g, s, d])?,
                normal([b, g, s, e])?,
            );
            let phase = Score::Phase {
                amp_dim: d / 2,
                alpha: 0.1,
                phase_scale: None,
            };
            let backend = match score {
                "tapa_dense" => Backend::Dense,
                _ => Backend::Fused,
            };
            let (score, precision) = match score {
                "plain" | "tape" => (Score::Dot, Precision::Fast),
                "alibi" => {
                    let slopes = alibi_slopes(h).into();
                    (Score::LinearBias { slopes }, Precision::Fast)
                }
                "tapa_fast" | "tapa_dense" => (phase, Precision::Fast),
                "tapa_precise" => (phase, Precision::Precise),
                other => bail!("no score {other}"),
            };
            let spec = AttendSpec {
                causal,
                precision,
                ..AttendSpec::causal().with_score(score).with_backend(backend)
            };
            let plan = plan(&q, &k, &v, &spec)?;
            if plan.path == Path::Dense && backend == Backend::Fused {
                bail!("{case} goes dense: {plan}")
            }
            eprintln!("{case}: {}", plan.kernel);
            if pass == Pass::Forward {
                return self.median(samples, || attend(&q, &k, &v, &spec).map(drop));
            }
            let (q, k, v) = (variable(q)?, variable(k)?, variable(v)?);
            let grad = normal([b, h, t, e])?;
            let forward = || attend(&q, &k, &v, &spec)? * &grad;
            if pass == Pass::Both {
                // The dense path takes too long for many samples.
                let samples = if backend == Backend::Dense {
                    samples.min(5)
                } else {
                    samples
                };
                return self.median(samples, || forward()?.backward().map(drop));
            }
            let made = forward()?;
            self.median(samples, || made.backward().map(drop))
        }

        /// Milliseconds, and the bytes that are read and written.
        fn rotate(
            &self,
            case: &Case,
            state: bool,
            backward: bool,
            samples: usize,
        ) -> Result<(f64, usize)> {
            let Shape { b, g, t, d, .. } = case.shape;
            let dims = if state {
                [b, g, t, d / 2]
            } else {
                [1, 1, t, d / 2]
            };
            let angles = self.normal(dims, DType::F32)?;
            let (cos, sin) = (angles.cos()?, angles.sin()?);
            let x = self.normal(case.shape.q(), case.dtype)?;
            let (data, table) = (
                x.elem_count() * case.dtype.size_in_bytes(),
                2 * cos.elem_count() * 4,
            );
            if !backward {
                let rotation = Rotation { cos, sin };
                let milliseconds =
                    self.median(samples, || rotate(&x, &rotation, Layout::Half).map(drop))?;
                return Ok((milliseconds, 2 * data + table));
            }
            let x = variable(x)?;
            let (around, turned, bytes) = if state {
                let (cos, sin) = (variable(cos)?, variable(sin)?);
                let copies = [x.copy()?, cos.copy()?, sin.copy()?];
                let three = self.median(samples, || {
                    copies.iter().try_for_each(|x| x.backward().map(drop))
                })?;
                // Each of the three begins with ones of its own, the turned x alone with some.
                let ones = self.median(samples, || {
                    (copies[1..].iter()).try_for_each(|x| x.ones_like().map(drop))
                })?;
                let around = three - ones;
                let rotation = Rotation {
                    cos: cos.as_tensor().clone(),
                    sin: sin.as_tensor().clone(),
                };
                // The gradient that arrives, x and the state are read, three gradients written.
                let bytes = 3 * data + 2 * table;
                (around, rotate(&x, &rotation, Layout::Half)?, bytes)
            } else {
                let copy = x.copy()?;
                let around = self.median(samples, || copy.backward().map(drop))?;
                let rotation = Rotation { cos, sin };
                let turned = rotate(&x, &rotation, Layout::Half)?;
                (around, turned, 2 * data + table)
            };
            let all = self.median(samples, || turned.backward().map(drop))?;
            Ok(((all - around).max(1e-3), bytes))
        }

        /// The update behind the first of two layers, of a state that every head has for itself.
        fn tape_update(&self, case: &Case, backward: bool, samples: usize) -> Result<f64> {
            let Shape { b, h, g, t, d, .. } = case.shape;
            let dims = ModelDims {
                width: h * d,
                heads: h,
                kv_heads: g,
                head_dim: d,
                layers: 2,
                max_positions: t,
            };
            let vars = SeededVars::new(1);
            let encoding = EncodingConfig::Tape(TapeConfig::default())
                .build(&dims, vars.builder(case.dtype, &self.device))?;
            let angles = self.normal([b, g, t, d / 2], DType::F32)?;
            let (cos, sin) = (angles.cos()?, angles.sin()?);
            let carried = self.normal([b, h, t, d], case.dtype)?;
            let out = self.normal([1, b, t, h * d], case.dtype)?.squeeze(0)?;
            let update = |cos: &Tensor, sin: &Tensor, carried: &Tensor, out: &Tensor| {
                let state = PosState {
                    positions: Positions::first(t),
                    rotation: Some(Rotation {
                        cos: cos.clone(),
                        sin: sin.clone(),
                    }),
                };
                match encoding.update(0, state, Some(carried), out)?.rotation {
                    Some(rotation) => Ok(rotation),
                    None => bail!("the update lost the state"),
                }
            };
            if !backward {
                // The weights are variables: without a backward pass their graph is dropped.
                return self.median(samples, || update(&cos, &sin, &carried, &out).map(drop));
            }
            let (cos, sin) = (variable(cos)?, variable(sin)?);
            let (carried, out) = (variable(carried)?, variable(out)?);
            let around = self.median(samples, || (&*cos + &*sin)?.backward().map(drop))?;
            let all = self.median(samples, || {
                let Rotation { cos, sin } = update(&cos, &sin, &carried, &out)?;
                (cos + sin)?.backward().map(drop)
            })?;
            Ok((all - around).max(1e-3))
        }

        /// Median of the host's milliseconds, the GPU idle before and after.
        fn wall(
            &self,
            samples: usize,
            mut run: impl FnMut(&mut dyn FnMut()) -> Result<()>,
        ) -> Result<f64> {
            let mut all = Vec::new();
            for sample in 0..samples.max(1) + WARM_UPS {
                self.device.synchronize()?;
                let mut started = Instant::now();
                // What is to be timed begins when it says so.
                run(&mut || {
                    self.device.synchronize().ok();
                    started = Instant::now();
                })?;
                self.device.synchronize()?;
                if sample >= WARM_UPS {
                    all.push(started.elapsed().as_secs_f64() * 1e3);
                }
            }
            all.sort_by(f64::total_cmp);
            Ok(all[all.len() / 2])
        }

        fn model(&self, case: &Case, encoding: &str) -> Result<(Llama, Parameters, LlamaConfig)> {
            let Shape { h, g, t, d, .. } = case.shape;
            let encoding = match encoding {
                "rope" => EncodingConfig::Rope(RopeConfig::default()),
                "alibi" => EncodingConfig::Alibi(AlibiConfig::default()),
                "tapa" => EncodingConfig::Tapa(TapaConfig {
                    phase_norm: Some(PhaseNorm {
                        gain: 0.3,
                        learned: false,
                    }),
                    ..TapaConfig::default()
                }),
                "tape" => EncodingConfig::Tape(TapeConfig::default()),
                other => bail!("no encoding {other}"),
            };
            let config = LlamaConfig {
                hidden_size: h * d,
                intermediate_size: h * d * 8 / 3,
                num_hidden_layers: 6,
                num_attention_heads: h,
                num_key_value_heads: g,
                max_position_embeddings: t,
                encoding,
                ..LlamaConfig::default()
            };
            let parameters = Parameters::new(SeededVars::new(1));
            let vb = parameters.builder(case.dtype, &self.device);
            let model = Llama::new(&config, vb)?;
            Ok((model, parameters, config))
        }

        fn train_step(&self, case: &Case, encoding: &str, samples: usize) -> Result<f64> {
            let (model, parameters, _) = self.model(case, encoding)?;
            let (batch, length) = (case.shape.b, case.shape.t);
            let recipe = TrainerConfig {
                batch,
                length,
                steps: samples.max(1) + WARM_UPS,
                schedule: Schedule::Constant { peak: 1e-4 },
                ..TrainerConfig::default()
            };
            let mut trainer = Trainer::new(model, parameters, bytes(1 << 20), recipe)?;
            self.wall(samples, |_| trainer.step().map(drop))
        }

        fn train_part(
            &self,
            case: &Case,
            encoding: &str,
            part: &str,
            samples: usize,
        ) -> Result<f64> {
            let (model, parameters, _) = self.model(case, encoding)?;
            let (b, t) = (case.shape.b, case.shape.t);
            let text = Tensor::from_vec(bytes(b * (t + 1)), (b, t + 1), &self.device)?;
            let tokens = text.narrow(1, 0, t)?.contiguous()?;
            let targets = text.narrow(1, 1, t)?.contiguous()?;
            let positions = Positions::first(t);
            let mut optimiser = AdamW::new(AdamWConfig::default(), &parameters)?;
            self.wall(samples, |begin| {
                let mut ctx = Ctx {
                    train: true,
                    ..Ctx::default()
                };
                let hidden = model.hidden_at(&tokens, &positions, None, &mut ctx)?;
                let loss = mean_loss(&hidden, model.head(), &targets)?;
                if part == "train_forward" {
                    return Ok(());
                }
                if part == "train_backward" {
                    begin();
                }
                let store = loss.backward()?;
                if part == "train_backward" {
                    return Ok(());
                }
                begin();
                let mut gradients = Gradients::of(&store, &parameters)?;
                gradients.clip(1.)?;
                optimiser.step(&parameters, &gradients, 1e-4)
            })
        }
    }

    /// Of attention, what is timed.
    #[derive(Clone, Copy, PartialEq)]
    enum Pass {
        Forward,
        Backward,
        Both,
    }

    fn variable(x: Tensor) -> Result<Var> {
        Var::from_tensor(&x)
    }

    /// Token ids that follow each other without a pattern.
    fn bytes(len: usize) -> Vec<u32> {
        let mixed = |i: u64| (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
        (0..len as u64).map(|i| mixed(i) as u32).collect()
    }
}
