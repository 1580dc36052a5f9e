//! Fuzzes all devices of a parcel at once, as their reader and an import see them.
//!
//! The input describes a parcel, which is written here as docs/parcel.md says and not with the
//! writer, and then changes to it: with the key (what a faulty writer does), or without it (what
//! damages devices, or someone who alters them). Whatever was changed without the key, an import
//! brings exactly what the parcel had, or refuses it.

use longhaul_parcel::{
    BODY_BYTES, CHUNK_BYTES, DataKey, Device, Imported, PLAIN_BYTES, Parcel, Record, import,
};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::digest::{SHA256, digest};
use ring::hkdf::{HKDF_SHA256, Salt};
use ring::hmac;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

const PARCEL: [u8; 16] = *b"parcel-to-fuzz!!";
const KEY: [u8; 32] = [7; 32];
/// A disk that is larger is not imported: it would only take time.
const DISK_BYTES_MAX: u64 = 16 * CHUNK_BYTES as u64;

/// The input, byte by byte; zeros behind its end.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
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

    fn bytes(&mut self, length: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        taken
    }
}

fn derive(salt: &[u8], info: &[&[u8]]) -> [u8; 32] {
    let mut derived = [0; 32];
    let extracted = Salt::new(HKDF_SHA256, salt).extract(&KEY);
    let output = extracted.expand(info, HKDF_SHA256).expect("it is short");
    output.fill(&mut derived).expect("it is as long as a key");
    derived
}

fn digits(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn sha(bytes: &[u8]) -> Vec<u8> {
    digest(&SHA256, bytes).as_ref().to_vec()
}

/// A cell, before it is finished.
#[derive(Clone)]
struct Place {
    kind: u8,
    device: u16,
    row: u64,
    generation: u32,
}

impl Place {
    fn name(&self) -> Vec<u8> {
        let mut name = b"LHPC\x01".to_vec();
        name.push(self.kind);
        name.extend(self.device.to_le_bytes());
        name.extend(self.row.to_le_bytes());
        name.extend(&PARCEL[..8]);
        name.extend(self.generation.to_le_bytes());
        name.extend([0; 4]);
        name
    }

    fn seal(&self, plain: &[u8]) -> Vec<u8> {
        let nonce = nonce(self.generation);
        let info = [
            b"longhaul parcel v1 cells",
            &nonce[..],
            &self.device.to_le_bytes(),
        ];
        let key = UnboundKey::new(&AES_256_GCM, &derive(&PARCEL, &info)).expect("32 bytes");
        let mut nonce = [0; 12];
        nonce[..8].copy_from_slice(&self.row.to_le_bytes());
        let (mut body, nonce) = (plain.to_vec(), Nonce::assume_unique_for_key(nonce));
        let key = LessSafeKey::new(key);
        key.seal_in_place_append_tag(nonce, Aad::from(self.name()), &mut body)
            .expect("it is short");
        body
    }
}

fn nonce(generation: u32) -> [u8; 16] {
    let mut nonce = [9; 16];
    nonce[..4].copy_from_slice(&generation.to_le_bytes());
    nonce
}

/// Finishes a cell: its body, its name, its digest.
fn finish(body: &[u8], name: &[u8]) -> Vec<u8> {
    let mut cell = body.to_vec();
    cell.resize(BODY_BYTES, 0);
    cell.extend(name);
    let sum = sha(&cell);
    cell.extend(sum);
    cell
}

fn double(value: u8) -> u8 {
    value << 1 ^ if value & 0x80 != 0 { 0x1d } else { 0 }
}

/// Returns P and Q.
fn parity(bodies: &[Vec<u8>]) -> [Vec<u8>; 2] {
    let (mut p, mut q) = (vec![0; BODY_BYTES], vec![0; BODY_BYTES]);
    for body in bodies.iter().rev() {
        for ((p, q), byte) in p.iter_mut().zip(&mut q).zip(body) {
            *p ^= byte;
            *q = double(*q) ^ byte;
        }
    }
    [p, q]
}

/// A change: where it is made, and what it is. A byte is changed by XOR.
#[derive(Clone, Copy)]
struct Change {
    what: u8,
    device: usize,
    row: u64,
    at: usize,
    xor: u8,
}

/// What was written, and what an import must bring if no one with the key has changed it.
struct Written {
    devices: Vec<Vec<Vec<u8>>>,
    content: BTreeMap<String, Vec<u8>>,
    is_altered: bool,
}

/// The content of one disk of each guest, by its number.
type Guests = BTreeMap<u32, Vec<u8>>;

/// Appends a record that the input describes to a log.
fn record(input: &mut Input<'_>, log: &mut Vec<Vec<u8>>, now: &mut Guests, was: &mut Guests) {
    let guest = input.below(2) as u32;
    match input.below(4) {
        0 => {
            let bytes = input.below(8) * (CHUNK_BYTES / 3) + input.below(3);
            let disk = now.entry(guest).or_default();
            // A disk only grows.
            let bytes = bytes.max(disk.len());
            disk.resize(bytes, 0);
            let json = format!(
                r#"{{"guest":{guest},"name":"g{guest}","disks":[{{"disk":0,"name":"d{guest}",
                "bytes":{bytes}}}],"description":null}}"#
            );
            log.push(framed(1, json.as_bytes()));
        }
        1 | 2 => {
            let Some(disk) = now.get_mut(&guest).filter(|disk| !disk.is_empty()) else {
                return;
            };
            let chunk = input.below(disk.len().div_ceil(CHUNK_BYTES));
            let from = chunk * CHUNK_BYTES;
            let length = (disk.len() - from).min(CHUNK_BYTES);
            let fill = input.byte();
            let content: Vec<u8> = (0..length).map(|at| fill & (at >> 4) as u8).collect();
            disk[from..from + length].copy_from_slice(&content);
            let mut rest = guest.to_le_bytes().to_vec();
            rest.extend(0_u32.to_le_bytes());
            rest.extend((chunk as u64).to_le_bytes());
            let is_zero = content.iter().all(|byte| *byte == 0);
            rest.extend([u8::from(!is_zero), 0, 0, 0]);
            if !is_zero {
                rest.extend(content);
            }
            log.push(framed(2, &rest));
        }
        _ => {
            let Some(disk) = now.get(&guest) else {
                return;
            };
            was.insert(guest, disk.clone());
            let parts: Vec<u8> = disk.chunks(CHUNK_BYTES).flat_map(sha).collect();
            let digest = digits(&sha(&parts));
            let json = format!(
                r#"{{"guest":{guest},"version":1,"time":1,"consistent":false,
                "disks":[{{"disk":0,"digest":"{digest}"}}]}}"#
            );
            log.push(framed(3, json.as_bytes()));
        }
    }
}

