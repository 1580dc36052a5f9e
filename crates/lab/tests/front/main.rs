//! Tests a history on a guest's disks while the disk export below them is killed, stopped, removed
//! and inserted at random: the disks' content is judged from outside. Needs root.
//!
//! `LONGHAUL_CHAOS_S=3600` sets the duration, with another seed in each round;
//! `LONGHAUL_CHAOS_SEED` is the first.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

mod processes;

use longhaul_history::random::Random;
use longhaul_hypervisor::disk::{DiskNodes, Front, find, insert_all, remove_all};
use longhaul_hypervisor::qmp::{COMMAND_TIMEOUT, Qmp};
use longhaul_lab::guest::disks::{Cache, Format, LocalDisk, local_disks};
use longhaul_lab::guest::{KernelFiles, Tiny};
use longhaul_lab::history::images::Record;
use longhaul_lab::history::task::{History, Task, description};
use longhaul_lab::history::workload::Work;
use longhaul_lab::installed;
use longhaul_lab::lab::{Lab, Plan};
use longhaul_lab::peer::{Begin, PeerHost, PeerQemu, QemuProcess, channel_socket};
use longhaul_lab::process::wait_until;
use processes::Processes;
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::runtime::Runtime;

const LIMIT: Duration = Duration::from_secs(120);
const DISK_BYTES: u64 = 32 << 20;
/// The default duration of failures.
const SHORT: Duration = Duration::from_secs(5);
/// The duration with one guest, in longer runs.
const ROUND: Duration = Duration::from_secs(20);
const KINDS: [&str; 4] = [
    "raw,none,iothread",
    "qcow2,writeback",
    "raw,writethrough",
    "qcow2,none,iothread",
];

/// A disk, and its disk export.
struct Disk {
    nodes: DiskNodes,
    local: LocalDisk,
    front: Option<(Front, Processes)>,
    /// The number of insertions.
    times: u32,
}

/// The actions so far; a failure prints them, and QEMU's output.
struct Story {
    folder: PathBuf,
    version: &'static str,
    events: Vec<&'static str>,
}

impl Drop for Story {
    fn drop(&mut self) {
        let said = fs::read_to_string(self.folder.join("peer-qemu.log")).unwrap_or_default();
        let (version, events) = (self.version, self.events.join(", "));
        eprintln!("QEMU {version}: {events}\n{said}");
    }
}

/// A guest at work.
struct Chaos {
    runtime: Runtime,
    random: Random,
    qmp: Qmp,
    qemu: QemuProcess,
    pid: u32,
    disks: Vec<Disk>,
    history: History,
    story: Story,
}

#[test]
fn no_write_is_lost_whatever_becomes_of_the_front_end() {
    for version in installed::QEMU_VERSIONS {
        if let Err(error) = installed::qemu(version) {
            assert!(!installed::all_required(), "{error}");
            eprintln!("SKIPPED chaos: {error}");
            return;
        }
    }
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse().unwrap());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let mut seed = number("LONGHAUL_CHAOS_SEED").unwrap_or(now.as_millis() as u64);
    let asked = number("LONGHAUL_CHAOS_S").map(Duration::from_secs);
    let began = Instant::now();
    loop {
        eprintln!("LONGHAUL_CHAOS_SEED={seed}");
        round(seed, asked.map_or(SHORT, |asked| asked.min(ROUND)));
        if asked.is_none_or(|asked| began.elapsed() >= asked) {
            return;
        }
        seed += 1;
    }
}

/// Runs one guest, with QEMU and disks chosen by the seed.
fn round(seed: u64, time: Duration) {
    let mut random = Random::new(seed);
    let versions = installed::QEMU_VERSIONS.len() as u64;
    let version = installed::QEMU_VERSIONS[random.below(versions) as usize];
    let first = random.below(KINDS.len() as u64) as usize;
    let kinds = [first, (first + 1) % KINDS.len()].map(|kind| KINDS[kind].parse().unwrap());
    let lab = Lab::create(&Plan {
        purpose: "test: chaos below disks".to_owned(),
        hosts: 1,
        link: "1gbit,0ms".parse().unwrap(),
        seed: 1,
    })
    .unwrap();
    let folder = lab.host(0).unwrap().folder().to_owned();
    let disks = local_disks(&folder, DISK_BYTES, &kinds);
    disks.iter().for_each(|disk| disk.create().unwrap());
    let mut chaos = Chaos::start(&lab, version, &disks, random);
    chaos.history.wait_for(30, LIMIT).unwrap();
    chaos.insert();
    let began = Instant::now();
    while began.elapsed() < time {
        chaos.step();
    }
    // The disk export still answers, and the guest still works.
    let done = chaos.history.heard().told.done;
    chaos.history.wait_for(done + 20, LIMIT).unwrap();
    let (record, _story) = chaos.end();
    assert_eq!((record.errors, &record.first_error), (0, &None));
    let judgement = record.judge(&folder).unwrap();
    assert_eq!(judgement.findings, [], "{record:?}");
    assert!(judgement.newest.is_some(), "{judgement:?}");
    eprintln!("{} operations", judgement.done);
}

