//! The tensors of oracles.

/// A dense f64 tensor for oracles.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor64 {
    /// Sizes of the dimensions.
    pub shape: Vec<usize>,
    /// Elements in row-major order.
    pub data: Vec<f64>,
}

impl Tensor64 {
    /// A tensor from its elements.
    ///
    /// # Panics
    /// When the number of elements does not match the shape.
    pub fn new(shape: &[usize], data: Vec<f64>) -> Self {
        assert_eq!(shape.iter().product::<usize>(), data.len(), "elements of shape {shape:?}");
        Tensor64 { shape: shape.to_vec(), data }
    }

    /// A tensor from a function of the index.
    pub fn from_fn(shape: &[usize], f: impl Fn(&[usize]) -> f64) -> Self {
        let mut index = vec![0; shape.len()];
        let len = shape.iter().product();
        let mut data = Vec::with_capacity(len);
        for _ in 0..len {
            data.push(f(&index));
            for dim in (0..shape.len()).rev() {
                index[dim] += 1;
                if index[dim] < shape[dim] {
                    break;
                }
                index[dim] = 0;
            }
        }
        Tensor64 { shape: shape.to_vec(), data }
    }

    /// The element at an index.
    pub fn at(&self, index: &[usize]) -> f64 {
        assert_eq!(index.len(), self.shape.len());
        let flat = index.iter().zip(&self.shape).fold(0, |flat, (i, size)| {
            assert!(i < size, "index {index:?} of shape {:?}", self.shape);
            flat * size + i
        });
        self.data[flat]
    }
}
