use super::*;
use longhaul_protocol::{Attempt, Generation, StoreId};
use std::fs;

const ID: MigrationId = MigrationId([1, 2, 3, 4, 5, 6, 7, 8]);
const TIME: u64 = 1_800_000_000_123;

fn records() -> Vec<Record> {
    let attempt = Attempt(1);
    vec![
        Record::Ready { attempt },
        Record::Released {
            attempt,
            generation: Generation(7),
        },
        Record::Aborted {
            attempt,
            reason: "no".repeat(100),
        },
    ]
}

fn open(folder: &Path) -> Result<Journal, JournalError> {
    Journal::open(&Journals::open(folder)?, ID)
}

fn written(folder: &Path) -> PathBuf {
    let mut journal = open(folder).unwrap();
    records()
        .iter()
        .for_each(|record| journal.append(record).unwrap());
    journal.path().to_owned()
}

/// Returns a record as in a journal, encoded by hand.
fn frame(place: usize, payload: &[u8]) -> Vec<u8> {
    let mut summed = (place as u64).to_le_bytes().to_vec();
    summed.extend_from_slice(&TIME.to_le_bytes());
    summed.extend_from_slice(payload);
    let mut bytes = (payload.len() as u32).to_le_bytes().to_vec();
    bytes.extend_from_slice(&blake3::hash(&summed).as_bytes()[..8]);
    bytes.extend_from_slice(&TIME.to_le_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

#[test]
fn records_survive_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    written(folder.path());
    assert_eq!(open(folder.path()).unwrap().records(), records());
    assert_eq!(list_journals(folder.path()).unwrap(), [ID]);
}

#[test]
fn a_journal_that_says_nothing_is_not_there() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(folder.path()).unwrap();
    assert!(journal.records().is_empty());
    assert!(!journal.path().exists());
    assert!(list_journals(folder.path()).unwrap().is_empty());
    assert!(
        list_journals(&folder.path().join("none"))
            .unwrap()
            .is_empty()
    );
}

#[test]
fn a_journal_has_one_writer() {
    let folder = tempfile::tempdir().unwrap();
    let journals = Journals::open(folder.path()).unwrap();
    let first = Journal::open(&journals, ID).unwrap();
    let second = Journal::open(&journals, ID);
    assert!(matches!(second, Err(JournalError::Busy(_))));
    drop(first);
    assert!(Journal::open(&journals, ID).is_ok());
}

#[test]
fn times_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let mut journal = open(folder.path()).unwrap();
    journal.append_at(TIME, &records()[0]).unwrap();
    let reading = read_journal(journal.path()).unwrap();
    let entry = Entry {
        offset: 8,
        unix_ms: TIME,
        record: records().remove(0),
    };
    assert_eq!(reading.entries, [entry]);
    assert_eq!(reading.ending, Ending::Whole);
}

#[test]
fn a_record_that_was_cut_off_is_left_out_and_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let path = written(folder.path());
    let whole = fs::read(&path).unwrap();
    for length in 0..whole.len() {
        // The missing bytes are absent, or zeros.
        for zeros in [0, whole.len() - length] {
            let mut bytes = whole[..length].to_vec();
            bytes.resize(length + zeros, 0);
            let reading = checked(read(&bytes), &path).unwrap();
            let kept = reading.entries.into_iter().map(|entry| entry.record);
            let kept: Vec<_> = kept.collect();
            assert_eq!(kept, records()[..kept.len()]);
            // Each sync takes time.
            if length % 16 != 0 {
                continue;
            }
            fs::write(&path, &bytes).unwrap();
            let mut journal = open(folder.path()).unwrap();
            assert_eq!(journal.records(), kept);
            journal.append(&records()[0]).unwrap();
            drop(journal);
            let again = open(folder.path()).unwrap();
            assert_eq!(again.records().len(), kept.len() + 1, "cut at {length}");
        }
    }
}

#[test]
fn a_first_record_whose_first_sector_is_missing_is_cut_off() {
    let folder = tempfile::tempdir().unwrap();
    let mut journal = open(folder.path()).unwrap();
    let long = Record::Aborted {
        attempt: Attempt(1),
        reason: "no".repeat(1000),
    };
    journal.append(&long).unwrap();
    let path = journal.path().to_owned();
    drop(journal);
    let mut bytes = fs::read(&path).unwrap();
    bytes[..512].fill(0);
    fs::write(&path, bytes).unwrap();
    let ending = read_journal(&path).unwrap().ending;
    assert!(matches!(ending, Ending::CutOff(_)));
    let mut journal = open(folder.path()).unwrap();
    assert!(journal.records().is_empty());
    journal.append(&records()[0]).unwrap();
    drop(journal);
    assert_eq!(open(folder.path()).unwrap().records(), &records()[..1]);
}

#[test]
fn a_flipped_byte_is_never_read_as_a_record_nor_taken_for_a_cut() {
    let folder = tempfile::tempdir().unwrap();
    let path = written(folder.path());
    let whole = fs::read(&path).unwrap();
    let last = read_journal(&path).unwrap().entries[2].offset as usize;
    for place in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[place] ^= 0x40;
        match checked(read(&bytes), &path) {
            Ok(reading) => {
                let kept = reading.entries.into_iter().map(|entry| entry.record);
                assert!(kept.eq(records().into_iter().take(2)), "flipped at {place}");
                assert!(place >= last, "flipped at {place}");
            }
            Err(JournalError::Foreign(_)) => assert!(place < 7),
            Err(JournalError::Version { version, .. }) => assert_eq!((place, version), (7, 0x42)),
            Err(JournalError::Damaged { offset, .. }) => {
                assert!(offset <= place as u64 && place < last, "flipped at {place}");
            }
            Err(other) => panic!("flipped at {place}: {other}"),
        }
    }
}

