use super::*;
use longhaul_hypervisor::firmware::SystemFirmware;

const XML: &str = "\
<domain type='kvm' id='3'>
  <name>web</name>
  <uuid>67297888-a1e2-4f43-9539-6d11f855afba</uuid>
  <memory unit='KiB'>2097152</memory>
  <vcpu placement='static'>2</vcpu>
  <os>
    <type arch='x86_64' machine='pc-q35-7.2'>hvm</type>
    <kernel>/boot/here &amp; there</kernel>
    <cmdline>quiet</cmdline>
  </os>
  <cpu mode='custom'><model fallback='forbid'>EPYC</model></cpu>
  <devices>
    <disk type='file' device='cdrom'><target dev='sda' bus='sata'/></disk>
    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2'/>
      <source file='/srv/web.qcow2' index='1'/>
      <target dev='vda' bus='virtio'/>
      <alias name='virtio-disk0'/>
    </disk>
    <interface type='bridge'>
      <mac address='52:54:00:b3:23:1b'/>
      <source bridge='virbr0'/>
    </interface>
    <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
    <channel type='spicevmc'><target type='virtio' name='com.redhat.spice.0'/></channel>
  </devices>
</domain>
";

fn config(text: &str) -> HostConfig {
    let qemu = "[qemu]\nemulators = { one = \"/usr/bin/qemu\" }\n";
    toml::from_str(&format!("{qemu}{text}")).unwrap()
}

fn here() -> HostConfig {
    config(
        "[images.web]\npath = \"/srv/web.qcow2\"\nformat = \"qcow2\"\nlocal = true\n\
         [networks]\nlan = { bridge = \"virbr0\" }\n\
         [kernels.one]\nkernel = \"/boot/here & there\"\n",
    )
}

#[test]
fn a_definition_may_lack_what_was_plugged_in() {
    let guest = DomainXml::read(XML).unwrap().description(&here()).unwrap();
    let card = XML.find("    <interface").unwrap()..XML.find("    <channel").unwrap();
    let without_card = XML.replace(&XML[card], "");
    let disk = XML.find("    <disk type='file' device='disk'>").unwrap();
    let disk = disk..XML.find("    <interface").unwrap();
    let without_disk = XML.replace(&XML[disk], "");
    let with_memory = |kib: &str| XML.replace("2097152", kib);
    let runs = DomainXml::read(XML).unwrap();
    for definition in [&with_memory("1048576"), &without_card, &without_disk] {
        let read = DomainXml::read(definition).unwrap();
        let defined = runs.defined(&read, &guest);
        assert_eq!(read.for_host(&defined, &here()).unwrap(), *definition);
        // What runs lacks nothing.
        assert!(read.with_monitor(&guest, &here(), "/run/m").is_err());
    }
    let taken = |from: &str, to: &str| {
        let other = XML.replace(from, to);
        let read = DomainXml::read(&other).unwrap();
        read.for_host(&runs.defined(&read, &guest), &here())
    };
    // A file gets the path that its disk has here. Another card is not taken.
    assert_eq!(taken("web.qcow2", "other.qcow2"), Ok(XML.to_owned()));
    assert!(taken("b3:23:1b", "b3:23:1c").is_err());
    let more = with_memory("4194304");
    let more = DomainXml::read(&more).unwrap();
    assert!(more.for_host(&guest, &here()).is_err());
}

#[test]
fn a_domain_is_described_by_names() {
    let xml = DomainXml::read(XML).unwrap();
    assert_eq!(xml.uuid(), Some("67297888-a1e2-4f43-9539-6d11f855afba"));
    let guest = xml.description(&here()).unwrap();
    assert_eq!((guest.vcpus, guest.memory_mib), (2, 2048));
    assert_eq!((&*guest.machine, &*guest.cpu), ("pc-q35-7.2", "EPYC"));
    let [disk] = &guest.disks[..] else { panic!() };
    assert_eq!((&*disk.name, &*disk.image), ("virtio-disk0", "web"));
    assert!(disk.is_local());
    assert_eq!(guest.nics[0].network, "lan");
    assert_eq!(guest.channels.len(), 2);
    longhaul_hypervisor::description::check(&guest).unwrap();
    for missing in ["images", "networks", "kernels"] {
        let mut config = here();
        match missing {
            "images" => config.images.clear(),
            "networks" => config.networks.clear(),
            _ => config.kernels.clear(),
        }
        let refused = xml.description(&config).unwrap_err();
        assert!(refused.hint.contains(missing), "{refused}");
    }
}

