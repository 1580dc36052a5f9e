//! Tests a disk with a base image, which both hosts get from a repository.

use crate::stage::{GUEST, LIMIT, OnBase, Room, Stage};
use longhaul_api::{BaseChoice, DiskReport, Report};
use longhaul_image::Bases;
use longhaul_lab::process::wait_until;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// Size of a stripe of a base image.
const STRIPE: usize = 256 << 10;
/// The guest's write to that disk: a byte, its offset, and the length.
const WRITTEN: (u8, u64, u64) = (9, 1 << 20, 100 << 10);

fn base_of(stage: &Stage, host: usize) -> PathBuf {
    let id = &stage.on_base.as_ref().unwrap().id;
    stage.state(host).join("bases").join(format!("{id}.raw"))
}

fn moves(stage: &Stage, from: usize, how: &str) -> Report {
    moves_with(stage, from, how, "whole")
}

fn moves_with(stage: &Stage, from: usize, how: &str, base: &str) -> Report {
    let to = stage.lab.host(1 - from).unwrap();
    let words = ["--disks", how, "--base", base, "--verify"];
    let moving = stage.product.migrate(from, GUEST, to, &words).unwrap();
    let finished = stage.ended(moving);
    assert!(finished.completed(), "{}\n{}", finished.why(), stage.logs());
    stage.goes_on();
    for host in [0, 1] {
        stage.nothing_is_left(host);
        for disk in 0..2 {
            let image = stage.image_of(host, disk);
            assert_eq!(image.exists(), host != from, "{image:?}");
        }
    }
    *finished.report.unwrap()
}

/// Asserts that the move does not begin and changes nothing; returns the reason.
fn does_not(stage: &Stage) -> String {
    let to = stage.lab.host(1).unwrap();
    let moving = stage.product.migrate(0, GUEST, to, &[]).unwrap();
    let finished = stage.ended(moving);
    assert!(!finished.completed());
    stage.stays();
    finished.why()
}

/// Asserts that a plan refuses the move with this text, and the same of the move; returns the
/// reason.
fn is_refused(stage: &Stage, text: &str) -> String {
    let plan = stage.plan(0);
    assert_eq!(plan["possible"], false, "{plan}");
    assert!(plan.to_string().contains(text), "{text}: {plan}");
    let why = does_not(stage);
    assert!(why.contains(text), "{why}");
    why
}

/// Asserts that the guest reads the base image's content there, and its own writes.
fn reads_right(stage: &Stage, host: usize) {
    let reads = |byte: u8, at: u64, bytes: u64| {
        let said = stage.io_of_guest(host, &format!("read -P {byte} {at} {bytes}"));
        let right = said.contains(&format!("read {bytes}/{bytes}"));
        assert!(right, "{said}\n{}", stage.logs());
    };
    let (byte, bytes) = OnBase::PATTERN;
    reads(byte, 0, bytes as u64);
    let (byte, at, bytes) = WRITTEN;
    reads(byte, at, bytes);
    // Beyond the end of the base image.
    reads(0, OnBase::DISK_BYTES - 4096, 4096);
}

/// Asserts that QEMU has this host's base image open, and none of the other's.
fn stands_on_its_own(stage: &Stage, host: usize) {
    let flat = json!({ "flat": true });
    let nodes = stage
        .monitor(host)
        .ask_with("query-named-block-nodes", &flat);
    let nodes: Vec<Value> = nodes.as_array().unwrap().clone();
    let files: Vec<&str> = nodes
        .iter()
        .filter_map(|node| node["file"].as_str())
        .collect();
    let has = |host: usize| files.contains(&base_of(stage, host).to_str().unwrap());
    assert_eq!((has(host), has(1 - host)), (true, false), "{files:?}");
}

/// Moves a file or folder away, and back.
struct Away(PathBuf, PathBuf);

impl Away {
    fn take(path: PathBuf) -> Self {
        let away = path.with_extension("away");
        fs::rename(&path, &away).unwrap();
        Self(path, away)
    }
}

