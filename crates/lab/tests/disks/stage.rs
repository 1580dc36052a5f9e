//! Provides two hosts, a guest that writes to local disks, and the checks of these.

use crate::monitor::Monitor;
use longhaul_api::{Phase, Progress, Report};
use longhaul_lab::guest::disks::{Cache, Format, LocalDisk, local_disks};
use longhaul_lab::guest::{Chipset, KernelFiles, Tiny};
use longhaul_lab::history::task::{History, Task, description};
use longhaul_lab::history::workload::Work;
use longhaul_lab::installed;
use longhaul_lab::lab::{Lab, Plan};
use longhaul_lab::process::{ProcessId, wait_until};
use longhaul_lab::product::{Finished, Move, Product, Settings, channel_socket};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::Pid;
use serde_json::json;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub(crate) const LIMIT: Duration = Duration::from_secs(300);
pub(crate) const DISK_BYTES: u64 = 24 << 20;
/// Size of an idle disk's content.
pub(crate) const IDLE_BYTES: u64 = 1 << 20;
pub(crate) const GUEST: &str = "writer";

/// Guests under TCG share two cores badly: one at a time.
static TURN: Mutex<()> = Mutex::new(());

/// Two hosts that share nothing, and a guest that writes to a local disk.
pub(crate) struct Stage {
    // They are removed before the laboratory's folder.
    _room: Option<Room>,
    pub(crate) failing: Option<Failing>,
    pub(crate) on_base: Option<OnBase>,
    pub(crate) lab: Lab,
    pub(crate) product: Product,
    pub(crate) history: History,
    /// The files of its disks' images.
    pub(crate) disks: Vec<String>,
    /// The folders of the images on each host.
    pub(crate) folders: Vec<PathBuf>,
    pub(crate) seed: u64,
    _turn: MutexGuard<'static, ()>,
}

impl Stage {
    pub(crate) fn new(version: &str, link: &str) -> Option<Self> {
        Self::with(version, link, &["raw,writeback"], None)
    }

    /// Creates it with disks of these kinds, for which paris has limited space.
    pub(crate) fn with(
        version: &str,
        link: &str,
        kinds: &[&str],
        room: Option<&str>,
    ) -> Option<Self> {
        let more = More {
            room,
            ..More::default()
        };
        Self::build(version, link, kinds, more)
    }

    /// Creates the same in a machine of the older chipset, with two processors.
    pub(crate) fn of_pc(version: &str, link: &str, kinds: &[&str]) -> Option<Self> {
        let more = More {
            pc: true,
            ..More::default()
        };
        Self::build(version, link, kinds, more)
    }

    /// Creates the same with another, idle disk, which can fail at its source.
    pub(crate) fn failing(version: &str, link: &str, room: &str) -> Option<Self> {
        let more = More {
            room: Some(room),
            fails: true,
            ..More::default()
        };
        Self::build(version, link, &["raw,writeback"], more)
    }

    /// Creates it with disks of these kinds, and an idle one after them.
    pub(crate) fn with_idle(version: &str, link: &str, kinds: &[&str]) -> Option<Self> {
        let more = More {
            idle: true,
            ..More::default()
        };
        Self::build(version, link, kinds, more)
    }

    /// Creates it with another, idle disk on a base image.
    pub(crate) fn on_a_base(version: &str, link: &str) -> Option<Self> {
        let more = More {
            on_a_base: true,
            ..More::default()
        };
        Self::build(version, link, &["raw,writeback"], more)
    }

    /// Creates it with a monitor for its owner beside the product's, and a hook that can hold a
    /// move.
    pub(crate) fn with_owner(version: &str, link: &str, kinds: &[&str]) -> Option<Self> {
        let more = More {
            owner: true,
            ..More::default()
        };
        Self::build(version, link, kinds, more)
    }

