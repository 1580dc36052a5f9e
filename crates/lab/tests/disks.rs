//! Guests that take a disk along: what they wrote is judged from outside after each move, and after
//! moves that were broken off. Needs root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

use longhaul_api::{Outcome, Phase, Report};
use longhaul_lab::guest::disks::{Cache, Format, LocalDisk, local_disks};
use longhaul_lab::guest::{KernelFiles, Tiny};
use longhaul_lab::history::task::{History, Task, description};
use longhaul_lab::history::workload::Work;
use longhaul_lab::installed;
use longhaul_lab::lab::{Lab, Plan};
use longhaul_lab::process::wait_until;
use longhaul_lab::product::{Move, Product, Settings, channel_socket};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const LIMIT: Duration = Duration::from_secs(180);
const DISK_BYTES: u64 = 24 << 20;
const GUEST: &str = "writer";

/// Guests under TCG share two cores badly: one at a time.
static TURN: Mutex<()> = Mutex::new(());

/// Two hosts that share nothing, and a guest that writes to a disk of its own.
struct Stage {
    // Its file system goes before the laboratory's folder.
    _room: Option<Room>,
    lab: Lab,
    product: Product,
    history: History,
    /// The files of its disks' images.
    disks: Vec<String>,
    /// Where each host has the images.
    folders: Vec<PathBuf>,
    seed: u64,
    _turn: MutexGuard<'static, ()>,
}

impl Stage {
    fn new(version: &str, link: &str) -> Option<Self> {
        Self::with(version, link, &["raw,writeback"], None)
    }

    /// With disks of these kinds, for which paris has only so much room.
    fn with(version: &str, link: &str, kinds: &[&str], room: Option<&str>) -> Option<Self> {
        if let Err(error) = installed::qemu(version) {
            assert!(!installed::all_required(), "{error}");
            eprintln!("SKIPPED disks: {error}");
            return None;
        }
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut lab = Lab::create(&Plan {
            purpose: "test: disks that move".to_owned(),
            hosts: 2,
            link: link.parse().unwrap(),
            seed: 1,
        })
        .unwrap();
        let mut folders: Vec<PathBuf> = lab.hosts().iter().map(|h| h.folder().to_owned()).collect();
        let room = room.map(|size| Room::make(&folders[1].join("room"), size));
        if let Some(room) = &room {
            folders[1].clone_from(&room.0);
        }
        let kinds: Vec<_> = kinds.iter().map(|kind| kind.parse().unwrap()).collect();
        let disks = local_disks(&folders[0], DISK_BYTES, &kinds);
        disks.iter().for_each(|disk| disk.create().unwrap());
        disks.iter().for_each(furnish);
        let files = KernelFiles::make_with_history(&folders[0]).unwrap();
        let settings = Settings {
            qemus: vec![version.to_owned()],
            accelerator: "tcg".to_owned(),
        };
        let tables = |index: usize| {
            let mut tables = images(&disks, &folders[index]);
            let held = folders[index].join("held").display().to_string();
            let files = ("files".to_owned(), vec![held].into());
            let content = toml::Table::from_iter([files]);
            tables.insert("content".to_owned(), content.into());
            tables
        };
        let product = Product::start_each_with(&mut lab, &files, &settings, tables).unwrap();
        let mut tiny = Tiny::new(GUEST);
        tiny.machine_version = version.to_owned();
        let guest = description(&tiny, &disks);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let seed = now.as_nanos() as u64 >> 8;
        eprintln!("history of seed {seed}");
        // Slow enough for its memory to be moved by a busy machine.
        let work = Work {
            operations_per_s: 60,
            ..Work::default()
        };
        let task = Task {
            disks: &disks,
            seed,
            depth: 4,
            work,
        };
        let mut history = History::new(&task);
        for host in lab.hosts() {
            let socket = |channel: &str| channel_socket(host, GUEST, channel);
            history.listen(socket).unwrap();
        }
        product.start_guest(&lab, 0, &guest).unwrap();
        history.begin(&task).unwrap();
        history.wait_for(60, LIMIT).unwrap();
        Some(Self {
            lab,
            product,
            history,
            disks: disks.iter().map(file_name).collect(),
            folders,
            seed,
            _room: room,
            _turn: turn,
        })
    }

    fn image(&self, host: usize) -> PathBuf {
        self.image_of(host, 0)
    }

