//! The fused CPU kernels: scores tile by tile, softmax online, nothing of size T × S.
//!
//! A tile is [`QUERY_BLOCK`] queries against [`KEY_BLOCK`] keys. Operands of any strides and dtype are packed into
//! tiles of f32 (f64 for f64) first, so that the arithmetic knows neither. The same code runs on AVX-512, on AVX2
//! and on whatever the compiler makes of arrays; which one, the machine at hand decides.
#![allow(unsafe_code)]

mod backward;
mod distance;
mod forward;
mod kernel;
mod lanes;
mod pack;
mod product;
mod score;
mod tasks;
mod visibility;

use super::problem::{saturating_product, saturating_sum, Dims, Resolved, ResolvedScore};
use crate::host::{Element, View};
use crate::positions::PositionTable;
use candle_core::DType;
use kernel::{Kernel, KernelOf};
use lanes::{Job, Lanes};
use pack::Tokens;
use visibility::{token_blocks, KeyMask, TokenBlock};

pub(crate) use lanes::Real;
pub(crate) use pack::Rows;

/// Rows of a tile: queries, of one head or of several heads that share keys.
const QUERY_BLOCK: usize = 96;
/// Columns of a tile: keys.
const KEY_BLOCK: usize = 64;

/// What the forward pass computes.
pub(crate) struct Forward<T: Element> {
    /// (B, H, T, E)
    pub out: Vec<T>,
    pub rows: RowStatistics<T::Acc>,
    /// `out` before it was rounded to half precision, if that was asked for.
    pub exact_out: Option<Vec<T::Acc>>,
}

/// Facts about each row of scores, (B, H, T). Their sum is the log-sum-exp; apart they keep its small part, which
/// a sum rounds away where scores are huge.
pub(crate) struct RowStatistics<S> {
    /// The greatest visible score, −∞ where none is visible.
    pub greatest: Vec<S>,
    /// Natural logarithm of Σ exp(score − greatest), 0 where none is visible.
    pub log_sum: Vec<S>,
}

impl<S: Real> RowStatistics<S> {
    /// Whether the row has no weight at all. One whose scores are NaN may have the greatest score −∞, but not the
    /// logarithm 0.
    fn saw_nothing(&self, row: usize) -> bool {
        self.greatest[row] == S::NEG_INFINITY && self.log_sum[row] == S::ZERO
    }
}

pub(crate) struct Gradients<T> {
    pub dq: Vec<T>,
    pub dk: Vec<T>,
    pub dv: Vec<T>,
}

/// The instruction set that a call with this dtype will use.
pub(crate) fn kernel_name(dtype: DType) -> &'static str {
    struct Name;
    impl<S> Job<S> for Name {
        type Output = &'static str;
        fn run<L: Lanes<Scalar = S>>(self, _: L) -> &'static str {
            L::NAME
        }
    }
    match dtype {
        DType::F64 => f64::with_lanes(Name),
        _ => f32::with_lanes(Name),
    }
}

/// Memory that [`forward()`] of this dtype asks for at most, beyond its output, in bytes.
pub(crate) fn forward_workspace_bytes(dims: &Dims, dtype: DType) -> usize {
    struct Bytes<'a>(&'a Dims);
    impl<S: Real> Job<S> for Bytes<'_> {
        type Output = usize;
        fn run<L: Lanes<Scalar = S>>(self, _: L) -> usize {
            forward::workspace_elements(self.0, L::WIDTH).saturating_mul(size_of::<S>())
        }
    }
    let Dims { b, h, t, e, .. } = *dims;
    match dtype {
        DType::F64 => f64::with_lanes(Bytes(dims)),
        DType::F32 => f32::with_lanes(Bytes(dims)),
        // The output before it is rounded.
        _ => saturating_sum([
            f32::with_lanes(Bytes(dims)),
            saturating_product([b, h, t, e, size_of::<f32>()]),
        ]),
    }
}

/// Attention of `q` (B,H,T,D) over `k` (B,G,S,D) and `v` (B,G,S,E); `exact_out` only where `save` asks for what
/// the backward pass needs.
pub(crate) fn forward<T: Element>(
    call: &Resolved,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
    save: bool,
) -> Forward<T> {
    let (out, rows) = forward::forward(ForwardJob {
        call,
        kernel: &*T::Acc::with_lanes(KernelOf(call)),
        q: &q,
        k: &k,
        v: &v,
    });
    let (out, exact_out) = T::from_acc_vec(out);
    Forward {
        out,
        rows,
        exact_out: exact_out.filter(|_| save),
    }
}

#[derive(Clone, Copy)]
struct ForwardJob<'a, S> {
    call: &'a Resolved,
    kernel: &'a dyn Kernel<S>,
    q: &'a dyn Rows<S>,
    k: &'a dyn Rows<S>,
    v: &'a dyn Rows<S>,
}

