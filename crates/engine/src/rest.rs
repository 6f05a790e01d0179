//! Frozen parameters that rest in int8: no f32 of them is kept, and they travel as they rest.
//!
//! A block of elements has one scale, and may belong to several parameters that are written one after another. So that the
//! first does not lose by what the second changes in the scale, the blocks that were written in part are kept in f32 until
//! the next step; written from there, values that were dequantised once come out the same.

use std::collections::BTreeMap;
use std::ops::Range;

use shardwise_comm::quantise::{dequantise_at, quantise_at, settle_raw};
use shardwise_core::{QUANTISATION_BLOCK as BLOCK, Quantization};

use crate::Result;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::handle::FlatParamHandle;
use crate::unit::Place;

/// How frozen parameters rest.
const HOW: Quantization = Quantization::Int8;

/// A flat parameter that rests in int8.
#[derive(Debug, Default)]
pub(crate) struct Resting {
    /// Blocks that have been written in part since the last step, in f32.
    sharp: BTreeMap<usize, Vec<f32>>,
}

impl Resting {
    /// Forgets what is kept in f32.
    pub(crate) fn settle(&mut self) {
        self.sharp.clear();
    }

    /// Lets `edit` change elements `range` of the first `owned` of the `numel` that `wire` holds. A failure leaves them as
    /// they were and names the first element that is not finite, with its value.
    fn edit<T>(
        &mut self,
        wire: &mut [u8],
        (owned, numel): (usize, usize),
        range: Range<usize>,
        edit: impl FnOnce(&mut [f32]) -> T,
    ) -> std::result::Result<T, (usize, f32)> {
        let blocks = range.start / BLOCK..range.end.div_ceil(BLOCK);
        let around = blocks.start * BLOCK..(blocks.end * BLOCK).min(numel);
        let mut values = vec![0.0; around.len()];
        // Nothing that rests is raw.
        let decoded = dequantise_at(wire, &mut values, around.clone(), (numel, HOW), None);
        debug_assert!(decoded.is_ok(), "{decoded:?}");
        for (block, sharp) in self.sharp.range(blocks.clone()) {
            let at = block * BLOCK - around.start;
            values[at..at + sharp.len()].copy_from_slice(sharp);
        }
        let here = range.start - around.start..range.end - around.start;
        let edited = edit(&mut values[here.clone()]);
        if let Some(bad) = values[here].iter().position(|x| !x.is_finite()) {
            return Err((range.start + bad, values[range.start - around.start + bad]));
        }
        quantise_at(&values, wire, around.clone(), (numel, HOW), None);
        let settled = settle_raw(&values, wire, around.clone(), (numel, HOW));
        debug_assert!(settled.is_ok(), "all are finite: {settled:?}");
        for block in blocks {
            let elements = block * BLOCK..((block + 1) * BLOCK).min(owned);
            if range.start <= elements.start && elements.end <= range.end {
                self.sharp.remove(&block);
            } else {
                let end = ((block + 1) * BLOCK).min(numel);
                let values = &values[elements.start - around.start..end - around.start];
                self.sharp.insert(block, values.to_vec());
            }
        }
        Ok(edited)
    }
}

impl FlatParamHandle {
    /// Whether the owned elements rest in int8.
    pub(crate) fn rests(&self) -> bool {
        self.resting.is_some()
    }
}

impl Engine {
    /// [`Engine::edit_owned`] of a flat parameter that rests in int8.
    pub(crate) fn edit_resting<T>(
        &mut self,
        at: Place,
        range: Range<usize>,
        edit: impl FnOnce(&mut [f32]) -> T,
    ) -> Result<T> {
        let rank = self.group.rank();
        let handle = &mut self.units[at];
        let (bytes, owned, numel) = (handle.encoded_range(), handle.owned.len(), handle.kept_numel());
        assert!(range.start <= range.end && range.end <= owned, "{range:?} of {owned} owned elements");
        let (Some(low), Some(resting)) = (self.low.as_mut(), handle.resting.as_mut()) else {
            return Ok(edit(&mut []));
        };
        let low = low.writable().map_err(|source| EngineError::Comm { rank, source })?;
        let wire = &mut bytemuck::cast_slice_mut::<f32, u8>(low)[bytes];
        resting.edit(wire, (owned, numel), range, edit).map_err(|(element, value)| {
            let element = handle.owned.start + element;
            let param = handle.layout.params().iter().find(|param| param.range().contains(&element));
            EngineError::FrozenNotFinite {
                rank,
                unit: handle.name().to_string(),
                path: param.map_or_else(String::new, |param| param.path.clone()),
                index: param.map_or(element, |param| element - param.offset),
                value,
            }
        })
    }
}
