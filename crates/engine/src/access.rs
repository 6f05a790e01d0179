//! Parameters and gradients seen and changed between steps, and evaluations: the part of the engine that lets others look
//! in.

use std::ops::Range;

use shardwise_core::FlatLayout;

use crate::Result;
use crate::config::UnitId;
use crate::engine::{Engine, Phase};
use crate::error::EngineError;
use crate::handle::{FlatParamHandle, ParamState};
use crate::unit::Place;

impl Engine {
    /// Lets `edit` change some of the owned parameters of a unit's part, to initialise or load them: those at `range` of
    /// the elements [`FlatParamHandle::owned`]. Returns what `edit` does.
    ///
    /// Frozen ones that rest in int8 are quantised after that.
    ///
    /// # Errors
    /// In the middle of a step, when a peer is lost or late, and when a frozen parameter that rests in int8 is given a number
    /// that is NaN or infinite: it then keeps its values.
    ///
    /// # Panics
    /// When there is no such part, or it has no such elements.
    pub fn edit_owned<T>(
        &mut self,
        unit: UnitId,
        part: usize,
        range: Range<usize>,
        edit: impl FnOnce(&mut [f32]) -> T,
    ) -> Result<T> {
        self.expect_idle("edit_owned")?;
        let rank = self.group.rank();
        self.version += 1;
        let handle = &self.units[Place { unit, part }];
        if let (Some(section), Some(swap)) = (handle.away.params, self.swap.as_mut()) {
            let edited = swap.edit_range(&section, range, edit);
            return self.comm(edited);
        }
        if handle.rests() {
            return self.edit_resting(Place { unit, part }, range, edit);
        }
        let (start, owned) = (handle.span().start, handle.owned().len());
        let params = self.params.writable().map_err(|source| EngineError::Comm { rank, source })?;
        Ok(edit(&mut params[start..start + owned][range]))
    }

    /// Lets `read` see each of a unit's flat parameters whole, with its layout. A collective: every rank must call it.
    ///
    /// # Errors
    /// In the middle of a step, and when a peer is lost or late.
    pub fn with_full_params(
        &mut self,
        unit: UnitId,
        mut read: impl FnMut(&FlatLayout, &[f32]),
    ) -> Result<()> {
        self.expect_idle("with_full_params")?;
        self.begin_loan(true)?;
        self.unshard(unit)?;
        for handle in &self.units[unit].parts {
            let whole = match &handle.state {
                ParamState::Gathered(buffer) => buffer.as_slice(),
                _ => &self.params.as_slice()[handle.span()],
            };
            read(handle.layout(), &whole[..handle.layout().numel()]);
        }
        self.reshard(unit);
        self.end_loan();
        Ok(())
    }

    /// The trained parameters that had no gradient in the last step, by rank: what a router left out, or a loss that does not
    /// reach them. A collective: every rank must call it.
    ///
    /// # Errors
    /// In the middle of a step, and when a peer is lost or late.
    pub fn params_without_gradient(&self) -> Result<Vec<Vec<String>>> {
        self.expect_idle("params_without_gradient")?;
        let own: Vec<&str> = self.units.handles().flat_map(FlatParamHandle::unused_params).collect();
        let all = self.comm(self.group.all_gather_varied("unused parameters", own.join("\n").as_bytes()))?;
        let paths = |bytes: &Vec<u8>| String::from_utf8_lossy(bytes).lines().map(String::from).collect();
        Ok(all.iter().map(paths).collect())
    }

    /// Begins an evaluation: gathers the root; units are gathered for their calls and freed after them.
    ///
    /// # Errors
    /// In the middle of a step, after a failure, or when a peer is lost.
    pub fn begin_evaluation(&mut self) -> Result<()> {
        self.expect_idle("begin_evaluation")?;
        self.phase = Phase::Evaluation;
        self.coordinator.evaluate(true);
        self.gather_ahead_of_round(!self.config.precision.low_precision_evaluation)
    }

