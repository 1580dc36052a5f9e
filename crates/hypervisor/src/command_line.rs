//! Builds QEMU's command line from a guest's description and this host's configuration.
//!
//! The result is deterministic: every device has a fixed slot by its kind and position in the
//! description, so that two hosts build the same machine. Texts of the description are already
//! checked ([`crate::description::check`]); paths are from the host's own configuration only.

use crate::capabilities::Accelerator;
use crate::config::{HostConfig, Image, ImageFormat, Network};
use crate::description::Chipset;
use crate::disk::base::{self, Base};
use crate::folder::GuestFolder;
use crate::hardware;
use crate::hardware::wiring::UserNetwork;
use crate::tap;
use longhaul_protocol::guest::{Disk, GuestDescription};
use longhaul_protocol::port::Port;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// PCI slot of the controller of the channels.
const CHANNELS_SLOT: usize = 0x03;
/// PCI slot of the first disk.
const DISKS_SLOT: usize = 0x04;
/// PCI slot of the first network card.
const NICS_SLOT: usize = 0x10;

/// Why a description cannot be launched on this host.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// This host's configuration does not define a name.
    #[error("this host has no {kind} called `{name}` (it has: {}): add it under {table} in the \
             agent's configuration", known.join(", "))]
    Unknown {
        /// The kind of thing it names.
        kind: &'static str,
        /// The configuration table for this kind.
        table: &'static str,
        /// The name.
        name: String,
        /// The defined names.
        known: Vec<String>,
    },
    /// The machine type is of an unsupported family.
    #[error("machine type `{0}` cannot be built: only pc-q35-* and pc-i440fx-* can")]
    Machine(String),
    /// The model of a device is not supported.
    #[error("the device model `{0}` cannot be made")]
    Model(String),
}

/// The inputs of a command line apart from the description.
pub(crate) struct Surroundings<'a> {
    pub(crate) config: &'a HostConfig,
    pub(crate) accelerator: Accelerator,
    pub(crate) folder: &'a GuestFolder,
    /// The TAP device of each network card that has one, by the card's index.
    pub(crate) taps: &'a BTreeMap<usize, String>,
    /// The base images of disks, by the disks' names: raw and read-only.
    pub(crate) bases: &'a BTreeMap<String, Base>,
    /// The sizes of raw disks that are smaller than their volumes, by the disks' names.
    pub(crate) sizes: &'a BTreeMap<String, u64>,
    pub(crate) incoming: bool,
}

/// Returns QEMU's arguments, without the program itself.
pub(crate) fn arguments(
    description: &GuestDescription,
    around: &Surroundings<'_>,
) -> Result<Vec<String>, ResolveError> {
    let chipset = Chipset::of(&description.machine)
        .ok_or_else(|| ResolveError::Machine(description.machine.clone()))?;
    let mut line = Line::default();
    machine(&mut line, description, around);
    boot(&mut line, description, around.config)?;
    if let Some(hardware) = &description.hardware {
        let around = hardware::Around {
            description,
            hardware,
            host: around,
        };
        hardware::arguments(&mut line, &around)?;
        return Ok(line.0);
    }
    let bus = chipset.bus();
    channels(&mut line, description, around.folder, bus);
    for (index, disk) in description.disks.iter().enumerate() {
        self::disk(&mut line, disk, around, bus, index)?;
    }
    for (index, nic) in description.nics.iter().enumerate() {
        let netdev = match backend(&mut line, description, around, index)? {
            true => format!(",netdev=net{index}"),
            false => String::new(),
        };
        // Without an option ROM: its size differs from one QEMU to the next.
        line.option(
            "-device",
            format!(
                "virtio-net-pci,id=nic{index}{netdev},mac={},bus={bus},addr={:#x},romfile=",
                nic.mac,
                NICS_SLOT + index
            ),
        );
    }
    Ok(line.0)
}

