//! Quantised gradients (qgZ) and error feedback (LoCo), against a plain reference that quantises part by part and hop by
//! hop.

mod common;

use common::quantised::{BLOCK, of_block};
use common::{DEADLINE, SGD, Toy, config};
use shardwise_comm::testing::delaying;
use shardwise_comm::{ProcessGroup, threads};
use shardwise_core::{CarryCounter, ErrorFeedback, Quantization, Rounding, ShardingStrategy, WireConfig};
use shardwise_engine::{Accumulation, DynamicScale, Engine, EngineConfig, LossScale, StepReport, UnitId};

use Quantization::{Int4, Int8};
use ShardingStrategy::{FullShard, HybridShard, NoShard, ShardGradOp};

/// A rank's gradient of an element in one round of a step.
type Gradient = fn(rank: usize, round: usize, step: usize, element: usize) -> f32;

fn smooth(rank: usize, round: usize, step: usize, element: usize) -> f32 {
    let x = element as f32 * 0.37 + rank as f32 * 1.3 + round as f32 * 0.9 + step as f32 * 0.7;
    x.sin() * (1.0 + (element as f32 * 0.011).cos())
}

#[derive(Clone, Copy, Debug)]
struct Case {
    world: usize,
    /// Ranks that sum each other's full gradients.
    near: usize,
    rounds: usize,
    steps: usize,
    numel: usize,
    gradient: Gradient,
    config: EngineConfig,
}

/// One unit of one parameter.
fn toy(numel: usize) -> Toy {
    Toy { root: vec![], units: vec![vec![vec![numel]]], last_unused: false, ..Toy::new(0) }
}

fn base(strategy: ShardingStrategy, wire: WireConfig) -> EngineConfig {
    EngineConfig { wire, clip_norm: None, ..config(strategy, SGD) }
}

fn step(engine: &mut Engine, case: &Case, step: usize, rank: usize) -> StepReport {
    engine.begin_step(case.world * case.rounds).expect("idle");
    let (unit, scale) = (UnitId::unit(0), engine.loss_scale() as f32);
    for round in 0..case.rounds {
        engine.begin_round().expect("a round");
        engine.enter_forward(unit);
        engine.leave_forward(unit);
        engine.enter_backward(unit);
        engine.write_gradient(unit, 0, 0, |window, overwrite| {
            for (e, g) in window.iter_mut().enumerate() {
                let own = scale * (case.gradient)(rank, round, step, e);
                *g = if overwrite { own } else { *g + own };
            }
        });
        engine.leave_backward(unit);
        engine.end_round().expect("a round");
    }
    engine.end_step(0.01).expect("a step")
}

/// The mean gradient of each step as every rank sees it, and the reports.
fn run(case: &Case, wrap: fn(ProcessGroup) -> ProcessGroup) -> Vec<Vec<(Vec<f32>, StepReport)>> {
    threads::run(case.world, DEADLINE, |group| {
        let rank = group.rank();
        let mut engine = toy(case.numel).engine(wrap(group), case.config);
        (1..=case.steps)
            .map(|number| {
                let report = step(&mut engine, case, number, rank);
                let mut seen = Vec::new();
                engine.with_full_gradients(UnitId::unit(0), |_, _, g| seen = g.to_vec()).expect("idle");
                (seen, report)
            })
            .collect()
    })
    .expect("a world")
}

/// The rule, hop by hop, with the errors that each rank keeps.
struct Reference<'a> {
    case: &'a Case,
    sharers: usize,
    part: usize,
    /// By rank: of the full gradient, and of what it shows across.
    inside: Vec<Vec<f32>>,
    across: Vec<Vec<f32>>,
}

impl<'a> Reference<'a> {
    fn new(case: &'a Case) -> Self {
        let sharers = case.config.shard_group_size(case.world).expect("groups that fit");
        let part = case.numel.div_ceil(sharers);
        let shown = |numel: usize| vec![vec![0.0; numel]; case.world];
        let (inside, across) = (shown(sharers * part), shown(sharers / case.near * part));
        Self { case, sharers, part, inside, across }
    }

