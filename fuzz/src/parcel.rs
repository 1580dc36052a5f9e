//! Fuzzes what a device of a parcel can hold: the first byte chooses a header's body, a record of
//! one kind, or the plaintext of data cells.

use longhaul_parcel::{Header, Kind, LogReader, Name, PLAIN_BYTES, ReadError, Record};

/// Reads it: the result is something of the format, or an error.
pub(crate) fn run(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else {
        return;
    };
    match kind % 5 {
        0 => header(rest),
        kind @ 1..=3 => record(kind, rest),
        _ => log(rest),
    }
}

fn record(kind: u8, rest: &[u8]) {
    let Ok(record) = Record::decode(kind, rest) else {
        return;
    };
    let (kind, encoded) = record.encode().expect("it was read just now");
    let again = Record::decode(kind, &encoded).expect("our own");
    if let (Record::Chunk(before), Record::Chunk(after)) = (record, again) {
        let content = before
            .content
            .filter(|content| content.iter().any(|byte| *byte != 0));
        assert_eq!(after.content, content);
    }
}

fn header(document: &[u8]) {
    let length = u32::try_from(document.len()).expect("inputs are short");
    let mut body = length.to_le_bytes().to_vec();
    body.extend(document);
    // The place of its HMAC, which is checked later.
    body.extend([0; 32]);
    // It belongs to no place: it may be read, and is then refused.
    let name = Name {
        kind: Kind::Data,
        device: 0,
        row: 0,
        parcel: [0; 8],
        generation: 0,
    };
    assert!(Header::decode(&name, &body).is_err());
}

/// Reads cells: each begins with its first bytes here, and ends with zeros.
fn log(data: &[u8]) {
    let mut log = LogReader::default();
    for part in data.chunks(4096) {
        let mut plain = part.to_vec();
        plain.resize(PLAIN_BYTES, 0);
        let read = log.read(&plain, |kind, rest| {
            let _ = Record::decode(kind, rest);
            Ok::<_, ReadError>(())
        });
        if read.is_err() {
            log.skip();
        }
    }
}