/// Gradients for q, k and v from the one for the output, scores computed anew from `rows`; `out` is as exact as
/// there is. The same on every run with the same number of threads.
pub(crate) fn backward<T: Element>(
    call: &Resolved,
    [q, k, v, grad]: [View<'_, T>; 4],
    out: &dyn Rows<T::Acc>,
    rows: &RowStatistics<T::Acc>,
) -> Gradients<T> {
    let Gradients { dq, dk, dv } = backward::backward(BackwardJob {
        call,
        kernel: &*T::Acc::with_lanes(KernelOf(call)),
        q: &q,
        k: &k,
        v: &v,
        grad: &grad,
        out,
        rows,
    });
    let [dq, dk, dv] = [dq, dk, dv].map(|gradient| T::from_acc_vec(gradient).0);
    Gradients { dq, dk, dv }
}

#[derive(Clone, Copy)]
struct BackwardJob<'a, S> {
    call: &'a Resolved,
    kernel: &'a dyn Kernel<S>,
    q: &'a dyn Rows<S>,
    k: &'a dyn Rows<S>,
    v: &'a dyn Rows<S>,
    grad: &'a dyn Rows<S>,
    out: &'a dyn Rows<S>,
    rows: &'a RowStatistics<S>,
}

/// Widths of the vectors, and the padding that makes them whole vectors of lanes.
#[derive(Debug, Clone, Copy)]
struct Widths {
    /// Coordinates that make q·k; those of the amplitude for a phase.
    dot: usize,
    /// The other coordinates of q and k.
    phase: usize,
    value: usize,
    dot_padded: usize,
    phase_padded: usize,
    value_padded: usize,
}

impl Widths {
    /// For vectors of `width` elements.
    fn new(call: &Resolved, width: usize) -> Self {
        let Dims { d, e, .. } = call.dims;
        let dot = match call.score {
            ResolvedScore::Phase { amp_dim, .. } => amp_dim,
            _ => d,
        };
        Self {
            dot,
            phase: d - dot,
            value: e,
            dot_padded: dot.next_multiple_of(width),
            phase_padded: (d - dot).next_multiple_of(width),
            value_padded: e.next_multiple_of(width),
        }
    }

    /// D
    fn score(&self) -> usize {
        self.dot + self.phase
    }

    /// Elements of a padded row of q or k: the dot part, then the phase part.
    fn score_padded(&self) -> usize {
        self.dot_padded + self.phase_padded
    }

    /// Copies rows of q or k, the dot part times `scale`.
    fn copy_score_rows<S: Real>(
        &self,
        from: &dyn Rows<S>,
        tokens: Tokens<'_>,
        scale: S,
        to: &mut [S],
    ) {
        let stride = self.score_padded();
        from.copy_rows(tokens, 0..self.dot, scale, to, stride);
        if self.phase > 0 {
            let to = &mut to[self.dot_padded..];
            from.copy_rows(tokens, self.dot..self.score(), S::ONE, to, stride);
        }
    }
}

/// The queries or the keys: positions, and blocks of them.
struct Side<'a> {
    table: &'a PositionTable,
    /// One list for each row of the table.
    blocks: Vec<Vec<TokenBlock>>,
}

impl<'a> Side<'a> {
    fn new(table: &'a PositionTable, block: usize) -> Self {
        let blocks = |row| token_blocks(table.row(row), table.segments(row), block);
        Self {
            table,
            blocks: (0..table.rows).map(blocks).collect(),
        }
    }

    fn blocks(&self, b: usize) -> &[TokenBlock] {
        &self.blocks[if self.blocks.len() == 1 { 0 } else { b }]
    }

