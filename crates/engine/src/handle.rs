//! One unit's flat parameter on one rank: its shard, the gathered whole while it is needed, its gradient, its statistics.
//!
//! Three small state machines: the parameters (`ParamState`), the full gradient (`GradientState`) and the partial
//! sums of the gradient's shard. The engine moves them; each move checks that it is allowed.

mod gradient;

use std::ops::Range;
use std::sync::Arc;

use shardwise_comm::quantise::{Key, QuantisationError};
use shardwise_comm::{CommError, HostBuffer, Loan, PendingReduce, ProcessGroup, SharedBuffer};
use shardwise_core::{
    FlatLayout, MixedPrecision, Placement, Purpose, Rounding, ShardingStrategy, Traffic, Travel, WireConfig,
    seed_for,
};

use crate::gradient_wire::{GradientWire, Shown};
use crate::ledger::Ledger;
use crate::optimizer::ParamRule;
use crate::optimizer::state::{Kept, UpdateState};
use crate::partial::PartialSums;
use crate::pool::PartKind;
use crate::rest::Resting;
use crate::swap::parts::Away;
use crate::view::FlatView;
use crate::wire::{self, Encoded};

/// Where the full parameters are.
#[derive(Debug)]
pub(crate) enum ParamState {
    /// Every rank has only its shard.
    Sharded,
    /// A gather is under way, into this buffer.
    InFlight(HostBuffer),
    /// Here, in a buffer of the pool.
    Gathered(HostBuffer),
    /// Always here: one rank, or no sharding.
    Resident,
}

/// Whether a unit's full parameters can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParamStatus {
    /// Every rank has only its shard.
    NotAvailable,
    /// A gather is under way.
    InFlight,
    /// The full parameters are here.
    Available,
}

/// Where the full gradient of the current micro-batch is.
#[derive(Debug)]
pub(crate) enum GradientState {
    /// Nothing has been written.
    Absent,
    /// Parameters write their parts; those that have are marked.
    Writing {
        /// The full gradient, padded.
        buffer: SharedBuffer,
        /// By parameter.
        written: Vec<bool>,
    },
    /// Lent to the peers; this rank has not summed its part yet.
    Reducing(PendingReduce),
    /// Kept until the end of the round, because ranks have used different units in it.
    Deferred(SharedBuffer),
}

/// One unit's flat parameter on one rank.
#[derive(Debug)]
pub struct FlatParamHandle {
    pub(crate) layout: FlatLayout,
    pub(crate) precision: MixedPrecision,
    /// How the parameters travel to a computation.
    travel: Travel,
    /// Whether stochastic rounding applies to them.
    by_chance: bool,
    /// What rests in int8: the owned elements have no f32.
    pub(crate) resting: Option<Resting>,
    /// The byte at which the owned elements begin among those that are encoded, if they are.
    pub(crate) low_start: usize,
    /// What they have lost in the last encoding, if this rank has made it.
    pub(crate) encoded: Encoded,
    /// Ranks that read this rank's part of a gather.
    readers: usize,
    /// The ranks whose full gradients this one sums, of all: its node, its group of a hybrid layout, or all of them.
    summed: Range<usize>,
    /// How many such groups there are.
    groups: usize,
    /// This rank's place in its group.
    rank_inside: usize,
    /// The elements of the flat parameter that this rank keeps, without padding.
    pub(crate) owned: Range<usize>,
    /// The elements whose gradient this rank sums, without padding: its shard.
    pub(crate) shard: Range<usize>,
    /// Where they lie in the engine's parameters, padding included.
    span: Range<usize>,
    pub(crate) view: Arc<FlatView>,
    pub(crate) state: ParamState,
    pub(crate) gradient: GradientState,
    /// How it travels, if it is quantised on the way.
    pub(crate) gradient_wire: Option<Box<GradientWire>>,
    pub(crate) partials: PartialSums,
    /// Whether a gradient has been summed in the current round.
    pub(crate) reduced: bool,
    /// By parameter: whether this rank has written a gradient in the step.
    used: Vec<bool>,
    /// The gradient's shard of the whole step, between the last reduction and the update.
    pub(crate) sum: Option<SharedBuffer>,
    /// Whether the buffer that was given back last holds the gradient of the last step.
    holds_last: bool,
    pub(crate) state_of_update: UpdateState,
    /// The average of the owned parameters over steps, if it is asked for.
    pub(crate) average: Option<HostBuffer>,
    /// What is to rest elsewhere.
    pub(crate) placement: Placement,
    /// What does.
    pub(crate) away: Away,
}

