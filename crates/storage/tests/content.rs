//! Tests the content index on real files: its answers are right, whatever happens to the files and
//! the index.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use longhaul_codec::{Digest, Hasher};
use longhaul_protocol::BLOCK_SIZE;
use longhaul_storage::content::{ContentError, ContentIndex, PAGE_BYTES, Step, Writes};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use tempfile::TempDir;

type Block = [u8; BLOCK_SIZE];

/// A block unlike any other.
fn block(number: u64) -> Block {
    let mut block = [0; BLOCK_SIZE];
    let mut reader = blake3::Hasher::new();
    reader.update(&number.to_le_bytes());
    reader.finalize_xof().fill(&mut block);
    block
}

struct Setting {
    folder: TempDir,
}

impl Setting {
    fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn index_folder(&self) -> PathBuf {
        self.folder.path().join("index")
    }

    fn open(&self) -> ContentIndex {
        ContentIndex::open(&self.index_folder(), 4000).unwrap()
    }

    /// Creates a file of these blocks; 0 is a hole.
    fn file(&self, name: &str, numbers: &[u64]) -> PathBuf {
        let path = self.folder.path().join(name);
        let file = File::create(&path).unwrap();
        file.set_len((numbers.len() * BLOCK_SIZE) as u64).unwrap();
        for (place, number) in numbers.iter().enumerate() {
            if *number > 0 {
                let offset = (place * BLOCK_SIZE) as u64;
                file.write_all_at(&block(*number), offset).unwrap();
            }
        }
        path
    }
}

fn index_all(index: &ContentIndex, path: &Path) {
    index_as(index, path, Writes::Seldom);
}

fn index_as(index: &ContentIndex, path: &Path, writes: Writes) {
    let indexing = index.index(path, writes).unwrap();
    let done = indexing.run(100, &AtomicBool::new(false)).unwrap();
    assert_eq!(done, Step::Done);
}

fn digest(index: &ContentIndex, block: &Block) -> Digest {
    Hasher::new(index.key()).digest(block)
}

/// Returns where a block is found, and checks that the content read is the block.
fn find(index: &ContentIndex, number: u64) -> Option<(PathBuf, u64)> {
    let expected = block(number);
    let mut read = [0xee; BLOCK_SIZE];
    let found = index.read(&digest(index, &expected), &mut read)?;
    assert!(read == expected, "block {number} is something else");
    Some((found.path, found.offset / BLOCK_SIZE as u64))
}

#[test]
fn what_files_hold_is_found_also_later() {
    let setting = Setting::new();
    let numbers: Vec<u64> = (0..900)
        .map(|place| if place % 3 == 0 { 0 } else { place })
        .collect();
    let one = setting.file("one", &numbers);
    // An incomplete last block is not indexed.
    let other = setting.file("other", &[2000, 7, 0, 2001]);
    OpenOptions::new()
        .append(true)
        .open(&other)
        .and_then(|file| file.set_len(4 * BLOCK_SIZE as u64 + 100))
        .unwrap();
    let check = |index: &ContentIndex| {
        for number in 1..900 {
            let place = (number % 3 > 0).then(|| (one.clone(), number));
            assert_eq!(find(index, number), place);
        }
        assert_eq!(find(index, 2001), Some((other.clone(), 3)));
        assert_eq!(find(index, 2002), None);
        let mut read = [0; BLOCK_SIZE];
        let zeros = digest(index, &[0; BLOCK_SIZE]);
        assert_eq!(index.read(&zeros, &mut read), None, "zeros are nobody's");
    };
    let index = setting.open();
    index_all(&index, &one);
    index_all(&index, &other);
    check(&index);
    let files = index.files();
    assert_eq!(files[0], (one.clone(), 900 * BLOCK_SIZE as u64));
    let in_use = ContentIndex::open(&setting.index_folder(), 4000).unwrap_err();
    assert!(matches!(in_use, ContentError::InUse(_)), "{in_use}");
    let key = index.key();
    drop(index);
    let index = setting.open();
    assert!(index.key() == key);
    check(&index);
    index.forget(&one).unwrap();
    assert_eq!(find(&index, 1), None);
    assert_eq!(
        find(&index, 7),
        None,
        "one place is enough, and that is gone"
    );
    assert_eq!(find(&index, 2000), Some((other.clone(), 0)));
}

