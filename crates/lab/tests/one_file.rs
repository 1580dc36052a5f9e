//! Tests guests with images that are not moved: they move only to a host with the identical files,
//! whatever other files have these names there, at any time. Needs root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

use longhaul_api::{Phase, Plan as MovePlan, Side, Verdict};
use longhaul_lab::guest::disks::{DiskKind, LocalDisk, local_disks};
use longhaul_lab::guest::{KernelFiles, Tiny};
use longhaul_lab::history::task::{History, Task, description};
use longhaul_lab::history::workload::Work;
use longhaul_lab::installed;
use longhaul_lab::lab::{Lab, Plan};
use longhaul_lab::process::wait_until;
use longhaul_lab::product::{Finished, Move, Product, Settings, channel_socket};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const LIMIT: Duration = Duration::from_secs(300);
const DISK_BYTES: u64 = 8 << 20;
const GUEST: &str = "writer";
/// Its disks, by their numbers: shared ones in a raw and in a qcow2 image, and a local one if it
/// has one.
const RAW: usize = 0;
const QCOW2: usize = 1;
const OWN: usize = 2;
/// A read-only image.
const CD: &str = "cd.raw";
/// The backing file of the qcow2 image.
const BACKING: &str = "backing.raw";
/// A shared block device, which has a node at each host: locks do not reveal that.
const VOLUME: &str = "volume";

/// Two hosts, and a guest whose shared images are the same files at both of them, by other names.
struct Stage {
    // The volume is removed before the laboratory's folder.
    _volume: Volume,
    product: Product,
    lab: Lab,
    history: History,
    folders: Vec<PathBuf>,
    disks: Vec<LocalDisk>,
    seed: u64,
}

