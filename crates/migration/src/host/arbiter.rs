//! The realm's arbiter, as this host reaches it: asks it for the leases of guests.

use longhaul_network::member::Acquired;
use longhaul_network::networks::Slot;
use longhaul_protocol::{Generation, HostId, StoreId};
use std::time::Duration;

/// How long an answer is awaited.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// The answer to a question for a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// This host has it.
    Granted,
    /// Another host has this latest lease, or this one.
    Denied(Generation, HostId),
    /// There was none, for this reason.
    None(String),
}

/// Returns the store of the arbiter that this host's realm names.
pub(crate) fn named(networks: &Slot) -> Option<StoreId> {
    let networks = networks.get()?;
    networks.realm().arbiter.map(|(_, store)| store)
}

/// Returns whether this host is registered with the arbiter that has this store.
pub(crate) fn is_reached(networks: &Slot, store: StoreId) -> bool {
    let Some(networks) = networks.get() else {
        return false;
    };
    let realm = networks.realm();
    let Some((server, _)) = realm.arbiter.filter(|(_, named)| *named == store) else {
        return false;
    };
    let mut links = realm.servers.iter();
    realm.standing.is_member() && links.any(|link| link.server.id == server && link.registered)
}

/// Asks the arbiter for the lease of a guest in a generation.
pub(crate) async fn acquire(
    networks: &Slot,
    store: StoreId,
    guest: &str,
    generation: Generation,
) -> Answer {
    let Some(networks) = networks.get() else {
        return Answer::None("this host is in no realm any more".to_owned());
    };
    let asked = networks.member().acquire(store, guest, generation);
    match tokio::time::timeout(ANSWER_WITHIN, asked).await {
        Ok(Ok(Acquired::Granted)) => Answer::Granted,
        Ok(Ok(Acquired::Denied { latest, holder })) => Answer::Denied(latest, holder),
        Ok(Err(why)) => Answer::None(why),
        Err(_) => Answer::None("the realm's arbiter does not answer".to_owned()),
    }
}
