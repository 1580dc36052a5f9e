//! The header of a qcow2 image.

use longhaul_storage::disk::qcow2::{HEADER_BYTES, growth_bytes, header_alone, read};

/// Reads it: an image that can be moved is opened at the destination by a header that says the same.
pub(crate) fn run(data: &[u8]) {
    let Ok(image) = read(data) else {
        return;
    };
    let alone = header_alone(&image).expect("it was understood");
    assert_eq!(alone.len(), HEADER_BYTES);
    assert_eq!(read(&alone), Ok(image));
    assert!(growth_bytes(&image) > 0);
}
