//! Pictures of results as PNG: [`Lines`] over a logarithmic scale, and [`Histograms`] one above another.
//!
//! Every series is named where it is drawn, in its own colour and with its own mark. The colours are those of Okabe and
//! Ito, which people with any kind of colour vision can tell apart.

use super::text::check_writable;
use candle_core::{bail, Error, Result};
use plotters::backend::BitMapBackend;
use plotters::coord::Shift;
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{Circle, EmptyElement, PathElement, Polygon, Rectangle, Text};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{
    register_font, Color, FontStyle, IntoFont, RGBColor, ShapeStyle, TextStyle, BLACK, WHITE,
};
use std::fmt::Display;
use std::path::Path;

const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    BLACK,
];
const GREY: RGBColor = RGBColor(90, 90, 90);
const PALE: RGBColor = RGBColor(225, 225, 225);
/// In pixels.
const SIZE: (u32, u32) = (1600, 1000);
const TITLE: i32 = 38;
const LETTERS: i32 = 28;
/// Between the baselines of two names that would otherwise overlap.
const NAME_HEIGHT: f64 = 36.;
/// By how much digits and capitals lie above the middle of their line.
const CENTRE: i32 = 4;

type Canvas<'a> = DrawingArea<BitMapBackend<'a>, Shift>;

/// A quantity over another, both above 0, on logarithmic scales.
pub struct Lines {
    pub title: String,
    /// Lines under the title: what was measured, on what.
    pub notes: Vec<String>,
    pub x_label: String,
    pub y_label: String,
    /// What is written below the axis, and where.
    pub x_ticks: Vec<(f64, String)>,
    pub series: Vec<Series>,
}

/// One line.
pub struct Series {
    pub name: String,
    /// By rising x.
    pub points: Vec<Point>,
}

/// Where a line passes, and between what it would for other seeds.
#[derive(Debug, Clone, Copy)]
pub struct Point {
    pub x: f64,
    pub y: f64,
    pub low: f64,
    pub high: f64,
}

/// Distributions of a quantity, one panel each, over a common axis.
pub struct Histograms {
    pub title: String,
    pub notes: Vec<String>,
    pub x_label: String,
    /// Where the bins begin, and the last one ends.
    pub edges: Vec<f64>,
    pub panels: Vec<Panel>,
}

/// One distribution.
pub struct Panel {
    pub name: String,
    /// One for each bin.
    pub counts: Vec<usize>,
    pub mean: f64,
}

impl Lines {
    /// Draws to a PNG file.
    ///
    /// # Errors
    /// When there is nothing to draw, a number is not above 0 and finite, or the file cannot be written.
    pub fn draw(&self, path: &Path) -> Result<()> {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let numbers = |p: &Point| [p.x, p.y, p.low, p.high];
        if points().next().is_none() {
            bail!("plot: there is nothing to draw")
        }
        if let Some(bad) = points()
            .flat_map(numbers)
            .find(|n| !(n.is_finite() && *n > 0.))
        {
            bail!("plot: {bad} has no place on a logarithmic scale")
        }
        let (left, right) = extent(points().map(|p| p.x));
        let (low, high) = extent(points().flat_map(|p| [p.low, p.high, p.y]));
        // Some air, and never an empty range.
        let (left, right) = (left / 1.08, right * 1.08);
        let (low, high) = (low / 1.1, high * 1.1);

        draw_file(path, |canvas| {
            let top = header(canvas, &self.title, &self.notes)?;
            let frame = Frame {
                x: Scale {
                    from: left.ln(),
                    to: right.ln(),
                    start: 130.,
                    end: 1290.,
                },
                y: Scale {
                    from: low.ln(),
                    to: high.ln(),
                    start: 880.,
                    end: f64::from(top) + 70.,
                },
            };
            let label = text(LETTERS, GREY, HPos::Left, VPos::Bottom);
            write(canvas, &self.y_label, (40, frame.y.end as i32 - 20), &label)?;
            for value in logarithmic_ticks(low, high) {
                let y = frame.y.at(value.ln());
                line(canvas, &[(130., y), (1290., y)], PALE.stroke_width(2))?;
                let style = text(LETTERS, GREY, HPos::Right, VPos::Center);
                write(canvas, tick_label(value), (118, y as i32 + CENTRE), &style)?;
            }
            let style = text(LETTERS, GREY, HPos::Center, VPos::Top);
            for (value, name) in &self.x_ticks {
                let x = frame.x.at(value.ln());
                line(canvas, &[(x, 880.), (x, 892.)], GREY.stroke_width(2))?;
                write(canvas, name, (x as i32, 900), &style)?;
            }
            write(canvas, &self.x_label, (710, 945), &style)?;
            line(canvas, &[(130., 880.), (1290., 880.)], GREY.stroke_width(2))?;
            self.draw_series(canvas, &frame)
        })
    }

