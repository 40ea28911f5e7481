//! The backward pass: one walk over the tiles, five products in each.
//!
//! With P = e^(s − log-sum-exp) computed anew, δ = Σ out · grad and dS = P (grad · v − δ): dv sums P · grad over
//! the queries, dk sums dS · q, and dq sums dS · k over the keys; a phase splits dS in two, one for each part of
//! q and k. A task owns some keys of one key/value head, so dk and dv are its own. Where several tasks share the
//! queries, each adds up a dq of its own and these are added in the keys' order.

use super::distance::Distances;
use super::kernel::Scored;
use super::lanes::{Lanes, Real, Work};
use super::pack::{Aligned, Tokens};
use super::product::{Product, Tile};
use super::score::{Pairs, RowScore};
use super::tasks::{share, take};
use super::visibility::{extent, KeyMask, Sight};
use super::{BackwardJob, Dims, Gradients, Side, Widths, KEY_BLOCK};
use crate::attend::problem::Resolved;
use std::ops::Range;

/// Queries of a tile: fewer than in the forward pass, since three tiles and two sums are in use at a time.
const QUERY_ROWS: usize = 48;

/// The queries' side, packed once for all tasks, (B, H, T) rows of each.
struct Queries<S> {
    /// Times the scale, [`Widths::score_padded`] wide.
    q: Aligned<S>,
    /// [`Widths::value_padded`] wide.
    grad: Aligned<S>,
    delta: Vec<S>,
}

/// One task: some key blocks of one key/value head.
struct KeyRange<'a, S> {
    batch: usize,
    kv_head: usize,
    key_blocks: Range<usize>,
    dk: &'a mut [S],
    dv: &'a mut [S],
    /// Of the group's heads one after another, `tokens` of each.
    dq: &'a mut [S],
    tokens: Range<usize>,
}

/// The memory of one thread.
struct Scratch<S> {
    k_transposed: Aligned<S>,
    v_transposed: Aligned<S>,
    k_rows: Aligned<S>,
    scores: Aligned<S>,
    phases: Aligned<S>,
    weights: Aligned<S>,
    factors: Aligned<S>,
    dk: Aligned<S>,
    dv: Aligned<S>,
    columns: Vec<Range<usize>>,
}

/// What all tasks read.
struct Context<'a, S> {
    job: BackwardJob<'a, S>,
    widths: Widths,
    queries: Side<'a>,
    keys: Side<'a>,
    distances: Distances<S>,
}

