//! Disks: what an agent keeps on its own (the journal of each migration, and who may run each
//! guest), and what stands between QEMU and a guest's disk while it moves ([`disk`], [`nbd`], and as
//! processes of their own [`front`]), which content its files hold ([`content`]), and whether
//! another host has the same file ([`same_file`]).

pub mod content;
pub mod disk;
pub mod files;
pub mod front;
mod journal;
pub mod nbd;
pub mod pulse;
mod rights;
pub mod same_file;

pub use journal::{
    Ending, Entry, Journal, JournalError, Journals, MAGIC, NotRead, RESERVED_BYTES, Reading,
    file_name, list_journals, read, read_journal,
};
pub use rights::{Holder, Right, Rights, RightsError};
