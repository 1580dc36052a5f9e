//! The log: records in the plaintexts of data cells.

use crate::cell::BODY_BYTES;
use crate::record::RECORD_BYTES_MAX;

/// Bytes of a data cell's plaintext.
pub const PLAIN_BYTES: usize = BODY_BYTES - 16;
/// Bytes before the records of a cell.
const START: usize = 16;
const NO_RECORD: u32 = u32::MAX;
/// Bytes of a record's kind and length.
const HEAD_BYTES: usize = 8;

/// Writes records into plaintexts.
pub(crate) struct LogWriter {
    plain: Box<[u8]>,
    at: usize,
    first: Option<u32>,
    number: u64,
}

impl LogWriter {
    /// Starts the log of a generation.
    pub(crate) fn new() -> Self {
        Self {
            plain: vec![0; PLAIN_BYTES].into_boxed_slice(),
            at: START,
            first: None,
            number: 0,
        }
    }

    /// Returns whether nothing is left to be written.
    pub(crate) fn is_empty(&self) -> bool {
        self.at == START
    }

    /// Appends a record. Each plaintext that is full is passed on.
    pub(crate) fn push<E>(
        &mut self,
        (kind, rest): (u8, &[u8]),
        mut full: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        if self.plain.len() - self.at < HEAD_BYTES {
            self.finish(&mut full)?;
        }
        self.first = self.first.or(Some((self.at - START) as u32));
        let mut head = [0; HEAD_BYTES];
        head[0] = kind;
        for (to, from) in head
            .iter_mut()
            .skip(4)
            .zip((rest.len() as u32).to_le_bytes())
        {
            *to = from;
        }
        self.copy(&head);
        let mut rest = rest;
        loop {
            let taken = self.copy(rest);
            rest = rest.get(taken..).unwrap_or_default();
            if rest.is_empty() {
                return Ok(());
            }
            self.finish(&mut full)?;
        }
    }

    /// Copies what has room, and returns how much that was.
    fn copy(&mut self, bytes: &[u8]) -> usize {
        let room = self.plain.get_mut(self.at..).unwrap_or_default();
        let taken = bytes.len().min(room.len());
        if let (Some(room), Some(bytes)) = (room.get_mut(..taken), bytes.get(..taken)) {
            room.copy_from_slice(bytes);
        }
        self.at += taken;
        taken
    }

    /// Passes on the current plaintext, even if it is not full.
    pub(crate) fn finish<E>(
        &mut self,
        mut full: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let first = self.first.take().unwrap_or(NO_RECORD);
        let start = self
            .number
            .to_le_bytes()
            .into_iter()
            .chain(first.to_le_bytes());
        for (to, from) in self.plain.iter_mut().zip(start) {
            *to = from;
        }
        // The memory still has bytes of an earlier cell.
        self.plain.get_mut(self.at..).unwrap_or_default().fill(0);
        full(&self.plain)?;
        self.number += 1;
        self.at = START;
        Ok(())
    }
}

