//! What rests elsewhere, and its way back: sections of flat parameters, cut into tiles that pass through one pool of
//! buffers.
//!
//! A section is one array of f32 (the parameters of a flat parameter, one statistic, one sum of gradients). Everything here
//! goes through tiles: reads run ahead as far as buffers allow, writes run behind, and never is more allocated.

pub(crate) mod ahead;
pub(crate) mod gather;
pub(crate) mod layout;
pub(crate) mod parts;
pub(crate) mod place;
pub(crate) mod reload;
pub(crate) mod store;
pub(crate) mod sums;
mod turns;
pub(crate) mod update;

use std::collections::VecDeque;
use std::ops::Range;

use shardwise_comm::{CommError, ProcessGroup};
use shardwise_core::{Offload, Tier as Resting};
use shardwise_tier::{Buffer, ObjectId, Reading, RunFolder, Tier, TierError, TierStats};

use crate::Result;
use crate::config::UnitId;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::swap::ahead::Ahead;
pub use crate::swap::place::SwapPlace;
pub use crate::swap::store::{ShardStore, StoredShard};
use crate::trouble::Trouble;

/// How files are read and written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileAccess {
    /// `io_uring` or `threads`.
    pub method: &'static str,
    /// Whether past the system's cache.
    pub direct: bool,
    /// Why it is not the best that there is, if it is not.
    pub why: Option<String>,
}

/// What this rank has moved to and from where it rests since the engine was built.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct TierTraffic {
    /// Memory of the host.
    pub host: TierStats,
    /// Files.
    pub nvme: TierStats,
}

impl Engine {
    /// How files are read and written; `None` when nothing rests in any.
    pub fn file_access(&self) -> Option<FileAccess> {
        self.swap.as_ref().and_then(Swap::access)
    }

    /// Waits until all that is on its way to where it rests has been written.
    ///
    /// # Errors
    /// When that fails.
    pub fn flush_tiers(&mut self) -> Result<()> {
        let flushed = self.swap.as_mut().map_or(Ok(()), Swap::flush);
        self.comm(flushed)
    }

    /// What has been moved so far.
    pub fn tier_traffic(&self) -> TierTraffic {
        self.swap.as_ref().map(Swap::traffic).unwrap_or_default()
    }
}

/// The result of moving tiles.
pub(crate) type Moved<T> = std::result::Result<T, Trouble>;

/// Buffers that reading ahead leaves for everything else.
pub(crate) const RESERVED_BUFFERS: usize = 3;

/// Elements of a flat parameter that rest in one tier, one tile after another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Section {
    resting: Resting,
    object: ObjectId,
    numel: usize,
}

impl Section {
    pub(crate) fn numel(&self) -> usize {
        self.numel
    }
}

/// One rank's tiers.
#[derive(Debug)]
pub(crate) struct Swap {
    host: Option<Tier>,
    nvme: Option<Tier>,
    tile_numel: usize,
    buffer_count: usize,
    /// Whether reads run ahead of what computes, and writes behind.
    pipeline: bool,
    /// What has been started for gathers to come.
    ahead: Vec<Ahead>,
    /// Behind the tiers, so that it goes last.
    _run: Option<RunFolder>,
}

/// Tiles of several sections that are needed at the same time: which of each, and whether it is written back.
#[derive(Debug, Clone)]
pub(crate) struct TileJob<T> {
    pub(crate) lanes: Vec<(Section, bool)>,
    pub(crate) tile: usize,
    pub(crate) what: T,
}

