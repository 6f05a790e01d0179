//! Parameter groups and averages of the weights through a Burn module.

use std::collections::BTreeMap;
use std::time::Duration;

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};
use shardwise_burn::{ShardConfig, ShardError, Sharded, ShardedModel};
use shardwise_comm::threads;
use shardwise_engine::{EngineConfig, GroupLr, GroupRule, OptimizerConfig, ParamGroups};

const DEADLINE: Duration = Duration::from_secs(60);

#[derive(Module, Debug)]
struct Model {
    embedding: Embedding,
    layers: Vec<Sharded<Linear>>,
}

impl Model {
    fn new(device: &Device) -> Self {
        Self {
            embedding: EmbeddingConfig::new(11, 6).init(device),
            layers: (0..2).map(|_| Sharded::new(LinearConfig::new(6, 6).init(device))).collect(),
        }
    }

    fn loss(&self, m: usize, device: &Device) -> Tensor<1> {
        let ids: Vec<i64> = (0..5).map(|i| ((i * 3 + m) % 11) as i64).collect();
        let mut x = self.embedding.forward(Tensor::<2, Int>::from_data(TensorData::new(ids, [1, 5]), device));
        for layer in &self.layers {
            x = layer.call(x, |layer, x| layer.forward(x).tanh());
        }
        x.square().mean()
    }
}

type Weights = BTreeMap<String, Vec<u32>>;

fn weights(model: &mut ShardedModel<Model>) -> Weights {
    let mut all = Weights::new();
    let see = |path: &str, _: &[usize], values: &[f32]| {
        all.insert(path.to_string(), values.iter().map(|v| v.to_bits()).collect());
    };
    model.export(see).expect("exported");
    all
}

fn config(ema_decay: Option<f64>) -> ShardConfig {
    let engine = EngineConfig { optimizer: OptimizerConfig::MUON, ema_decay, ..EngineConfig::default() };
    ShardConfig { engine, recompute: false, seed: 5 }
}

fn train(model: &mut ShardedModel<Model>, steps: usize) {
    let device = Device::flex().autodiff();
    for _ in 0..steps {
        model.step(4, 0.02, |model: &Model, m| model.loss(m, &device)).expect("a step");
    }
}

fn groups() -> ParamGroups {
    let still = GroupRule { lr: GroupLr::Times(0.0), ..GroupRule::default() };
    let lion = GroupRule { optimizer: Some(OptimizerConfig::LION), ..GroupRule::default() };
    ParamGroups::new().with_pattern("layers.0.*", still).with("vectors", |_, shape| shape.len() == 1, lion)
}

/// Groups choose by path and shape, whatever the number of ranks; a rate of zero leaves parameters as they are.
#[test]
fn groups_choose_by_path() {
    let run = |ranks: usize, groups: ParamGroups| {
        threads::run(ranks, DEADLINE, |group| {
            let module = Model::new(&Device::flex().autodiff());
            let mut model =
                ShardedModel::with_groups(group, module, config(None), &(), &groups).expect("a model");
            let before = weights(&mut model);
            train(&mut model, 3);
            (before, weights(&mut model))
        })
        .expect("a world")
        .remove(0)
    };
    let (before, alone) = run(1, groups());
    for (path, bits) in &alone {
        assert_eq!(path.starts_with("layers.0."), *bits == before[path], "{path}");
    }
    for ranks in [2, 4] {
        assert_eq!(run(ranks, groups()).1, alone, "{ranks} ranks");
    }
    let (_, plain) = run(2, ParamGroups::new());
    assert!(plain.iter().all(|(path, bits)| *bits != alone[path]), "without groups all differ");
}

/// Ranks whose groups differ are refused, with the difference.
#[test]
fn ranks_with_different_groups_are_refused() {
    threads::run(2, DEADLINE, |group| {
        let module = Model::new(&Device::flex().autodiff());
        let rate = GroupRule { lr: GroupLr::Fixed(group.rank() as f64), ..GroupRule::default() };
        let groups = ParamGroups::new().with_pattern("layers.*", rate);
        let error =
            ShardedModel::with_groups(group, module, config(None), &(), &groups).expect_err("refused");
        let text = error.to_string();
        for words in ["parameter group 0", "Fixed(0.0)", "Fixed(1.0)", "rank 0", "rank 1"] {
            assert!(text.contains(words), "{text} lacks {words}");
        }
    })
    .expect("a world");
}

/// Averages are seen inside `with_averages` only, also when the work inside fails.
#[test]
fn averages_take_the_weights_place_for_a_while() {
    threads::run(2, DEADLINE, |group| {
        let device = Device::flex().autodiff();
        let module = Model::new(&device);
        let mut model = ShardedModel::new(group, module, config(Some(0.5)), &()).expect("a model");
        train(&mut model, 3);
        let own = weights(&mut model);
        let loss = |model: &mut ShardedModel<Model>| {
            model.evaluate(|model| model.loss(0, &Device::flex()).into_scalar::<f32>()).expect("evaluated")
        };
        let own_loss = loss(&mut model);
        let inside = model.with_averages(|model| Ok::<_, ShardError>((weights(model), loss(model))));
        let (averages, average_loss) = inside.expect("averages");
        assert!(averages.iter().all(|(path, bits)| *bits != own[path]));
        assert!(average_loss != own_loss);
        let failed = model
            .with_averages(|_| Err::<(), _>(ShardError::Load { path: "x".into(), message: "no".into() }));
        assert!(failed.is_err());
        assert_eq!(weights(&mut model), own);
        train(&mut model, 1);
    })
    .expect("a world");
}
