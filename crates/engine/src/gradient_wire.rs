//! Gradients as small integers on their way to a sum (qgZ), and what that takes from them given to the next ones (LoCo).
//!
//! Each hop of a reduction that several ranks take part in is quantised, with the owner's contribution like all others, and
//! summed in f32. A hop inside a group of one rank is exact: nothing travels.
//!
//! Error feedback is that of LoCo (Xie, Lin, Toh and Zhou 2024): what is quantised is `h = g + e`, and the error that is
//! kept is a moving average, `e <- beta e + (1 - beta) (h - q(h))`, forgotten every so many steps. The elements of a block
//! that cannot be quantised travel as they are and have no error. A gradient that is not finite makes all errors of its step
//! worthless: they are forgotten too.

use shardwise_comm::quantise::{Key, QuantisationError, dequantise_at, error_of, quantise, raw_blocks};
use shardwise_comm::{CommError, HostBuffer, ReduceScatter};
use shardwise_core::{
    ErrorFeedback, QUANTISATION_BLOCK, Quantization, Rounding, Traffic, WireConfig, seed_for,
};

/// Elements whose error is taken at a time, in the first cache level.
const PIECE: usize = 8 * QUANTISATION_BLOCK;

/// The hops of a reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hop {
    /// Over the ranks of a group or node.
    Inside,
    /// Over the groups or nodes.
    Across,
}

/// What was lost in one hop of one flat parameter, to be given back.
#[derive(Debug)]
struct Lost {
    /// `e`, element by element of what this rank shows in the hop.
    error: HostBuffer,
    /// Whether it has been added to a gradient that has not been summed yet.
    added: bool,
}

/// How the gradient of one flat parameter travels.
#[derive(Debug)]
pub(crate) struct GradientWire {
    how: Quantization,
    by_chance: bool,
    feedback: Option<ErrorFeedback>,
    /// By hop; `None` where there is no feedback, or the hop is exact.
    lost: [Option<Lost>; 2],
    /// Whether the hop inside is quantised.
    inside: bool,
    rank: usize,
    /// The step, and how many sums have been taken in it.
    step: u64,
    sums: u64,
    /// The loss scale that errors are of.
    scale: f64,
    /// What the step has lost, and the bytes of what could not be quantised in it.
    error: QuantisationError,
    raw: Traffic,
}

/// Elements that a rank shows in each hop of a reduction; 0 where it shows nothing to others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shown {
    pub(crate) inside: usize,
    pub(crate) across: usize,
}

impl GradientWire {
    /// For one trained flat parameter, if the configuration quantises it on its way.
    pub(crate) fn new(
        wire: &WireConfig,
        rank: usize,
        shown: Shown,
        mut allocated: impl FnMut(usize),
    ) -> Result<Option<Box<Self>>, CommError> {
        let Some(how) = wire.gradients.filter(|_| shown.inside + shown.across > 0) else { return Ok(None) };
        let mut lost = |numel: usize| {
            if wire.error_feedback.is_none() || numel == 0 {
                return Ok::<Option<Lost>, CommError>(None);
            }
            allocated(numel);
            Ok(Some(Lost { error: HostBuffer::new(numel)?, added: false }))
        };
        Ok(Some(Box::new(Self {
            how,
            by_chance: wire.rounding == Rounding::Stochastic,
            feedback: wire.error_feedback,
            lost: [lost(shown.inside)?, lost(shown.across)?],
            inside: shown.inside > 0,
            rank,
            step: 0,
            sums: 0,
            scale: 1.0,
            error: QuantisationError::default(),
            raw: Traffic::default(),
        })))
    }

    /// What gradients are quantised to in a hop, if they are.
    pub(crate) fn quantised(&self, hop: Hop) -> Option<Quantization> {
        (hop == Hop::Across || self.inside).then_some(self.how)
    }

    /// Begins a step whose losses are multiplied by `scale`.
    pub(crate) fn begin_step(&mut self, step: u64, scale: f64) {
        (self.step, self.sums, self.error) = (step, 0, QuantisationError::default());
        let resets =
            self.feedback.is_some_and(|feedback| step > 1 && (step - 1).is_multiple_of(feedback.reset_steps));
        if resets {
            self.forget();
        }
        if scale != self.scale {
            // Errors are of gradients that were scaled otherwise.
            let factor = (scale / self.scale) as f32;
            for lost in self.lost.iter_mut().flatten() {
                lost.error.as_mut_slice().iter_mut().for_each(|e| *e *= factor);
            }
            self.scale = scale;
        }
    }

