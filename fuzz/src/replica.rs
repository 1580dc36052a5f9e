//! Fuzzes replicas: what the folder of one holds with its images, and what a peer sends.
//!
//! The input takes a replica as it was at some moment, changes its files or does not, opens it, and
//! sends records as a peer does that begins anew after each refusal. Whatever it sends, a replica
//! that nobody has damaged has whole versions: the images are the newest one, and each one that is
//! kept can be restored. A damaged one restores what it was, or says why not.

#[path = "../support/replica_input.rs"]
mod input;
#[path = "../support/replica_life.rs"]
mod life;

use input::*;
#[allow(unused_imports)]
pub(crate) use life::folder;
use life::*;
use longhaul_parcel::{CHUNK_BYTES, Record, Replica, ReplicaError, ReplicaId, Retention};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The kind of a patch.
const KIND_PATCH: usize = 16;

/// What an input did, so that seeds can be judged.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Done {
    pub(crate) opened: bool,
    pub(crate) took_version: bool,
    pub(crate) restored: bool,
    pub(crate) restored_damaged: bool,
}

/// A replica, and what it should be.
struct Peer<'a> {
    root: &'a Path,
    input: Input<'a>,
    replica: Option<Replica>,
    /// The sizes of the disks in the version that arrives; `None` if one must begin first.
    sizes: Option<Vec<u64>>,
    /// What the images are when that version is complete, if it is known.
    disks: Option<Disks>,
    /// The digests of the chunks that arrived of it.
    arrived: BTreeMap<(usize, u64), [u8; 32]>,
    /// What the versions have; `None` for one of which only the digests are known.
    versions: BTreeMap<u64, Option<Disks>>,
    is_damaged: bool,
    done: Done,
}

/// Fuzzes a replica.
pub(crate) fn run(data: &[u8]) -> Done {
    let life = lived();
    let root = &life.root;
    let folder = replica_folder(root);
    let (mut input, mut done) = (Input(data), Done::default());
    if input.byte() == 0xff {
        // Any document at all. It is looked at and not opened: it may name any path.
        write_files(
            root,
            &Files::from([(folder.join(DOCUMENT), data[1..].to_vec())]),
        );
        if let Ok(looked) = Replica::look(&folder) {
            let (spec, _) = looked.expect("there is a document");
            assert!(spec.keep.last > 0);
            done.opened = true;
        }
        return done;
    }
    let found = found(life, &mut input);
    write_files(root, &found.files);
    if found.is_stamped && found.files.contains_key(&folder.join(DOCUMENT)) {
        stamp(root);
    }
    let opened = match Replica::open(&folder) {
        Ok(None) => Replica::make(&folder, spec(root)).map(Some),
        opened => opened,
    };
    let replica = match opened {
        Ok(replica) => replica,
        Err(error) => {
            assert!(found.is_damaged, "{error}");
            return done;
        }
    };
    done.opened = true;
    let mut peer = Peer {
        root,
        input,
        replica,
        sizes: None,
        disks: None,
        arrived: BTreeMap::new(),
        versions: found.versions,
        is_damaged: found.is_damaged,
        done,
    };
    for _ in 0..CALLS_MAX {
        if peer.input.0.is_empty() || peer.replica.is_none() {
            break;
        }
        peer.call();
    }
    peer.reopen();
    if peer.replica.is_some() {
        peer.check();
    }
    peer.done
}

/// A replica that an input describes.
struct Found {
    files: Files,
    /// What the versions have that may be in them.
    versions: BTreeMap<u64, Option<Disks>>,
    /// Whether it is none that a host can have left.
    is_damaged: bool,
    /// Whether the images are the files that they were.
    is_stamped: bool,
}

