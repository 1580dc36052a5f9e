//! Tests the packets against ones written out by hand.

use super::*;
use crate::switch::testing::{arp, solicitation};

const A: Mac = Mac([2, 0, 0, 0, 0, 0xa]);
const B: Mac = Mac([2, 0, 0, 0, 0, 0xb]);
const ADDRESS_A: [u8; 4] = [10, 0, 0, 1];
const ADDRESS_B: [u8; 4] = [10, 0, 0, 2];

fn read(frame: &[u8]) -> Option<Neighbour> {
    parse(&Ethernet::parse(frame).unwrap())
}

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

#[test]
fn an_arp_reply_by_hand() {
    let reply = MadeFrame::arp_reply(None, (B, ADDRESS_B), (A, ADDRESS_A));
    let mut expected = hex("02000000000a 02000000000b 0806 0001 0800 06 04 0002 \
         02000000000b 0a000002 02000000000a 0a000001");
    expected.resize(60, 0);
    assert_eq!(reply.bytes(), expected);
    let told = Neighbour::Tells {
        address: Address::V4(ADDRESS_B),
        router: None,
    };
    assert_eq!(read(reply.bytes()), Some(told));
}

#[test]
fn announcements_by_hand() {
    let [request, reply] = MadeFrame::gratuitous_arp(Some(100), A, ADDRESS_A);
    let head = "ffffffffffff 02000000000a 8100 0064 0806 0001 0800 06 04";
    let mut expected = hex(&format!(
        "{head} 0001 02000000000a 0a000001 000000000000 0a000001"
    ));
    expected.resize(60, 0);
    assert_eq!(request.bytes(), expected);
    let mut expected = hex(&format!(
        "{head} 0002 02000000000a 0a000001 02000000000a 0a000001"
    ));
    expected.resize(60, 0);
    assert_eq!(reply.bytes(), expected);
    for frame in [request, reply] {
        assert!(matches!(read(frame.bytes()), Some(Neighbour::Tells { .. })));
    }
    let mut expected = hex("ffffffffffff 02000000000a 8035 0001 0800 06 04 0003 \
         02000000000a 00000000 02000000000a 00000000");
    expected.resize(60, 0);
    assert_eq!(MadeFrame::rarp(None, A).bytes(), expected);
}

#[test]
fn advertisements_by_hand() {
    let address: [u8; 16] = *hex("20010db8000000000000000000000001")
        .first_chunk()
        .unwrap();
    let made = MadeFrame::unsolicited(None, A, address, true);
    // The sum of the pseudo-header: 2001 + 0db8 + 0001, ff02 + 0001, 0020, 003a; of the packet:
    // 8800 + a000 + 2001 + 0db8 + 0001 + 0201 + 0200 + 0000 + 000a.
    let sum = [
        0x2001u32, 0x0db8, 1, 0xff02, 1, 0x20, 0x3a, 0x8800, 0xa000, 0x2001, 0x0db8, 1, 0x0201,
        0x0200, 0, 0x000a,
    ];
    let sum: u32 = sum.iter().sum();
    let folded = !((sum & 0xffff) + (sum >> 16)) as u16;
    let expected = hex(&format!(
        "333300000001 02000000000a 86dd 60000000 0020 3a ff \
         20010db8000000000000000000000001 ff020000000000000000000000000001 \
         88 00 {folded:04x} a0000000 20010db8000000000000000000000001 0201 02000000000a"
    ));
    assert_eq!(made.bytes(), expected);
    let told = Neighbour::Tells {
        address: Address::V6(address),
        router: Some(true),
    };
    assert_eq!(read(made.bytes()), Some(told));
    let reply = MadeFrame::neighbour_reply(Some(7), (A, address), (B, [0xfe; 16]), false);
    assert_eq!(reply.bytes()[18 + 40 + 4], FLAG_SOLICITED);
    assert!(read(reply.bytes()).is_some());
    assert_eq!(reply.bytes().len(), MADE_BYTES_MAX);
}

#[test]
fn probes_are_told_from_questions() {
    let target = Address::V4(ADDRESS_B);
    let probes = Some(Neighbour::Probes { target });
    assert_eq!(read(&arp(A, [0; 4], ADDRESS_B)), probes);
    let asks = Neighbour::Asks {
        address: Address::V4(ADDRESS_A),
        target: Address::V4(ADDRESS_B),
    };
    assert_eq!(read(&arp(A, ADDRESS_A, ADDRESS_B)), Some(asks));
    let tells = Neighbour::Tells {
        address: Address::V4(ADDRESS_A),
        router: None,
    };
    assert_eq!(read(&arp(A, ADDRESS_A, ADDRESS_A)), Some(tells));
    let (a, b) = ([0xfd; 16], [0xfc; 16]);
    let asks = Neighbour::Asks {
        address: Address::V6(a),
        target: Address::V6(b),
    };
    assert_eq!(read(&solicitation(A, a, b)), Some(asks));
    let target = Address::V6(b);
    let probes = Some(Neighbour::Probes { target });
    assert_eq!(read(&solicitation(A, [0; 16], b)), probes);
}

#[test]
fn what_a_station_must_not_believe_is_ignored() {
    let good = arp(A, ADDRESS_A, ADDRESS_B);
    for (at, value) in [(14, 1), (16, 9), (18, 5), (21, 3), (22, 3), (28, 127)] {
        let mut bad = good.clone();
        bad[at] = value;
        assert_eq!(read(&bad), None, "{at}");
    }
    assert_eq!(read(&good[..41]), None);
    let good = solicitation(A, [0xfd; 16], [0xfc; 16]);
    let length = good.len();
    for at in [
        14,
        20,
        21,
        54,
        55,
        57,
        62,
        length - 8,
        length - 7,
        length - 1,
    ] {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        assert_eq!(read(&bad), None, "{at}");
    }
    for length in 14..length {
        assert_eq!(read(&good[..length]), None, "{length}");
    }
}
