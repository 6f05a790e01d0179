//! The engine over transports that count and that delay: what it asks for, and that timing changes nothing.

mod common;

use std::collections::BTreeMap;

use common::{ADAMW, DEADLINE, STRATEGIES, Toy, compute_step, config, full_params, train};
use shardwise_comm::testing::{Count, counting, delaying};
use shardwise_comm::threads;
use shardwise_core::{MixedPrecision, Precision, Quantization, ShardingStrategy, WireConfig};
use shardwise_engine::{Accumulation, EngineConfig};

/// What rank 0 asks of its transport in the second step.
fn counts(
    toy: &Toy,
    ranks: usize,
    rounds: usize,
    config: EngineConfig,
) -> BTreeMap<(&'static str, String), Count> {
    let run = |group| {
        let (group, counter) = counting(&group);
        let mut engine = toy.engine(group, config);
        compute_step(&mut engine, rounds * ranks, 0.1).expect("a step");
        counter.take();
        compute_step(&mut engine, rounds * ranks, 0.1).expect("a step");
        counter.take()
    };
    threads::run(ranks, DEADLINE, run).expect("a world").remove(0)
}

fn total(counts: &BTreeMap<(&'static str, String), Count>, kind: &str) -> Count {
    counts.iter().filter(|((k, _), _)| *k == kind).fold(Count::default(), |mut sum, (_, count)| {
        sum.started += count.started;
        sum.reads += count.reads;
        sum.read_bytes += count.read_bytes;
        sum.lent_bytes += count.lent_bytes;
        sum
    })
}

/// Reference tests 15 and 36: one loan serves a step's gathers, each reads every peer once; one reduction for each unit and
/// round; one exchange for the norm.
#[test]
fn a_step_asks_for_no_more_than_it_must() {
    let units = 3;
    for ranks in [2, 4] {
        for rounds in [1, 3] {
            for (strategy, passes) in [(ShardingStrategy::FullShard, 2), (ShardingStrategy::ShardGradOp, 1)] {
                let counts = counts(&Toy::new(units), ranks, rounds, config(strategy, ADAMW));
                let of = |kind: &'static str, label: &str| {
                    counts.get(&(kind, label.to_string())).copied().unwrap_or_default()
                };
                let what = format!("{strategy}, {ranks} ranks, {rounds} rounds");
                let gathers = 1 + passes * units * rounds;
                let loan = of("all_gather", "parameters");
                assert_eq!((loan.started, loan.reads), (1, gathers * (ranks - 1)), "{what}");
                let reduced = total(&counts, "reduce_scatter");
                assert_eq!(reduced.started, (units + 1) * rounds, "{what}");
                assert_eq!(reduced.reads, (units + 1) * rounds * (ranks - 1), "{what}");
                assert_eq!(of("all_gather", "gradient norm").started, 1, "{what}");
                let all: usize = counts.values().map(|c| c.started).sum();
                assert_eq!(all, 1 + reduced.started + 1, "{what}: {counts:?}");
            }
        }
    }
}

/// P7: one rank communicates nothing but with itself, in the exchange of the norm. Reported bug A5's other half.
#[test]
fn one_rank_reads_nothing() {
    for strategy in STRATEGIES {
        let counts = counts(&Toy::new(3), 1, 2, config(strategy, ADAMW));
        assert!(counts.values().all(|count| count.reads == 0), "{strategy}: {counts:?}");
        assert_eq!(total(&counts, "reduce_scatter"), Count::default());
    }
}

/// L3, L5 and reported bug C2: half the bytes travel in 16 bits, in gathers or in reductions, as asked; the second hop of a
/// hybrid reduction carries sums, in f32.
#[test]
fn narrow_wires_carry_half_the_bytes() {
    let of = |param_dtype, reduce_dtype, strategy, shard_group| {
        let precision = MixedPrecision { param_dtype, reduce_dtype, ..MixedPrecision::default() };
        let config = EngineConfig { precision, shard_group, ..config(strategy, ADAMW) };
        let counts = counts(&Toy::new(3), 4, 2, config);
        let gathered = counts[&("all_gather", "parameters".to_string())].read_bytes;
        (gathered, total(&counts, "reduce_scatter").read_bytes, total(&counts, "all_reduce").read_bytes)
    };
    use Precision::{Bf16, F32};
    for (strategy, group) in [(ShardingStrategy::FullShard, None), (ShardingStrategy::HybridShard, Some(2))] {
        let (gathered, reduced, across) = of(F32, F32, strategy, group);
        assert_eq!(of(Bf16, F32, strategy, group), (gathered / 2, reduced, across));
        assert_eq!(of(F32, Bf16, strategy, group), (gathered, reduced / 2, across));
        assert_eq!(across > 0, group.is_some());
    }
}

