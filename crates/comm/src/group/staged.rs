//! Messages that do not come from shared buffers: they travel in pieces through one that the group keeps.

use std::ops::Range;
use std::sync::PoisonError;

use super::ProcessGroup;
use crate::Result;
use crate::fingerprint::Fingerprint;
use crate::pending::Started;

/// Elements of that buffer.
const STAGING_NUMEL: usize = 1 << 20;

impl ProcessGroup {
    pub(super) fn staged(
        &self,
        fingerprint: &Fingerprint,
        numel: usize,
        fill: impl FnMut(Range<usize>, &mut [f32]),
        take: impl FnMut(Range<usize>, &Started) -> Result<()>,
    ) -> Result<()> {
        self.staged_by(fingerprint, numel, 1, fill, take)
    }

    /// Sends `numel` elements of each of `parts` parts in pieces that fit the staging buffer: `fill` writes a piece, `take`
    /// reads the peers'.
    pub(super) fn staged_by(
        &self,
        fingerprint: &Fingerprint,
        numel: usize,
        parts: usize,
        mut fill: impl FnMut(Range<usize>, &mut [f32]),
        mut take: impl FnMut(Range<usize>, &Started) -> Result<()>,
    ) -> Result<()> {
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let piece_numel = (STAGING_NUMEL / parts).max(1).min(numel.max(1));
        let mut start = 0;
        loop {
            let piece = start..(start + piece_numel).min(numel);
            let total = piece.len() * parts;
            let buffer = match staging.take() {
                Some(buffer) if buffer.numel() >= total => staging.insert(buffer),
                outgrown => {
                    if let Some(mut outgrown) = outgrown {
                        outgrown.writable()?;
                    }
                    staging.insert(self.allocate(total.max(1024))?)
                }
            };
            fill(piece.clone(), &mut buffer.writable()?[..total]);
            let mut started = self.begin(fingerprint.clone(), Some((buffer, 0..total * size_of::<f32>())))?;
            take(piece.clone(), &started)?;
            started.finish();
            start = piece.end;
            if start >= numel {
                return Ok(());
            }
        }
    }
}

/// Puts the elements `piece` of every `n`-element part of `source` into `buffer`, one part after another.
pub(super) fn pick(source: &[f32], n: usize, piece: &Range<usize>, buffer: &mut [f32]) {
    for (rank, part) in buffer.chunks_exact_mut(piece.len().max(1)).enumerate() {
        part.copy_from_slice(&source[rank * n + piece.start..rank * n + piece.end]);
    }
}
