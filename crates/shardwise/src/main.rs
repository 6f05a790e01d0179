//! The `shardwise` program.

use std::process::ExitCode;

use clap::Parser;
use shardwise::cli::Cli;
use shardwise::error::RunError;

fn main() -> ExitCode {
    let code = match Cli::parse().run() {
        Ok(code) => code,
        Err(error) => {
            // The rank whose failure this echoes has told it.
            if !matches!(error, RunError::Elsewhere { .. }) {
                shardwise::cli::say(&format!("shardwise: {error}"));
            }
            error.exit_code()
        }
    };
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
