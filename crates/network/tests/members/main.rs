//! Members against rendezvous servers, over real sockets on this machine.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;
mod joining;
mod serving;
