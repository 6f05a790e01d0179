//! The sizes of an attention, and where the rows of each head lie.

use crate::kernels::matmul::MatRef;

/// How the columns of queries, keys and values divide into heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionHeads {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`. Query head `i` reads key head `i / (num_heads / num_kv_heads)`.
    pub num_kv_heads: usize,
    /// Columns of one head.
    pub head_dim: usize,
}

impl AttentionHeads {
    pub(super) fn group(self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    pub(super) fn query_width(self) -> usize {
        self.num_heads * self.head_dim
    }

    fn key_width(self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    pub(super) fn scale(self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }
}

/// The sizes of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence.
    pub len: usize,
    /// Heads.
    pub heads: AttentionHeads,
    /// Whether queries, keys and values are columns of one buffer (`[q | k | v]`) or three buffers.
    pub packed: bool,
}

/// One of the three operands.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    Query,
    Key,
    Value,
}

/// Where an operand lies: which buffer, its rows' stride, and its first column.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) buffer: usize,
    pub(super) stride: usize,
    column: usize,
}

impl Problem {
    pub(super) fn place(self, part: Part) -> Place {
        let (q, k) = (self.heads.query_width(), self.heads.key_width());
        let (buffer, width, column) = match part {
            Part::Query => (0, q, 0),
            Part::Key => (1, k, q),
            Part::Value => (2, k, q + k),
        };
        match self.packed {
            true => Place { buffer: 0, stride: q + 2 * k, column },
            false => Place { buffer, stride: width, column: 0 },
        }
    }

    /// The first element of `head` of sequence `b`.
    pub(super) fn start(self, place: Place, b: usize, head: usize) -> usize {
        b * self.len * place.stride + place.column + head * self.heads.head_dim
    }

    pub(super) fn window<'a>(self, buffers: &[&'a [f32]], part: Part, b: usize, head: usize) -> Window<'a> {
        let place = self.place(part);
        Window { data: &buffers[place.buffer][self.start(place, b, head)..], stride: place.stride }
    }

    /// Elements of each buffer.
    pub fn buffer_lens(self) -> Vec<usize> {
        let (q, k) = (self.heads.query_width(), self.heads.key_width());
        let rows = self.batch * self.len;
        match self.packed {
            true => vec![rows * (q + 2 * k)],
            false => vec![rows * q, rows * k, rows * k],
        }
    }

    /// # Panics
    /// If the heads do not divide, or a buffer has another length than the sizes say.
    pub(super) fn check(self, buffers: &[&[f32]]) {
        let AttentionHeads { num_heads, num_kv_heads, head_dim } = self.heads;
        assert!(
            num_heads.min(num_kv_heads).min(head_dim) > 0 && num_heads.is_multiple_of(num_kv_heads),
            "attention with {num_heads} heads over {num_kv_heads} key heads of {head_dim} columns"
        );
        assert!(self.len > 0, "attention over no tokens");
        let found: Vec<usize> = buffers.iter().map(|b| b.len()).collect();
        assert_eq!(found, self.buffer_lens(), "attention buffers of {self:?}");
    }
}

/// The rows of one head: `len` rows of `head_dim`, `stride` apart.
#[derive(Clone, Copy)]
pub(super) struct Window<'a> {
    pub(super) data: &'a [f32],
    pub(super) stride: usize,
}

impl<'a> Window<'a> {
    pub(super) fn rows(self, first: usize, count: usize, dim: usize) -> MatRef<'a> {
        MatRef::strided(&self.data[first * self.stride..], count, dim, self.stride)
    }

    pub(super) fn row(self, index: usize, dim: usize) -> &'a [f32] {
        &self.data[index * self.stride..][..dim]
    }
}
