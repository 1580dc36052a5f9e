//! A network on this host: its TAP device, its switch, and what the switch wants done.

use super::event::{Place, PlaneEvent};
use super::peer::Scratch;
use super::shared::{Shared, View, lock};
use crate::tap::Tap;
use longhaul_overlay::NetworkId;
use longhaul_overlay::control::Message;
use longhaul_overlay::neighbour::MadeFrame;
use longhaul_overlay::offload::VirtioHeader;
use longhaul_overlay::switch::{Behind, Output, PortId, Report, Switch};
use std::sync::Mutex;
use std::time::Duration;

/// Outputs of a switch that are taken at a time.
const OUTPUTS_AT_ONCE: usize = 64;

#[derive(Debug)]
pub(super) struct Network {
    pub(super) id: NetworkId,
    pub(super) mtu: u16,
    pub(super) bridge: Option<String>,
    pub(super) tap: Tap,
    /// The port of the TAP device.
    pub(super) local: PortId,
    pub(super) switch: Mutex<Switch>,
}

/// The TAP device of a network's gateway.
#[derive(Debug)]
pub(super) struct GatewayDevice {
    pub(super) tap: Tap,
    pub(super) port: PortId,
}

impl Network {
    /// Writes a frame to a TAP device.
    #[inline]
    fn write(
        &self,
        shared: &Shared,
        tap: &Tap,
        (virtio, frame): (&VirtioHeader, &[u8]),
        scratch: &mut Scratch,
    ) {
        if let Some(offloads) = tap.write(virtio, frame, &mut scratch.device) {
            shared.event(PlaneEvent::OffloadOff {
                network: self.id,
                offloads,
            });
        }
    }

    fn place(&self, port: PortId) -> Place {
        match lock(&self.switch).behind(port) {
            Some(Behind::Host(host)) => Place::Host(host),
            Some(Behind::Local | Behind::Gateway) | None => Place::Here,
        }
    }

    fn report(&self, report: Report) -> PlaneEvent {
        let network = self.id;
        match report {
            Report::Held { mac, vlan, port } => PlaneEvent::Held {
                network,
                mac,
                vlan,
                place: self.place(port),
            },
            Report::FloodLimited(port) => PlaneEvent::FloodLimited {
                network,
                place: self.place(port),
            },
            Report::Spoofed { port, mac } => PlaneEvent::Spoofed {
                network,
                place: self.place(port),
                mac,
            },
            Report::Full(port) => PlaneEvent::Full {
                network,
                place: self.place(port),
            },
            Report::Contested { host, announcement } => PlaneEvent::Contested {
                network,
                host,
                announcement,
            },
        }
    }
}

impl View {
    /// Returns the TAP device of a port, if it is one of this host.
    #[inline]
    fn device(&self, port: PortId) -> Option<&Tap> {
        if port == self.network.local {
            return Some(&self.network.tap);
        }
        let gateway = self.gateway.as_ref().filter(|gateway| gateway.port == port);
        gateway.map(|gateway| &gateway.tap)
    }

    /// Writes a frame to the TAP device of a port. Returns `false` if it is not one of this host.
    #[inline]
    pub(super) fn write_here(
        &self,
        shared: &Shared,
        port: PortId,
        (virtio, frame): (&VirtioHeader, &[u8]),
        scratch: &mut Scratch,
    ) -> bool {
        let Some(tap) = self.device(port) else {
            return false;
        };
        self.network.write(shared, tap, (virtio, frame), scratch);
        true
    }

    /// Takes a frame of a peer: writes it to the TAP device, if it goes to guests of this host or
    /// to its gateway.
    #[inline]
    pub(super) fn deliver(
        &self,
        shared: &Shared,
        now: Duration,
        from: PortId,
        (virtio, frame): (&VirtioHeader, &[u8]),
        scratch: &mut Scratch,
    ) {
        let network = &self.network;
        let (here, outputs) = {
            let mut switch = lock(&network.switch);
            // What comes from another host goes to one device here at most.
            let mut to = switch.frame(now, from, frame);
            let here = to.find_map(|port| self.device(port));
            (here, switch.has_outputs())
        };
        if let Some(tap) = here {
            network.write(shared, tap, (virtio, frame), scratch);
        }
        if outputs {
            self.run_outputs(shared, scratch);
        }
    }

    /// Does what the switch wants done.
    pub(super) fn run_outputs(&self, shared: &Shared, scratch: &mut Scratch) {
        loop {
            let outputs: Vec<Output> = {
                let mut switch = lock(&self.network.switch);
                let outputs = std::iter::from_fn(|| switch.poll());
                outputs.take(OUTPUTS_AT_ONCE).collect()
            };
            if outputs.is_empty() {
                return;
            }
            for output in outputs {
                self.run(shared, output, scratch);
            }
        }
    }

    fn run(&self, shared: &Shared, output: Output, scratch: &mut Scratch) {
        match output {
            Output::Answer { port, frame } => self.send_made(shared, port, &frame, scratch),
            Output::Flood { except, frame } => {
                let here = std::iter::once(self.network.local);
                let hosts = self.members.iter().map(|(port, _, _)| *port);
                for port in here.chain(hosts).filter(|port| *port != except) {
                    self.send_made(shared, port, &frame, scratch);
                }
            }
            Output::Announce(announcement) => {
                for peer in self.members.iter().filter_map(|(_, _, peer)| peer.as_ref()) {
                    let message = Message::Announcement(announcement);
                    peer.send_message(shared, self.network.id, message);
                }
            }
            Output::Redirect { to, redirect } => {
                if let Some(peer) = self.peer_of(to) {
                    peer.send_message(shared, self.network.id, Message::Redirect(redirect));
                }
            }
            Output::Report(report) => shared.event(self.network.report(report)),
        }
    }

    fn send_made(&self, shared: &Shared, to: PortId, frame: &MadeFrame, scratch: &mut Scratch) {
        let virtio = VirtioHeader::default();
        let frame_here = (&virtio, frame.bytes());
        if !self.write_here(shared, to, frame_here, scratch)
            && let Some(peer) = self.peer_behind(to)
        {
            peer.send_frame(shared, self.network.id, virtio, frame.bytes(), scratch);
        }
    }
}
