//! The Burn adapter: a Burn module in, a sharded module out.

pub mod ops;
pub mod sink;
