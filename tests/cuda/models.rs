//! Whole models on the GPU, held to the same weights on the CPU in f64: at once, token by token with a cache, padded,
//! and their gradients.

use crate::report::Report;
use crate::target::Target;
use crate::toy::{config, difference, encodings, in_chunks, loss, plain, tokens, variables, whole};
use crate::{test, Test};
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::VarBuilder;
use candle_posenc::encoding::TapaConfig;
use candle_posenc::{
    Backend, EncodingConfig, KvCache, Llama, LlamaConfig, Positions, Precision, SeededVars,
};
use std::collections::HashMap;

pub fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for (name, encoding) in encodings() {
        let name = name.replace(' ', "_");
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let encoding = encoding.clone();
            tests.push(test(
                format!("model_with_a_cache_{name}_{dtype:?}"),
                move |target, report| logits(target, &encoding, dtype, report),
            ));
        }
        tests.push(test(
            format!("model_gradients_{name}_F32"),
            move |target, report| gradients(target, &encoding, report),
        ));
    }
    tests.push(test("model_evaluates_the_phase_as_asked", phase_precision));
    tests
}

fn phase_precision(target: &Target, report: &mut Report) -> Result<()> {
    // Heads of 16 columns, 8 for each part: tensor cores take them.
    let tapa = EncodingConfig::Tapa(TapaConfig::default());
    let config = LlamaConfig {
        head_dim: Some(16),
        ..config(tapa)
    };
    let vars = variables(&config, DType::BF16)?;
    for asked in [Precision::Fast, Precision::Precise] {
        let there = carried(target, &vars)?;
        let model = on_device(target, &config, &there, DType::BF16, false)?.with_precision(asked);
        let plan = model.plan(0, 1, 64)?;
        let promised = match target.device().is_cuda() {
            true => asked,
            false => Precision::Precise,
        };
        report.check(plan.precision == Some(promised), || {
            format!("{asked:?} was asked for, and the plan is {plan}")
        });
    }
    Ok(())
}

/// Variables, of the same values, on the device under test.
fn carried(target: &Target, vars: &SeededVars) -> Result<HashMap<String, Var>> {
    vars.named()
        .into_iter()
        .map(|(name, var)| {
            let there = var.as_detached_tensor().to_device(target.device())?;
            Ok((name, Var::from_tensor(&there)?))
        })
        .collect()
}

fn on_device(
    target: &Target,
    config: &LlamaConfig,
    vars: &HashMap<String, Var>,
    dtype: DType,
    tracked: bool,
) -> Result<Llama> {
    let tensors = vars
        .iter()
        .map(|(name, var)| {
            let tensor = match tracked {
                true => var.as_tensor().clone(),
                false => var.as_detached_tensor(),
            };
            (name.clone(), tensor)
        })
        .collect();
    let vb = VarBuilder::from_tensors(tensors, dtype, target.device());
    Ok(Llama::new(config, vb)?.with_backend(Backend::Fused))
}

/// The same weights on the CPU, by tensor operations.
fn on_cpu(config: &LlamaConfig, vars: &SeededVars, dtype: DType) -> Result<Llama> {
    Ok(Llama::new(config, plain(vars, dtype)?)?.with_backend(Backend::Dense))
}

