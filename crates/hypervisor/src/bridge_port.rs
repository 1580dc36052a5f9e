//! Reads and sets what Linux does to a port of a bridge: VLANs, MTU and flags.

use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use crate::scope::run;
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::port::{Port, PortFlag, VLAN_MAX, Vlans};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The MTU of a new TAP device.
const MTU: u32 = 1500;
/// Where Linux shows network devices.
const NET: &str = "/sys/class/net";

/// Why the ports of a guest are not known.
#[derive(Debug, thiserror::Error)]
pub enum PortError {
    /// QEMU does not answer.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The host does not tell.
    #[error("cannot tell which VLANs, MTU and flags TAP device {device} has: {source}")]
    Host {
        /// The device.
        device: String,
        /// The error.
        source: io::Error,
    },
}

/// Returns the special ports of a guest's cards at this host, by the cards' indexes.
pub async fn of_guest(
    qmp: &Qmp,
    pid: Option<i32>,
    description: &GuestDescription,
) -> Result<BTreeMap<usize, Port>, PortError> {
    let mut ports = BTreeMap::new();
    for (index, device) in taps_of_guest(qmp, pid, description).await? {
        let port = read(Path::new(NET), &device).await;
        let port = port.map_err(|source| PortError::Host { device, source })?;
        if !port.is_plain() {
            ports.insert(index, port);
        }
    }
    Ok(ports)
}

/// Returns the TAP devices of a guest's cards at this host, by the cards' indexes.
pub async fn taps_of_guest(
    qmp: &Qmp,
    pid: Option<i32>,
    description: &GuestDescription,
) -> Result<BTreeMap<usize, String>, QmpError> {
    if description.nics.is_empty() {
        return Ok(BTreeMap::new());
    }
    let networks = qmp.hmp("info network", COMMAND_TIMEOUT).await?;
    let devices = devices(&networks);
    let nics = description.nics.iter().enumerate();
    let taps = nics.filter_map(|(index, nic)| {
        let end = devices.get(&nic.mac.to_ascii_lowercase())?;
        Some((index, end.device(pid)?))
    });
    Ok(taps.collect())
}

/// The host's end of a card.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Named(String),
    /// A descriptor that QEMU was given.
    Descriptor(u32),
}

impl End {
    /// Returns the name of the TAP device.
    fn device(&self, pid: Option<i32>) -> Option<String> {
        match self {
            Self::Named(name) => Some(name.clone()),
            Self::Descriptor(number) => {
                let about = format!("/proc/{}/fdinfo/{number}", pid?);
                device_of(&fs::read_to_string(about).ok()?)
            }
        }
    }
}

/// Returns the TAP device of an open file, from the kernel's lines about it.
fn device_of(fdinfo: &str) -> Option<String> {
    let device = fdinfo.lines().find_map(|line| line.strip_prefix("iff:"))?;
    Some(device.trim().to_owned()).filter(|device| is_interface(device))
}

/// Returns the TAP devices of cards, by the cards' MAC addresses, from QEMU's `info network`.
fn devices(networks: &str) -> BTreeMap<String, End> {
    let mut devices = BTreeMap::new();
    let mut mac = None;
    for line in networks.lines().map(str::trim) {
        let value = |key: &str| {
            line.split([',', ' '])
                .find_map(|part| part.strip_prefix(key))
        };
        if let Some(address) = value("macaddr=") {
            mac = Some(address.to_ascii_lowercase());
            continue;
        }
        if !line.starts_with('\\') || !matches!(value("type="), Some("tap" | "bridge")) {
            continue;
        }
        let name = value("ifname=").filter(|name| is_interface(name));
        let number = || value("fd=").and_then(|number| number.parse().ok());
        let end = match name {
            Some(name) => Some(End::Named(name.to_owned())),
            None => number().map(End::Descriptor),
        };
        if let (Some(mac), Some(end)) = (mac.take(), end) {
            devices.insert(mac, end);
        }
    }
    devices
}

/// Returns whether a text can be a part of a path below `/sys/class/net`.
fn is_interface(name: &str) -> bool {
    (1..=15).contains(&name.len()) && !name.contains('/') && !name.starts_with('.')
}

