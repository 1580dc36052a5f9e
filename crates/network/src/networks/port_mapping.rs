//! Asks the router of this host's site to pass datagrams on to it: by PCP (RFC 6887) or NAT-PMP
//! (RFC 6886), and otherwise by UPnP. Other hosts then need no luck with the router's NAT.
//!
//! A mapping is asked for again at half of its lifetime. A router forgets it at most
//! [`LIFETIME`] after the agent has ended.

use crate::reach::{Input, Reach};
use crab_nat::natpmp;
use crab_nat::{
    GatewayAddress, InternetProtocol, PortMapping, PortMappingOptions, PortMappingType,
};
use igd_next::aio::tokio::search_gateway;
use igd_next::{PortMappingProtocol, SearchOptions};
use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroU16;
use std::time::Duration;
use tokio::net::UdpSocket;
use tokio::time::{sleep, timeout};

/// The lifetime of a mapping that is asked for.
const LIFETIME: Duration = Duration::from_secs(20 * 60);
/// The shortest time after which a mapping is renewed, whatever its router says.
const RENEW_MIN: Duration = Duration::from_secs(30);
/// How long a router may take for one protocol.
const ANSWER_WITHIN: Duration = Duration::from_secs(15);
/// When a router without an answer is asked again.
const RETRY: Duration = Duration::from_secs(5 * 60);
/// The name of the mapping in the router's list.
const NAME: &str = "longhaul";
/// The routes of this host, of IPv4.
const ROUTES: &str = "/proc/thread-self/net/route";
/// The flag of a route through a gateway.
const THROUGH_GATEWAY: u32 = 2;

/// A port of the router that leads to this host.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mapped {
    address: SocketAddr,
    lifetime: Duration,
    by: &'static str,
}

/// Why there is no mapping.
#[derive(Debug, thiserror::Error)]
enum MappingError {
    #[error("this host has no router: {0}")]
    NoRouter(String),
    #[error("{router} answers neither PCP and NAT-PMP ({pcp}) nor UPnP ({upnp})")]
    Refused {
        router: Ipv4Addr,
        pcp: String,
        upnp: String,
    },
    #[error("{router} maps ports of {address}, which is not reached from the Internet")]
    Private { router: Ipv4Addr, address: IpAddr },
}

/// Keeps a mapping of this host's UDP port, and tells the paths of it. Never ends.
pub(super) async fn run(port: NonZeroU16, reach: Reach) {
    let mut known: Option<Result<SocketAddr, String>> = None;
    let mut held = None;
    loop {
        let (now, wait) = match mapped(&mut held, port).await {
            Ok(mapped) => {
                let Mapped {
                    address,
                    lifetime,
                    by,
                } = mapped;
                if known != Some(Ok(address)) {
                    tracing::info!(%address, by, "the router passes datagrams on to this host");
                }
                (Ok(address), (lifetime / 2).max(RENEW_MIN))
            }
            Err(error) => {
                let error = error.to_string();
                if known != Some(Err(error.clone())) {
                    tracing::warn!(error, "the router maps no port to this host");
                }
                (Err(error), RETRY)
            }
        };
        reach.input(Input::PortMapped(now.clone().ok())).await;
        known = Some(now);
        sleep(wait).await;
    }
}

async fn mapped(held: &mut Option<PortMapping>, port: NonZeroU16) -> Result<Mapped, MappingError> {
    let no_router = |error: &dyn Display| MappingError::NoRouter(error.to_string());
    let routes = std::fs::read_to_string(ROUTES).map_err(|error| no_router(&error))?;
    let router = router(&routes).ok_or_else(|| no_router(&"it has no default route"))?;
    let own = own_address(router).await;
    let own = own.map_err(|error| no_router(&error))?;
    let mapped = match limited(by_pcp(held, (router, own, port))).await {
        Ok(mapped) => mapped,
        Err(pcp) => {
            let by_upnp = limited(by_upnp(own, port)).await;
            by_upnp.map_err(|upnp| MappingError::Refused { router, pcp, upnp })?
        }
    };
    match is_public(mapped.address.ip()) {
        true => Ok(mapped),
        false => Err(MappingError::Private {
            router,
            address: mapped.address.ip(),
        }),
    }
}

async fn limited(asking: impl Future<Output = Result<Mapped, String>>) -> Result<Mapped, String> {
    let answer = timeout(ANSWER_WITHIN, asking).await;
    answer.unwrap_or_else(|_| Err(format!("no answer in {} s", ANSWER_WITHIN.as_secs())))
}

/// Asks by PCP, or by NAT-PMP. Renews the mapping that is held: its port is for nobody else.
async fn by_pcp(
    held: &mut Option<PortMapping>,
    (router, own, port): (Ipv4Addr, IpAddr, NonZeroU16),
) -> Result<Mapped, String> {
    let gateway = GatewayAddress::from(router);
    let renewed = match held.take() {
        None => None,
        Some(mut mapping) => mapping.renew().await.ok().map(|()| mapping),
    };
    let mapping = match renewed {
        Some(mapping) => mapping,
        None => ask(gateway, own, port).await?,
    };
    let (ip, by) = match mapping.mapping_type() {
        PortMappingType::Pcp { external_ip, .. } => (external_ip, "PCP"),
        PortMappingType::NatPmp => {
            let ip = natpmp::external_address(gateway, None).await;
            (ip.map_err(|error| error.to_string())?.into(), "NAT-PMP")
        }
    };
    let mapped = Mapped {
        address: SocketAddr::new(plain(ip), mapping.external_port().get()),
        lifetime: Duration::from_secs(mapping.lifetime().into()),
        by,
    };
    *held = Some(mapping);
    Ok(mapped)
}