/// Emits the backend of a network card; returns false where there is none.
pub(crate) fn backend(
    line: &mut Line,
    description: &GuestDescription,
    around: &Surroundings<'_>,
    index: usize,
) -> Result<bool, ResolveError> {
    let network = network(around.config, &description.nics[index].network)?;
    let wiring = hardware::wiring(description, index);
    let id = match wiring.hub {
        true => format!("wire{index}"),
        false => format!("net{index}"),
    };
    let backend = match (&network, around.taps.get(&index)) {
        (Network::Bridge(_), Some(tap)) => {
            let vhost = match wiring.vhost && tap::has_vhost() {
                true => "on",
                false => "off",
            };
            let queues = match wiring.queues {
                1 => String::new(),
                queues => format!(",queues={queues}"),
            };
            format!("tap,id={id},ifname={tap},script=no,downscript=no,vhost={vhost}{queues}")
        }
        (network @ (Network::User | Network::Nat), _) => {
            let mut user = wiring.user.unwrap_or(UserNetwork {
                restrict: *network == Network::User,
                ..UserNetwork::default()
            });
            // The host's configuration decides whether anything is reached.
            user.restrict |= *network == Network::User;
            format!("user,id={id},{}", user.options())
        }
        (Network::Bridge(_), None) | (Network::None, _) => return Ok(false),
    };
    line.option("-netdev", backend);
    if wiring.hub {
        let port = |end: &str| format!("hubport,id={end},hubid={index}");
        line.option(
            "-netdev",
            port(&format!("hub{index}")) + &format!(",netdev={id}"),
        );
        line.option("-netdev", port(&format!("net{index}")));
    }
    Ok(true)
}

/// A TAP device that a network card needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plug {
    pub(crate) bridge: String,
    /// Its port of the bridge.
    pub(crate) port: Port,
    pub(crate) queues: u16,
}

/// Returns the TAP device of each network card that needs one, by the card's index.
pub(crate) fn plugs(
    description: &GuestDescription,
    config: &HostConfig,
) -> Result<BTreeMap<usize, Plug>, ResolveError> {
    let mut plugs = BTreeMap::new();
    for (index, nic) in description.nics.iter().enumerate() {
        if let Network::Bridge(port) = network(config, &nic.network)? {
            let plug = Plug {
                port: port.port(nic.port.as_ref()),
                bridge: port.bridge,
                queues: hardware::wiring(description, index).queues,
            };
            plugs.insert(index, plug);
        }
    }
    Ok(plugs)
}

/// Arguments, in pairs.
#[derive(Default)]
pub(crate) struct Line(Vec<String>);

impl Line {
    fn flag(&mut self, flag: &str) {
        self.0.push(flag.to_owned());
    }

    #[cfg(test)]
    pub(crate) fn words(&self) -> &[String] {
        &self.0
    }

    pub(crate) fn option(&mut self, option: &str, value: impl Into<String>) {
        self.0.push(option.to_owned());
        self.0.push(value.into());
    }
}

fn machine(line: &mut Line, description: &GuestDescription, around: &Surroundings<'_>) {
    let folder = around.folder;
    line.flag("-nodefaults");
    line.flag("-no-user-config");
    line.option("-display", "none");
    line.option(
        "-name",
        format!("guest={},debug-threads=on", description.name),
    );
    line.option(
        "-sandbox",
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
    );
    line.option("-msg", "timestamp=on");
    let hardware = description.hardware.as_ref();
    let options = hardware.map(hardware::machine_options);
    line.option(
        "-machine",
        description.machine.clone() + &options.unwrap_or_default(),
    );
    line.option("-accel", around.accelerator.name());
    line.option("-cpu", description.cpu.as_str());
    let cpus = description.vcpus;
    line.option(
        "-smp",
        match hardware {
            Some(hardware) => hardware::topology(cpus, hardware),
            None => format!("cpus={cpus},sockets=1,cores={cpus},threads=1"),
        },
    );
    let memory = hardware.map(hardware::memory_options).unwrap_or_default();
    line.option("-m", format!("size={}M{memory}", description.memory_mib));
    line.option("-chardev", server("qmp", &folder.qmp()));
    line.option("-mon", "chardev=qmp,mode=control");
    // The guest runs only once this QEMU is in the record.
    line.flag("-S");
    if around.incoming {
        line.option("-incoming", "defer");
    }
}

fn boot(
    line: &mut Line,
    description: &GuestDescription,
    config: &HostConfig,
) -> Result<(), ResolveError> {
    if let Some(name) = &description.firmware {
        let path = look_up("firmware", "[firmware]", &config.firmware, name)?;
        line.option("-bios", text(path));
    }
    if let Some(kernel) = &description.kernel {
        let files = look_up("kernel", "[kernels]", &config.kernels, &kernel.name)?;
        line.option("-kernel", text(&files.kernel));
        if let Some(initrd) = &files.initrd {
            line.option("-initrd", text(initrd));
        }
        line.option("-append", kernel.command_line.as_str());
    }
    Ok(())
}

