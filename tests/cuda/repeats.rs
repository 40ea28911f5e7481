//! Equal bits on every run, alone and beside a stream that keeps the memory busy.

use crate::reference::{tensor, Call, Dims, Fill, Inputs};
use crate::report::Report;
use crate::shapes::families;
use crate::target::{spec, Manner, Target};
use crate::{test, Test};
use candle_core::{DType, Result, Tensor, Var};
use candle_posenc::{attend, attend_with_lse};

const REPEATS: usize = 200;

pub fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for (i, name) in ["dot", "bias", "phase_precise", "phase_fast"]
            .into_iter()
            .enumerate()
        {
            tests.push(test(
                format!("repeats_are_bit_equal_{name}_{dtype:?}"),
                move |target, report| {
                    for (t, s, d, e) in [
                        (515, 515, 64, 64),
                        (300, 700, 128, 128),
                        (260, 260, 96, 192),
                        (130, 130, 256, 256),
                        (1, 9000, 64, 64),
                        (3, 5000, 128, 256),
                        (2, 3000, 256, 256),
                        (70, 70, 33, 20),
                    ] {
                        let (_, score, manner) = families(8, d, dtype).swap_remove(i);
                        let dims = Dims {
                            t,
                            s,
                            e,
                            ..Dims::square(8, 2, 0, d)
                        };
                        let call = Call::causal(dims).with_score(score);
                        repeat(target, &call, manner, report)?;
                    }
                    repeat(target, &scattered(i, dtype), manner_of(i, dtype), report)
                },
            ));
            tests.push(test(
                format!("gradient_repeats_are_bit_equal_{name}_{dtype:?}"),
                move |target, report| {
                    for (t, s, d, e) in [
                        (515, 515, 64, 64),
                        (200, 400, 128, 128),
                        (260, 260, 64, 128),
                        (130, 130, 128, 256),
                        (130, 130, 256, 256),
                        (3, 700, 64, 64),
                        (70, 70, 33, 20),
                    ] {
                        let (_, score, manner) = families(8, d, dtype).swap_remove(i);
                        // Without tensor cores less keeps a GPU as busy.
                        let most = if dtype == DType::F32 { 130 } else { usize::MAX };
                        let dims = Dims {
                            t: t.min(most),
                            s: s.min(most),
                            e,
                            ..Dims::square(8, 2, 0, d)
                        };
                        let call = Call::causal(dims).with_score(score);
                        repeat_gradients(target, &call, manner, report)?;
                    }
                    let call = scattered(i, dtype);
                    repeat_gradients(target, &call, manner_of(i, dtype), report)
                },
            ));
        }
    }
    tests
}

/// The manner in which the family of this number is asked for.
fn manner_of(family: usize, dtype: DType) -> Manner {
    families(4, 64, dtype).swap_remove(family).2
}

/// Many tiles that are skipped, and parts of the keys without a key.
fn scattered(family: usize, dtype: DType) -> Call {
    let dims = Dims {
        b: 2,
        ..Dims::square(4, 2, 400, 64)
    };
    let (_, score, _) = families(4, 64, dtype).swap_remove(family);
    let places = vec![(0..400)
        .map(|i| if i % 50 < 20 { -1 } else { i % 130 })
        .collect()];
    let documents = vec![(0..400).map(|i| i / 130).collect::<Vec<i64>>()];
    let mut call = Call::causal(dims)
        .with_score(score)
        .with_positions(places.clone(), places);
    call.segments = Some((documents.clone(), documents));
    call
}

fn repeat(target: &Target, call: &Call, manner: Manner, report: &mut Report) -> Result<()> {
    let inputs = Inputs::new(call.dims, Fill::Normal, 90, manner.dtype);
    let [q, k, v] = target.operands(call, &inputs, manner)?;
    let spec = spec(call, manner)?;
    target.counted_plan([&q, &k, &v], &spec, report)?;
    let once = || -> Result<Vec<Vec<u32>>> {
        let result = attend_with_lse(&q, &k, &v, &spec)?;
        Ok(vec![bits(&result.out)?, bits(&result.lse)?])
    };
    hold_repeats(
        target,
        &crate::target::describe(call, manner),
        &once,
        report,
    )
}

