//! Starts the ranks of a world as processes of this host and sees to it that they end together.
//!
//! The launcher makes the shared memory, starts every rank with the environment that such programs expect, and watches:
//! when one ends badly it tells the others through the shared memory which rank was lost and how, gives them a moment
//! to say so, and ends whatever is left: the ranks and all that they have started. Ranks die with their launcher, also
//! behind a wrapper.

use std::ffi::OsString;
use std::io::Write;
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};

use crate::Result;
use crate::descendants::{Descendant, Descendants, MARK_VARIABLE};
use crate::error::CommError;
use crate::shm::{FD_VARIABLE, WorldFile};

/// How often the launcher looks at its ranks.
const LOOK: Duration = Duration::from_millis(20);
/// How long ranks may take to report a loss before they are asked to end.
const REPORT: Duration = Duration::from_millis(2000);
/// How long they may take to end when asked, before they are killed.
const END: Duration = Duration::from_millis(1500);

/// What to start.
#[derive(Debug, Clone)]
pub struct Launch {
    /// The program.
    pub program: OsString,
    /// Its arguments, the same for every rank.
    pub args: Vec<OsString>,
    /// How many ranks.
    pub ranks: usize,
    /// Further variables for every rank.
    pub env: Vec<(String, String)>,
}

/// Starts the ranks and waits for all of them.
///
/// Returns the exit code for the launcher to end with: 0 when every rank ended well, otherwise that of the first rank
/// that did not (128 + n for signal n); 128 + n when the launcher itself got signal n. A signal that this process was told
/// to ignore (`nohup`) stays ignored. Call it from the thread that lives as long as the process: ranks are killed when it
/// ends.
///
/// What the ranks have started ends with them: every process that comes to be below this one during the call is asked to
/// end, and then killed, once all ranks have ended. Only a launcher that is itself killed (SIGKILL) cannot see to it:
/// ranks then end all the same, but other processes behind a wrapper do not. Meanwhile orphans below this process become
/// its children instead of init's (it is their *subreaper*).
///
/// # Errors
/// When the shared memory cannot be made or a rank cannot be started; no process is left then.
pub fn launch(launch: &Launch) -> Result<i32> {
    let world = WorldFile::create(launch.ranks)?;
    let _alive = world.hold()?;
    fcntl_setfd(world.file(), FdFlags::empty())
        .map_err(|e| CommError::system("sharing memory with the ranks", e))?;
    let signals = Signals::catch()?;
    let mut ranks = Ranks { running: Vec::new(), descendants: Descendants::adopt(), orphans: Vec::new() };
    let port = free_port();
    for rank in 0..launch.ranks {
        ranks.start(launch, rank, port, &world)?;
    }
    ranks.watch(&world, &signals)
}

/// A TCP port that nobody uses now, for programs that want `MASTER_PORT` to be one. Our own ranks do not use it.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).map_or(29500, |a| a.port())
}

/// Tells the user; without a standard error there is no one to tell.
fn say(line: &str) {
    let _ = std::io::stderr().write_all(format!("shardwise launch: {line}\n").as_bytes());
}

/// The running ranks; whatever still runs of them and below them is killed when this is dropped.
struct Ranks {
    running: Vec<(usize, Child)>,
    descendants: Descendants,
    /// What they have left behind, as last seen.
    orphans: Vec<Descendant>,
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.descendants.signal(&self.pids(), Signal::KILL);
        for (_, child) in &mut self.running {
            // Either it is gone already or this ends it; there is nothing else to do with a failure.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Ranks {
    fn start(&mut self, launch: &Launch, rank: usize, port: u16, world: &WorldFile) -> Result<()> {
        let mut command = Command::new(&launch.program);
        command.args(&launch.args).envs(launch.env.iter().cloned());
        let (rank_text, ranks_text) = (rank.to_string(), launch.ranks.to_string());
        command.env("RANK", &rank_text).env("LOCAL_RANK", &rank_text);
        command.env("WORLD_SIZE", &ranks_text).env("LOCAL_WORLD_SIZE", &ranks_text);
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.env(FD_VARIABLE, world.file().as_raw_fd().to_string());
        command.env(MARK_VARIABLE, self.descendants.marks());
        let launcher = std::process::id();
        let die_with_launcher = move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // The launcher may have died before the line above took effect.
            if getppid().is_none_or(|parent| parent.as_raw_nonzero().get() as u32 != launcher) {
                return Err(std::io::Error::other("the launcher has ended"));
            }
            Ok(())
        };
        // SAFETY: between fork and exec the closure makes two system calls and allocates nothing unless the launcher is
        // dead already.
        unsafe { command.pre_exec(die_with_launcher) };
        let program = launch.program.to_string_lossy().into_owned();
        let child = command
            .spawn()
            .map_err(|e| CommError::system(format!("starting rank {rank} (`{program}`)"), e))?;
        self.running.push((rank, child));
        Ok(())
    }

    /// Process numbers of the ranks that have not been waited for.
    fn pids(&self) -> Vec<Pid> {
        self.running.iter().map(|(_, child)| Pid::from_child(child)).collect()
    }

    /// Waits for the ranks; on the first bad end, tells the rest and sees them off.
    fn watch(&mut self, world: &WorldFile, signals: &Signals) -> Result<i32> {
        let mut ending: Option<Ending> = None;
        loop {
            for (rank, status) in self.reap(world)? {
                if status.success() || ending.is_some() {
                    continue;
                }
                let how = describe(status);
                // A rank that has told the others why it ends has told the user too.
                if !matches!(
                    world.board().failure(),
                    Some(CommError::Peer { .. } | CommError::Disagreement(_))
                ) {
                    say(&format!("rank {rank} {how}; ending the others"));
                }
                world.board().fail(world.board().launcher(), &CommError::RankLost { rank, how });
                ending = Some(Ending::new(exit_code(status), REPORT));
            }
            if self.running.is_empty() && self.nothing_left(&mut ending) {
                return Ok(ending.map_or(0, |e| e.code));
            }
            if let Some(ending) = &mut ending {
                ending.proceed(&self.descendants, &self.pids());
            }
            if let Some(signal) = signals.wait(LOOK)? {
                say(&format!("signal {signal}; ending all ranks"));
                ending = Some(Ending::by_signal(signal, ending.as_ref()));
            }
        }
    }

