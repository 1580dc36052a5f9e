//! Tests frames as callers and peers see them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;
mod damaged;
mod fuzz_replay;
mod in_order;
mod round_trip;
mod wire_page;
