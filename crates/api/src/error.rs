//! Defines the errors of the API.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The reason of a failed request, for programs. Each code has one HTTP status and one exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The request is malformed, has an unknown field, or has a value out of range.
    InvalidRequest,
    /// The request's body is larger than 256 KiB.
    RequestTooLarge,
    /// The token is missing or wrong (only over TCP).
    Unauthorized,
    /// The route does not exist.
    RouteUnknown,
    /// The route does not have this method.
    MethodNotAllowed,
    /// No guest with this name is known here.
    GuestUnknown,
    /// No trusted host has this name.
    HostUnknown,
    /// No migration has this id.
    MigrationUnknown,
    /// More than one migration's id begins with this prefix.
    MigrationAmbiguous,
    /// The name or fingerprint is already in use.
    AlreadyExists,
    /// The guest is in a migration, or another command uses it. Also: a migration needs the host
    /// that would be removed.
    GuestBusy,
    /// The guest's state does not allow the request.
    GuestState,
    /// The right to run the guest is with another host.
    GuestElsewhere,
    /// It is in doubt which host may run the guest, until the agents connect again.
    InDoubt,
    /// The migration has ended, or can no longer be changed in this way.
    TooLate,
    /// A check refused the request before anything moved.
    Refused,
    /// The other host cannot be reached.
    PeerUnreachable,
    /// The other host's key is not the trusted one.
    PeerIdentity,
    /// The other host does not permit this host to make the request.
    PeerForbids,
    /// The two agents have no protocol version in common.
    PeerVersion,
    /// QEMU refused or failed a command, or cannot be reached.
    Qemu,
    /// The migration was cancelled.
    Cancelled,
    /// The other agent violated the protocol.
    PeerProtocol,
    /// The other agent ended the migration.
    PeerGaveUp,
    /// A hook on one of the two hosts failed, and stopped the migration.
    HookFailed,
    /// The comparison of both copies of the guest found a difference.
    VerifyFailed,
    /// The agent cannot take more requests of this kind now.
    Busy,
    /// The agent is starting or stopping, or its configuration lacks what the request needs.
    Unavailable,
    /// A defect in the agent, or a failure of this host, such as a disk error. The agent's log has
    /// details.
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

    /// Returns the HTTP status of an answer with this code.
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

    /// Returns the exit code of a command that fails with this code: 1 for a failure, 2 for a wrong
    /// request, 3 if the request was refused and nothing was changed, 4 in doubt, 130 for an
    /// interrupt or a cancellation.
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

/// An error: the cause, the remedy, and the guest's location.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ApiError {
    /// Reason, for programs.
    pub code: ErrorCode,
    /// Cause, in one sentence without a full stop.
    pub message: String,
    /// Remedy; null if none is known.
    pub hint: Option<String>,
    /// Location of the guest and what was changed, such as `nothing was moved; web-7 runs on
    /// lyon-1`; null if the error concerns no guest.
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

    /// Returns the same error with a remedy.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Returns the same error with the guest's location.
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
