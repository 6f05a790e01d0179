//! Parameters and gradients seen and changed between steps: the part of the engine that lets others look in.

use shardwise_core::FlatLayout;

use crate::Result;
use crate::config::UnitId;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::handle::FlatParamHandle;
use crate::unit::Place;

impl Engine {
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
        let params = self.owned_params(unit, part)?;
        if mine.start < mine.end {
            params[mine.start - owned.start..mine.end - owned.start]
                .copy_from_slice(&values[mine.start - range.start..mine.end - range.start]);
        }
        Ok(())
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
            if self.units[at].last_gradient().is_none() {
                continue;
            }
            let numel = self.units[at].layout().padded_numel();
            let kind = self.units[at].kind();
            let pool = self.pools.gradient(unit.is_root(), kind);
            let taken = pool.take(numel, &mut self.ledger, |numel| self.group.allocate(numel));
            let mut dest = self.comm(taken)?;
            let handle = &self.units[at];
            let mut gathered = Ok(());
            if let Some(shard) = handle.last_gradient() {
                (dest, gathered) = self.shards.start_all_gather(handle.name(), shard, dest).wait();
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
