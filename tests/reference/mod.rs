//! Attention written as its definition: loops over f64, values, log-sum-exp and gradients by hand. It shares no
//! code with the crate (only the types that describe a call), so that both of the crate's paths can be held to it.
//!
//! # What counts as equal
//! The reference is evaluated twice: exactly (f64) and *plainly*, every operation rounded to the accumulator's
//! dtype, and what an unfused implementation keeps as a tensor rounded to the tensors' dtype: weights, dP, dS and
//! results; of its matrices the scores alone stay in the accumulator's. A result
//! passes when its error is at most twice the plain evaluation's largest error (the rule of the flash-attention
//! authors), plus a floor for luck in small cases: [`FLOOR`] roundings of the element's *mass*, the same sum with
//! every term made positive and weighted by the condition of the scores it came from, plus one rounding to the
//! tensors' dtype. A row that sees no key has mass 0: there, only exact zeros pass. (Where something is seen, the
//! mass is above 0 even if its products underflow: subnormals are as good as 0.)
#![allow(dead_code)] // each test file uses its own part

use candle_core::{DType, Device, Result, Tensor, Var, D};
use candle_posenc::{attend_with_lse, AttendSpec, Backend, Positions, Score};
use half::{bf16, f16};
use rand::{rngs::StdRng, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;
use std::f64::consts::TAU;

/// Roundings of an element's mass that are forgiven at least: sums of up to 256 terms in another order. Longer sums
/// of n terms are forgiven √n, the size that n independent roundings add up to.
pub const FLOOR: f64 = 16.;

/// Both paths, each of which has to pass every test.
pub const BACKENDS: [Backend; 2] = [Backend::Dense, Backend::Fused];

/// Positions or segments, row by row: one row, or one for each of the batch.
pub type Rows = Vec<Vec<i64>>;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dims {
    pub b: usize,
    pub h: usize,
    pub g: usize,
    pub t: usize,
    pub s: usize,
    pub d: usize,
    pub e: usize,
}

impl Dims {
    /// One batch row, as many queries as keys, values as wide as keys.
    pub fn square(h: usize, g: usize, t: usize, d: usize) -> Self {
        Self {
            b: 1,
            h,
            g,
            t,
            s: t,
            d,
            e: d,
        }
    }

    pub fn q(&self) -> [usize; 4] {
        [self.b, self.h, self.t, self.d]
    }

    pub fn k(&self) -> [usize; 4] {
        [self.b, self.g, self.s, self.d]
    }

    pub fn v(&self) -> [usize; 4] {
        [self.b, self.g, self.s, self.e]
    }

    pub fn out(&self) -> [usize; 4] {
        [self.b, self.h, self.t, self.e]
    }
}

/// One call of attention, in plain data.
#[derive(Clone, Debug)]
pub struct Call {
    pub dims: Dims,
    pub score: Score,
    pub scale: Option<f64>,
    pub causal: bool,
    pub window: Option<usize>,
    /// Of queries and of keys.
    pub positions: Option<(Rows, Rows)>,
    /// Of queries and of keys; only beside positions.
    pub segments: Option<(Rows, Rows)>,
}

/// Contents of q, k and v and the gradient that arrives at the output, each in its contiguous order.
#[derive(Clone, Debug)]
pub struct Inputs {
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    pub grad: Vec<f64>,
}

/// Kinds of content. Random normals alone hide faults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fill {
    /// Independent standard normals.
    Normal,
    /// All tokens nearly the same vector: scores close to each other and far from 0.
    Correlated,
    /// Every product q·k far below 0: a maximum that starts at 0 would be wrong.
    Negative,
    /// Normals times 40: weights close to 0 and 1.
    Huge,
}

impl Inputs {
    /// Content that is exact in `dtype`.
    pub fn new(dims: Dims, fill: Fill, seed: u64, dtype: DType) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut normals = |shape: [usize; 4], value: &dyn Fn(usize, f64) -> f64| -> Vec<f64> {
            let width = shape[3];
            (0..shape.iter().product())
                .map(|i| {
                    let x: f64 = StandardNormal.sample(&mut rng);
                    round_to(dtype, value(i % width.max(1), x))
                })
                .collect()
        };
        /// An element's value, from its column and a standard normal.
        type Value<'a> = &'a dyn Fn(usize, f64) -> f64;
        let (q, k): (Value, Value) = match fill {
            Fill::Normal => (&|_, x| x, &|_, x| x),
            Fill::Correlated => (&|c, x| 2. + (c % 3) as f64 + 0.01 * x, &|c, x| {
                2. - (c % 2) as f64 + 0.01 * x
            }),
            Fill::Negative => (&|_, x| 3. + x.abs(), &|_, x| -3. - x.abs()),
            Fill::Huge => (&|_, x| 40. * x, &|_, x| 40. * x),
        };
        Self {
            q: normals(dims.q(), q),
            k: normals(dims.k(), k),
            v: normals(dims.v(), &|_, x| x),
            grad: normals(dims.out(), &|_, x| x),
        }
    }

    pub fn normal(dims: Dims, seed: u64) -> Self {
        Self::new(dims, Fill::Normal, seed, DType::F64)
    }
}

