//! The `shardwise` program.

use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use shardwise::cli::Cli;
use shardwise::error::RunError;

fn main() -> ExitCode {
    // A file over the limit on file sizes is an error that says so, not the end of the process without a word. Where the
    // handler cannot be set, it stays that.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    let code = match Cli::parse().run() {
        Ok(code) => code,
        Err(error) => {
            // The rank whose failure this echoes has told it.
            if !matches!(error, RunError::Elsewhere { .. }) {
                shardwise::output::say(&format!("shardwise: {error}"));
            }
            error.exit_code()
        }
    };
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
