//! The header of qcow2 images: the properties that a move depends on, a header without content
//! behind it, and [the ranges that QEMU reads on opening](opened_with). The format is that of
//! QEMU's docs/interop/qcow2.txt.

mod empty;
mod end;
mod opening;

pub use empty::empty;
pub use end::end_bytes;
pub use opening::opened_with;

use longhaul_protocol::disk::Qcow2;

/// The length of an image's header, without the additions of versions after 3.
pub const HEADER_BYTES: usize = 104;
/// The part of an image that is parsed: its header, and what QEMU writes directly behind it.
pub const HEAD_BYTES: usize = 4096;

const MAGIC: [u8; 4] = *b"QFI\xfb";
/// QEMU opens no image with a longer first table.
const L1_BYTES_MAX: u64 = 32 << 20;
/// Features that every reader of an image has to support (*incompatible features*).
const DIRTY: u64 = 1;
const CORRUPT: u64 = 1 << 1;
const DATA_FILE: u64 = 1 << 2;
const COMPRESSION_TYPE: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;
/// The format of the backing file (*backing file format name*), among the header extensions.
const BACKING_FORMAT: u32 = 0xE279_2ACA;
/// QEMU accepts no longer name of a backing file.
const NAME_BYTES_MAX: usize = 1023;
/// The smallest cluster that may be allocated in parts.
const EXTENDED_CLUSTER_BITS_MIN: u8 = 14;
/// Expected growth besides the part that depends on the size of the disk.
const GROWTH_BESIDE_BYTES: u64 = 64 << 20;
/// Limit on the expected growth of an image: space for it costs memory in a move.
const GROWTH_BYTES_MAX: u64 = 1 << 40;

/// A reason why an image cannot be moved as it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Qcow2Error {
    /// It has another format.
    #[error("its image is not in qcow2, though the configuration says so")]
    Other,
    /// It does not hold the whole disk.
    #[error("its content stands in a second file (an external data file), which would stay behind")]
    DataFile,
    /// It is encrypted and needs a secret.
    #[error("its image is encrypted, and the destination has no key to it")]
    Encrypted,
    /// QEMU has marked it as corrupt.
    #[error("its image is marked as corrupt")]
    Corrupt,
    /// It is of a later version, or its header is damaged.
    #[error("its image is a qcow2 that is not understood: {0}")]
    Unknown(String),
}

impl Qcow2Error {
    /// Returns the remedy.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Other => "give the image its real `format` in the agent's configuration",
            Self::DataFile | Self::Encrypted => {
                "put it where both hosts see it, or make one plain image of it: \
                 qemu-img convert -O qcow2 OLD NEW"
            }
            Self::Corrupt => "look at it, with its guest shut down: qemu-img check IMAGE",
            Self::Unknown(_) => "put it where both hosts see it, or make it a raw one",
        }
    }
}

/// The properties of an image from its header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// The image.
    pub image: Qcow2,
    /// The image that it is an overlay of (*backing file*).
    pub backing: Option<Backing>,
}

/// A backing file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backing {
    /// Its name, mostly a path, to any file of any host.
    pub name: String,
    /// Its format; where the image does not name it, QEMU guesses it from the content.
    pub format: Option<String>,
}

fn unknown<T>(why: impl Into<String>) -> Result<T, Qcow2Error> {
    Err(Qcow2Error::Unknown(why.into()))
}

fn word_at(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..)?.first_chunk::<4>()?;
    Some(u32::from_be_bytes(*bytes))
}

/// Parses the beginning of an image, [`HEAD_BYTES`] of it or all of a shorter one. It is valid for
/// an image in use as well.
pub fn read(head: &[u8]) -> Result<Head, Qcow2Error> {
    let Some((header, _)) = head.split_first_chunk::<HEADER_BYTES>() else {
        return Err(Qcow2Error::Other);
    };
    let word = |at: usize| word_at(header, at).unwrap_or(0);
    let long = |at: usize| u64::from(word(at)) << 32 | u64::from(word(at + 4));
    if header[..4] != MAGIC {
        return Err(Qcow2Error::Other);
    }
    let version = match word(4) {
        version @ (2 | 3) => version as u8,
        other => return unknown(format!("it is of version {other}")),
    };
    let incompatible = match version {
        3 => long(72),
        _ => 0,
    };
    if incompatible & DATA_FILE != 0 {
        return Err(Qcow2Error::DataFile);
    }
    if word(32) != 0 {
        return Err(Qcow2Error::Encrypted);
    }
    if incompatible & CORRUPT != 0 {
        return Err(Qcow2Error::Corrupt);
    }
    // A dirty image is written with lazy refcounts, which QEMU repairs when it closes the image.
    let known = DIRTY | COMPRESSION_TYPE | EXTENDED_L2;
    if incompatible & !known != 0 {
        return unknown(format!("it needs features {:#x}", incompatible & !known));
    }
    let image = Qcow2 {
        version,
        cluster_bits: u8::try_from(word(20)).unwrap_or(u8::MAX),
        extended_l2: incompatible & EXTENDED_L2 != 0,
        disk_bytes: long(24),
    };
    l1_entries(&image)?;
    let backing = match long(8) {
        0 => None,
        name_at => Some(backing(head, &image, name_at, word(16))?),
    };
    Ok(Head { image, backing })
}

