//! Tests that apply to every repository, wherever it is.

use crate::common::{imported, letters, stripe};
use longhaul_image::store::{Key, Listing, Store, StoreError};
use longhaul_image::{
    Digest, FindError, ImageId, ImportError, ImportOptions, RemoveError, Repository,
    RepositoryError, STRIPE_BYTES, Stripe, import, remove, verify,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

fn stripes(store: &dyn Store) -> usize {
    let all = (0..=u8::MAX).map(|first| store.list(Listing::Stripes(first)).unwrap().len());
    all.sum()
}

fn named(name: &str) -> ImportOptions {
    ImportOptions {
        name: Some(name.parse().unwrap()),
        rewrite: false,
    }
}

/// Images are imported, found, verified and removed; shared stripes are stored once.
pub(crate) fn images_come_and_go(store: &Arc<dyn Store>) {
    let none = Repository::open(store.clone()).unwrap_err();
    assert!(matches!(none, RepositoryError::None { .. }), "{none}");
    let repository = Repository::open_or_make(store.clone()).unwrap();
    let first = import(&repository, &letters("ab a.c"), &named("first"), &|_| {}).unwrap();
    assert_eq!(first.size_bytes, 6 * STRIPE_BYTES);
    assert_eq!(first.content_bytes, 4 * STRIPE_BYTES);
    assert!(first.stored_bytes < first.new_bytes, "{first:?}");
    assert_eq!(stripes(&**store), 3);
    let manifest = repository.manifest(first.id).unwrap();
    let content = Stripe::Stored(Digest::of(&stripe(b'a')));
    assert_eq!(manifest.stripe(3), content);
    assert_eq!(manifest.stripe(2), Stripe::Hole);
    assert_eq!(manifest.stripe(4), Stripe::Hole);

    let second = import(&repository, &letters("adc"), &named("second"), &|_| {}).unwrap();
    assert_eq!(second.new_bytes, STRIPE_BYTES);
    assert_eq!(stripes(&**store), 4);
    // The same content is the same image.
    let again = imported(&repository, "ab a.c");
    assert_eq!((again.id, again.new_bytes), (first.id, 0));

    let mut both = [first.id, second.id];
    both.sort();
    assert_eq!(repository.images().unwrap(), both);
    let names: Vec<_> = repository
        .names()
        .unwrap()
        .into_iter()
        .map(|(_, id)| id)
        .collect();
    assert_eq!(names, [first.id, second.id]);
    assert_eq!(repository.find("second").unwrap(), second.id);
    assert_eq!(repository.find(&first.id.short()).unwrap(), first.id);
    for unknown in ["third", "0123456789abcdef", "fir", ""] {
        let error = repository.find(unknown).unwrap_err();
        assert!(matches!(error, FindError::Unknown { .. }), "{error}");
    }
    let taken = import(&repository, &letters("ab"), &named("first"), &|_| {}).unwrap_err();
    assert!(matches!(taken, ImportError::NameTaken { .. }), "{taken}");

    for id in both {
        assert!(verify(&repository, id, &|_, _| {}).unwrap().is_good());
    }
    let removed = remove(&repository, &[first.id], false).unwrap();
    // Also `b`, left by the import that did not get its name.
    assert_eq!((removed.stripes, removed.kept), (1, 3));
    assert!(
        verify(&repository, second.id, &|_, _| {})
            .unwrap()
            .is_good()
    );
    let gone = repository.manifest(first.id).unwrap_err();
    assert!(
        matches!(gone, RepositoryError::Store(StoreError::Missing { .. })),
        "{gone}"
    );
    assert!(matches!(
        repository.find("first"),
        Err(FindError::Unknown { .. })
    ));
    remove(&repository, &[second.id], false).unwrap();
    assert_eq!(stripes(&**store), 0);
    assert!(repository.images().unwrap().is_empty());
    assert!(store.list(Listing::Markers).unwrap().is_empty());
    Repository::open(store.clone()).unwrap();
}

/// Damage is detected, never returned as content, and repaired by another import.
pub(crate) fn damage_is_found_and_mended(store: &Arc<dyn Store>) {
    let repository = Repository::open_or_make(store.clone()).unwrap();
    let id = imported(&repository, "wxyz").id;
    let key = |letter| Key::Stripe(Digest::of(&stripe(letter)));
    let other = store.get(&key(b'w'), 1 << 20).unwrap();
    store.put(&key(b'x'), &other).unwrap();
    store.put(&key(b'y'), &[0; 300_000]).unwrap();
    store.remove(&key(b'z')).unwrap();
    let verified = verify(&repository, id, &|_, _| {}).unwrap();
    assert_eq!((verified.damaged, verified.missing), (2, 1));
    assert_eq!(verified.first_bad_offset, Some(STRIPE_BYTES));
    // An ordinary import relies on existing stripes.
    assert_eq!(imported(&repository, "wxyz").new_bytes, STRIPE_BYTES);
    let rewrite = ImportOptions {
        rewrite: true,
        ..ImportOptions::default()
    };
    import(&repository, &letters("wxyz"), &rewrite, &|_| {}).unwrap();
    assert!(verify(&repository, id, &|_, _| {}).unwrap().is_good());

    store.put(&Key::Image(id), b"LHIMAGE\x01").unwrap();
    let error = verify(&repository, id, &|_, _| {}).unwrap_err().to_string();
    assert!(error.contains("import it again"), "{error}");
    // Its needs are unknown, so nothing else can be removed before it.
    let second = imported(&repository, "v").id;
    remove(&repository, &[second], false).unwrap_err();
    remove(&repository, &[id, second], false).unwrap();
    assert_eq!(stripes(&**store), 0);
}

/// Imports that are concurrent with removals produce complete images.
pub(crate) fn removals_and_imports_meet(store: &Arc<dyn Store>, rounds: usize) {
    let repository = Repository::open_or_make(store.clone()).unwrap();
    let base = imported(&repository, "abcdefgh").id;
    let done = AtomicBool::new(false);
    let ids: Vec<ImageId> = thread::scope(|scope| {
        let remover = scope.spawn(|| {
            let mut gave_way = 0;
            while !done.load(Ordering::Relaxed) {
                // The concurrent imports hold only stripes of this image.
                match remove(&repository, &[base], false) {
                    Ok(_) => {
                        imported(&repository, "abcdefgh");
                    }
                    Err(RemoveError::Import { owner }) => {
                        assert_eq!(owner.unwrap().pid, std::process::id());
                        gave_way += 1;
                        thread::sleep(Duration::from_millis(5));
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            gave_way
        });
        let importers = ["abcd", "efgh"].map(|text| {
            let repository = &repository;
            scope.spawn(move || {
                let mut id = None;
                for _ in 0..rounds {
                    id = Some(imported(repository, text).id);
                }
                id.unwrap()
            })
        });
        let ids = importers.map(|importer| importer.join());
        done.store(true, Ordering::Relaxed);
        remover.join().unwrap();
        ids.map(Result::unwrap).to_vec()
    });
    for id in ids {
        assert!(verify(&repository, id, &|_, _| {}).unwrap().is_good());
    }
}

/// An import that a removal did not wait for reports that.
pub(crate) fn an_import_that_was_overruled_says_so(store: &Arc<dyn Store>) {
    let repository = Repository::open_or_make(store.clone()).unwrap();
    let overruled = AtomicBool::new(false);
    let error = import(
        &repository,
        &letters("ab"),
        &ImportOptions::default(),
        &|_| {
            if !overruled.swap(true, Ordering::Relaxed) {
                let refused = remove(&repository, &[], false).unwrap_err();
                assert!(
                    refused.to_string().contains("nothing was removed"),
                    "{refused}"
                );
                remove(&repository, &[], true).unwrap();
            }
        },
    );
    let error = error.unwrap_err();
    assert!(matches!(error, ImportError::Overruled), "{error}");
    assert!(repository.images().unwrap().is_empty());
    let id = imported(&repository, "ab").id;
    assert!(verify(&repository, id, &|_, _| {}).unwrap().is_good());
}
