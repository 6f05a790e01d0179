//! Optimizers over flat f32 shards.
//!
//! Most update each element by itself ([`elementwise`]): the same operations in the same order wherever the element lies,
//! so that the result does not depend on how the flat parameter is cut. Two look at a parameter as a whole: Adafactor
//! (`adafactor`) exchanges exact sums over its rows and columns, and Muon (`muon`) lets one rank compute each matrix.
//! Formulas are PyTorch's where PyTorch has the optimizer, otherwise the paper's.

pub(crate) mod adafactor;
pub mod elementwise;
pub mod groups;
pub(crate) mod muon;
pub(crate) mod product;
pub(crate) mod state;

use shardwise_core::{OptimizerKind, ParamInfo};

pub use elementwise::Update;
pub use groups::{GroupLr, GroupRule, ParamGroups, ParamRule};
pub use muon::MuonScale;
pub use state::StateSlice;

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
    /// Adam with decoupled weight decay (Loshchilov and Hutter 2019; `torch.optim.AdamW`).
    AdamW {
        /// Decay rates of the two moments.
        betas: [f64; 2],
        /// Added to the root of the second moment.
        eps: f64,
        /// Decay per unit of learning rate.
        weight_decay: f64,
    },
    /// Adam (Kingma and Ba 2015; `torch.optim.Adam`); the decay is added to the gradient.
    Adam {
        /// Decay rates of the two moments.
        betas: [f64; 2],
        /// Added to the root of the second moment.
        eps: f64,
        /// Multiple of the parameter that is added to its gradient.
        weight_decay: f64,
    },
    /// Stochastic gradient descent (`torch.optim.SGD`); the decay is added to the gradient.
    Sgd {
        /// 0 keeps no buffer.
        momentum: f64,
        /// Whether the step looks ahead along the momentum (Nesterov; Sutskever et al. 2013). Needs a momentum.
        nesterov: bool,
        /// Multiple of the parameter that is added to its gradient.
        weight_decay: f64,
    },
    /// The sign of an interpolated momentum (Chen et al. 2023, "Symbolic discovery of optimization algorithms",
    /// algorithm 2); decoupled decay.
    Lion {
        /// The momentum's weight in the update, and its decay rate.
        betas: [f64; 2],
        /// Decay per unit of learning rate.
        weight_decay: f64,
    },
    /// Second moments from their sums over rows and columns (Shazeer and Stern 2018; `torch.optim.Adafactor`). The
    /// learning rate is the largest relative step.
    Adafactor {
        /// The second moment of step `t` has weight `t ^ beta2_decay`; not above 0.
        beta2_decay: f64,
        /// The least root of a second moment, and the least root mean square of a parameter that its step is scaled by.
        eps: [f64; 2],
        /// The root mean square that an update is cut down to; at least 1.
        clip_threshold: f64,
        /// Decay per unit of learning rate.
        weight_decay: f64,
    },
    /// Orthogonalised momentum for the hidden matrices (Jordan et al. 2024; `torch.optim.Muon`), [`AdamW`] with the same
    /// learning rate and decay for all else: see [`OptimizerConfig::for_param`]. Parameter groups choose otherwise.
    ///
    /// [`AdamW`]: OptimizerConfig::AdamW
    Muon {
        /// The momentum's decay rate.
        momentum: f64,
        /// Whether the step looks ahead along the momentum.
        nesterov: bool,
        /// Steps of the Newton-Schulz iteration; below 100.
        steps: usize,
        /// How the learning rate follows a matrix's shape.
        scale: MuonScale,
        /// Decay per unit of learning rate.
        weight_decay: f64,
        /// Of AdamW.
        betas: [f64; 2],
        /// Of AdamW.
        eps: f64,
    },
}

impl OptimizerConfig {
    /// AdamW with PyTorch's constants.
    pub const ADAMW: Self = Self::AdamW { betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.01 };
    /// Lion with its paper's constants.
    pub const LION: Self = Self::Lion { betas: [0.9, 0.99], weight_decay: 0.0 };
    /// Adafactor with PyTorch's constants.
    pub const ADAFACTOR: Self = Self::Adafactor {
        beta2_decay: -0.8,
        eps: [f32::EPSILON as f64, 1e-3],
        clip_threshold: 1.0,
        weight_decay: 0.0,
    };
    /// Muon with PyTorch's constants, but for the scale: that of Liu et al. 2025, with which the learning rate and the
    /// decay of AdamW serve for all parameters.
    pub const MUON: Self = Self::Muon {
        momentum: 0.95,
        nesterov: true,
        steps: 5,
        scale: MuonScale::MatchAdamW,
        weight_decay: 0.1,
        betas: [0.9, 0.95],
        eps: 1e-8,
    };

