//! Optimizers over flat f32 shards, element by element.
//!
//! Every element is updated by the same operations in the same order wherever it lies, so the result does not depend on
//! how the flat parameter is cut. The formulas are PyTorch's (`torch.optim.AdamW`, `torch.optim.SGD`).

use shardwise_core::{OptimizerKind, ParamInfo};

/// Which parameters decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DecayRule {
    /// Those with two dimensions or more: matrices and embeddings, but not biases and norms.
    #[default]
    MatricesOnly,
    /// All.
    All,
}

impl DecayRule {
    /// Whether `param` decays.
    pub fn applies(self, param: &ParamInfo) -> bool {
        match self {
            DecayRule::MatricesOnly => param.shape.len() >= 2,
            DecayRule::All => true,
        }
    }
}

/// The optimizer and its constants; the learning rate comes with each step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OptimizerConfig {
    /// Adam with decoupled weight decay (Loshchilov and Hutter 2019).
    AdamW {
        /// Decay rates of the two moments.
        betas: [f64; 2],
        /// Added to the root of the second moment.
        eps: f64,
        /// Decay per unit of learning rate.
        weight_decay: f64,
    },
    /// Stochastic gradient descent; the decay is added to the gradient.
    Sgd {
        /// 0 keeps no buffer.
        momentum: f64,
        /// Multiple of the parameter that is added to its gradient.
        weight_decay: f64,
    },
}

impl OptimizerConfig {
    /// Which statistics are kept.
    pub fn kind(&self) -> OptimizerKind {
        match self {
            OptimizerConfig::AdamW { .. } => OptimizerKind::AdamW,
            OptimizerConfig::Sgd { momentum, .. } if *momentum != 0.0 => OptimizerKind::SgdMomentum,
            OptimizerConfig::Sgd { .. } => OptimizerKind::Sgd,
        }
    }
}

/// What all elements of one update share.
#[derive(Debug, Clone, Copy)]
pub struct Update {
    /// The optimizer.
    pub config: OptimizerConfig,
    /// The learning rate.
    pub lr: f64,
    /// How often these parameters have been updated, this time included.
    pub count: u64,
    /// The gradient is multiplied by this first.
    pub clip: f32,
    /// Whether these parameters decay.
    pub decay: bool,
}

impl Update {
    /// Updates `params` from `gradient` and the statistics, all equally long.
    ///
    /// # Panics
    /// When lengths differ, or `states` is not as many as the optimizer keeps.
    pub fn apply(&self, params: &mut [f32], gradient: &[f32], states: &mut [&mut [f32]]) {
        match (self.config, states) {
            (OptimizerConfig::AdamW { betas, eps, weight_decay }, [m, v]) => {
                AdamW::new(self, betas, eps, weight_decay).apply(params, gradient, m, v);
            }
            (OptimizerConfig::Sgd { momentum, weight_decay }, [buffer]) if momentum != 0.0 => {
                let sgd = self.sgd(momentum, weight_decay);
                pulp::Arch::new().dispatch(
                    #[inline(always)]
                    || sgd.apply_with_momentum(params, gradient, buffer),
                );
            }
            (OptimizerConfig::Sgd { momentum: 0.0, weight_decay }, []) => {
                let sgd = self.sgd(0.0, weight_decay);
                pulp::Arch::new().dispatch(
                    #[inline(always)]
                    || sgd.apply(params, gradient),
                );
            }
            (config, states) => panic!("{config:?} does not keep {} statistics", states.len()),
        }
    }

    fn sgd(&self, momentum: f64, weight_decay: f64) -> Sgd {
        let decay = if self.decay { weight_decay as f32 } else { 0.0 };
        Sgd { clip: self.clip, decay, momentum: momentum as f32, lr: self.lr as f32 }
    }
}

/// AdamW's constants of one update, in f32.
struct AdamW {
    clip: f32,
    keep: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    root_correction: f32,
    eps: f32,
    step: f32,
}

impl AdamW {
    fn new(update: &Update, betas: [f64; 2], eps: f64, weight_decay: f64) -> Self {
        let power = |beta: f64| 1.0 - beta.powi(i32::try_from(update.count).unwrap_or(i32::MAX));
        let decay = if update.decay { weight_decay } else { 0.0 };
        Self {
            clip: update.clip,
            keep: (1.0 - update.lr * decay) as f32,
            beta1: betas[0] as f32,
            rest1: (1.0 - betas[0]) as f32,
            beta2: betas[1] as f32,
            rest2: (1.0 - betas[1]) as f32,
            root_correction: power(betas[1]).sqrt() as f32,
            eps: eps as f32,
            step: (update.lr / power(betas[0])) as f32,
        }
    }

    fn apply(&self, params: &mut [f32], gradient: &[f32], m: &mut [f32], v: &mut [f32]) {
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                let n = params.len();
                let (gradient, m, v) = (&gradient[..n], &mut m[..n], &mut v[..n]);
                for i in 0..n {
                    let g = gradient[i] * self.clip;
                    m[i] = m[i] * self.beta1 + g * self.rest1;
                    v[i] = v[i] * self.beta2 + g * g * self.rest2;
                    let root = v[i].sqrt() / self.root_correction + self.eps;
                    params[i] = params[i] * self.keep - self.step * (m[i] / root);
                }
            },
        );
    }
}

/// SGD's constants of one update, in f32.
struct Sgd {
    clip: f32,
    decay: f32,
    momentum: f32,
    lr: f32,
}

impl Sgd {
    #[inline(always)]
    fn apply(&self, params: &mut [f32], gradient: &[f32]) {
        for (p, g) in params.iter_mut().zip(gradient) {
            *p -= self.lr * (g * self.clip + self.decay * *p);
        }
    }

    #[inline(always)]
    fn apply_with_momentum(&self, params: &mut [f32], gradient: &[f32], buffer: &mut [f32]) {
        for ((p, g), b) in params.iter_mut().zip(gradient).zip(buffer) {
            *b = *b * self.momentum + (g * self.clip + self.decay * *p);
            *p -= self.lr * *b;
        }
    }
}
