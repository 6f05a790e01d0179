//! Where parameters and optimizer state rest: in memory where they compute, on the host, or on a disk.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::PlanError;

/// Where bytes rest between their uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// Where the rank computes.
    #[default]
    None,
    /// In memory of the host that only their rank sees.
    Host,
    /// In files.
    Nvme,
}

impl Tier {
    /// The name used in configurations and reports.
    pub fn name(self) -> &'static str {
        match self {
            Tier::None => "none",
            Tier::Host => "host",
            Tier::Nvme => "nvme",
        }
    }

    /// Whether bytes rest elsewhere than where they are used.
    pub fn is_away(self) -> bool {
        self != Tier::None
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What rests elsewhere, and through how much memory it passes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Offload {
    /// Where the shards of parameters rest.
    pub parameters: Tier,
    /// Where the optimizer's statistics, averages of the weights and sums of gradients rest.
    pub optimizer: Tier,
    /// Buffers through which everything passes, of a rank.
    pub buffer_count: usize,
    /// Elements of one buffer: what is read or written at a time.
    pub buffer_numel: usize,
    /// Elements of a rank's parameters that stay in memory all the same, the first ones of the model.
    pub max_in_memory: usize,
    /// The share of the optimizer's statistics that rests elsewhere, from 0 to 1; the first flat parameters stay.
    pub ratio: f64,
    /// Whether a rank reads and writes while it computes.
    pub pipeline: bool,
    /// Shards of fewer elements stay in memory.
    pub least_numel: usize,
}

impl Default for Offload {
    fn default() -> Self {
        Self {
            parameters: Tier::None,
            optimizer: Tier::None,
            buffer_count: 12,
            buffer_numel: 1 << 20,
            max_in_memory: 0,
            ratio: 1.0,
            pipeline: true,
            least_numel: 1 << 10,
        }
    }
}

/// The bytes that direct reads and writes are aligned to, and are multiples of.
pub const IO_ALIGNMENT: usize = 4096;

impl Offload {
    /// Whether anything rests elsewhere.
    pub fn is_any(&self) -> bool {
        self.parameters.is_away() || self.optimizer.is_away()
    }

    /// Whether anything rests in files.
    pub fn uses_files(&self) -> bool {
        self.parameters == Tier::Nvme || self.optimizer == Tier::Nvme
    }

    /// Bytes of one buffer.
    pub fn buffer_bytes(&self) -> usize {
        self.buffer_numel * size_of::<f32>()
    }

    /// Refuses what cannot work.
    ///
    /// # Errors
    /// Naming the setting, what it is and what it may be.
    pub fn check(&self) -> Result<(), PlanError> {
        let refuse = |message: String| Err(PlanError::Offload(message));
        let step = IO_ALIGNMENT / size_of::<f32>();
        if self.buffer_numel == 0 || !self.buffer_numel.is_multiple_of(step) {
            let near = self.buffer_numel.div_ceil(step).max(1) * step;
            return refuse(format!(
                "buffer_size is {}; it must be a multiple of {step} elements ({IO_ALIGNMENT} bytes, the unit of direct reads \
                 and writes), such as {near}",
                self.buffer_numel
            ));
        }
        if self.buffer_count == 0 {
            return refuse(
                "buffer_count is 0; everything passes through buffers, so there must be some".into(),
            );
        }
        if !(0.0..=1.0).contains(&self.ratio) {
            return refuse(format!("ratio is {}; it must be at least 0 and at most 1", self.ratio));
        }
        if self.ratio < 1.0 && !self.optimizer.is_away() {
            return refuse(format!(
                "ratio is {}, but optimizer is \"none\"; it is the share of the optimizer's state that rests elsewhere: set \
                 optimizer, or leave ratio out",
                self.ratio
            ));
        }
        if self.max_in_memory > 0 && !self.parameters.is_away() {
            return refuse(format!(
                "max_in_memory is {}, but parameters is \"none\", so that all of them are in memory; set parameters, or leave \
                 max_in_memory out",
                self.max_in_memory
            ));
        }
        Ok(())
    }
}

/// A flat parameter, as far as it matters where it rests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RestingPart {
    /// Elements that a rank keeps, padding included.
    pub numel: usize,
    /// Whether it is trained.
    pub trainable: bool,
    /// Whether it stays in memory whatever is asked for: every rank keeps it whole, or it rests in few bits.
    pub stays: bool,
}