    fn build(version: &str, link: &str, kinds: &[&str], more: More<'_>) -> Option<Self> {
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
        let room = more
            .room
            .map(|size| Room::make(&folders[1].join("room"), size));
        if let Some(room) = &room {
            folders[1].clone_from(&room.0);
        }
        let kinds: Vec<_> = kinds.iter().map(|kind| kind.parse().unwrap()).collect();
        let disks = local_disks(&folders[0], DISK_BYTES, &kinds);
        disks.iter().for_each(|disk| disk.create().unwrap());
        disks.iter().for_each(furnish);
        let mut all = disks.clone();
        let mut failing = None;
        if more.fails {
            let (disk, device) = Failing::make(&folders[0], disks.len());
            all.push(disk);
            failing = Some(device);
        }
        if more.idle {
            all.push(idle(&folders[0], disks.len()));
        }
        if more.on_a_base {
            all.push(OnBase::disk(&folders[0], disks.len()));
        }
        let files = KernelFiles::make_with_history(&folders[0]).unwrap();
        let qemu = match more.owner {
            true => qemu_with_monitor(version, &folders[0]),
            false => version.to_owned(),
        };
        let settings = Settings {
            qemus: vec![qemu],
            accelerator: "tcg".to_owned(),
        };
        let tables = |index: usize| {
            let held = folders[index].join("held");
            // Either it is named, or it is the image of another guest.
            let (others, content) = match version {
                "7.2" => {
                    let files = vec![held.display().to_string()];
                    (vec![], ("files", files.into()))
                }
                _ => {
                    let mut other = all[all.len() - 1].clone();
                    other.image = "other".to_owned();
                    other.path = held.join("copy");
                    (vec![(other.path.clone(), other)], ("disks", true.into()))
                }
            };
            let own = all.iter().cloned();
            let own = own.map(|disk| (folders[index].join(file_name(&disk)), disk));
            let mut tables = images(own.chain(others));
            let content = toml::Table::from_iter([(content.0.to_owned(), content.1)]);
            tables.insert("content".to_owned(), content.into());
            let repository = folders[0].join("repository").display().to_string();
            tables.insert("repository".to_owned(), repository.into());
            if more.owner && index == 0 {
                let hooks = crate::changed::holding_hook(&folders[0]);
                tables.insert("hooks".to_owned(), hooks.into());
            }
            tables
        };
        let product = Product::start_each_with(&mut lab, &files, &settings, tables).unwrap();
        let on_base = more
            .on_a_base
            .then(|| OnBase::make(&lab, &product, &all[disks.len()]));
        let mut tiny = Tiny::calm(GUEST);
        tiny.machine_version = version.to_owned();
        if more.pc {
            tiny.chipset = Chipset::Pc;
            tiny.vcpus = 2;
        }
        let guest = description(&tiny, &all);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let seed = now.as_nanos() as u64 >> 8;
        eprintln!("history of seed {seed}");
        // Slow enough for its memory to be moved by a busy machine.
        let work = Work {
            operations_per_s: 60,
            overlaid: more.owner,
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
        let used = match failing {
            Some(_) => &disks,
            None => &all,
        };
        history.begin(&task).unwrap();
        history.wait_for(60, LIMIT).unwrap();
        Some(Self {
            lab,
            product,
            history,
            disks: used.iter().map(file_name).collect(),
            on_base,
            folders,
            seed,
            _room: room,
            failing,
            _turn: turn,
        })
    }

    pub(crate) fn image(&self, host: usize) -> PathBuf {
        self.image_of(host, 0)
    }

    pub(crate) fn image_of(&self, host: usize, disk: usize) -> PathBuf {
        self.folders[host].join(&self.disks[disk])
    }

    /// Returns a host's progress of the guest's latest move.
    pub(crate) fn said(&self, host: usize) -> Option<Progress> {
        let latest = self.product.latest_migration(host, GUEST).unwrap();
        latest?.progress
    }

    /// Returns the ends of both agents' logs.
    pub(crate) fn logs(&self) -> String {
        self.product.ends_of_logs()
    }

    /// Waits for the end of a move.
    pub(crate) fn ended(&self, moving: Move) -> Finished {
        let finished = moving.finish(LIMIT);
        finished.unwrap_or_else(|error| panic!("{error}\n{}", self.logs()))
    }

    /// Waits for the guest to go on at its current host.
    pub(crate) fn goes_on(&self) {
        let done = self.history.heard().told.done;
        self.history.wait_for(done + 30, LIMIT).unwrap();
        let heard = self.history.heard();
        assert_eq!((heard.errors, heard.first_error), (0, None));
    }

    pub(crate) fn moves(&self, from: usize, how: &str) -> Report {
        self.moves_with(from, how, &[])
    }

    /// Moves its memory and its disks by one strategy.
    pub(crate) fn moves_all(&self, from: usize, how: &str, more: &[&str]) -> Report {
        self.moves_with(from, how, &[&["--strategy", how], more].concat())
    }

    pub(crate) fn moves_with(&self, from: usize, how: &str, more: &[&str]) -> Report {
        let to = self.lab.host(1 - from).unwrap();
        let words = [&["--disks", how, "--verify"], more].concat();
        let moving = self.product.migrate(from, GUEST, to, &words).unwrap();
        let finished = self.ended(moving);
        assert!(finished.completed(), "{}\n{}", finished.why(), self.logs());
        let report = *finished.report.unwrap();
        let verified = report.verify.clone().unwrap();
        assert_eq!(verified.disks as usize, report.disks.len());
        assert_eq!(
            (verified.disks_not_compared, verified.different_blocks),
            (0, 0)
        );
        // The guest's writes there before the comparison do not count; that may be none.
        let least = match how {
            "hybrid" | "postcopy" => 1,
            _ => verified.disks as u64 * DISK_BYTES,
        };
        // Images that grow may be longer than their disks.
        let images = (0..self.disks.len()).map(|disk| self.image_of(1 - from, disk));
        let bytes = |image: PathBuf| fs::metadata(image).unwrap().len();
        let all = images
            .map(|image| bytes(image).next_multiple_of(4096))
            .sum();
        assert!(
            (least..=all).contains(&verified.disk_bytes),
            "{verified:?} of {all}"
        );
        assert!(verified.disk_bytes_stopped <= verified.disk_bytes);
        assert_eq!(report.disks[0].why.is_some(), how == "auto");
        // It is reported last, when no blocks of the disks are missing any more.
        assert!(report.clock.is_some(), "{}", self.logs());
        self.goes_on();
        self.nothing_is_left(from);
        self.nothing_is_left(1 - from);
        assert!(!self.image(from).exists(), "{:?}", self.image(from));
        report
    }

    /// Returns the file of a disk that was set aside when the guest left a host.
    pub(crate) fn set_aside(&self, host: usize, disk: usize) -> PathBuf {
        self.folders[host].join(format!("{}.moved", self.disks[disk]))
    }

    /// Begins a move that is slow enough for actions during it.
    pub(crate) fn begins(&self, how: &str) -> Move {
        let words = ["--disks", how, "--bandwidth", "4mbit", "--patience", "3s"];
        let to = self.lab.host(1).unwrap();
        let mut moving = self.product.migrate(0, GUEST, to, &words).unwrap();
        let began = moving.wait_for_phase(Phase::Precopy, LIMIT);
        assert!(began, "{}\n{}", moving.so_far().why(), self.logs());
        assert_eq!(self.fronts("tell").len(), self.disks.len());
        moving
    }

    /// Asserts that the guest goes on at its host, and nothing of the move remains.
    pub(crate) fn stays(&self) {
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

    /// Returns the processes of disk exports with this part.
    pub(crate) fn fronts(&self, part: &str) -> Vec<i32> {
        self.fronts_of(0, part)
    }

    pub(crate) fn fronts_of(&self, host: usize, part: &str) -> Vec<i32> {
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

    /// Asserts that there is no disk export, and no file to be removed later.
    pub(crate) fn nothing_is_left(&self, host: usize) {
        let state = self.lab.host(host).unwrap().folder().join("state");
        for folder in ["fronts", "arriving"] {
            let empty = wait_until(LIMIT, || is_empty(&state.join(folder)));
            let found =
                fs::read_dir(state.join(folder)).map(|all| all.flatten().collect::<Vec<_>>());
            assert!(empty, "{found:?}\n{}", self.logs());
        }
    }

    pub(crate) fn state(&self, host: usize) -> PathBuf {
        self.lab.host(host).unwrap().folder().join("state")
    }

    pub(crate) fn monitor(&self, host: usize) -> Monitor {
        let guest = self.state(host).join("guests").join(GUEST);
        Monitor::connect(&guest.join("run/qmp"))
    }

    /// Has QEMU read or write as the guest's second device does; returns its answer.
    pub(crate) fn io_of_guest(&self, host: usize, words: &str) -> String {
        self.io_of_disk(host, "vdb", words)
    }

    /// Does the same as one of its devices does.
    pub(crate) fn io_of_disk(&self, host: usize, disk: &str, words: &str) -> String {
        let log = self.state(host).join("guests").join(GUEST).join("qemu.log");
        let before = fs::read_to_string(&log).unwrap().len();
        let device = format!("/machine/peripheral/blk-{disk}/virtio-backend");
        let line = format!("qemu-io -d {device} \"{words}\"");
        let arguments = json!({ "command-line": line });
        let monitor = &mut self.monitor(host);
        monitor.ask_with("human-monitor-command", &arguments);
        let mut said = String::new();
        wait_until(LIMIT, || {
            said = fs::read_to_string(&log).unwrap().split_off(before);
            said.contains('\n')
        });
        said
    }

    /// Returns the processes of a host, without those that have ended and are not reaped.
    fn processes(&self, host: usize) -> Vec<i32> {
        let namespace = self.lab.host(host).unwrap().namespace();
        let mut all = namespace.processes().unwrap();
        all.retain(|pid| ProcessId::of(*pid).is_some());
        all
    }

    fn qemus(&self, host: usize) -> Vec<i32> {
        let is_one = |pid: &i32| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm"));
            name.is_ok_and(|name| name.starts_with("qemu-system"))
        };
        self.processes(host).into_iter().filter(is_one).collect()
    }

    /// Returns the monitor of the guest's owner.
    pub(crate) fn owner(&self, host: usize) -> Monitor {
        let qemus = self.qemus(host);
        assert_eq!(qemus.len(), 1);
        Monitor::connect(&self.folders[0].join(format!("owner-{}", qemus[0])))
    }

    /// Ends the guest's QEMU on this host at once.
    pub(crate) fn kill_qemu(&self, host: usize) {
        let qemus = self.qemus(host);
        assert_eq!(qemus.len(), 1);
        kill(Pid::from_raw(qemus[0]), Signal::SIGKILL).unwrap();
        assert!(wait_until(LIMIT, || self.qemus(host).is_empty()));
    }

    /// Simulates a power loss of a host, whose state becomes unavailable.
    pub(crate) fn lose(&mut self, host: usize) {
        self.product.agent_mut(host).unwrap().kill().unwrap();
        let none = || {
            for pid in self.processes(host) {
                // It may have ended meanwhile.
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
            self.processes(host).is_empty()
        };
        assert!(wait_until(LIMIT, none), "{:?}", self.processes(host));
        fs::rename(self.state(host), self.lost(host)).unwrap();
    }

    fn lost(&self, host: usize) -> PathBuf {
        self.state(host).with_extension("lost")
    }

    /// Makes its state available again.
    pub(crate) fn find(&mut self, host: usize) {
        fs::rename(self.lost(host), self.state(host)).unwrap();
        let agent = self.product.agent_mut(host).unwrap();
        agent.restart(self.lab.host(host).unwrap()).unwrap();
    }

    /// Ends the guest on this host, and judges its disk.
    pub(crate) fn judge(mut self, host: usize) {
        self.halt(host);
        self.judge_halted(host);
    }

    /// Ends the guest on this host.
    pub(crate) fn halt(&mut self, host: usize) {
        self.history.stop().unwrap();
        self.product.stop_guest(host, GUEST).unwrap();
    }

    /// Judges the disk of a guest that was ended on this host.
    pub(crate) fn judge_halted(self, host: usize) {
        self.judge_ended(host, true);
    }

    /// Does the same for a guest that may have been ended in the middle of its work.
    pub(crate) fn judge_ended(self, host: usize, quiet: bool) {
        let record = self.history.finish().unwrap();
        assert!(record.quiet == quiet && record.errors == 0, "{record:?}");
        let folder = &self.folders[host];
        let judgement = record.judge(folder).unwrap();
        assert_eq!(judgement.findings, [], "seed {}, {record:?}", self.seed);
        assert!(judgement.newest.is_some(), "{judgement:?}");
        let qcow2 = record.disks.iter().filter(|it| it.format == Format::Qcow2);
        qcow2.for_each(|disk| what_else_is_in_it_is_there(&folder.join(&disk.image)));
        // Checks that the judge detects damage.
        let image = folder.join(&record.disks[0].image);
        let content = fs::read(&image).unwrap();
        fs::write(&image, vec![0; content.len()]).unwrap();
        assert!(record.judge(folder).unwrap().wrong_sectors > 100);
    }
}

/// Returns the disk of that number, as large as the others. It has noise in an unused part: the
/// beginning and end, read by the guest's system, are in the guest's memory too.
fn idle(folder: &Path, number: usize) -> LocalDisk {
    let image = format!("disk{number}");
    let disk = LocalDisk {
        path: folder.join(format!("{image}.raw")),
        image,
        bytes: DISK_BYTES,
        kind: "raw,writeback".parse().unwrap(),
    };
    let file = File::create(&disk.path).unwrap();
    file.set_len(DISK_BYTES).unwrap();
    let noise = noise(IDLE_BYTES as usize);
    file.write_all_at(&noise, DISK_BYTES / 3).unwrap();
    disk
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

/// Adds to a qcow2 image a snapshot with other content, and a bitmap.
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

/// A file system of a fixed size.
pub(crate) struct Room(PathBuf);

impl Room {
    pub(crate) fn make(at: &Path, size: &str) -> Self {
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
        // The guest of a failed test may have a file there open.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// Creates the device nodes of loop devices, which containers often lack.
pub(crate) fn make_loop_nodes() {
    let control = [("loop-control".to_owned(), SFlag::S_IFCHR, 10, 237)];
    let devices = (0..8).map(|minor| (format!("loop{minor}"), SFlag::S_IFBLK, 7, minor));
    for (name, kind, major, minor) in control.into_iter().chain(devices) {
        let made = mknod(
            &Path::new("/dev").join(&name),
            kind,
            Mode::S_IRUSR | Mode::S_IWUSR,
            makedev(major, minor),
        );
        assert!(
            matches!(made, Ok(()) | Err(Errno::EEXIST)),
            "{name}: {made:?}"
        );
    }
}

/// A block device of the first host whose last blocks cannot be read while the file behind it is
/// too short.
pub(crate) struct Failing {
    device: PathBuf,
    file: PathBuf,
    pub(crate) content: Vec<u8>,
}

impl Failing {
    pub(crate) const BYTES: usize = 1 << 20;
    /// The offset from which it can fail.
    pub(crate) const FROM: usize = Self::BYTES - (64 << 10);

    /// Creates the disk of that number.
    fn make(folder: &Path, number: usize) -> (LocalDisk, Self) {
        let file = folder.join("behind-the-device");
        let content = noise(Self::BYTES);
        fs::write(&file, &content).unwrap();
        make_loop_nodes();
        let made = Command::new("losetup")
            .args(["--find", "--show"])
            .arg(&file)
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");
        let device = PathBuf::from(String::from_utf8(made.stdout).unwrap().trim());
        let image = format!("disk{number}");
        let path = folder.join(format!("{image}.raw"));
        symlink(&device, &path).unwrap();
        let disk = LocalDisk {
            image,
            path,
            bytes: Self::BYTES as u64,
            kind: "raw,writeback".parse().unwrap(),
        };
        let failing = Self {
            device,
            file,
            content,
        };
        (disk, failing)
    }

    /// Makes its end unreadable.
    pub(crate) fn break_end(&self) {
        let file = File::options().write(true).open(&self.file).unwrap();
        file.set_len(Self::FROM as u64).unwrap();
        let mut flush = Command::new("blockdev");
        let flushed = flush.arg("--flushbufs").arg(&self.device).status();
        assert!(flushed.unwrap().success());
        let device = File::open(&self.device).unwrap();
        let read = device.read_exact_at(&mut [0; 512], Self::FROM as u64);
        assert_eq!(read.unwrap_err().raw_os_error(), Some(nix::libc::EIO));
    }

    /// Makes it readable again, with its content.
    pub(crate) fn mend(&self) {
        let file = File::options().write(true).open(&self.file).unwrap();
        let end = &self.content[Self::FROM..];
        file.write_all_at(end, Self::FROM as u64).unwrap();
    }
}

impl Drop for Failing {
    fn drop(&mut self) {
        // It is removed when it is not open any more.
        let _ = Command::new("losetup")
            .arg("--detach")
            .arg(&self.device)
            .status();
    }
}

/// Further options.
#[derive(Default)]
struct More<'a> {
    /// Space at paris.
    room: Option<&'a str>,
    /// A disk that can fail.
    fails: bool,
    idle: bool,
    on_a_base: bool,
    /// Its QEMU has a second monitor.
    owner: bool,
    /// A machine of the older chipset.
    pc: bool,
}

/// A base image in a repository of both hosts, with a disk that stands on it.
#[derive(Clone)]
pub(crate) struct OnBase {
    /// Its id.
    pub(crate) id: String,
    pub(crate) content: Vec<u8>,
    pub(crate) repository: PathBuf,
}

impl OnBase {
    pub(crate) const BYTES: usize = 4 << 20;
    /// The size of the disk.
    pub(crate) const DISK_BYTES: u64 = 6 << 20;
    /// The first bytes of one kind.
    pub(crate) const PATTERN: (u8, usize) = (0x5a, 64 << 10);

    fn disk(folder: &Path, number: usize) -> LocalDisk {
        let image = format!("disk{number}");
        LocalDisk {
            path: folder.join(format!("{image}.qcow2")),
            image,
            bytes: Self::DISK_BYTES,
            kind: "qcow2,writeback".parse().unwrap(),
        }
    }

    /// Imports the base image, fetches it to the first host, and creates the disk there.
    fn make(lab: &Lab, product: &Product, disk: &LocalDisk) -> Self {
        let folder = lab.host(0).unwrap().folder();
        let mut content = noise(Self::BYTES);
        let (byte, bytes) = Self::PATTERN;
        content[..bytes].fill(byte);
        let file = folder.join("base.raw");
        fs::write(&file, &content).unwrap();
        let config = folder.join("agent.toml").display().to_string();
        let run = |words: &[&str]| -> serde_json::Value {
            let words = [&["image", "--config", &config, "--json"], words].concat();
            let said = product.agent(0).unwrap().run(&words).unwrap();
            serde_json::from_str(&said).unwrap()
        };
        let imported = run(&["import", file.to_str().unwrap(), "--name", "debian"]);
        let fetched = run(&["fetch", "debian"]);
        assert_eq!(fetched["id"], imported["id"]);
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]);
        create.arg(fetched["path"].as_str().unwrap());
        let made = create.arg(&disk.path).arg(disk.bytes.to_string());
        assert!(made.status().unwrap().success());
        Self {
            id: imported["id"].as_str().unwrap().to_owned(),
            content,
            repository: folder.join("repository"),
        }
    }
}

/// Returns incompressible bytes without zeros.
fn noise(bytes: usize) -> Vec<u8> {
    let mut word = 1_u64;
    let mut next = || {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (word >> 56) as u8 | 1
    };
    (0..bytes).map(|_| next()).collect()
}

/// Returns a QEMU that has a second monitor, at a socket named after its process.
fn qemu_with_monitor(version: &str, folder: &Path) -> String {
    use std::os::unix::fs::PermissionsExt;
    let qemu = installed::qemu(version).unwrap();
    let script = format!(
        "#!/bin/sh\nexec {} \"$@\" -qmp unix:{}/owner-$$,server=on,wait=off\n",
        qemu.display(),
        folder.display()
    );
    let path = folder.join("qemu-with-monitor");
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).map_or(true, |mut all| all.next().is_none())
}

fn file_name(disk: &LocalDisk) -> String {
    let name = disk.path.file_name().unwrap();
    name.to_string_lossy().into_owned()
}

/// Returns a host's configuration for images, each at its path.
fn images(disks: impl Iterator<Item = (PathBuf, LocalDisk)>) -> toml::Table {
    let image = |(path, disk): (PathBuf, LocalDisk)| {
        let table = toml::Table::from_iter([
            ("path".to_owned(), path.display().to_string().into()),
            ("format".to_owned(), disk.kind.format.name().into()),
            ("direct".to_owned(), (disk.kind.cache == Cache::None).into()),
            ("volume".to_owned(), "empty".into()),
        ]);
        (disk.image, toml::Value::from(table))
    };
    let images: toml::Table = disks.map(image).collect();
    toml::Table::from_iter([("images".to_owned(), images.into())])
}
