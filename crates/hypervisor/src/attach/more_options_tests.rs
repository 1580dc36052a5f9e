use super::*;
use crate::hardware::families::FSDEV;

fn read(line: &str) -> CommandLine {
    // A space within a word is written as `~`.
    let words = line.split_whitespace().map(|word| word.replace('~', " "));
    CommandLine::read(&words.collect::<Vec<_>>())
}

fn settings(line: &str) -> Vec<String> {
    let line = read(line);
    assert_eq!(line.refusals, []);
    let settings = line.settings.iter();
    settings
        .map(|(name, value)| format!("{name}={value}"))
        .collect()
}

#[test]
fn words_of_the_machine_become_settings() {
    for (line, expected) in [
        (
            "-smbios type=1,product=OpenStack~Compute,serial=x -smbios type=11,value=a,value=b,,c",
            &[
                "smbios.000.product=OpenStack Compute",
                "smbios.000.serial=x",
                "smbios.000.type=1",
                "smbios.001.type=11",
                "smbios.001.value=a",
                "smbios.001.value.001=b,c",
            ][..],
        ),
        (
            "-numa node,nodeid=0,cpus=0-3,memdev=m0 -numa cpu,node-id=0,socket-id=0",
            &[
                "numa.000.cpus=0-3",
                "numa.000.memdev=m0",
                "numa.000.nodeid=0",
                "numa.000.type=node",
                "numa.001.node-id=0",
                "numa.001.socket-id=0",
                "numa.001.type=cpu",
            ],
        ),
        (
            "-m 1G,slots=2,maxmem=4096m",
            &["memory.maxmem=4096m", "memory.slots=2"],
        ),
        ("-audio pa,model=HDA", &["audio.model=hda"]),
        ("-audio driver=none", &[]),
        ("-soundhw pcspk,ac97", &["audio.model=ac97"]),
        (
            "-global driver=cfi.pflash01,property=secure,value=on",
            &["global.cfi.pflash01.secure=on"],
        ),
        // QEMU warns of this form, and does nothing.
        ("-global cfi.pflash01.secure=on", &[]),
        ("-global migration.x-max-bandwidth=1", &[]),
        (
            "-global ICH9-LPC.noreboot=off -global qxl-vga.vgamem_mb=32",
            &[
                "global.ICH9-LPC.noreboot=off",
                "global.qxl-vga.vgamem_mb=32",
            ],
        ),
        (
            "-rtc base=2020-01-01T10:00:00",
            &["rtc.base=2020-01-01T10:00:00"],
        ),
        (
            "-no-kvm-irqchip -localtime",
            &["machine.kernel-irqchip=off", "rtc.base=localtime"],
        ),
        (
            "-boot once=d,menu=on,splash=/p",
            &["boot.menu=on", "boot.once=d"],
        ),
    ] {
        assert_eq!(settings(line), expected, "{line}");
    }
}

#[test]
fn words_without_weight_are_passed_over() {
    let line = "-object secret,id=s,data=x -object authz-simple,id=z,identity=y -object \
                tls-creds-x509,id=t,dir=/x -object rng-random,id=r,filename=/dev/urandom \
                -object throttle-group,id=g -iscsi \
                initiator-name=iqn.x -sandbox on -pidfile /p -runas nobody -chroot /x -msg \
                timestamp=on -overcommit mem-lock=off -compat deprecated-input=crash -trace \
                enable=x -enable-fips -writeconfig /x -g 800x600 -alt-grab -no-quit -win2k-hack \
                -nodefconfig -no-kvm -spice port=5900,disable-ticketing=on -display gtk -k de \
                -audiodev pa,id=a -mem-path /dev/hugepages -mem-prealloc -object \
                memory-backend-file,id=m,mem-path=/x,size=1G -add-fd fd=3,set=1 -chardev \
                socket,id=c,fd=3 -chardev spicevmc,id=v,name=vdagent -chardev pty,id=p,logfile=/l \
                -serial file:/tmp/x -monitor stdio -d int -D /l -dfilter 0x0 -plugin /x";
    assert!(settings(line).is_empty());
}

#[test]
fn devices_of_short_options_come_after_the_others() {
    let line = read(
        "-debugcon stdio -watchdog i6300esb -balloon virtio -device AC97,id=s -set \
         device.s.audiodev=a",
    );
    assert_eq!(line.refusals, []);
    let devices: Vec<_> = line
        .devices
        .iter()
        .map(|words| {
            (
                words.get("driver").unwrap(),
                words.get("id").unwrap_or_default(),
            )
        })
        .collect();
    assert_eq!(
        devices,
        [
            ("AC97", "s"),
            ("isa-debugcon", "debugcon"),
            ("i6300esb", ""),
            ("virtio-balloon", ""),
        ]
    );
    assert_eq!(line.devices[0].get("audiodev"), Some("a"));
}