/// Forward and backward.
fn repeat_gradients(
    target: &Target,
    call: &Call,
    manner: Manner,
    report: &mut Report,
) -> Result<()> {
    let inputs = Inputs::new(call.dims, Fill::Normal, 91, manner.dtype);
    let operands = target.operands(call, &inputs, manner)?;
    let spec = spec(call, manner)?;
    target.counted_plan(operands.each_ref(), &spec, report)?;
    let vars: Vec<Var> = operands
        .iter()
        .map(Var::from_tensor)
        .collect::<Result<_>>()?;
    let grad = tensor(&inputs.grad, call.dims.out(), manner.dtype)?.to_device(target.device())?;
    let once = || -> Result<Vec<Vec<u32>>> {
        let out = attend(&vars[0], &vars[1], &vars[2], &spec)?;
        let gradients = (&out * &grad)?.sum_all()?.backward()?;
        vars.iter()
            .map(|var| gradients.get(var).map_or(Ok(Vec::new()), bits))
            .collect()
    };
    let what = format!("gradients of {}", crate::target::describe(call, manner));
    hold_repeats(target, &what, &once, report)
}

fn hold_repeats(
    target: &Target,
    what: &str,
    once: &dyn Fn() -> Result<Vec<Vec<u32>>>,
    report: &mut Report,
) -> Result<()> {
    target.poison()?;
    let first = once()?;
    report.check(first.iter().all(|bits| !bits.is_empty()), || {
        format!("{what}: a result is missing")
    });
    let repeats = if target.is_gpu() { REPEATS } else { 3 };
    let mut differ = 0;
    let hammer = hammer::Hammer::start(target)?;
    for i in 0..repeats {
        if i % 8 == 0 {
            target.poison()?;
        }
        differ += usize::from(once()? != first);
    }
    let copies = hammer.stop()?;
    report.check(differ == 0, || {
        format!("{differ} of {repeats} runs differ: {what}")
    });
    report.check(copies > 0 || !target.is_gpu(), || {
        "the memory was not kept busy".to_string()
    });
    Ok(())
}

/// The tensor's bits, NaNs included; f64 has no kernel whose order could change.
fn bits(x: &Tensor) -> Result<Vec<u32>> {
    let x = x.flatten_all()?;
    Ok(match x.dtype() {
        DType::BF16 => x
            .to_vec1::<half::bf16>()?
            .iter()
            .map(|x| x.to_bits().into())
            .collect(),
        DType::F16 => x
            .to_vec1::<half::f16>()?
            .iter()
            .map(|x| x.to_bits().into())
            .collect(),
        _ => x
            .to_dtype(DType::F32)?
            .to_vec1::<f32>()?
            .iter()
            .map(|x| x.to_bits())
            .collect(),
    })
}

#[cfg(not(feature = "cuda"))]
mod hammer {
    use super::Target;
    use candle_core::Result;

    pub struct Hammer;

    impl Hammer {
        pub fn start(_: &Target) -> Result<Self> {
            Ok(Self)
        }

        pub fn stop(self) -> Result<usize> {
            Ok(0)
        }
    }
}

#[cfg(feature = "cuda")]
mod hammer {
    use super::Target;
    use candle_core::cuda_backend::WrapErr;
    use candle_core::{Device, Error, Result};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::Arc;
    use std::thread::JoinHandle;

    /// Copies in device memory, without end, on a stream and a thread of their own.
    pub struct Hammer {
        stop: Arc<AtomicBool>,
        thread: Option<JoinHandle<Result<usize>>>,
    }

    const BYTES: usize = 128 << 20;

    impl Hammer {
        pub fn start(target: &Target) -> Result<Self> {
            let stop = Arc::new(AtomicBool::new(false));
            let Device::Cuda(device) = target.device() else {
                return Ok(Self { stop, thread: None });
            };
            let context = device.cuda_stream().context().clone();
            let (ready, started) = std::sync::mpsc::channel();
            let thread = std::thread::spawn({
                let stop = stop.clone();
                move || -> Result<usize> {
                    let stream = context.new_stream().w()?;
                    let from = stream.alloc_zeros::<u8>(BYTES).w()?;
                    let mut to = stream.alloc_zeros::<u8>(BYTES).w()?;
                    let mut copies = 0;
                    while !stop.load(Ordering::Relaxed) {
                        for _ in 0..8 {
                            stream.memcpy_dtod(&from, &mut to).w()?;
                            copies += 1;
                        }
                        stream.synchronize().w()?;
                        ready.send(()).ok();
                    }
                    Ok(copies)
                }
            });
            // An error ends the thread, and with it the channel.
            started.recv().ok();
            Ok(Self {
                stop,
                thread: Some(thread),
            })
        }

        /// The number of copies made.
        pub fn stop(mut self) -> Result<usize> {
            self.stop.store(true, Ordering::Relaxed);
            match self.thread.take().map(JoinHandle::join) {
                Some(Ok(copies)) => copies,
                Some(Err(_)) => Err(Error::msg("the thread that copies panicked")),
                None => Ok(0),
            }
        }
    }

    impl Drop for Hammer {
        fn drop(&mut self) {
            self.stop.store(true, Ordering::Relaxed);
        }
    }
}