pub(super) fn backward<S: Real>(job: BackwardJob<'_, S>) -> Gradients<S> {
    let Dims {
        b,
        h,
        g,
        t,
        s,
        d,
        e,
    } = job.call.dims;
    let mut dk = vec![S::ZERO; b * g * s * d];
    let mut dv = vec![S::ZERO; b * g * s * e];
    if b * h * t * s == 0 {
        let dq = vec![S::ZERO; b * h * t * d];
        return Gradients { dq, dk, dv };
    }
    let context = Context {
        widths: Widths::new(job.call, job.kernel.width()),
        queries: Side::new(&job.call.q_positions, QUERY_ROWS),
        keys: Side::new(&job.call.k_positions, KEY_BLOCK),
        distances: Distances::new(job.call),
        job,
    };
    let packed = context.pack_queries();
    let width = context.widths.score_padded();
    let group = h / g;

    let ranges: Vec<Vec<KeyBlocks>> = (0..b).map(|batch| context.cut(batch)).collect();
    let mut dq = vec![S::ZERO; b * h * t * width];
    // The first range of each head writes dq itself, the others write what is added to it.
    let mut others: Vec<Vec<S>> = ranges
        .iter()
        .flat_map(|ranges| (0..g).flat_map(|_| ranges.iter().skip(1)))
        .map(|range| vec![S::ZERO; group * range.tokens.len() * width])
        .collect();
    let mut tasks = Vec::new();
    {
        let (mut dk, mut dv, mut dq) = (&mut dk[..], &mut dv[..], &mut dq[..]);
        let mut others = others.iter_mut();
        for (batch, ranges) in ranges.iter().enumerate() {
            for kv_head in 0..g {
                for (i, range) in ranges.iter().enumerate() {
                    let first = range.blocks.start * KEY_BLOCK;
                    let keys = (range.blocks.end * KEY_BLOCK).min(s) - first;
                    let (dq, tokens) = match i {
                        0 => (take(&mut dq, group * t * width), 0..t),
                        _ => (
                            others.next().map(|x| &mut x[..]).unwrap_or_default(),
                            range.tokens.clone(),
                        ),
                    };
                    tasks.push(KeyRange {
                        batch,
                        kv_head,
                        key_blocks: range.blocks.clone(),
                        dk: take(&mut dk, keys * d),
                        dv: take(&mut dv, keys * e),
                        dq,
                        tokens,
                    });
                }
            }
        }
    }
    context.run_all(tasks, &packed);
    drop(packed);

    // In the order in which they were cut: the sum is the same whoever did what.
    let mut others = others.into_iter();
    for (batch, ranges) in ranges.iter().enumerate() {
        for kv_head in 0..g {
            for range in ranges.iter().skip(1) {
                let Some(part) = others.next() else { continue };
                let len = range.tokens.len() * width;
                for (head, part) in part.chunks_exact(len.max(1)).enumerate() {
                    let row = (batch * h + kv_head * group + head) * t + range.tokens.start;
                    for (sum, x) in dq[row * width..][..len].iter_mut().zip(part) {
                        *sum += *x;
                    }
                }
            }
        }
    }
    Gradients {
        dq: context.finish_dq(dq),
        dk,
        dv,
    }
}

/// Neighbouring key blocks and the queries that see any of them.
struct KeyBlocks {
    blocks: Range<usize>,
    tokens: Range<usize>,
}

/// Into how many ranges each head's keys are cut, so that `heads` of them keep `threads` threads busy.
fn ranges_for(heads: usize, threads: usize) -> usize {
    /// Each range beyond the first costs a dq.
    const MOST: usize = 8;
    let busy = |ranges: usize| {
        let tasks = ranges * heads;
        tasks as f64 / tasks.next_multiple_of(threads) as f64
    };
    (1..=MOST)
        .find(|ranges| busy(*ranges) >= 0.85)
        .unwrap_or(MOST)
}

