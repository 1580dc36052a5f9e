//! A host's right to run a guest, as other parts of the agent see it.

use longhaul_api::Side;
use longhaul_protocol::MigrationId;

/// This host's right to a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Right {
    /// The number of times that the right to run it has changed hosts. None if it never did.
    pub generation: Option<u64>,
    /// The host that has the right.
    pub holder: Holder,
    /// The migration that the guest is in, and this host's side of it.
    pub moving: Option<(MigrationId, Side)>,
}

/// The host that has the right to run a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    /// This host.
    Here,
    /// Another host: its name in the list of trusted hosts, or its fingerprint.
    Elsewhere(String),
    /// Unknown until the two agents connect: this host released the guest to the named host.
    InDoubt(String),
    /// The record of the right cannot be read, for this reason.
    Unknown(String),
}
