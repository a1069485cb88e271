//! A heat map: length across, depth down, a value from 0 to 1 in each cell.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::style::{LABEL_SIZE, TICK_SIZE, TITLE_SIZE, fit, ink_on, text, viridis};
use super::{Chart, DrawError, render};
use crate::EvalError;

/// Maps with at most this many rows and columns show the values in their cells.
const WRITTEN: usize = 15;
const LEFT: i32 = 90;
const RIGHT: i32 = 150;
const TOP: i32 = 72;
const BOTTOM: i32 = 76;
/// Empty cells are hatched: no colour of the scale looks like them.
const NO_VALUE: RGBColor = RGBColor(240, 240, 240);
const HATCH: RGBColor = RGBColor(170, 170, 170);
/// Distance of the hatch's lines in pixels.
const HATCH_STEP: i32 = 8;

/// A heat map of values from 0 to 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Heatmap {
    /// Title.
    pub title: String,
    /// Name of the columns.
    pub x_label: String,
    /// Name of the rows.
    pub y_label: String,
    /// Name of the values.
    pub value_label: String,
    /// One name per column.
    pub x: Vec<String>,
    /// One name per row, the first at the top.
    pub y: Vec<String>,
    /// `values[row][column]`; cells without a value are hatched, which a legend explains.
    pub values: Vec<Vec<Option<f64>>>,
    /// Draw a line before this column, with this name: the training length.
    pub boundary: Option<(usize, String)>,
}

impl Heatmap {
    /// Draws the map into an `.svg` or `.png` file.
    ///
    /// # Errors
    /// [`EvalError::Plot`] for another extension or when drawing fails.
    ///
    /// # Panics
    /// When the rows and columns of `values` do not match `y` and `x`.
    pub fn save(&self, path: &Path) -> Result<(), EvalError> {
        assert_eq!(self.values.len(), self.y.len(), "rows of the heat map");
        for row in &self.values {
            assert_eq!(row.len(), self.x.len(), "columns of the heat map");
        }
        render(self, path)
    }

    fn cell_size(&self) -> (i32, i32) {
        let fit = |count: usize, space: i32, least: i32, most: i32| {
            (space / count.max(1) as i32).clamp(least, most)
        };
        (fit(self.x.len(), 800, 14, 90), fit(self.y.len(), 480, 10, 48))
    }

    /// Pixel of the upper left corner of a cell.
    fn corner(&self, column: usize, row: usize) -> (i32, i32) {
        let (width, height) = self.cell_size();
        (LEFT + column as i32 * width, TOP + row as i32 * height)
    }

    fn draw_cells<DB: DrawingBackend>(&self, area: &DrawingArea<DB, Shift>) -> Result<(), DrawError>
    where
        DB::ErrorType: 'static,
    {
        let (width, height) = self.cell_size();
        let written = self.x.len() <= WRITTEN && self.y.len() <= WRITTEN;
        let centred = text(TICK_SIZE, HPos::Center, VPos::Center);
        for (row, values) in self.values.iter().enumerate() {
            for (column, value) in values.iter().enumerate() {
                let (x, y) = self.corner(column, row);
                let Some(value) = *value else {
                    draw_empty(area, (x, y), (width, height))?;
                    continue;
                };
                let fill = viridis(value);
                let cell = [(x, y), (x + width, y + height)];
                area.draw(&Rectangle::new(cell, fill.filled()))?;
                if written {
                    let ink = ink_on(fill);
                    let style = centred.color(&ink);
                    let middle = (x + width / 2, y + height / 2);
                    area.draw_text(&format!("{value:.2}"), &style, middle)?;
                }
            }
        }
        Ok(())
    }

