//! Defines the events of a host: its open migrations and reserved guests, and their changes.

use crate::migration::Migration;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An event of a host: one line of a stream of events. A stream begins with `snapshot`, which the
/// host's present state follows, up to `current`. After that each line is a change, or `current`
/// again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Event {
    /// Number of the change. It grows with each change and begins again at 0 with the agent. The
    /// events of a present state have the number of the last change that is part of it.
    pub sequence: u64,
    /// Time of the event, in milliseconds since 1970.
    pub unix_ms: u64,
    /// What the event tells.
    #[serde(flatten)]
    pub what: What,
}

/// What an event tells. A client ignores the events that it does not know.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum What {
    /// The present state follows, up to `current`. It replaces what earlier events told: of a
    /// migration or a reserved guest that it does not have, nothing is left to tell.
    Snapshot {
        /// Whether changes before it were skipped, because the client did not read fast enough. The
        /// state then also has the migrations that ended since the last event that was read.
        lagged: bool,
    },
    /// The present state is complete. Repeated every second without changes.
    Current {},
    /// A migration that is open, that is new, or that changed: its phase, outcome, reason or doubt,
    /// or in its progress whether the agents are connected, whether base images are awaited,
    /// whether the guest writes too fast, and `trouble`. A mere increase of figures is no event.
    Migration {
        /// The migration.
        migration: Box<Migration>,
    },
    /// A migration that ended is no longer in the list of migrations.
    MigrationRemoved {
        /// Id of the migration.
        id: String,
    },
    /// A guest is reserved: no other command or migration can take it.
    GuestReserved {
        /// Name of the guest.
        guest: String,
        /// What has reserved it.
        by: ReservedBy,
        /// Id of the migration that has reserved it; null if none has.
        migration: Option<String>,
    },
    /// A guest is no longer reserved.
    GuestReleased {
        /// Name of the guest.
        guest: String,
    },
    /// An event of a later version.
    #[serde(other, skip_serializing)]
    #[schemars(skip)]
    Unknown,
}

/// What has reserved a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReservedBy {
    /// A request to this agent, or the agent itself, for example to start or stop the guest.
    Agent,
    /// A migration.
    Migration,
    /// The memory of the guest, which has left, is being cached.
    MemoryCache,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_flat_object() {
        let event = Event {
            sequence: 7,
            unix_ms: 1_800_000_000_000,
            what: What::GuestReserved {
                guest: "web-7".to_owned(),
                by: ReservedBy::Agent,
                migration: None,
            },
        };
        let json = serde_json::to_string(&event).unwrap();
        let expected = r#"{"sequence":7,"unix_ms":1800000000000,"event":"guest_reserved","#;
        let expected = expected.to_owned() + r#""guest":"web-7","by":"agent","migration":null}"#;
        assert_eq!(json, expected);
        assert_eq!(serde_json::from_str::<Event>(&json).unwrap(), event);
    }

    #[test]
    fn an_event_of_a_later_version_is_read() {
        let json = r#"{"sequence":7,"unix_ms":1,"event":"eclipse","of":"the moon"}"#;
        let event: Event = serde_json::from_str(json).unwrap();
        assert_eq!(event.what, What::Unknown);
        let current = r#"{"sequence":7,"unix_ms":1,"event":"current","more":1}"#;
        let event: Event = serde_json::from_str(current).unwrap();
        assert_eq!(event.what, What::Current {});
    }
}