impl Stage {
    fn new(version: &str, own: bool) -> Option<Self> {
        if let Err(error) = installed::qemu(version) {
            assert!(!installed::all_required(), "{error}");
            eprintln!("SKIPPED one_file: {error}");
            return None;
        }
        let mut lab = Lab::create(&Plan {
            purpose: "test: images that stay".to_owned(),
            hosts: 2,
            link: "400mbit,2ms".parse().unwrap(),
            seed: 1,
        })
        .unwrap();
        let folders: Vec<PathBuf> = lab.hosts().iter().map(|h| h.folder().to_owned()).collect();
        let kind = |text: &str| -> DiskKind { text.parse().unwrap() };
        let mut kinds = vec![kind("raw,none"), kind("qcow2,none")];
        kinds.extend(own.then(|| kind("raw,writeback")));
        let disks = local_disks(&folders[0], DISK_BYTES, &kinds);
        for (number, disk) in disks.iter().enumerate() {
            match number {
                QCOW2 => on_a_backing_file(disk, &folders[1]),
                _ => disk.create().unwrap(),
            }
        }
        for disk in &disks[..OWN] {
            fs::hard_link(&disk.path, folders[1].join(file_name(disk))).unwrap();
        }
        let volume = Volume::make(&folders);
        fs::write(folders[0].join(CD), vec![0xcd; 1 << 20]).unwrap();
        fs::copy(folders[0].join(CD), folders[1].join(CD)).unwrap();
        let more = [CD, VOLUME].map(|name| LocalDisk {
            image: name.to_owned(),
            path: folders[0].join(name),
            bytes: 1 << 20,
            kind: kind("raw,writeback"),
        });
        let all = [&disks[..], &more[..]].concat();
        let names: Vec<String> = lab.hosts().iter().map(|h| h.name().to_owned()).collect();
        let tables = |index: usize| {
            let image = |disk: &LocalDisk| {
                let path = folders[index].join(file_name(disk));
                let mut table = toml::Table::from_iter([
                    ("path".to_owned(), path.display().to_string().into()),
                    ("format".to_owned(), disk.kind.format.name().into()),
                ]);
                if disk.image == VOLUME {
                    let path = folders[1 - index].join(VOLUME);
                    let word = format!("{}:{}", names[1 - index], path.display());
                    table.insert("same_file_as".to_owned(), word.into());
                }
                (disk.image.clone(), toml::Value::from(table))
            };
            let images: toml::Table = all.iter().map(image).collect();
            let mut table = toml::Table::from_iter([("images".to_owned(), images.into())]);
            let (side, step) = [("source", "prepare"), ("destination", "arriving")][index];
            let hook = hook(&folders[index], step);
            let command = toml::Value::from(vec![hook.display().to_string()]);
            let hook = toml::Table::from_iter([("command".to_owned(), command)]);
            let steps = toml::Table::from_iter([(step.to_owned(), hook.into())]);
            let sides = toml::Table::from_iter([(side.to_owned(), steps.into())]);
            table.insert("hooks".to_owned(), sides.into());
            table
        };
        let files = KernelFiles::make_with_history(&folders[0]).unwrap();
        let settings = Settings {
            qemus: vec![version.to_owned()],
            accelerator: "tcg".to_owned(),
        };
        let product = Product::start_each_with(&mut lab, &files, &settings, tables).unwrap();
        let mut tiny = Tiny::calm(GUEST);
        tiny.machine_version = version.to_owned();
        let mut guest = description(&tiny, &all);
        for (number, disk) in guest.disks.iter_mut().enumerate() {
            disk.read_only = disk.image == CD;
            disk.shared = disk.image != CD && (number != OWN || !own);
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let seed = now.as_nanos() as u64 >> 8;
        eprintln!("history of seed {seed}");
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
            _volume: volume,
            product,
            lab,
            history,
            folders,
            disks,
            seed,
        })
    }

    fn name(&self, host: usize) -> &str {
        self.lab.host(host).unwrap().name()
    }

    fn there(&self, file: &str) -> PathBuf {
        self.folders[1].join(file)
    }

    /// Replaces a file at the destination by another with the same content.
    fn exchange(&self, file: &str) {
        let there = self.there(file);
        fs::rename(&there, aside(&there)).unwrap();
        fs::copy(aside(&there), &there).unwrap();
    }

    fn put_back(&self, file: &str) {
        let there = self.there(file);
        fs::rename(aside(&there), &there).unwrap();
    }

    /// Lets a hook do that at its next run.
    fn exchange_in_hook(&self, host: usize, step: &str, file: &str) {
        let (there, aside) = (self.there(file), aside(&self.there(file)));
        let (there, aside) = (there.display(), aside.display());
        let task = self.folders[host].join(format!("{step}.once"));
        fs::write(task, format!("mv {there} {aside}\ncp {aside} {there}\n")).unwrap();
    }

    /// Returns how often a hook has run.
    fn ran(&self, host: usize, step: &str) -> usize {
        let log = self.folders[host].join(format!("{step}.log"));
        fs::read_to_string(log).map_or(0, |text| text.lines().count())
    }

    fn plan(&self, from: usize) -> MovePlan {
        let mut command = self.product.agent(from).unwrap().command().unwrap();
        command.args(["--json", "plan", GUEST, "--to", self.name(1 - from)]);
        let output = command.output().unwrap();
        serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {output:?}\n{}", self.logs()))
    }

    /// Returns a plan's check of one item, and its proof.
    fn planned(&self, from: usize, what: &str) -> Vec<(Verdict, String)> {
        let checks = self.plan(from).checks.into_iter();
        let of = checks.filter(|check| check.message.starts_with(what));
        of.map(|check| (check.verdict, check.message)).collect()
    }

    fn migrate(&self, from: usize, words: &[&str]) -> Finished {
        let to = self.lab.host(1 - from).unwrap();
        let moving = self.product.migrate(from, GUEST, to, words).unwrap();
        self.ended(moving)
    }

    /// Waits for the end of a move.
    fn ended(&self, moving: Move) -> Finished {
        let finished = moving.finish(LIMIT);
        finished.unwrap_or_else(|error| panic!("{error}\n{}", self.logs()))
    }

    /// Asserts that a move is refused before it begins.
    fn refused(&self, words: &[&str], why: &[&str]) {
        let ran = [self.ran(0, "prepare"), self.ran(1, "arriving")];
        // The plan is for the disks that the agent chooses.
        assert!(!words.is_empty() || !self.plan(0).possible, "{why:?}");
        let finished = self.migrate(0, words);
        assert_eq!(finished.exit_code, Some(3), "{}", finished.why());
        says(&finished.why(), why);
        assert_eq!([self.ran(0, "prepare"), self.ran(1, "arriving")], ran);
        self.stays();
    }

    /// Asserts that it goes on at the first host, and nothing of it is at the other one.
    fn stays(&self) {
        self.goes_on();
        for host in 0..2 {
            let journals = self.state(host).join("journal");
            let files = fs::read_dir(journals).unwrap();
            let names = files.map(|file| file.unwrap().file_name());
            let left: Vec<_> = names.filter(|name| name != "incarnation").collect();
            assert!(left.is_empty(), "{left:?}\n{}", self.logs());
        }
        assert!(!self.state(1).join("guests").join(GUEST).exists());
        let own = self.disks.get(OWN);
        assert!(!own.is_some_and(|own| self.there(&file_name(own)).exists()));
    }

    fn state(&self, host: usize) -> PathBuf {
        self.lab.host(host).unwrap().folder().join("state")
    }

    fn goes_on(&self) {
        let done = self.history.heard().told.done;
        self.history.wait_for(done + 10, LIMIT).unwrap();
        let heard = self.history.heard();
        assert_eq!((heard.errors, heard.first_error), (0, None));
    }

    fn moves(&self, from: usize, words: &[&str]) {
        let words = [words, &["--verify"]].concat();
        let finished = self.migrate(from, &words);
        assert!(finished.completed(), "{}\n{}", finished.why(), self.logs());
        self.goes_on();
    }

    /// During the move, another file gets the name of one of its images at the destination. The
    /// QEMU there already has the right one open, and keeps it.
    fn moves_though_exchanged(&self, file: &str, words: &[&str]) {
        let words = [words, &["--bandwidth", "30mbit"]].concat();
        let to = self.lab.host(1).unwrap();
        let mut moving = self.product.migrate(0, GUEST, to, &words).unwrap();
        assert!(moving.wait_for_phase(Phase::Precopy, LIMIT));
        // The destination reports the move after its QEMU was inspected.
        let arriving = || {
            let latest = self.product.latest_migration(1, GUEST).unwrap();
            latest.is_some_and(|it| it.side == Side::Destination && it.outcome.is_none())
        };
        assert!(wait_until(LIMIT, arriving), "{}", self.logs());
        self.exchange(file);
        let finished = self.ended(moving);
        assert!(finished.completed(), "{}\n{}", finished.why(), self.logs());
        self.goes_on();
        // The file of that name is still not the guest's.
        let plan = self.plan(1);
        assert!(!plan.possible);
        let wrong = |message: &str| message.contains("not the file that its QEMU uses");
        assert!(
            plan.checks.iter().any(|check| wrong(&check.message)),
            "{plan:?}"
        );
        self.put_back(file);
        self.goes_on();
    }

    /// Restarts a host's agent with this configuration.
    fn configure(&mut self, host: usize, text: &str) {
        fs::write(self.folders[host].join("agent.toml"), text).unwrap();
        let agent = self.product.agent_mut(host).unwrap();
        agent.restart(self.lab.host(host).unwrap()).unwrap();
    }

    fn logs(&self) -> String {
        self.product.ends_of_logs()
    }

    /// Ends it at this host, and judges all its writes.
    fn judge(mut self, host: usize) {
        self.history.stop().unwrap();
        self.product.stop_guest(host, GUEST).unwrap();
        let record = self.history.finish().unwrap();
        assert!(record.quiet && record.errors == 0, "{record:?}");
        let judgement = record.judge(&self.folders[host]).unwrap();
        assert_eq!(judgement.findings, [], "seed {}, {record:?}", self.seed);
        // Checks that the judge detects damage.
        let image = self.folders[host].join(file_name(&self.disks[RAW]));
        let content = fs::read(&image).unwrap();
        fs::write(&image, vec![0; content.len()]).unwrap();
        assert!(record.judge(&self.folders[host]).unwrap().wrong_sectors > 10);
    }
}

