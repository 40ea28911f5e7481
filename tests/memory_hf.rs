//! Peak memory of reading and writing a model.

mod peak;

use candle_core::{DType, Device, Result};
use candle_posenc::hf::{self, ModelFolder, SaveOptions};
use candle_posenc::{Llama, LlamaConfig, SeededVars};
use peak::peak_mb;

/// One test, so that nothing else allocates meanwhile.
#[test]
fn folder_read_or_written_takes_no_second_copy_of_the_model() -> Result<()> {
    let config = LlamaConfig {
        vocab_size: 4096,
        hidden_size: 256,
        intermediate_size: 1024,
        num_hidden_layers: 8,
        ..LlamaConfig::default()
    };
    let vars = SeededVars::new(1);
    Llama::new(&config, vars.builder(DType::F32, &Device::Cpu))?;
    let sizes: Vec<usize> = vars.vars().iter().map(|var| var.elem_count() * 4).collect();
    let model = sizes.iter().sum::<usize>() as f64 / 1e6;
    let largest = sizes.iter().copied().max().unwrap_or(0) as f64 / 1e6;
    assert!(model > 30. && largest < 5., "{model} MB, {largest} MB");
    for (dtype, max_shard_bytes) in [
        (DType::F32, u64::MAX),
        (DType::F32, 10_000_000),
        (DType::BF16, u64::MAX),
    ] {
        let folder = tempfile::tempdir()?;
        let options = SaveOptions {
            dtype: Some(dtype),
            max_shard_bytes,
            ..SaveOptions::default()
        };
        let ((), saving) = peak_mb(|| hf::save(&folder, &config, &vars, &options))?;
        let (opened, opening) = peak_mb(|| ModelFolder::open(&folder))?;
        let (loaded, loading) = peak_mb(|| opened.load(DType::F32, &Device::Cpu))?;
        drop(loaded);
        let ((), setting) = peak_mb(|| opened.load_into(&vars))?;
        println!("{dtype:?}: {model:.1} MB saved with {saving:.1}, opened with {opening:.1}, loaded with {loading:.1}, set with {setting:.1} more");
        assert!(saving < 3. * largest, "saving took {saving} MB");
        assert!(opening < 1., "opening took {opening} MB");
        assert!(loading < model + 2. * largest, "loading took {loading} MB");
        assert!(setting < model + 2. * largest, "setting took {setting} MB");
    }
    Ok(())
}