#[test]
fn paths_and_bridges_are_those_of_the_host() {
    let xml = DomainXml::read(XML).unwrap();
    let guest = xml.description(&here()).unwrap();
    assert_eq!(xml.for_host(&guest, &here()).unwrap(), XML);
    let there = config(
        "[images.web]\npath = \"/data/it's <web>\"\nformat = \"qcow2\"\nlocal = true\n\
         [networks]\nlan = { bridge = \"br1\" }\n\
         [kernels.one]\nkernel = \"/boot/k\"\n",
    );
    let moved = xml.for_host(&guest, &there).unwrap();
    let expected = XML
        .replace("/boot/here &amp; there", "/boot/k")
        .replace("/srv/web.qcow2", "/data/it&apos;s &lt;web&gt;")
        .replace("virbr0", "br1");
    assert_eq!(moved, expected);
    let moved = DomainXml::read(&moved).unwrap();
    assert_eq!(moved.description(&there).unwrap(), guest);
    // A card's port is the bridge's affair.
    let mut with_port = guest.clone();
    with_port.nics[0].port = Some(longhaul_protocol::port::Port {
        mtu: Some(1450),
        ..longhaul_protocol::port::Port::default()
    });
    assert_eq!(xml.for_host(&with_port, &here()).unwrap(), XML);
    let monitor = "/run/a's";
    let with = xml.with_monitor(&guest, &here(), monitor).unwrap();
    let with_monitor = DomainXml::read(&with).unwrap();
    assert!(with_monitor.has_monitor() && !xml.has_monitor());
    assert_eq!(with_monitor.description(&here()).unwrap(), guest);
    // The next host needs no other.
    assert_eq!(
        with_monitor.with_monitor(&guest, &here(), monitor).unwrap(),
        with
    );
    assert!(
        with_monitor
            .with_monitor(&guest, &here(), "/run/b")
            .is_err()
    );
    let refused = xml.for_host(&guest, &config("")).unwrap_err();
    assert!(refused.text.contains("`one`"), "{refused}");
}

#[test]
fn a_card_on_a_network_of_libvirts_is_on_a_bridge_at_its_destination() {
    let network = "<source network='default' portid='1' bridge='virbr0'/>";
    let text = XML
        .replace("<interface type='bridge'>", "<interface type='network'>")
        .replace("<source bridge='virbr0'/>", network);
    let xml = DomainXml::read(&text).unwrap();
    let guest = xml.description(&here()).unwrap();
    assert_eq!(xml.for_host(&guest, &here()).unwrap(), XML);
    // The XML for a migration may not say which bridge that was.
    let text = text.replace(" portid='1' bridge='virbr0'", "");
    let xml = DomainXml::read(&text).unwrap();
    assert_eq!(xml.for_host(&guest, &here()).unwrap(), XML);
}

