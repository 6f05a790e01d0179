//! Whatever a disk does wrong is an error that says where, what was expected and what was found; nothing is silent.

mod common;

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use common::{Kind, Rig, file_kinds, pattern, temp};
use shardwise_tier::testing::{Fault, Faults};
use shardwise_tier::{Access, IoMethod, ObjectId, RunFolder, Tier, TierConfig, TierError};

/// Four pieces of 16 KiB, of which the last is not whole.
const TILE: usize = 60_001;
const BUFFER: usize = 64 << 10;
const EIO: &str = "Input/output error (os error 5)";

/// A tier in which tiles 0 to 2 of an object are written.
fn written(kind: Kind) -> (Rig, Faults, ObjectId, PathBuf) {
    let faults = Faults::new();
    let mut rig = Rig::with(kind, 3, BUFFER, faults.clone());
    let object = rig.tier.create("a", 3).unwrap();
    for tile in 0..3 {
        rig.write(object, tile, &pattern(tile, TILE)).unwrap();
    }
    rig.tier.sync().unwrap();
    let file = rig.files().remove(0);
    (rig, faults, object, file)
}

/// All that was written before is there, and no buffer is lost.
fn check_intact(mut rig: Rig, object: ObjectId, tiles: &[usize]) {
    for &tile in tiles {
        assert_eq!(rig.read(object, tile).unwrap(), pattern(tile, TILE));
    }
    rig.tier.flush().unwrap();
    assert_eq!(rig.tier.free_buffers(), 3);
}

#[test]
fn a_read_that_the_disk_refuses() {
    for kind in file_kinds() {
        let (mut rig, faults, object, file) = written(kind);
        faults.arm(Fault::ReadError { nth: 0 });
        let error = rig.read(object, 1).unwrap_err();
        let TierError::Io { rank: 3, file: named, access: Access::Read, offset, bytes, cause } = error else {
            panic!("{}: {error}", kind.name)
        };
        assert_eq!((named, cause.as_str()), (file, EIO));
        let start = offset - BUFFER as u64;
        assert!(start.is_multiple_of(16384) && start < BUFFER as u64 && bytes <= 16384, "{offset} {bytes}");
        check_intact(rig, object, &[0, 1, 2]);
    }
}

#[test]
fn a_write_that_the_disk_refuses() {
    for kind in file_kinds() {
        let (mut rig, faults, object, file) = written(kind);
        faults.arm(Fault::WriteError { nth: 1 });
        rig.write(object, 1, &pattern(1, TILE)).unwrap();
        // The next call that can says so, once...
        let error = rig.tier.flush().unwrap_err();
        let (named, offset) = match &error {
            TierError::Io { rank: 3, file, access: Access::Write, offset, cause, .. } if cause == EIO => {
                (file, offset)
            }
            other => panic!("{}: {other}", kind.name),
        };
        assert!(*named == file && *offset >= BUFFER as u64 && *offset < 2 * BUFFER as u64);
        rig.tier.flush().unwrap();
        // ... and every read of what was lost, until it is written again.
        assert_eq!(rig.read(object, 1).unwrap_err(), error);
        assert_eq!(rig.read(object, 1).unwrap_err(), error);
        assert_eq!(rig.read(object, 2).unwrap(), pattern(2, TILE));
        rig.write(object, 1, &pattern(1, TILE)).unwrap();
        check_intact(rig, object, &[0, 1, 2]);
    }
}

#[test]
fn a_failed_write_is_told_by_the_read_behind_it_and_then_not_again() {
    for kind in file_kinds() {
        let (mut rig, faults, object, _) = written(kind);
        let buffer = rig.tier.buffer().unwrap();
        faults.arm(Fault::WriteError { nth: 0 });
        rig.write(object, 0, &pattern(0, TILE)).unwrap();
        let error = rig.tier.start_read(object, 0, buffer).map(drop).unwrap_err();
        assert!(matches!(error, TierError::Io { .. }), "{error}");
        rig.tier.flush().unwrap();
        check_intact(rig, object, &[1, 2]);
    }
}

#[test]
fn a_disk_that_fills_up() {
    for kind in file_kinds() {
        let (mut rig, faults, object, file) = written(kind);
        // In the middle of a tile, off any block.
        faults.arm(Fault::DiskFull { after_bytes: 20_000 });
        rig.write(object, 1, &pattern(1, TILE)).unwrap();
        let error = rig.tier.flush().unwrap_err();
        let TierError::Full { rank: 3, file: named, offset, needed, free } = &error else {
            panic!("{}: {error}", kind.name)
        };
        assert_eq!(*named, file);
        assert!(*offset >= BUFFER as u64 && *needed > 0 && *free > 0, "{error}");
        assert!(rig.read(object, 1).is_err());
        faults.disarm();
        check_intact(rig, object, &[0, 2]);
    }
}