fn framed(kind: u8, rest: &[u8]) -> Vec<u8> {
    let mut record = vec![kind, 0, 0, 0];
    record.extend((rest.len() as u32).to_le_bytes());
    record.extend(rest);
    record
}

/// Puts the records of a generation into plaintexts.
fn plaintexts(records: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut cells: Vec<Vec<u8>> = Vec::new();
    let (mut area, mut first) = (Vec::new(), None);
    let room = PLAIN_BYTES - 16;
    let mut end = |area: &mut Vec<u8>, first: &mut Option<u32>| {
        let mut cell = (cells.len() as u64).to_le_bytes().to_vec();
        cell.extend(first.take().unwrap_or(u32::MAX).to_le_bytes());
        cell.extend([0; 4]);
        cell.append(area);
        cell.resize(PLAIN_BYTES, 0);
        cells.push(cell);
    };
    for record in records {
        if room - area.len() < 8 {
            end(&mut area, &mut first);
        }
        first = first.or(Some(area.len() as u32));
        let mut rest = &record[..];
        loop {
            let (part, more) = rest.split_at(rest.len().min(room - area.len()));
            area.extend(part);
            rest = more;
            if rest.is_empty() {
                break;
            }
            end(&mut area, &mut first);
        }
    }
    end(&mut area, &mut first);
    cells
}

fn changes(input: &mut Input<'_>) -> Vec<Change> {
    let each = 0..input.below(8);
    each.map(|_| Change {
        what: input.byte() % 9,
        device: input.below(4),
        row: input.byte() as u64 % 16,
        at: usize::from(input.byte()) << 8 | usize::from(input.byte()),
        xor: input.byte(),
    })
    .collect()
}

/// Changes a byte; small offsets are at the beginning, and the largest at the end.
fn alter(bytes: &mut [u8], change: &Change) {
    let length = bytes.len();
    let at = match change.at {
        at @ 0..0xff00 => at.min(length.saturating_sub(1)),
        at => length.saturating_sub(1 + (at - 0xff00)),
    };
    if let Some(byte) = bytes.get_mut(at) {
        *byte ^= change.xor;
    }
}

