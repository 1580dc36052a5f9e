//! What a host knows about one server: whether it answers over UDP, how it sees this host, and the
//! way to its relay.

use crate::random::Random;
use crate::tuning::{ADDRESSES_PER_SERVER_MAX, Tuning};
use longhaul_protocol::HostId;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

/// Questions to one address whose answers still count.
const QUESTIONS_MAX: usize = 8;

/// A server of this host: rendezvous, relay, or only STUN.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerConfig {
    /// Its identity.
    pub id: HostId,
    /// Its name, for people.
    pub name: String,
    /// Its addresses for STUN and relayed datagrams. Two ports of one server help to classify a
    /// NAT.
    pub addresses: Vec<SocketAddr>,
    /// Whether it introduces and relays.
    pub relays: bool,
    /// Whether the relay is also reached over TCP.
    pub tcp: bool,
}

/// How datagrams reach a relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Leg {
    /// Over UDP.
    Udp,
    /// Over TCP with TLS, since UDP does not get through.
    Tcp,
}

/// One address of a server, and what it answers.
#[derive(Debug, Clone)]
pub(super) struct Observer {
    pub(super) address: SocketAddr,
    questions: VecDeque<(u64, Duration)>,
    /// Questions in sequence without an answer.
    unanswered: u32,
    pub(super) next_at: Duration,
    down_retry: Duration,
    /// When this answer's question was sent first; servers are classified in this order.
    asked_at: Duration,
    pub(super) answered_at: Option<Duration>,
    pub(super) mapped: Option<SocketAddr>,
    pub(super) round_trip: Option<Duration>,
    /// No answer came, and no more is expected soon.
    pub(super) down: bool,
}

impl Observer {
    pub(super) fn new(address: SocketAddr, now: Duration, tuning: &Tuning) -> Self {
        Self {
            address,
            questions: VecDeque::new(),
            unanswered: 0,
            next_at: now,
            down_retry: tuning.down_retry,
            asked_at: now,
            answered_at: None,
            mapped: None,
            round_trip: None,
            down: false,
        }
    }

    pub(super) fn is_up(&self) -> bool {
        self.answered_at.is_some() && !self.down
    }

    /// Asks soon, with the usual repetitions.
    pub(super) fn check(&mut self, now: Duration) {
        if self.unanswered == 0 || self.down {
            self.unanswered = 0;
            self.next_at = now;
        }
    }

    /// Returns whether it went down, if a question is due; the caller asks with the id.
    pub(super) fn ask(
        &mut self,
        id: u64,
        now: Duration,
        tuning: &Tuning,
        random: &mut Random,
    ) -> bool {
        let mut went_down = false;
        if self.unanswered >= tuning.stun_tries {
            went_down = !self.down;
            self.down = true;
            self.mapped = None;
        }
        if self.down && self.unanswered >= tuning.stun_tries {
            self.next_at = now + random.about(self.down_retry);
            self.down_retry = (self.down_retry * 2).min(tuning.down_retry_max);
        } else {
            let doubled = self.unanswered.min(1);
            self.next_at = now + tuning.stun_timeout * 2_u32.pow(doubled);
        }
        self.unanswered += 1;
        self.questions.push_back((id, now));
        if self.questions.len() > QUESTIONS_MAX {
            self.questions.pop_front();
        }
        went_down
    }

    /// Takes an answer. Returns whether it changes anything that others see.
    pub(super) fn answered(
        &mut self,
        id: u64,
        mapped: SocketAddr,
        now: Duration,
        tuning: &Tuning,
        random: &mut Random,
    ) -> Option<bool> {
        let (_, sent_at) = *self.questions.iter().find(|(asked, _)| *asked == id)?;
        self.questions.clear();
        let changed = self.mapped != Some(mapped) || !self.is_up();
        if self.mapped != Some(mapped) {
            self.asked_at = sent_at;
        }
        self.mapped = Some(mapped);
        self.round_trip = Some(now.saturating_sub(sent_at));
        self.answered_at = Some(now);
        self.unanswered = 0;
        self.down = false;
        self.down_retry = tuning.down_retry;
        self.next_at = now + random.about(tuning.stun_interval);
        Some(changed)
    }

    /// Orders observations by the time of their mapping.
    pub(super) fn order(&self) -> (Duration, SocketAddr) {
        (self.asked_at, self.address)
    }
}

