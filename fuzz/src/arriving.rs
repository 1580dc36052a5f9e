//! What the server of an arriving disk reads: a file of masks, as it is or behind a right beginning, and
//! what it and its pump say to each other. The first byte says which.

use longhaul_storage::front::arriving::line::{BLOCKS_MAX, MESSAGE_BYTES, ToPump, ToServer};
use longhaul_storage::front::arriving::masks::Masks;

/// Reads it: what is read must say the same when it is written.
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
        // What was written to a chunk that is here says nothing any more.
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
