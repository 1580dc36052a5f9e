//! Tests the frame plane between hosts in network namespaces, with real TAP devices, bridges and
//! IP stacks at both ends.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod devices;
mod gateways;
mod isolation;
mod moves;
mod traffic;
mod udp;
mod world;
