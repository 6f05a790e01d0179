//! Text from a model: tokens drawn from logits, the same for the same seed.

use std::cmp::Ordering;

use shardwise_core::seed::SplitMix64;

use crate::error::{ModelError, Result};

/// Draws tokens. Two samplers with the same settings draw the same tokens from the same logits, so ranks that share a
/// model need not tell each other what they drew.
#[derive(Debug, Clone)]
pub struct Sampler {
    temperature: f64,
    top_k: Option<usize>,
    random: SplitMix64,
}

impl Sampler {
    /// A sampler that divides logits by `temperature` (0: it always takes the likeliest token, the first of equals) and
    /// draws among the `top_k` likeliest tokens (all, if it is `None`).
    ///
    /// # Errors
    /// When the temperature is negative or not finite, or `top_k` is 0.
    pub fn new(temperature: f64, top_k: Option<usize>, seed: u64) -> Result<Self> {
        let invalid = |key, found: String, expected: &str| {
            Err(ModelError::Invalid { key, found, expected: expected.to_string() })
        };
        if !(temperature.is_finite() && temperature >= 0.0) {
            return invalid("temperature", temperature.to_string(), "0 or a positive number");
        }
        if top_k == Some(0) {
            return invalid("top_k", "0".to_string(), "1 or more, or left out");
        }
        Ok(Self { temperature, top_k, random: SplitMix64::new(seed) })
    }

    /// Draws the next token from the logits of all tokens.
    ///
    /// # Errors
    /// [`ModelError::Logits`] when there are none, or one is NaN or positive infinity, or all are negative infinity.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        let (likeliest, highest) = likeliest(logits)?;
        if self.temperature == 0.0 {
            return Ok(likeliest as u32);
        }
        let highest = f64::from(highest);
        let tokens = self.candidates(logits);
        let weight = |token: usize| ((f64::from(logits[token]) - highest) / self.temperature).exp();
        let total: f64 = tokens.iter().map(|&token| weight(token)).sum();
        let mut left = self.random.next_f64() * total;
        for &token in &tokens {
            left -= weight(token);
            if left < 0.0 {
                return Ok(token as u32);
            }
        }
        // Rounding has left a rest.
        Ok(likeliest as u32)
    }

    /// Continues `prompt` by `count` tokens and returns those. `logits` computes the logits of the token that follows the
    /// tokens it is given: the last `context` of all so far.
    ///
    /// # Errors
    /// [`ModelError::EmptyPrompt`], what [`Sampler::sample`] returns, and whatever `logits` returns.
    ///
    /// # Panics
    /// If `context` is 0.
    pub fn generate<E: From<ModelError>>(
        &mut self,
        prompt: &[u32],
        count: usize,
        context: usize,
        mut logits: impl FnMut(&[u32]) -> Result<Vec<f32>, E>,
    ) -> Result<Vec<u32>, E> {
        assert!(context > 0, "a model's context has at least 1 token");
        if prompt.is_empty() {
            return Err(ModelError::EmptyPrompt.into());
        }
        let mut tokens = prompt.to_vec();
        for _ in 0..count {
            let start = tokens.len().saturating_sub(context);
            let next = self.sample(&logits(&tokens[start..])?)?;
            tokens.push(next);
        }
        Ok(tokens.split_off(prompt.len()))
    }

    /// The tokens to draw among, in their own order.
    fn candidates(&self, logits: &[f32]) -> Vec<usize> {
        let mut tokens: Vec<usize> = (0..logits.len()).collect();
        if let Some(top_k) = self.top_k.filter(|k| *k < tokens.len()) {
            tokens.select_nth_unstable_by(top_k - 1, |&a, &b| descending(logits, a, b));
            tokens.truncate(top_k);
            tokens.sort_unstable();
        }
        tokens
    }
}

/// The likelier token first; of equals the lower one, so that the order is total (no logit is NaN).
fn descending(logits: &[f32], a: usize, b: usize) -> Ordering {
    logits[b].partial_cmp(&logits[a]).unwrap_or(Ordering::Equal).then(a.cmp(&b))
}

/// The first token with the highest logit, and that logit.
fn likeliest(logits: &[f32]) -> Result<(usize, f32)> {
    let problem = |found: String| Err(ModelError::Logits { found });
    if let Some(token) = logits.iter().position(|logit| logit.is_nan() || *logit == f32::INFINITY) {
        return problem(format!("{} for token {token}", logits[token]));
    }
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    match logits.iter().position(|logit| *logit == highest) {
        Some(token) if highest.is_finite() => Ok((token, highest)),
        Some(_) => problem("negative infinity for all".to_string()),
        None => problem("none".to_string()),
    }
}
