//! Bytes that a rank sends to others, by the kind of link: inside its node (or its group of a hybrid layout), or across.

use std::ops::{Add, AddAssign, Mul};

/// Bytes sent: what peers take from a rank, each byte counted once for each rank that takes it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// To ranks of the same node.
    pub inside: u64,
    /// To ranks of other nodes.
    pub across: u64,
}

impl Traffic {
    /// So many bytes inside and across.
    pub fn of(inside: usize, across: usize) -> Self {
        Self { inside: inside as u64, across: across as u64 }
    }

    /// Both.
    pub fn total(&self) -> u64 {
        self.inside + self.across
    }
}

impl Add for Traffic {
    type Output = Traffic;

    fn add(self, other: Traffic) -> Traffic {
        Traffic { inside: self.inside + other.inside, across: self.across + other.across }
    }
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Traffic) {
        *self = *self + other;
    }
}

impl Mul<u64> for Traffic {
    type Output = Traffic;

    fn mul(self, times: u64) -> Traffic {
        Traffic { inside: self.inside * times, across: self.across * times }
    }
}
