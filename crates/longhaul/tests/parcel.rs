//! Tests `longhaul parcel` from the first step to the last, with real files as devices.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{LIMIT, command, longhaul};
use serde_json::Value;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Two hosts of one parcel: each has a configuration, a state folder and a folder of disks.
struct Setting(TempDir);

const IMAGES: [(&str, usize); 3] = [("root", 3 << 20), ("data", 700_000), ("db", 1 << 20)];

impl Setting {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let setting = Self(folder);
        for host in ["lyon", "paris"] {
            fs::create_dir(setting.path(host)).unwrap();
            let state = setting.path(&format!("{host}/state"));
            let mut config = format!("state = {state:?}\n");
            for (name, _) in IMAGES {
                let path = setting.path(&format!("{host}/{name}.raw"));
                write!(
                    config,
                    "[images.{name}]\npath = {path:?}\nformat = \"raw\"\n"
                )
                .unwrap();
            }
            fs::write(setting.path(&format!("{host}.toml")), config).unwrap();
        }
        for (seed, (name, bytes)) in (1u32..).zip(IMAGES) {
            let mut next = seed;
            let content = std::iter::repeat_with(|| {
                next = next.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (next >> 24) as u8
            });
            let content: Vec<u8> = content.take(bytes).collect();
            fs::write(setting.path(&format!("lyon/{name}.raw")), content).unwrap();
        }
        for device in ["usb0", "usb1", "usb2"] {
            fs::create_dir(setting.path(device)).unwrap();
        }
        setting
    }

    /// Gives both hosts some images more, and the first one their disks.
    fn add_images(&self, names: &[String]) {
        for host in ["lyon", "paris"] {
            let file = self.path(&format!("{host}.toml"));
            let mut config = fs::read_to_string(&file).unwrap();
            for name in names {
                let path = self.path(&format!("{host}/{name}.raw"));
                write!(
                    config,
                    "[images.{name}]\npath = {path:?}\nformat = \"raw\"\n"
                )
                .unwrap();
            }
            fs::write(&file, config).unwrap();
        }
        let content = fs::read(self.path("lyon/root.raw")).unwrap();
        for (name, number) in names.iter().zip(1..) {
            let mut content = content.clone();
            content.rotate_left(number);
            fs::write(self.path(&format!("lyon/{name}.raw")), content).unwrap();
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn run(&self, host: &str, words: &[&str]) -> Output {
        let config = self.text(&format!("{host}.toml"));
        let words = [&["parcel", "--config", &config], words].concat();
        longhaul(&self.path("none"), &words)
    }

    /// Runs a command that must succeed, and returns its output.
    fn says(&self, host: &str, words: &[&str]) -> String {
        let output = self.run(host, words);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {errors}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, host: &str, words: &[&str]) -> Value {
        let said = self.says(host, &[&["--json"], words].concat());
        serde_json::from_str(&said).unwrap()
    }

    /// Runs a command that is refused: with this code, error and hint.
    fn refuses(&self, words: &[&str], code: i32, says: [&str; 2]) {
        let output = self.run("lyon", words);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{words:?}: {errors}");
        let [says, hint] = says;
        assert!(errors.contains(says), "{words:?}: {errors}");
        assert!(errors.contains(hint), "{words:?}: {errors}");
    }

    /// Returns the step that comes next.
    fn next(&self) -> String {
        let status = self.json("lyon", &["status", "box"]);
        let steps = status["steps"].as_array().unwrap();
        let next = steps.iter().find(|step| step["state"] == "next");
        next.map_or_else(String::new, |step| {
            step["name"].as_str().unwrap().to_owned()
        })
    }
}

#[test]
fn a_parcel_goes_from_step_to_step() {
    let setting = Setting::new();
    let usb = ["usb0", "usb1", "usb2"].map(|name| setting.text(name));
    assert!(setting.says("lyon", &["status"]).contains("no parcels"));
    setting.refuses(
        &["status", "box"],
        1,
        ["this host has no such parcel", "longhaul parcel status"],
    );
    setting.refuses(&["create", "box"], 2, ["--to <SITE>", "Usage"]);
    setting.refuses(
        &["create", "../box", "--to", "paris"],
        2,
        ["is not a parcel's name", "use letters"],
    );
    setting.says("lyon", &["create", "box", "--to", "paris", "--lose", "1"]);
    setting.refuses(
        &["create", "box", "--to", "paris"],
        1,
        ["has a parcel box already", "longhaul parcel status box"],
    );
    assert_eq!(setting.next(), "set up");
    setting.refuses(
        &["export", "box", "--device", &usb[0]],
        1,
        ["has no guests yet", "longhaul parcel add box GUEST=IMAGE"],
    );
    setting.refuses(
        &["add", "box", "web=none"],
        2,
        ["has no image \"none\"", "[images.none]"],
    );
    setting.refuses(&["add", "box", "web"], 2, ["GUEST=IMAGE", "web"]);
    setting.says("lyon", &["add", "box", "web=root,data"]);
    setting.refuses(
        &["add", "box", "db=root"],
        1,
        ["the disk root is named twice", ""],
    );
    assert_eq!(setting.next(), "export");
    setting.refuses(
        &["export", "box"],
        1,
        [
            "has no devices yet",
            "longhaul parcel export box --device PATH",
        ],
    );
    setting.refuses(
        &["top-up", "box"],
        1,
        ["is not complete", "longhaul parcel export box"],
    );
    let ship = ["ship", "box", "--courier", "DHL", "--number", "JD 1"];
    setting.refuses(&ship, 1, ["is not complete", "longhaul parcel export box"]);

    let [a, b, c] = &usb;
    let export = [
        "export", "box", "--limit", "60MiB", "--device", a, "--device", b,
    ];
    setting.says("lyon", &[&export[..], &["--device", c]].concat());
    assert_eq!(setting.next(), "ship");
    // It is repeated, and changes nothing.
    let again = setting.json("lyon", &["export", "box"]);
    assert_eq!(again["devices"].as_array().unwrap().len(), 3);

    setting.says("lyon", &["add", "box", "db=db"]);
    assert_eq!(setting.next(), "export");
    setting.refuses(
        &["export", "box"],
        1,
        ["was added after", "longhaul parcel top-up box"],
    );
    setting.refuses(
        &ship,
        1,
        ["db of db was added after", "longhaul parcel top-up box"],
    );
    let shown = setting.says("lyon", &["status", "box"]);
    assert!(shown.contains("compared with version 1"), "{shown}");
    assert!(shown.contains("in full: no version has it"), "{shown}");
    setting.says("lyon", &["top-up", "box"]);

    setting.refuses(&["ship", "box"], 2, ["--courier", "--number"]);
    let dated = |date: &str, arrives: &str| {
        let more = ["--date", date, "--arrives", arrives].map(str::to_owned);
        [&ship.map(str::to_owned)[..], &more[..]].concat()
    };
    let refused = |date: &str, arrives: &str, code, says: &str| {
        let words = dated(date, arrives);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        setting.refuses(&words, code, [says, ""]);
    };
    refused("2026-11-31", "2026-12-01", 2, "is not a date");
    refused(
        "2026-12-02",
        "2026-12-01",
        1,
        "an arrival before its departure",
    );
    setting.refuses(
        &["ship", "box", "--cancel"],
        1,
        ["no shipment of box", "--courier TEXT"],
    );
    let words = dated("2026-11-30", "2026-12-01");
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let shipped = setting.says("lyon", &words);
    assert!(
        shipped.contains("DHL JD 1, expected on 2026-12-01"),
        "{shipped}"
    );
    assert!(
        shipped.contains("the source's copies must stay"),
        "{shipped}"
    );
    for words in [
        &["top-up", "box"][..],
        &["export", "box"],
        &["add", "box", "more=db"],
    ] {
        setting.refuses(words, 1, ["have left", "longhaul parcel ship box --cancel"]);
    }
    setting.says("lyon", &["ship", "box", "--cancel"]);
    setting.says("lyon", &["top-up", "box"]);
    setting.says("lyon", &ship);
    assert_eq!(setting.next(), "import");

    let key = setting.says("lyon", &["key", "box"]);
    fs::write(setting.path("key"), key).unwrap();
    fs::remove_dir_all(b).unwrap();
    let key = setting.text("key");
    let imported = setting.json("paris", &["import", "--key-file", &key, a, c]);
    let report = PathBuf::from(imported["report"].as_str().unwrap());
    assert!(report.starts_with(setting.path("paris/state")));
    let said: Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
    assert_eq!(said["disks"].as_array().unwrap().len(), 3);
    assert_eq!(
        (&said["devices"][1]["state"], &said["disks"][0]["version"]),
        (&"missing".into(), &3.into())
    );

    let report = report.display().to_string();
    let nothing = setting.text("nothing.json");
    let unreadable = ["cannot be read", "`longhaul parcel import` has written it"];
    setting.refuses(&["check", "box", &nothing], 1, unreadable);
    fs::write(&nothing, "{}").unwrap();
    setting.refuses(&["check", "box", &nothing], 1, unreadable);
    let altered = fs::read_to_string(&report).unwrap();
    fs::write(&nothing, altered.replace("\"db\"", "\"dc\"")).unwrap();
    setting.refuses(
        &["check", "box", &nothing],
        1,
        ["or was altered", "sent again"],
    );
    assert_eq!(setting.next(), "import");
    let checked = setting.says("lyon", &["check", "box", &report]);
    assert!(checked.contains("the source's copies may go"), "{checked}");
    assert_eq!(setting.next(), "move");
    let shown = setting.says("lyon", &["status", "box"]);
    assert!(shown.contains("the source's copies may go"), "{shown}");
    // The guests leave: what a move does to their disks.
    for (name, _) in IMAGES {
        let path = setting.path(&format!("lyon/{name}.raw"));
        fs::rename(&path, path.with_extension("raw.moved")).unwrap();
    }
    assert_eq!(setting.next(), "delete");
    let copies = &setting.json("lyon", &["status", "box"])["copies"];
    for copy in copies.as_array().unwrap() {
        fs::remove_file(copy.as_str().unwrap()).unwrap();
    }
    assert_eq!(setting.next(), "");
    let listed = setting.says("lyon", &["status"]);
    assert!(listed.contains("nothing: all is done"), "{listed}");
}

#[test]
fn a_report_of_an_earlier_version_confirms_nothing() {
    let setting = Setting::new();
    let usb = setting.text("usb0");
    // The short form of the first three steps.
    setting.says(
        "lyon",
        &[
            "export", "box", "--to", "paris", "--limit", "60MiB", "--device", &usb, "web=root",
        ],
    );
    let key = setting.says("lyon", &["key", "box"]);
    fs::write(setting.path("key"), key).unwrap();
    let key = setting.text("key");
    let imported = setting.json("paris", &["import", "--key-file", &key, &usb]);
    let mut disk = fs::read(setting.path("lyon/root.raw")).unwrap();
    disk[1_000_000] ^= 1;
    fs::write(setting.path("lyon/root.raw"), disk).unwrap();
    setting.says("lyon", &["top-up", "box"]);
    let report = imported["report"].as_str().unwrap();
    let output = setting.run("lyon", &["check", "box", report]);
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains("as in the older version 1"), "{said}");
    assert!(said.contains("the source's copies must stay"), "{said}");
    let status = setting.json("lyon", &["status", "box"]);
    assert_eq!(status["is_confirmed"], false);
    // The older version can still be had, where no move looks for it.
    let into = setting.path("restored");
    fs::create_dir(&into).unwrap();
    let into = into.to_str().unwrap();
    let restore = ["import", "--key-file", &key, "--into", into];
    let older = [&restore[..], &["--version", "1", &usb]].concat();
    let said = setting.says("paris", &older);
    assert!(
        said.contains("version 1") && !said.contains("report"),
        "{said}"
    );
    let restored = |name: &str| fs::read(setting.path(&format!("restored/{name}.img"))).unwrap();
    let mut last = fs::read(setting.path("lyon/root.raw")).unwrap();
    last[1_000_000] ^= 1;
    assert!(restored("root") == last);
    let again = String::from_utf8(setting.run("paris", &older).stderr).unwrap();
    assert!(again.contains("nothing is overwritten"), "{again}");
}

