//! Collectives between threads: breadth over world sizes, sizes and orders, and every kind of disagreement.

mod common;

use std::time::{Duration, Instant};

use common::{DEADLINE, assert_same, exercise, values};
use shardwise_comm::{CommError, HostBuffer, ProcessGroup, threads};
use shardwise_core::seed::SplitMix64;

#[test]
fn every_collective_for_many_worlds_and_sizes() {
    for ranks in [1, 2, 3, 4, 5, 8] {
        threads::run(ranks, DEADLINE, |group| {
            for (salt, numel) in [0, 1, 2, 3, 17, 1000, 1025, 5000].into_iter().enumerate() {
                exercise(&group, numel, salt as u64);
            }
        })
        .expect("a world");
    }
}

#[test]
fn messages_larger_than_the_staging_buffer_travel_in_pieces() {
    threads::run(3, DEADLINE, |group| {
        let numel = (1 << 20) + 77;
        let part = values(group.rank(), numel, 5);
        let mut all = vec![0.0; numel * 3];
        group.all_gather("large", &part, &mut all).expect("gathered");
        for rank in 0..3 {
            assert_same(&all[rank * numel..(rank + 1) * numel], &values(rank, numel, 5), "a part");
        }
        let mut own = vec![0.0; numel];
        group.reduce_scatter("large", &all, &mut own).expect("reduced");
        let at = group.rank() * numel;
        let want: Vec<f32> = all[at..at + numel].iter().map(|x| (x + x) + x).collect();
        assert_same(&own, &want, "the sum of three equal buffers");
    })
    .expect("a world");
}

/// Reference test 10: 128 ranks gather eight tensors, also after a split into groups of 8.
#[test]
fn a_hundred_and_twenty_eight_ranks() {
    threads::run(128, DEADLINE, |group| {
        let eight = group.split((group.rank() / 8) as u64, 0).expect("split");
        assert_eq!(eight.members(), (group.rank() / 8 * 8..group.rank() / 8 * 8 + 8).collect::<Vec<_>>());
        for (salt, numel) in [1usize, 3, 17 * 257 / 16, 64 * 297 / 8, 5, 31, 64, 100].into_iter().enumerate()
        {
            for group in [&group, &eight] {
                let mut part = group.allocate(numel).expect("memory");
                let own = group.members()[group.rank()];
                part.writable().expect("not lent").copy_from_slice(&values(own, numel, salt as u64));
                let dest = HostBuffer::new(numel * group.size()).expect("memory");
                let (dest, result) = group.start_all_gather("tensor", &part, dest).wait();
                result.expect("gathered");
                for (at, &member) in group.members().iter().enumerate() {
                    let got = &dest.as_slice()[at * numel..(at + 1) * numel];
                    assert_same(got, &values(member, numel, salt as u64), "a part");
                }
            }
        }
    })
    .expect("a world");
}

#[test]
fn sub_groups_are_ordered_by_key_and_independent() {
    threads::run(6, DEADLINE, |world| {
        let rank = world.rank();
        let odd = world.split((rank % 2) as u64, (10 - rank) as u64).expect("split");
        let want: Vec<usize> = if rank % 2 == 0 { vec![4, 2, 0] } else { vec![5, 3, 1] };
        assert_eq!(odd.members(), want);
        exercise(&odd, 33, 1);
        let alone = odd.split(rank as u64, 0).expect("split");
        assert_eq!(alone.size(), 1);
        exercise(&alone, 9, 2);
        let again = world.split(0, rank as u64).expect("split");
        exercise(&again, 12, 3);
        exercise(&odd, 4, 4);
    })
    .expect("a world");
}

