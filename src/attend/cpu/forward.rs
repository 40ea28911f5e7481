//! The forward pass: blocks of queries, each over all the keys it sees, softmax online.
//!
//! For each query m is the greatest score so far, l the sum of e^(s − m) and o the sum of e^(s − m) · v; a tile
//! that raises m shrinks l and o first. Many blocks share keys packed once for all of them; where there is one
//! block only (decoding), its keys are packed tile by tile and nothing of size S is allocated.

use super::distance::{Distances, LONGEST_TABLE};
use super::kernel::Scored;
use super::lanes::{Lanes, Real, Work};
use super::pack::{Aligned, Tokens};
use super::product::{Product, Tile};
use super::score::{Pairs, RowScore};
use super::tasks::{share, take};
use super::visibility::{extent, KeyMask, Sight};
use super::{Dims, ForwardJob, RowStatistics, Side, Widths, KEY_BLOCK, QUERY_BLOCK};
use crate::attend::problem::{saturating_product, saturating_sum, Resolved};
use std::ops::Range;

/// How the rows of one call are cut into blocks.
#[derive(Debug, Clone, Copy)]
struct Cut {
    /// Query heads in a block: more than one only where all their queries fit into it.
    heads: usize,
    /// Parts into which each block's keys are cut, merged afterwards.
    parts: usize,
    /// Whether blocks share packed keys.
    shared: bool,
}

impl Cut {
    /// By shape alone, so that results do not depend on the number of threads.
    fn new(dims: &Dims) -> Self {
        /// Tasks that keep a machine busy, and keys that make a task worth it.
        const TASKS: usize = 16;
        const KEYS: usize = 1024;
        let Dims { b, h, g, t, s, .. } = *dims;
        let group = h / g;
        let heads = (QUERY_BLOCK / t.max(1)).min(group).max(1);
        let blocks = saturating_product([group.div_ceil(heads), t.div_ceil(QUERY_BLOCK)]);
        let parts = if blocks == 1 {
            let key_heads = saturating_product([b, g]).max(1);
            TASKS.div_ceil(key_heads).min(s / KEYS).max(1)
        } else {
            1
        };
        Self {
            heads,
            parts,
            shared: blocks > 1,
        }
    }
}

/// Elements beyond the output that [`forward`] allocates at most, with vectors of `width`.
pub(super) fn workspace_elements(dims: &Dims, width: usize) -> usize {
    let Dims {
        b,
        h,
        g,
        t,
        s,
        d,
        e,
        ..
    } = *dims;
    let cut = Cut::new(dims);
    let padded = |x: usize, to: usize| saturating_product([x.div_ceil(to), to]);
    // A phase pads both of its parts.
    let (d, e) = (saturating_sum([padded(d, width), width]), padded(e, width));
    let packed = match cut.shared {
        true => saturating_product([b, g, padded(s, KEY_BLOCK), saturating_sum([d, e])]),
        false => 0,
    };
    // The values twice: they are copied out.
    let query_row = saturating_sum([d, e, e, 2 * KEY_BLOCK + width + 3]);
    let scratch = saturating_sum([
        saturating_product([QUERY_BLOCK, query_row]),
        saturating_product([KEY_BLOCK, saturating_sum([d, e, 1])]),
        8 * width.max(16),
    ]);
    let partial = match cut.parts {
        1 => 0,
        parts => saturating_product([b, h, t, parts, saturating_sum([e, 2])]),
    };
    saturating_sum([
        packed,
        saturating_product([rayon::current_num_threads(), scratch]),
        partial,
        saturating_product([2, b, h, t]),
        LONGEST_TABLE.min(saturating_product([b, h, t, s])),
    ])
}

/// One task: some query rows, and the key blocks they look at.
struct Block<'a, S> {
    batch: usize,
    heads: Range<usize>,
    tokens: Range<usize>,
    key_blocks: Range<usize>,
    result: BlockResult<'a, S>,
}