    fn draw_axes<DB: DrawingBackend>(&self, area: &DrawingArea<DB, Shift>) -> Result<(), DrawError>
    where
        DB::ErrorType: 'static,
    {
        let (width, height) = self.cell_size();
        let (right, bottom) = self.corner(self.x.len(), self.y.len());
        // Names that would overlap are left out: one in every `step` remains.
        let step = |room: i32, cell: i32| ((room + cell - 1) / cell).max(1) as usize;
        let longest = self.x.iter().map(|name| name.len()).max().unwrap_or(1) as i32;
        let below = text(TICK_SIZE, HPos::Center, VPos::Top);
        for (column, name) in self.x.iter().enumerate().step_by(step(longest * 9 + 10, width)) {
            let (x, _) = self.corner(column, 0);
            area.draw_text(name, &below, (x + width / 2, bottom + 6))?;
        }
        let beside = text(TICK_SIZE, HPos::Right, VPos::Center);
        for (row, name) in self.y.iter().enumerate().step_by(step(TICK_SIZE + 2, height)) {
            let (_, y) = self.corner(0, row);
            area.draw_text(name, &beside, (LEFT - 8, y + height / 2))?;
        }
        let room = self.size().0 as i32 - LEFT - 12;
        let title = text(fit(&self.title, TITLE_SIZE, room), HPos::Left, VPos::Center);
        area.draw_text(&self.title, &title, (LEFT, 26))?;
        let x_name = text(LABEL_SIZE, HPos::Center, VPos::Top);
        area.draw_text(&self.x_label, &x_name, ((LEFT + right) / 2, bottom + 34))?;
        let y_name =
            text(LABEL_SIZE, HPos::Center, VPos::Center).transform(FontTransform::Rotate270);
        area.draw_text(&self.y_label, &y_name, (20, (TOP + bottom) / 2))?;
        if let Some((column, name)) = &self.boundary {
            let (x, _) = self.corner(*column, 0);
            let line = PathElement::new([(x, TOP), (x, bottom)], WHITE.stroke_width(5));
            area.draw(&line)?;
            let line = PathElement::new([(x, TOP - 4), (x, bottom + 4)], BLACK.stroke_width(2));
            area.draw(&line)?;
            let style = text(TICK_SIZE, HPos::Center, VPos::Bottom);
            area.draw_text(name, &style, (x, TOP - 8))?;
        }
        Ok(())
    }

    fn draw_scale<DB: DrawingBackend>(&self, area: &DrawingArea<DB, Shift>) -> Result<(), DrawError>
    where
        DB::ErrorType: 'static,
    {
        let (right, bottom) = self.corner(self.x.len(), self.y.len());
        let (left, height) = (right + 24, bottom - TOP);
        for y in 0..height {
            let share = 1.0 - f64::from(y) / f64::from(height - 1);
            let line = [(left, TOP + y), (left + 18, TOP + y + 1)];
            area.draw(&Rectangle::new(line, viridis(share).filled()))?;
        }
        let beside = text(TICK_SIZE, HPos::Left, VPos::Center);
        for tick in [0.0, 0.25, 0.5, 0.75, 1.0] {
            let y = bottom - (tick * f64::from(height)) as i32;
            area.draw_text(&format!("{tick}"), &beside, (left + 24, y))?;
        }
        let name = text(TICK_SIZE, HPos::Center, VPos::Top);
        area.draw_text(&self.value_label, &name, (left + 20, bottom + 12))?;
        if self.values.iter().flatten().any(Option::is_none) {
            draw_empty(area, (left, bottom + 42), (18, 18))?;
            area.draw_text("no sample", &beside, (left + 24, bottom + 51))?;
        }
        Ok(())
    }
}

/// An empty cell: grey with diagonal lines.
fn draw_empty<DB: DrawingBackend>(
    area: &DrawingArea<DB, Shift>,
    (x, y): (i32, i32),
    (width, height): (i32, i32),
) -> Result<(), DrawError>
where
    DB::ErrorType: 'static,
{
    area.draw(&Rectangle::new([(x, y), (x + width, y + height)], NO_VALUE.filled()))?;
    // Where the lines x + y = sum enter and leave the cell.
    for sum in (HATCH_STEP / 2..width + height).step_by(HATCH_STEP as usize) {
        let from = (x + sum.min(width), y + (sum - width).max(0));
        let to = (x + (sum - height).max(0), y + sum.min(height));
        area.draw(&PathElement::new([from, to], HATCH.stroke_width(1)))?;
    }
    Ok(())
}

impl Chart for Heatmap {
    fn size(&self) -> (u32, u32) {
        let (right, bottom) = self.corner(self.x.len(), self.y.len());
        ((right + RIGHT).max(480) as u32, (bottom + BOTTOM) as u32)
    }

    fn draw<DB: DrawingBackend>(&self, area: &DrawingArea<DB, Shift>) -> Result<(), DrawError>
    where
        DB::ErrorType: 'static,
    {
        self.draw_cells(area)?;
        self.draw_axes(area)?;
        self.draw_scale(area)
    }
}
