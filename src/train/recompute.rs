//! A training step's loss and gradients, with or without recomputing activations.
//!
//! Backpropagation needs what the forward pass computed. Kept, that is some twenty tensors a layer; with
//! [`Recompute::Blocks`] only each block's input is kept, and the block is run again when its gradient is due (Chen et
//! al., "Training deep nets with sublinear memory cost", arXiv 1604.06174v2, §4.1, with a layer for a segment). The
//! memory of one block is then all that is alive beside the inputs, for one forward pass more.
//!
//! A block's inputs and outputs are the stream x and, for encodings whose state changes from layer to layer, the
//! state's cosines and sines. Each stretch of the model is its own graph, which starts from leaves that hold the
//! inputs; from the upstream gradients G of its outputs Y, the gradient of Σ Y·G with regard to leaves and weights
//! continues the chain rule.

use super::loss::{mean_of, Targets};
use crate::encoding::{Ctx, PosState};
use crate::model::{Llama, Stream};
use crate::positions::Positions;
use crate::rotate::Rotation;
use candle_core::backprop::GradStore;
use candle_core::{bail, DType, Result, Tensor, Var};
use serde::{Deserialize, Serialize};

/// What the backward pass computes again instead of keeping it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Nothing: every activation of the model is kept.
    #[default]
    Nothing,
    /// Each block from its input: the activations of one block are alive at a time, for up to a third more time.
    Blocks,
}

/// The mean cross-entropy of `targets` and the gradients of all the model's variables.
///
/// Both ways of [`Recompute`] give the same loss, and the same gradients but for the order in which the uses of a
/// weight that is used more than once are added up. What the encoding draws from [`Ctx::rng`] is drawn once. Encodings
/// must compute the same when a hook is called again; all of this crate do.
///
/// The store holds the gradients of variables only, without the graph that they came from. Weights that are no
/// variables are constants; a weight computed from variables (a dtype conversion, a merge) passes its gradient on to
/// them.
///
/// # Shapes
/// tokens (B, T), targets (B, T), `u32` or `i64`; a negative target is left out, as in
/// [`token_losses`](super::token_losses). The loss is a scalar, f32 (f64 for a model of f64).
///
/// # On a GPU
/// Tokens and targets are best on the CPU, where both are looked at: reading them from a GPU waits for all that was
/// launched. Positions that are spans then ask for no waiting either. Explicit ones do where their tensors are new: those
/// on a GPU are read to the host, and the lists that attention makes of them are uploaded and waited for, once for a pair
/// of tensors as long as these are among the few used last. So it is with tables that a first step makes. And all
/// uploads, of token and target ids too, are from pageable memory, for which the driver may wait at its discretion.
///
/// Memory that a step has freed stays with the process, for its next step: the first step on a GPU raises the release
/// threshold of its default memory pool, which is the whole process's, if that is still the driver's default of 0. A
/// threshold that the program has chosen is left alone, before and after.
///
/// # Errors
/// When the model cannot run, the targets do not fit, none of them counts, or no weight of the model is a variable.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_posenc::train::{loss_and_gradients, Recompute};
/// use candle_posenc::{Ctx, Llama, LlamaConfig, Positions, SeededVars};
/// # fn main() -> candle_core::Result<()> {
/// let vars = SeededVars::new(0);
/// let model = Llama::new(&LlamaConfig::default(), vars.builder(DType::F32, &Device::Cpu))?;
/// let text = Tensor::new(&[[3i64, 1, 4, 1, 5, 9]], &Device::Cpu)?;
/// let (tokens, targets) = (text.narrow(1, 0, 5)?, text.narrow(1, 1, 5)?);
/// let (loss, gradients) = loss_and_gradients(
///     &model,
///     &tokens,
///     &targets,
///     &Positions::first(5),
///     &mut Ctx { train: true, ..Ctx::default() },
///     Recompute::Blocks,
/// )?;
/// assert!(loss.to_scalar::<f32>()? > 5.);
/// assert!(vars.vars().iter().all(|var| gradients.get(var).is_some()));
/// # Ok(())
/// # }
/// ```
pub fn loss_and_gradients(
    model: &Llama,
    tokens: &Tensor,
    targets: &Tensor,
    positions: &Positions,
    ctx: &mut Ctx,
    recompute: Recompute,
) -> Result<(Tensor, GradStore)> {
    let targets = Targets::read(targets, model.config().vocab_size)?;
    targets.check_some_count()?;
    let (b, t) = targets.shape();
    if tokens.dims() != [b, t] {
        bail!(
            "loss: tokens are {:?}, but targets {:?}",
            tokens.dims(),
            [b, t]
        )
    }
    #[cfg(feature = "cuda")]
    if let candle_core::Device::Cuda(device) = model.head().device() {
        crate::gpu::keep_freed(device);
    }
    match recompute {
        Recompute::Nothing => {
            let hidden = model.hidden_at(tokens, positions, None, ctx)?;
            let loss = mean_of(&hidden, model.head(), &targets)?;
            check_trained(&loss)?;
            let mut gradients = GradStore::default();
            backward(&loss, &[], &mut gradients)?;
            Ok((loss.detach(), gradients))
        }
        Recompute::Blocks => {
            let begun = model.begin(tokens, positions, ctx)?;
            through_blocks(model, &targets, begun)
        }
    }
}

