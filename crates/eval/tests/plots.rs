//! Plots are complete and in the format of their file name.

use std::fs;

use longwall_eval::plot::Heatmap;
use longwall_eval::{Curve, XAxis, plot_losses};

fn curve(name: &str, floor: f64) -> Curve {
    let loss = |step: f64| floor + 6.0 * (-step / 120.0).exp();
    let noise = |step: f64| ((step * 12.9898).sin() * 43758.5453).fract() * 0.25;
    let steps = || (1..=1000).map(f64::from);
    Curve {
        name: name.to_string(),
        train: steps().map(|step| (step, loss(step) + noise(step))).collect(),
        validation: steps().step_by(100).map(|step| (step, loss(step) + 0.1)).collect(),
    }
}

#[test]
fn loss_curves_are_drawn_as_svg_and_png() {
    let dir = tempfile::tempdir().unwrap();
    let curves = [curve("rope", 2.9), curve("wall", 2.6)];
    let svg = dir.path().join("plots/loss.svg");
    plot_losses(&curves, XAxis::Steps, &svg, 0.9, None).unwrap();
    let text = fs::read_to_string(&svg).unwrap();
    for label in ["rope: training", "wall: validation", "loss (nats per token)", "step", "</svg>"] {
        assert!(text.contains(label), "{label}");
    }
    let png = dir.path().join("loss.PNG");
    plot_losses(&curves, XAxis::Tokens, &png, 0.0, None).unwrap();
    let bytes = fs::read(&png).unwrap();
    assert!(bytes.starts_with(b"\x89PNG") && bytes.len() > 10_000, "{} bytes", bytes.len());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "no temporary file is left");
}

#[test]
fn what_cannot_be_drawn_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let curves = [curve("rope", 2.9)];
    let plot = |curves: &[Curve], name: &str, smoothing: f64| {
        let path = dir.path().join(name);
        let error = plot_losses(curves, XAxis::Seconds, &path, smoothing, None).unwrap_err();
        error.to_string().replace(dir.path().to_str().unwrap(), "DIR")
    };
    insta::assert_snapshot!(plot(&curves, "loss.pdf", 0.5), @r#"
    cannot draw DIR/loss.pdf: the extension is "pdf"; allowed: "svg" (vector) and "png" (pixels)
      hint: end the file's name in .svg or .png
    "#);
    insta::assert_snapshot!(plot(&curves, "loss.svg", 1.0), @r"
    cannot draw DIR/loss.svg: the smoothing is 1; allowed: 0 (none) to below 1
      hint: give a smoothing such as 0.9
    ");
    insta::assert_snapshot!(plot(&[], "loss.svg", 0.5), @r"
    cannot draw DIR/loss.svg: there is no point to draw
      hint: give at least one curve with one finite value
    ");
    let diverged = Curve { train: vec![(1.0, f64::NAN)], ..Curve::default() };
    plot(&[diverged], "loss.svg", 0.5);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_curve_with_gaps_is_drawn() {
    let dir = tempfile::tempdir().unwrap();
    let mut gaps = curve("gaps", 2.0);
    gaps.train[10].1 = f64::NAN;
    gaps.train[11].1 = f64::INFINITY;
    plot_losses(&[gaps], XAxis::Steps, &dir.path().join("loss.svg"), 0.5, None).unwrap();
}

/// The labels of the vertical axis, to the left of the plot.
fn loss_labels(svg: &str) -> Vec<f64> {
    let labels = svg.split("<text x=\"").skip(1).filter_map(|text| {
        let x: f64 = text.split('"').next()?.parse().ok()?;
        let label = text.split(">\n").nth(1)?.split('\n').next()?;
        (x < 90.0).then(|| label.parse().ok()).flatten()
    });
    labels.collect()
}

#[test]
fn losses_above_the_limit_are_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("loss.svg");
    let curves = [curve("rope", 2.9), curve("wall", 2.6)];
    let highest = |max_loss: Option<f64>| {
        plot_losses(&curves, XAxis::Steps, &path, 0.9, max_loss).unwrap();
        let svg = fs::read_to_string(&path).unwrap();
        assert!(svg.contains("rope: training") && svg.contains("wall: validation"));
        let labels = loss_labels(&svg);
        assert!(labels.len() > 3, "{labels:?}");
        labels.into_iter().fold(0.0, f64::max)
    };
    assert!(highest(None) > 7.0);
    assert!(highest(Some(3.5)) <= 3.5);
    let error = plot_losses(&curves, XAxis::Steps, &path, 0.9, Some(1.0)).unwrap_err();
    assert!(error.to_string().contains("no loss is at or below 1"), "{error}");
}

#[test]
fn cells_show_their_values_where_there_is_room() {
    let dir = tempfile::tempdir().unwrap();
    let map = |count: usize| Heatmap {
        title: "Needle in a haystack".to_string(),
        x_label: "length (tokens)".to_string(),
        y_label: "depth (%)".to_string(),
        value_label: "accuracy".to_string(),
        x: (0..count).map(|n| format!("{}", 1000 + n * 100)).collect(),
        y: (0..count).map(|n| format!("{n}")).collect(),
        values: vec![vec![Some(0.375); count]; count],
        boundary: None,
    };
    let path = dir.path().join("map.svg");
    map(11).save(&path).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap().matches("0.38").count(), 121);
    map(35).save(&path).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap().matches("0.38").count(), 0);
}