impl Chaos {
    fn start(lab: &Lab, version: &'static str, disks: &[LocalDisk], mut random: Random) -> Self {
        let host = lab.host(0).unwrap();
        let mut tiny = Tiny::calm("chaos");
        tiny.machine_version = version.to_owned();
        let emulator = installed::qemu(version).unwrap();
        let peer = PeerHost {
            host,
            qemu: &emulator,
            accelerator: "tcg",
            files: &KernelFiles::make_with_history(host.folder()).unwrap(),
            disks: &[],
            local: disks,
        };
        let guest = description(&tiny, disks);
        let qemu = PeerQemu::start(&peer, &guest, Begin::Boot).unwrap();
        let task = Task {
            disks,
            seed: random.draw(),
            depth: 8,
            work: Work::default(),
        };
        let mut history = History::new(&task);
        history
            .listen(|channel| channel_socket(host, channel))
            .unwrap();
        history.begin(&task).unwrap();
        let (pid, socket) = (qemu.pid(), qemu.socket().to_owned());
        // Its control socket is free now.
        let qemu = qemu.release().unwrap();
        let runtime = Runtime::new().unwrap();
        let qmp = runtime
            .block_on(Qmp::connect(&socket, COMMAND_TIMEOUT))
            .unwrap();
        let disks = guest.disks.iter().zip(disks).map(|(disk, local)| {
            let device = format!("/machine/peripheral/blk-{}/virtio-backend", disk.name);
            Disk {
                nodes: runtime.block_on(find(&qmp, pid as i32, &device)).unwrap(),
                local: local.clone(),
                front: None,
                times: 0,
            }
        });
        Self {
            disks: disks.collect(),
            random,
            qmp,
            qemu,
            pid,
            history,
            story: Story {
                folder: host.folder().to_owned(),
                version,
                events: Vec::new(),
            },
            runtime,
        }
    }

    /// Inserts disk exports below all disks.
    fn insert(&mut self) {
        for (number, disk) in self.disks.iter_mut().enumerate() {
            disk.times += 1;
            let path = self
                .story
                .folder
                .join(format!("front-{number}-{}", disk.times));
            let falls_back = self.random.below(4) == 0;
            disk.front = Some(Processes::start(&path, &disk.local, falls_back));
        }
        let fronts: Vec<_> = pairs(&self.disks).collect();
        self.runtime
            .block_on(insert_all(&self.qmp, &fronts))
            .unwrap();
    }

    /// Removes them.
    fn remove(&mut self) {
        for disk in &mut self.disks {
            if let Some((_, processes)) = &mut disk.front {
                processes.give_locks();
            }
        }
        let fronts: Vec<_> = pairs(&self.disks).collect();
        self.runtime
            .block_on(remove_all(&self.qmp, &fronts))
            .unwrap();
        for disk in &mut self.disks {
            disk.front.take().unwrap().1.stop();
        }
    }

    /// Causes a failure, or does what moves do.
    fn step(&mut self) {
        thread::sleep(Duration::from_millis(self.random.below(400)));
        let disk = self.random.below(self.disks.len() as u64) as usize;
        let processes = &mut self.disks[disk].front.as_mut().unwrap().1;
        let event = match self.random.below(16) {
            0..7 => processes.kill_server(),
            7..9 => processes.stop_server(),
            9..12 => processes.kill_supervisor(),
            12 => processes.kill_both(),
            13 => processes.hold_supervisor(Duration::from_millis(self.random.below(500))),
            _ => {
                self.remove();
                thread::sleep(Duration::from_millis(self.random.below(100)));
                self.insert();
                "taken out and put in"
            }
        };
        if self.random.below(2) == 0 {
            // Meanwhile the guest waits, or no supervisor would start the next server.
            thread::sleep(Duration::from_millis(self.random.below(300)));
        }
        for disk in &mut self.disks {
            disk.front.as_mut().unwrap().1.supervise();
        }
        self.story.events.push(event);
    }

    /// Ends the guest, in one of several ways.
    fn end(mut self) -> (Record, Story) {
        let way = self.random.below(3);
        if way == 0 {
            self.remove();
        }
        if way < 2 {
            self.history.stop().unwrap();
        }
        if way == 0 {
            let quit = self.qmp.execute("quit", json!({}), COMMAND_TIMEOUT);
            // The answer may be lost with it.
            let _ = self.runtime.block_on(quit);
            let process = PathBuf::from(format!("/proc/{}", self.pid));
            assert!(wait_until(LIMIT, || !process.exists()));
        }
        drop(self.qemu);
        for disk in &mut self.disks {
            if let Some((_, processes)) = disk.front.take() {
                processes.stop();
            }
        }
        let mut record = self.history.finish().unwrap();
        assert_eq!(record.quiet, way < 2);
        for (disk, recorded) in self.disks.iter().zip(&mut record.disks) {
            // For an image that grows a killed QEMU loses tables that were not flushed.
            let kind = disk.local.kind;
            let strict = kind.format == Format::Raw || kind.cache == Cache::Writethrough;
            recorded.keeps_acknowledged = way == 0 || strict;
        }
        (record, self.story)
    }
}

fn pairs(disks: &[Disk]) -> impl Iterator<Item = (&DiskNodes, &Front)> {
    let pair = |disk: &'_ Disk| disk.front.is_some();
    disks
        .iter()
        .filter(move |disk| pair(disk))
        .map(|disk| (&disk.nodes, &disk.front.as_ref().unwrap().0))
}

/// Returns a name for the export; it need not be secret here.
fn export_name(path: &Path) -> String {
    let name = path.file_name().unwrap().to_str().unwrap();
    format!("{name:-<32}")
}
