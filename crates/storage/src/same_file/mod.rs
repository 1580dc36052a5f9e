//! Whether two hosts see one file: [`locks`] that one of them holds on it and the other one looks
//! for, and [`content`] where nobody writes to it.
//!
//! That a file system is of a kind that hosts share proves nothing, and that it is not does not
//! disprove it.

pub mod content;
pub mod locks;

pub use content::{Contents, Which};
pub use locks::HeldLocks;
