//! Bounds the connections of the API's TCP socket: those that have shown the token, and, for each
//! address, those that have not.
//!
//! A connection begins as a stranger's. If there are too many strangers, the oldest of the address
//! with the most of them ends: strangers never keep out a client that has the token, nor end one
//! that has shown it.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// The maximum number of connections that have shown the token, and of those that have not.
pub(crate) const CONNECTIONS_MAX: usize = 128;
/// The maximum number of strangers' connections from one address.
const STRANGERS_PER_ADDRESS: usize = 16;

/// The connections of a socket.
pub(crate) struct Connections {
    known: Arc<Semaphore>,
    strangers: Mutex<Strangers>,
}

#[derive(Default)]
struct Strangers {
    next: u64,
    /// By number: the oldest first.
    all: BTreeMap<u64, Stranger>,
}

struct Stranger {
    from: IpAddr,
    end: Arc<Notify>,
}

/// A connection's place, given back on drop.
pub(crate) struct Seat {
    connections: Arc<Connections>,
    number: u64,
    end: Arc<Notify>,
    known: Mutex<Option<OwnedSemaphorePermit>>,
}

impl Connections {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            known: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
            strangers: Mutex::default(),
        })
    }

    /// Adds a stranger's connection, for which another stranger's may end.
    pub(crate) fn enter(self: &Arc<Self>, from: IpAddr) -> Seat {
        let from = bounded_as(from);
        let mut strangers = self.strangers();
        if let Some(stranger) = strangers.in_the_way_of(from) {
            stranger.end.notify_one();
        }
        let number = strangers.next;
        strangers.next += 1;
        let end = Arc::new(Notify::new());
        let stranger = Stranger {
            from,
            end: end.clone(),
        };
        strangers.all.insert(number, stranger);
        drop(strangers);
        Seat {
            connections: self.clone(),
            number,
            end,
            known: Mutex::default(),
        }
    }

    fn strangers(&self) -> MutexGuard<'_, Strangers> {
        // What is inside is whole whenever the lock is free.
        self.strangers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Strangers {
    /// Removes the stranger that must end before another one comes from this address.
    fn in_the_way_of(&mut self, from: IpAddr) -> Option<Stranger> {
        let of = |from: IpAddr| {
            self.all
                .values()
                .filter(move |one| one.from == from)
                .count()
        };
        let crowded = if of(from) >= STRANGERS_PER_ADDRESS {
            from
        } else if self.all.len() >= CONNECTIONS_MAX {
            let all = self.all.values().map(|stranger| stranger.from);
            all.max_by_key(|from| of(*from))?
        } else {
            return None;
        };
        let (number, _) = self.all.iter().find(|(_, one)| one.from == crowded)?;
        let number = *number;
        self.all.remove(&number)
    }
}

impl Seat {
    /// Takes the place of a client that has shown the token. If all of these are taken, the
    /// connection goes on as a stranger's.
    pub(crate) fn token_shown(&self) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.is_some() {
            return;
        }
        *known = self.connections.known.clone().try_acquire_owned().ok();
        if known.is_some() {
            self.connections.strangers().all.remove(&self.number);
        }
    }

    /// Returns when the connection must end.
    pub(crate) async fn end(&self) {
        self.end.notified().await;
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.connections.strangers().all.remove(&self.number);
    }
}

/// Returns the address that is bounded: of IPv6 the network of 64 bits, which one host may have
/// all of.
fn bounded_as(from: IpAddr) -> IpAddr {
    match from.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
        address @ IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    fn address(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    fn ended(seats: &[Seat]) -> usize {
        let ended = |seat: &&Seat| seat.end().now_or_never().is_some();
        seats.iter().filter(ended).count()
    }

    #[test]
    fn one_address_has_some_of_the_room() {
        let connections = Connections::new();
        let other = connections.enter(address(2));
        let mut seats: Vec<Seat> = (0..STRANGERS_PER_ADDRESS)
            .map(|_| connections.enter(address(1)))
            .collect();
        assert_eq!(ended(&seats), 0);
        seats.push(connections.enter(address(1)));
        assert_eq!(ended(&seats[..1]), 1, "the oldest");
        assert_eq!(ended(&seats), 0, "and no other");
        assert_eq!(connections.strangers().all.len(), STRANGERS_PER_ADDRESS + 1);
        assert_eq!(ended(&[other]), 0);
        drop(seats);
        assert!(connections.strangers().all.is_empty());
    }

    #[test]
    fn strangers_make_way_for_each_other_and_end_nobody_with_the_token() {
        let connections = Connections::new();
        let known = connections.enter(address(250));
        known.token_shown();
        let crowd: Vec<Seat> = (0..STRANGERS_PER_ADDRESS)
            .map(|_| connections.enter(address(1)))
            .collect();
        let single: Vec<Seat> = (2..)
            .take(CONNECTIONS_MAX - STRANGERS_PER_ADDRESS)
            .map(|last| connections.enter(address(last)))
            .collect();
        assert_eq!(ended(&crowd) + ended(&single), 0);
        // The token holder is one of many.
        let holder = connections.enter(address(200));
        let late = connections.enter(address(201));
        assert_eq!(ended(&crowd), 2, "of the address with the most");
        assert_eq!(ended(&single), 0);
        holder.token_shown();
        drop((single, late));
        let flood: Vec<Seat> = (0..=255)
            .map(|last| connections.enter(address(last)))
            .collect();
        assert_eq!(connections.strangers().all.len(), CONNECTIONS_MAX);
        assert_eq!(ended(&[known, holder]), 0);
        drop(flood);
    }

    #[test]
    fn the_room_for_token_holders_is_bounded_too() {
        let connections = Connections::new();
        let seats: Vec<Seat> = (0..=CONNECTIONS_MAX as u64)
            .map(|number| {
                let last = (number % 8) as u8;
                let seat = connections.enter(address(last));
                seat.token_shown();
                seat.token_shown();
                seat
            })
            .collect();
        assert_eq!(connections.known.available_permits(), 0);
        assert_eq!(connections.strangers().all.len(), 1);
        drop(seats);
        assert_eq!(connections.known.available_permits(), CONNECTIONS_MAX);
    }

    #[test]
    fn addresses_of_one_host_are_one() {
        let of = |text: &str| bounded_as(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::2:3:4:5"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.1"), address(1));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
    }
}
