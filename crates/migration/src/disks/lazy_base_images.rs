//! Base images that arrive while guests that use them run. An export for each image serves the
//! blocks that are here, fetches the rest, and outlives the agent. When an image is complete, each
//! QEMU switches to the file.
//!
//! STATE/coming has a note of each image and the disks on it, named by the first digits of its id
//! ([`crate::disks::export_notes`]).

use crate::context::Context;
use crate::disks::export_notes::{self, ExportNote, FrontError, Notes};
use crate::disks::exports::random_name;
use crate::host::base_images;
use crate::host::lock::lock;
use crate::host::notes::{self, NoteStore};
use crate::status::registry::Taken;
use longhaul_hypervisor::disk::base::{Base, settle};
use longhaul_hypervisor::helper::Helper;
use longhaul_hypervisor::process::Account;
use longhaul_hypervisor::qmp::COMMAND_TIMEOUT;
use longhaul_image::front::{Told, environment, say_order, told};
use longhaul_image::{ImageId, Order};
use longhaul_protocol::units::show_bytes;
use longhaul_storage::disk::ExportSize;
use longhaul_storage::front::{Fetched, FrontFolder, FrontSpec};
use longhaul_storage::nbd::ExportName;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Limit on the disks per export. The export allows a few more connections than this.
const DISKS_MAX: usize = 12;
/// Number of digits of an id in the name of its folder.
const FOLDER_DIGITS: usize = 16;

/// A base image that arrives.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Note {
    image: ImageId,
    export: String,
    /// The supervisor process.
    helper: Option<Helper>,
    disks: Vec<User>,
}

/// A disk that is an overlay of the base image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct User {
    guest: String,
    disk: String,
}

type Noted = export_notes::Noted<Note>;

impl notes::Note for Note {
    const FOLDER: &'static str = "coming";
}

impl ExportNote for Note {
    fn helper_name(&self) -> String {
        // Another agent on this machine may have the same base image.
        format!("base-{}", self.export)
    }

    fn helper(&mut self) -> &mut Option<Helper> {
        &mut self.helper
    }

    fn disk(&self) -> String {
        format!("on base image {}", self.image.short())
    }
}

/// Returns the folder of a base image's export.
pub(crate) fn folder_of(state: &Path, id: ImageId) -> PathBuf {
    let mut name = id.to_string();
    name.truncate(FOLDER_DIGITS);
    notes_in(state).folder().join(name)
}

/// Returns the notes in a state folder.
pub(crate) fn notes_in(state: &Path) -> NoteStore<Note> {
    NoteStore::of(state)
}

fn notes(state: &Path) -> io::Result<Notes<Note>> {
    export_notes::notes(state)
}

/// Returns whether the export of a base image can serve more disks.
pub(crate) fn has_room(state: &Path, id: ImageId, disks: usize) -> bool {
    let known = Noted::read(folder_of(state, id));
    known.map_or(0, |noted| noted.note.disks.len()) + disks <= DISKS_MAX
}

/// Returns the progress of the base images of a guest's disks, as text.
pub fn of_guest(state: &Path, guest: &str) -> Option<String> {
    let noted = notes(state).ok()?.noted;
    let of = |noted: &Noted| noted.note.disks.iter().any(|user| user.guest == guest);
    let texts: Vec<String> = noted.iter().filter(|noted| of(noted)).map(words).collect();
    (!texts.is_empty()).then(|| texts.join("; "))
}

fn words(noted: &Noted) -> String {
    let short = noted.note.image.short();
    let Some(told) = told(&noted.folder()) else {
        return format!("its base image {short} comes");
    };
    let Told {
        content_bytes,
        here_bytes,
        waiting,
        trouble,
        ..
    } = told;
    let (here, content) = (show_bytes(here_bytes), show_bytes(content_bytes));
    let waiting = match waiting {
        0 => String::new(),
        1 => ", 1 read waits".to_owned(),
        count => format!(", {count} reads wait"),
    };
    let trouble = trouble.map(|trouble| format!(" ({trouble})"));
    let trouble = trouble.unwrap_or_default();
    format!("its base image {short} comes: {here} of {content}{waiting}{trouble}")
}

