//! The bytes of a journal (`docs/journal.md` is normative), without any file.

use longhaul_engine::handover::Record;

/// First bytes of every journal: a name and the format's version.
pub const MAGIC: [u8; 8] = *b"LHJRNL\x00\x02";
/// Longest record, in bytes.
pub(super) const RECORD_BYTES_MAX: usize = 4096;
/// Bytes of length, checksum and time in front of each record.
const HEADER_BYTES: usize = 20;
/// Most bytes that one append writes.
const WRITE_BYTES_MAX: usize = MAGIC.len() + HEADER_BYTES + RECORD_BYTES_MAX;

/// One record where it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Where it begins, in bytes.
    pub offset: u64,
    /// When it was written, by the host's clock, in milliseconds since 1970.
    pub unix_ms: u64,
    /// What it says.
    pub record: Record,
}

/// What comes after the last record that can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Nothing.
    Whole,
    /// So many bytes of a record whose writing did not come to an end. It was never acted upon.
    CutOff(u64),
    /// Bytes that have changed since they were written.
    Damaged,
    /// A record that this version does not know, by its number.
    Unknown(u32),
}

/// What a journal holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reading {
    /// Its records, oldest first.
    pub entries: Vec<Entry>,
    /// Where the last of them ends and what comes next begins, in bytes. It is 0 where there is
    /// none, since the first record brings the journal's name with it.
    pub end: u64,
    /// What comes next.
    pub ending: Ending,
}

/// Why bytes are no journal of this version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotRead {
    /// They are no journal at all.
    Foreign,
    /// They are a journal of another version of the format.
    Version(u8),
}

/// A record's bytes, for that place in the file; `None` when it is too long. The first record
/// brings the journal's name with it.
pub(super) fn encode(end: u64, unix_ms: u64, record: &Record) -> Option<Vec<u8>> {
    let payload = postcard::to_stdvec(record).ok()?;
    if payload.len() > RECORD_BYTES_MAX {
        return None;
    }
    let mut bytes = Vec::with_capacity(WRITE_BYTES_MAX);
    if end == 0 {
        bytes.extend_from_slice(&MAGIC);
    }
    let place = end + bytes.len() as u64;
    let time = unix_ms.to_le_bytes();
    bytes.extend_from_slice(&u32::try_from(payload.len()).ok()?.to_le_bytes());
    bytes.extend_from_slice(&checksum(place, time, &payload));
    bytes.extend_from_slice(&time);
    bytes.extend_from_slice(&payload);
    Some(bytes)
}

/// The checksum covers the record's place, so that no record can pass for another.
fn checksum(place: u64, time: [u8; 8], payload: &[u8]) -> [u8; 8] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&place.to_le_bytes());
    hasher.update(&time);
    hasher.update(payload);
    let mut sum = [0; 8];
    sum.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    sum
}

/// Reads a journal's bytes as far as they can be read.
pub fn read(bytes: &[u8]) -> Result<Reading, NotRead> {
    let mut reading = Reading {
        entries: Vec::new(),
        end: 0,
        ending: Ending::Whole,
    };
    if !bytes.starts_with(&MAGIC) {
        reading.ending = before_the_first(bytes)?;
        return Ok(reading);
    }
    let mut place = MAGIC.len();
    while let Some((unix_ms, payload)) = framed(bytes, place) {
        match postcard::take_from_bytes(payload) {
            Ok((record, [])) => reading.entries.push(Entry {
                offset: place as u64,
                unix_ms,
                record,
            }),
            // The checksum is right: these are the bytes that somebody wrote.
            Ok(_) | Err(_) => {
                let number = postcard::take_from_bytes(payload).map_or(0, |(number, _)| number);
                reading.ending = Ending::Unknown(number);
                break;
            }
        }
        place += HEADER_BYTES + payload.len();
    }
    if reading.ending == Ending::Whole {
        reading.ending = after_the_last(bytes, place);
    }
    let begun = matches!(reading.ending, Ending::Damaged | Ending::Unknown(_));
    if begun || !reading.entries.is_empty() {
        reading.end = place as u64;
    }
    Ok(reading)
}

/// The record at a place, if its checksum is right: its time and payload.
fn framed(bytes: &[u8], place: usize) -> Option<(u64, &[u8])> {
    let (header, rest) = bytes.get(place..)?.split_first_chunk::<HEADER_BYTES>()?;
    let (length, header) = header.split_first_chunk::<4>()?;
    let (sum, time) = header.split_first_chunk::<8>()?;
    let time = <[u8; 8]>::try_from(time).ok()?;
    let length = u32::from_le_bytes(*length) as usize;
    if length == 0 || length > RECORD_BYTES_MAX {
        return None;
    }
    let payload = rest.get(..length)?;
    let right = checksum(place as u64, time, payload) == *sum;
    right.then_some((u64::from_le_bytes(time), payload))
}

/// A power cut during the first append leaves any mixture of its sectors and zeros, the first of
/// which may be missing.
fn before_the_first(bytes: &[u8]) -> Result<Ending, NotRead> {
    let head = &bytes[..bytes.len().min(MAGIC.len())];
    let missing = |(byte, good): (&u8, &u8)| byte == good || *byte == 0;
    if head.iter().zip(&MAGIC).all(missing) {
        return Ok(after_the_last(bytes, 0));
    }
    let (name, version) = head.split_at(head.len().min(MAGIC.len() - 1));
    match version {
        [version] if MAGIC.starts_with(name) => Err(NotRead::Version(*version)),
        _ => Err(NotRead::Foreign),
    }
}

/// Tells a record that was being written when the power went from damage: it is the last, so it is
/// no longer than a record can be, and no record follows it.
fn after_the_last(bytes: &[u8], place: usize) -> Ending {
    let rest = &bytes[place..];
    let length = rest
        .iter()
        .rposition(|byte| *byte != 0)
        .map_or(0, |at| at + 1);
    if length == 0 {
        return Ending::Whole;
    }
    let last = length <= WRITE_BYTES_MAX;
    let followed = || (place + 1..place + length).any(|later| framed(bytes, later).is_some());
    if last && !followed() {
        Ending::CutOff(length as u64)
    } else {
        Ending::Damaged
    }
}
