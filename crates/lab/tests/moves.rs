//! Tests verified moves of real guests end to end, on every QEMU version and machine type.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{LIMIT, Stage, tiny};
use longhaul_api::{GuestState, Report};
use longhaul_lab::guest::Chipset;
use longhaul_lab::installed;
use longhaul_lab::installed::{qemu, qemu_version};
use longhaul_lab::process::wait_until;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};

const LINK: &str = "400mbit,4ms";
/// Some pages rewritten per second, so that there are later passes.
const BUSY: u64 = 200;

/// The memory cache at the first host is used when the guest returns: as far as it was written to
/// its file, and as far as it is unchanged.
#[test]
fn qemu_10_moves_there_and_back_to_what_was_kept() {
    let kept = ("kept_memory".to_owned(), toml::Table::new().into());
    let kept = toml::Table::from_iter([kept]);
    let Some(mut stage) = Stage::with("10.0 to 10.0", ["10.0", "10.0"], LINK, &kept) else {
        return;
    };
    let name = "q35-1";
    let mut guest = stage.boot(&tiny(name, Chipset::Q35, "10.0", 1), BUSY);
    let state = stage.lab.host(0).unwrap().folder().join("state");
    let file = state.join(format!("memory/{name}.memory"));

    // The agent dies during the write, and the next one ends the retained QEMU.
    let held = stage.lab.host(0).unwrap().folder().join("held");
    let host = stage.lab.host(0).unwrap();
    let fails = format!("source:keeping:memory=hold:{}", held.display());
    let agent = stage.product.agent_mut(0).unwrap();
    agent.restart_to_fail(host, &fails).unwrap();
    let there = guest.migrate(&stage, 0, &[]).finish(LIMIT).unwrap();
    assert!(there.completed(), "{}", there.why());
    assert!(wait_until(LIMIT, || held.exists()));
    assert_eq!(stage.qemus(0, name).len(), 1);
    let seen = stage.product.guest(0, name).unwrap().unwrap();
    assert_eq!(seen.state, GuestState::Elsewhere);
    stage.product.agent_mut(0).unwrap().kill().unwrap();
    assert!(file.exists());
    stage.restart(&[0]);
    guest.assert_nothing_on(&stage, 0);
    let back = guest
        .migrate(&stage, 1, &["--verify"])
        .finish(LIMIT)
        .unwrap();
    assert!(back.completed(), "{}", back.why());
    assert!(wait_until(LIMIT, || !file.exists()), "it is here again");

    // It returns to a host that may still be writing its memory cache.
    guest.move_verified(&stage, 0);
    let says = || stage.product.ask::<Report>(0, &["report"]).unwrap();
    assert!(wait_until(LIMIT, || says().kept_memory.is_some()));
    let said = says().kept_memory.unwrap();
    assert!(said.whole && said.bytes > 16 << 20, "{said:?}");
    let found = fs::metadata(&file).unwrap();
    assert_eq!(found.mode() & 0o777, 0o600);
    assert!(found.blocks() * 512 < said.bytes + said.bytes / 4);
    let damaged = File::options().write(true).open(&file).unwrap();
    for block in (0..found.len() / 4096).step_by(3) {
        damaged.write_all_at(&[0x55; 4096], block * 4096).unwrap();
    }
    let back = guest.move_verified(&stage, 1).report.unwrap().bytes;
    assert!(back.kept_bytes > Some(said.bytes / 3), "{back:?}, {said:?}");
    assert!(back.rejected_bytes > Some(1 << 20), "{back:?}");
    assert!(wait_until(LIMIT, || !file.exists()), "it is here again");
    guest.end(&stage);
    let mut guest = stage.boot(&tiny("pc-2", Chipset::Pc, "10.0", 2), BUSY);
    guest.move_verified(&stage, 0);
    guest.end(&stage);
}

#[test]
fn qemu_7_2_moves_there_and_back() {
    if !installed::is_its_day(0, 2) {
        return;
    }
    moves_there_and_back("7.2");
}

/// Its own machine types do not wait for the switchover acknowledgement.
#[test]
fn qemu_11_1_moves_there_and_back() {
    if !installed::is_its_day(1, 2) {
        return;
    }
    moves_there_and_back("11.1");
}

fn moves_there_and_back(version: &str) {
    let purpose = format!("{version} to {version}");
    let Some(stage) = Stage::new(&purpose, [version, version], LINK) else {
        return;
    };
    let mut guest = stage.boot(&tiny("q35-2", Chipset::Q35, version, 2), BUSY);
    guest.move_verified(&stage, 0);
    guest.move_verified(&stage, 1);
    guest.end(&stage);
    let mut guest = stage.boot(&tiny("pc-1", Chipset::Pc, version, 1), BUSY);
    guest.move_verified(&stage, 0);
    guest.end(&stage);
}

#[test]
fn a_group_moves_by_one_command_within_one_limit() {
    const LIMIT_BPS: f64 = 60e6;
    let Some(stage) = Stage::new("a group", ["10.0", "10.0"], LINK) else {
        return;
    };
    let boot = |name| stage.boot(&tiny(name, Chipset::Q35, "10.0", 1), BUSY);
    let mut guests = ["first", "second"].map(boot);
    let to = stage.lab.host(1).unwrap().name();
    let words = [
        "--json", "migrate", "--group", "first", "second", "--to", to,
    ];
    let more = ["--bandwidth", "60mbit", "--verify"];
    let agent = stage.product.agent(0).unwrap();
    let said = agent.run(&[&words[..], &more[..]].concat()).unwrap();
    let last = said.lines().last().unwrap();
    let said: serde_json::Value = serde_json::from_str(last).unwrap();
    let group = &said["group"];
    assert_eq!(group["moved"], 2, "{group}");
    assert_eq!(group["not_begun"], serde_json::json!([]));
    let figure = |name: &str| group["sums"][name].as_f64().unwrap();
    // They run the same system.
    assert!(figure("shared_bytes") > 1e6, "{group}");
    let rate_bps = figure("link_bytes") * 8e3 / group["total_ms"].as_f64().unwrap();
    assert!(rate_bps < LIMIT_BPS * 1.1, "{rate_bps}: {group}");
    for guest in &mut guests {
        guest.assert_runs_only_on(&stage, 1);
    }
    // None of them is on this host any more.
    let refused = agent.run(&[&words[..], &more[..]].concat());
    assert!(refused.is_err(), "{refused:?}");
    guests.into_iter().for_each(|guest| guest.end(&stage));
}

