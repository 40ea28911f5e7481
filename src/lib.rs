//! Attention with positional encodings that train.

pub mod attend;
pub mod encoding;
pub mod positions;
pub mod rotate;

pub use attend::{
    attend, attend_with_lse, plan, plan_problem, AttendOutput, AttendSpec, Backend, DeviceKind,
    Operand, Path, Plan, Precision, Problem, Score,
};
pub use encoding::{Ctx, Encoding, EncodingConfig, ModelDims, PosState, Qkv};
pub use positions::Positions;
pub use rotate::{convert_layout, rotate, Layout, Rotation};
