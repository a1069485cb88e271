//! How much text fits into a length.

/// The greatest n from `least` to `most` for which `fits(n)`, found by doubling steps from a guess and by
/// bisection; `least` is taken to fit.
///
/// A tokenizer may need fewer tokens for more text, so that a greater n may fit too; the one returned does.
pub(crate) fn greatest(
    least: usize,
    most: usize,
    guess: usize,
    fits: impl Fn(usize) -> bool,
) -> usize {
    let guess = guess.clamp(least, most);
    let (mut low, mut high) = (least, most + 1);
    let mut step = 1;
    if guess == least || fits(guess) {
        low = guess;
        while low + step < high {
            if fits(low + step) {
                low += step;
            } else {
                high = low + step;
            }
            step *= 2;
        }
    } else {
        high = guess;
        while high > low + step {
            if fits(high - step) {
                low = high - step;
            } else {
                high -= step;
            }
            step *= 2;
        }
    }
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle) { low = middle } else { high = middle }
    }
    low
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_greatest_is_found_from_any_guess(
            least in 0usize..50, above in 0usize..1000, bound in 0usize..1100, guess in 0usize..1200,
        ) {
            let most = least + above;
            let bound = bound.clamp(least, most);
            let found = greatest(least, most, guess, |n| n <= bound);
            prop_assert_eq!(found, bound);
        }
    }
}
