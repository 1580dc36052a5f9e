//! Owns what a server keeps over restarts.

use crate::enrolment::Enrolment;
use crate::key::RealmId;
use crate::protocol::Lease;
use crate::ruleset::{SignedRuleset, StoreId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Everything durable of a server. The owner keeps it, in any form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Durable {
    /// Identifies the lease store. A new or restored store gets a new random one.
    pub store: StoreId,
    /// By realm.
    pub realms: BTreeMap<RealmId, DurableRealm>,
}

/// What is durable of a realm.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DurableRealm {
    /// The ruleset in force.
    pub ruleset: Option<SignedRuleset>,
    /// Used tokens.
    pub enrolments: Vec<Enrolment>,
    /// Leases, by guest.
    pub leases: BTreeMap<String, LeaseEntry>,
}

/// The last two leases of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseEntry {
    /// The latest one.
    pub latest: Lease,
    /// The one before it.
    pub before: Option<Lease>,
}

/// One write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Record {
    /// Replaces the ruleset of a realm.
    Ruleset(SignedRuleset),
    /// Adds the use of a token.
    Enrolment(Box<Enrolment>),
    /// Replaces the leases of a guest.
    Lease {
        /// The realm.
        realm: RealmId,
        /// The guest.
        guest: String,
        /// Its leases.
        entry: LeaseEntry,
    },
}

impl Durable {
    /// An empty store.
    pub fn new(store: StoreId) -> Self {
        Self {
            store,
            realms: BTreeMap::new(),
        }
    }

    /// Applies a write.
    pub fn apply(&mut self, record: Record) {
        match record {
            Record::Ruleset(ruleset) => {
                let realm = self.realms.entry(ruleset.key.realm()).or_default();
                realm.ruleset = Some(ruleset);
            }
            Record::Enrolment(enrolment) => {
                let id = enrolment.authorisation.key.realm();
                let realm = self.realms.entry(id).or_default();
                if !realm.enrolments.contains(&enrolment) {
                    realm.enrolments.push(*enrolment);
                }
            }
            Record::Lease {
                realm,
                guest,
                entry,
            } => {
                let realm = self.realms.entry(realm).or_default();
                realm.leases.insert(guest, entry);
            }
        }
    }
}
