//! Tests attaching to guests whose command lines have words beside disks and cards.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::script::{Script, attach, copied, host, same_machine};
use common::{Host, emulators, is_tried};
use longhaul_hypervisor::launch::Role;
use longhaul_hypervisor::memory::GuestMemory;
use longhaul_hypervisor::qmp::{COMMAND_TIMEOUT, Qmp};
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use serde_json::{Value, json};
use std::fs;
use std::process::Command;
use std::time::Duration;

/// Lines, and what the description of each must contain.
const LINES: [(&str, &str); 4] = [
    // Memory of several objects, some of it plugged in; texts of the firmware's tables.
    (
        "-machine MACHINE -m 64,slots=2,maxmem=1G -smp 1,maxcpus=3 -nodefaults \
         -object memory-backend-ram,id=m0,size=32M \
         -object memory-backend-file,id=m1,size=32M,mem-path=memory,share=on \
         -numa node,nodeid=0,memdev=m0,cpus=0-1 -numa node,nodeid=1,memdev=m1,cpus=2 \
         -numa dist,src=0,dst=1,val=21 -object memory-backend-memfd,id=m2,size=64M \
         -device pc-dimm,id=dimm0,memdev=m2,node=1 \
         -smbios type=1,manufacturer=a,serial=b -smbios type=11,value=x,value=y \
         -fw_cfg name=opt/a,string=hello -fw_cfg name=opt/b,file=small \
         -boot once=d,menu=on,splash=splash.bmp -rtc base=2020-01-01T10:00:00 \
         -cpu qemu64,vendor=GenuineIntel",
        "\"smp.maxcpus\" = \"3\"",
    ),
    (
        "-machine MACHINE -m 64 -nodefaults -mem-path . -audiodev none,id=a \
         -device ich9-intel-hda,id=s -device hda-duplex,bus=s.0,audiodev=a -device \
         hda-micro,audiodev=a -device AC97,audiodev=a -device sb16,audiodev=a -device \
         vmware-svga,id=v -device ich9-usb-ehci1,id=usb -device \
         ich9-usb-uhci1,masterbus=usb.0,firstport=0,multifunction=on -device \
         ich9-usb-uhci2,masterbus=usb.0,firstport=2 -device \
         ich9-usb-uhci3,masterbus=usb.0,firstport=4 -chardev null,id=r -device \
         usb-redir,chardev=r,bus=usb.0,port=1,id=r1 -device usb-ccid,bus=usb.0,port=3 \
         -device vmcoreinfo -debugcon null -device isa-applesmc,osk=x -global \
         driver=cfi.pflash01,property=secure,value=off -global cfi.pflash01.secure=on \
         -global ICH9-LPC.noreboot=off",
        "model = \"hda-micro\"",
    ),
    (
        "-machine MACHINE -m 64 -nodefaults -audio \
         none,model=ac97 -object rng-random,id=r,filename=/dev/urandom -device \
         virtio-rng-pci,rng=r -iscsi initiator-name=iqn.2000-01.x -overcommit mem-lock=off -msg \
         timestamp=on -compat deprecated-input=accept",
        "\"audio.model\" = \"ac97\"",
    ),
    (
        "-machine MACHINE -m 64 -nodefaults -object memory-backend-file,id=own,size=64M,mem-path=m \
         -machine memory-backend=own,nvdimm=on",
        "memfd = true",
    ),
];

/// Returns a host with the files that the lines name.
fn host_with_files() -> Host {
    let host = host();
    let folder = host.folder.path();
    let mut picture = vec![0; 64];
    picture[..2].copy_from_slice(b"BM");
    picture[28] = 24;
    fs::write(folder.join("splash.bmp"), picture).unwrap();
    fs::write(folder.join("small"), vec![7; 5000]).unwrap();
    host
}

