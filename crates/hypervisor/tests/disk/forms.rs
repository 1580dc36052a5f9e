//! Tests that a disk can be taken hold of however it was given: by which option, on which device,
//! with which filters above it. The guest writes and checks its disk all the time.

use crate::common::{emulators, is_tried};
use crate::load::Load;
use crate::payload::Qemu;
use crate::setting::{Setting, assert_same, exact_picture, nobody_is_connected};
use longhaul_hypervisor::disk::{Layout, drives, insert_all, remove_all};
use longhaul_hypervisor::qmp::COMMAND_TIMEOUT;
use serde_json::json;
use std::path::Path;
use std::time::Duration;

/// How a disk is given: a name for messages, the machine, and the words of the command line. `FILE`
/// stands for the image, `FORMAT` for its format.
struct Form {
    name: &'static str,
    machine: &'static str,
    words: &'static str,
    iothread: bool,
}

const fn form(name: &'static str, words: &'static str) -> Form {
    Form {
        name,
        machine: "q35",
        words,
        iothread: false,
    }
}

const fn with_thread(name: &'static str, words: &'static str) -> Form {
    Form {
        name,
        machine: "q35",
        words,
        iothread: true,
    }
}

const fn on_pc(name: &'static str, words: &'static str) -> Form {
    Form {
        name,
        machine: "pc",
        words,
        iothread: false,
    }
}

const DRIVES: [Form; 8] = [
    form(
        "-drive if=virtio",
        "-drive file=FILE,format=FORMAT,if=virtio,discard=unmap,detect-zeroes=unmap",
    ),
    form(
        "virtio-blk with an id",
        "-drive file=FILE,format=FORMAT,if=none,id=drive0,cache=none,detect-zeroes=on \
         -device virtio-blk-pci,drive=drive0,id=vda",
    ),
    form(
        "virtio-scsi without an id",
        "-device virtio-scsi-pci -drive file=FILE,format=FORMAT,if=none,id=drive0 \
         -device scsi-hd,drive=drive0",
    ),
    form(
        "virtio-scsi with an id",
        "-device virtio-scsi-pci,id=scsi0 -drive file=FILE,format=FORMAT,if=none,id=drive0 \
         -device scsi-hd,bus=scsi0.0,drive=drive0,id=sda",
    ),
    form(
        "SATA",
        "-device ich9-ahci,id=ahci -drive file=FILE,format=FORMAT,if=none,id=drive0 \
         -device ide-hd,bus=ahci.0,drive=drive0,id=sda",
    ),
    on_pc("-drive if=ide", "-drive file=FILE,format=FORMAT,if=ide"),
    on_pc(
        "IDE without an id",
        "-drive file=FILE,format=FORMAT,if=none,id=drive0 -device ide-hd,drive=drive0,bus=ide.0",
    ),
    form(
        "SATA of the machine",
        "-drive file=FILE,format=FORMAT,index=0,media=disk",
    ),
];

const NODES: [Form; 7] = [
    form(
        "-blockdev in words, its file inside",
        "-blockdev driver=FORMAT,node-name=d0,file.driver=file,file.filename=FILE \
         -device virtio-blk-pci,drive=d0",
    ),
    form(
        "-blockdev in words, two nodes",
        "-blockdev driver=file,node-name=f0,filename=FILE,discard=unmap \
         -blockdev driver=FORMAT,node-name=d0,file=f0 -device virtio-blk-pci,drive=d0,id=vda",
    ),
    form(
        "-blockdev in JSON, its file inside",
        "-device virtio-scsi-pci,id=scsi0 -blockdev \
         {\"driver\":\"FORMAT\",\"node-name\":\"sda\",\
         \"file\":{\"driver\":\"file\",\"filename\":\"FILE\"}} \
         -device scsi-hd,drive=sda,id=sda",
    ),
    form(
        "-drive with limits",
        "-drive file=FILE,format=FORMAT,if=virtio,throttling.iops-total=100000",
    ),
    form(
        "a node with limits",
        "-object throttle-group,id=g,x-iops-total=100000 \
         -blockdev driver=FORMAT,node-name=d0,file.driver=file,file.filename=FILE \
         -blockdev driver=throttle,node-name=t0,throttle-group=g,file=d0 \
         -device virtio-blk-pci,drive=t0",
    ),
    form(
        "limits below the format node",
        "-object throttle-group,id=g,x-iops-total=100000 -blockdev \
         driver=throttle,node-name=t0,throttle-group=g,file.driver=file,file.filename=FILE \
         -blockdev driver=FORMAT,node-name=d0,file=t0 -device virtio-blk-pci,drive=d0",
    ),
    form(
        "copy on read",
        "-blockdev driver=FORMAT,node-name=d0,file.driver=file,file.filename=FILE \
         -blockdev driver=copy-on-read,node-name=c0,file=d0 -device virtio-blk-pci,drive=c0",
    ),
];

const THREADS: [Form; 3] = [
    with_thread(
        "virtio-blk with an iothread",
        "-object iothread,id=io0 -drive file=FILE,format=FORMAT,if=none,id=drive0 \
         -device virtio-blk-pci,drive=drive0,iothread=io0",
    ),
    with_thread(
        "virtio-scsi with an iothread",
        "-object iothread,id=io0 -device virtio-scsi-pci,id=scsi0,iothread=io0 \
         -drive file=FILE,format=FORMAT,if=none,id=drive0 -device scsi-hd,drive=drive0,id=sda",
    ),
    form(
        "an iothread of another device",
        "-object iothread,id=io0 -device virtio-scsi-pci,id=scsi0,iothread=io0 \
         -drive file=FILE,format=FORMAT,if=virtio",
    ),
];

