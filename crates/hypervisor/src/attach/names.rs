//! Maps what a guest uses on this host to the names of the host's configuration.

use super::cards;
use super::found::Inserted;
use super::options::shown;
use crate::config::{HostConfig, ImageFormat, Network};
use crate::observe::Blocker;
use crate::process_path;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// This host's names for the resources of one process.
pub(super) struct Names<'a> {
    pub(super) config: &'a HostConfig,
    pub(super) pid: i32,
    /// The VLANs of TAP devices on bridges that look at VLANs.
    pub(super) pvids: BTreeMap<String, u16>,
}

/// What the ports of Open vSwitch have as their master.
const OPEN_VSWITCH: &str = "ovs-system";

impl Names<'_> {
    /// Returns whether an image is invisible to other hosts.
    pub(super) fn is_local(&self, image: &str) -> bool {
        let image = self.config.images.get(image);
        image.is_some_and(|image| image.local)
    }

    /// Returns the name of a disk's image.
    pub(super) fn image(&self, what: &str, inserted: &Inserted) -> Result<String, Blocker> {
        let format = match (inserted.format.as_str(), inserted.protocol.as_str()) {
            ("raw" | "file" | "host_device", "file" | "host_device") => ImageFormat::Raw,
            ("qcow2", "file" | "host_device") => ImageFormat::Qcow2,
            (format, protocol) => {
                return Err(refuse(
                    format!(
                        "{what} is on {} over {}, which cannot be moved",
                        shown(format),
                        shown(protocol)
                    ),
                    "give the guest a raw or qcow2 image, or a volume".to_owned(),
                ));
            }
        };
        if inserted.encrypted {
            return Err(refuse(
                format!("{what} is encrypted by QEMU, and its key is on this host only"),
                "encrypt the disk in the guest, or its storage below QEMU".to_owned(),
            ));
        }
        let same = |path: &Path| self.is_same(&inserted.file, path);
        let found = self
            .config
            .images
            .iter()
            .find(|(_, image)| same(&image.path));
        let written = match format {
            ImageFormat::Raw => "raw",
            ImageFormat::Qcow2 => "qcow2",
        };
        match found {
            Some((name, image)) if image.format == format => Ok(name.clone()),
            Some((name, _)) => Err(refuse(
                format!(
                    "{what} is {written}, and the configuration says otherwise of image {name}"
                ),
                format!("write format = \"{written}\" under [images.{name}]"),
            )),
            None => Err(refuse(
                format!(
                    "{what} is {}, which no image of the configuration is",
                    shown(&inserted.file)
                ),
                format!(
                    "add to the configuration of both hosts, which must see the same file:\n\
                     [images.NAME]\npath = \"{}\"\nformat = \"{written}\"",
                    self.absolute(&inserted.file).display()
                ),
            )),
        }
    }

    /// Returns the name of a firmware.
    pub(super) fn firmware(&self, path: &str) -> Result<String, Blocker> {
        let found = self
            .config
            .firmware
            .iter()
            .find(|(_, known)| self.is_same(path, known));
        found.map(|(name, _)| name.clone()).ok_or_else(|| {
            refuse(
                format!(
                    "the firmware is {}, which no name of the configuration stands for",
                    shown(path)
                ),
                format!(
                    "add to the configuration of both hosts:\n[firmware]\nNAME = \"{}\"",
                    self.absolute(path).display()
                ),
            )
        })
    }

    /// Returns the name of a folder that the guest shares with this host.
    pub(super) fn folder(&self, path: &str) -> Result<String, Blocker> {
        let mut folders = self.config.folders.iter();
        let found = folders.find(|(_, known)| self.is_same(path, known));
        found.map(|(name, _)| name.clone()).ok_or_else(|| {
            refuse(
                format!(
                    "the guest shares folder {} with this host, which no name of the \
                     configuration stands for",
                    shown(path)
                ),
                format!(
                    "add to the configuration of both hosts, each with its own folder (the \
                     content is not copied):\n[folders]\nNAME = \"{}\"",
                    self.absolute(path).display()
                ),
            )
        })
    }

    /// Returns the name of a kernel and its initial RAM file system.
    pub(super) fn kernel(&self, kernel: &str, initrd: Option<&str>) -> Result<String, Blocker> {
        let found = self.config.kernels.iter().find(|(_, files)| {
            let initrds = match (initrd, &files.initrd) {
                (Some(initrd), Some(known)) => self.is_same(initrd, known),
                (None, None) => true,
                _ => false,
            };
            initrds && self.is_same(kernel, &files.kernel)
        });
        found.map(|(name, _)| name.clone()).ok_or_else(|| {
            let initrd = initrd.map_or(String::new(), |initrd| {
                format!("\ninitrd = \"{}\"", self.absolute(initrd).display())
            });
            refuse(
                format!(
                    "the kernel is {}, which no name of the configuration stands \
                     for",
                    shown(kernel)
                ),
                format!(
                    "add to the configuration of both hosts:\n[kernels.NAME]\nkernel = \
                     \"{}\"{initrd}",
                    self.absolute(kernel).display()
                ),
            )
        })
    }

    /// Returns the name of a network without a link.
    pub(super) fn unplugged(&self, card: &str) -> Result<String, Blocker> {
        let like = self.network_like(|network| *network == Network::None);
        like.ok_or_else(|| {
            refuse(
                format!(
                    "card {card} is not plugged in, and no network of the configuration is `none`"
                ),
                "add to the configuration of both hosts:\n[networks]\nNAME = \"none\"".to_owned(),
            )
        })
    }

    /// Returns the name of a user network: one without a way out, or one that reaches what the
    /// host reaches.
    pub(super) fn user(&self, card: &str, restrict: bool) -> Result<String, Blocker> {
        let (wanted, written) = match restrict {
            true => (Network::User, "user"),
            false => (Network::Nat, "nat"),
        };
        self.network_like(|network| *network == wanted)
            .ok_or_else(|| {
                let what = match restrict {
                    true => "is on QEMU's own network",
                    false => "reaches the world through this host (user network)",
                };
                refuse(
                    format!(
                        "card {card} {what}, and no network of the configuration is `{written}`"
                    ),
                    format!(
                        "add to the configuration of both hosts:\n[networks]\nNAME = \"{written}\""
                    ),
                )
            })
    }

    /// Returns the TAP device of a backend, by the settings that QEMU prints of it.
    pub(super) fn interface(&self, info: &str) -> Option<String> {
        if let Some(name) = cards::setting(info, "ifname") {
            return Some(name.to_owned());
        }
        let fd: u32 = cards::setting(info, "fd")?.parse().ok()?;
        let about = fs::read_to_string(format!("/proc/{}/fdinfo/{fd}", self.pid)).ok()?;
        let name = about.lines().find_map(|line| line.strip_prefix("iff:"))?;
        Some(name.trim().to_owned())
    }

    /// Returns the name of a bridge's network.
    pub(super) fn bridged(
        &self,
        card: &str,
        bridge: Option<&str>,
        interface: Option<&str>,
    ) -> Result<String, Blocker> {
        let bridge = match (bridge, interface) {
            (Some(bridge), _) => Some(bridge.to_owned()),
            (None, Some(interface)) => master(interface),
            (None, None) => None,
        };
        let bridge = match (bridge, interface) {
            (Some(bridge), _) if bridge != OPEN_VSWITCH => bridge,
            (bridge, _) => return Err(self.no_port(card, interface, bridge.is_some())),
        };
        let vlan = interface.and_then(|interface| self.pvids.get(interface).copied());
        let port = |network: &Network| match network {
            Network::Bridge(port) if port.bridge == bridge => Some(port.vlan),
            _ => None,
        };
        // A network of exactly this VLAN, or else one that says nothing of VLANs.
        let of_vlan = vlan.and_then(|vlan| self.network_like(|it| port(it) == Some(Some(vlan))));
        let any = || self.network_like(|it| matches!(port(it), Some(None | Some(0))));
        of_vlan.or_else(any).ok_or_else(|| {
            let (bridge, is_there) = (shown(&bridge), self.network_like(|it| port(it).is_some()));
            let text = match (vlan, is_there) {
                (Some(vlan), Some(name)) => format!(
                    "card {card} is in VLAN {vlan} of bridge {bridge}, and network {name} is in \
                     another one"
                ),
                _ => format!(
                    "card {card} is on bridge {bridge}, which no network of the configuration is"
                ),
            };
            let of_vlan = vlan.map_or(String::new(), |vlan| format!(", vlan = {vlan}"));
            refuse(
                text,
                format!(
                    "add to the configuration of this host:\n[networks]\nNAME = \
                     {{ bridge = \"{bridge}\"{of_vlan} }}"
                ),
            )
        })
    }

    /// Returns the refusal of a card whose other end is no port of a Linux bridge.
    fn no_port(&self, card: &str, interface: Option<&str>, open_vswitch: bool) -> Blocker {
        let device = shown(interface.unwrap_or("?"));
        let on_a_bridge = "start the guest with a TAP device that is a port of a Linux bridge";
        if open_vswitch {
            return refuse(
                format!(
                    "card {card}: TAP device {device} is a port of Open vSwitch, whose ports \
                     cannot be made again"
                ),
                format!("{on_a_bridge}; a bridge can be joined to Open vSwitch by a veth pair"),
            );
        }
        if interface.is_none() && self.has_macvtap() {
            return refuse(
                format!("card {card} is on a macvtap device, which cannot be made again elsewhere"),
                on_a_bridge.to_owned(),
            );
        }
        refuse(
            format!("card {card}: TAP device {device} is no port of a bridge"),
            "make it a port of a Linux bridge that the configuration names".to_owned(),
        )
    }

    /// Returns whether the process has a macvtap device open.
    fn has_macvtap(&self) -> bool {
        let files = fs::read_dir(format!("/proc/{}/fd", self.pid));
        let mut files = files.into_iter().flatten().filter_map(Result::ok);
        files.any(|file| {
            let path = fs::read_link(file.path()).unwrap_or_default();
            let number = path.to_str().and_then(|path| path.strip_prefix("/dev/tap"));
            number.is_some_and(|number| number.parse::<u32>().is_ok())
        })
    }

    fn network_like(&self, like: impl Fn(&Network) -> bool) -> Option<String> {
        let networks = self.config.all_networks();
        let mut networks = networks.into_iter();
        let found = networks.find(|(_, network)| like(network));
        found.map(|(name, _)| name)
    }

    /// Returns whether a path of that process is this file of ours, under any name.
    fn is_same(&self, theirs: &str, ours: &Path) -> bool {
        let identity = |path: &Path| fs::metadata(path).map(|file| (file.dev(), file.ino())).ok();
        let theirs = identity(&self.seen_by_it(theirs));
        theirs.is_some() && theirs == identity(ours)
    }

    /// Returns a path of that process, as this process can open it.
    pub(super) fn seen_by_it(&self, path: &str) -> PathBuf {
        process_path::seen_from_here(self.pid, Path::new(path))
    }

    /// Returns whether that process finds a file by this path again.
    pub(super) fn opens_again(&self, path: &str) -> bool {
        process_path::opens_again(self.pid, Path::new(path))
    }

    /// Returns a path of that process, made absolute.
    fn absolute(&self, path: &str) -> PathBuf {
        process_path::absolute(self.pid, Path::new(path))
    }
}

