//! A parcel on block devices: loop devices, which only root can make.

use crate::stage::{Dice, Stage, disk, put_guest, read};
use longhaul_parcel::{CELL_BYTES, Device, DeviceError, OpenError, Parcel, Settings, Writer};
use std::fs::File;
use std::path::PathBuf;
use std::process::Command;

/// A loop device, which is detached at the end.
struct Loop(PathBuf);

impl Loop {
    /// Attaches a file of zeros; `None` where this host has no loop devices for this user.
    fn attach(file: &std::path::Path, cells: u64) -> Option<Self> {
        File::create(file)
            .unwrap()
            .set_len(cells * CELL_BYTES as u64)
            .unwrap();
        let output = Command::new("/usr/sbin/losetup")
            .args(["-f", "--show"])
            .arg(file)
            .output();
        let output = output.ok().filter(|output| output.status.success())?;
        let path = String::from_utf8(output.stdout).unwrap();
        Some(Self(path.trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("/usr/sbin/losetup")
            .arg("-d")
            .arg(&self.0)
            .status();
    }
}

#[test]
fn block_devices_hold_a_parcel() {
    let stage = Stage::new(0);
    let attach = |n: u64| Loop::attach(&stage.path().join(n.to_string()), 400 + 40 * n);
    let Some(loops) = (0..3).map(attach).collect::<Option<Vec<_>>>() else {
        eprintln!("skipped: no loop devices");
        return;
    };
    let create = |at: &Loop| Device::create(&at.0, "unused", None);
    let open = |at: &Loop, writable| Device::open(&at.0, writable).unwrap();
    let settings = Settings {
        name: "box".into(),
        to: "paris".into(),
        parity: 1,
        now: 1_800_000_000,
    };
    let devices = loops.iter().map(|at| create(at).unwrap()).collect();
    let mut writer = Writer::create(devices, &settings, &stage.key).unwrap();
    let mut dice = Dice(5);
    let disks = vec![disk(&mut dice, 30)];
    put_guest(&mut writer, 0, &disks).unwrap();
    let position = writer.sync().unwrap();
    // What comes later is interrupted, and put again.
    put_guest(&mut writer, 1, &[disk(&mut dice, 40)]).unwrap();
    drop(writer);
    let all = |writable| loops.iter().map(|at| open(at, writable)).collect();
    let unsealed = Parcel::open(all(false));
    assert!(
        matches!(unsealed, Err(OpenError::Unsealed(_))),
        "{unsealed:?}"
    );
    let mut writer = Writer::reopen(all(true), position, &stage.key).unwrap();
    let more = vec![disk(&mut dice, 20)];
    put_guest(&mut writer, 1, &more).unwrap();
    writer.seal(&mut |_| ()).unwrap();
    // The end is found behind the gap, on two of the three devices.
    let parcel = Parcel::open(vec![open(&loops[2], false), open(&loops[0], false)]).unwrap();
    let (found, report) = read(&parcel, &stage.key).unwrap();
    assert_eq!(report.lost, 0);
    assert!(found[&0] == disks && found[&1] == more);
    let refused = create(&loops[1]);
    assert!(
        matches!(refused, Err(DeviceError::NotEmpty(_))),
        "{refused:?}"
    );
}