#[tokio::test]
async fn words_make_the_same_machine() {
    let mut failed = Vec::new();
    for (number, (label, emulator)) in emulators().into_iter().enumerate() {
        for (shift, machine) in ["q35", "pc"].into_iter().enumerate() {
            for (case, (line, expected)) in LINES.iter().enumerate() {
                if !is_tried(case + shift, number) {
                    continue;
                }
                let line = line.replace("MACHINE", machine);
                let host = host_with_files();
                let script = Script::start(&host, &emulator, &line).await;
                if let Err(why) = copied(&host, &script, &label, &[expected]).await {
                    failed.push(format!("{label}: {line}\n{why}"));
                }
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
}

/// RAM blocks of old machines have the paths of their objects, unless they are told otherwise.
#[tokio::test]
async fn blocks_of_old_machines_keep_their_names() {
    for (label, emulator) in emulators() {
        let help = Command::new(&emulator).args(["-machine", "help"]).output();
        let help = String::from_utf8_lossy(&help.unwrap().stdout).into_owned();
        for (machine, by) in [
            ("pc-q35-3.1", None),
            ("pc-q35-3.1", Some(("off", "\"memory.named-by\" = \"id\""))),
            ("pc-q35-7.2", Some(("on", "\"memory.named-by\" = \"path\""))),
        ] {
            if !help.contains(machine) {
                continue;
            }
            let named = by.map_or(String::new(), |(value, _)| {
                format!(",x-use-canonical-path-for-ramblock-id={value}")
            });
            let line = format!(
                "-machine {machine},memory-backend=own -m 64 -nodefaults -object \
                 memory-backend-memfd,id=own,size=64M{named}"
            );
            let expected = by.map_or("memfd = true", |(_, expected)| expected);
            let same = same_machine(&label, &emulator, &line, expected).await;
            same.unwrap_or_else(|why| panic!("{label} {line}: {why}"));
        }
    }
}

/// Memory and vCPUs that were plugged in while the guest ran, and an object that nothing uses.
#[tokio::test]
async fn what_was_plugged_in_is_there_again() {
    let memory = |id: &str| {
        let object = json!({"qom-type": "memory-backend-ram", "id": id, "size": 64 << 20});
        ("object-add", object)
    };
    let dimm = json!({"driver": "pc-dimm", "id": "dimm0", "memdev": "hot"});
    let cpu = json!({"driver": "qemu64-x86_64-cpu", "id": "cpu1", "socket-id": 0, "core-id": 1,
                     "thread-id": 0});
    let commands = [
        memory("hot"),
        memory("unused"),
        ("device_add", dimm),
        ("device_add", cpu),
    ];
    for (label, emulator) in emulators() {
        for machine in ["q35", "pc"] {
            let host = host();
            let line = format!(
                "-machine {machine} -m 64,slots=4,maxmem=1G -smp \
                 1,sockets=1,cores=3,threads=1,maxcpus=3 -nodefaults"
            );
            let script = Script::start(&host, &emulator, &line).await;
            script.run(&commands).await;
            let again = copied(&host, &script, &label, &["dimm0"]).await;
            again.unwrap_or_else(|why| panic!("{label} {machine}: {why}"));
        }
    }
}

/// Memory of NUMA nodes and plugged memory is read and written at its own place.
#[tokio::test]
async fn every_memory_object_is_reached() {
    for (label, emulator) in emulators() {
        let host = host();
        let line = "-machine q35 -m 64,slots=2,maxmem=1G -smp 2 -nodefaults -S -object \
                    memory-backend-ram,id=m0,size=32M -object \
                    memory-backend-file,id=m1,size=32M,mem-path=memory,share=on -numa \
                    node,nodeid=0,memdev=m0,cpus=0 -numa node,nodeid=1,memdev=m1,cpus=1 -object \
                    memory-backend-memfd,id=m2,size=64M -device pc-dimm,id=dimm0,memdev=m2";
        let script = Script::start(&host, &emulator, line).await;
        let qmp = script.connect().await.unwrap();
        let memory = GuestMemory::attach(&qmp, script.pid()).await.unwrap();
        for (block, page, address) in [
            ("m0", 1000, 1000 << 12),
            ("m1", 5000, (32 << 20) + (5000 << 12)),
            ("m2", 9000, (4_u64 << 30) + (9000 << 12)),
        ] {
            let index = memory.find(block).unwrap();
            assert!(!memory.blocks()[index].is_kept(), "{label} {block}");
            let word = 0x1122_3344_5566_7788 ^ page;
            let content = [word; BLOCK_SIZE / 8].map(u64::to_le_bytes).concat();
            let range = [BlockRange::new(page, 1)];
            memory.write(index, &range, &content).unwrap();
            let line = format!("xp /1gx {address:#x}");
            let text = qmp.hmp(&line, COMMAND_TIMEOUT).await.unwrap();
            assert!(
                text.contains(&format!("{word:#018x}")),
                "{label} {block}: {text}"
            );
            let mut again = vec![0; BLOCK_SIZE];
            memory.read(index, &range, &mut again).unwrap();
            assert_eq!(again, content, "{label} {block}");
        }
    }
}

/// Large video memory is found where the guest has it, and in a QEMU that waits for a guest.
#[tokio::test]
async fn video_memory_is_reached() {
    for (label, emulator) in emulators() {
        let host = host();
        for (machine, device) in [("q35", "VGA,vgamem_mb=64"), ("pc", "qxl-vga")] {
            let help = Command::new(&emulator).args(["-spice", "help"]).output();
            let help = String::from_utf8_lossy(&help.unwrap().stdout).into_owned();
            if device.starts_with("qxl") && !help.contains("disable-ticketing") {
                continue;
            }
            for waits in ["", " -S -incoming defer"] {
                let line =
                    format!("-machine {machine} -m 64 -nodefaults -device {device},id=v{waits}");
                let script = Script::start(&host, &emulator, &line).await;
                let qmp = script.connect().await.unwrap();
                let before = qmp.hmp("info pci", COMMAND_TIMEOUT).await.unwrap();
                let memory = loop {
                    // Firmware gives the device its addresses.
                    match GuestMemory::attach(&qmp, script.pid()).await {
                        Ok(memory) => break memory,
                        Err(error) if waits.is_empty() => {
                            assert!(error.to_string().contains("vram"), "{label}: {error}");
                            tokio::time::sleep(Duration::from_millis(50)).await;
                        }
                        Err(error) => panic!("{label} {line}: {error}"),
                    }
                };
                let of = |name: &str| {
                    let mut blocks = memory.blocks().iter();
                    blocks.find(|block| block.name.ends_with(name)).cloned()
                };
                assert!(!of("vga.vram").unwrap().is_kept(), "{label} {line}");
                assert!(of("qxl.vram").is_none_or(|block| !block.is_kept()));
                if !waits.is_empty() {
                    let after = qmp.hmp("info pci", COMMAND_TIMEOUT).await.unwrap();
                    assert_eq!(after, before, "{label} {line}");
                }
            }
        }
    }
}

/// Limits of the command line, and ones that were set while the guest ran.
#[tokio::test]
async fn limits_of_disks_are_set_again() {
    for (label, emulator) in emulators() {
        let host = host();
        let line = "-machine q35 -m 64 -nodefaults -drive \
                    if=none,id=h1,file=vdb.raw,format=raw,throttling.iops-total=100,bps_rd=1000000 \
                    -device virtio-blk-pci,drive=h1,id=data -drive \
                    if=none,id=h2,file=vdc.raw,format=raw,iops_wr=50,iops_wr_max=80 -device \
                    ich9-ahci,id=sata -device ide-hd,drive=h2,bus=sata.1,id=other -drive \
                    if=none,id=h3,file=vda.raw,format=raw -device virtio-blk-pci,drive=h3,id=late";
        let script = Script::start(&host, &emulator, line).await;
        let late = json!({"id": "/machine/peripheral/late/virtio-backend", "bps": 0, "bps_rd": 7000,
                          "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0, "group": "own"});
        script.run(&[("block_set_io_throttle", late)]).await;
        let guest = attach(script.attach("web"), &host).await.unwrap();
        let mut other = Host::new();
        other.config.images = host.config.images.clone();
        let launched = other.launch(guest.description(), &label, Role::Destination);
        let (copy, qmp) = launched.await.unwrap();
        let there = limits(&qmp).await;
        assert_eq!(there, limits(&script.connect().await.unwrap()).await);
        assert_eq!(
            there,
            [
                (0, 0, 50, 80, String::new()),
                (0, 7000, 0, 0, "own".to_owned()),
                (100, 1_000_000, 0, 0, String::new()),
            ],
            "{label}"
        );
        host.launcher().detach(&guest.handle()).unwrap();
        copy.stop(Some(&qmp)).await.unwrap();
    }
}

/// Returns the limits on requests of every disk, with the name of a group that has one.
async fn limits(qmp: &Qmp) -> Vec<(u64, u64, u64, u64, String)> {
    let drives = qmp.query("query-block").await.unwrap();
    let drives = drives.as_array().unwrap().iter();
    let drive = |drive: &Value| {
        let inserted = &drive["inserted"];
        let of = |name: &str| inserted[name].as_u64().unwrap_or_default();
        let group = inserted["group"].as_str().filter(|group| *group == "own");
        let group = group.unwrap_or_default().to_owned();
        (
            of("iops"),
            of("bps_rd"),
            of("iops_wr"),
            of("iops_wr_max"),
            group,
        )
    };
    let mut limits: Vec<_> = drives
        .filter(|it| it["qdev"].is_string())
        .map(drive)
        .collect();
    limits.sort_unstable();
    limits
}

/// Screens and channels of SPICE, where the emulator has its modules.
#[tokio::test]
async fn what_spice_serves_goes_on_without_it() {
    for (label, emulator) in emulators() {
        let help = Command::new(&emulator).args(["-spice", "help"]).output();
        let help = String::from_utf8_lossy(&help.unwrap().stdout).into_owned();
        if !help.contains("disable-ticketing") {
            continue;
        }
        let line = "-machine q35 -m 64 -nodefaults -spice \
                    unix=on,addr=spice.sock,disable-ticketing=on -chardev \
                    spicevmc,id=v,name=vdagent -chardev spiceport,id=p,name=org.spice.x -device \
                    virtio-serial-pci -device virtserialport,chardev=v,name=com.redhat.spice.0 \
                    -device virtserialport,chardev=p,name=org.spice.x -device qxl-vga,id=video0 \
                    -device qemu-xhci,id=usb -chardev spicevmc,id=u,name=usbredir -device \
                    usb-redir,chardev=u,bus=usb.0,port=2 -audiodev spice,id=a -device \
                    ich9-intel-hda,id=s -device hda-duplex,bus=s.0,audiodev=a";
        for (line, expected) in [
            (line, "model = \"qxl-vga\""),
            ("-machine pc -m 64 -nodefaults -vga qxl", "vga = \"qxl\""),
            (
                "-machine q35 -m 64 -nodefaults -vga vmware",
                "vga = \"vmware\"",
            ),
        ] {
            let same = same_machine(&label, &emulator, line, expected).await;
            same.unwrap_or_else(|why| panic!("{label} {line}: {why}"));
        }
    }
}

/// A file that is too large, or was changed afterwards, is refused by name.
#[tokio::test]
async fn contents_that_cannot_move_are_refused() {
    for (_, emulator) in emulators() {
        let host = host_with_files();
        let line = "-machine pc -m 64 -nodefaults -fw_cfg name=opt/large,file=code.fd";
        let script = Script::start(&host, &emulator, line).await;
        let error = attach(script.attach("web"), &host).await.unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("opt/large of its command line: more than 64 KiB"),
            "{text}"
        );
        drop(script);

        let line = "-machine pc -m 64 -nodefaults -fw_cfg name=opt/small,file=small";
        let script = Script::start(&host, &emulator, line).await;
        let file = host.folder.path().join("small");
        let late = std::time::SystemTime::now() + std::time::Duration::from_secs(60);
        fs::File::open(file).unwrap().set_modified(late).unwrap();
        let error = attach(script.attach("web"), &host).await.unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("small: it was changed after the guest's start"),
            "{text}"
        );
    }
}
