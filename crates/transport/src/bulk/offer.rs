//! Manages the tokens of expected bulk connections: from whom and for what; each is valid once.

use super::{BulkBinding, BulkReceiver};
use crate::error::BulkError;
use longhaul_protocol::HostId;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// The maximum number of bulk connections expected at once.
pub(super) const BULK_OFFERS_MAX: usize = 256;

/// A one-time secret that binds a bulk connection to a control connection.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BulkToken([u8; 32]);

impl BulkToken {
    /// Returns the bytes, for a message on the control connection.
    pub fn to_bytes(&self) -> [u8; 32] {
        self.0
    }

    /// Creates a token from a message.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

/// Tokens are secrets, so the output shows only that there is one.
impl fmt::Debug for BulkToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BulkToken")
    }
}

/// The expected bulk connections.
#[derive(Clone, Default)]
pub(crate) struct BulkOffers(Arc<Mutex<HashMap<blake3::Hash, Expected>>>);

struct Expected {
    peer: HostId,
    binding: BulkBinding,
    until: Instant,
    hand_over: oneshot::Sender<BulkReceiver>,
}

/// One expected bulk connection; dropping it withdraws the token.
pub struct BulkOffer {
    token: BulkToken,
    until: Instant,
    expires_in: Duration,
    receiver: oneshot::Receiver<BulkReceiver>,
    offers: BulkOffers,
}

impl BulkOffers {
    pub(crate) fn offer(
        &self,
        peer: HostId,
        binding: BulkBinding,
        expires_in: Duration,
    ) -> Result<BulkOffer, BulkError> {
        let mut token = [0; 32];
        getrandom::fill(&mut token)
            .map_err(|e| crate::LinkError::Failed(format!("no random numbers: {e}")))?;
        let (hand_over, receiver) = oneshot::channel();
        let now = Instant::now();
        let until = now + expires_in;
        let mut offers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        offers.retain(|_, expected| expected.until > now);
        if offers.len() >= BULK_OFFERS_MAX {
            return Err(BulkError::TooMany(BULK_OFFERS_MAX));
        }
        let expected = Expected {
            peer,
            binding,
            until,
            hand_over,
        };
        offers.insert(blake3::hash(&token), expected);
        Ok(BulkOffer {
            token: BulkToken(token),
            until,
            expires_in,
            receiver,
            offers: self.clone(),
        })
    }

    /// Takes the offer of a token. Every use of a token, by any peer, consumes it.
    pub(crate) fn redeem(
        &self,
        token: &BulkToken,
        peer: HostId,
        binding: &BulkBinding,
    ) -> Option<oneshot::Sender<BulkReceiver>> {
        let mut offers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let expected = offers.remove(&blake3::hash(&token.0))?;
        let good = expected.peer == peer
            && expected.binding == *binding
            && expected.until > Instant::now();
        good.then_some(expected.hand_over)
    }
}

impl BulkOffer {
    /// Returns the token that the peer must present.
    pub fn token(&self) -> &BulkToken {
        &self.token
    }

    /// Waits for the connection, until the token expires.
    pub async fn accept(mut self) -> Result<BulkReceiver, BulkError> {
        let until = tokio::time::Instant::from_std(self.until);
        match tokio::time::timeout_at(until, &mut self.receiver).await {
            Ok(Ok(receiver)) => Ok(receiver),
            _ => Err(BulkError::NotMade(self.expires_in.as_secs())),
        }
    }
}

impl Drop for BulkOffer {
    fn drop(&mut self) {
        let mut offers = self.offers.0.lock();
        let offers = offers.as_mut().map_err(|poisoned| poisoned.get_mut());
        let (Ok(offers) | Err(offers)) = offers;
        offers.remove(&blake3::hash(&self.token.0));
    }
}

impl fmt::Debug for BulkOffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BulkOffer")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_protocol::{Attempt, AttemptId, Epoch, MigrationId};

    const PEER: HostId = HostId([1; 32]);

    fn binding(epoch: u32) -> BulkBinding {
        BulkBinding {
            attempt: AttemptId {
                migration: MigrationId([7; 8]),
                attempt: Attempt(1),
            },
            epoch: Epoch(epoch),
        }
    }

    #[test]
    fn a_token_works_once_for_one_peer_one_binding_and_a_time() {
        let offers = BulkOffers::default();
        let offer = |expires_in| offers.offer(PEER, binding(1), expires_in).unwrap();
        let minute = Duration::from_secs(60);

        let good = offer(minute);
        assert!(offers.redeem(good.token(), PEER, &binding(1)).is_some());
        assert!(offers.redeem(good.token(), PEER, &binding(1)).is_none());

        let other_peer = offer(minute);
        let other = HostId([2; 32]);
        assert!(
            offers
                .redeem(other_peer.token(), other, &binding(1))
                .is_none()
        );
        assert!(
            offers
                .redeem(other_peer.token(), PEER, &binding(1))
                .is_none()
        );

        let other_epoch = offer(minute);
        assert!(
            offers
                .redeem(other_epoch.token(), PEER, &binding(2))
                .is_none()
        );

        let late = offer(Duration::ZERO);
        assert!(offers.redeem(late.token(), PEER, &binding(1)).is_none());

        let dropped = offer(minute);
        let token = dropped.token().clone();
        drop(dropped);
        assert!(offers.redeem(&token, PEER, &binding(1)).is_none());
    }

    #[test]
    fn offers_are_limited() {
        let offers = BulkOffers::default();
        let minute = Duration::from_secs(60);
        let held: Vec<_> = (0..BULK_OFFERS_MAX)
            .map(|_| offers.offer(PEER, binding(1), minute).unwrap())
            .collect();
        assert!(offers.offer(PEER, binding(1), minute).is_err());
        drop(held);
        assert!(offers.offer(PEER, binding(1), minute).is_ok());
    }
}
