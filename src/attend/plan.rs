//! Which path a call takes, decided from shapes alone, so that it can be asked and tested without a device.

use super::launch::{self, Backward, Demand, Kernel, Pass, ScoreKind};
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
    /// The kernels for NVIDIA GPUs of compute capability 8.0 and later; memory linear in T and S.
    FusedCuda,
}

/// What [`attend`](super::attend) will do with a call, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The implementation.
    pub path: Path,
    /// Why this one.
    pub reason: String,
    /// The code within it: the instruction set of the CPU kernels, the name of the GPU kernel, "tensor operations" for
    /// the dense path.
    pub kernel: String,
    /// The dtype in which scores and sums are held.
    pub accumulate: DType,
    /// How exactly the phase is evaluated, for [`Score::Phase`]. Always [`Precision::Precise`] on the CPU, on the dense
    /// path, and on a GPU for up to 16 queries and wherever tensor cores are not used.
    pub precision: Option<Precision>,
    /// Memory beyond inputs and output that the forward pass of untracked tensors asks for at most, in bytes; on the
    /// dense path without what candle's matrix products set aside.
    pub workspace_bytes: usize,
    /// Copies and conversions of inputs that it makes.
    pub copies: Vec<String>,
    /// The backward pass, on a GPU. None elsewhere: on the CPU it runs the code of `kernel` over memory that grows with
    /// the number of threads, and on the dense path candle differentiates operation by operation.
    pub backward: Option<BackwardPlan>,
}

/// The backward pass of a [`Plan`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackwardPlan {
    /// The names of its kernels in the order in which they run: what is needed of each query, then dk and dv, then dq. A
    /// forward kernel before them runs once more, because the one that made the output leaves nothing for them. The one
    /// for dk and dv runs where k or v is tracked, that for dq where q is.
    pub kernels: Vec<String>,
    /// Memory that the forward pass of tracked tensors leaves for it, beside inputs and output, in bytes; its copies of
    /// inputs are part of it.
    pub saved_bytes: usize,
    /// Memory beyond that, the output's gradient and its own gradients that it asks for at most, in bytes; tables that
    /// the forward pass made are used again.
    pub workspace_bytes: usize,
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
            backward,
        } = self;
        let mebibytes = |bytes: usize| bytes as f64 / (1 << 20) as f64;
        write!(
            f,
            "{path:?} ({kernel}), because {reason}; accumulates in {accumulate:?}"
        )?;
        if let Some(precision) = precision {
            write!(f, "; phase {precision:?}")?;
        }
        write!(f, "; {:.1} MiB of workspace", mebibytes(*workspace_bytes))?;
        for copy in copies {
            write!(f, "; {copy}")?;
        }
        if let Some(backward) = backward {
            write!(
                f,
                "; backward {}, {:.1} MiB saved for it, {:.1} MiB of workspace",
                backward.kernels.join(", "),
                mebibytes(backward.saved_bytes),
                mebibytes(backward.workspace_bytes)
            )?;
        }
        Ok(())
    }
}

/// The plan for [`attend`](super::attend) of these tensors.
///
/// Positions are not looked at. On a GPU, ones that span 2^30 or more take a kernel without tensor cores, whatever the
/// plan says.
///
/// # Errors
/// As [`attend`](super::attend), positions aside.
pub fn plan(q: &Tensor, k: &Tensor, v: &Tensor, spec: &AttendSpec) -> Result<Plan> {
    plan_problem(&Problem::of(q, k, v)?, spec)
}

/// The plan for a problem that need not exist: no tensors, no device. For GPUs it is that of a build with the feature
/// `cuda`, also in one without.
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
        backward: None,
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
                backward: None,
            })
        }
        (Backend::Auto | Backend::Fused, device) => match cuda_plan(problem, &dims, spec) {
            Ok(plan) => Ok(plan),
            Err(reason) if spec.backend == Backend::Auto => Ok(dense(&reason)),
            Err(reason) => bail!(
                "attend: Backend::Fused was asked for, but {reason} ({device:?}); Backend::Auto would take the dense path"
            ),
        },
    }
}

