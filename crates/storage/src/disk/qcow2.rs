//! What the header of a qcow2 image says, as far as a move has to know it, and a header without an
//! image behind it. The format is that of QEMU's docs/interop/qcow2.txt.

use longhaul_protocol::disk::Qcow2;

/// What is read of an image: its header, without what versions after 3 may add.
pub const HEADER_BYTES: usize = 104;

const MAGIC: [u8; 4] = *b"QFI\xfb";
/// QEMU opens no image whose first table is longer.
const L1_BYTES_MAX: u64 = 32 << 20;
/// What is asked of whoever opens an image (*incompatible features*).
const DIRTY: u64 = 1;
const CORRUPT: u64 = 1 << 1;
const DATA_FILE: u64 = 1 << 2;
const COMPRESSION_TYPE: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;
/// Smallest cluster whose parts may be allocated by themselves.
const EXTENDED_CLUSTER_BITS_MIN: u8 = 14;
/// What is expected beside what follows from the size of a disk.
const GROWTH_BESIDE_BYTES: u64 = 64 << 20;
/// Most that an image is expected to grow: what is not there yet costs memory in a move.
const GROWTH_BYTES_MAX: u64 = 1 << 40;

/// Why an image cannot be moved as it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Qcow2Error {
    /// It has another format.
    #[error("its image is not in qcow2, though the configuration says so")]
    Other,
    /// It stands on another image.
    #[error("its image stands on another one (a backing file), which would stay behind")]
    Backing,
    /// It is not all of the disk.
    #[error("its content stands in a second file (an external data file), which would stay behind")]
    DataFile,
    /// It needs a secret to be opened.
    #[error("its image is encrypted, and the destination has no key to it")]
    Encrypted,
    /// QEMU has found it to be damaged.
    #[error("its image is marked as corrupt")]
    Corrupt,
    /// It is of a kind that came later, or its header is damaged.
    #[error("its image is a qcow2 that is not understood: {0}")]
    Unknown(String),
}

impl Qcow2Error {
    /// What to do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Other => "give the image its real `format` in the agent's configuration",
            Self::Backing | Self::DataFile | Self::Encrypted => {
                "put it where both hosts see it, or make one plain image of it: \
                 qemu-img convert -O qcow2 OLD NEW"
            }
            Self::Corrupt => "look at it, with its guest shut down: qemu-img check IMAGE",
            Self::Unknown(_) => "put it where both hosts see it, or make it a raw one",
        }
    }
}

fn unknown<T>(why: impl Into<String>) -> Result<T, Qcow2Error> {
    Err(Qcow2Error::Unknown(why.into()))
}

/// Reads a header: an image that is in use says this of itself as well.
pub fn read(header: &[u8]) -> Result<Qcow2, Qcow2Error> {
    let Some((header, _)) = header.split_first_chunk::<HEADER_BYTES>() else {
        return Err(Qcow2Error::Other);
    };
    let word = |at: usize| {
        let bytes = &header[at..at + 4];
        bytes
            .iter()
            .fold(0, |number: u32, byte| number << 8 | u32::from(*byte))
    };
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
    if long(8) != 0 {
        return Err(Qcow2Error::Backing);
    }
    if incompatible & DATA_FILE != 0 {
        return Err(Qcow2Error::DataFile);
    }
    if word(32) != 0 {
        return Err(Qcow2Error::Encrypted);
    }
    if incompatible & CORRUPT != 0 {
        return Err(Qcow2Error::Corrupt);
    }
    // A dirty one is written with lazy refcounts: QEMU puts them right when it lets go of it.
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
    Ok(image)
}

/// How many entries the first table of an image has, at least.
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

/// The beginning of a file that QEMU opens as such an image, though all else of it is zeros: less than
/// 4 KiB. It is fit for nothing but to be opened, until its content has come.
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
    // Not encrypted; the first table; one cluster for refcounts; no snapshots.
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

/// By how much the file of an image may yet grow while it moves. All of the disk may be written
/// once more, where what is there belongs to a snapshot, or is packed; and an eighth of that is enough for
/// tables and bitmaps also where clusters are smallest.
pub fn growth_bytes(image: &Qcow2) -> u64 {
    let disk_bytes = image.disk_bytes;
    let growth = disk_bytes.saturating_add(disk_bytes / 8);
    growth
        .saturating_add(GROWTH_BESIDE_BYTES)
        .min(GROWTH_BYTES_MAX)
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
        header.truncate(HEADER_BYTES);
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
            let image = read(&header(&theirs)).unwrap();
            let alone = header_alone(&image).unwrap();
            assert_eq!(read(&alone), Ok(image));
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
        assert_eq!(with(15, 104), Err(Qcow2Error::Backing));
        assert_eq!(with(35, 1), Err(Qcow2Error::Encrypted));
        assert_eq!(with(79, 4), Err(Qcow2Error::DataFile));
        assert_eq!(with(79, 2), Err(Qcow2Error::Corrupt));
        assert_eq!(with(79, 1), Ok(plain), "lazy refcounts");
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
        // The features of version 3 are no part of version 2.
        let mut second = header.clone();
        (second[7], second[79]) = (2, 4);
        assert_eq!(read(&second).map(|image| image.version), Ok(2));
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
