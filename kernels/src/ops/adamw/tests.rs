use super::*;
use crate::backend::{primitive, tensor};
use crate::cpu::slice;
use burn::tensor::Tensor;

/// A step on one parameter, its gradient, m and v.
fn step<B: OpBackend>(tensors: [Tensor<B, 1>; 4], copy: Option<DType>) -> Stepped<Tensor<B, 1>> {
    let (new, copy) = adamw::<B>(&STEP, tensors.map(primitive), copy);
    (new.map(tensor), copy.map(tensor))
}

const STEP: AdamwStep = AdamwStep {
    lr: 0.01,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
    step: 3,
    grad_scale: 0.5,
};

fn oracle(p: f64, g: f64, m: f64, v: f64) -> [f64; 3] {
    let g = g * 0.5;
    let m = 0.9 * m + 0.1 * g;
    let v = 0.95 * v + 0.05 * g * g;
    let (mh, vh) = (m / (1.0 - 0.9f64.powi(3)), v / (1.0 - 0.95f64.powi(3)));
    [p - 0.01 * (mh / (vh.sqrt() + 1e-8) + 0.1 * p), m, v]
}

#[test]
fn kernel_and_reference_follow_the_definition() {
    let n = 40_001;
    let wave = |a: f32, b: f32| -> Vec<f32> { (0..n).map(|i| (i as f32 * a + b).sin()).collect() };
    let (p, g, m) = (wave(0.1, 0.0), wave(0.7, 1.0), wave(0.3, 2.0));
    let v: Vec<f32> = wave(0.2, 0.5).iter().map(|x| x * x + 1e-3).collect();
    let device = Default::default();
    let tensors = || [&p, &g, &m, &v].map(|x| Tensor::<Flex, 1>::from_floats(&x[..], &device));
    let tensors = || tensors().map(primitive);
    let op = Adamw { step: STEP, copy: None };
    for (result, _) in [op.cpu(tensors()), op.reference::<Flex>(tensors())] {
        for i in 0..n {
            let want = oracle(p[i].into(), g[i].into(), m[i].into(), v[i].into());
            for (got, want) in result.iter().zip(want) {
                let got = f64::from(slice(got)[i]);
                assert!((got - want).abs() < 3e-7 * (1.0 + want.abs()), "{got} for {want}");
            }
        }
    }
}

#[test]
fn the_copy_is_the_new_parameter_rounded() {
    let device = Default::default();
    let x = |a: f32| Tensor::<Flex, 1>::from_floats([a, 2.7 * a, 0.3], &device);
    let ([new, _, _], copy) = step([1.1, 0.7, 0.2, 0.5].map(x), Some(DType::BF16));
    let copy = copy.expect("a copy was asked for");
    assert_eq!(copy.dtype(), DType::BF16);
    let rounded = |x: f32| burn::tensor::bf16::from_f32(x).to_f32();
    let new: Vec<f32> = new.into_data().iter::<f32>().map(rounded).collect();
    assert_eq!(copy.into_data().iter::<f32>().collect::<Vec<_>>(), new);
}

#[test]
fn a_shared_tensor_is_not_changed() {
    let device = Default::default();
    let p = Tensor::<Flex, 1>::from_floats([1.0, 2.0], &device);
    let z = Tensor::<Flex, 1>::zeros([2], &device);
    let g = Tensor::<Flex, 1>::ones([2], &device);
    let ([new, _, _], _) = step([p.clone(), g, z.clone(), z], None);
    assert_eq!(p.into_data().to_vec::<f32>().unwrap(), [1.0, 2.0]);
    assert_ne!(new.into_data().to_vec::<f32>().unwrap(), [1.0, 2.0]);
}

mod cuda {
    use burn::tensor::{TensorData, bf16};

    use super::*;
    use crate::Cuda;

    fn values<const D: usize>(x: Tensor<Cuda, D>) -> Vec<f32> {
        x.into_data().iter::<f32>().collect()
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn follows_the_definition_and_copies_the_parameter() {
        let n = 40_001;
        let wave =
            |a: f32, b: f32| -> Vec<f32> { (0..n).map(|i| (i as f32 * a + b).sin()).collect() };
        let (p, m) = (wave(0.1, 0.0), wave(0.3, 2.0));
        let v: Vec<f32> = wave(0.2, 0.5).iter().map(|x| x * x + 1e-3).collect();
        let g: Vec<f32> = wave(0.7, 1.0).iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        for dtype in [DType::F32, DType::BF16] {
            let on = |x: &[f32], dtype: DType| {
                let data = TensorData::new(x.to_vec(), [n]).convert_dtype(dtype);
                Tensor::<Cuda, 1>::from_data(data, (&Default::default(), dtype))
            };
            let [p_, m_, v_] = [&p, &m, &v].map(|x| on(x, DType::F32));
            let (new, copy) = step([p_, on(&g, dtype), m_, v_], Some(DType::BF16));
            let copy = copy.expect("a copy was asked for");
            assert_eq!(copy.dtype(), DType::BF16);
            let (new, copy) = (new.map(values), values(copy));
            for i in 0..n {
                let want = oracle(p[i].into(), g[i].into(), m[i].into(), v[i].into());
                for (got, want) in new.iter().zip(want) {
                    let got = f64::from(got[i]);
                    assert!((got - want).abs() < 3e-7 * (1.0 + want.abs()), "{got} for {want}");
                }
                assert_eq!(copy[i], bf16::from_f32(new[0][i]).to_f32());
            }
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn a_shared_tensor_is_not_changed_and_another_is_updated_in_place() {
        let device = Default::default();
        let p = Tensor::<Cuda, 1>::from_floats([1.0, 2.0], &device);
        let z = || Tensor::<Cuda, 1>::zeros([2], &device);
        let g = Tensor::<Cuda, 1>::ones([2], &device);
        let ([new, m, v], _) = step([p.clone(), g.clone(), z(), z()], None);
        assert_eq!(values(p), [1.0, 2.0]);
        assert_ne!(values(new.clone()), [1.0, 2.0]);
        let place = |x: &Tensor<Cuda, 1>| {
            let x = primitive(x.clone());
            x.client.get_resource(x.handle.clone()).expect("the buffer exists").resource().ptr
        };
        let before = place(&new);
        let ([new, _, _], _) = step([new, g, m, v], None);
        assert_eq!(place(&new), before);
    }
}
