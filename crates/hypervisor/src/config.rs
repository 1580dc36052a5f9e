//! Defines the host's configuration: the meaning of the names in guest descriptions on this host.
//!
//! It is the part of the agent's TOML document about guests. None of it is ever from a peer: paths,
//! bridges and programs are named only here.

use crate::description::is_name;
use crate::firmware::SystemFirmware;
pub use crate::managed::{NamedByManagers, ProxmoxConfig};
use longhaul_protocol::port::{MTU_MAX, MTU_MIN, Port, VLAN_MAX};
use longhaul_protocol::units::parse_bytes;
use serde::{Deserialize, Deserializer, Serialize, de};
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, PoisonError, RwLock};

/// The maximum length of a host's name, in bytes.
const HOST_NAME_BYTES_MAX: usize = 63;

/// The resources that this host offers its guests.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostConfig {
    /// Folder of all state that must outlive the agent.
    #[serde(default = "default_state")]
    pub state: PathBuf,
    /// QEMU on this host.
    pub qemu: QemuConfig,
    /// libvirt on this host.
    #[serde(default)]
    pub libvirt: LibvirtConfig,
    /// Proxmox VE on this host.
    #[serde(default)]
    pub proxmox: ProxmoxConfig,
    /// What the managers of guests have named. It is no part of the document.
    #[serde(skip)]
    pub named: NamedByManagers,
    /// Disk images by name.
    #[serde(default)]
    pub images: BTreeMap<String, Image>,
    /// Networks by name.
    #[serde(default)]
    pub networks: BTreeMap<String, Network>,
    /// Networks of the host's realm. They are no part of the document.
    #[serde(skip)]
    pub realm_networks: RealmNetworks,
    /// Firmware images by name.
    #[serde(default)]
    pub firmware: BTreeMap<String, PathBuf>,
    /// Firmware of this host that needs no name. It is no part of the document.
    #[serde(skip)]
    pub system_firmware: SystemFirmware,
    /// Kernels for guests that do not boot from a disk, by name.
    #[serde(default)]
    pub kernels: BTreeMap<String, KernelFiles>,
    /// Folders that guests see by 9p, by name.
    #[serde(default)]
    pub folders: BTreeMap<String, PathBuf>,
}

/// The networks of a host's realm that are open on it, by name. They come and go while the agent
/// runs. Cheap to clone; all clones are one.
#[derive(Debug, Clone, Default)]
pub struct RealmNetworks(Arc<RwLock<BTreeMap<String, Network>>>);

impl RealmNetworks {
    /// Replaces them by bridges, given by the networks' names.
    pub fn set(&self, bridges: BTreeMap<String, String>) {
        let bridges = bridges.into_iter().map(|(name, bridge)| {
            let port = BridgePort::of(&bridge);
            (name, Network::Bridge(port))
        });
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = bridges.collect();
    }

    fn all(&self) -> BTreeMap<String, Network> {
        let networks = self.0.read().unwrap_or_else(PoisonError::into_inner);
        networks.clone()
    }
}

impl PartialEq for RealmNetworks {
    fn eq(&self, other: &Self) -> bool {
        self.all() == other.all()
    }
}

impl Eq for RealmNetworks {}

/// QEMU on this host.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QemuConfig {
    /// Label of the preferred emulator; optional where there is only one.
    #[serde(default)]
    pub default: Option<String>,
    /// QEMU's programs by label.
    pub emulators: BTreeMap<String, PathBuf>,
    /// The executor of the guests' instructions.
    #[serde(default)]
    pub accelerator: AcceleratorChoice,
    /// The user that QEMU runs as; defaults to the agent's own, unless that is root.
    #[serde(default)]
    pub run_as: Option<String>,
    /// The largest amount of memory that all guests of this host may have together, in bytes.
    #[serde(default, deserialize_with = "size")]
    pub memory_limit: Option<u64>,
}

/// libvirt on this host.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LibvirtConfig {
    /// Whether its guests are guests of this host.
    pub enabled: bool,
    /// The socket of its daemon; by default that of `virtqemud` or `libvirtd`, if there is one.
    pub socket: Option<PathBuf>,
}

impl Default for LibvirtConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            socket: None,
        }
    }
}

/// A root agent whose configuration does not say that QEMU may run as root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the agent is root, so QEMU would run as root, and the configuration does not say that it may"
)]
pub struct RunsAsRoot;

impl RunsAsRoot {
    /// What to do about it.
    pub const HINT: &str = "under [qemu], name a user for QEMU: `run_as = \"longhaul-qemu\"` \
         (docs/operating.md); where QEMU is to run as root: `run_as = \"root\"`";
}

