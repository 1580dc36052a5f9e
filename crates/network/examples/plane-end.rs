//! Runs one end of the frame plane between two hosts, without agents: for measurements.
//!
//! ```text
//! plane-end LOCAL PEER KEY_FILE TAP [mtu=1500] [suite=aes|chacha] [offloads=on|off]
//! ```
//! `LOCAL` and `PEER` are UDP addresses, `KEY_FILE` has the same 32 bytes at both ends. The program
//! makes the TAP device and is ready when it prints `ready`. It ends with its standard input, and
//! prints what it counted.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr
)]
#![allow(dead_code, reason = "tests use more of the socket")]

#[path = "../tests/plane/udp.rs"]
mod udp;

use longhaul_network::plane::{LocalPort, NetworkConfig, Plane, PlaneConfig};
use longhaul_overlay::NetworkId;
use longhaul_overlay::offload::Offloads;
use longhaul_overlay::seal::{Side, Suite};
use longhaul_overlay::switch::Vlans;
use longhaul_protocol::HostId;
use std::io::Read;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;

const USAGE: &str = "usage: plane-end LOCAL PEER KEY_FILE TAP [mtu=1500] [suite=aes|chacha] \
                     [offloads=on|off]";
const DIALLER: HostId = HostId([1; 32]);
const LISTENER: HostId = HostId([2; 32]);

struct Options {
    local: SocketAddr,
    peer: SocketAddr,
    key: [u8; 32],
    tap: String,
    mtu: u16,
    suite: Suite,
    config: PlaneConfig,
}

fn options() -> Result<Options, String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [local, peer, key, tap, others @ ..] = &arguments[..] else {
        return Err(USAGE.to_owned());
    };
    let address = |text: &String| text.parse().map_err(|error| format!("{text}: {error}"));
    let bytes = std::fs::read(key).map_err(|error| format!("{key}: {error}"))?;
    let mut options = Options {
        local: address(local)?,
        peer: address(peer)?,
        key: bytes
            .try_into()
            .map_err(|_| format!("{key} does not have 32 bytes"))?,
        tap: tap.clone(),
        mtu: 1500,
        suite: Suite::Aes256Gcm,
        config: PlaneConfig::default(),
    };
    for other in others {
        match other.split_once('=') {
            Some(("mtu", mtu)) => options.mtu = mtu.parse().map_err(|_| USAGE.to_owned())?,
            Some(("suite", "aes")) => {}
            Some(("suite", "chacha")) => options.suite = Suite::ChaCha20Poly1305,
            Some(("offloads", "on")) => {}
            Some(("offloads", "off")) => options.config.offloads = Offloads::default(),
            _ => return Err(format!("{other} is unknown; {USAGE}")),
        }
    }
    Ok(options)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = options()?;
    // Both ends agree on who is who by their addresses.
    let (host, peer, side) = match options.local < options.peer {
        true => (DIALLER, LISTENER, Side::Dialler),
        false => (LISTENER, DIALLER, Side::Listener),
    };
    let udp = udp::Udp::bind(options.local)?;
    let outlet = udp::UdpOutlet(udp.clone());
    let (plane, inbox, _outputs) = Plane::new(options.config, outlet, host)?;
    let (stop, stopped) = UnixStream::pair()?;
    let receiver = std::thread::spawn(move || udp::receive(&udp, inbox, &stopped));
    plane.connected(peer, &options.key, side, options.suite)?;
    plane.set_way(peer, Some(udp::way_to(options.peer)))?;
    let network = NetworkId(1);
    plane.open_network(&NetworkConfig {
        id: network,
        members: vec![peer],
        mtu: options.mtu,
        vlans: Vlans::all(),
        port: LocalPort::Tap(options.tap),
    })?;
    println!("ready");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    eprintln!("{:#?}", plane.status());
    plane.close_network(network)?;
    drop(stop);
    receiver.join().map_err(|_| "the receiver panicked")?;
    Ok(())
}