enum BlockResult<'a, S> {
    /// All of the keys were seen.
    Whole(OutputRows<'a, S>),
    /// Some of them: to be merged.
    Part(&'a mut Averages<S>),
}

/// Where a block's rows go.
struct OutputRows<'a, S> {
    out: &'a mut [S],
    greatest: &'a mut [S],
    log_sum: &'a mut [S],
}

/// Softmax averages under way, a row for each query.
#[derive(Clone)]
struct Averages<S> {
    /// o, [`Widths::value_padded`] apart.
    values: Vec<S>,
    /// l
    sums: Vec<S>,
    /// m
    greatest: Vec<S>,
}

/// The keys and values of each (batch, key/value head, key block): keys transposed, D × [`KEY_BLOCK`], values as
/// [`KEY_BLOCK`] padded rows.
struct KeyTiles<S> {
    keys: Aligned<S>,
    values: Aligned<S>,
}

/// The memory of one thread.
struct Scratch<S> {
    queries: Aligned<S>,
    scores: Aligned<S>,
    phases: Aligned<S>,
    factors: Aligned<S>,
    /// o
    values: Aligned<S>,
    /// l, a vector for each row, added up at the end.
    sums: Aligned<S>,
    /// m
    greatest: Vec<S>,
    tile: KeyTiles<S>,
    rows: Vec<Row>,
}

/// What a row of a block is, its numbers aside.
#[derive(Clone)]
struct Row {
    position: i64,
    segment: Option<i64>,
    /// Query head.
    head: usize,
    /// Columns of the tile at hand among which are all visible ones.
    columns: Range<usize>,
}

/// What all tasks read.
struct Context<'a, S> {
    job: ForwardJob<'a, S>,
    widths: Widths,
    queries: Side<'a>,
    keys: Side<'a>,
    distances: Distances<S>,
}

/// The output, (B, H, T, E), and the facts about its rows.
pub(super) fn forward<S: Real>(job: ForwardJob<'_, S>) -> (Vec<S>, RowStatistics<S>) {
    let Dims {
        b, h, g, t, s, e, ..
    } = job.call.dims;
    let mut out = vec![S::ZERO; b * h * t * e];
    let mut rows = RowStatistics {
        greatest: vec![S::NEG_INFINITY; b * h * t],
        log_sum: vec![S::ZERO; b * h * t],
    };
    if b * h * t * s == 0 {
        return (out, rows);
    }
    let context = Context {
        widths: Widths::new(job.call, job.kernel.width()),
        queries: Side::new(&job.call.q_positions, QUERY_BLOCK),
        keys: Side::new(&job.call.k_positions, KEY_BLOCK),
        distances: Distances::new(job.call),
        job,
    };
    let cut = Cut::new(&context.job.call.dims);
    let key_blocks = s.div_ceil(KEY_BLOCK);
    let packed = cut.shared.then(|| context.pack_keys());

    let mut blocks = Vec::new();
    let mut parts = Vec::new();
    {
        let mut out = &mut out[..];
        let mut greatest = &mut rows.greatest[..];
        let mut log_sum = &mut rows.log_sum[..];
        for batch in 0..b {
            for first in (0..h).step_by(h / g).flat_map(|first| {
                (first..first + h / g)
                    .step_by(cut.heads)
                    .map(move |head| head..(head + cut.heads).min(first + h / g))
            }) {
                for start in (0..t).step_by(QUERY_BLOCK) {
                    let tokens = start..(start + QUERY_BLOCK).min(t);
                    let rows = first.len() * tokens.len();
                    blocks.push(Block {
                        batch,
                        heads: first.clone(),
                        tokens,
                        key_blocks: 0..key_blocks,
                        result: BlockResult::Whole(OutputRows {
                            out: take(&mut out, rows * e),
                            greatest: take(&mut greatest, rows),
                            log_sum: take(&mut log_sum, rows),
                        }),
                    });
                }
            }
        }
    }
    if cut.parts > 1 {
        parts = vec![Averages::none(); blocks.len() * cut.parts];
        let of_parts = blocks
            .iter()
            .zip(parts.chunks_mut(cut.parts))
            .flat_map(|(block, parts)| {
                parts.iter_mut().enumerate().map(|(i, part)| Block {
                    batch: block.batch,
                    heads: block.heads.clone(),
                    tokens: block.tokens.clone(),
                    key_blocks: i * key_blocks / cut.parts..(i + 1) * key_blocks / cut.parts,
                    result: BlockResult::Part(part),
                })
            })
            .collect();
        context.run_all(of_parts, packed.as_ref());
        for (block, parts) in blocks.into_iter().zip(parts.chunks(cut.parts)) {
            if let BlockResult::Whole(rows) = block.result {
                merge(parts, context.widths.value_padded).store(rows, &context.widths);
            }
        }
    } else {
        // The last queries see the most keys where attention is causal: they must not come last.
        blocks.reverse();
        context.run_all(blocks, packed.as_ref());
    }
    drop(parts);
    (out, rows)
}

