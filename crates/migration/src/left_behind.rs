//! Resumes a guest that a migration left paused, and takes one back from a host that never returns.

use crate::context::Context;
use crate::disks::exports;
use crate::host::right::Holder;
use crate::status::failure;
use crate::status::registry::{Reservation, Taken};
use longhaul_api::{ApiError, BECAUSE_CHARS_MAX, ErrorCode, OtherSide, ReclaimGuest};
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::manager::{AbortError, Stays};
use longhaul_hypervisor::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use longhaul_protocol::Generation;
use longhaul_storage::Right;
use longhaul_transport::ConnectError;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::block_in_place;
use tokio::time::timeout;

/// Time limit for a host to answer before it is considered dead.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Time after which a request that was repeated has failed again, if it does.
const FAILS_WITHIN: Duration = Duration::from_millis(500);
/// Increment of the generation. The dead host may have given the guest to a third host, which then
/// has the generation in between.
const GENERATIONS: u64 = 2;

/// Takes back the right to run a guest, in a generation above that of the other host.
pub(crate) async fn reclaim(
    context: &Context,
    guest: &str,
    reclaim: &ReclaimGuest,
) -> Result<(), ApiError> {
    if reclaim.because.chars().count() > BECAUSE_CHARS_MAX {
        let text = format!("`because` is longer than {BECAUSE_CHARS_MAX} characters");
        return Err(ApiError::new(ErrorCode::InvalidRequest, text));
    }
    let _reservation = take(context, guest)?;
    let right = context.right(guest);
    let (host, generation) = match (right.holder, right.generation) {
        (Holder::Elsewhere(host), Some(generation)) => (host, generation),
        (Holder::Here, _) => {
            let text = format!("{guest} belongs to this host already");
            return Err(ApiError::new(ErrorCode::GuestState, text)
                .hint(format!("longhaul guests start {guest}")));
        }
        (holder, _) => return Err(failure::not_here(guest, &holder)),
    };
    let found = block_in_place(|| context.parts.guests.find(guest));
    let found = found.map_err(|error| failure::internal(&error.to_string()))?;
    if let Some(pid) = found.map(|found| found.pid().unwrap_or_default()) {
        let text = format!("a QEMU of {guest} is here, though it belongs to {host}");
        return Err(ApiError::new(ErrorCode::GuestState, text).hint(format!(
            "end it first: longhaul guests stop --force {guest} (process {pid})"
        )));
    }
    if reclaim.other_side == OtherSide::Dead {
        require_silence(context, guest, &host).await?;
    }
    let right = Right {
        guest: guest.to_owned(),
        generation: Generation(generation.saturating_add(GENERATIONS)),
        holder: longhaul_storage::Holder::Here,
    };
    tracing::warn!(
        guest,
        host,
        other_side = reclaim.other_side.name(),
        because = reclaim.because,
        generation = right.generation.0,
        "taken back by an operator's word"
    );
    block_in_place(|| context.rights.set(&right))
        .map_err(|error| failure::internal(&error.to_string()))?;
    context.unmark(guest);
    Ok(())
}

/// Reserves a guest, unless a migration of it is open.
fn take(context: &Context, guest: &str) -> Result<Reservation, ApiError> {
    let moving = match context.registry.taken(guest) {
        Some(Taken::Moving(id, _)) => Some(id),
        _ => None,
    };
    let taken = context.registry.take(guest, Taken::Locally);
    taken.map_err(|error| match moving {
        Some(id) => error.hint(format!(
            "that migration decides: wait for it, or where its other host never comes back: \
             longhaul resolve {id}"
        )),
        None => error,
    })
}

/// Refuses to treat a host as dead if it answers.
async fn require_silence(context: &Context, guest: &str, host: &str) -> Result<(), ApiError> {
    let answers = match timeout(ANSWER_WITHIN, context.endpoint.connect(host)).await {
        Ok(Ok(_)) => true,
        Ok(Err(ConnectError::Refused { .. } | ConnectError::Incompatible(_))) => true,
        Ok(Err(_)) | Err(_) => false,
    };
    if !answers {
        return Ok(());
    }
    let text = format!("{host} is not dead: its agent answers");
    Err(ApiError::new(ErrorCode::Refused, text).hint(format!(
        "on {host}: longhaul guests; if it is cut off from the disks and networks of {guest} for \
         good: --other-side fenced"
    )))
}