#[test]
fn a_file_that_changed_is_thrown_away_and_never_gives_wrong_bytes() {
    let setting = Setting::new();
    let path = setting.file("disk", &[1, 2, 3, 4, 5]);
    let steady = setting.file("steady", &[11, 12]);
    let index = setting.open();
    index_all(&index, &path);
    index_all(&index, &steady);
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&block(9), BLOCK_SIZE as u64).unwrap();
    // Unchanged blocks may still be found; a failed lookup reveals the change.
    assert_eq!(find(&index, 1), Some((path.clone(), 0)));
    assert_eq!(find(&index, 2), None);
    assert_eq!(find(&index, 1), None, "nothing of it is believed any more");
    assert_eq!(find(&index, 11), Some((steady.clone(), 0)));
    index_all(&index, &path);
    assert_eq!(find(&index, 9), Some((path.clone(), 1)));
    assert_eq!(find(&index, 3), Some((path.clone(), 2)));
    drop(index);

    // Another file in its place, and a removed one.
    let new = setting.file("new", &[1, 2, 3, 4, 5]);
    fs::rename(new, &path).unwrap();
    fs::remove_file(&steady).unwrap();
    let index = setting.open();
    assert!(index.files().is_empty());
    for number in [1, 3, 9, 11] {
        assert_eq!(find(&index, number), None);
    }
    // A file may be truncated while it is read.
    let mut indexing = index.index(&path, Writes::Seldom).unwrap();
    OpenOptions::new()
        .write(true)
        .open(&path)
        .and_then(|file| file.set_len(100))
        .unwrap();
    while indexing.step().unwrap() == Step::More {}
    assert_eq!(find(&index, 5), None);
}

#[test]
fn of_a_file_that_is_written_all_the_time_what_is_left_is_found() {
    let setting = Setting::new();
    let path = setting.file("disk", &[1, 2, 3, 0, 4]);
    let index = setting.open();
    index_as(&index, &path, Writes::Always);
    // The requested kind of writes decides, not the recorded one.
    index_all(&index, &path);
    index_as(&index, &path, Writes::Always);
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&block(7), BLOCK_SIZE as u64).unwrap();
    file.write_all_at(&block(8), 5 * BLOCK_SIZE as u64).unwrap();
    // The file has grown, too.
    assert!(!index.is_current(&path, Writes::Seldom));
    assert!(index.is_current(&path, Writes::Always));
    let is_found = |index: &ContentIndex| {
        assert_eq!(find(index, 1), Some((path.clone(), 0)));
        assert_eq!(find(index, 2), None);
        assert_eq!(find(index, 3), Some((path.clone(), 2)));
        assert_eq!(find(index, 7), None);
    };
    is_found(&index);
    drop(index);
    is_found(&setting.open());
    // Blocks written since are found after the file is read again; unchanged ones in between as
    // well.
    let index = setting.open();
    index.read_again(&path).unwrap();
    assert!(!index.is_current(&path, Writes::Always));
    assert_eq!(find(&index, 3), Some((path.clone(), 2)));
    index_as(&index, &path, Writes::Always);
    assert!(index.is_current(&path, Writes::Always));
    for (number, place) in [(1, 0), (7, 1), (3, 2), (4, 4), (8, 5)] {
        assert_eq!(find(&index, number), Some((path.clone(), place)));
    }
    // Another file in its place counts as a new one.
    let other = setting.file("other", &[1, 9]);
    fs::rename(&other, &path).unwrap();
    assert!(!index.is_current(&path, Writes::Always));
    drop(index);
    let index = setting.open();
    assert!(index.files().is_empty());
    assert_eq!(find(&index, 1), None);
}

#[test]
fn indexing_goes_on_where_it_was_left() {
    let setting = Setting::new();
    let numbers: Vec<u64> = (1..300).collect();
    let path = setting.file("disk", &numbers);
    let index = setting.open();
    let mut indexing = index.index(&path, Writes::Seldom).unwrap();
    assert_eq!(indexing.step().unwrap(), Step::More);
    // When it is told to stop, it records its progress.
    assert_eq!(
        indexing.run(50, &AtomicBool::new(true)).unwrap(),
        Step::More
    );
    assert_eq!(index.files(), [(path.clone(), 64 * BLOCK_SIZE as u64)]);
    assert_eq!(find(&index, 64), Some((path.clone(), 63)));
    assert_eq!(find(&index, 65), None);
    drop(index);
    let index = setting.open();
    let mut indexing = index.index(&path, Writes::Seldom).unwrap();
    let mut steps = 0;
    while indexing.step().unwrap() == Step::More {
        steps += 1;
    }
    assert_eq!(steps, (299_usize - 64).div_ceil(64));
    assert_eq!(find(&index, 64), Some((path.clone(), 63)));
    assert_eq!(find(&index, 299), Some((path, 298)));
}

