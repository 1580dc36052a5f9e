//! Tests disks whose images are read while they are fetched.

use crate::common::{PATIENCE, STRIPE, Told, stripe, wait_until};
use longhaul_image::store::Key;
use longhaul_image::{Digest, Fetched, ImageDisk, ImageId, ImageNotice, Order, STRIPE_BYTES};
use longhaul_storage::disk::{Disk, Extent};
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const EIO: i32 = 5;

struct Opened {
    disk: ImageDisk,
    notices: Arc<Mutex<Vec<ImageNotice>>>,
}

impl Opened {
    fn notices(&self) -> Vec<ImageNotice> {
        self.notices.lock().unwrap().clone()
    }
}

fn cache(told: &Told) -> PathBuf {
    told.folder.path().join("cache")
}

fn open_for(told: &Told, id: ImageId, patience: Duration) -> Opened {
    let notices = Arc::new(Mutex::new(Vec::new()));
    let told_of = notices.clone();
    let notify = move |notice| told_of.lock().unwrap().push(notice);
    let disk = ImageDisk::open(told.repository.clone(), id, &cache(told), patience, notify);
    Opened {
        disk: disk.unwrap(),
        notices,
    }
}

fn open(told: &Told, id: ImageId) -> Opened {
    open_for(told, id, PATIENCE)
}

fn read(disk: &ImageDisk, offset: usize, length: usize) -> std::io::Result<Vec<u8>> {
    let mut buffer = vec![0xee; length];
    disk.read(offset as u64, &mut buffer)?;
    Ok(buffer)
}

fn digests(letters: &str) -> Vec<Digest> {
    letters
        .bytes()
        .map(|letter| Digest::of(&stripe(letter)))
        .collect()
}

fn content(letters: &str) -> Vec<u8> {
    letters.bytes().flat_map(stripe).collect()
}

#[test]
fn what_is_read_is_what_was_imported_and_comes_once() {
    let told = Told::new();
    let id = told.import("ab cd a");
    let opened = open(&told, id);
    let disk = &opened.disk;
    assert_eq!(disk.size_bytes(), 7 * STRIPE_BYTES);
    assert_eq!(disk.missing(), 5);
    // Within a stripe, and across several with a hole between them.
    assert_eq!(read(disk, 4100, 10).unwrap(), vec![b'b'; 10]);
    let all = content("ab cd a");
    let (from, to) = (STRIPE + 100, 4 * STRIPE + 100);
    assert_eq!(read(disk, from, to - from).unwrap(), all[from..to]);
    assert_eq!(
        told.store.get_mood(|mood| mood.asked.clone()),
        digests("abcd")
    );
    assert_eq!(read(disk, 0, all.len()).unwrap(), all);
    assert_eq!(told.store.get_mood(|mood| mood.asked.len()), 5);
    assert_eq!(disk.missing(), 0);
    assert_eq!(disk.fetched_bytes(), 5 * STRIPE_BYTES);
    assert!(read(disk, all.len() - 1, 2).is_err());
    assert!(disk.read(u64::MAX, &mut [0; 2]).is_err());
    for changed in [disk.write(0, b"x"), disk.discard(0..1)] {
        changed.unwrap_err();
    }
    let extent = |count, hole| Extent {
        length_bytes: count * STRIPE_BYTES,
        hole,
    };
    let all = disk.extents(0..7 * STRIPE_BYTES, 9).unwrap();
    let expected = [(2, false), (1, true), (2, false), (1, true), (1, false)];
    assert_eq!(all, expected.map(|(count, hole)| extent(count, hole)));
    assert_eq!(
        disk.extents(0..7 * STRIPE_BYTES, 1).unwrap(),
        [extent(2, false)]
    );
    assert!(opened.notices().is_empty());
}

