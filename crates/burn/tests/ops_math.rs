//! The elementary functions against double precision, and the same bits in a vector and in its tail.

use shardwise_burn::kernels::activation::{gelu_tanh, silu_mul};
use shardwise_burn::kernels::math::{exp, sigmoid};

/// Every 1009th bit pattern: 4 million values of all signs and magnitudes, subnormals, infinities and NaNs among them.
fn patterns() -> impl Iterator<Item = f32> {
    (0..=u32::MAX).step_by(1009).map(f32::from_bits)
}

/// A dense grid where the functions vary.
fn grid() -> impl Iterator<Item = f32> {
    (-1_100_000..=1_100_000).map(|i| i as f32 * 1e-4)
}

#[test]
fn exp_is_within_2e_7_of_the_true_value() {
    for x in patterns().chain(grid()) {
        let (found, expected) = (exp(x), f64::from(x).exp());
        if x.is_nan() {
            assert!(found.is_nan(), "exp({x}) is {found}");
        } else if expected > f64::from(f32::MAX) {
            assert!(found == f32::INFINITY || (x < 88.73 && found > 3.4e38), "exp({x}) is {found}");
        } else {
            // Below the normal numbers one unit in the last place is 2^-149.
            let tolerance = (2e-7 * expected).max(1.5e-45);
            let error = (f64::from(found) - expected).abs();
            assert!(error <= tolerance, "exp({x}) is {found:e}, not {expected:e}");
        }
    }
}

#[test]
fn exp_of_special_values() {
    assert_eq!(exp(0.0), 1.0);
    assert_eq!(exp(-0.0), 1.0);
    assert_eq!(exp(f32::INFINITY), f32::INFINITY);
    assert_eq!(exp(f32::NEG_INFINITY), 0.0);
    assert_eq!(exp(f32::MAX), f32::INFINITY);
    assert_eq!(exp(f32::MIN), 0.0);
    assert!(exp(f32::NAN).is_nan());
}

#[test]
fn sigmoid_is_within_3e_7_of_the_true_value() {
    for x in patterns().chain(grid()) {
        let (found, expected) = (sigmoid(x), 1.0 / (1.0 + (-f64::from(x)).exp()));
        if x.is_nan() {
            assert!(found.is_nan(), "sigmoid({x}) is {found}");
        } else {
            let tolerance = if x > -87.0 { 3e-7 * expected } else { 1e-37 };
            let error = (f64::from(found) - expected).abs();
            assert!(error <= tolerance, "sigmoid({x}) is {found:e}, not {expected:e}");
        }
    }
}

#[test]
fn gelu_is_x_times_a_factor_within_3e_7_of_the_true_one() {
    for x in grid() {
        let wide = f64::from(x);
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (wide + 0.044715 * wide.powi(3));
        // 1 + tanh cancels for negative arguments; this form does not.
        let expected = wide / (1.0 + (-2.0 * inner).exp());
        let found = f64::from(gelu_tanh(&[x])[0]);
        let error = (found - expected).abs();
        assert!(error <= 3e-7 * wide.abs(), "gelu({x}) is {found:e}, not {expected:e}");
    }
}

#[test]
fn a_vector_and_its_tail_round_alike() {
    let x: Vec<f32> = grid().step_by(7919).chain([f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0]).collect();
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let alone = |f: &dyn Fn(&[f32]) -> Vec<f32>| x.iter().flat_map(|&x| f(&[x])).collect::<Vec<f32>>();
    for f in [gelu_tanh, |x: &[f32]| silu_mul(x, x)] {
        assert_eq!(bits(&f(&x)), bits(&alone(&f)));
    }
}
