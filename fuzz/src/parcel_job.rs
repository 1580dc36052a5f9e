//! Fuzzes what an export keeps in its folder (the document, the digests of its disks), with devices
//! as they were at the same time or at another one.
//!
//! The input chooses moments of an export and a top-up, takes the document, the digests and the
//! devices from them, changes them, and lets the export go on. It does, or says why not. If the
//! parcel is then imported, each chunk is as it once was.

use longhaul_parcel::{
    CELL_BYTES, CHUNK_BYTES, Device, Job, JobDisk, JobGuest, Parcel, Settings, Step, import,
};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

/// The files of a folder, by their names.
type Files = BTreeMap<PathBuf, Vec<u8>>;

/// What an export and its devices were at a moment.
struct Moment {
    job: Files,
    devices: Files,
}

struct Export {
    root: PathBuf,
    moments: Vec<Moment>,
    /// The contents of each disk: at the export, and at the top-up.
    disks: BTreeMap<String, [Vec<u8>; 2]>,
}

fn read_folder(folder: &Path) -> Files {
    let entries = fs::read_dir(folder).expect("a folder");
    let paths = entries.map(|entry| entry.expect("a file").path());
    paths
        .map(|path| {
            let content = fs::read(&path).expect("a file");
            (path, content)
        })
        .collect()
}

fn write_folder(folder: &Path, files: &Files) {
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder).expect("a folder");
    for (path, content) in files {
        fs::write(path, content).expect("there is room");
    }
}

fn content(chunks: usize, seed: u8) -> Vec<u8> {
    let bytes = chunks * CHUNK_BYTES + 700;
    let byte = |at: usize| match (at / CHUNK_BYTES) % 3 {
        0 => (at as u8).wrapping_mul(at.to_le_bytes()[1] | 1) ^ seed,
        1 => b"text "[at % 5] ^ seed,
        _ => 0,
    };
    (0..bytes).map(byte).collect()
}

/// Exports some disks, tops the parcel up, and keeps what there was at each step.
fn export() -> Export {
    let memory = Path::new("/dev/shm");
    let above = match memory.is_dir() {
        true => memory.to_path_buf(),
        false => std::env::temp_dir(),
    };
    let root = above.join(format!("longhaul-parcel-job-{}", std::process::id()));
    let _ = fs::remove_dir_all(&root);
    let folders = ["devices/0", "devices/1", "disks"].map(|name| root.join(name));
    for folder in &folders {
        fs::create_dir_all(folder).expect("a folder");
    }
    let [first, second, disks_at] = folders;
    let path = |name: &str| disks_at.join(name);
    let mut disks = BTreeMap::new();
    for (name, chunks) in [("a", 20), ("b", 2), ("c", 0)] {
        let old = content(chunks, 3);
        let mut new = old.clone();
        new[10] ^= 1;
        if name == "b" {
            new.extend([5; 900]);
        }
        fs::write(path(name), &old).expect("there is room");
        disks.insert(name.to_owned(), [old, new]);
    }
    let disk = |name: &str| JobDisk {
        name: name.into(),
        path: path(name),
    };
    let guest = |name: &str, disks| JobGuest {
        name: name.into(),
        disks,
    };
    let guests = vec![
        guest("web", vec![disk("a"), disk("b")]),
        guest("db", vec![disk("c")]),
    ];
    let settings = Settings {
        name: "box".into(),
        to: "paris".into(),
        parity: 1,
        now: 1_800_000_000,
    };
    let folder = root.join("job");
    let limit = Some(200 * CELL_BYTES as u64);
    let at = [first.clone(), second.clone()];
    let mut moments = Vec::new();
    let mut keep = || {
        let mut devices = read_folder(&first);
        devices.extend(read_folder(&second));
        let job = read_folder(&folder);
        moments.push(Moment { job, devices });
    };
    let job = Job::create(&folder, &settings, (&at, limit), guests).expect("it begins");
    let mut job = job.durable_every(Duration::ZERO);
    keep();
    let mut step = |step: &Step<'_>| {
        if let Step::Exports { .. } = step {
            keep();
        }
    };
    job.run(1, &mut step).expect("it is exported");
    for (name, [_, new]) in &disks {
        fs::write(path(name), new).expect("there is room");
    }
    keep();
    job.top_up().expect("it is sealed");
    keep();
    let mut step = |step: &Step<'_>| {
        if let Step::Exports { .. } = step {
            keep();
        }
    };
    job.run(2, &mut step).expect("it is topped up");
    keep();
    Export {
        root,
        moments,
        disks,
    }
}