/// Parses the name and format of an image's backing file.
fn backing(
    head: &[u8],
    image: &Qcow2,
    name_at: u64,
    name_bytes: u32,
) -> Result<Backing, Qcow2Error> {
    let elsewhere = || Qcow2Error::Unknown("the name of its backing file is out of place".into());
    // QEMU keeps all of this in the first cluster.
    let cluster_bytes = 1_usize << image.cluster_bits;
    let head = &head[..head.len().min(cluster_bytes).min(HEAD_BYTES)];
    let begins = usize::try_from(name_at).map_err(|_| elsewhere())?;
    let length = usize::try_from(name_bytes).map_err(|_| elsewhere())?;
    let ends = begins.checked_add(length).ok_or_else(elsewhere)?;
    let name = head.get(begins..ends).ok_or_else(elsewhere)?;
    let name = match text(name) {
        Some(name) if (1..=NAME_BYTES_MAX).contains(&length) => name,
        _ => return unknown("its backing file has no proper name"),
    };
    let mut at = match image.version {
        2 => 72,
        _ => word_at(head, 100).map_or(usize::MAX, |bytes| bytes as usize),
    };
    if at < 72 || at > begins {
        return Err(elsewhere());
    }
    let mut format = None;
    while at < begins {
        let field = |place: usize| word_at(&head[..begins], place);
        let (Some(kind), Some(length)) = (field(at), field(at + 4)) else {
            break;
        };
        if kind == 0 {
            break;
        }
        let content = at + 8..(at + 8).saturating_add(length as usize);
        let Some(content) = head[..begins].get(content) else {
            return unknown("what follows its header is damaged");
        };
        if kind == BACKING_FORMAT {
            let Some(text) = text(content) else {
                return unknown("the format of its backing file has no proper name");
            };
            format = Some(text);
        }
        at += 8 + content.len().next_multiple_of(8);
    }
    Ok(Backing { name, format })
}

fn text(bytes: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(bytes).ok()?;
    (!text.contains(char::is_control)).then(|| text.to_owned())
}

/// Returns the least number of entries in an image's first table.
fn l1_entries(image: &Qcow2) -> Result<u32, Qcow2Error> {
    let bits = image.cluster_bits;
    let extended = image.extended_l2;
    if !(9..=21).contains(&bits) || extended && bits < EXTENDED_CLUSTER_BITS_MIN {
        return unknown(format!("its clusters have 2^{bits} bytes"));
    }
    if !matches!(image.version, 2 | 3) || extended && image.version == 2 {
        return unknown(format!("it is of version {}", image.version));
    }
    let entry_bits = if extended { 4 } else { 3 };
    let table_bytes = 1_u64 << (2 * bits - entry_bits);
    let entries = image.disk_bytes.div_ceil(table_bytes);
    if entries == 0 || entries * 8 > L1_BYTES_MAX {
        return unknown(format!("its disk has {} bytes", image.disk_bytes));
    }
    Ok(entries as u32)
}

/// Returns the beginning of a file that QEMU opens as such an image although the rest of it is
/// zeros: less than 4 KiB. The file can only be opened until its content has arrived.
pub fn header_alone(image: &Qcow2) -> Result<Vec<u8>, Qcow2Error> {
    let entries = l1_entries(image)?;
    let cluster_bytes = 1_u64 << image.cluster_bits;
    let mut bytes = Vec::from(MAGIC);
    let mut words = |words: &[u32]| {
        let words = words.iter().flat_map(|word| word.to_be_bytes());
        bytes.extend(words);
    };
    let pair = |long: u64| [(long >> 32) as u32, long as u32];
    let [size_high, size_low] = pair(image.disk_bytes);
    let ([_, l1], [_, refcounts]) = (pair(2 * cluster_bytes), pair(cluster_bytes));
    // No backing file.
    words(&[u32::from(image.version), 0, 0, 0]);
    words(&[u32::from(image.cluster_bits), size_high, size_low]);
    // Not encrypted; the first table; one cluster of refcounts; no snapshots.
    words(&[0, entries, 0, l1, 0, refcounts, 1, 0, 0, 0]);
    if image.version == 3 {
        let features = if image.extended_l2 { EXTENDED_L2 } else { 0 };
        words(&[0, features as u32, 0, 0, 0, 0]);
        // Refcounts of 16 bits.
        words(&[4, HEADER_BYTES as u32]);
    }
    bytes.resize(HEADER_BYTES, 0);
    Ok(bytes)
}

