//! `bench optimizer --on-disk`: how near a step with its state in files comes to the speed of the disk.

use std::path::Path;
use std::time::{Duration, Instant};

use serde::Serialize;
use shardwise_comm::{ProcessGroup, threads};
use shardwise_core::{FlatLayout, Offload, ParamSpec, Tier};
use shardwise_engine::{
    DecayRule, Engine, EngineConfig, OptimizerConfig, ParamGroups, SwapPlace, TierTraffic, UnitId,
};
use shardwise_tier::IoConfig;
use shardwise_tier::measure::{Throughput, throughput};

use crate::error::RunError;
use crate::report::median;

/// A step and the disk are measured in turns, so often.
const PAIRS: usize = 7;
/// A rank that waits for itself has failed.
const DEADLINE: Duration = Duration::from_secs(60);
/// Parameters of one unit: several, so that a step goes from one to the next.
const UNITS: usize = 4;

/// A line of the result.
#[derive(Debug, Serialize)]
pub(super) struct Line {
    work: &'static str,
    /// Of the parameters.
    mebibytes: usize,
    method: &'static str,
    direct: bool,
    bytes_read: u64,
    bytes_written: u64,
    seconds: f64,
    /// What reading and writing those bytes one after another takes, sequentially, as measured between the steps.
    seconds_of_the_disk: f64,
    /// The latter over the former, the median of all pairs.
    ratio_to_disk: f64,
}

/// Measures AdamW's step with statistics and gradients in files below `path`, and with the parameters there too.
pub(super) fn measure(path: &Path, mebibytes: usize) -> Result<Vec<Line>, RunError> {
    [("adamw, state on disk", Tier::None), ("adamw, state and parameters on disk", Tier::Nvme)]
        .into_iter()
        .map(|(work, parameters)| {
            let lines = threads::run(1, DEADLINE, |group| {
                Bench::new(group, path, parameters, mebibytes)?.line(work, path, mebibytes)
            })?;
            lines.into_iter().next().ok_or_else(|| RunError::failed("no rank has measured anything"))?
        })
        .collect()
}

struct Bench {
    engine: Engine,
    units: Vec<UnitId>,
}

/// What one step took.
struct Step {
    read: u64,
    written: u64,
    seconds: f64,
}

impl Bench {
    fn new(group: ProcessGroup, path: &Path, parameters: Tier, mebibytes: usize) -> Result<Self, RunError> {
        let numel = (mebibytes << 20) / size_of::<f32>() / UNITS;
        let layout = |unit: usize| {
            let spec = ParamSpec::f32(format!("unit.{unit}.weight"), unit as u64, vec![numel]);
            FlatLayout::build(format!("unit.{unit}"), &[spec], 1).map(|layout| vec![layout])
        };
        let units: Vec<Vec<FlatLayout>> =
            (0..UNITS).map(layout).collect::<Result<_, _>>().map_err(RunError::failed)?;
        let config = EngineConfig {
            optimizer: OptimizerConfig::ADAMW,
            decay: DecayRule::All,
            offload: Offload { parameters, optimizer: Tier::Nvme, ..Offload::default() },
            ..EngineConfig::default()
        };
        let place = SwapPlace {
            path: path.to_path_buf(),
            run: format!("bench-optimizer-{}", std::process::id()),
            ..SwapPlace::default()
        };
        let how = (&ParamGroups::new(), Some(&place));
        let engine = Engine::with_swap(group, Vec::new(), units, config, how).map_err(RunError::failed)?;
        Ok(Self { engine, units: (0..UNITS).map(UnitId::unit).collect() })
    }

    fn line(mut self, work: &'static str, path: &Path, mebibytes: usize) -> Result<Line, RunError> {
        let access = self.engine.file_access();
        self.step()?;
        let (mut steps, mut expected) = (Vec::new(), Vec::new());
        for _ in 0..PAIRS {
            let step = self.step()?;
            let bytes = step.read.max(step.written);
            let offload = Offload::default();
            let disk =
                throughput(path, IoConfig::default(), bytes, offload.buffer_bytes(), offload.buffer_count)?;
            expected.push(seconds_of(&disk, &step));
            steps.push(step);
        }
        let ratios: Vec<f64> = steps.iter().zip(&expected).map(|(step, disk)| disk / step.seconds).collect();
        Ok(Line {
            work,
            mebibytes,
            method: access.as_ref().map_or("", |access| access.method),
            direct: access.is_some_and(|access| access.direct),
            bytes_read: steps.iter().map(|step| step.read).max().unwrap_or(0),
            bytes_written: steps.iter().map(|step| step.written).max().unwrap_or(0),
            seconds: median(&steps.iter().map(|step| step.seconds).collect::<Vec<_>>()),
            seconds_of_the_disk: median(&expected),
            ratio_to_disk: median(&ratios),
        })
    }

    /// One training step without a model; its optimizer's part is timed, until all is written.
    fn step(&mut self) -> Result<Step, RunError> {
        let engine = &mut self.engine;
        let fail = RunError::failed;
        engine.begin_step(1).map_err(fail)?;
        engine.begin_round().map_err(fail)?;
        for unit in &self.units {
            engine.enter_forward(*unit);
            engine.leave_forward(*unit);
        }
        for unit in self.units.iter().rev() {
            engine.enter_backward(*unit);
            engine.write_gradient(*unit, 0, 0, |gradient, _| gradient.fill(0.01));
            engine.leave_backward(*unit);
        }
        engine.end_round().map_err(fail)?;
        engine.flush_tiers().map_err(fail)?;
        let (before, begun) = (engine.tier_traffic(), Instant::now());
        engine.end_step(1e-3).map_err(fail)?;
        engine.flush_tiers().map_err(fail)?;
        let seconds = begun.elapsed().as_secs_f64();
        let moved = |of: fn(&TierTraffic) -> u64| of(&engine.tier_traffic()) - of(&before);
        Ok(Step { read: moved(|t| t.nvme.read_bytes), written: moved(|t| t.nvme.written_bytes), seconds })
    }
}

fn seconds_of(disk: &Throughput, step: &Step) -> f64 {
    step.read as f64 / disk.read_bytes_per_second + step.written as f64 / disk.write_bytes_per_second
}
