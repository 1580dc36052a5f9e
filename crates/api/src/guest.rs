//! Defines guests: their list, starting and stopping them.

use crate::doubt::OtherSide;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a guest is doing on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum GuestState {
    /// Described here, and no QEMU of it is there.
    Stopped,
    /// It runs.
    Running,
    /// Its virtual CPUs are stopped.
    Paused,
    /// It is being moved from here.
    MovingOut,
    /// It is being moved to here.
    MovingIn,
    /// Its QEMU is there and does not answer.
    Unresponsive,
    /// Who may run it is in doubt until the two agents have met.
    InDoubt,
    /// The right to run it went to another host.
    Elsewhere,
}

/// A guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Guest {
    /// Its name.
    pub name: String,
    /// What it is doing here.
    pub state: GuestState,
    /// More of the same, where there is more to say.
    pub state_detail: Option<String>,
    /// Version of its QEMU.
    pub qemu: Option<String>,
    /// Its versioned machine type.
    pub machine_type: Option<String>,
    /// `kvm` or `tcg`.
    pub accelerator: Option<String>,
    /// Number of virtual CPUs.
    pub vcpus: Option<u32>,
    /// Its memory.
    pub memory_bytes: Option<u64>,
    /// Process id of its QEMU.
    pub pid: Option<u32>,
    /// Whether something other than Longhaul started its QEMU.
    pub attached: bool,
    /// How often the right to run it has changed hands.
    pub generation: Option<u64>,
    /// Id of the migration that it is in.
    pub migration: Option<String>,
    /// How far the base images have come that its disks stand on, and what keeps them; null where
    /// all of them are here.
    #[serde(default)]
    pub coming: Option<String>,
    /// Unix sockets of its channels on this host, by the channels' names.
    pub channels: std::collections::BTreeMap<String, String>,
}

/// The guests of this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Guests {
    /// By name.
    pub guests: Vec<Guest>,
}

/// Which guest to start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum StartGuest {
    /// One that is described here already.
    Name(String),
    /// A new one: its description, as TOML.
    Description(String),
}

/// A guest to attach to, which something else started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AttachGuest {
    /// Its QEMU's control socket on this host: a unix socket that speaks QMP.
    pub qmp: String,
    /// Its process, where that cannot be told from the socket.
    #[serde(default)]
    pub pid: Option<u32>,
}

/// How to take back the right to run a guest that moved to a host which never comes back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReclaimGuest {
    /// Why the other host cannot run it: only that makes sure that no two copies run.
    pub other_side: OtherSide,
    /// The reason, for the log: 500 characters at most.
    pub because: String,
}

/// How to stop a guest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StopGuest {
    /// Whether to end its QEMU at once, as if the power failed, instead of asking the guest to
    /// shut down and waiting for it.
    #[serde(default)]
    pub force: bool,
}
