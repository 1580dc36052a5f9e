//! Histories on the disks of guests: [`guest`] lets one do them, [`images`] judges what its disks hold
//! afterwards, [`command`] is `lab history`.

pub mod command;
pub mod guest;
pub mod images;
mod teller;
