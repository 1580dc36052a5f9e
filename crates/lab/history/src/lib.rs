//! Histories of disks: the operations that a guest does on its disks, all told by a seed, and the
//! judgement of what the disks may hold after a crash or a move.
//!
//! [`plan`] says what each operation is, [`sector`] what it writes, [`order`] which may run at the
//! same time and what is told of them, [`table`] what a running guest must read back, and [`check`]
//! what images may hold. It does no I/O and depends on nothing, so that the program in the guest and
//! the judge outside are made of the same code.

pub mod check;
pub mod order;
pub mod plan;
pub mod random;
pub mod sector;
pub mod table;

#[cfg(test)]
mod damage;
