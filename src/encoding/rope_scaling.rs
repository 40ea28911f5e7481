/// todo
#[derive(Debug, Clone, PartialEq)]
pub struct RopeScaling {}
