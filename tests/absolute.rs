//! Absolute encodings: values by the paper, true positions, padding, gradients.

use candle_core::{DType, Device, IndexOp, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use candle_posenc::encoding::{Absolute, AbsoluteConfig};
use candle_posenc::{Encoding, EncodingConfig, ModelDims, Positions};

const CPU: Device = Device::Cpu;

fn dims(width: usize) -> ModelDims {
    ModelDims {
        width,
        heads: 1,
        kv_heads: 1,
        head_dim: width,
        layers: 1,
        max_positions: 64,
    }
}

fn sinusoidal(width: usize) -> Absolute {
    let vb = VarBuilder::zeros(DType::F64, &CPU);
    Absolute::new(&AbsoluteConfig::default(), &dims(width), vb).unwrap()
}

fn unscaled_sinusoidal(width: usize) -> Absolute {
    let config = AbsoluteConfig::Sinusoidal {
        theta: 10_000.,
        scale_embeddings: false,
    };
    Absolute::new(&config, &dims(width), VarBuilder::zeros(DType::F64, &CPU)).unwrap()
}

fn learned(map: &VarMap, max_positions: usize, width: usize) -> Absolute {
    let vb = VarBuilder::from_varmap(map, DType::F64, &CPU);
    let config = AbsoluteConfig::Learned { max_positions };
    Absolute::new(&config, &dims(width), vb).unwrap()
}

fn weight(map: &VarMap) -> Var {
    let data = map.data().lock().unwrap();
    data["embed_positions.weight"].clone()
}

fn zeros(batch: usize, tokens: usize, width: usize) -> Tensor {
    Tensor::zeros((batch, tokens, width), DType::F64, &CPU).unwrap()
}

fn values(x: &Tensor) -> Vec<f64> {
    let x = x.to_dtype(DType::F64).and_then(|x| x.flatten_all());
    x.unwrap().to_vec1().unwrap()
}

#[track_caller]
fn assert_close(a: &[f64], b: &[f64], tolerance: f64) {
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(b) {
        assert!((a - b).abs() <= tolerance, "{a} and {b}");
    }
}

#[test]
fn sinusoidal_coordinates_interleave_sines_and_cosines() {
    let out = sinusoidal(4).embed(&zeros(1, 2, 4), &Positions::Span { start: 0, len: 2 });
    let out = out.unwrap();
    assert_eq!(values(&out.i((0, 0)).unwrap()), [0., 1., 0., 1.]);
    let one = [
        0.841470984807897,
        0.54030230586814,
        0.009999833334167,
        0.999950000416665,
    ];
    assert_close(&values(&out.i((0, 1)).unwrap()), &one, 1e-14);
}

#[test]
fn sinusoidal_embeddings_are_scaled_as_in_the_paper_unless_told_otherwise() {
    let ones = (zeros(1, 1, 4) + 1.).unwrap();
    let at_0 = |encoding: Absolute| values(&encoding.embed(&ones, &Positions::first(1)).unwrap());
    assert_eq!(at_0(sinusoidal(4)), [2., 3., 2., 3.]);
    assert_eq!(at_0(unscaled_sinusoidal(4)), [1., 2., 1., 2.]);
}

#[test]
fn sinusoidal_odd_width_ends_with_a_sine() {
    let out = sinusoidal(3).embed(&zeros(1, 1, 3), &Positions::Span { start: 5, len: 1 });
    let slow = 5. * 10_000f64.powf(-2. / 3.);
    assert_close(
        &values(&out.unwrap()),
        &[5f64.sin(), 5f64.cos(), slow.sin()],
        1e-15,
    );
}

#[test]
fn sinusoidal_far_positions_in_half_precision_stay_apart() {
    let x = Tensor::zeros((1, 2, 4), DType::BF16, &CPU).unwrap();
    let positions = Positions::Span {
        start: 131071,
        len: 2,
    };
    let out = sinusoidal(4).embed(&x, &positions).unwrap();
    assert_eq!(out.dtype(), DType::BF16);
    let first = |t: usize| values(&out.i((0, t, 0)).unwrap().reshape(1).unwrap())[0];
    assert_close(
        &[first(0), first(1)],
        &[131071f64.sin(), 131072f64.sin()],
        4e-3,
    );
}

#[test]
fn absolute_table_is_added_at_true_positions_and_padding_gets_nothing() {
    let map = VarMap::new();
    for encoding in [unscaled_sinusoidal(6), learned(&map, 9, 6)] {
        let x = Tensor::randn(0f64, 1., (2, 9, 6), &CPU).unwrap();
        let full = encoding.embed(&x, &Positions::first(9)).unwrap();
        let later = encoding.embed(
            &x.narrow(1, 5, 4).unwrap(),
            &Positions::Span { start: 5, len: 4 },
        );
        assert_eq!(
            values(&later.unwrap()),
            values(&full.narrow(1, 5, 4).unwrap())
        );
        let padded = Positions::left_padded(&[4, 9], &CPU).unwrap();
        let out = encoding.embed(&x, &padded).unwrap();
        assert_eq!(
            values(&out.i((0, ..5)).unwrap()),
            values(&x.i((0, ..5)).unwrap())
        );
        assert_eq!(values(&out.i(1).unwrap()), values(&full.i(1).unwrap()));
        let added = (out.i((0, 5..)).unwrap() - x.i((0, 5..)).unwrap()).unwrap();
        let expected = (full.i((1, ..4)).unwrap() - x.i((1, ..4)).unwrap()).unwrap();
        assert_close(&values(&added), &values(&expected), 1e-14);
    }
}

#[test]
fn learned_table_gets_the_gradient_of_the_positions_used() {
    let map = VarMap::new();
    let encoding = learned(&map, 5, 2);
    let x = Var::from_tensor(&zeros(2, 4, 2)).unwrap();
    let padded = Positions::left_padded(&[2, 4], &CPU).unwrap();
    let out = encoding.embed(&x, &padded).unwrap();
    let grads = out.sum_all().unwrap().backward().unwrap();
    let rows = [2., 2., 2., 2., 1., 1., 1., 1., 0., 0.];
    assert_eq!(values(grads.get(&weight(&map)).unwrap()), rows);
    assert_eq!(values(grads.get(&x).unwrap()), [1.; 16]);
}

#[test]
fn learned_table_shared_row_of_positions_sums_over_the_batch() {
    let map = VarMap::new();
    let encoding = learned(&map, 3, 2);
    let out = encoding
        .embed(&zeros(4, 2, 2), &Positions::first(2))
        .unwrap();
    let grads = out.sum_all().unwrap().backward().unwrap();
    assert_eq!(
        values(grads.get(&weight(&map)).unwrap()),
        [4., 4., 4., 4., 0., 0.]
    );
}

#[test]
fn learned_table_starts_small_and_normal() {
    let map = VarMap::new();
    learned(&map, 200, 50);
    let all = values(&weight(&map));
    let deviation = (all.iter().map(|w| w * w).sum::<f64>() / all.len() as f64).sqrt();
    assert!((deviation - 0.02).abs() < 1e-3, "{deviation}");
}

#[test]
fn learned_nan_in_the_table_does_not_reach_padding() {
    let map = VarMap::new();
    let encoding = learned(&map, 4, 2);
    weight(&map)
        .set(&Tensor::full(f64::NAN, (4, 2), &CPU).unwrap())
        .unwrap();
    let padded = Positions::left_padded(&[1, 3], &CPU).unwrap();
    let out = encoding.embed(&zeros(2, 3, 2), &padded).unwrap();
    assert_eq!(values(&out.i((0, ..2)).unwrap()), [0.; 4]);
}

#[test]
fn learned_position_beyond_the_table_is_refused_with_both_numbers() {
    let map = VarMap::new();
    let encoding = learned(&map, 8, 2);
    let refused = encoding.embed(&zeros(1, 2, 2), &Positions::Span { start: 7, len: 2 });
    let message = refused.unwrap_err().to_string();
    assert!(
        message.contains("position 8") && message.contains("8 positions"),
        "{message}"
    );
}

#[test]
fn absolute_what_does_not_fit_is_refused() {
    let vb = || VarBuilder::zeros(DType::F64, &CPU);
    let new = |config| Absolute::new(&config, &dims(4), vb());
    assert!(new(AbsoluteConfig::Sinusoidal {
        theta: 0.5,
        scale_embeddings: false
    })
    .is_err());
    assert!(new(AbsoluteConfig::Learned { max_positions: 0 }).is_err());
    let widthless = Absolute::new(&AbsoluteConfig::default(), &dims(0), vb());
    assert!(widthless.is_err_and(|error| error.to_string().contains("width 0")));
    let encoding = sinusoidal(4);
    assert!(encoding
        .embed(&zeros(1, 3, 4), &Positions::first(2))
        .is_err());
    assert!(encoding
        .embed(&zeros(1, 2, 5), &Positions::first(2))
        .is_err());
}

#[test]
fn absolute_config_through_json_stays_the_same() {
    for config in [
        AbsoluteConfig::Sinusoidal {
            theta: 500.,
            scale_embeddings: false,
        },
        AbsoluteConfig::Learned { max_positions: 7 },
    ] {
        let config = EncodingConfig::Absolute(config);
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(
            serde_json::from_str::<EncodingConfig>(&text).unwrap(),
            config
        );
    }
}
