//! Adafactor: second moments of matrices from the mean squares of their rows and columns (Shazeer and Stern 2018).
//!
//! The formulas are those of `torch.optim.Adafactor`. Each rank sums over its part of a parameter, in double-double
//! arithmetic; the ranks exchange those sums, and all keep the same rows and columns. So no rank ever sees a whole
//! matrix, and the bits do not depend on how it is cut, by the argument of [`crate::norm`].

use std::ops::Range;

use shardwise_core::OptimizerKind;
use shardwise_core::layout::ParamInfo;

use super::{OptimizerConfig, ParamRule, StepUpdate};
use crate::norm::{DoubleDouble, Norm, power_sum, two_sum};

/// Elements of an update that are computed at a time.
const CHUNK: usize = 256;

/// Exact sums: the rounded ones, and their rounding errors.
pub(crate) struct Sums<'a> {
    pub(crate) high: &'a mut [f64],
    pub(crate) low: &'a mut [f64],
}

impl Sums<'_> {
    fn set(&mut self, at: usize, value: DoubleDouble) {
        (self.high[at], self.low[at]) = (value.high, value.low);
    }

    fn add(&mut self, at: usize, value: DoubleDouble) {
        self.set(at, self.at(at).plus(value));
    }

    fn at(&self, at: usize) -> DoubleDouble {
        DoubleDouble { high: self.high[at], low: self.low[at] }
    }

    /// The sums `range`.
    pub(crate) fn part(&mut self, range: Range<usize>) -> Sums<'_> {
        Sums { high: &mut self.high[range.clone()], low: &mut self.low[range] }
    }
}

/// A parameter that Adafactor updates.
#[derive(Debug)]
pub(crate) struct Factored {
    /// Its elements of the flat parameter.
    pub(crate) range: Range<usize>,
    rule: ParamRule,
    /// Rows and columns of one matrix; `None` for a vector.
    matrix: Option<[usize; 2]>,
    /// Where its rows' and then its columns' mean squares lie among all.
    factors: Range<usize>,
    /// How many of them are rows'.
    rows: usize,
    /// Where the moments of the elements that are updated here start; for a vector.
    pub(crate) moments: usize,
    now: Constants,
}

/// What a step's update of one parameter needs.
#[derive(Debug, Clone, Copy, Default)]
struct Constants {
    /// Of the new squares in the second moment.
    weight: f64,
    keep: f32,
    /// Learning rate times the parameter's root mean square.
    alpha: f64,
    step: f32,
}

impl Factored {
    /// For `param`, whose factors start at `factors` and whose moments start at `moments`.
    pub(crate) fn new(param: &ParamInfo, rule: ParamRule, factors: usize, moments: usize) -> Self {
        let [rows, columns] = OptimizerKind::Adafactor.factors(&param.shape);
        let matrix = match param.shape.as_slice() {
            [.., m, n] => Some([*m, *n]),
            _ => None,
        };
        Self {
            range: param.range(),
            rule,
            matrix,
            factors: factors..factors + rows + columns,
            rows,
            moments,
            now: Constants::default(),
        }
    }

    /// Mean squares that are kept for it.
    pub(crate) fn factors(&self) -> usize {
        self.factors.len()
    }

    /// Where the mean squares of its rows and of its columns lie among all; `None` for a vector.
    pub(crate) fn row_columns(&self) -> Option<(Range<usize>, Range<usize>)> {
        let middle = self.factors.start + self.rows;
        self.matrix.map(|_| (self.factors.start..middle, middle..self.factors.end))
    }

    /// Sums of a step's first exchange.
    pub(crate) fn sums(&self) -> usize {
        1 + self.factors.len()
    }

