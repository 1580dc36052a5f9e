//! The checks of a guest at its source, before anything is changed. `attach`, `plan` and `migrate`
//! use this one list, so none of them finds a reason that another one misses.

use crate::context::Context;
use crate::source::candidate::is_paused;
use crate::source::local_disks::{self, Known};
use crate::source::{blockers, described};
use crate::status::failure;
use longhaul_api::{ApiError, Check, DiskChoice, ErrorCode};
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::attach::look_again;
use longhaul_hypervisor::memory::{AttachError, GuestMemory};
use longhaul_hypervisor::observe::{self, Blocker};
use longhaul_hypervisor::qmp::{COMMAND_TIMEOUT, Qmp};
use longhaul_protocol::disk::OfferedDisk;
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::machine::Machine;
use std::fmt::Display;
use tokio::task::block_in_place;

/// A reason that prevents a move.
#[derive(Debug, Clone)]
pub(crate) struct Reason {
    /// The subject of the check, as a plan names it.
    pub(crate) subject: &'static str,
    /// Whether it holds until the guest or this host's configuration is changed. A passing one,
    /// such as a running job, prevents a move now.
    pub(crate) lasting: bool,
    pub(crate) error: ApiError,
}

/// The result of examining a guest.
#[derive(Debug)]
pub(crate) struct Examined {
    pub(crate) machine: Machine,
    /// The description that the destination launches, with the ports of its network cards.
    pub(crate) described: GuestDescription,
    /// Whether its owner has paused it.
    pub(crate) paused: bool,
    pub(crate) known: Known,
    /// The disks that move, as far as they can. The numbers of their regions have no meaning.
    pub(crate) disks: Vec<OfferedDisk>,
    /// Empty if the guest can leave.
    pub(crate) reasons: Vec<Reason>,
}

impl Reason {
    fn lasting(subject: &'static str, error: ApiError) -> Self {
        Self {
            subject,
            lasting: true,
            error,
        }
    }

    fn passing(subject: &'static str, error: ApiError) -> Self {
        Self {
            subject,
            lasting: false,
            error,
        }
    }

    fn of(blocker: Blocker) -> ApiError {
        ApiError::new(ErrorCode::Refused, blocker.text).hint(blocker.hint)
    }

    /// Returns the reason as a plan shows it.
    pub(crate) fn into_check(self) -> Check {
        let hint = self.error.hint.unwrap_or_default();
        Check::refuse(self.subject, self.error.message, hint)
    }
}

/// Examines a guest whose local disks move as requested. Its QEMU is queried and not changed.
pub(crate) async fn examine(
    context: &Context,
    guest: &Guest,
    qmp: &Qmp,
    disks: DiskChoice,
) -> Result<Examined, ApiError> {
    let of_devices = async {
        let config = &context.parts.config.hypervisor;
        let attached = look_again(guest, qmp, config).await;
        if let Some(examined) = attached.map_err(failure::attach)? {
            return Ok(examined);
        }
        let examined = observe::examine(qmp, guest.process()).await;
        examined.map_err(|error| qemu(&error))
    };
    let of_disks = async {
        let found = blockers::find(context, guest, qmp).await;
        found.map_err(|error| qemu(&error))
    };
    let known = async { Ok(Known::of(context, guest, disks, qmp).await) };
    let ((machine, devices), passing, known) = tokio::try_join!(of_devices, of_disks, known)?;
    let mut reasons: Vec<Reason> = devices
        .into_iter()
        .map(|blocker| Reason::lasting("devices", Reason::of(blocker)))
        .collect();
    reasons.extend(
        passing
            .into_iter()
            .map(|blocker| Reason::passing("disks", Reason::of(blocker))),
    );
    let paused = match is_paused(qmp).await {
        Ok(paused) => paused,
        Err(error) => {
            let error = match error.hint {
                Some(_) => error,
                None => error.hint("resume it, or stop it, first"),
            };
            reasons.push(Reason::passing("guest", error));
            false
        }
    };
    let described = match described::described(guest, qmp).await {
        Ok(described) => described,
        Err(error) => {
            reasons.push(Reason::lasting("network", error));
            guest.description().clone()
        }
    };
    if let Some(error) = memory(guest, qmp).await {
        reasons.push(Reason::lasting("memory", error));
    }
    let local = block_in_place(|| {
        let description = guest.description();
        local_disks::each(context, description, disks, &known, (&[], &[]))
    });
    let mut moving = Vec::new();
    for disk in local {
        let error = match disk {
            Ok(disk) => {
                moving.push(disk.offered);
                continue;
            }
            Err(error) => error,
        };
        // A guest that was attached to was asked for its disks already.
        let known = reasons
            .iter()
            .any(|reason| reason.error.message == error.message);
        if !known {
            reasons.push(Reason::lasting("disks", error));
        }
    }
    Ok(Examined {
        machine,
        described,
        paused,
        known,
        disks: moving,
        reasons,
    })
}

/// Returns the lasting reasons that prevent a move of a guest that runs here.
pub(crate) async fn lasting(context: &Context, name: &str) -> Result<Vec<ApiError>, ApiError> {
    let guests = &context.parts.guests;
    let found = block_in_place(|| guests.find(name));
    let found = found.map_err(|error| failure::internal(&error.to_string()))?;
    let guest = found.ok_or_else(|| {
        ApiError::new(ErrorCode::GuestUnknown, format!("{name} does not run here"))
    })?;
    let lease = guests.lease(&guest, COMMAND_TIMEOUT).await;
    let lease = lease.map_err(|error| qemu(&error))?;
    let examined = examine(context, &guest, lease.qmp(), DiskChoice::Auto).await?;
    let reasons = examined.reasons.into_iter();
    let lasting = reasons.filter(|reason| reason.lasting);
    Ok(lasting.map(|reason| reason.error).collect())
}

/// Returns why a guest's memory cannot be read.
async fn memory(guest: &Guest, qmp: &Qmp) -> Option<ApiError> {
    let Some(pid) = guest.pid() else {
        return Some(qemu(&"it has no process"));
    };
    let error = GuestMemory::attach(qmp, pid).await.err()?;
    let hint = match error {
        // QEMU knows it once the guest's firmware has placed it.
        AttachError::TooLarge { .. } => "let the guest boot, and try again",
        _ => "the agent must be allowed to read the memory of QEMU (CAP_SYS_PTRACE)",
    };
    Some(qemu(&error).hint(hint))
}

fn qemu(error: &dyn Display) -> ApiError {
    ApiError::new(ErrorCode::Qemu, error.to_string())
}
