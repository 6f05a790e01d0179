//! The schedule of micro-batches and the memory plan's formulas.

use shardwise_core::{
    MemoryPlan, OptimizerKind, OptimizerPlan, PlanError, PlanInput, Purpose, RoundAssignment,
    ShardingStrategy, StepSchedule, UnitSize,
};

#[test]
fn micro_batches_go_round_the_ranks() {
    let schedule = StepSchedule::new(16, 2, 3).expect("8 micro-batches on 3 ranks");
    assert_eq!((schedule.micro_batches(), schedule.rounds()), (8, 3));
    let of = |rank| (0..3).map(|round| schedule.assignment(round, rank)).collect::<Vec<_>>();
    use RoundAssignment::{Compute, Idle};
    assert_eq!(of(0), [Compute(0), Compute(3), Compute(6)]);
    assert_eq!(of(1), [Compute(1), Compute(4), Compute(7)]);
    assert_eq!(of(2), [Compute(2), Compute(5), Idle]);
}

#[test]
fn impossible_batches_say_what_would_work() {
    let cases = [
        (
            StepSchedule::new(8, 3, 1),
            "train.micro_batch = 3 does not divide train.global_batch = 8; choose a micro_batch that divides it, such as 2",
        ),
        (StepSchedule::new(8, 4, 3), "2 micro-batches a step"),
        (StepSchedule::new(0, 4, 1), "train.global_batch is 0"),
        (StepSchedule::new(8, 0, 1), "train.micro_batch is 0"),
        (StepSchedule::new(8, 1, 0), "run.ranks is 0"),
    ];
    for (result, words) in cases {
        let message = result.expect_err("must be refused").to_string();
        assert!(message.contains(words), "{message:?} lacks {words:?}");
    }
    assert!(matches!(
        StepSchedule::of_micro_batches(3, 4),
        Err(PlanError::TooFewMicroBatches { micro_batches: 3, ranks: 4 })
    ));
}

fn input(strategy: ShardingStrategy, optimizer: OptimizerKind, ranks: usize, rounds: usize) -> PlanInput {
    PlanInput {
        units: vec![UnitSize { trainable: 103, ..UnitSize::default() }; 4],
        root: UnitSize { trainable: 57, ..UnitSize::default() },
        strategy,
        optimizer: OptimizerPlan::per_element(optimizer.states(1)),
        schedule: StepSchedule::of_micro_batches(ranks * rounds, ranks).expect("enough micro-batches"),
        gather: shardwise_core::GatherPolicy::default(),
        shard_group: ranks,
        precision: shardwise_core::MixedPrecision::default(),
        wire: shardwise_core::WireConfig::default(),
        unsharded_accumulation: false,
        offload: shardwise_core::Offload::default(),
    }
}

/// The formula of the README, for AdamW: `(12 + 4 floor(log2(K+1)))` bytes for each padded shard element, the root's
/// parameters and gradient, two gathered units and one unit's gradient.
#[test]
fn full_shard_with_adamw_follows_the_formula() {
    for ranks in [2, 3, 4, 7] {
        for rounds in [1, 2, 3, 6, 7, 8] {
            let plan =
                MemoryPlan::new(&input(ShardingStrategy::FullShard, OptimizerKind::AdamW, ranks, rounds));
            let padded = |numel: usize| (numel.div_ceil(ranks) * ranks) as u64;
            let shards = (4 * padded(103) + padded(57)) / ranks as u64;
            let partials = match rounds {
                1 | 2 => 1,
                3..=6 => 2,
                _ => 3,
            };
            let want =
                (12 + 4 * partials) * shards + 2 * 4 * padded(57) + 2 * 4 * padded(103) + 4 * padded(103);
            assert_eq!(plan.total(), want, "{ranks} ranks, {rounds} rounds");
        }
    }
}

