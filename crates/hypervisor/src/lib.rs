//! Controls QEMU from outside: QMP, launching guests, their memory and their migration sockets.
//!
//! A host's configuration ([`config`]) defines the names in a guest's description; [`launch`]
//! starts a QEMU from the two, [`guest`] finds and ends it, [`observe`] reads its machine,
//! [`capabilities`] determines beforehand what this host can run. [`manager`] is the interface to
//! the owner of a guest, and [`launcher`] its implementation for Longhaul's own guests.

pub mod attach;
mod balloon;
pub mod bridge_port;
pub mod capabilities;
mod command_line;
pub mod config;
pub mod description;
pub mod dirty_rate;
pub mod disk;
pub mod disk_cache;
pub mod disk_rate;
pub mod displays;
pub mod firmware;
pub mod folder;
pub mod guest;
pub mod guest_agent;
mod hardware;
pub mod held_frames;
pub mod helper;
pub mod launch;
pub mod launcher;
pub mod managed;
pub mod manager;
pub mod managers;
pub mod memory;
pub mod observe;
mod open_files;
mod probe;
pub mod process;
mod process_path;
pub mod qmp;
pub mod scope;
pub mod starter;
mod tap;
pub mod tested;
pub mod tpm;
pub mod vcpus;

pub use capabilities::Accelerator;
pub use command_line::ResolveError;
pub use hardware::shared_folders;
pub use manager::Guest;
pub use open_files::has_open;
pub use qmp::Qmp;
