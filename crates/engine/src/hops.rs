//! Gathers in two hops: a part enters a node once, through the rank that has the same place there, and spreads inside.
//!
//! A gather is a collective of all ranks then, in the order of use. (a) Every rank lends its own part. (b) It reads, from every
//! node, the part of the rank that has its own place there, into a relay. (c) It lends the relay to its node, and (d) puts the
//! relays of its node together. The parts travel as they are encoded, and are decoded once, in (d).
//!
//! hpZ keeps the relays, one for each flat parameter: a second copy of the parameters, partitioned inside the node. The first
//! gather of a step fills it, later ones do (c) and (d) only. Nobody reads a relay before it is filled: its owner lends it
//! after that.

use std::ops::Range;

use shardwise_comm::{CommError, HostBuffer, Loan, ProcessGroup, SharedBuffer, Window};
use shardwise_core::{Purpose, Traffic, Travel};

use crate::Result;
use crate::config::UnitId;
use crate::engine::{Engine, Phase};
use crate::handle::{FlatParamHandle, end_gather};
use crate::ledger::Ledger;
use crate::unit::Place;
use crate::wire;

/// A rank's own part of a flat parameter as its peers read it.
#[derive(Debug)]
pub(crate) struct OwnPart<'a> {
    /// Where it lies.
    pub(crate) buffer: &'a SharedBuffer,
    /// Which bytes of that it is.
    pub(crate) bytes: Range<usize>,
    /// Where quantised elements lie in f32, for blocks that travel so.
    pub(crate) raw: Option<(&'a SharedBuffer, Range<usize>)>,
    /// Elements of such blocks.
    pub(crate) raw_numel: usize,
}

/// What is gathered.
#[derive(Debug)]
struct Gather<'a> {
    label: &'a str,
    travel: Travel,
    /// Elements of one part, padding included.
    part: usize,
    /// Elements of all parts, without padding.
    numel: usize,
    /// The copy that is kept of it, and the step in which that is good.
    kept: Option<(usize, u64)>,
}

impl Gather<'_> {
    fn bytes(&self) -> usize {
        self.travel.bytes(self.part)
    }

    /// The bytes of one part in a relay.
    fn slot(&self, slot: usize) -> Range<usize> {
        slot * self.bytes()..(slot + 1) * self.bytes()
    }

    /// The elements of one part in the whole.
    fn elements(&self, part: usize) -> Range<usize> {
        part * self.part..(part + 1) * self.part
    }
}

/// What has come into a node of one flat parameter, or of one after another.
#[derive(Debug)]
struct Relay {
    buffer: SharedBuffer,
    /// The step in which it was filled with what is kept.
    step: Option<u64>,
}

/// The way of parts through the nodes.
#[derive(Debug)]
pub(crate) struct Hops {
    shards: ProcessGroup,
    node: ProcessGroup,
    /// How many nodes there are.
    nodes: usize,
    /// For what is not kept.
    passing: Option<Relay>,
    /// hpZ: by flat parameter, in the order of collectives.
    kept: Vec<Option<Relay>>,
}

