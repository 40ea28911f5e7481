//! Models with a key/value cache: whatever way the tokens arrive, the logits are those of one whole pass.

mod toy;

use candle_core::{bail, DType, Device, IndexOp, Result, Tensor};
use candle_nn::VarBuilder;
use candle_posenc::{
    Backend, Ctx, Encoding, EncodingConfig, KvCache, Llama, LlamaConfig, PosState, Positions, Qkv,
    Score,
};
use rand::{rngs::StdRng, SeedableRng};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use toy::*;

/// Runs a test for every encoding, dtype and backend, on models of plain tensors.
fn for_every_model(test: impl Fn(&Case, &Llama) -> Result<()>) -> Result<()> {
    for_every_model_of(|config| config, test)
}

fn for_every_model_of(
    change: impl Fn(LlamaConfig) -> LlamaConfig,
    test: impl Fn(&Case, &Llama) -> Result<()>,
) -> Result<()> {
    for (name, encoding) in encodings() {
        let config = change(config(encoding));
        for dtype in [DType::F64, DType::F32] {
            for backend in BACKENDS {
                let model = frozen(&config, dtype, backend)?;
                let case = Case {
                    name: format!("{name}, {dtype:?}, {backend:?}"),
                    tolerance: tolerance(&config, dtype, backend)?,
                };
                test(&case, &model)?;
            }
        }
    }
    Ok(())
}

fn cache_for(model: &Llama) -> KvCache {
    KvCache::new(model.config().num_hidden_layers)
}

/// Rows of tokens of these lengths, and the batch that holds them behind padding by poison tokens.
fn left_padded(lengths: &[usize], seed: u64) -> Result<(Tensor, Vec<Tensor>)> {
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let (mut padded, mut rows) = (Vec::new(), Vec::new());
    for (row, len) in lengths.iter().enumerate() {
        let tokens = tokens(1, *len, seed + row as u64)?;
        let padding = Tensor::full(POISON, (1, longest - len), &Device::Cpu)?;
        padded.push(Tensor::cat(&[&padding, &tokens], 1)?);
        rows.push(tokens);
    }
    Ok((Tensor::cat(&padded, 0)?, rows))
}

/// An encoding whose queries, keys and values are NaN at padding, and which can be made to fail in a layer.
struct Treacherous {
    inner: Arc<dyn Encoding>,
    poisons: bool,
    fails_at: Option<usize>,
    failing: Arc<AtomicBool>,
}

impl Encoding for Treacherous {
    fn config(&self) -> EncodingConfig {
        self.inner.config()
    }

    fn embed(&self, x: &Tensor, positions: &Positions) -> Result<Tensor> {
        self.inner.embed(x, positions)
    }

    fn begin(&self, x: &Tensor, positions: &Positions, ctx: &mut Ctx) -> Result<PosState> {
        self.inner.begin(x, positions, ctx)
    }

    fn encode(&self, layer: usize, qkv: Qkv, state: &PosState) -> Result<Qkv> {
        if self.fails_at == Some(layer) && self.failing.load(Ordering::SeqCst) {
            bail!("treacherous: layer {layer} fails")
        }
        let Qkv { q, k, v } = self.inner.encode(layer, qkv, state)?;
        let poison = |x: Tensor| match &state.positions {
            Positions::Explicit { pos, .. } if self.poisons => {
                let real = pos.ge(0i64)?.unsqueeze(1)?.unsqueeze(3)?;
                let nan = Tensor::full(f64::NAN, x.shape(), x.device())?.to_dtype(x.dtype())?;
                real.broadcast_as(x.shape())?.where_cond(&x, &nan)
            }
            _ => Ok(x),
        };
        Ok(Qkv {
            q: poison(q)?,
            k: poison(k)?,
            v: poison(v)?,
        })
    }

    fn score(&self, layer: usize) -> Score {
        self.inner.score(layer)
    }

    fn updates(&self, layer: usize) -> bool {
        self.inner.updates(layer)
    }

    fn update(
        &self,
        layer: usize,
        state: PosState,
        carried: Option<&Tensor>,
        mlp_out: &Tensor,
    ) -> Result<PosState> {
        self.inner.update(layer, state, carried, mlp_out)
    }
}