/// The plan on a GPU, or why there is none.
fn cuda_plan(
    problem: &Problem,
    dims: &Dims,
    spec: &AttendSpec,
) -> std::result::Result<Plan, String> {
    let compute_capability = match problem.device {
        DeviceKind::Cuda { cc: Some(cc) } => cc,
        DeviceKind::Cuda { cc: None } => return Err(
            "there is no fused kernel: this was built without the feature cuda, or the GPU's compute capability was not given"
                .to_string(),
        ),
        device => return Err(format!("this version has no fused kernel for {device:?}")),
    };
    let (major, minor) = compute_capability;
    if compute_capability < launch::OLDEST {
        let (oldest, point) = launch::OLDEST;
        return Err(format!(
            "this version has no fused kernel for compute capability {major}.{minor}, below {oldest}.{point}"
        ));
    }
    if !launch::some_image_fits(crate::gpu::IMAGES, compute_capability) {
        return Err(format!(
            "there is no fused kernel for compute capability {major}.{minor} in this build (CANDLE_POSENC_CUDA_ARCHS says for which)"
        ));
    }
    let score = ScoreKind::of(&spec.score, spec.precision);
    let demand = Demand {
        dims: *dims,
        dtype: problem.dtype,
        score,
        compute_capability,
    };
    let kernel = Kernel::choose(&demand)?;
    let copied = [("q", problem.q), ("k", problem.k), ("v", problem.v)]
        .into_iter()
        .filter(|(_, operand)| kernel.needs_copy(operand, problem.dtype));
    let copied_bytes = copied.clone().map(|(_, operand)| {
        saturating_product(operand.dims).saturating_mul(problem.dtype.size_in_bytes())
    });
    let copied_bytes = copied_bytes.fold(0, usize::saturating_add);
    let turns_bytes = match score {
        ScoreKind::Phase { .. } => {
            let reach = launch::reach(greatest_distance(dims, spec));
            launch::turns_len(reach).saturating_mul(size_of::<[f32; 2]>())
        }
        _ => 0,
    };
    let list_bytes = match are_explicit(spec) {
        true => launch::position_bytes(dims),
        false => 0,
    };
    let position_bytes = match are_explicit(spec) {
        true => position_bytes(dims, spec).saturating_add(list_bytes),
        false => 0,
    };
    Ok(Plan {
        path: Path::FusedCuda,
        reason: format!("the tensors are on a GPU of compute capability {major}.{minor}"),
        kernel: kernel.entry(problem.dtype),
        accumulate: match problem.dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        },
        precision: matches!(score, ScoreKind::Phase { .. }).then_some(kernel.precision()),
        workspace_bytes: saturating_sum([
            launch::workspace_bytes(&kernel, dims),
            copied_bytes,
            turns_bytes,
            position_bytes,
        ]),
        copies: copied
            .map(|(name, _)| format!("makes {name} contiguous"))
            .collect(),
        backward: Some(cuda_backward(&demand, &kernel, copied_bytes, list_bytes)),
    })
}

/// The backward pass on a GPU behind this forward kernel, for which inputs of `copied_bytes` were copied; `list_bytes` of
/// positions have tiles of each kernel's own.
fn cuda_backward(
    demand: &Demand,
    kernel: &Kernel,
    copied_bytes: usize,
    list_bytes: usize,
) -> BackwardPlan {
    let Demand { dims, dtype, .. } = demand;
    let backward = Backward::choose(demand);
    let leaving = backward.forward(demand);
    let left = backward.saved_bytes(dims, *dtype);
    let out = saturating_product([dims.b, dims.h, dims.t, dims.e, dtype.size_in_bytes()]);
    let runs_again = (leaving != *kernel).then(|| leaving.entry(*dtype));
    let (saved_bytes, again_bytes) = match runs_again {
        Some(_) => (0, left.saturating_add(out)),
        None => (left, 0),
    };
    let entries = Pass::ALL.map(|pass| backward.entry(pass, *dtype));
    BackwardPlan {
        kernels: runs_again.into_iter().chain(entries).collect(),
        saved_bytes: saved_bytes.saturating_add(copied_bytes),
        workspace_bytes: saturating_sum([
            backward.workspace_bytes(dims, *dtype),
            // The gradient, where the kernels cannot read it where it lies.
            out,
            again_bytes,
            saturating_product([list_bytes, 3]),
        ]),
    }
}

/// No less than the distance of any query and a key that it sees.
fn greatest_distance(dims: &Dims, spec: &AttendSpec) -> u64 {
    let span = |start: i64, len: usize| {
        let last = start.saturating_add_unsigned(len.saturating_sub(1) as u64);
        (start.max(0), last.max(0))
    };
    let (q, k) = match (&spec.q_positions, &spec.k_positions) {
        (Some(Positions::Span { start: q, .. }), Some(Positions::Span { start: k, .. })) => {
            (span(*q, dims.t), span(*k, dims.s))
        }
        _ if are_explicit(spec) => return u64::MAX,
        // Both end at the same position.
        _ => {
            let longest = span(0, dims.t.max(dims.s));
            (longest, longest)
        }
    };
    launch::greatest_distance(q, k, spec.causal, spec.window_of_64_bits())
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