    fn mask(&self, b: usize, block: usize) -> KeyMask<'_> {
        let block = &self.blocks(b)[block];
        let tokens = block.tokens.clone();
        KeyMask {
            block,
            positions: &self.table.row(b)[tokens.clone()],
            segments: self.table.segments(b).map(|s| &s[tokens]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{attend_with_lse, AttendSpec, Backend, Problem, Score};
    use super::lanes::on_all_lanes;
    use super::*;
    use crate::positions::Positions;
    use candle_core::{bail, Device, Result, Tensor, Var};

    /// One call in f32, and its results on the dense path in f64: output, log-sum-exp, dq, dk, dv.
    struct Case {
        call: Resolved,
        inputs: [Tensor; 4],
        expected: [Vec<f64>; 5],
    }

    fn case([b, h, g, t, s, d, e]: [usize; 7], spec: AttendSpec) -> Result<Case> {
        let normal =
            |dims: (usize, usize, usize, usize)| Tensor::randn(0f32, 1., dims, &Device::Cpu);
        let (q, k, v) = (
            normal((b, h, t, d))?,
            normal((b, g, s, d))?,
            normal((b, g, s, e))?,
        );
        let grad = normal((b, h, t, e))?;
        let call = Problem::of(&q, &k, &v)?.resolve(&spec)?;
        let double = |x: &Tensor| Var::from_tensor(&x.to_dtype(DType::F64)?);
        let (dq, dk, dv) = (double(&q)?, double(&k)?, double(&v)?);
        let dense = attend_with_lse(&dq, &dk, &dv, &spec.with_backend(Backend::Dense))?;
        let loss = (&dense.out * grad.to_dtype(DType::F64)?)?.sum_all()?;
        let grads = loss.backward()?;
        let flat = |x: &Tensor| x.flatten_all()?.to_vec1::<f64>();
        let gradient = |x: &Var| grads.get(x).map_or(Ok(Vec::new()), flat);
        Ok(Case {
            expected: [
                flat(&dense.out)?,
                flat(&dense.lse)?,
                gradient(&dq)?,
                gradient(&dk)?,
                gradient(&dv)?,
            ],
            call,
            inputs: [q, k, v, grad],
        })
    }

    #[derive(Clone, Copy)]
    struct Compare<'a> {
        call: &'a Resolved,
        inputs: [View<'a, f32>; 4],
        expected: &'a [Vec<f64>; 5],
    }

    impl Job<f32> for Compare<'_> {
        type Output = ();

        fn run<L: Lanes<Scalar = f32>>(self, lanes: L) {
            let [q, k, v, grad] = self.inputs;
            let call = self.call;
            let kernel = &*KernelOf(call).run(lanes);
            let (out, rows) = forward::forward(ForwardJob {
                call,
                kernel,
                q: &q,
                k: &k,
                v: &v,
            });
            let Dims { b, h, t, e, .. } = call.dims;
            let gradients = backward::backward(BackwardJob {
                call,
                kernel,
                q: &q,
                k: &k,
                v: &v,
                grad: &grad,
                out: &View {
                    data: &out[..],
                    dims: [b, h, t, e],
                    strides: [h * t * e, t * e, e, 1],
                },
                rows: &rows,
            });
            let rows = rows.greatest.iter().zip(&rows.log_sum);
            let lse: Vec<f32> = rows.map(|(greatest, log_sum)| greatest + log_sum).collect();
            let results = [&out, &lse, &gradients.dq, &gradients.dk, &gradients.dv];
            for (i, (result, expected)) in results.into_iter().zip(self.expected).enumerate() {
                assert_eq!(result.len(), expected.len());
                let finite = expected.iter().filter(|x| x.is_finite());
                let greatest = finite.fold(0f64, |a, b| a.max(b.abs()));
                for (x, expected) in result.iter().zip(expected) {
                    let error = match f64::from(*x) {
                        x if x == *expected => 0.,
                        x => (x - expected).abs(),
                    };
                    assert!(
                        error <= 2e-5 * greatest,
                        "{} result {i}: {x}, {expected}",
                        L::NAME
                    );
                }
            }
        }
    }

    /// Padding, positions out of order and segments that change within tiles, other ones in each row.
    fn scattered(b: usize, len: usize) -> Result<Positions> {
        let tokens = || (0..b).flat_map(|row| (0..len).map(move |i| (row, i)));
        let position = |(row, i): (usize, usize)| match (i + row) % 7 {
            3 => -1,
            5 => ((i * 17 + row) % len) as i64,
            _ => i as i64,
        };
        let tensor = |x: Vec<i64>| Tensor::from_vec(x, (b, len), &Device::Cpu);
        let segments = tokens().map(|(row, i)| (i / (len / 2 + row + 1)) as i64);
        Positions::explicit(
            tensor(tokens().map(position).collect())?,
            Some(tensor(segments.collect())?),
        )
    }

    #[test]
    fn kernels_on_every_instruction_set_equal_dense() -> Result<()> {
        // Many tiles; one block of queries over keys in parts; narrow and odd widths.
        for dims in [
            [2, 4, 2, 130, 150, 20, 24],
            [1, 4, 1, 2, 2100, 33, 17],
            [2, 4, 4, 50, 97, 2, 1],
        ] {
            let [b, h, _, t, s, d, _] = dims;
            let scores = [
                Score::Dot,
                Score::LinearBias {
                    slopes: [0.5, 0.25, 0.1, 0.][..h].into(),
                },
                Score::Phase {
                    amp_dim: d.div_ceil(2) - usize::from(d > 2),
                    alpha: 0.1,
                    phase_scale: None,
                },
            ];
            for score in scores {
                let causal = AttendSpec::causal().with_score(score);
                let window = Some(40);
                let specs = [
                    causal.clone(),
                    AttendSpec {
                        window,
                        ..causal.clone()
                    },
                    AttendSpec {
                        window,
                        causal: false,
                        ..causal.clone()
                    },
                    causal.with_positions(scattered(b, t)?, scattered(b, s)?),
                ];
                for spec in specs {
                    compare_on_all_lanes(case(dims, spec)?)?;
                }
            }
        }
        Ok(())
    }

    fn compare_on_all_lanes(case: Case) -> Result<()> {
        let Case {
            call,
            inputs,
            expected,
        } = case;
        let host = inputs
            .iter()
            .map(|x| Ok((x.flatten_all()?.to_vec1::<f32>()?, x.layout().clone())))
            .collect::<Result<Vec<_>>>()?;
        let [Ok(q), Ok(k), Ok(v), Ok(grad)] =
            [0, 1, 2, 3].map(|i: usize| View::new(&host[i].0, &host[i].1))
        else {
            bail!("the inputs have rank 4")
        };
        on_all_lanes(Compare {
            call: &call,
            inputs: [q, k, v, grad],
            expected: &expected,
        });
        Ok(())
    }
}
