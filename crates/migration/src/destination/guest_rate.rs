//! The rate of a guest since it runs here: measured beside the end of its move, and reported here
//! and to the source. Nothing waits for it.

use crate::destination::Destination;
use crate::destination::call::Call;
use crate::destination::qemu::DestinationQemu;
use crate::status::guest_rate::{RateMeter, shown};
use crate::status::migration::Entry;
use longhaul_protocol::message::{Rate, ToSource};
use longhaul_protocol::wire::VERSION_OF_RATES;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// The rate of a guest whose move ends earlier is measured for this time nevertheless.
const MEASURED_MIN: Duration = Duration::from_secs(2);
/// Time for which a rate is measured while something follows the guest.
const MEASURED_MAX: Duration = Duration::from_secs(10);
/// Time limit for the source to read the last message.
const LAST_WORD_WITHIN: Duration = Duration::from_secs(2);

impl DestinationQemu {
    /// Begins to measure the rate of a resumed guest.
    pub(crate) fn measure_rate(&self) -> RateAfter {
        let vcpus = self.vcpus().cloned();
        RateAfter(vcpus.and_then(RateMeter::begin))
    }
}

/// The measurement of a guest's rate, until it is reported.
#[derive(Debug, Default)]
pub(crate) struct RateAfter(Option<RateMeter>);

impl RateAfter {
    fn has_measured(&self, time: Duration) -> bool {
        let meter = self.0.as_ref();
        meter.is_some_and(|meter| meter.elapsed() >= time)
    }

    /// Reports the rate of a guest that something follows, once it was measured for long enough.
    pub(crate) fn report_if_due(&mut self, entry: &Entry, call: &mut Option<Call>) {
        if self.has_measured(MEASURED_MAX) {
            self.report(entry, call);
        }
    }

    /// Reports the rate at the end of the move, if it was measured for long enough.
    pub(crate) fn report_at_end(&mut self, entry: &Entry, call: &mut Option<Call>) {
        if self.has_measured(MEASURED_MIN) {
            self.report(entry, call);
        }
    }

    /// Reports the rate after the end of the move, if it has not been reported, and closes the
    /// channel when the source has read all. This is a task of its own, which holds nothing of the
    /// guest.
    pub(crate) fn part(
        mut self,
        context: Arc<Destination>,
        entry: Option<Arc<Entry>>,
        mut call: Option<Call>,
    ) {
        tokio::spawn(async move {
            if let (Some(meter), Some(entry)) = (&self.0, entry) {
                sleep(MEASURED_MIN.saturating_sub(meter.elapsed())).await;
                self.report(&entry, &mut call);
                context.archive.keep(&entry);
            }
            if let Some(call) = &mut call {
                // The source must read the last message before the channel closes.
                let last = timeout(LAST_WORD_WITHIN, call.receiver.recv()).await;
                tracing::debug!(?last, "the source's last word");
            }
        });
    }

    fn report(&mut self, entry: &Entry, call: &mut Option<Call>) {
        // A guest that has ended since has no rate.
        let Some(rate) = self.0.take().and_then(|meter| meter.so_far()) else {
            return;
        };
        entry.report_with(|report| report.guest_rates.after = shown(rate));
        tell(rate, call);
    }
}

fn tell(rate: Rate, call: &mut Option<Call>) {
    let knows = |call: &&mut Call| call.control.peer().version >= VERSION_OF_RATES;
    if let Some(call) = call.as_mut().filter(knows)
        && let Err(error) = call.sender.send(&ToSource::Rate(rate))
    {
        tracing::debug!(%error, "the source did not wait for the guest's rate");
    }
}
