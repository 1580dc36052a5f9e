//! Encodes probes of paths and their acknowledgements (`docs/paths.md`, "Probes").

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The length of a probe and of an acknowledgement, before they are sealed, in bytes.
pub const PROBE_BYTES: usize = 28;
/// The maximum length that is read, in bytes.
pub const PROBE_BYTES_MAX: usize = 1200;

/// The payload of a datagram of kind 7.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Probe {
    /// Asks for an acknowledgement on the same way.
    Probe {
        /// The acknowledgement repeats it.
        id: u64,
    },
    /// Acknowledges a probe.
    Ack {
        /// The probe.
        id: u64,
        /// Where it came from, if it was direct.
        observed: Option<SocketAddr>,
    },
}

/// Why a payload is no probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    /// Shorter or longer than allowed.
    #[error("a probe of {0} bytes is cut, or over the limit of {PROBE_BYTES_MAX}")]
    Length(usize),
    /// Neither probe nor acknowledgement.
    #[error("type {0} is not known here")]
    Type(u8),
    /// An observed address that is neither IPv4 nor IPv6.
    #[error("an address of family {0}")]
    Family(u8),
}

impl Probe {
    /// Returns the payload.
    pub fn encode(&self) -> [u8; PROBE_BYTES] {
        let (kind, id, observed) = match self {
            Self::Probe { id } => (0, id, None),
            Self::Ack { id, observed } => (1, id, *observed),
        };
        let mut bytes = [0; PROBE_BYTES];
        bytes[0] = kind;
        bytes[4..12].copy_from_slice(&id.to_le_bytes());
        if let Some(address) = observed {
            bytes[2..4].copy_from_slice(&address.port().to_le_bytes());
            match address.ip() {
                IpAddr::V4(ip) => {
                    bytes[1] = 4;
                    bytes[12..16].copy_from_slice(&ip.octets());
                }
                IpAddr::V6(ip) => {
                    bytes[1] = 6;
                    bytes[12..].copy_from_slice(&ip.octets());
                }
            }
        }
        bytes
    }

    /// Reads a payload. What later versions add at the end is ignored.
    pub fn decode(payload: &[u8]) -> Result<Self, ProbeError> {
        let length = ProbeError::Length(payload.len());
        if payload.len() > PROBE_BYTES_MAX {
            return Err(length);
        }
        let (bytes, _) = payload.split_first_chunk::<PROBE_BYTES>().ok_or(length)?;
        let [kind, family, port_low, port_high, rest @ ..] = bytes;
        let (id, ip) = rest.split_first_chunk::<8>().ok_or(length)?;
        let ip: &[u8; 16] = ip.first_chunk().ok_or(length)?;
        let id = u64::from_le_bytes(*id);
        let [a, b, c, d, ..] = *ip;
        let ip: Option<IpAddr> = match family {
            0 => None,
            4 => Some(Ipv4Addr::new(a, b, c, d).into()),
            6 => Some(Ipv6Addr::from(*ip).into()),
            family => return Err(ProbeError::Family(*family)),
        };
        let port = u16::from_le_bytes([*port_low, *port_high]);
        match kind {
            0 => Ok(Self::Probe { id }),
            1 => Ok(Self::Ack {
                id,
                observed: ip.map(|ip| SocketAddr::new(ip, port)),
            }),
            kind => Err(ProbeError::Type(*kind)),
        }
    }
}
