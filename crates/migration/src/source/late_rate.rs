//! The rate of a guest at its destination, which is known only after the move has ended.

use crate::context::Context;
use crate::source::connect::Session;
use crate::status::guest_rate::shown;
use crate::status::migration::Entry;
use longhaul_protocol::message::ToSource;
use longhaul_protocol::wire::VERSION_OF_RATES;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// Time limit for the destination to report it. It measures for 2 s.
const WITHIN: Duration = Duration::from_secs(5);

/// Waits for the rate over the channel of a move that has ended, in a task of its own, and adds it
/// to the report. The channel closes then.
pub(crate) fn hear(context: Arc<Context>, entry: Arc<Entry>, session: Session) {
    let known = entry.report().guest_rates.after.is_some();
    if known || session.control.peer().version < VERSION_OF_RATES {
        return;
    }
    let Session {
        control,
        sender,
        mut receiver,
        ..
    } = session;
    tokio::spawn(async move {
        let until = Instant::now() + WITHIN;
        while let Ok(Ok(message)) = timeout_at(until, receiver.recv()).await {
            if let ToSource::Rate(rate) = message {
                entry.report_with(|report| report.guest_rates.after = shown(rate));
                context.archive.keep(&entry);
                break;
            }
        }
        drop((sender, control));
    });
}
