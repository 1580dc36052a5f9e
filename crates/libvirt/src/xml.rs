//! The XML of a domain: what Longhaul has to know of it, and the paths that are others at the
//! destination. Everything else is passed on as libvirt wrote it.

mod firmware;
mod safe;

use longhaul_hypervisor::config::{HostConfig, ImageFormat, Network};
use longhaul_protocol::guest::{Channel, Disk, GuestDescription, Kernel, Nic};
use roxmltree::{Attribute, Document, Node, ParsingOptions};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The maximum number of nodes of a document that is read.
const NODES_MAX: u32 = 100_000;

/// The namespace of what libvirt passes on to QEMU as it is.
const QEMU_NAMESPACE: &str = "http://libvirt.org/schemas/domain/qemu/1.0";
/// The id of Longhaul's own monitor.
const MONITOR: &str = "longhaul";

/// Why a domain cannot be moved as its XML says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text} (hint: {hint})")]
pub struct XmlError {
    /// What is wrong.
    pub text: String,
    /// What to do.
    pub hint: String,
}

fn refuse<T>(text: impl Into<String>, hint: impl Into<String>) -> Result<T, XmlError> {
    Err(XmlError {
        text: text.into(),
        hint: hint.into(),
    })
}

/// A domain's XML.
#[derive(Debug)]
pub struct DomainXml<'a> {
    text: &'a str,
    document: Document<'a>,
}

/// A file that a domain uses on its host.
struct Place<'a> {
    /// Where its path stands in the text.
    range: Range<usize>,
    path: &'a str,
}

impl<'a> DomainXml<'a> {
    /// Reads a document.
    ///
    /// # Errors
    /// When it is no domain.
    pub fn read(text: &'a str) -> Result<Self, XmlError> {
        let options = ParsingOptions {
            nodes_limit: NODES_MAX,
            ..ParsingOptions::default()
        };
        let hint = "virsh dumpxml shows it; report this with its output";
        let document = match Document::parse_with_options(text, options) {
            Ok(document) => document,
            Err(error) => return refuse(format!("its XML is not understood: {error}"), hint),
        };
        match document.root_element().has_tag_name("domain") {
            true => Ok(Self { text, document }),
            false => refuse("its XML is not that of a domain", hint),
        }
    }

    fn at(&self, path: &[&str]) -> Option<Node<'_, 'a>> {
        let root = self.document.root_element();
        path.iter().try_fold(root, |node, name| child(node, name))
    }

