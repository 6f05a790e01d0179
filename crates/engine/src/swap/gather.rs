//! Gathers, sums and scopes of what rests elsewhere.
//!
//! Parameters that rest elsewhere cannot be lent for a whole step. A rank brings its shard into a staging buffer when a
//! unit is used, and lends that for the one gather: a collective in the order of use, which every rank must follow in training.
//! In an evaluation ranks take turns.

use shardwise_comm::{HostBuffer, Loan, PendingReduce, SharedBuffer};
use shardwise_core::{Precision, Travel};

use super::parts::Scaling;
use super::{Moved, Section, Swap};
use crate::Result;
use crate::config::Divisor;
use crate::engine::{Engine, Phase};
use crate::handle::{FlatParamHandle, end_gather};
use crate::hops::OwnPart;
use crate::norm::{Norm, PartialNorm};
use crate::trouble::Trouble;
use crate::unit::Place;
use crate::wire;

/// Where a shard is on its way into a gather.
#[derive(Debug)]
pub(crate) struct Stage {
    /// As it rests.
    masters: SharedBuffer,
    /// As it travels, if that is something else.
    encoded: Option<SharedBuffer>,
}

impl Stage {
    pub(crate) fn new(masters: SharedBuffer, encoded: Option<SharedBuffer>) -> Self {
        Self { masters, encoded }
    }

    /// A part of `numel` elements as peers read it; `raw_numel` of them travel as they rest.
    pub(crate) fn part(&self, travel: Travel, numel: usize, raw_numel: usize) -> OwnPart<'_> {
        let masters = 0..numel * size_of::<f32>();
        match &self.encoded {
            Some(encoded) if !travel.is_exact() => OwnPart {
                buffer: encoded,
                bytes: 0..travel.bytes(numel),
                raw: travel.quantised.is_some().then_some((&self.masters, masters)),
                raw_numel,
            },
            _ => OwnPart { buffer: &self.masters, bytes: masters, raw: None, raw_numel: 0 },
        }
    }
}

/// Two of them, in turns: one is filled while peers still read the other.
#[derive(Debug, Default)]
pub(crate) struct Stages {
    stages: Vec<Stage>,
    current: usize,
    /// The rank whose wish is looked at first in an evaluation.
    pub(crate) turn: usize,
}

impl Stages {
    pub(crate) fn new(stages: Vec<Stage>) -> Self {
        Self { stages, current: 0, turn: 0 }
    }

    fn advance(&mut self) -> Option<&mut Stage> {
        self.current = (self.current + 1) % self.stages.len().max(1);
        self.stages.get_mut(self.current)
    }

    /// The one that was filled last.
    pub(crate) fn current(&self) -> Option<&Stage> {
        self.stages.get(self.current)
    }
}

impl Engine {
    /// Fills the buffer of a gather with parameters that rest elsewhere. After a failure it holds zeros.
    pub(crate) fn fill_from_away(&mut self, at: Place, buffer: &mut HostBuffer) -> Result<()> {
        let layout = self.units[at].layout();
        let (padded, numel) = (layout.padded_numel(), layout.numel());
        let dest = &mut buffer.as_mut_slice()[..padded];
        let filled = match (self.units[at].away.params, self.units[at].is_whole()) {
            (Some(section), true) => self.fill_alone(at, &section, &mut dest[..numel]),
            _ => self.fill_from_peers(at, dest),
        };
        end_gather(dest, numel, filled.is_ok());
        self.comm(filled)
    }

    fn fill_alone(&mut self, at: Place, section: &Section, dest: &mut [f32]) -> Moved<()> {
        let travel = self.gather_travel(at);
        let Some(swap) = self.swap.as_mut() else { return Ok(()) };
        swap.take_in(at, section, |start, tile| {
            dest[start..start + tile.len()].copy_from_slice(tile);
            Ok(())
        })?;
        let handle = &mut self.units[at];
        handle.encoded.error = wire::arrive(travel, dest, handle.rounding_key(self.updates));
        Ok(())
    }

    fn fill_from_peers(&mut self, at: Place, dest: &mut [f32]) -> Moved<()> {
        let travel = self.gather_travel(at);
        self.take_turn(at)?;
        self.stage_params(at, travel)?;
        let (loan, raw) = self.lend_staged(at, travel)?;
        let handle = &self.units[at];
        handle.fill_from_peers(dest, (&loan, 0), travel, raw.as_ref().map(|raw| (raw, 0)))?;
        loan.finish();
        if let Some(raw) = raw {
            raw.finish();
        }
        self.sent += handle.gather_traffic(travel);
        Ok(())
    }

