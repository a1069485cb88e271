//! Matrix products on slices through the `gemm` crate.

use rayon::prelude::*;

/// A strided matrix with the elements `data[row * row_stride + col * col_stride]`.
#[derive(Clone, Copy)]
pub struct Mat<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Mat<'a> {
    /// A row-major matrix with the stride `row_stride` between rows, in elements.
    pub fn new(data: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        let mat = Mat { data, rows, cols, row_stride, col_stride: 1 };
        mat.check();
        mat
    }

    /// The transpose, without moving data.
    pub fn t(self) -> Self {
        Mat {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }

    fn rows(self, first: usize, rows: usize) -> Self {
        Mat { data: &self.data[first * self.row_stride..], rows, ..self }
    }

    fn check(&self) {
        if self.rows > 0 && self.cols > 0 {
            let last = (self.rows - 1) * self.row_stride + (self.cols - 1) * self.col_stride;
            assert!(
                last < self.data.len(),
                "matrix of {} elements, last at {last}",
                self.data.len()
            );
        }
    }
}

/// `dst = beta * dst + alpha * a · b`, where `dst` is row-major with `stride` elements between rows.
///
/// With `beta` 0, `dst` is not read. Runs on the calling thread.
///
/// # Panics
/// When the sizes do not match.
pub fn gemm(dst: &mut [f32], stride: usize, alpha: f32, a: Mat, b: Mat, beta: f32) {
    assert_eq!(a.cols, b.rows, "inner sizes of a matrix product");
    let (m, n, k) = (a.rows, b.cols, a.cols);
    if m == 0 || n == 0 {
        return;
    }
    assert!((m - 1) * stride + n <= dst.len() && n <= stride, "a product larger than its place");
    a.check();
    b.check();
    // SAFETY: the three assertions above keep every access inside its slice, and `dst` is borrowed
    // exclusively, so it overlaps neither factor.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst.as_mut_ptr(),
            1,
            stride as isize,
            beta != 0.0,
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            beta,
            alpha,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// `a · b` on all threads, row-major, parallel over rows of the result.
pub fn matmul(a: Mat, b: Mat) -> Vec<f32> {
    let mut dst = super::buffer(a.rows * b.cols);
    matmul_into(&mut dst, a, b, 0.0);
    dst
}

/// `dst = beta * dst + a · b` on all threads, with a contiguous row-major `dst`.
pub fn matmul_into(dst: &mut [f32], a: Mat, b: Mat, beta: f32) {
    let (m, n) = (a.rows, b.cols);
    if m == 0 || n == 0 {
        return;
    }
    let threads = rayon::current_num_threads();
    if threads == 1 || m * n * a.cols < 64 * 64 * 64 {
        return gemm(dst, n, 1.0, a, b, beta);
    }
    let rows = m.div_ceil(threads).next_multiple_of(16);
    dst.par_chunks_mut(rows * n).enumerate().for_each(|(task, dst)| {
        gemm(dst, n, 1.0, a.rows(task * rows, dst.len() / n), b, beta);
    });
}