    /// What arrives of `values`, with the error before and after.
    fn shown(&self, values: &mut [f32], error: &mut [f32]) -> Vec<f32> {
        let how = self.case.config.wire.gradients.expect("quantised");
        let feedback = self.case.config.wire.error_feedback;
        if feedback.is_some() {
            values.iter_mut().zip(error.iter()).for_each(|(g, e)| *g += e);
        }
        let blocks = values.chunks(self.part.max(1)).flat_map(|part| part.chunks(BLOCK));
        let arrived: Vec<f32> = blocks.flat_map(|block| of_block(block, how)).collect();
        if let Some(ErrorFeedback { beta, .. }) = feedback {
            let beta = beta as f32;
            for ((e, h), q) in error.iter_mut().zip(values.iter()).zip(&arrived) {
                let taken = if (h - q).is_finite() { h - q } else { 0.0 };
                *e = beta * *e + (1.0 - beta) * taken;
            }
        }
        arrived
    }

    fn forget(&mut self) {
        self.inside.iter_mut().chain(&mut self.across).for_each(|errors| errors.fill(0.0));
    }

    /// The sum over the ranks in one round, or over all rounds when gradients add up unsharded.
    fn sum(&mut self, of_rank: impl Fn(usize, usize) -> f32) -> Vec<f32> {
        let (near, part, world) = (self.case.near, self.part, self.case.world);
        let add = |a: Vec<f32>, b: Vec<f32>| a.iter().zip(&b).map(|(a, b)| a + b).collect::<Vec<f32>>();
        let mut contributed = Vec::new();
        for rank in 0..world {
            let own =
                (0..self.sharers * part).map(|e| if e < self.case.numel { of_rank(rank, e) } else { 0.0 });
            let mut values: Vec<f32> = own.collect();
            let mut error = std::mem::take(&mut self.inside[rank]);
            contributed.push(if near > 1 { self.shown(&mut values, &mut error) } else { values });
            self.inside[rank] = error;
        }
        let groups: Vec<Vec<f32>> = (0..world / near)
            .map(|group| {
                let mut tree = CarryCounter::default();
                let members = group * near..(group + 1) * near;
                members.for_each(|rank| tree.push(contributed[rank].clone(), 1, add));
                tree.finish(add).expect("a rank")
            })
            .collect();
        if groups.len() == 1 {
            return groups[0].clone();
        }
        // Each rank of a group shows the parts that have its place.
        let mut shown = vec![vec![0.0; self.sharers * part]; groups.len()];
        for rank in 0..world {
            let places: Vec<usize> = (0..self.sharers).filter(|p| p % near == rank % near).collect();
            let range = |p: usize| p * part..(p + 1) * part;
            let mut values: Vec<f32> =
                places.iter().flat_map(|p| groups[rank / near][range(*p)].to_vec()).collect();
            let mut error = std::mem::take(&mut self.across[rank]);
            let arrived = self.shown(&mut values, &mut error);
            self.across[rank] = error;
            for (slot, p) in places.into_iter().enumerate() {
                shown[rank / near][range(p)].copy_from_slice(&arrived[slot * part..(slot + 1) * part]);
            }
        }
        let mut tree = CarryCounter::default();
        shown.into_iter().for_each(|group| tree.push(group, 1, add));
        tree.finish(add).expect("a group")
    }

    /// The mean gradient of a step whose losses are multiplied by `scale`.
    fn step(&mut self, step: usize, scale: f32) -> Vec<f32> {
        let Case { world, rounds, gradient, config, .. } = *self.case;
        let add = |a: Vec<f32>, b: Vec<f32>| a.iter().zip(&b).map(|(a, b)| a + b).collect::<Vec<f32>>();
        if config
            .wire
            .error_feedback
            .is_some_and(|f| step > 1 && (step as u64 - 1).is_multiple_of(f.reset_steps))
        {
            self.forget();
        }
        let total = if config.accumulation == Accumulation::Unsharded {
            self.sum(|rank, e| {
                (0..rounds).fold(0.0, |sum, round| sum + scale * gradient(rank, round, step, e))
            })
        } else {
            let mut counter = CarryCounter::default();
            for round in 0..rounds {
                let sum = self.sum(|rank, e| scale * gradient(rank, round, step, e));
                counter.push(sum, 1, add);
            }
            counter.finish(add).expect("a round")
        };
        let divisor = (world * rounds) as f32 * scale;
        total[..self.case.numel].iter().map(|g| g / divisor).collect()
    }
}

