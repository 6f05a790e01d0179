//! Pieces through threads that read and write by position, where io_uring is not to be had.
//!
//! Threads sleep on a condition until there is a piece to move, and the rank on another until one is done.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use rustix::io::{Errno, pread, pwrite};

use crate::method::{Done, Method, Piece, Wait};

/// How long threads that are dropped may take to end.
const LAST_WAIT: Duration = Duration::from_secs(10);

#[derive(Default)]
struct Board {
    state: Mutex<State>,
    /// There is a piece to move, or the end.
    begun: Condvar,
    /// A piece was moved.
    done: Condvar,
}

#[derive(Default)]
struct State {
    begun: VecDeque<Piece>,
    done: VecDeque<Done>,
    ending: bool,
}

impl Board {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next piece; none at the end.
    fn next(&self) -> Option<Piece> {
        let mut state = self.lock();
        loop {
            if let Some(piece) = state.begun.pop_front() {
                return Some(piece);
            }
            if state.ending {
                return None;
            }
            state = self.begun.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

pub(crate) struct Threads {
    board: Arc<Board>,
    workers: Vec<JoinHandle<()>>,
    in_flight: usize,
}

impl Threads {
    /// Starts `count` threads.
    pub(crate) fn new(count: usize) -> std::io::Result<Self> {
        let mut threads = Self { board: Arc::default(), workers: Vec::with_capacity(count), in_flight: 0 };
        for index in 0..count {
            let board = threads.board.clone();
            let worker = Builder::new().name(format!("tier-{index}")).spawn(move || {
                while let Some(mut piece) = board.next() {
                    let result = run(&mut piece);
                    board.lock().done.push_back(Done { piece, result });
                    board.done.notify_one();
                }
            })?;
            threads.workers.push(worker);
        }
        Ok(threads)
    }
}

fn run(piece: &mut Piece) -> Result<usize, Errno> {
    loop {
        let result = match piece.part.space() {
            Some(bytes) => pread(&piece.file.fd, bytes, piece.offset),
            None => pwrite(&piece.file.fd, piece.part.as_slice(), piece.offset),
        };
        if result != Err(Errno::INTR) {
            return result;
        }
    }
}

impl Method for Threads {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn has_room(&self) -> bool {
        true
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn begin(&mut self, piece: Piece) -> Result<(), Piece> {
        self.board.lock().begun.push_back(piece);
        self.in_flight += 1;
        self.board.begun.notify_one();
        Ok(())
    }

    fn reap(&mut self, wait: Wait, done: &mut Vec<Done>) -> Result<(), Errno> {
        if self.in_flight == 0 {
            return Ok(());
        }
        let mut state = self.board.lock();
        while state.done.is_empty() {
            match wait {
                Wait::No => return Ok(()),
                Wait::Until(end) => {
                    let left = end.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Ok(());
                    }
                    let waited = self.board.done.wait_timeout(state, left);
                    state = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
        self.in_flight -= state.done.len();
        done.extend(state.done.drain(..));
        Ok(())
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.board.lock().ending = true;
        self.board.begun.notify_all();
        let end = Instant::now() + LAST_WAIT;
        let mut done = Vec::new();
        while self.in_flight > 0 && Instant::now() < end {
            if self.reap(Wait::Until(end), &mut done).is_err() {
                break;
            }
        }
        // A thread that the disk does not let go keeps what it works on, and ends when it can.
        if self.in_flight == 0 {
            for worker in self.workers.drain(..) {
                let _ = worker.join();
            }
        }
    }
}