/// Returns by how much an image's file may grow while it moves. The whole disk may be written once
/// more if its present clusters belong to a snapshot or are compressed; an eighth of that is enough
/// for tables and bitmaps even with the smallest clusters.
pub fn growth_bytes(image: &Qcow2) -> u64 {
    let disk_bytes = image.disk_bytes;
    let growth = disk_bytes.saturating_add(disk_bytes / 8);
    growth
        .saturating_add(GROWTH_BESIDE_BYTES)
        .min(GROWTH_BYTES_MAX)
}

/// Returns the length of an image whose disk is written completely, without snapshots and bitmaps.
pub fn full_bytes(image: &Qcow2) -> u64 {
    let clusters = image.disk_bytes.div_ceil(1 << image.cluster_bits);
    // An entry of a table, and a refcount of at most 64 bits, for each cluster.
    let tables = clusters.saturating_mul(if image.extended_l2 { 24 } else { 16 });
    let disk_bytes = clusters << image.cluster_bits;
    // Tables of tables, each of at least a cluster.
    let beside = tables / 64 + (8 << image.cluster_bits);
    disk_bytes.saturating_add(tables).saturating_add(beside)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::process::Command;

    fn qemu_img(words: &[&str], image: &Path) -> String {
        let mut command = Command::new("qemu-img");
        let output = command.args(words).arg(image).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn header(path: &Path) -> Vec<u8> {
        let mut header = std::fs::read(path).unwrap();
        header.truncate(HEAD_BYTES);
        header
    }

    #[test]
    fn qemu_opens_what_is_made_and_says_the_same_of_it() {
        let folder = tempfile::tempdir().unwrap();
        for (options, size) in [
            ("compat=1.1", "24M"),
            ("compat=0.10", "1G"),
            ("cluster_size=512", "100M"),
            ("cluster_size=2M", "3T"),
            ("cluster_size=16k,extended_l2=on", "1G"),
            ("lazy_refcounts=on,compression_type=zstd", "7M"),
        ] {
            let (theirs, ours) = (folder.path().join("theirs"), folder.path().join("ours"));
            let create = ["create", "-q", "-f", "qcow2", "-o", options];
            let mut command = Command::new("qemu-img");
            let made = command.args(create).arg(&theirs).arg(size).status();
            assert!(made.unwrap().success());
            let Head { image, backing } = read(&header(&theirs)).unwrap();
            assert_eq!(backing, None);
            let alone = header_alone(&image).unwrap();
            assert_eq!(read(&alone).map(|head| head.image), Ok(image));
            std::fs::write(&ours, alone).unwrap();
            let file = std::fs::File::options().write(true).open(&ours).unwrap();
            file.set_len(64 << 20).unwrap();
            let about = |path: &Path| {
                let info = qemu_img(&["info", "-f", "qcow2", "--output=json"], path);
                let info: serde_json::Value = serde_json::from_str(&info).unwrap();
                let data = &info["format-specific"]["data"];
                let same = ["virtual-size", "cluster-size"].map(|key| info[key].clone());
                (same, data["compat"].clone(), data["extended-l2"].clone())
            };
            assert_eq!(about(&ours), about(&theirs), "{options}");
            let mut command = Command::new("qemu-io");
            let look = ["-r", "-f", "qcow2", "-c", "read -P 0 0 64k"];
            let looked = command.args(look).arg(&ours).output().unwrap();
            assert!(looked.status.success(), "{options}: {looked:?}");
        }
    }

    #[test]
    fn what_would_not_come_along_is_refused() {
        let plain = Qcow2 {
            version: 3,
            cluster_bits: 16,
            extended_l2: false,
            disk_bytes: 1 << 30,
        };
        let header = header_alone(&plain).unwrap();
        let with = |at: usize, byte: u8| {
            let mut header = header.clone();
            header[at] = byte;
            read(&header)
        };
        assert_eq!(with(0, b'q'), Err(Qcow2Error::Other));
        assert_eq!(with(35, 1), Err(Qcow2Error::Encrypted));
        assert_eq!(with(79, 4), Err(Qcow2Error::DataFile));
        assert_eq!(with(79, 2), Err(Qcow2Error::Corrupt));
        let lazy = with(79, 1).map(|head| head.image);
        assert_eq!(lazy, Ok(plain), "lazy refcounts");
        for (at, byte) in [
            (7, 1),
            (7, 4),
            (79, 32),
            (72, 1),
            (23, 8),
            (23, 22),
            (20, 1),
        ] {
            let refusal = with(at, byte).unwrap_err();
            assert!(matches!(refusal, Qcow2Error::Unknown(_)), "{refusal}");
        }
        assert_eq!(read(&header[..103]), Err(Qcow2Error::Other));
        // The features of version 3 do not exist in version 2.
        let mut second = header.clone();
        (second[7], second[79]) = (2, 4);
        assert_eq!(read(&second).map(|head| head.image.version), Ok(2));
        for wrong in [
            Qcow2 {
                disk_bytes: 0,
                ..plain
            },
            Qcow2 {
                disk_bytes: 1 << 52,
                ..plain
            },
            Qcow2 {
                cluster_bits: 12,
                extended_l2: true,
                ..plain
            },
            Qcow2 {
                version: 2,
                extended_l2: true,
                ..plain
            },
            Qcow2 {
                version: 4,
                ..plain
            },
            Qcow2 {
                cluster_bits: 255,
                ..plain
            },
        ] {
            header_alone(&wrong).unwrap_err();
        }
    }

    #[test]
    fn what_an_image_stands_on_is_read_as_qemu_writes_it() {
        let folder = tempfile::tempdir().unwrap();
        let (below, image) = (folder.path().join("below.raw"), folder.path().join("image"));
        std::fs::write(&below, vec![1; 1 << 20]).unwrap();
        for options in ["compat=1.1", "compat=0.10", "cluster_size=4k"] {
            let words = [
                "create", "-q", "-f", "qcow2", "-F", "raw", "-o", options, "-b",
            ];
            let mut command = Command::new("qemu-img");
            let made = command.args(words).args([&below, &image]).status();
            assert!(made.unwrap().success());
            let head = header(&image);
            let expected = Backing {
                name: below.to_str().unwrap().to_owned(),
                format: Some("raw".to_owned()),
            };
            assert_eq!(read(&head).unwrap().backing, Some(expected), "{options}");
            // With any byte changed, the header is refused or has another meaning.
            for at in 0..256 {
                for byte in [0, 0x0a, 0xff] {
                    let mut wrong = head.clone();
                    wrong[at] = byte;
                    let _ = read(&wrong);
                }
            }
            let with = |at: usize, bytes: &[u8]| {
                let mut wrong = head.clone();
                wrong[at..at + bytes.len()].copy_from_slice(bytes);
                read(&wrong).map(|head| head.backing)
            };
            for (at, bytes) in [
                (8, &[0xff; 8][..]),
                (8, &[0, 0, 0, 0, 0, 0, 0xff, 0]),
                (8, &[0, 0, 0, 0, 0, 0, 0, 8]),
                (16, &[0, 0, 0, 0]),
                (16, &[0, 0, 8, 0]),
                (16, &[0xff; 4]),
            ] {
                let refusal = with(at, bytes).unwrap_err();
                assert!(matches!(refusal, Qcow2Error::Unknown(_)), "{refusal}");
            }
            let mut unsafe_name = head.clone();
            let at = word_at(&head, 12).unwrap() as usize;
            unsafe_name[at] = b'\n';
            read(&unsafe_name).unwrap_err();
            // Truncated in the middle of the name.
            read(&head[..at + 3]).unwrap_err();
        }
    }

    #[test]
    fn a_full_image_is_as_long_as_qemu_makes_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("full.qcow2");
        for cluster_bits in [9, 16] {
            let options = format!("cluster_size={},preallocation=falloc", 1 << cluster_bits);
            let mut create = Command::new("qemu-img");
            create.args(["create", "-q", "-f", "qcow2", "-o", &options]);
            assert!(create.arg(&path).arg("64M").status().unwrap().success());
            let full = full_bytes(&Qcow2 {
                version: 3,
                cluster_bits,
                extended_l2: false,
                disk_bytes: 64 << 20,
            });
            let made = std::fs::metadata(&path).unwrap().len();
            assert!(made <= full && full < made + made / 16, "{made} {full}");
        }
    }

    #[test]
    fn room_to_grow_is_for_all_of_the_disk_once_more_and_has_an_end() {
        let of = |disk_bytes| {
            growth_bytes(&Qcow2 {
                version: 3,
                cluster_bits: 9,
                extended_l2: false,
                disk_bytes,
            })
        };
        assert_eq!(of(1 << 30), (1 << 30) + (1 << 27) + (64 << 20));
        assert_eq!(of(u64::MAX), 1 << 40);
    }
}
