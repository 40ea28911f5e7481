//! What attention returned, with heads side by side: [`join_heads`].

#[cfg(feature = "cuda")]
mod gpu;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod launch;

use candle_core::{Result, Tensor};

/// The first `width` columns of every head, heads side by side.
///
/// On NVIDIA GPUs one operation, whose gradient is one more: taken apart, narrowing alone costs the gradient's backward
/// pass four passes over memory.
///
/// # Shapes
/// (B, H, T, E) of any strides → (B, T, H·width), contiguous.
///
/// # Errors
/// When heads have fewer columns.
pub(crate) fn join_heads(x: &Tensor, width: usize) -> Result<Tensor> {
    let (b, h, t, all) = x.dims4()?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() && width <= all && launch::fit(b, h) {
        return gpu::join(x, width);
    }
    let own = match width == all {
        true => x.clone(),
        false => x.narrow(3, 0, width)?,
    };
    own.transpose(1, 2)?.reshape((b, t, h * width))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};

    #[test]
    fn joined_heads_are_columns_of_their_tokens() -> Result<()> {
        let x = Tensor::arange(0u32, 2 * 3 * 2 * 4, &Device::Cpu)?.reshape((2, 3, 2, 4))?;
        let joined = join_heads(&x, 3)?;
        assert_eq!(joined.dims(), [2, 2, 9]);
        let second_token = [4, 5, 6, 12, 13, 14, 20, 21, 22];
        assert_eq!(joined.to_vec3::<u32>()?[0][1], second_token);
        assert!(join_heads(&x, 5).is_err());
        Ok(())
    }

    #[test]
    fn gradient_of_joined_heads_is_zero_beyond_the_width() -> Result<()> {
        let x = Var::from_tensor(&Tensor::zeros(
            (1, 2, 2, 3),
            candle_core::DType::F32,
            &Device::Cpu,
        )?)?;
        let upstream = Tensor::arange(1f32, 9., &Device::Cpu)?.reshape((1, 2, 4))?;
        let gradients = (join_heads(&x, 2)? * upstream)?.sum_all()?.backward()?;
        let Some(gradient) = gradients.get(&x) else {
            candle_core::bail!("no gradient")
        };
        let expected = [1f32, 2., 0., 5., 6., 0., 3., 4., 0., 7., 8., 0.];
        assert_eq!(gradient.flatten_all()?.to_vec1::<f32>()?, expected);
        Ok(())
    }
}
