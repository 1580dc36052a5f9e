//! Draws plots as SVG: grouped or stacked bars, and lines.

use std::fmt::Write;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 380.0;
/// Margins for the values of the y axis, and for the texts below the x axis and above the plot.
const LEFT: f64 = 64.0;
const RIGHT: f64 = 16.0;
const BOTTOM: f64 = 62.0;
const TOP: f64 = 40.0;
/// Height of a line of the legend.
const LEGEND_LINE: f64 = 18.0;
/// Approximate width of a letter.
const LETTER: f64 = 7.2;

/// Colours that are distinguishable with colour vision deficiencies (Okabe and Ito's).
const COLOURS: [&str; 8] = [
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c", "#b5a900",
];

/// The style of a plot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    /// Bars side by side.
    Bars,
    /// Bars on top of each other.
    Stack,
    /// A line a series.
    Lines,
}

/// A plot: values by category and series.
#[derive(Debug, Clone)]
pub(super) struct Plot {
    pub(super) title: String,
    pub(super) style: Style,
    /// The name of the values, with their unit.
    pub(super) y: String,
    /// The name of the categories.
    pub(super) x: String,
    pub(super) categories: Vec<String>,
    /// Names of the series, and a value for each category where there is one.
    pub(super) series: Vec<(String, Vec<Option<f64>>)>,
    /// A horizontal line: a limit and its name.
    pub(super) limit: Option<(f64, String)>,
}

impl Plot {
    /// Returns the highest value of the plot.
    fn highest(&self) -> f64 {
        let values = |series: &[Option<f64>]| series.iter().flatten().copied().fold(0.0, f64::max);
        let highest = match self.style {
            Style::Stack => (0..self.categories.len())
                .map(|index| {
                    let of = |(_, values): &(String, Vec<Option<f64>>)| {
                        values.get(index).copied().flatten().unwrap_or(0.0)
                    };
                    self.series.iter().map(of).sum()
                })
                .fold(0.0, f64::max),
            _ => self
                .series
                .iter()
                .map(|(_, series)| values(series))
                .fold(0.0, f64::max),
        };
        self.limit
            .as_ref()
            .map_or(highest, |(limit, _)| highest.max(*limit))
    }