/// A block device with a node at each host.
struct Volume(PathBuf);

impl Volume {
    fn make(folders: &[PathBuf]) -> Self {
        // Containers often lack the device nodes of loop devices.
        let node = |path: &Path, kind, minor| {
            let (major, mode) = match kind {
                SFlag::S_IFCHR => (10, Mode::S_IRUSR | Mode::S_IWUSR),
                _ => (7, Mode::S_IRUSR | Mode::S_IWUSR),
            };
            let made = mknod(path, kind, mode, makedev(major, minor));
            assert!(
                made.is_ok() || path.exists(),
                "{}: {made:?}",
                path.display()
            );
        };
        node(Path::new("/dev/loop-control"), SFlag::S_IFCHR, 237);
        for minor in 0..16 {
            node(
                Path::new(&format!("/dev/loop{minor}")),
                SFlag::S_IFBLK,
                minor,
            );
        }
        let file = folders[0].join("behind-the-volume");
        fs::write(&file, vec![7; 1 << 20]).unwrap();
        let mut command = Command::new("losetup");
        let made = command.args(["--find", "--show"]).arg(&file).output();
        let made = made.unwrap();
        assert!(made.status.success(), "{made:?}");
        let device = PathBuf::from(String::from_utf8(made.stdout).unwrap().trim());
        let number = fs::metadata(&device).unwrap().rdev();
        for folder in folders {
            node(
                &folder.join(VOLUME),
                SFlag::S_IFBLK,
                nix::sys::stat::minor(number),
            );
        }
        Self(device)
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        // It is removed when it is not open any more.
        let _ = Command::new("losetup")
            .arg("--detach")
            .arg(&self.0)
            .status();
    }
}

