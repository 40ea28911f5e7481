//! TAPE's state on NVIDIA GPUs, by `kernels/tape.cu`: packed behind the values, and updated after a layer.
#![allow(unsafe_code)]

use super::launch::{
    count, entry, launch_elements, GateCall, NormCall, PackSizes, UpdateCall, UpdateSizes,
};
use crate::gpu::{dispatch, launch, on_gpu, GpuElement, Held, Output, Placed};
use candle_core::backend::BackendStorage;
use candle_core::{
    bail, CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, Result, Shape,
    Tensor, WithDType,
};

fn elsewhere(name: &str) -> Result<(CpuStorage, Shape)> {
    bail!("{name}: only for NVIDIA GPUs")
}

/// Neighbours along the last dimension side by side.
fn with_unit_stride(x: &Tensor) -> Result<Tensor> {
    match (x.dims().last(), x.stride().last()) {
        (Some(1), _) | (_, Some(1)) => Ok(x.clone()),
        _ => x.contiguous(),
    }
}

// ---- [v | re | im] ----

fn pack_sizes(v: &Layout, state: &Layout) -> Result<PackSizes> {
    let (b, g, t, width) = v.shape().dims4()?;
    let (_, _, _, pairs) = state.shape().dims4()?;
    Ok(PackSizes {
        tokens: [b, g, t],
        width,
        pairs,
    })
}

/// Whether the kernel takes these.
pub(in crate::encoding) fn packs(v: &Tensor, state: &Tensor) -> Result<bool> {
    Ok(v.device().is_cuda() && pack_sizes(v.layout(), state.layout())?.fit())
}

