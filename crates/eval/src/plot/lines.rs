//! Lines with error bars over a linear or logarithmic axis.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::axis::Axis;
use super::style::{LABEL_SIZE, TICK_SIZE, TITLE_SIZE, line_colour, round_ticks, short, text};
use super::{Chart, DrawError, render};
use crate::EvalError;

const WIDTH: u32 = 960;
const HEIGHT: u32 = 600;
/// Lines with at most this many points show each point as a dot.
const DOTTED: usize = 64;

/// One point of a line. A point that is not finite breaks the line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Horizontal.
    pub x: f64,
    /// Vertical.
    pub y: f64,
    /// Half the length of the error bar.
    pub error: Option<f64>,
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
}

/// How an axis maps numbers to positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Evenly.
    Linear,
    /// By powers of two; numbers must be above 0.
    Log2,
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
    /// Range of the y axis; by default that of the points.
    pub y_range: Option<(f64, f64)>,
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

    /// The points that can be drawn, with x as the position on the axis.
    fn finite_points(&self) -> impl Iterator<Item = Point> + '_ {
        self.series.iter().flat_map(|series| &series.points).filter_map(|point| self.place(point))
    }

    fn place(&self, point: &Point) -> Option<Point> {
        let x = self.place_x(point.x);
        (x.is_finite() && point.y.is_finite()).then_some(Point { x, ..*point })
    }

    fn place_x(&self, x: f64) -> f64 {
        match self.x_scale {
            Scale::Linear => x,
            Scale::Log2 => x.log2(),
        }
    }

    fn x_axis(&self) -> Axis {
        let xs = self.finite_points().map(|point| point.x);
        let boundary = self.boundary.iter().map(|(x, _)| self.place_x(*x));
        let (low, high) = range(xs.chain(boundary));
        let margin = match high - low {
            0.0 => 1.0,
            width => width * 0.02,
        };
        let (low, high) = (low - margin, high + margin);
        let ticks = match self.x_scale {
            Scale::Linear => round_ticks(low, high, 8),
            Scale::Log2 => {
                let (first, last) = (low.ceil() as i32, high.floor() as i32);
                let step = ((last - first) / 9 + 1).max(1) as usize;
                (first..=last).step_by(step).map(f64::from).collect()
            }
        };
        Axis { low, high, ticks }
    }

    fn y_axis(&self) -> Axis {
        if let Some((low, high)) = self.y_range {
            return Axis { low, high, ticks: round_ticks(low, high, 8) };
        }
        let (low, high) = range(self.finite_points().flat_map(|point| {
            let error = point.error.unwrap_or(0.0);
            [point.y - error, point.y + error]
        }));
        let margin = if high > low { (high - low) * 0.05 } else { low.abs().max(1.0) * 0.1 };
        let (low, high) = (low - margin, high + margin);
        Axis { low, high, ticks: round_ticks(low, high, 8) }
    }

    /// The corner with the fewest points, for the legend; the upper right if several have none.
    fn emptiest_corner(&self, x: &Axis, y: &Axis) -> SeriesLabelPosition {
        let corners = [
            (SeriesLabelPosition::UpperRight, true, true),
            (SeriesLabelPosition::LowerLeft, false, false),
            (SeriesLabelPosition::LowerRight, true, false),
            (SeriesLabelPosition::UpperLeft, false, true),
        ];
        let points: Vec<(f64, f64)> = self
            .finite_points()
            .map(|p| ((p.x - x.low) / (x.high - x.low), (p.y - y.low) / (y.high - y.low)))
            .collect();
        let far = |share: f64, high: bool| if high { share > 0.7 } else { share < 0.3 };
        let (corner, ..) = corners
            .into_iter()
            .min_by_key(|&(_, right, upper)| {
                points.iter().filter(|(x, y)| far(*x, right) && far(*y, upper)).count()
            })
            .expect("there are four corners");
        corner
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

fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
        (low.min(value), high.max(value))
    })
}

impl Chart for LineChart {
    fn size(&self) -> (u32, u32) {
        (WIDTH, HEIGHT)
    }

