use super::*;
use crate::host::fail_point;
use longhaul_protocol::{Attempt, Generation};
use longhaul_storage::{Journal, Journals};

/// Writes the note of a disk that leaves.
pub(crate) fn note_left(state: &Path, (guest, n): (&str, usize), image: &Path, left: LeftDisk) {
    let note = Note {
        left: Some(left),
        ..note(guest, image)
    };
    write(state, n, note);
}

pub(crate) fn note(guest: &str, image: &Path) -> Note {
    Note {
        guest: guest.to_owned(),
        disk: "vda".to_owned(),
        image: image.to_owned(),
        device: "/machine/x".to_owned(),
        nodes: None,
        node: "lh-x".to_owned(),
        export: "x".repeat(32),
        helper: None,
        stops: false,
        arriving: None,
        left: None,
        tracks: None,
        socket: None,
    }
}

pub(crate) fn write(state: &Path, n: usize, note: Note) -> Noted {
    let above = export_notes::create_above::<Note>(state).unwrap();
    let folder = above.join(format!("{}.{n}", note.guest));
    let noted = Noted::new(folder, note);
    noted.write().unwrap();
    noted
}

#[test]
fn an_unreadable_note_costs_only_its_own_guest() {
    let state = tempfile::tempdir().unwrap();
    let state = state.path();
    let (image, other) = (Path::new("/srv/web-7.raw"), Path::new("/srv/db.1.raw"));
    write(state, 0, note("web-7", image));
    let damaged = write(state, 0, note("db.1", other));
    let spec = FrontSpec {
        image: other.to_owned(),
        size: ExportSize::OfFile,
        locks: None,
        name: ExportName::new("x".repeat(32)).unwrap(),
        qemu_uid: None,
        arriving: false,
        tracked: false,
        fetched: None,
        socket: None,
    };
    FrontFolder::create(damaged.path(), &spec).unwrap();
    fs::write(folder(state).join("db.1.0.note"), "{").unwrap();
    assert_eq!(notes(state, "web-7").unwrap().len(), 1);
    assert!(notes(state, "db").unwrap().is_empty());
    let why = notes(state, "db.1").err().unwrap().to_string();
    assert!(why.contains("db.1.0.note"), "{why}");
    assert!(are_stopping(state, "db.1") && !are_stopping(state, "web-7"));
    // The damaged export still uses its own image, and no other.
    assert!(uses(state, other).unwrap() && uses(state, image).unwrap());
    assert!(!uses(state, Path::new("/srv/free.raw")).unwrap());
}

#[test]
fn a_disk_is_known_only_with_what_is_missing_of_it() {
    let state = tempfile::tempdir().unwrap();
    let state = state.path();
    let migration = MigrationId([7; 8]);
    let coming = Coming {
        migration,
        digest_key: [1; 32],
        pulled: Pulled::Often,
    };
    let note = Note {
        arriving: Some(coming),
        ..note("web-7", Path::new("/srv/web-7.raw"))
    };
    let noted = write(state, 0, note);
    let found = || incomplete(state, "web-7", migration);
    let why = found().err().unwrap().to_string();
    assert!(why.contains("masks"), "{why}");
    let stored = noted.folder().stored_masks();
    fs::create_dir_all(stored.parent().unwrap()).unwrap();
    let masks = Masks {
        region: RegionId(1),
        blocks: 64,
        boot: [0; 16],
        missing: Vec::new(),
    };
    masks.write(&stored).unwrap();
    assert_eq!(found().unwrap().len(), 1);
    fs::write(&stored, "LHMASKS1").unwrap();
    assert!(found().is_err());
    assert!(
        incomplete(state, "web-7", MigrationId([8; 8]))
            .unwrap()
            .is_empty()
    );
}

#[test]
fn an_export_proves_that_nothing_is_missing_until_that_is_recorded() {
    let state = tempfile::tempdir().unwrap();
    let migration = MigrationId([7; 8]);
    let journals = Journals::open(state.path()).unwrap();
    let path = state.path().join(file_name(migration));
    assert!(!is_committed(&path), "there is no journal");
    let attempt = Attempt(1);
    let mut journal = Journal::open(&journals, migration).unwrap();
    for (record, expected) in [
        (Record::Incomplete { attempt, disks: 1 }, false),
        (
            Record::Committed {
                attempt,
                generation: Generation(2),
            },
            true,
        ),
        (Record::AllPresent { attempt }, false),
    ] {
        fail_point::append(&mut journal, &record).unwrap();
        assert_eq!(is_committed(&path), expected, "{record:?}");
    }
}
