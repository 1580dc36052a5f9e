//! Tests disks that travel by courier while their guest goes on, and what has changed since over
//! the link.

use crate::stage::{DISK_BYTES, GUEST, Stage};
use std::fs;
use std::path::PathBuf;

impl Stage {
    /// Runs `longhaul parcel` on a host, and returns its document.
    fn parcel(&self, host: usize, words: &[&str]) -> serde_json::Value {
        let config = self.lab.host(host).unwrap().folder().join("agent.toml");
        let config = config.display().to_string();
        let words = [&["--json", "parcel", "--config", &config], words].concat();
        let said = self.product.agent(host).unwrap().run(&words).unwrap();
        serde_json::from_str(&said).unwrap()
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
