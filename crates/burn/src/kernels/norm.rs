//! Normalisation of rows: layer norm and root-mean-square norm, and their gradients.

use super::{simd, sum, sum2};

/// What the backward pass needs of one row: `(x - mean) / deviation` is the normalised row.
#[derive(Clone, Copy, Debug)]
pub struct RowStats {
    /// The row's mean; 0 for a root-mean-square norm.
    pub mean: f32,
    /// `1 / sqrt(var + eps)`, or `1 / sqrt(mean square + eps)`.
    pub inverse: f32,
}

/// Whether rows are centred before they are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// Layer normalisation (Ba et al., arXiv:1607.06450), with the biased variance.
    Layer,
    /// Root-mean-square normalisation (Zhang and Sennrich, arXiv:1910.07467).
    RootMeanSquare,
}

/// Normalises the rows of `x` (as wide as `gamma`), multiplies by `gamma` and adds `beta`.
pub fn forward(
    norm: Norm,
    x: &[f32],
    gamma: &[f32],
    beta: Option<&[f32]>,
    eps: f32,
) -> (Vec<f32>, Vec<RowStats>) {
    let width = gamma.len();
    let mut y = Vec::with_capacity(x.len());
    let mut stats = Vec::with_capacity(x.len() / width.max(1));
    let mut row = vec![0.0; width];
    simd(
        #[inline(always)]
        || {
            for x in x.chunks_exact(width.max(1)) {
                let s = row_stats(norm, x, eps);
                match beta {
                    Some(beta) => {
                        for (((y, &x), &g), &b) in row.iter_mut().zip(x).zip(gamma).zip(beta) {
                            *y = ((x - s.mean) * s.inverse).mul_add(g, b);
                        }
                    }
                    None => {
                        for ((y, &x), &g) in row.iter_mut().zip(x).zip(gamma) {
                            *y = (x - s.mean) * s.inverse * g;
                        }
                    }
                }
                y.extend_from_slice(&row);
                stats.push(s);
            }
        },
    );
    (y, stats)
}

#[inline(always)]
fn row_stats(norm: Norm, x: &[f32], eps: f32) -> RowStats {
    let count = x.len() as f32;
    let mean = match norm {
        Norm::Layer => sum(x, |x| x) / count,
        Norm::RootMeanSquare => 0.0,
    };
    let square = sum(
        x,
        #[inline(always)]
        |x| (x - mean) * (x - mean),
    );
    RowStats { mean, inverse: 1.0 / (square / count + eps).sqrt() }
}

/// The saved values of one [`forward`].
#[derive(Clone, Copy, Debug)]
pub struct Saved<'a> {
    /// Which norm it was.
    pub norm: Norm,
    /// The input.
    pub x: &'a [f32],
    /// The scale.
    pub gamma: &'a [f32],
    /// Statistics of each row.
    pub stats: &'a [RowStats],
}

/// Turns `dy` into the gradient of `x`, and writes the gradients of `gamma` and (where there is one) `beta`, summed in
/// row order, over `d_gamma` and `d_beta`.
pub fn backward(saved: Saved<'_>, dy: &mut [f32], d_gamma: &mut [f32], mut d_beta: Option<&mut [f32]>) {
    let Saved { norm, x, gamma, stats } = saved;
    let width = gamma.len().max(1);
    d_gamma.fill(0.0);
    if let Some(d_beta) = &mut d_beta {
        d_beta.fill(0.0);
    }
    simd(
        #[inline(always)]
        || {
            for ((dy, x), &s) in dy.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(stats) {
                for ((d_gamma, &dy), &x) in d_gamma.iter_mut().zip(dy.iter()).zip(x) {
                    *d_gamma = ((x - s.mean) * s.inverse).mul_add(dy, *d_gamma);
                }
                if let Some(d_beta) = &mut d_beta {
                    for (d_beta, &dy) in d_beta.iter_mut().zip(dy.iter()) {
                        *d_beta += dy;
                    }
                }
                input_gradient(norm, dy, x, gamma, s);
            }
        },
    );
}

/// `dx = inverse (g - mean(g) - n mean(g n))` with `g = dy gamma` and `n` the normalised row; without `mean(g)` where
/// rows are not centred.
#[inline(always)]
fn input_gradient(norm: Norm, dy: &mut [f32], x: &[f32], gamma: &[f32], s: RowStats) {
    let count = dy.len() as f32;
    for (dy, &g) in dy.iter_mut().zip(gamma) {
        *dy *= g;
    }
    let mean = match norm {
        Norm::Layer => sum(dy, |g| g) / count,
        Norm::RootMeanSquare => 0.0,
    };
    let slope = sum2(
        dy,
        x,
        #[inline(always)]
        |g, x| g * ((x - s.mean) * s.inverse),
    ) / count;
    for (dy, &x) in dy.iter_mut().zip(x) {
        let normalised = (x - s.mean) * s.inverse;
        *dy = normalised.mul_add(-slope, *dy - mean) * s.inverse;
    }
}