    /// Ends an evaluation and frees everything gathered. Where parameters rest elsewhere it waits for the other ranks to
    /// end theirs, and brings in what they still need.
    ///
    /// # Errors
    /// The first failure, or outside an evaluation.
    pub fn end_evaluation(&mut self) -> Result<()> {
        if self.phase != Phase::Evaluation {
            return Err(self.wrong_state(UnitId::ROOT, "end_evaluation", "begin an evaluation first"));
        }
        let served = self.serve_others();
        let served = self.comm(served);
        self.keep_failure(served);
        self.coordinator.end_round();
        self.coordinator.evaluate(false);
        self.ahead.clear();
        self.drop_unused_gathers(None);
        self.release_kept();
        self.reshard(UnitId::ROOT);
        self.end_loan();
        self.phase = Phase::Idle;
        self.check_failure()
    }

    /// How often parameters have changed, by a step or from outside. A copy that was derived from them at an older version
    /// is stale.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Puts `values`, the whole of parameter `index` of a unit's part, in its place: this rank keeps what it owns. Every
    /// rank must call it with the same values.
    ///
    /// # Errors
    /// In the middle of a step, when a peer is lost or late, and when there are not as many values as the parameter has.
    ///
    /// # Panics
    /// When there is no such parameter.
    pub fn write_param(&mut self, unit: UnitId, part: usize, index: usize, values: &[f32]) -> Result<()> {
        let handle = &self.units[Place { unit, part }];
        let (owned, param) = (handle.owned(), &handle.layout().params()[index]);
        let range = param.range();
        if values.len() != range.len() {
            let message = format!(
                "parameter `{}` has {} elements, but {} values were given",
                param.path,
                range.len(),
                values.len()
            );
            return Err(EngineError::Usage(message));
        }
        let mine = range.start.max(owned.start)..range.end.min(owned.end);
        if mine.is_empty() {
            self.expect_idle("write_param")?;
            // The parameters have changed for a rank that owns nothing of this one too.
            self.version += 1;
            return Ok(());
        }
        let values = &values[mine.start - range.start..mine.end - range.start];
        let here = mine.start - owned.start..mine.end - owned.start;
        self.edit_owned(unit, part, here, |params| params.copy_from_slice(values))
    }

    /// Whether the optimizer has statistics of any parameter.
    pub fn has_statistics(&self) -> bool {
        self.units.handles().any(FlatParamHandle::has_statistics)
    }

    /// Takes over the step count, the loss scale, the gather policy and the event log of an engine of the same model, laid
    /// out in another way.
    pub fn continue_from(&mut self, before: &mut Engine) {
        (self.step, self.updates, self.skips) = (before.step, before.updates, before.skips);
        self.version = self.version.max(before.version) + 1;
        self.scaler = before.scaler.clone();
        self.policy = before.policy;
        self.averages_swapped = before.averages_swapped;
        self.events = std::mem::take(&mut before.events);
    }

    /// Lets `read` see each of a unit's full gradients of the last step, with its layout: the mean over the micro-batches,
    /// before clipping. It sees nothing of a flat parameter that is frozen, that no rank has used, or in which Muon has put its
    /// directions in the gradient's place. A collective: every rank must call it.
    ///
    /// # Errors
    /// In the middle of a step, and when a peer is lost or late.
    pub fn with_full_gradients(
        &mut self,
        unit: UnitId,
        mut read: impl FnMut(usize, &FlatLayout, &[f32]),
    ) -> Result<()> {
        self.expect_idle("with_full_gradients")?;
        for at in self.parts_of(unit) {
            if !self.units[at].has_last_gradient() {
                continue;
            }
            self.stage_gradient(at, true)?;
            let numel = self.units[at].layout().padded_numel();
            let kind = self.units[at].kind();
            let pool = self.pools.gradient(unit.is_root(), kind);
            let taken = pool.take(numel, &mut self.ledger, |numel| self.group.allocate(numel));
            let mut dest = self.comm(taken)?;
            let handle = &self.units[at];
            let mut gathered = Ok(());
            if let Some(shard) = handle.last_gradient().or(self.workroom.stage.as_ref()) {
                let part = (shard, handle.layout().shard_numel());
                (dest, gathered) = self.shards.start_all_gather_of(handle.name(), part, dest).wait();
            }
            if gathered.is_ok() {
                read(at.part, handle.layout(), &dest.as_slice()[..handle.layout().numel()]);
            }
            self.pools.gradient(unit.is_root(), kind).give(dest);
            self.comm(gathered)?;
        }
        Ok(())
    }
}
