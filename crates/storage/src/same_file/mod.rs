//! Proofs that two hosts see the same file: [`locks`] that one host holds on it and the other one
//! finds, and [`content`] for files that are not written.
//!
//! Whether the type of a file system is one that hosts can share neither proves nor disproves it.

pub mod content;
pub mod locks;

pub use content::{Contents, Which};
pub use locks::HeldLocks;