    /// Sums this rank's part: the parameter's squares, and the gradient's by row and by column. `params` and `gradient`
    /// are elements `piece` of the flat parameter.
    pub(crate) fn measure(
        &self,
        piece: &Range<usize>,
        params: &[f32],
        gradient: &[f32],
        clip: f32,
        mut sums: Sums<'_>,
    ) {
        sums.high.fill(0.0);
        sums.low.fill(0.0);
        sums.set(0, Norm::L2.measure(params));
        let Some(matrix) = self.matrix else { return };
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                let square = |g: f64| {
                    let clipped = f64::from(g as f32 * clip);
                    clipped * clipped
                };
                for row in self.runs(piece, matrix) {
                    let values = &gradient[row.part.clone()];
                    sums.add(1 + row.row, power_sum(values, square));
                    let columns = 1 + self.rows + row.column..1 + self.rows + row.column + values.len();
                    let (high, low) = (&mut sums.high[columns.clone()], &mut sums.low[columns]);
                    for ((high, low), g) in high.iter_mut().zip(low).zip(values) {
                        let (sum, error) = two_sum(*high, square(f64::from(*g)));
                        *high = sum;
                        *low += error;
                    }
                }
            },
        );
    }

    /// Takes the sums over all ranks in: the mean squares of all parameters are in `factors`. This is update `count`.
    pub(crate) fn take_sums(&mut self, sums: &Sums<'_>, factors: &mut [f32], lr: f64, count: u64) {
        let OptimizerConfig::Adafactor { beta2_decay, eps, weight_decay, .. } = self.rule.optimizer else {
            return;
        };
        let (step, lr) = (count as f64, self.rule.lr.rate(lr));
        let weight = step.powf(beta2_decay);
        let root_mean_square = (sums.at(0).value() / self.range.len() as f64).sqrt();
        let decay = if self.rule.decays { weight_decay } else { 0.0 };
        self.now = Constants {
            weight,
            keep: (1.0 - lr * decay) as f32,
            alpha: root_mean_square.max(eps[1]) * lr.min(1.0 / step.sqrt()),
            step: 0.0,
        };
        let Some([m, n]) = self.matrix else { return };
        for (index, kept) in factors[self.factors.clone()].iter_mut().enumerate() {
            let mean = sums.at(1 + index).value() / if index < self.rows { n as f64 } else { m as f64 };
            *kept = (f64::from(*kept) * (1.0 - weight) + mean * weight) as f32;
        }
    }

    /// The sum of squares of this rank's part of the update, before it is cut down.
    pub(crate) fn measure_update(
        &self,
        piece: &Range<usize>,
        gradient: &[f32],
        moments: &[f32],
        factors: &[f32],
        update: StepUpdate,
    ) -> DoubleDouble {
        let mut sum = DoubleDouble::default();
        self.directions(piece, gradient, (moments, factors), update.clip, |_, direction| {
            sum = sum.plus(Norm::L2.measure(direction));
        });
        sum
    }

    /// Takes the update's sum of squares over all ranks in.
    pub(crate) fn take_update(&mut self, squares: DoubleDouble) {
        let OptimizerConfig::Adafactor { clip_threshold, .. } = self.rule.optimizer else { return };
        let root_mean_square = (squares.value() / self.range.len() as f64).sqrt();
        self.now.step = (self.now.alpha / (root_mean_square / clip_threshold).max(1.0)) as f32;
    }

    /// Updates elements `piece` of the flat parameter.
    pub(crate) fn apply(
        &self,
        piece: &Range<usize>,
        params: &mut [f32],
        gradient: &[f32],
        (moments, factors): (&mut [f32], &[f32]),
        clip: f32,
    ) {
        let Constants { keep, step, .. } = self.now;
        self.directions(piece, gradient, (moments, factors), clip, |at, direction| {
            super::muon::descend(&mut params[at], direction, keep, step);
        });
        if self.matrix.is_none() {
            let weights = self.weights();
            for (v, g) in moments.iter_mut().zip(gradient) {
                *v = moment(*v, g * clip, weights);
            }
        }
    }

    fn weights(&self) -> [f32; 2] {
        [(1.0 - self.now.weight) as f32, self.now.weight as f32]
    }

    /// Computes the update of each element of `piece`, a chunk at a time: `see(where in the piece, updates)`.
    fn directions(
        &self,
        piece: &Range<usize>,
        gradient: &[f32],
        (moments, factors): (&[f32], &[f32]),
        clip: f32,
        mut see: impl FnMut(Range<usize>, &[f32]),
    ) {
        let OptimizerConfig::Adafactor { eps: [least_root, _], .. } = self.rule.optimizer else { return };
        let least = (least_root * least_root) as f32;
        let mut buffer = [0.0; CHUNK];
        let Some(matrix) = self.matrix else {
            let weights = self.weights();
            for start in (0..piece.len()).step_by(CHUNK) {
                let part = start..piece.len().min(start + CHUNK);
                let out = &mut buffer[..part.len()];
                for ((u, g), v) in out.iter_mut().zip(&gradient[part.clone()]).zip(&moments[part.clone()]) {
                    let g = g * clip;
                    *u = g / moment(*v, g, weights).max(least).sqrt();
                }
                see(part, out);
            }
            return;
        };
        let (rows, columns) = factors[self.factors.clone()].split_at(self.rows);
        let mut mean = (usize::MAX, 0.0);
        for run in self.runs(piece, matrix) {
            let which = run.row / matrix[0];
            if mean.0 != which {
                let own = &rows[which * matrix[0]..(which + 1) * matrix[0]];
                mean = (which, own.iter().map(|r| f64::from(*r)).sum::<f64>() / matrix[0] as f64);
            }
            let factor = (f64::from(rows[run.row]) / mean.1.max(least_root)) as f32;
            for start in (0..run.part.len()).step_by(CHUNK) {
                let length = CHUNK.min(run.part.len() - start);
                let part = run.part.start + start..run.part.start + start + length;
                let columns = &columns[run.column + start..run.column + start + length];
                let out = &mut buffer[..length];
                for ((u, g), c) in out.iter_mut().zip(&gradient[part.clone()]).zip(columns) {
                    *u = g * clip / (factor * c).max(least).sqrt();
                }
                see(part, out);
            }
        }
    }

    /// The parts of rows that make up `piece`.
    fn runs(&self, piece: &Range<usize>, [m, n]: [usize; 2]) -> impl Iterator<Item = Run> + use<> {
        let (first, last) = (piece.start - self.range.start, piece.end - self.range.start);
        let rows = if first < last { first / n..last.div_ceil(n) } else { 0..0 };
        rows.map(move |row| {
            let (start, end) = (first.max(row * n), last.min((row + 1) * n));
            Run { row, column: row / m * n + start % n, part: start - first..end - first }
        })
    }
}

/// A part of a row.
struct Run {
    /// Which of all rows.
    row: usize,
    /// The first of its columns, among all columns of all matrices.
    column: usize,
    /// Where it lies in the piece.
    part: Range<usize>,
}

fn moment(kept: f32, gradient: f32, [keep, take]: [f32; 2]) -> f32 {
    kept * keep + gradient * gradient * take
}
