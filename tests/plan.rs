//! What `plan` promises: the path of every device and backend, the reasons, the refusals, the copies.

use candle_core::{DType, Device, Result, Tensor};
use candle_posenc::{
    attend, plan, plan_problem, AttendSpec, Backend, DeviceKind, Operand, Path, Plan, Precision,
    Problem, Score,
};

const GPUS: [DeviceKind; 3] = [
    DeviceKind::Cuda { cc: Some((8, 0)) },
    DeviceKind::Cuda { cc: Some((9, 0)) },
    DeviceKind::Cuda { cc: Some((12, 1)) },
];

/// Devices without a fused kernel, and what reasons call them.
const WITHOUT_KERNELS: [(DeviceKind, &str); 3] = [
    (DeviceKind::Cuda { cc: Some((7, 5)) }, "7.5, below 8.0"),
    (DeviceKind::Cuda { cc: None }, "without the feature cuda"),
    (DeviceKind::Metal, "Metal"),
];

fn problem(device: DeviceKind, dtype: DType) -> Problem {
    Problem {
        q: Operand::contiguous([2, 8, 100, 64]),
        k: Operand::contiguous([2, 2, 300, 64]),
        v: Operand::contiguous([2, 2, 300, 128]),
        dtype,
        device,
    }
}

fn phase() -> Score {
    Score::Phase {
        amp_dim: 32,
        alpha: 0.1,
        phase_scale: None,
    }
}

fn on(backend: Backend) -> AttendSpec {
    AttendSpec::causal().with_backend(backend)
}

fn refusal<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => panic!("should be refused"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn auto_and_fused_on_cpu_take_the_fused_path() -> Result<()> {
    for backend in [Backend::Auto, Backend::Fused] {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            for score in [Score::Dot, phase()] {
                let plan = plan_problem(
                    &problem(DeviceKind::Cpu, dtype),
                    &on(backend).with_score(score),
                )?;
                assert_eq!(plan.path, Path::FusedCpu);
                assert!(!plan.kernel.is_empty());
                assert!(plan.reason.contains("CPU"), "{}", plan.reason);
            }
        }
    }
    Ok(())
}

#[test]
fn dense_is_taken_wherever_it_is_asked_for() -> Result<()> {
    let without = WITHOUT_KERNELS.map(|(device, _)| device);
    for device in GPUS.into_iter().chain(without).chain([DeviceKind::Cpu]) {
        let plan = plan_problem(&problem(device, DType::F32), &on(Backend::Dense))?;
        assert_eq!(plan.path, Path::Dense);
        assert!(plan.reason.contains("asked"), "{}", plan.reason);
        assert_eq!(plan.kernel, "tensor operations");
    }
    Ok(())
}

#[test]
fn auto_without_a_kernel_for_the_device_is_dense_and_says_why() -> Result<()> {
    for (device, name) in WITHOUT_KERNELS {
        let plan = plan_problem(&problem(device, DType::BF16), &on(Backend::Auto))?;
        assert_eq!(plan.path, Path::Dense);
        assert!(
            plan.reason.contains(name) && plan.reason.contains("no fused kernel"),
            "{}",
            plan.reason
        );
    }
    Ok(())
}

#[test]
fn fused_without_a_kernel_for_the_device_is_refused_with_a_way_out() {
    for (device, _) in WITHOUT_KERNELS {
        let error = refusal(plan_problem(
            &problem(device, DType::F32),
            &on(Backend::Fused),
        ));
        for part in ["Backend::Fused", &format!("{device:?}"), "Backend::Auto"] {
            assert!(error.contains(part), "{error}");
        }
    }
}

#[test]
fn auto_and_fused_on_gpus_take_the_fused_path() -> Result<()> {
    for device in GPUS {
        for backend in [Backend::Auto, Backend::Fused] {
            for (dtype, kernel) in [
                (DType::BF16, "attend_forward_dot_w64_v2_bf16"),
                (DType::F16, "attend_forward_dot_w64_v2_f16"),
                (DType::F32, "attend_simt_dot_f32"),
                (DType::F64, "attend_simt_dot_f64"),
            ] {
                let plan = plan_problem(&problem(device, dtype), &on(backend))?;
                assert_eq!((plan.path, plan.kernel.as_str()), (Path::FusedCuda, kernel));
                assert!(plan.reason.contains("GPU"), "{}", plan.reason);
                assert!(plan.copies.is_empty(), "{:?}", plan.copies);
            }
        }
    }
    Ok(())
}

