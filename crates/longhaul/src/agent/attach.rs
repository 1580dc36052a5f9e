//! Attaches to guests that another program started, and detaches from them.

use crate::agent::guests::{Guests, Known, unknown};
use longhaul_api::{ApiError, AttachGuest, ErrorCode, Guest};
use longhaul_hypervisor::attach::{Attach, AttachGuestError};
use longhaul_hypervisor::observe::Blocker;
use longhaul_migration::{Manager, UNCHANGED, attach_failure};
use std::path::PathBuf;

impl Guests {
    /// Inspects a guest that another program started, without changing it.
    pub(crate) async fn attach(
        &self,
        manager: &Manager,
        name: &str,
        request: AttachGuest,
    ) -> Result<Guest, ApiError> {
        let socket = PathBuf::from(&request.qmp);
        if !socket.is_absolute() {
            let text = format!(
                "`qmp` is {:?}: give the whole path, from `/` on",
                request.qmp
            );
            return Err(ApiError::new(ErrorCode::InvalidRequest, text));
        }
        let pid = request.pid.and_then(|pid| i32::try_from(pid).ok());
        // Reports where the guest is, if it is elsewhere: what another program started here is then
        // an old copy.
        let reservation = manager.reserve(name).await?;
        let generation = manager.right(name).await.generation.unwrap_or(0);
        let (config, called) = (self.parts.config.hypervisor.clone(), name.to_owned());
        // Runs to its end even if the client no longer waits for the answer.
        let looked = tokio::spawn(async move {
            let attach = Attach {
                name: &called,
                socket: &socket,
                pid,
                generation,
            };
            let candidate = attach.look(&config).await;
            (candidate, reservation)
        });
        let (candidate, _reservation) = looked
            .await
            .map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
        let candidate = candidate.map_err(attach_failure)?;
        // They may belong to another guest that moved away, and writes to them there.
        manager
            .may_use_disks(candidate.description())
            .map_err(|error| error.state_of_guest(UNCHANGED))?;
        candidate
            .keep(&self.parts.config.hypervisor)
            .map_err(attach_failure)?;
        let reasons = manager.lasting_reasons(name).await;
        let refused = match reasons {
            Ok(reasons) if reasons.is_empty() => None,
            Ok(reasons) => Some(refused(name, reasons)),
            Err(error) => Some(error),
        };
        if let Some(error) = refused {
            let guest = self.known()?.remove(name);
            if let Some(Known::Running(guest) | Known::Ended(guest)) = guest {
                let detached = self.parts.launcher.detach(&guest);
                detached.map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
            }
            return Err(error);
        }
        tracing::info!(guest = %name, "attached");
        self.get(manager, name).await
    }

    /// Detaches from an attached guest; its QEMU goes on unchanged.
    pub(crate) async fn detach(&self, manager: &Manager, name: &str) -> Result<(), ApiError> {
        let mut known = self.known()?;
        let guest = match known.remove(name) {
            Some(Known::Running(guest) | Known::Ended(guest)) if guest.is_attached() => guest,
            Some(_) => {
                let text = format!("{name} is not a guest that was attached to");
                return Err(ApiError::new(ErrorCode::GuestState, text)
                    .hint(format!("longhaul guests stop {name} ends it")));
            }
            None => return Err(unknown(name)),
        };
        let _reservation = manager.reserve(name).await?;
        // The agent must know when its QEMU ends.
        manager.refuse_tracked(name)?;
        let detached = self.parts.launcher.detach(&guest);
        detached.map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
        tracing::info!(guest = %name, "detached");
        Ok(())
    }
}

/// Returns the error for a guest that could not be moved.
fn refused(name: &str, reasons: Vec<ApiError>) -> ApiError {
    let refusals = reasons.into_iter().map(|reason| Blocker {
        text: reason.message,
        hint: reason.hint.unwrap_or_default(),
    });
    attach_failure(AttachGuestError::Refused {
        name: name.to_owned(),
        refusals: refusals.collect(),
    })
}

/// Returns the error for a guest that another program started and that has ended: only that program
/// can start it again.
pub(crate) fn ended(name: &str) -> ApiError {
    ApiError::new(
        ErrorCode::GuestState,
        format!("{name} was started by something other than Longhaul, and has ended"),
    )
    .hint(format!(
        "start it as before and attach to it again, or: longhaul guests detach {name}"
    ))
}
