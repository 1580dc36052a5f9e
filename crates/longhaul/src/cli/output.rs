//! Where output goes: text or JSON, with or without colours, in what width.

use crate::cli::paint::Line;
use console::Term;
use serde::Serialize;
use std::io::{self, Write};

/// Width taken where nobody can say.
const WIDTH_DEFAULT: usize = 120;

/// Where a command's output goes.
pub(crate) struct Output {
    /// JSON instead of text.
    pub(crate) json: bool,
    /// What is said on the way and when it fails.
    pub(crate) err: Screen,
    out: Screen,
}

/// One of the two outputs.
pub(crate) struct Screen {
    /// The terminal, if it is one.
    pub(crate) term: Term,
    coloured: bool,
}

impl Screen {
    fn new(term: Term) -> Self {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        Self {
            coloured: term.is_term() && wanted && !dumb,
            term,
        }
    }

    /// Whether lines can be written again in their place.
    pub(crate) fn stays_in_place(&self) -> bool {
        self.term.is_term() && std::env::var_os("TERM").is_some_and(|term| term != "dumb")
    }

    /// Columns of the terminal.
    pub(crate) fn width(&self) -> usize {
        if !self.term.is_term() {
            return WIDTH_DEFAULT;
        }
        self.term
            .size_checked()
            .map_or(WIDTH_DEFAULT, |(_, columns)| usize::from(columns).max(20))
    }

    /// A line as this screen shows it, cut to a width if there is one.
    pub(crate) fn render(&self, line: &Line, width: Option<usize>) -> String {
        line.render(width.unwrap_or(usize::MAX), self.coloured)
    }
}

impl Output {
    /// The process's own.
    pub(crate) fn new(json: bool) -> Self {
        Self {
            json,
            err: Screen::new(Term::stderr()),
            out: Screen::new(Term::stdout()),
        }
    }

    /// Columns of what results are written to.
    pub(crate) fn width(&self) -> usize {
        self.out.width()
    }

    /// Writes a result.
    pub(crate) fn lines(&self, lines: &[Line]) -> io::Result<()> {
        let text: String = lines
            .iter()
            .map(|line| self.out.render(line, None) + "\n")
            .collect();
        io::stdout().write_all(text.as_bytes())
    }

    /// Writes a result that is text already.
    pub(crate) fn text(&self, text: &[u8]) -> io::Result<()> {
        io::stdout().write_all(text)
    }

    /// Writes a result as one JSON document.
    pub(crate) fn document(&self, content: &impl Serialize) -> io::Result<()> {
        let text = serde_json::to_string_pretty(content)?;
        writeln!(io::stdout(), "{text}")
    }

    /// Writes one line of JSON, at once.
    pub(crate) fn json_line(&self, content: &impl Serialize) -> io::Result<()> {
        let mut text = serde_json::to_string(content)?;
        text.push('\n');
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()
    }

    /// Writes what is not the result.
    pub(crate) fn aside(&self, lines: &[Line]) {
        let text: String = lines
            .iter()
            .map(|line| self.err.render(line, None) + "\n")
            .collect();
        // Where stderr is closed nobody wants to know.
        let _ = io::stderr().write_all(text.as_bytes());
    }
}
