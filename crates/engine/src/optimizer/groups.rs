//! Parameter groups: which update rule each parameter has, chosen by its path and shape when an engine is built.

use std::fmt;
use std::sync::Arc;

use shardwise_core::{FlatLayout, MemoryPlan, OptimizerPlan, ParamInfo, PlanInput, StepSchedule, UnitSize};

use super::OptimizerConfig;
use crate::Result;
use crate::config::{Accumulation, EngineConfig};
use crate::error::EngineError;
use crate::swap::layout::placements;

/// A group's learning rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GroupLr {
    /// A multiple of the step's.
    Times(f64),
    /// This one at every step.
    Fixed(f64),
}

impl Default for GroupLr {
    fn default() -> Self {
        GroupLr::Times(1.0)
    }
}

impl GroupLr {
    /// The rate in a step with `lr`.
    pub fn rate(self, lr: f64) -> f64 {
        match self {
            GroupLr::Times(factor) => factor * lr,
            GroupLr::Fixed(rate) => rate,
        }
    }
}

/// What the parameters of a group have of their own.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct GroupRule {
    /// The learning rate.
    pub lr: GroupLr,
    /// The weight decay of all of them, whatever their shapes; `None` leaves it to the engine's configuration.
    pub weight_decay: Option<f64>,
    /// The optimizer; `None` is the engine's. Muon, where it is named here, takes every matrix of the group, embeddings
    /// too.
    pub optimizer: Option<OptimizerConfig>,
}

/// How one parameter is updated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ParamRule {
    /// The optimizer.
    pub optimizer: OptimizerConfig,
    /// The learning rate.
    pub lr: GroupLr,
    /// Whether it decays.
    pub decays: bool,
}

type Chooses = Arc<dyn Fn(&str, &[usize]) -> bool + Send + Sync>;

#[derive(Clone)]
struct Group {
    name: String,
    chooses: Chooses,
    rule: GroupRule,
}

/// Groups of parameters, in order: the first that chooses a parameter has it. What none chooses follows the engine's
/// configuration. A group may be empty.
#[derive(Clone, Default)]
pub struct ParamGroups {
    groups: Vec<Group>,
}

impl fmt::Debug for ParamGroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.groups.iter().map(|g| (&g.name, &g.rule))).finish()
    }
}

impl ParamGroups {
    /// No groups.
    pub const fn new() -> Self {
        Self { groups: Vec::new() }
    }

    /// Adds a group of the parameters for which `chooses(path, shape)`; `name` is for messages.
    #[must_use]
    pub fn with(
        mut self,
        name: impl Into<String>,
        chooses: impl Fn(&str, &[usize]) -> bool + Send + Sync + 'static,
        rule: GroupRule,
    ) -> Self {
        self.groups.push(Group { name: name.into(), chooses: Arc::new(chooses), rule });
        self
    }

