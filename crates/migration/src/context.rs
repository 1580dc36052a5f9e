//! What both ends of a migration share on a host.

use crate::disks::base_images::Orders;
use crate::disks::lazy_base_images::ComingFronts;
use crate::handover::fence::Marks;
use crate::host::lock::lock;
use crate::host::retained_qemus::RetainedQemus;
use crate::host::state::Parts;
use crate::limits::bandwidth::Throttle;
use crate::limits::peer_quota::Allowances;
use crate::limits::shared_dedup::Gangs;
use crate::status::archive::Archive;
use crate::status::registry::{Registry, Taken};
use longhaul_api::Side;
use longhaul_protocol::MigrationId;
use longhaul_storage::same_file::Contents;
use longhaul_storage::{Journals, Rights};
use longhaul_transport::Endpoint;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use tokio::sync::Notify;

/// What one more look at a filled link weighs.
const RATE_WEIGHT: f64 = 0.02;

/// What this host's journal says of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Right {
    /// How often the right to run it has changed hands; none where it never did.
    pub generation: Option<u64>,
    /// Who has it.
    pub holder: Holder,
    /// The migration that the guest is in.
    pub moving: Option<(MigrationId, Side)>,
}

/// Takes in what a link carries. What carries nothing is not there, and says nothing of the link.
fn note_rate(rates: &mut HashMap<String, f64>, host: &str, bytes_per_s: f64) {
    if bytes_per_s > 0.0 {
        let known = rates.entry(host.to_owned()).or_insert(bytes_per_s);
        *known += RATE_WEIGHT * (bytes_per_s - *known);
    }
}

/// Who has the right to run a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    /// This host.
    Here,
    /// Another one, by the name that it is trusted under or by its fingerprint.
    Elsewhere(String),
    /// Nobody can tell until the two agents have met: this host gave it to that one.
    InDoubt(String),
    /// What is written here cannot be read, and why.
    Unknown(String),
}

/// What every migration's task uses.
pub(crate) struct Context {
    pub(crate) parts: Parts,
    pub(crate) endpoint: Endpoint,
    pub(crate) journals: Journals,
    pub(crate) rights: Rights,
    pub(crate) marks: Marks,
    pub(crate) registry: Registry,
    pub(crate) archive: Archive,
    pub(crate) allowances: Allowances,
    pub(crate) gangs: Gangs,
    pub(crate) throttle: Throttle,
    pub(crate) retained_qemus: RetainedQemus,
    /// Wakes the task that takes exports out or ends them.
    pub(crate) exports_left: Notify,
    pub(crate) orders: Orders,
    pub(crate) coming: ComingFronts,
    /// What files hold that were compared with those of other hosts.
    pub(crate) contents: Arc<Contents>,
    /// What the link to a host was seen to carry, in bytes per second.
    pub(crate) rates: Mutex<HashMap<String, f64>>,
}

impl Context {
    /// What the link to a host was last seen to carry, in bytes per second.
    pub(crate) fn link_rate(&self, host: &str) -> Option<f64> {
        lock(&self.rates).get(host).copied()
    }

    /// Takes in what the link to a host carries when it is filled.
    pub(crate) fn note_link_rate(&self, host: &str, bytes_per_s: f64) {
        note_rate(&mut lock(&self.rates), host, bytes_per_s);
    }

    /// What the journal says of a guest.
    pub(crate) fn right(&self, guest: &str) -> Right {
        let moving = match self.registry.taken(guest) {
            Some(Taken::Moving(id, side)) => Some((id, side)),
            Some(Taken::Locally | Taken::RetainedQemu) | None => None,
        };
        if self.registry.held.is_named(guest)
            && let Some(why) = self.registry.held.why(guest)
        {
            return Right {
                generation: None,
                holder: Holder::Unknown(why.message),
                moving,
            };
        }
        match self.rights.get(guest) {
            Ok(None) => Right {
                generation: None,
                holder: Holder::Here,
                moving,
            },
            Ok(Some(right)) => {
                let generation = Some(right.generation.0);
                let holder = match right.holder {
                    longhaul_storage::Holder::Here => Holder::Here,
                    longhaul_storage::Holder::Elsewhere { host } => Holder::Elsewhere(host),
                    longhaul_storage::Holder::InDoubt { host } => Holder::InDoubt(host),
                };
                Right {
                    generation,
                    holder,
                    moving,
                }
            }
            // Whoever cannot read who may run a guest must not run it.
            Err(error) => {
                tracing::error!(%error, guest, "cannot read who may run a guest");
                Right {
                    generation: None,
                    holder: Holder::Unknown(error.to_string()),
                    moving,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_is_gone_for_a_moment_is_no_slower_for_that() {
        let mut rates = HashMap::new();
        note_rate(&mut rates, "lyon", 0.0);
        assert!(rates.is_empty(), "nothing is known yet");
        note_rate(&mut rates, "lyon", 500e3);
        (0..1000).for_each(|_| note_rate(&mut rates, "lyon", 0.0));
        assert_eq!(rates["lyon"], 500e3);
        (0..1000).for_each(|_| note_rate(&mut rates, "lyon", 250e3));
        assert!((rates["lyon"] - 250e3).abs() < 1.0);
    }
}
