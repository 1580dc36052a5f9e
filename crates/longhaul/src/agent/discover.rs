//! Lists the QEMU processes of this host for the API.

use crate::agent::guests::Guests;
use longhaul_api::{
    ApiError, DiscoveredGuest, DiscoveredGuests, ErrorCode, GuestOwner, Obstacle, QmpSocket,
    QmpSocketState,
};
use longhaul_hypervisor::attach::discover::{Discovered, Owner, SocketState, discover};
use longhaul_hypervisor::starter::Starter;

/// Number of reasons that are listed for each process.
const OBSTACLES_MAX: usize = 3;

impl Guests {
    /// Returns the QEMU processes of this host.
    pub(crate) async fn discover(&self) -> Result<DiscoveredGuests, ApiError> {
        let config = self.parts.config.hypervisor.clone();
        // Runs to its end even if the client no longer waits for the answer.
        let found = tokio::spawn(async move { discover(&config).await }).await;
        let found = found.map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
        let found = found.map_err(|error| {
            let text = format!("cannot look for QEMU processes: {error}");
            ApiError::new(ErrorCode::Internal, text)
        })?;
        let guests = found.into_iter().map(shown).collect();
        Ok(DiscoveredGuests { guests })
    }
}

fn shown(found: Discovered) -> DiscoveredGuest {
    let (owner, owner_detail, guest) = match found.owner {
        Owner::Longhaul(name) => (GuestOwner::Longhaul, "Longhaul".to_owned(), Some(name)),
        Owner::Attached(name) => {
            let detail = "attached to by Longhaul".to_owned();
            (GuestOwner::Attached, detail, Some(name))
        }
        Owner::Other(Starter::Longhaul) => {
            let detail = "another agent of Longhaul".to_owned();
            (GuestOwner::Longhaul, detail, None)
        }
        Owner::Other(starter) => {
            let owner = match &starter {
                Starter::Libvirt { .. } => GuestOwner::Libvirt,
                Starter::Proxmox { .. } => GuestOwner::Proxmox,
                _ => GuestOwner::Other,
            };
            (owner, starter.to_string(), None)
        }
    };
    let socket = |socket: longhaul_hypervisor::attach::discover::ControlSocket| QmpSocket {
        path: socket.path,
        state: match socket.state {
            SocketState::Free => QmpSocketState::Free,
            SocketState::Busy => QmpSocketState::Busy,
            SocketState::Unreachable => QmpSocketState::Unreachable,
        },
    };
    let attachable = found.refusals.as_ref().map(Vec::is_empty);
    let refusals = found.refusals.unwrap_or_default();
    let more = refusals.len().saturating_sub(OBSTACLES_MAX);
    let obstacle = |refusal: longhaul_hypervisor::observe::Blocker| Obstacle {
        message: refusal.text,
        hint: refusal.hint,
    };
    DiscoveredGuest {
        pid: u32::try_from(found.pid).unwrap_or_default(),
        user: found.user,
        name: found.name,
        owner,
        owner_detail,
        guest,
        sockets: found.sockets.into_iter().map(socket).collect(),
        attachable,
        obstacles: refusals
            .into_iter()
            .take(OBSTACLES_MAX)
            .map(obstacle)
            .collect(),
        more_obstacles: u32::try_from(more).unwrap_or(u32::MAX),
    }
}
