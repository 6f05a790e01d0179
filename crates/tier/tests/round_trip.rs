//! What is stored comes back bit for bit, wherever it rests, through no more buffers than there are.

mod common;

use common::{KINDS, Rig, file_kinds, filled, pattern};
use shardwise_tier::{Buffer, IoConfig, IoMethod, Reading, Tier, TierError, measure};

const SIZES: [usize; 6] = [0, 1, 511, 512, 513, (1 << 20) + 1];
const BUFFER: usize = 64 << 10;

#[test]
fn sizes_round_trip_bit_for_bit() {
    for kind in KINDS {
        let mut rig = Rig::new(kind, 3, BUFFER);
        let mut objects = Vec::new();
        for (index, size) in SIZES.into_iter().enumerate() {
            let bytes = pattern(index, size);
            let tiles = size.div_ceil(BUFFER).max(1);
            let object = rig.tier.create(&format!("blocks.{index}.weight"), tiles).unwrap();
            for (tile, part) in chunks(&bytes).enumerate() {
                rig.write(object, tile, part).unwrap();
            }
            objects.push((object, bytes));
        }
        // Twice: once perhaps right behind the write, and once when it has ended.
        for _ in 0..2 {
            for (object, bytes) in &objects {
                for (tile, part) in chunks(bytes).enumerate() {
                    assert_eq!(rig.read(*object, tile).unwrap(), part, "{} {tile}", kind.name);
                }
            }
            rig.tier.sync().unwrap();
        }
        let total: usize = SIZES.iter().sum();
        let stats = rig.tier.stats();
        assert_eq!(
            (stats.written_bytes, stats.read_bytes),
            (total as u64, 2 * total as u64),
            "{}",
            kind.name
        );
        let held = if kind.method.is_none() { total as u64 } else { 0 };
        assert_eq!(rig.tier.held_bytes(), held, "{}", kind.name);
        assert_eq!(rig.tier.free_buffers(), 3);
    }
}

fn chunks(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    (0..bytes.len().div_ceil(BUFFER).max(1))
        .map(move |tile| &bytes[tile * BUFFER..bytes.len().min((tile + 1) * BUFFER)])
}

#[test]
fn a_tile_is_read_right_behind_its_write() {
    for kind in KINDS {
        let mut rig = Rig::new(kind, 2, BUFFER);
        let object = rig.tier.create("a", 2).unwrap();
        for round in 0..50 {
            let bytes = pattern(round, BUFFER - 7 * round);
            rig.write(object, 1, &bytes).unwrap();
            assert_eq!(rig.read(object, 1).unwrap(), bytes, "{}", kind.name);
        }
    }
}

#[test]
fn a_read_that_began_before_a_write_brings_what_was_there() {
    for kind in KINDS {
        let mut rig = Rig::new(kind, 3, BUFFER);
        let object = rig.tier.create("a", 1).unwrap();
        let (old, new) = (pattern(1, BUFFER), pattern(2, BUFFER));
        rig.write(object, 0, &old).unwrap();
        let buffer = rig.tier.buffer().unwrap();
        let reading = rig.tier.start_read(object, 0, buffer).unwrap();
        rig.write(object, 0, &new).unwrap();
        assert_eq!(rig.tier.wait(reading).unwrap().as_slice(), old, "{}", kind.name);
        assert_eq!(rig.read(object, 0).unwrap(), new, "{}", kind.name);
    }
}

#[test]
fn fresh_tiles_are_zeros_and_cost_nothing() {
    for kind in KINDS {
        let mut rig = Rig::new(kind, 1, BUFFER);
        let object = rig.tier.create("a", 5).unwrap();
        let mut buffer = filled(rig.tier.buffer().unwrap(), &pattern(0, BUFFER));
        buffer.set_len(1000);
        let reading = rig.tier.start_read(object, 4, buffer).unwrap();
        let buffer = rig.tier.wait(reading).unwrap();
        assert_eq!(buffer.as_slice(), [0; 1000], "{}", kind.name);
        assert_eq!(buffer.f32s(), [0.0; 250]);
        drop(buffer);
        let stats = rig.tier.stats();
        assert_eq!((stats.reads, stats.read_bytes, rig.tier.held_bytes()), (0, 0, 0), "{}", kind.name);
    }
}

#[test]
fn a_file_holds_the_bytes_and_zeros_up_to_the_next_block() {
    for kind in file_kinds() {
        let mut rig = Rig::new(kind, 1, BUFFER);
        let object = rig.tier.create("a", 2).unwrap();
        rig.write(object, 1, &pattern(0, BUFFER)).unwrap();
        let bytes = pattern(1, 5000);
        rig.write(object, 0, &bytes).unwrap();
        rig.tier.sync().unwrap();
        let stored = std::fs::read(&rig.files()[0]).unwrap();
        assert_eq!(stored[..5000], bytes, "{}", kind.name);
        assert_eq!(stored[5000..8192], [0; 3192], "{}", kind.name);
        assert_eq!(stored[BUFFER..], pattern(0, BUFFER), "{}", kind.name);
    }
}

