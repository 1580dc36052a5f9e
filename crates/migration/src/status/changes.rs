//! Tells subscribers of the changes of a registry: its present state first, then each change.

use crate::status::time::unix_ms;
use longhaul_api::{ApiError, Event, HandoverRecord, Migration, Outcome, Phase, Progress, What};
use std::collections::VecDeque;
use std::sync::Arc;
use tokio::sync::broadcast;

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

pub(crate) fn event(sequence: u64, what: What) -> Event {
    Event {
        sequence,
        unix_ms: unix_ms(),
        what,
    }
}

/// A present state, and the changes since.
#[derive(Debug)]
pub(crate) struct Subscription {
    pub(crate) present: VecDeque<Arc<Event>>,
    pub(crate) changes: broadcast::Receiver<Arc<Event>>,
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
