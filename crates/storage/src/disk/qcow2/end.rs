//! Finds where the content of an image ends, by its refcounts: the size of a volume does not say
//! it.

use super::{HEAD_BYTES, read, word_at};
use crate::disk::Disk;
use std::io;

/// QEMU opens no image with a longer table of refcounts.
const TABLE_BYTES_MAX: u64 = 8 << 20;
/// The bits of an entry of the table that hold the offset of a block of refcounts.
const OFFSET: u64 = 0xffff_ffff_ffff_fe00;
/// The refcounts may be out of date (*incompatible features*).
const DIRTY: u32 = 1;

/// Returns the end of the last cluster that is used, in bytes. Returns the size of the disk if the
/// image does not say it. No program may have the image open for writing.
pub fn end_bytes(disk: &dyn Disk) -> io::Result<u64> {
    let size = disk.size_bytes();
    let mut head = vec![0; size.min(HEAD_BYTES as u64) as usize];
    disk.read(0, &mut head)?;
    let image = read(&head).map_err(io::Error::other)?.image;
    let word = |at: usize| word_at(&head, at).unwrap_or(0);
    let (bits, dirty) = match image.version {
        2 => (16, false),
        _ if word(96) > 6 => return Err(io::Error::other("its refcounts are too wide")),
        _ => (1_u64 << word(96), word(76) & DIRTY != 0),
    };
    if dirty {
        return Ok(size);
    }
    let cluster_bytes = 1_u64 << image.cluster_bits;
    let table_at = u64::from(word(48)) << 32 | u64::from(word(52));
    let table_bytes = u64::from(word(56)) * cluster_bytes;
    let table_end = table_at.checked_add(table_bytes);
    if table_bytes > TABLE_BYTES_MAX || table_end.is_none_or(|end| end > size) {
        return Err(io::Error::other("its table of refcounts is out of place"));
    }
    let mut table = vec![0; table_bytes as usize];
    disk.read(table_at, &mut table)?;
    let mut block = vec![0; cluster_bytes as usize];
    let entries = table.chunks_exact(8).enumerate().rev();
    for (index, entry) in entries {
        let entry: [u8; 8] = entry.try_into().map_err(io::Error::other)?;
        let at = u64::from_be_bytes(entry) & OFFSET;
        if at == 0 {
            continue;
        }
        disk.read(at, &mut block)?;
        let Some(last) = block.iter().rposition(|byte| *byte != 0) else {
            continue;
        };
        // Refcounts of less than a byte begin at its lowest bit.
        let bit = last as u64 * 8 + u64::from(block[last].ilog2());
        let of_block = if bits < 8 { bit } else { last as u64 * 8 } / bits;
        let cluster = index as u64 * (cluster_bytes * 8 / bits) + of_block;
        let end = cluster.saturating_add(1).saturating_mul(cluster_bytes);
        return Ok(end.min(size));
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::RawDisk;
    use std::fs::File;
    use std::process::Command;

    #[test]
    fn an_image_ends_where_qemu_says() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image.qcow2");
        let run = |program: &str, words: &[&str]| {
            let output = Command::new(program).args(words).arg(&path).output();
            let output = output.unwrap();
            assert!(output.status.success(), "{words:?}: {output:?}");
            String::from_utf8(output.stdout).unwrap()
        };
        for options in [
            "compat=v3",
            "compat=0.10",
            "compat=v3,cluster_size=512",
            "compat=v3,refcount_bits=1",
            "compat=v3,refcount_bits=4",
            "compat=v3,refcount_bits=8",
            "compat=v3,refcount_bits=64",
        ] {
            let mut create = Command::new("qemu-img");
            create.args(["create", "-q", "-f", "qcow2", "-o", options]);
            assert!(create.arg(&path).arg("64M").status().unwrap().success());
            for write in ["write -q 0 64k", "write -q 40M 1000k", "discard 0 64k"] {
                run("qemu-io", &["-f", "qcow2", "-c", write]);
                let words = ["check", "-f", "qcow2", "--output=json"];
                let checked: serde_json::Value =
                    serde_json::from_str(&run("qemu-img", &words)).unwrap();
                let expected = checked["image-end-offset"].as_u64().unwrap();
                let file = File::options().write(true).open(&path).unwrap();
                let length = file.metadata().unwrap().len();
                // As on a larger volume.
                file.set_len(128 << 20).unwrap();
                let disk = RawDisk::open_to_read(&path).unwrap();
                assert_eq!(end_bytes(&disk).unwrap(), expected, "{options}: {write}");
                file.set_len(length).unwrap();
            }
        }
        let file = File::options().write(true).open(&path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[1], 79).unwrap();
        let disk = RawDisk::open_to_read(&path).unwrap();
        assert_eq!(end_bytes(&disk).unwrap(), disk.size_bytes());
    }
}
