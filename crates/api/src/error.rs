//! Defines the errors with which an agent answers a request.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Every reason for which a request fails. Each has one HTTP status and one exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The request is not one that this version of the API knows, or a value in it is wrong.
    InvalidRequest,
    /// The request's body is larger than the agent reads.
    RequestTooLarge,
    /// Over TCP: the token is missing or wrong.
    Unauthorized,
    /// There is no such route.
    RouteUnknown,
    /// The route exists, but not with this method.
    MethodNotAllowed,
    /// No guest of that name is known here.
    GuestUnknown,
    /// No trusted host has that name.
    HostUnknown,
    /// No migration has that id.
    MigrationUnknown,
    /// More than one migration's id begins like that.
    MigrationAmbiguous,
    /// That name is taken.
    AlreadyExists,
    /// Another migration of the same guest is under way, or another command holds it.
    GuestBusy,
    /// The guest is not in a state in which this can be done.
    GuestState,
    /// The right to run the guest is with another host.
    GuestElsewhere,
    /// Who may run the guest is in doubt until the two agents have met again.
    InDoubt,
    /// The migration has ended, or passed the point after which this can be done.
    TooLate,
    /// A check refused the migration before anything moved.
    Refused,
    /// The other host cannot be reached.
    PeerUnreachable,
    /// The other host's key is not the one that is trusted.
    PeerIdentity,
    /// The other host does not trust this one with what was asked.
    PeerForbids,
    /// The two agents have no version of the protocol in common.
    PeerVersion,
    /// QEMU would not do what it was asked, or cannot be reached.
    Qemu,
    /// The migration was cancelled.
    Cancelled,
    /// The other agent said something that it may not say.
    PeerProtocol,
    /// The other agent ended the migration.
    PeerGaveUp,
    /// A hook of one of the two hosts failed, and stopped the migration.
    HookFailed,
    /// Both copies of the guest were compared, and differ.
    VerifyFailed,
    /// The agent has no room for more of these now.
    Busy,
    /// The agent is starting or stopping, or was started without what this needs.
    Unavailable,
    /// A defect in the agent, or a failing disk; the agent's log says more.
    Internal,
}

impl ErrorCode {
    /// All codes.
    pub const ALL: [Self; 29] = [
        Self::InvalidRequest,
        Self::RequestTooLarge,
        Self::Unauthorized,
        Self::RouteUnknown,
        Self::MethodNotAllowed,
        Self::GuestUnknown,
        Self::HostUnknown,
        Self::MigrationUnknown,
        Self::MigrationAmbiguous,
        Self::AlreadyExists,
        Self::GuestBusy,
        Self::GuestState,
        Self::GuestElsewhere,
        Self::InDoubt,
        Self::TooLate,
        Self::Refused,
        Self::PeerUnreachable,
        Self::PeerIdentity,
        Self::PeerForbids,
        Self::PeerVersion,
        Self::Qemu,
        Self::Cancelled,
        Self::PeerProtocol,
        Self::PeerGaveUp,
        Self::HookFailed,
        Self::VerifyFailed,
        Self::Busy,
        Self::Unavailable,
        Self::Internal,
    ];

    /// Returns the HTTP status that carries it.
    pub fn http_status(self) -> u16 {
        match self {
            Self::InvalidRequest => 400,
            Self::Unauthorized => 401,
            Self::RouteUnknown
            | Self::GuestUnknown
            | Self::HostUnknown
            | Self::MigrationUnknown => 404,
            Self::MethodNotAllowed => 405,
            Self::MigrationAmbiguous
            | Self::AlreadyExists
            | Self::GuestBusy
            | Self::GuestState
            | Self::GuestElsewhere
            | Self::InDoubt
            | Self::TooLate
            | Self::Cancelled => 409,
            Self::RequestTooLarge => 413,
            Self::Refused | Self::HookFailed => 422,
            Self::Internal | Self::VerifyFailed => 500,
            Self::PeerUnreachable
            | Self::PeerIdentity
            | Self::PeerForbids
            | Self::PeerVersion
            | Self::PeerProtocol
            | Self::PeerGaveUp
            | Self::Qemu => 502,
            Self::Busy | Self::Unavailable => 503,
        }
    }

    /// Returns the exit code of a command with this error: 3 where nothing was changed because a
    /// check or a right forbade it, 2 for a wrong request, 4 in doubt, 130 for an interrupt or a
    /// cancellation, 1 for failures.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::InvalidRequest
            | Self::RequestTooLarge
            | Self::RouteUnknown
            | Self::MethodNotAllowed
            | Self::MigrationAmbiguous => 2,
            Self::Unauthorized
            | Self::GuestUnknown
            | Self::HostUnknown
            | Self::MigrationUnknown
            | Self::AlreadyExists
            | Self::GuestBusy
            | Self::GuestState
            | Self::GuestElsewhere
            | Self::TooLate
            | Self::Refused
            | Self::PeerUnreachable
            | Self::PeerIdentity
            | Self::PeerForbids
            | Self::PeerVersion
            | Self::Busy
            | Self::Unavailable => 3,
            Self::InDoubt => 4,
            Self::Qemu
            | Self::Internal
            | Self::PeerProtocol
            | Self::PeerGaveUp
            | Self::HookFailed
            | Self::VerifyFailed => 1,
            Self::Cancelled => 130,
        }
    }
}

/// An answer that is not what was asked for: what is wrong, what to do, where the guest is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ApiError {
    /// The reason, for programs.
    pub code: ErrorCode,
    /// What is wrong, in one sentence without a full stop.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
    /// Where the guest is and what was changed, such as `nothing was moved; web-7 runs on lyon-1`.
    pub state_of_guest: Option<String>,
}

impl ApiError {
    /// Creates an error without a hint.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            hint: None,
            state_of_guest: None,
        }
    }

    /// Returns the same error with advice.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Returns the same error with the guest's place.
    #[must_use]
    pub fn state_of_guest(mut self, state: impl Into<String>) -> Self {
        self.state_of_guest = Some(state.into());
        self
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ApiError {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_code_is_listed_and_has_an_error_status() {
        let listed: HashSet<_> = ErrorCode::ALL.into_iter().collect();
        assert_eq!(listed.len(), ErrorCode::ALL.len());
        let schema = schemars::schema_for!(ErrorCode);
        let known = schema.get("oneOf").and_then(|list| list.as_array());
        assert_eq!(known.map(Vec::len), Some(listed.len()));
        for code in ErrorCode::ALL {
            assert!((400..600).contains(&code.http_status()), "{code:?}");
            assert!([1, 2, 3, 4, 130].contains(&code.exit_code()), "{code:?}");
        }
    }

    #[test]
    fn an_error_survives_its_json() {
        let error = ApiError::new(ErrorCode::Refused, "paris-2 cannot run web-7")
            .hint("install QEMU 10.0 on paris-2")
            .state_of_guest("nothing was moved; web-7 runs on lyon-1");
        let json = serde_json::to_string(&error).unwrap();
        assert!(json.starts_with(r#"{"code":"refused","message":"paris-2"#));
        assert_eq!(serde_json::from_str::<ApiError>(&json).unwrap(), error);
    }
}
