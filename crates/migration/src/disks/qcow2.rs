//! Disks in images that grow (qcow2). What moves is the image's file, byte for byte: snapshots,
//! bitmaps and
//! packed clusters come along by themselves. Four things differ from other disks:
//!
//! - Their region is as long as the file may become. When it becomes longer the move is given up.
//! - What is shown to QEMU is larger still, so that its guest never comes to the end.
//! - How long the file is in the end is said beside what is left of it, and the destination cuts
//!   its own there.
//! - What QEMU reads when it opens the image is there before the guest runs, whatever else is
//!   left: QEMU asks for
//!   that in the middle of `cont`, when nobody would bring it.

use crate::host::base_images;
use longhaul_api::{ApiError, ErrorCode};
use longhaul_protocol::disk::DiskFormat;
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use longhaul_storage::disk::qcow2::{self, Backing};
use longhaul_storage::disk::{Disk, ExportSize};
use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

const BLOCK: u64 = BLOCK_SIZE as u64;

/// The size that QEMU sees below its format node.
pub(crate) const SHOWN: ExportSize = ExportSize::Bytes(1 << 60);

/// An image that grows.
#[derive(Debug)]
pub(crate) struct Growing {
    pub(crate) format: DiskFormat,
    /// How long it may become while it moves.
    pub(crate) longest: u64,
    /// What it says that it stands on.
    pub(crate) backing: Option<Backing>,
}

/// What kind of image it is.
pub(crate) fn look(name: &str, image: &Path) -> Result<Growing, ApiError> {
    let refused = |why: String| {
        let text = format!("disk {name}: {why}");
        ApiError::new(ErrorCode::Refused, text)
    };
    let failed = |error: &dyn std::fmt::Display| refused(error.to_string());
    let about = fs::metadata(image).map_err(|error| failed(&error))?;
    if about.file_type().is_block_device() {
        let why = "a qcow2 image on a volume does not move with its guest, only one in a file";
        return Err(refused(why.to_owned()).hint("put it where both hosts see it, or into a file"));
    }
    let head = base_images::head(image).map_err(|error| failed(&error))?;
    let head = qcow2::read(&head).map_err(|error| failed(&error).hint(error.hint().to_owned()))?;
    let longest = about.len().saturating_add(qcow2::growth_bytes(&head.image));
    Ok(Growing {
        format: DiskFormat::Qcow2(head.image),
        longest: longest.next_multiple_of(BLOCK),
        backing: head.backing,
    })
}

/// The blocks that QEMU reads when it opens the image, in ascending order.
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

/// The blocks that a range of bytes touches.
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
        let longest = growing.longest;
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
