//! Resident memory of a process, from `/proc`.

use std::path::Path;
use std::time::{Duration, Instant};

/// How often the sharing of pages is looked up.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Memory of a process in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Resident {
    /// Its own pages and its part of those it shares with others.
    pub proportional: u64,
    /// All pages that it maps, shared ones counted whole.
    pub all: u64,
}

impl Resident {
    /// This process.
    pub fn now() -> Self {
        Self::of("self")
    }

    /// A process by number, or `self`; zeros when it is gone or the system does not say.
    pub fn of(pid: &str) -> Self {
        let text =
            std::fs::read_to_string(Path::new("/proc").join(pid).join("smaps_rollup")).unwrap_or_default();
        Self { proportional: kibibytes(&text, "Pss:"), all: kibibytes(&text, "Rss:") }
    }
}

/// The most pages that this process ever had resident, shared ones counted whole.
pub fn peak_of_all() -> u64 {
    kibibytes(&std::fs::read_to_string("/proc/self/status").unwrap_or_default(), "VmHWM:")
}

/// The most memory that this process had, with shared pages counted by their part: the peak of all pages less what
/// sharing takes off. What it takes off changes slowly and is costly to learn, so it is looked up now and then.
#[derive(Debug)]
pub struct PeakProportional {
    shared_by_others: u64,
    looked_up: Option<Instant>,
}

impl PeakProportional {
    /// Has not looked yet.
    pub fn new() -> Self {
        Self { shared_by_others: 0, looked_up: None }
    }

    /// The peak so far.
    pub fn bytes(&mut self) -> u64 {
        if self.looked_up.is_none_or(|at| at.elapsed() > LOOK_EVERY) {
            self.look();
        }
        peak_of_all().saturating_sub(self.shared_by_others)
    }

    /// The peak so far, with a fresh look.
    pub fn exact_bytes(&mut self) -> u64 {
        self.look();
        self.bytes()
    }

    fn look(&mut self) {
        let now = Resident::now();
        self.shared_by_others = now.all.saturating_sub(now.proportional);
        self.looked_up = Some(Instant::now());
    }
}

impl Default for PeakProportional {
    fn default() -> Self {
        Self::new()
    }
}

fn kibibytes(text: &str, name: &str) -> u64 {
    let line = text.lines().find(|line| line.starts_with(name));
    line.and_then(|l| l.split_whitespace().nth(1)).and_then(|n| n.parse::<u64>().ok()).map_or(0, |n| n * 1024)
}