    /// Lends what has been staged of a flat parameter, and its masters for blocks that travel as they rest.
    pub(crate) fn lend_staged(&self, at: Place, travel: Travel) -> Moved<(Loan, Option<Loan>)> {
        let handle = &self.units[at];
        let stage = self.stages.current().ok_or(Trouble::NoTier)?;
        let part = stage.part(travel, handle.layout().shard_numel(), handle.encoded.raw);
        let raw = match &part.raw {
            Some((buffer, bytes)) => Some(self.staged.lend_range(handle.name(), buffer, bytes.clone())?),
            None => None,
        };
        Ok((self.staged.lend_range(handle.name(), part.buffer, part.bytes)?, raw))
    }

    /// Brings this rank's shard of a flat parameter in, for peers to read it as it travels.
    pub(crate) fn stage_params(&mut self, at: Place, travel: Travel) -> Moved<()> {
        let handle = &mut self.units[at];
        let (Some(section), Some(swap)) = (handle.away.params, self.swap.as_mut()) else { return Ok(()) };
        let Some(stage) = self.stages.advance() else { return Ok(()) };
        let masters = stage.masters.writable()?;
        swap.take_in(at, &section, |start, tile| {
            masters[start..start + tile.len()].copy_from_slice(tile);
            Ok(())
        })?;
        if let Some(encoded) = stage.encoded.as_mut().filter(|_| !travel.is_exact()) {
            let numel = handle.kept_numel();
            let room = &mut encoded.writable_bytes()?[..travel.bytes(numel)];
            let owned = &masters[..handle.owned.len()];
            handle.encoded = wire::encode(travel, (owned, numel), room, handle.rounding_key(self.updates));
        }
        Ok(())
    }

    /// Sums this rank's part of a reduction and puts it away.
    pub(crate) fn sum_away(
        &mut self,
        at: Place,
        pending: PendingReduce,
    ) -> (Option<SharedBuffer>, Moved<()>) {
        let divisor = match (self.phase, self.config.divisor) {
            // Weights are known at the end of the step only.
            (_, Divisor::Weights) => None,
            (Phase::Round { schedule, .. } | Phase::Step { schedule, .. }, _) => {
                self.post_divisor(schedule.micro_batches()).ok()
            }
            _ => None,
        };
        let norm = self.config.norm;
        let (Some(swap), Some(stage)) = (self.swap.as_mut(), self.workroom.stage.as_mut()) else {
            return (pending.into_source(), Ok(()));
        };
        let handle = &mut self.units[at];
        let (source, summed) = handle.sum_part(pending, self.across.as_mut(), Some((swap, stage)));
        let measured = summed.and_then(|()| handle.measure_summed(stage, divisor, norm));
        (source, measured)
    }

    /// Finishes the gradient of one flat parameter, and measures this rank's part.
    pub(crate) fn finish_gradient_of(&mut self, at: Place, divisor: f32) -> Result<Option<PartialNorm>> {
        let norm = self.config.norm;
        let handle = &mut self.units[at];
        let finished = match self.swap.as_mut().filter(|_| handle.away.state.is_some()) {
            Some(swap) => handle.finish_gradient_away(swap, divisor, norm),
            None => handle.finish_gradient(divisor, norm).map_err(Into::into),
        };
        self.comm(finished)
    }

    /// Lets elements that are not finite count as zero, and measures the gradient again.
    pub(crate) fn zero_non_finite_of(&mut self, at: Place) -> Result<Option<PartialNorm>> {
        let norm = self.config.norm;
        let handle = &mut self.units[at];
        let measured = match (self.swap.as_mut(), handle.away.state.as_mut()) {
            (Some(swap), Some(state)) => {
                state.scaling.zero_non_finite = true;
                handle.measure_away(swap, norm)
            }
            _ => handle.zero_non_finite(norm).map_err(Into::into),
        };
        self.comm(measured)
    }

