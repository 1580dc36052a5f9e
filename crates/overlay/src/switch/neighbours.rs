//! Remembers the addresses of stations, and answers for stations at other hosts.

use super::addresses::Noted;
use super::port::PortId;
use super::table::Key;
use super::{KnownAddress, Output, Switch};
use crate::address::{Address, Mac};
use crate::ethernet::Ethernet;
use crate::neighbour::{self, MadeFrame, Neighbour};
use std::time::Duration;

impl Switch {
    /// Reads a frame of address resolution. Returns whether the switch answers it, so that it need
    /// not be forwarded: a question from this host to everyone, for an address of a station at
    /// another host; or any question from this host for the gateway's address.
    pub(super) fn snoop(&mut self, now: Duration, from: PortId, frame: &Ethernet<'_>) -> bool {
        let Some(packet) = neighbour::parse(frame) else {
            return false;
        };
        let (told, target) = match packet {
            Neighbour::Tells { address, router } => (Some((address, router)), None),
            Neighbour::Asks { address, target } => (Some((address, None)), Some(target)),
            Neighbour::Probes { target } => (None, Some(target)),
        };
        if let Some((address, router)) = told {
            let known = KnownAddress {
                vlan: frame.vlan(),
                address,
                router,
            };
            self.note(now, frame.from, known);
        }
        let local = self.ports.get(from).is_some_and(|port| port.is_local());
        let Some(target) = target.filter(|_| local) else {
            return false;
        };
        let asker = told.map(|(address, _)| address);
        let answer = match self.mac_of_gateway(frame.vlan(), target) {
            Some(mac) => answer_for_gateway(mac, frame, asker, target),
            None if frame.to.is_group() => {
                asker.and_then(|asker| self.answer(now, frame, asker, target))
            }
            None => None,
        };
        let Some(answer) = answer else {
            return false;
        };
        self.output(Output::Answer {
            port: from,
            frame: answer,
        });
        true
    }

    fn note(&mut self, now: Duration, mac: Mac, known: KnownAddress) {
        match self.addresses.note(now, mac, known) {
            Noted::Known => {}
            Noted::Contested => self.counters.addresses_contested += 1,
            Noted::Full => self.counters.addresses_full += 1,
        }
    }

    fn answer(
        &self,
        now: Duration,
        frame: &Ethernet<'_>,
        asker: Address,
        target: Address,
    ) -> Option<MadeFrame> {
        let (mac, router) = self.addresses.owner(now, frame.vlan(), target)?;
        let place = self.table.port(Key::new(frame.vlan(), mac), now)?;
        // A station of this host answers itself. So does the asker, if it is asked.
        if mac == frame.from || self.ports.get(place)?.is_local() {
            return None;
        }
        let asker_mac = frame.from;
        match (asker, target) {
            (Address::V4(asker), Address::V4(target)) => Some(MadeFrame::arp_reply(
                frame.tag,
                (mac, target),
                (asker_mac, asker),
            )),
            // An answer without the router flag takes a router out of its neighbours' routes (RFC
            // 4861, section 7.2.5): none is given unless the flag is known.
            (Address::V6(asker), Address::V6(target)) => Some(MadeFrame::neighbour_reply(
                frame.tag,
                (mac, target),
                (asker_mac, asker),
                router?,
            )),
            _ => None,
        }
    }

    /// Returns the addresses of a station. They move along with a guest.
    pub fn addresses_of(&self, mac: Mac) -> Vec<KnownAddress> {
        self.addresses.of(mac)
    }

    /// Notes the addresses of a guest that has come from another host.
    pub fn add_addresses(&mut self, now: Duration, mac: Mac, known: &[KnownAddress]) {
        for known in known.iter().filter(|known| known.address.is_of_a_station()) {
            self.note(now, mac, *known);
        }
    }
}

/// Answers for the gateway. Its address is used at many places, so probes are answered too.
fn answer_for_gateway(
    mac: Mac,
    frame: &Ethernet<'_>,
    asker: Option<Address>,
    target: Address,
) -> Option<MadeFrame> {
    let asker = match asker {
        Some(Address::V4(asker)) => asker,
        None => [0; 4],
        Some(Address::V6(_)) => return None,
    };
    let Address::V4(target) = target else {
        return None;
    };
    let asker = (frame.from, asker);
    Some(MadeFrame::arp_reply(frame.tag, (mac, target), asker))
}
