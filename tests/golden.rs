//! Numbers computed by other people's code (and, for TAPA, by an independent 80-bit evaluation), against ours.
//!
//! Runs every case in `tests/golden/`, and every case in the directory that `GOLDEN_DIR` names, if it is set; on the
//! CPU and, built with the feature `cuda`, on the GPU too, where there is one. `--cpu` and `--cuda` choose one of the
//! two, other arguments the cases whose names contain one of them. A case is `NAME.json` (its `meta`) beside `NAME.safetensors`; its kind is the start of its name, and an unknown kind
//! fails. One line a case: its largest error over its tolerance, so anything above 1 fails, and so does a NaN.

use candle_core::{bail, DType, Device, Error, Result, Tensor, Var, D};
use candle_nn::VarBuilder;
use candle_posenc::encoding::{
    alibi_slopes, AlibiConfig, PhaseForm, RopeConfig, TapaConfig, TapeConfig,
};
use candle_posenc::hf::ModelFolder;
use candle_posenc::{
    attend, attend_with_lse, rotate, AttendSpec, Backend, Ctx, Encoding, EncodingConfig, KvCache,
    Layout, Llama, LlamaConfig, ModelDims, PosState, Positions, Precision, Qkv, Rotation, Score,
};
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[path = "reference/mod.rs"]
mod reference;

const CPU: Device = Device::Cpu;
/// What rounding weights and results to bf16 may add to an output, relative to the largest: half of it each. (Gradients
/// are sums in which rounded terms cancel: they are held to what a plain evaluation in bf16 is off by.)
const ROUNDED_TO_BF16: f64 = 1. / 256.;
const BACKENDS: [Backend; 2] = [Backend::Dense, Backend::Fused];

/// Largest allowed max|ours − reference| / max|reference| of a tensor: in f64, and in f32 for outputs and for
/// gradients (`None`: f32 is noise). They are 10 × the error of a plain f32 evaluation, as the makers of the
/// numbers measured it, not of our code.
type Tolerance = (f64, Option<(f64, f64)>);

fn tolerance(name: &str) -> Result<Tolerance> {
    Ok(match name {
        "tapa_bigphase_d16" => (1e-12, Some((2e-4, 1e-3))),
        "tapa_bigphase_d64" => (1e-12, Some((1e-4, 6e-4))),
        "tapa_causal_d128" => (1e-12, Some((7e-6, 2e-5))),
        "tapa_causal_d16" => (1e-12, Some((2e-5, 8e-5))),
        "tapa_causal_d64" => (1e-12, Some((3e-6, 6e-6))),
        "tapa_decode1_d64" => (1e-12, Some((1e-5, 2e-5))),
        "tapa_decode3_d16" => (1e-12, Some((2e-5, 2e-5))),
        "tapa_gap1e6_d16_a1.0" => (2e-8, None),
        "tapa_gap1e6_d64_a0.1" => (1e-12, Some((1e-5, 3e-5))),
        "tapa_gap1e6_d64_a0.5" => (1e-11, Some((3e-3, 3e-3))),
        "tapa_gqa_d64" => (1e-12, Some((3e-6, 7e-6))),
        "tapa_gqa_noncausal_d16" => (1e-12, Some((2e-5, 3e-5))),
        "tapa_linear_d64" => (1e-12, Some((4e-6, 1e-5))),
        "tapa_linear_gqa_noncausal_d16" => (1e-12, Some((4e-5, 3e-5))),
        "tapa_noncausal_d64" => (1e-12, Some((1e-5, 2e-5))),
        "tapa_offset100000_d64" => (1e-12, Some((3e-6, 2e-5))),
        "tapa_window5_d64" => (1e-12, Some((3e-6, 1e-5))),
        "tape_attention_0_rope" => (1e-11, Some((6e-6, 6e-6))),
        "tape_attention_1_tied" => (1e-11, Some((8e-6, 1e-5))),
        "tape_layer_0_rope" => (1e-11, Some((8e-6, 8e-6))),
        "tape_layer_1_tied" => (1e-11, Some((8e-6, 1e-5))),
        "tape_model2" => (1e-9, Some((1e-5, 1e-5))),
        "tape_pelayer_0_tied" => (1e-11, Some((2e-6, 6e-6))),
        "tape_pelayer_1_tied" => (1e-11, Some((2e-6, 5e-6))),
        "tape_stack3" => (1e-9, Some((5e-5, 3e-4))),
        _ if name.starts_with("plain_") => (1e-12, Some((3e-6, 5e-6))),
        _ => bail!("no tolerance is recorded for {name}"),
    })
}

/// References stored in f32 cannot be met better than this, relative to the largest.
const STORED_IN_F32: f64 = 2e-7;

