//! What the examples share: a text made for long contexts, small models and their training, the measure of perplexity,
//! sampling, text to tokens and back, tables and pictures.

// Every example compiles this module for itself and uses a part of it.
#![allow(dead_code)]

use candle_core::{Error, Result};
use std::fmt;
use std::io::Write;
use std::process::ExitCode;

pub mod codec;
pub mod device;
pub mod evaluation;
pub mod names;
pub mod plot;
pub mod progress;
pub mod recipe;
pub mod sampling;
pub mod table;
pub mod tales;
pub mod text;

/// What `main` returns; an error goes to standard error in one line.
pub fn conclude(program: &str, result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tell(format_args!("{program}: {}", message(&error)));
            ExitCode::FAILURE
        }
    }
}

/// A line to standard error, lost where nobody reads it any more (`2>&1 | head`), for which `eprintln!` would panic.
pub fn tell(line: fmt::Arguments) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// What an error says, without the backtrace that candle puts into its text where `RUST_BACKTRACE` is set.
pub fn message(error: &Error) -> String {
    match error {
        Error::WithBacktrace { inner, .. } => message(inner),
        other => other.to_string(),
    }
}
