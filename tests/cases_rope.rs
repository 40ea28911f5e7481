//! RoPE, its length extensions and ALiBi slopes against faults that users of other libraries met. The names in
//! brackets are public bug reports.

use candle_core::{DType, Device, IndexOp, Result, Tensor, Var};
use candle_posenc::encoding::{
    alibi_slopes, Alibi, AlibiConfig, Rope, RopeConfig, RopeFrequencies, RopeScaling, Yarn,
};
use candle_posenc::{
    attend, convert_layout, rotate, AttendSpec, Backend, Ctx, Encoding, EncodingConfig, Layout,
    ModelDims, Positions, Qkv, Rotation, Score,
};
use rand::{rngs::StdRng, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use serde_json::{json, Value};

const CPU: Device = Device::Cpu;
const LAYOUTS: [Layout; 2] = [Layout::Half, Layout::Interleaved];

fn normal(seed: u64, shape: &[usize]) -> Tensor {
    let mut rng = StdRng::seed_from_u64(seed);
    let values: Vec<f64> = (0..shape.iter().product())
        .map(|_| StandardNormal.sample(&mut rng))
        .collect();
    Tensor::from_vec(values, shape, &CPU).unwrap()
}

fn values(x: &Tensor) -> Vec<f64> {
    let x = x.to_dtype(DType::F64).and_then(|x| x.flatten_all());
    x.unwrap().to_vec1().unwrap()
}

#[track_caller]
fn assert_same_bits(a: &Tensor, b: &Tensor) {
    assert_eq!((a.dims(), a.dtype()), (b.dims(), b.dtype()));
    for (i, (a, b)) in values(a).into_iter().zip(values(b)).enumerate() {
        assert_eq!(a.to_bits(), b.to_bits(), "element {i}: {a} and {b}");
    }
}

#[track_caller]
fn assert_close(a: &[f64], b: &[f64], tolerance: f64) {
    assert_eq!(a.len(), b.len());
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        let difference = (a - b).abs();
        assert!(difference <= tolerance, "element {i}: {a} and {b}");
    }
}

#[track_caller]
fn assert_refuses<T>(result: Result<T>, parts: &[&str]) {
    let message = result.err().expect("an error").to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
}

fn dims(head_dim: usize, max_positions: usize) -> ModelDims {
    ModelDims {
        width: 4 * head_dim,
        heads: 4,
        kv_heads: 2,
        head_dim,
        layers: 1,
        max_positions,
    }
}

fn explicit(rows: &[&[i64]]) -> Positions {
    let shape = (rows.len(), rows[0].len());
    Positions::explicit(Tensor::from_vec(rows.concat(), shape, &CPU).unwrap(), None).unwrap()
}

fn scaled(scaling: RopeScaling) -> RopeConfig {
    RopeConfig {
        scaling,
        ..RopeConfig::default()
    }
}

fn from_hf(parameters: Value) -> RopeConfig {
    RopeConfig::from_hf(&json!({ "rope_parameters": parameters })).unwrap()
}

/// A rotation for the f32 or f64 `dtype`.
fn table(
    rope: &RopeConfig,
    dims: &ModelDims,
    positions: &Positions,
    dtype: DType,
    planned_len: Option<usize>,
) -> Result<Rotation> {
    let batch = match positions {
        Positions::Explicit { pos, .. } => pos.dim(0)?,
        Positions::Span { .. } => 1,
    };
    rope.rotation(dims, positions, batch, dtype, &CPU, planned_len)
}

fn longrope(short: f64, long: f64, pairs: usize, original: usize) -> RopeConfig {
    from_hf(json!({
        "rope_type": "longrope",
        "short_factor": vec![short; pairs],
        "long_factor": vec![long; pairs],
        "original_max_position_embeddings": original,
    }))
}

/// q, k and v of one layer, (1, 4, T, D), (1, 2, T, D) and (1, 2, T, D).
fn layer(seed: u64, tokens: usize, head_dim: usize) -> Qkv {
    let part = |i: u64, heads: usize| normal(seed + i, &[1, heads, tokens, head_dim]);
    Qkv {
        q: part(0, 4),
        k: part(1, 2),
        v: part(2, 2),
    }
}

fn encoded(rope: &Rope, qkv: &Qkv, positions: &Positions, planned_len: Option<usize>) -> Qkv {
    let (batch, heads, tokens, head_dim) = qkv.q.dims4().unwrap();
    let x = Tensor::zeros((batch, tokens, heads * head_dim), qkv.q.dtype(), &CPU).unwrap();
    let mut ctx = Ctx {
        planned_len,
        ..Ctx::default()
    };
    let state = rope.begin(&x, positions, &mut ctx).unwrap();
    rope.encode(0, qkv.clone(), &state).unwrap()
}

fn dense(qkv: &Qkv, queries: &Positions, keys: &Positions) -> Tensor {
    let spec = AttendSpec::causal()
        .with_backend(Backend::Dense)
        .with_positions(queries.clone(), keys.clone());
    attend(&qkv.q, &qkv.k, &qkv.v, &spec).unwrap()
}

// R1, R4 (candle#3520, transformers#29285, vllm#863, sglang-jax#1472)
#[test]
fn rope_table_for_any_dtype_is_made_in_f64() {
    let tokens = [255, 256, 257, 4095, 15962, 15968, 131071];
    let (rope, positions) = (RopeConfig::default(), explicit(&[&tokens]));
    let expected = |wave: fn(f64) -> f64| -> Vec<f64> {
        let angle = |t: i64, j: i32| t as f64 * 10_000f64.powf(-2. * j as f64 / 64.);
        let row = |t| (0..32).map(move |j| wave(angle(t, j)));
        tokens.into_iter().flat_map(row).collect()
    };
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        let made = table(&rope, &dims(64, 4096), &positions, dtype, None).unwrap();
        let stored = if dtype == DType::F64 {
            DType::F64
        } else {
            DType::F32
        };
        assert_eq!((made.cos.dtype(), made.sin.dtype()), (stored, stored));
        assert_eq!(made.cos.dims(), &[1, 1, 7, 32]);
        assert_close(&values(&made.cos), &expected(f64::cos), 1e-7);
        assert_close(&values(&made.sin), &expected(f64::sin), 1e-7);
        let first_pair = values(&made.cos.i((0, 0, .., 0)).unwrap());
        assert_close(&first_pair[1..3], &[-0.039790760, 0.819305529], 1e-7);
        assert_close(&first_pair[4..6], &[-0.908015901, -0.754792760], 1e-7);
    }
}

// R1: in bf16 the integers 256 and 257 are one number
#[test]
fn rope_bf16_heads_at_neighbouring_positions_turn_differently() {
    let rotation = table(
        &RopeConfig::default(),
        &dims(64, 4096),
        &explicit(&[&[256, 257]]),
        DType::BF16,
        None,
    );
    let x = Tensor::ones((1, 1, 2, 64), DType::BF16, &CPU).unwrap();
    let out = rotate(&x, &rotation.unwrap(), Layout::Half).unwrap();
    let row = |t: usize| values(&out.i((0, 0, t)).unwrap());
    // x = 1 + i turned by 256 and 257 radians
    assert_close(&row(0)[..1], &[-0.039790760 + 0.999208034], 0.01);
    assert_close(&row(1)[..1], &[0.819305529 + 0.573357227], 0.01);
}