fn exported() -> &'static Export {
    static EXPORT: OnceLock<Export> = OnceLock::new();
    EXPORT.get_or_init(export)
}

/// The folder of this process.
#[allow(dead_code)]
pub(crate) fn folder() -> &'static Path {
    &exported().root
}

/// The input, byte by byte; zeros behind its end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::from(self.byte()) % limit
    }

    fn number(&mut self) -> u64 {
        match self.byte() {
            small @ 0..=200 => small.into(),
            201 => u64::MAX,
            202 => u64::MAX / 32,
            203 => u64::MAX / 32 + 1,
            204 => 1 << 40,
            205 => 1 << 50,
            206 => 1 << 63,
            207 => u64::MAX - 1,
            208 => u64::MAX / CELL_BYTES as u64,
            209 => u64::MAX / CHUNK_BYTES as u64,
            other => (u64::from(other) - 210) * (CHUNK_BYTES as u64 / 2) + 3,
        }
    }
}

/// Where the document has numbers.
const NUMBERS: [&str; 9] = [
    "/position/header",
    "/position/end",
    "/version",
    "/next/guest",
    "/next/disk",
    "/next/chunk",
    "/guests/0/disks/0/bytes",
    "/guests/0/disks/1/bytes",
    "/guests/1/disks/0/bytes",
];

/// Changes the document. The paths in it stay those of this export: anything else would be written.
fn change_document(document: &mut Value, input: &mut Input<'_>) {
    match input.below(16) {
        at @ 0..9 => {
            let number = input.number();
            if let Some(value) = document.pointer_mut(NUMBERS[at]) {
                *value = number.into();
            }
        }
        9 => document["sealed"] = (input.byte() & 1 == 1).into(),
        10 => document["position"] = Value::Null,
        11 => document["key"] = "07".repeat(input.below(40)).into(),
        12 => {
            if let Some(devices) = document["devices"].as_array_mut() {
                devices.reverse();
            }
        }
        13 => {
            if let Some(devices) = document["devices"].as_array_mut() {
                devices.truncate(input.below(3));
            }
        }
        14 => {
            let (which, times) = (input.below(2), input.below(3));
            if let Some(guests) = document["guests"].as_array_mut() {
                let guest = guests.get(which).cloned();
                guests.extend(std::iter::repeat_n(guest.unwrap_or_default(), times));
            }
        }
        _ => {
            let (guest, name) = (input.below(2), input.below(3));
            let names = ["", "a/b", "web"];
            if let Some(value) = document.pointer_mut(&format!("/guests/{guest}/name")) {
                *value = names[name].into();
            }
        }
    }
}

fn change_file(content: &mut Vec<u8>, input: &mut Input<'_>) {
    let at = usize::from(input.byte()) << 8 | usize::from(input.byte());
    match input.below(3) {
        0 => content.truncate(at % (content.len() + 1)),
        1 => content.resize(content.len() + at, input.byte()),
        _ => {
            let length = content.len().max(1);
            if let Some(byte) = content.get_mut(at % length) {
                *byte ^= input.byte();
            }
        }
    }
}

/// What an input did, so that seeds can be judged.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Done {
    pub(crate) opened: bool,
    pub(crate) ran: bool,
    pub(crate) imported: bool,
}

