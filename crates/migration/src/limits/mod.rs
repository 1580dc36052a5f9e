//! Limits on migrations and peers: bandwidth, quotas, and shared deduplication.

pub(crate) mod allowances;
pub(crate) mod bandwidth;
pub(crate) mod peer_claims;
pub(crate) mod peer_quota;
pub(crate) mod progress_watchdog;
pub(crate) mod shared_dedup;
