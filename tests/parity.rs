//! candle-transformers' LLaMA and ours, from the same folder.
//!
//! In f32 both are right to a few units of the last place times the number of roundings on the way. On these models,
//! whose logits reach 4 to 5, the largest difference was 6.2e-6, a tenth of the bound; another frequency of 2% moves
//! them by more than a hundred times the bound. Positions stay below 40: candle-transformers makes its angles in f32,
//! so that they are off by up to 2⁻²⁴ of the position, in radians.

use candle_core::{DType, Device, Result, Tensor};
use candle_posenc::encoding::{EncodingConfig, RopeConfig, RopeScaling};
use candle_posenc::hf::{self, ModelFolder, SaveOptions};
use candle_posenc::{Ctx, KvCache, Llama, LlamaConfig, Positions, SeededVars};
use candle_transformers::models::llama as theirs;

const CPU: Device = Device::Cpu;
const BOUND: f64 = 6.2e-5;

fn config(scaling: RopeScaling, kv_heads: usize, tied: bool) -> LlamaConfig {
    LlamaConfig {
        vocab_size: 61,
        hidden_size: 64,
        intermediate_size: 96,
        num_hidden_layers: 3,
        num_attention_heads: 8,
        num_key_value_heads: kv_heads,
        tie_word_embeddings: tied,
        max_position_embeddings: 128,
        initializer_range: 0.15,
        encoding: EncodingConfig::Rope(RopeConfig {
            theta: 500_000.,
            scaling,
            ..RopeConfig::default()
        }),
        ..LlamaConfig::default()
    }
}

/// The models of both, from one folder. What candle-transformers reads of `config.json` is what was written there.
fn pair(config: &LlamaConfig) -> Result<(Llama, theirs::Llama, theirs::Config)> {
    let folder = tempfile::tempdir()?;
    let vars = SeededVars::new(11);
    Llama::new(config, vars.builder(DType::F32, &CPU))?;
    hf::save(&folder, config, &vars, &SaveOptions::default())?;
    let ours = ModelFolder::open(&folder)?.load(DType::F32, &CPU)?;
    let text = std::fs::read(folder.path().join("config.json"))?;
    let read: theirs::LlamaConfig =
        serde_json::from_slice(&text).map_err(candle_core::Error::wrap)?;
    let their_config = read.into_config(false);
    let weights = candle_core::safetensors::load(folder.path().join("model.safetensors"), &CPU)?;
    let vb = candle_nn::VarBuilder::from_tensors(weights, DType::F32, &CPU);
    let their_model = theirs::Llama::load(vb, &their_config)?;
    Ok((ours, their_model, their_config))
}

fn largest_difference(a: &Tensor, b: &Tensor) -> Result<f64> {
    let difference = (a.to_dtype(DType::F64)? - b.to_dtype(DType::F64)?)?.abs()?;
    let values = difference.flatten_all()?.to_vec1::<f64>()?;
    // A NaN is the largest difference of all.
    Ok(values.into_iter().fold(0., |worst, x| match x.is_nan() {
        true => f64::INFINITY,
        false => worst.max(x),
    }))
}

fn tokens(count: usize) -> Result<Tensor> {
    let ids: Vec<u32> = (0..2 * count as u32)
        .map(|i| (i * 17 + i * i % 7) % 61)
        .collect();
    Tensor::from_vec(ids, (2, count), &CPU)
}

#[test]
fn logits_agree_with_candle_transformers_at_once_and_token_by_token() {
    let llama3 = || RopeScaling::Llama3 {
        factor: 8.,
        low_freq_factor: 1.,
        high_freq_factor: 4.,
        original_max_position_embeddings: 32,
    };
    let mut worst: f64 = 0.;
    for kv_heads in [8, 2] {
        for tied in [false, true] {
            for scaling in [RopeScaling::Default, llama3()] {
                let name = format!("{} {kv_heads} kv heads, tied {tied}", scaling.name());
                let config = config(scaling, kv_heads, tied);
                let (ours, their_model, their_config) = pair(&config).unwrap();
                assert_eq!(their_config.tie_word_embeddings, tied);
                assert_eq!(their_config.num_key_value_heads, kv_heads);
                let all = tokens(40).unwrap();
                let prompt = 29;
                // Every length of prompt, without a cache; theirs gives the last logits only.
                let whole = ours.forward(&all, &mut Ctx::default()).unwrap();
                let largest = largest_difference(&whole, &whole.zeros_like().unwrap()).unwrap();
                assert!(largest > 1., "{name}: logits up to {largest}");
                for len in [1, 2, 7, prompt, 40] {
                    let mut cache =
                        theirs::Cache::new(false, DType::F32, &their_config, &CPU).unwrap();
                    let part = all.narrow(1, 0, len).unwrap().contiguous().unwrap();
                    let theirs = their_model.forward(&part, 0, &mut cache).unwrap();
                    let ours = whole.narrow(1, len - 1, 1).unwrap().squeeze(1).unwrap();
                    worst = worst.max(largest_difference(&ours, &theirs).unwrap());
                    assert!(worst <= BOUND, "{name}, {len} tokens: {worst:e}");
                }
                // A prompt and then one token after the other, both with a cache.
                let mut cache = theirs::Cache::new(true, DType::F32, &their_config, &CPU).unwrap();
                let mut own_cache = KvCache::new(config.num_hidden_layers);
                let mut from = 0;
                for len in std::iter::once(prompt).chain(std::iter::repeat_n(1, 40 - prompt)) {
                    let part = all.narrow(1, from, len).unwrap().contiguous().unwrap();
                    let theirs = their_model.forward(&part, from, &mut cache).unwrap();
                    let positions = Positions::Span {
                        start: from as i64,
                        len,
                    };
                    let ours = ours
                        .forward_at(&part, &positions, Some(&mut own_cache), &mut Ctx::default())
                        .unwrap();
                    let ours = ours.narrow(1, len - 1, 1).unwrap().squeeze(1).unwrap();
                    worst = worst.max(largest_difference(&ours, &theirs).unwrap());
                    assert!(worst <= BOUND, "{name}, token {from}: {worst:e}");
                    from += len;
                }
            }
        }
    }
    println!("largest difference {worst:.1e}");
}

#[test]
fn other_frequencies_would_be_noticed() {
    let tokens = tokens(40).unwrap();
    let logits = |factor: f64| {
        let config = config(RopeScaling::Linear { factor }, 2, false);
        let vars = SeededVars::new(11);
        let model = Llama::new(&config, vars.builder(DType::F32, &CPU)).unwrap();
        model.forward(&tokens, &mut Ctx::default()).unwrap()
    };
    let difference = largest_difference(&logits(1.), &logits(1.02)).unwrap();
    assert!(difference > 100. * BOUND, "{difference:e}");
}
