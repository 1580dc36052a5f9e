//! How a command ends when it does not do what was asked.

use crate::cli::paint::{Line, Tone};
use longhaul_api::{ApiError, ClientError};
use longhaul_migration::host::start_error::StartError;
use serde::Serialize;

/// An error as it is shown, and the exit code that goes with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct CliError {
    /// The API's code, or a word for what the command found by itself.
    code: String,
    message: String,
    hint: Option<String>,
    state_of_guest: Option<String>,
    /// The exit code.
    pub(crate) exit_code: u8,
}

impl CliError {
    /// A wrong use of the command.
    pub(crate) fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            hint: Some(hint.into()),
            state_of_guest: None,
            code: "usage".to_owned(),
            exit_code: 2,
        }
    }

    /// An agent's error, with another exit code than its own.
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

    /// Something that is not done to a base image, with what to do instead.
    pub(crate) fn image(message: impl Into<String>, hint: Option<String>, exit_code: u8) -> Self {
        Self {
            message: message.into(),
            hint,
            state_of_guest: None,
            code: "image".to_owned(),
            exit_code,
        }
    }

    /// A journal, or the folder of them, that cannot be read.
    pub(crate) fn journal(message: impl Into<String>, hint: Option<&str>) -> Self {
        Self {
            message: message.into(),
            hint: hint.map(str::to_owned),
            state_of_guest: None,
            code: "journal".to_owned(),
            exit_code: 1,
        }
    }

    /// What was left alone because somebody wanted to go.
    pub(crate) fn stopped(message: impl Into<String>, state: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            hint: None,
            state_of_guest: Some(state.into()),
            code: "stopped".to_owned(),
            exit_code: 130,
        }
    }

    /// Something that a command found by itself.
    pub(crate) fn failed(code: &str, message: String) -> Self {
        Self {
            message,
            hint: None,
            state_of_guest: None,
            code: code.to_owned(),
            exit_code: 1,
        }
    }

    /// The same error, saying where the guest is or how to find out.
    pub(crate) fn with_state(mut self, state: String) -> Self {
        self.state_of_guest = Some(state);
        self
    }

    /// As text.
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

/// An error as JSON: `{"error": {...}}`.
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

/// Output that could not be written, such as to a pipe whose reader went away.
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