#[test]
fn a_disk_that_is_full_when_space_is_reserved() {
    for kind in file_kinds() {
        let (mut rig, faults, object, _) = written(kind);
        let other = rig.tier.create("other", 2).unwrap();
        faults.arm(Fault::NoReserve);
        let error = rig.write(other, 1, &pattern(1, TILE)).unwrap_err();
        assert!(
            matches!(error, TierError::Full { rank: 3, offset: 0, needed, .. } if needed == (BUFFER + 61_440) as u64),
            "{error}"
        );
        // Nothing was written.
        assert_eq!(rig.read(other, 1).unwrap(), vec![0; BUFFER]);
        check_intact(rig, object, &[0, 1, 2]);
    }
}

#[test]
fn short_reads_and_writes_are_continued() {
    for kind in file_kinds() {
        let (mut rig, faults, object, _) = written(kind);
        for bytes in [1, 512, 4095, 4096, 5000, 8192, 16383] {
            for nth in 0..4 {
                faults.arm(Fault::ShortWrite { nth, bytes });
                faults.arm(Fault::ShortRead { nth, bytes });
            }
            let content = pattern(bytes, TILE);
            rig.write(object, 1, &content).unwrap();
            assert_eq!(rig.read(object, 1).unwrap(), content, "{} {bytes}", kind.name);
            assert_eq!(faults.armed(), 0);
        }
        check_intact(rig, object, &[0, 2]);
    }
}

#[test]
fn a_file_that_ends_early() {
    for kind in file_kinds() {
        let (mut rig, faults, object, file) = written(kind);
        faults.arm(Fault::EndOfFile { nth: 3 });
        let error = rig.read(object, 1).unwrap_err();
        let at_tile = |error: &TierError| matches!(error, TierError::Truncated { rank: 3, file: f, offset, .. } if *f == file && *offset == BUFFER as u64);
        assert!(at_tile(&error), "{error}");
        // And a real one, inside a piece, off any block.
        OpenOptions::new().write(true).open(&file).unwrap().set_len((BUFFER + 21_000) as u64).unwrap();
        let error = rig.read(object, 1).unwrap_err();
        assert!(at_tile(&error), "{error}");
        assert!(
            matches!(error, TierError::Truncated { expected, found: 21_000, .. } if expected == TILE as u64),
            "{}: {error}",
            kind.name
        );
        let error = rig.read(object, 2).unwrap_err();
        assert!(matches!(error, TierError::Truncated { found: 0, .. }), "{error}");
        check_intact(rig, object, &[0]);
    }
}

#[test]
fn a_bit_that_flips() {
    for kind in file_kinds() {
        let (mut rig, faults, object, file) = written(kind);
        faults.arm(Fault::FlipBit { nth: 2, bit: 12_345 });
        let corrupt = |error: &TierError| {
            matches!(error, TierError::Corrupt { rank: 3, file: f, offset, bytes, expected, found }
                if *f == file && *offset == BUFFER as u64 && *bytes == TILE as u64 && expected != found)
        };
        let error = rig.read(object, 1).unwrap_err();
        assert!(corrupt(&error), "{}: {error}", kind.name);
        // And on the disk: the last byte of the tile.
        let at = (BUFFER + TILE - 1) as u64;
        let raw = OpenOptions::new().read(true).write(true).open(&file).unwrap();
        let mut byte = [0];
        raw.read_exact_at(&mut byte, at).unwrap();
        raw.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
        raw.sync_all().unwrap();
        let error = rig.read(object, 1).unwrap_err();
        assert!(corrupt(&error), "{}: {error}", kind.name);
        check_intact(rig, object, &[0, 2]);
    }
}

#[test]
fn tiles_that_have_changed_places() {
    for kind in file_kinds() {
        let (mut rig, _, object, file) = written(kind);
        let raw = OpenOptions::new().read(true).write(true).open(&file).unwrap();
        let mut bytes = vec![0; TILE];
        raw.read_exact_at(&mut bytes, 0).unwrap();
        raw.write_all_at(&bytes, BUFFER as u64).unwrap();
        raw.sync_all().unwrap();
        assert!(matches!(rig.read(object, 1).unwrap_err(), TierError::Corrupt { .. }), "{}", kind.name);
        check_intact(rig, object, &[0, 2]);
    }
}

#[test]
fn a_file_that_is_deleted() {
    for kind in file_kinds() {
        let (mut rig, _, object, file) = written(kind);
        std::fs::remove_file(&file).unwrap();
        let expected = TierError::Deleted { rank: 3, file, offset: 2 * BUFFER as u64 };
        assert_eq!(rig.read(object, 2).unwrap_err(), expected, "{}", kind.name);
        assert_eq!(rig.write(object, 2, &[1]).unwrap_err(), expected);
        // A new object of another name is made as if nothing had happened.
        let other = rig.tier.create("b", 1).unwrap();
        rig.write(other, 0, &pattern(0, TILE)).unwrap();
        check_intact(rig, other, &[0]);
    }
}

