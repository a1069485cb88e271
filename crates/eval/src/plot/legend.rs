//! The legend of a line chart: rows of names between the title and the axes.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::DrawError;
use super::lines::FAINT;
use super::style::{TICK_SIZE, cut, text, width};

/// Length of a line's sample.
const SAMPLE: i32 = 24;
/// Space between a sample and its name.
const GAP: i32 = 8;
/// Space between entries.
const BETWEEN: i32 = 24;
/// Height of a row.
const ROW: i32 = 24;

/// A line's name, and how the line looks.
pub(super) struct Entry {
    pub name: String,
    pub colour: RGBColor,
    pub faint: bool,
    pub dot: bool,
}

/// Entries in rows of at most a given width.
pub(super) struct Legend {
    rows: Vec<Vec<(i32, Entry)>>,
}

impl Legend {
    /// Breaks the entries into rows of `room` pixels; a name too long for a row is cut.
    pub fn new(entries: Vec<Entry>, room: i32) -> Self {
        let mut rows: Vec<Vec<(i32, Entry)>> = Vec::new();
        let mut at = room;
        for mut entry in entries {
            entry.name = cut(&entry.name, room - SAMPLE - GAP);
            let end = SAMPLE + GAP + width(&entry.name, TICK_SIZE);
            if at + end > room {
                rows.push(Vec::new());
                at = 0;
            }
            let row = rows.last_mut().expect("the first entry begins a row");
            row.push((at, entry));
            at += end + BETWEEN;
        }
        Legend { rows }
    }

    /// Its height in pixels; 0 without entries.
    pub fn height(&self) -> i32 {
        self.rows.len() as i32 * ROW
    }

    /// Draws the rows, the first with its upper left corner at `(left, top)`.
    pub fn draw<DB: DrawingBackend>(
        &self,
        area: &DrawingArea<DB, Shift>,
        (left, top): (i32, i32),
    ) -> Result<(), DrawError>
    where
        DB::ErrorType: 'static,
    {
        let style = text(TICK_SIZE, HPos::Left, VPos::Center);
        for (row, entries) in self.rows.iter().enumerate() {
            let y = top + row as i32 * ROW + ROW / 2;
            for (x, entry) in entries {
                let x = left + x;
                let line = match entry.faint {
                    true => entry.colour.mix(FAINT).stroke_width(1),
                    false => entry.colour.stroke_width(2),
                };
                area.draw(&PathElement::new([(x, y), (x + SAMPLE, y)], line))?;
                if entry.dot {
                    area.draw(&Circle::new((x + SAMPLE / 2, y), 4, entry.colour.filled()))?;
                }
                area.draw_text(&entry.name, &style, (x + SAMPLE + GAP, y))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn legend(names: &[&str], room: i32) -> Legend {
        let entry =
            |name: &&str| Entry { name: name.to_string(), colour: BLACK, faint: false, dot: true };
        Legend::new(names.iter().map(entry).collect(), room)
    }

    #[test]
    fn entries_stay_within_the_room_and_do_not_overlap() {
        let names = ["wall: training", "wall: validation", "a much longer name of a run", "x"];
        for room in [150, 300, 800] {
            let legend = legend(&names, room);
            assert_eq!(legend.rows.iter().map(Vec::len).sum::<usize>(), names.len());
            for row in &legend.rows {
                let mut free = 0;
                for (at, entry) in row {
                    assert!(*at >= free, "{} at {at}, after {free}", entry.name);
                    free = at + SAMPLE + GAP + width(&entry.name, TICK_SIZE);
                }
                assert!(free <= room, "a row ends at {free} of {room}");
            }
        }
        assert_eq!(legend(&[], 300).height(), 0);
    }

    #[test]
    fn a_name_without_room_is_cut() {
        let legend = legend(&["a name that is much too long for its row"], 160);
        assert!(legend.rows[0][0].1.name.ends_with('…'));
        assert!(legend.rows[0][0].1.name.starts_with("a name"));
    }
}
