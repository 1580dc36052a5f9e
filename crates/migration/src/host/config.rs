//! The agent's configuration: one TOML document. Every value has a default.

use crate::host::content_index::ContentConfig;
use crate::host::hooks::Hooks;
use crate::host::memory_cache::KeptMemoryConfig;
use crate::host::names::is_name;
use crate::host::paths::paths_of;
use crate::host::peer_limits::{HostTable, Limits, LimitsTable};
use crate::host::start_error::StartError;
use longhaul_api::Encoding;
use longhaul_hypervisor::config::{
    AcceleratorChoice, ConfigError, HostConfig, Image, KernelFiles, LibvirtConfig, NamedByManagers,
    Network, ProxmoxConfig, QemuConfig, RealmNetworks,
};
use longhaul_hypervisor::firmware::SystemFirmware;
use longhaul_image::store::{Place, PlaceError};
use longhaul_protocol::units::parse_bit_rate;
use longhaul_transport::PathTo;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The default path of the configuration.
pub(crate) const CONFIG_DEFAULT: &str = "/etc/longhaul/agent.toml";
/// Limit on the size of the configuration, in bytes.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// The path of a distribution's QEMU.
const QEMU_DEFAULT: &str = "/usr/bin/qemu-system-x86_64";

/// The agent's configuration.
#[derive(Debug, Clone)]
pub struct Config {
    /// The name of this host. Default: the machine's hostname.
    pub name: String,
    /// The folder of identity, trust, journals and guests.
    pub state: PathBuf,
    /// The UDP address for other agents.
    pub listen: SocketAddr,
    /// Addresses at which members of its realm reach this host, besides those of its interfaces.
    pub addresses: Vec<SocketAddr>,
    /// Whether the router of this host's site is asked for an open port.
    pub port_mapping: bool,
    /// The image repository.
    pub repository: Place,
    /// The addresses at which commands reach the agent.
    pub api: ApiConfig,
    /// The network paths that are used at once, by a trusted host's name or fingerprint.
    pub(crate) paths: Vec<(String, Vec<PathTo>)>,
    /// Limits on other hosts' use of this host.
    pub(crate) limits: Limits,
    /// Limit on the bandwidth of all migrations from this host together, in bits per second.
    pub(crate) bandwidth_bps: Option<u64>,
    /// The default encoding of memory.
    pub(crate) encoding: Encoding,
    /// The hypervisor's configuration for guests.
    pub hypervisor: Arc<HostConfig>,
    /// The programs that run before and after the steps of a migration.
    pub(crate) hooks: Hooks,
    /// The files that are indexed for arriving guests.
    pub(crate) content: Option<ContentConfig>,
    /// Devices of parcels, folders or block devices, that other hosts may use here, by name.
    pub parcel_devices: BTreeMap<String, PathBuf>,
    /// The memory cache, if it is configured.
    pub(crate) kept_memory: Option<KeptMemoryConfig>,
}

/// The valid bandwidth limits, in bits per second.
pub const BANDWIDTH_BPS: RangeInclusive<u64> = 100_000..=1_000_000_000_000;

/// The maximum number of configured addresses.
const ADDRESSES_MAX: usize = 8;

/// The TOML document.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    name: Option<String>,
    #[serde(default = "default_state")]
    state: PathBuf,
    #[serde(default = "default_listen")]
    listen: SocketAddr,
    #[serde(default)]
    addresses: Vec<SocketAddr>,
    #[serde(default)]
    port_mapping: bool,
    repository: Option<String>,
    #[serde(default)]
    api: ApiConfig,
    #[serde(default)]
    limits: LimitsTable,
    #[serde(default)]
    hosts: BTreeMap<String, HostTable>,
    bandwidth: Option<String>,
    #[serde(default)]
    encoding: Encoding,
    qemu: Option<QemuConfig>,
    #[serde(default)]
    libvirt: LibvirtConfig,
    #[serde(default)]
    proxmox: ProxmoxConfig,
    #[serde(default)]
    images: BTreeMap<String, Image>,
    #[serde(default)]
    networks: BTreeMap<String, Network>,
    #[serde(default)]
    firmware: BTreeMap<String, PathBuf>,
    #[serde(default)]
    kernels: BTreeMap<String, KernelFiles>,
    #[serde(default)]
    folders: BTreeMap<String, PathBuf>,
    #[serde(default)]
    parcel_devices: BTreeMap<String, PathBuf>,
    #[serde(default)]
    hooks: Hooks,
    content: Option<ContentConfig>,
    kept_memory: Option<KeptMemoryConfig>,
}

