//! Serves clients over the guest's network card: an echo, and a download whose bytes are known.
//! Calls a server through a gateway.

use crate::init::say;
use crate::sys::{InterfaceRequest, RouteRequest};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::Duration;

/// The port that returns what it gets (RFC 862).
const ECHO: u16 = 7;
/// The port of the endless download.
const DOWNLOAD: u16 = 19;
const CARD: &str = "eth0";
const RETRY: Duration = Duration::from_millis(20);
/// From `linux/sockios.h` and `linux/if.h`.
const SIOCADDRT: u64 = 0x890b;
const SIOCSIFFLAGS: u64 = 0x8914;
const SIOCSIFADDR: u64 = 0x8916;
const SIOCSIFNETMASK: u64 = 0x891c;
const IFF_UP: u16 = 1;
/// From `linux/route.h`: up, and through a gateway.
const RTF_UP_GATEWAY: u16 = 3;
const AF_INET: u16 = 2;
const CLIENTS_MAX: usize = 64;
/// Between two words of a call that goes on, and between two calls.
const WORDS: Duration = Duration::from_millis(50);
const CALLS: Duration = Duration::from_millis(300);
/// How long an answer is awaited.
const ANSWER: Duration = Duration::from_secs(2);
/// The word of a call that ends after it. Those of the others count from 0.
const ONCE: u64 = u64::MAX;

/// An address and the length of its prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Address {
    ip: Ipv4Addr,
    prefix: u32,
}

impl Address {
    /// Parses `10.78.0.2/24`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (ip, prefix) = text.split_once('/')?;
        let address = Self {
            ip: ip.parse().ok()?,
            prefix: prefix.parse().ok()?,
        };
        (1..=32).contains(&address.prefix).then_some(address)
    }

    fn mask(self) -> Ipv4Addr {
        Ipv4Addr::from(u32::MAX << (32 - self.prefix))
    }
}

/// A server that the guest calls, and the gateway on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Calls {
    gateway: Ipv4Addr,
    server: SocketAddrV4,
}

impl Calls {
    /// Parses `10.78.0.1,192.0.2.1:7000`: gateway, then server.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (gateway, server) = text.split_once(',')?;
        Some(Self {
            gateway: gateway.parse().ok()?,
            server: server.parse().ok()?,
        })
    }
}

/// Gives the card its address and serves clients, in threads of their own.
pub(crate) fn serve(address: Address, calls: Option<Calls>) {
    thread::spawn(move || {
        // The driver may take a moment to find the card.
        while let Err(error) = configure(address) {
            if error.kind() != io::ErrorKind::NotFound && error.raw_os_error() != Some(19) {
                return say(&format!("{CARD}: {error}"));
            }
            thread::sleep(RETRY);
        }
        if let Some(calls) = calls {
            call(calls);
        }
        thread::spawn(|| listen(ECHO, echo));
        thread::spawn(|| {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, ECHO));
            if let Err(error) = socket.and_then(|socket| echo_datagrams(&socket)) {
                say(&format!("UDP port {ECHO}: {error}"));
            }
        });
        listen(DOWNLOAD, download);
    });
}

fn configure(address: Address) -> io::Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    let set = |number, value: &[u8]| InterfaceRequest::new(CARD, value).carry_out(&socket, number);
    set(SIOCSIFADDR, &socket_address(address.ip))?;
    set(SIOCSIFNETMASK, &socket_address(address.mask()))?;
    set(SIOCSIFFLAGS, &IFF_UP.to_ne_bytes())
}

/// Calls a server: by one connection and one socket that stay, and by new connections.
fn call(Calls { gateway, server }: Calls) {
    let routed = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| {
        let anywhere = socket_address(Ipv4Addr::UNSPECIFIED);
        let gateway = socket_address(gateway);
        let route = RouteRequest::new(anywhere, gateway, RTF_UP_GATEWAY);
        route.carry_out(&socket, SIOCADDRT)
    });
    if let Err(error) = routed {
        return say(&format!("no route through {gateway}: {error}"));
    }
    thread::spawn(move || {
        let kept = TcpStream::connect(server).and_then(|mut kept| words(&mut kept));
        say(&format!("the connection to {server} has ended: {kept:?}"));
    });
    thread::spawn(move || {
        let sent = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| {
            loop {
                // A network may lose any datagram.
                let _ = socket.send_to(&ONCE.to_le_bytes(), server);
                thread::sleep(WORDS);
            }
        });
        let _: io::Result<()> = sent;
    });
    thread::spawn(move || {
        loop {
            // One may fail while the guest moves.
            let _ = call_once(server);
            thread::sleep(CALLS);
        }
    });
}

