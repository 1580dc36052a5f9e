//! Tests attaching to guests of real QEMUs that are written as people write them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::script::{Script, copied, host, same_machine};
use common::{emulators, is_tried};
use serde_json::json;
use std::fs;

/// Lines of people, and what the description of each must contain.
const LINES: [(&str, &str); 9] = [
    // QEMU's own card, a disk and a medium of the board.
    (
        "-M MACHINE -m 64 -hda vda.raw -cdrom vdb.raw -usbdevice tablet",
        "network = \"outside\"",
    ),
    ("vda.raw -M MACHINE -m 64 -vga std", "name = \"hda\""),
    (
        "-M MACHINE -m 64 -nic user,model=virtio-net-pci,hostname=web,net=10.0.9.0/24 -drive \
         file=vda.raw,if=virtio -drive file=vdb.raw,format=raw,if=ide,index=1 -cdrom vdc.raw",
        "\"netdev.net\" = \"10.0.9.0/24\"",
    ),
    (
        "-M MACHINE -m 64 -net nic,model=rtl8139 -net user,restrict=on -drive \
         file=vda.raw,media=cdrom,readonly=on -boot d",
        "read_only = true",
    ),
    (
        "-M MACHINE -m 64 -nodefaults -device virtio-scsi-pci -drive \
         if=none,id=drive-scsi1,file=vda.raw,format=raw,cache=writethrough -device \
         scsi-hd,drive=drive-scsi1,bootindex=1 -drive if=none,id=cd,media=cdrom -device \
         scsi-cd,drive=cd",
        "device_id = \"drive-scsi1\"",
    ),
    (
        "-M MACHINE -m 64 -nodefaults -object throttle-group,id=t -blockdev \
         {\"driver\":\"throttle\",\"node-name\":\"d\",\"throttle-group\":\"t\",\"file\":\
         {\"driver\":\"raw\",\"file\":{\"driver\":\"file\",\"filename\":\"vda.raw\"}}} -device \
         virtio-blk-pci,drive=d,id=ua-839818aa-ca63-4c03 -blockdev \
         driver=raw,node-name=e,file.driver=file,file.filename=vdb.raw -device qemu-xhci -device \
         usb-storage,drive=e -device vmgenid,guid=auto",
        "name = \"vda\"",
    ),
    // The board's card through a hub, and one that is not plugged in.
    (
        "-M MACHINE -m 64 -nodefaults -net nic,model=virtio -net user -device e1000",
        "network = \"lab\"",
    ),
    (
        "-M MACHINE -m 64 -nodefaults -readconfig guest.ini",
        "model = \"virtio-rng-pci\"",
    ),
    ("-M MACHINE -m 64 -nic none -fda ''", "floppy_drive = "),
];

const CONFIG: &str = r#"
[device "bridge"]
  driver = "pci-bridge"
  chassis_nr = "1"
[drive "x"]
  file = "vda.raw"
  format = "raw"
  if = "none"
[device]
  driver = "virtio-blk-pci"
  drive = "x"
[device "rng"]
  driver = "virtio-rng-pci"
  bus = "bridge"
  addr = "2"
[global]
  driver = "PIIX4_PM"
  property = "disable_s3"
  value = "1"
"#;

