//! How the elements of one flat parameter are updated on one rank, and the statistics that are kept for it.

use std::ops::Range;

use shardwise_comm::{CommError, HostBuffer};
use shardwise_core::statistics::{STATISTIC_SLOTS, overlap, updates_single_elements};
use shardwise_core::{FlatLayout, ParamInfo, Purpose, StatisticsSize};

use super::adafactor::Factored;
use super::{OptimizerConfig, ParamRule, StepUpdate, Update};
use crate::ledger::Ledger;

/// A run of elements that one rule updates, each by itself.
#[derive(Debug)]
struct Segment {
    /// Which of the owned elements.
    range: Range<usize>,
    /// Where their statistics start, by slot.
    at: [usize; STATISTIC_SLOTS],
    states: usize,
    rule: ParamRule,
}

/// A matrix that Muon updates.
#[derive(Debug)]
pub(crate) struct Matrix {
    /// Its elements of the flat parameter.
    pub(crate) range: Range<usize>,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) rule: ParamRule,
    /// Where the momentum of this rank's part of it starts.
    pub(crate) momentum: usize,
}

impl Matrix {
    /// By what a step multiplies the parameters and the direction.
    pub(crate) fn constants(&self, lr: f64) -> (f32, f32) {
        let lr = self.rule.lr.rate(lr);
        match self.rule.optimizer {
            OptimizerConfig::Muon { scale, weight_decay, .. } => {
                let decay = if self.rule.decays { weight_decay } else { 0.0 };
                ((1.0 - lr * decay) as f32, (lr * scale.factor(self.rows, self.columns)) as f32)
            }
            _ => (1.0, 0.0),
        }
    }
}

/// A statistic of a part of one parameter.
#[derive(Debug)]
pub struct StateSlice<'a> {
    /// The parameter's path: the statistic's key, with its name.
    pub path: &'a str,
    /// PyTorch's name: `exp_avg`, `exp_avg_sq`, `momentum_buffer`, `variance`, `row_var` or `col_var`.
    pub name: &'static str,
    /// Which elements of the statistic these are, counted over the whole parameter (or over all its rows or columns).
    pub elements: Range<usize>,
    /// Whether every rank holds the same.
    pub replicated: bool,
    /// The values.
    pub values: &'a mut [f32],
}

/// How one flat parameter is updated on one rank.
#[derive(Debug)]
pub(crate) struct UpdateState {
    segments: Vec<Segment>,
    pub(crate) factored: Vec<Factored>,
    pub(crate) matrices: Vec<Matrix>,
    /// Statistics of single elements, by slot; each parameter's lie behind those of the one before.
    pub(crate) slots: Vec<HostBuffer>,
    /// Whether every statistic lies where its element does, so that an update can take any run of elements by itself.
    streamable: bool,
    /// Elements of each slot, wherever it is.
    pub(crate) slot_numel: [usize; STATISTIC_SLOTS],
    /// Adafactor's mean squares.
    pub(crate) factors: Option<HostBuffer>,
    updates: u64,
}

/// Which elements of a flat parameter a rank keeps.
pub(crate) struct Kept {
    /// Those that it updates.
    pub(crate) owned: Range<usize>,
    /// Those whose gradient it sums.
    pub(crate) shard: Range<usize>,
    /// Whether every rank updates all.
    pub(crate) whole: bool,
    /// Whether the statistics of single elements rest elsewhere.
    pub(crate) away: bool,
}

impl ParamRule {
    /// The rule's update of a step, the `count`-th.
    fn update(&self, step: StepUpdate, count: u64) -> Update {
        Update {
            config: self.optimizer,
            lr: self.lr.rate(step.lr),
            count,
            clip: step.clip,
            decay: self.decays,
        }
    }
}