#[test]
fn ways_are_compared_for_a_parcel_or_for_a_size() {
    let setting = Setting::new();
    setting.says("lyon", &["create", "box", "--to", "paris"]);
    setting.says("lyon", &["add", "box", "web=root,data", "db=db"]);
    let figures = [
        "--rate",
        "1mbit",
        "--changed-per-day",
        "2%",
        "--courier-days",
        "0.5",
    ];
    let planned = setting.json("lyon", &[&["plan", "box"], &figures[..]].concat());
    let bytes = planned["bytes"].as_u64().unwrap();
    let all: usize = IMAGES.iter().map(|(_, bytes)| bytes).sum();
    assert!(bytes > 0 && bytes <= all as u64, "{planned}");
    assert_eq!(
        (&planned["guests"], &planned["ways"][0]["way"]),
        (&2.into(), &"link".into())
    );
    let sized = ["plan", "--bytes", "20TiB", "--guests", "40"];
    let sized = setting.says("lyon", &[&sized[..], &figures[..]].concat());
    assert!(sized.contains("20 TiB of 40 guests"), "{sized}");
    setting.refuses(
        &[&["plan"], &figures[..]].concat(),
        2,
        ["how much", "--bytes 20TiB"],
    );
    let bad = [
        "plan",
        "box",
        "--rate",
        "1mbit",
        "--changed-per-day",
        "2 days",
    ];
    setting.refuses(&[&bad[..], &figures[4..]].concat(), 2, ["say 2%", ""]);
}

