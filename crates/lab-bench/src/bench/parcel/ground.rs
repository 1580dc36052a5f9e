//! The environment of the bench's guests.

use crate::bench::Options;
use crate::bench::document::Document;
use longhaul_lab::error::{During, LabError};
use longhaul_lab::guest::disks::{Cache, DiskKind, Format, LocalDisk};
use longhaul_lab::guest::{Chipset, KernelFiles, Tiny};
use longhaul_lab::installed;
use longhaul_lab::lab::{Lab, Plan};
use longhaul_lab::link::spec::LinkSpec;
use longhaul_lab::peer::{Begin, PeerHost, PeerQemu};
use longhaul_lab::product::{Product, Settings};
use longhaul_protocol::guest::GuestDescription;
use serde_json::Value;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// The cache mode of the disks: that of images of guests that move.
pub(super) const KIND: DiskKind = DiskKind {
    format: Format::Raw,
    cache: Cache::None,
    iothread: false,
};
/// Images that the agents know: a guest that was moved away is not started again.
const IMAGES: usize = 120;
const GUEST_MEMORY_MIB: u64 = 128;
const PIECE_BYTES: usize = 1 << 20;

/// Two hosts with Longhaul.
pub(super) struct Ground {
    // The agents end before the laboratory does.
    pub(super) product: Product,
    pub(super) lab: Lab,
    pub(super) files: KernelFiles,
    pub(super) qemu: PathBuf,
    pub(super) link: LinkSpec,
    chipset: Chipset,
    machine_version: String,
    /// `kvm` or `tcg`.
    accelerator: &'static str,
    /// The number of images that were used.
    images: usize,
}

fn image(number: usize) -> String {
    format!("parcel-{number}")
}

fn file(number: usize) -> String {
    format!("{}.raw", image(number))
}

impl Ground {
    /// Makes the laboratory, and starts the agents.
    pub(super) fn make(
        options: &Options,
        link: LinkSpec,
        document: &mut Document,
    ) -> Result<Self, LabError> {
        let mut lab = Lab::create(&Plan {
            purpose: "bench parcel".to_owned(),
            hosts: 2,
            link,
            seed: options.seed,
        })?;
        let qemu = installed::qemu(&options.qemu)?;
        let version = installed::qemu_version(&qemu)?;
        let major_minor: Vec<&str> = version.split('.').take(2).collect();
        let files = KernelFiles::make_with_history(lab.host(0)?.folder())?;
        let settings = Settings {
            qemus: vec![options.qemu.clone()],
            accelerator: "auto".to_owned(),
        };
        let folders = [0, 1].map(|host| lab.host(host).map(|it| it.folder().to_owned()));
        let [first, second] = folders;
        let folders = [first?, second?];
        let images = |host: usize| images_in(&folders[host.min(1)]);
        let product = Product::start_each_with(&mut lab, &files, &settings, images)?;
        let accelerator = match product.has_kvm(0)? {
            true => "kvm",
            false => "tcg",
        };
        document.machine_mut().accel = Some(accelerator.to_owned());
        document.machine_mut().qemu = Some(version.clone());
        Ok(Self {
            chipset: Chipset::named(&options.machine).unwrap_or(Chipset::Q35),
            machine_version: major_minor.join("."),
            accelerator,
            product,
            lab,
            files,
            qemu,
            link,
            images: 0,
        })
    }

    /// Returns the folder of a host.
    pub(super) fn folder(&self, host: usize) -> Result<PathBuf, LabError> {
        Ok(self.lab.host(host)?.folder().to_owned())
    }

    /// Returns the next disk of the first host; its file is not there yet.
    pub(super) fn disk(&mut self, bytes: u64) -> Result<LocalDisk, LabError> {
        let number = self.images;
        if number >= IMAGES {
            return Err(LabError::Which(format!(
                "this bench has {IMAGES} images: ask for fewer repeats"
            )));
        }
        self.images += 1;
        Ok(LocalDisk {
            image: image(number),
            path: self.folder(0)?.join(file(number)),
            bytes,
            kind: KIND,
        })
    }

    /// Returns the next name of a guest, and its parts apart from disks.
    pub(super) fn tiny(&self) -> Tiny {
        let mut tiny = Tiny::new(&format!("parcel-guest-{}", self.images));
        tiny.memory_mib = GUEST_MEMORY_MIB;
        tiny.chipset = self.chipset;
        tiny.machine_version.clone_from(&self.machine_version);
        tiny
    }

    /// Starts a guest on the first host in a QEMU without an agent.
    pub(super) fn start_peer(
        &self,
        guest: &GuestDescription,
        disks: &[LocalDisk],
    ) -> Result<PeerQemu, LabError> {
        let host = PeerHost {
            host: self.lab.host(0)?,
            qemu: &self.qemu,
            accelerator: self.accelerator,
            files: &self.files,
            disks: &[],
            local: disks,
        };
        PeerQemu::start(&host, guest, Begin::Boot)
    }

    /// Runs `longhaul parcel` on a host, and returns its document.
    pub(super) fn parcel(&self, host: usize, words: &[&str]) -> Result<Value, LabError> {
        let config = self.folder(host)?.join("agent.toml").display().to_string();
        let command = ["parcel", "--config", &config];
        self.product.ask(host, &[&command, words].concat())
    }
}

/// Returns a host's configuration for the images of guests.
fn images_in(folder: &Path) -> toml::Table {
    let mut images = toml::Table::new();
    for number in 0..IMAGES {
        let path = folder.join(file(number));
        let table = toml::Table::from_iter([
            ("path".to_owned(), path.display().to_string().into()),
            ("format".to_owned(), "raw".into()),
            ("direct".to_owned(), true.into()),
        ]);
        images.insert(image(number), table.into());
    }
    toml::Table::from_iter([("images".to_owned(), images.into())])
}

/// Writes a file of zeros without holes, durably: to write it takes no longer the first time than
/// later.
pub(super) fn write_zeros(path: &Path, bytes: u64) -> Result<(), LabError> {
    let piece = vec![0; PIECE_BYTES];
    let write = || {
        let mut file = File::create_new(path)?;
        let mut left = bytes;
        while left > 0 {
            let next = left.min(PIECE_BYTES as u64);
            file.write_all(&piece[..next as usize])?;
            left -= next;
        }
        file.sync_all()
    };
    write().during(|| format!("write {}", path.display()))
}

/// Removes a file that may not be there.
pub(super) fn remove_file(path: &Path) -> Result<(), LabError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).during(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Removes a folder with its content.
pub(super) fn remove_folder(path: &Path) -> Result<(), LabError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).during(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}