/// Returns the bridge that an interface is a port of.
fn master(interface: &str) -> Option<String> {
    if interface.contains('/') || interface.starts_with('.') {
        return None;
    }
    let link = fs::read_link(format!("/sys/class/net/{interface}/master")).ok()?;
    Some(link.file_name()?.to_string_lossy().into_owned())
}

fn refuse(text: String, hint: String) -> Blocker {
    Blocker { text, hint }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(networks: &str, pvid: Option<u16>) -> Result<String, Blocker> {
        let config: HostConfig =
            toml::from_str(&format!("[qemu.emulators]\n[networks]\n{networks}")).unwrap();
        let pvids = pvid.map(|pvid| ("tap7".to_owned(), pvid));
        let names = Names {
            config: &config,
            pid: std::process::id().cast_signed(),
            pvids: pvids.into_iter().collect(),
        };
        names.bridged("nic0", Some("br0"), Some("tap7"))
    }

    #[test]
    fn a_card_is_on_the_network_of_its_vlan() {
        let two = "office = { bridge = \"br0\", vlan = 10 }\n\
                   dmz = { bridge = \"br0\", vlan = 20 }\n";
        assert_eq!(chosen(two, Some(20)).unwrap(), "dmz");
        assert_eq!(chosen(two, Some(10)).unwrap(), "office");
        let other = chosen(two, Some(30)).unwrap_err();
        assert!(other.text.contains("in VLAN 30 of bridge br0"), "{other:?}");
        assert!(other.hint.contains("vlan = 30"), "{other:?}");
        let any = format!("{two}plain = {{ bridge = \"br0\" }}\n");
        assert_eq!(chosen(&any, Some(30)).unwrap(), "plain");
        assert_eq!(chosen(&any, None).unwrap(), "plain");
        let none = chosen("lab = \"none\"\n", Some(10)).unwrap_err();
        assert!(none.text.contains("on bridge br0"), "{none:?}");
    }

    #[test]
    fn what_is_no_port_of_a_linux_bridge_is_named() {
        let config: HostConfig = toml::from_str("[qemu.emulators]\n").unwrap();
        let names = Names {
            config: &config,
            pid: std::process::id().cast_signed(),
            pvids: BTreeMap::new(),
        };
        let refusal = names.no_port("nic0", Some("vnet3"), true);
        assert!(
            refusal.text.contains("vnet3 is a port of Open vSwitch"),
            "{refusal:?}"
        );
        assert!(refusal.hint.contains("veth pair"), "{refusal:?}");
        let refusal = names.no_port("nic0", Some("tap7"), false);
        assert!(
            refusal.text.contains("tap7 is no port of a bridge"),
            "{refusal:?}"
        );
    }
}
