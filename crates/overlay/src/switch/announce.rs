//! What hosts tell each other of guests that move: announcements by the new place, redirects by the
//! old one.

use super::port::{Behind, PortId};
use super::table::{Entry, Key};
use super::{Output, PINNED_MAX, Pinned, Reason, Report, Switch, SwitchError};
use crate::address::{Address, Mac};
use crate::neighbour::MadeFrame;
use longhaul_protocol::HostId;
use std::time::Duration;

/// A guest runs at the host that says so, from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Announcement {
    /// The guest's MAC address, in every VLAN.
    pub mac: Mac,
    /// The generation of the right to run the guest: a higher one is newer.
    pub generation: u64,
}

/// A guest has left the host that says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Redirect {
    /// The guest's MAC address, in every VLAN.
    pub mac: Mac,
    /// The host that it moved to.
    pub now_at: HostId,
    /// The generation of the right to run the guest there.
    pub generation: u64,
}

/// A guest that left this host.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moved {
    pub(super) now_at: HostId,
    pub(super) generation: u64,
    /// Until then the guest's last frames may still arrive from its old port.
    pub(super) settled: Duration,
    /// Until then others may send here.
    pub(super) until: Duration,
}

impl Switch {
    /// Pins a guest's MAC address to its port, in every VLAN: frames from it are accepted from that
    /// port only. `generation` is that of the right to run the guest; 0 for guests that do not
    /// move.
    pub fn pin(
        &mut self,
        now: Duration,
        port: PortId,
        mac: Mac,
        generation: u64,
    ) -> Result<(), SwitchError> {
        match self.ports.behind(port) {
            None => return Err(SwitchError::UnknownPort),
            Some(Behind::Local) if !mac.is_group() && mac != Mac::ZERO => {}
            Some(_) => return Err(SwitchError::NotPinnable),
        }
        let before = self.pinned.get(&mac.number());
        if before.is_some_and(|before| before.port != port) {
            return Err(SwitchError::PinnedElsewhere);
        }
        if before.is_none() && self.pinned.len() >= PINNED_MAX {
            return Err(SwitchError::TooManyPinned);
        }
        let pinned = Pinned {
            port,
            generation,
            settled: now + self.config.settle,
        };
        self.pinned.insert(mac.number(), pinned);
        self.moved.remove(&mac.number());
        self.forget(mac);
        Ok(())
    }

    /// Removes a MAC address from the table of learned ones, in every VLAN.
    fn forget(&mut self, mac: Mac) {
        let Self { table, ports, .. } = self;
        table.each_of(mac, |_, entry| {
            if let Some(port) = ports.get_mut(entry.port) {
                port.macs -= 1;
            }
            false
        });
    }

    /// Announces a guest that is pinned here, to stations and to other hosts, with the addresses
    /// that are known of it. To be repeated a few times. Returns `false` if it is not pinned.
    pub fn announce(&mut self, mac: Mac) -> bool {
        let Some(pinned) = self.pinned.get(&mac.number()).copied() else {
            return false;
        };
        self.output(Output::Announce(Announcement {
            mac,
            generation: pinned.generation,
        }));
        let mut flood = |frame| {
            self.output(Output::Flood {
                except: pinned.port,
                frame,
            });
        };
        flood(MadeFrame::rarp(None, mac));
        let mut last = 0;
        for known in self.addresses.of(mac) {
            let tag = (known.vlan != 0).then_some(known.vlan);
            let mut flood = |frame| {
                self.output(Output::Flood {
                    except: pinned.port,
                    frame,
                });
            };
            if known.vlan != last {
                flood(MadeFrame::rarp(tag, mac));
                last = known.vlan;
            }
            match known.address {
                Address::V4(address) => {
                    MadeFrame::gratuitous_arp(tag, mac, address)
                        .into_iter()
                        .for_each(flood);
                }
                Address::V6(address) => {
                    let router = known.router.unwrap_or(false);
                    flood(MadeFrame::unsolicited(tag, mac, address, router));
                }
            }
        }
        true
    }

    /// Withdraws a guest that runs at another host now. From then on frames to it go there, and
    /// hosts that send them here are told.
    pub fn withdraw(&mut self, now: Duration, redirect: Redirect) {
        let number = redirect.mac.number();
        self.pinned.remove(&number);
        self.flows.forget(redirect.mac);
        self.forget(redirect.mac);
        if self.moved.len() >= PINNED_MAX && !self.moved.contains_key(&number) {
            let oldest = self.moved.iter().min_by_key(|(_, moved)| moved.until);
            let oldest = oldest.map(|(number, _)| *number);
            oldest.map(|number| self.moved.remove(&number));
        }
        let moved = Moved {
            now_at: redirect.now_at,
            generation: redirect.generation,
            settled: now + self.config.settle,
            until: now + self.config.age,
        };
        self.moved.insert(number, moved);
    }

    /// Removes the pin of a guest that stopped here and did not move. Returns `false` if it is not
    /// pinned.
    pub fn unpin(&mut self, mac: Mac) -> bool {
        self.pinned.remove(&mac.number()).is_some()
    }

