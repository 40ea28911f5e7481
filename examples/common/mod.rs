//! What the examples share: a text made for long contexts, the training recipe, the measure of perplexity and
//! sampling. The crate itself stays free of recipes; copy from here what you need.

// Every example compiles this module for itself and uses a part of it.
#![allow(dead_code)]

pub mod encodings;
pub mod evaluation;
pub mod sampling;
pub mod tales;
pub mod training;
