//! Every process that ranks have started, however deep: a rank may be a wrapper's child, and may start others.
//!
//! The launcher becomes the *subreaper* of what it starts: a process whose parent ends becomes the launcher's child
//! instead of init's, so nothing can leave its tree, and `/proc` tells the tree. A mark in the environment tells such
//! orphans from other children of the calling program. (Process groups would not do: a group of its own would cut a rank
//! off from the terminal, and a wrapper may make new ones.)

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use rustix::process::{
    Pid, Signal, WaitOptions, child_subreaper, getpid, kill_process, set_child_subreaper, waitpid,
};

/// The variable that marks what a launcher has started: the marks of all launchers above, with spaces between them.
pub(crate) const MARK_VARIABLE: &str = "SHARDWISE_LAUNCHERS";

/// How many launchers this process runs, and whether it was a subreaper before the first.
static ADOPTING: Mutex<(usize, bool)> = Mutex::new((0, false));

/// A running process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Descendant {
    pub(crate) pid: Pid,
    /// The name of its program, as the kernel keeps it.
    pub(crate) name: String,
    parent: i32,
    is_zombie: bool,
}

/// What the ranks of one launcher have started. While it lives, orphans become this process's children.
#[derive(Debug)]
pub(crate) struct Descendants {
    mark: String,
}

impl Descendants {
    /// Starts to adopt orphans. Where the system does not let it, only what still hangs on a rank is seen.
    pub(crate) fn adopt() -> Self {
        let mut adopting = ADOPTING.lock().unwrap_or_else(PoisonError::into_inner);
        if adopting.0 == 0 {
            adopting.1 = child_subreaper().is_ok_and(|set| set.is_some());
            let _ = set_child_subreaper(Some(getpid()));
        }
        adopting.0 += 1;
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let nanos = now.map_or(0, |now| now.as_nanos());
        Self { mark: format!("{}-{nanos}", getpid()) }
    }

    /// What [`MARK_VARIABLE`] is to be for the ranks.
    pub(crate) fn marks(&self) -> String {
        let above = std::env::var(MARK_VARIABLE).unwrap_or_default();
        format!("{above} {}", self.mark).trim_start().to_string()
    }

    /// The ranks' processes and all below them that run now.
    pub(crate) fn running(&self, ranks: &[Pid]) -> Vec<Descendant> {
        let mut below: HashMap<i32, Vec<Descendant>> = HashMap::new();
        for process in processes() {
            below.entry(process.parent).or_default().push(process);
        }
        let children = below.remove(&getpid().as_raw_pid()).unwrap_or_default();
        let mut found: Vec<Descendant> =
            children.into_iter().filter(|child| ranks.contains(&child.pid) || self.has_mark(child)).collect();
        let mut next = 0;
        while next < found.len() {
            let children = below.remove(&found[next].pid.as_raw_pid());
            found.extend(children.unwrap_or_default());
            next += 1;
        }
        found.retain(|process| !process.is_zombie);
        found
    }

    /// Sends `signal` to all that run; returns whether there are any.
    pub(crate) fn signal(&self, ranks: &[Pid], signal: Signal) -> bool {
        let running = self.running(ranks);
        for process in &running {
            // It may have ended since it was seen, which is as good.
            let _ = kill_process(process.pid, signal);
        }
        !running.is_empty()
    }

    /// Takes the exit status of `orphans`, so that those that have ended go.
    pub(crate) fn bury(orphans: &[Descendant]) {
        for orphan in orphans.iter().filter(|orphan| orphan.parent == getpid().as_raw_pid()) {
            let _ = waitpid(Some(orphan.pid), WaitOptions::NOHANG);
        }
    }

    fn has_mark(&self, process: &Descendant) -> bool {
        let environment = std::fs::read(format!("/proc/{}/environ", process.pid)).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| {
            let marks = variable.strip_prefix(MARK_VARIABLE.as_bytes()).and_then(|v| v.strip_prefix(b"="));
            marks.is_some_and(|marks| marks.split(|b| *b == b' ').any(|mark| mark == self.mark.as_bytes()))
        })
    }
}

impl Drop for Descendants {
    fn drop(&mut self) {
        let mut adopting = ADOPTING.lock().unwrap_or_else(PoisonError::into_inner);
        adopting.0 -= 1;
        if adopting.0 == 0 && !adopting.1 {
            // If it stays a subreaper, orphans come to it instead of to init.
            let _ = set_child_subreaper(None);
        }
    }
}

/// Every process that `/proc` shows; none where there is no `/proc`.
fn processes() -> Vec<Descendant> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    // One that has ended meanwhile cannot be read, and is no longer there.
    numbers.filter_map(|pid| parse(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)).collect()
}

/// A line of `/proc/PID/stat`. The name may hold anything, so it ends at the line's last bracket.
fn parse(stat: &str) -> Option<Descendant> {
    let (head, tail) = stat.rsplit_once(')')?;
    let (pid, name) = head.split_once('(')?;
    let fields: Vec<&str> = tail.split_whitespace().collect();
    Some(Descendant {
        pid: Pid::from_raw(pid.trim().parse().ok()?)?,
        name: name.to_string(),
        parent: fields.get(1)?.parse().ok()?,
        is_zombie: matches!(*fields.first()?, "Z" | "X"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_told_from_its_line() {
        let stat = "42 (a ) b) S 7 42 42 0 -1 4194560 1 0 0";
        let process = parse(stat).expect("a line");
        assert_eq!((process.pid.as_raw_pid(), process.name.as_str()), (42, "a ) b"));
        assert_eq!((process.parent, process.is_zombie), (7, false));
        assert!(parse("42 (gone) Z 7 1").expect("a line").is_zombie);
        assert!(parse("42 (cut short").is_none());
        let own = getpid();
        assert!(processes().iter().any(|p| p.pid == own && !p.is_zombie));
    }
}
