//! Tests that frames follow a guest that moves to another host.

use crate::world::*;
use longhaul_network::plane::{Place, PlaneEvent};
use longhaul_overlay::Mac;
use longhaul_overlay::switch::Redirect;

const GUEST: [u8; 6] = [2, 0, 0, 0, 0xaa, 1];
const ADDRESS: [u8; 4] = [10, 0, 0, 77];
const ADDRESS6: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x77];

/// A question of the guest, which tells its IPv4 address.
fn arp() -> Vec<u8> {
    let mut frame = [ALL, GUEST].concat();
    frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend(GUEST);
    frame.extend(ADDRESS);
    frame.extend([0; 6]);
    frame.extend([10, 0, 0, 200]);
    frame.resize(60, 0);
    frame
}

/// The guest's advertisement, which tells its IPv6 address.
fn advertisement() -> Vec<u8> {
    let mut icmp = vec![136, 0, 0, 0, 0x20, 0, 0, 0];
    icmp.extend(ADDRESS6);
    icmp.extend([2, 1]);
    icmp.extend(GUEST);
    let all_nodes = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
    let mut covered = [ADDRESS6, all_nodes].concat();
    covered.extend([0, 0, 0, icmp.len() as u8, 0, 0, 0, 58]);
    covered.extend(&icmp);
    let sum: u32 = covered
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    icmp[2..4].copy_from_slice(&sum.to_be_bytes());
    let mut frame = vec![0x33, 0x33, 0, 0, 0, 1];
    frame.extend(GUEST);
    frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, icmp.len() as u8, 58, 255]);
    frame.extend(ADDRESS6);
    frame.extend(all_nodes);
    frame.extend(icmp);
    frame
}

/// What QEMU sends when a guest begins to run: the bridge of its host learns where it is. This one
/// goes no further than the bridge (LLDP).
fn at_the_bridge() -> Vec<u8> {
    frame([1, 0x80, 0xc2, 0, 0, 0xe], GUEST, None, "I am here")
}

fn to_guest(from: u8, text: &str) -> Vec<u8> {
    frame(GUEST, mac(from), None, text)
}

struct Moved {
    world: World,
    /// Where the guest was, where it is, and a third host's station.
    cards: Vec<Card>,
}

/// A guest at the first host of three, which all know it.
fn before(announce: bool) -> Moved {
    let mut setup = Setup {
        hosts: 3,
        ..Setup::default()
    };
    if !announce {
        setup.config.announce_again = Vec::new();
    }
    let world = World::blue(setup);
    let cards: Vec<Card> = (0..3).map(|host| world.card(host, BLUE, "card")).collect();
    let plane = &world.hosts[0].plane;
    plane.pin(BLUE, Mac(GUEST), 1).unwrap();
    for other in &cards[1..] {
        cards[0].reaches(&arp(), other);
        cards[0].reaches(&advertisement(), other);
    }
    cards[2].reaches(&to_guest(3, "before"), &cards[0]);
    Moved { world, cards }
}

fn redirect() -> Redirect {
    Redirect {
        mac: Mac(GUEST),
        now_at: id(1),
        generation: 2,
    }
}

