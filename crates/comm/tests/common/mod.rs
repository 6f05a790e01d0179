//! What the tests of threads and of processes share: every collective against a plain computation.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part")]

use std::time::Duration;

use shardwise_comm::{HostBuffer, ProcessGroup};
use shardwise_core::CarryCounter;
use shardwise_core::seed::{SplitMix64, seed_for};

pub const DEADLINE: Duration = Duration::from_secs(60);

/// The values that `rank` contributes, known to every rank.
pub fn values(rank: usize, numel: usize, salt: u64) -> Vec<f32> {
    let mut random = SplitMix64::new(seed_for(salt, &format!("rank {rank}")));
    (0..numel)
        .map(|_| (random.next_f64() * 2.0 - 1.0) as f32 * 10f32.powi(random.below(7) as i32 - 3))
        .collect()
}

/// The reduction, written plainly: one element at a time by the carry counter over ranks.
pub fn plain_sum(parts: &[Vec<f32>], index: usize) -> f32 {
    let mut counter = CarryCounter::default();
    for part in parts {
        counter.push(part[index], 1, |older, newer| older + newer);
    }
    counter.finish(|larger, smaller| larger + smaller).expect("at least one rank")
}

/// Compares bits, so that a NaN equals itself and 0 differs from -0.
pub fn assert_same(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (a, b)) in got.iter().zip(want).enumerate() {
        assert_eq!(a.to_bits(), b.to_bits(), "{what}: element {i} is {a}, expected {b}");
    }
}

/// Every collective, with parts of `numel` elements, over lent buffers and over plain slices.
pub fn exercise(group: &ProcessGroup, numel: usize, salt: u64) {
    let (rank, ranks) = (group.rank(), group.size());
    let what = format!("{numel} elements, rank {rank} of {ranks}");
    let parts: Vec<Vec<f32>> = (0..ranks).map(|r| values(r, numel, salt)).collect();
    let wholes: Vec<Vec<f32>> = (0..ranks).map(|r| values(r, numel * ranks, salt ^ 1)).collect();
    let gathered: Vec<f32> = parts.concat();
    let own = rank * numel..(rank + 1) * numel;
    let summed: Vec<f32> = own.clone().map(|i| plain_sum(&wholes, i)).collect();

    let mut part = group.allocate(numel).expect("memory");
    part.writable().expect("not lent yet").copy_from_slice(&parts[rank]);
    let mut source = group.allocate(numel * ranks).expect("memory");
    source.writable().expect("not lent yet").copy_from_slice(&wholes[rank]);
    // Both in flight at once, finished in the other order.
    let gather = group.start_all_gather("part", &part, HostBuffer::new(numel * ranks).expect("memory"));
    let mut reduce = group.start_reduce_scatter("whole", source, numel);
    let mut sum = vec![f32::NAN; numel];
    reduce.sum_into(&mut sum, false).expect("reduced");
    assert_same(&sum, &summed, &what);
    let before = sum.clone();
    drop(reduce.into_source());
    let (dest, result) = gather.wait();
    result.expect("gathered");
    assert_same(&dest.as_slice()[..numel * ranks], &gathered, &what);

    let mut source = group.allocate(numel * ranks).expect("memory");
    source.writable().expect("not lent yet").copy_from_slice(&wholes[rank]);
    let mut reduce = group.start_reduce_scatter("whole again", source, numel);
    reduce.sum_into(&mut sum, true).expect("reduced");
    let doubled: Vec<f32> = before.iter().map(|s| s + s).collect();
    assert_same(&sum, &doubled, &what);
    // The buffer can be written once the peers are done with it.
    let mut source = reduce.into_source().expect("contributed");
    source.writable().expect("released").fill(7.0);
    part.writable().expect("released").fill(7.0);

    let mut dest = vec![0.0; numel * ranks];
    group.all_gather("slices", &parts[rank], &mut dest).expect("gathered");
    assert_same(&dest, &gathered, &what);
    let mut sum = vec![0.0; numel];
    group.reduce_scatter("slices", &wholes[rank], &mut sum).expect("reduced");
    assert_same(&sum, &summed, &what);
    let mut all = parts[rank].clone();
    group.all_reduce("slices", &mut all).expect("reduced");
    let want: Vec<f32> = (0..numel).map(|i| plain_sum(&parts, i)).collect();
    assert_same(&all, &want, &what);
    let mut dest = vec![0.0; numel * ranks];
    group.all_to_all("slices", &wholes[rank], &mut dest).expect("exchanged");
    let want: Vec<f32> = wholes.iter().flat_map(|w| w[own.clone()].to_vec()).collect();
    assert_same(&dest, &want, &what);
    for root in 0..ranks {
        let mut bytes: Vec<u8> = if rank == root {
            (0..numel * 3 + 1).map(|i| (i * 7) as u8).collect()
        } else {
            vec![0; numel * 3 + 1]
        };
        group.broadcast("bytes", &mut bytes, root).expect("sent");
        assert!(bytes.iter().enumerate().all(|(i, b)| *b == (i * 7) as u8), "{what}");
    }
    let all = group.all_gather_varied("words", "x".repeat(rank * 3).as_bytes()).expect("gathered");
    assert!(all.iter().enumerate().all(|(r, bytes)| bytes.len() == r * 3), "{what}");
    group.barrier("end").expect("everyone came");
}
