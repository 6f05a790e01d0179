//! Freezing and unfreezing parameters of a model that is sharded already.
//!
//! What is trained and what is frozen lie in flat parameters of their own, so the model is laid out anew: nothing that was
//! decided while a parameter was frozen outlives its freezing.

use std::ops::Range;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::Tensor;

use crate::error::ShardError;
use crate::init::Before;
use crate::model::ShardedModel;
use crate::source::ParamSource;
use crate::walk;

impl<M: Module> ShardedModel<M> {
    /// Trains from now on the parameters whose path `trained` is true for, and freezes the others; a tied parameter goes by
    /// its first path. Values, step count and loss scale stay; training continues as that of a model that was built this
    /// way. For the time of the call the rank holds its shard of the parameters twice. A collective: every rank must choose
    /// the same.
    ///
    /// # Errors
    /// When the optimizer keeps statistics and has updated parameters already, since those of a new layout would start
    /// afresh; when ranks choose differently; and when communication fails.
    pub fn set_trainable(&mut self, trained: impl Fn(&str) -> bool) -> Result<(), ShardError> {
        if self.engine.lock().has_statistics() {
            return Err(ShardError::StatisticsInUse);
        }
        let mut retrain = Retrain { model: self, trained };
        let (module, _) = walk::renew_slots(|| self.evaluation().clone().map(&mut retrain));
        let init = self.init().trusting_values();
        let before = Before { dtypes: self.params.dtypes(), ..Before::default() };
        let new = init.shard_with(self.group().clone(), module, &Later, before)?;
        {
            let mut old = self.engine.lock();
            let mut engine = new.engine.lock();
            let mut result = Ok(());
            for unit in old.ids() {
                old.with_full_params(unit, |layout, flat| {
                    for param in layout.params() {
                        let written = new.params.find(&param.path).and_then(|key| {
                            let values = &flat[param.range()];
                            Ok(engine.write_param(key.unit, key.part, key.index, values)?)
                        });
                        if result.is_ok() {
                            result = written;
                        }
                    }
                })?;
            }
            result?;
            engine.continue_from(&mut old);
        }
        // What a peer still reads of the old shards would stay in memory until the world ends.
        self.group().barrier("set_trainable")?;
        self.replace_with(new);
        Ok(())
    }
}

/// Values that are written after the model is made.
struct Later;

impl ParamSource for Later {
    fn fill(&self, _: &str, _: &[usize], _: Range<usize>, _: &mut [f32]) -> Result<bool, String> {
        Ok(true)
    }
}

/// Puts the windows of a sharded model on the autodiff backend again, trained or frozen as chosen.
struct Retrain<'a, M: Module, F> {
    model: &'a ShardedModel<M>,
    trained: F,
}

impl<M: Module, F: Fn(&str) -> bool> ModuleMapper for Retrain<'_, M, F> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // One that is left alone stays as it is.
        let Some(key) = self.model.params.key_of(param.id) else { return param };
        let trained = (self.trained)(&self.model.params.info(key).path);
        Param::initialized(param.id, Tensor::from_inner(param.val()).set_require_grad(trained))
    }
}