/// Returns the bridge that an interface is a port of.
fn bridge_of(net: &Path, device: &str) -> Option<String> {
    let above = fs::read_link(net.join(device).join("master")).ok()?;
    Some(above.file_name()?.to_string_lossy().into_owned())
}

fn number(path: &Path) -> io::Result<u32> {
    let text = fs::read_to_string(path)?;
    text.trim().parse().map_err(io::Error::other)
}

/// Returns whether a bridge of this host looks at VLANs, or `None` if it is no bridge.
pub fn filters_vlans(bridge: &str) -> Option<bool> {
    let filters = Path::new(NET).join(bridge).join("bridge/vlan_filtering");
    number(&filters).ok().map(|filters| filters == 1)
}

/// Returns the MTU of a bridge of this host. One without ports has none of its own: it gets that of
/// its first port.
pub fn mtu_of(bridge: &str) -> Option<u32> {
    let bridge = Path::new(NET).join(bridge);
    let has_ports = fs::read_dir(bridge.join("brif")).ok()?.next().is_some();
    number(&bridge.join("mtu")).ok().filter(|_| has_ports)
}

async fn read(net: &Path, device: &str) -> io::Result<Port> {
    let mtu = number(&net.join(device).join("mtu"))?;
    let mut port = Port {
        mtu: (mtu != MTU).then_some(mtu),
        ..Port::default()
    };
    let Some(bridge) = bridge_of(net, device) else {
        return Ok(port);
    };
    port.flags = flags(&net.join(device).join("brport"))?;
    let bridge: PathBuf = net.join(bridge).join("bridge");
    if number(&bridge.join("vlan_filtering")).unwrap_or_default() == 1 {
        let vlans = run("bridge", &["-j", "vlan", "show", "dev", device]).await?;
        let default = number(&bridge.join("default_pvid"))?;
        port.vlans = vlans_of(&vlans)?;
        if is_default(&port.vlans, default) {
            port.vlans.clear();
        }
    }
    Ok(port)
}