/// Forms of raw disks only: the device is straight on the node of the file.
const DIRECT: [Form; 3] = [
    form(
        "SCSI without a format node",
        "-device virtio-scsi-pci -blockdev driver=file,node-name=f0,filename=FILE \
         -device scsi-hd,drive=f0,id=sda",
    ),
    form(
        "-drive without a format node",
        "-drive file=FILE,driver=file,if=virtio",
    ),
    with_thread(
        "SCSI without a format node, with an iothread",
        "-object iothread,id=io0 -device virtio-scsi-pci,iothread=io0 \
         -drive file.filename=FILE,driver=raw,file.driver=file,if=none,id=drive0 \
         -device scsi-hd,drive=drive0",
    ),
];

impl Form {
    async fn start(&self, setting: &Setting, emulator: &Path) -> Qemu {
        let image = setting.image.to_str().unwrap();
        let words = self.words.replace("FILE", image);
        let words = words.replace("FORMAT", setting.format());
        let words: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
        setting.given(emulator, self.machine, &words).await
    }

    async fn goes_through_and_back(&self, emulator: &Path, qcow2: bool) {
        let mut setting = Setting::plain(qcow2);
        let qemu = self.start(&setting, emulator).await;
        setting.find(&qemu).await;
        let load = Load::find(&qemu).await;
        let before = exact_picture(&qemu).await;
        let layout = Layout::look(&qemu.qmp, &[]).await.unwrap();
        let server = setting.serve();
        let disks = [(&setting.nodes, &setting.front)];
        for _ in 0..2 {
            let stood = insert_all(&qemu.qmp, &disks).await.unwrap();
            assert_eq!(stood > Duration::ZERO, self.iothread);
            assert!(server.connections() >= 1);
            load.goes_on(10).await;
            let fronts = [(setting.nodes.clone(), setting.front.clone())];
            let now = Layout::look(&qemu.qmp, &fronts).await.unwrap();
            layout.compare(&now).unwrap();
            let stood = remove_all(&qemu.qmp, &disks).await.unwrap();
            assert_eq!(stood > Duration::ZERO, self.iothread || qcow2);
            nobody_is_connected(&server).await;
            load.goes_on(3).await;
            assert_same(&before, &exact_picture(&qemu).await);
        }
        assert_eq!(qemu.state().await, "running");
        let stopped = qemu.qmp.execute("stop", json!({}), COMMAND_TIMEOUT);
        stopped.await.unwrap();
        load.check(&setting.content());
    }
}

async fn all_go_through(forms: &[Form], formats: &[bool]) {
    for (number, (label, emulator)) in emulators().into_iter().enumerate() {
        for (case, form) in forms.iter().enumerate() {
            for qcow2 in formats {
                if !is_tried(case + usize::from(*qcow2), number) {
                    continue;
                }
                eprintln!("{label}: {}, qcow2: {qcow2}", form.name);
                form.goes_through_and_back(&emulator, *qcow2).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_of_a_drive_goes_through_the_export_and_back() {
    all_go_through(&DRIVES, &[false, true]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_of_nodes_goes_through_the_export_and_back() {
    all_go_through(&NODES, &[false, true]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_with_a_thread_goes_through_the_export_and_back() {
    all_go_through(&THREADS, &[false, true]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_without_a_format_node_goes_through_the_export_and_back() {
    all_go_through(&DIRECT, &[false]).await;
}

/// Read-only disks and CDs do not get an export, but what is in them is known.
#[tokio::test(flavor = "multi_thread")]
async fn disks_and_media_are_found_with_file_and_format() {
    const WORDS: &str = "-drive file=FILE,format=FORMAT,if=virtio,readonly=on \
        -device virtio-scsi-pci -drive file=FILE,format=FORMAT,if=none,id=cd,media=cdrom \
        -device scsi-cd,drive=cd,id=cd0 -device scsi-cd,id=empty -drive file=FILE,media=cdrom \
        -blockdev driver=FORMAT,node-name=ro,read-only=on,file.driver=file,file.filename=FILE \
        -device virtio-blk-pci,drive=ro,id=ro";
    for (label, emulator) in emulators() {
        for qcow2 in [false, true] {
            let setting = Setting::plain(qcow2);
            let form = form("read-only", WORDS);
            let qemu = form.start(&setting, &emulator).await;
            let found = drives(&qemu.qmp).await.unwrap();
            let has = found.iter().map(|drive| {
                let is_ours = drive.inserted.as_ref().map(|inserted| {
                    assert!(inserted.read_only, "{label}: {drive:?}");
                    assert_eq!(inserted.format, setting.format());
                    inserted.file.as_ref() == Some(&setting.image)
                });
                (drive.device.as_str(), is_ours)
            });
            let has: Vec<_> = has.collect();
            let named = [
                "/machine/peripheral/cd0",
                "/machine/peripheral/ro/virtio-backend",
            ];
            for device in named {
                assert!(has.contains(&(device, Some(true))), "{label}: {has:?}");
            }
            assert!(
                has.contains(&("/machine/peripheral/empty", None)),
                "{label}: {has:?}"
            );
            let ours = has.iter().filter(|(_, ours)| *ours == Some(true));
            assert_eq!(ours.count(), 4, "{label}: {has:?}");
        }
    }
}