/// \[v | re | im\] in v's dtype.
pub(in crate::encoding) fn pack(
    [v, re, im]: [(&CudaStorage, &Layout); 3],
) -> Result<(CudaStorage, Shape)> {
    fn pack_as<T: GpuElement>([v, re, im]: [Placed<'_>; 3]) -> Result<Output<T>>
    where
        T::Acc: GpuElement,
    {
        let sizes = pack_sizes(v.layout, re.layout)?;
        let [b, g, t] = sizes.tokens;
        // SAFETY: the kernel writes every element.
        let mut out = unsafe { Output::unwritten(v.device(), (b, g, t, sizes.row()))? };
        if sizes.is_empty() {
            return Ok(out);
        }
        let stream = v.device().cuda_stream();
        let mut held = Held::on(&stream);
        let mut call = sizes.call()?;
        call.v = v.strided::<T>(&mut held)?;
        call.re = re.strided::<T::Acc>(&mut held)?;
        call.im = im.strided::<T::Acc>(&mut held)?;
        call.out = out.write(&mut held);
        let run = sizes.run(&[call.v], &[call.re, call.im], T::DTYPE);
        let name = entry("pack", T::DTYPE, run);
        // SAFETY: candle checked the operands' extents, which are those of the call; the result is as long as it says.
        unsafe { launch(&stream, &name, sizes.launch(run)?, &call)? };
        drop(held);
        Ok(out)
    }
    let dtype = v.0.dtype();
    let operands = [v, re, im].map(Placed::new);
    dispatch!(dtype, "tape", T => Ok(pack_as::<T>(operands)?.into_storage()))
}

/// The gradients of v, re and im, where they are tracked.
pub(in crate::encoding) fn unpack(
    [v, re, im, grad]: [&Tensor; 4],
) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
    fn unpack_as<T: GpuElement>(
        [v, re, im, grad]: [&Tensor; 4],
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)>
    where
        T::Acc: GpuElement,
    {
        let sizes = pack_sizes(v.layout(), re.layout())?;
        let grad = on_gpu(grad);
        let grad = grad.placed()?;
        let state = |x: &Tensor| {
            // SAFETY: the kernel writes every element.
            let memory =
                || unsafe { Output::<T::Acc>::unwritten(grad.device(), x.shape().clone()) };
            x.track_op().then(memory).transpose()
        };
        // SAFETY: as above.
        let values = || unsafe { Output::<T>::unwritten(grad.device(), v.shape().clone()) };
        let mut dv = v.track_op().then(values).transpose()?;
        let (mut dre, mut dim) = (state(re)?, state(im)?);
        if !sizes.is_empty() {
            let stream = grad.device().cuda_stream();
            let mut held = Held::on(&stream);
            let mut call = sizes.call()?;
            call.packed = grad.strided::<T>(&mut held)?;
            call.out = dv.as_mut().map_or(0, |dv| dv.write(&mut held));
            call.dre = dre.as_mut().map_or(0, |dre| dre.write(&mut held));
            call.dim = dim.as_mut().map_or(0, |dim| dim.write(&mut held));
            let run = sizes.run(&[call.packed], &[], T::DTYPE);
            let name = entry("unpack", T::DTYPE, run);
            // SAFETY: as in `pack`; the results are as long as what they are gradients of.
            unsafe { launch(&stream, &name, sizes.launch(run)?, &call)? };
        }
        let tensor = |x: Option<Output<T::Acc>>| x.map(Output::into_tensor);
        Ok((dv.map(Output::into_tensor), tensor(dre), tensor(dim)))
    }
    dispatch!(v.dtype(), "tape", T => unpack_as::<T>([v, re, im, grad]))
}

// ---- update ----

/// One part, real or imaginary, of every state after both updates; the parts go through them alike.
#[derive(Debug, Clone, Copy)]
pub(super) struct UpdatePart {
    pub imaginary: bool,
    /// Whether only the diagonal of W counts.
    pub diagonal: bool,
    /// Whether tokens have matrices.
    pub has_matrices: bool,
}

impl UpdatePart {
    /// Whether the kernels take states of so many heads and pairs.
    pub fn takes(&self, state: &Tensor, takes_over: bool) -> Result<bool> {
        let sizes = self.sizes(state.layout(), None, state.dtype())?;
        let sizes = UpdateSizes {
            takes_over,
            ..sizes
        };
        Ok(sizes.divide(true).is_some())
    }

    /// part (B,G,T,P), carried (B,H,T,2P), matrices (BT, G·G) where tokens have them, then W as one more row where
    /// there is `carried` → (B,G,T,P).
    pub fn apply(
        &self,
        part: &Tensor,
        carried: Option<&Tensor>,
        matrices: &Tensor,
    ) -> Result<Tensor> {
        let part = &with_unit_stride(part)?;
        // From the start of its memory, so that its rows are aligned.
        let matrices = &match matrices.layout().contiguous_offsets() {
            Some((0, _)) => matrices.clone(),
            _ => matrices.force_contiguous()?,
        };
        let tracked = part.track_op() || matrices.track_op();
        match carried {
            Some(carried) => {
                let carried = &with_unit_stride(carried)?;
                match tracked || carried.track_op() {
                    true => part.apply_op3(carried, matrices, *self),
                    false => part.apply_op3_no_bwd(carried, matrices, self),
                }
            }
            None if tracked => part.apply_op2(matrices, *self),
            None => part.apply_op2_no_bwd(matrices, self),
        }
    }

    fn sizes(&self, part: &Layout, carried: Option<&Layout>, state: DType) -> Result<UpdateSizes> {
        let (batch, heads, len, pairs) = part.shape().dims4()?;
        let group = match carried {
            Some(carried) => carried.shape().dims4()?.1 / heads.max(1),
            None => 1,
        };
        Ok(UpdateSizes {
            batch,
            heads,
            group,
            len,
            pairs,
            takes_over: carried.is_some(),
            diagonal: self.diagonal,
            has_matrices: self.has_matrices,
            bytes: state.size_in_bytes(),
        })
    }

    fn forward<T: GpuElement>(
        &self,
        part: Placed<'_>,
        carried: Option<Placed<'_>>,
        matrices: Placed<'_>,
    ) -> Result<(CudaStorage, Shape)>
    where
        T::Acc: GpuElement,
    {
        let job = Job::<T>::new(self, part, carried, matrices)?;
        // SAFETY: the kernel writes every element.
        let mut out =
            unsafe { Output::<T::Acc>::unwritten(part.device(), part.layout.shape().clone())? };
        if job.sizes.is_empty() {
            return Ok(out.into_storage());
        }
        let division = job.divide(false)?;
        let stream = part.device().cuda_stream();
        let mut held = Held::on(&stream);
        let mut call = job.call(&division, &mut held)?;
        call.out = out.write(&mut held);
        call.runs = job.sizes.has_runs(&call, size_of::<T>()).into();
        let shape = job.sizes.launch(&division)?;
        // SAFETY: candle checked the operands' extents, which are those of the call; `Job::new` checked how many matrices
        // there are; the result is as long as the call says.
        unsafe { launch(&stream, &entry("update", T::DTYPE, 1), shape, &call)? };
        drop(held);
        Ok(out.into_storage())
    }

    /// Gradients of part, carried and matrices, where they are tracked.
    fn backward<T: GpuElement>(
        &self,
        part: &Tensor,
        carried: Option<&Tensor>,
        matrices: &Tensor,
        grad: &Tensor,
    ) -> Result<[Option<Tensor>; 3]>
    where
        T::Acc: GpuElement,
    {
        let grad = with_unit_stride(grad)?;
        let asked = [part, matrices].map(|x| x.track_op());
        let carried_asked = carried.is_some_and(|x| x.track_op());
        let (part_held, grad_held, matrices_held) = (on_gpu(part), on_gpu(&grad), on_gpu(matrices));
        let carried_held = carried.map(on_gpu);
        let carried_placed = carried_held.as_ref().map(|x| x.placed()).transpose()?;
        let job = Job::<T>::new(
            self,
            part_held.placed()?,
            carried_placed,
            matrices_held.placed()?,
        )?;
        let device = job.part.device();
        let state = |like: &Tensor| {
            // SAFETY: the kernels write every element.
            unsafe { Output::<T::Acc>::unwritten(device, like.shape().clone()) }
        };
        // Without matrices this is the gradient that came in.
        let mut dpart = (asked[0] && self.has_matrices)
            .then(|| state(part))
            .transpose()?;
        let mut dmatrices = match (asked[1], job.sizes.is_empty()) {
            (false, _) => None,
            (true, false) => Some(state(matrices)?),
            (true, true) => Some(Output::zeros(device, matrices.shape().clone())?),
        };
        let mut dcarried = match carried {
            // SAFETY: as above.
            Some(x) if carried_asked => {
                Some(unsafe { Output::<T>::unwritten(device, x.shape().clone())? })
            }
            _ => None,
        };
        if !job.sizes.is_empty() && (dpart.is_some() || dmatrices.is_some() || dcarried.is_some()) {
            let division = job.divide(true)?;
            let with_sums = dmatrices.is_some() && job.sizes.takes_over;
            // SAFETY: the first kernel writes every element that the second reads.
            let memory =
                || unsafe { device.alloc::<T::Acc>(division.blocks * job.sizes.weights()) };
            let mut sums = with_sums.then(memory).transpose()?;
            let stream = device.cuda_stream();
            let mut held = Held::on(&stream);
            let mut call = job.call(&division, &mut held)?;
            call.grad = grad_held.placed()?.strided::<T::Acc>(&mut held)?;
            call.out = dpart.as_mut().map_or(0, |x| x.write(&mut held));
            call.dcarried = dcarried.as_mut().map_or(0, |x| x.write(&mut held));
            call.dmatrices = dmatrices.as_mut().map_or(0, |x| x.write(&mut held));
            call.sums = sums.as_mut().map_or(0, |x| held.write(x));
            call.runs = job.sizes.has_runs(&call, size_of::<T>()).into();
            let shape = job.sizes.launch(&division)?;
            let name = entry("update_gradient", T::DTYPE, 1);
            // SAFETY: as in `forward`; the results are as long as what they are gradients of, the sums as the blocks
            // and weights are many.
            unsafe { launch(&stream, &name, shape, &call)? };
            if with_sums {
                let name = entry("sums", T::Acc::DTYPE, 1);
                // SAFETY: as above.
                unsafe { launch(&stream, &name, job.sizes.launch_sums()?, &call)? };
            }
        }
        let dpart = match (asked[0], dpart) {
            (true, None) => Some(grad.clone()),
            (_, dpart) => dpart.map(Output::into_tensor),
        };
        Ok([
            dpart,
            dcarried.map(Output::into_tensor),
            dmatrices.map(Output::into_tensor),
        ])
    }
}

/// One update over memory that is there already. `T` is the dtype of what was carried, `T::Acc` the state's.
struct Job<'a, T> {
    sizes: UpdateSizes,
    imaginary: bool,
    part: Placed<'a>,
    carried: Option<Placed<'a>>,
    matrices: Placed<'a>,
    carried_dtype: std::marker::PhantomData<T>,
}