/// `x` rounded to `dtype`.
pub fn round_to(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F32 => f64::from(x as f32),
        DType::BF16 => f64::from(bf16::from_f32(x as f32)),
        DType::F16 => f64::from(f16::from_f32(x as f32)),
        _ => x,
    }
}

/// Half the distance between 1 and the next number.
pub fn unit_roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => f64::from(f32::EPSILON) / 2.,
        DType::BF16 => f64::from(bf16::EPSILON) / 2.,
        DType::F16 => f64::from(f16::EPSILON) / 2.,
        _ => f64::EPSILON / 2.,
    }
}

pub fn accumulator(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// Values of a tensor's elements, with their masses.
#[derive(Clone, Debug, Default)]
pub struct Summed {
    pub value: Vec<f64>,
    pub mass: Vec<f64>,
    /// The mass if every weight were 1: what a weight too small for its dtype takes away with it.
    pub reach: Vec<f64>,
    /// Terms in the longest of the sums behind an element.
    pub terms: usize,
}

impl Summed {
    /// Roundings of the mass that are forgiven.
    pub fn floor(&self) -> f64 {
        FLOOR.max((self.terms as f64).sqrt())
    }

    fn zeros(shape: [usize; 4]) -> Self {
        let n = shape.iter().product();
        Self {
            value: vec![0.; n],
            mass: vec![0.; n],
            reach: vec![0.; n],
            terms: 0,
        }
    }
}

/// All that attention computes, forward and backward.
#[derive(Clone, Debug, Default)]
pub struct Attention {
    pub out: Summed,
    pub lse: Summed,
    pub dq: Summed,
    pub dk: Summed,
    pub dv: Summed,
}

/// A score, what its derivative needs, and how ill it is conditioned.
struct Pair {
    score: f64,
    /// d score / d (q·k of the first part), without q and k.
    first: f64,
    /// d score / d (q·k of the second part); `Phase` only.
    second: f64,
    /// Bounds of both that do not vanish where a sine or cosine happens to.
    first_mass: f64,
    second_mass: f64,
    /// Σ |term| behind the score, a turn of the phase counted as the 2π·amplitude it can move the score by.
    mass: f64,
    /// 2π Σ |term| behind the phase.
    angle_mass: f64,
}

/// One query's part of a forward pass.
struct Row {
    /// The keys that it sees; their pairs with it and their weights.
    seen: Vec<usize>,
    pairs: Vec<Pair>,
    weights: Vec<f64>,
    /// 1 + the greatest mass of a score.
    condition: f64,
    lse: f64,
    /// E averages, their masses and reaches.
    out: Vec<f64>,
    mass: Vec<f64>,
    reach: Vec<f64>,
}

/// One query's part of a backward pass.
struct BackwardRow {
    row: Row,
    /// The gradient of each score, its mass and its reach.
    ds: Vec<[f64; 3]>,
    /// D values, masses and reaches.
    dq: Vec<[f64; 3]>,
}

/// What one key gets: values, masses and reaches of its D and E columns.
struct KeySums {
    dk: Vec<[f64; 3]>,
    dv: Vec<[f64; 3]>,
}

impl Attention {
    /// Sets the forward values of one query, of `e` columns.
    fn put(&mut self, query: usize, e: usize, row: &Row) {
        self.lse.value[query] = row.lse;
        self.lse.mass[query] = row.condition;
        self.out.value[query * e..][..e].copy_from_slice(&row.out);
        self.out.mass[query * e..][..e].copy_from_slice(&row.mass);
        self.out.reach[query * e..][..e].copy_from_slice(&row.reach);
    }
}

impl Call {
    /// Plain attention without a mask.
    pub fn new(dims: Dims) -> Self {
        Self {
            dims,
            score: Score::Dot,
            scale: None,
            causal: false,
            window: None,
            positions: None,
            segments: None,
        }
    }

    pub fn causal(dims: Dims) -> Self {
        Self {
            causal: true,
            ..Self::new(dims)
        }
    }

    pub fn with_score(self, score: Score) -> Self {
        Self { score, ..self }
    }

    pub fn with_positions(self, queries: Rows, keys: Rows) -> Self {
        Self {
            positions: Some((queries, keys)),
            ..self
        }
    }

    /// The call as the crate takes it.
    pub fn spec(&self, backend: Backend) -> Result<AttendSpec> {
        let positions = |rows: &Rows, segments: Option<&Rows>| -> Result<Positions> {
            let tensor = |rows: &Rows| {
                let width = rows.first().map_or(0, Vec::len);
                Tensor::from_vec(rows.concat(), (rows.len(), width), &Device::Cpu)
            };
            Positions::explicit(tensor(rows)?, segments.map(tensor).transpose()?)
        };
        let (q_segments, k_segments) = match &self.segments {
            Some((q, k)) => (Some(q), Some(k)),
            None => (None, None),
        };
        let (q_positions, k_positions) = match &self.positions {
            Some((q, k)) => (
                Some(positions(q, q_segments)?),
                Some(positions(k, k_segments)?),
            ),
            None => (None, None),
        };
        Ok(AttendSpec {
            score: self.score.clone(),
            scale: self.scale,
            window: self.window,
            q_positions,
            k_positions,
            backend,
            ..if self.causal {
                AttendSpec::causal()
            } else {
                AttendSpec::bidirectional()
            }
        })
    }

    /// Positions of query `i` and key `j` in batch row `b`.
    pub fn places(&self, b: usize, i: usize, j: usize) -> (i64, i64) {
        let Dims { t, s, .. } = self.dims;
        match &self.positions {
            Some((q, k)) => (row(q, b)[i], row(k, b)[j]),
            // The last query stands at the last key.
            None => {
                let last = t.max(s) as i64 - 1;
                (
                    last - (t as i64 - 1 - i as i64),
                    last - (s as i64 - 1 - j as i64),
                )
            }
        }
    }

    pub fn sees(&self, b: usize, i: usize, j: usize) -> bool {
        let (m, n) = self.places(b, i, j);
        if m < 0 || n < 0 || (self.causal && n > m) {
            return false;
        }
        if let Some(w) = self.window {
            if (m - n).unsigned_abs() >= w as u64 {
                return false;
            }
        }
        match &self.segments {
            Some((q, k)) => row(q, b)[i] == row(k, b)[j],
            None => true,
        }
    }

    fn pair(
        &self,
        q: &[f64],
        k: &[f64],
        h: usize,
        (m, n): (i64, i64),
        r: &impl Fn(f64) -> f64,
    ) -> Pair {
        let dot = |q: &[f64], k: &[f64]| {
            q.iter().zip(k).fold((0., 0.), |(sum, mass), (q, k)| {
                (r(sum + r(q * k)), mass + (q * k).abs())
            })
        };
        let distance = (m - n).abs() as f64;
        let inverse_sqrt = |width: usize| 1. / (width as f64).sqrt();
        match &self.score {
            Score::Phase {
                amp_dim,
                alpha,
                phase_scale,
            } => {
                let scale = r(self.scale.unwrap_or(inverse_sqrt(*amp_dim)));
                let phase_scale = phase_scale.unwrap_or(inverse_sqrt(q.len() - amp_dim));
                let turns_per_unit = r(if m == n {
                    0.
                } else {
                    distance.powf(*alpha) * phase_scale
                });
                let (amplitude, amplitude_mass) = dot(&q[..*amp_dim], &k[..*amp_dim]);
                let (phase, phase_mass) = dot(&q[*amp_dim..], &k[*amp_dim..]);
                let amplitude = r(scale * amplitude);
                let turns = r(phase * turns_per_unit);
                let angle = TAU * (turns - turns.round());
                let (sin, cos) = (r(angle.sin()), r(angle.cos()));
                let angle_mass = TAU * phase_mass * turns_per_unit.abs();
                let amplitude_mass = amplitude_mass * scale.abs();
                Pair {
                    score: r(amplitude * cos),
                    first: r(scale * cos),
                    second: r(r(-amplitude * sin) * r(TAU * turns_per_unit)),
                    first_mass: scale.abs(),
                    second_mass: amplitude_mass * TAU * turns_per_unit.abs(),
                    mass: amplitude_mass * (1. + angle_mass),
                    angle_mass,
                }
            }
            plain => {
                let scale = r(self.scale.unwrap_or(inverse_sqrt(q.len())));
                let bias = match plain {
                    Score::LinearBias { slopes } => slopes[h] * distance,
                    _ => 0.,
                };
                let (product, mass) = dot(q, k);
                Pair {
                    score: r(r(scale * product) - r(bias)),
                    first: scale,
                    second: 0.,
                    first_mass: scale.abs(),
                    second_mass: 0.,
                    mass: mass * scale.abs() + bias.abs(),
                    angle_mass: 0.,
                }
            }
        }
    }

    /// Exact values and gradients.
    pub fn exact(&self, inputs: &Inputs) -> Attention {
        self.evaluate(inputs, &|x| x, &|x| x)
    }

    /// What a plain implementation over tensors of `dtype` gives.
    pub fn plain(&self, inputs: &Inputs, dtype: DType) -> Attention {
        let stored = |x| round_to(dtype, x);
        match accumulator(dtype) {
            DType::F64 => self.evaluate(inputs, &|x| x, &stored),
            _ => self.evaluate(inputs, &|x| f64::from(x as f32), &stored),
        }
    }

    /// [`exact`](Self::exact) without gradients.
    pub fn exact_forward(&self, inputs: &Inputs) -> Attention {
        self.evaluate_forward(inputs, &|x| x, &|x| x)
    }

    /// [`plain`](Self::plain) without gradients.
    pub fn plain_forward(&self, inputs: &Inputs, dtype: DType) -> Attention {
        let stored = |x| round_to(dtype, x);
        match accumulator(dtype) {
            DType::F64 => self.evaluate_forward(inputs, &|x| x, &stored),
            _ => self.evaluate_forward(inputs, &|x| f64::from(x as f32), &stored),
        }
    }

    /// One query's row: `None` where it sees no key. Each rounding of the accumulator is `r`, each of a weight or a
    /// result `stored`.
    fn row(
        &self,
        inputs: &Inputs,
        (b, h, i): (usize, usize, usize),
        r: &impl Fn(f64) -> f64,
        stored: &impl Fn(f64) -> f64,
    ) -> Option<Row> {
        let Dims {
            h: heads,
            g,
            t,
            s,
            d,
            e,
            ..
        } = self.dims;
        let q = &inputs.q[((b * heads + h) * t + i) * d..][..d];
        let first_key = (b * g + h / (heads / g)) * s;
        let seen: Vec<usize> = (0..s).filter(|j| self.sees(b, i, *j)).collect();
        if seen.is_empty() {
            return None;
        }
        let pairs: Vec<Pair> = seen
            .iter()
            .map(|&j| {
                let k = &inputs.k[(first_key + j) * d..][..d];
                self.pair(q, k, h, self.places(b, i, j), r)
            })
            .collect();
        let max = pairs
            .iter()
            .fold(f64::NEG_INFINITY, |max, p| max.max(p.score));
        let condition = 1. + pairs.iter().fold(0f64, |max, p| max.max(p.mass));
        let exp: Vec<f64> = pairs.iter().map(|p| r(r(p.score - max).exp())).collect();
        let sum = exp.iter().fold(0., |sum, x| r(sum + x));
        let weights: Vec<f64> = exp.iter().map(|x| stored(r(x / sum))).collect();
        let (mut out, mut mass, mut reach) = (vec![0.; e], vec![0.; e], vec![0.; e]);
        for (&j, weight) in seen.iter().zip(&weights) {
            let values = &inputs.v[(first_key + j) * e..][..e];
            for (c, value) in values.iter().enumerate() {
                out[c] = r(out[c] + r(weight * value));
                mass[c] += weight * value.abs() + f64::MIN_POSITIVE;
                reach[c] += value.abs();
            }
        }
        Some(Row {
            seen,
            pairs,
            weights,
            condition,
            lse: r(max + r(sum.ln())),
            out: out.into_iter().map(stored).collect(),
            mass: mass.into_iter().map(|mass| condition * mass).collect(),
            reach,
        })
    }

    fn evaluate_forward(
        &self,
        inputs: &Inputs,
        r: &(impl Fn(f64) -> f64 + Sync),
        stored: &(impl Fn(f64) -> f64 + Sync),
    ) -> Attention {
        let Dims { b, h, t, e, .. } = self.dims;
        let mut result = self.unseen();
        let rows: Vec<Option<Row>> = (0..b * h * t)
            .into_par_iter()
            .map(|query| {
                let row = self.row(inputs, (query / t / h, query / t % h, query % t), r, stored)?;
                Some(Row {
                    seen: Vec::new(),
                    pairs: Vec::new(),
                    weights: Vec::new(),
                    ..row
                })
            })
            .collect();
        for (query, row) in rows.into_iter().enumerate() {
            if let Some(row) = row {
                result.put(query, e, &row);
            }
        }
        result
    }

    /// What comes out where no query sees any key.
    fn unseen(&self) -> Attention {
        let dims = self.dims;
        let rows = dims.b * dims.h * dims.t;
        let mut result = Attention {
            out: Summed::zeros(dims.out()),
            lse: Summed {
                value: vec![f64::NEG_INFINITY; rows],
                mass: vec![0.; rows],
                reach: vec![0.; rows],
                terms: 0,
            },
            dq: Summed::zeros(dims.q()),
            dk: Summed::zeros(dims.k()),
            dv: Summed::zeros(dims.v()),
        };
        let terms = (dims.s.max(dims.t * dims.h / dims.g.max(1))).max(dims.d.max(dims.e));
        let Attention {
            out,
            lse,
            dq,
            dk,
            dv,
        } = &mut result;
        for summed in [out, lse, dq, dk, dv] {
            summed.terms = terms;
        }
        result
    }

    fn evaluate(
        &self,
        inputs: &Inputs,
        r: &(impl Fn(f64) -> f64 + Sync),
        stored: &(impl Fn(f64) -> f64 + Sync),
    ) -> Attention {
        let Dims {
            h, g, t, s, d, e, ..
        } = self.dims;
        let mut result = self.unseen();
        let queries = self.dims.b * h * t;
        let rows: Vec<Option<BackwardRow>> = (0..queries)
            .into_par_iter()
            .map(|query| {
                let place = (query / t / h, query / t % h, query % t);
                let row = self.row(inputs, place, r, stored)?;
                Some(self.backward_row(inputs, place, row, r, stored))
            })
            .collect();
        // The queries that see each key, and the key's place in their rows, in the order of heads and queries.
        let mut seen_by = vec![Vec::new(); self.dims.b * g * s];
        for (query, row) in rows.iter().enumerate() {
            let Some(row) = row else { continue };
            result.put(query, e, &row.row);
            for (c, [value, mass, reach]) in row.dq.iter().enumerate() {
                result.dq.value[query * d + c] = stored(*value);
                result.dq.mass[query * d + c] = *mass;
                result.dq.reach[query * d + c] = *reach;
            }
            let group = query / t / h * g + query / t % h / (h / g);
            for (at, j) in row.row.seen.iter().enumerate() {
                seen_by[group * s + j].push((query, at));
            }
        }
        let keys: Vec<KeySums> = seen_by
            .par_iter()
            .map(|queries| self.backward_key(inputs, &rows, queries, (r, stored)))
            .collect();
        for (key, sums) in keys.iter().enumerate() {
            for (summed, width, sums) in
                [(&mut result.dk, d, &sums.dk), (&mut result.dv, e, &sums.dv)]
            {
                for (c, [value, mass, reach]) in sums.iter().enumerate() {
                    summed.value[key * width + c] = stored(*value);
                    summed.mass[key * width + c] = *mass;
                    summed.reach[key * width + c] = *reach;
                }
            }
        }
        result
    }

    /// With P the weights and g the gradient: dP = g V^T, dS = P (dP − Σ P dP), dQ = dS ∂S/∂Q. P, dP and dS are matrices,
    /// stored.
    fn backward_row(
        &self,
        inputs: &Inputs,
        (b, h, i): (usize, usize, usize),
        row: Row,
        r: &impl Fn(f64) -> f64,
        stored: &impl Fn(f64) -> f64,
    ) -> BackwardRow {
        let Dims {
            h: heads,
            g,
            t,
            s,
            d,
            e,
            ..
        } = self.dims;
        let first_key = (b * g + h / (heads / g)) * s;
        let grad = &inputs.grad[((b * heads + h) * t + i) * e..][..e];
        let (mut towards, mut masses) = (Vec::new(), Vec::new());
        for j in &row.seen {
            let values = &inputs.v[(first_key + j) * e..][..e];
            let (mut sum, mut mass) = (0., 0.);
            for (grad, value) in grad.iter().zip(values) {
                sum = r(sum + r(grad * value));
                mass += (grad * value).abs();
            }
            towards.push(stored(sum));
            masses.push(mass);
        }
        let weights = &row.weights;
        let mean = (weights.iter().zip(&towards)).fold(0., |sum, (w, x)| r(sum + r(w * x)));
        let mean_mass: f64 = weights.iter().zip(&masses).map(|(w, x)| w * x).sum();
        let mut ds = Vec::with_capacity(row.seen.len());
        let mut dq = vec![[0.; 3]; d];
        for (at, (j, pair)) in row.seen.iter().zip(&row.pairs).enumerate() {
            let reach = masses[at] + mean_mass;
            let here = [
                stored(r(weights[at] * r(towards[at] - mean))),
                weights[at] * reach * (row.condition + pair.angle_mass),
                reach,
            ];
            self.add_products(
                &mut dq,
                &inputs.k[(first_key + j) * d..][..d],
                pair,
                here,
                (r, stored),
            );
            ds.push(here);
        }
        BackwardRow { row, ds, dq }
    }

    /// Adds what a pair gives to the gradient of q, of which `other` is the key, or of k, of which it is the query. A phase's
    /// two gradients of products are matrices of their own, stored before they are multiplied with the other side.
    fn add_products(
        &self,
        sums: &mut [[f64; 3]],
        other: &[f64],
        pair: &Pair,
        [ds, ds_mass, ds_reach]: [f64; 3],
        (r, stored): (&impl Fn(f64) -> f64, &impl Fn(f64) -> f64),
    ) {
        let (amp_dim, of_phase) = match &self.score {
            Score::Phase { amp_dim, .. } => (*amp_dim, true),
            _ => (self.dims.d, false),
        };
        for (c, ([value, mass, reach], other)) in sums.iter_mut().zip(other).enumerate() {
            let (slope, slope_mass) = match c < amp_dim {
                true => (pair.first, pair.first_mass),
                false => (pair.second, pair.second_mass),
            };
            let product = r(ds * slope);
            let product = if of_phase { stored(product) } else { product };
            *value = r(*value + r(product * other));
            *mass += ds_mass * slope_mass * other.abs() + f64::MIN_POSITIVE;
            *reach += ds_reach * slope_mass * other.abs();
        }
    }

    /// dK = dS^T ∂S/∂K and dV = P^T g of one key.
    fn backward_key(
        &self,
        inputs: &Inputs,
        rows: &[Option<BackwardRow>],
        queries: &[(usize, usize)],
        (r, stored): (&impl Fn(f64) -> f64, &impl Fn(f64) -> f64),
    ) -> KeySums {
        let Dims { d, e, .. } = self.dims;
        let mut sums = KeySums {
            dk: vec![[0.; 3]; d],
            dv: vec![[0.; 3]; e],
        };
        for &(query, at) in queries {
            let Some(BackwardRow { row, ds, .. }) = &rows[query] else {
                continue;
            };
            let weight = row.weights[at];
            let grad = &inputs.grad[query * e..][..e];
            for ([value, mass, reach], grad) in sums.dv.iter_mut().zip(grad) {
                *value = r(*value + r(weight * grad));
                *mass += row.condition * weight * grad.abs() + f64::MIN_POSITIVE;
                *reach += grad.abs();
            }
            let q = &inputs.q[query * d..][..d];
            self.add_products(&mut sums.dk, q, &row.pairs[at], ds[at], (r, stored));
        }
        sums
    }
}

fn row(rows: &Rows, b: usize) -> &[i64] {
    &rows[if rows.len() == 1 { 0 } else { b }]
}

/// How a tensor lies in memory; its contents are the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Storage {
    Contiguous,
    /// (B, T, H, D) in memory, as projections give it.
    TokensFirst,
    /// The middle of wider rows, the rest NaN.
    Narrowed,
    /// Every other token of a buffer, the rest NaN.
    EveryOther,
    /// (B, H, D, T) in memory: neighbours along the last dimension are apart.
    WidthFirst,
    /// The tail of a longer batch: a storage offset.
    Offset,
}

