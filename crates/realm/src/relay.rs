//! Owns relayed datagrams: their header, their sessions and the limits of a relay.

use crate::limits::RELAY_DATAGRAM_BYTES_MAX;
use crate::protocol::SessionId;
use longhaul_protocol::HostId;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

/// The first byte of a relayed datagram, within the range for frames (4 to 63).
pub const KIND: u8 = 60;
/// Length of the header, in bytes: kind, session (little-endian).
pub const HEADER_BYTES: usize = 5;
/// A session that carried nothing for this long ends.
pub const SESSION_IDLE: Duration = Duration::from_secs(120);

/// Why bytes are no relayed datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Another kind of datagram.
    #[error("not a relayed datagram")]
    Kind,
    /// Without a payload.
    #[error("a relayed datagram without a payload")]
    Short,
    /// Over the limit.
    #[error("a relayed datagram of more than {RELAY_DATAGRAM_BYTES_MAX} bytes")]
    Long,
}

/// Returns the header of a session's datagrams.
pub fn header(session: SessionId) -> [u8; HEADER_BYTES] {
    let [a, b, c, d] = session.0.to_le_bytes();
    [KIND, a, b, c, d]
}

/// Splits a datagram into session and payload.
pub fn parse(datagram: &[u8]) -> Result<(SessionId, &[u8]), HeaderError> {
    match datagram {
        [KIND, ..] if datagram.len() > RELAY_DATAGRAM_BYTES_MAX => Err(HeaderError::Long),
        [KIND, a, b, c, d, payload @ ..] if !payload.is_empty() => {
            let session = u32::from_le_bytes([*a, *b, *c, *d]);
            Ok((SessionId(session), payload))
        }
        [KIND, ..] => Err(HeaderError::Short),
        _ => Err(HeaderError::Kind),
    }
}

/// A rate, and how much may come at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Units a second.
    pub per_s: u64,
    /// Units at once.
    pub burst: u64,
}

/// A token bucket.
#[derive(Debug, Clone, Copy)]
pub struct Bucket {
    rate: Rate,
    /// In billionths of a unit.
    held: u128,
    at: Duration,
}

const UNIT: u128 = 1_000_000_000;

impl Bucket {
    /// A full bucket.
    pub fn new(rate: Rate, steady: Duration) -> Self {
        Self {
            rate,
            held: u128::from(rate.burst) * UNIT,
            at: steady,
        }
    }

    fn fill(&mut self, steady: Duration) {
        let passed = steady.saturating_sub(self.at).as_nanos();
        self.at = self.at.max(steady);
        let more = passed.saturating_mul(self.rate.per_s.into());
        let most = u128::from(self.rate.burst) * UNIT;
        self.held = self.held.saturating_add(more).min(most);
    }

    /// Returns whether so much is there now.
    pub fn has(&mut self, units: u64, steady: Duration) -> bool {
        self.fill(steady);
        self.held >= u128::from(units) * UNIT
    }

    /// Takes so much, if it is there.
    pub fn take(&mut self, units: u64, steady: Duration) -> bool {
        let there = self.has(units, steady);
        if there {
            self.held -= u128::from(units) * UNIT;
        }
        there
    }
}

/// Limits of a relay.
#[derive(Debug, Clone, Copy)]
pub struct RelayLimits {
    /// Most sessions.
    pub sessions: usize,
    /// Most sessions of one host.
    pub sessions_per_host: usize,
    /// Bytes for one session, in both directions together.
    pub session: Rate,
    /// Bytes that one host sends, over all of its sessions.
    pub host: Rate,
    /// Bytes in total.
    pub total: Rate,
}

/// 64 sessions of a host; 1 Gbit/s for a session, 2 for a host, 4 in total, 20 ms at once.
impl Default for RelayLimits {
    fn default() -> Self {
        let gbit = |count: u64| Rate {
            per_s: count * 125_000_000,
            burst: count * 2_500_000,
        };
        Self {
            sessions: 4096,
            sessions_per_host: 64,
            session: gbit(1),
            host: gbit(2),
            total: gbit(4),
        }
    }
}

/// What was relayed and dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RelayCounters {
    /// Datagrams relayed.
    pub relayed: u64,
    /// Their bytes, headers included.
    pub relayed_bytes: u64,
    /// Dropped: malformed.
    pub malformed: u64,
    /// Dropped: no such session, or not from one of its hosts.
    pub strangers: u64,
    /// Dropped: over a limit of session, host or total.
    pub limited: u64,
    /// Dropped: the other host is not connected.
    pub absent: u64,
}

#[derive(Debug, Clone)]
struct Session {
    ends: [HostId; 2],
    bucket: Bucket,
    used: Duration,
}

#[derive(Debug, Clone)]
struct End {
    address: Option<SocketAddr>,
    bucket: Bucket,
    sessions: usize,
}

/// The relay of a server.
#[derive(Debug, Clone)]
pub struct Relay {
    limits: RelayLimits,
    sessions: BTreeMap<SessionId, Session>,
    hosts: BTreeMap<HostId, End>,
    total: Bucket,
    counters: RelayCounters,
}

impl Relay {
    /// A relay without sessions.
    pub fn new(limits: RelayLimits, steady: Duration) -> Self {
        Self {
            limits,
            sessions: BTreeMap::new(),
            hosts: BTreeMap::new(),
            total: Bucket::new(limits.total, steady),
            counters: RelayCounters::default(),
        }
    }

