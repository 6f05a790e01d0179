//! What travels in fewer bits than its type has, and over which links: ZeRO++'s quantised collectives and hierarchy.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::PlanError;
use crate::precision::Precision;

/// Elements that share one scale.
pub const QUANTISATION_BLOCK: usize = 256;

/// Signed integers that elements are rounded to, with a scale for each block of [`QUANTISATION_BLOCK`] elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantization {
    /// From -127 to 127, one byte each.
    Int8,
    /// From -7 to 7, two in a byte.
    Int4,
}

impl Quantization {
    /// The name used in configurations and reports.
    pub fn name(self) -> &'static str {
        match self {
            Quantization::Int8 => "int8",
            Quantization::Int4 => "int4",
        }
    }

    /// The largest code.
    pub fn levels(self) -> i8 {
        match self {
            Quantization::Int8 => 127,
            Quantization::Int4 => 7,
        }
    }

    /// Bytes of the codes of `numel` elements, without scales.
    pub fn code_bytes(self, numel: usize) -> usize {
        match self {
            Quantization::Int8 => numel,
            Quantization::Int4 => numel.div_ceil(2),
        }
    }

    /// Blocks of `numel` elements: each has a scale, the last may be shorter.
    pub fn blocks(numel: usize) -> usize {
        numel.div_ceil(QUANTISATION_BLOCK)
    }

    /// Bytes of `numel` quantised elements: the scales, then the codes, padded to whole f32 words.
    pub fn bytes(self, numel: usize) -> usize {
        Self::blocks(numel) * size_of::<f32>() + self.code_bytes(numel).next_multiple_of(size_of::<f32>())
    }
}

impl fmt::Display for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How the elements of a flat parameter travel to a computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Travel {
    /// The type that they are rounded to first.
    pub precision: Precision,
    /// What they are quantised to after that.
    pub quantised: Option<Quantization>,
}

impl Travel {
    /// As they are.
    pub const F32: Travel = Travel { precision: Precision::F32, quantised: None };

    /// Whether they arrive as they are.
    pub fn is_exact(self) -> bool {
        self == Self::F32
    }

    /// Bytes of `numel` elements on their way. A multiple of the bytes of one element, or of an f32 when quantised.
    pub fn bytes(self, numel: usize) -> usize {
        self.quantised.map_or(numel * self.precision.bytes(), |how| how.bytes(numel))
    }
}

/// How elements are rounded to codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rounding {
    /// To the nearest, ties to even.
    #[default]
    Nearest,
    /// Up or down by chance, so that the mean is the element: keyed by seed, step and the element's position.
    Stochastic,
}

/// LoCo: what quantisation has taken from a gradient is given to the next one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ErrorFeedback {
    /// The part of its moving average that the error keeps each time.
    pub beta: f64,
    /// Steps after which the error is forgotten.
    pub reset_steps: u64,
}

impl Default for ErrorFeedback {
    fn default() -> Self {
        Self { beta: 0.8, reset_steps: 1024 }
    }
}

/// What is quantised on its way, and the groups of ranks that it travels through.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct WireConfig {
    /// Parameters, on their way to a computation (qwZ). Masters are never quantised.
    pub weights: Option<Quantization>,
    /// Frozen parameters rest in int8, and travel so.
    pub frozen_weights: bool,
    /// Gradients, on their way to a sum (qgZ).
    pub gradients: Option<Quantization>,
    /// How.
    pub rounding: Rounding,
    /// Whether the errors of gradients are fed back.
    pub error_feedback: Option<ErrorFeedback>,
    /// Ranks, neighbours, whose links are fast: what comes from others enters their group once. `None`: all ranks.
    pub node_size: Option<usize>,
    /// Ranks, neighbours, that keep a second copy of the parameters partitioned among them, for the backward (hpZ); 1 is
    /// none. With more it is the size of a node.
    pub secondary_partition: Option<usize>,
}

impl WireConfig {
    /// The ranks of one node among `ranks`, if there are several nodes.
    ///
    /// # Errors
    /// When sizes do not divide the ranks or contradict each other.
    pub fn node(&self, ranks: usize) -> Result<Option<usize>, PlanError> {
        let secondary = self.secondary_partition.filter(|size| *size != 1);
        let named = [("node_size", self.node_size), ("secondary_partition_size", secondary)];
        for (key, size) in named.into_iter().filter_map(|(key, size)| Some((key, size?))) {
            if size == 0 || !ranks.is_multiple_of(size) {
                let fits = (1..=size.min(ranks)).rev().find(|d| ranks.is_multiple_of(*d)).unwrap_or(1);
                return Err(PlanError::Wire(format!(
                    "{key} = {size} does not divide the {ranks} ranks; use {fits}, or another number of ranks"
                )));
            }
        }
        if let (Some(node), Some(secondary)) = (self.node_size, secondary)
            && node != secondary
        {
            return Err(PlanError::Wire(format!(
                "secondary_partition_size = {secondary}, but node_size = {node}; the second copy is partitioned inside a node: \
                 make them equal, or leave node_size out"
            )));
        }
        Ok(self.node_size.or(secondary).filter(|size| *size < ranks))
    }

    /// Whether parameters rest in int8.
    pub fn rests_quantised(&self, trainable: bool) -> bool {
        self.frozen_weights && !trainable
    }

    /// How parameters travel that are rounded to `precision` for the computation. Those that rest in int8 travel so.
    pub fn travel(&self, precision: Precision, trainable: bool) -> Travel {
        if self.rests_quantised(trainable) {
            return Travel { precision: Precision::F32, quantised: Some(Quantization::Int8) };
        }
        Travel { precision, quantised: self.weights }
    }

    /// Whether a second copy of the parameters is kept.
    pub fn keeps_secondary(&self) -> bool {
        self.secondary_partition.is_some_and(|size| size > 1)
    }

    /// Refuses what cannot work.
    ///
    /// # Errors
    /// Naming the setting.
    pub fn check(&self) -> Result<(), PlanError> {
        if let Some(ErrorFeedback { beta, reset_steps }) = self.error_feedback {
            if self.gradients.is_none() {
                return Err(PlanError::Wire(
                    "error_feedback is set, but gradients are not quantised, so there is no error to feed back; set \
                     quantized_gradients, or leave error_feedback out"
                        .into(),
                ));
            }
            if !(0.0..1.0).contains(&beta) {
                return Err(PlanError::Wire(format!(
                    "err_beta is {beta}; it must be at least 0 and below 1"
                )));
            }
            if reset_steps == 0 {
                return Err(PlanError::Wire("err_reset_steps is 0; it must be at least 1".into()));
            }
        }
        if self.rounding == Rounding::Stochastic && self.weights.is_none() && self.gradients.is_none() {
            return Err(PlanError::Wire(
                "quantization_rounding is \"stochastic\", but nothing is quantised; set quantized_weights or quantized_gradients".into(),
            ));
        }
        Ok(())
    }
}