impl QemuConfig {
    /// Refuses to run QEMU as root where the configuration does not say so.
    pub fn check_user(&self) -> Result<(), RunsAsRoot> {
        self.check_user_of(nix::unistd::geteuid())
    }

    fn check_user_of(&self, agent: nix::unistd::Uid) -> Result<(), RunsAsRoot> {
        match agent.is_root() && self.run_as.is_none() {
            true => Err(RunsAsRoot),
            false => Ok(()),
        }
    }
}

/// The choice of the executor of the guests' instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AcceleratorChoice {
    /// KVM where a test guest runs with it, otherwise TCG.
    #[default]
    Auto,
    /// The processor, by KVM.
    Kvm,
    /// QEMU's own translator.
    Tcg,
}

/// A disk image.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Image {
    /// Path of the image.
    pub path: PathBuf,
    /// Format of the file.
    pub format: ImageFormat,
    /// Whether to bypass this host's page cache; the default is yes for shared disks.
    #[serde(default)]
    pub direct: Option<bool>,
    /// Whether QEMU locks the file; off only for storage without locks. The right to run a guest
    /// does not depend on these locks.
    #[serde(default = "yes")]
    pub locks: bool,
    /// Whether no other host sees it: it then moves along with an attached guest, as a disk or as
    /// the variables of its firmware. Descriptions of launched guests specify this themselves.
    #[serde(default)]
    pub local: bool,
    /// The same file on another host, where neither host can detect that: the operator's statement.
    #[serde(default)]
    pub same_file_as: Option<SameFile>,
    /// Whether an arriving disk may be written to it, if it is a volume, and over what.
    #[serde(default)]
    pub volume: Option<VolumeContent>,
}

/// The operator's statement about what is on a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VolumeContent {
    /// Nothing: it reads as zeros. That is checked.
    Empty,
    /// Something that is not needed. This applies until a guest has arrived on it for the first
    /// time.
    Overwrite,
    /// It is not there: the manager of the guest allocates it for an arriving disk. No
    /// configuration says this.
    #[serde(skip)]
    Absent,
}

/// A file of another host, written as `HOST:PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SameFile {
    /// The name by which this host trusts the other one.
    pub host: String,
    /// The file's path there.
    pub path: String,
}

impl SameFile {
    /// Returns whether it is this path of this host.
    pub fn is(&self, host: &str, path: &str) -> bool {
        self.host == host && self.path == path
    }
}

impl FromStr for SameFile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || {
            "is written `HOST:PATH`: a host that this one trusts, and the whole path of the file \
             there, such as \"london:/srv/images/web.img\""
                .to_owned()
        };
        let (host, path) = text.split_once(':').ok_or_else(wrong)?;
        if !is_name(host, HOST_NAME_BYTES_MAX) || check_path(Path::new(path)).is_err() {
            return Err(wrong());
        }
        Ok(Self {
            host: host.to_owned(),
            path: path.to_owned(),
        })
    }
}

impl<'de> Deserialize<'de> for SameFile {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let parsed = text.parse();
        parsed.map_err(|problem: String| de::Error::custom(format!("`same_file_as` {problem}")))
    }
}

fn yes() -> bool {
    true
}

/// Format of an image file; never guessed from its content, which the guest could write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ImageFormat {
    /// Raw: the disk, byte for byte.
    Raw,
    /// QEMU's copy-on-write format.
    Qcow2,
}

/// The meaning of a network on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Network {
    /// A card without a link.
    None,
    /// QEMU's user network, isolated from the host and everything else.
    User,
    /// QEMU's user network, through which the guest reaches whatever this host reaches.
    Nat,
    /// A port of a Linux bridge. It is written `{ bridge = "br0", vlan = 10, mtu = 9000 }`.
    Bridge(BridgePort),
}

