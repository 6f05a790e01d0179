//! Losses over held-out data, whatever each rank has of it.

use burn::module::Module;

use crate::error::ShardError;
use crate::model::ShardedModel;

impl<M: Module> ShardedModel<M> {
    /// The mean loss over all ranks' batches, each counted by its weight: `loss(module, batch)` returns a batch's mean loss
    /// and its weight, such as its number of tokens. Ranks may have different numbers of batches, or none. A collective:
    /// every rank must call it, and gets the same mean; NaN when all weights are 0.
    ///
    /// # Errors
    /// When communication fails on any rank.
    pub fn evaluate_mean<B>(
        &mut self,
        batches: impl IntoIterator<Item = B>,
        mut loss: impl FnMut(&M, B) -> (f64, f64),
    ) -> Result<f64, ShardError> {
        let own: Vec<u8> = self.evaluate(|module| {
            let pairs = batches.into_iter().map(|batch| loss(module, batch));
            pairs.flat_map(|(loss, weight)| [loss * weight, weight]).flat_map(f64::to_le_bytes).collect()
        })?;
        let all = self.group().all_gather_varied("evaluation", &own)?;
        // Added in the order of ranks, then of their batches, on every rank.
        let (mut sum, mut weights) = (0.0, 0.0);
        let all = all.concat();
        for pair in all.as_chunks::<8>().0.chunks_exact(2) {
            sum += f64::from_le_bytes(pair[0]);
            weights += f64::from_le_bytes(pair[1]);
        }
        Ok(sum / weights)
    }
}