/// A model of plain tensors with such an encoding in place of the configuration's.
fn treacherous(
    encoding: EncodingConfig,
    backend: Backend,
    poisons: bool,
    fails_at: Option<usize>,
) -> Result<(Llama, Arc<AtomicBool>)> {
    let config = config(encoding);
    let vb = plain(&variables(&config, DType::F64)?, DType::F64)?;
    let failing = Arc::new(AtomicBool::new(false));
    let encoding = Treacherous {
        inner: config.encoding.build(&config.dims(), vb.pp("model"))?,
        poisons,
        fails_at,
        failing: failing.clone(),
    };
    let model = Llama::with_encoding(&config, Arc::new(encoding), vb)?;
    Ok((model.with_backend(backend), failing))
}

#[test]
fn decode_token_by_token_equals_whole_pass() -> Result<()> {
    for_every_model(|case, model| {
        let tokens = tokens(2, 40, 1)?;
        let whole = whole(model, &tokens, &Positions::first(40))?;
        let mut cache = cache_for(model);
        let lengths = std::iter::once(7).chain([1; 33]);
        case.assert_close(
            &in_chunks(model, &tokens, lengths, &mut cache)?,
            &whole,
            "token by token",
        );
        assert_eq!(cache.len(), 40);
        assert!(matches!(
            cache.positions(),
            Positions::Span { start: 0, len: 40 }
        ));
        Ok(())
    })
}

#[test]
fn decode_with_trained_weights_equals_whole_pass() -> Result<()> {
    for (name, encoding) in encodings() {
        for backend in BACKENDS {
            let (model, _) = trained(&config(encoding.clone()), DType::F64, backend)?;
            let tokens = tokens(2, 11, 2)?;
            let whole = whole(&model, &tokens, &Positions::first(11))?;
            for cache in [cache_for(&model), cache_for(&model).without_gradients()] {
                let mut cache = cache;
                let parts = in_chunks(&model, &tokens, [4, 1, 1, 5], &mut cache)?;
                assert_close(&parts, &whole, name);
            }
        }
    }
    Ok(())
}

#[test]
fn decode_beyond_the_first_buffer_equals_whole_pass() -> Result<()> {
    // Buffers hold 64 tokens at first, then 128.
    for (name, encoding) in encodings() {
        let config = LlamaConfig {
            max_position_embeddings: 150,
            ..config(encoding)
        };
        for backend in BACKENDS {
            let model = frozen(&config, DType::F64, backend)?;
            let tokens = tokens(1, 140, 3)?;
            let whole = whole(&model, &tokens, &Positions::first(140))?;
            let mut cache = cache_for(&model);
            let lengths = [60, 3, 1, 1, 62, 1, 12];
            assert_close(
                &in_chunks(&model, &tokens, lengths, &mut cache)?,
                &whole,
                name,
            );
            let mut roomy = KvCache::with_capacity(3, 140);
            assert_close(
                &in_chunks(&model, &tokens, lengths, &mut roomy)?,
                &whole,
                name,
            );
        }
    }
    Ok(())
}

#[test]
fn prefill_in_chunks_equals_whole_pass() -> Result<()> {
    for_every_model(|case, model| {
        let tokens = tokens(2, 29, 4)?;
        let whole = whole(model, &tokens, &Positions::first(29))?;
        for lengths in [&[5, 8, 1, 3, 12][..], &[28, 1], &[1, 28], &[29]] {
            let mut cache = cache_for(model);
            let parts = in_chunks(model, &tokens, lengths.iter().copied(), &mut cache)?;
            case.assert_close(&parts, &whole, &format!("{lengths:?}"));
        }
        Ok(())
    })
}

#[test]
fn decode_with_window_equals_whole_pass() -> Result<()> {
    let windowed = |config| LlamaConfig {
        window: Some(4),
        ..config
    };
    for_every_model_of(windowed, |case, model| {
        let tokens = tokens(2, 15, 5)?;
        let whole = whole(model, &tokens, &Positions::first(15))?;
        for lengths in [&[6, 1, 1, 1, 3, 3][..], &[6, 3, 6]] {
            let mut cache = cache_for(model);
            let parts = in_chunks(model, &tokens, lengths.iter().copied(), &mut cache)?;
            case.assert_close(&parts, &whole, &format!("{lengths:?}"));
        }
        Ok(())
    })?;
    // The window must matter for this to test anything.
    let tokens = tokens(1, 15, 5)?;
    let wide = frozen(&config(EncodingConfig::Nope), DType::F64, BACKENDS[0])?;
    let narrow = frozen(
        &windowed(config(EncodingConfig::Nope)),
        DType::F64,
        BACKENDS[0],
    )?;
    let logits = |model| whole(model, &tokens, &Positions::first(15));
    assert!(difference(&logits(&narrow)?, &logits(&wide)?) > 1e-3);
    Ok(())
}

