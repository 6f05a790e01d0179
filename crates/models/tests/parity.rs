//! Thirty steps of both fixtures, sharded over 1, 2 and 3 ranks, against PyTorch in float64.

mod common;

use std::collections::BTreeMap;

use burn::tensor::Device;
use common::{DEADLINE, FIXTURES, Run, Stream, config, data, on_one_thread, optimizer, reference};
use shardwise_burn::ShardedModel;
use shardwise_comm::threads;
use shardwise_models::{CausalLm, WeightsFolder};

/// What a run of ours gives: losses and gradient norms by step, and the final parameters' sums (plain and of absolute
/// values) by Hugging Face name.
struct Ours {
    steps: Vec<(f64, f64)>,
    sums: BTreeMap<String, (f64, f64)>,
}

/// How a run is spread out: this must not matter.
#[derive(Clone, Copy, Debug)]
struct Spread {
    ranks: usize,
    /// Samples of a micro-batch.
    micro_batch: usize,
    recompute: bool,
}

fn train(fixture: &str, optimizer_name: &str, spread: Spread) -> Ours {
    let Spread { ranks, micro_batch, recompute } = spread;
    let reference = reference(fixture);
    let folder = data(fixture);
    let stream = Stream::of(fixture, reference.seq_len);
    let (config, _) = config(&folder);
    let (mut shard_config, lr) = optimizer(optimizer_name);
    shard_config.recompute = recompute;
    let batch = reference.global_batch;
    let steps = reference.runs["adamw.float64"].steps.len();
    let run = |group| {
        let device = Device::flex().autodiff();
        let weights = WeightsFolder::open(&folder, &config).expect("weights");
        let module = config.init(&device).expect("a valid configuration");
        let mut model = ShardedModel::new(group, module, shard_config, &weights).expect("sharded");
        let mut steps_seen = Vec::new();
        for step in 0..steps {
            let outcome = model
                .step(batch / micro_batch, lr, |model, m| {
                    let (ids, targets) = stream.batch(step * batch + m * micro_batch, micro_batch, &device);
                    model.loss(ids, targets)
                })
                .expect("a step");
            steps_seen.push((outcome.loss, outcome.report.grad_norm));
        }
        let mut sums = BTreeMap::new();
        model
            .export(|path, _, values| {
                let values = || values.iter().map(|&value| f64::from(value));
                let (name, _) = config.hf_name(path).expect("a known parameter");
                sums.insert(name, (values().sum(), values().map(f64::abs).sum()));
            })
            .expect("exported");
        Ours { steps: steps_seen, sums }
    };
    threads::run(ranks, DEADLINE, |group| on_one_thread(|| run(group))).expect("a world").remove(0)
}

/// The largest difference of losses, and the largest relative difference of gradient norms.
fn differences(ours: &Ours, theirs: &Run) -> (f64, f64) {
    assert_eq!(ours.steps.len(), theirs.steps.len());
    let pairs = || ours.steps.iter().zip(&theirs.steps);
    let loss = pairs().map(|((loss, _), want)| (loss - want.loss).abs()).fold(0.0, f64::max);
    let norm = pairs().map(|((_, norm), want)| (norm / want.grad_norm - 1.0).abs()).fold(0.0, f64::max);
    (loss, norm)
}

/// The largest difference of a parameter's sums, relative to the sum of its absolute values.
fn sum_difference(ours: &Ours, theirs: &Run) -> f64 {
    assert!(ours.sums.keys().eq(theirs.final_parameter_sums.keys()), "the same parameters");
    let pairs = ours.sums.values().zip(theirs.final_parameter_sums.values());
    pairs
        .map(|((sum, abs_sum), want)| {
            (sum - want.sum).abs().max((abs_sum - want.abs_sum).abs()) / want.abs_sum
        })
        .fold(0.0, f64::max)
}

fn check(fixture: &str, optimizer: &str, norm_tolerance: f64) {
    let reference = reference(fixture);
    let theirs = &reference.runs[&format!("{optimizer}.float64")];
    for ranks in [1, 2, 3] {
        for micro_batch in [1, 2] {
            let spread = Spread { ranks, micro_batch, recompute: false };
            let ours = train(fixture, optimizer, spread);
            let (loss, norm) = differences(&ours, theirs);
            let sums = sum_difference(&ours, theirs);
            println!("{fixture}, {optimizer}, {spread:?}: loss {loss:.1e}, norm {norm:.1e}, sums {sums:.1e}");
            assert!(loss < 2e-4, "{fixture}, {optimizer}, {spread:?}: loss differs by {loss:e}");
            assert!(norm < norm_tolerance, "{fixture}, {optimizer}, {spread:?}: norm differs by {norm:e}");
            assert!(sums < 2e-3, "{fixture}, {optimizer}, {spread:?}: sums differ by {sums:e}");
        }
    }
}

#[test]
fn gpt2_with_adamw() {
    check("gpt2-tiny", "adamw", 1e-3);
}

#[test]
fn gpt2_with_sgd() {
    check("gpt2-tiny", "sgd", 1e-3);
}

#[test]
fn llama_with_adamw() {
    check("llama-tiny", "adamw", 1e-3);
}

#[test]
fn llama_with_sgd() {
    check("llama-tiny", "sgd", 3e-3);
}

/// 1, 2 and 4 ranks do the same arithmetic, and so does recomputation.
#[test]
fn neither_ranks_nor_recomputation_change_a_bit() {
    for fixture in FIXTURES {
        let run = |ranks, recompute| {
            let ours = train(fixture, "adamw", Spread { ranks, micro_batch: 1, recompute });
            (ours.steps, ours.sums)
        };
        let want = run(1, false);
        for (ranks, recompute) in [(2, false), (4, false), (1, true), (2, true)] {
            assert!(run(ranks, recompute) == want, "{fixture}: {ranks} ranks, recompute {recompute}");
        }
    }
}
