//! The half of a session that opens what arrives.

use super::mtu::Probe;
use super::{Keys, SessionConfig, SessionCounters};
use crate::control::{self, Message};
use crate::seal::{self, Kind, OpenCounters, OpenError, Opened, Opener};
use std::time::Duration;

/// Most answers to MTU probes, and most probes to be answered, that wait for the sending half.
/// Further ones are dropped.
const WAITING_MAX: usize = 8;

/// What opens the datagrams of one connection.
#[derive(Debug)]
pub(super) struct Opening {
    pub(super) opener: Opener,
    /// What the peer said last: the epoch of which it has opened a datagram.
    pub(super) peer_seen: u8,
    /// Whether a datagram was opened.
    pub(super) used: bool,
}

/// The half of a session that opens.
#[derive(Debug)]
pub struct Receiving<A> {
    config: SessionConfig,
    pub(super) current: Option<Opening>,
    previous: Option<(Opening, Duration)>,
    pub(super) address: Option<A>,
    pub(super) last_received: Duration,
    /// Whether the sending half has reported that nothing is received.
    pub(super) silent: bool,
    pub(super) news: News<A>,
    counters: SessionCounters,
}

/// What the sending half has to know.
#[derive(Debug)]
pub(super) struct News<A> {
    pub(super) any: bool,
    pub(super) moved_to: Option<A>,
    pub(super) answers: Vec<Probe>,
    pub(super) probes: Vec<Probe>,
}

fn add(sum: &mut OpenCounters, more: &OpenCounters) {
    sum.opened += more.opened;
    sum.malformed += more.malformed;
    sum.epoch += more.epoch;
    sum.old += more.old;
    sum.replayed += more.replayed;
    sum.forged += more.forged;
}

impl<A: Copy + Eq> Receiving<A> {
    pub(super) fn new(now: Duration, config: SessionConfig, address: Option<A>) -> Self {
        Self {
            config,
            current: None,
            previous: None,
            address,
            last_received: now,
            silent: false,
            news: News {
                any: false,
                moved_to: None,
                answers: Vec::new(),
                probes: Vec::new(),
            },
            counters: SessionCounters::default(),
        }
    }

    pub(super) fn connected(&mut self, now: Duration, opener: Opener) {
        if let Some((before, _)) = self.previous.take() {
            add(&mut self.counters.opened, before.opener.counters());
        }
        let opening = Opening {
            opener,
            peer_seen: 0,
            used: false,
        };
        let before = self.current.replace(opening);
        self.previous = before.map(|before| (before, now + self.config.previous_grace));
    }

    /// Returns the ids of the keys that datagrams are opened with.
    pub fn key_ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.openings().map(|opening| opening.opener.key_id())
    }

    pub(super) fn openings(&self) -> impl Iterator<Item = &Opening> + '_ {
        let previous = self.previous.as_ref().map(|(opening, _)| opening);
        self.current.iter().chain(previous)
    }

    /// Whether something arrived that concerns what is sent: [`super::Sending::learn`] and
    /// [`super::Sending::poll_transmit`] are to be called.
    #[inline]
    pub fn has_news(&self) -> bool {
        self.news.any
    }

    pub(super) fn counters(&self) -> SessionCounters {
        let mut counters = self.counters;
        for opening in self.openings() {
            add(&mut counters.opened, opening.opener.counters());
        }
        counters
    }

    /// Ends what has its time. To be called before [`super::Sending::learn`].
    pub fn expire(&mut self, now: Duration) {
        if let Some((previous, _)) = self.previous.take_if(|(_, until)| *until <= now) {
            add(&mut self.counters.opened, previous.opener.counters());
        }
    }

    /// Opens a datagram that came from an address, in place. Keepalives and what concerns the MTU
    /// need nothing else to be done but what [`Self::has_news`] asks for. The other messages of a
    /// control datagram are the caller's.
    pub fn open<'a>(
        &mut self,
        now: Duration,
        from: A,
        datagram: &'a mut [u8],
    ) -> Result<Opened<'a>, OpenError> {
        self.expire(now);
        let bytes = datagram.len();
        let Some(id) = seal::key_id(datagram) else {
            self.counters.opened.malformed += 1;
            return Err(OpenError::Malformed);
        };
        let is = |opening: &Opening| opening.opener.key_id() == id;
        let is_current = self.current.as_ref().is_some_and(is);
        let opening = match (&mut self.current, &mut self.previous) {
            (Some(current), _) if is_current => current,
            (_, Some((previous, _))) if previous.opener.key_id() == id => previous,
            _ => {
                self.counters.opened.malformed += 1;
                return Err(OpenError::KeyId);
            }
        };
        let epoch = opening.opener.epoch();
        let opened = opening.opener.open(now, datagram)?;
        let news = &mut self.news;
        if !opening.used || opening.peer_seen != opened.seen || opening.opener.epoch() != epoch {
            (opening.used, opening.peer_seen) = (true, opened.seen);
            news.any = true;
        }
        self.counters.received += 1;
        self.counters.received_bytes += bytes as u64;
        self.last_received = now;
        news.any |= self.silent;
        // A probe says that another path works, not that it is used.
        if is_current && opened.newest && opened.kind != Kind::PathProbe {
            self.follow(from);
        }
        match opened.kind {
            Kind::Control => self.take_control(opened.payload),
            Kind::MtuProbe => self.take_probe(opened.payload, bytes),
            Kind::Frame | Kind::ShortSegment | Kind::Fragment | Kind::PathProbe => {}
        }
        Ok(opened)
    }

    /// Lets the peer's address follow its newest datagram.
    #[inline]
    fn follow(&mut self, from: A) {
        if self.address != Some(from) && (self.config.roaming || self.address.is_none()) {
            self.address = Some(from);
            self.news.moved_to = Some(from);
            self.news.any = true;
        }
    }

    fn take_control(&mut self, payload: &[u8]) {
        let answers = &mut self.news.answers;
        let read = control::read(payload, |message| {
            if let Message::MtuAnswer { id, bytes } = message
                && answers.len() < WAITING_MAX
            {
                answers.push(Probe { id, bytes });
            }
        });
        self.news.any |= !answers.is_empty();
        self.counters.malformed += u64::from(read.is_err());
    }

    fn take_probe(&mut self, payload: &[u8], bytes: usize) {
        let (Some(id), Ok(bytes)) = (payload.first_chunk(), u16::try_from(bytes)) else {
            self.counters.malformed += 1;
            return;
        };
        if self.news.probes.len() < WAITING_MAX {
            self.news.probes.push(Probe {
                id: u32::from_le_bytes(*id),
                bytes,
            });
        }
        self.news.any = true;
    }
}

impl Keys {
    pub(super) fn apart(self) -> (seal::Sealer, Opener, seal::Side) {
        (self.sealer, self.opener, self.side)
    }
}