impl<S: Real> Context<'_, S> {
    fn pack_keys(&self) -> KeyTiles<S> {
        let Dims { b, g, s, .. } = self.job.call.dims;
        let blocks = s.div_ceil(KEY_BLOCK);
        let (k_len, v_len) = self.tile_lengths();
        let mut tiles = KeyTiles {
            keys: Aligned::zeros(b * g * blocks * k_len),
            values: Aligned::zeros(b * g * blocks * v_len),
        };
        let tasks = (tiles.keys.chunks_mut(blocks * k_len))
            .zip(tiles.values.chunks_mut(blocks * v_len))
            .enumerate()
            .flat_map(|(head, (keys, values))| {
                let tiles = keys.chunks_mut(k_len).zip(values.chunks_mut(v_len));
                tiles
                    .enumerate()
                    .map(move |(block, tile)| (head, block, tile))
            })
            .collect();
        share(
            tasks,
            || (),
            |_, (head, block, (keys, values))| {
                self.pack_tile(head / g, head % g, block, keys, values)
            },
        );
        tiles
    }

    /// Elements of a packed tile of keys and of values.
    fn tile_lengths(&self) -> (usize, usize) {
        (
            self.widths.score() * KEY_BLOCK,
            self.widths.value_padded * KEY_BLOCK,
        )
    }

    fn pack_tile(&self, b: usize, g: usize, block: usize, keys: &mut [S], values: &mut [S]) {
        let tokens = Tokens {
            batch: b,
            head: g,
            start: block * KEY_BLOCK,
            positions: self.keys.mask(b, block).positions,
        };
        let Widths {
            value,
            value_padded,
            ..
        } = self.widths;
        self.job.k.copy_transposed(tokens, keys, KEY_BLOCK);
        let v = self.job.v;
        v.copy_rows(tokens, 0..value, S::ONE, values, value_padded);
    }

    fn run_all(&self, blocks: Vec<Block<'_, S>>, packed: Option<&KeyTiles<S>>) {
        let kernel = self.job.kernel;
        let (k_len, v_len) = self.tile_lengths();
        // Tiles that are shared are not packed by the threads.
        let own = usize::from(packed.is_none());
        let scratch = || Scratch {
            queries: Aligned::zeros(QUERY_BLOCK * self.widths.score_padded()),
            scores: Aligned::zeros(QUERY_BLOCK * KEY_BLOCK),
            phases: Aligned::zeros(usize::from(kernel.has_phase()) * QUERY_BLOCK * KEY_BLOCK),
            factors: Aligned::zeros(KEY_BLOCK),
            values: Aligned::zeros(QUERY_BLOCK * self.widths.value_padded),
            sums: Aligned::zeros(QUERY_BLOCK * kernel.width()),
            greatest: vec![S::ZERO; QUERY_BLOCK],
            tile: KeyTiles {
                keys: Aligned::zeros(own * k_len),
                values: Aligned::zeros(own * v_len),
            },
            rows: Vec::with_capacity(QUERY_BLOCK),
        };
        share(blocks, scratch, |scratch, block| {
            self.run(scratch, block, packed)
        });
    }

    fn run(&self, scratch: &mut Scratch<S>, block: Block<'_, S>, packed: Option<&KeyTiles<S>>) {
        let ForwardJob { call, kernel, .. } = self.job;
        let Dims { h, g, s, .. } = call.dims;
        let (batch, widths) = (block.batch, &self.widths);
        let rows = block.heads.len() * block.tokens.len();
        self.start(scratch, &block);

        let queries = &self.queries.blocks(batch)[block.tokens.start / QUERY_BLOCK];
        let (k_len, v_len) = self.tile_lengths();
        let kv_head = block.heads.start / (h / g);
        let first_tile = (batch * g + kv_head) * s.div_ceil(KEY_BLOCK);
        for key_block in block.key_blocks.clone() {
            let keys = self.keys.mask(batch, key_block);
            let partly = match queries.sight(keys.block, call) {
                Sight::None => continue,
                Sight::Some => true,
                Sight::All => false,
            };
            let (k_tile, v_tile) = match packed {
                Some(tiles) => {
                    let tile = first_tile + key_block;
                    (
                        &tiles.keys[tile * k_len..][..k_len],
                        &tiles.values[tile * v_len..][..v_len],
                    )
                }
                None => {
                    let (k, v) = (&mut scratch.tile.keys, &mut scratch.tile.values);
                    self.pack_tile(batch, kv_head, key_block, k, v);
                    (&k[..], &v[..])
                }
            };
            kernel.forward(TileStep {
                rows: &mut scratch.rows[..rows],
                queries: &scratch.queries,
                scores: &mut scratch.scores,
                phases: &mut scratch.phases,
                factors: &mut scratch.factors,
                values: &mut scratch.values,
                sums: &mut scratch.sums,
                greatest: &mut scratch.greatest,
                k_tile,
                v_tile,
                keys,
                partly,
                widths,
                distances: &self.distances,
                call,
            });
        }

        let averages = Averages {
            values: scratch.values[..rows * widths.value_padded].to_vec(),
            sums: (scratch.sums.chunks_exact(kernel.width()).take(rows))
                .map(|sums| kernel.sum(sums))
                .collect(),
            greatest: scratch.greatest[..rows].to_vec(),
        };
        match block.result {
            BlockResult::Whole(to) => averages.store(to, widths),
            BlockResult::Part(to) => *to = averages,
        }
    }

    /// Packs the block's queries and empties the sums.
    fn start(&self, scratch: &mut Scratch<S>, block: &Block<'_, S>) {
        let call = self.job.call;
        let tokens = block.tokens.clone();
        let positions = &call.q_positions.row(block.batch)[tokens.clone()];
        let segments = call.q_positions.segments(block.batch);
        let stride = tokens.len() * self.widths.score_padded();
        let scale = S::from_f64(call.score.scale());
        scratch.rows.clear();
        for (head, to) in block.heads.clone().zip(scratch.queries.chunks_mut(stride)) {
            let of_head = Tokens {
                batch: block.batch,
                head,
                start: tokens.start,
                positions,
            };
            self.widths.copy_score_rows(self.job.q, of_head, scale, to);
            scratch
                .rows
                .extend(tokens.clone().zip(positions).map(|(token, position)| Row {
                    position: *position,
                    segment: segments.map(|s| s[token]),
                    head,
                    columns: 0..KEY_BLOCK,
                }));
        }
        scratch.values.fill(S::ZERO);
        scratch.sums.fill(S::ZERO);
        scratch.greatest.fill(S::NEG_INFINITY);
    }
}