impl<'a, T: GpuElement> Job<'a, T>
where
    T::Acc: GpuElement,
{
    fn new(
        op: &UpdatePart,
        part: Placed<'a>,
        carried: Option<Placed<'a>>,
        matrices: Placed<'a>,
    ) -> Result<Self> {
        let carried_layout = carried.map(|x| x.layout);
        let sizes = op.sizes(part.layout, carried_layout, T::Acc::DTYPE)?;
        let rows = usize::from(sizes.has_matrices) * sizes.batch * sizes.len
            + usize::from(sizes.takes_over);
        let square = sizes.heads * sizes.heads;
        let carried_fits = carried_layout.is_none_or(|x| {
            x.dims()
                == [
                    sizes.batch,
                    sizes.heads * sizes.group,
                    sizes.len,
                    2 * sizes.pairs,
                ]
        });
        let whole = matrices.layout.is_contiguous() && matrices.layout.start_offset() == 0;
        if matrices.layout.dims() != [rows, square] || !carried_fits || !whole {
            bail!(
                "tape: an update of states {:?} needs matrices {:?} and averages of twice the width, got {:?} and {:?}",
                part.layout.shape(),
                [rows, square],
                matrices.layout,
                carried_layout
            )
        }
        Ok(Self {
            sizes,
            imaginary: op.imaginary,
            part,
            carried,
            matrices,
            carried_dtype: std::marker::PhantomData,
        })
    }

    fn divide(&self, backward: bool) -> Result<super::launch::Division> {
        match self.sizes.divide(backward) {
            Some(division) => Ok(division),
            None => bail!(
                "tape: {} heads are too many for a GPU's shared memory",
                self.sizes.heads
            ),
        }
    }

    fn call(&self, division: &super::launch::Division, held: &mut Held<'a>) -> Result<UpdateCall> {
        let mut call = self.sizes.call(division, self.imaginary)?;
        call.part = self.part.strided::<T::Acc>(held)?;
        if let Some(carried) = self.carried {
            call.carried = carried.strided::<T>(held)?;
        }
        call.matrices = held.read(self.matrices.storage.as_cuda_slice::<T::Acc>()?);
        Ok(call)
    }
}