/// Reported bug J7: random sizes and random delays, 4 ranks.
#[test]
fn ten_thousand_collectives_with_random_delays() {
    threads::run(4, DEADLINE, |group| {
        let mut shared = SplitMix64::new(11);
        let mut own = SplitMix64::new(group.rank() as u64);
        let mut part = group.allocate(64).expect("memory");
        let mut source = Some(group.allocate(256).expect("memory"));
        let mut dest = Some(HostBuffer::new(256).expect("memory"));
        for i in 0..10_000u32 {
            if own.below(50) == 0 {
                std::thread::sleep(Duration::from_micros(own.below(300)));
            }
            match shared.below(4) {
                0 => {
                    part.writable().expect("released").fill((i + group.rank() as u32) as f32);
                    let gather = group.start_all_gather("p", &part, dest.take().expect("a buffer"));
                    let (buffer, result) = gather.wait();
                    result.expect("gathered");
                    assert!((0..4).all(|r| buffer.as_slice()[r * 64 + 63] == (i + r as u32) as f32));
                    dest = Some(buffer);
                }
                1 => {
                    let mut buffer = source.take().expect("a buffer");
                    buffer.writable().expect("released").fill(i as f32);
                    let mut reduce = group.start_reduce_scatter("s", buffer, 64);
                    let mut sum = [0.0; 64];
                    reduce.sum_into(&mut sum, false).expect("reduced");
                    assert!(sum.iter().all(|s| *s == 4.0 * i as f32));
                    source = reduce.into_source();
                }
                2 => {
                    let n = shared.below(300) as usize;
                    let mut all = vec![0.0; n * 4];
                    group.all_gather("a", &vec![i as f32; n], &mut all).expect("gathered");
                    assert!(all.iter().all(|x| *x == i as f32));
                }
                _ => group.barrier("b").expect("everyone came"),
            }
        }
    })
    .expect("a world");
}

#[test]
fn a_dropped_operation_neither_blocks_nor_confuses_its_peers() {
    threads::run(3, DEADLINE, |group| {
        for _ in 0..100 {
            let part = group.allocate(10).expect("memory");
            let dropped = group.start_all_gather("dropped", &part, HostBuffer::new(30).expect("memory"));
            drop(dropped);
            drop(part);
            drop(group.start_reduce_scatter("dropped", group.allocate(30).expect("memory"), 10));
        }
        exercise(&group, 10, 3);
    })
    .expect("a world");
}

/// The errors of every rank of a world in which `body` fails on all.
fn failures(ranks: usize, body: impl Fn(&ProcessGroup) -> Result<(), CommError> + Sync) -> Vec<CommError> {
    let begun = Instant::now();
    let results = threads::run(ranks, Duration::from_secs(20), |group| body(&group).expect_err("must fail"));
    assert!(begun.elapsed() < Duration::from_secs(15), "no rank waits for the deadline");
    results.expect("a world")
}

#[test]
fn different_calls_fail_on_every_rank_and_name_both_sides() {
    type Call = fn(&ProcessGroup) -> Result<(), CommError>;
    let gather: Call = |g| g.all_gather("blocks.0", &[1.0], &mut vec![0.0; g.size()]);
    let other_unit: Call = |g| g.all_gather("blocks.1", &[1.0], &mut vec![0.0; g.size()]);
    let other_size: Call = |g| g.all_gather("blocks.0", &[1.0, 2.0], &mut vec![0.0; 2 * g.size()]);
    let other_kind: Call = |g| g.reduce_scatter("blocks.0", &vec![1.0; g.size()], &mut [0.0]);
    let barrier: Call = |g| g.barrier("end of step");
    let cases: &[(Call, &str, &str)] = &[
        (other_unit, "all_gather of `blocks.0`", "all_gather of `blocks.1`"),
        (other_size, "(3 x f32)", "(6 x f32)"),
        (other_kind, "all_gather of `blocks.0`", "reduce_scatter of `blocks.0`"),
        (barrier, "all_gather of `blocks.0`", "barrier of `end of step`"),
    ];
    for (odd, left, right) in cases {
        let errors = failures(3, |group| {
            group.barrier("start")?;
            if group.rank() == 1 {
                odd(group)?
            } else {
                gather(group)?
            }
            // A rank may be done before it can know; its next call fails.
            group.barrier("next")
        });
        for error in &errors {
            let text = error.to_string();
            assert!(matches!(error, CommError::Mismatch(_)), "{text}");
            assert!(text.contains(left) && text.contains(right) && text.contains("rank 1 "), "{text}");
        }
        assert!(errors.iter().all(|e| e == &errors[0]), "every rank reports the same");
    }
}

