//! Implements histories of disks: the operations of a guest on its disks, all derived from a seed,
//! and the judgement of the disks' content after a crash or a move.
//!
//! [`plan`] defines each operation, [`sector`] the content it writes, [`order`] which operations
//! may run at the same time and how they are reported, [`table`] what a running guest must read
//! back, and [`check`] what images may hold. The crate does no I/O and has no dependencies, so that
//! the program in the guest and the judge outside share their code.

pub mod check;
pub mod order;
pub mod plan;
pub mod random;
pub mod sector;
pub mod table;

#[cfg(test)]
mod damage;