/// Resumes a guest that belongs to this host and is paused.
pub(crate) async fn resume(context: &Arc<Context>, guest: &str) -> Result<(), ApiError> {
    let (state, guests) = (&context.parts.config.state, &context.parts.guests);
    let found = block_in_place(|| guests.find(guest));
    let found = found.map_err(|error| failure::internal(&error.to_string()))?;
    let Some(found) = found else {
        let text = format!("{guest} has no QEMU here");
        return Err(ApiError::new(ErrorCode::GuestState, text)
            .hint(format!("longhaul guests start {guest}")));
    };
    if context.right(guest).generation.is_none() && block_in_place(|| is_incoming(&found)) {
        let text = format!("the QEMU of {guest} here waited for a migration that did not complete");
        return Err(ApiError::new(ErrorCode::GuestState, text)
            .hint(format!("longhaul guests stop --force {guest} ends it")));
    }
    let of_qemu = |error: &dyn std::fmt::Display| {
        ApiError::new(ErrorCode::Qemu, format!("{guest} is not resumed: {error}"))
    };
    let lease = guests.lease(&found, COMMAND_TIMEOUT).await;
    let lease = lease.map_err(|error| of_qemu(&error))?;
    if require_paused(guest, lease.qmp()).await? == Paused::ByDisk {
        return repeat_requests(guest, lease.qmp()).await;
    }
    let stays = Stays::Interrupted {
        ran: true,
        stopped: true,
    };
    match guests.abort_outgoing(&found, &lease, stays).await {
        Ok(()) => {}
        Err(error @ AbortError::Stopped(_)) => return Err(of_qemu(&error)),
        Err(AbortError::Settings(error)) => {
            tracing::error!(guest, error, "its QEMU keeps a setting of its migration");
        }
    }
    tracing::info!(guest, "resumed by an operator");
    if let Err(error) = exports::take_out(state, &found, lease.qmp()).await {
        tracing::error!(guest, %error, "still below a disk");
        context.sweeper.wake();
    }
    Ok(())
}

/// Returns whether a QEMU was started to receive its guest. True if this is unknown.
fn is_incoming(guest: &Guest) -> bool {
    let line = guest
        .pid()
        .map(|pid| std::fs::read(format!("/proc/{pid}/cmdline")));
    match line {
        Some(Ok(line)) => line
            .split(|byte| *byte == 0)
            .any(|word| word == b"-incoming"),
        // A QEMU that cannot be inspected is not resumed.
        Some(Err(_)) | None => true,
    }
}

/// Why a guest is paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Paused {
    /// A migration or an operator has paused it.
    ByCommand,
    /// A request to a disk has failed.
    ByDisk,
}

/// Lets a guest run whose disk has failed. QEMU repeats the request.
async fn repeat_requests(guest: &str, qmp: &Qmp) -> Result<(), ApiError> {
    let of_qemu = |error: QmpError| {
        ApiError::new(ErrorCode::Qemu, format!("{guest} is not resumed: {error}"))
    };
    qmp.query("cont").await.map_err(of_qemu)?;
    tokio::time::sleep(FAILS_WITHIN).await;
    let status = qmp.query("query-status").await.map_err(of_qemu)?;
    if status["status"] == "io-error" {
        let text = format!("{guest} is not resumed: its disk has failed again");
        return Err(ApiError::new(ErrorCode::GuestState, text)
            .hint("make room on the disk's storage, or repair it; QEMU's log may say more"));
    }
    tracing::info!(guest, "resumed by an operator after a disk had failed");
    Ok(())
}

/// Refuses a guest that runs, or that neither a migration nor a failed disk has stopped.
async fn require_paused(guest: &str, qmp: &Qmp) -> Result<Paused, ApiError> {
    let of_qemu = |error: &dyn std::fmt::Display| {
        ApiError::new(ErrorCode::Qemu, format!("{guest} is not resumed: {error}"))
    };
    let status = qmp.query("query-status").await;
    let status = status.map_err(|error| of_qemu(&error))?;
    let status = status["status"].as_str().unwrap_or("unknown").to_owned();
    let text = match status.as_str() {
        "paused" | "postmigrate" => {
            let migration = qmp.query("query-migrate").await;
            let migration = migration.map_err(|error| of_qemu(&error))?;
            let migration = migration["status"].as_str().unwrap_or("none");
            if matches!(migration, "none" | "completed" | "failed" | "cancelled") {
                return Ok(Paused::ByCommand);
            }
            format!("another program is moving {guest} (migration {migration})")
        }
        "io-error" => return Ok(Paused::ByDisk),
        "running" => format!("{guest} runs already"),
        other => format!("{guest} is {other} in QEMU, and no migration has paused it"),
    };
    Err(ApiError::new(ErrorCode::GuestState, text))
}
