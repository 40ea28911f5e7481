//! The fused path on NVIDIA GPUs: what [`launch`](super::launch) decided is given to the kernels, on candle's stream.

#[cfg(feature = "cuda")]
mod backward;
// Without the feature only the tests look at these.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(super) mod call;
#[cfg(feature = "cuda")]
mod forward;
#[cfg(feature = "cuda")]
mod job;
#[cfg(feature = "cuda")]
mod tables;
// The build script looks at the rest.
#[allow(dead_code)]
pub(super) mod tiles;
#[cfg(feature = "cuda")]
mod tokens;

#[cfg(feature = "cuda")]
pub(super) use backward::backward;
#[cfg(feature = "cuda")]
pub(super) use forward::{forward, readable, LeftRows, Wanted};
#[cfg(feature = "cuda")]
pub(super) use job::compute_capability;
