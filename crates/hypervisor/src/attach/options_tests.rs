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
    assert_eq!(
        line.drives["virtio drive 0"].get("file"),
        Some("/srv/a,b.raw")
    );
    assert!(line.netdevs.contains_key("n0"));
}

/// Refuses each option that cannot be moved by its name, with advice.
#[test]
fn what_cannot_be_moved_is_refused_by_name() {
    for (line, expected) in [
        (
            "-tpmdev emulator,id=t,chardev=c",
            "option -tpmdev of its command line: the state of its TPM",
        ),
        ("-tpmdev passthrough,id=t", "option -tpmdev"),
        (
            "-netdev tap,id=n,fd=3",
            "option -netdev of its command line has fd=",
        ),
        (
            "-netdev tap,id=n,vhostfds=3:4",
            "option -netdev of its command line has vhostfds=",
        ),
        (
            "-drive file=/dev/fdset/1,if=none,id=d",
            "option -drive of its command line has file=",
        ),
        (
            "-serial chardev:c -cdrom /srv/debian.iso",
            "option -cdrom of its command line: its medium",
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
            "-virtfs local,path=/srv",
            "option -virtfs of its command line: it is a folder",
        ),
        ("-fsdev local,id=f,path=/srv", "option -fsdev"),
        (
            "-hda disk.raw",
            "option -hda of its command line: it is a disk without a device",
        ),
        (
            "disk.raw",
            "`disk.raw` on its command line is a disk without a device",
        ),
        (
            "-drive file=disk.raw,format=raw",
            "option -drive of its command line makes a disk",
        ),
        (
            "-blockdev driver=nbd,node-name=n",
            "-blockdev driver nbd cannot be moved",
        ),
        (
            "-blockdev driver=raw,node-name=n,offset=512,file=f",
            "-blockdev setting offset",
        ),
        ("-nic user", "option -nic of its command line makes a card"),
        ("-net nic", "option -net of its command line makes a card"),
        ("-usbdevice tablet", "option -usbdevice"),
        ("-machine q35,frobnicate=on", "setting machine.frobnicate"),
        (
            "-frobnicate fast -S",
            "option -frobnicate of its command line is not known",
        ),
        ("-readconfig /etc/vm.cfg", "option -readconfig"),
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
