//! Defines the QEMU processes of a host, as they are discovered.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The owner of a QEMU process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum GuestOwner {
    /// The agent launched it.
    Longhaul,
    /// The agent is attached to it.
    Attached,
    /// libvirt.
    Libvirt,
    /// Proxmox VE.
    Proxmox,
    /// Another program, a person or an unknown starter.
    Other,
}

/// The state of a QMP socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum QmpSocketState {
    /// No client is connected.
    Free,
    /// Another program is connected.
    Busy,
    /// The agent cannot reach it, or it is no unix socket.
    Unreachable,
}

/// A QMP socket of a QEMU process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct QmpSocket {
    /// Path, as the command line of QEMU names it.
    pub path: String,
    /// State.
    pub state: QmpSocketState,
}

/// A reason that keeps the agent from attaching to a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Obstacle {
    /// The reason, in one sentence.
    pub message: String,
    /// What to do about it.
    pub hint: String,
}

/// A QEMU process of this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DiscoveredGuest {
    /// Process id.
    pub pid: u32,
    /// The user that it runs as.
    pub user: String,
    /// The name that its command line gives the guest (`-name`).
    pub name: Option<String>,
    /// Owner.
    pub owner: GuestOwner,
    /// The owner in words, such as `libvirt (domain web-7)`.
    pub owner_detail: String,
    /// The guest's name on this host, if the agent knows it.
    pub guest: Option<String>,
    /// QMP sockets.
    pub sockets: Vec<QmpSocket>,
    /// Whether the agent could attach to it; null if it was not asked.
    pub attachable: Option<bool>,
    /// The first reasons that keep the agent from attaching to it.
    pub obstacles: Vec<Obstacle>,
    /// Number of further reasons.
    pub more_obstacles: u32,
}

/// The QEMU processes of this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DiscoveredGuests {
    /// The processes, by their numbers.
    pub guests: Vec<DiscoveredGuest>,
}