    fn draw<DB: DrawingBackend>(&self, area: &DrawingArea<DB, Shift>) -> Result<(), DrawError>
    where
        DB::ErrorType: 'static,
    {
        let (x, y) = (self.x_axis(), self.y_axis());
        area.draw_text(&self.title, &text(TITLE_SIZE, HPos::Left, VPos::Center), (90, 26))?;
        let inner = area.margin(44, 12, 12, 28);
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
            .y_label_formatter(&|value| short(*value))
            .label_style(text(TICK_SIZE, HPos::Center, VPos::Center))
            .axis_desc_style(text(LABEL_SIZE, HPos::Center, VPos::Center))
            .draw()?;
        for &tick in &y.ticks {
            chart.draw_series([PathElement::new([(x.low, tick), (x.high, tick)], GRID)])?;
        }
        if let Some((at, name)) = &self.boundary {
            let at = self.place_x(*at);
            let grey = RGBColor(110, 110, 110);
            let line =
                DashedLineSeries::new([(at, y.low), (at, y.high)], 6, 4, grey.stroke_width(1));
            chart.draw_series(line)?;
            let style = text(TICK_SIZE, HPos::Left, VPos::Top).color(&grey);
            let top = y.high - (y.high - y.low) * 0.01;
            let label = Text::new(name.clone(), (6, 0), style);
            chart.draw_series([EmptyElement::at((at, top)) + label])?;
        }
        let faint_first = self.series.iter().filter(|series| series.faint);
        for series in faint_first.chain(self.series.iter().filter(|series| !series.faint)) {
            self.draw_series(&mut chart, series)?;
        }
        if self.series.iter().any(|series| !series.name.is_empty()) {
            chart
                .configure_series_labels()
                .position(self.emptiest_corner(&x, &y))
                .background_style(WHITE.mix(0.85))
                .border_style(GRID)
                .label_font(text(TICK_SIZE, HPos::Left, VPos::Top))
                .draw()?;
        }
        Ok(())
    }
}

const GRID: RGBColor = RGBColor(222, 222, 222);

/// The chart that plotters builds for these axes.
type Context<'a, DB> = ChartContext<'a, DB, Cartesian2d<Axis, Axis>>;

impl LineChart {
    fn draw_series<'a, DB: DrawingBackend + 'a>(
        &self,
        chart: &mut Context<'a, DB>,
        series: &Series,
    ) -> Result<(), DrawError>
    where
        DB::ErrorType: 'static,
    {
        let colour = line_colour(series.colour);
        let line = match series.faint {
            true => colour.mix(0.25).stroke_width(1),
            false => colour.stroke_width(2),
        };
        let places: Vec<Option<Point>> = series.points.iter().map(|p| self.place(p)).collect();
        let mut named = series.name.is_empty();
        for run in places.split(|point| point.is_none()) {
            let run: Vec<Point> = run.iter().flatten().copied().collect();
            if run.is_empty() {
                continue;
            }
            let drawn = chart.draw_series(LineSeries::new(run.iter().map(|p| (p.x, p.y)), line))?;
            if !named {
                named = true;
                let dot = if series.dots { 4 } else { 0 };
                drawn.label(&series.name).legend(move |(x, y)| {
                    EmptyElement::at((x, y))
                        + PathElement::new([(0, 0), (22, 0)], line)
                        + Circle::new((11, 0), dot, colour.filled())
                });
            }
            if series.dots && run.len() <= DOTTED {
                let dots = run.iter().map(|p| Circle::new((p.x, p.y), 4, colour.filled()));
                chart.draw_series(dots)?;
            }
            let bars = run.iter().filter_map(|p| {
                let error = p.error.filter(|error| *error > 0.0 && error.is_finite())?;
                let (low, high) = (p.y - error, p.y + error);
                Some(ErrorBar::new_vertical(p.x, low, p.y, high, colour.stroke_width(1), 10))
            });
            chart.draw_series(bars)?;
        }
        Ok(())
    }
}
