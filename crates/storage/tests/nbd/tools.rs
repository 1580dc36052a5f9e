//! Tests foreign clients: libnbd's tools, and QEMU's.

use crate::client::Client;
use crate::common::{MIB, Moody, Served, allocated, output, program, succeed, wait_until};
use longhaul_storage::disk::ExportSize;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Stdio;

/// Creates an image with islands of data. Returns their total length.
fn islands(path: &Path, size_bytes: u64) -> u64 {
    let file = File::create(path).unwrap();
    file.set_len(size_bytes).unwrap();
    let step = 8 * MIB;
    for (number, place) in (MIB..size_bytes).step_by(step as usize).enumerate() {
        let bytes: Vec<u8> = (0..256 << 10).map(|i: u32| (i % 255) as u8 + 1).collect();
        file.write_all_at(&bytes[number..], place + number as u64)
            .unwrap();
    }
    file.sync_all().unwrap();
    allocated(path)
}

fn same(one: &Path, other: &Path) -> bool {
    std::fs::read(one).unwrap() == std::fs::read(other).unwrap()
}

#[test]
fn nbdinfo_sees_the_disk_and_what_it_can_do() {
    let Some(mut nbdinfo) = program("nbdinfo") else {
        return;
    };
    let (served, _path) = Served::image(8 * MIB + 512);
    let text = succeed(nbdinfo.args(["--json", "--no-content"]).arg(served.uri()));
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["protocol"], "newstyle-fixed");
    assert_eq!(json["TLS"], false);
    assert_eq!(json["structured"], true);
    let export = &json["exports"][0];
    assert_eq!(export["export-size"], 8 * MIB + 512);
    for able in [
        "can_flush",
        "can_fua",
        "can_trim",
        "can_zero",
        "can_multi_conn",
    ] {
        assert_eq!(export[able], true, "{able}");
    }
    for unable in [
        "can_cache",
        "can_df",
        "can_fast_zero",
        "is_read_only",
        "is_rotational",
    ] {
        assert_eq!(export[unable], false, "{unable}");
    }
    assert_eq!(export["contexts"], serde_json::json!(["base:allocation"]));
    assert_eq!(export["block_size_minimum"], 1);
    assert_eq!(export["block_size_maximum"], 32 * MIB);
    // Names cannot be listed.
    let socket = format!("nbd+unix:///?socket={}", served.socket().display());
    let (listed, _) = output(program("nbdinfo").unwrap().args(["--list", &socket]));
    assert!(!listed);
    served.wait_for_connections(0);
}

#[test]
fn nbdcopy_copies_in_and_out_and_holes_stay_holes() {
    let Some(mut copy_in) = program("nbdcopy") else {
        return;
    };
    let size = 64 * MIB;
    let (served, disk) = Served::image(size);
    // Existing content is zeroed where the source has a hole.
    let file = File::options().write(true).open(&disk).unwrap();
    file.write_all_at(&vec![0xee; 4 << 20], 40 * MIB).unwrap();
    let source = served.path("source");
    let taken = islands(&source, size);
    succeed(copy_in.arg("--flush").arg(&source).arg(served.uri()));
    assert!(same(&source, &disk));
    let slack = 128 << 10;
    assert!(
        allocated(&disk) <= taken + slack,
        "{} > {taken}",
        allocated(&disk)
    );

    let target = served.path("target");
    succeed(program("nbdcopy").unwrap().arg(served.uri()).arg(&target));
    assert!(same(&target, &disk));
    assert!(
        allocated(&target) <= taken + slack,
        "{} > {taken}",
        allocated(&target)
    );

    let map = succeed(program("nbdinfo").unwrap().arg("--map").arg(served.uri()));
    let holes = map
        .lines()
        .filter(|line| line.contains("hole,zero"))
        .count();
    let data = map.lines().filter(|line| line.contains("data")).count();
    assert_eq!((holes, data), (9, 8), "{map}");
    served.wait_for_connections(0);
    assert_eq!(served.notices(), [""; 0]);
}

#[test]
fn a_killed_nbdcopy_takes_nothing_with_it() {
    let Some(mut copy) = program("nbdcopy") else {
        return;
    };
    let disk = Moody::new(32 << 20);
    let served = Served::new(disk.clone());
    let mut staying = Client::ready(&served, false);
    let source = served.path("source");
    std::fs::write(&source, vec![0x77; 32 << 20]).unwrap();
    disk.set(|mood| mood.held = true);
    let mut copy = copy
        .arg(&source)
        .arg(served.uri())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_until(|| disk.get(|mood| mood.writes >= 1));
    copy.kill().unwrap();
    copy.wait().unwrap();
    disk.set(|mood| mood.held = false);
    served.wait_for_connections(1);
    assert_eq!(staying.write(0, 0, b"going on"), 0);
    assert_eq!(staying.read(0, 8).unwrap(), b"going on");
}

#[test]
fn qemu_reads_writes_zeroes_and_flushes() {
    let Some(mut qemu_io) = program("qemu-io") else {
        return;
    };
    let (served, path) = Served::image(16 * MIB);
    let commands = [
        "write -P 7 513 100001",
        "write -f -P 8 1M 64k",
        "aio_write -P 9 2M 1M",
        "aio_flush",
        "flush",
        "write -z -u 2M 512k",
        "write -z 2560k 512k",
        "discard 1M 32k",
        "read -P 7 513 100001",
        "read -P 8 1056k 32k",
        "read -P 0 2M 1M",
        "read -P 0 100514 500",
    ];
    qemu_io.args(["-f", "raw"]).arg(served.uri());
    for command in commands {
        qemu_io.args(["-c", command]);
    }
    let text = succeed(&mut qemu_io);
    assert!(
        !text.contains("failed") && !text.contains("error"),
        "{text}"
    );
    let file = std::fs::read(&path).unwrap();
    assert!(file[513..513 + 100_001].iter().all(|byte| *byte == 7));
    assert!(file[2 << 20..3 << 20].iter().all(|byte| *byte == 0));
    // 98 KiB of sevens, 32 of eights, and 512 of zeros that keep their space.
    assert!(allocated(&path) <= 700 << 10, "{}", allocated(&path));
    served.wait_for_connections(0);
    assert_eq!(served.notices(), [""; 0]);
}

#[test]
fn a_qcow2_image_grows_through_the_server() {
    let Some(mut create) = program("qemu-img") else {
        return;
    };
    let (served, path) = Served::image_as(0, ExportSize::Bytes(80 * MIB));
    succeed(
        create
            .args(["create", "-q", "-f", "qcow2"])
            .arg(&path)
            .arg("64M"),
    );
    let source = served.path("source");
    islands(&source, 64 * MIB);
    let convert = ["convert", "-n", "-f", "raw", "-O", "qcow2"];
    succeed(
        program("qemu-img")
            .unwrap()
            .args(convert)
            .arg(&source)
            .arg(served.uri()),
    );
    served.wait_for_connections(0);
    let image = ["-f", "qcow2"];
    succeed(
        program("qemu-img")
            .unwrap()
            .arg("check")
            .args(image)
            .arg(&path),
    );
    let formats = ["compare", "-f", "raw", "-F", "qcow2"];
    succeed(
        program("qemu-img")
            .unwrap()
            .args(formats)
            .arg(&source)
            .arg(&path),
    );
    assert!(std::fs::metadata(&path).unwrap().len() < 8 * MIB);
    assert_eq!(served.notices(), [""; 0]);
}
