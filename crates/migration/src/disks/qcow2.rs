//! Disks in images that grow (qcow2). The image's file moves byte for byte, so snapshots, bitmaps
//! and compressed clusters move with it. Such disks differ from others in four ways:
//!
//! - Their region is as long as the file may become. If the file becomes longer, the migration is
//!   given up.
//! - QEMU sees an even larger size, so that the guest never reaches the end.
//! - The final length of the file is sent with the list of pending blocks. The destination
//!   truncates its own file to that length.
//! - The blocks that QEMU reads when it opens the image arrive before the guest runs. QEMU reads
//!   them in the middle of `cont`, when no fetch could be answered.

use crate::host::base_images;
use longhaul_api::{ApiError, ErrorCode};
use longhaul_protocol::disk::DiskFormat;
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use longhaul_storage::disk::qcow2::{self, Backing};
use longhaul_storage::disk::{Disk, ExportSize};
use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

const BLOCK: u64 = BLOCK_SIZE as u64;

/// The size that QEMU sees below its format node: 1 EiB.
pub(crate) const SHOWN: ExportSize = ExportSize::Bytes(1 << 60);

/// An image that grows.
#[derive(Debug)]
pub(crate) struct Growing {
    pub(crate) format: DiskFormat,
    /// The largest size that the image may reach during the migration: that of its volume, if it is
    /// on one.
    pub(crate) size: ExportSize,
    /// The backing file that its header names.
    pub(crate) backing: Option<Backing>,
}

/// Reads the format, size limit and backing file of an image.
pub(crate) fn look(name: &str, image: &Path) -> Result<Growing, ApiError> {
    let refused = |why: String| {
        let text = format!("disk {name}: {why}");
        ApiError::new(ErrorCode::Refused, text)
    };
    let failed = |error: &dyn std::fmt::Display| refused(error.to_string());
    let about = fs::metadata(image).map_err(|error| failed(&error))?;
    let head = base_images::head(image).map_err(|error| failed(&error))?;
    let head = qcow2::read(&head).map_err(|error| failed(&error).hint(error.hint().to_owned()))?;
    let longest = about.len().saturating_add(qcow2::growth_bytes(&head.image));
    Ok(Growing {
        format: DiskFormat::Qcow2(head.image),
        size: match about.file_type().is_block_device() {
            true => ExportSize::OfFile,
            false => ExportSize::Bytes(longest.next_multiple_of(BLOCK)),
        },
        backing: head.backing,
    })
}

/// Returns the blocks that QEMU reads when it opens the image, in ascending order.
pub(crate) fn opened_with(disk: &dyn Disk) -> io::Result<Vec<BlockRange>> {
    let mut blocks = Vec::new();
    qcow2::opened_with(disk, &mut |bytes| {
        blocks.push(blocks_with(&bytes));
        Ok(())
    })?;
    blocks.sort_unstable_by_key(|range: &BlockRange| range.start);
    let mut merged: Vec<BlockRange> = Vec::new();
    for range in blocks {
        match merged.last_mut() {
            Some(last) if range.start <= last.end() => {
                *last = BlockRange::new(last.start, last.end().max(range.end()) - last.start);
            }
            _ => merged.push(range),
        }
    }
    Ok(merged)
}

/// Returns the blocks that a range of bytes overlaps.
pub(crate) fn blocks_with(bytes: &Range<u64>) -> BlockRange {
    let first = bytes.start / BLOCK;
    BlockRange::new(first, bytes.end.div_ceil(BLOCK).saturating_sub(first))
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_protocol::disk::Qcow2;

    const IMAGE: Qcow2 = Qcow2 {
        version: 3,
        cluster_bits: 16,
        extended_l2: false,
        disk_bytes: 8 << 20,
    };

    #[test]
    fn what_would_not_come_along_as_a_whole_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let mut bytes = qcow2::header_alone(&IMAGE).unwrap();
        bytes.resize(200_000, 0);
        fs::write(&path, &bytes).unwrap();
        let growing = look("vda", &path).unwrap();
        let ExportSize::Bytes(longest) = growing.size else {
            panic!("{growing:?}")
        };
        assert_eq!(growing.format, DiskFormat::Qcow2(IMAGE));
        assert_eq!(growing.backing, None);
        assert!(longest > 200_000 + (8 << 20) && longest.is_multiple_of(4096));
        let refusal = || {
            let error = look("vda", &path).unwrap_err();
            assert_eq!(error.code, ErrorCode::Refused);
            assert!(error.hint.is_some());
            error.message
        };
        // An external data file.
        bytes[79] = 4;
        fs::write(&path, &bytes).unwrap();
        let stands = refusal();
        assert!(
            stands.starts_with("disk vda: its content stands in a second file"),
            "{stands}"
        );
        fs::write(&path, [0; 60]).unwrap();
        assert!(refusal().contains("is not in qcow2"));
        let gone = look("vda", &folder.path().join("none"));
        assert!(gone.unwrap_err().message.contains("No such file"));
    }
}