/// Creates a qcow2 image on a backing file, of which the other host has a copy.
fn on_a_backing_file(disk: &LocalDisk, other: &Path) {
    let backing = disk.path.with_file_name(BACKING);
    fs::write(&backing, vec![0; disk.bytes as usize]).unwrap();
    fs::copy(&backing, other.join(BACKING)).unwrap();
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b", BACKING]);
    let made = create.arg(&disk.path).status().unwrap();
    assert!(made.success());
}

/// Returns a hook that counts its runs, and executes a given action once.
fn hook(folder: &Path, step: &str) -> PathBuf {
    let path = folder.join(step);
    let own = path.display();
    let text = format!(
        "#!/bin/sh\necho ran >> {own}.log\n\
         if [ -e {own}.once ]; then mv {own}.once {own}.now; . {own}.now; fi\n"
    );
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn aside(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".aside");
    PathBuf::from(name)
}

fn file_name(disk: &LocalDisk) -> String {
    let name = disk.path.file_name().unwrap();
    name.to_string_lossy().into_owned()
}

#[track_caller]
fn says(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word:?} is missing: {text}");
    }
}

#[test]
fn a_guest_with_a_disk_of_its_own_moves_only_to_its_shared_files() {
    if !installed::is_its_day(0, 2) {
        return;
    }
    let Some(mut stage) = Stage::new("10.0", true) else {
        return;
    };
    let [raw, qcow2] = [RAW, QCOW2].map(|number| file_name(&stage.disks[number]));
    let strategies = ["precopy", "mirror", "hybrid", "postcopy"];
    let fine = |what: &str, message: &str| {
        let found = stage.planned(0, what);
        assert_eq!(found, [(Verdict::Ok, format!("{what}{message}"))]);
    };
    // Unchanged, the plan has a proof of each.
    let plan = stage.plan(0);
    assert!(plan.possible, "{plan:?}");
    for file in ["image disk0", "image disk1", "kernel tiny", "initrd tiny"] {
        fine(file, ": one file on both hosts (proved by locks)");
    }
    for file in ["image cd.raw", "backing file of image disk1"] {
        let copied = stage.planned(0, file);
        assert_eq!(copied[0].0, Verdict::Ok);
        says(&copied[0].1, &["equal content (BLAKE3 "]);
    }
    let volume = stage.planned(0, "image volume");
    assert_eq!(volume[0].0, Verdict::Warn);
    says(&volume[0].1, &["believed", "nothing proves it"]);
    // Nothing is accepted by its name alone, except files created there.
    let named: Vec<String> = plan.checks.into_iter().map(|check| check.message).collect();
    let ticked = |name: &&String| name.starts_with("image ") && name.contains(" on paris");
    let ticked: Vec<&String> = named.iter().filter(ticked).collect();
    assert_eq!(ticked, ["image disk2 on paris"]);

    // The other file is there before.
    for (file, image) in [(&raw, "disk0"), (&qcow2, "disk1")] {
        stage.exchange(file);
        let image = format!("image {image}: nothing proves");
        let plan = stage.plan(0);
        assert!(!plan.possible, "{plan:?}");
        assert_eq!(stage.planned(0, &image)[0].0, Verdict::Refuse);
        let why = [&image, "shared = false", "same_file_as = \\\"lyon:/"];
        for how in strategies {
            stage.refused(&["--disks", how], &why);
        }
        stage.put_back(file);
    }
    // A file of another length, and one of other content.
    let cd = stage.there(CD);
    fs::write(&cd, vec![0xcd; 1000]).unwrap();
    let why = [
        "cd.raw is not the same",
        "1048576 bytes on lyon, 1000 bytes on paris",
    ];
    stage.refused(&[], &why);
    fs::write(&cd, vec![0xce; 1 << 20]).unwrap();
    stage.refused(&[], &["cd.raw is not the same", "BLAKE3"]);
    fs::write(&cd, vec![0xcd; 1 << 20]).unwrap();
    // The same for a backing file.
    let backing = stage.there(BACKING);
    let content = fs::read(&backing).unwrap();
    let mut other = content.clone();
    other[DISK_BYTES as usize - 1] = 1;
    fs::write(&backing, other).unwrap();
    stage.refused(&[], &["backing file of image disk1 is not the same"]);
    fs::write(&backing, content).unwrap();
    // The operator's statement counts for the named file.
    let config = stage.folders[1].join("agent.toml");
    let right = fs::read_to_string(&config).unwrap();
    let other = right.replace("same_file_as = \"lyon:/", "same_file_as = \"lyon:/other/");
    assert_ne!(right, other);
    stage.configure(1, &other);
    stage.refused(&[], &["image volume: nothing proves"]);
    stage.configure(1, &right);

    // It is exchanged after the plan; when the hooks of the source run, and when those of the
    // destination do.
    assert!(stage.plan(0).possible);
    stage.exchange(&raw);
    stage.refused(&[], &["image disk0: nothing proves"]);
    stage.put_back(&raw);
    for (file, host, step, why) in [
        (&raw, 0, "prepare", "image disk0: nothing proves"),
        (&qcow2, 0, "prepare", "image disk1: nothing proves"),
        (&raw, 1, "arriving", "image disk0 was exchanged"),
        (&qcow2, 1, "arriving", "image disk1 was exchanged"),
    ] {
        stage.exchange_in_hook(host, step, file);
        let finished = stage.migrate(0, &[]);
        assert!(!finished.completed(), "{step}");
        says(&finished.why(), &[why]);
        stage.put_back(file);
        stage.goes_on();
    }
    // While it moves.
    for (file, how) in [(&raw, "precopy"), (&qcow2, "postcopy")] {
        stage.moves_though_exchanged(file, &["--disks", how]);
        stage.moves(1, &["--disks", "mirror"]);
    }
    stage.moves(0, &["--disks", "hybrid"]);
    stage.judge(1);
}

