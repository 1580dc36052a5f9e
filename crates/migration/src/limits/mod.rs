//! What migrations and peers may use: bandwidth, quotas, and what guests that move at once share.

pub(crate) mod bandwidth;
pub(crate) mod peer_claims;
pub(crate) mod peer_quota;
pub(crate) mod progress_watchdog;
pub(crate) mod shared_dedup;