#[test]
fn what_is_too_long_for_a_record_is_damage() {
    let folder = tempfile::tempdir().unwrap();
    let path = written(folder.path());
    let mut bytes = fs::read(&path).unwrap();
    bytes.extend_from_slice(&[0xaa; 5000]);
    fs::write(&path, &bytes).unwrap();
    assert!(matches!(
        open(folder.path()),
        Err(JournalError::Damaged { .. })
    ));
}

#[test]
fn a_record_of_a_newer_version_is_never_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let path = written(folder.path());
    let whole = fs::read(&path).unwrap();
    let ready_with_a_new_field = [1, 1, 9];
    for payload in [&[99, 1][..], &ready_with_a_new_field] {
        let mut bytes = whole.clone();
        bytes.extend(frame(whole.len(), payload));
        let known = frame(bytes.len(), &[1, 1]);
        bytes.extend(known);
        fs::write(&path, &bytes).unwrap();
        let error = open(folder.path()).unwrap_err();
        assert!(
            matches!(error, JournalError::Unknown { offset, number, .. }
                if offset == whole.len() as u64 && number == u32::from(payload[0])),
            "{error}"
        );
        assert!(error.to_string().contains("newer"), "{error}");
        let reading = read_journal(&path).unwrap();
        assert_eq!(reading.entries.len(), records().len());
    }
}

#[test]
fn a_record_that_is_too_long_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut journal = open(folder.path()).unwrap();
    let long = Record::Aborted {
        attempt: Attempt(1),
        reason: "x".repeat(5000),
    };
    let error = journal.append(&long);
    assert!(matches!(error, Err(JournalError::TooLarge(_))));
    assert!(!journal.path().exists());
}

#[test]
fn the_number_of_incomplete_disks_follows_the_attempt() {
    let folder = tempfile::tempdir().unwrap();
    let mut journal = open(folder.path()).unwrap();
    let incomplete = Record::Incomplete {
        attempt: Attempt(1),
        disks: 300,
    };
    journal.append_at(TIME, &incomplete).unwrap();
    let bytes = fs::read(journal.path()).unwrap();
    assert_eq!(bytes, [&MAGIC[..], &frame(8, &[11, 1, 0xac, 2])].concat());
    drop(journal);
    assert_eq!(open(folder.path()).unwrap().records(), [incomplete]);
}

#[test]
fn the_bytes_are_those_of_the_documentation() {
    let folder = tempfile::tempdir().unwrap();
    let mut journal = open(folder.path()).unwrap();
    journal.append_at(TIME, &records()[1]).unwrap();
    let bytes = fs::read(journal.path()).unwrap();
    let by_hand = [&MAGIC[..], &frame(8, &[2, 1, 7])].concat();
    assert_eq!(bytes, by_hand);
    let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let rows: Vec<String> = hex.chunks(16).map(|row| row.join(" ")).collect();
    let page = include_str!("../../../../docs/journal.md");
    let rows = rows.join("\n");
    assert!(page.contains(&rows), "docs/journal.md lacks\n{rows}");

    let folder = tempfile::tempdir().unwrap();
    let mut journal = open(folder.path()).unwrap();
    let released = Record::ReleasedToArbiter {
        attempt: Attempt(1),
        generation: Generation(7),
        store: StoreId([6; 16]),
    };
    journal.append_at(TIME, &released).unwrap();
    let payload = [&[13, 1, 7][..], &[6; 16]].concat();
    let bytes = fs::read(journal.path()).unwrap();
    assert_eq!(bytes, [&MAGIC[..], &frame(8, &payload)].concat());
    let hex: Vec<String> = payload.iter().map(|byte| format!("{byte:02x}")).collect();
    let row = format!("\n{}\n", hex.join(" "));
    assert!(page.contains(&row), "docs/journal.md lacks {row}");
}

#[test]
fn a_journal_that_was_set_aside_is_not_an_unknown_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = written(folder.path());
    let bytes = fs::read(&path).unwrap();
    let names = set_aside(&RealFiles, folder.path(), ID, "why").unwrap();
    assert!(names.exists() && !path.exists());
    assert_eq!(fs::read(&names.journal).unwrap(), bytes);
    assert_eq!(fs::read_to_string(&names.tombstone).unwrap(), "why");
    let error = open(folder.path()).unwrap_err();
    assert!(matches!(error, JournalError::SetAside(ID)), "{error}");
    assert!(list_journals(folder.path()).unwrap().is_empty());
    assert_eq!(list_set_aside(folder.path()).unwrap(), [ID]);
    // Again, as after a power cut in between; and until the tombstone is removed.
    fs::rename(&names.journal, &path).unwrap();
    assert!(matches!(
        open(folder.path()).unwrap_err(),
        JournalError::SetAside(ID)
    ));
    set_aside(&RealFiles, folder.path(), ID, "why").unwrap();
    set_aside(&RealFiles, folder.path(), ID, "why").unwrap();
    assert_eq!(fs::read(&names.journal).unwrap(), bytes);
    fs::remove_file(&names.tombstone).unwrap();
    assert!(open(folder.path()).unwrap().records().is_empty());
}