impl CustomOp3 for UpdatePart {
    fn name(&self) -> &'static str {
        "tape-update"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        elsewhere(CustomOp3::name(self))
    }

    fn cuda_fwd(
        &self,
        part: &CudaStorage,
        part_layout: &Layout,
        carried: &CudaStorage,
        carried_layout: &Layout,
        matrices: &CudaStorage,
        matrices_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let dtype = carried.dtype();
        let part = Placed::new((part, part_layout));
        let carried = Some(Placed::new((carried, carried_layout)));
        let matrices = Placed::new((matrices, matrices_layout));
        dispatch!(dtype, "tape", T => self.forward::<T>(part, carried, matrices))
    }

    fn bwd(
        &self,
        part: &Tensor,
        carried: &Tensor,
        matrices: &Tensor,
        _out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dpart, dcarried, dmatrices] = dispatch!(carried.dtype(), "tape", T => {
            self.backward::<T>(part, Some(carried), matrices, grad)?
        });
        Ok((dpart, dcarried, dmatrices))
    }
}

impl CustomOp2 for UpdatePart {
    fn name(&self) -> &'static str {
        "tape-token-update"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        elsewhere(CustomOp2::name(self))
    }

    fn cuda_fwd(
        &self,
        part: &CudaStorage,
        part_layout: &Layout,
        matrices: &CudaStorage,
        matrices_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let dtype = part.dtype();
        let part = Placed::new((part, part_layout));
        let matrices = Placed::new((matrices, matrices_layout));
        dispatch!(dtype, "tape", T => self.forward::<T>(part, None, matrices))
    }

    fn bwd(
        &self,
        part: &Tensor,
        matrices: &Tensor,
        _out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [dpart, _, dmatrices] = dispatch!(part.dtype(), "tape", T => {
            self.backward::<T>(part, None, matrices, grad)?
        });
        Ok((dpart, dmatrices))
    }
}

// ---- modulus ----

/// One part of every state, stretched to one modulus.
#[derive(Debug, Clone, Copy)]
struct Normalize {
    imaginary: bool,
    modulus: f64,
}

