//! Encodes what two hosts say to each other about their paths (`docs/paths.md`, "Signals").

use longhaul_paths::tuning::CANDIDATES_MAX;
use longhaul_paths::{Candidate, Kind, Mapping, Message, Offer, Origin, Plan};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

/// The version of the format.
const VERSION: u8 = 1;
/// The length of a signal without candidates, in bytes.
const HEAD_BYTES: usize = 28;
/// The maximum length of a signal, in bytes.
pub const SIGNAL_BYTES_MAX: usize = 1200;
/// The maximum time from an answer to the start of its round.
pub const START_IN_MAX: Duration = Duration::from_secs(2);

/// Why bytes are no signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SignalError {
    /// Another version of the format.
    #[error("version {0} of the format is not known here; update the older host")]
    Version(u8),
    /// Shorter than it says, or longer than allowed.
    #[error("a signal of {0} bytes is cut, or over the limit of {SIGNAL_BYTES_MAX}")]
    Length(usize),
    /// More candidates than allowed.
    #[error("{0} candidates are over the limit of {CANDIDATES_MAX}")]
    Candidates(u8),
    /// Neither call nor answer.
    #[error("kind {0} is not known here")]
    Kind(u8),
    /// An address that is neither IPv4 nor IPv6.
    #[error("an address of family {0}")]
    Family(u8),
}

/// Returns the bytes of a message. Candidates over the limit are left out.
pub fn encode(message: &Message) -> Vec<u8> {
    let micros = |time: Duration| u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
    let (kind, start_in) = match message.kind {
        Kind::Call => (0, Duration::ZERO),
        Kind::Answer { start_in } => (1, start_in.min(START_IN_MAX)),
    };
    let plan = match message.plan {
        Plan::Punch => 0,
        Plan::Search => 1,
    };
    let Offer {
        candidates,
        mapping,
        udp_blocked,
    } = &message.offer;
    let (mapping, step) = match mapping {
        Mapping::Unknown => (0, 0),
        Mapping::NotTranslated => (1, 0),
        Mapping::EndpointIndependent => (2, 0),
        Mapping::Dependent { step } => (3, step.unwrap_or(0)),
    };
    let offered = candidates.iter().filter_map(|candidate| {
        let origin = origin_number(candidate.origin)?;
        Some((origin, candidate.address))
    });
    let offered: Vec<_> = offered.take(CANDIDATES_MAX).collect();
    let mut bytes = vec![VERSION, kind, plan, u8::from(*udp_blocked)];
    bytes.extend(message.instance.to_le_bytes());
    bytes.extend(message.round.to_le_bytes());
    bytes.extend(micros(message.round_trip).to_le_bytes());
    bytes.extend(micros(start_in).to_le_bytes());
    bytes.push(mapping);
    bytes.extend(step.to_le_bytes());
    bytes.push(offered.len() as u8);
    for (origin, address) in offered {
        bytes.push(origin);
        match address.ip() {
            IpAddr::V4(ip) => {
                bytes.push(4);
                bytes.extend(address.port().to_le_bytes());
                bytes.extend(ip.octets());
            }
            IpAddr::V6(ip) => {
                bytes.push(6);
                bytes.extend(address.port().to_le_bytes());
                bytes.extend(ip.octets());
            }
        }
    }
    bytes
}

/// Reads a message. What later versions add after the candidates is ignored, as are candidates of
/// unknown origin; an unknown plan is hole punching.
pub fn decode(bytes: &[u8]) -> Result<Message, SignalError> {
    let length = SignalError::Length(bytes.len());
    if bytes.len() > SIGNAL_BYTES_MAX {
        return Err(length);
    }
    let version = *bytes.first().ok_or(length)?;
    if version != VERSION {
        return Err(SignalError::Version(version));
    }
    let (head, mut rest) = bytes.split_first_chunk::<HEAD_BYTES>().ok_or(length)?;
    let mut fields = Fields(&head[1..]);
    let [kind, plan, flags] = fields.take().ok_or(length)?;
    let instance = u64::from_le_bytes(fields.take().ok_or(length)?);
    let round = u32::from_le_bytes(fields.take().ok_or(length)?);
    let round_trip = u32::from_le_bytes(fields.take().ok_or(length)?);
    let start_in = u32::from_le_bytes(fields.take().ok_or(length)?);
    let [mapping] = fields.take().ok_or(length)?;
    let step = i16::from_le_bytes(fields.take().ok_or(length)?);
    let [count] = fields.take().ok_or(length)?;
    if usize::from(count) > CANDIDATES_MAX {
        return Err(SignalError::Candidates(count));
    }
    let mut candidates = Vec::new();
    for _ in 0..count {
        let (candidate, later) = decode_candidate(rest).map_err(|e| e.unwrap_or(length))?;
        candidates.extend(candidate);
        rest = later;
    }
    let start_in = Duration::from_micros(start_in.into()).min(START_IN_MAX);
    Ok(Message {
        kind: match kind {
            0 => Kind::Call,
            1 => Kind::Answer { start_in },
            kind => return Err(SignalError::Kind(kind)),
        },
        instance,
        round,
        plan: match plan {
            1 => Plan::Search,
            _ => Plan::Punch,
        },
        round_trip: Duration::from_micros(round_trip.into()),
        offer: Offer {
            candidates,
            mapping: match mapping {
                1 => Mapping::NotTranslated,
                2 => Mapping::EndpointIndependent,
                3 => Mapping::Dependent {
                    step: Some(step).filter(|step| *step != 0),
                },
                _ => Mapping::Unknown,
            },
            udp_blocked: flags & 1 != 0,
        },
    })
}

/// Reads a candidate; `None` if its origin is not known here. An error without a value: cut.
fn decode_candidate(bytes: &[u8]) -> Result<(Option<Candidate>, &[u8]), Option<SignalError>> {
    let mut fields = Fields(bytes);
    let [origin, family] = fields.take().ok_or(None)?;
    let port = u16::from_le_bytes(fields.take().ok_or(None)?);
    let ip: IpAddr = match family {
        4 => Ipv4Addr::from(fields.take::<4>().ok_or(None)?).into(),
        6 => Ipv6Addr::from(fields.take::<16>().ok_or(None)?).into(),
        family => return Err(Some(SignalError::Family(family))),
    };
    let candidate = origin_of(origin).map(|origin| Candidate {
        origin,
        address: SocketAddr::new(ip, port),
    });
    Ok((candidate, fields.0))
}

struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*field)
    }
}

/// Peer-reflexive addresses are never offered.
fn origin_number(origin: Origin) -> Option<u8> {
    match origin {
        Origin::Host => Some(0),
        Origin::Configured => Some(1),
        Origin::PortMapped => Some(2),
        Origin::Reflexive => Some(3),
        Origin::Predicted => Some(4),
        Origin::PeerReflexive => None,
    }
}

fn origin_of(number: u8) -> Option<Origin> {
    Some(match number {
        0 => Origin::Host,
        1 => Origin::Configured,
        2 => Origin::PortMapped,
        3 => Origin::Reflexive,
        4 => Origin::Predicted,
        _ => return None,
    })
}
