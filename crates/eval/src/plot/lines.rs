//! Lines with error bars or bands over a linear or logarithmic axis.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::axis::Axis;
use super::legend::{Entry, Legend};
use super::style::{
    LABEL_SIZE, NOTE_SIZE, TICK_SIZE, TITLE_SIZE, fit, line_colour, round_ticks, short, text, width,
};
use super::{Chart, DrawError, render};
use crate::EvalError;

const WIDTH: u32 = 960;
/// Height without the legend.
const HEIGHT: u32 = 600;
/// Left end of the axes.
const LEFT: i32 = 90;
/// Right margin.
const RIGHT: i32 = 28;
/// Height of the title's line.
const TITLE_ROW: i32 = 44;
/// Height of the line between legend and axes: the boundary's name and the note.
const NOTE_ROW: i32 = 22;
/// Lines with at most this many points show each point as a dot.
const DOTTED: usize = 64;
/// Opacity of a faint line.
pub(super) const FAINT: f64 = 0.25;
/// Opacity of a band.
const BAND: f64 = 0.15;

/// One point of a line. A point that is not finite breaks the line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Horizontal.
    pub x: f64,
    /// Vertical.
    pub y: f64,
    /// Lower and upper end of the error bar or band.
    pub bar: Option<(f64, f64)>,
}

/// One line.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Its name in the legend; if empty, the line is not in the legend.
    pub name: String,
    /// Its points, by increasing x.
    pub points: Vec<Point>,
    /// Index of its colour; several series may share one.
    pub colour: usize,
    /// Drawn thin and pale, behind the others: raw values under a smoothed line.
    pub faint: bool,
    /// Drawn with dots at its points.
    pub dots: bool,
    /// Shows the points' bars as one band.
    pub band: bool,
}

/// How an axis maps numbers to positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Evenly.
    Linear,
    /// By powers of two; numbers must be above 0.
    Log2,
}

impl Scale {
    /// The position of `value` on the axis.
    fn place(self, value: f64) -> f64 {
        match self {
            Scale::Linear => value,
            Scale::Log2 => value.log2(),
        }
    }

    /// Where an axis from `low` to `high`, as positions, has at most `count` ticks or a little more.
    fn ticks(self, low: f64, high: f64, count: usize) -> Vec<f64> {
        match self {
            Scale::Linear => round_ticks(low, high, count),
            Scale::Log2 => {
                let (first, last) = (low.ceil() as i32, high.floor() as i32);
                let step = ((last - first) / (count as i32 + 1) + 1).max(1) as usize;
                (first..=last).step_by(step).map(f64::from).collect()
            }
        }
    }
}

/// A chart of lines.
#[derive(Clone, Debug, PartialEq)]
pub struct LineChart {
    /// Title.
    pub title: String,
    /// Name of the x axis.
    pub x_label: String,
    /// Name of the y axis.
    pub y_label: String,
    /// Scale of the x axis.
    pub x_scale: Scale,
    /// Scale of the y axis.
    pub y_scale: Scale,
    /// Range of the y axis; by default that of the points.
    pub y_range: Option<(f64, f64)>,
    /// What bars and bands mean, in small print above the axes.
    pub note: Option<String>,
    /// The lines.
    pub series: Vec<Series>,
    /// A vertical line and its name: the training length.
    pub boundary: Option<(f64, String)>,
}

impl LineChart {
    /// Draws the chart into an `.svg` or `.png` file.
    ///
    /// # Errors
    /// [`EvalError::Plot`] for another extension, when no point is finite, or when drawing fails.
    pub fn save(&self, path: &Path) -> Result<(), EvalError> {
        if self.finite_points().next().is_none() {
            return Err(EvalError::Plot {
                path: path.to_path_buf(),
                reason: "there is no point to draw".to_string(),
                remedy: "give at least one curve with one finite value",
            });
        }
        render(self, path)
    }