// R2 (imp#1316, #1325, #1630): every scaling, far out; cosines and sines of pairs 0, 3, the middle one and the last,
// from frequencies by another implementation
#[test]
fn rope_each_scaling_far_out_turns_by_the_true_angle() {
    let long: [f64; 32] = [
        1.0, 2.0703, 2.401, 3.2055, 4.31, 6.3312, 7.1769, 10.2088, 11.4614, 13.0173, 13.4201,
        13.6806, 15.8206, 16.3477, 17.7961, 18.3493, 19.1309, 21.5044, 22.2229, 22.8599, 23.667,
        24.6318, 24.6653, 27.1195, 29.1975, 29.7028, 33.5845, 35.7798, 37.9653, 38.0264, 38.2853,
        39.798,
    ];
    let yarn =
        json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048});
    let with = |value: &Value, name: &str, field: Value| {
        let mut value = value.clone();
        value[name] = field;
        value
    };
    #[rustfmt::skip]
    let cases: [(Value, usize, usize, [[f64; 4]; 4]); 10] = [
        (json!({"rope_type": "default"}), 64, 2048, [
            [-0.817983499, 0.541356773, -0.78638369, 0.198511703], [-0.575241684, -0.840792985, -0.617738368, -0.980098517],
            [0.78804224, 0.319978188, 0.632300167, -0.028846486], [-0.615621173, 0.94742491, -0.774723498, 0.999583854]]),
        (json!({"rope_type": "default", "partial_rotary_factor": 0.5}), 80, 2048, [
            [-0.817983499, 0.941290632, -0.78638369, -0.345715612], [-0.575241684, -0.337597315, -0.617738368, 0.938339339],
            [0.78804224, 0.543172813, 0.632300167, -0.950339078], [-0.615621173, -0.839620923, -0.774723498, 0.311216384]]),
        (json!({"rope_type": "linear", "factor": 2.0}), 64, 4096, [
            [-0.301675737, -0.8778829, -0.326815169, -0.774116174], [0.953410588, 0.478875363, 0.945088274, 0.63304356],
            [0.945526901, -0.812397128, -0.903410252, 0.696833378], [-0.325543976, -0.583104541, 0.428777234, 0.717233047]]),
        (json!({"rope_type": "ntk", "factor": 4.0}), 64, 2048, [
            [-0.817983499, -0.87012634, 0.999784527, -0.336068316], [-0.575241684, 0.492828725, -0.020758111, -0.941837612],
            [0.78804224, 0.029364825, 0.991320279, -0.921095375], [-0.615621173, -0.999568761, -0.131469022, -0.389337015]]),
        (json!({"rope_type": "dynamic", "factor": 2.0}), 64, 2048, [
            [-0.817983499, -0.370374677, 0.730863828, 0.990544376], [-0.575241684, -0.928882446, 0.682523307, 0.137192706],
            [0.78804224, -0.619498362, -0.541117856, 0.990673011], [-0.615621173, -0.784997949, -0.840946768, 0.136260726]]),
        (yarn.clone(), 64, 8192, [
            [-0.931380091, 0.616404758, -0.525161354, -0.382657277], [-0.654987114, -0.957351643, 1.010288347, -1.072404029],
            [0.897288091, 0.364336583, -0.847658152, -1.048786307], [-0.700964389, 1.078765891, -0.760231972, -0.443310585]]),
        (with(&with(&yarn, "truncate", json!(false)), "rope_theta", json!(150000.0)), 64, 8192, [
            [-0.931380091, -1.099902763, -1.11191744, 1.081884364], [-0.654987114, 0.294433192, 0.245186866, 0.354969316],
            [0.897288091, 1.116481451, -0.182488841, -0.936337346], [-0.700964389, 0.223486381, -1.123910502, 0.647880673]]),
        (json!({"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 4096,
                "short_factor": vec![1.0; 32], "long_factor": long}), 64, 32768, [
            [-0.914533355, -0.319116136, 0.921287387, 1.011931916], [-0.643139754, 1.071524564, -0.633426832, 0.47538805],
            [0.881058008, -1.113003884, 0.114394562, -1.041606237], [-0.688285396, -0.105935611, 1.112166302, -0.406271395]]),
        (json!({"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}), 64, 131072, [
            [-0.817983499, 0.956714906, 0.94831055, 0.998781121], [-0.575241684, 0.291026783, -0.317343822, 0.049358611],
            [0.78804224, -0.299716057, -0.846271561, 0.922984235], [-0.615621173, -0.954028451, -0.532751766, 0.38483776]]),
        (json!({"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5}), 128, 4096, [
            [-0.301675737, 0.034958567, 1.0, 1.0], [0.953410588, 0.999388762, 0.0, 0.0],
            [0.945526901, -0.409872113, 1.0, 1.0], [-0.325543976, 0.912142999, 0.0, 0.0]]),
    ];
    for (parameters, head_dim, max_positions, expected) in cases {
        let rope = from_hf(parameters);
        for (t, [cos, sin]) in [
            (131071i64, [expected[0], expected[1]]),
            (1048575, [expected[2], expected[3]]),
        ] {
            let made = table(
                &rope,
                &dims(head_dim, max_positions),
                &Positions::Span { start: t, len: 1 },
                DType::F32,
                Some(t as usize + 1),
            )
            .unwrap();
            let pairs = made.cos.dim(3).unwrap();
            let shown = |x: &Tensor| {
                let all = values(x);
                [0, 3, pairs / 2, pairs - 1].map(|j| all[j])
            };
            assert_close(&shown(&made.cos), &cos, 2e-7);
            assert_close(&shown(&made.sin), &sin, 2e-7);
        }
    }
}

// R3 (TransformerEngine#1245, flashinfer#585)
#[test]
fn rotate_half_precision_equals_f32_rotation_rounded_once() {
    let rope = RopeConfig {
        theta: 5e5,
        ..RopeConfig::default()
    };
    for dtype in [DType::BF16, DType::F16] {
        let x = normal(1, &[1, 2, 64, 128]).to_dtype(dtype).unwrap();
        let rotation = table(&rope, &dims(128, 64), &Positions::first(64), dtype, None).unwrap();
        for layout in LAYOUTS {
            let out = rotate(&x, &rotation, layout).unwrap();
            let exact = rotate(&x.to_dtype(DType::F32).unwrap(), &rotation, layout).unwrap();
            assert_same_bits(&out, &exact.to_dtype(dtype).unwrap());
        }
    }
}

// R5 (transformers#25306, #27226, #27033)
#[test]
fn dynamic_after_one_long_input_is_as_before_it() {
    let rope = scaled(RopeScaling::Dynamic { factor: 2. });
    let of = |len: usize| {
        table(
            &rope,
            &dims(128, 4096),
            &Positions::first(len),
            DType::F32,
            None,
        )
        .unwrap()
    };
    let (before, long, after) = (of(100), of(8192), of(100));
    assert_same_bits(&before.cos, &after.cos);
    assert_same_bits(&before.sin, &after.sin);
    let plain = table(
        &RopeConfig::default(),
        &dims(128, 4096),
        &Positions::first(100),
        DType::F32,
        None,
    );
    assert_same_bits(&before.cos, &plain.unwrap().cos);
    // base 30527.74 at 8192
    let expected: Vec<f64> = (0..64)
        .map(|j| (8191. * 30527.7367488067f64.powf(-2. * j as f64 / 128.)).cos())
        .collect();
    let last = values(&long.cos.i((0, 0, 8191)).unwrap());
    assert_close(&last, &expected, 1e-7);
}

// R6 (vllm#3488, #5093), R11 (llama.cpp#8995, #24875)
#[test]
fn rope_crossing_the_length_with_a_cache_is_refused_unless_planned() {
    let prefill = Positions::first(4000);
    let across = Positions::Span {
        start: 4000,
        len: 200,
    };
    for rope in [
        scaled(RopeScaling::Dynamic { factor: 2. }),
        longrope(1., 4., 32, 4096),
    ] {
        let dims = dims(64, 4096);
        let of =
            |positions: &Positions, planned| table(&rope, &dims, positions, DType::F32, planned);
        assert!(of(&prefill, None).is_ok());
        assert_refuses(
            of(&across, None),
            &["4200", "4000", "Ctx::planned_len", rope.scaling.name()],
        );
        // a plan that was too short is no better
        assert_refuses(of(&across, Some(4050)), &["4200", "4050"]);
        let full = of(&Positions::first(4200), None).unwrap();
        let (first, second) = (of(&prefill, Some(4200)), of(&across, Some(4200)));
        let (first, second) = (first.unwrap(), second.unwrap());
        let cos = Tensor::cat(&[first.cos, second.cos], 2).unwrap();
        let sin = Tensor::cat(&[first.sin, second.sin], 2).unwrap();
        assert_same_bits(&cos, &full.cos);
        assert_same_bits(&sin, &full.sin);
        // one row of several is enough
        let rows = explicit(&[&[0, 1], &[4095, 4096]]);
        assert_refuses(of(&rows, None), &["4097", "4095"]);
    }
}

#[test]
fn rope_within_the_length_continues_a_cache_without_a_plan() {
    for rope in [
        scaled(RopeScaling::Dynamic { factor: 2. }),
        longrope(1., 4., 32, 4096),
        scaled(RopeScaling::Yarn(Yarn {
            factor: Some(4.),
            ..Yarn::default()
        })),
    ] {
        let step = Positions::Span {
            start: 4095,
            len: 1,
        };
        assert!(table(&rope, &dims(64, 4096), &step, DType::F32, None).is_ok());
    }
}

// R7 (exllamav3#259, vllm#48623, TensorRT-LLM#16379)
#[test]
fn yarn_temperature_follows_its_three_settings() {
    let of = |yarn: Yarn| {
        let yarn = Yarn {
            original_max_position_embeddings: Some(4096),
            ..yarn
        };
        let rope = scaled(RopeScaling::Yarn(yarn));
        rope.frequencies(64, 131072, None)
            .unwrap()
            .attention_scaling
    };
    let factor = |factor: f64| Yarn {
        factor: Some(factor),
        ..Yarn::default()
    };
    assert_close(
        &[of(factor(16.)), of(factor(40.)), of(factor(64.))],
        &[1.2773, 1.3689, 1.4159],
        5e-5,
    );
    let stated = Yarn {
        attention_factor: Some(1.),
        ..factor(64.)
    };
    let equal = Yarn {
        mscale: Some(1.),
        mscale_all_dim: Some(1.),
        ..factor(16.)
    };
    let alone = Yarn {
        mscale: Some(0.5),
        ..factor(16.)
    };
    assert_eq!((of(stated), of(equal)), (1., 1.));
    assert_eq!(of(alone), of(factor(16.)));
    // from the lengths, where no factor is stated
    assert_eq!(of(Yarn::default()), of(factor(32.)));
}

// R8 (tvm#18576): a slowed pair has ω/s, not (s·θ)^…
#[test]
fn yarn_slow_pairs_are_divided_and_fast_pairs_kept() {
    let rope = scaled(RopeScaling::Yarn(Yarn {
        factor: Some(8.),
        original_max_position_embeddings: Some(4096),
        ..Yarn::default()
    }));
    let plain = RopeConfig::default().frequencies(128, 32768, None).unwrap();
    let made = rope.frequencies(128, 32768, None).unwrap();
    for (j, (made, plain)) in made.inv_freq.iter().zip(&plain.inv_freq).enumerate() {
        // the ramp goes from pair 20 to pair 46
        match j {
            0..=20 => assert_eq!(made, plain),
            46.. => assert_eq!(*made, plain / 8.),
            _ => assert!(*made < *plain && *made > plain / 8.),
        }
    }
}

// R9 (torchtitan#2216)
#[test]
fn yarn_with_equal_betas_or_tiny_lengths_stays_finite_and_between() {
    for beta in [1., 32.] {
        for original in [2, 64, 4096] {
            for truncate in [true, false] {
                let rope = scaled(RopeScaling::Yarn(Yarn {
                    factor: Some(4.),
                    original_max_position_embeddings: Some(original),
                    beta_fast: beta,
                    beta_slow: beta,
                    truncate,
                    ..Yarn::default()
                }));
                let made = rope.frequencies(8, 4096, None).unwrap().inv_freq;
                let plain = RopeConfig::default().frequencies(8, 4096, None).unwrap();
                let kept: Vec<f64> = made
                    .iter()
                    .zip(&plain.inv_freq)
                    .map(|(made, plain)| made / plain)
                    .collect();
                assert!(kept.iter().all(|k| (0.25..=1.).contains(k)), "{kept:?}");
                assert!(kept.windows(2).all(|k| k[1] <= k[0]), "{kept:?}");
            }
        }
    }
}

// R10 (transformers#32330, litgpt#1745)
#[test]
fn llama3_regions_by_pair_keep_blend_and_divide() {
    let parameters = json!({
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 32, "low_freq_factor": 1, "high_freq_factor": 4,
        "original_max_position_embeddings": 8192
    });
    let made = from_hf(parameters).frequencies(64, 131072, None).unwrap();
    let plain = RopeConfig {
        theta: 5e5,
        ..RopeConfig::default()
    };
    let plain = plain.frequencies(64, 131072, None).unwrap();
    assert_eq!(made.attention_scaling, 1.);
    for (j, (made, plain)) in made.inv_freq.iter().zip(&plain.inv_freq).enumerate() {
        match j {
            0..=14 => assert_eq!(made, plain),
            18.. => assert_eq!(*made, plain / 32.),
            _ => assert!(*made < *plain && *made > plain / 32.),
        }
    }
}

#[test]
fn llama3_at_both_edges_is_continuous() {
    // one pair, whose only frequency is 1: L/2π turns over L
    let turns = 1000. / (2. * std::f64::consts::PI);
    let at = |low: f64, high: f64| {
        let rope = scaled(RopeScaling::Llama3 {
            factor: 8.,
            low_freq_factor: low,
            high_freq_factor: high,
            original_max_position_embeddings: 1000,
        });
        rope.frequencies(2, 8000, None).unwrap().inv_freq[0]
    };
    let near = 1e-9;
    assert_close(
        &[at(turns * (1. - near), 1e4)],
        &[at(turns * (1. + near), 1e4)],
        1e-6,
    );
    assert_close(
        &[at(0.1, turns * (1. - near))],
        &[at(0.1, turns * (1. + near))],
        1e-6,
    );
    assert_close(&[at(turns, 1e4), at(0.1, turns)], &[0.125, 1.], 1e-6);
}

// R11 (transformers#33129, vllm#3488): by the whole length, for every token of the row
#[test]
fn longrope_switches_behind_the_original_length_for_the_whole_row() {
    let (rope, dims) = (longrope(1., 2., 4, 4096), dims(8, 131072));
    let frequencies = |len: usize| rope.frequencies(8, 131072, Some(len)).unwrap().inv_freq;
    assert_eq!(frequencies(4096)[0], 1.);
    assert_eq!(frequencies(4097)[0], 0.5);
    let of = |len: usize| {
        let positions = Positions::first(len);
        let made = table(&rope, &dims, &positions, DType::F64, None).unwrap();
        let first_tokens = made.sin.i((0, 0, ..2, 0)).unwrap();
        values(&first_tokens)[1]
    };
    let scaling = 1.1902380714238083;
    assert_close(
        &[of(4096), of(4097)],
        &[scaling * 1f64.sin(), scaling * 0.5f64.sin()],
        1e-12,
    );
}

#[test]
fn longrope_rows_of_different_lengths_have_tables_of_their_own() {
    let (rope, dims) = (longrope(1., 2., 4, 16), dims(8, 64));
    let short: Vec<i64> = (-10..10).collect();
    let long: Vec<i64> = (0..20).collect();
    let both = table(&rope, &dims, &explicit(&[&short, &long]), DType::F64, None).unwrap();
    for (row, positions) in [&short, &long].into_iter().enumerate() {
        let alone = table(&rope, &dims, &explicit(&[positions]), DType::F64, None).unwrap();
        assert_same_bits(&both.cos.narrow(0, row, 1).unwrap(), &alone.cos);
        assert_same_bits(&both.sin.narrow(0, row, 1).unwrap(), &alone.sin);
    }
}

// R12 (candle phi3, llama.cpp#7225)
#[test]
fn longrope_factors_divide_and_temperature_follows_the_lengths() {
    let plain = RopeConfig::default().frequencies(8, 131072, None).unwrap();
    let RopeFrequencies {
        inv_freq,
        attention_scaling,
    } = longrope(2., 2., 4, 4096)
        .frequencies(8, 131072, None)
        .unwrap();
    let half: Vec<f64> = plain.inv_freq.iter().map(|w| w / 2.).collect();
    assert_eq!(inv_freq, half);
    assert_close(&[attention_scaling], &[1.19024], 5e-6);
}

// R13 (pie#602, #603, transformers#48652, Liger#1451)
#[test]
fn rotate_partial_heads_pair_within_the_turned_part_and_pass_the_rest() {
    let rope = RopeConfig {
        partial_rotary_factor: 0.25,
        ..RopeConfig::default()
    };
    let positions: Vec<i64> = [700, 701, 1500, 2355].into();
    let made = table(
        &rope,
        &dims(256, 4096),
        &explicit(&[&positions]),
        DType::F32,
        None,
    )
    .unwrap();
    assert_eq!(made.cos.dims(), &[1, 1, 4, 32]);
    let x = normal(2, &[1, 2, 4, 256]).to_dtype(DType::F32).unwrap();
    let x = Var::from_tensor(&x).unwrap();
    let out = rotate(&x, &made, Layout::Half).unwrap();
    let rest = |t: &Tensor| t.narrow(3, 64, 192).unwrap();
    assert_same_bits(&rest(&out), &rest(&x));
    let weight = normal(3, &[1, 2, 4, 256]).to_dtype(DType::F32).unwrap();
    let grads = (&out * &weight).unwrap().sum_all().unwrap().backward();
    assert_same_bits(&rest(grads.unwrap().get(&x).unwrap()), &rest(&weight));
    for (t, position) in positions.iter().enumerate() {
        let (x, out) = (
            values(&x.i((0, 1, t)).unwrap()),
            values(&out.i((0, 1, t)).unwrap()),
        );
        for i in 0..32 {
            let angle = *position as f64 * 10_000f64.powf(-2. * i as f64 / 64.);
            let turned = x[i] * angle.cos() - x[i + 32] * angle.sin();
            assert!((out[i] - turned).abs() < 1e-6, "{position} {i}");
        }
    }
}

// R14 (nexusquant#12)
#[test]
fn proportional_is_not_partial_rotary() {
    let proportional = from_hf(json!({"rope_type": "proportional", "partial_rotary_factor": 0.25}));
    let partial = from_hf(json!({"rope_type": "default", "partial_rotary_factor": 0.25}));
    let of = |rope: &RopeConfig| rope.frequencies(512, 4096, None).unwrap().inv_freq;
    let (proportional, partial) = (of(&proportional), of(&partial));
    assert_eq!((proportional.len(), partial.len()), (256, 64));
    assert!(proportional[63] > 0. && proportional[64..].iter().all(|w| *w == 0.));
    assert_close(&proportional[1..2], &[10_000f64.powf(-2. / 512.)], 1e-15);
    assert_close(&partial[1..2], &[10_000f64.powf(-2. / 128.)], 1e-15);
}

// R15 (candle#3411, torchtitan#801)
#[test]
fn layouts_agree_at_position_zero_and_through_the_permutation() {
    let x = Tensor::arange(0f64, 8., &CPU).unwrap();
    let x = Tensor::stack(&[&x, &x], 0)
        .unwrap()
        .reshape((1, 1, 2, 8))
        .unwrap();
    let rotation = table(
        &RopeConfig::default(),
        &dims(8, 16),
        &Positions::first(2),
        DType::F64,
        None,
    )
    .unwrap();
    // what Half reads in place of Interleaved's neighbours
    let permute = |x: &Tensor| {
        let order = Tensor::new(&[0u32, 2, 4, 6, 1, 3, 5, 7], &CPU).unwrap();
        x.index_select(&order, 3).unwrap()
    };
    let interleaved = rotate(&x, &rotation, Layout::Interleaved).unwrap();
    let half = rotate(&permute(&x), &rotation, Layout::Half).unwrap();
    assert_same_bits(&half, &permute(&interleaved));
    let plain_half = rotate(&x, &rotation, Layout::Half).unwrap();
    for out in [&interleaved, &plain_half] {
        assert_same_bits(&out.narrow(2, 0, 1).unwrap(), &x.narrow(2, 0, 1).unwrap());
    }
    let at_one = |x: &Tensor| values(&x.i((0, 0, 1)).unwrap());
    let (sin, cos) = 1f64.sin_cos();
    assert_close(&at_one(&interleaved)[..2], &[-sin, cos], 1e-15);
    assert_close(
        &[at_one(&plain_half)[0], at_one(&plain_half)[4]],
        &[-4. * sin, 4. * cos],
        1e-15,
    );
}

#[test]
fn convert_layout_of_both_projections_keeps_the_scores() {
    let (heads, head_dim, rotary_dim, width) = (3, 10, 6, 7);
    let rope = RopeConfig {
        partial_rotary_factor: 0.6,
        ..RopeConfig::default()
    };
    let positions = Positions::first(5);
    let rotation = table(&rope, &dims(head_dim, 16), &positions, DType::F64, None).unwrap();
    let x = normal(4, &[5, width]);
    let weights = [normal(5, &[30, width]), normal(6, &[30, width])];
    let biases = [normal(7, &[30]), normal(8, &[30])];
    let scores = |from: Layout, to: Layout| {
        let turned = |i: usize| {
            let convert =
                |w: &Tensor| convert_layout(w, heads, head_dim, rotary_dim, from, to).unwrap();
            let (weight, bias) = (convert(&weights[i]), convert(&biases[i]));
            let heads_first = x
                .matmul(&weight.t().unwrap())
                .and_then(|y| y.broadcast_add(&bias))
                .and_then(|y| y.reshape((1, 5, heads, head_dim)))
                .and_then(|y| y.transpose(1, 2));
            rotate(&heads_first.unwrap(), &rotation, to).unwrap()
        };
        values(&turned(0).matmul(&turned(1).t().unwrap()).unwrap())
    };
    let (half, interleaved) = (Layout::Half, Layout::Interleaved);
    assert_close(&scores(half, half), &scores(half, interleaved), 1e-12);
    assert_close(
        &scores(interleaved, interleaved),
        &scores(interleaved, half),
        1e-12,
    );
    let there =
        convert_layout(&weights[0], heads, head_dim, rotary_dim, half, interleaved).unwrap();
    let back = convert_layout(&there, heads, head_dim, rotary_dim, interleaved, half).unwrap();
    assert_same_bits(&back, &weights[0]);
    assert_ne!(values(&there), values(&back));
    assert_refuses(
        convert_layout(&weights[0], 4, head_dim, rotary_dim, half, interleaved),
        &["4·10", "[30, 7]"],
    );
    assert_refuses(
        convert_layout(&weights[0], heads, head_dim, 12, half, interleaved),
        &["12", "10"],
    );
}

// R19 (transformers#22161, unsloth#4078)
#[test]
fn rope_left_padded_row_equals_its_unpadded_run() {
    let rope = Rope::new(&RopeConfig::default(), &dims(8, 64)).unwrap();
    let (short, long) = (layer(10, 5, 8), layer(20, 10, 8));
    let padded = |short: &Tensor, long: &Tensor| {
        let (_, heads, _, width) = short.dims4().unwrap();
        // what padding tokens hold must not matter
        let filler = Tensor::full(1e3, (1, heads, 5, width), &CPU).unwrap();
        Tensor::cat(
            &[Tensor::cat(&[&filler, short], 2).unwrap(), long.clone()],
            0,
        )
        .unwrap()
    };
    let both = Qkv {
        q: padded(&short.q, &long.q),
        k: padded(&short.k, &long.k),
        v: padded(&short.v, &long.v),
    };
    let positions = Positions::left_padded(&[5, 10], &CPU).unwrap();
    let together = encoded(&rope, &both, &positions, None);
    let out = dense(&together, &positions, &positions);
    for (row, (alone, len)) in [(short, 5), (long, 10)].into_iter().enumerate() {
        let positions = Positions::first(len);
        let turned = encoded(&rope, &alone, &positions, None);
        let valid = |x: &Tensor| {
            x.narrow(0, row, 1)
                .unwrap()
                .narrow(2, 10 - len, len)
                .unwrap()
        };
        assert_same_bits(&valid(&together.q), &turned.q);
        assert_same_bits(&valid(&together.k), &turned.k);
        let expected = dense(&turned, &positions, &positions);
        assert_close(&values(&valid(&out)), &values(&expected), 1e-13);
    }
}

#[test]
fn rope_padding_is_not_turned() {
    let positions = Positions::left_padded(&[2, 4], &CPU).unwrap();
    let rope = longrope(1., 1., 4, 16);
    let made = table(&rope, &dims(8, 64), &positions, DType::F64, None).unwrap();
    let scaling = rope.frequencies(8, 64, None).unwrap().attention_scaling;
    assert!(scaling > 1.);
    let padding = |x: &Tensor| values(&x.i((0, 0, ..2)).unwrap());
    assert_eq!(padding(&made.cos), [scaling; 8]);
    assert_eq!(padding(&made.sin), [0.; 8]);
}

// R20 (Liger#477, transformers#29109)
#[test]
fn rope_rows_with_offsets_of_their_own_equal_single_calls() {
    let rope = Rope::new(&RopeConfig::default(), &dims(8, 64)).unwrap();
    let qkv = Qkv {
        q: normal(30, &[3, 4, 1, 8]),
        k: normal(31, &[3, 2, 1, 8]),
        v: normal(32, &[3, 2, 1, 8]),
    };
    let offsets = [50, 20, 0];
    let together = encoded(&rope, &qkv, &explicit(&[&[50], &[20], &[0]]), None);
    assert_eq!(together.q.dims(), &[3, 4, 1, 8]);
    for (row, start) in offsets.into_iter().enumerate() {
        let of = |x: &Tensor| x.narrow(0, row, 1).unwrap();
        let alone = Qkv {
            q: of(&qkv.q),
            k: of(&qkv.k),
            v: of(&qkv.v),
        };
        let alone = encoded(&rope, &alone, &Positions::Span { start, len: 1 }, None);
        assert_same_bits(&of(&together.q), &alone.q);
        assert_same_bits(&of(&together.k), &alone.k);
    }
}

/// Gradients of Σ weight·rotate by central differences. The operation is linear in each argument, so the step is large.
fn assert_gradients(
    x: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    layout: Layout,
    weight: Option<&Tensor>,
) {
    let tensors = [x, cos, sin].map(|t| Var::from_tensor(&t.contiguous().unwrap()).unwrap());
    let loss = |[x, cos, sin]: [&Tensor; 3]| {
        let rotation = Rotation {
            cos: cos.clone(),
            sin: sin.clone(),
        };
        let out = rotate(x, &rotation, layout).unwrap();
        match weight {
            Some(weight) => (out * weight).unwrap().sum_all().unwrap(),
            None => out.sum_all().unwrap(),
        }
    };
    let grads = loss(tensors.each_ref().map(|v| v.as_tensor()))
        .backward()
        .unwrap();
    for (which, var) in tensors.iter().enumerate() {
        let flat = values(var);
        let at = |i: usize, step: f64| {
            let mut moved = flat.clone();
            moved[i] += step;
            let moved = Tensor::from_vec(moved, var.shape(), &CPU).unwrap();
            let mut arguments = [x, cos, sin];
            arguments[which] = &moved;
            loss(arguments).to_scalar::<f64>().unwrap()
        };
        let differences: Vec<f64> = (0..flat.len()).map(|i| at(i, 0.5) - at(i, -0.5)).collect();
        let grad = grads.get(var).unwrap();
        assert_eq!((grad.dims(), grad.dtype()), (var.dims(), DType::F64));
        assert_close(&values(grad), &differences, 1e-11);
    }
}

// R22 (candle#3568, #3612, LoongForge#106)
#[test]
fn rotate_gradients_equal_finite_differences() {
    let x = normal(40, &[2, 4, 5, 8]);
    let weight = normal(41, &[2, 4, 5, 8]);
    for layout in LAYOUTS {
        // table rows, table heads, pairs: shared, partial, by row, by head, grouped
        for (i, (rows, heads, pairs)) in [
            (1, 1, 4),
            (1, 1, 3),
            (2, 1, 4),
            (2, 4, 2),
            (1, 2, 4),
            (2, 2, 1),
        ]
        .into_iter()
        .enumerate()
        {
            // any modulus
            let shape = [rows, heads, 5, pairs];
            let (cos, sin) = (normal(50 + i as u64, &shape), normal(60 + i as u64, &shape));
            assert_gradients(&x, &cos, &sin, layout, Some(&weight));
            assert_gradients(&x, &cos, &sin, layout, None);
        }
    }
}

// R22
#[test]
fn rotate_keeps_norms_and_its_gradient_turns_back() {
    let rotation = table(
        &RopeConfig::default(),
        &dims(8, 64),
        &Positions::Span { start: 3, len: 5 },
        DType::F64,
        None,
    )
    .unwrap();
    let back = Rotation {
        cos: rotation.cos.clone(),
        sin: rotation.sin.neg().unwrap(),
    };
    let x = Var::from_tensor(&normal(70, &[2, 3, 5, 8])).unwrap();
    let weight = normal(71, &[2, 3, 5, 8]);
    for layout in LAYOUTS {
        let out = rotate(&x, &rotation, layout).unwrap();
        let norms = |x: &Tensor| values(&x.sqr().unwrap().sum(3).unwrap());
        assert_close(&norms(&out), &norms(&x), 1e-13);
        assert_close(
            &values(&rotate(&out, &back, layout).unwrap()),
            &values(&x),
            1e-14,
        );
        let grads = (&out * &weight)
            .unwrap()
            .sum_all()
            .unwrap()
            .backward()
            .unwrap();
        assert_same_bits(
            grads.get(&x).unwrap(),
            &rotate(&weight, &back, layout).unwrap(),
        );
    }
}

#[test]
fn rotate_gradients_keep_the_dtype_of_each_argument() {
    for (dtype, table_dtype) in [
        (DType::BF16, DType::F32),
        (DType::F16, DType::F32),
        (DType::F32, DType::F32),
    ] {
        // not leaves, so that a missing gradient would show
        let part = |seed: u64, shape: &[usize], dtype: DType| {
            let var = Var::from_tensor(&normal(seed, shape).to_dtype(dtype).unwrap()).unwrap();
            let doubled = (var.as_tensor() * 2.).unwrap();
            (var, doubled)
        };
        let (x, x2) = part(80, &[2, 4, 3, 6], dtype);
        let (cos, cos2) = part(81, &[1, 2, 3, 2], table_dtype);
        let (sin, sin2) = part(82, &[1, 2, 3, 2], table_dtype);
        let rotation = Rotation {
            cos: cos2,
            sin: sin2,
        };
        let out = rotate(&x2, &rotation, Layout::Interleaved).unwrap();
        let grads = out.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        assert_eq!(grads.get(&x).unwrap().dtype(), dtype);
        for table in [&cos, &sin] {
            let grad = grads.get(table).unwrap();
            assert_eq!(grad.dtype(), table_dtype);
            assert!(values(grad).iter().all(|g| g.is_finite() && *g != 0.));
            assert!(!grad.track_op());
        }
        // only one of the three tracked
        let constant = Rotation {
            cos: rotation.cos.detach(),
            sin: rotation.sin.clone(),
        };
        let out = rotate(&x2.detach(), &constant, Layout::Half).unwrap();
        let grads = out.sum_all().unwrap().backward().unwrap();
        assert!(grads.get(&sin).is_some() && grads.get(&x).is_none() && grads.get(&cos).is_none());
    }
}

#[test]
fn rotate_of_constants_builds_no_graph() {
    let rotation = Rotation {
        cos: normal(90, &[1, 1, 3, 2]),
        sin: normal(91, &[1, 1, 3, 2]),
    };
    let out = rotate(&normal(92, &[1, 2, 3, 4]), &rotation, Layout::Half).unwrap();
    assert!(!out.track_op());
}

// R23 (apex#334, llama.cpp#2779, mlx-lm#1896); other strides in the unit tests of rotate
#[test]
fn rotate_heads_of_a_fused_projection_equal_a_contiguous_run() {
    let (tokens, heads, head_dim) = (33, 5, 24);
    let rotation = table(
        &RopeConfig::default(),
        &dims(head_dim, 64),
        &Positions::first(tokens),
        DType::F32,
        None,
    )
    .unwrap();
    let qkv = normal(100, &[2, tokens, 3 * heads * head_dim]).to_dtype(DType::F32);
    let qkv = Var::from_tensor(&qkv.unwrap()).unwrap();
    for layout in LAYOUTS {
        let run = |contiguous: bool| {
            let x = qkv
                .narrow(2, heads * head_dim, heads * head_dim)
                .and_then(|x| x.reshape((2, tokens, heads, head_dim)))
                .and_then(|x| x.transpose(1, 2))
                .unwrap();
            let x = if contiguous {
                x.contiguous().unwrap()
            } else {
                x
            };
            let out = rotate(&x, &rotation, layout).unwrap();
            let grads = out.sum_all().unwrap().backward().unwrap();
            (out, grads.get(&qkv).unwrap().clone())
        };
        let ((out, grad), (expected, expected_grad)) = (run(false), run(true));
        assert_same_bits(&out, &expected);
        assert_same_bits(&grad, &expected_grad);
    }
}

// R28 (x-transformers#219, #80)
#[test]
fn rope_decoding_token_by_token_equals_the_full_forward() {
    let tokens = 20;
    let qkv = layer(110, tokens, 8);
    for (config, planned_len) in [
        (RopeConfig::default(), None),
        (scaled(RopeScaling::Dynamic { factor: 2. }), Some(tokens)),
        (longrope(1., 3., 4, 16), Some(tokens)),
    ] {
        let rope = Rope::new(&config, &dims(8, 16)).unwrap();
        let all = Positions::first(tokens);
        let full = dense(&encoded(&rope, &qkv, &all, None), &all, &all);
        let (mut keys, mut values_so_far) = (Vec::new(), Vec::new());
        for t in 0..tokens {
            let at = |x: &Tensor| x.narrow(2, t, 1).unwrap();
            let step = Qkv {
                q: at(&qkv.q),
                k: at(&qkv.k),
                v: at(&qkv.v),
            };
            let here = Positions::Span {
                start: t as i64,
                len: 1,
            };
            let step = encoded(&rope, &step, &here, planned_len);
            keys.push(step.k);
            values_so_far.push(step.v);
            let cached = Qkv {
                q: step.q,
                k: Tensor::cat(&keys, 2).unwrap(),
                v: Tensor::cat(&values_so_far, 2).unwrap(),
            };
            let out = dense(&cached, &here, &Positions::first(t + 1));
            assert_close(&values(&out), &values(&at(&full)), 1e-12);
        }
    }
}

#[test]
fn rotate_operands_that_do_not_fit_are_refused_by_name() {
    let x = normal(120, &[2, 4, 5, 8]);
    let with = |shape: &[usize], dtype: DType| {
        let part = || normal(121, shape).to_dtype(dtype).unwrap();
        Rotation {
            cos: part(),
            sin: part(),
        }
    };
    for (shape, part) in [
        (&[3usize, 1, 5, 4][..], "3 rows for a batch of 2"),
        (&[1, 3, 5, 4], "3 heads, which must divide x's 4"),
        (&[1, 1, 6, 4], "6 tokens, x has 5"),
        (&[1, 1, 5, 5], "5 pairs of 8 coordinates"),
        (&[1, 1, 5, 0], "0 pairs"),
        (&[5, 4], "(1 or B, 1 or G, T, R/2)"),
    ] {
        let refused = rotate(&x, &with(shape, DType::F64), Layout::Half);
        assert_refuses(refused, &[part, "[2, 4, 5, 8]"]);
    }
    for (x_dtype, table_dtype, parts) in [
        (DType::F64, DType::F32, ["F64", "F32"]),
        (DType::F32, DType::F64, ["F32", "F64"]),
        (DType::BF16, DType::BF16, ["BF16", "F32"]),
        (DType::U32, DType::F32, ["U32", "not supported"]),
    ] {
        let x = x.to_dtype(x_dtype).unwrap();
        let refused = rotate(&x, &with(&[1, 1, 5, 4], table_dtype), Layout::Half);
        assert_refuses(refused, &parts);
    }
}

#[test]
fn rotate_without_tokens_or_rows_is_empty() {
    for shape in [[0, 2, 3, 4], [2, 2, 0, 4]] {
        let x = Var::from_tensor(&Tensor::zeros(&shape, DType::F64, &CPU).unwrap()).unwrap();
        let part = || Var::from_tensor(&normal(130, &[1, 1, shape[2], 2])).unwrap();
        let (cos, sin) = (part(), part());
        let rotation = Rotation {
            cos: cos.as_tensor().clone(),
            sin: sin.as_tensor().clone(),
        };
        let out = rotate(&x, &rotation, Layout::Half).unwrap();
        assert_eq!(out.dims(), &shape);
        let grads = out.sum_all().unwrap().backward().unwrap();
        assert!(values(grads.get(&cos).unwrap()).iter().all(|g| *g == 0.));
    }
}

// R10: both generations of the file, both names of the type
#[test]
fn from_hf_both_generations_read_the_same() {
    let fields = json!({
        "factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
    });
    let with = |extra: &[(&str, Value)]| {
        let mut fields = fields.clone();
        for (name, value) in extra {
            fields[*name] = value.clone();
        }
        fields
    };
    let expected = RopeConfig {
        theta: 5e5,
        partial_rotary_factor: 0.5,
        layout: Layout::Half,
        scaling: RopeScaling::Llama3 {
            factor: 8.,
            low_freq_factor: 1.,
            high_freq_factor: 4.,
            original_max_position_embeddings: 8192,
        },
    };
    let kind = |name| (name, json!("llama3"));
    for config in [
        json!({"rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_scaling": with(&[kind("type")])}),
        json!({"rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_scaling": with(&[kind("rope_type")])}),
        json!({"rope_scaling": null, "rope_parameters": with(&[
            kind("rope_type"), ("rope_theta", json!(5e5)), ("partial_rotary_factor", json!(0.5))])}),
        json!({"rope_theta": 5e5, "rope_parameters": with(&[
            kind("rope_type"), kind("type"), ("partial_rotary_factor", json!(0.5))])}),
    ] {
        assert_eq!(RopeConfig::from_hf(&config).unwrap(), expected);
    }
    for plain in [
        json!({}),
        json!({"rope_scaling": null}),
        json!({"rope_theta": 1e4, "rope_scaling": null, "partial_rotary_factor": null}),
        json!({"rope_parameters": {"rope_theta": 1e4}}),
        json!({"rope_parameters": {"rope_theta": 1e4, "rope_type": null, "factor": null}}),
    ] {
        assert_eq!(RopeConfig::from_hf(&plain).unwrap(), RopeConfig::default());
    }
}

#[test]
fn from_hf_longrope_finds_the_original_length_beside_the_parameters() {
    let config = json!({
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "su", "short_factor": [1, 1.5], "long_factor": [2, 3]},
    });
    let rope = RopeConfig::from_hf(&config).unwrap();
    assert_eq!(
        rope.frequencies(4, 131072, Some(4097)).unwrap().inv_freq[0],
        0.5
    );
}