impl Swap {
    /// Opens the tiers that `offload` names, at `place`. A collective of `group`.
    pub(crate) fn open(group: &ProcessGroup, offload: &Offload, place: Option<&SwapPlace>) -> Result<Self> {
        let (rank, mut run, mut nvme, mut host) = (group.rank(), None, None, None);
        let deadline = group.transport().deadline();
        let tier = |source: TierError| {
            // The others would wait for this rank.
            let message = source.to_string();
            group.transport().fail(&CommError::Peer { rank: group.transport().rank(), message });
            EngineError::Tier { rank, source }
        };
        if offload.uses_files() {
            let claimed = place::claim(group, place)?;
            let at = shardwise_tier::Place::Folder(RunFolder::rank_folder(&claimed.folder, rank));
            run = claimed.run;
            nvme = Some(place::open(at, (rank, deadline), offload, place).map_err(tier)?);
        }
        if [offload.parameters, offload.optimizer].contains(&Resting::Host) {
            let at = shardwise_tier::Place::Memory;
            host = Some(place::open(at, (rank, deadline), offload, place).map_err(tier)?);
        }
        Ok(Self {
            host,
            nvme,
            tile_numel: offload.buffer_numel,
            buffer_count: offload.buffer_count,
            pipeline: offload.pipeline,
            ahead: Vec::new(),
            _run: run,
        })
    }

    /// How many tiers there are, each with its pool.
    pub(crate) fn pools(&self) -> usize {
        usize::from(self.host.is_some()) + usize::from(self.nvme.is_some())
    }

    /// How files are read and written, for reports.
    fn access(&self) -> Option<FileAccess> {
        let access =
            |tier: &Tier| FileAccess { method: tier.method(), direct: tier.is_direct(), why: tier.why() };
        self.nvme.as_ref().map(access)
    }

    /// What has been moved so far.
    fn traffic(&self) -> TierTraffic {
        let of = |tier: &Option<Tier>| tier.as_ref().map(Tier::stats).unwrap_or_default();
        TierTraffic { host: of(&self.host), nvme: of(&self.nvme) }
    }

    fn tier(&mut self, resting: Resting) -> Moved<&mut Tier> {
        let tier = match resting {
            Resting::Host => self.host.as_mut(),
            _ => self.nvme.as_mut(),
        };
        // Sections are made of tiers that are open.
        tier.ok_or(Trouble::NoTier)
    }

    /// New sections of `numels` elements, zero at first, that rest under `name`.
    pub(crate) fn create(&mut self, resting: Resting, name: &str, numels: &[usize]) -> Moved<Vec<Section>> {
        // Each in a file of its own: a file reserves whole buffers for all of its tiles but the last.
        let mut sections = Vec::with_capacity(numels.len());
        for (index, numel) in numels.iter().copied().enumerate() {
            let name = if numels.len() == 1 { name.to_string() } else { format!("{name}.{index}") };
            let tiles = numel.div_ceil(self.tile_numel);
            let object = self.tier(resting)?.create(&name, tiles)?;
            sections.push(Section { resting, object, numel });
        }
        Ok(sections)
    }

    /// The elements of one tile of a section.
    pub(crate) fn tile_range(&self, section: &Section, tile: usize) -> Range<usize> {
        let start = tile * self.tile_numel;
        start.min(section.numel)..(start + self.tile_numel).min(section.numel)
    }

    pub(crate) fn tiles(&self, section: &Section) -> usize {
        section.numel.div_ceil(self.tile_numel)
    }

    /// A buffer, waiting for writes to end.
    fn buffer(&mut self, resting: Resting) -> Moved<Buffer> {
        Ok(self.tier(resting)?.buffer()?)
    }

    fn start_read(&mut self, section: &Section, tile: usize, mut buffer: Buffer) -> Moved<Reading> {
        buffer.set_len(self.tile_range(section, tile).len() * size_of::<f32>());
        Ok(self.tier(section.resting)?.start_read(section.object, tile, buffer)?)
    }

    fn wait(&mut self, section: &Section, reading: Reading) -> Moved<Buffer> {
        Ok(self.tier(section.resting)?.wait(reading)?)
    }

    fn start_write(&mut self, section: &Section, tile: usize, buffer: Buffer) -> Moved<()> {
        Ok(self.tier(section.resting)?.start_write(section.object, tile, buffer)?)
    }

