//! Histories on the disks of guests: [`guest`] lets one do them, [`images`] judges what its disks hold
//! afterwards, [`workload`] knows what it can be like, [`command`] is `lab history`.

pub mod command;
pub mod guest;
pub mod images;
pub mod workload;

mod teller;