#[test]
fn a_guest_that_takes_nothing_along_moves_only_to_its_files() {
    if !installed::is_its_day(1, 2) {
        return;
    }
    let Some(stage) = Stage::new("7.2", false) else {
        return;
    };
    let [raw, qcow2] = [RAW, QCOW2].map(|number| file_name(&stage.disks[number]));
    assert!(stage.plan(0).possible);
    for (file, image) in [(&raw, "disk0"), (&qcow2, "disk1")] {
        stage.exchange(file);
        assert!(!stage.plan(0).possible);
        let why = format!("image {image}: nothing proves");
        for how in ["auto", "shared"] {
            stage.refused(&["--disks", how, "--verify"], &[&why]);
        }
        stage.put_back(file);
    }
    stage.moves_though_exchanged(&raw, &[]);
    stage.moves(1, &["--disks", "shared"]);
    stage.moves_though_exchanged(&qcow2, &[]);
    stage.judge(1);
}

#[test]
fn a_read_only_image_moves_along_if_the_destination_has_none() {
    let Some(stage) = Stage::new("10.0", true) else {
        return;
    };
    let (here, there) = (stage.folders[0].join(CD), stage.there(CD));
    let content = fs::read(&here).unwrap();
    fs::remove_file(&there).unwrap();
    assert!(stage.plan(0).possible);
    let along = "image cd.raw: paris has none, and it moves along";
    let planned = stage.planned(0, "image cd.raw");
    assert_eq!(planned, [(Verdict::Ok, along.to_owned())]);
    stage.refused(&["--disks", "shared"], &["paris lacks image cd.raw"]);
    assert!(!there.exists());
    // A move that is given up leaves nothing there.
    let to = stage.lab.host(1).unwrap();
    let slow = ["--bandwidth", "10mbit"];
    let mut moving = stage.product.migrate(0, GUEST, to, &slow).unwrap();
    assert!(moving.wait_for_phase(Phase::Precopy, LIMIT));
    assert!(there.exists());
    let latest = stage.product.latest_migration(0, GUEST).unwrap().unwrap();
    let mut cancel = stage.product.agent(0).unwrap().command().unwrap();
    let cancelled = cancel.args(["cancel", &latest.id]).output().unwrap();
    assert!(cancelled.status.success(), "{cancelled:?}");
    assert!(!stage.ended(moving).completed());
    assert!(wait_until(LIMIT, || !there.exists()));
    stage.goes_on();

    stage.moves(0, &["--disks", "postcopy"]);
    assert_eq!(fs::read(&there).unwrap(), content);
    // Other guests of the source may use it.
    assert_eq!(fs::read(&here).unwrap(), content);
    // On the way back it is found.
    let planned = stage.planned(1, "image cd.raw");
    says(&planned[0].1, &["equal content (BLAKE3 "]);
    stage.moves(1, &[]);
    assert_eq!(fs::read(&there).unwrap(), content);
    stage.judge(0);
}