    fn draw_series(&self, canvas: &Canvas, frame: &Frame) -> Result<()> {
        let at = |x: f64, y: f64| (frame.x.at(x.ln()), frame.y.at(y.ln()));
        let points = self.series.iter().flat_map(|series| &series.points);
        let end = frame.x.at(extent(points.map(|p| p.x)).1.ln());
        let mut ends = Vec::new();
        for (n, series) in self.series.iter().enumerate() {
            let colour = COLOURS[n % COLOURS.len()];
            for p in series.points.iter().filter(|p| p.low < p.high) {
                let ends = [at(p.x, p.low), at(p.x, p.high)];
                line(canvas, &ends, colour.mix(0.45).stroke_width(7))?;
            }
            let path: Vec<_> = series.points.iter().map(|p| at(p.x, p.y)).collect();
            line(canvas, &path, colour.stroke_width(4))?;
            path.iter()
                .try_for_each(|place| mark(canvas, n, *place, colour))?;
            let Some((x, y)) = path.last().copied() else {
                continue;
            };
            if x >= end {
                ends.push((x, y, &series.name, colour));
            } else {
                // A line that stops on the way is named where it stops.
                let style = text(LETTERS + 4, colour, HPos::Left, VPos::Bottom);
                write(canvas, &series.name, (x as i32 + 14, y as i32 - 10), &style)?;
            }
        }
        ends.sort_by(|a, b| a.1.total_cmp(&b.1));
        let wanted: Vec<f64> = ends.iter().map(|end| end.1).collect();
        for ((x, y, name, colour), shown) in ends.iter().zip(apart(&wanted, NAME_HEIGHT)) {
            // A thread from the line's end to a name that had to move.
            if (shown - y).abs() > 2. {
                let thread = [(x + 14., *y), (frame.x.end + 4., shown)];
                line(canvas, &thread, colour.mix(0.5).stroke_width(2))?;
            }
            let style = text(LETTERS + 4, *colour, HPos::Left, VPos::Center);
            let place = (frame.x.end as i32 + 12, shown as i32 + CENTRE);
            write(canvas, name, place, &style)?;
        }
        Ok(())
    }
}

impl Histograms {
    /// Draws to a PNG file.
    ///
    /// # Errors
    /// When there is nothing to draw, counts do not fit the bins, or the file cannot be written.
    pub fn draw(&self, path: &Path) -> Result<()> {
        let (Some(left), Some(right)) = (self.edges.first(), self.edges.last()) else {
            bail!("plot: a histogram needs bins")
        };
        let bins = self.edges.len() - 1;
        if self.panels.is_empty() || left.total_cmp(right).is_ge() {
            bail!("plot: there is nothing to draw")
        }
        if let Some(panel) = self.panels.iter().find(|p| p.counts.len() != bins) {
            bail!(
                "plot: {} has {} counts for {bins} bins",
                panel.name,
                panel.counts.len()
            )
        }
        let highest = self.panels.iter().flat_map(|p| &p.counts).max();
        let highest = highest.copied().unwrap_or(0).max(1) as f64;

        draw_file(path, |canvas| {
            let top = header(canvas, &self.title, &self.notes)? + 30;
            let height = f64::from(880 - top) / self.panels.len() as f64;
            let x = Scale {
                from: *left,
                to: *right,
                start: 60.,
                end: 1540.,
            };
            let style = text(LETTERS, GREY, HPos::Center, VPos::Top);
            for value in linear_ticks(*left, *right) {
                let place = x.at(value);
                let colour = if value == 0. { GREY } else { PALE };
                let ends = [(place, f64::from(top)), (place, 892.)];
                line(canvas, &ends, colour.stroke_width(2))?;
                let sign = if value > 0. { "+" } else { "" };
                write(
                    canvas,
                    format!("{sign}{value}").replace('-', "−"),
                    (place as i32, 900),
                    &style,
                )?;
            }
            write(canvas, &self.x_label, (800, 945), &style)?;
            for (n, panel) in self.panels.iter().enumerate() {
                let frame = Frame {
                    x,
                    y: Scale {
                        from: 0.,
                        to: highest,
                        start: f64::from(top) + height * (n + 1) as f64,
                        end: f64::from(top) + height * n as f64 + 34.,
                    },
                };
                panel.draw(canvas, &frame, &self.edges, COLOURS[n % COLOURS.len()])?;
            }
            Ok(())
        })
    }
}

