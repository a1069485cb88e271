//! Colours, fonts and numbers that all plots share.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// The font family: what an SVG viewer picks for it, and the embedded font in a PNG.
pub(super) const FONT: &str = "sans-serif";
/// Size of titles.
pub(super) const TITLE_SIZE: i32 = 24;
/// Size of axis labels and legends.
pub(super) const LABEL_SIZE: i32 = 18;
/// Size of tick labels and cell values.
pub(super) const TICK_SIZE: i32 = 16;

/// Size of notes.
pub(super) const NOTE_SIZE: i32 = 14;

/// An upper bound of the width in pixels of a text of this size, in any sans-serif font: the viewer of an
/// SVG chooses its own.
pub(super) fn width(text: &str, size: i32) -> i32 {
    // Wide fonts take 0.62 of their size for an average letter.
    (text.chars().count() as i32 * size * 62 + 99) / 100
}

/// The size at which a text fits into `room` pixels: `size`, or less, at least that of notes.
pub(super) fn fit(text: &str, size: i32, room: i32) -> i32 {
    (NOTE_SIZE..=size).rev().find(|&size| width(text, size) <= room).unwrap_or(NOTE_SIZE)
}

/// As much of `name` as fits into `room` pixels, with an ellipsis if that is not all.
pub(super) fn cut(name: &str, room: i32) -> String {
    if width(name, TICK_SIZE) <= room {
        return name.to_string();
    }
    let mut kept = String::new();
    for c in name.chars() {
        if width(&format!("{kept}{c}…"), TICK_SIZE) > room {
            break;
        }
        kept.push(c);
    }
    kept + "…"
}

/// Colours of lines: the Okabe-Ito set, which colour-blind readers can tell apart, without its yellow,
/// which is faint on white.
const LINES: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
];

/// The colour of the nth line.
pub(super) fn line_colour(n: usize) -> RGBColor {
    LINES[n % LINES.len()]
}

/// The viridis map at eighths, interpolated: dark is low and bright is high, also in greyscale and for
/// colour-blind readers.
const VIRIDIS: [(f64, f64, f64); 9] = [
    (68.0, 1.0, 84.0),
    (71.0, 44.0, 122.0),
    (59.0, 81.0, 139.0),
    (44.0, 113.0, 142.0),
    (33.0, 144.0, 141.0),
    (39.0, 173.0, 129.0),
    (92.0, 200.0, 99.0),
    (170.0, 220.0, 50.0),
    (253.0, 231.0, 37.0),
];

/// The viridis colour of a share from 0 to 1.
pub(super) fn viridis(share: f64) -> RGBColor {
    let at = share.clamp(0.0, 1.0) * (VIRIDIS.len() - 1) as f64;
    let low = (at.floor() as usize).min(VIRIDIS.len() - 2);
    let (a, b, t) = (VIRIDIS[low], VIRIDIS[low + 1], at - low as f64);
    let mix = |a: f64, b: f64| (a + (b - a) * t).round() as u8;
    RGBColor(mix(a.0, b.0), mix(a.1, b.1), mix(a.2, b.2))
}

/// Black or white, whichever reads better on a colour.
pub(super) fn ink_on(RGBColor(r, g, b): RGBColor) -> RGBColor {
    let luminance = 0.299 * f64::from(r) + 0.587 * f64::from(g) + 0.114 * f64::from(b);
    if luminance > 140.0 { BLACK } else { WHITE }
}

/// A text style of this size and anchor.
pub(super) fn text<'a>(size: i32, h: HPos, v: VPos) -> TextStyle<'a> {
    (FONT, size).into_font().color(&BLACK).pos(Pos::new(h, v))
}

/// A number for a tick: at most three digits and a k, M, B, T, P or E; small numbers as `2.5e-4`.
pub(super) fn short(value: f64) -> String {
    if value != 0.0 && value.abs() < 0.01 {
        let text = format!("{value:.2e}");
        let (digits, power) = text.split_once('e').expect("an exponent");
        return format!("{}e{power}", digits.trim_end_matches('0').trim_end_matches('.'));
    }
    let (scaled, unit) = match value.abs() {
        v if v >= 1e18 => (value / 1e18, "E"),
        v if v >= 1e15 => (value / 1e15, "P"),
        v if v >= 1e12 => (value / 1e12, "T"),
        v if v >= 1e9 => (value / 1e9, "B"),
        v if v >= 1e6 => (value / 1e6, "M"),
        v if v >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let digits = match scaled.abs() {
        v if v >= 100.0 || v.fract() == 0.0 => 0,
        v if v >= 1.0 => 2,
        _ => 3,
    };
    let text = format!("{scaled:.digits$}");
    let text = match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.'),
        false => &text,
    };
    format!("{text}{unit}")
}

/// Round numbers that divide `low..=high` into about `wanted` parts.
pub(super) fn round_ticks(low: f64, high: f64, wanted: usize) -> Vec<f64> {
    let raw = (high - low) / wanted.max(1) as f64;
    if !raw.is_finite() || raw <= 0.0 {
        return vec![low];
    }
    let power = 10f64.powf(raw.log10().floor());
    let factor = [1.0, 2.0, 5.0, 10.0].into_iter().find(|factor| factor * power >= raw * 0.999);
    let step = factor.unwrap_or(10.0) * power;
    let first = (low / step - 1e-9).ceil() as i64;
    let last = (high / step + 1e-9).floor() as i64;
    (first..=last).map(|n| n as f64 * step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(round_ticks(0.0, 1.0, 5), [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]);
        assert_eq!(round_ticks(130.0, 970.0, 4), [500.0]);
        assert_eq!(round_ticks(3.0, 3.0, 4), [3.0]);
    }

    #[test]
    fn numbers_are_short() {
        let shown: Vec<String> =
            [0.0, 0.25, 1.5, 4096.0, 32768.0, 1.25e6, 2e9].into_iter().map(short).collect();
        assert_eq!(shown, ["0", "0.25", "1.5", "4096", "32.77k", "1.25M", "2B"]);
        let small: Vec<String> = [0.02, -0.0025, 6e-4, 1e-30].into_iter().map(short).collect();
        assert_eq!(small, ["0.02", "-2.5e-3", "6e-4", "1e-30"]);
    }

    #[test]
    fn viridis_goes_from_dark_to_bright() {
        assert_eq!(viridis(0.0), RGBColor(68, 1, 84));
        assert_eq!(viridis(1.0), RGBColor(253, 231, 37));
        assert_eq!(ink_on(viridis(0.0)), WHITE);
        assert_eq!(ink_on(viridis(1.0)), BLACK);
    }
}