#[test]
fn contents_of_firmware_files_are_named() {
    let line = read("-fw_cfg opt/a,string=b,,c -fw_cfg name=opt/f,file=/srv/x");
    assert_eq!(line.refusals, []);
    let file = |name: &str, content| FirmwareFile {
        name: name.to_owned(),
        content,
    };
    assert_eq!(
        line.firmware_files,
        [
            file("opt/a", Content::Text("b,c".to_owned())),
            file("opt/f", Content::File("/srv/x".to_owned())),
        ]
    );
}

#[test]
fn what_cannot_be_made_again_is_refused_by_name() {
    for (line, expected) in [
        (
            "-smbios file=/srv/x",
            "option -smbios of its command line has file=: it is a file",
        ),
        (
            "-smbios type=11,path=/x",
            "option -smbios of its command line has path=",
        ),
        (
            "-smbios type=1,colour=red",
            "option -smbios of its command line: colour=red",
        ),
        (
            "-fw_cfg name=opt/a,gen_id=x",
            "option -fw_cfg of its command line: opt",
        ),
        (
            "-numa node,nodeid=x",
            "option -numa of its command line: nodeid=x",
        ),
        (
            "-usbdevice disk:/srv/x",
            "-usbdevice disk:/srv/x cannot be made again",
        ),
        (
            "-soundhw ac97,hda",
            "option -soundhw of its command line names several cards",
        ),
        (
            "-audio pa,model=kazoo",
            "setting audio.model of its command line has the value",
        ),
        (
            "-set drive.a.b=c",
            "option -set drive.a.b=c of its command line is not understood",
        ),
        (
            "-option-rom /srv/x",
            "option -option-rom of its command line: it is a file",
        ),
        (
            "-prom-env a=b",
            "option -prom-env of its command line: no PC has it",
        ),
        (
            "-global virtio-net-pci.kazoo=1",
            "setting global.virtio-net-pci.kazoo",
        ),
        (
            "-object filter-mirror,id=f",
            "object filter-mirror cannot be made again",
        ),
        (
            "-chardev qemu-vdagent,id=v",
            "character device qemu-vdagent",
        ),
        ("-cpu host,vendor=x", "CPU setting vendor=x"),
    ] {
        let found = read(line).refusals;
        assert_eq!(found.len(), 1, "{line}: {found:?}");
        assert!(
            found[0].text.starts_with(expected),
            "{line}: {}",
            found[0].text
        );
        assert!(!found[0].hint.is_empty());
    }
}

/// Every option that QEMU lists in its help has a meaning.
#[test]
fn every_option_of_the_installed_emulators_has_a_meaning() {
    let mut asked = 0;
    for qemu in [
        "/usr/bin/qemu-system-x86_64",
        "/var/lib/longhaul-lab/qemu/10.0/qemu-system-x86_64",
        "/var/lib/longhaul-lab/qemu/11.1/qemu-system-x86_64",
    ] {
        let Ok(help) = std::process::Command::new(qemu).arg("-help").output() else {
            continue;
        };
        let help = String::from_utf8_lossy(&help.stdout).into_owned();
        let lines = help.lines().filter(|line| line.starts_with('-'));
        for line in lines {
            let words = line
                .split_whitespace()
                .take_while(|word| word.starts_with('-') || matches!(*word, "or"));
            for name in words.flat_map(|word| word.split('/')) {
                let name = name.trim_start_matches('-');
                if matches!(name, "" | "or") {
                    continue;
                }
                let name = name.split(['[', '=', ',']).next().unwrap_or(name);
                assert!(super::super::options::is_known(name), "{qemu}: -{name}");
                asked += 1;
            }
        }
    }
    assert!(asked == 0 || asked > 90, "{asked}");
}

#[test]
fn folders_are_read_in_both_forms() {
    let line = read(
        "-virtfs local,path=/a,mount_tag=one,security_model=none \
         -fsdev local,id=f,path=/b,,c,readonly -device virtio-9p-pci,fsdev=f,mount_tag=two",
    );
    assert_eq!(line.refusals, []);
    let folder = |words: &Words| {
        let of = |key| words.get(key).unwrap_or_default().to_owned();
        (of("id"), of("path"))
    };
    let folders: Vec<_> = line.folders.iter().map(folder).collect();
    let pair = |id: &str, path: &str| (id.to_owned(), path.to_owned());
    assert_eq!(folders, [pair("one", "/a"), pair("f", "/b,c")]);
    let tags = line.devices.iter();
    let tags: Vec<_> = tags
        .map(|words| (words.get("fsdev"), words.get("mount_tag")))
        .collect();
    let expected = [(Some("one"), Some("one")), (Some("f"), Some("two"))];
    assert_eq!(tags, expected);
    let refused = pairs(&FSDEV, &Words::read("throttling.bps-total=1,id=f", "")).unwrap_err();
    assert!(
        refused[0].text.contains("throttling.bps-total=1"),
        "{refused:?}"
    );
}