impl<S: Real> Context<'_, S> {
    /// The ranges of one batch row's keys, equal in tiles that are looked at.
    fn cut(&self, batch: usize) -> Vec<KeyBlocks> {
        let Dims { b, g, t, .. } = self.job.call.dims;
        let (queries, keys) = (self.queries.blocks(batch), self.keys.blocks(batch));
        let ranges = ranges_for(b * g, rayon::current_num_threads()).min(keys.len());
        if ranges <= 1 {
            return vec![KeyBlocks {
                blocks: 0..keys.len(),
                tokens: 0..t,
            }];
        }
        // For each key block, the query blocks that see it: how many, the first, the last.
        let seen: Vec<(usize, Option<(usize, usize)>)> = keys
            .iter()
            .map(|k| {
                let sees = |q: &usize| queries[*q].sight(k, self.job.call) != Sight::None;
                let seeing = || (0..queries.len()).filter(sees);
                (seeing().count(), seeing().next().zip(seeing().next_back()))
            })
            .collect();
        let total: usize = seen.iter().map(|(count, _)| count).sum();
        let (mut cuts, mut done, mut start) = (Vec::new(), 0, 0);
        for (block, (count, _)) in seen.iter().enumerate() {
            done += count;
            let last = block + 1 == seen.len();
            if last || done * ranges >= total * (cuts.len() + 1) && cuts.len() + 1 < ranges {
                let spans = || seen[start..block + 1].iter().filter_map(|(_, span)| *span);
                let first = spans().map(|(first, _)| first).min().unwrap_or(0);
                let end = spans().map(|(_, last)| last + 1).max().unwrap_or(0);
                cuts.push(KeyBlocks {
                    blocks: start..block + 1,
                    tokens: (first * QUERY_ROWS).min(t)..(end * QUERY_ROWS).min(t),
                });
                start = block + 1;
            }
        }
        cuts
    }

    fn pack_queries(&self) -> Queries<S> {
        let Dims { b, h, t, .. } = self.job.call.dims;
        let widths = &self.widths;
        let (q_width, v_width) = (widths.score_padded(), widths.value_padded);
        let mut packed = Queries {
            q: Aligned::zeros(b * h * t * q_width),
            grad: Aligned::zeros(b * h * t * v_width),
            delta: vec![S::ZERO; b * h * t],
        };
        let tasks = (packed.q.chunks_mut(t * q_width))
            .zip(packed.grad.chunks_mut(t * v_width))
            .zip(packed.delta.chunks_mut(t))
            .enumerate()
            .flat_map(|(head, ((q, grad), delta))| {
                const ROWS: usize = 4 * QUERY_ROWS;
                (q.chunks_mut(ROWS * q_width))
                    .zip(grad.chunks_mut(ROWS * v_width))
                    .zip(delta.chunks_mut(ROWS))
                    .enumerate()
                    .map(move |(block, rows)| (head, block * ROWS, rows))
            })
            .collect();
        let scale = S::from_f64(self.job.call.score.scale());
        share(
            tasks,
            || (),
            |_, (head, start, ((q, grad), delta))| {
                let first = head * t + start;
                let (batch, head) = (head / h, head % h);
                // A query that saw nothing is padding here, whatever is in it and in its gradient: 0 · NaN is NaN.
                let positions = self.job.call.q_positions.row(batch)[start..].iter();
                let positions: Vec<i64> = positions
                    .zip(first..first + delta.len())
                    .map(|(position, row)| {
                        if self.job.rows.saw_nothing(row) {
                            -1
                        } else {
                            *position
                        }
                    })
                    .collect();
                let tokens = Tokens {
                    batch,
                    head,
                    start,
                    positions: &positions,
                };
                let BackwardJob {
                    q: queries,
                    grad: grads,
                    out,
                    ..
                } = self.job;
                widths.copy_score_rows(queries, tokens, scale, q);
                grads.copy_rows(tokens, 0..widths.value, S::ONE, grad, v_width);
                for (i, (delta, grad)) in delta.iter_mut().zip(grad.chunks(v_width)).enumerate() {
                    if positions[i] >= 0 {
                        *delta = out.dot([batch, head, start + i], grad);
                    }
                }
            },
        );
        packed
    }

    fn run_all(&self, tasks: Vec<KeyRange<'_, S>>, packed: &Queries<S>) {
        let widths = &self.widths;
        let tile = QUERY_ROWS * KEY_BLOCK;
        let scratch = || Scratch {
            k_transposed: Aligned::zeros(widths.score() * KEY_BLOCK),
            v_transposed: Aligned::zeros(widths.value * KEY_BLOCK),
            k_rows: Aligned::zeros(widths.score_padded() * KEY_BLOCK),
            scores: Aligned::zeros(tile),
            phases: Aligned::zeros(usize::from(self.job.kernel.has_phase()) * tile),
            weights: Aligned::zeros(tile),
            factors: Aligned::zeros(KEY_BLOCK),
            dk: Aligned::zeros(widths.score_padded() * KEY_BLOCK),
            dv: Aligned::zeros(widths.value_padded * KEY_BLOCK),
            columns: vec![0..KEY_BLOCK; QUERY_ROWS],
        };
        share(tasks, scratch, |scratch, mut task| {
            let blocks = task.key_blocks.clone();
            let (mut dk, mut dv) = (std::mem::take(&mut task.dk), std::mem::take(&mut task.dv));
            for key_block in blocks {
                self.run(scratch, &mut task, key_block, packed);
                let keys = self.keys.mask(task.batch, key_block).positions.len();
                self.store_keys(
                    scratch,
                    take(&mut dk, keys * widths.score()),
                    take(&mut dv, keys * widths.value),
                );
            }
        });
    }

    /// All queries of the group against one key block.
    fn run(
        &self,
        scratch: &mut Scratch<S>,
        task: &mut KeyRange<'_, S>,
        key_block: usize,
        packed: &Queries<S>,
    ) {
        let call = self.job.call;
        let Dims { h, g, t, .. } = call.dims;
        let (batch, group, widths) = (task.batch, h / g, &self.widths);
        let (q_width, v_width) = (widths.score_padded(), widths.value_padded);
        let keys = self.keys.mask(batch, key_block);
        self.pack_keys(scratch, task, key_block, keys.positions);

        let positions = call.q_positions.row(batch);
        let segments = call.q_positions.segments(batch);
        for head in 0..group {
            let query_head = task.kv_head * group + head;
            for queries in self.queries.blocks(batch) {
                let partly = match queries.sight(keys.block, call) {
                    Sight::None => continue,
                    Sight::Some => true,
                    Sight::All => false,
                };
                let tokens = queries.tokens.clone();
                let first = (batch * h + query_head) * t + tokens.start;
                let rows = first..first + tokens.len();
                let dq_row = head * task.tokens.len() + tokens.start - task.tokens.start;
                self.job.kernel.backward(TileStep {
                    positions: &positions[tokens.clone()],
                    segments: segments.map(|s| &s[tokens.clone()]),
                    queries: &packed.q[rows.start * q_width..rows.end * q_width],
                    grad: &packed.grad[rows.start * v_width..rows.end * v_width],
                    greatest: &self.job.rows.greatest[rows.clone()],
                    log_sum: &self.job.rows.log_sum[rows.clone()],
                    delta: &packed.delta[rows],
                    scratch: &mut *scratch,
                    dq: &mut task.dq[dq_row * q_width..][..tokens.len() * q_width],
                    head: query_head,
                    keys,
                    partly,
                    widths,
                    distances: &self.distances,
                    call,
                });
            }
        }
    }

    fn pack_keys(
        &self,
        scratch: &mut Scratch<S>,
        task: &KeyRange<'_, S>,
        key_block: usize,
        positions: &[i64],
    ) {
        let tokens = Tokens {
            batch: task.batch,
            head: task.kv_head,
            start: key_block * KEY_BLOCK,
            positions,
        };
        let BackwardJob { k, v, .. } = self.job;
        k.copy_transposed(tokens, &mut scratch.k_transposed, KEY_BLOCK);
        v.copy_transposed(tokens, &mut scratch.v_transposed, KEY_BLOCK);
        (self.widths).copy_score_rows(k, tokens, S::ONE, &mut scratch.k_rows);
        scratch.dk.fill(S::ZERO);
        scratch.dv.fill(S::ZERO);
    }

    fn store_keys(&self, scratch: &Scratch<S>, dk: &mut [S], dv: &mut [S]) {
        let widths = &self.widths;
        let sums = scratch.dk.chunks(widths.score_padded());
        for (to, sums) in dk.chunks_mut(widths.score()).zip(sums) {
            for (to, x) in to.iter_mut().zip(widths.unpadded(sums)) {
                *to = *x;
            }
        }
        let sums = scratch.dv.chunks(widths.value_padded);
        for (to, sums) in dv.chunks_mut(widths.value).zip(sums) {
            to.copy_from_slice(&sums[..widths.value]);
        }
    }

    /// Scales dq and takes its padding out.
    fn finish_dq(&self, mut dq: Vec<S>) -> Vec<S> {
        let (widths, scale) = (&self.widths, S::from_f64(self.job.call.score.scale()));
        for row in dq.chunks_exact_mut(widths.score_padded()) {
            for x in &mut row[..widths.dot] {
                *x *= scale;
            }
        }
        if widths.score() == widths.score_padded() {
            return dq;
        }
        dq.chunks_exact(widths.score_padded())
            .flat_map(|row| widths.unpadded(row))
            .copied()
            .collect()
    }
}

