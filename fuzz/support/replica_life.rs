//! The life of a replica that inputs begin with, and the records of a peer.

use longhaul_parcel::{
    CHUNK_BYTES, Chunk, Disk, Guest, Record, Replica, ReplicaDisk, ReplicaId, ReplicaSpec,
    Retention, Version, VersionDisk,
};
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The contents of all disks.
pub(super) type Disks = Vec<Vec<u8>>;
/// Files by their paths.
pub(super) type Files = BTreeMap<PathBuf, Vec<u8>>;

/// Larger disks have no content here, and are not read: it would only take time.
pub(super) const DISK_BYTES_MAX: u64 = 16 * CHUNK_BYTES as u64;
/// Most calls for one input.
pub(super) const CALLS_MAX: usize = 40;
pub(super) const KIND_VERSION: u8 = 3;
pub(super) const DIGEST_BYTES: u64 = 32;
pub(super) const DOCUMENT: &str = "replica.json";
pub(super) const ARRIVING: &str = "arriving";

/// What there was of a replica at a moment.
pub(super) struct Moment {
    pub(super) files: Files,
    /// Files that may be there instead: a version was being applied.
    pub(super) instead: Files,
    /// The versions that can be restored once it was opened.
    pub(super) versions: BTreeMap<u64, Option<Disks>>,
}

pub(super) struct Life {
    pub(super) root: PathBuf,
    pub(super) moments: Vec<Moment>,
}

pub(super) fn replica_folder(root: &Path) -> PathBuf {
    root.join("replica")
}

pub(super) fn images(root: &Path) -> Vec<PathBuf> {
    let images = (0..2).map(|number| root.join(format!("images/{number}")));
    images.collect()
}

pub(super) fn spec(root: &Path) -> ReplicaSpec {
    let disks = images(root).into_iter().enumerate();
    let disks = disks.map(|(number, path)| ReplicaDisk {
        name: format!("vd{number}"),
        path,
    });
    ReplicaSpec {
        id: ReplicaId([3; 16]),
        guest: "web".into(),
        from: "lyon".into(),
        keep: Retention::last(2),
        every_s: 600,
        disks: disks.collect(),
    }
}

pub(super) fn digest_of(content: &[u8]) -> [u8; 32] {
    let digest = digest(&SHA256, content);
    let digest = digest.as_ref().first_chunk();
    *digest.expect("it has 32 bytes")
}