/// A server, its addresses, and the way over TCP.
#[derive(Debug, Clone)]
pub(super) struct Server {
    pub(super) config: ServerConfig,
    pub(super) observers: Vec<Observer>,
    /// It has accepted this host's registration.
    pub(super) attached: bool,
    pub(super) refused_until: Duration,
    pub(super) tcp: Tcp,
    since: Duration,
    udp_since: Option<Duration>,
    tcp_retry: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tcp {
    Closed { retry_at: Duration },
    Opening,
    Open,
}

/// What has to be done about a server's TCP connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TcpStep {
    Open,
    Close,
}

impl Server {
    pub(super) fn new(config: ServerConfig, now: Duration, tuning: &Tuning) -> Self {
        Self {
            config,
            observers: Vec::new(),
            attached: false,
            refused_until: Duration::ZERO,
            tcp: Tcp::Closed {
                retry_at: now + tuning.tcp_after,
            },
            since: now,
            udp_since: None,
            tcp_retry: tuning.down_retry,
        }
    }

    /// Returns the server under another configuration. Whether it knows this host, and its
    /// connection over TCP, do not depend on its addresses.
    pub(super) fn with(mut self, config: ServerConfig, now: Duration, tuning: &Tuning) -> Self {
        self.config = config;
        self.restart(now, tuning);
        self
    }

    /// Begins to ask the addresses that this host has the family of.
    pub(super) fn observe_from(&mut self, own: &[SocketAddr], now: Duration, tuning: &Tuning) {
        let addresses = self.config.addresses.iter();
        let reachable = addresses
            .filter(|address| own.iter().any(|own| own.is_ipv4() == address.is_ipv4()))
            .take(ADDRESSES_PER_SERVER_MAX);
        self.observers = reachable
            .map(|address| Observer::new(*address, now, tuning))
            .collect();
    }

    /// Returns whether a connection over TCP is open, or being opened.
    pub(super) fn tcp_is_wanted(&self) -> bool {
        self.tcp == Tcp::Open || self.tcp == Tcp::Opening
    }

    pub(super) fn udp_is_up(&self) -> bool {
        self.observers.iter().any(Observer::is_up)
    }

    pub(super) fn leg(&self) -> Option<Leg> {
        if self.udp_is_up() {
            Some(Leg::Udp)
        } else if self.tcp == Tcp::Open {
            Some(Leg::Tcp)
        } else {
            None
        }
    }

    pub(super) fn round_trip(&self) -> Option<Duration> {
        let up = self.observers.iter().filter(|observer| observer.is_up());
        up.filter_map(|observer| observer.round_trip).min()
    }

    /// The connection over TCP was made, failed or ended.
    pub(super) fn tcp_is(&mut self, open: bool, now: Duration, tuning: &Tuning) {
        if open {
            self.tcp = Tcp::Open;
            self.tcp_retry = tuning.down_retry;
        } else {
            let retry_at = now + self.tcp_retry;
            self.tcp = Tcp::Closed { retry_at };
            self.tcp_retry = (self.tcp_retry * 2).min(tuning.down_retry_max);
        }
    }

    /// Forgets whether UDP works, for a host that is on another network now.
    pub(super) fn restart(&mut self, now: Duration, tuning: &Tuning) {
        self.since = now;
        self.udp_since = None;
        self.tcp_retry = tuning.down_retry;
        if let Tcp::Closed { retry_at } = &mut self.tcp {
            *retry_at = now + tuning.tcp_after;
        }
    }

    fn tcp_due(&self, tuning: &Tuning) -> Option<Duration> {
        if !self.config.relays || !self.config.tcp {
            return None;
        }
        match (self.tcp, self.udp_since) {
            (Tcp::Closed { retry_at }, None) => Some(retry_at.max(self.since + tuning.tcp_after)),
            (Tcp::Open, Some(since)) => Some(since + tuning.tcp_linger),
            _ => None,
        }
    }

    pub(super) fn next_at(&self, tuning: &Tuning) -> Option<Duration> {
        let questions = self.observers.iter().map(|observer| observer.next_at).min();
        [questions, self.tcp_due(tuning)]
            .into_iter()
            .flatten()
            .min()
    }

    /// Opens and closes the connection over TCP as UDP fails and works.
    pub(super) fn step_tcp(&mut self, now: Duration, tuning: &Tuning) -> Option<TcpStep> {
        match (self.udp_is_up(), self.udp_since) {
            (true, None) => self.udp_since = Some(now),
            (false, Some(_)) => self.udp_since = None,
            _ => {}
        }
        if self.tcp_due(tuning).is_none_or(|due| due > now) {
            return None;
        }
        if self.tcp == Tcp::Open {
            self.tcp = Tcp::Closed { retry_at: now };
            return Some(TcpStep::Close);
        }
        self.tcp = Tcp::Opening;
        Some(TcpStep::Open)
    }
}