#[test]
fn from_hf_what_it_cannot_read_is_refused_by_name_and_value() {
    let refuses = |config: Value, parts: &[&str]| {
        assert_refuses(RopeConfig::from_hf(&config), parts);
    };
    refuses(
        json!({"rope_scaling": {"rope_type": "mrope"}}),
        &["unknown", "mrope"],
    );
    refuses(
        json!({"rope_scaling": {"type": "linear"}}),
        &["factor", "missing"],
    );
    refuses(
        json!({"rope_scaling": {"factor": 2.0}}),
        &["rope_type", "factor", "2.0"],
    );
    refuses(
        json!({"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}}),
        &["linear", "dynamic"],
    );
    refuses(
        json!({"rope_parameters": {"rope_type": "linear", "factor": "two"}}),
        &["factor", "two"],
    );
    refuses(
        json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}),
        &["rope_theta", "10000", "500000"],
    );
    refuses(
        json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
        &["full_attention"],
    );
    refuses(json!({"rope_scaling": 2.0}), &["rope_scaling", "2.0"]);
    refuses(
        json!({"rope_scaling": {"type": "yarn"}}),
        &["factor", "missing"],
    );
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0});
    refuses(
        json!({"rope_scaling": llama3}),
        &["original_max_position_embeddings", "missing"],
    );
    refuses(
        json!({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0, null]}}),
        &["long_factor", "[1.0,null]"],
    );
    refuses(json!([]), &["config", "[]"]);
}

