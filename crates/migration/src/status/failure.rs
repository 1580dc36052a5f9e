//! Converts failures of a migration into errors of the API.

use crate::host::right::Holder;
use longhaul_api::{ApiError, ErrorCode, Outcome, VerifyResult};
use longhaul_hypervisor::attach::AttachGuestError;
use longhaul_protocol::message::{Refusal, RefusalCode};
use longhaul_transport::{ConnectError, ProbeError};
use std::fmt::Display;
use std::time::Duration;

pub(crate) fn internal(what: &str) -> ApiError {
    ApiError::new(ErrorCode::Internal, what)
}

pub(crate) fn cancelled(why: &str) -> ApiError {
    ApiError::new(ErrorCode::Cancelled, why)
}

pub(crate) fn protocol(host: &str, error: &dyn Display) -> ApiError {
    ApiError::new(
        ErrorCode::PeerProtocol,
        format!("{host} breaks the protocol: {error}"),
    )
    .hint(format!(
        "look into the log of the agent on {host}; update both agents"
    ))
}

pub(crate) fn peer_gave_up(host: &str, reason: &str) -> ApiError {
    ApiError::new(ErrorCode::PeerGaveUp, format!("{host} gave up: {reason}"))
        .hint(format!("the log of the agent on {host} says more"))
}

pub(crate) fn link_cut(host: &str, after: Duration, stopped: bool) -> ApiError {
    let text = format!(
        "{host} could not be reached for {:.1} s",
        after.as_secs_f64()
    );
    let hint = match stopped {
        true => {
            "the guest stood still, and waits no longer than the downtime asked for: try \
                 again, or allow more with --downtime"
        }
        false => "try again when the link is back, or wait longer with --patience",
    };
    ApiError::new(ErrorCode::PeerUnreachable, text).hint(hint)
}

pub(crate) fn qemu_ended(guest: &str, log: &str) -> ApiError {
    let log = if log.is_empty() {
        "it said nothing"
    } else {
        log
    };
    ApiError::new(
        ErrorCode::Qemu,
        format!("the QEMU of {guest} ended here: {log}"),
    )
}

pub(crate) fn different(result: &VerifyResult) -> ApiError {
    let place = result.first_difference.as_deref().unwrap_or("nowhere");
    let blocks = result.different_blocks;
    ApiError::new(
        ErrorCode::VerifyFailed,
        format!("the copies differ in {blocks} blocks of 4 KiB, the first in {place}"),
    )
    .hint("please report this: it is a defect of Longhaul or of QEMU")
}

