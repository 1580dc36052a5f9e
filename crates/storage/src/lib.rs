//! The storage of an agent: its records (the journal of each migration, and the right to run each
//! guest), the disk exports between QEMU and the disk of a guest that moves ([`disk`], [`nbd`], and
//! as processes of their own [`front`]), the content of this host's files ([`content`]), and the
//! proof that another host has the same file ([`same_file`]).

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
    SetAside, file_name, list_journals, list_set_aside, read, read_journal, read_sound_journal,
    set_aside,
};
pub use rights::{Holder, Right, Rights, RightsError};
