//! The variables of a guest's UEFI firmware as a companion, if their image is `local` on both
//! hosts.
//!
//! The variables are in a flash device. QEMU migrates its content as a RAM block, and the
//! destination's QEMU writes all of it to its image when the guest starts. So only the image is
//! made at the destination, and set aside at the source.
//!
//! ```text
//! STATE/variables/GUEST.note   the image of a guest that leaves
//! ```

use crate::context::Context;
use crate::destination::companion as destination;
use crate::destination::companion::{Offered, Step};
use crate::disks::images::{self, NewImage};
use crate::host::notes::{Note, NoteStore};
use crate::host::right::Holder;
use crate::host::set_aside::set_aside;
use crate::residue::{Again, Residue};
use crate::source::companion as source;
use longhaul_api::{ApiError, Check, ErrorCode};
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::config::{Image, ImageFormat};
use longhaul_hypervisor::has_open;
use longhaul_hypervisor::qmp::Qmp;
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::machine::Machine;
use longhaul_protocol::message::{self, Refusal, RefusalCode, Verdict};
use longhaul_protocol::units::show_bytes;
use longhaul_storage::disk::qcow2;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::task::{block_in_place, spawn_blocking};

/// The RAM block of the flash device.
const FLASH: &str = "system.flash1";
/// Limit on the size of the flash device, in bytes: twice QEMU's default.
const BYTES_MAX: u64 = 16 << 20;
const WHAT: &str = "the firmware's variables";

/// Returns the image of a guest's variables, by name, if no other host sees it.
fn local<'a>(context: &'a Context, guest: &'a GuestDescription) -> Option<(&'a String, &'a Image)> {
    let name = guest.variables()?;
    let image = context.parts.config.hypervisor.images.get(name)?;
    image.local.then_some((name, image))
}

/// Returns the size of the flash device, in bytes.
fn bytes_of(machine: &Machine) -> Option<u64> {
    let block = machine.ram_blocks.get(FLASH)?;
    Some(block.used_bytes).filter(|bytes| (1..=BYTES_MAX).contains(bytes))
}

/// The image at the destination.
pub(super) struct Arrival(destination::About);

impl Arrival {
    pub(super) fn new(about: destination::About) -> Self {
        Self(about)
    }

    /// Returns the path for the image and its format, if one can be made there.
    fn path(&self, guest: &GuestDescription) -> Result<Option<(PathBuf, ImageFormat)>, Refusal> {
        let context = &self.0.context;
        let Some((name, image)) = local(context, guest) else {
            return Ok(None);
        };
        let path = images::free_path(context, name, WHAT)?;
        Ok(Some((path, image.format)))
    }
}

impl destination::Companion for Arrival {
    fn look(&self, guest: &GuestDescription) -> Vec<message::Check> {
        let here = &self.0.context.parts.config.name;
        let (verdict, text, hint) = match self.path(guest) {
            Ok(None) => return Vec::new(),
            Ok(Some(_)) => (Verdict::Fine, format!("{WHAT} move along to {here}"), None),
            Err(refusal) => (Verdict::Refused, refusal.text, refusal.hint),
        };
        vec![message::Check {
            verdict,
            text,
            hint,
        }]
    }

    fn prepare<'a>(&'a mut self, offered: &'a mut Offered<'_>) -> Step<'a, Result<(), Refusal>> {
        Box::pin(async move {
            let offer = &offered.offer;
            let Some((path, format)) = block_in_place(|| self.path(&offer.guest))? else {
                return Ok(());
            };
            let context = &self.0.context;
            let here = &context.parts.config.name;
            let Some(bytes) = bytes_of(&offer.machine) else {
                let text = format!("{here}: the machine has no flash device for {WHAT}");
                return Err(images::invalid(text));
            };
            let (beginning, bytes) = match format {
                ImageFormat::Raw => (Vec::new(), bytes),
                ImageFormat::Qcow2 => {
                    // It is not larger than `BYTES_MAX`.
                    let image = qcow2::empty(bytes).unwrap_or_default();
                    let length = image.len() as u64;
                    (image, length)
                }
            };
            let new = NewImage {
                path,
                beginning,
                bytes,
            };
            let made = block_in_place(|| images::create(context, offer, Some("variables"), &[new]));
            made.map_err(|error| Refusal {
                code: RefusalCode::QemuFailed,
                text: format!("{here}: cannot make the image of {WHAT}: {error}"),
                hint: None,
            })
        })
    }

    /// Makes durable what QEMU has written to the image when the guest started.
    fn running(&mut self) -> Option<Step<'static, ()>> {
        let destination::About { context, guest, .. } = self.0.clone();
        Some(Box::pin(async move {
            let synced = spawn_blocking(move || sync(&context, &guest)).await;
            if let Err(error) = synced.unwrap_or_else(|error| Err(io::Error::other(error))) {
                tracing::error!(%error, "{WHAT} may be lost if this host loses power");
            }
        }))
    }
}

