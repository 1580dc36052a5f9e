//! What the agents of the two ends tell each other about a guest that moves.

use crate::config::BYTES_MAX;
use crate::device::is_drive;
use crate::names::{VMID_MAX, VMID_MIN, VmId};
use longhaul_hypervisor::manager::Cookie;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The maximum length of a machine type, in bytes.
const MACHINE_BYTES_MAX: usize = 64;

/// What the source has for the destination, in JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Handoff {
    /// The guest's number at the source.
    pub vmid: VmId,
    /// Its file, without what stays behind.
    pub config: String,
    /// The machine that runs, with Proxmox VE's own version of it, such as `pc-q35-9.2+pve1`.
    pub machine: String,
    /// The rules of its firewall, if it has any.
    pub firewall: Option<String>,
    /// The sizes of its raw volumes in bytes, by their drives.
    #[serde(default)]
    pub sizes: BTreeMap<String, u64>,
}

/// Why the other host's part is not understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("what its source says of it is not understood: {0}")]
pub struct HandoffError(pub String);

impl Handoff {
    /// As it travels.
    pub fn pack(&self) -> Cookie {
        // A structure of numbers and strings always is JSON.
        Cookie(serde_json::to_vec(self).unwrap_or_default())
    }

    /// Reads the same.
    ///
    /// # Errors
    /// When it is something else.
    pub fn unpack(bytes: &[u8]) -> Result<Self, HandoffError> {
        let read = serde_json::from_slice(bytes);
        let handoff: Self = read.map_err(|error| HandoffError(error.to_string()))?;
        let refuse = |why: &str| Err(HandoffError(why.to_owned()));
        if !(VMID_MIN..=VMID_MAX).contains(&handoff.vmid) {
            return refuse("its number is none of a guest");
        }
        if !is_machine(&handoff.machine) {
            return refuse("its machine is none");
        }
        let firewall = handoff.firewall.as_deref().unwrap_or_default();
        if handoff.config.len() > BYTES_MAX || firewall.len() > BYTES_MAX {
            return refuse("a file of it is too large");
        }
        if firewall
            .chars()
            .any(|c| c.is_control() && !"\n\t\r".contains(c))
        {
            return refuse("its firewall's rules are no text");
        }
        if !handoff.sizes.keys().all(|drive| is_drive(drive)) {
            return refuse("a size is of no drive");
        }
        Ok(handoff)
    }
}

/// Returns whether a text can be a machine type with a version of Proxmox VE's.
pub(super) fn is_machine(text: &str) -> bool {
    text.len() <= MACHINE_BYTES_MAX
        && text.starts_with("pc")
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-._+".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handoff_is_read_as_it_was_packed() {
        let handoff = Handoff {
            vmid: 100,
            config: "name: web\n".to_owned(),
            machine: "pc-q35-9.2+pve1".to_owned(),
            firewall: Some("[OPTIONS]\nenable: 1\n".to_owned()),
            sizes: [("virtio0".to_owned(), 1 << 30)].into(),
        };
        assert_eq!(Handoff::unpack(&handoff.pack().0), Ok(handoff.clone()));
        let wrong = [
            Handoff {
                vmid: 99,
                ..handoff.clone()
            },
            Handoff {
                machine: "pc --x".to_owned(),
                ..handoff.clone()
            },
            Handoff {
                firewall: Some("\u{0}".to_owned()),
                ..handoff.clone()
            },
            Handoff {
                sizes: [("args".to_owned(), 1)].into(),
                ..handoff
            },
        ];
        for wrong in wrong {
            assert!(Handoff::unpack(&wrong.pack().0).is_err(), "{wrong:?}");
        }
        assert!(Handoff::unpack(b"{}").is_err());
    }
}
