//! Gathering and freeing of units: the part of the engine that moves parameters.

use shardwise_comm::HostBuffer;
use shardwise_core::{BackwardPrefetch, Travel};

use crate::Result;
use crate::config::UnitId;
use crate::engine::{Engine, Phase};
use crate::error::EngineError;
use crate::events::EventKind;
use crate::handle::{FlatParamHandle, GatherFrom};
use crate::unit::Place;
use crate::wire;

impl Engine {
    /// The places of one unit's flat parameters.
    pub(crate) fn parts_of(&self, unit: UnitId) -> impl Iterator<Item = Place> + use<> {
        (0..self.units[unit].parts.len()).map(move |part| Place { unit, part })
    }

    /// Lets the peers read this rank's parameters, and this rank theirs, until [`Engine::end_loan`]: the masters when `full`
    /// says so, otherwise as they travel to the computation; those that rest encoded as they rest.
    pub(crate) fn begin_loan(&mut self, full: bool) -> Result<()> {
        self.gathers_masters = full;
        if !self.config.strategy.is_sharded() || self.shards.size() == 1 {
            return Ok(());
        }
        if self.is_in_hops() {
            // Nothing is lent for long: each gather lends what it needs.
            return self.encode_params();
        }
        // What cannot be quantised is read as f32.
        let reads_masters = |h: &FlatParamHandle| {
            let exact = full || h.travel().is_exact() || h.travel().quantised.is_some();
            !h.rests() && h.away.params.is_none() && exact
        };
        let reads_encoded = |h: &FlatParamHandle| h.rests() || !full && h.has_low_copy();
        let read = |reads: &dyn Fn(&FlatParamHandle) -> bool| self.units.handles().any(reads);
        let (masters, encoded) = (read(&reads_masters), read(&reads_encoded));
        if masters {
            let bytes = self.params.numel() * size_of::<f32>();
            self.loan = Some(self.comm(self.shards.lend("parameters", &self.params, bytes))?);
        }
        if !full {
            self.encode_params()?;
        }
        if let Some(low) = self.low.as_ref().filter(|_| encoded) {
            let bytes = low.numel() * size_of::<f32>();
            self.low_loan = Some(self.comm(self.shards.lend("parameters", low, bytes))?);
        }
        Ok(())
    }

    /// Brings the parameters as they travel up to the masters' version.
    fn encode_params(&mut self) -> Result<()> {
        let Some(low) = self.low.as_mut().filter(|_| self.low_version != Some(self.version)) else {
            return Ok(());
        };
        let rank = self.group.rank();
        let low = low.writable().map_err(|source| EngineError::Comm { rank, source })?;
        let low = bytemuck::cast_slice_mut::<f32, u8>(low);
        for handle in self.units.handles_mut().filter(|handle| handle.has_low_copy()) {
            let (start, owned) = (handle.span().start, handle.owned().len());
            let masters = (&self.params.as_slice()[start..start + owned], handle.kept_numel());
            let (room, key) = (handle.encoded_range(), handle.rounding_key(self.updates));
            handle.encoded = wire::encode(handle.travel(), masters, &mut low[room], key);
        }
        self.low_version = Some(self.version);
        Ok(())
    }

    pub(crate) fn end_loan(&mut self) {
        for loan in [self.loan.take(), self.low_loan.take()].into_iter().flatten() {
            loan.finish();
        }
    }

    /// How a flat parameter is gathered now.
    pub(crate) fn gather_travel(&self, at: Place) -> Travel {
        let handle = &self.units[at];
        if self.gathers_masters && !handle.rests() { Travel::F32 } else { handle.travel() }
    }