    /// Returns where the text of an element stands.
    fn place_at(&self, path: &[&str]) -> Option<Place<'_>> {
        let text = self.at(path)?.first_child().filter(Node::is_text)?;
        Some(Place {
            range: text.range(),
            path: text.text().unwrap_or_default(),
        })
    }

    fn text_at(&self, path: &[&str]) -> Option<&str> {
        self.at(path)?.text().map(str::trim)
    }

    fn devices(&self, name: &'static str) -> impl Iterator<Item = Node<'_, 'a>> {
        let devices = self.at(&["devices"]);
        devices
            .into_iter()
            .flat_map(|devices| devices.children())
            .filter(move |device| device.has_tag_name(name))
    }

    /// Returns the domain's UUID.
    pub fn uuid(&self) -> Option<&str> {
        self.text_at(&["uuid"])
    }

    /// Returns the path of its QEMU.
    pub fn emulator(&self) -> Option<&str> {
        self.text_at(&["devices", "emulator"])
    }

    /// Returns its processor, such as `x86_64`.
    pub fn arch(&self) -> Option<&str> {
        self.at(&["os", "type"])?.attribute("arch")
    }

    /// Returns how it runs: `kvm` or `qemu`.
    pub fn kind(&self) -> Option<&str> {
        self.document.root_element().attribute("type")
    }

    /// Returns whether it has a TPM.
    pub fn has_tpm(&self) -> bool {
        self.devices("tpm").next().is_some()
    }

    /// Returns what the domain is in the terms of guests: the files and networks of this host by
    /// their names in its configuration.
    ///
    /// # Errors
    /// The first reason for which it cannot be moved.
    pub fn description(&self, config: &HostConfig) -> Result<GuestDescription, XmlError> {
        self.refuse_what_stays()?;
        let hint = "virsh dumpxml shows it";
        let Some(name) = self.text_at(&["name"]) else {
            return refuse("it has no name", hint);
        };
        let machine = self.at(&["os", "type"]);
        let machine = machine.and_then(|it| it.attribute("machine"));
        let (Some(machine), Some(memory_mib)) = (machine, self.memory_mib()) else {
            return refuse("it has no machine type, or no memory", hint);
        };
        let vcpus = self.text_at(&["vcpu"]).and_then(|it| it.parse().ok());
        let cpu = self.at(&["cpu"]);
        let model = self.text_at(&["cpu", "model"]);
        let cpu = model.or(match cpu.and_then(|cpu| cpu.attribute("mode")) {
            Some("host-passthrough" | "maximum") => Some("host"),
            _ => None,
        });
        Ok(GuestDescription {
            name: name.to_owned(),
            machine: machine.to_owned(),
            cpu: cpu.unwrap_or("qemu64").to_owned(),
            vcpus: vcpus.unwrap_or(1),
            memory_mib,
            firmware: self.firmware(config)?,
            kernel: self.kernel(config)?,
            disks: self.disks(config)?,
            nics: self.nics(config)?,
            channels: self.channels(),
            hardware: None,
        })
    }

    /// Refuses devices of which a part would stay behind.
    fn refuse_what_stays(&self) -> Result<(), XmlError> {
        const STAY: [(&str, &str); 3] = [
            ("hostdev", "a device of the host"),
            ("filesystem", "a folder of the host"),
            ("shmem", "memory that it shares with others"),
        ];
        for (element, what) in STAY {
            if self.devices(element).next().is_some() {
                let hint = "detach it (virsh detach-device), or move the guest with virsh migrate";
                return refuse(format!("it has {what} (<{element}>)"), hint);
            }
        }
        self.refuse_tpm_of_host()
    }

    fn memory_mib(&self) -> Option<u64> {
        let memory = self.at(&["memory"])?;
        let number: u64 = memory.text()?.trim().parse().ok()?;
        let unit = match memory.attribute("unit").unwrap_or("KiB") {
            "b" | "bytes" => 1,
            "KB" => 1000,
            "k" | "KiB" => 1 << 10,
            "MB" => 1_000_000,
            "M" | "MiB" => 1 << 20,
            "GB" => 1_000_000_000,
            "G" | "GiB" => 1 << 30,
            _ => return None,
        };
        Some(number.checked_mul(unit)?.div_ceil(1 << 20))
    }

    fn kernel(&self, config: &HostConfig) -> Result<Option<Kernel>, XmlError> {
        let [kernel, initrd] = ["kernel", "initrd"].map(|it| self.text_at(&["os", it]));
        let Some(kernel) = kernel else {
            return Ok(None);
        };
        let is_it = |path: Option<&str>, known: Option<&PathBuf>| match (path, known) {
            (Some(path), Some(known)) => same(path, known),
            (None, None) => true,
            _ => false,
        };
        let mut known = config.kernels.iter();
        let found = known.find(|(_, files)| {
            is_it(Some(kernel), Some(&files.kernel)) && is_it(initrd, files.initrd.as_ref())
        });
        let Some((name, _)) = found else {
            let more = initrd.map(|path| format!("\ninitrd = \"{path}\""));
            let hint = format!(
                "add to the configuration of both hosts:\n[kernels.NAME]\nkernel = \"{kernel}\"{}",
                more.unwrap_or_default()
            );
            let text = format!("its kernel is {kernel}, which no name of the configuration is");
            return refuse(text, hint);
        };
        let line = self.text_at(&["os", "cmdline"]).unwrap_or_default();
        Ok(Some(Kernel {
            name: name.clone(),
            command_line: line.to_owned(),
        }))
    }

    fn disks(&self, config: &HostConfig) -> Result<Vec<Disk>, XmlError> {
        let mut disks = Vec::new();
        for disk in self.devices("disk") {
            let target = child(disk, "target").and_then(|it| it.attribute("dev"));
            let called = target.unwrap_or("without a name");
            let Some(source) = child(disk, "source") else {
                // An empty drive.
                continue;
            };
            let Some(path) = path_of(source) else {
                let kind = disk.attribute("type").unwrap_or_default();
                let hint = "give it a file or a volume (<disk type='file'> or 'block')";
                return refuse(format!("disk {called} is on {kind:?}"), hint);
            };
            let format = child(disk, "driver").and_then(|driver| driver.attribute("type"));
            let format = match format.unwrap_or("raw") {
                "raw" => ImageFormat::Raw,
                "qcow2" => ImageFormat::Qcow2,
                other => {
                    let hint = "convert it to raw or qcow2 (qemu-img convert)";
                    return refuse(format!("disk {called} is {other}"), hint);
                }
            };
            let mut images = config.images.iter();
            let image = images.find(|(_, image)| same(path.value(), &image.path));
            let Some((name, image)) = image else {
                let written = match format {
                    ImageFormat::Raw => "raw",
                    ImageFormat::Qcow2 => "qcow2",
                };
                let hint = format!(
                    "add to the configuration of both hosts, each with its own path:\n\
                     [images.NAME]\npath = \"{}\"\nformat = \"{written}\"\nlocal = true",
                    path.value()
                );
                let text = format!(
                    "disk {called} is {}, which no image of the configuration is",
                    path.value()
                );
                return refuse(text, hint);
            };
            if image.format != format {
                let text = format!("disk {called} has another format than image {name}");
                return refuse(text, format!("correct `format` under [images.{name}]"));
            }
            let alias = child(disk, "alias").and_then(|alias| alias.attribute("name"));
            disks.push(Disk {
                name: alias.unwrap_or(called).to_owned(),
                image: name.clone(),
                shared: !image.local,
                read_only: child(disk, "readonly").is_some(),
            });
        }
        Ok(disks)
    }

    fn nics(&self, config: &HostConfig) -> Result<Vec<Nic>, XmlError> {
        let mut nics = Vec::new();
        for card in self.devices("interface") {
            let mac = child(card, "mac").and_then(|mac| mac.attribute("address"));
            let mac = mac.unwrap_or_default();
            let kind = card.attribute("type").unwrap_or_default();
            let source = child(card, "source");
            let bridge = source.and_then(|source| source.attribute("bridge"));
            let is_it = |network: &Network| match (network, bridge) {
                (Network::Bridge(port), Some(bridge)) => port.bridge == bridge,
                _ => false,
            };
            let found = config.networks.iter().find(|(_, it)| is_it(it));
            let Some((network, _)) = found else {
                let on =
                    bridge.map_or_else(|| format!("type {kind:?}"), |it| format!("bridge {it}"));
                let hint = match bridge {
                    Some(bridge) => format!(
                        "add to the configuration of both hosts, each with its own bridge:\n\
                         [networks]\nNAME = {{ bridge = \"{bridge}\" }}"
                    ),
                    None => "connect it to a bridge (<interface type='bridge'> or a network of \
                             libvirt with one)"
                        .to_owned(),
                };
                let text =
                    format!("card {mac} is on {on}, which no network of the configuration is");
                return refuse(text, hint);
            };
            nics.push(Nic {
                network: network.clone(),
                mac: mac.to_owned(),
                port: None,
            });
        }
        Ok(nics)
    }

    fn channels(&self) -> Vec<Channel> {
        let ports = self.devices("channel").filter_map(|channel| {
            let target = child(channel, "target")?;
            let name = target.attribute("name")?;
            (target.attribute("type") == Some("virtio")).then(|| Channel {
                name: name.to_owned(),
            })
        });
        ports.collect()
    }

    /// Returns whether its QEMU has a monitor of Longhaul's beside libvirt's.
    fn has_monitor(&self) -> bool {
        let lines = self.document.root_element().children();
        let lines = lines.filter(|line| line.has_tag_name((QEMU_NAMESPACE, "commandline")));
        let mut words = lines.flat_map(|line| line.children());
        words.any(|word| {
            let value = word.attribute("value").unwrap_or_default();
            value.starts_with(&format!("socket,id={MONITOR},"))
        })
    }

    /// Returns the change that gives its QEMU a monitor at this path. libvirt answers no question
    /// about a QEMU that waits for its stream.
    fn monitor_at(&self, path: &str) -> Option<(Range<usize>, String)> {
        if self.has_monitor() {
            return None;
        }
        let end = self.text.rfind("</domain>")?;
        let words =
            monitor_words(path).map(|word| format!("<longhaul:arg value='{}'/>", escaped(&word)));
        let line = format!(
            "  <longhaul:commandline xmlns:longhaul='{QEMU_NAMESPACE}'>{}</longhaul:commandline>\n",
            words.concat()
        );
        Some((end..end, line))
    }

    /// Returns the XML for this host, whose QEMU has a monitor of Longhaul's at this path.
    ///
    /// # Errors
    /// As [`Self::for_host`].
    pub fn with_monitor(
        &self,
        guest: &GuestDescription,
        config: &HostConfig,
        monitor: &str,
    ) -> Result<String, XmlError> {
        let text = self.changed(guest, config, self.monitor_at(monitor))?;
        accept(text, guest, config, Some(monitor))
    }

    /// Returns the XML for this host: with the paths and bridges that the names in the guest's
    /// description stand for here.
    ///
    /// # Errors
    /// When the description does not fit the XML, or a name is unknown here.
    pub fn for_host(
        &self,
        guest: &GuestDescription,
        config: &HostConfig,
    ) -> Result<String, XmlError> {
        let text = self.changed(guest, config, None)?;
        accept(text, guest, config, None)
    }

    /// Returns the disks that have a file: the name under which the guest sees each, and the file.
    fn disks_with_files(&self) -> Vec<(Option<&str>, Attribute<'_, '_>)> {
        let disks = self.devices("disk").filter_map(|disk| {
            let target = child(disk, "target").and_then(|target| target.attribute("dev"));
            Some((target, path_of(child(disk, "source")?)?))
        });
        disks.collect()
    }

    /// Returns the guest that a definition of this domain, which runs, describes: without the disks
    /// and cards that were plugged in since its start.
    pub fn defined(
        &self,
        definition: &DomainXml<'_>,
        guest: &GuestDescription,
    ) -> GuestDescription {
        let running = self.disks_with_files();
        let disks = definition.disks_with_files().into_iter();
        let disks = disks.filter_map(|(target, _)| {
            let at = running.iter().position(|(name, _)| *name == target)?;
            guest.disks.get(at).cloned()
        });
        let cards = definition.devices("interface").filter_map(|card| {
            let mac = child(card, "mac")?.attribute("address")?;
            guest.nics.iter().find(|nic| nic.mac == mac).cloned()
        });
        GuestDescription {
            disks: disks.collect(),
            nics: cards.collect(),
            ..guest.clone()
        }
    }

    fn changed(
        &self,
        guest: &GuestDescription,
        config: &HostConfig,
        more: Option<(Range<usize>, String)>,
    ) -> Result<String, XmlError> {
        let unknown = |what: &str, name: &str| {
            let hint = format!("name it in the configuration, under [{what}]");
            refuse(format!("this host has no `{name}` under [{what}]"), hint)
        };
        let mut changes: Vec<(Range<usize>, String)> = Vec::new();
        let change = |place: Place<'_>, path: &Path| {
            let differs = Path::new(place.path) != path;
            differs.then(|| (place.range, escaped(&path.display().to_string())))
        };
        if let Some(kernel) = &guest.kernel {
            let Some(files) = config.kernels.get(&kernel.name) else {
                return unknown("kernels", &kernel.name);
            };
            let initrd = files.initrd.as_ref();
            for (element, path) in [("kernel", Some(&files.kernel)), ("initrd", initrd)] {
                if let (Some(place), Some(path)) = (self.place_at(&["os", element]), path) {
                    changes.extend(change(place, path));
                }
            }
        }
        if let Some(name) = &guest.firmware {
            let Some(code) = config.firmware.get(name) else {
                return unknown("firmware", name);
            };
            for (place, path) in self.firmware_places(code, &config.system_firmware) {
                changes.extend(change(place, path));
            }
        }
        let paths = self.disks_with_files();
        if paths.len() != guest.disks.len() {
            return refuse(
                format!(
                    "its XML has {} disks, and what runs {}",
                    paths.len(),
                    guest.disks.len()
                ),
                "start the domain again if its definition was edited; otherwise report this",
            );
        }
        for (disk, (_, path)) in guest.disks.iter().zip(paths) {
            let Some(image) = config.images.get(&disk.image) else {
                return unknown("images", &disk.image);
            };
            let place = Place {
                range: path.range_value(),
                path: path.value(),
            };
            changes.extend(change(place, &image.path));
        }
        for (nic, card) in guest.nics.iter().zip(self.devices("interface")) {
            let Some(Network::Bridge(port)) = config.networks.get(&nic.network) else {
                return unknown("networks", &nic.network);
            };
            let source = child(card, "source");
            let bridge = source.and_then(|source| attribute(source, "bridge"));
            if card.attribute("type") == Some("bridge") {
                if let Some(bridge) = bridge {
                    let place = Place {
                        range: bridge.range_value(),
                        path: bridge.value(),
                    };
                    changes.extend(change(place, Path::new(&port.bridge)));
                }
                continue;
            }
            // A network of libvirt's at the source: here the card is on the bridge.
            if let (Some(source), Some(kind)) = (source, attribute(card, "type")) {
                changes.push((kind.range_value(), "bridge".to_owned()));
                let bridge = format!("<source bridge='{}'/>", escaped(&port.bridge));
                changes.push((source.range(), bridge));
            }
        }
        changes.extend(more);
        changes.sort_by_key(|(range, _)| range.start);
        let mut text = String::new();
        let mut at = 0;
        for (range, new) in changes {
            text.push_str(self.text.get(at..range.start).unwrap_or_default());
            text.push_str(&new);
            at = range.end;
        }
        text.push_str(self.text.get(at..).unwrap_or_default());
        Ok(text)
    }
}

