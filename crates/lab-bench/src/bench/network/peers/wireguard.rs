//! Configures wireguard-go, alone and below the kernel's VXLAN.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::version_of;
use crate::bench::network::ground::{Ground, INNER, INNER_ADDRESSES, Tunnel, program};
use crate::bench::network::system::{Kind, System, add_vxlan};
use longhaul_lab::error::LabError;
use longhaul_lab::netns;
use longhaul_lab::process::{self, wait_until};

const PORT: u16 = 51_820;
/// The addresses of WireGuard below VXLAN.
const BELOW: [&str; 2] = ["10.81.0.1", "10.81.0.2"];
/// The folder of wireguard-go's sockets, which all hosts of all laboratories share.
const SOCKETS: &str = "/var/run/wireguard";
const SOCKET_LIMIT: Duration = Duration::from_secs(20);

/// wireguard-go with its own MTU of 1420; it uses the offloads of TUN and UDP by itself.
pub(in crate::bench::network) struct WireGuard;

/// The kernel's VXLAN over wireguard-go: Ethernet frames, with encryption.
pub(in crate::bench::network) struct VxlanOverWireGuard;

impl System for WireGuard {
    fn name(&self) -> &'static str {
        "wireguard-go"
    }

    fn kind(&self) -> Kind {
        Kind::Layer3
    }

    fn version(&self) -> Result<String, String> {
        version()
    }

    fn start(&self, ground: &Ground) -> Result<Tunnel, LabError> {
        let devices = names(ground);
        let mut tunnel = Tunnel::new(INNER_ADDRESSES, &devices[0]);
        start(ground, &mut tunnel, &devices, INNER_ADDRESSES)?;
        Ok(tunnel)
    }
}

impl System for VxlanOverWireGuard {
    fn name(&self) -> &'static str {
        "vxlan-wireguard-go"
    }

    fn kind(&self) -> Kind {
        Kind::Layer2
    }

    fn version(&self) -> Result<String, String> {
        version()
    }

    fn start(&self, ground: &Ground) -> Result<Tunnel, LabError> {
        let devices = names(ground);
        let mut tunnel = Tunnel::new(INNER_ADDRESSES, INNER);
        start(ground, &mut tunnel, &devices, BELOW)?;
        add_vxlan(ground, &mut tunnel, BELOW, &devices)?;
        ground.address(&tunnel, INNER, INNER_ADDRESSES)?;
        Ok(tunnel)
    }
}

fn version() -> Result<String, String> {
    program("wg", "wireguard-tools")?;
    version_of(&program("wireguard-go", "wireguard-go")?, &["--version"])
}

/// Names that no other laboratory of this machine has: the sockets are named after interfaces.
fn names(ground: &Ground) -> [String; 2] {
    let id = ground.lab.id();
    [format!("wg{id}a"), format!("wg{id}b")]
}

fn start(
    ground: &Ground,
    tunnel: &mut Tunnel,
    devices: &[String; 2],
    addresses: [&str; 2],
) -> Result<(), LabError> {
    let [server, tool] = [("wireguard-go", "wireguard-go"), ("wg", "wireguard-tools")]
        .map(|(name, package)| program(name, package).map_err(LabError::Which));
    let (server, tool) = (server?, tool?);
    let keys = [Keys::make(&tool)?, Keys::make(&tool)?];
    for (host, device) in devices.iter().enumerate() {
        let mut command = netns::command(&server);
        command
            .args(["-f", device])
            .env("WG_PROCESS_FOREGROUND", "1");
        tunnel.remove_file_with_it(socket(device));
        ground.start(tunnel, host, command)?;
    }
    let outer = ground.outer()?;
    for (host, device) in devices.iter().enumerate() {
        let path = socket(device);
        if !wait_until(SOCKET_LIMIT, || path.exists()) {
            return Err(tunnel.failed(&format!("{} did not appear", path.display())));
        }
        let text = format!(
            "[Interface]\nPrivateKey = {}\nListenPort = {PORT}\n\
             [Peer]\nPublicKey = {}\nAllowedIPs = {}/32\nEndpoint = {}:{PORT}\n",
            keys[host].private,
            keys[1 - host].public,
            addresses[1 - host],
            outer[1 - host],
        );
        let file = ground.file(host, "wireguard/wg.conf", &text)?;
        let mut command = netns::command(&tool);
        command.args(["setconf", device]).arg(file);
        ground.lab.host(host)?.output(&mut command)?;
        ground.address_one(tunnel, host, device, addresses[host])?;
    }
    Ok(())
}

fn socket(device: &str) -> PathBuf {
    Path::new(SOCKETS).join(format!("{device}.sock"))
}

struct Keys {
    private: String,
    public: String,
}

impl Keys {
    fn make(tool: &Path) -> Result<Self, LabError> {
        let private = process::run(netns::command(tool).arg("genkey"))?;
        let mut public = std::process::Command::new(tool);
        let public = process::run_with_input(public.arg("pubkey"), &private)?;
        let [private, public] = [private, public].map(|key| key.trim().to_owned());
        Ok(Self { private, public })
    }
}
