//! Subscriptions to the changes of a registry.

use crate::status::changes::{Subscription, event};
use crate::status::registry::Shared;
use longhaul_api::{Event, What};
use std::sync::Arc;
use tokio::sync::broadcast::error::RecvError;

/// The present state of a registry, and then its changes.
#[derive(Debug)]
pub struct Events {
    shared: Arc<Shared>,
    /// What was not returned yet.
    subscription: Subscription,
    /// The number of the last returned event.
    seen: u64,
}

impl Events {
    /// Subscribes to a registry. Returns `None` if it tells of no change any more.
    pub(crate) fn of(shared: Arc<Shared>) -> Option<Self> {
        Some(Self {
            subscription: shared.subscribe(None)?,
            shared,
            seen: 0,
        })
    }

    /// Returns the next event, or `None` at the end. A subscriber that is too far behind gets the
    /// present state again. Safe to cancel.
    pub async fn next(&mut self) -> Option<Arc<Event>> {
        loop {
            if let Some(event) = self.subscription.present.pop_front() {
                self.seen = event.sequence;
                return Some(event);
            }
            match self.subscription.changes.recv().await {
                Ok(event) => {
                    self.seen = event.sequence;
                    return Some(event);
                }
                Err(RecvError::Lagged(missed)) => {
                    tracing::debug!(missed, "a subscriber of events is too slow");
                    self.subscription = self.shared.subscribe(Some(self.seen))?;
                }
                Err(RecvError::Closed) => return None,
            }
        }
    }

    /// Returns an event that tells that nothing has changed since the last one.
    pub fn current(&self) -> Event {
        event(self.seen, What::Current {})
    }
}
