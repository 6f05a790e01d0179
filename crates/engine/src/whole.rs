//! The part of an update that looks at whole parameters: Adafactor's sums over ranks, and Muon's matrices.
//!
//! Matrices are made orthogonal in rounds, the largest first: in a round each rank has one. For each, its owner reads the
//! parts of the momentum where the peers lent them; then all read their parts of the results. Every rank takes part in
//! every loan, also when it owns no matrix or no element.

use shardwise_comm::{CommError, HostBuffer, ProcessGroup, SharedBuffer};
use shardwise_core::statistics::overlap;
use shardwise_core::{OptimizerKind, ParamInfo, Purpose, ScratchSize};

use crate::Result;
use crate::engine::Engine;
use crate::handle::FlatParamHandle;
use crate::ledger::Ledger;
use crate::norm::DoubleDouble;
use crate::optimizer::adafactor::{Factored, Sums};
use crate::optimizer::muon::{self, Workplace};
use crate::optimizer::state::{Matrix, moments};
use crate::optimizer::{OptimizerConfig, StateSlice, StepUpdate};
use crate::unit::{Place, Units};

/// What optimizers need that look at whole parameters.
#[derive(Debug)]
pub(crate) struct Whole {
    /// Every matrix of Muon, the largest first.
    matrices: Vec<MatrixPlace>,
    /// What peers read: a result, or sums.
    shared: Option<SharedBuffer>,
    private: Option<HostBuffer>,
    sums: Vec<f64>,
    /// In the current step.
    pub(crate) bytes_sent: u64,
}

/// A matrix of Muon: its flat parameter, and which of its matrices.
#[derive(Debug, Clone, Copy)]
struct MatrixPlace {
    at: Place,
    index: usize,
}

impl Whole {
    /// Allocates what the optimizers of `units` need.
    pub(crate) fn new(
        units: &Units,
        group: &ProcessGroup,
        ledger: &mut Ledger,
    ) -> shardwise_comm::Result<Self> {
        let matrices = units.places().into_iter().flat_map(|at| {
            let count = units[at].state_of_update.matrices.len();
            (0..count).map(move |index| MatrixPlace { at, index })
        });
        let mut matrices: Vec<MatrixPlace> = matrices.collect();
        // Equal sizes stay in the order of the model, which is the same on every rank.
        matrices.sort_by_key(|m| std::cmp::Reverse(units[m.at].matrix(m.index).range.len()));
        let size = units.handles().fold(ScratchSize::default(), |most, handle| {
            let kind_of = |param: &ParamInfo| handle.kind_of_whole(param);
            most.max(ScratchSize::of([handle.layout()], &kind_of))
        });
        let mut allocated = |numel: usize| {
            if numel > 0 {
                ledger.add(Purpose::OptimizerScratch, numel);
            }
            numel > 0
        };
        Ok(Self {
            matrices,
            shared: allocated(size.shared).then(|| group.allocate(size.shared)).transpose()?,
            private: allocated(size.private).then(|| HostBuffer::new(size.private)).transpose()?,
            sums: vec![0.0; if allocated(size.sums) { size.sums / 2 } else { 0 }],
            bytes_sent: 0,
        })
    }

    fn private(&mut self) -> &mut [f32] {
        self.private.as_mut().map_or(&mut [], HostBuffer::as_mut_slice)
    }
}

impl FlatParamHandle {
    fn matrix(&self, index: usize) -> &Matrix {
        &self.state_of_update.matrices[index]
    }

    /// The optimizer of a parameter that one looks at as a whole; for the others one that needs no scratch.
    fn kind_of_whole(&self, param: &ParamInfo) -> OptimizerKind {
        let state = &self.state_of_update;
        if state.matrices.iter().any(|m| m.range == param.range() && param.numel > 0) {
            OptimizerKind::Muon
        } else if state.factored.iter().any(|f| f.range == param.range() && param.numel > 0) {
            OptimizerKind::Adafactor
        } else {
            OptimizerKind::Sgd
        }
    }

