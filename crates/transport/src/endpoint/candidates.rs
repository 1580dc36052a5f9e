//! Holds the addresses under which a host may answer, and orders them for dialling (RFC 8305).

use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::io;
use std::net::SocketAddr;

/// The maximum number of resolved addresses that one dial tries.
pub(super) const CANDIDATES_MAX: usize = 32;
/// The maximum number of addresses that one name may add.
const ADDRESSES_PER_NAME_MAX: usize = 8;

/// Where an address comes from; origins that come first are preferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Origin {
    /// The trust store, or the person who asks.
    Configured,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Configured => "configured",
        })
    }
}

/// The addresses under which a host may answer, not resolved yet.
#[derive(Debug, Clone)]
pub(crate) struct Candidates {
    sources: Vec<Source>,
}

/// One `host:port`, and where it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) origin: Origin,
    pub(super) address: String,
}

/// One address to dial.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) source: Source,
    /// The place of the source among the sources, and of the address among those of its name.
    place: (usize, usize),
    pub(super) address: SocketAddr,
}

impl Candidates {
    /// Returns addresses that an operator has configured, the preferred one first.
    pub(crate) fn configured(addresses: &[String]) -> Self {
        let sources = addresses.iter().map(|address| Source {
            origin: Origin::Configured,
            address: address.clone(),
        });
        Self {
            sources: sources.collect(),
        }
    }

    /// Returns the sources with their places.
    pub(super) fn into_sources(self) -> impl Iterator<Item = (usize, Source)> {
        self.sources.into_iter().enumerate()
    }
}

impl Source {
    /// Returns the address if it needs no name service.
    pub(super) fn literal(&self) -> Option<SocketAddr> {
        self.address.parse().ok()
    }

    /// Asks the name service.
    pub(super) async fn resolve(&self) -> io::Result<Vec<SocketAddr>> {
        let resolved = tokio::net::lookup_host(&self.address).await?;
        Ok(resolved.take(ADDRESSES_PER_NAME_MAX).collect())
    }
}

/// The candidates that wait to be dialled.
pub(super) struct Queue {
    waiting: VecDeque<Candidate>,
    known: HashSet<SocketAddr>,
    worked: Option<SocketAddr>,
    last_is_ipv6: Option<bool>,
}

impl Queue {
    /// `worked`: the address that is dialled first if it is among the candidates.
    pub(super) fn new(worked: Option<SocketAddr>) -> Self {
        Self {
            waiting: VecDeque::new(),
            known: HashSet::new(),
            worked: worked.map(canonical),
            last_is_ipv6: None,
        }
    }

    /// Adds the addresses of a source. An address that is known already counts once. Returns the
    /// number of addresses that are left out because there are too many.
    pub(super) fn add(&mut self, place: usize, source: &Source, resolved: &[SocketAddr]) -> usize {
        let mut left_out = 0;
        for (index, address) in resolved.iter().enumerate() {
            if self.known.contains(&canonical(*address)) {
                continue;
            }
            if self.known.len() >= CANDIDATES_MAX {
                left_out += 1;
                continue;
            }
            self.known.insert(canonical(*address));
            let candidate = Candidate {
                source: source.clone(),
                place: (place, index),
                address: *address,
            };
            let order = |candidate: &Candidate| (candidate.source.origin, candidate.place);
            let at = self
                .waiting
                .partition_point(|other| order(other) <= order(&candidate));
            self.waiting.insert(at, candidate);
        }
        left_out
    }

    /// Returns the next address: the one that worked last, then those of both families in turn
    /// (RFC 8305, section 4).
    pub(super) fn next(&mut self) -> Option<Candidate> {
        let worked = |candidate: &Candidate| Some(canonical(candidate.address)) == self.worked;
        let in_turn = |candidate: &Candidate| Some(is_ipv6(candidate.address)) != self.last_is_ipv6;
        let at = self.waiting.iter().position(worked);
        let at = at.or_else(|| self.waiting.iter().position(in_turn));
        let candidate = self.waiting.remove(at.unwrap_or(0))?;
        self.last_is_ipv6 = Some(is_ipv6(candidate.address));
        Some(candidate)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

/// Returns the address without the form for a dual-stack socket.
pub(crate) fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        ip if ip == address.ip() => address,
        ip => SocketAddr::new(ip, address.port()),
    }
}

fn is_ipv6(address: SocketAddr) -> bool {
    canonical(address).is_ipv6()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(address: &str) -> Source {
        let candidates = Candidates::configured(&[address.to_owned()]);
        candidates.into_sources().next().unwrap().1
    }

    fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn drain(mut queue: Queue) -> Vec<String> {
        std::iter::from_fn(|| Some(queue.next()?.address.to_string())).collect()
    }

    #[test]
    fn families_take_turns_from_the_preferred_one_on() {
        let mut queue = Queue::new(None);
        let name = addresses(&["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1", "[fd00::1]:1"]);
        // A source that is resolved later keeps its place.
        assert_eq!(queue.add(1, &source("later:1"), &name), 0);
        assert_eq!(
            queue.add(0, &source("first:1"), &addresses(&["10.0.0.9:1"])),
            0
        );
        let order = [
            "10.0.0.9:1",
            "[fd00::1]:1",
            "10.0.0.1:1",
            "10.0.0.2:1",
            "10.0.0.3:1",
        ];
        assert_eq!(drain(queue), order);
    }

    #[test]
    fn what_worked_last_is_first_and_only_if_it_is_a_candidate() {
        let given = addresses(&["10.0.0.1:1", "10.0.0.2:1"]);
        let mut queue = Queue::new(Some("[::ffff:10.0.0.2]:1".parse().unwrap()));
        queue.add(0, &source("name:1"), &given);
        assert_eq!(drain(queue), ["10.0.0.2:1", "10.0.0.1:1"]);
        let mut queue = Queue::new(Some("10.0.0.7:1".parse().unwrap()));
        queue.add(0, &source("name:1"), &given);
        assert_eq!(drain(queue), ["10.0.0.1:1", "10.0.0.2:1"]);
    }

    #[test]
    fn an_address_counts_once_and_their_number_is_bounded() {
        let mut queue = Queue::new(None);
        queue.add(0, &source("10.0.0.1:1"), &addresses(&["10.0.0.1:1"]));
        queue.add(1, &source("name:1"), &addresses(&["[::ffff:10.0.0.1]:1"]));
        let many: Vec<SocketAddr> = (1..=40)
            .map(|port| SocketAddr::new([10, 0, 0, 2].into(), port))
            .collect();
        assert_eq!(
            queue.add(2, &source("many:1"), &many),
            40 - (CANDIDATES_MAX - 1)
        );
        assert_eq!(drain(queue).len(), CANDIDATES_MAX);
    }
}
