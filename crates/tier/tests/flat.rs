//! What a tier holds does not grow: descriptors, bytes on disk and memory, over a thousand swaps; and it sleeps when it
//! waits. One test, since it looks at the whole process.

mod common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use common::{KINDS, Rig, pattern};
use shardwise_tier::testing::Faults;

const BUFFER: usize = 64 << 10;
const OBJECTS: usize = 5;
/// A thousand swaps: 20 times 10 rounds of 5 objects.
const ROUNDS: usize = 10;

#[derive(Debug, PartialEq, Clone, Copy)]
struct Held {
    descriptors: usize,
    on_disk: u64,
    names: usize,
}

fn held(folder: &Path) -> Held {
    let (mut on_disk, mut names) = (0, 0);
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for path in common::files(&folder) {
            let found = fs::symlink_metadata(&path).unwrap();
            names += 1;
            if found.is_dir() {
                folders.push(path);
            } else {
                on_disk += found.blocks() * 512;
            }
        }
    }
    Held { descriptors: fs::read_dir("/proc/self/fd").unwrap().count(), on_disk, names }
}

fn resident_bytes() -> u64 {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// Of all threads, user and system, in hundredths of a second.
fn processor_time() -> u64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// Objects are made, written and read again and again, and removed; what was held when they were all there.
fn swaps(rig: &mut Rig, seed: usize) -> Held {
    let objects: Vec<_> = (0..OBJECTS).map(|i| rig.tier.create(&format!("blocks.{i}"), 2).unwrap()).collect();
    for round in 0..ROUNDS {
        for (index, &object) in objects.iter().enumerate() {
            rig.write(object, 0, &pattern(seed + round + index, BUFFER)).unwrap();
            rig.write(object, 1, &pattern(seed + round + index, 999)).unwrap();
        }
        for (index, &object) in objects.iter().enumerate() {
            assert_eq!(rig.read(object, 0).unwrap(), pattern(seed + round + index, BUFFER));
        }
    }
    rig.tier.flush().unwrap();
    let held = held(rig.dir.path());
    for object in objects {
        rig.tier.remove(object);
    }
    held
}

#[test]
fn a_thousand_swaps_leave_nothing_behind_and_waiting_costs_nothing() {
    let before = resident_bytes();
    for kind in KINDS {
        let mut rig = Rig::new(kind, 3, BUFFER);
        let first = (swaps(&mut rig, 0), held(rig.dir.path()));
        for seed in 1..20 {
            assert_eq!(swaps(&mut rig, seed), first.0, "{} {seed}", kind.name);
        }
        assert_eq!(held(rig.dir.path()), first.1, "{}", kind.name);
        assert_eq!(rig.tier.held_bytes(), 0);
    }
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 8 << 20, "{grown} bytes more than at first");

    for kind in KINDS {
        let delays = Faults::new().with_delays(1, Duration::from_millis(200));
        let mut rig = Rig::with(kind, 1, BUFFER, delays);
        let object = rig.tier.create("a", 1).unwrap();
        let busy = processor_time();
        for _ in 0..3 {
            rig.write(object, 0, &pattern(0, BUFFER)).unwrap();
            rig.read(object, 0).unwrap();
        }
        std::thread::sleep(Duration::from_millis(300));
        let busy = processor_time() - busy;
        // Whoever spins takes about 90.
        assert!(busy <= 30, "{}: {busy} hundredths of a second", kind.name);
        if kind.method.is_some() {
            let stats = rig.tier.stats();
            // The two are measured apart, and this process may stand still between them.
            assert!(stats.wait.min(stats.busy) >= Duration::from_millis(20), "{stats:?}");
            assert!((0.0..=1.0).contains(&stats.overlap()), "{stats:?}");
        }
    }
}
