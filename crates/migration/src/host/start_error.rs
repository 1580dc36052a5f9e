//! Errors that keep an agent from starting.

/// Why an agent could not start, with a hint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct StartError {
    /// The problem.
    pub message: String,
    /// What the operator can do about it.
    pub hint: Option<String>,
}

impl StartError {
    /// Creates an error without a hint.
    pub fn new(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            hint: None,
        }
    }

    /// Adds a hint to the error.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}