    /// Returns the counters.
    pub fn counters(&self) -> RelayCounters {
        self.counters
    }

    /// Returns the number of sessions.
    pub fn sessions(&self) -> usize {
        self.sessions.len()
    }

    /// Opens a session between two hosts at these addresses, or finds the one that they have.
    /// `None`: a limit.
    pub fn open(
        &mut self,
        ends: [(HostId, SocketAddr); 2],
        random: u32,
        steady: Duration,
    ) -> Option<SessionId> {
        let mut pair = ends.map(|(host, _)| host);
        pair.sort_unstable();
        if let Some((id, _)) = self.sessions.iter().find(|(_, s)| s.ends == pair) {
            return Some(*id);
        }
        let count = |host| self.hosts.get(host).map_or(0, |end| end.sessions);
        let full = pair
            .iter()
            .any(|host| count(host) >= self.limits.sessions_per_host);
        if full || self.sessions.len() >= self.limits.sessions || pair[0] == pair[1] {
            return None;
        }
        let mut id = SessionId(random);
        while self.sessions.contains_key(&id) {
            id.0 = id.0.wrapping_add(1);
        }
        for (host, address) in ends {
            let end = self.hosts.entry(host).or_insert(End {
                address: None,
                bucket: Bucket::new(self.limits.host, steady),
                sessions: 0,
            });
            end.address = Some(address);
            end.sessions += 1;
        }
        self.sessions.insert(
            id,
            Session {
                ends: pair,
                bucket: Bucket::new(self.limits.session, steady),
                used: steady,
            },
        );
        Some(id)
    }

    /// Closes a session of this host. Returns the other host.
    pub fn close(&mut self, session: SessionId, of: HostId) -> Option<HostId> {
        let ends = self.sessions.get(&session)?.ends;
        let other = ends.into_iter().find(|end| *end != of)?;
        if !ends.contains(&of) {
            return None;
        }
        self.remove(session);
        Some(other)
    }

    fn remove(&mut self, session: SessionId) {
        let ends = self.sessions.remove(&session).map(|session| session.ends);
        for host in ends.into_iter().flatten() {
            if let Some(end) = self.hosts.get_mut(&host) {
                end.sessions = end.sessions.saturating_sub(1);
                if end.sessions == 0 {
                    self.hosts.remove(&host);
                }
            }
        }
    }

    /// Closes all sessions of a host. Returns them with the other hosts.
    pub fn close_all(&mut self, of: HostId) -> Vec<(SessionId, HostId)> {
        let theirs = self.sessions.iter().filter(|(_, s)| s.ends.contains(&of));
        let ids: Vec<SessionId> = theirs.map(|(id, _)| *id).collect();
        ids.into_iter()
            .filter_map(|id| self.close(id, of).map(|other| (id, other)))
            .collect()
    }

    /// Takes the address of a host's connection; `None` while it has none.
    pub fn moved(&mut self, host: HostId, address: Option<SocketAddr>) {
        if let Some(end) = self.hosts.get_mut(&host) {
            end.address = address;
        }
    }

    /// Ends sessions that carried nothing for [`SESSION_IDLE`], and returns them with their hosts.
    pub fn expire(&mut self, steady: Duration) -> Vec<(SessionId, [HostId; 2])> {
        let idle = |session: &Session| steady.saturating_sub(session.used) >= SESSION_IDLE;
        let expired = self.sessions.iter().filter(|(_, session)| idle(session));
        let expired: Vec<_> = expired.map(|(id, session)| (*id, session.ends)).collect();
        expired.iter().for_each(|(id, _)| self.remove(*id));
        expired
    }

    /// Returns when the next session may expire.
    pub fn next_expiry(&self) -> Option<Duration> {
        let used = self.sessions.values().map(|session| session.used).min()?;
        Some(used + SESSION_IDLE)
    }

    /// Judges a datagram from an address: where it goes, unchanged, or `None` to drop it.
    pub fn forward(
        &mut self,
        from: SocketAddr,
        datagram: &[u8],
        steady: Duration,
    ) -> Option<SocketAddr> {
        let Ok((id, _)) = parse(datagram) else {
            self.counters.malformed += 1;
            return None;
        };
        let address = |host: &HostId| self.hosts.get(host).and_then(|end| end.address);
        let sender = self.sessions.get(&id).and_then(|session| {
            let at = session
                .ends
                .iter()
                .position(|end| address(end) == Some(from))?;
            Some((session.ends[at], session.ends[1 - at]))
        });
        let Some((sender, receiver)) = sender else {
            self.counters.strangers += 1;
            return None;
        };
        let Some(to) = address(&receiver) else {
            self.counters.absent += 1;
            return None;
        };
        let bytes = datagram.len() as u64;
        let (Some(session), Some(end)) = (self.sessions.get_mut(&id), self.hosts.get_mut(&sender))
        else {
            return None;
        };
        let fits = session.bucket.has(bytes, steady)
            && end.bucket.has(bytes, steady)
            && self.total.take(bytes, steady);
        if !fits {
            self.counters.limited += 1;
            return None;
        }
        session.bucket.take(bytes, steady);
        end.bucket.take(bytes, steady);
        session.used = steady;
        self.counters.relayed += 1;
        self.counters.relayed_bytes += bytes;
        Some(to)
    }
}
