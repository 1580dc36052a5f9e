//! Remembers at which gateway each flow of a guest began, for as long as the gateway's connection
//! tracking does.

use crate::address::Mac;
use crate::hash::Keyed;
use crate::packet::{Packet, Part, Signal, TCP};
use longhaul_protocol::HostId;
use longhaul_protocol::flows::{End, Flow, FlowState};
use std::collections::HashMap;
use std::time::Duration;

/// How long a guest sends on a flow to another host's gateway without an answer before the flow is
/// given up: the gateway or its host is gone.
const UNANSWERED_MAX: Duration = Duration::from_secs(120);
/// How often room is made in a guest's full part of the table.
const MAKE_ROOM: Duration = Duration::from_secs(1);
/// The part of a guest's flows that makes room when all of them are in use: the oldest.
const OLDEST: usize = 16;

/// Returns how long a flow is remembered after its last packet: as Linux's connection tracking
/// does by default.
fn age(state: FlowState) -> Duration {
    Duration::from_secs(match state {
        FlowState::Opening | FlowState::Ending => 120,
        FlowState::Open => 5 * 86_400,
        FlowState::Broken => 10,
        FlowState::Unanswered | FlowState::Fragments => 30,
        FlowState::Answered => 120,
    })
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    gateway: HostId,
    state: FlowState,
    seen: Duration,
    /// Since when the guest sends without an answer.
    waits_since: Option<Duration>,
}

impl Entry {
    fn is_live(&self, now: Duration) -> bool {
        now.saturating_sub(self.seen) < age(self.state)
    }
}

#[derive(Debug)]
struct Guest {
    flows: HashMap<Flow, Entry, Keyed>,
    made_room: Duration,
}

/// What became of a flow that was not known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counted {
    /// Flows that were not remembered because a table is full.
    pub(super) full: u64,
    /// Flows that were given up: their gateway is gone, or does not answer.
    pub(super) given_up: u64,
}

/// A flow that moves along with its guest, and how long nothing was seen of it.
pub type Carried = (Flow, HostId, FlowState, Duration);

/// The flows of all guests.
#[derive(Debug)]
pub(super) struct Flows {
    /// By MAC address.
    guests: HashMap<u64, Guest, Keyed>,
    keyed: Keyed,
    len: usize,
    flows_max: usize,
    per_guest_max: usize,
    pub(super) counted: Counted,
}

impl Flows {
    pub(super) fn new(keyed: Keyed, flows_max: usize, per_guest_max: usize) -> Self {
        Self {
            guests: HashMap::with_hasher(keyed),
            keyed,
            len: 0,
            flows_max,
            per_guest_max,
            counted: Counted::default(),
        }
    }

    /// Returns the gateway that a guest's packet goes to: that of its flow, or `near` for a flow
    /// that begins. `has_gateway` says which hosts have the gateway at all.
    pub(super) fn outbound(
        &mut self,
        now: Duration,
        guest: Mac,
        packet: &Packet,
        near: Option<HostId>,
        has_gateway: impl Fn(HostId) -> bool,
    ) -> Option<HostId> {
        let flow = Flow {
            protocol: packet.protocol,
            guest: packet.source,
            other: packet.destination,
        };
        if let Some(entry) = self.get(guest, &flow)
            && !is_usable(now, entry, near, &has_gateway)
        {
            let gone = entry.is_live(now);
            self.counted.given_up += u64::from(gone);
            self.remove(guest, &flow);
        }
        if let Some(entry) = self.get(guest, &flow) {
            let again = matches!(entry.state, FlowState::Ending | FlowState::Broken)
                && packet.signal == Signal::Begins;
            if !again {
                if packet.signal != Signal::Reports {
                    entry.seen = now;
                    entry.waits_since.get_or_insert(now);
                    entry.state = after(entry.state, packet.signal);
                }
                let gateway = entry.gateway;
                self.first_fragment(now, guest, (flow, packet.part), gateway);
                return Some(gateway);
            }
        }
        let begins = match (packet.part, packet.signal) {
            (Part::LaterFragment, _) | (_, Signal::Reports) => false,
            (_, signal) => packet.protocol != TCP || signal == Signal::Begins,
        };
        if let Some(gateway) = near.filter(|_| begins) {
            let entry = Entry {
                gateway,
                state: match packet.protocol {
                    TCP => FlowState::Opening,
                    _ => FlowState::Unanswered,
                },
                seen: now,
                waits_since: Some(now),
            };
            self.insert(now, guest, flow, entry);
        }
        if let Some(gateway) = near {
            self.first_fragment(now, guest, (flow, packet.part), gateway);
        }
        near
    }

