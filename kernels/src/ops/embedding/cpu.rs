//! The embedding table on the CPU.

use burn_flex::FlexTensor;
use rayon::prelude::*;

use crate::cpu::{buffer, contiguous, dims, from_vec, int_vec, math, rows_per_task, slice};

/// The rows of the tokens, and the table to save for the backward pass.
pub fn gather(weight: &FlexTensor, tokens: &FlexTensor) -> (FlexTensor, FlexTensor) {
    let weight = contiguous(weight);
    let [vocab, width] = dims(&weight)[..] else {
        panic!("the embedding's weight is {:?}, not a matrix", dims(&weight))
    };
    let (table, ids) = (slice(&weight), token_ids(tokens, vocab, "token id"));
    let mut y = buffer(ids.len() * width);
    let rows = rows_per_task(width, TASK);
    y.par_chunks_mut(rows * width).zip(ids.par_chunks(rows)).for_each(|(y, ids)| {
        for (y, &token) in y.chunks_exact_mut(width).zip(ids) {
            y.copy_from_slice(&table[token * width..][..width]);
        }
    });
    let shape = [&dims(tokens)[..], &[width]].concat();
    (from_vec(y, &shape), weight)
}

/// dweight_v = Σ dy over the positions of token v, in order.
pub fn backward(weight: &FlexTensor, tokens: &FlexTensor, grad: &FlexTensor) -> FlexTensor {
    let [vocab, width] = dims(weight)[..] else { unreachable!("checked by the forward pass") };
    let grad = contiguous(grad);
    let (dy, tokens) = (slice(&grad), token_ids(tokens, vocab, "token id"));
    let (places, ends) = places_by_token(&tokens, vocab);
    let mut dw = buffer(vocab * width);
    let rows = rows_per_task(width, TASK);
    dw.par_chunks_mut(rows * width).enumerate().for_each(|(task, dw)| {
        for (i, dw) in dw.chunks_exact_mut(width).enumerate() {
            let token = task * rows + i;
            let first = if token == 0 { 0 } else { ends[token - 1] };
            for &place in &places[first..ends[token]] {
                math::add_to(dw, &dy[place * width..][..width]);
            }
        }
    });
    from_vec(dw, &[vocab, width])
}

/// Elements per parallel task: few, because some tokens are far more frequent than others.
const TASK: usize = 1 << 12;

/// The elements of an integer tensor as indices into the vocabulary; `what` names them in errors.
///
/// # Panics
/// When one is outside `0..vocab`.
pub fn token_ids(tokens: &FlexTensor, vocab: usize, what: &str) -> Vec<usize> {
    let index = |(place, token): (usize, i32)| {
        let index = usize::try_from(token).ok().filter(|&index| index < vocab);
        index.unwrap_or_else(|| {
            panic!(
                "{what} {token} at place {place} of the batch is outside the vocabulary, 0..{vocab}"
            )
        })
    };
    int_vec(tokens).into_iter().enumerate().map(index).collect()
}

/// The positions sorted by token, in order within each token, and the end of each token's range.
fn places_by_token(tokens: &[usize], vocab: usize) -> (Vec<usize>, Vec<usize>) {
    let mut ends = vec![0; vocab];
    for &token in tokens {
        ends[token] += 1;
    }
    let mut next = 0;
    for end in &mut ends {
        // At first the start of the range; inserting its positions moves it to the end.
        next += std::mem::replace(end, next);
    }
    let mut places = vec![0; tokens.len()];
    for (place, &token) in tokens.iter().enumerate() {
        places[ends[token]] = place;
        ends[token] += 1;
    }
    (places, ends)
}
