//! What a rank is about to do, so that its peers can tell whether they are about to do the same.

use std::fmt;

use shardwise_core::{Precision, Quantization, seed_for};

/// The kinds of collective that a transport knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum OpKind {
    /// Every rank reads every rank's part.
    AllGather = 1,
    /// Every rank reads its own part of every rank's whole.
    AllToAll = 2,
    /// Every rank reads one rank's bytes.
    Broadcast = 3,
    /// No bytes: every rank waits for every other.
    Barrier = 4,
    /// An all-to-all whose parts are summed by the receiver.
    ReduceScatter = 5,
    /// Every rank sums every rank's whole.
    AllReduce = 6,
}

impl OpKind {
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        use OpKind::{AllGather, AllReduce, AllToAll, Barrier, Broadcast, ReduceScatter};
        [AllGather, AllToAll, Broadcast, Barrier, ReduceScatter, AllReduce]
            .into_iter()
            .find(|kind| *kind as u8 == code)
    }

    /// The field's name for it.
    pub fn name(self) -> &'static str {
        match self {
            OpKind::AllGather => "all_gather",
            OpKind::AllToAll => "all_to_all",
            OpKind::Broadcast => "broadcast",
            OpKind::Barrier => "barrier",
            OpKind::ReduceScatter => "reduce_scatter",
            OpKind::AllReduce => "all_reduce",
        }
    }
}

/// What travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Wire {
    /// Bytes without further meaning.
    Bytes = 1,
    /// f32 elements.
    F32 = 2,
    /// bf16 elements.
    Bf16 = 3,
    /// f16 elements.
    F16 = 4,
    /// Blocks of int8 elements.
    Int8 = 5,
    /// Blocks of int4 elements.
    Int4 = 6,
}

impl From<Precision> for Wire {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::F32 => Wire::F32,
            Precision::Bf16 => Wire::Bf16,
            Precision::F16 => Wire::F16,
        }
    }
}

impl From<Quantization> for Wire {
    fn from(quantization: Quantization) -> Self {
        match quantization {
            Quantization::Int8 => Wire::Int8,
            Quantization::Int4 => Wire::Int4,
        }
    }
}

impl Wire {
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        [Wire::Bytes, Wire::F32, Wire::Bf16, Wire::F16, Wire::Int8, Wire::Int4]
            .into_iter()
            .find(|wire| *wire as u8 == code)
    }

    fn name(self) -> &'static str {
        match self {
            Wire::Bytes => "bytes",
            Wire::F32 => Precision::F32.name(),
            Wire::Bf16 => Precision::Bf16.name(),
            Wire::F16 => Precision::F16.name(),
            Wire::Int8 => Quantization::Int8.name(),
            Wire::Int4 => Quantization::Int4.name(),
        }
    }
}

/// A collective as every rank must issue it: kind, what it is for, how much, of which type, from which root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fingerprint {
    /// Which collective.
    pub kind: OpKind,
    /// The unit or purpose. Of one that is longer than [`Fingerprint::LABEL_BYTES`], the beginning and a hash of the whole.
    pub label: String,
    /// Elements of the whole (gathered or unreduced) buffer.
    pub elements: u64,
    /// What they are.
    pub wire: Wire,
    /// The group rank that sends, for a broadcast.
    pub root: u32,
}

impl Fingerprint {
    /// Bytes of the label that travel.
    pub const LABEL_BYTES: usize = 64;

    /// A call over `elements` of type `wire`.
    pub fn new(kind: OpKind, label: &str, elements: usize, wire: Wire) -> Self {
        Self { kind, label: shortened(label), elements: elements as u64, wire, root: 0 }
    }

    /// The same call with a sending group rank.
    pub fn from_root(mut self, root: usize) -> Self {
        self.root = root as u32;
        self
    }
}

/// A label that fits its place on the board, and still differs from others that begin alike.
fn shortened(label: &str) -> String {
    if label.len() <= Fingerprint::LABEL_BYTES {
        return label.to_string();
    }
    let hash = format!("#{:016x}", seed_for(0, label));
    let mut end = Fingerprint::LABEL_BYTES - hash.len();
    while !label.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{hash}", &label[..end])
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of `{}`", self.kind.name(), self.label)?;
        if self.kind != OpKind::Barrier {
            write!(f, " ({} x {})", self.elements, self.wire.name())?;
        }
        if self.kind == OpKind::Broadcast {
            write!(f, " from group rank {}", self.root)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_labels_that_begin_alike_differ() {
        let label = |expert: usize| format!("{}experts.{expert}", "model.decoder.layers.".repeat(8));
        let of = |label: &str| Fingerprint::new(OpKind::ReduceScatter, label, 10, Wire::F32);
        assert_ne!(of(&label(3)), of(&label(5)));
        assert_eq!(of(&label(3)), of(&label(3)));
        for length in 0..200 {
            let text: String = "äb".chars().cycle().take(length).collect();
            let fingerprint = of(&text);
            assert!(fingerprint.label.len() <= Fingerprint::LABEL_BYTES);
            assert_eq!(fingerprint.label == text, text.len() <= Fingerprint::LABEL_BYTES);
        }
    }
}