#[test]
fn a_folder_that_is_deleted() {
    for kind in file_kinds() {
        let (mut rig, _, object, file) = written(kind);
        std::fs::remove_dir_all(rig.run.as_ref().unwrap().path()).unwrap();
        let expected = TierError::Deleted { rank: 3, file, offset: 0 };
        assert_eq!(rig.read(object, 0).unwrap_err(), expected, "{}", kind.name);
        assert!(matches!(rig.tier.create("b", 1).unwrap_err(), TierError::Create { rank: 3, .. }));
    }
}

#[test]
fn a_system_without_io_uring() {
    let kind = |method| Kind { name: "", method: Some(method), direct: true };
    let faults = Faults::new().without_uring();
    let dir = temp();
    let run = RunFolder::claim(dir.path(), "test").unwrap();
    let config = |method| common::config(kind(method), Some(run.path()), 2, BUFFER);
    let error = Tier::open_with_faults(config(IoMethod::Uring), faults.clone()).unwrap_err();
    assert!(
        matches!(&error, TierError::NoUring { rank: 3, cause } if cause.contains("not permitted")),
        "{error}"
    );
    let tier = Tier::open_with_faults(config(IoMethod::Auto), faults).unwrap();
    assert_eq!((tier.method(), tier.is_direct()), ("threads", true));
    assert!(tier.why().unwrap().contains("io_uring cannot be used"), "{:?}", tier.why());
}

#[test]
fn a_file_system_without_direct_io() {
    for kind in file_kinds().filter(|kind| kind.direct) {
        let mut rig = Rig::with(kind, 2, BUFFER, Faults::new().without_direct());
        assert!(!rig.tier.is_direct());
        assert!(rig.tier.why().unwrap().contains("O_DIRECT does not work"), "{:?}", rig.tier.why());
        let object = rig.tier.create("a", 1).unwrap();
        rig.write(object, 0, &pattern(0, TILE)).unwrap();
        assert_eq!(rig.read(object, 0).unwrap(), pattern(0, TILE));
    }
}

#[test]
fn settings_that_cannot_work_are_refused() {
    let kind = common::KINDS[1];
    type Change = fn(&mut shardwise_tier::TierConfig);
    let cases: [(Change, &str); 6] = [
        (|c| c.buffer_count = 0, "there are 0 buffers"),
        (|c| c.buffer_bytes = 5000, "such as 8192"),
        (|c| c.io.block_bytes = 0, "such as 4096"),
        (|c| c.io.queue_depth = 0, "must be 1 to 4096"),
        (|c| c.io.threads = 1000, "must be 1 to 256"),
        (|c| c.buffer_count = usize::MAX, "more than can be addressed"),
    ];
    let dir = temp();
    for (change, words) in cases {
        let mut config = common::config(kind, Some(dir.path()), 2, BUFFER);
        change(&mut config);
        let error = Tier::open(config).unwrap_err();
        assert!(matches!(error, TierError::Config { rank: 3, .. }), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
    let mut config = common::config(kind, Some(dir.path()), 2, BUFFER);
    config.buffer_bytes = 1 << 46;
    let error = Tier::open(config).unwrap_err();
    assert!(matches!(error, TierError::Memory { rank: 3, bytes, .. } if bytes == 1 << 47), "{error}");
}

#[test]
fn a_tier_may_go_before_what_it_has_lent() {
    for kind in file_kinds() {
        let (mut rig, _, object, _) = written(kind);
        let buffer = rig.tier.buffer().unwrap();
        let reading = rig.tier.start_read(object, 0, buffer).unwrap();
        let mut buffer = rig.tier.buffer().unwrap();
        rig.write(object, 1, &pattern(7, TILE)).unwrap();
        let Rig { tier, run, dir } = rig;
        drop(tier);
        buffer.as_mut_slice().fill(7);
        assert!(buffer.as_slice().iter().all(|&b| b == 7));
        drop((reading, buffer, run));
        assert_eq!(common::files(dir.path()).len(), 0);
    }
}

/// A disk that does not answer is an error within the deadline, not a hang.
#[test]
fn a_disk_that_does_not_answer() {
    let folder = temp();
    let run = RunFolder::claim(folder.path(), "late").unwrap();
    let kind = file_kinds().next().unwrap();
    let config = common::config(kind, Some(run.path()), 3, BUFFER);
    let deadline = Duration::from_millis(30);
    let faults = Faults::new().with_delays(5, Duration::from_secs(3));
    let mut tier = Tier::open_with_faults(TierConfig { deadline, ..config }, faults).unwrap();
    let object = tier.create("a", 8).unwrap();
    let begun = Instant::now();
    let write = |tile: usize| {
        let buffer = tier.buffer()?;
        tier.start_write(object, tile, buffer)?;
        tier.flush()
    };
    let error = (0..8).map(write).find_map(Result::err);
    let Some(TierError::Late { rank: 3, access: Access::Write, offset, waited, .. }) = error else {
        panic!("{error:?}")
    };
    assert!(waited == deadline && offset.is_multiple_of(BUFFER as u64));
    assert!(begun.elapsed() < Duration::from_secs(20));
}
