//! Tests that the code matches the examples and limits of `docs/paths.md`.

use longhaul_network::reach::probe::{PROBE_BYTES_MAX, Probe, ProbeError};
use longhaul_network::reach::signal::{self, SIGNAL_BYTES_MAX, SignalError};
use longhaul_paths::{Candidate, Kind, Mapping, Message, Offer, Origin, Plan};
use proptest::prelude::*;
use std::net::SocketAddr;
use std::time::Duration;

const PAGE: &str = include_str!("../../../../docs/paths.md");

/// Returns the bytes of an example.
fn example(name: &str) -> Vec<u8> {
    let (_, rest) = PAGE.split_once(&format!("```bytes {name}\n")).unwrap();
    let (block, _) = rest.split_once("```").unwrap();
    let bytes = block.split_whitespace();
    bytes.map(|b| u8::from_str_radix(b, 16).unwrap()).collect()
}

fn candidate(origin: Origin, address: &str) -> Candidate {
    let address = address.parse().unwrap();
    Candidate { origin, address }
}

fn answer() -> Message {
    Message {
        kind: Kind::Answer {
            start_in: Duration::from_micros(12_500),
        },
        instance: 0x1122_3344_5566_7788,
        round: 7,
        plan: Plan::Search,
        round_trip: Duration::from_millis(25),
        offer: Offer {
            candidates: vec![
                candidate(Origin::Host, "[2001:db8::1]:7400"),
                candidate(Origin::Host, "192.168.1.2:7400"),
                candidate(Origin::Reflexive, "203.0.113.1:40001"),
            ],
            mapping: Mapping::Dependent { step: Some(2) },
            udp_blocked: false,
        },
    }
}

fn call() -> Message {
    Message {
        kind: Kind::Call,
        round: 8,
        plan: Plan::Punch,
        round_trip: Duration::ZERO,
        offer: Offer {
            udp_blocked: true,
            ..Offer::default()
        },
        ..answer()
    }
}

#[test]
fn signals() {
    for (message, name) in [(answer(), "answer"), (call(), "call")] {
        assert_eq!(signal::encode(&message), example(name), "{name}");
        assert_eq!(signal::decode(&example(name)), Ok(message), "{name}");
    }
}

#[test]
fn probes() {
    let observed = |text: &str| Some(text.parse::<SocketAddr>().unwrap());
    let ack = |observed| Probe::Ack { id: 5, observed };
    for (probe, name) in [
        (Probe::Probe { id: 5 }, "probe"),
        (ack(observed("203.0.113.1:40001")), "acknowledgement ipv4"),
        (ack(observed("[2001:db8::1]:7400")), "acknowledgement ipv6"),
    ] {
        assert_eq!(probe.encode().to_vec(), example(name), "{name}");
        assert_eq!(Probe::decode(&example(name)), Ok(probe), "{name}");
    }
    let none = ack(None);
    assert_eq!(Probe::decode(&none.encode()), Ok(none));
}

#[test]
fn what_is_not_as_the_page_says_is_refused() {
    let refused = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = example("answer");
        change(&mut bytes);
        signal::decode(&bytes).unwrap_err()
    };
    assert_eq!(refused(&|b| b[0] = 2), SignalError::Version(2));
    assert_eq!(refused(&|b| b[1] = 2), SignalError::Kind(2));
    assert_eq!(refused(&|b| b[27] = 17), SignalError::Candidates(17));
    assert_eq!(refused(&|b| b[29] = 5), SignalError::Family(5));
    assert_eq!(refused(&|b| b.truncate(9)), SignalError::Length(9));
    assert_eq!(refused(&Vec::clear), SignalError::Length(0));
    let length = example("answer").len();
    let cut = refused(&|b| b.truncate(length - 1));
    assert_eq!(cut, SignalError::Length(length - 1));
    let long = refused(&|b| b.resize(SIGNAL_BYTES_MAX + 1, 0));
    assert_eq!(long, SignalError::Length(SIGNAL_BYTES_MAX + 1));

    let refused = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = example("acknowledgement ipv4");
        change(&mut bytes);
        Probe::decode(&bytes).unwrap_err()
    };
    assert_eq!(refused(&|b| b[0] = 2), ProbeError::Type(2));
    assert_eq!(refused(&|b| b[1] = 5), ProbeError::Family(5));
    assert_eq!(refused(&|b| b.truncate(27)), ProbeError::Length(27));
    let long = refused(&|b| b.resize(PROBE_BYTES_MAX + 1, 0));
    assert_eq!(long, ProbeError::Length(PROBE_BYTES_MAX + 1));
}

#[test]
fn what_later_versions_add_is_ignored() {
    let mut bytes = example("answer");
    bytes.extend(b"more");
    assert_eq!(signal::decode(&bytes), Ok(answer()));
    // Unknown plans, mappings and origins.
    (bytes[2], bytes[24], bytes[28]) = (9, 9, 9);
    let message = signal::decode(&bytes).unwrap();
    assert_eq!(message.plan, Plan::Punch);
    assert_eq!(message.offer.mapping, Mapping::Unknown);
    assert_eq!(message.offer.candidates, answer().offer.candidates[1..]);
    // A start that is too far away.
    bytes[20..24].fill(0xff);
    let start_in = Duration::from_secs(2);
    assert_eq!(
        signal::decode(&bytes).unwrap().kind,
        Kind::Answer { start_in }
    );
    let mut bytes = example("probe");
    bytes.extend(b"more");
    assert_eq!(Probe::decode(&bytes), Ok(Probe::Probe { id: 5 }));
}

proptest! {
    #[test]
    fn what_is_written_is_read(
        instance in any::<u64>(),
        round in any::<u32>(),
        times in any::<(u32, bool)>(),
        step in any::<Option<i16>>(),
        addresses in prop::collection::vec(
            (any::<u128>(), any::<u16>(), any::<bool>(), 0..5_usize),
            0..16,
        ),
    ) {
        let origins = [
            Origin::Host,
            Origin::Configured,
            Origin::PortMapped,
            Origin::Reflexive,
            Origin::Predicted,
        ];
        let candidates = addresses.iter().map(|(ip, port, ipv4, origin)| {
            let ip = match ipv4 {
                true => std::net::Ipv4Addr::from(*ip as u32).into(),
                false => std::net::Ipv6Addr::from(*ip).into(),
            };
            Candidate { origin: origins[*origin], address: SocketAddr::new(ip, *port) }
        });
        let message = Message {
            kind: Kind::Call,
            instance,
            round,
            plan: Plan::Punch,
            round_trip: Duration::from_micros(times.0.into()),
            offer: Offer {
                candidates: candidates.collect(),
                mapping: Mapping::Dependent { step: step.filter(|step| *step != 0) },
                udp_blocked: times.1,
            },
        };
        let bytes = signal::encode(&message);
        prop_assert!(bytes.len() <= SIGNAL_BYTES_MAX);
        prop_assert_eq!(signal::decode(&bytes), Ok(message));
    }
}
