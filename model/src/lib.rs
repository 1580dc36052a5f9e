//! Explores the handover: the functions that the agents run, in every order of events.
//!
//! The functions under test are `step_source`, `step_destination`, `SourceState::restore` and
//! `DestinationState::restore` of `longhaul_engine::handover`, called unchanged. The world around
//! them has two hosts, an agent and a QEMU on each, and messages between them.
//!
//! A step is one action of an agent, one message, one act of a QEMU or of an operator, one death.
//! So an agent can die between any two actions. A death during the write of a record is a death
//! before or after it. A write can fail with its record on disk nevertheless, until the next write
//! replaces it.
//!
//! An agent's own behaviour, outside of those functions, is kept as small as possible. The model
//! does the same as these places of the product (under `crates/migration/src` where no crate is
//! named):
//!
//! - Actions are executed in order, then their results are fed. Product: `handover/ledger.rs`:
//!   `drive_source`, `drive_destination`; here: `go_on`, `act`.
//! - A record that fails twice waits; other events are fed meanwhile. Product: `durable.rs` in
//!   `attempt`: `keep`, `due`; here: `retry`.
//! - A right is not replaced by one of an older generation, but given back where that is intended.
//!   Product: `rights.rs` in `storage`; here: `note`, `give_back`.
//! - An operator's statement is noted even where a copy of the guest is. Product:
//!   `handover/ledger.rs`: `concede`; here: `concede`.
//! - BEGAN and PEER are durable before the offer goes out. If one cannot be written, the journal is
//!   removed, or stays until the next start, and the guest's name is free. QEMU is started after
//!   the destination's BEGAN. Product: `source/prepare.rs`, `destination/attempt/prepare.rs`; here:
//!   `prepare`, `launch`.
//! - A source asks only the identity that BEGAN names, and, unless it keeps the guest anyway, only
//!   the journals that PEER names. Product: `source/connect.rs`; here: `is_foreign`.
//! - A guest that QEMU does not resume at the source is tried again, and the journal is not closed
//!   before it is resumed. Product: `source.rs` in `attempt`: `unresumed`; here: `resume_source`,
//!   `retry`.
//! - An attempt begins only where the host has the right, the guest runs and its name is free.
//!   Product: `source/prepare.rs`, `status/registry.rs`; here: `ask_for_migration`.
//! - A name is taken until the source's journal is closed or an operator gave the guest back, at
//!   the destination until it is settled. Product: `status/registry.rs`: `Reservation`; here:
//!   `is_busy`.
//! - An offer is refused when the attempt is known, the name is taken, or the generation is old.
//!   Product: `destination/attempt/prepare.rs`; here: `destination_hears_offer`.
//! - An offer of a closed attempt is refused by an agent that saw it close; an agent that did not
//!   has no connection on which it could arrive. Product: `destination/attempt/prepare.rs`:
//!   `begin`, `destination/closed.rs`; here: `destination_hears_offer`, `crash`.
//! - Every connection begins with the question. Product: `source/connect.rs`: `ask`, `try_resume`;
//!   here: `connect`.
//! - A restarted source cannot send blocks: it cancels if the destination waits for some. Product:
//!   `source.rs` in `attempt`: `message`; here: `source_hears_waiting`.
//! - A source that lost its QEMU gives up, unless everything was sent. Product:
//!   `source/attempt/handover.rs`: `qemu_ended`; here: `see_gone`.
//! - A restarted source follows an operator's statement only for a guest that has not gone on
//!   since, and resumes a guest that it never released only if no other attempt has it away.
//!   Product: `recovery.rs`; here: `went_on`, `is_away`, `leave_guest`.
//! - A restarted destination checks before it answers whether a loaded QEMU still exists. Product:
//!   `destination/recovered.rs`: `look`; here: `take_up`.
//! - Without a task a destination forgets settled attempts, and reads its journal when asked.
//!   Product: `destination/recovered.rs`: `answer`; here: `leave`.
//! - Only the agent that loaded a copy takes a refused `cont` as proof that it never ran. Product:
//!   `destination/attempt/handover.rs`: `resume_guest`, `destination/recovered.rs`: `resume`; here:
//!   `resume_destination`.
//! - A `cont` without an answer counts as done. Product: the same; here: `resume_destination`.
//! - Nothing of the source is needed once the guest runs, or the source sends what is missing, or
//!   an operator gives it up. Product: `destination.rs` in `attempt`: `after_step`,
//!   `destination/fetch.rs`; here: `all_present`, `give_up`.
//! - Memory that follows is sent from the source's stopped QEMU; if that has ended, from a complete
//!   memory file, or it is said to be lost. Product: `source/left_memory.rs`,
//!   `source/memory_file.rs`, `source/drain.rs`; here: `give`, `say_lost`.
//! - The memory file has all that was missing at the handover, and is used when it is durable. It
//!   goes with the copy, or when the guest stays at the source. Product: `source/memory_copy.rs`,
//!   `source/memory_file.rs`; here: `keep`, `retire`, `resume_source`.
//! - A page server outlives the agent. If it is killed, the agent starts another one, which learns
//!   from QEMU what is missing. Product: `destination/arriving_memory.rs`; here: `serve`,
//!   `kill_server`.
//! - Memory is here when QEMU has it, whatever was acknowledged. Product:
//!   `destination/fetch/memory.rs`; here: `has_memory`.
//! - An operator may give up memory while the source is connected, if it has said that the memory
//!   is lost, or sends nothing. Product: `destination/fetch/give_up.rs`; here: `is_lost`.
//! - A guest whose missing memory is given up is ended. Product: `destination/fetch/give_up.rs`,
//!   `destination/fetch/memory.rs`; here: `end_without_memory`.
//! - A destination that has COMMIT for an arbiter asks it, for a limited time, and then gives up.
//!   Product: `handover/ledger.rs`: `claim_in_time`; here: `claim`, `abort`.
//! - A source in doubt asks the arbiter only while its QEMU has the stopped guest. Product:
//!   `source/attempt/handover.rs`, `source/recovered.rs`: `claim`; here: `claim`.
//! - An operator's decision for the destination is refused if the arbiter has given the guest back.
//!   Product: `lib.rs`: `claim_before`; here: `overrule`.
//! - An operator takes the right back only while no attempt of the guest is open. Product:
//!   `left_behind.rs`; here: `reclaim`.
//! - The destination's journal is removed with CLOSED, the source's when the source learns of that.
//!   Product: `destination/attempt/handover.rs`: `end`, `destination/recovered.rs`,
//!   `source/recovered.rs`; here: `go_on`, `source_hears`.
//!
//! Assumptions about the world: a message is from the peer and intact; a lost host loses the
//! messages on their way to it; in `postmigrate` only `cont` wakes a guest; an operator who
//! declares a host dead or fenced is right, and starts nothing there before the agents have met;
//! the right is taken back only from a host that never returns; the arbiter gives each lease to one
//! host, for ever. A question or an answer of the arbiter may be lost or come late. An arbiter that
//! is gone answers nothing: one that was restored has another store.
//!
//! Not modelled: the content of blocks; disks beyond their being retired; which pages are missing
//! (one stands for all); a page server that is killed while QEMU's main loop waits for a page,
//! after which only an operator helps; notes in `STATE/following` that are lost with their host;
//! faulty or hostile peers (attempts, generations and stores of others are refused by the
//! functions, and tested there); a third host, which may hold the lease: then the source never gets
//! it; a right that cannot be written; time, so every time-out may happen at any moment; a reset,
//! which changes nothing for the handover.

mod act;
mod apply;
pub mod explore;
mod functions;
mod liveness;
mod machine;
mod memory;
pub mod outcome;
pub mod plan;
mod small;
mod step;
mod tell;
mod variant;
mod world;

pub use machine::{Left, Setting};
pub use variant::Variant;
pub use world::{Budget, Property};
