//! Tests a parcel whose devices are attached to a third host, a terminal, while the guest goes on
//! and the link to the terminal is cut.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

use longhaul_lab::guest::disks::{LocalDisk, local_disks};
use longhaul_lab::guest::{KernelFiles, Tiny};
use longhaul_lab::history::task::{History, Task, description};
use longhaul_lab::history::workload::Work;
use longhaul_lab::installed;
use longhaul_lab::lab::{Lab, Plan};
use longhaul_lab::process::{self, wait_until};
use longhaul_lab::product::{Product, Settings, channel_socket};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(300);
const DISK_BYTES: u64 = 24 << 20;
const VERSION: &str = "10.0";
const GUEST: &str = "writer";
const SOURCE: usize = 0;
const DESTINATION: usize = 1;
const TERMINAL: usize = 2;
/// A connection is given up after 15 s without an answer.
const CUT: Duration = Duration::from_secs(25);

/// Two hosts, a terminal, and a guest that writes to local disks of the first host.
struct Stage {
    lab: Lab,
    product: Product,
    history: History,
    folders: Vec<PathBuf>,
}

fn device(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("wd{number}"))
}

impl Stage {
    fn new() -> Option<Self> {
        if let Err(error) = installed::qemu(VERSION) {
            assert!(!installed::all_required(), "{error}");
            eprintln!("SKIPPED terminal: {error}");
            return None;
        }
        let mut lab = Lab::create(&Plan {
            purpose: "test: devices at a terminal".to_owned(),
            hosts: 3,
            link: "100mbit,1ms".parse().unwrap(),
            seed: 1,
        })
        .unwrap();
        let folders: Vec<PathBuf> = lab.hosts().iter().map(|h| h.folder().to_owned()).collect();
        let kinds = ["raw,none", "qcow2,writeback"].map(|kind| kind.parse().unwrap());
        let disks = local_disks(&folders[SOURCE], DISK_BYTES, &kinds);
        disks.iter().for_each(|disk| disk.create().unwrap());
        let files = KernelFiles::make_with_history(&folders[SOURCE]).unwrap();
        let settings = Settings {
            qemus: vec![VERSION.to_owned()],
            accelerator: "tcg".to_owned(),
        };
        let at = &folders[TERMINAL];
        (0..3).for_each(|number| fs::create_dir(device(at, number)).unwrap());
        let tables = |index: usize| match index {
            TERMINAL => devices(at),
            _ => images(&folders[index], &disks),
        };
        let product = Product::start_each_with(&mut lab, &files, &settings, tables).unwrap();
        let guest = description(&Tiny::calm(GUEST), &disks);
        let task = Task {
            disks: &disks,
            seed: 7,
            depth: 4,
            work: Work {
                operations_per_s: 60,
                ..Work::default()
            },
        };
        let mut history = History::new(&task);
        for host in lab.hosts() {
            let socket = |channel: &str| channel_socket(host, GUEST, channel);
            history.listen(socket).unwrap();
        }
        product.start_guest(&lab, SOURCE, &guest).unwrap();
        history.begin(&task).unwrap();
        history.wait_for(60, LIMIT).unwrap();
        Some(Self {
            lab,
            product,
            history,
            folders,
        })
    }

    fn parcel_command(&self, host: usize, words: &[&str]) -> Command {
        let mut command = self.product.agent(host).unwrap().command().unwrap();
        let config = self.folders[host].join("agent.toml");
        command.args(["--json", "parcel", "--config"]).arg(config);
        command.args(words);
        command
    }

    /// Runs `longhaul parcel` on a host, and returns its document.
    fn parcel(&self, host: usize, words: &[&str]) -> serde_json::Value {
        let said = process::run(&mut self.parcel_command(host, words));
        let said = said.unwrap_or_else(|error| panic!("{error}\n{}", self.logs()));
        serde_json::from_str(&said).unwrap()
    }

    /// Cuts the link of a host to the terminal when its command has come so far. Returns what the
    /// command says.
    fn is_cut(&self, host: usize, words: &[&str], far: impl Fn() -> bool) -> String {
        let mut command = self.parcel_command(host, words);
        let command = command.stdin(Stdio::null()).stdout(Stdio::null());
        let command = command.stderr(Stdio::piped()).spawn().unwrap();
        assert!(wait_until(LIMIT, far), "{}", self.logs());
        let link = self.lab.link(host, TERMINAL).unwrap();
        link.cut(CUT).unwrap();
        let output = command.wait_with_output().unwrap();
        link.heal().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{said}");
        said
    }

    fn goes_on(&self) {
        let done = self.history.heard().told.done;
        self.history.wait_for(done + 30, LIMIT).unwrap();
        let heard = self.history.heard();
        assert_eq!((heard.errors, heard.first_error), (0, None));
    }

    fn logs(&self) -> String {
        self.product.ends_of_logs()
    }