impl Widths {
    /// The D elements of a padded row of q or k.
    fn unpadded<'a, S>(&self, row: &'a [S]) -> impl Iterator<Item = &'a S> {
        let phase = self.dot_padded..self.dot_padded + self.phase;
        row[..self.dot].iter().chain(&row[phase])
    }
}

/// One tile: scores and weights anew, then their part of each gradient.
pub(super) struct TileStep<'a, S> {
    positions: &'a [i64],
    segments: Option<&'a [i64]>,
    queries: &'a [S],
    grad: &'a [S],
    greatest: &'a [S],
    log_sum: &'a [S],
    delta: &'a [S],
    scratch: &'a mut Scratch<S>,
    dq: &'a mut [S],
    /// Query head.
    head: usize,
    keys: KeyMask<'a>,
    /// Whether some pairs are invisible.
    partly: bool,
    widths: &'a Widths,
    distances: &'a Distances<S>,
    call: &'a Resolved,
}

impl<L: Lanes, R: RowScore<L>> Work<L> for Scored<'_, TileStep<'_, L::Scalar>, R> {
    type Output = ();

    #[inline(always)]
    fn run(self, lanes: L) {
        let Self { mut step, scores } = self;
        let Some((rows, columns)) = step.extent() else {
            return;
        };
        let widths = step.widths;
        let (q_width, v_width) = (widths.score_padded(), widths.value_padded);
        let (queries, grad) = (
            &step.queries[rows.start * q_width..],
            &step.grad[rows.start * v_width..],
        );
        // A part of the queries, or the gradient, times keys or values: a tile of T × S.
        let pairwise = |a: &[L::Scalar], stride, depth, b: &[L::Scalar], c: &mut [L::Scalar]| {
            lanes.run(Product {
                rows: rows.len(),
                columns: columns.next_multiple_of(L::WIDTH),
                depth,
                a: Tile {
                    data: a,
                    row_stride: stride,
                    column_stride: 1,
                },
                b,
                b_stride: KEY_BLOCK,
                c: &mut c[rows.start * KEY_BLOCK..],
                c_stride: KEY_BLOCK,
                accumulate: false,
            })
        };
        let (k, v) = (&step.scratch.k_transposed, &step.scratch.v_transposed);
        pairwise(queries, q_width, widths.dot, k, &mut step.scratch.scores);
        if R::PHASE {
            let (q, k) = (&queries[widths.dot_padded..], &k[widths.dot * KEY_BLOCK..]);
            pairwise(q, q_width, widths.phase, k, &mut step.scratch.phases);
        }
        pairwise(grad, v_width, widths.value, v, &mut step.scratch.weights);

        let score = scores[step.head];
        for row in rows.clone() {
            step.differentiate(lanes, row, score);
        }

        // Sums over queries for the keys, and over keys for the queries.
        let over_queries =
            |tile: &[L::Scalar], b: &[L::Scalar], stride, width, c: &mut [L::Scalar]| {
                lanes.run(Product {
                    rows: columns,
                    columns: width,
                    depth: rows.len(),
                    a: Tile {
                        data: &tile[rows.start * KEY_BLOCK..],
                        row_stride: 1,
                        column_stride: KEY_BLOCK,
                    },
                    b,
                    b_stride: stride,
                    c,
                    c_stride: stride,
                    accumulate: true,
                })
            };
        let over_keys = |tile: &[L::Scalar], b: &[L::Scalar], width, c: &mut [L::Scalar]| {
            lanes.run(Product {
                rows: rows.len(),
                columns: width,
                depth: columns,
                a: Tile {
                    data: &tile[rows.start * KEY_BLOCK..],
                    row_stride: KEY_BLOCK,
                    column_stride: 1,
                },
                b,
                b_stride: q_width,
                c,
                c_stride: q_width,
                accumulate: true,
            })
        };
        let Scratch {
            scores,
            phases,
            weights,
            k_rows,
            dk,
            dv,
            ..
        } = &mut *step.scratch;
        let dq = &mut step.dq[rows.start * q_width..];
        over_queries(scores, grad, v_width, v_width, dv);
        over_queries(weights, queries, q_width, widths.dot_padded, dk);
        over_keys(weights, k_rows, widths.dot_padded, dq);
        if R::PHASE {
            let at = widths.dot_padded;
            over_queries(
                phases,
                &queries[at..],
                q_width,
                widths.phase_padded,
                &mut dk[at..],
            );
            over_keys(phases, &k_rows[at..], widths.phase_padded, &mut dq[at..]);
        }
    }
}