fn channels(line: &mut Line, description: &GuestDescription, folder: &GuestFolder, bus: &str) {
    if description.channels.is_empty() {
        return;
    }
    line.option(
        "-device",
        format!("virtio-serial-pci,id=serial,bus={bus},addr={CHANNELS_SLOT:#x}"),
    );
    for (index, channel) in description.channels.iter().enumerate() {
        let socket = server(&format!("channel{index}"), &folder.channel(&channel.name));
        line.option("-chardev", socket);
        // Port 0 belongs to the console.
        line.option(
            "-device",
            format!(
                "virtserialport,id=port{index},bus=serial.0,nr={},chardev=channel{index},name={}",
                index + 1,
                channel.name
            ),
        );
    }
}

fn disk(
    line: &mut Line,
    disk: &Disk,
    around: &Surroundings<'_>,
    bus: &str,
    index: usize,
) -> Result<(), ResolveError> {
    let drive = disk_nodes(line, disk, None, around)?;
    line.option(
        "-device",
        format!(
            "virtio-blk-pci,id={},drive={drive},bus={bus},addr={:#x}",
            disk_id(&disk.name),
            DISKS_SLOT + index
        ),
    );
    Ok(())
}

/// Emits the nodes of a disk and returns the name of the upper one. The nodes of the disk that it
/// is an overlay of are there already.
pub(crate) fn disk_nodes(
    line: &mut Line,
    disk: &Disk,
    backing: Option<&Disk>,
    around: &Surroundings<'_>,
) -> Result<String, ResolveError> {
    let name = &disk.name;
    let image = image_called(around.config, &disk.image)?;
    let (file, format) = (format!("file-{name}"), format_node(name));
    let base = around.bases.get(name).map(|base| {
        let (nodes, base) = base::nodes(name, base);
        let nodes = nodes.iter().map(ToString::to_string);
        nodes.for_each(|node| line.option("-blockdev", node));
        base
    });
    let below = backing.map(|backing| format_node(&backing.name)).or(base);
    let used = Used {
        shared: disk.shared,
        read_only: disk.read_only,
        base: below.as_deref(),
        size: around.sizes.get(name).copied(),
    };
    nodes(line, &file, &format, image, &used);
    Ok(format)
}

/// Returns the name of the upper node of a disk.
pub(crate) fn format_node(disk: &str) -> String {
    format!("disk-{disk}")
}

/// The use of an image.
#[derive(Default)]
pub(crate) struct Used<'a> {
    pub(crate) shared: bool,
    pub(crate) read_only: bool,
    /// The node of its backing file; where absent, the image names it itself.
    pub(crate) base: Option<&'a str>,
    /// The size of a raw disk, if its volume is larger.
    pub(crate) size: Option<u64>,
}

/// Emits the nodes of an image.
pub(crate) fn nodes(line: &mut Line, file: &str, format: &str, image: &Image, used: &Used<'_>) {
    let (file_node, mut format_node) = options(file, format, image, used);
    format_node.insert("file".to_owned(), file.into());
    line.option("-blockdev", Value::from(file_node).to_string());
    line.option("-blockdev", Value::from(format_node).to_string());
}

/// Returns the options of the nodes of an image, without that of the upper one for the lower one.
fn options(
    file: &str,
    format: &str,
    image: &Image,
    used: &Used<'_>,
) -> (Map<String, Value>, Map<String, Value>) {
    let read_only = used.read_only;
    let direct = image.direct.unwrap_or(used.shared);
    // QEMU's own lock complements the journal: it stops an operator who starts a second QEMU.
    let file_node = json!({
        "driver": file_driver(&image.path), "node-name": file, "filename": text(&image.path),
        "locking": if image.locks { "on" } else { "off" },
        "cache": {"direct": direct}, "read-only": read_only, "discard": "unmap",
    });
    let driver = match image.format {
        ImageFormat::Raw => "raw",
        ImageFormat::Qcow2 => "qcow2",
    };
    let mut format_node = json!({
        "driver": driver, "node-name": format,
        "cache": {"direct": direct}, "read-only": read_only, "discard": "unmap",
    });
    if let Some(base) = used.base {
        format_node["backing"] = base.into();
    }
    if let (ImageFormat::Raw, Some(size)) = (image.format, used.size) {
        format_node["size"] = size.into();
    }
    let object = |node: Value| match node {
        Value::Object(options) => options,
        _ => Map::new(),
    };
    (object(file_node), object(format_node))
}

