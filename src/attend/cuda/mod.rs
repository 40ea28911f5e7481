//! The fused path on NVIDIA GPUs: what [`launch`](super::launch) decided is given to the kernels, on candle's stream.
//!
//! Everything launched is ordered by that stream: memory set aside for one call may be given back as soon as its
//! kernels are launched.

// Without the feature only the tests look at these.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(super) mod call;
#[cfg(feature = "cuda")]
mod forward;
#[cfg(feature = "cuda")]
mod module;
#[cfg(feature = "cuda")]
mod tables;
// The build script looks at the rest.
#[allow(dead_code)]
pub(super) mod tiles;
#[cfg(feature = "cuda")]
mod tokens;

/// What the kernels were compiled for; without the feature, what they are by default.
#[cfg(not(feature = "cuda"))]
pub(super) const IMAGES: &[super::launch::Image] =
    &[(true, 80, ""), (true, 90, ""), (false, 80, "")];
#[cfg(feature = "cuda")]
pub(super) use module::IMAGES;

#[cfg(feature = "cuda")]
pub(super) use forward::{compute_capability, forward, readable};
#[cfg(feature = "cuda")]
pub use module::{kernel_resources, KernelResources};