    /// The points that can be drawn, with x and y as positions on the axes.
    fn finite_points(&self) -> impl Iterator<Item = Point> + '_ {
        self.series.iter().flat_map(|series| &series.points).filter_map(|point| self.place(point))
    }

    fn place(&self, point: &Point) -> Option<Point> {
        let (x, y) = (self.x_scale.place(point.x), self.y_scale.place(point.y));
        let bar = point.bar.map(|(low, high)| (self.y_scale.place(low), self.y_scale.place(high)));
        (x.is_finite() && y.is_finite()).then_some(Point { x, y, bar })
    }

    fn x_axis(&self) -> Axis {
        let xs = self.finite_points().map(|point| point.x);
        let boundary = self.boundary.iter().map(|(x, _)| self.x_scale.place(*x));
        let (low, high) = range(xs.chain(boundary));
        let margin = match high - low {
            0.0 => 1.0,
            width => width * 0.02,
        };
        let (low, high) = (low - margin, high + margin);
        let ticks = self.x_scale.ticks(low, high, 8);
        Axis { low, high, ticks }
    }

    fn y_axis(&self) -> Axis {
        let axis =
            |low: f64, high: f64| Axis { low, high, ticks: self.y_scale.ticks(low, high, 8) };
        if let Some((low, high)) = self.y_range {
            return axis(self.y_scale.place(low), self.y_scale.place(high));
        }
        let (low, high) = range(self.finite_points().flat_map(|point| {
            let (low, high) = bar(&point).unwrap_or((point.y, point.y));
            [point.y.min(low), point.y.max(high)]
        }));
        let margin = match (high > low, self.y_scale) {
            (true, _) => (high - low) * 0.05,
            (false, Scale::Linear) => low.abs().max(1.0) * 0.1,
            (false, Scale::Log2) => 1.0,
        };
        axis(low - margin, high + margin)
    }

    /// The names of the lines, above the axes, where they cover nothing.
    fn legend(&self) -> Legend {
        let named = self.series.iter().filter(|series| !series.name.is_empty());
        let entry = |series: &Series| Entry {
            name: series.name.clone(),
            colour: line_colour(series.colour),
            faint: series.faint,
            dot: series.dots,
        };
        Legend::new(named.map(entry).collect(), WIDTH as i32 - LEFT - RIGHT)
    }

    fn show_y(&self, place: f64) -> String {
        match self.y_scale {
            Scale::Linear => short(place),
            Scale::Log2 => short(place.exp2()),
        }
    }

    fn show_x(&self, place: f64) -> String {
        match self.x_scale {
            Scale::Linear => short(place),
            Scale::Log2 if place.exp2() >= 1048576.0 => format!("{}Mi", (place - 20.0).exp2()),
            Scale::Log2 if place.exp2() >= 16384.0 => format!("{}Ki", (place - 10.0).exp2()),
            Scale::Log2 => format!("{}", place.exp2().round()),
        }
    }
}

/// The lowest and the highest value.
pub(super) fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
        (low.min(value), high.max(value))
    })
}

/// The ends of a point's bar, if they are finite and differ.
fn bar(point: &Point) -> Option<(f64, f64)> {
    point.bar.filter(|(low, high)| low.is_finite() && high.is_finite() && low < high)
}

impl Chart for LineChart {
    fn size(&self) -> (u32, u32) {
        (WIDTH, HEIGHT + self.legend().height() as u32)
    }

    fn draw<DB: DrawingBackend>(&self, area: &DrawingArea<DB, Shift>) -> Result<(), DrawError>
    where
        DB::ErrorType: 'static,
    {
        let (x, y) = (self.x_axis(), self.y_axis());
        let room = WIDTH as i32 - LEFT - RIGHT;
        let title = text(fit(&self.title, TITLE_SIZE, room), HPos::Left, VPos::Center);
        area.draw_text(&self.title, &title, (LEFT, 26))?;
        let legend = self.legend();
        legend.draw(area, (LEFT, TITLE_ROW))?;
        let top = TITLE_ROW + legend.height() + NOTE_ROW;
        let inner = area.margin(top, 12, 12, RIGHT);
        let mut chart = ChartBuilder::on(&inner)
            .x_label_area_size(58)
            .y_label_area_size(78)
            .build_cartesian_2d(x.clone(), y.clone())?;
        chart
            .configure_mesh()
            .disable_mesh()
            .x_desc(&self.x_label)
            .y_desc(&self.y_label)
            .x_label_formatter(&|place| self.show_x(*place))
            .y_label_formatter(&|place| self.show_y(*place))
            .label_style(text(TICK_SIZE, HPos::Center, VPos::Center))
            .axis_desc_style(text(LABEL_SIZE, HPos::Center, VPos::Center))
            .draw()?;
        for &tick in &y.ticks {
            chart.draw_series([PathElement::new([(x.low, tick), (x.high, tick)], GRID)])?;
        }
        let mut note_from = LEFT;
        if let Some((at, name)) = &self.boundary {
            let at = self.x_scale.place(*at);
            let line =
                DashedLineSeries::new([(at, y.low), (at, y.high)], 6, 4, GREY.stroke_width(1));
            chart.draw_series(line)?;
            let pixel = chart.backend_coord(&(at, y.high)).0;
            note_from = self.draw_boundary_name(area, name, pixel, top)?;
        }
        self.draw_note(area, note_from, top)?;
        let faint_first = self.series.iter().filter(|series| series.faint);
        for series in faint_first.chain(self.series.iter().filter(|series| !series.faint)) {
            self.draw_series(&mut chart, series, &y)?;
        }
        Ok(())
    }
}