#[test]
fn a_machine_type_that_both_know_moves_to_a_newer_qemu() {
    if !installed::is_its_day(0, 2) {
        return;
    }
    let (q35, pc) = (("old-q35", Chipset::Q35, 1), ("old-pc", Chipset::Pc, 2));
    let cases: [([&str; 2], &[_]); 3] = [
        (["7.2", "10.0"], &[q35, pc]),
        (["7.2", "11.1"], &[q35]),
        (["10.0", "11.1"], &[q35]),
    ];
    for (qemus, guests) in cases {
        let Some(stage) = Stage::new(&qemus.join(" to "), qemus, LINK) else {
            continue;
        };
        let versions = qemus.map(|label| qemu_version(&qemu(label).unwrap()).unwrap());
        for (name, chipset, vcpus) in guests {
            let mut guest = stage.boot(&tiny(name, *chipset, qemus[0], *vcpus), BUSY);
            if versions[0] == "10.0.13" && qemus[1] == "11.1" {
                // Debian 13's own: refused, because its state would not load.
                let refused = guest.migrate(&stage, 0, &[]).finish(LIMIT).unwrap();
                assert_eq!(refused.exit_code, Some(3), "{}", refused.why());
                let why = "does not load virtio devices of QEMU 10.0.13";
                assert!(refused.why().contains(why), "{}", refused.why());
            } else {
                guest.move_verified(&stage, 0);
            }
            guest.end(&stage);
        }
    }
}

#[test]
fn memory_above_4_gib_arrives() {
    let Some(stage) = Stage::new("above 4 GiB", ["10.0", "10.0"], LINK) else {
        return;
    };
    // Linux uses the highest memory first: that is where the arena is.
    let mut large = tiny("large", Chipset::Q35, "10.0", 1);
    large.memory_mib = 5 * 1024;
    let mut guest = stage.boot(&large, BUSY);
    guest.move_verified(&stage, 0);
    guest.end(&stage);
}

#[test]
fn after_a_move_the_guest_needs_no_agent() {
    if !installed::is_its_day(1, 2) {
        return;
    }
    let Some(mut stage) = Stage::new("no agent needed", ["10.0", "10.0"], LINK) else {
        return;
    };
    let kept = {
        let mut guest = stage.boot(&tiny("alone", Chipset::Q35, "10.0", 1), BUSY);
        guest.move_verified(&stage, 0);
        guest.arena
    };
    for host in 0..2 {
        stage.product.agent_mut(host).unwrap().kill().unwrap();
    }
    let pids = stage.qemus(1, "alone");
    assert_eq!(pids.len(), 1, "{pids:?}");
    let alone = wait_until(LIMIT, || connections(pids[0]) == ["channel-arena"]);
    assert!(
        alone,
        "the guest is connected to {:?}",
        connections(pids[0])
    );
    let files = files(pids[0]);
    assert!(
        files.iter().all(|file| file.ends_with("/qemu.log")),
        "the guest has files of Longhaul's open: {files:?}"
    );
    kept.wait_for_beat(LIMIT).unwrap();

    stage.restart(&[0, 1]);
    let mut guest = common::Running {
        name: "alone".to_owned(),
        arena: kept,
    };
    guest.assert_runs_only_on(&stage, 1);
    assert_eq!(stage.qemus(1, "alone"), pids);
    // The restarted agents know it, and move it again.
    guest.move_verified(&stage, 1);
    guest.end(&stage);
}

/// Returns the peers of a process's sockets: the last part of a unix socket's path, or another
/// description. A unix socket is listed in the table of the network namespace that its client
/// connected from.
fn connections(pid: i32) -> Vec<String> {
    let table = |of: &str| fs::read_to_string(format!("/proc/{of}/net/unix")).unwrap();
    let tables = table("self") + &table(&pid.to_string());
    let unix: Vec<Vec<&str>> = tables
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    let mut found = Vec::new();
    for link in links(pid) {
        let Some(inode) = link
            .strip_prefix("socket:[")
            .and_then(|rest| rest.strip_suffix(']'))
        else {
            continue;
        };
        match unix.iter().find(|fields| fields.get(6) == Some(&inode)) {
            // State 03 is connected; a listening socket's is 01.
            Some(fields) if fields[5] == "01" => {}
            Some(fields) => {
                let path = fields.get(7).copied().unwrap_or("unnamed");
                found.push(path.rsplit('/').next().unwrap().to_owned());
            }
            None => found.push(link),
        }
    }
    found
}

/// Returns the open files of a process below a laboratory's folders, or in memory.
fn files(pid: i32) -> Vec<String> {
    let of_longhaul = |link: &String| link.contains("/state/") || link.contains("memfd:");
    links(pid).into_iter().filter(of_longhaul).collect()
}

fn links(pid: i32) -> Vec<String> {
    fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .filter_map(|entry| fs::read_link(entry.unwrap().path()).ok())
        .map(|link| link.to_string_lossy().into_owned())
        .collect()
}
