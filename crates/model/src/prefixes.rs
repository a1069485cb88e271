//! Sequences that share prefixes, each of which is read once.
//!
//! The sequences are the leaves of a tree of prefixes. The model reads the tokens between two branchings in one call, as
//! one sequence; each branch goes on with a copy of the decoding state, so this works with every attention kind. Results
//! differ from those of whole rows by rounding.

use burn::tensor::{Int, Tensor, TensorData};
use longwall_kernels::backend::OpBackend;

use crate::language_model::{LanguageModel, ModelState};

/// Tokens that the model reads of `sequences` if it reads each prefix that they share once.
pub fn distinct_tokens(sequences: &[&[u32]]) -> usize {
    let sorted = sorted(sequences);
    let firsts = sorted.first().map_or(0, |(_, first)| first.len());
    let pairs = sorted.windows(2).map(|pair| pair[1].1.len() - common(pair[0].1, pair[1].1));
    firsts + pairs.sum::<usize>()
}

/// ln p of a target after each of some places of `sequences`, and the most likely token there: as
/// [`LanguageModel::log_probs`], but a place is a sequence and a position in it.
pub fn log_probs<B: OpBackend>(
    model: &LanguageModel<B>,
    sequences: &[&[u32]],
    places: &[(usize, usize)],
    targets: &[u32],
    device: &B::Device,
) -> (Tensor<B, 1>, Tensor<B, 1, Int>) {
    let mut of_sequence = vec![vec![]; sequences.len()];
    for (at, (sequence, position)) in places.iter().enumerate() {
        of_sequence[*sequence].push((at, *position));
    }
    let (mut found, mut hidden) = (vec![], vec![]);
    read(model, sequences, device, |node, x, _| {
        let end = node.first + x.dims()[1];
        let here = node.sequences.iter().flat_map(|(sequence, _)| &of_sequence[*sequence]);
        let here: Vec<_> = here.filter(|(_, at)| (node.first..end).contains(at)).collect();
        if !here.is_empty() {
            let rows: Vec<i32> = here.iter().map(|(_, at)| (at - node.first) as i32).collect();
            hidden.push(x.select(1, Tensor::from_ints(rows.as_slice(), device)));
            found.extend(here.iter().map(|(place, _)| *place));
        }
    });
    let mut order = vec![0i32; places.len()];
    for (at, place) in found.iter().enumerate() {
        order[*place] = at as i32;
    }
    let hidden = Tensor::cat(hidden, 1).select(1, Tensor::from_ints(order.as_slice(), device));
    let targets: Vec<i32> = targets.iter().map(|&target| target as i32).collect();
    model.log_probs_of(hidden, Tensor::from_ints(targets.as_slice(), device))
}

/// The states after each of the sequences, given to `visit` with the sequence's index.
pub(crate) fn states<B: OpBackend>(
    model: &LanguageModel<B>,
    sequences: &[&[u32]],
    device: &B::Device,
    mut visit: impl FnMut(usize, ModelState<B>),
) {
    let empty = sequences.iter().enumerate().filter(|(_, tokens)| tokens.is_empty());
    empty.for_each(|(sequence, _)| visit(sequence, model.init_state()));
    read(model, sequences, device, |node, _, state| {
        for (sequence, tokens) in node.sequences {
            if tokens.len() == state.position() {
                visit(*sequence, state.clone());
            }
        }
    });
}

/// Part of the tree: tokens that some sequences share.
struct Node<'a> {
    /// Indices and tokens of the sequences, sorted by their tokens.
    sequences: &'a [(usize, &'a [u32])],
    /// Position of the first token.
    first: usize,
}

/// Reads the tree. `visit` gets each node, the output of the last block after the final norm for its tokens,
/// `[1, n, width]`, and the state after them.
fn read<B: OpBackend>(
    model: &LanguageModel<B>,
    sequences: &[&[u32]],
    device: &B::Device,
    mut visit: impl FnMut(&Node<'_>, Tensor<B, 3>, &ModelState<B>),
) {
    let sorted = sorted(sequences);
    // The last one is next: depth first, with one state for each branching above.
    let mut open = vec![(0..sorted.len(), model.init_state())];
    while let Some((range, mut state)) = open.pop() {
        let (start, sequences) = (range.start, &sorted[range]);
        let [Some((_, a)), Some((_, b))] = [sequences.first(), sequences.last()] else { continue };
        let (first, end) = (state.position(), common(a, b));
        if end > first {
            let tokens: Vec<i32> = a[first..end].iter().map(|&token| token as i32).collect();
            let tokens = TensorData::new(tokens, [1, end - first]);
            let x = model.extend_hidden(Tensor::from_data(tokens, device), &mut state);
            visit(&Node { sequences, first }, x, &state);
        }
        let mut at = start;
        for branch in sequences.chunk_by(|a, b| a.1.get(end) == b.1.get(end)) {
            if branch[0].1.len() > end {
                open.push((at..at + branch.len(), state.clone()));
            }
            at += branch.len();
        }
    }
}

/// The sequences with their indices, sorted by tokens: those with a common prefix are neighbours.
fn sorted<'a>(sequences: &[&'a [u32]]) -> Vec<(usize, &'a [u32])> {
    let mut sorted: Vec<_> = sequences.iter().copied().enumerate().collect();
    sorted.sort_by_key(|(_, tokens)| *tokens);
    sorted
}

/// Tokens that two sequences begin with.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_shared_prefix_counts_once() {
        let count = |sequences: &[&[u32]]| distinct_tokens(sequences);
        assert_eq!(count(&[]), 0);
        assert_eq!(count(&[&[1, 2, 3], &[1, 2, 4], &[1, 2], &[5], &[1, 2, 3]]), 5);
    }
}