#[test]
fn an_announcement_is_seen_by_stations_and_moves_the_traffic() {
    if !is_root() {
        return;
    }
    let Moved { world, cards } = before(true);
    // All switches know the addresses of the guest by now.
    assert!(world.network_status(1, BLUE).addresses >= 2);
    world.hosts[0].plane.withdraw(BLUE, redirect()).unwrap();
    world.hosts[1].plane.pin(BLUE, Mac(GUEST), 2).unwrap();
    cards[1].send(&at_the_bridge());
    assert!(world.hosts[1].plane.announce(BLUE, Mac(GUEST)).unwrap());
    // The station hears RARP, both kinds of gratuitous ARP, and an advertisement that overrides.
    let mut missing = vec!["RARP", "ARP request", "ARP reply", "advertisement"];
    cards[2].until("all announcements", |frame| {
        if frame[6..12] == GUEST {
            let sender = frame.get(28..32) == Some(&ADDRESS);
            let operation: [u8; 2] = frame[20..22].try_into().unwrap();
            let what = match (&frame[12..14], operation) {
                ([0x80, 0x35], [0, 3]) => "RARP",
                ([8, 6], [0, 1]) if sender && frame[38..42] == ADDRESS => "ARP request",
                ([8, 6], [0, 2]) if sender => "ARP reply",
                ([0x86, 0xdd], _) if frame[54] == 136 && frame[58] == 0x20 => "advertisement",
                _ => "",
            };
            missing.retain(|other| *other != what);
        }
        missing.is_empty()
    });
    eventually("the other hosts were told", || {
        [0, 2]
            .map(|host| world.network_status(host, BLUE).switch.told)
            .iter()
            .all(|told| *told > 0)
    });
    // From now on everything goes to the new host, and only there.
    let announce = || cards[1].send(&at_the_bridge());
    cards[2].reaches_after(announce, &to_guest(3, "after"), &cards[1]);
    // A datagram may be lost, and a late frame of the guest may have come to the new host's bridge.
    cards[0].reaches_after(announce, &to_guest(4, "from the old host"), &cards[1]);
    // The old place sees none of it.
    cards[2].send(&frame(ALL, mac(3), None, "end"));
    let got = cards[0].until("the end", |got| *got == frame(ALL, mac(3), None, "end"));
    assert!(got.iter().all(|got| *got != to_guest(3, "after")));
}

#[test]
fn what_is_sent_to_the_old_place_is_redirected() {
    if !is_root() {
        return;
    }
    let Moved { world, cards } = before(false);
    // Nobody announces anything.
    world.hosts[1].plane.pin(BLUE, Mac(GUEST), 2).unwrap();
    world.hosts[0].plane.withdraw(BLUE, redirect()).unwrap();
    // Frames that the guest sent before may still arrive there.
    let announce = || cards[1].send(&at_the_bridge());
    cards[2].reaches_after(announce, &to_guest(3, "after"), &cards[1]);
    let told = world.network_status(2, BLUE).switch.told;
    assert_eq!(told, 1, "by one redirect");
    // One that is older has no effect.
    world.hosts[0]
        .plane
        .withdraw(
            BLUE,
            Redirect {
                now_at: id(2),
                generation: 1,
                ..redirect()
            },
        )
        .unwrap();
    cards[2].reaches(&to_guest(3, "still"), &cards[1]);
}

#[test]
fn a_guest_that_runs_here_is_not_taken_away() {
    if !is_root() {
        return;
    }
    let Moved { mut world, cards } = before(true);
    let plane = &world.hosts[1].plane;
    plane.pin(BLUE, Mac(GUEST), 9).unwrap();
    plane.announce(BLUE, Mac(GUEST)).unwrap();
    world.hosts[0].event("the claim is reported", |event| {
        matches!(event, PlaneEvent::Contested { host, announcement, .. }
            if *host == id(1) && announcement.generation == 9)
    });
    // Frames with its address from elsewhere are dropped, after the time in which they may be late.
    let world_ref = &world;
    eventually("a frame is refused", || {
        cards[1].send(&frame(ALL, GUEST, None, "forged"));
        let switch = world_ref.network_status(0, BLUE).switch;
        switch.not_forwarded(longhaul_overlay::switch::Reason::Spoofed) > 0
    });
    world.hosts[0].event("it is reported", |event| {
        matches!(event, PlaneEvent::Spoofed { place: Place::Host(host), mac, .. }
            if *host == id(1) && *mac == Mac(GUEST))
    });
    assert!(world.hosts[0].plane.unpin(BLUE, Mac(GUEST)).unwrap());
    assert!(!world.hosts[0].plane.unpin(BLUE, Mac(GUEST)).unwrap());
    assert!(!world.hosts[0].plane.announce(BLUE, Mac(GUEST)).unwrap());
}