/// The loss and gradients behind [`Llama::begin`], a block at a time.
fn through_blocks(model: &Llama, targets: &Targets, begun: Stream) -> Result<(Tensor, GradStore)> {
    let last = model.config().num_hidden_layers.saturating_sub(1);
    let mut inputs = Vec::with_capacity(last);
    let mut stream = with_leaves(&begun)?;
    for layer in 0..last {
        let next = with_leaves(&model.block(layer, stream.clone(), None)?)?;
        inputs.push(std::mem::replace(&mut stream, next));
    }

    // The last block's gradient is due at once, so its activations are kept.
    let mut gradients = GradStore::default();
    let output = model.block(last, stream.clone(), None)?;
    let loss = mean_of(&model.finish(&output)?, model.head(), targets)?;
    check_trained(&loss)?;
    drop(output);
    let mut upstream = backward(&loss, &parts(&stream), &mut gradients)?;
    let loss = loss.detach();
    drop(stream);

    while let Some(input) = inputs.pop() {
        if upstream.iter().all(Option::is_none) {
            return Ok((loss, gradients));
        }
        let output = model.block(inputs.len(), input.clone(), None)?;
        upstream = pull_back(&output, &upstream, &parts(&input), &mut gradients)?;
    }
    pull_back(&begun, &upstream, &[], &mut gradients)?;
    Ok((loss, gradients))
}

/// x and, where the state turns heads, its cosines and sines.
fn parts(stream: &Stream) -> Vec<&Tensor> {
    let rotation = stream.state.rotation.iter();
    let rotation = rotation.flat_map(|Rotation { cos, sin }| [cos, sin]);
    std::iter::once(&stream.x).chain(rotation).collect()
}

/// The stream cut from its graph: leaves in place of tensors that a gradient flows to.
fn with_leaves(stream: &Stream) -> Result<Stream> {
    let leaf = |x: &Tensor| -> Result<Tensor> {
        match x.track_op() {
            true => Ok(Var::from_tensor(x)?.into_inner()),
            false => Ok(x.clone()),
        }
    };
    let rotation = match &stream.state.rotation {
        Some(Rotation { cos, sin }) => Some(Rotation {
            cos: leaf(cos)?,
            sin: leaf(sin)?,
        }),
        None => None,
    };
    Ok(Stream {
        x: leaf(&stream.x)?,
        state: PosState {
            positions: stream.state.positions.clone(),
            rotation,
        },
    })
}

/// From the gradients of a stretch's outputs to those of its leaves, which are returned, and of its variables, which
/// are added to `gradients`.
fn pull_back(
    output: &Stream,
    upstream: &[Option<Tensor>],
    leaves: &[&Tensor],
    gradients: &mut GradStore,
) -> Result<Vec<Option<Tensor>>> {
    let mut surrogate: Option<Tensor> = None; // Σ Y·G
    for (y, g) in parts(output).into_iter().zip(upstream) {
        let Some(g) = g.as_ref().filter(|_| y.track_op()) else {
            continue;
        };
        // The sum's value is of no use; only a factor of 1 flows back through it.
        let product = (y * g)?.sum_all()?.to_dtype(DType::F32)?;
        surrogate = Some(match surrogate {
            Some(sum) => (sum + product)?,
            None => product,
        });
    }
    match surrogate {
        Some(surrogate) => backward(&surrogate, leaves, gradients),
        None => Ok(vec![None; leaves.len()]),
    }
}

/// Gradients of `root` with regard to `leaves`, which are returned, and to all other variables below it, which are
/// added to `gradients`. They are detached: a gradient as candle leaves it holds the graph of its own computation, and
/// with it every activation.
fn backward(
    root: &Tensor,
    leaves: &[&Tensor],
    gradients: &mut GradStore,
) -> Result<Vec<Option<Tensor>>> {
    let mut found = root.backward()?;
    let mut of_leaves = Vec::with_capacity(leaves.len());
    for leaf in leaves {
        let gradient = leaf.is_variable().then(|| found.remove(leaf)).flatten();
        of_leaves.push(gradient.map(|gradient| gradient.detach()));
    }
    for variable in root.sorted_nodes() {
        if !variable.is_variable() {
            continue;
        }
        if let Some(gradient) = found.remove(variable) {
            let sum = match gradients.remove(variable) {
                Some(sum) => (sum + gradient)?,
                None => gradient,
            };
            gradients.insert(variable, sum.detach());
        }
    }
    Ok(of_leaves)
}

fn check_trained(loss: &Tensor) -> Result<()> {
    if !loss.track_op() {
        bail!("loss: no weight of the model is a variable, so there is nothing to train")
    }
    Ok(())
}