#[test]
fn of_several_who_want_a_stripe_one_gets_it_also_in_another_process() {
    let told = Told::new();
    let id = told.import("abc");
    // Two that share only the file, as in two processes.
    let (one, other) = (open(&told, id), open(&told, id));
    told.store.set(|mood| mood.held = true);
    thread::scope(|scope| {
        let readers: Vec<_> = [&one.disk, &other.disk]
            .into_iter()
            .flat_map(|disk| [disk; 8])
            .map(|disk| scope.spawn(|| read(disk, STRIPE, STRIPE).unwrap()))
            .collect();
        assert_eq!(told.store.wait_for_waiting(1), digests("b"));
        told.store.set(|mood| mood.held = false);
        for reader in readers {
            assert_eq!(reader.join().unwrap(), stripe(b'b'));
        }
    });
    assert_eq!(told.store.get_mood(|mood| mood.asked.clone()), digests("b"));
}

#[test]
fn the_background_goes_by_the_hints_and_lets_reads_go_first() {
    let told = Told::new();
    let letters = "abcdefghijklmnop";
    let id = told.import(letters);
    let opened = open(&told, id);
    let disk = &opened.disk;
    told.store.set(|mood| mood.held = true);
    // One does not exist.
    let order = Order::default();
    order.add([(9, 6), (7, 5), (1 << 30, 4), (5, 3), (11, 2), (0, 1)]);
    thread::scope(|scope| {
        let background = scope.spawn(|| disk.fetch(&order).unwrap());
        let mut first = told.store.wait_for_waiting(3);
        first.truncate(3);
        assert!(
            digests("jhfl")
                .iter()
                .filter(|hot| first.contains(hot))
                .count()
                == 3
        );
        let reader = scope.spawn(|| read(disk, 15 * STRIPE, STRIPE).unwrap());
        wait_until(|| {
            told.store
                .get_mood(|mood| mood.asked.contains(&digests("p")[0]))
        });
        let waiting = told.store.get_mood(|mood| mood.waiting.clone());
        assert!(waiting.len() <= 5, "{waiting:?}");
        told.store.set(|mood| mood.held = false);
        assert_eq!(reader.join().unwrap(), stripe(b'p'));
        assert_eq!(background.join().unwrap(), Fetched::All);
    });
    let asked = told.store.get_mood(|mood| mood.asked.clone());
    assert_eq!(asked.len(), letters.len(), "each once");
}

#[test]
fn a_whole_file_is_the_disk_and_its_holes_are_holes() {
    let told = Told::new();
    let text = format!("a{}b", " ".repeat(100));
    let id = told.import(&text);
    let opened = open(&told, id);
    assert_eq!(opened.disk.fetch(&Order::default()).unwrap(), Fetched::All);
    let path = cache(&told).join(format!("{id}.raw"));
    assert_eq!(fs::read(&path).unwrap(), content(&text));
    assert!(fs::metadata(&path).unwrap().blocks() * 512 <= 3 * STRIPE_BYTES);
}

#[test]
fn a_file_that_was_damaged_costs_a_fetch_and_gives_no_wrong_bytes() {
    let told = Told::new();
    let id = told.import("abcde");
    assert_eq!(
        open(&told, id).disk.fetch(&Order::default()).unwrap(),
        Fetched::All
    );
    let path = cache(&told).join(format!("{id}.raw"));
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    // One is torn, one is gone, the last one is truncated.
    file.write_all_at(&[7; 512], STRIPE_BYTES + 4096).unwrap();
    file.write_all_at(&vec![0; STRIPE], 3 * STRIPE_BYTES)
        .unwrap();
    file.set_len(4 * STRIPE_BYTES + 5000).unwrap();
    let manifest = cache(&told).join(format!("{id}.manifest"));
    told.store.set(|mood| mood.asked.clear());
    let opened = open(&told, id);
    assert_eq!(read(&opened.disk, 0, 5 * STRIPE).unwrap(), content("abcde"));
    assert_eq!(
        told.store.get_mood(|mood| mood.asked.clone()),
        digests("bde")
    );
    // A damaged manifest is fetched again as well.
    fs::write(&manifest, "LHIMAGE").unwrap();
    assert_eq!(read(&open(&told, id).disk, 5, 1).unwrap(), [b'a']);
    assert_eq!(
        Digest::of(&fs::read(manifest).unwrap()).to_string(),
        id.to_string()
    );
}

