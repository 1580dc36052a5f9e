//! Tests paths between two hosts with real sockets: in one network, and behind NATs of nftables.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod host;
mod page;
mod paths;
mod rendezvous;
mod site;