/// Returns the flags of a port that differ from those of a new one. An older kernel does not have
/// all.
fn flags(port: &Path) -> io::Result<BTreeMap<PortFlag, bool>> {
    let mut flags = BTreeMap::new();
    for flag in PortFlag::ALL {
        let file = match flag {
            PortFlag::Hairpin => "hairpin_mode",
            PortFlag::Guard => "bpdu_guard",
            PortFlag::RootBlock => "root_block",
            PortFlag::Fastleave => "multicast_fast_leave",
            PortFlag::Learning => "learning",
            PortFlag::Flood => "unicast_flood",
            PortFlag::ProxyArp => "proxyarp",
            PortFlag::ProxyArpWifi => "proxyarp_wifi",
            PortFlag::McastToUnicast => "multicast_to_unicast",
            PortFlag::McastFlood => "multicast_flood",
            PortFlag::BcastFlood => "broadcast_flood",
            PortFlag::NeighSuppress => "neigh_suppress",
            PortFlag::Isolated => "isolated",
        };
        match number(&port.join(file)) {
            Ok(value) if (value == 1) != flag.default_value() => {
                flags.insert(flag, value == 1);
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(flags)
}

/// Returns whether these are the VLANs of each new port of a bridge.
fn is_default(vlans: &[Vlans], default: u32) -> bool {
    match vlans {
        [] => default == 0,
        [one] => *one == Port::untagged(one.first)[0] && u32::from(one.first) == default,
        _ => false,
    }
}

/// Parses the output of `bridge -j vlan show dev DEVICE`.
fn vlans_of(json: &str) -> io::Result<Vec<Vlans>> {
    #[derive(Deserialize)]
    struct Device {
        #[serde(default)]
        vlans: Vec<Entry>,
    }
    #[derive(Deserialize)]
    struct Entry {
        vlan: u16,
        #[serde(rename = "vlanEnd")]
        last: Option<u16>,
        #[serde(default)]
        flags: Vec<String>,
    }
    // A device without VLANs is shown as nothing at all.
    if json.trim().is_empty() {
        return Ok(Vec::new());
    }
    let devices: Vec<Device> = serde_json::from_str(json).map_err(io::Error::other)?;
    let mut all: Vec<Vlans> = Vec::new();
    for entry in devices.into_iter().flat_map(|device| device.vlans) {
        let has = |name: &str| entry.flags.iter().any(|flag| flag == name);
        let next = Vlans {
            first: entry.vlan,
            last: entry.last.unwrap_or(entry.vlan),
            pvid: has("PVID"),
            untagged: has("Egress Untagged"),
        };
        match all.last_mut() {
            Some(before)
                if u32::from(before.last) + 1 == u32::from(next.first)
                    && !before.pvid
                    && !next.pvid
                    && before.untagged == next.untagged =>
            {
                before.last = next.last;
            }
            _ => all.push(next),
        }
    }
    let port = Port {
        vlans: all,
        ..Port::default()
    };
    match port.is_sound() {
        true => Ok(port.vlans),
        false => Err(io::Error::other("`bridge vlan show` says something else")),
    }
}

/// Returns the VLANs of frames without a tag on TAP devices whose bridges look at VLANs, by their
/// names in QEMU's `info network`.
pub(crate) async fn pvids(networks: &str) -> BTreeMap<String, u16> {
    let mut pvids = BTreeMap::new();
    for end in devices(networks).into_values() {
        let End::Named(device) = end else { continue };
        let bridge = bridge_of(Path::new(NET), &device);
        if bridge.and_then(|bridge| filters_vlans(&bridge)) != Some(true) {
            continue;
        }
        let vlans = run("bridge", &["-j", "vlan", "show", "dev", &device]).await;
        let vlans = vlans.and_then(|vlans| vlans_of(&vlans)).unwrap_or_default();
        if let Some(vlans) = vlans.iter().find(|vlans| vlans.pvid) {
            pvids.insert(device, vlans.first);
        }
    }
    pvids
}

/// Sets the VLANs and flags of a new port.
pub(crate) async fn set(device: &str, port: &Port) -> io::Result<()> {
    for (program, arguments) in commands(device, port) {
        run(program, &arguments).await?;
    }
    Ok(())
}

/// Returns the commands that make a new port this one.
fn commands(device: &str, port: &Port) -> Vec<(&'static str, Vec<String>)> {
    let words = |text: String| text.split(' ').map(str::to_owned).collect();
    let mut commands = Vec::new();
    if !port.vlans.is_empty() {
        // All that a new port has.
        let all = format!("vlan del dev {device} vid 1-{VLAN_MAX}");
        commands.push(("bridge", words(all)));
    }
    for vlans in &port.vlans {
        let mut add = format!("vlan add dev {device} vid {}", vlans.first);
        if vlans.last != vlans.first {
            add.push_str(&format!("-{}", vlans.last));
        }
        if vlans.pvid {
            add.push_str(" pvid");
        }
        if vlans.untagged {
            add.push_str(" untagged");
        }
        commands.push(("bridge", words(add)));
    }
    if !port.flags.is_empty() {
        let mut set = format!("link set dev {device} type bridge_slave");
        for (flag, on) in &port.flags {
            set.push_str(&format!(
                " {} {}",
                flag.name(),
                if *on { "on" } else { "off" }
            ));
        }
        commands.push(("ip", words(set)));
    }
    commands
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vlans(first: u16, last: u16, pvid: bool, untagged: bool) -> Vlans {
        Vlans {
            first,
            last,
            pvid,
            untagged,
        }
    }

    #[test]
    fn cards_are_known_by_their_addresses() {
        let networks = "virtio-net-pci.0: index=0,type=nic,model=virtio-net-pci,\
             macaddr=52:54:00:12:34:AA\r\n \\ net0: index=0,type=tap,ifname=tap7,script=no,\
             downscript=no\r\nvirtio-net-pci.1: index=0,type=nic,model=virtio-net-pci,\
             macaddr=52:54:00:12:34:bb\r\n \\ net1: index=0,type=user,net=10.0.2.0,restrict=on\r\n\
             e1000.0: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:cc\r\n \
             \\ hostnet2: index=0,type=tap,fd=31\r\n";
        let found = devices(networks);
        assert_eq!(found.len(), 2, "{found:?}");
        let named = End::Named("tap7".to_owned());
        assert_eq!(found["52:54:00:12:34:aa"], named);
        assert_eq!(found["52:54:00:12:34:cc"], End::Descriptor(31));
        let info = "pos:\t0\nflags:\t0104002\nmnt_id:\t15\nino:\t90\niff:\ttap9\n";
        assert_eq!(device_of(info).as_deref(), Some("tap9"));
        assert_eq!(device_of("iff:\t../x\n"), None);
    }

    #[test]
    fn what_bridge_says_of_vlans_is_read() {
        let json = r#"[{"ifname":"tap7","vlans":[{"vlan":10,"flags":["PVID","Egress Untagged"]},
            {"vlan":20},{"vlan":21},{"vlan":22,"flags":["Egress Untagged"]},
            {"vlan":30,"vlanEnd":40}]}]"#;
        let read = vlans_of(json).unwrap();
        let expected = [
            vlans(10, 10, true, true),
            vlans(20, 21, false, false),
            vlans(22, 22, false, true),
            vlans(30, 40, false, false),
        ];
        assert_eq!(read, expected);
        assert_eq!(vlans_of("[]").unwrap(), []);
        assert_eq!(vlans_of("\n").unwrap(), []);
        vlans_of(r#"[{"vlans":[{"vlan":5000}]}]"#).unwrap_err();
        vlans_of("x").unwrap_err();
    }

    #[test]
    fn a_new_port_of_a_bridge_is_nothing_special() {
        let one = [vlans(1, 1, true, true)];
        assert!(is_default(&one, 1) && is_default(&[], 0));
        assert!(!is_default(&one, 2) && !is_default(&[], 1));
        assert!(!is_default(&[vlans(1, 1, true, false)], 1));
    }

    #[tokio::test]
    async fn flags_and_the_mtu_are_read_from_the_kernels_files() {
        let net = tempfile::tempdir().unwrap();
        let port = net.path().join("tap7/brport");
        fs::create_dir_all(&port).unwrap();
        fs::create_dir_all(net.path().join("br0/bridge")).unwrap();
        std::os::unix::fs::symlink("../br0", net.path().join("tap7/master")).unwrap();
        for (file, value) in [
            ("tap7/mtu", "9000\n"),
            ("tap7/brport/isolated", "1\n"),
            ("tap7/brport/learning", "0\n"),
            ("tap7/brport/unicast_flood", "1\n"),
            ("tap7/brport/hairpin_mode", "0\n"),
            ("br0/bridge/vlan_filtering", "0\n"),
        ] {
            fs::write(net.path().join(file), value).unwrap();
        }
        let read = read(net.path(), "tap7").await.unwrap();
        let flags = [(PortFlag::Learning, false), (PortFlag::Isolated, true)];
        let expected = Port {
            vlans: Vec::new(),
            mtu: Some(9000),
            flags: flags.into(),
        };
        assert_eq!(read, expected);
    }

    #[test]
    fn a_port_is_in_no_other_vlan_before_it_is_up() {
        let port = Port {
            vlans: vec![vlans(10, 10, true, true), vlans(20, 30, false, false)],
            mtu: None,
            flags: [(PortFlag::Learning, false), (PortFlag::Isolated, true)].into(),
        };
        let lines: Vec<String> = commands("tap7", &port)
            .iter()
            .map(|(program, words)| format!("{program} {}", words.join(" ")))
            .collect();
        let expected = [
            "bridge vlan del dev tap7 vid 1-4094",
            "bridge vlan add dev tap7 vid 10 pvid untagged",
            "bridge vlan add dev tap7 vid 20-30",
            "ip link set dev tap7 type bridge_slave learning off isolated on",
        ];
        assert_eq!(lines, expected);
        assert!(commands("tap7", &Port::default()).is_empty());
    }
}
