//! What kernels write: all of their outputs, and nothing beside them.
//!
//! Buffers of just an output's size are laid side by side in device memory, all NaN; every other one is freed, so that
//! the outputs of the call land in the gaps (their addresses say so). Then the output holds no NaN, and its
//! neighbours hold nothing else. Gradients are laid out so too; candle hands on copies of them, so that only their
//! neighbours say where they were.

#[cfg(not(feature = "cuda"))]
pub fn tests() -> Vec<crate::Test> {
    ["outputs_between_canaries", "gradients_between_canaries"]
        .map(|name| {
            crate::test(name, |_, report| {
                report.skip("only on a GPU");
                Ok(())
            })
        })
        .into()
}

#[cfg(feature = "cuda")]
pub use on_gpu::tests;

#[cfg(feature = "cuda")]
mod on_gpu {
    use crate::reference::{Call, Dims, Fill, Inputs};
    use crate::report::Report;
    use crate::shapes::families;
    use crate::target::{spec, Expected, Forward, Gradients, Manner, Target};
    use crate::{test, Test};
    use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr};
    use candle_core::{DType, Device, Result, Storage, Tensor, Var};
    use candle_posenc::{attend, attend_with_lse};

    pub fn tests() -> Vec<Test> {
        let mut tests = Vec::new();
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            for (i, name) in ["dot", "bias", "phase_precise", "phase_fast"]
                .into_iter()
                .enumerate()
            {
                tests.push(test(
                    format!("outputs_between_canaries_{name}_{dtype:?}"),
                    move |target, report| {
                        let Device::Cuda(device) = target.device() else {
                            report.skip("only on a GPU");
                            return Ok(());
                        };
                        let stream = device.cuda_stream();
                        // Outputs of a whole number of 512 bytes, in which memory is given; odd numbers of queries.
                        let mut landed = 0;
                        for (t, s, h, d, e) in [
                            (129, 129, 4, 64, 64),
                            (65, 300, 4, 128, 128),
                            (65, 65, 4, 64, 128),
                            (1, 300, 8, 64, 64),
                            (5, 700, 8, 128, 128),
                            (33, 33, 8, 40, 48),
                            (33, 33, 8, 20, 16),
                        ] {
                            let (_, score, manner) = families(h, d, dtype).swap_remove(i);
                            let dims = Dims {
                                t,
                                s,
                                e,
                                ..Dims::square(h, h / 2, 0, d)
                            };
                            let call = Call::causal(dims).with_score(score);
                            let gap = between_canaries(target, &stream, &call, manner, report)?;
                            landed += usize::from(gap);
                        }
                        report.remark(format!("{landed} of 7 outputs landed between canaries"));
                        report.check(landed > 0, || {
                            "the allocator put no output between canaries".to_string()
                        });
                        Ok(())
                    },
                ));
                tests.push(test(
                    format!("gradients_between_canaries_{name}_{dtype:?}"),
                    move |target, report| {
                        let Device::Cuda(device) = target.device() else {
                            report.skip("only on a GPU");
                            return Ok(());
                        };
                        let stream = device.cuda_stream();
                        // Of q, k, v and the output each as long as the others.
                        for (n, d) in [(129, 64), (65, 128), (33, 256), (40, 40), (33, 20)] {
                            let (_, score, manner) = families(4, d, dtype).swap_remove(i);
                            let call = Call::causal(Dims::square(4, 4, n, d)).with_score(score);
                            gradients_between_canaries(target, &stream, &call, manner, report)?;
                        }
                        Ok(())
                    },
                ));
            }
        }
        tests
    }

    /// Where a buffer begins in device memory.
    fn address(x: &Tensor, stream: &CudaStream) -> Result<u64> {
        let (storage, layout) = x.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else {
            candle_core::bail!("a tensor on a GPU is wanted")
        };
        let (base, width) = match x.dtype() {
            DType::BF16 => (
                storage.as_cuda_slice::<half::bf16>()?.device_ptr(stream).0,
                2,
            ),
            DType::F16 => (
                storage.as_cuda_slice::<half::f16>()?.device_ptr(stream).0,
                2,
            ),
            DType::F32 => (storage.as_cuda_slice::<f32>()?.device_ptr(stream).0, 4),
            other => candle_core::bail!("no address of {other:?}"),
        };
        Ok(base + (layout.start_offset() * width) as u64)
    }

    const BUFFERS: usize = 48;

    /// Whether the output landed in a gap between canaries. Where it does not, is the allocator's choice.
    fn between_canaries(
        target: &Target,
        stream: &CudaStream,
        call: &Call,
        manner: Manner,
        report: &mut Report,
    ) -> Result<bool> {
        let dims = call.dims;
        let inputs = Inputs::new(dims, Fill::Normal, 70, manner.dtype);
        let expected = Expected::of(call, &inputs, manner.dtype);
        let [q, k, v] = target.operands(call, &inputs, manner)?;
        let spec = spec(call, manner)?;
        target.counted_plan([&q, &k, &v], &spec, report)?;
        // Tables are made by the first call and stay where they are.
        attend_with_lse(&q, &k, &v, &spec)?;

        let elements: usize = dims.out().iter().product();
        let Laid { gaps, canaries } = lay(
            target,
            stream,
            elements * manner.dtype.size_in_bytes(),
            report,
        )?;
        let result = attend_with_lse(&q, &k, &v, &spec)?;
        let at = address(&result.out, stream)?;
        let got = Forward {
            out: crate::reference::values(&result.out)?,
            lse: crate::reference::values(&result.lse)?,
        };
        expected.hold("an output between canaries", &got, report);
        hold_canaries(canaries, report)?;
        Ok(gaps.contains(&at))
    }
    /// Buffers side by side, every other one freed.
    struct Laid {
        gaps: Vec<u64>,
        canaries: Vec<(u64, Tensor)>,
    }

    /// Lays out buffers of a size in bytes.
    fn lay(
        target: &Target,
        stream: &CudaStream,
        bytes: usize,
        report: &mut Report,
    ) -> Result<Laid> {
        let bytes = bytes.next_multiple_of(512);
        // The first ones fill what holes there are: more are laid until enough lie side by side.
        let mut buffers: Vec<(u64, Tensor)> = Vec::new();
        loop {
            for _ in 0..BUFFERS {
                let buffer = Tensor::full(f32::NAN, bytes / 4, target.device())?;
                buffers.push((address(&buffer, stream)?, buffer));
            }
            buffers.sort_by_key(|(at, _)| *at);
            let apart = |one: &(u64, Tensor), next: &(u64, Tensor)| next.0 - one.0;
            let between = (buffers.windows(3))
                .filter(|three| apart(&three[0], &three[1]) == bytes as u64)
                .filter(|three| apart(&three[1], &three[2]) == bytes as u64)
                .count();
            if between > BUFFERS / 2 + 1 || buffers.len() >= 16 * BUFFERS {
                break;
            }
        }
        // Gaps are buffers with a neighbour on either side.
        let (mut gaps, mut canaries) = (Vec::new(), Vec::new());
        let places: Vec<u64> = buffers.iter().map(|(at, _)| *at).collect();
        let mut freed_last = true;
        for (i, (at, buffer)) in buffers.into_iter().enumerate() {
            let beside = |j: usize, from: u64| places.get(j) == Some(&from);
            let inside =
                i > 0 && beside(i - 1, at - bytes as u64) && beside(i + 1, at + bytes as u64);
            freed_last = inside && !freed_last;
            if freed_last {
                gaps.push(at);
            } else {
                canaries.push((at, buffer));
            }
        }
        report.check(gaps.len() > BUFFERS / 4, || {
            format!(
                "only {} gaps between {} buffers",
                gaps.len(),
                canaries.len()
            )
        });
        Ok(Laid { gaps, canaries })
    }

    fn hold_canaries(canaries: Vec<(u64, Tensor)>, report: &mut Report) -> Result<()> {
        for (place, canary) in canaries {
            let words = canary.to_vec1::<f32>()?;
            let changed = words
                .iter()
                .filter(|x| x.to_bits() != f32::NAN.to_bits())
                .count();
            report.check(changed == 0, || {
                format!("{changed} words at {place:#x} were written over")
            });
        }
        Ok(())
    }

    fn gradients_between_canaries(
        target: &Target,
        stream: &CudaStream,
        call: &Call,
        manner: Manner,
        report: &mut Report,
    ) -> Result<()> {
        let dims = call.dims;
        let inputs = Inputs::new(dims, Fill::Normal, 71, manner.dtype);
        let expected = Expected::with_gradients(call, &inputs, manner.dtype);
        let operands = target.operands(call, &inputs, manner)?;
        let spec = spec(call, manner)?;
        target.counted_plan(operands.each_ref(), &spec, report)?;
        let vars: Vec<Var> = operands
            .iter()
            .map(Var::from_tensor)
            .collect::<Result<_>>()?;
        let grad = crate::reference::tensor(&inputs.grad, dims.out(), manner.dtype)?
            .to_device(target.device())?;
        let out = attend(&vars[0], &vars[1], &vars[2], &spec)?;
        let loss = (&out * &grad)?.sum_all()?;
        // Tables are made by the first call and stay where they are.
        loss.backward()?;
        let bytes = out.elem_count() * manner.dtype.size_in_bytes();
        let Laid { canaries, .. } = lay(target, stream, bytes, report)?;
        let gradients = loss.backward()?;
        let mut of = [None, None, None];
        for (var, of) in vars.iter().zip(&mut of) {
            *of = gradients
                .get(var)
                .map(crate::reference::values)
                .transpose()?;
        }
        report.check(of.iter().all(Option::is_some), || {
            "a gradient is missing".to_string()
        });
        let got = Gradients {
            out: crate::reference::values(&out)?,
            of,
        };
        expected.hold_gradients("gradients between canaries", &got, report);
        hold_canaries(canaries, report)
    }
}
