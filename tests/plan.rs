//! What `plan` promises: the path of every device and backend, the reasons, the refusals, the copies.

use candle_core::{DType, Device, Result, Tensor};
use candle_posenc::{
    attend, plan, plan_problem, AttendSpec, Backend, DeviceKind, Operand, Path, Plan, Precision,
    Problem, Score,
};

const GPUS: [DeviceKind; 4] = [
    DeviceKind::Cuda { cc: Some((8, 0)) },
    DeviceKind::Cuda { cc: Some((9, 0)) },
    DeviceKind::Cuda { cc: None },
    DeviceKind::Metal,
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
    for device in GPUS.into_iter().chain([DeviceKind::Cpu]) {
        let plan = plan_problem(&problem(device, DType::F32), &on(Backend::Dense))?;
        assert_eq!(plan.path, Path::Dense);
        assert!(plan.reason.contains("asked"), "{}", plan.reason);
        assert_eq!(plan.kernel, "tensor operations");
    }
    Ok(())
}

#[test]
fn auto_without_a_kernel_for_the_device_is_dense_and_says_why() -> Result<()> {
    for device in GPUS {
        let plan = plan_problem(&problem(device, DType::BF16), &on(Backend::Auto))?;
        assert_eq!(plan.path, Path::Dense);
        assert!(
            plan.reason.contains(&format!("{device:?}")) && plan.reason.contains("no fused kernel"),
            "{}",
            plan.reason
        );
    }
    Ok(())
}

#[test]
fn fused_without_a_kernel_for_the_device_is_refused_with_a_way_out() {
    for device in GPUS {
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
fn plan_of_tensors_equals_plan_of_their_problem() -> Result<()> {
    let q = Tensor::zeros((2, 100, 8, 64), DType::BF16, &Device::Cpu)?.transpose(1, 2)?;
    let k = Tensor::zeros((2, 2, 300, 64), DType::BF16, &Device::Cpu)?;
    let v = Tensor::zeros((2, 2, 300, 128), DType::BF16, &Device::Cpu)?;
    let strided = Problem {
        q: Operand {
            dims: [2, 8, 100, 64],
            strides: [51200, 64, 512, 1],
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