fn default_state() -> PathBuf {
    PathBuf::from("/var/lib/longhaul")
}

fn default_listen() -> SocketAddr {
    SocketAddr::from(([0, 0, 0, 0], 7400))
}

/// The addresses at which commands reach the agent.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ApiConfig {
    /// The unix socket. Only the agent's own user may use it.
    pub socket: PathBuf,
    /// The TCP address, if configured.
    pub tcp: Option<TcpConfig>,
}

/// The API over TCP. It always requires TLS and a token.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TcpConfig {
    /// The address.
    pub listen: SocketAddr,
    /// The file that contains the token: 32 to 512 printable characters.
    pub token_file: PathBuf,
    /// The certificate (PEM). By default the agent creates its own.
    pub certificate: Option<PathBuf>,
    /// Its private key (PEM).
    pub key: Option<PathBuf>,
}

impl Default for ApiConfig {
    fn default() -> Self {
        Self {
            socket: PathBuf::from(longhaul_api::SOCKET_DEFAULT),
            tcp: None,
        }
    }
}

/// Returns the configuration of a distribution's QEMU, if it is installed.
fn default_qemu() -> QemuConfig {
    let path = PathBuf::from(QEMU_DEFAULT);
    let emulators = path.exists().then(|| ("system".to_owned(), path));
    QemuConfig {
        default: None,
        emulators: emulators.into_iter().collect(),
        accelerator: AcceleratorChoice::Auto,
        run_as: None,
        memory_limit: None,
    }
}

fn machine_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|name| name.trim().to_owned())
        .ok()
        .filter(|name| is_name(name))
        .unwrap_or_else(|| "localhost".to_owned())
}

fn bandwidth(text: &str) -> Result<u64, String> {
    let rate = parse_bit_rate(text).map_err(|error| format!("`bandwidth = {text:?}`: {error}"))?;
    if !BANDWIDTH_BPS.contains(&rate) {
        return Err(format!(
            "`bandwidth = {text:?}`: from 100kbit to 1000gbit can be kept"
        ));
    }
    Ok(rate)
}

