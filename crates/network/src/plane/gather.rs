//! Gathers short frames to one peer for one send: those that are there already, one after the
//! other, of one length.

use super::peer::Peer;
use super::shared::Shared;
use longhaul_overlay::NetworkId;
use longhaul_overlay::offload::{VIRTIO_BYTES, VirtioHeader};
use longhaul_overlay::seal::{HEADER_BYTES, OVERHEAD_BYTES};
use longhaul_overlay::session::BATCH_BYTES_MAX;
use std::sync::Arc;

/// Most frames that are gathered.
const FRAMES_MAX: usize = 32;

#[derive(Debug)]
pub(super) struct Gathered {
    network: NetworkId,
    peer: Option<Arc<Peer>>,
    /// All datagrams but the last one have this length.
    stride: usize,
    bytes: usize,
    count: usize,
    out: Vec<u8>,
}

impl Gathered {
    pub(super) fn new(network: NetworkId) -> Self {
        Self {
            network,
            peer: None,
            stride: 0,
            bytes: 0,
            count: 0,
            out: vec![0; BATCH_BYTES_MAX],
        }
    }

    /// Adds a frame, and sends what cannot wait. Returns `false` if the frame is too long for a
    /// datagram; then nothing is left here.
    pub(super) fn add(
        &mut self,
        shared: &Shared,
        peer: &Arc<Peer>,
        virtio: &VirtioHeader,
        frame: &[u8],
    ) -> bool {
        let payload = VIRTIO_BYTES + frame.len();
        let datagram = OVERHEAD_BYTES + payload;
        let same = |other: &Arc<Peer>| Arc::ptr_eq(other, peer);
        if !self.peer.as_ref().is_some_and(same) || datagram > self.stride {
            self.send(shared);
        }
        if payload > peer.payload_max() {
            self.send(shared);
            return false;
        }
        if self.count == 0 {
            (self.peer, self.stride) = (Some(peer.clone()), datagram);
        }
        let start = self.count * self.stride;
        let room = self.out.get_mut(start + HEADER_BYTES..start + datagram);
        let Some(room) = room else {
            self.send(shared);
            return false;
        };
        room[..VIRTIO_BYTES].copy_from_slice(&virtio.to_bytes());
        room[VIRTIO_BYTES..VIRTIO_BYTES + frame.len()].copy_from_slice(frame);
        self.bytes = start + datagram;
        self.count += 1;
        let full = self.bytes + self.stride > self.out.len() || self.count == FRAMES_MAX;
        if full || datagram < self.stride {
            self.send(shared);
        }
        true
    }

    /// Sends what was gathered.
    #[inline]
    pub(super) fn send(&mut self, shared: &Shared) {
        if self.count == 0 {
            return;
        }
        if let Some(peer) = self.peer.take() {
            let datagrams = &mut self.out[..self.bytes];
            peer.send_gathered(shared, self.network, datagrams, self.stride);
        }
        (self.bytes, self.count, self.stride) = (0, 0, 0);
    }
}
