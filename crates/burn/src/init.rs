//! How a module becomes a sharded model: what is a unit, what stays whole, and where the first values come from.

use std::collections::HashMap;

use burn::module::{Module, ParamId};
use shardwise_comm::ProcessGroup;
use shardwise_core::{DType, FlatLayout, Tier};
use shardwise_engine::{Engine, EngineConfig, ParamGroups, ShardStore, SwapPlace};

use crate::assemble::{describe, layouts, link_units, places, root_leaves};
use crate::error::ShardError;
use crate::fill::fill;
use crate::model::{ShardConfig, ShardedModel};
use crate::params::Params;
use crate::partition::{InitContext, Kept};
use crate::source::ParamSource;
use crate::unit::SharedEngine;
use crate::values::{InitialValues, Values};
use crate::walk::{self, Found};
use crate::wrap::{Ignored, Persistence, WrapPolicy, Wrapping};

/// Takes modules apart into shards (DeepSpeed's name for it). Without further settings every [`crate::Sharded`] wrapper is a
/// unit and every parameter is sharded.
#[derive(Debug, Clone, Default)]
pub struct Init {
    config: ShardConfig,
    wrapping: Wrapping,
    initial_values: InitialValues,
    source_only: bool,
    groups: ParamGroups,
    swap: Option<SwapPlace>,
    remote_device: Option<Tier>,
}

/// What is known of parameters that are in shards already when a module is taken apart.
#[derive(Debug, Default)]
pub(crate) struct Before {
    /// Where those rest that have been partitioned by themselves, if not in memory.
    pub(crate) store: Option<ShardStore>,
    /// Their types; what stands in their places does not show them.
    pub(crate) dtypes: HashMap<ParamId, DType>,
    /// Those that have been partitioned by themselves.
    pub(crate) kept: HashMap<ParamId, Kept>,
}

impl Init {
    /// For models that train as `config` says.
    pub fn new(config: ShardConfig) -> Self {
        Self { config, ..Self::default() }
    }

    /// Chooses which wrapped layers become units. One that is not chosen computes as a part of what surrounds it.
    #[must_use]
    pub fn wrap(mut self, policy: WrapPolicy) -> Self {
        self.wrapping.policy = policy;
        self
    }

    /// Keeps the parameters whose path `which` is true for out of every unit, as `ignored` says. The first rule that fits a
    /// path counts.
    #[must_use]
    pub fn ignore(mut self, ignored: Ignored, which: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        self.wrapping.ignored.push((ignored, std::sync::Arc::new(which)));
        self
    }

    /// Keeps small parameters whole on every rank.
    #[must_use]
    pub fn persist(mut self, persistence: Persistence) -> Self {
        self.wrapping.persistence = persistence;
        self
    }

    /// Gives some parameters update rules of their own; tied ones are known by the path that is met first.
    #[must_use]
    pub fn groups(mut self, groups: ParamGroups) -> Self {
        self.groups = groups;
        self
    }

    /// Says where goes what rests in files ([`shardwise_engine::EngineConfig::offload`]): the run gets a folder of its own
    /// there, which goes with the model. Ranks of one host share it; rank 0's counts.
    ///
    /// ```
    /// use burn::module::Module;
    /// use shardwise_burn::{Init, ShardConfig, ShardError, ShardedModel};
    /// use shardwise_comm::ProcessGroup;
    /// use shardwise_core::Tier;
    /// use shardwise_engine::SwapPlace;
    ///
    /// /// Parameters and what the optimizer keeps rest in files below `/scratch/shardwise-my-run`.
    /// fn on_disk<M: Module>(group: ProcessGroup, module: M) -> Result<ShardedModel<M>, ShardError> {
    ///     let mut config = ShardConfig::default();
    ///     config.engine.offload.optimizer = Tier::Nvme;
    ///     let place = SwapPlace { path: "/scratch".into(), run: "my-run".into(), ..SwapPlace::default() };
    ///     Init::new(config).remote_device(Tier::Nvme).swap_at(place).shard(group, module, &())
    /// }
    /// ```
    #[must_use]
    pub fn swap_at(mut self, place: SwapPlace) -> Self {
        self.swap = Some(place);
        self
    }

    /// Says where the shards of parameters rest (DeepSpeed's name for it); [`Init::swap_at`] has an example. The
    /// configuration says so too ([`shardwise_core::Offload::parameters`]); if it says something else, taking a module
    /// apart is an error that names both, on all ranks. What rests on nvme needs [`Init::swap_at`].
    ///
    /// Where a module is taken apart piece by piece ([`Init::context`]), the pieces rest there as well: shards on nvme take no
    /// memory while the rest of the model is built.
    #[must_use]
    pub fn remote_device(mut self, tier: Tier) -> Self {
        self.remote_device = Some(tier);
        self
    }

    /// A store for shards of pieces, where parameters rest in files. A collective then.
    pub(crate) fn open_store(&self, group: &ProcessGroup) -> Result<Option<ShardStore>, ShardError> {
        let offload = self.engine_config()?.offload;
        let opens = offload.parameters == Tier::Nvme;
        Ok(opens.then(|| ShardStore::open(group, &offload, self.swap.as_ref())).transpose()?)
    }

