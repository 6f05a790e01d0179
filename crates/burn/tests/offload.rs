//! Modules whose state rests on the host or in files: they train, are looked into and are frozen as in memory.

mod common;

use std::path::Path;

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig};
use burn::tensor::{Device, Int, Tensor};
use common::{
    Block, Net, Params, STRATEGIES, VOCAB, WIDTH, batch, config, head, params, sorted, step, world,
};
use shardwise_burn::{Init, ShardConfig, Sharded, ShardedModel, SummonOptions, Which};
use shardwise_core::{Offload, ShardingStrategy, Tier};
use shardwise_engine::SwapPlace;

/// The blocks of [`Net`] called twice each, the second with the first one's weight.
#[derive(Module, Debug)]
struct Tied {
    embed: Embedding,
    first: Sharded<Block>,
    second: Sharded<Block>,
}

impl Tied {
    fn new(device: &Device) -> Self {
        let first = Block::new(device);
        let mut second = Block::new(device);
        second.up.weight = first.up.weight.clone();
        let embed = EmbeddingConfig::new(VOCAB, WIDTH).init(device);
        Self { embed, first: Sharded::new(first), second: Sharded::new(second) }
    }

    fn loss(&self, ids: Tensor<2, Int>, targets: Tensor<1, Int>) -> Tensor<1> {
        let mut x = self.embed.forward(ids);
        for block in [&self.first, &self.second, &self.first] {
            x = block.call(x, |block, x| block.forward(x));
        }
        head(x, self.embed.weight.val(), targets)
    }
}

/// Parameters and optimizer in these tiers, in tiles of 1024 elements; nothing is too small.
fn resting(config: ShardConfig, parameters: Tier, optimizer: Tier) -> ShardConfig {
    let mut config = config;
    config.engine.offload =
        Offload { parameters, optimizer, buffer_numel: 1024, least_numel: 1, ..Offload::default() };
    config
}

fn init(config: ShardConfig, folder: &Path) -> Init {
    let place = SwapPlace { path: folder.to_path_buf(), run: "burn".into(), ..SwapPlace::default() };
    Init::new(config).swap_at(place)
}

/// Trains, reads and writes in scopes, looks at gradients and evaluates; the losses, a gradient and the weights at the end.
fn life(mut model: ShardedModel<Net>) -> (Vec<u64>, Params) {
    let mut losses = vec![step(&mut model, 0, Net::loss), step(&mut model, 1, Net::loss)];
    let path = "blocks.1.up.weight";
    {
        let scope = model.gather(Which::Paths(&[path])).expect("gathered");
        assert!(scope.values(path).expect("held").iter().any(|value| *value != 0.0));
    }
    let mut scope = model.gather_mut(Which::Unit("blocks.1"), 0).expect("gathered");
    scope.values_mut(path).expect("held").iter_mut().for_each(|value| *value *= 0.5);
    scope.close().expect("sharded again");
    losses.push(step(&mut model, 2, Net::loss));
    let summoned = SummonOptions { with_grads: true, ..SummonOptions::default() };
    let scope = model.summon_full_params(summoned).expect("summoned");
    let gradient = scope.gradient(path).expect("held").expect("trained");
    assert!(gradient.iter().any(|value| *value != 0.0));
    losses.extend(gradient.iter().map(|value| u64::from(value.to_bits())));
    drop(scope);
    let (ids, targets) = batch(0, 9, &Device::flex());
    let seen = model.evaluate(|net| net.loss(ids, targets)).expect("evaluated").into_data();
    losses.extend(seen.iter::<f32>().map(|loss| u64::from(loss.to_bits())));
    (losses, sorted(params(&mut model)))
}

#[test]
fn a_models_life_does_not_depend_on_where_it_rests() {
    let device = Device::flex().autodiff();
    let folder = tempfile::tempdir().expect("a folder");
    for strategy in STRATEGIES {
        for recompute in [false, true] {
            let base = ShardConfig { recompute, ..config(strategy) };
            let run = |ranks, config| {
                let mut all = world(ranks, |group| {
                    let model = init(config, folder.path()).shard(group, Net::new(&device), &());
                    life(model.expect("sharded"))
                });
                all.remove(0)
            };
            let want = run(2, base);
            for (parameters, optimizer) in [
                (Tier::Nvme, Tier::Nvme),
                (Tier::Host, Tier::Host),
                (Tier::Nvme, Tier::None),
                (Tier::None, Tier::Host),
            ] {
                for ranks in [1, 2, 4] {
                    let got = run(ranks, resting(base, parameters, optimizer));
                    assert!(got == want, "{strategy}, {ranks} ranks, {parameters} and {optimizer}");
                }
            }
        }
    }
    assert!(std::fs::read_dir(folder.path()).expect("a folder").next().is_none(), "nothing is left");
}

