//! Token files as one sequence, read by position: only what a sample needs. (One may have no name: text that was made into
//! tokens once, for all ranks.)

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::error::{DataError, Result};

/// How the ids of token files are stored: little-endian, without a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenWidth {
    /// 8 bits each: text as bytes.
    U8,
    /// 16 bits each.
    U16,
    /// 32 bits each.
    U32,
}

impl TokenWidth {
    /// The bytes of one token.
    pub fn bytes(self) -> u64 {
        match self {
            Self::U8 => 1,
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }
}

/// Files of little-endian token ids, one after another.
pub(crate) struct TokenFiles {
    width: TokenWidth,
    parts: Vec<Part>,
}

struct Part {
    path: PathBuf,
    file: File,
    /// The position in the whole stream of the file's first token, and one past its last.
    start: u64,
    end: u64,
}

impl TokenFiles {
    /// Opens the files; each must be a whole number of tokens.
    pub(crate) fn open(files: Vec<PathBuf>, width: TokenWidth) -> Result<Self> {
        let mut parts = Vec::with_capacity(files.len());
        let mut start = 0;
        for path in files {
            let file = File::open(&path).map_err(DataError::io(&path, "open it"))?;
            let bytes = file.metadata().map_err(DataError::io(&path, "find its size"))?.len();
            if bytes % width.bytes() != 0 {
                return Err(DataError::WrongWidth { file: path, width: width.bytes(), bytes });
            }
            let end = start + bytes / width.bytes();
            parts.push(Part { path, file, start, end });
            start = end;
        }
        Ok(Self { width, parts })
    }

    /// One file that is open already, with `tokens` tokens; errors call it `name`.
    pub(crate) fn over(file: File, name: PathBuf, tokens: u64, width: TokenWidth) -> Self {
        Self { width, parts: vec![Part { path: name, file, start: 0, end: tokens }] }
    }

    /// The bytes of all files together.
    pub(crate) fn bytes(&self) -> u64 {
        self.len() * self.width.bytes()
    }

    /// The tokens of all files together.
    pub(crate) fn len(&self) -> u64 {
        self.parts.last().map_or(0, |part| part.end)
    }

    /// Reads the tokens from `start` on, as many as `into` takes.
    pub(crate) fn read(&self, mut start: u64, mut into: &mut [u32]) -> Result<()> {
        let first = self.parts.partition_point(|part| part.end <= start);
        for part in &self.parts[first..] {
            if into.is_empty() {
                break;
            }
            let here = (part.end - start).min(into.len() as u64);
            let (piece, rest) = into.split_at_mut(here as usize);
            part.read(self.width, start - part.start, piece)?;
            (start, into) = (start + here, rest);
        }
        Ok(())
    }

    /// The file that holds a token of the stream, and the token's position in it.
    pub(crate) fn locate(&self, position: u64) -> Option<(String, u64)> {
        let part = self.parts.get(self.parts.partition_point(|part| part.end <= position))?;
        Some((part.path.display().to_string(), position - part.start))
    }
}

impl Part {
    fn read(&self, width: TokenWidth, first: u64, into: &mut [u32]) -> Result<()> {
        match width {
            TokenWidth::U8 => {
                let mut narrow = vec![0u8; into.len()];
                self.read_bytes(&mut narrow, first)?;
                for (wide, narrow) in into.iter_mut().zip(narrow) {
                    *wide = u32::from(narrow);
                }
            }
            TokenWidth::U16 => {
                let mut narrow = vec![0u16; into.len()];
                self.read_bytes(bytemuck::cast_slice_mut(&mut narrow), first * 2)?;
                for (wide, narrow) in into.iter_mut().zip(narrow) {
                    *wide = u32::from(u16::from_le(narrow));
                }
            }
            TokenWidth::U32 => {
                self.read_bytes(bytemuck::cast_slice_mut(into), first * 4)?;
                for token in into {
                    *token = u32::from_le(*token);
                }
            }
        }
        Ok(())
    }

    fn read_bytes(&self, into: &mut [u8], offset: u64) -> Result<()> {
        let action = format!("read {} bytes at offset {offset}", into.len());
        self.file.read_exact_at(into, offset).map_err(DataError::io(&self.path, action))
    }
}