    /// Which statistics are kept.
    pub fn kind(&self) -> OptimizerKind {
        match self {
            OptimizerConfig::AdamW { .. } => OptimizerKind::AdamW,
            OptimizerConfig::Adam { .. } => OptimizerKind::Adam,
            OptimizerConfig::Sgd { momentum, .. } if *momentum != 0.0 => OptimizerKind::SgdMomentum,
            OptimizerConfig::Sgd { .. } => OptimizerKind::Sgd,
            OptimizerConfig::Lion { .. } => OptimizerKind::Lion,
            OptimizerConfig::Adafactor { .. } => OptimizerKind::Adafactor,
            OptimizerConfig::Muon { .. } => OptimizerKind::Muon,
        }
    }

    /// The optimizer of one parameter: AdamW where Muon is configured and `param` is not one of the hidden matrices. Those
    /// are the parameters of exactly two dimensions whose path tells neither an embedding nor an output head: no part of
    /// it contains `embed`, and none is `wte`, `wpe`, `head` or `lm_head`.
    #[must_use]
    pub fn for_param(self, param: &ParamInfo) -> Self {
        match self {
            OptimizerConfig::Muon { weight_decay, betas, eps, .. } if !muon::is_hidden_matrix(param) => {
                OptimizerConfig::AdamW { betas, eps, weight_decay }
            }
            other => other,
        }
    }

    /// The same optimizer with another decay.
    #[must_use]
    pub fn with_weight_decay(mut self, decay: f64) -> Self {
        match &mut self {
            OptimizerConfig::AdamW { weight_decay, .. }
            | OptimizerConfig::Adam { weight_decay, .. }
            | OptimizerConfig::Sgd { weight_decay, .. }
            | OptimizerConfig::Lion { weight_decay, .. }
            | OptimizerConfig::Adafactor { weight_decay, .. }
            | OptimizerConfig::Muon { weight_decay, .. } => *weight_decay = decay,
        }
        self
    }

    /// Says what is wrong with the constants, if anything is.
    ///
    /// # Errors
    /// A sentence that names the constant, its value and what it must be.
    pub fn check(&self) -> Result<(), String> {
        let decay_rates = |name: &str, rates: &[f64]| match rates.iter().find(|r| !(0.0..1.0).contains(*r)) {
            Some(rate) => Err(format!("{name} holds {rate}; it must be at least 0 and below 1")),
            None => Ok(()),
        };
        let non_negative = |name: &str, value: f64| {
            if value >= 0.0 && value.is_finite() {
                Ok(())
            } else {
                Err(format!("{name} is {value}; it must be a number of at least 0"))
            }
        };
        match *self {
            OptimizerConfig::AdamW { betas, eps, weight_decay }
            | OptimizerConfig::Adam { betas, eps, weight_decay } => {
                decay_rates("betas", &betas)?;
                non_negative("eps", eps)?;
                non_negative("weight_decay", weight_decay)
            }
            OptimizerConfig::Sgd { momentum, nesterov, weight_decay } => {
                if nesterov && momentum == 0.0 {
                    return Err("nesterov is set, but momentum is 0; it looks ahead along a momentum".into());
                }
                non_negative("momentum", momentum)?;
                non_negative("weight_decay", weight_decay)
            }
            OptimizerConfig::Lion { betas, weight_decay } => {
                decay_rates("betas", &betas)?;
                non_negative("weight_decay", weight_decay)
            }
            OptimizerConfig::Adafactor { beta2_decay, eps, clip_threshold, weight_decay } => {
                if beta2_decay > 0.0 || !beta2_decay.is_finite() {
                    return Err(format!("beta2_decay is {beta2_decay}; it must be a number of at most 0"));
                }
                if clip_threshold < 1.0 || !clip_threshold.is_finite() {
                    return Err(format!("clip_threshold is {clip_threshold}; it must be at least 1"));
                }
                eps.into_iter().try_for_each(|eps| non_negative("eps", eps))?;
                non_negative("weight_decay", weight_decay)
            }
            OptimizerConfig::Muon { momentum, steps, weight_decay, betas, eps, .. } => {
                if !(1..100).contains(&steps) {
                    return Err(format!("steps is {steps}; it must be at least 1 and below 100"));
                }
                decay_rates("momentum", &[momentum])?;
                decay_rates("betas", &betas)?;
                non_negative("eps", eps)?;
                non_negative("weight_decay", weight_decay)
            }
        }
    }
}

/// What all parameters of one update share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepUpdate {
    /// The step's learning rate.
    pub(crate) lr: f64,
    /// The gradient is multiplied by this first.
    pub(crate) clip: f32,
}
