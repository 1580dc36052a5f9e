//! Reads of an IPv4 packet which flow it belongs to, and what it does with the flow.

use longhaul_protocol::flows::End;

/// IPv4's number of ICMP.
pub(crate) const ICMP: u8 = 1;
/// IPv4's number of TCP.
pub(crate) const TCP: u8 = 6;
/// IPv4's number of UDP.
pub(crate) const UDP: u8 = 17;

const IPV4_BYTES: usize = 20;
const MORE_FRAGMENTS: u16 = 0x2000;
const FRAGMENT_OFFSET: u16 = 0x1fff;
const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;
const ECHO_REPLY: u8 = 0;
const ECHO_REQUEST: u8 = 8;
/// Destination unreachable, source quench, time exceeded, parameter problem: they carry the
/// beginning of the packet that they are about.
const ERRORS: [u8; 4] = [3, 4, 11, 12];

/// What a packet does with its flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Signal {
    /// TCP: a request to connect.
    Begins,
    /// It belongs to the flow.
    Goes,
    /// TCP: its sender sends no more.
    Ends,
    /// TCP: the connection is reset.
    Breaks,
    /// ICMP: an error about a packet of the flow.
    Reports,
}

/// Which part of a packet this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Whole,
    FirstFragment,
    /// A fragment without ports.
    LaterFragment,
}

/// An IPv4 packet, as far as its flow depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Packet {
    pub(crate) protocol: u8,
    /// The sender's end of the flow.
    pub(crate) source: End,
    pub(crate) destination: End,
    pub(crate) signal: Signal,
    pub(crate) part: Part,
}

impl Packet {
    /// Reads a packet. Returns `None` if it is malformed.
    pub(crate) fn read(bytes: &[u8]) -> Option<Self> {
        let (mut packet, behind) = Self::read_header(bytes)?;
        match (packet.part, packet.protocol) {
            (Part::LaterFragment, _) => {}
            (_, TCP) => {
                let header: &[u8; 14] = behind.first_chunk()?;
                packet.set_ports(ports(header));
                packet.signal = match header[13] {
                    flags if flags & RST != 0 => Signal::Breaks,
                    flags if flags & FIN != 0 => Signal::Ends,
                    flags if flags & (SYN | ACK) == SYN => Signal::Begins,
                    _ => Signal::Goes,
                };
            }
            (_, UDP) => packet.set_ports(ports(behind.first_chunk::<8>()?)),
            (_, ICMP) => {
                let header: &[u8; 8] = behind.first_chunk()?;
                let id = u16::from_be_bytes([header[4], header[5]]);
                match header[0] {
                    ECHO_REQUEST => packet.set_ports((id, 0)),
                    ECHO_REPLY => packet.set_ports((0, id)),
                    kind if ERRORS.contains(&kind) => return Self::reported(&behind[8..]),
                    _ => {}
                }
            }
            _ => {}
        }
        Some(packet)
    }

    fn read_header(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let header: &[u8; IPV4_BYTES] = bytes.first_chunk()?;
        let length = usize::from(header[0] & 0xf) * 4;
        if header[0] >> 4 != 4 || length < IPV4_BYTES {
            return None;
        }
        let behind = bytes.get(length..)?;
        let fragment = u16::from_be_bytes([header[6], header[7]]);
        let end = |at: usize| {
            let address = *header[at..].first_chunk()?;
            Some(End { address, port: 0 })
        };
        let packet = Self {
            protocol: header[9],
            source: end(12)?,
            destination: end(16)?,
            signal: Signal::Goes,
            part: match fragment {
                fragment if fragment & FRAGMENT_OFFSET != 0 => Part::LaterFragment,
                fragment if fragment & MORE_FRAGMENTS != 0 => Part::FirstFragment,
                _ => Part::Whole,
            },
        };
        Some((packet, behind))
    }

    /// Reads the packet that an error is about. The error goes to its sender: the ends are turned
    /// around.
    fn reported(about: &[u8]) -> Option<Self> {
        let (mut packet, behind) = Self::read_header(about)?;
        match (packet.part, packet.protocol) {
            (Part::LaterFragment, _) => {}
            (_, TCP | UDP) => packet.set_ports(ports(behind.first_chunk::<8>()?)),
            (_, ICMP) => {
                let header: &[u8; 8] = behind.first_chunk()?;
                let id = u16::from_be_bytes([header[4], header[5]]);
                packet.set_ports(if header[0] == ECHO_REPLY {
                    (0, id)
                } else {
                    (id, 0)
                });
            }
            _ => {}
        }
        (packet.source, packet.destination) = (packet.destination, packet.source);
        packet.signal = Signal::Reports;
        Some(packet)
    }

    fn set_ports(&mut self, (source, destination): (u16, u16)) {
        (self.source.port, self.destination.port) = (source, destination);
    }
}

fn ports<const N: usize>(header: &[u8; N]) -> (u16, u16) {
    let port = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
    (port(0), port(2))
}

#[cfg(test)]
pub(crate) mod testing {
    use super::{FRAGMENT_OFFSET, ICMP, MORE_FRAGMENTS, TCP, UDP};

    /// An IPv4 packet with an option of 4 bytes, so that nothing relies on the shortest header.
    pub(crate) fn ipv4(protocol: u8, [from, to]: [[u8; 4]; 2], rest: &[u8]) -> Vec<u8> {
        let length = 24 + rest.len() as u16;
        let [high, low] = length.to_be_bytes();
        let mut packet = vec![0x46, 0, high, low, 0, 7, 0, 0, 64, protocol, 0, 0];
        packet.extend([from, to].concat());
        packet.extend([1, 1, 1, 0]);
        packet.extend(rest);
        packet
    }