fn sync(context: &Context, guest: &str) -> io::Result<()> {
    let Some(found) = context.parts.guests.find(guest)? else {
        return Ok(());
    };
    match local(context, found.description()) {
        Some((_, image)) => File::open(&image.path)?.sync_all(),
        None => Ok(()),
    }
}

/// Returns an error and a hint unless a guest's QEMU has the image open, and it may move.
fn is_used(context: &Context, guest: &Guest) -> Result<(), (String, String)> {
    let Some((name, image)) = local(context, guest.description()) else {
        return Ok(());
    };
    let about = fs::metadata(&image.path);
    let bytes = about.as_ref().map_or(0, |about| about.len());
    let used = about.and_then(|about| has_open(guest.pid().unwrap_or_default(), &about));
    let why = match used {
        // The destination refuses it too, but only after the offer.
        Ok(true) if bytes > BYTES_MAX => {
            let text = format!(
                "{WHAT}: their image has {}, and at most {} move along",
                show_bytes(bytes),
                show_bytes(BYTES_MAX)
            );
            let hint = "put the image on storage that both hosts see, without `local`";
            return Err((text, hint.to_owned()));
        }
        Ok(true) => return Ok(()),
        Ok(false) => "it is not the file that its QEMU uses".to_owned(),
        Err(error) => error.to_string(),
    };
    let path = image.path.display();
    let hint = format!("give the file that QEMU uses this path under [images.{name}]");
    Err((format!("{WHAT}: {path}: {why}"), hint))
}

/// The note of an image at the source.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Leaves {
    image: PathBuf,
}

impl Note for Leaves {
    const FOLDER: &'static str = "variables";
}

fn notes(context: &Context) -> NoteStore<Leaves> {
    NoteStore::of(&context.parts.config.state)
}

/// Sets aside the image of a guest that has left, so that the guest is not started from it.
fn left(context: &Context, guest: &str) -> io::Result<()> {
    let notes = notes(context);
    if !notes.exists(guest) {
        return Ok(());
    }
    set_aside(&notes.read(guest)?.image)?;
    notes.remove(guest)
}

/// The image at the source.
pub(super) struct Departure(source::About);

impl Departure {
    pub(super) fn new(about: source::About) -> Self {
        Self(about)
    }
}

impl source::Companion for Departure {
    fn look(&self, guest: &Guest) -> Vec<Check> {
        let Some((name, _)) = local(&self.0.context, guest.description()) else {
            return Vec::new();
        };
        vec![match is_used(&self.0.context, guest) {
            Ok(()) => Check::ok("variables", format!("{WHAT} (image {name}) move along")),
            Err((text, hint)) => Check::refuse("variables", text, hint),
        }]
    }

    fn check<'a>(&'a mut self, guest: &'a Guest, _qmp: &'a Qmp) -> Step<'a, Result<(), ApiError>> {
        let refused = is_used(&self.0.context, guest).map_err(|(text, hint)| {
            let error = ApiError::new(ErrorCode::Refused, text);
            error.hint(hint)
        });
        Box::pin(async move { refused })
    }

    fn prepare<'a>(&'a mut self, guest: &'a Guest) -> Step<'a, Result<(), ApiError>> {
        Box::pin(async move {
            let Some((_, image)) = local(&self.0.context, guest.description()) else {
                return Ok(());
            };
            let note = Leaves {
                image: image.path.clone(),
            };
            let noted = block_in_place(|| notes(&self.0.context).write(&self.0.guest, &note));
            noted.map_err(|error| {
                let text = format!("cannot note that {WHAT} leave: {error}");
                ApiError::new(ErrorCode::Internal, text)
            })
        })
    }

    fn committed(&mut self) -> Step<'_, ()> {
        if let Err(error) = block_in_place(|| left(&self.0.context, &self.0.guest)) {
            let guest = &self.0.guest;
            tracing::error!(guest, %error, "the old image of {WHAT} stays under its name");
        }
        Box::pin(async {})
    }
}

/// Notes of guests that are here again, and images of guests that left.
pub(super) struct Images;

impl Residue for Images {
    fn open(&self, state: &Path) -> io::Result<()> {
        NoteStore::<Leaves>::of(state).remove_unfinished()
    }

    fn sweep<'a>(&'a self, context: &'a Arc<Context>) -> Step<'a, Again> {
        if let Err(error) = block_in_place(|| sweep(context)) {
            tracing::error!(%error, "images of {WHAT} are left over");
        }
        Box::pin(async { None })
    }
}

fn sweep(context: &Context) -> io::Result<()> {
    let all = notes(context).all()?;
    for (guest, _) in &all.notes {
        let right = context.right(guest);
        match right.holder {
            _ if right.moving.is_some() => {}
            Holder::Here => notes(context).remove(guest)?,
            // Its QEMU has the image open until it ends.
            Holder::Elsewhere(_) if !context.retained_qemus.has(guest) => left(context, guest)?,
            Holder::Elsewhere(_) | Holder::InDoubt(_) | Holder::Unknown(_) => {}
        }
    }
    match all.unreadable.into_iter().next() {
        None => Ok(()),
        Some((_, error)) => Err(error),
    }
}
