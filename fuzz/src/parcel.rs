//! Fuzzes the structures on a parcel's device one by one: the first byte chooses a header's body, a
//! record of one kind, the plaintext of data cells, the name of a cell, or the text of a key.

use longhaul_parcel::{
    BODY_BYTES, CELL_BYTES, Cell, DataKey, Header, Kind, LogReader, Name, PLAIN_BYTES, ReadError,
    Record,
};
use ring::digest::{SHA256, digest};

/// Reads it: the result is something of the format, or an error.
pub(crate) fn run(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else {
        return;
    };
    match kind % 8 {
        0 => header(rest),
        kind @ 1..=3 => record(kind, rest),
        4 => log(rest),
        5 => cell(rest),
        6 => key(rest),
        _ => records(rest),
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

/// Reads the header as that of any place, and of the place that it says.
fn header(document: &[u8]) {
    let Ok(length) = u32::try_from(document.len()) else {
        return;
    };
    let mut body = length.to_le_bytes().to_vec();
    body.extend(document);
    // The place of its HMAC, which is checked later.
    body.extend([0; 32]);
    let said = serde_json::from_slice::<serde_json::Value>(document).unwrap_or_default();
    let number = |key: &str| said.get(key).and_then(serde_json::Value::as_u64);
    let digits = said.get("parcel").and_then(serde_json::Value::as_str);
    let byte = |at: usize| {
        let pair = digits.and_then(|digits| digits.get(2 * at..2 * at + 2));
        pair.and_then(|pair| u8::from_str_radix(pair, 16).ok())
            .unwrap_or(0)
    };
    let mut name = Name {
        kind: Kind::Header,
        device: number("device").unwrap_or(0) as u16,
        row: number("row").unwrap_or(0),
        parcel: [0, 1, 2, 3, 4, 5, 6, 7].map(byte),
        generation: number("generation").unwrap_or(0) as u32,
    };
    if let Ok((header, proof)) = Header::decode(&name, &body) {
        assert!(header.layout().is_ok());
        let again = serde_json::to_vec(&header).expect("it was read just now");
        let mut body = (again.len() as u32).to_le_bytes().to_vec();
        body.extend(again);
        body.extend([0; 32]);
        // What is written of it may be longer than what was read, but not much.
        if let Ok((again, other)) = Header::decode(&name, &body) {
            assert_eq!(again, header);
            assert_eq!(other == proof, body[4..body.len() - 32] == *document);
        }
    }
    // It belongs to another place: it is refused.
    name.kind = Kind::Data;
    assert!(Header::decode(&name, &body).is_err());
}

fn plain(part: &[u8]) -> Vec<u8> {
    let mut plain = part.to_vec();
    plain.resize(PLAIN_BYTES, 0);
    plain
}

/// Reads cells: each begins with its first bytes here, and ends with zeros.
fn log(data: &[u8]) {
    let mut log = LogReader::default();
    for part in data.chunks(4096) {
        let read = log.read(&plain(part), |kind, rest| {
            let _ = Record::decode(kind, rest);
            Ok::<_, ReadError>(())
        });
        if read.is_err() {
            log.skip();
        }
    }
}

/// Reads records that are in cells of correct numbers, also where one of them is lost.
fn records(data: &[u8]) {
    let mut log = LogReader::default();
    for (number, part) in (0_u64..).zip(data.chunks(1024)) {
        let Some(([lost, first], part)) = part.split_first_chunk::<2>() else {
            return;
        };
        if lost % 8 == 7 {
            log.skip();
            continue;
        }
        let first = match first {
            255 => u32::MAX,
            first => u32::from(*first),
        };
        let mut cell = number.to_le_bytes().to_vec();
        cell.extend(first.to_le_bytes());
        cell.extend([0; 4]);
        cell.extend(part);
        let read = log.read(&plain(&cell), |kind, rest| {
            let _ = Record::decode(kind, rest);
            Ok::<_, ReadError>(())
        });
        if read.is_err() {
            return;
        }
    }
}

/// Reads the name of a cell, whose digest is correct.
fn cell(name: &[u8]) {
    let mut cell = Cell::new();
    for (to, from) in cell.bytes_mut().iter_mut().skip(BODY_BYTES).zip(name) {
        *to = *from;
    }
    let sum = digest(&SHA256, &cell.bytes()[..CELL_BYTES - 32]);
    cell.bytes_mut()[CELL_BYTES - 32..].copy_from_slice(sum.as_ref());
    if let Some(name) = cell.name() {
        let mut again = Cell::new();
        again.finish(&name);
        assert_eq!(again.bytes(), cell.bytes());
    }
}

fn key(text: &[u8]) {
    let Ok(text) = std::str::from_utf8(text) else {
        return;
    };
    if let Ok(key) = text.parse::<DataKey>() {
        assert_eq!(key.text().as_str(), text);
    }
}