/// One tile: scores, their exponentials, and the values they weigh.
pub(super) struct TileStep<'a, S> {
    rows: &'a mut [Row],
    queries: &'a [S],
    scores: &'a mut [S],
    phases: &'a mut [S],
    factors: &'a mut [S],
    values: &'a mut [S],
    sums: &'a mut [S],
    greatest: &'a mut [S],
    k_tile: &'a [S],
    v_tile: &'a [S],
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
        let whole_vectors = columns.next_multiple_of(L::WIDTH);
        let q_stride = widths.score_padded();
        lanes.run(Product {
            rows: rows.len(),
            columns: whole_vectors,
            depth: widths.dot,
            a: Tile {
                data: &step.queries[rows.start * q_stride..],
                row_stride: q_stride,
                column_stride: 1,
            },
            b: step.k_tile,
            b_stride: KEY_BLOCK,
            c: &mut step.scores[rows.start * KEY_BLOCK..],
            c_stride: KEY_BLOCK,
            accumulate: false,
        });
        if R::PHASE {
            lanes.run(Product {
                rows: rows.len(),
                columns: whole_vectors,
                depth: widths.phase,
                a: Tile {
                    data: &step.queries[rows.start * q_stride + widths.dot_padded..],
                    row_stride: q_stride,
                    column_stride: 1,
                },
                b: &step.k_tile[widths.dot * KEY_BLOCK..],
                b_stride: KEY_BLOCK,
                c: &mut step.phases[rows.start * KEY_BLOCK..],
                c_stride: KEY_BLOCK,
                accumulate: false,
            });
        }
        for row in rows.clone() {
            step.weigh(lanes, row, scores[step.rows[row].head]);
        }
        lanes.run(Product {
            rows: rows.len(),
            columns: widths.value_padded,
            depth: columns,
            a: Tile {
                data: &step.scores[rows.start * KEY_BLOCK..],
                row_stride: KEY_BLOCK,
                column_stride: 1,
            },
            b: step.v_tile,
            b_stride: widths.value_padded,
            c: &mut step.values[rows.start * widths.value_padded..],
            c_stride: widths.value_padded,
            accumulate: true,
        });
    }
}

