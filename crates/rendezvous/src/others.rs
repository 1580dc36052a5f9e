//! Keeps connections to the other servers of the realms, which broker for each other's hosts.

use crate::connection::{serve, short};
use crate::shared::Shared;
use longhaul_protocol::HostId;
use longhaul_realm::ruleset::ServerEntry;
use longhaul_transport::RendezvousServer;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

/// The first wait after a failure; it doubles with each one.
const BACKOFF: Duration = Duration::from_millis(500);
/// The longest wait.
const BACKOFF_MAX: Duration = Duration::from_secs(60);
/// How often the list of servers is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// A server that this one dials.
struct Other {
    /// When it is dialled next; `None` while it is connected or dialled.
    at: Option<Instant>,
    failures: u32,
}

/// Dials the servers with higher ids than `own`, for ever.
pub(crate) async fn dial_all(shared: Arc<Shared>, transport: Arc<RendezvousServer>, own: HostId) {
    let mut others: HashMap<HostId, Other> = HashMap::new();
    let mut tasks: JoinSet<(HostId, bool)> = JoinSet::new();
    loop {
        let wanted = shared.read(|server| server.servers());
        let wanted: Vec<ServerEntry> = wanted.into_iter().filter(|one| own < one.id).collect();
        others.retain(|id, other| other.at.is_none() || wanted.iter().any(|one| one.id == *id));
        for entry in wanted {
            let new = || Other {
                at: Some(Instant::now()),
                failures: 0,
            };
            let other = others.entry(entry.id).or_insert_with(new);
            if other.at.is_some_and(|at| at <= Instant::now()) {
                other.at = None;
                tasks.spawn(dial(shared.clone(), transport.clone(), entry));
            }
        }
        tokio::select! {
            Some(ended) = tasks.join_next() => {
                let Ok((id, connected)) = ended else {
                    tracing::error!("the task of another server broke");
                    continue;
                };
                if let Some(other) = others.get_mut(&id) {
                    other.failures = if connected { 0 } else { other.failures.saturating_add(1) };
                    let wait = BACKOFF.saturating_mul(1 << other.failures.min(8));
                    other.at = Some(Instant::now() + wait.min(BACKOFF_MAX));
                }
            }
            () = sleep(LOOK) => {}
        }
    }
}

/// Connects to a server and serves the connection. Returns whether it was connected.
async fn dial(
    shared: Arc<Shared>,
    transport: Arc<RendezvousServer>,
    entry: ServerEntry,
) -> (HostId, bool) {
    let by_udp: Vec<String> = entry.udp_addresses().map(str::to_owned).collect();
    let link = match transport.connect(entry.id, &by_udp).await {
        Ok(link) => link,
        Err(error) => {
            tracing::debug!(%error, "another server is not reached");
            return (entry.id, false);
        }
    };
    tracing::info!(server = short(entry.id), "connected with another server");
    serve(shared, transport, link).await;
    tracing::info!(
        server = short(entry.id),
        "the connection with another server ended"
    );
    (entry.id, true)
}