pub(crate) fn refused(refusal: Refusal) -> ApiError {
    let code = match refusal.code {
        RefusalCode::NotAllowed => ErrorCode::PeerForbids,
        RefusalCode::Busy | RefusalCode::Unsuitable => ErrorCode::Refused,
        RefusalCode::QemuFailed => ErrorCode::Qemu,
        RefusalCode::Invalid => ErrorCode::PeerProtocol,
    };
    let error = ApiError::new(code, refusal.text);
    match refusal.hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

pub(crate) fn connect(host: &str, error: &ConnectError) -> ApiError {
    let code = match error {
        ConnectError::NotTrusted(_) => ErrorCode::HostUnknown,
        ConnectError::Trust(_) => ErrorCode::Internal,
        ConnectError::Unreachable { .. } | ConnectError::NoWay(_) | ConnectError::Lost { .. } => {
            ErrorCode::PeerUnreachable
        }
        ConnectError::IdentityChanged { .. } => ErrorCode::PeerIdentity,
        ConnectError::Refused { .. } => ErrorCode::PeerForbids,
        ConnectError::Incompatible(_) => ErrorCode::PeerVersion,
    };
    let hint = match code {
        ErrorCode::PeerUnreachable if matches!(error, ConnectError::NoWay(_)) => Some(format!(
            "both hosts need a rendezvous server of their realm: `longhaul host realm` here and on \
             {host} says whether they are registered"
        )),
        ErrorCode::PeerUnreachable => Some(format!(
            "is the agent on {host} running, and its UDP port open? `longhaul host list` shows \
             the address"
        )),
        ErrorCode::PeerForbids => Some(format!(
            "on {host}, this host must be trusted: `longhaul host` shows its fingerprint"
        )),
        _ => None,
    };
    let api = ApiError::new(code, error.to_string());
    match hint {
        Some(hint) => api.hint(hint),
        None => api,
    }
}

/// Returns the outcome of a failure: aborted if it was requested, failed otherwise.
pub(crate) fn outcome(failure: &ApiError) -> Outcome {
    match failure.code {
        ErrorCode::Cancelled => Outcome::Aborted,
        _ => Outcome::Failed,
    }
}

pub(crate) fn probe(host: &str, error: &ProbeError) -> ApiError {
    match error {
        ProbeError::Connect(error) => connect(host, error),
        other => ApiError::new(ErrorCode::PeerUnreachable, format!("{host}: {other}")),
    }
}

/// Returns the error of a migration that an operator has decided.
pub(crate) fn overruled(because: &str) -> ApiError {
    ApiError::new(
        ErrorCode::PeerUnreachable,
        format!("an operator has decided: {because}"),
    )
}

/// Returns the error for a guest that the arbiter gave back.
pub(crate) fn by_arbiter(guest: &str, host: &str) -> ApiError {
    ApiError::new(
        ErrorCode::PeerUnreachable,
        format!("{host} does not answer, and the realm's arbiter has given {guest} back"),
    )
    .hint(format!(
        "{host} hears of it when it is back: move {guest} again"
    ))
}

/// Returns the error for a handover that has to have an arbiter.
pub(crate) fn no_arbiter(why: &str) -> ApiError {
    ApiError::new(
        ErrorCode::Refused,
        format!("the handover has no arbiter, and one is required: {why}"),
    )
    .hint("longhaul realm show says what is reached; or leave out --require-arbiter")
}

/// Returns the error for a guest whose right is not on this host.
pub(crate) fn not_here(guest: &str, holder: &Holder) -> ApiError {
    match holder {
        Holder::Here => internal("a right that is here was refused"),
        Holder::Elsewhere(host) => ApiError::new(
            ErrorCode::GuestElsewhere,
            format!("{guest} was moved to {host}"),
        )
        .hint(format!(
            "it may only run there: look with `longhaul guests` on {host}, and move it back from \
             there; where {host} never comes back: longhaul guests reclaim {guest}"
        )),
        Holder::InDoubt(host) => ApiError::new(
            ErrorCode::InDoubt,
            format!("{guest} was handed to {host}, which has not said whether it runs there"),
        )
        .hint(format!(
            "it is known as soon as the two agents meet: see `longhaul migrations`; where {host} \
             is dead or cut off: longhaul resolve {guest}"
        )),
        Holder::Unknown(why) => ApiError::new(
            ErrorCode::InDoubt,
            format!("it is unknown who may run {guest}: {why}"),
        )
        .hint("nothing is done with it before that is repaired: `longhaul doctor` says how"),
    }
}

/// Adds the generation of the right to an error's message.
pub(crate) fn of_generation(mut error: ApiError, generation: Option<u64>) -> ApiError {
    if let Some(generation) = generation {
        error
            .message
            .push_str(&format!(" (generation {generation})"));
    }
    error
}

/// The part of a message about a guest that could not be attached.
pub const UNCHANGED: &str = "nothing was changed; it runs as before";

/// Converts an error of attaching a guest into one of the API.
pub fn attach(error: AttachGuestError) -> ApiError {
    let code = match &error {
        AttachGuestError::Name(_) => ErrorCode::InvalidRequest,
        AttachGuestError::Exists(_) => ErrorCode::AlreadyExists,
        AttachGuestError::Refused { .. }
        | AttachGuestError::Process(_)
        | AttachGuestError::Path(_) => ErrorCode::Refused,
        AttachGuestError::Qmp(_) => ErrorCode::Qemu,
        AttachGuestError::Stop(_) | AttachGuestError::Host { .. } => ErrorCode::Internal,
    };
    ApiError::new(code, error.to_string()).state_of_guest(UNCHANGED)
}
