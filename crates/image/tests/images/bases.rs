//! Tests images that are brought to a host as files.

use crate::common::{PATIENCE, STRIPE, Told, stripe, wait_until};
use longhaul_image::store::{Key, Store};
use longhaul_image::{Bases, BringError, Digest, ImageId, Order};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

const LETTERS: &str = "ab cad";

fn bases(told: &Told) -> Bases {
    Bases::new(told.folder.path().join("state/bases"))
}

fn content() -> Vec<u8> {
    LETTERS.bytes().flat_map(stripe).collect()
}

fn bring(told: &Told, id: ImageId, patience: Duration) -> Result<u64, BringError> {
    let bringing = bases(told).bring(told.repository.clone(), id, patience)?;
    bringing.finish(&Order::default())?;
    Ok(bringing.read_bytes())
}

#[test]
fn an_image_that_was_brought_is_whole_and_is_written_by_nobody() {
    let told = Told::new();
    let id = told.import(LETTERS);
    let bases = bases(&told);
    let path = bases.path(id);
    assert_eq!(Bases::named(&path), Some(id));
    assert_eq!(Bases::named(Path::new("/elsewhere/a.raw")), None);
    assert_eq!(Bases::named(&path.with_extension("qcow2")), None);
    assert_eq!(bases.whole(id).unwrap(), None);

    let bringing = bases.bring(told.repository.clone(), id, PATIENCE).unwrap();
    let length = (LETTERS.len() * STRIPE) as u64;
    assert_eq!(bringing.size_bytes(), length);
    assert_eq!(fs::metadata(&path).unwrap().len(), length);
    assert_eq!(bases.whole(id).unwrap(), None, "nothing of it is here");
    bringing.finish(&Order::default()).unwrap();
    assert_eq!(bases.whole(id).unwrap(), Some(length));
    assert!(fs::read(&path).unwrap() == content());
    assert_eq!(bringing.here_bytes(), bringing.content_bytes());
    // Four stripes, compressed, and the manifest.
    let stored = |letter| {
        let key = Key::Stripe(Digest::of(&stripe(letter)));
        told.store.get(&key, 1 << 20).unwrap().len() as u64
    };
    let manifest = told.store.get(&Key::Image(id), 1 << 20).unwrap().len() as u64;
    let stripes: u64 = b"abcd".iter().map(|letter| stored(*letter)).sum();
    assert!(
        (stripes + manifest..=stripes + stored(b'a') + manifest).contains(&bringing.read_bytes())
    );

    // The file may have been written: all of it is verified, and only wrong stripes are fetched.
    fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    let mut wrong = content();
    wrong[3 * STRIPE + 7] ^= 1;
    assert_eq!(bases.whole(id).unwrap(), None);
    fs::write(&path, wrong).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o444)).unwrap();
    assert_eq!(bases.whole(id).unwrap(), None, "it was written to");
    fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    assert_eq!(bring(&told, id, PATIENCE).unwrap(), stored(b'c'));
    assert!(fs::read(&path).unwrap() == content());
    // A complete image needs no repository.
    told.store.set(|mood| mood.away = true);
    assert_eq!(bases.whole(id).unwrap(), Some(length));
}

#[test]
fn an_image_that_cannot_be_had_is_not_whole_and_says_why() {
    let told = Told::new();
    let id = told.import(LETTERS);
    let bases = bases(&told);
    let why = |patience| bring(&told, id, patience).unwrap_err().to_string();

    told.store.set(|mood| mood.away = true);
    assert!(why(PATIENCE).contains("cannot be reached"), "at once");
    told.store.set(|mood| mood.away = false);
    let unknown = ImageId(Digest::of(b"another"));
    let error = bring(&told, unknown, PATIENCE).unwrap_err().to_string();
    assert!(error.contains("is not in the image repository"), "{error}");

    // Unreachable in the middle: the wait is not repeated for each stripe.
    bases.bring(told.repository.clone(), id, PATIENCE).unwrap();
    told.store.set(|mood| mood.away = true);
    let away = why(Duration::from_millis(300));
    assert!(away.contains("cannot be reached"), "{away}");
    told.store.set(|mood| mood.away = false);

    let key = Key::Stripe(Digest::of(&stripe(b'd')));
    let good = told.store.get(&key, 1 << 20).unwrap();
    told.store.put(&key, b"rubbish").unwrap();
    assert!(why(PATIENCE).contains("is damaged"));
    assert_eq!(bases.whole(id).unwrap(), None);
    told.store.put(&key, &good).unwrap();
    bring(&told, id, PATIENCE).unwrap();
    assert!(fs::read(bases.path(id)).unwrap() == content());
}

#[test]
fn two_who_bring_the_same_image_fetch_it_once_and_one_can_be_ended() {
    let told = Told::new();
    let id = told.import(LETTERS);
    let bases = bases(&told);
    let begin = || Arc::new(bases.bring(told.repository.clone(), id, PATIENCE).unwrap());
    let ended = begin();
    told.store.set(|mood| mood.held = true);
    let waits = thread::spawn({
        let ended = ended.clone();
        move || ended.finish(&Order::default()).unwrap_err().to_string()
    });
    told.store.wait_for_waiting(3);
    ended.end();
    told.store.set(|mood| mood.held = false);
    let why = waits.join().unwrap();
    assert!(why.contains("given up"), "{why}");

    told.store.set(|mood| mood.asked.clear());
    fs::remove_file(bases.path(id)).unwrap();
    let finish = |one: Arc<longhaul_image::Bringing>| {
        thread::spawn(move || one.finish(&Order::default()).unwrap())
    };
    let both = [begin(), begin()].map(finish);
    both.into_iter().for_each(|one| one.join().unwrap());
    wait_until(|| bases.whole(id).unwrap().is_some());
    assert!(fs::read(bases.path(id)).unwrap() == content());
    // The letter that occurs twice may be fetched twice.
    let asked = told.store.get_mood(|mood| mood.asked.len());
    assert!((4..=5).contains(&asked), "{asked}");
}