/// Returns the nodes of a disk as options of a `-drive`, each after a comma.
pub(crate) fn drive_options(
    disk: &Disk,
    backing: Option<&Disk>,
    around: &Surroundings<'_>,
) -> Result<String, ResolveError> {
    let image = image_called(around.config, &disk.image)?;
    let (file, format) = (format!("file-{}", disk.name), format_node(&disk.name));
    let below = backing.map(|backing| format_node(&backing.name));
    let used = Used {
        shared: disk.shared,
        read_only: disk.read_only,
        base: below.as_deref(),
        size: None,
    };
    let (mut file_node, format_node) = options(&file, &format, image, &used);
    // It is that of the drive.
    file_node.remove("cache");
    let mut text = flat("", &format_node);
    text.push_str(&flat("file.", &file_node));
    Ok(text)
}

fn flat(prefix: &str, options: &Map<String, Value>) -> String {
    let words = options.iter().map(|(key, value)| match value {
        Value::Object(below) => flat(&format!("{prefix}{key}."), below),
        Value::Bool(true) => format!(",{prefix}{key}=on"),
        Value::Bool(false) => format!(",{prefix}{key}=off"),
        Value::String(text) => format!(",{prefix}{key}={}", text.replace(',', ",,")),
        other => format!(",{prefix}{key}={other}"),
    });
    words.collect()
}

/// Returns the driver that opens an image: QEMU has one for files and one for volumes.
fn file_driver(path: &Path) -> &'static str {
    let kind = std::fs::metadata(path).map(|file| file.file_type());
    match kind.is_ok_and(|kind| kind.is_block_device()) {
        true => "host_device",
        false => "file",
    }
}

/// Returns the device's id, prefixed so that a disk's name cannot collide with another device's id.
fn disk_id(name: &str) -> String {
    format!("blk-{name}")
}

pub(crate) fn image_called<'a>(
    config: &'a HostConfig,
    name: &str,
) -> Result<&'a Image, ResolveError> {
    look_up("image", "[images]", &config.images, name)
}

fn network(config: &HostConfig, name: &str) -> Result<Network, ResolveError> {
    let networks = config.all_networks();
    look_up("network", "[networks]", &networks, name).cloned()
}

pub(crate) fn look_up<'a, T>(
    kind: &'static str,
    table: &'static str,
    values: &'a BTreeMap<String, T>,
    name: &str,
) -> Result<&'a T, ResolveError> {
    values.get(name).ok_or_else(|| ResolveError::Unknown {
        kind,
        table,
        name: name.to_owned(),
        known: match values.is_empty() {
            true => vec!["none".to_owned()],
            false => values.keys().cloned().collect(),
        },
    })
}

pub(crate) fn server(id: &str, path: &Path) -> String {
    let path = text(path).replace(',', ",,");
    format!("socket,id={id},path={path},server=on,wait=off")
}