/// The words that give a QEMU a monitor of Longhaul's at this path.
fn monitor_words(path: &str) -> [String; 4] {
    [
        "-chardev".to_owned(),
        format!("socket,id={MONITOR},path={path},server=on,wait=off"),
        "-mon".to_owned(),
        format!("chardev={MONITOR},mode=control"),
    ]
}

/// Returns the XML of an arriving domain if this host's libvirt may have it: it must be the guest
/// that was offered, and name nothing else of this host.
fn accept(
    text: String,
    guest: &GuestDescription,
    config: &HostConfig,
    monitor: Option<&str>,
) -> Result<String, XmlError> {
    let read = DomainXml::read(&text)?;
    safe::check(&read.document, config, monitor)?;
    let arrives = read.description(config)?;
    let images = |guest: &GuestDescription| -> Vec<(String, bool)> {
        let disks = guest.disks.iter();
        disks
            .map(|disk| (disk.image.clone(), disk.read_only))
            .collect()
    };
    // What a card's port is like is a matter of the bridge, and not of the XML.
    let cards = |guest: &GuestDescription| -> Vec<(String, String)> {
        let cards = guest.nics.iter();
        cards
            .map(|it| (it.network.clone(), it.mac.clone()))
            .collect()
    };
    // What was plugged in while the domain runs need not be in its definition.
    let is_definition = monitor.is_none();
    let fits =
        |arrives: u64, offered: u64| arrives == offered || is_definition && arrives < offered;
    let parts = [
        ("name", arrives.name == guest.name),
        ("machine type", arrives.machine == guest.machine),
        (
            "number of vCPUs",
            fits(arrives.vcpus.into(), guest.vcpus.into()),
        ),
        ("memory", fits(arrives.memory_mib, guest.memory_mib)),
        ("kernel", arrives.kernel == guest.kernel),
        // A definition may leave the choice to libvirt.
        (
            "firmware",
            arrives.firmware == guest.firmware || is_definition && arrives.firmware.is_none(),
        ),
        ("set of cards", cards(&arrives) == cards(guest)),
        ("set of disks", images(&arrives) == images(guest)),
    ];
    match parts.iter().find(|(_, is_same)| !is_same) {
        None => Ok(text),
        Some((part, _)) => {
            let which = if is_definition { "definition" } else { "XML" };
            refuse(
                format!("its {which} has another {part} than the guest that was offered"),
                "start the domain again if it was edited; otherwise report this",
            )
        }
    }
}

pub(crate) fn child<'a, 'i>(node: Node<'a, 'i>, name: &str) -> Option<Node<'a, 'i>> {
    node.children().find(|child| child.has_tag_name(name))
}

fn attribute<'a, 'i>(node: Node<'a, 'i>, name: &str) -> Option<Attribute<'a, 'i>> {
    node.attributes().find(|attribute| attribute.name() == name)
}

/// Returns the path of a disk's source.
fn path_of<'a, 'i>(source: Node<'a, 'i>) -> Option<Attribute<'a, 'i>> {
    attribute(source, "file").or_else(|| attribute(source, "dev"))
}

/// Returns whether two paths are the same file.
fn same(one: &str, other: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    real(Path::new(one)) == real(other)
}

/// Returns a text as it stands in XML, between quotes of either kind too.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&apos;"),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests;
