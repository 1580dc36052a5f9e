//! Incremental parser and writer of QEMU's migration stream and return path.
//!
//! The stream, as QEMU 7.2 and 10.0 write it for a pre-copy of memory over one socket:
//!
//! ```text
//! prelude        header, configuration (machine type), commands (return path, ping),
//!                SECTION_START `ram` with the list of RAM blocks
//! memory         SECTION_PART `ram` ...: records of pages, zero or with content
//!                (10.0: command SWITCHOVER_START)
//!                SECTION_END `ram`: the last records
//! device state   the other devices' sections, an end mark, and their description as JSON
//! ```
//!
//! [`Parser`] reads it in pieces of any size, skips the content of unwanted pages, and buffers a
//! bounded number of bytes for any input. [`Writer`] produces the stream for a destination.
//! [`return_path`] is the opposite direction of the same socket. The crate does no I/O.
//!
//! Post-copy has its place in [`Writer`] and [`return_path::Message`]: a destination that starts
//! early gets further commands (ADVISE, discards, PACKAGED) between the same parts.

mod format;
mod limits;
mod parser;
pub mod return_path;
mod vmdesc;
mod writer;

pub use format::{PAGE_SIZE, Page};
pub use limits::Limits;
pub use parser::{Content, Event, ParseError, Parser, Prelude, RamBlock};
pub use vmdesc::device_sections;
pub use writer::Writer;