fn write(input: &mut Input<'_>) -> Written {
    let count = 1 + input.below(4);
    let survives = input.below(3).min(count - 1);
    let changes = changes(input);
    let of = |what: u8, device: usize, row: u64| {
        let all = changes.iter();
        all.filter(move |it| it.what == what && it.device == device && it.row == row)
    };
    let headers = hmac::Key::new(
        hmac::HMAC_SHA256,
        &derive(&PARCEL, &[b"longhaul parcel v1 headers"]),
    );
    let capacities: Vec<u64> = (0..count).map(|_| 40 + input.byte() as u64).collect();
    let mut devices: Vec<Vec<Vec<u8>>> = vec![Vec::new(); count];
    let (mut row, mut earlier) = (0_u64, Vec::new());
    let (mut now, mut was) = (Guests::new(), Guests::new());
    let mut is_altered = false;
    let generations = 2 + input.below(3) as u32;
    for generation in 1..=generations {
        let sealed = generation == generations;
        let first = row;
        for (number, cells) in devices.iter_mut().enumerate() {
            let place = Place {
                kind: 1,
                device: number as u16,
                row,
                generation,
            };
            let mut document = format!(
                r#"{{"parcel":"{}","name":"box","to":"paris","created":1,"device":{number},
                "devices":{capacities:?},"parity":{survives},"row":{row},"generation":{generation},
                "nonce":"{}","key":"{}","earlier":[{}],"sealed":{sealed}}}"#,
                digits(&PARCEL),
                digits(&nonce(generation)),
                digits(&derive(&[], &[b"longhaul parcel v1 fingerprint"])[..16]),
                earlier.join(","),
            )
            .into_bytes();
            for change in of(0, number, row) {
                alter(&mut document, change);
                is_altered |= change.xor != 0;
            }
            let tag = hmac::sign(&headers, &document);
            let mut body = (document.len() as u32).to_le_bytes().to_vec();
            body.extend(document);
            body.extend(tag.as_ref());
            for change in of(2, number, row) {
                alter(&mut body, change);
            }
            cells.push(finish(&body, &place.name()));
        }
        row += 1;
        let mut records = Vec::new();
        for _ in 0..if sealed { 0 } else { input.below(24) } {
            record(input, &mut records, &mut now, &mut was);
        }
        if !sealed && input.below(4) == 3 {
            // Anything at all, at the end of the generation.
            let (kind, length) = (input.byte(), usize::from(input.byte()));
            records.push(framed(kind, input.bytes(length)));
            is_altered = true;
        }
        let mut plain = plaintexts(&records);
        if records.is_empty() {
            plain.clear();
        }
        let in_row = count - survives;
        while !plain.len().is_multiple_of(in_row) {
            let mut empty = (plain.len() as u64).to_le_bytes().to_vec();
            empty.extend([0xff; 4]);
            empty.resize(PLAIN_BYTES, 0);
            plain.push(empty);
        }
        for group in plain.chunks(in_row) {
            let start = (row % count as u64) as usize;
            let order: Vec<usize> = (0..count).map(|at| (start + at) % count).collect();
            let place = |kind, device: usize| Place {
                kind,
                device: device as u16,
                row,
                generation,
            };
            let mut bodies = Vec::new();
            for (plain, device) in group.iter().zip(&order[survives..]) {
                let mut plain = plain.clone();
                for change in of(1, *device, row) {
                    alter(&mut plain, change);
                    is_altered |= change.xor != 0;
                }
                bodies.push(place(2, *device).seal(&plain));
            }
            let codes = parity(&bodies);
            let codes = codes.iter().zip(&order[..survives]);
            let codes = codes.map(|(body, device)| (3, body, *device));
            let data = bodies.iter().zip(&order[survives..]);
            let data = data.map(|(body, device)| (2, body, *device));
            let all: Vec<(u8, Vec<u8>, usize)> = codes
                .chain(data)
                .map(|(kind, body, device)| (kind, body.clone(), device))
                .collect();
            for (kind, mut body, device) in all {
                for change in of(2, device, row) {
                    alter(&mut body, change);
                }
                devices[device].push(finish(&body, &place(kind, device).name()));
            }
            row += 1;
        }
        let nonce = digits(&nonce(generation));
        earlier.push(format!(
            r#"{{"generation":{generation},"nonce":"{nonce}","devices":{capacities:?},
            "first":{first},"end":{row}}}"#
        ));
    }
    for change in &changes {
        damage(&mut devices, change);
    }
    let named = was.into_iter();
    let content = named.map(|(guest, disk)| (format!("d{guest}"), disk));
    Written {
        devices,
        content: content.collect(),
        is_altered,
    }
}

