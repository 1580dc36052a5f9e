//! Fuzzes the header of a qcow2 image.

use longhaul_storage::disk::qcow2::{HEADER_BYTES, Head, growth_bytes, header_alone, read};

/// Parses the header: an image that can be moved is created at the destination with an equal
/// header.
pub(crate) fn run(data: &[u8]) {
    let Ok(Head { image, .. }) = read(data) else {
        return;
    };
    let alone = header_alone(&image).expect("it was understood");
    assert_eq!(alone.len(), HEADER_BYTES);
    let backing = None;
    assert_eq!(read(&alone), Ok(Head { image, backing }));
    assert!(growth_bytes(&image) > 0);
}