    /// Whether nothing that the ranks have started runs once they have ended; otherwise that is asked to end now.
    fn nothing_left(&mut self, ending: &mut Option<Ending>) -> bool {
        let left = self.descendants.running(&[]);
        if left.is_empty() {
            Descendants::bury(&self.orphans);
            return true;
        }
        let ending = ending.get_or_insert_with(|| {
            let names: Vec<String> = left.iter().map(|p| format!("{} (process {})", p.name, p.pid)).collect();
            say(&format!("all ranks have ended; ending what they have left running: {}", names.join(", ")));
            Ending::new(0, Duration::ZERO)
        });
        // Nobody is left who could still report.
        ending.ask_at = ending.ask_at.min(Instant::now());
        self.orphans = left;
        false
    }

    fn reap(&mut self, world: &WorldFile) -> Result<Vec<(usize, ExitStatus)>> {
        let mut ended = Vec::new();
        for (rank, child) in &mut self.running {
            if let Some(status) =
                child.try_wait().map_err(|e| CommError::system(format!("watching rank {rank}"), e))?
            {
                ended.push((*rank, status));
            }
        }
        self.running.retain(|(rank, _)| ended.iter().all(|(r, _)| r != rank));
        // A rank that ends badly makes others end with an error of their own soon after: the cause comes first.
        let blamed = match world.board().failure() {
            Some(CommError::RankLost { rank, .. } | CommError::Peer { rank, .. }) => Some(rank),
            _ => None,
        };
        ended.sort_by_key(|(rank, status)| (Some(*rank) != blamed, status.signal().is_none()));
        Ok(ended)
    }
}

/// The end of a world: first ranks may report, then they and all that they have started are asked to end, then killed.
struct Ending {
    code: i32,
    /// When everything is asked to end.
    ask_at: Instant,
    asked: bool,
}

impl Ending {
    fn new(code: i32, report: Duration) -> Self {
        Self { code, ask_at: Instant::now() + report, asked: false }
    }

    /// What comes of a signal to the launcher: an end without reports, and at once when it is the second.
    fn by_signal(signal: i32, before: Option<&Self>) -> Self {
        let asked = before.is_some_and(|ending| ending.asked);
        let ask_at = if asked { Instant::now().checked_sub(END) } else { None };
        Self { code: 128 + signal, ask_at: ask_at.unwrap_or_else(Instant::now), asked }
    }

    fn proceed(&mut self, descendants: &Descendants, ranks: &[Pid]) {
        let now = Instant::now();
        let signal = if now >= self.ask_at + END {
            Signal::KILL
        } else if now >= self.ask_at && !self.asked {
            Signal::TERM
        } else {
            return;
        };
        self.asked = true;
        if !descendants.signal(ranks, signal) {
            // Without `/proc` the ranks are all that is known. They are ours and not yet waited for, so the numbers are
            // still their own; those that have ended do not mind.
            for rank in ranks {
                let _ = kill_process(*rank, signal);
            }
        }
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(9), _) => "was killed by signal 9 (SIGKILL)".into(),
        (Some(signal), _) => format!("was ended by signal {signal}"),
        (None, Some(code)) => format!("exited with code {code}"),
        (None, None) => "ended".into(),
    }
}

fn exit_code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(1))
}

/// The signals that end a launcher, readable as bytes.
struct Signals {
    pipes: Vec<(i32, UnixStream)>,
}

impl Signals {
    /// Catches them, but for those that whoever started this process wants ignored.
    fn catch() -> Result<Self> {
        let what = "catching signals";
        let pipes = [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP]
            .into_iter()
            .filter(|signal| !is_ignored(*signal))
            .map(|signal| {
                let (read, write) = UnixStream::pair().map_err(|e| CommError::system(what, e))?;
                signal_hook::low_level::pipe::register(signal, write)
                    .map_err(|e| CommError::system(what, e))?;
                Ok((signal, read))
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Self { pipes })
    }

    /// Waits `at_most` for a signal.
    fn wait(&self, at_most: Duration) -> Result<Option<i32>> {
        let timeout =
            Timespec { tv_sec: at_most.as_secs() as i64, tv_nsec: i64::from(at_most.subsec_nanos()) };
        // With all of them ignored this only waits.
        let mut fds: Vec<PollFd<'_>> =
            self.pipes.iter().map(|(_, p)| PollFd::new(p, PollFlags::IN)).collect();
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(None),
            Ok(_) => {}
            Err(e) => return Err(CommError::system("watching the ranks", e)),
        }
        let Some(ready) = fds.iter().position(|fd| fd.revents().contains(PollFlags::IN)) else {
            return Ok(None);
        };
        let (signal, pipe) = &self.pipes[ready];
        let mut byte = [0u8];
        // The byte only has to be taken out; that it was there is the message.
        let _ = std::io::Read::read(&mut &*pipe, &mut byte);
        Ok(Some(*signal))
    }
}

/// Whether this process ignores `signal`, as `nohup` and shells start programs; false where the system does not tell.
pub fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    // Signal n is bit n - 1.
    (1..=64).contains(&signal) && mask >> (signal - 1) & 1 == 1
}