impl Drop for Away {
    fn drop(&mut self) {
        fs::rename(&self.1, &self.0).unwrap();
    }
}

/// Runs a task while the first host's page cache has nothing of its base image but these stripes,
/// which the guest has read.
fn while_used<T>(stage: &Stage, stripes: &[usize], does: impl FnOnce() -> T) -> T {
    let path = base_of(stage, 0);
    let file = File::open(&path).unwrap();
    let bases = Bases::new(path.parent().unwrap());
    let id = Bases::named(&path).unwrap();
    // Unwritten pages of the host's disk are not evicted at once, and some file systems sync
    // nothing.
    let is_gone = || {
        posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
        bases.hot(id).unwrap().is_empty()
    };
    assert!(wait_until(LIMIT, is_gone), "{:?}", bases.hot(id).unwrap());
    for stripe in stripes {
        let said = stage.io_of_guest(0, &format!("read {} 65536", stripe * STRIPE));
        assert!(said.contains("read 65536/65536"), "{said}");
    }
    // A host may evict pages that are seldom used.
    let (done, is_done) = mpsc::channel::<()>();
    let keep = move || {
        while is_done.recv_timeout(Duration::from_millis(20)) == Err(RecvTimeoutError::Timeout) {
            for stripe in stripes {
                let mut read = vec![0; 64 << 10];
                let at = (stripe * STRIPE) as u64;
                file.read_exact_at(&mut read, at).unwrap();
            }
        }
    };
    thread::scope(|scope| {
        scope.spawn(keep);
        let result = does();
        drop(done);
        result
    })
}

/// Damaged stripes of a repository, by their paths, and their original content.
struct Damage(Vec<(PathBuf, Vec<u8>)>);

impl Damage {
    /// Damages all other stripes of an image without holes.
    fn all_but(repository: &Path, id: &str, but: &[usize]) -> Self {
        let manifest = fs::read(repository.join("images").join(id)).unwrap();
        let stripes = OnBase::BYTES / STRIPE;
        let digests = manifest[16 + stripes.div_ceil(8)..].chunks(32).enumerate();
        let wrong = digests.filter(|(n, _)| !but.contains(n));
        let good = wrong.map(|(_, digest)| {
            let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            let place = Path::new("stripes").join(&digest[..2]).join(digest);
            let path = repository.join(&place);
            let good = fs::read(&path).unwrap();
            fs::write(&path, "something else").unwrap();
            (place, good)
        });
        Self(good.collect())
    }

    /// Restores the original content, in the repository's current place.
    fn mend(self, repository: &Path) {
        for (place, good) in self.0 {
            fs::write(repository.join(place), good).unwrap();
        }
    }
}