#[test]
fn buffers_are_aligned_and_never_more_than_there_are() {
    for kind in KINDS {
        let mut rig = Rig::new(kind, 3, BUFFER);
        let object = rig.tier.create("a", 8).unwrap();
        let held: Vec<_> = (0..3).map(|_| rig.tier.buffer().unwrap()).collect();
        assert!(held.iter().all(|b| b.as_slice().as_ptr().addr().is_multiple_of(4096)));
        assert!(rig.tier.try_buffer().unwrap().is_none());
        let error = rig.tier.buffer().unwrap_err();
        let expected = TierError::NoBuffer { rank: 3, count: 3, bytes: BUFFER, reading: 0, held: 3 };
        assert_eq!(error, expected, "{}", kind.name);
        assert!(error.to_string().contains("raise offload.buffer_count"), "{error}");
        // Buffers of writes come back by themselves, and waiting for one suffices.
        for (tile, buffer) in held.into_iter().enumerate() {
            rig.tier.start_write(object, tile, buffer).unwrap();
        }
        for tile in 0..20 {
            let buffer = rig.tier.buffer().unwrap();
            rig.tier.start_write(object, tile % 8, buffer).unwrap();
        }
        rig.tier.flush().unwrap();
        assert_eq!(rig.tier.free_buffers(), 3, "{}", kind.name);
    }
}

#[test]
fn reads_that_nobody_waits_for_give_their_buffers_back() {
    for kind in KINDS {
        let mut rig = Rig::new(kind, 2, BUFFER);
        let object = rig.tier.create("a", 2).unwrap();
        rig.write(object, 0, &pattern(0, BUFFER)).unwrap();
        rig.write(object, 1, &pattern(1, BUFFER)).unwrap();
        for round in 0..20 {
            let mut read = |tile| {
                let buffer = rig.tier.buffer().unwrap();
                rig.tier.start_read(object, tile, buffer).unwrap()
            };
            let (first, second) = (read(0), read(1));
            if round == 0 {
                let error = rig.tier.buffer().unwrap_err();
                let reading = if kind.method.is_some() { 2 } else { 0 };
                assert!(
                    matches!(error, TierError::NoBuffer { reading: found, .. } if found == reading),
                    "{error}"
                );
            }
            rig.tier.cancel(first);
            drop(second);
        }
        let both = [rig.tier.buffer().unwrap(), rig.tier.buffer().unwrap()];
        drop(both);
        assert_eq!(rig.tier.free_buffers(), 2, "{}", kind.name);
    }
}

#[test]
fn what_is_not_there_is_refused() {
    for kind in KINDS {
        let mut rig = Rig::new(kind, 2, BUFFER);
        let mut other = Rig::new(kind, 2, BUFFER);
        let object = rig.tier.create("a", 2).unwrap();
        let usage = |error: TierError, what: &str| {
            assert!(matches!(&error, TierError::Usage { rank: 3, .. }), "{error}");
            assert!(error.to_string().contains(what), "{error}");
        };
        usage(rig.tier.create("a", 1).unwrap_err(), "already stored");
        usage(rig.write(object, 2, &[1]).unwrap_err(), "there is no tile 2");
        usage(rig.read(object, 9).unwrap_err(), "there is no tile 9");
        let foreign = other.tier.buffer().unwrap();
        usage(rig.tier.start_write(object, 0, foreign).unwrap_err(), "of another tier");
        rig.tier.remove(object);
        rig.tier.remove(object);
        usage(rig.read(object, 0).unwrap_err(), "not stored in this tier");
        let again = rig.tier.create("a", 1).unwrap();
        assert_ne!(again, object);
        usage(rig.write(object, 0, &[1]).unwrap_err(), "not stored in this tier");
        assert_eq!((rig.tier.free_buffers(), other.tier.free_buffers()), (2, 2));
    }
}

#[test]
fn files_and_folders_go_when_the_tier_goes() {
    for kind in file_kinds() {
        let mut rig = Rig::new(kind, 2, BUFFER);
        assert_eq!(rig.tier.method(), kind.name.split(' ').next().unwrap());
        assert_eq!(rig.tier.is_direct(), kind.direct);
        assert_eq!(rig.tier.why(), None);
        let object = rig.tier.create("blocks.0/weight", 2).unwrap();
        let name = rig.files()[0].file_name().unwrap().to_str().unwrap().to_string();
        assert!(name.starts_with("blocks.0_weight-"), "{name}");
        rig.write(object, 0, &pattern(0, BUFFER)).unwrap();
        rig.tier.create("other", 1).unwrap();
        rig.tier.remove(object);
        assert_eq!(rig.files().len(), 1);
        let Rig { tier, run, dir } = rig;
        drop(tier);
        assert!(!run.as_ref().unwrap().path().join("rank-3").exists());
        drop(run);
        assert_eq!(common::files(dir.path()).len(), 0, "{}", kind.name);
    }
}

#[test]
fn a_disk_is_measured_and_left_as_it_was() {
    let dir = common::temp();
    for method in [IoMethod::Auto, IoMethod::Threads] {
        let io = IoConfig { method, ..IoConfig::default() };
        // A last tile that is shorter, and more tiles than buffers.
        let found = measure::throughput(dir.path(), io, (10 << 20) + 5, 1 << 20, 3).unwrap();
        assert!(found.read_bytes_per_second > 0.0 && found.write_bytes_per_second > 0.0, "{found:?}");
    }
    assert_eq!(common::files(dir.path()).len(), 0);
}

#[test]
fn a_tier_moves_between_threads() {
    fn is_send<T: Send>() {}
    is_send::<(Tier, Reading, Buffer)>();
    for kind in KINDS {
        let mut rig = Rig::new(kind, 4, 1 << 20);
        let object = rig.tier.create("a", 16).unwrap();
        // Each thread ends with a write in flight.
        for tile in 0..16 {
            let write = move || {
                rig.write(object, tile, &pattern(tile, 1 << 20)).unwrap();
                rig
            };
            rig = std::thread::spawn(write).join().unwrap();
        }
        for tile in 0..16 {
            assert!(rig.read(object, tile).unwrap() == pattern(tile, 1 << 20), "{}", kind.name);
        }
    }
}