async fn ask(
    gateway: GatewayAddress,
    own: IpAddr,
    port: NonZeroU16,
) -> Result<PortMapping, String> {
    let udp = InternetProtocol::Udp;
    let options = PortMappingOptions {
        external_port: Some(port),
        lifetime_seconds: Some(LIFETIME.as_secs() as u32),
        timeout_config: None,
    };
    let pcp = match PortMapping::new(gateway, own, udp, port, options).await {
        Ok(mapping) => return Ok(mapping),
        Err(error) => error,
    };
    // PCP keeps a mapping for the agent that asked for it, which may have been this one before a
    // restart. NAT-PMP does not.
    let mapping = natpmp::port_mapping(gateway, udp, port, options).await;
    mapping.map_err(|error| format!("{pcp}; {error}"))
}

async fn by_upnp(own: IpAddr, port: NonZeroU16) -> Result<Mapped, String> {
    let text = |error: &dyn Display| error.to_string();
    let mut options = SearchOptions::default();
    options.bind_addr = SocketAddr::new(own, 0);
    let gateway = search_gateway(options).await;
    let gateway = gateway.map_err(|error| text(&error))?;
    let local = SocketAddr::new(own, port.get());
    let lifetime = LIFETIME.as_secs() as u32;
    let added = gateway
        .add_port(PortMappingProtocol::UDP, port.get(), local, lifetime, NAME)
        .await;
    added.map_err(|error| text(&error))?;
    let ip = gateway.get_external_ip().await;
    let ip = ip.map_err(|error| text(&error))?;
    Ok(Mapped {
        address: SocketAddr::new(ip, port.get()),
        lifetime: LIFETIME,
        by: "UPnP",
    })
}

/// Returns this host's address on the way to its router.
async fn own_address(router: Ipv4Addr) -> std::io::Result<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).await?;
    socket.connect((router, crab_nat::GATEWAY_PORT)).await?;
    Ok(socket.local_addr()?.ip())
}

/// Returns the gateway of the default route, with the lowest metric if there are several.
fn router(routes: &str) -> Option<Ipv4Addr> {
    let gateways = routes.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let [_, destination, gateway, flags, _, _, metric, mask, ..] = fields[..] else {
            return None;
        };
        let number = |text| u32::from_str_radix(text, 16).ok();
        let is_default = number(destination)? == 0 && number(mask)? == 0;
        let through = number(flags)? & THROUGH_GATEWAY != 0;
        // The kernel prints addresses as they are in memory.
        let gateway = Ipv4Addr::from(number(gateway)?.to_ne_bytes());
        (is_default && through).then_some((metric.parse::<u32>().ok()?, gateway))
    });
    let (_, gateway) = gateways.min()?;
    Some(gateway)
}

/// Returns an IPv4 address that was mapped to IPv6 as what it is.
fn plain(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V6(v6) => v6.to_ipv4_mapped().map_or(ip, IpAddr::V4),
        IpAddr::V4(_) => ip,
    }
}

/// Returns whether an address may be reached from the Internet. Addresses of a carrier's NAT (RFC
/// 6598) are not.
fn is_public(ip: IpAddr) -> bool {
    let IpAddr::V4(v4) = ip else {
        return !ip.is_unspecified() && !ip.is_loopback();
    };
    let [first, second, ..] = v4.octets();
    let is_of_carrier = first == 100 && second & 0xc0 == 64;
    !(v4.is_private()
        || v4.is_loopback()
        || v4.is_link_local()
        || v4.is_unspecified()
        || v4.is_broadcast()
        || is_of_carrier)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_router_is_that_of_the_default_route() {
        let head =
            "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\n";
        let line = |destination: &str, gateway: &str, flags: &str, metric: u32, mask: &str| {
            format!("eth0\t{destination}\t{gateway}\t{flags}\t0\t0\t{metric}\t{mask}\t0\t0\t0\n")
        };
        let address = |text: &str| {
            let ip: Ipv4Addr = text.parse().unwrap();
            format!("{:08X}", u32::from_ne_bytes(ip.octets()))
        };
        let lan = line("0001A8C0", "00000000", "0001", 0, "00FFFFFF");
        let far = line("00000000", &address("192.168.1.1"), "0003", 100, "00000000");
        let near = line("00000000", &address("10.0.0.1"), "0003", 50, "00000000");
        let link = line("00000000", "00000000", "0001", 0, "00000000");
        let of = |lines: &[&String]| {
            let lines: String = lines.iter().map(|line| line.as_str()).collect();
            router(&(head.to_owned() + &lines)).map(|ip| ip.to_string())
        };
        assert_eq!(of(&[&lan, &far]).as_deref(), Some("192.168.1.1"));
        assert_eq!(of(&[&far, &near]).as_deref(), Some("10.0.0.1"));
        assert_eq!(of(&[&lan, &link]), None);
        assert_eq!(router("nonsense\nmore of it\n"), None);
    }

    #[test]
    fn an_address_behind_another_nat_is_not_public() {
        for (text, public) in [
            ("203.0.113.1", true),
            ("100.63.0.1", true),
            ("100.64.0.1", false),
            ("100.127.255.255", false),
            ("192.168.1.1", false),
            ("10.1.2.3", false),
            ("0.0.0.0", false),
            ("2001:db8::1", true),
            ("::", false),
        ] {
            assert_eq!(is_public(text.parse().unwrap()), public, "{text}");
        }
        let mapped = "::ffff:203.0.113.1".parse().unwrap();
        assert_eq!(plain(mapped).to_string(), "203.0.113.1");
    }
}
