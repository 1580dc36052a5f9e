//! What an input changes of the files of a replica.

use super::life::*;
use longhaul_parcel::CHUNK_BYTES;
use serde_json::{Value, json};
use std::path::Path;

/// The input, byte by byte; zeros behind its end.
pub(super) struct Input<'a>(pub(super) &'a [u8]);

impl<'a> Input<'a> {
    pub(super) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    pub(super) fn below(&mut self, limit: usize) -> usize {
        usize::from(self.byte()) % limit
    }

    pub(super) fn bytes(&mut self, length: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        taken
    }

    pub(super) fn number(&mut self) -> u64 {
        let chunk = CHUNK_BYTES as u64;
        match self.byte() {
            small @ 0..200 => small.into(),
            200 => u64::MAX,
            201 => u64::MAX - 1,
            202 => u64::MAX / DIGEST_BYTES,
            203 => u64::MAX / DIGEST_BYTES + 1,
            204 => u64::MAX / chunk,
            205 => u64::MAX / chunk + 1,
            206 => 1 << 63,
            207 => (1 << 50) + 1,
            208 => 1 << 50,
            209 => (1 << 50) - 1,
            210 => (1 << 50) / chunk,
            211 => (1 << 50) / chunk - 1,
            212 => (1 << 50) / chunk + 1,
            213 => 1 << 40,
            214 => 1 << 32,
            other => u64::from(other - 215) * (chunk / 4) + 3,
        }
    }

    /// Chooses the size of a disk that had one; most are the same.
    pub(super) fn size(&mut self, had: u64) -> u64 {
        let chunk = CHUNK_BYTES as u64;
        match self.byte() {
            0..100 => had,
            small @ 100..200 => had.saturating_add(u64::from(small - 99) * chunk / 32),
            200..220 => had / chunk * chunk,
            220..240 => had.div_ceil(chunk) * chunk,
            _ => self.number(),
        }
    }
}

/// Where the document has numbers.
pub(super) const NUMBERS: [&str; 16] = [
    "/keep/last",
    "/every_s",
    "/versions/0/version",
    "/versions/0/time",
    "/versions/0/disks/0/bytes",
    "/versions/0/disks/1/bytes",
    "/versions/1/version",
    "/versions/1/disks/0/bytes",
    "/versions/1/disks/1/bytes",
    "/stage/bytes",
    "/stage/version/version",
    "/stage/version/disks/0/bytes",
    "/stage/version/disks/1/bytes",
    "/stamps/0/bytes",
    "/stamps/1/written/0",
    "/id/0",
];

/// Changes the document. The paths in it stay in the folder of this process.
pub(super) fn change_document(document: &mut Value, root: &Path, input: &mut Input<'_>) {
    let none = &mut Value::Null;
    match input.below(26) {
        at @ 0..16 => {
            let number = input.number();
            if let Some(value) = document.pointer_mut(NUMBERS[at]) {
                *value = number.into();
            }
        }
        16 => {
            let paths = [
                "images/0",
                "images/1",
                "images/2",
                "images",
                "replica/arriving",
                "replica/digests.0",
                "replica/undo.2.1",
                "replica/replica.json",
            ];
            let at = format!("/disks/{}/path", input.below(2));
            let path = root.join(paths[input.below(paths.len())]);
            *document.pointer_mut(&at).unwrap_or(none) = json!(path);
        }
        17 => {
            let lists = [
                "/versions",
                "/disks",
                "/versions/0/disks",
                "/stage/version/disks",
            ];
            let list = document.pointer_mut(lists[input.below(lists.len())]);
            let list = list.and_then(Value::as_array_mut);
            let (which, times) = (input.below(3), input.below(4));
            if let Some(list) = list {
                let one = list.get(which).cloned();
                match times {
                    0 => list.truncate(which),
                    1 => list.reverse(),
                    times => list.extend(one.into_iter().cycle().take(times)),
                }
            }
        }
        18 => document["versions"] = json!([]),
        19 => {
            let version = document.pointer(&format!("/versions/{}", input.below(3)));
            let version = version.cloned().unwrap_or_default();
            document["stage"] = json!({ "version": version, "bytes": input.number() });
        }
        20 => document["stage"] = Value::Null,
        21 => {
            let digest = ["", "07", &"0".repeat(64)][input.below(3)].to_owned();
            let at = format!(
                "/versions/{}/disks/{}/digest",
                input.below(3),
                input.below(2)
            );
            *document.pointer_mut(&at).unwrap_or(none) = digest.into();
        }
        22 => {
            let version = document.pointer_mut("/stage/version/disks/0/digest");
            *version.unwrap_or(none) = "0".repeat(64).into();
        }
        23 => {
            let at = format!("/versions/{}/consistent", input.below(3));
            *document.pointer_mut(&at).unwrap_or(none) = (input.byte() & 1 == 1).into();
        }
        24 => document["guest"] = ["", "a/b", "db"][input.below(3)].into(),
        _ => {
            let at = format!("/disks/{}/name", input.below(2));
            *document.pointer_mut(&at).unwrap_or(none) = ["", "vd1", "vd7"][input.below(3)].into();
        }
    }
}

/// Returns a file of records.
pub(super) fn record_file(input: &mut Input<'_>) -> Vec<u8> {
    let mut file = Vec::new();
    for _ in 0..1 + input.below(4) {
        let (disk, chunk) = (input.below(4), input.number());
        let length = match input.below(4) {
            0 => 0,
            1 => 700,
            _ => CHUNK_BYTES,
        };
        let content = content(length, input.byte());
        let some = Some(&content[..]).filter(|it| !it.is_empty());
        let record = chunk_record(disk, chunk, some);
        let mut rest = record.encode().expect("it is one of the format").1;
        if input.below(8) == 7 {
            change_file(&mut rest, input);
        }
        file.extend((rest.len() as u32).to_le_bytes());
        file.extend(rest);
    }
    file
}

pub(super) fn change_file(content: &mut Vec<u8>, input: &mut Input<'_>) {
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