fn found(life: &Life, input: &mut Input<'_>) -> Found {
    let (root, moments) = (&life.root, &life.moments);
    let path = replica_folder(root).join(DOCUMENT);
    let moment = &moments[input.below(moments.len())];
    let mut found = Found {
        files: moment.files.clone(),
        versions: moment.versions.clone(),
        is_damaged: false,
        is_stamped: true,
    };
    for (path, content) in &moment.instead {
        if input.byte() & 1 == 1 {
            found.files.insert(path.clone(), content.clone());
        }
    }
    let changes = input.byte();
    if changes & 1 == 1 {
        // Files of another moment with the document of this one.
        let others = &moments[input.below(moments.len())];
        let document = found.files.remove(&path).expect("our own");
        found.files = others.files.clone();
        found.files.insert(path.clone(), document);
    }
    if changes & 2 == 2 {
        change_files(&mut found.files, root, input);
    }
    // Without a version, nothing but the document counts.
    found.is_damaged = changes & 3 != 0 && !moment.versions.is_empty();
    if changes & 4 == 4 {
        let mut document = document_of(root, &found.files);
        for _ in 0..1 + input.below(3) {
            change_document(&mut document, root, input);
        }
        let arriving = found.files.get(&replica_folder(root).join(ARRIVING));
        let bytes = document.pointer_mut("/stage/bytes");
        if let (8, Some(arriving), Some(bytes)) = (changes & 8, arriving, bytes) {
            *bytes = arriving.len().into();
        }
        let text = serde_json::to_vec(&document).expect("it was read just now");
        found.files.insert(path.clone(), text);
        found.versions.clear();
        found.is_damaged = true;
    }
    if changes & 48 == 48 {
        // Nothing is known of it any more, and all is compared again.
        found.files.remove(&path);
        found.versions.clear();
        found.is_damaged = false;
    }
    if changes & 192 == 192 {
        // They were restored from a backup, and perhaps in the middle of a version.
        found.is_stamped = false;
        found.is_damaged |= !moment.instead.is_empty();
    }
    found
}

/// Changes files, but not the document.
fn change_files(files: &mut Files, root: &Path, input: &mut Input<'_>) {
    let folder = replica_folder(root);
    for _ in 0..1 + input.below(3) {
        let path = files.keys().nth(input.below(files.len())).cloned();
        let path = path.unwrap_or_default();
        let is_document = path == folder.join(DOCUMENT);
        let Some(content) = files.get_mut(&path).filter(|_| !is_document) else {
            continue;
        };
        let is_records = path.starts_with(&folder) && !is_digests(&path);
        match (input.below(4), is_records) {
            (0, _) => _ = files.remove(&path),
            (1 | 2, true) => *content = record_file(input),
            _ => change_file(content, input),
        }
    }
}

fn is_small(sizes: &[u64]) -> bool {
    sizes.iter().all(|bytes| *bytes <= DISK_BYTES_MAX)
}

/// Reads an image. One with a chunk far behind its others is not read.
fn read_image(path: &Path) -> Option<Vec<u8>> {
    let bytes = fs::metadata(path).ok()?.len();
    is_small(&[bytes]).then(|| fs::read(path))?.ok()
}

/// Returns the bytes of a chunk.
fn length_of(chunk: u64, bytes: u64) -> usize {
    let from = chunk.saturating_mul(CHUNK_BYTES as u64);
    bytes.saturating_sub(from).min(CHUNK_BYTES as u64) as usize
}

