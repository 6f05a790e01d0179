//! Muon: the momentum of a matrix, made nearly orthogonal (Jordan et al. 2024, <https://kellerjordan.github.io/posts/muon>).
//!
//! The formulas are those of `torch.optim.Muon`, in f32 throughout (PyTorch rounds the iteration to bf16). Momentum is
//! kept with the gradient's shard and advances once a step. A whole matrix is seen by one rank only, for as long as it
//! computes.

use shardwise_core::ParamInfo;
use shardwise_core::statistics::PRODUCT_COLUMNS;

use super::product::{Right, Sizes, multiply, transpose};

/// Coefficients of the iteration, from the reference implementation.
const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];
/// The least norm that a matrix is divided by.
const LEAST_NORM: f32 = 1e-7;

/// How the learning rate follows a matrix's shape `[A, B]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MuonScale {
    /// `sqrt(max(1, A / B))`, of the reference implementation, for weights stored `[out, in]`.
    Original,
    /// `0.2 sqrt(max(A, B))`: the update is as large as AdamW's (Liu et al. 2025), whichever way the weight is stored.
    #[default]
    MatchAdamW,
}

impl MuonScale {
    /// The factor for a matrix of `rows` and `columns`.
    pub fn factor(self, rows: usize, columns: usize) -> f64 {
        let (a, b) = (rows as f64, columns as f64);
        match self {
            MuonScale::Original => (a / b).max(1.0).sqrt(),
            MuonScale::MatchAdamW => 0.2 * a.max(b).sqrt(),
        }
    }
}

/// Whether Muon takes `param` without being told by a group: [`super::OptimizerConfig::for_param`].
pub(crate) fn is_hidden_matrix(param: &ParamInfo) -> bool {
    let outer = |part: &str| {
        part.contains("embed") || ["wte", "wpe", "head", "lm_head"].contains(&part.to_lowercase().as_str())
    };
    param.shape.len() == 2 && !param.path.split('.').any(outer)
}

/// Advances the momentum by the gradient, and leaves the direction to orthogonalise in the gradient's place.
pub(crate) fn advance(gradient: &mut [f32], momentum: &mut [f32], clip: f32, decay: f64, nesterov: bool) {
    let (keep, rest) = (decay as f32, (1.0 - decay) as f32);
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || {
            for (g, b) in gradient.iter_mut().zip(momentum) {
                let clipped = *g * clip;
                *b = *b * keep + clipped * rest;
                *g = if nesterov { clipped * rest + *b * keep } else { *b };
            }
        },
    );
}

/// Moves `params` against `direction`.
pub(crate) fn descend(params: &mut [f32], direction: &[f32], keep: f32, step: f32) {
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || {
            for (p, o) in params.iter_mut().zip(direction) {
                *p = *p * keep - step * o;
            }
        },
    );
}

/// Where a matrix is made orthogonal.
pub(crate) struct Workplace<'a> {
    /// Holds the matrix at first, and the result at last; row-major.
    pub(crate) matrix: &'a mut [f32],
    /// Elements for [`shardwise_core::ScratchSize`]'s private part.
    pub(crate) scratch: &'a mut [f32],
}

impl Workplace<'_> {
    /// Replaces the matrix of `rows` and `columns` by its orthogonalisation: `steps` steps of the quintic Newton-Schulz
    /// iteration `X <- a X + (b G + c G G) X`, `G = X X^T`, on the matrix divided by its norm. It works on the
    /// orientation with fewer rows.
    pub(crate) fn orthogonalise(self, rows: usize, columns: usize, steps: usize) {
        let (short, long) = (rows.min(columns), rows.max(columns));
        let numel = rows * columns;
        let first = &mut self.matrix[..numel];
        let (second, rest) = self.scratch.split_at_mut(numel);
        let (gram, rest) = rest.split_at_mut(short * short);
        let (polynomial, rest) = rest.split_at_mut(short * short);
        let panel = &mut rest[..long * PRODUCT_COLUMNS];
        let flipped = rows > columns;
        if flipped {
            second.copy_from_slice(first);
            transpose(first, second, rows, columns);
        }
        divide_by_norm(first);
        let (mut from, mut to) = (first, second);
        let [a, b, c] = COEFFICIENTS;
        for _ in 0..steps {
            let square = Sizes { rows: short, inner: long, columns: short };
            multiply(gram, from, Right::Transposed(from), square, (1.0, None), panel);
            let cube = Sizes { rows: short, inner: short, columns: short };
            multiply(polynomial, gram, Right::Plain(gram), cube, (c, Some((b, gram))), panel);
            let last = Sizes { rows: short, inner: short, columns: long };
            multiply(to, polynomial, Right::Plain(from), last, (1.0, Some((a, from))), panel);
            std::mem::swap(&mut from, &mut to);
        }
        // `from` holds the result; after an odd number of steps that is the scratch.
        match (steps % 2 == 1, flipped) {
            (true, true) => transpose(to, from, short, long),
            (true, false) => to.copy_from_slice(from),
            (false, true) => {
                to.copy_from_slice(from);
                transpose(from, to, short, long);
            }
            (false, false) => {}
        }
    }
}

fn divide_by_norm(matrix: &mut [f32]) {
    let squares = crate::norm::Norm::L2.measure(matrix).value();
    let norm = (squares.sqrt() as f32).max(LEAST_NORM);
    matrix.iter_mut().for_each(|x| *x /= norm);
}
