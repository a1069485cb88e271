//! The choice of a token on the CPU.

use super::Sampler;

/// Draws one token, see [`sample`](super::sample).
pub fn draw(logits: &[f32], sampler: &Sampler, uniform: f32) -> usize {
    let best = (0..logits.len())
        .max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a)))
        .expect("a vocabulary has entries");
    if !sampler.is_random() {
        return best;
    }
    let weight = |i: usize| f64::from((logits[i] - logits[best]) / sampler.temperature).exp();
    let kept = kept(logits, sampler, weight);
    let total: f64 = kept.iter().map(|&i| weight(i)).sum();
    let mut left = f64::from(uniform) * total;
    for &token in &kept {
        left -= weight(token);
        if left < 0.0 {
            return token;
        }
    }
    kept[kept.len() - 1]
}

/// The tokens that `sampler` keeps, in the order of the vocabulary.
pub fn kept(logits: &[f32], sampler: &Sampler, weight: impl Fn(usize) -> f64) -> Vec<usize> {
    let mut kept: Vec<usize> = (0..logits.len()).collect();
    let likelier = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    if let Some(k) = sampler.top_k.filter(|k| *k < kept.len()) {
        kept.select_nth_unstable_by(k.max(1) - 1, likelier);
        kept.truncate(k.max(1));
    }
    if let Some(top_p) = sampler.top_p {
        kept.sort_unstable_by(likelier);
        let total: f64 = kept.iter().map(|&i| weight(i)).sum();
        let mut sum = 0.0;
        let last = kept.iter().position(|&i| {
            sum += weight(i);
            sum >= f64::from(top_p) * total
        });
        kept.truncate(last.map_or(kept.len(), |last| last + 1));
    }
    kept.sort_unstable();
    kept
}
