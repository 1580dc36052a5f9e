//! Tells subscribers of the changes of a registry: its present state first, then each change.

use crate::status::migration::unix_ms;
use crate::status::registry::Shared;
use longhaul_api::{ApiError, Event, HandoverRecord, Migration, Outcome, Phase, Progress, What};
use std::collections::VecDeque;
use std::sync::Arc;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

/// Maximum number of changes that a subscriber may be behind.
const BEHIND_MAX: usize = 256;

/// The numbered changes, and their subscribers.
#[derive(Debug)]
pub(crate) struct Changes {
    sequence: u64,
    /// None once no change is told any more.
    subscribers: Option<broadcast::Sender<Arc<Event>>>,
}

impl Default for Changes {
    fn default() -> Self {
        let (sender, _) = broadcast::channel(BEHIND_MAX);
        Self {
            sequence: 0,
            subscribers: Some(sender),
        }
    }
}

impl Changes {
    /// Tells subscribers of a change. Returns its number.
    pub(crate) fn tell(&mut self, what: impl FnOnce() -> What) -> u64 {
        self.sequence += 1;
        let subscribers = self.subscribers.as_ref();
        if let Some(subscribers) = subscribers.filter(|sender| sender.receiver_count() > 0) {
            // Fails if the last subscriber has gone meanwhile.
            let _ = subscribers.send(self.event(what()));
        }
        self.sequence
    }

    /// Returns a subscription that begins with this present state. Returns `None` after the end.
    pub(crate) fn subscribe(
        &self,
        present: impl IntoIterator<Item = What>,
    ) -> Option<Subscription> {
        let subscribers = self.subscribers.as_ref()?;
        let present = present.into_iter().map(|what| self.event(what));
        Some(Subscription {
            present: present.collect(),
            changes: subscribers.subscribe(),
        })
    }

    fn event(&self, what: What) -> Arc<Event> {
        Arc::new(event(self.sequence, what))
    }

    /// Ends all subscriptions.
    pub(crate) fn end(&mut self) {
        self.subscribers = None;
    }
}

fn event(sequence: u64, what: What) -> Event {
    Event {
        sequence,
        unix_ms: unix_ms(),
        what,
    }
}

/// A present state, and the changes since.
#[derive(Debug)]
pub(crate) struct Subscription {
    present: VecDeque<Arc<Event>>,
    changes: broadcast::Receiver<Arc<Event>>,
}

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

/// The part of a migration whose change is told. Figures of its progress are not.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Notable {
    phase: Phase,
    outcome: Option<Outcome>,
    reason: Option<ApiError>,
    doubt: Option<NotableDoubt>,
    is_interrupted: bool,
    is_outpaced: bool,
    awaits_bases: bool,
    trouble: Option<String>,
}

/// The part of a doubt whose change is told: not when the other side was asked.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NotableDoubt {
    pub(crate) record: HandoverRecord,
    pub(crate) generation: u64,
    pub(crate) other_record: Option<HandoverRecord>,
    /// Whether and why the other side did not answer. None before it was asked.
    pub(crate) silent: Option<Option<String>>,
}

impl Notable {
    pub(crate) fn of(
        migration: &Migration,
        doubt: Option<NotableDoubt>,
        progress: &Progress,
    ) -> Self {
        Self {
            phase: migration.phase,
            outcome: migration.outcome,
            reason: migration.reason.clone(),
            doubt,
            is_interrupted: progress.link.interrupted_ms.is_some(),
            is_outpaced: progress.outpaced.is_some(),
            awaits_bases: progress.awaits_bases,
            trouble: progress.trouble.clone(),
        }
    }
}
