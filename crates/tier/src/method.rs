//! A way to have pieces of files read and written while the rank does something else.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use rustix::io::Errno;

use crate::buffer::Part;

/// A file that is open, and its name.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) fd: OwnedFd,
    pub(crate) path: PathBuf,
}

/// One piece of a tile on its way. It owns what the kernel works on, for as long as the kernel may.
#[derive(Debug)]
pub(crate) struct Piece {
    /// The transfer that it belongs to.
    pub(crate) transfer: usize,
    pub(crate) file: Arc<OpenFile>,
    /// Where in the file.
    pub(crate) offset: u64,
    pub(crate) part: Part,
}

/// A piece that the kernel is done with, and the bytes moved.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) piece: Piece,
    pub(crate) result: Result<usize, Errno>,
}

/// How long to wait for a piece to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Not at all.
    No,
    /// Until one is done or this moment.
    Until(Instant),
}

/// A way to move pieces. Dropping it never waits long and never frees what the kernel still works on.
pub(crate) trait Method: Send {
    /// The name used in reports.
    fn name(&self) -> &'static str;

    /// Whether another piece can be begun.
    fn has_room(&self) -> bool;

    /// Pieces begun and not reaped.
    fn in_flight(&self) -> usize;

    /// Begins a piece; it is given back if there is no room.
    fn begin(&mut self, piece: Piece) -> Result<(), Piece>;

    /// Tells the kernel of what was begun and appends what is done to `done`; waits if nothing is done and something is
    /// in flight.
    fn reap(&mut self, wait: Wait, done: &mut Vec<Done>) -> Result<(), Errno>;
}