/// What a plaintext says that cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the log contradicts itself: {0}")]
pub struct LogFault(&'static str);

/// Reads the records of one generation from its plaintexts.
#[derive(Debug, Default)]
pub struct LogReader {
    /// A record that continues, from its head on.
    partial: Vec<u8>,
    number: u64,
    /// Whether the beginning of what continues is lost.
    lost: bool,
}

impl LogReader {
    /// Skips a data cell that could not be recovered. The record that it was part of is lost.
    pub fn skip(&mut self) {
        self.partial.clear();
        self.number += 1;
        self.lost = true;
    }

    /// Reads a plaintext, and passes on each record that is complete.
    ///
    /// # Errors
    /// When it is not one of the format, or what the caller returns.
    pub fn read<E: From<LogFault>>(
        &mut self,
        plain: &[u8],
        mut each: impl FnMut(u8, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        const SHORT: LogFault = LogFault("a cell is too short");
        let (number, rest) = plain.split_first_chunk().ok_or(SHORT)?;
        let (first, rest) = rest.split_first_chunk().ok_or(SHORT)?;
        let (_, area) = rest.split_first_chunk::<4>().ok_or(SHORT)?;
        if u64::from_le_bytes(*number) != self.number {
            return Err(LogFault("a cell has another number").into());
        }
        self.number += 1;
        let first = match u32::from_le_bytes(*first) {
            NO_RECORD => None,
            first => Some(first as usize),
        };
        let mut area = match (std::mem::take(&mut self.lost), first) {
            (false, _) => area,
            (true, Some(first)) => area
                .get(first..)
                .ok_or(LogFault("a record begins outside its cell"))?,
            (true, None) => {
                self.lost = true;
                return Ok(());
            }
        };
        loop {
            if self.partial.is_empty() {
                // A head is never torn.
                let Some((head, _)) = area.split_first_chunk::<HEAD_BYTES>() else {
                    return Ok(());
                };
                if head[0] == 0 {
                    return Ok(());
                }
            }
            let needed = match self.partial.len() {
                0 => length(area)?,
                _ => length(&self.partial)?,
            };
            let more = (needed - self.partial.len()).min(area.len());
            let (part, rest) = area.split_at(more);
            area = rest;
            if self.partial.is_empty() && part.len() == needed {
                give(part, &mut each)?;
                continue;
            }
            self.partial.extend(part);
            if self.partial.len() < needed {
                return Ok(());
            }
            let whole = std::mem::take(&mut self.partial);
            give(&whole, &mut each)?;
        }
    }
}

/// Returns the length of a record with its head.
fn length(record: &[u8]) -> Result<usize, LogFault> {
    let head = record.first_chunk::<HEAD_BYTES>();
    let [_, zeros @ .., a, b, c, d] = head.ok_or(LogFault("a record has no head"))?;
    let length = u32::from_le_bytes([*a, *b, *c, *d]) as usize;
    if *zeros != [0; 3] || length > RECORD_BYTES_MAX {
        return Err(LogFault("a record has an impossible head"));
    }
    Ok(HEAD_BYTES + length)
}

fn give<E>(record: &[u8], each: &mut impl FnMut(u8, &[u8]) -> Result<(), E>) -> Result<(), E> {
    match record.split_first_chunk::<HEAD_BYTES>() {
        Some(([kind, ..], rest)) => each(*kind, rest),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn written(records: &[(u8, Vec<u8>)]) -> Vec<Vec<u8>> {
        let mut cells = Vec::new();
        let mut log = LogWriter::new();
        let mut full = |plain: &[u8]| {
            cells.push(plain.to_vec());
            Ok::<_, LogFault>(())
        };
        for (kind, rest) in records {
            log.push((*kind, rest), &mut full).unwrap();
        }
        log.finish(full).unwrap();
        cells
    }

    fn read(cells: &[Vec<u8>], lost: &[usize]) -> Vec<(u8, Vec<u8>)> {
        let mut records = Vec::new();
        let mut log = LogReader::default();
        for (n, cell) in cells.iter().enumerate() {
            if lost.contains(&n) {
                log.skip();
                continue;
            }
            log.read(cell, |kind, rest| {
                records.push((kind, rest.to_vec()));
                Ok::<_, LogFault>(())
            })
            .unwrap();
        }
        records
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn what_is_written_is_read(
            lengths in prop::collection::vec(0..RECORD_BYTES_MAX + 1, 1..12)
        ) {
            let records: Vec<(u8, Vec<u8>)> = lengths
                .iter()
                .enumerate()
                .map(|(n, length)| (n as u8 + 1, vec![n as u8 + 1; *length]))
                .collect();
            let cells = written(&records);
            prop_assert_eq!(read(&cells, &[]), records.clone());
            // A lost cell costs the records in it and nothing else.
            for lost in 0..cells.len() {
                let rest = read(&cells, &[lost]);
                prop_assert!(rest.iter().all(|record| records.contains(record)));
                let gone = records.iter().filter(|record| !rest.contains(record));
                let bytes: usize = gone.map(|(_, rest)| rest.len() + HEAD_BYTES).sum();
                prop_assert!(bytes <= PLAIN_BYTES + 2 * (RECORD_BYTES_MAX + HEAD_BYTES));
            }
        }
    }

    #[test]
    fn a_head_is_never_torn() {
        let area = PLAIN_BYTES - START;
        for left in 0..20 {
            let records = [(1, vec![1; area - HEAD_BYTES - left]), (2, vec![2; 100])];
            assert_eq!(read(&written(&records), &[]), records, "{left}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let cells = written(&[(1, vec![1; 100])]);
        let refused = |change: fn(&mut Vec<u8>)| {
            let mut cell = cells[0].clone();
            change(&mut cell);
            let mut log = LogReader::default();
            log.read(&cell, |_, _| Ok::<_, LogFault>(())).is_err()
        };
        assert!(!refused(|_| ()));
        assert!(refused(|cell| cell[0] = 1));
        assert!(refused(|cell| cell[17] = 1));
        assert!(refused(|cell| cell[23] = 1));
        assert!(refused(|cell| cell.truncate(10)));
    }
}
