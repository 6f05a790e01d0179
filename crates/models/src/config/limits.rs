//! What sizes and constants can be at all.

use crate::error::{ModelError, Result};

/// The largest vocabulary, context or width. Sizes below it multiply without overflow.
const MAX_SIZE: usize = 1 << 24;

/// The most layers.
const MAX_LAYERS: usize = 10_000;

/// The most parameters, far above any model's: arithmetic on their bytes stays within 64 bits.
const MAX_PARAMETERS: u128 = 1 << 50;

/// The error of `key`.
pub(super) fn invalid(key: &'static str, found: impl ToString, expected: impl Into<String>) -> ModelError {
    ModelError::Invalid { key, found: found.to_string(), expected: expected.into() }
}

/// Checks each size.
pub(super) fn sizes(sizes: &[(&'static str, usize)]) -> Result<()> {
    match sizes.iter().find(|(_, size)| !(1..=MAX_SIZE).contains(size)) {
        Some((key, size)) => Err(invalid(key, size, format!("from 1 to {MAX_SIZE}"))),
        None => Ok(()),
    }
}

/// Checks the number of layers, for blocks of about `per_layer` parameters.
pub(super) fn layers(key: &'static str, layers: usize, per_layer: u128) -> Result<()> {
    if !(1..=MAX_LAYERS).contains(&layers) {
        return Err(invalid(key, layers, format!("from 1 to {MAX_LAYERS}")));
    }
    if per_layer * layers as u128 > MAX_PARAMETERS {
        let expected =
            format!("smaller: layers of this width have more than {MAX_PARAMETERS} parameters together");
        return Err(invalid(key, layers, expected));
    }
    Ok(())
}

/// Checks that `size` divides into `parts` equal parts.
pub(super) fn divides(key: &'static str, size: usize, (parts_key, parts): (&str, usize)) -> Result<()> {
    if size.is_multiple_of(parts) {
        return Ok(());
    }
    Err(invalid(key, size, format!("a multiple of `{parts_key}` ({parts})")))
}

/// Checks the epsilon of a norm.
pub(super) fn epsilon(key: &'static str, value: f64) -> Result<()> {
    // Norms compute in f32, where less would be 0.
    if value.is_finite() && value as f32 > 0.0 {
        return Ok(());
    }
    Err(invalid(key, value, "a positive number"))
}

/// Checks the standard deviation of initial values, as `transformers` does.
pub(super) fn initializer_range(value: f64) -> Result<()> {
    if (0.0..=1.0).contains(&value) {
        return Ok(());
    }
    Err(invalid("initializer_range", value, "from 0 to 1"))
}

/// Checks an activation's name.
pub(super) fn activation(key: &'static str, name: &str, supported: &[&str]) -> Result<()> {
    if supported.contains(&name) {
        return Ok(());
    }
    Err(invalid(key, format!("{name:?}"), format!("one of {supported:?}: no other activation is supported")))
}