/// Checks the addresses at which others reach this host.
fn addresses(addresses: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, String> {
    if addresses.len() > ADDRESSES_MAX {
        return Err(format!("`addresses` has more than {ADDRESSES_MAX} entries"));
    }
    match addresses
        .iter()
        .find(|address| address.port() == 0 || address.ip().is_unspecified())
    {
        Some(wrong) => Err(format!(
            "`addresses`: others cannot reach this host at {wrong}; write an IP address and a port"
        )),
        None => Ok(addresses),
    }
}

/// Returns the network paths to each host that has some.
fn paths(
    hosts: &BTreeMap<String, HostTable>,
    listen: SocketAddr,
) -> Result<Vec<(String, Vec<PathTo>)>, String> {
    let tables = hosts.iter().filter(|(_, table)| !table.paths.is_empty());
    tables
        .map(|(name, table)| Ok((name.clone(), paths_of(name, &table.paths, listen)?)))
        .collect()
}

/// Checks the devices of parcels that other hosts may use here.
fn parcel_devices(devices: BTreeMap<String, PathBuf>) -> Result<BTreeMap<String, PathBuf>, String> {
    let mut names: BTreeMap<&Path, &str> = BTreeMap::new();
    for (name, path) in &devices {
        let wrong = |what: &str| Err(format!("`parcel_devices.{name} = {path:?}`: {what}"));
        if !is_name(name) {
            return wrong(
                "a name has 1 to 63 letters, digits, `-`, `_` and `.`, and begins with a letter \
                 or digit",
            );
        }
        if !path.is_absolute() {
            return wrong("the path must be absolute (begin with `/`)");
        }
        if let Some(other) = names.insert(path, name) {
            return wrong(&format!("{other} has the same path"));
        }
    }
    Ok(devices)
}

/// Returns the image repository. Default: a folder in the state folder.
fn repository(text: Option<&str>, state: &Path) -> Result<Place, String> {
    let Some(text) = text else {
        return Ok(Place::Folder(state.join("repository")));
    };
    let wrong = |what: &dyn std::fmt::Display| format!("`repository = {text:?}`: {what}");
    match text.parse().map_err(|error: PlaceError| wrong(&error))? {
        Place::Folder(folder) if !folder.is_absolute() => {
            Err(wrong(&"the path must be absolute (begin with `/`)"))
        }
        place => Ok(place),
    }
}

impl Config {
    /// Reads the configuration from a path. Without a path reads [`CONFIG_DEFAULT`], which may be
    /// missing.
    pub fn read(path: Option<&Path>) -> Result<Self, StartError> {
        let file = path.unwrap_or(Path::new(CONFIG_DEFAULT));
        let error = |what: String, hint: Option<&str>| StartError {
            message: format!("cannot read the configuration {}: {what}", file.display()),
            hint: hint.map(str::to_owned),
        };
        let text = match std::fs::metadata(file) {
            Ok(found) if found.len() > CONFIG_BYTES_MAX => {
                return Err(error("it is larger than 1 MiB".to_owned(), None));
            }
            Ok(_) => {
                std::fs::read_to_string(file).map_err(|other| error(other.to_string(), None))?
            }
            Err(missing) if missing.kind() == std::io::ErrorKind::NotFound && path.is_none() => {
                String::new()
            }
            Err(other) => return Err(error(other.to_string(), None)),
        };
        Self::parse(&text, file).map_err(|what| {
            error(
                what,
                Some("docs/operating.md, \"The host's configuration\", lists what it may hold"),
            )
        })
    }

    fn parse(text: &str, file: &Path) -> Result<Self, String> {
        let document: Document =
            toml::from_str(text).map_err(|error| error.to_string().trim_end().to_owned())?;
        let configured = document.qemu.is_some();
        let config = Self {
            name: document.name.unwrap_or_else(machine_name),
            state: document.state.clone(),
            listen: document.listen,
            addresses: addresses(document.addresses)?,
            port_mapping: document.port_mapping,
            repository: repository(document.repository.as_deref(), &document.state)?,
            api: document.api,
            paths: paths(&document.hosts, document.listen)?,
            limits: Limits::new(&document.limits, &document.hosts)?,
            bandwidth_bps: document.bandwidth.as_deref().map(bandwidth).transpose()?,
            encoding: document.encoding,
            hypervisor: Arc::new(
                HostConfig {
                    state: document.state,
                    qemu: document.qemu.unwrap_or_else(default_qemu),
                    libvirt: document.libvirt,
                    proxmox: document.proxmox,
                    named: NamedByManagers::default(),
                    images: document.images,
                    networks: document.networks,
                    realm_networks: RealmNetworks::default(),
                    firmware: document.firmware,
                    system_firmware: SystemFirmware::default(),
                    kernels: document.kernels,
                    folders: document.folders,
                }
                .with_system_firmware(SystemFirmware::of_this_host()),
            ),
            hooks: document.hooks,
            content: document.content,
            parcel_devices: parcel_devices(document.parcel_devices)?,
            kept_memory: document.kept_memory,
        };
        config.hooks.check()?;
        if let Some(content) = &config.content {
            content.check()?;
        }
        if let Some(kept_memory) = &config.kept_memory {
            kept_memory.check()?;
        }
        if !is_name(&config.name) {
            return Err(format!(
                "`name = {:?}`: a host's name has 1 to 63 letters, digits, `-`, `_` and `.`, and \
                 begins with a letter or digit",
                config.name
            ));
        }
        for (what, path) in [("state", &config.state), ("api.socket", &config.api.socket)] {
            if !path.is_absolute() {
                return Err(format!(
                    "`{what} = {path:?}`: the path must be absolute (begin with `/`)"
                ));
            }
        }
        // A host without QEMU can still be inspected, trusted and measured.
        if configured || !config.hypervisor.qemu.emulators.is_empty() {
            config.hypervisor.check(file).map_err(|error| match error {
                ConfigError::Value { key, problem, .. } => format!("`{key}` {problem}"),
                other => other.to_string(),
            })?;
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, Path::new("agent.toml"))
    }

    #[test]
    fn everything_has_a_default() {
        let config = parse("").unwrap();
        assert_eq!(config.state, Path::new("/var/lib/longhaul"));
        assert_eq!(config.listen.port(), 7400);
        assert!(config.api.tcp.is_none());
        assert!(is_name(&config.name));
    }

    #[test]
    fn an_encoding_is_chosen_by_the_words_of_the_commands() {
        let config = parse("[encoding]\ncompression = \"zstd:3\"\nreferences = false\n").unwrap();
        let compression = config.encoding.compression.map(|chosen| chosen.to_string());
        assert_eq!(compression.as_deref(), Some("zstd:3"));
        assert_eq!(config.encoding.references, Some(false));
        assert_eq!(config.encoding.delta_cache, None);
        let wrong = parse("[encoding]\ndelta_cache = \"lots\"\n").unwrap_err();
        assert!(
            wrong.contains("line 2") && wrong.contains("64MiB"),
            "{wrong}"
        );
    }

    #[test]
    fn all_moves_together_may_have_a_limit() {
        let config = parse("bandwidth = \"80mbit\"\n").unwrap();
        assert_eq!(config.bandwidth_bps, Some(80_000_000));
        for wrong in ["fast", "10bit"] {
            let error = parse(&format!("bandwidth = {wrong:?}\n")).unwrap_err();
            assert!(
                error.contains("bandwidth") && error.contains(wrong),
                "{error}"
            );
        }
    }

    #[test]
    fn parcel_devices_have_names_and_paths_of_their_own() {
        let config = parse("[parcel_devices]\nwd1 = \"/mnt/wd1\"\nusb = \"/dev/sdb\"\n").unwrap();
        let path = config.parcel_devices.get("wd1").map(PathBuf::as_path);
        assert_eq!(path, Some(Path::new("/mnt/wd1")));
        for (wrong, expected) in [
            ("wd1 = \"mnt\"", "absolute"),
            ("\"a/b\" = \"/mnt\"", "a name has"),
            ("a = \"/mnt\"\nb = \"/mnt\"", "a has the same path"),
        ] {
            let error = parse(&format!("[parcel_devices]\n{wrong}\n")).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn base_images_are_in_the_state_folder_or_where_it_is_said() {
        let of = |text: &str| parse(text).map(|config| config.repository.to_string());
        assert_eq!(of("").unwrap(), "/var/lib/longhaul/repository");
        assert_eq!(of("repository = \"/srv/images\"\n").unwrap(), "/srv/images");
        assert_eq!(
            of("repository = \"s3://images/a\"\n").unwrap(),
            "s3://images/a"
        );
        for wrong in ["images", "s3://", "ftp://images"] {
            let error = of(&format!("repository = {wrong:?}\n")).unwrap_err();
            assert!(
                error.contains("repository") && error.contains(wrong),
                "{error}"
            );
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let unknown = parse("name = \"a\"\nstat = \"/x\"\n").unwrap_err();
        assert!(unknown.contains("line 2"), "{unknown}");
        assert!(unknown.contains("expected one of"), "{unknown}");
        let address = parse("listen = \"somewhere\"").unwrap_err();
        assert!(address.contains("line 1"), "{address}");
        let name = parse("name = \"-x\"").unwrap_err();
        assert!(name.contains("begins with a letter"), "{name}");
        let path = parse("state = \"here\"").unwrap_err();
        assert!(path.contains("absolute"), "{path}");
        let hook = parse("[hooks.source]\nrelease = { command = [\"/bin/true\"] }").unwrap_err();
        assert!(
            hook.contains("line 2") && hook.contains("`released`"),
            "{hook}"
        );
        for (hook, expected) in [
            ("command = [\"true\"]", "from `/` on"),
            ("command = []", "has no program"),
            (
                "command = [\"/bin/true\"]\nwithin = \"2h\"",
                "100ms to 10min",
            ),
            ("command = [\"/bin/true\"]\nwithin = \"2\"", "say 300ms"),
        ] {
            let error = parse(&format!("[hooks.destination.ready]\n{hook}")).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        let token = parse("[api.tcp]\nlisten = \"0.0.0.0:7443\"").unwrap_err();
        assert!(token.contains("token_file"), "{token}");
    }

    #[test]
    fn a_missing_file_is_an_error_only_where_it_was_named() {
        let missing = Config::read(Some(Path::new("/nonexistent/agent.toml"))).unwrap_err();
        assert!(missing.message.contains("/nonexistent/agent.toml"));
    }
}
