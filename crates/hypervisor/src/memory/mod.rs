//! Transfers a guest's memory during a move: [`GuestMemory`] reads and writes the RAM of a QEMU
//! process, [`Outgoing`] runs the source QEMU's migration, [`Incoming`] the destination's.
//!
//! QEMU's streams carry little. At the source only the *records* of written pages matter, and the
//! content of small blocks (ROMs, ACPI tables, video memory: *kept* blocks, see
//! [`MemoryBlock::is_kept`]). All other content is read from the source's RAM when it is sent, and
//! written into the destination's before its QEMU loads the devices.
//!
//! ```text
//! source                                                    destination
//! GuestMemory::attach                                       GuestMemory::attach
//! Outgoing::start -> Prelude ------------------------------> Incoming::start(prelude)
//!
//!   READING  Written..., then HELD (some records left in the socket, QEMU waits)
//!     ^        |   |                                         GuestMemory::write ...
//!     '--------'   |  next_pass(): PassStarted, Written...
//!   next_pass      |
//!                  v
//!   freeze()  `stop`, its reply, `query-status`; read to the end of the device state;
//!     |       SHUT(0); `postmigrate`
//!     v
//!   FROZEN    Frozen { written, tail } --------------------> the last GuestMemory::write, then
//!     |                                                      Incoming::finish(tail) -> loaded,
//!     |                                                      paused, disks not yet active
//!     '-> the guest may be released                          the owner's `cont` starts the guest
//!
//!   abort()   from any of these: the guest goes on here as it was before
//! ```
//!
//! # Holding a QEMU that converges
//! QEMU ends a pass with a query of the pages dirtied meanwhile. If these are few, it stops the
//! guest and completes by itself. So a pass is never read to its end unless the owner requests the
//! next one: the reader stops while enough is unread that the socket is full and QEMU blocks in its
//! write, holding no other lock. In the first pass that place is computed from the guest's RAM (the
//! last [`MARGIN_PAGES`] pages that are not zero), in later ones it is a count from QEMU's own
//! number. An idle guest stays in its first pass until the freeze.
//!
//! - Where withholding the switchover acknowledgement holds QEMU, it never gets one: from 8.1 on,
//!   and on 11.1 and newer with machine types up to 11.0.
//! - Elsewhere a pass is ended only when samples of the RAM show that enough was dirtied, and
//!   slowly (`max-bandwidth`), so that QEMU is caught at the beginning of the next one. If it
//!   completes nevertheless, the completion is refused (SHUT(1)), the guest goes on, and the
//!   migration starts again: event [`Event::Restarted`], and every page is reported once more. The
//!   last pass of such a QEMU is never used: it may lack writes.
//!
//! A balloon that reports free pages to QEMU (`free-page-hint`) takes a lock for each of them; a
//! QEMU that blocks in a write does not release that lock, and `stop` and a reset of the guest wait
//! for the balloon. Where the acknowledgement holds such a QEMU, it is held by its rate instead
//! (`max-bandwidth`): it writes some pages each 100 ms, which are read and reported with the next
//! pass. Elsewhere it is kept from asking the balloon. From 11.1 on such a QEMU queries dirty pages
//! all the time, so its queries are not passes: a pass is the set of dirty pages when the owner
//! requests it.
//!
//! If a held QEMU stops the guest by itself, its stream is read on at once and the completion
//! refused; the move is given up (`outgoing::guard`).
//!
//! A guest that is paused from the start is not held: all of its stream is read at once, and the
//! freeze only ends the migration.
//!
//! QEMU under TCG has another fault: it does not always see writes through TLB entries that are
//! older than its last query of dirty pages (docs/decisions/0002 explains when). There
//! [`GuestMemory::read`] records the content that it returned, and the freeze compares the stopped
//! guest's RAM with it, page by page: differences are in [`Frozen::changed`].

mod address_map;
mod arriving;
mod backing;
mod code;
mod cpus;
mod fingerprints;
mod guest_memory;
mod incoming;
mod named;
mod outgoing;
pub mod page_server;
mod page_tables;
mod pages;
mod places;
mod reader;
mod sampler;
mod source;
mod unused;

pub(crate) use address_map::{is_unnamed, shared_files};
pub use arriving::{Arriving, ArrivingEvent, Missing, PageServer, Request};
pub use code::TablesInUse;
pub use guest_memory::COMPARERS_MAX;
pub(crate) use guest_memory::KEPT_BLOCK_BYTES_MAX;
pub use guest_memory::{AccessError, AttachError, GuestMemory, MemoryBlock};
pub use incoming::{Incoming, IncomingError, Loaded, read_prelude};
pub use longhaul_qemu_stream::{Prelude, RamBlock};
pub use named::Layout;
pub use outgoing::{
    ByCommand, Dirty, Event, Frozen, MARGIN_PAGES, Migrator, Outgoing, OutgoingError, Progress,
    Written,
};
pub(crate) use places::is_findable;
pub(crate) use sampler::Sample;
pub(crate) use source::is_held_by_ack;
pub use source::{Continuation, Settings, SourceError, misses_writes, resume, runs};