impl Panel {
    fn draw(&self, canvas: &Canvas, frame: &Frame, edges: &[f64], colour: RGBColor) -> Result<()> {
        let base = frame.y.start;
        for (ends, count) in edges.windows(2).zip(&self.counts) {
            let corners = [
                (frame.x.at(ends[0]) as i32, frame.y.at(*count as f64) as i32),
                (frame.x.at(ends[1]) as i32, base as i32),
            ];
            let bar = Rectangle::new(corners, colour.mix(0.75).filled());
            canvas.draw(&bar).map_err(failed)?;
        }
        let ends = [(frame.x.start, base), (frame.x.end, base)];
        line(canvas, &ends, GREY.stroke_width(2))?;
        let place = frame.x.at(self.mean);
        if (frame.x.start..=frame.x.end).contains(&place) {
            line(
                canvas,
                &[(place, base), (place, frame.y.end - 20.)],
                BLACK.stroke_width(4),
            )?;
        }
        let style = text(LETTERS + 4, colour, HPos::Left, VPos::Top);
        let corner = (frame.x.start as i32 + 6, frame.y.end as i32 - 16);
        for (n, part) in self.name.lines().enumerate() {
            let place = (corner.0, corner.1 + n as i32 * 38);
            write(canvas, part, place, &style)?;
        }
        Ok(())
    }
}

/// Checks before a long run that a picture can be written at its end.
///
/// # Errors
/// When the name does not end in .png, or the file cannot be written; the message names it.
pub fn check_path(path: &Path) -> Result<()> {
    check_name(path)?;
    check_writable(path)
}

/// The file's format goes by its name.
fn check_name(path: &Path) -> Result<()> {
    if path
        .extension()
        .is_none_or(|ending| !ending.eq_ignore_ascii_case("png"))
    {
        bail!("{}: the name of a picture must end in .png", path.display())
    }
    Ok(())
}

/// Where values lie, in pixels.
#[derive(Clone, Copy)]
struct Scale {
    from: f64,
    to: f64,
    start: f64,
    end: f64,
}

impl Scale {
    fn at(&self, value: f64) -> f64 {
        self.start + (value - self.from) / (self.to - self.from) * (self.end - self.start)
    }
}

struct Frame {
    x: Scale,
    y: Scale,
}

/// A white picture in a file, drawn by `draw`.
fn draw_file(path: &Path, draw: impl FnOnce(&Canvas) -> Result<()>) -> Result<()> {
    check_name(path)?;
    let font = dejavu::sans::regular();
    if register_font("sans-serif", FontStyle::Normal, font).is_err() {
        bail!("plot: the font cannot be read")
    }
    let canvas = BitMapBackend::new(path, SIZE).into_drawing_area();
    canvas.fill(&WHITE).map_err(failed)?;
    draw(&canvas)?;
    let written = canvas.present();
    written.map_err(|error| Error::msg(format!("{}: {error}", path.display())))
}

/// The title and the notes; returns where they end.
fn header(canvas: &Canvas, title: &str, notes: &[String]) -> Result<i32> {
    let style = text(TITLE, BLACK, HPos::Left, VPos::Top);
    write(canvas, title, (40, 28), &style)?;
    let style = text(LETTERS - 3, GREY, HPos::Left, VPos::Top);
    let mut top = 84;
    for note in notes {
        write(canvas, note, (40, top), &style)?;
        top += 34;
    }
    Ok(top)
}

fn text(size: i32, colour: RGBColor, h: HPos, v: VPos) -> TextStyle<'static> {
    TextStyle {
        font: ("sans-serif", size).into_font(),
        color: colour.to_backend_color(),
        pos: Pos::new(h, v),
    }
}

fn write(canvas: &Canvas, what: impl Display, at: (i32, i32), style: &TextStyle) -> Result<()> {
    let element = Text::new(what.to_string(), at, style.clone());
    canvas.draw(&element).map_err(failed)
}

