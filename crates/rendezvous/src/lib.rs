//! The rendezvous server: introduces the hosts of realms to each other and relays between them.
//!
//! `docs/rendezvous.md` is the protocol, `longhaul_realm::server` its state machine.
