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
//! Counted are 2·B·H·T·S·(D + E) operations, half of them where causal, and for decoding the bytes of k and v.

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
    use candle_core::cuda_backend::cudarc::driver::{sys::CUevent_flags, CudaSlice, CudaStream};
    use candle_core::cuda_backend::WrapErr;
    use candle_core::{bail, DType, Device, Error, Result, Tensor};
    use candle_posenc::encoding::alibi_slopes;
    use candle_posenc::{attend, plan, AttendSpec, Backend, Path, Precision, Score};
    use std::collections::HashMap;
    use std::io::{BufRead, Write};
    use std::sync::Arc;

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
            }
            if case.to_string().contains(&options.only) {
                writeln!(sink, "{}", gpu.time(&case, options.samples)?)?;
                sink.flush()?;
            }
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
    const WARM_UPS: usize = 3;

    struct Gpu {
        device: Device,
        stream: Arc<CudaStream>,
        name: String,
        filler: std::cell::RefCell<[CudaSlice<u8>; 2]>,
    }

    impl Gpu {
        fn new() -> Result<Self> {
            let device = Device::new_cuda(0)?;
            let Device::Cuda(cuda) = &device else {
                bail!("no GPU")
            };
            let stream = cuda.cuda_stream();
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
            for _ in 0..WARM_UPS {
                run()?;
            }
            let mut all = Vec::new();
            for _ in 0..samples.max(1) {
                self.fill()?;
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
                Some(("attend_fwd", score)) => {
                    let milliseconds = self.attend(case, score, samples)?;
                    let s = &case.shape;
                    let pairs = (s.b * s.h * s.t * s.s) as f64 / if s.causal { 2. } else { 1. };
                    let operations = 2. * pairs * (s.d + s.e) as f64;
                    (milliseconds, operations / milliseconds / 1e9, "TFLOP/s")
                }
                Some(("attend_decode", score)) => {
                    let milliseconds = self.attend(case, score, samples)?;
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

        fn attend(&self, case: &Case, score: &str, samples: usize) -> Result<f64> {
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
            let normal = |dims: (usize, usize, usize, usize)| {
                Tensor::randn(0f32, 1., dims, &self.device)?.to_dtype(case.dtype)
            };
            let (q, k, v) = (
                normal((b, h, t, d))?,
                normal((b, g, s, d))?,
                normal((b, g, s, e))?,
            );
            let phase = Score::Phase {
                amp_dim: d / 2,
                alpha: 0.1,
                phase_scale: None,
            };
            let (score, precision) = match score {
                "plain" | "tape" => (Score::Dot, Precision::Fast),
                "alibi" => {
                    let slopes = alibi_slopes(h).into();
                    (Score::LinearBias { slopes }, Precision::Fast)
                }
                "tapa_fast" => (phase, Precision::Fast),
                "tapa_precise" => (phase, Precision::Precise),
                other => bail!("no score {other}"),
            };
            let spec = AttendSpec {
                causal,
                precision,
                ..AttendSpec::causal()
                    .with_score(score)
                    .with_backend(Backend::Fused)
            };
            let plan = plan(&q, &k, &v, &spec)?;
            if plan.path == Path::Dense {
                bail!("{case} goes dense: {plan}")
            }
            eprintln!("{case}: {}", plan.kernel);
            self.median(samples, || attend(&q, &k, &v, &spec).map(drop))
        }
    }
}