fn line(canvas: &Canvas, points: &[(f64, f64)], style: impl Into<ShapeStyle>) -> Result<()> {
    let points: Vec<_> = points.iter().map(|(x, y)| (*x as i32, *y as i32)).collect();
    canvas
        .draw(&PathElement::new(points, style))
        .map_err(failed)
}

/// A disc, square, triangle or diamond: the `n`-th series' own.
fn mark(canvas: &Canvas, n: usize, (x, y): (f64, f64), colour: RGBColor) -> Result<()> {
    let corners = match n % 4 {
        0 => {
            let disc =
                EmptyElement::at((x as i32, y as i32)) + Circle::new((0, 0), 9, colour.filled());
            return canvas.draw(&disc).map_err(failed);
        }
        1 => vec![(-8, -8), (8, -8), (8, 8), (-8, 8)],
        2 => vec![(0, -11), (10, 8), (-10, 8)],
        _ => vec![(0, -11), (11, 0), (0, 11), (-11, 0)],
    };
    let corners: Vec<_> = corners
        .into_iter()
        .map(|(dx, dy)| (x as i32 + dx, y as i32 + dy))
        .collect();
    canvas
        .draw(&Polygon::new(corners, colour.filled()))
        .map_err(failed)
}

fn failed(error: impl Display) -> Error {
    Error::msg(format!("plot: {error}"))
}

fn extent(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| {
        (low.min(v), high.max(v))
    })
}

/// A tick's value, never longer than the margin.
fn tick_label(value: f64) -> String {
    match (1e-4..1e6).contains(&value) {
        true => value.to_string(),
        false => format!("{value:e}"),
    }
}

/// Round numbers in a range of a logarithmic scale, enough of them to read values by and not too many to tell apart.
fn logarithmic_ticks(low: f64, high: f64) -> Vec<f64> {
    const LADDERS: [&[f64]; 4] = [
        &[1.],
        &[1., 2., 5.],
        &[1., 1.5, 2., 3., 5., 7.],
        &[
            1., 1.2, 1.4, 1.6, 1.8, 2., 2.5, 3., 3.5, 4., 5., 6., 7., 8., 9.,
        ],
    ];
    let (first, last) = (low.log10().floor() as i32, high.log10().floor() as i32);
    let every = (last - first).unsigned_abs() as usize / 20 + 1;
    let decades = (first..=last).step_by(every);
    let ticks = |ladder: &[f64]| -> Vec<f64> {
        decades
            .clone()
            .flat_map(|decade| ladder.iter().map(move |step| step * 10f64.powi(decade)))
            .filter(|value| (low..=high).contains(value))
            // 0.30000000000000004 is no round number.
            .map(|value| format!("{value:.6e}").parse().unwrap_or(value))
            .collect()
    };
    LADDERS
        .into_iter()
        .map(ticks)
        .find(|ticks| ticks.len() >= 4)
        .unwrap_or_else(|| linear_ticks(low, high))
}

/// About eight round numbers in a range.
fn linear_ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / 8.;
    let decade = 10f64.powf(rough.log10().floor());
    let step = [1., 2., 5., 10.]
        .into_iter()
        .map(|step| step * decade)
        .find(|step| *step >= rough)
        .unwrap_or(rough);
    let (first, last) = ((low / step).ceil() as i64, (high / step).floor() as i64);
    (first..=last)
        .map(|n| {
            let value = n as f64 * step;
            format!("{value:.6e}").parse().unwrap_or(value)
        })
        .collect()
}

