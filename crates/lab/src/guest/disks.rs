//! Creates local disks, and opens them in a QEMU of the laboratory.

use crate::error::{During, LabError};
use crate::process;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

/// Format of an image file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Raw: the disk, byte for byte.
    Raw,
    /// QEMU's copy-on-write format.
    Qcow2,
}

impl Format {
    /// Returns its name, for QEMU and in files' names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

/// The caches between the guest and the file; named as in QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cache {
    /// No host cache; the guest flushes.
    None,
    /// The host's page cache; the guest flushes.
    Writeback,
    /// The host's page cache; every write is durable when it is acknowledged.
    Writethrough,
}

impl Cache {
    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Writeback => "writeback",
            Self::Writethrough => "writethrough",
        }
    }
}

/// The mode of a disk, written as `raw,none,iothread` or `qcow2,writeback`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskKind {
    /// The format of its file.
    pub format: Format,
    /// The caches.
    pub cache: Cache,
    /// Whether an I/O thread serves it.
    pub iothread: bool,
}

impl fmt::Display for DiskKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{}", self.format.name(), self.cache.name())?;
        f.write_str(if self.iothread { ",iothread" } else { "" })
    }
}

impl FromStr for DiskKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut kind = Self {
            format: Format::Raw,
            cache: Cache::Writeback,
            iothread: false,
        };
        for word in text.split(',') {
            match word {
                "raw" => kind.format = Format::Raw,
                "qcow2" => kind.format = Format::Qcow2,
                "none" => kind.cache = Cache::None,
                "writeback" => kind.cache = Cache::Writeback,
                "writethrough" => kind.cache = Cache::Writethrough,
                "iothread" => kind.iothread = true,
                _ => {
                    return Err(format!(
                        "`{word}` is none of raw, qcow2, none, writeback, writethrough, iothread"
                    ));
                }
            }
        }
        Ok(kind)
    }
}

/// A disk in a file of one host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalDisk {
    /// The image's name in the guest's description.
    pub image: String,
    /// The file.
    pub path: PathBuf,
    /// The size that the guest sees.
    pub bytes: u64,
    /// Its mode.
    pub kind: DiskKind,
}

impl LocalDisk {
    /// Creates the file: all zeros, and as sparse as the file system allows.
    ///
    /// # Errors
    /// When there is one already, or it cannot be written.
    pub fn create(&self) -> Result<(), LabError> {
        let file = File::create_new(&self.path)
            .during(|| format!("make the disk {}", self.path.display()))?;
        match self.kind.format {
            Format::Raw => file
                .set_len(self.bytes)
                .during(|| format!("make the disk {}", self.path.display())),
            Format::Qcow2 => {
                let mut command = Command::new("qemu-img");
                command.args(["create", "-q", "-f", "qcow2"]);
                command.arg(&self.path).arg(self.bytes.to_string());
                process::run(&mut command).map(drop)
            }
        }
    }

    /// Returns QEMU's arguments for a disk of that name in that PCI slot.
    pub(crate) fn arguments(&self, name: &str, slot: usize) -> Vec<String> {
        let direct = json!({"direct": self.kind.cache == Cache::None});
        let file = json!({
            "driver": "file", "node-name": format!("file-{name}"), "filename": self.path,
            "cache": direct, "discard": "unmap",
        });
        let format = json!({
            "driver": self.kind.format.name(), "node-name": format!("disk-{name}"),
            "file": format!("file-{name}"), "cache": direct, "discard": "unmap",
        });
        let write_cache = match self.kind.cache {
            Cache::Writethrough => "off",
            _ => "on",
        };
        let mut device = format!(
            "virtio-blk-pci,id=blk-{name},drive=disk-{name},addr={slot:#x},\
             write-cache={write_cache}"
        );
        let mut words = Vec::new();
        if self.kind.iothread {
            words.extend(["-object".to_owned(), format!("iothread,id=io-{name}")]);
            device.push_str(&format!(",iothread=io-{name}"));
        }
        for (option, value) in [
            ("-blockdev", file.to_string()),
            ("-blockdev", format.to_string()),
            ("-device", device),
        ] {
            words.extend([option.to_owned(), value]);
        }
        words
    }
}

/// Returns disks of one size, of these kinds, with their files in a folder; the files are not
/// created yet.
pub fn local_disks(folder: &Path, bytes: u64, kinds: &[DiskKind]) -> Vec<LocalDisk> {
    let disk = |(number, kind): (usize, &DiskKind)| {
        let image = format!("disk{number}");
        LocalDisk {
            path: folder.join(format!("{image}.{}", kind.format.name())),
            image,
            bytes,
            kind: *kind,
        }
    };
    kinds.iter().enumerate().map(disk).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_read_as_they_are_written() {
        for text in ["raw,none,iothread", "qcow2,writeback", "raw,writethrough"] {
            let kind: DiskKind = text.parse().unwrap();
            assert_eq!(kind.to_string(), text);
        }
        assert_eq!(
            "raw".parse::<DiskKind>().unwrap().to_string(),
            "raw,writeback"
        );
        let error = "raw,fast".parse::<DiskKind>().unwrap_err();
        assert!(error.starts_with("`fast` is none of"), "{error}");
    }

    #[test]
    fn a_disk_is_opened_as_its_kind_says() {
        let kinds = ["raw,none,iothread", "qcow2,writethrough"].map(|it| it.parse().unwrap());
        let disks = local_disks(Path::new("/data"), 1 << 20, &kinds);
        let first = disks[0].arguments("vda", 4).join(" ");
        for part in [
            "-object iothread,id=io-vda",
            "\"filename\":\"/data/disk0.raw\"",
            "\"direct\":true",
            "drive=disk-vda,addr=0x4,write-cache=on,iothread=io-vda",
        ] {
            assert!(first.contains(part), "{first}");
        }
        let second = disks[1].arguments("vdb", 5).join(" ");
        for part in [
            "\"driver\":\"qcow2\"",
            "\"direct\":false",
            "write-cache=off",
        ] {
            assert!(second.contains(part), "{second}");
        }
        assert!(!second.contains("iothread"));
    }
}