fn check(case: &Case) {
    let mut reference = Reference::new(case);
    let want: Vec<Vec<f32>> = (1..=case.steps).map(|step| reference.step(step, 1.0)).collect();
    for (rank, steps) in run(case, |group| group).into_iter().enumerate() {
        for (number, ((got, _), want)) in steps.iter().zip(&want).enumerate() {
            let differs = got.iter().zip(want).position(|(a, b)| a.to_bits() != b.to_bits());
            assert_eq!(got.len(), want.len());
            if let Some(e) = differs {
                let (a, b) = (got[e], want[e]);
                panic!("rank {rank}, step {number}, element {e}: {a} is not {b}: {case:?}");
            }
        }
    }
}

/// Every way in which `world` ranks fall into groups.
fn layouts(world: usize, wire: WireConfig) -> Vec<(usize, EngineConfig)> {
    let mut all: Vec<_> =
        [FullShard, ShardGradOp, NoShard].map(|strategy| (world, base(strategy, wire))).into();
    for near in (1..world).filter(|near| world.is_multiple_of(*near)) {
        let nodes = WireConfig { node_size: Some(near), ..wire };
        all.extend([FullShard, NoShard].map(|strategy| (near, base(strategy, nodes))));
        all.push((near, EngineConfig { shard_group: Some(near), ..base(HybridShard, wire) }));
    }
    all
}

/// Q7, F3, F11: no number of elements and of ranks is refused, and every sum is the reference's, bit for bit.
#[test]
fn every_size_world_and_node_equals_the_reference() {
    for world in 1..=8usize {
        for gradients in [Int4, Int8].map(Some) {
            let wire = WireConfig { gradients, ..WireConfig::default() };
            for (near, config) in layouts(world, wire) {
                for numel in [1, 3, 8, 17, 515] {
                    check(&Case { world, near, rounds: 1, steps: 1, numel, gradient: smooth, config });
                }
            }
        }
    }
}

#[test]
fn a_large_odd_size_equals_the_reference() {
    for world in 1..=8usize {
        let wire = WireConfig { gradients: Some(Int4), ..WireConfig::default() };
        let near = (1..=world / 2).rev().find(|near| world.is_multiple_of(*near)).unwrap_or(1);
        let nodes = WireConfig { node_size: Some(near), ..wire };
        let case = |near, wire| {
            let config = base(FullShard, wire);
            Case { world, near, rounds: 1, steps: 1, numel: 1_000_003, gradient: smooth, config }
        };
        check(&case(world, wire));
        if world > 1 {
            check(&case(near, nodes));
        }
    }
}

/// Several rounds, added up sharded and unsharded; what is lost in one is given to the next, and forgotten in time.
#[test]
fn error_feedback_equals_the_reference() {
    for world in [1, 2, 4, 6] {
        for (rounds, accumulation) in
            [(1, Accumulation::Sharded), (3, Accumulation::Sharded), (2, Accumulation::Unsharded)]
        {
            for (beta, reset_steps) in [(0.8, 1024), (0.0, 2)] {
                let error_feedback = Some(ErrorFeedback { beta, reset_steps });
                let wire = WireConfig { gradients: Some(Int4), error_feedback, ..WireConfig::default() };
                for (near, config) in layouts(world, wire) {
                    let config = EngineConfig { accumulation, ..config };
                    for numel in [3, 700] {
                        check(&Case { world, near, rounds, steps: 5, numel, gradient: smooth, config });
                    }
                }
            }
        }
    }
}

/// With feedback the sum over steps of what arrives follows the sum of what was sent: the error does not grow with them.
#[test]
fn feedback_gives_back_what_was_taken() {
    fn constant(rank: usize, _: usize, _: usize, element: usize) -> f32 {
        smooth(rank, 0, 0, element) * if element.is_multiple_of(97) { 10.0 } else { 0.3 }
    }
    let off = |error_feedback: Option<ErrorFeedback>| {
        let wire =
            WireConfig { gradients: Some(Int4), error_feedback, node_size: Some(2), ..WireConfig::default() };
        let (world, numel, steps) = (4, 1000, 60);
        let case = Case {
            world,
            near: 2,
            rounds: 1,
            steps,
            numel,
            gradient: constant,
            config: base(FullShard, wire),
        };
        let mut sum = vec![0f64; numel];
        for (got, report) in &run(&case, |group| group)[0] {
            sum.iter_mut().zip(got).for_each(|(sum, g)| *sum += f64::from(*g));
            assert!(report.gradient_error > 0.01 && report.gradient_error < 0.5, "{}", report.gradient_error);
        }
        let mean =
            |e: usize| (0..world).map(|rank| f64::from(constant(rank, 0, 0, e))).sum::<f64>() / world as f64;
        let square = |e: usize| (sum[e] / steps as f64 - mean(e)).powi(2);
        (0..numel).map(square).sum::<f64>().sqrt()
    };
    let (without, with) = (off(None), off(Some(ErrorFeedback::default())));
    assert!(with < 0.4 * without, "{with} with feedback, {without} without");
}

