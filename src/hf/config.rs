//! `config.json`: what is read, what is refused, what is written.

use crate::encoding::{EncodingConfig, RopeConfig, RopeScaling, DEEPEST};
use crate::json::{self, brief, Fields};
use crate::model::LlamaConfig;
use candle_core::{bail, Result};
use serde_json::{json, Map, Value};

/// The `model_type` of a model that transformers' LLaMA would not compute in the same way.
pub(super) const OWN_TYPE: &str = "candle_posenc";

const HF_TYPE: &str = "llama";

/// Fields that make another model, unless they are null, false or empty.
const SWITCHES: [&str; 29] = [
    "alibi",
    "attention_bias",
    "attention_multiplier",
    "attn_logit_softcapping",
    "auto_map",
    "clip_qkv",
    "compression_config",
    "final_logit_softcapping",
    "kv_lora_rank",
    "logit_softcapping",
    "mlp_bias",
    "moe_intermediate_size",
    "no_rope_layer_interval",
    "no_rope_layers",
    "parallel_attn",
    "pruned_heads",
    "q_lora_rank",
    "qk_layernorm",
    "qk_norm",
    "quantization_config",
    "query_pre_attn_scalar",
    "rope_interleave",
    "rope_interleaved",
    "text_config",
    "use_alibi",
    "use_parallel_residual",
    "use_qk_norm",
    "vision_config",
    "xpos",
];

/// Factors that make another model, unless they are 1 (or absent).
const FACTORS: [&str; 8] = [
    "embedding_multiplier",
    "key_multiplier",
    "lm_head_multiplier",
    "logit_scale",
    "logits_scaling",
    "residual_multiplier",
    "scale_depth",
    "scale_emb",
];

/// Counts that make another model, unless they are 0 or 1 (or absent).
const EXPERTS: [&str; 4] = [
    "n_routed_experts",
    "num_experts",
    "num_experts_per_tok",
    "num_local_experts",
];

/// Fields that are read, or that a saved folder states anew.
const READ: [&str; 30] = [
    "architectures",
    "dtype",
    "encoding",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "pretraining_tp",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_sliding_window",
    "vocab_size",
    "window",
    "max_window_layers",
    "_name_or_path",
];

impl LlamaConfig {
    /// Reads a `config.json` of Hugging Face's LLaMA, as transformers 4 or 5 writes it, or one that
    /// [`to_hf`](Self::to_hf) made for another encoding (`model_type` `candle_posenc`, the encoding in `encoding`).
    ///
    /// What is absent or null has transformers' default: `num_key_value_heads` as many as heads, `head_dim` C / H,
    /// `rms_norm_eps` 10⁻⁶, `tie_word_embeddings` false, `max_position_embeddings` 2048, `initializer_range` 0.02,
    /// `hidden_act` silu. The five other sizes must be there (transformers would take those of the 7B model, and no
    /// shape shows a wrong number of heads).
    ///
    /// Unknown fields are ignored, as transformers does, but not those known to make another model: biases, experts,
    /// windows, multipliers, soft caps, norms of q and k, quantisation, code of the folder's own. They are refused,
    /// unless they have the value that changes nothing. `pretraining_tp` (a split of the same products) and
    /// `attention_dropout` (nothing here drops) are ignored. `partial_rotary_factor` is refused but for `proportional`:
    /// transformers 5 ignores it for its LLaMA, transformers 4 cannot run it.
    ///
    /// ```
    /// use candle_posenc::LlamaConfig;
    /// # fn main() -> candle_core::Result<()> {
    /// let config = serde_json::json!({
    ///     "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    ///     "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0,
    ///     "max_position_embeddings": 8192, "tie_word_embeddings": true
    /// });
    /// let config = LlamaConfig::from_hf(&config)?;
    /// assert_eq!(config.dims().head_dim, 64);
    /// let biased = serde_json::json!({"model_type": "llama", "attention_bias": true});
    /// assert!(LlamaConfig::from_hf(&biased).is_err());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When a field is refused, missing, of another kind, contradicts another or is out of range; the message names the
    /// field and its value. What depends on the encoding's own ranges is checked when it is built.
    pub fn from_hf(config: &Value) -> Result<Self> {
        let fields = Fields::of("config", config, "config.json")?;
        let kind = fields.required("model_type", fields.text("model_type")?)?;
        if kind != HF_TYPE && kind != OWN_TYPE {
            bail!("config: model_type {kind:?} is not supported, only {HF_TYPE:?} and {OWN_TYPE:?}")
        }
        refuse_other_models(&fields)?;
        let (window, encoding) = match kind {
            OWN_TYPE => own_encoding(&fields)?,
            _ => (None, hf_encoding(config, &fields)?),
        };
        let size = |name| fields.required(name, fields.count(name)?);
        let heads = size("num_attention_heads")?;
        let config = Self {
            vocab_size: size("vocab_size")?,
            hidden_size: size("hidden_size")?,
            intermediate_size: size("intermediate_size")?,
            num_hidden_layers: size("num_hidden_layers")?,
            num_attention_heads: heads,
            num_key_value_heads: fields.count("num_key_value_heads")?.unwrap_or(heads),
            head_dim: fields.count("head_dim")?,
            rms_norm_eps: fields.number("rms_norm_eps")?.unwrap_or(1e-6),
            tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(false),
            max_position_embeddings: fields.count("max_position_embeddings")?.unwrap_or(2048),
            window,
            initializer_range: fields.number("initializer_range")?.unwrap_or(0.02),
            encoding,
        };
        config.validate()?;
        Ok(config)
    }

