//! How an engine fails: named, told to the other ranks, and kept.

use shardwise_comm::CommError;

use crate::Result;
use crate::config::UnitId;
use crate::engine::{Engine, Phase};
use crate::error::EngineError;
use crate::handle::FlatParamHandle;
use crate::trouble::Trouble;

impl Engine {
    pub(crate) fn wrong_state(&self, unit: UnitId, call: &'static str, remedy: &'static str) -> EngineError {
        let summaries: Vec<String> = self.units[unit].parts.iter().map(FlatParamHandle::summary).collect();
        let unit = if unit.is_root() { "`root`".to_string() } else { summaries.join(" and ") };
        EngineError::State { unit, state: self.phase.name(), call, remedy }
    }

    /// Names this rank in a failure of communication or of a tier; the others are told of the latter.
    pub(crate) fn comm<T, E: Into<Trouble>>(&self, result: std::result::Result<T, E>) -> Result<T> {
        result.map_err(|trouble| {
            let error = trouble.into().on(self.group.rank());
            if matches!(error, EngineError::Tier { .. }) {
                self.tell_others(&error);
                // Nobody knows any more what rests there.
                let _ = self.failure.set(error.clone());
            }
            error
        })
    }

    /// Makes an error of this rank known to the others, who would wait for it.
    fn tell_others(&self, error: &EngineError) {
        let transport = self.group.transport();
        transport.fail(&CommError::Peer { rank: transport.rank(), message: error.to_string() });
    }

    pub(crate) fn expect_idle(&self, call: &'static str) -> Result<()> {
        self.check_failure()?;
        if self.phase == Phase::Idle {
            return Ok(());
        }
        Err(self.wrong_state(UnitId::ROOT, call, "end the step or the evaluation first"))
    }

    pub(crate) fn check_failure(&self) -> Result<()> {
        let Some(error) = self.failure.get() else { return Ok(()) };
        if !matches!(error, EngineError::Comm { .. }) {
            self.tell_others(error);
        }
        Err(error.clone())
    }

    pub(crate) fn keep_failure(&mut self, result: Result<()>) {
        let Err(error) = result else { return };
        // What the others do not know from the transport they would wait for, in an operation that never comes.
        let own = !matches!(&error, EngineError::Comm { source, .. } if !matches!(source, CommError::System { .. }));
        // Only the first counts: later ones follow from it.
        if self.failure.set(error.clone()).is_ok() && own {
            self.tell_others(&error);
        }
    }
}