/// Two rows of 8 heads in bf16 on an H200.
fn on_gpu(t: usize, s: usize, d: usize, e: usize) -> Problem {
    Problem {
        q: Operand::contiguous([2, 8, t, d]),
        k: Operand::contiguous([2, 2, s, d]),
        v: Operand::contiguous([2, 2, s, e]),
        ..problem(DeviceKind::Cuda { cc: Some((9, 0)) }, DType::BF16)
    }
}

#[test]
fn heads_too_wide_for_the_gpu_kernels_are_dense_or_refused_with_the_limit() -> Result<()> {
    for wide in [on_gpu(100, 300, 264, 64), on_gpu(100, 300, 64, 520)] {
        let plan = plan_problem(&wide, &on(Backend::Auto))?;
        assert_eq!(plan.path, Path::Dense);
        let error = refusal(plan_problem(&wide, &on(Backend::Fused)));
        for text in [plan.reason, error] {
            for part in ["256", "512", &wide.q.dims[3].to_string()] {
                assert!(text.contains(part), "{text}");
            }
        }
    }
    Ok(())
}

#[test]
fn precision_on_a_gpu_is_what_was_asked_for_where_there_is_a_choice() -> Result<()> {
    for precision in [Precision::Fast, Precision::Precise] {
        let spec = AttendSpec {
            precision,
            ..on(Backend::Auto)
        };
        let planned = |problem: Problem, score: Score| -> Result<_> {
            Ok(plan_problem(&problem, &spec.clone().with_score(score))?.precision)
        };
        let single = Problem {
            dtype: DType::F32,
            ..on_gpu(100, 300, 64, 64)
        };
        let precise = Some(Precision::Precise);
        assert_eq!(planned(on_gpu(100, 300, 64, 64), phase())?, Some(precision));
        assert_eq!(planned(on_gpu(16, 300, 64, 64), phase())?, precise);
        assert_eq!(planned(single, phase())?, precise);
        assert_eq!(planned(on_gpu(100, 300, 64, 64), Score::Dot)?, None);
    }
    Ok(())
}

#[test]
fn gpu_copies_are_of_operands_whose_rows_are_not_aligned() -> Result<()> {
    let plain = on_gpu(100, 300, 64, 64);
    let copies = |problem: Problem| -> Result<Plan> { plan_problem(&problem, &on(Backend::Auto)) };
    let interleaved = Problem {
        q: Operand {
            strides: [51200, 64, 512, 1],
            ..plain.q
        },
        ..plain
    };
    assert!(copies(interleaved)?.copies.is_empty());
    let shifted = Problem {
        k: Operand {
            offset: 4,
            ..plain.k
        },
        ..plain
    };
    let plan = copies(shifted)?;
    assert_eq!(plan.copies, ["makes k contiguous"]);
    assert!(plan.workspace_bytes >= 2 * 2 * 300 * 64 * 2);
    assert!(copies(Problem {
        dtype: DType::F32,
        ..shifted
    })?
    .copies
    .is_empty());
    Ok(())
}

#[test]
fn gpu_plan_names_the_kernels_of_the_backward_pass_in_their_order() -> Result<()> {
    let kernels = |problem: Problem, spec: AttendSpec| -> Result<_> {
        Ok(plan_problem(&problem, &spec)?.backward.unwrap().kernels)
    };
    let auto = on(Backend::Auto);
    assert_eq!(
        kernels(on_gpu(100, 300, 64, 64), auto.clone().with_score(phase()))?,
        [
            "attend_delta_bf16",
            "attend_backward_phase_fast_w64_v1_t64_keys_bf16",
            "attend_backward_phase_fast_w64_v1_t64_queries_bf16"
        ]
    );
    // The kernel for few queries leaves nothing, and is precise.
    assert_eq!(
        kernels(on_gpu(16, 300, 64, 64), auto.clone().with_score(phase()))?,
        [
            "attend_forward_phase_precise_w64_v1_bf16",
            "attend_delta_bf16",
            "attend_backward_phase_precise_w64_v1_t64_keys_bf16",
            "attend_backward_phase_precise_w64_v1_t64_queries_bf16"
        ]
    );
    let single = Problem {
        dtype: DType::F32,
        ..on_gpu(16, 300, 64, 64)
    };
    assert_eq!(
        kernels(single, auto.clone())?,
        [
            "attend_simt_delta_f32",
            "attend_simt_backward_dot_keys_f32",
            "attend_simt_backward_dot_queries_f32"
        ]
    );
    // Values too wide for the tiles of the backward pass.
    assert_eq!(
        kernels(on_gpu(100, 300, 256, 512), auto)?[..2],
        ["attend_simt_dot_bf16", "attend_simt_delta_bf16"]
    );
    Ok(())
}

