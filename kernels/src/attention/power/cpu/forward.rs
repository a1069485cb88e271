//! The forward pass of a row.

use super::{Buffers, PowerRow, RowSums, TokenTile, powered};
use crate::attention::power::reference::{LEAST_TOTAL, RESOLUTION};
use crate::cpu::gemm::{Mat, gemm};
use crate::cpu::math;

/// The outputs of the forward pass for a row, `[group, seq_len, …]`.
pub(super) struct Output<'a> {
    pub o: &'a mut [f32],
    pub root: &'a mut [f32],
    pub total: &'a mut [f32],
}

impl PowerRow<'_> {
    pub(super) fn forward(&self, output: &mut Output) {
        let mut buffers = Buffers::default();
        let (chunk, mut past) = (self.chunk(), None);
        for start in (0..self.sizes.seq_len).step_by(chunk) {
            if start >= 2 * chunk {
                let (first, end) = (start - 2 * chunk, start - chunk);
                past = Some(self.fold(past.as_ref(), first, end, &mut buffers));
            }
            for tile in self.tiles(start) {
                self.decays(&tile, &mut buffers.decay);
                for head in 0..self.sizes.group {
                    self.forward_tile(head, &tile, past.as_ref(), &mut buffers, output);
                }
            }
        }
    }

    fn forward_tile(
        &self,
        head: usize,
        tile: &TokenTile,
        past: Option<&RowSums>,
        buffers: &mut Buffers,
        output: &mut Output,
    ) {
        let (p, values) = (self.op.p, self.sizes.value_dim);
        let (at, cols) = (self.at(head, tile), tile.cols());
        let Buffers { decay, weights, read, expansion, .. } = buffers;
        self.roots_of_weights(head, tile, decay, weights);
        let (roots, totals) = (&mut output.root[at.clone()], &mut output.total[at.clone()]);
        let floor = math::exp(self.op.floor() / p as f32);
        let mass_root = past.map_or(0.0, |past| (past.mass + LEAST_TOTAL).powf(1.0 / p as f32));
        for (i, weights) in weights.chunks_exact_mut(cols).enumerate() {
            let largest = weights.iter().fold(0.0f32, |a, t| if t.abs() > a { t.abs() } else { a });
            let most = mass_root * self.decay_root(tile.near, tile.first + i + 1);
            roots[i] = largest.max(most).max(floor);
            let inverse = 1.0 / roots[i];
            weights.iter_mut().for_each(|t| *t = powered(*t * inverse, p));
            totals[i] = math::sum(weights);
        }
        let o = &mut output.o[at.start * values..at.end * values];
        gemm(o, values, 1.0, Mat::new(weights, tile.n, cols, cols), self.values(tile), 0.0);
        if let Some(past) = past {
            let q = self.q_of(head, tile);
            self.op.expansion().apply_rows(q, &past.sums, values + 1, read, expansion);
            for (i, read) in read.chunks_exact(values + 1).enumerate() {
                let factor = self.factor(tile, i, roots[i]);
                let o = &mut o[i * values..][..values];
                o.iter_mut().zip(read).for_each(|(o, read)| *o += factor * read);
                totals[i] += factor * read[values];
                // Rounding can make a nearly vanishing sum of even powers negative.
                let least = factor * past.mass * RESOLUTION;
                totals[i] = if totals[i] < least { least } else { totals[i] };
            }
        }
        for (o, total) in o.chunks_exact_mut(values).zip(totals) {
            // An empty sum stays 0.
            *total = if *total <= LEAST_TOTAL { 1.0 } else { *total };
            let inverse = 1.0 / *total;
            o.iter_mut().for_each(|o| *o *= inverse);
        }
    }
}