impl Hops {
    /// For the ranks of one `node` among `shards`, and these flat parameters.
    pub(crate) fn new<'a>(
        (shards, node): (ProcessGroup, ProcessGroup),
        handles: impl Iterator<Item = &'a FlatParamHandle>,
        keeps: bool,
        ledger: &mut Ledger,
    ) -> std::result::Result<Self, CommError> {
        let nodes = shards.size() / node.size();
        let mut allocate = |purpose, bytes: usize| {
            let buffer = shards.allocate(bytes.div_ceil(size_of::<f32>()))?;
            ledger.add_bytes(purpose, bytes);
            Ok::<Relay, CommError>(Relay { buffer, step: None })
        };
        let (mut kept, mut largest) = (Vec::new(), 0);
        for handle in handles {
            let part = handle.layout().shard_numel();
            let copy = match (handle.is_whole(), keeps) {
                // Of what every rank keeps whole, only the summed gradient is gathered.
                (true, _) if !handle.is_trainable() => None,
                (true, _) => {
                    largest = largest.max(nodes * part * size_of::<f32>());
                    None
                }
                (false, false) => {
                    largest = largest.max(nodes * handle.travel().bytes(part));
                    None
                }
                (false, true) => {
                    Some(allocate(Purpose::SecondaryParameters, nodes * handle.travel().bytes(part))?)
                }
            };
            kept.push(copy);
        }
        let passing = if largest > 0 { Some(allocate(Purpose::HierarchyRelay, largest)?) } else { None };
        Ok(Self { shards, node, nodes, passing, kept })
    }

    /// Whether the next gather of a flat parameter in `step` reads the ranks' own parts.
    fn needs_own(&self, index: usize, step: u64) -> bool {
        self.kept.get(index).and_then(Option::as_ref).is_none_or(|relay| relay.step != Some(step))
    }

    /// Marks the end of a round: who still gathers then learns that others do not.
    pub(crate) fn end_round(&self, label: &str) {
        for group in [&self.shards, &self.node] {
            drop(group.start_reduce_scatter(label, None, 0));
        }
    }

    /// Gathers into `dest`. Returns what this rank has sent.
    fn gather(
        &mut self,
        gather: &Gather<'_>,
        own: &OwnPart<'_>,
        dest: &mut [f32],
    ) -> std::result::Result<Traffic, CommError> {
        if gather.numel == 0 && gather.kept.is_none() {
            // Where nothing else passes through there is no relay.
            return Ok(Traffic::default());
        }
        let Self { shards, node, nodes, passing, kept } = self;
        let relay = match gather.kept {
            Some((index, _)) => kept.get_mut(index).and_then(Option::as_mut),
            None => passing.as_mut(),
        };
        let Some(relay) = relay else {
            let message = format!("there is no relay for the parts of `{}`", gather.label);
            return Err(CommError::Usage { rank: shards.rank(), message });
        };
        let (mut sent, mut raw) = (Traffic::default(), None);
        let step = gather.kept.map(|(_, step)| step);
        if step.is_none() || relay.step != step {
            // (a) and (b)
            if let Some((buffer, bytes)) = &own.raw {
                raw = Some(shards.lend_range(gather.label, buffer, bytes.clone())?);
            }
            let loan = shards.lend_range(gather.label, own.buffer, own.bytes.clone())?;
            relay.step = None;
            fill(&loan, gather, (node.size(), node.rank()), &mut relay.buffer)?;
            loan.finish();
            relay.step = step;
            sent.across = ((*nodes - 1) * gather.bytes()) as u64;
            // Every other rank that shares the model reads what could not be quantised.
            let raw = own.raw_numel * size_of::<f32>();
            sent += Traffic::of((node.size() - 1) * raw, (shards.size() - node.size()) * raw);
        }
        // (c) and (d)
        let relayed = *nodes * gather.bytes();
        let loan = node.lend(gather.label, &relay.buffer, relayed)?;
        for place in loan.peers() {
            let window = loan.window(place, 0..relayed)?;
            for slot in 0..*nodes {
                let part = slot * node.size() + place;
                let dest = &mut dest[gather.elements(part)];
                let bytes = &window.bytes()[gather.slot(slot)];
                if wire::needs_raw(gather.travel, bytes, gather.part) {
                    // All ranks see it, and none keeps a copy that lacks something.
                    relay.step = None;
                }
                decode(bytes, gather, (part, raw.as_ref()), dest)?;
            }
        }
        loan.finish();
        sent.inside += ((node.size() - 1) * relayed) as u64;
        Ok(sent)
    }
}

/// Reads, from every node, the part of the rank at this one's place. What pads a part does not travel.
fn fill(
    loan: &Loan,
    gather: &Gather<'_>,
    (size, place): (usize, usize),
    relay: &mut SharedBuffer,
) -> std::result::Result<(), CommError> {
    let bytes = relay.writable_bytes()?;
    for rank in loan.peers().filter(|rank| rank % size == place) {
        let own = gather.numel.saturating_sub(rank * gather.part).min(gather.part);
        // Blocks are quantised with zeros for padding.
        let data = if gather.travel.quantised.is_some() { gather.bytes() } else { gather.travel.bytes(own) };
        let (data, padding) = bytes[gather.slot(rank / size)].split_at_mut(data);
        data.copy_from_slice(loan.window(rank, 0..data.len())?.bytes());
        padding.fill(0);
    }
    Ok(())
}

/// Decodes the part of one rank; raw blocks are read where that rank lends its masters.
fn decode(
    bytes: &[u8],
    gather: &Gather<'_>,
    (rank, raw): (usize, Option<&Loan>),
    dest: &mut [f32],
) -> std::result::Result<(), CommError> {
    let source = match raw {
        Some(loan) if wire::needs_raw(gather.travel, bytes, dest.len()) => {
            Some(loan.window(rank, 0..size_of_val(dest))?)
        }
        _ => None,
    };
    wire::decode(gather.travel, bytes, dest, source.as_ref().map(Window::f32s))
        .map_err(|raw| CommError::undecodable(gather.label, &raw))
}