#[test]
fn a_disk_on_a_base_image_moves_without_it() {
    let Some(mut stage) = Stage::on_a_base("10.0", "400mbit,2ms") else {
        return;
    };
    let (byte, at, bytes) = WRITTEN;
    let said = stage.io_of_guest(0, &format!("write -P {byte} {at} {bytes}"));
    assert!(said.contains(&format!("wrote {bytes}/{bytes}")), "{said}");
    let on_base = stage.on_base.as_ref().unwrap();
    let (id, repository) = (on_base.id.clone(), on_base.repository.clone());
    let content = on_base.content.clone();
    let fetch = format!("longhaul image fetch {}", &id[..12]);

    // Paris has nothing of it, and cannot get it.
    let away = Away::take(repository.clone());
    let why = is_refused(&stage, "cannot have the base image");
    assert!(why.contains(&fetch), "{why}");
    drop(away);
    let room = Room::make(&stage.state(1).join("bases"), "40m");
    is_refused(&stage, "free for base images");
    drop(room);
    fs::remove_dir(stage.state(1).join("bases")).unwrap();
    let away = Away::take(repository.join("images").join(&id));
    is_refused(&stage, "cannot have the base image");
    drop(away);
    // All of it is damaged but the stripes that the guest has read.
    let hot = [0, 9];
    let damage = Damage::all_but(&repository, &id, &hot);
    let why = while_used(&stage, &hot, || does_not(&stage));
    assert!(
        why.contains("does not come") && why.contains(&fetch),
        "{why}"
    );
    let log = fs::read_to_string(stage.product.agent(1).unwrap().log()).unwrap();
    assert!(log.contains("is damaged"), "{log}");
    damage.mend(&repository);
    let came = fs::read(base_of(&stage, 1)).unwrap();
    for (n, (came, good)) in came.chunks(STRIPE).zip(content.chunks(STRIPE)).enumerate() {
        assert_eq!(came == good, hot.contains(&n), "stripe {n}");
    }
    // Lyon's own file is damaged, or may be.
    let base = base_of(&stage, 0);
    fs::set_permissions(&base, fs::Permissions::from_mode(0o644)).unwrap();
    is_refused(&stage, "does not have as a whole");
    fs::set_permissions(&base, fs::Permissions::from_mode(0o444)).unwrap();

    let there = moves(&stage, 0, "precopy");
    let base = there.disks.iter().find_map(|disk| disk.base.clone());
    assert_eq!(base, Some(id));
    // Stripes fetched before a bad one was found are not fetched again.
    let read = there.repository_bytes.unwrap();
    assert!((100 << 10..4 << 20).contains(&read), "{read}");
    let travelled = there.disks.iter().find(|disk| disk.name == "vdb").unwrap();
    assert!(travelled.image_bytes < 1 << 20, "{travelled:?}");
    assert!(fs::read(base_of(&stage, 1)).unwrap() == content);
    stands_on_its_own(&stage, 1);
    reads_right(&stage, 1);
    comes_behind_the_guest(&mut stage);
    stage.judge(0);
}

/// Returns this host's progress of the guest's base image.
fn coming(stage: &Stage, host: usize) -> String {
    let guest = stage.product.guest(host, GUEST).unwrap();
    guest.unwrap().coming.unwrap_or_default()
}

/// Asserts that the base image is complete, and no disk export is below the guest's disk any more.
fn is_settled(stage: &Stage, host: usize) {
    let folder = stage.state(host).join("coming");
    let left = || fs::read_dir(&folder).map_or(0, Iterator::count);
    assert!(wait_until(LIMIT, || left() == 0), "{}", stage.logs());
    assert_eq!(coming(stage, host), "");
    let mode = fs::metadata(base_of(stage, host)).unwrap().permissions();
    assert_eq!(mode.mode() & 0o777, 0o444);
    for part in ["base", "supervise"] {
        assert!(stage.fronts_of(host, part).is_empty(), "{part}");
    }
    stands_on_its_own(stage, host);
}

/// The guest returns to the first host, which has nothing of the base image any more, and cannot
/// get most of it.
fn comes_behind_the_guest(stage: &mut Stage) {
    let OnBase {
        id,
        content,
        repository,
    } = stage.on_base.clone().unwrap();
    // Once the guest is here, there is no room for the image.
    let bases = stage.state(0).join("bases");
    fs::rename(&bases, bases.with_extension("gone")).unwrap();
    let room = Room::make(&bases, "72m");
    let damage = Damage::all_but(&repository, &id, &[0, 9]);
    let moved = moves_with(stage, 1, "hybrid", "lazy");
    let lazy = |disk: &DiskReport| disk.base_choice == Some(BaseChoice::Lazy);
    assert!(moved.disks.iter().any(lazy), "{:?}", moved.disks);
    says(stage, &["is damaged"]);
    reads_pattern(stage);
    // Reads of unavailable content fail, and nothing else.
    let said = stage.io_of_guest(0, &format!("read {} 4096", 3 * STRIPE));
    assert!(said.contains("Input/output error"), "{said}");
    stage.goes_on();
    // Its server is killed, and then the agent and both.
    kill_parts(stage, &["base"]);
    reads_pattern(stage);
    stage.product.agent_mut(0).unwrap().kill().unwrap();
    kill_parts(stage, &["supervise", "base"]);
    let host = stage.lab.host(0).unwrap();
    stage.product.agent_mut(0).unwrap().restart(host).unwrap();
    reads_pattern(stage);
    // The repository is away: reads of missing content wait, and continue by themselves.
    let away = Away::take(repository);
    damage.mend(&away.1);
    thread::scope(|scope| {
        let at = 5 * STRIPE + 4096;
        let stage = &*stage;
        let waits = scope.spawn(move || stage.io_of_guest(0, &format!("read {at} 4096")));
        says(stage, &["1 read waits", "cannot be reached"]);
        assert!(!waits.is_finished());
        let full = fill(&bases);
        drop(away);
        // Content that cannot be stored is given to the guest nevertheless.
        let said = waits.join().unwrap();
        assert!(said.contains("read 4096/4096"), "{said}");
        says(stage, &["cannot be kept"]);
        fs::remove_file(full).unwrap();
    });
    is_settled(stage, 0);
    assert!(fs::read(base_of(stage, 0)).unwrap() == content);
    reads_right(stage, 0);
    stage.goes_on();
    drop(room);
}

