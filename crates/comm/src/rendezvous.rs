//! How ranks that no launcher of ours has started find each other: rank 0 hands the shared memory out over a socket.
//!
//! The socket is an abstract Unix socket named after the user and `MASTER_PORT`: it has no file that could be left
//! behind, and it is bound once, so no other program can take the name between a probe and its use.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg, sockopt::socket_peercred,
};

use crate::Result;
use crate::error::CommError;
use crate::shm::WorldFile;

/// How often a rank looks whether rank 0 listens already.
const RETRY: Duration = Duration::from_millis(20);
/// How long one visitor may take to say who it is.
const GREETING: Duration = Duration::from_secs(5);
const HELLO: &[u8; 8] = b"shardws1";
const ACCEPTED: u8 = 1;

fn address(port: u16) -> std::io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("shardwise-{}-{port}", rustix::process::getuid().as_raw()))
}

fn system(what: &str) -> impl Fn(std::io::Error) -> CommError + '_ {
    move |e| CommError::system(what, e)
}

/// Rank 0's side: makes the shared memory and gives it to every other rank.
pub(crate) fn host(port: u16, ranks: usize, deadline: Duration) -> Result<WorldFile> {
    let world = WorldFile::create(ranks)?;
    if ranks == 1 {
        return Ok(world);
    }
    let listener = address(port).and_then(|a| UnixListener::bind_addr(&a)).map_err(|e| {
        CommError::Rendezvous(format!(
            "rank 0 cannot listen on the socket for MASTER_PORT={port}: {e}; if another job of yours runs on this host, \
             give this one another MASTER_PORT"
        ))
    })?;
    let begun = Instant::now();
    let mut missing: Vec<usize> = (1..ranks).collect();
    while !missing.is_empty() {
        let left = deadline.saturating_sub(begun.elapsed());
        if !wait_readable(&listener, left)? {
            return Err(CommError::Rendezvous(format!(
                "rank 0 waited {deadline:?} at MASTER_PORT={port}, and ranks {missing:?} of {ranks} did not come; start all \
                 of them on this host with the same MASTER_PORT"
            )));
        }
        let (stream, _) = listener.accept().map_err(system("accepting a rank"))?;
        match greet(&stream, ranks, &missing) {
            Ok(rank) => {
                hand_over(&stream, world.file())?;
                missing.retain(|r| *r != rank);
            }
            Err(refusal) => {
                // The visitor reads why; whether it could be told does not matter to this rank.
                let _ = (&stream).write_all(format!("\0{refusal}").as_bytes());
            }
        }
    }
    Ok(world)
}

/// Reads who the visitor is, and says why it cannot join.
fn greet(mut stream: &UnixStream, ranks: usize, missing: &[usize]) -> std::result::Result<usize, String> {
    let credentials = socket_peercred(stream).map_err(|e| e.to_string())?;
    if credentials.uid != rustix::process::getuid() {
        return Err("another user's rank cannot join".into());
    }
    stream.set_read_timeout(Some(GREETING)).map_err(|e| e.to_string())?;
    let mut hello = [0u8; 24];
    stream.read_exact(&mut hello).map_err(|e| format!("no greeting: {e}"))?;
    let word = |at: usize| hello[at..at + 8].try_into().map_or(0, u64::from_le_bytes) as usize;
    let (rank, world) = (word(8), word(16));
    if hello[..8] != *HELLO {
        return Err("this port serves another version of Shardwise".into());
    }
    if world != ranks {
        return Err(format!(
            "rank {rank} was started with WORLD_SIZE={world}, but rank 0 with WORLD_SIZE={ranks}"
        ));
    }
    if !missing.contains(&rank) {
        return Err(format!("rank {rank} has joined already; start each rank once, with a RANK of its own"));
    }
    Ok(rank)
}

fn hand_over(stream: &UnixStream, file: &OwnedFd) -> Result<()> {
    let fds = [file.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(stream, &[IoSlice::new(&[ACCEPTED])], &mut control, SendFlags::NOSIGNAL)
        .map_err(|e| CommError::system("handing the shared memory to a rank", e))?;
    Ok(())
}

/// Another rank's side: asks rank 0 for the shared memory.
pub(crate) fn visit(port: u16, rank: usize, ranks: usize, deadline: Duration) -> Result<WorldFile> {
    let begun = Instant::now();
    let mut stream = loop {
        match address(port).and_then(|a| UnixStream::connect_addr(&a)) {
            Ok(stream) => break stream,
            Err(_) if begun.elapsed() < deadline => std::thread::sleep(RETRY),
            Err(e) => {
                return Err(CommError::Rendezvous(format!(
                    "rank {rank} looked {deadline:?} for rank 0 at MASTER_PORT={port} on this host ({e}); start rank 0 with \
                     the same MASTER_PORT"
                )));
            }
        }
    };
    let mut hello = [0u8; 24];
    hello[..8].copy_from_slice(HELLO);
    hello[8..16].copy_from_slice(&(rank as u64).to_le_bytes());
    hello[16..].copy_from_slice(&(ranks as u64).to_le_bytes());
    // Rank 0 closes a connection that it has no use for, at any moment: then reading and writing fail.
    let greeted = stream.write_all(&hello).is_ok();
    if greeted && !wait_readable(&stream, deadline.saturating_sub(begun.elapsed()))? {
        return Err(CommError::Rendezvous(format!("rank 0 did not answer rank {rank} within {deadline:?}")));
    }
    match receive(&stream) {
        Ok((ACCEPTED, Some(file))) => WorldFile::open(file, ranks),
        _ => Err(CommError::Rendezvous(format!("rank 0 refused rank {rank}: {}", refusal(&mut stream)))),
    }
}

/// Why rank 0 has refused this rank.
fn refusal(stream: &mut UnixStream) -> String {
    let mut reason = String::new();
    // An answer cut short still says something.
    let _ = stream.set_read_timeout(Some(GREETING)).and_then(|()| stream.read_to_string(&mut reason));
    if reason.is_empty() {
        reason = "all ranks have joined already; start each rank once, with a RANK of its own".into();
    }
    reason
}

fn receive(stream: &UnixStream) -> Result<(u8, Option<OwnedFd>)> {
    let mut status = [0u8];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    recvmsg(stream, &mut [IoSliceMut::new(&mut status)], &mut control, RecvFlags::CMSG_CLOEXEC)
        .map_err(|e| CommError::system("receiving the shared memory from rank 0", e))?;
    let file = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Ok((status[0], file))
}

fn wait_readable(fd: &impl AsFd, at_most: Duration) -> Result<bool> {
    let timeout = Timespec { tv_sec: at_most.as_secs() as i64, tv_nsec: i64::from(at_most.subsec_nanos()) };
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    match poll(&mut fds, Some(&timeout)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(true),
        Err(e) => Err(CommError::system("waiting for a rank", e)),
    }
}
