//! What an agent keeps on disk: the journal of each migration.

mod journal;

pub use journal::{Journal, JournalError, MAGIC};