/// The real or imaginary parts of states that are stretched to one modulus.
pub(super) fn with_modulus(
    modulus: f64,
    imaginary: bool,
    re: &Tensor,
    im: &Tensor,
) -> Result<Tensor> {
    let op = Normalize { imaginary, modulus };
    let (re, im) = (re.contiguous()?, im.contiguous()?);
    match re.track_op() || im.track_op() {
        true => re.apply_op2(&im, op),
        false => re.apply_op2_no_bwd(&im, &op),
    }
}

/// The address of a tensor without gaps.
fn address<'a, T: GpuElement>(x: Placed<'a>, held: &mut Held<'a>) -> Result<u64> {
    let first = x.layout.start_offset() * size_of::<T>();
    Ok(held.read(x.storage.as_cuda_slice::<T>()?) + first as u64)
}

/// Elements in a run of 16 bytes where all addresses and the length allow that, else 1.
fn run_of<T>(addresses: &[u64], len: usize) -> usize {
    let run = crate::gpu::RUN_BYTES / size_of::<T>();
    let aligned = addresses
        .iter()
        .all(|x| x.is_multiple_of(crate::gpu::RUN_BYTES as u64));
    if aligned && len.is_multiple_of(run) {
        run
    } else {
        1
    }
}

impl Normalize {
    fn forward<T: GpuElement>(&self, [re, im]: [Placed<'_>; 2]) -> Result<(CudaStorage, Shape)> {
        let shape = re.layout.shape().clone();
        let len = shape.elem_count();
        // SAFETY: the kernel writes every element.
        let mut out = unsafe { Output::<T>::unwritten(re.device(), shape)? };
        if len > 0 {
            let stream = re.device().cuda_stream();
            let mut held = Held::on(&stream);
            let call = NormCall {
                re: address::<T>(re, &mut held)?,
                im: address::<T>(im, &mut held)?,
                out: out.write(&mut held),
                len: len as i64,
                modulus: self.modulus,
                imaginary: self.imaginary.into(),
                ..NormCall::default()
            };
            let run = run_of::<T>(&[call.re, call.im], len);
            let name = entry("normalize", T::DTYPE, run);
            // SAFETY: all three are `len` long and without gaps.
            unsafe { launch(&stream, &name, launch_elements(len, run)?, &call)? };
        }
        Ok(out.into_storage())
    }

    fn backward<T: GpuElement>(
        &self,
        [re, im, grad]: [&Tensor; 3],
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        let len = grad.elem_count();
        let (re_held, im_held, grad_held) = (on_gpu(re), on_gpu(im), on_gpu(&grad));
        let grad = grad_held.placed()?;
        let memory = |x: &Tensor| {
            // SAFETY: the kernel writes every element.
            let memory = || unsafe { Output::<T>::unwritten(grad.device(), x.shape().clone()) };
            x.track_op().then(memory).transpose()
        };
        let (mut dre, mut dim) = (memory(re)?, memory(im)?);
        if len > 0 {
            let stream = grad.device().cuda_stream();
            let mut held = Held::on(&stream);
            let call = NormCall {
                re: address::<T>(re_held.placed()?, &mut held)?,
                im: address::<T>(im_held.placed()?, &mut held)?,
                grad: address::<T>(grad, &mut held)?,
                out: dre.as_mut().map_or(0, |x| x.write(&mut held)),
                dim: dim.as_mut().map_or(0, |x| x.write(&mut held)),
                len: len as i64,
                modulus: self.modulus,
                imaginary: self.imaginary.into(),
                reserved: 0,
            };
            let run = run_of::<T>(&[call.re, call.im, call.grad], len);
            let name = entry("normalize_gradient", T::DTYPE, run);
            // SAFETY: as in `forward`.
            unsafe { launch(&stream, &name, launch_elements(len, run)?, &call)? };
        }
        Ok((dre.map(Output::into_tensor), dim.map(Output::into_tensor)))
    }
}

impl CustomOp2 for Normalize {
    fn name(&self) -> &'static str {
        "tape-normalize"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        elsewhere(self.name())
    }