/// What all handles of an engine share.
#[derive(Debug, Clone)]
pub(crate) struct HandleConfig {
    pub(crate) strategy: ShardingStrategy,
    pub(crate) precision: MixedPrecision,
    pub(crate) wire: WireConfig,
    /// Whether the average of the parameters is kept.
    pub(crate) average: bool,
    /// All ranks, and this one.
    pub(crate) world: usize,
    pub(crate) rank: usize,
    /// Those whose full gradients this one sums.
    pub(crate) summed: Range<usize>,
    /// What rests elsewhere.
    pub(crate) placement: Placement,
}

impl HandleConfig {
    /// What this rank shows to others of a gradient in each hop of its reduction.
    fn shown(&self, layout: &FlatLayout) -> Shown {
        let (near, groups) = (self.summed.len(), self.world / self.summed.len());
        let parts = layout.world_size() / near;
        let inside = if near > 1 { layout.padded_numel() } else { 0 };
        let across = if groups > 1 { parts * layout.shard_numel() } else { 0 };
        Shown { inside, across }
    }
}

/// Where a gather finds the parameters.
#[derive(Debug, Clone, Copy)]
pub(crate) enum GatherFrom<'a> {
    /// Every rank lends its part.
    Peers {
        /// What they lend.
        loan: &'a Loan,
        /// The byte at which this flat parameter begins in it.
        start: usize,
        /// How it is encoded.
        travel: Travel,
        /// The same of the f32 that was encoded, if it is lent.
        masters: Option<(&'a Loan, usize)>,
    },
    /// This rank has all of them; they arrive as if they had travelled.
    Own(&'a [f32], Travel, Option<Key>),
    /// This rank has all of them, encoded.
    OwnEncoded(&'a [u8], Travel),
    /// Nobody lends any more, after a failure.
    Nowhere,
}

/// Whether each of the `sharers` of a copy of the model keeps all of a flat parameter.
pub(crate) fn is_whole(layout: &FlatLayout, sharers: usize, strategy: ShardingStrategy) -> bool {
    sharers == 1 || !strategy.is_sharded() || layout.is_replicated()
}

/// Elements of a flat parameter that a rank keeps, padding included.
pub(crate) fn kept_numel(layout: &FlatLayout, sharers: usize, strategy: ShardingStrategy) -> usize {
    if is_whole(layout, sharers, strategy) { layout.numel() } else { layout.shard_numel() }
}

/// Ends a gather of `numel` elements into `dest`. After a failure it holds zeros, so that the computation it was meant for can
/// run to its end.
pub(crate) fn end_gather(dest: &mut [f32], numel: usize, arrived: bool) {
    if !arrived {
        dest.fill(0.0);
    } else if cfg!(debug_assertions) {
        // Zeros travel in the place of padding.
        dest[numel..].fill(f32::NAN);
    }
}

impl FlatParamHandle {
    /// Allocates the statistics. The parameters lie behind `start` elements of others; `group` shares one copy of them, and
    /// `rules` update them.
    pub(crate) fn new(
        layout: FlatLayout,
        start: usize,
        group: &ProcessGroup,
        (config, rules): (&HandleConfig, &[ParamRule]),
        ledger: &mut Ledger,
    ) -> Result<Self, CommError> {
        let shard = layout.shard_range(group.rank());
        let whole = is_whole(&layout, group.size(), config.strategy);
        let numel = kept_numel(&layout, group.size(), config.strategy);
        let owned = if whole { 0..layout.numel() } else { shard.clone() };
        let away = config.placement;
        let param_dtype = layout.dtype().low().unwrap_or(config.precision.param_dtype);
        let travel = config.wire.travel(param_dtype, layout.requires_grad());
        let rests = config.wire.rests_quantised(layout.requires_grad());
        // What rests elsewhere, or as it travels, has no room among the others.
        let room = if rests || away.parameters { 0 } else { numel };
        ledger.add_bytes(
            Purpose::Parameters,
            if rests { travel.bytes(numel) } else { room * size_of::<f32>() },
        );
        let kept = Kept { owned: owned.clone(), shard: shard.clone(), whole, away: away.optimizer };
        let state_of_update = UpdateState::new(&layout, &kept, rules, ledger)?;
        let average = if config.average && layout.requires_grad() && !away.optimizer {
            ledger.add(Purpose::WeightAverages, numel);
            Some(HostBuffer::new(numel)?)
        } else {
            None
        };
        let view = Arc::new(FlatView::new(layout.unit(), layout.numel()));
        let resident = whole && travel.is_exact() && !away.parameters;
        let state = if resident { ParamState::Resident } else { ParamState::Sharded };
        let gradient_wire = if layout.requires_grad() {
            let shown = config.shown(&layout);
            GradientWire::new(&config.wire, config.rank, shown, |numel| {
                ledger.add(Purpose::ErrorFeedback, numel)
            })?
        } else {
            None
        };
        Ok(Self {
            layout,
            precision: MixedPrecision { param_dtype, ..config.precision },
            travel,
            by_chance: config.wire.rounding == Rounding::Stochastic && !rests,
            resting: rests.then(Resting::default),
            low_start: 0,
            encoded: Encoded::default(),
            readers: if whole { 0 } else { group.size() - 1 },
            summed: config.summed.clone(),
            groups: config.world / config.summed.len(),
            rank_inside: config.rank - config.summed.start,
            owned,
            shard,
            span: start..start + room,
            view,
            state,
            gradient: GradientState::Absent,
            gradient_wire,
            partials: PartialSums::default(),
            reduced: false,
            used: Vec::new(),
            sum: None,
            holds_last: false,
            state_of_update,
            average,
            placement: away,
            away: Away::default(),
        })
    }

    /// The layout.
    pub fn layout(&self) -> &FlatLayout {
        &self.layout
    }

    /// The unit's name.
    pub fn name(&self) -> &str {
        self.layout.unit()
    }

    /// The elements of the flat parameter that this rank keeps.
    pub fn owned(&self) -> Range<usize> {
        self.owned.clone()
    }

    /// How the parameters travel to a computation.
    pub(crate) fn travel(&self) -> Travel {
        self.travel
    }

    /// Whether a copy of the owned elements is kept as they travel, beside themselves.
    pub(crate) fn has_low_copy(&self) -> bool {
        !self.is_whole() && !self.rests() && !self.placement.parameters && !self.travel.is_exact()
    }

    /// Elements that this rank keeps, padding included.
    pub(crate) fn kept_numel(&self) -> usize {
        if self.is_whole() { self.layout.numel() } else { self.layout.shard_numel() }
    }

    /// The owned elements' bytes among those that are encoded.
    pub(crate) fn encoded_range(&self) -> Range<usize> {
        self.low_start..self.low_start + self.travel.bytes(self.kept_numel())
    }

    /// What stochastic rounding depends on, after so many updates: the same for every rank.
    pub(crate) fn rounding_key(&self, updates: u64) -> Option<Key> {
        let name = self.layout.params().first().map_or(self.name(), |param| &param.path);
        self.by_chance.then(|| Key { seed: seed_for(updates, name), first: self.owned.start as u64 })
    }

    /// Which pools its buffers come from: flat parameters of a unit that differ in this are gathered at the same time.
    pub(crate) fn kind(&self) -> PartKind {
        PartKind::of(&self.layout)
    }

    /// Where the owned elements lie in the engine's parameters, padding included.
    pub(crate) fn span(&self) -> Range<usize> {
        self.span.clone()
    }

    /// Says that the owned elements lie elsewhere among the engine's parameters.
    pub(crate) fn set_span(&mut self, span: Range<usize>) {
        self.span = span;
    }

    /// Lets the parameters be seen for good if all of them are owned.
    pub(crate) fn settle(&self, params: *const f32) {
        if matches!(self.state, ParamState::Resident) {
            self.view.set(params.wrapping_add(self.span.start));
        }
    }

    /// Whether the full parameters are here.
    pub fn status(&self) -> ParamStatus {
        match self.state {
            ParamState::Sharded => ParamStatus::NotAvailable,
            ParamState::InFlight(_) => ParamStatus::InFlight,
            ParamState::Gathered(_) | ParamState::Resident => ParamStatus::Available,
        }
    }

    /// Whether the flat parameter is trained.
    pub fn is_trainable(&self) -> bool {
        self.layout.requires_grad()
    }

    /// One line for messages: name, status, sizes.
    pub fn summary(&self) -> String {
        format!(
            "`{}` ({:?}, {} parameters with {} elements, {} of them here, requires_grad {})",
            self.name(),
            self.status(),
            self.layout.params().len(),
            self.layout.numel(),
            self.owned.len(),
            self.layout.requires_grad()
        )
    }

    /// Where the full parameters are seen while they exist.
    pub fn view(&self) -> &Arc<FlatView> {
        &self.view
    }

    /// Whether a gather would do anything.
    pub(crate) fn needs_unshard(&self) -> bool {
        matches!(self.state, ParamState::Sharded)
    }

    /// Starts the gather into `dest`. The parts are copied when they are waited for.
    pub(crate) fn start_unshard(&mut self, dest: HostBuffer) {
        debug_assert!(self.needs_unshard());
        self.state = ParamState::InFlight(dest);
    }

    /// Whether this rank owns every element.
    pub(crate) fn is_whole(&self) -> bool {
        self.readers == 0
    }

    /// Takes the buffer of a gather that is under way, to [`FlatParamHandle::fill`] it.
    pub(crate) fn take_in_flight(&mut self) -> Option<HostBuffer> {
        match std::mem::replace(&mut self.state, ParamState::Sharded) {
            ParamState::InFlight(buffer) => Some(buffer),
            other => {
                self.state = other;
                None
            }
        }
    }

    /// Fills the buffer of a gather, waiting for peers. After a failure it holds zeros, so that the computation it was meant
    /// for can run to its end. Returns what this rank has lost by quantising, if it has not before.
    pub(crate) fn fill(
        &self,
        buffer: &mut HostBuffer,
        from: GatherFrom<'_>,
    ) -> Result<Option<QuantisationError>, CommError> {
        let dest = &mut buffer.as_mut_slice()[..self.layout.padded_numel()];
        let numel = self.layout.numel();
        let result = match from {
            GatherFrom::Peers { loan, start, travel, masters } => {
                self.fill_from_peers(dest, (loan, start), travel, masters).map(|()| None)
            }
            GatherFrom::Own(params, travel, key) => {
                let dest = &mut dest[..params.len()];
                dest.copy_from_slice(params);
                Ok(Some(wire::arrive(travel, dest, key)))
            }
            GatherFrom::OwnEncoded(bytes, travel) => {
                let decoded = wire::decode(travel, bytes, &mut dest[..numel], None);
                decoded.map(|()| None).map_err(|raw| CommError::undecodable(self.name(), &raw))
            }
            GatherFrom::Nowhere => {
                dest.fill(0.0);
                Ok(None)
            }
        };
        end_gather(dest, numel, result.is_ok());
        result
    }

    pub(crate) fn fill_from_peers(
        &self,
        dest: &mut [f32],
        (loan, start): (&Loan, usize),
        travel: Travel,
        masters: Option<(&Loan, usize)>,
    ) -> Result<(), CommError> {
        let numel = self.layout.shard_numel();
        for peer in loan.peers() {
            let part = &mut dest[peer * numel..(peer + 1) * numel];
            let window = loan.window(peer, start..start + travel.bytes(numel))?;
            let raw = match masters {
                Some((masters, start)) if wire::needs_raw(travel, window.bytes(), numel) => {
                    Some(masters.window(peer, start..start + size_of_val(part))?)
                }
                _ => None,
            };
            let raw = raw.as_ref().map(|raw| bytemuck::cast_slice(raw.bytes()));
            wire::decode(travel, window.bytes(), part, raw)
                .map_err(|raw| CommError::undecodable(self.name(), &raw))?;
        }
        Ok(())
    }

    /// Lets the full parameters in `buffer` be seen.
    pub(crate) fn gathered(&mut self, buffer: HostBuffer) {
        self.view.set(buffer.as_ptr());
        self.state = ParamState::Gathered(buffer);
    }

    /// Frees the full parameters and returns their buffer; nothing to do when they are resident.
    pub(crate) fn reshard(&mut self) -> Option<HostBuffer> {
        match std::mem::replace(&mut self.state, ParamState::Sharded) {
            ParamState::Gathered(mut buffer) => {
                self.view.clear();
                if cfg!(debug_assertions) {
                    // Whoever still reads the freed parameters gets NaN.
                    buffer.as_mut_slice().fill(f32::NAN);
                }
                Some(buffer)
            }
            ParamState::InFlight(buffer) => Some(buffer),
            other => {
                self.state = other;
                None
            }
        }
    }

    /// Bytes that this rank sends in one gather: its part, to each peer, and the f32 of what could not be quantised.
    pub(crate) fn gather_traffic(&self, travel: Travel) -> Traffic {
        if self.is_whole() {
            return Traffic::default();
        }
        let raw = if travel.quantised.is_some() { self.encoded.raw * size_of::<f32>() } else { 0 };
        self.to_readers(travel.bytes(self.layout.shard_numel()) + raw)
    }

    /// The bytes of this rank's part, to each rank that shares the model: those of other nodes are across.
    pub(crate) fn to_readers(&self, bytes: usize) -> Traffic {
        let sharers = self.layout.world_size();
        let near = self.summed.len().min(sharers);
        Traffic::of((near - 1) * bytes, (sharers - near) * bytes)
    }
}