impl<'de> Deserialize<'de> for Network {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> de::Visitor<'de> for Visitor {
            type Value = Network;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"none\", \"user\", \"nat\" or a table like { bridge = \"br0\" }")
            }

            fn visit_str<E: de::Error>(self, word: &str) -> Result<Network, E> {
                match word {
                    "none" => Ok(Network::None),
                    "user" => Ok(Network::User),
                    "nat" => Ok(Network::Nat),
                    other => Err(E::unknown_variant(other, &["none", "user", "nat"])),
                }
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<Network, A::Error> {
                let table = de::value::MapAccessDeserializer::new(map);
                BridgePort::deserialize(table).map(Network::Bridge)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

/// A port of a Linux bridge.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BridgePort {
    /// The bridge.
    pub bridge: String,
    /// The VLAN of the port, whose frames have no tag there. 0: as the bridge makes each new port.
    /// Where absent, a guest that arrives has the VLANs that it had.
    #[serde(default)]
    pub vlan: Option<u16>,
    /// The MTU of the port. Where absent, a guest that arrives has the one that it had.
    #[serde(default)]
    pub mtu: Option<u32>,
}

impl BridgePort {
    /// Returns a port of a bridge, with no more properties.
    pub fn of(bridge: &str) -> Self {
        Self {
            bridge: bridge.to_owned(),
            ..Self::default()
        }
    }

    /// Returns the port of a card that had this one where it came from.
    pub fn port(&self, had: Option<&Port>) -> Port {
        let mut port = had.cloned().unwrap_or_default();
        match self.vlan {
            None => {}
            Some(0) => port.vlans = Vec::new(),
            Some(vlan) => port.vlans = Port::untagged(vlan),
        }
        port.mtu = self.mtu.or(port.mtu);
        port
    }

    fn check(&self) -> Result<(), (&'static str, String)> {
        check_interface(&self.bridge).map_err(|problem| ("bridge", problem))?;
        if self.vlan.is_some_and(|vlan| vlan > VLAN_MAX) {
            return Err(("vlan", format!("is more than {VLAN_MAX}")));
        }
        match self.mtu {
            Some(mtu) if !(MTU_MIN..=MTU_MAX).contains(&mtu) => {
                Err(("mtu", format!("is not from {MTU_MIN} to {MTU_MAX}")))
            }
            _ => Ok(()),
        }
    }
}

/// The files of a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelFiles {
    /// The kernel.
    pub kernel: PathBuf,
    /// Its initial RAM file system.
    #[serde(default)]
    pub initrd: Option<PathBuf>,
}

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// It is not TOML of the right shape; the message has line and column.
    #[error("{}: {source}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        source: toml::de::Error,
    },
    /// A value is well formed and cannot be used.
    #[error("{}: `{key}` {problem}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// Key of the value in the file.
        key: String,
        /// The problem, and what to do.
        problem: String,
    },
}

impl HostConfig {
    /// Gives this host's own firmware the names of its files, where the document has no such name.
    #[must_use]
    pub fn with_system_firmware(mut self, system: SystemFirmware) -> Self {
        for (name, code) in system.names() {
            self.firmware.entry(name).or_insert(code);
        }
        self.system_firmware = system;
        self
    }

    /// Returns an image of this host: one of the document, or one that a manager has named.
    pub fn image(&self, name: &str) -> Option<Image> {
        let named = || self.named.images().remove(name);
        self.images.get(name).cloned().or_else(named)
    }

    /// Returns all images of this host, by name.
    pub fn all_images(&self) -> BTreeMap<String, Image> {
        let mut images = self.named.images();
        images.extend(self.images.clone());
        images
    }

    /// Returns the networks of this host, by name: those of the document, and those of the realm
    /// and of the managers of guests that have other names.
    pub fn all_networks(&self) -> BTreeMap<String, Network> {
        let mut networks = self.named.networks();
        networks.extend(self.realm_networks.all());
        networks.extend(self.networks.clone());
        networks
    }