    /// Returns the picture.
    pub(super) fn svg(&self) -> String {
        let legend = Legend::of(&self.series);
        let top = TOP + legend.height();
        let frame = Frame {
            top,
            step: step(self.highest()),
            highest: self.highest(),
            categories: self.categories.len().max(1),
        };
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             width=\"{WIDTH}\" height=\"{HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
        );
        text(
            &mut out,
            LEFT,
            22.0,
            "start",
            "font-size=\"15\" font-weight=\"bold\"",
            &self.title,
        );
        legend.draw(&mut out);
        self.axes(&frame, &mut out);
        match self.style {
            Style::Bars => self.bars(&frame, &mut out),
            Style::Stack => self.stack(&frame, &mut out),
            Style::Lines => self.lines(&frame, &mut out),
        }
        if let Some((limit, name)) = &self.limit {
            let y = frame.y(*limit);
            let _ = writeln!(
                out,
                "<path d=\"M{LEFT} {y:.1}H{:.1}\" stroke=\"#000000\" stroke-dasharray=\"5 4\"/>",
                WIDTH - RIGHT
            );
            text(&mut out, WIDTH - RIGHT - 2.0, y - 4.0, "end", "", name);
        }
        out.push_str("</svg>\n");
        out
    }

    fn axes(&self, frame: &Frame, out: &mut String) {
        let mut value = 0.0;
        while value <= frame.top_value() * 1.0001 {
            let y = frame.y(value);
            let colour = if value == 0.0 { "#404040" } else { "#dddddd" };
            let _ = writeln!(
                out,
                "<path d=\"M{LEFT} {y:.1}H{:.1}\" stroke=\"{colour}\"/>",
                WIDTH - RIGHT
            );
            text(
                out,
                LEFT - 6.0,
                y + 4.0,
                "end",
                "",
                &shown(value, frame.step),
            );
            value += frame.step;
        }
        let middle = (frame.top + HEIGHT - BOTTOM) / 2.0;
        let turned = format!("transform=\"rotate(-90 14 {middle:.1})\"");
        text(out, 14.0, middle, "middle", &turned, &self.y);
        for (index, category) in self.categories.iter().enumerate() {
            let x = frame.middle(index);
            let fits = (frame.width() / LETTER).max(4.0) as usize;
            for (line, words) in wrapped(category, fits).iter().take(3).enumerate() {
                let y = HEIGHT - BOTTOM + 16.0 + 13.0 * line as f64;
                text(out, x, y, "middle", "font-size=\"11\"", words);
            }
        }
        let centre = (LEFT + WIDTH - RIGHT) / 2.0;
        text(out, centre, HEIGHT - 6.0, "middle", "", &self.x);
    }

    fn bars(&self, frame: &Frame, out: &mut String) {
        let width = frame.width() * 0.8 / self.series.len().max(1) as f64;
        for (number, (name, values)) in self.series.iter().enumerate() {
            for (index, value) in values.iter().enumerate() {
                let Some(value) = value else { continue };
                let x = frame.left(index) + frame.width() * 0.1 + width * number as f64;
                let title = format!("{name}, {}: {}", self.category(index), exact(*value));
                bar(out, frame, (x, width), (0.0, *value), number, &title);
            }
        }
    }

    fn stack(&self, frame: &Frame, out: &mut String) {
        let width = frame.width() * 0.6;
        for index in 0..self.categories.len() {
            let mut from = 0.0;
            for (number, (name, values)) in self.series.iter().enumerate() {
                let Some(value) = values.get(index).copied().flatten() else {
                    continue;
                };
                let x = frame.middle(index) - width / 2.0;
                let title = format!("{name}, {}: {}", self.category(index), exact(value));
                bar(out, frame, (x, width), (from, from + value), number, &title);
                from += value;
            }
        }
    }

    fn lines(&self, frame: &Frame, out: &mut String) {
        for (number, (name, values)) in self.series.iter().enumerate() {
            let colour = COLOURS[number % COLOURS.len()];
            // Repeated colours are dashed.
            let dash = if number >= COLOURS.len() {
                " stroke-dasharray=\"6 3\""
            } else {
                ""
            };
            let points: Vec<(usize, f64)> = values
                .iter()
                .enumerate()
                .filter_map(|(index, value)| Some((index, (*value)?)))
                .collect();
            let path: Vec<String> = points
                .iter()
                .map(|(index, value)| format!("{:.1} {:.1}", frame.middle(*index), frame.y(*value)))
                .collect();
            let _ = writeln!(
                out,
                "<path d=\"M{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/>",
                path.join("L")
            );
            for (index, value) in points {
                let _ = writeln!(
                    out,
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.5\" fill=\"{colour}\">\
                     <title>{}</title></circle>",
                    frame.middle(index),
                    frame.y(value),
                    escaped(&format!(
                        "{name}, {}: {}",
                        self.category(index),
                        exact(value)
                    )),
                );
            }
        }
    }

    fn category(&self, index: usize) -> &str {
        self.categories.get(index).map_or("", String::as_str)
    }
}

/// The positions of the parts.
struct Frame {
    top: f64,
    step: f64,
    highest: f64,
    categories: usize,
}

impl Frame {
    /// Returns the value at the top of the plot.
    fn top_value(&self) -> f64 {
        (self.highest / self.step - 1e-6).ceil().max(1.0) * self.step
    }

    fn y(&self, value: f64) -> f64 {
        let room = HEIGHT - BOTTOM - self.top;
        HEIGHT - BOTTOM - value / self.top_value() * room
    }

    fn width(&self) -> f64 {
        (WIDTH - LEFT - RIGHT) / self.categories as f64
    }

    fn left(&self, index: usize) -> f64 {
        LEFT + self.width() * index as f64
    }

    fn middle(&self, index: usize) -> f64 {
        self.left(index) + self.width() / 2.0
    }
}

/// The names of the series, in as many lines as necessary.
struct Legend(Vec<(f64, f64, String)>);

impl Legend {
    fn of(series: &[(String, Vec<Option<f64>>)]) -> Self {
        let (mut x, mut line) = (LEFT, 0.0);
        let mut places = Vec::new();
        for (name, _) in series {
            let width = 26.0 + LETTER * name.chars().count() as f64;
            if x > LEFT && x + width > WIDTH - RIGHT {
                (x, line) = (LEFT, line + 1.0);
            }
            places.push((x, TOP + LEGEND_LINE * line, name.clone()));
            x += width;
        }
        Self(places)
    }