pub const STORAGES: [Storage; 6] = [
    Storage::Contiguous,
    Storage::TokensFirst,
    Storage::Narrowed,
    Storage::EveryOther,
    Storage::WidthFirst,
    Storage::Offset,
];

/// `x` (B,H,T,D) with other strides, by differentiable operations.
pub fn store(x: &Tensor, storage: Storage) -> Result<Tensor> {
    let nan = |shape: &[usize]| Tensor::full(f64::NAN, shape, x.device())?.to_dtype(x.dtype());
    match storage {
        Storage::Contiguous => Ok(x.clone()),
        Storage::TokensFirst => x.transpose(1, 2)?.contiguous()?.transpose(1, 2),
        Storage::WidthFirst => x.transpose(2, 3)?.contiguous()?.transpose(2, 3),
        Storage::Narrowed => {
            let (b, h, t, d) = x.dims4()?;
            let wide = Tensor::cat(&[&nan(&[b, h, t, 3])?, x, &nan(&[b, h, t, 2])?], D::Minus1)?;
            wide.narrow(3, 3, d)
        }
        Storage::EveryOther => {
            let twice = Tensor::stack(&[&nan(x.dims())?, x], 3)?;
            twice.narrow(3, 1, 1)?.squeeze(3)
        }
        Storage::Offset => {
            let (b, h, t, d) = x.dims4()?;
            Tensor::cat(&[&nan(&[1, h, t, d])?, x], 0)?.narrow(0, 1, b)
        }
    }
}