    /// Measures this rank's part of every parameter of Adafactor; returns how many sums that are.
    fn measure_factored(&self, params: &[f32], clip: f32, sums: &mut [f64]) -> usize {
        let Some(gradient) = self.sum.as_ref().map(SharedBuffer::as_slice) else { return 0 };
        let factored = &self.state_of_update.factored;
        let count = factored.iter().map(Factored::sums).sum();
        let (high, rest) = sums.split_at_mut(count);
        let mut all = Sums { high, low: &mut rest[..count] };
        let mut at = 0;
        for factored in factored {
            let piece = overlap(&factored.range, &self.shard);
            let (params, gradient) = if piece.is_empty() {
                (&[] as &[f32], &[] as &[f32])
            } else {
                let (owned, shard) = (piece.start - self.owned.start, piece.start - self.shard.start);
                (&params[owned..owned + piece.len()], &gradient[shard..shard + piece.len()])
            };
            factored.measure(&piece, params, gradient, clip, all.part(at..at + factored.sums()));
            at += factored.sums();
        }
        count
    }

    fn take_sums(&mut self, sums: &mut [f64], lr: f64) {
        let state = &mut self.state_of_update;
        let updates = state.next_count();
        let count = state.factored.iter().map(Factored::sums).sum();
        let (high, rest) = sums.split_at_mut(count);
        let mut all = Sums { high, low: &mut rest[..count] };
        let mut at = 0;
        for factored in &mut state.factored {
            let kept = state.factors.as_mut().map_or(&mut [] as &mut [f32], HostBuffer::as_mut_slice);
            let number = factored.sums();
            factored.take_sums(&all.part(at..at + number), kept, lr, updates);
            at += number;
        }
    }

    /// Measures this rank's part of every update of Adafactor; returns how many sums that are.
    fn measure_updates(&mut self, update: StepUpdate, sums: &mut [f64]) -> usize {
        let Some(gradient) = self.sum.as_ref().map(SharedBuffer::as_slice) else { return 0 };
        let state = &mut self.state_of_update;
        let count = state.factored.len();
        let factors = state.factors.as_ref().map_or(&[] as &[f32], HostBuffer::as_slice);
        for (index, factored) in state.factored.iter().enumerate() {
            let (piece, owned) =
                (overlap(&factored.range, &self.shard), overlap(&factored.range, &self.owned));
            let mut part = DoubleDouble::default();
            if !piece.is_empty() {
                let from = piece.start - self.shard.start;
                let moments = moments(&mut state.slots, factored, owned.len());
                let behind = piece.start - owned.start;
                let moments = moments.get(behind..behind + piece.len()).unwrap_or_default();
                let gradient = &gradient[from..from + piece.len()];
                part = factored.measure_update(&piece, gradient, moments, factors, update);
            }
            (sums[index], sums[count + index]) = (part.high, part.low);
        }
        count
    }

    fn take_updates(&mut self, sums: &[f64]) {
        let count = self.state_of_update.factored.len();
        for (index, factored) in self.state_of_update.factored.iter_mut().enumerate() {
            factored.take_update(DoubleDouble { high: sums[index], low: sums[count + index] });
        }
    }

    /// Advances the momentum of this rank's part of every matrix, and leaves the directions in the gradient's place.
    fn advance_matrices(&mut self, clip: f32) -> std::result::Result<(), CommError> {
        let Some(sum) = self.sum.as_mut().filter(|_| !self.state_of_update.matrices.is_empty()) else {
            return Ok(());
        };
        let sum = sum.writable()?;
        let state = &mut self.state_of_update;
        for matrix in &state.matrices {
            let OptimizerConfig::Muon { momentum, nesterov, .. } = matrix.rule.optimizer else { continue };
            let (piece, Some(slot)) = (overlap(&matrix.range, &self.shard), state.slots.first_mut()) else {
                continue;
            };
            if !piece.is_empty() {
                let from = piece.start - self.shard.start;
                let buffer = &mut slot.as_mut_slice()[matrix.momentum..matrix.momentum + piece.len()];
                muon::advance(&mut sum[from..from + piece.len()], buffer, clip, momentum, nesterov);
            }
        }
        Ok(())
    }
}