#[test]
fn left_padded_rows_equal_unpadded_ones() -> Result<()> {
    for_every_model(|case, model| {
        let lengths = [5, 10, 1];
        let (padded, rows) = left_padded(&lengths, 6)?;
        let more = tokens(3, 4, 60)?;
        let positions = Positions::left_padded(&lengths, &Device::Cpu)?;
        let mut cache = cache_for(model);
        let prompt = model.forward_at(&padded, &positions, Some(&mut cache), &mut planned())?;
        let decoded = in_chunks(model, &more, [1, 2, 1], &mut cache)?;
        for (b, (row, len)) in rows.iter().zip(lengths).enumerate() {
            let row = Tensor::cat(&[row, &more.narrow(0, b, 1)?], 1)?;
            let alone = whole(model, &row, &Positions::first(len + 4))?;
            let batched = Tensor::cat(
                &[
                    prompt.narrow(0, b, 1)?.narrow(1, 10 - len, len)?,
                    decoded.narrow(0, b, 1)?,
                ],
                1,
            )?;
            case.assert_close(&batched, &alone, &format!("row {b}"));
            // Padding's own logits are nothing.
            let padding = prompt.narrow(0, b, 1)?.narrow(1, 0, 10 - len)?;
            assert_eq!(difference(&padding, &padding.zeros_like()?), 0.);
        }
        Ok(())
    })
}

#[test]
fn packed_documents_equal_separate_runs() -> Result<()> {
    for_every_model(|case, model| {
        let rows = [vec![4, 6], vec![3, 1, 5]];
        let packed = tokens(2, 10, 7)?;
        let positions = Positions::packed(&rows, &Device::Cpu)?;
        let logits = whole(model, &packed, &positions)?;
        let mut cache = cache_for(model);
        let cached = model.forward_at(&packed, &positions, Some(&mut cache), &mut planned())?;
        case.assert_close(&cached, &logits, "with a cache");
        // Each row goes on with its last document.
        let more = tokens(2, 3, 70)?;
        let decoded = in_chunks(model, &more, [1, 2], &mut cache)?;
        for (b, documents) in rows.iter().enumerate() {
            let mut start = 0;
            for (index, len) in documents.iter().enumerate() {
                let document = packed.narrow(0, b, 1)?.narrow(1, start, *len)?;
                let mut together = logits.narrow(0, b, 1)?.narrow(1, start, *len)?;
                let mut alone = document;
                if index + 1 == documents.len() {
                    alone = Tensor::cat(&[&alone, &more.narrow(0, b, 1)?], 1)?;
                    together = Tensor::cat(&[&together, &decoded.narrow(0, b, 1)?], 1)?;
                }
                let alone = whole(model, &alone, &Positions::first(alone.dim(1)?))?;
                case.assert_close(&together, &alone, &format!("row {b} document {index}"));
                start += len;
            }
        }
        Ok(())
    })
}

#[test]
fn batch_rows_equal_single_runs() -> Result<()> {
    for_every_model(|case, model| {
        let tokens = tokens(4, 12, 8)?;
        let batch = in_chunks(model, &tokens, [9, 1, 2], &mut cache_for(model))?;
        for b in 0..4 {
            let row = tokens.narrow(0, b, 1)?;
            let alone = in_chunks(model, &row, [9, 1, 2], &mut cache_for(model))?;
            case.assert_close(&batch.narrow(0, b, 1)?, &alone, &format!("row {b}"));
        }
        Ok(())
    })
}

#[test]
fn one_step_at_different_offsets_equals_each_row_alone() -> Result<()> {
    for_every_model(|case, model| {
        let tokens = tokens(3, 1, 9)?;
        let starts = [50i64, 20, 0];
        let positions =
            Positions::explicit(Tensor::new(&starts, &Device::Cpu)?.reshape((3, 1))?, None)?;
        let batch = whole(model, &tokens, &positions)?;
        assert_eq!(batch.dims(), &[3, 1, VOCAB]);
        for (b, start) in starts.into_iter().enumerate() {
            let alone = Positions::Span { start, len: 1 };
            let alone = whole(model, &tokens.narrow(0, b, 1)?, &alone)?;
            case.assert_close(&batch.narrow(0, b, 1)?, &alone, &format!("row {b}"));
        }
        Ok(())
    })
}

