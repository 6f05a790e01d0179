//! One unit's flat parameter on one rank: its shard, the gathered whole while it is needed, its gradient, its statistics.
//!
//! Three small state machines: the parameters (`ParamState`), the full gradient (`GradientState`) and the partial
//! sums of the gradient's shard. The engine moves them; each move checks that it is allowed.

mod gradient;

use std::ops::Range;
use std::sync::Arc;

use shardwise_comm::codec::round;
use shardwise_comm::{CommError, HostBuffer, Loan, PendingReduce, ProcessGroup, SharedBuffer};
use shardwise_core::{FlatLayout, MixedPrecision, Placement, Precision, Purpose, ShardingStrategy, Traffic};

use crate::ledger::Ledger;
use crate::optimizer::ParamRule;
use crate::optimizer::state::{Kept, UpdateState};
use crate::partial::PartialSums;
use crate::pool::PartKind;
use crate::swap::parts::Away;
use crate::view::FlatView;

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
    /// Where the owned elements lie among those that travel in less than f32, if they do.
    pub(crate) low_start: usize,
    /// Ranks that read this rank's part of a gather.
    readers: usize,
    /// The ranks whose full gradients this one sums, of all: its node, its group of a hybrid layout, or all of them.
    summed: Range<usize>,
    /// How many such groups there are.
    groups: usize,
    /// The elements of the flat parameter that this rank keeps, without padding.
    pub(crate) owned: Range<usize>,
    /// The elements whose gradient this rank sums, without padding: its shard.
    pub(crate) shard: Range<usize>,
    /// Where they lie in the engine's parameters, padding included.
    span: Range<usize>,
    pub(crate) view: Arc<FlatView>,
    pub(crate) state: ParamState,
    pub(crate) gradient: GradientState,
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
    /// Whether the average of the parameters is kept.
    pub(crate) average: bool,
    /// All ranks.
    pub(crate) world: usize,
    /// Those whose full gradients this one sums.
    pub(crate) summed: Range<usize>,
    /// What rests elsewhere.
    pub(crate) placement: Placement,
}

/// Where a gather finds the parameters.
#[derive(Debug, Clone, Copy)]
pub(crate) enum GatherFrom<'a> {
    /// Every rank lends its part.
    Peers {
        /// What they lend.
        loan: &'a Loan,
        /// Where this flat parameter lies in it.
        start: usize,
        /// In which type.
        precision: Precision,
    },
    /// This rank has all of them, to be rounded.
    Own(&'a [f32], Precision),
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
        // What rests elsewhere has no room among the parameters in memory.
        let room = if away.parameters { 0 } else { numel };
        ledger.add(Purpose::Parameters, room);
        let kept = Kept { owned: owned.clone(), shard: shard.clone(), whole, away: away.optimizer };
        let state_of_update = UpdateState::new(&layout, &kept, rules, ledger)?;
        let average = if config.average && layout.requires_grad() && !away.optimizer {
            ledger.add(Purpose::WeightAverages, numel);
            Some(HostBuffer::new(numel)?)
        } else {
            None
        };
        let view = Arc::new(FlatView::new(layout.unit(), layout.numel()));
        let param_dtype = layout.dtype().low().unwrap_or(config.precision.param_dtype);
        let resident = whole && !param_dtype.is_low() && !away.parameters;
        let state = if resident { ParamState::Resident } else { ParamState::Sharded };
        Ok(Self {
            layout,
            precision: MixedPrecision { param_dtype, ..config.precision },
            low_start: 0,
            readers: if whole { 0 } else { group.size() - 1 },
            summed: config.summed.clone(),
            groups: config.world / config.summed.len(),
            owned,
            shard,
            span: start..start + room,
            view,
            state,
            gradient: GradientState::Absent,
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

    /// The type in which the parameters travel to a computation.
    pub(crate) fn param_dtype(&self) -> Precision {
        self.precision.param_dtype
    }

    /// Whether a rounded copy of the owned elements is kept in memory.
    pub(crate) fn has_low_copy(&self) -> bool {
        self.param_dtype().is_low() && self.away.params.is_none()
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
    /// for can run to its end.
    pub(crate) fn fill(&self, buffer: &mut HostBuffer, from: GatherFrom<'_>) -> Result<(), CommError> {
        let dest = &mut buffer.as_mut_slice()[..self.layout.padded_numel()];
        let result = match from {
            GatherFrom::Peers { loan, start, precision } => {
                loan.gather(start..start + self.layout.shard_numel(), dest, precision)
            }
            GatherFrom::Own(params, precision) => {
                let dest = &mut dest[..params.len()];
                dest.copy_from_slice(params);
                round(dest, precision);
                return Ok(());
            }
            GatherFrom::Nowhere => {
                dest.fill(0.0);
                return Ok(());
            }
        };
        if result.is_err() {
            dest.fill(0.0);
        }
        result
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

    /// Bytes that this rank sends in one gather: its part, to each peer.
    pub(crate) fn gather_traffic(&self, precision: Precision) -> Traffic {
        if self.is_whole() {
            return Traffic::default();
        }
        self.to_readers(self.layout.shard_numel() * precision.bytes())
    }

    /// The bytes of this rank's part, to each rank that shares the model: those of other nodes are across.
    pub(crate) fn to_readers(&self, bytes: usize) -> Traffic {
        let sharers = self.layout.world_size();
        let near = self.summed.len().min(sharers);
        Traffic::of((near - 1) * bytes, (sharers - near) * bytes)
    }
}