#[test]
fn an_export_that_is_killed_goes_on() {
    let setting = Setting::new();
    let names: Vec<String> = (0..16).map(|number| format!("image-{number}")).collect();
    setting.add_images(&names);
    setting.says("lyon", &["create", "box", "--to", "paris"]);
    let guests: Vec<String> = names
        .iter()
        .map(|name| format!("of-{name}={name}"))
        .collect();
    let guests: Vec<&str> = guests.iter().map(String::as_str).collect();
    setting.says("lyon", &[&["add", "box"], &guests[..]].concat());
    let (usb, config) = (setting.text("usb0"), setting.text("lyon.toml"));
    let exported = |status: &Value| {
        let guests = status["guests"].as_array().unwrap();
        let is_done = |guest: &&Value| guest["disks"][0]["next"]["does"] == "done";
        guests.iter().filter(is_done).count()
    };
    let (mut interruptions, mut done) = (0, 0);
    loop {
        let device = ["--device", &usb, "--limit", "400MiB"];
        let device = &device[..if done == 0 { 4 } else { 0 }];
        let words = [&["parcel", "--config", &config, "export", "box"], device].concat();
        let mut child = command(&setting.path("none"))
            .args(words)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // It is killed when some guests more are durable.
        let deadline = Instant::now() + LIMIT;
        let ended = loop {
            let status = setting.json("lyon", &["status", "box"]);
            let now = exported(&status);
            if let Some(ended) = child.try_wait().unwrap() {
                break Some(ended);
            }
            if status["is_begun"] == true && now > done + 2 {
                break None;
            }
            assert!(Instant::now() < deadline, "{status}");
            std::thread::sleep(Duration::from_millis(1));
        };
        if let Some(ended) = ended {
            assert!(ended.success());
            break;
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let status = setting.json("lyon", &["status", "box"]);
        if status["sealed"] == false {
            interruptions += 1;
            assert!(exported(&status) > done, "{status}");
            done = exported(&status);
            let says = status["steps"][1]["says"].as_str().unwrap();
            assert!(says.contains("version 1 goes on"), "{says}");
        }
    }
    assert!(interruptions > 0, "it was never killed");
    let key = setting.says("lyon", &["key", "box"]);
    fs::write(setting.path("key"), key).unwrap();
    let imported = setting.json(
        "paris",
        &["import", "--key-file", &setting.text("key"), &usb],
    );
    for name in &names {
        let sent = fs::read(setting.path(&format!("lyon/{name}.raw"))).unwrap();
        let arrived = fs::read(setting.path(&format!("paris/{name}.raw.moved"))).unwrap();
        assert!(sent == arrived, "{name}");
    }
    let report = imported["report"].as_str().unwrap();
    setting.says("lyon", &["check", "box", report]);
}