    fn height(&self) -> f64 {
        self.0.last().map_or(0.0, |(_, y, _)| y - TOP + LEGEND_LINE)
    }

    fn draw(&self, out: &mut String) {
        for (number, (x, y, name)) in self.0.iter().enumerate() {
            let colour = COLOURS[number % COLOURS.len()];
            let _ = writeln!(
                out,
                "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"11\" height=\"11\" fill=\"{colour}\"/>",
                y - 10.0
            );
            text(out, x + 16.0, *y, "start", "", name);
        }
    }
}

fn bar(
    out: &mut String,
    frame: &Frame,
    (x, width): (f64, f64),
    (from, to): (f64, f64),
    number: usize,
    title: &str,
) {
    let (low, high) = (frame.y(from), frame.y(to));
    let _ = writeln!(
        out,
        "<rect x=\"{x:.1}\" y=\"{high:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\">\
         <title>{}</title></rect>",
        (width - 1.0).max(1.0),
        (low - high).max(0.0),
        COLOURS[number % COLOURS.len()],
        escaped(title),
    );
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, more: &str, content: &str) {
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"#202020\" \
         {more}>{}</text>",
        escaped(content)
    );
}

fn escaped(content: &str) -> String {
    content
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// Returns a distance between grid lines that gives four to nine of them, with round numbers.
fn step(highest: f64) -> f64 {
    if !(highest.is_finite() && highest > 0.0) {
        return 1.0;
    }
    let power = 10_f64.powf((highest / 5.0).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
    let fits = steps.into_iter().find(|step| highest / step <= 7.0);
    fits.unwrap_or(10.0 * power)
}

/// Formats the value of a grid line, with as many digits as distinguish the lines.
fn shown(value: f64, step: f64) -> String {
    let digits = (-step.log10().floor()).clamp(0.0, 6.0) as usize;
    format!("{value:.digits$}")
}

/// Formats a value with about three significant digits.
fn exact(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

/// Splits words into lines of at most `letters` letters; a longer word is a line of its own.
fn wrapped(content: &str, letters: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in content.split_inclusive([' ', '-']) {
        match lines.last_mut() {
            Some(line) if line.chars().count() + word.trim_end().chars().count() <= letters => {
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(style: Style) -> Plot {
        Plot {
            title: "Bytes < all & more".to_owned(),
            style,
            y: "%".to_owned(),
            x: "blocks".to_owned(),
            categories: vec!["a long-name of it".to_owned(), "b".to_owned()],
            series: vec![
                ("one".to_owned(), vec![Some(10.0), Some(20.0)]),
                ("two".to_owned(), vec![Some(30.0), None]),
            ],
            limit: Some((25.0, "bar".to_owned())),
        }
    }

    #[test]
    fn every_value_is_drawn_where_it_belongs() {
        let drawn = |style, what: &str| plot(style).svg().matches(what).count();
        assert_eq!(drawn(Style::Bars, "<title>"), 3);
        assert_eq!(drawn(Style::Stack, "<title>"), 3);
        assert_eq!(drawn(Style::Lines, "<circle"), 3);
        assert_eq!(drawn(Style::Bars, "Bytes &lt; all &amp; more"), 1);
        assert_eq!(drawn(Style::Bars, "stroke-dasharray"), 1);
        assert_eq!(plot(Style::Bars).highest(), 30.0);
        assert_eq!(plot(Style::Stack).highest(), 40.0);
        let frame = Frame {
            top: 60.0,
            step: 10.0,
            highest: 40.0,
            categories: 2,
        };
        assert_eq!(frame.y(0.0), HEIGHT - BOTTOM);
        assert_eq!(frame.y(40.0), 60.0);
    }

    #[test]
    fn steps_are_round_and_few() {
        for (highest, expected) in [(0.0, 1.0), (1.0, 0.2), (7.0, 1.0), (31.0, 5.0), (1e9, 2e8)] {
            let step = step(highest);
            assert!((step / expected - 1.0).abs() < 1e-9, "{highest}: {step}");
        }
        assert_eq!(shown(0.4, 0.2), "0.4");
        assert_eq!(shown(40.0, 20.0), "40");
    }

    #[test]
    fn long_names_take_several_lines() {
        assert_eq!(
            wrapped("longhaul-zstd-fast", 10),
            ["longhaul-", "zstd-fast"]
        );
        assert_eq!(wrapped("two words", 20), ["two words"]);
    }
}