impl Context {
    /// Starts to serve the base image of a guest's disk while it arrives. Returns the base for its
    /// QEMU.
    pub(crate) async fn show_coming(
        self: &Arc<Self>,
        (guest, disk): (&str, &str),
        id: ImageId,
        order: &Order,
    ) -> Result<Base, FrontError> {
        let failed = |error: &dyn std::fmt::Display| FrontError::new(disk, error);
        let notes = self.coming.notes.lock().await;
        let mut noted = self.noted(id).map_err(|error| failed(&error))?;
        let user = User {
            guest: guest.to_owned(),
            disk: disk.to_owned(),
        };
        if !noted.note.disks.contains(&user) {
            noted.note.disks.push(user);
        }
        noted.write().map_err(|error| failed(&error))?;
        let folder = noted.folder();
        if !folder.is_made() {
            // An agent may have died while it created the folder.
            folder.remove().map_err(|error| failed(&error))?;
            let spec = self.spec(&noted).map_err(|error| failed(&error))?;
            FrontFolder::create(noted.path(), &spec).map_err(|error| failed(&error))?;
        }
        let said = say_order(&folder, &order.hottest());
        said.map_err(|error| failed(&error))?;
        noted.keep_answering().await?;
        let read = told(&folder).unwrap_or_default().read_bytes;
        lock(&self.coming.counted).entry(id).or_insert(read);
        drop(notes);
        tracing::info!(guest, disk, image = %id, "its base image comes while it runs");
        self.sweeper.wake();
        Ok(Base::Coming {
            socket: folder.socket(),
            export: noted.note.export,
        })
    }

    /// Returns the note of a base image, which may be new.
    fn noted(&self, id: ImageId) -> io::Result<Noted> {
        let state = &self.parts.config.state;
        export_notes::create_above::<Note>(state)?;
        let folder = folder_of(state, id);
        if Noted::is_noted(&folder) {
            let noted = Noted::read(folder)?;
            return match noted.note.image == id {
                true => Ok(noted),
                false => Err(io::Error::other(
                    "another base image has the same beginning",
                )),
            };
        }
        let note = Note {
            image: id,
            export: random_name()?,
            helper: None,
            disks: Vec::new(),
        };
        Ok(Noted::new(folder, note))
    }

    fn spec(&self, noted: &Noted) -> io::Result<FrontSpec> {
        let config = &self.parts.config;
        let account = config.hypervisor.qemu.run_as.as_deref().map(Account::of);
        let account = account.transpose().map_err(io::Error::other)?;
        let ours = nix::unistd::geteuid();
        let name = ExportName::new(noted.note.export.clone());
        Ok(FrontSpec {
            image: base_images::of_host(&config.state).path(noted.note.image),
            size: ExportSize::OfFile,
            // QEMU takes no lock on it, and the export itself writes to the file.
            locks: None,
            name: name.ok_or_else(|| io::Error::other("no name for it"))?,
            qemu_uid: account
                .map(|account| account.uid)
                .filter(|uid| *uid != ours)
                .map(nix::unistd::Uid::as_raw),
            arriving: false,
            tracked: false,
            fetched: Some(Fetched {
                repository: config.repository.to_string(),
                environment: environment(),
            }),
            socket: None,
        })
    }

    /// Switches QEMUs to the files of complete base images, and ends exports that no disk uses.
    /// Returns whether none remains.
    pub(crate) async fn sweep_coming(self: &Arc<Self>, logged: &mut BTreeSet<PathBuf>) -> bool {
        let state = &self.parts.config.state;
        let found = match notes(state) {
            Ok(found) => found,
            Err(error) => {
                tracing::error!(%error, "cannot look for base images that come");
                return false;
            }
        };
        found.log_unreadable(logged);
        for noted in found.noted {
            let id = noted.note.image;
            self.say_trouble(&noted);
            if let Err(error) = self.sweep_base(noted).await {
                tracing::error!(image = %id, %error, "a base image is still read as it comes");
            }
        }
        notes(state).is_ok_and(|left| left.is_empty())
    }

    /// Logs why a base image does not arrive, once per reason.
    fn say_trouble(&self, noted: &Noted) {
        let Some(told) = told(&noted.folder()) else {
            return;
        };
        let mut troubles = lock(&self.coming.troubles);
        let before = troubles.insert(noted.note.image, told.trouble.clone());
        if before.flatten() == told.trouble {
            return;
        }
        match told.trouble {
            Some(why) => {
                tracing::warn!(image = %noted.note.image, why, "a base image does not come")
            }
            None => tracing::info!(image = %noted.note.image, "the base image comes again"),
        }
    }

    /// Returns whether a disk still needs the export of its base image. If the image is complete,
    /// switches the disk's QEMU to the file.
    async fn needs(&self, noted: &Noted, user: &User, whole: bool) -> Result<bool, FrontError> {
        let failed = |error: &dyn std::fmt::Display| noted.error(error);
        // The holder of the guest decides, or will release it.
        if self.registry.taken(&user.guest).is_some() {
            return Ok(true);
        }
        let runs = || {
            let found = self.parts.guests.find(&user.guest);
            found.map_err(|error| failed(&error))
        };
        if runs()?.is_some() && !whole {
            return Ok(true);
        }
        let Ok(_reservation) = self.registry.take(&user.guest, Taken::Maintained) else {
            return Ok(true);
        };
        let Some(guest) = runs()? else {
            return Ok(false);
        };
        if !whole {
            return Ok(true);
        }
        let lease = self.parts.guests.lease(&guest, COMMAND_TIMEOUT).await;
        let lease = lease.map_err(|error| failed(&error))?;
        let file = base_images::of_host(&self.parts.config.state).path(noted.note.image);
        let settled = settle(lease.qmp(), &user.disk, &file).await;
        settled.map_err(|error| failed(&error))?;
        tracing::info!(guest = user.guest, disk = user.disk, image = %noted.note.image,
            "its base image is here, and read directly");
        Ok(false)
    }

