//! One unit's flat parameter on one rank: its shard, the gathered whole while it is needed, its gradient, its statistics.
//!
//! Three small state machines: the parameters (`ParamState`), the full gradient (`GradientState`) and the partial
//! sums of the gradient's shard. The engine moves them; each move checks that it is allowed.

use std::ops::Range;
use std::sync::Arc;

use shardwise_comm::codec::{pack, round};
use shardwise_comm::{CommError, HostBuffer, Loan, PendingReduce, ProcessGroup, ReduceScatter, SharedBuffer};
use shardwise_core::{FlatLayout, MixedPrecision, Precision, Purpose, ShardMetadata, ShardingStrategy};

use crate::ledger::Ledger;
use crate::norm::{Norm, PartialNorm};
use crate::optimizer::state::{Kept, UpdateState};
use crate::optimizer::{ParamRule, StateSlice, StepUpdate};
use crate::partial::PartialSums;
use crate::pool::PartKind;
use crate::replicas::Replicas;
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
    precision: MixedPrecision,
    /// Where the owned elements lie among those that travel in less than f32, if they do.
    pub(crate) low_start: usize,
    /// Ranks that read this rank's part of a gather.
    readers: usize,
    /// The ranks, in the group of reductions, that share one copy of the model with this one.
    sharers: Range<usize>,
    /// Ranks, this one included, that keep the same elements in a hybrid layout.
    replicas: usize,
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
    reduced: bool,
    /// By parameter: whether this rank has written a gradient in the step.
    used: Vec<bool>,
    /// The gradient's shard of the whole step, between the last reduction and the update.
    pub(crate) sum: Option<SharedBuffer>,
    /// Whether the buffer that was given back last holds the gradient of the last step.
    holds_last: bool,
    pub(crate) state_of_update: UpdateState,
    /// The average of the owned parameters over steps, if it is asked for.
    pub(crate) average: Option<HostBuffer>,
}