#[test]
fn holes_are_not_read_and_the_table_does_not_grow() {
    let setting = Setting::new();
    let path = setting.file("disk", &[1]);
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(1 << 40).unwrap();
    file.write_all_at(&block(2), (1 << 40) - BLOCK_SIZE as u64)
        .unwrap();
    let index = setting.open();
    index_all(&index, &path);
    assert_eq!(find(&index, 2), Some((path, (1 << 28) - 1)));
    drop(index);
    // Far more blocks than the table was created for: entries are evicted.
    let folder = setting.index_folder();
    let index = ContentIndex::open(&folder, 1).unwrap();
    assert!(index.files().is_empty(), "of another size: begun anew");
    let numbers: Vec<u64> = (1..2000).collect();
    index_all(&index, &setting.file("large", &numbers));
    let found = numbers
        .iter()
        .filter(|number| find(&index, **number).is_some());
    assert_eq!(found.count(), 255);
    assert_eq!(
        fs::metadata(folder.join("table")).unwrap().size(),
        PAGE_BYTES as u64
    );
}

#[test]
fn a_torn_table_loses_pages_and_gives_no_wrong_bytes() {
    let setting = Setting::new();
    let numbers: Vec<u64> = (1..1500).collect();
    let path = setting.file("disk", &numbers);
    index_all(&setting.open(), &path);
    let table = setting.index_folder().join("table");
    let good = fs::read(&table).unwrap();
    assert_eq!(good.len(), 20 * PAGE_BYTES);
    let count = || {
        let index = setting.open();
        numbers
            .iter()
            .filter(|number| find(&index, **number).is_some())
            .count()
    };
    assert_eq!(count(), numbers.len());
    for seed in 0..12_u64 {
        let mut torn = good.clone();
        let random = block(seed + 10_000);
        let place = usize::from(random[0]) % 20 * PAGE_BYTES + usize::from(random[1]) * 16;
        match seed % 4 {
            // A flipped bit, a sector of other content, zeros, a truncation.
            0 => torn[place] ^= 1,
            1 => torn[place / 512 * 512..][..512].copy_from_slice(&random[..512]),
            2 => torn[place / PAGE_BYTES * PAGE_BYTES..][..2 * 512].fill(0),
            _ => torn.truncate(place),
        }
        fs::write(&table, &torn).unwrap();
        let found = count();
        assert!(found < numbers.len(), "seed {seed}");
        let lost_pages = if seed % 4 == 3 { 20 } else { 1 };
        assert!(
            found + lost_pages * 255 >= numbers.len(),
            "seed {seed}: {found}"
        );
    }
    // Pages with correct checksums but foreign content: of another place, of another file.
    let mut swapped = good.clone();
    swapped.rotate_left(PAGE_BYTES);
    fs::write(&table, &swapped).unwrap();
    assert_eq!(count(), 0);
    fs::write(&table, &good).unwrap();
    assert_eq!(count(), numbers.len());
}

#[test]
fn a_catalogue_that_is_torn_or_newer_begins_all_anew() {
    let setting = Setting::new();
    let path = setting.file("disk", &[1, 2, 3]);
    let catalogue = setting.index_folder().join("catalogue");
    for damage in 0..5 {
        let index = setting.open();
        index_all(&index, &path);
        assert!(find(&index, 2).is_some());
        let key = index.key();
        drop(index);
        let mut bytes = fs::read(&catalogue).unwrap();
        let middle = bytes.len() / 2;
        match damage {
            0 => bytes[7] = 2,
            1 => bytes[middle] ^= 1,
            2 => bytes.truncate(middle),
            3 => bytes.push(b' '),
            _ => bytes.clear(),
        }
        fs::write(&catalogue, bytes).unwrap();
        let index = setting.open();
        assert!(index.files().is_empty(), "damage {damage}");
        assert!(index.key() != key);
        assert_eq!(find(&index, 2), None);
    }
    // Without a table it finds nothing.
    index_all(&setting.open(), &path);
    fs::remove_file(setting.index_folder().join("table")).unwrap();
    assert!(setting.open().files().is_empty());
}

#[test]
fn what_cannot_be_indexed_is_refused() {
    let setting = Setting::new();
    let index = setting.open();
    let error = index
        .index(setting.folder.path(), Writes::Seldom)
        .unwrap_err();
    assert!(error.to_string().contains("not a plain file"), "{error}");
    let error = index
        .index(Path::new("/nonexistent/disk"), Writes::Seldom)
        .unwrap_err();
    assert!(error.to_string().contains("/nonexistent/disk"), "{error}");
}
