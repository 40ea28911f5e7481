//! Tensors in the host's memory, as kernels read them.

use crate::attend::cpu::Real;
use candle_core::{bail, CpuStorage, Layout, Result, Storage, Tensor, WithDType};
use half::{bf16, f16};
use rayon::prelude::*;
use std::ops::Deref;

/// A dtype that kernels take, and the one they accumulate in.
pub(crate) trait Element: WithDType {
    /// f32, or f64 for f64.
    type Acc: Real;
    fn to_acc(self) -> Self::Acc;
    fn from_acc(acc: Self::Acc) -> Self;
    /// [`Self::from_acc`] of all, and what they were where the dtypes differ; no copy where they do not.
    fn from_acc_vec(acc: Vec<Self::Acc>) -> (Vec<Self>, Option<Vec<Self::Acc>>);
}

macro_rules! element {
    ($t:ty, $acc:ty, $to:expr, $from:expr, $from_vec:expr) => {
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
            fn from_acc_vec(acc: Vec<$acc>) -> (Vec<Self>, Option<Vec<$acc>>) {
                $from_vec(acc)
            }
        }
    };
}

fn round_all<T: Element>(acc: Vec<T::Acc>) -> (Vec<T>, Option<Vec<T::Acc>>) {
    const TASK: usize = 1 << 14;
    let mut rounded = vec![T::zero(); acc.len()];
    let round = |(rounded, acc): (&mut [T], &[T::Acc])| {
        for (to, x) in rounded.iter_mut().zip(acc) {
            *to = T::from_acc(*x);
        }
    };
    if acc.len() <= TASK {
        round((&mut rounded, &acc));
    } else {
        let tasks = rounded.par_chunks_mut(TASK).zip(acc.par_chunks(TASK));
        tasks.for_each(round);
    }
    (rounded, Some(acc))
}

element!(f32, f32, |x| x, |x| x, |x| (x, None));
element!(f64, f64, |x| x, |x| x, |x| (x, None));
element!(bf16, f32, bf16::to_f32, bf16::from_f32, round_all);
element!(f16, f32, f16::to_f32, f16::from_f32, round_all);

/// A strided operand on the host.
#[derive(Clone, Copy)]
pub(crate) struct View<'a, T> {
    /// From the first element on.
    pub data: &'a [T],
    pub dims: [usize; 4],
    pub strides: [usize; 4],
}

impl<'a, T> View<'a, T> {
    pub fn new(data: &'a [T], layout: &Layout) -> Result<Self> {
        match (layout.dims().try_into(), layout.stride().try_into()) {
            (Ok(dims), Ok(strides)) => Ok(Self {
                data: data.get(layout.start_offset()..).unwrap_or_default(),
                dims,
                strides,
            }),
            _ => bail!(
                "a kernel's operand must be (batch, heads, tokens, width), got {:?}",
                layout.shape()
            ),
        }
    }
}

/// The elements of a contiguous operand of any rank.
pub(crate) fn contiguous<'a, T: WithDType>(
    storage: &'a CpuStorage,
    layout: &Layout,
) -> Result<&'a [T]> {
    let range = layout.contiguous_offsets();
    let all = storage.as_slice::<T>()?;
    match range.and_then(|(start, end)| all.get(start..end)) {
        Some(elements) => Ok(elements),
        None => bail!("a kernel's operand is not contiguous: {layout:?}"),
    }
}

/// A tensor's memory, held while a kernel reads it.
pub(crate) struct OnHost<'a, Guard> {
    storage: Guard,
    layout: &'a Layout,
}

pub(crate) fn on_host(x: &Tensor) -> OnHost<'_, impl Deref<Target = Storage> + '_> {
    let (storage, layout) = x.storage_and_layout();
    OnHost { storage, layout }
}

impl<Guard: Deref<Target = Storage>> OnHost<'_, Guard> {
    /// The elements of a contiguous tensor of any rank.
    pub fn slice<T: WithDType>(&self) -> Result<&[T]> {
        match &*self.storage {
            Storage::Cpu(storage) => contiguous(storage, self.layout),
            _ => bail!("a kernel of the CPU was given a tensor on another device"),
        }
    }

    pub fn view<T: Element>(&self) -> Result<View<'_, T>> {
        match &*self.storage {
            Storage::Cpu(storage) => View::new(storage.as_slice::<T>()?, self.layout),
            _ => bail!("a kernel of the CPU was given a tensor on another device"),
        }
    }
}
