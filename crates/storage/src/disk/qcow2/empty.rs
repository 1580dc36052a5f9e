//! A qcow2 image without content.

use super::MAGIC;

const CLUSTER_BITS: u32 = 16;
const CLUSTER: usize = 1 << CLUSTER_BITS;
/// The clusters of the image: its header, its reference counts in two levels, and its first table.
const CLUSTERS: usize = 4;
const HEADER_BYTES: u32 = 104;
/// The disk that one entry of the first table maps, in bytes.
const DISK_BYTES_MAX: u64 = (CLUSTER as u64 / 8) << CLUSTER_BITS;

/// Returns the bytes of an image of version 3 whose disk reads as zeros; `None` for a disk of more
/// than 512 MiB.
pub fn empty(disk_bytes: u64) -> Option<Vec<u8>> {
    if disk_bytes > DISK_BYTES_MAX {
        return None;
    }
    let at = |cluster: usize| (cluster * CLUSTER) as u64;
    let mut header = MAGIC.to_vec();
    // The version; no backing file.
    add_words(&mut header, &[3, 0, 0, 0, CLUSTER_BITS]);
    header.extend(disk_bytes.to_be_bytes());
    // Not encrypted; one entry in the first table.
    add_words(&mut header, &[0, 1]);
    header.extend(at(3).to_be_bytes());
    header.extend(at(1).to_be_bytes());
    // One cluster in the table of reference counts; no snapshots; no features.
    add_words(&mut header, &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    // Reference counts of 16 bits.
    add_words(&mut header, &[4, HEADER_BYTES]);
    let mut image = header;
    image.resize(CLUSTERS * CLUSTER, 0);
    image[CLUSTER..CLUSTER + 8].copy_from_slice(&at(2).to_be_bytes());
    for counted in 0..CLUSTERS {
        let count = 2 * CLUSTER + 2 * counted;
        image[count..count + 2].copy_from_slice(&1_u16.to_be_bytes());
    }
    Some(image)
}

fn add_words(header: &mut Vec<u8>, words: &[u32]) {
    header.extend(words.iter().flat_map(|word| word.to_be_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn qemu_img(words: &[&str]) -> Option<String> {
        let done = Command::new("qemu-img").args(words).output().ok()?;
        let said = String::from_utf8_lossy(&done.stdout).into_owned();
        assert!(done.status.success(), "{words:?}: {done:?}");
        Some(said)
    }

    #[test]
    fn qemu_finds_no_fault_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let name = path.to_str().unwrap();
        for disk_bytes in [528 << 10, 64 << 20, DISK_BYTES_MAX] {
            std::fs::write(&path, empty(disk_bytes).unwrap()).unwrap();
            let Some(said) = qemu_img(&["check", "-f", "qcow2", name]) else {
                return;
            };
            assert!(said.contains("No errors"), "{said}");
            let about = qemu_img(&["info", "-f", "qcow2", "--output=json", name]).unwrap();
            let size = format!("\"virtual-size\": {disk_bytes}");
            assert!(about.contains(&size), "{about}");
        }
        assert_eq!(empty(DISK_BYTES_MAX + 1), None);
    }
}
