//! Which MAC address has which IP address, as seen in ARP and neighbour discovery.

use crate::address::{Address, Mac};
use crate::hash::Keyed;
use std::collections::HashMap;
use std::time::Duration;

/// How long the switch does not answer for an address that two stations claimed.
const CONTESTED: Duration = Duration::from_secs(30);

/// What is known of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnownAddress {
    /// The VLAN; 0 without a tag.
    pub vlan: u16,
    /// The address.
    pub address: Address,
    /// Whether its owner is an IPv6 router; `None` if nothing said so.
    pub router: Option<bool>,
}

#[derive(Debug, Clone, Copy)]
struct Owner {
    mac: Mac,
    seen: Duration,
    router: Option<bool>,
    contested_until: Duration,
}

/// What became of something that was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Noted {
    Known,
    /// Another station had the address.
    Contested,
    /// The table or the station's part of it is full.
    Full,
}

/// The addresses of all stations.
#[derive(Debug)]
pub(super) struct Addresses {
    owners: HashMap<(u16, Address), Owner, Keyed>,
    /// Addresses by station.
    counts: HashMap<u64, u32, Keyed>,
    addresses_max: usize,
    per_mac_max: u32,
    age: Duration,
}

impl Addresses {
    pub(super) fn new(keyed: Keyed, addresses_max: usize, per_mac_max: u32, age: Duration) -> Self {
        Self {
            owners: HashMap::with_hasher(keyed),
            counts: HashMap::with_hasher(keyed),
            addresses_max,
            per_mac_max,
            age,
        }
    }

    /// Notes that a station has an address.
    pub(super) fn note(&mut self, now: Duration, mac: Mac, known: KnownAddress) -> Noted {
        let key = (known.vlan, known.address);
        let before = self.owners.get_mut(&key);
        if let Some(owner) = before
            && owner.mac == mac
        {
            owner.seen = now;
            owner.router = known.router.or(owner.router);
            return Noted::Known;
        }
        let fresh = |owner: &Owner| now.saturating_sub(owner.seen) < self.age;
        let contested = self.owners.get(&key).is_some_and(fresh);
        let count = self.counts.get(&mac.number()).copied().unwrap_or(0);
        let another = !self.owners.contains_key(&key);
        if count >= self.per_mac_max || another && self.owners.len() >= self.addresses_max {
            return Noted::Full;
        }
        let owner = Owner {
            mac,
            seen: now,
            router: known.router,
            contested_until: if contested { now + CONTESTED } else { now },
        };
        if let Some(before) = self.owners.insert(key, owner) {
            Self::uncount(&mut self.counts, before.mac);
        }
        *self.counts.entry(mac.number()).or_default() += 1;
        if contested {
            Noted::Contested
        } else {
            Noted::Known
        }
    }

    fn uncount(counts: &mut HashMap<u64, u32, Keyed>, mac: Mac) {
        if let Some(count) = counts.get_mut(&mac.number()) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&mac.number());
            }
        }
    }

    /// Returns the one station that has an address, and whether it is a router.
    pub(super) fn owner(
        &self,
        now: Duration,
        vlan: u16,
        address: Address,
    ) -> Option<(Mac, Option<bool>)> {
        let owner = self.owners.get(&(vlan, address))?;
        let usable = now.saturating_sub(owner.seen) < self.age && owner.contested_until <= now;
        usable.then_some((owner.mac, owner.router))
    }

    /// Returns the addresses of a station, in order.
    pub(super) fn of(&self, mac: Mac) -> Vec<KnownAddress> {
        let mut known: Vec<KnownAddress> = self
            .owners
            .iter()
            .filter(|(_, owner)| owner.mac == mac)
            .map(|((vlan, address), owner)| KnownAddress {
                vlan: *vlan,
                address: *address,
                router: owner.router,
            })
            .collect();
        known.sort_by_key(|known| (known.vlan, known.address));
        known
    }

    pub(super) fn len(&self) -> usize {
        self.owners.len()
    }

    /// Forgets addresses that were not seen for long.
    pub(super) fn sweep(&mut self, now: Duration) {
        let (age, counts) = (self.age, &mut self.counts);
        self.owners.retain(|_, owner| {
            let stays = now.saturating_sub(owner.seen) < age;
            if !stays {
                Self::uncount(counts, owner.mac);
            }
            stays
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGE: Duration = Duration::from_secs(100);
    const A: Mac = Mac([2, 0, 0, 0, 0, 1]);
    const B: Mac = Mac([2, 0, 0, 0, 0, 2]);

    fn v4(last: u8) -> KnownAddress {
        KnownAddress {
            vlan: 0,
            address: Address::V4([10, 0, 0, last]),
            router: None,
        }
    }

    #[test]
    fn a_contested_address_is_not_answered_for_a_while() {
        let mut addresses = Addresses::new(Keyed::new([1, 2]), 10, 4, AGE);
        let now = Duration::from_secs(1);
        assert_eq!(addresses.note(now, A, v4(1)), Noted::Known);
        assert_eq!(addresses.owner(now, 0, v4(1).address), Some((A, None)));
        assert_eq!(addresses.owner(now, 1, v4(1).address), None, "another VLAN");
        assert_eq!(addresses.note(now, B, v4(1)), Noted::Contested);
        assert_eq!(addresses.owner(now, 0, v4(1).address), None);
        let later = now + CONTESTED;
        assert_eq!(addresses.owner(later, 0, v4(1).address), Some((B, None)));
        assert_eq!(addresses.of(A), []);
        assert_eq!(addresses.of(B), [v4(1)]);
    }

    #[test]
    fn the_table_is_bounded_and_forgets() {
        let mut addresses = Addresses::new(Keyed::new([1, 2]), 6, 4, AGE);
        let now = Duration::from_secs(1);
        for last in 0..4 {
            assert_eq!(addresses.note(now, A, v4(last)), Noted::Known);
        }
        assert_eq!(addresses.note(now, A, v4(9)), Noted::Full);
        for last in 4..6 {
            assert_eq!(addresses.note(now, B, v4(last)), Noted::Known);
        }
        assert_eq!(addresses.note(now, B, v4(6)), Noted::Full);
        assert_eq!(addresses.note(now + AGE / 2, A, v4(0)), Noted::Known);
        addresses.sweep(now + AGE);
        assert_eq!((addresses.len(), addresses.counts.len()), (1, 1));
        assert_eq!(addresses.note(now + AGE, A, v4(9)), Noted::Known);
    }
}
