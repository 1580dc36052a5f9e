//! The bytes of a journal (`docs/journal.md` is normative), independent of files.

use longhaul_engine::handover::Record;

/// The first bytes of every journal: a name and the format's version.
pub const MAGIC: [u8; 8] = *b"LHJRNL\x00\x02";
/// Longest record, in bytes.
pub(super) const RECORD_BYTES_MAX: usize = 4096;
/// Bytes of length, checksum and time in front of each record.
const HEADER_BYTES: usize = 20;
/// Most bytes that one append writes.
const WRITE_BYTES_MAX: usize = MAGIC.len() + HEADER_BYTES + RECORD_BYTES_MAX;

/// A record at its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Where it begins, in bytes.
    pub offset: u64,
    /// When it was written, by the host's clock, in milliseconds since 1970.
    pub unix_ms: u64,
    /// Its content.
    pub record: Record,
}

/// What follows the last readable record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Nothing.
    Whole,
    /// The bytes of a record whose write did not finish, and that was never acted upon.
    CutOff(u64),
    /// Bytes that have changed since they were written.
    Damaged,
    /// A record of a number that this version does not know.
    Unknown(u32),
}

/// The content of a journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reading {
    /// Its records, oldest first.
    pub entries: Vec<Entry>,
    /// The end of the last record in bytes, where the next one begins. It is 0 where there is no
    /// record, since the first record brings the journal's name with it.
    pub end: u64,
    /// What follows.
    pub ending: Ending,
}

/// A reason why bytes are not a journal of this version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotRead {
    /// They are not a journal.
    Foreign,
    /// They are a journal of another version of the format.
    Version(u8),
}

/// Returns a record's bytes for a place in the file; `None` when the record is too long. The first
/// record brings the journal's name with it.
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

/// Returns the checksum, which covers the record's place, so that no record is taken for another.
fn checksum(place: u64, time: [u8; 8], payload: &[u8]) -> [u8; 8] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&place.to_le_bytes());
    hasher.update(&time);
    hasher.update(payload);
    let mut sum = [0; 8];
    sum.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    sum
}

/// Parses a journal's bytes as far as they are readable.
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
            // The checksum is correct: these bytes were written on purpose.
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

/// Returns the time and payload of the record at a place, if its checksum is correct.
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

/// Parses a journal without a record. A power cut during the first append leaves any mixture of its
/// sectors and zeros, and the first sector may be missing.
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

/// Distinguishes a record interrupted by a power cut from damage: it is the last one, so it is no
/// longer than a record can be, and no record follows it.
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
