//! Defines the errors of commands and their exit codes.

use crate::cli::paint::{Line, Tone};
use longhaul_api::{ApiError, ClientError};
use longhaul_migration::host::start_error::StartError;
use serde::Serialize;

/// An error for display, with its exit code.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct CliError {
    /// The API's code, or a word for an error of the command itself.
    code: String,
    message: String,
    hint: Option<String>,
    state_of_guest: Option<String>,
    /// The exit code.
    pub(crate) exit_code: u8,
}

impl CliError {
    /// Returns a usage error.
    pub(crate) fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            hint: Some(hint.into()),
            state_of_guest: None,
            code: "usage".to_owned(),
            exit_code: 2,
        }
    }

    /// Returns an agent's error, with an exit code other than its own.
    pub(crate) fn api(error: &ApiError, exit_code: u8) -> Self {
        let code = serde_json::to_value(error.code).ok();
        Self {
            message: error.message.clone(),
            hint: error.hint.clone(),
            state_of_guest: error.state_of_guest.clone(),
            code: code
                .and_then(|code| code.as_str().map(str::to_owned))
                .unwrap_or_default(),
            exit_code,
        }
    }

    /// Returns a refused operation on a base image, with advice.
    pub(crate) fn image(message: impl Into<String>, hint: Option<String>, exit_code: u8) -> Self {
        Self {
            message: message.into(),
            hint,
            state_of_guest: None,
            code: "image".to_owned(),
            exit_code,
        }
    }

    /// Returns the error of a parcel that cannot be read.
    pub(crate) fn parcel(message: impl Into<String>, hint: Option<String>) -> Self {
        Self {
            message: message.into(),
            hint,
            state_of_guest: None,
            code: "parcel".to_owned(),
            exit_code: 1,
        }
    }

    /// Returns the error of an unreadable journal, or folder of journals.
    pub(crate) fn journal(message: impl Into<String>, hint: Option<&str>) -> Self {
        Self {
            message: message.into(),
            hint: hint.map(str::to_owned),
            state_of_guest: None,
            code: "journal".to_owned(),
            exit_code: 1,
        }
    }

    /// Returns the error for work that was skipped because of an interrupt.
    pub(crate) fn stopped(message: impl Into<String>, state: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            hint: None,
            state_of_guest: Some(state.into()),
            code: "stopped".to_owned(),
            exit_code: 130,
        }
    }

    /// Returns an error of the command itself.
    pub(crate) fn failed(code: &str, message: String) -> Self {
        Self {
            message,
            hint: None,
            state_of_guest: None,
            code: code.to_owned(),
            exit_code: 1,
        }
    }

    /// Returns what it says.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// Returns the error with the guest's place, or how to find it out.
    pub(crate) fn with_state(mut self, state: String) -> Self {
        self.state_of_guest = Some(state);
        self
    }

    /// Returns the error as text.
    pub(crate) fn lines(&self) -> Vec<Line> {
        let mut lines = Vec::new();
        for (index, text) in self.message.lines().enumerate() {
            lines.push(match index {
                0 => Line::default()
                    .tone(Tone::Bad, "error")
                    .plain(format!(": {text}")),
                _ => Line::text(format!("  {text}")),
            });
        }
        if let Some(hint) = &self.hint {
            lines.push(Line::text(format!("  hint: {hint}")));
        }
        lines.extend(
            self.state_of_guest
                .as_ref()
                .map(|state| Line::text(format!("  {state}"))),
        );
        lines
    }
}

/// The JSON form of an error: `{"error": {...}}`.
#[derive(Serialize)]
pub(crate) struct ErrorDocument<'a> {
    pub(crate) error: &'a CliError,
}

impl From<ClientError> for CliError {
    fn from(error: ClientError) -> Self {
        match &error {
            ClientError::Api(api) => Self::api(api, error.exit_code()),
            other => Self {
                message: other.to_string(),
                hint: other.hint(),
                state_of_guest: None,
                code: "agent_unreachable".to_owned(),
                exit_code: other.exit_code(),
            },
        }
    }
}

impl From<StartError> for CliError {
    fn from(error: StartError) -> Self {
        Self {
            message: error.message,
            hint: error.hint,
            state_of_guest: None,
            code: "agent_start".to_owned(),
            exit_code: 1,
        }
    }
}

/// The output could not be written, for example to a pipe whose reader has ended.
impl From<std::io::Error> for CliError {
    fn from(error: std::io::Error) -> Self {
        Self {
            message: format!("the output could not be written: {error}"),
            hint: None,
            state_of_guest: None,
            code: "output".to_owned(),
            exit_code: 1,
        }
    }
}
