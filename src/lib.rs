//! Attention with positional encodings that train.

pub mod attend;
pub mod positions;

pub use attend::{
    attend, attend_with_lse, plan, plan_problem, AttendOutput, AttendSpec, Backend, DeviceKind,
    Operand, Path, Plan, Precision, Problem, Score,
};
pub use positions::Positions;