/// Returns a path as an argument; the configuration's check refuses paths that are not UTF-8.
fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::description::tests::sample;

    fn config() -> HostConfig {
        toml::from_str(
            r#"
            [qemu.emulators]
            "10.0" = "/usr/bin/qemu-system-x86_64"
            [images.debian]
            path = "/srv/a,b.qcow2"
            format = "qcow2"
            [networks]
            office = { bridge = "br0" }
            [firmware]
            ovmf = "/usr/share/ovmf/OVMF.fd"
            [kernels.tiny]
            kernel = "/srv/vmlinuz"
            initrd = "/srv/initrd"
        "#,
        )
        .unwrap()
    }

    fn line(description: &GuestDescription, config: &HostConfig, incoming: bool) -> String {
        line_with(description, config, incoming, &BTreeMap::new())
    }

    fn line_with(
        description: &GuestDescription,
        config: &HostConfig,
        incoming: bool,
        bases: &BTreeMap<String, Base>,
    ) -> String {
        let folder = GuestFolder::new(Path::new("/s,t"), &description.name).unwrap();
        let taps = BTreeMap::from([(0, "lh0".to_owned())]);
        let sizes = BTreeMap::from([("sized".to_owned(), 12_288)]);
        let around = Surroundings {
            config,
            accelerator: Accelerator::Tcg,
            folder: &folder,
            taps: &taps,
            bases,
            sizes: &sizes,
            incoming,
        };
        arguments(description, &around).unwrap().join(" ")
    }

    #[test]
    fn only_a_raw_disk_has_another_size_than_its_volume() {
        let mut description = sample();
        description.disks[0].name = "sized".to_owned();
        let mut config = config();
        for (format, sizes) in [(ImageFormat::Raw, 1), (ImageFormat::Qcow2, 0)] {
            for image in config.images.values_mut() {
                image.format = format;
            }
            let line = line(&description, &config, true);
            assert_eq!(line.matches("\"size\":12288").count(), sizes, "{line}");
        }
    }

    #[test]
    fn a_full_description_becomes_a_fixed_line() {
        let expected = "-nodefaults -no-user-config -display none \
            -name guest=web-7,debug-threads=on \
            -sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny \
            -msg timestamp=on -machine pc-q35-7.2 -accel tcg -cpu qemu64,+avx,-svm \
            -smp cpus=2,sockets=1,cores=2,threads=1 -m size=128M \
            -chardev socket,id=qmp,path=/s,,t/guests/web-7/run/qmp,server=on,wait=off \
            -mon chardev=qmp,mode=control -S \
            -bios /usr/share/ovmf/OVMF.fd -kernel /srv/vmlinuz -initrd /srv/initrd \
            -append console=hvc0 -- a,b=c \
            -device virtio-serial-pci,id=serial,bus=pcie.0,addr=0x3 \
            -chardev socket,id=channel0,\
            path=/s,,t/guests/web-7/run/channel-org.qemu.guest_agent.0,server=on,wait=off \
            -device virtserialport,id=port0,bus=serial.0,nr=1,chardev=channel0,\
            name=org.qemu.guest_agent.0 \
            -blockdev {\"cache\":{\"direct\":true},\"discard\":\"unmap\",\"driver\":\"file\",\
            \"filename\":\"/srv/a,b.qcow2\",\"locking\":\"on\",\"node-name\":\"file-vda\",\
            \"read-only\":false} \
            -blockdev {\"cache\":{\"direct\":true},\"discard\":\"unmap\",\"driver\":\"qcow2\",\
            \"file\":\"file-vda\",\"node-name\":\"disk-vda\",\"read-only\":false} \
            -device virtio-blk-pci,id=blk-vda,drive=disk-vda,bus=pcie.0,addr=0x4 \
            -netdev tap,id=net0,ifname=lh0,script=no,downscript=no,vhost=off \
            -device virtio-net-pci,id=nic0,netdev=net0,mac=52:54:00:12:34:56,bus=pcie.0,\
            addr=0x10,romfile=";
        assert_eq!(line(&sample(), &config(), false), expected);
    }

    #[test]
    fn a_destination_differs_by_waiting_only() {
        let source = line(&sample(), &config(), false);
        let destination = line(&sample(), &config(), true);
        assert_eq!(destination.replace(" -incoming defer", ""), source);
    }

    #[test]
    fn what_is_still_coming_is_read_through_its_front_end() {
        let base = Base::Coming {
            socket: "/state/coming/4f/nbd".into(),
            export: "x".to_owned(),
        };
        let bases = BTreeMap::from([("vda".to_owned(), base)]);
        let line = line_with(&sample(), &config(), true, &bases);
        let base = "-blockdev {\"driver\":\"nbd\",\"export\":\"x\",\
            \"node-name\":\"base-coming-vda\",\"read-only\":true,\"reconnect-delay\":3600,\
            \"server\":{\"path\":\"/state/coming/4f/nbd\",\"type\":\"unix\"}} \
            -blockdev {\"driver\":\"raw\",\"file\":\"base-coming-vda\",\
            \"node-name\":\"base-vda\",\"read-only\":true} -blockdev";
        assert!(line.contains(base), "{line}");
    }

    #[test]
    fn what_an_image_stands_on_is_named_whatever_the_image_says() {
        let base = Base::File("/state/bases/4f.raw".into());
        let bases = BTreeMap::from([("vda".to_owned(), base)]);
        let line = line_with(&sample(), &config(), true, &bases);
        let base = "-blockdev {\"driver\":\"file\",\"filename\":\"/state/bases/4f.raw\",\
            \"node-name\":\"base-file-vda\",\"read-only\":true} \
            -blockdev {\"driver\":\"raw\",\"file\":\"base-file-vda\",\
            \"node-name\":\"base-vda\",\"read-only\":true} -blockdev";
        assert!(line.contains(base), "{line}");
        assert!(
            line.contains("{\"backing\":\"base-vda\",\"cache\""),
            "{line}"
        );
    }

    #[test]
    fn names_that_mean_nothing_here_are_said() {
        let mut none = config();
        none.networks.clear();
        let error = plugs(&sample(), &none).unwrap_err().to_string();
        assert_eq!(
            error,
            "this host has no network called `office` (it has: none): add it under [networks] in \
             the agent's configuration"
        );
        let config = config();
        let plug = plugs(&sample(), &config).unwrap().remove(&0).unwrap();
        assert_eq!((&*plug.bridge, plug.queues), ("br0", 1));
        assert_eq!(plug.port, Port::default());
    }
}
