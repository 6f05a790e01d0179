//! What a step moved between tiers and across nodes, and what quantising took: only as far as the configuration has it.

use serde::{Deserialize, Serialize};
use shardwise_core::Tier;
use shardwise_engine::{StepReport, TierTraffic};
use shardwise_tier::TierStats;

use crate::config::Config;

/// Which figures a run has.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Features {
    across: bool,
    host: bool,
    nvme: bool,
    weights: bool,
    gradients: bool,
}

impl Features {
    pub(crate) fn of(config: &Config) -> Self {
        let engine = config.engine();
        let rests = |tier| [engine.offload.parameters, engine.offload.optimizer].contains(&tier);
        let nodes = engine.wire.node(config.run.ranks).is_ok_and(|node| node.is_some());
        Self {
            across: nodes || engine.strategy.is_hybrid(),
            host: rests(Tier::Host),
            nvme: rests(Tier::Nvme),
            weights: engine.wire.weights.is_some(),
            gradients: engine.wire.gradients.is_some(),
        }
    }
}

/// Figures of one step or of a whole run, of one rank or of all: sums, the share of all waiting, and the largest error.
/// Absent where the configuration has no such thing.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Moved {
    /// Bytes of parameters and gradients that left their rank's node, or its group of a hybrid strategy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_sent_across: Option<u64>,
    /// Bytes read from where they rest on the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_bytes_read: Option<u64>,
    /// Bytes written there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_bytes_written: Option<u64>,
    /// Bytes read from files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvme_bytes_read: Option<u64>,
    /// Bytes written to files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvme_bytes_written: Option<u64>,
    /// The share of the time in which files were read or written that ranks did not wait for, from 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io_overlap: Option<f64>,
    /// What quantising took from the parameters on their way: the root of the mean squared error over that of the parameters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_error: Option<f64>,
    /// The same of gradients.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gradient_error: Option<f64>,
}

/// What one rank has to tell of a step, as words that ranks exchange.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Figures {
    across: u64,
    host: [u64; 2],
    nvme: [u64; 2],
    /// Nanoseconds that files were read or written in, and that the rank waited for them.
    busy: u64,
    waited: u64,
    errors: [f64; 2],
}

impl Figures {
    /// Words of one rank.
    pub(crate) const WORDS: usize = 9;

    /// Of a step, which began when `before` had been moved.
    pub(crate) fn of_step(report: &StepReport, before: &TierTraffic, now: &TierTraffic) -> Self {
        let [host, nvme] = [(&before.host, &now.host), (&before.nvme, &now.nvme)].map(|(a, b)| since(a, b));
        Self {
            across: report.bytes_sent_across,
            host: [host.read_bytes, host.written_bytes],
            nvme: [nvme.read_bytes, nvme.written_bytes],
            busy: nvme.busy.as_nanos() as u64,
            waited: nvme.wait.as_nanos() as u64,
            errors: [report.weight_error, report.gradient_error],
        }
    }

    pub(crate) fn words(&self) -> [u64; Self::WORDS] {
        let ([hr, hw], [nr, nw], [we, ge]) = (self.host, self.nvme, self.errors);
        [self.across, hr, hw, nr, nw, self.busy, self.waited, we.to_bits(), ge.to_bits()]
    }

    pub(crate) fn from_words([across, hr, hw, nr, nw, busy, waited, we, ge]: [u64; Self::WORDS]) -> Self {
        let errors = [we, ge].map(f64::from_bits);
        Self { across, host: [hr, hw], nvme: [nr, nw], busy, waited, errors }
    }

    /// Takes in another rank's, or another step's.
    #[must_use]
    pub(crate) fn and(&self, other: &Self) -> Self {
        let sum = |a: [u64; 2], b: [u64; 2]| [a[0] + b[0], a[1] + b[1]];
        Self {
            across: self.across + other.across,
            host: sum(self.host, other.host),
            nvme: sum(self.nvme, other.nvme),
            busy: self.busy + other.busy,
            waited: self.waited + other.waited,
            errors: [self.errors[0].max(other.errors[0]), self.errors[1].max(other.errors[1])],
        }
    }

    /// The figures that a run has.
    pub(crate) fn moved(&self, has: Features) -> Moved {
        let overlap = if self.busy == 0 { 1.0 } else { 1.0 - self.waited as f64 / self.busy as f64 };
        Moved {
            bytes_sent_across: has.across.then_some(self.across),
            host_bytes_read: has.host.then_some(self.host[0]),
            host_bytes_written: has.host.then_some(self.host[1]),
            nvme_bytes_read: has.nvme.then_some(self.nvme[0]),
            nvme_bytes_written: has.nvme.then_some(self.nvme[1]),
            io_overlap: has.nvme.then_some(overlap.clamp(0.0, 1.0)),
            weight_error: has.weights.then_some(self.errors[0]),
            gradient_error: has.gradients.then_some(self.errors[1]),
        }
    }
}

fn since(before: &TierStats, now: &TierStats) -> TierStats {
    TierStats {
        read_bytes: now.read_bytes - before.read_bytes,
        written_bytes: now.written_bytes - before.written_bytes,
        reads: now.reads - before.reads,
        writes: now.writes - before.writes,
        wait: now.wait.saturating_sub(before.wait),
        busy: now.busy.saturating_sub(before.busy),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_travel_and_add_up() {
        let one =
            Figures { across: 1, host: [2, 3], nvme: [4, 5], busy: 100, waited: 50, errors: [0.5, 0.25] };
        let other = Figures::from_words(Figures { busy: 300, waited: 0, errors: [0.1, 0.75], ..one }.words());
        let all = Features { across: true, host: true, nvme: true, weights: true, gradients: true };
        let want = Moved {
            bytes_sent_across: Some(2),
            host_bytes_read: Some(4),
            host_bytes_written: Some(6),
            nvme_bytes_read: Some(8),
            nvme_bytes_written: Some(10),
            io_overlap: Some(0.875),
            weight_error: Some(0.5),
            gradient_error: Some(0.75),
        };
        assert_eq!(one.and(&other).moved(all), want);
        assert_eq!(one.and(&other).moved(Features::default()), Moved::default());
        assert_eq!(serde_json::to_string(&Moved::default()).expect("JSON"), "{}");
    }
}
