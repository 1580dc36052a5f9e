//! What can go wrong in the laboratory, and what to do about it.

use std::io;
use std::path::PathBuf;

/// A laboratory, or a part of it, that could not be made, changed or removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LabError {
    /// Something of the operating system's did not work.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done.
        doing: String,
        /// What the system said.
        source: io::Error,
    },
    /// A program that the laboratory uses failed.
    #[error("`{command}` failed: {message}")]
    Command {
        /// The command as one would type it.
        command: String,
        /// What it said on its standard error.
        message: String,
    },
    /// A program that the laboratory needs is not there.
    #[error("{what} is missing (hint: {hint})")]
    Missing {
        /// What is missing.
        what: String,
        /// The command that mends it.
        hint: String,
    },
    /// A part of the laboratory did not do in time what it should have.
    #[error("{what} within {seconds} s (see {log})", log = log.display())]
    Late {
        /// What did not happen.
        what: String,
        /// How long it was waited for.
        seconds: u64,
        /// Where it may have said why.
        log: PathBuf,
    },
    /// A process or a file said something that is not understood.
    #[error("{what}: {message}")]
    Answer {
        /// Who said it.
        what: String,
        /// What was wrong with it.
        message: String,
    },
    /// The link made is not the link asked for.
    #[error("the link differs from the one asked for: {0}")]
    Link(String),
    /// There is no laboratory, or more than one, that the command could mean.
    #[error("{0}")]
    Which(String),
    /// Ctrl-C, or a signal that asks to end.
    #[error("interrupted")]
    Interrupted,
}

/// Adds to an I/O error what was being done.
pub trait During<T> {
    /// Turns the error into a [`LabError`] that says what was being done.
    ///
    /// # Errors
    /// The same error, with more to it.
    fn during(self, doing: impl FnOnce() -> String) -> Result<T, LabError>;
}

impl<T, E: Into<io::Error>> During<T> for Result<T, E> {
    fn during(self, doing: impl FnOnce() -> String) -> Result<T, LabError> {
        self.map_err(|error| LabError::Io {
            doing: doing(),
            source: error.into(),
        })
    }
}
