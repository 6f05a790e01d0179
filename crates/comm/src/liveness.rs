//! Whether the processes of peers still live.

use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Descriptors that become readable when a peer's process ends.
#[derive(Debug)]
pub(crate) struct Liveness {
    /// By world rank; `None` for this rank and for a system without pidfds.
    peers: Vec<Option<OwnedFd>>,
}

impl Liveness {
    /// Watches the processes of `pids`, this rank's excepted. Returns the rank of a peer that is gone already as the error.
    pub(crate) fn watch(own_rank: usize, pids: &[u32]) -> Result<Self, usize> {
        let mut peers = Vec::with_capacity(pids.len());
        for (rank, &pid) in pids.iter().enumerate() {
            if rank == own_rank {
                peers.push(None);
                continue;
            }
            let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
                peers.push(None);
                continue;
            };
            match pidfd_open(pid, PidfdFlags::empty()) {
                Ok(fd) => peers.push(Some(fd)),
                Err(rustix::io::Errno::SRCH) => return Err(rank),
                // Without pidfds (an old kernel, a strict sandbox) the launcher still watches the processes.
                Err(_) => peers.push(None),
            }
        }
        Ok(Self { peers })
    }

    /// Whether the process of `rank` has ended.
    pub(crate) fn is_dead(&self, rank: usize) -> bool {
        let Some(Some(fd)) = self.peers.get(rank) else { return false };
        let mut fds = [PollFd::new(fd, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(n) if n > 0)
    }
}