#[test]
fn another_host_chooses_no_file_and_no_program_here() {
    let guest = DomainXml::read(XML).unwrap();
    let guest = guest.description(&here()).unwrap();
    let accepted = |from: &str, to: &str| {
        assert!(XML.contains(from), "{from}");
        let text = XML.replacen(from, to, 1);
        DomainXml::read(&text).and_then(|xml| xml.with_monitor(&guest, &here(), "/run/m"))
    };
    let with = |more: &str| accepted("</devices>", &format!("{more}</devices>"));
    let beside = |more: &str| accepted("<devices>", &format!("{more}<devices>"));
    for harmless in [
        "<emulator>/usr/bin/qemu</emulator>",
        "<console type='pty' tty='/dev/pts/3'><source path='/dev/pts/3'/></console>",
        "<channel type='unix'><source mode='bind' \
         path='/var/lib/libvirt/qemu/channel/a'/></channel>",
        "<rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>",
        "<graphics type='vnc' port='-1' listen='127.0.0.1'/>",
        "<redirdev bus='usb' type='spicevmc'/>",
    ] {
        with(harmless).unwrap_or_else(|error| panic!("{harmless}: {error}"));
    }
    for harmless in [
        "<seclabel type='dynamic' model='dac' relabel='yes'/>",
        "<seclabel type='none' model='none'/>",
        "<resource><partition>/machine</partition></resource>",
        "<metadata><a:b xmlns:a='urn:a'>/etc/passwd</a:b></metadata>",
    ] {
        beside(harmless).unwrap_or_else(|error| panic!("{harmless}: {error}"));
    }
    for evil in [
        "<emulator>/tmp/evil</emulator>",
        "<emulator>/usr/bin/qemu</emulator><emulator>/usr/bin/qemu</emulator>",
        "<serial type='file'><source path='/etc/cron.d/x'/></serial>",
        "<redirdev bus='usb' type='tcp'><source mode='bind' host='::' service='1'/></redirdev>",
        "<serial type='unix'><source path='/run/docker.sock'/></serial>",
        "<serial type='unix'><source path='/var/lib/libvirt/qemu/../x'/></serial>",
        "<serial type='pty'><log file='/etc/cron.d/x'/></serial>",
        "<rng model='virtio'><backend model='random'>/etc/shadow</backend></rng>",
        "<rng model='virtio'><backend model='egd' type='tcp'/></rng>",
        "<audio id='1' type='file' path='/etc/x'/>",
        "<graphics type='spice'><gl rendernode='/dev/dri/renderD128'/></graphics>",
        "<graphics type='vnc' socket='/etc/x'/>",
        "<shmem name='a'/>",
        "<smartcard mode='host'/>",
        "<controller type='scsi' index='0'><driver file='x'/></controller>",
    ] {
        assert!(with(evil).is_err(), "{evil}");
    }
    let namespace = format!("xmlns:qemu='{QEMU_NAMESPACE}'");
    let line = format!("<qemu:commandline {namespace}><qemu:arg value='-S'/></qemu:commandline>");
    let open = format!("<qemu:capabilities {namespace}/>");
    for evil in [
        line.as_str(),
        open.as_str(),
        "<commandline/>",
        "<launchSecurity type='sev'/>",
        "<seclabel type='static' model='dac'><label>root:root</label></seclabel>",
        "<seclabel type='none' model='apparmor'/>",
        "<seclabel type='none'/>",
        "<sysinfo type='fwcfg'><entry name='a' file='/etc/shadow'/></sysinfo>",
        "<bootloader>/bin/sh</bootloader>",
    ] {
        assert!(beside(evil).is_err(), "{evil}");
    }
    for (from, to) in [
        ("<domain type='kvm'", "<domain type='xen'"),
        (
            "<kernel>/boot/here &amp; there</kernel>",
            "<initrd>/etc/shadow</initrd>",
        ),
        ("<cmdline>", "<initrd>/etc/shadow</initrd><cmdline>"),
        ("<cmdline>", "<kernel>/etc/shadow</kernel><cmdline>"),
        (
            "<target dev='vda'",
            "<backingStore type='file'><source file='/etc/shadow'/></backingStore>\
             <target dev='vda'",
        ),
        (
            "<target dev='vda'",
            "<source file='/etc/shadow'/><target dev='vda'",
        ),
        ("index='1'/>", "index='1' dev='/dev/sda'/>"),
        ("<name>web</name>", "<name>other</name>"),
        ("2097152", "4194304"),
    ] {
        assert!(accepted(from, to).is_err(), "{to}");
    }
}

/// A domain with UEFI firmware and a TPM, as libvirt shows it while it runs.
fn with_uefi(code: &str, variables: &str) -> String {
    let firmware = format!(
        "<os>\n    <loader readonly='yes' secure='no' type='pflash'>{code}</loader>\n{variables}"
    );
    let tpm = "<devices>\n    <tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>";
    XML.replace("<os>", &firmware).replace("<devices>", tpm)
}

/// A host whose descriptors name a firmware in this folder.
fn with_firmware(config: HostConfig, folder: &Path) -> HostConfig {
    config.with_system_firmware(SystemFirmware::of([(
        folder.join("code.fd"),
        Some(folder.join("vars.fd")),
    )]))
}

