//! `/etc/pve/storage.cfg`: the storages of a cluster, and the paths of volumes on this host.
//!
//! ```text
//! dir: local
//!         path /var/lib/vz
//!         content images,iso
//!
//! lvmthin: local-lvm
//!         vgname pve
//!         thinpool data
//! ```

use longhaul_hypervisor::config::ImageFormat;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Kinds of storages whose volumes are files in `images/VMID`.
const FOLDERS: [&str; 3] = ["cifs", "dir", "nfs"];

/// Kinds of storages whose volumes are block devices of the host.
const DEVICES: [&str; 3] = ["lvm", "lvmthin", "zfspool"];

/// The storages of `storage.cfg`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Storages(BTreeMap<String, Storage>);

/// One storage.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Storage {
    /// Its name.
    pub id: String,
    /// Its kind, such as `dir`.
    pub kind: String,
    options: BTreeMap<String, String>,
}

/// Returns whether a text can be the name of a storage.
pub fn is_storage_id(text: &str) -> bool {
    let last = text.chars().next_back();
    text.len() >= 2
        && text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        && last.is_some_and(|c| c.is_ascii_alphanumeric())
}

impl Storages {
    /// Reads `storage.cfg`. Lines that are not understood are passed over.
    pub fn read(text: &str) -> Self {
        let mut storages = BTreeMap::new();
        let mut current: Option<Storage> = None;
        let mut lines = text.lines();
        loop {
            let line = lines.next();
            let begins = line.is_none_or(|line| !line.starts_with([' ', '\t']));
            if begins && let Some(storage) = current.take() {
                storages.insert(storage.id.clone(), storage);
            }
            let Some(line) = line else { break };
            match (&mut current, line.split_once(':')) {
                (Some(storage), _) => {
                    let line = line.trim();
                    let (key, value) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
                    storage
                        .options
                        .insert(key.to_owned(), value.trim().to_owned());
                }
                (None, Some((kind, id))) if begins && is_storage_id(id.trim()) => {
                    current = Some(Storage {
                        id: id.trim().to_owned(),
                        kind: kind.trim().to_owned(),
                        options: BTreeMap::new(),
                    });
                }
                (None, _) => {}
            }
        }
        Self(storages)
    }

    /// Returns a storage.
    pub fn get(&self, id: &str) -> Option<&Storage> {
        self.0.get(id)
    }

    /// Returns all storages.
    pub fn all(&self) -> impl Iterator<Item = &Storage> {
        self.0.values()
    }
}

impl Storage {
    fn option(&self, key: &str) -> Option<&str> {
        self.options.get(key).map(String::as_str)
    }

    /// Returns the folder of its volumes, if they are files.
    pub fn folder(&self) -> Option<PathBuf> {
        if !FOLDERS.contains(&self.kind.as_str()) || self.option("content-dirs").is_some() {
            return None;
        }
        let mounted = || format!("/mnt/pve/{}", self.id);
        let path = match (self.option("path"), self.kind.as_str()) {
            (Some(path), _) => path.to_owned(),
            (None, "dir") => return None,
            (None, _) => mounted(),
        };
        path.starts_with('/')
            .then(|| Path::new(&path).join("images"))
    }

    /// Returns the path of a volume on this host; `None` where it is no file and no block device
    /// of the host, or where its name is not understood.
    pub fn path(&self, volume: &str) -> Option<PathBuf> {
        if let Some(folder) = self.folder() {
            let (id, file) = volume.split_once('/')?;
            let is_id = !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit());
            return (is_id && is_file(file)).then(|| folder.join(id).join(file));
        }
        if !is_file(volume) {
            return None;
        }
        match self.kind.as_str() {
            "lvm" | "lvmthin" => Some(Path::new("/dev").join(self.group()?).join(volume)),
            "zfspool" => {
                let pool = self.option("pool")?;
                let sound = pool.split('/').all(is_file);
                sound.then(|| Path::new("/dev/zvol").join(pool).join(volume))
            }
            _ => None,
        }
    }

    /// Returns why arriving volumes cannot be put there; `node` is this host's name in its
    /// cluster.
    pub fn refuses(&self, node: &str) -> Option<String> {
        let id = &self.id;
        if self.option("disable").is_some() {
            return Some(format!("storage {id} is disabled"));
        }
        let nodes = self.option("nodes");
        if nodes.is_some_and(|nodes| !has(nodes, node)) {
            return Some(format!("storage {id} is not one of node {node}"));
        }
        if !has(self.option("content").unwrap_or("images"), "images") {
            return Some(format!("storage {id} is not for disk images"));
        }
        let fits = self.folder().is_some() || self.allocates();
        (!fits).then(|| {
            let kind = &self.kind;
            format!(
                "storage {id} is of the kind {kind}, and volumes arrive on dir, nfs, cifs, lvm, \
                 lvmthin and zfspool"
            )
        })
    }

    /// Returns its volume group of LVM, if it has one.
    pub fn group(&self) -> Option<&str> {
        let has_group = ["lvm", "lvmthin"].contains(&self.kind.as_str());
        let group = self.option("vgname").filter(|group| is_file(group));
        group.filter(|_| has_group)
    }

    /// Returns what the sizes of its volumes are multiples of, in bytes, if they are not files:
    /// extents of LVM, where its volume group does not say otherwise, or what Proxmox VE rounds
    /// volumes of ZFS to.
    pub fn unit(&self) -> Option<u64> {
        match self.kind.as_str() {
            "lvm" | "lvmthin" => Some(4 << 20),
            "zfspool" => Some(1 << 20),
            _ => None,
        }
    }

    /// Returns whether its volumes are block devices that have to be allocated.
    pub fn allocates(&self) -> bool {
        DEVICES.contains(&self.kind.as_str())
    }
}

