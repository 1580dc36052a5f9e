//! What goes into a parcel, and onto which devices.

use super::Job;
use super::copier::{self, Copier, parent_of};
use super::document::{self, Copied, JobDisk, JobGuest, KnownGuest, ParcelDocument};
use super::error::{JobError, io_at};
use crate::cell::CELL_BYTES;
use crate::device::Device;
use crate::header::check_name;
use crate::key::DataKey;
use crate::layout::Layout;
use crate::media::{LocalMedia, Media};
use crate::reader::header_at;
use crate::record::{Disk, Guest, Record};
use crate::room::used_bytes;
use crate::writer::{Settings, WriteError, Writer};
use longhaul_storage::disk::{Disk as _, RawDisk};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The most characters of a site's name.
const SITE_CHARS_MAX: usize = 100;

impl Job {
    /// Makes a parcel and draws its key. `folder` is the job's, and does not exist.
    ///
    /// # Errors
    /// When there is such a job, or it cannot be called so.
    pub fn make(folder: &Path, settings: &Settings) -> Result<Self, JobError> {
        check_name(&settings.name).map_err(WriteError::from)?;
        let site = &settings.to;
        let is_short = (1..=SITE_CHARS_MAX).contains(&site.chars().count());
        if !is_short || site.chars().any(char::is_control) {
            return Err(JobError::Site(site.chars().take(SITE_CHARS_MAX).collect()));
        }
        let parent = parent_of(folder);
        fs::create_dir_all(parent).map_err(io_at(parent))?;
        match fs::create_dir(folder) {
            // One that was interrupted before its document was there is made again.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => created.map_err(io_at(folder))?,
        }
        let lock = copier::lock(folder, &settings.name)?;
        match document::read::<ParcelDocument>(folder) {
            Err(JobError::Unknown(_)) => {}
            Ok(_) => return Err(JobError::Exists(settings.name.clone())),
            Err(error) => return Err(error),
        }
        let key = DataKey::draw()?;
        let job = Self {
            copier: Copier::new(
                folder,
                Copied {
                    version: 1,
                    ..Copied::default()
                },
                ParcelDocument {
                    name: settings.name.clone(),
                    to: settings.to.clone(),
                    key: key.text().to_string(),
                    devices: Vec::new(),
                    position: None,
                    sealed: false,
                    parity: settings.parity,
                    created: settings.now,
                    begun: None,
                    limit: None,
                    parcel: None,
                    seals: Vec::new(),
                    shipped: None,
                    confirmed: None,
                },
            ),
            key,
            media: Arc::new(LocalMedia),
        };
        job.copier.save()?;
        drop(lock);
        Ok(job)
    }

    /// Makes a parcel, adds its guests, and begins its devices. If that fails, nothing is left.
    ///
    /// # Errors
    /// As [`make`](Self::make), [`add`](Self::add) and [`begin`](Self::begin).
    pub fn create(
        folder: &Path,
        settings: &Settings,
        (devices, limit): (&[PathBuf], Option<u64>),
        guests: Vec<JobGuest>,
    ) -> Result<Self, JobError> {
        let media = Arc::new(LocalMedia);
        Self::create_on(media, folder, settings, (devices, limit), guests)
    }

