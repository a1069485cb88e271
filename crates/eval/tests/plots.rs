//! Plots are complete and in the format of their file name.

use std::fs;

use longwall_eval::plot::{DotChart, DotRow, Heatmap, LineChart, Point, Scale, Series};
use longwall_eval::{Curve, CurveGroup, XAxis, plot_group_losses, plot_losses, plot_scalar};

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

/// The boxes `(left, top, right, bottom)` of the texts of an SVG, from their anchors and a wide font.
fn text_boxes(svg: &str) -> Vec<(String, [f64; 4])> {
    let texts = svg.split("<text ").skip(1).filter(|text| !text.contains("rotate("));
    let parse = |text: &str| {
        let attribute = |name: &str| {
            let from = text.find(&format!("{name}=\""))? + name.len() + 2;
            text[from..].split('"').next()
        };
        let (x, y): (f64, f64) = (attribute("x")?.parse().ok()?, attribute("y")?.parse().ok()?);
        let size: f64 = attribute("font-size")?.parse().ok()?;
        let content = text.split(">\n").nth(1)?.split('\n').next()?.to_string();
        let width = content.chars().count() as f64 * size * 0.6;
        let left = match attribute("text-anchor")? {
            "start" => x,
            "middle" => x - width / 2.0,
            _ => x - width,
        };
        Some((content, [left, y - size, left + width, y + size * 0.3]))
    };
    texts.filter_map(parse).collect()
}

#[test]
fn no_text_of_a_chart_covers_another_or_the_curves() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("chart.svg");
    for boundary in [1.0, 30.0, 64.0] {
        for lines in [0, 1, 4, 14] {
            let chart = |colour: usize| Series {
                name: if lines > 0 { format!("length {}", 64 << colour) } else { String::new() },
                points: (1..=64)
                    .map(|x| Point { x: f64::from(x), y: (x % 7) as f64, bar: Some((0.0, 7.0)) })
                    .collect(),
                colour,
                faint: false,
                dots: true,
                band: true,
            };
            LineChart {
                title: "In-context learning: a run with quite a long name, step 100000".to_string(),
                x_label: "position".to_string(),
                y_label: "loss".to_string(),
                x_scale: Scale::Linear,
                y_scale: Scale::Linear,
                y_range: None,
                note: Some("bars and bands: ± one standard error".to_string()),
                series: (0..lines.max(1)).map(chart).collect(),
                boundary: Some((boundary, "training length".to_string())),
            }
            .save(&path)
            .unwrap();
            let svg = fs::read_to_string(&path).unwrap();
            let boxes = text_boxes(&svg);
            assert!(boxes.iter().any(|(text, _)| text == "training length"));
            for (n, (text, a)) in boxes.iter().enumerate() {
                assert!(a[0] >= 0.0 && a[2] <= 960.0, "{text} leaves the picture: {a:?}");
                for (other, b) in &boxes[..n] {
                    let apart = a[2] <= b[0] || b[2] <= a[0] || a[3] <= b[1] || b[3] <= a[1];
                    assert!(apart, "{text} {a:?} covers {other} {b:?}");
                }
            }
            // Names stand above the highest point of the band.
            let band = svg.split("<polygon").nth(1).unwrap().split("points=\"").nth(1).unwrap();
            let points = band.split('"').next().unwrap().split_whitespace();
            let top = points.map(|p| p.split(',').nth(1).unwrap().parse::<f64>().unwrap());
            let top = top.fold(f64::INFINITY, f64::min);
            let name = boxes.iter().find(|(text, _)| text == "training length").unwrap();
            assert!(name.1[3] <= top + 0.5, "{name:?} covers the curve that reaches up to {top}");
        }
    }
}

#[test]
fn a_logarithmic_y_axis_is_labelled_with_powers_of_two() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("times.svg");
    let times = [(1024.0, 0.25), (4096.0, 4.0), (16_384.0, 64.0)];
    let points = times.map(|(x, y)| Point { x, y, bar: Some((0.9 * y, 1.1 * y)) });
    // A time of 0 has no place: the line has a gap.
    let points = points.into_iter().chain([Point { x: 65_536.0, y: 0.0, bar: None }]).collect();
    let name = "rope".to_string();
    let (faint, dots, band) = (false, true, false);
    LineChart {
        title: "Time".to_string(),
        x_label: "tokens".to_string(),
        y_label: "ms".to_string(),
        x_scale: Scale::Log2,
        y_scale: Scale::Log2,
        y_range: None,
        note: None,
        series: vec![Series { name, points, colour: 0, faint, dots, band }],
        boundary: None,
    }
    .save(&path)
    .unwrap();
    let svg = fs::read_to_string(&path).unwrap();
    let labels: Vec<String> = text_boxes(&svg).into_iter().map(|(text, _)| text).collect();
    for label in ["0.25", "4", "64", "1024", "16Ki"] {
        assert!(labels.iter().any(|text| text == label), "{label}: {labels:?}");
    }
    assert_eq!(svg.matches("<circle").count(), 7, "three points, their bars and the legend");
}

