//! The loss scale: gradients too small for a narrow wire are lifted by a factor, and overflows lower it.
//!
//! The rule of mixed-precision training (Micikevicius et al. 2018) with DeepSpeed's hysteresis. All ranks see the same
//! gradient norm, so all take the same decision.

/// What the loss is multiplied by before its backward. Gradients are divided by it again after their sum.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum LossScale {
    /// Nothing.
    #[default]
    None,
    /// Always this.
    Static(f64),
    /// As much as the gradients bear.
    Dynamic(DynamicScale),
}

/// A dynamic scale grows to this at most: gradients that bear more do not need it, and f32 has room above.
const LARGEST: f64 = 18_446_744_073_709_551_616.0; // 2^64

/// How a dynamic loss scale moves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DynamicScale {
    /// The scale of the first step.
    pub initial: f64,
    /// What it is divided by after overflows and multiplied by after a window without.
    pub factor: f64,
    /// Steps without an overflow after which it grows.
    pub window: u32,
    /// Overflows after which it falls; at least 1.
    pub hysteresis: u32,
    /// It never falls below this.
    pub minimum: f64,
}

impl Default for DynamicScale {
    /// 2^16, doubled after 1000 good steps, halved at each overflow, at least 1.
    fn default() -> Self {
        Self { initial: 65536.0, factor: 2.0, window: 1000, hysteresis: 1, minimum: 1.0 }
    }
}

impl LossScale {
    /// Whether there is one.
    pub fn is_scaled(&self) -> bool {
        *self != LossScale::None
    }

    /// Whether every number in it makes sense; otherwise what does not.
    pub(crate) fn check(&self) -> Result<(), String> {
        let positive = |name: &str, value: f64| {
            if value.is_finite() && value > 0.0 {
                Ok(())
            } else {
                Err(format!("{name} is {value}; it must be a positive number"))
            }
        };
        match self {
            LossScale::None => Ok(()),
            LossScale::Static(scale) => positive("loss_scale", *scale),
            LossScale::Dynamic(dynamic) => {
                positive("the initial loss_scale", dynamic.initial)?;
                positive("the minimum loss_scale", dynamic.minimum)?;
                if dynamic.factor.is_nan() || dynamic.factor <= 1.0 {
                    return Err(format!(
                        "the factor of loss_scale is {}; it must be above 1",
                        dynamic.factor
                    ));
                }
                if dynamic.window == 0 || dynamic.hysteresis == 0 {
                    return Err("the window and the hysteresis of loss_scale must be at least 1".into());
                }
                Ok(())
            }
        }
    }
}

/// The scale as it stands.
#[derive(Debug, Clone, PartialEq)]
pub struct LossScaler {
    config: LossScale,
    scale: f64,
    good_steps: u32,
    overflows_left: u32,
}

impl LossScaler {
    /// Before the first step.
    pub fn new(config: LossScale) -> Self {
        let (scale, overflows_left) = match config {
            LossScale::None => (1.0, 0),
            LossScale::Static(scale) => (scale, 0),
            LossScale::Dynamic(dynamic) => (dynamic.initial, dynamic.hysteresis),
        };
        Self { config, scale, good_steps: 0, overflows_left }
    }

    /// What the loss of the next backward is multiplied by.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Whether an overflow means that the scale is too large, and not that the run is broken.
    pub fn adapts(&self) -> bool {
        matches!(self.config, LossScale::Dynamic(_))
    }

    /// Learns from a step whether its gradient was finite.
    pub fn learn(&mut self, finite: bool) {
        let LossScale::Dynamic(dynamic) = self.config else { return };
        if finite {
            self.good_steps += 1;
            if self.good_steps == dynamic.window {
                self.scale = (self.scale * dynamic.factor).min(LARGEST);
                self.good_steps = 0;
                self.overflows_left = dynamic.hysteresis;
            }
        } else {
            self.good_steps = 0;
            self.overflows_left -= 1;
            if self.overflows_left == 0 {
                self.scale = (self.scale / dynamic.factor).max(dynamic.minimum);
                self.overflows_left = dynamic.hysteresis;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_falls_at_overflows_and_grows_after_a_window() {
        let dynamic = DynamicScale { initial: 8.0, window: 3, minimum: 2.0, ..DynamicScale::default() };
        let mut scaler = LossScaler::new(LossScale::Dynamic(dynamic));
        let steps =
            [(true, 8.0), (true, 8.0), (true, 16.0), (false, 8.0), (true, 8.0), (true, 8.0), (false, 4.0)];
        for (finite, scale) in steps.into_iter().chain([(false, 2.0), (false, 2.0), (true, 2.0)]) {
            scaler.learn(finite);
            assert_eq!(scaler.scale(), scale);
        }
    }

    #[test]
    fn hysteresis_waits_for_more_overflows() {
        let dynamic = DynamicScale { initial: 8.0, hysteresis: 2, window: 2, ..DynamicScale::default() };
        let mut scaler = LossScaler::new(LossScale::Dynamic(dynamic));
        for (finite, scale) in
            [(false, 8.0), (true, 8.0), (false, 4.0), (false, 4.0), (true, 4.0), (true, 8.0)]
        {
            scaler.learn(finite);
            assert_eq!(scaler.scale(), scale);
        }
    }

    #[test]
    fn a_static_scale_stays_and_nonsense_is_refused() {
        let mut scaler = LossScaler::new(LossScale::Static(4.0));
        scaler.learn(false);
        assert_eq!(scaler.scale(), 4.0);
        let dynamic = DynamicScale::default();
        for (config, words) in [
            (LossScale::Static(0.0), "loss_scale is 0"),
            (LossScale::Static(f64::NAN), "NaN"),
            (LossScale::Dynamic(DynamicScale { factor: 1.0, ..dynamic }), "factor"),
            (LossScale::Dynamic(DynamicScale { hysteresis: 0, ..dynamic }), "hysteresis"),
        ] {
            assert!(config.check().expect_err("refused").contains(words));
        }
    }
}
