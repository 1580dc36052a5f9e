//! Tests of the store: order, crashes, damage, backups.

use super::*;
use longhaul_protocol::{Generation, HostId};
use longhaul_realm::protocol::Lease;
use longhaul_realm::ruleset::StoreId;
use std::sync::mpsc::channel;
use std::time::Duration;

fn lease(generation: u64) -> Record {
    Record::Lease {
        realm: RealmId([1; 32]),
        guest: "web".to_owned(),
        entry: LeaseEntry {
            latest: Lease {
                generation: Generation(generation),
                holder: HostId([2; 32]),
                released: false,
            },
            before: None,
        },
    }
}

fn write_leases(folder: &Path, generations: std::ops::Range<u64>) -> Durable {
    let (database, mut durable) = Store::open(folder).unwrap();
    let (sender, done) = channel();
    let store = Store::start(database, move |ids, durable| {
        let _ = sender.send((ids.to_vec(), durable));
    })
    .unwrap();
    let orders = store.orders().unwrap();
    let count = generations.clone().count();
    for generation in generations {
        orders
            .send((WriteId(generation), lease(generation)))
            .unwrap();
        durable.apply(lease(generation));
    }
    let mut seen = Vec::new();
    while seen.len() < count {
        let (ids, written) = done.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(written);
        seen.extend(ids);
    }
    assert!(seen.is_sorted());
    drop(orders);
    durable
}

#[test]
fn what_was_written_is_read_again_with_the_same_store_id() {
    let folder = tempfile::tempdir().unwrap();
    let written = write_leases(folder.path(), 0..1000);
    let (_, read) = Store::open(folder.path()).unwrap();
    assert_eq!(read, written);
    assert_ne!(read.store, StoreId([0; 16]));
}

#[test]
fn a_backup_of_a_store_in_use_is_whole_and_gets_a_new_id() {
    let folder = tempfile::tempdir().unwrap();
    let written = write_leases(folder.path(), 0..10);
    let (database, _) = Store::open(folder.path()).unwrap();
    let to = folder.path().join("copy.db");
    backup(folder.path(), &to).unwrap();
    assert!(matches!(
        backup(folder.path(), &to),
        Err(StoreError::Exists(_))
    ));
    drop(database);
    let restored = tempfile::tempdir().unwrap();
    std::fs::copy(&to, restored.path().join(STORE_FILE)).unwrap();
    let (_, first) = Store::open(restored.path()).unwrap();
    assert_eq!(first.realms, written.realms);
    assert_ne!(first.store, written.store);
    let (_, second) = Store::open(restored.path()).unwrap();
    assert_eq!(second.store, first.store);
}

#[test]
fn a_foreign_or_damaged_or_later_file_is_refused_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(STORE_FILE);
    std::fs::write(
        &path,
        "a text that is no database, and long enough to be read as one",
    )
    .unwrap();
    let error = Store::open(folder.path()).unwrap_err();
    assert!(matches!(error, StoreError::Foreign(_)), "{error}");
    assert!(
        std::fs::read_to_string(&path)
            .unwrap()
            .starts_with("a text")
    );
    std::fs::remove_file(&path).unwrap();
    let other = Connection::open(&path).unwrap();
    other.execute_batch("CREATE TABLE precious (a);").unwrap();
    drop(other);
    let error = Store::open(folder.path()).unwrap_err();
    assert!(matches!(error, StoreError::Foreign(_)), "{error}");
    std::fs::remove_file(&path).unwrap();

    write_leases(folder.path(), 0..10);
    let database = Connection::open(&path).unwrap();
    database.pragma_update(None, "user_version", 9).unwrap();
    drop(database);
    let error = Store::open(folder.path()).unwrap_err();
    assert!(error.to_string().contains("update Longhaul"), "{error}");
    let database = Connection::open(&path).unwrap();
    database.pragma_update(None, "user_version", 1).unwrap();
    database
        .execute("UPDATE lease SET entry = x'ff'", [])
        .unwrap();
    drop(database);
    let error = Store::open(folder.path()).unwrap_err();
    assert!(error.to_string().contains("restore a backup"), "{error}");
}

#[test]
fn a_file_that_is_cut_or_overwritten_anywhere_is_refused_or_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(STORE_FILE);
    let written = write_leases(folder.path(), 0..50);
    let whole = std::fs::read(&path).unwrap();
    let mut refused = 0;
    for at in (0..whole.len()).step_by(509) {
        for cut in [true, false] {
            let mut bytes = whole.clone();
            match cut {
                true => bytes.truncate(at),
                false => bytes[at..]
                    .iter_mut()
                    .take(64)
                    .for_each(|byte| *byte ^= 0x5a),
            }
            std::fs::write(&path, &bytes).unwrap();
            match Store::open(folder.path()) {
                Ok((_, read)) => assert!(
                    read.realms == written.realms || read.realms.is_empty() || !cut,
                    "cut at {at}"
                ),
                Err(error) => {
                    refused += 1;
                    let text = error.to_string();
                    assert!(
                        text.contains("rendezvous.db") || text.contains("store"),
                        "{text}"
                    );
                }
            }
            for companion in ["-wal", "-shm"] {
                let _ =
                    std::fs::remove_file(folder.path().join(format!("{STORE_FILE}{companion}")));
            }
        }
    }
    assert!(refused > 10, "{refused}");
}

#[test]
fn a_folder_is_for_one_server() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let lock = Lock::take(&state).unwrap();
    assert!(matches!(Lock::take(&state), Err(StoreError::InUse(_))));
    drop(lock);
    assert!(Lock::take(&state).is_ok());
}
