//! Realms: signed membership, join tokens and the rendezvous protocol.
//!
//! A *realm* is a set of hosts and networks under one signing key. The key stays on the operator's
//! computer. Rendezvous servers carry what it signed and can change nothing of it.
//!
//! ```text
//! operator ── ruleset, signed ──▶ rendezvous ── pushed ──▶ host ── gossip ──▶ host
//!     └────── token, signed ──▶ new host ── enrolment ──▶ rendezvous ──▶ hosts
//! ```
//!
//! - [`key`], [`signed`]: keys, signatures, documents that are carried as they were signed.
//! - [`ruleset`]: who is a member, which networks exist, which servers serve the realm.
//! - [`enrolment`], [`token`]: how a host joins without the realm's key at hand.
//! - [`membership`]: what a host concludes from a ruleset and enrolments.
//! - [`protocol`], [`wire`], [`relay`]: the messages and their bytes.
//! - [`server`], [`member`]: the state machines of both sides.
//!
//! This crate is a core: it opens no socket, reads no file and no clock. `docs/rendezvous.md` is
//! the normative page, and decision 0042 has the reasons.

pub mod enrolment;
pub mod key;
pub mod limits;
pub mod member;
pub mod membership;
pub mod protocol;
mod random;
pub mod relay;
pub mod ruleset;
pub mod server;
pub mod signed;
#[cfg(test)]
mod tests_common;
mod text;
pub mod token;
pub mod wire;

use random::Random;
use std::time::Duration;

/// The time of an event: a clock that never goes back, and the wall clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Now {
    /// Since an arbitrary start; for time limits and retries.
    pub steady: Duration,
    /// Seconds since 1970; for what a signature limits.
    pub unix_s: u64,
}
