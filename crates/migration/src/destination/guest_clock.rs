//! A guest's clock after a move: measured and corrected while the guest runs, and reported.

use crate::destination::qemu::DestinationQemu;
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::guest_agent::{self, Clock};
use longhaul_hypervisor::qmp::Qmp;
use longhaul_protocol::message;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

/// Time limit for the port of a guest agent to open after the guest resumes, if the agent ran
/// before the move.
const OPEN_WITHIN: Duration = Duration::from_millis(500);
/// Interval between checks of the port.
const LOOK_EVERY: Duration = Duration::from_millis(50);

impl DestinationQemu {
    /// Measures and corrects the clock of a resumed guest, in a task of its own. The task ends
    /// within a few seconds, regardless of the guest.
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
    let port = guest.channel(guest_agent::PORT)?;
    let until = Instant::now() + OPEN_WITHIN;
    while !guest_agent::is_open(qmp, port).await {
        if Instant::now() >= until {
            return None;
        }
        sleep(LOOK_EVERY).await;
    }
    let clock = guest_agent::set_right(port).await;
    let told = |error| tracing::info!(guest = guest.name(), %error, "no word of a guest agent");
    clock.map_err(told).ok()
}
