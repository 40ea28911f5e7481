//! What kernels read beside q, k and v and is the same from call to call, kept on the GPU: turns and slopes.

use crate::attend::launch::{self, turns_len};
use crate::gpu::{kept, upload};
use crate::recent::Recent;
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::cuda_backend::DeviceId;
use candle_core::{CudaDevice, Result};
use std::sync::Arc;

/// A table of [turns](launch::turns).
pub(super) struct Turns {
    /// Distances below it are in the table.
    pub reach: usize,
    pub entries: CudaSlice<[f32; 2]>,
}

#[derive(PartialEq)]
struct TurnsKey {
    device: DeviceId,
    alpha: f64,
    phase_scale: f64,
    reach: usize,
}

static TURNS: Recent<TurnsKey, Turns, 8> = Recent::new();

/// Turns for distances up to `greatest`, as far as a table goes.
pub(super) fn turns(
    device: &CudaDevice,
    alpha: f64,
    phase_scale: f64,
    greatest: u64,
) -> Result<Arc<Turns>> {
    let reach = launch::reach(greatest);
    let key = TurnsKey {
        device: device.id(),
        alpha,
        phase_scale,
        reach,
    };
    kept(&TURNS, device, key, || {
        let entries = launch::turns(alpha, phase_scale, reach);
        debug_assert_eq!(entries.len(), turns_len(reach));
        Ok(Turns {
            reach,
            entries: upload(device, &entries)?,
        })
    })
}

static SLOPES: Recent<(DeviceId, Arc<[f64]>), CudaSlice<f32>, 16> = Recent::new();

/// Slopes in units of log2, for the kernels on tensor cores.
pub(super) fn log2_slopes(device: &CudaDevice, slopes: &Arc<[f64]>) -> Result<Arc<CudaSlice<f32>>> {
    kept(&SLOPES, device, (device.id(), slopes.clone()), || {
        let log2 = slopes.iter().map(|slope| launch::log2_slope(*slope));
        upload(device, &log2.collect::<Vec<_>>())
    })
}

static WIDE_SLOPES: Recent<(DeviceId, Arc<[f64]>), CudaSlice<f64>, 16> = Recent::new();

/// Slopes as they are.
pub(super) fn slopes(device: &CudaDevice, slopes: &Arc<[f64]>) -> Result<Arc<CudaSlice<f64>>> {
    kept(&WIDE_SLOPES, device, (device.id(), slopes.clone()), || {
        upload(device, slopes)
    })
}