    pub(crate) fn tcp(ends: [([u8; 4], u16); 2], flags: u8) -> Vec<u8> {
        let [(from, source), (to, destination)] = ends;
        let mut segment = [source.to_be_bytes(), destination.to_be_bytes()].concat();
        segment.extend([0, 0, 0, 1, 0, 0, 0, 2, 0x50, flags, 1, 0, 0, 0, 0, 0]);
        ipv4(TCP, [from, to], &segment)
    }

    pub(crate) fn udp(ends: [([u8; 4], u16); 2]) -> Vec<u8> {
        let [(from, source), (to, destination)] = ends;
        let mut datagram = [source.to_be_bytes(), destination.to_be_bytes()].concat();
        datagram.extend([0, 8, 0, 0]);
        ipv4(UDP, [from, to], &datagram)
    }

    pub(crate) fn icmp(addresses: [[u8; 4]; 2], kind: u8, id: u16, rest: &[u8]) -> Vec<u8> {
        let mut message = vec![kind, 0, 0, 0];
        message.extend(id.to_be_bytes());
        message.extend([0, 1]);
        message.extend(rest);
        ipv4(ICMP, addresses, &message)
    }

    /// Makes a packet a fragment at an offset, in units of 8 bytes.
    pub(crate) fn fragment(mut packet: Vec<u8>, offset: u16) -> Vec<u8> {
        assert!(offset <= FRAGMENT_OFFSET);
        packet[6..8].copy_from_slice(&(MORE_FRAGMENTS | offset).to_be_bytes());
        packet
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{fragment, icmp, ipv4, tcp, udp};
    use super::*;

    const A: [u8; 4] = [10, 0, 0, 5];
    const B: [u8; 4] = [192, 0, 2, 1];
    const ENDS: [([u8; 4], u16); 2] = [(A, 40_000), (B, 80)];

    fn read(bytes: &[u8]) -> (u8, [(u16, Signal); 1], u16, Part) {
        let packet = Packet::read(bytes).unwrap();
        assert_eq!((packet.source.address, packet.destination.address), (A, B));
        let Packet {
            protocol,
            source,
            destination,
            signal,
            part,
        } = packet;
        (protocol, [(source.port, signal)], destination.port, part)
    }

    #[test]
    fn the_flow_of_each_protocol_is_read() {
        let whole = Part::Whole;
        for (flags, signal) in [
            (0x02, Signal::Begins),
            (0xc2, Signal::Begins),
            (0x12, Signal::Goes),
            (0x10, Signal::Goes),
            (0x18, Signal::Goes),
            (0x11, Signal::Ends),
            (0x04, Signal::Breaks),
            (0x15, Signal::Breaks),
        ] {
            let expected = (TCP, [(40_000, signal)], 80, whole);
            assert_eq!(read(&tcp(ENDS, flags)), expected, "{flags:#x}");
        }
        let expected = (UDP, [(40_000, Signal::Goes)], 80, whole);
        assert_eq!(read(&udp(ENDS)), expected);
        let echo = |kind| read(&icmp([A, B], kind, 9, b"echo"));
        assert_eq!(echo(8), (ICMP, [(9, Signal::Goes)], 0, whole));
        assert_eq!(echo(0), (ICMP, [(0, Signal::Goes)], 9, whole));
        let expected = (ICMP, [(0, Signal::Goes)], 0, whole);
        assert_eq!(echo(13), expected, "no echo");
        let esp = ipv4(50, [A, B], b"sealed");
        assert_eq!(read(&esp), (50, [(0, Signal::Goes)], 0, whole));
    }

    #[test]
    fn an_error_belongs_to_the_flow_that_it_is_about() {
        // B sent to A, and A answers with an error.
        let back = [(B, 80), (A, 40_000)];
        for kind in ERRORS {
            let error = icmp([A, B], kind, 0, &udp(back));
            let expected = (UDP, [(40_000, Signal::Reports)], 80, Part::Whole);
            assert_eq!(read(&error), expected);
        }
        let error = icmp([A, B], 3, 0, &tcp(back, 4));
        let expected = (TCP, [(40_000, Signal::Reports)], 80, Part::Whole);
        assert_eq!(read(&error), expected);
        for (kind, ports) in [(8, (0, 9)), (0, (9, 0))] {
            let error = icmp([A, B], 11, 0, &icmp([B, A], kind, 9, b""));
            let expected = (ICMP, [(ports.0, Signal::Reports)], ports.1, Part::Whole);
            assert_eq!(read(&error), expected);
        }
        assert_eq!(Packet::read(&icmp([A, B], 3, 0, b"no packet")), None);
    }

    #[test]
    fn fragments_and_what_is_malformed() {
        let first = fragment(udp(ENDS), 0);
        let expected = (UDP, [(40_000, Signal::Goes)], 80, Part::FirstFragment);
        assert_eq!(read(&first), expected);
        let later = fragment(udp(ENDS), 1);
        let expected = (UDP, [(0, Signal::Goes)], 0, Part::LaterFragment);
        assert_eq!(read(&later), expected);
        let mut last = fragment(udp(ENDS), 1);
        last[6] &= !0x20;
        assert_eq!(read(&last), expected, "no more fragments");
        let whole = tcp(ENDS, 2);
        for cut in 0..24 + 14 {
            assert_eq!(Packet::read(&whole[..cut]), None, "{cut}");
        }
        let mut short = udp(ENDS);
        short[0] = 0x44;
        assert_eq!(Packet::read(&short), None);
        let mut v6 = udp(ENDS);
        v6[0] = 0x66;
        assert_eq!(Packet::read(&v6), None);
    }
}
