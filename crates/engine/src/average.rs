//! The exponential moving average of the weights, on the elements that a rank owns.
//!
//! As `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn`: the first step's weights are the first average,
//! and every later step moves it by `1 - decay` towards the weights. Frozen weights are their own average.

use shardwise_comm::{HostBuffer, SharedBuffer};

use crate::Result;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::handle::FlatParamHandle;
use crate::swap::{Moved, Swap};

/// Refuses a decay that is none.
pub(crate) fn check_decay(decay: Option<f64>) -> Result<()> {
    match decay.filter(|decay| !(0.0..=1.0).contains(decay)) {
        Some(decay) => {
            Err(EngineError::Usage(format!("ema_decay is {decay}; it must be at least 0 and at most 1")))
        }
        None => Ok(()),
    }
}

/// What is done with some parameters and their averages, both as long as each other.
type Meet<'a> = dyn Fn(&mut [f32], &mut [f32]) + 'a;

impl Engine {
    /// Takes the weights after a step into their average.
    pub(crate) fn average(&mut self) -> Result<()> {
        let Some(decay) = self.config.ema_decay else { return Ok(()) };
        let decay = if self.averaged == 0 { 0.0 } else { decay };
        self.averaged += 1;
        let (keep, take) = (decay as f32, (1.0 - decay) as f32);
        self.with_averages(false, |params, average| {
            pulp::Arch::new().dispatch(
                #[inline(always)]
                || {
                    for (a, p) in average.iter_mut().zip(params) {
                        *a = if keep == 0.0 { *p } else { *a * keep + *p * take };
                    }
                },
            );
        })
    }

    /// Lets `meet` see the parameters of every average with it, in pieces; `changes` says that it changes them.
    fn with_averages(&mut self, changes: bool, meet: impl Fn(&mut [f32], &mut [f32])) -> Result<()> {
        for at in self.units.places() {
            let met = self.units[at].meet_average(&mut self.params, self.swap.as_mut(), (changes, &meet));
            self.comm(met)?;
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
        self.version += 1;
        self.with_averages(true, |params, average| params.swap_with_slice(average))
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

impl FlatParamHandle {
    /// Lets `meet` see the owned parameters with their average, in pieces as long as each other, wherever they rest.
    fn meet_average(
        &mut self,
        params: &mut SharedBuffer,
        swap: Option<&mut Swap>,
        (changes, meet): (bool, &Meet<'_>),
    ) -> Moved<()> {
        let (span, numel) = (self.span(), self.owned.len());
        let away = self.away.state.as_ref().and_then(|state| state.average);
        if self.average.is_none() && away.is_none() {
            return Ok(());
        }
        let lanes: Vec<_> =
            self.away.params.iter().map(|p| (*p, changes)).chain(away.iter().map(|a| (*a, true))).collect();
        let params = params.writable()?;
        let average = self.average.as_mut().map(HostBuffer::as_mut_slice);
        let Some(swap) = swap.filter(|_| !lanes.is_empty()) else {
            if let Some(average) = average {
                meet(&mut params[span.start..span.start + numel], &mut average[..numel]);
            }
            return Ok(());
        };
        let average = average.unwrap_or_default();
        let away_params = self.away.params.is_some();
        swap.edit_tiles(&lanes, |start, tiles| {
            let end = numel.min(start + tiles.first().map_or(0, |tile| tile.len()));
            // The last tile may hold nothing but padding.
            let start = start.min(end);
            let here = 0..end - start;
            match tiles {
                [params, average] => meet(&mut params[here.clone()], &mut average[here]),
                [params] if away_params => meet(&mut params[here], &mut average[start..end]),
                [average] => meet(&mut params[span.start + start..span.start + end], &mut average[here]),
                _ => {}
            }
            Ok(())
        })
    }
}
