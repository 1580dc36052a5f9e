//! The receiving half of the frame plane: opens datagrams where they lie, merges segments, and
//! writes frames to TAP devices.

use super::event::{OpenedProbe, PlaneEvent};
use super::peer::{Incoming, Peer, Scratch};
use super::shared::{Shared, Snapshot, Tables, View, add, count};
use super::socket::Way;
use longhaul_overlay::NetworkId;
use longhaul_overlay::offload::{Merger, VirtioHeader};
use longhaul_overlay::seal::{self, Kind, Opened};
use longhaul_overlay::switch::PortId;
use longhaul_protocol::HostId;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Pairs of a peer and a network whose segments are merged at the same time. With more, merging
/// ends early.
const FLOWS_MAX: usize = 64;

/// The segments of one peer in one network.
#[derive(Debug)]
struct Flow {
    peer: HostId,
    network: NetworkId,
    port: PortId,
    view: Arc<View>,
    merger: Merger,
}

/// Takes the datagrams of the frame plane from the socket.
pub struct Inbox {
    shared: Arc<Shared>,
    snapshot: Snapshot,
    /// Those of this receive are in front.
    flows: Vec<Flow>,
    active: usize,
    /// Not in the counters yet.
    segments: u64,
    merged: u64,
    scratch: Scratch,
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Inbox")
    }
}

