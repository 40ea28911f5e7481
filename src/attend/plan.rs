//! Which path a call takes, decided from shapes alone, so that it can be asked and tested without a device.

use super::problem::saturating_product;
use super::{cpu, AttendSpec, Backend, DeviceKind, Precision, Problem, Score};
use candle_core::{bail, DType, Result, Tensor};
use std::fmt;

/// An implementation of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Path {
    /// Tensor operations over a (B, H, T, S) matrix.
    Dense,
    /// Tiles on the host's cores; memory linear in T and S.
    FusedCpu,
}

/// What [`attend`](super::attend) will do with a call, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The implementation.
    pub path: Path,
    /// Why this one.
    pub reason: String,
    /// The code within it: the instruction set of the CPU kernels, "tensor operations" for the dense path.
    pub kernel: String,
    /// The dtype in which scores and sums are held.
    pub accumulate: DType,
    /// How exactly the phase is evaluated, for [`Score::Phase`]. On the CPU always [`Precision::Precise`].
    pub precision: Option<Precision>,
    /// Memory beyond inputs and output that the forward pass asks for at most, in bytes.
    pub workspace_bytes: usize,
    /// Copies and conversions of inputs that it makes.
    pub copies: Vec<String>,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            path,
            reason,
            kernel,
            accumulate,
            precision,
            workspace_bytes,
            copies,
        } = self;
        write!(
            f,
            "{path:?} ({kernel}), because {reason}; accumulates in {accumulate:?}"
        )?;
        if let Some(precision) = precision {
            write!(f, "; phase {precision:?}")?;
        }
        write!(
            f,
            "; {:.1} MiB of workspace",
            *workspace_bytes as f64 / (1 << 20) as f64
        )?;
        for copy in copies {
            write!(f, "; {copy}")?;
        }
        Ok(())
    }
}

/// The plan for [`attend`](super::attend) of these tensors.
///
/// # Errors
/// As [`attend`](super::attend), positions aside.
pub fn plan(q: &Tensor, k: &Tensor, v: &Tensor, spec: &AttendSpec) -> Result<Plan> {
    plan_problem(&Problem::of(q, k, v)?, spec)
}

/// The plan for a problem that need not exist: no tensors, no device.
///
/// # Errors
/// As [`attend`](super::attend), positions aside.
pub fn plan_problem(problem: &Problem, spec: &AttendSpec) -> Result<Plan> {
    let dims = problem.check(spec)?;
    let accumulate = match problem.dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let precision = matches!(spec.score, Score::Phase { .. }).then_some(Precision::Precise);
    let dense = |reason: &str| Plan {
        path: Path::Dense,
        reason: reason.to_string(),
        kernel: "tensor operations".to_string(),
        accumulate,
        precision,
        workspace_bytes: dense_workspace(problem, spec, accumulate),
        copies: dense_copies(problem, accumulate),
    };
    match (spec.backend, problem.device) {
        (Backend::Dense, _) => Ok(dense("the caller asked for it")),
        (Backend::Auto | Backend::Fused, DeviceKind::Cpu) => {
            let mut copies = vec!["packs k and v into tiles".to_string()];
            if problem.dtype != accumulate {
                copies.push(format!("converts {:?} to {accumulate:?} tile by tile", problem.dtype));
            }
            Ok(Plan {
                path: Path::FusedCpu,
                reason: "the tensors are on the CPU".to_string(),
                kernel: cpu::kernel_name(problem.dtype).to_string(),
                accumulate,
                precision,
                workspace_bytes: cpu::forward_workspace_bytes(&dims, problem.dtype),
                copies,
            })
        }
        (Backend::Auto, device) => Ok(dense(&format!(
            "this version has no fused kernel for {device:?}"
        ))),
        (Backend::Fused, device) => bail!(
            "attend: Backend::Fused was asked for, but this version has no fused kernel for {device:?}; Backend::Auto would take the dense path"
        ),
    }
}

/// Scores, their exponentials and the weights are alive together, and for a phase its own matrix too.
fn dense_workspace(problem: &Problem, spec: &AttendSpec, accumulate: DType) -> usize {
    let ([b, h, t, _], s) = (problem.q.dims, problem.k.dims[2]);
    let matrices = match spec.score {
        Score::Dot => 3,
        Score::LinearBias { .. } => 4,
        Score::Phase { .. } => 5,
    };
    saturating_product([b, h, t, s, matrices, accumulate.size_in_bytes()])
}

fn dense_copies(problem: &Problem, accumulate: DType) -> Vec<String> {
    let mut copies = Vec::new();
    if problem.dtype != accumulate {
        copies.push(format!("converts q, k and v to {accumulate:?}"));
    }
    if problem.q.dims[1] != problem.k.dims[1] {
        copies.push("repeats k and v for each query head".to_string());
    }
    for (name, operand) in [("q", problem.q), ("k", problem.k), ("v", problem.v)] {
        if operand.strides != super::Operand::contiguous(operand.dims).strides {
            copies.push(format!("makes {name} contiguous"));
        }
    }
    copies
}