    /// Forgets all errors.
    pub(crate) fn forget(&mut self) {
        for lost in self.lost.iter_mut().flatten() {
            lost.error.as_mut_slice().fill(0.0);
            lost.added = false;
        }
    }

    /// Adds the errors to the parts that `buffer` begins with, unless they have been, and quantises them behind all parts.
    pub(crate) fn encode(&mut self, hop: Hop, reduction: &ReduceScatter<'_>, buffer: &mut [f32]) {
        let Some(how) = self.quantised(hop) else { return };
        let (numel, all) = (reduction.part_numel, reduction.part_numel * reduction.parts);
        let (values, words) = buffer.split_at_mut(all);
        if let Some(lost) = &mut self.lost[hop as usize]
            && !std::mem::replace(&mut lost.added, true)
        {
            values.iter_mut().zip(lost.error.as_slice()).for_each(|(g, e)| *g += e);
        }
        let key = self.by_chance.then(|| {
            let Self { step, sums, rank, .. } = self;
            seed_for(*step, &format!("{} {hop:?} {sums} {rank}", reduction.label))
        });
        let codes = bytemuck::cast_slice_mut::<f32, u8>(words);
        let parts = codes.chunks_exact_mut(how.bytes(numel).max(1));
        for (part, (values, codes)) in values.chunks_exact(numel.max(1)).zip(parts).enumerate() {
            let key = key.map(|seed| Key { seed, first: (part * numel) as u64 });
            quantise(values, codes, how, key);
        }
    }

    /// Learns what the quantisation of `buffer` has taken, once it is certain that it is summed. Other ranks read the parts
    /// for which `readers` says how many, and over which links.
    pub(crate) fn commit(
        &mut self,
        hop: Hop,
        reduction: &ReduceScatter<'_>,
        buffer: &[f32],
        readers: impl Fn(usize) -> Traffic,
    ) -> Result<(), CommError> {
        let Some(how) = self.quantised(hop) else { return Ok(()) };
        let numel = reduction.part_numel;
        let (values, words) = buffer.split_at(numel * reduction.parts);
        let codes = bytemuck::cast_slice::<f32, u8>(words).chunks_exact(how.bytes(numel).max(1));
        let beta = self.feedback.map_or(0.0, |feedback| feedback.beta as f32);
        for (part, (values, codes)) in values.chunks_exact(numel.max(1)).zip(codes).enumerate() {
            self.error.merge(error_of(values, codes, how));
            let raw: usize = raw_blocks(codes, numel).map(|block| block.len()).sum();
            self.raw += readers(part) * (raw * size_of::<f32>()) as u64;
            if let Some(lost) = &mut self.lost[hop as usize] {
                let error = &mut lost.error.as_mut_slice()[part * numel..(part + 1) * numel];
                learn(error, values, (codes, how), beta)?;
            }
        }
        if let Some(lost) = &mut self.lost[hop as usize] {
            lost.added = false;
        }
        Ok(())
    }

    /// Notes that a sum has been taken, and takes the bytes that could not be quantised on the way to it.
    pub(crate) fn summed(&mut self) -> Traffic {
        self.sums += 1;
        std::mem::take(&mut self.raw)
    }

    /// What the step has lost so far.
    pub(crate) fn error(&self) -> QuantisationError {
        self.error
    }
}

/// `error <- beta error + (1 - beta) (values - q(values))`.
fn learn(
    error: &mut [f32],
    values: &[f32],
    (codes, how): (&[u8], Quantization),
    beta: f32,
) -> Result<(), CommError> {
    let (numel, mut arrived) = (values.len(), [0f32; PIECE]);
    for start in (0..numel).step_by(PIECE) {
        let range = start..(start + PIECE).min(numel);
        let (values, arrived) = (&values[range.clone()], &mut arrived[..range.len()]);
        dequantise_at(codes, arrived, range.clone(), (numel, how), Some(values))?;
        for ((e, h), q) in error[range].iter_mut().zip(values).zip(arrived.iter()) {
            let taken = h - q;
            // What travels as it is has lost nothing, whatever it is.
            let taken = if taken.is_finite() { taken } else { 0.0 };
            *e = beta * *e + (1.0 - beta) * taken;
        }
    }
    Ok(())
}
