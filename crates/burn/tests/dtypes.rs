//! Parameters of several types in one unit.

mod common;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::nn::LayerNormConfig;
use burn::tensor::{DType, Device, Tensor, TensorData};
use common::{Net, Params, STRATEGIES, assert_close, config, descent, params, plain_descent, step, world};
use shardwise_burn::{Init, InitialValues, ShardConfig, ShardedModel};
use shardwise_core::ShardingStrategy;

/// Gives the first matrix of every block its values in bf16.
struct Narrow {
    path: Vec<String>,
}

impl ModuleMapper for Narrow {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !is_narrow(&self.path.join(".")) {
            return param;
        }
        let (id, device) = (param.id, param.lazy_device());
        let data: TensorData = param.val().into_data();
        let narrow = Tensor::<D>::from_data(data.convert::<half::bf16>(), (&device, DType::BF16));
        Param::initialized(id, narrow.require_grad())
    }
}

fn is_narrow(path: &str) -> bool {
    path.ends_with("up.weight")
}

fn bits(params: &Params) -> Vec<(&str, Vec<u32>)> {
    params
        .iter()
        .map(|(path, _, values)| (path.as_str(), values.iter().map(|v| v.to_bits()).collect()))
        .collect()
}

/// Reported bugs B13 and C8, and I5: bf16 matrices beside f32 norms and biases in one unit train with f32 masters, gathered
/// by type and clipped as one, with the same bits for every strategy and number of ranks, near what plain Burn makes of the
/// same values in f32.
#[test]
fn a_unit_may_mix_types() {
    let device = Device::flex().autodiff();
    let mixed = Net::new(&device).map(&mut Narrow { path: Vec::new() });
    let run = |ranks, config: ShardConfig| {
        world(ranks, |group| {
            let mut model = ShardedModel::new(group, mixed.clone(), config, &()).expect("sharded");
            let types: Vec<String> =
                model.layouts().iter().map(|l| format!("{} {}", l.unit(), l.dtype())).collect();
            let before = params(&mut model);
            let losses: Vec<u64> = (0..3).map(|index| step(&mut model, index, Net::loss)).collect();
            (types, before, losses, params(&mut model))
        })
        .remove(0)
    };
    let mut clipped = descent(ShardingStrategy::FullShard);
    let want = run(1, clipped);
    let (types, before, _, after) = &want;
    let blocks = (0..3).flat_map(|i| [format!("blocks.{i} f32"), format!("blocks.{i} bf16")]);
    assert_eq!(*types, std::iter::once("root f32".to_string()).chain(blocks).collect::<Vec<_>>());
    for (path, _, values) in before.iter().filter(|(path, ..)| is_narrow(path)) {
        assert!(values.iter().all(|v| half::bf16::from_f32(*v).to_f32() == *v), "{path} was bf16");
    }
    assert!(bits(before) != bits(after), "masters move in f32");
    let plain = plain_descent(Net::new(&device), before, 3, Net::loss);
    assert_close(after, &plain, 1e-3);
    clipped.engine.clip_norm = Some(0.1);
    let want_clipped = run(1, clipped);
    for strategy in STRATEGIES {
        for ranks in [2, 4] {
            for clip_norm in [None, Some(0.1)] {
                let mut config = descent(strategy);
                config.engine.clip_norm = clip_norm;
                let got = run(ranks, config);
                let want = if clip_norm.is_some() { &want_clipped } else { &want };
                assert_eq!(
                    (&got.2, bits(&got.3)),
                    (&want.2, bits(&want.3)),
                    "{strategy}, {ranks} ranks, {clip_norm:?}"
                );
            }
        }
    }
}

/// The flat parameters' units and types, in order.
fn types<M: Module>(model: &ShardedModel<M>) -> Vec<String> {
    model.layouts().iter().map(|l| format!("{} {}", l.unit(), l.dtype())).collect()
}

/// Three steps from here: the types, the losses' bits and the parameters.
fn outcome(mut model: ShardedModel<Net>) -> (Vec<String>, Vec<u64>, Params) {
    let losses = (0..3).map(|index| step(&mut model, index, Net::loss)).collect();
    let after = params(&mut model);
    (types(&model), losses, after)
}

/// The window that stands in a parameter's place is f32; freezing and unfreezing, and partitioning ahead, keep the type
/// that the parameter was given in.
#[test]
fn types_outlive_the_windows_in_the_parameters_places() {
    let device = Device::flex().autodiff();
    let mixed = Net::new(&device).map(&mut Narrow { path: Vec::new() });
    for strategy in STRATEGIES {
        for ranks in [1, 2] {
            let init = Init::new(config(strategy));
            world(ranks, |group| {
                let at_once = || init.shard(group.clone(), mixed.clone(), &()).expect("sharded");
                let want = outcome(at_once());
                assert!(want.0.contains(&"blocks.1 bf16".to_string()));

                let mut retrained = at_once();
                retrained.set_trainable(|path| path.starts_with("norm")).expect("frozen");
                assert!(types(&retrained).contains(&"blocks.1 bf16".to_string()));
                retrained.set_trainable(|_| true).expect("unfrozen");
                assert!(outcome(retrained) == want, "{strategy}, {ranks} ranks: set_trainable");

                let mut context = init.context(group.clone());
                let module = context.partition("", mixed.clone(), &()).expect("partitioned");
                let early = context.shard(module, &()).expect("sharded");
                assert!(outcome(early) == want, "{strategy}, {ranks} ranks: InitContext");
            });
        }
    }
}

/// Numbers that f32 cannot hold are refused, however they would come in.
#[test]
fn f64_is_refused_everywhere() {
    let wide =
        |device: &Device| Tensor::<1>::from_data(TensorData::from([0.1f64, 0.2]), (device, DType::F64));
    for policy in [InitialValues::Trusted, InitialValues::Synced] {
        world(2, |group| {
            let device = Device::flex().autodiff();
            let init = Init::new(config(ShardingStrategy::FullShard)).initial_values(policy);
            let layer = |weight| {
                let mut norm = LayerNormConfig::new(2).init(&device);
                norm.gamma = weight;
                norm
            };
            let given = || layer(Param::from_tensor(wide(&device)));
            let draw = move |device: &Device, _: bool| wide(device);
            let drawn =
                || layer(Param::uninitialized(ParamId::new(), draw, device.clone(), true, [2].into()));
            for norm in [given(), drawn()] {
                let error = init.context(group.clone()).partition("norm", norm, &()).expect_err("refused");
                assert!(error.to_string().contains("`norm.gamma` is f64"), "{policy:?}: {error}");
            }
            for norm in [given(), drawn()] {
                let error = init.shard(group.clone(), norm, &()).map(drop).expect_err("refused").to_string();
                assert!(error.contains("`gamma` is f64"), "{policy:?}: {error}");
            }
        });
    }
}
