//! Tests attaching to guests of real QEMUs that another program started.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::emulators;
use common::script::{Script, attach, host, same_machine};
use longhaul_hypervisor::attach::{Attach, AttachGuestError, look_again};
use longhaul_hypervisor::config::{Image, ImageFormat};
use longhaul_hypervisor::guest::find_all;
use longhaul_hypervisor::qmp::COMMAND_TIMEOUT;
use serde_json::json;
use std::fs;
use std::path::Path;

/// Lines of scripts, and what the description of each must contain.
const SCRIPTS: [(&str, &str); 6] = [
    // A hand-written line: nothing has an id, and QEMU adds its defaults.
    (
        "-machine MACHINE -m 64 -net none -drive file=vda.raw,if=virtio,format=raw \
         -device virtio-net-pci -device virtio-rng-pci -device qemu-xhci -device usb-tablet",
        "cd_drive = true",
    ),
    (
        "-machine MACHINE,vmport=off -m 96 -smp 4,sockets=1,cores=2,threads=2 -nodefaults \
         -cpu Nehalem,+aes,popcnt=off -uuid 11111111-2222-3333-4444-555555555555 \
         -object memory-backend-memfd,id=ram,size=96M,share=on -machine memory-backend=ram \
         -blockdev {\"driver\":\"file\",\"node-name\":\"f0\",\"filename\":\"vda.raw\"} \
         -blockdev driver=raw,node-name=d0,file=f0 \
         -device virtio-blk-pci,id=boot,drive=d0,bootindex=1,serial=abc,addr=0x9 \
         -drive if=none,id=h1,file=vdb.raw,format=raw,werror=stop,rerror=stop,cache=writethrough \
         -device virtio-scsi-pci,id=scsi -device \
         scsi-hd,bus=scsi.0,drive=h1,scsi-id=3,lun=1,id=data -device scsi-cd,bus=scsi.0,id=cd \
         -netdev user,id=n0,restrict=on -device \
         virtio-net-pci,netdev=n0,mac=52:54:00:aa:bb:01,mq=off -device \
         e1000,id=second,mac=52:54:00:aa:bb:02 -object iothread,id=io0 \
         -device virtio-balloon-pci,id=balloon,deflate-on-oom=on,free-page-hint=on,iothread=io0 \
         -rtc base=localtime,driftfix=slew -boot order=c,menu=on -no-reboot -vga std",
        "memfd = true",
    ),
    (
        "-machine MACHINE,usb=on -m 64 -nodefaults -serial null -serial null -parallel none \
         -chardev socket,id=ga,path=ga.sock,server=on,wait=off -chardev null,id=none \
         -device virtio-serial-pci,id=vs0,max_ports=8 \
         -device virtserialport,chardev=ga,name=org.qemu.guest_agent.0,nr=3 \
         -device virtconsole,chardev=none -device usb-kbd -device usb-mouse,id=mouse \
         -device i6300esb -action watchdog=pause -device pvpanic -device vmgenid,guid=auto \
         -device {\"driver\":\"virtio-rng-pci\",\"max-bytes\":1024,\"period\":1000}",
        "serial_ports = 2",
    ),
    (
        "-machine MACHINE -m 64 -nodefaults -drive \
         if=pflash,unit=0,readonly=on,format=raw,file=code.fd -drive \
         if=pflash,unit=1,format=raw,file=vars.raw -device virtio-gpu-pci,id=gpu",
        "variables = \"vars\"",
    ),
    (
        "-machine MACHINE -m 64 -nodefaults -kernel vmlinuz -append console=ttyS0 \
         -global PIIX4_PM.disable_s3=1 -device pci-bridge,id=b1,chassis_nr=1 \
         -device virtio-rng-pci,bus=b1,addr=2 -device ich9-ahci,id=sata \
         -drive if=none,id=x,file=vdc.raw,format=raw -device ide-hd,bus=sata.2,drive=x",
        "command_line = \"console=ttyS0\"",
    ),
    (
        "-machine MACHINE -m 64 -nodefaults -bios code.fd -cpu max,migratable=on -device \
         VGA,id=vga",
        "firmware = \"code\"",
    ),
];

