//! What the XML of a domain may have at its destination. It comes from another host, and libvirt
//! would carry out whatever it says, as root: so only what is known to be harmless is taken, and no
//! path but those of this host's own configuration.

use super::firmware::is_of_libvirt;
use super::{MONITOR, QEMU_NAMESPACE, XmlError, child, monitor_words, refuse};
use longhaul_hypervisor::config::HostConfig;
use roxmltree::{Document, Node};
use std::collections::BTreeSet;
use std::path::Path;

/// What a domain may have.
const PARTS: [&str; 34] = [
    "blkiotune",
    "clock",
    "cpu",
    "cputune",
    "currentMemory",
    "description",
    "devices",
    "features",
    "genid",
    "iothreadids",
    "iothreads",
    "maxMemory",
    "memory",
    "memoryBacking",
    "memtune",
    "metadata",
    "name",
    "numatune",
    "on_crash",
    "on_lockfailure",
    "on_poweroff",
    "on_reboot",
    "os",
    "perf",
    "pm",
    "resource",
    "seclabel",
    "sysinfo",
    "throttlegroups",
    "title",
    "uuid",
    "vcpu",
    "vcpus",
    "commandline",
];
/// Its devices.
const DEVICES: [&str; 22] = [
    "audio",
    "channel",
    "console",
    "controller",
    "disk",
    "emulator",
    "graphics",
    "hub",
    "input",
    "interface",
    "iommu",
    "memballoon",
    "memory",
    "panic",
    "parallel",
    "redirdev",
    "rng",
    "serial",
    "sound",
    "tpm",
    "video",
    "watchdog",
];
/// What its serial ports and channels may lead to.
const ENDS: [&str; 7] = [
    "dbus",
    "null",
    "pty",
    "qemu-vdagent",
    "spiceport",
    "spicevmc",
    "unix",
];
/// Attributes that are paths, also if they are not whole ones.
const PATHS: [&str; 9] = [
    "dir",
    "file",
    "master",
    "path",
    "rendernode",
    "script",
    "slave",
    "tap",
    "vhost",
];
/// Programs that are QEMU, whatever this host's configuration says.
const EMULATORS: [&str; 4] = [
    "/usr/bin/kvm",
    "/usr/bin/qemu-kvm",
    "/usr/bin/qemu-system-x86_64",
    "/usr/libexec/qemu-kvm",
];
/// Sources of random bytes.
const RANDOM: [&str; 3] = ["/dev/hwrng", "/dev/random", "/dev/urandom"];
/// Where libvirt keeps sockets of domains.
const SOCKETS: [&str; 2] = ["/var/lib/libvirt/qemu/", "/run/libvirt/qemu/"];

fn refused<T>(what: impl std::fmt::Display) -> Result<T, XmlError> {
    refuse(
        format!("its XML has {what}, which is not taken from another host"),
        "take that out of the domain (virsh edit), or move it with virsh migrate",
    )
}

/// Checks the XML of an arriving domain, with this host's paths in it.
pub(super) fn check(
    document: &Document<'_>,
    config: &HostConfig,
    monitor: Option<&str>,
) -> Result<(), XmlError> {
    let known = Known::of(config);
    let root = document.root_element();
    if !matches!(root.attribute("type"), Some("kvm" | "qemu")) {
        return refused("another type than kvm or qemu");
    }
    for part in root.children().filter(Node::is_element) {
        let name = part.tag_name().name();
        if !PARTS.contains(&name) {
            return refused(format_args!("<{name}>"));
        }
        match (part.tag_name().namespace(), name) {
            // libvirt keeps it for others, and does nothing with it.
            (_, "metadata") => {}
            (Some(QEMU_NAMESPACE), "commandline") => own_monitor(part, monitor)?,
            (None, "devices") => devices(part, &known)?,
            (None, "commandline") | (Some(_), _) => return refused(format_args!("<{name}>")),
            (None, _) => walk(part, &known)?,
        }
    }
    Ok(())
}

/// Paths of this host that a domain may name.
struct Known<'a> {
    emulators: BTreeSet<&'a str>,
    disks: BTreeSet<&'a str>,
    kernels: BTreeSet<&'a str>,
    firmware: BTreeSet<&'a str>,
    config: &'a HostConfig,
}

