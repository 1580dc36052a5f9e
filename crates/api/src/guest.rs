//! Defines guests: their list, start, stop and attachment.

use crate::discovered::GuestOwner;
use crate::doubt::OtherSide;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The state of a guest on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum GuestState {
    /// The guest is described here, and has no running QEMU.
    Stopped,
    /// The guest runs.
    Running,
    /// The guest's virtual CPUs are stopped.
    Paused,
    /// The guest is moving away from this host.
    MovingOut,
    /// The guest is moving to this host.
    MovingIn,
    /// The guest's QEMU exists and does not answer, or its folder is damaged.
    Unresponsive,
    /// It is in doubt which host may run the guest, until the agents connect again.
    InDoubt,
    /// The right to run the guest is with another host.
    Elsewhere,
}

/// A guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Guest {
    /// Name of the guest.
    pub name: String,
    /// State on this host.
    pub state: GuestState,
    /// Details of the state, as text; null without any.
    pub state_detail: Option<String>,
    /// Version of the guest's QEMU; null without a running QEMU, and during a move.
    pub qemu: Option<String>,
    /// Versioned machine type.
    pub machine_type: Option<String>,
    /// Accelerator: `kvm` or `tcg`; null without a running QEMU, and during a move.
    pub accelerator: Option<String>,
    /// Number of virtual CPUs.
    pub vcpus: Option<u32>,
    /// Size of the guest's memory, in bytes.
    pub memory_bytes: Option<u64>,
    /// Process id of the guest's QEMU.
    pub pid: Option<u32>,
    /// Whether another program started the guest's QEMU.
    pub attached: bool,
    /// Who started the guest's QEMU, and ends it.
    pub owner: GuestOwner,
    /// Why the guest cannot be moved whatever the destination is, as text, if that is known without
    /// a plan; null otherwise.
    pub obstacle: Option<String>,
    /// Generation of the right to run the guest. It grows with each handover.
    pub generation: Option<u64>,
    /// Id of the guest's current migration.
    pub migration: Option<String>,
    /// Progress of the base images of its disks that are incomplete here, and the cause of a delay,
    /// as text; null if all are complete.
    #[serde(default)]
    pub coming: Option<String>,
    /// Unix sockets of the guest's channels on this host, by the names of the channels. Empty for
    /// an attached guest.
    pub channels: std::collections::BTreeMap<String, String>,
}

/// The guests of this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Guests {
    /// Guests, by name.
    pub guests: Vec<Guest>,
}

/// A guest to start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum StartGuest {
    /// The name of a guest that is described here.
    Name(String),
    /// The description of a new guest, as TOML.
    Description(String),
}

/// A guest to attach, which another program started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AttachGuest {
    /// Absolute path of the QMP unix socket of its QEMU, on this host.
    pub qmp: String,
    /// Process id of its QEMU. Required if the agent cannot determine it from the socket.
    #[serde(default)]
    pub pid: Option<u32>,
}

/// An operator's statement to reclaim the right to run a guest from a host that never returns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReclaimGuest {
    /// Reason why the other host cannot run the guest. It ensures that no two copies run. If that
    /// host answers, `dead` is refused.
    pub other_side: OtherSide,
    /// Reason, for the log: at most 500 characters.
    pub because: String,
}

/// How to stop a guest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StopGuest {
    /// Whether to end QEMU at once, like a power failure (default `false`). Otherwise, the guest is
    /// asked to shut down, with a time limit of 120 s.
    #[serde(default)]
    pub force: bool,
}