/// Changes what is on devices, without the key.
fn damage(devices: &mut [Vec<Vec<u8>>], change: &Change) {
    let (device, row) = (change.device, change.row as usize);
    let (other_device, other_row) = (change.at >> 8 & 3, change.at & 15);
    let other = devices.get(other_device).and_then(|it| it.get(other_row));
    let other = other.cloned();
    let Some(cells) = devices.get_mut(device) else {
        return;
    };
    match (change.what, cells.get_mut(row), other) {
        // A byte of a cell.
        (3, Some(cell), _) => alter(cell, change),
        // A name, with a correct digest.
        (4, Some(cell), _) => {
            let mut name = cell[BODY_BYTES..BODY_BYTES + 32].to_vec();
            let at = change.at % 32;
            name[at] ^= change.xor;
            *cell = finish(&cell[..BODY_BYTES], &name);
        }
        (5, Some(cell), _) => cell.fill(0),
        (6, Some(_), _) => cells.truncate(row),
        // Another cell, as it is.
        (7, Some(cell), Some(other)) => *cell = other,
        // The body of another cell, with the right name.
        (8, Some(cell), Some(other)) => {
            *cell = finish(&other[..BODY_BYTES], &cell[BODY_BYTES..BODY_BYTES + 32]);
        }
        _ => {}
    }
}

/// A folder of this process in memory.
pub(crate) fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let memory = Path::new("/dev/shm");
        let above = match memory.is_dir() {
            true => memory.to_path_buf(),
            false => std::env::temp_dir(),
        };
        let name = format!("longhaul-parcel-devices-{}", std::process::id());
        let folder = above.join(name);
        fs::create_dir_all(&folder).expect("a folder");
        folder
    })
}

/// What an input did, so that seeds can be judged.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Done {
    pub(crate) opened: bool,
    pub(crate) read: bool,
    pub(crate) recovered: bool,
    pub(crate) imported: bool,
}

/// Writes the parcel, opens it, reads it, and imports it.
pub(crate) fn run(data: &[u8]) -> Done {
    let mut input = Input(data);
    let absent = input.byte();
    let written = write(&mut input);
    let mut done = Done::default();
    let mut devices = Vec::new();
    for (number, cells) in written.devices.iter().enumerate() {
        let path = folder().join(format!("{number}.parcel"));
        fs::write(&path, cells.concat()).expect("there is room");
        if absent >> number & 1 == 0 {
            devices.push(Device::open(&path, false).expect("it was written just now"));
        }
    }
    let Ok(parcel) = Parcel::open(devices) else {
        return done;
    };
    done.opened = true;
    let verified = parcel.verify(&mut |_| ());
    let key = DataKey::from_bytes(KEY);
    let mut is_small = true;
    let read = parcel.read(&key, |record| {
        if let Record::Guest(guest) = record {
            is_small &= guest.disks.iter().all(|disk| disk.bytes <= DISK_BYTES_MAX);
        }
        Ok::<_, Infallible>(())
    });
    if let Ok(report) = &read {
        assert_eq!((report.rows, report.lost), (verified.rows, verified.lost));
        // The last header is verified as well.
        let has_damage = |device: &usize| verified.damage.iter().any(|(it, _)| it == device);
        assert!(report.damage.iter().all(|(device, _)| has_damage(device)));
        done.read = true;
        done.recovered = report.recovered > 0;
    }
    if !is_small {
        return done;
    }
    let out = folder().join("out");
    let _ = fs::remove_dir_all(&out);
    fs::create_dir_all(&out).expect("a folder");
    let imported = import(&parcel, &key, None, &mut |_, disk| Ok(out.join(&disk.name)));
    match imported {
        Ok(Imported { disks, .. }) => {
            assert!(verified.lost == 0 && read.is_ok());
            done.imported = true;
            for disk in &disks {
                let content = fs::read(&disk.path).expect("it was imported");
                let parts: Vec<u8> = content.chunks(CHUNK_BYTES).flat_map(sha).collect();
                assert_eq!(disk.digest, digits(&sha(&parts)));
                if !written.is_altered {
                    assert!(written.content.get(&disk.disk) == Some(&content));
                }
            }
            if !written.is_altered {
                assert_eq!(disks.len(), written.content.len());
            }
        }
        Err(_) => assert_eq!(fs::read_dir(&out).expect("a folder").count(), 0),
    }
    done
}