#[test]
fn repeated_rows_are_bit_equal() -> Result<()> {
    for_every_model(|case, model| {
        let tokens = tokens(1, 13, 10)?.repeat((3, 1))?;
        let logits = in_chunks(model, &tokens, [9, 1, 3], &mut cache_for(model))?;
        for b in 1..3 {
            let pair = (logits.narrow(0, b, 1)?, logits.narrow(0, 0, 1)?);
            assert_eq!(difference(&pair.0, &pair.1), 0., "{case}, row {b}");
        }
        Ok(())
    })
}

#[test]
fn nan_at_padding_does_not_leak() -> Result<()> {
    let lengths = [3, 7];
    for (name, encoding) in encodings() {
        for backend in BACKENDS {
            let (clean, _) = treacherous(encoding.clone(), backend, false, None)?;
            let (poisoned, _) = treacherous(encoding.clone(), backend, true, None)?;
            let (padded, _) = left_padded(&lengths, 11)?;
            let more = tokens(2, 3, 110)?;
            let run = |model: &Llama| -> Result<Tensor> {
                let positions = Positions::left_padded(&lengths, &Device::Cpu)?;
                let mut cache = cache_for(model);
                let prompt =
                    model.forward_at(&padded, &positions, Some(&mut cache), &mut planned())?;
                // Padding between real tokens: a row that pauses.
                let pause = Tensor::new(&[[3i64, 4], [-1, 7]], &Device::Cpu)?;
                let pause = Positions::explicit(pause, None)?;
                let two = more.narrow(1, 0, 2)?;
                let paused = model.forward_at(&two, &pause, Some(&mut cache), &mut planned())?;
                let last = next(model, &more.narrow(1, 2, 1)?, &mut cache)?;
                Tensor::cat(&[prompt, paused, last], 1)
            };
            let (clean, poisoned) = (run(&clean)?, run(&poisoned)?);
            assert_eq!(difference(&poisoned, &clean), 0., "{name}, {backend:?}");
        }
    }
    Ok(())
}

#[test]
fn nan_in_a_padding_embedding_reaches_no_logit_and_no_gradient() -> Result<()> {
    for (name, encoding) in encodings() {
        for backend in BACKENDS {
            let (model, vars) = trained(&config(encoding.clone()), DType::F64, backend)?;
            let (padded, rows) = left_padded(&[4, 9], 12)?;
            let positions = Positions::left_padded(&[4, 9], &Device::Cpu)?;
            let table = vars
                .named()
                .into_iter()
                .find(|(name, _)| name.contains("embed_tokens"));
            let (_, table) = table.expect("an embedding table");
            let row = Tensor::full(f64::NAN, (1, table.dim(1)?), &Device::Cpu)?;
            table.set(&Tensor::cat(&[&table.narrow(0, 0, VOCAB - 1)?, &row], 0)?)?;
            let logits = whole(&model, &padded, &positions)?;
            let alone = whole(&model, &rows[0], &Positions::first(4))?;
            assert_close(&logits.i(0)?.narrow(0, 5, 4)?, &alone.i(0)?, name);
            let gradients = logits.narrow(1, 5, 4)?.sqr()?.sum_all()?.backward()?;
            for (var_name, var) in vars.named() {
                if let Some(gradient) = gradients.get(&var) {
                    let sum = gradient.sqr()?.sum_all()?.to_scalar::<f64>()?;
                    assert!(
                        sum.is_finite(),
                        "{name}, {backend:?}: gradient of {var_name}"
                    );
                }
            }
        }
    }
    Ok(())
}

#[test]
fn nan_in_truncated_slots_does_not_leak() -> Result<()> {
    for (name, encoding) in encodings() {
        for backend in BACKENDS {
            let config = config(encoding.clone());
            let vars = variables(&config, DType::F64)?;
            let clean = Llama::new(&config, plain(&vars, DType::F64)?)?.with_backend(backend);
            for (_, var) in vars.named() {
                var.set(&(var.as_tensor() * f64::NAN)?)?;
            }
            let nan = Llama::new(&config, plain(&vars, DType::F64)?)?.with_backend(backend);
            let tokens = tokens(1, 9, 13)?;
            let mut cache = cache_for(&clean);
            let first = in_chunks(&clean, &tokens, [5], &mut cache)?;
            next(&nan, &tokens, &mut cache)?;
            cache.truncate(5)?;
            let rest = in_chunks(&clean, &tokens.narrow(1, 5, 4)?, [1, 3], &mut cache)?;
            let whole = whole(&clean, &tokens, &Positions::first(9))?;
            assert_close(&Tensor::cat(&[first, rest], 1)?, &whole, name);
        }
    }
    Ok(())
}