impl<'a> Known<'a> {
    fn are_empty_variables(&self, path: &str) -> bool {
        let system = &self.config.system_firmware;
        self.firmware.contains(path) || system.has_variables(Path::new(path))
    }

    fn of(config: &'a HostConfig) -> Self {
        let emulators = config.qemu.emulators.values();
        let emulators = emulators.filter_map(|path| path.to_str()).chain(EMULATORS);
        let disks = config.images.values();
        let kernels = config.kernels.values();
        let kernels = kernels.flat_map(|it| [Some(&it.kernel), it.initrd.as_ref()]);
        Self {
            emulators: emulators.collect(),
            disks: disks.filter_map(|image| image.path.to_str()).collect(),
            kernels: kernels.flatten().filter_map(|path| path.to_str()).collect(),
            firmware: config
                .firmware
                .values()
                .filter_map(|it| it.to_str())
                .collect(),
            config,
        }
    }
}

/// The only words for QEMU are those of Longhaul's own monitor.
fn own_monitor(line: Node<'_, '_>, monitor: Option<&str>) -> Result<(), XmlError> {
    let words = line.children().filter(Node::is_element);
    let words: Vec<&str> = words
        .map(|word| match word.has_tag_name((QEMU_NAMESPACE, "arg")) {
            true => word.attribute("value").unwrap_or_default(),
            false => "",
        })
        .collect();
    let own = monitor.map(monitor_words);
    match own.is_some_and(|own| words == own) {
        true => Ok(()),
        false => refused(format_args!(
            "words for QEMU that are not those of {MONITOR}"
        )),
    }
}

fn devices(devices: Node<'_, '_>, known: &Known<'_>) -> Result<(), XmlError> {
    let mut emulators = 0;
    for device in devices.children().filter(Node::is_element) {
        let name = device.tag_name().name();
        if device.tag_name().namespace().is_some() || !DEVICES.contains(&name) {
            return refused(format_args!("<{name}>"));
        }
        match name {
            "emulator" => {
                emulators += 1;
                let path = device.text().unwrap_or_default();
                if emulators > 1 || !known.emulators.contains(path) {
                    return refuse(
                        format!("its QEMU is {path}, which is no emulator of this host"),
                        "name it under [qemu] emulators in the configuration here",
                    );
                }
            }
            "disk" => disk(device, known)?,
            "interface" if device.attribute("type") != Some("bridge") => {
                return refused("a card that is on no bridge");
            }
            "channel" | "console" | "parallel" | "redirdev" | "serial" => end(device)?,
            "rng" => rng(device)?,
            "tpm" => tpm(device, known)?,
            _ => walk(device, known)?,
        }
    }
    Ok(())
}

fn disk(disk: Node<'_, '_>, known: &Known<'_>) -> Result<(), XmlError> {
    let mut sources = 0;
    for part in disk.children().filter(Node::is_element) {
        if !part.has_tag_name("source") {
            walk(part, known)?;
            continue;
        }
        sources += 1;
        let attributes = part.attributes();
        let mut paths = 0;
        for attribute in attributes {
            match attribute.name() {
                "file" | "dev" if known.disks.contains(attribute.value()) => paths += 1,
                "index" | "startupPolicy" => {}
                other => {
                    return refused(format_args!("a disk with {other}={:?}", attribute.value()));
                }
            }
        }
        if sources > 1 || paths != 1 || part.children().any(|it| it.is_element()) {
            return refused("a disk with another source than one image");
        }
    }
    attributes(disk)
}

/// The host's end of a serial port or a channel.
fn end(device: Node<'_, '_>) -> Result<(), XmlError> {
    let kind = device.attribute("type").unwrap_or_default();
    if !ENDS.contains(&kind) {
        return refused(format_args!("a port that leads to {kind:?}"));
    }
    for part in device.descendants().filter(Node::is_element) {
        for attribute in part.attributes() {
            let value = attribute.value();
            let is_path = value.starts_with('/') || PATHS.contains(&attribute.name());
            let of_libvirt = SOCKETS.iter().any(|folder| value.starts_with(folder));
            let is_terminal = kind == "pty" && value.starts_with("/dev/pts/");
            if is_path && (!(of_libvirt || is_terminal) || value.contains("..")) {
                return refused(format_args!("a port that leads to {value:?}"));
            }
        }
        if part.tag_name().name() == "log" {
            return refused("a port with a log");
        }
    }
    Ok(())
}