/// A tensor's values in f64, in contiguous order.
pub fn values(x: &Tensor) -> Result<Vec<f64>> {
    if x.elem_count() == 0 {
        return Ok(Vec::new());
    }
    x.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

pub fn tensor(values: &[f64], shape: [usize; 4], dtype: DType) -> Result<Tensor> {
    Tensor::from_slice(values, shape.to_vec(), &Device::Cpu)?.to_dtype(dtype)
}

pub fn var(values: &[f64], shape: [usize; 4], dtype: DType) -> Result<Var> {
    Var::from_tensor(&tensor(values, shape, dtype)?)
}

/// What the crate gives, in the reference's order.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
}

/// Runs the crate forward and backward, with q, k and v stored as told.
pub fn run_stored(
    call: &Call,
    inputs: &Inputs,
    dtype: DType,
    backend: Backend,
    storages: [Storage; 3],
) -> Result<Run> {
    let dims = call.dims;
    let q = var(&inputs.q, dims.q(), dtype)?;
    let k = var(&inputs.k, dims.k(), dtype)?;
    let v = var(&inputs.v, dims.v(), dtype)?;
    let result = attend_with_lse(
        &store(&q, storages[0])?,
        &store(&k, storages[1])?,
        &store(&v, storages[2])?,
        &call.spec(backend)?,
    )?;
    assert_eq!(result.out.dims(), dims.out());
    assert_eq!(result.out.dtype(), dtype);
    assert_eq!(result.lse.dims(), [dims.b, dims.h, dims.t]);
    assert_eq!(result.lse.dtype(), accumulator(dtype));
    let grad = tensor(&inputs.grad, dims.out(), dtype)?;
    let gradients = (&result.out * &grad)?.sum_all()?.backward()?;
    // A call with no pair of a query and a key may leave no gradient at all: that is a gradient of 0.
    let gradient = |x: &Var| match gradients.get(x) {
        Some(gradient) => {
            assert_eq!(gradient.dims(), x.dims());
            assert_eq!(gradient.dtype(), dtype);
            values(gradient)
        }
        None => Ok(vec![0.; x.elem_count()]),
    };
    Ok(Run {
        out: values(&result.out)?,
        lse: values(&result.lse)?,
        dq: gradient(&q)?,
        dk: gradient(&k)?,
        dv: gradient(&v)?,
    })
}