impl Engine {
    /// Whether a flat parameter is gathered in two hops now. Scopes and evaluations read the masters where they lie: ranks
    /// evaluate each at their own pace.
    pub(crate) fn gathers_in_hops(&self, at: Place) -> bool {
        self.is_in_hops() && !self.units[at].is_whole()
    }

    /// Whether gathers of the current phase pass through nodes.
    pub(crate) fn is_in_hops(&self) -> bool {
        let trains = matches!(self.phase, Phase::Step { .. } | Phase::Round { .. });
        self.hops.is_some() && self.config.strategy.is_sharded() && trains
    }

    /// Fills the buffer of a gather in two hops. After a failure it holds zeros.
    pub(crate) fn fill_in_hops(&mut self, at: Place, buffer: &mut HostBuffer) -> Result<()> {
        let Some(mut hops) = self.hops.take() else { return Ok(()) };
        let index = self.units.index_of(at);
        if self.units[at].away.params.is_some() && hops.needs_own(index, self.step) {
            // What is kept in the node need not come in again.
            let staged = self.stage_params(at, self.units[at].travel());
            if let Err(error) = self.comm(staged) {
                buffer.as_mut_slice().fill(0.0);
                self.hops = Some(hops);
                return Err(error);
            }
        }
        let handle = &self.units[at];
        let layout = handle.layout();
        let dest = &mut buffer.as_mut_slice()[..layout.padded_numel()];
        let gather = Gather {
            label: layout.unit(),
            travel: handle.travel(),
            part: layout.shard_numel(),
            numel: layout.numel(),
            kept: hops.kept[index].is_some().then_some((index, self.step)),
        };
        let gathered = hops.gather(&gather, &self.own_part(at), dest);
        end_gather(dest, layout.numel(), gathered.is_ok());
        self.hops = Some(hops);
        self.sent += self.comm(gathered)?;
        Ok(())
    }

    /// Gathers the summed gradient `sum` of a flat parameter, for ranks that update all of it.
    pub(crate) fn gather_sum_in_hops(
        &mut self,
        at: Place,
        sum: &SharedBuffer,
        dest: &mut SharedBuffer,
    ) -> Result<()> {
        let Some(mut hops) = self.hops.take() else { return Ok(()) };
        let layout = self.units[at].layout();
        let (label, part, numel) = (layout.unit(), layout.shard_numel(), layout.numel());
        let gather = Gather { label, travel: Travel::F32, part, numel, kept: None };
        let own = OwnPart { buffer: sum, bytes: 0..part * size_of::<f32>(), raw: None, raw_numel: 0 };
        let all = dest.writable();
        let gathered = all.and_then(|dest| hops.gather(&gather, &own, &mut dest[..layout.padded_numel()]));
        self.hops = Some(hops);
        self.sent += self.comm(gathered)?;
        Ok(())
    }

    /// This rank's own part of a flat parameter, as it travels to computations.
    fn own_part(&self, at: Place) -> OwnPart<'_> {
        let handle = &self.units[at];
        let (start, part) = (handle.span().start, handle.layout().shard_numel());
        let masters = start * size_of::<f32>()..(start + part) * size_of::<f32>();
        let quantised = handle.travel().quantised.is_some() && !handle.rests();
        let raw = quantised.then_some((&self.params, masters.clone()));
        let raw_numel = if quantised { handle.encoded.raw } else { 0 };
        if let Some(stage) = self.stages.current().filter(|_| handle.away.params.is_some()) {
            return stage.part(handle.travel(), part, handle.encoded.raw);
        }
        match &self.low {
            Some(buffer) if handle.has_low_copy() || handle.rests() => {
                OwnPart { buffer, bytes: handle.encoded_range(), raw, raw_numel }
            }
            _ => OwnPart { buffer: &self.params, bytes: masters, raw, raw_numel },
        }
    }

    /// What this rank keeps of its node's second copy of a flat parameter: the parts of the ranks with its place, in the
    /// order of nodes, each padded with zeros, as bytes on the wire. `None` where there is no copy, or it is not filled yet.
    pub fn secondary(&self, unit: UnitId, part: usize) -> Option<&[u8]> {
        let index = self.units.index_of(Place { unit, part });
        let relay = self.hops.as_ref()?.kept.get(index)?.as_ref().filter(|relay| relay.step.is_some())?;
        let handle = &self.units[Place { unit, part }];
        let bytes = self.hops.as_ref()?.nodes * handle.travel().bytes(handle.layout().shard_numel());
        Some(&relay.buffer.as_bytes()[..bytes])
    }
}