#[test]
fn while_the_store_is_away_reads_wait_and_what_is_here_goes_on() {
    let told = Told::new();
    let id = told.import("ab");
    assert_eq!(read(&open(&told, id).disk, 0, 4).unwrap(), b"aaaa");
    told.store.set(|mood| mood.away = true);
    // It can be opened, and present stripes can be read.
    let opened = open(&told, id);
    assert_eq!(read(&opened.disk, 0, 4).unwrap(), b"aaaa");
    thread::scope(|scope| {
        let reader = scope.spawn(|| read(&opened.disk, STRIPE, 4).unwrap());
        wait_until(|| !opened.notices().is_empty());
        assert!(matches!(opened.notices()[..], [ImageNotice::Away { .. }]));
        assert_eq!(read(&opened.disk, 9, 4).unwrap(), b"aaaa");
        told.store.set(|mood| mood.away = false);
        assert_eq!(reader.join().unwrap(), b"bbbb");
    });
    assert_eq!(opened.notices().last(), Some(&ImageNotice::Back));
}

#[test]
fn when_patience_ends_or_the_disk_a_read_fails_and_can_be_tried_again() {
    let told = Told::new();
    let id = told.import("ab");
    told.store.set(|mood| mood.away = true);
    // Its manifest was not stored: nothing is known of it.
    let folder = cache(&told);
    let closed = ImageDisk::open(told.repository.clone(), id, &folder, PATIENCE, |_| {});
    assert!(
        closed
            .unwrap_err()
            .to_string()
            .contains("cannot be reached")
    );
    told.store.set(|mood| mood.away = false);
    let opened = open_for(&told, id, Duration::from_millis(20));
    told.store.set(|mood| mood.away = true);
    let error = read(&opened.disk, 0, 1).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(EIO));
    assert!(matches!(
        opened.notices()[..],
        [
            ImageNotice::Away { .. },
            ImageNotice::Failed { offset: 0, .. }
        ]
    ));
    assert_eq!(
        opened.disk.fetch(&Order::default()).unwrap(),
        Fetched::Failed(2)
    );
    told.store.set(|mood| mood.away = false);
    assert_eq!(read(&opened.disk, 0, 1).unwrap(), b"a");

    let opened = open(&told, id);
    told.store.set(|mood| mood.away = true);
    let begin = Instant::now();
    thread::scope(|scope| {
        let reader = scope.spawn(|| read(&opened.disk, STRIPE, 1).unwrap_err());
        let background = scope.spawn(|| opened.disk.fetch(&Order::default()).unwrap());
        wait_until(|| !opened.notices().is_empty());
        opened.disk.end();
        assert_eq!(reader.join().unwrap().raw_os_error(), Some(EIO));
        assert_eq!(background.join().unwrap(), Fetched::Ended);
    });
    assert!(begin.elapsed() < PATIENCE);
}

#[test]
fn a_stripe_that_is_damaged_or_missing_fails_at_once_by_itself() {
    use longhaul_image::store::Store;
    let told = Told::new();
    let id = told.import("abc");
    let key = |letter| Key::Stripe(Digest::of(&stripe(letter)));
    let other = told.store.get(&key(b'c'), 1 << 20).unwrap();
    told.store.put(&key(b'a'), &other).unwrap();
    told.store.remove(&key(b'b')).unwrap();
    let opened = open(&told, id);
    for offset in [0, STRIPE] {
        let error = read(&opened.disk, offset, 1).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(EIO));
    }
    assert_eq!(read(&opened.disk, 2 * STRIPE, 1).unwrap(), b"c");
    let offsets: Vec<_> = opened
        .notices()
        .into_iter()
        .map(|notice| match notice {
            ImageNotice::Failed { offset, .. } => offset,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(offsets, [0, STRIPE_BYTES]);
    assert_eq!(
        opened.disk.fetch(&Order::default()).unwrap(),
        Fetched::Failed(2)
    );
}
