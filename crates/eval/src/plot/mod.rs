//! Plots as SVG or PNG: loss curves, heat maps, lines and dots with error bars.
//!
//! A PNG file is the SVG, rasterised with a font that the binary holds, so that the machine needs none.

mod axis;
mod dots;
mod groups;
mod heatmap;
mod legend;
mod lines;
mod losses;
mod style;

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use resvg::{tiny_skia, usvg};

pub use dots::{DotChart, DotRow};
pub use groups::{CurveGroup, plot_group_losses};
pub use heatmap::Heatmap;
pub use lines::{LineChart, Point, Scale, Series};
pub use losses::{Curve, XAxis, plot_losses, plot_scalar};

use crate::EvalError;
use crate::files::{create_dir, write_atomically};

/// Pixels of a PNG file per unit of the SVG.
const PNG_SCALE: f32 = 2.0;

/// What the bars of a plot of rates show, for [`LineChart::note`].
pub const WILSON_BARS: &str = "bars: 95 % intervals (Wilson)";

/// Something that can be drawn on any backend.
pub(crate) trait Chart {
    /// Width and height in pixels.
    fn size(&self) -> (u32, u32);

    /// Draws on an area of that size, background included.
    fn draw<DB: DrawingBackend>(&self, area: &DrawingArea<DB, Shift>) -> Result<(), DrawError>
    where
        DB::ErrorType: 'static;
}

/// An error of the drawing library.
pub(crate) type DrawError = Box<dyn std::error::Error>;

/// Draws a chart into an `.svg` or `.png` file, written to a temporary name and renamed.
pub(crate) fn render(chart: &impl Chart, path: &Path) -> Result<(), EvalError> {
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or("");
    let png = match extension.to_ascii_lowercase().as_str() {
        "svg" => false,
        "png" => true,
        _ => {
            return Err(EvalError::Plot {
                path: path.to_path_buf(),
                reason: format!(
                    "the extension is \"{extension}\"; allowed: \"svg\" (vector) and \"png\" (pixels)"
                ),
                remedy: "end the file's name in .svg or .png",
            });
        }
    };
    let drawn = svg(chart).and_then(|svg| match png {
        true => rasterise(&svg),
        false => Ok(svg.into_bytes()),
    });
    let bytes = drawn.map_err(|error| EvalError::Plot {
        path: path.to_path_buf(),
        reason: error.to_string(),
        remedy: "check that titles and names hold no control characters",
    })?;
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        create_dir(folder)?;
    }
    write_atomically(path, &bytes)
}

/// The chart as the text of an SVG file.
fn svg(chart: &impl Chart) -> Result<String, DrawError> {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, chart.size()).into_drawing_area();
        area.fill(&WHITE)?;
        chart.draw(&area)?;
        area.present()?;
    }
    Ok(text)
}

/// The PNG file of an SVG: the same shapes and the same layout of text, with the font in the binary.
fn rasterise(svg: &str) -> Result<Vec<u8>, DrawError> {
    let mut options = usvg::Options::default();
    let fonts = options.fontdb_mut();
    fonts.load_font_data(epaint_default_fonts::UBUNTU_LIGHT.to_vec());
    let family = fonts.faces().next().and_then(|face| Some(face.families.first()?.0.clone()));
    fonts.set_sans_serif_family(family.ok_or("the font in the binary has no name")?);
    let tree = usvg::Tree::from_str(svg, &options)?;
    let size = tree.size().to_int_size().scale_by(PNG_SCALE).ok_or("the picture is empty")?;
    let mut pixels =
        tiny_skia::Pixmap::new(size.width(), size.height()).ok_or("the picture is too large")?;
    let scale = tiny_skia::Transform::from_scale(PNG_SCALE, PNG_SCALE);
    resvg::render(&tree, scale, &mut pixels.as_mut());
    Ok(pixels.encode_png()?)
}