#[test]
fn broadcasts_from_different_roots_fail() {
    let errors = failures(2, |group| {
        group.broadcast("config", &mut [0; 4], group.rank())?;
        group.barrier("next")
    });
    for error in errors {
        let text = error.to_string();
        assert!(text.contains("group rank 0") && text.contains("group rank 1"), "{text}");
    }
}

#[test]
fn a_rank_that_leaves_early_is_named() {
    let results = threads::run(3, Duration::from_secs(20), |group| {
        if group.rank() == 2 { Ok(()) } else { group.barrier("forward") }
    })
    .expect("a world");
    for error in results[..2].iter().map(|r| r.as_ref().expect_err("rank 2 never came")) {
        assert!(matches!(error, CommError::RankLost { rank: 2, .. }), "{error}");
        assert!(error.to_string().contains("barrier of `forward`"), "{error}");
    }
}

#[test]
fn a_rank_that_panics_is_named() {
    let world = threads::world(2, Duration::from_secs(20)).expect("a world");
    let mut world = world.into_iter().map(ProcessGroup::world);
    let (first, second) = (world.next().expect("rank 0"), world.next().expect("rank 1"));
    let panicking = std::thread::spawn(move || {
        let _group = second;
        std::panic::resume_unwind(Box::new("on purpose"));
    });
    let error = first.barrier("forward").expect_err("rank 1 panicked");
    assert_eq!(error, CommError::RankLost { rank: 1, how: "it panicked".into() });
    assert!(panicking.join().is_err());
}

#[test]
fn a_late_rank_is_named_after_the_deadline() {
    let results = threads::run(2, Duration::from_millis(300), |group| {
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_millis(900));
        }
        group.barrier("forward")
    })
    .expect("a world");
    let first = results[0].as_ref().expect_err("rank 1 was late").to_string();
    assert!(
        first.contains("rank 0 waited 300ms for rank 1") && first.contains("barrier of `forward`"),
        "{first}"
    );
    let second = results[1].as_ref().expect_err("the world has failed").to_string();
    assert!(second.contains("rank 0 failed"), "{second}");
}

#[test]
fn different_settings_are_refused_naming_the_first_difference() {
    let errors = failures(3, |group| {
        let lr = if group.rank() == 2 { "0.5" } else { "0.1" };
        let settings = [("train.steps", "10"), ("train.lr", lr)].map(|(n, v)| (n.to_string(), v.to_string()));
        group.check_agreement("configurations", &settings)
    });
    for error in errors {
        let text = error.to_string();
        assert!(text.contains("train.lr is `0.1` on rank 0 but `0.5` on rank 2"), "{text}");
    }
    let missing = failures(2, |group| {
        let mut settings = vec![("a".to_string(), "1".to_string())];
        if group.rank() == 1 {
            settings.push(("b".into(), "2".into()));
        }
        group.check_agreement("configurations", &settings)
    });
    assert!(missing[0].to_string().contains("b is unset on rank 0 but `2` on rank 1"), "{}", missing[0]);
}

#[test]
fn wrong_lengths_are_the_callers_error() {
    threads::run(1, DEADLINE, |group| {
        let error = group.all_gather("x", &[1.0, 2.0], &mut [0.0; 3]).expect_err("3 is not 2").to_string();
        assert!(error.contains("dest has 3 elements, all parts have 2"), "{error}");
        let error = group.broadcast("x", &mut [0], 1).expect_err("no rank 1").to_string();
        assert!(error.contains("from rank 1 of 1"), "{error}");
    })
    .expect("a world");
    assert!(threads::world(0, DEADLINE).is_err());
}

