//! What an agent keeps on disk: the journal of each migration, and who may run each guest.

mod journal;
mod rights;

pub use journal::{Journal, JournalError, MAGIC};
pub use rights::{Holder, Right, Rights, RightsError};
