//! What the CPU kernels share: slices of Flex tensors, matrix products, vectorised functions.

pub mod gemm;
pub mod heads;
pub mod math;
pub mod rows;

use burn::tensor::{Bytes, DType, Shape};
use burn_flex::{FlexTensor, Layout};

/// `tensor` itself if it is contiguous, else a contiguous copy.
pub fn contiguous(tensor: &FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() { tensor.clone() } else { tensor.to_contiguous() }
}

/// The elements of a contiguous f32 tensor.
///
/// # Panics
/// When the tensor is not contiguous or not f32: call [`contiguous`] first.
pub fn slice(tensor: &FlexTensor) -> &[f32] {
    tensor.as_slice::<f32>().expect("a contiguous f32 tensor")
}

/// The elements of an integer tensor as i32.
///
/// # Panics
/// When the tensor is neither i32 nor i64.
pub fn int_vec(tensor: &FlexTensor) -> Vec<i32> {
    let tensor = contiguous(tensor);
    match tensor.dtype() {
        DType::I32 => tensor.as_slice::<i32>().expect("contiguous").to_vec(),
        DType::I64 => {
            tensor.as_slice::<i64>().expect("contiguous").iter().map(|&x| x as i32).collect()
        }
        other => panic!("expected an integer tensor, found {other:?}"),
    }
}

/// The shape of a tensor as plain sizes.
pub fn dims(tensor: &FlexTensor) -> Vec<usize> {
    tensor.layout().shape().to_vec()
}

/// A contiguous tensor from its elements.
///
/// # Panics
/// When the number of elements does not match the shape.
pub fn from_vec(data: Vec<f32>, shape: &[usize]) -> FlexTensor {
    let shape = Shape::from(shape.to_vec());
    assert_eq!(data.len(), shape.num_elements(), "elements of a tensor of shape {shape:?}");
    FlexTensor::new(Bytes::from_elems(data), Layout::contiguous(shape), DType::F32)
}

/// A tensor from its elements and the strides of its dimensions, in elements.
pub fn from_vec_strided(data: Vec<f32>, shape: &[usize], strides: &[usize]) -> FlexTensor {
    let shape = Shape::from(shape.to_vec());
    assert_eq!(data.len(), shape.num_elements(), "elements of a tensor of shape {shape:?}");
    let strides = strides.iter().map(|&s| s as isize).collect();
    FlexTensor::new(Bytes::from_elems(data), Layout::new(shape, strides, 0), DType::F32)
}

/// The elements of an f32 tensor in memory order, or `None` if its memory has gaps or repeats.
pub fn dense(tensor: &FlexTensor) -> Option<&[f32]> {
    let layout = tensor.layout();
    let shape = layout.shape().to_vec();
    let mut steps: Vec<_> = layout.strides().iter().copied().zip(shape).collect();
    steps.retain(|&(_, size)| size != 1);
    steps.sort_unstable();
    let mut next = 1;
    for (stride, size) in steps {
        if stride != next {
            return None;
        }
        next *= size as isize;
    }
    Some(&tensor.storage::<f32>()[layout.start_offset()..][..layout.num_elements()])
}

/// A tensor with the shape and the memory order of `model`, which is [`dense`].
pub fn from_vec_like(data: Vec<f32>, model: &FlexTensor) -> FlexTensor {
    let layout = model.layout();
    assert_eq!(
        data.len(),
        layout.num_elements(),
        "elements of a tensor of shape {:?}",
        layout.shape()
    );
    let layout = Layout::new(layout.shape().clone(), layout.strides().to_vec(), 0);
    FlexTensor::new(Bytes::from_elems(data), layout, DType::F32)
}

/// The elementwise sum of equally long vectors, added in order.
pub fn sum_in_order(parts: &[Vec<f32>]) -> Vec<f32> {
    let mut total = parts[0].clone();
    for part in &parts[1..] {
        math::add_to(&mut total, part);
    }
    total
}

/// A buffer of `len` elements that the caller overwrites completely.
pub fn buffer(len: usize) -> Vec<f32> {
    // Zeroed by the allocator: fresh pages cost nothing extra, and uninitialised memory is never read.
    vec![0.0; len]
}

/// Rows per parallel task, so that a task has at least `elements` elements of work.
///
/// Depends only on the sizes, not on the number of threads, so that the order of sums over tasks is fixed.
pub fn rows_per_task(row: usize, elements: usize) -> usize {
    elements.div_ceil(row.max(1)).max(1)
}