impl<S: Real> TileStep<'_, S> {
    /// The rows that see anything, and the number of columns up to the last visible one.
    #[inline(always)]
    fn extent(&mut self) -> Option<(Range<usize>, usize)> {
        let rows = self.positions.len();
        if !self.partly {
            return Some((0..rows, KEY_BLOCK));
        }
        let of_rows = &mut self.scratch.columns[..rows];
        for (columns, position) in of_rows.iter_mut().zip(self.positions) {
            *columns = self.keys.columns(*position, self.call);
        }
        extent(of_rows.iter())
    }

    /// Turns a row's products q·k, q_P·k_P and grad·v into P, the gradient of q_P·k_P and that of q·k, in the same
    /// places: scores, phases and weights.
    #[inline(always)]
    fn differentiate<L, R>(&mut self, lanes: L, row: usize, score: R)
    where
        L: Lanes<Scalar = S>,
        R: RowScore<L>,
    {
        let position = self.positions[row];
        let Scratch {
            scores,
            phases,
            weights,
            factors,
            columns,
            ..
        } = &mut *self.scratch;
        let of_row = row * KEY_BLOCK..(row + 1) * KEY_BLOCK;
        let scores = &mut scores[of_row.clone()][..KEY_BLOCK];
        let weights = &mut weights[of_row.clone()][..KEY_BLOCK];
        let phases = match R::PHASE {
            true => &mut phases[of_row],
            false => &mut [],
        };
        let factors = match R::FACTORS {
            true => self.distances.row(position, &self.keys, self.call, factors),
            false => &factors[..],
        };
        let factors = &factors[..KEY_BLOCK];
        // A row that saw nothing: e^(s − ∞) is 0.
        let greatest = match self.greatest[row] {
            m if m == S::NEG_INFINITY => S::INFINITY,
            m => m,
        };
        let greatest = lanes.splat(greatest);
        let log_sum = lanes.splat(self.log_sum[row]);
        let delta = lanes.splat(self.delta[row]);
        let zero = lanes.splat(S::ZERO);
        for at in (0..KEY_BLOCK / L::WIDTH).map(|v| v * L::WIDTH) {
            let pairs = Pairs {
                dot: lanes.load(&scores[at..]),
                phase: if R::PHASE {
                    lanes.load(&phases[at..])
                } else {
                    zero
                },
                factor: if R::FACTORS {
                    lanes.load(&factors[at..])
                } else {
                    zero
                },
            };
            let s = score.derivative(lanes, pairs);
            let p = lanes.exp(lanes.sub(lanes.sub(s.score, greatest), log_sum));
            let ds = lanes.mul(p, lanes.sub(lanes.load(&weights[at..]), delta));
            lanes.store(p, &mut scores[at..]);
            lanes.store(lanes.mul(ds, s.by_dot), &mut weights[at..]);
            if R::PHASE {
                lanes.store(lanes.mul(ds, s.by_phase), &mut phases[at..]);
            }
        }
        if self.partly {
            let query = (position, self.segments.map(|s| s[row]));
            self.keys
                .hide(scores, S::ZERO, &columns[row], query, self.call);
            self.keys
                .hide(weights, S::ZERO, &columns[row], query, self.call);
            if R::PHASE {
                self.keys
                    .hide(phases, S::ZERO, &columns[row], query, self.call);
            }
        }
    }
}
