//! Fuzzes a content index as read from a disk. The first byte selects the case: a catalogue as it
//! is, one whose JSON gets the correct checksum, a page as it is, or one whose entries get it.

use longhaul_storage::content::{Catalogue, PAGE_BYTES, Page};

/// Parses the input: a parsed value must be equal after encoding and parsing again.
pub(crate) fn run(data: &[u8]) {
    let Some((how, data)) = data.split_first() else {
        return;
    };
    match how % 4 {
        0 => catalogue(data),
        1 => {
            let checksum = blake3::hash(data);
            catalogue(&[b"LHFILES\x01", &checksum.as_bytes()[..], data].concat());
        }
        2 => page(data, 0),
        _ => {
            let number = u64::from(how / 4);
            let mut body = number.to_le_bytes().to_vec();
            body.extend(data);
            body.resize(PAGE_BYTES - 8, 0);
            let checksum = blake3::hash(&body);
            page(&[&checksum.as_bytes()[..8], &body].concat(), number);
        }
    }
}

fn catalogue(bytes: &[u8]) {
    if let Ok(catalogue) = Catalogue::parse(bytes) {
        let written = catalogue.bytes().expect("it was read");
        assert_eq!(Catalogue::parse(&written).expect("our own"), catalogue);
    }
}

fn page(data: &[u8], number: u64) {
    let mut bytes = [0; PAGE_BYTES];
    let length = data.len().min(PAGE_BYTES);
    bytes[..length].copy_from_slice(&data[..length]);
    let page = Page::parse(number, &bytes);
    let entries: Vec<_> = page.entries().collect();
    assert!(
        entries
            .iter()
            .all(|entry| entry.generation > 0 && entry.block < 1 << 40)
    );
    assert_eq!(Page::parse(number, &page.bytes()), page);
    assert_eq!(Page::parse(number + 1, &bytes).entries().count(), 0);
}
