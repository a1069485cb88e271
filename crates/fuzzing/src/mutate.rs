//! Changes of bytes.

use proptest::prelude::*;
use proptest::sample::Index;

/// Numbers at which readers fail more often.
const NUMBERS: [u64; 8] = [0, 1, 0x7f, 0xff, 0x7fff_ffff, 0xffff_ffff, i64::MAX as u64, u64::MAX];

/// The most bytes of a piece that moves.
const PIECE: usize = 64;

#[derive(Clone, Debug)]
enum Change {
    Flip(Index, u8),
    Truncate(Index),
    Remove(Index, usize),
    Overwrite(Index, Vec<u8>),
    Insert(Index, Vec<u8>),
    /// Copies a piece of another seed, or of the same one.
    Splice(Index, Index, Index, usize),
}

/// Positions anywhere, at the start, or at the end, where headers and footers are.
#[derive(Clone, Debug)]
pub(crate) struct Edit {
    change: Change,
    near: u8,
}

fn change(words: &[&str]) -> impl Strategy<Value = Change> + use<> {
    let index = any::<Index>;
    let mut pieces: Vec<Vec<u8>> = words.iter().map(|word| word.as_bytes().to_vec()).collect();
    pieces.extend(
        NUMBERS
            .iter()
            .flat_map(|number| [1, 2, 4, 8].map(|bytes| number.to_le_bytes()[..bytes].to_vec())),
    );
    let piece = prop_oneof![
        2 => prop::sample::select(pieces),
        1 => prop::collection::vec(any::<u8>(), 1..16),
    ];
    prop_oneof![
        4 => (index(), 0..8u8).prop_map(|(at, bit)| Change::Flip(at, bit)),
        1 => index().prop_map(Change::Truncate),
        2 => (index(), 1..PIECE).prop_map(|(at, count)| Change::Remove(at, count)),
        3 => (index(), piece.clone()).prop_map(|(at, bytes)| Change::Overwrite(at, bytes)),
        2 => (index(), piece).prop_map(|(at, bytes)| Change::Insert(at, bytes)),
        2 => (index(), index(), index(), 1..PIECE)
            .prop_map(|(seed, from, to, count)| Change::Splice(seed, from, to, count)),
    ]
}

/// Any edit, which may insert a piece of `words`.
pub(crate) fn edit(words: &[&str]) -> impl Strategy<Value = Edit> + use<> {
    (change(words), any::<u8>()).prop_map(|(change, near)| Edit { change, near })
}

/// Applies an edit to `content`.
pub(crate) fn apply(edit: &Edit, seeds: &[Vec<u8>], content: &mut Vec<u8>) {
    // One of four positions is in the first 64 bytes, and one in the last.
    let place = |index: &Index, length: usize| match edit.near % 4 {
        0 => index.index(length.min(PIECE)),
        1 => length - 1 - index.index(length.min(PIECE)),
        _ => index.index(length),
    };
    if content.is_empty() {
        return;
    }
    let length = content.len();
    match &edit.change {
        Change::Flip(at, bit) => content[place(at, length)] ^= 1 << bit,
        Change::Truncate(at) => content.truncate(at.index(length)),
        Change::Remove(at, count) => {
            let at = place(at, length);
            content.drain(at..(at + count).min(length));
        }
        Change::Overwrite(at, bytes) => {
            let at = place(at, length);
            let count = bytes.len().min(length - at);
            content[at..at + count].copy_from_slice(&bytes[..count]);
        }
        Change::Insert(at, bytes) => {
            let at = place(at, length);
            content.splice(at..at, bytes.iter().copied());
        }
        Change::Splice(seed, from, to, count) => {
            let seed = &seeds[seed.index(seeds.len())];
            let from = from.index(seed.len());
            let piece = &seed[from..(from + count).min(seed.len())];
            let at = place(to, length);
            content.splice(at..at, piece.iter().copied());
        }
    }
}

/// One of the seeds with up to five changes; text formats also get pieces from `words`.
pub fn mutated(seeds: Vec<Vec<u8>>, words: &[&str]) -> impl Strategy<Value = Vec<u8>> + use<> {
    (any::<Index>(), prop::collection::vec(edit(words), 0..6)).prop_map(move |(seed, edits)| {
        let mut content = seeds[seed.index(seeds.len())].clone();
        edits.iter().for_each(|edit| apply(edit, &seeds, &mut content));
        content
    })
}
