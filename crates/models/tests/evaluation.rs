//! Evaluation over uneven batches, and training with losses that are sums over tokens.

mod common;

use burn::tensor::Device;
use common::{DEADLINE, Stream, config, data, on_one_thread, optimizer, reference, whole_model};
use shardwise_burn::{ShardConfig, ShardedModel};
use shardwise_comm::{ProcessGroup, threads};
use shardwise_core::{MixedPrecision, ShardingStrategy};
use shardwise_engine::{Divisor, EngineConfig};
use shardwise_models::{CausalLm, LanguageModel, WeightsFolder};

const FIXTURE: &str = "gpt2-tiny";

fn model(group: ProcessGroup, engine: EngineConfig) -> ShardedModel<LanguageModel> {
    let (config, _) = config(&data(FIXTURE));
    let weights = WeightsFolder::open(data(FIXTURE), &config).expect("weights");
    let module = config.init(&Device::flex().autodiff()).expect("a valid configuration");
    let shard = ShardConfig { engine, ..optimizer("adamw").0 };
    ShardedModel::new(group, module, shard, &weights).expect("a model")
}

fn loss(model: &LanguageModel, stream: &Stream, first: usize, count: usize, device: &Device) -> f64 {
    let (ids, targets) = stream.batch(first, count, device);
    let loss = model.loss(ids, targets);
    assert!(!loss.is_tracked(), "an evaluation has no graph");
    f64::from(loss.into_scalar::<f32>())
}

/// Three batches on one rank and five on the other, of different sizes, and none on a third: the mean over all samples, as
/// one process computes it with the whole model, in every strategy and with the masters even where steps compute in bf16.
#[test]
fn ranks_with_different_numbers_of_batches_get_one_mean() {
    let stream = Stream::of(FIXTURE, reference(FIXTURE).seq_len);
    let device = Device::flex();
    // (first sample, samples) of each rank's batches.
    let batches: [&[(usize, usize)]; 3] =
        [&[(0, 1), (1, 2), (3, 1)], &[(4, 1), (5, 3), (8, 1), (9, 1), (10, 2)], &[]];
    let whole = whole_model(&data(FIXTURE), &device);
    let all: Vec<f64> = (0..12).map(|sample| loss(&whole, &stream, sample, 1, &device)).collect();
    let want = all.iter().sum::<f64>() / 12.0;
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard] {
        for precision in [MixedPrecision::default(), MixedPrecision::BF16] {
            let means = threads::run(3, DEADLINE, |group| {
                on_one_thread(|| {
                    let own = batches[group.rank()];
                    let engine = EngineConfig { strategy, precision, ..optimizer("adamw").0.engine };
                    let mut model = model(group, engine);
                    let mean = model.evaluate_mean(own, |model, (first, count)| {
                        (loss(model, &stream, *first, *count, &device), *count as f64)
                    });
                    mean.expect("an evaluation")
                })
            })
            .expect("a world");
            assert!(means.iter().all(|mean| *mean == means[0]), "{strategy}: {means:?}");
            assert!((means[0] - want).abs() < 1e-6 * want, "{strategy}, {precision:?}: {} {want}", means[0]);
        }
    }
}

/// Reference test 39: micro-batches of different sizes, losses that are sums over their tokens and a global denominator
/// train like one batch with its mean loss.
#[test]
fn losses_that_are_sums_train_like_one_mean() {
    let stream = Stream::of(FIXTURE, reference(FIXTURE).seq_len);
    let (config, lr) = optimizer("sgd");
    let train = |ranks: usize, divisor, micro_batches: &[(usize, usize)]| {
        threads::run(ranks, DEADLINE, |group| {
            on_one_thread(|| {
                let device = Device::flex().autodiff();
                let mut model = model(group, EngineConfig { divisor, ..config.engine });
                let weights = model.weights();
                for _ in 0..3 {
                    let step = |model: &LanguageModel, m: usize| {
                        let (first, count) = micro_batches[m];
                        let (ids, targets) = stream.batch(first, count, &device);
                        let tokens = (count * reference(FIXTURE).seq_len) as f64;
                        weights.add(tokens);
                        let mean = model.loss(ids, targets);
                        if divisor == Divisor::Weights { mean.mul_scalar(tokens) } else { mean }
                    };
                    model.step(micro_batches.len(), lr, step).expect("a step");
                }
                let mut all = Vec::new();
                model.export(|_, _, values| all.extend_from_slice(values)).expect("an export");
                all
            })
        })
        .expect("a world")
        .remove(0)
    };
    let want = train(1, Divisor::MicroBatches, &[(0, 8)]);
    for (ranks, micro_batches) in
        [(1, &[(0, 3), (3, 5)][..]), (2, &[(0, 1), (1, 7)]), (3, &[(0, 4), (4, 1), (5, 1), (6, 2)])]
    {
        let got = train(ranks, Divisor::Weights, micro_batches);
        let furthest = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(furthest < 2e-5, "{ranks} ranks, {micro_batches:?}: {furthest}");
    }
}
