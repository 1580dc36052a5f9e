//! Determines by UDP datagrams how a host's NAT maps and filters, with the terms of RFC 4787.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use super::no;
use crate::error::{During, LabError};
use crate::lab::Host;

/// How often a datagram is sent until its answer comes.
const TRIES: u32 = 5;
/// How long an answer may take beside the round trip.
const PATIENCE: Duration = Duration::from_millis(300);
/// The rounds of answers by which the filter is determined: on a lossy link some are lost.
const ROUNDS: u8 = 3;

/// On what the mapping or the filtering of a NAT depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dependence {
    /// It is independent of the far end.
    Independent,
    /// On the far end's address.
    Address,
    /// On its address and port.
    AddressAndPort,
}

/// How a host's datagrams get to the Internet and back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Behaviour {
    /// On what the mapping depends.
    pub mapping: Dependence,
    /// On what the filtering depends.
    pub filtering: Dependence,
    /// The host's own address and port.
    pub own: SocketAddr,
    /// The address and port that the server sees.
    pub seen: SocketAddr,
}

impl Behaviour {
    /// Returns whether there is a NAT.
    pub fn is_translated(&self) -> bool {
        self.own.ip() != self.seen.ip()
    }
}

/// Determines the behaviour between a host and a server, by the protocol of the host's first
/// address. `None`: no UDP gets through. `rtt` is the round trip between them.
///
/// # Errors
/// When sockets cannot be made, or the answers make no sense.
pub fn examine(host: &Host, server: &Host, rtt: Duration) -> Result<Option<Behaviour>, LabError> {
    let own: IpAddr = parse(host.address())?;
    let servers: Vec<IpAddr> = server
        .addresses()
        .iter()
        .map(|address| parse(address))
        .collect::<Result<_, LabError>>()?;
    let mut same_family = servers
        .into_iter()
        .filter(|address| address.is_ipv4() == own.is_ipv4());
    let two = same_family.next().zip(same_family.next());
    let (first, second) = two.ok_or_else(|| no("server with two addresses"))?;
    let patience = rtt + PATIENCE;
    let ends = [
        bind(server, first, patience)?,
        bind(server, first, patience)?,
        bind(server, second, patience)?,
    ];
    let socket = bind(host, own, patience)?;
    let mut seen = Vec::new();
    for end in &ends {
        match seen_by(&socket, end)? {
            Some(address) => seen.push(address),
            None if seen.is_empty() => return Ok(None),
            None => return Err(unsteady(host)),
        }
    }
    let mapping = dependence(seen[0] == seen[1], seen[0] == seen[2]);
    let filtering = filtering(host, own, &ends, patience)?;
    Ok(Some(Behaviour {
        mapping,
        filtering,
        own: local(&socket)?,
        seen: seen[0],
    }))
}

/// Returns what something depends on that is the same, or not, for another port and for another
/// address.
fn dependence(other_port: bool, other_address: bool) -> Dependence {
    match (other_port, other_address) {
        (true, true) => Dependence::Independent,
        (true, false) => Dependence::Address,
        (false, _) => Dependence::AddressAndPort,
    }
}

/// Sends to the first end alone, and lets all three answer: first those that a filter may drop.
/// What has not come before the last answer of a round was dropped: the way keeps the order.
fn filtering(
    host: &Host,
    own: IpAddr,
    ends: &[UdpSocket; 3],
    patience: Duration,
) -> Result<Dependence, LabError> {
    let doing = || format!("examine the NAT of {}", host.name());
    let socket = bind(host, own, patience)?;
    let target = seen_by(&socket, &ends[0])?.ok_or_else(|| unsteady(host))?;
    let mut came = BTreeSet::new();
    for round in 0..ROUNDS {
        for end in [2, 1, 0] {
            let number = u8::try_from(end).unwrap_or(u8::MAX);
            ends[end].send_to(&[round, number], target).during(doing)?;
        }
        let mut buffer = [0; 16];
        let until = Instant::now() + patience;
        while Instant::now() < until {
            match socket.recv(&mut buffer) {
                Ok(2) => {
                    came.insert(buffer[1]);
                    if buffer[..2] == [round, 0] {
                        break;
                    }
                }
                Ok(_) => {}
                Err(error) if is_timeout(&error) => break,
                Err(error) => return Err(error).during(doing),
            }
        }
    }
    if !came.contains(&0) {
        return Err(unsteady(host));
    }
    Ok(dependence(came.contains(&1), came.contains(&2)))
}

/// Returns the address that a datagram from a socket has where it arrives; `None` if none does.
fn seen_by(socket: &UdpSocket, end: &UdpSocket) -> Result<Option<SocketAddr>, LabError> {
    let doing = || "examine a NAT".to_owned();
    let target = local(end)?;
    // Distinguishes it from another's that arrives late.
    let token = local(socket)?.port().to_le_bytes();
    let mut buffer = [0; 16];
    for _ in 0..TRIES {
        socket.send_to(&token, target).during(doing)?;
        match end.recv_from(&mut buffer) {
            Ok((2, from)) if buffer[..2] == token => return Ok(Some(from)),
            Ok(_) => {}
            Err(error) if is_timeout(&error) => {}
            Err(error) => return Err(error).during(doing),
        }
    }
    Ok(None)
}

fn bind(host: &Host, address: IpAddr, patience: Duration) -> Result<UdpSocket, LabError> {
    let doing = || format!("open a socket on {}", host.name());
    let socket = host
        .namespace()
        .enter(|| UdpSocket::bind((address, 0)))?
        .during(doing)?;
    socket.set_read_timeout(Some(patience)).during(doing)?;
    Ok(socket)
}

fn local(socket: &UdpSocket) -> Result<SocketAddr, LabError> {
    socket
        .local_addr()
        .during(|| "read a socket's address".to_owned())
}

fn parse(address: &str) -> Result<IpAddr, LabError> {
    address.parse().map_err(|_| LabError::Answer {
        what: "a host's address".to_owned(),
        message: address.to_owned(),
    })
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}

fn unsteady(host: &Host) -> LabError {
    LabError::Answer {
        what: format!("the NAT of {}", host.name()),
        message: "some datagrams get through and others do not (hint: try again on a link with \
                  less loss)"
            .to_owned(),
    }
}