/// Waits until the first host reports all of this about the arriving base image.
fn says(stage: &Stage, what: &[&str]) {
    let said = || what.iter().all(|what| coming(stage, 0).contains(what));
    assert!(wait_until(LIMIT, said), "{}", coming(stage, 0));
}

/// Fills up a folder's file system; returns the file that occupies it.
fn fill(folder: &Path) -> PathBuf {
    let path = folder.join("full");
    let mut file = File::create(&path).unwrap();
    let piece = vec![1; 4096];
    while file.write_all(&piece).is_ok() {}
    path
}

fn reads_pattern(stage: &Stage) {
    let (byte, bytes) = OnBase::PATTERN;
    let said = stage.io_of_guest(0, &format!("read -P {byte} 0 {bytes}"));
    assert!(said.contains(&format!("read {bytes}/{bytes}")), "{said}");
}

/// Kills the processes of disk exports on the first host with these parts.
fn kill_parts(stage: &Stage, parts: &[&str]) {
    for part in parts {
        let found = stage.fronts_of(0, part);
        assert_eq!(found.len(), 1, "{part}");
        kill(Pid::from_raw(found[0]), Signal::SIGKILL).unwrap();
    }
}

#[test]
fn a_disk_on_a_base_image_comes_back_and_starts_anew() {
    let Some(mut stage) = Stage::on_a_base("7.2", "400mbit,2ms") else {
        return;
    };
    let (byte, at, bytes) = WRITTEN;
    stage.io_of_guest(0, &format!("write -P {byte} {at} {bytes}"));
    moves_with(&stage, 0, "mirror", "lazy");
    is_settled(&stage, 1);
    let back = moves(&stage, 1, "auto");
    assert_eq!(back.repository_bytes, Some(0), "it is there already");
    stands_on_its_own(&stage, 0);
    reads_right(&stage, 0);
    moves(&stage, 0, "postcopy");
    stage.halt(1);

    // Its image names a file of the other host, which is not the one opened.
    let other = Away::take(base_of(&stage, 0));
    let file = stage
        .lab
        .host(0)
        .unwrap()
        .folder()
        .join(format!("{GUEST}.toml"));
    let words = ["guests", "start", file.to_str().unwrap()];
    let start = || stage.product.agent(1).unwrap().run(&words);
    let own = Away::take(base_of(&stage, 1));
    let refused = start().unwrap_err().to_string();
    assert!(refused.contains("longhaul image fetch"), "{refused}");
    drop(own);
    start().unwrap();
    let up = || stage.product.guest(1, GUEST).unwrap().is_some();
    assert!(wait_until(LIMIT, up));
    stands_on_its_own(&stage, 1);
    reads_right(&stage, 1);
    drop(other);
    stage.product.stop_guest(1, GUEST).unwrap();
    stage.judge_halted(1);
}