fn main() -> ExitCode {
    let (options, names): (Vec<String>, Vec<String>) = std::env::args()
        .skip(1)
        .partition(|arg| arg.starts_with("--"));
    let only = |option: &str| options.iter().any(|arg| arg == option);
    let local = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let elsewhere = std::env::var_os("GOLDEN_DIR").map(PathBuf::from);
    // A program that was carried to another machine has only the folder that it is told.
    let mut folders = Vec::new();
    if local.exists() || elsewhere.is_none() {
        folders.push(local);
    }
    folders.extend(elsewhere);
    let mut total = Total::default();
    if !only("--cuda") {
        total.add(run_folders(&folders, &names, &CPU));
    }
    if only("--cuda") || (cfg!(feature = "cuda") && !only("--cpu")) {
        let device = match cfg!(feature = "cuda") {
            true => Device::new_cuda(0).map_err(|error| {
                let text = error.to_string();
                format!(
                    "no CUDA device ({})",
                    text.lines().next().unwrap_or_default()
                )
            }),
            false => Err("built without the feature cuda".to_string()),
        };
        match device {
            Ok(device) => total.add(run_folders(&folders, &names, &device)),
            Err(why) => {
                println!("skipped every case on the GPU: {why}");
                total.gpu_missing = true;
            }
        }
    }
    let Total {
        passed,
        failed,
        skipped,
        gpu_missing,
    } = total;
    println!("golden: {passed} passed, {failed} failed, {skipped} skipped");
    if failed == 0 && (passed > 0 || gpu_missing) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// What became of the cases.
#[derive(Default)]
struct Total {
    passed: usize,
    failed: usize,
    skipped: usize,
    gpu_missing: bool,
}

impl Total {
    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

fn run_folders(folders: &[PathBuf], names: &[String], device: &Device) -> Total {
    let mut total = Total::default();
    for folder in folders {
        println!(
            "golden cases in {} on {:?}",
            folder.display(),
            device.location()
        );
        let all = match case_names(folder) {
            Ok(all) if !all.is_empty() => all,
            Ok(_) => {
                println!("FAILED  {}: no case in this folder", folder.display());
                total.failed += 1;
                continue;
            }
            Err(error) => {
                println!("FAILED  {}: {error}", folder.display());
                total.failed += 1;
                continue;
            }
        };
        let chosen = |name: &String| {
            names.is_empty() || names.iter().any(|part| name.contains(part.as_str()))
        };
        for name in all.into_iter().filter(chosen) {
            match run(folder, &name, device) {
                Ok(Outcome::Skipped(why)) => {
                    println!("skipped {name}: {why}");
                    total.skipped += 1;
                }
                Ok(Outcome::Ran(report)) => {
                    let verdict = if report.passed() {
                        "ok     "
                    } else {
                        "FAILED "
                    };
                    println!("{verdict} {name}: {report}");
                    *(if report.passed() {
                        &mut total.passed
                    } else {
                        &mut total.failed
                    }) += 1;
                }
                Err(error) => {
                    println!("FAILED  {name}: {error}");
                    total.failed += 1;
                }
            }
        }
    }
    total
}

fn case_names(folder: &Path) -> std::io::Result<Vec<String>> {
    let mut names: Vec<String> = std::fs::read_dir(folder)?
        .filter_map(|entry| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            name.strip_suffix(".json").map(str::to_string)
        })
        .collect();
    names.sort();
    Ok(names)
}

enum Outcome {
    Ran(Report),
    Skipped(&'static str),
}

/// The largest error over its tolerance that a case has shown so far.
#[derive(Default)]
struct Report {
    compared: usize,
    worst: f64,
    worst_at: String,
    remarks: Vec<&'static str>,
}

impl Report {
    fn passed(&self) -> bool {
        self.compared > 0 && self.worst <= 1.
    }

    fn record(&mut self, label: String, error_over_tolerance: f64) {
        self.compared += 1;
        let error = if error_over_tolerance.is_nan() {
            f64::INFINITY
        } else {
            error_over_tolerance
        };
        if error >= self.worst {
            (self.worst, self.worst_at) = (error, label);
        }
    }

    /// Compares relative to the largest reference. Equal infinities agree.
    fn relative(
        &mut self,
        label: String,
        ours: &Tensor,
        want: &Tensor,
        tolerance: f64,
    ) -> Result<()> {
        let tolerance = match want.dtype() {
            DType::F32 => tolerance.max(STORED_IN_F32),
            _ => tolerance,
        };
        let want = values(want)?;
        let largest = want
            .iter()
            .filter(|x| x.is_finite())
            .fold(0f64, |a, x| a.max(x.abs()));
        self.record_difference(label, ours, &want, tolerance * largest)
    }

    fn absolute(
        &mut self,
        label: String,
        ours: &Tensor,
        want: &Tensor,
        tolerance: f64,
    ) -> Result<()> {
        self.record_difference(label, ours, &values(want)?, tolerance)
    }

    fn record_difference(
        &mut self,
        label: String,
        ours: &Tensor,
        want: &[f64],
        bound: f64,
    ) -> Result<()> {
        let ours = values(ours)?;
        if ours.len() != want.len() {
            bail!(
                "{label}: {} values for {} of the reference",
                ours.len(),
                want.len()
            )
        }
        let worst = ours.iter().zip(want).fold(0f64, |worst, (a, b)| {
            let difference = if a == b { 0. } else { (a - b).abs() };
            if difference.is_nan() {
                f64::INFINITY
            } else {
                worst.max(difference)
            }
        });
        self.record(label, if worst == 0. { 0. } else { worst / bound });
        Ok(())
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            compared,
            worst,
            worst_at,
            remarks,
        } = self;
        write!(
            f,
            "{worst:.3} of the tolerance at {worst_at}, {compared} tensors"
        )?;
        for remark in remarks {
            write!(f, "; {remark}")?;
        }
        Ok(())
    }
}

fn values(x: &Tensor) -> Result<Vec<f64>> {
    x.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

/// The tensors and facts of a case.
struct Case {
    name: String,
    meta: Value,
    /// On the CPU; what is computed with is carried to `device`.
    tensors: HashMap<String, Tensor>,
    device: Device,
}

impl Case {
    fn load(folder: &Path, name: &str, device: &Device) -> Result<Self> {
        let text = std::fs::read_to_string(folder.join(format!("{name}.json")))?;
        let meta: Value = serde_json::from_str(&text).map_err(Error::wrap)?;
        Ok(Self {
            name: name.to_string(),
            meta: meta["meta"].clone(),
            tensors: candle_core::safetensors::load(
                folder.join(format!("{name}.safetensors")),
                &CPU,
            )?,
            device: device.clone(),
        })
    }

    fn tensor(&self, key: &str) -> Result<&Tensor> {
        match self.tensors.get(key) {
            Some(tensor) => Ok(tensor),
            None => bail!("{} has no tensor {key}", self.name),
        }
    }

    fn on_device(&self, key: &str, dtype: DType) -> Result<Tensor> {
        self.tensor(key)?.to_dtype(dtype)?.to_device(&self.device)
    }

    fn var(&self, key: &str, dtype: DType) -> Result<Var> {
        Var::from_tensor(&self.on_device(key, dtype)?)
    }

    fn number(&self, key: &str) -> Result<f64> {
        number(&self.meta, key)
    }

    fn size(&self, key: &str) -> Result<usize> {
        Ok(self.number(key)? as usize)
    }
}

fn number(value: &Value, key: &str) -> Result<f64> {
    match value[key].as_f64() {
        Some(x) => Ok(x),
        None => bail!("{key} is no number in {value}"),
    }
}

fn run(folder: &Path, name: &str, device: &Device) -> Result<Outcome> {
    if name.contains("untied") {
        return Ok(Outcome::Skipped(
            "states whose halves differ are out of scope: the published model never reaches them",
        ));
    }
    if let Some(model) = name.strip_suffix("_io") {
        let case = Case::load(folder, name, device)?;
        let mut report = Report::default();
        llama(&folder.join(model), &case, &mut report)?;
        return Ok(Outcome::Ran(report));
    }
    let case = Case::load(folder, name, device)?;
    let mut report = Report::default();
    let check: fn(&Case, &mut Report) -> Result<()> = match name {
        "alibi_slopes" => alibi_slope_values,
        "alibi_bias" => alibi_bias,
        "rope_inv_freq" => rope_frequencies,
        "tape_init_state" => tape_initial_state,
        "tape_model2" => tape_model,
        "tape_stack3" => tape_layers,
        _ if name.starts_with("rope_applied_") => rope_applied,
        _ if name.starts_with("plain_") || name.starts_with("tapa_") => attention,
        _ if name.starts_with("tape_pelayer_") => tape_token_update,
        _ if name.starts_with("tape_attention_") => tape_attention,
        _ if name.starts_with("tape_layer_") => tape_layers,
        _ => bail!("unknown kind of case"),
    };
    check(&case, &mut report)?;
    Ok(Outcome::Ran(report))
}

/// The dtypes of a case with their tolerances (dtype, outputs, gradients).
fn precisions(case: &Case, report: &mut Report) -> Result<Vec<(DType, f64, f64)>> {
    let (in_f64, in_f32) = tolerance(&case.name)?;
    let mut precisions = vec![(DType::F64, in_f64, in_f64)];
    match in_f32 {
        Some((outputs, gradients)) => precisions.push((DType::F32, outputs, gradients)),
        None => report
            .remarks
            .push("float64 only, f32 skipped: its phase is noise there"),
    }
    Ok(precisions)
}

/// `llama_*_io`: logits of a whole model, at once and token by token, and the tokens it chooses; from the folder beside
/// the case, with the configuration of transformers 5 and with that of transformers 4.
fn llama(folder: &Path, case: &Case, report: &mut Report) -> Result<()> {
    let ids = case.tensor("input_ids")?;
    let chosen = case.tensor("greedy_tokens")?;
    let (batch, len) = ids.dims2()?;
    let last = |logits: &Tensor| logits.narrow(1, logits.dim(1)? - 1, 1);
    for config in ["config.json", "config.v4.json"] {
        let copy = tempfile::tempdir()?;
        for (from, to) in [
            (config, "config.json"),
            ("model.safetensors", "model.safetensors"),
        ] {
            std::fs::copy(folder.join(from), copy.path().join(to))?;
        }
        let saved = ModelFolder::open(copy.path())?;
        for (dtype, tolerance) in [(DType::F64, 1e-9), (DType::F32, 1e-4)] {
            let model = saved.load(dtype, &case.device)?;
            let mut cache = KvCache::new(saved.config().num_hidden_layers);
            let mut run = |tokens: &Tensor, from: usize| {
                let positions = Positions::Span {
                    start: from as i64,
                    len: tokens.dim(1)?,
                };
                let tokens = tokens.to_device(&case.device)?;
                model.forward_at(&tokens, &positions, Some(&mut cache), &mut Ctx::default())
            };
            let at = |what: &str| format!("{what} {dtype:?} {config}");
            let logits = run(ids, 0)?;
            report.absolute(
                at("prefill_logits"),
                &logits,
                case.tensor("prefill_logits")?,
                tolerance,
            )?;
            let mut steps = vec![last(&logits)?];
            let mut tokens = Vec::new();
            for step in 0..chosen.dim(1)? {
                let best = steps[step].argmax(D::Minus1)?; // (B,1)
                steps.push(run(&best, len + step)?);
                tokens.push(best.to_dtype(DType::I64)?);
            }
            let tokens = Tensor::cat(&tokens, 1)?.reshape((batch, ()))?;
            report.absolute(at("greedy_tokens"), &tokens, chosen, 0.)?;
            let steps = Tensor::cat(&steps, 1)?;
            report.absolute(
                at("step_logits"),
                &steps,
                case.tensor("step_logits")?,
                tolerance,
            )?;
        }
    }
    Ok(())
}

/// `plain_*`, `plain_alibi_*` and `tapa_*`: out, lse, dq, dk, dv.
fn attention(case: &Case, report: &mut Report) -> Result<()> {
    let (_, h, _, d) = case.tensor("q")?.dims4()?;
    let g = case.tensor("k")?.dim(1)?;
    let dims = ModelDims {
        width: h * d,
        heads: h,
        kv_heads: g,
        head_dim: d,
        layers: 1,
        max_positions: 1 << 21,
    };
    let config = if case.name.starts_with("tapa_") {
        EncodingConfig::Tapa(TapaConfig {
            theta: case.number("theta")?,
            alpha: case.number("alpha")?,
            phase: match case.meta["variant"].as_str() {
                Some("quadratic") => PhaseForm::Quadratic,
                Some("linear") => PhaseForm::Linear,
                other => bail!("unknown variant {other:?}"),
            },
            phase_norm: None,
        })
    } else if case.name.starts_with("plain_alibi_") {
        EncodingConfig::Alibi(AlibiConfig {
            slopes: Some(values(case.tensor("slopes")?)?),
        })
    } else {
        EncodingConfig::Nope
    };
    let row = |key: &str| Positions::explicit(case.tensor(key)?.unsqueeze(0)?, None);
    let mut precisions = precisions(case, report)?;
    let exact_in = case.meta["inputs_exact_in"].as_str().unwrap_or_default();
    // The linear form's phase goes through sums of inputs, which bf16 would round.
    let exact = exact_in.contains("bf16") && case.meta["variant"] != "linear";
    if let (Some((outputs, gradients)), true) = (tolerance(&case.name)?.1, exact) {
        precisions.push((DType::BF16, outputs, gradients));
    }
    for (dtype, out_tolerance, grad_tolerance) in precisions {
        let encoding = config.build(&dims, VarBuilder::zeros(dtype, &case.device))?;
        let plain = match dtype {
            DType::BF16 => Some(PlainBf16::of(case, encoding.score(0))?),
            _ => None,
        };
        for backend in BACKENDS {
            let [q, k, v] = ["q", "k", "v"].map(|key| case.var(key, dtype));
            let (q, k, v) = (q?, k?, v?);
            let state = PosState {
                positions: Positions::first(1),
                rotation: None,
            };
            let qkv = Qkv {
                q: q.as_tensor().clone(),
                k: k.as_tensor().clone(),
                v: v.as_tensor().clone(),
            };
            let qkv = encoding.encode(0, qkv, &state)?;
            let spec = AttendSpec {
                causal: case.meta["causal"].as_bool().unwrap_or(false),
                window: case.meta["window"].as_u64().map(|w| w as usize),
                backend,
                precision: Precision::Precise,
                ..AttendSpec::causal().with_score(encoding.score(0))
            }
            .with_positions(row("q_pos")?, row("k_pos")?);
            let result = attend_with_lse(&qkv.q, &qkv.k, &qkv.v, &spec)?;
            let upstream = case.on_device("dout", dtype)?;
            let gradients = (&result.out * upstream)?.sum_all()?.backward()?;
            let at = |what: &str| format!("{what} {dtype:?} {backend:?}");
            let out = case.tensor("out")?;
            let rounding = plain.as_ref().map_or(0., |_| ROUNDED_TO_BF16);
            report.relative(at("out"), &result.out, out, out_tolerance + rounding)?;
            report.relative(at("lse"), &result.lse, case.tensor("lse")?, out_tolerance)?;
            for (name, var) in [("dq", &q), ("dk", &k), ("dv", &v)] {
                let Some(gradient) = gradients.get(var) else {
                    bail!("{name} got no gradient")
                };
                let want = case.tensor(name)?;
                let rounding = match &plain {
                    Some(plain) => 2. * plain.gradient_error(name, want)?,
                    None => 0.,
                };
                report.relative(at(name), gradient, want, grad_tolerance + rounding)?;
            }
        }
    }
    Ok(())
}

/// What a plain evaluation of a case in bf16 gives: weights, dP, dS and results each rounded. No kernel that multiplies
/// matrices of bf16 can be held to less than its own rounding: the rule of the flash-attention authors is twice that.
struct PlainBf16(reference::Attention);

impl PlainBf16 {
    fn of(case: &Case, score: Score) -> Result<Self> {
        let (b, h, t, d) = case.tensor("q")?.dims4()?;
        let (_, g, s, e) = case.tensor("v")?.dims4()?;
        let rows = |key: &str| -> Result<reference::Rows> {
            Ok(vec![case
                .tensor(key)?
                .to_dtype(DType::I64)?
                .flatten_all()?
                .to_vec1()?])
        };
        #[rustfmt::skip]
        let dims = reference::Dims { b, h, g, t, s, d, e };
        let call = reference::Call {
            causal: case.meta["causal"].as_bool().unwrap_or(false),
            window: case.meta["window"].as_u64().map(|w| w as usize),
            ..reference::Call::new(dims).with_score(score)
        }
        .with_positions(rows("q_pos")?, rows("k_pos")?);
        let of = |key: &str| values(case.tensor(key)?);
        let inputs = reference::Inputs {
            q: of("q")?,
            k: of("k")?,
            v: of("v")?,
            grad: of("dout")?,
        };
        Ok(Self(call.plain(&inputs, DType::BF16)))
    }

    /// Its largest error, relative to the largest of the case's numbers.
    fn gradient_error(&self, name: &str, want: &Tensor) -> Result<f64> {
        let got = match name {
            "dq" => &self.0.dq.value,
            "dk" => &self.0.dk.value,
            "dv" => &self.0.dv.value,
            _ => bail!("{name} is no gradient"),
        };
        let want = values(want)?;
        if got.len() != want.len() {
            bail!("{name}: {} values for {}", got.len(), want.len())
        }
        let largest = |all: &mut dyn Iterator<Item = f64>| all.fold(0f64, |a, x| a.max(x.abs()));
        let error = largest(&mut got.iter().zip(&want).map(|(got, want)| got - want));
        Ok(error / largest(&mut want.iter().copied()))
    }
}

/// `hN.slopes` in f64, and the libraries' f32 values.
fn alibi_slope_values(case: &Case, report: &mut Report) -> Result<()> {
    for (key, want) in &case.tensors {
        let Some((heads, kind)) = key.strip_prefix('h').and_then(|k| k.split_once('.')) else {
            bail!("unknown key {key}")
        };
        let tolerance = match kind {
            "slopes" => 1e-14,
            "bloom_f32" | "mpt_f32" => 1e-6,
            "falcon_bf16" => 4e-3, // rounded to bf16 there
            _ => bail!("unknown key {key}"),
        };
        let slopes = alibi_slopes(heads.parse().map_err(Error::wrap)?);
        let worst = slopes
            .iter()
            .zip(values(want)?)
            .map(|(ours, want)| ((ours - want) / want).abs())
            .fold(
                0f64,
                |a, b| if b.is_nan() { f64::INFINITY } else { a.max(b) },
            );
        if slopes.len() != want.elem_count() {
            bail!("{key}: {} slopes", slopes.len())
        }
        report.record(key.clone(), worst / tolerance);
    }
    Ok(())
}

/// With q = k = 0 and v the identity, attention returns softmax of the bias itself.
fn alibi_bias(case: &Case, report: &mut Report) -> Result<()> {
    let Some(cases) = case.meta["cases"].as_object() else {
        bail!("no cases")
    };
    for name in cases.keys().map(|key| key.trim_end_matches('.')) {
        let bias = case.tensor(&format!("{name}.bias"))?; // (H,T,S)
        let allowed = case.tensor(&format!("{name}.allowed"))?; // (T,S)
        let (h, t, s) = bias.dims3()?;
        let dims = ModelDims {
            width: h,
            heads: h,
            kv_heads: h,
            head_dim: 1,
            layers: 1,
            max_positions: 64,
        };
        let encoding = EncodingConfig::Alibi(AlibiConfig { slopes: None })
            .build(&dims, VarBuilder::zeros(DType::F64, &case.device))?;
        let allowed = allowed.broadcast_as((h, t, s))?;
        let masked =
            allowed.where_cond(bias, &Tensor::full(f64::NEG_INFINITY, (h, t, s), &CPU)?)?;
        let want = candle_nn::ops::softmax(&masked, D::Minus1)?;
        let want_lse = masked.exp()?.sum(D::Minus1)?.log()?;
        for (dtype, tolerance) in [(DType::F64, 1e-13), (DType::F32, 1e-6)] {
            let zeros = |n: usize| Tensor::zeros((1, h, n, 4), dtype, &case.device);
            let identity = Tensor::eye(s, dtype, &case.device)?.broadcast_as((1, h, s, s))?;
            for backend in BACKENDS {
                let row = |key: &str| {
                    Positions::explicit(case.tensor(&format!("{name}.{key}"))?.unsqueeze(0)?, None)
                };
                let spec = AttendSpec {
                    backend,
                    ..AttendSpec::causal().with_score(encoding.score(0))
                }
                .with_positions(row("q_pos")?, row("k_pos")?);
                let result = attend_with_lse(&zeros(t)?, &zeros(s)?, &identity, &spec)?;
                let at = |what: &str| format!("{name} {what} {dtype:?} {backend:?}");
                report.absolute(at("weights"), &result.out, &want, tolerance)?;
                report.absolute(at("lse"), &result.lse, &want_lse, 10. * tolerance)?;
            }
        }
    }
    Ok(())
}

/// Every scaling's frequencies and temperature.
fn rope_frequencies(case: &Case, report: &mut Report) -> Result<()> {
    let Some(cases) = case.meta["cases"].as_object() else {
        bail!("no cases")
    };
    for (name, facts) in cases {
        let config = RopeConfig::from_hf(&serde_json::json!({
            "head_dim": facts["head_dim"],
            "max_position_embeddings": facts["max_position_embeddings"],
            "rope_parameters": facts["rope_parameters"],
        }))?;
        let frequencies = config.frequencies(
            number(facts, "head_dim")? as usize,
            number(facts, "max_position_embeddings")? as usize,
            facts["seq_len"].as_u64().map(|n| n as usize),
        )?;
        for (key, tolerance) in [("inv_freq", 1e-12), ("inv_freq_hf_f32", 1e-6)] {
            let want = values(case.tensor(&format!("{name}.{key}"))?)?;
            if want.len() != frequencies.inv_freq.len() {
                bail!(
                    "{name}: {} frequencies for {}",
                    frequencies.inv_freq.len(),
                    want.len()
                )
            }
            let worst = frequencies
                .inv_freq
                .iter()
                .zip(&want)
                .map(|(a, b)| if a == b { 0. } else { ((a - b) / b).abs() })
                .fold(
                    0f64,
                    |a, b| if b.is_nan() { f64::INFINITY } else { a.max(b) },
                );
            report.record(format!("{name} {key}"), worst / tolerance);
        }
        let want = values(case.tensor(&format!("{name}.attention_scaling"))?)?[0];
        let error = (frequencies.attention_scaling - want).abs() / want;
        report.record(format!("{name} attention_scaling"), error / 1e-12);
    }
    Ok(())
}

/// Rotated q and k, and their gradients, in both layouts, near and far from position 0.
fn rope_applied(case: &Case, report: &mut Report) -> Result<()> {
    let facts = &case.meta;
    let parameters = ["rope_parameters", "rope"]
        .iter()
        .find_map(|key| facts.get(*key).filter(|value| value.is_object()));
    let Some(parameters) = parameters else {
        bail!("no rope parameters in {facts}")
    };
    let head_dim = case.size("head_dim")?;
    let max_positions = case.size("max_position_embeddings")?;
    let base = RopeConfig::from_hf(&serde_json::json!({
        "head_dim": head_dim,
        "max_position_embeddings": max_positions,
        "rope_parameters": parameters,
    }))?;
    let dims = ModelDims {
        width: 2 * head_dim,
        heads: 2,
        kv_heads: 1,
        head_dim,
        layers: 1,
        max_positions,
    };
    for start in [0i64, 5, 100_000] {
        let key = |what: &str| format!("start{start}.{what}");
        let positions = Positions::explicit(case.tensor(&key("positions"))?.unsqueeze(0)?, None)?;
        let last = start + positions.len() as i64;
        for (dtype, near, far) in [(DType::F64, 1e-12, 1e-9), (DType::F32, 5e-6, 5e-6)] {
            let tolerance = if start > 1000 { far } else { near };
            let rotation = base.rotation(
                &dims,
                &positions,
                1,
                dtype,
                &case.device,
                Some(last as usize),
            )?;
            let tables = [("cos", &rotation.cos), ("sin", &rotation.sin)];
            for (name, table) in tables {
                let want = case.tensor(&key(name))?;
                report.absolute(
                    format!("start{start} {name} {dtype:?}"),
                    table,
                    want,
                    tolerance,
                )?;
            }
            for (layout, prefix) in [(Layout::Half, "half"), (Layout::Interleaved, "interleaved")] {
                for (input, weight, rotated, gradient) in
                    [("q", "wq", "q_rot", "dq"), ("k", "wk", "k_rot", "dk")]
                {
                    let x = case.var(&key(input), dtype)?;
                    let upstream = case.on_device(&key(weight), dtype)?;
                    let turned = rotate(&x, &rotation, layout)?;
                    let gradients = (&turned * upstream)?.sum_all()?.backward()?;
                    let Some(dx) = gradients.get(&x) else {
                        bail!("{input} got no gradient")
                    };
                    let at = |what: &str| format!("start{start} {prefix} {what} {dtype:?}");
                    let want = |what: &str| case.tensor(&key(&format!("{prefix}.{what}")));
                    report.absolute(at(rotated), &turned, want(rotated)?, tolerance)?;
                    report.absolute(at(gradient), dx, want(gradient)?, tolerance)?;
                }
            }
        }
    }
    Ok(())
}

/// A published TAPE model stores every number of the state twice, once for each half of the head. We hold one
/// complex number a pair, so the first half is the state, and gradients are the sum of the halves.
fn first_half(x: &Tensor) -> Result<Tensor> {
    x.narrow(D::Minus1, 0, x.dim(D::Minus1)? / 2)?.contiguous()
}

fn sum_of_halves(x: &Tensor) -> Result<Tensor> {
    let x = x.to_dtype(DType::F64)?;
    let half = x.dim(D::Minus1)? / 2;
    x.narrow(D::Minus1, 0, half)? + x.narrow(D::Minus1, half, half)?
}

fn tape_dims(case: &Case, layers: usize) -> Result<ModelDims> {
    let heads = case.size("heads")?;
    Ok(ModelDims {
        width: case.size("hidden")?,
        heads,
        kv_heads: heads,
        head_dim: case.size("head_dim")?,
        layers,
        max_positions: 2048,
    })
}

/// Weights of a case as variables, under the names that the encoding looks up.
fn tape_weights(
    case: &Case,
    dtype: DType,
    rename: impl Fn(&str) -> String,
) -> Result<HashMap<String, Var>> {
    case.tensors
        .keys()
        .filter_map(|key| key.strip_prefix("w."))
        .map(|key| Ok((rename(key), case.var(&format!("w.{key}"), dtype)?)))
        .collect()
}

fn builder(case: &Case, weights: &HashMap<String, Var>, dtype: DType) -> VarBuilder<'static> {
    let tensors = weights
        .iter()
        .map(|(name, var)| (name.clone(), var.as_tensor().clone()))
        .collect();
    VarBuilder::from_tensors(tensors, dtype, &case.device)
}

/// Compares gradients of every weight that the case has one for.
fn tape_weight_gradients(
    case: &Case,
    report: &mut Report,
    gradients: &candle_core::backprop::GradStore,
    weights: &HashMap<String, Var>,
    rename: impl Fn(&str) -> String,
    (dtype, backend, tolerance): (DType, Backend, f64),
) -> Result<()> {
    for key in case.tensors.keys() {
        let Some(name) = key.strip_prefix("grad.w.") else {
            continue;
        };
        let Some(gradient) = weights
            .get(&rename(name))
            .and_then(|var| gradients.get(var))
        else {
            bail!("{name} got no gradient")
        };
        report.relative(
            format!("{key} {dtype:?} {backend:?}"),
            gradient,
            case.tensor(key)?,
            tolerance,
        )?;
    }
    Ok(())
}

/// The initial state: RoPE's angles, linear scaling only, from a shifted position on.
fn tape_initial_state(case: &Case, report: &mut Report) -> Result<()> {
    let Some(cases) = case.meta["cases"].as_object() else {
        bail!("no cases")
    };
    for (name, facts) in cases {
        let beyond_max = name == "beyond_max";
        let shift = if beyond_max {
            0.
        } else {
            number(facts, "shift")?
        };
        let rope = match facts["scaling_factor"].as_f64() {
            Some(factor) if factor != 1. => serde_json::json!({
                "rope_theta": facts["base"], "rope_scaling": { "type": "linear", "factor": factor },
            }),
            _ => serde_json::json!({ "rope_theta": 10000. }),
        };
        let (heads, head_dim) = (
            number(facts, "heads")? as usize,
            number(facts, "head_dim")? as usize,
        );
        let dims = ModelDims {
            width: heads * head_dim,
            heads,
            kv_heads: heads,
            head_dim,
            layers: 1,
            max_positions: facts["max_position_embeddings"].as_u64().unwrap_or(2048) as usize,
        };
        let config = TapeConfig {
            rope: RopeConfig::from_hf(&rope)?,
            position_size: 4,
            ..TapeConfig::default()
        };
        let encoding = EncodingConfig::Tape(config)
            .build(&dims, VarBuilder::zeros(DType::F64, &case.device))?;
        let t = number(facts, "seq")? as usize;
        let positions = Positions::Span {
            start: shift as i64,
            len: t,
        };
        for dtype in [DType::F64, DType::F32] {
            let x = Tensor::zeros((1, t, heads * head_dim), dtype, &case.device)?;
            let Some(rotation) = encoding
                .begin(&x, &positions, &mut Ctx::default())?
                .rotation
            else {
                bail!("TAPE began without a state")
            };
            for (what, ours) in [("cos", &rotation.cos), ("sin", &rotation.sin)] {
                let ours = ours.broadcast_as((1, heads, t, head_dim / 2))?;
                for (prefix, tolerance) in [("", 1e-10), ("f32.", 1e-6 + shift * 1.2e-7)] {
                    if beyond_max && prefix.is_empty() {
                        continue; // only the f32 run of the published code is stored
                    }
                    let tolerance = if dtype == DType::F32 {
                        1e-6 + shift * 1.2e-7
                    } else {
                        tolerance
                    };
                    let want = case.tensor(&format!("{name}.{prefix}{what}"))?;
                    let half = want.dim(D::Minus1)? / 2;
                    for (start, which) in [(0, "first"), (half, "second")] {
                        let want = want.narrow(D::Minus1, start, half)?;
                        let at = format!("{name} {prefix}{what} {which} half {dtype:?}");
                        report.absolute(at, &ours, &want, tolerance)?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// The token-wise update alone. The published layer returns what is to be added to the state.
fn tape_token_update(case: &Case, report: &mut Report) -> Result<()> {
    let rename = |key: &str| format!("layers.0.pe.{key}");
    for (dtype, out_tolerance, grad_tolerance) in precisions(case, report)? {
        let mut weights = tape_weights(case, dtype, rename)?;
        for name in ["up_proj.weight", "x_proj.weight", "down_proj.weight"] {
            // The last layer's state is never used, so the layer under test must not be the last.
            weights.insert(
                format!("layers.1.pe.{name}"),
                case.var(&format!("w.{name}"), dtype)?,
            );
        }
        let config = TapeConfig {
            attention_update: false,
            position_size: case.size("position_size")?,
            ..TapeConfig::default()
        };
        let encoding = EncodingConfig::Tape(config)
            .build(&tape_dims(case, 2)?, builder(case, &weights, dtype))?;
        let x = case.var("in.x", dtype)?;
        let (cos, sin) = tape_state(case, dtype)?;
        let state = PosState {
            positions: Positions::first(case.size("seq")?),
            rotation: Some(Rotation {
                cos: cos.as_tensor().clone(),
                sin: sin.as_tensor().clone(),
            }),
        };
        let Some(new) = encoding.update(0, state, None, &x)?.rotation else {
            bail!("the update lost the state")
        };
        let mut loss = Tensor::zeros((), dtype, &case.device)?;
        for (what, new, old) in [("cos", &new.cos, &cos), ("sin", &new.sin, &sin)] {
            let change = (new - old.as_tensor())?;
            let want = first_half(case.tensor(&format!("out.{what}"))?)?;
            report.relative(
                format!("out.{what} {dtype:?}"),
                &change,
                &want,
                out_tolerance,
            )?;
            let upstream = sum_of_halves(case.tensor(&format!("r.{what}"))?)?;
            loss = (loss + weighted_sum(&change, &upstream)?)?;
        }
        let gradients = loss.backward()?;
        for (name, var, halves) in [("x", &x, false), ("cos", &cos, true), ("sin", &sin, true)] {
            let want = case.tensor(&format!("grad.in.{name}"))?;
            let want = if halves {
                sum_of_halves(want)?
            } else {
                want.clone()
            };
            let Some(gradient) = gradients.get(var) else {
                bail!("{name} got no gradient")
            };
            report.relative(
                format!("grad.in.{name} {dtype:?}"),
                gradient,
                &want,
                grad_tolerance,
            )?;
        }
        let run = (dtype, Backend::Auto, grad_tolerance);
        tape_weight_gradients(case, report, &gradients, &weights, rename, run)?;
    }
    Ok(())
}

fn tape_state(case: &Case, dtype: DType) -> Result<(Var, Var)> {
    let half = |key: &str| Var::from_tensor(&first_half(&case.on_device(key, dtype)?)?);
    Ok((half("in.cos")?, half("in.sin")?))
}

/// sum(x · weight), the weight in x's dtype.
fn weighted_sum(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    (x * weight.to_dtype(x.dtype())?.to_device(x.device())?)?.sum_all()
}

/// x (B,T,C) · weightᵀ.
fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    x.broadcast_matmul(&weight.t()?)
}

/// One layer's projections and attention, by its encoding's hooks: its output (B,T,C) and what it carried.
fn tape_attend(
    x: &Tensor,
    weight: &dyn Fn(&str) -> Result<Tensor>,
    encoding: &dyn Encoding,
    layer: usize,
    state: &PosState,
    (heads, backend): (usize, Backend),
) -> Result<(Tensor, Tensor)> {
    let (b, t, c) = x.dims3()?;
    let project = |name: &str| {
        linear(x, &weight(name)?)?
            .reshape((b, t, heads, c / heads))?
            .transpose(1, 2)
    };
    let qkv = Qkv {
        q: project("q_proj")?,
        k: project("k_proj")?,
        v: project("v_proj")?,
    };
    let qkv = encoding.encode(layer, qkv, state)?;
    let spec = AttendSpec::causal()
        .with_score(encoding.score(layer))
        .with_backend(backend);
    let out = attend(&qkv.q, &qkv.k, &qkv.v, &spec)?;
    let (d, e) = (c / heads, out.dim(3)?);
    let own = out.narrow(3, 0, d)?.transpose(1, 2)?.reshape((b, t, c))?;
    Ok((linear(&own, &weight("o_proj")?)?, out.narrow(3, d, e - d)?))
}

/// Attention with the state riding in the values.
fn tape_attention(case: &Case, report: &mut Report) -> Result<()> {
    for (dtype, out_tolerance, grad_tolerance) in precisions(case, report)? {
        for backend in BACKENDS {
            let weights = tape_weights(case, dtype, str::to_string)?;
            // Not the last layer: there nobody reads the averaged state, and none rides along.
            let encoding = EncodingConfig::Tape(TapeConfig::default())
                .build(&tape_dims(case, 2)?, VarBuilder::zeros(dtype, &case.device))?;
            let hidden = case.var("in.hidden", dtype)?;
            let (cos, sin) = tape_state(case, dtype)?;
            let state = PosState {
                positions: Positions::first(case.size("seq")?),
                rotation: Some(Rotation {
                    cos: cos.as_tensor().clone(),
                    sin: sin.as_tensor().clone(),
                }),
            };
            let weight = |name: &str| match weights.get(&format!("{name}.weight")) {
                Some(var) => Ok(var.as_tensor().clone()),
                None => bail!("no weight {name}"),
            };
            let (out, carried) = tape_attend(
                &hidden,
                &weight,
                encoding.as_ref(),
                0,
                &state,
                (case.size("heads")?, backend),
            )?;
            let half = carried.dim(3)? / 2;
            let (pos_cos, pos_sin) = (carried.narrow(3, 0, half)?, carried.narrow(3, half, half)?);
            let at = |what: &str| format!("{what} {dtype:?} {backend:?}");
            report.relative(
                at("out.attn_output"),
                &out,
                case.tensor("out.attn_output")?,
                out_tolerance,
            )?;
            let mut loss = weighted_sum(&out, case.tensor("r.attn_output")?)?;
            for (what, ours) in [("pos_cos", &pos_cos), ("pos_sin", &pos_sin)] {
                let want = first_half(case.tensor(&format!("out.{what}"))?)?;
                report.relative(at(what), ours, &want, out_tolerance)?;
                loss = (loss
                    + weighted_sum(ours, &sum_of_halves(case.tensor(&format!("r.{what}"))?)?)?)?;
            }
            let gradients = loss.backward()?;
            let run = (dtype, backend, grad_tolerance);
            tape_input_gradients(case, report, &gradients, (&hidden, &cos, &sin), run)?;
            tape_weight_gradients(case, report, &gradients, &weights, str::to_string, run)?;
        }
    }
    Ok(())
}

fn tape_input_gradients(
    case: &Case,
    report: &mut Report,
    gradients: &candle_core::backprop::GradStore,
    (hidden, cos, sin): (&Var, &Var, &Var),
    (dtype, backend, tolerance): (DType, Backend, f64),
) -> Result<()> {
    for (name, var, halves) in [
        ("hidden", hidden, false),
        ("cos", cos, true),
        ("sin", sin, true),
    ] {
        let want = case.tensor(&format!("grad.in.{name}"))?;
        let want = if halves {
            sum_of_halves(want)?
        } else {
            want.clone()
        };
        let Some(gradient) = gradients.get(var) else {
            bail!("{name} got no gradient")
        };
        report.relative(
            format!("grad.in.{name} {dtype:?} {backend:?}"),
            gradient,
            &want,
            tolerance,
        )?;
    }
    Ok(())
}

/// Whole decoder layers, one (`tape_layer_*`) or three (`tape_stack3`), built here from the encoding's hooks.
fn tape_layers(case: &Case, report: &mut Report) -> Result<()> {
    let single = !case.tensors.contains_key("w.layers.0.pe.up_proj.weight");
    let layers = if single { 1 } else { 3 };
    let rename = |key: &str| {
        if single {
            format!("layers.0.{key}")
        } else {
            key.to_string()
        }
    };
    for (dtype, out_tolerance, grad_tolerance) in precisions(case, report)? {
        for backend in BACKENDS {
            let mut weights = tape_weights(case, dtype, rename)?;
            // The state after a model's last layer is never used, but here it is an output: one more layer.
            for name in [
                "pe.up_proj",
                "pe.x_proj",
                "pe.down_proj",
                "post_attention_linear",
            ] {
                let like = &weights[&format!("layers.0.{name}.weight")];
                let zeros = Var::from_tensor(&like.zeros_like()?)?;
                weights.insert(format!("layers.{layers}.{name}.weight"), zeros);
            }
            let config = TapeConfig {
                position_size: case.size("position_size")?,
                ..TapeConfig::default()
            };
            let encoding = EncodingConfig::Tape(config).build(
                &tape_dims(case, layers + 1)?,
                builder(case, &weights, dtype),
            )?;
            let hidden = case.var("in.hidden", dtype)?;
            let (cos, sin) = tape_state(case, dtype)?;
            let mut state = PosState {
                positions: Positions::first(case.size("seq")?),
                rotation: Some(Rotation {
                    cos: cos.as_tensor().clone(),
                    sin: sin.as_tensor().clone(),
                }),
            };
            let eps = case.number("rms_norm_eps")?;
            let mut x = hidden.as_tensor().clone();
            for layer in 0..layers {
                let weight =
                    |name: &str| match weights.get(&format!("layers.{layer}.{name}.weight")) {
                        Some(var) => Ok(var.as_tensor().clone()),
                        None => bail!("no weight {name}"),
                    };
                let norm = |x: &Tensor, name: &str| {
                    candle_nn::RmsNorm::new(weight(name)?, eps).forward_diff(x)
                };
                let attention_weight = |name: &str| weight(&format!("self_attn.{name}"));
                let (out, carried) = tape_attend(
                    &norm(&x, "input_layernorm")?,
                    &attention_weight,
                    encoding.as_ref(),
                    layer,
                    &state,
                    (case.size("heads")?, backend),
                )?;
                x = (x + out)?;
                let y = norm(&x, "post_attention_layernorm")?;
                let gate = linear(&y, &weight("mlp.gate_proj")?)?.silu()?;
                let mlp = linear(
                    &(gate * linear(&y, &weight("mlp.up_proj")?)?)?,
                    &weight("mlp.down_proj")?,
                )?;
                x = (x + &mlp)?;
                state = encoding.update(layer, state, Some(&carried), &mlp)?;
            }
            let Some(rotation) = &state.rotation else {
                bail!("the state was lost")
            };
            let at = |what: &str| format!("{what} {dtype:?} {backend:?}");
            report.relative(
                at("out.hidden"),
                &x,
                case.tensor("out.hidden")?,
                out_tolerance,
            )?;
            let mut loss = weighted_sum(&x, case.tensor("r.hidden")?)?;
            for (what, ours) in [("cos", &rotation.cos), ("sin", &rotation.sin)] {
                let want = first_half(case.tensor(&format!("out.{what}"))?)?;
                report.relative(at(what), ours, &want, out_tolerance)?;
                loss = (loss
                    + weighted_sum(ours, &sum_of_halves(case.tensor(&format!("r.{what}"))?)?)?)?;
            }
            let gradients = loss.backward()?;
            let run = (dtype, backend, grad_tolerance);
            tape_input_gradients(case, report, &gradients, (&hidden, &cos, &sin), run)?;
            tape_weight_gradients(case, report, &gradients, &weights, rename, run)?;
        }
    }
    Ok(())
}

/// The published model from token ids to logits, through our own `Llama`.
fn tape_model(case: &Case, report: &mut Report) -> Result<()> {
    let facts = &case.meta["config"];
    let size = |key: &str| Ok::<_, Error>(number(facts, key)? as usize);
    let config = LlamaConfig {
        vocab_size: size("vocab")?,
        hidden_size: size("hidden")?,
        intermediate_size: size("intermediate")?,
        num_hidden_layers: size("layers")?,
        num_attention_heads: size("heads")?,
        num_key_value_heads: size("heads")?,
        head_dim: Some(size("head_dim")?),
        rms_norm_eps: number(facts, "rms_norm_eps")?,
        tie_word_embeddings: false,
        max_position_embeddings: 2048,
        window: None,
        initializer_range: 0.02,
        encoding: EncodingConfig::Tape(TapeConfig {
            position_size: size("position_size")?,
            ..TapeConfig::default()
        }),
    };
    let tokens = case.on_device("in.ids", DType::U32)?;
    for (dtype, out_tolerance, grad_tolerance) in precisions(case, report)? {
        for backend in BACKENDS {
            let weights = tape_weights(case, dtype, str::to_string)?;
            let model = Llama::new(&config, builder(case, &weights, dtype))?.with_backend(backend);
            let logits = model.forward(&tokens, &mut Ctx::default())?;
            let at = format!("out.logits {dtype:?} {backend:?}");
            report.relative(at, &logits, case.tensor("out.logits")?, out_tolerance)?;
            let gradients = weighted_sum(&logits, case.tensor("r.logits")?)?.backward()?;
            let run = (dtype, backend, grad_tolerance);
            tape_weight_gradients(case, report, &gradients, &weights, str::to_string, run)?;
        }
    }
    Ok(())
}
