//! Where MAC addresses are, as learned from the sources of frames and told by other hosts.

use super::port::PortId;
use crate::address::Mac;
use crate::hash::Keyed;
use std::collections::HashMap;
use std::time::Duration;

/// A MAC address in a VLAN: the VLAN is in the upper 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key(u64);

impl Key {
    #[inline]
    pub(super) fn new(vlan: u16, mac: Mac) -> Self {
        Self(u64::from(vlan) << 48 | mac.number())
    }

    fn is_of(self, mac: Mac) -> bool {
        self.0 & 0xffff_ffff_ffff == mac.number()
    }

    pub(super) fn vlan(self) -> u16 {
        (self.0 >> 48) as u16
    }
}

/// The place of an address.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) port: PortId,
    pub(super) seen: Duration,
    /// Moves since `counted_from`.
    pub(super) moves: u32,
    pub(super) counted_from: Duration,
    /// Until then frames from other ports do not move it.
    pub(super) held_until: Duration,
    /// The generation of the last announcement; 0 without one.
    pub(super) generation: u64,
}

impl Entry {
    pub(super) fn new(port: PortId, now: Duration) -> Self {
        Self {
            port,
            seen: now,
            moves: 0,
            counted_from: now,
            held_until: Duration::ZERO,
            generation: 0,
        }
    }
}

/// All places.
#[derive(Debug)]
pub(super) struct Table {
    entries: HashMap<Key, Entry, Keyed>,
    age: Duration,
}

impl Table {
    pub(super) fn new(age: Duration, keyed: Keyed) -> Self {
        Self {
            entries: HashMap::with_hasher(keyed),
            age,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the port of an address that is not too old.
    #[inline]
    pub(super) fn port(&self, key: Key, now: Duration) -> Option<PortId> {
        let entry = self.entries.get(&key)?;
        (now.saturating_sub(entry.seen) < self.age).then_some(entry.port)
    }

    /// Returns an entry, and whether it is too old.
    #[inline]
    pub(super) fn entry(&mut self, key: Key, now: Duration) -> Option<(&mut Entry, bool)> {
        let entry = self.entries.get_mut(&key)?;
        let old = now.saturating_sub(entry.seen) >= self.age;
        Some((entry, old))
    }

    pub(super) fn insert(&mut self, key: Key, entry: Entry) {
        self.entries.insert(key, entry);
    }

    /// Calls `change` for the entries of a MAC address in every VLAN, and removes those for which
    /// it returns `false`.
    pub(super) fn each_of(&mut self, mac: Mac, mut change: impl FnMut(Key, &mut Entry) -> bool) {
        self.entries
            .retain(|key, entry| !key.is_of(mac) || change(*key, entry));
    }

    /// Removes the entries that are too old or at the port `gone`. Calls `removed` for each.
    pub(super) fn sweep(
        &mut self,
        now: Duration,
        gone: Option<PortId>,
        mut removed: impl FnMut(PortId),
    ) {
        let age = self.age;
        self.entries.retain(|_, entry| {
            let stays = now.saturating_sub(entry.seen) < age && Some(entry.port) != gone;
            if !stays {
                removed(entry.port);
            }
            stays
        });
    }
}