impl<S: Real> TileStep<'_, S> {
    /// The rows that see anything, and the number of columns up to the last visible one.
    #[inline(always)]
    fn extent(&mut self) -> Option<(Range<usize>, usize)> {
        if !self.partly {
            return Some((0..self.rows.len(), KEY_BLOCK));
        }
        for row in self.rows.iter_mut() {
            row.columns = self.keys.columns(row.position, self.call);
        }
        extent(self.rows.iter().map(|row| &row.columns))
    }

    /// Turns a row's products into scores and these into e^(s − m), keeping m, l and o in step.
    #[inline(always)]
    fn weigh<L, R>(&mut self, lanes: L, row: usize, score: R)
    where
        L: Lanes<Scalar = S>,
        R: RowScore<L>,
    {
        let vectors = KEY_BLOCK / L::WIDTH;
        let Row {
            position,
            segment,
            ref columns,
            ..
        } = self.rows[row];
        let scores = &mut self.scores[row * KEY_BLOCK..][..KEY_BLOCK];
        let mut greatest = lanes.splat(S::NEG_INFINITY);
        if R::CHANGES {
            let zero = lanes.splat(S::ZERO);
            let phases = match R::PHASE {
                true => &self.phases[row * KEY_BLOCK..][..KEY_BLOCK],
                false => &[],
            };
            let factors = self
                .distances
                .row(position, &self.keys, self.call, self.factors);
            let factors = &factors[..KEY_BLOCK];
            for at in (0..vectors).map(|v| v * L::WIDTH) {
                let pairs = Pairs {
                    dot: lanes.load(&scores[at..]),
                    phase: if R::PHASE {
                        lanes.load(&phases[at..])
                    } else {
                        zero
                    },
                    factor: lanes.load(&factors[at..]),
                };
                let s = score.score(lanes, pairs);
                greatest = lanes.max(greatest, s);
                lanes.store(s, &mut scores[at..]);
            }
        }
        if self.partly {
            let query = (position, segment);
            self.keys
                .hide(scores, S::NEG_INFINITY, columns, query, self.call);
        }
        if self.partly || !R::CHANGES {
            greatest = lanes.splat(S::NEG_INFINITY);
            for at in (0..vectors).map(|v| v * L::WIDTH) {
                greatest = lanes.max(greatest, lanes.load(&scores[at..]));
            }
        }
        let sums = &mut self.sums[row * L::WIDTH..][..L::WIDTH];
        let before = self.greatest[row];
        if lanes.any_greater(greatest, lanes.splat(before)) {
            let now = lanes.greatest(greatest);
            let shrink = lanes.splat((before - now).exp());
            lanes.store(lanes.mul(lanes.load(sums), shrink), sums);
            let width = self.widths.value_padded;
            for values in self.values[row * width..][..width].chunks_exact_mut(L::WIDTH) {
                lanes.store(lanes.mul(lanes.load(values), shrink), values);
            }
            self.greatest[row] = now;
        }
        // Where nothing was seen yet, e^(−∞ − 0) is the 0 that e^(−∞ − −∞) is not.
        let shift = match self.greatest[row] {
            m if m == S::NEG_INFINITY => S::ZERO,
            m => m,
        };
        let shift = lanes.splat(shift);
        let mut sum = lanes.load(sums);
        for at in (0..vectors).map(|v| v * L::WIDTH) {
            let p = lanes.exp(lanes.sub(lanes.load(&scores[at..]), shift));
            lanes.store(p, &mut scores[at..]);
            sum = lanes.add(sum, p);
        }
        lanes.store(sum, sums);
    }
}