pub fn run(call: &Call, inputs: &Inputs, dtype: DType, backend: Backend) -> Result<Run> {
    run_stored(call, inputs, dtype, backend, [Storage::Contiguous; 3])
}

/// The element that is off by most, as a part of what it may be off by.
#[derive(Clone, Copy, Debug)]
pub struct Deviation {
    pub at: usize,
    pub got: f64,
    pub want: f64,
    /// ∞ for a NaN.
    pub error: f64,
    pub allowed: f64,
    /// The plain evaluation's greatest error.
    pub plain_error: f64,
}

impl Deviation {
    fn ratio(&self) -> f64 {
        match self.error {
            0. => 0.,
            error => error / self.allowed,
        }
    }
}

/// How far a tensor is from the reference, by this module's rule.
pub fn deviation(
    name: &str,
    got: &[f64],
    exact: &Summed,
    plain: &Summed,
    dtype: DType,
) -> std::result::Result<Deviation, String> {
    if got.len() != exact.value.len() {
        return Err(format!(
            "{name}: {} elements, not {}",
            got.len(),
            exact.value.len()
        ));
    }
    let unit = unit_roundoff(accumulator(dtype));
    let stored = match name {
        "lse" => unit,
        _ => unit_roundoff(dtype),
    };
    // Weights below the accumulator's normal numbers may be 0.
    let underflow = 2.
        * match accumulator(dtype) {
            DType::F64 => f64::MIN_POSITIVE,
            _ => f64::from(f32::MIN_POSITIVE),
        };
    let smallest = match (name, dtype) {
        ("lse", _) => 0.,
        (_, DType::F64) => f64::MIN_POSITIVE,
        (_, DType::F16) => f64::from(f16::MIN_POSITIVE_SUBNORMAL),
        _ => f64::from(f32::MIN_POSITIVE),
    };
    // −∞ − −∞ is NaN, which max drops.
    let plain_error = (plain.value.iter().zip(&exact.value))
        .map(|(plain, exact)| (plain - exact).abs())
        .fold(0., f64::max);
    let mut worst = Deviation {
        at: 0,
        got: 0.,
        want: 0.,
        error: 0.,
        allowed: 0.,
        plain_error,
    };
    for (at, (&got, &want)) in got.iter().zip(&exact.value).enumerate() {
        let mass = exact.mass[at];
        let allowed = if mass == 0. {
            0.
        } else {
            2. * plain_error
                + exact.floor() * unit * mass
                + 2. * stored * want.abs()
                + underflow * exact.reach[at]
                + smallest
        };
        let difference = if got == want { 0. } else { (got - want).abs() };
        let here = Deviation {
            at,
            got,
            want,
            error: if difference.is_nan() {
                f64::INFINITY
            } else {
                difference
            },
            allowed,
            plain_error,
        };
        if at == 0 || here.ratio() > worst.ratio() {
            worst = here;
        }
    }
    Ok(worst)
}