    /// As [`create`](Self::create), with devices on any media.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn create_on(
        media: Arc<dyn Media>,
        folder: &Path,
        settings: &Settings,
        (devices, limit): (&[PathBuf], Option<u64>),
        guests: Vec<JobGuest>,
    ) -> Result<Self, JobError> {
        let mut job = Self::make(folder, settings)?.with_media(media);
        let begun = job.add(guests);
        let begun = begun.and_then(|()| job.begin(devices, limit, settings.now));
        if begun.is_err() {
            // Nothing was written that is worth a key.
            fs::remove_dir_all(folder).map_err(io_at(folder))?;
        }
        begun.map(|()| job)
    }

    /// Adds guests, and disks of guests that it has. A disk that it has is not added again.
    ///
    /// # Errors
    /// When a disk cannot be opened, a name is taken, or the parcel does not take more now.
    pub fn add(&mut self, guests: Vec<JobGuest>) -> Result<(), JobError> {
        let _lock = self.lock()?;
        self.is_here()?;
        let mut names = BTreeSet::new();
        for guest in &guests {
            let disks = guest.disks.iter().map(|disk| ("disk", disk.name.as_str()));
            for name in disks.chain([("guest", guest.name.as_str())]) {
                if !names.insert(name) {
                    return Err(JobError::Twice(name.0, name.1.to_owned()));
                }
            }
        }
        for guest in guests {
            self.add_guest(guest)?;
        }
        self.copier.save()
    }

    /// Puts guests of the parcel into a group, whose guests have the same moment.
    ///
    /// # Errors
    /// When one of them is not in the parcel, or the group cannot be called so.
    pub fn group(&mut self, group: &str, guests: &[String]) -> Result<(), JobError> {
        check_name(group).map_err(WriteError::from)?;
        let _lock = self.lock()?;
        self.is_here()?;
        for name in guests {
            let mut known = self.copier.state.guests.iter_mut();
            let Some(guest) = known.find(|guest| guest.name == *name) else {
                return Err(JobError::NoGuest {
                    parcel: self.copier.document.name.clone(),
                    guest: name.clone(),
                });
            };
            guest.group = Some(group.to_owned());
        }
        self.copier.save()
    }

    /// Says what a destination needs to start a guest of the parcel. The next version has it.
    ///
    /// # Errors
    /// When it is longer than the format allows, or cannot be saved.
    pub fn describe(&mut self, guest: &str, description: Value) -> Result<(), JobError> {
        let _lock = self.lock()?;
        let mut known = self.copier.state.guests.iter_mut().enumerate();
        let Some((number, known)) = known.find(|(_, known)| known.name == guest) else {
            return Ok(());
        };
        if known.description == description {
            return Ok(());
        }
        let described = KnownGuest {
            description,
            ..known.clone()
        };
        // What the format refuses is refused now.
        record_of(number, &described).encode()?;
        *known = described;
        self.copier.save()
    }

    fn add_guest(&mut self, guest: JobGuest) -> Result<(), JobError> {
        let mut known = self.copier.state.guests.iter();
        let known = known.position(|known| known.name == guest.name);
        let others = self.copier.state.guests.iter().enumerate();
        let others = others.filter(|(number, _)| Some(*number) != known);
        let theirs: BTreeSet<&str> = others
            .flat_map(|(_, other)| other.disks.iter().map(|it| it.disk.name.as_str()))
            .collect();
        if let Some(taken) = guest.disks.iter().find(|it| theirs.contains(&*it.name)) {
            return Err(JobError::Twice("disk", taken.name.clone()));
        }
        let has = |disk: &JobDisk| {
            let known = known.and_then(|number| self.copier.state.guests.get(number));
            known.is_some_and(|known| known.disks.iter().any(|it| it.disk.name == disk.name))
        };
        let name = guest.name.clone();
        let new = KnownGuest::look(JobGuest {
            disks: guest.disks.into_iter().filter(|it| !has(it)).collect(),
            name: guest.name,
        })?;
        let number = known.unwrap_or(self.copier.state.guests.len());
        let is_past = number < self.copier.state.next.guest && !self.copier.document.sealed;
        if is_past && !new.disks.is_empty() {
            return Err(JobError::Past {
                parcel: self.copier.document.name.clone(),
                guest: name,
            });
        }
        match self.copier.state.guests.get_mut(number) {
            Some(known) => known.disks.extend(new.disks),
            None => self.copier.state.guests.push(new),
        }
        // What the format refuses is refused now.
        let whole = self.copier.state.guests.get(number);
        whole.map_or(Ok(()), |whole| {
            record_of(number, whole).encode()?;
            Ok(())
        })
    }

    /// Begins to write on devices. Those of a parcel that was begun are looked for at these paths.
    ///
    /// # Errors
    /// When they cannot be used, or are not those of the parcel.
    pub fn begin(
        &mut self,
        devices: &[PathBuf],
        limit: Option<u64>,
        now: u64,
    ) -> Result<(), JobError> {
        let _lock = self.lock()?;
        if self.copier.document.position.is_some() {
            return self.find(devices);
        }
        if self.copier.state.guests.is_empty() {
            return Err(JobError::NoGuests(self.copier.document.name.clone()));
        }
        // What an interrupted beginning has left.
        let before = std::mem::take(&mut self.copier.document.devices);
        self.clear(&before)?;
        let limit = limit.or(self.copier.document.limit);
        let devices = match devices {
            [] => &before[..],
            named => named,
        };
        if devices.is_empty() {
            return Err(JobError::NoDevices(self.copier.document.name.clone()));
        }
        let mut places = BTreeSet::new();
        for at in devices {
            if !places.insert(self.media.place(at).map_err(io_at(at))?) {
                let at = at.display().to_string();
                return Err(JobError::Twice("device", at));
            }
        }
        let cells = vec![1; devices.len()];
        Layout::new(&cells, self.copier.document.parity).map_err(WriteError::from)?;
        // A file may have grown since its guest was added.
        for known in self
            .copier
            .state
            .guests
            .iter_mut()
            .flat_map(|it| &mut it.disks)
        {
            known.bytes = RawDisk::open_to_read(&known.disk.path)?.size_bytes();
        }
        self.copier.document.devices = devices.to_vec();
        self.copier.document.limit = limit;
        self.copier.save()?;
        let begun = self.write_first(devices, limit);
        if begun.is_err() {
            self.copier.document.devices.clear();
            self.copier.save()?;
        }
        let writer = begun?;
        self.copier.document.position = Some(writer.position());
        self.copier.document.devices = writer.paths();
        self.copier.document.begun = Some(now);
        self.copier.save()
    }

    /// Returns what the file of a device is called.
    fn device_name(&self, number: usize) -> String {
        format!("{}-{number}", self.copier.document.name)
    }

    fn write_first(&self, at: &[PathBuf], limit: Option<u64>) -> Result<Writer, JobError> {
        let mut devices: Vec<Device> = Vec::new();
        for (number, at) in at.iter().enumerate() {
            match Device::create_on(&*self.media, at, &self.device_name(number), limit) {
                Ok(device) => devices.push(device),
                Err(error) => {
                    devices.iter().for_each(Device::remove);
                    return Err(error.into());
                }
            }
        }
        let settings = Settings {
            name: self.copier.document.name.clone(),
            to: self.copier.document.to.clone(),
            parity: self.copier.document.parity,
            now: self.copier.document.created,
        };
        let writer = Writer::create(devices, &settings, &self.key);
        if writer.is_err() {
            self.clear(at)?;
        }
        Ok(writer?)
    }

    /// Removes the files that a beginning has left in folders: each has at most its first cell, and
    /// no other parcel's. A block device stays as it is, and is refused if it is not empty.
    fn clear(&self, devices: &[PathBuf]) -> Result<(), JobError> {
        for (number, at) in devices.iter().enumerate() {
            let path = at.join(format!("{}.parcel", self.device_name(number)));
            // Where no such file is, there is nothing to remove.
            let Ok(found) = self.media.find(&path, true) else {
                continue;
            };
            if found.is_block || found.path != path {
                continue;
            }
            let device = Device::of(found);
            let is_ours = match device.length().map_err(io_at(&path))? {
                0 => true,
                length if length <= CELL_BYTES as u64 => {
                    let header = header_at(&device, 0);
                    let fingerprint = self.key.fingerprint()?;
                    // A torn cell has no header.
                    header.is_ok_and(|it| it.is_none_or(|(it, _)| it.key == fingerprint))
                }
                _ => false,
            };
            if is_ours {
                device.remove_file().map_err(io_at(&path))?;
            }
        }
        Ok(())
    }

    /// Notes where the devices of a parcel that was begun are now.
    fn find(&mut self, paths: &[PathBuf]) -> Result<(), JobError> {
        for path in paths {
            let other = || JobError::OtherDevice {
                parcel: self.copier.document.name.clone(),
                path: path.clone(),
            };
            let device = Device::open_on(&*self.media, path, false)?;
            let (header, proof) = header_at(&device, 0)?.ok_or_else(other)?;
            let is_ours = header.key == self.key.fingerprint()?
                && proof.is_by(&self.key.of_headers(&header.parcel)?);
            let place = self
                .copier
                .document
                .devices
                .get_mut(usize::from(header.device));
            match place.filter(|_| is_ours) {
                Some(place) => *place = device.path().to_path_buf(),
                None => {
                    return Err(JobError::OtherDevice {
                        parcel: self.copier.document.name.clone(),
                        path: path.clone(),
                    });
                }
            }
        }
        match paths {
            [] => Ok(()),
            _ => self.copier.save(),
        }
    }
}

/// Returns the record of a guest.
pub(super) fn record_of(number: usize, guest: &KnownGuest) -> Record {
    let known = guest.disks.iter().zip(0..);
    Record::Guest(Guest {
        guest: number as u32,
        name: guest.name.clone(),
        disks: known
            .map(|(known, number)| Disk {
                disk: number,
                name: known.disk.name.clone(),
                bytes: known.bytes,
                used: used_bytes(&known.disk.path),
            })
            .collect(),
        description: guest.description.clone(),
    })
}
