//! Disks in images that grow (qcow2). What moves is the image's file, byte for byte: snapshots, bitmaps and
//! packed clusters come along by themselves. Three things differ from other disks:
//!
//! - Their region is as long as the file may become. When it becomes longer the move is given up.
//! - What is shown to QEMU is larger still, so that its guest never comes to the end.
//! - How long the file is in the end is said beside what is left of it, and the destination cuts its own there.

use longhaul_api::{ApiError, DiskChoice, ErrorCode};
use longhaul_engine::strategy::{Promise, Strategy};
use longhaul_protocol::BLOCK_SIZE;
use longhaul_protocol::disk::DiskFormat;
use longhaul_storage::disk::qcow2::{self, HEADER_BYTES};
use longhaul_storage::disk::{Disk as _, ExportSize, RawDisk};
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// The size that QEMU sees below its format node.
pub(super) const SHOWN: ExportSize = ExportSize::Bytes(1 << 60);

/// What kind of image it is, and how long it may become while it moves.
pub(super) fn look(
    name: &str,
    image: &Path,
    strategy: Strategy,
) -> Result<(DiskFormat, u64), ApiError> {
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
    if strategy.promise != Promise::Everything {
        let why = format!(
            "it is a qcow2 image, which moves by {} or {}, and not by {}",
            DiskChoice::Precopy,
            DiskChoice::Mirror,
            strategy.name
        );
        return Err(refused(why).hint("leave `--disks` out, or choose one of those"));
    }
    let file = RawDisk::open_to_read(image).map_err(|error| failed(&error))?;
    let mut header = [0; HEADER_BYTES];
    let length = file.size_bytes().min(HEADER_BYTES as u64) as usize;
    let read = file.read(0, &mut header[..length]);
    read.map_err(|error| failed(&error))?;
    let qcow2 = qcow2::read(&header[..length])
        .map_err(|error| failed(&error).hint(error.hint().to_owned()))?;
    let longest = file
        .size_bytes()
        .saturating_add(qcow2::growth_bytes(&qcow2));
    let longest = longest.next_multiple_of(BLOCK_SIZE as u64);
    Ok((DiskFormat::Qcow2(qcow2), longest))
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
        let (format, longest) = look("vda", &path, Strategy::MIRROR).unwrap();
        assert_eq!(format, DiskFormat::Qcow2(IMAGE));
        assert!(longest > 200_000 + (8 << 20) && longest % 4096 == 0);
        let refusal = |strategy| {
            let error = look("vda", &path, strategy).unwrap_err();
            assert_eq!(error.code, ErrorCode::Refused);
            assert!(error.hint.is_some());
            error.message
        };
        let by = refusal(Strategy::HYBRID);
        assert!(by.contains("disk vda: it is a qcow2 image") && by.ends_with("not by hybrid"));
        // The offset of a backing file's name.
        bytes[14] = 1;
        fs::write(&path, &bytes).unwrap();
        let stands = refusal(Strategy::PRECOPY);
        assert!(
            stands.starts_with("disk vda: its image stands on another one"),
            "{stands}"
        );
        fs::write(&path, [0; 60]).unwrap();
        assert!(refusal(Strategy::PRECOPY).contains("is not in qcow2"));
        let gone = look("vda", &folder.path().join("none"), Strategy::PRECOPY);
        assert!(gone.unwrap_err().message.contains("No such file"));
    }
}