#[test]
fn backward_pass_is_planned_on_gpus_only() -> Result<()> {
    for (problem, backend) in [
        (problem(DeviceKind::Cpu, DType::F32), Backend::Auto),
        (problem(DeviceKind::Cpu, DType::F32), Backend::Dense),
        (on_gpu(100, 300, 64, 64), Backend::Dense),
    ] {
        assert_eq!(plan_problem(&problem, &on(backend))?.backward, None);
    }
    Ok(())
}

#[test]
fn memory_of_the_gpus_backward_pass_is_linear_in_length_and_told() -> Result<()> {
    let of_length = |t: usize, dtype: DType| -> Result<_> {
        let problem = Problem {
            dtype,
            ..on_gpu(t, t, 64, 64)
        };
        Ok(plan_problem(&problem, &on(Backend::Auto))?
            .backward
            .unwrap())
    };
    // 16 heads: two numbers a query, and 64 columns of what rounding lost.
    let half = of_length(1000, DType::BF16)?;
    assert_eq!(half.saved_bytes, 16_000 * (2 * 4 + 2 * 64));
    assert_eq!(
        of_length(1000, DType::F32)?.saved_bytes,
        16_000 * 2 * size_of::<f32>()
    );
    assert_eq!(
        of_length(1000, DType::F64)?.saved_bytes,
        16_000 * 2 * size_of::<f64>()
    );
    let long = of_length(100_000, DType::BF16)?;
    assert_eq!(long.saved_bytes, 100 * half.saved_bytes);
    assert!(long.workspace_bytes <= 101 * half.workspace_bytes);
    // Two numbers a query, a mark for 64, and the gradient where it has to be copied.
    assert_eq!(
        half.workspace_bytes,
        16_000 * 2 * 4 + 16 * 16 * 4 + 16_000 * 64 * 2
    );
    // Copies of inputs live until then: here of q and k, whose rows start between vectors.
    let shifted = |operand: Operand| Operand {
        offset: 1,
        ..operand
    };
    for t in [1000, 16] {
        let aligned = on_gpu(t, t, 64, 64);
        let plan = |problem: Problem| plan_problem(&problem, &on(Backend::Auto));
        let [without, with] = [
            plan(aligned)?,
            plan(Problem {
                q: shifted(aligned.q),
                k: shifted(aligned.k),
                ..aligned
            })?,
        ];
        assert_eq!(with.copies, ["makes q contiguous", "makes k contiguous"]);
        let copied = (16 + 4) * t * 64 * 2;
        assert_eq!(with.workspace_bytes, without.workspace_bytes + copied);
        let [without, with] = [without, with].map(|plan| plan.backward.unwrap());
        assert_eq!(with.saved_bytes, without.saved_bytes + copied);
        assert_eq!(with.workspace_bytes, without.workspace_bytes);
    }
    // What the forward pass does not leave, running it again does.
    let few = of_length(16, DType::BF16)?;
    assert_eq!(few.saved_bytes, 0);
    assert!(few.workspace_bytes >= 16 * 16 * (2 * 4 + 2 * 2 * 64));
    Ok(())
}

#[test]
fn gpu_workspace_is_linear_in_length() -> Result<()> {
    for score in [Score::Dot, phase()] {
        for t in [1, 1000] {
            let of_length = |s: usize| -> Result<usize> {
                let spec = on(Backend::Auto).with_score(score.clone());
                Ok(plan_problem(&on_gpu(t, s, 64, 64), &spec)?.workspace_bytes)
            };
            let [short, long] = [of_length(4_000)?, of_length(400_000)?];
            assert!(long <= 200 * short.max(1 << 16), "{short} {long}");
        }
    }
    Ok(())
}

#[test]
fn plan_of_tensors_equals_plan_of_their_problem() -> Result<()> {
    let q = Tensor::zeros((2, 100, 8, 64), DType::BF16, &Device::Cpu)?.transpose(1, 2)?;
    let k = Tensor::zeros((2, 2, 300, 64), DType::BF16, &Device::Cpu)?;
    let v = Tensor::zeros((2, 2, 300, 128), DType::BF16, &Device::Cpu)?;
    let strided = Problem {
        q: Operand {
            dims: [2, 8, 100, 64],
            strides: [51200, 64, 512, 1],
            offset: 0,
        },
        ..problem(DeviceKind::Cpu, DType::BF16)
    };
    assert_eq!(Problem::of(&q, &k, &v)?, strided);
    for backend in [Backend::Auto, Backend::Dense, Backend::Fused] {
        let plan = plan(&q, &k, &v, &on(backend))?;
        assert_eq!(plan, plan_problem(&strided, &on(backend))?);
    }
    Ok(())
}