pub(super) const GRID: RGBColor = RGBColor(222, 222, 222);
pub(super) const GREY: RGBColor = RGBColor(110, 110, 110);

/// The chart that plotters builds for these axes.
type Context<'a, DB> = ChartContext<'a, DB, Cartesian2d<Axis, Axis>>;

impl LineChart {
    /// Names the boundary above its line, within the picture. Returns where the name ends.
    fn draw_boundary_name<DB: DrawingBackend>(
        &self,
        area: &DrawingArea<DB, Shift>,
        name: &str,
        pixel: i32,
        top: i32,
    ) -> Result<i32, DrawError>
    where
        DB::ErrorType: 'static,
    {
        let half = width(name, TICK_SIZE) / 2;
        let middle = pixel.clamp(LEFT + half, WIDTH as i32 - RIGHT - half);
        let style = text(TICK_SIZE, HPos::Center, VPos::Bottom).color(&GREY);
        area.draw_text(name, &style, (middle, top - 4))?;
        Ok(middle + half)
    }

    /// The note, at the right end of its line, or at the left end where the boundary's name, which ends
    /// at `name_end`, leaves more room.
    fn draw_note<DB: DrawingBackend>(
        &self,
        area: &DrawingArea<DB, Shift>,
        name_end: i32,
        top: i32,
    ) -> Result<(), DrawError>
    where
        DB::ErrorType: 'static,
    {
        let Some(note) = &self.note else { return Ok(()) };
        let right = WIDTH as i32 - RIGHT;
        let (position, at) = match name_end + width(note, NOTE_SIZE) + 12 <= right {
            true => (HPos::Right, right),
            false => (HPos::Left, LEFT),
        };
        let style = text(NOTE_SIZE, position, VPos::Bottom).color(&GREY);
        area.draw_text(note, &style, (at, top - 4))?;
        Ok(())
    }

    fn draw_series<'a, DB: DrawingBackend + 'a>(
        &self,
        chart: &mut Context<'a, DB>,
        series: &Series,
        y: &Axis,
    ) -> Result<(), DrawError>
    where
        DB::ErrorType: 'static,
    {
        let colour = line_colour(series.colour);
        let line = match series.faint {
            true => colour.mix(FAINT).stroke_width(1),
            false => colour.stroke_width(2),
        };
        let places: Vec<Option<Point>> = series.points.iter().map(|p| self.place(p)).collect();
        for run in places.split(|point| point.is_none()) {
            let run: Vec<Point> = run.iter().flatten().copied().collect();
            if run.is_empty() {
                continue;
            }
            if series.band && run.len() > 1 {
                let ends = |p: &Point| bar(p).unwrap_or((p.y, p.y));
                let within = |value: f64| value.clamp(y.low, y.high);
                let upper = run.iter().map(|p| (p.x, within(ends(p).1)));
                let lower = run.iter().rev().map(|p| (p.x, within(ends(p).0)));
                let outline: Vec<(f64, f64)> = upper.chain(lower).collect();
                chart.draw_series([Polygon::new(outline, colour.mix(BAND).filled())])?;
            }
            // One point alone makes no line: SVG viewers complain about it.
            if run.len() > 1 {
                chart.draw_series(LineSeries::new(run.iter().map(|p| (p.x, p.y)), line))?;
            }
            if series.dots && run.len() <= DOTTED {
                let dots = run.iter().map(|p| Circle::new((p.x, p.y), 4, colour.filled()));
                chart.draw_series(dots)?;
            }
            if !series.band || run.len() == 1 {
                let bars = run.iter().filter_map(|p| {
                    let (low, high) = bar(p)?;
                    Some(ErrorBar::new_vertical(p.x, low, p.y, high, colour.stroke_width(1), 10))
                });
                chart.draw_series(bars)?;
            }
        }
        Ok(())
    }
}