#[test]
fn decode_after_truncate_equals_whole_pass() -> Result<()> {
    for_every_model(|case, model| {
        let (kept, other) = (tokens(2, 12, 14)?, tokens(2, 5, 15)?);
        let mut cache = cache_for(model);
        in_chunks(model, &kept, [8, 4], &mut cache)?;
        cache.truncate(7)?;
        assert_eq!(cache.len(), 7);
        let decoded = in_chunks(model, &other, [2, 1, 2], &mut cache)?;
        let both = Tensor::cat(&[&kept.narrow(1, 0, 7)?, &other], 1)?;
        let whole = whole(model, &both, &Positions::first(12))?;
        case.assert_close(&decoded, &whole.narrow(1, 7, 5)?, "after a truncate");

        // Emptied caches take another batch.
        for empty in [
            |cache: &mut KvCache| cache.truncate(0),
            |cache: &mut KvCache| {
                cache.reset();
                Ok(())
            },
        ] {
            empty(&mut cache)?;
            assert!(cache.is_empty());
            let again = in_chunks(model, &both.narrow(0, 1, 1)?, [12], &mut cache)?;
            case.assert_close(&again, &whole.narrow(0, 1, 1)?, "from empty");
        }
        Ok(())
    })
}

#[test]
fn decode_after_truncate_of_padded_rows_goes_on_where_each_row_was_cut() -> Result<()> {
    for_every_model(|case, model| {
        let lengths = [2, 6];
        let (padded, rows) = left_padded(&lengths, 16)?;
        let positions = Positions::left_padded(&lengths, &Device::Cpu)?;
        let mut cache = cache_for(model);
        model.forward_at(&padded, &positions, Some(&mut cache), &mut planned())?;
        // Leaves one token of row 0 and five of row 1.
        cache.truncate(5)?;
        let more = tokens(2, 2, 160)?;
        let decoded = in_chunks(model, &more, [1, 1], &mut cache)?;
        for (b, kept) in [1, 5].into_iter().enumerate() {
            let row = Tensor::cat(&[&rows[b].narrow(1, 0, kept)?, &more.narrow(0, b, 1)?], 1)?;
            let alone = whole(model, &row, &Positions::first(kept + 2))?;
            case.assert_close(
                &decoded.narrow(0, b, 1)?,
                &alone.narrow(1, kept, 2)?,
                "cut row",
            );
        }
        Ok(())
    })
}

#[test]
fn decode_after_reorder_equals_each_beam_alone() -> Result<()> {
    for_every_model(|case, model| {
        let lengths = [4, 7, 5];
        let (padded, rows) = left_padded(&lengths, 17)?;
        let positions = Positions::left_padded(&lengths, &Device::Cpu)?;
        let mut cache = cache_for(model);
        model.forward_at(&padded, &positions, Some(&mut cache), &mut planned())?;
        // Repeated, more, fewer, the same.
        let mut beams = vec![0, 1, 2];
        let mut texts = rows;
        for (step, order) in [vec![2, 0, 0, 1], vec![3, 1], vec![0, 1], vec![1]]
            .iter()
            .enumerate()
        {
            cache.reorder(order)?;
            beams = order.iter().map(|row| beams[*row]).collect();
            texts = order.iter().map(|row| texts[*row].clone()).collect();
            let more = tokens(order.len(), 2, 170 + step as u64)?;
            let decoded = next(model, &more, &mut cache)?;
            for (b, text) in texts.iter_mut().enumerate() {
                *text = Tensor::cat(&[&*text, &more.narrow(0, b, 1)?], 1)?;
                let t = text.dim(1)?;
                assert_eq!(t, lengths[beams[b]] + 2 * (step + 1));
                let alone = whole(model, text, &Positions::first(t))?.narrow(1, t - 2, 2)?;
                case.assert_close(&decoded.narrow(0, b, 1)?, &alone, &format!("{order:?}"));
            }
        }
        Ok(())
    })
}

#[test]
fn reorder_beyond_the_batch_is_refused_and_changes_nothing() -> Result<()> {
    let model = frozen(&config(EncodingConfig::Nope), DType::F64, BACKENDS[0])?;
    let tokens = tokens(2, 6, 18)?;
    let mut cache = cache_for(&model);
    assert!(cache.reorder(&[0]).is_err());
    in_chunks(&model, &tokens, [4], &mut cache)?;
    for rows in [&[0, 2][..], &[]] {
        let error = cache.reorder(rows).unwrap_err().to_string();
        assert!(
            error.contains(&format!("{rows:?}")) && error.contains("batch of 2"),
            "{error}"
        );
    }
    let rest = next(&model, &tokens.narrow(1, 4, 2)?, &mut cache)?;
    let whole = whole(&model, &tokens, &Positions::first(6))?;
    assert_close(&rest, &whole.narrow(1, 4, 2)?, "after refusals");
    Ok(())
}