/// Sorted places moved as little as it takes to lie `distance` apart.
fn apart(wanted: &[f64], distance: f64) -> Vec<f64> {
    // Groups of neighbours that touch, each centred on the mean of what its members want.
    let mut groups: Vec<(f64, usize)> = Vec::new();
    for place in wanted {
        let (mut sum, mut count) = (*place, 1);
        while let Some((other, members)) = groups.last().copied() {
            let reach = distance * (members + count) as f64 / 2.;
            if sum / count as f64 - other / members as f64 >= reach {
                break;
            }
            groups.pop();
            (sum, count) = (sum + other, count + members);
        }
        groups.push((sum, count));
    }
    let places = |(sum, count): (f64, usize)| {
        let first = sum / count as f64 - distance * (count - 1) as f64 / 2.;
        (0..count).map(move |n| first + distance * n as f64)
    };
    groups.into_iter().flat_map(places).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(ys: &[f64]) -> Lines {
        let point = |(n, y): (usize, &f64)| Point {
            x: (n + 1) as f64,
            y: *y,
            low: *y,
            high: y * 1.5,
        };
        Lines {
            title: "Title".into(),
            notes: vec!["Note".into()],
            x_label: "x".into(),
            y_label: "y".into(),
            x_ticks: vec![(1., "one".into())],
            series: vec![Series {
                name: "series".into(),
                points: ys.iter().enumerate().map(point).collect(),
            }],
        }
    }

    #[test]
    fn ticks_of_any_range_are_round_and_enough() {
        assert_eq!(logarithmic_ticks(0.9, 1200.), [1., 10., 100., 1000.]);
        assert_eq!(logarithmic_ticks(1.9, 21.), [2., 5., 10., 20.]);
        assert_eq!(logarithmic_ticks(2.1, 5.2), [2.5, 3., 3.5, 4., 5.]);
        assert_eq!(linear_ticks(-11., 32.), [-10., 0., 10., 20., 30.]);
        assert_eq!(linear_ticks(-17., 17.), [-15., -10., -5., 0., 5., 10., 15.]);
        assert_eq!(linear_ticks(0.05, 0.52), [0.1, 0.2, 0.3, 0.4, 0.5]);
        for (low, high) in [
            (2.2, 2.31),
            (1e-9, 1e9),
            (7., 8.),
            (1., 1e45),
            (1e-300, 1e300),
        ] {
            let count = logarithmic_ticks(low, high).len();
            assert!((4..=20).contains(&count), "{low}..{high}: {count}");
        }
    }

    #[test]
    fn places_too_close_move_apart_around_their_mean() {
        assert_eq!(apart(&[1., 50., 90.], 30.), [1., 50., 90.]);
        assert_eq!(apart(&[50., 52.], 30.), [36., 66.]);
        // The group of the first two grows until it touches the third.
        assert_eq!(apart(&[50., 50., 71.], 30.), [27., 57., 87.]);
        assert!(apart(&[], 30.).is_empty());
    }

    #[test]
    fn drawn_picture_has_its_size_and_its_colours() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("lines.png");
        lines(&[2., 3., 9.]).draw(&path)?;
        let bytes = std::fs::read(&path)?;
        assert_eq!(&bytes[1..4], b"PNG");
        assert_eq!(bytes[16..24], [[0, 0, 6, 64], [0, 0, 3, 232]].concat());
        // A picture of nothing but white is much smaller.
        assert!(bytes.len() > 10_000, "{} bytes", bytes.len());
        Ok(())
    }

    #[test]
    fn numbers_without_a_place_are_refused() {
        let path = Path::new("never written.png");
        for ys in [&[][..], &[1., 0.], &[f64::NAN], &[1., f64::INFINITY]] {
            assert!(lines(ys).draw(path).is_err(), "{ys:?}");
        }
        let histograms = |counts: usize, edges: usize| Histograms {
            title: String::new(),
            notes: Vec::new(),
            x_label: String::new(),
            edges: (0..edges).map(|n| n as f64).collect(),
            panels: vec![Panel {
                name: String::new(),
                counts: vec![1; counts],
                mean: 0.,
            }],
        };
        for (counts, edges) in [(0, 0), (0, 1), (3, 3), (1, 3)] {
            assert!(histograms(counts, edges).draw(path).is_err());
        }
        assert!(!path.exists());
    }

    #[test]
    fn tick_labels_stay_short() {
        assert_eq!(
            [0.2, 1000., 1e45, 1e-300].map(tick_label),
            ["0.2", "1000", "1e45", "1e-300"]
        );
    }

    #[test]
    fn picture_of_another_format_is_refused_by_name() {
        for path in ["never written.txt", "never written"].map(Path::new) {
            for refused in [check_path(path), lines(&[1., 2.]).draw(path)] {
                assert!(refused.unwrap_err().to_string().contains("end in .png"));
            }
            assert!(!path.exists());
        }
    }

    #[test]
    fn folder_that_does_not_exist_is_named() {
        let path = Path::new("no such folder/lines.png");
        let error = lines(&[1., 2.]).draw(path).unwrap_err().to_string();
        assert!(error.contains("no such folder"), "{error}");
    }
}