/// Returns whether a list has a word.
fn has(list: &str, word: &str) -> bool {
    list.split([',', ';', ' ']).any(|it| it == word)
}

/// Returns whether a text is the name of a file, and no path.
fn is_file(text: &str) -> bool {
    !text.is_empty()
        && !text.starts_with(['.', '-'])
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_.+".contains(c))
}

/// Returns the format of a volume, by its name.
pub fn format_of(volume: &str) -> Option<ImageFormat> {
    let file = volume.rsplit('/').next().unwrap_or(volume);
    match file.rsplit_once('.') {
        None => Some(ImageFormat::Raw),
        Some((_, "raw")) => Some(ImageFormat::Raw),
        Some((_, "qcow2")) => Some(ImageFormat::Qcow2),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
dir: local
\tpath /var/lib/vz
\tcontent iso,vztmpl,backup

lvmthin: local-lvm
\tthinpool data
\tvgname pve
\tcontent rootdir,images

nfs: shared
\tserver 10.0.0.1
\texport /srv
\tnodes one,two

zfspool: tank
\tpool rpool/data
dir: other
\tpath /srv/vz
\tdisable
dir: fine
\tpath /srv/fine
rbd: ceph
\tpool p
";

    #[test]
    fn volumes_have_paths() {
        let storages = Storages::read(TEXT);
        let path = |id: &str, volume: &str| {
            let path = storages.get(id)?.path(volume)?;
            Some(path.display().to_string())
        };
        let known = [
            (
                "local",
                "7/vm-7-disk-0.raw",
                "/var/lib/vz/images/7/vm-7-disk-0.raw",
            ),
            ("local-lvm", "vm-7-disk-0", "/dev/pve/vm-7-disk-0"),
            ("shared", "7/a.qcow2", "/mnt/pve/shared/images/7/a.qcow2"),
            ("tank", "vm-7-disk-0", "/dev/zvol/rpool/data/vm-7-disk-0"),
        ];
        for (id, volume, expected) in known {
            assert_eq!(path(id, volume).as_deref(), Some(expected));
        }
        for (id, volume) in [
            ("local", "7/../../etc/shadow"),
            ("local", "x/vm-7-disk-0.raw"),
            ("local", "7/base-7-disk-0.raw/8/vm-8-disk-0.qcow2"),
            ("local", "vm-7-disk-0.raw"),
            ("local-lvm", "../sda"),
            ("ceph", "vm-7-disk-0"),
            ("absent", "vm-7-disk-0"),
        ] {
            assert_eq!(path(id, volume), None, "{id}:{volume}");
        }
    }

    #[test]
    fn a_storage_says_why_nothing_arrives_on_it() {
        let storages = Storages::read(TEXT);
        let refuses = |id: &str, node: &str| storages.get(id).unwrap().refuses(node);
        for (id, node, expected) in [
            ("local", "one", "not for disk images"),
            ("ceph", "one", "of the kind rbd"),
            ("shared", "three", "not one of node three"),
            ("other", "one", "is disabled"),
        ] {
            let why = refuses(id, node).unwrap();
            assert!(why.contains(expected), "{why}");
        }
        assert_eq!(refuses("shared", "two"), None);
        assert_eq!(refuses("fine", "one"), None);
        assert_eq!(refuses("local-lvm", "one"), None);
        assert_eq!(storages.all().count(), 7);
    }

    #[test]
    fn a_volume_has_a_format() {
        let all = ["vm-1-disk-0", "1/a.raw", "1/a.qcow2", "1/a.vmdk"].map(format_of);
        let (raw, qcow2) = (Some(ImageFormat::Raw), Some(ImageFormat::Qcow2));
        assert_eq!(all, [raw, raw, qcow2, None]);
    }
}
