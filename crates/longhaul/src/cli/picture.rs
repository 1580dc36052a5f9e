//! A progress line.

use crate::cli::output::Output;
use crate::cli::paint::Line;
use std::io::Write;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The interval between two updates of the progress.
pub(crate) const PICTURE_EVERY: Duration = Duration::from_millis(100);

/// A progress line that is redrawn in place on a terminal; hidden elsewhere.
pub(crate) struct Picture<'a> {
    output: &'a Output,
    /// The time of the last update.
    drawn: Mutex<Option<Instant>>,
}

impl<'a> Picture<'a> {
    pub(crate) fn new(output: &'a Output) -> Self {
        Self {
            output,
            drawn: Mutex::new(None),
        }
    }

    /// Draws the line, unless it was just drawn, or is being drawn.
    pub(crate) fn draw(&self, line: impl FnOnce(usize) -> Line) {
        if self.output.json || !self.output.err.stays_in_place() {
            return;
        }
        let Ok(mut drawn) = self.drawn.try_lock() else {
            return;
        };
        if drawn.is_none_or(|drawn| drawn.elapsed() >= PICTURE_EVERY) {
            *drawn = Some(Instant::now());
            let width = self.output.err.width().saturating_sub(1);
            let line = self.output.err.render(&line(width), Some(width));
            write(&format!("\r{line}\x1b[K"));
        }
    }

    pub(crate) fn clear(&self) {
        if let Ok(mut drawn) = self.drawn.lock()
            && drawn.take().is_some()
        {
            write("\r\x1b[K");
        }
    }
}

impl Drop for Picture<'_> {
    fn drop(&mut self) {
        self.clear();
    }
}

fn write(text: &str) {
    let mut err = std::io::stderr().lock();
    // A terminal that is gone cannot be written to, which is no error.
    let _ = err.write_all(text.as_bytes()).and_then(|()| err.flush());
}
