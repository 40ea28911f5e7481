//! Attention with positional encodings that train.

pub mod attend;
pub mod attention;
pub mod cache;
pub mod encoding;
pub mod init;
pub mod model;
pub mod positions;
pub mod rotate;

pub use attend::{
    attend, attend_with_lse, plan, plan_problem, AttendOutput, AttendSpec, Backend, DeviceKind,
    Operand, Path, Plan, Precision, Problem, Score,
};
pub use attention::{Attended, Attention};
pub use cache::{CacheStep, KvCache};
pub use encoding::{Ctx, Encoding, EncodingConfig, ModelDims, PosState, Qkv};
pub use init::SeededVars;
pub use model::{Llama, LlamaConfig};
pub use positions::Positions;
pub use rotate::{convert_layout, rotate, Layout, Rotation};
