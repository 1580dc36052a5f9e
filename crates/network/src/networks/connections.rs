//! Keeps a control connection with each host that shares a network, and gives its keys to the frame
//! plane.

use crate::member::Handle;
use crate::plane::{Plane, PlaneError};
use longhaul_overlay::seal::{EXPORTER_LABEL, Side, Suite};
use longhaul_protocol::HostId;
use longhaul_transport::{CloseCode, Control, Endpoint, LinkError};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::sleep;

/// How long the host with the higher id waits for the other one to dial.
const GRACE: Duration = Duration::from_secs(2);
/// The first and the longest wait after a failed dial.
const RETRY: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));

/// Why the keys of a connection are not used.
#[derive(Debug, thiserror::Error)]
pub(super) enum KeysError {
    #[error("the connection is lost: {0}")]
    Link(#[from] LinkError),
    #[error(transparent)]
    Plane(#[from] PlaneError),
    #[error("the connection that the host with the lower id dialled is used")]
    Redundant,
}

/// The connections of one host whose keys are in use.
#[derive(Debug, Default)]
struct Keyed {
    count: watch::Sender<usize>,
    /// The newest one.
    last: Option<Control>,
}

#[derive(Debug, Clone)]
pub(super) struct Connections {
    endpoint: Endpoint,
    plane: Arc<Plane>,
    member: Handle,
    keyed: Arc<Mutex<BTreeMap<HostId, Keyed>>>,
}

/// Returns the suite that this host's processor seals frames with faster.
fn preferred_suite() -> Suite {
    #[cfg(target_arch = "x86_64")]
    let has_aes =
        std::is_x86_feature_detected!("aes") && std::is_x86_feature_detected!("pclmulqdq");
    #[cfg(target_arch = "aarch64")]
    let has_aes = std::arch::is_aarch64_feature_detected!("aes");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let has_aes = false;
    match has_aes {
        true => Suite::Aes256Gcm,
        false => Suite::ChaCha20Poly1305,
    }
}

impl Connections {
    pub(super) fn new(endpoint: Endpoint, plane: Arc<Plane>, member: Handle) -> Self {
        Self {
            endpoint,
            plane,
            member,
            keyed: Arc::default(),
        }
    }

    fn keyed(&self) -> MutexGuard<'_, BTreeMap<HostId, Keyed>> {
        self.keyed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of connections with a host whose keys are in use, and its changes.
    fn count(&self, host: HostId) -> watch::Receiver<usize> {
        self.keyed().entry(host).or_default().count.subscribe()
    }

    /// Gives the keys of a control connection to the frame plane, and ends the one whose keys it
    /// had.
    ///
    /// If both hosts have dialled, the connection that the host with the lower id dialled counts,
    /// whichever came first: both hosts have to seal with the same keys.
    pub(super) fn take_keys(&self, control: &Control, suite: Suite) -> Result<(), KeysError> {
        let exported = control.export(EXPORTER_LABEL)?;
        let host = control.peer().host.id;
        let side = match control.dialled() {
            true => Side::Dialler,
            false => Side::Listener,
        };
        let by_lower = self.endpoint.host_id() < host;
        let before = {
            let mut all = self.keyed();
            let keyed = all.entry(host).or_default();
            let last = keyed.last.as_ref().filter(|last| !last.has_ended());
            if let Some(last) = last
                && last.dialled() != control.dialled()
                && last.dialled() == by_lower
            {
                // If it is one of an agent that was restarted since, this ends it, and the other
                // host's next connection is taken.
                last.ping();
                return Err(KeysError::Redundant);
            }
            // Under the lock: the frame plane must not get them in another order.
            self.plane.connected(host, &exported, side, suite)?;
            keyed.count.send_modify(|count| *count += 1);
            keyed.last.replace(control.clone())
        };
        if let Some(before) = before {
            before.close(CloseCode::Done, "another connection is used");
        }
        control.rest();
        tracing::info!(peer = %control.peer().host.name, "frames can be exchanged");
        let (connections, control) = (self.clone(), control.clone());
        tokio::spawn(async move {
            let error = control.closed().await;
            tracing::debug!(peer = %host, %error, "a connection with keys has ended");
            if let Some(keyed) = connections.keyed().get(&host) {
                keyed
                    .count
                    .send_modify(|count| *count = count.saturating_sub(1));
            }
        });
        Ok(())
    }

    /// Ends the newest connection with a host, so that another one gives new keys.
    pub(super) fn renew(&self, host: HostId) {
        let last = self.keyed().get(&host).and_then(|keyed| keyed.last.clone());
        if let Some(control) = last {
            control.close(CloseCode::Done, "its keys are used up");
        }
    }

    /// Forgets a host, and ends the newest connection with it.
    pub(super) fn forget(&self, host: HostId) {
        let forgotten = self.keyed().remove(&host);
        if let Some(control) = forgotten.and_then(|keyed| keyed.last) {
            control.close(CloseCode::Done, "no network is shared any more");
        }
        self.plane.remove_peer(host);
    }

    /// Keeps one connection with a host while there is a way to it. Never returns.
    pub(super) async fn keep(self, host: HostId, mut has_way: watch::Receiver<bool>) {
        let mut count = self.count(host);
        let dials = self.endpoint.host_id() < host;
        let mut retry = RETRY.0;
        loop {
            let ready = async {
                has_way.wait_for(|has_way| *has_way).await?;
                count.wait_for(|count| *count == 0).await
            };
            if ready.await.is_err() {
                // The host was forgotten.
                return;
            }
            if !dials {
                sleep(GRACE).await;
                if *count.borrow() > 0 || !*has_way.borrow() {
                    continue;
                }
            }
            match self.dial(host).await {
                Ok(()) => retry = RETRY.0,
                Err(error) => {
                    tracing::debug!(peer = %host, error, "no connection");
                    sleep(retry).await;
                    retry = (retry * 2).min(RETRY.1);
                }
            }
        }
    }

    async fn dial(&self, host: HostId) -> Result<(), String> {
        let dialled = self.endpoint.connect_peer(host).await;
        let control = dialled.map_err(|error| error.to_string())?;
        let suite = preferred_suite();
        if let Err(error) = self.take_keys(&control, suite) {
            control.close(CloseCode::Done, "its keys cannot be used");
            return Err(error.to_string());
        }
        self.member.connected(&control, suite);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