    /// Where a flat parameter is gathered from now.
    fn gather_from(&self, at: Place) -> GatherFrom<'_> {
        let (handle, travel) = (&self.units[at], self.gather_travel(at));
        let masters = self.loan.as_ref().map(|loan| (loan, handle.span().start * size_of::<f32>()));
        if handle.is_whole() {
            return match &self.low {
                Some(low) if handle.rests() => {
                    let bytes = &bytemuck::cast_slice::<f32, u8>(low.as_slice())[handle.encoded_range()];
                    GatherFrom::OwnEncoded(bytes, travel)
                }
                _ => {
                    let key = handle.rounding_key(self.updates);
                    GatherFrom::Own(&self.params.as_slice()[handle.span()], travel, key)
                }
            };
        }
        let encoded = self.low_loan.as_ref().map(|loan| (loan, handle.low_start));
        match if travel.is_exact() { masters } else { encoded } {
            Some((loan, start)) => {
                let masters = masters.filter(|_| travel.quantised.is_some() && !handle.rests());
                GatherFrom::Peers { loan, start, travel, masters }
            }
            None => GatherFrom::Nowhere,
        }
    }

    pub(crate) fn start_unshard(&mut self, unit: UnitId) -> Result<()> {
        self.parts_of(unit).try_for_each(|at| self.start_unshard_part(at))
    }

    fn start_unshard_part(&mut self, at: Place) -> Result<()> {
        if !self.units[at].needs_unshard() {
            return Ok(());
        }
        let numel = self.units[at].layout().padded_numel();
        let dest = self.gather_buffer(at, numel)?;
        let travel = self.gather_travel(at);
        // A gather in two hops is posted when it is used, and counts what it sends itself.
        let in_hops = self.gathers_in_hops(at);
        let handle = &mut self.units[at];
        handle.start_unshard(dest);
        let ahead = handle.away.params;
        if !in_hops && ahead.is_none() {
            self.sent += handle.gather_traffic(travel);
        }
        self.gathered_bytes += (numel * size_of::<f32>()) as u64;
        self.gathered_bytes_peak = self.gathered_bytes_peak.max(self.gathered_bytes);
        self.note(at.unit, EventKind::GatherStarted);
        if let (Some(section), Some(swap)) = (ahead, self.swap.as_mut()) {
            let started = swap.read_ahead(at, section);
            if self.comm(started)? {
                self.note(at.unit, EventKind::ReadStarted);
            }
        }
        Ok(())
    }

    /// Gathers a unit, or waits for its gather that is under way.
    pub(crate) fn unshard(&mut self, unit: UnitId) -> Result<()> {
        self.start_unshard(unit)?;
        // Every part is waited for, so that a failure leaves zeros and not a hole.
        let mut result = Ok(());
        for at in self.parts_of(unit) {
            if let Some(mut buffer) = self.units[at].take_in_flight() {
                let arrived = if self.gathers_in_hops(at) {
                    self.fill_in_hops(at, &mut buffer)
                } else if self.units[at].away.params.is_some() {
                    self.fill_from_away(at, &mut buffer)
                } else {
                    let filled = self.units[at].fill(&mut buffer, self.gather_from(at));
                    self.comm(filled).map(|lost| {
                        if let Some(error) = lost {
                            self.units[at].encoded.error = error;
                        }
                    })
                };
                self.units[at].gathered(buffer);
                self.note(unit, EventKind::Gathered);
                result = result.and(arrived);
            }
        }
        result
    }

    /// Starts the gathers of the units that are expected next in forward.
    pub(crate) fn prefetch_forward(&mut self) -> Result<()> {
        if !self.policy.forward_prefetch {
            return Ok(());
        }
        let units = self.to_prefetch(self.coordinator.next_in_forward().iter().copied());
        self.gather_ahead(units)
    }

    /// Starts the gathers of the units that are expected next in backward.
    pub(crate) fn prefetch_backward(&mut self) -> Result<()> {
        if self.policy.backward_prefetch == BackwardPrefetch::None {
            return Ok(());
        }
        let units = self.to_prefetch(self.coordinator.next_in_backward());
        self.gather_ahead(units)
    }

    fn gather_ahead(&mut self, units: Vec<UnitId>) -> Result<()> {
        self.ahead.clone_from(&units);
        units.into_iter().try_for_each(|unit| self.start_unshard(unit))
    }

    /// Gathers a unit for a call. One that nobody has foreseen means that the units gathered ahead are the wrong ones.
    pub(crate) fn unshard_for_use(&mut self, unit: UnitId) -> Result<()> {
        if !self.is_gathered(unit) {
            self.ahead.clear();
        }
        let allowed = self.expect_not_updated(unit);
        self.unshard(unit).and(allowed)
    }

    /// The units that the policy wants gathered now, of those expected `next`.
    fn to_prefetch(&self, next: impl Iterator<Item = UnitId>) -> Vec<UnitId> {
        // A unit that is in use now is no prefetch.
        let mut units: Vec<UnitId> = Vec::new();
        for unit in next.filter(|unit| self.units[*unit].users == 0) {
            if units.len() + 1 >= self.policy.limit_all_gathers {
                break;
            }
            if !units.contains(&unit) {
                units.push(unit);
            }
        }
        let sizes = units.iter().map(|unit| (self.units[*unit].padded_numel(), self.is_gathered(*unit)));
        let wanted = self.policy.ahead(sizes, self.live_elements());
        units.truncate(wanted);
        units
    }

    fn is_gathered(&self, unit: UnitId) -> bool {
        self.units[unit].parts.iter().all(|part| !part.needs_unshard())
    }

    /// Elements of the units that are gathered or in flight.
    fn live_elements(&self) -> usize {
        let gathered = self.units.ids_without_root().filter(|unit| self.is_gathered(*unit));
        gathered.map(|unit| self.units[unit].padded_numel()).sum()
    }

    /// Frees a unit after its forward, unless it is used again so soon that the policy keeps it.
    pub(crate) fn reshard_after_forward(&mut self, unit: UnitId, training: bool) {
        let keeps = training && self.policy.max_reuse_distance > 0 && {
            let between = self.coordinator.until_reuse_after_forward(unit);
            self.policy.keeps(self.elements_of(&between), self.live_elements())
        };
        self.keep_or_reshard(unit, keeps);
    }

    /// Frees a unit after the backward of a call, unless it is used again so soon that the policy keeps it.
    pub(crate) fn reshard_after_backward(&mut self, unit: UnitId) {
        let another_round = match self.phase {
            Phase::Round { schedule, round } => round + 1 < schedule.rounds(),
            _ => false,
        };
        let reshards = self.config.strategy.reshards_after_forward();
        let keeps = reshards && self.policy.max_reuse_distance > 0 && {
            let between = self.coordinator.until_reuse_after_backward(unit, another_round);
            between.is_some_and(|between| self.policy.keeps(self.elements_of(&between), self.live_elements()))
        };
        self.keep_or_reshard(unit, keeps);
    }

    fn keep_or_reshard(&mut self, unit: UnitId, keeps: bool) {
        self.units[unit].kept = keeps;
        if !keeps {
            self.reshard(unit);
        }
    }

    fn elements_of(&self, units: &[UnitId]) -> usize {
        units.iter().map(|unit| self.units[*unit].padded_numel()).sum()
    }

    /// Frees the units that were kept for reuse: the parameters are about to change.
    pub(crate) fn release_kept(&mut self) {
        for unit in self.units.ids_without_root() {
            if std::mem::take(&mut self.units[unit].kept) {
                self.reshard(unit);
            }
        }
    }

    /// A buffer for a gather: a free one, that of a prefetch which nobody has used, or a new one.
    fn gather_buffer(&mut self, at: Place, numel: usize) -> Result<HostBuffer> {
        let (root, kind) = (at.unit.is_root(), self.units[at].kind());
        if !root && self.config.strategy.reshards_after_forward() && !self.pools.params(root, kind).has(numel)
        {
            self.drop_unused_gathers(Some(at.unit));
        }
        let taken = self.pools.params(root, kind).take(numel, &mut self.ledger, HostBuffer::new);
        self.comm(taken)
    }

    /// Frees units that are gathered or in flight while nobody computes with them or will soon, but for `keep`.
    pub(crate) fn drop_unused_gathers(&mut self, keep: Option<UnitId>) {
        let until_backward = !self.config.strategy.reshards_after_forward();
        for id in self.units.ids_without_root() {
            let unit = &self.units[id];
            let is_expected = unit.kept || self.ahead.contains(&id) || (until_backward && unit.calls > 0);
            if unit.users == 0 && !is_expected && Some(id) != keep {
                self.reshard(id);
            }
        }
    }

    /// Ends one use; true when it was the last.
    pub(crate) fn release_use(&mut self, unit: UnitId) -> bool {
        let unit = &mut self.units[unit];
        unit.users = unit.users.saturating_sub(1);
        unit.users == 0
    }

    pub(crate) fn reshard(&mut self, unit: UnitId) {
        for at in self.parts_of(unit) {
            let handle = &mut self.units[at];
            let (bytes, kind) = (handle.layout().padded_numel() * size_of::<f32>(), handle.kind());
            if let Some(buffer) = handle.reshard() {
                if let Some(swap) = self.swap.as_mut() {
                    swap.cancel_ahead_of(at);
                }
                self.pools.params(unit.is_root(), kind).give(buffer);
                self.gathered_bytes -= bytes as u64;
                self.note(unit, EventKind::Released);
            }
        }
    }
}
