//! How an engine comes to be: groups of ranks, shards, and what is derived from them.

use std::collections::VecDeque;
use std::sync::Arc;

use shardwise_comm::ProcessGroup;
use shardwise_core::{FlatLayout, Placement, Purpose, Traffic};

use crate::Result;
use crate::across::{Across, RelaySize};
use crate::config::EngineConfig;
use crate::coordinator::Coordinator;
use crate::engine::{Engine, Phase};
use crate::error::EngineError;
use crate::events::EventLog;
use crate::handle::{FlatParamHandle, HandleConfig};
use crate::hierarchy::Groups;
use crate::hops::Hops;
use crate::in_backward::InBackward;
use crate::ledger::Ledger;
use crate::optimizer::ParamGroups;
use crate::pool::Pools;
use crate::scale::LossScaler;
use crate::swap::gather::Stages;
use crate::swap::layout::{ReloadedSize, placements};
use crate::swap::reload::Workroom;
use crate::swap::{Swap, SwapPlace};
use crate::unit::{Place, Units};
use crate::uses::Uses;
use crate::whole::Whole;

impl Engine {
    /// Allocates the shards of the root and of the units, all zero. Each has one flat parameter, or one that is trained and
    /// one that is frozen ([`FlatLayout::build_groups`]); the root may have none. They are laid out for as many ranks as
    /// share one copy of the model ([`EngineConfig::shard_group_size`]).
    ///
    /// # Errors
    /// When the configuration contradicts itself, or memory cannot be had.
    pub fn new(
        group: ProcessGroup,
        root: Vec<FlatLayout>,
        units: Vec<Vec<FlatLayout>>,
        config: EngineConfig,
    ) -> Result<Self> {
        Self::with_groups(group, root, units, config, &ParamGroups::new())
    }

    /// As [`Engine::new`], with update rules of their own for some parameters.
    ///
    /// # Errors
    /// As [`Engine::new`], and when a rule is impossible.
    pub fn with_groups(
        group: ProcessGroup,
        root: Vec<FlatLayout>,
        units: Vec<Vec<FlatLayout>>,
        config: EngineConfig,
        groups: &ParamGroups,
    ) -> Result<Self> {
        Self::with_swap(group, root, units, config, (groups, None))
    }