impl Inbox {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            snapshot: Snapshot::new(&shared),
            shared,
            flows: Vec::new(),
            active: 0,
            segments: 0,
            merged: 0,
            scratch: Scratch::new(),
        }
    }

    /// Takes datagrams that came on one way: `stride` bytes each, the last one may be shorter.
    pub fn take(&mut self, way: Way, datagrams: &mut [u8], stride: usize) {
        if self.snapshot.refresh(&self.shared) {
            // Flows know members that may be none any more.
            self.flush();
            self.flows.clear();
        }
        let (now, tables) = (self.shared.now(), self.snapshot.tables.clone());
        let stride = if stride == 0 { datagrams.len() } else { stride };
        let mut datagrams = datagrams.chunks_mut(stride.max(1)).peekable();
        while let Some(first) = datagrams.peek() {
            let Some(id) = seal::key_id(first) else {
                count(&self.shared.counters.unknown_keys);
                datagrams.next();
                continue;
            };
            let Some(peer) = tables.keys.get(&id) else {
                count(&self.shared.counters.unknown_keys);
                datagrams.next();
                continue;
            };
            // All that follow of the same peer.
            let mut incoming = peer.incoming();
            while let Some(datagram) =
                datagrams.next_if(|datagram| seal::key_id(datagram) == Some(id))
            {
                // What is not authentic is counted by the session.
                let opened = incoming.session.open(now, way, datagram);
                if let Ok(opened) = opened {
                    self.opened(&tables, now, way, peer, &mut incoming, opened);
                }
            }
            if incoming.session.has_news() {
                peer.serve(&self.shared, now, &mut incoming);
            }
        }
    }

    /// Follows the datagrams of one receive: what was merged so far is written.
    pub fn flush(&mut self) {
        let now = self.shared.now();
        let Self {
            shared,
            flows,
            active,
            segments,
            merged,
            scratch,
            ..
        } = self;
        for flow in flows.iter_mut().take(std::mem::take(active)) {
            let (view, port) = (&flow.view, flow.port);
            flow.merger.flush(&mut |virtio, frame| {
                view.deliver(shared, now, port, (virtio, frame), scratch);
                *merged += 1;
            });
        }
        let counters = &shared.counters;
        add(&counters.segments, std::mem::take(segments));
        add(&counters.merged, std::mem::take(merged));
    }

    #[inline]
    fn opened(
        &mut self,
        tables: &Tables,
        now: Duration,
        way: Way,
        peer: &Peer,
        incoming: &mut Incoming,
        opened: Opened<'_>,
    ) {
        let network = opened.network;
        match opened.kind {
            kind @ (Kind::Frame | Kind::ShortSegment) => {
                self.frame(tables, now, peer, network, kind, opened.payload);
            }
            Kind::Fragment => {
                if self.flow(tables, peer, network).is_none() {
                    return;
                }
                // Fragments that do not fit are counted there.
                let whole = incoming.reassembler.push(now, network, opened.payload);
                if let Ok(Some(whole)) = whole {
                    self.frame(tables, now, peer, network, Kind::Frame, whole);
                }
            }
            Kind::Control if network != NetworkId::NONE => {
                if let Some(flow) = self.flow(tables, peer, network) {
                    let view = self.flows[flow].view.clone();
                    let scratch = &mut self.scratch;
                    view.take_control(&self.shared, now, peer.host, opened.payload, scratch);
                }
            }
            Kind::PathProbe => self.shared.probe(OpenedProbe {
                peer: peer.host,
                way,
                payload: opened.payload.to_vec(),
            }),
            Kind::Control | Kind::MtuProbe => {}
        }
    }

    /// Takes a frame or a segment of one.
    #[inline]
    fn frame(
        &mut self,
        tables: &Tables,
        now: Duration,
        peer: &Peer,
        network: NetworkId,
        kind: Kind,
        payload: &[u8],
    ) {
        let Some(flow) = self.flow(tables, peer, network) else {
            return;
        };
        let Self {
            shared,
            flows,
            segments,
            merged,
            scratch,
            ..
        } = self;
        let Flow {
            view, port, merger, ..
        } = &mut flows[flow];
        *segments += 1;
        let mut out = |virtio: &VirtioHeader, frame: &[u8]| {
            view.deliver(shared, now, *port, (virtio, frame), scratch);
            *merged += 1;
        };
        if kind == Kind::ShortSegment {
            merger.push_short(payload, &mut out);
        } else {
            merger.push(payload, &mut out);
        }
    }

    /// Returns the flow of a peer in a network; `None` if it is no member, which is counted.
    #[inline]
    fn flow(&mut self, tables: &Tables, peer: &Peer, network: NetworkId) -> Option<usize> {
        let is = |flow: &Flow| flow.network == network && flow.peer == peer.host;
        if let Some(found) = self.flows[..self.active].iter().position(is) {
            return Some(found);
        }
        let view = tables.networks.get(&network);
        let Some((view, port)) = view.and_then(|view| Some((view, view.port_of(peer.host)?)))
        else {
            self.foreign(peer, network);
            return None;
        };
        if self.active == FLOWS_MAX {
            self.flush();
        }
        let at = self.active;
        let reused = self.flows[at..].iter().position(is);
        match reused {
            Some(found) => self.flows.swap(at, at + found),
            None => {
                // The buffers of a flow that is idle serve the new one.
                let idle = (self.flows.len() == FLOWS_MAX).then(|| self.flows.swap_remove(at));
                let flow = Flow {
                    peer: peer.host,
                    network,
                    port,
                    view: view.clone(),
                    merger: idle.map(|flow| flow.merger).unwrap_or_default(),
                };
                self.flows.push(flow);
                let last = self.flows.len() - 1;
                self.flows.swap(at, last);
            }
        }
        self.active += 1;
        Some(at)
    }

    fn foreign(&self, peer: &Peer, network: NetworkId) {
        count(&self.shared.counters.foreign);
        if !peer.reported_foreign.swap(true, Ordering::Relaxed) {
            self.shared.event(PlaneEvent::Foreign {
                peer: peer.host,
                network,
            });
        }
    }
}

impl longhaul_transport::Datagrams for Inbox {
    fn take(&mut self, way: &Way, datagrams: &mut [u8], stride: usize) {
        Self::take(self, *way, datagrams, stride);
    }

    fn flush(&mut self) {
        Self::flush(self);
    }
}
