//! Takes what other hosts say of guests that move.

use super::peer::Scratch;
use super::shared::{Shared, View, lock};
use longhaul_overlay::control::{self, Message};
use longhaul_protocol::HostId;
use std::time::Duration;

impl View {
    /// Takes the messages of a member that concern this network. Malformed ones are counted by the
    /// peer's session.
    pub(super) fn take_control(
        &self,
        shared: &Shared,
        now: Duration,
        from: HostId,
        payload: &[u8],
        scratch: &mut Scratch,
    ) {
        let mut switch = lock(&self.network.switch);
        let read = control::read(payload, |message| match message {
            Message::Announcement(announcement) => {
                switch.announced(now, from, announcement);
            }
            Message::Redirect(redirect) => {
                switch.redirected(now, from, redirect);
            }
            // The session's.
            Message::MtuAnswer { .. } => {}
        });
        let outputs = switch.has_outputs();
        drop(switch);
        if read.is_err() {
            tracing::debug!(peer = ?from, "a malformed control datagram");
        }
        if outputs {
            self.run_outputs(shared, scratch);
        }
    }
}