    /// Reads and checks a file that has only this part.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        let config: Self = toml::from_str(&text).map_err(|source| ConfigError::Parse {
            path: path.to_owned(),
            source,
        })?;
        config.check(path)?;
        Ok(config)
    }

    /// Checks constraints that the types cannot express; `file` is the configuration's origin.
    ///
    /// Files of images and kernels are not examined: they may appear and disappear while the agent
    /// runs.
    pub fn check(&self, file: &Path) -> Result<(), ConfigError> {
        let problem = |key: String, problem: String| ConfigError::Value {
            path: file.to_owned(),
            key,
            problem,
        };
        self.default_emulator_label()
            .map_err(|text| problem("qemu.default".to_owned(), text))?;
        let emulators = labelled("qemu.emulators", &self.qemu.emulators);
        let firmware = labelled("firmware", &self.firmware);
        let folders = labelled("folders", &self.folders);
        let images = self
            .images
            .iter()
            .map(|(name, image)| (format!("images.{name}.path"), &image.path));
        let kernels = self
            .kernels
            .iter()
            .map(|(name, files)| (format!("kernels.{name}.kernel"), &files.kernel));
        let initrds = self.kernels.iter().filter_map(|(name, files)| {
            let initrd = files.initrd.as_ref()?;
            Some((format!("kernels.{name}.initrd"), initrd))
        });
        let state = std::iter::once(("state".to_owned(), &self.state));
        for (key, path) in state
            .chain(emulators)
            .chain(firmware)
            .chain(folders)
            .chain(images)
            .chain(kernels)
            .chain(initrds)
        {
            check_path(path).map_err(|text| problem(key, text))?;
        }
        let both = |image: &&Image| image.local && image.same_file_as.is_some();
        if let Some((name, _)) = self.images.iter().find(|(_, image)| both(image)) {
            let text =
                "says that another host sees the image, and `local` that none does: leave one out";
            return Err(problem(
                format!("images.{name}.same_file_as"),
                text.to_owned(),
            ));
        }
        for (name, network) in &self.networks {
            if let Network::Bridge(port) = network {
                port.check()
                    .map_err(|(key, text)| problem(format!("networks.{name}.{key}"), text))?;
            }
        }
        if let Some(user) = &self.qemu.run_as {
            crate::process::Account::of(user)
                .map_err(|text| problem("qemu.run_as".to_owned(), text))?;
        }
        Ok(())
    }

    /// Returns the label of the preferred emulator.
    pub fn default_emulator(&self) -> Option<&str> {
        self.default_emulator_label().ok()
    }

    fn default_emulator_label(&self) -> Result<&str, String> {
        let labels: Vec<&str> = self.qemu.emulators.keys().map(String::as_str).collect();
        match (&self.qemu.default, labels.as_slice()) {
            (_, []) => Err("has nothing to choose from: name at least one QEMU under \
                 [qemu.emulators], such as \"10.0\" = \"/usr/bin/qemu-system-x86_64\""
                .to_owned()),
            (Some(label), _) if self.qemu.emulators.contains_key(label) => Ok(label),
            (Some(label), _) => Err(format!(
                "names `{label}`, and [qemu.emulators] has: {}",
                labels.join(", ")
            )),
            (None, [only]) => Ok(only),
            (None, _) => Err(format!("is needed: choose one of {}", labels.join(", "))),
        }
    }
}

fn labelled<'a>(
    table: &'a str,
    paths: &'a BTreeMap<String, PathBuf>,
) -> impl Iterator<Item = (String, &'a PathBuf)> {
    paths
        .iter()
        .map(move |(name, path)| (format!("{table}.{name}"), path))
}

fn check_path(path: &Path) -> Result<(), String> {
    if !path.is_absolute() {
        return Err(format!(
            "is `{}`: write the whole path, from `/` on",
            path.display()
        ));
    }
    if path
        .to_str()
        .is_none_or(|text| text.contains(char::is_control))
    {
        return Err("holds a character that is not printable".to_owned());
    }
    Ok(())
}

fn check_interface(name: &str) -> Result<(), String> {
    let known = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > 15 || !name.chars().all(known) {
        return Err(format!(
            "is `{name}`, which is no interface's name (1 to 15 letters, digits, `-`, `_`, `.`)"
        ));
    }
    Ok(())
}

fn default_state() -> PathBuf {
    PathBuf::from("/var/lib/longhaul")
}

fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse_bytes(&text).map(Some).map_err(de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: &str = r#"
        state = "/srv/longhaul"
        [qemu]
        default = "10.0"
        accelerator = "tcg"
        memory_limit = "8GiB"
        [qemu.emulators]
        "7.2" = "/usr/bin/qemu-system-x86_64"
        "10.0" = "/opt/qemu/qemu-system-x86_64"
        [images.debian]
        path = "/srv/images/debian.qcow2"
        format = "qcow2"
        [networks]
        office = { bridge = "br0", vlan = 10 }
        lab = "none"
        cut-off = "user"
        [firmware]
        ovmf = "/usr/share/ovmf/OVMF.fd"
        [kernels.tiny]
        kernel = "/srv/vmlinuz"
        [folders]
        public = "/srv/public"
    "#;

    fn load(text: &str) -> Result<HostConfig, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("host.toml");
        std::fs::write(&path, text).unwrap();
        HostConfig::load(&path).map_err(|error| error.to_string())
    }

    #[test]
    fn a_root_agent_runs_qemu_as_root_only_where_that_is_said() {
        let (root, other) = (nix::unistd::Uid::from_raw(0), nix::unistd::Uid::from_raw(7));
        let qemu = |run_as: &str| -> QemuConfig {
            toml::from_str(&format!("{run_as}\n[emulators]\n")).unwrap()
        };
        assert_eq!(qemu("").check_user_of(root), Err(RunsAsRoot));
        assert_eq!(qemu("").check_user_of(other), Ok(()));
        assert_eq!(qemu("run_as = \"nobody\"").check_user_of(root), Ok(()));
        assert_eq!(qemu("run_as = \"root\"").check_user_of(root), Ok(()));
    }

    #[test]
    fn a_full_configuration_is_read() {
        let config = load(FULL).unwrap();
        assert_eq!(config.default_emulator(), Some("10.0"));
        assert_eq!(config.qemu.memory_limit, Some(8 << 30));
        let office = BridgePort {
            bridge: "br0".to_owned(),
            vlan: Some(10),
            mtu: None,
        };
        assert_eq!(config.networks["office"], Network::Bridge(office));
        assert_eq!(config.networks["cut-off"], Network::User);
        assert_eq!(config.images["debian"].format, ImageFormat::Qcow2);
    }

    #[test]
    fn a_single_emulator_needs_no_default() {
        let config = load("[qemu.emulators]\nmine = '/usr/bin/qemu-system-x86_64'").unwrap();
        assert_eq!(config.default_emulator(), Some("mine"));
        assert_eq!(config.state, Path::new("/var/lib/longhaul"));
        assert_eq!(config.qemu.accelerator, AcceleratorChoice::Auto);
    }

    #[test]
    fn what_an_operator_says_of_a_file_is_read_exactly() {
        let with = |line: &str| {
            let format = "format = \"qcow2\"";
            load(&FULL.replacen(format, &format!("{format}\n{line}"), 1))
        };
        let config = with("same_file_as = \"london:/dev/san/a:b\"").unwrap();
        let said = config.images["debian"].same_file_as.as_ref().unwrap();
        assert!(said.is("london", "/dev/san/a:b"));
        for (host, path) in [
            ("london", "/dev/san/a"),
            ("london", "/dev/san/a:b/"),
            ("London", "/dev/san/a:b"),
            ("", "/dev/san/a:b"),
        ] {
            assert!(!said.is(host, path), "{host}:{path}");
        }
        let wrong = [
            "/dev/san/a",
            "london",
            "london:",
            "london:a",
            ":/a",
            "lon don:/a",
        ];
        for wrong in wrong {
            let error = with(&format!("same_file_as = {wrong:?}")).unwrap_err();
            assert!(error.contains("`HOST:PATH`"), "{error}");
            assert!(error.contains("line"), "{error}");
        }
        let misspelt = with("same_file = \"london:/a\"").unwrap_err();
        assert!(misspelt.contains("unknown field `same_file`"), "{misspelt}");
        let both = with("same_file_as = \"london:/a\"\nlocal = true").unwrap_err();
        assert!(both.contains("`images.debian.same_file_as`"), "{both}");
    }

    #[test]
    fn mistakes_are_named_with_their_place() {
        for (from, to, expected) in [
            ("accelerator", "accelerater", "line 5"),
            ("\"tcg\"", "\"xen\"", "unknown variant `xen`"),
            ("\"8GiB\"", "\"much\"", "line 6"),
            (
                "default = \"10.0\"",
                "default = \"9\"",
                "`qemu.default` names `9`, and",
            ),
            (
                "default = \"10.0\"",
                "",
                "`qemu.default` is needed: choose one of 10.0, 7.2",
            ),
            (
                "/srv/vmlinuz",
                "vmlinuz",
                "`kernels.tiny.kernel` is `vmlinuz`: write the whole",
            ),
            ("/srv/images/", "images/", "`images.debian.path` is"),
            ("/srv/public", "public", "`folders.public` is `public`"),
            (
                "br0",
                "a,b",
                "`networks.office.bridge` is `a,b`, which is no interface's name",
            ),
            (
                "vlan = 10",
                "vlan = 4095",
                "`networks.office.vlan` is more than 4094",
            ),
            (
                "vlan = 10",
                "mtu = 60",
                "`networks.office.mtu` is not from 68 to 65535",
            ),
            (
                "\"qcow2\"",
                "\"vmdk\"",
                "unknown variant `vmdk`, expected `raw` or `qcow2`",
            ),
            (
                "default =",
                "run_as = \"nobody-like-this\"\ndefault =",
                "`qemu.run_as`",
            ),
        ] {
            assert!(FULL.contains(from), "{from}");
            let error = load(&FULL.replacen(from, to, 1)).unwrap_err();
            assert!(error.contains(expected), "{to}: {error}");
            assert!(error.contains("host.toml"), "{error}");
        }
        let error = load("[qemu]\n[qemu.emulators]").unwrap_err();
        assert!(error.contains("name at least one QEMU"), "{error}");
    }
}