    fn image_of(&self, host: usize, disk: usize) -> PathBuf {
        self.folders[host].join(&self.disks[disk])
    }

    /// The ends of both agents' logs.
    fn logs(&self) -> String {
        let log = |host| {
            let text = fs::read_to_string(self.product.agent(host).unwrap().log()).unwrap();
            let mut last: Vec<&str> = text.lines().rev().take(25).collect();
            last.reverse();
            last.join("\n")
        };
        format!("{}\n\n{}", log(0), log(1))
    }

    /// It goes on where it is now.
    fn goes_on(&self) {
        let done = self.history.heard().told.done;
        self.history.wait_for(done + 30, LIMIT).unwrap();
        let heard = self.history.heard();
        assert_eq!((heard.errors, heard.first_error), (0, None));
    }

    fn moves(&self, from: usize, how: &str) -> Report {
        let to = self.lab.host(1 - from).unwrap();
        let words = ["--disks", how, "--verify"];
        let moving = self.product.migrate(from, GUEST, to, &words).unwrap();
        let finished = moving.finish(LIMIT).unwrap();
        assert!(finished.completed(), "{}\n{}", finished.why(), self.logs());
        let report = *finished.report.unwrap();
        let verified = report.verify.clone().unwrap();
        let compared = match how {
            "hybrid" | "postcopy" => 0,
            _ => report.disks.len(),
        };
        assert_eq!(verified.disks as usize, compared);
        assert_eq!(verified.disk_bytes, verified.disks as u64 * DISK_BYTES);
        assert!(verified.disk_bytes_stopped <= verified.disk_bytes);
        assert_eq!(report.disks[0].why.is_some(), how == "auto");
        self.goes_on();
        self.nothing_is_left(from);
        self.nothing_is_left(1 - from);
        assert!(!self.image(from).exists(), "{:?}", self.image(from));
        report
    }

    /// What was set aside when the guest left a host.
    fn set_aside(&self, host: usize) -> PathBuf {
        self.folders[host].join("disk0.raw.moved")
    }

    /// Begins a move that takes so long that something can happen meanwhile.
    fn begins(&self, how: &str) -> Move {
        let words = ["--disks", how, "--bandwidth", "4mbit", "--patience", "3s"];
        let to = self.lab.host(1).unwrap();
        let mut moving = self.product.migrate(0, GUEST, to, &words).unwrap();
        let began = moving.wait_for_phase(Phase::Precopy, LIMIT);
        assert!(began, "{}\n{}", moving.so_far().why(), self.logs());
        assert_eq!(self.fronts("tell").len(), self.disks.len());
        moving
    }

    /// The guest goes on where it was, and nothing tells of the move.
    fn stays(&self) {
        self.goes_on();
        self.nothing_is_left(0);
        self.nothing_is_left(1);
        assert!(self.fronts("tell").is_empty());
        assert!(self.fronts("supervise").is_empty());
        for disk in 0..self.disks.len() {
            let image = |host: usize| self.image_of(host, disk).exists();
            assert!(image(0) && !image(1), "disk {disk}");
        }
    }

    /// The processes of front ends that do this part.
    fn fronts(&self, part: &str) -> Vec<i32> {
        self.fronts_of(0, part)
    }

    fn fronts_of(&self, host: usize, part: &str) -> Vec<i32> {
        let folder = self.lab.host(host).unwrap().folder().to_owned();
        let all = fs::read_dir("/proc").unwrap().flatten();
        let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let is_one = |pid: &i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
            let ours =
                |word: &&[u8]| String::from_utf8_lossy(word).contains(folder.to_str().unwrap());
            words.contains(&part.as_bytes()) && words.iter().any(ours)
        };
        pids.filter(is_one).collect()
    }

    /// No front end, and nothing to be removed later.
    fn nothing_is_left(&self, host: usize) {
        let state = self.lab.host(host).unwrap().folder().join("state");
        for folder in ["fronts", "arriving"] {
            let empty = wait_until(LIMIT, || is_empty(&state.join(folder)));
            let found =
                fs::read_dir(state.join(folder)).map(|all| all.flatten().collect::<Vec<_>>());
            assert!(empty, "{found:?}");
        }
    }

    /// Ends the guest on this host, and judges its disk.
    fn judge(mut self, host: usize) {
        self.history.stop().unwrap();
        self.product.stop_guest(host, GUEST).unwrap();
        let record = self.history.finish().unwrap();
        assert!(record.quiet && record.errors == 0, "{record:?}");
        let folder = &self.folders[host];
        let judgement = record.judge(folder).unwrap();
        assert_eq!(judgement.findings, [], "seed {}, {record:?}", self.seed);
        assert!(judgement.newest.is_some(), "{judgement:?}");
        let qcow2 = record.disks.iter().filter(|it| it.format == Format::Qcow2);
        qcow2.for_each(|disk| what_else_is_in_it_is_there(&folder.join(&disk.image)));
        // The judge is not blind.
        let image = folder.join(&record.disks[0].image);
        let content = fs::read(&image).unwrap();
        fs::write(&image, vec![0; content.len()]).unwrap();
        assert!(record.judge(folder).unwrap().wrong_sectors > 100);
    }
}

