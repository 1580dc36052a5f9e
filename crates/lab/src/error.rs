//! Defines the laboratory's errors, with advice.

use std::io;
use std::path::PathBuf;

/// Why a laboratory, or a part of it, could not be created, changed or removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LabError {
    /// A system call failed.
    #[error("{doing}: {source}")]
    Io {
        /// The operation that failed.
        doing: String,
        /// The system's error.
        source: io::Error,
    },
    /// A program that the laboratory uses failed.
    #[error("`{command}` failed: {message}")]
    Command {
        /// The command, as typed in a shell.
        command: String,
        /// Its standard error.
        message: String,
    },
    /// A program that the laboratory needs is missing.
    #[error("{what} is missing (hint: {hint})")]
    Missing {
        /// The missing part.
        what: String,
        /// The command that installs it.
        hint: String,
    },
    /// An event did not occur in time.
    #[error("{what} within {seconds} s (see {log})", log = log.display())]
    Late {
        /// The expected event.
        what: String,
        /// The time waited.
        seconds: u64,
        /// A log that may have the reason.
        log: PathBuf,
    },
    /// The output of a process, or a file, is not understood.
    #[error("{what}: {message}")]
    Answer {
        /// Its source.
        what: String,
        /// The error in it.
        message: String,
    },
    /// The created link differs from the requested one.
    #[error("the link differs from the one asked for: {0}")]
    Link(String),
    /// The command fits no laboratory, or more than one.
    #[error("{0}")]
    Which(String),
    /// Ctrl-C, or a signal that asks to end.
    #[error("interrupted")]
    Interrupted,
}

/// Adds the failed operation to an I/O error.
pub trait During<T> {
    /// Turns the error into a [`LabError`] that names the operation.
    ///
    /// # Errors
    /// Returns the same error with an extended operation.
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