    async fn sweep_base(self: &Arc<Self>, mut noted: Noted) -> Result<(), FrontError> {
        let bases = base_images::of_host(&self.parts.config.state);
        let whole = bases
            .whole(noted.note.image)
            .map_err(|error| noted.error(&error))?;
        let mut done = Vec::new();
        for user in &noted.note.disks {
            match self.needs(&noted, user, whole.is_some()).await {
                Ok(true) => {}
                Ok(false) => done.push(user.clone()),
                Err(error) => {
                    tracing::error!(guest = user.guest, %error, "its base image is still read as \
                        it comes");
                }
            }
        }
        let _notes = self.coming.notes.lock().await;
        // Another disk may have been added meanwhile.
        let read = noted.read_again();
        read.map_err(|error| noted.error(&error))?;
        let before = noted.note.disks.len();
        noted.note.disks.retain(|user| !done.contains(user));
        if noted.note.disks.is_empty() {
            noted.stop().await?;
            noted.remove()?;
            lock(&self.coming.counted).remove(&noted.note.image);
            lock(&self.coming.troubles).remove(&noted.note.image);
            return Ok(());
        }
        if noted.note.disks.len() != before {
            noted.write().map_err(|error| noted.error(&error))?;
        }
        noted.keep_answering().await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::lazy_exports::ComingExports;
    use longhaul_image::Digest;
    use std::fs;

    fn user(n: usize) -> User {
        User {
            guest: format!("web-{n}"),
            disk: "vda".to_owned(),
        }
    }

    fn note(state: &Path, id: ImageId, disks: usize) -> Noted {
        let note = Note {
            image: id,
            export: "x".repeat(32),
            helper: None,
            disks: (0..disks).map(user).collect(),
        };
        let noted = Noted::new(folder_of(state, id), note);
        noted.write().unwrap();
        noted
    }

    #[test]
    fn a_note_says_whose_disks_stand_on_what_and_how_many_more_may() {
        let state = tempfile::tempdir().unwrap();
        let state = state.path();
        let id = ImageId(Digest([7; 32]));
        assert!(notes(state).unwrap().is_empty());
        assert!(has_room(state, id, DISKS_MAX) && !has_room(state, id, DISKS_MAX + 1));
        let noted = note(state, id, DISKS_MAX - 1);
        assert!(has_room(state, id, 1) && !has_room(state, id, 2));
        let read = notes(state).unwrap().noted;
        assert_eq!(read[0].note.image, id);
        assert_eq!(read[0].note.disks, noted.note.disks);
        for wrong in ["{", "{\"image\":\"7\"}", &"x".repeat(100 << 10)] {
            fs::write(noted.path().with_extension("note"), wrong).unwrap();
            let found = notes(state).unwrap();
            assert_eq!(
                (found.noted.len(), found.unreadable.len()),
                (0, 1),
                "{wrong:.20}"
            );
        }
    }

    #[test]
    fn it_is_said_how_far_a_guests_base_image_is_and_each_byte_counts_once() {
        let state = tempfile::tempdir().unwrap();
        let state = state.path();
        let id = ImageId(Digest([7; 32]));
        let noted = note(state, id, 2);
        let said = |guest: &str| of_guest(state, guest);
        assert_eq!(said("web-2"), None);
        assert_eq!(said("web-1").unwrap(), "its base image 070707070707 comes");
        fs::create_dir_all(noted.path().join("own")).unwrap();
        let tell = |waiting, trouble: Option<&str>, read_bytes| {
            let told = Told {
                content_bytes: 4 << 20,
                here_bytes: 1 << 20,
                read_bytes,
                waiting,
                trouble: trouble.map(str::to_owned),
            };
            let text = serde_json::to_vec(&told).unwrap();
            fs::write(noted.folder().told(), text).unwrap();
        };
        let begins = "its base image 070707070707 comes: 1 MiB of 4 MiB";
        tell(0, None, 100);
        assert_eq!(said("web-0").unwrap(), begins);
        let fronts = ComingExports::default();
        let folder = FrontFolder::open(&folder_of(state, id));
        assert_eq!(fronts.count(&folder, id), 100);
        tell(1, None, 130);
        assert_eq!(said("web-0").unwrap(), format!("{begins}, 1 read waits"));
        assert_eq!(
            (fronts.count(&folder, id), fronts.count(&folder, id)),
            (30, 0)
        );
        tell(2, Some("it is away"), 130);
        let away = format!("{begins}, 2 reads wait (it is away)");
        assert_eq!(said("web-1").unwrap(), away);
    }
}
