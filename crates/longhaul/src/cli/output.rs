//! Writes the output: as text or JSON, with or without colours, to the terminal's width.

use crate::cli::paint::Line;
use console::Term;
use serde::Serialize;
use std::io::{self, Write};

/// The width where the terminal's is unknown.
const WIDTH_DEFAULT: usize = 120;

/// The outputs of a command.
pub(crate) struct Output {
    /// Whether results are JSON instead of text.
    pub(crate) json: bool,
    /// The output for progress and errors.
    pub(crate) err: Screen,
    out: Screen,
}

/// One of the two outputs.
pub(crate) struct Screen {
    /// The terminal, if the output is one.
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

    /// Returns whether lines can be redrawn in place.
    pub(crate) fn stays_in_place(&self) -> bool {
        self.term.is_term() && std::env::var_os("TERM").is_some_and(|term| term != "dumb")
    }

    /// Returns the width of the terminal.
    pub(crate) fn width(&self) -> usize {
        if !self.term.is_term() {
            return WIDTH_DEFAULT;
        }
        self.term
            .size_checked()
            .map_or(WIDTH_DEFAULT, |(_, columns)| usize::from(columns).max(20))
    }

    /// Returns a line rendered for this screen, cut to a width if there is one.
    pub(crate) fn render(&self, line: &Line, width: Option<usize>) -> String {
        line.render(width.unwrap_or(usize::MAX), self.coloured)
    }
}

impl Output {
    /// Returns the outputs of this process.
    pub(crate) fn new(json: bool) -> Self {
        Self {
            json,
            err: Screen::new(Term::stderr()),
            out: Screen::new(Term::stdout()),
        }
    }

    /// Returns the width of the output of results.
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

    /// Writes a result that is already text.
    pub(crate) fn text(&self, text: &[u8]) -> io::Result<()> {
        io::stdout().write_all(text)
    }

    /// Writes a result as one JSON document.
    pub(crate) fn document(&self, content: &impl Serialize) -> io::Result<()> {
        let text = serde_json::to_string_pretty(content)?;
        writeln!(io::stdout(), "{text}")
    }

    /// Writes one line of JSON, and flushes it.
    pub(crate) fn json_line(&self, content: &impl Serialize) -> io::Result<()> {
        let mut text = serde_json::to_string(content)?;
        text.push('\n');
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()
    }

    /// Writes text beside the result.
    pub(crate) fn aside(&self, lines: &[Line]) {
        let text: String = lines
            .iter()
            .map(|line| self.err.render(line, None) + "\n")
            .collect();
        // A closed stderr is no error.
        let _ = io::stderr().write_all(text.as_bytes());
    }
}
