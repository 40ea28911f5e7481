//! Lists of positions and segments on the GPU, kept from call to call: every layer of a model asks for the same ones.

use super::call::TileBounds;
use crate::attend::placement::{Frame, List, ListKey};
use crate::gpu::{kept, upload};
use crate::positions::{PositionTable, TokenSource};
use crate::recent::Recent;
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::cuda_backend::DeviceId;
use candle_core::{CudaDevice, Result};
use std::sync::Arc;

/// A [`List`] on the GPU.
pub(super) struct DeviceList {
    pub tokens: CudaSlice<[i32; 2]>,
    pub tiles: CudaSlice<TileBounds>,
    pub row_stride: usize,
    pub tile_stride: usize,
}

impl DeviceList {
    fn new(device: &CudaDevice, list: &List) -> Result<Self> {
        Ok(Self {
            tokens: upload(device, &list.tokens)?,
            tiles: upload(device, &list.tiles)?,
            row_stride: list.row_stride(),
            tile_stride: list.tile_stride(),
        })
    }
}

// Of one call: queries and keys in tiles of the forward kernel and of both backward kernels.
static LISTS: Recent<(DeviceId, ListKey), DeviceList, 16> = Recent::new();

/// Tokens as the kernels on tensor cores read them, with bounds for each tile of `tile` tokens; `None` for a span.
pub(super) fn list(
    device: &CudaDevice,
    frame: &Frame,
    table: &PositionTable,
    tile: usize,
) -> Result<Option<Arc<DeviceList>>> {
    if frame.start(table).is_some() {
        return Ok(None);
    }
    let make = || DeviceList::new(device, &frame.list(table, tile));
    match frame.key(table, tile) {
        Some(key) => kept(&LISTS, device, (device.id(), key), make),
        None => make().map(Arc::new),
    }
    .map(Some)
}

/// Positions and segments of 64 bits on the GPU.
pub(super) struct WideList {
    pub positions: CudaSlice<i64>,
    pub segments: Option<CudaSlice<i64>>,
    pub row_stride: usize,
}

static WIDE_LISTS: Recent<(DeviceId, TokenSource), WideList, 8> = Recent::new();

/// Tokens as the kernel without tensor cores reads them; `None` for a span.
pub(super) fn wide_list(
    device: &CudaDevice,
    table: &PositionTable,
) -> Result<Option<Arc<WideList>>> {
    if table.span_start().is_some() {
        return Ok(None);
    }
    let make = || {
        let rows = 0..table.rows;
        let positions: Vec<i64> = rows.clone().flat_map(|b| table.row(b).to_vec()).collect();
        let segments: Option<Vec<i64>> = table.has_segments().then(|| {
            let segments = rows.flat_map(|b| table.segments(b).unwrap_or_default().to_vec());
            segments.collect()
        });
        Ok(WideList {
            positions: upload(device, &positions)?,
            segments: segments.map(|x| upload(device, &x)).transpose()?,
            row_stride: if table.rows == 1 { 0 } else { table.len },
        })
    };
    match table.source() {
        Some(source) => kept(&WIDE_LISTS, device, (device.id(), source), make),
        None => make().map(Arc::new),
    }
    .map(Some)
}