    /// Adds a group of the parameters whose whole path matches `pattern`, in which `*` stands for any text.
    #[must_use]
    pub fn with_pattern(self, pattern: &str, rule: GroupRule) -> Self {
        let parts = pattern.to_string();
        self.with(pattern, move |path, _| matches(&parts, path), rule)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// The rule of one parameter.
    ///
    /// # Errors
    /// When its optimizer has impossible constants, or is Muon for what is no matrix.
    pub fn rule(&self, config: &EngineConfig, param: &ParamInfo) -> Result<ParamRule> {
        let group = self.groups.iter().find(|group| (group.chooses)(&param.path, &param.shape));
        let rule = group.map(|group| group.rule).unwrap_or_default();
        let named = |message: String| {
            let whose = group.map_or("the optimizer".into(), |g| format!("parameter group `{}`", g.name));
            EngineError::Usage(format!("{whose}: {message}"))
        };
        let mut optimizer = rule.optimizer.unwrap_or_else(|| config.optimizer.for_param(param));
        if let Some(decay) = rule.weight_decay {
            optimizer = optimizer.with_weight_decay(decay);
        }
        optimizer.check().map_err(named)?;
        let factor = match rule.lr {
            GroupLr::Times(factor) => factor,
            GroupLr::Fixed(rate) => rate,
        };
        if !(factor >= 0.0 && factor.is_finite()) {
            return Err(named(format!("lr is {:?}; it must be a number of at least 0", rule.lr)));
        }
        if matches!(optimizer, OptimizerConfig::Muon { .. }) && param.shape.len() != 2 {
            return Err(named(format!(
                "Muon updates matrices, but parameter `{}` has shape {:?}; choose another optimizer for it",
                param.path, param.shape
            )));
        }
        let decays = rule.weight_decay.is_some() || config.decay.applies(param);
        Ok(ParamRule { optimizer, lr: rule.lr, decays })
    }

    /// The rules of a flat parameter's parameters, in order.
    pub(crate) fn rules(&self, config: &EngineConfig, layout: &FlatLayout) -> Result<Vec<ParamRule>> {
        layout.params().iter().map(|param| self.rule(config, param)).collect()
    }

    /// What the update keeps and needs for a model with `layouts`.
    ///
    /// # Errors
    /// As [`ParamGroups::rule`].
    pub fn plan(&self, config: &EngineConfig, layouts: &[&FlatLayout]) -> Result<OptimizerPlan> {
        let trained = layouts.iter().filter(|layout| layout.requires_grad());
        trained.flat_map(|layout| layout.params()).try_for_each(|p| self.rule(config, p).map(drop))?;
        let kind = |param: &ParamInfo| {
            self.rule(config, param).map_or(config.optimizer.kind(), |rule| rule.optimizer.kind())
        };
        let sharers = layouts.first().map_or(1, |layout| layout.world_size());
        let placed = placements(config, sharers, layouts);
        let plan = OptimizerPlan::of_placed_layouts(layouts, &placed, config.strategy, &kind);
        Ok(plan.with_average(config.ema_decay.is_some()).with_step_in_backward(config.step_in_backward))
    }

    /// What a rank of a model with `layouts` (the root's first, if it has any; each unit's follow each other) holds and sends
    /// in steps of `schedule`.
    ///
    /// # Errors
    /// As [`ParamGroups::rule`], and when strategy and groups of ranks do not fit.
    pub fn memory_plan(
        &self,
        config: &EngineConfig,
        layouts: &[&FlatLayout],
        schedule: StepSchedule,
    ) -> Result<MemoryPlan> {
        let size = |unit: &[&FlatLayout]| UnitSize::of(unit.iter().copied());
        let mut units: Vec<&[&FlatLayout]> = layouts.chunk_by(|a, b| a.unit() == b.unit()).collect();
        let root = units.first().filter(|unit| unit[0].unit() == "root").map(|root| size(root));
        units.drain(..usize::from(root.is_some()));
        Ok(MemoryPlan::new(&PlanInput {
            units: units.into_iter().map(size).collect(),
            root: root.unwrap_or_default(),
            strategy: config.strategy,
            optimizer: self.plan(config, layouts)?,
            schedule,
            gather: config.gather_policy(),
            shard_group: config.shard_group_size(schedule.ranks())?,
            precision: config.precision,
            wire: config.wire,
            unsharded_accumulation: config.accumulation == Accumulation::Unsharded,
            offload: config.offload,
        }))
    }

    /// What ranks must agree on: each group with its rule, and the group of each of `params` that is in one.
    pub fn describe<'a>(&self, params: impl Iterator<Item = &'a ParamInfo>) -> Vec<(String, String)> {
        let mut settings: Vec<(String, String)> = self
            .groups
            .iter()
            .enumerate()
            .map(|(i, group)| (format!("parameter group {i}"), format!("{} {:?}", group.name, group.rule)))
            .collect();
        for param in params {
            let chosen = self.groups.iter().position(|group| (group.chooses)(&param.path, &param.shape));
            if let Some(index) = chosen {
                settings.push((format!("group of {}", param.path), index.to_string()));
            }
        }
        settings
    }
}

/// Whether `text` is `pattern` with some text in the place of each `*`.
fn matches(pattern: &str, text: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(text) = text.strip_prefix(head) else { return false };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let tail = parts.pop().unwrap_or_default();
    let mut from = 0;
    for part in parts {
        match text[from..].find(part) {
            Some(at) => from += at + part.len(),
            None => return false,
        }
    }
    text[from..].ends_with(tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (pattern, text, want) in [
            ("a.b", "a.b", true),
            ("a.b", "a.bc", false),
            ("*", "", true),
            ("*.bias", "blocks.0.bias", true),
            ("*.bias", "blocks.0.weight", false),
            ("blocks.*", "blocks.0.bias", true),
            ("blocks.*.weight", "blocks.weight", false),
            ("*norm*", "blocks.0.norm_1.gamma", true),
            ("a*b*b", "ab", false),
            ("a*b*b", "abb", true),
            ("aa*aa", "aaa", false),
        ] {
            assert_eq!(matches(pattern, text), want, "{pattern} {text}");
        }
    }
}
