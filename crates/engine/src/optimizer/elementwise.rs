//! Optimizers that update each element by itself.

use super::OptimizerConfig;

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
    /// When lengths differ, `states` is not as many as the optimizer keeps, or it is one that needs whole parameters.
    pub fn apply(&self, params: &mut [f32], gradient: &[f32], states: &mut [&mut [f32]]) {
        match (self.config, states) {
            (OptimizerConfig::AdamW { betas, eps, weight_decay }, [m, v]) => {
                Adam::new(self, betas, eps, weight_decay).apply(params, gradient, m, v);
            }
            (OptimizerConfig::Adam { betas, eps, weight_decay }, [m, v]) => {
                let decay = self.decay_of(weight_decay) as f32;
                Adam::new(self, betas, eps, 0.0).apply_coupled(params, gradient, (m, v), decay);
            }
            (OptimizerConfig::Sgd { momentum, nesterov, weight_decay }, [buffer]) if momentum != 0.0 => {
                let sgd = self.sgd(momentum, weight_decay);
                pulp::Arch::new().dispatch(
                    #[inline(always)]
                    || match nesterov {
                        true => sgd.apply_nesterov(params, gradient, buffer),
                        false => sgd.apply_with_momentum(params, gradient, buffer),
                    },
                );
            }
            (OptimizerConfig::Sgd { momentum: 0.0, weight_decay, .. }, []) => {
                let sgd = self.sgd(0.0, weight_decay);
                pulp::Arch::new().dispatch(
                    #[inline(always)]
                    || sgd.apply(params, gradient),
                );
            }
            (OptimizerConfig::Lion { betas, weight_decay }, [m]) => {
                Lion::new(self, betas, weight_decay).apply(params, gradient, m);
            }
            (config, states) => {
                panic!("{config:?} does not update elements with {} statistics", states.len())
            }
        }
    }

    fn decay_of(&self, weight_decay: f64) -> f64 {
        if self.decay { weight_decay } else { 0.0 }
    }

    fn sgd(&self, momentum: f64, weight_decay: f64) -> Sgd {
        let decay = self.decay_of(weight_decay) as f32;
        Sgd { clip: self.clip, decay, momentum: momentum as f32, lr: self.lr as f32 }
    }
}

/// The constants of one update by AdamW or Adam, in f32.
struct Adam {
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

impl Adam {
    fn new(update: &Update, betas: [f64; 2], eps: f64, weight_decay: f64) -> Self {
        let power = |beta: f64| 1.0 - beta.powi(i32::try_from(update.count).unwrap_or(i32::MAX));
        Self {
            clip: update.clip,
            keep: (1.0 - update.lr * update.decay_of(weight_decay)) as f32,
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

    /// With `decay` times the parameter added to its gradient.
    fn apply_coupled(
        &self,
        params: &mut [f32],
        gradient: &[f32],
        (m, v): (&mut [f32], &mut [f32]),
        decay: f32,
    ) {
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                let n = params.len();
                let (gradient, m, v) = (&gradient[..n], &mut m[..n], &mut v[..n]);
                for i in 0..n {
                    let g = gradient[i] * self.clip + decay * params[i];
                    m[i] = m[i] * self.beta1 + g * self.rest1;
                    v[i] = v[i] * self.beta2 + g * g * self.rest2;
                    let root = v[i].sqrt() / self.root_correction + self.eps;
                    params[i] -= self.step * (m[i] / root);
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

    #[inline(always)]
    fn apply_nesterov(&self, params: &mut [f32], gradient: &[f32], buffer: &mut [f32]) {
        for ((p, g), b) in params.iter_mut().zip(gradient).zip(buffer) {
            let g = g * self.clip + self.decay * *p;
            *b = *b * self.momentum + g;
            *p -= self.lr * (g + self.momentum * *b);
        }
    }
}

/// Lion's constants of one update, in f32.
struct Lion {
    clip: f32,
    keep: f32,
    lr: f32,
    /// By what the momentum and the gradient are multiplied for the update, and for the next momentum.
    weights: [[f32; 2]; 2],
}

impl Lion {
    fn new(update: &Update, betas: [f64; 2], weight_decay: f64) -> Self {
        Self {
            clip: update.clip,
            keep: (1.0 - update.lr * update.decay_of(weight_decay)) as f32,
            lr: update.lr as f32,
            weights: betas.map(|beta| [beta as f32, (1.0 - beta) as f32]),
        }
    }

    fn apply(&self, params: &mut [f32], gradient: &[f32], m: &mut [f32]) {
        let [[b1, rest1], [b2, rest2]] = self.weights;
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                for ((p, g), m) in params.iter_mut().zip(gradient).zip(m) {
                    let g = g * self.clip;
                    let direction = *m * b1 + g * rest1;
                    // The sign of zero is zero.
                    let step = if direction == 0.0 { 0.0 } else { self.lr.copysign(direction) };
                    *p = *p * self.keep - step;
                    *m = *m * b2 + g * rest2;
                }
            },
        );
    }
}
