//! The decays of a row: products of exponentials of sums of log decays, each at most 1.

use std::ops::Range;

use crate::cpu::math;

/// The log decays of a row, each at most 0.
#[derive(Clone, Copy)]
pub struct Decays<'a> {
    /// `[seq_len, channels]`
    pub log_decay: &'a [f32],
    /// Log decays per token: one, or one for each channel of k.
    pub channels: usize,
    /// Channels of k.
    pub head_dim: usize,
}

impl Decays<'_> {
    /// exp of the sums of log decays from the start of `tokens` to each token, `[tokens, head_dim]`.
    pub fn since_start(&self, tokens: &Range<usize>, factors: &mut Vec<f32>) {
        let mut sums = vec![0.0; self.channels];
        factors.clear();
        for t in tokens.clone() {
            math::add_to(&mut sums, self.steps(t));
            self.push_factors(&sums, factors);
        }
    }

    /// exp of the sums of log decays after each token to the end of `tokens`, `[tokens, head_dim]`; returns exp
    /// of the sum over all of them, `[head_dim]`.
    pub fn until_end(&self, tokens: &Range<usize>, factors: &mut Vec<f32>) -> Vec<f32> {
        let d = self.head_dim;
        let mut sums = vec![0.0; self.channels];
        factors.clear();
        for t in tokens.clone().rev() {
            self.push_factors(&sums, factors);
            math::add_to(&mut sums, self.steps(t));
        }
        // They were written last token first.
        let n = tokens.len();
        for t in 0..n / 2 {
            let (low, high) = factors.split_at_mut((n - 1 - t) * d);
            low[t * d..][..d].swap_with_slice(&mut high[..d]);
        }
        let mut chunk_decay = vec![];
        self.push_factors(&sums, &mut chunk_decay);
        chunk_decay
    }

    /// exp of one token's log decays, `[head_dim]`.
    pub fn of_token(&self, token: usize, factors: &mut Vec<f32>) {
        factors.clear();
        self.push_factors(self.steps(token), factors);
    }

    fn steps(&self, token: usize) -> &[f32] {
        &self.log_decay[token * self.channels..][..self.channels]
    }

    /// exp of a token's sums, for each of its head_dim channels.
    fn push_factors(&self, sums: &[f32], factors: &mut Vec<f32>) {
        match sums {
            [one] => factors.extend(std::iter::repeat_n(math::exp(*one), self.head_dim)),
            _ => factors.extend(sums.iter().map(|&sum| math::exp(sum))),
        }
    }
}

/// `dst` = x ⊙ y.
pub fn product(dst: &mut Vec<f32>, x: &[f32], y: &[f32]) {
    dst.clear();
    dst.extend(x.iter().zip(y).map(|(x, y)| x * y));
}

/// Each row of a matrix times its factor.
pub fn scale_rows(x: &mut [f32], factors: &[f32]) {
    let width = x.len() / factors.len();
    for (x, factor) in x.chunks_exact_mut(width).zip(factors) {
        x.iter_mut().for_each(|x| *x *= factor);
    }
}
