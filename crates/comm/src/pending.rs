//! Collectives in flight. Each owns its buffers until it is waited for; dropping one releases the peers and never panics.

use std::fmt::Debug;
use std::sync::Arc;

use crate::Result;
use crate::buffer::{HostBuffer, SharedBuffer};
use crate::fingerprint::Fingerprint;
use crate::reduce::sum_windows;
use crate::transport::{Channel, Transport, Window};

/// One started operation of a group, finished when dropped.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) channel: Arc<Channel>,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) seq: u64,
    pub(crate) finished: bool,
}

impl Started {
    /// What `peer` lends, or a range of its bytes.
    pub(crate) fn window(&self, peer: usize, range: Option<std::ops::Range<usize>>) -> Result<Window> {
        self.transport.window(&self.channel, self.seq, &self.fingerprint, peer, range)
    }

    /// Waits until every member has started the operation, and the same one.
    pub(crate) fn wait_for_all(&self) -> Result<()> {
        self.peers().try_for_each(|peer| {
            self.transport.wait_started(&self.channel, self.seq, &self.fingerprint, peer)
        })
    }

    /// Group ranks, starting after this one, so that ranks do not all read from the same peer at once.
    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (own, n) = (self.channel.index(), self.channel.members().len());
        (1..=n).map(move |step| (own + step) % n)
    }

    pub(crate) fn finish(&mut self) {
        if !self.finished {
            self.finished = true;
            self.transport.finish(&self.channel, self.seq);
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Memory that an all-gather can fill.
pub trait GatherTarget: Send + Debug {
    /// The number of elements.
    fn numel(&self) -> usize;

    /// The elements, to write.
    ///
    /// # Errors
    /// When they are lent to peers that do not give them back.
    fn target(&mut self) -> Result<&mut [f32]>;
}

impl GatherTarget for HostBuffer {
    fn numel(&self) -> usize {
        self.numel()
    }

    fn target(&mut self) -> Result<&mut [f32]> {
        Ok(self.as_mut_slice())
    }
}

impl GatherTarget for SharedBuffer {
    fn numel(&self) -> usize {
        self.numel()
    }

    fn target(&mut self) -> Result<&mut [f32]> {
        self.writable()
    }
}

/// An all-gather whose parts arrive in a buffer that it owns.
#[derive(Debug)]
pub struct PendingGather<T = HostBuffer> {
    pub(crate) started: Option<Started>,
    pub(crate) dest: T,
    pub(crate) part_numel: usize,
    /// Why the operation could not be started.
    pub(crate) error: Option<crate::CommError>,
}

impl<T: GatherTarget> PendingGather<T> {
    /// Waits for every part and hands the buffer back, whole when the result is `Ok`.
    pub fn wait(mut self) -> (T, Result<()>) {
        let result = self.copy_parts();
        (self.dest, result)
    }

    /// Gives up on the parts and hands the buffer back as it is; the peers are not disturbed.
    pub fn cancel(self) -> T {
        self.dest
    }

    fn copy_parts(&mut self) -> Result<()> {
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        let Some(started) = &mut self.started else { return Ok(()) };
        let dest = self.dest.target()?;
        for peer in started.peers() {
            let window = started.window(peer, None)?;
            let at = peer * self.part_numel;
            dest[at..at + self.part_numel].copy_from_slice(window.f32s());
        }
        started.finish();
        Ok(())
    }
}

/// A reduce-scatter that owns the unreduced buffer until every peer has read its part.
#[derive(Debug)]
pub struct PendingReduce {
    pub(crate) started: Option<Started>,
    pub(crate) source: SharedBuffer,
    pub(crate) part_numel: usize,
    pub(crate) error: Option<crate::CommError>,
}

impl PendingReduce {
    /// Waits for every peer's buffer and puts the sum of this rank's parts into `dst`, or adds it to what `dst` holds.
    ///
    /// # Errors
    /// When a peer is lost, late, or calls something else; `dst` is then unchanged.
    ///
    /// # Panics
    /// When `dst` is not as long as a part.
    pub fn sum_into(&mut self, dst: &mut [f32], add: bool) -> Result<()> {
        assert_eq!(dst.len(), self.part_numel, "the sum has the length of a part");
        if let Some(error) = self.error.clone() {
            return Err(error);
        }
        let Some(started) = &mut self.started else {
            sum_windows(dst, &[&self.source.as_slice()[..self.part_numel]], add);
            return Ok(());
        };
        let bytes = self.part_numel * size_of::<f32>();
        let own = started.channel.index() * bytes..(started.channel.index() + 1) * bytes;
        let windows = (0..started.channel.members().len())
            .map(|peer| started.window(peer, Some(own.clone())))
            .collect::<Result<Vec<Window>>>()?;
        let slices: Vec<&[f32]> = windows.iter().map(Window::f32s).collect();
        sum_windows(dst, &slices, add);
        started.finish();
        Ok(())
    }

    /// Ends the operation and hands the unreduced buffer back. Peers may still read it:
    /// [`SharedBuffer::writable`] waits for them.
    pub fn into_source(mut self) -> SharedBuffer {
        drop(self.started.take());
        self.source
    }
}