fn run(program: &str, words: &[&str], image: &Path) -> String {
    let output = Command::new(program)
        .args(words)
        .arg(image)
        .output()
        .unwrap();
    assert!(output.status.success(), "{words:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Gives an image in qcow2 what no raw one has: a snapshot with other content, and a bitmap.
fn furnish(disk: &LocalDisk) {
    if disk.kind.format == Format::Qcow2 {
        let write = |command: &str| run("qemu-io", &["-f", "qcow2", "-c", command], &disk.path);
        write("write -q -P 0x55 0 24M");
        run("qemu-img", &["snapshot", "-c", "before"], &disk.path);
        write("write -q -z -u 0 24M");
        let mut command = Command::new("qemu-img");
        let bitmap = command.args(["bitmap", "--add"]).arg(&disk.path);
        assert!(bitmap.arg("kept").status().unwrap().success());
    }
}

fn what_else_is_in_it_is_there(image: &Path) {
    run("qemu-img", &["check", "-q", "-f", "qcow2"], image);
    let info = run("qemu-img", &["info", "-f", "qcow2", "--output=json"], image);
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    let bitmap = &info["format-specific"]["data"]["bitmaps"][0];
    assert_eq!(bitmap["name"], "kept", "{info}");
    assert_eq!(
        bitmap["flags"],
        serde_json::json!(["auto"]),
        "it is not to be used"
    );
    let raw = image.with_extension("snapshot");
    let mut command = Command::new("qemu-img");
    let convert = command.args(["convert", "-l", "before", "-O", "raw"]);
    assert!(convert.arg(image).arg(&raw).status().unwrap().success());
    assert!(fs::read(raw).unwrap() == vec![0x55; DISK_BYTES as usize]);
}

/// A file system of a size of its own.
struct Room(PathBuf);

impl Room {
    fn make(at: &Path, size: &str) -> Self {
        fs::create_dir(at).unwrap();
        let size = format!("size={size}");
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "none"])
            .arg(at)
            .status();
        assert!(mount.unwrap().success());
        Self(at.to_owned())
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        // A guest that a failed test left may have a file there open.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).map_or(true, |mut all| all.next().is_none())
}

fn file_name(disk: &LocalDisk) -> String {
    let name = disk.path.file_name().unwrap();
    name.to_string_lossy().into_owned()
}

/// How a host's configuration names the images of the guest.
fn images(disks: &[LocalDisk], folder: &Path) -> toml::Table {
    let image = |disk: &LocalDisk| {
        let path = folder.join(file_name(disk));
        let table = toml::Table::from_iter([
            ("path".to_owned(), path.display().to_string().into()),
            ("format".to_owned(), disk.kind.format.name().into()),
            ("direct".to_owned(), (disk.kind.cache == Cache::None).into()),
        ]);
        (disk.image.clone(), toml::Value::from(table))
    };
    let images: toml::Table = disks.iter().map(image).collect();
    toml::Table::from_iter([("images".to_owned(), images.into())])
}

fn there_and_back(version: &str) {
    let kinds = ["raw,writeback", "raw,none"];
    let Some(stage) = Stage::with(version, "400mbit,2ms", &kinds, None) else {
        return;
    };
    let allocated = |path: PathBuf| fs::metadata(path).unwrap().blocks() * 512;
    // Some file of the destination's has most of what the guest has written so far.
    let new = stage.folders[1].join("new");
    fs::create_dir(&new).unwrap();
    fs::copy(stage.image(0), new.join("copy")).unwrap();
    fs::rename(new, stage.folders[1].join("held")).unwrap();
    let log = stage.product.agent(1).unwrap().log().to_owned();
    let known = || {
        fs::read_to_string(&log)
            .unwrap()
            .contains("its content is known")
    };
    assert!(wait_until(LIMIT, known), "{}", stage.logs());
    let there = stage.moves(0, "auto");
    assert!(
        there.bytes.kept_bytes > Some(100 << 10),
        "{:?}",
        there.bytes
    );
    assert!(allocated(stage.image(1)) < DISK_BYTES + (1 << 20));
    // It comes back to what it left, of which somebody has changed a part.
    let left = fs::read(stage.set_aside(0)).unwrap();
    let blocks = left.chunks(4096).enumerate();
    let changed = blocks.flat_map(|(n, block)| match n % 3 {
        0 => vec![0x55; block.len()],
        _ => block.to_vec(),
    });
    fs::write(stage.set_aside(0), changed.collect::<Vec<u8>>()).unwrap();
    let back = stage.moves(1, "mirror");
    assert!(back.bytes.kept_bytes > Some(100 << 10), "{:?}", back.bytes);
    assert!(
        back.bytes.rejected_bytes > Some(100 << 10),
        "{:?}",
        back.bytes
    );
    stage.moves(0, "hybrid");
    assert!(allocated(stage.image(1)) < DISK_BYTES + (1 << 20));
    stage.moves(1, "postcopy");
    stage.judge(0);
}

/// What is left of a disk comes whatever is cut and dies meanwhile, on both hosts, and the guest loses
/// nothing.
#[test]
fn what_is_left_of_a_disk_comes_whatever_dies_meanwhile() {
    let Some(mut stage) = Stage::new("10.0", "20mbit,2ms") else {
        return;
    };
    let to = stage.lab.host(1).unwrap();
    let words = ["--disks", "postcopy"];
    let mut moving = stage.product.migrate(0, GUEST, to, &words).unwrap();
    assert!(
        moving.wait_for_phase(Phase::Finishing, LIMIT),
        "{}",
        stage.logs()
    );
    let link = stage.lab.link(0, 1).unwrap();
    link.cut(Duration::from_secs(600)).unwrap();
    for part in ["arrive", "supervise", "arrive"] {
        // One that was taken over is being started again.
        let one = wait_until(LIMIT, || stage.fronts_of(1, part).len() == 1);
        assert!(one, "{part}\n{}", stage.logs());
        let killed = stage.fronts_of(1, part);
        kill(Pid::from_raw(killed[0]), Signal::SIGKILL).unwrap();
        let next = || {
            let now = stage.fronts_of(1, part);
            part == "supervise" || now.len() == 1 && now != killed
        };
        assert!(wait_until(LIMIT, next), "{part}\n{}", stage.logs());
        if part == "supervise" {
            // The next agent starts the next one.
            let host = stage.lab.host(1).unwrap();
            let agent = stage.product.agent_mut(1).unwrap();
            agent.kill().unwrap();
            agent.restart(host).unwrap();
            assert!(wait_until(LIMIT, || stage.fronts_of(1, part).len() == 1));
        }
    }
    assert!(
        stage.image(0).exists(),
        "nothing was left: {}",
        stage.logs()
    );
    let host = stage.lab.host(0).unwrap();
    let agent = stage.product.agent_mut(0).unwrap();
    agent.kill().unwrap();
    // It may have lost its agent, or not.
    let _ = moving.finish(LIMIT);
    stage.product.agent_mut(0).unwrap().restart(host).unwrap();
    stage.lab.link(0, 1).unwrap().heal().unwrap();
    let gone = wait_until(LIMIT, || !stage.image(0).exists());
    assert!(gone, "{}", stage.logs());
    stage.nothing_is_left(0);
    stage.nothing_is_left(1);
    stage.goes_on();
    stage.judge(1);
}

/// Once the link is back, a guest that was stalled goes on by itself, and its agents finish the move.
#[test]
fn a_cut_while_something_is_left_is_a_pause() {
    let Some(stage) = Stage::new("7.2", "20mbit,2ms") else {
        return;
    };
    let to = stage.lab.host(1).unwrap();
    let words = ["--disks", "hybrid"];
    let mut moving = stage.product.migrate(0, GUEST, to, &words).unwrap();
    assert!(
        moving.wait_for_phase(Phase::Finishing, LIMIT),
        "{}",
        stage.logs()
    );
    let link = stage.lab.link(0, 1).unwrap();
    link.cut(Duration::from_secs(600)).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    link.heal().unwrap();
    let finished = moving.finish(LIMIT).unwrap();
    assert!(finished.completed(), "{}\n{}", finished.why(), stage.logs());
    stage.goes_on();
    stage.nothing_is_left(0);
    stage.nothing_is_left(1);
    stage.judge(1);
}

/// An agent's death leaves the disk to the front end, which the next agent takes out. The front end's
/// own deaths are not noticed.
#[test]
fn a_guest_keeps_its_disks_whatever_becomes_of_its_move() {
    let kinds = ["raw,writeback", "qcow2,none"];
    let Some(mut stage) = Stage::with("10.0", "400mbit,2ms", &kinds, None) else {
        return;
    };
    // Of an image that grows all has to be there before the guest is.
    let to = stage.lab.host(1).unwrap();
    let words = ["--disks", "hybrid"];
    let moving = stage.product.migrate(0, GUEST, to, &words).unwrap();
    let refused = moving.finish(LIMIT).unwrap();
    assert!(refused.why().contains("not by hybrid"), "{}", refused.why());
    stage.stays();
    for how in ["precopy", "mirror"] {
        let moving = stage.begins(how);
        stage.product.agent_mut(0).unwrap().kill().unwrap();
        stage.goes_on();
        assert!(moving.finish(LIMIT).is_ok_and(|end| !end.completed()));
        stage
            .product
            .agent_mut(0)
            .unwrap()
            .restart(stage.lab.host(0).unwrap())
            .unwrap();
        stage.stays();

        let moving = stage.begins(how);
        stage.product.agent_mut(1).unwrap().kill().unwrap();
        let finished = moving.finish(LIMIT).unwrap();
        assert!(!finished.completed(), "{}", finished.why());
        stage
            .product
            .agent_mut(1)
            .unwrap()
            .restart(stage.lab.host(1).unwrap())
            .unwrap();
        stage.stays();

        let moving = stage.begins(how);
        stage
            .product
            .agent(0)
            .unwrap()
            .run(&["cancel", GUEST])
            .unwrap();
        let finished = moving.finish(LIMIT).unwrap();
        assert_eq!(
            finished.outcome,
            Some(Outcome::Aborted),
            "{}",
            finished.why()
        );
        stage.stays();
    }
    let moving = stage.begins("precopy");
    let growing = fs::File::options().write(true).open(stage.image_of(0, 1));
    let growing = growing.unwrap();
    growing
        .set_len(growing.metadata().unwrap().len() + (1 << 30))
        .unwrap();
    let failed = moving.finish(LIMIT).unwrap();
    assert!(
        failed.why().contains("has grown by more"),
        "{}",
        failed.why()
    );
    stage.stays();

    let words = ["--disks", "precopy", "--bandwidth", "40mbit", "--verify"];
    let mut moving = stage
        .product
        .migrate(0, GUEST, stage.lab.host(1).unwrap(), &words)
        .unwrap();
    assert!(moving.wait_for_phase(Phase::Precopy, LIMIT));
    for part in ["tell", "supervise"] {
        let killed = stage.fronts(part);
        assert_eq!(killed.len(), stage.disks.len(), "{part}");
        for pid in killed {
            kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
        }
        stage.goes_on();
    }
    let finished = moving.finish(LIMIT).unwrap();
    assert!(finished.completed(), "{}\n{}", finished.why(), stage.logs());
    let verified = finished.report.unwrap().verify.unwrap();
    assert_eq!(
        (verified.disks as usize, verified.different_blocks),
        (stage.disks.len(), 0)
    );
    stage.goes_on();
    stage.nothing_is_left(0);
    stage.judge(1);
}

#[test]
fn a_disk_moves_with_its_guest_of_qemu_10() {
    there_and_back("10.0");
}

#[test]
fn a_disk_moves_with_its_guest_of_qemu_7_2() {
    there_and_back("7.2");
}

#[test]
fn a_destination_without_room_is_refused_or_gives_the_move_up() {
    let room = Some("100m");
    let Some(stage) = Stage::with("10.0", "400mbit,2ms", &["raw,writeback"], room) else {
        return;
    };
    let filling = stage.folders[1].join("filling");
    let fill = |bytes: usize| {
        // As much as there is room for.
        let _ = fs::write(&filling, vec![1; bytes]);
    };
    let to = stage.lab.host(1).unwrap();
    fill(80 << 20);
    let moving = stage.product.migrate(0, GUEST, to, &[]).unwrap();
    let refused = moving.finish(LIMIT).unwrap();
    assert!(refused.why().contains("free for"), "{}", refused.why());
    stage.stays();
    fs::write(stage.image(1), "somebody's").unwrap();
    let moving = stage.product.migrate(0, GUEST, to, &[]).unwrap();
    let refused = moving.finish(LIMIT).unwrap();
    assert!(refused.why().contains("already"), "{}", refused.why());
    assert_eq!(fs::read(stage.image(1)).unwrap(), b"somebody's");
    fs::remove_file(stage.image(1)).unwrap();

    fs::remove_file(&filling).unwrap();
    let moving = stage.begins("precopy");
    fill(200 << 20);
    let failed = moving.finish(LIMIT).unwrap();
    assert!(failed.why().contains("No space left"), "{}", failed.why());
    stage.stays();

    fs::remove_file(&filling).unwrap();
    stage.moves(0, "precopy");
    stage.judge(1);
}

/// Where the guest is, the disk is, and all of it; where it is not, nothing is left but what was set
/// aside.
#[test]
fn a_disk_is_where_its_guest_is_whichever_agent_dies_in_the_hand_over() {
    let kinds = ["raw,writeback", "qcow2,writeback"];
    let Some(mut stage) = Stage::with("10.0", "400mbit,2ms", &kinds, None) else {
        return;
    };
    let mut from = 0;
    for (point, dies_at_source, how) in [
        ("source:before-send:list", true, "precopy"),
        ("destination:after-record:ready", false, "mirror"),
        ("source:after-record:released", true, "precopy"),
        ("destination:after-record:committed", false, "mirror"),
        ("source:after-receipt:all-present", true, "precopy"),
    ] {
        let dies = if dies_at_source { from } else { 1 - from };
        let fails = format!("{point}=kill");
        let host = stage.lab.host(dies).unwrap();
        let agent = stage.product.agent_mut(dies).unwrap();
        agent.restart_to_fail(host, &fails).unwrap();
        let to = stage.lab.host(1 - from).unwrap();
        let words = ["--disks", how, "--patience", "3s"];
        let moving = stage.product.migrate(from, GUEST, to, &words).unwrap();
        let agent = stage.product.agent_mut(dies).unwrap();
        assert!(wait_until(LIMIT, || agent.has_ended()), "{point}");
        agent.restart(host).unwrap();
        // It may have lost its agent, or not.
        let _ = moving.finish(LIMIT);
        stage.goes_on();
        stage.nothing_is_left(0);
        stage.nothing_is_left(1);
        let here = [0, 1].map(|host| stage.image(host).exists());
        assert_ne!(here[0], here[1], "{point}: {here:?}\n{}", stage.logs());
        let other = [0, 1].map(|host| stage.image_of(host, 1).exists());
        assert_eq!(here, other, "{point}\n{}", stage.logs());
        from = usize::from(here[1]);
    }
    stage.judge(from);
}

#[test]
fn a_mirrored_guest_does_not_wait_for_a_link_that_is_cut() {
    let kinds = ["raw,writeback", "qcow2,writeback"];
    let Some(stage) = Stage::with("7.2", "400mbit,2ms", &kinds, None) else {
        return;
    };
    let to = stage.lab.host(1).unwrap();
    let words = ["--disks", "mirror", "--bandwidth", "30mbit", "--verify"];
    let mut moving = stage.product.migrate(0, GUEST, to, &words).unwrap();
    assert!(moving.wait_for_phase(Phase::Precopy, LIMIT));
    let link = stage.lab.link(0, 1).unwrap();
    link.cut(Duration::from_secs(600)).unwrap();
    stage.goes_on();
    link.heal().unwrap();
    let finished = moving.finish(LIMIT).unwrap();
    let (why, logs) = (finished.why(), stage.logs());
    assert!(finished.completed(), "{why}\n{logs}");
    stage.goes_on();
    stage.judge(1);
}