/// Says one word after the other, as each is repeated.
fn words(server: &mut TcpStream) -> io::Result<()> {
    server.set_nodelay(true)?;
    for word in 0_u64.. {
        server.write_all(&word.to_le_bytes())?;
        let mut answer = [0; 8];
        server.read_exact(&mut answer)?;
        if answer != word.to_le_bytes() {
            return Err(io::Error::other("another word came back"));
        }
        thread::sleep(WORDS);
    }
    Ok(())
}

fn call_once(server: SocketAddrV4) -> io::Result<()> {
    let mut server = TcpStream::connect_timeout(&server.into(), ANSWER)?;
    server.set_read_timeout(Some(ANSWER))?;
    server.write_all(&ONCE.to_le_bytes())?;
    server.read_exact(&mut [0; 8])
}

/// Returns a `struct sockaddr_in` without a port.
fn socket_address(ip: Ipv4Addr) -> [u8; 16] {
    let mut address = [0; 16];
    address[..2].copy_from_slice(&AF_INET.to_ne_bytes());
    address[4..8].copy_from_slice(&ip.octets());
    address
}

fn listen(port: u16, serve: fn(TcpStream) -> io::Result<()>) {
    let listener = match TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)) {
        Ok(listener) => listener,
        Err(error) => return say(&format!("TCP port {port}: {error}")),
    };
    let mut clients: Vec<thread::JoinHandle<()>> = Vec::new();
    for client in listener.incoming().filter_map(Result::ok) {
        clients.retain(|client| !client.is_finished());
        if clients.len() < CLIENTS_MAX {
            // A client that goes away ends its thread.
            clients.push(thread::spawn(move || drop(serve(client))));
        }
    }
}

fn echo(mut client: TcpStream) -> io::Result<()> {
    client.set_nodelay(true)?;
    let mut buffer = [0; 4096];
    loop {
        match client.read(&mut buffer)? {
            0 => return Ok(()),
            length => client.write_all(&buffer[..length])?,
        }
    }
}

fn echo_datagrams(socket: &UdpSocket) -> io::Result<()> {
    let mut buffer = [0; 2048];
    loop {
        let (length, from) = socket.recv_from(&mut buffer)?;
        // A network may lose any answer.
        let _ = socket.send_to(&buffer[..length], from);
    }
}

/// Sends numbers of 8 bytes, little-endian, from 0 on.
fn download(mut client: TcpStream) -> io::Result<()> {
    let mut next = 0u64;
    let mut buffer = [0; 8192];
    loop {
        for place in buffer.chunks_exact_mut(8) {
            place.copy_from_slice(&next.to_le_bytes());
            next += 1;
        }
        client.write_all(&buffer)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_prefix() {
        let address = Address::parse("10.78.0.2/24").unwrap();
        assert_eq!(address.mask(), Ipv4Addr::new(255, 255, 255, 0));
        for wrong in [
            "10.78.0.2",
            "10.78.0.2/0",
            "10.78.0.2/33",
            "10.78.0/24",
            "a/b",
        ] {
            assert_eq!(Address::parse(wrong), None, "{wrong}");
        }
        assert_eq!(socket_address(address.ip)[..8], [2, 0, 0, 0, 10, 78, 0, 2]);
    }

    #[test]
    fn a_server_is_called_through_a_gateway() {
        let calls = Calls::parse("10.78.0.1,192.0.2.1:7000").unwrap();
        assert_eq!(calls.gateway, Ipv4Addr::new(10, 78, 0, 1));
        assert_eq!(calls.server.port(), 7000);
        for wrong in ["10.78.0.1", "10.78.0.1,192.0.2.1", "a,192.0.2.1:7000"] {
            assert_eq!(Calls::parse(wrong), None, "{wrong}");
        }
        assert_eq!(size_of::<RouteRequest>(), 120);
    }

    #[test]
    fn clients_are_served() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let serving = thread::spawn(move || {
            let (first, _) = listener.accept().unwrap();
            let _ = echo(first);
            let (second, _) = listener.accept().unwrap();
            let _ = download(second);
        });
        let mut client = TcpStream::connect(address).unwrap();
        client.write_all(b"word").unwrap();
        let mut word = [0; 4];
        client.read_exact(&mut word).unwrap();
        assert_eq!(&word, b"word");
        drop(client);
        let mut client = TcpStream::connect(address).unwrap();
        for number in 0..5000u64 {
            let mut bytes = [0; 8];
            client.read_exact(&mut bytes).unwrap();
            assert_eq!(u64::from_le_bytes(bytes), number);
        }
        drop(client);
        serving.join().unwrap();
    }
}
