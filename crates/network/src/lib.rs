//! What an agent runs of networks that span hosts: the frame plane with its TAP devices, the paths
//! to other hosts, and the host's side of its realm.
//!
//! `docs/decisions/0043-networks-in-the-agent.md` has the design.

pub mod member;
pub mod networks;
pub mod plane;
pub mod reach;
pub mod tap;