#[test]
fn sums_are_held_in_f32_or_in_f64_for_f64() -> Result<()> {
    for backend in [Backend::Auto, Backend::Dense] {
        for (dtype, accumulate) in [
            (DType::F64, DType::F64),
            (DType::F32, DType::F32),
            (DType::BF16, DType::F32),
            (DType::F16, DType::F32),
        ] {
            let plan = plan_problem(&problem(DeviceKind::Cpu, dtype), &on(backend))?;
            assert_eq!(plan.accumulate, accumulate);
        }
    }
    Ok(())
}

#[test]
fn phase_precision_is_told_for_the_phase_only_and_precise_on_the_host() -> Result<()> {
    let cpu = problem(DeviceKind::Cpu, DType::F32);
    for backend in [Backend::Auto, Backend::Dense] {
        for precision in [Precision::Fast, Precision::Precise] {
            let spec = AttendSpec {
                precision,
                ..on(backend)
            };
            assert_eq!(plan_problem(&cpu, &spec)?.precision, None);
            assert_eq!(
                plan_problem(&cpu, &spec.with_score(phase()))?.precision,
                Some(Precision::Precise)
            );
        }
    }
    Ok(())
}

#[test]
fn dense_copies_name_each_conversion() -> Result<()> {
    let copies = |problem: Problem| -> Result<Vec<String>> {
        Ok(plan_problem(&problem, &on(Backend::Dense))?.copies)
    };
    let has = |copies: &[String], part: &str| copies.iter().any(|copy| copy.contains(part));
    let grouped = copies(problem(DeviceKind::Cpu, DType::F32))?;
    assert!(has(&grouped, "repeats k and v"), "{grouped:?}");
    assert_eq!(grouped.len(), 2);
    let half = copies(problem(DeviceKind::Cpu, DType::BF16))?;
    assert!(has(&half, "converts") && has(&half, "F32"), "{half:?}");
    let same = Operand::contiguous([1, 2, 5, 8]);
    let plain = Problem {
        q: same,
        k: same,
        v: same,
        ..problem(DeviceKind::Cpu, DType::F32)
    };
    assert_eq!(copies(plain)?, ["transposes k"]);
    let transposed = Operand {
        strides: [80, 8, 16, 1],
        ..same
    };
    let strided = copies(Problem {
        k: transposed,
        ..plain
    })?;
    assert_eq!(strided.len(), 2);
    assert!(has(&strided, "k contiguous"), "{strided:?}");
    // One token: heads and tokens change places without a copy.
    let one_token = Operand {
        strides: [16, 8, 16, 1],
        ..Operand::contiguous([1, 2, 1, 8])
    };
    let decoding = copies(Problem {
        q: one_token,
        ..plain
    })?;
    assert!(!has(&decoding, "contiguous"), "{decoding:?}");
    let score = Score::Phase {
        amp_dim: 4,
        alpha: 0.1,
        phase_scale: None,
    };
    let split = plan_problem(&plain, &on(Backend::Dense).with_score(score))?.copies;
    assert!(has(&split, "splits q and k"), "{split:?}");
    Ok(())
}

#[test]
fn fused_copies_name_the_packing_and_the_conversion() -> Result<()> {
    let single = plan_problem(&problem(DeviceKind::Cpu, DType::F32), &on(Backend::Fused))?;
    assert!(single.copies.iter().any(|copy| copy.contains("packs")));
    assert!(!single.copies.iter().any(|copy| copy.contains("converts")));
    let half = plan_problem(&problem(DeviceKind::Cpu, DType::BF16), &on(Backend::Fused))?;
    assert!(half
        .copies
        .iter()
        .any(|copy| copy.contains("BF16") && copy.contains("F32")));
    // Grouped heads and strides cost it nothing.
    assert!(!half.copies.iter().any(|copy| copy.contains("repeats")));
    Ok(())
}

