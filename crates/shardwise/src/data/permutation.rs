//! A seeded permutation computed point by point, so that the order of an epoch takes no memory.

use shardwise_core::seed::SplitMix64;

/// Rounds of the network: more than the four that make it hard to tell from chance.
const ROUNDS: usize = 8;

/// The narrowest network: over fewer bits, some permutations come visibly more often than others.
const MIN_BITS: u32 = 8;

/// A permutation of `0..len`, fixed by its seed.
///
/// A Feistel network permutes the smallest range of bits that holds `len`; an image outside is permuted again
/// until it is inside (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). From
/// 128 on, that is fewer than two passes of the network on average.
#[derive(Debug, Clone)]
pub struct Permutation {
    len: u64,
    /// The bits of the right half, which is the wider one.
    right_bits: u32,
    left_bits: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The permutation of `0..len` that belongs to `seed`.
    pub fn new(len: u64, seed: u64) -> Self {
        let bits = (u64::BITS - len.saturating_sub(1).leading_zeros()).max(MIN_BITS);
        let mut stream = SplitMix64::new(seed);
        let keys = std::array::from_fn(|_| stream.next_u64());
        Self { len, right_bits: bits.div_ceil(2), left_bits: bits / 2, keys }
    }

    /// Where `index` goes.
    ///
    /// # Panics
    /// When `index` is not below the length.
    pub fn at(&self, index: u64) -> u64 {
        assert!(index < self.len, "index {index} of a permutation of {}", self.len);
        let mut image = self.permute_bits(index);
        while image >= self.len {
            image = self.permute_bits(image);
        }
        image
    }

    /// The network: each round mixes one half into the other, and the halves change places with their widths.
    fn permute_bits(&self, value: u64) -> u64 {
        let (mut left_bits, mut right_bits) = (self.left_bits, self.right_bits);
        let (mut left, mut right) = (value >> right_bits, value & low_bits(right_bits));
        for key in self.keys {
            let mixed = left ^ (SplitMix64::new(key ^ right).next_u64() & low_bits(left_bits));
            (left, right) = (right, mixed);
            (left_bits, right_bits) = (right_bits, left_bits);
        }
        left << right_bits | right
    }
}

fn low_bits(bits: u32) -> u64 {
    (1 << bits) - 1
}