impl Peer<'_> {
    fn there(&self) -> &Replica {
        self.replica.as_ref().expect("it is open")
    }

    fn there_mut(&mut self) -> &mut Replica {
        self.replica.as_mut().expect("it is open")
    }

    /// Says whether a call was successful: an undamaged replica does what is right.
    fn expect(&mut self, called: Result<(), ReplicaError>, is_right: bool) -> bool {
        if let Err(error) = &called {
            assert!(!is_right || self.is_damaged, "{error}");
            // The channel ends, and the next one begins again.
            self.sizes = None;
        }
        called.is_ok()
    }

    fn names(&self) -> Vec<String> {
        let disks = self.there().spec().disks.iter();
        disks.map(|disk| disk.name.clone()).collect()
    }

    fn newest(&self) -> u64 {
        self.there().newest().map_or(0, |newest| newest.version)
    }

    fn newest_sizes(&self) -> Vec<u64> {
        match self.there().newest() {
            Some(newest) => newest.disks.iter().map(|disk| disk.bytes).collect(),
            None => vec![3 * CHUNK_BYTES as u64 + 700, 100],
        }
    }

    /// Makes one call or more.
    fn call(&mut self) {
        match self.input.below(17) {
            0 => self.begin_with_some(),
            1 => {
                let had = self.sizes.clone().unwrap_or_else(|| self.newest_sizes());
                let sizes: Vec<u64> = had.iter().map(|had| self.input.size(*had)).collect();
                self.put_guest(&sizes);
            }
            2..6 => self.put_some_chunk(),
            6 => self.put_honest_version(),
            7 => self.put_version_of_digests(),
            8 => self.put_wrong_version(),
            9 => {
                let (kind, length) = (self.input.below(5), self.input.byte());
                let kind = if kind == 4 { KIND_PATCH } else { kind };
                let rest = self.input.bytes(length.into());
                self.put_raw(kind as u8, rest);
            }
            10 => {
                if self.is_begun() {
                    let synced = self.there_mut().sync();
                    self.expect(synced, true);
                }
            }
            11 => self.query(),
            12 => self.reopen(),
            13 => self.follow(),
            14 => self.check(),
            15 => self.replace_image(),
            _ => self.put_without_beginning(),
        }
    }

    /// Begins a version of the same sizes, if none has begun.
    fn is_begun(&mut self) -> bool {
        if self.sizes.is_none() {
            let sizes = self.newest_sizes();
            self.begin(&sizes, true);
        }
        self.sizes.is_some()
    }

    fn begin_with_some(&mut self) {
        let had = self.sizes.clone().unwrap_or_else(|| self.newest_sizes());
        let mut sizes: Vec<u64> = had.iter().map(|had| self.input.size(*had)).collect();
        match self.input.below(16) {
            14 => sizes.truncate(1),
            15 => sizes.push(700),
            _ => {}
        }
        let newest = self.newest_sizes();
        let is_larger = sizes.iter().zip(&newest).all(|(size, had)| size >= had);
        let is_right = sizes.len() == 2 && (self.newest() == 0 || is_larger);
        self.begin(&sizes, is_right);
    }

    fn begin(&mut self, sizes: &[u64], is_right: bool) {
        // All digests of a first version are written at once, 128 GiB for a disk of 2^50 bytes, and
        // images that may be others are read: damaged ones may have no version then.
        let is_compared = self.is_damaged || self.newest() == 0;
        if !is_small(&self.newest_sizes()) || is_compared && !is_small(sizes) {
            return;
        }
        let begun = self.there_mut().begin(sizes);
        self.sizes = None;
        if !self.expect(begun, is_right) {
            return;
        }
        self.sizes = Some(sizes.to_vec());
        self.arrived.clear();
        self.disks = self.images(sizes);
        if let (Some(Some(newest)), Some(disks), false) = (
            self.versions.get(&self.newest()),
            &self.disks,
            self.is_damaged,
        ) {
            let both = newest.iter().zip(disks);
            assert!(
                both.into_iter()
                    .all(|(newest, disk)| disk.starts_with(newest))
            );
        }
    }

    /// Reads the images, if they are of these sizes or can get them.
    fn images(&self, sizes: &[u64]) -> Option<Disks> {
        if !is_small(sizes) {
            return None;
        }
        let disks = self.there().spec().disks.iter().zip(sizes);
        disks
            .map(|(disk, bytes)| {
                let mut content = read_image(&disk.path)?;
                content.resize(*bytes as usize, 0);
                Some(content)
            })
            .collect()
    }

    /// Sends a record; not a version whose digests would take long to compute.
    fn send(&mut self, kind: u8, rest: &[u8]) -> Option<Result<(), ReplicaError>> {
        let many = (DISK_BYTES_MAX / CHUNK_BYTES as u64) * 64;
        let disks = self.there().spec().disks.len();
        let known = (0..disks).map(|disk| self.there().known_chunks(disk).unwrap_or_default());
        if kind == KIND_VERSION && known.max() > Some(many) {
            // A chunk at 2^50 makes a file of 128 GiB of digests, and all of them are read.
            return None;
        }
        Some(self.there_mut().put(kind, rest))
    }

    fn send_record(&mut self, record: &Record, is_right: bool) -> bool {
        let Ok((kind, rest)) = record.encode() else {
            return false;
        };
        match self.send(kind, &rest) {
            Some(sent) => self.expect(sent, is_right),
            None => false,
        }
    }

    fn put_guest(&mut self, sizes: &[u64]) {
        if !self.is_begun() {
            return;
        }
        let had = self.sizes.clone().unwrap_or_default();
        let is_right =
            sizes.len() == had.len() && sizes.iter().zip(&had).all(|(new, had)| new >= had);
        let record = guest_record(&self.names(), sizes);
        if !self.send_record(&record, is_right) {
            // Or it was no record of the format, and was not sent.
            return;
        }
        self.disks = match (self.disks.take(), is_small(sizes)) {
            (Some(mut disks), true) => {
                for (disk, bytes) in disks.iter_mut().zip(sizes) {
                    disk.resize(*bytes as usize, 0);
                }
                Some(disks)
            }
            _ => None,
        };
        self.sizes = Some(sizes.to_vec());
    }

    fn put_some_chunk(&mut self) {
        if !self.is_begun() {
            return;
        }
        let sizes = self.sizes.clone().unwrap_or_default();
        let disk = match self.input.byte() {
            255 => 2,
            even => usize::from(even) % 2,
        };
        let bytes = sizes.get(disk).copied().unwrap_or_default();
        let last = bytes.saturating_sub(1) / CHUNK_BYTES as u64;
        let chunk = match self.input.byte() {
            small @ 0..200 => u64::from(small) % last.saturating_add(1),
            200..230 => last,
            _ => self.input.number(),
        };
        let length = match (length_of(chunk, bytes), self.input.byte()) {
            (length, 0..230) => length,
            (_, 230..235) => 0,
            (length, 235..240) => length.saturating_sub(1),
            (length, 240..245) => length + 1,
            _ => CHUNK_BYTES,
        };
        let content = content(length, self.input.byte());
        let is_zero = self.input.byte() > 230;
        self.put_chunk(disk, chunk, (!is_zero).then_some(&content));
    }

    fn put_chunk(&mut self, disk: usize, chunk: u64, content: Option<&Vec<u8>>) {
        let sizes = self.sizes.clone().unwrap_or_default();
        let length = length_of(chunk, sizes.get(disk).copied().unwrap_or_default());
        let is_right = length > 0 && content.is_none_or(|content| content.len() == length);
        let record = chunk_record(disk, chunk, content.map(|content| &content[..]));
        if !self.send_record(&record, is_right && chunk < 1 << 20) {
            return;
        }
        let zeros = vec![0; length];
        let content = content.unwrap_or(&zeros);
        self.arrived.insert((disk, chunk), digest_of(content));
        let from = chunk.saturating_mul(CHUNK_BYTES as u64) as usize;
        let end = from.saturating_add(content.len());
        let disks = self.disks.as_mut().and_then(|disks| disks.get_mut(disk));
        if let Some(part) = disks.and_then(|disk| disk.get_mut(from..end)) {
            part.copy_from_slice(content);
        }
    }

    /// Returns the digest of a chunk that the replica has noted.
    fn noted(&self, disk: usize, chunk: u64) -> Option<[u8; 32]> {
        let arrived = self.arrived.get(&(disk, chunk)).copied();
        arrived.or_else(|| {
            let known = self.there().known_chunks(disk).ok()?;
            let read = (chunk < known).then(|| self.there().digests(disk, chunk, 1));
            read?.ok()?.first_chunk().copied()
        })
    }

    fn next_version(&mut self) -> (u64, bool) {
        let (step, flags) = (self.input.byte(), self.input.byte());
        let next = self.newest().checked_add(1 + u64::from(step % 3));
        (next.unwrap_or(u64::MAX), flags & 1 == 0)
    }

    /// Brings a version as a source does: with all chunks whose digests are others.
    fn put_honest_version(&mut self) {
        if !self.is_begun() {
            return;
        }
        let Some(disks) = self.disks.clone() else {
            return;
        };
        for (disk, content) in disks.iter().enumerate() {
            for (chunk, content) in (0..).zip(content.chunks(CHUNK_BYTES)) {
                if self.noted(disk, chunk) != Some(digest_of(content)) && self.sizes.is_some() {
                    self.put_chunk(disk, chunk, Some(&content.to_vec()));
                }
            }
        }
        if self.sizes.is_some() {
            let (version, consistent) = self.next_version();
            let record = version_record(version, consistent, digests_of(&disks));
            let is_right = version > self.newest();
            self.put_version(version, &record, Some(disks), is_right);
        }
    }

    /// Brings a version with the digests that the replica has noted, whatever its images have.
    fn put_version_of_digests(&mut self) {
        if !self.is_begun() {
            return;
        }
        let sizes = self.sizes.clone().unwrap_or_default();
        if !is_small(&sizes) {
            return;
        }
        let digests: Option<Vec<String>> = (0..)
            .zip(&sizes)
            .map(|(disk, bytes)| {
                let chunks = 0..bytes.div_ceil(CHUNK_BYTES as u64);
                let noted: Option<Vec<[u8; 32]>> =
                    chunks.map(|chunk| self.noted(disk, chunk)).collect();
                noted.map(|noted| text_of(noted.into_iter()))
            })
            .collect();
        if let Some(digests) = digests {
            let (version, consistent) = self.next_version();
            let disks = self
                .disks
                .clone()
                .filter(|disks| digests_of(disks) == digests);
            let record = version_record(version, consistent, digests);
            self.put_version(version, &record, disks, false);
        }
    }

    fn put_wrong_version(&mut self) {
        if !self.is_begun() {
            return;
        }
        let version = self.input.number();
        let count = self.input.below(4);
        let digests = match (self.input.byte() & 1, &self.disks) {
            (0, Some(disks)) => digests_of(disks),
            _ => vec!["0".repeat(64); 4],
        };
        let digests: Vec<String> = digests.into_iter().take(count).collect();
        let disks = self.disks.clone();
        let is_right = disks
            .as_ref()
            .is_some_and(|disks| digests_of(disks) == digests);
        let record = version_record(version, true, digests);
        self.put_version(version, &record, disks.filter(|_| is_right), false);
    }

    fn put_version(&mut self, version: u64, record: &Record, disks: Option<Disks>, is_right: bool) {
        let before = self.newest();
        let is_taken = self.send_record(record, is_right);
        let newest = self.newest();
        // The versions of a damaged one may be forgotten.
        let is_next = version > before && newest == version;
        assert!(self.is_damaged || is_taken && is_next || !is_taken && newest == before);
        if is_taken {
            self.done.took_version = true;
            self.arrived.clear();
            self.versions.insert(version, disks);
        } else {
            // It may come when the replica is opened again, if it is a damaged one.
            self.versions.entry(version).or_insert(None);
        }
    }

    /// Sends anything; nothing is known then of the version that arrives.
    fn put_raw(&mut self, kind: u8, rest: &[u8]) {
        if !self.is_begun() {
            return;
        }
        let sent = self.send(kind, rest);
        if let Some(sent) = sent
            && self.expect(sent, false)
        {
            self.sizes = None;
        }
    }

    fn query(&mut self) {
        if self.input.byte() < 128 && !self.is_begun() {
            return;
        }
        let (disk, first) = (self.input.below(3), self.input.number());
        let count = self.input.number() as usize;
        let known = self.there().known_chunks(disk);
        if let Ok(digests) = self.there().digests(disk, first, count) {
            let known = known.expect("it has digests");
            let read = digests.len() as u64 / DIGEST_BYTES;
            assert!(read == 0 || read <= known.saturating_sub(first));
            assert!(read <= 4096);
        }
    }

    fn reopen(&mut self) {
        self.replica = None;
        self.sizes = None;
        let folder = replica_folder(self.root);
        match Replica::open(&folder) {
            Ok(replica) => self.replica = replica,
            Err(error) => assert!(self.is_damaged, "{error}"),
        }
        if !self.is_damaged {
            let entries = fs::read_dir(&folder).expect("a folder");
            let names = entries.map(|entry| entry.expect("a file").file_name());
            let undo = names.filter(|name| name.to_string_lossy().starts_with("undo."));
            assert_eq!(
                undo.count(),
                self.there().versions().len().saturating_sub(1)
            );
        }
    }

    fn follow(&mut self) {
        let id = ReplicaId([self.input.byte(); 16]);
        let every_s = self.input.number();
        let keep = Retention {
            last: self.input.number() as u32,
            hourly: self.input.byte().into(),
            daily: self.input.byte().into(),
            weekly: self.input.byte().into(),
        };
        let followed = self.there_mut().follow(id, every_s, keep);
        if let Err(error) = followed {
            assert!(self.is_damaged, "{error}");
        }
    }

    /// Replaces an image by another file, as a move of its guest does.
    fn replace_image(&mut self) {
        let (disk, flags) = (self.input.below(2), self.input.byte());
        let (path, new) = (&images(self.root)[disk], self.root.join("images/new"));
        let before = read_image(path).filter(|_| is_small(&self.newest_sizes()));
        let Some(before) = before else {
            return;
        };
        let mut content = before.clone();
        if flags & 1 == 1 {
            change_file(&mut content, &mut self.input);
        }
        fs::write(&new, &content).expect("there is room");
        fs::rename(&new, path).expect("it is a file");
        if flags & 6 == 6 {
            // A version goes on to arrive.
            self.is_damaged = true;
            return;
        }
        self.sizes = None;
        if self.newest() == 0 || self.is_damaged {
            return;
        }
        let sizes = self.newest_sizes();
        self.begin(&sizes, true);
        let bytes = sizes[disk] as usize;
        let is_same = content.get(..bytes) == before.get(..bytes);
        assert_eq!(is_same, self.newest() > 0);
        if !is_same {
            self.versions.clear();
        }
    }

    /// Sends what no peer can send: what follows a refusal in the same channel.
    fn put_without_beginning(&mut self) {
        self.is_damaged = true;
        self.versions.clear();
        self.sizes = self.sizes.take().or_else(|| Some(self.newest_sizes()));
        self.disks = None;
    }

    /// Checks that the versions are there.
    fn check(&mut self) {
        let looked = Replica::look(&replica_folder(self.root));
        if !self.is_damaged {
            let (spec, versions) = looked.expect("it is read").expect("it is there");
            assert_eq!(&spec, self.there().spec());
            assert_eq!(versions, self.there().versions());
        }
        let _ = self.there().used_bytes();
        let versions = self.there().versions().to_vec();
        for (at, version) in versions.iter().enumerate() {
            let sizes: Vec<u64> = version.disks.iter().map(|disk| disk.bytes).collect();
            // All of a disk is read and written, however little of it is there.
            if !is_small(&sizes) {
                continue;
            }
            if at + 1 == versions.len() {
                self.verify(version.version);
            }
            self.restore(version.version, sizes.len());
        }
    }

    fn verify(&mut self, version: u64) {
        match self.there().verify(&mut |_| ()) {
            Ok(()) => {
                let sizes = self.newest_sizes();
                let images = self.images(&sizes);
                if let (Some(Some(disks)), Some(images)) = (self.versions.get(&version), images) {
                    assert!(*disks == images, "the images are not version {version}");
                }
            }
            Err(error) => assert!(self.is_damaged, "version {version}: {error}"),
        }
    }

    fn restore(&mut self, version: u64, disks: usize) {
        let out = self.root.join("out");
        let to: Vec<PathBuf> = (0..disks).map(|disk| out.join(disk.to_string())).collect();
        let mut before = 0;
        let restored = self.there().restore(version, &to, &mut |bytes| {
            assert!(bytes >= before);
            before = bytes;
        });
        match restored {
            Ok(()) => {
                let read = |path: &PathBuf| fs::read(path).expect("it was restored");
                let found: Disks = to.iter().map(read).collect();
                match self.versions.get(&version) {
                    Some(Some(disks)) => assert!(*disks == found, "version {version}"),
                    Some(None) => {}
                    None => assert!(self.is_damaged, "version {version} is of nobody"),
                }
                self.done.restored |= !self.is_damaged;
                self.done.restored_damaged |= self.is_damaged;
                // What exists stays.
                assert!(self.there().restore(version, &to, &mut |_| ()).is_err() || disks == 0);
                for path in to {
                    fs::remove_file(path).expect("it was restored");
                }
            }
            Err(error) => {
                assert!(self.is_damaged, "version {version}: {error}");
                let left = fs::read_dir(&out).expect("a folder").count();
                assert_eq!(left, 0, "files are left of version {version}");
            }
        }
    }
}