    /// The first element of this rank's gradients that is not finite.
    pub(crate) fn first_non_finite(&mut self) -> Result<Option<(String, f32)>> {
        for at in self.units.places() {
            let handle = &self.units[at];
            let found = match self.swap.as_mut().filter(|_| handle.away.state.is_some()) {
                Some(swap) => handle.first_non_finite_away(swap),
                None => Ok(handle.first_non_finite()),
            };
            if let Some(found) = self.comm(found)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Brings the gradient of the step or (when `last` says so) of the last step of a flat parameter into the staging buffer,
    /// if it rests elsewhere.
    pub(crate) fn stage_gradient(&mut self, at: Place, last: bool) -> Result<()> {
        let staged: Moved<()> = (|| {
            let (Some(swap), Some(state)) = (self.swap.as_mut(), &self.units[at].away.state) else {
                return Ok(());
            };
            let section = if last { state.last_gradient() } else { state.gradient() };
            let (Some(section), Some(stage)) = (section, self.workroom.stage.as_mut()) else { return Ok(()) };
            let sum = stage.writable()?;
            swap.read(&section, &mut sum[..section.numel()])?;
            state.scaling.scale(&mut sum[..self.units[at].shard.len()]);
            Ok(())
        })();
        self.comm(staged)
    }
}

impl FlatParamHandle {
    /// Measures what the staging buffer holds, if it is all that the step has summed so far.
    fn measure_summed(&mut self, stage: &mut SharedBuffer, divisor: Option<f32>, norm: Norm) -> Moved<()> {
        let numel = self.shard.len();
        let scaling = self.scaling();
        let Some(state) = self.away.state.as_mut() else { return Ok(()) };
        state.measured = None;
        if let Some(divisor) = divisor.filter(|_| state.sums.is_single()) {
            let sum = &mut stage.writable()?[..numel];
            state.measured = Some((Scaling { divisor, ..scaling }.apply(sum, norm), divisor));
        }
        Ok(())
    }

    /// How sums of this flat parameter become gradients, but for the divisor.
    fn scaling(&self) -> Scaling {
        let rounded = if self.precision.keep_low_precision_grads {
            self.precision.reduce_dtype
        } else {
            Precision::F32
        };
        Scaling { divisor: 1.0, rounded, zero_non_finite: false }
    }

    fn finish_gradient_away(
        &mut self,
        swap: &mut Swap,
        divisor: f32,
        norm: Norm,
    ) -> Moved<Option<PartialNorm>> {
        let scaling = Scaling { divisor, ..self.scaling() };
        let Some(state) = self.away.state.as_mut() else { return Ok(None) };
        let measured = state.measured.take().filter(|_| state.sums.is_single());
        state.last = None;
        state.sum = state.sums.finish(swap)?;
        state.scaling = scaling;
        match measured {
            Some((measured, at)) if at.to_bits() == divisor.to_bits() && state.sum.is_some() => {
                Ok(Some(measured))
            }
            _ => self.measure_away(swap, norm),
        }
    }

    fn measure_away(&self, swap: &mut Swap, norm: Norm) -> Moved<Option<PartialNorm>> {
        let Some((section, scaling)) = self.gradient_away() else { return Ok(None) };
        let (numel, mut all) = (self.shard.len(), PartialNorm::default());
        swap.edit_tiles(&[(section, false)], |start, tiles| {
            let end = tiles[0].len().min(numel.saturating_sub(start));
            all = norm.join(all, scaling.apply(&mut tiles[0][..end], norm));
            Ok(())
        })?;
        Ok(Some(all))
    }

    fn first_non_finite_away(&self, swap: &mut Swap) -> Moved<Option<(String, f32)>> {
        let Some((section, scaling)) = self.gradient_away() else { return Ok(None) };
        let (numel, mut found) = (self.shard.len(), None);
        swap.edit_tiles(&[(section, false)], |start, tiles| {
            let end = tiles[0].len().min(numel.saturating_sub(start));
            scaling.scale(&mut tiles[0][..end]);
            let bad = tiles[0][..end].iter().position(|g| !g.is_finite());
            if let (None, Some(index)) = (&found, bad) {
                found = Some((start + index, tiles[0][index]));
            }
            Ok(())
        })?;
        Ok(found.map(|(index, value)| (self.path_of_shard(index), value)))
    }

    fn gradient_away(&self) -> Option<(Section, Scaling)> {
        let state = self.away.state.as_ref()?;
        Some((state.gradient()?, state.scaling))
    }
}
