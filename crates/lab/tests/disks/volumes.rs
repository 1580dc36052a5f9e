//! Tests disks that arrive on volumes and leave them again: loop devices over sparse files.

use crate::stage::{DISK_BYTES, GUEST, Stage, make_loop_nodes};
use longhaul_api::{Outcome, Report};
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

const MIB: u64 = 1 << 20;
/// The kinds of disks, and the sizes of the volumes of paris: larger than the disks.
const KINDS: [&str; 2] = ["raw,none", "qcow2,writeback"];
const SIZES: [u64; 2] = [DISK_BYTES + 3 * MIB, 256 * MIB];

/// A volume in the place of an image.
struct Volume {
    device: PathBuf,
    file: PathBuf,
    image: PathBuf,
}

impl Volume {
    /// Creates it, all zeros.
    fn make(image: &Path, bytes: u64) -> Self {
        make_loop_nodes();
        let file = image.with_extension("behind");
        File::create(&file).unwrap().set_len(bytes).unwrap();
        let mut made = Command::new("losetup");
        let made = made.args(["--find", "--show"]).arg(&file).output().unwrap();
        assert!(made.status.success(), "{made:?}");
        let device = PathBuf::from(String::from_utf8(made.stdout).unwrap().trim());
        symlink(&device, image).unwrap();
        Self {
            device,
            file,
            image: image.to_owned(),
        }
    }

    fn open(&self) -> File {
        let mut options = File::options();
        options.read(true).write(true).open(&self.device).unwrap()
    }

    fn write(&self, byte: u64, content: &[u8]) {
        let file = self.open();
        file.write_all_at(content, byte).unwrap();
        file.sync_all().unwrap();
    }

    fn read(&self, byte: u64, length: usize) -> Vec<u8> {
        let mut content = vec![0; length];
        self.open().read_exact_at(&mut content, byte).unwrap();
        content
    }

    /// Returns the space that it takes.
    fn allocated(&self) -> u64 {
        self.open().sync_all().unwrap();
        fs::metadata(&self.file).unwrap().blocks() * 512
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        // It is removed when it is not open any more.
        let mut detach = Command::new("losetup");
        let _ = detach.arg("--detach").arg(&self.device).status();
        let _ = fs::remove_file(&self.image);
    }
}

impl Stage {
    pub(crate) fn plan(&self, from: usize) -> Value {
        let to = self.lab.host(1 - from).unwrap().name();
        let mut plan = self.product.agent(from).unwrap().command().unwrap();
        plan.args(["--json", "plan", GUEST, "--to", to]);
        let output = plan.output().unwrap();
        serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {output:?}\n{}", self.logs()))
    }

    /// Asserts that a plan and a move are refused with this text, and nothing is changed.
    fn refuses(&self, text: &str) {
        let plan = self.plan(0);
        assert_eq!(plan["possible"], false, "{plan}");
        assert!(plan.to_string().contains(text), "{plan}");
        let to = self.lab.host(1).unwrap();
        let moving = self.product.migrate(0, GUEST, to, &[]).unwrap();
        let refused = self.ended(moving);
        assert!(!refused.completed());
        let why = refused.why();
        assert!(why.contains(text), "{why}\n{}", self.logs());
        self.goes_on();
        self.nothing_is_left(0);
        self.nothing_is_left(1);
    }

    fn moves_here(&self, from: usize, how: &str) -> Report {
        let to = self.lab.host(1 - from).unwrap();
        let words = ["--disks", how, "--verify"];
        let moving = self.product.migrate(from, GUEST, to, &words).unwrap();
        let finished = self.ended(moving);
        assert!(finished.completed(), "{}\n{}", finished.why(), self.logs());
        let report = *finished.report.unwrap();
        let verified = report.verify.clone().unwrap();
        let compared = (verified.disks as usize, verified.disks_not_compared);
        assert_eq!(compared, (self.disks.len(), 0));
        assert_eq!(verified.different_blocks, 0);
        self.goes_on();
        self.nothing_is_left(from);
        self.nothing_is_left(1 - from);
        report
    }

    /// Returns the states in a host's notes of volumes, in the order of the disks.
    fn volumes(&self, host: usize) -> Vec<String> {
        let Ok(notes) = fs::read_dir(self.state(host).join("volumes")) else {
            return Vec::new();
        };
        let read =
            |path: PathBuf| -> Value { serde_json::from_slice(&fs::read(path).unwrap()).unwrap() };
        let notes = notes.map(|note| read(note.unwrap().path()));
        let mut notes: Vec<(String, String)> = notes
            .map(|note| {
                let state = match note["state"].as_str() {
                    Some(state) => state.to_owned(),
                    None => note["state"].to_string(),
                };
                (note["disk"].as_str().unwrap().to_owned(), state)
            })
            .collect();
        notes.sort();
        notes.into_iter().map(|(_, state)| state).collect()
    }

    /// Returns the size of a disk as its guest sees it.
    fn size_of_disk(&self, host: usize, disk: &str) -> u64 {
        let blocks = self.monitor(host).ask("query-block");
        let blocks = blocks.as_array().unwrap().iter();
        let mut blocks = blocks.filter(|block| {
            let device = block["qdev"].as_str().unwrap_or_default();
            device.contains(&format!("blk-{disk}"))
        });
        let image = &blocks.next().unwrap()["inserted"]["image"];
        image["virtual-size"].as_u64().unwrap()
    }
}

fn volumes_of(stage: &Stage, host: usize) -> Vec<Volume> {
    let sizes = SIZES.iter().enumerate();
    let volumes = sizes.map(|(disk, bytes)| Volume::make(&stage.image_of(host, disk), *bytes));
    volumes.collect()
}

