//! What libvirt's AppArmor profile lets the QEMU of a domain use. The kernel of a test machine may
//! be without AppArmor, so libvirt's own program is asked for the rules, and they are compared.

use crate::stage::{GUEST, LIMIT, Stage};
use longhaul_lab::guest::Tiny;
use longhaul_lab::guest::disks::local_disks;
use longhaul_lab::libvirt::{Around, Release};
use longhaul_lab::process::wait_until;
use std::fs;
use std::io::Write;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The program by which libvirt makes the rules of a domain's profile.
const HELPER: &str = "/usr/lib/libvirt/virt-aa-helper";

/// Returns the paths that a domain may read and write: patterns of AppArmor.
fn patterns(stage: &Stage, host: usize) -> Vec<String> {
    let daemon = &stage.daemons[host];
    let uuid = daemon.run(&["domuuid", GUEST]).unwrap();
    let xml = daemon.run(&["dumpxml", GUEST]).unwrap();
    let mut helper = Command::new(HELPER);
    helper.args(["--dryrun", "--replace", "--uuid"]);
    helper.arg(format!("libvirt-{}", uuid.trim()));
    let mut helper = helper
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = helper.stdin.take().unwrap();
    input.write_all(xml.as_bytes()).unwrap();
    drop(input);
    let said = helper.wait_with_output().unwrap();
    assert!(said.status.success(), "{}", said.status);
    let rules = String::from_utf8(said.stderr).unwrap();
    let rule = |line: &str| {
        let (path, modes) = line.trim().strip_prefix('"')?.split_once('"')?;
        let writes = modes.contains('r') && modes.contains('w');
        writes.then(|| path.to_owned())
    };
    rules.lines().filter_map(rule).collect()
}

/// Returns whether a pattern of AppArmor permits a path.
fn permits(pattern: &str, path: &str) -> bool {
    let Some((before, after)) = pattern.split_once('*') else {
        return pattern == path;
    };
    let Some(rest) = path.strip_prefix(before) else {
        return false;
    };
    let (after, crosses) = match after.strip_prefix('*') {
        Some(after) => (after, true),
        None => (after, false),
    };
    let ends = rest.char_indices().map(|(at, _)| at);
    let longest = if crosses { None } else { rest.find('/') };
    ends.chain([rest.len()])
        .filter(|end| *end <= longest.unwrap_or(rest.len()))
        .any(|end| permits(after, &rest[end..]))
}

/// Returns the sockets in a folder and those below it.
fn sockets_in(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let entries = entries.map(|entry| entry.unwrap());
    let mut sockets = Vec::new();
    for entry in entries {
        let kind = entry.file_type().unwrap();
        match kind.is_dir() {
            true => sockets.extend(sockets_in(&entry.path())),
            false => sockets.extend(kind.is_socket().then(|| entry.path())),
        }
    }
    sockets
}

#[test]
fn qemu_uses_only_what_its_profile_permits() {
    assert!(permits("/a/**/*.x", "/a/b/c.x") && permits("/a/**/*.x", "/a/b/c/d.x"));
    assert!(!permits("/a/*.x", "/a/b/c.x") && !permits("/a/**/*.x", "/a/b/c.y"));
    let Some(mut stage) = Stage::build("confined", Release::Installed) else {
        return;
    };
    let kinds = ["raw,writeback", "qcow2,writeback"].map(|kind| kind.parse().unwrap());
    let disks = local_disks(stage.lab.hosts()[0].folder(), 8 << 20, &kinds);
    disks.iter().for_each(|disk| disk.create().unwrap());
    let mut product = stage.start_agents(&disks);
    let held = stage.socket("held");
    let armed = format!("source:after-receipt:ready=hold:{}", held.display());
    let source = product.agent_mut(0).unwrap();
    source
        .restart_to_fail(&stage.lab.hosts()[0], &armed)
        .unwrap();
    let guest = Tiny::calm(GUEST).description();
    let around = Around {
        disks: &disks,
        ..Around::default()
    };
    stage.start_this(&guest, &around);
    let moving = product.migrate(0, GUEST, &stage.lab.hosts()[1], &[]);
    let moving = moving.unwrap();
    let reached = wait_until(LIMIT, || held.exists());
    assert!(reached, "{}", product.ends_of_logs());
    // The exports of the disks at the source, and the monitor at the destination.
    for (host, least) in [(0, 2), (1, 1)] {
        let run = stage.daemons[host].socket();
        let run = run.parent().unwrap();
        let sockets = sockets_in(&run.join("longhaul"));
        assert!(sockets.len() >= least, "{sockets:#?}");
        let patterns = patterns(&stage, host);
        for socket in sockets {
            let seen = Path::new("/run/libvirt").join(socket.strip_prefix(run).unwrap());
            let seen = seen.display().to_string();
            let permitted = patterns.iter().any(|pattern| permits(pattern, &seen));
            assert!(permitted, "{seen} is not permitted by {patterns:#?}");
        }
        // Its QEMU has none elsewhere.
        let state = stage.lab.hosts()[host].folder().join("state/fronts");
        let elsewhere = sockets_in(&state);
        let of_qemu = elsewhere.iter().filter(|path| path.ends_with("nbd"));
        assert_eq!(of_qemu.count(), 0, "{elsewhere:#?}");
    }
    fs::remove_file(&held).unwrap();
    let finished = moving.finish(LIMIT).unwrap();
    let logs = product.ends_of_logs();
    assert!(finished.completed(), "{}\n{logs}", finished.why());
    stage.hear(1);
    stage.verify();
    // Nothing remains of the move but the monitor.
    let run = stage.daemons[0].socket();
    let remains = sockets_in(&run.parent().unwrap().join("longhaul"));
    assert!(remains.is_empty(), "{remains:#?}");
}