    /// The engine's configuration, with what was asked of this `Init` besides.
    fn engine_config(&self) -> Result<EngineConfig, ShardError> {
        let mut engine = self.config.engine;
        match self.remote_device {
            Some(tier) if engine.offload.parameters == Tier::None => engine.offload.parameters = tier,
            Some(tier) if engine.offload.parameters != tier => {
                return Err(ShardError::RemoteDevice {
                    remote_device: tier,
                    parameters: engine.offload.parameters,
                });
            }
            _ => {}
        }
        Ok(engine)
    }

    /// Says what is done about first values that ranks might not share.
    #[must_use]
    pub fn initial_values(mut self, policy: InitialValues) -> Self {
        self.initial_values = policy;
        self
    }

    /// Lets a parameter that the source does not have be an error, instead of asking the module's own initialiser.
    #[must_use]
    pub fn source_only(mut self) -> Self {
        self.source_only = true;
        self
    }

    /// Begins to partition the pieces of a model as they are built, over the ranks of `group`.
    pub fn context(&self, group: ProcessGroup) -> InitContext {
        InitContext::new(self.clone(), group)
    }

    /// Lets the unit at path `unit` use the parameter at `path`, which stays in the unit that owns it: that one is gathered
    /// and freed for both. The user's layer must hold a clone of the parameter. Without a registration a parameter that
    /// several units hold belongs to the innermost unit around all of them, or to the root.
    #[must_use]
    pub fn register_external_parameter(mut self, unit: &str, path: &str) -> Self {
        self.wrapping.external.push((unit.to_string(), path.to_string()));
        self
    }

    /// Takes back [`Init::register_external_parameter`].
    ///
    /// # Errors
    /// When it was never registered.
    pub fn unregister_external_parameter(mut self, unit: &str, path: &str) -> Result<Self, ShardError> {
        let registered =
            self.wrapping.external.iter().position(|(u, p)| (u.as_str(), p.as_str()) == (unit, path));
        match registered {
            Some(index) => {
                self.wrapping.external.remove(index);
                Ok(self)
            }
            None => Err(ShardError::External {
                unit: unit.to_string(),
                path: path.to_string(),
                message: "it was never registered; register it first".to_string(),
            }),
        }
    }

    /// Takes `module` apart: each rank of `group` keeps its shard of every parameter. Values come from `source` where it
    /// has them, otherwise from the module (its initialisers, seeded by path, or the values it already has); one
    /// parameter at a time is whole. A collective.
    ///
    /// # Errors
    /// When the module's parameters cannot be sharded, ranks disagree about them, or values cannot be had.
    pub fn shard<M: Module>(
        &self,
        group: ProcessGroup,
        module: M,
        source: &dyn ParamSource,
    ) -> Result<ShardedModel<M>, ShardError> {
        self.shard_with(group, module, source, Before::default())
    }

    /// The same for values that are known to be equal on all ranks.
    pub(crate) fn trusting_values(&self) -> Self {
        Self { initial_values: InitialValues::Trusted, ..self.clone() }
    }

    pub(crate) fn values<'a>(&self, group: &'a ProcessGroup, source: &'a dyn ParamSource) -> Values<'a> {
        Values::new(group, source, self.config.seed, (self.initial_values, !self.source_only))
    }

    pub(crate) fn ignored(&self, path: &str) -> Option<Ignored> {
        self.wrapping.ignored(path)
    }

    /// As [`Init::shard`], for a module of which a part has been in shards `before`.
    pub(crate) fn shard_with<M: Module>(
        &self,
        group: ProcessGroup,
        module: M,
        source: &dyn ParamSource,
        mut before: Before,
    ) -> Result<ShardedModel<M>, ShardError> {
        let mut found = Found::in_module(&module, &self.wrapping, std::mem::take(&mut before.dtypes))?;
        let (root, units) = layouts(&found, self.config.engine.shard_group_size(group.size())?)?;
        let all = || root.iter().chain(units.iter().flatten());
        let mut settings = describe(all(), &self.config);
        let remote_device = self.remote_device.map_or("as configured", Tier::name);
        settings.push(("remote_device".to_string(), remote_device.to_string()));
        settings.extend(self.groups.describe(all().flat_map(FlatLayout::params)));
        group.check_agreement("models", &settings)?;
        let how = (&self.groups, self.swap.as_ref());
        let mut engine = Engine::with_swap(group.clone(), root, units, self.engine_config()?, how)?;
        let places = places(&found, &engine);
        let (evaluation, slots) = walk::renew_slots(|| {
            fill(module, &mut engine, &places, self.values(&group, source), &mut before)
        });
        drop(before);
        let evaluation = evaluation?;
        found.take_slots(&slots);
        let params = Params::new(&engine, places.iter().map(|(id, place)| (*id, place.key())));
        let engine = SharedEngine::new(engine);
        link_units(&found, &engine, &places, self.config.recompute);
        let (training, root) = root_leaves(evaluation.clone(), &engine, &places);
        Ok(ShardedModel::assemble((training, evaluation), engine, root, params, self.clone()))
    }
}