fn logits(
    target: &Target,
    encoding: &EncodingConfig,
    dtype: DType,
    report: &mut Report,
) -> Result<()> {
    const LENGTH: usize = 40;
    let config = config(encoding.clone());
    let vars = variables(&config, dtype)?;
    let ids = tokens(2, LENGTH, 1)?;
    let positions = Positions::first(LENGTH);
    let want = whole(&on_cpu(&config, &vars, DType::F64)?, &ids, &positions)?;
    let allowed = match dtype {
        DType::F64 => 1e-10,
        // As `toy::tolerance` has it: random TAPA multiplies rounding a thousandfold.
        _ => {
            1e-5 + 2.
                * difference(
                    &whole(&on_cpu(&config, &vars, dtype)?, &ids, &positions)?,
                    &want,
                )
        }
    };
    let model = on_device(target, &config, &carried(target, &vars)?, dtype, false)?;
    let there = ids.to_device(target.device())?;
    let mut compare = |what: &str, got: &Tensor, want: &Tensor| {
        report.compare(what, difference(got, want), allowed);
    };
    compare("at once", &whole(&model, &there, &positions)?, &want);
    let cache = || KvCache::new(config.num_hidden_layers);
    for chunks in [vec![1; LENGTH], vec![20, 1, 1, 16, 2]] {
        let what = format!("in chunks of {chunks:?}");
        let got = in_chunks(&model, &there, chunks, &mut cache())?;
        compare(&what, &got, &want);
    }
    // The second row comes behind ten tokens of padding.
    let padded = Positions::left_padded(&[LENGTH, LENGTH - 10], target.device())?;
    let rows = Tensor::cat(
        &[
            ids.narrow(0, 0, 1)?,
            Tensor::cat(
                &[
                    ids.narrow(0, 1, 1)?.narrow(1, 0, 10)?,
                    ids.narrow(0, 1, 1)?.narrow(1, 0, 30)?,
                ],
                1,
            )?,
        ],
        0,
    )?;
    let got = whole(&model, &rows.to_device(target.device())?, &padded)?;
    compare(
        "a row without padding",
        &got.narrow(0, 0, 1)?,
        &want.narrow(0, 0, 1)?,
    );
    let own = ids.narrow(0, 1, 1)?.narrow(1, 0, 30)?;
    let want = whole(
        &on_cpu(&config, &vars, DType::F64)?,
        &own,
        &Positions::first(30),
    )?;
    compare(
        "a row behind padding",
        &got.narrow(0, 1, 1)?.narrow(1, 10, 30)?,
        &want,
    );
    Ok(())
}

fn gradients(target: &Target, encoding: &EncodingConfig, report: &mut Report) -> Result<()> {
    const LENGTH: usize = 24;
    let config = config(encoding.clone());
    let ids = tokens(2, LENGTH, 2)?;
    let positions = Positions::first(LENGTH);
    // Gradients on the CPU, of the same values, in this dtype.
    let vars = variables(&config, DType::F32)?;
    let cpu = |dtype: DType| -> Result<HashMap<String, Tensor>> {
        let own = vars
            .named()
            .into_iter()
            .map(|(name, var)| {
                let value = var.as_detached_tensor().to_dtype(dtype)?.copy()?;
                Ok((name, Var::from_tensor(&value)?))
            })
            .collect::<Result<HashMap<String, Var>>>()?;
        let tensors = own
            .iter()
            .map(|(name, var)| (name.clone(), var.as_tensor().clone()))
            .collect();
        let vb = VarBuilder::from_tensors(tensors, dtype, ids.device());
        let model = Llama::new(&config, vb)?.with_backend(Backend::Dense);
        let gradients = loss(&whole(&model, &ids, &positions)?, &ids)?.backward()?;
        let gradient = |(name, var): (String, Var)| Some((name, gradients.get(&var)?.clone()));
        Ok(own.into_iter().filter_map(gradient).collect())
    };
    let (want, plain) = (cpu(DType::F64)?, cpu(DType::F32)?);
    let there = carried(target, &vars)?;
    let model = on_device(target, &config, &there, DType::F32, true)?;
    let tokens = ids.to_device(target.device())?;
    let gradients = loss(&whole(&model, &tokens, &positions)?, &tokens)?.backward()?;
    for (name, want) in &want {
        let Some(got) = there.get(name).and_then(|var| gradients.get(var)) else {
            report.fault(format!("{name} got no gradient"));
            continue;
        };
        let Some(plain) = plain.get(name) else {
            report.fault(format!("{name} got no gradient in f32 on the CPU"));
            continue;
        };
        let allowed = 2e-5 + 2. * difference(plain, want);
        report.compare(name.clone(), difference(got, want), allowed);
    }
    Ok(())
}