fn rng(device: Node<'_, '_>) -> Result<(), XmlError> {
    let Some(backend) = child(device, "backend") else {
        return Ok(());
    };
    let is_random = match backend.attribute("model") {
        Some("builtin") => true,
        Some("random") => RANDOM.contains(&backend.text().unwrap_or_default().trim()),
        _ => false,
    };
    let count = device.children().filter(|it| it.has_tag_name("backend"));
    match is_random && count.count() == 1 {
        true => Ok(()),
        false => refused("random bytes of an unknown source"),
    }
}

/// A TPM whose state libvirt keeps in its own folder.
fn tpm(device: Node<'_, '_>, known: &Known<'_>) -> Result<(), XmlError> {
    let backends = device.children().filter(|it| it.has_tag_name("backend"));
    let mut backends = backends.map(|backend| backend.attribute("type"));
    if (backends.next(), backends.next()) != (Some(Some("emulator")), None) {
        return refused("a TPM that is not one emulator");
    }
    let mut parts = device.descendants().filter(Node::is_element);
    let places = ["source", "device", "encryption"];
    if parts.any(|part| places.contains(&part.tag_name().name())) {
        return refused("a TPM with a place of its own");
    }
    walk(device, known)
}

/// Nothing below this names a path, but for a kernel and firmware.
fn walk(part: Node<'_, '_>, known: &Known<'_>) -> Result<(), XmlError> {
    for node in part.descendants() {
        if node.is_element() {
            let name = node.tag_name().name();
            if node.tag_name().namespace().is_some() {
                return refused(format_args!("<{name}> of an unknown kind"));
            }
            if name == "seclabel" && !is_harmless_label(node) {
                return refused("a security label of its own");
            }
            if name == "nvram" {
                variables(node, known)?;
            } else {
                attributes(node)?;
            }
        }
        let text = node.text().filter(|_| node.is_text());
        let text = text.unwrap_or_default().trim();
        let of = node.parent().map(|parent| parent.tag_name().name());
        let allowed = match of {
            Some("kernel" | "initrd") => known.kernels.contains(text),
            // A control group.
            Some("partition") => true,
            Some("loader") => known.firmware.contains(text),
            Some("nvram") => is_of_libvirt(text),
            _ => false,
        };
        let is_path = text.starts_with('/') || matches!(of, Some("loader" | "nvram" | "dtb"));
        if is_path && !text.is_empty() && !allowed {
            return refused(format_args!("the path {text:?}"));
        }
    }
    Ok(())
}

/// The variables of firmware. Where libvirt has none yet, it copies empty ones.
fn variables(node: Node<'_, '_>, known: &Known<'_>) -> Result<(), XmlError> {
    if node.children().any(|it| it.is_element()) {
        return refused("variables of firmware that are in no file");
    }
    for attribute in node.attributes() {
        let value = attribute.value();
        match attribute.name() {
            "format" | "templateFormat" => {}
            "type" if value == "file" => {}
            "template" if known.are_empty_variables(value) => {}
            "template" => {
                return refuse(
                    format!("its firmware begins with the variables in {value}"),
                    format!(
                        "if that is so at this host too, add to its configuration:\n\
                         [firmware]\nempty-variables = \"{value}\""
                    ),
                );
            }
            other => return refused(format_args!("variables of firmware with {other}={value:?}")),
        }
    }
    Ok(())
}

fn attributes(node: Node<'_, '_>) -> Result<(), XmlError> {
    for attribute in node.attributes() {
        let (name, value) = (attribute.name(), attribute.value());
        // A VNC server on a socket of its own.
        let is_path = PATHS.contains(&name) || name == "socket" && value.contains('/');
        if is_path || value.starts_with('/') {
            return refused(format_args!("{name}={value:?}"));
        }
    }
    Ok(())
}

/// Labels that the host's own libvirt chooses.
fn is_harmless_label(label: Node<'_, '_>) -> bool {
    match (label.attribute("type"), label.attribute("model")) {
        (Some("dynamic"), _) => child(label, "baselabel").is_none(),
        // Without a model it would be about all of them.
        (Some("none"), model) => model == Some("none"),
        _ => false,
    }
}
