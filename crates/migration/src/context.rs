//! State that both ends of a migration share on a host.

use crate::host::base_image_orders::Orders;
use crate::host::lazy_exports::ComingExports;
use crate::host::lock::lock;
use crate::host::marks::Marks;
use crate::host::retained_qemus::RetainedQemus;
use crate::host::right::{Holder, Right};
use crate::host::state::Parts;
use crate::host::sweeper::Sweeper;
use crate::limits::allowances::Allowances;
use crate::limits::bandwidth::Throttle;
use crate::limits::shared_dedup::Gangs;
use crate::status::archive::Archive;
use crate::status::predictions::Predictions;
use crate::status::registry::{Registry, Taken};
use longhaul_api::{Outcome, Side};
use longhaul_storage::same_file::Contents;
use longhaul_storage::{Journals, Rights};
use longhaul_transport::{Endpoint, LinkRate};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Weight of one new measurement in the moving average of a link's rate.
const RATE_WEIGHT: f64 = 0.02;

/// Adds a measurement to the moving average of a link's rate. Ignores a rate of zero, which comes
/// from a link that is down.
fn note_rate(rates: &mut HashMap<String, f64>, host: &str, bytes_per_s: f64) {
    if bytes_per_s > 0.0 {
        let known = rates.entry(host.to_owned()).or_insert(bytes_per_s);
        *known += RATE_WEIGHT * (bytes_per_s - *known);
    }
}

/// State that the tasks of all migrations share.
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
    pub(crate) sweeper: Sweeper,
    pub(crate) orders: Orders,
    pub(crate) coming: ComingExports,
    /// The content of files that were compared with those of other hosts.
    pub(crate) contents: Arc<Contents>,
    /// The measured rate of the link to each host, in bytes per second.
    pub(crate) rates: Mutex<HashMap<String, f64>>,
    /// The same as a range, of links whose rate no longer grew when it was measured last.
    pub(crate) links: Mutex<HashMap<String, LinkRate>>,
    pub(crate) predictions: Predictions,
}

impl Context {
    /// Returns the measured rate of the link to a host, in bytes per second.
    pub(crate) fn link_rate(&self, host: &str) -> Option<f64> {
        lock(&self.rates).get(host).copied()
    }

    /// Adds a measurement of a saturated link to a host, in bytes per second.
    pub(crate) fn note_link_rate(&self, host: &str, bytes_per_s: f64) {
        note_rate(&mut lock(&self.rates), host, bytes_per_s);
    }

    /// Returns the latest known rate of the link to a host, in bytes per second.
    pub(crate) fn link(&self, host: &str) -> Option<LinkRate> {
        lock(&self.links).get(host).copied()
    }

    /// Records the known rate of the link to a host, in bytes per second.
    pub(crate) fn note_link(&self, host: &str, rate: LinkRate) {
        lock(&self.links).insert(host.to_owned(), rate);
    }

    /// Returns whether a guest came here from this host.
    pub(crate) fn came_from(&self, guest: &str, host: &str) -> bool {
        let entries = self.registry.list().into_iter();
        let mut migrations = entries.map(|entry| entry.migration());
        migrations.any(|it| {
            it.guest == guest
                && it.source == host
                && it.side == Side::Destination
                && it.outcome == Some(Outcome::Completed)
        })
    }

    /// Returns this host's right to a guest, and the migration that the guest is in.
    pub(crate) fn right(&self, guest: &str) -> Right {
        let moving = match self.registry.taken(guest) {
            Some(Taken::Moving(id, side)) => Some((id, side)),
            Some(Taken::Locally | Taken::Maintained | Taken::RetainedQemu) | None => None,
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
            // A host that cannot read the right to a guest must not run it.
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