/// What of a flat parameter rests elsewhere.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Placement {
    /// The parameters.
    pub parameters: bool,
    /// Statistics, average and sums of gradients.
    pub optimizer: bool,
}

impl Offload {
    /// What of each flat parameter of a model rests elsewhere. Those that stay in memory within the bounds are the first.
    pub fn placement(&self, parts: &[RestingPart]) -> Vec<Placement> {
        let can_go = |part: &RestingPart| !part.stays && part.numel >= self.least_numel.max(1);
        let trained: usize = parts.iter().filter(|p| p.trainable && can_go(p)).map(|p| p.numel).sum();
        // The share is of what could go.
        let mut stays = [self.max_in_memory, ((1.0 - self.ratio) * trained as f64) as usize];
        let mut goes = |part: &RestingPart, which: usize, wanted: bool| {
            if !wanted || !can_go(part) {
                return false;
            }
            let fits = part.numel <= stays[which];
            if fits {
                stays[which] -= part.numel;
            }
            !fits
        };
        let placed = |part: &RestingPart| Placement {
            parameters: goes(part, 0, self.parameters.is_away()),
            optimizer: goes(part, 1, self.optimizer.is_away() && part.trainable),
        };
        parts.iter().map(placed).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_parts_stay_within_the_bounds() {
        let part = |numel, trainable| RestingPart { numel, trainable, stays: false };
        let parts = [part(10, true), part(3, true), part(20, false), part(10, true)];
        let base =
            Offload { parameters: Tier::Host, optimizer: Tier::Nvme, least_numel: 4, ..Offload::default() };
        let away = |offload: Offload| {
            let placed = offload.placement(&parts);
            (
                placed.iter().map(|p| p.parameters).collect::<Vec<_>>(),
                placed.iter().map(|p| p.optimizer).collect::<Vec<_>>(),
            )
        };
        let (t, f) = (true, false);
        assert_eq!(away(base), (vec![t, f, t, t], vec![t, f, f, t]));
        assert_eq!(away(Offload { max_in_memory: 30, ..base }).0, [f, f, f, t]);
        assert_eq!(away(Offload { max_in_memory: 20, ..base }).0, [f, f, t, f]);
        assert_eq!(away(Offload { ratio: 0.5, ..base }).1, [f, f, f, t]);
        assert_eq!(away(Offload { ratio: 0.0, ..base }).1, [f; 4]);
        assert_eq!(away(Offload::default()), (vec![f; 4], vec![f; 4]));
    }

    #[test]
    fn settings_that_contradict_each_other_are_refused() {
        let base = Offload::default();
        for (offload, message) in [
            (Offload { buffer_numel: 1000, ..base }, "buffer_size is 1000; it must be a multiple of 1024"),
            (Offload { buffer_numel: 0, ..base }, "such as 1024"),
            (Offload { buffer_count: 0, ..base }, "buffer_count is 0"),
            (Offload { ratio: 1.5, optimizer: Tier::Host, ..base }, "ratio is 1.5; it must be at least 0"),
            (Offload { ratio: f64::NAN, ..base }, "ratio is NaN"),
            (Offload { ratio: 0.5, ..base }, "optimizer is \"none\""),
            (Offload { max_in_memory: 1, ..base }, "parameters is \"none\""),
        ] {
            let error = offload.check().expect_err("refused").to_string();
            assert!(error.contains(message), "{error}");
        }
        base.check().expect("the default");
    }
}