#[test]
fn strategies_and_optimizers_have_their_own_formulas() {
    use OptimizerKind::{AdamW, Sgd, SgdMomentum};
    use ShardingStrategy::{FullShard, NoShard, ShardGradOp};
    // 4 ranks: unit 103 -> shard 26, padded 104; root 57 -> shard 15, padded 60; shards 4 * 26 + 15 = 119; all 469.
    let (shards, all, units, unit, root) = (119, 469, 416, 104, 60);
    let cases = [
        (FullShard, Sgd, shards + shards + root + 2 * unit + root + unit),
        (FullShard, SgdMomentum, 2 * shards + shards + root + 2 * unit + root + unit),
        (ShardGradOp, AdamW, 3 * shards + shards + root + units + root + unit),
        (NoShard, AdamW, 3 * all + shards + root + unit),
        (NoShard, SgdMomentum, 2 * all + shards + root + unit),
        (NoShard, Sgd, all + shards + root + unit),
    ];
    for (strategy, optimizer, elements) in cases {
        let plan = MemoryPlan::new(&input(strategy, optimizer, 4, 1));
        assert_eq!(plan.total(), 4 * elements, "{strategy} {optimizer:?}");
    }
    for strategy in [FullShard, ShardGradOp, NoShard] {
        let plan = MemoryPlan::new(&input(strategy, AdamW, 1, 3));
        assert_eq!(plan.total(), 4 * ((3 + 2) * all + 57 + 103), "{strategy} alone");
        assert_eq!(plan.sent_per_step(), 0);
        assert_eq!(plan.bytes(Purpose::GatheredUnits), 0);
    }
}

#[test]
fn one_slot_is_enough_without_prefetch_or_with_one_unit() {
    let mut one = input(ShardingStrategy::FullShard, OptimizerKind::AdamW, 2, 1);
    one.gather = one.gather.without_prefetch();
    assert_eq!(MemoryPlan::new(&one).bytes(Purpose::GatheredUnits), 4 * 104);
    one.gather = shardwise_core::GatherPolicy::default();
    one.units.truncate(1);
    assert_eq!(MemoryPlan::new(&one).bytes(Purpose::GatheredUnits), 4 * 104);
    one.units.clear();
    assert_eq!(MemoryPlan::new(&one).bytes(Purpose::GatheredUnits), 0);
}

/// Frozen parameters are sharded and gathered, but have neither gradient nor statistics, and nothing of them is reduced.
#[test]
fn frozen_parameters_cost_no_gradient() {
    let trained = input(ShardingStrategy::FullShard, OptimizerKind::AdamW, 4, 2);
    let mut mixed = trained.clone();
    mixed.units.iter_mut().for_each(|u| u.frozen = 9);
    mixed.root.frozen = 5;
    let (a, b) = (MemoryPlan::new(&trained), MemoryPlan::new(&mixed));
    for purpose in
        [Purpose::OptimizerState, Purpose::GradientShards, Purpose::RootGradient, Purpose::UnitGradient]
    {
        assert_eq!(a.bytes(purpose), b.bytes(purpose), "{purpose}");
    }
    // 9 on 4 ranks: shards of 3, padded 12; 5: shards of 2, padded 8.
    let more = |purpose| b.bytes(purpose) - a.bytes(purpose);
    assert_eq!(more(Purpose::Parameters), 4 * (4 * 3 + 2));
    assert_eq!(more(Purpose::GatheredRoot), 4 * 8);
    assert_eq!(more(Purpose::GatheredUnits), 4 * 2 * 12);
    assert_eq!(b.sent_per_step() - a.sent_per_step(), 4 * 3 * (2 + 4 * 3 * 2 * 2));
}

/// Reference test 15: `n` units and a root take `n + 1` gathers forward, `n` backward and `n + 1` reductions.
#[test]
fn collectives_of_a_step() {
    use ShardingStrategy::{FullShard, NoShard, ShardGradOp};
    for rounds in [1, 3] {
        let schedule = StepSchedule::of_micro_batches(2 * rounds, 2).expect("enough");
        let counts = |strategy| {
            let c = schedule.collectives(strategy, 5, true);
            (c.root_gathers, c.forward_gathers, c.backward_gathers, c.reductions, c.gradient_gathers)
        };
        assert_eq!(counts(FullShard), (1, 5 * rounds, 5 * rounds, 6 * rounds, 0));
        assert_eq!(counts(ShardGradOp), (1, 5 * rounds, 0, 6 * rounds, 0));
        assert_eq!(counts(NoShard), (0, 0, 0, 6 * rounds, 6));
    }
}

/// A rank sends its shard to each peer at every gather, and the others' parts of its full gradient at every reduction.
#[test]
fn bytes_sent_in_a_step() {
    let plan = MemoryPlan::new(&input(ShardingStrategy::FullShard, OptimizerKind::AdamW, 4, 2));
    let (units, root) = (4 * 26, 15);
    assert_eq!(plan.sent_per_step(), 4 * 3 * (root + 4 * units + 2 * (units + root)));
    let plan = MemoryPlan::new(&input(ShardingStrategy::NoShard, OptimizerKind::AdamW, 4, 2));
    assert_eq!(plan.sent_per_step(), 4 * 3 * (3 * (units + root)));
}