/// Q1: quantised parameters carry a quarter or an eighth of the bytes, and a scale for each block; the masters that are lent
/// along are not read. Frozen ones that rest in int8 are never anything else.
#[test]
fn quantised_parameters_carry_their_codes_and_scales() {
    let shapes = vec![vec![64, 64]];
    let toy = Toy { root: shapes.clone(), units: vec![shapes.clone(); 3], frozen: shapes, ..Toy::new(0) };
    let gathered = |weights, frozen_weights, strategy| {
        let wire = WireConfig { weights, frozen_weights, ..WireConfig::default() };
        let counts = counts(&toy, 4, 1, EngineConfig { wire, ..config(strategy, ADAMW) });
        counts[&("all_gather", "parameters".to_string())].read_bytes
    };
    for (strategy, passes) in [(ShardingStrategy::FullShard, 7), (ShardingStrategy::ShardGradOp, 4)] {
        // A rank reads the parts of three peers in each gather.
        let all = |part: usize| 3 * passes * part;
        let (plain, int8, int4) = (1024 * 4, 1024 + 4 * 4, 512 + 4 * 4);
        for (weights, frozen, parts) in [
            (None, false, plain + plain),
            (Some(Quantization::Int8), false, int8 + int8),
            (Some(Quantization::Int4), false, int4 + int4),
            (None, true, plain + int8),
            (Some(Quantization::Int4), true, int4 + int8),
        ] {
            assert_eq!(gathered(weights, frozen, strategy), all(parts), "{weights:?} {frozen}");
        }
    }
}

/// L9 and reference test 15: gradients that add up unsharded are reduced once a step.
#[test]
fn unsharded_accumulation_reduces_once() {
    for rounds in [1, 4] {
        let base = config(ShardingStrategy::FullShard, ADAMW);
        let config = EngineConfig { accumulation: Accumulation::Unsharded, ..base };
        let counts = counts(&Toy::new(3), 2, rounds, config);
        assert_eq!(total(&counts, "reduce_scatter").started, 4, "{rounds} rounds");
    }
}

/// Reference test 38: what is frozen is in no reduction.
#[test]
fn frozen_parameters_are_in_no_reduction() {
    let bytes = |frozen| {
        let toy = Toy { frozen, ..Toy::new(3) };
        total(&counts(&toy, 2, 1, config(ShardingStrategy::FullShard, ADAMW)), "reduce_scatter")
    };
    assert_eq!(bytes(vec![]), bytes(vec![vec![100, 10], vec![7]]));
}

/// Reference test 24, reported bugs K6, M1 and M4: a thousand random schedules, each with other delays of every rank before
/// and after everything it does, train the same bits.
#[test]
fn a_thousand_random_schedules_train_the_same_bits() {
    let toy = Toy::new(3);
    use ShardingStrategy::{FullShard, HybridShard, NoShard, ShardGradOp};
    let bf16 = MixedPrecision { reduce_dtype: Precision::Bf16, ..MixedPrecision::BF16 };
    let configs = [
        (2, config(FullShard, ADAMW)),
        (4, config(FullShard, ADAMW)),
        (3, EngineConfig { precision: bf16, ..config(FullShard, ADAMW) }),
        (2, config(ShardGradOp, ADAMW)),
        (2, config(NoShard, ADAMW)),
        (4, EngineConfig { shard_group: Some(2), ..config(HybridShard, ADAMW) }),
        (2, EngineConfig { prefetch: false, ..config(FullShard, ADAMW) }),
        (2, EngineConfig { accumulation: Accumulation::Unsharded, ..config(FullShard, ADAMW) }),
    ];
    let per_config = 1000 / configs.len();
    for (index, (ranks, config)) in configs.into_iter().enumerate() {
        // Ragged in the last round.
        let micro_batches = 2 * ranks - 1;
        let want = train(&toy, ranks, micro_batches, config, 2);
        for schedule in 0..per_config {
            let got = threads::run(ranks, DEADLINE, |group| {
                let seed = ((index * per_config + schedule) * 64 + group.rank()) as u64;
                let mut engine = toy.engine(delaying(&group, seed), config);
                let reports: Vec<_> =
                    (0..2).map(|_| compute_step(&mut engine, micro_batches, 0.05).expect("a step")).collect();
                (full_params(&mut engine), reports)
            })
            .expect("a world");
            assert_eq!(got, want, "{config:?}, {ranks} ranks, schedule {schedule}");
        }
    }
}
