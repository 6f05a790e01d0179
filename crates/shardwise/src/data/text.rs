//! Text files, piece by piece: bounded memory whatever their size, and cuts where tokenizers cut too.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::str;

use super::error::{DataError, Result};

/// Bytes read at once; at most twice as many are held.
const BLOCK: usize = 256 << 10;

/// Gives the text of a file, and `ending` after it, to `take`, in order, in pieces that end with a line wherever
/// lines are shorter than a piece.
///
/// # Errors
/// [`DataError::NotUtf8`] with the offset of the first invalid sequence; pieces before it were given already.
pub(crate) fn for_each_piece<E: From<DataError>>(
    path: &Path,
    ending: &str,
    mut take: impl FnMut(&str) -> Result<(), E>,
) -> Result<(), E> {
    let mut file = File::open(path).map_err(DataError::io(path, "open it"))?;
    let mut held = Vec::new();
    let mut given: u64 = 0;
    loop {
        let read = (&mut file).take(BLOCK as u64).read_to_end(&mut held);
        let at_end = read.map_err(DataError::io(path, "read it"))? < BLOCK;
        if at_end {
            held.extend_from_slice(ending.as_bytes());
        }
        let text = valid_start(&held, at_end)
            .map_err(|valid| DataError::NotUtf8 { file: path.to_path_buf(), offset: given + valid as u64 })?;
        let piece = if at_end { text } else { &text[..last_boundary(text)] };
        if !piece.is_empty() {
            take(piece)?;
        }
        if at_end {
            return Ok(());
        }
        let length = piece.len();
        held.drain(..length);
        given += length as u64;
    }
}

/// The text at the start of `bytes`. A character that the end of a block cut is left for the next one; else an
/// invalid sequence is an error: how many bytes before it are valid.
fn valid_start(bytes: &[u8], at_end: bool) -> Result<&str, usize> {
    match str::from_utf8(bytes) {
        Ok(text) => Ok(text),
        Err(error) if error.error_len().is_none() && !at_end => {
            str::from_utf8(&bytes[..error.valid_up_to()]).map_err(|error| error.valid_up_to())
        }
        Err(error) => Err(error.valid_up_to()),
    }
}

/// Where to cut text that goes on: between a line and one that starts with something visible, since tokenizers
/// join white space across lines; else after a line; else at the end.
fn last_boundary(text: &str) -> usize {
    let starts = || text.rmatch_indices('\n').map(|(newline, _)| newline + 1);
    let before_text = |start: &usize| text[*start..].starts_with(|next: char| !next.is_whitespace());
    starts().find(before_text).or_else(|| starts().next()).unwrap_or(text.len())
}
