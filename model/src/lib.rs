//! The hand-over, explored: the functions that the agents run, in every order of events.
//!
//! What is explored are `step_source`, `step_destination`, `SourceState::restore` and
//! `DestinationState::restore` of `longhaul_engine::handover`, called as they are. Around them is a
//! world of two hosts, an agent and a QEMU on each, and messages between them.
//!
//! A step is one action of an agent, one message, one deed of a QEMU or of a person, one death. So an
//! agent can die between any two actions. Dying while a record is written is dying before or after
//! it. A write can fail and its record be on disk all the same, until the next write replaces it.
//!
//! What an agent does on its own account, outside of those functions, is kept as small as possible.
//! The model does the same as these places of the product (under `crates/migration/src`
//! where no crate is named):
//!
//! | rule | in the product | here |
//! |---|---|---|
//! | actions are done in order, then what came of them is fed | `handover/ledger.rs`: `feed_*`, `run_*` | `go_on`, `act` |
//! | a record that fails twice waits; other events are fed meanwhile | `handover/ledger.rs`: `unwritten`, `retry_*` | `retry` |
//! | a right is not replaced by one of an older generation, but given back where that is meant | `rights.rs` in `storage` | `note`, `give_back` |
//! | a person's word is noted even where a copy is | `handover/ledger.rs`: `concede` | `concede` |
//! | BEGAN is durable before the offer goes out; QEMU is started after the destination's BEGAN | `source/prepare.rs`, `destination/attempt.rs` | `begin`, `launch` |
//! | an attempt begins only where the right is, the guest lives and its name is free | `source/prepare.rs`, `status/registry.rs` | `ask_for_migration` |
//! | a name is taken until the source's journal is closed or a person gave the guest back, at the destination until it is settled | `status/registry.rs`: `Reservation` | `is_busy` |
//! | an offer is refused when the attempt is known, the name taken, the generation old | `destination/attempt/prepare.rs` | `destination_hears_offer` |
//! | an offer of an attempt that is closed is refused by an agent that saw it close; one that did not has no connection that could bring it | `destination/recovered.rs`: `is_closed` | `destination_hears_offer`, `crash` |
//! | every connection begins with the question | `source/connect.rs`, `source/recovered.rs`: `meet` | `connect` |
//! | a restarted source cannot send blocks: it cancels where some are waited for | `source/recovered.rs`: `heard` | `source_hears_waiting` |
//! | a source that lost its QEMU gives up, unless all was sent | `source/attempt/handover.rs`: `qemu_ended` | `see_gone` |
//! | a restarted source follows a person's word only for a guest that has not gone on since | `recovery.rs` | `went_on`, `leave_guest` |
//! | a restarted destination looks whether a loaded QEMU is still there, before it answers | `destination/recovered.rs`: `look` | `take_up` |
//! | without a task a destination forgets what is settled, and reads its journal when asked | `destination/recovered.rs`: `answer` | `leave` |
//! | only the agent that loaded a copy takes a refused `cont` for proof that it never ran | `destination/attempt/handover.rs`, `destination/recovered.rs`: `resume` | `resume_destination` |
//! | `cont` that is not answered counts as done | the same | `resume_destination` |
//! | nothing is needed of the source once the guest runs | `destination/attempt/handover.rs`: `step` | `all_present` |
//! | the destination's journal is removed with CLOSED, the source's when it hears that | `destination/attempt.rs`: `end`, `destination/recovered.rs`, `source/recovered.rs` | `go_on`, `source_hears` |
//!
//! Assumed of the world: a message is from the peer and intact; a host that is lost loses what was on its
//! way to it; in `postmigrate` only `cont` wakes a guest; a person who says that a host is dead or
//! fenced is right, and starts nothing there before the agents have met.
//!
//! Not modelled: what is in the blocks; disks beyond their being retired; wrong or hostile peers
//! (attempts and generations of others are refused by the functions, and tested there); a failed
//! BEGAN of a source; a right that cannot be written; time, so every time-out may happen at any
//! moment; a reset, which changes nothing for the hand-over.

mod act;
mod apply;
pub mod explore;
mod functions;
mod liveness;
mod machine;
pub mod outcome;
pub mod plan;
mod small;
mod step;
mod tell;
mod variant;
mod world;

pub use machine::Setting;
pub use variant::Variant;
pub use world::{Budget, Property};
