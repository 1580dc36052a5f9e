//! The lazy disk: the export of a disk on which the guest runs while blocks of it are missing.
//! Missing blocks are requested from a *pump*, which brings the rest on a socket of its own.
//!
//! ```text
//! guest ──read, write──▶ server: what is present? ──▶ image
//!                          ▲ blocks  │ wants
//!                          └─ pump ◀─┘        (the agent, which has the connection to the source)
//! ```
//!
//! [`Presence`] decides what is present, under one lock. Two files outlive the server: the last
//! recorded masks, which are valid while the machine runs, and the durable ones ([`masks`]). So
//! server and pump may be killed at any time; without a pump the guest waits only for missing
//! blocks. Before the file of masks exists, no write is accepted: the guest does not run here.

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

/// Exports an arriving disk.
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
