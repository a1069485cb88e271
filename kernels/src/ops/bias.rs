//! Operations with the inputs x, weight and an optional bias: `N` is 2 or 3.

/// x, weight and bias.
pub(super) fn inputs<T, const N: usize>(inputs: &[T; N]) -> (&T, &T, Option<&T>) {
    const { assert!(N == 2 || N == 3, "x, a weight and perhaps a bias") }
    (&inputs[0], &inputs[1], inputs.get(2))
}

/// Which of x, weight and bias require a gradient.
pub(super) fn needs<const N: usize>(needs: [bool; N]) -> [bool; 3] {
    std::array::from_fn(|i| needs.get(i).is_some_and(|needs| *needs))
}

/// The gradients of the `N` inputs.
pub(super) fn gradients<T, const N: usize>(mut all: [Option<T>; 3]) -> [Option<T>; N] {
    std::array::from_fn(|i| all[i].take())
}
