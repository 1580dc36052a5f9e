//! The thread of a TAP device: takes what this host's guests or its gateway send, and sends it to
//! other hosts, or to each other.
//!
//! A super-frame is a batch by itself. Other frames leave together if the device has several; no
//! frame waits for one that is not there yet, since that stalls TCP.

use super::event::PlaneEvent;
use super::gather::Gathered;
use super::network::{GatewayDevice, Network};
use super::peer::Scratch;
use super::shared::{Shared, Snapshot, count, lock};
use crate::tap::Tap;
use longhaul_overlay::ethernet::FRAME_BYTES_MAX;
use longhaul_overlay::offload::{Gso, VIRTIO_BYTES, VirtioHeader};
use longhaul_overlay::switch::PortId;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// Frames that are read before the thread looks whether it is to stop.
const FRAMES_AT_ONCE: usize = 256;

pub(super) struct Outbound {
    shared: Arc<Shared>,
    network: Arc<Network>,
    /// The device, if it is not that of the guests.
    gateway: Option<Arc<GatewayDevice>>,
    snapshot: Snapshot,
    scratch: Scratch,
    gathered: Gathered,
    ports: Vec<PortId>,
}

impl Outbound {
    pub(super) fn new(
        shared: Arc<Shared>,
        network: Arc<Network>,
        gateway: Option<Arc<GatewayDevice>>,
    ) -> Self {
        Self {
            snapshot: Snapshot::new(&shared),
            shared,
            scratch: Scratch::new(),
            gathered: Gathered::new(network.id),
            network,
            gateway,
            ports: Vec::new(),
        }
    }

    fn tap(&self) -> &Tap {
        let gateway = self.gateway.as_ref();
        gateway.map_or(&self.network.tap, |gateway| &gateway.tap)
    }

    /// Sends frames until the other end of `stop` is closed, or the TAP device is lost.
    pub(super) fn run(mut self, stop: &UnixStream) {
        let mut buffer = vec![0; VIRTIO_BYTES + FRAME_BYTES_MAX];
        let (network, gateway) = (self.network.clone(), self.gateway.clone());
        let tap = gateway
            .as_ref()
            .map_or(&network.tap, |gateway| &gateway.tap);
        loop {
            match self.wait(stop) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => return self.lost(&error),
            }
            for _ in 0..FRAMES_AT_ONCE {
                match tap.read(&mut buffer) {
                    Ok(Some((virtio, frame))) => self.frame(virtio, frame),
                    Ok(None) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return self.lost(&error),
                }
            }
            self.gathered.send(&self.shared);
        }
    }

    fn lost(&self, error: &io::Error) {
        self.shared.event(PlaneEvent::TapLost {
            network: self.network.id,
            error: error.to_string(),
        });
    }

    /// Waits for a frame. Returns whether the thread is to go on.
    fn wait(&self, stop: &UnixStream) -> io::Result<bool> {
        let flags = PollFlags::POLLIN;
        let mut files = [
            PollFd::new(self.tap().as_fd(), flags),
            PollFd::new(stop.as_fd(), flags),
        ];
        match poll(&mut files, PollTimeout::NONE) {
            Ok(_) => {}
            Err(nix::errno::Errno::EINTR) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
        let is = |file: &PollFd<'_>, flags: PollFlags| {
            file.revents().is_some_and(|found| found.intersects(flags))
        };
        let [tap, stop] = &files;
        if is(stop, PollFlags::all()) {
            return Ok(false);
        }
        if is(tap, PollFlags::POLLERR) && !is(tap, PollFlags::POLLIN) {
            return Err(io::Error::other("the device is gone"));
        }
        Ok(true)
    }

    fn frame(&mut self, virtio: VirtioHeader, frame: &[u8]) {
        let Self {
            shared,
            network,
            gateway,
            snapshot,
            scratch,
            gathered,
            ports,
        } = self;
        snapshot.refresh(shared);
        let from = gateway
            .as_ref()
            .map_or(network.local, |gateway| gateway.port);
        let outputs = {
            let mut switch = lock(&network.switch);
            ports.clear();
            ports.extend(switch.frame(shared.now(), from, frame));
            switch.has_outputs()
        };
        let Some(view) = snapshot.tables.networks.get(&network.id) else {
            // It is about to be closed.
            return;
        };
        if let ([port], Gso::None) = (&ports[..], virtio.gso)
            && let Some(peer) = view.peer_behind(*port)
            && gathered.add(shared, peer, &virtio, frame)
        {
            ports.clear();
        } else {
            // Frames do not overtake each other.
            gathered.send(shared);
        }
        for port in ports.iter() {
            if view.write_here(shared, *port, (&virtio, frame), scratch) {
                continue;
            }
            match view.peer_behind(*port) {
                Some(peer) => peer.send_frame(shared, network.id, virtio, frame, scratch),
                None => count(&shared.counters.not_connected),
            }
        }
        if outputs {
            view.run_outputs(shared, scratch);
        }
    }
}
