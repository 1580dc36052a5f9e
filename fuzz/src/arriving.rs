//! Fuzzes the input of an arriving disk's server: a file of masks, as it is or after a correct
//! header, and the protocol between the server and its pump. The first byte selects the case.

use longhaul_storage::front::arriving::line::{BLOCKS_MAX, MESSAGE_BYTES, ToPump, ToServer};
use longhaul_storage::front::arriving::masks::Masks;

/// Parses the input: a parsed value must be equal after encoding and parsing again.
pub(crate) fn run(data: &[u8]) {
    let Some((how, data)) = data.split_first() else {
        return;
    };
    match how % 3 {
        0 => masks(data),
        1 => {
            let mut bytes = b"LHMASKS1".to_vec();
            bytes.extend(1_u64.to_le_bytes());
            bytes.extend(u64::from(*how).to_le_bytes());
            bytes.resize(64, 0);
            bytes.extend(data);
            let chunks = usize::from(*how).div_ceil(64);
            bytes.resize(64 + 10 * chunks, 0);
            masks(&bytes);
        }
        _ => messages(data),
    }
}

fn masks(bytes: &[u8]) {
    if let Ok(masks) = Masks::parse(bytes) {
        assert!(masks.missing_blocks() <= masks.blocks);
        // A write to a chunk that is present has no effect on the masks.
        let again = Masks::parse(&masks.to_bytes()).expect("our own");
        assert_eq!(again, masks);
    }
}

fn messages(data: &[u8]) {
    for bytes in data.chunks_exact(MESSAGE_BYTES) {
        let mut message = [0; MESSAGE_BYTES];
        message.copy_from_slice(bytes);
        if let Ok(read) = ToServer::from_bytes(&message) {
            assert_eq!(read.to_bytes(), message);
            assert!(read.content_bytes() as u64 <= BLOCKS_MAX * 4096);
        }
        if let Ok(read) = ToPump::from_bytes(&message) {
            assert_eq!(read.to_bytes(), message);
        }
    }
}
