//! Peak memory of the cross-entropy at 8,192 tokens and 32,000 ids, whose logits would be 1 GB.

mod peak;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_posenc::train::mean_loss;
use peak::peak_mb;

/// One test, so that nothing else allocates meanwhile.
#[test]
fn loss_at_8192_tokens_of_32000_ids_stays_below_a_tenth_of_its_logits() -> Result<()> {
    let (t, c, vocab) = (8192, 64, 32_000);
    let normal = |shape| Tensor::randn(0f32, 1., shape, &Device::Cpu)?.to_dtype(DType::F32);
    let hidden = Var::from_tensor(&normal((1, t, c))?)?;
    let head = Var::from_tensor(&normal((1, vocab, c))?.squeeze(0)?)?;
    let ids: Vec<u32> = (0..t).map(|i| (i * 7919 % vocab) as u32).collect();
    let targets = Tensor::from_vec(ids, (1, t), &Device::Cpu)?;
    let logits_mb = (t * vocab * 4) as f64 / 1e6;
    let (loss, forward) = peak_mb(|| mean_loss(&hidden, &head, &targets))?;
    let (gradients, backward) = peak_mb(|| loss.backward())?;
    println!("logits {logits_mb:.0} MB; peak forward {forward:.1} MB, backward {backward:.1} MB");
    assert!(gradients.get(&hidden).is_some() && gradients.get(&head).is_some());
    assert!(forward < logits_mb / 10., "forward took {forward} MB");
    assert!(backward < logits_mb / 10., "backward took {backward} MB");
    Ok(())
}