    fn give(&mut self, section: &Section, buffer: Buffer) -> Moved<()> {
        self.tier(section.resting)?.give(buffer);
        Ok(())
    }

    /// Waits for every write.
    pub(crate) fn flush(&mut self) -> Moved<()> {
        for tier in [&mut self.host, &mut self.nvme].into_iter().flatten() {
            tier.flush()?;
        }
        Ok(())
    }

    fn flush_unless_pipelined(&mut self) -> Moved<()> {
        if self.pipeline { Ok(()) } else { self.flush() }
    }

    /// Computes with tiles of several sections at a time: the next are read, and the last written, while one computes.
    /// `compute(what, start, tiles)` gets the tiles in the order of the job's lanes.
    pub(crate) fn stream<T>(
        &mut self,
        jobs: &[TileJob<T>],
        mut compute: impl FnMut(&T, usize, &mut [&mut [f32]]) -> Moved<()>,
    ) -> Moved<()> {
        if jobs.iter().any(|job| job.lanes.len() >= RESERVED_BUFFERS) {
            self.cancel_ahead();
        }
        let mut reading: VecDeque<Vec<Reading>> = VecDeque::new();
        for (index, job) in jobs.iter().enumerate() {
            if reading.is_empty() {
                let buffers =
                    job.lanes.iter().map(|(s, _)| self.buffer(s.resting)).collect::<Moved<Vec<_>>>()?;
                reading.push_back(self.start_job(job, buffers)?);
            }
            let readings = reading.pop_front().unwrap_or_default();
            for next in &jobs[index + 1 + reading.len()..] {
                if !self.pipeline {
                    break;
                }
                let Some(buffers) = self.buffers_at_hand(next)? else { break };
                reading.push_back(self.start_job(next, buffers)?);
            }
            self.finish_job(job, readings, &mut compute)?;
        }
        Ok(())
    }

    /// A free buffer for each lane, or none.
    fn buffers_at_hand<T>(&mut self, job: &TileJob<T>) -> Moved<Option<Vec<Buffer>>> {
        let mut buffers = Vec::with_capacity(job.lanes.len());
        for (section, _) in &job.lanes {
            match self.tier(section.resting)?.try_buffer()? {
                Some(buffer) => buffers.push(buffer),
                None => {
                    for ((section, _), buffer) in job.lanes.iter().zip(buffers) {
                        self.give(section, buffer)?;
                    }
                    return Ok(None);
                }
            }
        }
        Ok(Some(buffers))
    }

    fn start_job<T>(&mut self, job: &TileJob<T>, buffers: Vec<Buffer>) -> Moved<Vec<Reading>> {
        job.lanes.iter().zip(buffers).map(|((s, _), buffer)| self.start_read(s, job.tile, buffer)).collect()
    }

    fn finish_job<T>(
        &mut self,
        job: &TileJob<T>,
        readings: Vec<Reading>,
        compute: &mut impl FnMut(&T, usize, &mut [&mut [f32]]) -> Moved<()>,
    ) -> Moved<()> {
        let lanes = job.lanes.iter().zip(readings);
        let mut buffers =
            lanes.map(|((section, _), reading)| self.wait(section, reading)).collect::<Moved<Vec<_>>>()?;
        let start = job.tile * self.tile_numel;
        let mut tiles: Vec<&mut [f32]> = buffers.iter_mut().map(Buffer::f32s_mut).collect();
        compute(&job.what, start, &mut tiles)?;
        for ((section, written), buffer) in job.lanes.iter().zip(buffers) {
            if *written {
                self.start_write(section, job.tile, buffer)?;
            } else {
                self.give(section, buffer)?;
            }
        }
        self.flush_unless_pipelined()
    }