#[test]
fn firmware_is_that_of_the_host() {
    let [here, there] = ["/fw/here", "/fw/there"].map(|it| with_firmware(here(), Path::new(it)));
    let nvram = |template: &str| {
        format!("    <nvram template='{template}'>/var/lib/libvirt/qemu/nvram/web.fd</nvram>\n")
    };
    let text = with_uefi("/fw/here/code.fd", &nvram("/fw/here/vars.fd"));
    let xml = DomainXml::read(&text).unwrap();
    let guest = xml.description(&here).unwrap();
    assert_eq!(guest.firmware.as_deref(), Some("code.fd"));
    assert_eq!(xml.for_host(&guest, &here).unwrap(), text);
    let moved = xml.with_monitor(&guest, &there, "/run/a").unwrap();
    let expected = with_uefi("/fw/there/code.fd", &nvram("/fw/there/vars.fd"));
    let (before, behind) = expected.split_once("</domain>").unwrap();
    assert!(
        moved.starts_with(before) && moved.ends_with(behind),
        "{moved}"
    );
    // A definition leaves the choice to libvirt.
    let chosen = XML.replace("<os>", "<os firmware='efi'>");
    let chosen = DomainXml::read(&chosen).unwrap();
    assert_eq!(chosen.description(&here).unwrap().firmware, None);
    chosen.for_host(&guest, &there).unwrap();
    assert!(chosen.with_monitor(&guest, &there, "/run/a").is_err());
    // What this host cannot have, and what another host cannot ask for.
    let unknown = with_uefi("/fw/other.fd", "");
    let refused = DomainXml::read(&unknown).unwrap().description(&here);
    assert!(refused.unwrap_err().hint.contains("[firmware]"));
    // Where this host has no empty variables of its own for the code, it takes none of others'.
    let text = with_uefi("/fw/here/code.fd", &nvram("/etc/shadow"));
    let xml = DomainXml::read(&text).unwrap();
    assert!(!xml.for_host(&guest, &here).unwrap().contains("shadow"));
    let mut named = here.clone();
    named.system_firmware = SystemFirmware::default();
    assert!(xml.for_host(&guest, &named).is_err());
    for evil in [
        "    <nvram>/etc/cron.d/a</nvram>\n".to_owned(),
        "    <nvram>/var/lib/libvirt/qemu/nvram/../../a</nvram>\n".to_owned(),
        "    <nvram type='block'><source dev='/dev/sda'/></nvram>\n".to_owned(),
        format!("{}    <nvram>/etc/a</nvram>\n", nvram("/fw/here/vars.fd")),
        format!("{}    <loader>/etc/a</loader>\n", nvram("/fw/here/vars.fd")),
    ] {
        let text = with_uefi("/fw/here/code.fd", &evil);
        let xml = DomainXml::read(&text).unwrap();
        assert!(xml.for_host(&guest, &here).is_err(), "{evil}");
    }
    for evil in [
        "<tpm><backend type='emulator'><source type='dir' path='/etc'/></backend></tpm>",
        "<tpm><backend type='external'><source type='unix' path='/run/a'/></backend></tpm>",
        "<tpm><backend type='emulator'/><backend type='emulator'/></tpm>",
        "<tpm><backend type='emulator' debug='/etc/a'/></tpm>",
    ] {
        let text = XML.replace("<devices>", &format!("<devices>{evil}"));
        let xml = DomainXml::read(&text).unwrap();
        let guest = GuestDescription {
            firmware: None,
            ..guest.clone()
        };
        assert!(xml.for_host(&guest, &here).is_err(), "{evil}");
    }
}

#[test]
fn what_would_stay_behind_is_refused() {
    for (element, why) in [
        (
            "<tpm model='tpm-crb'><backend type='passthrough'/></tpm>",
            "a TPM of type",
        ),
        (
            "<tpm><backend type='emulator'><encryption secret='a'/></backend></tpm>",
            "encrypted",
        ),
        ("<hostdev mode='subsystem'/>", "of the host"),
        ("<filesystem type='mount'/>", "a folder"),
    ] {
        let text = XML.replace("<devices>", &format!("<devices>{element}"));
        let refused = DomainXml::read(&text).unwrap().description(&here());
        assert!(refused.unwrap_err().text.contains(why));
    }
    for text in ["", "<domain>", "<network/>", "<!DOCTYPE a><domain/>"] {
        assert!(DomainXml::read(text).is_err(), "{text}");
    }
}
