//! Peak memory of a test program; its allocator counts. Only one test of such a program may run at a time.

// Every test program compiles this for itself and uses a part of it.
#![allow(dead_code)]

use candle_core::Result;
use peak_alloc::PeakAlloc;

#[global_allocator]
pub static MEMORY: PeakAlloc = PeakAlloc;

/// MB beyond what is alive when `run` starts.
pub fn peak_mb<R>(run: impl FnOnce() -> Result<R>) -> Result<(R, f64)> {
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    let result = run()?;
    let peak = MEMORY.peak_usage().saturating_sub(before);
    Ok((result, peak as f64 / 1e6))
}
