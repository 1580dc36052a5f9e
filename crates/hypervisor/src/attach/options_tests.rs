use super::*;

fn read(line: &str) -> CommandLine {
    let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    CommandLine::read(&words)
}

#[test]
fn an_ordinary_line_is_understood() {
    let line = read(
        "-name web,process=web -machine type=q35,accel=kvm:tcg,usb=on,vmport=off,hpet=no \
         -cpu EPYC,+avx2,topoext=on,svm=off,enforce,phys-bits=40 -smp 2,cores=2 -m size=2G \
         -nodefaults -no-user-config --enable-kvm -display none -vnc :1 -daemonize -pidfile /run/p \
         -rtc base=utc,driftfix=slew -boot order=c,once=d,menu=on -no-reboot -no-shutdown \
         -global ICH9-LPC.disable_s3=1 -global \
         driver=kvm-pit,property=lost_tick_policy,value=delay -object iothread,id=io0 -object \
         memory-backend-memfd,id=ram,size=2G,share=on -machine memory-backend=ram -device \
         virtio-blk-pci,id=d0,drive=h0,iothread=io0 -drive \
         file=/srv/a,,b.raw,if=virtio,format=raw,cache=none -drive \
         if=none,id=h0,file=/srv/h0,format=raw,werror=stop -device \
         {\"driver\":\"virtio-rng-pci\",\"id\":\"rng\"} -device usb-tablet -netdev \
         tap,id=n0,ifname=tap0,script=no -qmp unix:/run/q,server,nowait -serial none -chardev \
         socket,id=c0,path=/run/c,server=on,wait=off -S",
    );
    assert_eq!(line.refusals, []);
    assert_eq!(
        line.cpu.as_deref(),
        Some("EPYC,+avx2,topoext=on,svm=off,phys-bits=40")
    );
    let settings: Vec<String> = line
        .settings
        .iter()
        .map(|(k, v)| format!("{k}={v}"))
        .collect();
    assert_eq!(
        settings,
        [
            "action.reboot=shutdown",
            "action.shutdown=pause",
            "boot.menu=on",
            "boot.once=d",
            "boot.order=c",
            "global.ICH9-LPC.disable_s3=1",
            "global.kvm-pit.lost_tick_policy=delay",
            "machine.hpet=off",
            "machine.usb=on",
            "machine.vmport=off",
            "rtc.base=utc",
            "rtc.driftfix=slew",
        ]
    );
    // QEMU's order of creation: short forms first, then devices of drives, then JSON.
    let models: Vec<&str> = line
        .devices
        .iter()
        .filter_map(|words| words.get("driver"))
        .collect();
    assert_eq!(
        models,
        [
            "virtio-blk-pci",
            "usb-tablet",
            "virtio-blk-pci",
            "virtio-rng-pci"
        ]
    );
    assert_eq!(line.memory_backend.as_deref(), Some("ram"));
    assert_eq!(line.drives[0].get("file"), Some("/srv/a,b.raw"));
    assert_eq!(line.netdevs[0].get("id"), Some("n0"));
}

/// Refuses each option that cannot be moved by its name, with advice.
#[test]
fn what_cannot_be_moved_is_refused_by_name() {
    for (line, expected) in [
        (
            "-tpmdev passthrough,id=t",
            "option -tpmdev of its command line: the TPM is a piece of this host's hardware",
        ),
        (
            "-drive file=/dev/fdset/1,if=none,id=d",
            "option -drive of its command line has file=",
        ),
        (
            "-snapshot",
            "option -snapshot of its command line: what the guest writes",
        ),
        (
            "-drive file=/a,if=none,id=a,snapshot=on",
            "option -drive snapshot=on",
        ),
        (
            "-fsdev synth,id=f",
            "option -fsdev of its command line: driver synth serves no folder",
        ),
        (
            "-virtfs proxy,id=f,socket=/s",
            "option -fsdev of its command line: driver proxy serves no folder",
        ),
        ("-blockdev driver=nbd,node-name=n0", "-blockdev driver nbd"),
        (
            "-blockdev driver=nbd,node-name=n",
            "-blockdev driver nbd cannot be moved",
        ),
        (
            "-blockdev driver=raw,node-name=n,offset=512,file=f",
            "-blockdev setting offset",
        ),
        (
            "-usbdevice braille",
            "-usbdevice braille cannot be made again",
        ),
        (
            "-sd card.raw",
            "option -sd of its command line: a PC has no",
        ),
        ("-machine q35,frobnicate=on", "setting machine.frobnicate"),
        (
            "-frobnicate fast -S",
            "option -frobnicate of its command line is not known",
        ),
        (
            "-object secret,id=masterKey0,file=/var/lib/libvirt/qemu/domain-1/master-key.aes",
            "libvirt manages this guest",
        ),
        (
            "-name a -qmp unix:/var/lib/libvirt/qemu/domain-1/monitor.sock",
            "libvirt manages this guest",
        ),
        (
            "-id 100 -chardev socket,id=qmp,path=/var/run/qemu-server/100.qmp",
            "Proxmox VE manages",
        ),
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

#[test]
fn hostile_words_do_no_harm() {
    for line in [
        "-",
        "--",
        "-device",
        "-cpu",
        "-global a",
        "-object {\"a\":[[1]]}",
        "-drive ,,,=,",
        "-machine ==",
    ] {
        let _ = read(line);
    }
    let many = vec!["-S".to_owned(); WORDS_MAX + 1];
    assert_eq!(CommandLine::read(&many).refusals.len(), 1);
    let control = read("-\u{1b}[2J x").refusals;
    assert!(!control[0].text.contains('\u{1b}'));
}

/// What a board makes by itself is no reason: QEMU is asked for it.
#[test]
fn what_people_write_is_no_reason() {
    for line in [
        "disk.raw",
        "-hda disk.raw -cdrom /srv/debian.iso -fda a.img -usbdevice tablet",
        "-drive file=disk.raw,format=raw -drive if=ide,index=3,media=cdrom",
        "-nic user,hostfwd=tcp::2222-:22 -net nic,model=e1000 -net tap,fd=3",
        "-netdev tap,id=n,fds=3:4,vhostfds=5:6,vhost=on,queues=2",
        "-blockdev driver=qcow2,node-name=d,file.driver=file,file.filename=a.qcow2",
        "-object throttle-group,id=t -blockdev driver=throttle,node-name=d,file=f,throttle-group=t",
        // A folder alone makes no guest libvirt's, or Proxmox VE's.
        "-blockdev driver=file,node-name=f,filename=/var/lib/libvirt/images/a.raw",
        "-drive file=/var/lib/libvirt/qemu/a.raw,if=virtio -bios /usr/share/qemu-server/ovmf.fd",
    ] {
        assert_eq!(read(line).refusals, [], "{line}");
    }
    assert_eq!(read("-usbdevice tablet").settings["machine.usb"], "on");
}

#[test]
fn the_socket_of_an_emulated_tpm_is_known() {
    let socket = |text: &str| {
        let words: Vec<String> = text.split(' ').map(str::to_owned).collect();
        let line = CommandLine::read(&words);
        assert!(line.refusals.is_empty(), "{:?}", line.refusals);
        line.tpm_socket().map(str::to_owned)
    };
    let chardev = "-chardev socket,id=c,path=/run/a.tpm";
    let tpm = "-tpmdev emulator,id=t,chardev=c";
    for both in [format!("{chardev} {tpm}"), format!("{tpm} {chardev}")] {
        assert_eq!(socket(&both).as_deref(), Some("/run/a.tpm"));
    }
    assert_eq!(socket(chardev), None);
    assert_eq!(socket(tpm), None);
}
