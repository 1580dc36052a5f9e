//! Reads the addresses of this host's interfaces.

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};

/// Returns the addresses under which a socket may be reached, that of the way to `servers` first.
/// `socket` is the socket's own address.
pub(super) fn addresses(socket: SocketAddr, servers: &[SocketAddr]) -> io::Result<Vec<SocketAddr>> {
    if !socket.ip().is_unspecified() {
        let ip = socket.ip().to_canonical();
        return Ok(vec![SocketAddr::new(ip, socket.port())]);
    }
    let mut found: Vec<IpAddr> = Vec::new();
    for interface in getifaddrs()? {
        let flags = interface.flags;
        if !flags.contains(InterfaceFlags::IFF_UP) || flags.contains(InterfaceFlags::IFF_LOOPBACK) {
            continue;
        }
        let Some(address) = interface.address else {
            continue;
        };
        let ip: IpAddr = match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
            (Some(v4), _) => v4.ip().into(),
            (None, Some(v6)) if socket.is_ipv6() => v6.ip().into(),
            _ => continue,
        };
        if !found.contains(&ip) {
            found.push(ip);
        }
    }
    // Others keep the order of the system.
    let ways: Vec<IpAddr> = servers.iter().filter_map(|to| source_to(*to)).collect();
    found.sort_by_key(|ip| !ways.contains(ip));
    let port = socket.port();
    Ok(found
        .into_iter()
        .map(|ip| SocketAddr::new(ip, port))
        .collect())
}

/// Returns the address from which the kernel would send to `to`. Nothing is sent.
fn source_to(to: SocketAddr) -> Option<IpAddr> {
    let any: SocketAddr = match to {
        SocketAddr::V4(_) => ([0, 0, 0, 0], 0).into(),
        SocketAddr::V6(_) => ([0_u16; 8], 0).into(),
    };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(to).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_at_one_address_has_that_one() {
        let socket: SocketAddr = "[::ffff:192.0.2.1]:7".parse().unwrap();
        let expected: SocketAddr = "192.0.2.1:7".parse().unwrap();
        assert_eq!(addresses(socket, &[]).unwrap(), [expected]);
    }

    #[test]
    fn a_socket_at_all_addresses_has_those_of_its_family_and_no_loopback() {
        let ipv4 = addresses("0.0.0.0:7".parse().unwrap(), &[]).unwrap();
        let both = addresses("[::]:7".parse().unwrap(), &[]).unwrap();
        for address in &ipv4 {
            assert!(address.is_ipv4() && !address.ip().is_loopback());
            assert!(both.contains(address));
            assert_eq!(address.port(), 7);
        }
    }
}