fn there_and_back(version: &str) {
    let Some(stage) = Stage::with(version, "400mbit,2ms", &KINDS, None) else {
        return;
    };
    let volumes = volumes_of(&stage, 1);
    // Former content, behind the places that show that something is on the volume.
    volumes[0].write(5 * MIB + 24_576, &[7; 4096]);
    volumes[0].write(DISK_BYTES + MIB, &[8; 4096]);
    let plan = stage.plan(0);
    let text = plan.to_string();
    assert_eq!(plan["possible"], true, "{plan}");
    assert!(text.contains("has a volume of"), "{plan}");
    stage.moves_here(0, "precopy");
    assert_eq!(stage.volumes(1), ["here", "here"]);
    let left = fs::metadata(stage.set_aside(0, 0)).unwrap().blocks() * 512;
    let taken = volumes[0].allocated();
    assert!(taken <= left + 2 * MIB, "{taken} of {left}");
    // The guest sees the old size, and nothing behind it was touched.
    assert_eq!(stage.size_of_disk(1, "vda"), DISK_BYTES);
    assert_eq!(volumes[0].read(DISK_BYTES + MIB, 4096), [8; 4096]);

    let back = stage.moves_here(1, "mirror");
    assert_eq!(stage.size_of_disk(0, "vda"), DISK_BYTES);
    assert_eq!(back.disks[0].image_bytes, DISK_BYTES);
    assert!(back.disks[0].allocated_bytes < DISK_BYTES, "{back:?}");
    assert_eq!(fs::metadata(stage.image(0)).unwrap().len(), DISK_BYTES);
    assert_eq!(stage.volumes(1), ["left", "left"]);

    // What the guest left there was changed, so it may be somebody's.
    let before = volumes[0].read(0, 4096);
    volumes[0].write(0, &[9; 4096]);
    stage.refuses("does not write over content (at byte 0) in the volume");
    volumes[0].write(0, &before);
    assert_eq!(stage.volumes(1), ["left", "left"]);
    let plan = stage.plan(0).to_string();
    assert!(plan.contains("as this guest left it"), "{plan}");

    stage.moves_here(0, "hybrid");
    assert_eq!(stage.size_of_disk(1, "vda"), DISK_BYTES);
    assert_eq!(volumes[0].read(DISK_BYTES + MIB, 4096), [8; 4096]);
    stage.moves_here(1, "postcopy");
    assert_eq!(stage.volumes(1), ["left", "left"]);
    stage.judge(0);
}

#[test]
fn a_disk_moves_to_a_volume_and_back_with_qemu_10() {
    there_and_back("10.0");
}

#[test]
#[ignore = "a minute; what differs between versions is tested below QEMU"]
fn a_disk_moves_to_a_volume_and_back_with_qemu_7_2() {
    there_and_back("7.2");
}

#[test]
fn a_volume_with_something_on_it_or_in_use_is_not_written_to() {
    let Some(stage) = Stage::with("10.0", "400mbit,2ms", &["raw,writeback"], None) else {
        return;
    };
    let image = stage.image(1);
    {
        let small = Volume::make(&image, DISK_BYTES - 4096);
        stage.refuses("which needs");
        assert_eq!(small.allocated(), 0);
    }
    let volume = Volume::make(&image, DISK_BYTES);
    let mut format = Command::new("mkfs.ext4");
    let formatted = format.args(["-q", "-F"]).arg(&volume.device).output();
    let expected = match formatted {
        Ok(output) if output.status.success() => "a file system (ext2 to ext4)",
        _ => {
            volume.write(12 * MIB, b"something");
            "content (at byte 12582912)"
        }
    };
    let before = volume.read(0, DISK_BYTES as usize);
    stage.refuses(expected);
    assert!(volume.read(0, DISK_BYTES as usize) == before);
    volume.write(0, &vec![0; DISK_BYTES as usize]);
    let user = volume.open();
    // The command, which has the file too, is gone after this.
    let holds = Command::new("sleep").arg("600").stdin(user).spawn();
    let mut holds = holds.unwrap();
    stage.refuses("has something that uses the volume");
    holds.kill().unwrap();
    holds.wait().unwrap();

    // A move that is given up leaves a part of the disk, which only this guest may write over.
    let moving = stage.begins("precopy");
    let agent = stage.product.agent(0).unwrap();
    agent.run(&["cancel", GUEST]).unwrap();
    let finished = stage.ended(moving);
    let why = finished.why();
    assert_eq!(finished.outcome, Some(Outcome::Aborted), "{why}");
    stage.goes_on();
    stage.nothing_is_left(0);
    stage.nothing_is_left(1);
    assert_eq!(stage.volumes(1), ["aborted"]);
    let before = volume.read(0, 4096);
    volume.write(0, &[9; 4096]);
    stage.refuses("does not write over");
    volume.write(0, &before);

    stage.moves_here(0, "mirror");
    assert_eq!(stage.volumes(1), ["here"]);
    // Another guest is not started on a volume that a guest has left.
    stage.moves_here(1, "precopy");
    assert_eq!(stage.volumes(1), ["left"]);
    let other = "name = \"other\"\nmachine = \"pc-q35-10.0\"\ncpu = \"qemu64\"\nvcpus = 1\n\
                 memory_mib = 64\n[[disks]]\nname = \"vda\"\nimage = \"disk0\"\n";
    let path = stage.folders[1].join("other.toml");
    fs::write(&path, other).unwrap();
    let agent = stage.product.agent(1).unwrap();
    let started = agent.run(&["guests", "start", path.to_str().unwrap()]);
    let why = started.unwrap_err().to_string();
    assert!(
        why.contains("which moved away") || why.contains("belongs to"),
        "{why}"
    );
    stage.judge(0);
}
