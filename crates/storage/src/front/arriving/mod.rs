//! The server of a disk that is not all here yet: the guest runs on it, and what it needs that is
//! missing is asked for, from whoever brings the rest (the *pump*, on a socket of its own).
//!
//! ```text
//! guest ──read, write──▶ server: what is here? ──▶ image
//!                          ▲ blocks  │ wants
//!                          └─ pump ◀─┘        (the agent, which has the connection to the source)
//! ```
//!
//! What is here is said by [`Presence`], under one lock. Two files outlive the server: what was noted
//! last, which counts as long as the machine runs, and what is stored, durably ([`masks`]). So a
//! server, and a pump, may be killed at any time; without a pump the guest waits for nothing but what
//! is missing. Before the file of masks is there, nobody writes: the guest does not run here.

mod disk;
pub mod line;
pub mod masks;
mod pump;
#[cfg(test)]
mod tests;
pub mod unwritten;

use super::folder::FrontFolder;
use super::server::{ServeError, serve};
use crate::nbd::{Export, Notice};
use disk::ArrivingDisk;
use std::sync::Arc;

/// Shows an arriving disk.
pub fn arriving(
    folder: &FrontFolder,
    notify: impl Fn(Notice) + Send + Sync + 'static,
) -> Result<(), ServeError> {
    let spec = folder.spec()?;
    let notify = Arc::new(notify);
    let open = || {
        let notify = notify.clone();
        let disk = ArrivingDisk::open(folder, &spec, move |notice| notify(notice))?;
        let disk = Arc::new(disk);
        disk::keep_durable(&disk).map_err(ServeError::NotStarted)?;
        pump::listen(folder, &disk).map_err(ServeError::NotStarted)?;
        let name = spec.name.clone();
        Ok(Export { name, disk })
    };
    let notify = notify.clone();
    serve(folder, open, move |notice| notify(notice))
}
