//! Formats lines of text whose parts have a meaning: cut to the terminal's width, coloured where it
//! has colours.

/// The meaning of a part of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    Plain,
    Strong,
    Good,
    Warn,
    Bad,
    Faint,
}

impl Tone {
    fn code(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Strong => "1",
            Self::Good => "32",
            Self::Warn => "33",
            Self::Bad => "31",
            Self::Faint => "2",
        }
    }
}

/// One line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Line(Vec<(Tone, String)>);

/// Returns the width of a text in columns: this product's own words and signs are one column each.
pub(crate) fn columns(text: &str) -> usize {
    text.chars().count()
}

impl Line {
    /// Returns a line with one plain text.
    pub(crate) fn text(text: impl Into<String>) -> Self {
        Self::default().plain(text)
    }

    /// Returns the line with a plain text added.
    pub(crate) fn plain(self, text: impl Into<String>) -> Self {
        self.tone(Tone::Plain, text)
    }

    /// Returns the line with a text of that meaning added. Control characters are replaced: parts
    /// of a text may be from another host.
    pub(crate) fn tone(mut self, tone: Tone, text: impl Into<String>) -> Self {
        let text: String = text.into();
        let text = text
            .chars()
            .map(|c| if c.is_control() { '?' } else { c })
            .collect();
        self.0.push((tone, text));
        self
    }

    /// Returns the line with another one behind it.
    pub(crate) fn and(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    /// Returns the line padded with spaces up to a column, or with one space where it is longer.
    pub(crate) fn column(self, column: usize) -> Self {
        let missing = column.saturating_sub(self.columns()).max(1);
        self.plain(" ".repeat(missing))
    }

    /// Returns the line with a title over its leading spaces.
    pub(crate) fn titled(mut self, title: &str) -> Self {
        if let Some((_, text)) = self.0.first_mut() {
            let rest = text.get(title.len()..).unwrap_or_default().to_owned();
            *text = rest;
        }
        self.0.insert(0, (Tone::Faint, title.to_owned()));
        self
    }

    /// Returns its width in columns.
    pub(crate) fn columns(&self) -> usize {
        self.0.iter().map(|(_, text)| columns(text)).sum()
    }

    /// Returns the line as output: at most `width` columns, without trailing spaces.
    pub(crate) fn render(&self, width: usize, coloured: bool) -> String {
        let mut left = width;
        let mut parts: Vec<(Tone, String)> = Vec::new();
        for (tone, text) in &self.0 {
            if columns(text) <= left {
                left -= columns(text);
                parts.push((*tone, text.clone()));
            } else {
                let mut cut: String = text.chars().take(left.saturating_sub(1)).collect();
                if left > 0 {
                    cut.push('…');
                }
                parts.push((*tone, cut));
                break;
            }
        }
        while let Some((_, text)) = parts.last_mut() {
            text.truncate(text.trim_end().len());
            if !text.is_empty() {
                break;
            }
            parts.pop();
        }
        let mut out = String::new();
        for (tone, text) in parts {
            if coloured && tone != Tone::Plain {
                out.push_str(&format!("\x1b[{}m{text}\x1b[0m", tone.code()));
            } else {
                out.push_str(&text);
            }
        }
        out
    }
}

/// Breaks a text at spaces into pieces of at most `width` columns.
pub(crate) fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut pieces = vec![String::new()];
    for word in text.split(' ') {
        if let Some(piece) = pieces.last_mut() {
            if piece.is_empty() {
                piece.push_str(word);
                continue;
            }
            if columns(piece) + 1 + columns(word) <= width {
                piece.push(' ');
                piece.push_str(word);
                continue;
            }
        }
        pieces.push(word.to_owned());
    }
    pieces
}

/// Returns a table: columns as wide as their widest cell, three spaces between them.
pub(crate) fn table(rows: Vec<Vec<Line>>) -> Vec<Line> {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..count)
        .map(|index| {
            let cells = rows.iter().filter_map(|row| row.get(index));
            cells.map(Line::columns).max().unwrap_or(0)
        })
        .collect();
    rows.into_iter()
        .map(|row| {
            let mut line = Line::default();
            let mut start = 0;
            for (cell, width) in row.into_iter().zip(&widths) {
                if start > 0 {
                    line = line.column(start);
                }
                line = line.and(cell);
                start += width + 3;
            }
            line
        })
        .collect()
}

/// Returns the first row of a table.
pub(crate) fn head(names: &[&str]) -> Vec<Line> {
    names
        .iter()
        .map(|name| Line::default().tone(Tone::Faint, *name))
        .collect()
}

#[cfg(test)]
pub(crate) mod golden {
    //! Compares texts with reviewed files beside the code.

    use super::Line;

    /// Compares with `golden/NAME.txt`; with `LONGHAUL_BLESS` set the file is written instead.
    pub(crate) fn check(name: &str, text: &str) {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cli/golden");
        let path = format!("{folder}/{name}.txt");
        if std::env::var_os("LONGHAUL_BLESS").is_some() {
            std::fs::write(&path, text).unwrap();
        }
        let good = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            good == text,
            "{path} differs; if what follows is good, set LONGHAUL_BLESS=1\n{text}"
        );
    }

    /// Compares lines, in a terminal of that width without colours.
    pub(crate) fn check_lines(name: &str, lines: &[Line], width: usize) {
        let text: String = lines
            .iter()
            .map(|line| line.render(width, false) + "\n")
            .collect();
        check(name, &text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_cut_to_the_width_and_coloured() {
        let line = Line::text("abc ").tone(Tone::Bad, "defghi").plain("   ");
        assert_eq!(line.render(80, false), "abc defghi");
        assert_eq!(line.render(80, true), "abc \x1b[31mdefghi\x1b[0m");
        assert_eq!(line.render(7, false), "abc de…");
        assert_eq!(line.render(7, true), "abc \x1b[31mde…\x1b[0m");
        assert_eq!(line.render(0, false), "");
    }

    #[test]
    fn what_steers_a_terminal_is_replaced() {
        let line = Line::text("a\x1b[2Jb\nc");
        assert_eq!(line.render(80, false), "a?[2Jb?c");
    }

    #[test]
    fn texts_are_broken_at_spaces() {
        assert_eq!(wrap("aa bb cc", 5), ["aa bb", "cc"]);
        assert_eq!(wrap("aaaaaaaa bb", 5), ["aaaaaaaa", "bb"]);
        assert_eq!(wrap("", 5), [""]);
    }

    #[test]
    fn cells_stand_below_each_other() {
        let row = |cells: [&str; 2]| cells.map(Line::text).to_vec();
        let lines = table(vec![row(["a", "b"]), row(["long", "c"])]);
        let texts: Vec<_> = lines.iter().map(|line| line.render(80, false)).collect();
        assert_eq!(texts, ["a      b", "long   c"]);
    }
}
