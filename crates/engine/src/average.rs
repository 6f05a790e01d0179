//! The exponential moving average of the weights, on the elements that a rank owns.
//!
//! As `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn`: the first step's weights are the first average,
//! and every later step moves it by `1 - decay` towards the weights. Frozen weights are their own average.

use crate::Result;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::handle::FlatParamHandle;

/// Refuses a decay that is none.
pub(crate) fn check_decay(decay: Option<f64>) -> Result<()> {
    match decay.filter(|decay| !(0.0..=1.0).contains(decay)) {
        Some(decay) => {
            Err(EngineError::Usage(format!("ema_decay is {decay}; it must be at least 0 and at most 1")))
        }
        None => Ok(()),
    }
}

impl Engine {
    /// Takes the weights after a step into their average.
    pub(crate) fn average(&mut self) -> Result<()> {
        let Some(decay) = self.config.ema_decay else { return Ok(()) };
        let decay = if self.averaged == 0 { 0.0 } else { decay };
        self.averaged += 1;
        let (keep, take) = (decay as f32, (1.0 - decay) as f32);
        let params = self.params.as_slice();
        for handle in self.units.handles_mut() {
            let span = handle.span();
            if let Some(average) = &mut handle.average {
                let numel = handle.owned.len();
                let params = &params[span.start..span.start + numel];
                pulp::Arch::new().dispatch(
                    #[inline(always)]
                    || {
                        for (a, p) in average.as_mut_slice()[..numel].iter_mut().zip(params) {
                            *a = if keep == 0.0 { *p } else { *a * keep + p * take };
                        }
                    },
                );
            }
        }
        Ok(())
    }

    /// Lets the weights and their averages change places, to evaluate or export with the averages; a second call brings
    /// the weights back, and no step can begin before. Every rank must call it. Before the first step, and without
    /// [`crate::EngineConfig::ema_decay`], nothing changes.
    ///
    /// # Errors
    /// In the middle of a step or an evaluation, after a failure, and when a peer is lost or late.
    pub fn swap_averages(&mut self) -> Result<()> {
        self.expect_idle("swap_averages")?;
        self.averages_swapped = !self.averages_swapped;
        if self.averaged == 0 {
            return Ok(());
        }
        let rank = self.group.rank();
        let params = self.params.writable().map_err(|source| EngineError::Comm { rank, source })?;
        self.version += 1;
        for handle in self.units.handles_mut() {
            let (start, numel) = (handle.span().start, handle.owned.len());
            if let Some(average) = &mut handle.average {
                params[start..start + numel].swap_with_slice(&mut average.as_mut_slice()[..numel]);
            }
        }
        Ok(())
    }

    /// Whether the averages are in the weights' place.
    pub fn averages_are_swapped(&self) -> bool {
        self.averages_swapped
    }

    /// Refuses a step while the averages are in the weights' place.
    pub(crate) fn expect_weights(&self) -> Result<()> {
        if !self.averages_swapped {
            return Ok(());
        }
        let handles = self.units.handles().map(FlatParamHandle::name);
        Err(EngineError::State {
            unit: format!("`{}`", handles.take(1).collect::<String>()),
            state: "Averages",
            call: "begin_step",
            remedy: "bring the weights back with swap_averages first",
        })
    }
}
