//! Tests disks that travel by courier while their guest goes on, and what has changed since over
//! the link.

use crate::stage::{DISK_BYTES, GUEST, LIMIT, Stage};
use longhaul_lab::process::{kill_all, wait_until};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

impl Stage {
    /// Returns `longhaul parcel` on a host.
    fn parcel_command(&self, host: usize, words: &[&str]) -> Command {
        let config = self.lab.host(host).unwrap().folder().join("agent.toml");
        let mut command = self.product.agent(host).unwrap().command().unwrap();
        command.args(["--json", "parcel", "--config"]).arg(config);
        command.args(words);
        command
    }

    /// Runs `longhaul parcel` on a host, and returns its document.
    fn parcel(&self, host: usize, words: &[&str]) -> serde_json::Value {
        let said = longhaul_lab::process::run(&mut self.parcel_command(host, words)).unwrap();
        serde_json::from_str(&said).unwrap()
    }

    fn restart_agent(&mut self) {
        let host = self.lab.host(0).unwrap();
        self.product.agent_mut(0).unwrap().restart(host).unwrap();
    }

    fn top_up_begins(&self) -> Child {
        let mut command = self.parcel_command(0, &["top-up", "box"]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.spawn().unwrap()
    }

    /// Writes the last version of all disks to a folder, and compares them with the images.
    fn is_as_its_images(&self, key: &str, device: &str, into: &Path) {
        fs::create_dir(into).unwrap();
        let folder = into.display().to_string();
        let words = ["import", "--key-file", key, "--into", &folder, device];
        let imported = self.parcel(1, &words);
        for (at, disk) in imported["disks"].as_array().unwrap().iter().enumerate() {
            let found = fs::read(disk["path"].as_str().unwrap()).unwrap();
            let image = fs::read(self.image_of(0, at)).unwrap();
            let differs = found
                .iter()
                .zip(&image)
                .position(|(one, other)| one != other);
            assert_eq!((differs, found.len()), (None, image.len()), "{disk}");
        }
        fs::remove_dir_all(into).unwrap();
    }
}

#[test]
fn disks_travel_by_courier_and_what_has_changed_over_the_link() {
    let kinds = ["raw,none", "qcow2,writeback"];
    let Some(stage) = Stage::with_idle("10.0", "100mbit,4ms", &kinds) else {
        return;
    };
    let folder = stage.lab.host(0).unwrap().folder().to_owned();
    let boxes: Vec<PathBuf> = (0..4).map(|n| folder.join(format!("usb{n}"))).collect();
    stage.parcel(0, &["create", "box", "--to", "paris", "--lose", "1"]);
    stage.parcel(0, &["add", "box", &format!("{GUEST}=disk0,disk1,disk2")]);
    let mut words = ["export", "box", "--limit", "200MiB"]
        .map(str::to_owned)
        .to_vec();
    for path in &boxes {
        fs::create_dir(path).unwrap();
        words.extend(["--device".to_owned(), path.display().to_string()]);
    }
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let exported = stage.parcel(0, &words);
    assert_eq!(exported["devices"].as_array().unwrap().len(), boxes.len());
    assert_eq!(exported["guests"][0]["consistent"], true, "{exported}");
    let status = stage.parcel(0, &["status", "box"]);
    for disk in status["guests"][0]["disks"].as_array().unwrap() {
        assert_eq!(disk["next"]["does"], "changed", "{status}");
    }
    // The guest goes on, the devices are brought up to date, and one of them is lost on the way.
    stage.goes_on();
    let first = exported["device_bytes"].as_u64().unwrap();
    let topped_up = stage.parcel(0, &["top-up", "box"]);
    assert_eq!(topped_up["parcel"], exported["parcel"]);
    assert!(topped_up["device_bytes"].as_u64().unwrap() > first);
    assert_eq!(topped_up["guests"][0]["consistent"], true, "{topped_up}");
    let ship = ["ship", "box", "--courier", "DHL", "--number", "JD 1"];
    let shipped = stage.parcel(0, &ship);
    assert_eq!(shipped["steps"][2]["state"], "done", "{shipped}");
    stage.goes_on();
    fs::remove_dir_all(&boxes[2]).unwrap();
    let arrived = [0, 1, 3].map(|n: usize| boxes[n].display().to_string());
    let arrived = arrived.each_ref().map(String::as_str);
    let verified = stage.parcel(1, &[&["verify"], &arrived[..]].concat());
    assert_eq!(
        (&verified["lost_cells"], &verified["parity"]),
        (&0.into(), &1.into())
    );
    assert!(verified["devices"][2]["path"].is_null(), "{verified}");

    let key = folder.join("key");
    let config = folder.join("agent.toml").display().to_string();
    let agent = stage.product.agent(0).unwrap();
    let text = agent
        .run(&["parcel", "--config", &config, "key", "box"])
        .unwrap();
    fs::write(&key, text).unwrap();
    let key_file = key.display().to_string();
    let import = [&["import", "--key-file", &key_file], &arrived[..]].concat();
    let imported = stage.parcel(1, &import);
    let disks = imported["disks"].as_array().unwrap();
    assert_eq!(disks.len(), 3, "{imported}");
    for (disk, number) in disks.iter().zip(0..) {
        let path = stage.set_aside(1, number);
        assert_eq!(disk["path"], path.display().to_string());
        assert_eq!(disk["bytes"], fs::metadata(path).unwrap().len());
    }
    // The source compares what has arrived with what it has sent.
    let report = imported["report"].as_str().unwrap();
    let checked = stage.parcel(0, &["check", "box", report]);
    assert_eq!(checked["confirmed"], true, "{checked}");
    // It is not imported over something else.
    let agent = stage.product.agent(1).unwrap();
    let config = stage
        .lab
        .host(1)
        .unwrap()
        .folder()
        .join("agent.toml")
        .display()
        .to_string();
    let again = [&["parcel", "--config", &config], &import[..]].concat();
    let refused = agent.run(&again).unwrap_err().to_string();
    assert!(
        refused.contains("from an earlier import or move"),
        "{refused}"
    );

    let report = stage.moves(0, "precopy");
    // What the parcel has brought does not travel again. What the guest writes meanwhile does, and
    // how much that is depends on how busy this machine is.
    let (kept, sent) = (report.bytes.kept_bytes.unwrap(), report.disk_bytes);
    eprintln!("{kept} bytes were there, {sent:?} were sent");
    assert!(kept > DISK_BYTES / 2, "{kept} {sent:?}");
    let status = stage.parcel(0, &["status", "box"]);
    assert_eq!(status["left"], serde_json::json!([GUEST]), "{status}");
    stage.judge(1);
}

/// What fails while a top-up runs.
const TROUBLES: [&str; 4] = ["command", "agent", "servers", "all but the guest"];

#[test]
fn whatever_fails_during_top_ups_a_parcel_lacks_no_write() {
    let kinds = ["raw,none", "qcow2,writeback"];
    let Some(mut stage) = Stage::with("10.0", "400mbit,2ms", &kinds, None) else {
        return;
    };
    let folder = stage.lab.host(0).unwrap().folder().to_owned();
    let (device, into) = (folder.join("usb"), folder.join("into"));
    fs::create_dir(&device).unwrap();
    let device = device.display().to_string();
    let guest = format!("{GUEST}=disk0,disk1");
    stage.parcel(
        0,
        &[
            "export", "box", "--to", "paris", "--limit", "900MiB", "--device", &device, &guest,
        ],
    );
    let config = folder.join("agent.toml").display().to_string();
    let agent = stage.product.agent(0).unwrap();
    let key = agent
        .run(&["parcel", "--config", &config, "key", "box"])
        .unwrap();
    let key_file = folder.join("key");
    fs::write(&key_file, key).unwrap();
    let key_file = key_file.display().to_string();

    let mut dice = stage.seed;
    for round in 0..2 * TROUBLES.len() as u64 {
        stage.goes_on();
        let mut top_up = stage.top_up_begins();
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let after = Duration::from_millis((dice >> 33) % 700);
        let trouble = TROUBLES[(round % TROUBLES.len() as u64) as usize];
        eprintln!("{trouble} fails after {after:?}");
        sleep(after);
        match trouble {
            "command" => top_up.kill().unwrap(),
            "agent" => stage.restart_agent(),
            "servers" => kill_all(&stage.fronts("track")).unwrap(),
            _ => {
                top_up.kill().unwrap();
                kill_all(&stage.fronts("supervise")).unwrap();
                kill_all(&stage.fronts("track")).unwrap();
                // It lets other supervisors go on.
                stage.restart_agent();
            }
        }
        // It may have failed, and is repeated.
        top_up.wait().unwrap();
        let whole = || stage.top_up_begins().wait().unwrap().success();
        assert!(wait_until(LIMIT, whole), "{}", stage.logs());
    }
    // QEMU dies in the middle of one. Nobody knows what it wrote last.
    stage.goes_on();
    let mut top_up = stage.top_up_begins();
    sleep(Duration::from_millis(dice % 300));
    stage.kill_qemu(0);
    top_up.wait().unwrap();
    stage.parcel(0, &["top-up", "box"]);
    stage.is_as_its_images(&key_file, &device, &into);
    // It is started again, and writes where nobody looks; then it is tracked, and writes more.
    stage
        .product
        .agent(0)
        .unwrap()
        .run(&["guests", "start", GUEST])
        .unwrap();
    let writes = |disk: &str, words: &str| {
        let said = stage.io_of_disk(0, disk, words);
        assert!(said.contains("wrote 65536/65536"), "{said}");
    };
    writes("vda", "write -P 0x5a 5M 64k");
    let topped_up = stage.parcel(0, &["top-up", "box"]);
    assert_eq!(topped_up["guests"][0]["consistent"], true, "{topped_up}");
    writes("vda", "write -P 0x5b 9M 64k");
    writes("vdb", "write -P 0x5c 11M 64k");
    let topped_up = stage.parcel(0, &["top-up", "box"]);
    assert_eq!(topped_up["guests"][0]["consistent"], true, "{topped_up}");
    stage.kill_qemu(0);
    stage.is_as_its_images(&key_file, &device, &into);
}