/// Ties across units, units that are called twice, and recomputation.
#[test]
fn ties_and_repeated_calls_train_from_where_they_rest() {
    let device = Device::flex().autodiff();
    let folder = tempfile::tempdir().expect("a folder");
    let run = |ranks, config| {
        let mut all = world(ranks, |group| {
            let model = init(config, folder.path()).shard(group, Tied::new(&device), &());
            let mut model = model.expect("sharded");
            let losses: Vec<u64> = (0..3).map(|index| step(&mut model, index, Tied::loss)).collect();
            (losses, sorted(params(&mut model)))
        });
        all.remove(0)
    };
    for recompute in [false, true] {
        let base = ShardConfig { recompute, ..config(ShardingStrategy::FullShard) };
        let want = run(1, base);
        for tier in [Tier::Host, Tier::Nvme] {
            for ranks in [1, 2, 4] {
                let got = run(ranks, resting(base, tier, tier));
                assert!(got == want, "{ranks} ranks, {tier}, recompute {recompute}");
            }
        }
    }
}

/// Frozen parameters rest elsewhere too, and are there when they are unfrozen.
#[test]
fn frozen_parameters_rest_elsewhere() {
    let device = Device::flex().autodiff();
    let folder = tempfile::tempdir().expect("a folder");
    let is_norm = |path: &str| path.starts_with("norm");
    let mut base = config(ShardingStrategy::FullShard);
    base.engine.optimizer =
        shardwise_engine::OptimizerConfig::Sgd { momentum: 0.0, weight_decay: 0.0, nesterov: false };
    let run = |ranks, config| {
        let mut all = world(ranks, |group| {
            let model = init(config, folder.path()).shard(group, Net::new(&device), &());
            let mut model = model.expect("sharded");
            let before = sorted(params(&mut model));
            model.set_trainable(is_norm).expect("frozen");
            let mut losses = vec![step(&mut model, 0, Net::loss)];
            let frozen = sorted(params(&mut model));
            for ((path, _, a), (_, _, b)) in before.iter().zip(&frozen) {
                assert_eq!(a != b, is_norm(path), "{path}");
            }
            model.set_trainable(|_| true).expect("unfrozen");
            losses.push(step(&mut model, 1, Net::loss));
            (losses, sorted(params(&mut model)))
        });
        all.remove(0)
    };
    let want = run(2, base);
    for tier in [Tier::Host, Tier::Nvme] {
        for ranks in [1, 2, 4] {
            assert!(run(ranks, resting(base, tier, tier)) == want, "{ranks} ranks, {tier}");
        }
    }
}

/// I3: an `Init` and the configuration both say where shards rest; what they say must agree, and files need a place.
#[test]
fn a_remote_device_and_the_configuration_agree() {
    let device = Device::flex().autodiff();
    let folder = tempfile::tempdir().expect("a folder");
    let base = config(ShardingStrategy::FullShard);
    let plain = world(2, |group| {
        let mut model = Init::new(base).shard(group, Net::new(&device), &()).expect("sharded");
        (step(&mut model, 0, Net::loss), params(&mut model))
    });
    use Tier::{Host, None as Nowhere, Nvme};
    let cases: [(Tier, Tier, bool, &[&str]); 8] = [
        (Nowhere, Nowhere, false, &[]),
        (Host, Nowhere, false, &[]),
        (Host, Host, false, &[]),
        (Nvme, Nowhere, true, &[]),
        (Nvme, Nvme, true, &[]),
        (Nvme, Host, true, &["remote_device is \"nvme\"", "offload.parameters is \"host\""]),
        (Nowhere, Nvme, true, &["remote_device is \"none\"", "offload.parameters is \"nvme\""]),
        (Nvme, Nowhere, false, &["nvme", "offload.path"]),
    ];
    for (remote, configured, has_place, words) in cases {
        let got = world(2, |group| {
            let config = resting(base, configured, Nowhere);
            let init = if has_place { init(config, folder.path()) } else { Init::new(config) };
            match init.remote_device(remote).shard(group, Net::new(&device), &()) {
                Ok(mut model) => Ok((step(&mut model, 0, Net::loss), params(&mut model))),
                Err(error) => Err(error.to_string()),
            }
        });
        for (got, plain) in got.into_iter().zip(&plain) {
            match got {
                Ok(got) => assert!(words.is_empty() && got == *plain, "{remote} over {configured}"),
                Err(message) => {
                    let told = !words.is_empty() && words.iter().all(|word| message.contains(word));
                    assert!(told, "{remote} over {configured}: {message}");
                }
            }
        }
    }
}