/// The same call over `n` queries and keys.
fn of_length(n: usize, backend: Backend, score: Score) -> Result<Plan> {
    let operand = Operand::contiguous([1, 4, n, 64]);
    let problem = Problem {
        q: operand,
        k: operand,
        v: operand,
        dtype: DType::F32,
        device: DeviceKind::Cpu,
    };
    plan_problem(&problem, &on(backend).with_score(score))
}

#[test]
fn dense_workspace_holds_score_matrices() -> Result<()> {
    for score in [Score::Dot, phase()] {
        let bytes = of_length(10_000, Backend::Dense, score.clone())?.workspace_bytes;
        let matrix = 4 * 10_000 * 10_000 * 4;
        assert!(bytes >= 5 * matrix && bytes < 7 * matrix, "{bytes}");
        let twice = of_length(20_000, Backend::Dense, score)?.workspace_bytes;
        assert!(twice > 39 * (bytes / 10), "{twice}");
    }
    Ok(())
}

#[test]
fn fused_workspace_is_linear_in_length() -> Result<()> {
    for score in [Score::Dot, phase()] {
        let [short, long, longer] =
            [4_000, 40_000, 400_000].map(|n| of_length(n, Backend::Fused, score.clone()));
        let (short, long, longer) = (short?, long?, longer?);
        assert!(short.workspace_bytes > 0);
        assert!(long.workspace_bytes <= 11 * short.workspace_bytes);
        assert!(longer.workspace_bytes <= 11 * long.workspace_bytes);
        // A matrix of scores would be 2,560 GB.
        assert!(
            longer.workspace_bytes < 8 << 30,
            "{}",
            longer.workspace_bytes
        );
    }
    Ok(())
}

#[test]
fn workspace_of_absurd_shapes_does_not_overflow() -> Result<()> {
    let operand = Operand {
        dims: [usize::MAX, 1, usize::MAX, 64],
        strides: [0; 4],
        offset: 0,
    };
    let absurd = Problem {
        q: operand,
        k: operand,
        v: operand,
        dtype: DType::F32,
        device: DeviceKind::Cpu,
    };
    let plan = plan_problem(&absurd, &on(Backend::Dense))?;
    assert_eq!(plan.workspace_bytes, usize::MAX);
    let plan = plan_problem(&absurd, &on(Backend::Fused))?;
    assert!(plan.workspace_bytes > 1 << 40, "{}", plan.workspace_bytes);
    for dtype in [DType::BF16, DType::F32] {
        let on_gpu = Problem {
            dtype,
            device: DeviceKind::Cuda { cc: Some((9, 0)) },
            ..absurd
        };
        for score in [Score::Dot, phase()] {
            assert_eq!(
                plan_problem(&on_gpu, &on(Backend::Fused).with_score(score))?.path,
                Path::FusedCuda
            );
        }
    }
    Ok(())
}

#[test]
fn displayed_plan_reads_as_a_sentence() -> Result<()> {
    let half = problem(DeviceKind::Cpu, DType::BF16);
    let dense = plan_problem(&half, &on(Backend::Dense).with_score(phase()))?.to_string();
    assert_eq!(
        dense,
        "Dense (tensor operations), because the caller asked for it; accumulates in F32; phase Precise; \
         22.7 MiB of workspace; converts q, k and v to F32; repeats k and v for each query head; \
         splits q and k; transposes k"
    );
    let fused = plan_problem(&half, &on(Backend::Auto))?;
    let text = fused.to_string();
    assert!(text.starts_with("FusedCpu ("), "{text}");
    for part in [
        fused.kernel.as_str(),
        "because the tensors are on the CPU",
        "accumulates in F32",
        "MiB of workspace",
    ] {
        assert!(text.contains(part), "{text}");
    }
    assert!(!text.contains("phase"), "{text}");
    for copy in &fused.copies {
        assert!(text.contains(copy.as_str()), "{text}");
    }
    Ok(())
}

#[test]
fn plan_refuses_what_attend_refuses() -> Result<()> {
    let q = Tensor::zeros((1, 3, 4, 8), DType::F32, &Device::Cpu)?;
    let k = Tensor::zeros((1, 2, 4, 8), DType::F32, &Device::Cpu)?;
    for backend in [Backend::Auto, Backend::Dense, Backend::Fused] {
        let spec = on(backend);
        let (planned, attended) = (
            refusal(plan(&q, &k, &k, &spec)),
            refusal(attend(&q, &k, &k, &spec)),
        );
        assert_eq!(
            planned.lines().next(),
            attended.lines().next(),
            "{planned}\n{attended}"
        );
        assert!(planned.contains("k has 2 heads, which must divide q's 3"));
    }
    Ok(())
}