#[test]
fn pass_that_fails_leaves_the_cache_as_it_was() -> Result<()> {
    for (name, encoding) in encodings() {
        for backend in BACKENDS {
            for layer in 0..3 {
                let (model, failing) = treacherous(encoding.clone(), backend, false, Some(layer))?;
                let tokens = tokens(2, 9, 19)?;
                let mut cache = cache_for(&model);
                let first = in_chunks(&model, &tokens, [5], &mut cache)?;
                failing.store(true, Ordering::SeqCst);
                // More tokens than the buffers have room for, so that some are replaced.
                assert!(next(&model, &tokens.repeat((1, 8))?, &mut cache).is_err());
                assert_eq!(cache.len(), 5);
                failing.store(false, Ordering::SeqCst);
                let rest = in_chunks(&model, &tokens.narrow(1, 5, 4)?, [1, 3], &mut cache)?;
                let whole = whole(&model, &tokens, &Positions::first(9))?;
                let parts = Tensor::cat(&[first, rest], 1)?;
                assert_close(&parts, &whole, &format!("{name}, layer {layer}"));
            }
        }
    }
    Ok(())
}

#[test]
fn training_with_a_cache_draws_no_shift_that_calls_disagree_about() -> Result<()> {
    for (name, encoding) in encodings() {
        let (model, _) = trained(&config(encoding), DType::F64, BACKENDS[0])?;
        let tokens = tokens(2, 8, 3)?;
        let mut rng = StdRng::seed_from_u64(1);
        let mut cache = KvCache::new(model.config().num_hidden_layers);
        let mut parts = Vec::new();
        for (start, len) in [(0, 5), (5, 3)] {
            let mut ctx = Ctx {
                train: true,
                rng: Some(&mut rng),
                ..planned()
            };
            let part = tokens.narrow(1, start, len)?;
            let start = start as i64;
            let positions = Positions::Span { start, len };
            parts.push(model.forward_at(&part, &positions, Some(&mut cache), &mut ctx)?);
        }
        let whole = whole(&model, &tokens, &Positions::first(8))?;
        assert_close(&Tensor::cat(&parts, 1)?, &whole, name);
    }
    Ok(())
}

