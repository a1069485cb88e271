use super::*;
use crate::testing::{Case, Tensor64, check, check_on};

/// The difference by its definition.
fn oracle(inputs: &[Tensor64]) -> Tensor64 {
    let [o, lambda] = inputs else { panic!("o and lambda") };
    let [batch, heads, tokens, channels] = o.shape[..] else { panic!("o has 4 dimensions") };
    Tensor64::from_fn(&[batch, heads / 2, tokens, channels], |at| {
        let second = [at[0], heads / 2 + at[1], at[2], at[3]];
        o.at(at) - lambda.data[0] * o.at(&second)
    })
}

/// One block, several, and rows of an odd width.
const SHAPES: [[usize; 4]; 4] = [[1, 2, 1, 1], [2, 4, 5, 8], [1, 6, 33, 7], [2, 4, 40, 16]];

#[test]
fn agrees_with_the_oracle_and_its_gradients() {
    for shape in SHAPES {
        check(Case::new(ViewDifference, &[&shape, &[1]]), oracle);
    }
}

mod cuda {
    use super::*;
    use crate::Cuda;
    use crate::ops::support::assert_views_agree;
    use crate::ops::support::gpu::wave;

    #[test]
    #[ignore = "needs a GPU"]
    fn agrees_with_the_oracle_and_its_gradients() {
        for shape in SHAPES {
            let case = || Case::new(ViewDifference, &[&shape, &[1]]);
            check_on::<Cuda, _, 2>(case(), oracle);
            check_on::<Cuda, _, 2>(case().bf16(&[0]).parameters(&[1]), oracle);
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn a_view_gives_what_its_copy_gives() {
        let view = wave([2, 5, 4, 8], 0.0).swap_dims(1, 2);
        assert_views_agree(view, |o| view_difference(o, wave([1], 0.7)));
    }
}
