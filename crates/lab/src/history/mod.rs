//! Runs histories on the disks of guests: [`task`] on any host, [`guest`] in a guest on one host,
//! [`images`] judges the disks' content afterwards, [`workload`] defines the kinds of histories.

pub mod guest;
pub mod images;
pub mod task;
pub mod workload;

mod teller;
