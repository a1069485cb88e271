//! Plots as SVG or PNG: loss curves, heat maps, lines with error bars.
//!
//! Text in PNG files uses a font embedded in the binary, so that the machine needs none.

mod axis;
mod heatmap;
mod lines;
mod losses;
mod style;

use std::path::Path;
use std::sync::OnceLock;

use plotters::coord::Shift;
use plotters::prelude::*;

pub use heatmap::Heatmap;
pub use lines::{LineChart, Point, Scale, Series};
pub use losses::{Curve, XAxis, plot_losses};

use crate::EvalError;
use crate::files::{create_dir, with_temporary};

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
    register_font();
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
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        create_dir(folder)?;
    }
    with_temporary(path, |temporary| {
        let drawn = if png {
            draw_on(chart, BitMapBackend::new(temporary, chart.size()))
        } else {
            draw_on(chart, SVGBackend::new(temporary, chart.size()))
        };
        drawn.map_err(|error| EvalError::Plot {
            path: path.to_path_buf(),
            reason: error.to_string(),
            remedy: "check that the folder may be written and that the disk has room",
        })
    })
}

fn draw_on<DB: DrawingBackend>(chart: &impl Chart, backend: DB) -> Result<(), DrawError>
where
    DB::ErrorType: 'static,
{
    let area = backend.into_drawing_area();
    area.fill(&WHITE)?;
    chart.draw(&area)?;
    area.present()?;
    Ok(())
}

/// Gives the drawing library its font, once.
fn register_font() {
    static REGISTERED: OnceLock<()> = OnceLock::new();
    REGISTERED.get_or_init(|| {
        let registered = plotters::style::register_font(
            style::FONT,
            FontStyle::Normal,
            epaint_default_fonts::UBUNTU_LIGHT,
        );
        assert!(registered.is_ok(), "the font in the binary does not parse");
    });
}
