//! Implements the laboratory: emulated hosts, links and guests on one machine, and the product that
//! moves the guests.
//!
//! [`lab`] creates hosts ([`netns`]) and [`link`]s, or an [`internet`] of sites, and records them
//! in the [`registry`], so that they are always removed.

pub mod agent;
pub mod arena;
pub mod clients;
pub mod error;
pub mod guest;
pub mod history;
pub mod installed;
pub mod internet;
pub mod interrupt;
pub mod lab;
pub mod libvirt;
pub mod link;
mod mounts;
pub mod netns;
pub mod peer;
pub mod process;
pub mod product;
pub mod proxmox;
pub mod realm;
pub mod registry;
pub mod tap;