/// Blocks that are not finite travel as they are, and leave nothing in the errors: an overflow skips a step, which is then
/// forgotten, while a step that is not skipped shows the numbers themselves.
#[test]
fn an_overflow_leaves_nothing_behind() {
    fn overflowing(rank: usize, round: usize, step: usize, element: usize) -> f32 {
        match (step, rank, element) {
            (2, 1, 300) => f32::INFINITY,
            (2, 1, _) => 1e30 * smooth(rank, round, step, element),
            (4, 0, 0) => f32::NAN,
            _ => smooth(rank, round, step, element),
        }
    }
    let scale = DynamicScale { initial: 8.0, ..DynamicScale::default() };
    for (world, node_size) in [(2, None), (4, Some(2)), (2, Some(1))] {
        let error_feedback = Some(ErrorFeedback::default());
        let wire = WireConfig { gradients: Some(Int4), error_feedback, node_size, ..WireConfig::default() };
        let config = EngineConfig { loss_scale: LossScale::Dynamic(scale), ..base(FullShard, wire) };
        let near = node_size.unwrap_or(world);
        let case = Case { world, near, rounds: 1, steps: 6, numel: 900, gradient: overflowing, config };
        let mut reference = Reference::new(&case);
        let mut want = Vec::new();
        let mut scale = 8.0;
        for step in 1..=6 {
            want.push(reference.step(step, scale));
            if step % 2 == 0 && step < 6 {
                reference.forget();
                scale /= 2.0;
            }
        }
        for steps in run(&case, |group| group) {
            for (number, ((got, report), want)) in steps.iter().zip(&want).enumerate() {
                let skips = number == 1 || number == 3;
                assert_eq!(report.skipped.is_some(), skips, "step {}", number + 1);
                if !skips {
                    assert!(got.iter().all(|g| g.is_finite()));
                    assert!(got == want, "step {} of {world} ranks", number + 1);
                }
            }
        }
    }
}

/// Errors are of gradients as they were scaled, and follow the scale.
#[test]
fn errors_follow_the_loss_scale() {
    let scale = DynamicScale { initial: 4.0, window: 2, ..DynamicScale::default() };
    for node_size in [None, Some(2)] {
        let error_feedback = Some(ErrorFeedback::default());
        let wire = WireConfig { gradients: Some(Int4), error_feedback, node_size, ..WireConfig::default() };
        let config = EngineConfig { loss_scale: LossScale::Dynamic(scale), ..base(FullShard, wire) };
        let near = node_size.unwrap_or(4);
        let case = Case { world: 4, near, rounds: 1, steps: 5, numel: 900, gradient: smooth, config };
        let mut reference = Reference::new(&case);
        let want: Vec<Vec<f32>> = (1..=5)
            .map(|step| {
                if step == 3 || step == 5 {
                    let all = reference.inside.iter_mut().chain(&mut reference.across).flatten();
                    all.for_each(|e| *e *= 2.0);
                }
                reference.step(step, [4.0, 4.0, 8.0, 8.0, 16.0][step - 1])
            })
            .collect();
        for steps in run(&case, |group| group) {
            for ((got, report), want) in steps.iter().zip(&want) {
                assert!(got == want, "step {} of nodes of {near}", report.step);
            }
        }
    }
}