    /// Lets `see(start, tile)` look at every tile of a section, in order.
    pub(crate) fn read_tiles(
        &mut self,
        section: &Section,
        mut see: impl FnMut(usize, &[f32]) -> Moved<()>,
    ) -> Moved<()> {
        let jobs = self.jobs(&[(*section, false)]);
        self.stream(&jobs, |(), start, tiles| see(start, tiles[0]))
    }

    /// Lets `edit(start, tiles)` change the tiles of sections of one length that are marked for it.
    pub(crate) fn edit_tiles(
        &mut self,
        lanes: &[(Section, bool)],
        mut edit: impl FnMut(usize, &mut [&mut [f32]]) -> Moved<()>,
    ) -> Moved<()> {
        let jobs = self.jobs(lanes);
        self.stream(&jobs, |(), start, tiles| edit(start, tiles))
    }

    fn jobs(&self, lanes: &[(Section, bool)]) -> Vec<TileJob<()>> {
        let tiles = lanes.first().map_or(0, |(section, _)| self.tiles(section));
        (0..tiles).map(|tile| TileJob { lanes: lanes.to_vec(), tile, what: () }).collect()
    }

    /// Reads the first elements of a section.
    pub(crate) fn read(&mut self, section: &Section, dest: &mut [f32]) -> Moved<()> {
        self.read_tiles(section, |start, tile| {
            let end = (start + tile.len()).min(dest.len());
            if start < end {
                dest[start..end].copy_from_slice(&tile[..end - start]);
            }
            Ok(())
        })
    }

    /// Replaces all of a section.
    pub(crate) fn write(&mut self, section: &Section, values: &[f32]) -> Moved<()> {
        for tile in 0..self.tiles(section) {
            let range = self.tile_range(section, tile);
            let mut buffer = self.buffer(section.resting)?;
            buffer.set_len(range.len() * size_of::<f32>());
            buffer.f32s_mut().copy_from_slice(&values[range]);
            self.start_write(section, tile, buffer)?;
        }
        self.flush_unless_pipelined()
    }

    /// Lets `edit` change elements `range` of a section.
    pub(crate) fn edit_range<T>(
        &mut self,
        section: &Section,
        range: Range<usize>,
        edit: impl FnOnce(&mut [f32]) -> T,
    ) -> Moved<T> {
        let mut values = vec![0.0; range.len()];
        let tiles = range.start / self.tile_numel..range.end.div_ceil(self.tile_numel);
        let tiles = if range.is_empty() { 0..0 } else { tiles };
        let overlap = |swap: &Self, tile: usize| {
            let here = swap.tile_range(section, tile);
            let both = here.start.max(range.start)..here.end.min(range.end);
            (both.start - here.start..both.end - here.start, both.start - range.start..both.end - range.start)
        };
        for tile in tiles.clone() {
            let (inside, outside) = overlap(self, tile);
            let buffer = self.buffer(section.resting)?;
            let reading = self.start_read(section, tile, buffer)?;
            let buffer = self.wait(section, reading)?;
            values[outside].copy_from_slice(&buffer.f32s()[inside]);
            self.give(section, buffer)?;
        }
        let result = edit(&mut values);
        for tile in tiles {
            let (inside, outside) = overlap(self, tile);
            let mut buffer = self.buffer(section.resting)?;
            if inside.len() < self.tile_range(section, tile).len() {
                let reading = self.start_read(section, tile, buffer)?;
                buffer = self.wait(section, reading)?;
            } else {
                buffer.set_len(inside.len() * size_of::<f32>());
            }
            buffer.f32s_mut()[inside].copy_from_slice(&values[outside]);
            self.start_write(section, tile, buffer)?;
        }
        self.flush_unless_pipelined()?;
        Ok(result)
    }
}

/// A flat parameter's name in a tier.
pub(crate) fn name_of(unit: UnitId, part: usize, layout: &shardwise_core::FlatLayout, what: &str) -> String {
    format!("{}.{}.{part}.{what}", unit.index(), layout.unit())
}
