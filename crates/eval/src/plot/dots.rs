//! A dot chart: one row per name, its value as a dot with an error bar, single values as rings.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::lines::{GREY, GRID, range};
use super::style::{
    LABEL_SIZE, NOTE_SIZE, TICK_SIZE, TITLE_SIZE, cut, fit, line_colour, round_ticks, short, text,
    width,
};
use super::{Chart, DrawError, render};
use crate::EvalError;

const WIDTH: i32 = 960;
/// Names take at most this much.
const MOST_NAME: i32 = 360;
const MARGIN: i32 = 28;
const TOP: i32 = 78;
const BOTTOM: i32 = 76;
/// Height of a row.
const ROW: i32 = 44;
/// Distance of the rings below the dot.
const RING_BELOW: i32 = 11;

/// One row of a [`DotChart`].
#[derive(Clone, Debug, PartialEq)]
pub struct DotRow {
    /// Its name.
    pub name: String,
    /// The value; none leaves the row empty.
    pub value: Option<f64>,
    /// Lower and upper end of the error bar.
    pub bar: Option<(f64, f64)>,
    /// The values that `value` is the mean of: one per seed.
    pub parts: Vec<f64>,
}

/// Values of several variants, to compare.
#[derive(Clone, Debug, PartialEq)]
pub struct DotChart {
    /// Title.
    pub title: String,
    /// Name of the values.
    pub x_label: String,
    /// Range of the values; by default that of the rows.
    pub x_range: Option<(f64, f64)>,
    /// What bars and rings mean.
    pub note: String,
    /// The rows, the first at the top.
    pub rows: Vec<DotRow>,
}

impl DotChart {
    /// Draws the chart into an `.svg` or `.png` file.
    ///
    /// # Errors
    /// [`EvalError::Plot`] for another extension, when no row has a finite value, or when drawing fails.
    pub fn save(&self, path: &Path) -> Result<(), EvalError> {
        if self.values().next().is_none() {
            return Err(EvalError::Plot {
                path: path.to_path_buf(),
                reason: "there is no value to draw".to_string(),
                remedy: "give at least one row with a finite value",
            });
        }
        render(self, path)
    }

    /// Every finite number that is drawn.
    fn values(&self) -> impl Iterator<Item = f64> + '_ {
        let of = |row: &DotRow| {
            let ends = row.bar.iter().flat_map(|(low, high)| [*low, *high]);
            ends.chain(row.value).chain(row.parts.iter().copied()).collect::<Vec<_>>()
        };
        self.rows.iter().flat_map(of).filter(|value| value.is_finite())
    }

    /// The ends of the axis.
    fn ends(&self) -> (f64, f64) {
        let (low, high) = self.x_range.unwrap_or_else(|| range(self.values()));
        let margin = if high > low { (high - low) * 0.05 } else { low.abs().max(1.0) * 0.1 };
        (low - margin, high + margin)
    }

    /// Left end of the axis, behind the longest name.
    fn left(&self) -> i32 {
        let longest = self.rows.iter().map(|row| width(&row.name, TICK_SIZE)).max().unwrap_or(0);
        longest.min(MOST_NAME) + MARGIN + 12
    }

    fn bottom(&self) -> i32 {
        TOP + self.rows.len() as i32 * ROW
    }

    /// The pixel of a value.
    fn pixel(&self, value: f64) -> i32 {
        let (low, high) = self.ends();
        let room = f64::from(WIDTH - MARGIN - self.left());
        self.left() + ((value - low) / (high - low) * room).round() as i32
    }

    fn draw_axis<DB: DrawingBackend>(&self, area: &DrawingArea<DB, Shift>) -> Result<(), DrawError>
    where
        DB::ErrorType: 'static,
    {
        let (left, right, bottom) = (self.left(), WIDTH - MARGIN, self.bottom());
        let (low, high) = self.ends();
        let below = text(TICK_SIZE, HPos::Center, VPos::Top);
        for tick in round_ticks(low, high, 8) {
            let x = self.pixel(tick);
            area.draw(&PathElement::new([(x, TOP), (x, bottom)], GRID))?;
            area.draw_text(&short(tick), &below, (x, bottom + 6))?;
        }
        area.draw(&PathElement::new([(left, bottom), (right, bottom)], BLACK))?;
        let title =
            text(fit(&self.title, TITLE_SIZE, WIDTH - 2 * MARGIN), HPos::Left, VPos::Center);
        area.draw_text(&self.title, &title, (MARGIN, 26))?;
        let note = text(fit(&self.note, NOTE_SIZE, WIDTH - 2 * MARGIN), HPos::Left, VPos::Center);
        area.draw_text(&self.note, &note.color(&GREY), (MARGIN, 54))?;
        let label = text(LABEL_SIZE, HPos::Center, VPos::Top);
        area.draw_text(&self.x_label, &label, ((left + right) / 2, bottom + 34))?;
        Ok(())
    }

    fn draw_row<DB: DrawingBackend>(
        &self,
        area: &DrawingArea<DB, Shift>,
        at: usize,
    ) -> Result<(), DrawError>
    where
        DB::ErrorType: 'static,
    {
        let (row, colour) = (&self.rows[at], line_colour(at));
        let y = TOP + at as i32 * ROW + ROW / 2;
        let beside = text(TICK_SIZE, HPos::Right, VPos::Center);
        area.draw_text(&cut(&row.name, MOST_NAME), &beside, (self.left() - 12, y))?;
        if let Some((low, high)) = row.bar.filter(|(low, high)| low.is_finite() && high.is_finite())
        {
            let line = colour.stroke_width(2);
            let (low, high) = (self.pixel(low), self.pixel(high));
            area.draw(&PathElement::new([(low, y), (high, y)], line))?;
            for x in [low, high] {
                area.draw(&PathElement::new([(x, y - 6), (x, y + 6)], line))?;
            }
        }
        if row.parts.len() > 1 {
            for part in row.parts.iter().filter(|part| part.is_finite()) {
                let ring =
                    Circle::new((self.pixel(*part), y + RING_BELOW), 4, colour.stroke_width(1));
                area.draw(&ring)?;
            }
        }
        if let Some(value) = row.value.filter(|value| value.is_finite()) {
            area.draw(&Circle::new((self.pixel(value), y), 6, colour.filled()))?;
        }
        Ok(())
    }
}

impl Chart for DotChart {
    fn size(&self) -> (u32, u32) {
        (WIDTH as u32, (self.bottom() + BOTTOM) as u32)
    }

    fn draw<DB: DrawingBackend>(&self, area: &DrawingArea<DB, Shift>) -> Result<(), DrawError>
    where
        DB::ErrorType: 'static,
    {
        self.draw_axis(area)?;
        (0..self.rows.len()).try_for_each(|at| self.draw_row(area, at))
    }
}
