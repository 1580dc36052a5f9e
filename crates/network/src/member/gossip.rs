//! Carries gossip between hosts, on a channel of their control connection.

use super::driver::Incoming;
use bytes::Bytes;
use longhaul_overlay::seal::Suite;
use longhaul_protocol::HostId;
use longhaul_transport::{Channel, Control};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::mpsc;

/// How the first message of a channel for gossip begins; the suite follows (`docs/rendezvous.md`,
/// section 2). No message of a migration begins so.
pub const GOSSIP_CHANNEL: &[u8] = b"\xffgossip/1";
/// Gossip that waits to be sent to one host; more is dropped: the next `Have` makes up for it.
const WAITING: usize = 32;

/// Numbers channels.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// The channels with other hosts. A host may have several.
#[derive(Debug, Default)]
pub(super) struct Peers(BTreeMap<HostId, BTreeMap<u64, mpsc::Sender<Vec<u8>>>>);

impl Peers {
    /// Adds a channel; returns whether it is the host's first.
    pub(super) fn add(&mut self, host: HostId, number: u64, out: mpsc::Sender<Vec<u8>>) -> bool {
        let channels = self.0.entry(host).or_default();
        channels.insert(number, out);
        channels.len() == 1
    }

    /// Removes a channel; returns whether it was the host's last.
    pub(super) fn remove(&mut self, host: HostId, number: u64) -> bool {
        let Some(channels) = self.0.get_mut(&host) else {
            return false;
        };
        let was = channels.remove(&number).is_some();
        let last = was && channels.is_empty();
        if channels.is_empty() {
            self.0.remove(&host);
        }
        last
    }

    /// Closes all channels with a host.
    pub(super) fn close(&mut self, host: HostId) {
        self.0.remove(&host);
    }

    /// Sends to a host, on any channel.
    pub(super) fn send(&self, host: HostId, bytes: Vec<u8>) {
        let channels = self.0.get(&host);
        if let Some(out) = channels.and_then(|channels| channels.values().next()) {
            // With a full queue the host is behind, and asks again with its next `Have`.
            let _ = out.try_send(bytes);
        }
    }
}

/// Why the first message of a channel for gossip is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum GossipError {
    /// The suite is missing or unknown.
    #[error("gossip begins with a suite that is not known here; update the older host")]
    Suite,
}

fn first_message(suite: Suite) -> Vec<u8> {
    let number = match suite {
        Suite::Aes256Gcm => 1,
        Suite::ChaCha20Poly1305 => 2,
    };
    [GOSSIP_CHANNEL, &[number]].concat()
}

/// Reads the first message of a channel: `None` if it is none for gossip.
pub fn suite_of(first: &[u8]) -> Option<Result<Suite, GossipError>> {
    let suite = first.strip_prefix(GOSSIP_CHANNEL)?;
    Some(match suite {
        [1] => Ok(Suite::Aes256Gcm),
        [2] => Ok(Suite::ChaCha20Poly1305),
        _ => Err(GossipError::Suite),
    })
}

/// Opens a channel on a control connection.
pub(super) fn dial(driver: mpsc::Sender<Incoming>, control: Control, suite: Suite) {
    tokio::spawn(async move {
        let host = control.peer().host.id;
        let opened = match control.open().await {
            Ok(mut channel) => channel.send(&first_message(suite)).await.map(|()| channel),
            Err(error) => Err(error.into()),
        };
        match opened {
            Ok(channel) => run(driver, host, channel).await,
            Err(error) => tracing::debug!(%host, %error, "no channel for gossip"),
        }
    });
}

/// Takes a channel that another host opened.
pub(super) fn accept(driver: mpsc::Sender<Incoming>, host: HostId, channel: Channel) {
    tokio::spawn(run(driver, host, channel));
}

async fn run(driver: mpsc::Sender<Incoming>, host: HostId, channel: Channel) {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let (out, mut waiting) = mpsc::channel(WAITING);
    if driver
        .send(Incoming::Peer(host, number, out))
        .await
        .is_err()
    {
        return;
    }
    let (mut sender, mut receiver) = channel.split();
    let ended = loop {
        tokio::select! {
            message = waiting.recv() => match message {
                Some(message) => {
                    if let Err(error) = sender.send(&message).await {
                        break error.to_string();
                    }
                }
                None => break "the driver closed it".to_owned(),
            },
            received = receiver.recv() => match received {
                Ok(Some(bytes)) => {
                    let gossip = Incoming::Gossip(host, Bytes::from(bytes));
                    if driver.send(gossip).await.is_err() {
                        break "the agent stops".to_owned();
                    }
                }
                Ok(None) => break "the other host closed it".to_owned(),
                Err(error) => break error.to_string(),
            },
        }
    };
    tracing::debug!(%host, ended, "a channel for gossip ended");
    // Fails only when the driver has stopped.
    let _ = driver.send(Incoming::PeerGone(host, number)).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_message_names_the_suite() {
        for suite in [Suite::Aes256Gcm, Suite::ChaCha20Poly1305] {
            assert_eq!(suite_of(&first_message(suite)), Some(Ok(suite)));
        }
        for unknown in [
            &b"\xffgossip/1"[..],
            b"\xffgossip/1\x03",
            b"\xffgossip/1\x01\x01",
        ] {
            assert_eq!(suite_of(unknown), Some(Err(GossipError::Suite)));
        }
        assert_eq!(suite_of(b"\x05anything else"), None);
    }
}