/// A gradient that is put off, because ranks have used different units, and gets more is compensated once.
#[test]
fn what_is_put_off_is_compensated_once() {
    let train = |calls: usize| {
        threads::run(2, DEADLINE, |group| {
            let rank = group.rank();
            let error_feedback = Some(ErrorFeedback::default());
            let wire = WireConfig { gradients: Some(Int4), error_feedback, ..WireConfig::default() };
            let mut engine = Toy::new(2).engine(group, base(FullShard, wire));
            let mut seen = Vec::new();
            for step in 0..4 {
                engine.begin_step(2).expect("idle");
                engine.begin_round().expect("a round");
                // Rank 0 begins with another unit, and comes back to the first one: with zeros.
                let order: Vec<usize> =
                    if rank == 0 { [1, 0].into_iter().chain(vec![0; calls]).collect() } else { vec![0] };
                for (place, index) in order.into_iter().enumerate() {
                    let unit = UnitId::unit(index);
                    engine.enter_forward(unit);
                    engine.leave_forward(unit);
                    engine.enter_backward(unit);
                    for param in 0..engine.parts(unit)[0].layout().params().len() {
                        engine.write_gradient(unit, 0, param, |window, overwrite| {
                            for (e, g) in window.iter_mut().enumerate() {
                                let own = if place > 1 { 0.0 } else { smooth(rank, index, step, e) };
                                *g = if overwrite { own } else { *g + own };
                            }
                        });
                    }
                    engine.leave_backward(unit);
                }
                engine.end_round().expect("a round");
                engine.end_step(0.05).expect("a step");
                for unit in [0, 1].map(UnitId::unit) {
                    engine.with_full_gradients(unit, |_, _, g| seen.push(g.to_vec())).expect("idle");
                }
            }
            seen
        })
        .expect("a world")
    };
    let want = train(0);
    for calls in [1, 3] {
        assert!(train(calls) == want, "{calls} more calls");
    }
}

/// Raw blocks are counted with what is sent, and arrive.
#[test]
fn raw_blocks_are_counted() {
    fn tiny(rank: usize, _: usize, _: usize, element: usize) -> f32 {
        // The first 256 elements of each part are too small for a scale.
        if element % 1024 < 256 { 1e-40 * (rank + 1) as f32 } else { 1.0 + rank as f32 }
    }
    let wire = WireConfig { gradients: Some(Int8), ..WireConfig::default() };
    let sent = |gradient: Gradient, wire: WireConfig, near: usize| -> Vec<(u64, u64)> {
        let case = Case {
            world: 4,
            near,
            rounds: 1,
            steps: 1,
            numel: 4096,
            gradient,
            config: base(ShardGradOp, wire),
        };
        check(&case);
        let of = |steps: Vec<(Vec<f32>, StepReport)>| (steps[0].1.bytes_sent, steps[0].1.bytes_sent_across);
        run(&case, |group| group).into_iter().map(of).collect()
    };
    for ((a, _), (b, _)) in sent(tiny, wire, 4).into_iter().zip(sent(smooth, wire, 4)) {
        assert_eq!(a - b, 3 * 256 * 4);
    }
    let nodes = WireConfig { node_size: Some(2), ..wire };
    for ((a, a_across), (b, b_across)) in sent(tiny, nodes, 2).into_iter().zip(sent(smooth, nodes, 2)) {
        // Two parts to the other rank of the node, and one sum to the other node.
        assert_eq!((a - b, a_across - b_across), (3 * 256 * 4, 256 * 4));
    }
}

/// Rounding by chance depends on nothing but step, round, rank and position: the same twice, and whatever the timing.
#[test]
fn rounding_by_chance_can_be_repeated() {
    let error_feedback = Some(ErrorFeedback::default());
    for (world, node_size, error_feedback) in [(4, Some(2), None), (3, None, error_feedback)] {
        let wire = WireConfig {
            gradients: Some(Int4),
            rounding: Rounding::Stochastic,
            node_size,
            error_feedback,
            ..WireConfig::default()
        };
        let case = Case {
            world,
            near: 2,
            rounds: 2,
            steps: 3,
            numel: 1000,
            gradient: smooth,
            config: base(FullShard, wire),
        };
        let seen = |wrap: fn(ProcessGroup) -> ProcessGroup| -> Vec<Vec<Vec<f32>>> {
            let of = |steps: Vec<(Vec<f32>, StepReport)>| steps.into_iter().map(|(g, _)| g).collect();
            run(&case, wrap).into_iter().map(of).collect()
        };
        let once = seen(|group| group);
        assert!(once.iter().all(|steps| *steps == once[0]), "all ranks see the same");
        let again = seen(|group| {
            let seed = group.rank() as u64;
            delaying(&group, seed)
        });
        assert!(once == again);
        let nearest =
            Case { config: base(FullShard, WireConfig { rounding: Rounding::Nearest, ..wire }), ..case };
        assert!(run(&nearest, |group| group)[0][0].0 != once[0][0]);
    }
}