/// What all handles of an engine share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HandleConfig {
    pub(crate) strategy: ShardingStrategy,
    pub(crate) precision: MixedPrecision,
    /// Whether the average of the parameters is kept.
    pub(crate) average: bool,
    /// All ranks.
    pub(crate) world: usize,
    /// The first of those that share one copy of the model with this one.
    pub(crate) first_sharer: usize,
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
        let whole = group.size() == 1 || !config.strategy.is_sharded() || layout.is_replicated();
        let (owned, numel) =
            if whole { (0..layout.numel(), layout.numel()) } else { (shard.clone(), layout.shard_numel()) };
        ledger.add(Purpose::Parameters, numel);
        let kept = Kept { owned: owned.clone(), shard: shard.clone(), whole };
        let state_of_update = UpdateState::new(&layout, &kept, rules, ledger)?;
        let average = if config.average && layout.requires_grad() {
            ledger.add(Purpose::WeightAverages, numel);
            Some(HostBuffer::new(numel)?)
        } else {
            None
        };
        let view = Arc::new(FlatView::new(layout.unit(), layout.numel()));
        let param_dtype = layout.dtype().low().unwrap_or(config.precision.param_dtype);
        let state = if whole && !param_dtype.is_low() { ParamState::Resident } else { ParamState::Sharded };
        Ok(Self {
            layout,
            precision: MixedPrecision { param_dtype, ..config.precision },
            low_start: 0,
            readers: if whole { 0 } else { group.size() - 1 },
            sharers: config.first_sharer..config.first_sharer + group.size(),
            replicas: if config.strategy.is_hybrid() { config.world / group.size() } else { 1 },
            owned,
            shard,
            span: start..start + numel,
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

    /// Which pools its buffers come from: flat parameters of a unit that differ in this are gathered at the same time.
    pub(crate) fn kind(&self) -> PartKind {
        PartKind::of(&self.layout)
    }

    /// Where the owned elements lie in the engine's parameters, padding included.
    pub(crate) fn span(&self) -> Range<usize> {
        self.span.clone()
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
                loan.gather(start..start + self.span.len(), dest, precision)
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

    /// Lets parameter `index` write its gradient: `write(window, overwrite)`.
    pub(crate) fn write_gradient(
        &mut self,
        index: usize,
        write: impl FnOnce(&mut [f32], bool),
    ) -> Result<(), CommError> {
        let GradientState::Writing { buffer, written } = &mut self.gradient else { return Ok(()) };
        let window = &mut buffer.writable()?[self.layout.params()[index].range()];
        write(window, !written[index]);
        written[index] = true;
        Ok(())
    }

    /// Zeroes what no parameter has written, divides by `pre_divisor` and lends the full gradient to the peers, or keeps it
    /// when `defer` says so.
    pub(crate) fn start_reduce(
        &mut self,
        group: &ProcessGroup,
        pre_divisor: f32,
        defer: bool,
    ) -> Result<(), CommError> {
        let GradientState::Writing { mut buffer, written } =
            std::mem::replace(&mut self.gradient, GradientState::Absent)
        else {
            return Ok(());
        };
        self.used.resize(written.len(), false);
        self.used.iter_mut().zip(&written).for_each(|(used, written)| *used |= written);
        let flat = buffer.writable()?;
        for (param, _) in self.layout.params().iter().zip(&written).filter(|(_, written)| !**written) {
            flat[param.range()].fill(0.0);
        }
        let padding = if cfg!(debug_assertions) { f32::NAN } else { 0.0 };
        flat[self.layout.numel()..self.layout.padded_numel()].fill(padding);
        pack(flat, self.layout.padded_numel(), pre_divisor, self.precision.reduce_dtype);
        self.gradient = if defer {
            GradientState::Deferred(buffer)
        } else {
            GradientState::Reducing(self.reduction(group, Some(buffer)))
        };
        Ok(())
    }

    /// Forgets which parameters have been used.
    pub(crate) fn begin_step(&mut self) {
        self.used.clear();
    }

    /// The paths of trained parameters for which this rank has written no gradient in the step.
    pub(crate) fn unused_params(&self) -> impl Iterator<Item = &str> {
        let trained = self.layout.params().iter().filter(|_| self.is_trainable());
        let used = |index: usize| self.used.get(index).copied().unwrap_or(false);
        trained.enumerate().filter(move |(index, _)| !used(*index)).map(|(_, param)| param.path.as_str())
    }

    /// Starts a reduction to which this rank contributes `source`, or zeros.
    pub(crate) fn reduction(&self, group: &ProcessGroup, source: Option<SharedBuffer>) -> PendingReduce {
        let how = ReduceScatter {
            label: self.layout.unit(),
            part_numel: self.layout.shard_numel(),
            precision: self.precision.reduce_dtype,
            summed: self.sharers.clone(),
        };
        group.start_reduction(&how, source)
    }

    /// Whether the peers reduce the same unit now; true when this rank reduces none.
    pub(crate) fn peers_agree(&self) -> Result<bool, CommError> {
        match &self.gradient {
            GradientState::Reducing(pending) => pending.agrees(),
            _ => Ok(true),
        }
    }

    /// Gives up on a reduction that is under way, and keeps the gradient until the end of the round.
    pub(crate) fn defer_reduce(&mut self) {
        self.gradient = match std::mem::replace(&mut self.gradient, GradientState::Absent) {
            GradientState::Reducing(pending) => match pending.into_source() {
                Some(buffer) => GradientState::Deferred(buffer),
                None => GradientState::Absent,
            },
            other => other,
        };
    }

    /// Takes the gradient that was kept until the end of the round.
    pub(crate) fn take_deferred(&mut self) -> Option<SharedBuffer> {
        match std::mem::replace(&mut self.gradient, GradientState::Absent) {
            GradientState::Deferred(buffer) => Some(buffer),
            other => {
                self.gradient = other;
                None
            }
        }
    }

    /// Sums this rank's part of a reduction, in a hybrid layout then across the `replicas`, and hands the full gradient's
    /// buffer back.
    pub(crate) fn sum_part(
        &mut self,
        mut pending: PendingReduce,
        replicas: Option<&mut Replicas>,
    ) -> (Option<SharedBuffer>, Result<(), CommError>) {
        self.reduced = true;
        let numel = self.layout.shard_numel();
        let result = match replicas {
            None => self.partials.take_in(|sum, add| pending.sum_into(&mut sum[..numel], add)),
            Some(replicas) => {
                let label = self.layout.unit();
                self.partials
                    .take_in(|sum, add| replicas.sum_across(label, &mut pending, &mut sum[..numel], add))
            }
        };
        (pending.into_source(), result)
    }

    /// Takes the reduction that is under way.
    pub(crate) fn take_reduction(&mut self) -> Option<PendingReduce> {
        match std::mem::replace(&mut self.gradient, GradientState::Absent) {
            GradientState::Reducing(pending) => Some(pending),
            other => {
                self.gradient = other;
                None
            }
        }
    }

    /// Ends a round: one in which no rank had a gradient here counts as zero.
    pub(crate) fn end_round(&mut self) -> Result<(), CommError> {
        if std::mem::take(&mut self.reduced) || !self.is_trainable() {
            Ok(())
        } else {
            self.partials.take_in_zero()
        }
    }

    /// Makes sure that the next sum over ranks has a buffer. A step's rounds have theirs already; only a unit that is
    /// reduced more than once in a round needs another.
    pub(crate) fn reserve_next_partial(
        &mut self,
        group: &ProcessGroup,
        ledger: &mut Ledger,
    ) -> Result<(), CommError> {
        if self.partials.needs_buffer() {
            self.reserve_partials(self.partials.buffers() + 1, group, ledger)
        } else {
            Ok(())
        }
    }

    /// Makes sure that there are buffers for `partials` sums.
    pub(crate) fn reserve_partials(
        &mut self,
        partials: usize,
        group: &ProcessGroup,
        ledger: &mut Ledger,
    ) -> Result<(), CommError> {
        while self.is_trainable() && self.partials.buffers() < partials {
            self.partials.give(group.allocate(self.layout.shard_numel())?);
            ledger.add(Purpose::GradientShards, self.layout.shard_numel());
        }
        Ok(())
    }

    /// Merges the partial sums of the step, divides by `divisor` and measures this rank's part; `None` when the unit had
    /// no gradient in this step.
    pub(crate) fn finish_gradient(
        &mut self,
        divisor: f32,
        norm: Norm,
    ) -> Result<Option<PartialNorm>, CommError> {
        self.holds_last = false;
        let Some(mut sum) = self.partials.finish()? else { return Ok(None) };
        let own = &mut sum.writable()?[..self.shard.len()];
        let mut measured = norm.divide_and_measure(own, divisor);
        if self.precision.keep_low_precision_grads {
            round(own, self.precision.reduce_dtype);
            measured = norm.divide_and_measure(own, 1.0);
        }
        self.sum = Some(sum);
        Ok(Some(measured))
    }

    /// Lets elements of the summed gradient that are not finite count as zero, and measures it again.
    pub(crate) fn zero_non_finite(&mut self, norm: Norm) -> Result<Option<PartialNorm>, CommError> {
        let numel = self.shard.len();
        let Some(sum) = &mut self.sum else { return Ok(None) };
        let own = &mut sum.writable()?[..numel];
        own.iter_mut().filter(|g| !g.is_finite()).for_each(|g| *g = 0.0);
        Ok(Some(norm.divide_and_measure(own, 1.0)))
    }

    /// The first element of this rank's gradient shard that is NaN or infinite, with its parameter's path.
    pub(crate) fn first_non_finite(&self) -> Option<(String, f32)> {
        let sum = self.sum.as_ref()?;
        let index = sum.as_slice()[..self.shard.len()].iter().position(|g| !g.is_finite())?;
        let at = ShardMetadata::of_range(
            self.layout.params(),
            self.shard.start + index..self.shard.start + index + 1,
        );
        let path = at.params.first().map_or_else(|| self.name().to_string(), |p| p.path.clone());
        Some((path, sum.as_slice()[index]))
    }

    /// Gathers the summed gradient into `dest`, for ranks that update all parameters; returns the bytes sent.
    pub(crate) fn gather_gradient(
        &mut self,
        group: &ProcessGroup,
        dest: SharedBuffer,
    ) -> (SharedBuffer, Result<u64, CommError>) {
        match &self.sum {
            Some(sum) => {
                let (whole, gathered) = group.start_all_gather(self.layout.unit(), sum, dest).wait();
                (whole, gathered.map(|()| self.sum_bytes_sent()))
            }
            None => (dest, Ok(0)),
        }
    }

    /// Updates the owned parameters from `whole`, the full gradient, or from the gradient's shard; gives the shard's
    /// buffer back to the partial sums.
    pub(crate) fn update(&mut self, update: StepUpdate, params: &mut [f32], whole: Option<&SharedBuffer>) {
        let Some(sum) = self.sum.take() else { return };
        let gradient = whole.map_or(sum.as_slice(), SharedBuffer::as_slice);
        self.state_of_update.update(update, &self.owned, params, gradient);
        self.partials.give_back(sum);
        // Muon has put its directions in the gradient's place.
        self.holds_last = self.state_of_update.matrices.is_empty();
    }

    /// This rank's shard of the last step's gradient, divided but not clipped; `None` when there was none.
    pub(crate) fn last_gradient(&self) -> Option<&SharedBuffer> {
        if self.holds_last { self.partials.last() } else { None }
    }

    /// How often the parameters have been updated.
    pub fn updates(&self) -> u64 {
        self.state_of_update.next_count() - 1
    }

    /// Shows the optimizer's statistics of what this rank keeps, by parameter.
    pub(crate) fn each_state(&mut self, see: &mut dyn FnMut(StateSlice<'_>)) {
        let kept = Kept { owned: self.owned.clone(), shard: self.shard.clone(), whole: self.is_whole() };
        self.state_of_update.each(&self.layout, &kept, see);
    }

    /// Whether the optimizer has gathered statistics of the parameters, or their average is kept.
    pub(crate) fn has_statistics(&self) -> bool {
        self.updates() > 0 && (self.state_of_update.keeps_statistics() || self.average.is_some())
    }

    /// Drops the step's gradient.
    pub(crate) fn discard_gradient(&mut self) {
        if let Some(sum) = self.sum.take() {
            self.partials.give_back(sum);
        }
    }

    /// Bytes that this rank sends in one gather: its part, to each peer.
    pub(crate) fn gather_bytes_sent(&self, precision: Precision) -> u64 {
        (self.readers * self.layout.shard_numel() * precision.bytes()) as u64
    }

    /// Bytes that this rank sends in one reduction: every peer's part, and its sum to the replicas.
    pub(crate) fn reduce_bytes_sent(&self) -> u64 {
        let inside = (self.sharers.len() - 1) * self.precision.reduce_dtype.bytes();
        let across = (self.replicas - 1) * size_of::<f32>();
        ((inside + across) * self.layout.shard_numel()) as u64
    }

    /// Bytes that this rank sends when the summed gradient is gathered: its part, to each peer.
    fn sum_bytes_sent(&self) -> u64 {
        ((self.sharers.len() - 1) * self.layout.shard_numel() * size_of::<f32>()) as u64
    }
}
