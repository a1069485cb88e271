use burn::tensor::{Tensor, TensorData};

use super::*;
use crate::Cpu;

#[test]
fn an_open_channel_is_always_on_and_others_have_their_mean_and_deviation() {
    // Two tokens of one head with three channels: open, closed by a half at the second token, and nearly open.
    let factors = [1.0f32, 1.0, 0.9995, 1.0, 0.5, 0.9995].map(f32::ln);
    let data = TensorData::new(factors.to_vec(), [1, 1, 2, 3]);
    let mut probe = Probe::default();
    report(Tensor::<Cpu, 4>::from_data(data, &Default::default()), &mut probe);
    let channels = |metric: Metric| {
        let observation = probe.observations().iter().find(|x| x.metric == metric);
        observation.expect("a report").channels[0].clone()
    };
    let close = |found: Vec<f64>, expected: [f64; 3]| {
        assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{found:?}");
    };
    close(channels(RETENTION), [1.0, 0.75, 0.9995]);
    close(channels(RETENTION_DEVIATION), [0.0, 0.25, 0.0]);
    assert_eq!(probe.mean(ALWAYS_ON_FRACTION), Some(2.0 / 3.0));
}