pub(super) fn text_of(digests: impl Iterator<Item = [u8; 32]>) -> String {
    let whole = digest_of(&digests.flatten().collect::<Vec<u8>>());
    whole.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(super) fn content(length: usize, seed: u8) -> Vec<u8> {
    let byte = |at: usize| match seed {
        0 => 0,
        1..100 => b"text "[at % 5] ^ seed,
        _ => (at as u8).wrapping_mul(at.to_le_bytes()[1] | 1) ^ seed,
    };
    (0..length).map(byte).collect()
}

pub(super) fn read_files(root: &Path) -> Files {
    let folders = [replica_folder(root), root.join("images")];
    let entries = folders
        .iter()
        .flat_map(|folder| fs::read_dir(folder).expect("a folder"));
    let paths = entries.map(|entry| entry.expect("a file").path());
    paths
        .map(|path| {
            let content = fs::read(&path).expect("a file");
            (path, content)
        })
        .collect()
}

pub(super) fn write_files(root: &Path, files: &Files) {
    for folder in ["replica", "images", "out"] {
        let folder = root.join(folder);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder");
    }
    for (path, content) in files {
        fs::write(path, content).expect("there is room");
    }
}

pub(super) fn guest_record(names: &[String], sizes: &[u64]) -> Record {
    let disks = (0..).zip(names).zip(sizes);
    Record::Guest(Guest {
        guest: 0,
        name: "web".into(),
        disks: disks
            .map(|((disk, name), bytes)| Disk {
                disk,
                name: name.clone(),
                bytes: *bytes,
                used: None,
            })
            .collect(),
        description: Value::Null,
    })
}

pub(super) fn chunk_record(disk: usize, chunk: u64, content: Option<&[u8]>) -> Record {
    Record::Chunk(Chunk {
        guest: 0,
        disk: disk as u32,
        chunk,
        content: content.map(<[u8]>::to_vec),
    })
}

pub(super) fn version_record(version: u64, consistent: bool, digests: Vec<String>) -> Record {
    let disks = (0..).zip(digests);
    Record::Version(Version {
        guest: 0,
        version,
        time: version,
        consistent,
        frozen: false,
        moment: None,
        disks: disks
            .map(|(disk, digest)| VersionDisk { disk, digest })
            .collect(),
    })
}

pub(super) fn digests_of(disks: &Disks) -> Vec<String> {
    let each = disks.iter();
    each.map(|disk| text_of(disk.chunks(CHUNK_BYTES).map(digest_of)))
        .collect()
}

pub(super) fn put(replica: &mut Replica, record: &Record) {
    let (kind, rest) = record.encode().expect("it is one of the format");
    replica.put(kind, &rest).expect("it is taken");
}

/// Writes the disks of a version, and says which chunks of them are others than before.
pub(super) fn written(before: &Disks, seed: u8) -> (Disks, Vec<(usize, usize)>) {
    let (mut disks, mut changed) = (before.clone(), Vec::new());
    if seed == 3 {
        disks[1].extend(content(CHUNK_BYTES, 7));
        changed.extend([(1, 0), (1, 1)]);
    }
    for (disk, chunk) in [(0, usize::from(seed) % 4), (0, 3)] {
        let from = chunk * CHUNK_BYTES;
        let end = (from + CHUNK_BYTES).min(disks[disk].len());
        let new = content(end - from, seed * 40);
        disks[disk][from..end].copy_from_slice(&new);
        changed.push((disk, chunk));
    }
    (disks, changed)
}

pub(super) fn send(replica: &mut Replica, disks: &Disks, changed: &[(usize, usize)]) {
    let sizes: Vec<u64> = disks.iter().map(|disk| disk.len() as u64).collect();
    let names: Vec<String> = replica
        .spec()
        .disks
        .iter()
        .map(|it| it.name.clone())
        .collect();
    replica.begin(&sizes).expect("it begins");
    put(replica, &guest_record(&names, &sizes));
    for (disk, chunk) in changed {
        let content = disks[*disk].chunks(CHUNK_BYTES).nth(*chunk);
        put(replica, &chunk_record(*disk, *chunk as u64, content));
    }
    replica.sync().expect("it is durable");
}

/// Lets a replica live, and keeps what there was of it.
pub(super) fn live() -> Life {
    let memory = Path::new("/dev/shm");
    let above = match memory.is_dir() {
        true => memory.to_path_buf(),
        false => std::env::temp_dir(),
    };
    let root = above.join(format!("longhaul-replica-{}", std::process::id()));
    let _ = fs::remove_dir_all(&root);
    write_files(&root, &Files::new());
    let mut replica = Replica::make(&replica_folder(&root), spec(&root)).expect("it is made");
    let mut moments = Vec::new();
    let mut versions = BTreeMap::new();
    let mut keep = |versions: &BTreeMap<u64, Option<Disks>>| {
        moments.push(Moment {
            files: read_files(&root),
            instead: Files::new(),
            versions: versions.clone(),
        });
    };
    keep(&versions);
    let mut disks = vec![content(3 * CHUNK_BYTES + 700, 120), content(100, 5)];
    for number in 1..=5 {
        let changed = match number {
            1 => vec![(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)],
            _ => {
                let (next, changed) = written(&disks, number);
                disks = next;
                changed
            }
        };
        send(&mut replica, &disks, &changed);
        if number < 4 {
            keep(&versions);
        }
        let consistent = !matches!(number, 3 | 5);
        let version = version_record(number.into(), consistent, digests_of(&disks));
        put(&mut replica, &version);
        versions.insert(number.into(), Some(disks.clone()));
        keep(&versions);
    }
    // Those between: version 3 is applied, and then forgotten to have arrived.
    let [from, to] = [&moments[5], &moments[6]];
    moments.extend([applied(&root, from, to), untidied(&root, from, to)]);
    for moment in &mut moments {
        let kept = versions_in(&root, &moment.files);
        moment.versions.retain(|version, _| kept.contains(version));
    }
    Life { root, moments }
}

/// Says in the document that the images are the files that they are now.
pub(super) fn stamp(root: &Path) {
    let path = replica_folder(root).join(DOCUMENT);
    let text = fs::read(&path).expect("it was written just now");
    let mut document: Value = serde_json::from_slice(&text).expect("it was written just now");
    let stamps = document["stamps"].as_array_mut().into_iter().flatten();
    for (stamp, path) in stamps.zip(images(root)) {
        if let Ok(found) = fs::metadata(path) {
            *stamp = json!({
                "file": [found.dev(), found.ino()],
                "written": [found.mtime(), found.mtime_nsec()],
                "bytes": found.len(),
            });
        }
    }
    let text = serde_json::to_vec(&document).expect("it was read just now");
    fs::write(&path, text).expect("there is room");
}

pub(super) fn document_of(root: &Path, files: &Files) -> Value {
    let text = &files[&replica_folder(root).join(DOCUMENT)];
    serde_json::from_slice(text).expect("our own")
}

pub(super) fn versions_in(root: &Path, files: &Files) -> Vec<u64> {
    let document = document_of(root, files);
    let versions = document["versions"].as_array().expect("our own");
    let stage = document.pointer("/stage/version");
    let numbers = versions.iter().chain(stage);
    numbers
        .map(|it| it["version"].as_u64().expect("our own"))
        .collect()
}

/// Returns what there is while a version is applied.
pub(super) fn applied(root: &Path, from: &Moment, to: &Moment) -> Moment {
    let folder = replica_folder(root);
    let mut document = document_of(root, &from.files);
    let version = document_of(root, &to.files)["versions"]
        .as_array()
        .and_then(|versions| versions.last().cloned())
        .expect("our own");
    let bytes = from.files[&folder.join(ARRIVING)].len();
    document["stage"] = json!({ "version": version, "bytes": bytes });
    let mut files = from.files.clone();
    let text = serde_json::to_vec_pretty(&document).expect("a document");
    files.insert(folder.join(DOCUMENT), text);
    let undo = folder.join("undo.3.2");
    files.insert(undo.clone(), to.files[&undo].clone());
    let mut instead = to.files.clone();
    instead.retain(|path, _| path.parent() != Some(folder.as_path()) || is_digests(path));
    Moment {
        files,
        instead,
        versions: to.versions.clone(),
    }
}

pub(super) fn is_digests(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().starts_with("digests.")
}

/// Returns what there is when a version was applied just now.
pub(super) fn untidied(root: &Path, from: &Moment, to: &Moment) -> Moment {
    let arriving = replica_folder(root).join(ARRIVING);
    let mut files = to.files.clone();
    files.insert(arriving.clone(), from.files[&arriving].clone());
    for name in ["undo.9.8", "undo.new", "replica.json.new"] {
        files.insert(replica_folder(root).join(name), b"interrupted".to_vec());
    }
    Moment {
        files,
        instead: Files::new(),
        versions: to.versions.clone(),
    }
}

pub(super) fn lived() -> &'static Life {
    static LIFE: OnceLock<Life> = OnceLock::new();
    LIFE.get_or_init(live)
}

/// The folder of this process.
#[allow(dead_code)]
pub(crate) fn folder() -> &'static Path {
    &lived().root
}