/// A machine launched from the description equals the original one, on every QEMU.
#[tokio::test]
async fn lines_of_people_make_the_same_machine() {
    let mut failed = Vec::new();
    for (number, (label, emulator)) in emulators().into_iter().enumerate() {
        for (shift, machine) in ["q35", "pc"].into_iter().enumerate() {
            for (case, (line, expected)) in LINES.iter().enumerate() {
                if !is_tried(case + shift, number) {
                    continue;
                }
                if line.contains("-fda") && machine == "q35" {
                    continue;
                }
                let host = host();
                fs::write(host.folder.path().join("guest.ini"), CONFIG).unwrap();
                let line = line.replace("MACHINE", machine).replace("-fda ''", "");
                let script = Script::start(&host, &emulator, &line).await;
                if let Err(why) = copied(&host, &script, &label, &[expected]).await {
                    failed.push(format!("{label}: {line}\n{why}"));
                }
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
}

/// Root ports are numbered, which the state of the guest contains.
#[tokio::test]
async fn root_ports_keep_their_numbers() {
    for (label, emulator) in emulators() {
        let line = "-M q35 -m 64 -nodefaults -device pcie-root-port,port=16,chassis=1,id=pci.1,\
                    bus=pcie.0,multifunction=on,addr=0x2 -device \
                    pcie-root-port,port=0x11,chassis=2,id=pci.2,bus=pcie.0,addr=0x2.0x1 -device \
                    virtio-rng-pci,bus=pci.2,addr=0x0";
        let done = same_machine(&label, &emulator, line, "port = \"17\"").await;
        done.unwrap_or_else(|why| panic!("{label}: {why}"));
    }
}

/// Devices that were plugged in are described as QEMU shows them; those that are gone are no
/// reason.
#[tokio::test]
async fn what_was_plugged_in_is_described() {
    for (label, emulator) in emulators() {
        let host = host();
        let line = "-M q35 -m 64 -nodefaults -device pcie-root-port,id=rp1,chassis=1,addr=5 \
                    -device pcie-root-port,id=rp2,chassis=2,addr=6 -device \
                    pcie-root-port,id=rp3,chassis=3,addr=7 -device qemu-xhci,id=usb -device \
                    usb-tablet,id=gone,bus=usb.0,port=1 -netdev user,id=n,restrict=on";
        let script = Script::start(&host, &emulator, line).await;
        let image = host.folder.path().join("vda.raw");
        script
            .run(&[
                (
                    "blockdev-add",
                    json!({"driver": "file", "node-name": "hot", "filename": image}),
                ),
                (
                    "device_add",
                    json!({"driver": "virtio-scsi-pci", "id": "scsi", "bus": "rp1"}),
                ),
                (
                    "device_add",
                    json!({"driver": "scsi-hd", "id": "disk", "bus": "scsi.0", "drive": "hot",
                           "lun": 1, "serial": "incus_root", "bootindex": 3}),
                ),
                (
                    "device_add",
                    json!({"driver": "virtio-net-pci", "id": "card", "bus": "rp2", "netdev": "n",
                           "mac": "52:54:00:aa:bb:cc", "rx_queue_size": 1024}),
                ),
                (
                    "device_add",
                    json!({"driver": "virtio-rng-pci", "bus": "rp3", "max-bytes": 1024,
                           "period": 1000}),
                ),
                ("device_del", json!({"id": "gone"})),
            ])
            .await;
        let expected = [
            "serial = \"incus_root\"",
            "bootindex = \"3\"",
            "rx_queue_size = \"1024\"",
            "max-bytes = \"1024\"",
        ];
        let done = copied(&host, &script, &label, &expected).await;
        done.unwrap_or_else(|why| panic!("{label}: {why}"));
    }
}

/// Models that few guests have, each beside a disk or medium that it leads to.
const RARE: [&str; 24] = [
    "-device am53c974,id=s -device scsi-hd,bus=s.0,drive=d",
    "-device dc390,id=s -device scsi-hd,bus=s.0,scsi-id=3,drive=d",
    "-device lsi53c810,id=s -device scsi-hd,bus=s.0,drive=d,serial=x",
    "-device lsi,id=s -device scsi-cd,bus=s.0 -device scsi-hd,bus=s.0,drive=d",
    "-device megasas,id=s,max_cmds=256 -device scsi-hd,bus=s.0,drive=d",
    "-device megasas-gen2,id=s -device scsi-hd,bus=s.0,drive=d",
    "-device mptsas1068,id=s -device scsi-hd,bus=s.0,drive=d",
    "-device pvscsi,id=s -device scsi-hd,bus=s.0,drive=d",
    "-device qemu-xhci -device usb-bot,id=s -device scsi-hd,bus=s.0,drive=d",
    "-nic user,model=e1000-82545em -device virtio-blk-pci,drive=d",
    "-nic user,model=e1000-82544gc -device i82559er,mac=52:54:00:12:34:99",
    "-nic user,model=i82551 -device tulip",
    "-device intel-iommu,intremap=on,caching-mode=on -machine kernel-irqchip=split -device \
     virtio-blk-pci,drive=d,iommu_platform=on,disable-legacy=on",
    "-device virtio-iommu-pci,addr=7 -device virtio-blk-pci,drive=d",
    "-device pxb-pcie,id=far,bus_nr=128 -device pcie-root-port,id=rp,bus=far,chassis=7 -device \
     virtio-blk-pci,bus=rp,drive=d",
    "-device pci-serial,chardev=c -chardev null,id=c",
    "-parallel null -device virtio-rng-pci",
    "-device ramfb -vga none",
    "-device ati-vga",
    "-device isa-debug-exit,iobase=0xf4,iosize=0x04 -device edu",
    "-device nvme,serial=deadbeef,drive=d,max_ioqpairs=4",
    "-device sga -device virtio-blk-pci,drive=d",
    "-device virtio-multitouch-pci",
    "-M pc -device pxb,id=far,bus_nr=128 -device virtio-blk-pci,bus=far,addr=1,drive=d",
];

#[tokio::test]
async fn rare_models_are_made_again() {
    let mut failed = Vec::new();
    for (number, (label, emulator)) in emulators().into_iter().enumerate() {
        for (case, line) in RARE.iter().enumerate() {
            // Each is tried where QEMU has it, and moves it.
            let is_absent = match line {
                line if line.contains("nvme") => label != "11.1",
                line if line.contains("sga") => label != "7.2",
                line if line.contains("multitouch") => label == "7.2",
                _ => false,
            };
            if !is_tried(case, number) || is_absent {
                continue;
            }
            let host = host();
            let disk = "-drive if=none,id=d,file=vda.raw,format=raw";
            let nic = if line.contains("-nic") {
                ""
            } else {
                "-nic none"
            };
            let line = format!("-M q35 -m 64 {nic} {disk} {line}");
            let script = Script::start(&host, &emulator, &line).await;
            if let Err(why) = copied(&host, &script, &label, &[]).await {
                failed.push(format!("{label}: {line}\n{why}"));
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
}
