//! A guest's clock after it has moved: measured and set right while the guest runs, and reported.

use crate::destination::qemu::DestinationQemu;
use longhaul_hypervisor::guest::Guest;
use longhaul_hypervisor::guest_agent::{self, Clock};
use longhaul_hypervisor::qmp::Qmp;
use longhaul_protocol::message;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

/// The port of an agent that was there before the move opens within that time, after the guest
/// runs again.
const OPEN_WITHIN: Duration = Duration::from_millis(500);
/// Between two looks at the port.
const LOOK_EVERY: Duration = Duration::from_millis(50);

impl DestinationQemu {
    /// Looks at the clock of a guest that runs again, beside everything else. It ends in a few
    /// seconds, whatever the guest does.
    pub(crate) fn set_clock(&self) -> JoinHandle<Option<message::GuestClock>> {
        let (guest, qmp) = self.guest_and_qmp();
        tokio::spawn(async move {
            let clock = match by_agent(&guest, &qmp).await {
                Some(clock) => Some(clock),
                None => guest_agent::real_time_clock(&qmp).await,
            };
            tracing::info!(guest = guest.name(), ?clock, "the guest's clock");
            clock.map(|clock| message::GuestClock {
                before_ms: clock.before_ms,
                after_ms: clock.after_ms,
                by_agent: clock.by_agent,
                set: clock.set,
            })
        })
    }
}

async fn by_agent(guest: &Guest, qmp: &Qmp) -> Option<Clock> {
    let mut channels = guest.description().channels.iter();
    channels.find(|channel| channel.name == guest_agent::PORT)?;
    let port = guest.folder().channel(guest_agent::PORT);
    let until = Instant::now() + OPEN_WITHIN;
    while !guest_agent::is_open(qmp, &port).await {
        if Instant::now() >= until {
            return None;
        }
        sleep(LOOK_EVERY).await;
    }
    let clock = guest_agent::set_right(&port).await;
    let told = |error| tracing::info!(guest = guest.name(), %error, "no word of a guest agent");
    clock.map_err(told).ok()
}