impl UpdateState {
    /// Allocates the statistics; `rules` are those of the layout's parameters, or empty when it is frozen.
    pub(crate) fn new(
        layout: &FlatLayout,
        kept: &Kept,
        rules: &[ParamRule],
        ledger: &mut Ledger,
    ) -> Result<Self, CommError> {
        let index_of = |param: &ParamInfo| layout.params().iter().position(|p| p.path == param.path);
        let kind_of = |param: &ParamInfo| {
            let rule = index_of(param).and_then(|index| rules.get(index));
            rule.map_or(shardwise_core::OptimizerKind::Sgd, |rule| rule.optimizer.kind())
        };
        let size = StatisticsSize::of(layout, kept.whole, &kind_of);
        let mut allocate = |numel: usize| {
            ledger.add(Purpose::OptimizerState, numel);
            HostBuffer::new(numel)
        };
        let slots = size.slots.into_iter().take_while(|numel| *numel > 0 && !kept.away);
        let slots = slots.map(&mut allocate).collect::<Result<_, _>>()?;
        let factors = (size.factors > 0).then(|| allocate(size.factors)).transpose()?;
        let mut state = Self {
            segments: Vec::new(),
            factored: Vec::new(),
            matrices: Vec::new(),
            slots,
            streamable: updates_single_elements(layout, &kind_of),
            slot_numel: size.slots,
            factors,
            updates: 0,
        };
        let mut at = [0; STATISTIC_SLOTS];
        let mut factors_at = 0;
        for (param, rule) in layout.params().iter().zip(rules).filter(|(param, _)| param.numel > 0) {
            let kind = rule.optimizer.kind();
            let states = kind.states(param.shape.len());
            let here = overlap(&param.range(), if kind.keeps_shards() { &kept.shard } else { &kept.owned });
            match (rule.optimizer, param.shape.as_slice()) {
                (OptimizerConfig::Adafactor { .. }, _) => {
                    let factored = Factored::new(param, *rule, factors_at, at[0]);
                    factors_at += factored.factors();
                    state.factored.push(factored);
                }
                (OptimizerConfig::Muon { .. }, &[rows, columns]) => {
                    let (range, momentum) = (param.range(), at[0]);
                    state.matrices.push(Matrix { range, rows, columns, rule: *rule, momentum });
                }
                _ => {
                    let range = here.start.max(kept.owned.start) - kept.owned.start;
                    state.push(Segment { range: range..range + here.len(), at, states, rule: *rule });
                }
            }
            at.iter_mut().take(states).for_each(|at| *at += here.len());
        }
        Ok(state)
    }

    fn push(&mut self, segment: Segment) {
        if segment.range.is_empty() {
            return;
        }
        match self.segments.last_mut() {
            // Statistics of neighbours with one rule are neighbours too.
            Some(last) if last.rule == segment.rule && last.range.end == segment.range.start => {
                last.range.end = segment.range.end;
            }
            _ => self.segments.push(segment),
        }
    }

    /// Whether anything is kept from one update to the next.
    pub(crate) fn keeps_statistics(&self) -> bool {
        self.slot_numel[0] > 0 || self.factors.is_some()
    }

    /// Whether an update can take any run of elements by itself. The same on every rank.
    pub(crate) fn is_streamable(&self) -> bool {
        self.streamable
    }

    /// Begins an update that comes tile by tile.
    pub(crate) fn count_update(&mut self) {
        self.updates += 1;
    }

    /// Updates the owned elements from `start` on, as many as `params` has, with the same elements of the gradient and of
    /// every slot.
    pub(crate) fn update_tile(
        &self,
        update: StepUpdate,
        start: usize,
        params: &mut [f32],
        gradient: &[f32],
        slots: &mut [&mut [f32]],
    ) {
        let end = start + params.len();
        for segment in &self.segments {
            let here = overlap(&segment.range, &(start..end));
            if here.is_empty() {
                continue;
            }
            let tile = here.start - start..here.end - start;
            let mut statistics: Vec<&mut [f32]> =
                slots.iter_mut().take(segment.states).map(|slot| &mut slot[tile.clone()]).collect();
            let update = segment.rule.update(update, self.updates);
            update.apply(&mut params[tile.clone()], &gradient[tile], &mut statistics);
        }
    }

    /// As [`UpdateState::update_tile`], with statistics that are in memory.
    pub(crate) fn update_tile_here(
        &mut self,
        update: StepUpdate,
        start: usize,
        params: &mut [f32],
        gradient: &[f32],
    ) {
        let mut slots = std::mem::take(&mut self.slots);
        let here = start..start + params.len();
        let mut tiles: Vec<&mut [f32]> =
            slots.iter_mut().map(|slot| &mut slot.as_mut_slice()[here.clone()]).collect();
        self.update_tile(update, start, params, gradient, &mut tiles);
        self.slots = slots;
    }