#[test]
fn from_hf_parameters_stated_elsewhere_are_refused_and_not_overlooked() {
    let refuses = |config: Value, parts: &[&str]| {
        assert_refuses(RopeConfig::from_hf(&config), parts);
    };
    refuses(
        json!({"text_config": {"rope_theta": 5e5}}),
        &["text_config"],
    );
    refuses(
        json!({"rotary_pct": 0.25, "rotary_emb_base": 10000}),
        &["rotary_pct", "0.25"],
    );
    refuses(
        json!({"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
        &["rope_local_base_freq", "10000"],
    );
    refuses(json!({"global_rope_theta": 1.6e5}), &["global_rope_theta"]);
    // The newer generation says all in one place; what it keeps of the older is no contradiction.
    let both = json!({
        "rotary_pct": 0.25,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    });
    assert_eq!(
        RopeConfig::from_hf(&both).unwrap().partial_rotary_factor,
        0.25
    );
}

#[test]
fn encoding_config_with_a_misspelt_field_is_refused_by_its_name() {
    for (text, field) in [
        (r#"{"type": "rope", "rope_theta": 5e5}"#, "rope_theta"),
        (
            r#"{"type": "rope", "scaling": {"rope_type": "yarn", "factr": 4}}"#,
            "factr",
        ),
        (
            r#"{"type": "rope", "scaling": {"rope_type": "linear", "factor": 4, "x": 1}}"#,
            "x",
        ),
        (
            r#"{"type": "rope", "scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0], "x": 1}}"#,
            "x",
        ),
        (r#"{"type": "alibi", "slope": [1.0]}"#, "slope"),
        (
            r#"{"type": "absolute", "table": "sinusoidal", "base": 3}"#,
            "base",
        ),
        (r#"{"type": "tapa", "beta": 3}"#, "beta"),
        (r#"{"type": "tape", "ropes": {}}"#, "ropes"),
    ] {
        let error = serde_json::from_str::<EncodingConfig>(text)
            .expect_err(text)
            .to_string();
        assert!(
            error.contains(&format!("unknown field `{field}`")),
            "{text}: {error}"
        );
    }
}

#[test]
fn rope_parameters_out_of_range_are_refused_by_name_and_value() {
    let linear = |factor| scaled(RopeScaling::Linear { factor });
    let refuses = |rope: RopeConfig, parts: &[&str]| {
        assert_refuses(Rope::new(&rope, &dims(8, 4096)), parts);
        assert_refuses(rope.frequencies(8, 4096, None), parts);
    };
    refuses(linear(0.5), &["linear", "factor 0.5"]);
    refuses(linear(f64::NAN), &["factor NaN"]);
    for theta in [0., 1., -5., f64::INFINITY] {
        let rope = RopeConfig {
            theta,
            ..RopeConfig::default()
        };
        refuses(rope, &["rope_theta", &theta.to_string()]);
    }
    for partial_rotary_factor in [0., 1.5, f64::NAN, 0.4] {
        let rope = RopeConfig {
            partial_rotary_factor,
            ..RopeConfig::default()
        };
        refuses(
            rope,
            &["partial_rotary_factor", &partial_rotary_factor.to_string()],
        );
    }
    refuses(
        longrope(1., 1., 3, 4096),
        &["short_factor", "3 entries for 4"],
    );
    refuses(longrope(1., -1., 4, 4096), &["long_factor -1"]);
    let llama3 = |low_freq_factor, high_freq_factor| {
        scaled(RopeScaling::Llama3 {
            factor: 8.,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings: 8192,
        })
    };
    refuses(llama3(4., 1.), &["high_freq_factor 1", "low_freq_factor 4"]);
    let yarn = |beta_fast, beta_slow| {
        scaled(RopeScaling::Yarn(Yarn {
            factor: Some(2.),
            beta_fast,
            beta_slow,
            ..Yarn::default()
        }))
    };
    refuses(yarn(1., 32.), &["beta_fast 1", "beta_slow 32"]);
    refuses(yarn(32., 0.), &["beta_slow 0"]);
    let narrow = scaled(RopeScaling::Ntk { factor: 2. }).frequencies(2, 4096, None);
    assert_refuses(narrow, &["ntk", "at least 4", "2"]);
}

#[test]
fn rope_config_through_json_stays_the_same() {
    for rope in [
        RopeConfig::default(),
        longrope(1., 2., 4, 4096),
        scaled(RopeScaling::Yarn(Yarn {
            mscale: Some(0.707),
            ..Yarn::default()
        })),
        RopeConfig {
            layout: Layout::Interleaved,
            ..scaled(RopeScaling::Proportional { factor: 2. })
        },
    ] {
        let text = serde_json::to_string(&rope).unwrap();
        assert_eq!(serde_json::from_str::<RopeConfig>(&text).unwrap(), rope);
    }
    let short = r#"{"scaling": {"rope_type": "yarn", "factor": 4.0}}"#;
    let rope: RopeConfig = serde_json::from_str(short).unwrap();
    let expected = Yarn {
        factor: Some(4.),
        ..Yarn::default()
    };
    assert_eq!(rope, scaled(RopeScaling::Yarn(expected)));
}

// A1 (mlx#343, #3071, flashinfer#200, flash-attention#540)
#[test]
fn alibi_slopes_of_any_head_count_follow_the_authors() {
    let from_exponents =
        |exponents: &[f64]| -> Vec<f64> { exponents.iter().map(|e| (-e).exp2()).collect() };
    for (heads, exponents) in [
        (1, &[8.][..]),
        (3, &[4., 8., 2.]),
        (5, &[2., 4., 6., 8., 1.]),
        (6, &[2., 4., 6., 8., 1., 3.]),
        (7, &[2., 4., 6., 8., 1., 3., 5.]),
        (12, &[1., 2., 3., 4., 5., 6., 7., 8., 0.5, 1.5, 2.5, 3.5]),
    ] {
        assert_eq!(alibi_slopes(heads), from_exponents(exponents));
    }
    let forty = alibi_slopes(40);
    assert_eq!(forty.len(), 40);
    assert_close(
        &[forty[0], forty[31], forty[32], forty[39]],
        &from_exponents(&[0.25, 8., 0.125, 1.875]),
        1e-16,
    );
    assert!(alibi_slopes(0).is_empty());
}

// A2 (aprender#2143)
#[test]
fn alibi_first_slope_of_eight_is_a_half() {
    let expected = [
        0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625,
    ];
    assert_eq!(alibi_slopes(8), expected);
}

// A4 (flashinfer#1606, #5101): a shard of the heads has the slopes of the whole
#[test]
fn alibi_shard_takes_the_slopes_it_is_given() {
    let of = |slopes: Option<Vec<f64>>| Alibi::new(&AlibiConfig { slopes }, &dims(8, 64));
    let shard = of(Some(alibi_slopes(8)[4..].to_vec())).unwrap();
    let Score::LinearBias { slopes } = shard.score(0) else {
        panic!("not a linear bias: {:?}", shard.score(0))
    };
    assert_eq!(*slopes, [0.03125, 0.015625, 0.0078125, 0.00390625]);
    let Score::LinearBias { slopes } = of(None).unwrap().score(3) else {
        panic!("not a linear bias")
    };
    assert_eq!(*slopes, alibi_slopes(4));
    assert_refuses(of(Some(vec![0.5; 3])), &["3 slopes", "4 query heads"]);
    assert_refuses(of(Some(vec![0.5, 0.5, f64::NAN, 0.5])), &["NaN", "head 2"]);
}
