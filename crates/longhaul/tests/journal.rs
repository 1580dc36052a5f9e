//! Tests `longhaul journal show` on an agent's files, word for word.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{check, longhaul};
use longhaul_engine::handover::{Record, Side};
use longhaul_protocol::{Attempt, Generation, HostId, MigrationId};
use longhaul_storage::{Journal, Journals};
use serde_json::Value;
use std::path::{Path, PathBuf};

const TIME: u64 = 1_800_000_000_123;
const ATTEMPT: Attempt = Attempt(1);

fn began(migration: MigrationId, side: Side, guest: &str, peer: &str) -> Record {
    Record::Began {
        migration,
        attempt: ATTEMPT,
        side,
        guest: guest.into(),
        generation: Generation(6),
        peer: HostId([7; 32]),
        peer_name: peer.into(),
        paused: false,
    }
}

fn write(state: &Path, id: u8, began_at: u64, records: &[Record]) -> PathBuf {
    let journals = Journals::open(&state.join("journal")).unwrap();
    let migration = MigrationId([0x7f, id, 0, 0, 0, 0, 0, 0]);
    let mut journal = Journal::open(&journals, migration).unwrap();
    for (index, record) in records.iter().enumerate() {
        let time = began_at + 1500 * index as u64;
        journal.append_at(time, record).unwrap();
    }
    journal.path().to_owned()
}

/// Creates journals: in doubt with a truncated record, here, an earlier one of the same guest,
/// damaged, and a file that is not a journal.
fn state() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let id = |id| MigrationId([0x7f, id, 0, 0, 0, 0, 0, 0]);
    let released = Record::Released {
        attempt: ATTEMPT,
        generation: Generation(7),
    };
    let source = began(id(1), Side::Source, "web-7", "paris-2");
    let path = write(folder.path(), 1, TIME, &[source, released]);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.extend_from_slice(&[9, 0, 0, 0, 1, 2, 3]);
    std::fs::write(&path, bytes).unwrap();

    let committed = Record::Committed {
        attempt: ATTEMPT,
        generation: Generation(7),
    };
    let ready = Record::Ready { attempt: ATTEMPT };
    let destination = |number| began(id(number), Side::Destination, "db-1", "oslo-1");
    let all = [destination(2), ready.clone(), committed];
    write(folder.path(), 2, TIME + 60_000, &all);

    let aborted = Record::Aborted {
        attempt: ATTEMPT,
        reason: "it was cancelled".into(),
    };
    let earlier = began(id(5), Side::Source, "db-1", "oslo-1");
    write(folder.path(), 5, TIME - 60_000, &[earlier, aborted]);

    let path = write(folder.path(), 3, TIME + 120_000, &[destination(3), ready]);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[40] ^= 1;
    std::fs::write(&path, bytes).unwrap();

    std::fs::write(folder.path().join("journal/7f04000000000000.journal"), "?").unwrap();
    folder
}

#[test]
fn journals_are_read_without_an_agent() {
    let folder = state();
    let state = folder.path().display().to_string();
    let socket = folder.path().join("none.sock");
    for (name, journal) in [
        ("journal_list", &[][..]),
        ("journal_doubt", &["7f01"]),
        ("journal_here", &["7F02"]),
        ("journal_earlier", &["7f05"]),
        ("journal_damaged", &["7f03"]),
        ("journal_foreign", &["7f04"]),
        ("journal_two", &["7f"]),
        ("journal_none", &["80"]),
    ] {
        let shown = [&["journal", "show"], journal].concat();
        let arguments = [&shown[..], &["--state", &state]].concat();
        let output = longhaul(&socket, &arguments);
        let shown = [&shown[..], &["--state", "[FOLDER]"]].concat();
        check(name, &shown, &output, folder.path());
    }
    let file = folder.path().join("journal/7f02000000000000.journal");
    let output = longhaul(&socket, &["journal", "show", &file.display().to_string()]);
    let shown = [
        "journal",
        "show",
        "[FOLDER]/journal/7f02000000000000.journal",
    ];
    check("journal_file", &shown, &output, folder.path());
}

#[test]
fn the_folder_is_found_in_the_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("agent.toml");
    let state = folder.path().join("state");
    std::fs::write(&config, format!("state = {state:?}\n")).unwrap();
    let config = config.display().to_string();
    let arguments = ["journal", "show", "--config", &config];
    let shown = ["journal", "show", "--config", "agent.toml"];
    let socket = folder.path().join("none.sock");
    let output = longhaul(&socket, &arguments);
    check("journal_no_state", &shown, &output, folder.path());
    std::fs::create_dir(&state).unwrap();
    let output = longhaul(&socket, &arguments);
    check("journal_empty", &shown, &output, folder.path());
}

#[test]
fn json_says_the_same() {
    let folder = state();
    let state = folder.path().display().to_string();
    let socket = folder.path().join("none.sock");
    let json = |more: &[&str], code: i32| -> Value {
        let start = ["--json", "journal", "show", "--state", &state];
        let output = longhaul(&socket, &[&start[..], more].concat());
        assert_eq!(output.status.code(), Some(code));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let doubt = json(&["7f01"], 0);
    assert_eq!(doubt["attempt"]["side"], "source");
    assert_eq!(doubt["records"][1]["record"], "RELEASED");
    assert_eq!(doubt["records"][1]["generation"], 7);
    assert_eq!(doubt["records"][1]["unix_ms"], TIME + 1500);
    assert_eq!(doubt["ending"]["cut_off"], 7);
    assert_eq!(doubt["may_run"], "in_doubt");
    let all = json(&[], 1);
    assert_eq!(all["journals"].as_array().unwrap().len(), 4);
    assert_eq!(all["unread"][0]["migration"], "7f04000000000000");
}