#[test]
fn gradients_through_the_cache_equal_those_of_the_whole_pass() -> Result<()> {
    for (name, encoding) in encodings() {
        for backend in BACKENDS {
            let (model, vars) = trained(&config(encoding.clone()), DType::F64, backend)?;
            let tokens = tokens(2, 9, 20)?;
            let logits = whole(&model, &tokens, &Positions::first(9))?;
            let expected = loss(&logits, &tokens)?.backward()?;
            let logits = in_chunks(&model, &tokens, [4, 1, 4], &mut cache_for(&model))?;
            let found = loss(&logits, &tokens)?.backward()?;
            for (var_name, var) in vars.named() {
                let what = format!("{name}, {backend:?}: {var_name}");
                match (found.get(&var), expected.get(&var)) {
                    (Some(found), Some(expected)) => assert_close(found, expected, &what),
                    (None, None) => panic!("{what} has no gradient"),
                    _ => panic!("{what} has a gradient in one of the two only"),
                }
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_survive_a_truncate_where_only_queries_are_tracked() -> Result<()> {
    // Keys and values are plain tensors, so that nothing but the query tells the cache that a graph holds them. With
    // one head and one row, what attention reads is the cache's own memory.
    let config = LlamaConfig {
        num_hidden_layers: 1,
        num_attention_heads: 1,
        num_key_value_heads: 1,
        ..config(EncodingConfig::Nope)
    };
    let vars = variables(&config, DType::F64)?;
    let named = vars.named();
    let q_proj = named.iter().find(|(name, _)| name.contains("q_proj"));
    let (q_name, q_proj) = q_proj.expect("a query projection");
    let plain_vb = plain(&vars, DType::F64)?;
    let mut tensors = std::collections::HashMap::new();
    for (name, var) in &named {
        let tensor = match name == q_name {
            true => var.as_tensor().clone(),
            false => plain_vb.get(var.shape(), name)?,
        };
        tensors.insert(name.clone(), tensor);
    }
    let mixed_vb = VarBuilder::from_tensors(tensors, DType::F64, &Device::Cpu);
    let (kept, other) = (tokens(1, 8, 21)?, tokens(1, 7, 22)?);
    for backend in BACKENDS {
        let mixed = Llama::new(&config, mixed_vb.clone())?.with_backend(backend);
        let frozen = Llama::new(&config, plain_vb.clone())?.with_backend(backend);
        let expected = loss(&whole(&mixed, &kept, &Positions::first(8))?, &kept)?.backward()?;
        // The slots that the graph reads are written anew by a tracked call, and by one that is not.
        for second in [&mixed, &frozen] {
            let mut cache = cache_for(&mixed);
            let logits = in_chunks(&mixed, &kept, [5, 3], &mut cache)?;
            cache.truncate(1)?;
            next(second, &other, &mut cache)?;
            let found = loss(&logits, &kept)?.backward()?;
            match (found.get(q_proj), expected.get(q_proj)) {
                (Some(found), Some(expected)) => assert_close(found, expected, "q_proj"),
                _ => panic!("no gradient of q_proj"),
            }
        }
    }
    Ok(())
}

#[test]
fn next_positions_follow_each_row() -> Result<()> {
    let model = frozen(&config(EncodingConfig::Nope), DType::F32, BACKENDS[0])?;
    type Rows = Vec<Vec<i64>>;
    let read = |positions: Positions| -> Result<(Rows, Option<Rows>)> {
        match positions {
            Positions::Explicit { pos, segment } => {
                Ok((pos.to_vec2()?, segment.map(|s| s.to_vec2()).transpose()?))
            }
            span => panic!("{span:?} is not explicit"),
        }
    };
    let fill = |positions: &Positions, batch| -> Result<KvCache> {
        let mut cache = cache_for(&model);
        let tokens = tokens(batch, positions.len(), 22)?;
        model.forward_at(&tokens, positions, Some(&mut cache), &mut planned())?;
        Ok(cache)
    };
    assert!(cache_for(&model).next_positions(1).is_err());

    let cache = fill(&Positions::Span { start: 3, len: 4 }, 2)?;
    assert!(matches!(
        cache.next_positions(2)?,
        Positions::Span { start: 7, len: 2 }
    ));

    // Padding only, as in the second row below.
    let cache = fill(&Positions::Span { start: -5, len: 3 }, 1)?;
    assert!(matches!(
        cache.next_positions(2)?,
        Positions::Span { start: 0, len: 2 }
    ));

    let cache = fill(&Positions::left_padded(&[2, 0, 5], &Device::Cpu)?, 3)?;
    assert_eq!(
        read(cache.next_positions(2)?)?,
        (vec![vec![2, 3], vec![0, 1], vec![5, 6]], None)
    );

    // The second row is padded on the right.
    let cache = fill(
        &Positions::packed(&[vec![2, 3], vec![1, 2]], &Device::Cpu)?,
        2,
    )?;
    let expected = (vec![vec![3], vec![2]], Some(vec![vec![1], vec![1]]));
    assert_eq!(read(cache.next_positions(1)?)?, expected);
    Ok(())
}

#[test]
fn misfits_give_errors_that_name_them() -> Result<()> {
    let nope = || config(EncodingConfig::Nope);
    let model = frozen(&nope(), DType::F32, BACKENDS[0])?;
    let prompt = tokens(2, 4, 23)?;
    let filled = |positions: &Positions| -> Result<KvCache> {
        let mut cache = cache_for(&model);
        model.forward_at(&prompt, positions, Some(&mut cache), &mut planned())?;
        Ok(cache)
    };
    let one = tokens(2, 1, 24)?;
    let at = |start| Positions::Span { start, len: 1 };
    let packed = Positions::packed(&[vec![1], vec![1]], &Device::Cpu)?;
    let refusal = |model: &Llama, cache: &mut KvCache, tokens: &Tensor, positions: &Positions| {
        let before = cache.len();
        let result = model.forward_at(tokens, positions, Some(cache), &mut planned());
        assert_eq!(cache.len(), before);
        result.map(|_| ()).unwrap_err().to_string()
    };
    let plain_cache = || filled(&Positions::first(4));

    let half = frozen(&nope(), DType::BF16, BACKENDS[0])?;
    let error = refusal(&half, &mut plain_cache()?, &one, &at(4));
    assert!(error.contains("BF16") && error.contains("F32"), "{error}");

    let wide = LlamaConfig {
        head_dim: Some(6),
        ..nope()
    };
    let wide = frozen(&wide, DType::F32, BACKENDS[0])?;
    let error = refusal(&wide, &mut plain_cache()?, &one, &at(4));
    assert!(
        error.contains("width 8") && error.contains("width 6"),
        "{error}"
    );

    let heads = LlamaConfig {
        num_key_value_heads: 4,
        ..nope()
    };
    let heads = frozen(&heads, DType::F32, BACKENDS[0])?;
    let error = refusal(&heads, &mut plain_cache()?, &one, &at(4));
    assert!(
        error.contains("2 heads") && error.contains("4 heads"),
        "{error}"
    );

    let error = refusal(&model, &mut plain_cache()?, &tokens(3, 1, 25)?, &at(4));
    assert!(error.contains("2 rows") && error.contains('3'), "{error}");

    let error = refusal(&model, &mut plain_cache()?, &one, &packed);
    assert!(error.contains("the new tokens have segments"), "{error}");
    let both = Positions::packed(&[vec![4], vec![2, 2]], &Device::Cpu)?;
    let error = refusal(&model, &mut filled(&both)?, &one, &at(4));
    assert!(error.contains("the cached tokens have segments"), "{error}");

    let rows = Positions::left_padded(&[1, 1, 1], &Device::Cpu)?;
    let error = refusal(&model, &mut plain_cache()?, &one, &rows);
    assert!(
        error.contains("3 rows") && error.contains("batch of 2"),
        "{error}"
    );

    let error = refusal(&model, &mut KvCache::new(2), &one, &at(0));
    assert!(error.contains("layer 2 of a cache of 2 layers"), "{error}");
    let error = refusal(&model, &mut KvCache::new(4), &one, &at(0));
    assert!(error.contains("layer 3 has not been appended"), "{error}");

    let error = plain_cache()?.truncate(5).unwrap_err().to_string();
    assert!(error.contains("4 tokens to 5"), "{error}");
    Ok(())
}

#[test]
fn capacity_beyond_memory_is_refused_when_it_is_needed() -> Result<()> {
    let model = frozen(&config(EncodingConfig::Nope), DType::F32, BACKENDS[0])?;
    for capacity in [usize::MAX, usize::MAX / 64] {
        let mut cache = KvCache::with_capacity(3, capacity);
        let (tokens, positions) = (tokens(1, 2, 1)?, Positions::first(2));
        let result = model.forward_at(&tokens, &positions, Some(&mut cache), &mut planned());
        let error = result.err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains(&capacity.to_string()), "{error}");
        assert!(cache.is_empty());
    }
    Ok(())
}

#[test]
fn cache_step_used_out_of_order_gives_errors() -> Result<()> {
    let mut cache = KvCache::new(1);
    let x = Tensor::zeros((1, 2, 3, 4), DType::F32, &Device::Cpu)?;
    let mut step = cache.step(&Positions::first(3), 1)?;
    step.append(0, &x, &x, false)?;
    assert!(step.append(0, &x, &x, false).is_err());
    assert!(step.append(1, &x, &x, false).is_err());
    drop(step);
    assert!(cache.is_empty());
    let mut step = cache.step(&Positions::first(2), 1)?;
    let error = step.append(0, &x, &x, false).unwrap_err().to_string();
    assert!(
        error.contains("tokens 2") && error.contains("[1, 2, 3, 4]"),
        "{error}"
    );
    assert!(step.commit().is_err());
    Ok(())
}

#[test]
fn untracked_tokens_are_written_in_place() -> Result<()> {
    let mut cache = KvCache::new(1);
    let x = |len, value: f32| Tensor::full(value, (1, 1, len, 2), &Device::Cpu);
    let mut step = cache.step(&Positions::first(3), 1)?;
    let (first, _) = step.append(0, &x(3, 1.)?, &x(3, 1.)?, false)?;
    step.commit()?;
    let positions = cache.next_positions(2)?;
    let mut step = cache.step(&positions, 1)?;
    let (all, _) = step.append(0, &x(2, 2.)?, &x(2, 2.)?, false)?;
    step.commit()?;
    let values = all.flatten_all()?.to_vec1::<f32>()?;
    assert_eq!(values, [1., 1., 1., 1., 1., 1., 2., 2., 2., 2.]);
    // What was returned before is a view of the same buffer, so that it shows what is written there.
    cache.truncate(0)?;
    let mut step = cache.step(&Positions::first(3), 1)?;
    step.append(0, &x(3, 9.)?, &x(3, 9.)?, false)?;
    assert_eq!(first.flatten_all()?.to_vec1::<f32>()?, [9.; 6]);
    Ok(())
}