    /// Takes an announcement from another host. It takes effect whatever frames said before.
    /// Returns whether it does.
    pub fn announced(&mut self, now: Duration, host: HostId, announcement: Announcement) -> bool {
        let Announcement { mac, generation } = announcement;
        let id = self.ports.of_host(host);
        let Some((id, port)) = id.and_then(|id| Some((id, self.ports.get_mut(id)?))) else {
            self.counters.told_refused += 1;
            return false;
        };
        if !port.announcements.take(now) || mac.is_group() || mac == Mac::ZERO {
            self.counters.told_refused += 1;
            return false;
        }
        if let Some(pinned) = self.pinned.get(&mac.number()) {
            self.counters.told_refused += 1;
            if generation > pinned.generation {
                let report = Report::Contested { host, announcement };
                self.output(Output::Report(report));
            }
            return false;
        }
        let moved = self.moved.get_mut(&mac.number());
        if moved
            .as_ref()
            .is_some_and(|moved| generation < moved.generation)
        {
            self.counters.told_stale += 1;
            return false;
        }
        if let Some(moved) = moved {
            (moved.now_at, moved.generation) = (host, generation);
        }
        let (placed, stale) = self.place_at(now, mac, generation, id, None);
        self.count_told(placed, stale)
    }

    /// Takes a redirect from another host. It takes effect for what was learned from that very
    /// host. Returns whether it does.
    pub fn redirected(&mut self, now: Duration, from: HostId, redirect: Redirect) -> bool {
        let Redirect {
            mac,
            now_at,
            generation,
        } = redirect;
        let Some(from_port) = self.ports.of_host(from) else {
            self.counters.told_refused += 1;
            return false;
        };
        let to_port = self.ports.of_host(now_at);
        // A guest that left this host has moved on.
        let moved = self.moved.get_mut(&mac.number());
        let moved = moved.filter(|moved| moved.now_at == from && moved.generation <= generation);
        let moved_on = moved.is_some();
        match (moved, to_port) {
            (Some(moved), Some(_)) => (moved.now_at, moved.generation) = (now_at, generation),
            (Some(_), None) => _ = self.moved.remove(&mac.number()),
            (None, _) => {}
        }
        let (placed, stale) = match to_port {
            Some(to) => self.place_at(now, mac, generation, to, Some(from_port)),
            // An unknown host, or this one: the address becomes unknown.
            None => (self.forget_at(mac, generation, from_port), false),
        };
        self.count_told(placed || moved_on, stale)
    }

    /// Forgets what was learned of an address at a port, unless it is newer. Returns whether there
    /// was any.
    fn forget_at(&mut self, mac: Mac, generation: u64, from: PortId) -> bool {
        let Self { table, ports, .. } = self;
        let mut removed = false;
        table.each_of(mac, |_, entry| {
            let goes = entry.port == from && entry.generation <= generation;
            if goes && let Some(port) = ports.get_mut(from) {
                port.macs -= 1;
                removed = true;
            }
            !goes
        });
        removed
    }

    fn count_told(&mut self, placed: bool, stale: bool) -> bool {
        self.counters.told += u64::from(placed);
        self.counters.told_stale += u64::from(!placed && stale);
        self.counters.told_refused += u64::from(!placed && !stale);
        placed
    }

    /// Places an address behind a port in every VLAN, if what is known is not newer. With
    /// `only_from`, only what is behind that port moves.
    fn place_at(
        &mut self,
        now: Duration,
        mac: Mac,
        generation: u64,
        to: PortId,
        only_from: Option<PortId>,
    ) -> (bool, bool) {
        let settled = now + self.config.settle;
        let (mut known, mut placed, mut stale) = (false, false, false);
        let Self { table, ports, .. } = self;
        table.each_of(mac, |_, entry| {
            known = true;
            if only_from.is_some_and(|from| entry.port != from) {
                return true;
            }
            if entry.generation > generation {
                stale = true;
                return true;
            }
            placed = true;
            if entry.port != to {
                if let Some(port) = ports.get_mut(entry.port) {
                    port.macs -= 1;
                }
                // Beyond the port's limit, since it moves what is in the table already.
                if let Some(port) = ports.get_mut(to) {
                    port.macs += 1;
                }
            }
            *entry = Entry::new(to, now);
            (entry.generation, entry.held_until) = (generation, settled);
            true
        });
        if !known && only_from.is_none() && self.may_learn(to) {
            let mut entry = Entry::new(to, now);
            (entry.generation, entry.held_until) = (generation, settled);
            self.count(to, 1);
            self.table.insert(Key::new(0, mac), entry);
            placed = true;
        }
        (placed, stale)
    }

    /// Tells a host that it sends to a station's old place, if it moved away from here. Returns why
    /// the frame is dropped.
    pub(super) fn misdirected(&mut self, now: Duration, from: PortId, mac: Mac) -> Reason {
        let Some(moved) = self.moved.get(&mac.number()).copied() else {
            return Reason::SplitHorizon;
        };
        let Some(port) = self.ports.get_mut(from) else {
            return Reason::SplitHorizon;
        };
        if let Behind::Host(to) = port.behind
            && to != moved.now_at
            && port.redirects.take(now)
        {
            self.output(Output::Redirect {
                to,
                redirect: Redirect {
                    mac,
                    now_at: moved.now_at,
                    generation: moved.generation,
                },
            });
        }
        Reason::Moved
    }
}
