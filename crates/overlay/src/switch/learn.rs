//! Learns where stations are, within limits, and holds those that move too often.

use super::port::{Port, PortId};
use super::table::{Entry, Key};
use super::{Output, Report, Switch};
use crate::address::Mac;
use std::time::Duration;

impl Switch {
    /// Learns that a station is behind a port.
    #[inline]
    pub(super) fn learn(&mut self, now: Duration, from: PortId, vlan: u16, mac: Mac) {
        let key = Key::new(vlan, mac);
        let old = match self.table.entry(key, now) {
            Some((entry, false)) if entry.port == from => return entry.seen = now,
            known => known.map(|(_, old)| old),
        };
        if self.has_just_left(now, from, mac) {
            self.counters.moves_held += 1;
            return;
        }
        if let Some(old) = old {
            self.learn_move(now, from, key, mac, old);
        } else if self.may_learn(from) {
            self.count(from, 1);
            self.table.insert(key, Entry::new(from, now));
        }
    }

    /// Returns whether a frame from a port of this host may be one that a guest sent before it
    /// moved away.
    fn has_just_left(&self, now: Duration, from: PortId, mac: Mac) -> bool {
        let moved = self.moved.get(&mac.number());
        moved.is_some_and(|moved| now < moved.settled)
            && self.ports.get(from).is_some_and(Port::is_here)
    }

    /// Learns a place of a station that had one, which is too `old` or another one.
    fn learn_move(&mut self, now: Duration, from: PortId, key: Key, mac: Mac, old: bool) {
        let config = self.config;
        let Some((entry, _)) = self.table.entry(key, now) else {
            return;
        };
        let before = entry.port;
        if before == from {
            *entry = Entry::new(from, now);
            return;
        }
        if !old {
            if now < entry.held_until {
                self.counters.moves_held += 1;
                return;
            }
            if now.saturating_sub(entry.counted_from) >= config.moves_window {
                (entry.counted_from, entry.moves) = (now, 0);
            }
            entry.moves += 1;
            if entry.moves > config.moves_max {
                entry.held_until = now + config.hold;
                (entry.counted_from, entry.moves) = (entry.held_until, 0);
                self.counters.moves_held += 1;
                self.output(Output::Report(Report::Held {
                    mac,
                    vlan: key.vlan(),
                    port: before,
                }));
                return;
            }
            self.counters.moves += 1;
        }
        if !self.port_has_room(from) {
            self.not_learned(from);
            return;
        }
        if let Some((entry, _)) = self.table.entry(key, now) {
            if old {
                *entry = Entry::new(from, now);
            }
            (entry.port, entry.seen) = (from, now);
        }
        self.count(before, -1);
        self.count(from, 1);
    }

    pub(super) fn port_has_room(&self, port: PortId) -> bool {
        let port = self.ports.get(port);
        port.is_some_and(|port| port.macs < port.config.macs_max)
    }

    /// Returns whether one more address may be learned at a port, and counts if not.
    pub(super) fn may_learn(&mut self, port: PortId) -> bool {
        let may = self.table.len() < self.config.macs_max && self.port_has_room(port);
        if !may {
            self.not_learned(port);
        }
        may
    }

    fn not_learned(&mut self, id: PortId) {
        self.counters.not_learned += 1;
        let port = self.ports.get_mut(id);
        if port.is_some_and(|port| !std::mem::replace(&mut port.reported.full, true)) {
            self.output(Output::Report(Report::Full(id)));
        }
    }

    /// Counts addresses that are learned at a port, or no longer.
    pub(super) fn count(&mut self, port: PortId, change: i32) {
        if let Some(port) = self.ports.get_mut(port) {
            port.macs = port.macs.saturating_add_signed(change);
        }
    }
}