    /// The `config.json` that says all of this, read back by [`from_hf`](Self::from_hf) to the last bit.
    ///
    /// Where transformers' LLaMA computes the same (RoPE of the whole head in [`Layout::Half`](crate::Layout), with any
    /// scaling but ntk, no window) it is `model_type` `llama`, with θ and scaling both as transformers 4 and as
    /// transformers 5 names them. Anything else is `candle_posenc` with the encoding in `encoding`, which other programs
    /// refuse and do not run as something that it is not. Special tokens are null: this does not know them.
    pub fn to_hf(&self) -> Value {
        let mut map = Map::new();
        let mut put = |name: &str, value: Value| map.insert(name.to_string(), value);
        put("vocab_size", self.vocab_size.into());
        put("hidden_size", self.hidden_size.into());
        put("intermediate_size", self.intermediate_size.into());
        put("num_hidden_layers", self.num_hidden_layers.into());
        put("num_attention_heads", self.num_attention_heads.into());
        put("num_key_value_heads", self.num_key_value_heads.into());
        if let Some(head_dim) = self.head_dim {
            put("head_dim", head_dim.into());
        }
        put("hidden_act", "silu".into());
        put("rms_norm_eps", self.rms_norm_eps.into());
        put("tie_word_embeddings", self.tie_word_embeddings.into());
        let longest = self.max_position_embeddings;
        put("max_position_embeddings", longest.into());
        put("initializer_range", self.initializer_range.into());
        put("attention_bias", false.into());
        put("mlp_bias", false.into());
        // Absent, they would be 1 and 2 in transformers.
        put("bos_token_id", Value::Null);
        put("eos_token_id", Value::Null);
        let rope = match self.window {
            None => self.encoding.to_hf(&self.dims()),
            Some(_) => None,
        };
        match rope {
            Some(rope) => {
                put("model_type", HF_TYPE.into());
                put("architectures", json!(["LlamaForCausalLM"]));
                map.extend(rope);
            }
            None => {
                put("model_type", OWN_TYPE.into());
                if let Some(window) = self.window {
                    put("window", window.into());
                }
                let encoding = serde_json::to_value(&self.encoding).unwrap_or_default();
                put("encoding", encoding);
            }
        }
        Value::Object(map)
    }
}

/// Whether a field of a `config.json` says nothing that [`LlamaConfig`] does.
pub(super) fn is_extra(name: &str) -> bool {
    let lists: [&[&str]; 4] = [&SWITCHES, &FACTORS, &EXPERTS, &READ];
    !lists.iter().any(|list| list.contains(&name))
}