#[test]
fn empty_cells_are_hatched_and_explained() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("map.svg");
    let draw = |value: Option<f64>| {
        Heatmap {
            title: "Passkey retrieval".to_string(),
            x_label: "length (tokens)".to_string(),
            y_label: "depth (%)".to_string(),
            value_label: "accuracy".to_string(),
            x: vec!["500".to_string(), "1000".to_string()],
            y: vec!["5".to_string()],
            values: vec![vec![Some(1.0), value]],
            boundary: None,
        }
        .save(&path)
        .unwrap();
        fs::read_to_string(&path).unwrap()
    };
    assert!(draw(None).contains("no sample"));
    assert!(!draw(Some(0.5)).contains("no sample"));
}

#[test]
fn a_png_has_the_pixels_of_its_svg() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("loss.png");
    plot_losses(&[curve("wall", 2.6)], XAxis::Steps, &path, 0.9, None).unwrap();
    let bytes = fs::read(&path).unwrap();
    let size = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
    // Twice the size of the SVG: 960 by 600 and one row of names.
    assert_eq!((size(16), size(20)), (1920, 1248));
}

#[test]
fn a_single_point_is_drawn_without_a_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("loss.svg");
    let short = Curve { train: vec![(1.0, 5.0)], validation: vec![(1.0, 4.0)], ..Curve::default() };
    plot_losses(&[short], XAxis::Steps, &path, 0.9, None).unwrap();
    let svg = fs::read_to_string(&path).unwrap();
    for line in svg.split("<polyline").skip(1) {
        let points = line.split("points=\"").nth(1).unwrap().split('"').next().unwrap();
        assert!(points.split_whitespace().count() > 1, "a line of the points {points}");
    }
    assert!(svg.contains("<circle"));
}

#[test]
fn the_losses_of_variants_are_means_over_their_seeds() {
    let dir = tempfile::tempdir().unwrap();
    let group = |name: &str, floors: &[f64]| CurveGroup {
        name: name.to_string(),
        curves: floors.iter().map(|&floor| curve("seed", floor)).collect(),
    };
    let draw = |groups: &[CurveGroup]| {
        let path = dir.path().join("loss.svg");
        plot_group_losses(groups, XAxis::Tokens, &path, 0.9).unwrap();
        fs::read_to_string(&path).unwrap()
    };
    let svg = draw(&[group("rope", &[2.9, 3.1]), group("wall", &[2.6, 2.7])]);
    for label in ["rope: training", "rope: validation", "wall: validation", "lowest to highest"] {
        assert!(svg.contains(label), "{label}");
    }
    // Two variants, each with a band of training and one of validation.
    assert_eq!(svg.matches("<polygon").count(), 4);
    let svg = draw(&[group("rope", &[2.9])]);
    assert!(!svg.contains("<polygon") && !svg.contains("seed"));
}

#[test]
fn a_dot_chart_shows_values_bars_and_seeds() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("accuracy.svg");
    let row = |name: &str, value: Option<f64>, parts: &[f64]| DotRow {
        name: name.to_string(),
        value,
        bar: value.map(|value| (value - 0.1, value + 0.05)),
        parts: parts.to_vec(),
    };
    let long = "a variant whose name has many more letters than there is room for in the picture";
    let rows = vec![
        row("rope", Some(0.5), &[0.4, 0.6]),
        row(long, Some(0.95), &[0.95]),
        row("not finished", None, &[]),
    ];
    let chart = DotChart {
        title: "kinds: passkey.accuracy".to_string(),
        x_label: "passkey.accuracy".to_string(),
        x_range: Some((0.0, 1.0)),
        note: "bars: 95 % intervals (Wilson)".to_string(),
        rows,
    };
    chart.save(&path).unwrap();
    let svg = fs::read_to_string(&path).unwrap();
    // Two values, and the two seeds of the first; a single seed is its value.
    assert_eq!(svg.matches("<circle").count(), 4);
    let boxes = text_boxes(&svg);
    for (n, (text, a)) in boxes.iter().enumerate() {
        assert!(a[0] >= 0.0 && a[2] <= 960.0, "{text} leaves the picture: {a:?}");
        for (other, b) in &boxes[..n] {
            let apart = a[2] <= b[0] || b[2] <= a[0] || a[3] <= b[1] || b[3] <= a[1];
            assert!(apart, "{text} {a:?} covers {other} {b:?}");
        }
    }
    chart.save(&dir.path().join("accuracy.png")).unwrap();
    let empty = DotChart { rows: vec![row("rope", None, &[])], ..chart };
    assert!(empty.save(&path).unwrap_err().to_string().contains("there is no value to draw"));
}

#[test]
fn a_scalar_of_several_runs_is_drawn_under_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("norm.svg");
    let curves = ["rope", "wall"].map(|name| (name.to_owned(), curve(name, 1.0).train));
    plot_scalar(&curves, "train/grad_norm", XAxis::Tokens, &path, 0.9, None).unwrap();
    let text = fs::read_to_string(&path).unwrap();
    for label in ["rope", "wall", "train/grad_norm", "training tokens", "</svg>"] {
        assert!(text.contains(label), "{label}");
    }
    let error = plot_scalar(&curves, "x", XAxis::Tokens, &path, 1.0, None).unwrap_err();
    assert!(error.to_string().contains("the smoothing is 1"), "{error}");
    let none = plot_scalar(&curves, "x", XAxis::Tokens, &path, 0.9, Some(0.1)).unwrap_err();
    assert!(none.to_string().contains("no point to draw"), "{none}");
}
