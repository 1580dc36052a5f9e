//! Another reader, written from docs/parcel.md alone, reads the same.

use crate::stage::{Dice, Stage, disk, put_guest};
use longhaul_parcel::{Device, ImportReport, Parcel, import};
use std::process::Command;
use std::{env, fs};

#[test]
fn a_reader_of_the_page_alone_reads_a_parcel_with_a_device_missing() {
    let probe = Command::new("/usr/bin/python3")
        .args(["-c", "import cryptography, zstandard"])
        .status();
    if !probe.is_ok_and(|status| status.success()) {
        let needed = env::var_os("LONGHAUL_LAB_REQUIRE_ALL").is_some_and(|value| value != "0");
        assert!(
            !needed,
            "run scripts/install: python3-cryptography or python3-zstandard is missing"
        );
        return;
    }
    for (cells, parity, lost) in [
        (&[60, 60][..], 0, &[][..]),
        (&[60, 30, 60, 9], 1, &[0]),
        (&[60, 60, 60, 60], 2, &[1, 2]),
    ] {
        let stage = Stage::new(cells.len());
        let mut dice = Dice(7);
        let guests = [
            vec![disk(&mut dice, 9), disk(&mut dice, 3)],
            vec![disk(&mut dice, 6)],
        ];
        let mut writer = stage.create(cells, parity).unwrap();
        for (disks, number) in guests.iter().zip(0..) {
            put_guest(&mut writer, number, disks).unwrap();
        }
        writer.seal(&mut |_| ()).unwrap();
        let out = stage.path().join("out");
        fs::create_dir(&out).unwrap();
        let mut command = Command::new("/usr/bin/python3");
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/reader.py"));
        let key: String = stage
            .key
            .bytes()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        command.arg("--key").arg(key).arg("--out").arg(&out);
        let there = (0..cells.len()).filter(|device| !lost.contains(device));
        command.args(there.map(|device| stage.file(device)));
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}{errors}");
        let said: serde_json::Value = serde_json::from_str(&said).unwrap();
        assert_eq!(said["devices_missing"], serde_json::json!(lost));
        assert_eq!(said["cells_lost"], 0);
        for (disks, guest) in guests.iter().zip(0..) {
            for (content, disk) in disks.iter().zip(0..) {
                let path = out.join(format!("guest-{guest}-disk-{disk}"));
                assert!(
                    fs::read(path).unwrap() == *content,
                    "guest {guest}, disk {disk}"
                );
            }
        }
    }
}

#[test]
fn the_proof_of_a_report_is_computed_from_the_page_alone() {
    let stage = Stage::new(2);
    let guests = [vec![disk(&mut Dice(7), 3)]];
    let mut writer = stage.create(&[60, 60], 1).unwrap();
    put_guest(&mut writer, 0, &guests[0]).unwrap();
    writer.seal(&mut |_| ()).unwrap();
    let device = Device::open(&stage.folder(1), false).unwrap();
    let parcel = Parcel::open(vec![device]).unwrap();
    // A path with what JSON escapes, and with what it does not.
    let out = stage.path().join("\u{e9} \"\\\n\u{1}\u{7f}\u{2028}");
    fs::create_dir(&out).unwrap();
    let place = &mut |_: &_, disk: &longhaul_parcel::Disk| Ok(out.join(&disk.name));
    let read = import(&parcel, &stage.key, None, place).unwrap();
    let report = ImportReport::of(&parcel, (&read.disks, &read.report), 1_800_000_000);
    let file = stage.path().join("report.json");
    fs::write(&file, report.sign(&stage.key).unwrap()).unwrap();
    let mut command = Command::new("/usr/bin/python3");
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/report.py"));
    command.arg(stage.key.text().as_str()).arg(&file);
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "proved\n",
        "{errors}"
    );
    command = Command::new("/usr/bin/python3");
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/report.py"));
    command.arg("00".repeat(32)).arg(&file);
    assert_eq!(command.output().unwrap().stdout, b"refused\n");
}
