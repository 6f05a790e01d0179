//! A flat parameter's gradient: written by its parameters, lent, summed by part, and used up by the update.

use shardwise_comm::codec::{pack, round, unpack};
use shardwise_comm::{CommError, PendingReduce, ProcessGroup, ReduceScatter, SharedBuffer};
use shardwise_core::{Purpose, Quantization, ShardMetadata, Traffic};

use super::{FlatParamHandle, GradientState};
use crate::across::Across;
use crate::gradient_wire::Hop;
use crate::ledger::Ledger;
use crate::norm::{Norm, PartialNorm};
use crate::optimizer::state::Kept;
use crate::optimizer::{StateSlice, StepUpdate};
use crate::swap::{Moved, Swap};

impl FlatParamHandle {
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
        // Whoever reads padding gets NaN, but blocks that are quantised must not.
        let poisons = cfg!(debug_assertions) && self.gradient_wire.is_none();
        let padding = if poisons { f32::NAN } else { 0.0 };
        flat[self.layout.numel()..self.layout.padded_numel()].fill(padding);
        pack(flat, self.layout.padded_numel(), pre_divisor, self.precision.reduce_dtype);
        if let Some(mut wire) = self.gradient_wire.take() {
            wire.encode(Hop::Inside, &self.how_inside(wire.quantised(Hop::Inside)), flat);
            self.gradient_wire = Some(wire);
        }
        self.gradient = if defer {
            GradientState::Deferred(buffer)
        } else {
            GradientState::Reducing(self.reduction(group, Some(buffer)))
        };
        Ok(())
    }

    /// Begins a step whose losses are multiplied by `scale`: forgets which parameters have been used.
    pub(crate) fn begin_step(&mut self, step: u64, scale: f64) {
        if let Some(resting) = &mut self.resting {
            resting.settle();
        }
        self.used.clear();
        if let Some(wire) = &mut self.gradient_wire {
            wire.begin_step(step, scale);
        }
    }

    /// Makes sure that `partials` sums can rest elsewhere, if they do.
    pub(crate) fn reserve_away(&mut self, partials: usize, swap: Option<&mut Swap>) -> Moved<()> {
        match (&mut self.away.state, swap) {
            (Some(state), Some(swap)) => {
                (state.last, state.measured) = (None, None);
                state.sums.reserve(swap, partials)
            }
            _ => Ok(()),
        }
    }

    /// The paths of trained parameters for which this rank has written no gradient in the step.
    pub(crate) fn unused_params(&self) -> impl Iterator<Item = &str> {
        let trained = self.layout.params().iter().filter(|_| self.is_trainable());
        let used = |index: usize| self.used.get(index).copied().unwrap_or(false);
        trained.enumerate().filter(move |(index, _)| !used(*index)).map(|(_, param)| param.path.as_str())
    }

    /// Starts a reduction to which this rank contributes `source`, or zeros.
    pub(crate) fn reduction(&self, group: &ProcessGroup, source: Option<SharedBuffer>) -> PendingReduce {
        let quantised = self.gradient_wire.as_ref().and_then(|wire| wire.quantised(Hop::Inside));
        group.start_reduction(&self.how_inside(quantised), source)
    }

    /// The first hop of a reduction.
    fn how_inside(&self, quantised: Option<Quantization>) -> ReduceScatter<'_> {
        ReduceScatter {
            label: self.layout.unit(),
            part_numel: self.layout.shard_numel(),
            parts: self.layout.world_size(),
            precision: self.precision.reduce_dtype,
            quantised,
            summed: self.summed.clone(),
        }
    }

    /// Learns what quantisation takes from this rank's gradient, which is about to be summed.
    pub(crate) fn commit(&mut self, pending: &PendingReduce) -> Result<(), CommError> {
        let Some(source) = pending.source() else { return Ok(()) };
        let Some(mut wire) = self.gradient_wire.take() else { return Ok(()) };
        let how = self.how_inside(wire.quantised(Hop::Inside));
        let (near, own) = (self.summed.len(), self.rank_inside);
        // The others of the group sum parts that this rank does not.
        let readers = |part: usize| Traffic::of(usize::from(part % near != own), 0);
        let learned = wire.commit(Hop::Inside, &how, source.as_slice(), readers);
        self.gradient_wire = Some(wire);
        learned
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

    /// Whether a gradient is kept until the end of the round.
    pub(crate) fn is_deferred(&self) -> bool {
        matches!(self.gradient, GradientState::Deferred(_))
    }

    /// Goes on writing to the gradient that is kept: the unit has another backward in the round.
    pub(crate) fn resume_deferred(&mut self, pre_divisor: f32) -> Result<(), CommError> {
        let Some(mut buffer) = self.take_deferred() else { return Ok(()) };
        unpack(buffer.writable()?, self.layout.padded_numel(), pre_divisor, self.precision.reduce_dtype);
        let written = vec![true; self.layout.params().len()];
        self.gradient = GradientState::Writing { buffer, written };
        Ok(())
    }

    /// Drops whatever has been summed.
    pub(crate) fn abandon_gradient(&mut self) {
        self.forget_errors();
        // Buffers that peers might still read are given up with an error; the world has failed then.
        if let Ok(Some(sum)) = self.partials.finish() {
            self.partials.give_back(sum);
        }
        self.discard_gradient();
        if let Some(state) = &mut self.away.state {
            state.sums.abandon();
        }
    }

    /// Forgets what quantisation has taken from gradients: those of the step were not finite, or it could not be ended.
    pub(crate) fn forget_errors(&mut self) {
        if let Some(wire) = &mut self.gradient_wire {
            wire.forget();
        }
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

    /// Sums this rank's part of a reduction, in two hops if there is `across`, and hands the full gradient's buffer back. What
    /// rests elsewhere goes there by way of a staging buffer.
    pub(crate) fn sum_part(
        &mut self,
        mut pending: PendingReduce,
        across: Option<&mut Across>,
        staged: Option<(&mut Swap, &mut SharedBuffer)>,
    ) -> (Option<SharedBuffer>, Moved<()>) {
        self.reduced = true;
        let learned = self.commit(&pending);
        let Self { layout, partials, away, gradient_wire: wire, .. } = self;
        let numel = layout.shard_numel();
        let sum_over_ranks = |sum: &mut [f32], add| match across {
            None => pending.sum_into(&mut sum[..numel], add),
            Some(across) => {
                across.sum(layout.unit(), &mut pending, &mut sum[..numel], add, wire.as_deref_mut())
            }
        };
        let summed = match (away.state.as_mut(), staged) {
            (Some(state), Some((swap, stage))) => stage.writable().map_err(Into::into).and_then(|stage| {
                let stage = &mut stage[..numel];
                state.sums.take_in(swap, stage, |sum, add| Ok(sum_over_ranks(sum, add)?))
            }),
            _ => partials.take_in(sum_over_ranks).map_err(Into::into),
        };
        (pending.into_source(), learned.map_err(Into::into).and(summed))
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
    pub(crate) fn end_round(&mut self, swap: Option<&mut Swap>) -> Moved<()> {
        if std::mem::take(&mut self.reduced) || !self.is_trainable() {
            return Ok(());
        }
        match (&mut self.away.state, swap) {
            (Some(state), Some(swap)) => {
                // What was measured may not be all there is.
                state.measured = None;
                state.sums.take_in_zero(swap)
            }
            _ => Ok(self.partials.take_in_zero()?),
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
        while self.is_trainable() && self.away.state.is_none() && self.partials.buffers() < partials {
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
        Some((self.path_of_shard(index), sum.as_slice()[index]))
    }

    /// The path of the parameter that element `index` of this rank's shard belongs to.
    pub(crate) fn path_of_shard(&self, index: usize) -> String {
        let at = self.shard.start + index;
        let found = ShardMetadata::of_range(self.layout.params(), at..at + 1);
        found.params.first().map_or_else(|| self.name().to_string(), |p| p.path.clone())
    }

    /// Gathers the summed gradient, of which this rank has `sum`, into `dest`, for ranks that update all parameters; returns the bytes sent.
    pub(crate) fn gather_gradient(
        &self,
        sum: Option<&SharedBuffer>,
        group: &ProcessGroup,
        dest: SharedBuffer,
    ) -> (SharedBuffer, Result<Traffic, CommError>) {
        match sum {
            Some(sum) => {
                let numel = self.layout.shard_numel();
                let (whole, gathered) =
                    group.start_all_gather_of(self.layout.unit(), (sum, numel), dest).wait();
                (whole, gathered.map(|()| self.sum_traffic()))
            }
            None => (dest, Ok(Traffic::default())),
        }
    }

    /// Updates the owned parameters from `whole`, the full gradient, or from the gradient's shard; gives the shard's
    /// buffer back to the partial sums.
    pub(crate) fn update(&mut self, update: StepUpdate, params: &mut [f32], whole: Option<&SharedBuffer>) {
        let Some(sum) = &self.sum else { return };
        let gradient = whole.map_or(sum.as_slice(), SharedBuffer::as_slice);
        self.state_of_update.update(update, &self.owned, params, gradient);
    }

    /// Puts the step's gradient away after the update.
    pub(crate) fn use_up_gradient(&mut self) {
        // Muon has put its directions in the gradient's place.
        let keep = self.state_of_update.matrices.is_empty();
        match &mut self.away.state {
            Some(state) => state.use_up(keep),
            None => {
                self.partials_take_back();
                self.holds_last = keep;
            }
        }
    }

    fn partials_take_back(&mut self) {
        if let Some(sum) = self.sum.take() {
            self.partials.give_back(sum);
        }
    }

    /// This rank's shard of the last step's gradient, divided but not clipped; `None` when there was none.
    pub(crate) fn last_gradient(&self) -> Option<&SharedBuffer> {
        if self.holds_last { self.partials.last() } else { None }
    }

    /// Whether the last step's gradient can still be looked at, wherever it rests.
    pub(crate) fn has_last_gradient(&self) -> bool {
        self.last_gradient().is_some() || self.away.state.as_ref().is_some_and(|state| state.last.is_some())
    }

    /// How often the parameters have been updated.
    pub fn updates(&self) -> u64 {
        self.state_of_update.next_count() - 1
    }

    /// Shows the optimizer's statistics of what this rank keeps, by parameter.
    pub(crate) fn each_state(&mut self, see: &mut dyn FnMut(StateSlice<'_>)) {
        let (owned, shard) = (self.owned.clone(), self.shard.clone());
        let kept = Kept { owned, shard, whole: self.is_whole(), away: self.away.state.is_some() };
        self.state_of_update.each(&self.layout, &kept, see);
    }

    /// Whether the optimizer has gathered statistics of the parameters, or their average is kept.
    pub(crate) fn has_statistics(&self) -> bool {
        let averages =
            self.average.is_some() || self.away.state.as_ref().is_some_and(|s| s.average.is_some());
        self.updates() > 0 && (self.state_of_update.keeps_statistics() || averages)
    }

    /// Drops the step's gradient.
    pub(crate) fn discard_gradient(&mut self) {
        match &mut self.away.state {
            Some(state) => state.use_up(false),
            None => self.partials_take_back(),
        }
    }

    /// Bytes that this rank sends in one reduction: parts to each peer of its group, its sums to the other groups.
    pub(crate) fn reduce_traffic(&self) -> Traffic {
        let (part, near) = (self.layout.shard_numel(), self.summed.len());
        let bytes = |hop, exact: usize| {
            let quantised = self.gradient_wire.as_ref().and_then(|wire| wire.quantised(hop));
            quantised.map_or(part * exact, |how| how.bytes(part))
        };
        // With nodes a peer sums the parts of all ranks that have its place.
        let parts = self.layout.world_size() / near;
        let inside = (near - 1) * parts * bytes(Hop::Inside, self.precision.reduce_dtype.bytes());
        Traffic::of(inside, (self.groups - 1) * bytes(Hop::Across, size_of::<f32>()))
    }

    /// Notes that the gradient has been summed, and returns the bytes of it that could not be quantised on their way.
    pub(crate) fn raw_traffic(&mut self) -> Traffic {
        self.gradient_wire.as_mut().map_or_else(Traffic::default, |wire| wire.summed())
    }

    /// Bytes that this rank sends when the summed gradient is gathered: its part, to each peer.
    fn sum_traffic(&self) -> Traffic {
        self.to_readers(self.layout.shard_numel() * size_of::<f32>())
    }
}
