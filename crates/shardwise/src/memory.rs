//! Resident memory of a process, from `/proc`.

use std::path::Path;

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
/// sharing takes off now.
pub fn peak_proportional() -> u64 {
    let now = Resident::now();
    peak_of_all().saturating_sub(now.all.saturating_sub(now.proportional))
}

fn kibibytes(text: &str, name: &str) -> u64 {
    let line = text.lines().find(|line| line.starts_with(name));
    line.and_then(|l| l.split_whitespace().nth(1)).and_then(|n| n.parse::<u64>().ok()).map_or(0, |n| n * 1024)
}
