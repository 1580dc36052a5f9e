//! What an agent keeps on disk: the journal of each migration, and who may run each guest.

pub mod files;
mod journal;
mod rights;

pub use journal::{
    Ending, Entry, Journal, JournalError, Journals, MAGIC, NotRead, RESERVED_BYTES, Reading,
    file_name, list_journals, read, read_journal,
};
pub use rights::{Holder, Right, Rights, RightsError};