    /// Notes where the later fragments of a packet go: they have no ports.
    fn first_fragment(
        &mut self,
        now: Duration,
        guest: Mac,
        (flow, part): (Flow, Part),
        gateway: HostId,
    ) {
        if part != Part::FirstFragment {
            return;
        }
        let without = |end: End| End { port: 0, ..end };
        let flow = Flow {
            guest: without(flow.guest),
            other: without(flow.other),
            ..flow
        };
        let entry = Entry {
            gateway,
            state: FlowState::Fragments,
            seen: now,
            waits_since: None,
        };
        self.insert(now, guest, flow, entry);
    }

    /// Notes a packet that a gateway sends to a guest of this host. A flow that is not known began
    /// at that gateway.
    pub(super) fn inbound(&mut self, now: Duration, guest: Mac, packet: &Packet, gateway: HostId) {
        if packet.signal == Signal::Reports || packet.part == Part::LaterFragment {
            return;
        }
        let flow = Flow {
            protocol: packet.protocol,
            guest: packet.destination,
            other: packet.source,
        };
        if let Some(entry) = self.get(guest, &flow)
            && entry.is_live(now)
        {
            let again = matches!(entry.state, FlowState::Ending | FlowState::Broken)
                && packet.signal == Signal::Begins;
            if !again {
                // Late packets of an earlier flow do not change where this one is.
                if entry.gateway == gateway {
                    entry.seen = now;
                    entry.waits_since = None;
                    entry.state = after(answered(entry.state), packet.signal);
                }
                return;
            }
        }
        let state = match (packet.protocol, packet.signal) {
            (_, Signal::Ends | Signal::Breaks) => return,
            (TCP, Signal::Begins) => FlowState::Opening,
            (TCP, _) => FlowState::Open,
            _ => FlowState::Answered,
        };
        let entry = Entry {
            gateway,
            state,
            seen: now,
            waits_since: None,
        };
        self.insert(now, guest, flow, entry);
    }

    fn get(&mut self, guest: Mac, flow: &Flow) -> Option<&mut Entry> {
        self.guests.get_mut(&guest.number())?.flows.get_mut(flow)
    }

    fn remove(&mut self, guest: Mac, flow: &Flow) {
        if let Some(guest) = self.guests.get_mut(&guest.number())
            && guest.flows.remove(flow).is_some()
        {
            self.len -= 1;
        }
    }

    /// Remembers a flow, if there is room.
    fn insert(&mut self, now: Duration, mac: Mac, flow: Flow, entry: Entry) {
        let keyed = self.keyed;
        let guest = self.guests.entry(mac.number()).or_insert_with(|| Guest {
            flows: HashMap::with_hasher(keyed),
            made_room: Duration::ZERO,
        });
        if let Some(known) = guest.flows.get_mut(&flow) {
            *known = entry;
            return;
        }
        if guest.flows.len() >= self.per_guest_max
            && now.saturating_sub(guest.made_room) >= MAKE_ROOM
        {
            guest.made_room = now;
            self.len -= make_room(now, &mut guest.flows);
        }
        if guest.flows.len() >= self.per_guest_max || self.len >= self.flows_max {
            self.counted.full += 1;
            return;
        }
        guest.flows.insert(flow, entry);
        self.len += 1;
    }