impl Engine {
    /// Shows every optimizer statistic of what this rank keeps, to save or to load it: each names its parameter by path,
    /// however the model is cut into units.
    ///
    /// # Errors
    /// In the middle of a step, and after a failure.
    pub fn each_state(&mut self, mut see: impl FnMut(StateSlice<'_>)) -> Result<()> {
        self.expect_idle("each_state")?;
        for at in self.units.places() {
            match self.units[at].away.state {
                Some(_) => self.each_state_away(at, &mut see)?,
                None => self.units[at].each_state(&mut see),
            }
        }
        Ok(())
    }

    /// Prepares the update of what needs whole parameters, and updates the matrices of Muon.
    pub(crate) fn update_whole(&mut self, update: StepUpdate) -> Result<()> {
        let here: Vec<Place> =
            self.units.places().into_iter().filter(|at| !self.units[*at].is_away()).collect();
        self.update_whole_of(&here, update)
    }

    /// The same for some of the flat parameters, which are in memory now.
    pub(crate) fn update_whole_of(&mut self, places: &[Place], update: StepUpdate) -> Result<()> {
        for at in places.iter().copied() {
            if self.units[at].sum.is_some() && !self.units[at].state_of_update.factored.is_empty() {
                self.prepare_factored(at, update)?;
            }
            let advanced = self.units[at].advance_matrices(update.clip);
            self.comm(advanced)?;
        }
        let used = |m: &MatrixPlace| places.contains(&m.at) && self.units[m.at].sum.is_some();
        let matrices: Vec<MatrixPlace> = self.whole.matrices.iter().copied().filter(used).collect();
        matrices.chunks(self.shards.size()).try_for_each(|round| self.update_matrices(round, update))
    }

    fn prepare_factored(&mut self, at: Place, update: StepUpdate) -> Result<()> {
        let handle = &self.units[at];
        let params = &self.params.as_slice()[handle.span()];
        let count = handle.measure_factored(params, update.clip, &mut self.whole.sums);
        self.sum_over_ranks(count)?;
        self.units[at].take_sums(&mut self.whole.sums, update.lr);
        let count = self.units[at].measure_updates(update, &mut self.whole.sums);
        self.sum_over_ranks(count)?;
        self.units[at].take_updates(&self.whole.sums);
        Ok(())
    }

    /// Adds the first `count` sums of all ranks up, in the order of ranks: high parts first, low parts behind them.
    fn sum_over_ranks(&mut self, count: usize) -> Result<()> {
        let (ranks, words) = (self.shards.size(), 4 * count);
        if ranks == 1 {
            return Ok(());
        }
        let Whole { shared: Some(shared), private: Some(private), sums, bytes_sent, .. } = &mut self.whole
        else {
            return Ok(());
        };
        let sums = &mut sums[..2 * count];
        let exchanged: shardwise_comm::Result<()> = (|| {
            let (pairs, _) = shared.writable()?[..words].as_chunks_mut::<2>();
            for (pair, sum) in pairs.iter_mut().zip(sums.iter()) {
                let bits = sum.to_bits();
                *pair = [f32::from_bits((bits >> 32) as u32), f32::from_bits(bits as u32)];
            }
            let loan = self.shards.lend("optimizer sums", shared, words * size_of::<f32>())?;
            sums.fill(0.0);
            let theirs = &mut private.as_mut_slice()[..words];
            for peer in 0..ranks {
                loan.read(peer, 0, theirs)?;
                let (pairs, _) = theirs.as_chunks::<2>();
                let value = |pair: &[f32; 2]| {
                    f64::from_bits(u64::from(pair[0].to_bits()) << 32 | u64::from(pair[1].to_bits()))
                };
                for index in 0..count {
                    let own = DoubleDouble { high: sums[index], low: sums[count + index] };
                    let other =
                        DoubleDouble { high: value(&pairs[index]), low: value(&pairs[count + index]) };
                    let sum = own.plus(other);
                    (sums[index], sums[count + index]) = (sum.high, sum.low);
                }
            }
            loan.finish();
            Ok(())
        })();
        *bytes_sent += ((ranks - 1) * words * size_of::<f32>()) as u64;
        self.comm(exchanged)
    }

    /// Updates up to as many matrices as there are ranks; the rank in the place of each makes it orthogonal.
    fn update_matrices(&mut self, round: &[MatrixPlace], update: StepUpdate) -> Result<()> {
        let own = self.shards.rank();
        for (owner, place) in round.iter().enumerate() {
            let collected = self.collect(*place, owner == own);
            self.comm(collected)?;
        }
        if let Some(place) = round.get(own) {
            let orthogonalised = self.orthogonalise(*place);
            self.comm(orthogonalised)?;
        }
        let spread = self.spread(round, update);
        self.comm(spread)
    }

    /// Lends this rank's part of a matrix; its owner reads all parts.
    fn collect(&mut self, place: MatrixPlace, owns: bool) -> std::result::Result<(), CommError> {
        let handle = &self.units[place.at];
        let (Some(sum), range) = (&handle.sum, &handle.matrix(place.index).range) else { return Ok(()) };
        let Some(shared) = &mut self.whole.shared else { return Ok(()) };
        if self.shards.size() == 1 {
            shared.writable()?[..range.len()].copy_from_slice(&sum.as_slice()[range.clone()]);
            return Ok(());
        }
        let loan = self.shards.lend(handle.name(), sum, sum.numel() * size_of::<f32>())?;
        if owns {
            let matrix = shared.writable()?;
            for peer in 0..self.shards.size() {
                let shard = handle.layout().shard_range(peer);
                let piece = overlap(range, &shard);
                if !piece.is_empty() {
                    let to = piece.start - range.start..piece.end - range.start;
                    loan.read(peer, piece.start - shard.start, &mut matrix[to])?;
                }
            }
        } else {
            self.whole.bytes_sent += (overlap(range, &handle.shard).len() * size_of::<f32>()) as u64;
        }
        loan.finish();
        Ok(())
    }

    fn orthogonalise(&mut self, place: MatrixPlace) -> std::result::Result<(), CommError> {
        let matrix = self.units[place.at].matrix(place.index);
        let OptimizerConfig::Muon { steps, .. } = matrix.rule.optimizer else { return Ok(()) };
        let (rows, columns) = (matrix.rows, matrix.columns);
        let Whole { shared: Some(shared), private: Some(private), .. } = &mut self.whole else {
            return Ok(());
        };
        Workplace { matrix: shared.writable()?, scratch: private.as_mut_slice() }
            .orthogonalise(rows, columns, steps);
        Ok(())
    }

    /// Lends the result of this rank, reads this rank's parts of all results, and updates the parameters.
    fn spread(&mut self, round: &[MatrixPlace], update: StepUpdate) -> std::result::Result<(), CommError> {
        let (ranks, own) = (self.shards.size(), self.shards.rank());
        let Some(shared) = self.whole.shared.as_ref() else { return Ok(()) };
        let lend = || self.shards.lend("Muon's results", shared, shared.numel() * size_of::<f32>());
        let loan = if ranks > 1 { Some(lend()?) } else { None };
        let params = self.params.writable()?;
        for (owner, place) in round.iter().enumerate() {
            let handle = &self.units[place.at];
            let matrix = handle.matrix(place.index);
            let piece = overlap(&matrix.range, &handle.owned);
            if owner == own {
                let readers = if handle.is_whole() { ranks } else { 1 };
                let read_by_all = readers * matrix.range.len();
                let sent = read_by_all - piece.len();
                self.whole.bytes_sent += (sent * size_of::<f32>()) as u64;
            }
            if piece.is_empty() {
                continue;
            }
            let from = piece.start - matrix.range.start;
            let direction: &[f32] = match (&loan, &self.whole.shared) {
                (Some(loan), _) => {
                    let part = &mut self.whole.private()[..piece.len()];
                    loan.read(owner, from, part)?;
                    part
                }
                (None, Some(shared)) => &shared.as_slice()[from..from + piece.len()],
                (None, None) => continue,
            };
            let start = handle.span().start + piece.start - handle.owned.start;
            let (keep, step) = matrix.constants(update.lr);
            muon::descend(&mut params[start..start + piece.len()], direction, keep, step);
        }
        if let Some(loan) = loan {
            loan.finish();
        }
        Ok(())
    }
}
