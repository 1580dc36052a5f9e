//! Tests repositories in folders.

use crate::common::{STRIPE, Told, letters};
use crate::repository;
use longhaul_image::store::{FolderStore, Store, StoreError};
use longhaul_image::{ImportError, ImportOptions, Repository, RepositoryError, import, verify};
use longhaul_storage::disk::{Disk, RawDisk};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

fn folder() -> (TempDir, Arc<dyn Store>) {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(FolderStore::new(&folder.path().join("a/images")));
    (folder, store)
}

#[test]
fn images_come_and_go() {
    repository::images_come_and_go(&folder().1);
}

#[test]
fn damage_is_found_and_mended() {
    repository::damage_is_found_and_mended(&folder().1);
}

#[test]
fn removals_and_imports_meet() {
    repository::removals_and_imports_meet(&folder().1, 40);
}

#[test]
fn an_import_that_was_overruled_says_so() {
    repository::an_import_that_was_overruled_says_so(&folder().1);
}

#[test]
fn a_folder_that_is_not_mounted_is_away_and_not_empty() {
    let (folder, store) = folder();
    let repository = Repository::open_or_make(store.clone()).unwrap();
    let id = import(
        &repository,
        &letters("ab"),
        &ImportOptions::default(),
        &|_| {},
    )
    .unwrap()
    .id;
    fs::rename(folder.path().join("a"), folder.path().join("b")).unwrap();
    let error = repository.manifest(id).unwrap_err();
    let away = RepositoryError::Store(StoreError::Away {
        store: String::new(),
        reason: String::new(),
    });
    assert_eq!(
        std::mem::discriminant(&error),
        std::mem::discriminant(&away)
    );
    assert!(error.to_string().contains("mounted?"), "{error}");
    assert!(matches!(
        error,
        RepositoryError::Store(StoreError::Away { .. })
    ));
    // A repository of a newer version is not touched.
    fs::rename(folder.path().join("b"), folder.path().join("a")).unwrap();
    let format = folder.path().join("a/images/longhaul-images");
    fs::write(&format, "longhaul image repository 2\n").unwrap();
    let error = Repository::open_or_make(store).unwrap_err().to_string();
    assert!(error.contains("use a newer one"), "{error}");
}

#[test]
fn what_an_import_left_is_cleared_away() {
    let (folder, store) = folder();
    let repository = Repository::open_or_make(store).unwrap();
    import(
        &repository,
        &letters("ab"),
        &ImportOptions::default(),
        &|_| {},
    )
    .unwrap();
    let images = folder.path().join("a/images");
    let left = images.join("images/.new-0123");
    fs::write(&left, "half").unwrap();
    assert_eq!(repository.images().unwrap().len(), 1);
    longhaul_image::remove(&repository, &[], false).unwrap();
    assert!(!left.exists());
}

#[test]
fn an_unreadable_sector_is_named_and_nothing_is_published() {
    let told = Told::new();
    let error = import(
        &told.repository,
        &letters("abc!"),
        &ImportOptions::default(),
        &|_| {},
    );
    match error.unwrap_err() {
        ImportError::Read { offset, error } => {
            assert_eq!(offset, 3 * STRIPE as u64);
            assert!(error.to_string().contains("unreadable"));
        }
        other => panic!("{other}"),
    }
    assert!(told.repository.images().unwrap().is_empty());
}

#[test]
fn a_sparse_file_is_read_where_it_has_data() {
    let told = Told::new();
    let path = told.folder.path().join("disk.raw");
    let file = File::create(&path).unwrap();
    let size_bytes = (1 << 30) + 700;
    file.set_len(size_bytes).unwrap();
    file.write_all_at(b"begin", 0).unwrap();
    // Across the border of two stripes, and at the very end.
    file.write_all_at(b"middle", 500 * STRIPE as u64 - 3)
        .unwrap();
    file.write_all_at(b"end", size_bytes - 3).unwrap();
    let disk = RawDisk::open_to_read(&path).unwrap();
    disk.write(0, b"x").unwrap_err();
    let seen = Mutex::new(Vec::new());
    let imported = import(
        &told.repository,
        &disk,
        &ImportOptions::default(),
        &|progress| {
            seen.lock().unwrap().push(progress.read_bytes);
            assert_eq!(progress.total_bytes, 4 * STRIPE as u64);
        },
    );
    let imported = imported.unwrap();
    let seen = seen.into_inner().unwrap();
    assert_eq!(seen.iter().max(), Some(&(3 * STRIPE as u64 + 700)));
    assert_eq!(imported.size_bytes, size_bytes);
    assert_eq!(imported.content_bytes, 3 * STRIPE as u64 + 700);
    let verified = verify(&told.repository, imported.id, &|_, _| {}).unwrap();
    assert_eq!((verified.stripes, verified.is_good()), (4, true));
}

#[test]
fn disks_of_impossible_sizes_are_refused() {
    let told = Told::new();
    let error = import(
        &told.repository,
        &letters(""),
        &ImportOptions::default(),
        &|_| {},
    );
    let error = error.unwrap_err().to_string();
    assert!(error.contains("1 byte to 1 TiB"), "{error}");
}