fn refuse_other_models(fields: &Fields) -> Result<()> {
    let refuse_unless = |names: &[&str], neutral: fn(&Value) -> bool| {
        for name in names {
            if let Some(value) = fields.get(name).filter(|value| !neutral(value)) {
                bail!("config: {name} {} is not supported", brief(value))
            }
        }
        Ok(())
    };
    refuse_unless(&SWITCHES, is_off)?;
    refuse_unless(&FACTORS, |value| value.as_f64() == Some(1.))?;
    refuse_unless(&EXPERTS, |value| matches!(value.as_u64(), Some(0 | 1)))?;
    // One function under two names.
    refuse_unless(&["hidden_act"], |value| {
        matches!(value.as_str(), Some("silu" | "swish"))
    })?;
    refuse_unless(&["architectures"], |value| {
        let named = value
            .as_array()
            .map(|names| names.iter().map(Value::as_str));
        named.is_some_and(|names| {
            names
                .into_iter()
                .all(|name| name == Some("LlamaForCausalLM"))
        })
    })?;
    refuse_unless(&["layer_types"], |value| {
        let all = |types: &Vec<Value>| types.iter().all(|kind| kind == "full_attention");
        value.as_array().is_some_and(all)
    })?;
    if fields.flag("use_sliding_window")? != Some(false) {
        refuse_unless(&["sliding_window", "use_sliding_window"], is_off)?;
    }
    Ok(())
}

fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

/// The encoding of Hugging Face's LLaMA.
fn hf_encoding(config: &Value, fields: &Fields) -> Result<EncodingConfig> {
    for name in ["encoding", "window"] {
        if let Some(value) = fields.get(name) {
            bail!(
                "config: {name} {} belongs to model_type {OWN_TYPE:?}, not {HF_TYPE:?}",
                brief(value)
            )
        }
    }
    let rope = RopeConfig::from_hf(config)?;
    let partial = rope.partial_rotary_factor;
    if partial != 1. && !matches!(rope.scaling, RopeScaling::Proportional { .. }) {
        bail!("config: partial_rotary_factor {partial} is ignored for model_type {HF_TYPE:?} by transformers 5 and cannot be run by transformers 4; remove it, or state it in the encoding of a {OWN_TYPE:?}")
    }
    Ok(EncodingConfig::Rope(rope))
}

/// The window and the encoding of a model of another kind.
fn own_encoding(fields: &Fields) -> Result<(Option<usize>, EncodingConfig)> {
    for name in [
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "original_max_position_embeddings",
    ] {
        if let Some(value) = fields.get(name) {
            bail!(
                "config: {name} {} belongs to model_type {HF_TYPE:?}; in {OWN_TYPE:?} the encoding states it",
                brief(value)
            )
        }
    }
    let encoding = fields.required("encoding", fields.get("encoding"))?;
    let stated = Fields::of("config", encoding, "encoding")?;
    // What follows goes down level by level. A description is a level below its encoding.
    let (depth, deepest) = (json::depth(encoding), 1 + DEEPEST);
    if depth > deepest {
        bail!("config: encoding is {depth} levels deep, at most {deepest} are read")
    }
    let read = serde_json::from_value(encoding.clone())
        .and_then(|parsed: EncodingConfig| Ok((serde_json::to_value(&parsed)?, parsed)));
    match read {
        Ok((known, parsed)) => {
            refuse_unread(&stated, &known)?;
            parsed.check_named()?;
            Ok((fields.count("window")?, parsed))
        }
        Err(error) => bail!("config: encoding {}: {error}", brief(encoding)),
    }
}

/// Refuses fields of an encoding that were read over: serde does so for a type that has none.
fn refuse_unread(stated: &Fields, known: &Value) -> Result<()> {
    for (name, value) in stated.all() {
        match known.get(name) {
            None => bail!("config: encoding: {name} {} is not known", brief(value)),
            Some(known) if known.is_object() => {
                refuse_unread(&Fields::of("config: encoding", value, name)?, known)?
            }
            Some(_) => {}
        }
    }
    Ok(())
}
