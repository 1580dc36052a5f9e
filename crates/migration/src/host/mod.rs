//! The agent's resources on its host: configuration, state, indexes and hooks.

pub mod atomic_file;
pub mod base_images;
pub mod config;
pub(crate) mod content_index;
pub mod descriptions;
pub mod fail_point;
pub(crate) mod hooks;
pub(crate) mod incarnation;
pub mod limited_hosts;
pub(crate) mod lock;
pub(crate) mod marks;
pub mod meminfo;
pub(crate) mod memory_cache;
pub(crate) mod notes;
pub(crate) mod peer_limits;
pub(crate) mod qemu;
pub(crate) mod retained_qemus;
pub(crate) mod set_aside;
pub mod start_error;
pub mod state;
pub(crate) mod sweeper;
pub(crate) mod task;
pub mod writable;
