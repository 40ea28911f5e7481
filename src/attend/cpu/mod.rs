//! stub
use super::problem::{Dims, Resolved};
use candle_core::{bail, DType, Layout, Result, WithDType};
use half::{bf16, f16};

/// A dtype that attention takes, and the one it accumulates in.
pub(crate) trait Element: WithDType {
    /// f32, or f64 for f64.
    type Acc: Element;
    fn to_acc(self) -> Self::Acc;
    fn from_acc(acc: Self::Acc) -> Self;
}

macro_rules! element {
    ($t:ty, $acc:ty, $to:expr, $from:expr) => {
        impl Element for $t {
            type Acc = $acc;
            #[inline(always)]
            fn to_acc(self) -> $acc {
                $to(self)
            }
            #[inline(always)]
            fn from_acc(acc: $acc) -> Self {
                $from(acc)
            }
        }
    };
}
element!(f32, f32, |x| x, |x| x);
element!(f64, f64, |x| x, |x| x);
element!(bf16, f32, bf16::to_f32, bf16::from_f32);
element!(f16, f32, f16::to_f32, f16::from_f32);

/// A strided operand on the host.
#[derive(Clone, Copy)]
pub(crate) struct View<'a, T> {
    /// From the first element on.
    pub data: &'a [T],
    pub dims: [usize; 4],
    pub strides: [usize; 4],
}

/// The forward pass's output, as far as the backward pass can have it.
pub(crate) enum Output<'a, T: Element> {
    /// As it was returned.
    Rounded(View<'a, T>),
    /// Before it was rounded to half precision.
    Exact(View<'a, T::Acc>),
}
pub(crate) struct Forward<T: Element> {
    /// (B,H,T,E)
    pub out: Vec<T>,
    /// (B,H,T), natural logarithms
    pub lse: Vec<T::Acc>,
    /// (B,H,T,E), if saved and T is a half type
    pub exact_out: Option<Vec<T::Acc>>,
}
pub(crate) struct Gradients<T> {
    pub dq: Vec<T>,
    pub dk: Vec<T>,
    pub dv: Vec<T>,
}
impl<'a, T> View<'a, T> {
    pub fn new(data: &'a [T], layout: &Layout) -> Result<Self> {
        match (layout.dims().try_into(), layout.stride().try_into()) {
            (Ok(dims), Ok(strides)) => Ok(Self {
                data: &data[layout.start_offset()..],
                dims,
                strides,
            }),
            _ => bail!("attend: rank"),
        }
    }
}
pub(crate) fn kernel_name(_dtype: DType) -> &'static str {
    ""
}
pub(crate) fn forward_workspace_bytes(_dims: &Dims, _accumulate: DType) -> usize {
    0
}
pub(crate) fn forward<T: Element>(
    _call: &Resolved,
    _q: View<'_, T>,
    _k: View<'_, T>,
    _v: View<'_, T>,
    _save: bool,
) -> Result<Forward<T>> {
    bail!("todo")
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn backward<T: Element>(
    _call: &Resolved,
    _q: View<'_, T>,
    _k: View<'_, T>,
    _v: View<'_, T>,
    _out: Output<'_, T>,
    _grad: View<'_, T>,
    _lse: &[T::Acc],
) -> Result<Gradients<T>> {
    bail!("todo")
}
