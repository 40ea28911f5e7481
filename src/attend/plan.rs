//! Which path a call takes, decided from shapes alone, so that it can be asked and tested without a device.

use super::problem::{saturating_product, saturating_sum, Dims};
use super::{cpu, AttendSpec, Backend, DeviceKind, Precision, Problem, Score};
use crate::positions::Positions;
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
    /// Memory beyond inputs and output that the forward pass of untracked tensors asks for at most, in bytes; on the
    /// dense path without what candle's matrix products set aside.
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
        workspace_bytes: saturating_sum([
            dense_workspace(&dims, spec, accumulate),
            position_bytes(&dims, spec),
        ]),
        copies: dense_copies(problem, spec, accumulate),
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
                workspace_bytes: saturating_sum([
                    cpu::forward_workspace_bytes(&dims, problem.dtype),
                    position_bytes(&dims, spec),
                ]),
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

/// Whether positions are tensors, which may have a row for each batch row, and padding in them.
fn are_explicit(spec: &AttendSpec) -> bool {
    [&spec.q_positions, &spec.k_positions]
        .into_iter()
        .any(|positions| matches!(positions, Some(Positions::Explicit { .. })))
}

/// Positions on the host, and what is said about blocks of them.
fn position_bytes(dims: &Dims, spec: &AttendSpec) -> usize {
    /// Of a [`TokenBlock`](super::cpu), for each of its tokens.
    const OF_BLOCK: usize = 4;
    // Segments lie beside positions, and reading a tensor takes a copy.
    let (rows, words) = match are_explicit(spec) {
        true => (dims.b, 4),
        false => (1, 1),
    };
    let tokens = saturating_sum([dims.t, dims.s]);
    saturating_product([rows, tokens, words * size_of::<i64>() + OF_BLOCK])
}

/// Two matrices of scores, the mask's −∞, exponentials and weights are alive together; the operands are repeated,
/// the keys transposed too, and split for a phase.
fn dense_workspace(dims: &Dims, spec: &AttendSpec, accumulate: DType) -> usize {
    let Dims {
        b,
        h,
        g,
        t,
        s,
        d,
        e,
    } = *dims;
    let rows = if are_explicit(spec) { b } else { 1 };
    // A visible pair is a byte and a distance an f64, each in a vector that grows by doubling.
    let (pair_bytes, splits) = match spec.score {
        Score::Dot => (3, 0),
        Score::LinearBias { .. } => (3 + 3 * size_of::<f64>(), 0),
        Score::Phase { .. } => (3 + 3 * size_of::<f64>(), 1),
    };
    let elements = saturating_sum([
        saturating_product([b, h, t, s, 5]),
        saturating_product([b, h, t, d, 3 + splits]),
        saturating_product([b, h, t, e, 3]),
        // Maximum, sum, and what protects rows that see nothing.
        saturating_product([b, h, t, 8]),
        saturating_product([b, g, s, saturating_sum([d, e]), 2]),
        saturating_product([b, h, s, d, 2 + 2 * splits]),
        saturating_product([b, h, s, e]),
    ]);
    saturating_sum([
        saturating_product([elements, accumulate.size_in_bytes()]),
        saturating_product([rows, t, s, pair_bytes]),
    ])
}

fn dense_copies(problem: &Problem, spec: &AttendSpec, accumulate: DType) -> Vec<String> {
    let mut copies = Vec::new();
    if problem.dtype != accumulate {
        copies.push(format!("converts q, k and v to {accumulate:?}"));
    }
    if problem.q.dims[1] != problem.k.dims[1] {
        copies.push("repeats k and v for each query head".to_string());
    }
    for (name, operand) in [("q", problem.q), ("k", problem.k), ("v", problem.v)] {
        if !operand.is_contiguous() {
            copies.push(format!("makes {name} contiguous"));
        }
    }
    if matches!(spec.score, Score::Phase { .. }) {
        copies.push("splits q and k".to_string());
    }
    copies.push("transposes k".to_string());
    copies
}
