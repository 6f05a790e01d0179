//! A thousand steps: nothing grows.

mod common;

use burn::tensor::Device;
use common::{DEADLINE, Stream, config, data, on_one_thread, optimizer, reference};
use shardwise_burn::ShardedModel;
use shardwise_comm::threads;
use shardwise_models::{CausalLm, LanguageModel, WeightsFolder};

/// What the process and one rank's engine hold.
#[derive(Debug)]
struct Held {
    resident_bytes: usize,
    descriptors: usize,
    allocations: u64,
}

impl Held {
    fn now(allocations: u64) -> Self {
        let statm = std::fs::read_to_string("/proc/self/statm").expect("statm");
        let pages: usize = statm.split_whitespace().nth(1).expect("resident").parse().expect("a number");
        let descriptors = std::fs::read_dir("/proc/self/fd").expect("descriptors").count();
        Self { resident_bytes: pages * 4096, descriptors, allocations }
    }
}

/// Two ranks train a golden model for a thousand steps of three rounds, and evaluate now and then, a different number of
/// batches each: after step 2 the engine allocates nothing, descriptors stay, and from step 100 on resident memory grows
/// by less than 1 %.
#[test]
fn a_thousand_steps_leave_nothing_behind() {
    let fixture = "gpt2-tiny";
    let held = threads::run(2, DEADLINE, |group| {
        on_one_thread(|| {
            let (config, _) = config(&data(fixture));
            let weights = WeightsFolder::open(data(fixture), &config).expect("weights");
            let device = Device::flex().autodiff();
            let stream = Stream::of(fixture, reference(fixture).seq_len);
            let (shard, lr) = optimizer("adamw");
            let module = config.init(&device).expect("a valid configuration");
            let rank = group.rank();
            let mut model = ShardedModel::new(group.clone(), module, shard, &weights).expect("a model");
            let mut held = Vec::new();
            for step in 1..=1000 {
                let loss = |model: &LanguageModel, m: usize| {
                    let (ids, targets) = stream.batch((step * 6 + m) % 200, 1, &device);
                    model.loss(ids, targets)
                };
                model.step(6, lr, loss).expect("a step");
                if step % 50 == 0 {
                    let evaluate = |model: &LanguageModel| {
                        for batch in 0..3 + 2 * rank {
                            let (ids, _) = stream.batch(batch, 1, &device.clone().inner());
                            model.forward(ids);
                        }
                    };
                    model.evaluate(evaluate).expect("an evaluation");
                }
                if [2, 100, 1000].contains(&step) {
                    group.barrier("measured").expect("both ranks");
                    held.push(Held::now(model.ledger().allocations()));
                    group.barrier("measured").expect("both ranks");
                }
            }
            held
        })
    })
    .expect("a world");
    for held in held {
        let [early, warm, late] = held.try_into().expect("three moments");
        assert_eq!(early.allocations, late.allocations, "buffers of the engine");
        assert_eq!(warm.descriptors, late.descriptors);
        let growth = late.resident_bytes as f64 / warm.resident_bytes as f64 - 1.0;
        assert!(growth < 0.01, "{growth:.4}: {warm:?} {late:?}");
    }
}