/// Lets an export go on.
pub(crate) fn run(data: &[u8]) -> Done {
    let export = exported();
    let folder = export.root.join("job");
    let (mut input, mut done) = (Input(data), Done::default());
    if input.byte() == 0xff {
        // Any document at all. It is read and goes no further: it may name any path.
        let path = folder.join("job.json");
        write_folder(&folder, &Files::from([(path, data[1..].to_vec())]));
        if let Ok(job) = Job::open(&folder) {
            assert_eq!(job.key().text().len(), 64);
            done.opened = true;
        }
        return done;
    }
    let count = export.moments.len();
    let [document, digests, devices] = [(); 3].map(|()| &export.moments[input.below(count)]);
    let is_document = |path: &Path| path.ends_with("job.json");
    let mut job: Files = Files::new();
    for (path, content) in &document.job {
        if is_document(path) {
            let mut value: Value = serde_json::from_slice(content).expect("our own");
            for _ in 0..input.below(4) {
                change_document(&mut value, &mut input);
            }
            let text = serde_json::to_vec(&value).expect("it was read just now");
            job.insert(path.clone(), text);
        }
    }
    for (path, content) in digests.job.iter().filter(|(path, _)| !is_document(path)) {
        let mut content = content.clone();
        if input.below(4) == 3 {
            change_file(&mut content, &mut input);
        }
        job.insert(path.clone(), content);
    }
    write_folder(&folder, &job);
    for (path, content) in &devices.devices {
        let mut content = content.clone();
        for _ in 0..input.below(4).saturating_sub(1) {
            let (row, many) = (input.below(24) * CELL_BYTES, input.byte());
            match many % 4 {
                0 => content.truncate(row.min(content.len())),
                1 => {
                    let at = row + CELL_BYTES - 1 - input.below(64);
                    if let Some(byte) = content.get_mut(at) {
                        *byte ^= 1 + input.byte() % 255;
                    }
                }
                _ => {
                    if let Some(byte) = content.get_mut(row + input.below(256)) {
                        *byte ^= 1 + input.byte() % 255;
                    }
                }
            }
        }
        fs::write(path, content).expect("there is room");
    }
    let Ok(job) = Job::open(&folder) else {
        return done;
    };
    done.opened = true;
    let mut job = job.durable_every(Duration::ZERO);
    if input.below(3) == 2 && job.top_up().is_err() {
        return done;
    }
    let Ok(parcel) = job.run(3, &mut |_| ()) else {
        return done;
    };
    done.ran = true;
    assert!(job.is_sealed() && parcel.header().sealed);
    done.imported = is_imported(export, &job);
    done
}

fn is_imported(export: &Export, job: &Job) -> bool {
    let open = |path: &PathBuf| Device::open(path, false).expect("it was there just now");
    let devices = job.devices().iter().map(open).collect();
    let Ok(parcel) = Parcel::open(devices) else {
        return false;
    };
    let out = export.root.join("out");
    let _ = fs::remove_dir_all(&out);
    fs::create_dir_all(&out).expect("a folder");
    let mut number = 0;
    let imported = import(&parcel, job.key(), None, &mut |_, disk| {
        number += 1;
        Ok(out.join(format!("{}.{number}", disk.name)))
    });
    let Ok(imported) = imported else {
        return false;
    };
    for disk in imported.disks {
        let found = fs::read(&disk.path).expect("it was imported");
        let once = &export.disks[&disk.disk];
        for (at, chunk) in found.chunks(CHUNK_BYTES).enumerate() {
            let was = |content: &Vec<u8>| {
                let rest = content.get(at * CHUNK_BYTES..).unwrap_or_default();
                // Its size may be one of the document.
                rest.starts_with(chunk)
            };
            assert!(once.iter().any(was), "chunk {at} of {}", disk.disk);
        }
    }
    true
}