    /// As [`Engine::with_groups`], with a place for what rests in files ([`EngineConfig::offload`]).
    ///
    /// # Errors
    /// As [`Engine::with_groups`], when something is to rest in files and there is no place for them or it cannot be used,
    /// and when there are too few buffers.
    pub fn with_swap(
        group: ProcessGroup,
        root: Vec<FlatLayout>,
        units: Vec<Vec<FlatLayout>>,
        config: EngineConfig,
        (groups, place): (&ParamGroups, Option<&SwapPlace>),
    ) -> Result<Self> {
        config.check()?;
        let mut ledger = Ledger::default();
        let coordinator = Coordinator::new(units.len());
        let rank = group.rank();
        let comm = |source| EngineError::Comm { rank, source };
        let reductions = group.split(0, rank as u64).map_err(comm)?;
        let Groups { shards, node, across, summed } = Groups::split(&group, &config)?;
        let pools = Pools::new(&units, &config, (shards.size(), summed.len()));
        // What rests elsewhere is gathered in an order of operations of its own: that of the step's loans stays open.
        let staged = if config.offload.parameters.is_away() {
            group.split((rank / shards.size()) as u64, rank as u64).map_err(comm)?
        } else {
            shards.clone()
        };
        let handle_config = HandleConfig {
            strategy: config.strategy,
            precision: config.precision,
            wire: config.wire,
            average: config.ema_decay.is_some(),
            world: group.size(),
            rank,
            summed,
            placement: Placement::default(),
        };
        let all: Vec<&FlatLayout> = root.iter().chain(units.iter().flatten()).collect();
        let mut placements = placements(&config, shards.size(), &all).into_iter();
        let mut numel = 0;
        let mut handles = |layouts: Vec<FlatLayout>| -> Result<Vec<FlatParamHandle>> {
            let handle = |layout: FlatLayout| {
                let rules = if layout.requires_grad() { groups.rules(&config, &layout)? } else { Vec::new() };
                let placement = placements.next().unwrap_or_default();
                let handle_config = HandleConfig { placement, ..handle_config.clone() };
                let how = (&handle_config, rules.as_slice());
                let handle = FlatParamHandle::new(layout, numel, &shards, how, &mut ledger).map_err(comm)?;
                numel = handle.span().end;
                Ok(handle)
            };
            layouts.into_iter().map(handle).collect()
        };
        let root = handles(root)?;
        let units = units.into_iter().map(handles).collect::<Result<Vec<_>>>()?;
        let units = Units::new(root, units);
        let swap = config.offload.is_any().then(|| Swap::open(&group, &config.offload, place)).transpose()?;
        let reloaded = ReloadedSize::of(&config, &units);
        let window = numel;
        let mut params = group.allocate(numel + reloaded.params).map_err(comm)?;
        if cfg!(debug_assertions) {
            // Padding must never be read: whoever does gets NaN.
            params.writable().map_err(comm)?.fill(f32::NAN);
        }
        units.handles().for_each(|handle| handle.settle(params.as_ptr()));
        let in_backward = InBackward::new(&config, shards.size(), &units)?;
        let whole = Whole::new(&units, &group, &mut ledger).map_err(comm)?;
        let mut engine = Self {
            whole,
            swap,
            staged,
            stages: Stages::default(),
            workroom: Workroom { window, ..Workroom::default() },
            in_backward,
            averaged: 0,
            averages_swapped: false,
            low: None,
            low_version: None,
            version: 0,
            gathers_masters: false,
            across: None,
            hops: None,
            scaler: LossScaler::new(config.loss_scale),
            updates: 0,
            skips: 0,
            weight: 0.0,
            unsharded_reserved: false,
            config,
            units,
            params,
            loan: None,
            low_loan: None,
            reducing: VecDeque::new(),
            end_of_round: None,
            diverged: false,
            reductions,
            coordinator,
            uses: Uses::default(),
            policy: config.gather_policy(),
            ahead: Vec::new(),
            pools,
            group,
            shards,
            ledger,
            events: EventLog::default(),
            phase: Phase::Idle,
            step: 0,
            sent: Traffic::default(),
            gathered_bytes: 0,
            gathered_bytes_peak: 0,
            failure: Arc::default(),
        };
        engine.allocate_derived(node, across)?;
        engine.place_away(&handle_config)?;
        engine.allocate_away(&reloaded)?;
        engine.zero_params()?;
        Ok(engine)
    }

    /// Allocates what some configurations need besides parameters and statistics.
    fn allocate_derived(&mut self, node: Option<ProcessGroup>, across: Option<ProcessGroup>) -> Result<()> {
        let (mut bytes, mut derived) = (0, 0);
        for handle in self.units.handles_mut().filter(|handle| handle.has_low_copy() || handle.rests()) {
            handle.low_start = bytes;
            bytes = handle.encoded_range().end;
            derived += if handle.rests() { 0 } else { handle.encoded_range().len() };
        }
        if bytes > 0 {
            let mut low = self.comm(self.group.allocate(bytes.div_ceil(size_of::<f32>())))?;
            // What rests in it begins as zeros.
            self.comm(low.writable().map(|low| low.fill(0.0)))?;
            self.low = Some(low);
            self.ledger.add_bytes(Purpose::LowPrecisionParameters, derived);
        }
        if let Some(across) = across {
            let parts = self.units.handles().filter(|h| h.is_trainable());
            let numel = parts.map(|h| h.layout().shard_numel()).max().unwrap_or(0);
            let size = RelaySize { numel, quantised: self.config.wire.gradients };
            let across = match &node {
                Some(node) => Across::nodes(across, (node.size(), node.rank()), size, &mut self.ledger),
                None => Across::replicas(across, self.shards.rank(), size, &mut self.ledger),
            };
            self.across = Some(self.comm(across)?);
        }
        if let Some(node) = node {
            let (groups, keeps) = ((self.shards.clone(), node), self.config.wire.keeps_secondary());
            let hops = Hops::new(groups, self.units.handles(), keeps, &mut self.ledger);
            self.hops = Some(self.comm(hops)?);
        }
        Ok(())
    }

    fn zero_params(&mut self) -> Result<()> {
        for Place { unit, part } in self.units.places() {
            let handle = &self.units[Place { unit, part }];
            let owned = handle.owned().len();
            if handle.rests() || handle.away.params.is_some() {
                // Zero already.
                continue;
            }
            self.edit_owned(unit, part, 0..owned, |params| params.fill(0.0))?;
        }
        Ok(())
    }
}
