//! The end of the QEMUs of guests that have left, once their memory is cached.

use crate::context::Context;
use crate::host::memory_cache::Written;
use crate::source::Source;
use crate::source::companion::About;
use crate::source::retained_qemu::{RetainedQemu, folder};
use crate::status::migration::Entry;
use crate::status::registry::{Reservation, Taken};
use longhaul_api::KeptMemoryReport;
use longhaul_hypervisor::manager::Found;
use longhaul_protocol::units::show_bytes;
use longhaul_storage::Holder;
use std::fs;
use std::io;
use std::sync::Arc;

/// Removes the guest from the list of retained QEMUs when dropped.
struct Leaves {
    context: Arc<Context>,
    guest: String,
}

impl Drop for Leaves {
    fn drop(&mut self) {
        self.context.retained_qemus.remove(&self.guest);
    }
}

fn report(context: &Context, entry: &Entry, guest: &str, written: Written) {
    let Written { bytes, whole } = written;
    let kept = show_bytes(bytes);
    tracing::info!(guest, kept, whole, "what its memory held is kept");
    entry.report_with(|report| report.kept_memory = Some(KeptMemoryReport { bytes, whole }));
    context.archive.keep(entry);
}

impl Source {
    /// Writes the memory of a guest to the cache, and then ends its QEMU.
    pub(crate) fn keep(
        self: &Arc<Self>,
        qemu: RetainedQemu,
        entry: Arc<Entry>,
        reservation: Reservation,
    ) {
        let name = qemu.guest().name().to_owned();
        let stands = self.retained_qemus.add(&name);
        reservation.now(Taken::RetainedQemu);
        let leaves = Leaves {
            context: self.context.clone(),
            guest: name.clone(),
        };
        let source = self.clone();
        tokio::spawn(async move {
            match qemu.written(&source.context, &stands).await {
                Ok(written) if written.bytes > 0 => report(&source, &entry, &name, written),
                Ok(_) => tracing::info!(guest = name, "there was no time to keep its memory"),
                Err(error) => tracing::warn!(guest = name, %error, "its memory is not kept"),
            }
            source.end_departed(&name).await;
            drop(reservation);
            drop(leaves);
        });
    }

    /// Ends the QEMU of a departed guest, and what the guest needed here.
    async fn end_departed(&self, guest: &str) {
        let state = &self.parts.config.state;
        if let Err(error) = self.parts.guests.confirm(guest, None).await {
            tracing::error!(guest, %error, "something of it is left over");
        }
        let found = self.parts.guests.list();
        let stands = found.map(|found| found.into_iter().find(|found| is_left_over(found, guest)));
        if !matches!(stands, Ok(None)) {
            // The agent finds the note after its next start.
            return tracing::error!(guest, ?stands, "its QEMU is left over");
        }
        let about = About {
            context: self.context.clone(),
            guest: guest.to_owned(),
            host: String::new(),
            shown: None,
        };
        self.companions(&about).committed().await;
        match fs::remove_file(folder(state).join(guest)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::error!(guest, %error, "cannot note that its QEMU has ended");
            }
            _ => {}
        }
    }

    /// Ends the QEMUs that an earlier agent retained.
    pub(crate) async fn end_all_departed(&self) -> io::Result<()> {
        let state = &self.parts.config.state;
        let entries = match fs::read_dir(folder(state)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other?,
        };
        for entry in entries {
            let path = entry?.path();
            let Some(guest) = path.file_name().and_then(|name| name.to_str()) else {
                continue;
            };
            let right = self.rights.get(guest).map_err(io::Error::other)?;
            let elsewhere = |holder| matches!(holder, Holder::Elsewhere { .. });
            if right.is_some_and(|right| elsewhere(right.holder)) {
                self.end_departed(guest).await;
            } else {
                tracing::error!(guest, "noted as departed, and not: its QEMU is left alone");
                fs::remove_file(&path)?;
            }
        }
        Ok(())
    }
}

/// Returns whether this is the guest, and has a QEMU or a record that cannot be used.
fn is_left_over(found: &Found, guest: &str) -> bool {
    found.name() == guest && !matches!(found, Found::Ended(_))
}