    fn cuda_fwd(
        &self,
        re: &CudaStorage,
        re_layout: &Layout,
        im: &CudaStorage,
        im_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let dtype = re.dtype();
        let parts = [(re, re_layout), (im, im_layout)].map(Placed::new);
        match dtype {
            DType::F64 => self.forward::<f64>(parts),
            _ => self.forward::<f32>(parts),
        }
    }

    fn bwd(
        &self,
        re: &Tensor,
        im: &Tensor,
        _out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        match re.dtype() {
            DType::F64 => self.backward::<f64>([re, im, grad]),
            _ => self.backward::<f32>([re, im, grad]),
        }
    }
}

// ---- gate ----

/// SiLU in the state's dtype.
#[derive(Debug, Clone, Copy)]
struct Gate {
    padded: usize,
    extended: bool,
}

/// SiLU(x) in f32, or f64 for an x of f64: (N,S) → (N, padded), zeros beyond S. Where it is `extended`, one more row
/// and column meet in a 1 and are zero elsewhere: (N + 1, padded), padded at least S + 1.
pub(super) fn gate(x: &Tensor, padded: usize, extended: bool) -> Result<Tensor> {
    let (_, size) = x.dims2()?;
    if padded < size + usize::from(extended) {
        bail!("tape: a gate of {size} does not fit {padded} columns")
    }
    let op = Gate { padded, extended };
    let x = x.contiguous()?;
    match x.track_op() {
        true => x.apply_op1(op),
        false => x.apply_op1_no_bwd(&op),
    }
}

impl Gate {
    fn call(&self, layout: &Layout) -> Result<(GateCall, [usize; 2])> {
        let (rows, size) = layout.shape().dims2()?;
        let shape = [rows + usize::from(self.extended), self.padded];
        count(shape[0].saturating_mul(shape[1]))?;
        let call = GateCall {
            rows: count(rows)?,
            size: count(size)?,
            padded: count(self.padded)?,
            extended: self.extended.into(),
            ..GateCall::default()
        };
        Ok((call, shape))
    }

    fn forward<T: GpuElement>(&self, x: Placed<'_>) -> Result<(CudaStorage, Shape)>
    where
        T::Acc: GpuElement,
    {
        let (mut call, [rows, columns]) = self.call(x.layout)?;
        // SAFETY: the kernel writes every element.
        let mut out = unsafe { Output::<T::Acc>::unwritten(x.device(), (rows, columns))? };
        if rows * columns > 0 {
            let stream = x.device().cuda_stream();
            let mut held = Held::on(&stream);
            call.x = address::<T>(x, &mut held)?;
            call.out = out.write(&mut held);
            let shape = launch_elements(rows * columns, 1)?;
            // SAFETY: both are as long as the call says, and without gaps.
            unsafe { launch(&stream, &entry("gate", T::DTYPE, 1), shape, &call)? };
        }
        Ok(out.into_storage())
    }

    fn backward<T: GpuElement>(&self, x: &Tensor, grad: &Tensor) -> Result<Option<Tensor>>
    where
        T::Acc: GpuElement,
    {
        let grad = grad.contiguous()?;
        let (x_held, grad_held) = (on_gpu(x), on_gpu(&grad));
        let placed = x_held.placed()?;
        let (mut call, _) = self.call(placed.layout)?;
        // SAFETY: the kernel writes every element.
        let mut dx = unsafe { Output::<T>::unwritten(placed.device(), x.shape().clone())? };
        if x.elem_count() > 0 {
            let stream = placed.device().cuda_stream();
            let mut held = Held::on(&stream);
            call.x = address::<T>(placed, &mut held)?;
            call.grad = address::<T::Acc>(grad_held.placed()?, &mut held)?;
            call.out = dx.write(&mut held);
            let shape = launch_elements(x.elem_count(), 1)?;
            let name = entry("gate_gradient", T::DTYPE, 1);
            // SAFETY: as in `forward`.
            unsafe { launch(&stream, &name, shape, &call)? };
        }
        Ok(Some(dx.into_tensor()))
    }
}

impl CustomOp1 for Gate {
    fn name(&self) -> &'static str {
        "tape-gate"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        elsewhere(self.name())
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let dtype = x.dtype();
        dispatch!(dtype, "tape", T => self.forward::<T>(Placed::new((x, layout))))
    }

    fn bwd(&self, x: &Tensor, _out: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        dispatch!(x.dtype(), "tape", T => self.backward::<T>(x, grad))
    }
}
