//! The time of reports and events.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the time, in milliseconds since 1970.
pub(crate) fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map(|since| since.as_millis() as u64).unwrap_or(0)
}
