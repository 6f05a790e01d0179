//! What the program writes for people and pipes: a reader who goes away ends no run, and no text drives a terminal.

use std::io::{ErrorKind, IsTerminal, Write};

use crate::error::RunError;

/// Writes a line to standard error in one piece, so that lines of several ranks do not mix.
pub fn say(line: &str) {
    // Without a standard error there is no one to tell.
    let _ = std::io::stderr().write_all(format!("{}\n", harmless(line)).as_bytes());
}

/// Writes `text` to standard output; on a terminal without control characters.
///
/// # Errors
/// When it cannot be written: a full disk, say. A reader who has closed the pipe has had enough, which is no error.
pub fn print(text: &str) -> Result<(), RunError> {
    print_to_reader(text).map(drop)
}

/// As [`print()`]; returns whether the reader is still there.
///
/// # Errors
/// As [`print()`].
pub fn print_to_reader(text: &str) -> Result<bool, RunError> {
    let mut out = std::io::stdout().lock();
    let text = if out.is_terminal() { harmless(text) } else { text.to_string() };
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(e) => Err(RunError::failed(format!("writing to standard output: {e}"))),
    }
}

/// The text without what could do anything to a terminal.
pub fn harmless(text: &str) -> String {
    text.replace(|c: char| c.is_control() && c != '\n' && c != '\t', "\u{fffd}")
}