/// A machine launched from the description equals the original one, on every QEMU.
#[tokio::test]
async fn what_is_learned_makes_the_same_machine() {
    let mut failed = Vec::new();
    for (label, emulator) in emulators() {
        for machine in ["q35", "pc"] {
            for (line, expected) in SCRIPTS {
                let line = line.replace("MACHINE", machine);
                if let Err(why) = same_machine(&label, &emulator, &line, expected).await {
                    failed.push(format!("{label}: {line}\n{why}"));
                }
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
}

/// Properties that only QEMU itself reports are refused by name as well, with advice.
#[tokio::test]
async fn what_a_running_qemu_cannot_take_along_is_refused() {
    for (label, emulator) in emulators() {
        for (line, expected, hint) in [
            (
                "-nodefaults -drive if=none,id=c,file=cd.iso,format=raw,readonly=on,media=cdrom \
                 -device ide-cd,drive=c,id=cd0",
                "disk cd0 is cd.iso, which no image of the configuration is",
                "[images.NAME]\npath = \"/",
            ),
            (
                "-nodefaults -blockdev \
                 driver=qcow2,node-name=q,file.driver=file,file.filename=q.qcow2 -device \
                 virtio-blk-pci,drive=q,id=q0",
                "disk q0 is qcow2, and the configuration says otherwise of image q",
                "format = \"qcow2\"",
            ),
            (
                "-nodefaults -netdev user,id=n,tftp=/srv -device e1000,netdev=n,id=out",
                "card out: its user network serves files of this host (tftp)",
                "start the guest without it",
            ),
            (
                "-nodefaults -bios other.fd",
                "the firmware is other.fd",
                "[firmware]",
            ),
            (
                "-nodefaults -drive if=pflash,format=raw,file=vars.raw",
                "it can write to its firmware vars.raw",
                "readonly=on",
            ),
        ] {
            let mut host = host();
            let folder = host.folder.path().to_owned();
            fs::write(folder.join("cd.iso"), vec![0; 4096]).unwrap();
            fs::write(folder.join("other.fd"), vec![0xf4; 256 << 10]).unwrap();
            let image = Image {
                path: folder.join("q.qcow2"),
                format: ImageFormat::Raw,
                direct: None,
                locks: true,
                local: false,
                same_file_as: None,
                volume: None,
            };
            qcow2(&image.path);
            host.config.images.insert("q".to_owned(), image);
            let line = format!("-machine pc -m 64 {line}");
            let script = Script::start(&host, &emulator, &line).await;
            let error = attach(script.attach("web"), &host).await.unwrap_err();
            let AttachGuestError::Refused { refusals, .. } = &error else {
                panic!("{label} {line}: {error}");
            };
            let found = refusals.iter().find(|one| one.text.starts_with(expected));
            let found = found.unwrap_or_else(|| panic!("{label} {line}: {error}"));
            assert!(found.hint.contains(hint), "{}", found.hint);
            assert!(error.to_string().contains(&found.text));
            assert!(find_all(host.state()).unwrap().is_empty());
        }
    }
}

/// Creates the smallest image of that format, whose content is never read.
fn qcow2(path: &Path) {
    let mut image = vec![0; 4 << 16];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"QFI\xfb\x00\x00\x00\x02");
    put(20, &16_u32.to_be_bytes());
    put(24, &(1_u64 << 20).to_be_bytes());
    put(36, &1_u32.to_be_bytes());
    put(40, &(3_u64 << 16).to_be_bytes());
    put(48, &(1_u64 << 16).to_be_bytes());
    put(56, &1_u32.to_be_bytes());
    put(1 << 16, &(2_u64 << 16).to_be_bytes());
    for cluster in 0..4 {
        put((2 << 16) + 2 * cluster, &1_u16.to_be_bytes());
    }
    fs::write(path, image).unwrap();
}

#[tokio::test]
async fn what_changes_afterwards_is_seen() {
    for (_, emulator) in emulators() {
        let host = host();
        let line = "-machine pc -m 64 -nodefaults -device virtio-rng-pci,id=rng";
        let script = Script::start(&host, &emulator, line).await;
        let guest = attach(script.attach("web"), &host).await.unwrap();
        let again = attach(script.attach("other"), &host).await.unwrap_err();
        assert!(matches!(again, AttachGuestError::Exists(_)), "{again}");
        let qmp = guest.connect().await.unwrap();
        let device = json!({"driver": "virtio-balloon-pci", "id": "hot"});
        qmp.execute("device_add", device, COMMAND_TIMEOUT)
            .await
            .unwrap();
        let again = look_again(&guest.handle(), &qmp, &host.config)
            .await
            .unwrap();
        let (_, refusals) = again.unwrap();
        assert_eq!(refusals.len(), 1, "{refusals:?}");
        assert_eq!(
            refusals[0].text,
            "web is not as it was when it was attached to"
        );
        host.launcher().detach(&guest.handle()).unwrap();

        // The current client of the control socket is not displaced.
        let busy = attach(script.attach("web"), &host).await.unwrap_err();
        assert!(busy.to_string().contains("another client holds"), "{busy}");
        drop(qmp);
        let wrong = Attach {
            pid: Some(1),
            ..script.attach("web")
        };
        let wrong = attach(wrong, &host).await.unwrap_err();
        assert!(matches!(wrong, AttachGuestError::Process(_)), "{wrong}");
    }
}