    /// Returns the flows of a guest, those of which something was seen last first.
    pub(super) fn of(&self, now: Duration, guest: Mac) -> Vec<Carried> {
        let guest = self.guests.get(&guest.number());
        let flows = guest.into_iter().flat_map(|guest| &guest.flows);
        let mut flows: Vec<Carried> = flows
            .filter(|(_, entry)| entry.is_live(now))
            .map(|(flow, entry)| {
                let idle = now.saturating_sub(entry.seen);
                (*flow, entry.gateway, entry.state, idle)
            })
            .collect();
        flows.sort_by_key(|(flow, _, _, idle)| (*idle, *flow));
        flows
    }

    /// Adds a flow of a guest that has come from another host.
    pub(super) fn add(&mut self, now: Duration, guest: Mac, carried: Carried) {
        let (flow, gateway, state, idle) = carried;
        if idle >= age(state) {
            return;
        }
        let entry = Entry {
            gateway,
            state,
            seen: now.saturating_sub(idle),
            waits_since: None,
        };
        self.insert(now, guest, flow, entry);
    }

    /// Forgets the flows of a guest.
    pub(super) fn forget(&mut self, guest: Mac) {
        if let Some(guest) = self.guests.remove(&guest.number()) {
            self.len -= guest.flows.len();
        }
    }

    pub(super) fn clear(&mut self) {
        self.guests.clear();
        self.len = 0;
    }

    /// Returns the number of flows, and of those that began at another gateway than `own`.
    pub(super) fn sizes(&self, own: HostId) -> (usize, usize) {
        let flows = self.guests.values().flat_map(|guest| guest.flows.values());
        let elsewhere = flows.filter(|entry| entry.gateway != own);
        (self.len, elsewhere.count())
    }

    /// Forgets flows that are too old.
    pub(super) fn sweep(&mut self, now: Duration) {
        self.guests.retain(|_, guest| {
            let before = guest.flows.len();
            guest.flows.retain(|_, entry| entry.is_live(now));
            self.len -= before - guest.flows.len();
            !guest.flows.is_empty()
        });
    }
}

/// Returns whether a flow still goes where it began.
fn is_usable(
    now: Duration,
    entry: &Entry,
    near: Option<HostId>,
    has_gateway: impl Fn(HostId) -> bool,
) -> bool {
    let waits = entry.waits_since.map(|since| now.saturating_sub(since));
    let silent = waits.is_some_and(|waits| waits >= UNANSWERED_MAX) && Some(entry.gateway) != near;
    entry.is_live(now) && has_gateway(entry.gateway) && !silent
}

fn after(state: FlowState, signal: Signal) -> FlowState {
    match (state, signal) {
        (_, Signal::Breaks) => FlowState::Broken,
        (FlowState::Opening | FlowState::Open, Signal::Ends) => FlowState::Ending,
        (state, _) => state,
    }
}

fn answered(state: FlowState) -> FlowState {
    match state {
        FlowState::Opening => FlowState::Open,
        FlowState::Unanswered => FlowState::Answered,
        state => state,
    }
}

/// Removes what is too old, or the oldest if nothing is. Returns the number of removed flows.
fn make_room(now: Duration, flows: &mut HashMap<Flow, Entry, Keyed>) -> usize {
    let before = flows.len();
    flows.retain(|_, entry| entry.is_live(now));
    if flows.len() == before {
        let mut seen: Vec<(Duration, Flow)> = flows
            .iter()
            .map(|(flow, entry)| (entry.seen, *flow))
            .collect();
        seen.sort_unstable();
        for (_, flow) in seen.iter().take(before.div_ceil(OLDEST)) {
            flows.remove(flow);
        }
    }
    before - flows.len()
}

#[cfg(test)]
mod tests;