    /// How often the parameters have been updated, when the update that follows is counted.
    pub(crate) fn next_count(&self) -> u64 {
        self.updates + 1
    }

    /// Updates `owned`, the owned elements of the flat parameter, from their gradient; the matrices of Muon excepted.
    pub(crate) fn update(
        &mut self,
        update: StepUpdate,
        owned: &Range<usize>,
        params: &mut [f32],
        gradient: &[f32],
    ) {
        self.updates += 1;
        for Segment { range, at, states, rule } in &self.segments {
            let mut statistics: Vec<&mut [f32]> = (self.slots.iter_mut().zip(at).take(*states))
                .map(|(slot, at)| &mut slot.as_mut_slice()[*at..at + range.len()])
                .collect();
            let update = rule.update(update, self.updates);
            update.apply(&mut params[range.clone()], &gradient[range.clone()], &mut statistics);
        }
        for factored in &self.factored {
            let piece = overlap(&factored.range, owned);
            if piece.is_empty() {
                continue;
            }
            let here = piece.start - owned.start..piece.end - owned.start;
            let moments = moments(&mut self.slots, factored, piece.len());
            let factors = self.factors.as_ref().map_or(&[] as &[f32], HostBuffer::as_slice);
            factored.apply(
                &piece,
                &mut params[here.clone()],
                &gradient[here],
                (moments, factors),
                update.clip,
            );
        }
    }

    /// Shows every statistic of the elements that this rank keeps, by parameter.
    pub(crate) fn each(&mut self, layout: &FlatLayout, kept: &Kept, see: &mut dyn FnMut(StateSlice<'_>)) {
        let Self { segments, factored, matrices, slots, factors, .. } = self;
        let mut show = |param: &ParamInfo, name, elements: Range<usize>, replicated, values: &mut [f32]| {
            see(StateSlice { path: &param.path, name, elements, replicated, values });
        };
        let within = |param: &ParamInfo, range: &Range<usize>| {
            let part = overlap(&param.range(), range);
            (part.start.saturating_sub(param.offset)..part.end.saturating_sub(param.offset), part)
        };
        for param in layout.params().iter().filter(|param| param.numel > 0) {
            for segment in segments.iter() {
                let whole = segment.range.start + kept.owned.start..segment.range.end + kept.owned.start;
                let (elements, part) = within(param, &whole);
                for (slot, at) in (0..segment.states).zip(segment.at).filter(|_| !part.is_empty()) {
                    let from = at + part.start - whole.start;
                    let values = &mut slots[slot].as_mut_slice()[from..from + part.len()];
                    show(
                        param,
                        statistic_name(segment.rule.optimizer, slot),
                        elements.clone(),
                        false,
                        values,
                    );
                }
            }
            for matrix in matrices.iter().filter(|matrix| matrix.range == param.range()) {
                let (elements, part) = within(param, &kept.shard);
                if !part.is_empty() {
                    let values = &mut slots[0].as_mut_slice()[matrix.momentum..matrix.momentum + part.len()];
                    show(param, "momentum_buffer", elements, false, values);
                }
            }
            for factored in factored.iter().filter(|factored| factored.range == param.range()) {
                let (elements, part) = within(param, &kept.owned);
                if let (Some(factors), Some((rows, columns))) = (factors.as_mut(), factored.row_columns()) {
                    let values = factors.as_mut_slice();
                    show(param, "row_var", 0..rows.len(), true, &mut values[rows]);
                    show(param, "col_var", 0..columns.len(), true, &mut values[columns]);
                } else if !part.is_empty() {
                    show(param, "variance", elements, false, moments(slots, factored, part.len()));
                }
            }
        }
    }
}

/// The moments of the elements of a vector that are kept here; none for a matrix.
pub(crate) fn moments<'a>(slots: &'a mut [HostBuffer], factored: &Factored, numel: usize) -> &'a mut [f32] {
    match slots.first_mut() {
        Some(slot) if factored.factors() == 0 => {
            &mut slot.as_mut_slice()[factored.moments..factored.moments + numel]
        }
        _ => &mut [],
    }
}

fn statistic_name(optimizer: OptimizerConfig, slot: usize) -> &'static str {
    match (optimizer, slot) {
        (OptimizerConfig::Sgd { .. }, _) => "momentum_buffer",
        (_, 0) => "exp_avg",
        _ => "exp_avg_sq",
    }
}