    fn file(&self, number: usize) -> PathBuf {
        let folder = device(&self.folders[TERMINAL], number);
        folder.join(format!("box-{number}.parcel"))
    }
}

fn devices(folder: &Path) -> toml::Table {
    let device = |number| {
        let path = device(folder, number).display().to_string();
        (format!("wd{number}"), path.into())
    };
    let devices: toml::Table = (0..3).map(device).collect();
    toml::Table::from_iter([("parcel_devices".to_owned(), devices.into())])
}

fn images(folder: &Path, disks: &[LocalDisk]) -> toml::Table {
    let image = |disk: &LocalDisk| {
        let path = folder.join(disk.path.file_name().unwrap());
        let table = toml::Table::from_iter([
            ("path".to_owned(), path.display().to_string().into()),
            ("format".to_owned(), disk.kind.format.name().into()),
        ]);
        (disk.image.clone(), toml::Value::from(table))
    };
    let images: toml::Table = disks.iter().map(image).collect();
    toml::Table::from_iter([("images".to_owned(), images.into())])
}

#[test]
fn a_parcel_is_written_and_read_at_a_terminal_over_a_link_that_is_cut() {
    if !installed::is_its_day(0, 2) {
        return;
    }
    let Some(mut stage) = Stage::new() else {
        return;
    };
    let terminal = stage.lab.host(TERMINAL).unwrap().name().to_owned();
    let name = |number| format!("{terminal}:wd{number}");
    let (a, b, c) = (name(0), name(1), name(2));
    stage.parcel(SOURCE, &["create", "box", "--to", "paris", "--lose", "1"]);
    stage.parcel(SOURCE, &["add", "box", &format!("{GUEST}=disk0,disk1")]);
    let export = [
        "export", "box", "--device", &a, "--device", &b, "--device", &c,
    ];
    let is_far = || fs::metadata(stage.file(1)).is_ok_and(|file| file.len() > 3 << 20);
    let said = stage.is_cut(SOURCE, &export, is_far);
    assert!(said.contains(&format!("{terminal}:wd")), "{said}");
    stage.goes_on();
    let exported = stage.parcel(SOURCE, &["export", "box"]);
    assert_eq!(exported["devices"][1], format!("{b}/box-1.parcel"));
    assert_eq!(exported["guests"][0]["consistent"], true, "{exported}");
    stage.goes_on();
    let topped_up = stage.parcel(SOURCE, &["top-up", "box"]);
    assert_eq!(topped_up["guests"][0]["consistent"], true, "{topped_up}");

    // A device is lost. The destination has a terminal too, which is the same here.
    fs::remove_file(stage.file(1)).unwrap();
    let verified = stage.parcel(DESTINATION, &["verify", &c, &a]);
    assert_eq!(verified["lost_cells"], 0, "{verified}");
    let agent = stage.product.agent(SOURCE).unwrap();
    let config = stage.folders[SOURCE].join("agent.toml");
    let config = config.display().to_string();
    let key = agent.run(&["parcel", "--config", &config, "key", "box"]);
    let key_file = stage.folders[SOURCE].join("key");
    fs::write(&key_file, key.unwrap()).unwrap();
    let key_file = key_file.display().to_string();
    let import = ["import", "--key-file", &key_file, &a, &c];
    let is_far = || {
        let files = fs::read_dir(&stage.folders[DESTINATION]).unwrap().flatten();
        let mut names = files.map(|file| file.file_name().to_string_lossy().into_owned());
        names.any(|name| name.ends_with(".importing"))
    };
    let said = stage.is_cut(DESTINATION, &import, is_far);
    assert!(said.contains("is lost"), "{said}");
    let imported = stage.parcel(DESTINATION, &import);
    let disks = imported["disks"].as_array().unwrap();
    assert_eq!(disks.len(), 2, "{imported}");
    let report = imported["report"].as_str().unwrap();
    let checked = stage.parcel(SOURCE, &["check", "box", report]);
    assert_eq!(checked["confirmed"], true, "{checked}");

    // What the terminal has brought does not travel when the guest moves.
    let to = stage.lab.host(DESTINATION).unwrap();
    let words = ["--disks", "precopy", "--verify"];
    let moving = stage.product.migrate(SOURCE, GUEST, to, &words).unwrap();
    let finished = moving.finish(LIMIT).unwrap();
    assert!(finished.completed(), "{}\n{}", finished.why(), stage.logs());
    let report = *finished.report.unwrap();
    let kept = report.bytes.kept_bytes.unwrap();
    // The guest rewrites the more of it, the longer this took.
    assert!(kept > 64 << 10, "{kept}");
    stage.goes_on();
    stage.history.stop().unwrap();
    stage.product.stop_guest(DESTINATION, GUEST).unwrap();
    let record = stage.history.finish().unwrap();
    let judgement = record.judge(&stage.folders[DESTINATION]).unwrap();
    assert_eq!(judgement.findings, [], "{record:?}");
}