/// Holds one tensor to the reference, or says which element is off and by how much.
pub fn compare(
    name: &str,
    got: &[f64],
    exact: &Summed,
    plain: &Summed,
    dtype: DType,
) -> std::result::Result<(), String> {
    let Deviation {
        at,
        got,
        want,
        error,
        allowed,
        plain_error,
    } = deviation(name, got, exact, plain, dtype)?;
    if error <= allowed {
        return Ok(());
    }
    Err(format!(
        "{name}[{at}] = {got:e}, should be {want:e}: off by {error:e}, allowed {allowed:e} \
         (plain evaluation is off by up to {plain_error:e})"
    ))
}

/// What a call has to give, and what a plain implementation would.
pub struct Expected {
    dtype: DType,
    exact: Attention,
    plain: Attention,
}

impl Expected {
    pub fn of(call: &Call, inputs: &Inputs, dtype: DType) -> Self {
        Self {
            dtype,
            exact: call.exact(inputs),
            plain: call.plain(inputs, dtype),
        }
    }

    /// Holds a run to the reference.
    pub fn agrees(&self, run: &Run) -> std::result::Result<(), String> {
        let (exact, plain) = (&self.exact, &self.plain);
        for (name, got, exact, plain) in [
            ("out", &run.out, &exact.out, &plain.out),
            ("lse", &run.lse, &exact.lse, &plain.lse),
            ("dq", &run.dq, &exact.dq, &plain.dq),
            ("dk", &run.dk, &exact.dk, &plain.dk),
            ("dv", &run.dv, &exact.dv, &plain.dv),
        ] {
            compare(name, got, exact, plain, self.dtype)?;
        }
        Ok(())
    }
}

/// Holds both paths to the reference, forward and backward.
pub fn check(call: &Call, inputs: &Inputs, dtype: DType) -> Result<()> {
    let expected = Expected::of(call, inputs, dtype);
    for backend in BACKENDS {
        if let Err(fault) = expected.agrees(&run(call, inputs, dtype, backend)?) {
            panic!("{backend:?} {dtype:?} {call:?}\n{fault}")
        }
    }
    Ok(())
}

/// The three scores, for heads of width `d`.
pub fn scores(h: usize, d: usize) -> [Score; 3] {
    [
        Score::Dot,
        linear_bias(h),
        Score::Phase {
            amp_dim: d.div_ceil(2),
            alpha: 0.1,
            phase_scale: None,
        },
    ]
}

/// Slopes that differ from head to head, none of them a power of 2.
pub fn linear_bias(h: usize) -> Score {
    Score::LinearBias {
        slopes: (0..h).map(|h| 0.3 / (1. + h as f64)).collect(),
    }
}