impl<S: Real> Averages<S> {
    /// Of no rows.
    fn none() -> Self {
        Self {
            values: Vec::new(),
            sums: Vec::new(),
            greatest: Vec::new(),
        }
    }

    /// Divides by the sums and writes the rows; a row that saw nothing is left as it is: output 0, −∞ and 0.
    fn store(&self, to: OutputRows<'_, S>, widths: &Widths) {
        for (row, values) in self.values.chunks_exact(widths.value_padded).enumerate() {
            let sum = self.sums[row];
            if sum == S::ZERO {
                continue;
            }
            let columns = row * widths.value..(row + 1) * widths.value;
            for (out, o) in to.out[columns].iter_mut().zip(values) {
                *out = *o / sum;
            }
            to.greatest[row] = self.greatest[row];
            to.log_sum[row] = sum.ln();
        }
    }
}

/// The averages over all keys from those over parts of them, in their order.
fn merge<S: Real>(parts: &[Averages<S>], width: usize) -> Averages<S> {
    let mut merged = Averages::none();
    let Some(rows) = parts.first().map(|part| part.sums.len()) else {
        return merged;
    };
    for row in 0..rows {
        let greatest = parts
            .iter()
            .map(|part| part.greatest[row])
            .fold(S::NEG_INFINITY, |a, b| if b > a { b } else { a });
        let shift = if greatest == S::NEG_INFINITY {
            S::ZERO
        } else {
            greatest
        };
        let mut sum = S::ZERO;
        let mut values = vec![S::ZERO; width];
        for part in parts {
            let weight = (part.greatest[row] - shift).exp();
            sum += weight * part.sums[row];
            let of_part = &part.values[row * width..][..width];
            for (value, x) in values.iter_mut().zip(of_part) {
                *value += weight * *x;
            }
        }
        merged.sums.push(sum);
        merged.values.append(&mut values);
        merged.greatest.push(greatest);
    }
    merged
}
