//! What kernels write: all of their outputs, and nothing beside them.
//!
//! Buffers of just an output's size are laid side by side in device memory, all NaN; every other one is freed, so that
//! the outputs of the call land in the gaps (their addresses say so). Then the output holds no NaN, and its
//! neighbours hold nothing else.

#[cfg(not(feature = "cuda"))]
pub fn tests() -> Vec<crate::Test> {
    vec![crate::test("outputs_between_canaries", |_, report| {
        report.skip("only on a GPU");
        Ok(())
    })]
}

#[cfg(feature = "cuda")]
pub use on_gpu::tests;

#[cfg(feature = "cuda")]
mod on_gpu {
    use crate::reference::{Call, Dims, Fill, Inputs};
    use crate::report::Report;
    use crate::shapes::families;
    use crate::target::{spec, Expected, Forward, Manner, Target};
    use crate::{test, Test};
    use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr};
    use candle_core::{DType, Device, Result, Storage, Tensor};
    use candle_posenc::attend_with_lse;

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
        let bytes = (elements * manner.dtype.size_in_bytes()).next_multiple_of(512);
        let mut buffers: Vec<(u64, Tensor)> = (0..BUFFERS)
            .map(|_| {
                let buffer = Tensor::full(f32::NAN, bytes / 4, target.device())?;
                Ok((address(&buffer, stream)?, buffer))
            })
            .collect::<Result<_>>()?;
        buffers.sort_by_key(|(at, _)| *at);
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
            format!("only {} of {BUFFERS} buffers lie side by side", gaps.len())
        });
        let result = attend_with_lse(&q, &k, &v, &spec)?;
        let at = address(&result.out, stream)?;
        let got = Forward {
            out: crate::reference::values(&result.out)?,
            lse: crate::reference::values(&result.lse)?,
        };
        expected.hold("an output between canaries", &got, report);
        for (place, canary) in canaries {
            let words = canary.to_vec1::<f32>()?;
            let changed = words
                .iter()
                .filter(|x| x.to_bits() != f32::NAN.to_bits())
                .count();
            report.check(changed == 0, || {
                format!("{changed} words at {place:#x} were written over; the output is at {at:#x}")
            });
        }
        Ok(gaps.contains(&at))
    }
}
