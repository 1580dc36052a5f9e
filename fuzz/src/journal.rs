//! Fuzzes a journal. The first byte selects the case: as it is, or pieces that get correct
//! checksums, which a fuzzer does not find.

use longhaul_engine::handover::Record;
use longhaul_storage::{Ending, MAGIC, Reading, read};

/// Size of the header of each payload.
const HEADER: usize = 20;

/// Reads the journal: the records must be those of the file, without gaps.
pub(crate) fn run(data: &[u8]) {
    let Some((how, data)) = data.split_first() else {
        return;
    };
    if how % 2 == 0 {
        if let Ok(reading) = read(data) {
            check(data, &reading);
        }
    } else {
        let bytes = pieces(data);
        let reading = read(&bytes).expect("it has the right name");
        check(&bytes, &reading);
    }
}

/// Assembles pieces of a length and a payload each, until a length of 0; the bytes after it are the
/// end of the file, as they are.
fn pieces(mut data: &[u8]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    while let Some((length, rest)) = data.split_first() {
        let (payload, after) = rest.split_at(usize::from(*length).min(rest.len()));
        data = after;
        if payload.is_empty() {
            break;
        }
        bytes.extend(frame(bytes.len(), payload));
    }
    bytes.extend_from_slice(data);
    bytes
}

fn frame(place: usize, payload: &[u8]) -> Vec<u8> {
    let place = (place as u64).to_le_bytes();
    let time = place.map(u8::reverse_bits);
    let sum = blake3::hash(&[&place, &time, payload].concat());
    let length = (payload.len() as u32).to_le_bytes();
    [&length, &sum.as_bytes()[..8], &time, payload].concat()
}

fn check(bytes: &[u8], reading: &Reading) {
    let mut end = 0;
    for entry in &reading.entries {
        let place = entry.offset as usize;
        assert_eq!(place, end.max(MAGIC.len()), "a gap");
        let header = &bytes[place..place + HEADER];
        let length = u32::from_le_bytes(header[..4].try_into().expect("4 bytes"));
        end = place + HEADER + length as usize;
        assert_eq!(entry.unix_ms.to_le_bytes(), header[12..]);
        let record: Record = postcard::from_bytes(&bytes[place + HEADER..end]).expect("a record");
        assert_eq!(record, entry.record);
    }
    let rest = &bytes[end..];
    match reading.ending {
        Ending::Whole if end == 0 => assert!(bytes.len() >= reading.end as usize),
        Ending::Whole => assert!(rest.iter().all(|byte| *byte == 0)),
        Ending::CutOff(length) => assert!(length as usize <= rest.len()),
        Ending::Damaged | Ending::Unknown(_) => {
            end = end.max(reading.end as usize);
            assert!(end <= bytes.len());
        }
    }
    assert_eq!(reading.end as usize, end);
}
