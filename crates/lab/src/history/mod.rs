//! Histories on the disks of guests: [`task`] lets a guest do one wherever it is, [`guest`] a guest on one host, [`images`] judges what its disks hold
//! afterwards, [`workload`] knows what it can be like, [`command`] is `lab history`.

pub mod command;
pub mod guest;
pub mod images;
pub mod task;
pub mod workload;

mod teller;