/// A rank without a source contributes zeros; the others need not know which.
#[test]
fn a_reduction_to_which_some_contribute_nothing() {
    threads::run(4, DEADLINE, |group| {
        for givers in [0b0000u32, 0b0001, 0b1010, 0b0111, 0b1111] {
            let gives = |rank: usize| givers >> rank & 1 == 1;
            let source = gives(group.rank()).then(|| {
                let mut source = group.allocate(4 * 33).expect("memory");
                source.writable().expect("not lent").copy_from_slice(&values(group.rank(), 4 * 33, 9));
                source
            });
            let parts: Vec<Vec<f32>> =
                (0..4).map(|r| if gives(r) { values(r, 4 * 33, 9) } else { vec![0.0; 4 * 33] }).collect();
            let mut pending = group.start_reduce_scatter("some", source, 33);
            let mut sum = vec![f32::NAN; 33];
            pending.sum_into(&mut sum, false).expect("reduced");
            let own = group.rank() * 33;
            let want: Vec<f32> = (own..own + 33).map(|i| common::plain_sum(&parts, i)).collect();
            assert_same(&sum, &want, "missing contributions are zeros");
            assert_eq!(pending.into_source().is_some(), gives(group.rank()));
        }
    })
    .expect("a world");
}

/// A loan can be read by each rank at its own pace, in any order, while others do something else.
#[test]
fn loans_are_read_whenever_a_rank_needs_them() {
    threads::run(3, DEADLINE, |group| {
        let mut part = group.allocate(100).expect("memory");
        for round in 0..50u64 {
            part.writable().expect("every peer has finished").copy_from_slice(&values(
                group.rank(),
                100,
                round,
            ));
            let loan = group.lend("parameters", &part, part.numel() * 4).expect("lent");
            let mut random = SplitMix64::new(round * 3 + group.rank() as u64);
            for _ in 0..random.below(5) {
                let start = random.below(90) as usize;
                let mut dest = vec![0.0; 3 * 10];
                loan.gather(start..start + 10, &mut dest, shardwise_core::Precision::F32).expect("gathered");
                for peer in 0..3 {
                    let want = &values(peer, 100, round)[start..start + 10];
                    assert_same(&dest[peer * 10..(peer + 1) * 10], want, "a peer's range");
                }
            }
            loan.finish();
        }
    })
    .expect("a world");
}

/// Ranks that have started different operations find out without ending the world, and go on together.
#[test]
fn different_orders_can_be_noticed_and_left_behind() {
    threads::run(3, DEADLINE, |world| {
        let group = world.split(0, world.rank() as u64).expect("split");
        for round in 0..40 {
            let rank = group.rank();
            let labels: Vec<String> = (0..1 + (rank + round) % 3).map(|i| format!("unit {i}")).collect();
            let mut agreed = true;
            let mut pending = Vec::new();
            for label in labels.iter().chain([&"end".to_string()]) {
                if agreed {
                    let source = group.allocate(30).expect("memory");
                    let reduce = group.start_reduce_scatter(label, source, 10);
                    agreed = reduce.agrees().expect("alive");
                    if agreed {
                        let mut reduce = reduce;
                        reduce.sum_into(&mut [0.0; 10], false).expect("all did the same");
                    } else {
                        pending.push(reduce.into_source());
                    }
                }
            }
            assert!(!agreed, "the ranks differ in every round");
            group.realign(&world).expect("realigned");
            exercise(&group, 7, round as u64);
        }
    })
    .expect("a world");
}

/// Channel numbers are used again once the groups that had them are gone, by all members or by some of them with others.
#[test]
fn groups_come_and_go() {
    threads::run(4, DEADLINE, |world| {
        let mut kept = Vec::new();
        for turn in 0..300u64 {
            let halves = world.split(world.rank() as u64 / 2 + turn % 2, 0).expect("a number is free again");
            // Groups go on for different times, so that their numbers have different pasts.
            for _ in 0..(turn * 7 + halves.members()[0] as u64) % 40 {
                exercise(&halves, 3, turn);
            }
            world.barrier("turn").expect("all");
            if turn % 100 == 0 {
                kept.push(halves);
            } else {
                let pair = halves.split(0, world.rank() as u64).expect("a group of a group");
                exercise(&pair, 5, turn);
                world.barrier("pair").expect("all");
            }
        }
        kept.iter().for_each(|group| exercise(group, 9, 1));
    })
    .expect("a world");
}
